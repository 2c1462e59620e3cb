//! Command line of featurestore.
//!
//! Exit codes: 0 success, 1 failure, 2 wrong usage, 3 the job ran but its result is wrong
//! (a mismatch, a leak or a shortfall).
#![forbid(unsafe_code)]

mod cli;

fn main() -> std::process::ExitCode {
    cli::run()
}
