//! Frees that were handed over: what became of them, sample by sample.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Instant,
};

use parking_lot::{Condvar, Mutex};
use transport_core::{Descriptor, Epoch, Error, ErrorKind, ReleaseReport, Result};

/// Frees that were handed to a [`ControlClient`](super::ControlClient).
///
/// Await it, or [`wait`](Self::wait); dropping it changes nothing about the frees.
#[derive(Clone, Debug)]
pub struct FreeTicket(Arc<Batch>);

/// One batch of samples, all of one life of one server.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) samples: Vec<Arc<Descriptor>>,
    pub(super) epoch: Option<Epoch>,
    state: Mutex<State>,
    settled: Condvar,
}

#[derive(Debug)]
struct State {
    left: usize, // samples that are not settled
    report: ReleaseReport,
    error: Option<Error>,
    wakers: Vec<Waker>,
}

/// What became of one sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Released,
    Gone,
    Stale,
    Unconfirmed,
}

impl FreeTicket {
    pub(super) fn new(samples: Vec<Arc<Descriptor>>, epoch: Option<Epoch>) -> Self {
        let state = State {
            left: samples.len(),
            report: ReleaseReport::default(),
            error: None,
            wakers: Vec::new(),
        };
        Self(Arc::new(Batch { samples, epoch, state: Mutex::new(state), settled: Condvar::new() }))
    }

    pub(super) fn batch(&self) -> &Arc<Batch> {
        &self.0
    }

    /// Waits for all answers, at the latest until `deadline`.
    ///
    /// After a timeout the frees are still on their way.
    pub fn wait(&self, deadline: Instant) -> Result<ReleaseReport> {
        let mut state = self.0.state.lock();
        while state.left > 0 {
            if self.0.settled.wait_until(&mut state, deadline).timed_out() && state.left > 0 {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    "release",
                    "the server has not answered yet",
                )
                .with("samples", state.left)
                .remedy("the frees are still being sent; release again to learn their fate"));
            }
        }
        state.outcome()
    }
}

impl Future for FreeTicket {
    type Output = Result<ReleaseReport>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.0.state.lock();
        if state.left == 0 {
            return Poll::Ready(state.outcome());
        }
        if !state.wakers.iter().any(|waker| waker.will_wake(cx.waker())) {
            state.wakers.push(cx.waker().clone());
        }
        Poll::Pending
    }
}

impl State {
    fn outcome(&mut self) -> Result<ReleaseReport> {
        let Some(error) = &self.error else { return Ok(self.report) };
        // Several may ask, and errors cannot be cloned.
        let report = self.report;
        let mut again = Error::new(error.kind(), "release", error.message().to_owned());
        for name in ["peer", "expected", "found", "reason"] {
            if let Some(value) = error.context(name) {
                again = again.with(name, value);
            }
        }
        Err(again
            .with("released", report.released)
            .with("already_gone", report.already_gone)
            .with("stale", report.stale)
            .with("unconfirmed", report.unconfirmed)
            .remedy(
                "release the same samples again once the server can be reached: it is idempotent",
            ))
    }
}

impl Batch {
    /// Records what became of some samples.
    pub(super) fn settle(&self, fates: impl IntoIterator<Item = Fate>) {
        let mut state = self.state.lock();
        for fate in fates {
            state.left -= 1;
            let report = &mut state.report;
            *match fate {
                Fate::Released => &mut report.released,
                Fate::Gone => &mut report.already_gone,
                Fate::Stale => &mut report.stale,
                Fate::Unconfirmed => &mut report.unconfirmed,
            } += 1;
        }
        self.tell(state);
    }

    /// Records that the fate of some samples will not be known.
    pub(super) fn fail(&self, samples: usize, error: impl FnOnce() -> Error) {
        let mut state = self.state.lock();
        state.left -= samples;
        state.error.get_or_insert_with(error);
        self.tell(state);
    }

    fn tell(&self, mut state: parking_lot::MutexGuard<'_, State>) {
        if state.left > 0 {
            return;
        }
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        self.settled.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }
}
