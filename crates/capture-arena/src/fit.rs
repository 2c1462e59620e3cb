//! The arena's allocator: good fit in constant time, exact fit before it ever refuses.
//!
//! Free ranges ("holes") hang in lists by size, eight sizes to the octave. A request takes the best
//! of the first few holes of its own list, else one of the next list; only when both are empty does
//! it search its own list to the end. So it is fast, and it fails only when no hole is long enough.
//!
//! Two measures keep large holes whole; `benches/arena.rs` measures both:
//! - *Two ends.* Small ranges grow up from the start of the arena, large ones down from its end;
//!   the hole between them is the *frontier*. Either side uses the other's holes only when it would
//!   fail otherwise. Small and large objects with different lifetimes then never alternate.
//! - *Slots.* Ranges that fill a noticeable share of the arena are placed on a coarse grid (a
//!   quarter of their power of two) while they are of similar but ever-different lengths. They then
//!   take turns in the same slots, where packing them tightly would leave gaps between them that
//!   are just too short for the next. What a slot leaves over stays free for others.

use std::num::NonZeroU64;

use crate::suballoc::{ArenaRange, NoRoom, NoRoomCause, SpaceReport, SubAllocator, UNIT};

/// Arenas below this many bytes place everything upwards from their start.
const TWO_ENDS_FROM: u64 = 16 << 20;
/// Largest small object, in bytes; less in arenas below 16 MiB times 256.
const SMALL_MAX: u64 = 64 << 10;
/// A small object takes at most this share of the arena.
const SMALL_SHARE: u64 = 256;
/// A range longer than this share of a two-ended arena gets a slot.
const SLOT_SHARE: u32 = 64;
/// Holes looked at per list before the next list is tried.
const SCAN: usize = 2;

const BINS: usize = 256;
const NONE: u32 = u32::MAX;

/// Allocator over up to 2^32 - 2 units of 512 bytes (2 TiB).
#[derive(Debug)]
pub struct FitSubAllocator {
    units: u32,
    free_units: u64,
    small_max: u32,
    slot_min: u32,
    max_nodes: u32,
    nodes: Vec<Node>,
    spare: u32, // head of the list of unused nodes
    live: u32,
    holes: u32,    // including the frontier
    frontier: u32, // node of the hole that holds `boundary`, or NONE when it is used up
    boundary: u32, // in units; holes before it are low, holes after it high
    low: Bins,
    high: Bins,
    habit: Habit,
}

/// What the last 16 ranges long enough for slots were like: a bit each, the newest lowest.
#[derive(Clone, Copy, Debug, Default)]
struct Habit {
    units: u32,   // of the last one
    slot: u32,    // its slot, in units
    lengths: u16, // set: another length than the one before
    slots: u16,   // set: another slot length than the one before
}

#[derive(Clone, Copy, Debug)]
#[repr(align(32))] // half a cache line
struct Node {
    start: u32,
    len: u32,
    before: u32, // neighbours by address
    after: u32,
    prev: u32, // neighbours in a bin; `next` also links spare nodes
    next: u32,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Spare,
    Hole,
    Live,
}

#[derive(Debug)]
struct Bins {
    filled: [u64; BINS / 64],
    heads: Box<[u32; BINS]>,
}

impl FitSubAllocator {
    /// Largest block that can be managed, in bytes.
    pub const MAX_BYTES: u64 = (NONE as u64 - 1) * UNIT;

    /// Most ranges, live and free together, unless [`Self::with_max_ranges`] says otherwise.
    pub const MAX_RANGES: u32 = 1 << 24;

    /// Manages `bytes` bytes, rounded down to whole units; `None` above [`Self::MAX_BYTES`].
    pub fn new(bytes: u64) -> Option<Self> {
        Self::with_max_ranges(bytes, Self::MAX_RANGES)
    }

