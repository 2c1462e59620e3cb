//! Drives prompts through the servers and hands the results to the trainer.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use control_proto::capture::{
    CHECKSUMS_HEADER, CHECKSUMS_XXH3, CaptureOutcome, CaptureRequest, Form, HOLDER_HEADER, Limits,
    Passthrough, Prompt as CapturePrompt, SampleRequest, parse_response, write_result,
};
use parking_lot::{Condvar, Mutex};
use tokio::{
    io::AsyncWriteExt,
    process::{Child, ChildStdin},
    sync::mpsc,
    task::JoinSet,
};
use transport_core::{
    ClientId, Dtype, Error, ErrorKind, FeatureName, Generation, Result, SampleKey, StoreId,
    TensorMeta,
};

use super::{
    Options, Style,
    children::{Events, Server, Trainer, reap},
    messages::{Event, Job, Totals},
    plan::{Plan, roomiest},
    preset,
    progress::Progress,
};
use crate::{choose::Choice, producer::Routing, workload::Prompt};

/// Samples sent ahead of the trainer, so that results never pile up in this process.
const AHEAD: usize = 4096;
/// Attempts for one prompt.
const ATTEMPTS: u32 = 5;
/// Pause before a prompt that was put off is sent again.
const PUT_OFF: Duration = Duration::from_millis(200);
/// Longest time of one capture request, waiting for room included.
const REQUEST: Duration = Duration::from_secs(300);
/// Without any progress for this long, the run is given up.
const STALL: Duration = Duration::from_secs(120);

/// What a run came to, besides the servers' own numbers.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) totals: Totals,
    pub(super) choice: Choice,
    pub(super) views: bool,
    pub(super) samples: usize,
    pub(super) tokens: u64,
    pub(super) capture_elapsed: Duration,
    pub(super) pipeline_elapsed: Duration,
    pub(super) retries: u64,
}

pub(super) struct Producer<'a> {
    servers: &'a mut [Server],
    name: String, // of the trainer
    trainer: Child,
    stdin: ChildStdin,
    events: Events,
    flow: Flow<'a>,
}

/// Everything but the processes themselves, so that both can be borrowed at once.
struct Flow<'a> {
    request: Arc<RequestOptions>,
    plan: Plan,
    progress: &'a Progress,
    choice: Choice,
    views: bool,
    concurrency: usize,
    quantum: usize,
    addresses: Vec<String>,
    style: Style,
    order: Vec<usize>,   // of sending
    ahead: Arc<Ahead>,   // prompts that are prepared already
    tokens: Vec<u64>,    // under way at each server
    calls: Vec<usize>,   // under way at each server
    turn: usize,         // whose turn it is, with shared routing
    held: Vec<Job>,      // captured and not handed on, while captures do not rest
    materializing: bool, // with serial materialization: captures rest
    capacity: Vec<u64>,
    outstanding: Vec<u64>,     // bytes of each server that are not acknowledged
    place: Vec<Option<usize>>, // server of each sample
    next: usize,
    in_flight: usize,
    captured: usize,
    verified: usize,
    acked: usize,
    retries: u64,
}

struct RequestOptions {
    client: reqwest::Client,
    holder: ClientId,
    form: Form,
    checksums: bool,
    store_id: StoreId,
}

/// What came of one request.
struct Captured {
    server: usize,
    tokens: u64,
    samples: Vec<CapturedSample>,
    retries: u64,
}

struct CapturedSample {
    index: usize,
    result: Vec<u8>,
    checksums: Option<BTreeMap<String, String>>,
}

/// Prompts that a thread prepares before they are needed.
#[derive(Default)]
struct Ahead {
    prompts: Mutex<HashMap<usize, Prompt>>,
    room: Condvar,
    ended: AtomicBool,
}

impl Ahead {
    /// Prepares up to `most` prompts ahead, in `order`, until `self` is ended.
    fn start(self: &Arc<Self>, plan: Plan, order: Vec<usize>, most: usize) {
        if most == 0 {
            return;
        }
        let ahead = self.clone();
        std::thread::spawn(move || {
            for index in order {
                // What cannot be made is made again where its error is reported.
                let Ok(prompt) = plan.prompt(index) else { return };
                let mut prompts = ahead.prompts.lock();
                while prompts.len() >= most && !ahead.ended.load(Ordering::Relaxed) {
                    ahead.room.wait(&mut prompts);
                }
                if ahead.ended.load(Ordering::Relaxed) {
                    return;
                }
                prompts.insert(index, prompt);
            }
        });
    }

