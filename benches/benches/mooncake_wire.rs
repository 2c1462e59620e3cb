//! The native tcp engine against Mooncake's own transfer engine, and every mixture of the two.
//!
//! `cargo bench -p featurestore-benches --bench mooncake_wire`, or `cargo xtask bench mooncake_wire`
//!
//! Every end is a process of its own on loopback. All pairs of ends read the same amounts in turn,
//! round after round; medians and the spread between the quartiles are printed. Mooncake's times are
//! taken in its process around its own calls, so that nothing of ours is in them. It needs the
//! released wheel: in FEATURESTORE_MOONCAKE_VENV, or where `cargo xtask mooncake-venv` puts it.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use capture_arena::{Arena, ArenaConfig, Backing, ReserveOptions, SamplePlan};
use serde_json::{Value, json};
use transport_core::{
    Dtype, FeatureName, Generation, RegionMut, RemoteAddr, SampleId, SampleKey, SessionName,
    StoreId, TensorMeta,
};
use transport_mooncake_direct::{
    CaptureSink, ReadOp, ReadOptions, SinkConfig, TcpEngine, TcpOptions,
};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const SERVED: usize = 128 * MIB;
/// Pieces, bytes of each, calls a round.
const LOADS: [(usize, usize, usize); 3] =
    [(1, 64 * MIB, 3), (1, 4 * KIB, 300), (512, 256 * KIB, 3)];
const ROUNDS: usize = 9;
const PAIRS: [&str; 5] = ["socket", "rust<-rust", "mc<-mc", "rust<-mc", "mc<-rust"];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.iter().any(|arg| arg == "--serve") {
        return serve();
    }
    // `cargo test --benches` runs this too, to see that it starts.
    if !args.iter().any(|arg| arg == "--bench") {
        println!("mooncake_wire: run with `cargo bench`");
        return;
    }
    let venv = std::env::var_os("FEATURESTORE_MOONCAKE_VENV").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/mooncake-venv"),
        PathBuf::from,
    );
    let python = venv.join("bin/python");
    if !python.exists() {
        println!("mooncake_wire: not run, there is no wheel: cargo xtask mooncake-venv");
        return;
    }
    compare(&python);
}

fn compare(python: &Path) {
    let mut ours = End::rust();
    let mut theirs = End::mooncake(python);
    let mut reader = End::mooncake(python);
    let own = reader.ask(&json!({"do": "register", "size": SERVED}))["address"].clone();
    let their_memory = theirs.ask(&json!({"do": "register", "size": SERVED}))["address"]
        .as_u64()
        .expect("an address");
    let engine = TcpEngine::new(TcpOptions::default());
    let mut socket = Socket::connect(&ours.hello["socket"]);
    let session = |end: &End| end.hello["session"].as_str().expect("a session").to_owned();
    let (our_session, their_session) = (session(&ours), session(&theirs));

    println!("\ntcp on loopback, reader<-owner; each end a process; medians of {ROUNDS} rounds");
    println!("{:>14} {:>12} {:>14} {:>12} {:>20} {:>8}", "", "", "median", "GB/s", "quartiles", "");
    for (count, size, calls) in LOADS {
        let total = count * size;
        let published = ours.ask(&json!({"count": count, "size": size}));
        let published: Vec<u64> = serde_json::from_value(published).expect("addresses");
        let registered: Vec<u64> = (0..count).map(|i| their_memory + (i * size) as u64).collect();
        let mut ops: Vec<_> = (0..count)
            .map(|_| ReadOp::new(RemoteAddr(0), RegionMut::zeroed(size).expect("memory")))
            .collect();
        let mut buffer = vec![0; total];
        let mut took = PAIRS.map(|_| Vec::new());
        for round in 0..=ROUNDS {
            for (pair, took) in PAIRS.iter().zip(&mut took) {
                let times = match *pair {
                    "socket" => timed(calls, || socket.read(&mut buffer)),
                    "rust<-rust" => native(&engine, &our_session, &mut ops, &published, calls),
                    "rust<-mc" => native(&engine, &their_session, &mut ops, &registered, calls),
                    "mc<-mc" => {
                        mooncake(&mut reader, &their_session, &own, &registered, size, calls)
                    }
                    _ => mooncake(&mut reader, &our_session, &own, &published, size, calls),
                };
                // The first round opens connections and touches pages.
                if round > 0 {
                    took.extend(times);
                }
            }
        }
        report(count, size, took);
    }
}

