//! The books against a naive model of the wire's rules: any order of reservations, publications,
//! frees, claims, reads, departures and silences.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use capture_arena::{
    BatchPlan, CaptureArena, Grant, ObjectList, Pin, PlannedObject, PlannedSample, UNIT, footprint,
};
use proptest::prelude::*;
use transport_core::{ArenaOffset, ErrorKind, MapMark, Sequence};

use crate::{
    common::client,
    model_clients::{ModelClient, marks},
};

const CAPACITY: u64 = 40 * UNIT;
const LEASE: Duration = Duration::from_millis(100);
const KEYS: usize = 6;

/// A number that stands for one of the sequence numbers seen so far, or for none.
#[derive(Clone, Copy, Debug)]
enum Life {
    Any,
    Seen(usize),
    Future,
}

#[derive(Clone, Debug)]
enum Op {
    Reserve { objects: Vec<(usize, u64)>, holder: Option<u8>, replace: bool, wait_ms: u64 },
    Publish(usize),
    Abort(usize),
    Free { client: Option<u8>, key: usize, life: Life },
    Hold { client: u8, key: usize, life: Life },
    Seen(u8),
    Lost(u8),
    Bye(u8),
    Greet { client: u8, mark: Option<bool> },
    Map(u8),
    Unmap(u8),
    Pin(usize),
    Unpin(usize),
    Sleep(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let life = || {
        prop_oneof![
            3 => Just(Life::Any),
            3 => any::<usize>().prop_map(Life::Seen),
            1 => Just(Life::Future),
        ]
    };
    let who = 0..3u8;
    let object = (0..KEYS, prop_oneof![1 => Just(0), 6 => 1..6 * UNIT]);
    let reserve = (
        prop::collection::btree_map(0..KEYS, object.prop_map(|(_, len)| len), 1..4),
        prop::option::of(who.clone()),
        any::<bool>(),
        0..200u64,
    );
    prop_oneof![
        5 => reserve.prop_map(|(objects, holder, replace, wait_ms)| Op::Reserve {
            objects: objects.into_iter().collect(), holder, replace, wait_ms,
        }),
        5 => any::<usize>().prop_map(Op::Publish),
        1 => any::<usize>().prop_map(Op::Abort),
        7 => (prop::option::of(who.clone()), 0..KEYS, life())
            .prop_map(|(client, key, life)| Op::Free { client, key, life }),
        4 => (who.clone(), 0..KEYS, life())
            .prop_map(|(client, key, life)| Op::Hold { client, key, life }),
        1 => who.clone().prop_map(Op::Seen),
        1 => who.clone().prop_map(Op::Lost),
        1 => who.clone().prop_map(Op::Bye),
        2 => (who.clone(), prop::option::weighted(0.7, any::<bool>()))
            .prop_map(|(client, mark)| Op::Greet { client, mark }),
        1 => who.clone().prop_map(Op::Map),
        1 => who.prop_map(Op::Unmap),
        2 => any::<usize>().prop_map(Op::Pin),
        2 => any::<usize>().prop_map(Op::Unpin),
        2 => (0..150u64).prop_map(Op::Sleep),
    ]
}

/// One life of a key, from its reservation until its range is free.
#[derive(Debug)]
struct Object {
    key: usize,
    len: u64,
    offset: Option<u64>,
    batch: u32,
    sample: u64,
    seq: u64,         // 0 while filling
    current: bool,    // published, and nobody has freed or replaced it
    taken_over: bool, // a later reservation of the key was granted while it was filling
    holds: BTreeSet<u8>,
    let_go: BTreeSet<u8>, // held it once
    pins: usize,
    remembered: Vec<Option<u8>>,
    holder: Option<u8>,     // from birth
    since: Option<Instant>, // published
}

#[derive(Debug)]
struct Waiter {
    ticket: u64,
    objects: Vec<(usize, u64)>,
    holder: Option<u8>,
    replace: bool,
    deadline: Instant,
}

#[derive(Debug, Default)]
struct Counts {
    published: u64,
    released: u64,
    duplicate: u64,
    stale: u64,
    expired: u64,
}

struct World {
    books: CaptureArena,
    reclaims: Arc<Mutex<Vec<u32>>>,
    now: Instant,
    objects: Vec<Object>,
    waiting: Vec<Waiter>,
    filling: Vec<u32>,     // batches
    pins: Vec<(u64, Pin)>, // by sequence number
    clients: BTreeMap<u8, ModelClient>,
    mapped: Arc<Mutex<BTreeSet<MapMark>>>,
    seqs: Vec<u64>,
    counts: Counts,
    tickets: u64,
    samples: u64,
}

fn key(key: usize) -> String {
    format!("s/a/g1/x{key}")
}

fn who(index: u8) -> transport_core::ClientId {
    client(&format!("c{index}"))
}

impl World {
    fn new() -> Self {
        let reclaims = Arc::new(Mutex::new(Vec::new()));
        let queue = reclaims.clone();
        let reclaim = move |id| queue.lock().unwrap().push(id);
        let mut books = CaptureArena::with_reclaim(CAPACITY, LEASE, reclaim).unwrap();
        let mapped: Arc<Mutex<BTreeSet<MapMark>>> = Arc::default();
        let maps = mapped.clone();
        books.set_probe(move |mark| maps.lock().unwrap().contains(&mark));
        Self {
            books,
            mapped,
            reclaims,
            now: Instant::now(),
            objects: Vec::new(),
            waiting: Vec::new(),
            filling: Vec::new(),
            pins: Vec::new(),
            clients: BTreeMap::new(),
            seqs: Vec::new(),
            counts: Counts::default(),
            tickets: 0,
            samples: 0,
        }
    }

