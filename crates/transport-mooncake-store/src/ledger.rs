//! What this process published, what it still has to remove, and who is at work on which sample.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use indexmap::IndexMap;
use parking_lot::Mutex;
use tokio::sync::Notify;
use transport_core::{Error, ErrorKind, Result, SampleKey, Sequence};

/// Counters of a store transport beyond its health.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreStats {
    /// Registrations ever made: only the pool's growth and
    /// [`StoreTransport::register`](crate::StoreTransport::register) make any.
    pub registrations: u64,
    /// Bytes of registered memory in the pool.
    pub pool_bytes: u64,
    /// Payload that was copied on its way because it was not in registered memory, or not in one
    /// piece.
    pub copied_bytes: u64,
    /// Payload that was read by a [`SegmentReader`](mooncake_sys::SegmentReader).
    pub native_bytes: u64,
    /// Time inside of the store's calls that write, read and remove objects, all threads together.
    pub in_calls: Duration,
    /// Objects that were read again after a failure.
    pub read_retries: u64,
    /// Segments whose owners do not answer.
    pub silent_segments: u64,
    /// Fetches refused at once because of them.
    pub refused_fetches: u64,
    /// Objects that still have to be removed.
    pub pending_removals: u64,
    /// Removals ever put off.
    pub deferred_removals: u64,
}

/// What became of removals that had been put off.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DrainReport {
    /// Objects that are gone now.
    pub removed: u64,
    /// Objects that are still there.
    pub remaining: u64,
    /// Keys of some of them, at most 16.
    pub remaining_keys: Vec<String>,
}

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    state: Mutex<State>,
    freed: Notify,
    pub(crate) published: AtomicU64,
    pub(crate) released: AtomicU64,
    pub(crate) duplicates: AtomicU64,
    pub(crate) stale: AtomicU64,
    pub(crate) host_bytes: AtomicU64,
    pub(crate) copied_bytes: AtomicU64,
    pub(crate) in_calls_ns: AtomicU64,
    pub(crate) read_retries: AtomicU64,
    pub(crate) deferred: AtomicU64,
    last_error: Mutex<Option<String>>,
}

#[derive(Debug, Default)]
struct State {
    resident: IndexMap<SampleKey, Resident>,
    claimed: HashSet<SampleKey>,
    pending: IndexMap<SampleKey, Pending>,
}

/// A sample that this process published and that nobody has released as far as it knows.
#[derive(Clone, Debug)]
pub(crate) struct Resident {
    pub(crate) bytes: u64,
    pub(crate) keys: Vec<Arc<str>>,
    pub(crate) seq: Option<Sequence>,
}

/// Objects of a sample that still have to be removed.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    pub(crate) keys: Vec<Arc<str>>,
    /// Whether their end is the release of a sample, which counts.
    pub(crate) is_release: bool,
}

impl Ledger {
    /// The life of a sample that this process published, if it is there.
    pub(crate) fn resident(&self, sample: &SampleKey) -> Option<Resident> {
        self.state.lock().resident.get(sample).cloned()
    }

    pub(crate) fn is_resident(&self, sample: &SampleKey) -> bool {
        self.state.lock().resident.contains_key(sample)
    }

    pub(crate) fn add(&self, sample: SampleKey, resident: Resident) {
        self.published.fetch_add(1, Ordering::SeqCst);
        if self.state.lock().resident.insert(sample, resident).is_some() {
            self.released.fetch_add(1, Ordering::SeqCst); // released elsewhere in the meantime
        }
    }

    /// Forgets a sample; whether this process had published it.
    pub(crate) fn forget(&self, sample: &SampleKey) -> bool {
        self.state.lock().resident.shift_remove(sample).is_some()
    }

    /// Every resident sample with the key of one of its objects.
    pub(crate) fn probes(&self) -> Vec<(SampleKey, Arc<str>)> {
        let state = self.state.lock();
        let first =
            |(sample, r): (&SampleKey, &Resident)| Some((sample.clone(), r.keys.first()?.clone()));
        state
            .resident
            .iter()
            .filter(|(s, _)| !state.claimed.contains(*s))
            .filter_map(first)
            .collect()
    }

    /// Samples and bytes.
    pub(crate) fn totals(&self) -> (u64, u64) {
        let state = self.state.lock();
        let bytes = state.resident.values().map(|r| r.bytes).sum();
        (state.resident.len() as u64, bytes)
    }

    /// Puts removals off.
    pub(crate) fn defer(&self, sample: SampleKey, keys: Vec<Arc<str>>, is_release: bool) {
        if keys.is_empty() {
            return;
        }
        self.deferred.fetch_add(keys.len() as u64, Ordering::SeqCst);
        let mut state = self.state.lock();
        let entry = state.pending.entry(sample).or_insert(Pending { keys: Vec::new(), is_release });
        entry.is_release |= is_release;
        for key in keys {
            if !entry.keys.contains(&key) {
                entry.keys.push(key);
            }
        }
    }

    /// Takes the put-off removals of one sample.
    pub(crate) fn take_pending(&self, sample: &SampleKey) -> Option<Pending> {
        self.state.lock().pending.shift_remove(sample)
    }

    pub(crate) fn pending_samples(&self) -> Vec<SampleKey> {
        self.state.lock().pending.keys().cloned().collect()
    }

    /// Objects that still have to be removed, and some of their keys.
    pub(crate) fn pending_keys(&self) -> (u64, Vec<String>) {
        let state = self.state.lock();
        let keys = || state.pending.values().flat_map(|p| &p.keys);
        (keys().count() as u64, keys().take(16).map(ToString::to_string).collect())
    }

    /// Claims samples for a publish or a removal; waits until nobody else works on any of them.
    pub(crate) async fn claim(
        self: &Arc<Self>,
        samples: Vec<SampleKey>,
        patience: Duration,
    ) -> Result<Claim> {
        let waiting = async {
            loop {
                let freed = self.freed.notified(); // from here on no wake-up is lost
                if let Some(claim) = self.try_claim(&samples) {
                    return claim;
                }
                freed.await;
            }
        };
        tokio::time::timeout(patience, waiting).await.map_err(|_| {
            Error::new(ErrorKind::Timeout, "call store", "another call works on the same sample")
                .with("sample", samples.first().map(ToString::to_string).unwrap_or_default())
        })
    }

    /// Makes one of the calls that [`StoreStats::in_calls`] counts.
    pub(crate) fn timed<T>(&self, call: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = call();
        let ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.in_calls_ns.fetch_add(ns, Ordering::Relaxed);
        result
    }

    /// Claims samples if nobody works on any of them.
    pub(crate) fn try_claim(self: &Arc<Self>, samples: &[SampleKey]) -> Option<Claim> {
        let mut state = self.state.lock();
        if samples.iter().any(|s| state.claimed.contains(s)) {
            return None;
        }
        state.claimed.extend(samples.iter().cloned());
        Some(Claim { ledger: self.clone(), samples: samples.to_vec() })
    }

    pub(crate) fn failed(&self, error: &Error) {
        *self.last_error.lock() = Some(error.to_string());
    }

    pub(crate) fn last_error(&self) -> Option<String> {
        self.last_error.lock().clone()
    }
}

/// The right to write and remove the objects of some samples, as long as it lives.
#[derive(Debug)]
pub(crate) struct Claim {
    ledger: Arc<Ledger>,
    samples: Vec<SampleKey>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut state = self.ledger.state.lock();
        for sample in &self.samples {
            state.claimed.remove(sample);
        }
        drop(state);
        self.ledger.freed.notify_waiters();
    }
}
