//! Removing what puts of processes that died have left in a store.

use std::sync::Arc;

use transport_core::{Descriptor, Error, ErrorKind, ReleaseReport, Result};

use super::{Inner, RolloutTransport, journal::Abandoned, lease};

/// What [`RolloutTransport::sweep`] has done.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct SweepReport {
    /// Puts that had died, and of which nothing is left.
    pub swept: u64,
    /// Data samples and roots of them that this call removed.
    pub removed: u64,
    /// Puts that had died and of which something could not be removed yet, such as an object that
    /// was half written when its writer died: the next sweep tries again.
    pub left: u64,
    /// What lies in the journal and cannot be read as an entry, each with its file, the reason and
    /// what to do. It stays there.
    pub unreadable: Vec<String>,
}

impl RolloutTransport {
    /// Removes what puts have written whose process died before their handle was out, and which
    /// nobody else can know of. Needs a [`Journal`](super::Journal), shared by all producers of
    /// this host, or of all hosts where it lies on a file system that keeps locks between them.
    ///
    /// Puts on their way are left alone, and so is every rollout whose handle is out: the keys of
    /// data samples are those of one put, and a root is removed only if it is the one that the dead
    /// put wrote. Idempotent; sweeps may run at the same time.
    pub async fn sweep(&self) -> Result<SweepReport> {
        let Some(journal) = self.0.config.journal.clone() else {
            return Err(Error::new(ErrorKind::ConfigInvalid, "sweep rollouts", "no journal")
                .remedy("give producers and sweepers the same journal"));
        };
        let found = tokio::task::spawn_blocking(move || journal.abandoned()).await;
        let (found, unreadable) = found.expect("reading a journal does not panic")?;
        let unreadable = unreadable.iter().map(ToString::to_string).collect();
        let mut report = SweepReport { unreadable, ..SweepReport::default() };
        for abandoned in found {
            let released = self.0.sweep_one(&abandoned).await?;
            report.removed += released.released;
            if released.unconfirmed + released.deferred == 0 {
                abandoned.done();
                report.swept += 1;
            } else {
                report.left += 1;
            }
        }
        Ok(report)
    }
}

impl Inner {
    async fn sweep_one(&self, abandoned: &Abandoned) -> Result<ReleaseReport> {
        let mut samples: Vec<Arc<Descriptor>> = abandoned.data.clone();
        if let Some(handle) = &abandoned.handle {
            match self.read_root(handle).await {
                Ok(_) => samples.push(handle.root().clone()),
                // Never written, or somebody else's under the same name.
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::NotFound
                            | ErrorKind::Stale
                            | ErrorKind::Corrupt
                            | ErrorKind::ShortRead
                    ) => {}
                Err(error) => return Err(error),
            }
        }
        lease::remove(&*self.transport, &samples).await
    }
}
