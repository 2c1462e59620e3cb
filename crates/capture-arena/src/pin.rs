//! Readers against reuse: a lock-free count that nobody can join once its object is retired.

#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering};

const RETIRED: u32 = 1 << 31;

/// Counts the running reads of one object, and tells exactly one party when its range may be reused.
#[derive(Debug)]
pub(crate) struct PinCell(AtomicU32); // bit 31: retired; below: running reads

impl PinCell {
    pub(crate) fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Starts a read. False once the object is retired, or with 2^31 - 1 reads running.
    pub(crate) fn pin(&self) -> bool {
        let mut seen = self.0.load(Ordering::Relaxed);
        while seen < RETIRED - 1 {
            // Acquire: the read sees what the publisher wrote before it made the object known.
            match self.0.compare_exchange_weak(seen, seen + 1, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    /// Ends a read. True if it was the last one of a retired object: the caller hands the range on.
    #[must_use]
    pub(crate) fn unpin(&self) -> bool {
        // Release: the read is over before the range is written again. Acquire: the last one out
        // passes on everybody else's.
        let before = self.0.fetch_sub(1, Ordering::AcqRel);
        debug_assert!(before & !RETIRED > 0, "unpinned more often than pinned");
        before == RETIRED + 1
    }

    /// Turns new reads away. True if none is running: the caller may reuse the range at once;
    /// otherwise the last [`Self::unpin`] says so.
    #[must_use]
    pub(crate) fn retire(&self) -> bool {
        let before = self.0.fetch_or(RETIRED, Ordering::AcqRel);
        debug_assert!(before & RETIRED == 0, "retired twice");
        before == 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_retired_object_takes_no_new_reads_and_waits_for_the_old_ones() {
        let cell = PinCell::new();
        assert!(cell.pin() && cell.pin());
        assert!(!cell.retire());
        assert!(!cell.pin());
        assert!(!cell.unpin());
        assert!(cell.unpin());
        let idle = PinCell::new();
        assert!(idle.pin() && !idle.unpin());
        assert!(idle.retire());
    }
}

#[cfg(all(test, loom))]
#[allow(unsafe_code)] // the accesses whose exclusion loom checks
mod loom_tests {
    use loom::{cell::UnsafeCell, sync::Arc, thread};

    use super::*;

    /// The bytes of a range: loom reports any read that runs beside a write.
    #[derive(Debug)]
    struct Range {
        cell: PinCell,
        bytes: UnsafeCell<u32>,
    }

    impl Range {
        fn read(&self) -> Option<(u32, bool)> {
            self.cell.pin().then(|| {
                // SAFETY: pinned, so nobody writes; loom checks exactly this claim.
                let seen = self.bytes.with(|bytes| unsafe { *bytes });
                (seen, self.cell.unpin())
            })
        }

        fn reuse(&self) {
            // SAFETY: retired and unpinned, so nobody reads; loom checks exactly this claim.
            self.bytes.with_mut(|bytes| unsafe { *bytes = 2 });
        }
    }

    #[test]
    fn loom_a_range_is_reused_once_and_never_under_a_reader() {
        loom::model(|| {
            let range = Arc::new(Range { cell: PinCell::new(), bytes: UnsafeCell::new(1) });
            let readers: Vec<_> = (0..2)
                .map(|_| {
                    let range = range.clone();
                    thread::spawn(move || match range.read() {
                        Some((seen, last)) => {
                            assert_eq!(seen, 1, "read after reuse");
                            if last {
                                range.reuse();
                            }
                            last
                        }
                        None => false,
                    })
                })
                .collect();
            let at_once = range.cell.retire();
            if at_once {
                range.reuse();
            }
            let by_readers = readers.into_iter().map(|r| r.join().unwrap());
            let reuses = u32::from(at_once) + by_readers.map(u32::from).sum::<u32>();
            assert_eq!(reuses, 1, "the range is handed on exactly once");
        });
    }

    #[test]
    fn loom_a_pin_that_comes_after_retirement_is_refused() {
        loom::model(|| {
            let range = Arc::new(Range { cell: PinCell::new(), bytes: UnsafeCell::new(1) });
            let retired = {
                let range = range.clone();
                thread::spawn(move || range.cell.retire())
            };
            let first = range.read();
            let handed_on = retired.join().unwrap() || first.is_some_and(|(_, last)| last);
            assert!(handed_on);
            assert_eq!(range.read(), None);
        });
    }
}
