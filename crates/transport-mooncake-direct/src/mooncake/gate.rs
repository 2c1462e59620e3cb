//! How many calls may be inside Mooncake at once.

use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// Lets a bounded number of callers in. Mooncake's calls busy-wait: more of them than cores only take
/// time away from the threads that move the bytes.
#[derive(Debug)]
pub(super) struct Gate {
    free: Mutex<usize>,
    changed: Condvar,
}

/// A place inside, until dropped.
#[derive(Debug)]
pub(super) struct Inside<'g>(&'g Gate);

impl Gate {
    pub(super) fn new(places: usize) -> Self {
        Self { free: Mutex::new(places.max(1)), changed: Condvar::new() }
    }

    /// Waits for a place; `None` if there is none by `deadline`.
    pub(super) fn enter(&self, deadline: Instant) -> Option<Inside<'_>> {
        let mut free = self.free.lock();
        while *free == 0 {
            if self.changed.wait_until(&mut free, deadline).timed_out() && *free == 0 {
                return None;
            }
        }
        *free -= 1;
        Some(Inside(self))
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        *self.0.free.lock() += 1;
        self.0.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn no_more_than_allowed_are_inside() {
        let gate = Gate::new(2);
        let soon = || Instant::now() + Duration::from_millis(30);
        let (first, _second) = (gate.enter(soon()).unwrap(), gate.enter(soon()).unwrap());
        assert!(gate.enter(soon()).is_none());
        drop(first);
        let _third = gate.enter(soon()).unwrap();
        std::thread::scope(|scope| {
            let waits =
                scope.spawn(|| gate.enter(Instant::now() + Duration::from_secs(10)).is_some());
            std::thread::sleep(Duration::from_millis(20));
            drop(_second);
            assert!(waits.join().unwrap());
        });
    }
}
