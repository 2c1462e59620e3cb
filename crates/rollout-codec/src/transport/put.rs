//! Putting: data samples, several on their way at a time, and then the root.

use std::{
    ops::Range,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use indexmap::IndexMap;
use parking_lot::Mutex;
use tokio::{sync::Semaphore, task::JoinSet};
use transport_core::{
    Descriptor, Dtype, Error, ErrorKind, FeatureName, Generation, Publication, PublishOptions,
    Ready, RegionSlice, Result, SampleId, SampleKey, Tensor, TensorMeta, Writer,
};
use xxhash_rust::xxh3::xxh3_64;

use super::{
    Handle, RolloutTransport,
    handle::About,
    journal, lease, root,
    root::{DATA, HEADER},
    stats::Counters,
};
use crate::{
    Rollout,
    native::{PartSums, Plan},
};

/// Largest data sample, unless the configuration says otherwise and where there are no views.
const DEFAULT_CHUNK_BYTES: u64 = 1 << 30;

impl RolloutTransport {
    /// Puts a rollout under a random name; the handle comes when everything is durable.
    ///
    /// On failure, and when the future is dropped, everything that was written is removed again.
    pub async fn put(&self, rollout: Rollout<'static>) -> Result<Handle> {
        self.put_as(&format!("{:032x}", random_id()?), rollout).await
    }

    /// Puts a rollout under `name`, such as `dp0/17`. A name that is taken is an error.
    pub async fn put_as(&self, name: &str, rollout: Rollout<'static>) -> Result<Handle> {
        let deadline = Instant::now() + self.0.config.deadline;
        let encoding = self.0.config.encoding.clone();
        let plan = tokio::task::spawn_blocking(move || Plan::new(&rollout, &encoding));
        let plan = plan.await.expect("planning does not panic")?;
        let views = self.0.transport.info().capabilities.views;
        let chunk_bytes = match self.0.config.chunk_bytes {
            Some(bytes) => bytes.get(),
            None if views => u64::MAX,
            None => DEFAULT_CHUNK_BYTES,
        };
        let mut parts = plan.parts(chunk_bytes);
        let mut sums = vec![None; parts.len()];
        if plan.data_bytes() == 0 {
            // No sample without bytes: nobody would have to move it.
            parts.clear();
            sums = vec![Some(plan.encode_part(&(0..0), &mut [], 1)?)];
        }
        let job = Arc::new(Job {
            sums: Mutex::new(sums),
            plan,
            parts,
            threads: self.0.config.threads,
            counters: self.0.counters.clone(),
        });
        let placed = Placed::new(self.clone());
        let outcome = self.put_all(name, &job, deadline, &placed).await;
        match outcome {
            Ok(handle) => {
                placed.keep();
                self.0.counters.put();
                Ok(handle)
            }
            Err(error) => {
                placed.take_back().await;
                Err(error.with("rollout", name))
            }
        }
    }

    async fn put_all(
        &self,
        name: &str,
        job: &Arc<Job>,
        deadline: Instant,
        placed: &Placed,
    ) -> Result<Handle> {
        let generation = Generation(job.plan.generation());
        let key = |name: String| {
            let sample = SampleId::new(name)?;
            Ok::<_, Error>(SampleKey::new(self.0.config.store_id.clone(), sample, generation))
        };
        let root_key = key(name.to_owned())?;
        // Nobody else's, also where the name is used again: they can be swept without a look.
        let own = random_id()? as u64;
        let data_keys: Vec<SampleKey> = (0..job.parts.len())
            .map(|i| key(format!("{name}:{own:016x}:{i}")))
            .collect::<Result<_>>()?;
        placed.0.begin(&data_keys, &job.parts).await?;
        let in_flight = Arc::new(Semaphore::new(self.0.config.in_flight));
        let mut calls = JoinSet::new();
        for (index, key) in data_keys.into_iter().enumerate() {
            let bytes = job.parts[index].end - job.parts[index].start;
            let writer = Arc::new(PartWriter { job: job.clone(), index });
            let tensors =
                IndexMap::from([(feature(DATA)?, TensorMeta::new(Dtype::Uint8, [bytes])?)]);
            let publication = Publication::written(key, tensors, writer);
            let (transport, in_flight) = (self.0.transport.clone(), in_flight.clone());
            let kept = placed.0.clone();
            calls.spawn(async move {
                let _permit = in_flight.acquire_owned().await.map_err(|_| {
                    Error::new(ErrorKind::Closed, "put rollout", "another part failed")
                })?;
                let options = PublishOptions::default().deadline(left(deadline)?);
                let described = transport.publish(vec![publication], options).await?.pop();
                described.iter().cloned().for_each(|descriptor| kept.add(descriptor));
                Ok::<_, Error>((index, described))
            });
        }
        let mut parts: Vec<Option<Descriptor>> = vec![None; job.parts.len()];
        let mut failure = None;
        while let Some(done) = calls.join_next().await {
            match done.expect("publishing does not panic") {
                Ok((index, Some(descriptor))) => parts[index] = Some(descriptor),
                Ok((_, None)) => {
                    let why = "the transport described nothing";
                    failure = failure.or(Some(Error::new(ErrorKind::Protocol, "put rollout", why)));
                }
                Err(error) => {
                    in_flight.close(); // what waits for its turn ends; what runs is waited for
                    failure = failure.or(Some(error));
                }
            }
        }
        if let Some(error) = failure {
            return Err(error);
        }
        let parts: Vec<Descriptor> = parts.into_iter().flatten().collect();
        let sums = std::mem::take(&mut *job.sums.lock());
        let header = job.plan.join(sums.into_iter().flatten())?;
        let header_bytes = header.len() as u64;
        let object = root::write(header, &parts)?;
        let about = About {
            header_bytes,
            data_bytes: job.plan.data_bytes(),
            rows: job.plan.rows(),
            generation: generation.0,
            xxh3: xxh3_64(&object),
        };
        placed.0.root(&root_key, object.len() as u64, about)?;
        let meta = TensorMeta::new(Dtype::Uint8, [object.len() as u64])?;
        let tensor = Tensor::new(meta, RegionSlice::copy_of(&object))?;
        let tensors = IndexMap::from([(feature(HEADER)?, tensor)]);
        let publication = Publication::new(root_key, tensors, Ready::Now);
        let options = PublishOptions::default().deadline(left(deadline)?);
        let mut described = self.0.transport.publish(vec![publication], options).await?;
        let root = described.pop().ok_or_else(|| {
            Error::new(ErrorKind::Protocol, "put rollout", "the transport described nothing")
        })?;
        placed.0.add(root.clone());
        let handle = Handle::new(root, about);
        handle.to_json()?; // a handle that cannot travel is no use
        Ok(handle)
    }
}

fn random_id() -> Result<u128> {
    let mut id = [0; 16];
    getrandom::fill(&mut id)
        .map_err(|e| Error::new(ErrorKind::Unexpected, "put rollout", e.to_string()))?;
    Ok(u128::from_le_bytes(id))
}

fn feature(name: &'static str) -> Result<FeatureName> {
    FeatureName::new(name)
}

fn left(deadline: Instant) -> Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(Error::new(ErrorKind::Timeout, "put rollout", "the deadline passed"));
    }
    Ok(left)
}

