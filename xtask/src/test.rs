//! `cargo xtask test`: every test that this machine can run, and a list of those that it did not.

mod options;

use std::{
    env, fs,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use crate::{
    Result,
    libtest::{Reader, Skipped, Tally},
    process::{self, seconds},
    workspace::Workspace,
};

/// Tests find the release build of the command line here.
const BINARY: &str = "FEATURESTORE_BIN";
/// Tests that find out while running that they cannot run append `name<TAB>reason` to this file.
const NOTES: &str = "FEATURESTORE_TEST_NOTES";
/// Longest build from nothing on two slow cores.
const BUILD_LIMIT: Duration = Duration::from_secs(20 * 60);
/// Longest build and run of all the workspace's tests.
const TEST_LIMIT: Duration = Duration::from_secs(25 * 60);
/// Longest build and run of one crate's loom models, or of one crate under miri.
const MODEL_LIMIT: Duration = Duration::from_secs(10 * 60);

/// What miri interprets: crate and test filters. The rest of the tests
/// opens sockets, maps shared memory or takes too long when interpreted.
const MIRI: &[(&str, &[&str])] = &[
    ("transport-core", &["memory::"]),
    ("control-proto", &["control::keys::", "mooncake::"]),
    ("capture-arena", &["export::", "pin::", "pool::", "reservation::"]),
];

/// Tests of device memory on a real device: package and target.
const ON_DEVICE: &[(&str, &str)] = &[
    ("capture-arena", "gpu"),
    ("transport-mooncake-direct", DLPACK_ON_DEVICE),
    ("transport-mooncake-direct", "gpu_engine"),
    ("transport-mooncake-direct", "gpu_sink"),
    ("featurestore", "gpu"),
];
/// The one of them that needs torch besides the device.
const DLPACK_ON_DEVICE: &str = "gpu_dlpack";
/// What the tests against a Mooncake process on the device need, besides the device.
const MOONCAKE_ON_DEVICE: &str = "import torch; from mooncake.engine import TransferEngine";

/// Tools that ignored tests may ask for, `needs TOOL; ...`, and the command that shows whether they
/// are here. Their tests are run where they are: a toolchain alone does not promise them.
const TOOLS: &[(&str, &[&str])] =
    &[("python3", &["python3", "--version"]), ("numpy", &["python3", "-c", "import numpy"])];

/// Runs the tests and prints the closing line; fails where a test or a step does.
pub(crate) fn run(workspace: &Workspace, quick: bool, only_mooncake: bool) -> Result<()> {
    let started = Instant::now();
    let mut session = Session::new(workspace, started)?;

    if only_mooncake {
        session.skip("everything but the tests of what loads Mooncake", "left out by --mooncake");
        session.tests_with_options(quick);
        return session.close();
    }
    if session.build() {
        session.workspace_tests(quick);
        session.tests_with_tools(quick);
        session.tests_with_options(quick);
    } else {
        session.skip("all tests", "the command line that they start does not build");
    }
    if quick {
        session.skip("featurestore-tests (multi-process and fault tests)", "left out by --quick");
        session.skip("loom models", "left out by --quick");
        session.skip("miri", "left out by --quick");
    } else {
        session.loom();
        session.miri();
    }
    session.close()
}

/// Runs the tests that need a CUDA device, one after another.
pub(crate) fn run_on_device(workspace: &Workspace) -> Result<()> {
    let mut session = Session::new(workspace, Instant::now())?;
    let mut python = workspace.command("python3");
    let has_mooncake = process::output(python.args(["-c", MOONCAKE_ON_DEVICE])).is_ok();
    let mut python = workspace.command("python3");
    let has_torch = process::output(python.args(["-c", "import torch"])).is_ok();
    for (member, target) in ON_DEVICE {
        if *target == DLPACK_ON_DEVICE && !has_torch {
            session.skip("DLPack on the device", "no python3 with torch");
            continue;
        }
        let step = format!("{member} on the device");
        session.heading(&step);
        let mut command = workspace.cargo();
        let features = match has_mooncake && *member == "featurestore" {
            true => "cuda,mooncake-python",
            false => "cuda",
        };
        command.args(["test", "--package", member, "--features", features, "--test", target]);
        command.args(["--", "--ignored", "--test-threads=1", "--show-output"]);
        if !has_mooncake {
            command.args(["--skip", "mooncake_"]);
        }
        let mut tally = session.read(&step, &mut command, TEST_LIMIT);
        tally.skipped.clear(); // all that is here is ignored elsewhere
        if tally.passed == 0 && tally.failed.is_empty() {
            tally.failed.push(format!("{step}: no test was run"));
        }
        session.tally.add(tally);
    }
    if !has_mooncake {
        session.skip(
            "tests against Mooncake on the device",
            "no python3 with torch and the wheel mooncake-transfer-engine-cuda13",
        );
    }
    session.close()
}

/// One run of the command.
struct Session<'a> {
    workspace: &'a Workspace,
    started: Instant,
    tally: Tally,
    /// Whether this run built the command line.
    has_binary: bool,
}

