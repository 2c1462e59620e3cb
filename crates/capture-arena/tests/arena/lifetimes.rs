//! Ranges against their writers, readers, holders and waiters, through the owner thread.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use capture_arena::{
    Arena, ArenaConfig, ArenaHealth, BATCHES_BEFORE, Backing, FreeRequest, HoldRequest,
    MappedBacking, ObjectList, PublishedSample, ReserveOptions, SamplePlan,
};
use transport_core::{ErrorKind, MapMark, RemoteAddr, Sequence};

use crate::common::*;

fn publish(arena: &Arena, plan: SamplePlan, fill: u8) -> PublishedSample {
    let options = soon(5_000).replace(true);
    let objects = plan.objects.len();
    let mut batch = arena.reserve_blocking(vec![plan], options).unwrap();
    (0..objects).for_each(|i| batch.bytes_mut(0, i).fill(fill));
    batch.publish_blocking().unwrap().remove(0)
}

fn health(arena: &Arena) -> ArenaHealth {
    arena.health_blocking().unwrap()
}

/// Waits, within a bound, for what another thread brings about.
fn until(arena: &Arena, what: impl Fn(&ArenaHealth) -> bool) {
    let start = Instant::now();
    while !what(&health(arena)) {
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", health(arena));
        thread::sleep(Duration::from_millis(2));
    }
}

fn one(key: &str, seq: Option<Sequence>) -> ObjectList {
    [(key, seq)].into_iter().collect()
}

#[test]
fn a_range_is_not_reused_under_a_reader() {
    let arena = arena(4096);
    let old = publish(&arena, plan("a", &[4096]), 1);
    let address = old.objects[0].address.unwrap();
    let pinned = arena.export().pin(address, 4096).unwrap();
    let view = arena.export().pin(RemoteAddr(address.0 + 8), 100).unwrap().into_slice();
    assert!(free(&arena, None, keys(&[key("a", 0)])).gone.is_empty());
    assert_eq!(health(&arena).draining_objects, 1);
    assert!(arena.export().pin(address, 1).is_err(), "no new reads");
    for _ in 0..2 {
        let error = arena.reserve_blocking(vec![plan("b", &[1])], soon(30)).unwrap_err();
        assert!(error.to_string().contains("being read"), "{error}");
    }
    assert!(pinned.iter().all(|&b| b == 1));
    drop(pinned);
    assert!(arena.reserve_blocking(vec![plan("b", &[1])], soon(30)).is_err(), "the view is left");
    assert!(view.as_ref().iter().all(|&b| b == 1));
    drop(view);
    let new = publish(&arena, plan("b", &[4096]), 2);
    assert_eq!(new.objects[0].address, Some(address));
}

#[test]
fn a_dropped_reservation_waits_for_its_last_writer() {
    let arena = arena(4096);
    let mut batch = arena.reserve_blocking(vec![plan("a", &[2048, 2048])], soon(50)).unwrap();
    let (first, second) = (batch.take(0, 0), batch.take(0, 1));
    drop((batch, first));
    assert!(arena.reserve_blocking(vec![plan("b", &[512])], soon(50)).is_err());
    assert_eq!(health(&arena).reserved_samples, 1);
    let writer = thread::spawn(move || {
        let mut second = second;
        thread::sleep(Duration::from_millis(50));
        second.as_mut_bytes().unwrap().fill(9);
        drop(second.freeze());
    });
    publish(&arena, plan("b", &[4096]), 2);
    writer.join().unwrap();
    assert_eq!(health(&arena).reserved_bytes, 0);
}

