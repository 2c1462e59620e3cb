//! The handle through which everybody talks to an arena's books.

mod desk;
mod wait;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::oneshot;
use transport_core::{
    ClientId, DEFAULT_DEADLINE, Epoch, Error, ErrorKind, MapMark, RemoteAddr, Result, Sequence,
};

use crate::{
    Backing, ExportTable,
    arena::{ArenaHealth, BatchPlan, CaptureArena, FreeOutcome, Grant, HoldOutcome, ObjectList},
    reservation::{Births, FillGuard, Reservation, SamplePlan, plan},
};

pub(crate) use desk::Desk;
pub(crate) use wait::block_on;

/// Bytes that a request takes besides its keys: itself, and its boxed reply.
const REQUEST_BYTES: usize = size_of::<Command>() + 128;
/// Longest wait for room that a reservation may ask for.
const MAX_DEADLINE: Duration = Duration::from_secs(24 * 3600);

/// Which addresses descriptors carry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum BaseAddress {
    /// The memory's real address in this process, which Mooncake peers need.
    #[default]
    Backing,
    /// Addresses that start here, whatever the memory's own are.
    Fixed(RemoteAddr),
}

/// How an arena behaves. [`Default`] is right for servers.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ArenaConfig {
    /// Which addresses descriptors carry.
    pub base: BaseAddress,
    /// How long a reservation waits for room if it does not say.
    pub deadline: Duration,
    /// How long the holds of a client live that has not announced itself.
    pub lease: Duration,
}

impl Default for ArenaConfig {
    fn default() -> Self {
        Self {
            base: BaseAddress::Backing,
            deadline: DEFAULT_DEADLINE,
            lease: Duration::from_secs(30),
        }
    }
}

impl ArenaConfig {
    /// Sets which addresses descriptors carry.
    #[must_use]
    pub fn base(mut self, base: BaseAddress) -> Self {
        self.base = base;
        self
    }

    /// Sets how long a reservation waits for room if it does not say.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets how long the holds of a client live that has not announced itself.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }
}

/// Options of [`Arena::reserve`].
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct ReserveOptions {
    /// Whether existing keys are replaced rather than refused; see [`BatchPlan::replace`].
    pub replace: bool,
    /// How long the whole batch may wait for room; the arena's default if none.
    pub deadline: Option<Duration>,
}

impl ReserveOptions {
    /// Replaces existing keys.
    #[must_use]
    pub fn replace(mut self, replace: bool) -> Self {
        self.replace = replace;
        self
    }

    /// Bounds the wait for room.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }
}

/// Objects that a client, or somebody unnamed, lets go of.
pub struct FreeRequest {
    /// Who; none for a list without a sender.
    pub client: Option<ClientId>,
    /// What.
    pub objects: ObjectList,
    /// Told the outcome, by whoever does it: it must not block.
    pub reply: Option<Box<dyn FnOnce(FreeOutcome) + Send>>,
}

/// Published objects that a client claims.
pub struct HoldRequest {
    /// Who.
    pub client: ClientId,
    /// What.
    pub objects: ObjectList,
    /// Told the outcome, by whoever does it: it must not block.
    pub reply: Option<Box<dyn FnOnce(HoldOutcome) + Send>>,
}

/// Handle to an arena. Cheap to clone; the last one closes the arena.
#[derive(Clone, Debug)]
pub struct Arena(Arc<Inner>);

struct Inner {
    epoch: Epoch,
    export: ExportTable,
    capacity: u64,
    deadline: Duration,
    desk: Desk,
    backlog: Arc<AtomicUsize>,
    owner: Mutex<Option<JoinHandle<()>>>,
}

pub(crate) enum Command {
    Reserve {
        plan: BatchPlan,
        deadline: Instant,
        reply: oneshot::Sender<Result<Granted>>,
    },
    Publish {
        batch: u32,
        reply: oneshot::Sender<Result<Births>>,
    },
    Unpublish(Vec<(u32, Sequence)>),
    Abort(u32),
    Free(FreeRequest, Queued),
    Hold(HoldRequest, Queued),
    Unhold(ClientId, ObjectList, Queued),
    Seen(ClientId, Duration, Option<MapMark>, Queued),
    Lost(ClientId),
    Bye(ClientId),
    Greet(ClientId, Duration, Option<MapMark>, oneshot::Sender<Result<()>>),
    Reclaim(u32),
    Health(oneshot::Sender<ArenaHealth>),
    /// Look again when there is something to do by itself.
    Look,
    Close,
}

