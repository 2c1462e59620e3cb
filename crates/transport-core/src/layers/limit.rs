//! Bounds how much goes on at once.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{Layer, Operation, published_bytes};
use crate::{
    ByteSize, Descriptor, Destination, Error, ErrorKind, FetchOptions, FetchRequest, Fetched,
    Health, Publication, PublishOptions, Release, ReleaseReport, Result, Transport, TransportInfo,
    deadline::{Deadline, Elapsed},
};

/// Bytes are counted in units of this many, so that terabytes fit a semaphore.
const UNIT: u64 = 1024;

/// Lets at most so many calls, and calls for so many bytes, run at once. The others wait, first
/// come, first served.
///
/// # Behaviour
/// - `publish` and `fetch` are limited, each by limits of its own: a publish that waits for room
///   never keeps back the fetch whose release makes the room. `release`, `health` and `close` always
///   pass.
/// - A call counts the bytes of all tensors it publishes, or asks to have copied; views count none.
///   A call for more than the limit waits until it can run alone.
/// - Waiting counts against the deadline of the call, which gets what is left of it. A call whose
///   turn does not come in time fails with [`ErrorKind::Busy`], which is temporary.
/// - A dropped call gives up its turn at once, also when a transfer that it started still runs.
///
/// The limits belong to the layer: all transports that it wraps share them. Default: no limits.
#[derive(Clone, Default)]
pub struct LimitLayer {
    calls: Option<u32>,
    bytes: Option<u64>,
    publish: Gates,
    fetch: Gates,
}

#[derive(Clone, Default)]
struct Gates {
    calls: Option<Arc<Semaphore>>,
    bytes: Option<(Arc<Semaphore>, u32)>, // with its size in units
}

impl LimitLayer {
    /// No limits yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// At most `calls` publishes and `calls` fetches at once; 0 counts as 1.
    #[must_use]
    pub fn calls(mut self, calls: u32) -> Self {
        let calls = calls.max(1);
        self.calls = Some(calls);
        for gates in [&mut self.publish, &mut self.fetch] {
            gates.calls = Some(Arc::new(Semaphore::new(calls as usize)));
        }
        self
    }

    /// At most `bytes` being published and `bytes` being fetched at once, rounded up to 1 KiB.
    #[must_use]
    pub fn bytes(mut self, bytes: u64) -> Self {
        self.bytes = Some(bytes);
        for gates in [&mut self.publish, &mut self.fetch] {
            let units = units(bytes).max(1);
            gates.bytes = Some((Arc::new(Semaphore::new(units as usize)), units));
        }
        self
    }
}

impl fmt::Debug for LimitLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitLayer")
            .field("calls", &self.calls)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl Layer for LimitLayer {
    fn layer(&self, inner: Arc<dyn Transport>) -> Arc<dyn Transport> {
        Arc::new(Limit { layer: self.clone(), inner })
    }
}

impl Gates {
    /// Waits for both turns. Calls are let through first, so that those that wait for bytes are at
    /// most as many as the calls.
    async fn enter(&self, bytes: u64) -> [Option<OwnedSemaphorePermit>; 2] {
        const OPEN: &str = "nothing closes the gates";
        let mut permits = [None, None];
        if let Some(calls) = &self.calls {
            permits[0] = Some(calls.clone().acquire_owned().await.expect(OPEN));
        }
        if let Some((gate, size)) = &self.bytes {
            let wanted = units(bytes).min(*size);
            permits[1] = Some(gate.clone().acquire_many_owned(wanted).await.expect(OPEN));
        }
        permits
    }
}

struct Limit {
    layer: LimitLayer,
    inner: Arc<dyn Transport>,
}

