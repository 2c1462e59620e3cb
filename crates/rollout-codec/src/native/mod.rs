//! The native layout: one small header, and one data buffer of aligned segments.
//!
//! # Header
//! 64 bytes, then a JSON index. All numbers are little-endian.
//!
//! | at | what |
//! |---|---|
//! | 0 | magic, `FSROLLUT` |
//! | 8 | u32 version, 1; u32 zero |
//! | 16 | u64 length of the header, the index included |
//! | 24 | u64 length of the data |
//! | 32 | u64 generation, chosen by the writer |
//! | 40 | u64 number of rows |
//! | 48 | u64 length of the index |
//! | 56 | u64 XXH3 of the 56 bytes before and of the index |
//!
//! # Data
//! Segments follow each other in the order of the index, each at the next multiple of 64 bytes,
//! with zeros between them. Nothing else is allowed, so a header has exactly one reading. Offsets
//! are 64-bit and count rows' steps (or elements, or bytes) from 0.
//!
//! A segment's checksum is the XXH3 of the XXH3s of its blocks of 128 KiB, so that many threads can
//! make and verify it.
//!
//! # Writing and reading
//! [`Plan`] says how long everything will be and where every byte goes, without touching data;
//! [`Plan::encode_into`] gathers it once, in parallel. [`RolloutView`] reads it without a copy,
//! whole or by field, and [`read_plan`] finds what to fetch for some rows, or parts of rows, only.
//! Frameworks take rows and fields by DLPack ([`RaggedView::row_dlpack`], [`RolloutView::dlpack`]).

#[cfg(feature = "transport")]
mod arriving;
#[cfg(feature = "arrow")]
mod arrow;
mod dlpack;
mod gather;
mod header;
mod index;
mod layout;
mod narrow;
mod options;
mod plan;
mod ragged_view;
mod select;
mod view;

pub use header::{FieldInfo, Header, Limits};
pub use options::{Dedup, Options};
pub use plan::{PartSums, Plan};
pub use ragged_view::{RaggedView, RowRef};
pub use select::{Fragment, Locator, ReadLimits, ReadPlan, ReadRequest, read_plan};
pub use view::RolloutView;

#[cfg(feature = "transport")]
pub(crate) use {
    arriving::{Arrived, Arriving},
    narrow::widened,
    select::{Joined, join},
};

/// Alignment of segments in the data, in bytes.
pub const ALIGNMENT: u64 = 64;

/// Bytes that one block of a checksum covers: source and destination fit in a second-level cache.
pub const BLOCK_BYTES: u64 = 128 << 10;

const fn align(n: u64) -> Option<u64> {
    match n.checked_add(ALIGNMENT - 1) {
        Some(n) => Some(n / ALIGNMENT * ALIGNMENT),
        None => None,
    }
}
