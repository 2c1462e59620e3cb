//! The cuda engine: memory of devices, of this process and of others on the host.
//!
//! [`CopyLane`] copies between any two places that a device can reach: large pieces through the
//! copy engine, many small ones by one launch of the [`GatherKernel`].

mod kernel;
mod lane;
mod sequence;
#[cfg(test)]
mod tests;

pub use kernel::GatherKernel;
pub use lane::{CopyLane, CopyPolicy, Wait};
