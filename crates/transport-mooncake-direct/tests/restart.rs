//! Publishers that go away, come back as somebody else, and holds that lapse.

mod support;

use std::time::{Duration, Instant};

use capture_arena::{Arena, ArenaConfig, Backing, BaseAddress};
use support::*;
use transport_core::{ClientId, Destination, ErrorKind, FetchOptions, FetchRequest, RemoteAddr};
use transport_mooncake_direct::{CaptureSink, DirectTransport, Engine, SinkConfig};

/// A publisher on given ports, with a given arena base: as like its predecessor as it can be.
fn sink_at(ports: Option<[u16; 3]>, bytes: u64) -> CaptureSink {
    let config = ArenaConfig::default().base(BaseAddress::Fixed(RemoteAddr(1 << 40)));
    let arena = Arena::start(Backing::shared(bytes).unwrap(), config).unwrap();
    let mut sink = SinkConfig::default();
    if let Some([session, data, control]) = ports {
        sink.data_bind.set_port(session);
        sink.transfer_bind = Some(([127, 0, 0, 1], data).into());
        sink.control_bind.set_port(control);
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        // Sockets of the predecessor may take a moment to go.
        match CaptureSink::start(arena.clone(), sink.clone()) {
            Ok(sink) => return sink,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn ports(sink: &CaptureSink) -> [u16; 3] {
    [sink.session().port(), data_port(sink.session()).port(), sink.control().port()]
}

#[test]
fn a_restarted_publisher_costs_at_most_one_failed_read_and_never_gives_old_bytes() {
    for engine in [Engine::Shm, Engine::Tcp] {
        let consumer = consumer(engine);
        let mut sink = sink_at(None, MIB);
        let ports = ports(&sink);
        let mut old = publish(&sink, "same", 1, &[1000, 64]);
        fetch_and_check(&consumer, &old, 1).unwrap();
        for life in 2..5u8 {
            sink.close_blocking();
            drop(sink);
            sink = sink_at(Some(ports), u64::from(life) * MIB);
            let new = publish(&sink, "same", life, &[1000, 64]);
            assert_eq!(address(&old, 0), address(&new, 0), "the same place, the same key");
            // The old descriptor never shows the new bytes.
            let error = fetch_and_check(&consumer, &old, life - 1).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Stale | ErrorKind::PeerGone),
                "{engine:?} {error}"
            );
            assert!(error.context("key").is_some(), "{error}");
            fetch_and_check(&consumer, &new, life).unwrap();
            let report =
                consumer.release_blocking(vec![old.clone().into(), new.clone().into()]).unwrap();
            assert_eq!((report.already_gone, report.released), (1, 1), "{report:?}");
            old = new;
        }
    }
}

#[test]
fn new_reads_work_at_once_even_if_the_old_life_was_in_use() {
    for engine in [Engine::Shm, Engine::Tcp] {
        let consumer = consumer(engine);
        let sink = sink_at(None, MIB);
        let ports = ports(&sink);
        let old = publish(&sink, "old", 1, &[1000]);
        fetch_and_check(&consumer, &old, 1).unwrap();
        sink.close_blocking();
        drop(sink);
        let sink = sink_at(Some(ports), MIB);
        let new = publish(&sink, "new", 2, &[1000]);
        // Nothing has told the consumer; the first read of the new life succeeds.
        fetch_and_check(&consumer, &new, 2).unwrap();
    }
}

#[test]
fn a_view_outlives_its_publisher() {
    let consumer = consumer(Engine::Shm);
    let sink = sink_at(None, MIB);
    let ports = ports(&sink);
    let sample = publish(&sink, "viewed", 3, &[5000]);
    let fetched = view(&consumer, &sample).unwrap();
    sink.close_blocking();
    drop(sink);
    let bytes = fetched.tensors[0].data.as_ref();
    assert!(bytes.iter().enumerate().all(|(at, &b)| b == byte(3, at)));
    // Old and new side by side.
    let sink = sink_at(Some(ports), MIB);
    let new = publish(&sink, "viewed", 4, &[5000]);
    let again = view(&consumer, &new).unwrap();
    assert!(again.tensors[0].data.as_ref().iter().enumerate().all(|(at, &b)| b == byte(4, at)));
    assert!(bytes.iter().enumerate().all(|(at, &b)| b == byte(3, at)));
}

#[test]
fn a_publisher_that_is_gone_is_an_error_in_time() {
    for engine in [Engine::Shm, Engine::Tcp] {
        let consumer = consumer(engine);
        let sink = sink_at(None, MIB);
        let [a, b] = ["a", "b"].map(|name| publish(&sink, name, 1, &[1000]));
        fetch_and_check(&consumer, &a, 1).unwrap();
        sink.close_blocking();
        drop(sink);
        let start = Instant::now();
        let error = fetch_and_check(&consumer, &b, 1).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::PeerGone | ErrorKind::Timeout),
            "{engine:?} {error}"
        );
        let error = consumer.release_blocking(vec![a.into()]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}");
        assert!(start.elapsed() < Duration::from_secs(12), "{:?}", start.elapsed());
        assert!(consumer.health_blocking().unwrap().last_error.is_some());
    }
}

