//! The tests behind the features that a default build does without: Mooncake and devices.

use std::{env, process::Command};

use super::{BINARY, Session, TEST_LIMIT};
use crate::{libtest::Skipped, mooncake::Mooncake};

/// Features of the members that add tests. None is on by default; they are built together, once.
const FEATURES: [&str; 4] = ["cuda", "mooncake", "mooncake-python", "scripted-cuda"];
/// How the reason of an ignored test starts that wants a real Mooncake.
const MOONCAKE: &str = "needs a Mooncake venv";
/// How the reason of an ignored test starts that wants a device.
const DEVICE: &str = "needs a CUDA device";
impl Session<'_> {
    /// Builds the members with those features and runs what these add: first what needs nothing
    /// else (devices are simulated), then what needs a real Mooncake, which is installed if that can
    /// be done.
    ///
    /// All members are selected and few targets built: with the members alone the resolver would
    /// give their dependencies other features, and half of the registry would be built anew.
    pub(super) fn tests_with_options(&mut self, quick: bool) {
        let targets: Vec<String> =
            self.workspace.members.iter().flat_map(|member| member.tests_for(&FEATURES)).collect();
        self.heading("tests of what loads Mooncake or a CUDA driver");
        let mut command = self.with_options();
        command.arg("--lib");
        let step = "unit tests with optional features";
        let mut units = self.read(step, &mut command, TEST_LIMIT);
        units.forget_skipped(&self.tally); // those of a default build are run once more
        let mut waiting = units.take_skipped(MOONCAKE);
        self.tally.add(units);

        let mut command = self.with_options();
        command.args(targets.iter().flat_map(|target| ["--test", target]));
        if quick {
            command.env("PROPTEST_CASES", env::var("PROPTEST_CASES").unwrap_or("16".into()));
        }
        let mut tally = self.read("tests with optional features", &mut command, TEST_LIMIT);
        tally.forget_skipped(&self.tally);
        waiting.extend(tally.take_skipped(MOONCAKE));
        let on_device = tally.take_skipped(DEVICE);
        if !on_device.is_empty() {
            let what = format!("{} tests on a CUDA device", on_device.len());
            self.skip(&what, "they are run by cargo xtask test --gpu");
        }
        self.tally.add(tally);
        if quick {
            self.tally.skipped.extend(waiting.into_iter().map(|test: Skipped| {
                Skipped::new(test.what, "needs a real Mooncake: left out by --quick")
            }));
        } else {
            self.tests_with_real_mooncake(&targets, waiting);
        }
    }

    fn tests_with_real_mooncake(&mut self, targets: &[String], waiting: Vec<Skipped>) {
        self.heading("Mooncake itself");
        let mooncake = Mooncake::prepare(self.workspace);
        let (mut can_run, mut cannot) = (Vec::new(), Vec::new());
        for test in waiting {
            match mooncake.obstacle(&test.why) {
                None => can_run.push(test),
                Some(why) => {
                    cannot.push(Skipped::new(test.what, format!("needs a real Mooncake: {why}")));
                }
            }
        }
        self.tally.skipped.extend(cannot);
        if can_run.is_empty() {
            return;
        }
        let step = "tests against a real Mooncake";
        self.heading(step);
        let mut command = self.with_options();
        command.arg("--lib").args(targets.iter().flat_map(|target| ["--test", target]));
        command.args(["--", "--ignored", "--exact"]).args(can_run.iter().map(Skipped::test));
        command.envs(mooncake.variables());
        // Mooncake logs every connection; its errors stay.
        for variable in ["MC_LOG_LEVEL", "GLOG_minloglevel"] {
            if env::var_os(variable).is_none() {
                command.env(variable, if variable == "MC_LOG_LEVEL" { "ERROR" } else { "2" });
            }
        }
        let mut tally = self.read(step, &mut command, TEST_LIMIT);
        tally.require(step, can_run.len());
        self.tally.add(tally);
    }

    fn with_options(&self) -> Command {
        let features: Vec<String> = self
            .workspace
            .members
            .iter()
            .flat_map(|member| {
                let known = FEATURES.iter().filter(|name| member.features.contains(**name));
                known.map(|name| format!("{}/{name}", member.name))
            })
            .collect();
        let mut command = self.workspace.cargo();
        command.args(["test", "--workspace", "--no-fail-fast", "--features"]);
        command.arg(features.join(","));
        if self.has_binary {
            command.env(BINARY, self.workspace.release_binary());
        } // else those that need it build their own
        command
    }
}
