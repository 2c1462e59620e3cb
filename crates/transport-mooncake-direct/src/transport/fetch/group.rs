//! The samples of one publisher in one call: what is checked and claimed before they are read.

use std::{sync::Arc, time::Instant};

use capture_arena::MappedBacking;
use control_proto::control::Objects;
use transport_core::{ClientId, Epoch, Error, ErrorKind, Result};

use super::super::{
    publishers::{Life, Publisher},
    request::{Wanted, outside},
    uses::{Ending, InUse, Uses},
};
use crate::{
    Standing,
    claims::Seqs,
    control::{ClaimObject, Claimed},
};

/// Objects start at multiples of this, in bytes from the start of the arena.
const ALIGNMENT: u64 = capture_arena::UNIT;

/// Samples of one publisher in one call.
pub(super) struct Group {
    pub(super) publisher: Arc<Publisher>,
    /// Life that the descriptors belong to; none with older publishers.
    pub(super) epoch: Option<Epoch>,
    /// Which of the call's samples.
    pub(super) samples: Vec<usize>,
    /// What is known once connected; none where only the data port is used.
    pub(super) life: Option<(Arc<Life>, Standing)>,
    /// The publisher's memory, where it is read in place.
    pub(super) mapping: Option<MappedBacking>,
    /// Uses begun.
    pub(super) uses: Vec<Use>,
}

/// A sample that is being used.
pub(super) struct Use {
    /// Which of the call's.
    pub(super) sample: usize,
    /// A claim was made for this call.
    claimed: bool,
    /// Keeps releases back while the sample is read in place.
    pub(super) in_use: Option<Arc<InUse>>,
}

impl Group {
    pub(super) fn new(publisher: Arc<Publisher>, epoch: Option<Epoch>, first: usize) -> Self {
        let (life, mapping, uses) = (None, None, Vec::new());
        Self { publisher, epoch, samples: vec![first], life, mapping, uses }
    }

    /// Makes sure that the life that is meant is there. Older publishers are only read.
    pub(super) fn connect(&mut self, samples: &[Wanted], deadline: Instant) -> Result<()> {
        let first = &samples[self.samples[0]];
        let key = || match first.tensors.is_empty() {
            true => first.descriptor.sample.to_string(),
            false => first.key(0).to_string(),
        };
        self.life = match self.epoch {
            Some(epoch) => Some(self.publisher.life(epoch, deadline)),
            None => None,
        }
        .transpose()
        .map_err(|e| e.with("key", key()))?;
        Ok(())
    }

    /// Checks every tensor against what the publisher says about its arena.
    pub(super) fn check_places(&self, samples: &[Wanted]) -> Result<()> {
        let Some((_, standing)) = &self.life else { return Ok(()) };
        let arena = &standing.hello.arena;
        for &i in &self.samples {
            let sample = &samples[i];
            for (j, tensor) in sample.tensors.iter().enumerate() {
                let bytes = sample.meta(j).nbytes();
                if bytes == 0 {
                    continue;
                }
                let offset = tensor.address.0.checked_sub(arena.base.0);
                let end = offset.and_then(|offset| offset.checked_add(bytes));
                if end.is_none_or(|end| end > arena.bytes) {
                    let of = format!("{} bytes at {:#x}", arena.bytes, arena.base.0);
                    return Err(outside(sample.key(j), tensor.address, bytes, of));
                }
                if offset.is_some_and(|offset| offset % ALIGNMENT != 0) {
                    let of = format!("an object, which starts at a multiple of {ALIGNMENT}");
                    return Err(outside(sample.key(j), tensor.address, bytes, of));
                }
            }
        }
        Ok(())
    }

    /// Claims what is not held yet.
    pub(super) fn claim(
        &mut self,
        samples: &[Wanted],
        client: &ClientId,
        uses: &Arc<Uses>,
        deadline: Instant,
    ) -> Result<()> {
        let (Some((life, standing)), Some(epoch)) = (&self.life, self.epoch) else {
            return Ok(());
        };
        let fresh = standing.is_fresh();
        let mut to_claim = Vec::new(); // places in `uses`
        self.uses.reserve(self.samples.len());
        let mut claims = life.claims.lock();
        for &sample in &self.samples {
            let descriptor = &samples[sample].descriptor;
            let born_held = samples[sample].arena().holder.as_ref() == Some(client);
            let in_use = match &self.mapping {
                Some(mapping) => Some(uses.begin(epoch, descriptor, mapping)?),
                None => None,
            };
            let certain = claims.begin(seqs(&samples[sample]), born_held) && fresh;
            if !certain {
                to_claim.push(self.uses.len());
            }
            self.uses.push(Use { sample, claimed: false, in_use });
        }
        drop(claims);
        let mut rest = &to_claim[..];
        while !rest.is_empty() {
            let mut objects = Vec::new();
            let mut owners = Vec::new(); // of each object: use and feature
            let mut taken = 0;
            for &place in rest {
                let descriptor = &samples[self.uses[place].sample].descriptor;
                if taken > 0 && objects.len() + descriptor.features.len() > Objects::PER_LINE {
                    break;
                }
                taken += 1;
                for (f, (name, feature)) in descriptor.features.iter().enumerate() {
                    owners.push((place, f));
                    let bytes = feature.meta.nbytes();
                    objects.push(ClaimObject {
                        key: descriptor.sample.object(name).shared(),
                        seq: feature.seq,
                        range: feature.address.filter(|_| bytes > 0).map(|at| (at, bytes)),
                    });
                }
            }
            let (now, later) = rest.split_at(taken);
            rest = later;
            // From here on the claims may exist, whatever comes of the answer.
            for &place in now {
                self.uses[place].claimed = true;
            }
            let Claimed { gone, stale } =
                self.publisher.client().hold(epoch, objects, deadline).map_err(|e| {
                    let first = &samples[self.uses[now[0]].sample];
                    e.with("key", first.descriptor.sample.clone())
                })?;
            if let Some(&bad) = gone.iter().chain(&stale).min() {
                let (place, f) = owners.get(bad as usize).copied().unwrap_or((now[0], 0));
                let sample = &samples[self.uses[place].sample];
                return Err(refused(sample, f, gone.contains(&bad)));
            }
        }
        Ok(())
    }

