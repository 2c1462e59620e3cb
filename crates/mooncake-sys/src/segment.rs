//! Reading the memory of segments without a Mooncake library.

use std::{
    fmt,
    sync::{Arc, atomic::AtomicBool},
    time::Instant,
};

use transport_core::{RegionMut, RemoteAddr, Result, SessionName};

/// One range of a segment, and where its bytes go.
#[derive(Debug)]
pub struct SegmentRead {
    /// First address, in the owner's address space.
    pub address: RemoteAddr,
    /// Filled with as many bytes as it is long.
    pub dst: RegionMut,
}

/// Reads the memory of segments in place of Mooncake's engine.
///
/// Whoever implements it speaks the wire of the segments' owners and sees to it that a read that has
/// ended, well or not, writes nowhere any more: memory of failed reads is used again at once, where
/// that of Mooncake's engine has to be put aside.
pub trait SegmentReader: fmt::Debug + Send + Sync {
    /// What it speaks, for people.
    fn name(&self) -> &str;

    /// Fills every destination from the segment, and gives the destinations back. Blocks until the
    /// deadline at most, and ends soon after `stop` is set.
    ///
    /// # Errors
    /// - [`Unsupported`] or [`Protocol`] if the segment's owner speaks another
    ///   wire; it is then left to Mooncake's engine;
    /// - [`Timeout`] after the deadline, and [`Closed`] when stopped;
    /// - any other kind for a read that may be tried again.
    ///
    /// [`Closed`]: transport_core::ErrorKind::Closed
    /// [`Protocol`]: transport_core::ErrorKind::Protocol
    /// [`Timeout`]: transport_core::ErrorKind::Timeout
    /// [`Unsupported`]: transport_core::ErrorKind::Unsupported
    fn read(
        &self,
        segment: &SessionName,
        reads: Vec<SegmentRead>,
        deadline: Instant,
        stop: &Arc<AtomicBool>,
    ) -> (Vec<SegmentRead>, Result<()>);

    /// No call comes any more: ends connections.
    fn close(&self) {}
}
