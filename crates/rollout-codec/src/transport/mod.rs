//! Rollouts over any [`Transport`]: put once, read by many, cleaned up once.
//!
//! A rollout becomes one or more *data* samples (its encoded data, cut at ends of checksum blocks)
//! and one *root* sample, which is published last and holds the header and the list of data
//! samples: where there is a root, everything is there. The [`Handle`] names the root, is small
//! whatever the rollout holds, and travels as JSON.
//!
//! ```
//! # use std::sync::Arc;
//! # use transport_core::MemoryTransport;
//! # use rollout_codec::{payload::{Payload, Profile}, transport::{RolloutConfig, RolloutTransport}};
//! # tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(async {
//! let memory = MemoryTransport::builder().arena_bytes(64 << 20).build()?;
//! let rollouts = RolloutTransport::new(Arc::new(memory), RolloutConfig::default())?;
//!
//! let payload = Payload::new(Profile::Text, 1 << 20);
//! let handle = rollouts.put(payload.into_rollout()).await?;
//! let sample = rollouts.get(&handle).await?;
//! let tokens = sample.view().ragged("tokens")?;
//! assert_eq!(tokens.row(0).unwrap().bytes().len(), 8 * (73 + 5281));
//!
//! drop((tokens, sample));
//! assert_eq!(rollouts.cleanup([&handle]).await?.removed, 1);
//! # Ok::<(), transport_core::Error>(())
//! # }).unwrap();
//! ```
//!
//! # Copies
//! `put` gathers the rows once, into the memory that consumers read (or that is sent), where the
//! transport takes [writers](transport_core::Writer); `get` into views copies nothing.
//! [`RolloutStats`] counts both.
//!
//! # Lifetimes
//! Whatever `get` returns, and every slice made from it, keeps the bytes: as long as one lives,
//! [`cleanup`](RolloutTransport::cleanup) of this process is put off. With the last one this
//! process lets go, and others may still read. Every handle has to be cleaned up once, by any
//! process. What a producer leaves in a store that is killed in the middle of a put is removed by
//! [`sweep`](RolloutTransport::sweep), if it keeps a [`Journal`].

mod config;
mod folder;
mod get;
mod handle;
mod host;
mod journal;
mod lease;
mod put;
mod ranges;
mod root;
mod rows;
mod stats;
mod sweep;

use std::{fmt, sync::Arc};

use tokio::runtime;
use transport_core::{Error, ErrorKind, Health, Release, Result, Transport, TransportInfo};

pub use config::{Register, RolloutConfig, Take, Verify};
pub use get::Sample;
pub use handle::{Handle, MAX_HANDLE_BYTES};
pub use host::HostShare;
pub use journal::Journal;
pub use rows::{FieldRows, RowSet};
pub use stats::RolloutStats;
pub use sweep::SweepReport;

use lease::Leases;
use stats::Counters;

/// Puts, gets and cleans up rollouts over another transport. Cheap to clone.
#[derive(Clone)]
pub struct RolloutTransport(Arc<Inner>);

struct Inner {
    transport: Arc<dyn Transport>,
    config: RolloutConfig,
    leases: Leases,
    counters: Arc<Counters>,
    runtime: runtime::Handle,
}

/// What became of handles that were cleaned up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct CleanupReport {
    /// Rollouts that this call let go of for good.
    pub removed: u64,
    /// Rollouts that were gone before.
    pub already_gone: u64,
    /// Rollouts that go with the last view of them in this process.
    pub deferred: u64,
}

impl RolloutTransport {
    /// Puts and gets over `transport`. Needs a tokio runtime, which runs what happens when the last
    /// view of a rollout is dropped.
    pub fn new(transport: Arc<dyn Transport>, config: RolloutConfig) -> Result<Self> {
        config.check()?;
        let runtime = runtime::Handle::try_current().map_err(|e| {
            Error::new(ErrorKind::ConfigInvalid, "open rollouts", "no tokio runtime")
                .source(e)
                .remedy("call it from within a runtime")
        })?;
        let counters = Arc::default();
        let leases = Leases::new(transport.clone(), runtime.clone());
        Ok(Self(Arc::new(Inner { transport, config, leases, counters, runtime })))
    }

    /// The transport that moves the bytes.
    pub fn info(&self) -> &TransportInfo {
        self.0.transport.info()
    }

    /// What has been put, read and copied so far.
    pub fn stats(&self) -> RolloutStats {
        self.0.counters.read(self.0.leases.live())
    }

    /// What the transport measures of itself.
    pub async fn health(&self) -> Result<Health> {
        self.0.transport.health().await
    }

    /// Removes rollouts: none, one or many. Idempotent.
    ///
    /// Data goes before the root, so that a cleanup that was cut off can be done again. Other
    /// processes keep what they hold until they let go; new readers find nothing.
    pub async fn cleanup<'h>(
        &self,
        handles: impl IntoIterator<Item = &'h Handle>,
    ) -> Result<CleanupReport> {
        let mut report = CleanupReport::default();
        for handle in handles {
            let entry = self.0.leases.entry(handle);
            let locked = entry.lock().await;
            if let Some(is_first) = entry.defer_cleanup() {
                report.deferred += 1;
                self.0.counters.cleaned(is_first.into());
                continue;
            }
            match self.0.read_root(handle).await {
                Ok(root) => {
                    lease::remove(&*self.0.transport, &root.descriptors()).await?;
                    report.removed += 1;
                    self.0.counters.cleaned(1);
                }
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Stale) => {
                    let root = vec![Release::from(handle.root().clone())];
                    self.0.transport.release(root).await?; // counts it as a duplicate
                    report.already_gone += 1;
                }
                Err(error) => return Err(error),
            }
            if let Some(share) = &self.0.config.host_share {
                share.forget(handle);
            }
            drop(locked);
            self.0.leases.forget(handle);
        }
        Ok(report)
    }

    /// Waits, for at most 10 seconds, until everything that follows from dropped views has happened:
    /// holds ended, cleanups that were put off.
    pub async fn settle(&self) {
        self.0.leases.settle().await;
    }

    /// Waits until what was put off has happened, and closes the transport.
    pub async fn close(&self) -> Result<()> {
        self.0.leases.settle().await;
        self.0.transport.close().await
    }
}

impl fmt::Debug for RolloutTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rollout({:?})", self.0.transport)
    }
}
