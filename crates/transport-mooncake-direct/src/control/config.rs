//! How a control listener listens, and whom it obeys.

use std::{net::SocketAddr, time::Duration};

use control_proto::{Secret, control::Limits};

use crate::net::AllowList;

/// Time for the first line: many times what a client takes to say hello, and short enough that
/// silent connections, of which there may be no more than others, do not fill the port for good.
const FIRST_LINE: Duration = Duration::from_secs(30);

/// Whose lists of keys are taken without a `hello`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AnonymousFrees {
    /// Everybody's where the listener is on a loopback address and no token is set; else nobody's.
    #[default]
    LoopbackOnly,
    /// Everybody's, on any address, even without a token: whoever can connect can free.
    Everybody,
    /// Nobody's.
    Nobody,
}

/// How a [`ControlServer`](super::ControlServer) listens and what it allows.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ControlServerConfig {
    /// Where it listens. Default: any free port of 127.0.0.1.
    pub bind: SocketAddr,
    /// Host that clients are told to connect to; the bound address unless given.
    pub advertise_host: Option<String>,
    /// Who may connect.
    pub allow: AllowList,
    /// What clients must prove to know.
    pub token: Option<Secret>,
    /// Whose lists of keys are taken.
    pub anonymous: AnonymousFrees,
    /// Bounds on lines, connections and what waits.
    pub limits: Limits,
    /// Longest lease granted. Default: 10 minutes.
    pub max_lease: Duration,
    /// How long a connection may stay without one complete line; then it is closed. Default: 30
    /// seconds.
    pub first_line: Duration,
}

impl Default for ControlServerConfig {
    fn default() -> Self {
        Self {
            bind: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise_host: None,
            allow: AllowList::default(),
            token: None,
            anonymous: AnonymousFrees::default(),
            limits: Limits::default(),
            max_lease: Duration::from_secs(600),
            first_line: FIRST_LINE,
        }
    }
}
