//! Rollouts across processes, beside Ray's object store and Mooncake's own Python code, in one run.
//!
//! Prints each figure beside its target. What is compared runs in turn with what it is compared
//! with, on the same payload, after the same warm-up, three times each: the figure is the ratio of the
//! medians, and in brackets is the range of the ratios of neighbours.
//!
//! - `FEATURESTORE_BIN`: the command line, in release; with `--features mooncake-python` for the
//!   lines about the store. Default: `target/release/featurestore`.
//! - `FEATURESTORE_COMPARE_VENV`: a Python environment with `numpy`, and `ray`, `torch`, and
//!   Mooncake's wheel with `msgpack` for the lines that need them. Default: `target/compare-venv`.
//! - `ROLLOUT_EXCHANGE_MIB`: size of the payload, 128 unless said otherwise.
//!
//! `cargo bench --bench rollout_exchange -- PART` measures one part: `shm` (beside Ray), `store` (beside
//! Mooncake's objects) or `peaks` (memory at 1 and 4 GiB); `-- --test` runs what needs nothing else,
//! once.
#![forbid(unsafe_code)]

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use mooncake_sys::master::{ManagedMaster, MasterOptions};
use serde_json::Value;

/// Memory that each side may take beside the payload.
const PEAK_TARGET: f64 = 64.0;

fn main() {
    let testing = std::env::args().any(|arg| arg == "--test");
    let number = |name: &str, default: u64| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let mib = number("ROLLOUT_EXCHANGE_MIB", if testing { 4 } else { 128 });
    let (reps, warmup) = if testing { (1, 1) } else { (7, 2) };
    let run = Run { binary: binary(), venv: venv(), mib, reps, warmup };
    if !run.binary.exists() {
        println!("not measured: no command line at {}", run.binary.display());
        println!("  cargo build --release -p featurestore --features mooncake-python --bins");
        assert!(testing, "there is nothing to measure");
        return;
    }
    let only = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let wants = |part| only.as_deref().is_none_or(|only| only == part);
    if testing || wants("shm") {
        run.shared_memory(testing);
    }
    if !testing && wants("store") {
        run.store();
    }
    if !testing && wants("peaks") {
        run.peaks();
    }
}

fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target")
}

fn binary() -> PathBuf {
    let named = std::env::var_os("FEATURESTORE_BIN").map(PathBuf::from);
    named.unwrap_or_else(|| target().join("release/featurestore"))
}

fn venv() -> PathBuf {
    let named = std::env::var_os("FEATURESTORE_COMPARE_VENV").map(PathBuf::from);
    named.unwrap_or_else(|| target().join("compare-venv"))
}

/// Takes this bench's own variables from the child: the command line refuses what is no setting.
fn hide_own_variables(command: &mut Command) {
    command.env_remove("FEATURESTORE_BIN").env_remove("FEATURESTORE_COMPARE_VENV");
}

struct Run {
    binary: PathBuf,
    venv: PathBuf,
    mib: u64,
    reps: usize,
    warmup: usize,
}

/// Times that each side of a comparison runs.
const TURNS: usize = 3;

/// Medians of one side, in milliseconds.
#[derive(Clone, Copy, Debug)]
struct Times {
    put: f64,
    get: f64,
    both: f64,
}

impl Times {
    fn print(self, what: &str) {
        println!("{what:<58} {:>10.1} {:>10.1} {:>10.1}", self.put, self.get, self.both);
    }
}

fn line(what: &str, found: String, target: &str, met: bool) {
    println!("{what:<58} {found:>20}   {target:<14} {}", if met { "ok" } else { "MISSED" });
}

/// Runs of both sides, turn by turn.
struct Duel {
    ours: Vec<Times>,
    theirs: Vec<Times>,
}

impl Duel {
    fn run(
        mut ours: impl FnMut() -> Result<Times, String>,
        mut theirs: impl FnMut() -> Result<Times, String>,
    ) -> Result<Self, String> {
        let mut duel = Self { ours: Vec::new(), theirs: Vec::new() };
        for _ in 0..TURNS {
            duel.theirs.push(theirs()?);
            duel.ours.push(ours()?);
        }
        Ok(duel)
    }

