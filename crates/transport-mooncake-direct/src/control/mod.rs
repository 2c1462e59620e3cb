//! The control connection: how trainers claim and free what a capture server publishes.
//!
//! - [`ControlServer`] listens inside the publishing process and hands what it is told to the
//!   arena's owner thread, without ever waiting for it;
//! - [`ControlClient`] is a trainer's one connection to one server, with a thread of its own.

mod client;
mod link;
mod obey;
mod peer;
mod pending;
mod poller;
mod server;
mod ticket;
mod worker;

pub(crate) use client::Claimed;
pub use client::{ControlClient, ControlOptions, ControlStats, Standing};
pub(crate) use pending::ClaimObject;
pub use server::{AnonymousFrees, ControlServer, ControlServerConfig, ControlServerStats};

pub use ticket::FreeTicket;
