//! The bookkeeping of an arena: which key lies where, who holds it, and when its range comes back.
//!
//! Pure: one thread at a time, no I/O, no clock. Times are passed in, and what has to happen elsewhere is
//! returned. Whoever is at the books of a [`crate::Arena`] drives it; so do the property tests.
//!
//! States of an object: *filling* (range taken, a writer may be at it) → *published* (readable) →
//! *draining* (freed or replaced, but still held or being read) → its range is free.

mod age;
mod batch;
mod clients;
mod health;
mod objects;

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use foldhash::fast::RandomState;
use slab::Slab;
use transport_core::{
    ArenaOffset, ClientId, Error, ErrorKind, MapMark, RemoteAddr, Result, Sequence,
};

use crate::{
    ExportError,
    export::{ExportIndex, Pin},
    fit::FitSubAllocator,
    suballoc::{ArenaRange, SubAllocator},
};
use age::{ByAge, Neighbours};
use batch::{Batch, Waiting};
pub use batch::{BatchPlan, Grant, PlannedObject, PlannedSample, Ticket};
use clients::Clients;
use health::Counts;
pub use health::{ArenaHealth, BATCHES_BEFORE};
use objects::Holders;
pub use objects::{FreeOutcome, HoldOutcome, ObjectList};

/// Names, ranges and lifetimes of the objects in one block of memory.
#[derive(Debug)]
pub struct CaptureArena {
    space: FitSubAllocator,
    changes: u64, // tells whether another attempt to place a batch can succeed
    keys: HashMap<Arc<str>, u32, RandomState>, // index in `lives`
    lives: Slab<Lives>,
    draining: HashMap<Arc<str>, Vec<u32>, RandomState>, // lives that are only there for their holders
    objects: Slab<Object>,
    samples: Slab<Sample>,
    oldest: ByAge,
    batches: Slab<Batch>,
    waiting: VecDeque<Waiting>,
    remembered: HashMap<u32, Vec<Option<ClientId>>>, // frees of filling objects, by whom
    clients: Clients,
    index: Arc<ExportIndex>,
    last_seq: u64,
    counts: Counts,
    closed: bool,
}

/// What lives under a key.
#[derive(Clone, Copy, Debug, Default)]
struct Lives {
    current: Option<Id>,
    filling: Option<Id>, // the newest; older ones were superseded
}

/// Index of an object, off by one so that `Option<Id>` takes four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Id(std::num::NonZeroU32);

#[derive(Debug)]
struct Object {
    key: Arc<str>,
    range: Option<ArenaRange>, // none without bytes
    seq: Sequence,             // 0 while filling
    holders: Holders,
    sample: u32,
    lives: u32, // index of its key's lives, valid while it is one of them
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Filling,
    Published,
    /// Nobody new gets it; readable for its holders.
    Held,
    /// Nobody gets it; the range comes back with the last running read.
    Read,
}

#[derive(Debug)]
struct Sample {
    since: Instant, // reserved, then published
    live: u32,      // objects that still take part in the accounts
    published: bool,
    neighbours: Neighbours, // among the published, by age
}

impl CaptureArena {
    /// Keeps the books of `capacity` bytes, rounded down to whole units of 512.
    ///
    /// `default_lease` is for holders that have not announced themselves. Fails for no units and
    /// for more than 2 TiB.
    pub fn new(capacity: u64, default_lease: Duration) -> Result<Self> {
        Self::with_index(capacity, default_lease, Arc::new(ExportIndex::new(|_| {})))
    }

    /// As [`Self::new`], telling `reclaim` about retired objects whose last read has ended; it has
    /// to pass them to [`Self::reclaim`].
    pub fn with_reclaim(
        capacity: u64,
        default_lease: Duration,
        reclaim: impl Fn(u32) + Send + Sync + 'static,
    ) -> Result<Self> {
        Self::with_index(capacity, default_lease, Arc::new(ExportIndex::new(reclaim)))
    }

