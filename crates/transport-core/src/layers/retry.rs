//! More attempts after temporary errors.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;

use super::{Layer, Operation};
use crate::{
    DEFAULT_DEADLINE, Descriptor, Destination, Error, FetchOptions, FetchRequest, Fetched, Health,
    Publication, PublishOptions, Release, ReleaseReport, Result, Transport, TransportInfo,
    deadline::Deadline,
    rng::{SplitMix64, random_seed},
};

/// Repeats calls that fail with a temporary error, after pauses that grow.
///
/// # Behaviour
/// - At most [`attempts`](Self::attempts) calls in all (default 4), with pauses of about 50, 100,
///   200, … milliseconds, at most 5 seconds each. A pause is cut at random by up to half, so that
///   clients that failed together do not come back together.
/// - Never past the deadline: each attempt gets what is left of the caller's time, and when the next
///   pause would not leave any, the error is returned at once. `release` and `health`, which have no
///   deadline, get [`bound`](Self::bound) (default 30 seconds): no new attempt starts after it.
/// - `publish` is repeated: an error means that none of the batch is readable. Where that error was
///   a lost answer all the same, the next attempt fails with
///   [`AlreadyExists`](crate::ErrorKind::AlreadyExists), which is returned with the first error in
///   its context.
/// - `fetch` is repeated unless a request has [`Destination::Into`]: the failed attempt took the
///   regions, and a transfer may still write them. They go back to their owner once that is over; the
///   caller, who alone knows other memory, decides about another attempt.
/// - `release` is idempotent and repeated; what a lost answer released counts as already gone.
/// - `close` is not repeated.
/// - An error after more than one attempt carries `attempts` and `first_error`.
#[derive(Clone)]
pub struct RetryLayer {
    attempts: u32,
    base: Duration,
    longest: Duration,
    bound: Duration,
    rng: Arc<Mutex<SplitMix64>>,
    hook: Option<Arc<Hook>>,
}

type Hook = dyn Fn(&RetryEvent<'_>) + Send + Sync;

/// A failed attempt that another one follows.
#[derive(Debug)]
#[non_exhaustive]
pub struct RetryEvent<'a> {
    /// What failed.
    pub operation: Operation,
    /// Attempts so far, the failed one included.
    pub attempt: u32,
    /// The pause before the next.
    pub pause: Duration,
    /// Why it failed.
    pub error: &'a Error,
}

impl Default for RetryLayer {
    fn default() -> Self {
        Self {
            attempts: 4,
            base: Duration::from_millis(50),
            longest: Duration::from_secs(5),
            bound: DEFAULT_DEADLINE,
            rng: Arc::new(Mutex::new(SplitMix64::new(random_seed()))),
            hook: None,
        }
    }
}

impl RetryLayer {
    /// The default number of attempts and pauses.
    pub fn new() -> Self {
        Self::default()
    }

    /// Calls in all, the first included; 0 counts as 1.
    #[must_use]
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts.max(1);
        self
    }

    /// The pause after the first attempt, doubled after each, and the longest pause.
    #[must_use]
    pub fn pauses(mut self, first: Duration, longest: Duration) -> Self {
        (self.base, self.longest) = (first, longest);
        self
    }

    /// How long attempts may start for calls that have no deadline.
    #[must_use]
    pub fn bound(mut self, bound: Duration) -> Self {
        self.bound = bound;
        self
    }

    /// Makes the random part of the pauses reproducible.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.rng = Arc::new(Mutex::new(SplitMix64::new(seed)));
        self
    }

    /// Calls `hook` before each pause, on the task that waits: it must not block.
    #[must_use]
    pub fn on_retry(mut self, hook: impl Fn(&RetryEvent<'_>) + Send + Sync + 'static) -> Self {
        self.hook = Some(Arc::new(hook));
        self
    }

    /// The pause after attempt number `attempt`, which starts at 1.
    fn pause(&self, attempt: u32) -> Duration {
        let doubled = 2u32.saturating_pow(attempt - 1);
        let pause = self.base.saturating_mul(doubled).min(self.longest);
        pause.mul_f64(0.5 + 0.5 * self.rng.lock().unit())
    }
}

