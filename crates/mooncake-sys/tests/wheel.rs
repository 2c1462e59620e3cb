//! The wheel provider against the real wheel and a real master.
#![cfg(feature = "mooncake-python")]

mod support;

use std::{
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    time::Duration,
};

use mooncake_sys::{
    EngineApi, EngineSetup, GetItem, ProviderKind, PutItem, ReadPiece, ReplicaPolicy, StoreApi,
    StoreCode, StoreSetup, Submission,
    python::{Interpreter, WheelEngine, WheelOptions, WheelStore},
};
use transport_core::{ErrorKind, RemoteAddr};

const MIB: usize = 1 << 20;

fn store(master: std::net::SocketAddr, segment: usize) -> WheelStore {
    let setup = StoreSetup::client("127.0.0.1", master.to_string()).segment(segment as u64);
    WheelStore::connect(&WheelOptions::at(support::environment()), &setup).unwrap()
}

fn put(store: &WheelStore, key: &str, bytes: &[u8]) -> Result<(), StoreCode> {
    let item = PutItem { key, start: bytes.as_ptr(), len: bytes.len() };
    // SAFETY: the bytes are borrowed for the call.
    unsafe { store.put(&[item], ReplicaPolicy::default()) }.unwrap()[0]
}

fn get(store: &WheelStore, key: &str, bytes: &mut [u8]) -> Result<u64, StoreCode> {
    let item = GetItem { key, start: bytes.as_mut_ptr(), len: bytes.len() };
    // SAFETY: the bytes are borrowed for the call, and no peer writes them after it: the segment
    // is this process's own, so that every read is a copy within it.
    unsafe { store.get(&[item]) }.unwrap()[0]
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn the_store_keeps_its_word() {
    let master = support::master();
    let store = store(master.address(), 64 * MIB);
    let info = store.provider().clone();
    assert_eq!(info.kind, ProviderKind::Wheel);
    assert!(info.file.exists(), "{info}");
    assert!(info.version.as_deref().is_some_and(|v| v.starts_with("0.3.1")), "{info}");
    assert!(info.store.batch_remove);
    assert!(store.hostname().unwrap().starts_with("127.0.0.1:"));
    store.health().unwrap();

    let mut memory = vec![7u8; MIB];
    let start = memory.as_mut_ptr();
    // SAFETY: the vector outlives the registration.
    unsafe { store.register(start, MIB) }.unwrap();
    // SAFETY: as above.
    let twice = unsafe { store.register(start, MIB) }.unwrap_err();
    assert_eq!(twice.context("code"), Some("-600"), "{twice}");

    let (source, rest) = memory.split_at_mut(1000);
    assert_eq!(put(&store, "a/b/g1/x", source), Ok(()));
    assert_eq!(put(&store, "a/b/g1/x", &[1; 10]), Ok(()), "Mooncake keeps the old value");
    assert_eq!(store.size("a/b/g1/x").unwrap(), Ok(1000));
    assert_eq!(store.size("none").unwrap(), Err(StoreCode::OBJECT_NOT_FOUND));
    assert_eq!(store.exists(&["a/b/g1/x", "none"]).unwrap(), [Ok(true), Ok(false)]);
    assert_eq!(put(&store, "empty", &[]), Err(StoreCode::INVALID_PARAMS));

    rest.fill(0);
    assert_eq!(get(&store, "a/b/g1/x", &mut rest[..1000]), Ok(1000));
    assert!(rest[..1000].iter().all(|&b| b == 7));
    assert_eq!(get(&store, "a/b/g1/x", &mut rest[..2000]), Ok(1000), "longer: the true length");
    assert_eq!(get(&store, "a/b/g1/x", &mut rest[..999]), Err(StoreCode::INVALID_PARAMS));
    assert_eq!(get(&store, "none", &mut rest[..10]), Err(StoreCode::OBJECT_NOT_FOUND));

    assert_eq!(
        store.remove(&["a/b/g1/x"], false).unwrap(),
        [Err(StoreCode::OBJECT_HAS_LEASE)],
        "the read above gave a lease"
    );
    assert_eq!(
        store.remove(&["a/b/g1/x", "none"], true).unwrap(),
        [Ok(()), Err(StoreCode::OBJECT_NOT_FOUND)]
    );
    assert_eq!(
        (0..9).map(|i| put(&store, &format!("full/{i}"), &memory)).filter(Result::is_err).count(),
        0
    );
    let big = vec![0; 100 * MIB];
    assert_eq!(put(&store, "too big", &big), Err(StoreCode::NO_AVAILABLE_HANDLE));

    // SAFETY: no call names this memory any more.
    unsafe { store.unregister(start) }.unwrap();
    store.close().unwrap();
    store.close().unwrap();
    let closed = store.exists(&["x"]).unwrap_err();
    assert_eq!(closed.kind(), ErrorKind::Closed, "the library would crash: {closed}");
    master.stop();
}

fn put_new(store: &WheelStore, keys: &[&str], bytes: &[u8]) -> Vec<Result<(), StoreCode>> {
    let item = |&key| PutItem { key, start: bytes.as_ptr(), len: bytes.len() };
    let items: Vec<_> = keys.iter().map(item).collect();
    // SAFETY: the bytes are borrowed for the call.
    unsafe { store.put_new(&items, ReplicaPolicy::default()) }.unwrap()
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn new_objects_are_told_from_old_ones_and_found_where_they_lie() {
    let master = support::master();
    let owner = store(master.address(), 64 * MIB);
    let (one, other) = (store(master.address(), 0), store(master.address(), 0));
    assert!(one.provider().store.put_new);
    assert!(!owner.provider().store.put_new, "it copies within the process instead");
    assert!(owner.provider().store.object_memory && !one.provider().store.object_memory);
    const TAKEN: Result<(), StoreCode> = Err(StoreCode::OBJECT_ALREADY_EXISTS);
    const FULL: Result<(), StoreCode> = Err(StoreCode::NO_AVAILABLE_HANDLE);
    let ours = vec![1u8; 5000];
    assert_eq!(put_new(&one, &["a", "b"], &ours), [Ok(()), Ok(())]);
    assert_eq!(one.exists(&["a", "b"]).unwrap(), [Ok(true), Ok(true)], "readable at once");
    // Through another client, over the wire: what is there stays, what is not is written.
    assert_eq!(put_new(&other, &["b", "c"], &[2; 70_000]), [TAKEN, Ok(())]);
    assert_eq!(put_new(&other, &["d", "d"], &[3; 100]), [Ok(()), TAKEN], "twice in one call");
    let huge = vec![4u8; 100 * MIB];
    assert_eq!(put_new(&one, &["e"], &huge), [FULL]);
    assert_eq!(put_new(&one, &["e"], &ours), [Ok(())], "a failure leaves nothing behind");
    for (key, value, len) in [("a", 1, 5000), ("b", 1, 5000), ("c", 2, 70_000), ("d", 3, 100)] {
        let mut found = vec![0; len];
        assert_eq!(get(&one, key, &mut found), Ok(len as u64), "{key}");
        assert!(found.iter().all(|&byte| byte == value), "{key}");
    }

    let located = other.locate(&["c", "none", "a"]).unwrap().expect("the wheel can tell");
    assert!(located[1].is_empty());
    for (replicas, len) in [(&located[0], 70_000), (&located[2], 5000)] {
        let [replica] = &replicas[..] else { panic!("{replicas:?}") };
        assert_eq!(replica.len, len);
        // Of the same host, but not the name of the client.
        assert!(replica.segment.starts_with("127.0.0.1:"), "{replica:?}");
        assert_ne!(*replica.segment, *owner.hostname().unwrap());
    }
    // SAFETY: the segment is this process's own, and the object is not removed before the end.
    let there = unsafe {
        let first = std::ptr::with_exposed_provenance::<u8>(located[0][0].address.0 as usize);
        std::slice::from_raw_parts(first, 70_000)
    };
    assert!(there.iter().all(|&byte| byte == 2), "the address is that of the bytes");
    assert_eq!(other.remove(&["c"], false).unwrap(), [Err(StoreCode::OBJECT_HAS_LEASE)]);
    for client in [other, one, owner] {
        client.close().unwrap();
    }
    master.stop();
}

/// Name and niceness of every thread of this process.
fn threads() -> Vec<(String, i32)> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    // One that has just ended has no status any more.
    let status = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("stat")).ok();
    tasks.filter_map(status).map(|text| parse_stat(&text)).collect()
}

