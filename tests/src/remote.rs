//! A [`Transport`] whose publisher is another process: what the conformance suite runs on across
//! processes.
//!
//! Lines of JSON both ways; the bytes of the tensors follow their `publish` line.

use std::{
    collections::HashMap,
    fmt,
    io::BufRead,
    process::Stdio,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use control_proto::capture::{CaptureOutcome, Limits, parse_result};
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, ChildStdin, Command},
    sync::{mpsc, oneshot},
};
use transport_core::{
    Capabilities, ClientId, Descriptor, Error, ErrorKind, FeatureName, FetchOptions, FetchRequest,
    Fetched, Generation, Health, Publication, PublishOptions, Ready, RegionSlice, Release,
    ReleaseReport, Result, SampleKey, Tensor, TensorMeta, Transport, TransportInfo,
};

/// What a publisher is asked to do.
#[derive(Debug)]
pub enum Ask {
    /// Publish a batch.
    Publish {
        /// The samples.
        batch: Vec<Publication>,
        /// How.
        options: PublishOptions,
    },
    /// Measure.
    Health,
    /// Close.
    Close,
    /// Give up another question, whose asker has gone away, and undo what it has published.
    Drop {
        /// Number of that question.
        id: u64,
    },
}

#[derive(Serialize, Deserialize)]
struct Line {
    id: u64,
    op: String,
    #[serde(default)]
    replace: bool,
    #[serde(default)]
    deadline_ms: u64,
    #[serde(default)]
    samples: Vec<LineSample>,
}

#[derive(Serialize, Deserialize)]
struct LineSample {
    store_id: String,
    sample_id: String,
    generation: u64,
    holder: Option<String>,
    aux_layer_ids: Option<Vec<i64>>,
    tensors: Vec<(String, String, Vec<u64>)>,
}

/// What a publisher answers.
#[derive(Debug, Serialize, Deserialize)]
pub struct Answer {
    /// Number of the question.
    pub id: u64,
    /// The answer.
    pub ok: Option<Value>,
    /// Why there is none.
    pub failure: Option<Failure>,
}

/// An error on its way between processes.
#[derive(Debug, Serialize, Deserialize)]
pub struct Failure {
    kind: String,
    message: String,
    temporary: bool,
    context: Vec<(String, String)>,
}

/// Names of context that are carried over.
const CONTEXT: [&str; 6] =
    ["key", "expected", "found", "requested_bytes", "free_bytes", "largest_range"];

/// Kinds that are carried over.
const KINDS: [ErrorKind; 16] = [
    ErrorKind::AlreadyExists,
    ErrorKind::Busy,
    ErrorKind::CapacityExceeded,
    ErrorKind::Closed,
    ErrorKind::ConfigInvalid,
    ErrorKind::Corrupt,
    ErrorKind::InvalidInput,
    ErrorKind::NotFound,
    ErrorKind::OutOfRange,
    ErrorKind::PeerGone,
    ErrorKind::PermissionDenied,
    ErrorKind::Protocol,
    ErrorKind::ShortRead,
    ErrorKind::Stale,
    ErrorKind::Timeout,
    ErrorKind::Unsupported,
];

impl From<&Error> for Failure {
    fn from(error: &Error) -> Self {
        let carried = |name: &&str| Some(((*name).to_owned(), error.context(name)?.to_owned()));
        Self {
            kind: error.kind().to_string(),
            message: error.message().to_owned(),
            temporary: error.is_temporary(),
            context: CONTEXT.iter().filter_map(carried).collect(),
        }
    }
}

impl Failure {
    fn into_error(self, operation: &'static str) -> Error {
        let kind = KINDS.into_iter().find(|k| k.to_string() == self.kind);
        let mut error = Error::new(kind.unwrap_or(ErrorKind::Unexpected), operation, self.message);
        for (name, value) in self.context {
            if let Some(name) = CONTEXT.into_iter().find(|n| *n == name) {
                error = error.with(name, value);
            }
        }
        error
    }
}