impl fmt::Debug for RetryLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryLayer")
            .field("attempts", &self.attempts)
            .field("base", &self.base)
            .field("longest", &self.longest)
            .field("bound", &self.bound)
            .finish_non_exhaustive()
    }
}

impl Layer for RetryLayer {
    fn layer(&self, inner: Arc<dyn Transport>) -> Arc<dyn Transport> {
        Arc::new(Retry { layer: self.clone(), inner })
    }
}

struct Retry {
    layer: RetryLayer,
    inner: Arc<dyn Transport>,
}

impl Retry {
    /// Calls `attempt` with the time that is left until it succeeds or must not be called again.
    async fn run<T, F: Future<Output = Result<T>> + Send>(
        &self,
        operation: Operation,
        time: Duration,
        mut attempt: impl FnMut(Duration) -> F + Send,
    ) -> Result<T> {
        let deadline = Deadline::after(time);
        let mut first_error = None;
        let mut count = 0;
        loop {
            count += 1;
            // The first attempt gets the caller's time as it is, not what the clock leaves of it.
            let left = if count == 1 { time } else { deadline.remaining() };
            let error = match attempt(left).await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            let pause = self.layer.pause(count);
            let over = count >= self.layer.attempts || pause >= deadline.remaining();
            if over || !error.is_temporary() {
                return Err(match first_error {
                    Some(first) => error.with("attempts", count).with("first_error", first),
                    None => error,
                });
            }
            self.observe(&RetryEvent { operation, attempt: count, pause, error: &error });
            first_error.get_or_insert_with(|| error.to_string());
            tokio::time::sleep(pause).await;
        }
    }

