//! Letting go of samples.

use std::{sync::Arc, time::Instant};

use transport_core::{
    ArenaLocation, Descriptor, Epoch, Error, Release, ReleaseReport, Result, Sequence, SessionName,
};

use super::{
    Inner,
    request::{arena_of, tells_life},
    uses::{Deferral, Ending},
};
use crate::{FreeTicket, transport::publishers::Publisher};

/// Frees that were handed over and may not be answered yet.
///
/// Dropping it changes nothing about the frees.
#[derive(Debug)]
#[must_use = "the report tells what became of the frees"]
pub struct PendingRelease {
    tickets: Vec<FreeTicket>,
    report: ReleaseReport,
    error: Option<Error>,
}

/// Samples of one life of one publisher.
struct Group {
    publisher: Arc<Publisher>,
    control: SessionName,
    epoch: Option<Epoch>,
    by_name: bool,
    samples: Vec<Arc<Descriptor>>,
}

impl Inner {
    /// Groups samples by publisher and life, and hands them to the control connections.
    pub(super) fn release(&self, releases: Vec<Release>) -> Result<PendingRelease> {
        // All or nothing as far as it can be seen beforehand.
        for release in &releases {
            arena_of(&release.descriptor)?;
        }
        let mut groups: Vec<Group> = Vec::new();
        let mut pending =
            PendingRelease { tickets: Vec::new(), report: ReleaseReport::default(), error: None };
        let mut last = 0; // neighbours mostly belong together
        for Release { descriptor } in releases {
            let arena = place(&descriptor);
            // A free that does not say which life it means, sent by who looks at the sample, would
            // end the hold that keeps it still: another client says it.
            let by_name = self.by_name.as_ref().filter(|_| !tells_life(&descriptor));
            let belongs = |group: &Group| {
                group.control == arena.control
                    && group.epoch == arena.epoch
                    && group.by_name == by_name.is_some()
            };
            let at = match groups.get(last).is_some_and(belongs) {
                true => Some(last),
                false => groups.iter().position(belongs),
            };
            match at {
                Some(at) => {
                    last = at;
                    groups[at].samples.push(descriptor);
                }
                None => {
                    let (control, epoch) = (arena.control.clone(), arena.epoch);
                    if let Some(epoch) = epoch {
                        self.publishers.get(&control)?.check_name(epoch)?;
                    }
                    let publisher = by_name.unwrap_or(&self.publishers).get(&control)?;
                    let (by_name, samples) = (by_name.is_some(), vec![descriptor]);
                    last = groups.len();
                    groups.push(Group { publisher, control, epoch, by_name, samples });
                }
            }
        }
        for Group { publisher, epoch, by_name, samples, .. } in groups {
            let life = epoch.filter(|_| !by_name).map(|epoch| publisher.life_called(epoch));
            // Under the lock until it is sent, so that a claim made meanwhile comes after it.
            let mut claims = life.as_ref().map(|life| life.claims.lock());
            if let Some(claims) = &mut claims {
                claims.release(samples.iter().flat_map(|sample| seqs(sample)));
            }
            let samples = match epoch {
                Some(epoch) if !by_name => {
                    self.not_in_use(samples, &publisher, epoch, &mut pending.report)
                }
                _ => samples,
            };
            if samples.is_empty() {
                continue;
            }
            match publisher.client().free_later(samples, epoch) {
                Ok(ticket) => pending.tickets.push(ticket),
                Err(error) => pending.error = pending.error.or(Some(error)),
            }
        }
        Ok(pending)
    }
}

impl Inner {
    /// Gives the holds of this client back, sample by sample, each after its last view; frees nothing.
    pub(super) fn let_go(&self, samples: &[Arc<Descriptor>]) -> Result<()> {
        for descriptor in samples {
            let arena = arena_of(descriptor)?;
            // Publishers that tell no epoch know no holds.
            let Some(epoch) = arena.epoch else { continue };
            let publisher = self.publishers.get(&arena.control)?;
            let life = publisher.life_called(epoch);
            // Under the lock until it is sent, so that a claim made meanwhile comes after it.
            let mut claims = life.claims.lock();
            claims.release(seqs(descriptor));
            let deferral = self.uses.defer(Ending::LetGo, &publisher, epoch, descriptor);
            if deferral == Deferral::NotInUse {
                publisher.client().unhold_sample(epoch, descriptor);
            }
        }
        Ok(())
    }

    /// Keeps back the releases of samples that are in use, counts them, and returns the others.
    fn not_in_use(
        &self,
        mut samples: Vec<Arc<Descriptor>>,
        publisher: &Arc<Publisher>,
        epoch: Epoch,
        report: &mut ReleaseReport,
    ) -> Vec<Arc<Descriptor>> {
        samples.retain(|sample| match self.uses.defer(Ending::Release, publisher, epoch, sample) {
            Deferral::NotInUse => true,
            Deferral::Kept => {
                report.deferred += 1;
                false
            }
            Deferral::Released => {
                report.already_gone += 1;
                false
            }
        });
        samples
    }
}

fn place(descriptor: &Descriptor) -> &ArenaLocation {
    arena_of(descriptor).expect("checked before")
}

fn seqs(descriptor: &Descriptor) -> impl Iterator<Item = Sequence> + '_ {
    descriptor.features.values().filter_map(|feature| feature.seq)
}

impl PendingRelease {
    /// Waits for all answers on this thread, at the latest until `deadline`.
    pub fn wait(mut self, deadline: Instant) -> Result<ReleaseReport> {
        for ticket in std::mem::take(&mut self.tickets) {
            let outcome = ticket.wait(deadline);
            self.add(outcome);
        }
        self.finish()
    }

    /// Waits for all answers.
    pub async fn outcome(mut self) -> Result<ReleaseReport> {
        for mut ticket in std::mem::take(&mut self.tickets) {
            let outcome = (&mut ticket).await;
            self.add(outcome);
        }
        self.finish()
    }

    fn add(&mut self, outcome: Result<ReleaseReport>) {
        match outcome {
            Ok(report) => self.report.merge(report),
            Err(error) => {
                self.error.get_or_insert(error);
            }
        }
    }

    fn finish(self) -> Result<ReleaseReport> {
        match self.error {
            None => Ok(self.report),
            Some(error) => Err(error
                .with("released_elsewhere", self.report.released)
                .with("already_gone_elsewhere", self.report.already_gone)),
        }
    }
}
