//! Processes and raw clients for the multi-process tests.
//!
//! Everything a test starts is owned by a guard that ends it, also when the test fails; every wait
//! has a bound. The raw clients speak the documented bytes with the standard library alone, so that
//! a mistake in the workspace's own clients cannot hide one in its servers.
#![forbid(unsafe_code)]

pub mod capture;
pub mod http;
pub mod process;
pub mod remote;
pub mod wire;

use std::time::{Duration, Instant};

/// Longest time that any single step of a test may take.
pub const STEP: Duration = Duration::from_secs(20);

/// Polls `condition` until it holds.
///
/// # Panics
/// When it does not hold within `limit`.
pub fn eventually(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + limit;
    while !condition() {
        assert!(Instant::now() < end, "{what}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