impl<'a> Session<'a> {
    fn new(workspace: &'a Workspace, started: Instant) -> Result<Self> {
        let session = Self { workspace, started, tally: Tally::default(), has_binary: false };
        // Left by an earlier run.
        for file in [session.notes_file(), session.summary_file()] {
            if let Some(folder) = file.parent() {
                fs::create_dir_all(folder)
                    .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
            }
            let _ = fs::remove_file(file);
        }
        Ok(session)
    }

    fn build(&mut self) -> bool {
        self.heading("build the command line, in release");
        let mut command = self.workspace.cargo();
        command.args(["build", "--release", "--package", "featurestore", "--bins"]);
        let problem = process::run(&mut command, &self.workspace.target, BUILD_LIMIT, show)
            .map_or_else(Some, |ended| ended.problem());
        if let Some(problem) = &problem {
            self.tally.failed.push(format!("building the command line: {problem}"));
        }
        self.has_binary = problem.is_none();
        self.has_binary
    }

    fn workspace_tests(&mut self, quick: bool) {
        self.heading("tests of the workspace");
        let mut command = self.workspace.cargo();
        command.args(["test", "--workspace", "--no-fail-fast"]);
        if quick {
            command.args(["--exclude", "featurestore-tests"]);
            command.env("PROPTEST_CASES", env::var("PROPTEST_CASES").unwrap_or("16".into()));
        }
        command.env(BINARY, self.workspace.release_binary());
        let tally = self.read("tests of the workspace", &mut command, TEST_LIMIT);
        self.tally.add(tally);
    }

    /// Runs the ignored tests that only wait for a tool which this machine has.
    fn tests_with_tools(&mut self, quick: bool) {
        for (tool, question) in TOOLS {
            let waiting = self.tally.waiting_for(tool);
            let mut asked = self.workspace.command(question[0]);
            let is_here = process::output(asked.args(&question[1..])).is_ok();
            if waiting.is_empty() || !is_here {
                continue;
            }
            let step = format!("tests with {tool}");
            self.heading(&step);
            let mut command = self.workspace.cargo();
            command.args(["test", "--workspace", "--lib", "--bins", "--tests", "--no-fail-fast"]);
            if quick {
                command.args(["--exclude", "featurestore-tests"]);
            }
            command.args(["--", "--ignored", "--exact"]).args(waiting.iter().map(Skipped::test));
            command.env(BINARY, self.workspace.release_binary());
            let mut tally = self.read(&step, &mut command, TEST_LIMIT);
            tally.require(&step, waiting.len());
            self.tally.skipped.retain(|skipped| !waiting.contains(skipped));
            self.tally.add(tally);
        }
    }

    fn loom(&mut self) {
        let members: Vec<&str> = self
            .workspace
            .members
            .iter()
            .filter(|member| member.uses_loom())
            .map(|member| member.name.as_str())
            .collect();
        for member in members {
            self.heading(&format!("loom models of {member}"));
            let mut command = self.workspace.cargo();
            command.args(["test", "--package", member, "--lib"]);
            command.arg("--target-dir").arg(self.workspace.target.join("loom"));
            // Models are the tests with `loom` in their path; outside a model the types panic.
            command.args(["--", "loom"]);
            let flags = env::var("RUSTFLAGS").unwrap_or_default();
            command.env("RUSTFLAGS", format!("{flags} --cfg loom").trim());
            if env::var_os("LOOM_MAX_PREEMPTIONS").is_none() {
                command.env("LOOM_MAX_PREEMPTIONS", "3");
            }
            let step = format!("loom models of {member}");
            let mut tally = self.read(&step, &mut command, MODEL_LIMIT);
            if tally.line() == Tally::default().line() {
                tally.failed.push(format!("{step}: it depends on loom and has no test named loom"));
            }
            self.tally.add(tally);
        }
    }

