//! What is published: keys, lives, holds and counters, behind one lock.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use indexmap::IndexMap;
use parking_lot::Mutex;
use tokio::sync::OwnedSemaphorePermit;

use crate::{
    ClientId, Descriptor, Epoch, Error, ErrorKind, FeatureDescriptor, FeatureName, Location,
    ObjectKey, RegionSlice, ReleaseReport, Result, Sequence, TensorMeta,
};

/// One life of one sample: its bytes, and the room that they take. Whatever reads the bytes holds
/// an `Arc` of it, so the room comes back with the last reader.
pub(super) struct Life {
    objects: IndexMap<FeatureName, Object>,
    nbytes: u64,
    tally: Arc<Tally>,
    _room: OwnedSemaphorePermit, // after `objects`: memory goes before the room is given out
}

pub(super) struct Object {
    pub(super) key: ObjectKey,
    pub(super) meta: TensorMeta,
    pub(super) data: RegionSlice,
    pub(super) seq: Sequence,
}

/// Counters that lives keep up to date by themselves.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) published_samples: AtomicU64,
    pub(super) released_samples: AtomicU64,
    pub(super) resident_bytes: AtomicU64,
    pub(super) reserved_bytes: AtomicU64,
    pub(super) deferred_samples: AtomicU64,
}

impl Life {
    /// Whether this is the life of `key` that `seq` numbers, not that of a tensor beside it.
    fn is_meant(&self, name: &FeatureName, key: &ObjectKey, seq: Sequence) -> bool {
        self.objects.get(name).is_some_and(|o| o.seq == seq && o.key == *key)
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.tally.released_samples.fetch_add(1, Ordering::SeqCst);
        self.tally.resident_bytes.fetch_sub(self.nbytes, Ordering::SeqCst);
    }
}

/// A sample on its way in: filled, with room, without sequence numbers yet.
pub(super) struct Filled {
    pub(super) objects: IndexMap<FeatureName, (ObjectKey, TensorMeta, RegionSlice)>,
    pub(super) room: OwnedSemaphorePermit,
    pub(super) holder: Option<ClientId>,
}

pub(super) struct Store {
    epoch: Epoch,
    tally: Arc<Tally>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    lives: HashMap<LifeId, Entry>,
    /// The readable life of each key.
    current: HashMap<ObjectKey, LifeId>,
    /// The life of each object that still has one, readable or draining.
    by_sequence: HashMap<Sequence, LifeId>,
    /// Keys that a publish under way will bring.
    filling: HashSet<ObjectKey>,
    last_sequence: u64,
    closed: bool,
    duplicate_frees: u64,
    stale_frees: u64,
}

type LifeId = u64; // the first sequence number of the sample

struct Entry {
    life: Arc<Life>,
    /// Readable no more, kept for its holders.
    draining: bool,
    holds: HashMap<ClientId, Hold>,
    /// Clients that held it and let go, so that their second release is known for one.
    let_go: HashSet<ClientId>,
}

/// What one hold of a client has given out: whoever reads the bytes has an `Arc` of it.
struct Reads {
    _life: Arc<Life>,
    tally: Arc<Tally>,
    /// The hold was released while they went on.
    deferred: AtomicBool,
}

