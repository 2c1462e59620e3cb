//! Device memory at both ends and a fake store between them, on simulated machines.
//!
//! Needs no device: `cargo test -p transport-mooncake-store --features cuda --test device`.

mod fake;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use capture_arena::{
    Backing, RegionPool,
    cuda::{
        ArenaPeers, CudaError, Device, DeviceArenaConfig, DevicePtr,
        scripted::{Machine, ScriptedCuda},
    },
};
use fake::{
    Cluster, Fault,
    reader::{FakeReader, Turn},
};
use indexmap::IndexMap;
use transport_core::{
    ByteSize, Descriptor, Destination, Dtype, ErrorKind, FeatureName, FetchOptions, FetchRequest,
    Fetched, Generation, Publication, PublishOptions, Ready, RegionMut, RegionSlice, Result,
    SampleId, SampleKey, StoreId, Tensor, TensorMeta, Transport,
    conformance::{Harness, Hook, Outcome, Pair, Setup, run_all},
};
use transport_mooncake_store::{DeviceMemory, Layout, StoreConfig, StoreTransport};

const MIB: u64 = 1 << 20;
const STATE: usize = 3 * MIB as usize + 1000;
const ALL: u64 = (STATE + 777 + 808) as u64;

/// A machine with a device, memory of it, and a way into the store.
struct Site {
    cuda: Arc<ScriptedCuda>,
    device: Device,
    pool: RegionPool,
}

impl Site {
    fn new() -> Self {
        let cuda = ScriptedCuda::new(Machine { devices: 2, ..Machine::default() });
        let device = Device::open(cuda.clone(), 0).unwrap();
        Self { pool: pool(&device), device, cuda }
    }

    fn memory(&self) -> DeviceMemory {
        DeviceMemory::new(&self.device).unwrap().receive_in(self.pool.clone()).unwrap()
    }

    /// Publishes to and reads from the store through its engine.
    fn join(&self, cluster: &Arc<Cluster>) -> StoreTransport {
        self.join_with(cluster, |_| {})
    }

    fn join_with(
        &self,
        cluster: &Arc<Cluster>,
        change: impl FnOnce(&mut StoreConfig),
    ) -> StoreTransport {
        let mut config = config();
        change(&mut config);
        let api = cluster.client_with_sessions();
        StoreTransport::start_on_device(api, config, None, self.memory()).unwrap()
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
            let region = self.pool.take(len).unwrap();
            let at = DevicePtr(region.address() as u64);
            self.cuda.poke(at, &vec![0; len]);
            // SAFETY: the test's own region; that it is frozen before it is filled is what the
            // ready event of its publication is for.
            unsafe { stream.fill(at, byte, len as u64) }.unwrap();
            tensors.insert(named(name), tensor(region.freeze()));
        }
        tensors.insert(named("ids"), tensor(RegionSlice::copy_of(&[byte + 1; 808])));
        tensors.insert(named("none"), tensor(RegionSlice::copy_of(&[])));
        let ready = Ready::After(Arc::new(stream.record_new().unwrap()));
        Publication::new(key(id), tensors, ready)
    }

    /// Compares every byte of a sample that was fetched onto the device.
    fn check(&self, fetched: &Fetched, byte: u8) {
        let found = |name: &str| self.peek(&fetched.tensors[&named(name)].data);
        assert!(found("state").iter().all(|found| *found == byte));
        assert_eq!((found("target"), found("ids")), (vec![byte; 777], vec![byte + 1; 808]));
        assert!(fetched.tensors[&named("none")].data.is_empty());
    }

    fn ends_clean(self) {
        let Self { cuda, device, pool } = self;
        assert_eq!(pool.stats().live_regions, 0);
        drop((pool, device));
        assert_eq!(cuda.leaks(), Vec::<String>::new());
    }
}

fn config() -> StoreConfig {
    let mut config = StoreConfig::default().pool(ByteSize::mib(64), ByteSize::mib(64));
    config.backoff = Duration::from_millis(1);
    config.segment_silence = None;
    config
}

fn pool(device: &Device) -> RegionPool {
    let config = DeviceArenaConfig::new(64 * MIB, ArenaPeers::Nobody);
    RegionPool::new(Backing::device(device, &config).unwrap()).unwrap()
}

fn key(id: &str) -> SampleKey {
    SampleKey::new(StoreId::new("test").unwrap(), SampleId::new(id).unwrap(), Generation(1))
}