/// One put on its way.
#[derive(Debug)]
struct Job {
    plan: Plan<'static>,
    parts: Vec<Range<u64>>,
    sums: Mutex<Vec<Option<PartSums>>>,
    threads: usize,
    counters: Arc<Counters>,
}

/// Gathers one part, wherever the transport wants it.
#[derive(Debug)]
struct PartWriter {
    job: Arc<Job>,
    index: usize,
}

impl Writer for PartWriter {
    fn write(&self, destinations: &mut [&mut [u8]]) -> Result<()> {
        let [data] = destinations else {
            return Err(Error::new(ErrorKind::Protocol, "put rollout", "not one destination"));
        };
        let Job { plan, parts, threads, counters, .. } = &*self.job;
        let sums = plan.encode_part(&parts[self.index], data, *threads)?;
        counters.gathered(data.len() as u64);
        self.job.sums.lock()[self.index] = Some(sums);
        Ok(())
    }
}

/// What was published so far; taken back unless the put succeeds.
struct Placed(Arc<Kept>);

struct Kept {
    rollouts: RolloutTransport,
    /// None once the put has ended: what comes later is taken back at once.
    samples: Mutex<Option<Vec<Arc<Descriptor>>>>,
    journal: OnceLock<journal::Entry>,
    /// Taking back that has not happened yet; nothing of the put is left without a handle if it is
    /// 0 in the end.
    owed: AtomicUsize,
}

