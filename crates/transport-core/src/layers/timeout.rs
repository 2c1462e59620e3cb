//! Bounds every call.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;

use super::{Layer, Operation};
use crate::{
    DEFAULT_DEADLINE, Descriptor, Error, ErrorKind, FetchOptions, FetchRequest, Fetched, Health,
    Publication, PublishOptions, Release, ReleaseReport, Result, Transport, TransportInfo,
    deadline::{Deadline, Elapsed},
};

/// Ends every call after a time, also those that have no deadline of their own.
///
/// `publish` and `fetch` get the shorter of the caller's deadline and the layer's bound, and a grace
/// period to report in their own words that it passed; `release`, `health` and `close` get the
/// bound. A call that is still not over is dropped and fails with [`ErrorKind::Timeout`], which is
/// temporary; by the contract, memory that it may still write stays in quarantine.
///
/// Defaults: 30 seconds, grace 1 second. Put it inside [`RetryLayer`](super::RetryLayer).
#[derive(Clone, Debug)]
pub struct TimeoutLayer {
    bounds: [Duration; 5], // by Operation
    grace: Duration,
}

impl Default for TimeoutLayer {
    fn default() -> Self {
        Self { bounds: [DEFAULT_DEADLINE; 5], grace: Duration::from_secs(1) }
    }
}

impl TimeoutLayer {
    /// The default bounds.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bounds every operation.
    #[must_use]
    pub fn all(mut self, bound: Duration) -> Self {
        self.bounds = [bound; 5];
        self
    }

    /// Bounds one operation.
    #[must_use]
    pub fn bound(mut self, operation: Operation, bound: Duration) -> Self {
        self.bounds[operation as usize] = bound;
        self
    }

    /// How much longer a `publish` or `fetch` may take to report that its deadline passed.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }
}

impl Layer for TimeoutLayer {
    fn layer(&self, inner: Arc<dyn Transport>) -> Arc<dyn Transport> {
        Arc::new(Timeout { layer: self.clone(), inner })
    }
}

struct Timeout {
    layer: TimeoutLayer,
    inner: Arc<dyn Transport>,
}

impl Timeout {
    fn of(&self, operation: Operation) -> Duration {
        self.layer.bounds[operation as usize]
    }

    async fn run<T>(
        &self,
        operation: Operation,
        bound: Duration,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        Deadline::after(bound).run(call).await.unwrap_or_else(|Elapsed| {
            Err(Error::new(ErrorKind::Timeout, operation.name(), "the call did not end in time")
                .with("bound", format_args!("{bound:?}"))
                .with("transport", format_args!("{:?}", self.inner)))
        })
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Transport for Timeout {
    fn info(&self) -> &TransportInfo {
        self.inner.info()
    }

    async fn publish(
        &self,
        batch: Vec<Publication>,
        mut options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        options.deadline = options.deadline.min(self.of(Operation::Publish));
        let bound = options.deadline.saturating_add(self.layer.grace);
        self.run(Operation::Publish, bound, self.inner.publish(batch, options)).await
    }

    async fn fetch(
        &self,
        requests: Vec<FetchRequest>,
        mut options: FetchOptions,
    ) -> Result<Vec<Fetched>> {
        options.deadline = options.deadline.min(self.of(Operation::Fetch));
        let bound = options.deadline.saturating_add(self.layer.grace);
        self.run(Operation::Fetch, bound, self.inner.fetch(requests, options)).await
    }

    async fn release(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
        let bound = self.of(Operation::Release);
        self.run(Operation::Release, bound, self.inner.release(releases)).await
    }

    async fn let_go(&self, samples: Vec<Arc<Descriptor>>) -> Result<()> {
        let bound = self.of(Operation::Release);
        self.run(Operation::Release, bound, self.inner.let_go(samples)).await
    }

    async fn health(&self) -> Result<Health> {
        self.run(Operation::Health, self.of(Operation::Health), self.inner.health()).await
    }

    async fn close(&self) -> Result<()> {
        self.run(Operation::Close, self.of(Operation::Close), self.inner.close()).await
    }
}

impl fmt::Debug for Timeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Timeout(")?;
        if self.layer.bounds.iter().all(|b| *b == self.layer.bounds[0]) {
            write!(f, "{:?}, ", self.layer.bounds[0])?;
        } else {
            for operation in Operation::ALL {
                write!(f, "{operation} {:?}, ", self.of(operation))?;
            }
        }
        write!(f, "{:?})", self.inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::layers::scripted::{Scripted, Step, call};

    #[tokio::test(start_paused = true)]
    async fn a_call_that_hangs_is_ended() {
        for operation in Operation::ALL {
            let inner = Scripted::always(Step::Hang);
            let layer = TimeoutLayer::new()
                .all(Duration::from_secs(60))
                .bound(operation, Duration::from_secs(2));
            let transport = layer.layer(inner.clone());
            let start = Instant::now();
            let error = call(&transport, operation, Duration::from_secs(40)).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout);
            assert!(error.is_temporary());
            assert_eq!(error.operation(), operation.name());
            let grace = matches!(operation, Operation::Publish | Operation::Fetch);
            assert_eq!(start.elapsed().as_secs(), 2 + u64::from(grace), "{operation}");
            assert_eq!(inner.dropped(), 1, "the call is dropped");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_shorter_deadline_is_passed_on() {
        let inner = Scripted::always(Step::Succeed);
        let transport = TimeoutLayer::new().all(Duration::from_secs(5)).layer(inner.clone());
        for operation in [Operation::Publish, Operation::Fetch] {
            call(&transport, operation, Duration::from_secs(1)).await.unwrap();
            call(&transport, operation, Duration::from_secs(60)).await.unwrap();
        }
        let passed: Vec<_> = inner.deadlines().iter().map(Duration::as_secs).collect();
        assert_eq!(passed, [1, 5, 1, 5]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_ends_in_time_is_left_alone() {
        let inner = Scripted::always(Step::Delay(Duration::from_secs(4)));
        let transport = TimeoutLayer::new().all(Duration::from_secs(5)).layer(inner);
        for operation in Operation::ALL {
            call(&transport, operation, Duration::from_secs(9)).await.unwrap();
        }
        assert!(format!("{transport:?}").starts_with("Timeout(5s, Scripted"));
    }
}