#[test]
fn regions_come_back_to_their_own_place_before_publication() {
    let arena = arena(1 << 20);
    let mut batch = arena.reserve_blocking(vec![plan("a", &[100, 100, 0])], soon(50)).unwrap();
    let (first, mut second, empty) = (batch.take(0, 0), batch.take(0, 1), batch.take(0, 2));
    second.as_mut_bytes().unwrap().fill(5);
    assert_eq!(batch.put_back(0, 0, second).unwrap_err().kind(), ErrorKind::InvalidInput);
    drop(batch);
    drop((first, empty));
    until(&arena, |h| h.reserved_bytes == 0);

    let mut batch = arena.reserve_blocking(vec![plan("a", &[100, 0])], soon(50)).unwrap();
    let (region, empty) = (batch.take(0, 0), batch.take(0, 1));
    batch.put_back(0, 1, empty).unwrap();
    assert_eq!(batch.publish_blocking().unwrap_err().kind(), ErrorKind::Busy);
    drop(region);
    until(&arena, |h| h.reserved_bytes == 0);

    let mut batch = arena.reserve_blocking(vec![plan("a", &[100])], soon(50)).unwrap();
    let region = batch.take(0, 0);
    batch.put_back(0, 0, region).unwrap();
    assert!(batch.publish_blocking().is_ok());
}

#[test]
fn tensors_without_bytes_take_no_range() {
    let arena = arena(512);
    let sample = publish(&arena, plan("a", &[0, 512, 0]), 3);
    let addresses: Vec<_> = sample.objects.iter().map(|o| o.address.unwrap()).collect();
    assert_eq!(addresses, [arena.base(); 3]);
    assert!(arena.export().pin(arena.base(), 0).is_err());
    assert_eq!(arena.export().len(), 1);
    let all = keys(&[key("a", 0), key("a", 1), key("a", 2)]);
    assert!(free(&arena, None, all).gone.is_empty());
    let health = health(&arena);
    assert_eq!((health.released_samples, health.arena_free_bytes), (1, 512));
}

#[test]
fn reads_stay_inside_one_published_object() {
    let arena = arena(1 << 20);
    let reserved = arena.reserve_blocking(vec![plan("f", &[100])], soon(50)).unwrap();
    let hidden = reserved.samples()[0].objects[0].address;
    let sample = publish(&arena, plan("a", &[600, 512]), 3);
    let at = |i: usize| sample.objects[i].address.unwrap().0;
    let export = arena.export();
    let pin = |address, len| export.pin(RemoteAddr(address), len);
    assert_eq!(&pin(at(0), 600).unwrap()[..], &[3; 600]);
    assert_eq!(pin(at(0) + 599, 1).unwrap().len(), 1);
    for (address, len) in [
        (hidden.0, 1), // not published
        (at(0), 601),  // beyond the object, within its unit
        (at(0) + 600, 1),
        (at(0) + 599, 2),
        (at(0), 1024 + 512), // across two objects
        (arena.base().0 - 1, 1),
        (arena.base().0 + (1 << 20), 1),
        (at(0), u64::MAX),
        (u64::MAX, u64::MAX),
        (0, 1),
    ] {
        let error: transport_core::Error = pin(address, len).unwrap_err().into();
        assert_eq!(error.kind(), ErrorKind::OutOfRange, "{address:#x} {len}");
    }
}

#[test]
fn two_clients_of_one_sample() {
    let arena = arena(1 << 20);
    let (a, b) = (client("a"), client("b"));
    arena.client_seen(&a, Duration::from_secs(30), None);
    arena.client_seen(&b, Duration::from_secs(30), None);
    let mut held = plan("s", &[100]);
    held.holder = Some(a.clone());
    let seq = Some(publish(&arena, held, 1).objects[0].seq);
    let object = key("s", 0);
    assert!(hold(&arena, &b, one(&object, seq)).gone.is_empty());
    // One lets go, twice; the other still has it.
    assert!(free(&arena, Some(&a), one(&object, seq)).gone.is_empty());
    assert_eq!(free(&arena, Some(&a), one(&object, seq)).gone, [0]);
    assert_eq!((health(&arena).resident_samples, health(&arena).draining_objects), (1, 0));
    // Somebody without a claim frees it: nobody new gets it, its holder keeps it.
    assert!(free(&arena, None, one(&object, seq)).gone.is_empty());
    assert_eq!(health(&arena).draining_objects, 1);
    assert_eq!(hold(&arena, &a, one(&object, seq)).gone, [0]);
    assert_eq!(arena.export().len(), 1, "readable for its holder");
    assert!(free(&arena, Some(&b), one(&object, seq)).gone.is_empty());
    let health = health(&arena);
    assert_eq!((health.released_samples, health.duplicate_frees), (1, 1));
    assert_eq!(health.arena_free_bytes, 1 << 20);
}