    fn seq(&self, life: Life) -> Option<u64> {
        match life {
            Life::Any => None,
            Life::Seen(_) if self.seqs.is_empty() => Some(1 << 40),
            Life::Seen(i) => Some(self.seqs[i % self.seqs.len()]),
            Life::Future => Some(1 << 40),
        }
    }

    fn current(&mut self, key: usize) -> Option<&mut Object> {
        self.objects.iter_mut().find(|o| o.key == key && o.current)
    }

    /// The reservation that a publication of the key would come from.
    fn newest_filling(&mut self, key: usize) -> Option<&mut Object> {
        self.objects.iter_mut().find(|o| o.key == key && o.seq == 0 && !o.taken_over)
    }

    /// What is neither filling, current, held nor read is gone; a sample with its last object.
    fn collect(&mut self) {
        let gone = |o: &Object| o.seq > 0 && !o.current && o.holds.is_empty() && o.pins == 0;
        let samples: BTreeSet<u64> =
            self.objects.iter().filter(|o| gone(o)).map(|o| o.sample).collect();
        self.objects.retain(|o| !gone(o));
        let left = |s: &&u64| self.objects.iter().any(|o| o.sample == **s);
        self.counts.released += samples.iter().filter(|s| !left(s)).count() as u64;
    }

    fn end_hold(object: &mut Object, client: u8) {
        if object.holds.remove(&client) {
            object.let_go.insert(client);
            if object.holds.is_empty() {
                object.current = false;
            }
        }
    }

    fn leave(&mut self, client: u8, expired: bool) {
        let mut lost = BTreeSet::new();
        for object in &mut self.objects {
            if object.holds.contains(&client) {
                Self::end_hold(object, client);
                if object.holds.is_empty() {
                    lost.insert(object.sample);
                }
            }
            object.let_go.remove(&client); // it comes back as a stranger
        }
        if expired {
            self.counts.expired += lost.len() as u64;
        }
        self.clients.remove(&client);
    }

    fn known(&mut self, client: u8) {
        self.clients.entry(client).or_insert(ModelClient::new(self.now, LEASE));
    }

