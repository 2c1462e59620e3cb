//! Servers and trainers that die without a word, at every moment that matters.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{Backing, RegionPool};
use featurestore_tests::{
    STEP,
    capture::{Ask, SMALL, health, names, results, samples},
    eventually,
    process::{CaptureServer, start_trainer},
};
use transport_core::{
    Descriptor, Destination, ErrorKind, FetchOptions, FetchRequest, Health, Release, Transport,
};
use transport_mooncake_direct::{DirectTransport, Engine};

/// Longest time that a call may take once its peer is dead.
const NOTICED: Duration = Duration::from_secs(8);

fn trainer(engine: Engine) -> DirectTransport {
    let builder = DirectTransport::builder().engine(engine).lease(Duration::from_secs(2));
    let builder = match engine {
        Engine::Tcp => builder.pool(RegionPool::new(Backing::heap(256 << 20).unwrap()).unwrap()),
        _ => builder,
    };
    builder.build().unwrap()
}

fn request(engine: Engine, descriptor: &Arc<Descriptor>) -> FetchRequest {
    let destination = if engine == Engine::Shm { Destination::View } else { Destination::Pool };
    FetchRequest::new(descriptor.clone(), destination)
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn measured(transport: &DirectTransport) -> Health {
    block_on(transport.health()).unwrap()
}

fn a_killed_trainer_gives_back_what_it_held(engine: &str) {
    let server = CaptureServer::start("4MiB", SMALL);
    let ask = Ask { holder: Some("doomed"), ..Ask::default() };
    let captured = results(&server, &names("a", 40), ask);
    // Another trainer holds two of the forty; it must keep them.
    let survivor = trainer(Engine::Shm);
    let kept = samples(&server, &names("b", 2), Ask::default());
    let requests = kept.iter().map(|d| request(Engine::Shm, d)).collect();
    let views = survivor.fetch_blocking(requests, &FetchOptions::default()).unwrap();

    let mut child = start_trainer(env!("CARGO_BIN_EXE_test-trainer"), engine, "doomed", &captured);
    assert_eq!(health(&server, "resident_samples"), 42);

    child.kill();
    let killed = Instant::now();
    eventually("the lease of the dead trainer ends", STEP, || {
        health(&server, "resident_samples") == 2
    });
    assert!(killed.elapsed() < Duration::from_secs(5), "{:?}", killed.elapsed());
    assert_eq!(health(&server, "lease_expired_samples"), 40);
    drop(views);
    let releases = kept.into_iter().map(Release::from).collect();
    assert_eq!(survivor.release_blocking(releases).unwrap().released, 2);
    assert_eq!(health(&server, "arena_largest_free"), health(&server, "arena_bytes"));
}

#[test]
fn a_killed_trainer_with_views_gives_back_what_it_held() {
    a_killed_trainer_gives_back_what_it_held("shm");
}

#[test]
fn a_killed_trainer_with_copies_gives_back_what_it_held() {
    a_killed_trainer_gives_back_what_it_held("tcp");
}

#[test]
fn a_server_killed_while_it_publishes_is_noticed_and_leaves_nothing_hanging() {
    let mut server = CaptureServer::start("64MiB", SMALL);
    let address = server.field("http").to_owned();
    let asking = std::thread::spawn(move || {
        // One request after the other until the server is gone; each is bounded by its timeout.
        for i in 0..100_000 {
            let body = serde_json::json!({
                "input_ids": [[1, 2]], "extra_key": [format!("k{i}")],
                "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
                "spec_capture": [{"store_id": "t", "sample_id": format!("s{i}"), "gen": 1,
                    "replace": false, "features": {"aux": "hidden_states"}, "passthrough": []}],
            });
            let sent = std::panic::catch_unwind(|| {
                featurestore_tests::http::post(&address, "/generate", &[], &body)
            });
            if sent.is_err() {
                return i;
            }
        }
        panic!("the server never went away");
    });
    std::thread::sleep(Duration::from_millis(300));
    server.process.kill();
    let start = Instant::now();
    let captured = asking.join().expect("the client notices");
    assert!(captured > 0);
    assert!(start.elapsed() < NOTICED, "{:?}", start.elapsed());
}

#[test]
fn a_server_killed_in_mid_fetch_is_an_error_and_the_memory_comes_back() {
    // 100 MB: a fetch takes long enough to be interrupted.
    let mut server =
        CaptureServer::start("512MiB", &["--hidden", "262144", "--taps", "1,2,3,4,5,6,7,8,9"]);
    let descriptor = samples(&server, &names("big", 1), Ask::default()).remove(0);
    assert!(descriptor.nbytes() > 40 << 20);
    let transport = Arc::new(trainer(Engine::Tcp));
    let reader = transport.clone();
    let reading = std::thread::spawn(move || {
        loop {
            let requests = vec![request(Engine::Tcp, &descriptor)];
            if let Err(error) = reader.fetch_blocking(requests, &FetchOptions::default()) {
                return error;
            }
        }
    });
    std::thread::sleep(Duration::from_millis(150));
    server.process.kill();
    let start = Instant::now();
    let error = reading.join().expect("no panic");
    assert!(start.elapsed() < NOTICED, "{:?}", start.elapsed());
    assert!(
        matches!(error.kind(), ErrorKind::PeerGone | ErrorKind::ShortRead | ErrorKind::Timeout),
        "{error:?}"
    );
    eventually("no byte stays in quarantine", STEP, || measured(&transport).quarantined_bytes == 0);
}

fn a_server_killed_between_publish_and_release(engine: Engine) {
    let mut server = CaptureServer::start("4MiB", SMALL);
    let descriptors = samples(&server, &names("a", 3), Ask::default());
    let transport = trainer(engine);
    let requests = descriptors[..2].iter().map(|d| request(engine, d)).collect();
    let fetched = transport.fetch_blocking(requests, &FetchOptions::default()).unwrap();
    let before: Vec<Vec<u8>> = fetched
        .iter()
        .flat_map(|f| f.tensors.values().map(|t| t.data.as_bytes().unwrap().to_vec()))
        .collect();
    server.process.kill();
    let after: Vec<Vec<u8>> = fetched
        .iter()
        .flat_map(|f| f.tensors.values().map(|t| t.data.as_bytes().unwrap().to_vec()))
        .collect();
    assert_eq!(before, after, "what was fetched stays what it was");
    drop(fetched);

    let start = Instant::now();
    let error = transport
        .fetch_blocking(
            vec![request(engine, &descriptors[2])],
            &FetchOptions::default().deadline(Duration::from_secs(5)),
        )
        .unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PeerGone | ErrorKind::Timeout), "{error:?}");
    assert!(error.to_string().contains("127.0.0.1"), "it names the peer: {error}");
    let releases = descriptors.into_iter().map(Release::from).collect();
    match transport.release_blocking(releases) {
        Ok(report) => assert_eq!(report.released, 0, "nobody confirmed: {report:?}"),
        Err(error) => assert!(error.to_string().contains("127.0.0.1"), "{error}"),
    }
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    transport.close_blocking();
}

