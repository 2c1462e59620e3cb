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
/// Samples that every row of [`samples`] moves at least, so that all rest on as many.
const MOVED: usize = 20_000;
/// Calls of other samples before each measured round, so that no thread has to be woken for it.
const WARM_UP: usize = 4;

/// The cost of one small sample, whatever their number.
fn samples() {
    println!("\nsamples of 4 KiB: fetch, then release, both in calls of {CALL}; median");
    println!(
        "microseconds a sample (quartiles of `both`) over rounds of all live samples, as many"
    );
    println!("rounds as move {MOVED} samples and at least 5. Every page was touched before, and");
    println!(
        "nothing of it is in a cache; {WARM_UP} calls of other samples come right before each"
    );
    println!("round.");
    let mut evict = vec![0u8; 64 * MIB];
    for engine in [Engine::Shm, Engine::Tcp] {
        println!(
            "{:>10} {:>8} {:>8} {:>10} {:>10} {:>24}",
            engine.name(),
            "rounds",
            "moved",
            "fetch",
            "release",
            "both"
        );
        for count in [CALL, 1000, 10_000, 100_000] {
            let rounds = MOVED.div_ceil(count).max(5);
            let timed = rounds_of(engine, count, rounds, WARM_UP, &mut evict);
            print_row(&format!("{count}"), count, rounds, timed);
        }
        // What a single call costs when every thread sleeps: not comparable with the rows above.
        let timed = rounds_of(engine, CALL, 20, 0, &mut evict);
        print_row("after idle", CALL, 20, timed);
    }
}

fn print_row(label: &str, count: usize, rounds: usize, timed: [Vec<Duration>; 2]) {
    let both = timed[0].iter().zip(&timed[1]).map(|(a, b)| *a + *b).collect();
    let [fetching, releasing] = timed.map(Measured::of);
    let us = |measured: &Measured| measured.median.as_secs_f64() * 1e6;
    println!(
        "{label:>10} {rounds:>8} {:>8} {:>10.2} {:>10.2} {:>24}",
        rounds * count,
        us(&fetching),
        us(&releasing),
        Measured::of(both).precise()
    );
}

/// Times `rounds` times the fetch and the release of `count` live samples, each a sample.
///
/// Without a warm-up each round begins with every thread asleep.
fn rounds_of(
    engine: Engine,
    count: usize,
    rounds: usize,
    warm_up: usize,
    evict: &mut [u8],
) -> [Vec<Duration>; 2] {
    let sink = sink((count + warm_up * CALL) * 4608 + MIB);
    let consumer = consumer(engine, 8 * MIB);
    consumer.announce(sink.control(), soon()).expect("announce");
    let fetch_call = |call: &[Arc<Descriptor>]| {
        let requests =
            call.iter().map(|s| FetchRequest::new(s.clone(), Destination::Pool)).collect();
        let fetched = consumer.fetch_blocking(requests, &FetchOptions::default());
        black_box(fetched.expect("fetch"));
    };
    let mut timed = [Vec::with_capacity(rounds), Vec::with_capacity(rounds)];
    for round in 0..=rounds {
        let mut live = publish(&sink, count + warm_up * CALL, &[4 * KIB], Some(&consumer));
        let others = live.split_off(count);
        evict.iter_mut().step_by(64).for_each(|byte| *byte = byte.wrapping_add(1));
        black_box(&mut *evict);
        if warm_up == 0 {
            std::thread::sleep(Duration::from_millis(20));
        }
        for call in others.chunks(CALL) {
            fetch_call(call);
            release(&consumer, call);
        }
        let start = Instant::now();
        live.chunks(CALL).for_each(fetch_call);
        let fetched = start.elapsed() / count as u32;
        let start = Instant::now();
        live.chunks(CALL).for_each(|call| release(&consumer, call));
        let released = start.elapsed() / count as u32;
        if round > 0 {
            timed[0].push(fetched);
            timed[1].push(released);
        }
    }
    timed
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
