//! What this client holds of one life of a publisher, object by object.

use std::collections::{HashMap, hash_map::Entry};

use foldhash::fast::RandomState;
use transport_core::Sequence;

/// A set of sequence numbers: one bit each, in chunks that exist only where bits are set.
#[derive(Debug, Default)]
struct SeqSet(HashMap<u64, Box<[u64; Self::WORDS]>, RandomState>);

impl SeqSet {
    const WORDS: usize = 16; // 1024 objects a chunk

    fn place(seq: Sequence) -> (u64, usize, u64) {
        let (chunk, bit) = (seq.0 / 1024, seq.0 % 1024);
        (chunk, (bit / 64) as usize, 1 << (bit % 64))
    }

    fn contains(&self, seq: Sequence) -> bool {
        let (chunk, word, bit) = Self::place(seq);
        self.0.get(&chunk).is_some_and(|words| words[word] & bit != 0)
    }

    fn insert(&mut self, seq: Sequence) {
        let (chunk, word, bit) = Self::place(seq);
        self.0.entry(chunk).or_default()[word] |= bit;
    }

    fn remove(&mut self, seq: Sequence) {
        let (chunk, word, bit) = Self::place(seq);
        if let Some(words) = self.0.get_mut(&chunk) {
            words[word] &= !bit;
            if words.iter().all(|&word| word == 0) {
                self.0.remove(&chunk);
            }
        }
    }
}

/// Uses of one object that have begun and not ended.
#[derive(Debug, Default)]
struct Uses {
    count: u32,
    /// It was released since the first of them began.
    spoiled: bool,
}

/// Exact record of claims: which objects are held, which were let go, which are being claimed.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    held: SeqSet,
    released: SeqSet,
    pending: HashMap<Sequence, Uses, RandomState>,
    continuity: Option<u64>,
    /// Of what was published after this life, claims that the publisher made for this client live:
    /// it has known the client, and heard from it, ever since.
    known_since: Option<Sequence>,
}

impl Claims {
    /// Forgets what may have lapsed: everything from before `continuity`, which began when
    /// `known_since` was the newest life.
    pub(crate) fn renew(&mut self, continuity: u64, known_since: Option<Sequence>) {
        if self.continuity != Some(continuity) {
            self.held = SeqSet::default();
            self.continuity = Some(continuity);
            self.known_since = known_since;
        }
    }

    /// Starts using a sample. True if it is held for certain; otherwise it has to be claimed.
    ///
    /// `born_held`: the publisher made the claim when it published the sample.
    pub(crate) fn begin(&mut self, seqs: impl Seqs, born_held: bool) -> bool {
        let mut certain = true;
        for seq in seqs {
            let Some(seq) = seq else {
                certain = false;
                continue;
            };
            let kept = || born_held && self.known_since.is_some_and(|since| seq > since);
            certain =
                certain && (self.held.contains(seq) || (kept() && !self.released.contains(seq)));
            self.pending.entry(seq).or_default().count += 1;
        }
        certain
    }

    /// Ends a use that succeeded: the sample is held from now on. False if it was released
    /// meanwhile, so that nothing keeps what was read.
    #[must_use]
    pub(crate) fn commit(&mut self, seqs: impl Seqs) -> bool {
        let mut lost = false;
        for seq in seqs.clone().into_iter().flatten() {
            lost |= self.end(seq);
        }
        if !lost {
            for seq in seqs.into_iter().flatten() {
                self.held.insert(seq);
                self.released.remove(seq); // claimed again: its release had come to nothing
            }
        }
        !lost
    }

    /// Ends a use that failed. Returns which of the objects that it claimed are to be given back:
    /// those that nobody else in this process uses.
    pub(crate) fn abort(&mut self, seqs: impl Seqs, claimed: bool) -> Vec<usize> {
        for seq in seqs.clone().into_iter().flatten() {
            self.end(seq);
        }
        let ours = |seq: Sequence| {
            claimed
                && !self.pending.contains_key(&seq)
                && !self.held.contains(seq)
                && !self.released.contains(seq)
        };
        let places = seqs.into_iter().enumerate();
        places.filter(|(_, seq)| seq.is_some_and(ours)).map(|(i, _)| i).collect()
    }