#[test]
fn replacing_what_somebody_holds_never_overwrites_it() {
    let arena = arena(2048);
    let a = client("a");
    let mut held = plan("s", &[1024]);
    held.holder = Some(a.clone());
    let old = publish(&arena, held, 1).objects.remove(0);
    let new = publish(&arena, plan("s", &[1024]), 2).objects.remove(0);
    assert_ne!(old.address, new.address);
    assert_eq!(arena.export().pin(old.address.unwrap(), 1024).unwrap()[..], [1; 1024]);
    assert!(arena.reserve_blocking(vec![plan("t", &[1])], soon(30)).is_err());
    // A late free of the old life by a stranger is stale; its holder ends it.
    let object = key("s", 0);
    assert_eq!(free(&arena, None, one(&object, Some(old.seq))).stale, [0]);
    let ours = free(&arena, Some(&a), one(&object, Some(old.seq)));
    assert_eq!((ours.gone.len(), ours.stale.len()), (0, 0));
    assert_eq!(free(&arena, Some(&a), one(&object, Some(old.seq))).stale, [0]);
    let health = health(&arena);
    assert_eq!(
        (health.stale_frees, health.resident_samples, health.arena_free_bytes),
        (2, 1, 1024)
    );
    assert!(arena.export().pin(old.address.unwrap(), 1).is_err());
    assert_eq!(arena.export().pin(new.address.unwrap(), 1024).unwrap()[..], [2; 1024]);
}

#[test]
fn a_replacement_that_fits_only_in_the_old_place_gets_it() {
    let arena = arena(4096);
    let old = publish(&arena, plan("s", &[4096]), 1).objects.remove(0);
    let new = publish(&arena, plan("s", &[4096]), 2).objects.remove(0);
    assert_eq!(old.address, new.address);
    assert!(old.seq < new.seq);
    assert_eq!(free(&arena, None, one(&key("s", 0), Some(old.seq))).stale, [0]);
}

#[test]
fn late_and_repeated_frees_of_an_older_life_are_ignored() {
    let arena = arena(1 << 20);
    let first = publish(&arena, plan("k", &[100]), 1).objects[0].seq;
    let object = key("k", 0);
    assert!(free(&arena, None, one(&object, Some(first))).gone.is_empty());
    assert_eq!(free(&arena, None, one(&object, Some(first))).gone, [0]);
    publish(&arena, plan("k", &[900]), 2);
    for _ in 0..2 {
        assert_eq!(free(&arena, None, one(&object, Some(first))).stale, [0]);
    }
    let twice = free(&arena, None, keys(&[object.clone(), object.clone(), "nonsense".into()]));
    assert_eq!(twice.gone, [1, 2]);
    let health = health(&arena);
    assert_eq!((health.published_samples, health.released_samples), (2, 2));
    assert_eq!((health.duplicate_frees, health.stale_frees), (3, 2));
}

#[test]
fn a_free_that_comes_while_the_key_is_filled_is_remembered() {
    let arena = arena(1 << 20);
    let batch = arena.reserve_blocking(vec![plan("k", &[100, 100])], soon(50)).unwrap();
    assert!(free(&arena, None, one(&key("k", 0), None)).gone.is_empty());
    assert_eq!(health(&arena).reserved_bytes, 1024, "the writer keeps its range");
    batch.publish_blocking().unwrap();
    assert_eq!(health(&arena).resident_objects, 1);
    // An aborted reservation takes the remembered free with it.
    let batch = arena.reserve_blocking(vec![plan("l", &[100])], soon(50)).unwrap();
    free(&arena, None, one(&key("l", 0), None));
    drop(batch);
    publish(&arena, plan("l", &[100]), 1);
    assert_eq!(health(&arena).resident_objects, 2);
}

#[test]
fn the_retry_of_a_reservation_takes_over_its_keys() {
    let arena = arena(1 << 20);
    let slow = arena.reserve_blocking(vec![plan("k", &[100])], soon(50)).unwrap();
    let other = arena.reserve_blocking(vec![plan("k", &[100])], soon(50)).unwrap_err();
    assert_eq!(other.kind(), ErrorKind::AlreadyExists);
    let retry = publish(&arena, plan("k", &[100]), 2);
    let error = slow.publish_blocking().unwrap_err();
    assert_eq!((error.kind(), error.context("key")), (ErrorKind::Stale, Some("s/k/g1/x0")));
    assert_eq!(arena.export().pin(retry.objects[0].address.unwrap(), 1).unwrap()[..], [2]);
    assert_eq!(health(&arena).arena_free_bytes, (1 << 20) - 512);
}