impl Drop for Reads {
    fn drop(&mut self) {
        if *self.deferred.get_mut() {
            self.tally.deferred_samples.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[derive(Default)]
struct Hold {
    /// The views and copies of this hold, while there are any.
    reads: Weak<Reads>,
    confirmed: bool,
    /// Fetches under way; they hold the sample until they succeed or fail.
    pending: u32,
}

/// Keys of a publish under way; given up on drop.
pub(super) struct Claim {
    store: Arc<Store>,
    keys: Vec<ObjectKey>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut state = self.store.state.lock();
        for key in &self.keys {
            state.filling.remove(key);
        }
    }
}

/// The holds of a fetch under way; taken back on drop unless confirmed.
pub(super) struct PendingHolds {
    store: Arc<Store>,
    client: ClientId,
    lives: BTreeSet<LifeId>,
}

impl PendingHolds {
    pub(super) fn confirm(mut self) {
        self.end(true);
    }

    fn end(&mut self, success: bool) {
        let ended = std::mem::take(&mut self.lives);
        let mut state = self.store.state.lock();
        let mut gone = Vec::new(); // dropped after the lock
        for id in ended {
            let Some(entry) = state.lives.get_mut(&id) else { continue };
            let Some(hold) = entry.holds.get_mut(&self.client) else { continue };
            hold.pending = hold.pending.saturating_sub(1);
            hold.confirmed |= success;
            if !hold.confirmed && hold.pending == 0 {
                entry.holds.remove(&self.client);
            }
            gone.extend(state.remove_if_unheld(id));
        }
        drop(state);
    }
}

impl Drop for PendingHolds {
    fn drop(&mut self) {
        self.end(false);
    }
}

impl Store {
    pub(super) fn new(epoch: Epoch) -> Arc<Self> {
        Arc::new(Self { epoch, tally: Arc::default(), state: Mutex::default() })
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.epoch
    }

    pub(super) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Objects that were freed twice, and objects of an older life that were freed late.
    pub(super) fn frees(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.duplicate_frees, state.stale_frees)
    }

    /// Reserves the keys of a batch.
    pub(super) fn claim_keys(
        self: &Arc<Self>,
        keys: Vec<ObjectKey>,
        replace: bool,
    ) -> Result<Claim> {
        let mut state = self.state.lock();
        let mut claim = Claim { store: self.clone(), keys: Vec::with_capacity(keys.len()) };
        let result = keys.into_iter().try_for_each(|key| {
            let refuse = |kind, why| Err(Error::new(kind, "publish", why).with("key", &key));
            if !replace && state.current.contains_key(&key) {
                return refuse(ErrorKind::AlreadyExists, "the key exists")
                    .map_err(|e| e.remedy("release the sample first, or publish with `replace`"));
            }
            if state.filling.contains(&key) {
                return if claim.keys.contains(&key) {
                    refuse(ErrorKind::AlreadyExists, "the key appears twice in the batch")
                } else if replace {
                    refuse(ErrorKind::Busy, "the key is being published by another call")
                } else {
                    refuse(ErrorKind::AlreadyExists, "the key is being published by another call")
                };
            }
            state.filling.insert(key.clone());
            claim.keys.push(key);
            Ok(())
        });
        drop(state); // an early end gives up the claim, which takes the lock
        result.map(|()| claim)
    }

    /// Makes filled samples readable, all under one lock, and returns where their objects are.
    /// Readable samples with the same keys drain.
    pub(super) fn publish(
        &self,
        samples: Vec<Filled>,
    ) -> Result<Vec<IndexMap<FeatureName, FeatureDescriptor>>> {
        let mut state = self.state.lock();
        if state.closed {
            drop(state);
            return Err(Error::new(ErrorKind::Closed, "publish", "the transport was closed"));
        }
        let mut replaced = Vec::new(); // dropped after the lock
        let mut described = Vec::with_capacity(samples.len());
        for sample in samples {
            let nbytes = sample.objects.values().map(|(_, meta, _)| meta.nbytes()).sum();
            let id = state.last_sequence + 1;
            let mut objects = IndexMap::with_capacity(sample.objects.len());
            let mut features = IndexMap::with_capacity(sample.objects.len());
            for (name, (key, meta, data)) in sample.objects {
                if let Some(&old) = state.current.get(&key) {
                    replaced.extend(state.drain(old));
                }
                state.last_sequence += 1;
                let seq = Sequence(state.last_sequence);
                state.current.insert(key.clone(), id);
                state.by_sequence.insert(seq, id);
                let address = crate::RemoteAddr(data.address() as u64);
                let feature = FeatureDescriptor::new(meta.clone(), Some(address), Some(seq));
                features.insert(name.clone(), feature);
                objects.insert(name, Object { key, meta, data, seq });
            }
            self.tally.published_samples.fetch_add(1, Ordering::SeqCst);
            self.tally.resident_bytes.fetch_add(nbytes, Ordering::SeqCst);
            let life = Life { objects, nbytes, tally: self.tally.clone(), _room: sample.room };
            let held = Hold { confirmed: true, ..Hold::default() };
            let entry = Entry {
                life: Arc::new(life),
                draining: false,
                holds: sample.holder.map(|client| (client, held)).into_iter().collect(),
                let_go: HashSet::new(),
            };
            state.lives.insert(id, entry);
            described.push(features);
        }
        drop(state);
        Ok(described)
    }

    /// Finds what a fetch asks for and holds it for `client`, all requests or none.
    ///
    /// The slices keep the memory and its room for as long as they live.
    pub(super) fn hold(
        self: &Arc<Self>,
        client: &ClientId,
        requests: &[(&Descriptor, Vec<&FeatureName>)],
    ) -> Result<(Vec<Vec<RegionSlice>>, PendingHolds)> {
        let mut state = self.state.lock();
        let mut lives = BTreeMap::new();
        let mut found = Vec::with_capacity(requests.len());
        for (descriptor, names) in requests {
            let mut sources = Vec::with_capacity(names.len());
            for name in names {
                let id = state.locate(self.epoch, client, descriptor, name)?;
                let entry = &state.lives[&id];
                let object =
                    entry.life.objects.get(*name).expect("located by the key of this name");
                check_promise(object, &descriptor.features[*name])?;
                let reads = lives.entry(id).or_insert_with(|| entry.reads(client));
                sources.push(object.data.clone().keeping(reads.clone()));
            }
            found.push(sources);
        }
        for (id, reads) in &lives {
            let entry = state.lives.get_mut(id).expect("just located");
            let hold = entry.holds.entry(client.clone()).or_default();
            (hold.reads, hold.pending) = (Arc::downgrade(reads), hold.pending + 1);
        }
        let lives = lives.into_keys().collect();
        Ok((found, PendingHolds { store: self.clone(), client: client.clone(), lives }))
    }

    /// Lets go of one sample on behalf of `client`.
    pub(super) fn release(&self, client: &ClientId, descriptor: &Descriptor) -> ReleaseReport {
        let mut state = self.state.lock();
        let mut report = ReleaseReport::default();
        let gone = state.release(self.epoch, client, descriptor, &mut report);
        let objects = descriptor.features.len() as u64;
        state.duplicate_frees += report.already_gone * objects;
        state.stale_frees += report.stale * objects;
        drop(state);
        drop(gone);
        report
    }

    /// Takes back the client's holds on samples; what drains goes with the last.
    pub(super) fn let_go(&self, client: &ClientId, samples: &[Arc<Descriptor>]) {
        let mut state = self.state.lock();
        let mut gone = Vec::new(); // dropped after the lock
        for descriptor in samples {
            let Some((name, feature)) = descriptor.features.first() else { continue };
            let current = state.current.get(&descriptor.sample.object(name)).copied();
            let meant = match feature.seq {
                _ if descriptor.epoch().is_some_and(|e| e != self.epoch) => None,
                Some(seq) => state.by_sequence.get(&seq).copied(),
                None => current,
            };
            let Some(id) = meant else { continue };
            let entry = state.lives.get_mut(&id).expect("indexed lives exist");
            let Some(hold) = entry.holds.get_mut(client) else { continue };
            hold.confirmed = false;
            if hold.pending == 0 {
                entry.holds.remove(client);
            }
            gone.extend(state.remove_if_unheld(id));
        }
        drop(state);
        drop(gone);
    }

    /// Takes back every hold of a client that left; what nobody else held and nobody may read any
    /// more goes.
    pub(super) fn forget(&self, client: &ClientId) {
        let mut state = self.state.lock();
        let held: Vec<_> = state
            .lives
            .iter_mut()
            .filter_map(|(id, entry)| entry.holds.remove(client).map(|_| *id))
            .collect();
        let gone: Vec<_> = held.into_iter().filter_map(|id| state.remove_if_unheld(id)).collect();
        drop(state);
        drop(gone);
    }

    /// Lets go of everything, for good.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let lives = std::mem::take(&mut state.lives);
        state.current.clear();
        state.by_sequence.clear();
        drop(state);
        drop(lives);
    }
}

