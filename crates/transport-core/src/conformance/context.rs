//! What the cases share: verdicts, reproducible data, and bounded waiting.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use indexmap::IndexMap;

use super::Pair;
use crate::{
    Descriptor, Destination, Dtype, Error, ErrorKind, FeatureName, FetchOptions, FetchRequest,
    Fetched, Generation, Health, Publication, PublishOptions, Ready, RegionMut, RegionSlice,
    ReleaseReport, Result, SampleId, SampleKey, StoreId, Tensor, TensorMeta, Transport,
    rng::SplitMix64,
};

/// Deadline of calls that are not about deadlines.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);
/// How long counters and memory may take to settle after a call returned.
const SETTLE: Duration = Duration::from_secs(5);

/// How a case ended.
pub(super) type Verdict<T = ()> = Result<T, Stop>;

/// Why a case ended early.
#[derive(Debug)]
pub(super) enum Stop {
    Failed(String),
    NotApplicable(String),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(format!("unexpected error: {error:?}"))
    }
}

/// Ends the case as failed unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::conformance::context::Stop::Failed(format!($($message)+)));
        }
    };
}
pub(super) use ensure;

/// A tensor to publish: name, element type, shape.
pub(super) type Spec<'a> = (&'a str, Dtype, &'a [u64]);

/// Two tensors of different types, 1,000 and 72 bytes: enough where the data does not matter.
pub(super) const PLAIN: &[Spec<'static>] =
    &[("hidden_states", Dtype::Bfloat16, &[5, 100]), ("input_ids", Dtype::Int64, &[9])];

pub(super) fn key(sample: impl fmt::Display) -> SampleKey {
    SampleKey::new(
        StoreId::new("conformance").expect("a valid name"),
        SampleId::new(format!("run:{sample}")).expect("a valid name"),
        Generation(1),
    )
}

pub(super) fn name(text: &str) -> FeatureName {
    FeatureName::new(text).expect("cases use valid names")
}

pub(super) fn meta((_, dtype, shape): &Spec<'_>) -> TensorMeta {
    TensorMeta::new(*dtype, *shape).expect("cases use valid shapes")
}

/// A sample whose bytes follow from key, tensor name and `salt`, and are final.
pub(super) fn publication(key: &SampleKey, specs: &[Spec<'_>], salt: u64) -> Publication {
    let tensors = specs.iter().map(|spec| {
        let meta = meta(spec);
        let bytes = expected(key, spec.0, salt, meta.nbytes());
        (name(spec.0), Tensor { meta, data: RegionSlice::copy_of(&bytes) })
    });
    Publication::new(key.clone(), tensors.collect(), Ready::Now)
}

/// The bytes of one tensor.
pub(super) fn expected(key: &SampleKey, tensor: &str, salt: u64, len: u64) -> Vec<u8> {
    let text = format!("{key}/{tensor}");
    let seed = text.bytes().fold(salt ^ 0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3) // FNV-1a
    });
    let mut rng = SplitMix64::new(seed);
    let mut bytes = Vec::with_capacity(len as usize + 8);
    while (bytes.len() as u64) < len {
        bytes.extend_from_slice(&rng.next().to_le_bytes());
    }
    bytes.truncate(len as usize);
    bytes
}

/// Compares every fetched tensor with what was published under `salt`.
pub(super) fn check_bytes(fetched: &Fetched, salt: u64) -> Verdict {
    for (name, tensor) in &fetched.tensors {
        let key = &fetched.descriptor.sample;
        let described = fetched.descriptor.features.get(name).map(|f| &f.meta);
        ensure!(
            described == Some(&tensor.meta),
            "{key}/{name}: fetched as {}, described as {described:?}",
            tensor.meta
        );
        let want = expected(key, name.as_str(), salt, tensor.meta.nbytes());
        let Some(found) = tensor.data.as_bytes() else {
            return Err(Stop::Failed(format!("{key}/{name}: not in host memory")));
        };
        ensure!(
            found.len() == want.len(),
            "{key}/{name}: {} bytes, expected {}",
            found.len(),
            want.len()
        );
        if let Some(at) = found.iter().zip(&want).position(|(a, b)| a != b) {
            return Err(Stop::Failed(format!(
                "{key}/{name}: byte {at} of {} is {:#04x}, expected {:#04x}",
                want.len(),
                found[at],
                want[at]
            )));
        }
    }
    Ok(())
}

pub(super) fn publish_options() -> PublishOptions {
    PublishOptions::default().deadline(PATIENCE)
}

pub(super) fn fetch_options() -> FetchOptions {
    FetchOptions::default().deadline(PATIENCE)
}

/// Publishes samples and checks that as many descriptors come back, for the right keys.
pub(super) async fn publish(pair: &Pair, batch: Vec<Publication>) -> Verdict<Vec<Arc<Descriptor>>> {
    publish_with(pair, batch, publish_options()).await
}

pub(super) async fn publish_with(
    pair: &Pair,
    batch: Vec<Publication>,
    options: PublishOptions,
) -> Verdict<Vec<Arc<Descriptor>>> {
    let keys: Vec<_> = batch.iter().map(|p| p.sample.clone()).collect();
    let descriptors = pair.publisher.publish(batch, options).await?;
    let described: Vec<_> = descriptors.iter().map(|d| d.sample.clone()).collect();
    ensure!(keys == described, "published {keys:?}, described {described:?}");
    Ok(descriptors.into_iter().map(Arc::new).collect())
}

