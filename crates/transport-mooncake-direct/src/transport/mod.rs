//! The transport: one engine, one identity, and what is known about every publisher.

mod builder;
mod fetch;
mod publishers;
mod reach;
mod release;
mod request;
mod transfer;
mod uses;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use capture_arena::RegionPool;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use transport_core::{
    ClientId, Descriptor, Error, ErrorKind, FetchOptions, FetchRequest, Fetched, Health,
    Publication, PublishOptions, Release, ReleaseReport, Result, SessionName, Transport,
    TransportInfo,
};

pub use builder::{DirectTransportBuilder, Engine};
use publishers::Publishers;
use reach::Reach;
pub use release::PendingRelease;
use transfer::Transfers;
pub(crate) use uses::InUse;
use uses::Uses;

use crate::{CaptureSink, MooncakeEngine, Standing, TcpEngine, net::timed_out, workers::Workers};

/// How long `close` waits for transfers that run.
const CLOSE_BOUND: Duration = Duration::from_secs(10);
/// How long `close` waits for frees to be answered, for each publisher.
const FLUSH_BOUND: Duration = Duration::from_secs(5);
/// How long a release waits for answers.
const RELEASE_BOUND: Duration = Duration::from_secs(30);
/// How much later than its deadline a fetch may fail by itself before its caller stops waiting.
const GRACE: Duration = Duration::from_millis(250);

/// Reads samples out of the memory of the processes that captured them, and publishes its own.
///
/// - [`Engine::Shm`] maps the publisher's memory: views without a copy, or one copy;
/// - [`Engine::Tcp`] speaks Mooncake's tcp wire;
/// - [`Engine::Mooncake`] has Mooncake's own transfer engine do it;
/// - `Engine::Cuda`, with the feature `cuda`, copies from device to device.
///
/// A fetched sample is held until it is released, or until this client has been silent for its
/// lease. A view holds its sample for as long as it lives: a release waits for it, and while this
/// process maps the publisher's memory, no silence makes the publisher reuse what it holds. Closing
/// the transport while views are alive leaves everything it held where it is until they are gone.
///
/// # Trust
/// That memory does not change under a view is the publisher's to keep, which writes it: views are
/// for publishers of the same user whose code is trusted, and for descriptors as they gave them.
///
/// Every call also exists as one that blocks its thread, without a hop to another one.
#[derive(Debug)]
pub struct DirectTransport {
    info: TransportInfo,
    inner: Arc<Inner>,
    sink: Option<CaptureSink>,
    jobs: Workers,
}

/// What the jobs of a transport share.
#[derive(Debug)]
struct Inner {
    engine: Option<EngineState>,
    reach: Reach,
    #[cfg(feature = "cuda")]
    staging: Option<capture_arena::cuda::Staging>,
    pool: Option<RegionPool>,
    client: ClientId,
    publishers: Publishers,
    by_name: Option<Publishers>, // frees of samples whose life is not known, where memory is mapped
    uses: Arc<Uses>,
    transfers: Transfers,
    transfer_delay: Duration,
    host_bytes: AtomicU64,
    device_bytes: AtomicU64,
    last_error: Mutex<Option<String>>,
    closed: AtomicBool,
}

#[derive(Debug)]
enum EngineState {
    Shm,
    Tcp(TcpEngine),
    Mooncake(MooncakeEngine),
    #[cfg(feature = "cuda")]
    Cuda(crate::cuda::CudaEngine),
}

impl EngineState {
    /// Whether some bytes of a tensor can be read alone. What shm shows costs nothing whole.
    fn reads_ranges(&self) -> bool {
        matches!(self, Self::Tcp(_) | Self::Mooncake(_))
    }
}

impl DirectTransport {
    /// Settings, to begin with.
    pub fn builder() -> DirectTransportBuilder {
        DirectTransportBuilder::default()
    }

    /// Who this consumer is: the holder that publishers may name for it.
    pub fn client_id(&self) -> &ClientId {
        &self.inner.client
    }

    /// What it publishes through.
    pub fn sink(&self) -> Option<&CaptureSink> {
        self.sink.as_ref()
    }

    /// The tcp engine, if that is the one.
    pub fn tcp(&self) -> Option<&TcpEngine> {
        match &self.inner.engine {
            Some(EngineState::Tcp(engine)) => Some(engine),
            _ => None,
        }
    }

    /// The mooncake engine, if that is the one.
    pub fn mooncake(&self) -> Option<&MooncakeEngine> {
        match &self.inner.engine {
            Some(EngineState::Mooncake(engine)) => Some(engine),
            _ => None,
        }
    }

