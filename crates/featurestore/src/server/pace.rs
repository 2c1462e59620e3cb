//! Captures at a given rate, as an inference server's GPUs would allow it.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Hands out the times at which captures may be done.
#[derive(Debug)]
pub(super) struct Pace {
    each: Duration,
    next: Mutex<Option<Instant>>,
}

impl Pace {
    /// `rate` samples a second.
    pub(super) fn new(rate: f64) -> Self {
        Self { each: Duration::from_secs_f64(1.0 / rate), next: Mutex::default() }
    }

    /// When `samples` more samples may be done. Idle time is not made up for.
    pub(super) fn due(&self, samples: usize) -> Instant {
        let now = Instant::now();
        let mut next = self.next.lock();
        let start = next.map_or(now, |next| next.max(now));
        let due = start + self.each.mul_f64(samples as f64);
        *next = Some(due);
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_spread_over_time_and_idle_time_is_lost() {
        let pace = Pace::new(100.0);
        let start = Instant::now();
        let first = pace.due(1) - start;
        let second = pace.due(4) - start;
        assert!((10..15).contains(&first.as_millis()), "{first:?}");
        assert!((50..55).contains(&second.as_millis()), "{second:?}");
    }
}