/// Reads one question; none at the end of the input.
pub fn read_ask(input: &mut impl BufRead) -> Result<Option<(u64, Ask)>> {
    let io = |e| Error::io("read question", e);
    let mut text = String::new();
    if input.read_line(&mut text).map_err(io)? == 0 {
        return Ok(None);
    }
    let line: Line = serde_json::from_str(&text)
        .map_err(|e| Error::new(ErrorKind::Protocol, "read question", "not JSON").source(e))?;
    let ask = match line.op.as_str() {
        "health" => Ask::Health,
        "close" => Ask::Close,
        "drop" => Ask::Drop { id: line.deadline_ms },
        _ => {
            let mut batch = Vec::new();
            for sample in line.samples {
                let key = SampleKey::new(
                    sample.store_id.parse()?,
                    sample.sample_id.parse()?,
                    Generation(sample.generation),
                );
                let mut tensors = IndexMap::new();
                for (name, dtype, shape) in sample.tensors {
                    let meta = TensorMeta::new(dtype.parse()?, shape)?;
                    let mut bytes = vec![0; meta.nbytes() as usize];
                    input.read_exact(&mut bytes).map_err(io)?;
                    let tensor = Tensor::new(meta, RegionSlice::copy_of(&bytes))?;
                    tensors.insert(FeatureName::new(name)?, tensor);
                }
                let mut publication = Publication::new(key, tensors, Ready::Now);
                publication.aux_layer_ids = sample.aux_layer_ids;
                publication.holder = sample.holder.map(ClientId::new).transpose()?;
                batch.push(publication);
            }
            let options = PublishOptions::default()
                .replace(line.replace)
                .deadline(Duration::from_millis(line.deadline_ms));
            Ask::Publish { batch, options }
        }
    };
    Ok(Some((line.id, ask)))
}

/// Gives up a question when its asker goes away.
struct Asking<'a> {
    publisher: &'a RemotePublisher,
    id: u64,
    answered: bool,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.publisher.pending.lock().expect("no panic").remove(&self.id);
        if !self.answered {
            let mut question = line("drop");
            (question.id, question.deadline_ms) = (u64::MAX, self.id);
            let text = serde_json::to_string(&question).expect("plain data") + "\n";
            let _ = self.publisher.questions.send(text.into_bytes()); // it may be dead
        }
    }
}

type Pending = Arc<Mutex<HashMap<u64, oneshot::Sender<Answer>>>>;

/// A publisher in a process of its own, which ends with this.
pub struct RemotePublisher {
    info: TransportInfo,
    /// What is written to the process, in this order: who gives a question up does so after it.
    questions: mpsc::UnboundedSender<Vec<u8>>,
    pending: Pending,
    next: AtomicU64,
    child: Mutex<Child>,
}

impl RemotePublisher {
    /// Starts `program` with an arena of `arena_bytes`, and waits until it is ready.
    pub async fn start(program: &str, arena_bytes: u64) -> Result<Self> {
        let io = |e| Error::io("start publisher", e);
        let mut child = Command::new(program)
            .arg(arena_bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(io)?;
        let stdin = child.stdin.take().expect("piped");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        lines.next_line().await.map_err(io)?; // it is ready
        let pending = Pending::default();
        let waiting = pending.clone();
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                let answer: Answer = serde_json::from_str(&line).expect("an answer");
                if let Some(waiter) = waiting.lock().expect("no panic").remove(&answer.id) {
                    let _ = waiter.send(answer); // the caller may have gone away
                }
            }
            waiting.lock().expect("no panic").clear(); // nobody will answer any more
        });
        let (questions, asked) = mpsc::unbounded_channel();
        tokio::spawn(write(asked, stdin, pending.clone()));
        let mut capabilities = Capabilities::default();
        capabilities.publish = true;
        capabilities.staleness_checked = true;
        capabilities.leases = true;
        Ok(Self {
            info: TransportInfo::new("direct", "another process", capabilities),
            questions,
            pending,
            next: AtomicU64::new(1),
            child: Mutex::new(child),
        })
    }

    /// Kills the process as a crash does, and waits until it is gone.
    pub async fn kill(&self) -> Result<()> {
        self.child.lock().expect("no panic").start_kill().map_err(|e| Error::io("kill", e))?;
        for _ in 0..1000 {
            if matches!(self.child.lock().expect("no panic").try_wait(), Ok(Some(_))) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Err(Error::new(ErrorKind::Timeout, "kill", "the process does not end"))
    }

    async fn ask(&self, operation: &'static str, mut line: Line, bytes: &[u8]) -> Result<Value> {
        let gone = || Error::new(ErrorKind::PeerGone, operation, "the publisher's process ended");
        line.id = self.next.fetch_add(1, Ordering::Relaxed);
        let (send, receive) = oneshot::channel();
        self.pending.lock().expect("no panic").insert(line.id, send);
        let mut asking = Asking { publisher: self, id: line.id, answered: false };
        let mut text = (serde_json::to_string(&line).expect("plain data") + "\n").into_bytes();
        text.extend_from_slice(bytes);
        self.questions.send(text).map_err(|_| gone())?;
        let answer = receive.await.map_err(|_| gone())?;
        asking.answered = true;
        match answer.failure {
            Some(failure) => Err(failure.into_error(operation)),
            None => Ok(answer.ok.unwrap_or_default()),
        }
    }
}

