//! Drives prompts through capture servers and publishes what they capture.
//!
//! It moves no tensors: a machine without a device can run it, and it reports zero payload bytes.

mod capture;
mod journal;
mod options;
mod prompts;
mod recover;
mod reorder;
mod room;
mod route;
mod share;
#[cfg(test)]
mod tests;

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

#[cfg(test)]
use control_proto::sample_ref::SampleRef;
use parking_lot::Mutex;
use tokio::{sync::mpsc, task::JoinSet, time::Instant};
use transport_core::{Descriptor, Error, ErrorKind, Result, SampleId};

pub use capture::{CHECKSUMS, CaptureClient, CaptureOptions, Endpoints};
pub use options::{Produced, ProducerOptions};
pub use prompts::{Batching, Task};
pub use route::Routing;

use crate::{
    channel::RefWriter,
    flow::{Flow, InFlight, Pause, Watermarks},
    lifecycle::Samples,
};
use capture::{Answer, Captured, NO_ROOM, PUT_OFF, blocking};
use journal::Journal;
use prompts::Pool;
use reorder::Reorder;
use route::Router;
use share::WindowShare;

/// Prompts in the order in which they are to be published.
pub trait Prompts: Send {
    /// The next prompt; none at the end.
    fn next(&mut self) -> Result<Option<Task>>;

    /// A prompt once more, whose sample was lost.
    fn again(&mut self, id: &SampleId) -> Result<Option<Task>>;
}

/// A request that is over: its server, its tokens, and what came of it.
type Call = (usize, u64, Answer);

/// A captured sample, the server that has it, and the room that it takes there.
type Placed = (Captured, usize, u64);

/// Without an answer for this long, requests count as waiting for room.
const STANDSTILL: Duration = Duration::from_secs(1);

/// Is told about each sample as it is captured.
type Watch = Box<dyn FnMut(&Descriptor) + Send>;

/// The producer of one run.
pub struct Producer {
    options: ProducerOptions,
    client: Arc<CaptureClient>,
    samples: Arc<Samples>,
    writer: Option<RefWriter>,
    journal: Journal,
    earlier: Vec<(String, SampleId)>, // what earlier lives have asked for, and where
    flow: Flow,
    quantum: u64,
    window: InFlight,
    resident: VecDeque<(SampleId, usize, u64)>, // published and not settled, oldest first
    pool: Pool,
    router: Router,
    reorder: Reorder<Placed>,
    held: Vec<Placed>,    // in order, to be published once captures rest
    resting: bool,        // captures rest until consumers have settled what is published
    later: JoinSet<Task>, // put off after a failure
    share: WindowShare,
    refused: bool,   // an arena had no room in one piece, and nothing was settled since
    tight: bool,     // all of the arenas is used, until something is settled
    exhausted: bool, // there are no more prompts
    order: u64,
    handled: HashSet<(SampleId, u32)>, // losses that are being captured again
    failures: Vec<Error>,
    room: Arc<Mutex<Option<u64>>>, // largest free range of the roomiest arena
    watch: Option<Watch>,
    produced: Produced,
}

impl std::fmt::Debug for Producer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Producer")
            .field("options", &self.options)
            .field("produced", &self.produced)
            .finish_non_exhaustive()
    }
}

impl Producer {
    /// Publishes to `folder` what `client` captures and adopts into `samples`.
    ///
    /// # Errors
    /// [`ErrorKind::ConfigInvalid`] for marks that could deadlock, or no servers.
    pub fn new(
        options: ProducerOptions,
        client: CaptureClient,
        samples: Arc<Samples>,
        folder: &std::path::Path,
        marks: Watermarks,
    ) -> Result<Self> {
        if options.servers.is_empty() || options.lease == 0 {
            return Err(Error::new(
                ErrorKind::ConfigInvalid,
                "produce",
                "there must be at least one server, and one prompt a request",
            ));
        }
        let router = Router::new(&options);
        let arenas = router.arenas();
        let writer = RefWriter::reopen(folder)?;
        let mut window = InFlight::default();
        // What was published before a restart, by number; its sizes are not known any more.
        (0..writer.published()).for_each(|_| window.published(0));
        window.settled(writer.settled()?.min(writer.published()))?;
        Ok(Self {
            flow: Flow::new(marks)?,
            quantum: marks.quantum,
            pool: Pool::new(options.batching, options.attempts),
            router,
            client: Arc::new(client),
            samples,
            journal: Journal::open(folder)?,
            earlier: Vec::new(),
            writer: Some(writer),
            window,
            resident: VecDeque::new(),
            reorder: Reorder::new(options.ordered),
            held: Vec::new(),
            resting: false,
            later: JoinSet::new(),
            // What is published in order is not what is sent next.
            share: WindowShare::new(marks.quantum, if options.ordered { 0 } else { arenas }),
            refused: false,
            tight: false,
            exhausted: false,
            order: 0,
            handled: HashSet::new(),
            failures: Vec::new(),
            room: Arc::default(),
            watch: None,
            produced: Produced::default(),
            options,
        })
    }

