//! Serving published ranges: the handshake port, which is the session, and the data port.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use capture_arena::Arena;
use control_proto::mooncake::{data, handshake};
use transport_core::{Result, SessionName};

use super::{
    handshake::answer,
    serve::{Bounds, Counters, Served, serve},
    window::WriteWindow,
};
use crate::net::{Acceptor, AcceptorConfig, AllowList, listen};

/// How a [`DataServer`] listens and what it allows.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DataServerConfig {
    /// Where the handshake is answered. Default: any free port of 127.0.0.1.
    pub session_bind: SocketAddr,
    /// Where bytes are served. Default: any free port of the host of `session_bind`.
    pub data_bind: Option<SocketAddr>,
    /// Host that peers are told to connect to; the bound address unless given. Needed where the
    /// bound address is that of no interface, such as 0.0.0.0.
    pub advertise_host: Option<String>,
    /// Who may connect.
    pub allow: AllowList,
    /// Memory that peers may write. Default: none; every write is refused.
    pub writable: Option<WriteWindow>,
    /// Data connections at a time; each has a thread. Default: 256.
    pub max_connections: usize,
    /// Handshakes at a time. Default: 32.
    pub max_handshakes: usize,
    /// How long a data connection may be idle. Default: 2 minutes.
    pub idle: Duration,
    /// How long a peer may stall within an exchange. Default: 10 seconds.
    pub stall: Duration,
    /// Largest single transfer. Default: 64 GiB.
    pub max_transfer: u64,
}

impl Default for DataServerConfig {
    fn default() -> Self {
        Self {
            session_bind: SocketAddr::from(([127, 0, 0, 1], 0)),
            data_bind: None,
            advertise_host: None,
            allow: AllowList::default(),
            writable: None,
            max_connections: 256,
            max_handshakes: 32,
            idle: Duration::from_secs(120),
            stall: Duration::from_secs(10),
            max_transfer: data::MAX_TRANSFER_BYTES,
        }
    }
}

/// Serves reads of published ranges until it is closed or dropped.
#[derive(Debug)]
pub struct DataServer {
    session: SessionName,
    handshake: Acceptor,
    data: Option<Acceptor>, // none where only devices can reach the memory
    #[cfg(feature = "cuda")]
    fds: Option<crate::device::FdServer>,
    counters: Arc<Counters>,
}

/// What a [`DataServer`] has done so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DataServerStats {
    /// Data connections at the moment.
    pub connections: u64,
    /// Connections turned away: not on the list, or one too many.
    pub refused_connections: u64,
    /// Ranges read by peers.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Ranges written by peers.
    pub writes: u64,
    /// Their bytes.
    pub write_bytes: u64,
    /// Reads and writes that were refused.
    pub rejected: u64,
    /// Connections that ended because the peer broke the rules or stalled.
    pub protocol_errors: u64,
    /// Handshakes answered.
    pub handshakes: u64,
    /// The newest such failure.
    pub last_error: Option<String>,
}

impl DataServer {
    /// Starts serving what `arena` publishes.
    ///
    /// An arena in device memory is only described, for peers that open its memory themselves:
    /// there is no data port then.
    pub fn start(arena: &Arena, config: &DataServerConfig) -> Result<Self> {
        let session_listener = listen("handshake", config.session_bind)?;
        let local = |l: &std::net::TcpListener| {
            l.local_addr().map_err(|e| transport_core::Error::io("listen", e))
        };
        let session = advertised(config.advertise_host.as_deref(), local(&session_listener)?)?;
        let counters = Arc::new(Counters::default());
        #[cfg(feature = "cuda")]
        if let Some(shared) = crate::device::Shared::of(arena, &session)? {
            if config.data_bind.is_some() || config.writable.is_some() {
                return Err(transport_core::Error::new(
                    transport_core::ErrorKind::ConfigInvalid,
                    "start data server",
                    "an arena in device memory has no data port",
                )
                .remedy("set neither the port that bytes are served at nor memory to write"));
            }
            let handshake =
                Self::answers(session_listener, shared.descriptor, config, counters.clone())?;
            return Ok(Self { session, handshake, data: None, fds: shared.fds, counters });
        }
        if !arena.backing().kind().is_host() {
            return Err(transport_core::Error::new(
                transport_core::ErrorKind::Unsupported,
                "start data server",
                "this build cannot serve device memory",
            )
            .remedy("build with the feature `cuda`"));
        }
        let data_bind =
            config.data_bind.unwrap_or_else(|| SocketAddr::new(config.session_bind.ip(), 0));
        let data_listener = listen("data", data_bind)?;
        let data_port = local(&data_listener)?.port();

        let mut buffers =
            vec![handshake::Buffer::new(arena.base(), arena.capacity(), session.to_string())];
        buffers.extend(config.writable.as_ref().map(|window| {
            handshake::Buffer::new(window.address(), window.len(), session.to_string())
        }));
        let descriptor = handshake::SegmentDescriptor {
            buffers,
            name: session.to_string(),
            protocol: "tcp".into(),
            tcp_data_host: session.host().into(),
            tcp_data_port: data_port,
            tcp_proto_version: 2,
            featurestore_epoch: Some(arena.epoch()),
            ..handshake::SegmentDescriptor::default()
        };
        let handshake = Self::answers(session_listener, descriptor, config, counters.clone())?;

        let bounds =
            Bounds { idle: config.idle, stall: config.stall, max_transfer: config.max_transfer };
        let (exports, window) = (arena.export().clone(), config.writable.clone());
        let counted = counters.clone();
        let data = Acceptor::start(
            data_listener,
            acceptor("fs-data", config.max_connections, config),
            move |conn, peer, stop| {
                let served = Served {
                    exports: &exports,
                    window: window.as_ref(),
                    bounds,
                    counters: &counted,
                };
                if let Err(error) = serve(conn, &served, stop) {
                    tracing::debug!(%peer, %error, "data connection failed");
                    counted.failed(&error);
                }
            },
        )?;
        Ok(Self {
            session,
            handshake,
            data: Some(data),
            #[cfg(feature = "cuda")]
            fds: None,
            counters,
        })
    }