impl Entry {
    /// What the client's hold has given out, or will.
    fn reads(&self, client: &ClientId) -> Arc<Reads> {
        let known = self.holds.get(client).and_then(|hold| hold.reads.upgrade());
        known.unwrap_or_else(|| {
            let (life, tally) = (self.life.clone(), self.life.tally.clone());
            Arc::new(Reads { _life: life, tally, deferred: AtomicBool::new(false) })
        })
    }
}

impl State {
    /// The life that a descriptor means, if `client` may read it.
    fn locate(
        &self,
        epoch: Epoch,
        client: &ClientId,
        descriptor: &Descriptor,
        name: &FeatureName,
    ) -> Result<LifeId> {
        let key = descriptor.sample.object(name);
        let fail = |kind, why: &'static str| Error::new(kind, "fetch", why).with("key", &key);
        let Location::Arena(arena) = &descriptor.location else {
            return Err(fail(ErrorKind::InvalidInput, "not a sample of a memory transport"));
        };
        if let Some(meant) = arena.epoch
            && meant != epoch
        {
            return Err(fail(ErrorKind::Stale, "published by another life of the publisher")
                .with("expected", format_args!("epoch {meant}"))
                .with("found", format_args!("epoch {epoch}")));
        }
        let current = self.current.get(&key).copied();
        let Some(meant) = descriptor.features[name].seq else {
            return current.ok_or_else(|| {
                fail(ErrorKind::NotFound, "the key is not published")
                    .with("expected", "a published object")
                    .with("found", "nothing")
            });
        };
        let life = self.by_sequence.get(&meant).copied().filter(|id| {
            let entry = &self.lives[id];
            entry.life.is_meant(name, &key, meant)
                && (!entry.draining || entry.holds.contains_key(client))
        });
        if let Some(id) = life {
            return Ok(id);
        }
        let expected = format!("sequence {meant}");
        Err(match current {
            Some(id) => fail(ErrorKind::Stale, "the key lives on in another life")
                .with("expected", expected)
                .with("found", format_args!("sequence {}", self.lives[&id].life.objects[name].seq)),
            None => fail(ErrorKind::NotFound, "the object was released")
                .with("expected", expected)
                .with("found", "nothing"),
        })
    }