    /// Tells `watch` about each sample as it is captured.
    #[must_use]
    pub fn watched(mut self, watch: impl FnMut(&Descriptor) + Send + 'static) -> Self {
        self.watch = Some(Box::new(watch));
        self
    }

    /// Captures and publishes every prompt, and closes the channel; on failure it fails the channel
    /// with the reason, after everything unpublished was freed. In a channel that has ended it only
    /// frees what the life that ended it could not.
    pub async fn run(mut self, prompts: Box<dyn Prompts>) -> Result<Produced> {
        let mut calls = JoinSet::new();
        let end = self.writer().end()?;
        let has_ended = end.is_some();
        self.earlier = self.journal.entries();
        let outcome = match end {
            None => self.produce(prompts, &mut calls).await,
            Some(end) => end,
        };
        self.abandon(calls).await;
        let outcome = match (outcome, self.failures.is_empty()) {
            (Ok(()), true) => Ok(()),
            (Ok(()), false) => Err(self.poisoned()),
            (Err(error), _) => Err(error),
        };
        // What is captured and not handed over goes; what may have been captured is looked for.
        let unpublished = self.reorder.drain().chain(self.held.drain(..));
        let unpublished: Vec<SampleId> = unpublished.map(|(it, ..)| it.id()).collect();
        self.samples.abort_many(&unpublished).await;
        // What is published belongs to the consumers.
        let published: Vec<SampleId> = self.resident.drain(..).map(|(id, ..)| id).collect();
        self.samples.hand_over(&published);
        let recovered = self.recover().await;
        let reclaimed = recovered.and(self.samples.reclaim().await);
        let drained = self.samples.drain(None, 8, Duration::from_millis(250)).await;
        if reclaimed.is_ok() && drained.is_ok() {
            self.journal.clear()?;
        }
        self.produced.pauses = self.flow.pauses();
        self.produced.resumes = self.flow.resumes();
        self.produced.retries = self.pool.retries;
        let writer = self.writer.take().expect("taken here only");
        match outcome {
            Ok(()) => {
                if !has_ended {
                    writer.close()?;
                }
                reclaimed?;
                drained?;
                Ok(self.produced)
            }
            Err(error) => {
                if !has_ended {
                    writer.fail(&error.to_string())?;
                }
                let cleanup = reclaimed.map(drop).and(drained.map(drop)).err();
                Err(match cleanup {
                    Some(cleanup) => error.with("cleanup", cleanup),
                    None => error,
                })
            }
        }
    }

    fn poisoned(&mut self) -> Error {
        let (count, first) = (self.failures.len(), self.failures.swap_remove(0));
        first.with("failed_prompts", count)
    }

    fn writer(&mut self) -> &mut RefWriter {
        self.writer.as_mut().expect("there until the run ends")
    }

    /// Waits a while for requests under way, and frees what they capture. What is cut off stays
    /// provisional, and is reclaimed.
    async fn abandon(&mut self, mut calls: JoinSet<Call>) {
        /// How long requests under way may take at the end.
        const BOUND: Duration = Duration::from_secs(10);
        let end = tokio::time::Instant::now() + BOUND;
        while let Ok(Some(done)) = tokio::time::timeout_at(end, calls.join_next()).await {
            let Ok((_, _, answer)) = done else { continue };
            let captured = answer.prompts.into_iter().filter(|(_, outcome)| outcome.is_ok());
            let ids: Vec<SampleId> = captured.map(|(task, _)| task.sample_id).collect();
            self.samples.abort_many(&ids).await;
        }
    }