/// Writes whole questions: half of one, left by an asker that went away, would spoil the next.
async fn write(
    mut questions: mpsc::UnboundedReceiver<Vec<u8>>,
    mut stdin: ChildStdin,
    pending: Pending,
) {
    while let Some(question) = questions.recv().await {
        if stdin.write_all(&question).await.is_err() || stdin.flush().await.is_err() {
            break;
        }
    }
    questions.close(); // in this order: who asks from now on is told at once
    pending.lock().expect("no panic").clear();
}

fn line(op: &str) -> Line {
    Line { id: 0, op: op.into(), replace: false, deadline_ms: 0, samples: Vec::new() }
}

fn unsupported<T>(operation: &'static str) -> Result<T> {
    Err(Error::new(ErrorKind::Unsupported, operation, "this side only publishes"))
}

#[async_trait]
impl Transport for RemotePublisher {
    fn info(&self) -> &TransportInfo {
        &self.info
    }

    async fn publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        let mut question = line("publish");
        question.replace = options.replace;
        question.deadline_ms = options.deadline.as_millis() as u64;
        let mut bytes = Vec::new();
        for publication in &batch {
            if let Ready::After(event) = &publication.ready {
                let (event, timeout) = (event.clone(), options.deadline);
                tokio::task::spawn_blocking(move || event.wait(timeout))
                    .await
                    .expect("the event does not panic")?;
            }
            let publication = &publication.clone().materialized()?;
            let mut tensors = Vec::new();
            for (name, tensor) in &publication.tensors {
                if !tensor.data.kind().is_host() {
                    let why = "device memory does not go through a pipe";
                    return Err(Error::new(ErrorKind::Unsupported, "publish", why));
                }
                let (dtype, shape) = (tensor.meta.dtype(), tensor.meta.shape());
                tensors.push((name.to_string(), dtype.to_string(), shape.to_vec()));
                bytes.extend_from_slice(tensor.data.as_ref());
            }
            question.samples.push(LineSample {
                store_id: publication.sample.store_id.to_string(),
                sample_id: publication.sample.sample_id.to_string(),
                generation: publication.sample.generation.0,
                holder: publication.holder.as_ref().map(ToString::to_string),
                aux_layer_ids: publication.aux_layer_ids.clone(),
                tensors,
            });
        }
        let answer = self.ask("publish", question, &bytes).await?;
        let results = answer.as_array().cloned().unwrap_or_default();
        let limits = Limits { features: 256, ..Limits::default() };
        let parse = |result: Value| match parse_result(&result.to_string(), &limits)? {
            CaptureOutcome::Captured(descriptor) => Ok(descriptor),
            other => Err(Error::new(ErrorKind::Protocol, "publish", format!("{other:?}"))),
        };
        results.into_iter().map(parse).collect()
    }

    async fn fetch(&self, _: Vec<FetchRequest>, _: FetchOptions) -> Result<Vec<Fetched>> {
        unsupported("fetch")
    }

    async fn release(&self, _: Vec<Release>) -> Result<ReleaseReport> {
        unsupported("release")
    }

    async fn health(&self) -> Result<Health> {
        let answer = self.ask("health", line("health"), &[]).await?;
        Ok(serde_json::from_value(answer).expect("health as it was written"))
    }

    async fn close(&self) -> Result<()> {
        self.ask("close", line("close"), &[]).await.map(drop)
    }
}

impl fmt::Debug for RemotePublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemotePublisher").field("info", &self.info).finish_non_exhaustive()
    }
}
