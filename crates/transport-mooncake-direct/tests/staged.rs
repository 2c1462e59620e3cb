//! Device memory at both ends and a transport of the host's between them, on simulated machines.
//!
//! Needs no device: `cargo test -p transport-mooncake-direct --features cuda --test staged`.

mod support;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{
    Arena, ArenaConfig, Backing, RegionPool,
    cuda::{
        ArenaPeers, CudaError, Device, DeviceArenaConfig, DevicePtr, Staging, StagingConfig,
        scripted::{Machine, ScriptedCuda},
    },
};
use indexmap::IndexMap;
use support::{MIB, key};
use transport_core::{
    Descriptor, Destination, Dtype, ErrorKind, FeatureName, FetchOptions, FetchRequest, Fetched,
    Publication, PublishOptions, Ready, RegionMut, RegionSlice, Result, Tensor, TensorMeta,
};
use transport_mooncake_direct::{CaptureSink, DirectTransport, Engine, SinkConfig};

const STATE: u64 = 3 * MIB + 1000;

/// A machine with a device, memory of it, and small buffers beside it.
struct Site {
    cuda: Arc<ScriptedCuda>,
    device: Device,
    pool: RegionPool,
    staging: Staging,
}

impl Site {
    fn new() -> Self {
        let cuda = ScriptedCuda::new(Machine { devices: 2, ..Machine::default() });
        let device = Device::open(cuda.clone(), 0).unwrap();
        let staging = Staging::new(&device, buffers()).unwrap();
        Self { pool: pool(&device), staging, device, cuda }
    }

    fn sink(&self) -> Result<CaptureSink> {
        let arena = Arena::start(Backing::shared(16 * MIB)?, ArenaConfig::default())?;
        let mut config = SinkConfig::default();
        config.staging = Some(self.staging.clone());
        CaptureSink::start(arena, config)
    }

    fn trainer(&self) -> DirectTransport {
        let builder = DirectTransport::builder().engine(Engine::Tcp).pool(self.pool.clone());
        builder.staging(self.staging.clone()).build().unwrap()
    }

    fn peek(&self, data: &RegionSlice) -> Vec<u8> {
        assert_eq!(data.kind(), self.device.region_kind());
        self.cuda.peek(DevicePtr(data.address() as u64), data.len() as u64)
    }

    /// States on the device that a stream fills once somebody waits for it, and ids on the host.
    fn sample(&self, id: &str, byte: u8) -> Publication {
        let stream = self.device.stream().unwrap();
        let mut tensors = IndexMap::new();
        for (name, len) in [("state", STATE), ("target", 777)] {
            let region = self.pool.take(len as usize).unwrap();
            let at = DevicePtr(region.address() as u64);
            self.cuda.poke(at, &vec![0; len as usize]);
            // SAFETY: the test's own region; that it is frozen before it is filled is what the
            // ready event of its publication is for.
            unsafe { stream.fill(at, byte, len) }.unwrap();
            tensors.insert(named(name), tensor(region.freeze()));
        }
        tensors.insert(named("ids"), tensor(RegionSlice::copy_of(&[byte + 1; 808])));
        tensors.insert(named("none"), tensor(RegionSlice::copy_of(&[])));
        let ready = Ready::After(Arc::new(stream.record_new().unwrap()));
        Publication::new(key(id), tensors, ready)
    }

    fn ends_clean(self) {
        let Self { cuda, device, pool, staging } = self;
        assert_eq!(pool.stats().live_regions, 0);
        drop((staging, pool, device));
        assert_eq!(cuda.leaks(), Vec::<String>::new());
    }
}

fn buffers() -> StagingConfig {
    let mut config = StagingConfig::default();
    (config.buffer_bytes, config.buffers) = (64 << 10, 3);
    config
}

fn pool(device: &Device) -> RegionPool {
    let config = DeviceArenaConfig::new(32 * MIB, ArenaPeers::Nobody);
    RegionPool::new(Backing::device(device, &config).unwrap()).unwrap()
}

fn named(name: &str) -> FeatureName {
    FeatureName::new(name).unwrap()
}

fn tensor(data: RegionSlice) -> Tensor {
    Tensor::new(TensorMeta::new(Dtype::Uint8, [data.len() as u64]).unwrap(), data).unwrap()
}

fn fetch(
    transport: &DirectTransport,
    samples: &[Arc<Descriptor>],
    mut destination: impl FnMut() -> Destination,
) -> Result<Vec<Fetched>> {
    let request = |sample: &Arc<Descriptor>| FetchRequest::new(sample.clone(), destination());
    transport.fetch_blocking(samples.iter().map(request).collect(), &FetchOptions::default())
}

fn publish(sink: &CaptureSink, batch: Vec<Publication>) -> Result<Vec<Arc<Descriptor>>> {
    let described = sink.publish_blocking(batch, PublishOptions::default())?;
    Ok(described.into_iter().map(Arc::new).collect())
}

