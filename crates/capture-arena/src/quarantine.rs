//! What was given up while something may still write it.

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// How often what is waited for at the end is looked at.
const NAP: Duration = Duration::from_micros(200);

/// Work that nobody waits for any more, with everything that must live until it is over.
///
/// Dropping it, once it is over, gives that back.
pub trait Unfinished: Send {
    /// Whether it no longer reads or writes anything. Does not block.
    fn is_over(&mut self) -> bool;

    /// Memory that it may still write, in bytes; does not change.
    fn bytes(&self) -> u64;
}

/// Keeps unfinished work, counted, until it is over.
///
/// Nothing looks by itself: whoever puts something in or asks for the bytes does. Dropped, it waits
/// for what is left within a bound, and never frees what is not over by then.
pub struct Quarantine<T: Unfinished> {
    kept: Mutex<Vec<T>>,
    bytes: AtomicU64,
    last_wait: Duration,
}

impl<T: Unfinished> Quarantine<T> {
    /// An empty one that waits at most `last_wait` when it is dropped.
    pub fn new(last_wait: Duration) -> Self {
        Self { kept: Mutex::default(), bytes: AtomicU64::new(0), last_wait }
    }

    /// Keeps `unfinished` until it is over.
    pub fn keep(&self, unfinished: T) {
        self.sweep();
        self.bytes.fetch_add(unfinished.bytes(), Ordering::SeqCst);
        self.kept.lock().push(unfinished);
    }

    /// Lets go of what is over.
    pub fn sweep(&self) {
        let looked_at = {
            let mut kept = self.kept.lock();
            if kept.is_empty() {
                return;
            }
            std::mem::take(&mut *kept)
        };
        // Not under the lock: looking may take a moment, and what is let go of has locks of its own.
        for mut unfinished in looked_at {
            if unfinished.is_over() {
                let bytes = unfinished.bytes();
                drop(unfinished);
                self.bytes.fetch_sub(bytes, Ordering::SeqCst);
            } else {
                self.kept.lock().push(unfinished);
            }
        }
    }

    /// Memory that may still be written, in bytes.
    pub fn bytes(&self) -> u64 {
        self.sweep();
        self.bytes.load(Ordering::SeqCst)
    }
}

impl<T: Unfinished> Drop for Quarantine<T> {
    fn drop(&mut self) {
        let deadline = Instant::now() + self.last_wait;
        for mut unfinished in self.kept.get_mut().drain(..) {
            while !unfinished.is_over() {
                if Instant::now() >= deadline {
                    // It may be written until the process ends: it is never freed.
                    std::mem::forget(unfinished);
                    break;
                }
                std::thread::sleep(NAP);
            }
        }
    }
}

impl<T: Unfinished> fmt::Debug for Quarantine<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quarantine")
            .field("bytes", &self.bytes.load(Ordering::SeqCst))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::AtomicU32};

    use super::*;

    /// Is over after so many looks.
    struct Work {
        looks: u32,
        freed: Arc<AtomicU32>,
    }

    impl Unfinished for Work {
        fn is_over(&mut self) -> bool {
            self.looks = self.looks.saturating_sub(1);
            self.looks == 0
        }

        fn bytes(&self) -> u64 {
            7
        }
    }

    impl Drop for Work {
        fn drop(&mut self) {
            self.freed.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn work(looks: u32, freed: &Arc<AtomicU32>) -> Work {
        Work { looks, freed: freed.clone() }
    }

    #[test]
    fn what_is_kept_is_counted_until_it_is_over() {
        let freed = Arc::default();
        let quarantine = Quarantine::new(Duration::ZERO);
        quarantine.keep(work(2, &freed));
        quarantine.keep(work(2, &freed)); // looks at the first
        assert_eq!(quarantine.bytes(), 7);
        assert_eq!((quarantine.bytes(), freed.load(Ordering::SeqCst)), (0, 2));
    }

    #[test]
    fn the_end_waits_and_never_frees_what_is_not_over() {
        let (over, never) = (Arc::default(), Arc::default());
        let quarantine = Quarantine::new(Duration::from_millis(20));
        quarantine.keep(work(3, &over));
        quarantine.keep(work(u32::MAX, &never));
        drop(quarantine);
        assert_eq!((over.load(Ordering::SeqCst), never.load(Ordering::SeqCst)), (1, 0));
    }
}
