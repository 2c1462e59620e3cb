//! What encoding and decoding rollouts costs, beside a plain gather of the same rows.
//!
//! Prints one table, each value beside its target, and then runs the criterion groups.
//! `cargo bench --bench rollout -- --test` runs everything once, on little data.
//! `ROLLOUT_BENCH_MIB` sets the size of the payloads (128 unless said otherwise).
#![allow(missing_docs)] // criterion's macros

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rollout_codec::{
    native::{Header, Options, Plan, RolloutView},
    payload::{Payload, Profile},
};
use transport_core::{RegionMut, RegionSlice};

/// Part of the plain gather's speed that encoding must reach.
const ENCODE_TARGET: f64 = 0.9;
const DECODE_TARGET: Duration = Duration::from_millis(10);
const INSPECT_TARGET: Duration = Duration::from_millis(1);

fn testing() -> bool {
    std::env::args().any(|arg| arg == "--test")
}

fn target_bytes() -> u64 {
    let mib = std::env::var("ROLLOUT_BENCH_MIB").ok().and_then(|mib| mib.parse().ok());
    mib.unwrap_or(if testing() { 16 } else { 128 }) << 20
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// The rows of all fields, one after the other, without alignment, offsets or checksums.
fn plain_gather(rows: &[&[u8]], dest: &mut [u8], threads: usize) {
    fn copy(rows: &[&[u8]], mut dest: &mut [u8]) {
        for row in rows {
            let (to, rest) = dest.split_at_mut(row.len());
            to.copy_from_slice(row);
            dest = rest;
        }
    }
    let total: usize = rows.iter().map(|row| row.len()).sum();
    std::thread::scope(|scope| {
        let (mut rows, mut dest) = (rows, dest);
        for _ in 1..threads {
            let mut bytes = 0;
            let count = rows
                .iter()
                .take_while(|row| {
                    bytes += row.len();
                    bytes <= total / threads
                })
                .count();
            let (head, tail) = rows.split_at(count);
            let (to, rest) = dest.split_at_mut(head.iter().map(|row| row.len()).sum());
            scope.spawn(move || copy(head, to));
            (rows, dest) = (tail, rest);
        }
        copy(rows, dest);
    });
}

fn flat_rows(payload: &Payload) -> Vec<&[u8]> {
    payload.fields().iter().flat_map(|field| field.rows.iter().map(|row| &**row)).collect()
}

fn gb_per_s(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}

fn line(name: &str, value: String, target: String, met: bool) {
    let met = if met { "ok" } else { "MISSED" };
    println!("{name:<58} {value:>24}   {target:<28} {met}");
}

fn table(_: &mut Criterion) {
    let reps = if testing() { 1 } else { 15 };
    println!();
    for profile in [Profile::Text, Profile::TextExperts] {
        let payload = Payload::new(profile, target_bytes());
        let bytes = payload.nbytes();
        println!("{profile}: {} rows, {bytes} bytes", payload.rows());
        let rollout = payload.rollout();
        let rows = flat_rows(&payload);
        let fast = Plan::new(&rollout, &Options::default().checksums(false)).unwrap();
        let summed = Plan::new(&rollout, &Options::default()).unwrap();
        // The same warm destination for everything, as transports give it: it begins at a page.
        let mut region = RegionMut::zeroed(summed.data_bytes() as usize).unwrap();
        let dest = region.as_mut_bytes().unwrap();
        dest.fill(1);
        for threads in [1, 2] {
            let mut times = [const { Vec::new() }; 3];
            // Interleaved, so that a slow phase of the machine meets all alike.
            for _ in 0..reps {
                let mut time = |i: usize, work: &mut dyn FnMut()| {
                    let start = Instant::now();
                    work();
                    times[i].push(start.elapsed());
                };
                time(0, &mut || plain_gather(&rows, &mut dest[..bytes as usize], threads));
                time(1, &mut || {
                    black_box(fast.encode_into(dest, threads).unwrap());
                });
                time(2, &mut || {
                    black_box(summed.encode_into(dest, threads).unwrap());
                });
            }
            let [plain, fast, summed] = times.map(median);
            println!(
                "  plain gather, {threads} thread(s): {:.2} GB/s ({:.1} ms)",
                gb_per_s(bytes, plain),
                plain.as_secs_f64() * 1e3
            );
            for (what, time) in [("without checksums", fast), ("with checksums", summed)] {
                let part = plain.as_secs_f64() / time.as_secs_f64();
                line(
                    &format!("  encode, {threads} thread(s), {what}"),
                    format!("{part:.2} ({:.2} GB/s)", gb_per_s(bytes, time)),
                    format!(">= {ENCODE_TARGET} of plain"),
                    part >= ENCODE_TARGET,
                );
            }
        }
        let plan_time = median(
            (0..reps)
                .map(|_| {
                    let start = Instant::now();
                    black_box(Plan::new(&rollout, &Options::default()).unwrap());
                    start.elapsed()
                })
                .collect(),
        );
        line("  plan", format!("{plan_time:.2?}"), "(no target)".into(), true);
        let (header, data) = summed.encode(2).unwrap();
        drop(region);
        let decode = median((0..reps).map(|_| decode_to_rows(&header, &data, &payload)).collect());
        line(
            "  decode to row views",
            format!("{decode:.2?}"),
            format!("<= {DECODE_TARGET:?} at 1 GiB"),
            decode <= DECODE_TARGET,
        );
        let inspect = median((0..reps).map(|_| inspect(&header)).collect());
        line(
            "  inspect, header only",
            format!("{inspect:.2?} ({} B)", header.len()),
            format!("<= {INSPECT_TARGET:?}"),
            inspect <= INSPECT_TARGET,
        );
        let view = RolloutView::new(Header::parse(&header).unwrap(), data).unwrap();
        for threads in [1, 2] {
            let verify = median(
                (0..reps)
                    .map(|_| {
                        let start = Instant::now();
                        view.verify(threads).unwrap();
                        start.elapsed()
                    })
                    .collect(),
            );
            line(
                &format!("  verify checksums, {threads} thread(s)"),
                format!("{:.2} GB/s", gb_per_s(bytes, verify)),
                "(no target)".into(),
                true,
            );
        }
    }
    println!();
}

/// From header and data to one slice a row of every ragged field.
fn decode_to_rows(header: &[u8], data: &RegionSlice, payload: &Payload) -> Duration {
    let start = Instant::now();
    let view = RolloutView::new(Header::parse(header).unwrap(), data.clone()).unwrap();
    let fields: Vec<_> =
        payload.fields().iter().map(|field| view.ragged(field.name).unwrap()).collect();
    let rows: Vec<Vec<&[u8]>> =
        fields.iter().map(|field| field.iter().map(|row| row.unwrap().bytes()).collect()).collect();
    black_box(&rows);
    let time = start.elapsed();
    for (rows, field) in rows.iter().zip(payload.fields()) {
        assert_eq!(rows.len(), field.rows.len());
        assert!(rows.last().copied() == field.rows.last().map(|row| &**row));
    }
    time
}

fn inspect(header: &[u8]) -> Duration {
    let start = Instant::now();
    let header = Header::parse(header).unwrap();
    black_box(header.fields().map(|field| field.bytes).sum::<u64>());
    start.elapsed()
}

fn groups(c: &mut Criterion) {
    let mut group = c.benchmark_group("rollout");
    group.sample_size(10).measurement_time(Duration::from_secs(2));
    for profile in [Profile::Text, Profile::TextExperts] {
        let payload = Payload::new(profile, target_bytes().min(64 << 20));
        let rollout = payload.rollout();
        let plan = Plan::new(&rollout, &Options::default().checksums(false)).unwrap();
        let mut region = RegionMut::zeroed(plan.data_bytes() as usize).unwrap();
        let dest = region.as_mut_bytes().unwrap();
        group.throughput(Throughput::Bytes(payload.nbytes()));
        for threads in [1, 2] {
            let id = BenchmarkId::new(format!("encode {profile}"), threads);
            group.bench_function(id, |b| b.iter(|| plan.encode_into(dest, threads).unwrap()));
        }
        let (header, data) = plan.encode(2).unwrap();
        group.bench_function(BenchmarkId::new("decode", profile), |b| {
            b.iter_custom(|n| (0..n).map(|_| decode_to_rows(&header, &data, &payload)).sum());
        });
    }
    group.finish();
}

criterion_group!(benches, table, groups);
criterion_main!(benches);
