//! Mooncake, found and loaded at run time. Nothing of it is needed to build this crate.
//!
//! - [`StoreApi`] and [`EngineApi`] are the few calls that the transports make, with raw pointers;
//! - `cabi` (feature `mooncake`) serves them from C libraries that the dynamic loader opens;
//! - `python` (feature `mooncake-python`) serves them from the official pip wheel, through an
//!   interpreter that is embedded at run time;
//! - [`master`] starts and ends a `mooncake_master` of one's own, for tests and single hosts;
//! - [`StoreCode`], [`EngineCode`] and [`TransferState`] give Mooncake's numbers a name, a kind and
//!   a verdict on trying again, and keep the numbers that they do not know.
//!
//! # What neither provider can guard against
//! - A C++ exception that leaves a C function ends the process. The store's C functions catch all;
//!   those of the transfer engine catch nothing (see `cabi`). The wheel turns exceptions into
//!   Python ones, which arrive as errors.
//! - Mooncake cancels no transfer. After a failed or timed-out call the peer may still write into
//!   the memory that was passed; the contracts of the traits say who has to keep it, and until when.
//! - The wheel's engine listens on every address, whatever `MC_TCP_BIND_ADDRESS` says: that is only
//!   what it tells its peers.
//! - Calls on a closed store crash the wheel's 0.3.13 library. Both providers keep the calls away
//!   from it: after `close` they answer [`ErrorKind::Closed`](transport_core::ErrorKind::Closed).

#[cfg(feature = "mooncake")]
pub mod cabi;
mod codes;
mod engine;
#[cfg(any(feature = "mooncake", feature = "mooncake-python"))]
mod loading;
pub mod master;
mod provider;
#[cfg(feature = "mooncake-python")]
pub mod python;
#[cfg(any(feature = "mooncake", feature = "mooncake-python"))]
mod search;
mod segment;
mod store;

pub use codes::{EngineCode, StoreCode, TransferState};
pub use engine::{
    EngineApi, EngineSetup, EngineSupport, ReadFailure, ReadPiece, Running, Submission,
};
pub use provider::{ProviderInfo, ProviderKind, StoreCapabilities};
#[cfg(any(feature = "mooncake", feature = "mooncake-python"))]
pub use search::Search;
pub use segment::{SegmentRead, SegmentReader};
pub use store::{GetItem, KeyResults, PutItem, Replica, ReplicaPolicy, StoreApi, StoreSetup};
