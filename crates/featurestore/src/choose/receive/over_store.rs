//! A real store, and a simulated device that is received on.

use std::{path::Path, sync::Arc};

use capture_arena::cuda::{CudaError, DevicePtr, scripted::ScriptedCuda};
use mooncake_sys::master::{ManagedMaster, MasterOptions};
use transport_core::{
    ByteSize, ClientId, Descriptor, ErrorKind, FeatureName, FetchOptions, PublishOptions,
    RegionKind, Release, Transport,
};

use super::{
    OnDevice,
    tests::{candidate, content, machine, publication, requests},
};
use crate::{Settings, choose, config::Config};

/// The virtual environment with Mooncake's wheel.
fn environment() -> String {
    let made = || {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/mooncake-venv");
        Path::new(path).display().to_string()
    };
    std::env::var("FEATURESTORE_MOONCAKE_VENV").unwrap_or_else(|_| made())
}

fn config(master: &ManagedMaster, reads: &str) -> Config {
    let mut settings = Settings::new();
    for (name, value) in [
        ("transport", "store"),
        ("receive", "device"),
        ("device", "1"),
        ("pool", "16MiB"),
        ("mooncake", &master.address().to_string()),
        ("mooncake_venv", &environment()),
        ("mooncake_reads", reads),
    ] {
        settings.set(name, value).unwrap();
    }
    Config::from_settings(&settings).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
async fn samples_go_from_the_store_into_the_device_that_is_chosen() {
    let options = MasterOptions::of_environment(Path::new(&environment()));
    let master = ManagedMaster::start(&options).unwrap();
    let joining = config(&master, "auto").mooncake;
    let publisher = choose::store::start(joining, 64 << 20, ByteSize::mib(16)).await.unwrap();
    for reads in ["native", "mooncake"] {
        let (config, cuda) = (config(&master, reads), machine());
        let batch = vec![publication(1), publication(2)];
        let samples = publisher.publish(batch, PublishOptions::default()).await.unwrap();
        let samples: Vec<Arc<Descriptor>> = samples.into_iter().map(Arc::new).collect();
        let open = async |api: Arc<ScriptedCuda>| {
            let device = |config: &Config| OnDevice::open_with(Ok(api), config);
            choose::open_with(&config, &[], &ClientId::random(), device).await
        };
        let (store, choice) = open(cuda.clone()).await.unwrap();
        let reason = &candidate(&choice, "store").reason;
        let place = "into memory of Scripted GPU 1 (device 1), through page-locked buffers";
        assert!(reason.contains("one copy, read by") && reason.ends_with(place), "{reason}");
        assert_eq!(store.info().reason, *reason);

        let fetched = store.fetch(requests(&samples), FetchOptions::default()).await.unwrap();
        let mut all = 0;
        for (sample, byte) in fetched.iter().zip([1, 2]) {
            for (name, expected) in content(byte) {
                let found = &sample.tensors[&FeatureName::new(name).unwrap()].data;
                all += expected.len() as u64;
                if !expected.is_empty() {
                    assert_eq!(found.kind(), RegionKind::Cuda { device: 1 });
                    let at = DevicePtr(found.address() as u64);
                    assert!(cuda.peek(at, found.len() as u64) == expected, "{name} of {byte}");
                }
            }
        }
        let health = store.health().await.unwrap();
        assert_eq!((health.host_payload_bytes, health.device_payload_bytes), (all, 0));
        drop(fetched);
        let releases = samples.into_iter().map(Release::from).collect();
        assert_eq!(store.release(releases).await.unwrap().released, 2);
        store.close().await.unwrap();

        for (call, setting) in [("cuMemAlloc", "pool"), ("cuMemHostRegister", "receive")] {
            let cuda = machine();
            cuda.fail(call, 0, 1, CudaError::OUT_OF_MEMORY);
            let error = open(cuda).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::CapacityExceeded, "{call}: {error}");
            assert_eq!(error.context("setting"), Some(setting), "{call}: {error}");
        }
    }
    publisher.close().await.unwrap();
    master.stop();
}
