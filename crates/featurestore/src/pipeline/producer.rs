//! The pipeline's producer: the library's, with what a run needs around it.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use control_proto::capture::{ChecksumKind, Form};
use tokio::process::Child;
use transport_core::{
    Capabilities, ClientId, Descriptor, Error, ErrorKind, FetchOptions, FetchRequest, Fetched,
    Health, Publication, PublishOptions, Release, ReleaseReport, Result, SampleId, StoreId,
    Transport, TransportInfo,
};
use transport_mooncake_direct::{DirectTransport, Engine};

use super::{
    Options, blame,
    children::{Events, LOOK, Server, Trainer, died, reap},
    messages::{Event, Totals},
    plan::Plan,
    preset,
    progress::{Counts, Progress},
};
use crate::{
    choose::Choice,
    flow::Watermarks,
    layout::{Layout, Strategy},
    lifecycle::{Retention, Samples},
    process::{STOPPED, note},
    producer::{
        Batching, CaptureClient, CaptureOptions, Endpoints, Produced, Producer, ProducerOptions,
        Prompts, Task,
    },
};

/// Samples in flight at most, so that refs never pile up.
const AHEAD: u64 = 4096;
/// Longest time of one capture request, waiting for room included, unless the run may stand still
/// for longer.
const REQUEST: Duration = Duration::from_secs(300);
/// Pause between two looks at what the trainer has acknowledged.
const POLL: Duration = Duration::from_millis(2);
/// Without any progress for this long, a process that is stopped is named.
pub(super) const QUIET: Duration = Duration::from_secs(2);

/// What a run came to, besides the servers' own numbers.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) totals: Totals,
    pub(super) choice: Choice,
    pub(super) views: bool,
    pub(super) on_device: bool,
    pub(super) samples: usize,
    pub(super) tokens: u64,
    pub(super) capture_elapsed: Duration,
    pub(super) pipeline_elapsed: Duration,
    pub(super) produced: Produced,
}

/// Produces, and watches everything that takes part, until the trainer is done.
pub(super) async fn run(
    options: &Options,
    servers: &mut [Server],
    trainer: Trainer,
    plan: &Plan,
    folder: &Path,
    progress: &Arc<Progress>,
) -> Result<Run> {
    let Trainer { name, client, choice, views, mut child, stdin, mut events } = trainer;
    let on_device = options.receive.is_on_device(choice.chosen.parse()?);
    let checksums: &[ChecksumKind] = match (options.verify, on_device) {
        (false, _) => &[],
        (true, false) => &ChecksumKind::ALL,
        (true, true) => &[ChecksumKind::Mixsum], // which is what devices compare
    };
    let producer = producer(options, servers, client, checksums, plan, folder, progress)?;
    let prompts = Box::new(Planned::new(options, plan, on_device && options.verify));
    let stall = options.stall_timeout;
    let quiet = QUIET.min(stall);
    let start = Instant::now();
    let mut producing = Box::pin(producer.run(prompts));
    let (mut produced, mut totals) = (None, None);
    let mut is_told = false;
    // Counted in looks, not by the clock: while this process is stopped itself it sees no news.
    let (mut newest, mut still) = (progress.counts().news, Duration::ZERO);
    while produced.is_none() || totals.is_none() {
        let news = progress.counts().news;
        if news != newest {
            (newest, still, is_told) = (news, Duration::ZERO, false);
        }
        let error = tokio::select! {
            biased; // what waits comes before the decision that nothing does
            outcome = &mut producing, if produced.is_none() => match outcome {
                Ok(outcome) => {
                    produced = Some(outcome);
                    continue;
                }
                // A trainer that failed says why in words of its own.
                Err(error) => last_words(&mut events, &name).await.unwrap_or(error),
            },
            event = events.next(), if totals.is_none() => match event {
                Ok(Some(Event::Failed { error })) => failed(&name, &error),
                Ok(Some(event)) => {
                    match event {
                        Event::Verified { bytes } => progress.verified(bytes),
                        Event::Acked { samples } => progress.acked(samples),
                        Event::Done(done) => totals = Some(*done),
                        Event::Ready { .. } | Event::Failed { .. } => {}
                    }
                    continue;
                }
                Ok(None) => trainer_gone(&mut child, &name).await,
                Err(error) => error,
            },
            dead = blame::any_death(servers) => return Err(dead),
            () = tokio::time::sleep(LOOK) => {
                let is_over = still >= stall; // and was before this look already
                still += LOOK;
                if !is_over && (is_told || still < quiet) {
                    continue;
                }
                let resting = blame::at_rest(servers, Some((&child, &name)));
                if is_over {
                    return Err(stalled(&progress.counts(), plan.len(), stall, &resting));
                }
                is_told = true;
                for (name, state) in resting {
                    note(format_args!("featurestore: no progress: {name} {state}"));
                }
                continue;
            }
        };
        return Err(blame::of(error, servers, Some((&mut child, &name))).await);
    }
    drop(stdin); // so far it told the trainer that this process lives
    reap(&mut child, &name).await?;
    let counts = progress.counts();
    Ok(Run {
        totals: totals.expect("the loop ends with it"),
        choice,
        views,
        on_device,
        samples: plan.len(),
        tokens: plan.tokens(),
        capture_elapsed: counts.last_captured.saturating_duration_since(start),
        pipeline_elapsed: counts.last_verified.saturating_duration_since(start),
        produced: produced.expect("the loop ends with it"),
    })
}