#[test]
fn a_server_killed_between_publish_and_release_shm() {
    a_server_killed_between_publish_and_release(Engine::Shm);
}

#[test]
fn a_server_killed_between_publish_and_release_tcp() {
    a_server_killed_between_publish_and_release(Engine::Tcp);
}

fn a_server_that_restarts_at_the_same_ports(engine: Engine) {
    let mut old = CaptureServer::start("4MiB", SMALL);
    let (session, control) = (old.field("session").to_owned(), old.field("control").to_owned());
    let transport = trainer(engine);
    let stale = samples(&old, &names("a", 2), Ask::default());
    transport.fetch_blocking(vec![request(engine, &stale[0])], &FetchOptions::default()).unwrap();
    old.process.kill();

    let ports = ["--data", &session, "--control", &control];
    // Another arena size, the same sample names, the same places.
    let new = CaptureServer::start("8MiB", &[SMALL, &ports].concat());
    let fresh = samples(&new, &names("a", 2), Ask::default());
    for descriptor in &stale {
        let error = transport
            .fetch_blocking(vec![request(engine, descriptor)], &FetchOptions::default())
            .unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Stale | ErrorKind::PeerGone),
            "never the new server's bytes: {error:?}"
        );
    }
    let requests = || fresh.iter().map(|d| request(engine, d)).collect();
    let fetched = transport
        .fetch_blocking(requests(), &FetchOptions::default())
        .or_else(|_| transport.fetch_blocking(requests(), &FetchOptions::default()))
        .expect("at most one failed read");
    assert_eq!(fetched.len(), 2);
    drop(fetched);
    // Frees of the dead server's samples must not touch the living one's of the same name.
    let _ = transport.release_blocking(stale.into_iter().map(Release::from).collect());
    assert_eq!(health(&new, "resident_samples"), 2);
    let report = transport.release_blocking(fresh.into_iter().map(Release::from).collect());
    assert_eq!(report.unwrap().released, 2);
    assert_eq!(health(&new, "arena_largest_free"), health(&new, "arena_bytes"));
}

#[test]
fn a_server_that_restarts_at_the_same_ports_shm() {
    a_server_that_restarts_at_the_same_ports(Engine::Shm);
}

#[test]
fn a_server_that_restarts_at_the_same_ports_tcp() {
    a_server_that_restarts_at_the_same_ports(Engine::Tcp);
}
