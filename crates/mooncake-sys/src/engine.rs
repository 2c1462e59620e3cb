//! The transfer engine calls that a transport makes.

use std::{fmt, time::Duration};

use transport_core::{RemoteAddr, Result, SessionName};

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

/// A started transfer engine.
///
/// Calls block and some of them busy-wait: no more than one at a time for each core. Several
/// threads may call.
pub trait EngineApi: fmt::Debug + Send + Sync {
    /// Which file serves the calls.
    fn provider(&self) -> &ProviderInfo;

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

    /// Reads ranges of one peer and returns when all are complete.
    ///
    /// With `one_by_one` each piece is a request of its own, which multi-node NVLink needs; else all
    /// are one batch.
    ///
    /// # Safety
    /// While the call runs, and for as long as the engine lives if it fails, the destinations stay
    /// allocated and nobody else reads or writes them: Mooncake cancels nothing.
    unsafe fn read(
        &self,
        peer: &SessionName,
        pieces: &[ReadPiece],
        one_by_one: bool,
        timeout: Duration,
    ) -> Result<()>;

    /// Stops the engine. Idempotent; later calls fail with
    /// [`ErrorKind::Closed`](transport_core::ErrorKind::Closed).
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
    /// the hardware, whatever is asked for here: compare the peer's handshake before trusting it.
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
