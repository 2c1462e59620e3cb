//! The thread that owns a control client's connection.

use std::{
    collections::{BTreeMap, VecDeque},
    net::TcpStream,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use control_proto::control::{
    Code, Hello, Response, ServerHello, write_bye, write_hello, write_ping,
};
use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use transport_core::{Error, ErrorKind, Result};

use super::{
    client::{Shared, Standing, closed},
    link::Link,
    pending::{Answer, Ask, Backoff, Item, Question, Sent, unreachable},
    ticket::Fate,
};
use crate::net::connect;

/// Lines that may be unanswered.
const WINDOW: usize = 64;
/// Lines that a caller writes itself; the thread, which it has to wake up, writes the others meanwhile.
const AT_ONCE: usize = 1;
/// Unsent bytes that are sent before more is written, so that the server begins with them.
const SEND_AT: usize = 8 << 10;
/// Unsent bytes at which no more lines are written.
const MAX_UNSENT: usize = 1 << 20;
/// How long, and how many bytes of, one-way frees are kept to be sent again.
const KEEP_FOR: Duration = Duration::from_secs(10);
const KEEP_BYTES: usize = 2 << 20;

/// How the server is spoken to.
#[derive(Debug)]
enum Mode {
    /// The greeting is not answered yet.
    Greeting {
        until: Instant,
    },
    Extended(Arc<ServerHello>),
    /// An older server, which answers nothing.
    OneWay,
}

/// The connection and what is said on it.
///
/// The thread that runs it connects, reads and looks at clocks; callers only write, and only to a
/// connection that stands.
pub(super) struct Worker {
    shared: Arc<Shared>,
    queue: VecDeque<Item>,
    sent: BTreeMap<u64, Sent>,
    next_id: u64,
    link: Option<(Link, Mode)>,
    backoff: Backoff,
    greeted: Option<Instant>, // when the greeting that is being answered was sent
    older_server: bool,
    lapsed: bool,                       // the server said that claims have ended
    given_up: bool, // nobody tries to reconnect before there is something to say
    kept: VecDeque<(Instant, Vec<u8>)>, // one-way lines, to be sent again after a reconnect
    ping: Option<(u64, Instant)>,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            queue: VecDeque::new(),
            sent: BTreeMap::new(),
            next_id: 1,
            link: None,
            backoff: Backoff::new(),
            greeted: None,
            older_server: false,
            lapsed: false,
            given_up: false,
            kept: VecDeque::new(),
            ping: None,
        }
    }

    pub(super) fn run(worker: &Mutex<Self>) {
        loop {
            let mut this = worker.lock();
            // Looked at first: what was handed over before the end was asked for is then taken.
            let closing = this.shared.closing.load(Ordering::Relaxed);
            this.take_items();
            if closing {
                let idle = this.queue.is_empty() && this.sent.is_empty();
                if idle || this.shared.abandon.load(Ordering::Relaxed) {
                    return this.finish();
                }
            }
            if let Err(error) = this.advance() {
                this.link_failed(&error);
            }
            let (wait, shared) = (this.wait(), this.shared.clone());
            drop(this); // callers write while the thread sleeps
            wait.sleep(&shared);
        }
    }

    /// Writes what the callers have brought, as far as the connection takes it at once; false if there
    /// is more to do, which is for the thread.
    pub(super) fn write_at_once(&mut self) -> bool {
        if !matches!(self.link, Some((_, Mode::Extended(_)))) {
            return false;
        }
        self.take_items();
        // The thread finds a broken connection broken too.
        let written = self.write(AT_ONCE).is_ok();
        let unsent = self.link.as_ref().map_or(0, |(link, _)| link.unsent());
        written && unsent == 0 && self.queue.is_empty()
    }

    fn take_items(&mut self) {
        if let Some(waiting) = &mut *self.shared.inbox.lock() {
            self.queue.extend(waiting.drain(..));
        }
        self.given_up &= self.queue.is_empty();
    }

    /// Connects, writes and reads, as far as that goes without waiting for the server.
    fn advance(&mut self) -> Result<()> {
        if self.link.is_none() {
            let wanted = !self.queue.is_empty() || !self.sent.is_empty() || self.holds_something();
            if !wanted || Instant::now() < self.backoff.due() {
                return Ok(());
            }
            self.connect()?;
        }
        self.read()?;
        self.check_clocks()?;
        self.write(WINDOW)
    }

    /// Whether a connection is kept up for the sake of claims.
    fn holds_something(&self) -> bool {
        !self.given_up && self.shared.standing.lock().is_some()
    }

    fn connect(&mut self) -> Result<()> {
        let options = &self.shared.options;
        let now = Instant::now();
        let stream = connect("control", &self.shared.server, now + options.connect_timeout)?;
        let mut link = Link::new(stream, options.limits)?;
        self.shared.connects.fetch_add(1, Ordering::Relaxed);
        let mode = if self.older_server {
            Mode::OneWay
        } else {
            let mut hello =
                Hello::new(options.client.clone(), options.lease, options.token.clone());
            hello.mapping = options.mapping;
            write_hello(link.out(), &hello);
            self.greeted = Some(now);
            Mode::Greeting { until: now + options.hello_timeout }
        };
        self.link = Some((link, mode));
        if self.older_server {
            self.backoff = Backoff::new();
            self.resend_kept();
        }
        Ok(())
    }

    /// What may have been lost with the last connection goes out again: frees are idempotent.
    fn resend_kept(&mut self) {
        let Some((link, _)) = &mut self.link else { return };
        self.kept.retain(|(at, _)| at.elapsed() < KEEP_FOR);
        for (_, line) in &self.kept {
            link.out().extend_from_slice(line);
        }
    }

    fn read(&mut self) -> Result<()> {
        let Some((mut link, mode)) = self.link.take() else { return Ok(()) };
        let mut responses = Vec::new();
        let limits = self.shared.options.limits;
        let one_way = matches!(mode, Mode::OneWay);
        let received = link.receive(|line| {
            if !one_way {
                match Response::parse(line, &limits) {
                    Ok(response) => responses.push(response),
                    Err(bad) => {
                        self.shared.protocol_errors.fetch_add(1, Ordering::Relaxed);
                        *self.shared.last_error.lock() = Some(bad.to_string());
                    }
                }
            }
            Ok(())
        });
        self.link = Some((link, mode));
        for response in responses {
            self.handle(response)?;
        }
        // Who was refused need not hear that the server closed the connection, too.
        if self.link.is_some() { received } else { Ok(()) }
    }

    fn handle(&mut self, response: Response) -> Result<()> {
        match response {
            Response::Hello(hello) => self.greeted_by(hello),
            Response::Freed { id, gone, stale } => {
                if let Some(Item::Free(line)) = self.answered(id) {
                    self.no_longer_outstanding(line.objects());
                    line.settle(&gone, &stale);
                }
            }
            Response::Held { id, gone, stale } => {
                if let Some(Item::Ask(ask)) = self.answered(id) {
                    ask.answer(|| Ok(Answer::Held { gone, stale }));
                }
            }
            Response::Health { id, health } => {
                if let Some(Item::Ask(ask)) = self.answered(id) {
                    ask.answer(|| Ok(Answer::Health(Box::new(health))));
                }
            }
            Response::Pong { id } => {
                if let Some((ping, at)) = self.ping
                    && ping == id
                {
                    self.ping = None;
                    self.confirm(at);
                } else if let Some(Item::Ask(ask)) = self.answered(id) {
                    ask.answer(|| Ok(Answer::Done));
                }
            }
            Response::Error { id, code, message } => return self.refused(id, &code, &message),
            _ => {}
        }
        Ok(())
    }

    fn greeted_by(&mut self, hello: ServerHello) {
        let (Some((_, mode)), Some(at)) = (&mut self.link, self.greeted.take()) else {
            return; // not asked for
        };
        let hello = Arc::new(hello);
        *mode = Mode::Extended(hello.clone());
        self.backoff = Backoff::new();
        let mut standing = self.shared.standing.lock();
        let (continuity, known_since) = match &*standing {
            // The server kept the claims if it heard of the client again within the lease.
            Some(old) if old.hello.epoch == hello.epoch && old.is_fresh() && !self.lapsed => {
                (old.continuity, old.known_since)
            }
            Some(old) => (old.continuity + 1, hello.last_seq),
            None => (0, hello.last_seq),
        };
        self.lapsed = false;
        *standing =
            Some(Standing { hello, continuity, known_since, confirmed: at, connected: true });
    }

    /// Takes an answered line off the books: the server lived, and heard of this client, after the
    /// line was sent.
    fn answered(&mut self, id: u64) -> Option<Item> {
        let Sent { item, at } = self.sent.remove(&id)?;
        self.confirm(at);
        Some(item)
    }

    fn confirm(&self, at: Instant) {
        if let Some(standing) = &mut *self.shared.standing.lock() {
            standing.confirmed = standing.confirmed.max(at);
        }
    }

    fn no_longer_outstanding(&self, objects: usize) {
        self.shared.outstanding.fetch_sub(objects, Ordering::Relaxed);
    }

    /// The server refused a line, or is about to close the connection.
    fn refused(&mut self, id: Option<u64>, code: &Code, message: &str) -> Result<()> {
        let server = self.shared.server.clone();
        let error = |kind, what: &'static str| {
            Error::new(kind, "control", what)
                .with("peer", &server)
                .with("reason", message.chars().take(200).collect::<String>())
        };
        if let Some(item) = id.and_then(|id| self.answered(id)) {
            match (item, code) {
                (Item::Free(line), Code::StaleEpoch) => {
                    // The life that these objects belonged to is over.
                    self.no_longer_outstanding(line.objects());
                    line.settle_all(Fate::Gone);
                }
                (item, Code::StaleEpoch) => {
                    item.fail(|| error(ErrorKind::Stale, "the server has restarted"));
                }
                (item, _) => {
                    self.no_longer_outstanding(item.objects());
                    item.fail(|| error(ErrorKind::Protocol, "the server refused the line"));
                }
            }
            return Ok(());
        }
        match code {
            Code::BadToken | Code::UnsupportedVersion => {
                let refused = || match code {
                    Code::BadToken => error(ErrorKind::PermissionDenied, "the token was refused")
                        .remedy("configure the token of the capture server"),
                    _ => error(ErrorKind::Unsupported, "the server speaks another version"),
                };
                *self.shared.last_error.lock() = Some(refused().to_string());
                self.drop_link();
                self.give_everything_up(refused);
                // It would be refused again: the next use tries, after the shortest pause.
                self.given_up = true;
                self.backoff = Backoff::new();
                self.backoff.failed();
                Ok(())
            }
            Code::LeaseExpired => {
                self.lapsed = true;
                Err(error(ErrorKind::PeerGone, "the server took this client for dead"))
            }
            Code::ClientInUse => {
                Err(error(ErrorKind::Busy, "the server knows another such client").remedy(
                    "give each transport a client id of its own, or end the other one first",
                ))
            }
            _ => {
                self.shared.protocol_errors.fetch_add(1, Ordering::Relaxed);
                Err(error(ErrorKind::PeerGone, "the server complains"))
            }
        }
    }

    /// Greeting, pings, and servers that fell silent.
    fn check_clocks(&mut self) -> Result<()> {
        let now = Instant::now();
        let lease = self.shared.options.lease;
        let Some((link, mode)) = &mut self.link else { return Ok(()) };
        match mode {
            Mode::Greeting { until } if now >= *until => {
                if self.queue.iter().any(Item::needs_answers) || !self.sent.is_empty() {
                    return Err(Error::new(
                        ErrorKind::Timeout,
                        "control",
                        "the server does not answer the greeting",
                    )
                    .with("peer", &self.shared.server)
                    .remedy("check that the port is that of a featurestore control listener"));
                }
                tracing::info!(server = %self.shared.server, "an older control listener: frees go one way");
                *mode = Mode::OneWay;
                self.older_server = true;
                self.greeted = None;
                self.backoff = Backoff::new();
                Ok(())
            }
            Mode::Extended(hello) => {
                let lease = lease.min(hello.lease);
                let patience = (lease / 2).max(Duration::from_secs(2));
                let oldest = self.sent.values().map(|s| s.at).chain(self.ping.map(|p| p.1)).min();
                let waited = oldest.map_or(Duration::ZERO, |at| now - at);
                let silent = waited > patience && now - link.heard > patience;
                // Where others are answered meanwhile, that line is lost: something between the
                // two has dropped it. Over another connection it is sent again.
                if silent || waited > 2 * patience {
                    return Err(Error::new(
                        ErrorKind::Timeout,
                        "control",
                        match silent {
                            true => "the server does not answer any more",
                            false => "the server does not answer a line",
                        },
                    )
                    .with("peer", &self.shared.server));
                }
                let last = self.shared.standing.lock().as_ref().map(|s| s.confirmed);
                if self.ping.is_none() && last.is_some_and(|at| now - at >= lease / 3) {
                    write_ping(link.out(), self.next_id);
                    self.ping = Some((self.next_id, now));
                    self.next_id += 1;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Writes what waits, within the window, at most so many lines.
    fn write(&mut self, most: usize) -> Result<()> {
        let Some((link, mode)) = &mut self.link else { return Ok(()) };
        let limits = self.shared.options.limits;
        for _ in 0..most {
            if link.unsent() >= SEND_AT {
                link.flush().map_err(|e| Error::io("control", e.into()))?;
            }
            if self.sent.len() >= WINDOW || link.unsent() >= MAX_UNSENT {
                break;
            }
            let Some(item) = self.queue.front() else { break };
            match mode {
                Mode::Greeting { .. } => break,
                Mode::OneWay if item.needs_answers() => {
                    let item = self.queue.pop_front().expect("just seen");
                    self.shared.outstanding.fetch_sub(item.objects(), Ordering::Relaxed);
                    let server = &self.shared.server;
                    item.fail(|| {
                        Error::new(ErrorKind::Unsupported, "control", "the server answers nothing")
                            .with("peer", server)
                            .remedy("only frees without epoch can be sent to an older server")
                    });
                    continue;
                }
                // A peer that left would take the line without a word.
                Mode::OneWay if link.has_ended() => {
                    return Err(Error::new(ErrorKind::PeerGone, "control", "the server left"));
                }
                _ => {}
            }
            let item = self.queue.pop_front().expect("just seen");
            let (id, now) = (self.next_id, Instant::now());
            self.next_id += 1;
            match item {
                Item::Free(line) => {
                    if let Some(epoch) = line.batch.epoch {
                        if let Err(error) = line.write(link.out(), id, epoch, &limits) {
                            self.shared.outstanding.fetch_sub(line.objects(), Ordering::Relaxed);
                            line.batch.fail(line.samples.len(), || error);
                            continue;
                        }
                        self.sent.insert(id, Sent { item: Item::Free(line), at: now });
                    } else {
                        let start = link.out().len();
                        line.write_keys(link.out());
                        let bytes = link.out()[start..].to_vec();
                        self.kept.push_back((now, bytes));
                        self.shared.outstanding.fetch_sub(line.objects(), Ordering::Relaxed);
                        line.settle_all(Fate::Unconfirmed);
                    }
                }
                Item::Ask(ask) if matches!(ask.question, Question::Connect) => {
                    ask.answer(|| Ok(Answer::Done));
                }
                Item::Ask(ask) => match ask.write(link.out(), id, &limits) {
                    Ok(()) => drop(self.sent.insert(id, Sent { item: Item::Ask(ask), at: now })),
                    Err(error) => ask.answer(|| Err(error)),
                },
            }
        }
        let mut bytes: usize = self.kept.iter().map(|(_, line)| line.len()).sum();
        while let Some((at, line)) = self.kept.front() {
            if bytes <= KEEP_BYTES && at.elapsed() < KEEP_FOR {
                break;
            }
            bytes -= line.len();
            self.kept.pop_front();
        }
        link.flush().map_err(|e| Error::io("control", e.into()))
    }

    /// Gives the connection up: what was sent and not answered is sent again, in order.
    fn link_failed(&mut self, error: &Error) {
        tracing::debug!(server = %self.shared.server, %error, "control connection failed");
        *self.shared.last_error.lock() = Some(error.to_string());
        self.drop_link();
        for (_, Sent { item, .. }) in std::mem::take(&mut self.sent).into_iter().rev() {
            self.queue.push_front(match item {
                Item::Free(mut line) => {
                    line.resent = true;
                    Item::Free(line)
                }
                ask => ask,
            });
        }
        let now = Instant::now();
        self.queue
            .retain(|item| !matches!(item, Item::Ask(Ask { deadline, .. }) if *deadline < now));
        if self.backoff.failed() >= self.shared.options.attempts.max(1) {
            let server = self.shared.server.clone();
            self.give_everything_up(|| unreachable(&server, error));
            // Claims are not kept up by trying for ever: the next use tries again.
            self.given_up = true;
            self.backoff = Backoff::new();
        }
    }

    /// Ends the connection, and what belongs to it.
    fn drop_link(&mut self) {
        self.link = None;
        self.ping = None;
        self.greeted = None;
        if let Some(standing) = &mut *self.shared.standing.lock() {
            standing.connected = false;
        }
    }

    fn give_everything_up(&mut self, error: impl Fn() -> Error) {
        let sent = std::mem::take(&mut self.sent).into_values().map(|sent| sent.item);
        for item in sent.chain(std::mem::take(&mut self.queue)) {
            self.shared.give_up(item, &error);
        }
    }

    /// How long there is nothing to do, unless the server or a caller has something to say.
    fn wait(&self) -> Wait {
        let now = Instant::now();
        let mut until = now + Duration::from_secs(60);
        let busy = !self.queue.is_empty() || !self.sent.is_empty();
        match &self.link {
            None if busy || self.holds_something() => until = self.backoff.due(),
            None => {}
            Some((_, Mode::Greeting { until: greeted })) => until = *greeted,
            Some((_, Mode::Extended(hello))) => {
                let lease = hello.lease.min(self.shared.options.lease);
                let last = self.shared.standing.lock().as_ref().map_or(now, |s| s.confirmed);
                // In time for the ping, and then for the look at its answer.
                let ping = if self.ping.is_some() { now + lease / 6 } else { last + lease / 3 };
                until = until.min(ping);
                if busy {
                    until = until.min(now + Duration::from_secs(1));
                }
            }
            Some((_, Mode::OneWay)) => {}
        }
        if !busy && self.shared.closing.load(Ordering::Relaxed) {
            until = now; // the last answer has come: the thread ends
        }
        Wait {
            at_most: until.saturating_duration_since(now).max(Duration::from_millis(1)),
            stream: self.link.as_ref().map(|(link, _)| link.stream()),
            unsent: self.link.as_ref().is_some_and(|(link, _)| link.unsent() > 0),
        }
    }

    fn finish(&mut self) {
        if let Some((link, Mode::Extended(_))) = &mut self.link {
            write_bye(link.out());
            let _ = link.flush(); // a server that is gone needs no goodbye
        }
        self.link = None; // nobody writes after the goodbye
        *self.shared.standing.lock() = None;
        // Whoever comes from now on finds the inbox gone and is told so at once.
        self.queue.extend(self.shared.inbox.lock().take().into_iter().flatten());
        self.give_everything_up(closed);
    }
}

/// What the thread waits for.
struct Wait {
    at_most: Duration,
    stream: Option<Arc<TcpStream>>,
    unsent: bool,
}

impl Wait {
    /// Sleeps until the server or a caller has something to say, or the time is over.
    fn sleep(self, shared: &Shared) {
        let timeout = Timespec {
            tv_sec: self.at_most.as_secs() as i64,
            tv_nsec: i64::from(self.at_most.subsec_nanos()),
        };
        let waker = PollFd::new(&shared.waker, PollFlags::IN);
        let polled = match &self.stream {
            None => poll(&mut [waker], Some(&timeout)),
            Some(stream) => {
                let mut flags = PollFlags::IN;
                flags.set(PollFlags::OUT, self.unsent);
                poll(&mut [waker, PollFd::new(stream, flags)], Some(&timeout))
            }
        };
        if let Err(error) = polled
            && error != Errno::INTR
        {
            tracing::error!(%error, "a control client cannot wait any more");
            std::thread::sleep(Duration::from_millis(10));
        }
        shared.waker.reset();
    }
}
