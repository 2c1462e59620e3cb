//! What the listener does with a line: whom it obeys, and what it answers.

use std::time::Instant;

use capture_arena::{FreeRequest, HoldRequest, ObjectList};
use control_proto::control::{
    BadLine, Code, Hello, Objects, Request, Response, ServerHello, VERSION,
};
use transport_core::{ClientId, Epoch, ErrorKind};

use super::{Client, Counters, Peer, Poller};

/// Objects of a free that the listener's own thread does: waking another one would take about as long.
/// While more are freed there, the next line is read here.
const FREED_HERE: usize = 64;

impl Poller {
    pub(super) fn obey(&mut self, token: u64, peer: &mut Peer, line: &[u8]) {
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
                // The same client may greet again before this connection has ended.
                if let Some(client) = peer.client.take() {
                    self.one_less(&client.id);
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

    pub(super) fn free(
        &mut self,
        client: Option<ClientId>,
        objects: ObjectList,
        reply: Option<Box<dyn FnOnce(capture_arena::FreeOutcome) + Send>>,
    ) {
        Counters::add(&self.shared.counters.freed_keys, objects.len() as u64);
        self.measured = None;
        let little = objects.len() <= FREED_HERE;
        let request = FreeRequest { client, objects, reply };
        if little { self.arena.free_here(request) } else { self.arena.free(request) }
    }

    /// Claims objects; those that do not lie where the client believes are given back at once.
    pub(super) fn hold(
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
            .filter(|(_, range)| range.is_some_and(|(at, len)| !arena.export().is_object(at, len)))
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
                let capture_arena::HoldOutcome { before, gone, mut stale } = outcome;
                if !elsewhere.is_empty() {
                    // What it held before has a claim of its own.
                    let places = elsewhere.iter().zip(back.iter());
                    let new = places.filter(|(place, _)| !before.contains(place));
                    arena.unhold(&holder, new.map(|(_, object)| object).collect());
                    stale.extend(elsewhere.into_iter().filter(|i| !gone.contains(i)));
                    stale.sort_unstable();
                    stale.dedup();
                }
                outbox.send(token, Response::Held { id, gone, stale });
            })),
        });
    }

    /// The client of an object line, if the line may be obeyed.
    pub(super) fn entitled(&mut self, peer: &mut Peer, id: u64, epoch: Epoch) -> Option<ClientId> {
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

    pub(super) fn greet(&mut self, peer: &mut Peer, hello: Hello) {
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
        let (lease, mark) = (hello.lease.min(self.config.max_lease), hello.mapping);
        if let Err(error) = self.arena.client_greets_blocking(&hello.client, lease, mark) {
            let code = match error.kind() {
                ErrorKind::Busy => Code::ClientInUse,
                _ => Code::Closing,
            };
            return self.close_for(peer, code, &error);
        }
        if peer.client.is_none() {
            let connections = self.clients.entry(hello.client.clone()).or_insert(0);
            *connections += 1;
            if *connections == 1 {
                Counters::add(&self.shared.counters.clients, 1);
            }
        }
        peer.client = Some(Client { id: hello.client, lease, mark, seen: now, told: now });
        // Read after the arena was told: what is published later finds the client known.
        let last_seq = self.arena.export().last_sequence();
        let (epoch, session) = (self.arena.epoch(), self.session.clone());
        let hello = ServerHello::new(epoch, session, lease, self.hello.clone()).last_seq(last_seq);
        self.answer(peer, &Response::Hello(hello));
    }

    pub(super) fn report(&mut self, peer: &mut Peer, id: u64) {
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

    pub(super) fn answer(&self, peer: &mut Peer, response: &Response) {
        if !peer.answer(response, self.config.limits.connection_bytes) {
            Counters::add(&self.shared.counters.closed_for_cause, 1);
            tracing::debug!(address = %peer.address, "a client does not read its answers");
            peer.close_soon(Instant::now());
        }
    }

    pub(super) fn refuse(
        &self,
        peer: &mut Peer,
        id: Option<u64>,
        code: Code,
        message: impl Into<String>,
    ) {
        Counters::add(&self.shared.counters.refused_lines, 1);
        tracing::debug!(address = %peer.address, %code, "line refused");
        peer.complain(id, code, message.into(), self.config.limits.connection_bytes);
    }

    pub(super) fn bad_line(&self, peer: &mut Peer, line: &[u8], bad: BadLine) {
        let counters = &self.shared.counters;
        Counters::add(&counters.bad_lines, 1);
        *counters.last_error.lock() = Some(bad.to_string());
        tracing::debug!(address = %peer.address, reason = bad.reason(), "bad control line");
        let limits = &self.config.limits;
        // Meant as an object line, whatever is wrong with it: its sender waits for an answer.
        peer.extended |= line.trim_ascii_start().starts_with(b"{");
        let id = peer.extended.then(|| Request::id_of(line, limits)).flatten();
        peer.complain(id, Code::BadLine, bad.to_string(), limits.connection_bytes);
    }

    pub(super) fn close_for(&self, peer: &mut Peer, code: Code, reason: &dyn std::fmt::Display) {
        let counters = &self.shared.counters;
        Counters::add(&counters.closed_for_cause, 1);
        *counters.last_error.lock() = Some(reason.to_string());
        tracing::debug!(address = %peer.address, %reason, "control connection closed");
        peer.complain(None, code, reason.to_string(), self.config.limits.connection_bytes);
        peer.close_soon(Instant::now());
    }
}