#[test]
fn samples_go_from_device_to_device_through_the_host() {
    let (server, trainer) = (Site::new(), Site::new());
    let sink = server.sink().unwrap();
    let batch = vec![server.sample("a", 10), server.sample("b", 20)];
    let described = publish(&sink, batch).unwrap();
    assert_eq!(server.pool.stats().live_regions, 0, "sources are let go of");
    let all = 2 * (STATE + 777 + 808);
    let health = sink.health_blocking().unwrap();
    assert_eq!((health.host_payload_bytes, health.device_payload_bytes), (all, 0));
    assert_eq!(health.quarantined_bytes, 0);

    let transport = trainer.trainer();
    for _ in 0..2 {
        let fetched = fetch(&transport, &described, || Destination::Pool).unwrap();
        for (sample, byte) in fetched.iter().zip([10, 20]) {
            let found = |name: &str| trainer.peek(&sample.tensors[&named(name)].data);
            assert_eq!(found("state"), vec![byte; STATE as usize]);
            assert_eq!(found("target"), [byte; 777]);
            assert_eq!(found("ids"), [byte + 1; 808]);
            assert!(sample.tensors[&named("none")].data.is_empty());
        }
    }
    let health = transport.health_blocking().unwrap();
    assert_eq!((health.host_payload_bytes, health.device_payload_bytes), (2 * all, 0));
    assert_eq!(trainer.cuda.calls("cuMemHostRegister"), 1, "once, and never for a call");
    let releases = described.into_iter().map(Into::into).collect();
    assert_eq!(transport.release_blocking(releases).unwrap().released, 2);
    let health = sink.health_blocking().unwrap();
    assert_eq!(health.arena_largest_free, health.arena_bytes);
    sink.close_blocking();
    drop((transport, sink));
    server.ends_clean();
    trainer.ends_clean();
}

#[test]
fn destinations_of_every_sort_are_filled_side_by_side() {
    let site = Site::new();
    let (sink, transport) = (site.sink().unwrap(), site.trainer());
    let described = publish(&sink, vec![site.sample("a", 30)]).unwrap();
    let (at, host) = (site.pool.take(STATE as usize).unwrap(), RegionMut::zeroed(777).unwrap());
    // Two that lie side by side: nothing behind the first belongs to it.
    let (first, second) = site.pool.take(1616).unwrap().split_at(808).unwrap();
    site.cuda.poke(DevicePtr(second.address() as u64), &[0xEE; 808]);
    let mut into = Some(vec![at, host, first, RegionMut::zeroed(0).unwrap()]);
    let fetched = fetch(&transport, &described, || Destination::Into(into.take().unwrap()));
    let fetched = fetched.unwrap();
    assert_eq!(site.peek(&fetched[0].tensors[0].data), vec![30; STATE as usize]);
    assert_eq!(fetched[0].tensors[1].data.as_ref(), [30; 777]);
    assert_eq!(site.peek(&fetched[0].tensors[2].data), [31; 808]);
    assert_eq!(site.peek(&second.freeze()), [0xEE; 808], "not a byte beyond");

    let elsewhere = pool(&Device::open(site.cuda.clone(), 1).unwrap());
    let wrong = || Destination::Into(vec![elsewhere.take(STATE as usize).unwrap()]);
    let request = FetchRequest::new(described[0].clone(), wrong()).names(vec![named("state")]);
    let error = transport.fetch_blocking(vec![request], &FetchOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.context("key").is_some() && error.context("expected").is_some(), "{error}");
    let builder = DirectTransport::builder().engine(Engine::Tcp).staging(site.staging.clone());
    assert_eq!(builder.pool(elsewhere).build().unwrap_err().kind(), ErrorKind::ConfigInvalid);
    let builder = DirectTransport::builder().engine(Engine::Shm).staging(site.staging.clone());
    assert_eq!(builder.build().unwrap_err().kind(), ErrorKind::ConfigInvalid);
    let arena = Arena::start(site.pool.backing().clone(), ArenaConfig::default());
    let mut config = SinkConfig::default();
    config.staging = Some(site.staging.clone());
    if let Ok(arena) = arena {
        let error = CaptureSink::start(arena, config).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{error}");
    }
}

#[test]
fn a_failure_on_the_way_loses_nothing_and_frees_nothing_too_early() {
    let site = Site::new();
    site.cuda.fail("cuMemHostRegister", 0, 1, CudaError::OUT_OF_MEMORY);
    assert!(site.sink().unwrap_err().to_string().contains("locked memory"));
    site.cuda.heal();
    let (sink, transport) = (site.sink().unwrap(), site.trainer());
    for call in ["cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent"] {
        let batch = vec![site.sample("a", 1)];
        site.cuda.fail(call, 0, 1, CudaError::INVALID_VALUE);
        let error = publish(&sink, batch).unwrap_err();
        assert!(error.to_string().contains(call), "{error}");
        site.cuda.heal();
        support::eventually("the range comes back", || {
            let health = sink.health_blocking().unwrap();
            health.arena_largest_free == health.arena_bytes && health.quarantined_bytes == 0
        });
    }
    let described = publish(&sink, vec![site.sample("a", 1)]).unwrap();
    for call in ["cuMemcpyAsync", "cuEventRecord"] {
        site.cuda.fail(call, 5, 1, CudaError::INVALID_VALUE);
        let error = fetch(&transport, &described, || Destination::Pool).unwrap_err();
        assert!(error.to_string().contains(call), "{error}");
        site.cuda.heal();
        support::eventually("the destinations come back", || {
            transport.health_blocking().unwrap().quarantined_bytes == 0
                && site.pool.stats().live_regions == 0
        });
    }
    // A peer that is gone in the middle.
    sink.close_blocking();
    let started = Instant::now();
    let error = fetch(&transport, &described, || Destination::Pool).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PeerGone | ErrorKind::NotFound), "{error}");
    assert!(started.elapsed() < Duration::from_secs(20));
    drop((transport, sink));
    site.ends_clean();
}
