//! The facade: one transport, chosen once, behind the calls that a trainer makes.

use std::{sync::Arc, time::Duration};

use transport_core::{
    ClientId, Descriptor, Destination, FetchOptions, FetchRequest, Fetched, Health, Release,
    ReleaseReport, Result, SessionName, Transport, TransportInfo,
};

#[cfg(feature = "lifecycle")]
use crate::lifecycle::{Retention, Samples};
use crate::{
    choose::{self, Choice},
    config::Config,
};

/// Samples of capture servers, as a trainer sees them.
///
/// ```no_run
/// use std::sync::Arc;
/// use featurestore::{Config, FeatureStore};
/// # async fn train(descriptor: Arc<transport_core::Descriptor>) -> transport_core::Result<()> {
/// let servers = ["127.0.0.1:41235".parse()?];
/// let store = FeatureStore::open(&Config::default(), &servers).await?;
/// let sample = store.get(descriptor.clone()).await?;
/// for (name, tensor) in &sample.tensors {
///     println!("{name}: {} of {} bytes", tensor.meta, tensor.data.len());
/// }
/// drop(sample); // views must be gone before their memory goes back
/// store.release(vec![descriptor]).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct FeatureStore {
    transport: Arc<dyn Transport>,
    #[cfg(feature = "lifecycle")]
    samples: Arc<Samples>,
    choice: Choice,
    client: ClientId,
    deadline: Duration,
}

impl FeatureStore {
    /// Chooses a transport that reaches all `servers` (their control addresses) and connects.
    ///
    /// The choice is made once and never changes; [`Self::choice`] says what was considered. Takes
    /// at most a few seconds a server.
    ///
    /// # Errors
    /// - [`PeerGone`] or [`Timeout`], temporary: a server does not answer, or not any more.
    /// - [`Busy`], temporary: a server has as many connections as it takes.
    /// - [`PermissionDenied`], permanent: a server asks for another token; see [`Config::token`].
    /// - [`Protocol`], permanent: what answers is no control listener, such as a server's HTTP port.
    /// - [`Unsupported`], permanent: the transport that is asked for by name is not available or, in
    ///   strict mode, the best one is not; or this build has none (feature `direct`), or none that
    ///   receives where [`Config::receive`] says (feature `cuda`).
    /// - [`ConfigInvalid`], permanent: [`Config::pool`] is larger than the memory that is left; or the
    ///   transport cannot bring samples where [`Config::receive`] says.
    /// - [`CapacityExceeded`], temporary: the GPU has no room for the pool, or the host locks no more
    ///   memory.
    ///
    /// [`Busy`]: transport_core::ErrorKind::Busy
    /// [`CapacityExceeded`]: transport_core::ErrorKind::CapacityExceeded
    /// [`ConfigInvalid`]: transport_core::ErrorKind::ConfigInvalid
    /// [`PeerGone`]: transport_core::ErrorKind::PeerGone
    /// [`PermissionDenied`]: transport_core::ErrorKind::PermissionDenied
    /// [`Protocol`]: transport_core::ErrorKind::Protocol
    /// [`Timeout`]: transport_core::ErrorKind::Timeout
    /// [`Unsupported`]: transport_core::ErrorKind::Unsupported
    pub async fn open(config: &Config, servers: &[SessionName]) -> Result<Self> {
        let client = ClientId::random();
        let (transport, choice) = choose::open(config, servers, &client).await?;
        Ok(Self {
            #[cfg(feature = "lifecycle")]
            samples: Arc::new(Samples::over(transport.clone(), Retention::default())),
            transport,
            choice,
            client,
            deadline: config.deadline,
        })
    }

    /// Reads one sample: a view where the transport gives views, a copy in the pool elsewhere, which
    /// lies in host memory or on a GPU as [`Config::receive`] says.
    ///
    /// # Errors
    /// Those of [`Self::get_many`].
    pub async fn get(&self, sample: Arc<Descriptor>) -> Result<Fetched> {
        let mut fetched = self.get_many(vec![sample]).await?;
        Ok(fetched.pop().expect("one a request"))
    }