    /// Medians of each side.
    fn print(&self, what: &str) {
        for (runs, what) in [(&self.ours, "  featurestore beside it"), (&self.theirs, what)] {
            let of = |part: fn(&Times) -> f64| median(runs.iter().map(part).collect());
            Times { put: of(|t| t.put), get: of(|t| t.get), both: of(|t| t.both) }.print(what);
        }
    }

    fn judge(&self, what: &str, part: fn(&Times) -> f64, target: f64) {
        let [ours, theirs] =
            [&self.ours, &self.theirs].map(|runs| runs.iter().map(part).collect::<Vec<_>>());
        let mut ratios: Vec<f64> = theirs.iter().zip(&ours).map(|(a, b)| a / b).collect();
        ratios.sort_unstable_by(f64::total_cmp);
        let (least, most) = (ratios[0], ratios[ratios.len() - 1]);
        let found = median(theirs) / median(ours);
        let shown = format!("{found:.2}x [{least:.2}-{most:.2}]");
        line(what, shown, &format!(">= {target}x"), found >= target);
    }
}

fn head(what: &str) {
    println!("\n{what:<58} {:>10} {:>10} {:>10}", "put ms", "get ms", "put+get ms");
}

impl Run {
    /// Our own bench: its lines.
    fn ours(&self, mib: u64, flags: &[&str]) -> Result<Vec<Value>, String> {
        let mut command = Command::new(&self.binary);
        command.args(["rollout", "bench", "--json", "--payload", &format!("text:{mib}MiB")]);
        command.args(["--reps", &self.reps.to_string(), "--warmup", &self.warmup.to_string()]);
        command.args(flags).stdin(Stdio::null());
        hide_own_variables(&mut command);
        let output = command.output().map_err(|e| e.to_string())?;
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            return Err(errors.lines().last().unwrap_or("it failed").to_owned());
        }
        let text = String::from_utf8_lossy(&output.stdout);
        Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
    }

    fn times(lines: &[Value]) -> Times {
        let of = |step: &str| {
            let line = lines.iter().find(|line| line["step"] == step);
            line.and_then(|line| line["median_ms"].as_f64()).unwrap_or(f64::NAN)
        };
        Times { put: of("put"), get: of("get"), both: of("put+get") }
    }

    /// One of the Python scripts.
    fn theirs(&self, script: &str, arguments: &[&str]) -> Result<Times, String> {
        let python = self.venv.join("bin/python");
        if !python.exists() {
            return Err(format!("no Python environment at {}", self.venv.display()));
        }
        let mut command = Command::new(python);
        command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("python").join(script));
        command.args(arguments).args([
            self.mib.to_string(),
            self.reps.to_string(),
            self.warmup.to_string(),
        ]);
        command.env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::null());
        hide_own_variables(&mut command);
        let output = command.output().map_err(|e| e.to_string())?;
        let text = String::from_utf8_lossy(&output.stdout);
        let answer = text.lines().find_map(|line| line.strip_prefix("@@"));
        let Some(answer) = answer.filter(|_| output.status.success()) else {
            let errors = String::from_utf8_lossy(&output.stderr);
            return Err(errors.lines().last().unwrap_or("it printed nothing").to_owned());
        };
        let answer: Value = serde_json::from_str(answer).map_err(|e| e.to_string())?;
        let list = |name: &str| -> Vec<f64> {
            let list = answer[name].as_array().into_iter().flatten();
            list.filter_map(Value::as_f64).map(|seconds| seconds * 1e3).collect()
        };
        let (puts, gets) = (list("put"), list("get"));
        let both: Vec<f64> = puts.iter().zip(&gets).map(|(a, b)| a + b).collect();
        Ok(Times { put: median(puts), get: median(gets), both: median(both) })
    }

    fn shared_memory(&self, testing: bool) {
        head(&format!("{} MiB text, one host", self.mib));
        let lines = self.ours(self.mib, &["--transport", "shm"]).expect("shm works everywhere");
        let ours = Self::times(&lines);
        ours.print("featurestore, shm, with checksums");
        let counters = lines.last().expect("the last line counts");
        let moved = |name: &str| counters["reader"][name].as_u64().unwrap_or(u64::MAX);
        let copied = counters["extra_copied_bytes"].as_u64().unwrap_or(u64::MAX);
        let extra = copied + moved("fetched_bytes") + moved("copied_bytes");
        line("copies of payload beside the one on put, bytes", extra.to_string(), "0", extra == 0);
        if testing {
            return;
        }
        for (kind, what, target) in [
            ("numpy", "Ray, numpy rows", 3.0),
            ("torch", "Ray, torch rows", 25.0),
            ("torch-zero-copy", "Ray, torch rows, zero-copy setting", 5.0),
        ] {
            let shm = || self.ours(self.mib, &["--transport", "shm"]).map(|l| Self::times(&l));
            match Duel::run(shm, || self.theirs("ray_objects.py", &[kind])) {
                Ok(duel) => {
                    duel.print(what);
                    duel.judge(&format!("  faster than {what}"), |t| t.both, target);
                }
                Err(why) => println!("{what}: not measured: {why}"),
            }
        }
    }

    fn store(&self) {
        head(&format!("{} MiB text, Mooncake Store, tcp on loopback", self.mib));
        let options = MasterOptions::of_environment(&self.venv);
        let master = match ManagedMaster::start(&options) {
            Ok(master) => master,
            Err(why) => return println!("not measured: {why}"),
        };
        let address = master.address().to_string();
        let pool = format!("{}MiB", 2 * self.mib + 64);
        let memory = format!("{}MiB", 2 * self.mib + 512);
        let venv = self.venv.display().to_string();
        let flags = [
            "--transport",
            "store",
            "--mooncake",
            &address,
            "--mooncake-venv",
            &venv,
            "--pool",
            &pool,
            "--memory",
            &memory,
        ];
        let ours = || self.ours(self.mib, &flags).map(|lines| Self::times(&lines));
        for (kind, what, put, get) in [
            ("torch", "Mooncake's Python objects, torch rows", 8.0, 1.25),
            ("numpy", "Mooncake's Python objects, numpy rows", 1.3, 1.0),
        ] {
            match Duel::run(ours, || self.theirs("mooncake_objects.py", &[&address, kind])) {
                Ok(duel) => {
                    duel.print(what);
                    duel.judge("  put, against these", |t| t.put, put);
                    duel.judge("  get, against these", |t| t.get, get);
                }
                Err(why) => println!("{what}: not measured: {why}"),
            }
        }
    }

    fn peaks(&self) {
        println!();
        for gib in [1, 4] {
            let run = Self {
                reps: 1,
                warmup: 0,
                venv: self.venv.clone(),
                binary: self.binary.clone(),
                mib: self.mib,
            };
            let start = Instant::now();
            let memory = format!("{}MiB", gib * 1024 + 64);
            let lines = run.ours(gib << 10, &["--transport", "shm", "--memory", &memory]);
            let lines = match lines {
                Ok(lines) => lines,
                Err(why) => {
                    println!("peak memory at {gib} GiB: not measured: {why}");
                    continue;
                }
            };
            let counters = lines.last().expect("the last line counts");
            let bytes = counters["gathered_bytes_a_put"].as_f64().unwrap_or(f64::NAN);
            let above = |name: &str, base: f64| {
                (counters[name].as_f64().unwrap_or(f64::NAN) - base - bytes) / f64::from(1 << 20)
            };
            let base = counters["reader_base_bytes"].as_f64().unwrap_or(0.0);
            for (side, found) in [
                ("producer", above("producer_peak_above_input_bytes", 0.0)),
                ("reader", above("reader_peak_bytes", base)),
            ] {
                line(
                    &format!("peak memory at {gib} GiB beside the payload, {side}"),
                    format!("{found:.0} MiB"),
                    &format!("<= {PEAK_TARGET:.0} MiB"),
                    found <= PEAK_TARGET,
                );
            }
            println!("  ({:.0} s)", start.elapsed().as_secs_f64());
        }
    }
}

fn median(mut list: Vec<f64>) -> f64 {
    list.sort_unstable_by(f64::total_cmp);
    list.get(list.len() / 2).copied().unwrap_or(f64::NAN)
}
