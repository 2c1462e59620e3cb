//! From trained to settled, in the one order that a crash cannot hurt.
//!
//! At each optimizer boundary every rank calls [`Acknowledger::acknowledge`]:
//!
//! 1. all ranks tell rank 0 what they have trained;
//! 2. rank 0 records the union in the [`Ledger`](crate::ledger::Ledger): one transaction, on the disk;
//! 3. each rank frees exactly its own samples, on the servers that hold them;
//! 4. all ranks tell each other what could not be freed, and rank 0 what was;
//! 5. rank 0 tells the producer how much is settled.

mod authority;
mod background;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use transport_core::{Descriptor, Error, ErrorKind, Result, SampleId};

pub use authority::{Authority, AuthorityStats, Resume, Window};
pub use background::BackgroundAck;

use crate::{
    ledger::{Observer, Point},
    lifecycle::Samples,
    ranks::Group,
};

/// What one rank brings to an optimizer boundary.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Step {
    /// Number of the step; grows from one boundary to the next.
    pub number: u64,
    /// Samples that this rank has trained in it.
    pub trained: Vec<Arc<Descriptor>>,
    /// Samples that it was given and that cannot be had any more.
    pub lost: Vec<SampleId>,
}

impl Step {
    /// Step `number`, in which this rank has trained `trained`.
    pub fn new(number: u64, trained: Vec<Arc<Descriptor>>) -> Self {
        Self { number, trained, lost: Vec::new() }
    }

    /// Names samples that cannot be had any more, to be captured again.
    #[must_use]
    pub fn lost(mut self, lost: Vec<SampleId>) -> Self {
        self.lost = lost;
        self
    }
}

/// What an acknowledgement came to. The same on every rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Boundary {
    /// The step that is durable now.
    pub step: u64,
    /// Samples that became durable with it, all ranks together.
    pub acknowledged: u64,
    /// Frees that are not confirmed, all ranks together; tried again at the next boundary.
    pub release_pending: u64,
    /// Ranks whose frees are not all confirmed, and why.
    pub cleanup_errors: Vec<(usize, String)>,
}

#[derive(Serialize, Deserialize)]
struct Trained<'a> {
    step: u64,
    #[serde(borrow)]
    trained: Vec<&'a str>,
    lost: Vec<&'a str>,
}

#[derive(Serialize, Deserialize)]
struct Cleaned {
    pending: Vec<String>,
    error: Option<String>,
}

/// One rank's part in acknowledging.
#[derive(Debug)]
pub struct Acknowledger {
    group: Group,
    samples: Arc<Samples>,
    authority: Option<Arc<Mutex<Authority>>>,
    runtime: Handle,
    observer: Observer,
    patience: u32,
    batch: usize,
    late: u32, // boundaries in a row that left frees pending here
    unconfirmed: Vec<SampleId>,
}

/// Boundaries at which frees may stay unconfirmed in a row before that is an error.
const PATIENCE: u32 = 8;

impl Acknowledger {
    /// A rank of `group` whose samples are `samples`. Rank 0, and only it, has the authority.
    ///
    /// # Errors
    /// [`ErrorKind::ConfigInvalid`] if the samples would be freed before they are trained, or if
    /// the authority is on the wrong rank.
    pub fn new(
        group: Group,
        samples: Arc<Samples>,
        authority: Option<Arc<Mutex<Authority>>>,
        runtime: Handle,
    ) -> Result<Self> {
        let refuse = |why: &'static str| Error::new(ErrorKind::ConfigInvalid, "acknowledge", why);
        if !samples.retention().retain {
            return Err(refuse(
                "samples would be freed once they are loaded, before they are trained",
            )
            .remedy("open the store with retention (retain_on_release=True)"));
        }
        if authority.is_some() != (group.rank() == 0) {
            return Err(
                refuse("rank 0, and only rank 0, owns the ledger").with("rank", group.rank())
            );
        }
        Ok(Self {
            group,
            samples,
            authority,
            runtime,
            observer: Observer::default(),
            patience: PATIENCE,
            batch: usize::MAX,
            late: 0,
            unconfirmed: Vec::new(),
        })
    }

    /// Tells `observer` about every point that matters to a crash.
    #[must_use]
    pub fn observed(mut self, observer: Observer) -> Self {
        self.observer = observer;
        self
    }

    /// Sets at how many boundaries in a row frees may stay unconfirmed; 0 makes the first an error.
    #[must_use]
    pub fn patience(mut self, boundaries: u32) -> Self {
        self.patience = boundaries;
        self
    }

