//! Drives prompts through the servers and hands the results to the trainer.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use control_proto::capture::{
    CHECKSUMS_HEADER, CHECKSUMS_XXH3, CaptureOutcome, CaptureRequest, Form, HOLDER_HEADER, Limits,
    Passthrough, Prompt as CapturePrompt, SampleRequest, parse_response, write_result,
};
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
    Options,
    children::{Events, Server, Trainer, reap},
    messages::{Event, Job, Totals},
    plan::{Plan, roomiest},
    progress::Progress,
};
use crate::{choose::Choice, workload::Prompt};

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

struct Captured {
    index: usize,
    result: Vec<u8>,
    checksums: Option<BTreeMap<String, String>>,
    retries: u64,
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
        let totals = loop {
            flow.issue(&mut requests)?;
            if flow.captured == flow.plan.len() {
                jobs = None; // the trainer acknowledges the rest and ends
            }
            let deaths = futures_select(servers);
            tokio::select! {
                Some(done) = requests.join_next() => {
                    let captured: Captured = done.map_err(|e| {
                        Error::new(ErrorKind::Unexpected, "capture", "a request panicked").source(e)
                    })??;
                    capture_elapsed = start.elapsed();
                    let job = flow.captured(captured)?;
                    if jobs.as_ref().is_none_or(|jobs| jobs.send(job).is_err()) {
                        return Err(trainer_gone(&mut trainer, &name).await);
                    }
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
        while self.next < self.plan.len()
            && self.in_flight < self.concurrency
            && self.next - self.verified < AHEAD
        {
            let bytes = self.plan.arena_bytes(self.next);
            let free: Vec<u64> =
                self.capacity.iter().zip(&self.outstanding).map(|(c, o)| c - o).collect();
            let roomiest = roomiest(&free);
            if free[roomiest] < bytes {
                let idle = self.in_flight == 0 && self.verified == self.captured;
                let room_comes = self.verified - self.acked >= self.quantum;
                return if idle && !room_comes { Err(self.cannot_fit(bytes)) } else { Ok(()) };
            }
            self.outstanding[roomiest] += bytes;
            self.place[self.next] = Some(roomiest);
            let address = self.addresses[roomiest].clone();
            let (plan, request, index) = (self.plan.clone(), self.request.clone(), self.next);
            requests
                .spawn(async move { request.capture(&plan.prompt(index)?, index, &address).await });
            self.next += 1;
            self.in_flight += 1;
        }
        Ok(())
    }

    fn captured(&mut self, captured: Captured) -> Result<Job> {
        self.in_flight -= 1;
        self.captured += 1;
        self.retries += captured.retries;
        self.progress.captured();
        let text = String::from_utf8(captured.result).expect("JSON is UTF-8");
        let result = serde_json::value::RawValue::from_string(text).map_err(|e| {
            Error::new(ErrorKind::Unexpected, "hand on capture", "not JSON").source(e)
        })?;
        let sha256 = self.plan.sha256(captured.index)?;
        Ok(Job { index: captured.index, result, checksums: captured.checksums, sha256 })
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
    /// Captures one prompt, with another attempt where the server says that it may help.
    async fn capture(&self, prompt: &Prompt, index: usize, address: &str) -> Result<Captured> {
        let mut retries = 0;
        loop {
            let replace = retries > 0; // a lost answer may have left objects behind
            match self.attempt(prompt, address, replace).await {
                Ok((result, checksums)) => {
                    return Ok(Captured { index, result, checksums, retries });
                }
                Err(error) if error.is_temporary() && retries + 1 < u64::from(ATTEMPTS) => {
                    tracing::info!(%error, "another attempt");
                    retries += 1;
                    tokio::time::sleep(PUT_OFF * (1 << retries.min(4))).await;
                }
                Err(error) => return Err(error.with("attempts", retries + 1)),
            }
        }
    }

    async fn attempt(
        &self,
        prompt: &Prompt,
        address: &str,
        replace: bool,
    ) -> Result<(Vec<u8>, Option<BTreeMap<String, String>>)> {
        let key = SampleKey::new(self.store_id.clone(), prompt.sample_id.clone(), Generation(1));
        let mut sample = SampleRequest::new(key.clone());
        sample.replace = replace;
        sample.aux = Some(FeatureName::new("hidden_states")?);
        sample.last_hidden = Some(FeatureName::new("target_last_hidden_states")?);
        for (name, data) in [("input_ids", &prompt.input_ids), ("loss_mask", &prompt.loss_mask)] {
            let meta = TensorMeta::new(Dtype::Int64, [1, data.len() as u64])?;
            sample.passthrough.push(Passthrough::new(FeatureName::new(name)?, meta, data.clone())?);
        }
        let tokens = prompt.input_ids.len() as u64;
        let asked = sample.clone();
        let extra_key = Some(ClientId::random().to_string());
        let prompt = CapturePrompt { input_ids: prompt.input_ids.clone(), extra_key, sample };
        let mut body = Vec::new();
        CaptureRequest::new(self.form, vec![prompt]).write(&mut body)?;

        let failed = |e: reqwest::Error| {
            Error::new(ErrorKind::PeerGone, "capture", "the server did not answer")
                .with("server", address)
                .with("sample_id", &key.sample_id)
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
        let row = parse_response(&body, std::slice::from_ref(&key), &Limits::default())?
            .pop()
            .expect("one a sample");
        if let CaptureOutcome::Failed { error, retryable, .. } = &row.outcome {
            let kind =
                if *retryable { ErrorKind::CapacityExceeded } else { ErrorKind::InvalidInput };
            return Err(Error::new(kind, "capture", error.clone()).with("server", address));
        }
        if let CaptureOutcome::Captured(descriptor) = &row.outcome {
            asked.check_result(descriptor, tokens)?;
        }
        let mut result = Vec::new();
        write_result(&mut result, &row.outcome)?;
        let sums = row.checksums.map(|sums| {
            sums.into_iter().map(|(name, sum)| (name.to_string(), sum.to_string())).collect()
        });
        Ok((result, sums))
    }
}
