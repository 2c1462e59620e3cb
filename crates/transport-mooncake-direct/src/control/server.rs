//! The control listener: one thread, any number of connections, nothing that blocks.

use std::{
    collections::HashMap,
    net::{SocketAddr, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use capture_arena::Arena;
use control_proto::control::{ArenaInfo, Budget, Code, LineDecoder, Response, ShmInfo};
use crossbeam_channel::{Receiver, Sender};
use parking_lot::Mutex;
use rustix::{
    event::{Timespec, epoll},
    io::Errno,
};
use transport_core::{ClientId, Error, ErrorKind, Health, Result, Seldom, SessionName};

mod obey;

use super::{
    config::{AnonymousFrees, ControlServerConfig},
    counters::{ControlServerStats, Counters},
    peer::{Client, Input, Peer, Watched},
};
use crate::{
    net::{Waker, listen},
    tcp::advertised,
};

/// Bytes taken from one connection before the others have their turn.
const READ_BYTES: usize = 64 << 10;
/// How often leases, closing connections and a listener that could not accept are looked at.
const SWEEP: Duration = Duration::from_millis(250);
/// Bytes of requests that may wait in the arena before nothing more is read from anybody: enough
/// for a few full lines of many clients at once, and no more memory than the connections' own.
const MAX_BACKLOG: usize = 16 << 20;
/// How often the arena's progress is looked at while nothing is read.
const CATCH_UP: Duration = Duration::from_millis(2);
/// Tokens of the listener and the waker; connections count from 0.
const LISTENER: u64 = u64::MAX;
const WAKER: u64 = u64::MAX - 1;

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

/// Carries the arena's answers to the poller, from whoever is at the arena's books.
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
    accepts: bool, // not for a while after it could not
    accept_log: Seldom,
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
            accepts: true,
            accept_log: Seldom::default(),
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
            let timeout = (!self.peers.is_empty() || !self.accepts)
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
                    token => {
                        self.let_arena_catch_up();
                        self.serve(token, event.flags, &mut buffer);
                    }
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

    /// Reads nothing while too much waits in the arena, which cannot refuse what it is told. Then
    /// clients wait in their sockets, and memory stays bounded whatever they send.
    fn let_arena_catch_up(&mut self) {
        if self.arena.backlog_bytes() <= MAX_BACKLOG {
            return;
        }
        let start = Instant::now();
        let stopped = |shared: &Shared| shared.stop.load(Ordering::Relaxed);
        // Down to half, so that each wait lets a good deal through afterwards.
        while self.arena.backlog_bytes() > MAX_BACKLOG / 2 && !stopped(&self.shared) {
            std::thread::sleep(CATCH_UP);
            self.pass_answers_on();
        }
        let waited = start.elapsed();
        tracing::debug!(?waited, "waited for the arena to catch up");
        self.peers.values_mut().for_each(|(peer, _)| peer.excuse(waited));
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
                    if self.accept_log.is_due(Instant::now()) {
                        tracing::warn!(%error, "cannot accept a control connection");
                    }
                    // Most likely there are no descriptors left, and others must end first. Those
                    // who are connected are served meanwhile; the next sweep tries again.
                    return self.set_accepts(false);
                }
            }
        }
    }

    /// Waits for new connections, or leaves them in the system's queue for now.
    fn set_accepts(&mut self, accepts: bool) {
        let watched = flags(Watched { read: accepts, write: false });
        let data = epoll::EventData::new_u64(LISTENER);
        match epoll::modify(&self.epoll, &self.listener, data, watched) {
            Ok(()) => self.accepts = accepts,
            Err(error) => tracing::error!(%error, "cannot change what the listener waits for"),
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
                    peer.mute_since = None;
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
        if self.one_less(&client.id) {
            self.arena.client_lost(&client.id);
        }
    }

    /// Counts a connection of a client that ends; true for its last.
    fn one_less(&mut self, client: &ClientId) -> bool {
        let Some(connections) = self.clients.get_mut(client) else { return false };
        *connections -= 1;
        let last = *connections == 0;
        if last {
            self.clients.remove(client);
            self.shared.counters.clients.fetch_sub(1, Ordering::Relaxed);
        }
        last
    }

    /// Tells the arena that a client lives; not at every line, but often enough.
    fn heartbeat(&self, peer: &mut Peer) {
        let Some(client) = &mut peer.client else { return };
        client.seen = Instant::now();
        if client.seen - client.told >= client.lease / 16 {
            client.told = client.seen;
            self.arena.client_seen(&client.id, client.lease, client.mark);
        }
    }

    fn pass_answers_on(&mut self) {
        let mut touched = Vec::new();
        // Not a plain store, which could come to be seen after the look below: an answer that is sent
        // in between would neither be found here nor wake anybody.
        self.shared.answers_wait.swap(false, Ordering::AcqRel);
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
        if !self.accepts {
            self.set_accepts(true);
        }
        let due: Vec<u64> = self
            .peers
            .iter()
            .filter(|(_, (peer, _))| {
                peer.is_over(now) || is_silent(peer, now) || self.is_mute(peer, now)
            })
            .map(|(&token, _)| token)
            .collect();
        for token in due {
            let Some((mut peer, decoder)) = self.peers.remove(&token) else { continue };
            if peer.is_open() && is_silent(&peer, now) {
                self.close_for(&mut peer, Code::LeaseExpired, &"silent for twice the lease");
            } else if self.is_mute(&peer, now) {
                self.close_for(&mut peer, Code::NeedHello, &"no line came in time");
            }
            self.settle(token, peer, decoder, false);
        }
    }

    /// Whether it has sent no complete line for longer than it may.
    fn is_mute(&self, peer: &Peer, now: Instant) -> bool {
        let since = peer.mute_since.filter(|_| peer.is_open());
        since.is_some_and(|since| now.saturating_duration_since(since) >= self.config.first_line)
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

fn flags(watched: Watched) -> epoll::EventFlags {
    let mut flags = epoll::EventFlags::empty();
    flags.set(epoll::EventFlags::IN, watched.read);
    flags.set(epoll::EventFlags::OUT, watched.write);
    flags
}
