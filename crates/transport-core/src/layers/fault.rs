//! Failures, delays and damage on purpose.

use std::{
    fmt,
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;

use super::{Layer, Operation};
use crate::{
    Descriptor, Error, ErrorKind, ErrorStatus, FetchOptions, FetchRequest, Fetched, Health,
    Publication, PublishOptions, RegionSlice, Release, ReleaseReport, Result, Transport,
    TransportInfo,
    rng::{SplitMix64, random_seed},
};

/// Injects faults by a plan that follows from a seed.
///
/// # Behaviour
/// - Calls are numbered from 1, for each operation on its own. Whether a fault strikes a call, and
///   where it does its damage, depends on the seed, the fault and that number alone: the same calls
///   meet the same faults again.
/// - All faults that strike a call take effect: delays add up, the first failure wins.
/// - `health` and `close` are left alone by faults that do not name them with
///   [`on`](Fault::on).
/// - Injected errors carry `fault_seed` and `fault_call`; the layer logs its seed when it wraps a
///   transport, shows it in `Debug`, and prints it with what it injected when a thread panics.
///
/// Numbers, and the list of what was injected, belong to the layer: transports that it wraps share
/// them. Put it innermost.
///
/// ```
/// # use std::time::Duration;
/// # use transport_core::{ErrorKind, MemoryTransport, layers::*};
/// let faults = FaultLayer::seeded(7)
///     .with(Fault::fail(ErrorKind::PeerGone).on(Operation::Fetch).nth(3))
///     .with(Fault::delay(Duration::from_millis(20)).probability(0.1))
///     .with(Fault::corrupt().probability(0.01));
/// let transport = MemoryTransport::builder().arena_bytes(1 << 20).build()?;
/// let transport = Stack::new(transport).with(&faults).build();
/// assert_eq!(format!("{transport:?}"), "Fault(seed 7, 3 faults, Memory(owner, 1MiB))");
/// # Ok::<(), transport_core::Error>(())
/// ```
#[derive(Clone)]
pub struct FaultLayer {
    seed: u64,
    faults: Vec<Fault>,
    calls: Arc<[AtomicU64; 5]>, // by Operation
    injected: Arc<Mutex<Vec<Injected>>>,
}

/// One kind of fault, and when it strikes. Strikes every call unless it says otherwise.
#[derive(Clone, Debug)]
pub struct Fault {
    effect: Effect,
    operation: Option<Operation>,
    when: When,
}

/// A fault that struck.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Injected {
    /// The operation.
    pub operation: Operation,
    /// Number of the call among those of its operation, from 1.
    pub call: u64,
    /// What happened, for people.
    pub what: String,
}

#[derive(Clone, Debug, PartialEq)]
enum Effect {
    Fail(ErrorKind),
    LoseAnswer(ErrorKind),
    Delay(Duration),
    Abandon(Duration),
    Truncate,
    Corrupt,
}

#[derive(Clone, Debug)]
enum When {
    Always,
    Nth(u64),
    Probability(f64),
}

impl Fault {
    /// Fails the call without making it.
    pub fn fail(kind: ErrorKind) -> Self {
        Self::new(Effect::Fail(kind))
    }

    /// Makes the call, and when it succeeds loses its answer and fails. A publish or release that
    /// is repeated then finds its own work.
    pub fn lose_answer(kind: ErrorKind) -> Self {
        Self::new(Effect::LoseAnswer(kind))
    }

    /// Waits before the call.
    pub fn delay(time: Duration) -> Self {
        Self::new(Effect::Delay(time))
    }

    /// Begins the call, drops its future after `time` unless it is over by then, and fails with a
    /// temporary [`ErrorKind::Timeout`].
    pub fn abandon(time: Duration) -> Self {
        Self::new(Effect::Abandon(time))
    }

    /// Cuts off the end of one fetched tensor, which keeps its meta: what a short read would look
    /// like if a transport returned it. Strikes fetches only.
    pub fn truncate() -> Self {
        Self::new(Effect::Truncate).on(Operation::Fetch)
    }

    /// Flips one bit of one fetched tensor, in a copy: its memory is not the destination's.
    /// Strikes fetches only.
    pub fn corrupt() -> Self {
        Self::new(Effect::Corrupt).on(Operation::Fetch)
    }

    /// Strikes only calls of one operation.
    #[must_use]
    pub fn on(mut self, operation: Operation) -> Self {
        self.operation = Some(operation);
        self
    }

    /// Strikes only call number `n`, from 1.
    #[must_use]
    pub fn nth(mut self, n: u64) -> Self {
        self.when = When::Nth(n);
        self
    }

