//! The arena of a capture server: ranges, keys and lifetimes in one block of memory.
//!
//! [`Arena`] is the handle to the one thread that owns the books ([`CaptureArena`]): samples are
//! reserved there, filled by their writers, and published; clients hold and free them; peers read
//! them through the [`ExportTable`]. [`Backing`] is the memory itself, private or shared with other
//! processes, and [`RegionPool`] hands out receive and buffer memory from the same allocator.
#![deny(unsafe_code)] // but for `backing` and `cuda`

mod arena;
mod backing;
#[cfg(feature = "cuda")]
pub mod cuda;
mod export;
mod fit;
mod limits;
#[cfg(all(test, not(loom)))]
mod oracle;
mod owner;
mod pin;
mod pool;
mod quarantine;
mod reservation;
mod suballoc;

pub use arena::{
    ArenaHealth, BATCHES_BEFORE, BatchPlan, CaptureArena, FreeOutcome, Grant, HoldOutcome,
    ObjectList, PlannedObject, PlannedSample, Ticket,
};
pub use backing::{Backing, MappedBacking, SealedBacking, SharedHandle};
pub use export::{ExportError, ExportTable, Pin, PinnedRange};
pub use fit::FitSubAllocator;
pub use limits::available_memory;
pub use limits::boot_id;
pub use owner::{Arena, ArenaConfig, BaseAddress, FreeRequest, HoldRequest, ReserveOptions};
pub use pool::{PoolStats, Quarantined, RegionPool};
pub use quarantine::{Quarantine, Unfinished};
pub use reservation::{
    PublishedObject, PublishedSample, Reservation, ReservedObject, ReservedSample, SamplePlan,
};
pub use suballoc::{ArenaRange, NoRoom, NoRoomCause, SpaceReport, SubAllocator, UNIT, footprint};