    fn granted(&mut self, grant: Grant, objects: &[(usize, u64)], holder: Option<u8>) {
        self.samples += 1;
        assert_eq!(grant.offsets.len(), objects.len());
        for (&(key, len), offset) in objects.iter().zip(&grant.offsets) {
            assert_eq!(offset.is_some(), len > 0);
            if let Some(older) = self.newest_filling(key) {
                older.taken_over = true;
            }
            self.objects.push(Object {
                key,
                len,
                offset: offset.map(|o| o.0),
                batch: grant.batch,
                sample: self.samples,
                seq: 0,
                current: false,
                taken_over: false,
                holds: BTreeSet::new(),
                let_go: BTreeSet::new(),
                pins: 0,
                remembered: Vec::new(),
                holder,
                since: None,
            });
        }
        self.filling.push(grant.batch);
    }

    fn exists(&self, objects: &[(usize, u64)]) -> bool {
        let lives = |key| {
            self.objects
                .iter()
                .any(|o| o.key == key && (o.current || (o.seq == 0 && !o.taken_over)))
        };
        objects.iter().any(|(key, _)| lives(*key))
    }

    fn free_bytes(&self) -> u64 {
        CAPACITY - self.objects.iter().map(|o| footprint(o.len)).sum::<u64>()
    }

    /// A replacing batch that does not fit frees what it replaces. Whether it did is the books'
    /// choice, because the model does not know where ranges lie.
    fn may_give_way(&mut self, objects: &[(usize, u64)]) {
        for (index, _) in objects {
            let current = self.books.current(&key(*index)).map(|s| s.0);
            if let Some(old) = self.current(*index).filter(|old| Some(old.seq) != current) {
                old.current = false;
            }
        }
        self.collect();
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Reserve { objects, holder, replace, wait_ms } => {
                self.reserve(objects, holder, replace, wait_ms);
            }
            Op::Publish(i) if !self.filling.is_empty() => {
                let batch = self.filling.swap_remove(i % self.filling.len());
                self.publish(batch);
            }
            Op::Abort(i) if !self.filling.is_empty() => {
                let batch = self.filling.swap_remove(i % self.filling.len());
                self.books.abort(batch);
                self.objects.retain(|o| !(o.seq == 0 && o.batch == batch));
            }
            Op::Publish(_) | Op::Abort(_) => {}
            Op::Free { client, key, life } => self.free(client, key, self.seq(life)),
            Op::Hold { client, key, life } => self.hold(client, key, self.seq(life)),
            Op::Seen(c) => {
                self.books.client_seen(&who(c), LEASE, None, self.now);
                self.known(c);
                self.clients.get_mut(&c).unwrap().seen(self.now);
            }
            Op::Lost(c) => {
                self.books.client_lost(&who(c), self.now);
                if let Some(client) = self.clients.get_mut(&c) {
                    client.lost(self.now);
                }
            }
            Op::Bye(c) => {
                self.books.client_bye(&who(c), self.now);
                let mapped = self.mapped.lock().unwrap().clone();
                if !self.clients.get_mut(&c).is_some_and(|client| client.bye(self.now, &mapped)) {
                    self.leave(c, false);
                }
            }
            Op::Greet { client, mark } => {
                let mark = mark.map(|second| marks(client)[usize::from(second)]);
                let greeted = self.books.client_greets(&who(client), LEASE, mark, self.now);
                let mapped = self.mapped.lock().unwrap().clone();
                if self.clients.get(&client).is_some_and(|c| c.refuses(mark, &mapped)) {
                    assert_eq!(greeted.unwrap_err().kind(), ErrorKind::Busy);
                } else {
                    greeted.unwrap();
                    self.known(client);
                    self.clients.get_mut(&client).unwrap().greet(mark, self.now);
                }
            }
            Op::Map(c) => drop(self.mapped.lock().unwrap().insert(marks(c)[0])),
            Op::Unmap(c) => drop(self.mapped.lock().unwrap().remove(&marks(c)[0])),
            Op::Pin(i) => self.pin(i),
            Op::Unpin(i) if !self.pins.is_empty() => {
                let (seq, pin) = self.pins.swap_remove(i % self.pins.len());
                drop(pin);
                let object = self.objects.iter_mut().find(|o| o.seq == seq);
                object.expect("pinned, so still there").pins -= 1;
                for id in std::mem::take(&mut *self.reclaims.lock().unwrap()) {
                    self.books.reclaim(id);
                }
            }
            Op::Unpin(_) => {}
            Op::Sleep(ms) => self.now += Duration::from_millis(ms),
        }
        self.collect();
        self.poll();
        self.check();
    }

