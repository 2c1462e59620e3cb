//! Reading the device memory of other processes.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use capture_arena::cuda::{CopyOp, Device, DevicePtr};
use parking_lot::Mutex;
use transport_core::{Epoch, Error, ErrorKind, RegionKind, RemoteAddr, Result, SessionName};

use super::{
    CopyLane, CopyPolicy, GatherKernel,
    peers::{Peer, Peers},
};
use crate::{ReadOp, ReadOptions, device::OpenedBlock, tcp::ReadError};

/// Lanes that are kept for the next reads.
const MAX_IDLE_LANES: usize = 8;
/// How long copies that went wrong are waited for when the engine is dropped.
const LAST_WAIT: Duration = Duration::from_secs(2);

/// How a [`CudaEngine`] behaves.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CudaOptions {
    /// What goes through the copy engine, and what through the gather kernel.
    pub policy: CopyPolicy,
    /// For how long the description of a peer that tells no life is trusted; then it is asked
    /// again, and what it has freed is closed. Peers of this library tell their life and are asked
    /// once. Default: 1 second.
    pub trust: Duration,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self { policy: CopyPolicy::default(), trust: Duration::from_secs(1) }
    }
}

/// Reads memory of devices that other processes of the host, or of the NVLink fabric, have shared,
/// into memory of one device. Cheap to clone.
///
/// A block is opened at its first read, read-only where its handle allows that, and stays open for
/// later ones until its peer is forgotten. Every call works on the thread that makes it, on streams
/// that no other call uses meanwhile, and returns when the last byte is there.
#[derive(Clone)]
pub struct CudaEngine(Arc<Inner>);

struct Inner {
    options: CudaOptions,
    kernel: GatherKernel,
    peers: Peers,
    lanes: Mutex<Vec<CopyLane>>,
    stuck: Mutex<Vec<Unfinished>>,
    reads: AtomicU64,
    bytes: AtomicU64,
}

/// What a [`CudaEngine`] has done so far, and has open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaStats {
    /// Ranges read.
    pub reads: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Peers that are known.
    pub peers: u64,
    /// Blocks of peers that are open.
    pub blocks: u64,
    /// Their bytes: memory that a peer cannot give back to its device, even by dying.
    pub block_bytes: u64,
    /// Memory that unfinished copies may still write, in bytes.
    pub quarantined_bytes: u64,
}

/// Copies of one call, with everything that must live until they are done.
struct Batch {
    copies: Vec<CopyOp>,
    ops: Vec<ReadOp>,
    _blocks: Vec<Arc<OpenedBlock>>, // kept for their Drop
}

/// What the device may still use.
struct Unfinished {
    lane: CopyLane, // dropped first: waits
    batch: Batch,
}

impl CudaEngine {
    /// An engine that reads into memory of `device`; loads the gather kernel, which takes the
    /// driver some milliseconds.
    ///
    /// # Errors
    /// As [`GatherKernel::load`] and [`CopyLane::new`].
    pub fn new(device: &Device, options: CudaOptions) -> Result<Self> {
        let kernel = GatherKernel::load(device)?;
        let lane = CopyLane::new(&kernel, options.policy)?;
        Ok(Self(Arc::new(Inner {
            options,
            kernel,
            peers: Peers::default(),
            lanes: Mutex::new(vec![lane]),
            stuck: Mutex::default(),
            reads: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        })))
    }

    /// The device that it reads into.
    pub fn device(&self) -> &Device {
        self.0.kernel.device()
    }

