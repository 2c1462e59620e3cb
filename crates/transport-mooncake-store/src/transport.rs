//! The transport: checks, waiting, and the way to the threads that call the store.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use mooncake_sys::{SegmentReader, StoreApi};
use transport_core::{
    Capabilities, Descriptor, Error, ErrorKind, FeatureName, FetchOptions, FetchRequest, Fetched,
    Health, Publication, PublishOptions, RegionKind, RegionMut, Release, ReleaseReport, Result,
    SampleKey, TensorMeta, Transport, TransportInfo,
};

use crate::{
    DrainReport, StoreConfig, StoreStats,
    device::DeviceMemory,
    fetch,
    layout::Plan,
    ledger::Ledger,
    memory::Memory,
    native::Native,
    publish, release,
    segments::Segments,
    workers::{Flight, Waiting, Workers},
};

/// How long `close` waits for running calls; Mooncake's own timeout is 30 seconds.
const CLOSE_PATIENCE: Duration = Duration::from_secs(40);
/// How long a measurement of what is resident may take.
const HEALTH_PATIENCE: Duration = Duration::from_secs(5);
/// Samples asked about by one measurement.
const MAX_PROBES: usize = 65_536;

/// Publishes to and fetches from Mooncake Store; see the crate.
///
/// Needs a tokio runtime with time. Cheap to share behind an [`Arc`].
pub struct StoreTransport {
    info: TransportInfo,
    shared: Arc<Shared>,
}

/// What calls need wherever they run.
pub(crate) struct Shared {
    pub(crate) config: StoreConfig,
    pub(crate) api: Arc<dyn StoreApi>,
    pub(crate) memory: Memory,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) segments: Arc<Segments>,
    pub(crate) native: Option<Native>,
    workers: Workers,
    /// Removes objects: not behind calls that wait for room.
    remover: Workers,
    /// For what must go on while every other thread waits for a peer that hangs.
    attendant: Workers,
    abandoned_bytes: Arc<AtomicU64>,
    closed: AtomicBool,
}

impl StoreTransport {
    /// Starts a transport over a client that has joined a cluster. Takes the client over:
    /// [`Transport::close`] closes it.
    pub fn start(api: Arc<dyn StoreApi>, config: StoreConfig) -> Result<Self> {
        Self::start_with(api, config, None)
    }

    /// Starts a transport whose fetches read through `reader` what lies in segments of others, and
    /// not through Mooncake's engine.
    ///
    /// The lease is Mooncake's as ever: the master grants it when it says where an object lies, and
    /// what has taken longer is read again. So [`StoreConfig::read_lease`] has to be set.
    pub fn start_with(
        api: Arc<dyn StoreApi>,
        config: StoreConfig,
        reader: Option<Arc<dyn SegmentReader>>,
    ) -> Result<Self> {
        Self::start_over(api, config, reader, None)
    }

    /// As [`Self::start_with`], and takes memory of a device beside the host's, as sources and as
    /// destinations.
    #[cfg(feature = "cuda")]
    pub fn start_on_device(
        api: Arc<dyn StoreApi>,
        config: StoreConfig,
        reader: Option<Arc<dyn SegmentReader>>,
        device: DeviceMemory,
    ) -> Result<Self> {
        Self::start_over(api, config, reader, Some(device))
    }

    fn start_over(
        api: Arc<dyn StoreApi>,
        config: StoreConfig,
        reader: Option<Arc<dyn SegmentReader>>,
        device: Option<DeviceMemory>,
    ) -> Result<Self> {
        config.check()?;
        if reader.is_some() && config.read_lease.is_none() {
            return Err(Error::new(
                ErrorKind::ConfigInvalid,
                "configure store transport",
                "only Mooncake's engine checks leases by itself",
            )
            .with("setting", "read_lease")
            .remedy(
                "say how long the master's leases last, or read without a reader of one's own",
            ));
        }
        let mut capabilities = Capabilities::default();
        capabilities.publish = true;
        capabilities.fetch = true;
        capabilities.cross_host = true;
        capabilities.device_memory = device.is_some();
        // What lies in this process Mooncake's engine reads, and that reads whole objects.
        capabilities.ranges =
            reader.is_some() && !api.provider().store.object_memory && api.locate(&[])?.is_some();
        let mut engine = api.provider().to_string();
        if let Some(reader) = &reader {
            engine += &format!("; reads by {}", reader.name());
        }
        let info = TransportInfo::new("store", engine, capabilities);
        let native = match reader {
            Some(reader) => Some(Native::new(reader, &*api)?),
            None => None,
        };
        let memory = Memory::new(api.clone(), &config, device)?;
        let workers = Workers::start(config.threads)?;
        let (attendant, remover) = (Workers::start(1)?, Workers::start(1)?);
        let segments = Arc::new(Segments::new(api.clone(), config.segment_silence));
        let shared = Shared {
            config,
            api,
            memory,
            ledger: Arc::default(),
            segments,
            native,
            workers,
            remover,
            attendant,
            abandoned_bytes: Arc::default(),
            closed: AtomicBool::new(false),
        };
        Ok(Self { info, shared: Arc::new(shared) })
    }

