//! The direct transport: samples are read out of the memory of the process that captured them.
#![deny(unsafe_code)] // but for the shm engine's views, and the engines for devices and of Mooncake

mod claims;
mod control;
#[cfg(feature = "cuda")]
#[allow(unsafe_code)]
pub mod cuda;
#[cfg(feature = "cuda")]
pub mod device;
mod mooncake;
mod net;
mod shm;
mod sink;
mod tcp;
mod transport;
mod workers;

pub use control::{
    AnonymousFrees, ControlClient, ControlOptions, ControlServer, ControlServerConfig,
    ControlServerStats, ControlStats, FreeTicket, Standing,
};
pub use mooncake::{MooncakeEngine, MooncakeOptions, MooncakeStats, Protocol};
pub use net::{AllowList, Cidr};
pub use sink::{CaptureSink, SinkConfig, SinkReservation};
pub use tcp::{
    DataServer, DataServerConfig, DataServerStats, ReadOp, ReadOptions, TcpEngine, TcpOptions,
    TcpStats, WriteWindow, peer_protocol,
};
pub use transport::{DirectTransport, DirectTransportBuilder, Engine, PendingRelease};
