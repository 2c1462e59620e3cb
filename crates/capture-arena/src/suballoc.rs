//! Which bytes of the arena are free: ranges in units of 512 bytes, kept outside the memory itself.

use std::{fmt, num::NonZeroU64};

use transport_core::ArenaOffset;

/// Granule of every range: offsets are multiples of it and sizes are rounded up to it, in bytes.
pub const UNIT: u64 = 512;

/// One range that an allocator has handed out.
///
/// Neither `Clone` nor `Copy`, and consumed by [`SubAllocator::free`]: a range cannot be given back
/// twice.
#[derive(Debug, PartialEq, Eq)]
pub struct ArenaRange {
    pub(crate) start: u32,      // in units
    pub(crate) node: u32,       // the allocator's own record of it
    pub(crate) len: NonZeroU64, // in bytes, as asked for
}

impl ArenaRange {
    /// Where the range starts.
    pub fn offset(&self) -> ArenaOffset {
        ArenaOffset(u64::from(self.start) * UNIT)
    }

    /// Bytes asked for; at least one.
    pub fn len(&self) -> u64 {
        self.len.get()
    }

    /// Always false: there are no ranges without bytes.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Bytes taken: the length rounded up to [`UNIT`].
    pub fn footprint(&self) -> u64 {
        footprint(self.len())
    }
}

/// `len` rounded up to [`UNIT`], saturating.
pub fn footprint(len: u64) -> u64 {
    len.div_ceil(UNIT).saturating_mul(UNIT)
}

/// Hands out ranges of one block of memory without touching the memory.
pub trait SubAllocator: fmt::Debug + Send {
    /// Takes `len` bytes.
    fn allocate(&mut self, len: u64) -> Result<ArenaRange, NoRoom>;

    /// Gives a range back; it merges with its free neighbours at once.
    ///
    /// # Panics
    /// If another allocator made the range.
    fn free(&mut self, range: ArenaRange);

    /// What is free now.
    fn report(&self) -> SpaceReport;
}

/// What an allocator has left. Bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceReport {
    /// Size of the whole block.
    pub capacity: u64,
    /// Free bytes in all ranges.
    pub free: u64,
    /// Longest free range.
    pub largest: u64,
    /// Ranges handed out.
    pub live_ranges: u64,
    /// Free ranges.
    pub free_ranges: u64,
}

/// Why a range could not be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom {
    /// Bytes asked for.
    pub requested: u64,
    /// What is missing.
    pub cause: NoRoomCause,
}

/// What is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoRoomCause {
    /// No bytes were asked for; a range has at least one.
    Empty,
    /// No free range is long enough.
    Space,
    /// The allocator's table of ranges is full, however much memory is free.
    Ranges,
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.cause {
            NoRoomCause::Empty => f.write_str("a range has at least one byte"),
            NoRoomCause::Space => write!(f, "no room for {} bytes", self.requested),
            NoRoomCause::Ranges => write!(f, "no room in the table of ranges"),
        }
    }
}

impl std::error::Error for NoRoom {}
