//! Transports and payloads that the tests use.

use std::{
    collections::HashMap,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use rollout_codec::{
    Rollout,
    payload::{Payload, Profile},
    transport::{RolloutConfig, RolloutTransport},
};
use transport_core::{
    Capabilities, Descriptor, Error, ErrorKind, FetchOptions, FetchRequest, Fetched, Health,
    Location, MemoryTransport, Publication, PublishOptions, Release, ReleaseReport, Result,
    SampleKey, Transport, TransportInfo,
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
    /// Samples of which ranges are refused, as a store does where only Mooncake reaches an owner.
    refused: Option<fn(&SampleKey) -> bool>,
    /// Bytes that were read.
    pub(crate) moved: AtomicU64,
}

impl NoViews {
    /// Without views, but with ranges.
    pub(crate) fn new(inner: Arc<dyn Transport>) -> Arc<Self> {
        Self::with(inner, true, None)
    }

    /// Without views, and with ranges but of some samples.
    pub(crate) fn refusing(inner: Arc<dyn Transport>, some: fn(&SampleKey) -> bool) -> Arc<Self> {
        Self::with(inner, true, Some(some))
    }

    /// Whole samples only.
    pub(crate) fn whole(inner: Arc<dyn Transport>) -> Arc<Self> {
        Self::with(inner, false, None)
    }

    fn with(
        inner: Arc<dyn Transport>,
        ranges: bool,
        refused: Option<fn(&SampleKey) -> bool>,
    ) -> Arc<Self> {
        let mut can: Capabilities = inner.info().capabilities.clone();
        (can.views, can.ranges) = (false, ranges);
        let info = TransportInfo::new("no views", "test", can);
        Arc::new(Self { inner, info, refused, moved: AtomicU64::new(0) })
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
        for request in &requests {
            let able = self.refused.is_none_or(|refused| !refused(&request.descriptor.sample));
            let ranged = request.ranged(self.info.capabilities.ranges && able)?;
            let bytes = ranged.map_or(request.descriptor.nbytes(), |meta| meta.nbytes());
            self.moved.fetch_add(bytes, Ordering::SeqCst);
        }
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

/// A store: objects lie under their keys, whoever put them, and are described by nothing else. It
/// can be told to stop answering at the first root, as if the process had died there.
#[derive(Debug)]
pub(crate) struct Keyed {
    inner: Arc<dyn Transport>,
    info: TransportInfo,
    objects: Mutex<HashMap<SampleKey, Arc<Descriptor>>>,
    pub(crate) dies_at_root: AtomicBool,
    pub(crate) fetches: Mutex<Vec<u64>>,
}

impl Keyed {
    pub(crate) fn new(inner: Arc<dyn Transport>) -> Arc<Self> {
        let mut can: Capabilities = inner.info().capabilities.clone();
        (can.views, can.ranges) = (false, false);
        let info = TransportInfo::new("keyed", "test", can);
        let (objects, dies_at_root) = (Mutex::default(), AtomicBool::new(false));
        Arc::new(Self { inner, info, objects, dies_at_root, fetches: Mutex::default() })
    }

    fn found(&self, sample: &SampleKey) -> Option<Arc<Descriptor>> {
        self.objects.lock().unwrap().get(sample).cloned()
    }
}

#[async_trait::async_trait]
impl Transport for Keyed {
    fn info(&self) -> &TransportInfo {
        &self.info
    }

    async fn publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        let is_root = batch.iter().any(|p| p.tensors.contains_key("header"));
        if is_root && self.dies_at_root.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        let real = self.inner.publish(batch, options).await?;
        let mut described = Vec::new();
        for descriptor in real {
            let mut stored = descriptor.clone();
            stored.location = Location::Store;
            stored.features.values_mut().for_each(|f| (f.address, f.seq) = (None, None));
            self.objects.lock().unwrap().insert(descriptor.sample.clone(), Arc::new(descriptor));
            described.push(stored);
        }
        Ok(described)
    }

    async fn fetch(
        &self,
        mut requests: Vec<FetchRequest>,
        options: FetchOptions,
    ) -> Result<Vec<Fetched>> {
        for request in &mut requests {
            let sample = &request.descriptor.sample;
            self.fetches.lock().unwrap().push(request.descriptor.nbytes());
            request.descriptor = self.found(sample).ok_or_else(|| {
                Error::new(ErrorKind::NotFound, "fetch", "no such object").with("key", sample)
            })?;
        }
        self.inner.fetch(requests, options).await
    }

    async fn release(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
        let mut report = ReleaseReport::default();
        for Release { descriptor, .. } in releases {
            assert_eq!(descriptor.location, Location::Store);
            let known = self.objects.lock().unwrap().remove(&descriptor.sample);
            match known {
                None => report.already_gone += 1,
                Some(real) => {
                    self.inner.release(vec![real.into()]).await?;
                    report.released += 1;
                }
            }
        }
        Ok(report)
    }

    async fn health(&self) -> Result<Health> {
        self.inner.health().await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

/// A slow link: what was gathered is sent as long as the next part takes to be gathered, or until
/// patience ends.
#[derive(Debug)]
pub(crate) struct SlowLink {
    inner: Arc<dyn Transport>,
    info: TransportInfo,
    parts: usize,
    patience: Duration,
    state: Arc<(Mutex<Sent>, Condvar)>,
}

/// What happened on a slow link.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sent {
    gathered: usize,
    on_their_way: usize,
    /// Most parts that had been gathered and not been sent at a time.
    pub(crate) most: usize,
    /// Parts that were sent until another was gathered.
    pub(crate) overlapped: usize,
}

impl SlowLink {
    pub(crate) fn new(inner: Arc<dyn Transport>, parts: usize, patience: Duration) -> Arc<Self> {
        let mut can: Capabilities = inner.info().capabilities.clone();
        (can.views, can.ranges) = (false, false);
        let info = TransportInfo::new("slow link", "test", can);
        Arc::new(Self { inner, info, parts, patience, state: Arc::default() })
    }

    pub(crate) fn sent(&self) -> Sent {
        *self.state.0.lock().unwrap()
    }
}

#[async_trait::async_trait]
impl Transport for SlowLink {
    fn info(&self) -> &TransportInfo {
        &self.info
    }

    async fn publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        let (state, parts, patience) = (self.state.clone(), self.parts, self.patience);
        let send = move |publication: Publication| {
            if publication.writer.is_none() {
                return Ok(publication);
            }
            let publication = publication.materialized()?;
            let (sent, changed) = &*state;
            let mut sent = sent.lock().unwrap();
            sent.gathered += 1;
            sent.on_their_way += 1;
            sent.most = sent.most.max(sent.on_their_way);
            changed.notify_all();
            let own = sent.gathered;
            if own < parts {
                let another = |sent: &mut Sent| sent.gathered == own;
                let (guard, ended) = changed.wait_timeout_while(sent, patience, another).unwrap();
                sent = guard;
                sent.overlapped += usize::from(!ended.timed_out());
            }
            sent.on_their_way -= 1;
            Ok::<_, Error>(publication)
        };
        let sending = tokio::task::spawn_blocking(move || {
            batch.into_iter().map(send).collect::<Result<Vec<_>>>()
        });
        let batch = sending.await.unwrap()?;
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
