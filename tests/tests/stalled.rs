//! Trainers that are stopped for several leases, and go on or die after that.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use featurestore_tests::{
    STEP,
    capture::{Ask, SAMPLE_ROOM, SMALL, health, names, results, samples},
    eventually,
    process::{CaptureServer, start_trainer},
};
use transport_core::{Descriptor, Release};
use transport_mooncake_direct::{DirectTransport, Engine};

/// The trainer's lease.
const LEASE: Duration = Duration::from_secs(1);
/// Bytes of the server's arena, and as it is told.
const ARENA: (u64, &str) = (256 << 10, "256KiB");

/// Captures over every free byte of the arena, and frees that again.
fn reuse_the_arena(server: &CaptureServer, round: usize) {
    let free = health(server, "arena_free_bytes") / SAMPLE_ROOM;
    let filled: Vec<Arc<Descriptor>> =
        samples(server, &names(&format!("round{round}-"), free as usize), Ask::default());
    let other = DirectTransport::builder().engine(Engine::Shm).build().unwrap();
    let releases: Vec<Release> = filled.into_iter().map(Release::from).collect();
    assert_eq!(other.release_blocking(releases).unwrap().released, free);
}

#[test]
fn a_stopped_trainer_keeps_what_it_views_and_a_dead_one_gives_it_back() {
    let server = CaptureServer::start(ARENA.1, SMALL);
    let ask = Ask { holder: Some("stopped"), ..Ask::default() };
    let captured = results(&server, &names("a", 40), ask);
    let trainer = env!("CARGO_BIN_EXE_test-trainer");
    let mut trainer = start_trainer(trainer, "shm", "stopped", &captured);
    trainer.pause();
    eventually("its silence is noticed", STEP, || health(&server, "stalled_clients") == 1);
    for round in 0..3 {
        reuse_the_arena(&server, round);
        std::thread::sleep(LEASE);
    }
    assert_eq!(health(&server, "resident_samples"), 40);
    assert_eq!(health(&server, "lease_expired_samples"), 0);

    // It compares everything that it sees with what it saw first, many times a second.
    trainer.resume();
    eventually("it speaks again", STEP, || health(&server, "stalled_clients") == 0);
    reuse_the_arena(&server, 3);
    std::thread::sleep(Duration::from_millis(500));
    assert!(trainer.is_running(), "what it views has changed");
    assert_eq!(health(&server, "resident_samples"), 40);

    // Killed while it is stopped again: nothing tells its end but the end of its mapping.
    trainer.pause();
    eventually("its silence is noticed again", STEP, || health(&server, "stalled_clients") == 1);
    trainer.kill();
    let killed = Instant::now();
    eventually("its samples come back", STEP, || health(&server, "resident_samples") == 0);
    assert!(killed.elapsed() < 2 * LEASE, "{:?}", killed.elapsed());
    assert_eq!(health(&server, "lease_expired_samples"), 40);
    assert_eq!(health(&server, "arena_largest_free"), ARENA.0);
}

#[test]
fn a_stopped_trainer_with_copies_loses_what_it_holds_and_keeps_what_it_has() {
    let server = CaptureServer::start(ARENA.1, SMALL);
    let ask = Ask { holder: Some("stopped"), ..Ask::default() };
    let captured = results(&server, &names("a", 40), ask);
    let trainer = env!("CARGO_BIN_EXE_test-trainer");
    let mut trainer = start_trainer(trainer, "tcp", "stopped", &captured);
    trainer.pause();
    eventually("its lease ends", STEP, || health(&server, "resident_samples") == 0);
    assert_eq!(health(&server, "lease_expired_samples"), 40);
    reuse_the_arena(&server, 0);
    trainer.resume();
    std::thread::sleep(Duration::from_millis(500));
    assert!(trainer.is_running(), "what it copied has changed");
}
