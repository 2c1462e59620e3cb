//! The transfer engine calls that a transport makes.

use std::{fmt, time::Duration};

use transport_core::{Error, ErrorKind, RemoteAddr, Result, SessionName};

use crate::ProviderInfo;

/// One range to read.
#[derive(Clone, Copy, Debug)]
pub struct ReadPiece {
    /// First byte of the destination, in registered memory.
    pub local: *mut u8,
    /// Where the bytes are in the peer's address space.
    pub remote: RemoteAddr,
    /// Bytes; not 0.
    pub len: usize,
}

/// How the pieces of a read are handed to Mooncake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submission {
    /// All pieces in one batch.
    ///
    /// Through the wheel nothing is known about the pieces of a batch that failed: it is not over
    /// before the engine is closed.
    Batch,
    /// Each piece as a request of its own, this many of them ahead of their answers; at least 1.
    Single {
        /// Requests under way at a time.
        ahead: usize,
    },
}

/// A read that did not succeed.
#[derive(Debug)]
pub struct ReadFailure {
    /// Why.
    pub error: Error,
    /// The piece that is to blame, if one can be told.
    pub piece: Option<usize>,
    /// What is still under way. Until it is over, peers may write into any destination of the read;
    /// `None` if nothing is.
    pub running: Option<Box<dyn Running>>,
}

impl From<Error> for ReadFailure {
    /// A failure that left nothing under way.
    fn from(error: Error) -> Self {
        Self { error, piece: None, running: None }
    }
}

/// The rest of a read that its caller waits for no longer.
pub trait Running: fmt::Debug + Send {
    /// Whether nothing can be written any more. Takes a short look, and never waits for long.
    fn is_over(&mut self) -> bool;
}

impl<B: Running> Running for (Box<dyn Running>, B) {
    fn is_over(&mut self) -> bool {
        let first = self.0.is_over();
        self.1.is_over() && first
    }
}

/// Transports that a build of Mooncake knows, as far as it says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineSupport {
    /// NVLink between nodes: protocol `nvlink`.
    pub mnnvl: Option<bool>,
    /// NVLink within a node: protocol `nvlink_intra`.
    pub intra_nvlink: Option<bool>,
    /// Memory of CUDA devices.
    pub cuda: Option<bool>,
}

impl EngineSupport {
    /// Refuses a protocol that the build says it does not know.
    pub fn check(&self, protocol: &str) -> Result<()> {
        let (known, remedy) = match protocol {
            "nvlink" => (
                self.mnnvl,
                "no official wheel for x86-64 knows it; use a build with USE_MNNVL, or another \
                 protocol",
            ),
            "nvlink_intra" => {
                (self.intra_nvlink, "use one of the wheels for CUDA, or another protocol")
            }
            _ => return Ok(()),
        };
        if known != Some(false) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            "start transfer engine",
            "this build of Mooncake does not know the protocol",
        )
        .with("protocol", protocol)
        .remedy(remedy))
    }
}

/// A started transfer engine.
///
/// Calls block and some of them busy-wait: no more than one at a time for each core. Several
/// threads may call.
pub trait EngineApi: fmt::Debug + Send + Sync {
    /// Which file serves the calls.
    fn provider(&self) -> &ProviderInfo;

    /// Which transports the build knows.
    fn support(&self) -> EngineSupport {
        EngineSupport::default()
    }

    /// Where peers reach this engine.
    fn session(&self) -> Result<SessionName>;

    /// Makes ranges known to the engine and to its peers, all or none as far as Mooncake keeps its
    /// own word: after an error treat every range as registered and keep it allocated.
    ///
    /// # Safety
    /// Each range stays allocated until [`Self::unregister`] has returned for it, and, as peers may
    /// read and write it at any time until then, nothing relies on its content meanwhile.
    unsafe fn register(&self, ranges: &[(*mut u8, usize)]) -> Result<()>;

    /// Takes back registrations, by first address.
    ///
    /// # Safety
    /// No transfer that names this memory runs or is started later.
    unsafe fn unregister(&self, starts: &[*mut u8]) -> Result<()>;

    /// Reads ranges of one peer and returns when all are complete, or soon after `timeout`.
    ///
    /// # Errors
    /// A failure says whether anything is still under way; see [`ReadFailure::running`].
    ///
    /// # Safety
    /// The destinations stay allocated and nobody else reads or writes them: while the call runs,
    /// and, if it leaves something [`Running`], until that is over or [`Self::close`] has succeeded.
    unsafe fn read(
        &self,
        peer: &SessionName,
        pieces: &[ReadPiece],
        submission: Submission,
        timeout: Duration,
    ) -> Result<(), ReadFailure>;

    /// Stops the engine. Idempotent; later calls fail with
    /// [`ErrorKind::Closed`](transport_core::ErrorKind::Closed).
    ///
    /// Once it has succeeded, no peer writes into this process through the engine any more.
    fn close(&self) -> Result<()>;
}

/// How an engine is started.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineSetup {
    /// Host by which peers reach this process; Mooncake adds a port.
    pub local_host: String,
    /// `P2PHANDSHAKE`, or the address of a metadata server.
    pub metadata: String,
    /// `tcp`, `rdma`, `nvlink` or `nvlink_intra`.
    ///
    /// A C library installs exactly this one. The wheel chooses by itself from the environment and
    /// the hardware, whatever is asked for here. The variables that it reads for this are set for
    /// this protocol while the engine starts, and put back; but where the hardware is missing it
    /// takes another transport in silence. Look at what it tells peers before trusting it.
    pub protocol: String,
    /// RDMA devices, separated by commas; empty for all.
    pub devices: String,
}

impl EngineSetup {
    /// An engine on `local_host`, which needs no metadata server.
    pub fn new(local_host: impl Into<String>, protocol: impl Into<String>) -> Self {
        Self {
            local_host: local_host.into(),
            metadata: "P2PHANDSHAKE".into(),
            protocol: protocol.into(),
            devices: String::new(),
        }
    }
}
