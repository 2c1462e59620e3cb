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

use featurestore_benches::number;
use mooncake_sys::master::{ManagedMaster, MasterOptions};
use serde_json::Value;

/// Memory that each side may take beside the payload.
const PEAK_TARGET: f64 = 64.0;

fn main() {
    let testing = std::env::args().any(|arg| arg == "--test");
    let mib = std::env::var("ROLLOUT_EXCHANGE_MIB").ok().and_then(|text| text.parse().ok());
    let mib = mib.unwrap_or(if testing { 4 } else { 128 });
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
    if testing {
        run.peak(mib).expect("shm works everywhere");
    } else if wants("peaks") {
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

    fn times(lines: &[Value]) -> Result<Times, String> {
        let of = |step: &str| number(step_of(lines, step)?, "/median_ms");
        Ok(Times { put: of("put")?, get: of("get")?, both: of("put+get")? })
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
        let list = |name: &str| -> Result<Vec<f64>, String> {
            let seconds: Vec<f64> = serde_json::from_value(answer[name].clone())
                .map_err(|e| format!("no times of {name}: {e}"))?;
            match seconds.len() == self.reps {
                true => Ok(seconds.into_iter().map(|seconds| seconds * 1e3).collect()),
                false => Err(format!("{} times of {name}, not {}", seconds.len(), self.reps)),
            }
        };
        let (puts, gets) = (list("put")?, list("get")?);
        let both: Vec<f64> = puts.iter().zip(&gets).map(|(a, b)| a + b).collect();
        Ok(Times { put: median(puts), get: median(gets), both: median(both) })
    }

    fn shared_memory(&self, testing: bool) {
        head(&format!("{} MiB text, one host", self.mib));
        let shm = || self.ours(self.mib, &["--transport", "shm"]);
        let lines = shm().expect("shm works everywhere");
        Self::times(&lines).expect("medians").print("featurestore, shm, with checksums");
        let extra: f64 = {
            let counters = step_of(&lines, "counters").expect("counters");
            let names = ["/extra_copied_bytes", "/reader/fetched_bytes", "/reader/copied_bytes"];
            names.map(|name| number(counters, name).expect("a counter")).iter().sum()
        };
        line(
            "copies of payload beside the one on put, bytes",
            extra.to_string(),
            "0",
            extra == 0.0,
        );
        if testing {
            return;
        }
        for (kind, what, target) in [
            ("numpy", "Ray, numpy rows", 3.0),
            ("torch", "Ray, torch rows", 25.0),
            ("torch-zero-copy", "Ray, torch rows, zero-copy setting", 5.0),
        ] {
            match Duel::run(|| Self::times(&shm()?), || self.theirs("ray_objects.py", &[kind])) {
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
        let ours = || Self::times(&self.ours(self.mib, &flags)?);
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
            let start = Instant::now();
            match self.peak(gib << 10) {
                Ok(()) => println!("  ({:.0} s)", start.elapsed().as_secs_f64()),
                Err(why) => println!("peak memory at {gib} GiB: not measured: {why}"),
            }
        }
    }

    /// Memory that one put and one get take.
    fn peak(&self, mib: u64) -> Result<(), String> {
        let run =
            Self { reps: 1, warmup: 0, venv: self.venv.clone(), binary: self.binary.clone(), mib };
        let memory = format!("{}MiB", mib + 64);
        let lines = run.ours(mib, &["--transport", "shm", "--memory", &memory])?;
        let counters = step_of(&lines, "counters")?;
        let payload = number(counters, "/gathered_bytes_a_put")?;
        for (side, name) in [
            ("producer", "/producer_peak_above_input_bytes"),
            ("reader", "/reader_peak_above_start_bytes"),
        ] {
            let found = (number(counters, name)? - payload) / f64::from(1 << 20);
            line(
                &format!("peak memory at {mib} MiB beside the payload, {side}"),
                format!("{found:.0} MiB"),
                &format!("<= {PEAK_TARGET:.0} MiB"),
                found <= PEAK_TARGET,
            );
        }
        Ok(())
    }
}

/// The line of one step, among those of our own bench.
fn step_of<'l>(lines: &'l [Value], step: &str) -> Result<&'l Value, String> {
    lines.iter().find(|line| line["step"] == step).ok_or_else(|| format!("no line of {step}"))
}

/// The middle one of at least one.
fn median(mut list: Vec<f64>) -> f64 {
    list.sort_unstable_by(f64::total_cmp);
    list[list.len() / 2]
}
