//! Drives prompts through capture servers and publishes what they capture.
//!
//! It moves no tensors: a machine without a device can run it, and it reports zero payload bytes.

mod capture;
mod journal;
mod prompts;
mod reorder;
mod route;
#[cfg(test)]
mod tests;

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use control_proto::sample_ref::SampleRef;
use parking_lot::Mutex;
use tokio::{sync::mpsc, task::JoinSet};
use transport_core::{Descriptor, Error, ErrorKind, Result, SampleId};

pub use capture::{CaptureClient, CaptureOptions, Endpoints};
pub use prompts::{Batching, Task};
pub use route::Routing;

use crate::{
    channel::RefWriter,
    flow::{Flow, InFlight, Pause, Watermarks},
    lifecycle::Samples,
};
use capture::{Answer, blocking};
use journal::Journal;
use prompts::Pool;
use reorder::Reorder;
use route::Router;

/// Prompts in the order in which they are to be published.
pub trait Prompts: Send {
    /// The next prompt; none at the end.
    fn next(&mut self) -> Result<Option<Task>>;

    /// A prompt once more, whose sample was lost.
    fn again(&mut self, id: &SampleId) -> Result<Option<Task>>;
}

/// How a [`Producer`] works.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ProducerOptions {
    /// Base URLs of the capture servers.
    pub servers: Vec<String>,
    /// Most prompts of one request. Default: 8.
    pub lease: usize,
    /// Requests in flight to each server. Default: 1.
    pub concurrency: usize,
    /// How requests are spread.
    pub routing: Routing,
    /// Which prompts go together.
    pub batching: Batching,
    /// Batches of prompts that are prepared ahead. Default: 0.
    pub prefetch: usize,
    /// Prompts of one such batch. Default: 128.
    pub ingest_batch: usize,
    /// Whether samples are published in the order of their prompts. Default: true.
    pub ordered: bool,
    /// Samples that may wait for an earlier one. Default: 1,024.
    pub reorder_buffer: usize,
    /// Attempts for one prompt. Default: 5.
    pub attempts: u32,
    /// Failures in a row after which a server is dropped. Default: 3.
    pub server_failures: u32,
    /// How long a dropped server is left alone before it is tried again; none for ever.
    pub revive: Option<Duration>,
    /// Training run and strategy that refs name.
    pub run_id: String,
    /// Pause between looks at what consumers have settled. Default: 200 ms.
    pub poll: Duration,
    /// Whether the servers are asked how much room their arenas have in one piece; for servers that
    /// answer `GET /health`. Default: false.
    pub arena_feedback: bool,
    /// How long consumers may settle nothing while the producer is paused; none for ever.
    pub peer_timeout: Option<Duration>,
}

impl ProducerOptions {
    /// The defaults, for these servers.
    pub fn new(servers: Vec<String>, run_id: impl Into<String>) -> Self {
        Self {
            servers,
            lease: 8,
            concurrency: 1,
            routing: Routing::Shared,
            batching: Batching::Shuffle,
            prefetch: 0,
            ingest_batch: 128,
            ordered: true,
            reorder_buffer: 1024,
            attempts: 5,
            server_failures: 3,
            revive: None,
            run_id: run_id.into(),
            poll: Duration::from_millis(200),
            arena_feedback: false,
            peer_timeout: None,
        }
    }
}

/// A request under way: its server, its tokens, and what came of it.
type Call = (usize, u64, Answer);