    /// Connects to the control listener of a capture server, so that what the server publishes for
    /// this client is kept for it from then on.
    ///
    /// A server that is asked to hold samples for a client that has not announced itself keeps them
    /// for its default lease only.
    pub fn announce(&self, control: &SessionName, deadline: Instant) -> Result<Standing> {
        self.check_open("announce")?;
        self.inner.publishers.get(control)?.client().connect(deadline)
    }

    /// What a capture server measures of itself.
    pub fn publisher_health(&self, control: &SessionName, deadline: Instant) -> Result<Health> {
        self.check_open("health")?;
        self.inner.publishers.get(control)?.client().health(deadline)
    }

    /// [`Transport::fetch`] on this thread.
    pub fn fetch_blocking(
        &self,
        requests: Vec<FetchRequest>,
        options: &FetchOptions,
    ) -> Result<Vec<Fetched>> {
        self.check_can_fetch("fetch")?;
        let deadline = deadline_of(options.deadline);
        let transfer = self.inner.transfers.begin(0);
        self.inner.fetch(requests, deadline, &transfer, || true)
    }

    /// Hands frees over to the threads of the control connections and returns at once.
    pub fn release_later(&self, releases: Vec<Release>) -> Result<PendingRelease> {
        self.check_can_fetch("release")?;
        self.inner.release(releases)
    }

    /// [`Transport::release`] on this thread.
    pub fn release_blocking(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
        self.release_later(releases)?.wait(Instant::now() + RELEASE_BOUND)
    }

    /// [`Transport::health`] on this thread.
    pub fn health_blocking(&self) -> Result<Health> {
        self.check_open("health")?;
        let health = match &self.sink {
            Some(sink) => sink.health_blocking()?,
            None => Health::default(),
        };
        Ok(self.inner.complete(health))
    }

    /// [`Transport::close`] on this thread.
    pub fn close_blocking(&self) {
        close(&self.inner, &self.jobs, self.sink.as_ref());
    }

    /// The engine for device memory, if that is the one.
    #[cfg(feature = "cuda")]
    pub fn cuda(&self) -> Option<&crate::cuda::CudaEngine> {
        match &self.inner.engine {
            Some(EngineState::Cuda(engine)) => Some(engine),
            _ => None,
        }
    }

    fn check_open(&self, operation: &'static str) -> Result<()> {
        self.inner.check_open(operation)
    }

    fn check_can_fetch(&self, operation: &'static str) -> Result<()> {
        self.check_open(operation)?;
        if self.inner.engine.is_none() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                operation,
                "this transport only publishes",
            )
            .remedy("choose an engine to read with: shm, tcp or mooncake"));
        }
        Ok(())
    }
}

#[async_trait]
impl Transport for DirectTransport {
    fn info(&self) -> &TransportInfo {
        &self.info
    }

    async fn publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        self.check_open("publish")?;
        match &self.sink {
            Some(sink) => sink.publish(batch, options).await,
            None => {
                Err(Error::new(ErrorKind::Unsupported, "publish", "this transport only consumes")
                    .remedy("samples are written by the capture server; give the transport a sink"))
            }
        }
    }

    async fn fetch(
        &self,
        requests: Vec<FetchRequest>,
        options: FetchOptions,
    ) -> Result<Vec<Fetched>> {
        self.check_can_fetch("fetch")?;
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let deadline = deadline_of(options.deadline);
        let transfer = self.inner.transfers.begin(request::destination_bytes(&requests));
        let abandoned = transfer.abandon_on_drop();
        let inner = self.inner.clone();
        let (done, fetched) = oneshot::channel();
        self.jobs.run(move || {
            let result = if transfer.is_stopped() {
                drop(requests); // waited in line for longer than its caller
                Err(timed_out("fetch"))
            } else {
                inner.fetch(requests, deadline, &transfer, || !done.is_closed())
            };
            // A result that nobody takes is dropped here, before its memory leaves quarantine.
            drop(done.send(result));
            drop(transfer);
        })?;
        let wait = deadline.saturating_duration_since(Instant::now()) + GRACE;
        let result = match tokio::time::timeout(wait, fetched).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(Error::new(ErrorKind::Closed, "fetch", "the transport was closed")),
            Err(_) => Err(timed_out("fetch")),
        };
        if result.is_ok() {
            abandoned.disarm();
        }
        result
    }

    async fn release(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
        let pending = self.release_later(releases)?;
        match tokio::time::timeout(RELEASE_BOUND, pending.outcome()).await {
            Ok(outcome) => outcome,
            Err(_) => Err(timed_out("release")),
        }
    }

    async fn let_go(&self, samples: Vec<Arc<Descriptor>>) -> Result<()> {
        self.check_can_fetch("let go")?;
        self.inner.let_go(&samples)
    }

    async fn health(&self) -> Result<Health> {
        self.check_open("health")?;
        let health = match &self.sink {
            Some(sink) => sink.health().await?,
            None => Health::default(),
        };
        Ok(self.inner.complete(health))
    }

    async fn close(&self) -> Result<()> {
        let (inner, jobs, sink) = (self.inner.clone(), self.jobs.clone(), self.sink.clone());
        let (done, closed) = oneshot::channel();
        // Joining threads blocks, so it has one of its own.
        let closing = std::thread::Builder::new().name("fs-close".into()).spawn(move || {
            close(&inner, &jobs, sink.as_ref());
            let _ = done.send(());
        });
        match closing {
            Ok(_) => drop(closed.await),
            Err(_) => self.close_blocking(),
        }
        Ok(())
    }
}

