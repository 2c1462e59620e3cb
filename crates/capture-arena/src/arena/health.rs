//! What an arena measures of itself, and what it says when there is no room.

use std::time::{Duration, Instant};

use transport_core::{Error, ErrorKind, ErrorStatus, Health};

use super::{CaptureArena, State};
use crate::suballoc::{SubAllocator, UNIT};

/// Context of the error for a batch that would have had room, and was not looked at before its
/// deadline because others waited before it: how many.
pub const BATCHES_BEFORE: &str = "batches_before";

/// Holders named in a diagnosis.
const OLDEST: usize = 3;
/// Objects that even the smallest arena takes.
const MIN_OBJECTS: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) resident_samples: u64,
    pub(super) resident_objects: u64,
    pub(super) resident_bytes: u64,
    pub(super) draining_objects: u64,
    pub(super) reserved_samples: u64,
    pub(super) reserved_bytes: u64,
    pub(super) published_samples: u64,
    pub(super) released_samples: u64,
    pub(super) duplicate_frees: u64,
    pub(super) stale_frees: u64,
    pub(super) lease_expired_samples: u64,
}

/// State of an arena at one moment. Bytes unless the name says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaHealth {
    /// Published samples whose memory has not come back; draining ones count.
    pub resident_samples: u64,
    /// Their objects.
    pub resident_objects: u64,
    /// Bytes of their tensors.
    pub resident_bytes: u64,
    /// Samples that are being filled.
    pub reserved_samples: u64,
    /// Ranges of samples that are being filled.
    pub reserved_bytes: u64,
    /// Size of the arena.
    pub arena_bytes: u64,
    /// Free bytes.
    pub arena_free_bytes: u64,
    /// Longest free range.
    pub arena_largest_free: u64,
    /// Number of free ranges.
    pub arena_free_ranges: u64,
    /// Samples ever published.
    pub published_samples: u64,
    /// Samples whose memory ever came back.
    pub released_samples: u64,
    /// Frees of objects that were already gone.
    pub duplicate_frees: u64,
    /// Frees of an older life of an object that lives on.
    pub stale_frees: u64,
    /// Samples that came back because their holder fell silent.
    pub lease_expired_samples: u64,
    /// Objects that are freed, but still held or being read.
    pub draining_objects: u64,
    /// Batches that wait for room.
    pub waiting_batches: u64,
    /// Clients that are connected, or were within their lease.
    pub clients: u64,
    /// Clients that have been silent for their lease, or said goodbye, but still map the arena, and
    /// so keep what they hold.
    pub stalled_clients: u64,
    /// Age of the oldest resident sample.
    pub oldest_age: Option<Duration>,
}

impl From<ArenaHealth> for Health {
    fn from(arena: ArenaHealth) -> Self {
        let mut health = Self::default();
        health.resident_samples = arena.resident_samples;
        health.resident_bytes = arena.resident_bytes;
        health.reserved_bytes = arena.reserved_bytes;
        health.arena_bytes = arena.arena_bytes;
        health.arena_free_bytes = arena.arena_free_bytes;
        health.arena_largest_free = arena.arena_largest_free;
        health.published_samples = arena.published_samples;
        health.released_samples = arena.released_samples;
        health.duplicate_frees = arena.duplicate_frees;
        health.stale_frees = arena.stale_frees;
        health.lease_expired_samples = arena.lease_expired_samples;
        health.stalled_clients = arena.stalled_clients;
        health
    }
}

impl CaptureArena {
    /// Measures the arena; what it costs does not depend on how much lives there.
    pub fn health(&self, now: Instant) -> ArenaHealth {
        let (space, counts) = (self.space.report(), &self.counts);
        ArenaHealth {
            resident_samples: counts.resident_samples,
            resident_objects: counts.resident_objects,
            resident_bytes: counts.resident_bytes,
            reserved_samples: counts.reserved_samples,
            reserved_bytes: counts.reserved_bytes,
            arena_bytes: space.capacity,
            arena_free_bytes: space.free,
            arena_largest_free: space.largest,
            arena_free_ranges: space.free_ranges,
            published_samples: counts.published_samples,
            released_samples: counts.released_samples,
            duplicate_frees: counts.duplicate_frees,
            stale_frees: counts.stale_frees,
            lease_expired_samples: counts.lease_expired_samples,
            draining_objects: counts.draining_objects,
            waiting_batches: self.waiting.len() as u64,
            clients: self.clients.len() as u64,
            stalled_clients: self.clients.stalled(),
            oldest_age: self
                .oldest
                .since(&self.samples)
                .map(|at| now.saturating_duration_since(at)),
        }
    }