    /// Fills the destination of every operation from the peer at `session`, and gives them back in
    /// order. [`ReadOptions::stop`] is not looked at: a call is over in no time.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfRange`] for a range that leaves the peer's memory, [`ErrorKind::Stale`] if
    /// another life of the peer answers, [`ErrorKind::PeerGone`], [`ErrorKind::Unsupported`] for a
    /// peer whose memory is reached otherwise, [`ErrorKind::InvalidInput`] for destinations that do
    /// not lie on this device: nothing was copied then. [`ErrorKind::Timeout`] and whatever the
    /// device reports: the destinations go back to their owners once the device is done with them.
    pub fn read(
        &self,
        session: &SessionName,
        ops: Vec<ReadOp>,
        options: &ReadOptions,
    ) -> Result<Vec<ReadOp>> {
        self.read_ops(session, ops, options).map_err(|ReadError { op, error }| match op {
            Some(op) => error.with("operation", op),
            None => error,
        })
    }

    pub(crate) fn read_ops(
        &self,
        session: &SessionName,
        ops: Vec<ReadOp>,
        options: &ReadOptions,
    ) -> Result<Vec<ReadOp>, ReadError> {
        let (epoch, deadline) = (options.epoch, options.deadline);
        let peer = self.0.peers.get(session, epoch, self.0.options.trust, deadline)?;
        let batch = self.plan(&peer, ops, deadline)?;
        Ok(self.run(batch, deadline)?)
    }

    /// Checks operations and opens what they read.
    fn plan(&self, peer: &Peer, ops: Vec<ReadOp>, deadline: Instant) -> Result<Batch, ReadError> {
        let own = self.device().region_kind();
        let (mut copies, mut blocks) = (Vec::with_capacity(ops.len()), Vec::new());
        // Most pieces lie where the one before does.
        let mut current: Option<(RemoteAddr, u64, DevicePtr)> = None;
        for (i, ReadOp { address, dst, .. }) in ops.iter().enumerate() {
            let (address, len) = (*address, dst.len() as u64);
            if len == 0 {
                continue;
            }
            let at = |error| ReadError { op: Some(i), error };
            if dst.kind() != own {
                return Err(at(self.not_here(dst.kind())));
            }
            let within = |(base, bytes, start): (RemoteAddr, u64, DevicePtr)| {
                let offset = address.0.checked_sub(base.0)?;
                (offset <= bytes && len <= bytes - offset).then(|| start.offset(offset))
            };
            let src = match current.and_then(within) {
                Some(src) => src,
                None => {
                    let block = peer.block(self.device(), address, len, deadline).map_err(at)?;
                    let src = block.locate(address, len).map_err(at)?;
                    current = Some((block.base(), block.bytes(), block.memory().address()));
                    if !blocks.iter().any(|known| Arc::ptr_eq(known, &block)) {
                        blocks.push(block);
                    }
                    src
                }
            };
            copies.push(CopyOp { dst: DevicePtr(dst.address() as u64), src, len });
        }
        Ok(Batch { copies, ops, _blocks: blocks })
    }

    fn run(&self, batch: Batch, deadline: Instant) -> Result<Vec<ReadOp>> {
        self.reap();
        if batch.copies.is_empty() {
            return Ok(batch.ops);
        }
        let lane = self.0.lanes.lock().pop();
        let mut lane = match lane {
            Some(lane) => lane,
            None => CopyLane::new(&self.0.kernel, self.0.options.policy)?,
        };
        // SAFETY: the sources are mapped as long as the batch has their blocks. The destinations
        // are the batch's alone, so that they overlap with nothing; they and the blocks are kept
        // until the lane says that it is over. Peers do not write what they have published.
        let started = unsafe { lane.start(&batch.copies, deadline) };
        match (started, lane.finish(deadline)) {
            (Ok(()), Ok(())) => {
                self.give_back(lane);
                self.0.reads.fetch_add(batch.copies.len() as u64, Ordering::Relaxed);
                self.0.bytes.fetch_add(batch.bytes(), Ordering::Relaxed);
                Ok(batch.ops)
            }
            (started, Err(error)) if error.kind() == ErrorKind::Timeout => {
                self.0.stuck.lock().push(Unfinished { lane, batch });
                Err(started.err().unwrap_or(error))
            }
            // Nothing runs any more. The lane's streams may be in an error; it is not used again.
            (started, finished) => {
                drop(lane);
                Err(started.and(finished).expect_err("one of them failed"))
            }
        }
    }

