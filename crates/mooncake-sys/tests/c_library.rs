//! The C provider: the loader and the tables against libraries compiled here, and the store against
//! a real one where there is one.
//!
//! No released library exports `transfer_engine_c.h` on x86-64, so that table is only ever tested
//! against the library compiled here.
#![cfg(feature = "mooncake")]

#[path = "support/cuda.rs"]
mod cuda;
mod support;

use std::{net::TcpListener, path::Path, time::Duration};

use mooncake_sys::{
    EngineApi, EngineSetup, GetItem, ProviderKind, PutItem, ReadFailure, ReadPiece, ReplicaPolicy,
    StoreApi, StoreCode, StoreSetup, Submission,
    cabi::{EngineLibrary, LibraryOptions, StoreLibrary},
};
use transport_core::{ErrorKind, RemoteAddr, SessionName};

const STORE: &str = include_str!("fake_store.c");
const ENGINE: &str = include_str!("fake_engine.c");

fn put(store: &dyn StoreApi, keys: &[&str], bytes: &[u8]) -> Vec<Result<(), StoreCode>> {
    let item = |&key| PutItem { key, start: bytes.as_ptr(), len: bytes.len() };
    let items: Vec<_> = keys.iter().map(item).collect();
    // SAFETY: the bytes are borrowed for the call.
    unsafe { store.put(&items, ReplicaPolicy::default()) }.unwrap()
}

fn get(store: &dyn StoreApi, key: &str, bytes: &mut [u8]) -> Result<u64, StoreCode> {
    let item = GetItem { key, start: bytes.as_mut_ptr(), len: bytes.len() };
    // SAFETY: the bytes are borrowed for the call, and reads are copies within this process.
    unsafe { store.get(&[item]) }.unwrap()[0]
}

