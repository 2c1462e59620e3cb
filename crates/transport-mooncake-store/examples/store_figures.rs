//! The store transport beside Mooncake's own Python client: same run, same master, same memory
//! provider, turn by turn.
//!
//! ```text
//! FEATURESTORE_MOONCAKE_VENV=… cargo run --release -p transport-mooncake-store \
//!     --features mooncake-python --example store_figures -- [ROUNDS]
//! ```
//!
//! Three processes on loopback tcp: one provides object memory, one is the Python client, this one
//! the Rust client. All buffers are registered and touched before; every get is compared with what
//! was put, outside the measured time.

use std::{
    collections::BTreeMap,
    error::Error,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use indexmap::IndexMap;
use mooncake_sys::{
    StoreSetup,
    master::{ManagedMaster, MasterOptions},
    python::{WheelOptions, WheelStore},
};
use transport_core::{
    ByteSize, Destination, Dtype, FeatureName, FetchOptions, FetchRequest, Generation, Publication,
    PublishOptions, Ready, Result, SampleId, SampleKey, StoreId, Tensor, TensorMeta, Transport,
};
use transport_mooncake_store::{Layout, StoreConfig, StoreTransport};

const WARM_UP: usize = 2;
const HIDDEN: u64 = 512;
const SEGMENT: u64 = 768 << 20;

type AnyResult<T> = std::result::Result<T, Box<dyn Error>>;
/// Seconds of put, get and remove, of every round.
type Times = BTreeMap<(&'static str, &'static str, &'static str), Vec<f64>>;

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
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/client.py"))
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

/// One case's sources in registered memory.
struct Prepared {
    batch: Vec<IndexMap<FeatureName, Tensor>>,
}

fn sample(serial: usize, i: usize) -> Result<SampleKey> {
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

async fn run(transport: &StoreTransport, case: &Prepared, serial: usize) -> AnyResult<[f64; 3]> {
    let publications =
        case.batch.iter().enumerate().map(|(i, tensors)| {
            Ok(Publication::new(sample(serial, i)?, tensors.clone(), Ready::Now))
        });
    let publications = publications.collect::<Result<Vec<_>>>()?;
    let start = Instant::now();
    let described = transport.publish(publications, PublishOptions::default()).await?;
    let put = start.elapsed().as_secs_f64();
    let described: Vec<_> = described.into_iter().map(Arc::new).collect();
    let request = |d: &Arc<_>| FetchRequest::new(Arc::clone(d), Destination::Pool);
    let requests = described.iter().map(request).collect();
    let start = Instant::now();
    let fetched = transport.fetch(requests, FetchOptions::default()).await?;
    let get = start.elapsed().as_secs_f64();
    let releases = described.into_iter().map(Into::into).collect();
    let start = Instant::now();
    let report = transport.release(releases).await?;
    let remove = start.elapsed().as_secs_f64();
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
    Ok([put, get, remove])
}

#[tokio::main]
async fn main() -> AnyResult<()> {
    let rounds: usize = std::env::args().nth(1).map_or(Ok(7), |n| n.parse())?;
    let venv = std::env::var_os("FEATURESTORE_MOONCAKE_VENV").map(PathBuf::from);
    let venv = venv.ok_or("set FEATURESTORE_MOONCAKE_VENV: cargo xtask mooncake-venv makes one")?;
    if std::env::var("MC_TCP_BIND_ADDRESS").is_err() {
        return Err("set MC_TCP_BIND_ADDRESS=127.0.0.1: Mooncake listens everywhere else".into());
    }
    let master = ManagedMaster::start(&MasterOptions::of_environment(&venv))?;
    let address = master.address().to_string();
    let _provider = Python::start(&venv, &address, SEGMENT)?;
    let mut python = Python::start(&venv, &address, 0)?;
    let layouts = [
        ("rust", Layout::PerTensor),
        ("rust, grouped", Layout::Grouped { below: ByteSize::mib(1) }),
    ];
    let options = WheelOptions::at(&venv);
    let mut rust = Vec::new();
    for (name, layout) in layouts {
        let setup = StoreSetup::client("127.0.0.1", &address);
        let api = Arc::new(WheelStore::connect(&options, &setup)?);
        let config =
            StoreConfig::default().layout(layout).pool(ByteSize::mib(1024), ByteSize::mib(512));
        rust.push((name, StoreTransport::start(api, config)?));
    }
    println!("{}", rust[0].1.info().engine);

    let mut times = Times::new();
    let mut serial = 0;
    for case in cases() {
        let sizes: Vec<String> = case.samples.iter().flatten().map(u64::to_string).collect();
        let name = case.name;
        python.ask(&format!(
            r#"{{"cmd":"prepare","case":"{name}","sizes":[{}]}}"#,
            sizes.join(",")
        ))?;
        let mut prepared = Vec::new();
        for (who, transport) in &rust {
            prepared.push((who, transport, prepare(transport, &case)?));
        }
        for round in 0..WARM_UP + rounds {
            let mut note = |who, result: [f64; 3]| {
                if round >= WARM_UP {
                    for (call, seconds) in ["put", "get", "remove"].into_iter().zip(result) {
                        times.entry((name, call, who)).or_default().push(seconds);
                    }
                }
            };
            note("python, batch", python.run(name, true)?);
            if case.one_at_a_time {
                note("python, one at a time", python.run(name, false)?);
            }
            for (who, transport, prepared) in &prepared {
                serial += 1;
                let before = transport.stats();
                note(who, run(transport, prepared, serial).await?);
                let after = transport.stats();
                if round >= WARM_UP && before.registrations != after.registrations {
                    return Err("memory was registered on the hot path".into());
                }
                if before.copied_bytes != after.copied_bytes {
                    return Err("payload was copied on its way".into());
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let bytes: u64 = case.samples.iter().flatten().sum();
        for call in ["put", "get", "remove"] {
            for who in ["python, one at a time", "python, batch", "rust", "rust, grouped"] {
                let Some(seconds) = times.get_mut(&(name, call, who)) else { continue };
                seconds.sort_by(f64::total_cmp);
                let median = seconds[seconds.len() / 2];
                let rate = match call {
                    "remove" => String::new(),
                    _ => format!("{:8.2} GB/s", bytes as f64 / median / 1e9),
                };
                println!("{name:16} {call:6} {who:22} {:10.3} ms {rate}", median * 1e3);
            }
        }
    }
    let left = master.metric("master_key_count")?;
    println!("objects left in the master: {left}; rounds: {rounds}, medians");
    for (_, transport) in rust {
        transport.close().await?;
    }
    drop(python);
    master.stop();
    Ok(())
}