#[test]
fn batches_are_placed_whole_and_in_order() {
    let arena = arena(8192);
    let first = publish(&arena, plan("a", &[4096]), 1);
    publish(&arena, plan("b", &[2048]), 1);
    let big = |arena: &Arena| {
        let plans = vec![plan("c", &[2048]), plan("d", &[4096])];
        arena.reserve_blocking(plans, soon(10_000)).map(drop)
    };
    thread::scope(|scope| {
        let waiting = scope.spawn(|| big(&arena));
        until(&arena, |h| h.waiting_batches == 1);
        assert_eq!(health(&arena).reserved_bytes, 0, "nothing is taken while it waits");
        let late = scope.spawn(|| arena.reserve_blocking(vec![plan("e", &[512])], soon(60)));
        let late = late.join().unwrap().unwrap_err();
        assert_eq!((late.kind(), late.is_temporary()), (ErrorKind::Busy, true), "it would fit");
        assert_eq!(late.context(BATCHES_BEFORE), Some("1"), "{late}");
        assert!(!late.to_string().contains("no room"), "{late}");
        let large = arena.reserve_blocking(vec![plan("f", &[4096])], soon(0)).unwrap_err();
        assert_eq!(large.kind(), ErrorKind::CapacityExceeded, "nor would it fit at once: {large}");
        assert_eq!(health(&arena).arena_free_bytes, 2048, "nothing is taken by looking");
        assert_eq!(free(&arena, None, one(&key("a", 0), Some(first.objects[0].seq))).gone, []);
        waiting.join().unwrap().unwrap();
    });
    until(&arena, |h| h.reserved_bytes == 0 && h.waiting_batches == 0);
}

#[test]
fn a_silent_holder_loses_its_samples_and_the_others_keep_theirs() {
    let arena = arena(1 << 20);
    let (dead, alive) = (client("dead"), client("alive"));
    let lease = Duration::from_millis(80);
    arena.client_seen(&dead, lease, None);
    arena.client_seen(&alive, Duration::from_secs(60), None);
    for id in ["x", "y"] {
        let mut held = plan(id, &[100, 100]);
        held.holder = Some(dead.clone());
        publish(&arena, held, 1);
    }
    hold(&arena, &alive, keys(&[key("y", 0), key("y", 1)]));
    let lost = Instant::now();
    arena.client_lost(&dead);
    assert_eq!(health(&arena).resident_samples, 2, "a lost connection is not the end");
    // Nothing else is sent: the owner thread wakes up by itself.
    while arena.export().len() > 2 {
        assert!(lost.elapsed() < Duration::from_secs(10));
        thread::sleep(Duration::from_millis(5));
    }
    assert!(lost.elapsed() >= lease);
    let health = health(&arena);
    assert_eq!((health.lease_expired_samples, health.resident_samples), (1, 1));
    assert_eq!(health.clients, 1);
}

