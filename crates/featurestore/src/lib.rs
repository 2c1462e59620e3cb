//! Moves captured samples from inference servers into trainers, and gives their memory back.
//!
//! [`FeatureStore`] is what a trainer uses: it chooses a transport once, reads samples, and
//! releases them. The binary of this crate holds the capture server and the main job; see
//! `featurestore --help`.
#![forbid(unsafe_code)]

pub mod ack;
pub mod channel;
mod choose;
pub mod config;
pub mod consumer;
pub mod flow;
pub mod input;
pub mod launch;
pub mod layout;
pub mod ledger;
pub mod lifecycle;
pub mod pipeline;
mod process;
pub mod producer;
pub mod ranks;
pub mod server;
pub mod source;
mod store;
pub mod token;
pub mod workload;

pub use choose::{Candidate, Choice, choose};
pub use config::{Config, ServerConfig, Settings, TransportChoice};
pub use store::FeatureStore;