#[test]
fn the_store_table_matches_the_header() {
    let dir = tempfile::tempdir().unwrap();
    let file = support::compile(dir.path(), "libmooncake_store.so", STORE);
    let library = StoreLibrary::load(&LibraryOptions::at(&file)).unwrap();
    assert_eq!(library.info().kind, ProviderKind::CLibrary);
    assert_eq!(library.info().file, file.canonicalize().unwrap());
    assert!(!library.info().store.tenants, "the optional symbol is missing, which is fine");

    let listener = TcpListener::bind("127.0.0.1:0").unwrap(); // all that the probe wants
    let master = listener.local_addr().unwrap().to_string();
    let mut setup = StoreSetup::client("host-1", master).segment(0x11_2233_4455);
    setup.devices = "dev".into();
    let store = library.connect(&setup).unwrap();
    store.health().unwrap();
    assert_eq!(store.hostname().unwrap(), "host-1:15000");
    let bytes = [5u8; 100];
    assert_eq!(put(&store, &["a", "b", "a"], &bytes), [Ok(()); 3]);
    assert_eq!(put(&store, &["z"], &[]), [Err(StoreCode::INVALID_PARAMS)]);
    assert_eq!(store.exists(&["a", "c"]).unwrap(), [Ok(true), Ok(false)]);
    assert_eq!(store.size("a").unwrap(), Ok(100));
    let mut read = [0u8; 120];
    assert_eq!(get(&store, "b", &mut read), Ok(100));
    assert_eq!(read[..100], bytes);
    assert_eq!(get(&store, "b", &mut read[..99]), Err(StoreCode::INVALID_PARAMS));
    assert_eq!(get(&store, "c", &mut read), Err(StoreCode::OBJECT_NOT_FOUND));
    assert_eq!(store.remove(&["a"], false).unwrap(), [Err(StoreCode::OBJECT_HAS_LEASE)]);
    assert_eq!(
        store.remove(&["a", "a"], true).unwrap(),
        [Ok(()), Err(StoreCode::OBJECT_NOT_FOUND)]
    );
    // SAFETY: the array outlives the registration.
    unsafe { store.register(read.as_mut_ptr(), read.len()) }.unwrap();
    // SAFETY: as above.
    let empty = unsafe { store.register(read.as_mut_ptr(), 0) }.unwrap_err();
    assert_eq!(empty.kind(), ErrorKind::InvalidInput);
    // SAFETY: no call names the array any more.
    unsafe { store.unregister(read.as_mut_ptr()) }.unwrap();
    let error = store.exists(&["a\0b"]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "a NUL would cut the key short");
    store.close().unwrap();
    store.close().unwrap();
    assert_eq!(store.size("b").unwrap_err().kind(), ErrorKind::Closed);

    setup.local_host = "host-2".into();
    let refused = library.connect(&setup).unwrap_err();
    assert_eq!(refused.context("code"), Some("-600"), "{refused}");
    setup.tenant = Some("t".into());
    assert_eq!(library.connect(&setup).unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn the_engine_table_matches_the_header() {
    let dir = tempfile::tempdir().unwrap();
    let file = support::compile(dir.path(), "libtransfer_engine.so", ENGINE);
    let library = EngineLibrary::load(&LibraryOptions::at(&file)).unwrap();
    let refused = library.start(&EngineSetup::new("127.0.0.1", "nvlink")).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    let engine = library.start(&EngineSetup::new("127.0.0.1", "tcp")).unwrap();
    assert_eq!(engine.session().unwrap().to_string(), "127.0.0.1:15001");

    let source: Vec<u8> = (0..100).collect();
    let mut destination = [0u8; 100];
    let (from, to) = (source.as_ptr() as u64, destination.as_mut_ptr());
    // SAFETY: the array outlives the registration.
    unsafe { engine.register(&[(to, 100)]) }.unwrap();
    // SAFETY: as above.
    let overlap = unsafe { engine.register(&[(to, 50), (to, 50)]) }.unwrap_err();
    assert_eq!(overlap.context("code"), Some("-7"), "{overlap}");
    let peer: SessionName = "127.0.0.1:15002".parse().unwrap();
    let piece = |at: usize, remote, len| ReadPiece {
        local: to.wrapping_add(at),
        remote: RemoteAddr(remote),
        len,
    };
    let read = |peer: &SessionName, pieces: &[ReadPiece], submission| {
        // SAFETY: the array is this test's alone, and nothing but the calls here writes it: what the
        // fake leaves running never writes.
        unsafe { engine.read(peer, pieces, submission, Duration::from_millis(50)) }
    };
    let (one, two) = (Submission::Single { ahead: 1 }, Submission::Single { ahead: 2 });
    for submission in [Submission::Batch, one, two] {
        read(&peer, &[piece(0, from, 60), piece(60, from + 60, 40)], submission).unwrap();
        // SAFETY: 100 bytes of the array above, which no transfer writes now.
        let found = unsafe { std::slice::from_raw_parts_mut(to, 100) };
        assert_eq!(found, source);
        found.fill(0);
    }
    let ask = |name: &str| {
        // SAFETY: the file is open already; its initialisers have run.
        let library = unsafe { libloading::Library::new(&file) }.unwrap();
        // SAFETY: the functions that are asked for have this type.
        let function =
            unsafe { library.get::<unsafe extern "C" fn() -> i32>(name.as_bytes()) }.unwrap();
        // SAFETY: it takes nothing, and the library stays open.
        unsafe { function() }
    };
    let elsewhere: SessionName = "127.0.0.1:9".parse().unwrap();
    let mut left = Vec::new();
    for submission in [Submission::Batch, one, two] {
        for (peer, remote, kind, runs) in [
            (&elsewhere, from, ErrorKind::PeerGone, false),
            (&peer, 1, ErrorKind::OutOfRange, false),
            (&peer, 2, ErrorKind::PeerGone, false),
            (&peer, 3, ErrorKind::Timeout, true),
            (&peer, 4, ErrorKind::Protocol, true),
        ] {
            let pieces = [piece(0, from, 8), piece(8, remote, 8)];
            let failure = read(peer, &pieces, submission).unwrap_err();
            let ReadFailure { error, piece, running } = failure;
            assert_eq!(error.kind(), kind, "{error}");
            assert_eq!(error.context("peer"), Some(peer.to_string().as_str()));
            let blamed = peer != &elsewhere && (submission != Submission::Batch || remote > 1);
            assert_eq!(piece, blamed.then_some(1), "{submission:?} {remote}");
            assert_eq!(running.is_some(), runs, "{submission:?} {remote}");
            left.extend(running.map(|running| (remote, running)));
        }
    }
    // Only the engine knows when they are over, and their batches stay until then.
    assert!(left.iter_mut().all(|(_, running)| !running.is_over()));
    assert_eq!(ask("fake_live_batches"), 6);
    ask("fake_end_all");
    for (remote, running) in &mut left {
        assert_eq!(running.is_over(), *remote == 3);
    }
    assert_eq!(ask("fake_live_batches"), 3, "those in a state that nobody knows");
    engine.close().unwrap();
    assert!(left.iter_mut().all(|(_, running)| running.is_over()), "a closed engine has none");
    assert_eq!(engine.session().unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn a_missing_or_wrong_library_is_explained() {
    let dir = tempfile::tempdir().unwrap();
    let absent = dir.path().join("libabsent.so");
    let error = StoreLibrary::load(&LibraryOptions::at(&absent)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.context("tried").unwrap().contains("libabsent.so"), "{error}");

    // The loader's own reason is passed on: a text file, a stub, the other library.
    let text = dir.path().join("libtext.so");
    std::fs::write(&text, "not a library".repeat(100)).unwrap();
    let error = StoreLibrary::load(&LibraryOptions::at(&text)).unwrap_err();
    assert!(error.context("tried").unwrap().contains("invalid ELF header"), "{error}");
    let stub = support::compile(dir.path(), "libstub.so", "int nothing(void) { return 0; }\n");
    let engine = support::compile(dir.path(), "libengine.so", ENGINE);
    for file in [&stub, &engine] {
        let error = StoreLibrary::load(&LibraryOptions::at(file)).unwrap_err();
        assert_eq!(error.context("missing_symbol"), Some("mooncake_store_create"), "{error}");
        assert_eq!(error.context("file"), Some(file.display().to_string().as_str()));
    }
    let error = EngineLibrary::load(&LibraryOptions::at(&stub)).unwrap_err();
    assert_eq!(error.context("missing_symbol"), Some("createTransferEngine"), "{error}");
    assert!(
        error.context("tried").unwrap().contains("libstub.so: has no createTransfer"),
        "{error}"
    );

    let first = dir.path().join("libfirst.so");
    let error = StoreLibrary::load(&LibraryOptions::at(&stub).preload(&first)).unwrap_err();
    assert!(error.context("tried").unwrap().contains("libfirst.so"), "{error}");
}

/// Named, not called through a null pointer.
#[test]
fn d12_a_library_without_a_function_that_is_needed_is_refused_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let short = STORE.replace("mooncake_store_remove", "mooncake_store_remove_it");
    let short = support::compile(dir.path(), "libshort.so", &short);
    let error = StoreLibrary::load(&LibraryOptions::at(&short)).unwrap_err();
    assert_eq!(error.context("missing_symbol"), Some("mooncake_store_remove"), "{error}");
}

#[test]
fn a_search_lists_every_place() {
    // The engine's variable is not used by other tests of this process.
    let error = EngineLibrary::load(&LibraryOptions::default()).unwrap_err();
    let tried = error.context("tried").unwrap();
    for place in ["path option", "MOONCAKE_TE_LIBRARY", "loader's path"] {
        assert!(tried.contains(place), "{tried}");
    }
}

/// On a machine without its CUDA, and where one file is taken for another: the loader's own word.
#[test]
#[ignore = "needs a Mooncake venv and FEATURESTORE_STORE_LIBRARY_DIR, a directory with \
            libmooncake_store.so below mooncake/ and libcudart.so.13: cargo xtask mooncake-venv"]
fn f60_a_real_library_that_does_not_load_says_what_is_missing() {
    let root = std::env::var_os("FEATURESTORE_STORE_LIBRARY_DIR").expect("names the directory");
    let library = Path::new(&root).join("mooncake/libmooncake_store.so");
    // In a process of its own: here another test may have opened what is missing.
    if std::env::var_os("FEATURESTORE_TEST_LOAD").is_some() {
        if cuda::has_cuda_13() {
            StoreLibrary::load(&LibraryOptions::at(&library)).unwrap();
            return; // nothing is missing here
        }
        let error = StoreLibrary::load(&LibraryOptions::at(&library)).unwrap_err();
        let tried = error.context("tried").unwrap();
        // Which one comes first is the loader's affair.
        let named = ["libcudart.so.13", "libcuda.so.1"].iter().any(|name| tried.contains(name));
        assert!(tried.contains("libmooncake_store.so") && named, "{error}");
        assert!(tried.contains("cannot open shared object file"), "{error}");
        return;
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "f60_a_real_library_that_does_not_load_says_what_is_missing",
        ])
        .env("FEATURESTORE_TEST_LOAD", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    // The wheel's extension is no library of the store: it wants an interpreter.
    let packages = support::environment().join("lib");
    let extension = std::fs::read_dir(packages)
        .unwrap()
        .map(|python| python.unwrap().path().join("site-packages/mooncake/store.so"))
        .find(|path| path.exists())
        .expect("the pinned wheel has one");
    let error = StoreLibrary::load(&LibraryOptions::at(&extension)).unwrap_err();
    let said = error.to_string();
    assert!(
        said.contains("undefined symbol: Py") || said.contains("mooncake_store_create"),
        "{said}"
    );
}

#[test]
#[ignore = "needs a Mooncake venv and FEATURESTORE_STORE_LIBRARY_DIR, a directory with \
            libmooncake_store.so below mooncake/ and libcudart.so.13: cargo xtask mooncake-venv"]
fn a_real_store_library_keeps_its_word() {
    let root = std::env::var_os("FEATURESTORE_STORE_LIBRARY_DIR").expect("names the directory");
    let root = Path::new(&root);
    let dir = tempfile::tempdir().unwrap();
    let options = LibraryOptions::at(root.join("mooncake/libmooncake_store.so"))
        .preload(support::stub_cuda(dir.path()))
        .preload(root.join("libcudart.so.13"));
    let library = StoreLibrary::load(&options).unwrap();
    assert!(library.info().version.is_some() && library.info().store.tenants);
    let master = support::master();
    let setup = StoreSetup::client("127.0.0.1", master.address().to_string()).segment(64 << 20);
    let store = library.connect(&setup).unwrap();
    store.health().unwrap();
    assert!(store.hostname().unwrap().starts_with("127.0.0.1:"));
    let mut memory = vec![9u8; 1 << 20];
    // SAFETY: the vector outlives the registration.
    unsafe { store.register(memory.as_mut_ptr(), memory.len()) }.unwrap();
    let (source, rest) = memory.split_at_mut(4096);
    assert_eq!(put(&store, &["s/a/g1/x", "s/a/g1/y"], source), [Ok(()), Ok(())]);
    assert_eq!(store.exists(&["s/a/g1/x", "none"]).unwrap(), [Ok(true), Ok(false)]);
    assert_eq!(store.size("s/a/g1/y").unwrap(), Ok(4096));
    rest.fill(0);
    assert_eq!(get(&store, "s/a/g1/y", &mut rest[..4096]), Ok(4096));
    assert!(rest[..4096].iter().all(|&b| b == 9));
    assert_eq!(get(&store, "none", &mut rest[..10]), Err(StoreCode::OBJECT_NOT_FOUND));
    assert_eq!(store.remove(&["s/a/g1/y"], false).unwrap(), [Err(StoreCode::OBJECT_HAS_LEASE)]);
    assert_eq!(
        store.remove(&["s/a/g1/x", "s/a/g1/y", "none"], true).unwrap(),
        [Ok(()), Ok(()), Err(StoreCode::OBJECT_NOT_FOUND)]
    );
    // SAFETY: no call names the vector any more.
    unsafe { store.unregister(memory.as_mut_ptr()) }.unwrap();
    store.close().unwrap();
    master.stop();
}
