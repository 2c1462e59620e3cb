//! A trainer's connection to one capture server.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use control_proto::{
    Secret,
    control::{Limits, Objects, ServerHello},
};
use crossbeam_channel::bounded;
use parking_lot::Mutex;
use transport_core::{
    ClientId, Descriptor, Epoch, Error, ErrorKind, Health, MapMark, Result, Sequence, SessionName,
};

use super::{
    pending::{Answer, Ask, ClaimObject, IS_IT_THERE, Item, Question, lines},
    ticket::FreeTicket,
    worker::Worker,
};
use crate::net::{Waker, timed_out};

/// How a [`ControlClient`] introduces itself and how patient it is.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ControlOptions {
    /// Who the client is.
    pub client: ClientId,
    /// How long its claims outlive its last sign of life. Default: 30 seconds.
    pub lease: Duration,
    /// What it proves to know.
    pub token: Option<Secret>,
    /// How long one attempt to connect may take. Default: 3 seconds.
    pub connect_timeout: Duration,
    /// How long a server may take to answer the greeting before it is taken for an older one that
    /// answers nothing. Default: 2 seconds.
    pub hello_timeout: Duration,
    /// Attempts to connect before what waits is given up. Default: 5.
    pub attempts: u32,
    /// Objects whose frees may wait or be unanswered. Default: 1,000,000.
    pub max_outstanding: usize,
    /// Bounds on lines.
    pub limits: Limits,
    /// The mark under which the client maps the server's memory, if it does.
    pub mapping: Option<MapMark>,
}

impl ControlOptions {
    /// The defaults, for this client.
    pub fn new(client: ClientId) -> Self {
        Self {
            client,
            lease: Duration::from_secs(30),
            token: None,
            connect_timeout: Duration::from_secs(3),
            hello_timeout: Duration::from_secs(2),
            attempts: 5,
            max_outstanding: 1_000_000,
            limits: Limits::default(),
            mapping: None,
        }
    }
}

/// One persistent connection to one server, and the thread that looks after it.
///
/// It connects at the first use, greets, pings while idle, and reconnects as the same client; frees
/// are kept until they are answered and sent again after a reconnect.
pub struct ControlClient {
    shared: Arc<Shared>,
    worker: Arc<Mutex<Worker>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What a client knows about its standing with the server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Standing {
    /// What the server said in its greeting.
    pub hello: Arc<ServerHello>,
    /// Grows whenever claims may have lapsed: those made under a smaller number may be gone.
    pub continuity: u64,
    /// Newest life that had been published when this continuity began, if the server tells.
    pub known_since: Option<Sequence>,
    /// When a line was sent that the server has answered: claims live at least one lease longer.
    pub confirmed: Instant,
    /// Whether the connection is up.
    pub connected: bool,
}

impl Standing {
    /// Whether claims made under this continuity certainly live now.
    pub fn is_fresh(&self) -> bool {
        self.confirmed.elapsed() < self.hello.lease
    }
}

/// What a [`ControlClient`] has done so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ControlStats {
    /// Whether the connection is up.
    pub connected: bool,
    /// Connections made.
    pub connects: u64,
    /// Objects whose frees wait or are unanswered.
    pub outstanding: u64,
    /// Lines of the server that made no sense.
    pub protocol_errors: u64,
    /// The newest failure.
    pub last_error: Option<String>,
}

/// What became of a claim: positions of objects that are gone, or live elsewhere or another life.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Claimed {
    pub(crate) gone: Vec<u32>,
    pub(crate) stale: Vec<u32>,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) server: SessionName,
    pub(super) options: ControlOptions,
    /// What callers have brought; none once the thread has ended and nobody takes it.
    pub(super) inbox: Mutex<Option<Vec<Item>>>,
    pub(super) waker: Waker,
    pub(super) standing: Mutex<Option<Standing>>,
    pub(super) closing: AtomicBool,
    pub(super) abandon: AtomicBool,
    pub(super) outstanding: AtomicUsize,
    pub(super) connects: AtomicU64,
    pub(super) protocol_errors: AtomicU64,
    pub(super) last_error: Mutex<Option<String>>,
}

impl Shared {
    /// Takes an item off the books and tells whoever waits that it could not be done.
    pub(super) fn give_up(&self, item: Item, error: impl FnOnce() -> Error) {
        self.outstanding.fetch_sub(item.objects(), Ordering::Relaxed);
        item.fail(error);
    }
}

