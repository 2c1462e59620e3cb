//! Counters and latency histograms.

use std::{collections::BTreeMap, fmt, future::Future, sync::Arc, time::Duration};

use async_trait::async_trait;
use hdrhistogram::Histogram;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::{Layer, Operation, published_bytes};
use crate::{
    Descriptor, FetchOptions, FetchRequest, Fetched, Health, Publication, PublishOptions, Release,
    ReleaseReport, Result, Transport, TransportInfo,
};

/// Shortest time that the histograms tell apart from nothing, and the longest, in nanoseconds.
const RANGE: (u64, u64) = (256, 3_600_000_000_000);
/// The histograms are exact to this many decimal digits.
const DIGITS: u8 = 2;

/// Counts calls, samples, bytes and errors, and how long calls take.
///
/// The counters belong to the layer, not to the process: keep it, or a clone, and read it with
/// [`snapshot`](Self::snapshot). All transports that it wraps add to the same counters. Times are
/// those of finished calls, failed ones included, exact to 1 %, from 256 ns to one hour.
#[derive(Clone)]
pub struct MetricsLayer(Arc<[Mutex<Counters>; 5]>); // by Operation

struct Counters {
    calls: u64,
    succeeded: u64,
    failed: u64,
    dropped: u64,
    samples: u64,
    bytes: u64,
    errors: BTreeMap<String, u64>,
    times: Histogram<u64>,
    total: Duration,
}

/// The counters of a [`MetricsLayer`] at one moment.
#[derive(Clone, Debug, Default, serde::Serialize)]
#[non_exhaustive]
pub struct MetricsSnapshot {
    /// Calls of [`Transport::publish`].
    pub publish: OperationSnapshot,
    /// Calls of [`Transport::fetch`].
    pub fetch: OperationSnapshot,
    /// Calls of [`Transport::release`].
    pub release: OperationSnapshot,
    /// Calls of [`Transport::health`].
    pub health: OperationSnapshot,
    /// Calls of [`Transport::close`].
    pub close: OperationSnapshot,
}

/// The counters of one operation.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct OperationSnapshot {
    /// Calls begun.
    pub calls: u64,
    /// Calls that returned a result.
    pub succeeded: u64,
    /// Calls that returned an error.
    pub failed: u64,
    /// Calls whose future was dropped before it ended.
    pub dropped: u64,
    /// Calls under way.
    pub in_flight: u64,
    /// Samples in the calls that succeeded.
    pub samples: u64,
    /// Tensor bytes in the calls that succeeded; none for releases.
    pub bytes: u64,
    /// Errors by kind, in words.
    pub errors: BTreeMap<String, u64>,
    /// How long finished calls took.
    pub latency: Latency,
}

/// A distribution of times.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
#[allow(missing_docs)] // the names are those of the statistics
pub struct Latency {
    pub count: u64,
    pub min: Duration,
    pub mean: Duration,
    pub p50: Duration,
    pub p90: Duration,
    pub p99: Duration,
    pub max: Duration,
}

impl Default for MetricsLayer {
    fn default() -> Self {
        Self(Arc::new(std::array::from_fn(|_| Mutex::new(Counters::new()))))
    }
}

impl MetricsLayer {
    /// Counters that start from zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads the counters; each operation's are consistent in themselves.
    pub fn snapshot(&self) -> MetricsSnapshot {
        let of = |operation| self.of(operation).lock().snapshot();
        MetricsSnapshot {
            publish: of(Operation::Publish),
            fetch: of(Operation::Fetch),
            release: of(Operation::Release),
            health: of(Operation::Health),
            close: of(Operation::Close),
        }
    }

    fn of(&self, operation: Operation) -> &Mutex<Counters> {
        &self.0[operation as usize]
    }
}

impl fmt::Debug for MetricsLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MetricsLayer").field(&self.snapshot()).finish()
    }
}

impl Layer for MetricsLayer {
    fn layer(&self, inner: Arc<dyn Transport>) -> Arc<dyn Transport> {
        Arc::new(Metrics { layer: self.clone(), inner })
    }
}

impl Counters {
    fn new() -> Self {
        let times = Histogram::new_with_bounds(RANGE.0, RANGE.1, DIGITS)
            .expect("the bounds and digits are within what the histogram takes");
        Self {
            calls: 0,
            succeeded: 0,
            failed: 0,
            dropped: 0,
            samples: 0,
            bytes: 0,
            errors: BTreeMap::new(),
            times,
            total: Duration::ZERO,
        }
    }

    fn finish<T>(&mut self, took: Duration, result: &Result<T>, size: impl FnOnce(&T) -> Size) {
        match result {
            Ok(value) => {
                let size = size(value);
                self.succeeded += 1;
                self.samples += size.samples;
                self.bytes += size.bytes;
            }
            Err(error) => {
                self.failed += 1;
                *self.errors.entry(error.kind().to_string()).or_default() += 1;
            }
        }
        self.total += took;
        self.times.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    fn snapshot(&self) -> OperationSnapshot {
        let at = |quantile| Duration::from_nanos(self.times.value_at_quantile(quantile));
        let finished = self.succeeded + self.failed;
        let latency = if finished == 0 {
            Latency::default()
        } else {
            Latency {
                count: finished,
                min: Duration::from_nanos(self.times.min()),
                mean: self.total.div_f64(finished as f64),
                p50: at(0.5),
                p90: at(0.9),
                p99: at(0.99),
                max: Duration::from_nanos(self.times.max()),
            }
        };
        OperationSnapshot {
            calls: self.calls,
            succeeded: self.succeeded,
            failed: self.failed,
            dropped: self.dropped,
            in_flight: self.calls - finished - self.dropped,
            samples: self.samples,
            bytes: self.bytes,
            errors: self.errors.clone(),
            latency,
        }
    }
}

struct Metrics {
    layer: MetricsLayer,
    inner: Arc<dyn Transport>,
}

#[derive(Clone, Copy, Default)]
struct Size {
    samples: u64,
    bytes: u64,
}

/// A call under way; counted as dropped unless it finishes.
struct Call<'a>(Option<&'a Mutex<Counters>>);

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if let Some(counters) = self.0 {
            counters.lock().dropped += 1;
        }
    }
}

