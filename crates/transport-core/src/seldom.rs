//! Saying what goes on for long without filling the log.

use std::time::{Duration, Instant};

/// Time between two reports of one trouble.
const PERIOD: Duration = Duration::from_secs(1);

/// Lets a trouble be reported at once, and then once a second for as long as it lasts.
#[derive(Debug, Default)]
pub struct Seldom {
    next: Option<Instant>,
}

impl Seldom {
    /// Whether it is to be reported now.
    pub fn is_due(&mut self, now: Instant) -> bool {
        let due = self.next.is_none_or(|next| now >= next);
        if due {
            self.next = Some(now + PERIOD);
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn once_a_second() {
        let (start, mut log) = (Instant::now(), Seldom::default());
        let due: Vec<u64> = (0..3000u64)
            .step_by(50)
            .filter(|&ms| log.is_due(start + Duration::from_millis(ms)))
            .collect();
        assert_eq!(due, [0, 1000, 2000]);
    }
}
