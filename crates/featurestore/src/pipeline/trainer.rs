//! The trainer process: reads samples, compares them, acknowledges whole quanta.

use std::{
    io::{BufRead, Write},
    sync::Arc,
    time::{Duration, Instant},
};

use control_proto::capture::{CaptureOutcome, Limits, parse_result};
use tokio::sync::{Notify, mpsc};
use transport_core::{
    ByteSize, Descriptor, Error, ErrorKind, Fetched, ReleaseReport, Result, SessionName,
};

use super::{
    messages::{Event, Job, Start, Totals},
    verify::compare,
};
use crate::{config::Config, process::peak_rss_bytes, store::FeatureStore};

/// Differing tensors that are reported by name.
const NAMED: usize = 8;
/// Longest line from the pipeline, in bytes.
const MAX_LINE: u64 = 4 << 20;

/// Runs the trainer over standard input and output until the input ends.
///
/// The first line overrides transport, strictness and pool of `config`.
pub async fn run(config: Config) -> Result<()> {
    let outcome = train(config).await;
    match outcome {
        Ok(totals) => say(&Event::Done(Box::new(totals))),
        Err(error) => {
            say(&Event::Failed { error: error.to_string() })?;
            Err(error)
        }
    }
}

async fn train(config: Config) -> Result<Totals> {
    let (lines, mut jobs) = mpsc::channel::<Result<Job>>(1024);
    let (first, start) = tokio::sync::oneshot::channel::<Result<Start>>();
    // A thread of its own: a blocked read must not keep the runtime from ending.
    std::thread::spawn(move || read_input(first, lines));
    let ended = || Error::new(ErrorKind::Closed, "train", "the input ended before it began");
    let start = start.await.map_err(|_| ended())??;
    let peers = start.peers.iter().map(|p| p.parse()).collect::<Result<Vec<SessionName>>>()?;
    let mut config = config.transport(start.transport.parse()?).strict(start.strict);
    if let Some(pool) = ByteSize::new(start.pool_bytes).filter(|p| p.get() > 0) {
        config = config.pool(pool);
    }
    let store = Arc::new(FeatureStore::open(&config, &peers).await?);
    let warm = store.health().await?.registrations;
    say(&Event::Ready {
        client: store.client_id().to_string(),
        choice: store.choice().clone(),
        views: store.info().capabilities.views,
    })?;

    let (to_verify, verifying) = mpsc::channel(1);
    let room = Arc::new(Notify::new());
    let verifier = Verifier {
        store: store.clone(),
        quantum: start.quantum.max(1),
        verify: start.verify,
        serial: start.serial,
        room: room.clone(),
        pending: Vec::new(),
        totals: Totals::default(),
    };
    let verifier = tokio::spawn(verifier.run(verifying));
    let mut active = Duration::ZERO;
    let mut failure = None;
    while let Some(job) = jobs.recv().await {
        let fetched = match job.and_then(|job| Ok((descriptor(&job)?, job))) {
            Ok((descriptor, job)) => {
                fetch(&store, descriptor, &room, &mut active).await.map(|f| (job, f))
            }
            Err(error) => Err(error),
        };
        match fetched {
            Ok(item) => {
                if to_verify.send(item).await.is_err() {
                    break; // the verifier has failed, and says why below
                }
            }
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    drop(to_verify);
    let panicked =
        |e| Error::new(ErrorKind::Unexpected, "train", "the comparison panicked").source(e);
    let mut totals = verifier.await.map_err(panicked)??;
    if let Some(error) = failure {
        return Err(error);
    }
    totals.materialize_active_s = active.as_secs_f64();
    let health = store.health().await?;
    totals.host_payload_bytes = health.host_payload_bytes;
    totals.registrations = health.registrations - warm;
    store.close().await?;
    totals.peak_rss_bytes = peak_rss_bytes();
    Ok(totals)
}

fn read_input(
    first: tokio::sync::oneshot::Sender<Result<Start>>,
    lines: mpsc::Sender<Result<Job>>,
) {
    let mut input = std::io::stdin().lock();
    let mut line = String::new();
    let mut next = move || -> Result<Option<String>> {
        line.clear();
        let n = std::io::Read::take(&mut input, MAX_LINE)
            .read_line(&mut line)
            .map_err(|e| Error::io("read job", e))?;
        match n {
            0 => Ok(None),
            _ if !line.ends_with('\n') => {
                Err(Error::new(ErrorKind::Protocol, "read job", "a line is cut off or too long"))
            }
            _ => Ok(Some(line.clone())),
        }
    };
    fn parse<T: serde::de::DeserializeOwned>(line: &str) -> Result<T> {
        serde_json::from_str(line).map_err(|e| {
            Error::new(ErrorKind::Protocol, "read job", "not a line of the pipeline").source(e)
        })
    }
    let start = match next() {
        Ok(Some(line)) => parse(&line),
        Ok(None) => return,
        Err(error) => Err(error),
    };
    if first.send(start).is_err() {
        return;
    }
    loop {
        let job = match next() {
            Ok(Some(line)) => parse(&line),
            Ok(None) => return,
            Err(error) => Err(error),
        };
        let failed = job.is_err();
        if lines.blocking_send(job).is_err() || failed {
            return;
        }
    }
}

fn descriptor(job: &Job) -> Result<Arc<Descriptor>> {
    match parse_result(job.result.get(), &Limits::default())? {
        CaptureOutcome::Captured(descriptor) => Ok(Arc::new(descriptor)),
        CaptureOutcome::Failed { sample_id, error, .. } => {
            Err(Error::new(ErrorKind::Protocol, "read job", "a failed capture was handed on")
                .with("sample_id", sample_id)
                .with("error", error))
        }
    }
}

/// Reads one sample. A full receive pool waits for the comparison to give slots back.
async fn fetch(
    store: &FeatureStore,
    descriptor: Arc<Descriptor>,
    room: &Notify,
    active: &mut Duration,
) -> Result<Fetched> {
    let end = Instant::now() + store.deadline();
    let copies = !store.info().capabilities.views; // a view takes no room that could come back
    loop {
        let freed = room.notified();
        let start = Instant::now();
        let fetched = store.get(descriptor.clone()).await;
        *active += start.elapsed();
        match fetched {
            Err(error) if copies && error.kind() == ErrorKind::CapacityExceeded => {
                let left = end.saturating_duration_since(Instant::now());
                if tokio::time::timeout(left, freed).await.is_err() {
                    return Err(error);
                }
            }
            other => return other,
        }
    }
}

struct Verifier {
    store: Arc<FeatureStore>,
    quantum: usize,
    verify: bool,
    serial: bool,
    room: Arc<Notify>,
    pending: Vec<(usize, Arc<Descriptor>)>,
    totals: Totals,
}

impl Verifier {
    async fn run(mut self, mut items: mpsc::Receiver<(Job, Fetched)>) -> Result<Totals> {
        let mut released = ReleaseReport::default();
        while let Some((job, fetched)) = items.recv().await {
            let descriptor = fetched.descriptor.clone();
            let index = job.index;
            self.totals.samples += 1;
            self.totals.bytes += fetched.nbytes();
            if self.verify {
                let compared = tokio::task::spawn_blocking(move || compare(&job, &fetched));
                let (bytes, differing) = compared.await.map_err(|e| {
                    Error::new(ErrorKind::Unexpected, "compare", "the comparison panicked")
                        .source(e)
                })??;
                self.totals.verified_bytes += bytes;
                self.totals.mismatches += differing.len() as u64;
                let named = NAMED.saturating_sub(self.totals.differing.len());
                self.totals.differing.extend(differing.into_iter().take(named));
            } else {
                drop(fetched);
            }
            self.room.notify_one();
            say(&Event::Verified { index })?;
            self.pending.push((index, descriptor));
            if self.pending.len() >= self.quantum {
                released.merge(self.acknowledge().await?);
            }
        }
        if !self.pending.is_empty() {
            released.merge(self.acknowledge().await?);
        }
        self.totals.released = released.into();
        Ok(self.totals)
    }

    /// The optimizer boundary: what the step has used goes back to its server.
    async fn acknowledge(&mut self) -> Result<ReleaseReport> {
        let (indices, samples): (Vec<_>, Vec<_>) = self.pending.drain(..).unzip();
        let start = Instant::now();
        let mut report = ReleaseReport::default();
        if self.serial {
            for sample in samples {
                report.merge(self.store.release(vec![sample]).await?);
            }
        } else {
            report = self.store.release(samples).await?;
        }
        self.totals.cleanup_s += start.elapsed().as_secs_f64();
        say(&Event::Acked { indices })?;
        Ok(report)
    }
}

fn say(event: &Event) -> Result<()> {
    let mut line = serde_json::to_vec(event)
        .map_err(|e| Error::new(ErrorKind::Unexpected, "report", "not JSON").source(e))?;
    line.push(b'\n');
    std::io::stdout().lock().write_all(&line).map_err(|e| Error::io("report", e))
}
