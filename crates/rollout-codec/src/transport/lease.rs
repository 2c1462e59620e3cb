//! What this process has views of, and what happens when they are gone.

use std::{
    collections::HashMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{runtime, sync::OwnedMutexGuard};
use transport_core::{
    Descriptor, Error, ErrorKind, Release, ReleaseReport, Result, SampleKey, Transport,
};

use super::{Handle, get::Whole};

/// How long `close` waits for what was put off.
const SETTLE: Duration = Duration::from_secs(10);

/// Everything that this process knows about rollouts that it reads.
#[derive(Debug)]
pub(super) struct Leases {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    transport: Arc<dyn Transport>,
    runtime: runtime::Handle,
    entries: Mutex<HashMap<SampleKey, Arc<Entry>>>,
    /// Leases that live, and ends of leases that still have to be told.
    open: AtomicU64,
    ending: AtomicU64,
}

/// One rollout.
#[derive(Debug, Default)]
pub(super) struct Entry {
    /// Held by whoever reads the rollout or removes it, so that an end never overtakes a beginning.
    calls: Arc<tokio::sync::Mutex<()>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    lease: Weak<Lease>,
    whole: Weak<Whole>,
    /// Was cleaned up while there were views.
    doomed: bool,
}

/// Kept by every view of a rollout.
#[derive(Debug)]
pub(super) struct Lease {
    shared: Arc<Shared>,
    entry: Arc<Entry>,
    samples: Vec<Arc<Descriptor>>,
}

impl Leases {
    pub(super) fn new(transport: Arc<dyn Transport>, runtime: runtime::Handle) -> Self {
        let (open, ending) = (AtomicU64::new(0), AtomicU64::new(0));
        let entries = Mutex::default();
        Self { shared: Arc::new(Shared { transport, runtime, entries, open, ending }) }
    }

    /// What is known about one rollout.
    pub(super) fn entry(&self, handle: &Handle) -> Arc<Entry> {
        self.shared.entries.lock().entry(handle.root().sample.clone()).or_default().clone()
    }

    /// Forgets a rollout that nothing is known about any more.
    pub(super) fn forget(&self, handle: &Handle) {
        self.shared.forget(&handle.root().sample);
    }

    /// A lease on these samples: the one that lives, or a new one. The caller has the entry's lock.
    pub(super) fn lease(&self, entry: &Arc<Entry>, samples: Vec<Arc<Descriptor>>) -> Arc<Lease> {
        let mut state = entry.state.lock();
        if let Some(lease) = state.lease.upgrade() {
            return lease;
        }
        self.shared.open.fetch_add(1, SeqCst);
        let (shared, entry) = (self.shared.clone(), entry.clone());
        let lease = Arc::new(Lease { shared, entry, samples });
        state.lease = Arc::downgrade(&lease);
        lease
    }

    /// Rollouts of which there are views.
    pub(super) fn live(&self) -> u64 {
        self.shared.open.load(SeqCst)
    }

    /// Waits, within a bound, until every lease that ended has been told.
    pub(super) async fn settle(&self) {
        let waiting = async {
            while self.shared.ending.load(SeqCst) > 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let _ = tokio::time::timeout(SETTLE, waiting).await;
    }
}

impl Shared {
    fn forget(&self, sample: &SampleKey) {
        let mut entries = self.entries.lock();
        // Two: ours and the map's. Whoever else has it will use it.
        let idle = entries.get(sample).is_some_and(|entry| Arc::strong_count(entry) <= 2);
        if idle {
            entries.remove(sample);
        }
    }
}

impl Entry {
    /// Waits until nobody else reads or removes the rollout.
    pub(super) async fn lock(self: &Arc<Self>) -> OwnedMutexGuard<()> {
        self.calls.clone().lock_owned().await
    }

    /// Refuses a rollout that was cleaned up here.
    pub(super) fn check_alive(&self, handle: &Handle) -> Result<()> {
        if self.state.lock().doomed {
            return Err(Error::new(ErrorKind::NotFound, "get rollout", "it was cleaned up")
                .with("key", &handle.root().sample)
                .remedy("read it before it is cleaned up, or keep the first result"));
        }
        Ok(())
    }

    /// Puts the cleanup off until the last view is gone: whether for the first time. `None` if there
    /// is no view.
    pub(super) fn defer_cleanup(&self) -> Option<bool> {
        let mut state = self.state.lock();
        (state.lease.strong_count() > 0).then(|| !std::mem::replace(&mut state.doomed, true))
    }

    /// The whole rollout, if there are views of it.
    pub(super) fn whole(&self) -> Option<Arc<Whole>> {
        self.state.lock().whole.upgrade()
    }

    pub(super) fn set_whole(&self, whole: &Arc<Whole>) {
        self.state.lock().whole = Arc::downgrade(whole);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let shared = self.shared.clone();
        let entry = self.entry.clone();
        let samples = std::mem::take(&mut self.samples);
        shared.ending.fetch_add(1, SeqCst);
        shared.open.fetch_sub(1, SeqCst);
        let runtime = shared.runtime.clone();
        let end = End(shared);
        runtime.spawn(async move {
            let locked = entry.lock().await;
            let state = {
                let state = entry.state.lock();
                (state.lease.strong_count() > 0, state.doomed)
            };
            let transport = &*end.0.transport;
            let done = match state {
                (true, _) => Ok(()), // read again meanwhile: that lease ends it
                (false, true) => remove(transport, &samples).await.map(drop),
                (false, false) => transport.let_go(samples.clone()).await,
            };
            if let Err(error) = done
                && error.kind() != ErrorKind::Closed
            {
                let key = samples.last().map(|root| root.sample.to_string());
                tracing::warn!(%error, key, "a rollout could not be let go");
            }
            if !state.0 {
                entry.state.lock().doomed = false;
            }
            drop(locked);
            if let (false, Some(root)) = (state.0, samples.last()) {
                end.0.forget(&root.sample);
            }
        });
    }
}

/// Counts the end of a lease as told, also when the runtime goes away first.
struct End(Arc<Shared>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.ending.fetch_sub(1, SeqCst);
    }
}

/// Ends this client's holds and frees: what others hold goes with the last of them.
///
/// A holder that frees leaves the object to the other holders; so the hold goes first.
pub(super) async fn remove(
    transport: &dyn Transport,
    samples: &[Arc<Descriptor>],
) -> Result<ReleaseReport> {
    transport.let_go(samples.to_vec()).await?;
    transport.release(samples.iter().cloned().map(Release::from).collect()).await
}