    async fn produce(
        &mut self,
        prompts: Box<dyn Prompts>,
        calls: &mut JoinSet<Call>,
    ) -> Result<()> {
        self.recover().await?;
        if let Err(error) = self.samples.reclaim().await {
            tracing::warn!(%error, "not everything of an earlier life is reclaimed yet");
        }
        let prompts = Arc::new(Mutex::new(prompts));
        let mut incoming = self.read_ahead(prompts.clone());
        let (mut waited, mut answered) = (false, Instant::now());
        let mut paused_since = None::<Instant>;
        let mut revived = Instant::now();
        let (mut asked, mut looked) = (None::<Instant>, None::<Instant>);
        let poll = self.options.poll;
        let due = |at: Option<Instant>| at.is_none_or(|at| at.elapsed() >= poll);
        let batch = self.options.ingest_batch.max(self.options.lease);
        loop {
            if self.options.arena_feedback && due(asked) {
                asked = Some(Instant::now());
                self.ask_for_room();
            }
            if due(looked) {
                self.look(&prompts).await?;
                looked = Some(Instant::now());
            }
            while !self.exhausted && self.pool.len() < batch {
                match incoming.try_recv() {
                    Ok(task) => self.add(task?),
                    Err(mpsc::error::TryRecvError::Empty) => break,
                    Err(mpsc::error::TryRecvError::Disconnected) => self.exhausted = true,
                }
            }
            // Whole leases, unless prompts come slowly.
            let ready = self.exhausted || waited || self.pool.len() >= self.options.lease;
            let paused = if ready { self.issue(calls).err() } else { None };
            waited = false;
            // Requests that wait for room rest as well: only consumers make any.
            let rest = match calls.is_empty() {
                true => self.exhausted || self.refused || self.pool.len() > 0,
                false => !self.options.overlap && answered.elapsed() >= STANDSTILL,
            };
            if rest && !self.held.is_empty() {
                self.resting = true;
                self.publish().await?;
            }
            let idle = calls.is_empty() && self.pool.len() == 0 && self.later.is_empty();
            if idle && self.exhausted && self.window.usage().samples < self.quantum {
                return Ok(()); // consumers cannot fill another window, so none of it can be lost
            }
            if calls.is_empty() && self.router.alive() == 0 {
                match self.options.revive {
                    Some(after) if revived.elapsed() >= after => {
                        self.router.revive();
                        revived = Instant::now();
                        continue;
                    }
                    Some(_) => {}
                    None => self.router.check(self.pool.len() + self.later.len())?,
                }
            } else if calls.is_empty() && ready && paused.is_none() {
                self.check_room()?;
            }
            match (paused, self.options.peer_timeout) {
                (Some(_), Some(most)) => {
                    let settled = self.window.total_settled();
                    let since = *paused_since.get_or_insert_with(Instant::now);
                    if since.elapsed() > most {
                        return Err(Error::new(
                            ErrorKind::Timeout,
                            "produce",
                            "the consumers settle nothing",
                        )
                        .with("after", format_args!("{most:?}"))
                        .with("settled", settled));
                    }
                }
                _ => paused_since = None,
            }
            tokio::select! {
                Some(done) = calls.join_next() => {
                    let mut done = Some(done);
                    while let Some(call) = done {
                        self.take(call.map_err(|e| {
                            let why = "a request panicked";
                            Error::new(ErrorKind::Unexpected, "capture", why).source(e)
                        })?)?;
                        done = calls.try_join_next(); // what is there is published together
                    }
                    answered = Instant::now();
                    self.held.extend(self.reorder.ready());
                    if self.options.overlap {
                        self.publish().await?;
                    }
                }
                Some(task) = self.later.join_next() => {
                    let panicked = |e| Error::new(ErrorKind::Unexpected, "wait", "panicked").source(e);
                    self.pool.add(task.map_err(panicked)?);
                }
                task = incoming.recv(), if !self.exhausted && self.pool.len() < self.options.lease => {
                    match task {
                        Some(task) => self.add(task?),
                        None => self.exhausted = true,
                    }
                }
                () = tokio::time::sleep(poll) => waited = true,
            }
        }
    }