impl ControlClient {
    /// Starts the thread; it connects at the first use.
    pub fn start(server: SessionName, options: ControlOptions) -> Result<Self> {
        let shared = Arc::new(Shared {
            server,
            options,
            inbox: Mutex::new(Some(Vec::new())),
            waker: Waker::new()?,
            standing: Mutex::default(),
            closing: AtomicBool::new(false),
            abandon: AtomicBool::new(false),
            outstanding: AtomicUsize::new(0),
            connects: AtomicU64::new(0),
            protocol_errors: AtomicU64::new(0),
            last_error: Mutex::default(),
        });
        let worker = Arc::new(Mutex::new(Worker::new(shared.clone())));
        let running = worker.clone();
        let thread = std::thread::Builder::new()
            .name("fs-control-cli".into())
            .spawn(move || Worker::run(&running))
            .map_err(|e| Error::io("start control client", e))?;
        Ok(Self { shared, worker, thread: Mutex::new(Some(thread)) })
    }

    /// The server that it talks to.
    pub fn server(&self) -> &SessionName {
        &self.shared.server
    }

    /// What it knows about its standing; none before the first greeting.
    pub fn standing(&self) -> Option<Standing> {
        self.shared.standing.lock().clone()
    }

    /// Connects and greets if need be. Fails with [`ErrorKind::PeerGone`] also for a server that
    /// answers no greeting.
    pub fn connect(&self, deadline: Instant) -> Result<Standing> {
        if let Some(standing) = self.standing().filter(|s| s.connected) {
            return Ok(standing);
        }
        self.ask(Question::Connect, deadline)?;
        let standing = self.standing();
        let (why, remedy) = match &standing {
            Some(standing) if standing.connected => return Ok(standing.clone()),
            Some(_) => ("the connection was lost again", IS_IT_THERE),
            None => (
                "the server takes connections and does not answer the greeting",
                "check that its process is not stopped, and that this is its control address",
            ),
        };
        let error = Error::new(ErrorKind::PeerGone, "control", why);
        Err(error.with("peer", &self.shared.server).remedy(remedy))
    }

    /// The standing with life `epoch` of the server. If another life answers, it is asked whether
    /// it still lives before this fails with [`ErrorKind::Stale`].
    pub fn connect_to(&self, epoch: Epoch, deadline: Instant) -> Result<Standing> {
        for _ in 0..3 {
            let standing = self.connect(deadline)?;
            if standing.hello.epoch == epoch {
                return Ok(standing);
            }
            self.ask(Question::Ping, deadline)?;
            let now = self.connect(deadline)?;
            if now.hello.epoch != epoch && now.hello.epoch == standing.hello.epoch {
                return Err(self.another_life(epoch, now.hello.epoch));
            }
        }
        Err(Error::new(ErrorKind::PeerGone, "control", "the server keeps restarting")
            .with("peer", &self.shared.server))
    }

    fn another_life(&self, expected: Epoch, found: Epoch) -> Error {
        Error::new(ErrorKind::Stale, "control", "the server has restarted")
            .with("peer", &self.shared.server)
            .with("expected", expected)
            .with("found", found)
            .remedy("its samples are gone: capture them again")
    }

    /// Claims objects of life `epoch`.
    pub(crate) fn hold(
        &self,
        epoch: Epoch,
        objects: Vec<ClaimObject>,
        deadline: Instant,
    ) -> Result<Claimed> {
        match self.ask(Question::Hold { epoch, objects }, deadline)? {
            Answer::Held { gone, stale } => Ok(Claimed { gone, stale }),
            _ => Err(self.wrong_answer()),
        }
    }

    /// Gives claims back without freeing anything; nobody waits for it.
    pub(crate) fn unhold_later(&self, epoch: Epoch, objects: Vec<ClaimObject>) {
        let deadline = Instant::now() + self.shared.options.lease;
        let question = Question::Unhold { epoch, objects };
        self.send([Item::Ask(Ask { question, deadline, reply: None })]);
    }

    /// Gives the claims on all objects of a sample back; nobody waits for it.
    pub(crate) fn unhold_sample(&self, epoch: Epoch, sample: &Descriptor) {
        let objects: Vec<_> = sample
            .features
            .iter()
            .map(|(name, feature)| ClaimObject {
                key: sample.sample.object(name).shared(),
                seq: feature.seq,
                range: None,
            })
            .collect();
        for part in objects.chunks(Objects::PER_LINE) {
            self.unhold_later(epoch, part.to_vec());
        }
    }

