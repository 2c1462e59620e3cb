//! One process of a training run that the fault tests kill: a producer, or a rank.
//!
//! ```text
//! test-run producer FOLDER SAMPLES QUANTUM CONTROL=URL...
//! test-run rank FOLDER RANK SIZE PER_RANK ATTEMPT ADDRESS POINT CONTROL...
//! ```
//!
//! A rank appends `attempt step id` to `trained-RANK.log` for each sample that it trains. `POINT` is
//! `-`, or the number of the ledger's point at which rank 0 kills itself, and after how many times.
#![forbid(unsafe_code)]

use std::{
    collections::VecDeque,
    error::Error,
    fs::OpenOptions,
    io::Write,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use control_proto::sample_ref::SampleRef;
use featurestore::{
    ack::{Acknowledger, Authority, Resume, Step},
    channel::RefReader,
    consumer::{Consumer, ConsumerOptions, Materialized},
    flow::Watermarks,
    layout::{Layout, Strategy},
    ledger::{Ledger, LedgerOptions, Observer, Point},
    lifecycle::{Retention, Samples},
    producer::{
        CaptureClient, CaptureOptions, Endpoints, Producer, ProducerOptions, Prompts, Task,
    },
    ranks::{Group, GroupOptions},
    workload,
};
use parking_lot::Mutex;
use transport_core::{Dtype, FeatureName, SampleId, SessionName, StoreId, Transport};
use transport_mooncake_direct::{DirectTransport, Engine};

type Fallible<T> = Result<T, Box<dyn Error>>;

const RUN: &str = "run";
const SEED: u64 = 42;
const LEASE: Duration = Duration::from_secs(3);
/// How long a step computes, so that a run lasts long enough to be killed.
const COMPUTE: Duration = Duration::from_millis(30);
const PATIENCE: Duration = Duration::from_secs(20);

fn main() -> Fallible<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (role, rest) = arguments.split_first().ok_or("a role")?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    match role.as_str() {
        "producer" => runtime.block_on(produce(rest)),
        "rank" => rank(rest, &runtime),
        other => Err(format!("no role {other}").into()),
    }
}

fn layout() -> Fallible<Layout> {
    Ok(Layout::new(Strategy::Dspark, 8, vec![1])?)
}

fn transport() -> Fallible<Arc<DirectTransport>> {
    Ok(Arc::new(DirectTransport::builder().engine(Engine::Shm).lease(LEASE).build()?))
}

struct Numbered(std::ops::Range<usize>);

fn task(index: usize) -> transport_core::Result<Task> {
    let prompt = workload::prompt(RUN, index, 9, SEED)?;
    Ok(Task::new(prompt.sample_id, prompt.input_ids, prompt.loss_mask))
}

impl Prompts for Numbered {
    fn next(&mut self) -> transport_core::Result<Option<Task>> {
        self.0.next().map(task).transpose()
    }

    fn again(&mut self, id: &SampleId) -> transport_core::Result<Option<Task>> {
        let number = id.as_str().rsplit('-').next().and_then(|digits| digits.parse().ok());
        number.map(task).transpose()
    }
}

async fn produce(arguments: &[String]) -> Fallible<()> {
    let [folder, samples, quantum, servers @ ..] = arguments else {
        return Err("arguments".into());
    };
    let quantum: u64 = quantum.parse()?;
    let transport: Arc<dyn Transport> = transport()?;
    let endpoints = Arc::new(Endpoints::new(transport.clone(), Strategy::Dspark));
    let mut urls = Vec::new();
    for server in servers {
        let (control, url) = server.split_once('=').ok_or("CONTROL=URL")?;
        endpoints.tell(url, control.parse()?);
        urls.push(url.to_owned());
    }
    let store =
        Arc::new(Samples::over(transport, Retention::default()).reclaiming(endpoints.clone()));
    let mut options = CaptureOptions::new(StoreId::new(RUN)?, layout()?);
    options.timeout = Duration::from_secs(10);
    let client = CaptureClient::new(options, store.clone(), endpoints);
    let mut options = ProducerOptions::new(urls, RUN);
    options.concurrency = 2;
    options.attempts = 100;
    options.poll = Duration::from_millis(10);
    options.revive = Some(Duration::from_millis(200));
    options.arena_feedback = true;
    options.prefetch = 4;
    let marks = Watermarks::new(quantum * 6, quantum * 4, quantum);
    let producer = Producer::new(options, client, store, Path::new(folder), marks)?;
    let produced = producer.run(Box::new(Numbered(0..samples.parse()?))).await?;
    println!("{}", serde_json::to_string(&produced)?);
    Ok(())
}