    fn take(&self, index: usize) -> Option<Prompt> {
        let prompt = self.prompts.lock().remove(&index);
        self.room.notify_one();
        prompt
    }

    fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
        self.room.notify_all();
    }
}

impl<'a> Producer<'a> {
    pub(super) fn new(
        options: &Options,
        servers: &'a mut [Server],
        trainer: Trainer,
        plan: Plan,
        progress: &'a Progress,
    ) -> Self {
        let Trainer { name, client, choice, views, child, stdin, events } = trainer;
        let request = RequestOptions {
            client: reqwest::Client::new(),
            holder: client,
            form: if options.plugin { Form::Plugin } else { Form::Patch },
            checksums: options.verify,
            store_id: StoreId::new(format!("pipeline-{}", options.seed)).expect("a plain name"),
        };
        let flow = Flow {
            request: Arc::new(request),
            progress,
            choice,
            views,
            concurrency: options.concurrency,
            quantum: options.quantum,
            style: options.style,
            order: preset::order(
                plan.len(),
                options.style.ingest_batch,
                options.style.batching,
                options.seed,
                |index| plan.arena_bytes(index),
            ),
            ahead: Arc::default(),
            tokens: vec![0; servers.len()],
            calls: vec![0; servers.len()],
            turn: 0,
            held: Vec::new(),
            materializing: false,
            addresses: servers.iter().map(|s| s.http.clone()).collect(),
            capacity: servers.iter().map(|s| s.arena_bytes).collect(),
            outstanding: vec![0; servers.len()],
            place: vec![None; plan.len()],
            plan,
            next: 0,
            in_flight: 0,
            captured: 0,
            verified: 0,
            acked: 0,
            retries: 0,
        };
        Self { servers, name, trainer: child, stdin, events, flow }
    }

    pub(super) async fn run(self) -> Result<Run> {
        let Self { servers, name, mut trainer, stdin, mut events, mut flow } = self;
        let (jobs, queue) = mpsc::unbounded_channel(); // never more than `AHEAD`
        let mut jobs = Some(jobs);
        let writer = tokio::spawn(write_jobs(stdin, queue));
        let mut requests = JoinSet::new();
        let (start, mut last_news) = (Instant::now(), Instant::now());
        let (mut capture_elapsed, mut pipeline_elapsed) = (Duration::ZERO, Duration::ZERO);
        let ahead = flow.style.prefetch * flow.style.ingest_batch;
        flow.ahead.start(flow.plan.clone(), flow.order.clone(), ahead);
        let ended = End(flow.ahead.clone()); // also when this fails
        let totals = loop {
            flow.issue(&mut requests)?;
            for job in flow.ready() {
                if jobs.as_ref().is_none_or(|jobs| jobs.send(job).is_err()) {
                    return Err(trainer_gone(&mut trainer, &name).await);
                }
            }
            if flow.captured == flow.plan.len() && flow.held.is_empty() {
                jobs = None; // the trainer acknowledges the rest and ends
            }
            let deaths = futures_select(servers);
            tokio::select! {
                Some(done) = requests.join_next() => {
                    let captured: Captured = done.map_err(|e| {
                        Error::new(ErrorKind::Unexpected, "capture", "a request panicked").source(e)
                    })??;
                    capture_elapsed = start.elapsed();
                    flow.captured(captured)?;
                }
                event = events.next() => match event? {
                    Some(Event::Verified { index }) => {
                        flow.verified(index);
                        pipeline_elapsed = start.elapsed();
                    }
                    Some(Event::Acked { indices }) => flow.acked(&indices),
                    Some(Event::Done(totals)) => break *totals,
                    Some(Event::Failed { error }) => {
                        return Err(Error::new(ErrorKind::PeerGone, "run pipeline",
                            format!("{name} failed: {error}")));
                    }
                    Some(Event::Ready { .. }) => {}
                    None => return Err(trainer_gone(&mut trainer, &name).await),
                },
                dead = deaths => return Err(dead),
                () = tokio::time::sleep_until((last_news + STALL).into()) => {
                    return Err(flow.stalled());
                }
            }
            last_news = Instant::now();
        };
        drop(ended);
        reap(&mut trainer, &name).await?;
        writer.await.map_err(|e| {
            Error::new(ErrorKind::Unexpected, "run pipeline", "the job writer panicked").source(e)
        })?;
        let tokens = flow.plan.tokens();
        Ok(Run {
            totals,
            choice: flow.choice,
            views: flow.views,
            samples: flow.plan.len(),
            tokens,
            capture_elapsed,
            pipeline_elapsed,
            retries: flow.retries,
        })
    }
}

