//! Test oracle: the plainest allocator that can be right, and what must hold of every other one.

use std::{collections::BTreeMap, num::NonZeroU64};

use proptest::prelude::*;

use crate::{
    fit::FitSubAllocator,
    suballoc::{ArenaRange, NoRoom, NoRoomCause, SpaceReport, SubAllocator, UNIT},
};

/// First fit by address over a map of free ranges, in units.
#[derive(Debug)]
struct Oracle {
    units: u64,
    holes: BTreeMap<u64, u64>,
    live: u64,
}

impl Oracle {
    fn new(bytes: u64) -> Self {
        let units = bytes / UNIT;
        Self { units, holes: BTreeMap::from([(0, units)]), live: 0 }
    }

    fn take(&mut self, start: u64, units: u64) {
        let (&at, &len) = self.holes.range(..=start).next_back().expect("free space");
        assert!(start + units <= at + len, "the range is not free");
        self.holes.remove(&at);
        if start > at {
            self.holes.insert(at, start - at);
        }
        if start + units < at + len {
            self.holes.insert(start + units, at + len - start - units);
        }
        self.live += 1;
    }

    fn give(&mut self, mut start: u64, mut units: u64) {
        self.live -= 1;
        if let Some((&at, &len)) = self.holes.range(..start).next_back() {
            assert!(at + len <= start, "freed what is free");
            if at + len == start {
                self.holes.remove(&at);
                (start, units) = (at, len + units);
            }
        }
        if let Some(len) = self.holes.remove(&(start + units)) {
            units += len;
        }
        self.holes.insert(start, units);
    }
}

impl SubAllocator for Oracle {
    fn allocate(&mut self, len: u64) -> Result<ArenaRange, NoRoom> {
        let refuse = |cause| NoRoom { requested: len, cause };
        let bytes = NonZeroU64::new(len).ok_or(refuse(NoRoomCause::Empty))?;
        let units = len.div_ceil(UNIT);
        let first = self.holes.iter().find(|(_, hole)| **hole >= units);
        let start = *first.ok_or(refuse(NoRoomCause::Space))?.0;
        self.take(start, units);
        Ok(ArenaRange { start: start as u32, node: 0, len: bytes })
    }

    fn free(&mut self, range: ArenaRange) {
        self.give(range.start.into(), range.footprint() / UNIT);
    }

    fn report(&self) -> SpaceReport {
        SpaceReport {
            capacity: self.units * UNIT,
            free: self.holes.values().sum::<u64>() * UNIT,
            largest: self.holes.values().max().map_or(0, |units| units * UNIT),
            live_ranges: self.live,
            free_ranges: self.holes.len() as u64,
        }
    }
}

/// An allocator beside an oracle that has to agree that its choices are free.
struct Pair {
    subject: FitSubAllocator,
    oracle: Oracle,
    live: Vec<ArenaRange>,
}

impl Pair {
    fn new(bytes: u64) -> Self {
        let subject = FitSubAllocator::new(bytes).unwrap();
        Self { subject, oracle: Oracle::new(bytes), live: Vec::new() }
    }

    fn allocate(&mut self, len: u64) -> bool {
        let largest = self.oracle.report().largest;
        match self.subject.allocate(len) {
            Ok(range) => {
                assert_eq!(range.offset().0 % UNIT, 0);
                assert_eq!(range.len(), len);
                self.oracle.take(range.start.into(), range.footprint() / UNIT);
                self.live.push(range);
            }
            Err(refused) => {
                assert_eq!(refused.requested, len);
                let expected = if len == 0 { NoRoomCause::Empty } else { NoRoomCause::Space };
                assert_eq!(refused.cause, expected);
                assert!(len == 0 || len.div_ceil(UNIT) * UNIT > largest, "a hole would have fit");
            }
        }
        self.check()
    }

    fn free(&mut self, at: usize) {
        let range = self.live.swap_remove(at % self.live.len());
        self.oracle.give(range.start.into(), range.footprint() / UNIT);
        self.subject.free(range);
        self.check();
    }

    /// Both agree on everything that is free, so nothing overlaps and neighbours have merged.
    fn check(&self) -> bool {
        let (report, expected) = (self.subject.report(), self.oracle.report());
        assert_eq!(report, expected);
        let taken: u64 = self.live.iter().map(ArenaRange::footprint).sum();
        assert_eq!(taken + report.free, report.capacity);
        true
    }

