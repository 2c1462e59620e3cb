//! Fetching: check, claim, read, and only then say that it is done.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use capture_arena::MappedBacking;
use control_proto::control::Objects;
use indexmap::IndexMap;
use transport_core::{
    Epoch, Error, ErrorKind, FetchRequest, Fetched, RegionMut, RegionSlice, RemoteAddr, Result,
    Sequence, SessionName, Tensor,
};

use super::{
    EngineState, Inner,
    publishers::{Life, Publisher},
    request::{Wanted, WantedTensor, outside},
    transfer::Transfer,
    uses::{InUse, Uses},
};
use crate::{
    ReadOp, ReadOptions, Standing,
    control::{ClaimObject, Claimed},
    shm,
    tcp::ReadError,
};

/// Objects start at multiples of this, in bytes from the start of the arena.
const ALIGNMENT: u64 = capture_arena::UNIT;

/// Samples of one publisher in one call.
struct Group {
    publisher: Arc<Publisher>,
    /// Life that the descriptors belong to; none with older publishers.
    epoch: Option<Epoch>,
    /// Which of the call's samples.
    samples: Vec<usize>,
    /// What is known once connected; none where only the data port is used.
    life: Option<(Arc<Life>, Standing)>,
    /// The publisher's memory, where it is read in place.
    mapping: Option<MappedBacking>,
    /// Uses begun: the samples' sequence numbers, and whether a claim was made for this call.
    uses: Vec<Use>,
}

