//! What the model knows of a client: when its lease ends, and what its mapping changes about that.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use transport_core::MapMark;

#[derive(Clone, Debug)]
pub(crate) struct ModelClient {
    lease: Duration,
    connected: bool,
    seen: Instant,
    mark: Option<MapMark>,
    pub(crate) stalled: bool,
    pub(crate) left: bool,
    look: Instant, // while stalled
}

/// The mark that a client mostly uses, and another one.
pub(crate) fn marks(client: u8) -> [MapMark; 2] {
    [MapMark(1 + u64::from(client)), MapMark(101 + u64::from(client))]
}

impl ModelClient {
    pub(crate) fn new(now: Instant, lease: Duration) -> Self {
        Self {
            lease,
            connected: false,
            seen: now,
            mark: None,
            stalled: false,
            left: false,
            look: now,
        }
    }

    pub(crate) fn seen(&mut self, now: Instant) {
        (self.connected, self.seen, self.stalled, self.left) = (true, now, false, false);
    }

    pub(crate) fn lost(&mut self, now: Instant) {
        if !self.left {
            (self.connected, self.seen, self.stalled) = (false, now, false);
        }
    }

    /// Whether it stays, for its mapping's sake.
    pub(crate) fn bye(&mut self, now: Instant, mapped: &BTreeSet<MapMark>) -> bool {
        (self.connected, self.left) = (false, true);
        if self.maps(mapped) {
            (self.stalled, self.look) = (true, now + self.lease);
        }
        self.stalled && self.maps(mapped)
    }

    pub(crate) fn refuses(&self, mark: Option<MapMark>, mapped: &BTreeSet<MapMark>) -> bool {
        self.mark != mark && (self.connected || self.maps(mapped))
    }

    pub(crate) fn greet(&mut self, mark: Option<MapMark>, now: Instant) {
        self.mark = mark;
        self.seen(now);
    }

    /// Whether its lease is over and nothing keeps it.
    pub(crate) fn is_over(&mut self, now: Instant, mapped: &BTreeSet<MapMark>) -> bool {
        let due = match self.stalled {
            true => self.look,
            false => self.seen + self.lease * if self.connected { 2 } else { 1 },
        };
        if due > now {
            return false;
        }
        if self.maps(mapped) {
            (self.stalled, self.look) = (true, now + self.lease);
        }
        !self.maps(mapped)
    }

    fn maps(&self, mapped: &BTreeSet<MapMark>) -> bool {
        self.mark.is_some_and(|mark| mapped.contains(&mark))
    }
}
