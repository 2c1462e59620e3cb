//! The cuda engine: memory of devices, of this process and of others on the host.
//!
//! [`CudaEngine`] reads what other processes have shared; each of its calls has a lane.
//! [`CopyLane`] copies between any two places that a device can reach: large pieces through the
//! copy engine, many small ones by one launch of the [`GatherKernel`]. [`DeviceTensors`] writes
//! tensors where they are to be published, and sums tensors up where they have arrived.

mod engine;
#[cfg(test)]
mod engine_tests;
mod kernel;
mod lane;
mod module;
mod peers;
mod sequence;
#[cfg(any(test, feature = "scripted-cuda"))]
mod simulated;
mod tensors;
#[cfg(test)]
mod tensors_tests;
#[cfg(test)]
mod tests;
mod wait;

pub use engine::{CudaEngine, CudaOptions, CudaStats};
pub use kernel::GatherKernel;
pub use lane::{CopyLane, CopyPolicy, Wait};
#[cfg(any(test, feature = "scripted-cuda"))]
pub use simulated::simulate_kernels;
pub use tensors::{Content, DeviceTensors, Written};