/// The mapping is what proves that a client can see its samples, not what it says.
#[test]
fn a_client_that_maps_the_arena_keeps_what_it_holds_until_it_maps_it_no_more() {
    let arena = Arena::start(Backing::shared(1 << 20).unwrap(), ArenaConfig::default()).unwrap();
    let handle = arena.backing().shared_handle().unwrap().clone();
    let lease = Duration::from_millis(60);
    let (maps, claims_to) = (client("maps"), client("claims to"));
    let mark = MapMark::random();
    for (who, mark) in [(&maps, mark), (&claims_to, MapMark::random())] {
        arena.client_greets_blocking(who, lease, Some(mark)).unwrap();
        let mut held = plan(who.as_str(), &[100]);
        held.holder = Some(who.clone());
        publish(&arena, held, 1);
    }
    let mapping = MappedBacking::open(&handle, mark).unwrap();
    arena.client_lost(&maps);
    arena.client_lost(&claims_to);
    until(&arena, |h| h.lease_expired_samples == 1 && h.stalled_clients == 1);
    thread::sleep(4 * lease);
    assert_eq!(health(&arena).resident_samples, 1);
    // Another consumer of the same name could release what the first one sees.
    let again = |mark| arena.client_greets_blocking(&maps, lease, mark);
    for other in [None, Some(MapMark::random())] {
        let refused = again(other).unwrap_err();
        assert_eq!((refused.kind(), refused.context("client")), (ErrorKind::Busy, Some("maps")));
    }
    // It comes back, says goodbye, and still maps the arena.
    again(Some(mark)).unwrap();
    assert_eq!(health(&arena).stalled_clients, 0);
    arena.client_bye(&maps);
    assert_eq!((health(&arena).stalled_clients, health(&arena).resident_samples), (1, 1));
    drop(mapping);
    until(&arena, |h| h.resident_samples == 0 && h.stalled_clients == 0 && h.clients == 0);
    assert_eq!(health(&arena).lease_expired_samples, 1, "the second one said goodbye");
    again(None).unwrap();
}

#[test]
fn a_goodbye_ends_claims_at_once() {
    let arena = arena(1 << 20);
    let a = client("a");
    arena.client_seen(&a, Duration::from_secs(60), None);
    let mut held = plan("x", &[100]);
    held.holder = Some(a.clone());
    publish(&arena, held, 1);
    arena.client_bye(&a);
    let health = health(&arena);
    assert_eq!((health.released_samples, health.lease_expired_samples, health.clients), (1, 0, 0));
}

#[test]
fn closing_fails_those_who_wait_and_leaves_those_who_read() {
    let arena = arena(4096);
    let sample = publish(&arena, plan("a", &[4096]), 7);
    let view = arena.export().pin(sample.objects[0].address.unwrap(), 4096).unwrap().into_slice();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| arena.reserve_blocking(vec![plan("b", &[1])], soon(60_000)));
        until(&arena, |h| h.waiting_batches == 1);
        arena.close();
        assert_eq!(waiting.join().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    });
    arena.close();
    let again = arena.reserve_blocking(vec![plan("c", &[1])], ReserveOptions::default());
    assert_eq!(again.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(arena.health_blocking().unwrap_err().kind(), ErrorKind::Closed);
    arena.free(FreeRequest { client: None, objects: keys(&[key("a", 0)]), reply: None });
    drop(arena);
    assert!(view.as_ref().iter().all(|&b| b == 7), "the memory goes with its last reader");
}

