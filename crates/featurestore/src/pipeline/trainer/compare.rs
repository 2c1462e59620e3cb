//! Compares samples on several threads; what comes of it arrives in the order of the samples.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::{runtime::Handle, sync::oneshot};
use transport_core::{Descriptor, Error, ErrorKind, Result};

use super::{Checker, Job};
use crate::lifecycle::{LeaseToken, Leased};

/// Most threads: memory is not read faster by more.
const THREADS: usize = 8;

/// Samples that are being compared.
#[derive(Debug)]
pub(super) struct Comparing {
    work: Sender<Work>, // its end ends the threads
    under_way: VecDeque<UnderWay>,
    bytes: u64, // of what is under way
    bounds: Bounds,
}

/// How much is compared at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) threads: usize,
    /// Samples under way at most, those included that wait for a thread.
    pub(super) samples: usize,
    /// Their bytes at most; one sample always is.
    pub(super) bytes: u64,
}

impl Bounds {
    /// One sample after the other.
    pub(super) const SERIAL: Self = Self { threads: 1, samples: 1, bytes: u64::MAX };

    /// As many as there are cores, and one that waits.
    pub(super) fn of_cores(bytes: u64) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = cores.min(THREADS);
        Self { threads, samples: threads + 1, bytes }
    }
}

/// A sample that was compared; its memory is given back.
#[derive(Debug)]
pub(super) struct Compared {
    pub(super) descriptor: Arc<Descriptor>,
    pub(super) token: LeaseToken,
    /// Bytes that were compared.
    pub(super) verified: u64,
    /// Tensors that differ.
    pub(super) differing: Vec<String>,
    /// How long it took.
    pub(super) took: Duration,
}

#[derive(Debug)]
struct Work {
    job: Option<Job>,
    leased: Leased,
    answer: oneshot::Sender<Result<Compared>>,
}

#[derive(Debug)]
struct UnderWay {
    bytes: u64,
    answer: oneshot::Receiver<Result<Compared>>,
}

impl Comparing {
    /// Starts the threads, within `runtime`.
    pub(super) fn start(checker: Checker, bounds: Bounds, runtime: &Handle) -> Result<Self> {
        let (work, waiting) = channel::<Work>();
        let (checker, waiting) = (Arc::new(checker), Arc::new(Mutex::new(waiting)));
        for _ in 0..bounds.threads {
            let (checker, waiting, runtime) = (checker.clone(), waiting.clone(), runtime.clone());
            std::thread::Builder::new()
                .name("compare".into())
                .spawn(move || {
                    let _entered = runtime.enter(); // giving a sample back may be a task of it
                    while let Some(Work { job, leased, answer }) = next(&waiting) {
                        let _ = answer.send(compare(&checker, job, leased)); // the loop may have ended
                    }
                })
                .map_err(|e| Error::io("start comparing", e))?;
        }
        Ok(Self { work, under_way: VecDeque::new(), bytes: 0, bounds })
    }

    /// Whether nothing is under way.
    pub(super) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Whether a sample of `bytes` may be added.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        self.is_empty()
            || self.under_way.len() < self.bounds.samples
                && self.bytes.saturating_add(bytes) <= self.bounds.bytes
    }

    /// Compares a sample with what `job` says; without one it is only given back.
    pub(super) fn begin(&mut self, job: Option<Job>, leased: Leased) {
        let (send, answer) = oneshot::channel();
        let bytes = leased.nbytes();
        self.bytes += bytes;
        self.under_way.push_back(UnderWay { bytes, answer });
        // Without threads the answer's other end is dropped, which `next` reports.
        let _ = self.work.send(Work { job, leased, answer: send });
    }

    /// The oldest sample, once it is compared. Pending for ever if there is none. A dropped future
    /// loses nothing.
    pub(super) async fn next(&mut self) -> Result<Compared> {
        let Some(oldest) = self.under_way.front_mut() else { return std::future::pending().await };
        let compared = (&mut oldest.answer).await;
        let oldest = self.under_way.pop_front().expect("looked at above");
        self.bytes -= oldest.bytes;
        compared.map_err(|e| {
            Error::new(ErrorKind::Unexpected, "compare", "a thread panicked").source(e)
        })?
    }
}

fn next(waiting: &Mutex<Receiver<Work>>) -> Option<Work> {
    waiting.lock().recv().ok()
}

