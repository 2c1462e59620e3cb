//! Sockets: binding, connecting within a deadline, reading and writing within bounds.

mod acceptor;
mod allow;
mod connect;
mod io;
mod waker;

pub(crate) use acceptor::{Acceptor, AcceptorConfig};
pub use allow::{AllowList, Cidr};
pub(crate) use connect::connect;
pub(crate) use io::{Conn, Received, Until};
pub(crate) use waker::Waker;

use std::net::{SocketAddr, TcpListener};

use transport_core::{Error, ErrorKind, Result};

/// Listens at `address`; `what` names the listener in errors.
pub(crate) fn listen(what: &'static str, address: SocketAddr) -> Result<TcpListener> {
    let failed = |e: std::io::Error| {
        let in_use = e.kind() == std::io::ErrorKind::AddrInUse;
        let error = Error::io("listen", e).with("listener", what).with("address", address);
        if in_use {
            error.remedy("another process has the port: stop it, or choose port 0 or another one")
        } else {
            error.remedy("choose an address of this host")
        }
    };
    let listener = TcpListener::bind(address).map_err(failed)?;
    // The backlog of the standard library is too short for a thousand trainers at once.
    rustix::net::listen(&listener, 1024).map_err(|e| failed(e.into()))?;
    Ok(listener)
}

/// The deadline passed.
pub(crate) fn timed_out(operation: &'static str) -> Error {
    Error::new(ErrorKind::Timeout, operation, "the deadline passed")
        .remedy("check that the peer and the network are up, or allow more time")
}