    /// Reads several samples in one call, in order: all of them, or none with the first error.
    ///
    /// An error names the key, what was expected and what was found. Memory that a transfer may
    /// still write is neither freed nor used again, also when the future is dropped.
    ///
    /// # Errors
    /// - [`NotFound`], permanent: a sample is gone, released or taken back after its lease.
    /// - [`Stale`], permanent: a descriptor is of an older life of its sample or server.
    /// - [`OutOfRange`], permanent: a tensor cannot lie where its descriptor says, or is larger than
    ///   the receive pool.
    /// - [`ShortRead`] or [`Corrupt`], permanent: other bytes came than were described.
    /// - [`Unsupported`], permanent: the sample does not lie in an arena, or not in one that the
    ///   transport reads.
    /// - [`CapacityExceeded`], temporary: the receive pool is full; drop what was read before.
    /// - [`PeerGone`], temporary: the server's process ended, or the connection to it.
    /// - [`Timeout`], temporary: [`Config::deadline`] passed.
    /// - [`Closed`], permanent: after [`Self::close`].
    ///
    /// [`CapacityExceeded`]: transport_core::ErrorKind::CapacityExceeded
    /// [`Closed`]: transport_core::ErrorKind::Closed
    /// [`Corrupt`]: transport_core::ErrorKind::Corrupt
    /// [`NotFound`]: transport_core::ErrorKind::NotFound
    /// [`OutOfRange`]: transport_core::ErrorKind::OutOfRange
    /// [`PeerGone`]: transport_core::ErrorKind::PeerGone
    /// [`ShortRead`]: transport_core::ErrorKind::ShortRead
    /// [`Stale`]: transport_core::ErrorKind::Stale
    /// [`Timeout`]: transport_core::ErrorKind::Timeout
    /// [`Unsupported`]: transport_core::ErrorKind::Unsupported
    pub async fn get_many(&self, samples: Vec<Arc<Descriptor>>) -> Result<Vec<Fetched>> {
        let views = self.transport.info().capabilities.views;
        let request = |sample| {
            let destination = if views { Destination::View } else { Destination::Pool };
            FetchRequest::new(sample, destination)
        };
        let requests = samples.into_iter().map(request).collect();
        self.transport.fetch(requests, FetchOptions::default().deadline(self.deadline)).await
    }

    /// Tells the servers that samples are no longer needed. Views of them must be gone.
    ///
    /// Idempotent: what is gone already, or belongs to an older life, is counted in the report and
    /// is no error; so is what an older server takes without confirming it.
    ///
    /// # Errors
    /// - [`Timeout`], temporary: a server does not answer; calling again is safe.
    /// - [`PeerGone`], temporary: a connection broke off before the server's answer.
    /// - [`PermissionDenied`], permanent: a server asks for another token.
    /// - [`Unsupported`], permanent: a sample does not lie in an arena.
    /// - [`Closed`], permanent: after [`Self::close`].
    ///
    /// [`Closed`]: transport_core::ErrorKind::Closed
    /// [`PeerGone`]: transport_core::ErrorKind::PeerGone
    /// [`PermissionDenied`]: transport_core::ErrorKind::PermissionDenied
    /// [`Timeout`]: transport_core::ErrorKind::Timeout
    /// [`Unsupported`]: transport_core::ErrorKind::Unsupported
    pub async fn release(&self, samples: Vec<Arc<Descriptor>>) -> Result<ReleaseReport> {
        self.transport.release(samples.into_iter().map(Release::from).collect()).await
    }

    /// The same samples with their lifecycle: adopted, leased, kept until they are settled, and
    /// freed exactly once, with what could not be freed tried again.
    #[cfg(feature = "lifecycle")]
    pub fn samples(&self) -> &Arc<Samples> {
        &self.samples
    }

    /// Keeps samples as `retention` says; before the first one is adopted.
    #[cfg(feature = "lifecycle")]
    #[must_use]
    pub fn retention(mut self, retention: Retention) -> Self {
        self.samples = Arc::new(Samples::over(self.transport.clone(), retention));
        self
    }

    /// What the transport measures of itself, in this process.
    ///
    /// # Errors
    /// [`Closed`](transport_core::ErrorKind::Closed), permanent: after [`Self::close`].
    pub async fn health(&self) -> Result<Health> {
        self.transport.health().await
    }

    /// Ends connections within a bound. Idempotent; what this process still holds comes back to the
    /// servers.
    ///
    /// # Errors
    /// None of today's transports fails to close; one that does says what it could not end.
    pub async fn close(&self) -> Result<()> {
        self.transport.close().await
    }

    /// The transport in use.
    pub fn info(&self) -> &TransportInfo {
        self.transport.info()
    }

    /// What was considered and why this transport was chosen.
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// The identity under which this process holds samples; capture requests name it so that
    /// samples are held from their publication on.
    pub fn client_id(&self) -> &ClientId {
        &self.client
    }

    /// Longest time of one fetch.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }
}