    /// Strikes each call with probability `p`, 0 to 1.
    #[must_use]
    pub fn probability(mut self, p: f64) -> Self {
        self.when = When::Probability(p);
        self
    }

    fn new(effect: Effect) -> Self {
        Self { effect, operation: None, when: When::Always }
    }

    fn strikes(&self, operation: Operation, call: u64, rng: &mut SplitMix64) -> bool {
        let concerned = match self.operation {
            Some(named) => named == operation,
            None => !matches!(operation, Operation::Health | Operation::Close),
        };
        concerned
            && match self.when {
                When::Always => true,
                When::Nth(n) => call == n,
                When::Probability(p) => rng.unit() < p,
            }
    }
}

impl FaultLayer {
    /// A plan without faults yet.
    pub fn seeded(seed: u64) -> Self {
        Self { seed, faults: Vec::new(), calls: Arc::default(), injected: Arc::default() }
    }

    /// A plan with a seed from the operating system; see [`Self::seed`].
    pub fn random() -> Self {
        Self::seeded(random_seed())
    }

    /// Adds a fault.
    #[must_use]
    pub fn with(mut self, fault: Fault) -> Self {
        self.faults.push(fault);
        self
    }

    /// The seed, for another run that meets the same faults.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// What struck so far.
    pub fn injected(&self) -> Vec<Injected> {
        self.injected.lock().clone()
    }

    /// The faults that strike the next call of `operation`, in order.
    fn strike(&self, operation: Operation) -> Strike<'_> {
        let call = self.calls[operation as usize].fetch_add(1, Ordering::SeqCst) + 1;
        let mut effects = Vec::new();
        for (index, fault) in self.faults.iter().enumerate() {
            // One generator for each fault and call, so that calls may overlap in any order.
            let mut rng = SplitMix64::new(self.seed);
            for part in [index as u64, operation as u64, call] {
                rng = SplitMix64::new(rng.next() ^ part);
            }
            if fault.strikes(operation, call, &mut rng) {
                effects.push((fault.effect.clone(), rng));
            }
        }
        Strike { layer: self, operation, call, effects }
    }
}

impl fmt::Debug for FaultLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultLayer")
            .field("seed", &self.seed)
            .field("faults", &self.faults)
            .finish_non_exhaustive()
    }
}

impl Layer for FaultLayer {
    fn layer(&self, inner: Arc<dyn Transport>) -> Arc<dyn Transport> {
        tracing::info!(seed = self.seed, faults = self.faults.len(), "injecting faults");
        Arc::new(FaultTransport { layer: self.clone(), inner })
    }
}

/// The faults that strike one call.
struct Strike<'a> {
    layer: &'a FaultLayer,
    operation: Operation,
    call: u64,
    effects: Vec<(Effect, SplitMix64)>,
}

impl Strike<'_> {
    fn note(&self, what: String) {
        tracing::debug!(operation = %self.operation, call = self.call, what, "fault");
        let Self { operation, call, .. } = *self;
        self.layer.injected.lock().push(Injected { operation, call, what });
    }

    fn error(&self, kind: ErrorKind, why: &'static str) -> Error {
        Error::new(kind, self.operation.name(), why)
            .with("fault_seed", self.layer.seed)
            .with("fault_call", self.call)
    }

    async fn run<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        let mut patience = None;
        for (effect, _) in &self.effects {
            match effect {
                Effect::Delay(time) => {
                    self.note(format!("delayed by {time:?}"));
                    tokio::time::sleep(*time).await;
                }
                Effect::Fail(kind) => {
                    self.note(format!("failed: {kind}"));
                    return Err(self.error(*kind, "injected failure"));
                }
                Effect::Abandon(time) => patience = Some(patience.unwrap_or(*time).min(*time)),
                Effect::LoseAnswer(_) | Effect::Truncate | Effect::Corrupt => {}
            }
        }
        let value = match patience {
            None => call.await?,
            Some(time) => match tokio::time::timeout(time, call).await {
                Ok(result) => result?,
                Err(_) => {
                    self.note(format!("abandoned after {time:?}"));
                    return Err(self
                        .error(ErrorKind::Timeout, "injected: the call was dropped on its way")
                        .status(ErrorStatus::Temporary));
                }
            },
        };
        for (effect, _) in &self.effects {
            if let Effect::LoseAnswer(kind) = effect {
                self.note(format!("answer lost: {kind}"));
                return Err(self.error(*kind, "injected: done, but the answer was lost"));
            }
        }
        Ok(value)
    }

    /// Cuts and flips what was fetched.
    fn damage(&mut self, fetched: &mut [Fetched]) {
        for (effect, mut rng) in std::mem::take(&mut self.effects) {
            let cut = match effect {
                Effect::Truncate => true,
                Effect::Corrupt => false,
                _ => continue,
            };
            let mut victims: Vec<_> = fetched
                .iter_mut()
                .flat_map(|f| {
                    let sample = f.descriptor.sample.clone();
                    f.tensors.iter_mut().map(move |(name, t)| (sample.object(name), t))
                })
                .filter(|(_, t)| !t.data.is_empty() && t.data.kind().is_host())
                .collect();
            if victims.is_empty() {
                continue; // nothing that could be damaged
            }
            let index = rng.below(victims.len() as u64) as usize;
            let (key, tensor) = &mut victims[index];
            let at = rng.below(tensor.data.len() as u64) as usize;
            if cut {
                tensor.data = tensor.data.slice(0..at).expect("shorter than it was");
                let what = format!("{key} truncated to {at} bytes");
                self.note(what);
            } else {
                let mut bytes = tensor.data.as_ref().to_vec();
                let bit = rng.below(8);
                bytes[at] ^= 1 << bit;
                tensor.data = RegionSlice::copy_of(&bytes);
                let what = format!("{key}: bit {bit} of byte {at} flipped");
                self.note(what);
            }
        }
    }
}