#[test]
fn a_writer_may_outlive_the_arena() {
    let arena = arena(4096);
    let mut batch = arena.reserve_blocking(vec![plan("a", &[4096])], soon(50)).unwrap();
    drop(arena);
    batch.bytes_mut(0, 0).fill(1);
    assert_eq!(batch.publish_blocking().unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn replies_may_panic_or_hold_the_last_handle() {
    let arena = arena(4096);
    arena.free(FreeRequest {
        client: None,
        objects: keys(&["x".into()]),
        reply: Some(Box::new(|_| panic!("a reply that panics"))),
    });
    arena.hold(HoldRequest {
        client: client("a"),
        objects: keys(&["x".into()]),
        reply: Some(Box::new(|_| panic!("another"))),
    });
    assert_eq!(health(&arena).duplicate_frees, 1);
    let (done, finished) = std::sync::mpsc::channel();
    let last = arena.clone();
    let reply = move |_| {
        drop(last);
        done.send(()).unwrap();
    };
    let request =
        FreeRequest { client: None, objects: keys(&["x".into()]), reply: Some(Box::new(reply)) };
    arena.free(request);
    drop(arena);
    finished.recv_timeout(Duration::from_secs(10)).unwrap();
}

/// Whoever publishes does what was asked before, too, and so may let go of the last handle.
#[test]
fn a_publisher_may_come_by_a_reply_with_the_last_handle() {
    let (done, finished) = std::sync::mpsc::channel();
    thread::spawn(move || {
        for _ in 0..2000 {
            let arena = arena(4096);
            let batch = arena.reserve_blocking(vec![plan("a", &[512])], soon(1000)).unwrap();
            let last = arena.clone();
            let reply = move |_| drop(last);
            let objects = keys(&[key("a", 0)]);
            arena.free(FreeRequest { client: None, objects, reply: Some(Box::new(reply)) });
            drop(arena);
            let _ = batch.publish_blocking(); // published, or closed already
        }
        done.send(()).unwrap();
    });
    assert!(finished.recv_timeout(Duration::from_secs(60)).is_ok(), "it hangs");
}

#[tokio::test]
async fn a_dropped_future_gives_everything_up() {
    let arena = Arena::start(Backing::heap(4096).unwrap(), ArenaConfig::default()).unwrap();
    let batch = arena.reserve(vec![plan("a", &[4096])], soon(1000)).await.unwrap();
    let second = arena.reserve(vec![plan("b", &[4096])], soon(10_000));
    assert!(tokio::time::timeout(Duration::from_millis(20), second).await.is_err());
    drop(batch);
    let batch = arena.reserve(vec![plan("c", &[4096])], soon(1000)).await.unwrap();
    drop(batch);
    // A publication nobody hears of is freed again, also if the answer was on its way already.
    for waits in [false, true] {
        let batch = arena.reserve(vec![plan("c", &[4096])], soon(5000)).await.unwrap();
        let busy = keep_busy(&arena);
        let mut publish = std::pin::pin!(batch.publish());
        let waker = std::task::Waker::noop();
        let asked = publish.as_mut().poll(&mut std::task::Context::from_waker(waker));
        assert!(asked.is_pending(), "somebody else is at the books");
        drop(busy);
        if waits {
            assert_eq!(arena.health().await.unwrap().resident_samples, 1); // it has answered
        }
    }
    let published = arena.reserve(vec![plan("d", &[4096])], soon(5000)).await.unwrap();
    let published = published.publish().await.unwrap();
    assert_eq!(published[0].objects[0].address, Some(arena.base()));
    assert_eq!(arena.health().await.unwrap().resident_samples, 1);
}

/// Readers check their bytes while writers publish, replace and free as fast as they can.
#[test]
fn readers_never_see_the_next_owner() {
    const ROUNDS: u8 = 200;
    let arena = arena(16 << 10);
    let (stop, address) = (AtomicBool::new(false), arena.base());
    thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|r| {
                let (arena, stop) = (&arena, &stop);
                scope.spawn(move || {
                    let mut reads = 0u64;
                    while !stop.load(Ordering::Relaxed) {
                        let at = RemoteAddr(address.0 + (reads * 7 + r) % 16 * 1024);
                        if let Ok(pinned) = arena.export().pin(at, 1) {
                            let first = pinned[0];
                            thread::yield_now();
                            assert_eq!(pinned[0], first, "changed under a pin");
                        }
                        reads += 1;
                    }
                })
            })
            .collect();
        for round in 0..ROUNDS {
            for id in ["a", "b", "c"] {
                publish(&arena, plan(id, &[3000, 100]), round);
            }
            free(&arena, None, keys(&[key("b", 0), key("a", 1)]));
        }
        stop.store(true, Ordering::Relaxed);
        readers.into_iter().for_each(|r| r.join().unwrap());
    });
    let all = ["a", "b", "c"].map(|id| [key(id, 0), key(id, 1)]).concat();
    free(&arena, None, keys(&all));
    until(&arena, |h| h.arena_largest_free == 16 << 10);
    let health = health(&arena);
    assert_eq!(health.published_samples, 3 * u64::from(ROUNDS));
    assert_eq!(health.published_samples, health.released_samples);
}

#[test]
fn what_waits_for_the_owner_is_counted_until_it_is_done() {
    let arena = arena(4096);
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let blocked = Box::new(move |_| assert!(wait.recv_timeout(Duration::from_secs(10)).is_ok()));
    let objects = one("first", None);
    arena.free(FreeRequest { client: None, objects, reply: Some(blocked) });
    let before = arena.backlog_bytes();
    let (key, me) = ("k".repeat(1000), client("me"));
    arena.free(FreeRequest { client: None, objects: one(&key, None), reply: None });
    arena.hold(HoldRequest { client: me.clone(), objects: one(&key, None), reply: None });
    arena.unhold(&me, one(&key, None));
    let queued = arena.backlog_bytes() - before;
    assert!((3000..6000).contains(&queued), "{queued}");
    go.send(()).unwrap();
    until(&arena, |_| arena.backlog_bytes() == 0);
    arena.close();
    arena.free(FreeRequest { client: None, objects: one(&key, None), reply: None });
    assert_eq!(arena.backlog_bytes(), 0, "nothing waits for a closed arena");
}

