//! The cuda engine: memory of devices, of this process and of others on the host.
//!
//! [`CudaEngine`] reads what other processes have shared; each of its calls has a lane.
//! [`CopyLane`] copies between any two places that a device can reach: large pieces through the
//! copy engine, many small ones by one launch of the [`GatherKernel`].

mod engine;
#[cfg(test)]
mod engine_tests;
mod kernel;
mod lane;
mod peers;
mod sequence;
#[cfg(test)]
mod tests;

pub use engine::{CudaEngine, CudaOptions, CudaStats};
pub use kernel::GatherKernel;
pub use lane::{CopyLane, CopyPolicy, Wait};
