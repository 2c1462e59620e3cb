//! How much of the arenas the unfinished window of the consumers may take.

/// Counts what is sent, window by window. Consumers give room back by whole windows only, so one that
/// takes nearly all of it might never be finished: neither in bytes nor, as arenas have their room in
/// pieces, in one piece.
#[derive(Debug)]
pub(super) struct WindowShare {
    quantum: u64,
    most: u64,
    samples: u64,
    bytes: u64,
}

impl WindowShare {
    /// Windows of `quantum` samples that take half of `arenas` bytes; without a bound if there are
    /// none.
    pub(super) fn new(quantum: u64, arenas: u64) -> Self {
        let most = if arenas == 0 { u64::MAX } else { arenas / 2 };
        Self { quantum, most, samples: 0, bytes: 0 }
    }

    /// Whether a window begins, where windows are bounded. It should begin with the largest sample: so
    /// large ones are spread over the windows, and none has to go beside others as large at the end.
    pub(super) fn begins(&self) -> bool {
        self.samples == 0 && self.most < u64::MAX
    }

    /// Bytes that may still be sent in this window; with what it begins, half of them.
    pub(super) fn left(&self) -> u64 {
        if self.begins() { self.most / 2 } else { self.most.saturating_sub(self.bytes) }
    }

    /// Bytes that a sample of this window may take, so that there are as many for each one that is
    /// still to come.
    pub(super) fn even(&self) -> u64 {
        self.left() / self.quantum.saturating_sub(self.samples).max(1)
    }

    /// Whether a sample would leave too little for the rest of a window that is begun.
    pub(super) fn exceeds(&self, bytes: u64) -> bool {
        self.samples > 0 && bytes > self.left()
    }

    /// Takes note of a sample that is sent.
    pub(super) fn add(&mut self, bytes: u64) {
        self.samples += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        if self.samples >= self.quantum {
            (self.samples, self.bytes) = (0, 0);
        }
    }

    /// Takes note of a sample that was sent in vain. Of an earlier window it no longer counts.
    pub(super) fn take_back(&mut self, bytes: u64) {
        self.samples = self.samples.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_begins_with_anything_and_ends_within_its_share() {
        let mut share = WindowShare::new(3, 200);
        assert!(!share.exceeds(150) && share.begins() && share.left() == 50, "the first");
        share.add(90);
        assert!(share.exceeds(11) && !share.exceeds(10));
        share.add(10);
        assert_eq!((share.left(), share.even()), (0, 0));
        share.take_back(10);
        assert_eq!((share.left(), share.even()), (10, 5), "two samples are still to come");
        share.add(10);
        share.add(50);
        assert!(!share.exceeds(150), "the next window");
        let unbounded = WindowShare::new(3, 0);
        assert!(!unbounded.exceeds(u64::MAX) && !unbounded.begins());
    }
}