/// What every rank is told about the next window.
fn next_window(authority: &Mutex<Authority>) -> transport_core::Result<Vec<u8>> {
    let end = Instant::now() + PATIENCE;
    loop {
        let mut authority = authority.lock();
        if let Some(window) = authority.poll()? {
            let text = |refs: Vec<SampleRef>| {
                let mut text = Vec::new();
                refs.iter().for_each(|sample| sample.write(&mut text));
                String::from_utf8(text).expect("JSON is UTF-8")
            };
            let window: Vec<String> = window.into_iter().map(text).collect();
            return Ok(serde_json::to_vec(&window).expect("plain data"));
        }
        if authority.ended() {
            return Ok(Vec::new());
        }
        drop(authority);
        if Instant::now() > end {
            return Ok(b"wait".to_vec());
        }
        std::thread::sleep(Duration::from_millis(3));
    }
}

fn crash_at(point: &str) -> Fallible<Observer> {
    let Some((number, times)) = point.split_once('x') else { return Ok(Observer::default()) };
    let (at, times) = (Point::ALL[number.parse::<usize>()?], times.parse::<u64>()?);
    let seen = AtomicU64::new(0);
    Ok(Observer::new(move |point| {
        if point == at && seen.fetch_add(1, Ordering::Relaxed) + 1 == times {
            let own = rustix::process::getpid();
            let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
            std::thread::sleep(Duration::from_secs(60)); // the signal is on its way
        }
    }))
}