impl Limit {
    async fn run<T, F: Future<Output = Result<T>> + Send>(
        &self,
        operation: Operation,
        gates: &Gates,
        bytes: u64,
        time: Duration,
        call: impl FnOnce(Duration) -> F + Send,
    ) -> Result<T> {
        let deadline = Deadline::after(time);
        let permits = deadline.run(gates.enter(bytes)).await.map_err(|Elapsed| {
            Error::new(ErrorKind::Busy, operation.name(), "too many calls are running")
                .with("waited", format_args!("{time:?}"))
                .with("bytes", bytes)
                .with("limits", format_args!("{:?}", self.layer))
                .remedy("raise the limits, or the deadline")
        })?;
        let result = call(deadline.remaining()).await;
        drop(permits);
        result
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Transport for Limit {
    fn info(&self) -> &TransportInfo {
        self.inner.info()
    }

    async fn publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        let bytes = published_bytes(&batch);
        let time = options.deadline;
        let call = |left| self.inner.publish(batch, options.deadline(left));
        self.run(Operation::Publish, &self.layer.publish, bytes, time, call).await
    }

    async fn fetch(
        &self,
        requests: Vec<FetchRequest>,
        options: FetchOptions,
    ) -> Result<Vec<Fetched>> {
        let bytes = requests.iter().map(copied_bytes).fold(0, u64::saturating_add);
        let time = options.deadline;
        let call = |left| self.inner.fetch(requests, options.deadline(left));
        self.run(Operation::Fetch, &self.layer.fetch, bytes, time, call).await
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

fn units(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}

/// Bytes that a request asks to have copied; what its descriptor does not name counts none.
fn copied_bytes(request: &FetchRequest) -> u64 {
    let features = &request.descriptor.features;
    if let Some(ranges) = &request.ranges {
        let lengths = ranges.iter().map(|range| range.end.saturating_sub(range.start));
        return lengths.fold(0, u64::saturating_add);
    }
    match (&request.destination, &request.names) {
        (Destination::View, _) => 0,
        (_, None) => request.descriptor.nbytes(),
        (_, Some(names)) => {
            names.iter().filter_map(|name| features.get(name)).map(|f| f.meta.nbytes()).sum()
        }
    }
}

impl fmt::Debug for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Limit(")?;
        if let Some(calls) = self.layer.calls {
            write!(f, "{calls} calls, ")?;
        }
        if let Some(bytes) = self.layer.bytes.and_then(ByteSize::new) {
            write!(f, "{bytes}, ")?;
        }
        write!(f, "{:?})", self.inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{task::JoinSet, time::Instant};

    use super::*;
    use crate::layers::scripted::{Scripted, Step, call, descriptor};

    const SECOND: Duration = Duration::from_secs(1);

    async fn calls_at_once(layer: &LimitLayer, operation: Operation, calls: usize) -> usize {
        let inner = Scripted::always(Step::Delay(SECOND));
        let transport = layer.layer(inner.clone());
        let mut tasks = JoinSet::new();
        for _ in 0..calls {
            let transport = transport.clone();
            tasks.spawn(async move { call(&transport, operation, 60 * SECOND).await });
        }
        while let Some(ended) = tasks.join_next().await {
            ended.unwrap().unwrap();
        }
        assert_eq!(inner.calls().len(), calls);
        inner.most_running()
    }

    #[tokio::test(start_paused = true)]
    async fn calls_are_limited_but_for_releases() {
        let layer = LimitLayer::new().calls(3);
        for (operation, at_once) in [
            (Operation::Publish, 3),
            (Operation::Fetch, 3),
            (Operation::Release, 10),
            (Operation::Health, 10),
        ] {
            assert_eq!(calls_at_once(&layer, operation, 10).await, at_once, "{operation}");
        }
        assert_eq!(calls_at_once(&LimitLayer::new(), Operation::Fetch, 10).await, 10);
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_are_limited_and_giants_run_alone() {
        // A scripted sample has 1,000 bytes, which count as 1 KiB.
        for (kib, at_once) in [(4, 4), (1, 1), (0, 1)] {
            let layer = LimitLayer::new().bytes(kib * 1024);
            for operation in [Operation::Publish, Operation::Fetch] {
                assert_eq!(calls_at_once(&layer, operation, 9).await, at_once, "{kib} KiB");
            }
        }
        let inner = Scripted::always(Step::Delay(SECOND));
        let transport = LimitLayer::new().bytes(2048).layer(inner.clone());
        let giant = (0..100).map(|_| FetchRequest::new(descriptor(), Destination::Pool)).collect();
        let views = (0..100).map(|_| FetchRequest::new(descriptor(), Destination::View)).collect();
        let (a, b, c) = tokio::join!(
            transport.fetch(giant, FetchOptions::default()),
            transport.fetch(views, FetchOptions::default()),
            call(&transport, Operation::Fetch, 60 * SECOND),
        );
        assert!(a.is_ok() && b.is_ok() && c.is_ok());
        assert_eq!(inner.most_running(), 2, "the views beside the giant, then the small one");
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_counts_against_the_deadline() {
        let inner = Scripted::always(Step::Delay(4 * SECOND));
        let transport = LimitLayer::new().calls(1).layer(inner.clone());
        let start = Instant::now();
        let (first, second, late) = tokio::join!(
            call(&transport, Operation::Fetch, 10 * SECOND),
            call(&transport, Operation::Fetch, 10 * SECOND),
            call(&transport, Operation::Fetch, 2 * SECOND),
        );
        assert!(first.is_ok() && second.is_ok());
        let late = late.unwrap_err();
        assert_eq!((late.kind(), late.is_temporary()), (ErrorKind::Busy, true));
        assert_eq!(start.elapsed().as_secs(), 8);
        let left = inner.deadlines();
        assert!(left[0] <= 10 * SECOND && left[1] <= 6 * SECOND, "{left:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_publish_that_waits_holds_up_no_fetch() {
        let inner = Scripted::new([Step::Hang, Step::Succeed]);
        let transport = LimitLayer::new().calls(1).layer(inner.clone());
        let other = transport.clone();
        let publish =
            tokio::spawn(async move { call(&other, Operation::Publish, 60 * SECOND).await });
        tokio::task::yield_now().await;
        call(&transport, Operation::Fetch, SECOND).await.unwrap();
        publish.abort();
        assert!(publish.await.unwrap_err().is_cancelled());
        call(&transport, Operation::Publish, SECOND).await.unwrap();
        assert_eq!(format!("{transport:?}"), "Limit(1 calls, Scripted)");
    }
}
