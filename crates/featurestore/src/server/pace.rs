//! Captures at a given rate, as an inference server's GPUs would allow it.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Hands out the times at which captures may be done.
#[derive(Debug)]
pub(super) struct Pace {
    sample: Duration,
    token: f64, // in seconds
    next: Mutex<Option<Instant>>,
}

impl Pace {
    /// So many samples and tokens a second, where that is limited at all.
    pub(super) fn new(rate: Option<f64>, token_rate: Option<f64>) -> Option<Self> {
        if rate.is_none() && token_rate.is_none() {
            return None;
        }
        let sample = rate.map_or(Duration::ZERO, |rate| Duration::from_secs_f64(1.0 / rate));
        let token = token_rate.map_or(0.0, |rate| 1.0 / rate);
        Some(Self { sample, token, next: Mutex::default() })
    }

    /// When `samples` more samples, of `tokens` tokens in all, may be done. Idle time is not made
    /// up for.
    pub(super) fn due(&self, samples: usize, tokens: usize) -> Instant {
        let now = Instant::now();
        let mut next = self.next.lock();
        let start = next.map_or(now, |next| next.max(now));
        let by_tokens = Duration::from_secs_f64(self.token * tokens as f64);
        let due = start + self.sample.mul_f64(samples as f64).max(by_tokens);
        *next = Some(due);
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_spread_over_time_and_idle_time_is_lost() {
        let pace = Pace::new(Some(100.0), Some(1000.0)).unwrap();
        let start = Instant::now();
        let first = pace.due(1, 5) - start;
        let second = pace.due(4, 4) - start;
        let long = pace.due(1, 50) - start;
        assert!((10..15).contains(&first.as_millis()), "{first:?}");
        assert!((50..55).contains(&second.as_millis()), "{second:?}");
        assert!((100..105).contains(&long.as_millis()), "by its tokens: {long:?}");
        assert!(Pace::new(None, None).is_none());
    }
}
