//! Receiving on this process's GPU what comes through the host.

use std::sync::Arc;

use capture_arena::{
    Backing, RegionPool,
    cuda::{ArenaPeers, CudaApi, Device, DeviceArenaConfig, Staging, StagingConfig, driver},
};
#[cfg(feature = "store")]
use mooncake_sys::{SegmentReader, StoreApi};
use transport_core::{ByteSize, Error, Result};
use transport_mooncake_direct::{DirectTransportBuilder, Engine};
#[cfg(feature = "store")]
use transport_mooncake_store::{DeviceMemory, StoreConfig, StoreTransport};

use super::direct::pool_too_large;
use crate::config::Config;

/// Most page-locked memory that a transport over the store begins with.
#[cfg(feature = "store")]
const ON_THE_WAY: ByteSize = ByteSize::mib(2 << 10);

/// The GPU that is received on, opened.
#[derive(Debug)]
pub(super) struct OnDevice(Device);

impl OnDevice {
    /// Opens [`Config::device`].
    pub(super) fn open(config: &Config) -> Result<Self> {
        Self::open_with(driver(), config)
    }

    fn open_with(api: Result<Arc<dyn CudaApi>>, config: &Config) -> Result<Self> {
        let opened = api.and_then(|api| Device::open(api, config.device));
        opened.map(Self).map_err(|e| e.with("setting", "receive").with("found", config.receive))
    }

    /// Where samples go, for people.
    pub(super) fn place(&self) -> String {
        let (name, ordinal) = (self.0.name(), self.0.ordinal());
        format!("into memory of {name} (device {ordinal}), through page-locked buffers")
    }

    /// Reads with the tcp engine into a pool of that size on this device.
    pub(super) fn receive(
        self,
        builder: DirectTransportBuilder,
        pool: ByteSize,
    ) -> Result<DirectTransportBuilder> {
        let (pool, staging) = self.memory(pool)?;
        Ok(builder.engine(Engine::Tcp).pool(pool).staging(staging))
    }

    /// Reads the store into a pool of that size on this device; that on the host, which is page-locked,
    /// holds samples on their way only, and grows beyond [`ON_THE_WAY`] where these ask for more.
    #[cfg(feature = "store")]
    pub(super) fn start_store(
        self,
        api: Arc<dyn StoreApi>,
        config: StoreConfig,
        reader: Option<Arc<dyn SegmentReader>>,
        pool: ByteSize,
    ) -> Result<StoreTransport> {
        let memory = DeviceMemory::new(&self.0).map_err(of_receive)?;
        let memory = memory.receive_in(pool_on(&self.0, pool)?)?;
        let config = config.pool(pool, pool.min(ON_THE_WAY));
        let started = StoreTransport::start_on_device(api, config, reader, memory);
        // What is short then is memory of the host, to have or to lock.
        let is_short = |e: &Error| e.kind() == transport_core::ErrorKind::CapacityExceeded;
        started.map_err(|e| if is_short(&e) { of_receive(e) } else { e })
    }

    /// A pool of that size on this device, and the buffers through which a transport of the host's
    /// fills it.
    fn memory(&self, pool: ByteSize) -> Result<(RegionPool, Staging)> {
        let pool = pool_on(&self.0, pool)?;
        let staging = Staging::new(&self.0, StagingConfig::default()).map_err(of_receive)?;
        Ok((pool, staging))
    }
}

/// Names the setting that page-locked memory comes from.
fn of_receive(error: Error) -> Error {
    error.with("setting", "receive").remedy(
        "raise the limit on locked memory (ulimit -l), set a smaller pool, or receive in host memory: \
         FEATURESTORE_RECEIVE=host, Config::receive",
    )
}

/// A receive pool of that size on `device`.
pub(super) fn pool_on(device: &Device, pool: ByteSize) -> Result<RegionPool> {
    let config = DeviceArenaConfig::new(pool.get(), ArenaPeers::Nobody);
    RegionPool::new(Backing::device(device, &config).map_err(pool_too_large)?)
}