    fn add(&mut self, mut task: Task) {
        let lost = self.writer().lost().unwrap_or_default();
        if !self.writer().wants(&task.sample_id, &lost) {
            self.produced.skipped += 1;
            return;
        }
        // A prompt may come by, read anew after a restart, while it is captured again already.
        if let Some(&times) = lost.get(&task.sample_id)
            && !self.handled.insert((task.sample_id.clone(), times))
        {
            self.produced.skipped += 1;
            return;
        }
        task.order = self.order;
        self.order += 1;
        self.pool.add(task);
    }

    /// Prepares prompts on a thread of their own, some batches ahead.
    fn read_ahead(&self, prompts: Arc<Mutex<Box<dyn Prompts>>>) -> mpsc::Receiver<Result<Task>> {
        let ahead = (self.options.prefetch * self.options.ingest_batch).max(1);
        let (tasks, incoming) = mpsc::channel(ahead);
        std::thread::spawn(move || {
            loop {
                let next = prompts.lock().next().transpose();
                let Some(task) = next else { return };
                let failed = task.is_err();
                if tasks.blocking_send(task).is_err() || failed {
                    return; // the producer has ended
                }
            }
        });
        incoming
    }

    /// Looks at what consumers have settled and lost.
    async fn look(&mut self, prompts: &Arc<Mutex<Box<dyn Prompts>>>) -> Result<()> {
        self.writer().consumers_done()?;
        let settled = self.writer().settled()?;
        let more = settled.saturating_sub(self.window.total_settled());
        self.window.settled(settled.max(self.window.total_settled()))?;
        self.refused &= more == 0;
        self.tight &= more == 0;
        let count = (more as usize).min(self.resident.len());
        let mut gone = Vec::with_capacity(count);
        for (id, server, bytes) in self.resident.drain(..count) {
            self.router.give_back(server, bytes);
            gone.push(id);
        }
        self.samples.hand_over(&gone);
        self.resting &= self.window.usage().samples >= self.quantum;
        let lost = self.writer().lost()?;
        for (id, &times) in &lost {
            if self.handled.contains(&(id.clone(), times)) || !self.writer().wants(id, &lost) {
                continue;
            }
            self.handled.insert((id.clone(), times));
            self.samples.hand_over([id]);
            let (prompts, wanted) = (prompts.clone(), id.clone());
            let task = blocking(move || prompts.lock().again(&wanted)).await??;
            let mut task = task.ok_or_else(|| {
                Error::new(ErrorKind::NotFound, "capture again", "the prompt is not known any more")
                    .with("sample_id", id)
            })?;
            task.order = self.order;
            self.order += 1;
            self.produced.recaptured += 1;
            self.pool.add(task);
        }
        Ok(())
    }

    /// Sends requests while there are prompts, free servers and room; or says why not.
    fn issue(&mut self, calls: &mut JoinSet<Call>) -> Result<(), Pause> {
        loop {
            let layout = self.client.layout();
            let size = |task: &Task| task.bytes(|tokens| layout.bytes(tokens));
            let waiting = self.reorder.len() as u64;
            let mut usage = self.window.usage();
            usage.samples += waiting + self.held.len() as u64;
            if let Some(room) = *self.room.lock() {
                usage = usage.room(room, self.pool.next_bytes(self.options.lease, size));
            }
            let paused = self.flow.update(usage);
            let crowded = self.is_crowded();
            if crowded && !self.options.ordered {
                self.pool.smallest_first(size);
            } else if self.share.begins() {
                self.pool.largest_first(u64::MAX, size);
            } else if self.pool.oldest().is_some_and(|oldest| self.share.exceeds(size(oldest))) {
                self.pool.largest_first(self.share.even(), size);
            }
            if self.resting || (crowded && !calls.is_empty()) {
                return paused; // when it is crowded, one at a time
            }
            let Some(oldest) = self.pool.oldest() else { return paused };
            let picked = self.router.pick(size(oldest), self.is_sparing());
            let Some((server, room)) = picked else { return paused };
            let behind = self.options.ordered
                && (crowded || self.reorder.len() >= self.options.reorder_buffer);
            let lease: Vec<Task> = if behind || (paused.is_err() && waiting > 0) {
                // Only the one that all others wait for: without it nothing would ever go on.
                self.pool.take(self.reorder.next()).into_iter().collect()
            } else if paused.is_ok() {
                self.pool.lease(self.next_lease(), room.min(self.share.left()), size)
            } else {
                Vec::new()
            };
            if lease.is_empty() {
                return paused;
            }
            let tokens = lease.iter().map(Task::tokens).sum();
            self.router.fill(server, lease.iter().map(size).sum());
            lease.iter().for_each(|task| self.share.add(size(task)));
            let url = self.router.url(server).to_owned();
            if let Err(error) = self.journal.note(&url, lease.iter().map(|task| &task.sample_id)) {
                tracing::warn!(%error, "a crash now could leave samples on a server");
            }
            self.router.begin(server, tokens);
            let client = self.client.clone();
            calls.spawn(async move { (server, tokens, client.capture(&url, lease).await) });
        }
    }

