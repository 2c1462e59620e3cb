//! Registered memory: the pool, regions of the caller, and what is out of use for good.

use std::{
    any::Any,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use capture_arena::{Backing, RegionPool};
use mooncake_sys::StoreApi;
use parking_lot::Mutex;
use transport_core::{Error, ErrorKind, RegionMut, RegionSlice, Result};

use crate::{
    StoreConfig,
    device::DeviceMemory,
    io::{Registration, rewrap},
    workers::Flight,
};

/// How often a full pool is looked at again.
const POLL: Duration = Duration::from_millis(1);

/// All memory that the store's engine knows.
#[derive(Debug)]
pub(crate) struct Memory {
    api: Arc<dyn StoreApi>,
    device: Option<DeviceMemory>, // which copies from and to the pool
    limit: u64,
    step: u64,
    pools: Mutex<Vec<Chunk>>,
    adopted: Mutex<Vec<Weak<Registration>>>,
    quarantine: Mutex<Vec<RegionMut>>,
    quarantined: AtomicU64,
    registrations: AtomicU64,
}

#[derive(Debug)]
struct Chunk {
    pool: RegionPool,
    registration: Registration,
    lock: Option<Arc<dyn Any + Send + Sync>>, // for the device
}

impl Chunk {
    fn take(&self, len: usize) -> Result<RegionMut> {
        let region = self.pool.take(len)?;
        // A copy that is not waited for needs the lock as long as the memory.
        Ok(match &self.lock {
            Some(lock) => region.keeping(lock.clone()),
            None => region,
        })
    }
}

impl Memory {
    pub(crate) fn new(
        api: Arc<dyn StoreApi>,
        config: &StoreConfig,
        device: Option<DeviceMemory>,
    ) -> Result<Self> {
        let memory = Self {
            api,
            device,
            limit: config.pool.get(),
            step: config.pool_step.get(),
            pools: Mutex::default(),
            adopted: Mutex::default(),
            quarantine: Mutex::default(),
            quarantined: AtomicU64::new(0),
            registrations: AtomicU64::new(0),
        };
        if config.prewarm.get() > 0 {
            memory.grow(&mut memory.pools.lock(), config.prewarm.get())?;
        }
        Ok(memory)
    }

    /// The device whose memory is taken beside the host's.
    pub(crate) fn device(&self) -> Option<&DeviceMemory> {
        self.device.as_ref()
    }

    /// Takes `len` bytes of the pool; waits for room as long as the flight lasts.
    pub(crate) fn take(&self, len: usize, flight: &Flight) -> Result<RegionMut> {
        wait_for_room(flight, || self.try_take(len))
    }

    /// Takes a region of each length, all or none, so that two calls that need more never wait for
    /// each other; waits as [`Self::take`]. Fails with the place of the length that there is no room
    /// for.
    pub(crate) fn take_all(
        &self,
        lens: &[usize],
        flight: &Flight,
    ) -> Result<Vec<RegionMut>, (usize, Error)> {
        let mut refused = 0;
        let mut take = || {
            self.try_take_all(lens).map_err(|(place, error)| {
                refused = place;
                error
            })
        };
        let taken = wait_for_room(flight, &mut take);
        taken.map_err(|error| (refused, error))
    }

    /// As [`Self::take_all`], without waiting.
    pub(crate) fn try_take_all(&self, lens: &[usize]) -> Result<Vec<RegionMut>, (usize, Error)> {
        let take = |(i, &len)| self.try_take(len).map_err(|error| (i, error));
        lens.iter().enumerate().map(take).collect()
    }

    /// Half of what the pool may have: what is only on its way takes no more at a time, so that the
    /// next part finds room.
    pub(crate) fn half(&self) -> u64 {
        self.limit / 2
    }

    /// Takes `len` bytes of the pool, which grows if it may.
    pub(crate) fn try_take(&self, len: usize) -> Result<RegionMut> {
        if len == 0 {
            return RegionMut::zeroed(0);
        }
        let mut chunks = self.pools.lock();
        for chunk in chunks.iter().rev() {
            if let Ok(region) = chunk.take(len) {
                return Ok(region);
            }
        }
        let bytes = |chunks: &[Chunk]| chunks.iter().map(|c| c.pool.stats().capacity).sum::<u64>();
        let need = (len as u64).next_multiple_of(capture_arena::UNIT);
        let idle = |chunk: &Chunk| chunk.pool.stats().live_regions == 0;
        let idle_bytes: u64 =
            chunks.iter().filter(|c| idle(c)).map(|c| c.pool.stats().capacity).sum();
        let mut room = self.limit - bytes(&chunks).min(self.limit);
        if need > room && need <= room.saturating_add(idle_bytes) {
            // What was made for smaller regions, and is not in use, makes way for a larger one.
            chunks.retain(|chunk| !idle(chunk));
            room = self.limit - bytes(&chunks).min(self.limit);
        }
        if need > room {
            let free: u64 = chunks.iter().map(|c| c.pool.stats().free).sum();
            drop(chunks);
            let error = Error::new(
                ErrorKind::CapacityExceeded,
                "take registered memory",
                "the pool is full",
            )
            .with("requested_bytes", len)
            .with("pool_bytes", self.limit)
            .with("free_bytes", free)
            .with("quarantined_bytes", self.quarantined_bytes())
            .remedy("make the pool larger, or drop fetched samples sooner");
            return Err(match need > self.limit {
                true => error.status(transport_core::ErrorStatus::Permanent),
                false => error,
            });
        }
        self.grow(&mut chunks, self.step.clamp(need, room.max(need)))?;
        let newest = chunks.last().expect("just grown");
        newest.take(len)
    }

    fn grow(&self, chunks: &mut Vec<Chunk>, bytes: u64) -> Result<()> {
        let backing = Backing::heap(bytes)?;
        let (start, len) = (backing.address() as usize, backing.bytes_len() as usize);
        let registration = self.register(start, len, Arc::new(backing.clone()))?;
        let lock = self.device.as_ref().map(|device| device.lock(&backing)).transpose()?;
        let pool = RegionPool::new(backing)?;
        chunks.push(Chunk { pool, registration, lock });
        tracing::debug!(bytes = len, "registered pool memory");
        Ok(())
    }

    fn register(
        &self,
        start: usize,
        len: usize,
        owner: Arc<dyn std::any::Any + Send + Sync>,
    ) -> Result<Registration> {
        self.registrations.fetch_add(1, Ordering::SeqCst);
        Registration::new(&self.api, start, len, owner)
    }

    /// Registers memory of the caller until its last handle is gone.
    pub(crate) fn adopt(&self, region: RegionMut) -> Result<RegionMut> {
        if !region.kind().is_host() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "register memory",
                "the store transport takes host memory only",
            ));
        }
        if region.is_empty() || self.knows(region.address(), region.len()) {
            return Ok(region);
        }
        rewrap(region, |region| {
            let (start, len) = (region.address(), region.len());
            let registration = Arc::new(self.register(start, len, Arc::new(region))?);
            let mut adopted = self.adopted.lock();
            adopted.retain(|r| r.strong_count() > 0);
            adopted.push(Arc::downgrade(&registration));
            Ok(registration)
        })
    }

    /// Whether the engine knows all of these bytes.
    pub(crate) fn knows(&self, start: usize, len: usize) -> bool {
        let holds = |(from, size): (usize, usize)| {
            start >= from && start - from <= size && len <= size - (start - from)
        };
        self.pools.lock().iter().any(|c| holds(c.registration.range()))
            || self.adopted.lock().iter().filter_map(Weak::upgrade).any(|r| holds(r.range()))
    }

    /// Copies of several times slices, each time one after the other, in registered memory: all or
    /// none. What lies on the device is copied by it, beside the rest.
    pub(crate) fn gather(
        &self,
        objects: &[&[RegionSlice]],
        flight: &Flight,
    ) -> Result<Vec<RegionSlice>> {
        let len = |slices: &&[RegionSlice]| slices.iter().map(RegionSlice::len).sum();
        let lens: Vec<usize> = objects.iter().map(len).collect();
        let regions = self.take_all(&lens, flight).map_err(|(_, error)| error)?;
        let mut pieces: Vec<(&RegionSlice, Option<RegionMut>)> = Vec::new();
        for (mut rest, slices) in regions.into_iter().zip(objects) {
            for slice in *slices {
                let (piece, tail) = rest.split_at(slice.len()).expect("as long as all slices");
                pieces.push((slice, Some(piece)));
                rest = tail;
            }
        }
        let to_device = pieces.iter_mut().filter(|(slice, _)| !slice.kind().is_host());
        let across: Vec<_> =
            to_device.filter_map(|(slice, piece)| Some((slice.clone(), piece.take()?))).collect();
        let crossing = match &self.device {
            Some(device) if !across.is_empty() => Some(device.begin(across)?),
            _ => None,
        };
        for (slice, piece) in &mut pieces {
            if let (Some(bytes), Some(piece)) = (slice.as_bytes(), piece) {
                piece.as_mut_bytes().expect("the pool is host memory").copy_from_slice(bytes);
            }
        }
        let arrived = crossing.map(|crossing| crossing.finish(flight.deadline())).transpose()?;
        let mut arrived = arrived.into_iter().flatten();
        let mut pieces = pieces.into_iter().map(|(_, piece)| {
            piece.or_else(|| arrived.next()).expect("what lies elsewhere is refused before")
        });
        let mut whole = |slices: &&[RegionSlice]| joined(pieces.by_ref().take(slices.len()));
        objects.iter().map(|slices| Ok(whole(slices)?.freeze())).collect()
    }

    /// Keeps a region that a peer may still write until the client is closed.
    pub(crate) fn quarantine(&self, region: RegionMut) {
        self.quarantined.fetch_add(region.len() as u64, Ordering::SeqCst);
        self.quarantine.lock().push(region);
    }

    /// Gives quarantined memory back. The client is closed: nothing writes any more.
    pub(crate) fn end_quarantine(&self) {
        let regions = std::mem::take(&mut *self.quarantine.lock());
        for region in regions {
            self.quarantined.fetch_sub(region.len() as u64, Ordering::SeqCst);
            drop(region);
        }
    }

    pub(crate) fn quarantined_bytes(&self) -> u64 {
        self.quarantined.load(Ordering::SeqCst)
    }

    pub(crate) fn registrations(&self) -> u64 {
        self.registrations.load(Ordering::SeqCst)
    }

    pub(crate) fn pool_bytes(&self) -> u64 {
        self.pools.lock().iter().map(|c| c.pool.stats().capacity).sum()
    }
}

/// Tries again and again while the pool is full, as long as the flight lasts.
pub(crate) fn wait_for_room<T>(flight: &Flight, mut take: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match take() {
            Err(error) if error.kind() == ErrorKind::CapacityExceeded && error.is_temporary() => {
                if flight.pause(POLL).is_err() {
                    return Err(error);
                }
            }
            other => return other,
        }
    }
}

/// Regions that were one, as one again.
pub(crate) fn joined(mut parts: impl Iterator<Item = RegionMut>) -> Result<RegionMut> {
    let Some(first) = parts.next() else { return RegionMut::zeroed(0) };
    parts.try_fold(first, RegionMut::join).map_err(|_| {
        let why = "who had pieces of a region gave other memory back";
        Error::new(ErrorKind::Unexpected, "put memory together", why)
    })
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Without a close the client may live on elsewhere: what its peers may write is not freed.
        for region in self.quarantine.lock().drain(..) {
            std::mem::forget(region);
        }
    }
}
