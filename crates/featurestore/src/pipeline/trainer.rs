//! The trainer process: reads samples ahead, compares them, acknowledges whole quanta durably.
//!
//! It is what a trainer of one rank is made of: an [`Authority`] hands out windows of what the
//! channel announces, a [`Consumer`] reads ahead, and each step is recorded and freed in the
//! background while the next one is compared.

mod compare;
mod marks;
mod way;

use std::{
    collections::VecDeque,
    io::{BufRead, Write},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use control_proto::sample_ref::SampleRef;
use hdrhistogram::Histogram;
use parking_lot::Mutex;
use tokio::{
    runtime::Handle,
    sync::{mpsc, oneshot},
};
use transport_core::{ByteSize, Descriptor, Error, ErrorKind, Result, SessionName};

use super::{
    folder,
    messages::{Event, Job, Start, Totals},
    verify::Checker,
};
use crate::{
    ack::{Acknowledger, Authority, BackgroundAck, Resume, Step},
    channel::RefReader,
    config::Config,
    consumer::{Consumer, ConsumerOptions, Materialized},
    input::Folder,
    ledger::{Ledger, LedgerOptions},
    lifecycle::Samples,
    process::peak_rss_bytes,
    producer::CHECKSUMS,
    ranks::Group,
    store::FeatureStore,
};
use compare::{Bounds, Compared, Comparing};
use marks::Marks;
use way::Way;

/// Differing tensors that are reported by name.
const NAMED: usize = 8;
/// Longest line from the pipeline, in bytes.
const MAX_LINE: u64 = 4 << 20;
/// Pause between two looks at the channel.
const POLL: Duration = Duration::from_millis(1);
/// Windows that wait for the training loop, besides those that it reads.
const WINDOWS: usize = 2;

/// Runs the trainer until the run's channel ends, or its standard input does: then the pipeline is
/// gone, and this removes the run's folder, at `path`.
///
/// The first line of its input overrides strictness and pool of `config`. False if it
/// failed, and the pipeline was told why.
pub async fn run(config: Config, path: PathBuf) -> Result<bool> {
    let (first, start) = oneshot::channel::<Result<Start>>();
    let (left, pipeline_left) = oneshot::channel::<()>();
    // A thread of its own: a blocked read must not keep the runtime from ending.
    std::thread::spawn(move || read_input(first, left));
    let stands = Arc::new(Mutex::new(true)); // the folder
    let outcome = tokio::select! {
        outcome = train(config, start, stands.clone()) => Some(outcome),
        _ = pipeline_left => None,
    };
    let gone = || Error::new(ErrorKind::Closed, "train", "the pipeline is gone");
    let told = match &outcome {
        Some(Ok(totals)) => say(&Event::Done(Box::new(totals.clone()))),
        Some(Err(error)) => say(&Event::Failed { error: error.to_string() }),
        None => Err(gone()),
    };
    if told.is_err() {
        let mut stands = stands.lock();
        *stands = false;
        folder::remove(&path);
    }
    match (outcome, told) {
        (Some(outcome), Ok(())) => Ok(outcome.is_ok()),
        (Some(Err(error)), Err(_)) => Err(error),
        (_, told) => told.map(|()| false),
    }
}

async fn train(
    config: Config,
    start: oneshot::Receiver<Result<Start>>,
    stands: Arc<Mutex<bool>>,
) -> Result<Totals> {
    let ended = || Error::new(ErrorKind::Closed, "train", "the input ended before it began");
    let start = start.await.map_err(|_| ended())??;
    let _held = folder::join(&start.folder)?;
    let peers = start.peers.iter().map(|p| p.parse()).collect::<Result<Vec<SessionName>>>()?;
    let mut config = config.strict(start.strict);
    if let Some(pool) = ByteSize::new(start.pool_bytes).filter(|p| p.get() > 0) {
        config = config.pool(pool);
    }
    let store = FeatureStore::open(&config, &peers).await?;
    let views = store.info().capabilities.views;
    let way = Way::of(store.choice().chosen.parse()?, config.receive, views);
    let checker = Checker::new(&config, way.is_on_device())?;
    let warm = store.health().await?.registrations;
    let marks = Marks::default();
    let training = {
        let (samples, deadline) = (store.samples().clone(), store.deadline());
        let (marks, runtime) = (marks.clone(), Handle::current());
        let (done, outcome) = oneshot::channel();
        let training = move || {
            let stands = stands.lock(); // opening a channel makes its folder anew
            if !*stands {
                return;
            }
            let training = Loop::start(start, samples, checker, deadline, way, marks, runtime);
            drop(stands);
            let _ = done.send(training.and_then(Loop::run)); // nobody listens once the pipeline left
        };
        say(&Event::Ready {
            client: store.client_id().to_string(),
            choice: store.choice().clone(),
            views,
        })?;
        // A thread of its own, as in a real trainer; and nobody waits for it when the pipeline left.
        std::thread::Builder::new()
            .name("train".into())
            .spawn(training)
            .map_err(|e| Error::io("start training", e))?;
        outcome
    };
    let panicked = |e| Error::new(ErrorKind::Unexpected, "train", "the loop panicked").source(e);
    let mut totals = training.await.map_err(panicked)??;
    totals.cleanup_s = marks.freeing().as_secs_f64();
    totals.ledger.elapsed_s = marks.recording().as_secs_f64();
    totals.ledger.transactions = marks.transactions();
    let health = store.health().await?;
    totals.host_payload_bytes = health.host_payload_bytes;
    totals.registrations = health.registrations - warm;
    store.close().await?;
    totals.peak_rss_bytes = peak_rss_bytes();
    Ok(totals)
}

/// Reads the first line, and drops `left` when the input ends: the pipeline holds its other end.
fn read_input(first: oneshot::Sender<Result<Start>>, left: oneshot::Sender<()>) {
    let mut input = std::io::stdin().lock();
    let mut line = String::new();
    let read = std::io::Read::take(&mut input, MAX_LINE).read_line(&mut line);
    let start = match read.map_err(|e| Error::io("read start", e)) {
        Ok(0) => return,
        Ok(_) => serde_json::from_str(&line).map_err(|e| {
            Error::new(ErrorKind::Protocol, "read start", "not a line of the pipeline").source(e)
        }),
        Err(error) => Err(error),
    };
    if first.send(start).is_ok() {
        while matches!(std::io::Read::read(&mut input, &mut [0; 256]), Ok(n) if n > 0) {}
    }
    drop(left);
}

/// The training loop, on a thread that may block.
struct Loop {
    start: Start,
    samples: Arc<Samples>,
    authority: Arc<Mutex<Authority>>,
    windows: mpsc::Receiver<Result<Vec<SampleRef>>>,
    ended: bool, // there are no more windows
    consumer: Consumer,
    comparing: Comparing,
    ack: BackgroundAck,
    runtime: Handle,
    folder: Option<Folder>,
    jobs: VecDeque<(Job, u64)>, // of what the consumer was fed, in order, and its bytes
    steps: VecDeque<usize>,     // sizes of the windows fed
    waits: Histogram<u64>,      // in microseconds
    idle: Option<Instant>,      // since when nothing is compared
    totals: Totals,
}

/// What the training loop goes on with.
enum Next {
    Window(Result<Vec<SampleRef>>),
    Ended,
    Read(Result<Option<Materialized>>),
    Compared(Result<Compared>),
}

impl Loop {
    fn start(
        start: Start,
        samples: Arc<Samples>,
        checker: Checker,
        deadline: Duration,
        way: Way,
        marks: Marks,
        runtime: Handle,
    ) -> Result<Self> {
        let options = LedgerOptions { observer: marks.observer(), ..LedgerOptions::default() };
        let ledger = Ledger::open(&start.ledger, &start.run, options)?;
        let reader = RefReader::open(&start.folder)?;
        let authority = Authority::new(reader, ledger, 1, start.quantum, Resume::Fresh)?;
        let authority = Arc::new(Mutex::new(authority));
        let (send, windows) = mpsc::channel(WINDOWS);
        let handing = authority.clone();
        std::thread::spawn(move || hand_out(&handing, &send));

        let group = Group::alone(start.run.clone());
        let ack =
            Acknowledger::new(group, samples.clone(), Some(authority.clone()), runtime.clone())?
                .observed(marks.observer())
                .batch(if start.serial { 1 } else { usize::MAX });
        let (in_flight, refill_at) = if start.serial { (1, 0) } else { way.ahead() };
        let options = ConsumerOptions {
            deadline,
            in_flight,
            refill_at,
            together: way.together(),
            max_bytes: way.read_bytes(start.pool_bytes),
            layout: None, // what the server was asked for was checked when it answered
        };
        let bounds = if start.serial { Bounds::SERIAL } else { way.compared(start.pool_bytes) };
        Ok(Self {
            consumer: Consumer::new(samples.clone(), options),
            comparing: Comparing::start(checker, bounds, &runtime)?,
            ack: BackgroundAck::start(ack)?,
            folder: start.input.as_deref().map(Folder::open).transpose()?,
            samples,
            authority,
            windows,
            ended: false,
            runtime,
            jobs: VecDeque::new(),
            steps: VecDeque::new(),
            waits: Histogram::new_with_bounds(1, 3_600_000_000, 3).expect("bounds in order"),
            idle: Some(Instant::now()),
            totals: Totals::default(),
            start,
        })
    }

    fn run(mut self) -> Result<Totals> {
        let outcome = self.steps();
        if let Err(error) = &outcome
            && let Err(untold) = self.authority.lock().fail(&error.to_string())
        {
            tracing::warn!(%untold, "the channel does not say that its consumer failed");
        }
        outcome?;
        let Self { samples, authority, consumer, ack, runtime, mut totals, waits, .. } = self;
        ack.close()?;
        runtime.block_on(samples.drain(None, 8, Duration::from_millis(250)))?;
        authority.lock().finish()?;
        totals.materialize_active_s = consumer.active().as_secs_f64();
        totals.released = samples.health().freed;
        totals.ledger.acknowledged = authority.lock().ledger().acknowledged().len();
        totals.wait.p50_us = waits.value_at_quantile(0.5);
        totals.wait.p99_us = waits.value_at_quantile(0.99);
        totals.wait.max_us = waits.max();
        Ok(totals)
    }

    /// Whole steps until the channel ends; the last one may be smaller.
    fn steps(&mut self) -> Result<()> {
        let _runtime = self.runtime.clone();
        let _entered = _runtime.enter(); // readings are its tasks
        let mut trained: Vec<Arc<Descriptor>> = Vec::new();
        let mut step = 0;
        while let Some(next) = self.next() {
            match next {
                Next::Ended => self.ended = true,
                Next::Window(window) => self.feed(&window?)?,
                Next::Read(read) => self.compare(read?)?,
                Next::Compared(compared) => {
                    trained.push(self.account(compared?)?);
                    if Some(&trained.len()) == self.steps.front() {
                        self.steps.pop_front();
                        self.acked(step)?;
                        step += 1;
                        self.ack.submit(Step::new(step, std::mem::take(&mut trained)))?;
                    }
                    self.idle = self.comparing.is_empty().then(Instant::now);
                }
            }
        }
        self.acked(step)?;
        self.totals.ledger.steps = step;
        Ok(())
    }

    /// Waits for whatever comes first; none at the end. What is compared is settled before more is
    /// begun.
    fn next(&mut self) -> Option<Next> {
        let reads = self.jobs.front().is_some_and(|&(_, bytes)| self.comparing.has_room(bytes));
        let compares = !self.comparing.is_empty();
        let Self { runtime, windows, ended, consumer, comparing, .. } = self;
        runtime.block_on(async {
            tokio::select! {
                biased;
                compared = comparing.next(), if compares => Some(Next::Compared(compared)),
                window = windows.recv(), if !*ended => {
                    Some(window.map_or(Next::Ended, Next::Window))
                }
                read = consumer.next(), if reads => Some(Next::Read(read)),
                else => None,
            }
        })
    }

    /// Waits until step `step` is durable and freed, if there is such a step, and tells.
    fn acked(&mut self, step: u64) -> Result<()> {
        let begun = Instant::now();
        let boundary = self.ack.flush()?;
        self.totals.wait.boundaries_s += begun.elapsed().as_secs_f64();
        match boundary {
            Some(boundary) if boundary.step == step => {
                say(&Event::Acked { samples: boundary.acknowledged as usize })
            }
            _ => Ok(()),
        }
    }

    /// Hands on what is announced.
    fn feed(&mut self, window: &[SampleRef]) -> Result<()> {
        if let Some(since) = self.idle.filter(|_| self.consumer.is_empty()) {
            self.totals.wait.starved_s += since.elapsed().as_secs_f64();
            self.idle = Some(Instant::now());
        }
        let mut samples = Vec::with_capacity(window.len());
        for sample in window {
            let descriptor = Arc::new(sample.descriptor()?);
            self.jobs.push_back((self.job(sample)?, descriptor.nbytes()));
            samples.push(descriptor);
        }
        self.steps.push_back(samples.len());
        self.consumer.feed(samples)
    }

    /// What a sample is compared with.
    fn job(&self, sample: &SampleRef) -> Result<Job> {
        let checksums = sample.metadata.get(CHECKSUMS).map(|sums| {
            serde_json::from_value(sums.clone()).map_err(|e| {
                Error::new(ErrorKind::Protocol, "read ref", "the checksums make no sense")
                    .with("sample_id", &sample.sample_id)
                    .source(e)
            })
        });
        let sha256 = match &self.folder {
            None => None,
            Some(folder) => {
                let sums = folder.sample(sample.sample_id.as_str())?.sha256();
                (!sums.is_empty()).then(|| sums.into_iter().collect())
            }
        };
        Ok(Job { checksums: checksums.transpose()?, sha256 })
    }

    /// Begins to compare a sample that was read.
    fn compare(&mut self, read: Option<Materialized>) -> Result<()> {
        // While others are compared nobody waits.
        let waited = self.idle.take().map_or(0, |since| since.elapsed().as_micros() as u64);
        self.waits.saturating_record(waited.max(1));
        let leased = match read.expect("something was fed") {
            Materialized::Ready(leased) => leased,
            Materialized::Lost(id, error) => return Err(error.with("sample_id", id)),
        };
        let (job, _) = self.jobs.pop_front().expect("one a sample");
        self.comparing.begin(self.start.verify.then_some(job), leased);
        Ok(())
    }

    /// Takes note of a sample that was compared, and gives its lease back.
    fn account(&mut self, compared: Compared) -> Result<Arc<Descriptor>> {
        let Compared { descriptor, token, verified, differing, took } = compared;
        self.runtime.block_on(self.samples.release(&token));
        let bytes = descriptor.nbytes();
        self.totals.samples += 1;
        self.totals.bytes += bytes;
        self.totals.verified_bytes += verified;
        self.totals.wait.compared_s += took.as_secs_f64();
        self.totals.mismatches += differing.len() as u64;
        let named = NAMED.saturating_sub(self.totals.differing.len());
        self.totals.differing.extend(differing.into_iter().take(named));
        say(&Event::Verified { bytes })?;
        Ok(descriptor)
    }
}

/// Hands out windows until the channel has ended, or something fails.
fn hand_out(authority: &Mutex<Authority>, windows: &mpsc::Sender<Result<Vec<SampleRef>>>) {
    loop {
        let mut locked = authority.lock();
        let window = match locked.poll() {
            Ok(None) if locked.ended() => match locked.last_window() {
                Ok(None) => return,
                last => last,
            },
            polled => polled,
        };
        drop(locked);
        match window.transpose() {
            Some(window) => {
                let failed = window.is_err();
                if windows.blocking_send(window.map(|ranks| ranks.concat())).is_err() || failed {
                    return; // the loop has ended
                }
            }
            None => std::thread::sleep(POLL),
        }
    }
}

fn say(event: &Event) -> Result<()> {
    let mut line = serde_json::to_vec(event)
        .map_err(|e| Error::new(ErrorKind::Unexpected, "report", "not JSON").source(e))?;
    line.push(b'\n');
    std::io::stdout().lock().write_all(&line).map_err(|e| Error::io("report", e))
}