    fn reserve(
        &mut self,
        objects: Vec<(usize, u64)>,
        holder: Option<u8>,
        replace: bool,
        wait_ms: u64,
    ) {
        self.tickets += 1;
        let planned =
            objects.iter().map(|(k, len)| PlannedObject { key: key(*k).into(), bytes: *len });
        let sample = PlannedSample { objects: planned.collect(), holder: holder.map(who) };
        let deadline = self.now + Duration::from_millis(wait_ms);
        let plan = BatchPlan { samples: vec![sample], replace };
        let exists = self.exists(&objects);
        match self.books.reserve(plan, self.tickets, deadline, self.now) {
            Ok(Some(grant)) => {
                assert!(self.waiting.is_empty(), "nobody overtakes");
                assert!(replace || !exists);
                if replace {
                    self.may_give_way(&objects);
                }
                self.granted(grant, &objects, holder);
            }
            Ok(None) => {
                assert!(replace || !exists);
                if self.waiting.is_empty() && replace {
                    self.may_give_way(&objects);
                }
                self.waiting.push(Waiter {
                    ticket: self.tickets,
                    objects,
                    holder,
                    replace,
                    deadline,
                });
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::AlreadyExists);
                assert!(exists && !replace);
            }
        }
    }

    fn draining(&self) -> u64 {
        self.objects.iter().filter(|o| o.seq > 0 && !o.current).count() as u64
    }

    fn publish(&mut self, batch: u32) {
        let published = self.books.publish(batch, self.now);
        let own = |o: &&mut Object| o.seq == 0 && o.batch == batch;
        if self.objects.iter_mut().filter(own).any(|o| o.taken_over) {
            assert_eq!(published.unwrap_err().kind(), ErrorKind::Stale);
            self.objects.retain(|o| !(o.seq == 0 && o.batch == batch));
            return;
        }
        let seqs = published.unwrap();
        assert!(in_order(&seqs, &self.seqs));
        self.counts.published += 1;
        let keys: Vec<usize> = self.objects.iter_mut().filter(own).map(|o| o.key).collect();
        for (key, seq) in keys.into_iter().zip(seqs) {
            if let Some(old) = self.current(key) {
                old.current = false;
            }
            let new =
                self.objects.iter_mut().find(|o| o.key == key && o.seq == 0 && o.batch == batch);
            let new = new.unwrap();
            (new.seq, new.current, new.since) = (seq.0, true, Some(self.now));
            new.holds.extend(new.holder);
            for client in std::mem::take(&mut new.remembered) {
                if !new.current {
                    break;
                }
                match client {
                    Some(client) if new.holds.contains(&client) => Self::end_hold(new, client),
                    _ => new.current = false,
                }
            }
            let holder = new.holder;
            self.seqs.push(seq.0);
            if let Some(holder) = holder {
                self.known(holder);
            }
        }
    }

    fn free(&mut self, client: Option<u8>, key_index: usize, seq: Option<u64>) {
        let mut list = ObjectList::new();
        list.push(&key(key_index), seq.map(Sequence));
        let outcome = self.books.free(client.map(who).as_ref(), &list);
        // A client without a record is a stranger.
        let by = client;
        let client = client.filter(|c| self.clients.contains_key(c));
        let is = |o: &Object| seq.is_none_or(|s| s == o.seq);
        let expected = 'rule: {
            if let Some(client) = client {
                if let Some(object) = self.current(key_index).filter(|o| is(o)) {
                    if object.holds.contains(&client) {
                        Self::end_hold(object, client);
                        break 'rule (0, 0);
                    }
                    if object.let_go.contains(&client) && !object.holds.is_empty() {
                        break 'rule (1, 0);
                    }
                }
                let older = self.objects.iter_mut().find(|o| {
                    o.key == key_index
                        && o.seq > 0
                        && !o.current
                        && o.holds.contains(&client)
                        && is(o)
                });
                if let Some(older) = older {
                    Self::end_hold(older, client);
                    break 'rule (0, 0);
                }
            }
            if let Some(object) = self.current(key_index) {
                if is(object) {
                    object.current = false;
                    break 'rule (0, 0);
                }
                break 'rule (0, 1);
            }
            match self.newest_filling(key_index) {
                Some(_) if seq.is_some() => (0, 1),
                Some(filling) if !filling.remembered.contains(&by) => {
                    filling.remembered.push(by);
                    (0, 0)
                }
                _ => (1, 0),
            }
        };
        self.counts.duplicate += expected.0;
        self.counts.stale += expected.1;
        assert_eq!((outcome.gone.len() as u64, outcome.stale.len() as u64), expected);
    }

    fn hold(&mut self, client: u8, key_index: usize, seq: Option<u64>) {
        let mut list = ObjectList::new();
        list.push(&key(key_index), seq.map(Sequence));
        let outcome = self.books.hold(&who(client), &list, self.now);
        self.known(client);
        let expected = match self.current(key_index) {
            None => (1, 0),
            Some(object) if seq.is_some_and(|s| s != object.seq) => (0, 1),
            Some(object) => {
                object.holds.insert(client);
                object.let_go.remove(&client);
                (0, 0)
            }
        };
        assert_eq!((outcome.gone.len(), outcome.stale.len()), expected);
    }

    fn pin(&mut self, i: usize) {
        let published: Vec<usize> = (0..self.objects.len())
            .filter(|&o| self.objects[o].seq > 0 && self.objects[o].len > 0)
            .collect();
        if published.is_empty() {
            return;
        }
        let object = &mut self.objects[published[i % published.len()]];
        let offset = ArenaOffset(object.offset.unwrap());
        let readable = object.current || !object.holds.is_empty();
        let pin = self.books.pin(offset, object.len);
        assert_eq!(pin.is_ok(), readable);
        assert!(self.books.pin(offset, object.len + 1).is_err());
        if let Ok(pin) = pin {
            object.pins += 1;
            self.pins.push((object.seq, pin));
        }
    }

    fn poll(&mut self) {
        let (now, mapped) = (self.now, self.mapped.lock().unwrap().clone());
        let over: Vec<(u8, bool)> = self
            .clients
            .iter_mut()
            .filter_map(|(c, client)| client.is_over(now, &mapped).then_some((*c, client.left)))
            .collect();
        let before = self.counts.expired;
        // Of a sample with several holders, the order in which their leases end decides how often
        // it counts, if they end in one moment.
        let exact = over.len() < 2;
        for (client, left) in over {
            self.leave(client, !left);
        }
        self.collect();
        let answers = self.books.poll(self.now);
        let counted = self.books.health(self.now).lease_expired_samples;
        assert!(counted >= before && (counted == self.counts.expired || !exact));
        self.counts.expired = counted;
        for (ticket, answer) in answers {
            let at = self.waiting.iter().position(|w| w.ticket == ticket).expect("was waiting");
            let waiter = self.waiting.remove(at);
            match answer {
                Ok(grant) => {
                    assert_eq!(at, 0, "in order");
                    if waiter.replace {
                        self.may_give_way(&waiter.objects);
                    }
                    self.granted(grant, &waiter.objects, waiter.holder);
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    assert!(self.exists(&waiter.objects) && !waiter.replace);
                }
                Err(error) => {
                    let is_behind = error.kind() == ErrorKind::Busy && at > 0;
                    assert!(is_behind || error.kind() == ErrorKind::CapacityExceeded, "{error}");
                    assert!(waiter.deadline <= self.now);
                    if at == 0 && waiter.replace {
                        self.may_give_way(&waiter.objects);
                    }
                }
            }
        }
        if let Some(head) = self.waiting.first()
            && head.replace
        {
            let objects = head.objects.clone();
            self.may_give_way(&objects);
        }
    }

    fn check(&mut self) {
        let health = self.books.health(self.now);
        let mut taken: Vec<(u64, u64)> =
            self.objects.iter().filter_map(|o| Some((o.offset?, footprint(o.len)))).collect();
        taken.sort_unstable();
        assert!(taken.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "overlap");
        assert!(taken.iter().all(|(at, len)| at % UNIT == 0 && at + len <= CAPACITY));
        assert_eq!(health.arena_free_bytes, self.free_bytes());
        let resident = || self.objects.iter().filter(|o| o.seq > 0);
        assert_eq!(health.resident_objects, resident().count() as u64);
        assert_eq!(health.resident_bytes, resident().map(|o| o.len).sum::<u64>());
        let samples: BTreeSet<u64> = resident().map(|o| o.sample).collect();
        assert_eq!(health.resident_samples, samples.len() as u64);
        assert_eq!(health.reserved_samples, self.filling.len() as u64);
        assert_eq!(health.draining_objects, self.draining());
        assert_eq!(health.published_samples, self.counts.published);
        assert_eq!(health.released_samples, self.counts.released);
        assert_eq!(health.published_samples, health.released_samples + health.resident_samples);
        assert_eq!(health.duplicate_frees, self.counts.duplicate);
        assert_eq!(health.stale_frees, self.counts.stale);
        assert_eq!(health.waiting_batches, self.waiting.len() as u64);
        assert_eq!(health.clients, self.clients.len() as u64);
        let stalled = self.clients.values().filter(|client| client.stalled).count();
        assert_eq!(health.stalled_clients, stalled as u64);
        let oldest = resident().map(|o| o.since.unwrap()).min();
        assert_eq!(health.oldest_age, oldest.map(|since| self.now - since));
    }

    /// Everybody leaves: nothing may be left behind.
    fn end(mut self) {
        for waiter in std::mem::take(&mut self.waiting) {
            self.books.cancel(waiter.ticket);
        }
        for batch in std::mem::take(&mut self.filling) {
            self.books.abort(batch);
        }
        self.pins.clear();
        for id in std::mem::take(&mut *self.reclaims.lock().unwrap()) {
            self.books.reclaim(id);
        }
        self.mapped.lock().unwrap().clear();
        (0..3).for_each(|c| self.books.client_bye(&who(c), self.now));
        let all: ObjectList = (0..KEYS).map(|k| (key(k), None)).collect();
        self.books.free(None, &all);
        let health = self.books.health(self.now);
        assert_eq!((health.resident_objects, health.reserved_bytes, health.clients), (0, 0, 0));
        assert_eq!((health.arena_largest_free, health.arena_free_ranges), (CAPACITY, 1));
        assert_eq!(health.published_samples, health.released_samples);
    }
}

fn in_order(new: &[Sequence], seen: &[u64]) -> bool {
    let first = seen.last().copied().unwrap_or(0) + 1;
    new.iter().map(|s| s.0).eq(first..first + new.len() as u64)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn the_books_follow_the_rules(ops in prop::collection::vec(op(), 1..120)) {
        let mut world = World::new();
        for op in ops {
            world.apply(op);
        }
        world.end();
    }
}
