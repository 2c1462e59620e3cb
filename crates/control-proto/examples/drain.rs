//! Measures how many keys a second one core drains from control lines: feed, cut, parse, visit.
//!
//! `cargo run --release -p control-proto --example drain`

use std::time::Instant;

use control_proto::control::{self, Budget, Limits, Request};
use transport_core::{Epoch, Sequence};

const KEYS: usize = 400_000;
const ROUNDS: usize = 7;

fn main() {
    let keys: Vec<String> = (0..KEYS)
        .map(|i| format!("run-2026-11/run-2026-11:task-{i:012}/g1/hidden_states_aux"))
        .collect();
    println!("{} keys of {} bytes, median of {ROUNDS} rounds", KEYS, keys[0].len());

    let mut lists = Vec::new();
    control::write_keys(&mut lists, &keys);
    report("lists of keys, fed in 64 KiB pieces", || drain(&lists, 64 << 10));
    report("lists of keys, fed in 1 KiB pieces", || drain(&lists, 1 << 10));

    let mut small = Vec::new();
    for sample in keys.chunks(4) {
        control::write_keys(&mut small, sample);
    }
    report("lists of 4 keys, fed in 64 KiB pieces", || drain(&small, 64 << 10));

    let escaped = String::from_utf8(lists.clone()).expect("JSON").replace('/', "\\/").into_bytes();
    report("lists of keys with escapes, 64 KiB", || drain(&escaped, 64 << 10));

    let mut frees = Vec::new();
    for (id, objects) in keys.chunks(control::Objects::PER_LINE).enumerate() {
        let objects = objects.iter().map(|key| (key, Some(Sequence(id as u64))));
        control::write_free(&mut frees, id as u64, Epoch(1 << 52), objects, &Limits::default())
            .expect("within limits");
    }
    report("free lines with lives, 64 KiB", || drain(&frees, 64 << 10));

    let mut out = Vec::with_capacity(lists.len());
    report("writing lists of keys", || {
        out.clear();
        control::write_keys(&mut out, &keys);
        KEYS
    });
}

/// Reads a stream as a server does; returns the number of keys.
fn drain(stream: &[u8], piece: usize) -> usize {
    let limits = Limits::default();
    let mut decoder = Budget::new(limits).connect().expect("the first connection");
    let (mut count, mut bytes) = (0, 0);
    for mut input in stream.chunks(piece) {
        while let Some(line) = decoder.next_line(&mut input).expect("bounded lines") {
            match Request::parse(line, &limits).expect("good lines") {
                Request::Keys(keys) => {
                    for key in &keys {
                        count += 1;
                        bytes += std::hint::black_box(key).len();
                    }
                }
                Request::Free { objects, .. } => {
                    for (key, seq) in objects.iter() {
                        count += 1;
                        bytes += std::hint::black_box((key, seq)).0.len();
                    }
                }
                other => panic!("unexpected {other:?}"),
            }
        }
    }
    assert!(bytes > count && decoder.finish().is_none());
    count
}

fn report(what: &str, mut run: impl FnMut() -> usize) {
    let mut rates: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            let keys = run();
            assert_eq!(keys, KEYS);
            keys as f64 / start.elapsed().as_secs_f64()
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    println!("{what}: {:.1} M keys/s", rates[ROUNDS / 2] / 1e6);
}