    /// Records why it was chosen.
    #[must_use]
    pub fn because(mut self, reason: impl Into<String>) -> Self {
        self.info = self.info.because(reason);
        self
    }

    /// Takes `len` bytes of registered memory: as a source or destination they are not copied.
    pub fn take(&self, len: usize) -> Result<RegionMut> {
        self.shared.memory.try_take(len)
    }

    /// Takes registered memory for the tensors of a sample, one region each in their order, placed
    /// so that publishing them copies nothing in the configured layout.
    pub fn take_sample(
        &self,
        sample: &SampleKey,
        tensors: &[(FeatureName, TensorMeta)],
    ) -> Result<Vec<RegionMut>> {
        let named = tensors.iter().map(|(name, meta)| (name, meta));
        let plan = Plan::new(self.shared.config.layout, sample, named)?;
        let lengths: Vec<_> = tensors.iter().map(|(_, meta)| meta.nbytes()).collect();
        plan.regions(&lengths, |len| self.take(len))
    }

    /// Registers memory of the caller until its last handle is gone, so that it is neither copied
    /// nor registered again as a source or destination.
    pub fn register(&self, region: RegionMut) -> Result<RegionMut> {
        self.open("register memory")?;
        self.shared.memory.adopt(region)
    }

    /// The name under which the cluster knows this client, `host:port`. Blocks.
    pub fn hostname(&self) -> Result<String> {
        self.open("get host name")?;
        self.shared.api.hostname()
    }

    /// Counters beyond [`Transport::health`].
    pub fn stats(&self) -> StoreStats {
        let Shared { ledger, memory, segments, native, .. } = &*self.shared;
        StoreStats {
            native_bytes: native.as_ref().map_or(0, Native::bytes),
            registrations: memory.registrations(),
            pool_bytes: memory.pool_bytes(),
            copied_bytes: ledger.copied_bytes.load(Ordering::Relaxed),
            in_calls: Duration::from_nanos(ledger.in_calls_ns.load(Ordering::Relaxed)),
            read_retries: ledger.read_retries.load(Ordering::Relaxed),
            silent_segments: segments.count(),
            refused_fetches: segments.refused.load(Ordering::Relaxed),
            pending_removals: ledger.pending_keys().0,
            deferred_removals: ledger.deferred.load(Ordering::Relaxed),
        }
    }

    /// Tries again to remove what releases could not remove, for at most `patience`, and says what
    /// is left. Releases and publishes of a sample do so for that sample by themselves.
    pub async fn drain_removals(&self, patience: Duration) -> Result<DrainReport> {
        self.open("drain removals")?;
        self.drain(patience).await
    }