    /// Prompts of the next request. Towards the end fewer than a lease, so that no server has much
    /// to do when the others have nothing left.
    fn next_lease(&self) -> usize {
        let most = self.options.lease;
        if self.is_crowded() {
            return 1;
        }
        if !self.exhausted {
            return most;
        }
        self.pool.len().div_ceil(2 * self.router.alive().max(1)).clamp(1, most)
    }

    /// Takes what came of a request.
    fn take(&mut self, (server, tokens, answer): Call) -> Result<()> {
        let dropped = self.router.end(server, tokens, answer.served);
        self.produced.servers_dropped += u64::from(dropped);
        for (task, outcome) in answer.prompts {
            let layout = self.client.layout();
            let bytes = task.bytes(|tokens| layout.bytes(tokens));
            let error = match outcome {
                Ok(captured) => {
                    if let Some(watch) = &mut self.watch {
                        watch(&captured.descriptor);
                    }
                    self.reorder.put(task.order, Some((captured, server, bytes)));
                    continue;
                }
                Err(error) => error,
            };
            self.router.give_back(server, bytes);
            if error.message().contains("hard cap exceeded") {
                return Err(error);
            }
            self.share.take_back(bytes);
            let order = task.order;
            self.refused |= error.kind() == NO_ROOM && error.is_temporary();
            let again = match error.kind() {
                NO_ROOM | PUT_OFF if error.is_temporary() => {
                    self.pool.refused(task, &error, self.options.room_timeout)
                }
                _ => self.pool.failed(task, &error),
            };
            match again {
                Ok(task) => {
                    tracing::info!(%error, sample_id = %task.sample_id, "another attempt");
                    let pause = self.options.pause * (1 << task.attempt.saturating_sub(1).min(4));
                    self.later.spawn(async move {
                        tokio::time::sleep(pause).await;
                        task
                    });
                }
                Err(error) => {
                    tracing::error!(%error, "a prompt is given up");
                    self.failures.push(error);
                    self.reorder.put(order, None);
                }
            }
        }
        Ok(())
    }

    /// Publishes what is captured and next in order.
    async fn publish(&mut self) -> Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        let (run, strategy) = (&*self.options.run_id, self.client.layout().strategy);
        let line = |(it, ..): &Placed| it.announce(run, strategy);
        let refs = self.held.iter().map(line).collect::<Result<Vec<_>>>()?;
        let ready = std::mem::take(&mut self.held);
        let mut writer = self.writer.take().expect("there until the run ends");
        let published = blocking(move || {
            let outcome = writer.publish(&refs);
            (writer, outcome)
        });
        let (writer, outcome) = published.await?;
        self.writer = Some(writer);
        let count =
            outcome.as_ref().map_or_else(|unpublished| unpublished.published, |()| ready.len());
        for (captured, server, bytes) in &ready[..count] {
            self.window.published(captured.descriptor.nbytes());
            self.resident.push_back((captured.id(), *server, *bytes));
        }
        self.produced.published += count as u64;
        if let Err(unpublished) = outcome {
            let rest: Vec<SampleId> = ready[count..].iter().map(|(it, ..)| it.id()).collect();
            self.samples.abort_many(&rest).await;
            return Err(unpublished.error);
        }
        Ok(())
    }
}