    fn empty(mut self) {
        while !self.live.is_empty() {
            self.free(self.live.len() / 2);
        }
        let report = self.subject.report();
        let ranges = u64::from(report.capacity > 0);
        assert_eq!((report.largest, report.free_ranges), (report.capacity, ranges));
        // However it came to this, the whole capacity is one range again.
        assert!(self.subject.allocate(report.capacity).is_ok());
    }
}

#[derive(Clone, Debug)]
enum Op {
    Allocate(u64),
    Free(usize),
}

fn ops(sizes: impl Strategy<Value = u64>) -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        3 => sizes.prop_map(Op::Allocate),
        2 => any::<usize>().prop_map(Op::Free),
    ];
    prop::collection::vec(op, 1..400)
}

/// The size families that allocators are known to trip over.
fn families(max: u64) -> impl Strategy<Value = u64> {
    const PRIMES: [u64; 8] = [2, 509, 521, 1021, 4099, 65_537, 1_000_003, 16_777_259];
    let near_power =
        (0..25u32, -17i64..=17).prop_map(|(n, by)| (1u64 << n).saturating_add_signed(by));
    let fibonacci = (1..36usize).prop_map(|n| (0..n).fold((1u64, 1u64), |(a, b), _| (b, a + b)).0);
    prop_oneof![
        near_power,
        fibonacci,
        prop::sample::select(&PRIMES[..]),
        (1..4096u64).prop_map(|pages| pages * 4096),
        0..4096u64,
    ]
    .prop_map(move |size| size.min(max))
}

fn run(capacity: u64, ops: Vec<Op>) {
    let mut pair = Pair::new(capacity);
    for op in ops {
        match op {
            Op::Allocate(len) => drop(pair.allocate(len)),
            Op::Free(_) if pair.live.is_empty() => {}
            Op::Free(at) => pair.free(at),
        }
    }
    pair.empty();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn small_arenas_agree_with_the_oracle(
        units in 1..300u64,
        ops in ops(0..20_000u64),
    ) {
        run(units * UNIT + 100, ops);
    }

    #[test]
    fn large_arenas_agree_with_the_oracle(
        capacity in prop::sample::select(vec![16u64 << 20, 145 << 20, (64 << 20) + 512 * 7, 6 << 30]),
        ops in ops(families(24 << 20)),
    ) {
        run(capacity, ops);
    }

    #[test]
    fn the_oracle_agrees_with_itself(ops in ops(0..9_000u64)) {
        let mut oracle = Oracle::new(100 * UNIT);
        let mut live = Vec::new();
        for op in ops {
            match op {
                Op::Allocate(len) => live.extend(oracle.allocate(len)),
                Op::Free(at) if !live.is_empty() => {
                    let range = live.swap_remove(at % live.len());
                    oracle.free(range);
                }
                Op::Free(_) => {}
            }
        }
        live.into_iter().for_each(|range| oracle.free(range));
        prop_assert_eq!(oracle.holes, BTreeMap::from([(0, 100)]));
    }
}

#[test]
fn exhaustion_is_exact() {
    for units in [8, 1000, 40_000, (64 << 20) / UNIT] {
        let mut pair = Pair::new(units * UNIT);
        let half = units / 2 * UNIT;
        assert!(pair.subject.allocate(half + 1).is_ok());
        assert!(pair.subject.allocate(half + 1).is_err(), "half and a byte, twice");
        let rest = pair.subject.report().largest;
        assert!(pair.subject.allocate(rest).is_ok());
        assert_eq!(pair.subject.report().free, 0);
        assert!(pair.subject.allocate(1).is_err());
        pair = Pair::new(units * UNIT);
        assert!(pair.allocate(units * UNIT), "everything at once");
        pair.empty();
    }
}

#[test]
fn blocks_of_one_size_leave_no_trace() {
    const MIB: u64 = 1 << 20;
    let mut pair = Pair::new(100 * MIB);
    for _ in 0..100 {
        pair.allocate(MIB);
    }
    assert_eq!((pair.live.len(), pair.subject.report().free), (100, 0));
    pair.empty();
}

