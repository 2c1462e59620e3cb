//! The direct transport against what the machine gives: a plain socket loop, and memcpy.
//!
//! `cargo bench -p featurestore-benches --bench direct [-- tcp|shm|frees|samples]`
//!
//! Both sides of a comparison run in the same process and in turn; medians and the spread between
//! the quartiles are printed.

use std::{
    hint::black_box,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{Arena, ArenaConfig, Backing, RegionPool, ReserveOptions, SamplePlan};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use transport_core::{
    Descriptor, Destination, Dtype, FeatureName, FetchOptions, FetchRequest, Generation, RegionMut,
    RemoteAddr, SampleId, SampleKey, SessionName, StoreId, TensorMeta,
};
use transport_mooncake_direct::{
    CaptureSink, DirectTransport, Engine, ReadOp, ReadOptions, SinkConfig, TcpEngine, TcpOptions,
};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test --benches` runs this too, to see that it starts.
    if !args.iter().any(|arg| arg == "--bench") {
        println!("direct: run with `cargo bench`");
        return;
    }
    let wanted: Vec<_> = args.iter().filter(|arg| !arg.starts_with("--")).collect();
    for (name, bench) in
        [("tcp", tcp as fn()), ("shm", shm), ("frees", frees), ("samples", samples)]
    {
        if wanted.is_empty() || wanted.iter().any(|w| *w == name) {
            bench();
        }
    }
}

/// Connections of each side of [`tcp`]. Where the scheduler puts the two threads of one decides how
/// fast it is, for as long as it lives: a median over one says more about that than about the code.
const CONNECTIONS: u32 = 12;

/// Reads over the tcp engine and over a plain socket loop with the same requests.
fn tcp() {
    println!(
        "\ntcp: engine against a plain socket loop (one connection each, in turn, {CONNECTIONS} times)"
    );
    println!("{:>16} {:>24} {:>24} {:>8}", "", "plain", "engine", "ratio");
    let sink = sink(160 * MIB);
    for (count, size) in
        [(1, 4 * KIB), (1, 64 * KIB), (1, MIB), (1, 16 * MIB), (1, 64 * MIB), (512, 256 * KIB)]
    {
        let total = count * size;
        let source = publish(&sink, count, &[size], None);
        let mut ops: Vec<_> = source
            .iter()
            .map(|sample| {
                let region = RegionMut::zeroed(size).expect("memory");
                ReadOp::new(address(sample), region)
            })
            .collect();
        let mut buffer = vec![0; total];
        let (mut of_plain, mut of_engine) = (Vec::new(), Vec::new());
        for _ in 0..CONNECTIONS {
            let engine = TcpEngine::new(TcpOptions::default());
            let mut plain = PlainLoop::start();
            let (a, b) = times_in_turn(
                Duration::from_millis(1800) / CONNECTIONS,
                || plain.read(count, size, &mut buffer),
                || {
                    engine.read(sink.session(), &mut ops, &ReadOptions::default()).expect("read");
                },
            );
            of_plain.extend(a);
            of_engine.extend(b);
        }
        let (a, b) = (Measured::of(of_plain), Measured::of(of_engine));
        black_box(&buffer);
        let label = if count == 1 { bytes(size) } else { format!("{count} x {}", bytes(size)) };
        println!(
            "{label:>16} {:>24} {:>24} {:>8.2}",
            rate(&a, total),
            rate(&b, total),
            a.median.as_secs_f64() / b.median.as_secs_f64()
        );
        drop(source);
        forget_all(&sink);
    }
}

/// Views and copies of mapped memory against memcpy.
fn shm() {
    println!("\nshm: one sample held from birth, against memcpy of as many bytes");
    println!("{:>16} {:>24} {:>24} {:>8}", "", "memcpy", "copy", "ratio");
    let sink = sink(160 * MIB);
    let consumer = consumer(Engine::Shm, 16 * MIB);
    consumer.announce(sink.control(), soon()).expect("announce");
    for size in [64 * KIB, MIB, 16 * MIB, 64 * MIB] {
        let sample = publish(&sink, 1, &[size], Some(&consumer)).remove(0);
        let from = vec![1u8; size];
        let mut to = vec![0u8; size];
        // A pool of just this size hands out the same pages every time.
        let pages = RegionPool::new(Backing::heap(size as u64).expect("memory")).expect("pool");
        let (a, b) = in_turn(
            Duration::from_millis(1200),
            || {
                to.copy_from_slice(black_box(&from));
                black_box(&mut to);
            },
            || {
                let own = pages.take(size).expect("it came back");
                black_box(fetch(&consumer, &sample, Destination::Into(vec![own])));
            },
        );
        println!(
            "{:>16} {:>24} {:>24} {:>8.2}",
            bytes(size),
            rate(&a, size),
            rate(&b, size),
            a.median.as_secs_f64() / b.median.as_secs_f64()
        );
        release(&consumer, &[sample]);
    }
    let sizes = [16 * MIB, 4 * MIB, 64 * KIB, 64 * KIB];
    let held = publish(&sink, 1, &sizes, Some(&consumer)).remove(0);
    let claimed = publish(&sink, 200, &[KIB; 4], None);
    let (mut next, mut others) = (0, Vec::new());
    let view = repeat(Duration::from_millis(500), || {
        black_box(fetch(&consumer, &held, Destination::View));
    });
    let first = repeat_at_most(200, || {
        others.push(fetch(&consumer, &claimed[next], Destination::View));
        next += 1;
    });
    println!("view of 4 tensors, held from birth: {view}");
    println!("view of 4 tensors, claimed by the fetch: {first}");
}

/// What a step's frees cost the trainer's thread, and how long they take to be answered.
fn frees() {
    println!("\nfrees: 512 samples of 4 tensors");
    let sink = sink(64 * MIB);
    let consumer = consumer(Engine::Shm, MIB);
    let (mut thread, mut answered) = (Vec::new(), Vec::new());
    for _ in 0..40 {
        let step = publish(&sink, 512, &[KIB; 4], None);
        let releases = step.into_iter().map(Into::into).collect();
        let start = Instant::now();
        let pending = consumer.release_later(releases).expect("release");
        thread.push(start.elapsed());
        assert_eq!(pending.wait(soon()).expect("answers").released, 512);
        answered.push(start.elapsed());
    }
    println!("the trainer's thread: {}", Measured::of(thread));
    println!("until the last answer: {}", Measured::of(answered));
}

/// Samples in one call of [`samples`].
const CALL: usize = 64;
/// Live samples of its rows.
const LIVE: [usize; 4] = [CALL, 1000, 10_000, 100_000];
/// How far the rows may be apart.
const FLAT: f64 = 0.15;
/// Fresh sinks and consumers of it. A release is handed on by three threads and back; where they share
/// a core, that takes half as long as where each wakes another core that sleeps, and the scheduler
/// moves them together in a second or so. So what a sample costs is measured on one core.
const PAIRS: usize = 9;
/// Samples that each of them moves for a row at least.
const MOVED: usize = 2_500;
/// Calls of other samples before each measured pass, so that no thread has to be woken for it.
const WARM_UP: usize = 64;
/// Bytes that are written before each pass, so that nothing of it is in a cache: after twice the size
/// of the last one, part of the small rows was still there, and they looked a sixth cheaper.
const EVICT: usize = 256 * MIB;

/// The cost of one small sample, whatever their number.
fn samples() {
    println!(
        "\nsamples of 4 KiB, microseconds a sample: all live ones are fetched and released, {CALL} in a"
    );
    println!(
        "call, each fetch followed by its release. The median call of a sink and consumer, of which"
    );
    println!(
        "{PAIRS} fresh ones measure all rows in turn, every other one from the last to the first; the"
    );
    println!(
        "medians (and quartiles) over these, and of the means of all calls. Every page was touched"
    );
    println!("before, and nothing of it is in a cache; {WARM_UP} other calls come right before.");
    let mut evict = vec![0u8; EVICT];
    println!("\nall threads on one core: what a sample costs");
    let everywhere = OneCore::bind();
    let apart = [Engine::Shm, Engine::Tcp].map(|engine| (engine, rows(engine, &mut evict)));
    drop(everywhere);
    println!("\nthreads where the scheduler has them: what a sample takes");
    let free = [Engine::Shm, Engine::Tcp].map(|engine| (engine, rows(engine, &mut evict)));
    println!();
    for (engine, apart) in apart {
        println!(
            "{}, one core, flat within {:.0} %: {}; the rows are {:.0} % apart",
            engine.name(),
            FLAT * 100.0,
            if apart <= FLAT { "met" } else { "NOT met" },
            apart * 100.0
        );
    }
    for (engine, apart) in free {
        println!("{}, any core: the rows are {:.0} % apart", engine.name(), apart * 100.0);
    }
}

/// All rows of an engine; how far apart they are.
fn rows(engine: Engine, evict: &mut [u8]) -> f64 {
    let (mut rows, mut idle) = (LIVE.map(|_| Vec::new()), Vec::new());
    for number in 0..PAIRS {
        let pair = Pair::start(engine);
        let mut order: Vec<_> = (0..LIVE.len()).collect();
        if number % 2 == 1 {
            order.reverse();
        }
        for row in order {
            let passes = MOVED.div_ceil(LIVE[row]);
            rows[row].push(pair.measure(LIVE[row], passes, WARM_UP, evict));
        }
        // What a single call costs when every thread sleeps: not comparable with the rows.
        idle.push(pair.measure(CALL, 20, 0, evict));
    }
    let name = engine.name();
    println!("{name:>10} {:>24} {:>24} {:>24} {:>8}", "fetch", "release", "both", "mean");
    let medians: Vec<f64> =
        LIVE.iter().zip(&rows).map(|(live, row)| print_row(&live.to_string(), row)).collect();
    print_row("after idle", &idle);
    let least = medians.iter().copied().fold(f64::MAX, f64::min);
    medians.iter().copied().fold(0.0, f64::max) / least - 1.0
}

/// Keeps this thread, and those that it starts, on one core; until it is dropped.
struct OneCore(CpuSet);

impl OneCore {
    fn bind() -> Self {
        let allowed = sched_getaffinity(None).expect("affinity");
        let last = (0..CpuSet::MAX_CPU).rev().find(|&core| allowed.is_set(core));
        let mut one = CpuSet::new();
        one.set(last.expect("a core to run on"));
        sched_setaffinity(None, &one).expect("affinity");
        Self(allowed)
    }
}

impl Drop for OneCore {
    fn drop(&mut self) {
        sched_setaffinity(None, &self.0).expect("affinity");
    }
}

/// Prints a row; what a sample costs in it, in microseconds.
fn print_row(label: &str, row: &[Cost]) -> f64 {
    let of = |part: fn(&Cost) -> Duration| Measured::of(row.iter().map(part).collect());
    let (fetch, release, both) = (of(|c| c.fetch), of(|c| c.release), of(|c| c.both));
    let mean = of(|c| c.mean).median.as_secs_f64() * 1e6;
    let (fetch, release, shown) = (fetch.precise(), release.precise(), both.precise());
    println!("{label:>10} {fetch:>24} {release:>24} {shown:>24} {mean:>8.2}");
    both.median.as_secs_f64() * 1e6
}

/// What a sample costs by the median call, and by the mean of all.
struct Cost {
    fetch: Duration,
    release: Duration,
    both: Duration,
    mean: Duration,
}

impl Cost {
    /// Of a fetch and a release a sample, for each call.
    fn of(calls: &[[Duration; 2]]) -> Self {
        let median = |part: fn(&[Duration; 2]) -> Duration| {
            Measured::of(calls.iter().map(part).collect()).median
        };
        let all: Duration = calls.iter().flatten().sum();
        Self {
            fetch: median(|call| call[0]),
            release: median(|call| call[1]),
            both: median(|call| call[0] + call[1]),
            mean: all / calls.len() as u32,
        }
    }
}

/// A sink with room for the last row of [`samples`], and who reads from it.
struct Pair {
    sink: CaptureSink,
    consumer: DirectTransport,
}

impl Pair {
    fn start(engine: Engine) -> Self {
        let most = LIVE[LIVE.len() - 1] + WARM_UP * CALL;
        let (sink, consumer) = (sink(most * 4608 + MIB), consumer(engine, 8 * MIB));
        consumer.announce(sink.control(), soon()).expect("announce");
        Self { sink, consumer }
    }

    /// The calls of `passes`, after a pass that does not count.
    fn measure(&self, live: usize, passes: usize, warm_up: usize, evict: &mut [u8]) -> Cost {
        let mut calls = Vec::new();
        self.pass(live, warm_up, evict, &mut calls);
        calls.clear();
        (0..passes).for_each(|_| self.pass(live, warm_up, evict, &mut calls));
        Cost::of(&calls)
    }

    /// Publishes `live` samples, then fetches and releases them. Without a warm-up it begins with
    /// every thread asleep.
    fn pass(&self, live: usize, warm_up: usize, evict: &mut [u8], calls: &mut Vec<[Duration; 2]>) {
        let consumer = &self.consumer;
        let mut samples = publish(&self.sink, live + warm_up * CALL, &[4 * KIB], Some(consumer));
        let others = samples.split_off(live);
        evict.iter_mut().step_by(64).for_each(|byte| *byte = byte.wrapping_add(1));
        black_box(&mut *evict);
        if warm_up == 0 {
            std::thread::sleep(Duration::from_millis(20));
        }
        let move_on = |call: &[Arc<Descriptor>]| {
            let each = call.len() as u32;
            let start = Instant::now();
            let requests =
                call.iter().map(|s| FetchRequest::new(s.clone(), Destination::Pool)).collect();
            let fetched = consumer.fetch_blocking(requests, &FetchOptions::default());
            black_box(fetched.expect("fetch"));
            let fetched = Instant::now();
            release(consumer, call);
            [(fetched - start) / each, fetched.elapsed() / each]
        };
        for call in others.chunks(CALL) {
            move_on(call);
        }
        for call in samples.chunks(CALL) {
            let cost = move_on(call);
            // The last one of a row may be shorter, and so dearer a sample.
            if call.len() == CALL {
                calls.push(cost);
            }
        }
    }
}

/// A server thread that answers 24-byte requests with bytes, and nothing else.
struct PlainLoop {
    stream: TcpStream,
}

impl PlainLoop {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("connect");
        let (mut server, _) = listener.accept().expect("accept");
        stream.set_nodelay(true).expect("nodelay");
        server.set_nodelay(true).expect("nodelay");
        std::thread::spawn(move || {
            let body = vec![7u8; 128 * MIB];
            let mut header = [0; 24];
            while server.read_exact(&mut header).is_ok() {
                let number =
                    |at| u64::from_le_bytes(header[at..at + 8].try_into().expect("8 bytes"));
                let (size, offset) = (number(0) as usize, number(8) as usize);
                if server.write_all(&body[offset..offset + size]).is_err() {
                    return;
                }
            }
        });
        Self { stream }
    }

    /// Requests run ahead of the answers, as the engine's do.
    fn read(&mut self, count: usize, size: usize, buffer: &mut [u8]) {
        let mut headers = vec![0; 24 * count];
        for (i, header) in headers.chunks_mut(24).enumerate() {
            header[..8].copy_from_slice(&(size as u64).to_le_bytes());
            header[8..16].copy_from_slice(&((i * size) as u64).to_le_bytes());
        }
        self.stream.write_all(&headers).expect("request");
        for part in buffer.chunks_mut(size) {
            self.stream.read_exact(part).expect("answer");
        }
    }
}

/// Median and quartiles of a series.
struct Measured {
    low: Duration,
    median: Duration,
    high: Duration,
}

impl Measured {
    fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let at = |part: usize| times[(times.len() - 1) * part / 4];
        Self { low: at(1), median: at(2), high: at(3) }
    }
}

impl Measured {
    /// In hundredths of microseconds.
    fn precise(&self) -> String {
        let us = |d: Duration| d.as_secs_f64() * 1e6;
        format!("{:.2} ({:.2} .. {:.2})", us(self.median), us(self.low), us(self.high))
    }
}

impl std::fmt::Display for Measured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let us = |d: Duration| d.as_secs_f64() * 1e6;
        write!(f, "{:.1} us ({:.1} .. {:.1})", us(self.median), us(self.low), us(self.high))
    }
}

fn rate(measured: &Measured, bytes: usize) -> String {
    let gb = |d: Duration| bytes as f64 / d.as_secs_f64() / 1e9;
    if bytes < MIB {
        return measured.to_string();
    }
    format!("{:.2} GB/s ({:.2} .. {:.2})", gb(measured.median), gb(measured.high), gb(measured.low))
}

/// Runs both in turn until the budget of each is used up, at least 7 times.
fn in_turn(budget: Duration, a: impl FnMut(), b: impl FnMut()) -> (Measured, Measured) {
    let (a, b) = times_in_turn(budget, a, b);
    (Measured::of(a), Measured::of(b))
}

fn times_in_turn(
    budget: Duration,
    mut a: impl FnMut(),
    mut b: impl FnMut(),
) -> (Vec<Duration>, Vec<Duration>) {
    a();
    b();
    let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
    let start = Instant::now();
    while start.elapsed() < 2 * budget || of_a.len() < 7 {
        for _ in 0..4 {
            let at = Instant::now();
            a();
            of_a.push(at.elapsed());
        }
        for _ in 0..4 {
            let at = Instant::now();
            b();
            of_b.push(at.elapsed());
        }
    }
    (of_a, of_b)
}

fn repeat(budget: Duration, mut work: impl FnMut()) -> Measured {
    let (start, mut times) = (Instant::now(), Vec::new());
    while start.elapsed() < budget {
        let at = Instant::now();
        work();
        times.push(at.elapsed());
    }
    Measured::of(times)
}

fn repeat_at_most(count: usize, mut work: impl FnMut()) -> Measured {
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let at = Instant::now();
        work();
        times.push(at.elapsed());
    }
    Measured::of(times)
}

fn bytes(n: usize) -> String {
    if n >= MIB { format!("{} MiB", n / MIB) } else { format!("{} KiB", n / KIB) }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn sink(bytes: usize) -> CaptureSink {
    let backing = Backing::shared(bytes as u64).expect("memory");
    let arena = Arena::start(backing, ArenaConfig::default()).expect("arena");
    CaptureSink::start(arena, SinkConfig::default()).expect("sink")
}

fn consumer(engine: Engine, pool: usize) -> DirectTransport {
    let pool = RegionPool::new(Backing::heap(pool as u64).expect("memory")).expect("pool");
    DirectTransport::builder().engine(engine).pool(pool).build().expect("transport")
}

/// Publishes samples of byte tensors of these sizes; every page is written.
fn publish(
    sink: &CaptureSink,
    count: usize,
    sizes: &[usize],
    holder: Option<&DirectTransport>,
) -> Vec<Arc<Descriptor>> {
    let objects: Vec<_> = sizes
        .iter()
        .enumerate()
        .map(|(i, &size)| {
            let meta = TensorMeta::new(Dtype::Uint8, [size as u64]).expect("a shape");
            (FeatureName::new(format!("t{i}")).expect("a name"), meta)
        })
        .collect();
    let store = StoreId::new("bench").expect("a name");
    let mut all = Vec::with_capacity(count);
    for first in (0..count).step_by(10_000) {
        let plans: Vec<_> = (first..count.min(first + 10_000))
            .map(|i| SamplePlan {
                sample: SampleKey::new(
                    store.clone(),
                    SampleId::new(format!("sample-{i}")).expect("a name"),
                    Generation(1),
                ),
                objects: objects.clone(),
                holder: holder.map(|consumer| consumer.client_id().clone()),
            })
            .collect();
        let planned = plans.len();
        let options = ReserveOptions::default().replace(true);
        let mut reservation = sink.reserve_blocking(plans, options).expect("room");
        for i in 0..planned {
            for j in 0..sizes.len() {
                reservation.bytes_mut(i, j).fill(i as u8);
            }
        }
        all.extend(reservation.publish_blocking().expect("published").into_iter().map(Arc::new));
    }
    all
}

fn address(sample: &Descriptor) -> RemoteAddr {
    sample.features[0].address.expect("an arena sample")
}

fn fetch(
    consumer: &DirectTransport,
    sample: &Arc<Descriptor>,
    destination: Destination,
) -> Vec<transport_core::Fetched> {
    let request = FetchRequest::new(sample.clone(), destination);
    consumer.fetch_blocking(vec![request], &FetchOptions::default()).expect("fetch")
}

fn release(consumer: &DirectTransport, samples: &[Arc<Descriptor>]) {
    let releases = samples.iter().map(|sample| sample.clone().into()).collect();
    let report = consumer.release_blocking(releases).expect("release");
    assert_eq!(report.released as usize, samples.len(), "{report:?}");
}

/// Frees everything that is published, as an older client would.
fn forget_all(sink: &CaptureSink) {
    let control: &SessionName = sink.control();
    let mut stream = TcpStream::connect((control.host(), control.port())).expect("connect");
    let keys: Vec<_> = (0..512).map(|i| format!("\"bench/sample-{i}/g1/t0\"")).collect();
    writeln!(stream, "[{}]", keys.join(",")).expect("sent");
    let deadline = soon();
    while sink.health_blocking().expect("health").resident_samples > 0 {
        assert!(Instant::now() < deadline, "the frees are not applied");
        std::thread::sleep(Duration::from_millis(1));
    }
}
