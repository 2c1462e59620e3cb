//! The wheel provider against the newer generation of the wheel (0.3.14), where `mooncake.store` is
//! a package; in a binary of its own, because a process runs one interpreter for one wheel.
#![cfg(feature = "mooncake-python")]

#[path = "support/cuda.rs"]
mod cuda;
mod support;

use std::path::PathBuf;

use mooncake_sys::{
    EngineApi, EngineSetup, GetItem, PutItem, ReplicaPolicy, StoreApi, StoreCode, StoreSetup,
    python::{WheelEngine, WheelOptions, WheelStore},
};

/// A CUDA build on a machine without its CUDA: what Python's loader said, and of which file.
#[test]
#[ignore = "needs a Mooncake venv and FEATURESTORE_MOONCAKE_NEXT_VENV, a venv with \
            mooncake-transfer-engine-cuda13 0.3.14 and nvidia-cuda-runtime: \
            cargo xtask mooncake-venv"]
fn f60_a_wheel_of_another_cuda_says_what_is_missing() {
    // In a process of its own: a process imports a wheel once, with what is opened before.
    if std::env::var_os("FEATURESTORE_TEST_LOAD").is_none() {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "f60_a_wheel_of_another_cuda_says_what_is_missing"])
            .env("FEATURESTORE_TEST_LOAD", "1")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let venv = std::env::var_os("FEATURESTORE_MOONCAKE_NEXT_VENV").expect("names the venv");
    if cuda::has_cuda_13() {
        let setup = EngineSetup::new("127.0.0.1", "tcp");
        WheelEngine::start(&WheelOptions::at(venv), &setup).unwrap();
        return; // nothing is missing here
    }
    let master = std::net::TcpListener::bind("127.0.0.1:0").unwrap(); // nobody asks it anything
    let setup = StoreSetup::client("127.0.0.1", master.local_addr().unwrap().to_string());
    let store = WheelStore::connect(&WheelOptions::at(&venv), &setup).unwrap_err().to_string();
    let setup = EngineSetup::new("127.0.0.1", "tcp");
    let engine = WheelEngine::start(&WheelOptions::at(venv), &setup).unwrap_err().to_string();
    for said in [store, engine] {
        // Which one comes first is the loader's affair.
        let named = ["libcudart.so.13", "libcuda.so.1"].iter().any(|name| said.contains(name));
        assert!(named && said.contains("cannot open shared object file"), "{said}");
    }
}

#[test]
#[ignore = "needs a Mooncake venv and FEATURESTORE_MOONCAKE_NEXT_VENV, a venv with \
            mooncake-transfer-engine-cuda13 0.3.14 and nvidia-cuda-runtime: \
            cargo xtask mooncake-venv"]
fn the_newer_wheel_keeps_its_word() {
    let venv = std::env::var_os("FEATURESTORE_MOONCAKE_NEXT_VENV").expect("names the venv");
    let venv = PathBuf::from(venv);
    let dir = tempfile::tempdir().unwrap();
    let cudart = std::fs::read_dir(venv.join("lib"))
        .unwrap()
        .map(|e| e.unwrap().path().join("site-packages/nvidia/cu13/lib/libcudart.so.13"))
        .find(|p| p.exists())
        .expect("nvidia-cuda-runtime is installed in the venv");
    let mut options = WheelOptions::at(&venv).preload(cudart);
    // SAFETY: asks the loader whether it knows a driver; a machine with one needs no stub.
    if unsafe { libloading::Library::new("libcuda.so.1") }.is_err() {
        options = options.preload(support::stub_cuda(dir.path()));
    }
    let master = support::master();
    let setup = StoreSetup::client("127.0.0.1", master.address().to_string()).segment(64 << 20);
    let store = WheelStore::connect(&options, &setup).unwrap();
    let info = store.provider().to_string();
    assert!(info.contains("0.3.14") && info.contains("_store"), "{info}");
    let mut memory = vec![9u8; 1 << 20];
    let start = memory.as_mut_ptr();
    // SAFETY: the vector outlives the registration.
    unsafe { store.register(start, memory.len()) }.unwrap();
    let put = PutItem { key: "a", start, len: 4096 };
    // SAFETY: the vector is not touched during the call.
    let put = unsafe { store.put(&[put], ReplicaPolicy::default()) }.unwrap();
    assert_eq!(put, [Ok(())]);
    let item = |key, len| GetItem { key, start: start.wrapping_add(8192), len };
    // SAFETY: as above; reads are copies within this process.
    let got = unsafe { store.get(&[item("a", 4096), item("none", 10)]) }.unwrap();
    assert_eq!(got, [Ok(4096), Err(StoreCode::OBJECT_NOT_FOUND)]);
    assert_eq!(store.exists(&["a", "none"]).unwrap(), [Ok(true), Ok(false)]);
    assert_eq!(store.size("a").unwrap(), Ok(4096));
    assert_eq!(store.remove(&["a"], false).unwrap(), [Err(StoreCode::OBJECT_HAS_LEASE)]);
    assert_eq!(
        store.remove(&["a", "a"], true).unwrap(),
        [Ok(()), Err(StoreCode::OBJECT_NOT_FOUND)]
    );
    let setup = StoreSetup::client("127.0.0.1", master.address().to_string());
    let client = WheelStore::connect(&options, &setup).unwrap();
    assert!(client.provider().store.put_new);
    let new = |key| PutItem { key, start, len: 4096 };
    // SAFETY: the vector is not touched during the call.
    let put = unsafe { client.put_new(&[new("b"), new("b")], ReplicaPolicy::default()) }.unwrap();
    assert_eq!(put, [Ok(()), Err(StoreCode::OBJECT_ALREADY_EXISTS)]);
    let located = client.locate(&["b", "none"]).unwrap().expect("the wheel can tell");
    assert_eq!((located[0].len(), located[0][0].len, located[1].len()), (1, 4096, 0));
    assert_eq!(client.remove(&["b"], false).unwrap(), [Err(StoreCode::OBJECT_HAS_LEASE)]);
    client.close().unwrap();
    // SAFETY: no call names the vector any more.
    unsafe { store.unregister(start) }.unwrap();
    store.close().unwrap();

    let engine = WheelEngine::start(&options, &EngineSetup::new("127.0.0.1", "tcp")).unwrap();
    assert_eq!(engine.session().unwrap().host(), "127.0.0.1");
    engine.close().unwrap();
    master.stop();
}
