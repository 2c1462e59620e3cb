//! `cargo xtask bench`: the benches in release, one after another, with their tables kept.

use std::{fs, time::Duration};

use crate::{Result, machine::Machine, process, workspace::Workspace};

const PACKAGE: &str = "featurestore-benches";
/// Longest build and run of one bench.
const LIMIT: Duration = Duration::from_secs(30 * 60);

/// Runs every bench, or the one named, and writes `benches/results/NAME.txt` for each.
pub(crate) fn run(workspace: &Workspace, only: Option<&str>) -> Result<()> {
    let benches = workspace
        .member(PACKAGE)
        .map(|member| member.benches.as_slice())
        .filter(|benches| !benches.is_empty())
        .ok_or_else(|| format!("{PACKAGE} has no benches"))?;
    if let Some(name) = only
        && !benches.iter().any(|bench| bench == name)
    {
        return Err(format!("no bench is called {name:?}; there are: {}", benches.join(", ")));
    }

    let folder = workspace.root.join("benches/results");
    fs::create_dir_all(&folder)
        .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
    build(workspace)?;
    let machine = Machine::look();
    let mut failed = Vec::new();
    for bench in benches.iter().filter(|bench| only.is_none_or(|only| only == bench.as_str())) {
        println!("\n== {bench}");
        let mut command = workspace.cargo();
        command.args(["bench", "--package", PACKAGE, "--bench", bench]);
        command.env("FEATURESTORE_BIN", workspace.release_binary());
        let mut table = String::new();
        let ended = process::run(&mut command, &workspace.target, LIMIT, |line| {
            println!("{line}");
            if is_result(line) {
                table += line.trim_end();
                table.push('\n');
            }
        })?;
        if let Some(problem) = ended.problem() {
            failed.push(format!("{bench}: {problem}"));
            continue;
        }
        let root = workspace.root.display().to_string();
        let text = format!("bench:  {bench}\n{machine}\n{}", table.replace(&root, "."));
        let file = folder.join(format!("{bench}.txt"));
        fs::write(&file, text)
            .map_err(|error| format!("cannot write {}: {error}", file.display()))?;
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n")) }
}

/// Builds all before the first is measured: a compiler that runs beside a bench falsifies it.
fn build(workspace: &Workspace) -> Result<()> {
    let mut binary = workspace.cargo();
    binary.args(["build", "--release", "--package", "featurestore", "--bins"]);
    let mut benches = workspace.cargo();
    benches.args(["bench", "--no-run", "--package", PACKAGE, "--benches"]);
    for command in [&mut binary, &mut benches] {
        let ended = process::run(command, &workspace.target, LIMIT, |line| println!("{line}"))?;
        if let Some(problem) = ended.problem() {
            return Err(format!("the benches do not build: {problem}"));
        }
    }
    Ok(())
}

/// Whether a line is part of a bench's table and not of the progress of cargo or criterion.
fn is_result(line: &str) -> bool {
    const PROGRESS: [&str; 6] = [
        "Benchmarking ",
        "Finished `",
        "Found ",
        "Gnuplot not found",
        "Running benches/",
        "running 0 tests",
    ];
    let line = line.trim_start();
    !PROGRESS.iter().any(|start| line.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_kept_and_progress_is_not() {
        assert!(is_result("alloc+free, 10,000 live      61 ns"));
        assert!(is_result(""));
        assert!(!is_result("Benchmarking alloc: Warming up for 3.0000 s"));
        assert!(!is_result("     Running benches/arena.rs (target/release/deps/arena-0)"));
        assert!(!is_result("Gnuplot not found, using plotters backend"));
    }
}