/// Completes when any of the servers dies.
async fn futures_select(servers: &mut [Server]) -> Error {
    let mut deaths: Vec<_> = servers.iter_mut().map(|s| Box::pin(s.died())).collect();
    std::future::poll_fn(|context| {
        for death in &mut deaths {
            if let std::task::Poll::Ready(error) = death.as_mut().poll(context) {
                return std::task::Poll::Ready(error);
            }
        }
        std::task::Poll::Pending
    })
    .await
}

async fn trainer_gone(trainer: &mut Child, name: &str) -> Error {
    let status = tokio::time::timeout(Duration::from_secs(5), trainer.wait()).await;
    let status = status.ok().and_then(Result::ok).map_or("unknown".into(), |s| s.to_string());
    Error::new(ErrorKind::PeerGone, "run pipeline", format!("{name} died: {status}"))
}

async fn write_jobs(mut stdin: ChildStdin, mut queue: mpsc::UnboundedReceiver<Job>) {
    while let Some(job) = queue.recv().await {
        let mut line = serde_json::to_vec(&job).expect("plain data");
        line.push(b'\n');
        if stdin.write_all(&line).await.is_err() {
            return; // the trainer's end is reported where its events are read
        }
    }
}

impl Flow<'_> {
    /// Sends as many prompts as concurrency and the arenas' room allow, in order.
    fn issue(&mut self, requests: &mut JoinSet<Result<Captured>>) -> Result<()> {
        if self.materializing {
            self.materializing = self.verified < self.captured;
        }
        while !self.materializing
            && self.next < self.plan.len()
            && self.in_flight < self.concurrency
            && self.next - self.verified < AHEAD
        {
            let bytes = self.plan.arena_bytes(self.order[self.next]);
            let free: Vec<u64> =
                self.capacity.iter().zip(&self.outstanding).map(|(c, o)| c - o).collect();
            let server = self.pick(&free, bytes);
            if free[server] < bytes {
                let idle = self.in_flight == 0 && self.verified == self.captured;
                let room_comes = self.verified - self.acked >= self.quantum;
                if idle && !room_comes {
                    return Err(self.cannot_fit(bytes));
                }
                break;
            }
            let (mut indices, mut room, mut tokens) = (Vec::new(), free[server], 0);
            while let Some(&index) = self.order.get(self.next) {
                let bytes = self.plan.arena_bytes(index);
                if indices.len() == self.style.lease || bytes > room {
                    break;
                }
                room -= bytes;
                tokens += self.plan.sample_tokens(index);
                self.outstanding[server] += bytes;
                self.place[index] = Some(server);
                indices.push(index);
                self.next += 1;
            }
            self.tokens[server] += tokens;
            self.calls[server] += 1;
            let address = self.addresses[server].clone();
            let (plan, request, ahead) =
                (self.plan.clone(), self.request.clone(), self.ahead.clone());
            requests.spawn(async move {
                let prompt = |index| {
                    let ready = ahead.take(index);
                    Ok((index, ready.map_or_else(|| plan.prompt(index), Ok)?))
                };
                let prompts = indices.into_iter().map(prompt).collect::<Result<_>>()?;
                let (samples, retries) = request.capture(prompts, &address).await?;
                Ok(Captured { server, tokens, samples, retries })
            });
            self.in_flight += 1;
        }
        // Serial: the trainer reads once nothing is being captured any more.
        if self.style.serial && self.in_flight == 0 && self.verified < self.captured {
            self.materializing = true;
        }
        Ok(())
    }

    /// The server of the next request. It may lack the room, if none has it.
    fn pick(&mut self, free: &[u64], bytes: u64) -> usize {
        let count = free.len();
        let fitting = (0..count).map(|i| (self.turn + i) % count).filter(|&s| free[s] >= bytes);
        let picked = match self.style.routing {
            None => None,
            Some(Routing::Shared) => fitting.min_by_key(|&server| self.calls[server]),
            Some(Routing::LeastTokens) => fitting.min_by_key(|&server| self.tokens[server]),
        };
        let picked = picked.unwrap_or_else(|| roomiest(free));
        self.turn = (picked + 1) % count;
        picked
    }

    fn captured(&mut self, captured: Captured) -> Result<()> {
        self.in_flight -= 1;
        self.calls[captured.server] -= 1;
        self.tokens[captured.server] -= captured.tokens;
        self.retries += captured.retries;
        for sample in captured.samples {
            self.captured += 1;
            self.progress.captured();
            let text = String::from_utf8(sample.result).expect("JSON is UTF-8");
            let result = serde_json::value::RawValue::from_string(text).map_err(|e| {
                Error::new(ErrorKind::Unexpected, "hand on capture", "not JSON").source(e)
            })?;
            let (index, checksums) = (sample.index, sample.checksums);
            let sha256 = self.plan.sha256(index)?;
            self.held.push(Job { index, result, checksums, sha256 });
        }
        Ok(())
    }

    /// Jobs to hand on now.
    fn ready(&mut self) -> Vec<Job> {
        if self.style.serial && !self.materializing {
            return Vec::new();
        }
        std::mem::take(&mut self.held)
    }

    fn verified(&mut self, index: usize) {
        self.verified += 1;
        self.progress.verified(self.plan.arena_bytes(index));
    }

    fn acked(&mut self, indices: &[usize]) {
        for &index in indices {
            if let Some(server) = self.place.get_mut(index).and_then(Option::take) {
                self.outstanding[server] -= self.plan.arena_bytes(index);
                self.acked += 1;
            }
        }
        self.progress.acked(indices.len());
    }

    fn cannot_fit(&self, bytes: u64) -> Error {
        Error::new(
            ErrorKind::ConfigInvalid,
            "run pipeline",
            "the next sample does not fit beside the unfinished quantum",
        )
        .with("sample_bytes", bytes)
        .with("unacknowledged_samples", self.verified - self.acked)
        .with("unacknowledged_bytes", self.outstanding.iter().sum::<u64>())
        .with("arenas_bytes", self.capacity.iter().sum::<u64>())
        .remedy("give a larger --arena, more --servers, or a smaller --quantum")
    }

    fn stalled(&self) -> Error {
        Error::new(ErrorKind::Timeout, "run pipeline", "no progress")
            .with("for", format_args!("{STALL:?}"))
            .with("captured", self.captured)
            .with("verified", self.verified)
            .with("acknowledged", self.acked)
            .with("in_flight", self.in_flight)
    }
}