fn parse_stat(text: &str) -> (String, i32) {
    let (front, rest) = text.rsplit_once(')').unwrap();
    let (_, name) = front.split_once('(').unwrap();
    (name.to_owned(), rest.split_ascii_whitespace().nth(16).unwrap().parse().unwrap())
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn threads_that_wait_step_aside_and_those_that_move_the_bytes_do_not() {
    let (_, own) = parse_stat(&std::fs::read_to_string("/proc/thread-self/stat").unwrap());
    let master = support::master();
    let owner = store(master.address(), 64 * MIB);
    let client = store(master.address(), 0);
    // Long waits; also the first, in which a thread that Mooncake starts would be started.
    let bytes = vec![5u8; 8 * MIB];
    assert_eq!(put_new(&client, &["a"], &bytes), [Ok(())]);
    let mut found = vec![0; 8 * MIB];
    assert_eq!(get(&client, "a", &mut found), Ok(8 * MIB as u64));
    let (waiting, others): (Vec<_>, Vec<_>) =
        threads().into_iter().partition(|(name, _)| name.starts_with("mooncake-io-"));
    assert!(!waiting.is_empty());
    assert!(waiting.iter().all(|&(_, nice)| nice == (own + 10).min(19)), "{waiting:?}");
    assert!(others.iter().any(|(name, _)| name.starts_with("mooncake-py-")), "{others:?}");
    assert!(others.iter().all(|&(_, nice)| nice == own), "{others:?}");
    for client in [client, owner] {
        client.close().unwrap();
    }
    master.stop();
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn data_calls_give_up_the_interpreters_lock() {
    let master = support::master();
    let store = store(master.address(), 160 * MIB);
    let bytes = vec![3u8; 8 * MIB];
    let keys: Vec<_> = (0..16).map(|i| format!("k{i}")).collect();
    for key in &keys {
        assert_eq!(put(&store, key, &bytes), Ok(()));
    }
    let mut memory = vec![0u8; 128 * MIB];
    let start = memory.as_mut_ptr();
    let item = |(i, key)| GetItem { key, start: start.wrapping_add(i * 8 * MIB), len: 8 * MIB };
    let items: Vec<_> = keys.iter().map(String::as_str).enumerate().map(item).collect();
    let (reading, others) = (AtomicBool::new(true), AtomicU32::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while reading.load(Ordering::SeqCst) {
                store.hostname().unwrap();
                others.fetch_add(1, Ordering::SeqCst);
            }
        });
        while others.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        let before = others.load(Ordering::SeqCst);
        // SAFETY: the memory is borrowed for the call, and reads are copies within this process.
        let lens = unsafe { store.get(&items) }.unwrap();
        let during = others.load(Ordering::SeqCst) - before;
        reading.store(false, Ordering::SeqCst);
        assert!(lens.iter().all(|&len| len == Ok(8 * MIB as u64)));
        // With the lock held there would be one: the call that was waiting for its turn.
        assert!(during > 2, "only {during} other calls while 128 MiB were read");
    });
    drop(store);
    master.stop();
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn engines_read_each_other() {
    let options = WheelOptions::at(support::environment());
    let setup = EngineSetup::new("127.0.0.1", "tcp");
    let owner = WheelEngine::start(&options, &setup).unwrap();
    let reader = WheelEngine::start(&options, &setup).unwrap();
    let peer = owner.session().unwrap();
    assert_ne!(peer, reader.session().unwrap(), "two engines in one process");

    let mut source: Vec<u8> = (0..MIB).map(|i| (i % 251) as u8).collect();
    let mut destination = vec![0u8; MIB];
    let (from, to) = (source.as_mut_ptr(), destination.as_mut_ptr());
    // SAFETY: the vectors outlive the engines' registrations.
    unsafe { owner.register(&[(from, MIB)]) }.unwrap();
    // SAFETY: as above.
    unsafe { reader.register(&[(to, MIB)]) }.unwrap();
    let piece = |at: usize, len| ReadPiece {
        local: to.wrapping_add(at),
        remote: RemoteAddr(from as u64 + at as u64),
        len,
    };
    let half = [piece(0, 1000), piece(1000, MIB / 2 - 1000)];
    let rest = [piece(MIB / 2, 4096), piece(MIB / 2 + 4096, MIB / 2 - 4096)];
    let patience = Duration::from_secs(20);
    // SAFETY: the destinations are this test's alone, and registered until the end.
    unsafe { reader.read(&peer, &half, Submission::Batch, patience) }.unwrap();
    // SAFETY: as above.
    unsafe { reader.read(&peer, &rest, Submission::Single { ahead: 8 }, patience) }.unwrap();
    assert_eq!(source, destination);

    let outside = ReadPiece { remote: RemoteAddr(from as u64 + 2 * MIB as u64), ..half[0] };
    let one = Submission::Single { ahead: 8 };
    // SAFETY: as above.
    let refused = unsafe { reader.read(&peer, &[half[1], outside], one, patience) }.unwrap_err();
    assert_eq!(refused.error.context("peer"), Some(peer.to_string().as_str()));
    assert_eq!(refused.piece, Some(1));
    assert!(refused.running.is_none(), "single pieces are known to be over");
    let batch = Submission::Batch;
    // SAFETY: as above.
    let refused = unsafe { reader.read(&peer, &[half[1], outside], batch, patience) }.unwrap_err();
    assert!(!refused.running.unwrap().is_over(), "nothing is known of the rest of a batch");
    // SAFETY: as above.
    unsafe { reader.read(&peer, &half, Submission::Batch, patience) }.unwrap();
    // SAFETY: no transfer runs.
    unsafe { reader.unregister(&[to]) }.unwrap();
    // SAFETY: as above.
    let unknown = unsafe { reader.unregister(&[to]) };
    assert!(unknown.is_err(), "a registration is taken back once");
    owner.close().unwrap();
    assert_eq!(owner.session().unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn a_process_runs_one_interpreter_for_one_wheel() {
    Interpreter::start(&WheelOptions::at(support::environment())).unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("lib/python3.11/site-packages/mooncake")).unwrap();
    let error = Interpreter::start(&WheelOptions::at(dir.path())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{error}");
    assert!(Interpreter::start(&WheelOptions::at(support::environment()).threads(0)).is_err());
}

/// Packages called `mooncake` that are another version, or something else, in processes of their own.
#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn a_wheel_of_another_kind_or_version_is_refused_by_what_it_lacks() {
    const OLD: &str = "\
class ReplicateConfig: pass
class MooncakeDistributedStore:
    def setup(self, *rest): return 0
    def put(self, key, value): return 0
    def close(self): return 0
";
    let master = std::net::TcpListener::bind("127.0.0.1:0").unwrap(); // nobody asks it anything
    let setup = StoreSetup::client("127.0.0.1", master.local_addr().unwrap().to_string());
    if let Some(fake) = std::env::var_os("FEATURESTORE_TEST_WHEEL") {
        let lacks = std::env::var("FEATURESTORE_TEST_LACKS").unwrap();
        let said = match WheelStore::connect(&WheelOptions::at(fake), &setup) {
            Err(error) => error,
            Ok(store) => {
                let item = PutItem { key: "a", start: OLD.as_ptr(), len: 4 };
                // SAFETY: the bytes are static.
                unsafe { store.put(&[item], ReplicaPolicy::default()) }.unwrap_err()
            }
        };
        assert!(said.to_string().contains(&lacks), "{said}");
        return;
    }
    for (module, source, lacks) in [
        ("engine.py", "", "mooncake.store"),
        ("store.py", "answer = 42\n", "MooncakeDistributedStore"),
        ("store.py", "import nothing_of_that_name\n", "nothing_of_that_name"),
        ("store.py", OLD, "batch_put_from"),
    ] {
        let (dir, real) = (tempfile::tempdir().unwrap(), support::environment());
        let lib = std::fs::read_dir(real.join("lib")).unwrap().next().unwrap().unwrap();
        let package = dir.path().join("lib").join(lib.file_name()).join("site-packages/mooncake");
        std::fs::create_dir_all(&package).unwrap();
        std::fs::write(package.join("__init__.py"), "").unwrap();
        std::fs::write(package.join(module), source).unwrap();
        std::fs::copy(real.join("pyvenv.cfg"), dir.path().join("pyvenv.cfg")).unwrap();
        let test = "a_wheel_of_another_kind_or_version_is_refused_by_what_it_lacks";
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", test])
            .env("FEATURESTORE_TEST_WHEEL", dir.path())
            .env("FEATURESTORE_TEST_LACKS", lacks)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{lacks}: {said}");
    }
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn an_absent_master_is_an_error_with_a_remedy() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let setup = StoreSetup::client("127.0.0.1", format!("127.0.0.1:{port}"));
    let options = WheelOptions::at(support::environment());
    let error = WheelStore::connect(&options, &setup).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}");
    assert!(error.context("master").is_some(), "{error}");
}