    /// Whether everything read was certainly kept by the publisher until now. If the lease may
    /// have lapsed in between, the publisher is asked once more.
    pub(super) fn check_continuity(&self, samples: &[Wanted], deadline: Instant) -> Result<()> {
        let (Some((_, before)), Some(epoch)) = (&self.life, self.epoch) else { return Ok(()) };
        let client = self.publisher.client();
        let same = |now: &Standing| {
            now.hello.epoch == epoch && now.continuity == before.continuity && now.is_fresh()
        };
        if client.standing().is_some_and(|now| same(&now)) {
            return Ok(());
        }
        client.connect_to(epoch, deadline)?;
        for one in &self.uses {
            let sample = &samples[one.sample];
            let objects = sample.descriptor.features.iter().map(|(name, feature)| ClaimObject {
                key: sample.descriptor.sample.object(name).shared(),
                seq: feature.seq,
                range: None,
            });
            let again = client.hold(epoch, objects.collect(), deadline)?;
            if let Some(&bad) = again.gone.iter().chain(&again.stale).min() {
                return Err(refused(sample, bad as usize, again.gone.contains(&bad)));
            }
        }
        Ok(())
    }

    /// Makes the claims of this call permanent. Names a sample that was released meanwhile.
    pub(super) fn commit(&mut self, samples: &[Wanted]) -> Result<()> {
        let Some((life, _)) = &self.life else { return Ok(()) };
        let mut claims = life.claims.lock();
        let mut lost = None;
        // All of them, so that none is left as being used.
        for Use { sample, .. } in self.uses.drain(..) {
            if !claims.commit(seqs(&samples[sample])) {
                lost = lost.or(Some(sample));
            }
        }
        drop(claims);
        let Some(sample) = lost else { return Ok(()) };
        let why = "the sample was released while it was fetched";
        let key = samples[sample].descriptor.sample.clone();
        Err(Error::new(ErrorKind::NotFound, "fetch", why).with("key", key))
    }

    /// Ends the uses of a call that failed, and gives back what it alone has claimed.
    pub(super) fn give_back(mut self, samples: &[Wanted], all_uses: &Uses) {
        self.uses.iter_mut().for_each(|one| one.in_use = None); // which may send a release
        let (Some((life, _)), Some(epoch)) = (&self.life, self.epoch) else { return };
        let mut back = Vec::new();
        // Under the lock until it is sent, so that a claim made meanwhile comes after it.
        let mut claims = life.claims.lock();
        for one in &self.uses {
            let descriptor = &samples[one.sample].descriptor;
            for place in claims.abort(seqs(&samples[one.sample]), one.claimed) {
                let (name, feature) = descriptor.features.get_index(place).expect("one a number");
                if feature.seq.is_some_and(|seq| all_uses.contains(epoch, seq)) {
                    // Views of an earlier fetch live on this claim, and nobody else does.
                    all_uses.defer(Ending::LetGo, &self.publisher, epoch, descriptor);
                    continue;
                }
                back.push(ClaimObject {
                    key: descriptor.sample.object(name).shared(),
                    seq: feature.seq,
                    range: None,
                });
            }
        }
        while !back.is_empty() {
            let rest = back.split_off(back.len().min(Objects::PER_LINE));
            self.publisher.client().unhold_later(epoch, std::mem::replace(&mut back, rest));
        }
        drop(claims);
    }

    /// Whether the lives of a sample's objects were compared.
    pub(super) fn staleness_checked(&self, sample: &Wanted) -> bool {
        self.epoch.is_some() && sample.descriptor.features.values().all(|f| f.seq.is_some())
    }
}

/// The lives of a sample's objects.
fn seqs(sample: &Wanted) -> impl Seqs {
    sample.descriptor.features.values().map(|feature| feature.seq)
}

fn refused(sample: &Wanted, feature: usize, gone: bool) -> Error {
    let features = &sample.descriptor.features;
    let (name, feature) = features
        .get_index(feature)
        .or_else(|| features.first())
        .expect("a claim has at least one object");
    let expected = match (feature.seq, feature.address) {
        (Some(seq), Some(at)) => {
            format!("life {seq}, {} bytes at {:#x}", feature.meta.nbytes(), at.0)
        }
        (Some(seq), None) => format!("life {seq}"),
        (None, _) => "any life".into(),
    };
    let (kind, message, found) = match gone {
        true => (ErrorKind::NotFound, "the sample is gone", "nothing under this key"),
        false => {
            (ErrorKind::Stale, "the descriptor is out of date", "another life or another place")
        }
    };
    Error::new(kind, "fetch", message)
        .with("key", sample.descriptor.sample.object(name))
        .with("expected", expected)
        .with("found", found)
        .remedy("it was released or replaced: fetch the newest descriptor, or capture it again")
}
