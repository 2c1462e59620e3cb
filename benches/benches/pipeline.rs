//! What the main job makes of overlap, and what the data plane adds to slow servers: whole runs of the
//! release binary, in turn, each figure beside what it has to be.
//!
//! `cargo bench -p featurestore-benches --bench pipeline [-- modes|rate|before] [--small]`
//!
//! `before` compares with another build, `FEATURESTORE_BEFORE`. `--small` moves narrow samples, to see
//! that it runs; its figures mean nothing.

use std::{
    env,
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

/// Longest time of one run.
const LIMIT: Duration = Duration::from_secs(600);
/// Runs of each kind.
const ROUNDS: usize = 3;
/// Samples a second of the published benchmark's servers.
const PUBLISHED_RATE: f64 = 67.3;

fn main() {
    let args: Vec<String> = env::args().skip(1).collect();
    // `cargo test --benches` runs this too, to see that it starts.
    if !args.iter().any(|arg| arg == "--bench") {
        println!("pipeline: run with `cargo bench`");
        return;
    }
    let jobs = Jobs { binary: binary(), small: args.iter().any(|arg| arg == "--small") };
    let wanted: Vec<_> = args.iter().filter(|arg| !arg.starts_with("--")).collect();
    type Part = fn(&Jobs);
    for (name, part) in [("modes", modes as Part), ("rate", rate), ("before", before)] {
        if wanted.is_empty() || wanted.iter().any(|w| *w == name) {
            part(&jobs);
        }
    }
}

/// The release binary: `FEATURESTORE_BIN`, or the one beside this bench.
fn binary() -> PathBuf {
    let named = env::var_os("FEATURESTORE_BIN").filter(|path| !path.is_empty());
    let beside = || {
        let own = env::current_exe().expect("a path");
        own.ancestors().nth(2).expect("target/release/deps").join("featurestore")
    };
    let binary = named.map_or_else(beside, PathBuf::from);
    assert!(binary.exists(), "no {}: cargo build --release -p featurestore", binary.display());
    binary
}

struct Jobs {
    binary: PathBuf,
    small: bool,
}

impl Jobs {
    /// One run's report.
    fn run(&self, binary: &PathBuf, arguments: &[&str]) -> Value {
        let load: &[&str] =
            if self.small { &["--samples", "256", "--hidden", "256"] } else { &["--paper"] };
        let fixed = ["--concurrency", "64", "--ingest-batch", "128", "--json"];
        let mut child = Command::new(binary)
            .arg("pipeline")
            .args(load)
            .args(fixed)
            .args(arguments)
            // The binary refuses variables of its own that are no settings.
            .env_remove("FEATURESTORE_BIN")
            .env_remove("FEATURESTORE_BEFORE")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let end = Instant::now() + LIMIT;
        while child.try_wait().expect("ours").is_none() {
            if Instant::now() > end {
                let _ = child.kill();
                panic!("{arguments:?} took longer than {LIMIT:?}");
            }
            thread::sleep(Duration::from_millis(20)); // what it says is far shorter than a pipe
        }
        let output = child.wait_with_output().expect("ours");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {}: {said}", output.status);
        let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
        assert_eq!(report["mismatches"], 0, "{report}");
        report
    }
}

fn number(report: &Value, field: &str) -> f64 {
    featurestore_benches::number(report, field).unwrap_or_else(|why| panic!("{why}"))
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_unstable_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn figure(name: &str, found: f64, unit: &str, target: f64, at_least: bool) {
    let met = if at_least { found >= target } else { found <= target };
    println!(
        "{name:>44} {found:>9.3} {unit:<2} {} {target} {unit}: {}",
        if at_least { "at least" } else { "at most" },
        if met { "met" } else { "NOT met" }
    );
}

fn row(name: &str, report: &Value) {
    println!(
        "{name:>20}: pipeline {:>7.3} s, capture {:>7.3} s, materialize {:>7.3} s, cleanup {:>8.3} ms",
        number(report, "/pipeline_elapsed_s"),
        number(report, "/capture_elapsed_s"),
        number(report, "/materialize_active_s"),
        number(report, "/cleanup_elapsed_s") * 1e3
    );
}

/// Where the time of a run with limited servers went.
fn breakdown(report: &Value) {
    let servers = report["servers"].as_array().expect("a list");
    for (i, server) in servers.iter().enumerate() {
        println!(
            "{:>20}: busy by the rate {:.3} s, nothing asked for {:.3} s, answers late by {:.3} s",
            format!("server {i}"),
            number(server, "/paced/busy_s"),
            number(server, "/paced/idle_s"),
            number(server, "/paced/late_s")
        );
    }
    println!(
        "{:>20}: waited for captures {:.3} s, at boundaries {:.3} s; comparing took {:.3} s",
        "trainer",
        number(report, "/trainer_wait/starved_s"),
        number(report, "/trainer_wait/boundaries_s"),
        number(report, "/trainer_wait/compared_s")
    );
    println!(
        "{:>20}: {:.3} s from the last capture to the last comparison",
        "end",
        number(report, "/pipeline_elapsed_s") - number(report, "/capture_elapsed_s")
    );
}

/// Serial and overlapped, with servers as slow as reading is.
fn modes(jobs: &Jobs) {
    println!("\nmodes: tuned against controlled over tcp, servers as slow as reading");
    let with = |preset, rate: Option<f64>| {
        let rate = rate.map(|rate| format!("{rate:.3}"));
        let mut arguments = vec!["--transport", "tcp", "--no-verify", "--preset", preset];
        arguments.extend(rate.iter().flat_map(|rate| ["--server-rate", rate]));
        jobs.run(&jobs.binary, &arguments)
    };
    let free = with("controlled", None);
    row("not limited", &free);
    let rate = number(&free, "/materialize_samples_per_s");
    println!("{:>20}: {rate:.1} samples/s", "servers limited to");
    let (mut controlled, mut tuned) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        for (preset, times) in [("controlled", &mut controlled), ("tuned", &mut tuned)] {
            let report = with(preset, Some(rate));
            row(preset, &report);
            times.push(number(&report, "/pipeline_elapsed_s"));
        }
    }
    figure("controlled / tuned", median(controlled) / median(tuned), "x", 1.5, true);
}

/// The published capture rate, and what a trainer sees of it.
fn rate(jobs: &Jobs) {
    println!("\nrate: tuned over shm, every byte compared");
    let (mut rates, mut p50, mut p99, mut ledger) = (vec![], vec![], vec![], vec![]);
    let limit = PUBLISHED_RATE.to_string();
    let mut wait = |report: &Value| {
        p50.push(number(report, "/trainer_wait/p50_us"));
        p99.push(number(report, "/trainer_wait/p99_us"));
        ledger.push(number(report, "/ledger/elapsed_s") * 1e3);
    };
    for _ in 0..ROUNDS {
        let arguments = ["--transport", "shm", "--preset", "tuned"];
        let limited = [&arguments[..], &["--server-rate", &limit]].concat();
        let report = jobs.run(&jobs.binary, &limited);
        row("67.3 samples/s", &report);
        breakdown(&report);
        rates.push(number(&report, "/pipeline_samples_per_s") / PUBLISHED_RATE);
        let report = jobs.run(&jobs.binary, &arguments);
        row("not limited", &report);
        wait(&report);
    }
    figure("pipeline / servers' rate", median(rates), "x", 0.98, true);
    figure("wait for a published sample, p50", median(p50), "us", 50.0, false);
    figure("wait for a published sample, p99", median(p99), "us", 1000.0, false);
    println!("{:>44} {:>9.3} ms", "in the ledger, whole run", median(ledger));
}

/// Another build in the same run.
fn before(jobs: &Jobs) {
    let Some(other) = env::var_os("FEATURESTORE_BEFORE").map(PathBuf::from) else {
        println!("\nbefore: left out; FEATURESTORE_BEFORE names no other build");
        return;
    };
    for transport in ["shm", "tcp"] {
        println!("\nbefore: the main job over {transport}, this build and another in turn");
        let (mut old, mut new) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            for (name, binary, times) in
                [("before", &other, &mut old), ("now", &jobs.binary, &mut new)]
            {
                let report = jobs.run(binary, &["--transport", transport]);
                row(name, &report);
                times.push(number(&report, "/pipeline_elapsed_s"));
            }
        }
        figure("now / before", median(new) / median(old), "x", 1.05, false);
    }
}
