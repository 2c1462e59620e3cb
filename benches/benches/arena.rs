//! What the arena's books cost, and how full an arena gets before something does not fit.
//!
//! Prints one table, each value beside its target, and then runs the criterion groups.
//! `cargo bench --bench arena -- --test` runs everything once, shortened.
#![allow(missing_docs)] // criterion's macros

use std::{
    alloc::{GlobalAlloc, Layout, System},
    collections::VecDeque,
    hint::black_box,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use capture_arena::{
    ArenaRange, BatchPlan, CaptureArena, FitSubAllocator, ObjectList, PlannedObject, PlannedSample,
    SubAllocator, UNIT,
};
use criterion::{Criterion, criterion_group, criterion_main};

/// Counts the bytes that are allocated now.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands every call on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Small deterministic generator (xorshift64*), so that every run sees the same traces.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }

    fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        let (a, b) = (self.unit().max(f64::MIN_POSITIVE), self.unit());
        (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

/// An allocator as the traces see it: lengths in, handles out.
trait Space {
    type Range;
    fn take(&mut self, len: u64) -> Option<Self::Range>;
    fn give(&mut self, range: Self::Range);
}

impl Space for FitSubAllocator {
    type Range = ArenaRange;

    fn take(&mut self, len: u64) -> Option<ArenaRange> {
        self.allocate(len).ok()
    }

    fn give(&mut self, range: ArenaRange) {
        self.free(range);
    }
}

/// The published crate, for comparison only.
struct Crate(offset_allocator::Allocator);

impl Crate {
    fn new(bytes: u64) -> Self {
        Self(offset_allocator::Allocator::with_max_allocs((bytes / UNIT) as u32, 1 << 18))
    }
}

impl Space for Crate {
    type Range = offset_allocator::Allocation;

    fn take(&mut self, len: u64) -> Option<Self::Range> {
        self.0.allocate(len.div_ceil(UNIT) as u32)
    }

    fn give(&mut self, range: Self::Range) {
        self.0.free(range);
    }
}

fn fit(bytes: u64) -> FitSubAllocator {
    FitSubAllocator::new(bytes).expect("below 2 TiB")
}

/// Bytes of the four tensors of a DSpark sample; token counts log-normal, mean about 1,287.
fn capture_sizes(random: &mut Random) -> [u64; 4] {
    const SIGMA: f64 = 0.8;
    let mu = 1287f64.ln() - SIGMA * SIGMA / 2.0;
    let tokens = ((mu + SIGMA * random.normal()).exp() as u64).clamp(16, 8192);
    [51_200 * tokens, 10_240 * tokens, 8 * tokens, 8 * tokens]
}

/// Share of the arena that is live, the refused sample included, at the first refusal after the
/// arena has been turned over `turns` times, with frees oldest first within a window of 16.
///
/// While it turns over, the arena is kept as full as it can be, which is the hardest case.
fn live_at_failure<S: Space>(mut space: S, capacity: u64, turns: u64, seed: u64) -> f64 {
    const WINDOW: u64 = 16;
    let mut random = Random::new(seed);
    let mut live: VecDeque<(u64, Vec<S::Range>)> = VecDeque::new();
    let (mut bytes, mut placed) = (0, 0);
    loop {
        let sizes = capture_sizes(&mut random);
        let wanted: u64 = sizes.iter().sum();
        let mut ranges = Vec::with_capacity(4);
        while let Some(range) = sizes.get(ranges.len()).and_then(|&len| space.take(len)) {
            ranges.push(range);
        }
        if ranges.len() == sizes.len() {
            live.push_back((wanted, ranges));
            bytes += wanted;
            placed += wanted;
            continue;
        }
        ranges.into_iter().for_each(|range| space.give(range));
        if placed >= turns * capacity {
            return (bytes + wanted) as f64 / capacity as f64;
        }
        for _ in 0..random.between(1, 2 * WINDOW) {
            let at = random.below(WINDOW.min(live.len() as u64).max(1)) as usize;
            let Some((freed, ranges)) = live.remove(at) else { break };
            bytes -= freed;
            ranges.into_iter().for_each(|range| space.give(range));
        }
    }
}

/// Refused allocations in `steps` steps of 31 small and 3 large objects whose frees come 1 to 3
/// steps later, shuffled, after that step's allocations; the arena holds four of the largest steps.
fn rollout_failures<S: Space>(make: impl Fn(u64) -> S, steps: usize, seed: u64) -> u64 {
    const SMALL: u64 = 10 << 10;
    const LARGE: u64 = 12 << 20;
    let mut space = make(4 * (31 * SMALL + 3 * LARGE));
    let mut random = Random::new(seed);
    let mut due: VecDeque<Vec<S::Range>> = (0..4).map(|_| Vec::new()).collect();
    let mut failures = 0;
    for _ in 0..steps {
        let mut sizes: Vec<u64> = (0..31).map(|_| random.between(256, SMALL)).collect();
        sizes.extend((0..3).map(|_| random.between(10 << 20, LARGE)));
        random.shuffle(&mut sizes);
        for len in sizes {
            match space.take(len) {
                Some(range) => due[random.between(1, 3) as usize].push(range),
                None => failures += 1,
            }
        }
        let mut freed = due.pop_front().expect("four steps");
        random.shuffle(&mut freed);
        freed.into_iter().for_each(|range| space.give(range));
        due.push_back(Vec::new());
    }
    failures
}

/// A space with a number of live ranges, of which one after the other is replaced.
struct Churn<S: Space> {
    space: S,
    live: Vec<S::Range>,
    random: Random,
}

impl<S: Space> Churn<S> {
    fn new(mut space: S, live: usize) -> Self {
        let mut random = Random::new(5);
        let live = (0..live).map(|_| space.take(churn_size(&mut random)).expect("room")).collect();
        Self { space, live, random }
    }

    /// Frees a random range and takes another.
    fn turn(&mut self) {
        let at = self.random.below(self.live.len() as u64) as usize;
        let len = churn_size(&mut self.random);
        self.space.give(self.live.swap_remove(at));
        self.live.push(self.space.take(len).expect("room"));
    }
}

/// 512 B to 16 MiB, about log-uniform.
fn churn_size(random: &mut Random) -> u64 {
    let octave = 512 << random.below(15);
    octave + random.below(octave)
}

/// The books with a number of live one-tensor samples.
struct Keyed {
    books: CaptureArena,
    keys: VecDeque<String>,
    next: u64,
    now: Instant,
}

impl Keyed {
    fn new(live: usize) -> Self {
        let books = CaptureArena::new(64 << 30, Duration::from_secs(30)).expect("a valid arena");
        let mut this = Self { books, keys: VecDeque::new(), next: 0, now: Instant::now() };
        (0..live).for_each(|_| this.publish());
        this
    }

    fn publish(&mut self) {
        self.next += 1;
        let key = format!("run0/run0:task-{:012}/g1/hidden_states", self.next);
        let object = PlannedObject { key: key.as_str().into(), bytes: 4096 };
        let sample = PlannedSample { objects: vec![object], holder: None };
        let plan = BatchPlan { samples: vec![sample], replace: false };
        let grant = self.books.reserve(plan, 0, self.now, self.now).expect("a new key");
        let batch = grant.expect("room").batch;
        self.books.publish(batch, self.now).expect("not taken over");
        self.keys.push_back(key);
    }

    fn free_oldest(&mut self) {
        let mut list = ObjectList::new();
        list.push(&self.keys.pop_front().expect("some are live"), None);
        assert!(self.books.free(None, black_box(&list)).gone.is_empty());
    }
}

/// Bytes of books for each of `objects` live objects, in samples of `each` objects.
fn bytes_per_object(objects: usize, each: usize) -> f64 {
    let before = ALLOCATED.load(Ordering::Relaxed);
    let now = Instant::now();
    let mut books = CaptureArena::new(64 << 30, Duration::from_secs(30)).expect("a valid arena");
    for sample in 0..objects / each {
        let object = |i| PlannedObject {
            key: Arc::from(format!("run0/run0:task-{sample:012}/g1/hidden_states_{i}")),
            bytes: 4096,
        };
        let sample = PlannedSample { objects: (0..each).map(object).collect(), holder: None };
        let plan = BatchPlan { samples: vec![sample], replace: false };
        let grant = books.reserve(plan, 0, now, now).expect("a new key").expect("room");
        books.publish(grant.batch, now).expect("not taken over");
    }
    let bytes = ALLOCATED.load(Ordering::Relaxed) - before;
    assert_eq!(books.health(now).resident_objects as usize, objects);
    bytes as f64 / objects as f64
}

/// Median over rounds of the time of one call, in nanoseconds.
fn nanos(rounds: usize, calls: usize, mut call: impl FnMut()) -> f64 {
    let round = |_| {
        let start = Instant::now();
        (0..calls).for_each(|_| call());
        start.elapsed().as_nanos() as f64 / calls as f64
    };
    median((0..rounds).map(round).collect())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn row(what: &str, value: String, target: &str, met: Option<bool>) {
    let verdict = met.map_or("", |met| if met { "met" } else { "MISSED" });
    println!("{what:<66} {value:>12}   {target:<12} {verdict}");
}

fn table(_: &mut Criterion) {
    let short = std::env::args().any(|arg| arg == "--test");
    let (rounds, calls) = if short { (3, 1_000) } else { (31, 20_000) };
    let (seeds, steps) = if short { (3, 2_000) } else { (100, 100_000) };
    let crate_too = "  the same with the offset-allocator crate";
    println!("\n{:<66} {:>12}   target", "arena", "measured");

    let mut churn = Churn::new(fit(64 << 30), 10_000);
    let ns = nanos(rounds, calls, || churn.turn());
    let what = "free + alloc of a range, 10,000 live, 512 B to 16 MiB";
    row(what, format!("{ns:.0} ns"), "<= 100 ns", Some(ns <= 100.0));
    let mut churn = Churn::new(Crate::new(64 << 30), 10_000);
    let ns = nanos(rounds, calls, || churn.turn());
    row(crate_too, format!("{ns:.0} ns"), "", None);

    for live in [64, 10_000, 100_000] {
        let mut keyed = Keyed::new(live);
        let ns = nanos(rounds, calls / 4, || {
            keyed.publish();
            keyed.free_oldest();
        });
        let what = format!("keyed object, reserve + publish + export + free, {live} live");
        row(&what, format!("{ns:.0} ns"), "<= 1000 ns", Some(ns <= 1000.0));
    }

    let capacity = 64u64 << 30;
    let shares = |fail: &dyn Fn(u64) -> f64| median((1..=seeds).map(fail).collect());
    let share = shares(&|seed| live_at_failure(fit(capacity), capacity, 4, seed));
    let what = format!("live share at first failure, capture mix, median of {seeds} seeds");
    row(&what, format!("{share:.3}"), ">= 0.90", Some(share >= 0.90));
    let share = shares(&|seed| live_at_failure(Crate::new(capacity), capacity, 4, seed));
    row(crate_too, format!("{share:.3}"), "", None);

    let failures = rollout_failures(fit, steps, 7);
    let what = format!("refused in {steps} rollout steps, arena of 4 steps");
    row(&what, failures.to_string(), "0", Some(failures == 0));
    let failures = rollout_failures(Crate::new, steps, 7);
    row(crate_too, failures.to_string(), "", None);

    for each in [1, 4] {
        let bytes = bytes_per_object(100_000, each);
        let what = format!("books per object at 100,000 live, {each} to a sample");
        row(&what, format!("{bytes:.0} B"), "<= 400 B", Some(bytes <= 400.0));
    }
    println!();
}

fn groups(c: &mut Criterion) {
    let mut group = c.benchmark_group("arena");
    let mut churn = Churn::new(fit(64 << 30), 10_000);
    group.bench_function("range/free+alloc", |b| b.iter(|| churn.turn()));
    let mut keyed = Keyed::new(10_000);
    group.bench_function("keyed/publish+free", |b| {
        b.iter(|| {
            keyed.publish();
            keyed.free_oldest();
        });
    });
    group.finish();
}

criterion_group!(benches, table, groups);
criterion_main!(benches);