#[cfg(all(test, feature = "mooncake-python"))]
mod over_store;
#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use capture_arena::{
        Arena, ArenaConfig,
        cuda::{
            CudaError, DevicePtr,
            scripted::{Machine, ScriptedCuda},
        },
    };
    use indexmap::IndexMap;
    use transport_core::{
        ClientId, Descriptor, Destination, Dtype, ErrorKind, FeatureName, FetchOptions,
        FetchRequest, Generation, Publication, PublishOptions, Ready, RegionKind, RegionSlice,
        Release, SampleId, SampleKey, StoreId, Tensor, TensorMeta, Transport,
    };
    use transport_mooncake_direct::{CaptureSink, SinkConfig};

    use super::*;
    use crate::{
        choose::{self, Candidate, Choice, Scope},
        config::{Receive, TransportChoice},
    };

    const STATE: usize = (5 << 20) + 1000;

    pub(super) fn machine() -> Arc<ScriptedCuda> {
        ScriptedCuda::new(Machine { devices: 2, ..Machine::default() })
    }

    /// A publisher whose arena others can map, with two samples in it.
    fn publisher() -> (CaptureSink, Vec<Arc<Descriptor>>) {
        let arena = Arena::start(Backing::shared(32 << 20).unwrap(), ArenaConfig::default());
        let sink = CaptureSink::start(arena.unwrap(), SinkConfig::default()).unwrap();
        let batch = vec![publication(1), publication(2)];
        let described = sink.publish_blocking(batch, PublishOptions::default()).unwrap();
        (sink, described.into_iter().map(Arc::new).collect())
    }

    pub(super) fn publication(byte: u8) -> Publication {
        let id = SampleId::new(format!("s-{byte}")).unwrap();
        let key = SampleKey::new(StoreId::new("run").unwrap(), id, Generation(1));
        let tensor = |(name, bytes): (_, Vec<u8>)| {
            let meta = TensorMeta::new(Dtype::Uint8, [bytes.len() as u64]).unwrap();
            let tensor = Tensor::new(meta, RegionSlice::copy_of(&bytes)).unwrap();
            (FeatureName::new(name).unwrap(), tensor)
        };
        let tensors: IndexMap<_, _> = content(byte).into_iter().map(tensor).collect();
        Publication::new(key, tensors, Ready::Now)
    }

    /// The tensors of a sample: larger than a buffer, smaller than one, and empty.
    pub(super) fn content(byte: u8) -> [(&'static str, Vec<u8>); 3] {
        let state = (0..STATE).map(|i| (i as u8).wrapping_mul(31) ^ byte).collect();
        [("state", state), ("ids", vec![byte; 777]), ("none", Vec::new())]
    }

    fn config(transport: TransportChoice, receive: Receive) -> Config {
        let config = Config::default().transport(transport).receive(receive);
        config.pool(ByteSize::mib(16)).device(1)
    }

    type Opened = Result<(Arc<dyn Transport>, Choice)>;

    /// Opens a transport to a publisher, with `api` as this machine's driver.
    async fn open(config: &Config, sink: &CaptureSink, api: Result<Arc<dyn CudaApi>>) -> Opened {
        let servers = [sink.control().clone()];
        let device = |config: &Config| OnDevice::open_with(api, config);
        choose::open_with(config, &servers, &ClientId::random(), device).await
    }

    pub(super) fn candidate<'a>(choice: &'a Choice, scheme: &str) -> &'a Candidate {
        choice.candidates.iter().find(|candidate| candidate.scheme == scheme).unwrap()
    }

    pub(super) fn requests(samples: &[Arc<Descriptor>]) -> Vec<FetchRequest> {
        let request =
            |sample: &Arc<Descriptor>| FetchRequest::new(sample.clone(), Destination::Pool);
        samples.iter().map(request).collect()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn samples_go_by_tcp_into_the_device_that_is_chosen() {
        for transport in [TransportChoice::Tcp, TransportChoice::Auto] {
            let ((sink, samples), cuda) = (publisher(), machine());
            let config = config(transport, Receive::Device).strict(true);
            let (tcp, choice) = open(&config, &sink, Ok(cuda.clone())).await.unwrap();
            assert_eq!(choice.chosen, "tcp", "{choice}");
            let reason = &candidate(&choice, "tcp").reason;
            let place = "into memory of Scripted GPU 1 (device 1), through page-locked buffers";
            assert!(reason.contains("one copy") && reason.ends_with(place), "{reason}");
            assert_eq!(tcp.info().reason, *reason);
            assert!(tcp.info().capabilities.device_memory && !tcp.info().capabilities.views);
            let shm = candidate(&choice, "shm");
            assert_eq!((shm.available, shm.configured, shm.suitable), (true, false, false));
            let why = "left out: receive = device, and its views lie in the server's memory";
            assert!(shm.reason.contains(why), "{}", shm.reason);

            let fetched = tcp.fetch(requests(&samples), FetchOptions::default()).await.unwrap();
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
            let health = tcp.health().await.unwrap();
            assert_eq!((health.host_payload_bytes, health.device_payload_bytes), (all, 0));
            assert_eq!(cuda.calls("cuMemHostRegister"), 1, "once, and never for a fetch");
            drop(fetched);
            let releases = samples.into_iter().map(Release::from).collect();
            assert_eq!(tcp.release(releases).await.unwrap().released, 2);
            tcp.close().await.unwrap();
            drop(tcp);
            // Its threads let go of it a little later.
            let end = Instant::now() + Duration::from_secs(10);
            while !cuda.leaks().is_empty() && Instant::now() < end {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            assert_eq!(cuda.leaks(), Vec::<String>::new());
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_device_is_touched_unless_it_is_asked_for() {
        let never = || Err(Error::new(ErrorKind::Unexpected, "open", "nobody needs a device"));
        for (transport, receive, chosen) in [
            (TransportChoice::Auto, Receive::Auto, "shm"),
            (TransportChoice::Tcp, Receive::Auto, "tcp"),
            (TransportChoice::Auto, Receive::Host, "shm"),
            (TransportChoice::Tcp, Receive::Host, "tcp"),
        ] {
            let ((sink, samples), config) = (publisher(), config(transport, receive));
            let (transport, choice) = open(&config, &sink, never()).await.unwrap();
            assert_eq!(choice.chosen, chosen, "{choice}");
            assert!(!candidate(&choice, chosen).reason.contains("device"), "{choice}");
            let nvlink = candidate(&choice, "nvlink_intra");
            let is_left_out = nvlink.reason.contains("left out: receive = host");
            assert_eq!(is_left_out, receive == Receive::Host, "{choice}");
            if receive == Receive::Host {
                assert!(!nvlink.configured && !nvlink.suitable, "{choice}");
            }
            if chosen == "tcp" {
                let fetched = transport.fetch(requests(&samples), FetchOptions::default()).await;
                let fetched = fetched.unwrap();
                let state = &fetched[1].tensors[&FeatureName::new("state").unwrap()].data;
                assert!(state.as_bytes() == Some(&content(2)[0].1[..]), "in host memory");
            }
            transport.close().await.unwrap();
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_cannot_be_is_refused_and_nothing_is_taken_instead() {
        let (sink, _samples) = publisher();
        for (transport, receive, part) in [
            (TransportChoice::Shm, Receive::Device, "choose the transport tcp"),
            (TransportChoice::Nvlink, Receive::Host, "choose the transport shm or tcp"),
            (TransportChoice::NvlinkIntra, Receive::Host, "choose the transport shm or tcp"),
        ] {
            let error = open(&config(transport, receive), &sink, Ok(machine())).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{error}");
            assert_eq!(error.context("setting"), Some("receive"), "{error}");
            assert!(error.to_string().contains(part), "{error}");
        }
        let none = || Err(Error::new(ErrorKind::Unsupported, "load", "no CUDA driver"));
        for transport in [TransportChoice::Auto, TransportChoice::Tcp] {
            let config = config(transport, Receive::Device);
            let error = open(&config, &sink, none()).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            for part in ["tcp is not available: load", "no CUDA driver", "receive = host"] {
                assert!(error.to_string().contains(part), "{part}: {error}");
            }
            let error = open(&config.device(7), &sink, Ok(machine())).await.unwrap_err();
            assert!(error.to_string().contains("sees no such device"), "{error}");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn memory_that_is_short_is_named_by_its_setting() {
        let (sink, _samples) = publisher();
        let config = config(TransportChoice::Tcp, Receive::Device);
        for (call, setting, remedy) in [
            ("cuMemAlloc", "pool", "smaller pool"),
            ("cuMemHostRegister", "receive", "limit on locked memory"),
        ] {
            let cuda = machine();
            cuda.fail(call, 0, 1, CudaError::OUT_OF_MEMORY);
            let error = open(&config, &sink, Ok(cuda.clone())).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::CapacityExceeded, "{call}: {error}");
            assert_eq!(error.context("setting"), Some(setting), "{call}: {error}");
            assert!(error.to_string().contains(remedy), "{call}: {error}");
            assert_eq!(cuda.leaks(), Vec::<String>::new());
        }
    }

    #[test]
    fn a_survey_opens_the_device_at_most_once() {
        let (sink, _samples) = publisher();
        let (config, cuda) = (config(TransportChoice::Tcp, Receive::Device), machine());
        let servers = [sink.control().clone()];
        let open = |config: &Config| OnDevice::open_with(Ok(cuda.clone()), config);
        let survey = choose::survey_with(&config, &servers, Scope::Everything, open);
        assert!(survey.candidates.iter().any(|c| c.scheme == "tcp" && c.available));
        assert_eq!(cuda.calls("cuDevicePrimaryCtxRetain"), 1);
        drop(survey);
        assert_eq!(cuda.leaks(), Vec::<String>::new());
    }
}
