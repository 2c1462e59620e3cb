//! Counters.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What a [`RolloutTransport`](super::RolloutTransport) has done so far. Bytes are of encoded data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct RolloutStats {
    /// Rollouts put.
    pub puts: u64,
    /// Bytes gathered by puts: the one copy.
    pub gathered_bytes: u64,
    /// Rollouts read: as a whole, by field or by row.
    pub gets: u64,
    /// Bytes that gets found where the publisher put them.
    pub viewed_bytes: u64,
    /// Bytes that gets had moved.
    pub fetched_bytes: u64,
    /// Bytes that gets found at hand, in this process or on this host.
    pub shared_bytes: u64,
    /// Ranges that gets of some rows or fields were joined to.
    pub ranges: u64,
    /// Times that such ranges were read in one piece, because they lay close together.
    pub bulk_reads: u64,
    /// Bytes that were copied once more than they had to be.
    pub copied_bytes: u64,
    /// Rollouts put here that were not cleaned up here.
    pub outstanding: i64,
    /// Rollouts of which there are views in this process.
    pub leased: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    puts: AtomicU64,
    gathered: AtomicU64,
    gets: AtomicU64,
    viewed: AtomicU64,
    fetched: AtomicU64,
    shared: AtomicU64,
    ranges: AtomicU64,
    bulk_reads: AtomicU64,
    copied: AtomicU64,
    cleaned: AtomicU64,
}

impl Counters {
    pub(super) fn put(&self) {
        self.puts.fetch_add(1, Relaxed);
    }

    pub(super) fn gathered(&self, bytes: u64) {
        self.gathered.fetch_add(bytes, Relaxed);
    }

    pub(super) fn got(&self) {
        self.gets.fetch_add(1, Relaxed);
    }

    pub(super) fn viewed(&self, bytes: u64) {
        self.viewed.fetch_add(bytes, Relaxed);
    }

    pub(super) fn fetched(&self, bytes: u64) {
        self.fetched.fetch_add(bytes, Relaxed);
    }

    pub(super) fn shared(&self, bytes: u64) {
        self.shared.fetch_add(bytes, Relaxed);
    }

    pub(super) fn ranges(&self, ranges: u64, in_bulk: bool) {
        self.ranges.fetch_add(ranges, Relaxed);
        self.bulk_reads.fetch_add(in_bulk.into(), Relaxed);
    }

    pub(super) fn copied(&self, bytes: u64) {
        self.copied.fetch_add(bytes, Relaxed);
    }

    pub(super) fn cleaned(&self, rollouts: u64) {
        self.cleaned.fetch_add(rollouts, Relaxed);
    }

    pub(super) fn read(&self, leased: u64) -> RolloutStats {
        let puts = self.puts.load(Relaxed);
        RolloutStats {
            puts,
            gathered_bytes: self.gathered.load(Relaxed),
            gets: self.gets.load(Relaxed),
            viewed_bytes: self.viewed.load(Relaxed),
            fetched_bytes: self.fetched.load(Relaxed),
            shared_bytes: self.shared.load(Relaxed),
            ranges: self.ranges.load(Relaxed),
            bulk_reads: self.bulk_reads.load(Relaxed),
            copied_bytes: self.copied.load(Relaxed),
            outstanding: puts as i64 - self.cleaned.load(Relaxed) as i64,
            leased,
        }
    }
}