fn rank(arguments: &[String], runtime: &tokio::runtime::Runtime) -> Fallible<()> {
    let [folder, rank, size, per_rank, attempt, address, point, servers @ ..] = arguments else {
        return Err("arguments".into());
    };
    let (folder, rank, size): (PathBuf, usize, usize) =
        (folder.into(), rank.parse()?, size.parse()?);
    let address: SocketAddr = address.parse()?;
    let second = SocketAddr::new(address.ip(), address.port() + 1);
    let options =
        |name| GroupOptions::new(format!("{name}-{attempt}"), size).deadline(PATIENCE * 3);
    let (mut feed, acks, authority, observer);
    if rank == 0 {
        let (feeding, acking) = (TcpListener::bind(address)?, TcpListener::bind(second)?);
        observer = crash_at(point)?;
        let mut ledger_options = LedgerOptions::default();
        ledger_options.observer = observer.clone();
        let ledger = Ledger::open(&folder.join("ledger.db"), RUN, ledger_options)?;
        let fresh = attempt == "0";
        let resume = if fresh { Resume::Fresh } else { Resume::At(ledger.marker()) };
        let reader = RefReader::open(&folder)?;
        let own = Authority::new(reader, ledger, size, per_rank.parse()?, resume)?;
        authority = Some(Arc::new(Mutex::new(own)));
        feed = Group::lead(feeding, options("feed"))?;
        acks = Group::lead(acking, options("ack"))?;
    } else {
        (authority, observer) = (None, Observer::default());
        feed = Group::join(address, rank, options("feed"))?;
        acks = Group::join(second, rank, options("ack"))?;
    }
    let _entered = runtime.enter();
    let direct = transport()?;
    for server in servers {
        // Announced, it keeps what it reads also while it computes.
        let server: SessionName = server.parse()?;
        let _ = direct.announce(&server, Instant::now() + Duration::from_secs(2));
    }
    let samples = Arc::new(Samples::over(direct, Retention::default()));
    let mut step = 1;
    if let Some(authority) = &authority {
        let mut authority = authority.lock();
        step = authority.marker().map_or(1, |marker| marker + 1);
        let unfreed = descriptors(&authority.unfreed())?;
        runtime.block_on(samples.settle(&unfreed));
        runtime.block_on(samples.drain(None, 40, Duration::from_millis(100))).ok();
        authority.freed(unfreed.iter().map(|d| &d.sample.sample_id));
    }
    let handle = runtime.handle().clone();
    let mut acknowledger = Acknowledger::new(acks, samples.clone(), authority.clone(), handle)?
        .observed(observer)
        .patience(1000);
    let mut log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(folder.join(format!("trained-{rank}.log")))?;
    let started = feed.decide(&[], |_| Ok(step.to_le_bytes().to_vec()))?;
    step = u64::from_le_bytes(started.try_into().map_err(|_| "a step")?);
    loop {
        let window = feed.decide(&[], |_| next_window(authority.as_ref().expect("rank 0")))?;
        if window.is_empty() {
            break;
        }
        if window == b"wait" {
            continue;
        }
        let window: Vec<String> = serde_json::from_slice(&window)?;
        let refs: Vec<SampleRef> = window[rank]
            .lines()
            .map(|line| SampleRef::parse(line.as_bytes()))
            .collect::<Result<_, _>>()?;
        let trained = train(runtime, &samples, &refs)?;
        std::thread::sleep(COMPUTE);
        for descriptor in &trained.0 {
            writeln!(log, "{attempt} {step} {}", descriptor.sample.sample_id)?;
        }
        let number = step;
        acknowledger.acknowledge(&Step::new(number, trained.0.into()).lost(trained.1))?;
        step += 1;
    }
    if let Some(authority) = &authority {
        let mut authority = authority.lock();
        let tail = descriptors(&authority.take_tail()?)?;
        runtime.block_on(samples.settle(&tail));
        authority.finish()?;
        println!("{}", serde_json::to_string(&authority.stats())?);
    }
    runtime.block_on(samples.drain(None, 100, Duration::from_millis(100)))?;
    acknowledger.barrier()?;
    Ok(())
}

fn descriptors(refs: &[SampleRef]) -> Fallible<Vec<Arc<transport_core::Descriptor>>> {
    Ok(refs.iter().map(|sample| sample.descriptor().map(Arc::new)).collect::<Result<_, _>>()?)
}

type Trained = (VecDeque<Arc<transport_core::Descriptor>>, Vec<SampleId>);

/// Reads and compares a rank's samples; those that are lost come second.
fn train(
    runtime: &tokio::runtime::Runtime,
    samples: &Arc<Samples>,
    refs: &[SampleRef],
) -> Fallible<Trained> {
    let mut options = ConsumerOptions::default();
    options.layout = Some(layout()?);
    options.deadline = Duration::from_secs(5);
    let mut consumer = Consumer::new(samples.clone(), options);
    let (mut trained, mut lost) = (VecDeque::new(), Vec::new());
    runtime.block_on(async {
        consumer.feed(descriptors(refs)?)?;
        while let Some(next) = consumer.next().await? {
            match next {
                Materialized::Ready(leased) => {
                    for (name, tensor) in &leased.tensors {
                        if tensor.meta.dtype() == Dtype::Bfloat16 {
                            let name = FeatureName::new(name.as_str())?;
                            let id = &leased.descriptor.sample.sample_id;
                            let bytes = tensor.data.as_bytes().ok_or("host memory")?;
                            workload::compare(workload::Stream::new(SEED, id, &name), bytes)?;
                        }
                    }
                    let token = leased.token.clone();
                    trained.push_back(leased.descriptor.clone());
                    drop(leased);
                    samples.release(&token).await;
                }
                Materialized::Lost(id, error) => {
                    eprintln!("lost {id}: {error}");
                    lost.push(id);
                }
            }
        }
        Ok::<_, Box<dyn Error>>((trained, lost))
    })
}