#[test]
fn samples_born_held_need_no_claim_but_released_ones_do() {
    for engine in [Engine::Shm, Engine::Tcp] {
        let sink = sink(MIB);
        let (consumer, stranger) = (consumer(engine), consumer(engine));
        let deadline = Instant::now() + Duration::from_secs(5);
        consumer.announce(sink.control(), deadline).unwrap();
        let sample = publish_all(&sink, &[("a", 5)], &[700], Some(consumer.client_id())).remove(0);
        // A release by somebody else does not take it away from its holder.
        stranger.release_blocking(vec![sample.clone().into()]).unwrap();
        let lines = sink.control_stats().lines;
        fetch_and_check(&consumer, &sample, 5).unwrap();
        assert_eq!(sink.control_stats().lines, lines, "no word on the control connection");
        assert!(fetch_and_check(&stranger, &sample, 5).is_err(), "it drains");
        let report = consumer.release_blocking(vec![sample.clone().into()]).unwrap();
        assert_eq!(report.released, 1);
        assert_eq!(sink.health_blocking().unwrap().resident_samples, 0);
        let again = publish(&sink, "b", 6, &[700]);
        assert_eq!(address(&again, 0), address(&sample, 0), "its place is taken");
        let error = fetch_and_check(&consumer, &sample, 5).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    }
}

#[test]
fn what_was_published_before_the_announcement_is_claimed_anew() {
    for engine in [Engine::Shm, Engine::Tcp] {
        let config = ArenaConfig::default().lease(Duration::from_millis(200));
        let arena = Arena::start(Backing::shared(MIB).unwrap(), config).unwrap();
        let sink = CaptureSink::start(arena, SinkConfig::default()).unwrap();
        let consumer = consumer(engine);
        let held = Some(consumer.client_id());
        // Its lease is over before the client is heard of, and its place is taken.
        let lapsed = publish_all(&sink, &[("lapsed", 1)], &[700], held).remove(0);
        eventually("the lease ends", || sink.health_blocking().unwrap().lease_expired_samples == 1);
        let other = publish(&sink, "other", 2, &[700]);
        assert_eq!(address(&lapsed, 0), address(&other, 0));
        let early = publish_all(&sink, &[("early", 3)], &[700], held).remove(0);
        let error = fetch_and_check(&consumer, &lapsed, 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        fetch_and_check(&consumer, &early, 3).unwrap();
        // From here on it is known.
        let lines = sink.control_stats().lines;
        let late = publish_all(&sink, &[("late", 4)], &[700], held).remove(0);
        fetch_and_check(&consumer, &late, 4).unwrap();
        assert_eq!(sink.control_stats().lines, lines);
    }
}

#[test]
fn a_failed_fetch_gives_its_claims_back_and_frees_nothing() {
    for engine in [Engine::Shm, Engine::Tcp] {
        let sink = sink(MIB);
        let (first, second) = (consumer(engine), consumer(engine));
        let [good, bad] = ["good", "bad"].map(|name| publish(&sink, name, 1, &[1000, 8]));
        second.release_blocking(vec![bad.clone().into()]).unwrap();
        let requests = [&good, &bad]
            .map(|d| FetchRequest::new(d.clone(), Destination::Pool))
            .into_iter()
            .collect();
        let error = first.fetch_blocking(requests, &FetchOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert_eq!(sink.health_blocking().unwrap().resident_samples, 1);
        // Nobody holds it any more: the other client's release is the last word.
        fetch_and_check(&second, &good, 1).unwrap();
        second.release_blocking(vec![good.into()]).unwrap();
        eventually("the sample went", || sink.health_blocking().unwrap().resident_samples == 0);
    }
}

#[test]
fn a_consumer_that_vanishes_gives_back_what_it_held() {
    let sink = sink(MIB);
    let sample = publish(&sink, "held", 1, &[1000]);
    let stream = {
        let mut stream = raw(sink.control());
        let (epoch, seq) = (sink.arena().epoch(), sample.features[0].seq.unwrap());
        say(&mut stream, r#"{"op":"hello","version":1,"client":"gone","lease_ms":300}"#);
        read_line(&mut stream);
        say(
            &mut stream,
            format!(
                r#"{{"op":"hold","id":1,"epoch":{epoch},"objects":[["test/held/g1/t0",{seq}]]}}"#
            ),
        );
        assert!(read_line(&mut stream).contains("\"held\""));
        stream
    };
    drop(stream);
    eventually("its lease ends", || {
        let health = sink.health_blocking().unwrap();
        health.resident_samples == 0 && health.lease_expired_samples == 1
    });
}

#[test]
fn an_idle_consumer_keeps_its_claims_by_pinging() {
    let sink = sink(MIB);
    let pool = capture_arena::RegionPool::new(Backing::heap(MIB).unwrap()).unwrap();
    let consumer = DirectTransport::builder()
        .engine(Engine::Shm)
        .pool(pool)
        .lease(Duration::from_millis(300))
        .client_id(ClientId::new("patient").unwrap())
        .build()
        .unwrap();
    let sample = publish(&sink, "kept", 9, &[1000]);
    let fetched = view(&consumer, &sample).unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(sink.health_blocking().unwrap().lease_expired_samples, 0);
    assert!(fetched.tensors[0].data.as_ref().iter().enumerate().all(|(at, &b)| b == byte(9, at)));
    drop(fetched);
    assert_eq!(consumer.release_blocking(vec![sample.into()]).unwrap().released, 1);
}