fn report(count: usize, size: usize, mut took: [Vec<Duration>; PAIRS.len()]) {
    let total = (count * size) as f64;
    took.iter_mut().for_each(|times| times.sort());
    let at = |times: &[Duration], part: usize| times[times.len() * part / 4];
    let median = |pair: &str| {
        let i = PAIRS.iter().position(|known| *known == pair).expect("a pair");
        at(&took[i], 2).as_secs_f64()
    };
    let label = match count {
        1 => bytes(size),
        _ => format!("{count} x {}", bytes(size)),
    };
    for (pair, times) in PAIRS.iter().zip(&took) {
        let middle = at(times, 2).as_secs_f64();
        println!(
            "{label:>14} {pair:>12} {:>11.1} us {:>12.2} {:>8.0} .. {:>5.0} us",
            middle * 1e6,
            total / middle / 1e9,
            at(times, 1).as_secs_f64() * 1e6,
            at(times, 3).as_secs_f64() * 1e6,
        );
    }
    let speed = median("mc<-mc") / median("rust<-rust");
    let (what, figure, target, met) = match (count, size) {
        (1, size) if size <= 64 * KIB => {
            ("latency, ours to Mooncake's", 1.0 / speed, "<= 0.4", speed >= 2.5)
        }
        (1, _) => ("throughput, ours to Mooncake's", speed, ">= 1.5", speed >= 1.5),
        _ => ("throughput, ours to its batch", speed, ">= 1.1", speed >= 1.1),
    };
    let met = if met { "met" } else { "NOT met" };
    println!("{label:>14} {what}: {figure:.2} (target {target}: {met})\n");
}

fn native(
    engine: &TcpEngine,
    session: &str,
    ops: &mut [ReadOp],
    addresses: &[u64],
    calls: usize,
) -> Vec<Duration> {
    let session: SessionName = session.parse().expect("a session");
    for (op, address) in ops.iter_mut().zip(addresses) {
        op.address = RemoteAddr(*address);
    }
    timed(calls, || engine.read(&session, ops, &ReadOptions::default()).expect("read"))
}

fn mooncake(
    reader: &mut End,
    session: &str,
    own: &Value,
    addresses: &[u64],
    size: usize,
    calls: usize,
) -> Vec<Duration> {
    let answer = reader.ask(&json!({
        "do": "read", "session": session, "own": own, "addresses": addresses, "size": size,
        "times": calls
    }));
    assert_eq!(answer["code"], 0, "Mooncake reads from {session}");
    let took = answer["took"].as_array().expect("times").iter();
    took.map(|nanos| Duration::from_nanos(nanos.as_u64().expect("nanoseconds"))).collect()
}

fn timed(calls: usize, mut call: impl FnMut()) -> Vec<Duration> {
    (0..calls)
        .map(|_| {
            let start = Instant::now();
            call();
            start.elapsed()
        })
        .collect()
}

fn bytes(size: usize) -> String {
    if size >= MIB { format!("{} MiB", size / MIB) } else { format!("{} KiB", size / KIB) }
}

/// A process at one end; ended when dropped.
struct End {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    hello: Value,
}