    /// Objects that may live at once. Those with bytes are bounded by their ranges; without this
    /// bound those without would not be bounded at all.
    pub(super) fn max_objects(&self) -> usize {
        MIN_OBJECTS.max(usize::try_from(self.space.report().capacity / UNIT).unwrap_or(usize::MAX))
    }

    /// Says that `requested` bytes in so many objects did not fit in time, what is free, and who is
    /// in the way.
    pub(super) fn no_room(
        &self,
        requested: u64,
        objects: usize,
        waited: Duration,
        now: Instant,
    ) -> Error {
        let space = self.space.report();
        let what = if self.objects.len() + objects > self.max_objects() {
            format!("no room in the arena for {objects} more objects")
        } else {
            format!("no room in the arena for {requested} bytes")
        };
        let error = Error::new(ErrorKind::CapacityExceeded, "reserve", what)
            .with("objects", self.objects.len())
            .with("max_objects", self.max_objects())
            .with("requested_bytes", requested)
            .with("free_bytes", space.free)
            .with("largest_range", space.largest)
            .with("arena_bytes", space.capacity)
            .with("waited_ms", waited.as_millis());
        let oldest = self.oldest(now);
        let error = if oldest.is_empty() { error } else { error.with("oldest", oldest.join("; ")) };
        error.remedy("use a larger arena, or a lower watermark: release samples sooner")
    }

    /// Says that a batch which would fit was not looked at in time: others are before it.
    pub(super) fn not_its_turn(&self, requested: u64, before: usize, waited: Duration) -> Error {
        let why = "batches that came before wait for room, and none overtakes them";
        let space = self.space.report();
        Error::new(ErrorKind::Busy, "reserve", why)
            .with(BATCHES_BEFORE, before)
            .with("requested_bytes", requested)
            .with("free_bytes", space.free)
            .with("largest_range", space.largest)
            .with("waited_ms", waited.as_millis())
            .remedy("wait for longer, or ask again later")
    }

    /// Says that a batch does not fit an empty arena either; waiting would not help.
    pub(super) fn never_fits(&self, requested: u64, objects: usize) -> Error {
        let capacity = self.space.report().capacity;
        let what = if requested > capacity {
            format!("{requested} bytes can never fit in an arena of {capacity} bytes")
        } else {
            format!("{objects} objects can never fit in this arena")
        };
        Error::new(ErrorKind::CapacityExceeded, "reserve", what)
            .status(ErrorStatus::Permanent)
            .with("requested_bytes", requested)
            .with("arena_bytes", capacity)
            .with("requested_objects", objects)
            .with("max_objects", self.max_objects())
            .remedy("use a larger arena, or fewer or shorter samples in a batch")
    }

    /// The oldest samples by one of their keys, with age and holders.
    fn oldest(&self, now: Instant) -> Vec<String> {
        let mut oldest: Vec<(Instant, u32, &super::Object)> = Vec::with_capacity(OLDEST + 1);
        for (_, object) in &self.objects {
            if oldest.iter().any(|(_, sample, _)| *sample == object.sample) {
                continue;
            }
            let since = self.samples[object.sample as usize].since;
            let at = oldest.partition_point(|(earlier, ..)| *earlier <= since);
            oldest.insert(at, (since, object.sample, object));
            oldest.truncate(OLDEST);
        }
        let describe = |(since, _, object): (Instant, u32, &super::Object)| {
            let names: Vec<String> = object
                .holders
                .active_clients()
                .map(|c| match self.clients.name(c) {
                    Some(name) if self.clients.is_stalled(c) => {
                        format!("{name}, which is silent but maps the arena,")
                    }
                    Some(name) => name.to_string(),
                    None => "a client that is gone".into(),
                })
                .collect();
            let who = match (object.state, names.is_empty()) {
                (State::Filling, _) => "being filled".into(),
                (State::Read, _) => "freed, being read".into(),
                (_, true) => "held by nobody, not freed".into(),
                (_, false) => format!("held by {}", names.join(" and ")),
            };
            let age = now.saturating_duration_since(since).as_secs_f64();
            format!("{} ({age:.1} s, {who})", object.key)
        };
        oldest.into_iter().map(describe).collect()
    }
}