    /// Manages `bytes` bytes in at most `max_ranges` ranges, live and free together.
    ///
    /// The table grows as needed up to this bound, by 28 bytes a range.
    pub fn with_max_ranges(bytes: u64, max_ranges: u32) -> Option<Self> {
        if bytes > Self::MAX_BYTES {
            return None;
        }
        let units = (bytes / UNIT) as u32;
        let two_ends = bytes >= TWO_ENDS_FROM;
        let mut this = Self {
            units,
            free_units: u64::from(units),
            small_max: if two_ends {
                (SMALL_MAX.min(bytes / SMALL_SHARE) / UNIT) as u32
            } else {
                NONE
            },
            slot_min: if two_ends { units / SLOT_SHARE } else { NONE },
            max_nodes: max_ranges.clamp(2, NONE - 1),
            nodes: Vec::new(),
            spare: NONE,
            live: 0,
            holes: 0,
            frontier: NONE,
            boundary: 0,
            low: Bins::new(),
            high: Bins::new(),
            habit: Habit::default(),
        };
        if units > 0 {
            this.frontier = this.node(0, units, NONE, NONE);
            this.holes = 1;
        }
        Some(this)
    }

    /// Free bytes in all ranges.
    pub fn free_bytes(&self) -> u64 {
        self.free_units * UNIT
    }

    /// Ranges, live and free, that the table can still take.
    fn spare_nodes(&self) -> u32 {
        self.max_nodes - self.live - self.holes
    }

    fn node(&mut self, start: u32, len: u32, before: u32, after: u32) -> u32 {
        let node = Node { start, len, before, after, prev: NONE, next: NONE, state: State::Hole };
        if self.spare == NONE {
            self.nodes.push(node);
            return (self.nodes.len() - 1) as u32;
        }
        let at = self.spare;
        self.spare = self.nodes[at as usize].next;
        self.nodes[at as usize] = node;
        at
    }

    fn discard(&mut self, at: u32) {
        self.nodes[at as usize].state = State::Spare;
        self.nodes[at as usize].next = self.spare;
        self.spare = at;
    }

    /// The hole for a small range, which it takes from the front.
    fn find_small(&self, units: u32) -> Option<u32> {
        self.low
            .find(&self.nodes, units)
            .or_else(|| self.frontier_fits(units).then_some(self.frontier))
            .or_else(|| self.high.find(&self.nodes, units))
    }

    /// The hole for a large range, and how many units to leave free behind it.
    fn find_large(&mut self, units: u32) -> Option<(u32, u32)> {
        if units > self.slot_min
            && self.habit.wants_slot(units)
            && let Some(found) = self.find_slot(units)
        {
            return Some(found);
        }
        self.high
            .find(&self.nodes, units)
            .or_else(|| self.frontier_fits(units).then_some(self.frontier))
            .or_else(|| self.low.find(&self.nodes, units))
            .map(|at| (at, 0))
    }

    /// The shortest hole with a free slot; the frontier only if no other has one.
    ///
    /// Looks at every long enough hole: there are fewer than [`SLOT_SHARE`].
    fn find_slot(&self, units: u32) -> Option<(u32, u32)> {
        let granule = granule(units);
        let fits = |at: u32| {
            let hole = &self.nodes[at as usize];
            let from_end = self.units - (hole.start + hole.len);
            let skip = from_end.next_multiple_of(granule) - from_end;
            (hole.len >= units && hole.len - units >= skip).then_some((hole.len, at, skip))
        };
        self.high
            .at_least(&self.nodes, units)
            .filter_map(fits)
            .min()
            .or_else(|| if self.frontier == NONE { None } else { fits(self.frontier) })
            .map(|(_, at, skip)| (at, skip))
    }

    fn frontier_fits(&self, units: u32) -> bool {
        self.frontier != NONE && self.nodes[self.frontier as usize].len >= units
    }

    /// Cuts `units` out of hole `at`, leaving `front` free units before them; `upward` says for
    /// which end.
    fn cut(&mut self, at: u32, front: u32, units: u32, upward: bool) {
        let was_frontier = at == self.frontier;
        if !was_frontier {
            self.unlink(at);
        }
        let Node { start, len, before, after, .. } = self.nodes[at as usize];
        let back = len - front - units;
        self.holes -= 1;
        let node = &mut self.nodes[at as usize];
        (node.start, node.len, node.state) = (start + front, units, State::Live);
        let mut rest = [NONE; 2];
        if front > 0 {
            rest[0] = self.node(start, front, before, at);
            self.nodes[at as usize].before = rest[0];
            if before != NONE {
                self.nodes[before as usize].after = rest[0];
            }
        }
        if back > 0 {
            rest[1] = self.node(start + front + units, back, at, after);
            self.nodes[at as usize].after = rest[1];
            if after != NONE {
                self.nodes[after as usize].before = rest[1];
            }
        }
        if was_frontier {
            // What is left towards the other end stays the frontier.
            self.frontier = rest[usize::from(upward)];
            self.boundary = start + front + if upward { units } else { 0 };
        }
        for hole in rest {
            if hole != NONE {
                self.holes += 1;
                if hole != self.frontier {
                    self.link(hole);
                }
            }
        }
        self.live += 1;
        self.free_units -= u64::from(units);
    }