impl End {
    fn rust() -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.arg("--serve");
        let mut end = Self::start(command);
        end.hello = end.answer();
        end
    }

    fn mooncake(python: &Path) -> Self {
        let mut command = Command::new(python);
        command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("python/mooncake_end.py"));
        command.envs([("MC_TCP_BIND_ADDRESS", "127.0.0.1"), ("MC_FORCE_TCP", "1")]);
        command.envs([("MC_LOG_LEVEL", "ERROR"), ("GLOG_minloglevel", "3")]).stderr(Stdio::null());
        let mut end = Self::start(command);
        end.hello = end.ask(&json!({"do": "start"}));
        assert_eq!(end.hello["code"], 0, "Mooncake starts");
        end
    }

    fn start(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("starts");
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, input, output, hello: Value::Null }
    }

    fn ask(&mut self, request: &Value) -> Value {
        writeln!(self.input, "{request}").expect("it listens");
        self.answer()
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("it answers");
        serde_json::from_str(&line).expect("it answers in JSON")
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What loopback gives: asks for a number of bytes and receives them.
struct Socket(TcpStream);

impl Socket {
    fn connect(address: &Value) -> Self {
        let stream = TcpStream::connect(address.as_str().expect("an address")).expect("connects");
        stream.set_nodelay(true).expect("a socket");
        Self(stream)
    }

    fn read(&mut self, buffer: &mut [u8]) {
        self.0.write_all(&(buffer.len() as u64).to_le_bytes()).expect("sends");
        self.0.read_exact(buffer).expect("receives");
    }
}

/// Our end: publishes what it is asked for, and serves a plain socket beside it.
fn serve() {
    let backing = Backing::shared(SERVED as u64 + 8 * MIB as u64).expect("memory");
    let arena = Arena::start(backing, ArenaConfig::default()).expect("an arena");
    let sink = CaptureSink::start(arena, SinkConfig::default()).expect("a sink");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let socket = listener.local_addr().expect("a port").to_string();
    std::thread::spawn(move || {
        let memory = vec![7u8; SERVED];
        let (mut stream, _) = listener.accept().expect("a connection");
        stream.set_nodelay(true).expect("a socket");
        let mut length = [0; 8];
        while stream.read_exact(&mut length).is_ok() {
            let length = u64::from_le_bytes(length) as usize;
            if stream.write_all(&memory[..length]).is_err() {
                return;
            }
        }
    });
    println!("{}", json!({"session": sink.session().to_string(), "socket": socket}));
    let mut generation = 0;
    for line in std::io::stdin().lines() {
        let request: Value = serde_json::from_str(&line.expect("text")).expect("JSON");
        let number = |name: &str| request[name].as_u64().expect("a number");
        generation += 1;
        let addresses = publish(&sink, generation, number("count"), number("size"));
        println!("{}", json!(addresses));
    }
}

/// Replaces what is published by samples of one tensor each.
fn publish(sink: &CaptureSink, generation: u64, count: u64, size: u64) -> Vec<u64> {
    let key = |sample: u64, generation| {
        let store = StoreId::new("bench").expect("a name");
        let sample = SampleId::new(format!("s{sample}")).expect("a name");
        SampleKey::new(store, sample, Generation(generation))
    };
    let name = FeatureName::new("t").expect("a name");
    for sample in 0..512 {
        let object = key(sample, generation - 1).object(&name).shared();
        sink.arena().free(capture_arena::FreeRequest {
            client: None,
            objects: vec![(object, None)].into(),
            reply: None,
        });
    }
    let plan = |sample| SamplePlan {
        sample: key(sample, generation),
        objects: vec![(name.clone(), TensorMeta::new(Dtype::Uint8, [size]).expect("a shape"))],
        holder: None,
    };
    let options = ReserveOptions::default().deadline(Duration::from_secs(20));
    let mut reservation =
        sink.reserve_blocking((0..count).map(plan).collect(), options).expect("room");
    for sample in 0..count as usize {
        reservation.bytes_mut(sample, 0).fill(7);
    }
    let published = reservation.publish_blocking().expect("published");
    published.iter().map(|sample| sample.features[0].address.expect("an address").0).collect()
}
