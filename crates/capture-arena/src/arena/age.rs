//! Published samples by age, so that the oldest is known without looking at all of them.

use std::time::Instant;

use slab::Slab;

use super::Sample;

/// No sample.
const NONE: u32 = u32::MAX;

/// The ends of a list through the samples themselves, in the order of publication.
#[derive(Debug)]
pub(super) struct ByAge {
    first: u32,
    last: u32,
}

/// A sample's place in the list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Neighbours {
    before: u32,
    after: u32,
}

impl Default for ByAge {
    fn default() -> Self {
        Self { first: NONE, last: NONE }
    }
}

impl Sample {
    pub(super) fn filling(objects: u32, now: Instant) -> Self {
        let neighbours = Neighbours { before: NONE, after: NONE };
        Self { since: now, live: objects, published: false, neighbours }
    }
}

impl ByAge {
    /// When the oldest was published.
    pub(super) fn since(&self, samples: &Slab<Sample>) -> Option<Instant> {
        samples.get(self.first as usize).map(|sample| sample.since)
    }

    /// Adds a sample that has just been published.
    pub(super) fn push(&mut self, samples: &mut Slab<Sample>, new: u32) {
        samples[new as usize].neighbours = Neighbours { before: self.last, after: NONE };
        match samples.get_mut(self.last as usize) {
            Some(last) => last.neighbours.after = new,
            None => self.first = new,
        }
        self.last = new;
    }

    /// Takes a published sample out.
    pub(super) fn remove(&mut self, samples: &mut Slab<Sample>, old: u32) {
        let Neighbours { before, after } = samples[old as usize].neighbours;
        match samples.get_mut(before as usize) {
            Some(sample) => sample.neighbours.after = after,
            None => self.first = after,
        }
        match samples.get_mut(after as usize) {
            Some(sample) => sample.neighbours.before = before,
            None => self.last = before,
        }
    }
}