struct FaultTransport {
    layer: FaultLayer,
    inner: Arc<dyn Transport>,
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Transport for FaultTransport {
    fn info(&self) -> &TransportInfo {
        self.inner.info()
    }

    async fn publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        self.layer.strike(Operation::Publish).run(self.inner.publish(batch, options)).await
    }

    async fn fetch(
        &self,
        requests: Vec<FetchRequest>,
        options: FetchOptions,
    ) -> Result<Vec<Fetched>> {
        let mut strike = self.layer.strike(Operation::Fetch);
        let mut fetched = strike.run(self.inner.fetch(requests, options)).await?;
        strike.damage(&mut fetched);
        Ok(fetched)
    }

    async fn release(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
        self.layer.strike(Operation::Release).run(self.inner.release(releases)).await
    }

    async fn let_go(&self, samples: Vec<Arc<Descriptor>>) -> Result<()> {
        self.inner.let_go(samples).await
    }

    async fn health(&self) -> Result<Health> {
        self.layer.strike(Operation::Health).run(self.inner.health()).await
    }

    async fn close(&self) -> Result<()> {
        self.layer.strike(Operation::Close).run(self.inner.close()).await
    }
}

impl Drop for FaultTransport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let injected = self.layer.injected();
            eprintln!("faults were injected with seed {}: {injected:?}", self.layer.seed);
        }
    }
}