    /// Hands the frees of samples of life `epoch` over, and returns at once.
    ///
    /// Without an epoch they go as lists of keys, which no server answers. Fails with
    /// [`ErrorKind::CapacityExceeded`] while too many are outstanding.
    pub fn free_later(
        &self,
        samples: Vec<Arc<Descriptor>>,
        epoch: Option<Epoch>,
    ) -> Result<FreeTicket> {
        let objects: usize = samples.iter().map(|s| s.features.len()).sum();
        let (shared, limit) = (&self.shared, self.shared.options.max_outstanding);
        let before = shared.outstanding.fetch_add(objects, Ordering::Relaxed);
        if before > 0 && before.saturating_add(objects) > limit {
            shared.outstanding.fetch_sub(objects, Ordering::Relaxed);
            return Err(Error::new(
                ErrorKind::CapacityExceeded,
                "release",
                "too many frees wait for the server",
            )
            .with("peer", &shared.server)
            .with("outstanding", before)
            .with("limit", limit)
            .remedy("check that the capture server can be reached, then release again"));
        }
        if shared.closing.load(Ordering::Relaxed) {
            shared.outstanding.fetch_sub(objects, Ordering::Relaxed);
            return Err(closed());
        }
        Ok(self.queue_frees(samples, epoch))
    }

    /// Hands over the free of a sample that was released before; it is not refused, so that no
    /// sample is forgotten, and there are no more of them than there were views.
    pub(crate) fn free_deferred(&self, sample: Arc<Descriptor>, epoch: Epoch) {
        if !self.shared.closing.load(Ordering::Relaxed) {
            self.shared.outstanding.fetch_add(sample.features.len(), Ordering::Relaxed);
            self.queue_frees(vec![sample], Some(epoch));
        }
    }

    fn queue_frees(&self, samples: Vec<Arc<Descriptor>>, epoch: Option<Epoch>) -> FreeTicket {
        let ticket = FreeTicket::new(samples, epoch);
        self.send(lines(ticket.batch()).map(Item::Free).collect::<Vec<_>>());
        ticket
    }

    /// Asks the server for its health.
    pub fn health(&self, deadline: Instant) -> Result<Health> {
        match self.ask(Question::Health, deadline)? {
            Answer::Health(health) => Ok(*health),
            _ => Err(self.wrong_answer()),
        }
    }

    /// What it has done so far.
    pub fn stats(&self) -> ControlStats {
        let shared = &self.shared;
        ControlStats {
            connected: self.standing().is_some_and(|s| s.connected),
            connects: shared.connects.load(Ordering::Relaxed),
            outstanding: shared.outstanding.load(Ordering::Relaxed) as u64,
            protocol_errors: shared.protocol_errors.load(Ordering::Relaxed),
            last_error: shared.last_error.lock().clone(),
        }
    }

    /// Sends what waits, says goodbye, which ends every claim, and ends the thread; what is not
    /// answered after `bound` is given up, and so is what is handed over meanwhile and comes too
    /// late: it fails with [`ErrorKind::Closed`]. Idempotent.
    pub fn close(&self, bound: Duration) {
        self.shared.closing.store(true, Ordering::Relaxed);
        self.shared.waker.wake();
        let Some(thread) = self.thread.lock().take() else { return };
        let deadline = Instant::now() + bound;
        while !thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.shared.abandon.store(true, Ordering::Relaxed);
        self.shared.waker.wake();
        let _ = thread.join(); // a panic there has been printed
    }

    fn ask(&self, question: Question, deadline: Instant) -> Result<Answer> {
        if self.shared.closing.load(Ordering::Relaxed) {
            return Err(closed());
        }
        let (reply, answer) = bounded(1);
        self.send([Item::Ask(Ask { question, deadline, reply: Some(reply) })]);
        match answer.recv_deadline(deadline) {
            Ok(answer) => answer,
            Err(crossbeam_channel::RecvTimeoutError::Timeout) => {
                Err(timed_out("control").with("peer", &self.shared.server))
            }
            Err(crossbeam_channel::RecvTimeoutError::Disconnected) => Err(closed()),
        }
    }

    fn send(&self, items: impl IntoIterator<Item = Item>) {
        let mut inbox = self.shared.inbox.lock();
        let Some(waiting) = &mut *inbox else {
            drop(inbox); // whoever is told may hand over more
            return items.into_iter().for_each(|item| self.shared.give_up(item, closed));
        };
        waiting.extend(items);
        drop(inbox);
        // Written here, it is on its way sooner than the thread is awake. Whoever writes takes what
        // came before along, so nothing overtakes anything.
        let done = self.worker.try_lock().is_some_and(|mut worker| worker.write_at_once());
        if !done {
            self.shared.waker.wake();
        }
    }

    fn wrong_answer(&self) -> Error {
        Error::new(ErrorKind::Protocol, "control", "the answer is to another question")
            .with("peer", &self.shared.server)
    }
}

impl fmt::Debug for ControlClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlClient").field("shared", &self.shared).finish_non_exhaustive()
    }
}

impl Drop for ControlClient {
    fn drop(&mut self) {
        self.close(Duration::from_millis(500));
    }
}

pub(super) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "control", "the control client is closed")
}