    fn miri(&mut self) {
        let probe = process::output(self.workspace.nightly_cargo().args(["miri", "--version"]));
        if probe.is_err() {
            self.skip(
                "miri",
                "no nightly toolchain with miri: rustup toolchain install nightly --component miri",
            );
            return;
        }
        for (member, filters) in MIRI {
            if self.workspace.member(member).is_none() {
                continue;
            }
            let step = format!("{member} under miri");
            self.heading(&step);
            let mut command = self.workspace.nightly_cargo();
            command.args(["miri", "test", "--package", member, "--lib"]);
            command.arg("--target-dir").arg(self.workspace.target.join("miri"));
            command.arg("--").args(*filters);
            let flags = env::var("MIRIFLAGS").unwrap_or_default();
            command.env("MIRIFLAGS", format!("{flags} -Zmiri-disable-isolation").trim());
            command.env("PROPTEST_CASES", "4");
            let mut tally = self.read(&step, &mut command, MODEL_LIMIT);
            // They ran natively above: not interpreted is not the same as not run.
            let native = tally.skipped.len();
            tally.skipped.clear();
            if native > 0 {
                println!("    {native} tests are run natively only");
            }
            self.tally.add(tally);
        }
    }

    /// Runs one `cargo test` and reads what it did.
    fn read(&self, step: &str, command: &mut Command, limit: Duration) -> Tally {
        let notes = self.notes_file();
        command.env(NOTES, &notes);
        let mut reader = Reader::default();
        let ended = process::run(command, &self.workspace.target, limit, |line| {
            if reader.line(line) {
                show(line);
            }
        });
        let success = ended.as_ref().is_ok_and(|ended| ended.exit_problem().is_none());
        let mut tally = reader.finish_all(success);
        match ended {
            Ok(ended) => {
                // A failed test explains a failed exit; anything else has to be said.
                let explained = ended.status.is_some() && !tally.failed.is_empty();
                let exit = ended.exit_problem().filter(|_| !explained);
                let problems = exit.into_iter().chain(ended.leftover_problem());
                tally.failed.extend(problems.map(|problem| format!("{step}: {problem}")));
            }
            Err(problem) => tally.failed.push(format!("{step}: {problem}")),
        }
        tally.add_notes(&fs::read_to_string(&notes).unwrap_or_default());
        let _ = fs::remove_file(notes);
        tally
    }

    fn skip(&mut self, what: &str, why: &str) {
        self.tally.skipped.push(Skipped::new(what, why));
    }

    fn heading(&self, text: &str) {
        println!("\n== {text} ({})", seconds(self.started.elapsed()));
    }

    fn close(self) -> Result<()> {
        let summary = summary(&self.tally);
        self.heading("result");
        print!("{summary}");
        let file = self.summary_file();
        fs::write(&file, &summary)
            .map_err(|error| format!("cannot write {}: {error}", file.display()))?;
        if self.tally.failed.is_empty() { Ok(()) } else { Err("tests failed".to_owned()) }
    }

    fn notes_file(&self) -> PathBuf {
        self.workspace.target.join("xtask/notes.txt")
    }

    fn summary_file(&self) -> PathBuf {
        self.workspace.target.join("xtask/test-summary.txt")
    }
}

/// What was not run, what failed, and the closing line.
fn summary(tally: &Tally) -> String {
    let mut text = String::new();
    if !tally.skipped.is_empty() {
        text += "not run:\n";
        for Skipped { what, why } in &tally.skipped {
            text += &format!("  {what}: {why}\n");
        }
    }
    if !tally.failed.is_empty() {
        text += "failed:\n";
        for what in &tally.failed {
            text += &format!("  {what}\n");
        }
    }
    text + &tally.line() + "\n"
}

fn show(line: &str) {
    println!("{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_lists_what_was_not_run_and_ends_with_the_counts() {
        let tally = Tally {
            passed: 7,
            failed: vec!["x: y".to_owned()],
            skipped: vec![Skipped::new("miri", "no nightly toolchain")],
        };
        assert_eq!(
            summary(&tally),
            "not run:\n  miri: no nightly toolchain\nfailed:\n  x: y\n7 passed, 1 failed, 1 skipped\n"
        );
        assert_eq!(summary(&Tally::default()), "0 passed, 0 failed, 0 skipped\n");
    }
}
