//! One point in time by which a whole call must be over.

use std::{future::Future, time::Duration};

use tokio::time::Instant;

/// The end of a call's time; never, if it lies beyond what the clock can hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(Option<Instant>);

/// The deadline passed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Elapsed;

impl Deadline {
    pub(crate) fn after(duration: Duration) -> Self {
        Self(Instant::now().checked_add(duration))
    }

    /// Time left, zero once it has passed.
    pub(crate) fn remaining(self) -> Duration {
        self.0.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()))
    }

    /// Awaits `future` until the deadline, then drops it. A future that is ready at once wins even
    /// over a deadline that has passed.
    pub(crate) async fn run<T>(self, future: impl Future<Output = T>) -> Result<T, Elapsed> {
        match self.0 {
            Some(at) => tokio::time::timeout_at(at, future).await.map_err(|_| Elapsed),
            None => Ok(future.await),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_end_of_time_is_no_deadline() {
        let never = Deadline::after(Duration::MAX);
        assert_eq!(never.remaining(), Duration::MAX);
        assert_eq!(never.run(async { 1 }).await, Ok(1));

        let soon = Deadline::after(Duration::from_secs(1));
        assert_eq!(soon.run(std::future::pending::<()>()).await, Err(Elapsed));
        assert_eq!(soon.remaining(), Duration::ZERO);
        assert_eq!(soon.run(async { 1 }).await, Ok(1));
    }
}