    /// Where `len` bytes at `address` of the peer at `session` are in this process; opens the block
    /// if need be. The address is good for as long as the peer is not forgotten.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn locate(
        &self,
        session: &SessionName,
        address: RemoteAddr,
        len: u64,
        options: &ReadOptions,
    ) -> Result<DevicePtr> {
        let (trust, deadline) = (self.0.options.trust, options.deadline);
        let peer = self.0.peers.get(session, options.epoch, trust, deadline)?;
        peer.block(self.device(), address, len, deadline)?.locate(address, len)
    }

    /// Whether the peer's life is known, so that a read of it opens nothing new.
    pub(crate) fn knows(&self, session: &SessionName, epoch: Option<Epoch>) -> bool {
        self.0.peers.knows(session, epoch)
    }

    /// Closes what is open of peers that `keep` does not want, by session and life. Reads that run
    /// keep theirs until they end.
    pub fn retain(&self, mut keep: impl FnMut(&SessionName, Option<Epoch>) -> bool) {
        self.0.peers.retain(|place| keep(&place.session, place.epoch));
    }

    /// What it has done so far, and has open.
    pub fn stats(&self) -> CudaStats {
        let open = self.0.peers.open();
        CudaStats {
            reads: self.0.reads.load(Ordering::Relaxed),
            bytes: self.0.bytes.load(Ordering::Relaxed),
            peers: open.peers,
            blocks: open.blocks,
            block_bytes: open.bytes,
            quarantined_bytes: self.quarantined_bytes(),
        }
    }

    /// Memory that unfinished copies may still write, in bytes.
    pub fn quarantined_bytes(&self) -> u64 {
        self.reap();
        self.0.stuck.lock().iter().map(|unfinished| unfinished.batch.bytes()).sum()
    }

    fn give_back(&self, lane: CopyLane) {
        let mut lanes = self.0.lanes.lock();
        if lanes.len() < MAX_IDLE_LANES {
            lanes.push(lane);
        }
    }

    /// Lets go of what the device is done with.
    fn reap(&self) {
        let mut stuck = self.0.stuck.lock();
        if stuck.is_empty() {
            return;
        }
        let (over, still): (Vec<_>, Vec<_>) =
            stuck.drain(..).map(Unfinished::look).partition(|(over, _)| *over);
        stuck.extend(still.into_iter().map(|(_, unfinished)| unfinished));
        drop(stuck);
        drop(over); // gives memory back to pools, which have locks of their own
    }

    fn not_here(&self, found: RegionKind) -> Error {
        Error::new(ErrorKind::InvalidInput, "read", "the destination does not lie on this device")
            .with("device", self.device().ordinal())
            .with("found", format_args!("{found:?}"))
            .remedy("read into memory of the engine's device, or make an engine for the other one")
    }
}

impl Batch {
    fn bytes(&self) -> u64 {
        self.copies.iter().map(|copy| copy.len).sum()
    }
}

impl Unfinished {
    /// Whether the device is done with it; a fault ends everything, too.
    fn look(mut self) -> (bool, Self) {
        let waited = self.lane.finish(Instant::now());
        (!waited.is_err_and(|error| error.kind() == ErrorKind::Timeout), self)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let deadline = Instant::now() + LAST_WAIT;
        for mut unfinished in self.stuck.get_mut().drain(..) {
            let waited = unfinished.lane.finish(deadline);
            if waited.is_err_and(|error| error.kind() == ErrorKind::Timeout) {
                // The device may write this memory until the process ends: it is never freed.
                std::mem::forget(unfinished);
            }
        }
    }
}

impl fmt::Debug for CudaEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaEngine")
            .field("device", self.device())
            .field("options", &self.0.options)
            .field("stats", &self.stats())
            .finish()
    }
}
