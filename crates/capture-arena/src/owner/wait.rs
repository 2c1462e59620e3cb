//! Waiting for the owner, or for work: awake for a moment, then asleep.

use std::{
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long a thread that talks to the owner, or the owner itself, looks before it sleeps.
const SPIN: Duration = Duration::from_micros(20);

/// Runs a future on this thread, which sleeps while there is nothing to do.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark {
        thread: thread::Thread,
        woken: AtomicBool,
    }
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.woken.store(true, Ordering::Release);
            self.thread.unpark();
        }
    }
    let unpark = Arc::new(Unpark { thread: thread::current(), woken: AtomicBool::new(false) });
    let waker = unpark.clone().into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        if let std::task::Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        if spin(|| unpark.woken.load(Ordering::Acquire).then_some(())).is_none() {
            thread::park();
        }
        unpark.woken.store(false, Ordering::Relaxed);
    }
}

/// Looks for something that most likely comes at once, before a thread is put to sleep: waking it
/// can take longer than a whole request does. Not where the other side may need this processor.
pub(super) fn spin<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    static HAS_ROOM: LazyLock<bool> =
        LazyLock::new(|| thread::available_parallelism().is_ok_and(|n| n.get() >= 4));
    if !*HAS_ROOM {
        return None;
    }
    let started = Instant::now();
    while started.elapsed() < SPIN {
        if let Some(found) = look() {
            return Some(found);
        }
        std::hint::spin_loop();
    }
    None
}