fn producer(
    options: &Options,
    servers: &[Server],
    holder: ClientId,
    checksums: &[ChecksumKind],
    plan: &Plan,
    folder: &Path,
    progress: &Arc<Progress>,
) -> Result<Producer> {
    let layout = Layout::names_of(Strategy::Dspark);
    let transport = frees(options, servers)?;
    let endpoints = Arc::new(Endpoints::new(transport.clone(), layout.strategy));
    let mut urls = Vec::new();
    for server in servers {
        let url = format!("http://{}", server.http);
        match &server.control {
            Some(control) => endpoints.tell(&url, control.parse()?),
            None => endpoints.tell_store(&url),
        }
        urls.push(url);
    }
    let samples = Samples::over(transport, Retention::default()).reclaiming(endpoints.clone());
    let samples = Arc::new(samples);
    let mut capture = CaptureOptions::new(StoreId::new(plan.run_id())?, layout);
    capture.form = if options.plugin { Form::Plugin } else { Form::Patch };
    capture.timeout = REQUEST.max(options.stall_timeout);
    capture.holder = Some(holder);
    capture.checksums = checksums.to_vec();
    let client = CaptureClient::new(capture, samples.clone(), endpoints);

    let style = options.style;
    let mut settings = ProducerOptions::new(urls, plan.run_id());
    settings.lease = style.lease;
    settings.concurrency = options.concurrency;
    settings.in_flight = Some(options.concurrency);
    // While captures do not rest nothing is freed, and the last room of an arena is in pieces.
    let usable =
        |bytes: u64| if style.serial { (bytes / 4 * 3).max(plan.largest()) } else { bytes };
    settings.arenas = servers.iter().map(|server| usable(server.arena_bytes)).collect();
    settings.routing = style.routing;
    settings.batching = style.batching.unwrap_or(Batching::Shuffle);
    settings.prefetch = style.prefetch;
    settings.ingest_batch = style.ingest_batch;
    settings.ordered = false;
    settings.overlap = !style.serial;
    settings.poll = POLL;
    let quantum = options.quantum as u64;
    let high = AHEAD.max(quantum.saturating_mul(6));
    let marks = Watermarks::new(high, (high - high / 4).max(quantum), quantum);
    let progress = progress.clone();
    let producer = Producer::new(settings, client, samples, folder, marks)?;
    Ok(producer.watched(move |_| progress.captured()))
}

/// The prompts of a plan, in the order in which they are sent.
struct Planned {
    plan: Plan,
    order: std::vec::IntoIter<usize>,
    /// Whether prompts are compared with the manifest of the input: nobody can once they are on a
    /// device.
    checked: bool,
}

impl Planned {
    fn new(options: &Options, plan: &Plan, checked: bool) -> Self {
        let style = &options.style;
        let order = preset::order(plan.len(), style.ingest_batch, style.batching, options.seed);
        Self { plan: plan.clone(), order: order.into_iter(), checked }
    }

    fn task(&self, index: usize) -> Result<Task> {
        let prompt = self.plan.prompt(index, self.checked)?;
        let task = Task::new(prompt.sample_id, prompt.input_ids, prompt.loss_mask);
        Ok(task.room(self.plan.arena_bytes(index)))
    }
}

impl Prompts for Planned {
    fn next(&mut self) -> Result<Option<Task>> {
        self.order.next().map(|index| self.task(index)).transpose()
    }

    fn again(&mut self, id: &SampleId) -> Result<Option<Task>> {
        self.plan.index_of(id).map(|index| self.task(index)).transpose()
    }
}

fn failed(name: &str, why: &str) -> Error {
    Error::new(ErrorKind::PeerGone, "run pipeline", format!("{name} failed: {why}"))
}

/// Why the trainer has failed, if it has and says so soon.
async fn last_words(events: &mut Events, name: &str) -> Option<Error> {
    let end = tokio::time::Instant::now() + Duration::from_secs(1);
    while let Ok(Ok(Some(event))) = tokio::time::timeout_at(end, events.next()).await {
        if let Event::Failed { error } = event {
            return Some(failed(name, &error));
        }
    }
    None
}

