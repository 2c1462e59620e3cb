//! Puts here, gets in another process, both timed.

use std::{
    io::{BufRead, BufReader, Write},
    num::NonZeroUsize,
    process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use clap::Args;
use featurestore::{
    rollout::{Endpoint, payload_checksums},
    server::end_of_life,
};
use rollout_codec::{
    Column,
    transport::{Handle, Sample, Verify},
};
use serde_json::{Value, json};
use transport_core::{ByteSize, Result};

use super::{
    InputArgs, TransportArgs, encoding,
    exchange::{millis, unexpected},
    open, prepare,
};
use crate::cli::{runtime, say};

/// Memory that each side may take beside the payload.
const MEMORY_BESIDE: u64 = 64 << 20;
/// Longest time that the reader may take for one step.
const STEP: Duration = Duration::from_secs(300);

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    input: InputArgs,
    #[command(flatten)]
    transport: TransportArgs,
    /// Memory that this process adds; three times the payload if not given.
    #[arg(long)]
    memory: Option<ByteSize>,
    /// Timed repeats.
    #[arg(long, default_value = "7")]
    reps: NonZeroUsize,
    /// Repeats before them.
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Leaves checksums out, on both sides.
    #[arg(long)]
    no_checksums: bool,
    /// One JSON line for each measurement rather than a table.
    #[arg(long)]
    json: bool,
    /// Fails where the data was copied more than once a put, or at all by a get, or where either
    /// side took more memory than the payload and 64 MiB.
    #[arg(long)]
    check: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ReaderArgs {
    #[command(flatten)]
    transport: TransportArgs,
    /// Compares no checksums.
    #[arg(long)]
    no_checksums: bool,
}

pub(super) fn run(args: &BenchArgs) -> Result<ExitCode> {
    let mut options = args.transport.options(args.memory)?;
    let input = args.input.input();
    prepare(&options)?;
    let rollout = input.rollout()?;
    let expected = payload_checksums(&rollout)?;
    let payload: u64 = expected
        .iter()
        .map(|(name, _, elements)| {
            elements * rollout.non_tensor[name].dtype().map_or(1, |d| d.size())
        })
        .sum();
    options.memory = options.memory.or(ByteSize::new(3 * payload + (64 << 20)));
    options.rollouts = options.rollouts.encoding(encoding(&[], !args.no_checksums));
    let base = begin_peak();
    let outcome = runtime(2, 8)?.block_on(async {
        let endpoint = open(options).await?;
        let rollouts = endpoint.rollouts();
        let mut reader = Reader::start(args)?;
        let mut times: [Vec<Duration>; 3] = Default::default();
        let mut last = Value::Null;
        let mut data_bytes = 0;
        for round in 0..args.warmup + args.reps.get() {
            let copy = rollout.clone(); // counts, not bytes
            let start = Instant::now();
            let handle = rollouts.put(copy).await?;
            let put = start.elapsed();
            data_bytes = handle.data_bytes();
            let is_last = round + 1 == args.warmup + args.reps.get();
            let answer = reader.ask(&handle, is_last)?;
            let time = |name: &str| -> Result<Duration> {
                let millis = answer[name].as_f64().filter(|ms| *ms >= 0.0);
                let millis = millis.ok_or_else(|| missing(name))?;
                Ok(Duration::from_secs_f64(millis / 1e3))
            };
            let (get, consume) = (time("get_ms")?, time("consume_ms")?);
            rollouts.cleanup([&handle]).await?;
            if round >= args.warmup {
                for (times, time) in times.iter_mut().zip([put, get, consume]) {
                    times.push(time);
                }
            }
            last = answer;
        }
        let sums: Vec<(String, u64, u64)> = serde_json::from_value(last["sums"].clone())
            .map_err(|e| unexpected("the reader gave no checksums").source(e))?;
        if sums != expected {
            return Err(unexpected("what the reader got is not what was put"));
        }
        reader.end()?;
        let counters = report(args, &input, payload, times, &endpoint, (base, data_bytes, &last))?;
        endpoint.close().await?;
        let is_well = counters["extra_copied_bytes"] == 0 && counters["within_peak_limit"] == true;
        match args.check && !is_well {
            true => Err(unexpected("a copy too many, or too much memory: see the counters")),
            false => Ok(()),
        }
    });
    outcome.map(|()| ExitCode::SUCCESS)
}

fn missing(name: &str) -> transport_core::Error {
    unexpected("the reader's answer lacks a figure").with("missing", name)
}

fn report(
    args: &BenchArgs,
    input: &featurestore::rollout::Input,
    payload: u64,
    [puts, gets, consumes]: [Vec<Duration>; 3],
    endpoint: &Endpoint,
    (base, data_bytes, reader): (Option<u64>, u64, &Value),
) -> Result<Value> {
    let stats = endpoint.rollouts().stats();
    let info = endpoint.rollouts().info();
    let both: Vec<Duration> = puts.iter().zip(&gets).map(|(a, b)| *a + *b).collect();
    let mut times = Vec::new();
    for (step, list) in [("put", puts), ("get", gets), ("put+get", both), ("consume", consumes)] {
        let mut sorted = list;
        sorted.sort_unstable();
        let Some(median) = sorted.get(sorted.len() / 2) else { continue };
        times.push(json!({
            "bench": "featurestore rollout",
            "transport": info.scheme,
            "engine": info.engine,
            "step": step,
            "bytes": payload,
            "median_ms": millis(*median),
            "min_ms": millis(sorted[0]),
            "max_ms": millis(*sorted.last().expect("not empty")),
            "gb_per_s": (payload as f64 / median.as_secs_f64() / 1e7).round() / 100.0,
            "reps": args.reps.get(),
            "warmup": args.warmup,
            "checksums": !args.no_checksums,
        }));
    }
    let rounds = (args.reps.get() + args.warmup) as u64;
    let encoded = rounds * data_bytes;
    let count = |name: &str| {
        let pointer = format!("/{name}");
        reader.pointer(&pointer).and_then(Value::as_u64).ok_or_else(|| missing(name))
    };
    let (copied, fetched) = (count("stats/copied_bytes")?, count("stats/fetched_bytes")?);
    let limit = payload + MEMORY_BESIDE;
    let producer_peak = peak_above(base);
    let reader_peak = reader.get("peak_above_start_bytes").ok_or_else(|| missing("its peak"))?;
    let reader_peak = reader_peak.as_u64();
    let is_within = |peak: Option<u64>| peak.is_some_and(|peak| peak <= limit);
    let counters = json!({
        "bench": "featurestore rollout",
        "step": "counters",
        "gathered_bytes_a_put": stats.gathered_bytes / rounds,
        "extra_copied_bytes": stats.copied_bytes + copied,
        // Times that the encoded data was copied by this library, on each side.
        "copies_a_put": (stats.gathered_bytes + stats.copied_bytes) as f64 / encoded as f64,
        "copies_a_get": copied as f64 / encoded as f64,
        "moved_a_get": fetched as f64 / encoded as f64,
        "reader": reader["stats"],
        "producer_peak_above_input_bytes": producer_peak,
        "reader_peak_above_start_bytes": reader_peak,
        "peak_limit_bytes": limit,
        "within_peak_limit": is_within(producer_peak) && is_within(reader_peak),
    });
    if args.json {
        times.iter().chain([&counters]).try_for_each(say)?;
        return Ok(counters);
    }
    let what = match input {
        featurestore::rollout::Input::Payload(spec) => spec.to_string(),
        featurestore::rollout::Input::Files(path) => path.display().to_string(),
    };
    say(format_args!("{what}: {payload} bytes over {} ({})", info.scheme, info.engine))?;
    say(format_args!(
        "{:<10} {:>11} {:>11} {:>11} {:>8}",
        "step", "median ms", "min", "max", "GB/s"
    ))?;
    for line in &times {
        say(format_args!(
            "{:<10} {:>11} {:>11} {:>11} {:>8}",
            line["step"].as_str().unwrap_or_default(),
            line["median_ms"].to_string(),
            line["min_ms"].to_string(),
            line["max_ms"].to_string(),
            line["gb_per_s"].to_string(),
        ))?;
    }
    let times_of = |name: &str| counters[name].as_f64().unwrap_or(f64::NAN);
    let mib = |bytes: Option<u64>| match bytes {
        Some(bytes) => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        None => "(not measured)".into(),
    };
    say(format_args!(
        "copies of the data: {:.3} a put (one is the gather), {:.3} a get; moved {:.3} times a get",
        times_of("copies_a_put"),
        times_of("copies_a_get"),
        times_of("moved_a_get"),
    ))?;
    say(format_args!(
        "peak memory: producer {} above its input, reader {} above its start; limit {} (payload \
         and 64 MiB): {}",
        mib(producer_peak),
        mib(reader_peak),
        mib(Some(limit)),
        if counters["within_peak_limit"] == true { "within" } else { "NOT within" },
    ))?;
    say(&counters)?;
    Ok(counters)
}

/// The reading process.
struct Reader {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Reader {
    fn start(args: &BenchArgs) -> Result<Self> {
        let failed = |e| transport_core::Error::io("start reader", e);
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.args(["rollout", "reader"]).args(args.transport.flags());
        // Object memory is the producer's to add.
        for name in ["MOONCAKE_GLOBAL_SEGMENT_SIZE", "MC_SEGMENT_SIZE"] {
            command.env_remove(name);
        }
        if args.no_checksums {
            command.arg("--no-checksums");
        }
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(failed)?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let mut reader = Self { child, input, output };
        reader.answer()?; // is ready
        Ok(reader)
    }

    fn ask(&mut self, handle: &Handle, check: bool) -> Result<Value> {
        let input = self.input.as_mut().expect("open until the end");
        let text = handle.to_json()?;
        writeln!(input, "{} {text}", u8::from(check))
            .map_err(|e| transport_core::Error::io("ask reader", e))?;
        self.answer()
    }

    fn answer(&mut self) -> Result<Value> {
        let mut line = String::new();
        loop {
            line.clear();
            let read = self.output.read_line(&mut line);
            if read.map_err(|e| transport_core::Error::io("hear reader", e))? == 0 {
                return Err(unexpected("the reader ended; its own words are on standard error"));
            }
            // Libraries may print there as well.
            if let Some(answer) = line.strip_prefix("@@") {
                return serde_json::from_str(answer)
                    .map_err(|e| unexpected("the reader's answer is no JSON").source(e));
            }
        }
    }

    fn end(&mut self) -> Result<()> {
        self.input = None;
        let end = Instant::now() + STEP;
        while Instant::now() < end {
            let ended = self.child.try_wait();
            match ended.map_err(|e| transport_core::Error::io("end reader", e))? {
                Some(status) if status.success() => return Ok(()),
                Some(_) => return Err(unexpected("the reader failed at its end")),
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        }
        Err(unexpected("the reader does not end"))
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.input = None;
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(super) fn reader(args: &ReaderArgs) -> Result<ExitCode> {
    let mut options = args.transport.options(None)?;
    options.memory = None;
    if args.no_checksums {
        options.rollouts = options.rollouts.verify(Verify::Never);
    }
    prepare(&options)?;
    let runtime = runtime(2, 8)?;
    runtime.block_on(async {
        let endpoint = open(options).await?;
        drop(end_of_life(false)?);
        let base = begin_peak();
        say("@@{}")?;
        let mut flat = Vec::new();
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(|e| transport_core::Error::io("hear producer", e))?;
            let (check, handle) =
                line.split_once(' ').ok_or_else(|| unexpected("not a line of the producer"))?;
            let handle = Handle::parse(handle.as_bytes())?;
            let start = Instant::now();
            let sample = endpoint.rollouts().get(&handle).await?;
            let rows = rows(&sample)?; // as a trainer has them: one view a row
            let got = start.elapsed();
            let consumed = consume(&rows, &mut flat);
            let sums = match check {
                "1" => payload_checksums(&sample.rollout()?)?,
                _ => Vec::new(),
            };
            drop((rows, sample));
            say(format_args!(
                "@@{}",
                json!({
                    "get_ms": millis(got),
                    "consume_ms": millis(consumed),
                    "sums": sums,
                    "stats": endpoint.rollouts().stats(),
                    "peak_above_start_bytes":
                        peak_above(base).map(|peak| peak.saturating_sub(flat.len() as u64)),
                })
            ))?;
        }
        endpoint.close().await
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Every row of every ragged field.
fn rows(sample: &Sample) -> Result<Vec<Column<'static>>> {
    let header = sample.header();
    let ragged = header.fields().filter(|field| field.kind == "ragged");
    ragged.map(|field| sample.view().column(field.name)).collect()
}

/// Copies every row once into memory that is there already.
fn consume(columns: &[Column<'static>], flat: &mut Vec<u8>) -> Duration {
    let rows = || {
        columns.iter().flat_map(|column| match column {
            Column::Ragged(rows) => rows.pieces(),
            _ => &[],
        })
    };
    let bytes: usize = rows().flatten().map(|row| row.len()).sum();
    if flat.len() < bytes {
        *flat = vec![1; bytes];
    }
    let start = Instant::now();
    let mut rest = &mut flat[..];
    for row in rows().flatten() {
        let (to, tail) = rest.split_at_mut(row.len());
        to.copy_from_slice(row);
        rest = tail;
    }
    start.elapsed()
}

/// Bytes of memory that this process uses now, from where on the peak counts; `None` where the
/// system does not say.
fn begin_peak() -> Option<u64> {
    // Where this is not allowed the peak counts from the start of the process.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    status("VmRSS:")
}

/// Most bytes of memory that this process has used since, beside `base`.
fn peak_above(base: Option<u64>) -> Option<u64> {
    Some(status("VmHWM:")?.saturating_sub(base?))
}

fn status(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?;
    Some(kib << 10)
}
