//! What calls on samples give back.

use std::ops::Deref;

use transport_core::Fetched;

use super::LeaseToken;
#[cfg(doc)]
use super::Samples;

/// One sample as read, and the lease under which it is.
#[derive(Debug)]
pub struct Leased {
    /// What was read.
    pub fetched: Fetched,
    /// Ends the lease; see [`Samples::release`].
    pub token: LeaseToken,
}

impl Deref for Leased {
    type Target = Fetched;

    fn deref(&self) -> &Fetched {
        &self.fetched
    }
}

/// What a call that frees came to, in samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Freed {
    /// Freed by this call, confirmed by their servers as far as those confirm anything.
    pub freed: u64,
    /// Gone before: the servers or this store did not know them any more.
    pub already_gone: u64,
    /// Freed here, and not yet on their servers; tried again later.
    pub pending: u64,
}

impl Freed {
    pub(super) fn add(&mut self, other: Self) {
        self.freed += other.freed;
        self.already_gone += other.already_gone;
        self.pending += other.pending;
    }
}

/// What [`Samples::gc`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Collected {
    /// Samples freed because nobody had read them for too long.
    pub force_freed: u64,
    /// Their bytes.
    pub force_freed_bytes: u64,
    /// Leases that ended because their time was over.
    pub expired_leases: u64,
    /// Frees that are still not confirmed.
    pub release_pending: u64,
}

/// What a [`Samples`] counts.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct SampleHealth {
    /// Samples adopted and not freed.
    pub resident_samples: u64,
    /// Their bytes.
    pub resident_bytes: u64,
    /// The hard cap on them.
    pub max_resident_bytes: Option<u64>,
    /// Samples asked for whose answer has not come.
    pub provisional: u64,
    /// Leases that have not ended.
    pub active_leases: u64,
    /// Frees that are not confirmed.
    pub release_pending: u64,
    /// Samples ever adopted.
    pub adopted: u64,
    /// Samples ever freed, each once, confirmed.
    pub freed: u64,
    /// Frees of samples that were gone before.
    pub already_gone: u64,
    /// Samples freed by [`Samples::gc`].
    pub force_freed: u64,
    /// Freed samples that are remembered.
    pub remembered: u64,
    /// Age of the oldest resident sample, in seconds.
    pub oldest_age_s: f64,
}
