//! What is resident and who reads it: pure bookkeeping, without I/O and without a clock of its own.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    hash::{Hash, Hasher},
    sync::Arc,
    time::{Duration, Instant},
};

use foldhash::fast::RandomState;
use transport_core::{Descriptor, Error, ErrorKind, Result, SampleId, SampleKey};

/// Proof of one reader's claim on one sample. Every lease is different from every other, so that a
/// late or repeated release can never end somebody else's.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LeaseToken {
    pub(super) sample: SampleKey,
    pub(super) number: u64,
}

impl LeaseToken {
    /// The sample that is read under it.
    pub fn sample(&self) -> &SampleKey {
        &self.sample
    }
}

/// What ending a lease came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    /// The lease is over; others remain, or the sample is kept.
    Returned,
    /// It was the last lease, and the sample goes now.
    Freed,
    /// There is no such lease: it was released before, has expired, or its sample is gone.
    Unknown,
}

/// How samples are kept and for how long.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Retention {
    /// Whether a sample stays after its last lease until it is settled, as training that frees at
    /// the optimizer boundary needs. Default: true.
    pub retain: bool,
    /// Whether a sample may be read again after its last lease ended. Default: true; only with
    /// `retain`.
    pub rereadable: bool,
    /// Bytes that may be resident; [`ErrorKind::CapacityExceeded`] beyond. Default: no bound.
    pub max_resident_bytes: Option<u64>,
    /// Age from which [`gc`](super::Samples::gc) frees samples that nobody reads. Default: never.
    pub max_hold: Option<Duration>,
    /// How long a reader that vanished keeps its lease. Default: never ends.
    pub lease: Option<Duration>,
    /// Freed samples that are remembered, so that reading one is refused at once. Default: 65,536.
    pub remembered: usize,
}

impl Default for Retention {
    fn default() -> Self {
        Self {
            retain: true,
            rereadable: true,
            max_resident_bytes: None,
            max_hold: None,
            lease: None,
            remembered: 65_536,
        }
    }
}

/// A sample that was adopted and is not freed.
#[derive(Debug)]
struct Resident {
    descriptor: Arc<Descriptor>,
    bytes: u64,
    since: Instant,
    leases: Vec<(u64, Option<Instant>)>, // numbers and ends; mostly none or one
    read: bool,
}

/// Places that may hold a sample whose request was never answered.
pub(super) type Places = HashSet<String>;

/// The books of a store.
#[derive(Debug)]
pub(super) struct Residents {
    pub(super) retention: Retention,
    resident: HashMap<SampleId, Resident, RandomState>,
    provisional: HashMap<SampleKey, Places>,
    /// Freed logically, not known to be physically.
    pub(super) pending: HashMap<SampleKey, Arc<Descriptor>, RandomState>,
    gone: Remembered,
    pub(super) bytes: u64,
    next_lease: u64,
}

/// The newest freed samples, bounded.
#[derive(Debug, Default)]
struct Remembered {
    lives: HashSet<Life, RandomState>,
    order: VecDeque<Life>,
}

/// One life of a sample, as far as its publisher tells lives apart.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Life {
    key: SampleKey,
    life: Option<u64>,
}

impl Hash for Life {
    /// The key's text is only looked at where there is no number: whole steps are remembered at once.
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self.life {
            Some(life) => life.hash(state),
            None => self.key.hash(state),
        }
    }
}

/// Which life of a key a descriptor means: its first sequence number, if the publisher tells.
fn life(descriptor: &Descriptor) -> Option<u64> {
    let first = descriptor.features.values().next().and_then(|feature| feature.seq);
    let epoch = descriptor.epoch().map_or(0, |epoch| epoch.0);
    first.map(|seq| seq.0 ^ epoch.rotate_left(20))
}

fn refuse(kind: ErrorKind, operation: &'static str, why: &'static str, key: &SampleKey) -> Error {
    Error::new(kind, operation, why).with("key", key)
}

impl Residents {
    pub(super) fn new(retention: Retention) -> Self {
        Self {
            retention,
            resident: HashMap::default(),
            provisional: HashMap::new(),
            pending: HashMap::default(),
            gone: Remembered::default(),
            bytes: 0,
            next_lease: 1,
        }
    }

    /// Notes that `place` may come to hold a sample, before it is asked to.
    pub(super) fn track(&mut self, key: SampleKey, place: String) {
        self.provisional.entry(key).or_default().insert(place);
    }

