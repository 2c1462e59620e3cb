//! `cargo xtask soak`: the random, fault and load tests again and again, with many more cases.

use std::{
    env, fs,
    process::Command,
    time::{Duration, Instant},
};

use crate::{
    Result,
    libtest::{Reader, Skipped, Tally},
    process::{self, seconds},
    workspace::Workspace,
};

/// Random cases of each property, unless `PROPTEST_CASES` says otherwise.
const CASES: &str = "20000";
/// Longest build of what is soaked.
const BUILD_LIMIT: Duration = Duration::from_secs(20 * 60);
/// What a fuzz target gets in each round.
const FUZZ_SECONDS: u64 = 60;
/// A step that has less than this left is not begun.
const LEAST: Duration = Duration::from_secs(20);

/// Builds, then repeats rounds of all steps until `minutes` are over. Fails where any step does.
///
/// The time counts from the end of the build. A step that the end of the time cuts off is no
/// failure: it has not found anything so far.
///
/// With `only`, nothing but the steps whose names hold it, once.
pub(crate) fn run(workspace: &Workspace, minutes: u64, only: Option<&str>) -> Result<()> {
    let (mut steps, skipped) = steps(workspace);
    if let Some(only) = only {
        let names: Vec<String> = steps.iter().map(|step| step.name.clone()).collect();
        steps.retain(|step| step.name.contains(only));
        if steps.is_empty() {
            return Err(format!("no step holds {only:?}; there are: {}", names.join("; ")));
        }
        let limit = Duration::from_secs(minutes * 60);
        return steps.iter().try_for_each(|step| {
            println!("== {}", step.name);
            step.run(workspace, limit)
        });
    }
    let mut build = workspace.cargo();
    build.args(["test", "--release", "--workspace", "--no-run"]);
    let mut binary = workspace.cargo();
    binary.args(["build", "--release", "--package", "featurestore", "--bins"]);
    for command in [&mut build, &mut binary] {
        let ended =
            process::run(command, &workspace.target, BUILD_LIMIT, |line| println!("{line}"))?;
        if let Some(problem) = ended.problem() {
            return Err(format!("what is to be soaked does not build: {problem}"));
        }
    }

    let started = Instant::now();
    let limit = Duration::from_secs(minutes * 60);
    let mut tally = Tally { skipped, ..Tally::default() };
    let mut rounds = 0_u32;
    'time: loop {
        rounds += 1;
        for step in &steps {
            let left = limit.saturating_sub(started.elapsed());
            if left < LEAST {
                break 'time;
            }
            println!("\n== round {rounds}: {} ({})", step.name, seconds(started.elapsed()));
            match step.run(workspace, left) {
                Ok(()) => tally.passed += 1,
                Err(problem) => {
                    println!("{problem}");
                    tally.failed.push(format!("round {rounds}: {}: {problem}", step.name));
                }
            }
        }
        if !tally.failed.is_empty() {
            break;
        }
    }

    println!("\n== result ({}, {rounds} rounds begun)", seconds(started.elapsed()));
    for Skipped { what, why } in &tally.skipped {
        println!("not run: {what}: {why}");
    }
    for failed in &tally.failed {
        println!("failed: {failed}");
    }
    println!("steps: {}", tally.line());
    if tally.failed.is_empty() { Ok(()) } else { Err("soak failed".to_owned()) }
}

enum Kind {
    /// `cargo test`, whose output is read.
    Tests,
    /// Any command.
    Plain,
}

struct Step {
    name: String,
    program: Option<&'static str>,
    arguments: Vec<String>,
    variables: Vec<(&'static str, &'static str)>,
    kind: Kind,
}

impl Step {
    fn cargo(name: &str, arguments: &[&str]) -> Self {
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        Self {
            name: name.to_owned(),
            program: None,
            arguments,
            variables: Vec::new(),
            kind: Kind::Tests,
        }
    }

    fn plain(name: impl Into<String>, program: Option<&'static str>, arguments: &[&str]) -> Self {
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        Self { name: name.into(), program, arguments, variables: Vec::new(), kind: Kind::Plain }
    }

    fn with(mut self, variable: &'static str, value: &'static str) -> Self {
        self.variables.push((variable, value));
        self
    }

    fn run(&self, workspace: &Workspace, limit: Duration) -> Result<()> {
        let mut command = self.command(workspace);
        let mut reader = Reader::default();
        let ended = process::run(&mut command, &workspace.target, limit, |line| {
            if !matches!(self.kind, Kind::Tests) || reader.line(line) {
                println!("{line}");
            }
        })?;
        if ended.status.is_none() {
            println!("    cut off at the end of the time; nothing found so far");
            return Ok(());
        }
        ended.problem().map_or(Ok(()), Err)
    }