fn compare(checker: &Checker, job: Option<Job>, leased: Leased) -> Result<Compared> {
    let begun = Instant::now();
    let (verified, differing) = match &job {
        Some(job) => checker.compare(job, &leased)?,
        None => (0, Vec::new()),
    };
    let (token, descriptor) = (leased.token.clone(), leased.descriptor.clone());
    Ok(Compared { descriptor, token, verified, differing, took: begun.elapsed() })
}

#[cfg(test)]
mod tests {
    use control_proto::capture::ChecksumKind;
    use indexmap::IndexMap;
    use transport_core::{
        Dtype, FeatureName, Generation, MemoryTransport, Publication, PublishOptions, Ready,
        RegionSlice, SampleId, SampleKey, StoreId, Tensor, TensorMeta, Transport,
    };

    use super::*;
    use crate::{
        lifecycle::{Retention, Samples},
        source::checksum,
    };

    const LONG: usize = 8 << 20;

    /// Samples of one tensor each, of so many bytes, and what they have to be.
    async fn leased(sizes: &[usize]) -> Vec<(Job, Leased)> {
        let publisher = MemoryTransport::builder().arena_bytes(256 << 20).build().unwrap();
        let name = FeatureName::new("x").unwrap();
        let sample = |(i, &size): (usize, &usize)| {
            let id = SampleId::new(format!("s-{i}")).unwrap();
            let key = SampleKey::new(StoreId::new("run").unwrap(), id, Generation(1));
            let meta = TensorMeta::new(Dtype::Uint8, [size as u64]).unwrap();
            let tensor = Tensor::new(meta, RegionSlice::copy_of(&vec![i as u8; size])).unwrap();
            Publication::new(key, IndexMap::from([(name.clone(), tensor)]), Ready::Now)
        };
        let batch = sizes.iter().enumerate().map(sample).collect();
        let published = publisher.publish(batch, PublishOptions::default()).await.unwrap();
        let samples = Samples::over(Arc::new(publisher.client()), Retention::default());
        let mut all = Vec::new();
        for (i, descriptor) in published.into_iter().map(Arc::new).enumerate() {
            samples.adopt(std::slice::from_ref(&descriptor)).await.unwrap();
            let sum = checksum(ChecksumKind::Xxh3, &vec![i as u8; sizes[i]]);
            let checksums = Some([("x".to_owned(), sum.to_string())].into());
            let job = Job { checksums, sha256: None };
            all.push((job, samples.get(&descriptor, Duration::from_secs(5)).await.unwrap()));
        }
        all
    }

    fn checker() -> Checker {
        Checker::new(&crate::Config::default(), false).unwrap()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn outcomes_come_in_order_whatever_takes_longest() {
        let sizes: Vec<usize> = (0..24).map(|i| if i % 6 == 0 { LONG } else { i }).collect();
        let bounds = Bounds { threads: 3, samples: 64, bytes: u64::MAX };
        let mut comparing = Comparing::start(checker(), bounds, &Handle::current()).unwrap();
        for (i, (mut job, leased)) in leased(&sizes).await.into_iter().enumerate() {
            if i == 7 {
                job.checksums = Some([("x".to_owned(), "xxh3:0000000000000000".to_owned())].into());
            }
            comparing.begin((i != 9).then_some(job), leased);
        }
        for (i, &size) in sizes.iter().enumerate() {
            let compared = comparing.next().await.unwrap();
            assert_eq!(compared.descriptor.sample.sample_id.as_str(), format!("s-{i}"));
            assert_eq!(compared.verified, if i == 9 { 0 } else { size as u64 }, "{i}");
            assert_eq!(!compared.differing.is_empty(), i == 7, "{i}");
        }
        assert!(comparing.is_empty());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn several_at_a_time_within_their_bounds() {
        let bounds = Bounds { threads: 2, samples: 3, bytes: 100 };
        let mut comparing = Comparing::start(checker(), bounds, &Handle::current()).unwrap();
        assert!(comparing.has_room(1000), "one always has");
        for (job, leased) in leased(&[40, 40]).await {
            comparing.begin(Some(job), leased);
        }
        assert!(comparing.has_room(20) && !comparing.has_room(21), "by their bytes");
        for (job, leased) in leased(&[1]).await {
            comparing.begin(Some(job), leased);
        }
        assert!(!comparing.has_room(1), "by their number");
        let kept = tokio::time::timeout(Duration::ZERO, comparing.next()).await; // dropped or not
        let left = if kept.is_ok() { 2 } else { 3 };
        for _ in 0..left {
            comparing.next().await.unwrap();
        }
        assert!(comparing.is_empty() && comparing.has_room(1000));
    }
}
