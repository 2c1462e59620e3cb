//! The placements and messages that the reference arena documents.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::common::*;
use capture_arena::{Arena, ReserveOptions};
use transport_core::{ErrorKind, RemoteAddr};

fn place(arena: &Arena, id: &str, bytes: u64) -> u64 {
    let reserved = arena.reserve_blocking(vec![plan(id, &[bytes])], soon(5_000)).unwrap();
    let published = reserved.publish_blocking().unwrap();
    published[0].objects[0].address.unwrap().0 - arena.base().0
}

#[test]
fn offsets_of_a_small_sequence() {
    for capacity in [4096, 1 << 20, 64 << 20] {
        let arena = arena(capacity);
        let offsets = [("a", 100), ("b", 1000), ("c", 1)].map(|(id, n)| place(&arena, id, n));
        assert_eq!(offsets, [0, 512, 1536]);
        let gone = free(&arena, None, keys(&[key("a", 0), key("c", 0), "missing".into()]));
        assert_eq!(gone.gone, [2]);
        assert_eq!(place(&arena, "d", 512), 0);
        free(&arena, None, keys(&[key("b", 0), key("d", 0)]));
        let health = arena.health_blocking().unwrap();
        assert_eq!((health.arena_free_ranges, health.arena_largest_free), (1, capacity));
    }
}

#[test]
fn a_full_arena_waits_for_a_free_and_then_places_at_the_start() {
    let arena = arena(4096);
    assert_eq!(place(&arena, "a", 4096), 0);
    let other = arena.clone();
    let freeing = thread::spawn(move || {
        thread::sleep(Duration::from_millis(100));
        free(&other, None, keys(&[key("a", 0)]))
    });
    assert_eq!(place(&arena, "b", 4096), 0);
    assert!(freeing.join().unwrap().gone.is_empty());
}

#[test]
fn d21_no_room_within_the_deadline_says_who_is_in_the_way() {
    let arena = arena(4096);
    place(&arena, "a", 4000);
    let error = arena.reserve_blocking(vec![plan("b", &[1000])], soon(50)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CapacityExceeded);
    assert!(error.is_temporary());
    let text = error.to_string();
    for part in [
        "no room",
        "1024 bytes",
        "free_bytes=0",
        "largest_range=0",
        "s/a/g1/x0",
        "larger arena",
        "watermark",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("runtime."), "names no setting of somebody else: {text}");
}

#[test]
fn what_can_never_fit_is_refused_without_waiting() {
    let arena = arena(4096);
    let start = Instant::now();
    let error = arena.reserve_blocking(vec![plan("b", &[5000])], soon(60_000)).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(30), "no wait for frees");
    assert_eq!((error.kind(), error.is_temporary()), (ErrorKind::CapacityExceeded, false));
    let text = error.to_string();
    for part in ["5120 bytes can never fit in an arena of 4096 bytes", "larger arena", "shorter"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn d22_an_existing_key_is_refused_unless_it_is_replaced() {
    let arena = arena(1 << 20);
    place(&arena, "a", 100);
    let error = arena.reserve_blocking(vec![plan("a", &[100])], soon(50)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    assert!(error.to_string().contains("already exists"), "{error}");
    let health = arena.health_blocking().unwrap();
    assert_eq!((health.arena_free_bytes, health.resident_objects), ((1 << 20) - 512, 1));
    let options = ReserveOptions::default().replace(true);
    let new = arena.reserve_blocking(vec![plan("a", &[100])], options).unwrap();
    assert_eq!(
        new.publish_blocking().unwrap()[0].objects[0].address,
        Some(RemoteAddr(arena.base().0 + 512))
    );
    let health = arena.health_blocking().unwrap();
    assert_eq!((health.resident_samples, health.released_samples), (1, 1));
}

#[test]
fn d23_the_reference_publication() {
    let arena = arena(1 << 20);
    let sizes = [3 * 8 * 2, 3 * 4 * 4, 3 * 8];
    let mut batch = arena.reserve_blocking(vec![plan("nv", &sizes)], soon(50)).unwrap();
    for (i, size) in sizes.into_iter().enumerate() {
        let bytes = batch.bytes_mut(0, i);
        assert_eq!(bytes.len() as u64, size);
        bytes.fill(i as u8 + 1);
    }
    let published = batch.publish_blocking().unwrap();
    for (i, object) in published[0].objects.iter().enumerate() {
        let pinned = arena.export().pin(object.address.unwrap(), sizes[i]).unwrap();
        assert!(pinned.iter().all(|&b| b == i as u8 + 1));
    }
    let outcome = free(&arena, None, keys(&[key("nv", 1), "missing".into()]));
    assert_eq!(outcome.gone, [1]);
    assert_eq!(arena.health_blocking().unwrap().resident_objects, 2);
}
