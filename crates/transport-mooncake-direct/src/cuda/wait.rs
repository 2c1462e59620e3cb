//! Waiting for a device.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use transport_core::{Error, ErrorKind, Result};

/// How long a wait looks as often as it can. Then it sleeps between looks, for [`NAP`].
const SPIN: Duration = Duration::from_millis(5);
const NAP: Duration = Duration::from_micros(50);
/// Looks at a signal between two questions to the driver, which costs more and finds faults.
const LOOKS: u32 = 2048;

/// Looks for a while whether a kernel has written `ticket`.
pub(super) fn is_signalled(word: &AtomicU32, ticket: u32) -> bool {
    (0..LOOKS).any(|_| {
        let is_there = word.load(Ordering::Acquire) == ticket;
        if !is_there {
            std::hint::spin_loop();
        }
        is_there
    })
}

/// Looks until it is done: as often as possible at first, then between naps.
pub(super) fn until(
    operation: &'static str,
    deadline: Instant,
    mut is_done: impl FnMut() -> Result<bool>,
) -> Result<()> {
    if is_done()? {
        return Ok(());
    }
    let started = Instant::now();
    while !is_done()? {
        let now = Instant::now();
        if now >= deadline {
            return Err(Error::new(
                ErrorKind::Timeout,
                operation,
                "the device is not done in time",
            )
            .with("waited_ms", now.saturating_duration_since(started).as_millis())
            .remedy("allow more time, or look for other work that keeps the device busy"));
        }
        if now.duration_since(started) > SPIN {
            std::thread::sleep(NAP);
        }
    }
    Ok(())
}
