//! Ranges that a device may still write although their batch was given up.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::Reservation;
use parking_lot::Mutex;
use transport_core::{ErrorKind, ReadyEvent};

/// How long writes that are late are waited for at the end.
const LAST_WAIT: Duration = Duration::from_secs(2);

/// Keeps reservations until the events behind their writes have happened.
#[derive(Default)]
pub(super) struct LateWrites(Mutex<Vec<(Arc<dyn ReadyEvent>, Reservation)>>);

impl LateWrites {
    pub(super) fn keep(&self, event: Arc<dyn ReadyEvent>, reservation: Reservation) {
        self.reap();
        self.0.lock().push((event, reservation));
    }

    /// Bytes that may still be written.
    pub(super) fn quarantined_bytes(&self) -> u64 {
        self.reap();
        let late = self.0.lock();
        let objects = late.iter().flat_map(|(_, reservation)| reservation.samples());
        objects.flat_map(|sample| &sample.objects).map(|object| object.meta.nbytes()).sum()
    }

    /// Lets go of what is written by now.
    pub(super) fn reap(&self) {
        self.0.lock().retain(|(event, _)| !is_over(event, Duration::ZERO));
    }
}

/// Whether an event has happened, or never will because its device has failed.
fn is_over(event: &Arc<dyn ReadyEvent>, wait: Duration) -> bool {
    !matches!(event.wait(wait), Err(error) if error.kind() == ErrorKind::Timeout)
}

impl Drop for LateWrites {
    fn drop(&mut self) {
        let deadline = Instant::now() + LAST_WAIT;
        for late in self.0.get_mut().drain(..) {
            if !is_over(&late.0, deadline.saturating_duration_since(Instant::now())) {
                // The device may write this memory until the process ends: it is never freed.
                std::mem::forget(late);
            }
        }
    }
}

impl fmt::Debug for LateWrites {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LateWrites").field(&self.0.lock().len()).finish()
    }
}
