//! The store transport beside Mooncake's own Python client: same run, same master, same memory
//! provider, turn by turn.
//!
//! ```text
//! cargo xtask bench store, or FEATURESTORE_MOONCAKE_VENV=… cargo run --release -p featurestore-benches \
//!     --features mooncake-python --example store_figures -- [ROUNDS]
//! ```
//!
//! Three processes on loopback tcp: one provides object memory, one is the Python client, this one
//! the Rust client. All buffers are registered and touched before; every get is compared with what
//! was put, outside the measured time. Who begins a round changes from round to round.
//!
//! The Rust client three times: as it is configured by default (reads by the native tcp engine),
//! with reads through Mooncake's engine, and with small tensors grouped.
//!
//! Each line gives the median, the range from the tenth to the ninetieth percentile, and for the
//! Rust client, where its calls come one after the other, the median time outside of them.

use std::{
    collections::BTreeMap,
    error::Error,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use indexmap::IndexMap;
use mooncake_sys::{
    SegmentReader, StoreSetup,
    master::{ManagedMaster, MasterOptions},
    python::{WheelOptions, WheelStore},
};
use transport_core::{
    ByteSize, Destination, Dtype, FeatureName, FetchOptions, FetchRequest, Generation, Publication,
    PublishOptions, Ready, Result, SampleId, SampleKey, StoreId, Tensor, TensorMeta, Transport,
};
use transport_mooncake_direct::{TcpEngine, TcpOptions};
use transport_mooncake_store::{Layout, StoreConfig, StoreTransport};

const WARM_UP: usize = 2;
const HIDDEN: u64 = 512;
const SEGMENT: u64 = 768 << 20;

type AnyResult<T> = std::result::Result<T, Box<dyn Error>>;
/// Seconds of put, get and remove, of every round.
type Times = BTreeMap<(&'static str, &'static str, &'static str), Vec<f64>>;

const BATCH: &str = "python, batch";
const ONE_BY_ONE: &str = "python, one at a time";
const RUST: &str = "rust";
const ENGINE: &str = "rust, Mooncake's engine";
const GROUPED: &str = "rust, grouped";
const CALLS: [&str; 3] = ["put", "get", "remove"];

/// A shape to measure: the tensors of each sample, in bytes.
struct Case {
    name: &'static str,
    samples: Vec<Vec<u64>>,
    one_at_a_time: bool, // also measured in Python, as trainers do it today
}

fn cases() -> Vec<Case> {
    let mut state = 9u64;
    let mut next = move || {
        // splitmix64
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    let capture = (0..512)
        .map(|_| {
            let n = 16 + next() % 97;
            vec![n * 3 * HIDDEN * 2, n * HIDDEN * 2, n * 8, n * 8]
        })
        .collect();
    vec![
        Case { name: "4 KiB", samples: vec![vec![4 << 10]], one_at_a_time: false },
        Case { name: "1 MiB", samples: vec![vec![1 << 20]], one_at_a_time: false },
        Case { name: "64 MiB", samples: vec![vec![64 << 20]], one_at_a_time: false },
        Case { name: "512 x 4 capture", samples: capture, one_at_a_time: true },
    ]
}

/// A Python process; ended when dropped.
struct Python {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Python {
    fn start(venv: &std::path::Path, master: &str, segment: u64) -> AnyResult<Self> {
        let mut child = Command::new(venv.join("bin/python"))
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/python/mooncake_store.py"))
            .args([master, &segment.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let input = child.stdin.take().ok_or("no standard input")?;
        let output = BufReader::new(child.stdout.take().ok_or("no standard output")?);
        let mut python = Self { child, input, output };
        if python.answer()? != r#"{"setup": 0}"# {
            return Err("the Python client did not start".into());
        }
        Ok(python)
    }

    fn answer(&mut self) -> AnyResult<String> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.output.read_line(&mut line)? == 0 {
                return Err("the Python client ended".into());
            }
            if let Some(answer) = line.trim().strip_prefix("@@") {
                return Ok(answer.to_owned());
            }
        }
    }

    fn ask(&mut self, request: &str) -> AnyResult<String> {
        writeln!(self.input, "{request}")?;
        self.answer()
    }

    /// Seconds of put, get and remove.
    fn run(&mut self, case: &str, batch: bool) -> AnyResult<[f64; 3]> {
        let answer = self.ask(&format!(r#"{{"cmd":"run","case":"{case}","batch":{batch}}}"#))?;
        let number = |name: &str| -> AnyResult<f64> {
            let (_, rest) = answer.split_once(&format!("\"{name}\": ")).ok_or("bad answer")?;
            Ok(rest.split([',', '}']).next().ok_or("bad answer")?.parse()?)
        };
        Ok([number("put")?, number("get")?, number("remove")?])
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.child.kill(); // fails only if it ended already
        let _ = self.child.wait();
    }
}

/// A Rust client and what it is called.
struct Rust {
    name: &'static str,
    transport: StoreTransport,
}

/// One case's sources in registered memory.
struct Prepared {
    batch: Vec<IndexMap<FeatureName, Tensor>>,
}

fn sample(serial: u64, i: usize) -> Result<SampleKey> {
    let id = SampleId::new(format!("{serial}:{i}"))?;
    Ok(SampleKey::new(StoreId::new("rust")?, id, Generation(1)))
}

fn prepare(transport: &StoreTransport, case: &Case) -> Result<Prepared> {
    let mut batch = Vec::new();
    for (i, sizes) in case.samples.iter().enumerate() {
        let metas = sizes
            .iter()
            .enumerate()
            .map(|(t, &len)| {
                // Two bytes an element in front, eight behind, as captures are.
                let (dtype, size) = if t < 2 { (Dtype::Bfloat16, 2) } else { (Dtype::Int64, 8) };
                Ok((FeatureName::new(format!("t{t}"))?, TensorMeta::new(dtype, [1, len / size])?))
            })
            .collect::<Result<Vec<_>>>()?;
        let regions = transport.take_sample(&sample(0, i)?, &metas)?;
        let mut tensors = IndexMap::new();
        for ((name, meta), mut region) in metas.into_iter().zip(regions) {
            for (n, byte) in region.as_mut_bytes().into_iter().flatten().enumerate() {
                *byte = (n as u8).wrapping_mul(31).wrapping_add(i as u8);
            }
            tensors.insert(name, Tensor::new(meta, region.freeze())?);
        }
        batch.push(tensors);
    }
    Ok(Prepared { batch })
}

/// Seconds of put, get and remove, and of them those outside of Mooncake's own calls.
async fn run(rust: &Rust, case: &Prepared) -> AnyResult<([f64; 3], [f64; 3])> {
    static SERIAL: AtomicU64 = AtomicU64::new(1);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let transport = &rust.transport;
    let mut before = transport.stats().in_calls;
    let mut outside = |whole: f64| {
        let inside = transport.stats().in_calls;
        whole - (inside - std::mem::replace(&mut before, inside)).as_secs_f64()
    };
    let publications =
        case.batch.iter().enumerate().map(|(i, tensors)| {
            Ok(Publication::new(sample(serial, i)?, tensors.clone(), Ready::Now))
        });
    let publications = publications.collect::<Result<Vec<_>>>()?;
    let start = Instant::now();
    let described = transport.publish(publications, PublishOptions::default()).await?;
    let put = start.elapsed().as_secs_f64();
    let put_outside = outside(put);
    let described: Vec<_> = described.into_iter().map(Arc::new).collect();
    let request = |d: &Arc<_>| FetchRequest::new(Arc::clone(d), Destination::Pool);
    let requests = described.iter().map(request).collect();
    let start = Instant::now();
    let fetched = transport.fetch(requests, FetchOptions::default()).await?;
    let get = start.elapsed().as_secs_f64();
    let get_outside = outside(get);
    let releases = described.into_iter().map(Into::into).collect();
    let start = Instant::now();
    let report = transport.release(releases).await?;
    let remove = start.elapsed().as_secs_f64();
    let remove_outside = outside(remove);
    if report.released != case.batch.len() as u64 {
        return Err(format!("not all released: {report:?}").into());
    }
    for (found, put) in fetched.iter().zip(&case.batch) {
        let equal = found.tensors.iter().all(|(name, tensor)| {
            put.get(name).is_some_and(|put| put.data.as_bytes() == tensor.data.as_bytes())
        });
        if !equal {
            return Err("the data differs".into());
        }
    }
    Ok(([put, get, remove], [put_outside, get_outside, remove_outside]))
}

#[tokio::main]
async fn main() -> AnyResult<()> {
    let rounds: usize = std::env::args().nth(1).map_or(Ok(15), |n| n.parse())?;
    let venv = std::env::var_os("FEATURESTORE_MOONCAKE_VENV").map(PathBuf::from);
    let venv = venv.ok_or("set FEATURESTORE_MOONCAKE_VENV: cargo xtask mooncake-venv makes one")?;
    if std::env::var_os("MC_FORCE_TCP").is_none() {
        return Err("set MC_FORCE_TCP=1: else the devices of the machine decide".into());
    }
    let master = ManagedMaster::start(&MasterOptions::of_environment(&venv))?;
    let address = master.address().to_string();
    let _provider = Python::start(&venv, &address, SEGMENT)?;
    let mut python = Python::start(&venv, &address, 0)?;
    let grouped = Layout::Grouped { below: ByteSize::mib(1) };
    let contenders = [
        (RUST, Layout::PerTensor, true),
        (ENGINE, Layout::PerTensor, false),
        (GROUPED, grouped, true),
    ];
    let options = WheelOptions::at(&venv);
    let mut rust = Vec::new();
    for (name, layout, is_native) in contenders {
        let setup = StoreSetup::client("127.0.0.1", &address);
        let api = Arc::new(WheelStore::connect(&options, &setup)?);
        let pool = ByteSize::mib(512);
        let config = StoreConfig::default().layout(layout).pool(pool, pool);
        let reader = || Arc::new(TcpEngine::new(TcpOptions::default())) as Arc<dyn SegmentReader>;
        let transport = StoreTransport::start_with(api, config, is_native.then(reader))?;
        rust.push(Rust { name, transport });
    }
    for one in &rust {
        println!("{}: {}", one.name, one.transport.info().engine);
    }
    println!("{rounds} rounds");

    let (mut times, mut outside) = (Times::new(), Times::new());
    for case in cases() {
        measure(&case, rounds, &mut python, &rust, &mut times, &mut outside).await?;
        print(&case, &mut times, &mut outside);
    }
    judge(&mut times);
    println!("objects left in the master: {}", master.metric("master_key_count")?);
    for one in rust {
        one.transport.close().await?;
    }
    drop(python);
    master.stop();
    Ok(())
}

async fn measure(
    case: &Case,
    rounds: usize,
    python: &mut Python,
    rust: &[Rust],
    times: &mut Times,
    outside: &mut Times,
) -> AnyResult<()> {
    let sizes: Vec<String> = case.samples.iter().flatten().map(u64::to_string).collect();
    let name = case.name;
    python.ask(&format!(r#"{{"cmd":"prepare","case":"{name}","sizes":[{}]}}"#, sizes.join(",")))?;
    let prepared =
        rust.iter().map(|one| prepare(&one.transport, case)).collect::<Result<Vec<_>>>()?;
    let contenders = 2 + rust.len();
    for round in 0..WARM_UP + rounds {
        for turn in 0..contenders {
            let (who, seconds, beside) = match (round + turn) % contenders {
                0 => (BATCH, python.run(name, true)?, None),
                1 if case.one_at_a_time => (ONE_BY_ONE, python.run(name, false)?, None),
                1 => continue,
                n => {
                    let one = &rust[n - 2];
                    let before = one.transport.stats();
                    let (seconds, beside) = run(one, &prepared[n - 2]).await?;
                    let after = one.transport.stats();
                    if round >= WARM_UP && before.registrations != after.registrations {
                        return Err("memory was registered on the hot path".into());
                    }
                    if before.copied_bytes != after.copied_bytes {
                        return Err("payload was copied on its way".into());
                    }
                    (one.name, seconds, Some(beside))
                }
            };
            if round >= WARM_UP {
                for (i, call) in CALLS.into_iter().enumerate() {
                    times.entry((name, call, who)).or_default().push(seconds[i]);
                    if let Some(beside) = beside {
                        outside.entry((name, call, who)).or_default().push(beside[i]);
                    }
                }
            }
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// The value below which this part of all values lies.
fn percentile(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * part).round() as usize]
}

fn print(case: &Case, times: &mut Times, outside: &mut Times) {
    let bytes: u64 = case.samples.iter().flatten().sum();
    for call in CALLS {
        for who in [ONE_BY_ONE, BATCH, RUST, ENGINE, GROUPED] {
            let key = (case.name, call, who);
            let Some(seconds) = times.get_mut(&key) else { continue };
            let [low, median, high] = [0.1, 0.5, 0.9].map(|part| percentile(seconds, part));
            let rate = match call {
                "remove" => String::new(),
                _ => format!("{:6.2} GB/s", bytes as f64 / median / 1e9),
            };
            // Calls that ran side by side count more than the time that passed.
            let beside = outside.get_mut(&key).map(|seconds| percentile(seconds, 0.5));
            let beside = beside
                .filter(|&seconds| seconds >= 0.0)
                .map_or_else(String::new, |s| format!("   {:.3} ms outside of the calls", s * 1e3));
            println!(
                "{:16} {call:6} {who:23} {:9.3} ms ({:.3} to {:.3}) {rate}{beside}",
                case.name,
                median * 1e3,
                low * 1e3,
                high * 1e3
            );
        }
    }
}

/// Compares medians with what is aimed at.
fn judge(times: &mut Times) {
    let mut median = |case, call, who| {
        times.get_mut(&(case, call, who)).map_or(f64::NAN, |seconds| percentile(seconds, 0.5))
    };
    let capture = "512 x 4 capture";
    for (what, case, call, who, least) in [
        ("64 MiB put, Rust against Python", "64 MiB", "put", RUST, 1.0),
        ("64 MiB get, Rust against Python", "64 MiB", "get", RUST, 1.0),
        ("2,048 keys put, one object a tensor", capture, "put", RUST, 1.0),
        ("2,048 keys get, one object a tensor", capture, "get", RUST, 1.0),
        ("2,048 tensors put, grouped", capture, "put", GROUPED, 1.3),
        ("2,048 tensors get, grouped", capture, "get", GROUPED, 1.3),
    ] {
        let times = median(case, call, BATCH) / median(case, call, who);
        let met = if times >= least { "met" } else { "missed" };
        println!("{what:38} {times:5.2} times as fast, wanted {least}: {met}");
    }
    let removal = median(capture, "remove", RUST) * 1e3;
    let met = if removal <= 10.0 { "met" } else { "missed" };
    println!("{:38} {removal:5.2} ms, wanted at most 10: {met}", "2,048 keys removed");
}
