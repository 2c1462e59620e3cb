//! Rollouts through the transports of this crate: what the commands `featurestore rollout …` are
//! made of.
//!
//! [`Endpoint`] puts a [`RolloutTransport`](rollout_codec::transport::RolloutTransport) together:
//! for a producer, whose process keeps the bytes (an arena, or object memory that it adds to a
//! store), or for a reader.

mod endpoint;
pub mod environment;
mod input;
#[cfg(feature = "store")]
mod objects;
mod report;
#[cfg(feature = "arrow")]
mod tables;

pub use endpoint::{Endpoint, Options};
pub use input::{Input, PayloadSpec};
#[cfg(feature = "store")]
pub use objects::StoreObjects;
pub use report::{FieldReport, inspect_header, payload_checksums};
