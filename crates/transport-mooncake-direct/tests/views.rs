//! Views of mapped memory: no release, claim or close changes what they show. Silence is another
//! process's matter: see the fault tests.

mod support;

use std::{sync::Arc, time::Duration};

use capture_arena::{Backing, RegionPool};
use support::*;
use transport_core::{
    ClientId, Descriptor, Destination, ErrorKind, FetchOptions, FetchRequest, Location,
    SessionName, Transport,
};
use transport_mooncake_direct::{CaptureSink, DirectTransport, Engine};

fn named(client: &str) -> DirectTransport {
    DirectTransport::builder()
        .engine(Engine::Shm)
        .client_id(ClientId::new(client).unwrap())
        .lease(Duration::from_millis(300))
        .build()
        .unwrap()
}

fn resident(sink: &CaptureSink) -> u64 {
    sink.health_blocking().unwrap().resident_samples
}

#[test]
fn the_last_of_many_views_sends_the_release_wherever_it_is_dropped() {
    let sink = sink(MIB);
    let consumer = consumer(Engine::Shm);
    let sample = publish(&sink, "x", 1, &[5000, 0, 8]);
    let views: Vec<_> = (0..4).map(|_| view(&consumer, &sample).unwrap()).collect();
    // Parts of a tensor count like the whole.
    let part = views[0].tensors[0].data.slice(4990..5000).unwrap();
    let report = consumer.release_blocking(vec![sample.clone().into(), sample.clone().into()]);
    let report = report.unwrap();
    assert_eq!((report.deferred, report.already_gone, report.released), (1, 1, 0));
    std::thread::scope(|scope| {
        for view in views {
            scope.spawn(move || drop(view));
        }
    });
    assert_eq!(consumer.health_blocking().unwrap().deferred_samples, 1);
    assert_eq!(resident(&sink), 1);
    assert_eq!(part.as_ref()[9], byte(1, 4999));
    drop(part);
    eventually("the release arrives", || resident(&sink) == 0);
    assert_eq!(consumer.health_blocking().unwrap().deferred_samples, 0);
    // A fetch that comes right after the last view asks after the release.
    for round in 0..50 {
        let sample = publish(&sink, "y", round, &[100]);
        let viewed = view(&consumer, &sample).unwrap();
        assert_eq!(consumer.release_blocking(vec![sample.clone().into()]).unwrap().deferred, 1);
        drop(viewed);
        assert_eq!(view(&consumer, &sample).unwrap_err().kind(), ErrorKind::NotFound);
    }
}

#[test]
fn a_hold_that_is_let_go_ends_with_its_last_view_and_frees_nothing() {
    let sink = sink(MIB);
    let (viewer, stranger) = (consumer(Engine::Shm), consumer(Engine::Tcp));
    let free = |sample: &Arc<Descriptor>| {
        stranger.release_blocking(vec![sample.clone().into()]).unwrap().released
    };
    // Somebody else frees it meanwhile: it stays for the views, and goes with the last one.
    let sample = publish(&sink, "x", 1, &[5000, 0, 8]);
    let views = [view(&viewer, &sample).unwrap(), view(&viewer, &sample).unwrap()];
    let_go(&viewer, &sample);
    let_go(&viewer, &sample); // once more changes nothing
    assert_eq!(viewer.health_blocking().unwrap().deferred_samples, 0, "it is no release");
    free(&sample);
    let [first, last] = views;
    drop(first);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(resident(&sink), 1, "still looked at");
    assert_eq!(last.tensors[0].data.as_ref()[4999], byte(1, 4999));
    drop(last);
    eventually("the hold ends with the last view", || resident(&sink) == 0);
    // Nobody frees it: it stays when the hold has ended, and no hold is left to wait for.
    let sample = publish(&sink, "y", 2, &[5000]);
    let viewed = view(&viewer, &sample).unwrap();
    let_go(&viewer, &sample);
    let lines = sink.control_stats().lines;
    drop(viewed);
    eventually("the publisher hears of it", || sink.control_stats().lines > lines);
    assert_eq!(resident(&sink), 1, "nothing is freed");
    fetch_and_check(&stranger, &sample, 2).unwrap();
    assert_eq!(free(&sample), 1);
    eventually("freed at once, for nobody holds it", || resident(&sink) == 0);
    // A fetch before the last view is dropped keeps the hold, which its own ending ends.
    let sample = publish(&sink, "z", 3, &[5000]);
    let first = view(&viewer, &sample).unwrap();
    let_go(&viewer, &sample);
    let second = view(&viewer, &sample).unwrap();
    drop(first);
    free(&sample);
    drop(second);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(resident(&sink), 1, "held by whoever fetched it last");
    let_go(&viewer, &sample);
    eventually("nobody looks: the hold ends at once", || resident(&sink) == 0);
    // A release outweighs an end of the hold, before it and after it.
    for release_first in [true, false] {
        let sample = publish(&sink, "w", 4, &[100]);
        let viewed = view(&viewer, &sample).unwrap();
        if !release_first {
            let_go(&viewer, &sample);
        }
        assert_eq!(viewer.release_blocking(vec![sample.clone().into()]).unwrap().deferred, 1);
        if release_first {
            let_go(&viewer, &sample);
        }
        assert_eq!(resident(&sink), 1);
        drop(viewed);
        eventually("released with the view", || resident(&sink) == 0);
    }
    assert_eq!(viewer.health_blocking().unwrap().deferred_samples, 0);
}

