//! One batch over several connections at once.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::plan::Request;

/// Requests of a batch, handed out one after the other to whoever asks first.
pub(super) struct Queue<'a> {
    requests: Mutex<std::vec::IntoIter<Request<'a>>>,
    /// A lane failed: the others stop asking.
    failed: AtomicBool,
}

impl<'a> Queue<'a> {
    pub(super) fn new(requests: Vec<Request<'a>>) -> Self {
        Self { requests: Mutex::new(requests.into_iter()), failed: AtomicBool::new(false) }
    }

    pub(super) fn next(&self) -> Option<Request<'a>> {
        if self.failed.load(Ordering::Relaxed) { None } else { self.requests.lock().next() }
    }

    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }
}

/// Runs `lane` on this thread and on `more` others, and returns the first failure.
///
/// Returns when all have ended: nobody touches the destinations any more.
pub(crate) fn run<E: Send>(
    more: usize,
    lane: impl Fn(usize) -> Result<(), E> + Sync,
) -> Result<(), E> {
    if more == 0 {
        return lane(0);
    }
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..=more)
            .filter_map(|i| {
                let lane = &lane;
                // With fewer threads the rest does more.
                std::thread::Builder::new()
                    .name("fs-tcp-lane".into())
                    .spawn_scoped(scope, move || lane(i))
                    .ok()
            })
            .collect();
        let mut result = lane(0);
        for other in others {
            match other.join() {
                Ok(ended) => result = result.and(ended),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        result
    })
}
