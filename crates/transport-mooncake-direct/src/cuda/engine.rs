//! Reading the device memory of other processes.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use capture_arena::{
    Quarantine, Unfinished,
    cuda::{CopyOp, Device, DevicePtr},
};
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
    /// once. At most [`CudaOptions::MAX_TRUST`]. Default: 1 second.
    ///
    /// Within this window a read may still show memory that the peer has freed, or has registered
    /// anew at the same addresses: nothing tells it from what was there before, and no error is
    /// possible. Whoever reads from such peers keeps the ranges registered until the read is over.
    pub trust: Duration,
}

impl CudaOptions {
    /// Longest [`trust`](Self::trust): as long as the default lease of what is published to others.
    pub const MAX_TRUST: Duration = Duration::from_secs(30);
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
    stuck: Quarantine<Stuck>,
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
    ops: Vec<ReadOp>,
    blocks: Vec<Arc<OpenedBlock>>,
}

/// What the device may still use.
struct Stuck {
    lane: CopyLane, // dropped first: waits
    batch: Batch,
}

impl CudaEngine {
    /// An engine that reads into memory of `device`; loads the gather kernel, which takes the
    /// driver some milliseconds.
    ///
    /// # Errors
    /// [`ErrorKind::ConfigInvalid`] for a trust that is too long; as [`GatherKernel::load`] and
    /// [`CopyLane::new`].
    pub fn new(device: &Device, options: CudaOptions) -> Result<Self> {
        if options.trust > CudaOptions::MAX_TRUST {
            let why = "peers that tell no life would be trusted for too long";
            return Err(Error::new(ErrorKind::ConfigInvalid, "make cuda engine", why)
                .with("expected", format_args!("at most {:?}", CudaOptions::MAX_TRUST))
                .with("found", format_args!("{:?}", options.trust))
                .remedy("trust them for a second or so, and keep what they share registered"));
        }
        let kernel = GatherKernel::load(device)?;
        let lane = CopyLane::new(&kernel, options.policy)?;
        Ok(Self(Arc::new(Inner {
            options,
            kernel,
            peers: Peers::default(),
            lanes: Mutex::new(vec![lane]),
            stuck: Quarantine::new(LAST_WAIT),
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
    /// not lie on this device, [`ErrorKind::Timeout`], and whatever the device reports. Parts may
    /// have been copied then; the destinations go back to their owners once the device is done with
    /// them.
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
        self.0.stuck.sweep();
        let idle = self.0.lanes.lock().pop();
        let mut lane = match idle {
            Some(lane) => lane,
            None => CopyLane::new(&self.0.kernel, self.0.options.policy)?,
        };
        let mut batch = Batch { ops, blocks: Vec::new() };
        let started = self.start(&mut lane, &peer, &mut batch, deadline);
        match (started, lane.finish(deadline)) {
            (Ok((pieces, bytes)), Ok(())) => {
                self.give_back(lane);
                self.0.reads.fetch_add(pieces, Ordering::Relaxed);
                self.0.bytes.fetch_add(bytes, Ordering::Relaxed);
                Ok(batch.ops)
            }
            (started, Err(error)) if error.kind() == ErrorKind::Timeout => {
                self.0.stuck.keep(Stuck { lane, batch });
                Err(started.err().unwrap_or(error.into()))
            }
            // A range was refused; what ran has ended well.
            (Err(refused @ ReadError { op: Some(_), .. }), Ok(())) => {
                self.give_back(lane);
                Err(refused)
            }
            // Nothing runs any more. The lane's streams may be in an error; it is not used again.
            (Err(failed), _) => Err(failed),
            (Ok(_), Err(failed)) => Err(failed.into()),
        }
    }

    /// Checks the operations, opens what they read, and starts copying; how many pieces and bytes
    /// those are. One pass, since looking at
    /// thousands of small pieces takes as long as the device needs to copy a part of them.
    fn start(
        &self,
        lane: &mut CopyLane,
        peer: &Peer,
        batch: &mut Batch,
        deadline: Instant,
    ) -> Result<(u64, u64), ReadError> {
        let own = self.device().region_kind();
        let _bound = self.device().bind()?; // once for all calls
        let policy = *lane.policy();
        let mut writer = lane.begin(batch.ops.len(), deadline)?;
        let (mut pieces, mut bytes) = (0, 0);
        // Most pieces lie where the one before does.
        let mut current =
            Place { base: RemoteAddr(0), bytes: 0, start: DevicePtr(0), copy_from: 0 };
        let Batch { ops, blocks } = batch;
        let mut i = 0;
        while i < ops.len() {
            let place = current;
            let run = ops[i..].iter().map_while(move |ReadOp { address, dst, .. }| {
                let len = dst.len() as u64;
                let is_usual = len > 0 && len < place.copy_from && dst.kind() == own;
                let src = place.locate(*address, len).filter(|_| is_usual)?;
                Some(CopyOp { dst: DevicePtr(dst.address() as u64), src, len })
            });
            // SAFETY: the source is mapped as long as the batch has its block. The destination is
            // the batch's alone, so that it overlaps with nothing; the batch is kept until the lane
            // says that it is over. Peers do not write what they have published.
            let (taken, taken_bytes) = unsafe { writer.add_run(run) };
            (i, pieces, bytes) = (i + taken, pieces + taken as u64, bytes + taken_bytes);
            let Some(ReadOp { address, dst, .. }) = ops.get(i) else { break };
            let (op, len) = (Some(i), dst.len() as u64);
            let at = |error| ReadError { op, error };
            i += 1;
            if len == 0 {
                continue;
            }
            if dst.kind() != own {
                return Err(at(self.not_here(dst.kind())));
            }
            let src = match current.locate(*address, len) {
                Some(src) => src,
                None => {
                    let block = peer.block(self.device(), *address, len, deadline).map_err(at)?;
                    let src = block.locate(*address, len).map_err(at)?;
                    current = Place::of(&block, &policy);
                    if !blocks.iter().any(|known| Arc::ptr_eq(known, &block)) {
                        blocks.push(block);
                    }
                    src
                }
            };
            let op = CopyOp { dst: DevicePtr(dst.address() as u64), src, len };
            // SAFETY: as above.
            unsafe { writer.add(op, current.copy_from) }?;
            (pieces, bytes) = (pieces + 1, bytes + len);
        }
        // SAFETY: as above, for each.
        unsafe { writer.launch() }?;
        Ok((pieces, bytes))
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
        self.0.stuck.bytes()
    }

    fn give_back(&self, lane: CopyLane) {
        let mut lanes = self.0.lanes.lock();
        if lanes.len() < MAX_IDLE_LANES {
            lanes.push(lane);
        }
    }

    fn not_here(&self, found: RegionKind) -> Error {
        Error::new(ErrorKind::InvalidInput, "read", "the destination does not lie on this device")
            .with("device", self.device().ordinal())
            .with("found", format_args!("{found:?}"))
            .remedy("read into memory of the engine's device, or make an engine for the other one")
    }
}

/// A block of a peer, as it is looked up for each piece.
#[derive(Clone, Copy)]
struct Place {
    base: RemoteAddr,
    bytes: u64,
    start: DevicePtr,
    copy_from: u64,
}

impl Place {
    fn of(block: &OpenedBlock, policy: &CopyPolicy) -> Self {
        let (base, bytes, start) = (block.base(), block.bytes(), block.memory().address());
        let copy_from = if block.is_afar() { policy.copy_from_afar } else { policy.copy_from };
        Self { base, bytes, start, copy_from }
    }

    #[inline]
    fn locate(&self, address: RemoteAddr, len: u64) -> Option<DevicePtr> {
        let offset = address.0.checked_sub(self.base.0)?;
        (offset <= self.bytes && len <= self.bytes - offset).then(|| self.start.offset(offset))
    }
}

impl Unfinished for Stuck {
    /// Whether the device is done with it; a fault ends everything, too.
    fn is_over(&mut self) -> bool {
        let waited = self.lane.finish(Instant::now());
        !waited.is_err_and(|error| error.kind() == ErrorKind::Timeout)
    }

    fn bytes(&self) -> u64 {
        self.batch.ops.iter().map(|op| op.dst.len() as u64).sum()
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