impl Drop for DirectTransport {
    fn drop(&mut self) {
        self.close_blocking();
    }
}

impl Inner {
    fn check_open(&self, operation: &'static str) -> Result<()> {
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Closed, operation, "the transport is closed"));
        }
        Ok(())
    }

    /// Closes the memory of publishers that are gone: it would stay taken on its device.
    #[cfg(feature = "cuda")]
    fn close_dead_peers(&self, engine: &crate::cuda::CudaEngine) {
        engine.retain(|session, epoch| {
            epoch.is_none_or(|epoch| self.publishers.answers(session, epoch))
        });
    }

    fn complete(&self, mut health: Health) -> Health {
        match &self.engine {
            Some(EngineState::Tcp(engine)) => health.connected_peers += engine.stats().connections,
            Some(EngineState::Mooncake(engine)) => {
                let stats = engine.stats();
                health.connected_peers += stats.peers;
                health.quarantined_bytes += stats.quarantined_bytes;
            }
            #[cfg(feature = "cuda")]
            Some(EngineState::Cuda(engine)) => {
                self.close_dead_peers(engine);
                let stats = engine.stats();
                health.connected_peers += stats.peers;
                health.quarantined_bytes += stats.quarantined_bytes;
            }
            Some(EngineState::Shm) | None => {}
        }
        self.publishers.add_to(&mut health);
        if let Some(publishers) = &self.by_name {
            publishers.add_to(&mut health);
        }
        health.host_payload_bytes += self.host_bytes.load(Ordering::Relaxed);
        health.device_payload_bytes += self.device_bytes.load(Ordering::Relaxed);
        health.quarantined_bytes += self.transfers.quarantined();
        #[cfg(feature = "cuda")]
        if let Some(staging) = &self.staging {
            health.quarantined_bytes += staging.quarantined_bytes();
        }
        health.deferred_samples += self.uses.deferred();
        if let Some(error) = &*self.last_error.lock() {
            health.last_error = Some(error.clone());
        }
        health
    }
}

fn close(inner: &Inner, jobs: &Workers, sink: Option<&CaptureSink>) {
    let first = !inner.closed.swap(true, Ordering::Relaxed);
    if let Some(sink) = sink {
        sink.stop_publishing();
    }
    if !jobs.close(CLOSE_BOUND) {
        inner.transfers.stop_all();
        jobs.close(Duration::from_secs(1));
    }
    if first {
        if let Some(publishers) = &inner.by_name {
            publishers.close(FLUSH_BOUND); // before mappings end, and with them what was freed
        }
        inner.publishers.close(FLUSH_BOUND);
        match &inner.engine {
            Some(EngineState::Tcp(engine)) => engine.close(),
            Some(EngineState::Mooncake(engine)) => {
                if let Err(error) = engine.close() {
                    tracing::warn!(%error, "Mooncake's engine does not stop");
                }
            }
            #[cfg(feature = "cuda")]
            Some(EngineState::Cuda(engine)) => engine.retain(|_, _| false),
            Some(EngineState::Shm) | None => {}
        }
    }
    if let Some(sink) = sink {
        sink.close_blocking();
    }
}

fn deadline_of(bound: Duration) -> Instant {
    const LONGEST: Duration = Duration::from_secs(24 * 3600);
    Instant::now() + bound.min(LONGEST)
}
