//! Registered memory: the pool, regions of the caller, and what is out of use for good.

use std::{
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
    io::{Registration, rewrap},
    workers::Flight,
};

/// How often a full pool is looked at again.
const POLL: Duration = Duration::from_millis(1);

/// All memory that the store's engine knows.
#[derive(Debug)]
pub(crate) struct Memory {
    api: Arc<dyn StoreApi>,
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
}

impl Memory {
    pub(crate) fn new(api: Arc<dyn StoreApi>, config: &StoreConfig) -> Result<Self> {
        let memory = Self {
            api,
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

    /// Takes `len` bytes of the pool; waits for room as long as the flight lasts.
    pub(crate) fn take(&self, len: usize, flight: &Flight) -> Result<RegionMut> {
        loop {
            match self.try_take(len) {
                Err(error)
                    if error.kind() == ErrorKind::CapacityExceeded && error.is_temporary() =>
                {
                    if flight.pause(POLL).is_err() {
                        return Err(error);
                    }
                }
                other => return other,
            }
        }
    }

    /// Takes `len` bytes of the pool, which grows if it may.
    pub(crate) fn try_take(&self, len: usize) -> Result<RegionMut> {
        if len == 0 {
            return RegionMut::zeroed(0);
        }
        let mut chunks = self.pools.lock();
        for chunk in chunks.iter().rev() {
            if let Ok(region) = chunk.pool.take(len) {
                return Ok(region);
            }
        }
        let have: u64 = chunks.iter().map(|c| c.pool.stats().capacity).sum();
        let room = self.limit - have.min(self.limit);
        let need = (len as u64).next_multiple_of(capture_arena::UNIT);
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
        newest.pool.take(len)
    }

    fn grow(&self, chunks: &mut Vec<Chunk>, bytes: u64) -> Result<()> {
        let backing = Backing::heap(bytes)?;
        let (start, len) = (backing.address() as usize, backing.bytes_len() as usize);
        let registration = self.register(start, len, Arc::new(backing.clone()))?;
        let pool = RegionPool::new(backing)?;
        chunks.push(Chunk { pool, registration });
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

    /// A copy of slices, one after the other, in registered memory.
    pub(crate) fn gather(&self, slices: &[RegionSlice], flight: &Flight) -> Result<RegionSlice> {
        let len = slices.iter().map(RegionSlice::len).sum();
        let mut region = self.take(len, flight)?;
        let mut rest = region.as_mut_bytes().expect("the pool is host memory");
        for slice in slices {
            let bytes = slice.as_bytes().expect("device memory is refused before");
            let (head, tail) = rest.split_at_mut(bytes.len());
            head.copy_from_slice(bytes);
            rest = tail;
        }
        Ok(region.freeze())
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

impl Drop for Memory {
    fn drop(&mut self) {
        // Without a close the client may live on elsewhere: what its peers may write is not freed.
        for region in self.quarantine.lock().drain(..) {
            std::mem::forget(region);
        }
    }
}
