//! The control listener: one thread, any number of connections, nothing that blocks.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use capture_arena::Arena;
use control_proto::{Secret, control::Limits};
use parking_lot::Mutex;
use transport_core::{Error, ErrorKind, Health, Result, SessionName};

use super::poller::Poller;
use crate::{
    net::{AllowList, Waker, listen},
    tcp::advertised,
};

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

/// How a [`ControlServer`] listens and what it allows.
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
        }
    }
}

/// Completes the arena's health with what the caller measures besides.
pub(crate) type HealthSource = Arc<dyn Fn(Health) -> Health + Send + Sync>;

/// Takes claims and frees for an arena until it is closed or dropped.
#[derive(Debug)]
pub struct ControlServer {
    shared: Arc<Shared>,
    control: SessionName,
    address: SocketAddr,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the listener's thread and its owner share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) stop: AtomicBool,
    pub(super) waker: Waker,
    /// Answers of the arena wait, and the poller has been woken for them.
    pub(super) answers_wait: AtomicBool,
    pub(super) counters: Counters,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) connections: AtomicU64,
    pub(super) clients: AtomicU64,
    pub(super) lines: AtomicU64,
    pub(super) freed_keys: AtomicU64,
    pub(super) bad_lines: AtomicU64,
    pub(super) refused_lines: AtomicU64,
    pub(super) cut_lines: AtomicU64,
    pub(super) closed_for_cause: AtomicU64,
    pub(super) refused_connections: AtomicU64,
    pub(super) last_error: Mutex<Option<String>>,
}

/// What a [`ControlServer`] has seen so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ControlServerStats {
    /// Connections at the moment.
    pub connections: u64,
    /// Clients that have said who they are, at the moment.
    pub clients: u64,
    /// Lines taken.
    pub lines: u64,
    /// Keys and objects whose free was passed on.
    pub freed_keys: u64,
    /// Lines that were no request.
    pub bad_lines: u64,
    /// Lines without the right to be obeyed, or for another life of the server.
    pub refused_lines: u64,
    /// Lines whose end never came.
    pub cut_lines: u64,
    /// Connections closed for what their peer did.
    pub closed_for_cause: u64,
    /// Connections turned away: not on the list, or one too many.
    pub refused_connections: u64,
    /// The newest failure.
    pub last_error: Option<String>,
}

impl ControlServer {
    /// Starts listening for `arena`, whose bytes are read at `session`.
    ///
    /// Refuses an address other than loopback without a token, unless
    /// [`AnonymousFrees::Everybody`] says so in so many words.
    pub fn start(arena: Arena, session: SessionName, config: ControlServerConfig) -> Result<Self> {
        Self::start_with(arena, session, config, Arc::new(|health| health))
    }

    pub(crate) fn start_with(
        arena: Arena,
        session: SessionName,
        config: ControlServerConfig,
        health: HealthSource,
    ) -> Result<Self> {
        let loopback = config.bind.ip().to_canonical().is_loopback();
        if !loopback && config.token.is_none() && config.anonymous != AnonymousFrees::Everybody {
            return Err(Error::new(
                ErrorKind::ConfigInvalid,
                "start control listener",
                "an address other than loopback needs a token",
            )
            .with("address", config.bind)
            .remedy(
                "set a token, or allow anonymous frees by everybody in so many words: \
                 then whoever can connect can free",
            ));
        }
        let listener = listen("control", config.bind)?;
        let failed = |e| Error::io("start control listener", e);
        let address = listener.local_addr().map_err(failed)?;
        let control = advertised(config.advertise_host.as_deref(), address)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            waker: Waker::new()?,
            answers_wait: AtomicBool::new(false),
            counters: Counters::default(),
        });
        let poller = Poller::new(arena, session, config, listener, shared.clone(), health)?;
        let thread = std::thread::Builder::new()
            .name("fs-control".into())
            .spawn(move || poller.run())
            .map_err(failed)?;
        Ok(Self { shared, control, address, thread: Mutex::new(Some(thread)) })
    }

    /// Name under which clients reach it.
    pub fn control(&self) -> &SessionName {
        &self.control
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it has seen so far.
    pub fn stats(&self) -> ControlServerStats {
        self.shared.counters.stats()
    }

    /// Ends every connection and joins the thread. Idempotent.
    pub fn close(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.waker.wake();
        if let Some(thread) = self.thread.lock().take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join(); // a panic there has been printed
        }
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        self.close();
    }
}

impl Counters {
    pub(super) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    fn stats(&self) -> ControlServerStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ControlServerStats {
            connections: get(&self.connections),
            clients: get(&self.clients),
            lines: get(&self.lines),
            freed_keys: get(&self.freed_keys),
            bad_lines: get(&self.bad_lines),
            refused_lines: get(&self.refused_lines),
            cut_lines: get(&self.cut_lines),
            closed_for_cause: get(&self.closed_for_cause),
            refused_connections: get(&self.refused_connections),
            last_error: self.last_error.lock().clone(),
        }
    }
}