    /// Records that this client lets objects go.
    pub(crate) fn release(&mut self, seqs: impl IntoIterator<Item = Sequence>) {
        for seq in seqs {
            self.held.remove(seq);
            self.released.insert(seq);
            if let Some(uses) = self.pending.get_mut(&seq) {
                uses.spoiled = true;
            }
        }
    }

    /// Ends one use of an object. Whether it was released since the first of them began.
    fn end(&mut self, seq: Sequence) -> bool {
        let Entry::Occupied(mut entry) = self.pending.entry(seq) else { return false };
        let uses = entry.get_mut();
        let spoiled = uses.spoiled;
        uses.count -= 1;
        if uses.count == 0 {
            entry.remove();
        }
        spoiled
    }
}

/// The lives of a sample's objects, in order; none of objects whose life is not told.
pub(crate) trait Seqs: IntoIterator<Item = Option<Sequence>> + Clone {}

impl<T: IntoIterator<Item = Option<Sequence>> + Clone> Seqs for T {}

#[cfg(test)]
mod tests {
    use super::*;

    const A: [Option<Sequence>; 2] = [Some(Sequence(1)), Some(Sequence(5000))];

    fn fresh() -> Claims {
        let mut claims = Claims::default();
        claims.renew(0, Some(Sequence(0)));
        claims
    }

    #[test]
    fn born_held_until_released_or_lapsed() {
        let mut claims = fresh();
        assert!(claims.begin(A, true));
        assert!(!claims.begin(A, false), "held by nobody yet");
        assert!(claims.commit(A));
        assert!(claims.begin(A, false));
        claims.release(A.into_iter().flatten());
        assert!(!claims.begin(A, true));
        let mut lapsed = fresh();
        lapsed.renew(1, Some(Sequence(1)));
        assert!(!lapsed.begin(A, true), "one of them is from before the gap");
        assert!(lapsed.begin([A[1]], true));
        let mut unknown = Claims::default();
        unknown.renew(0, None);
        assert!(!unknown.begin(A, true), "the publisher does not tell");
    }

    #[test]
    fn a_failed_use_gives_back_only_what_nobody_else_uses() {
        let mut claims = fresh();
        assert!(!claims.begin(A, false) && !claims.begin(A, false));
        assert!(claims.abort(A, true).is_empty(), "the other one still runs");
        assert_eq!(claims.abort(A, true), [0, 1]);
        assert!(!claims.begin(A, false));
        assert!(claims.commit(A));
        assert!(claims.begin(A, false));
        assert!(claims.abort(A, false).is_empty());
        assert!(claims.begin(A, false), "still held by the first");
    }

    #[test]
    fn a_release_in_between_spoils_the_use() {
        let mut claims = fresh();
        claims.begin(A, true);
        claims.release([Sequence(1)]);
        assert!(!claims.commit(A));
        assert!(claims.pending.is_empty());
    }

    #[test]
    fn a_gap_in_the_lease_forgets_what_was_held() {
        let mut claims = fresh();
        claims.begin(A, true);
        assert!(claims.commit(A));
        claims.renew(0, Some(Sequence(0)));
        assert!(claims.begin(A, false));
        claims.renew(7, Some(Sequence(9000)));
        assert!(!claims.begin(A, false));
    }

    #[test]
    fn sets_of_numbers_shrink_again() {
        let mut set = SeqSet::default();
        for n in (0..100_000).step_by(7) {
            set.insert(Sequence(n));
        }
        assert!(set.contains(Sequence(7)) && !set.contains(Sequence(8)));
        for n in 0..100_000 {
            set.remove(Sequence(n));
        }
        assert!(set.0.is_empty());
    }
}
