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

    /// Bytes that may still be sent in this window.
    pub(super) fn left(&self) -> u64 {
        self.most.saturating_sub(self.bytes)
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_begins_with_anything_and_ends_within_its_share() {
        let mut share = WindowShare::new(3, 200);
        assert!(!share.exceeds(150), "the first");
        share.add(90);
        assert!(share.exceeds(11) && !share.exceeds(10));
        share.add(10);
        assert_eq!(share.left(), 0);
        share.add(50);
        assert!(!share.exceeds(150), "the next window");
        assert!(!WindowShare::new(3, 0).exceeds(u64::MAX));
    }
}