impl fmt::Debug for FaultTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FaultLayer { seed, faults, .. } = &self.layer;
        write!(f, "Fault(seed {seed}, {} faults, {:?})", faults.len(), self.inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::Destination;
    use crate::layers::{
        RetryLayer,
        scripted::{SAMPLE_BYTES, Scripted, Step, call, descriptor},
    };

    const SECOND: Duration = Duration::from_secs(1);

    async fn fetch(transport: &Arc<dyn Transport>) -> Result<Fetched> {
        let request = FetchRequest::new(descriptor(), Destination::Pool);
        Ok(transport.fetch(vec![request], FetchOptions::default()).await?.remove(0))
    }

    #[tokio::test(start_paused = true)]
    async fn the_nth_call_of_an_operation_fails() {
        for operation in Operation::ALL {
            let faults =
                FaultLayer::seeded(1).with(Fault::fail(ErrorKind::Busy).on(operation).nth(3));
            let inner = Scripted::always(Step::Succeed);
            let transport = faults.layer(inner.clone());
            for other in Operation::ALL {
                for n in 1..=4 {
                    let result = call(&transport, other, SECOND).await;
                    assert_eq!(result.is_err(), other == operation && n == 3, "{other} {n}");
                    if let Err(error) = result {
                        assert_eq!(error.kind(), ErrorKind::Busy);
                        assert_eq!(error.context("fault_seed"), Some("1"));
                        assert_eq!(error.context("fault_call"), Some("3"));
                    }
                }
            }
            assert_eq!(inner.calls().len(), 19, "the failed call was not made");
            assert_eq!(faults.injected().len(), 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_same_seed_strikes_the_same_calls() {
        let run = |seed, at_once: bool| async move {
            let faults = FaultLayer::seeded(seed)
                .with(Fault::fail(ErrorKind::PeerGone).probability(0.2))
                .with(Fault::corrupt().probability(0.3));
            let transport = faults.layer(Scripted::always(Step::Succeed));
            if at_once {
                let mut tasks = tokio::task::JoinSet::new();
                for _ in 0..200 {
                    let transport = transport.clone();
                    tasks.spawn(async move { fetch(&transport).await.is_ok() });
                }
                tasks.join_all().await;
            } else {
                for _ in 0..200 {
                    let _ = fetch(&transport).await;
                }
            }
            let mut injected = faults.injected();
            injected.sort_by_key(|i| (i.call, i.what.clone()));
            injected
        };
        let first = run(7, false).await;
        assert_eq!(first, run(7, false).await);
        assert_eq!(first, run(7, true).await, "also when calls overlap");
        assert_ne!(first, run(8, false).await);
        let failed = first.iter().filter(|i| i.what.contains("failed")).count();
        assert!((20..=60).contains(&failed), "{failed} of 200 at 20 %");
        let flipped = first.iter().filter(|i| i.what.contains("flipped")).count();
        assert!((28..=70).contains(&flipped), "{flipped} of about 160 at 30 %");
    }

    #[tokio::test(start_paused = true)]
    async fn delays_add_up() {
        let faults = FaultLayer::seeded(1)
            .with(Fault::delay(2 * SECOND))
            .with(Fault::delay(3 * SECOND).on(Operation::Fetch));
        let transport = faults.layer(Scripted::always(Step::Succeed));
        for (operation, seconds) in
            [(Operation::Publish, 2), (Operation::Fetch, 5), (Operation::Health, 0)]
        {
            let start = Instant::now();
            call(&transport, operation, SECOND).await.unwrap();
            assert_eq!(start.elapsed().as_secs(), seconds, "{operation}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn fetched_data_is_damaged_where_asked() {
        let faults =
            FaultLayer::seeded(3).with(Fault::corrupt().nth(1)).with(Fault::truncate().nth(2));
        let transport = faults.layer(Scripted::always(Step::Succeed));
        let good = [7; SAMPLE_BYTES as usize];

        let corrupt = fetch(&transport).await.unwrap();
        let found = corrupt.tensors[0].data.as_ref();
        let different = found.iter().zip(&good).filter(|(a, b)| a != b);
        assert_eq!(different.map(|(a, b)| (a ^ b).count_ones()).collect::<Vec<_>>(), [1]);

        let short = fetch(&transport).await.unwrap();
        let found = short.tensors[0].data.as_ref();
        assert!(found.len() < good.len() && short.tensors[0].meta.nbytes() == SAMPLE_BYTES);
        assert!(found.iter().all(|b| *b == 7));

        assert_eq!(fetch(&transport).await.unwrap().tensors[0].data.as_ref(), good);
    }

    #[tokio::test(start_paused = true)]
    async fn futures_are_dropped_on_their_way_and_answers_lost() {
        let inner = Scripted::new([Step::Hang, Step::Delay(SECOND), Step::Succeed]);
        let faults = FaultLayer::seeded(1)
            .with(Fault::abandon(2 * SECOND).on(Operation::Publish))
            .with(Fault::lose_answer(ErrorKind::PeerGone).on(Operation::Release).nth(1));
        let transport = faults.layer(inner.clone());
        let error = call(&transport, Operation::Publish, 9 * SECOND).await.unwrap_err();
        assert_eq!((error.kind(), error.is_temporary()), (ErrorKind::Timeout, true));
        assert_eq!(inner.dropped(), 1);
        call(&transport, Operation::Publish, 9 * SECOND).await.expect("was over before");

        call(&transport, Operation::Release, SECOND).await.unwrap_err();
        assert_eq!(inner.calls().last(), Some(&Operation::Release), "it was made all the same");
        let what: Vec<_> = faults.injected().into_iter().map(|i| i.what).collect();
        assert_eq!(what, ["abandoned after 2s", "answer lost: peer gone"]);
    }

    #[tokio::test(start_paused = true)]
    async fn retries_cope_with_faults() {
        let faults = FaultLayer::seeded(11).with(Fault::fail(ErrorKind::Busy).probability(0.3));
        let retry = RetryLayer::new().attempts(20).seed(1);
        let transport = retry.layer(faults.layer(Scripted::always(Step::Succeed)));
        for _ in 0..100 {
            fetch(&transport).await.unwrap();
        }
        assert!(faults.injected().len() > 20);
    }
}
