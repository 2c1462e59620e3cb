//! Reading remote memory over Mooncake's tcp wire.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use control_proto::mooncake::{data::Version, handshake::SegmentDescriptor};
use parking_lot::Mutex;
use transport_core::{
    DEFAULT_DEADLINE, Epoch, Error, ErrorKind, RegionMut, RemoteAddr, Result, SessionName,
};

use super::{
    exchange::{Cause, Failure, Window, read_all},
    handshake,
    lanes::{self, Queue},
    peer::{Instance, Peer, PoolBounds, check_epoch},
    plan::{Piece, Request, plan},
};
use crate::net::Until;

/// How a [`TcpEngine`] behaves.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TcpOptions {
    /// Connections that one large batch may use at a time. Default: half the cores, 1 to 4.
    pub lanes: usize,
    /// Batches of fewer bytes use one connection. Default: 8 MiB.
    pub lane_bytes: u64,
    /// Requests that run ahead of their answers on a connection; 1 to 64. Default: 64.
    pub window: usize,
    /// Connections to one peer, in use and idle. Default: 64.
    pub max_connections: usize,
    /// How long an idle connection is kept. Default: 1 minute.
    pub idle: Duration,
    /// How long connecting may take, handshake included. Default: 5 seconds.
    pub connect_timeout: Duration,
}

impl Default for TcpOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            lanes: (cores / 2).clamp(1, 4),
            lane_bytes: 8 << 20,
            window: 64,
            max_connections: 64,
            idle: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(5),
        }
    }
}

/// One range to read, and where its bytes go.
#[derive(Debug)]
pub struct ReadOp {
    /// First address, in the peer's address space.
    pub address: RemoteAddr,
    /// Filled with as many bytes as it is long.
    pub dst: RegionMut,
    /// The range belongs to the same published object as that of the operation before, so that
    /// both may be read with one request where they touch.
    pub same_object: bool,
}

impl ReadOp {
    /// Reads `dst.len()` bytes from `address`.
    pub fn new(address: RemoteAddr, dst: RegionMut) -> Self {
        Self { address, dst, same_object: false }
    }
}

/// Options of [`TcpEngine::read`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReadOptions {
    /// Life of the peer that the addresses belong to, if it is known.
    pub epoch: Option<Epoch>,
    /// Latest end of the whole call.
    pub deadline: Instant,
    /// Ends the call within a tenth of a second when set.
    pub stop: Option<Arc<AtomicBool>>,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self { epoch: None, deadline: Instant::now() + DEFAULT_DEADLINE, stop: None }
    }
}

impl ReadOptions {
    /// Must be over at `deadline`.
    #[must_use]
    pub fn deadline(mut self, deadline: Instant) -> Self {
        self.deadline = deadline;
        self
    }

    /// Accepts only this life of the peer.
    #[must_use]
    pub fn epoch(mut self, epoch: Option<Epoch>) -> Self {
        self.epoch = epoch;
        self
    }

    /// Ends the call when the flag is set.
    #[must_use]
    pub fn stop(mut self, stop: Arc<AtomicBool>) -> Self {
        self.stop = Some(stop);
        self
    }
}

/// Reads from peers that speak Mooncake's tcp wire. Cheap to clone; connections are shared.
///
/// Every call blocks its thread until the last byte is there or nothing can arrive any more.
#[derive(Clone, Debug)]
pub struct TcpEngine(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    options: TcpOptions,
    own: SegmentDescriptor,
    peers: Mutex<HashMap<SessionName, Arc<Peer>>>,
    closed: AtomicBool,
    reads: AtomicU64,
    bytes: AtomicU64,
    refreshes: AtomicU64,
}

/// What a [`TcpEngine`] has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TcpStats {
    /// Ranges read.
    pub reads: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Connections, in use and idle.
    pub connections: u64,
    /// Peers that are known.
    pub peers: u64,
    /// Times that a peer was asked again after a failure.
    pub refreshes: u64,
}