impl Metrics {
    async fn run<T>(
        &self,
        operation: Operation,
        call: impl Future<Output = Result<T>>,
        size: impl FnOnce(&T) -> Size,
    ) -> Result<T> {
        let counters = self.layer.of(operation);
        counters.lock().calls += 1;
        let mut under_way = Call(Some(counters));
        let start = Instant::now();
        let result = call.await;
        under_way.0 = None;
        counters.lock().finish(start.elapsed(), &result, size);
        result
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Transport for Metrics {
    fn info(&self) -> &TransportInfo {
        self.inner.info()
    }

    async fn publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        let size = Size { samples: batch.len() as u64, bytes: published_bytes(&batch) };
        self.run(Operation::Publish, self.inner.publish(batch, options), |_| size).await
    }

    async fn fetch(
        &self,
        requests: Vec<FetchRequest>,
        options: FetchOptions,
    ) -> Result<Vec<Fetched>> {
        let size = |fetched: &Vec<Fetched>| Size {
            samples: fetched.len() as u64,
            bytes: fetched.iter().map(Fetched::nbytes).sum(),
        };
        self.run(Operation::Fetch, self.inner.fetch(requests, options), size).await
    }

    async fn release(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
        let size = Size { samples: releases.len() as u64, bytes: 0 };
        self.run(Operation::Release, self.inner.release(releases), |_| size).await
    }

    async fn let_go(&self, samples: Vec<Arc<Descriptor>>) -> Result<()> {
        self.inner.let_go(samples).await
    }

    async fn health(&self) -> Result<Health> {
        self.run(Operation::Health, self.inner.health(), |_| Size::default()).await
    }

    async fn close(&self) -> Result<()> {
        self.run(Operation::Close, self.inner.close(), |()| Size::default()).await
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Metrics({:?})", self.inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ErrorKind,
        layers::scripted::{SAMPLE_BYTES, Scripted, Step, call},
    };

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn every_end_of_a_call_is_counted_once() {
        for operation in Operation::ALL {
            let metrics = MetricsLayer::new();
            let inner = Scripted::new([
                Step::Succeed,
                Step::Fail(ErrorKind::PeerGone),
                Step::Fail(ErrorKind::PeerGone),
                Step::Fail(ErrorKind::Stale),
                Step::Hang,
            ]);
            let transport = metrics.layer(inner);
            for _ in 0..4 {
                let _ = call(&transport, operation, SECOND).await;
            }
            let hanging = call(&transport, operation, SECOND);
            tokio::time::timeout(SECOND, hanging).await.unwrap_err();
            let other = transport.clone();
            let running = tokio::spawn(async move { call(&other, operation, SECOND).await });
            tokio::task::yield_now().await;

            let all = metrics.snapshot();
            let all = [all.publish, all.fetch, all.release, all.health, all.close];
            let seen = &all[operation as usize];
            assert_eq!((seen.calls, seen.succeeded, seen.failed), (6, 1, 3), "{operation}");
            assert_eq!((seen.dropped, seen.in_flight, seen.latency.count), (1, 1, 4));
            let errors: Vec<_> = seen.errors.iter().map(|(k, n)| (k.as_str(), *n)).collect();
            assert_eq!(errors, [("peer gone", 2), ("stale", 1)]);
            let has_samples = !matches!(operation, Operation::Health | Operation::Close);
            assert_eq!(seen.samples, u64::from(has_samples));
            let has_bytes = matches!(operation, Operation::Publish | Operation::Fetch);
            assert_eq!(seen.bytes, if has_bytes { SAMPLE_BYTES } else { 0 });
            assert_eq!(all.iter().map(|o| o.calls).sum::<u64>(), 6, "no other is counted");
            running.abort();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn latencies_are_within_one_percent() {
        let steps: Vec<_> = (1..=100).map(|ms| Step::Delay(Duration::from_millis(ms))).collect();
        let metrics = MetricsLayer::new();
        let transport = metrics.layer(Scripted::new(steps));
        for _ in 0..100 {
            call(&transport, Operation::Health, SECOND).await.unwrap();
        }
        let found = metrics.snapshot().health.latency;
        let close = |found: Duration, ms: f64| (found.as_secs_f64() * 1e3 / ms - 1.0).abs() < 0.02;
        assert!(close(found.min, 1.0) && close(found.max, 100.0), "{found:?}");
        assert!(close(found.p50, 50.0) && close(found.p90, 90.0), "{found:?}");
        assert!(close(found.p99, 99.0) && close(found.mean, 50.5), "{found:?}");
        assert_eq!(metrics.snapshot().fetch, OperationSnapshot::default());
    }
}
