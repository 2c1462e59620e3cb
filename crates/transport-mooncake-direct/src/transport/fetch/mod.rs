//! Fetching: check, claim, read, and only then say that it is done.

mod group;
mod read;
#[cfg(feature = "cuda")]
mod staged;

use std::time::Instant;

use transport_core::{Error, ErrorKind, FetchRequest, Fetched, Result, SessionName};

use self::{group::Group, read::Tensors};
use super::{EngineState, Inner, request::Wanted, transfer::Transfer};
#[cfg(feature = "cuda")]
use crate::ReadOptions;

impl Inner {
    /// Fetches on this thread. `wanted` tells whether anybody still waits for the result.
    pub(super) fn fetch(
        &self,
        requests: Vec<FetchRequest>,
        deadline: Instant,
        transfer: &Transfer,
        is_wanted: impl Fn() -> bool,
    ) -> Result<Vec<Fetched>> {
        self.check_open("fetch")?;
        let engine = self.engine.as_ref().expect("checked by the caller");
        let views = matches!(engine, EngineState::Shm);
        let mut samples = requests
            .into_iter()
            .map(|request| {
                let can = (views, engine.reads_ranges());
                Wanted::check(request, can, self.reach, self.pool.as_ref())
            })
            .collect::<Result<Vec<_>>>()?;
        let mut groups = self.group(&samples)?;
        let result = self
            .claim_and_read(engine, &mut samples, &mut groups, deadline, transfer)
            .and_then(|tensors| {
                if is_wanted() && !transfer.is_stopped() {
                    self.commit(&samples, &mut groups, deadline)?;
                    Ok(tensors)
                } else {
                    Err(Error::new(ErrorKind::Closed, "fetch", "nobody waits for the result"))
                }
            });
        match result {
            Ok(tensors) => Ok(describe(samples, &groups, tensors)),
            Err(error) => {
                #[cfg(feature = "cuda")]
                if let EngineState::Cuda(engine) = engine
                    && matches!(error.kind(), ErrorKind::PeerGone | ErrorKind::Stale)
                {
                    self.close_dead_peers(engine);
                }
                // First the memory, then the claims: nothing is read any more.
                groups.into_iter().for_each(|group| group.give_back(&samples, &self.uses));
                *self.last_error.lock() = Some(error.to_string());
                Err(error)
            }
        }
    }

    fn group(&self, samples: &[Wanted]) -> Result<Vec<Group>> {
        let mut groups: Vec<(&SessionName, Group)> = Vec::new();
        for (i, sample) in samples.iter().enumerate() {
            let arena = sample.arena();
            let known = groups
                .iter_mut()
                .rev()
                .find(|(control, group)| **control == arena.control && group.epoch == arena.epoch);
            match known {
                Some((_, group)) => group.samples.push(i),
                None => {
                    let publisher = self.publishers.get(&arena.control)?;
                    groups.push((&arena.control, Group::new(publisher, arena.epoch, i)));
                }
            }
        }
        Ok(groups.into_iter().map(|(_, group)| group).collect())
    }

    fn claim_and_read(
        &self,
        engine: &EngineState,
        samples: &mut [Wanted],
        groups: &mut [Group],
        deadline: Instant,
        transfer: &Transfer,
    ) -> Result<Vec<Tensors>> {
        for group in &mut *groups {
            group.connect(samples, deadline)?;
            group.check_places(samples)?;
            if matches!(engine, EngineState::Shm) {
                // Before anything is claimed: the publisher sees the mapping from here on.
                let (life, _) = group.life.as_ref().expect("shm connects");
                group.mapping = Some(life.shared()?.mapping()?);
            }
            group.claim(samples, self.publishers.client_id(), &self.uses, deadline)?;
        }
        if transfer.is_stopped() {
            return Err(Error::new(ErrorKind::Closed, "fetch", "the fetch was given up"));
        }
        if !self.transfer_delay.is_zero() && samples.iter().any(|sample| !sample.view) {
            std::thread::sleep(self.transfer_delay);
        }
        match engine {
            EngineState::Shm => self.read_shared(samples, groups, deadline, transfer),
            EngineState::Tcp(engine) => {
                #[cfg(feature = "cuda")]
                if let Some(staging) = &self.staging {
                    let owns_padding = samples.iter().all(Wanted::owns_padding);
                    let staged = staged::Staged { engine, staging, owns_padding };
                    let read = |session: &_, ops, options: &_| staged.read(session, ops, options);
                    return self.read_remote(read, true, samples, groups, deadline, transfer);
                }
                let read = |session: &_, mut ops: Vec<_>, options: &_| {
                    engine.read_ops(session, &mut ops, options).map(|()| ops)
                };
                self.read_remote(read, true, samples, groups, deadline, transfer)
            }
            #[cfg(feature = "cuda")]
            EngineState::Cuda(engine) => {
                let read = |session: &_, ops, options: &ReadOptions| {
                    if !engine.knows(session, options.epoch) {
                        self.close_dead_peers(engine);
                    }
                    engine.read_ops(session, ops, options)
                };
                self.read_remote(read, false, samples, groups, deadline, transfer)
            }
            EngineState::Mooncake(engine) => {
                // Before ranges cut them: only parts of one owner can be put together again. What is
                // not cut the engine looks up itself, once.
                let tensors = samples.iter_mut().flat_map(|sample| &mut sample.tensors);
                for tensor in tensors.filter(|tensor| tensor.part.is_some()) {
                    tensor.region = tensor.region.take().map(|r| engine.adopt(r)).transpose()?;
                }
                let read = |session: &_, ops, options: &_| engine.read_ops(session, ops, options);
                self.read_remote(read, false, samples, groups, deadline, transfer)
            }
        }
    }

    /// Makes the claims of this call permanent, if they certainly lived all the while.
    fn commit(&self, samples: &[Wanted], groups: &mut [Group], deadline: Instant) -> Result<()> {
        for group in &*groups {
            group.check_continuity(samples, deadline)?;
        }
        groups.iter_mut().try_for_each(|group| group.commit(samples))
    }
}

fn describe(samples: Vec<Wanted>, groups: &[Group], tensors: Vec<Tensors>) -> Vec<Fetched> {
    let mut checked = vec![false; samples.len()];
    for group in groups {
        for &i in &group.samples {
            checked[i] = group.staleness_checked(&samples[i]);
        }
    }
    let whole = samples.into_iter().zip(tensors).zip(checked);
    whole
        .map(|((sample, tensors), checked)| Fetched::new(sample.descriptor, tensors, checked))
        .collect()
}