/// What a producer has done.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Produced {
    /// Samples published by this run of the producer.
    pub published: u64,
    /// Prompts that were published before.
    pub skipped: u64,
    /// Attempts beyond the first.
    pub retries: u64,
    /// Samples captured again because consumers had lost them.
    pub recaptured: u64,
    /// Times that it paused, and went on.
    pub pauses: u64,
    /// Times that it went on.
    pub resumes: u64,
    /// Servers dropped.
    pub servers_dropped: u64,
    /// Tensor payload that passed through this process: none does.
    pub host_payload_bytes: u64,
}

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
    resident: VecDeque<SampleId>, // published and not settled, oldest first
    pool: Pool,
    router: Router,
    reorder: Reorder<Arc<Descriptor>>,
    order: u64,
    handled: HashSet<(SampleId, u32)>, // losses that are being captured again
    failures: Vec<Error>,
    room: Arc<Mutex<Option<u64>>>, // largest free range of the roomiest arena
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
        let router = Router::new(
            &options.servers,
            options.routing,
            options.concurrency,
            options.server_failures,
        );
        let writer = RefWriter::open(folder)?;
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
            order: 0,
            handled: HashSet::new(),
            failures: Vec::new(),
            room: Arc::default(),
            produced: Produced::default(),
            options,
        })
    }

    /// Captures and publishes every prompt, and closes the channel; on failure it fails the channel
    /// with the reason, after everything unpublished was freed.
    pub async fn run(mut self, prompts: Box<dyn Prompts>) -> Result<Produced> {
        let mut calls = JoinSet::new();
        let outcome = self.produce(prompts, &mut calls).await;
        self.abandon(calls).await;
        let outcome = match (outcome, self.failures.is_empty()) {
            (Ok(()), true) => Ok(()),
            (Ok(()), false) => Err(self.poisoned()),
            (Err(error), _) => Err(error),
        };
        // What is captured and not handed over goes; what may have been captured is looked for.
        let unpublished: Vec<SampleId> =
            self.reorder.drain().map(|descriptor| descriptor.sample.sample_id.clone()).collect();
        self.samples.abort_many(&unpublished).await;
        // What is published belongs to the consumers.
        let published: Vec<SampleId> = self.resident.drain(..).collect();
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
                writer.close()?;
                reclaimed?;
                drained?;
                Ok(self.produced)
            }
            Err(error) => {
                writer.fail(&error.to_string())?;
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
        self.earlier = self.journal.entries();
        self.recover().await?;
        if let Err(error) = self.samples.reclaim().await {
            tracing::warn!(%error, "not everything of an earlier life is reclaimed yet");
        }
        let prompts = Arc::new(Mutex::new(prompts));
        let mut incoming = self.read_ahead(prompts.clone());
        let mut exhausted = false;
        let mut paused_since = None::<tokio::time::Instant>;
        let mut revived = tokio::time::Instant::now();
        let mut asked = None::<tokio::time::Instant>;
        loop {
            if self.options.arena_feedback
                && asked.is_none_or(|at| at.elapsed() >= self.options.poll)
            {
                asked = Some(tokio::time::Instant::now());
                let (client, room) = (self.client.clone(), self.room.clone());
                let urls = self.options.servers.clone();
                tokio::spawn(async move {
                    let mut most = None;
                    for url in &urls {
                        most = most.max(client.largest_free(url).await);
                    }
                    *room.lock() = most;
                });
            }
            self.look(&prompts).await?;
            while !exhausted && self.pool.len() < self.options.ingest_batch.max(self.options.lease)
            {
                match incoming.try_recv() {
                    Ok(task) => self.add(task?),
                    Err(mpsc::error::TryRecvError::Empty) => break,
                    Err(mpsc::error::TryRecvError::Disconnected) => exhausted = true,
                }
            }
            let paused = self.issue(calls).err();
            let idle = calls.is_empty() && self.pool.len() == 0;
            if idle && exhausted && self.window.usage().samples < self.quantum {
                return Ok(()); // consumers cannot fill another window, so none of it can be lost
            }
            if calls.is_empty() && self.router.alive() == 0 {
                match self.options.revive {
                    Some(after) if revived.elapsed() >= after => {
                        self.router.revive();
                        revived = tokio::time::Instant::now();
                        continue;
                    }
                    Some(_) => {}
                    None => self.router.check(self.pool.len())?,
                }
            }
            match (paused, self.options.peer_timeout) {
                (Some(_), Some(most)) => {
                    let settled = self.window.total_settled();
                    let since = *paused_since.get_or_insert_with(tokio::time::Instant::now);
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
                    let (server, tokens, answer) = done.map_err(|e| {
                        Error::new(ErrorKind::Unexpected, "capture", "a request panicked").source(e)
                    })?;
                    self.produced.servers_dropped +=
                        u64::from(self.router.end(server, tokens, answer.served));
                    self.take(answer).await?;
                }
                task = incoming.recv(), if !exhausted && self.pool.len() == 0 => match task {
                    Some(task) => self.add(task?),
                    None => exhausted = true,
                },
                () = tokio::time::sleep(self.options.poll) => {}
            }
        }
    }

    /// Frees what earlier lives of this producer may have left on servers. Also at the end: a server
    /// may have finished a capture of an earlier life later than this one began.
    async fn recover(&mut self) -> Result<()> {
        let ids: HashSet<SampleId> = self.earlier.iter().map(|(_, id)| id.clone()).collect();
        let newest = self.writer().newest(&ids)?;
        let lost = self.writer().lost()?;
        for (url, id) in self.earlier.clone() {
            // What consumers own stays; another server may still have its own of the same name.
            let owned = newest.get(&id).filter(|_| !self.writer().wants(&id, &lost));
            let here = match owned {
                Some(sample) => self.client.is_at(&url, &sample.descriptor()?),
                None => false,
            };
            if !here {
                let key = self.client.key(&Task::new(id, Vec::new(), Vec::new()));
                self.samples.track(&url, [&key]);
            }
        }
        Ok(())
    }

    fn add(&mut self, mut task: Task) {
        let lost = self.writer().lost().unwrap_or_default();
        if !self.writer().wants(&task.sample_id, &lost) {
            self.produced.skipped += 1;
            return;
        }
        if let Some(&times) = lost.get(&task.sample_id) {
            self.handled.insert((task.sample_id.clone(), times));
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
        let gone: Vec<SampleId> = {
            let count = (more as usize).min(self.resident.len());
            self.resident.drain(..count).collect()
        };
        self.samples.hand_over(&gone);
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
            let waiting = self.reorder.len() as u64;
            let mut usage = self.window.usage();
            usage.samples += waiting;
            if let Some(room) = *self.room.lock() {
                let tokens = self.pool.next_tokens(self.options.lease);
                usage = usage.room(room, self.client.layout().bytes(tokens));
            }
            let paused = self.flow.update(usage);
            if self.pool.len() == 0 {
                return paused;
            }
            let Some(server) = self.router.pick() else { return paused };
            let behind = self.reorder.len() >= self.options.reorder_buffer;
            let lease: Vec<Task> = if behind || (paused.is_err() && waiting > 0) {
                // Only the one that all others wait for: without it nothing would ever go on.
                self.pool.take(self.reorder.next()).into_iter().collect()
            } else if paused.is_ok() {
                self.pool.lease(self.options.lease)
            } else {
                Vec::new()
            };
            if lease.is_empty() {
                return paused;
            }
            let tokens = lease.iter().map(Task::tokens).sum();
            let url = self.router.url(server).to_owned();
            if let Err(error) = self.journal.note(&url, lease.iter().map(|task| &task.sample_id)) {
                tracing::warn!(%error, "a crash now could leave samples on a server");
            }
            self.router.begin(server, tokens);
            let client = self.client.clone();
            calls.spawn(async move { (server, tokens, client.capture(&url, lease).await) });
        }
    }

    /// Takes what came of a request: publishes what is next in order.
    async fn take(&mut self, answer: Answer) -> Result<()> {
        for (task, outcome) in answer.prompts {
            match outcome {
                Ok(descriptor) => self.reorder.put(task.order, Some(descriptor)),
                Err(error) if error.message().contains("hard cap exceeded") => return Err(error),
                Err(error) => {
                    let order = task.order;
                    if let Err(error) = self.pool.failed(task, &error) {
                        tracing::error!(%error, "a prompt is given up");
                        self.failures.push(error);
                        self.reorder.put(order, None);
                    }
                }
            }
        }
        let ready: Vec<Arc<Descriptor>> = self.reorder.ready().collect();
        if ready.is_empty() {
            return Ok(());
        }
        let strategy = self.client.layout().strategy.name();
        let run = self.options.run_id.clone();
        let refs = ready
            .iter()
            .map(|descriptor| SampleRef::new(descriptor, &*run, None, strategy))
            .collect::<Result<Vec<_>>>()?;
        let mut writer = self.writer.take().expect("there until the run ends");
        let published = blocking(move || {
            let outcome = writer.publish(&refs);
            (writer, outcome)
        });
        let (writer, outcome) = published.await?;
        self.writer = Some(writer);
        let count =
            outcome.as_ref().map_or_else(|unpublished| unpublished.published, |()| ready.len());
        for descriptor in &ready[..count] {
            self.window.published(descriptor.nbytes());
            self.resident.push_back(descriptor.sample.sample_id.clone());
        }
        self.produced.published += count as u64;
        if let Err(unpublished) = outcome {
            let rest: Vec<SampleId> =
                ready[count..].iter().map(|d| d.sample.sample_id.clone()).collect();
            self.samples.abort_many(&rest).await;
            return Err(unpublished.error);
        }
        Ok(())
    }
}