#[test]
fn the_table_of_ranges_has_its_own_error() {
    let mut space = FitSubAllocator::with_max_ranges(1 << 20, 8).unwrap();
    let mut live: Vec<_> = (0..6).map(|_| space.allocate(512).unwrap()).collect();
    let refused = space.allocate(512).unwrap_err();
    assert_eq!(refused.cause, NoRoomCause::Ranges);
    assert!(space.report().free > 512);
    space.free(live.pop().unwrap());
    assert!(space.allocate(512).is_ok());
}

#[test]
fn blocks_beyond_32_bit_bytes_and_no_more_than_32_bit_units() {
    let mut space = FitSubAllocator::new(64 << 30).unwrap();
    let ranges: Vec<_> = (0..15).map(|_| space.allocate((4 << 30) + 1).unwrap()).collect();
    assert!(ranges.iter().any(|r| r.offset().0 > 60 << 30 || r.offset().0 > 50 << 30));
    ranges.into_iter().for_each(|range| space.free(range));
    assert_eq!(space.report().largest, 64 << 30);
    assert!(FitSubAllocator::new(FitSubAllocator::MAX_BYTES).is_some());
    assert!(FitSubAllocator::new(FitSubAllocator::MAX_BYTES + 1).is_none());
    assert!(space.allocate(u64::MAX).is_err());
}

#[test]
#[should_panic(expected = "made by another allocator")]
fn a_range_of_another_allocator_is_refused() {
    let (mut a, mut b) =
        (FitSubAllocator::new(1 << 20).unwrap(), FitSubAllocator::new(1 << 20).unwrap());
    let _kept = a.allocate(512).unwrap();
    b.free(a.allocate(512).unwrap());
}

#[test]
fn small_and_large_objects_grow_from_either_end() {
    let mut space = FitSubAllocator::new(1 << 30).unwrap();
    let small: Vec<_> = (0..10).map(|_| space.allocate(1000).unwrap()).collect();
    let large: Vec<_> = (0..10).map(|_| space.allocate(3 << 20).unwrap()).collect();
    assert!(small.iter().enumerate().all(|(i, r)| r.offset().0 == 1024 * i as u64));
    assert_eq!(large[0].offset().0 + (3 << 20), 1 << 30);
    assert!(large.iter().all(|r| r.offset().0 > 512 << 20));
    // Either side uses the other's room before it fails.
    let rest = space.allocate(space.report().largest).unwrap();
    small.into_iter().for_each(|r| space.free(r));
    large.into_iter().for_each(|r| space.free(r));
    let many: Vec<_> = std::iter::from_fn(|| space.allocate(60 << 10).ok()).collect();
    assert!(many.iter().any(|r| r.offset().0 > 512 << 20));
    space.free(rest);
}

/// Per step 31 objects of 256 B to 10 KiB and 3 of 10 to 12 MiB, of ever different sizes, freed 1
/// to 3 steps later in any order, in an arena that holds four of the largest steps.
#[test]
fn a_rollout_mix_never_fails_in_an_arena_of_four_steps() {
    use proptest::test_runner::{RngAlgorithm, TestRng};
    let (small, large) = (10u64 << 10, 12u64 << 20);
    for longest in [false, true] {
        let mut random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let mut below = move |n: u64| random.random::<u64>() % n;
        let mut pair = FitSubAllocator::new(4 * (31 * small + 3 * large)).unwrap();
        let mut due: Vec<Vec<ArenaRange>> = (0..4).map(|_| Vec::new()).collect();
        for step in 0..2_000 {
            let mut sizes: Vec<u64> = (0..31).map(|_| 256 + below(small - 255)).collect();
            sizes.extend((0..3).map(|_| (10 << 20) + below((2 << 20) + 1)));
            for i in (1..sizes.len()).rev() {
                sizes.swap(i, below(i as u64 + 1) as usize);
            }
            for len in sizes {
                let range = pair.allocate(len).unwrap_or_else(|e| {
                    panic!("step {step}: {e}; {:?}", pair.report());
                });
                let lag = if longest { 3 } else { 1 + below(3) as usize };
                due[lag].push(range);
            }
            let mut freed = due.remove(0);
            while !freed.is_empty() {
                pair.free(freed.swap_remove(below(freed.len() as u64) as usize));
            }
            due.push(Vec::new());
        }
    }
}