fn let_go(consumer: &DirectTransport, sample: &Arc<Descriptor>) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(consumer.let_go(vec![sample.clone()])).unwrap();
}

#[test]
fn a_release_during_a_copy_waits_for_its_end() {
    let sink = sink(MIB);
    let pool = RegionPool::new(Backing::heap(MIB).unwrap()).unwrap();
    let builder = DirectTransport::builder().engine(Engine::Shm).pool(pool);
    let consumer = builder.transfer_delay(Duration::from_millis(400)).build().unwrap();
    let sample = publish(&sink, "x", 1, &[5000]);
    std::thread::scope(|scope| {
        let copying = scope.spawn(|| {
            let request = FetchRequest::new(sample.clone(), Destination::Pool);
            consumer.fetch_blocking(vec![request], &FetchOptions::default())
        });
        eventually("it is claimed", || sink.control_stats().lines >= 2);
        std::thread::sleep(Duration::from_millis(50));
        let report = consumer.release_blocking(vec![sample.clone().into()]).unwrap();
        assert_eq!((report.deferred, report.released), (1, 0));
        assert_eq!(resident(&sink), 1, "the copy is still being made");
        let error = copying.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    });
    eventually("the release arrives", || resident(&sink) == 0);
}

#[test]
fn a_claim_that_does_not_fit_takes_nothing_from_an_earlier_one() {
    let sink = sink(MIB);
    let sample = publish(&sink, "x", 1, &[1000]);
    let (epoch, seq) = (sink.arena().epoch(), sample.features[0].seq.unwrap());
    let at = address(&sample, 0);
    let mut holder = raw(sink.control());
    say(&mut holder, r#"{"op":"hello","version":1,"client":"holder","lease_ms":30000}"#);
    read_line(&mut holder);
    for (at, outcome) in [(at, r#""stale":[]"#), (at + 512, r#""stale":[0]"#)] {
        let object = format!(r#"["test/x/g1/t0",{seq},{at},1000]"#);
        say(&mut holder, format!(r#"{{"op":"hold","id":1,"epoch":{epoch},"objects":[{object}]}}"#));
        let answer = read_line(&mut holder);
        assert!(answer.contains(outcome), "{answer}");
    }
    // Somebody else frees it: it drains, and stays for its holder.
    let stranger = consumer(Engine::Tcp);
    stranger.release_blocking(vec![sample.into()]).unwrap();
    assert_eq!(resident(&sink), 1);
    say(&mut holder, r#"{"op":"bye"}"#);
    eventually("the holder leaves", || resident(&sink) == 0);
}

#[test]
fn two_consumers_of_one_name_cannot_release_each_others_views() {
    let sink = sink(MIB);
    let first = named("twin");
    let sample = publish(&sink, "x", 1, &[1000]);
    let viewed = view(&first, &sample).unwrap();
    for engine in [Engine::Shm, Engine::Tcp] {
        let second = DirectTransport::builder()
            .engine(engine)
            .client_id(ClientId::new("twin").unwrap())
            .build()
            .unwrap();
        let error = second.release_blocking(vec![sample.clone().into()]).unwrap_err().to_string();
        assert!(error.contains("client id of its own") || error.contains("another"), "{error}");
        assert_eq!(resident(&sink), 1);
    }
    // The first one ends, but not what it looks at.
    assert_eq!(first.release_blocking(vec![sample.into()]).unwrap().deferred, 1);
    first.close_blocking();
    eventually("its goodbye is heard", || sink.health_blocking().unwrap().stalled_clients == 1);
    let other = publish(&sink, "y", 2, &[1000]);
    let third = named("twin");
    let busy = view(&third, &other).unwrap_err().to_string();
    assert!(busy.contains("another"), "{busy}");
    assert_eq!(viewed.tensors[0].data.as_ref()[999], byte(1, 999));
    drop((viewed, third));
    eventually("the first one's sample goes", || resident(&sink) == 1);
    view(&named("twin"), &other).unwrap();
}

#[test]
fn a_server_is_known_under_one_name() {
    for engine in [Engine::Shm, Engine::Tcp] {
        let (sink, consumer) = (sink(MIB), consumer(engine));
        let sample = publish(&sink, "x", 1, &[1000]);
        let mut renamed = Descriptor::clone(&sample);
        let Location::Arena(arena) = &mut renamed.location else { panic!("not in an arena") };
        arena.control = SessionName::new("localhost", arena.control.port()).unwrap();
        let found = arena.control.to_string();
        let renamed = Arc::new(renamed);
        fetch_and_check(&consumer, &sample, 1).unwrap();
        let errors = [
            fetch_and_check(&consumer, &renamed, 1).unwrap_err(),
            consumer.release_blocking(vec![renamed.clone().into()]).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
            assert_eq!(error.context("found"), Some(&*found));
        }
        assert_eq!(resident(&sink), 1);
    }
}

#[test]
fn samples_that_do_not_tell_their_life_are_freed_but_not_mapped() {
    let sink = sink(MIB);
    let consumer = consumer(Engine::Shm);
    // Two names: a free that nobody confirms may arrive late, and names no life.
    for (name, missing) in [("x", "epoch"), ("y", "sequence number")] {
        let mut descriptor = Descriptor::clone(&publish(&sink, name, 1, &[1000, 8]));
        match &mut descriptor.location {
            Location::Arena(arena) if missing == "epoch" => arena.epoch = None,
            _ => descriptor.features[1].seq = None,
        }
        let descriptor = Arc::new(descriptor);
        let error = view(&consumer, &descriptor).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert_eq!(error.context("missing"), Some(missing));
        assert!(error.context("key").unwrap().contains(&format!("test/{name}/g1")), "{error}");
        assert_eq!(resident(&sink), 1);
        let report = consumer.release_blocking(vec![descriptor.clone().into()]).unwrap();
        // Where no epoch is told the publisher is taken for one that answers no frees.
        assert_eq!(report.released + report.unconfirmed, 1, "{missing}: {report:?}");
        eventually("it is gone", || resident(&sink) == 0);
        let report = consumer.release_blocking(vec![descriptor.into()]).unwrap();
        assert_eq!(report.already_gone + report.unconfirmed, 1, "once: {report:?}");
    }
}

/// Whoever frees by name, what this client looks at stays until it says with its life that it is done.
#[test]
fn a_free_by_name_takes_nothing_away_that_is_looked_at() {
    let sink = sink(16 << 10);
    let consumer = consumer(Engine::Shm);
    let sample = publish(&sink, "x", 1, &[8000]);
    let viewed = view(&consumer, &sample).unwrap();
    let mut nameless = Descriptor::clone(&sample);
    let Location::Arena(arena) = &mut nameless.location else { panic!("not in an arena") };
    arena.epoch = None;
    nameless.features[0].seq = None;
    consumer.release_blocking(vec![Arc::new(nameless).into()]).unwrap();
    // The rest of the arena is written all over, again and again.
    for round in 2..20 {
        let other = publish(&sink, "y", round, &[7000]);
        consumer.release_blocking(vec![other.into()]).unwrap();
        let bytes = viewed.tensors[0].data.as_ref();
        assert!((0..8000).all(|at| bytes[at] == byte(1, at)), "round {round}");
    }
    drop(viewed);
    consumer.release_blocking(vec![sample.into()]).unwrap();
    eventually("all of it is free", || {
        let health = sink.health_blocking().unwrap();
        health.arena_free_bytes == health.arena_bytes
    });
}