struct Use {
    sample: usize,
    seqs: Vec<Option<Sequence>>,
    claimed: bool,
    /// Keeps releases back while the sample is read in place.
    in_use: Option<Arc<InUse>>,
}

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
                Wanted::check(request, can, engine.device_kind(), self.pool.as_ref())
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
                give_claims_back(&samples, groups, &self.uses);
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
                    let group = Group {
                        publisher,
                        epoch: arena.epoch,
                        samples: vec![i],
                        life: None,
                        mapping: None,
                        uses: Vec::new(),
                    };
                    groups.push((&arena.control, group));
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
    ) -> Result<Vec<Vec<Tensor>>> {
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
                let read = |session: &_, mut ops: Vec<_>, options: &_| {
                    engine.read_ops(session, &mut ops, options).map(|()| ops)
                };
                self.read_remote(read, samples, groups, deadline, transfer)
            }
            #[cfg(feature = "cuda")]
            EngineState::Cuda(engine) => {
                let read = |session: &_, ops, options: &ReadOptions| {
                    if !engine.knows(session, options.epoch) {
                        self.close_dead_peers(engine);
                    }
                    engine.read_ops(session, ops, options)
                };
                self.read_remote(read, samples, groups, deadline, transfer)
            }
            EngineState::Mooncake(engine) => {
                let read = |session: &_, ops, options: &_| engine.read_ops(session, ops, options);
                self.read_remote(read, samples, groups, deadline, transfer)
            }
        }
    }

    fn read_shared(
        &self,
        samples: &mut [Wanted],
        groups: &[Group],
        deadline: Instant,
        transfer: &Transfer,
    ) -> Result<Vec<Vec<Tensor>>> {
        let mut read: Vec<Vec<Tensor>> = Vec::new();
        read.resize_with(samples.len(), Vec::new);
        for group in groups {
            let (life, _) = group.life.as_ref().expect("shm connects");
            let arena = life.shared()?;
            for (used, &i) in group.uses.iter().zip(&group.samples) {
                let in_use = used.in_use.as_ref().expect("registered with the mapping");
                let sample = &mut samples[i];
                for j in 0..sample.tensors.len() {
                    let (address, meta) =
                        (sample.tensors[j].address, sample.tensors[j].meta.clone());
                    let bytes = meta.nbytes();
                    let destination = sample.tensors[j].region.take();
                    let data = if bytes == 0 {
                        destination.map_or_else(|| RegionMut::zeroed(0), Ok)?.freeze()
                    } else {
                        let view = arena
                            .view(address, bytes, in_use)
                            .map_err(|e| e.with("key", sample.key(j)))?;
                        match destination {
                            None => view,
                            Some(mut destination) => {
                                if Instant::now() >= deadline {
                                    return Err(
                                        crate::net::timed_out("fetch").with("key", sample.key(j))
                                    );
                                }
                                shm::copy(&view, &mut destination, transfer.stop_flag())
                                    .map_err(|e| e.with("key", sample.key(j)))?;
                                self.host_bytes.fetch_add(bytes, Ordering::Relaxed);
                                destination.freeze()
                            }
                        }
                    };
                    read[i].push(Tensor::new(meta, data)?);
                }
            }
        }
        Ok(read)
    }

    /// Reads with an engine that fills destinations from one peer's memory at a time.
    fn read_remote(
        &self,
        read_ops: impl Fn(&SessionName, Vec<ReadOp>, &ReadOptions) -> Result<Vec<ReadOp>, ReadError>,
        samples: &mut [Wanted],
        groups: &[Group],
        deadline: Instant,
        transfer: &Transfer,
    ) -> Result<Vec<Vec<Tensor>>> {
        let mut read: Vec<Vec<Tensor>> = Vec::new();
        read.resize_with(samples.len(), Vec::new);
        for group in groups {
            let options = ReadOptions::default()
                .epoch(group.epoch)
                .deadline(deadline)
                .stop(transfer.stop_flag().clone());
            // One publisher may have had several data sessions.
            let mut from = 0;
            while let Some(&first) = group.samples.get(from) {
                let session = samples[first].arena().session.clone();
                let same = group.samples[from..]
                    .iter()
                    .take_while(|&&i| samples[i].arena().session == session)
                    .count();
                let batch = &group.samples[from..from + same];
                from += same;
                let mut ops = Vec::with_capacity(batch.len() * 4);
                for &i in batch {
                    for tensor in &mut samples[i].tensors {
                        let region = tensor.region.take().expect("only shm gives views");
                        add_ops(&mut ops, tensor, region);
                    }
                }
                let ops = read_ops(&session, ops, &options).map_err(|failed| {
                    let key = failed.op.and_then(|op| locate(samples, batch, op));
                    match key {
                        Some((i, j)) => {
                            let (expected, address) = (
                                samples[i].tensors[j].meta.nbytes(),
                                samples[i].tensors[j].address,
                            );
                            let error = failed.error.with("key", samples[i].key(j));
                            match error.kind() {
                                ErrorKind::OutOfRange => error
                                    .with("expected", format_args!("{expected} published bytes"))
                                    .with(
                                        "found",
                                        format_args!("nothing like it at {:#x}", address.0),
                                    ),
                                _ => error,
                            }
                        }
                        None => {
                            failed.error.with("key", samples[batch[0]].descriptor.sample.clone())
                        }
                    }
                })?;
                let mut ops = ops.into_iter();
                for &i in batch {
                    for tensor in &samples[i].tensors {
                        let data = filled(ops.by_ref().take(tensor.ops()))?;
                        let moved = match data.kind().is_host() {
                            true => &self.host_bytes,
                            false => &self.device_bytes,
                        };
                        moved.fetch_add(data.len() as u64, Ordering::Relaxed);
                        read[i].push(Tensor::new(tensor.result().clone(), data)?);
                    }
                }
            }
        }
        Ok(read)
    }

    /// Makes the claims of this call permanent, if they certainly lived all the while.
    fn commit(&self, samples: &[Wanted], groups: &mut [Group], deadline: Instant) -> Result<()> {
        for group in &*groups {
            group.check_continuity(samples, deadline)?;
        }
        for group in groups {
            let Some((life, _)) = &group.life else { continue };
            let mut claims = life.claims.lock();
            let mut lost = None;
            // All of them, so that none is left as being used.
            for one in group.uses.drain(..) {
                if !claims.commit(&one.seqs) {
                    lost = lost.or(Some(one.sample));
                }
            }
            drop(claims);
            if let Some(sample) = lost {
                return Err(Error::new(
                    ErrorKind::NotFound,
                    "fetch",
                    "the sample was released while it was fetched",
                )
                .with("key", samples[sample].descriptor.sample.clone()));
            }
        }
        Ok(())
    }
}

