//! Transports and payloads that the tests use.

use std::sync::Arc;

use rollout_codec::{
    Rollout,
    payload::{Payload, Profile},
    transport::{RolloutConfig, RolloutTransport},
};
use transport_core::{
    Capabilities, Descriptor, FetchOptions, FetchRequest, Fetched, Health, MemoryTransport,
    Publication, PublishOptions, Release, ReleaseReport, Result, Transport, TransportInfo,
};

pub(crate) const MIB: u64 = 1 << 20;

pub(crate) fn memory(bytes: u64) -> Arc<MemoryTransport> {
    Arc::new(MemoryTransport::builder().arena_bytes(bytes).build().unwrap())
}

pub(crate) fn rollouts(transport: Arc<dyn Transport>, config: RolloutConfig) -> RolloutTransport {
    RolloutTransport::new(transport, config).unwrap()
}

pub(crate) fn text(bytes: u64) -> Rollout<'static> {
    Payload::new(Profile::Text, bytes).into_rollout()
}

/// A transport that takes what it is given and has no views, as a store.
#[derive(Debug)]
pub(crate) struct NoViews {
    inner: Arc<dyn Transport>,
    info: TransportInfo,
}

impl NoViews {
    pub(crate) fn new(inner: Arc<dyn Transport>) -> Arc<Self> {
        let mut can: Capabilities = inner.info().capabilities.clone();
        can.views = false;
        let info = TransportInfo::new("no views", "test", can);
        Arc::new(Self { inner, info })
    }
}

#[async_trait::async_trait]
impl Transport for NoViews {
    fn info(&self) -> &TransportInfo {
        &self.info
    }

    async fn publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        self.inner.publish(batch, options).await
    }

    async fn fetch(
        &self,
        requests: Vec<FetchRequest>,
        options: FetchOptions,
    ) -> Result<Vec<Fetched>> {
        self.inner.fetch(requests, options).await
    }

    async fn release(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
        self.inner.release(releases).await
    }

    async fn let_go(&self, samples: Vec<Arc<Descriptor>>) -> Result<()> {
        self.inner.let_go(samples).await
    }

    async fn health(&self) -> Result<Health> {
        self.inner.health().await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

/// Waits until nothing is resident any more.
pub(crate) async fn empty(transport: &dyn Transport) {
    for _ in 0..2000 {
        if transport.health().await.unwrap().resident_samples == 0 {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    panic!("still resident: {:?}", transport.health().await.unwrap());
}