/// A failed read, and which operation it failed at, if one can be blamed.
#[derive(Debug)]
pub(crate) struct ReadError {
    pub(crate) op: Option<usize>,
    pub(crate) error: Error,
}

impl From<Error> for ReadError {
    fn from(error: Error) -> Self {
        Self { op: None, error }
    }
}

impl TcpEngine {
    /// An engine without connections.
    pub fn new(options: TcpOptions) -> Self {
        let own = SegmentDescriptor { protocol: "tcp".into(), ..SegmentDescriptor::default() };
        Self(Arc::new(Inner {
            options,
            own,
            peers: Mutex::default(),
            closed: AtomicBool::new(false),
            reads: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            refreshes: AtomicU64::new(0),
        }))
    }

    /// Fills the destination of every operation from the peer at `session`.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfRange`] for an address that the peer does not publish,
    /// [`ErrorKind::Stale`] if another life of the peer answers, [`ErrorKind::ShortRead`] if it
    /// lives but sends too little, [`ErrorKind::PeerGone`] if it does not,
    /// [`ErrorKind::Timeout`], [`ErrorKind::Unsupported`] for device memory,
    /// [`ErrorKind::Closed`]. The destinations then hold anything.
    pub fn read(
        &self,
        session: &SessionName,
        ops: &mut [ReadOp],
        options: &ReadOptions,
    ) -> Result<()> {
        self.read_ops(session, ops, options).map_err(|ReadError { op, error }| match op {
            Some(op) => error.with("operation", op),
            None => error,
        })
    }

    pub(crate) fn read_ops(
        &self,
        session: &SessionName,
        ops: &mut [ReadOp],
        options: &ReadOptions,
    ) -> Result<(), ReadError> {
        let inner = &*self.0;
        if inner.closed.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Closed, "read", "the engine is closed").into());
        }
        let is_device = |op: &ReadOp| !op.dst.kind().is_host() && !op.dst.is_empty();
        if let Some(op) = ops.iter().position(is_device) {
            let error =
                Error::new(ErrorKind::Unsupported, "read", "tcp cannot read into device memory")
                    .remedy("read into host memory, or choose an engine for devices");
            return Err(ReadError { op: Some(op), error });
        }
        if ops.iter().all(|op| op.dst.is_empty()) {
            return Ok(());
        }
        let peer = inner.peer(session);
        // An instance that is already in doubt, or of another life, is asked for here.
        let mut instance = peer.instance(&inner.own, options.epoch, options.deadline)?;
        let mut refreshed = false;
        if !inner.covers(&instance, ops) {
            // It may have registered more since; ask once.
            instance = inner.refresh(&peer, session, options)?;
            refreshed = true;
            if let Some(op) = ops.iter().position(|op| !covers(&instance, op)) {
                return Err(ReadError { op: Some(op), error: outside(session, &ops[op]) });
            }
        }
        let mut version = instance.first_version();
        loop {
            let (failure, reused) = match inner.attempt(&peer, &instance, version, ops, options) {
                Ok(()) => {
                    inner.reads.fetch_add(ops.len() as u64, Ordering::Relaxed);
                    let bytes: u64 = ops.iter().map(|op| op.dst.len() as u64).sum();
                    inner.bytes.fetch_add(bytes, Ordering::Relaxed);
                    return Ok(());
                }
                Err(Attempt::Read(failure, reused)) => (failure, reused),
                Err(Attempt::Connect(error)) => {
                    instance.doubt();
                    if refreshed || error.kind() != ErrorKind::PeerGone {
                        return Err(error.into());
                    }
                    // Its data port may have moved, or another life has taken over.
                    instance = inner.refresh(&peer, session, options)?;
                    version = instance.first_version();
                    refreshed = true;
                    continue;
                }
            };
            let error = || explain(session, &failure, &ops[failure.op]);
            let failed = |error| Err(ReadError { op: Some(failure.op), error });
            if failure.is_an_answer() {
                // The peer is well; the connections of this batch are closed, that is enough.
                return failed(error());
            }
            instance.doubt();
            if failure.is_timeout() || (refreshed && version >= instance.version) {
                return failed(error());
            }
            refreshed = true;
            match inner.refresh(&peer, session, options) {
                Ok(alive) if !Arc::ptr_eq(&alive, &instance) => {
                    return failed(replaced(session));
                }
                // It lives and ended the connection. The newer version knows how to say why.
                Ok(_) if version < instance.version => version = instance.version,
                // It closed a connection that had been idle for long.
                Ok(_) if reused && failure.is_stale_connection() => {}
                Err(e) if matches!(e.kind(), ErrorKind::PeerGone | ErrorKind::Stale) => {
                    return failed(e.source(error()));
                }
                Ok(_) | Err(_) => return failed(error()),
            }
        }
    }

    /// Connections that one large batch may use at a time.
    #[cfg(feature = "cuda")]
    pub(crate) fn lanes(&self) -> usize {
        self.0.options.lanes.max(1)
    }

    /// What the peer at `session` says about itself now.
    pub fn metadata(&self, session: &SessionName, deadline: Instant) -> Result<SegmentDescriptor> {
        handshake::fetch_metadata(session, &self.0.own, deadline)
    }

    /// Asks the peer at `session` whether it lives.
    pub fn probe(&self, session: &SessionName, deadline: Instant) -> Result<()> {
        handshake::probe(session, deadline)
    }

    /// Drops what is known about a peer, and the idle connections to it. Reads that run go on.
    pub fn forget(&self, session: &SessionName) {
        if let Some(peer) = self.0.peers.lock().remove(session) {
            peer.forget();
        }
    }

    /// What it has done so far.
    pub fn stats(&self) -> TcpStats {
        let peers = self.0.peers.lock();
        TcpStats {
            reads: self.0.reads.load(Ordering::Relaxed),
            bytes: self.0.bytes.load(Ordering::Relaxed),
            connections: peers.values().map(|p| p.open() as u64).sum(),
            peers: peers.len() as u64,
            refreshes: self.0.refreshes.load(Ordering::Relaxed),
        }
    }

    /// Refuses new reads and closes idle connections. Reads that run end on their own.
    pub fn close(&self) {
        self.0.closed.store(true, Ordering::Relaxed);
        for (_, peer) in self.0.peers.lock().drain() {
            peer.forget();
        }
    }
}