fn named(name: &str) -> FeatureName {
    FeatureName::new(name).unwrap()
}

fn tensor(data: RegionSlice) -> Tensor {
    Tensor::new(TensorMeta::new(Dtype::Uint8, [data.len() as u64]).unwrap(), data).unwrap()
}

async fn publish(to: &StoreTransport, batch: Vec<Publication>) -> Result<Vec<Arc<Descriptor>>> {
    let described = to.publish(batch, PublishOptions::default()).await?;
    Ok(described.into_iter().map(Arc::new).collect())
}

async fn fetch(
    from: &StoreTransport,
    samples: &[Arc<Descriptor>],
    mut destination: impl FnMut() -> Destination,
) -> Result<Vec<Fetched>> {
    let request = |sample: &Arc<Descriptor>| FetchRequest::new(sample.clone(), destination());
    from.fetch(samples.iter().map(request).collect(), FetchOptions::default()).await
}

async fn eventually(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !is_so().await {
        assert!(Instant::now() < end, "{what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn samples_go_from_device_to_device_through_the_store() {
    for layout in [Layout::PerTensor, Layout::Grouped { below: ByteSize::new(4096).unwrap() }] {
        let (server, trainer, cluster) = (Site::new(), Site::new(), Cluster::new());
        let publisher = server.join_with(&cluster, |config| config.layout = layout);
        let consumer = trainer.join_with(&cluster, |config| config.layout = layout);
        assert!(consumer.info().capabilities.device_memory);
        let registrations = consumer.stats().registrations;
        let batch = vec![server.sample("a", 10), server.sample("b", 20)];
        let described = publish(&publisher, batch).await.unwrap();
        assert_eq!(server.pool.stats().live_regions, 0, "sources are let go of");
        let health = publisher.health().await.unwrap();
        assert_eq!((health.host_payload_bytes, health.device_payload_bytes), (2 * ALL, 0));
        assert_eq!(publisher.stats().copied_bytes, 2 * ALL);

        for _ in 0..2 {
            let fetched = fetch(&consumer, &described, || Destination::Pool).await.unwrap();
            trainer.check(&fetched[0], 10);
            trainer.check(&fetched[1], 20);
        }
        let health = consumer.health().await.unwrap();
        assert_eq!((health.host_payload_bytes, health.device_payload_bytes), (4 * ALL, 0));
        assert_eq!(consumer.stats().registrations, registrations, "none for a call");
        assert_eq!(trainer.cuda.calls("cuMemHostRegister"), 1, "once, and never for a call");
        let releases = described.into_iter().map(Into::into).collect();
        assert_eq!(consumer.release(releases).await.unwrap().released, 2);
        assert!(cluster.keys().is_empty());
        publisher.close().await.unwrap();
        consumer.close().await.unwrap();
        drop((publisher, consumer));
        server.ends_clean();
        trainer.ends_clean();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn destinations_of_every_sort_are_filled_side_by_side() {
    let (site, cluster) = (Site::new(), Cluster::new());
    cluster.set_segment("", "127.0.0.1:17".into());
    let reader = Arc::new(FakeReader::default());
    let api = cluster.client_with_sessions();
    let transport =
        StoreTransport::start_on_device(api, config(), Some(reader.clone()), site.memory());
    let transport = transport.unwrap();
    let described = publish(&transport, vec![site.sample("a", 30)]).await.unwrap();

    let (at, host) = (site.pool.take(STATE).unwrap(), RegionMut::zeroed(777).unwrap());
    // Two that lie side by side: nothing behind the first belongs to it.
    let (first, second) = site.pool.take(1616).unwrap().split_at(808).unwrap();
    site.cuda.poke(DevicePtr(second.address() as u64), &[0xEE; 808]);
    let into = Destination::Into(vec![at, host, first, RegionMut::zeroed(0).unwrap()]);
    // The same objects once more, to the host: they are read once, and kept there.
    let again: Vec<_> =
        [STATE, 777, 808, 0].iter().map(|&len| RegionMut::zeroed(len).unwrap()).collect();
    let requests = vec![
        FetchRequest::new(described[0].clone(), into),
        FetchRequest::new(described[0].clone(), Destination::Into(again)),
    ];
    let fetched = transport.fetch(requests, FetchOptions::default()).await.unwrap();
    assert_eq!(site.peek(&fetched[0].tensors[0].data), vec![30; STATE]);
    assert_eq!(fetched[0].tensors[1].data.as_ref(), [30; 777]);
    assert_eq!(site.peek(&fetched[0].tensors[2].data), [31; 808]);
    assert_eq!(site.peek(&second.freeze()), [0xEE; 808], "not a byte beyond");
    assert_eq!(fetched[1].tensors[0].data.as_ref(), vec![30; STATE]);
    assert_eq!(fetched[1].tensors[2].data.as_ref(), [31; 808]);
    assert_eq!(transport.health().await.unwrap().host_payload_bytes, 2 * ALL, "read once");
    drop(fetched);

    // Ranges go into a buffer of the host first, also where a reader could write the caller's.
    let ranges = vec![5..105, 700..777];
    let request = FetchRequest::new(described[0].clone(), Destination::Pool);
    let request = request.names(vec![named("target")]).ranges(ranges);
    let fetched = transport.fetch(vec![request], FetchOptions::default()).await.unwrap();
    assert_eq!(site.peek(&fetched[0].tensors[0].data), [30; 177]);
    drop(fetched);

    let elsewhere = pool(&Device::open(site.cuda.clone(), 1).unwrap());
    let wrong = Destination::Into(vec![elsewhere.take(STATE).unwrap()]);
    let request = FetchRequest::new(described[0].clone(), wrong).names(vec![named("state")]);
    let error = transport.fetch(vec![request], FetchOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.context("key").is_some() && error.context("expected").is_some(), "{error}");
    let tensors = [(named("t"), tensor(elsewhere.take(9).unwrap().freeze()))].into();
    let wrong = vec![Publication::new(key("b"), tensors, Ready::Now)];
    let error = publish(&transport, wrong).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let error = DeviceMemory::new(&site.device).unwrap().receive_in(elsewhere).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{error}");
    let plain = StoreTransport::start(cluster.client(), config()).unwrap();
    let error = publish(&plain, vec![site.sample("b", 1)]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

/// Both ends need more memory of the host than there is at the same time, in calls that run side by
/// side: each goes on with its share, and none keeps a part of it while it waits for the rest.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn calls_that_share_a_pool_do_not_wait_for_each_other() {
    let (site, cluster) = (Site::new(), Cluster::new());
    let transport = Arc::new(site.join_with(&cluster, |config| {
        *config = std::mem::take(config).pool(ByteSize::mib(8), ByteSize::mib(8));
        config.threads = 4;
    }));
    cluster.set_delay_of_puts(Duration::from_millis(2));
    cluster.set_transfer_delay(Duration::from_millis(2));
    let mut published = Vec::new();
    for i in 0..4u8 {
        let batch = vec![
            site.sample(&format!("a{i}"), 10 * i),
            site.sample(&format!("b{i}"), 10 * i),
            site.sample(&format!("c{i}"), 10 * i),
        ];
        let transport = transport.clone();
        published.push(tokio::spawn(async move { publish(&transport, batch).await }));
    }
    let mut described = Vec::new();
    for one in published {
        described.push(one.await.unwrap().unwrap());
    }
    let fetches = described.iter().take(3).map(|samples| {
        let (transport, samples) = (transport.clone(), samples.clone());
        tokio::spawn(async move { fetch(&transport, &samples, || Destination::Pool).await })
    });
    for (i, fetched) in fetches.collect::<Vec<_>>().into_iter().enumerate() {
        for sample in fetched.await.unwrap().unwrap() {
            site.check(&sample, 10 * i as u8);
        }
    }
    transport.close().await.unwrap();
    drop(transport);
    site.ends_clean();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_on_the_way_loses_nothing_and_frees_nothing_too_early() {
    let (site, cluster) = (Site::new(), Cluster::new());
    site.cuda.fail("cuMemHostRegister", 0, 1, CudaError::OUT_OF_MEMORY);
    let api = cluster.client_with_sessions();
    let error = StoreTransport::start_on_device(api, config(), None, site.memory()).unwrap_err();
    assert!(error.to_string().contains("locked memory"), "{error}");
    site.cuda.heal();
    let transport = site.join(&cluster);
    let at_rest = async || {
        transport.health().await.unwrap().quarantined_bytes == 0
            && site.pool.stats().live_regions == 0
    };
    for call in ["cuMemcpyAsync", "cuEventRecord"] {
        let batch = vec![site.sample("a", 1)];
        site.cuda.fail(call, 0, 1, CudaError::INVALID_VALUE);
        let error = publish(&transport, batch).await.unwrap_err();
        assert!(error.to_string().contains(call), "{error}");
        site.cuda.heal();
        assert!(cluster.keys().is_empty(), "all or nothing");
        eventually("the sources come back", at_rest).await;
    }
    let described = publish(&transport, vec![site.sample("a", 1)]).await.unwrap();
    for call in ["cuMemcpyAsync", "cuEventRecord"] {
        site.cuda.fail(call, 0, 1, CudaError::INVALID_VALUE);
        let error = fetch(&transport, &described, || Destination::Pool).await.unwrap_err();
        assert!(error.to_string().contains(call), "{error}");
        site.cuda.heal();
        eventually("the destinations come back", at_rest).await;
    }
    // What the store fails to read is read again, and only then goes to the device.
    cluster.script([Fault::Get("state", -800), Fault::Get("ids", -707)]);
    let fetched = fetch(&transport, &described, || Destination::Pool).await.unwrap();
    site.check(&fetched[0], 1);
    assert_eq!(cluster.faults_left(), 0);
    drop(fetched);
    cluster.lose_everything();
    let error = fetch(&transport, &described, || Destination::Pool).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert_eq!(site.pool.stats().live_regions, 0);
    let _ = transport.close().await;
    drop(transport);
    site.ends_clean();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_that_nobody_waits_for_leaves_the_device_alone() {
    let (site, cluster) = (Site::new(), Cluster::new());
    cluster.set_segment("", "127.0.0.1:17".into());
    let reader = Arc::new(FakeReader::default());
    let api = cluster.client_with_sessions();
    let transport =
        StoreTransport::start_on_device(api, config(), Some(reader.clone()), site.memory());
    let transport = transport.unwrap();
    let described = publish(&transport, vec![site.sample("a", 1)]).await.unwrap();
    let copies = site.cuda.calls("cuMemcpyAsync");
    reader.script([Turn::Hang]);
    let mut options = FetchOptions::default();
    options.deadline = Duration::from_millis(100);
    let request = FetchRequest::new(described[0].clone(), Destination::Pool);
    let error = transport.fetch(vec![request], options).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    eventually("the destinations come back", async || site.pool.stats().live_regions == 0).await;
    assert_eq!(site.cuda.calls("cuMemcpyAsync"), copies);
    let fetched = fetch(&transport, &described, || Destination::Pool).await.unwrap();
    site.check(&fetched[0], 1);
    drop(fetched);
    // A receive pool without room says so, and keeps nothing.
    let all = site.pool.take(60 * MIB as usize).unwrap();
    let mut options = FetchOptions::default();
    options.deadline = Duration::from_millis(50);
    let request = || FetchRequest::new(described[0].clone(), Destination::Pool);
    let requests = vec![request(), request(), request()];
    let error = transport.fetch(requests, options).await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::CapacityExceeded | ErrorKind::Timeout),
        "the pool has room for one of three: {error}"
    );
    eventually("nothing is kept", async || site.pool.stats().live_regions == 1).await;
    drop(all);
    transport.close().await.unwrap();
    drop(transport);
    site.ends_clean();
}

/// Transports on a device, whose samples lie on the host all the same.
#[derive(Debug)]
struct OnDevice;

#[async_trait]
impl Harness for OnDevice {
    fn name(&self) -> String {
        "store transport on a device, over a fake store".into()
    }

    fn offers(&self, hook: Hook) -> bool {
        matches!(hook, Hook::TransferDelay)
    }

    async fn pair(&self, setup: &Setup) -> Result<Pair> {
        let cluster = Cluster::new();
        cluster.set_transfer_delay(setup.transfer_delay);
        let join = || -> Result<Arc<dyn Transport>> {
            let cuda = ScriptedCuda::new(Machine::default());
            let device = DeviceMemory::new(&Device::open(cuda, 0)?)?;
            let api = cluster.client_with_sessions();
            Ok(Arc::new(StoreTransport::start_on_device(api, config(), None, device)?))
        };
        Ok(Pair::new(join()?, join()?))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn samples_of_the_host_are_moved_as_without_a_device() {
    let report = run_all(&OnDevice).await;
    let failed = report.cases.iter().filter(|case| matches!(case.outcome, Outcome::Failed(_)));
    assert_eq!(failed.count(), 0, "{report}");
    assert!(report.cases.len() > 50, "{report}");
}
