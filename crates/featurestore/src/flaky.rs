//! For tests: a transport that fails when it is told to, and small samples.

use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use indexmap::IndexMap;
use transport_core::{
    Descriptor, Dtype, Error, ErrorKind, FeatureName, FetchOptions, FetchRequest, Fetched,
    Generation, Health, MemoryTransport, Publication, PublishOptions, Ready, RegionSlice, Release,
    ReleaseReport, Result, SampleId, SampleKey, StoreId, Tensor, TensorMeta, Transport,
    TransportInfo,
};

/// A memory transport that fails `release`, or completes neither it nor `fetch`, while it is told to.
#[derive(Debug)]
pub(crate) struct Flaky {
    pub(crate) inner: MemoryTransport,
    pub(crate) broken: AtomicBool,
    pub(crate) stalled: AtomicBool,
}

impl Flaky {
    pub(crate) fn new(inner: MemoryTransport) -> Self {
        Self { inner, broken: AtomicBool::new(false), stalled: AtomicBool::new(false) }
    }
}

#[async_trait]
impl Transport for Flaky {
    fn info(&self) -> &TransportInfo {
        self.inner.info()
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
        if self.stalled.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        self.inner.fetch(requests, options).await
    }
    async fn release(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
        if self.stalled.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        if self.broken.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::PeerGone, "release", "cut off"));
        }
        self.inner.release(releases).await
    }
    async fn health(&self) -> Result<Health> {
        self.inner.health().await
    }
    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

/// The key of a sample of the store `run`.
pub(crate) fn key(id: &str, generation: u64) -> SampleKey {
    let store = StoreId::new("run").unwrap();
    SampleKey::new(store, SampleId::new(id).unwrap(), Generation(generation))
}

/// A sample with one tensor `x` of shape `[1, n]`.
pub(crate) fn sample(id: &str, generation: u64, bytes: &[u8]) -> Publication {
    let meta = TensorMeta::new(Dtype::Uint8, [1, bytes.len() as u64]).unwrap();
    let tensor = Tensor::new(meta, RegionSlice::copy_of(bytes)).unwrap();
    let tensors = IndexMap::from([(FeatureName::new("x").unwrap(), tensor)]);
    Publication::new(key(id, generation), tensors, Ready::Now)
}
