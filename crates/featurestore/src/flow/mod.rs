//! Back-pressure: how far a producer may run ahead of its consumers.

use std::collections::VecDeque;

use transport_core::{Error, ErrorKind, Result};

/// How far ahead: pause at the high mark, go on at the low one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Watermarks {
    /// Samples in flight at which the producer pauses.
    pub high_samples: u64,
    /// Samples in flight at which it goes on.
    pub low_samples: u64,
    /// Bytes in flight at which it pauses; none does not look at bytes.
    pub high_bytes: Option<u64>,
    /// Bytes in flight at which it goes on; by default the high mark.
    pub low_bytes: Option<u64>,
    /// Samples of one optimizer step, all ranks together. Bytes never pause fewer than these:
    /// consumers wait for a whole step, and both sides would wait for ever.
    pub quantum: u64,
}

impl Watermarks {
    /// Marks on the number of samples alone.
    pub fn new(high_samples: u64, low_samples: u64, quantum: u64) -> Self {
        Self { high_samples, low_samples, high_bytes: None, low_bytes: None, quantum }
    }

    /// Also marks on bytes.
    #[must_use]
    pub fn bytes(mut self, high: u64, low: u64) -> Self {
        (self.high_bytes, self.low_bytes) = (Some(high), Some(low));
        self
    }

    /// Refuses marks that contradict each other or could deadlock.
    pub fn check(&self) -> Result<()> {
        let refuse = |why: &'static str| {
            Error::new(ErrorKind::ConfigInvalid, "check watermarks", why)
                .with("high_samples", self.high_samples)
                .with("low_samples", self.low_samples)
                .with("quantum", self.quantum)
        };
        if self.quantum == 0 {
            return Err(refuse("the quantum is zero"));
        }
        if self.low_samples > self.high_samples {
            return Err(refuse("the low mark of samples is above the high one"));
        }
        if self.high_samples < self.quantum || self.low_samples < self.quantum {
            return Err(refuse("a watermark is under one optimizer quantum").remedy(
                "give at least ranks x batch x accumulation; about 6 times that runs well",
            ));
        }
        match (self.high_bytes, self.low_bytes) {
            (None, Some(_)) => Err(refuse("there is a low mark of bytes without a high one")),
            (Some(high), Some(low)) if low > high => {
                Err(refuse("the low mark of bytes is above the high one")
                    .with("high_bytes", high)
                    .with("low_bytes", low))
            }
            (Some(0), _) => Err(refuse("the high mark of bytes is zero")),
            _ => Ok(()),
        }
    }
}

/// What is in flight, and what room there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Samples published and not settled.
    pub samples: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Largest free range of the roomiest arena, if it is known.
    pub largest_free: Option<u64>,
    /// Bytes that the next request may need at once.
    pub next_bytes: u64,
}

impl Usage {
    /// Samples and bytes in flight; the arenas are not known.
    pub fn new(samples: u64, bytes: u64) -> Self {
        Self { samples, bytes, ..Self::default() }
    }

    /// Tells how much room the roomiest arena has in one piece, and how much is needed next.
    #[must_use]
    pub fn room(mut self, largest_free: u64, next_bytes: u64) -> Self {
        (self.largest_free, self.next_bytes) = (Some(largest_free), next_bytes);
        self
    }
}

/// Why a producer is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pause {
    /// Too many samples are in flight.
    Samples,
    /// Too many bytes are in flight.
    Bytes,
    /// No arena has room in one piece.
    Room,
}

/// One latch over all marks.
#[derive(Clone, Debug)]
pub struct Flow {
    marks: Watermarks,
    paused: Option<Pause>,
    pauses: u64,
    resumes: u64,
}

impl Flow {
    /// Refuses marks that contradict each other or could deadlock.
    pub fn new(marks: Watermarks) -> Result<Self> {
        marks.check()?;
        Ok(Self::latch(marks))
    }

    fn latch(marks: Watermarks) -> Self {
        Self { marks, paused: None, pauses: 0, resumes: 0 }
    }

    /// Takes note of what is in flight; whether the producer may go on, or why not.
    pub fn update(&mut self, usage: Usage) -> Result<(), Pause> {
        let Watermarks { high_samples, low_samples, high_bytes, low_bytes, quantum } = self.marks;
        let first_window = usage.samples < quantum;
        let room = usage.largest_free.is_none_or(|free| free >= usage.next_bytes);
        let too_much = |samples: u64, bytes: Option<u64>, above: fn(u64, u64) -> bool| {
            if above(usage.samples, samples) {
                Some(Pause::Samples)
            } else if !first_window && bytes.is_some_and(|most| above(usage.bytes, most)) {
                Some(Pause::Bytes)
            } else if !room && usage.samples > 0 {
                // With nothing in flight nothing would ever make room: the server must answer.
                Some(Pause::Room)
            } else {
                None
            }
        };
        let now = match self.paused {
            None | Some(Pause::Room) => too_much(high_samples, high_bytes, |n, mark| n >= mark),
            Some(_) => too_much(low_samples, low_bytes.or(high_bytes), |n, mark| n > mark),
        };
        self.pauses += u64::from(self.paused.is_none() && now.is_some());
        self.resumes += u64::from(self.paused.is_some() && now.is_none());
        self.paused = now;
        now.map_or(Ok(()), Err)
    }

    /// Why it is paused, if it is.
    pub fn paused(&self) -> Option<Pause> {
        self.paused
    }

    /// Times that it paused.
    pub fn pauses(&self) -> u64 {
        self.pauses
    }

