//! Threads for jobs that block: started when needed, bounded, ended when idle, joined at close.

use std::{
    collections::VecDeque,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};
use transport_core::{Error, ErrorKind, Result};

/// How long a thread without work stays.
const LINGER: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

/// A bounded set of threads. Jobs that find none free wait in line.
#[derive(Clone)]
pub(crate) struct Workers(Arc<Shared>);

struct Shared {
    name: &'static str,
    max_threads: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    idle: usize,
    running: usize, // threads, idle ones included
    threads: Vec<JoinHandle<()>>,
    closed: bool,
}

impl Workers {
    pub(crate) fn new(name: &'static str, max_threads: usize) -> Self {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Self(Arc::new(Shared { name, max_threads, state, changed }))
    }

    /// Runs `job` on one of the threads.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) -> Result<()> {
        let mut state = self.0.state.lock();
        if state.closed {
            return Err(Error::new(ErrorKind::Closed, "start job", "the transport is closed"));
        }
        state.jobs.push_back(Box::new(job));
        if state.idle >= state.jobs.len() || state.running >= self.0.max_threads {
            self.0.changed.notify_one();
            return Ok(());
        }
        let shared = self.0.clone();
        let spawned =
            std::thread::Builder::new().name(self.0.name.into()).spawn(move || shared.work());
        match spawned {
            Ok(thread) => {
                state.running += 1;
                state.threads.retain(|thread| !thread.is_finished());
                state.threads.push(thread);
                Ok(())
            }
            Err(_) if state.running > 0 => Ok(()), // one of the others will take it
            Err(e) => {
                state.jobs.pop_back();
                Err(Error::io("start job", e))
            }
        }
    }

    /// Takes no more jobs and drops those in line, then waits for those that run, at most `bound`.
    /// False if some still run.
    pub(crate) fn close(&self, bound: Duration) -> bool {
        let deadline = Instant::now() + bound;
        let mut state = self.0.state.lock();
        state.closed = true;
        let dropped = std::mem::take(&mut state.jobs);
        self.0.changed.notify_all();
        // A job may hold the last handle of what is closed here: its thread waits for the others.
        let own = std::thread::current().id();
        let spared = usize::from(state.threads.iter().any(|thread| thread.thread().id() == own));
        while state.running > spared {
            let late = self.0.changed.wait_until(&mut state, deadline).timed_out();
            if late && state.running > spared {
                return false;
            }
        }
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        drop(dropped); // outside the lock: jobs own whatever
        for thread in threads {
            if thread.thread().id() != own {
                let _ = thread.join();
            }
        }
        true
    }
}

impl Shared {
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                let job = std::panic::AssertUnwindSafe(job);
                // The caller sees its answer missing; the message has been printed.
                let _ = std::panic::catch_unwind(|| { job }.0());
                state = self.state.lock();
                continue;
            }
            if state.closed {
                break;
            }
            state.idle += 1;
            let idle_long = self.changed.wait_for(&mut state, LINGER).timed_out();
            state.idle -= 1;
            if idle_long && state.jobs.is_empty() {
                break;
            }
        }
        state.running -= 1;
        drop(state);
        self.changed.notify_all();
    }
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.0.state.lock();
        f.debug_struct("Workers")
            .field("name", &self.0.name)
            .field("threads", &state.running)
            .field("waiting", &state.jobs.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn jobs_run_on_few_threads_and_close_waits_for_them() {
        let workers = Workers::new("test-workers", 3);
        let done = Arc::new(AtomicUsize::new(0));
        workers.run(|| panic!("a job may panic")).unwrap();
        for _ in 0..20 {
            let done = done.clone();
            let job = move || {
                std::thread::sleep(Duration::from_millis(2));
                done.fetch_add(1, Ordering::Relaxed);
            };
            workers.run(job).unwrap();
        }
        assert!(workers.0.state.lock().running <= 3);
        let deadline = Instant::now() + Duration::from_secs(10);
        while done.load(Ordering::Relaxed) < 20 {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(workers.close(Duration::from_secs(5)));
        assert_eq!(workers.run(|| {}).unwrap_err().kind(), ErrorKind::Closed);
    }

    #[test]
    fn close_does_not_wait_for_ever() {
        let workers = Workers::new("test-workers", 1);
        let (end, wait) = crossbeam_channel::bounded::<()>(0);
        let (started, running) = crossbeam_channel::bounded(1);
        let job = move || {
            started.send(()).unwrap();
            assert!(wait.recv().is_err());
        };
        workers.run(job).unwrap();
        running.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(!workers.close(Duration::from_millis(50)));
        drop(end);
        assert!(workers.close(Duration::from_secs(5)));
    }
}
