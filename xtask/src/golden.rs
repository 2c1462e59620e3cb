//! `cargo xtask golden`: the committed golden files are what the code writes today.

use std::time::Duration;

use crate::{Result, libtest::Reader, process, workspace::Workspace};

/// Set to `write`, it makes the golden tests rewrite their files.
const VARIABLE: &str = "FEATURESTORE_GOLDEN";
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Runs the tests with `golden` in their path, which fail where a file differs from what the code
/// writes. With `write` they write their files first, and the changes are listed for review.
pub(crate) fn run(workspace: &Workspace, write: bool) -> Result<()> {
    if write {
        tests(workspace, Some("write"))?;
    }
    tests(workspace, None)?;
    if write {
        let mut git = workspace.command("git");
        git.args(["status", "--short", "--", ":(glob)**/golden/**"]);
        let changes = process::output(&mut git)?;
        match changes.trim_end() {
            "" => println!("no golden file changed"),
            changes => println!("changed, read before you commit:\n{changes}"),
        }
    }
    Ok(())
}

fn tests(workspace: &Workspace, mode: Option<&str>) -> Result<()> {
    let mut command = workspace.cargo();
    command.args(["test", "--no-fail-fast", "--lib", "--tests"]);
    for member in workspace.members.iter().filter(|member| member.is_public()) {
        command.args(["--package", &member.name]);
    }
    command.args(["--", "golden"]);
    match mode {
        Some(mode) => command.env(VARIABLE, mode),
        None => command.env_remove(VARIABLE),
    };
    let mut reader = Reader::default();
    let ended = process::run(&mut command, &workspace.target, LIMIT, |line| {
        if reader.line(line) {
            println!("{line}");
        }
    })?;
    let problem = ended.problem();
    let tally = reader.finish_all(problem.is_none());
    match problem {
        Some(problem) => Err(format!("{problem}; {}", tally.line())),
        None if tally.passed == 0 => Err("no test has `golden` in its path".to_owned()),
        None => {
            println!("golden: {}", tally.line());
            Ok(())
        }
    }
}
