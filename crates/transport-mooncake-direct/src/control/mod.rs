//! The control connection: how trainers claim and free what a capture server publishes.
//!
//! - [`ControlServer`] listens inside the publishing process and hands what it is told to the
//!   arena, whose owner thread does all but small frees, without ever waiting for it;
//! - [`ControlClient`] is a trainer's one connection to one server, with a thread of its own.

mod client;
mod config;
mod counters;
mod link;
mod peer;
mod pending;
mod server;
mod ticket;
mod worker;

pub(crate) use client::Claimed;
pub use client::{ControlClient, ControlOptions, ControlStats, Standing};
pub use config::{AnonymousFrees, ControlServerConfig};
pub use counters::ControlServerStats;
pub(crate) use pending::ClaimObject;
pub use server::ControlServer;

pub use ticket::FreeTicket;
