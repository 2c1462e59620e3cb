//! The tcp engine: Mooncake's tcp wire, served and spoken natively.
//!
//! - [`DataServer`] answers the peer handshake and serves reads of published ranges;
//! - [`TcpEngine`] reads from any peer that speaks the wire, ours or Mooncake's.
//!
//! Both are blocking to the core: the thread that asks is the thread that reads the socket, straight
//! into the destination.

mod engine;
mod exchange;
mod handshake;
pub(crate) mod lanes;
mod peer;
mod plan;
mod segment;
mod serve;
mod server;
mod window;

pub(crate) use engine::{ReadError, outside};
pub use engine::{ReadOp, ReadOptions, TcpEngine, TcpOptions, TcpStats};
pub(crate) use handshake::fetch_metadata;
pub use handshake::peer_protocol;
pub(crate) use peer::check_epoch;
pub(crate) use server::advertised;
pub use server::{DataServer, DataServerConfig, DataServerStats};
pub use window::WriteWindow;