    fn command(&self, workspace: &Workspace) -> Command {
        let mut command = match self.program {
            Some("nightly") => workspace.nightly_cargo(),
            Some(_) => Command::new(workspace.release_binary()),
            None => workspace.cargo(),
        };
        command.current_dir(&workspace.root).args(&self.arguments);
        command.envs(self.variables.iter().copied());
        command.env("FEATURESTORE_BIN", workspace.release_binary());
        command.env("PROPTEST_CASES", env::var("PROPTEST_CASES").unwrap_or(CASES.into()));
        command
    }
}

/// The steps of a round, and what this machine cannot do.
fn steps(workspace: &Workspace) -> (Vec<Step>, Vec<Skipped>) {
    let mut steps = vec![
        Step::cargo(
            "properties and models against oracles",
            &["test", "--release", "--no-fail-fast", "--lib", "--tests"],
        ),
        Step::cargo(
            "multi-process and fault tests",
            &["test", "--release", "--no-fail-fast", "--package", "featurestore-tests"],
        ),
        // The kills are drawn from a seed that the test prints; `RANKS_SEED` replays it.
        Step::cargo(
            "eight ranks, 2,000 steps, kills of any process",
            &[
                "test",
                "--release",
                "--package",
                "featurestore-tests",
                "--test",
                "ranks",
                "eight",
                "--",
                "--nocapture",
            ],
        )
        .with("RANKS_STEPS", "2000"),
        Step::plain("pipeline --paper", Some("featurestore"), &["pipeline", "--paper", "--json"]),
    ];
    let mut skipped = Vec::new();
    // Its input, its arena, and the flat copy that its reader makes.
    if available_gib() >= 15.0 {
        let payload = ["rollout", "bench", "--payload", "text:4GiB", "--memory", "4400MiB"];
        let once = ["--reps", "1", "--warmup", "0", "--check", "--json"];
        let arguments = [&payload[..], &once].concat();
        steps.push(Step::plain("a rollout of 4 GiB", Some("featurestore"), &arguments));
    } else {
        skipped.push(Skipped::new("a rollout of 4 GiB", "needs 15 GiB of free memory"));
    }
    let targets = fuzz_targets(workspace);
    if targets.is_empty() {
        skipped.push(Skipped::new("fuzz targets", "there are none"));
    } else if process::output(workspace.nightly_cargo().args(["fuzz", "--version"])).is_err() {
        skipped.push(Skipped::new(
            "fuzz targets",
            "no nightly toolchain with cargo-fuzz: rustup toolchain install nightly; cargo install cargo-fuzz",
        ));
    } else {
        let time = format!("-max_total_time={FUZZ_SECONDS}");
        for target in targets {
            // New inputs go to the first folder; the committed ones stay as they are.
            let found = workspace.target.join("fuzz-corpus").join(&target);
            let committed = workspace.root.join("fuzz/corpus").join(&target);
            let mut arguments = vec!["fuzz".to_owned(), "run".into(), target.clone()];
            for folder in [found, committed] {
                // Fuzzing says so where a folder is missing.
                let _ = fs::create_dir_all(&folder);
                arguments.push(folder.display().to_string());
            }
            arguments.extend(["--".into(), time.clone(), "-rss_limit_mb=2048".into()]);
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            steps.push(Step::plain(format!("fuzz {target}"), Some("nightly"), &arguments));
        }
    }
    (steps, skipped)
}

/// Memory that programs can still have; 0 where the kernel does not say.
fn available_gib() -> f64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<f64>().ok());
    kib.unwrap_or(0.0) / f64::from(1 << 20)
}

fn fuzz_targets(workspace: &Workspace) -> Vec<String> {
    let manifest = fs::read_to_string(workspace.root.join("fuzz/Cargo.toml")).unwrap_or_default();
    bin_names(&manifest)
}

/// Names of the `[[bin]]` tables of a manifest.
fn bin_names(manifest: &str) -> Vec<String> {
    let tables = manifest.split("[[bin]]").skip(1);
    let name = |table: &str| {
        table.lines().take_while(|line| !line.starts_with('[')).find_map(|line| {
            let (key, value) = line.split_once('=')?;
            (key.trim() == "name").then(|| value.trim().trim_matches('"').to_owned())
        })
    };
    tables.filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fuzz_targets_are_read_from_their_manifest() {
        let manifest = "[package]\nname = \"fuzz\"\n\n[[bin]]\nname = \"lines\"\npath = \"a.rs\"\n\n\
                        [[bin]]\npath = \"b.rs\"\nname = \"frames\"\n[profile.release]\nname = \"no\"\n";
        assert_eq!(bin_names(manifest), ["lines", "frames"]);
        assert_eq!(bin_names("[package]\nname = \"fuzz\"\n"), [""; 0]);
    }
}