    fn with_index(capacity: u64, default_lease: Duration, index: Arc<ExportIndex>) -> Result<Self> {
        let invalid = |why| Error::new(ErrorKind::ConfigInvalid, "create arena", why);
        let space = FitSubAllocator::new(capacity)
            .ok_or_else(|| invalid("an arena has at most 2 TiB").with("requested", capacity))?;
        if space.report().capacity == 0 {
            return Err(invalid("an arena has at least 512 bytes").with("requested", capacity));
        }
        Ok(Self {
            space,
            changes: 0,
            keys: HashMap::default(),
            lives: Slab::new(),
            draining: HashMap::default(),
            objects: Slab::new(),
            samples: Slab::new(),
            oldest: ByAge::default(),
            batches: Slab::new(),
            waiting: VecDeque::new(),
            remembered: HashMap::new(),
            clients: Clients::new(default_lease),
            index,
            last_seq: 0,
            counts: Counts::default(),
            closed: false,
        })
    }

    pub(crate) fn index(&self) -> &Arc<ExportIndex> {
        &self.index
    }

    /// Keeps `len` bytes at `offset` from being reused until the returned guard is dropped.
    pub fn pin(&self, offset: ArenaOffset, len: u64) -> Result<Pin, ExportError> {
        let refuse = |reason| ExportError { address: RemoteAddr(offset.0), len, reason };
        self.index.pin(offset.0, len).map_err(refuse)
    }

    /// The life that is published under `key`.
    pub fn current(&self, key: &str) -> Option<Sequence> {
        let id = self.lives(key)?.current?;
        Some(self.objects[id.index() as usize].seq)
    }

    /// When [`Self::poll`] has something to do even if nothing else happens.
    pub fn next_deadline(&self) -> Option<Instant> {
        let waiting = self.waiting.iter().map(|w| w.deadline);
        waiting.chain(self.clients.next_expiry()).min()
    }

    /// Ends overdue leases, places waiting batches in order, and gives up on overdue ones.
    pub fn poll(&mut self, now: Instant) -> Vec<(Ticket, Result<Grant>)> {
        while let Some(client) = self.clients.pop_expired(now) {
            self.let_go(client);
        }
        if self.waiting.is_empty() { Vec::new() } else { self.poll_waiting(now) }
    }

    /// Refuses new batches and returns the waiting ones, which now fail.
    pub fn close(&mut self) -> Vec<Ticket> {
        self.closed = true;
        self.waiting.drain(..).map(|w| w.ticket).collect()
    }

    /// Asks `probe` whether a mapping of the arena still exists before its client is given up; one
    /// that does keeps the client's holds. Without a probe no client maps anything.
    pub fn set_probe(&mut self, probe: impl Fn(MapMark) -> bool + Send + 'static) {
        self.clients.set_probe(Box::new(probe));
    }

    /// A client introduces itself: its lease is `lease`, and `mark` tells whether it still maps the
    /// arena, if it ever does. As [`Self::client_seen`] otherwise.
    ///
    /// Fails with [`ErrorKind::Busy`] while a client of the same name and another mark, or none,
    /// is connected or maps the arena.
    pub fn client_greets(
        &mut self,
        client: &ClientId,
        lease: Duration,
        mark: Option<MapMark>,
        now: Instant,
    ) -> Result<()> {
        self.clients.greet(client, lease, mark, now)
    }

    /// A client has sent anything: it is connected, and its holds live on. `mark` is the one that it
    /// was greeted with, if any.
    pub fn client_seen(
        &mut self,
        client: &ClientId,
        lease: Duration,
        mark: Option<MapMark>,
        now: Instant,
    ) {
        self.clients.seen(client, lease, mark, now);
    }

    /// A client's last connection is gone: its holds live for one more lease.
    pub fn client_lost(&mut self, client: &ClientId, now: Instant) {
        self.clients.lost(client, now);
    }

    /// A client says goodbye: its holds end now, or as soon as it maps the arena no more.
    pub fn client_bye(&mut self, client: &ClientId, now: Instant) {
        if let Some(gone) = self.clients.leave(client, now) {
            self.let_go(gone);
        }
    }

    /// The last running read of a retired object has ended.
    pub fn reclaim(&mut self, object: u32) {
        if self.objects.get(object as usize).is_some_and(|o| o.state == State::Read) {
            self.release(object);
        }
    }

