//! The control listener: one thread, any number of connections, nothing that blocks.

use std::{
    collections::HashMap,
    net::{SocketAddr, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use capture_arena::{Arena, FreeRequest, HoldRequest, ObjectList};
use control_proto::{
    Secret,
    control::{
        ArenaInfo, BadLine, Budget, Code, Hello, Limits, LineDecoder, Objects, Request, Response,
        ServerHello, ShmInfo, VERSION,
    },
};
use crossbeam_channel::{Receiver, Sender};
use parking_lot::Mutex;
use rustix::{
    event::{Timespec, epoll},
    io::Errno,
};
use transport_core::{ClientId, Epoch, Error, ErrorKind, Health, RemoteAddr, Result, SessionName};

use super::peer::{Client, Input, Peer, Watched};
use crate::{
    net::{AllowList, Waker, listen},
    tcp::advertised,
};

/// Bytes taken from one connection before the others have their turn.
const READ_BYTES: usize = 64 << 10;
/// How often leases and closing connections are looked at.
const SWEEP: Duration = Duration::from_millis(250);
/// Tokens of the listener and the waker; connections count from 0.
const LISTENER: u64 = u64::MAX;
const WAKER: u64 = u64::MAX - 1;

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

#[derive(Debug)]
struct Shared {
    stop: AtomicBool,
    waker: Waker,
    answers_wait: AtomicBool, // and the poller has been woken for them
    counters: Counters,
}

#[derive(Debug, Default)]
struct Counters {
    connections: AtomicU64,
    clients: AtomicU64,
    lines: AtomicU64,
    freed_keys: AtomicU64,
    bad_lines: AtomicU64,
    refused_lines: AtomicU64,
    cut_lines: AtomicU64,
    closed_for_cause: AtomicU64,
    refused_connections: AtomicU64,
    last_error: Mutex<Option<String>>,
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
    fn add(counter: &AtomicU64, n: u64) {
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

/// Carries the arena's answers from its owner thread to the poller.
#[derive(Clone)]
struct Outbox {
    sender: Sender<(u64, Response)>,
    shared: Arc<Shared>,
}

impl Outbox {
    fn send(&self, token: u64, response: Response) {
        // After the poller has ended nobody waits for the answer.
        let _ = self.sender.send((token, response));
        if !self.shared.answers_wait.swap(true, Ordering::AcqRel) {
            self.shared.waker.wake();
        }
    }
}

struct Poller {
    arena: Arena,
    config: ControlServerConfig,
    hello: ArenaInfo,
    session: SessionName,
    health: HealthSource,
    listener: TcpListener,
    shared: Arc<Shared>,
    epoll: std::os::fd::OwnedFd,
    budget: Budget,
    peers: HashMap<u64, (Peer, LineDecoder)>,
    next_token: u64,
    clients: HashMap<ClientId, usize>, // connections of each
    outbox: Outbox,
    answers: Receiver<(u64, Response)>,
    measured: Option<Health>, // until something changes
    anonymous: bool,
}

impl Poller {
    fn new(
        arena: Arena,
        session: SessionName,
        config: ControlServerConfig,
        listener: TcpListener,
        shared: Arc<Shared>,
        health: HealthSource,
    ) -> Result<Self> {
        let failed = |e: Errno| Error::io("start control listener", e.into());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        let data = epoll::EventData::new_u64;
        epoll::add(&epoll, &listener, data(LISTENER), epoll::EventFlags::IN).map_err(failed)?;
        epoll::add(&epoll, &shared.waker, data(WAKER), epoll::EventFlags::IN).map_err(failed)?;
        let shm = arena.backing().shared_handle().map(|handle| ShmInfo {
            boot_id: handle.boot_id.clone(),
            pid: handle.pid,
            fd: handle.fd,
            dev: handle.dev,
            ino: handle.ino,
        });
        let anonymous = match config.anonymous {
            AnonymousFrees::Everybody => true,
            AnonymousFrees::Nobody => false,
            AnonymousFrees::LoopbackOnly => config.token.is_none(), // and bound to loopback
        };
        let (sender, answers) = crossbeam_channel::unbounded();
        Ok(Self {
            hello: ArenaInfo { base: arena.base(), bytes: arena.capacity(), shm },
            budget: Budget::new(config.limits),
            outbox: Outbox { sender, shared: shared.clone() },
            peers: HashMap::new(),
            clients: HashMap::new(),
            next_token: 0,
            measured: None,
            arena,
            config,
            session,
            health,
            listener,
            shared,
            epoll,
            answers,
            anonymous,
        })
    }

    fn run(mut self) {
        let mut buffer = vec![0; READ_BYTES];
        let mut events = Vec::with_capacity(256);
        let mut next_sweep = Instant::now() + SWEEP;
        while !self.shared.stop.load(Ordering::Relaxed) {
            events.clear();
            let wait = next_sweep.saturating_duration_since(Instant::now());
            // Without connections there is nothing to look after.
            let timeout = (!self.peers.is_empty())
                .then_some(Timespec { tv_sec: 0, tv_nsec: wait.as_nanos() as i64 });
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                timeout.as_ref(),
            ) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "the control listener cannot wait any more");
                    return;
                }
            }
            self.measured = None;
            for event in &events {
                match event.data.u64() {
                    LISTENER => self.accept_all(),
                    WAKER => self.shared.waker.reset(),
                    token => self.serve(token, event.flags, &mut buffer),
                }
            }
            self.pass_answers_on();
            let now = Instant::now();
            if now >= next_sweep {
                next_sweep = now + SWEEP;
                self.sweep(now);
            }
        }
        self.say_goodbye();
    }

    fn accept_all(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((stream, address)) => {
                    if let Err(reason) = self.admit(stream, address) {
                        Counters::add(&self.shared.counters.refused_connections, 1);
                        tracing::debug!(%address, %reason, "control connection refused");
                    }
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a control connection");
                    std::thread::sleep(Duration::from_millis(20)); // out of descriptors
                    return;
                }
            }
        }
    }

    fn admit(&mut self, stream: std::net::TcpStream, address: SocketAddr) -> Result<(), String> {
        if !self.config.allow.allows(address.ip()) {
            return Err("not on the allow-list".into());
        }
        let decoder = self.budget.connect().map_err(|refused| refused.to_string())?;
        stream.set_nonblocking(true).map_err(|e| e.to_string())?;
        stream.set_nodelay(true).map_err(|e| e.to_string())?;
        let token = self.next_token;
        let watched = Watched { read: true, write: false };
        epoll::add(&self.epoll, &stream, epoll::EventData::new_u64(token), flags(watched))
            .map_err(|e| e.to_string())?;
        self.next_token += 1;
        let mut peer = Peer::new(stream, address, self.budget.share());
        peer.watched = watched;
        self.peers.insert(token, (peer, decoder));
        Counters::add(&self.shared.counters.connections, 1);
        Ok(())
    }

    /// Reads, answers and writes one connection.
    fn serve(&mut self, token: u64, events: epoll::EventFlags, buffer: &mut [u8]) {
        // Taken out while it is served, so that the poller's own parts can be used beside it.
        let Some((mut peer, mut decoder)) = self.peers.remove(&token) else { return };
        let broken = epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        let gone = events.intersects(epoll::EventFlags::IN | broken)
            && self.read(token, &mut peer, &mut decoder, buffer);
        self.settle(token, peer, decoder, gone);
    }

    /// Takes one buffer full of lines; true if the peer is gone.
    fn read(
        &mut self,
        token: u64,
        peer: &mut Peer,
        decoder: &mut LineDecoder,
        buffer: &mut [u8],
    ) -> bool {
        let bytes = match peer.receive(buffer) {
            Input::Bytes(n) => n,
            Input::Nothing => return false,
            Input::End | Input::Gone if !peer.is_open() => return true,
            end @ (Input::End | Input::Gone) => {
                if let Some(bytes) = decoder.finish() {
                    Counters::add(&self.shared.counters.cut_lines, 1);
                    tracing::debug!(address = %peer.address, bytes, "a line was cut off");
                }
                peer.half_close(Instant::now());
                return matches!(end, Input::Gone);
            }
        };
        let mut input = &buffer[..bytes];
        while peer.is_open() {
            match decoder.next_line(&mut input) {
                Ok(Some(line)) => {
                    Counters::add(&self.shared.counters.lines, 1);
                    self.obey(token, peer, line);
                }
                Ok(None) => break,
                Err(fatal) => self.close_for(peer, Code::LineTooLong, &fatal),
            }
        }
        self.heartbeat(peer);
        false
    }

    /// Writes what is left to say, and puts the connection back or ends it.
    fn settle(&mut self, token: u64, mut peer: Peer, decoder: LineDecoder, gone: bool) {
        if gone || !peer.flush() || peer.is_over(Instant::now()) {
            return self.forget(&peer);
        }
        let wants = peer.wants();
        if wants != peer.watched {
            let data = epoll::EventData::new_u64(token);
            if epoll::modify(&self.epoll, &peer.stream, data, flags(wants)).is_err() {
                return self.forget(&peer);
            }
            peer.watched = wants;
        }
        self.peers.insert(token, (peer, decoder));
    }

    /// Takes an ended connection off the books.
    fn forget(&mut self, peer: &Peer) {
        let counters = &self.shared.counters;
        counters.connections.fetch_sub(1, Ordering::Relaxed);
        let Some(client) = &peer.client else { return };
        let Some(connections) = self.clients.get_mut(&client.id) else { return };
        *connections -= 1;
        if *connections == 0 {
            self.clients.remove(&client.id);
            counters.clients.fetch_sub(1, Ordering::Relaxed);
            self.arena.client_lost(&client.id);
        }
    }

    fn obey(&mut self, token: u64, peer: &mut Peer, line: &[u8]) {
        let limits = self.config.limits;
        match Request::parse(line, &limits) {
            Ok(Request::Keys(list)) => {
                if peer.client.is_none() && !self.anonymous {
                    return self.refuse(peer, None, Code::BadToken, "a list of keys needs a hello");
                }
                let mut objects = ObjectList::new();
                list.iter().for_each(|key| objects.push(key, None));
                let client = peer.client.as_ref().map(|c| c.id.clone());
                self.free(client, objects, None);
            }
            Ok(Request::Hello(hello)) => {
                peer.extended = true;
                self.greet(peer, hello);
            }
            Ok(Request::Bye) => {
                if let Some(client) = &peer.client {
                    self.arena.client_bye(&client.id);
                }
                peer.close_soon(Instant::now());
            }
            Ok(Request::Ping { id }) => {
                peer.extended = true;
                self.answer(peer, &Response::Pong { id });
            }
            Ok(Request::Health { id }) => {
                peer.extended = true;
                if peer.client.is_none() && self.config.token.is_some() {
                    return self.refuse(peer, Some(id), Code::NeedHello, "say hello first");
                }
                self.report(peer, id);
            }
            Ok(Request::Hold { id, epoch, objects }) => {
                if let Some(client) = self.entitled(peer, id, epoch) {
                    self.hold(token, peer, id, client, &objects);
                }
            }
            Ok(Request::Free { id, epoch, objects }) => {
                if let Some(client) = self.entitled(peer, id, epoch) {
                    let (outbox, objects) = (self.outbox.clone(), objects.iter().collect());
                    peer.inflight += 1;
                    self.free(
                        Some(client),
                        objects,
                        Some(Box::new(move |outcome| {
                            let capture_arena::FreeOutcome { gone, stale } = outcome;
                            outbox.send(token, Response::Freed { id, gone, stale });
                        })),
                    );
                }
            }
            Ok(Request::Unhold { id, epoch, objects }) => {
                if let Some(client) = self.entitled(peer, id, epoch) {
                    self.arena.unhold(&client, objects.iter().collect());
                    self.answer(peer, &Response::Pong { id });
                }
            }
            Ok(_) => self.bad_line(peer, line, BadLine::UnknownOp),
            Err(bad) => self.bad_line(peer, line, bad),
        }
    }

    fn free(
        &mut self,
        client: Option<ClientId>,
        objects: ObjectList,
        reply: Option<Box<dyn FnOnce(capture_arena::FreeOutcome) + Send>>,
    ) {
        Counters::add(&self.shared.counters.freed_keys, objects.len() as u64);
        self.measured = None;
        self.arena.free(FreeRequest { client, objects, reply });
    }

    /// Claims objects; those that do not lie where the client believes are given back at once.
    fn hold(
        &mut self,
        token: u64,
        peer: &mut Peer,
        id: u64,
        client: ClientId,
        objects: &Objects<'_>,
    ) {
        let arena = &self.arena;
        let elsewhere: Vec<u32> = (0..)
            .zip(objects.ranges())
            .filter(|(_, range)| range.is_some_and(|(at, len)| !is_whole_object(arena, at, len)))
            .map(|(place, _)| place)
            .collect();
        let claims: ObjectList = objects.iter().collect();
        let mut misplaced = elsewhere.iter().peekable();
        let back: ObjectList = (0..)
            .zip(objects.iter())
            .filter(|(place, _)| misplaced.next_if_eq(&place).is_some())
            .map(|(_, object)| object)
            .collect();
        let (outbox, arena, holder) = (self.outbox.clone(), self.arena.clone(), client.clone());
        peer.inflight += 1;
        self.arena.hold(HoldRequest {
            client,
            objects: claims,
            reply: Some(Box::new(move |outcome| {
                let capture_arena::HoldOutcome { gone, mut stale } = outcome;
                if !elsewhere.is_empty() {
                    arena.unhold(&holder, back);
                    stale.extend(elsewhere.into_iter().filter(|i| !gone.contains(i)));
                    stale.sort_unstable();
                    stale.dedup();
                }
                outbox.send(token, Response::Held { id, gone, stale });
            })),
        });
    }

    /// The client of an object line, if the line may be obeyed.
    fn entitled(&mut self, peer: &mut Peer, id: u64, epoch: Epoch) -> Option<ClientId> {
        peer.extended = true;
        let Some(client) = peer.client.as_ref().map(|c| c.id.clone()) else {
            self.refuse(peer, Some(id), Code::NeedHello, "say hello first");
            return None;
        };
        if epoch != self.arena.epoch() {
            let message = format!("this is life {}, not {epoch}", self.arena.epoch());
            self.refuse(peer, Some(id), Code::StaleEpoch, message);
            return None;
        }
        Some(client)
    }

    fn greet(&mut self, peer: &mut Peer, hello: Hello) {
        if hello.version != VERSION {
            let message = format!("this server speaks version {VERSION}");
            return self.refuse(peer, None, Code::UnsupportedVersion, message);
        }
        if let Some(token) = &self.config.token
            && !hello.token.as_ref().is_some_and(|given| given.matches(token))
        {
            return self.refuse(peer, None, Code::BadToken, "the token is missing or wrong");
        }
        if peer.client.as_ref().is_some_and(|c| c.id != hello.client) {
            return self.refuse(peer, None, Code::BadLine, "the connection has another client");
        }
        let now = Instant::now();
        let lease = hello.lease.min(self.config.max_lease);
        if peer.client.is_none() {
            let connections = self.clients.entry(hello.client.clone()).or_insert(0);
            *connections += 1;
            if *connections == 1 {
                Counters::add(&self.shared.counters.clients, 1);
            }
        }
        self.arena.client_seen(&hello.client, lease);
        peer.client = Some(Client { id: hello.client, lease, seen: now, told: now });
        let hello =
            ServerHello::new(self.arena.epoch(), self.session.clone(), lease, self.hello.clone());
        self.answer(peer, &Response::Hello(hello));
    }

    fn report(&mut self, peer: &mut Peer, id: u64) {
        if self.measured.is_none() {
            // The owner thread never waits for anything, least of all for this one.
            match self.arena.health_blocking() {
                Ok(health) => self.measured = Some((self.health)(health.into())),
                Err(_) => {
                    let message = "the arena is closed".into();
                    let limit = self.config.limits.connection_bytes;
                    return peer.complain(Some(id), Code::Closing, message, limit);
                }
            }
        }
        let health = self.measured.clone().expect("just measured");
        self.answer(peer, &Response::Health { id, health });
    }

    fn answer(&self, peer: &mut Peer, response: &Response) {
        if !peer.answer(response, self.config.limits.connection_bytes) {
            Counters::add(&self.shared.counters.closed_for_cause, 1);
            tracing::debug!(address = %peer.address, "a client does not read its answers");
            peer.close_soon(Instant::now());
        }
    }

    fn refuse(&self, peer: &mut Peer, id: Option<u64>, code: Code, message: impl Into<String>) {
        Counters::add(&self.shared.counters.refused_lines, 1);
        tracing::debug!(address = %peer.address, %code, "line refused");
        peer.complain(id, code, message.into(), self.config.limits.connection_bytes);
    }

    fn bad_line(&self, peer: &mut Peer, line: &[u8], bad: BadLine) {
        let counters = &self.shared.counters;
        Counters::add(&counters.bad_lines, 1);
        *counters.last_error.lock() = Some(bad.to_string());
        tracing::debug!(address = %peer.address, reason = bad.reason(), "bad control line");
        let limits = &self.config.limits;
        let id = peer.extended.then(|| Request::id_of(line, limits)).flatten();
        peer.complain(id, Code::BadLine, bad.to_string(), limits.connection_bytes);
    }

    fn close_for(&self, peer: &mut Peer, code: Code, reason: &dyn std::fmt::Display) {
        let counters = &self.shared.counters;
        Counters::add(&counters.closed_for_cause, 1);
        *counters.last_error.lock() = Some(reason.to_string());
        tracing::debug!(address = %peer.address, %reason, "control connection closed");
        peer.complain(None, code, reason.to_string(), self.config.limits.connection_bytes);
        peer.close_soon(Instant::now());
    }

    /// Tells the arena that a client lives; not at every line, but often enough.
    fn heartbeat(&self, peer: &mut Peer) {
        let Some(client) = &mut peer.client else { return };
        client.seen = Instant::now();
        if client.seen - client.told >= client.lease / 16 {
            client.told = client.seen;
            self.arena.client_seen(&client.id, client.lease);
        }
    }

    fn pass_answers_on(&mut self) {
        let mut touched = Vec::new();
        self.shared.answers_wait.store(false, Ordering::Release);
        for (token, response) in self.answers.try_iter() {
            let Some((peer, _)) = self.peers.get_mut(&token) else { continue };
            peer.inflight -= 1;
            if !peer.answer(&response, self.config.limits.connection_bytes) {
                peer.close_soon(Instant::now());
            }
            touched.push(token);
        }
        touched.sort_unstable();
        touched.dedup();
        for token in touched {
            if let Some((peer, decoder)) = self.peers.remove(&token) {
                self.settle(token, peer, decoder, false);
            }
        }
    }

    /// Ends silent clients and connections that have been closing for long enough.
    fn sweep(&mut self, now: Instant) {
        let due: Vec<u64> = self
            .peers
            .iter()
            .filter(|(_, (peer, _))| peer.is_over(now) || is_silent(peer, now))
            .map(|(&token, _)| token)
            .collect();
        for token in due {
            let Some((mut peer, decoder)) = self.peers.remove(&token) else { continue };
            if peer.is_open() && is_silent(&peer, now) {
                self.close_for(&mut peer, Code::LeaseExpired, &"silent for twice the lease");
            }
            self.settle(token, peer, decoder, false);
        }
    }

    fn say_goodbye(mut self) {
        for (_, (mut peer, _)) in self.peers.drain() {
            let message = "the server is shutting down".into();
            peer.complain(None, Code::Closing, message, self.config.limits.connection_bytes);
            let _ = peer.flush(); // what does not fit now is not waited for
        }
    }
}

fn is_silent(peer: &Peer, now: Instant) -> bool {
    peer.is_open() && peer.client.as_ref().is_some_and(|c| now >= c.seen + 2 * c.lease)
}

/// Whether `len` bytes at `address` are one readable object from its first byte to its last.
fn is_whole_object(arena: &Arena, address: RemoteAddr, len: u64) -> bool {
    if len == 0 {
        return true; // takes no range
    }
    let readable = |address: Option<u64>, len: Option<u64>| match (address, len) {
        (Some(address), Some(len)) => arena.export().pin(RemoteAddr(address), len).is_ok(),
        _ => false,
    };
    readable(Some(address.0), Some(len))
        && !readable(Some(address.0), len.checked_add(1))
        && !readable(address.0.checked_sub(1), Some(2))
}

fn flags(watched: Watched) -> epoll::EventFlags {
    let mut flags = epoll::EventFlags::empty();
    flags.set(epoll::EventFlags::IN, watched.read);
    flags.set(epoll::EventFlags::OUT, watched.write);
    flags
}