    fn bins(&mut self, at: u32) -> (&mut Bins, &mut Vec<Node>) {
        let low = self.nodes[at as usize].start < self.boundary;
        (if low { &mut self.low } else { &mut self.high }, &mut self.nodes)
    }

    fn link(&mut self, at: u32) {
        let (bins, nodes) = self.bins(at);
        bins.push(nodes, at);
    }

    fn unlink(&mut self, at: u32) {
        let (bins, nodes) = self.bins(at);
        bins.remove(nodes, at);
    }

    /// Takes hole `at` out of wherever it hangs, to merge it with a neighbour.
    fn absorb(&mut self, at: u32) -> Node {
        if at == self.frontier {
            self.frontier = NONE;
        } else {
            self.unlink(at);
        }
        self.holes -= 1;
        let node = self.nodes[at as usize];
        self.discard(at);
        node
    }

    fn hole_at(&self, at: u32) -> bool {
        at != NONE && self.nodes[at as usize].state == State::Hole
    }
}

/// Grid of the slots for ranges of this length: a quarter of its power of two.
fn granule(units: u32) -> u32 {
    1 << units.ilog2().saturating_sub(2)
}

impl Habit {
    /// Notes a range, and says whether such ranges are alike but not the same.
    fn wants_slot(&mut self, units: u32) -> bool {
        let slot = units.next_multiple_of(granule(units));
        let differs = |before, now| u16::from(before != now && before != 0);
        self.lengths = self.lengths << 1 | differs(self.units, units);
        self.slots = self.slots << 1 | differs(self.slot, slot);
        (self.units, self.slot) = (units, slot);
        self.lengths != 0 && self.slots.count_ones() < 4
    }
}

impl SubAllocator for FitSubAllocator {
    fn allocate(&mut self, len: u64) -> Result<ArenaRange, NoRoom> {
        let refuse = |cause| Err(NoRoom { requested: len, cause });
        let Some(bytes) = NonZeroU64::new(len) else { return refuse(NoRoomCause::Empty) };
        let Ok(units) = u32::try_from(len.div_ceil(UNIT)) else {
            return refuse(NoRoomCause::Space);
        };
        // A cut leaves up to two holes where one was.
        if self.spare_nodes() < 2 {
            return refuse(NoRoomCause::Ranges);
        }
        let small = units <= self.small_max;
        let found = if small {
            self.find_small(units).map(|at| (at, 0))
        } else {
            self.find_large(units)
                .map(|(at, skip)| (at, self.nodes[at as usize].len - units - skip))
        };
        let Some((node, front)) = found else { return refuse(NoRoomCause::Space) };
        self.cut(node, front, units, small);
        Ok(ArenaRange { start: self.nodes[node as usize].start, node, len: bytes })
    }

    fn free(&mut self, range: ArenaRange) {
        let at = range.node;
        let node = self.nodes.get(at as usize).copied();
        let known = node.is_some_and(|n| {
            n.state == State::Live
                && n.start == range.start
                && u64::from(n.len) == range.len().div_ceil(UNIT)
        });
        assert!(known, "the range was made by another allocator");
        let Node { mut start, mut len, mut before, mut after, .. } = node.expect("just looked at");
        self.live -= 1;
        self.free_units += u64::from(len);
        if self.hole_at(before) {
            let hole = self.absorb(before);
            (start, len, before) = (hole.start, len + hole.len, hole.before);
        }
        if self.hole_at(after) {
            let hole = self.absorb(after);
            (len, after) = (len + hole.len, hole.after);
        }
        self.nodes[at as usize] =
            Node { start, len, before, after, prev: NONE, next: NONE, state: State::Hole };
        if before != NONE {
            self.nodes[before as usize].after = at;
        }
        if after != NONE {
            self.nodes[after as usize].before = at;
        }
        self.holes += 1;
        if start <= self.boundary && self.boundary <= start + len {
            self.frontier = at;
        } else {
            self.link(at);
        }
    }

