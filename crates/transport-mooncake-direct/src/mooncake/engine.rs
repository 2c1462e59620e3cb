//! Reading through Mooncake's transfer engine, once it is certain what that runs.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use capture_arena::RegionPool;
use control_proto::mooncake::handshake::SegmentDescriptor;
#[cfg(any(feature = "mooncake", feature = "mooncake-python"))]
use mooncake_sys::EngineSetup;
use mooncake_sys::{EngineApi, Submission};
use parking_lot::Mutex;
use transport_core::{Epoch, Error, ErrorKind, RegionMut, Result, SessionName};

use super::{
    Protocol,
    gate::Gate,
    memory::{Failed, Memory},
};
use crate::{
    ReadOp, ReadOptions,
    tcp::{ReadError, check_epoch, fetch_metadata},
};

/// How long the peer handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Most connections that Mooncake keeps to one tcp peer.
const MAX_LANES: usize = 16;
const START: &str = "start mooncake engine";

/// How a [`MooncakeEngine`] behaves.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MooncakeOptions {
    /// What the engine has to run; it is refused if it runs something else.
    pub protocol: Protocol,
    /// Calls that may be inside Mooncake at a time. Default: one for each core.
    pub calls: usize,
    /// How several ranges are handed over. Default: as one batch with rdma and nvlink_intra; one
    /// after the other with nvlink, whose batches were seen to harm data between nodes; singly with
    /// tcp, 64 ahead, so that it is known of each whether it has ended.
    pub submission: Submission,
}

impl MooncakeOptions {
    /// The defaults for a protocol.
    pub fn new(protocol: Protocol) -> Self {
        let calls = std::thread::available_parallelism().map_or(1, usize::from);
        let submission = match protocol {
            Protocol::Rdma | Protocol::NvlinkIntra => Submission::Batch,
            Protocol::Nvlink => Submission::Single { ahead: 1 },
            Protocol::Tcp => Submission::Single { ahead: 64 },
        };
        Self { protocol, calls, submission }
    }
}

/// What a [`MooncakeEngine`] has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MooncakeStats {
    /// Ranges read.
    pub reads: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Memory registrations ever made: none for reads into a pool.
    pub registrations: u64,
    /// Bytes that reads which nobody waits for may still write.
    pub quarantined_bytes: u64,
    /// Peers that were found to run the protocol.
    pub peers: u64,
}

/// Reads with Mooncake's own transfer engine. Cheap to clone.
///
/// Every call blocks its thread until the last byte is there, or until its deadline: Mooncake cancels
/// nothing, so what a read has not finished by then stays in quarantine until that is over.
#[derive(Clone, Debug)]
pub struct MooncakeEngine(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    options: MooncakeOptions,
    api: Arc<dyn EngineApi>,
    memory: Memory,
    gate: Gate,
    session: SessionName,
    own: SegmentDescriptor,
    peers: Mutex<HashMap<SessionName, Arc<SegmentDescriptor>>>,
    closed: AtomicBool,
    reads: AtomicU64,
    bytes: AtomicU64,
}

impl MooncakeEngine {
    /// Takes over a started engine, after making sure that it runs the protocol that is asked for.
    ///
    /// Fails with [`ErrorKind::Unsupported`] if the build says that it does not know the protocol, or
    /// if the engine tells its peers another one.
    pub fn new(api: Arc<dyn EngineApi>, options: MooncakeOptions) -> Result<Self> {
        let protocol = options.protocol;
        api.support().check(protocol.name()).map_err(|e| e.with("provider", api.provider()))?;
        let session = api.session()?;
        let own = SegmentDescriptor { protocol: protocol.name().into(), ..Default::default() };
        let told = fetch_metadata(&session, &own, Instant::now() + HANDSHAKE)?;
        if !runs(&told, protocol) {
            return Err(unsupported("Mooncake took another transport than the one asked for")
                .with("expected", protocol)
                .with("found", format_args!("{:?}", told.protocol))
                .with("provider", api.provider())
                .remedy(
                    "check that this machine has the hardware; Mooncake falls back in silence",
                ));
        }
        Ok(Self(Arc::new(Inner {
            memory: Memory::new(api.clone()),
            gate: Gate::new(options.calls),
            options,
            api,
            session,
            own,
            peers: Mutex::default(),
            closed: AtomicBool::new(false),
            reads: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        })))
    }

    /// Starts an engine of Mooncake's wheel that peers reach at `host`.
    #[cfg(feature = "mooncake-python")]
    pub fn of_wheel(
        wheel: &mooncake_sys::python::WheelOptions,
        host: &str,
        options: MooncakeOptions,
    ) -> Result<Self> {
        let setup = EngineSetup::new(bracketed(host), options.protocol.name());
        Self::new(Arc::new(mooncake_sys::python::WheelEngine::start(wheel, &setup)?), options)
    }