impl RequestOptions {
    /// Captures prompts in one request, with another attempt for those where the server says that
    /// it may help.
    async fn capture(
        &self,
        prompts: Vec<(usize, Prompt)>,
        address: &str,
    ) -> Result<(Vec<CapturedSample>, u64)> {
        let (mut captured, mut left, mut attempts) = (Vec::new(), prompts, 0);
        loop {
            let replace = attempts > 0; // a lost answer may have left objects behind
            let error = match self.attempt(&left, address, replace).await {
                Ok((samples, failed)) => {
                    captured.extend(samples);
                    let Some((_, error)) = failed.first() else {
                        return Ok((captured, attempts));
                    };
                    let error = Error::new(error.kind(), "capture", error.to_string());
                    let failed: Vec<usize> = failed.into_iter().map(|(index, _)| index).collect();
                    left.retain(|(index, _)| failed.contains(index));
                    error
                }
                Err(error) => error,
            };
            attempts += 1;
            if !error.is_temporary() || attempts >= u64::from(ATTEMPTS) {
                return Err(error.with("attempts", attempts));
            }
            tracing::info!(%error, "another attempt");
            tokio::time::sleep(PUT_OFF * (1 << attempts.min(4))).await;
        }
    }

    fn prompt(&self, prompt: &Prompt, replace: bool) -> Result<CapturePrompt> {
        let key = SampleKey::new(self.store_id.clone(), prompt.sample_id.clone(), Generation(1));
        let mut sample = SampleRequest::new(key);
        sample.replace = replace;
        sample.aux = Some(FeatureName::new("hidden_states")?);
        sample.last_hidden = Some(FeatureName::new("target_last_hidden_states")?);
        for (name, data) in [("input_ids", &prompt.input_ids), ("loss_mask", &prompt.loss_mask)] {
            let meta = TensorMeta::new(Dtype::Int64, [1, data.len() as u64])?;
            sample.passthrough.push(Passthrough::new(FeatureName::new(name)?, meta, data.clone())?);
        }
        let extra_key = Some(ClientId::random().to_string());
        Ok(CapturePrompt { input_ids: prompt.input_ids.clone(), extra_key, sample })
    }