    fn release(
        &mut self,
        epoch: Epoch,
        client: &ClientId,
        descriptor: &Descriptor,
        report: &mut ReleaseReport,
    ) -> Option<Entry> {
        let Some((name, feature)) = descriptor.features.first() else {
            report.already_gone += 1;
            return None;
        };
        let key = descriptor.sample.object(name);
        let current = self.current.get(&key).copied();
        let meant = match feature.seq {
            _ if descriptor.epoch().is_some_and(|e| e != epoch) => None,
            Some(seq) => self
                .by_sequence
                .get(&seq)
                .copied()
                .filter(|id| self.lives[id].life.is_meant(name, &key, seq)),
            None => current,
        };
        let newer_exists = current.is_some() && current != meant;
        let not_ours = |report: &mut ReleaseReport| {
            if newer_exists { report.stale += 1 } else { report.already_gone += 1 }
        };
        let Some(id) = meant else {
            not_ours(report);
            return None;
        };
        let entry = self.lives.get_mut(&id).expect("indexed lives exist");
        let hold = entry.holds.remove(client);
        let held = hold.is_some();
        if !held && (entry.draining || entry.let_go.contains(client)) {
            not_ours(report);
            return None;
        }
        match hold.and_then(|hold| hold.reads.upgrade()) {
            Some(reads) => {
                reads.deferred.store(true, Ordering::SeqCst);
                reads.tally.deferred_samples.fetch_add(1, Ordering::SeqCst);
                report.deferred += 1;
            }
            None => report.released += 1,
        }
        entry.let_go.insert(client.clone());
        if held && !entry.holds.is_empty() {
            return None; // others still hold it: it stays as it is
        }
        self.drain(id)
    }

    /// Makes a life unreadable for all but its holders; returns it if there are none.
    fn drain(&mut self, id: LifeId) -> Option<Entry> {
        let entry = self.lives.get_mut(&id).expect("callers look the life up first");
        if !entry.draining {
            entry.draining = true;
            for object in entry.life.objects.values() {
                if self.current.get(&object.key) == Some(&id) {
                    self.current.remove(&object.key);
                }
            }
        }
        self.remove_if_unheld(id)
    }

    fn remove_if_unheld(&mut self, id: LifeId) -> Option<Entry> {
        let entry = self.lives.get(&id)?;
        if !entry.draining || !entry.holds.is_empty() {
            return None;
        }
        for object in entry.life.objects.values() {
            self.by_sequence.remove(&object.seq);
        }
        self.lives.remove(&id)
    }
}

/// Compares what a descriptor promises with what is there.
fn check_promise(object: &Object, promised: &FeatureDescriptor) -> Result<()> {
    let broken = |kind, why: &'static str| Error::new(kind, "fetch", why).with("key", &object.key);
    let address = object.data.address() as u64;
    if let Some(promised) = promised.address
        && promised.0 != address
    {
        return Err(broken(ErrorKind::OutOfRange, "the object does not start at this address")
            .with("expected", format_args!("{promised:#x}", promised = promised.0))
            .with("found", format_args!("{address:#x}")));
    }
    if promised.meta != object.meta {
        let kind = if promised.meta.nbytes() > object.meta.nbytes() {
            ErrorKind::ShortRead
        } else {
            ErrorKind::Corrupt
        };
        return Err(broken(kind, "the object has another element type, shape or length")
            .with("expected", format_args!("{} ({} bytes)", promised.meta, promised.meta.nbytes()))
            .with("found", format_args!("{} ({} bytes)", object.meta, object.meta.nbytes())));
    }
    Ok(())
}