    /// Sets how many samples are freed in one call at most. Default: a whole step.
    #[must_use]
    pub fn batch(mut self, samples: usize) -> Self {
        self.batch = samples.max(1);
        self
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Makes a step durable and frees what it has trained. Blocks; all ranks call it.
    ///
    /// # Errors
    /// Before the step is durable: nothing is recorded or freed on any rank, and the same call may
    /// be made again if the group still stands. After it: frees are unconfirmed for longer than
    /// [`patience`](Self::patience) allows; then every rank gets the error.
    pub fn acknowledge(&mut self, step: &Step) -> Result<Boundary> {
        let note = |error: Error| error.with("step", step.number);
        let own = Trained {
            step: step.number,
            trained: step.trained.iter().map(|d| d.sample.sample_id.as_str()).collect(),
            lost: step.lost.iter().map(SampleId::as_str).collect(),
        };
        let own = serde_json::to_vec(&own).expect("plain data");
        let authority = self.authority.clone();
        let decision = self.group.decide(&own, |all| {
            let authority = authority.as_ref().expect("rank 0 has it");
            let new = record(&mut authority.lock(), step.number, all)?;
            Ok(new.to_le_bytes().to_vec())
        });
        let acknowledged = decision.map_err(note)?;
        let acknowledged = acknowledged.try_into().map_or(0, u64::from_le_bytes);

        // Durable: from here on a failure is one of cleaning up.
        self.observer.at(Point::BeforeFree);
        let cleaned = self.free(step);
        let cleaned = serde_json::to_vec(&cleaned).expect("plain data");
        let all = self.group.all_gather(&cleaned).map_err(note)?;
        self.observer.at(Point::BeforeSettle);
        let all: Vec<Cleaned> = all
            .iter()
            .map(|bytes| serde_json::from_slice(bytes).map_err(|e| garbled().source(e)))
            .collect::<Result<_>>()?;
        if let Some(authority) = &self.authority {
            let pending = all.iter().flat_map(|cleaned| &cleaned.pending);
            authority.lock().settle(pending.map(String::as_str))?;
        }
        self.observer.at(Point::AfterSettle);
        let boundary = Boundary {
            step: step.number,
            acknowledged,
            release_pending: all.iter().map(|cleaned| cleaned.pending.len() as u64).sum(),
            cleanup_errors: all
                .into_iter()
                .enumerate()
                .filter_map(|(rank, cleaned)| Some((rank, cleaned.error?)))
                .collect(),
        };
        self.late = if boundary.release_pending == 0 { 0 } else { self.late + 1 };
        if self.late > self.patience {
            let (rank, why) = boundary.cleanup_errors.first().cloned().unwrap_or_default();
            return Err(note(
                Error::new(
                    ErrorKind::Busy,
                    "acknowledge",
                    "the step is durable, but not all freed",
                )
                .with("rank", rank)
                .with("reason", why)
                .with("release_pending", boundary.release_pending)
                .with("boundaries", self.late)
                .remedy("check the servers that hold them; a restart frees them again"),
            ));
        }
        Ok(boundary)
    }

    /// Frees this rank's own samples and tries again what was not confirmed before.
    fn free(&mut self, step: &Step) -> Cleaned {
        let (samples, runtime) = (&self.samples, &self.runtime);
        for batch in step.trained.chunks(self.batch) {
            runtime.block_on(samples.settle(batch));
        }
        // A sample that could not be read in time may still be on its server; it is captured again
        // as another life, which a free of this one does not touch.
        if !step.lost.is_empty() {
            runtime.block_on(samples.abort_many(&step.lost));
        }
        let mut wanted = std::mem::take(&mut self.unconfirmed);
        if !wanted.is_empty() || samples.release_pending() > 0 {
            let own = step.trained.iter().map(|descriptor| descriptor.sample.sample_id.clone());
            wanted.extend(own.chain(step.lost.iter().cloned()));
            self.unconfirmed = runtime.block_on(samples.retry_frees(Some(&wanted))).1;
        }
        let pending: Vec<String> = self.unconfirmed.iter().map(ToString::to_string).collect();
        let error = (!pending.is_empty())
            .then(|| format!("{} frees are not confirmed, first {}", pending.len(), pending[0]));
        Cleaned { pending, error }
    }

    /// Waits until every rank has come this far, such as before a checkpoint.
    pub fn barrier(&mut self) -> Result<()> {
        self.group.barrier()
    }
}

fn garbled() -> Error {
    Error::new(ErrorKind::Protocol, "acknowledge", "a rank's contribution makes no sense")
}

/// Rank 0: checks what the ranks say against each other, and makes it durable.
fn record(authority: &mut Authority, step: u64, all: &[Vec<u8>]) -> Result<u64> {
    let (mut trained, mut lost) = (Vec::new(), Vec::new());
    let mut seen = std::collections::HashSet::new();
    for (rank, bytes) in all.iter().enumerate() {
        let part: Trained<'_> =
            serde_json::from_slice(bytes).map_err(|e| garbled().with("rank", rank).source(e))?;
        if part.step != step {
            return Err(Error::new(
                ErrorKind::Protocol,
                "acknowledge",
                "ranks are at different steps",
            )
            .with("rank", rank)
            .with("expected", step)
            .with("found", part.step));
        }
        for id in part.trained {
            let id = SampleId::new(id)?;
            if !seen.insert(id.clone()) {
                return Err(Error::new(
                    ErrorKind::Protocol,
                    "acknowledge",
                    "trained twice in a step",
                )
                .with("sample_id", id)
                .with("rank", rank));
            }
            trained.push(id);
        }
        for id in part.lost {
            lost.push(SampleId::new(id)?);
        }
    }
    authority.record(step, &trained, &lost)
}
