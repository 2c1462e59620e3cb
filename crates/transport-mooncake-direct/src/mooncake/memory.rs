//! Memory that Mooncake knows, reads into it, and what it may still write.
//!
//! The only module of the engine with `unsafe` code.
#![allow(unsafe_code)]

use std::{
    any::Any,
    ptr::NonNull,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use capture_arena::{Quarantine, RegionPool, Unfinished};
use mooncake_sys::{EngineApi, ReadFailure, ReadPiece, Running, Submission};
use parking_lot::Mutex;
use transport_core::{Error, ErrorKind, RegionMut, Result, SessionName};

use crate::ReadOp;

/// Registrations and quarantine of one engine.
#[derive(Debug)]
pub(super) struct Memory {
    api: Arc<dyn EngineApi>,
    pools: Mutex<Vec<Registration>>,
    adopted: Mutex<Vec<Weak<Registration>>>,
    quarantine: Quarantine<LateRead>,
    registrations: AtomicU64,
}

/// A read that failed.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) op: Option<usize>,
    pub(super) error: Error,
    /// The operations, if nothing is written into them any more.
    pub(super) ops: Option<Vec<ReadOp>>,
}

/// A read that is not over, and its destinations.
struct LateRead {
    running: Box<dyn Running>,
    ops: Vec<ReadOp>,
}

impl Memory {
    pub(super) fn new(api: Arc<dyn EngineApi>) -> Self {
        Self {
            api,
            pools: Mutex::default(),
            adopted: Mutex::default(),
            // What Mooncake has not finished when it goes is written for all that is known.
            quarantine: Quarantine::new(Duration::ZERO),
            registrations: AtomicU64::new(0),
        }
    }

    /// Registers all memory of a pool, once, until the engine goes.
    pub(super) fn register_pool(&self, pool: &RegionPool) -> Result<()> {
        let backing = pool.backing();
        let (start, len) = (backing.address() as usize, backing.bytes_len() as usize);
        if len == 0 || self.knows(start, len) {
            return Ok(());
        }
        let registration = self.register(start, len, Arc::new(backing.clone()))?;
        self.pools.lock().push(registration);
        Ok(())
    }

    /// Registers memory of the caller until its last handle is gone, unless it is known already.
    pub(super) fn adopt(&self, region: RegionMut) -> Result<RegionMut> {
        let (start, len, kind) = (region.address(), region.len(), region.kind());
        if len == 0 || self.knows(start, len) {
            return Ok(region);
        }
        let registration = Arc::new(self.register(start, len, Arc::new(Mutex::new(region)))?);
        let mut adopted = self.adopted.lock();
        adopted.retain(|registration| registration.strong_count() > 0);
        adopted.push(Arc::downgrade(&registration));
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut(start));
        let start = start.expect("a region never starts at 0");
        // SAFETY: the region was the only handle to these bytes; it now lies in the registration,
        // which never touches it, and keeps the bytes allocated.
        Ok(unsafe { RegionMut::from_foreign(start, len, kind, registration) })
    }

    fn register(
        &self,
        start: usize,
        len: usize,
        memory: Arc<dyn Any + Send + Sync>,
    ) -> Result<Registration> {
        self.registrations.fetch_add(1, Ordering::SeqCst);
        Registration::new(&self.api, start, len, memory)
    }

    fn knows(&self, start: usize, len: usize) -> bool {
        self.pools.lock().iter().any(|registration| registration.holds(start, len))
            || self
                .adopted
                .lock()
                .iter()
                .filter_map(Weak::upgrade)
                .any(|registration| registration.holds(start, len))
    }

    /// Fills the destinations of `ops` from one peer. Those of a read that is not over when this
    /// fails go into quarantine; else they come back.
    pub(super) fn read(
        &self,
        peer: &SessionName,
        mut ops: Vec<ReadOp>,
        submission: Submission,
        timeout: Duration,
    ) -> Result<Vec<ReadOp>, Failed> {
        let full = |op: &ReadOp| !op.dst.is_empty();
        let places: Vec<_> = (0..ops.len()).filter(|&i| full(&ops[i])).collect();
        let pieces: Vec<_> = ops
            .iter_mut()
            .filter(|op| !op.dst.is_empty())
            .map(|op| {
                let len = op.dst.len();
                ReadPiece { local: op.dst.as_mut_ptr(), remote: op.address, len }
            })
            .collect();
        // SAFETY: the operations own the only handles to their destinations. They stay here while the
        // call runs, and go into quarantine for as long as something of it is left.
        match unsafe { self.api.read(peer, &pieces, submission, timeout) } {
            Ok(()) => Ok(ops),
            Err(ReadFailure { error, piece, running }) => {
                let op = piece.and_then(|piece| places.get(piece).copied());
                let ops = match running {
                    None => Some(ops),
                    Some(running) => {
                        self.quarantine.keep(LateRead { running, ops });
                        None
                    }
                };
                Err(Failed { op, error, ops })
            }
        }
    }

    /// Gives back what is in quarantine and not written any more.
    pub(super) fn sweep(&self) {
        self.quarantine.sweep();
    }

    /// Bytes in quarantine.
    pub(super) fn quarantined_bytes(&self) -> u64 {
        self.quarantine.bytes()
    }

    /// Registrations ever made.
    pub(super) fn registrations(&self) -> u64 {
        self.registrations.load(Ordering::SeqCst)
    }

    /// Takes back the pools' registrations: before the engine is closed.
    pub(super) fn unregister_pools(&self) {
        if self.quarantined_bytes() == 0 {
            self.pools.lock().clear();
        } // else something may be written still: closing the engine ends it
    }
}

impl Unfinished for LateRead {
    fn is_over(&mut self) -> bool {
        self.running.is_over()
    }

    fn bytes(&self) -> u64 {
        self.ops.iter().map(|op| op.dst.len() as u64).sum()
    }
}

/// Memory known to the engine, until it is dropped.
struct Registration {
    api: Weak<dyn EngineApi>, // an engine that is gone has no registrations
    start: usize,
    len: usize,
    memory: Arc<dyn Any + Send + Sync>,
}

impl Registration {
    /// Registers `len` bytes that stay allocated as long as `memory` lives. If that fails, `memory`
    /// is kept for ever: some of several devices may have it registered all the same.
    fn new(
        api: &Arc<dyn EngineApi>,
        start: usize,
        len: usize,
        memory: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let pointer = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: `memory` keeps the bytes allocated and is kept until after `unregister`. Peers that
        // write into it are Mooncake's, which do so where they are asked to.
        if let Err(error) = unsafe { api.register(&[(pointer, len)]) } {
            std::mem::forget(memory);
            return Err(error.with("bytes", len).remedy(
                "check the limit on locked memory, and that the range is not registered already",
            ));
        }
        Ok(Self { api: Arc::downgrade(api), start, len, memory })
    }

    fn holds(&self, start: usize, len: usize) -> bool {
        let offset = start.checked_sub(self.start);
        offset.is_some_and(|offset| offset <= self.len && len <= self.len - offset)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let Some(api) = self.api.upgrade() else { return };
        let pointer = std::ptr::with_exposed_provenance_mut(self.start);
        // SAFETY: reads name this memory only through regions that keep this registration.
        if let Err(error) = unsafe { api.unregister(&[pointer]) }
            && error.kind() != ErrorKind::Closed
        {
            tracing::warn!(%error, "memory stays registered");
            std::mem::forget(self.memory.clone()); // the engine still knows it
        }
    }
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registration").field("len", &self.len).finish_non_exhaustive()
    }
}