enum Attempt {
    Connect(Error),
    /// And whether the connection had served before.
    Read(Failure, bool),
}

impl Inner {
    fn peer(&self, session: &SessionName) -> Arc<Peer> {
        let mut peers = self.peers.lock();
        if let Some(peer) = peers.get(session) {
            return peer.clone();
        }
        let peer = Arc::new(Peer::new(session.clone()));
        peers.insert(session.clone(), peer.clone());
        peer
    }

    fn refresh(
        &self,
        peer: &Peer,
        session: &SessionName,
        options: &ReadOptions,
    ) -> Result<Arc<Instance>> {
        self.refreshes.fetch_add(1, Ordering::Relaxed);
        let by = options.deadline.min(Instant::now() + self.options.connect_timeout);
        let instance = peer.refresh(&self.own, by)?;
        check_epoch(session, options.epoch, instance.epoch())?;
        Ok(instance)
    }

    fn covers(&self, instance: &Instance, ops: &[ReadOp]) -> bool {
        ops.iter().all(|op| covers(instance, op))
    }

    /// Reads the whole batch over connections to one life of the peer.
    fn attempt(
        &self,
        peer: &Peer,
        instance: &Arc<Instance>,
        version: Version,
        ops: &mut [ReadOp],
        options: &ReadOptions,
    ) -> Result<(), Attempt> {
        let bytes: u64 = ops.iter().map(|op| op.dst.len() as u64).sum();
        let lanes = if bytes < self.options.lane_bytes { 1 } else { self.options.lanes.max(1) };
        // One connection streams a giant as it is; several share it in parts.
        let max_request = if lanes == 1 { 256 << 20 } else { 4 << 20 };
        let pieces = ops.iter_mut().map(|op| Piece {
            address: op.address,
            joinable: op.same_object,
            dst: op.dst.as_mut_bytes().unwrap_or_default(), // empty where it is a device's
        });
        let requests = plan(pieces, max_request);
        let lanes = lanes.min(requests.len());
        let window = Window {
            requests: self.options.window.clamp(1, 64),
            bytes: if lanes == 1 { 64 << 20 } else { 8 << 20 },
        };
        let bounds = PoolBounds {
            max_open: self.options.max_connections.max(1),
            idle: self.options.idle,
            connect: self.options.connect_timeout,
        };
        let lane = Lane { inner: self, peer, instance, version, options, window, bounds };
        if lanes == 1 {
            let mut requests = requests.into_iter();
            return lane.run(0, || requests.next());
        }
        let queue = Queue::new(requests);
        lanes::run(lanes - 1, |i| lane.run(i, || queue.next()).inspect_err(|_| queue.fail()))
    }
}

