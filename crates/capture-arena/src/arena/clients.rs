//! Who holds what, and until when a silent client's holds live.
//!
//! A record outlives its last hold by a lease: frees that a client sends again after a broken
//! connection are then still known to be its own. A client that maps the arena is not given up
//! while its mapping exists, however long it is silent: it could still see what it holds.

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    time::{Duration, Instant},
};

use foldhash::fast::RandomState;
use transport_core::{ClientId, Error, ErrorKind, MapMark, Result};

/// Longest lease that is granted.
const MAX_LEASE: Duration = Duration::from_secs(24 * 3600);
/// How often the mapping of a client that would be given up otherwise is looked for; at most its
/// lease.
const LOOK: Duration = Duration::from_secs(1);

/// Tells whether a mapping still exists.
type Probe = Box<dyn Fn(MapMark) -> bool + Send>;

pub(super) struct Clients {
    default_lease: Duration,
    by_name: HashMap<ClientId, u32, RandomState>,
    table: HashMap<u32, Client, RandomState>,
    last: u32,
    due: BTreeSet<(Instant, u32)>, // when each is looked at
    stalled: u64,
    probe: Probe,
}

#[derive(Debug)]
struct Client {
    name: ClientId,
    lease: Duration,
    connected: bool,
    seen: Instant,
    mark: Option<MapMark>,
    /// Its lease is over, or it said goodbye, but its mapping exists.
    stalled: bool,
    left: bool,
    due: Instant,
    held: Vec<u32>, // objects; each knows its place here
}

/// A client whose record was removed, and the objects that it still holds.
#[derive(Debug)]
pub(super) struct Gone {
    pub(super) index: u32,
    pub(super) held: Vec<u32>,
    /// It fell silent, rather than said goodbye.
    pub(super) expired: bool,
}

impl Clients {
    pub(super) fn new(default_lease: Duration) -> Self {
        Self {
            default_lease: default_lease.min(MAX_LEASE),
            by_name: HashMap::default(),
            table: HashMap::default(),
            last: 0,
            due: BTreeSet::new(),
            stalled: 0,
            probe: Box::new(|_| false),
        }
    }

    pub(super) fn set_probe(&mut self, probe: Probe) {
        self.probe = probe;
    }

    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// Clients that keep what they hold only because they still map the arena.
    pub(super) fn stalled(&self) -> u64 {
        self.stalled
    }

    /// The client's index, if it is known.
    pub(super) fn index(&self, name: &ClientId) -> Option<u32> {
        self.by_name.get(name).copied()
    }

    pub(super) fn name(&self, index: u32) -> Option<&ClientId> {
        self.table.get(&index).map(|c| &c.name)
    }

    pub(super) fn is_stalled(&self, index: u32) -> bool {
        self.table.get(&index).is_some_and(|c| c.stalled)
    }

    /// The client's index; a new one is taken as not connected, with the default lease.
    pub(super) fn known(&mut self, name: &ClientId, now: Instant) -> u32 {
        if let Some(index) = self.index(name) {
            return index;
        }
        self.last = self.last.wrapping_add(1);
        let due = now + self.default_lease;
        let client = Client {
            name: name.clone(),
            lease: self.default_lease,
            connected: false,
            seen: now,
            mark: None,
            stalled: false,
            left: false,
            due,
            held: Vec::new(),
        };
        self.due.insert((due, self.last));
        self.table.insert(self.last, client);
        self.by_name.insert(name.clone(), self.last);
        self.last
    }

    /// A client introduces itself. Refused while another one of this name is there: what the one
    /// holds the other could release, and its memory would change under its eyes.
    pub(super) fn greet(
        &mut self,
        name: &ClientId,
        lease: Duration,
        mark: Option<MapMark>,
        now: Instant,
    ) -> Result<()> {
        let known = self.index(name).map(|index| &self.table[&index]);
        if let Some(client) = known.filter(|client| client.mark != mark) {
            let maps = client.mark.is_some_and(|mark| (self.probe)(mark));
            if client.connected || maps {
                let why = "another consumer of this name is there";
                return Err(Error::new(ErrorKind::Busy, "introduce client", why)
                    .with("client", name)
                    .with("other_maps_the_arena", maps)
                    .remedy("give each consumer a name of its own, or end the other one first"));
            }
        }
        let index = self.known(name, now);
        self.table.get_mut(&index).expect("just looked up").mark = mark;
        self.seen(name, lease, None, now);
        Ok(())
    }