    pub(super) fn untrack(&mut self, place: &str, key: &SampleKey) {
        if let Some(places) = self.provisional.get_mut(key) {
            places.remove(place);
            if places.is_empty() {
                self.provisional.remove(key);
            }
        }
    }

    pub(super) fn places(&self, key: &SampleKey) -> Vec<String> {
        self.provisional.get(key).into_iter().flatten().cloned().collect()
    }

    /// Forgets a sample without freeing it.
    pub(super) fn hand_over(&mut self, id: &SampleId) {
        if let Some(resident) = self.resident.remove(id) {
            self.bytes -= resident.bytes;
        }
    }

    /// Takes a captured sample over from its server. The same descriptor again changes nothing.
    ///
    /// Returns the earlier life of the sample if this one replaces it, which the caller frees.
    pub(super) fn adopt(
        &mut self,
        descriptor: Arc<Descriptor>,
        now: Instant,
    ) -> Result<Option<Arc<Descriptor>>> {
        let key = &descriptor.sample;
        if self.gone.contains(&descriptor) {
            return Err(refuse(ErrorKind::Stale, "adopt", "the sample was freed", key)
                .remedy("capture it again: another attempt is another life"));
        }
        let bytes = descriptor.nbytes();
        let before = self.resident.get(&key.sample_id);
        if let Some(before) = before {
            if before.descriptor == descriptor {
                return Ok(None);
            }
            if before.descriptor.sample.generation > key.generation {
                return Err(refuse(ErrorKind::Stale, "adopt", "a newer generation is here", key)
                    .with("found", before.descriptor.sample.generation));
            }
        }
        let replaced = before.map_or(0, |before| before.bytes);
        let after = self.bytes - replaced + bytes;
        if let Some(limit) = self.retention.max_resident_bytes.filter(|&limit| after > limit) {
            return Err(refuse(ErrorKind::CapacityExceeded, "adopt", "hard cap exceeded", key)
                .with("resident_bytes", self.bytes)
                .with("sample_bytes", bytes)
                .with("max_resident_bytes", limit)
                .remedy("lower the producer's high watermark, or raise the cap"));
        }
        self.bytes = after;
        let resident = Resident {
            descriptor: descriptor.clone(),
            bytes,
            since: now,
            leases: Vec::new(),
            read: false,
        };
        let old = self.resident.insert(key.sample_id.clone(), resident);
        Ok(old.map(|old| old.descriptor))
    }

    /// Begins to read a sample.
    pub(super) fn lease(&mut self, descriptor: &Descriptor, now: Instant) -> Result<LeaseToken> {
        let key = &descriptor.sample;
        if self.gone.contains(descriptor) || self.pending.contains_key(key) {
            return Err(refuse(ErrorKind::NotFound, "get", "the sample was freed", key));
        }
        let Some(resident) = self.resident.get_mut(&key.sample_id) else {
            return Err(refuse(ErrorKind::NotFound, "get", "the sample was never adopted", key)
                .remedy("adopt it first"));
        };
        let found = &resident.descriptor;
        if found.sample.generation != key.generation || life(found) != life(descriptor) {
            return Err(refuse(ErrorKind::Stale, "get", "another life of the sample is here", key)
                .with("expected", format_args!("g{}", key.generation))
                .with("found", format_args!("g{}", found.sample.generation)));
        }
        if resident.read && resident.leases.is_empty() && !self.retention.rereadable {
            return Err(refuse(ErrorKind::NotFound, "get", "the sample was consumed", key)
                .remedy("choose a rereadable store to read samples more than once"));
        }
        let number = self.next_lease;
        self.next_lease += 1;
        let end = self.retention.lease.and_then(|lease| now.checked_add(lease));
        resident.leases.push((number, end));
        resident.read = true;
        Ok(LeaseToken { sample: found.sample.clone(), number })
    }

    /// Ends a lease; gives the sample if it goes now.
    pub(super) fn release(&mut self, token: &LeaseToken) -> (Released, Option<Arc<Descriptor>>) {
        let Some(resident) = self.resident.get_mut(&token.sample.sample_id) else {
            return (Released::Unknown, None);
        };
        let held = resident.leases.iter().position(|&(number, _)| number == token.number);
        let Some(held) = held else { return (Released::Unknown, None) };
        resident.leases.swap_remove(held);
        if !resident.leases.is_empty() {
            return (Released::Returned, None);
        }
        resident.leases = Vec::new(); // gives its memory back here, and not when a step is settled
        if self.retention.retain {
            return (Released::Returned, None);
        }
        (Released::Freed, self.forget(&token.sample.sample_id))
    }

