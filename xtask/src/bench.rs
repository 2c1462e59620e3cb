//! `cargo xtask bench`: the benches in release, one after another, with their tables kept.

use std::{env, fs, path::PathBuf, time::Duration};

use crate::{Result, machine::Machine, process, workspace::Workspace};

const PACKAGE: &str = "featurestore-benches";
/// Longest build and run of one bench.
const LIMIT: Duration = Duration::from_secs(30 * 60);

/// The bench of the store, which needs a real Mooncake and therefore runs only when it is named.
const STORE: &str = "store";
/// What it is, for `cargo build` and `cargo run`.
const STORE_EXAMPLE: [&str; 7] = [
    "--release",
    "--package",
    PACKAGE,
    "--features",
    "mooncake-python",
    "--example",
    "store_figures",
];

/// Runs every bench, or the one named, and writes `benches/results/NAME.txt` for each.
pub(crate) fn run(workspace: &Workspace, only: Option<&str>) -> Result<()> {
    if only == Some(STORE) {
        return run_store(workspace);
    }
    let benches = workspace
        .member(PACKAGE)
        .map(|member| member.benches.as_slice())
        .filter(|benches| !benches.is_empty())
        .ok_or_else(|| format!("{PACKAGE} has no benches"))?;
    if let Some(name) = only
        && !benches.iter().any(|bench| bench == name)
    {
        let all = benches.join(", ");
        return Err(format!("no bench is called {name:?}; there are: {all}, {STORE}"));
    }

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
        keep(workspace, bench, &machine, &table)?;
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n")) }
}

/// Compares the store transport with Mooncake's own Python client.
fn run_store(workspace: &Workspace) -> Result<()> {
    const VENV: &str = "FEATURESTORE_MOONCAKE_VENV";
    let named = env::var_os(VENV).filter(|venv| !venv.is_empty()).map(PathBuf::from);
    let venv = named.unwrap_or_else(|| workspace.target.join("mooncake-venv"));
    if !venv.join("bin/mooncake_master").exists() {
        return Err(format!("no Mooncake at {}: cargo xtask mooncake-venv", venv.display()));
    }
    let mut build = workspace.cargo();
    build.arg("build").args(STORE_EXAMPLE);
    let mut command = workspace.cargo();
    command.arg("run").args(STORE_EXAMPLE);
    let machine = Machine::look();
    for (command, is_measured) in [(&mut build, false), (&mut command, true)] {
        command.env(VENV, &venv).env("MC_FORCE_TCP", "1").env("MC_LOG_LEVEL", "ERROR");
        let mut table = String::new();
        let ended = process::run(command, &workspace.target, LIMIT, |line| {
            println!("{line}");
            if is_result(line) && !is_log(line) {
                table += line.trim_end();
                table.push('\n');
            }
        })?;
        if let Some(problem) = ended.problem() {
            return Err(format!("{STORE}: {problem}"));
        }
        if is_measured {
            keep(workspace, STORE, &machine, &table)?;
        }
    }
    Ok(())
}

/// Whether a line is Mooncake's log and not a result.
fn is_log(line: &str) -> bool {
    let level = line.starts_with(['I', 'W', 'E']);
    line.starts_with("WARNING: Logging before")
        || level && line[1..].starts_with(|c: char| c.is_ascii_digit())
}

/// Writes a table with the facts of the machine.
fn keep(workspace: &Workspace, bench: &str, machine: &Machine, table: &str) -> Result<()> {
    let folder = workspace.root.join("benches/results");
    fs::create_dir_all(&folder)
        .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
    let root = workspace.root.display().to_string();
    let text = format!("bench:  {bench}\n{machine}\n{}", table.replace(&root, "."));
    let file = folder.join(format!("{bench}.txt"));
    fs::write(&file, text).map_err(|error| format!("cannot write {}: {error}", file.display()))
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
    const PROGRESS: [&str; 7] = [
        "Benchmarking ",
        "Finished `",
        "Found ",
        "Running `",
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
        assert!(is_log("E1129 17:43:21.893622 15589 transfer_metadata.cpp:616] gone"));
        assert!(!is_log("Mooncake 0.3.13.post1") && !is_log("E") && !is_log(""));
        assert!(!is_result("Gnuplot not found, using plotters backend"));
    }
}