    /// Anything was heard of a client; `mark` is the one that it was greeted with, in case it was
    /// given up since.
    pub(super) fn seen(
        &mut self,
        name: &ClientId,
        lease: Duration,
        mark: Option<MapMark>,
        now: Instant,
    ) {
        let index = self.known(name, now);
        let client = self.table.get_mut(&index).expect("just looked up");
        client.mark = client.mark.or(mark);
        (client.connected, client.seen, client.lease) = (true, now, lease.min(MAX_LEASE));
        self.alive(index);
    }

    pub(super) fn lost(&mut self, name: &ClientId, now: Instant) {
        let Some(index) = self.index(name) else { return };
        let client = self.table.get_mut(&index).expect("names and table agree");
        if client.left {
            return; // the end of a connection that said goodbye
        }
        (client.connected, client.seen) = (false, now);
        self.alive(index);
    }

    /// A client says goodbye: its record goes now, or with its mapping.
    pub(super) fn leave(&mut self, name: &ClientId, now: Instant) -> Option<Gone> {
        let index = self.index(name)?;
        let client = self.table.get_mut(&index).expect("names and table agree");
        (client.connected, client.left) = (false, true);
        if client.mark.is_some_and(|mark| (self.probe)(mark)) {
            self.stall(index, now);
            return None;
        }
        Some(self.remove(index))
    }

    /// Records a hold that began, and returns its place among the client's.
    pub(super) fn add(&mut self, index: u32, object: u32) -> u32 {
        let held = &mut self.table.get_mut(&index).expect("a holder is known").held;
        held.push(object);
        held.len() as u32 - 1
    }

    /// Records that the hold at `place` ended, and returns the object whose hold has taken its
    /// place. The record of a client that is gone is not kept.
    pub(super) fn take(&mut self, index: u32, place: u32) -> Option<u32> {
        let held = &mut self.table.get_mut(&index)?.held;
        held.swap_remove(place as usize);
        if held.len() * 4 < held.capacity() {
            held.shrink_to(held.len() * 2); // no more room than it needs
        }
        held.get(place as usize).copied()
    }

    /// No record needs a look before this.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Removes one client whose lease is over and who can see nothing any more.
    pub(super) fn pop_expired(&mut self, now: Instant) -> Option<Gone> {
        loop {
            let (at, index) = *self.due.first()?;
            if at > now {
                return None;
            }
            let mark = self.table[&index].mark;
            if !mark.is_some_and(|mark| (self.probe)(mark)) {
                return Some(self.remove(index));
            }
            self.stall(index, now);
        }
    }

    fn remove(&mut self, index: u32) -> Gone {
        let client = self.table.remove(&index).expect("callers look it up first");
        self.by_name.remove(&client.name);
        self.due.remove(&(client.due, index));
        self.stalled -= u64::from(client.stalled);
        Gone { index, held: client.held, expired: !client.left }
    }

    /// Something was heard of it, if only the end of its connection: its lease begins anew.
    fn alive(&mut self, index: u32) {
        let client = self.table.get_mut(&index).expect("callers look it up first");
        self.stalled -= u64::from(client.stalled);
        (client.stalled, client.left) = (false, false);
        // A silent connection gets twice the time that a lost one gets.
        let due = client.seen + if client.connected { 2 * client.lease } else { client.lease };
        self.look_at(index, due);
    }

    /// It is kept for its mapping's sake, which is looked for again soon.
    fn stall(&mut self, index: u32, now: Instant) {
        let client = self.table.get_mut(&index).expect("callers look it up first");
        self.stalled += u64::from(!client.stalled);
        client.stalled = true;
        let due = now + client.lease.min(LOOK);
        self.look_at(index, due);
    }

    fn look_at(&mut self, index: u32, due: Instant) {
        let client = self.table.get_mut(&index).expect("callers look it up first");
        let before = std::mem::replace(&mut client.due, due);
        self.due.remove(&(before, index));
        self.due.insert((due, index));
    }
}

impl fmt::Debug for Clients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Clients")
            .field("table", &self.table)
            .field("stalled", &self.stalled)
            .finish_non_exhaustive()
    }
}
