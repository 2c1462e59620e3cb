//! Puts what is captured in any order back into the order of its prompts.

use std::collections::BTreeMap;

/// Holds back what is captured before its predecessors.
#[derive(Debug)]
pub(super) struct Reorder<T> {
    ordered: bool,
    next: u64,
    waiting: BTreeMap<u64, Option<T>>,
}

impl<T> Reorder<T> {
    pub(super) fn new(ordered: bool) -> Self {
        Self { ordered, next: 0, waiting: BTreeMap::new() }
    }

    /// Adds what came of a place in the order; nothing if it was given up.
    pub(super) fn put(&mut self, order: u64, item: Option<T>) {
        self.waiting.insert(order, item);
    }

    /// Takes what is next.
    pub(super) fn ready(&mut self) -> impl Iterator<Item = T> + '_ {
        let mut items = Vec::new();
        if self.ordered {
            while let Some(item) = self.waiting.remove(&self.next) {
                self.next += 1;
                items.extend(item);
            }
        } else {
            items.extend(std::mem::take(&mut self.waiting).into_values().flatten());
        }
        items.into_iter()
    }

    /// The place that all others wait for.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Takes everything, whatever its order.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = T> + '_ {
        std::mem::take(&mut self.waiting).into_values().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_kept_and_gaps_that_were_given_up_hold_nothing_back() {
        let mut reorder = Reorder::new(true);
        reorder.put(2, Some("c"));
        reorder.put(1, None);
        assert_eq!(reorder.ready().count(), 0);
        assert_eq!((reorder.len(), reorder.next()), (2, 0));
        reorder.put(0, Some("a"));
        assert_eq!(reorder.ready().collect::<Vec<_>>(), ["a", "c"]);
        reorder.put(5, Some("f"));
        assert_eq!(reorder.drain().collect::<Vec<_>>(), ["f"]);
        let mut any = Reorder::new(false);
        any.put(5, Some("f"));
        assert_eq!(any.ready().collect::<Vec<_>>(), ["f"]);
    }
}
