//! What a control listener has seen.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// What a [`ControlServer`](super::ControlServer) has seen so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ControlServerStats {
    /// Connections at the moment.
    pub connections: u64,
    /// Clients that have said who they are, at the moment.
    pub clients: u64,
    /// Lines taken.
    pub lines: u64,
    /// Keys and objects whose free was passed on.
    pub freed_keys: u64,
    /// Lines that were no request.
    pub bad_lines: u64,
    /// Lines without the right to be obeyed, or for another life of the server.
    pub refused_lines: u64,
    /// Lines whose end never came.
    pub cut_lines: u64,
    /// Connections closed for what their peer did.
    pub closed_for_cause: u64,
    /// Connections turned away: not on the list, or one too many.
    pub refused_connections: u64,
    /// The newest failure.
    pub last_error: Option<String>,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) connections: AtomicU64,
    pub(super) clients: AtomicU64,
    pub(super) lines: AtomicU64,
    pub(super) freed_keys: AtomicU64,
    pub(super) bad_lines: AtomicU64,
    pub(super) refused_lines: AtomicU64,
    pub(super) cut_lines: AtomicU64,
    pub(super) closed_for_cause: AtomicU64,
    pub(super) refused_connections: AtomicU64,
    pub(super) last_error: Mutex<Option<String>>,
}

impl Counters {
    pub(super) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    pub(super) fn stats(&self) -> ControlServerStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ControlServerStats {
            connections: get(&self.connections),
            clients: get(&self.clients),
            lines: get(&self.lines),
            freed_keys: get(&self.freed_keys),
            bad_lines: get(&self.bad_lines),
            refused_lines: get(&self.refused_lines),
            cut_lines: get(&self.cut_lines),
            closed_for_cause: get(&self.closed_for_cause),
            refused_connections: get(&self.refused_connections),
            last_error: self.last_error.lock().clone(),
        }
    }
}
