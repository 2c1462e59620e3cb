//! What frees cost a server: control lines in, objects out of the arena's books.
//!
//! Prints one table, each value beside its target. One thread, no sockets.
#![allow(missing_docs)]

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use capture_arena::{BatchPlan, CaptureArena, ObjectList, PlannedObject, PlannedSample};
use control_proto::control::{Budget, Limits, Request, write_keys};

/// Objects that are live when the frees arrive: those of 512 samples, and more than caches hold.
const LIVE: [usize; 3] = [2_048, 10_000, 40_000];
const ROUNDS: usize = 15;
const PIECE: usize = 64 << 10;

fn keys(count: usize) -> Vec<String> {
    let names = ["hidden_states", "target_last_hidden_states", "input_ids", "loss_mask"];
    (0..count)
        .map(|i| format!("pipeline-42/pipeline-42:task-{:06}/g1/{}", i / 4, names[i % 4]))
        .collect()
}

fn lines(keys: &[String]) -> Vec<u8> {
    let mut out = Vec::new();
    write_keys(&mut out, keys);
    out
}

/// Feeds `bytes` as a socket would and hands every list of keys on; returns how many keys came.
fn drain(bytes: &[u8], mut each: impl FnMut(ObjectList)) -> usize {
    let limits = Limits::default();
    let mut decoder = Budget::new(limits).connect().expect("the first connection");
    let mut count = 0;
    for mut piece in bytes.chunks(PIECE) {
        while let Some(line) = decoder.next_line(&mut piece).expect("lines of a sane length") {
            let Ok(Request::Keys(list)) = Request::parse(line, &limits) else {
                panic!("not a list of keys")
            };
            count += list.len();
            let mut objects = ObjectList::new();
            for key in list.iter() {
                objects.push(key, None);
            }
            each(objects);
        }
    }
    count
}

fn filled(keys: &[String]) -> CaptureArena {
    let mut arena = CaptureArena::new(64 << 30, Duration::from_secs(30)).expect("a valid size");
    for (ticket, sample) in keys.chunks(4).enumerate() {
        let objects =
            sample.iter().map(|key| PlannedObject { key: key.as_str().into(), bytes: 4096 });
        let plan = BatchPlan {
            samples: vec![PlannedSample { objects: objects.collect(), holder: None }],
            replace: false,
        };
        let now = Instant::now();
        let grant = arena.reserve(plan, ticket as u64, now, now).expect("new keys");
        arena.publish(grant.expect("room").batch, now).expect("a fresh batch");
    }
    arena
}

fn median(mut times: Vec<f64>) -> (f64, f64, f64) {
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[0], times[times.len() - 1])
}

fn report(what: &str, rates: Vec<f64>, target: &str) {
    let (median, low, high) = median(rates);
    println!("{what:<52} {median:>8.2} {low:>8.2} {high:>8.2}   {target}");
}

fn main() {
    let quick = std::env::args().any(|a| a == "--test");
    let (sizes, rounds) = if quick { (&LIVE[..1], 2) } else { (&LIVE[..], ROUNDS) };
    println!("one core; million keys a second");
    println!("{:<52} {:>8} {:>8} {:>8}   target", "", "median", "low", "high");
    for &live in sizes {
        measure(live, rounds);
    }
}

fn measure(live: usize, rounds: usize) {
    let keys = keys(live);
    let bytes = lines(&keys);
    println!("{live} live objects, keys of {} bytes", bytes.len() / keys.len());
    let mut parsed = Vec::new();
    let mut freed = Vec::new();
    let mut unknown = Vec::new();
    for _ in 0..rounds {
        let start = Instant::now();
        let count = drain(&bytes, |objects| {
            black_box(&objects);
        });
        parsed.push(count as f64 / start.elapsed().as_secs_f64() / 1e6);

        let mut arena = filled(&keys);
        let start = Instant::now();
        let count = drain(&bytes, |objects| {
            let outcome = arena.free(None, &objects);
            assert!(outcome.gone.is_empty() && outcome.stale.is_empty());
        });
        freed.push(count as f64 / start.elapsed().as_secs_f64() / 1e6);
        assert_eq!(arena.health(Instant::now()).resident_samples, 0);

        let start = Instant::now();
        let count = drain(&bytes, |objects| {
            assert_eq!(arena.free(None, &objects).gone.len(), objects.len());
        });
        unknown.push(count as f64 / start.elapsed().as_secs_f64() / 1e6);
    }
    report("lines drained into lists of keys", parsed, ">= 3");
    report("drained and freed in the books", freed, ">= 3");
    report("drained, all keys unknown", unknown, ">= 3");
}