    fn observe(&self, event: &RetryEvent<'_>) {
        tracing::warn!(
            operation = event.operation.name(),
            attempt = event.attempt,
            pause = ?event.pause,
            error = %event.error,
            "trying again"
        );
        if let Some(hook) = &self.layer.hook {
            hook(event);
        }
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Transport for Retry {
    fn info(&self) -> &TransportInfo {
        self.inner.info()
    }

    async fn publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        let attempt = |left| self.inner.publish(batch.clone(), options.clone().deadline(left));
        self.run(Operation::Publish, options.deadline, attempt).await
    }

    async fn fetch(
        &self,
        requests: Vec<FetchRequest>,
        options: FetchOptions,
    ) -> Result<Vec<Fetched>> {
        if !requests.iter().all(|r| copy_of(r).is_some()) {
            return self.inner.fetch(requests, options).await;
        }
        let attempt = |left| {
            let requests = requests.iter().filter_map(copy_of).collect();
            self.inner.fetch(requests, options.clone().deadline(left))
        };
        self.run(Operation::Fetch, options.deadline, attempt).await
    }

    async fn release(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
        let attempt = |_| self.inner.release(releases.clone());
        self.run(Operation::Release, self.layer.bound, attempt).await
    }

    async fn let_go(&self, samples: Vec<Arc<Descriptor>>) -> Result<()> {
        self.inner.let_go(samples).await
    }

    async fn health(&self) -> Result<Health> {
        self.run(Operation::Health, self.layer.bound, |_| self.inner.health()).await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

/// The same request once more, if it owns no memory.
fn copy_of(request: &FetchRequest) -> Option<FetchRequest> {
    let destination = match request.destination {
        Destination::View => Destination::View,
        Destination::Pool => Destination::Pool,
        Destination::Into(_) => return None,
    };
    let descriptor = request.descriptor.clone();
    let (names, ranges) = (request.names.clone(), request.ranges.clone());
    Some(FetchRequest { descriptor, names, ranges, destination })
}

impl fmt::Debug for Retry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Retry({} attempts, {:?})", self.layer.attempts, self.inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::{
        ErrorKind, RegionMut,
        layers::scripted::{SAMPLE_BYTES, Scripted, Step, call, descriptor},
    };

    const SECOND: Duration = Duration::from_secs(1);
    const GONE: Step = Step::Fail(ErrorKind::PeerGone);

    const REPEATED: [Operation; 4] =
        [Operation::Publish, Operation::Fetch, Operation::Release, Operation::Health];

    #[tokio::test(start_paused = true)]
    async fn temporary_errors_are_retried_and_seen() {
        for operation in REPEATED {
            let inner = Scripted::new([GONE, GONE, Step::Succeed]);
            let seen = Arc::new(Mutex::new(Vec::new()));
            let events = seen.clone();
            let transport = RetryLayer::new()
                .pauses(SECOND, 10 * SECOND)
                .on_retry(move |e| {
                    assert_eq!(e.error.kind(), ErrorKind::PeerGone);
                    events.lock().push((e.operation, e.attempt, e.pause));
                })
                .layer(inner.clone());
            let start = Instant::now();
            call(&transport, operation, 60 * SECOND).await.unwrap();
            assert_eq!(inner.calls(), [operation; 3]);
            let seen = seen.lock().clone();
            assert_eq!(seen.len(), 2);
            let mut pauses = Duration::ZERO;
            for (attempt, event) in (1u32..).zip(&seen) {
                let longest = SECOND * attempt; // 1 s, then 2 s
                assert_eq!((event.0, event.1), (operation, attempt));
                assert!(event.2 >= longest / 2 && event.2 <= longest, "{event:?}");
                pauses += event.2;
            }
            // The paused clock counts whole milliseconds.
            assert!(start.elapsed() >= pauses && start.elapsed() < pauses + SECOND / 100);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn permanent_errors_and_close_are_not_retried() {
        for operation in REPEATED {
            let inner = Scripted::always(Step::Fail(ErrorKind::Stale));
            let transport = RetryLayer::new().layer(inner.clone());
            let error = call(&transport, operation, 60 * SECOND).await.unwrap_err();
            assert_eq!((error.kind(), error.context("attempts")), (ErrorKind::Stale, None));
            assert_eq!(inner.calls().len(), 1);
        }
        let inner = Scripted::always(GONE);
        let transport = RetryLayer::new().layer(inner.clone());
        call(&transport, Operation::Close, SECOND).await.unwrap_err();
        assert_eq!(inner.calls().len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_are_bounded_and_counted_in_the_error() {
        for operation in REPEATED {
            let inner = Scripted::new([GONE, Step::Fail(ErrorKind::Busy)]);
            let transport = RetryLayer::new().attempts(3).layer(inner.clone());
            let error = call(&transport, operation, 60 * SECOND).await.unwrap_err();
            assert_eq!(inner.calls().len(), 3);
            assert_eq!(error.kind(), ErrorKind::Busy);
            assert_eq!(error.context("attempts"), Some("3"));
            assert!(error.context("first_error").unwrap().contains("peer gone"));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_happens_after_the_deadline() {
        for operation in REPEATED {
            let inner = Scripted::always(GONE);
            let transport = RetryLayer::new()
                .attempts(1000)
                .pauses(SECOND, SECOND)
                .bound(10 * SECOND)
                .layer(inner.clone());
            let start = Instant::now();
            call(&transport, operation, 10 * SECOND).await.unwrap_err();
            assert!(start.elapsed() < 10 * SECOND);
            assert!(start.elapsed() > 8 * SECOND, "most of the time was used");
            let deadlines = inner.deadlines();
            assert!(deadlines.windows(2).all(|d| d[1] < d[0]), "less is left each time");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn regions_are_never_lost_to_another_attempt() {
        let inner = Scripted::always(GONE);
        let transport = RetryLayer::new().layer(inner.clone());
        let region = RegionMut::zeroed(SAMPLE_BYTES as usize).unwrap();
        let requests = vec![
            FetchRequest::new(descriptor(), Destination::Pool),
            FetchRequest::new(descriptor(), Destination::Into(vec![region])),
        ];
        transport.fetch(requests, FetchOptions::default()).await.unwrap_err();
        assert_eq!(inner.calls().len(), 1);
    }

    #[test]
    fn pauses_grow_to_the_longest_and_repeat_with_the_seed() {
        let pauses = |seed| {
            let layer = RetryLayer::new().seed(seed);
            (1..=40).map(|attempt| layer.pause(attempt)).collect::<Vec<_>>()
        };
        assert_eq!(pauses(7), pauses(7));
        assert_ne!(pauses(7), pauses(8));
        let longest = Duration::from_secs(5);
        assert!(pauses(7)[10..].iter().all(|p| *p >= longest / 2 && *p <= longest));
    }
}
