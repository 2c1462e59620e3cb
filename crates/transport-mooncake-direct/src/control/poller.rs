//! The thread behind the control listener.

use std::{
    collections::HashMap,
    net::{SocketAddr, TcpListener},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use capture_arena::Arena;
use control_proto::control::{ArenaInfo, Budget, Code, LineDecoder, Response, ShmInfo};
use crossbeam_channel::{Receiver, Sender};
use rustix::{
    event::{Timespec, epoll},
    io::Errno,
};
use transport_core::{ClientId, Error, Health, Result, SessionName};

use super::{
    peer::{Input, Peer, Watched},
    server::{AnonymousFrees, ControlServerConfig, Counters, HealthSource, Shared},
};

/// Bytes taken from one connection before the others have their turn.
const READ_BYTES: usize = 64 << 10;
/// How often leases and closing connections are looked at.
const SWEEP: Duration = Duration::from_millis(250);
/// Tokens of the listener and the waker; connections count from 0.
const LISTENER: u64 = u64::MAX;
const WAKER: u64 = u64::MAX - 1;

/// Carries the arena's answers from its owner thread to the poller.
#[derive(Clone)]
pub(super) struct Outbox {
    sender: Sender<(u64, Response)>,
    shared: Arc<Shared>,
}

impl Outbox {
    pub(super) fn send(&self, token: u64, response: Response) {
        // After the poller has ended nobody waits for the answer.
        let _ = self.sender.send((token, response));
        if !self.shared.answers_wait.swap(true, Ordering::AcqRel) {
            self.shared.waker.wake();
        }
    }
}

/// The listener's thread: every connection, and what was said on it.
pub(super) struct Poller {
    pub(super) arena: Arena,
    pub(super) config: ControlServerConfig,
    pub(super) hello: ArenaInfo,
    pub(super) session: SessionName,
    pub(super) health: HealthSource,
    listener: TcpListener,
    pub(super) shared: Arc<Shared>,
    epoll: std::os::fd::OwnedFd,
    budget: Budget,
    peers: HashMap<u64, (Peer, LineDecoder)>,
    next_token: u64,
    pub(super) clients: HashMap<ClientId, usize>, // connections of each
    pub(super) outbox: Outbox,
    answers: Receiver<(u64, Response)>,
    pub(super) measured: Option<Health>, // until something changes
    pub(super) anonymous: bool,
}

impl Poller {
    pub(super) fn new(
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

    /// Serves until it is told to stop.
    pub(super) fn run(mut self) {
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

    /// Ends a connection for what its peer did, with a reason.
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

fn flags(watched: Watched) -> epoll::EventFlags {
    let mut flags = epoll::EventFlags::empty();
    flags.set(epoll::EventFlags::IN, watched.read);
    flags.set(epoll::EventFlags::OUT, watched.write);
    flags
}