    /// One request: what it captured, and what the server says has failed.
    async fn attempt(
        &self,
        prompts: &[(usize, Prompt)],
        address: &str,
        replace: bool,
    ) -> Result<(Vec<CapturedSample>, Vec<(usize, Error)>)> {
        let asked: Vec<CapturePrompt> = prompts
            .iter()
            .map(|(_, prompt)| self.prompt(prompt, replace))
            .collect::<Result<_>>()?;
        let keys: Vec<SampleKey> = asked.iter().map(|p| p.sample.sample.clone()).collect();
        let mut body = Vec::new();
        CaptureRequest::new(self.form, asked.clone()).write(&mut body)?;

        let failed = |e: reqwest::Error| {
            Error::new(ErrorKind::PeerGone, "capture", "the server did not answer")
                .with("server", address)
                .with("sample_id", &keys[0].sample_id)
                .source(e)
        };
        let mut request = self
            .client
            .post(format!("http://{address}/generate"))
            .timeout(REQUEST)
            .header("content-type", "application/json")
            .header(HOLDER_HEADER, self.holder.as_str());
        if self.checksums {
            request = request.header(CHECKSUMS_HEADER, CHECKSUMS_XXH3);
        }
        let answer = request.body(body).send().await.map_err(failed)?;
        let status = answer.status();
        let body = answer.bytes().await.map_err(failed)?;
        if !status.is_success() {
            let kind = match status.as_u16() {
                503 => ErrorKind::Busy,
                _ => ErrorKind::InvalidInput,
            };
            let text = String::from_utf8_lossy(&body[..body.len().min(500)]).into_owned();
            return Err(Error::new(kind, "capture", text)
                .with("server", address)
                .with("status", status));
        }
        let (mut captured, mut rejected) = (Vec::new(), Vec::new());
        let rows = parse_response(&body, &keys, &Limits::default())?;
        for ((&(index, _), asked), row) in prompts.iter().zip(&asked).zip(rows) {
            match &row.outcome {
                CaptureOutcome::Failed { error, retryable, .. } => {
                    let kind = if *retryable {
                        ErrorKind::CapacityExceeded
                    } else {
                        ErrorKind::InvalidInput
                    };
                    let error = Error::new(kind, "capture", error.clone());
                    rejected.push((index, error.with("server", address)));
                }
                CaptureOutcome::Captured(descriptor) => {
                    asked.sample.check_result(descriptor, asked.input_ids.len() as u64)?;
                    let mut result = Vec::new();
                    write_result(&mut result, &row.outcome)?;
                    let checksums = row.checksums.map(|sums| {
                        let text = |(name, sum): (FeatureName, _)| {
                            (name.to_string(), control_proto::capture::Checksum::to_string(&sum))
                        };
                        sums.into_iter().map(text).collect()
                    });
                    captured.push(CapturedSample { index, result, checksums });
                }
            }
        }
        Ok((captured, rejected))
    }
}

/// Ends the preparing of prompts.
struct End(Arc<Ahead>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.end();
    }
}
