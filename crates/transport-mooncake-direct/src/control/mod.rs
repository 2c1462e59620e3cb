//! The control connection: how trainers claim and free what a capture server publishes.
//!
//! - [`ControlServer`] listens inside the publishing process and hands what it is told to the
//!   arena's owner thread, without ever waiting for it.

mod peer;
mod server;

pub use server::{AnonymousFrees, ControlServer, ControlServerConfig, ControlServerStats};