/// Counts the bytes of a request for as long as it waits for the owner, however it ends.
pub(crate) struct Queued {
    backlog: Arc<AtomicUsize>,
    bytes: usize,
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.backlog.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Command {
    /// What handling it costs, against one plain command.
    fn weight(&self) -> usize {
        let keys = match self {
            Self::Reserve { plan, .. } => plan.samples.iter().map(|s| s.objects.len()).sum(),
            Self::Free(FreeRequest { objects, .. }, _)
            | Self::Hold(HoldRequest { objects, .. }, _)
            | Self::Unhold(_, objects, _) => objects.len(),
            _ => 0,
        };
        1 + keys / 8 // a key costs a look-up, a command a wake-up and often an answer
    }
}

/// A grant that gives itself up when it is dropped unused.
pub(crate) struct Granted {
    pub(crate) grant: Grant,
    pub(crate) guard: Arc<FillGuard>,
}

impl Arena {
    /// Starts the owner thread of `backing`.
    pub fn start(backing: Backing, config: ArenaConfig) -> Result<Self> {
        let capacity = backing.bytes_len();
        let base = match config.base {
            BaseAddress::Backing => RemoteAddr(backing.address()),
            BaseAddress::Fixed(base) => base,
        };
        if base.checked_add(capacity).is_none() {
            let why = "the arena would end beyond the last address";
            return Err(Error::new(ErrorKind::ConfigInvalid, "start arena", why)
                .with("base", format_args!("{:#x}", base.0)));
        }
        let mut index = None;
        let (desk, thread) = Desk::start(&backing, |reclaim| {
            let mut books = CaptureArena::with_reclaim(capacity, config.lease, reclaim)?;
            let probed = backing.clone();
            books.set_probe(move |mark| probed.is_mapped_by(mark));
            index = Some(books.index().clone());
            Ok(books)
        })?;
        let index = index.expect("the desk has books");
        let export = ExportTable { index, backing, base };
        Ok(Self(Arc::new(Inner {
            epoch: Epoch::random(),
            export,
            capacity,
            deadline: config.deadline,
            desk,
            backlog: Arc::default(),
            owner: Mutex::new(Some(thread)),
        })))
    }

    /// This life of the arena.
    pub fn epoch(&self) -> Epoch {
        self.0.epoch
    }

    /// Size in bytes.
    pub fn capacity(&self) -> u64 {
        self.0.capacity
    }

    /// Address of offset 0 in descriptors.
    pub fn base(&self) -> RemoteAddr {
        self.0.export.base
    }

    /// The memory.
    pub fn backing(&self) -> &Backing {
        &self.0.export.backing
    }

    /// What peers may read.
    pub fn export(&self) -> &ExportTable {
        &self.0.export
    }

    /// Takes ranges for a whole batch, waiting for frees until its deadline if they do not fit now.
    ///
    /// Batches wait in order: none overtakes an earlier one. Dropping the future gives up the place
    /// in line, or the ranges.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`] for a key that is published or being filled, unless `replace`;
    /// [`ErrorKind::Busy`] for a key of which clients still hold 64 older lives;
    /// [`ErrorKind::InvalidInput`] for a key that occurs twice or a sample without tensors;
    /// [`ErrorKind::CapacityExceeded`] when the deadline passes without room, and at once for a batch
    /// larger than the arena; [`ErrorKind::Busy`] with [`BATCHES_BEFORE`](crate::BATCHES_BEFORE) when
    /// it passes where there would be room, but not for those that wait before; [`ErrorKind::Closed`].
    pub async fn reserve(
        &self,
        batch: Vec<SamplePlan>,
        options: ReserveOptions,
    ) -> Result<Reservation> {
        let (plan, samples) = plan(batch, options.replace)?;
        let wait = options.deadline.unwrap_or(self.0.deadline).min(MAX_DEADLINE);
        let (reply, answer) = oneshot::channel();
        let deadline = Instant::now() + wait;
        self.0.desk.ask("reserve", Command::Reserve { plan, deadline, reply })?;
        let granted = answer.await.map_err(|_| closed("reserve"))??;
        Ok(Reservation::new(granted, samples, self.base()))
    }

    /// [`Self::reserve`] for threads that may block.
    pub fn reserve_blocking(
        &self,
        batch: Vec<SamplePlan>,
        options: ReserveOptions,
    ) -> Result<Reservation> {
        block_on(self.reserve(batch, options))
    }

    /// A client has announced itself or sent anything: it is connected, its holds live on, and
    /// their lease is `lease` from now on. Twice that without a sign, and they end. `mark` is the one
    /// that it was greeted with, if any.
    pub fn client_seen(&self, client: &ClientId, lease: Duration, mark: Option<MapMark>) {
        let queued = self.queued(None);
        self.0.desk.tell(Command::Seen(client.clone(), lease, mark, queued));
    }