/// What the connections of one batch have in common.
struct Lane<'e> {
    inner: &'e Inner,
    peer: &'e Peer,
    instance: &'e Arc<Instance>,
    version: Version,
    options: &'e ReadOptions,
    window: Window,
    bounds: PoolBounds,
}

impl Lane<'_> {
    /// Reads what `source` yields over one connection.
    fn run<'a>(
        &self,
        lane: usize,
        source: impl FnMut() -> Option<Request<'a>>,
    ) -> Result<(), Attempt> {
        let deadline = self.options.deadline;
        let lent = self.peer.lend(self.instance, &self.inner.own, self.bounds, deadline);
        let mut lent = match lent {
            Ok(lent) => lent,
            // The first lane does the work of those that found no connection.
            Err(_) if lane > 0 => return Ok(()),
            Err(error) => return Err(Attempt::Connect(error)),
        };
        let until = Until { deadline, stop: self.options.stop.as_deref() };
        let reused = lent.reused;
        match read_all(lent.conn(), self.version, self.window, until, source) {
            Ok(()) => {
                lent.give_back();
                Ok(())
            }
            Err(failure) => Err(Attempt::Read(failure, reused)),
        }
    }
}

impl Failure {
    fn is_timeout(&self) -> bool {
        matches!(self.cause, Cause::System(rustix::io::Errno::TIMEDOUT))
    }

    /// Whether the connection and the peer are as they should be.
    fn is_an_answer(&self) -> bool {
        matches!(self.cause, Cause::Rejected(_) | Cause::System(rustix::io::Errno::CANCELED))
    }
}

fn covers(instance: &Instance, op: &ReadOp) -> bool {
    op.dst.is_empty() || instance.metadata.covers(op.address, op.dst.len() as u64)
}

pub(crate) fn outside(session: &SessionName, op: &ReadOp) -> Error {
    Error::new(ErrorKind::OutOfRange, "read", "the range lies outside the peer's memory")
        .with("peer", session)
        .with("address", format_args!("{:#x}", op.address.0))
        .with("bytes", op.dst.len())
}

fn replaced(session: &SessionName) -> Error {
    Error::new(ErrorKind::PeerGone, "read", "the peer was replaced by another process")
        .with("peer", session)
}

fn explain(session: &SessionName, failure: &Failure, op: &ReadOp) -> Error {
    let (kind, message) = failure.describe();
    let error = Error::new(kind, "read", message)
        .with("peer", session)
        .with("address", format_args!("{:#x}", op.address.0))
        .with("bytes", op.dst.len());
    match &failure.cause {
        Cause::Rejected(status) => error
            .with("status", status.code())
            .remedy("the sample was released or its peer restarted: fetch with a new descriptor"),
        Cause::Short { expected, found } => {
            error.with("expected", expected).with("found", found).remedy("fetch the sample again")
        }
        Cause::Protocol(why) => error
            .with("reason", why.message().to_owned())
            .remedy("check that the peer speaks Mooncake's tcp wire on this port"),
        Cause::System(errno) => error
            .with("reason", errno)
            .remedy("check that the peer and the network are up; allow more time if they are slow"),
    }
}