    /// Starts an engine of a library with Mooncake's C interface that peers reach at `host`.
    #[cfg(feature = "mooncake")]
    pub fn of_library(
        library: &mooncake_sys::cabi::LibraryOptions,
        host: &str,
        options: MooncakeOptions,
    ) -> Result<Self> {
        let library = mooncake_sys::cabi::EngineLibrary::load(library)?;
        let setup = EngineSetup::new(bracketed(host), options.protocol.name());
        Self::new(Arc::new(library.start(&setup)?), options)
    }

    /// What it runs.
    pub fn protocol(&self) -> Protocol {
        self.0.options.protocol
    }

    /// Where peers reach it, as Mooncake's own programs write it.
    pub fn session(&self) -> &SessionName {
        &self.0.session
    }

    /// The provider, for people.
    pub fn provider(&self) -> String {
        self.0.api.provider().to_string()
    }

    /// Registers all memory of a pool, so that reads into it register nothing.
    pub fn register_pool(&self, pool: &RegionPool) -> Result<()> {
        self.0.check_open()?;
        self.0.check_kind(pool.backing().kind())?;
        self.0.memory.register_pool(pool)
    }

    /// Fills the destination of every operation from the peer at `session`, and gives them back.
    ///
    /// Destinations outside a registered pool are registered for as long as they live.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the peer runs another protocol, or for memory that the protocol
    /// cannot write; [`ErrorKind::OutOfRange`] for an address that the peer does not publish,
    /// [`ErrorKind::Stale`] if another life of the peer answers, [`ErrorKind::PeerGone`],
    /// [`ErrorKind::Timeout`], [`ErrorKind::Closed`]; [`ErrorKind::Unexpected`] where Mooncake does
    /// not say why. The destinations are lost then: freed, or in quarantine until the transfer is
    /// over.
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
        mut ops: Vec<ReadOp>,
        options: &ReadOptions,
    ) -> Result<Vec<ReadOp>, ReadError> {
        let inner = &*self.0;
        inner.check_open()?;
        inner.memory.sweep();
        for (i, op) in ops.iter().enumerate() {
            inner.check_kind(op.dst.kind()).map_err(|error| ReadError { op: Some(i), error })?;
        }
        if ops.iter().all(|op| op.dst.is_empty()) {
            return Ok(ops);
        }
        let mut metadata = inner.verified(session, options)?;
        let outside = |metadata: &SegmentDescriptor, ops: &[ReadOp]| {
            ops.iter().position(|op| {
                !op.dst.is_empty() && !metadata.covers(op.address, op.dst.len() as u64)
            })
        };
        if outside(&metadata, &ops).is_some() {
            // It may have registered more since; ask once.
            metadata = inner.verify(session, options)?;
            if let Some(i) = outside(&metadata, &ops) {
                let error = crate::tcp::outside(session, &ops[i]);
                return Err(ReadError { op: Some(i), error });
            }
        }
        ops = ops
            .into_iter()
            .map(|ReadOp { address, dst, same_object }| {
                let dst = inner.memory.adopt(dst)?;
                Ok(ReadOp { address, dst, same_object })
            })
            .collect::<Result<_>>()?;
        let late = || {
            Error::new(ErrorKind::Timeout, "read", "no place inside Mooncake in time")
                .with("calls", inner.options.calls)
                .remedy("run fewer reads at a time; Mooncake's calls keep a core each")
        };
        let place = inner.gate.enter(options.deadline).ok_or_else(late)?;
        let bytes: u64 = ops.iter().map(|op| op.dst.len() as u64).sum();
        let count = ops.len() as u64;
        let mut retries = match inner.options.protocol {
            Protocol::Tcp => MAX_LANES,
            _ => 0,
        };
        let ops = loop {
            let timeout = options.deadline.saturating_duration_since(Instant::now());
            if timeout.is_zero() {
                return Err(late().into());
            }
            let read = inner.memory.read(session, ops, inner.options.submission, timeout);
            let Failed { op, error, ops: kept } = match read {
                Ok(ops) => break ops,
                Err(failed) => failed,
            };
            let (alive, error) = inner.explain(session, &metadata, error);
            match kept {
                // Connections in Mooncake's own pool may lead to a former life of the peer: each of
                // them fails one read, and is replaced.
                Some(kept) if alive && retries > 0 => {
                    retries -= 1;
                    ops = kept;
                }
                _ => {
                    inner.peers.lock().remove(session);
                    return Err(ReadError { op, error });
                }
            }
        };
        drop(place);
        inner.reads.fetch_add(count, Ordering::Relaxed);
        inner.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(ops)
    }

    /// Registers memory of the caller until its last handle is gone, unless it is known already.
    /// Whatever is cut from what this returns is read into without another registration.
    pub(crate) fn adopt(&self, region: RegionMut) -> Result<RegionMut> {
        self.0.check_open()?;
        self.0.check_kind(region.kind())?;
        self.0.memory.adopt(region)
    }

    /// What it has done so far.
    pub fn stats(&self) -> MooncakeStats {
        let inner = &*self.0;
        inner.memory.sweep();
        MooncakeStats {
            reads: inner.reads.load(Ordering::Relaxed),
            bytes: inner.bytes.load(Ordering::Relaxed),
            registrations: inner.memory.registrations(),
            quarantined_bytes: inner.memory.quarantined_bytes(),
            peers: inner.peers.lock().len() as u64,
        }
    }

    /// Refuses new reads and stops Mooncake's engine, which ends whatever is left of older ones.
    pub fn close(&self) -> Result<()> {
        self.0.closed.store(true, Ordering::Relaxed);
        self.0.memory.unregister_pools();
        let closed = self.0.api.close();
        self.0.memory.sweep();
        closed
    }
}