    /// Starts answering handshakes with `descriptor`.
    fn answers(
        listener: std::net::TcpListener,
        descriptor: handshake::SegmentDescriptor,
        config: &DataServerConfig,
        counters: Arc<Counters>,
    ) -> Result<Acceptor> {
        let stall = config.stall;
        Acceptor::start(
            listener,
            acceptor("fs-handshake", config.max_handshakes, config),
            move |conn, peer, stop| match answer(conn, &descriptor, stall, stop) {
                Ok(()) => Counters::add(&counters.handshakes, 1),
                Err(error) => {
                    tracing::debug!(%peer, %error, "handshake failed");
                    counters.failed(&error);
                }
            },
        )
    }

    /// Name under which peers reach it.
    pub fn session(&self) -> &SessionName {
        &self.session
    }

    /// Address of the data port; none for an arena in device memory.
    pub fn data_address(&self) -> Option<SocketAddr> {
        self.data.as_ref().map(Acceptor::address)
    }

    /// What it has done so far.
    pub fn stats(&self) -> DataServerStats {
        use std::sync::atomic::Ordering::Relaxed;
        let counters = &self.counters;
        let (open, refused) = self.data.as_ref().map_or((0, 0), |d| (d.open(), d.refused()));
        DataServerStats {
            connections: open as u64,
            refused_connections: refused + self.handshake.refused() + self.refused_fds(),
            reads: counters.reads.load(Relaxed),
            read_bytes: counters.read_bytes.load(Relaxed),
            writes: counters.writes.load(Relaxed),
            write_bytes: counters.write_bytes.load(Relaxed),
            rejected: counters.rejected.load(Relaxed),
            protocol_errors: counters.protocol_errors.load(Relaxed),
            handshakes: counters.handshakes.load(Relaxed),
            last_error: counters.last_error.lock().clone(),
        }
    }

    /// Ends every connection and joins every thread. Idempotent.
    pub fn close(&self) {
        self.handshake.close();
        if let Some(data) = &self.data {
            data.close();
        }
        #[cfg(feature = "cuda")]
        if let Some(fds) = &self.fds {
            fds.close();
        }
    }

    fn refused_fds(&self) -> u64 {
        #[cfg(feature = "cuda")]
        let refused = self.fds.as_ref().map_or(0, |fds| fds.stats().refused);
        #[cfg(not(feature = "cuda"))]
        let refused = 0;
        refused
    }
}

fn acceptor(
    name: &'static str,
    max_connections: usize,
    config: &DataServerConfig,
) -> AcceptorConfig {
    AcceptorConfig { name, max_connections, allow: config.allow.clone() }
}

/// The name under which a bound listener is reached.
pub(crate) fn advertised(host: Option<&str>, bound: SocketAddr) -> Result<SessionName> {
    match host {
        Some(host) => SessionName::new(host, bound.port()),
        None if bound.ip().is_unspecified() => Err(transport_core::Error::new(
            transport_core::ErrorKind::ConfigInvalid,
            "listen",
            "the bound address is none that peers can connect to",
        )
        .with("address", bound)
        .remedy("set the advertised host to the name or address of this host")),
        None => Ok(bound.into()),
    }
}
