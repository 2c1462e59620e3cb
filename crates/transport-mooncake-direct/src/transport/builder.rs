//! Putting a transport together.

use std::time::Duration;

use async_trait::async_trait;
use capture_arena::RegionPool;
use control_proto::Secret;
use transport_core::{
    Capabilities, ClientId, Descriptor, Error, ErrorKind, FetchOptions, FetchRequest, Fetched,
    Health, Publication, PublishOptions, Release, ReleaseReport, Result, Transport, TransportInfo,
};

use crate::{CaptureSink, TcpOptions};

/// How bytes are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Engine {
    /// From a process of the same host and user, by mapping its memory.
    Shm,
    /// From any Mooncake or featurestore process, over Mooncake's tcp wire.
    Tcp,
}

/// Settings of a [`DirectTransport`].
#[derive(Clone, Debug, Default)]
pub struct DirectTransportBuilder {
    engine: Option<Engine>,
    sink: Option<CaptureSink>,
    pool: Option<RegionPool>,
    client: Option<ClientId>,
    lease: Option<Duration>,
    token: Option<Secret>,
    tcp: TcpOptions,
    reason: Option<String>,
    transfer_delay: Duration,
}

impl DirectTransportBuilder {
    /// Reads with this engine. Without one the transport only publishes.
    #[must_use]
    pub fn engine(mut self, engine: Engine) -> Self {
        self.engine = Some(engine);
        self
    }

    /// Publishes through this sink, which is closed with the transport. Without one the transport
    /// only consumes.
    #[must_use]
    pub fn sink(mut self, sink: CaptureSink) -> Self {
        self.sink = Some(sink);
        self
    }

    /// Receives [`Destination::Pool`](transport_core::Destination::Pool) reads here.
    #[must_use]
    pub fn pool(mut self, pool: RegionPool) -> Self {
        self.pool = Some(pool);
        self
    }

    /// Who this consumer is. Default: a random identity.
    #[must_use]
    pub fn client_id(mut self, client: ClientId) -> Self {
        self.client = Some(client);
        self
    }

    /// How long its claims outlive its last sign of life. Default: 30 seconds.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }

    /// What it proves to know to control listeners.
    #[must_use]
    pub fn token(mut self, token: Secret) -> Self {
        self.token = Some(token);
        self
    }

    /// How the tcp engine behaves.
    #[must_use]
    pub fn tcp(mut self, options: TcpOptions) -> Self {
        self.tcp = options;
        self
    }

    /// Why this transport was chosen, for people.
    #[must_use]
    pub fn reason(mut self, reason: impl Into<String>) -> Self {
        self.reason = Some(reason.into());
        self
    }

    /// Least time that each fetch with a copy takes, so that tests can look at a transfer in
    /// flight. Default: zero.
    #[must_use]
    pub fn transfer_delay(mut self, delay: Duration) -> Self {
        self.transfer_delay = delay;
        self
    }

    /// Puts the transport together. Nothing is connected yet.
    pub fn build(self) -> Result<DirectTransport> {
        Err(Error::new(ErrorKind::Unsupported, "build transport", "being written"))
    }
}

/// Reads samples out of the memory of the processes that captured them, and publishes its own.
#[derive(Debug)]
pub struct DirectTransport {
    info: TransportInfo,
    client: ClientId,
    sink: Option<CaptureSink>,
}

/// Frees that were handed over and are not answered yet.
#[derive(Debug)]
pub struct PendingRelease(());

impl PendingRelease {
    /// Waits for the answers, at most `timeout`.
    pub fn wait(self, _timeout: Duration) -> Result<ReleaseReport> {
        Err(Error::new(ErrorKind::Unsupported, "release", "being written"))
    }
}

impl DirectTransport {
    /// Settings, to begin with.
    pub fn builder() -> DirectTransportBuilder {
        DirectTransportBuilder::default()
    }

    /// Who this consumer is: the holder that publishers may name for it.
    pub fn client_id(&self) -> &ClientId {
        &self.client
    }

    /// What it publishes through.
    pub fn sink(&self) -> Option<&CaptureSink> {
        self.sink.as_ref()
    }

    /// [`Transport::fetch`] on this thread.
    pub fn fetch_blocking(
        &self,
        _requests: Vec<FetchRequest>,
        _options: &FetchOptions,
    ) -> Result<Vec<Fetched>> {
        Err(Error::new(ErrorKind::Unsupported, "fetch", "being written"))
    }

    /// Hands frees to the control connections' threads and returns at once.
    pub fn release_later(&self, _releases: Vec<Release>) -> Result<PendingRelease> {
        Err(Error::new(ErrorKind::Unsupported, "release", "being written"))
    }

    /// [`Transport::release`] on this thread.
    pub fn release_blocking(&self, _releases: Vec<Release>) -> Result<ReleaseReport> {
        Err(Error::new(ErrorKind::Unsupported, "release", "being written"))
    }

    /// [`Transport::close`] on this thread.
    pub fn close_blocking(&self) {}
}

#[async_trait]
impl Transport for DirectTransport {
    fn info(&self) -> &TransportInfo {
        &self.info
    }

    async fn publish(
        &self,
        _batch: Vec<Publication>,
        _options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        let _ = Capabilities::default();
        Err(Error::new(ErrorKind::Unsupported, "publish", "being written"))
    }

    async fn fetch(
        &self,
        _requests: Vec<FetchRequest>,
        _options: FetchOptions,
    ) -> Result<Vec<Fetched>> {
        Err(Error::new(ErrorKind::Unsupported, "fetch", "being written"))
    }

    async fn release(&self, _releases: Vec<Release>) -> Result<ReleaseReport> {
        Err(Error::new(ErrorKind::Unsupported, "release", "being written"))
    }

    async fn health(&self) -> Result<Health> {
        Err(Error::new(ErrorKind::Unsupported, "health", "being written"))
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}
