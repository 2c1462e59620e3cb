//! What the lifecycle costs a trainer: the ledger, cleaning up, and waiting. Each figure stands beside
//! what it has to be.
//!
//! `cargo bench -p featurestore-benches --bench lifecycle [-- ledger|cleanup|steps|wait]`

use std::{
    fs::File,
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{Arena, ArenaConfig, Backing, ReserveOptions, SamplePlan};
use control_proto::token::{Reply, Request, Verb};
use featurestore::{
    consumer::{Consumer, ConsumerOptions, Materialized},
    ledger::{Ledger, LedgerOptions},
    lifecycle::{Retention, Samples},
    token::TokenReleaser,
};
use indexmap::IndexMap;
use transport_core::{
    ClientId, Descriptor, Dtype, FeatureDescriptor, FeatureName, Generation, Location, RemoteAddr,
    SampleId, SampleKey, SessionName, StoreId, TensorMeta, TokenLocation,
};
use transport_mooncake_direct::{CaptureSink, DirectTransport, Engine, SinkConfig};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test --benches` runs this too, to see that it starts.
    if !args.iter().any(|arg| arg == "--bench") {
        println!("lifecycle: run with `cargo bench`");
        return;
    }
    let wanted: Vec<_> = args.iter().filter(|arg| !arg.starts_with("--")).collect();
    for (name, bench) in
        [("ledger", ledger as fn()), ("cleanup", cleanup), ("steps", steps), ("wait", wait)]
    {
        if wanted.is_empty() || wanted.iter().any(|w| *w == name) {
            bench();
        }
    }
}

fn quantile(times: &mut [Duration], part: f64) -> Duration {
    times.sort_unstable();
    times[((times.len() - 1) as f64 * part) as usize]
}

fn id(i: u64) -> SampleId {
    SampleId::new(format!("run:e0:task-{i:07}")).expect("a name")
}

/// A name without a number: such are kept one by one, which is the worst case.
fn odd_id(i: u64) -> SampleId {
    SampleId::new(format!("{:016x}", i.wrapping_mul(0x9e37_79b9_7f4a_7c15))).expect("a name")
}

/// Prints a figure beside the most that it may be.
fn figure(name: &str, found: Duration, most: Duration) {
    let verdict = if found <= most { "met" } else { "NOT met" };
    println!("{name:>36} {found:>12.1?}   at most {most:?}: {verdict}");
}

/// A ledger, and how long its steps have taken.
struct Steps {
    name: &'static str,
    path: PathBuf,
    ledger: Option<Ledger>, // closed while it is opened again
    id: fn(u64) -> SampleId,
    next: u64,
    step: u64,
    times: Vec<Duration>,
    commits: Vec<Duration>,
}

fn open(path: &Path) -> Ledger {
    Ledger::open(path, "bench", LedgerOptions::default()).expect("a ledger")
}

/// Bytes of memory of this process.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.expect("its second number") * 4096
}

impl Steps {
    fn new(folder: &Path, name: &'static str, id: fn(u64) -> SampleId) -> Self {
        let path = folder.join(name.replace(' ', "-"));
        let ledger = Some(open(&path));
        Self { name, path, ledger, id, next: 0, step: 0, times: Vec::new(), commits: Vec::new() }
    }

    /// Moves the file to another folder, where it is opened [`again`](Self::again).
    fn move_to(&mut self, folder: &Path) {
        self.ledger = None; // which leaves one file
        let path = folder.join(self.path.file_name().expect("of its name"));
        std::fs::copy(&self.path, &path).expect("room");
        std::fs::remove_file(&self.path).expect("ours");
        self.path = path;
    }

    /// Opens it again; how long that took, and by how much this process is larger with it.
    fn again(&mut self) -> (Duration, u64) {
        self.ledger = None;
        let (before, start) = (resident(), Instant::now());
        self.ledger = Some(open(&self.path));
        (start.elapsed(), resident().saturating_sub(before))
    }

    /// One optimizer step of `size` samples, whose records have `record` bytes: how long it took to
    /// note them in flight, and to acknowledge them.
    fn step(&mut self, size: u64, record: usize) -> (Duration, Duration) {
        let ids: Vec<SampleId> = (self.next..self.next + size).map(self.id).collect();
        self.next += size;
        self.step += 1;
        let records: Vec<_> = ids.iter().map(|id| (id.clone(), vec![b'x'; record])).collect();
        let ledger = self.ledger.as_mut().expect("open");
        let start = Instant::now();
        ledger.commit(&records).expect("committed");
        let committed = start.elapsed();
        let start = Instant::now();
        ledger.acknowledge(self.step, &ids).expect("durable");
        let elapsed = start.elapsed();
        ledger.freed(&ids);
        (committed, elapsed)
    }
}

/// Restarts with 1,000,000 samples; then one optimizer step of 128 samples in a young ledger, in two of
/// 1,000,000 samples, and beside
/// them a plain write and fsync of as many bytes on the same disk: in turn, so that whatever else the
/// machine does falls on all of them.
fn ledger() {
    const SAMPLES: u64 = 128;
    const ROUNDS: usize = 400;
    const OLD: u64 = 1_000_000;
    println!("\nledger: acknowledging {SAMPLES} samples, medians of {ROUNDS}, all in turn");
    // In the target folder, which is on the disk that is meant, not in a memory file system.
    let folder = std::env::current_exe().expect("a path").with_extension("bench");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    let mut all = [
        Steps::new(&folder, "young ledger", id),
        Steps::new(&folder, "1,000,000 numbered names", id),
        Steps::new(&folder, "1,000,000 other names", odd_id),
    ];
    // So many syncs are waited for nowhere but on a disk.
    let memory = Path::new("/dev/shm").join(format!("featurestore-bench-{}", std::process::id()));
    std::fs::create_dir_all(&memory).expect("a folder in memory");
    for old in &mut all[1..] {
        old.move_to(&memory);
        old.again();
        while old.next < OLD {
            old.step(100, 64); // more steps than are kept one by one
        }
        old.move_to(&folder);
        let (folding, _) = old.again();
        let (again, bytes) = old.again();
        println!(
            "{:>36} {:>12.1?}   and {:.1?} once it is folded; {:.1} bytes of memory an id",
            format!("restart, {}", old.name),
            folding,
            again,
            bytes as f64 / OLD as f64
        );
    }
    std::fs::remove_dir_all(&memory).expect("removed");
    let mut plain = File::create(folder.join("plain")).expect("a file");
    let bytes = vec![7; 8 << 10];
    let mut fsyncs = Vec::with_capacity(ROUNDS);
    for round in 0..ROUNDS {
        let start = Instant::now();
        plain.write_all(&bytes).expect("room");
        plain.sync_data().expect("synced");
        fsyncs.push(start.elapsed());
        for turn in 0..all.len() {
            let at = (round + turn) % all.len();
            let (committed, elapsed) = all[at].step(SAMPLES, 1200);
            all[at].commits.push(committed);
            all[at].times.push(elapsed);
        }
    }
    let fsync = quantile(&mut fsyncs, 0.5);
    println!("{:>36} {fsync:>12.1?}", "write and fsync of 8 KiB");
    let mut young = None;
    for steps in &mut all {
        let (p50, p99) = (quantile(&mut steps.times, 0.5), quantile(&mut steps.times, 0.99));
        let committing = quantile(&mut steps.commits, 0.5);
        println!(
            "{:>36} {p50:>12.1?}   p99 {p99:.1?}; noted in flight before in {committing:.1?}",
            steps.name
        );
        match young {
            None => {
                let beyond = p50.saturating_sub(fsync);
                figure("beyond its own fsync", beyond, Duration::from_micros(1500));
                young = Some((p50, committing));
            }
            Some((acknowledged, committed)) => {
                figure("against 1.1 of the young one", p50, acknowledged.mul_f64(1.1));
                figure("noting, against the same", committing, committed.mul_f64(1.1));
            }
        }
    }
    drop(all);
    std::fs::remove_dir_all(&folder).expect("removed");
}

fn key(i: usize) -> SampleKey {
    SampleKey::new(StoreId::new("bench").expect("a name"), id(i as u64), Generation(1))
}

/// Publishes `count` samples of four tensors; the first has `bytes` bytes.
fn publish(sink: &CaptureSink, count: usize, bytes: u64) -> Vec<Arc<Descriptor>> {
    publish_each(sink, 0..count, 1, bytes, None)
}

/// The same for samples of these numbers and this generation, held for somebody from the start.
fn publish_each(
    sink: &CaptureSink,
    numbers: impl Iterator<Item = usize>,
    generation: u64,
    bytes: u64,
    holder: Option<&ClientId>,
) -> Vec<Arc<Descriptor>> {
    let objects: Vec<_> = [bytes, 512, 512, 512]
        .into_iter()
        .enumerate()
        .map(|(i, size)| {
            let meta = TensorMeta::new(Dtype::Uint8, [size]).expect("a shape");
            (FeatureName::new(format!("t{i}")).expect("a name"), meta)
        })
        .collect();
    let plans = numbers.map(|i| SamplePlan {
        sample: SampleKey { generation: Generation(generation), ..key(i) },
        objects: objects.clone(),
        holder: holder.cloned(),
    });
    let plans: Vec<_> = plans.collect();
    let options = ReserveOptions::default();
    let reservation = sink.reserve_blocking(plans, options).expect("room");
    reservation.publish_blocking().expect("published").into_iter().map(Arc::new).collect()
}

fn sink(bytes: u64) -> CaptureSink {
    let backing = Backing::shared(bytes).expect("memory");
    let arena = Arena::start(backing, ArenaConfig::default()).expect("arena");
    CaptureSink::start(arena, SinkConfig::default()).expect("sink")
}

fn shm() -> Arc<DirectTransport> {
    Arc::new(DirectTransport::builder().engine(Engine::Shm).build().expect("transport"))
}

/// Freeing 512 samples of four tensors, confirmed, over both control wires.
fn cleanup() {
    const SAMPLES: usize = 512;
    println!("\ncleanup: 512 samples, confirmed, medians of 50 (published: 5.6 ms)");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let sink = sink(64 << 20);
    let mut times = Vec::new();
    for _ in 0..50 {
        let samples = Samples::over(shm(), Retention::default());
        let published = publish(&sink, SAMPLES, 4096);
        runtime.block_on(samples.adopt(&published)).expect("adopted");
        // The connection stands already, as it does at every boundary but the first.
        let first = runtime.block_on(samples.settle(&published[..1]));
        let start = Instant::now();
        let freed = runtime.block_on(samples.settle(&published[1..]));
        times.push(start.elapsed());
        assert_eq!((first.freed + freed.freed, freed.pending), (SAMPLES as u64, 0));
    }
    figure("arena wire", quantile(&mut times, 0.5), Duration::from_millis(2));

    let control = token_server();
    let releaser = TokenReleaser::default();
    let meta = TensorMeta::new(Dtype::Uint8, [4096]).expect("a shape");
    let samples: Vec<_> = (0..SAMPLES)
        .map(|i| {
            let feature = FeatureDescriptor::new(meta.clone(), Some(RemoteAddr(512)), None);
            let features = IndexMap::from([(FeatureName::new("x").expect("a name"), feature)]);
            let place = TokenLocation::new("rdma", control.clone(), control.clone(), "hush");
            let location = Location::Token(place);
            Arc::new(Descriptor::new(key(i), features, None, location).expect("a sample"))
        })
        .collect();
    let mut times: Vec<Duration> = (0..50)
        .map(|_| {
            let start = Instant::now();
            let report = releaser.release(&samples, Verb::Release).expect("asked");
            assert_eq!(report.released, SAMPLES as u64);
            start.elapsed()
        })
        .collect();
    figure("token wire", quantile(&mut times, 0.5), Duration::from_millis(6));
}

/// Bytes that are written before each measurement of [`steps`], so that nothing of it is in a cache.
const EVICT: usize = 256 << 20;
/// Pause before each step, after which every thread sleeps, as in a step of a real trainer.
const PAUSE: Duration = Duration::from_millis(3);

/// Freeing 512 samples of two servers as a trainer does at its optimizer boundaries: read before, and
/// out of every cache by then. In one step, and in 32.
fn steps() {
    const SAMPLES: usize = 512;
    const ROUNDS: usize = 40;
    println!("\nsteps: 512 samples of two servers, read before and not in a cache; of {ROUNDS}");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let sinks = [sink(64 << 20), sink(64 << 20)];
    let transport = shm();
    for sink in &sinks {
        let soon = Instant::now() + Duration::from_secs(10);
        transport.announce(sink.control(), soon).expect("a greeting");
    }
    let samples = Samples::over(transport.clone(), Retention::default());
    let mut evict = vec![0u8; EVICT];
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        for (size, times) in [SAMPLES, 16].into_iter().zip(&mut times) {
            let keys = |parity| (0..SAMPLES).filter(move |i| i % 2 == parity);
            let holder = Some(transport.client_id());
            let [even, odd] =
                [0, 1].map(|i| publish_each(&sinks[i], keys(i), round as u64, 4096, holder));
            let all: Vec<_> = even.into_iter().zip(odd).flat_map(|(a, b)| [a, b]).collect();
            runtime.block_on(async {
                samples.adopt(&all).await.expect("adopted");
                for sample in &all {
                    let leased = samples.get(sample, Duration::from_secs(10)).await.expect("read");
                    let token = leased.token.clone();
                    drop(leased);
                    samples.release(&token).await;
                }
            });
            evict.iter_mut().step_by(64).for_each(|byte| *byte = byte.wrapping_add(1));
            let mut sum = Duration::ZERO;
            for step in all.chunks(size) {
                std::thread::sleep(PAUSE);
                let start = Instant::now();
                let freed = runtime.block_on(samples.settle(step));
                sum += start.elapsed();
                assert_eq!((freed.freed, freed.pending), (size as u64, 0));
            }
            times.push(sum);
        }
    }
    std::hint::black_box(&evict);
    for (name, times) in ["one step", "32 steps, their sum"].iter().zip(&mut times) {
        let [low, median, high] = [0.25, 0.5, 0.75].map(|part| quantile(times, part));
        println!("{name:>36} {median:>12.1?}   ({low:.1?} .. {high:.1?})");
    }
}

/// Answers release requests as the documented server does; it ends with this process.
fn token_server() -> SessionName {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut reader = BufReader::new(stream.try_clone().expect("a socket"));
            let mut line = Vec::new();
            if reader.read_until(b'\n', &mut line).is_err() {
                continue;
            }
            line.pop();
            let count = match Request::parse(&line) {
                Ok(Request::Batch { items, .. }) => items.len() as u64,
                _ => 1,
            };
            let reply = Reply::Freed { freed_bytes: count * 4096, released_samples: count };
            let mut out = Vec::new();
            reply.write(&mut out);
            let _ = stream.write_all(&out); // the client tells what it misses
        }
    });
    address.to_string().parse().expect("an address")
}

/// How long a training loop waits for each sample, with four read ahead.
fn wait() {
    const SAMPLES: usize = 2000;
    println!("\nwait: shm views, {SAMPLES} samples, prefetch 4, 1 ms of computing a sample");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let sink = sink(256 << 20);
    let published = publish(&sink, SAMPLES, 64 << 10);
    let samples = Arc::new(Samples::over(shm(), Retention::default()));
    let mut times = runtime.block_on(async {
        let mut consumer = Consumer::new(samples.clone(), ConsumerOptions::default());
        consumer.feed(published.clone()).expect("taken");
        let mut times = Vec::with_capacity(SAMPLES);
        loop {
            let start = Instant::now();
            match consumer.next().await.expect("read") {
                Some(Materialized::Ready(leased)) => {
                    times.push(start.elapsed());
                    let token = leased.token.clone();
                    std::thread::sleep(Duration::from_millis(1));
                    drop(leased);
                    samples.release(&token).await;
                }
                Some(Materialized::Lost(id, error)) => panic!("{id}: {error}"),
                None => return times,
            }
        }
    });
    times.remove(0); // it connects and maps
    figure("p50", quantile(&mut times, 0.5), Duration::from_micros(50));
    figure("p99", quantile(&mut times, 0.99), Duration::from_millis(1));
    assert_eq!(runtime.block_on(samples.settle(&published)).pending, 0);
}
