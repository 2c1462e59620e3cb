//! A set of sample ids that stays small however many samples a run has.

use std::collections::{BTreeMap, HashMap};

use sha2::{Digest, Sha256};

/// Ids that were acknowledged. Numbered ids are kept as ranges, others as 128-bit digests.
///
/// An id is numbered if it ends in decimal digits after something that is neither letter nor digit,
/// such as `run0:task-000017`; a run that numbers its samples costs a few ranges for each name,
/// whatever its length. Other ids cost 21 to 43 bytes each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdSet {
    numbered: HashMap<Box<str>, Ranges>,
    others: Digests,
    len: u64,
}

/// Disjoint inclusive ranges, first to last, never touching each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Ranges(BTreeMap<u64, u64>);

/// Digests, each at the first free place from the one that its own bits name. Adding one touches one
/// line of memory, and those of a whole step are fetched side by side: with 1,000,000 that is a third
/// less than in a library's table, which keeps a byte of each entry elsewhere.
#[derive(Clone, Debug, Default, Eq)]
struct Digests {
    places: Vec<u128>, // zero where there is none; a power of two of them, or none
    len: usize,
}

/// Most digits of an id that count as its number: all of them fit into 63 bits.
const DIGITS: usize = 18;

/// How an id is kept. Working it out costs more than looking it up, so that it is done once.
#[derive(Clone, Copy, Debug)]
pub(super) enum Form {
    /// So many bytes of the id are its name.
    Numbered(usize, u64),
    Other(u128),
}

/// Zeros in front of a number belong to its name: `task-07` and `task-7` are different samples.
pub(super) fn form(id: &str) -> Form {
    let digits = id.bytes().rev().take_while(u8::is_ascii_digit).count();
    let name = &id[..id.len() - digits];
    let own = name.chars().next_back().is_none_or(|c| !c.is_alphanumeric());
    if !(1..=DIGITS).contains(&digits) || !own {
        return Form::Other(digest(id));
    }
    let zeros = id[name.len()..].bytes().take_while(|&b| b == b'0').count();
    let zeros = zeros.min(digits - 1);
    let split = name.len() + zeros;
    match id[split..].parse() {
        Ok(number) => Form::Numbered(split, number),
        Err(_) => Form::Other(digest(id)),
    }
}

fn digest(id: &str) -> u128 {
    let sum = Sha256::digest(id.as_bytes());
    of_bytes(sum[..16].try_into().expect("a digest has 32 bytes"))
}

/// None is zero, which marks a free place; no id is known whose digest would be.
fn of_bytes(bytes: [u8; 16]) -> u128 {
    u128::from_le_bytes(bytes).max(1)
}

impl IdSet {
    /// Adds an id; false if it was there.
    pub fn insert(&mut self, id: &str) -> bool {
        self.insert_as(id, form(id))
    }

    /// Whether an id is there.
    pub fn contains(&self, id: &str) -> bool {
        self.contains_as(id, form(id))
    }

    /// Adds an id of that form.
    pub(super) fn insert_as(&mut self, id: &str, form: Form) -> bool {
        let new = match form {
            Form::Numbered(split, number) => {
                let name = &id[..split];
                match self.numbered.get_mut(name) {
                    Some(ranges) => ranges.insert(number, number),
                    None => self.numbered.entry(name.into()).or_default().insert(number, number),
                }
            }
            Form::Other(digest) => self.others.insert(digest),
        };
        self.len += u64::from(new);
        new
    }

    /// Whether an id of that form is there.
    pub(super) fn contains_as(&self, id: &str, form: Form) -> bool {
        match form {
            Form::Numbered(split, number) => {
                self.numbered.get(&id[..split]).is_some_and(|ranges| ranges.contains(number))
            }
            Form::Other(digest) => self.others.contains(digest),
        }
    }

    /// Number of ids.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Ranges and digests that it is made of: what its memory grows with.
    pub fn pieces(&self) -> usize {
        self.numbered.values().map(|ranges| ranges.0.len()).sum::<usize>() + self.others.len
    }

    pub(super) fn ranges(&self) -> impl Iterator<Item = (&str, u64, u64)> {
        self.numbered.iter().flat_map(|(name, ranges)| {
            ranges.0.iter().map(move |(&first, &last)| (&**name, first, last))
        })
    }

    /// The digests as they are written, in order: then a tree of them grows at one end only.
    pub(super) fn digests(&self) -> Vec<[u8; 16]> {
        let mut all: Vec<_> = self.others.iter().map(u128::to_le_bytes).collect();
        all.sort_unstable();
        all
    }

    pub(super) fn restore_range(&mut self, name: &str, first: u64, last: u64) {
        let ranges = self.numbered.entry(name.into()).or_default();
        if first <= last && ranges.insert(first, last) {
            self.len += last - first + 1;
        }
    }

    pub(super) fn restore_digest(&mut self, digest: [u8; 16]) {
        self.len += u64::from(self.others.insert(of_bytes(digest)));
    }

