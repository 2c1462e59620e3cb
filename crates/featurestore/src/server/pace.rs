//! Captures at a given rate, as an inference server's GPUs would allow it.

use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// How much of an idle time is made up for: what it takes to wake up late, and for an answer and the
/// next request to be on their way. Longer idle times are lost, as they are on a GPU.
const BURST: Duration = Duration::from_millis(20);

/// Hands out the times at which captures may be done.
///
/// From the first request on, no more is handed out than the rate allows for the time that has
/// passed; within any later stretch of it, [`BURST`] more at most.
#[derive(Debug)]
pub(super) struct Pace {
    sample: Duration,
    token: f64, // in seconds
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: Option<Instant>, // when what was handed out is over
    paced: Paced,
}

/// What a limited server has done with its time since its first request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Paced {
    /// Seconds that the captures took by the rate.
    pub busy_s: f64,
    /// Seconds without a request, that were not made up for: the rate was not asked for.
    pub idle_s: f64,
    /// Seconds by which answers came later than the rate allows, all of them together: filling took
    /// longer than its turn, or the machine was busy otherwise.
    pub late_s: f64,
}

impl Pace {
    /// So many samples and tokens a second, where that is limited at all.
    pub(super) fn new(rate: Option<f64>, token_rate: Option<f64>) -> Option<Self> {
        if rate.is_none() && token_rate.is_none() {
            return None;
        }
        let sample = rate.map_or(Duration::ZERO, |rate| Duration::from_secs_f64(1.0 / rate));
        let token = token_rate.map_or(0.0, |rate| 1.0 / rate);
        Some(Self { sample, token, state: Mutex::default() })
    }

    /// When `samples` more samples, of `tokens` tokens in all, may be done.
    pub(super) fn due(&self, samples: usize, tokens: usize) -> Instant {
        let now = Instant::now();
        let mut state = self.state.lock();
        let start = match state.next {
            Some(next) => next.max(now.checked_sub(BURST).unwrap_or(next)),
            None => now,
        };
        let idle = state.next.map_or(Duration::ZERO, |next| start - next);
        let by_tokens = Duration::from_secs_f64(self.token * tokens as f64);
        let turn = self.sample.mul_f64(samples as f64).max(by_tokens);
        state.paced.idle_s += idle.as_secs_f64();
        state.paced.busy_s += turn.as_secs_f64();
        state.next = Some(start + turn);
        start + turn
    }

    /// Waits until what may be done at `due` is done, and takes note if it is late already.
    pub(super) async fn wait(&self, due: Instant) {
        let late = Instant::now().saturating_duration_since(due);
        self.state.lock().paced.late_s += late.as_secs_f64();
        tokio::time::sleep_until(due).await;
    }

    /// What it has done with its time.
    pub(super) fn paced(&self) -> Paced {
        self.state.lock().paced
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(duration: Duration) -> u128 {
        (duration + Duration::from_micros(1)).as_millis()
    }

    #[tokio::test(start_paused = true)]
    async fn samples_are_spread_over_time() {
        let pace = Pace::new(Some(100.0), Some(1000.0)).unwrap();
        let start = Instant::now();
        assert_eq!(millis(pace.due(1, 5) - start), 10);
        assert_eq!(millis(pace.due(4, 4) - start), 50);
        assert_eq!(millis(pace.due(1, 50) - start), 100, "by its tokens");
        assert!(Pace::new(None, None).is_none());
    }

    /// Requests that follow an answer, each a little late, do not lower the rate.
    #[tokio::test(start_paused = true)]
    async fn a_late_wake_up_is_made_up_for() {
        let pace = Pace::new(Some(100.0), None).unwrap();
        let start = Instant::now();
        for _ in 0..100 {
            pace.wait(pace.due(1, 1)).await;
            tokio::time::advance(Duration::from_millis(7)).await; // the way there and back
        }
        let took = start.elapsed();
        assert!((1000..1008).contains(&took.as_millis()), "{took:?}");
        assert_eq!(pace.paced().idle_s, 0.0);
    }

    #[tokio::test(start_paused = true)]
    async fn idle_time_is_lost_but_for_a_small_burst() {
        let pace = Pace::new(Some(100.0), None).unwrap();
        pace.wait(pace.due(1, 1)).await;
        tokio::time::advance(Duration::from_secs(10)).await;
        let start = Instant::now();
        for _ in 0..10 {
            pace.wait(pace.due(1, 1)).await;
        }
        assert_eq!(millis(start.elapsed()), 80, "20 ms of ten seconds are made up for");
        let paced = pace.paced();
        assert!((paced.busy_s - 0.11).abs() < 1e-6, "{paced:?}");
        assert!((paced.idle_s - 9.98).abs() < 1e-3, "{paced:?}");
    }
}