    /// Frees one life: nobody new gets it, and its range comes back when nobody uses it any more.
    fn retire(&mut self, id: u32) {
        let object = &mut self.objects[id as usize];
        debug_assert_eq!(object.state, State::Published);
        object.state = State::Held;
        self.counts.draining_objects += 1;
        let key = object.key.clone();
        let held = object.holders.any_active();
        let lives = object.lives;
        self.end_life(lives, &key, |lives| &mut lives.current, id);
        if held {
            self.draining.entry(key).or_default().push(id);
        } else {
            self.withdraw(id);
        }
    }

    fn lives(&self, key: &str) -> Option<&Lives> {
        Some(&self.lives[*self.keys.get(key)? as usize])
    }

    /// Takes `id` out of its key's lives, if it is still there; the entry goes with the last one.
    fn end_life(
        &mut self,
        index: u32,
        key: &str,
        place: impl Fn(&mut Lives) -> &mut Option<Id>,
        id: u32,
    ) {
        // Once others have taken its place, the entry may be another key's.
        let Some(lives) = self.lives.get_mut(index as usize) else { return };
        if *place(lives) != Some(Id::new(id)) {
            return;
        }
        *place(lives) = None;
        if lives.filling.is_none() && lives.current.is_none() {
            self.lives.remove(index as usize);
            self.keys.remove(key);
        }
    }

    /// Stops reads of a life that nobody holds.
    fn withdraw(&mut self, id: u32) {
        let object = &mut self.objects[id as usize];
        object.state = State::Read;
        let idle = object.range.as_ref().is_none_or(|range| self.index.retire(range.offset()));
        if idle {
            self.release(id);
        }
    }

    /// Gives the range of a life back, and the sample's memory is counted as released with its
    /// last object.
    fn release(&mut self, id: u32) {
        let object = self.objects.remove(id as usize);
        let bytes = object.range.as_ref().map_or(0, ArenaRange::len);
        if let Some(range) = object.range {
            self.space.free(range);
        }
        self.changes += 1;
        self.counts.draining_objects -= 1;
        self.counts.resident_objects -= 1;
        self.counts.resident_bytes -= bytes;
        let sample = &mut self.samples[object.sample as usize];
        sample.live -= 1;
        if sample.live == 0 {
            self.oldest.remove(&mut self.samples, object.sample);
            self.samples.remove(object.sample as usize);
            self.counts.resident_samples -= 1;
            self.counts.released_samples += 1;
        }
    }

    /// Ends one hold; if it was the last, what nobody holds any more is freed.
    fn end_hold(&mut self, id: u32, client: u32) {
        let Some(place) = self.objects[id as usize].holders.release(client) else { return };
        self.forget_place(client, place);
        let object = &self.objects[id as usize];
        if object.holders.any_active() {
            return;
        }
        match object.state {
            State::Published => self.retire(id),
            State::Held => {
                let key = object.key.clone();
                if let Some(lives) = self.draining.get_mut(&key) {
                    lives.retain(|&life| life != id);
                    if lives.is_empty() {
                        self.draining.remove(&key);
                    }
                }
                self.withdraw(id);
            }
            State::Filling | State::Read => unreachable!("neither is ever held"),
        }
    }

    /// Takes an ended hold out of its client's list.
    fn forget_place(&mut self, client: u32, place: u32) {
        if let Some(moved) = self.clients.take(client, place) {
            self.objects[moved as usize].holders.moved(client, place);
        }
    }

    /// Ends every hold of a client whose record is already gone.
    fn let_go(&mut self, client: clients::Gone) {
        let mut lost = std::collections::HashSet::new();
        for id in client.held {
            let object = &self.objects[id as usize];
            if object.holders.active() == 1 {
                lost.insert(object.sample);
            }
            self.end_hold(id, client.index);
        }
        if client.expired {
            self.counts.lease_expired_samples += lost.len() as u64;
        }
    }
}

impl Object {
    fn first_holder(&self) -> Option<u32> {
        self.holders.active_clients().next()
    }
}

impl Id {
    fn new(index: u32) -> Self {
        Self(std::num::NonZeroU32::MIN.saturating_add(index))
    }

    fn index(self) -> u32 {
        self.0.get() - 1
    }
}
