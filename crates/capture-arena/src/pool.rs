//! Registered receive and buffer memory: regions that go back to their pool when dropped.

use std::{fmt, sync::Arc};

use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;
use transport_core::{ArenaOffset, Error, ErrorKind, RegionMut, Result};

use crate::{
    Backing,
    fit::FitSubAllocator,
    suballoc::{ArenaRange, NoRoom, NoRoomCause, SubAllocator},
};

/// Hands out regions of one block of memory. Cheap to clone.
///
/// A region's place is taken until the last handle made from it (also frozen, sliced or split) is
/// dropped.
#[derive(Clone)]
pub struct RegionPool(Arc<Pool>);

struct Pool {
    backing: Backing,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    space: FitSubAllocator,
    stats: PoolStats,
}

/// State of a pool. Bytes unless the name says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Size of the pool.
    pub capacity: u64,
    /// Free bytes.
    pub free: u64,
    /// Longest free range.
    pub largest: u64,
    /// Regions handed out and not yet back.
    pub live_regions: u64,
    /// Regions ever handed out.
    pub taken: u64,
    /// Requests refused for lack of room.
    pub refused: u64,
    /// Most bytes ever handed out at once, rounded up to 512 a region.
    pub peak: u64,
    /// Memory that an unfinished transfer may still write.
    pub quarantined_bytes: u64,
    /// Regions ever put into quarantine.
    pub quarantined: u64,
}

/// A region that an unfinished transfer may still write: counted, and out of reach. Dropping it,
/// once the transfer is known to be over, gives the region back to its owner.
pub struct Quarantined {
    region: Option<RegionMut>,
    bytes: u64,
    pool: Arc<Pool>,
}

/// Gives the range back with the last handle of its region.
struct Slot {
    range: Option<ArenaRange>,
    pool: Arc<Pool>,
}

impl RegionPool {
    /// A pool over the whole of `backing`.
    pub fn new(backing: Backing) -> Result<Self> {
        let capacity = backing.bytes_len();
        let space = FitSubAllocator::new(capacity).ok_or_else(|| {
            Error::new(ErrorKind::ConfigInvalid, "create pool", "a pool has at most 2 TiB")
                .with("requested", capacity)
        })?;
        let stats = PoolStats { capacity, ..PoolStats::default() };
        let state = Mutex::new(State { space, stats });
        Ok(Self(Arc::new(Pool { backing, state })))
    }

    /// The memory, for registering it once with an engine.
    pub fn backing(&self) -> &Backing {
        &self.0.backing
    }

    /// Takes `len` bytes, which hold whatever was there before. Never waits.
    ///
    /// Fails with [`ErrorKind::CapacityExceeded`], naming what is free.
    pub fn take(&self, len: usize) -> Result<RegionMut> {
        if len == 0 {
            return RegionMut::zeroed(0);
        }
        let mut state = self.0.state.lock();
        let range = match state.space.allocate(len as u64) {
            Ok(range) => range,
            Err(refused) => return Err(Pool::refuse(state, refused)),
        };
        state.count(1);
        drop(state);
        Ok(self.0.region(range))
    }

    /// Takes a region of each length, all or none, and hands them to `each` in order. As
    /// [`Self::take`] for each of them, and cheaper.
    ///
    /// Fails with the place of the length that there is no room for.
    pub fn take_all(
        &self,
        lens: impl IntoIterator<Item = usize>,
        mut each: impl FnMut(RegionMut),
    ) -> Result<(), (usize, Error)> {
        let mut ranges = SmallVec::<[Option<ArenaRange>; 8]>::new();
        let mut state = self.0.state.lock();
        for len in lens {
            ranges.push(match len {
                0 => None,
                _ => match state.space.allocate(len as u64) {
                    Ok(range) => Some(range),
                    Err(refused) => {
                        let at = ranges.len();
                        ranges.into_iter().flatten().for_each(|range| state.space.free(range));
                        return Err((at, Pool::refuse(state, refused)));
                    }
                },
            });
        }
        state.count(ranges.iter().flatten().count() as u64);
        drop(state); // regions take the lock when they are dropped
        for range in ranges {
            each(match range {
                Some(range) => self.0.region(range),
                None => RegionMut::zeroed(0).expect("no bytes are asked for"),
            });
        }
        Ok(())
    }

    /// Puts a region out of reach until the transfer that may still write it is known to be over.
    pub fn quarantine(&self, region: RegionMut) -> Quarantined {
        let bytes = region.len() as u64;
        let mut state = self.0.state.lock();
        state.stats.quarantined += 1;
        state.stats.quarantined_bytes += bytes;
        drop(state);
        Quarantined { region: Some(region), bytes, pool: self.0.clone() }
    }

    /// Measures the pool.
    pub fn stats(&self) -> PoolStats {
        let state = self.0.state.lock();
        let space = state.space.report();
        PoolStats {
            free: space.free,
            largest: space.largest,
            live_regions: space.live_ranges,
            ..state.stats
        }
    }
}

impl Pool {
    fn region(self: &Arc<Self>, range: ArenaRange) -> RegionMut {
        let (offset, len): (ArenaOffset, u64) = (range.offset(), range.len());
        let slot = Slot { range: Some(range), pool: self.clone() };
        self.backing.region(offset, len, Arc::new(slot))
    }

    fn refuse(mut state: MutexGuard<'_, State>, refused: NoRoom) -> Error {
        state.stats.refused += 1;
        let space = state.space.report();
        let quarantined = state.stats.quarantined_bytes;
        drop(state);
        Error::new(ErrorKind::CapacityExceeded, "take region", refused.to_string())
            .with("requested_bytes", refused.requested)
            .with("free_bytes", space.free)
            .with("largest_range", space.largest)
            .with("live_regions", space.live_ranges)
            .with("quarantined_bytes", quarantined)
            .remedy(if refused.cause == NoRoomCause::Ranges {
                "hold fewer regions at a time"
            } else {
                "make the pool larger, or drop fetched samples sooner"
            })
    }
}

impl State {
    /// Counts regions that were handed out.
    fn count(&mut self, regions: u64) {
        let used = self.stats.capacity - self.space.free_bytes();
        self.stats.taken += regions;
        self.stats.peak = self.stats.peak.max(used);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let range = self.range.take().expect("given back once, here");
        self.pool.state.lock().space.free(range);
    }
}

impl Drop for Quarantined {
    fn drop(&mut self) {
        drop(self.region.take()); // takes the pool's lock itself
        self.pool.state.lock().stats.quarantined_bytes -= self.bytes;
    }
}

impl fmt::Debug for RegionPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionPool").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Quarantined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quarantined").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
