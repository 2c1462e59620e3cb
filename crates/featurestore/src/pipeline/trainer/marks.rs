//! How long recording and freeing take, seen from the points that matter to a crash.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::ledger::{Observer, Point};

/// Time between the [`Point`]s of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Marks(Arc<Mutex<Times>>);

#[derive(Debug, Default)]
struct Times {
    recording: Span,
    freeing: Span,
}

#[derive(Debug, Default)]
struct Span {
    since: Option<Instant>,
    total: Duration,
    count: u64,
}

impl Span {
    fn begin(&mut self) {
        self.since = Some(Instant::now());
    }

    fn end(&mut self) {
        if let Some(since) = self.since.take() {
            self.total += since.elapsed();
            self.count += 1;
        }
    }
}

impl Marks {
    /// Takes the times.
    pub(super) fn observer(&self) -> Observer {
        let times = self.0.clone();
        Observer::new(move |point| {
            let mut times = times.lock();
            match point {
                Point::BeforeCommit => times.recording.begin(),
                Point::AfterCommit => times.recording.end(),
                Point::BeforeFree => times.freeing.begin(),
                Point::BeforeSettle => times.freeing.end(),
                _ => {}
            }
        })
    }

    /// Time in the ledger's transactions.
    pub(super) fn recording(&self) -> Duration {
        self.0.lock().recording.total
    }

    /// The ledger's transactions.
    pub(super) fn transactions(&self) -> u64 {
        self.0.lock().recording.count
    }

    /// Time in which what is durable was freed.
    pub(super) fn freeing(&self) -> Duration {
        self.0.lock().freeing.total
    }
}
