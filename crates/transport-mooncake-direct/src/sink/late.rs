//! Ranges that a device may still write although their batch was given up.

use std::{sync::Arc, time::Duration};

use capture_arena::{Quarantine, Reservation, Unfinished};
use transport_core::{ErrorKind, ReadyEvent};

/// How long writes that are late are waited for at the end.
const LAST_WAIT: Duration = Duration::from_secs(2);

/// Reservations that wait for the events behind their writes.
pub(super) type LateWrites = Quarantine<Late>;

/// A reservation that is written until the event has happened.
pub(super) struct Late {
    pub(super) event: Arc<dyn ReadyEvent>,
    pub(super) reservation: Reservation,
}

/// None yet.
pub(super) fn late_writes() -> LateWrites {
    Quarantine::new(LAST_WAIT)
}

impl Unfinished for Late {
    /// Whether the event has happened, or never will because its device has failed.
    fn is_over(&mut self) -> bool {
        let waited = self.event.wait(Duration::ZERO);
        !waited.is_err_and(|error| error.kind() == ErrorKind::Timeout)
    }

    fn bytes(&self) -> u64 {
        let objects = self.reservation.samples().iter().flat_map(|sample| &sample.objects);
        objects.map(|object| object.meta.nbytes()).sum()
    }
}
