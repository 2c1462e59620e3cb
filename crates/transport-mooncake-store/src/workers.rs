//! Threads that make the store's blocking calls, and what becomes of a call that nobody awaits.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Sender, unbounded};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use transport_core::{Error, ErrorKind, Result};

type Job = Box<dyn FnOnce() + Send>;

/// A few threads for blocking calls.
#[derive(Debug)]
pub(crate) struct Workers {
    jobs: Sender<Job>,
    busy: Arc<AtomicUsize>, // jobs queued or running
}

impl Workers {
    pub(crate) fn start(threads: usize) -> Result<Self> {
        let (jobs, queue) = unbounded::<Job>();
        for i in 0..threads {
            let queue = queue.clone();
            thread::Builder::new()
                .name(format!("store-io-{i}"))
                .spawn(move || queue.iter().for_each(|job| job()))
                .map_err(|e| Error::io("start store threads", e))?;
        }
        Ok(Self { jobs, busy: Arc::default() })
    }

    /// Runs a job on one of the threads; a job whose flight was abandoned before is dropped unrun.
    pub(crate) fn submit<T: Send + 'static>(
        &self,
        flight: Arc<Flight>,
        job: impl FnOnce(&Flight) -> Result<T> + Send + 'static,
    ) -> oneshot::Receiver<Result<T>> {
        let (reply, answer) = oneshot::channel();
        let busy = Busy::new(&self.busy);
        let run = move || {
            let _busy = busy;
            if flight.check().is_err() {
                return;
            }
            let result = catch_unwind(AssertUnwindSafe(|| job(&flight))).unwrap_or_else(|_| {
                Err(Error::new(ErrorKind::Unexpected, "call store", "the call panicked"))
            });
            drop(reply.send(result)); // nobody waits for an abandoned call
        };
        // Fails only when every thread is gone, which closes the channel that is waited on.
        drop(self.jobs.send(Box::new(run)));
        answer
    }

    /// Waits until no job is queued or running.
    pub(crate) async fn idle(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while self.busy.load(Ordering::SeqCst) > 0 {
            if Instant::now() >= deadline {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        true
    }
}

struct Busy(Arc<AtomicUsize>);

impl Busy {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count.clone())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// One call, from its start to the end of its last transfer, whoever still waits for it.
#[derive(Debug)]
pub(crate) struct Flight {
    state: Mutex<State>,
    stop: Arc<AtomicBool>, // set when it is abandoned
    abandoned_bytes: Arc<AtomicU64>,
    deadline: Option<Instant>,
}

#[derive(Debug, Default)]
struct State {
    abandoned: bool,
    exposed: u64, // bytes that a running transfer may write
}

impl Flight {
    /// A call that is over by `deadline`. What it still transfers when nobody waits any more is
    /// counted in `abandoned_bytes`.
    pub(crate) fn new(deadline: Duration, abandoned_bytes: &Arc<AtomicU64>) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            stop: Arc::default(),
            abandoned_bytes: abandoned_bytes.clone(),
            deadline: Instant::now().checked_add(deadline),
        })
    }

    /// Time left; zero once it has passed.
    pub(crate) fn remaining(&self) -> Duration {
        self.deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()))
    }

    /// When it has to be over: some day, if it has no deadline.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline.unwrap_or_else(|| Instant::now() + Duration::from_secs(1 << 30))
    }

    /// Set when nobody waits any more.
    pub(crate) fn stop(&self) -> &Arc<AtomicBool> {
        &self.stop
    }

    /// Fails if nobody waits any more.
    pub(crate) fn check(&self) -> Result<()> {
        if self.state.lock().abandoned {
            return Err(Error::new(ErrorKind::Timeout, "call store", "nobody waits for this call"));
        }
        Ok(())
    }

    /// Pauses for `pause`, at most until the deadline; fails if that passed or nobody waits.
    pub(crate) fn pause(&self, pause: Duration) -> Result<()> {
        let step = Duration::from_millis(20);
        let until = Instant::now() + pause.min(self.remaining());
        loop {
            self.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            thread::sleep(left.min(step));
        }
        if self.remaining().is_zero() {
            return Err(Error::new(ErrorKind::Timeout, "call store", "the deadline passed"));
        }
        Ok(())
    }

    /// Runs a transfer that may write `bytes` of memory.
    pub(crate) fn transfer<T>(&self, bytes: u64, transfer: impl FnOnce() -> T) -> Result<T> {
        {
            let mut state = self.state.lock();
            if state.abandoned {
                drop(state);
                self.check()?;
            } else {
                state.exposed += bytes;
            }
        }
        let result = transfer();
        let mut state = self.state.lock();
        state.exposed -= bytes;
        if state.abandoned {
            self.abandoned_bytes.fetch_sub(bytes, Ordering::SeqCst);
        }
        Ok(result)
    }

    /// Nobody waits any more.
    pub(crate) fn abandon(&self) {
        let mut state = self.state.lock();
        if !state.abandoned {
            state.abandoned = true;
            self.stop.store(true, Ordering::SeqCst);
            self.abandoned_bytes.fetch_add(state.exposed, Ordering::SeqCst);
        }
    }
}

/// Abandons the flight when the future that waits for it is dropped.
pub(crate) struct Waiting(pub(crate) Arc<Flight>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.abandon(); // does nothing once the transfers are over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn abandoned_transfers_are_counted_until_they_are_over() {
        let count = Arc::new(AtomicU64::new(0));
        let flight = Flight::new(Duration::from_secs(5), &count);
        let seen = flight
            .transfer(100, || {
                flight.abandon();
                flight.abandon();
                count.load(Ordering::SeqCst)
            })
            .unwrap();
        assert_eq!((seen, count.load(Ordering::SeqCst)), (100, 0));
        assert!(flight.transfer(1, || ()).is_err(), "no new transfer is begun");
        assert!(flight.pause(Duration::from_secs(60)).is_err());
    }

    #[tokio::test]
    async fn a_panic_and_an_abandoned_job_end_well() {
        let workers = Workers::start(1).unwrap();
        let count = Arc::default();
        let flight = || Flight::new(Duration::from_secs(5), &count);
        let panicked = workers.submit::<()>(flight(), |_| panic!("boo")).await.unwrap();
        assert_eq!(panicked.unwrap_err().kind(), ErrorKind::Unexpected);
        let abandoned = flight();
        abandoned.abandon();
        assert!(workers.submit(abandoned, |_| Ok(())).await.is_err(), "never run");
        assert_eq!(workers.submit(flight(), |_| Ok(7)).await.unwrap().unwrap(), 7);
        assert!(workers.idle(Duration::from_secs(5)).await);
    }
}