impl Placed {
    fn new(rollouts: RolloutTransport) -> Self {
        Self(Arc::new(Kept {
            rollouts,
            samples: Mutex::new(Some(Vec::new())),
            journal: OnceLock::new(),
            owed: AtomicUsize::new(0),
        }))
    }

    fn end(&self) -> Vec<Arc<Descriptor>> {
        self.0.samples.lock().take().unwrap_or_default()
    }

    /// The put has succeeded.
    fn keep(&self) {
        drop(self.end());
    }

    async fn take_back(&self) {
        let samples = self.end();
        self.0.clone().take_back(samples).await;
    }
}

impl Kept {
    /// Notes in the journal, if there is one, what is about to be written.
    async fn begin(&self, keys: &[SampleKey], parts: &[Range<u64>]) -> Result<()> {
        let Some(journal) = self.rollouts.0.config.journal.clone() else { return Ok(()) };
        let data = keys.iter().zip(parts).map(|(key, part)| (key.clone(), part.end - part.start));
        let data: Vec<_> = data.collect();
        let begun = tokio::task::spawn_blocking(move || journal.begin(&data)).await;
        let entry = begun.expect("writing a journal does not panic")?;
        self.journal.set(entry).expect("a put begins once");
        Ok(())
    }

    fn root(&self, key: &SampleKey, bytes: u64, about: About) -> Result<()> {
        let Some(entry) = self.journal.get() else { return Ok(()) };
        entry.root(&Handle::new(journal::stored(key.clone(), HEADER, bytes)?, about))
    }

    /// Called by whoever published, before it gives the descriptor on: between the two nothing can
    /// be dropped.
    fn add(self: &Arc<Self>, descriptor: Descriptor) {
        let descriptor = Arc::new(descriptor);
        match &mut *self.samples.lock() {
            Some(samples) => samples.push(descriptor),
            None => self.spawn_take_back(vec![descriptor]),
        }
    }

    fn spawn_take_back(self: &Arc<Self>, samples: Vec<Arc<Descriptor>>) {
        let runtime = &self.rollouts.0.runtime;
        drop(runtime.spawn(self.clone().take_back(samples)));
    }

    /// Removes samples. Counts it as owed before anything can be dropped.
    fn take_back(
        self: Arc<Self>,
        samples: Vec<Arc<Descriptor>>,
    ) -> impl Future<Output = ()> + Send {
        self.owed.fetch_add(1, SeqCst);
        async move {
            if !samples.is_empty()
                && let Err(error) = lease::remove(&*self.rollouts.0.transport, &samples).await
            {
                let first = samples[0].sample.to_string();
                tracing::warn!(%error, first, "what a failed put had written could not be removed");
                return;
            }
            self.owed.fetch_sub(1, SeqCst);
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if *self.owed.get_mut() > 0
            && let Some(entry) = self.journal.get_mut()
        {
            entry.leave();
        }
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        let samples = self.end();
        if !samples.is_empty() {
            self.0.spawn_take_back(samples);
        }
    }
}
