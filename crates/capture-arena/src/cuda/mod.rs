//! The CUDA driver: a thin layer over its calls, and memory of devices.
//!
//! [`driver()`] loads the driver at run time, or says why it cannot; nothing is linked and nothing
//! panics. [`CudaApi`] is every call that is made, behind a trait, so that any of them can be made
//! to fail on a machine without a device. [`Device`], [`Stream`], [`Event`], [`Pinned`] and
//! [`PeerMemory`] own what the calls give out; [`DeviceBlock`] is the memory of an arena or pool.
#![allow(unsafe_code)]

mod api;
mod arena;
mod copies;
mod device;
mod driver;
mod error;
mod kinds;
mod memory;
#[cfg(feature = "scripted-cuda")]
pub mod scripted;
mod staging;
mod symbols;

pub use api::{
    Access, ContextId, CopyOp, CudaApi, DeviceAttribute, DevicePtr, DriverInfo, EventId,
    FunctionId, HANDLE_BYTES, HandleBytes, KernelArg, Launch, MemoryId, MemoryInfo, MemoryPlan,
    ModuleId, Optional, ShareAs, StreamId,
};
pub use arena::{DeviceArenaConfig, DeviceBlock, handle_from_hex, handle_to_hex};
pub use copies::{Copied, Copier, CopyPiece};
pub use device::{Bound, Device, Event, Pinned, Stream};
pub use driver::{MIN_CUDA_VERSION, driver, driver_at};
pub use error::{CudaError, CudaResult, During};
pub use kinds::{ArenaKind, ArenaPeers, KindProbe, Tried};
pub use memory::PeerMemory;
pub use staging::{Crossing, PageLock, Part, Staging, StagingConfig};