    /// A client introduces itself, with the mark under which it maps the arena if it does; as
    /// [`Self::client_seen`] otherwise.
    ///
    /// Fails with [`ErrorKind::Busy`] while a client of the same name and another mark, or none,
    /// is connected or maps the arena. For threads that may block; it is answered soon.
    pub fn client_greets_blocking(
        &self,
        client: &ClientId,
        lease: Duration,
        mark: Option<MapMark>,
    ) -> Result<()> {
        let (reply, answer) = oneshot::channel();
        self.0.desk.ask("greet", Command::Greet(client.clone(), lease, mark, reply))?;
        block_on(answer).map_err(|_| closed("greet"))?
    }

    /// A client's last connection is gone: its holds live for one more lease.
    pub fn client_lost(&self, client: &ClientId) {
        self.0.desk.tell(Command::Lost(client.clone()));
    }

    /// A client says goodbye: its holds end now, or as soon as it maps the arena no more.
    pub fn client_bye(&self, client: &ClientId) {
        self.0.desk.tell(Command::Bye(client.clone()));
    }

    /// Lets go of objects; see [`CaptureArena::free`]. Never blocks. After [`Self::close`] the
    /// reply is dropped without a call.
    pub fn free(&self, request: FreeRequest) {
        let queued = self.queued(Some(&request.objects));
        self.0.desk.tell(Command::Free(request, queued));
    }

    /// [`Self::free`], done by this thread, its reply included, before the call returns if nobody is at
    /// the books and little is asked; by the owner thread otherwise, in the same order.
    pub fn free_here(&self, request: FreeRequest) {
        let queued = self.queued(Some(&request.objects));
        let asked = self.0.desk.ask("free", Command::Free(request, queued));
        drop(asked); // a closed arena drops the reply without a call
    }

    /// Claims objects; see [`CaptureArena::hold`]. Never blocks. After [`Self::close`] the reply
    /// is dropped without a call.
    pub fn hold(&self, request: HoldRequest) {
        let queued = self.queued(Some(&request.objects));
        self.0.desk.tell(Command::Hold(request, queued));
    }

    /// Gives claims back without freeing anything; see [`CaptureArena::unhold`]. Never blocks.
    pub fn unhold(&self, client: &ClientId, objects: ObjectList) {
        let queued = self.queued(Some(&objects));
        self.0.desk.tell(Command::Unhold(client.clone(), objects, queued));
    }

    /// Bytes of what clients have asked for and the owner thread has not done yet.
    ///
    /// Requests never block and are never refused, so whoever passes on what others send stops
    /// taking more from them while this is high.
    pub fn backlog_bytes(&self) -> usize {
        self.0.backlog.load(Ordering::Relaxed)
    }

    /// Measures the arena, after everything that was sent before.
    pub async fn health(&self) -> Result<ArenaHealth> {
        let (reply, answer) = oneshot::channel();
        self.0.desk.ask("health", Command::Health(reply))?;
        answer.await.map_err(|_| closed("health"))
    }

    /// [`Self::health`] for threads that may block.
    pub fn health_blocking(&self) -> Result<ArenaHealth> {
        block_on(self.health())
    }

    /// Ends the owner thread, after everything that was sent before; waiting reservations fail
    /// with [`ErrorKind::Closed`]. Idempotent. The memory goes with its last reader and writer.
    pub fn close(&self) {
        self.0.close();
    }

    fn queued(&self, objects: Option<&ObjectList>) -> Queued {
        let bytes = REQUEST_BYTES + objects.map_or(0, ObjectList::bytes);
        self.0.backlog.fetch_add(bytes, Ordering::Relaxed);
        Queued { backlog: self.0.backlog.clone(), bytes }
    }
}

impl Inner {
    fn close(&self) {
        self.desk.tell(Command::Close);
        let Some(thread) = self.owner.lock().take() else { return };
        // A reply may hold the last handle, and the owner thread waits for whoever calls it.
        if !Desk::is_here() && thread.join().is_err() {
            tracing::error!("the arena's owner thread has panicked");
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

pub(crate) fn closed(operation: &'static str) -> Error {
    Error::new(ErrorKind::Closed, operation, "the arena is closed")
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("epoch", &self.epoch)
            .field("export", &self.export)
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for FreeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FreeRequest")
            .field("client", &self.client)
            .field("objects", &self.objects.len())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for HoldRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HoldRequest")
            .field("client", &self.client)
            .field("objects", &self.objects.len())
            .finish_non_exhaustive()
    }
}