/// Publishes one sample of [`PLAIN`] tensors.
pub(super) async fn publish_plain(
    pair: &Pair,
    sample: &str,
    salt: u64,
) -> Verdict<Arc<Descriptor>> {
    publish_one(pair, publication(&key(sample), PLAIN, salt)).await
}

pub(super) async fn publish_one(pair: &Pair, sample: Publication) -> Verdict<Arc<Descriptor>> {
    let mut descriptors = publish(pair, vec![sample]).await?;
    Ok(descriptors.remove(0)) // `publish` checked that there is one
}

/// Fetches all tensors of one sample into the consumer's pool.
pub(super) async fn fetch_pool(
    consumer: &Arc<dyn Transport>,
    descriptor: &Arc<Descriptor>,
) -> Result<Fetched> {
    fetch_one(consumer, FetchRequest::new(descriptor.clone(), Destination::Pool)).await
}

pub(super) async fn fetch_one(
    consumer: &Arc<dyn Transport>,
    request: FetchRequest,
) -> Result<Fetched> {
    let mut fetched = consumer.fetch(vec![request], fetch_options()).await?;
    if fetched.len() != 1 {
        return Err(Error::new(ErrorKind::Protocol, "fetch", "not one answer per request")
            .with("expected", 1)
            .with("found", fetched.len()));
    }
    Ok(fetched.remove(0))
}

/// Fetches into the pool and compares with what was published under `salt`.
pub(super) async fn fetch_and_check(
    consumer: &Arc<dyn Transport>,
    descriptor: &Arc<Descriptor>,
    salt: u64,
) -> Verdict<Fetched> {
    let fetched = fetch_pool(consumer, descriptor).await?;
    let (want, found) = (descriptor.features.len(), fetched.tensors.len());
    ensure!(want == found, "{}: {found} tensors, expected {want}", descriptor.sample);
    check_bytes(&fetched, salt)?;
    Ok(fetched)
}

pub(super) async fn release(
    consumer: &Arc<dyn Transport>,
    descriptors: &[&Arc<Descriptor>],
) -> Result<ReleaseReport> {
    consumer.release(descriptors.iter().map(|&d| d.clone().into()).collect()).await
}

/// Releases one sample and checks that this call let go of it.
pub(super) async fn release_now(
    consumer: &Arc<dyn Transport>,
    descriptor: &Arc<Descriptor>,
) -> Verdict {
    let report = release(consumer, &[descriptor]).await?;
    ensure!(
        report.released + report.unconfirmed == 1 && report.already_gone + report.stale == 0,
        "{} was held, but its release reports {report:?}",
        descriptor.sample
    );
    Ok(())
}

/// Checks that a call failed with one of `kinds`, and that the error carries the context `names`.
pub(super) fn expect_error<T: fmt::Debug>(
    what: &str,
    result: Result<T>,
    kinds: &[ErrorKind],
    names: &[&str],
) -> Verdict<Error> {
    let error = match result {
        Ok(value) => {
            let value: String = format!("{value:?}").chars().take(300).collect();
            return Err(Stop::Failed(format!(
                "{what} succeeded, expected one of {kinds:?}: {value}"
            )));
        }
        Err(error) => error,
    };
    ensure!(
        kinds.contains(&error.kind()),
        "{what} failed with {:?}, expected one of {kinds:?}: {error}",
        error.kind()
    );
    for name in names {
        ensure!(
            error.context(name).is_some(),
            "{what} failed as expected, but does not name {name}: {error}"
        );
    }
    Ok(error)
}

/// Waits, within a bound, until the health of a transport is as it should be.
pub(super) async fn settled(
    what: &str,
    transport: &Arc<dyn Transport>,
    holds: impl Fn(&Health) -> bool,
) -> Verdict<Health> {
    let start = Instant::now();
    loop {
        let health = transport.health().await?;
        if holds(&health) {
            return Ok(health);
        }
        ensure!(start.elapsed() < SETTLE, "{what} does not hold after {SETTLE:?}: {health:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Counts how many regions went back to their owner.
#[derive(Clone, Debug, Default)]
pub(super) struct Returns(Arc<AtomicUsize>);

struct Ticket(Returns);

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Returns {
    /// A region that is counted when its last handle is gone.
    pub(super) fn region(&self, len: u64) -> Result<RegionMut> {
        Ok(RegionMut::zeroed(len as usize)?.keeping(Arc::new(Ticket(self.clone()))))
    }

    /// One region for each tensor of a sample, in order.
    pub(super) fn regions(&self, descriptor: &Descriptor) -> Result<Vec<RegionMut>> {
        descriptor.features.values().map(|f| self.region(f.meta.nbytes())).collect()
    }

    pub(super) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    /// Waits, within a bound, until exactly `count` regions went back.
    pub(super) async fn reach(&self, what: &str, count: usize) -> Verdict {
        let start = Instant::now();
        while self.count() != count {
            ensure!(
                start.elapsed() < SETTLE,
                "{what}: {} of {count} regions came back within {SETTLE:?}",
                self.count()
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }
}

/// The descriptor with one feature changed.
pub(super) fn with_feature(
    descriptor: &Descriptor,
    feature: &str,
    change: impl FnOnce(&mut crate::FeatureDescriptor),
) -> Arc<Descriptor> {
    let mut descriptor = descriptor.clone();
    let features: &mut IndexMap<_, _> = &mut descriptor.features;
    change(features.get_mut(feature).expect("cases change what they published"));
    Arc::new(descriptor)
}
