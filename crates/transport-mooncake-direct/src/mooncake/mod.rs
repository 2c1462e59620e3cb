//! The mooncake engine: Mooncake's own transfer engine does the reading.
//!
//! One [`MooncakeEngine`] serves one protocol. Neither the argument nor the environment by which
//! Mooncake is told a protocol decides what it takes: both sides are asked what they really run, and
//! nothing is read before they say the same.

mod engine;
mod gate;
mod memory;
mod protocol;

pub use engine::{MooncakeEngine, MooncakeOptions, MooncakeStats};
pub use protocol::Protocol;