impl Inner {
    fn check_open(&self) -> Result<()> {
        match self.closed.load(Ordering::Relaxed) {
            true => Err(Error::new(ErrorKind::Closed, "read", "the engine is closed")),
            false => Ok(()),
        }
    }

    fn check_kind(&self, kind: transport_core::RegionKind) -> Result<()> {
        let protocol = self.options.protocol;
        if protocol.takes(kind) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Unsupported, "read", "the protocol cannot write such memory")
            .with("protocol", protocol)
            .with("memory", format_args!("{kind:?}"))
            .remedy("read into host memory with tcp, into device memory with nvlink_intra"))
    }

    /// What the peer said about itself, asked for unless it is known.
    fn verified(
        &self,
        session: &SessionName,
        options: &ReadOptions,
    ) -> Result<Arc<SegmentDescriptor>> {
        let known = self.peers.lock().get(session).cloned();
        match known {
            Some(known) if is_life(&known, options.epoch) => Ok(known),
            _ => self.verify(session, options),
        }
    }

    /// Asks the peer what it runs.
    fn verify(
        &self,
        session: &SessionName,
        options: &ReadOptions,
    ) -> Result<Arc<SegmentDescriptor>> {
        self.peers.lock().remove(session);
        let by = options.deadline.min(Instant::now() + HANDSHAKE);
        let told = fetch_metadata(session, &self.own, by)?;
        if !runs(&told, self.options.protocol) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "read",
                "the peer runs another protocol than this engine",
            )
            .with("peer", session)
            .with("expected", self.options.protocol)
            .with("found", format_args!("{:?}", told.protocol))
            .remedy("start an engine for the peer's protocol, or the peer with this one"));
        }
        check_epoch(session, options.epoch, told.featurestore_epoch)?;
        let told = Arc::new(told);
        self.peers.lock().insert(session.clone(), told.clone());
        Ok(told)
    }

    /// Asks the peer itself where Mooncake does not say why a read failed; and whether the peer is as
    /// it was before.
    fn explain(
        &self,
        session: &SessionName,
        before: &SegmentDescriptor,
        error: Error,
    ) -> (bool, Error) {
        if error.kind() != ErrorKind::Unexpected {
            return (false, error);
        }
        let error =
            match fetch_metadata(session, &self.own, Instant::now() + Duration::from_secs(2)) {
                Err(gone) if matches!(gone.kind(), ErrorKind::PeerGone | ErrorKind::Timeout) => {
                    gone.source(error)
                }
                Ok(now)
                    if now.buffers != before.buffers
                        || now.featurestore_epoch != before.featurestore_epoch
                        || now.tcp_data_port != before.tcp_data_port =>
                {
                    Error::new(
                        ErrorKind::PeerGone,
                        "read",
                        "the peer was replaced, or its memory changed",
                    )
                    .with("peer", session)
                    .remedy("fetch with a new descriptor")
                    .source(error)
                }
                Ok(_) => {
                    let error = error
                        .with("peer_alive", "yes, unchanged")
                        .remedy("the peer may have refused the range; Mooncake's log says why");
                    return (true, error);
                }
                Err(_) => error,
            };
        (false, error)
    }
}

/// Mooncake wants brackets around IPv6.
#[cfg(any(feature = "mooncake", feature = "mooncake-python"))]
fn bracketed(host: &str) -> String {
    match host.parse() {
        Ok(std::net::IpAddr::V6(host)) => format!("[{host}]"),
        _ => host.to_owned(),
    }
}

fn is_life(known: &SegmentDescriptor, epoch: Option<Epoch>) -> bool {
    epoch.is_none() || known.featurestore_epoch.is_none() || known.featurestore_epoch == epoch
}

fn runs(told: &SegmentDescriptor, protocol: Protocol) -> bool {
    told.protocol.parse::<Protocol>().is_ok_and(|told| told == protocol)
}

fn unsupported(message: &'static str) -> Error {
    Error::new(ErrorKind::Unsupported, START, message)
}