    async fn drain(&self, patience: Duration) -> Result<DrainReport> {
        let shared = self.shared.clone();
        self.call("drain removals", patience + HEALTH_PATIENCE, move |flight| {
            Ok(release::drain(&shared, flight, patience))
        })
        .await
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    pub(crate) fn open(&self, operation: &'static str) -> Result<()> {
        if self.shared.closed.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Closed, operation, "the transport was closed"));
        }
        Ok(())
    }

    /// Runs a blocking call on the transport's threads and waits for it, at most for `patience`.
    async fn call<T: Send + 'static>(
        &self,
        operation: &'static str,
        patience: Duration,
        job: impl FnOnce(&Flight) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.call_on(&self.shared.workers, operation, patience, job).await
    }

    /// As [`Self::call`], on these threads.
    async fn call_on<T: Send + 'static>(
        &self,
        workers: &Workers,
        operation: &'static str,
        patience: Duration,
        job: impl FnOnce(&Flight) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let flight = Flight::new(patience, &self.shared.abandoned_bytes);
        let waiting = Waiting(flight.clone());
        let answer = workers.submit(flight, job);
        let result = match tokio::time::timeout(patience, answer).await {
            Ok(Ok(result)) => result,
            Ok(Err(_lost)) => {
                Err(Error::new(ErrorKind::Unexpected, operation, "the store's threads are gone"))
            }
            Err(_elapsed) => Err(Error::new(ErrorKind::Timeout, operation, "the deadline passed")
                .with("deadline_ms", patience.as_millis())),
        };
        drop(waiting);
        if let Err(error) = &result {
            self.shared.ledger.failed(error);
        }
        result
    }

    /// Runs a short blocking call on the thread that never waits for a peer's payload.
    async fn attend<T: Send + 'static>(
        &self,
        operation: &'static str,
        patience: Duration,
        job: impl FnOnce(&Shared) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let flight = Flight::new(patience, &self.shared.abandoned_bytes);
        let waiting = Waiting(flight.clone());
        let shared = self.shared.clone();
        let answer = self.shared.attendant.submit(flight, move |_| job(&shared));
        let result = match tokio::time::timeout(patience, answer).await {
            Ok(Ok(result)) => result,
            Ok(Err(_lost)) => {
                Err(Error::new(ErrorKind::Unexpected, operation, "the store's threads are gone"))
            }
            Err(_elapsed) => Err(Error::new(ErrorKind::Timeout, operation, "the deadline passed")
                .with("deadline_ms", patience.as_millis())),
        };
        drop(waiting);
        result
    }

    /// Has the owners of what a fetch was too late for asked for a sign of life, in the background;
    /// fetches that begin from now on wait for the answer.
    fn suspect(&self, late: Vec<Arc<Descriptor>>) {
        let Some(suspicion) = self.shared.segments.suspicion() else { return };
        let flight = Flight::new(HEALTH_PATIENCE, &self.shared.abandoned_bytes);
        let shared = self.shared.clone();
        drop(self.shared.attendant.submit(flight, move |_| {
            let keys = fetch::keys(&shared, &late)?;
            shared.segments.suspect(&keys.iter().map(AsRef::as_ref).collect::<Vec<_>>());
            drop(suspicion);
            Ok(())
        }));
    }

    /// Finds out which of the samples published here other processes have released.
    async fn reconcile(&self) -> Result<()> {
        let mut probes = self.shared.ledger.probes();
        probes.truncate(MAX_PROBES);
        if probes.is_empty() {
            return Ok(());
        }
        let shared = self.shared.clone();
        self.call("measure", HEALTH_PATIENCE, move |flight| {
            for part in probes.chunks(shared.config.part_keys) {
                flight.check()?;
                let keys: Vec<&str> = part.iter().map(|(_, key)| &**key).collect();
                for ((sample, _), found) in part.iter().zip(shared.api.exists(&keys)?) {
                    // Hard-pinned objects are not evicted: somebody released it.
                    if found == Ok(false)
                        && let Some(_claim) = shared.ledger.try_claim(std::slice::from_ref(sample))
                        && shared.ledger.forget(sample)
                    {
                        shared.ledger.released.fetch_add(1, Ordering::SeqCst);
                    }
                }
            }
            Ok(())
        })
        .await
    }

    /// Waits until the consumers have released what was published here.
    async fn linger(&self) {
        let deadline = Instant::now() + self.shared.config.close_linger;
        loop {
            if self.reconcile().await.is_err() {
                break; // without a master nothing is released any more
            }
            if self.shared.ledger.totals().0 == 0 || Instant::now() >= deadline {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let left = self.shared.ledger.probes();
        if !left.is_empty() {
            let samples: Vec<_> = left.iter().take(16).map(|(s, _)| s.to_string()).collect();
            tracing::warn!(count = left.len(), ?samples, "closing with samples not yet released");
        }
    }
}

impl Shared {
    /// The kind of memory that is taken beside the host's.
    fn device_kind(&self) -> Option<RegionKind> {
        self.memory.device().map(DeviceMemory::kind)
    }

    /// Removes in the background what was put off.
    pub(crate) fn drain_soon(self: &Arc<Self>) {
        let shared = self.clone();
        let patience = self.config.removal_patience;
        let flight = Flight::new(patience, &self.abandoned_bytes);
        drop(self.workers.submit(flight, move |flight| {
            release::drain(&shared, flight, patience);
            Ok(())
        }));
    }
}

#[async_trait]
impl Transport for StoreTransport {
    fn info(&self) -> &TransportInfo {
        &self.info
    }

    async fn publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        self.open("publish")?;
        publish::check(&batch, self.shared.device_kind())?;
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let start = Instant::now();
        let claim = self.shared.ledger.claim(publish::samples(&batch), options.deadline).await?;
        let left = options.deadline.saturating_sub(start.elapsed());
        let shared = self.shared.clone();
        let placed = self
            .call("publish", left, move |flight| {
                publish::run(&shared, flight, batch, &options, claim)
            })
            .await?;
        Ok(placed.take_over())
    }

    async fn fetch(
        &self,
        requests: Vec<FetchRequest>,
        options: FetchOptions,
    ) -> Result<Vec<Fetched>> {
        self.open("fetch")?;
        fetch::check(&requests, self.info.capabilities.ranges, self.shared.device_kind())?;
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let start = Instant::now();
        let asked: Vec<_> = requests.iter().map(|r| r.descriptor.clone()).collect();
        if !self.shared.segments.is_clear() {
            let asked = asked.clone();
            let checked = self.attend("fetch", options.deadline, move |shared| {
                let keys = fetch::keys(shared, &asked)?;
                shared.segments.check(&keys.iter().map(AsRef::as_ref).collect::<Vec<_>>())
            });
            checked.await.inspect_err(|error| self.shared.ledger.failed(error))?;
        }
        let left = options.deadline.saturating_sub(start.elapsed());
        let shared = self.shared.clone();
        let fetched =
            self.call("fetch", left, move |flight| fetch::run(&shared, flight, requests)).await;
        if fetched.as_ref().is_err_and(|error| error.kind() == ErrorKind::Timeout) {
            self.suspect(asked);
        }
        fetched
    }

    async fn release(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
        self.open("release")?;
        if releases.is_empty() {
            return Ok(ReleaseReport::default());
        }
        let patience = self.shared.config.removal_patience + CLOSE_PATIENCE;
        let samples = release::samples(&releases);
        let claim = self.shared.ledger.claim(samples, patience).await?;
        let shared = self.shared.clone();
        let job = move |flight: &Flight| release::run(&shared, flight, &releases, claim);
        self.call_on(&self.shared.remover, "release", patience, job).await
    }

    async fn health(&self) -> Result<Health> {
        self.open("health")?;
        drop(self.reconcile().await); // a failure is the last error below
        let Shared { ledger, memory, .. } = &*self.shared;
        let load = |count: &AtomicU64| count.load(Ordering::SeqCst);
        let mut health = Health::default();
        (health.resident_samples, health.resident_bytes) = ledger.totals();
        health.published_samples = load(&ledger.published);
        health.released_samples = load(&ledger.released);
        health.duplicate_frees = load(&ledger.duplicates);
        health.stale_frees = load(&ledger.stale);
        health.host_payload_bytes = load(&ledger.host_bytes);
        let by_device = memory.device().map_or(0, DeviceMemory::quarantined_bytes);
        health.quarantined_bytes =
            memory.quarantined_bytes() + by_device + load(&self.shared.abandoned_bytes);
        health.registrations = memory.registrations();
        health.last_error = ledger.last_error();
        Ok(health)
    }

    async fn close(&self) -> Result<()> {
        if self.shared.closed.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        if !self.shared.config.close_linger.is_zero() {
            self.linger().await;
        }
        let idle = self.shared.workers.idle(CLOSE_PATIENCE).await
            && self.shared.remover.idle(CLOSE_PATIENCE).await;
        let drained = self.drain(self.shared.config.removal_patience).await?;
        if !idle {
            return Err(Error::new(ErrorKind::Busy, "close", "a call to the store still runs"));
        }
        let shared = self.shared.clone();
        let closing = move |_: &Flight| {
            shared.native.iter().for_each(Native::close);
            shared.api.close()
        };
        self.call("close", CLOSE_PATIENCE, closing).await?;
        self.shared.memory.end_quarantine();
        if drained.remaining > 0 {
            return Err(Error::new(ErrorKind::Busy, "close", "objects could not be removed")
                .with("objects", drained.remaining)
                .with("keys", drained.remaining_keys.join(", "))
                .remedy("remove them when the master is back, or they stay in its memory"));
        }
        Ok(())
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl fmt::Debug for StoreTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreTransport")
            .field("info", &self.info)
            .field("config", &self.shared.config)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
