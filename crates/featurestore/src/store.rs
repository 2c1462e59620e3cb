//! The facade: one transport, chosen once, behind the calls that a trainer makes.

use std::{sync::Arc, time::Duration};

use transport_core::{
    ClientId, Descriptor, Destination, FetchOptions, FetchRequest, Fetched, Health, Release,
    ReleaseReport, Result, SessionName, Transport, TransportInfo,
};

use crate::{
    choose::{self, Choice},
    config::Config,
    lifecycle::{Retention, Samples},
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
    samples: Arc<Samples>,
    choice: Choice,
    client: ClientId,
    deadline: Duration,
}

impl FeatureStore {
    /// Chooses a transport that reaches all `servers` (their control addresses) and connects.
    ///
    /// The choice is made once and never changes; [`Self::choice`] says what was considered.
    pub async fn open(config: &Config, servers: &[SessionName]) -> Result<Self> {
        let client = ClientId::random();
        let (transport, choice) = choose::open(config, servers, &client).await?;
        let samples = Arc::new(Samples::over(transport.clone(), Retention::default()));
        Ok(Self { transport, samples, choice, client, deadline: config.deadline })
    }

    /// Reads one sample: a view where the transport gives views, a copy in the pool elsewhere.
    pub async fn get(&self, sample: Arc<Descriptor>) -> Result<Fetched> {
        let mut fetched = self.get_many(vec![sample]).await?;
        Ok(fetched.pop().expect("one a request"))
    }

    /// Reads several samples in one call.
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
    pub async fn release(&self, samples: Vec<Arc<Descriptor>>) -> Result<ReleaseReport> {
        self.transport.release(samples.into_iter().map(Release::from).collect()).await
    }

    /// The same samples with their lifecycle: adopted, leased, kept until they are settled, and
    /// freed exactly once, with what could not be freed tried again.
    pub fn samples(&self) -> &Arc<Samples> {
        &self.samples
    }

    /// Keeps samples as `retention` says; before the first one is adopted.
    #[must_use]
    pub fn retention(mut self, retention: Retention) -> Self {
        self.samples = Arc::new(Samples::over(self.transport.clone(), retention));
        self
    }

    /// What the transport measures of itself.
    pub async fn health(&self) -> Result<Health> {
        self.transport.health().await
    }

    /// Ends connections within a bound. Idempotent.
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
