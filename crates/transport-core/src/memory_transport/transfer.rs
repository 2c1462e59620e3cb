//! Copies on a thread of their own, which their callers may walk away from.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::{
    Error, ErrorKind, Result,
    deadline::{Deadline, Elapsed},
};

/// Counts the copies under way and the memory of those that were abandoned.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    running: AtomicU64,
    quarantined_bytes: AtomicU64,
    idle: Notify,
}

impl Transfers {
    /// Runs `copy`, which owns all memory it touches and writes `bytes` of consumer memory.
    ///
    /// When the deadline passes or this future is dropped, the copy goes on; until it is over, its
    /// bytes count as quarantined and its memory stays with it.
    pub(super) async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        operation: &'static str,
        deadline: Deadline,
        bytes: u64,
        copy: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.running.fetch_add(1, Ordering::SeqCst);
        let ticket =
            Arc::new(Ticket { transfers: self.clone(), bytes, phase: Mutex::new(Phase::Running) });
        let worker = Worker(ticket.clone());
        let _caller = Caller(ticket);
        let task = tokio::task::spawn_blocking(move || {
            let result = copy();
            drop(worker); // moved in, so that it is also dropped if the task never starts
            result
        });
        match deadline.run(task).await {
            Ok(Ok(result)) => result,
            Ok(Err(lost)) => {
                Err(Error::new(ErrorKind::Unexpected, operation, "the copying thread failed")
                    .source(lost))
            }
            Err(Elapsed) => {
                Err(Error::new(ErrorKind::Timeout, operation, "the copy was not over in time")
                    .with("bytes", bytes))
            }
        }
    }

    pub(super) fn quarantined_bytes(&self) -> u64 {
        self.quarantined_bytes.load(Ordering::SeqCst)
    }

    /// Waits until no copy runs.
    pub(super) async fn idle(&self, bound: Duration) -> Result<(), Elapsed> {
        Deadline::after(bound)
            .run(async {
                loop {
                    let idle = self.idle.notified(); // before the look, so that no end is missed
                    if self.running.load(Ordering::SeqCst) == 0 {
                        return;
                    }
                    idle.await;
                }
            })
            .await
    }
}

struct Ticket {
    transfers: Arc<Transfers>,
    bytes: u64,
    phase: Mutex<Phase>,
}

#[derive(PartialEq, Eq)]
enum Phase {
    Running,
    /// The caller went away; the copy still runs.
    Abandoned,
    Over,
}

struct Caller(Arc<Ticket>);

impl Drop for Caller {
    fn drop(&mut self) {
        let mut phase = self.0.phase.lock();
        if *phase == Phase::Running {
            *phase = Phase::Abandoned;
            self.0.transfers.quarantined_bytes.fetch_add(self.0.bytes, Ordering::SeqCst);
        }
    }
}

struct Worker(Arc<Ticket>);

impl Drop for Worker {
    fn drop(&mut self) {
        let transfers = &self.0.transfers;
        let mut phase = self.0.phase.lock();
        if *phase == Phase::Abandoned {
            transfers.quarantined_bytes.fetch_sub(self.0.bytes, Ordering::SeqCst);
        }
        *phase = Phase::Over;
        drop(phase);
        if transfers.running.fetch_sub(1, Ordering::SeqCst) == 1 {
            transfers.idle.notify_waiters();
        }
    }
}
