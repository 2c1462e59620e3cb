//! `cargo xtask golden`: the committed golden files are what the code reads and writes today.

use std::time::Duration;

use crate::{Result, libtest::Reader, process, workspace::Workspace};

/// Name of the test target that compares a crate with its golden files.
const TARGET: &str = "golden";
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Runs every test target called `golden`, and fails where one does, where there is none, or where
/// a golden file is not as committed.
///
/// The files state the formats as documented. They are written by hand or by the other side, never
/// by the code under test, so there is nothing here that rewrites them.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let mut command = workspace.cargo();
    command.args(["test", "--no-fail-fast", "--test", TARGET]);
    let mut packages = 0;
    for member in &workspace.members {
        if member.tests.iter().any(|test| test.name == TARGET) {
            command.args(["--package", &member.name]);
            packages += 1;
        }
    }
    if packages == 0 {
        return Err(format!("no package has a test target called {TARGET}"));
    }
    let mut reader = Reader::default();
    let ended = process::run(&mut command, &workspace.target, LIMIT, |line| {
        if reader.line(line) {
            println!("{line}");
        }
    })?;
    let problem = ended.problem();
    let tally = reader.finish_all(problem.is_none());
    println!("golden: {}", tally.line());
    if let Some(problem) = problem {
        return Err(problem);
    }

    let mut git = workspace.git();
    git.args(["status", "--short", "--", ":(glob)**/golden/**"]);
    match process::output(&mut git)?.trim_end() {
        "" => Ok(()),
        changes => {
            Err(format!("not as committed; a format changed, or should not have:\n{changes}"))
        }
    }
}