    /// Times that it went on.
    pub fn resumes(&self) -> u64 {
        self.resumes
    }
}

/// What is published and not settled, as the producer sees it: its consumers only tell how many
/// samples they have settled, in the order of publication.
#[derive(Clone, Debug, Default)]
pub struct InFlight {
    sizes: VecDeque<u64>,
    bytes: u64,
    settled: u64,
}

impl InFlight {
    /// Adds a published sample.
    pub fn published(&mut self, bytes: u64) {
        self.sizes.push_back(bytes);
        self.bytes += bytes;
    }

    /// Takes note of the total that is settled.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] if the number went back, or beyond what was published.
    pub fn settled(&mut self, total: u64) -> Result<()> {
        let wrong = |why: &'static str| {
            Error::new(ErrorKind::Protocol, "count settled samples", why)
                .with("before", self.settled)
                .with("found", total)
                .with("in_flight", self.sizes.len())
        };
        let more = total.checked_sub(self.settled).ok_or_else(|| wrong("the number went back"))?;
        if more > self.sizes.len() as u64 {
            return Err(wrong("more samples are settled than were published"));
        }
        for size in self.sizes.drain(..more as usize) {
            self.bytes -= size;
        }
        self.settled = total;
        Ok(())
    }

    /// Samples and bytes in flight.
    pub fn usage(&self) -> Usage {
        Usage::new(self.sizes.len() as u64, self.bytes)
    }

    /// Samples settled so far.
    pub fn total_settled(&self) -> u64 {
        self.settled
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn d1_one_latch_over_samples_and_bytes() {
        let mut flow = Flow::latch(Watermarks::new(10, 4, 1).bytes(100, 40));
        for (samples, bytes, runs) in [
            (9, 99, true),
            (10, 20, false),
            (5, 20, false),
            (4, 40, true),
            (1, 100, false),
            (1, 50, false),
            (1, 40, true),
        ] {
            let outcome = flow.update(Usage::new(samples, bytes));
            assert_eq!(outcome.is_ok(), runs, "({samples}, {bytes})");
        }
        assert_eq!((flow.pauses(), flow.resumes()), (2, 2));
    }

    #[test]
    fn d2_marks_that_contradict_each_other_are_refused() {
        let mut low_only = Watermarks::new(10, 4, 1);
        low_only.low_bytes = Some(1);
        for (marks, why) in [
            (Watermarks::new(4, 10, 1), "above the high one"),
            (low_only, "without a high one"),
            (Watermarks::new(10, 4, 1).bytes(40, 100), "above the high one"),
            (Watermarks::new(10, 10, 16), "under one optimizer quantum"),
            (Watermarks::new(32, 8, 16), "under one optimizer quantum"),
            (Watermarks::new(32, 8, 0), "zero"),
        ] {
            let error = Flow::new(marks).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
            assert_eq!(error.kind(), ErrorKind::ConfigInvalid);
        }
        Flow::new(Watermarks::new(96, 64, 16).bytes(100, 100)).unwrap();
    }

    #[test]
    fn bytes_never_hold_back_the_first_window() {
        let mut flow = Flow::new(Watermarks::new(32, 16, 16).bytes(10, 5)).unwrap();
        assert!(flow.update(Usage::new(15, 1_000_000)).is_ok());
        assert_eq!(flow.update(Usage::new(16, 1_000_000)), Err(Pause::Bytes));
        assert!(flow.update(Usage::new(15, 1_000_000)).is_ok(), "a consumer waits for this window");
    }

    #[test]
    fn an_arena_without_room_pauses_until_there_is_some() {
        let mut flow = Flow::new(Watermarks::new(32, 16, 1)).unwrap();
        assert_eq!(flow.update(Usage::new(3, 0).room(99, 100)), Err(Pause::Room));
        assert!(flow.update(Usage::new(3, 0).room(100, 100)).is_ok());
        assert!(flow.update(Usage::new(0, 0).room(0, 100)).is_ok(), "nothing would make room");
        assert_eq!((flow.pauses(), flow.resumes()), (1, 1));
    }

    #[test]
    fn the_settled_count_only_grows_and_never_beyond_what_was_published() {
        let mut window = InFlight::default();
        [10, 20, 30].into_iter().for_each(|bytes| window.published(bytes));
        window.settled(2).unwrap();
        assert_eq!(window.usage(), Usage::new(1, 30));
        window.settled(2).unwrap();
        assert!(window.settled(1).unwrap_err().to_string().contains("went back"));
        assert!(window.settled(4).unwrap_err().to_string().contains("more samples"));
        assert_eq!(window.total_settled(), 2);
    }

    proptest! {
        /// A producer that obeys the latch and a consumer that settles whole steps never both wait.
        #[test]
        fn no_deadlock(quantum in 1_u64..20, high in 1_u64..4, low in 1_u64..4,
                       size in 1_u64..100, bytes in 1_u64..400) {
            let (high, low) = (quantum * high.max(low), quantum * low.min(high));
            let marks = Watermarks::new(high, low, quantum).bytes(bytes, bytes / 2);
            let mut flow = Flow::new(marks).unwrap();
            let (mut window, mut settled) = (InFlight::default(), 0);
            for _ in 0..500 {
                if flow.update(window.usage()).is_ok() {
                    window.published(size);
                } else {
                    prop_assert!(window.usage().samples >= quantum, "both sides wait");
                    settled += quantum;
                    window.settled(settled).unwrap();
                }
            }
        }
    }
}