#[test]
fn a_flood_of_keys_does_not_keep_reservations_waiting() {
    let arena = arena(4096);
    let _full = publish(&arena, plan("a", &[4096]), 1);
    let waiting = thread::spawn({
        let arena = arena.clone();
        move || arena.reserve_blocking(vec![plan("b", &[512])], soon(300)).unwrap_err()
    });
    until(&arena, |h| h.waiting_batches == 1);
    let done = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let unknown: ObjectList = (0..8192).map(|_| ("u", None)).collect();
    for _ in 0..200 {
        let done = done.clone();
        let slow = move |_| {
            thread::sleep(Duration::from_millis(5)); // as if the keys were known
            done.fetch_add(1, Ordering::Relaxed);
        };
        let objects = unknown.clone();
        arena.free(FreeRequest { client: None, objects, reply: Some(Box::new(slow)) });
    }
    assert_eq!(waiting.join().unwrap().kind(), ErrorKind::CapacityExceeded);
    let done = done.load(Ordering::Relaxed);
    assert!(done < 150, "{done} of 200 lists came before the deadline was looked at");
}

#[test]
fn a_key_gets_no_new_life_while_clients_hold_too_many_older_ones() {
    let arena = arena(1 << 20);
    let (me, x0) = (client("hoarder"), key("a", 0));
    let replace = soon(1000).replace(true);
    let mut first = None;
    for _ in 0..65 {
        let sample = publish(&arena, plan("a", &[8]), 1);
        first.get_or_insert(sample.objects[0].seq);
        assert!(hold(&arena, &me, one(&x0, None)).gone.is_empty());
    }
    let refused = |options| arena.reserve_blocking(vec![plan("a", &[8])], options).unwrap_err();
    let error = refused(replace);
    assert_eq!((error.kind(), error.is_temporary()), (ErrorKind::Busy, true), "{error}");
    let text = error.to_string();
    assert!(text.contains("64 older") && text.contains("hoarder"), "{text}");
    // Freeing the key first is no way around it.
    free(&arena, None, one(&x0, None));
    assert_eq!(refused(soon(1000)).kind(), ErrorKind::Busy);
    publish(&arena, plan("b", &[8]), 2);

    free(&arena, Some(&me), one(&x0, first));
    assert_eq!(refused(replace).kind(), ErrorKind::Busy, "64 are left");
    free(&arena, Some(&me), one(&x0, None));
    publish(&arena, plan("a", &[8]), 3);
}

#[test]
fn objects_without_bytes_are_bounded_too() {
    let arena = arena(4096);
    let error = arena.reserve_blocking(vec![plan("a", &[0; 4097])], soon(1000)).unwrap_err();
    assert_eq!((error.kind(), error.is_temporary()), (ErrorKind::CapacityExceeded, false));
    assert!(error.to_string().contains("4097 objects can never fit"), "{error}");
    let half = publish(&arena, plan("a", &[0; 2048]), 1);
    assert_eq!(half.objects.len(), 2048);
    publish(&arena, plan("b", &[0; 2048]), 1);
    for plan in [plan("c", &[0]), plan("d", &[8])] {
        let error = arena.reserve_blocking(vec![plan], soon(30)).unwrap_err();
        assert_eq!((error.kind(), error.is_temporary()), (ErrorKind::CapacityExceeded, true));
        assert!(error.to_string().contains("1 more objects"), "{error}");
    }
    // They wait for room as others do.
    let waiting = thread::spawn({
        let arena = arena.clone();
        move || publish(&arena, plan("c", &[0, 8]), 2)
    });
    until(&arena, |h| h.waiting_batches == 1);
    free(&arena, None, keys(&[key("a", 0), key("a", 1)]));
    waiting.join().unwrap();
}