    /// Makes room for `more` digests.
    pub(super) fn expect_digests(&mut self, more: usize) {
        self.others.reserve(more);
    }
}

impl Digests {
    fn contains(&self, digest: u128) -> bool {
        !self.places.is_empty() && self.places[self.place(digest)] == digest
    }

    /// Adds a digest; false if it was there.
    fn insert(&mut self, digest: u128) -> bool {
        self.reserve(1);
        let at = self.place(digest);
        let new = self.places[at] != digest;
        self.places[at] = digest;
        self.len += usize::from(new);
        new
    }

    /// Makes room for `more` of them, and moves them all where that takes a larger table.
    fn reserve(&mut self, more: usize) {
        let places = (self.len + more).div_ceil(3) * 4; // at most three quarters are taken
        if places > self.places.len() {
            let smaller = std::mem::replace(&mut self.places, vec![0; places.next_power_of_two()]);
            for digest in smaller.into_iter().filter(|&digest| digest != 0) {
                let at = self.place(digest);
                self.places[at] = digest;
            }
        }
    }

    /// Where a digest is, or the free place that it would take: there always is one.
    fn place(&self, digest: u128) -> usize {
        let mask = self.places.len() - 1;
        let mut at = digest as usize & mask;
        while self.places[at] != 0 && self.places[at] != digest {
            at = (at + 1) & mask;
        }
        at
    }

    fn iter(&self) -> impl Iterator<Item = u128> {
        self.places.iter().copied().filter(|&digest| digest != 0)
    }
}

impl PartialEq for Digests {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.iter().all(|digest| other.contains(digest))
    }
}

impl Ranges {
    fn contains(&self, number: u64) -> bool {
        self.0.range(..=number).next_back().is_some_and(|(_, &last)| last >= number)
    }

    /// Adds a range that overlaps none of those there, or one that is there already.
    fn insert(&mut self, first: u64, last: u64) -> bool {
        if self.contains(first) {
            return false;
        }
        let before = self.0.range(..first).next_back().map(|(&f, &l)| (f, l));
        let first = match before {
            Some((start, end)) if end + 1 == first => start,
            _ => first,
        };
        let last = match self.0.remove(&(last + 1)) {
            Some(end) => end,
            None => last,
        };
        self.0.insert(first, last);
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbered_ids_in_any_order_become_one_range() {
        let mut set = IdSet::default();
        // A permutation of 0..100,000: 7,919 is prime to it.
        for i in 0..100_000_u64 {
            assert!(set.insert(&format!("run:e0:task-{}", i * 7919 % 100_000)));
        }
        assert_eq!((set.len(), set.pieces()), (100_000, 1));
        assert!(!set.insert("run:e0:task-5") && set.contains("run:e0:task-99999"));
        assert!(!set.contains("run:e0:task-05") && !set.contains("run:e1:task-5"));
    }

    #[test]
    fn padded_numbers_cost_a_range_for_each_length() {
        let mut set = IdSet::default();
        for i in 0..20_000 {
            set.insert(&format!("t-{i:06}"));
        }
        assert!(set.pieces() <= 6, "{}", set.pieces());
    }

    #[test]
    fn digests_keep_apart_wherever_their_places_are() {
        let mut digests = Digests::default();
        // All of them want the last place, at any size up to 2^20.
        let all: Vec<u128> = (1..500).map(|i| i << 64 | 0xf_ffff).collect();
        for (i, &digest) in all.iter().enumerate() {
            assert!(!digests.contains(digest) && digests.insert(digest));
            assert!(!digests.insert(digest), "once");
            assert_eq!(digests.len, i + 1);
        }
        assert!(all.iter().all(|&digest| digests.contains(digest)) && !digests.contains(0xf_ffff));
        assert!(digests.places.len() <= 1024, "{}", digests.places.len());
        let mut other = Digests::default();
        other.reserve(5000);
        all.iter().rev().for_each(|&digest| assert!(other.insert(digest)));
        assert_eq!(digests, other, "whatever the order and the size");
        other.insert(1);
        assert_ne!(digests, other);
    }

    proptest! {
        #[test]
        fn it_is_a_set(ids in proptest::collection::vec("[a-c:/0-2-]{1,6}", 0..200)) {
            let (mut set, mut model) = (IdSet::default(), std::collections::BTreeSet::new());
            for id in &ids {
                prop_assert_eq!(set.insert(id), model.insert(id.clone()), "{}", id);
            }
            prop_assert_eq!(set.len(), model.len() as u64);
            for id in &ids {
                prop_assert!(set.contains(id));
                let other = format!("{id}0");
                prop_assert_eq!(set.contains(&other), model.contains(&other));
            }
            let mut copy = IdSet::default();
            set.ranges().for_each(|(n, f, l)| copy.restore_range(n, f, l));
            set.digests().into_iter().for_each(|d| copy.restore_digest(d));
            prop_assert_eq!(copy, set);
        }
    }
}