    /// Frees a sample for everybody here, at once: it can be neither read nor adopted any more.
    pub(super) fn forget(&mut self, id: &SampleId) -> Option<Arc<Descriptor>> {
        let resident = self.resident.remove(id)?;
        self.bytes -= resident.bytes;
        self.free(&resident.descriptor);
        Some(resident.descriptor)
    }

    /// Frees samples, each at once as [`forget`](Self::forget) does, be they resident or not.
    pub(super) fn settle(&mut self, samples: &[Arc<Descriptor>]) {
        self.pending.reserve(samples.len());
        self.gone.lives.reserve(samples.len().min(self.retention.remembered));
        for descriptor in samples {
            let id = &descriptor.sample.sample_id;
            // Another store's sample, or another generation, may have the same id.
            let same = |resident: &Resident| {
                Arc::ptr_eq(&resident.descriptor, descriptor)
                    || resident.descriptor.sample == descriptor.sample
            };
            if !self.resident.get(id).is_some_and(same) || self.forget(id).is_none() {
                self.free(descriptor);
            }
        }
    }

    /// Remembers a descriptor as freed and its physical free as pending.
    pub(super) fn free(&mut self, descriptor: &Arc<Descriptor>) {
        self.gone.insert(descriptor, self.retention.remembered);
        self.pending.insert(descriptor.sample.clone(), descriptor.clone());
    }

    /// Frees are confirmed. What has become pending under the same key meanwhile stays so.
    pub(super) fn confirm(&mut self, freed: &[Arc<Descriptor>]) {
        for descriptor in freed {
            if let Some((key, pending)) = self.pending.remove_entry(&descriptor.sample)
                && !Arc::ptr_eq(&pending, descriptor)
            {
                self.pending.insert(key, pending);
            }
        }
    }

    /// Ends leases that are over, and frees what nobody has read for longer than it may be held.
    pub(super) fn sweep(&mut self, now: Instant) -> (usize, Vec<Arc<Descriptor>>) {
        let mut expired = 0;
        let mut idle = Vec::new();
        for (id, resident) in &mut self.resident {
            let before = resident.leases.len();
            resident.leases.retain(|(_, end)| end.is_none_or(|end| end > now));
            expired += before - resident.leases.len();
            let old = self
                .retention
                .max_hold
                .is_some_and(|most| now.saturating_duration_since(resident.since) >= most);
            let consumed = !self.retention.retain && before > 0;
            if resident.leases.is_empty() && (old || consumed) {
                idle.push(id.clone());
            }
        }
        (expired, idle.iter().filter_map(|id| self.forget(id)).collect())
    }

    /// Takes everything that was asked for and never answered, with the places that may hold it.
    pub(super) fn take_provisional(&mut self) -> Vec<(SampleKey, Places)> {
        self.provisional.drain().collect()
    }

    pub(super) fn put_back_provisional(&mut self, key: SampleKey, places: Places) {
        self.provisional.entry(key).or_default().extend(places);
    }

    pub(super) fn provisional(&self) -> usize {
        self.provisional.len()
    }

    pub(super) fn contains(&self, id: &SampleId) -> bool {
        self.resident.contains_key(id)
    }

    pub(super) fn len(&self) -> usize {
        self.resident.len()
    }

    pub(super) fn leases(&self) -> usize {
        self.resident.values().map(|resident| resident.leases.len()).sum()
    }

    pub(super) fn oldest(&self, now: Instant) -> Option<Duration> {
        self.resident.values().map(|r| now.saturating_duration_since(r.since)).max()
    }

    pub(super) fn remembered(&self) -> usize {
        self.gone.order.len()
    }
}

impl Remembered {
    fn entry(descriptor: &Descriptor) -> Life {
        Life { key: descriptor.sample.clone(), life: life(descriptor) }
    }

    fn contains(&self, descriptor: &Descriptor) -> bool {
        // Without sequence numbers two lives cannot be told apart; a retry must not be refused.
        life(descriptor).is_some() && self.lives.contains(&Self::entry(descriptor))
    }

    fn insert(&mut self, descriptor: &Descriptor, most: usize) {
        let entry = Self::entry(descriptor);
        if self.lives.insert(entry.clone()) {
            self.order.push_back(entry);
        }
        while self.order.len() > most {
            if let Some(oldest) = self.order.pop_front() {
                self.lives.remove(&oldest);
            }
        }
    }
}