async fn trainer_gone(trainer: &mut Child, name: &str) -> Error {
    match tokio::time::timeout(Duration::from_secs(5), trainer.wait()).await {
        Ok(status) => died(name, status),
        Err(_) => failed(name, "its output ended"),
    }
}

/// The error for a run that stands still: who does nothing, and what did not come.
fn stalled(counts: &Counts, samples: usize, stall: Duration, resting: &[blame::Resting]) -> Error {
    let (captured, verified, acked) = (counts.captured, counts.verified, counts.acked);
    let why = resting.iter().map(|(name, state)| format!(": {name} {state}"));
    let why = format!("no progress{}", why.collect::<String>());
    let missing = [
        (samples.saturating_sub(captured), "captured by the servers"),
        (captured.saturating_sub(verified), "verified by the trainer"),
        (verified.saturating_sub(acked), "acknowledged by the trainer"),
    ];
    let missing = missing.iter().filter(|(count, _)| *count > 0);
    let missing: Vec<_> = missing.map(|(count, what)| format!("{count} to be {what}")).collect();
    let waited_for = match missing.is_empty() {
        true => "the end of the trainer".to_owned(),
        false => format!("samples, {}", missing.join(", ")),
    };
    let is_stopped = resting.iter().any(|(_, state)| *state == STOPPED);
    Error::new(ErrorKind::Timeout, "run pipeline", why)
        .with("for", format_args!("{stall:?}"))
        .with("waited_for", waited_for)
        .with("captured", captured)
        .with("verified", verified)
        .with("acknowledged", acked)
        .remedy(match is_stopped {
            true => "let it go on with SIGCONT, and run again",
            false => "allow for more time with --stall-timeout if the servers are only slow",
        })
}

/// What frees here: captures that were never answered, and those of a run that fails. It moves no
/// tensors.
fn frees(options: &Options, servers: &[Server]) -> Result<Arc<dyn Transport>> {
    if servers.iter().all(|server| server.control.is_none()) {
        let info = TransportInfo::new("store", "frees nothing here", Capabilities::default());
        return Ok(Arc::new(Elsewhere { info }));
    }
    let builder = DirectTransport::builder().engine(Engine::Tcp);
    let builder = match &options.token {
        Some(token) => builder.token(token.clone()),
        None => builder,
    };
    Ok(Arc::new(builder.build()?))
}

/// A store that this process has not joined: whatever is in it is freed by the trainer.
#[derive(Debug)]
struct Elsewhere {
    info: TransportInfo,
}

fn elsewhere<T>(operation: &'static str) -> Result<T> {
    Err(Error::new(ErrorKind::Unsupported, operation, "this process has not joined the store"))
}

#[async_trait]
impl Transport for Elsewhere {
    fn info(&self) -> &TransportInfo {
        &self.info
    }

    async fn publish(&self, _: Vec<Publication>, _: PublishOptions) -> Result<Vec<Descriptor>> {
        elsewhere("publish")
    }

    async fn fetch(&self, _: Vec<FetchRequest>, _: FetchOptions) -> Result<Vec<Fetched>> {
        elsewhere("fetch")
    }

    /// Only captures that were never answered come here. Their objects go with the memory of this
    /// run's servers, but for what the store has put into that of others.
    async fn release(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
        let samples: Vec<_> = releases.iter().map(|r| r.descriptor.sample.to_string()).collect();
        elsewhere("release").map_err(|error: Error| {
            error.with("never_answered", samples.join(", ")).remedy(
                "where the store outlives this run, remove the objects of these samples: their \
                 keys begin with these names",
            )
        })
    }

    async fn health(&self) -> Result<Health> {
        Ok(Health::default())
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use transport_core::{Generation, SampleKey};

    use super::*;

    /// What nobody here can free is said by its name, and is not forgotten.
    #[tokio::test]
    async fn captures_into_a_store_that_were_never_answered_are_told_by_name() {
        let info = TransportInfo::new("store", "frees nothing here", Capabilities::default());
        let transport: Arc<dyn Transport> = Arc::new(Elsewhere { info });
        let endpoints = Arc::new(Endpoints::new(transport.clone(), Strategy::Dspark));
        endpoints.tell_store("http://server:1/");
        let samples = Samples::over(transport, Retention::default()).reclaiming(endpoints);
        let id = SampleId::new("pipeline-42:task-7").unwrap();
        let key = SampleKey::new(StoreId::new("pipeline-42").unwrap(), id, Generation(1));
        samples.track("http://server:1", [&key]);
        let error = samples.reclaim().await.unwrap_err();
        assert_eq!(error.context("never_answered"), Some("pipeline-42/pipeline-42:task-7/g1"));
        assert!(error.to_string().contains("remove the objects of these samples"), "{error}");
        assert_eq!(samples.health().provisional, 1);
    }
}
