//! The commands of this repository, in Rust, so that a toolchain is all they need.
//!
//! `cargo xtask test` is what a newcomer runs; `cargo xtask lint` is the rest of what has to pass
//! before a change is merged. Every command bounds its time, ends what it started, and says what it
//! did not do.
#![forbid(unsafe_code)]

mod bench;
mod clean;
mod golden;
mod libtest;
mod lint;
mod machine;
mod mooncake;
mod process;
#[cfg(feature = "ptx")]
mod ptx;
mod soak;
mod test;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

/// Outcome of a command: what went wrong, in words that say what to do.
type Result<T, E = String> = std::result::Result<T, E>;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Tests, checks and benches of featurestore")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs the tests, and lists those that were not run, and why
    Test {
        /// Leaves out the multi-process tests, loom and miri, and tries fewer random cases
        #[arg(long)]
        quick: bool,
        /// Only the tests of what loads Mooncake, among them those against a real one
        #[arg(long)]
        mooncake: bool,
        /// Runs the tests that need a CUDA device, and no others
        #[arg(long, conflicts_with = "quick")]
        gpu: bool,
    },
    /// Checks format, lints, docs, dependencies, the binary, and the text of the sources
    Lint,
    /// Runs the benches in release, one after another, and keeps their tables in benches/results
    Bench {
        /// Only this bench
        name: Option<String>,
    },
    /// Checks the code against the golden files, and these against what is committed
    Golden,
    /// Repeats random, fault and load tests with many more cases
    Soak {
        /// How long, at most
        #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=10_080))]
        minutes: u64,
        /// Only the steps whose names hold this, such as ranks; RANKS_SEED=N replays that one
        #[arg(long)]
        only: Option<String>,
    },
    /// Checks that nothing is uncommitted and that a fresh clone builds
    CleanCheck,
    /// Compiles the device code, with the NVRTC library of CUDA 12.3 on the loader's path
    #[cfg(feature = "ptx")]
    Ptx,
    /// Installs released builds of Mooncake below the target directory; `test` does so by itself
    MooncakeVenv,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = process::adopt_orphans().and_then(|()| Workspace::load()).and_then(|workspace| {
        match cli.command {
            Command::Test { gpu: true, .. } => test::run_on_device(&workspace),
            Command::Test { quick, mooncake, .. } => test::run(&workspace, quick, mooncake),
            Command::Lint => lint::run(&workspace),
            Command::Bench { name } => bench::run(&workspace, name.as_deref()),
            Command::Golden => golden::run(&workspace),
            Command::Soak { minutes, only } => soak::run(&workspace, minutes, only.as_deref()),
            Command::CleanCheck => clean::run(&workspace),
            #[cfg(feature = "ptx")]
            Command::Ptx => ptx::run(&workspace),
            Command::MooncakeVenv => mooncake::run(&workspace),
        }
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn soak_needs_a_sensible_time() {
        assert!(Cli::try_parse_from(["xtask", "soak", "--minutes", "0"]).is_err());
        assert!(Cli::try_parse_from(["xtask", "soak", "--minutes", "5"]).is_ok());
    }
}