    fn report(&self) -> SpaceReport {
        let frontier =
            if self.frontier == NONE { 0 } else { self.nodes[self.frontier as usize].len };
        let largest = [&self.low, &self.high]
            .into_iter()
            .map(|bins| bins.largest(&self.nodes))
            .fold(frontier, u32::max);
        SpaceReport {
            capacity: u64::from(self.units) * UNIT,
            free: self.free_bytes(),
            largest: u64::from(largest) * UNIT,
            live_ranges: self.live.into(),
            free_ranges: self.holes.into(),
        }
    }
}

impl Bins {
    fn new() -> Self {
        Self { filled: [0; BINS / 64], heads: Box::new([NONE; BINS]) }
    }

    /// The list of holes of `units`: eight to the octave, rounded down.
    fn of(units: u32) -> usize {
        if units < 8 {
            return units as usize;
        }
        let octave = units.ilog2();
        (((octave - 2) << 3) | ((units >> (octave - 3)) & 7)) as usize
    }

    fn push(&mut self, nodes: &mut [Node], at: u32) {
        let bin = Self::of(nodes[at as usize].len);
        let head = std::mem::replace(&mut self.heads[bin], at);
        (nodes[at as usize].prev, nodes[at as usize].next) = (NONE, head);
        if head != NONE {
            nodes[head as usize].prev = at;
        }
        self.filled[bin / 64] |= 1 << (bin % 64);
    }

    fn remove(&mut self, nodes: &mut [Node], at: u32) {
        let Node { prev, next, len, .. } = nodes[at as usize];
        if next != NONE {
            nodes[next as usize].prev = prev;
        }
        if prev != NONE {
            nodes[prev as usize].next = next;
            return;
        }
        let bin = Self::of(len);
        self.heads[bin] = next;
        if next == NONE {
            self.filled[bin / 64] &= !(1 << (bin % 64));
        }
    }

    /// The first list at or after `bin` that holds anything.
    fn filled_from(&self, bin: usize) -> Option<usize> {
        let mut word = bin / 64;
        let mut bits = self.filled.get(word)? & (!0 << (bin % 64));
        while bits == 0 {
            word += 1;
            bits = *self.filled.get(word)?;
        }
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    fn list<'a>(&'a self, nodes: &'a [Node], bin: usize) -> impl Iterator<Item = u32> + 'a {
        let head = self.heads[bin];
        std::iter::successors((head != NONE).then_some(head), move |&at| {
            let next = nodes[at as usize].next;
            (next != NONE).then_some(next)
        })
    }

    /// A good hole of at least `units`; one is found whenever there is one.
    fn find(&self, nodes: &[Node], units: u32) -> Option<u32> {
        let own = Self::of(units);
        let size = |at: &u32| nodes[*at as usize].len;
        let fits = |at: &u32| size(at) >= units;
        self.list(nodes, own)
            .take(SCAN)
            .filter(fits)
            .min_by_key(size)
            .or_else(|| {
                let next = self.filled_from(own + 1)?;
                self.list(nodes, next).take(SCAN).min_by_key(size)
            })
            .or_else(|| self.list(nodes, own).skip(SCAN).find(fits))
    }

    /// Every hole of at least `units`.
    fn at_least<'a>(&'a self, nodes: &'a [Node], units: u32) -> impl Iterator<Item = u32> + 'a {
        std::iter::successors(self.filled_from(Self::of(units)), |bin| self.filled_from(bin + 1))
            .flat_map(|bin| self.list(nodes, bin))
            .filter(move |&at| nodes[at as usize].len >= units)
    }

    fn largest(&self, nodes: &[Node]) -> u32 {
        let Some(word) = self.filled.iter().rposition(|&bits| bits != 0) else { return 0 };
        let bin = word * 64 + 63 - self.filled[word].leading_zeros() as usize;
        self.list(nodes, bin).map(|at| nodes[at as usize].len).max().unwrap_or(0)
    }
}