impl Group {
    /// Makes sure that the life that is meant is there. Older publishers are only read.
    fn connect(&mut self, samples: &[Wanted], deadline: Instant) -> Result<()> {
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
    fn check_places(&self, samples: &[Wanted]) -> Result<()> {
        let Some((_, standing)) = &self.life else { return Ok(()) };
        let arena = &standing.hello.arena;
        for &i in &self.samples {
            let sample = &samples[i];
            for (j, tensor) in sample.tensors.iter().enumerate() {
                let bytes = tensor.meta.nbytes();
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
    fn claim(
        &mut self,
        samples: &[Wanted],
        client: &transport_core::ClientId,
        uses: &Arc<Uses>,
        deadline: Instant,
    ) -> Result<()> {
        let (Some((life, standing)), Some(epoch)) = (&self.life, self.epoch) else {
            return Ok(());
        };
        let fresh = standing.is_fresh();
        let mut to_claim = Vec::new(); // places in `uses`
        let mut claims = life.claims.lock();
        for &sample in &self.samples {
            let descriptor = &samples[sample].descriptor;
            let seqs: Vec<_> = descriptor.features.values().map(|f| f.seq).collect();
            let born_held = samples[sample].arena().holder.as_ref() == Some(client);
            let in_use = match &self.mapping {
                Some(mapping) => Some(uses.begin(epoch, descriptor, mapping)?),
                None => None,
            };
            let certain = claims.begin(&seqs, born_held) && fresh;
            if !certain {
                to_claim.push(self.uses.len());
            }
            self.uses.push(Use { sample, seqs, claimed: false, in_use });
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
    fn check_continuity(&self, samples: &[Wanted], deadline: Instant) -> Result<()> {
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

    /// Whether the lives of a sample's objects were compared.
    fn staleness_checked(&self, sample: &Wanted) -> bool {
        self.epoch.is_some() && sample.descriptor.features.values().all(|f| f.seq.is_some())
    }
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

/// Which tensor an operation of a batch was for.
fn locate(samples: &[Wanted], batch: &[usize], op: usize) -> Option<(usize, usize)> {
    let mut first = 0;
    batch.iter().find_map(|&i| {
        let tensor = samples[i].tensors.iter().position(|tensor| {
            let of_this = (first..first + tensor.ops()).contains(&op);
            first += tensor.ops();
            of_this
        });
        tensor.map(|tensor| (i, tensor))
    })
}

/// The operations that fill `region` with what is wanted of a tensor.
fn add_ops(ops: &mut Vec<ReadOp>, tensor: &WantedTensor, region: RegionMut) {
    let Some(part) = &tensor.part else {
        ops.push(ReadOp::new(tensor.address, region));
        return;
    };
    let mut rest = region;
    for (i, range) in part.ranges.iter().enumerate() {
        let (own, tail) = rest
            .split_at((range.end - range.start) as usize)
            .expect("the region is as long as the ranges together");
        rest = tail;
        let mut op = ReadOp::new(RemoteAddr(tensor.address.0 + range.start), own);
        op.same_object = i > 0;
        ops.push(op);
    }
}

/// What the operations of one tensor have filled, in one piece as it was before.
fn filled(ops: impl Iterator<Item = ReadOp>) -> Result<RegionSlice> {
    let mut ops = ops.map(|op| op.dst.freeze());
    let Some(first) = ops.next() else { return Ok(RegionMut::zeroed(0)?.freeze()) };
    ops.try_fold(first, RegionSlice::join).map_err(|_| {
        Error::new(ErrorKind::Unexpected, "fetch", "a destination came back in pieces")
    })
}

fn give_claims_back(samples: &[Wanted], groups: Vec<Group>, uses: &Uses) {
    for mut group in groups {
        group.uses.iter_mut().for_each(|one| one.in_use = None); // which may send a release
        let (Some((life, _)), Some(epoch)) = (&group.life, group.epoch) else { continue };
        let mut back = Vec::new();
        // Under the lock until it is sent, so that a claim made meanwhile comes after it.
        let mut claims = life.claims.lock();
        for one in &group.uses {
            let descriptor = &samples[one.sample].descriptor;
            for place in claims.abort(&one.seqs, one.claimed) {
                let (name, feature) = descriptor.features.get_index(place).expect("one a number");
                if feature.seq.is_some_and(|seq| uses.contains(epoch, seq)) {
                    // Views of an earlier fetch live on this claim, and nobody else does.
                    uses.defer_let_go(&group.publisher, epoch, descriptor);
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
            group.publisher.client().unhold_later(epoch, std::mem::replace(&mut back, rest));
        }
        drop(claims);
    }
}

fn describe(samples: Vec<Wanted>, groups: &[Group], tensors: Vec<Vec<Tensor>>) -> Vec<Fetched> {
    let mut checked = vec![false; samples.len()];
    for group in groups {
        for &i in &group.samples {
            checked[i] = group.staleness_checked(&samples[i]);
        }
    }
    let whole = samples.into_iter().zip(tensors).zip(checked);
    whole
        .map(|((sample, tensors), checked)| {
            let names = sample.tensors.into_iter().map(|tensor| tensor.name);
            let tensors: IndexMap<_, _> = names.zip(tensors).collect();
            Fetched::new(sample.descriptor, tensors, checked)
        })
        .collect()
}
