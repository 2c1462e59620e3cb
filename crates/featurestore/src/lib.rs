//! Moves captured samples from inference servers into trainers, and gives their memory back.
//!
//! [`FeatureStore`] is what a trainer uses: it chooses a transport once, reads samples, and
//! releases them. The binary of this crate holds the capture server and the main job; see
//! `featurestore --help`.
//!
//! # Features
//! A library asks for `default-features = false` and for the transports that it uses.
//!
//! | feature | default | what it adds |
//! |---|---|---|
//! | `cli` | yes | the binary, and the modules that it is made of: `server`, `pipeline`, `input`, … |
//! | `direct` | yes | reading a capture server's memory, by the engines `shm` and `tcp` |
//! | `cuda` | no | arenas, pools and the engine of devices: transports `nvlink_intra` and `nvlink`, and `receive = device` |
//! | `lifecycle` | yes | what becomes of samples: ledger, acknowledgement, ranks, producer, consumer, … |
//! | `rollout` | yes | rollouts: ragged columns over the other transports |
//! | `arrow` | no | rollouts of Arrow and Parquet files, and their rows as Arrow arrays |
//! | `store` | no | Mooncake Store; one of the next two loads it at run time |
//! | `mooncake` | no | Mooncake from a C library |
//! | `mooncake-python` | no | Mooncake from its pip wheel, through an embedded interpreter |
#![forbid(unsafe_code)]

#[cfg(feature = "lifecycle")]
pub mod ack;
#[cfg(feature = "lifecycle")]
pub mod channel;
mod choose;
pub mod config;
#[cfg(feature = "lifecycle")]
pub mod consumer;
#[cfg(feature = "cli")]
pub mod doctor;
pub mod files;
#[cfg(all(test, feature = "lifecycle"))]
mod flaky;
#[cfg(feature = "lifecycle")]
pub mod flow;
#[cfg(feature = "cli")]
pub mod input;
#[cfg(feature = "lifecycle")]
pub mod launch;
#[cfg(feature = "lifecycle")]
pub mod layout;
#[cfg(feature = "lifecycle")]
pub mod ledger;
#[cfg(feature = "lifecycle")]
pub mod lifecycle;
#[cfg(any(feature = "cli", feature = "rollout"))]
mod manifest;
#[cfg(feature = "store")]
pub mod mooncake;
#[cfg(feature = "cli")]
pub mod pipeline;
#[cfg(feature = "cli")]
pub mod process;
#[cfg(feature = "lifecycle")]
pub mod producer;
#[cfg(feature = "lifecycle")]
pub mod ranks;
#[cfg(feature = "rollout")]
pub mod rollout;
#[cfg(feature = "cli")]
pub mod server;
#[cfg(feature = "cli")]
pub mod source;
mod store;
#[cfg(any(feature = "cli", feature = "rollout"))]
mod stored;
#[cfg(feature = "lifecycle")]
pub mod token;
#[cfg(feature = "cli")]
pub mod workload;

pub use choose::{Candidate, Choice, choose};
#[cfg(feature = "cli")]
#[doc(inline)]
pub use config::ServerConfig;
#[doc(inline)]
pub use config::{Config, Receive, Settings, TransportChoice};
pub use control_proto::Secret;
pub use store::FeatureStore;

/// The examples of the README, compiled with those of the documentation.
#[cfg(all(doctest, feature = "direct"))]
#[doc = include_str!("../../../README.md")]
struct Readme;
