//! Who holds objects, and until when a silent client's holds live.
//!
//! A record outlives its last hold by a lease: frees that a client sends again after a broken
//! connection are then still known to be its own.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use transport_core::ClientId;

/// Longest lease that is granted.
const MAX_LEASE: Duration = Duration::from_secs(24 * 3600);

#[derive(Debug)]
pub(super) struct Clients {
    default_lease: Duration,
    by_name: HashMap<ClientId, u32>,
    table: HashMap<u32, Client>,
    last: u32,
    earliest: Option<Instant>, // no lease ends before
}

#[derive(Debug)]
struct Client {
    name: ClientId,
    lease: Duration,
    connected: bool,
    seen: Instant,
    held: u64,
}

/// A client whose record was removed, and how many objects it still holds.
#[derive(Debug)]
pub(super) struct Gone {
    pub(super) index: u32,
    pub(super) held: u64,
}

impl Clients {
    pub(super) fn new(default_lease: Duration) -> Self {
        Self {
            default_lease: default_lease.min(MAX_LEASE),
            by_name: HashMap::new(),
            table: HashMap::new(),
            last: 0,
            earliest: None,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// The client's index, if it is known.
    pub(super) fn index(&self, name: &ClientId) -> Option<u32> {
        self.by_name.get(name).copied()
    }

    pub(super) fn name(&self, index: u32) -> Option<&ClientId> {
        self.table.get(&index).map(|c| &c.name)
    }

    /// The client's index; a new one is taken as not connected, with the default lease.
    pub(super) fn known(&mut self, name: &ClientId, now: Instant) -> u32 {
        if let Some(index) = self.index(name) {
            return index;
        }
        self.last = self.last.wrapping_add(1);
        let client = Client {
            name: name.clone(),
            lease: self.default_lease,
            connected: false,
            seen: now,
            held: 0,
        };
        self.expires(client.expiry());
        self.table.insert(self.last, client);
        self.by_name.insert(name.clone(), self.last);
        self.last
    }

    pub(super) fn seen(&mut self, name: &ClientId, lease: Duration, now: Instant) {
        let index = self.known(name, now);
        let client = self.table.get_mut(&index).expect("just looked up");
        (client.connected, client.seen, client.lease) = (true, now, lease.min(MAX_LEASE));
        let expiry = client.expiry();
        self.expires(expiry);
    }

    pub(super) fn lost(&mut self, name: &ClientId, now: Instant) {
        let Some(index) = self.index(name) else { return };
        let client = self.table.get_mut(&index).expect("names and table agree");
        (client.connected, client.seen) = (false, now);
        let expiry = client.expiry();
        self.expires(expiry);
    }

    pub(super) fn remove(&mut self, name: &ClientId) -> Option<Gone> {
        let index = self.by_name.remove(name)?;
        let client = self.table.remove(&index).expect("names and table agree");
        Some(Gone { index, held: client.held })
    }

    /// Counts a hold that began or ended; the record of a client that is gone needs no count.
    pub(super) fn count(&mut self, index: u32, change: i64) {
        if let Some(client) = self.table.get_mut(&index) {
            client.held = client.held.saturating_add_signed(change);
        }
    }

    /// No lease ends before this.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.earliest
    }

    /// Removes one client whose lease is over.
    pub(super) fn pop_expired(&mut self, now: Instant) -> Option<Gone> {
        if self.earliest.is_none_or(|at| at > now) {
            return None;
        }
        let overdue = self.table.values().find(|c| c.expiry() <= now).map(|c| c.name.clone());
        if overdue.is_none() {
            self.earliest = self.table.values().map(Client::expiry).min();
        }
        self.remove(&overdue?)
    }

    fn expires(&mut self, at: Instant) {
        self.earliest = Some(self.earliest.map_or(at, |earliest| earliest.min(at)));
    }
}

impl Client {
    /// A silent connection gets twice the time that a lost one gets.
    fn expiry(&self) -> Instant {
        self.seen + if self.connected { 2 * self.lease } else { self.lease }
    }
}
