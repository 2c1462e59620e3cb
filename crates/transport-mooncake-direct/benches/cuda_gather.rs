//! What the gather kernel reaches beside plain copies of the driver, on one device in one process.
//!
//! Needs a CUDA device: `cargo bench -p transport-mooncake-direct --features cuda --bench
//! cuda_gather`. First every way of copying is checked byte by byte, with lengths and addresses at
//! random and destinations that were poisoned before; then come the figures, each of a checked
//! result. Times include everything from the list of pieces in the caller's hands to the knowledge
//! that all is done. `--ptx FILE` measures other
//! device code, `--short` ends before the search for the best policy.

use std::time::{Duration, Instant};

use capture_arena::cuda::{CopyOp, Device, DevicePtr, Optional, Pinned, driver};
use transport_core::Result;
use transport_mooncake_direct::cuda::{CopyLane, CopyPolicy, GatherKernel, Wait};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const POISON: u8 = 0xEE;
/// Bytes between the ends of the machine: sources rotate, so that none is left in the cache.
const BYTES: u64 = 3 << 30;
const STAGE: usize = 64 << 20;
const RUNS: usize = 30;

fn main() -> Result<()> {
    // Cargo passes `--bench`; without a device there is nothing to measure.
    let device = match driver().and_then(|api| Device::open(api, 0)) {
        Ok(device) => device,
        Err(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    let info = device.api().driver().clone();
    println!("{}, driver for CUDA {}.{}", device.name(), info.version.0, info.version.1);
    let started = Instant::now();
    let kernel = match argument("--ptx") {
        None => GatherKernel::load(&device)?,
        Some(file) => {
            let mut code = std::fs::read(&file).expect("a file that can be read");
            code.push(0);
            println!("device code: {file}");
            GatherKernel::load_code(&device, &code)?
        }
    };
    println!("kernel loaded in {:.1} ms\n", started.elapsed().as_secs_f64() * 1e3);
    let mut bed = Bed::new(&device, &kernel)?;
    bed.check_at_random()?;
    bed.targets()?;
    if std::env::args().any(|argument| argument == "--short") {
        return Ok(());
    }
    bed.sweep("512 x 256 KiB", 512, 256 * KIB)?;
    bed.sweep("4,096 x 10 KiB", 4096, 10 * KIB)?;
    bed.sweep("1 x 4 KiB", 1, 4 * KIB)?;
    bed.crossing()?;
    bed.misaligned()?;
    bed.split()
}

fn argument(name: &str) -> Option<String> {
    let mut arguments = std::env::args().skip_while(|argument| argument != name);
    arguments.nth(1)
}

struct Bed {
    device: Device,
    lane: CopyLane,
    from: DevicePtr,
    to: DevicePtr,
    stage: Pinned,
    turn: u64,
    random: Random,
}

impl Bed {
    fn new(device: &Device, kernel: &GatherKernel) -> Result<Self> {
        let _bound = device.bind()?;
        let alloc = || device.api().alloc(BYTES).map_err(|e| e.during("allocate"));
        let (from, to) = (alloc()?, alloc()?);
        let mut this = Self {
            device: device.clone(),
            lane: CopyLane::new(kernel, CopyPolicy::default())?,
            from,
            to,
            stage: device.pinned(STAGE)?,
            turn: 0,
            random: Random(1),
        };
        for start in (0..BYTES).step_by(STAGE) {
            let words = this.stage.as_mut_slice().chunks_exact_mut(8);
            for (i, word) in words.enumerate() {
                word.copy_from_slice(&source(start / 8 + i as u64).to_le_bytes());
            }
            let (to, stage) = (this.from.offset(start), this.stage.address());
            this.copy_whole(to, stage, STAGE as u64)?;
        }
        Ok(this)
    }

    fn copy_whole(&self, dst: DevicePtr, src: DevicePtr, len: u64) -> Result<()> {
        let stream = self.lane.copy_stream();
        // SAFETY: memory of this bed, which nothing else uses.
        unsafe { stream.copy(dst, src, len) }?;
        stream.synchronize()
    }

    fn poison(&self, len: u64) -> Result<()> {
        let stream = self.lane.copy_stream();
        // SAFETY: as above.
        unsafe { stream.fill(self.to, POISON, len) }?;
        stream.synchronize()
    }

    /// Every byte of the first `len` of the destination: copied where a piece says so, poison
    /// elsewhere. Pieces are in order of their destination.
    fn verify(&mut self, ops: &[CopyOp], len: u64, what: &str) -> Result<()> {
        let mut ops = ops.iter().filter(|op| op.len > 0).peekable();
        for start in (0..len).step_by(STAGE) {
            let part = (len - start).min(STAGE as u64);
            let (to, stage) = (self.to.offset(start), self.stage.address());
            self.copy_whole(stage, to, part)?;
            let bytes = self.stage.as_slice();
            let mut at = start;
            while at < start + part {
                let place = |at: u64| (at - start) as usize;
                let next = ops.peek();
                let begin = next.map_or(u64::MAX, |op| op.dst.0 - self.to.0);
                if at < begin {
                    let end = begin.min(start + part);
                    let is_poison = bytes[place(at)..place(end)].iter().all(|&b| b == POISON);
                    assert!(is_poison, "{what}: written outside the pieces at {at}..{end}");
                    at = end;
                    continue;
                }
                let op = next.expect("begins here");
                let end = (begin + op.len).min(start + part);
                let from = op.src.0 - self.from.0 + (at - begin);
                let is_equal = equals_source(&bytes[place(at)..place(end)], from);
                assert!(is_equal, "{what}: wrong bytes within {at}..{end} of {op:?}");
                at = end;
                if end == begin + op.len {
                    ops.next();
                }
            }
        }
        Ok(())
    }

    fn copy(&mut self, ops: &[CopyOp], policy: CopyPolicy) -> Result<Duration> {
        self.lane.set_policy(policy);
        let started = Instant::now();
        // SAFETY: pieces of this bed's memory, apart from each other, and nothing else uses it.
        unsafe { self.lane.run(ops, started + Duration::from_secs(20)) }?;
        Ok(started.elapsed())
    }

    fn check_at_random(&mut self) -> Result<()> {
        let mut checked = 0;
        for round in 0..60 {
            let len = 64 * MIB;
            let most = [64, 4096, 70_000, 1 << 20, 8 << 20][round % 5];
            let count = [3, 300, 3000, 20_000][round % 4];
            let (mut ops, mut at) = (Vec::new(), self.random.below(40));
            while ops.len() < count {
                let piece = match self.random.below(4) {
                    0 => self.random.below(33),
                    1 => self.random.below(most / 512 + 1) * 512,
                    _ => self.random.below(most),
                };
                if at + piece + 64 > len {
                    break;
                }
                let mut src = self.random.below(BYTES - piece);
                if self.random.below(3) > 0 {
                    src = src / 16 * 16 + at % 16; // same place within a vector
                    src = src.min(BYTES - piece);
                }
                ops.push(CopyOp {
                    dst: self.to.offset(at),
                    src: self.from.offset(src),
                    len: piece,
                });
                at += piece + self.random.below(70);
            }
            let policy = CopyPolicy {
                copy_from: [u64::MAX, u64::MAX, MIB][round % 3],
                copy_from_afar: MIB,
                ahead: round % 4 < 3,
                upload_above: [usize::MAX, 0, 0][round / 3 % 3],
                list_in_host_memory: round / 3 % 3 == 2,
                blocks_each: 1 + round as u32 % 3,
                rounds: 1 + round as u32 % 4,
                wait: [Wait::Signal, Wait::Ask, Wait::Driver][round % 3],
            };
            self.poison(len)?;
            self.copy(&ops, policy)?;
            self.verify(&ops, len, &format!("round {round}, {policy:?}"))?;
            checked += ops.len();
        }
        println!("checked byte by byte: {checked} pieces of random length and place, 60 rounds\n");
        Ok(())
    }

    /// Pieces one after the other at the destination, from a source that was not read lately.
    fn pieces(&mut self, count: u64, len: u64) -> Vec<CopyOp> {
        // Apart by 512 bytes, as in an arena.
        let step = len.next_multiple_of(512);
        let whole = count * step;
        assert!(whole <= BYTES);
        let places = (BYTES / whole).max(1);
        let base = self.turn % places * whole;
        self.turn += 1;
        let op = |i| CopyOp {
            // Other order at the source, so that pieces are no neighbours.
            src: self.from.offset(base + (i * 7919 % count) * step),
            dst: self.to.offset(i * step),
            len,
        };
        (0..count).map(op).collect()
    }

    /// Median of checked runs.
    fn time(
        &mut self,
        count: u64,
        len: u64,
        mut copy: impl FnMut(&mut Self, &[CopyOp]) -> Result<Duration>,
    ) -> Result<Duration> {
        let whole = count * len.next_multiple_of(512);
        for _ in 0..3 {
            let ops = self.pieces(count, len);
            copy(self, &ops)?;
        }
        let mut times = Vec::new();
        for run in 0..RUNS {
            let ops = self.pieces(count, len);
            let is_checked = run + 1 == RUNS;
            if is_checked {
                self.poison(whole)?;
            }
            times.push(copy(self, &ops)?);
            if is_checked {
                self.verify(&ops, whole, &format!("{count} x {len}"))?;
            }
        }
        times.sort();
        Ok(times[times.len() / 2])
    }

    fn driver_loop(&mut self, ops: &[CopyOp]) -> Result<Duration> {
        let _bound = self.device.bind()?;
        let stream = self.lane.copy_stream();
        let started = Instant::now();
        for op in ops {
            // SAFETY: as in `copy`.
            unsafe { stream.copy(op.dst, op.src, op.len) }?;
        }
        stream.synchronize()?;
        Ok(started.elapsed())
    }

    fn driver_batch(&mut self, ops: &[CopyOp]) -> Result<Duration> {
        let stream = self.lane.copy_stream();
        let started = Instant::now();
        // SAFETY: as in `copy`.
        unsafe { stream.copy_batch(ops) }?;
        stream.synchronize()?;
        Ok(started.elapsed())
    }

    fn targets(&mut self) -> Result<()> {
        println!("default policy: {:?}", CopyPolicy::default());
        println!("| pieces | lane | driver, one copy each | driver, batch | lane / driver |");
        println!("|---|---|---|---|---|");
        for (count, len) in [
            (1, 4 * KIB),
            (1, MIB),
            (4096, 10 * KIB),
            (2048, 64 * KIB),
            (512, 256 * KIB),
            (64, 8 * MIB),
            (1, 79 * MIB),
            (24, 79 * MIB),
            (32, 79 * MIB),
        ] {
            let lane = self.time(count, len, |bed, ops| bed.copy(ops, CopyPolicy::default()))?;
            let looped = self.time(count, len, Self::driver_loop)?;
            let has_batch = self.device.api().driver().has(Optional::BatchCopy);
            let batch = match has_batch {
                true => match self.time(count, len, Self::driver_batch) {
                    Ok(time) => show(count * len, time),
                    Err(why) => format!("failed: {why}"),
                },
                false => "-".to_owned(),
            };
            println!(
                "| {count} x {} KiB | {} | {} | {batch} | {:.3} |",
                len / KIB,
                show(count * len, lane),
                show(count * len, looped),
                lane.as_secs_f64() / looped.as_secs_f64(),
            );
        }
        println!();
        Ok(())
    }

    fn sweep(&mut self, name: &str, count: u64, len: u64) -> Result<()> {
        let mut found = Vec::new();
        for (upload_above, list_in_host_memory, how) in [
            (usize::MAX, false, "with the launch"),
            (0, false, "uploaded"),
            (0, true, "in host memory"),
        ] {
            if upload_above > 0 && count > 1360 {
                continue; // there is no such way
            }
            for wait in [Wait::Signal, Wait::Ask, Wait::Driver] {
                for blocks_each in [1, 2, 4] {
                    for rounds in [1, 2, 4, 16] {
                        if count == 1 && (blocks_each, rounds) != (2, 2) {
                            continue; // makes no difference
                        }
                        let copy_from = u64::MAX;
                        let policy = CopyPolicy {
                            copy_from,
                            copy_from_afar: copy_from,
                            ahead: false,
                            upload_above,
                            list_in_host_memory,
                            blocks_each,
                            rounds,
                            wait,
                        };
                        let time = self.time(count, len, |bed, ops| bed.copy(ops, policy))?;
                        let how =
                            format!("list {how}, {wait:?}, {blocks_each} blocks, {rounds} rounds");
                        found.push((time, how));
                    }
                }
            }
        }
        found.sort();
        println!("{name}, kernel only, best and worst first:");
        for (time, how) in found.iter().take(12).chain(found.iter().rev().take(3).rev()) {
            println!("  {}: {how}", show(count * len, *time));
        }
        for how in ["with the launch", "uploaded,", "in host"] {
            for wait in ["Signal", "Ask", "Driver"] {
                let best = found.iter().find(|(_, h)| h.contains(how) && h.contains(wait));
                if let Some((time, how)) = best {
                    println!("  best of its kind {}: {how}", show(count * len, *time));
                }
            }
        }
        println!();
        Ok(())
    }

    /// From which length on the copy engine is better.
    fn crossing(&mut self) -> Result<()> {
        println!("| pieces | kernel | copy engine | kernel / copy engine |");
        println!("|---|---|---|---|");
        for count in [1_u64, 2, 4, 16, 64] {
            for shift in 12..28 {
                let len = 1_u64 << shift;
                if count * len > BYTES / 2 {
                    continue;
                }
                let with = |copy_from| CopyPolicy { copy_from, ..CopyPolicy::default() };
                let kernel = self.time(count, len, |bed, ops| bed.copy(ops, with(u64::MAX)))?;
                let engine = self.time(count, len, |bed, ops| bed.copy(ops, with(0)))?;
                println!(
                    "| {count} x {} KiB | {} | {} | {:.3} |",
                    len / KIB,
                    show(count * len, kernel),
                    show(count * len, engine),
                    kernel.as_secs_f64() / engine.as_secs_f64(),
                );
            }
        }
        println!();
        Ok(())
    }

    /// What other places within 16 bytes cost.
    fn misaligned(&mut self) -> Result<()> {
        let policy = CopyPolicy { copy_from: u64::MAX, ..CopyPolicy::default() };
        for shift in [0, 16, 8, 4, 1] {
            let mut times = Vec::new();
            for run in 0..RUNS {
                let mut ops = self.pieces(512, 256 * KIB);
                for op in &mut ops {
                    (op.src, op.len) = (op.src.offset(shift), op.len - 16);
                }
                let whole = 512 * 256 * KIB;
                if run + 1 == RUNS {
                    self.poison(whole)?;
                }
                times.push(self.copy(&ops, policy)?);
                if run + 1 == RUNS {
                    self.verify(&ops, whole, &format!("shifted by {shift}"))?;
                }
            }
            times.sort();
            let shown = show(512 * (256 * KIB - 16), times[RUNS / 2]);
            println!("512 x 256 KiB, source {shift} bytes further on: {shown}");
        }
        println!();
        Ok(())
    }

    /// Whether one large piece is copied faster in two parts on two streams.
    fn split(&mut self) -> Result<()> {
        let other = self.device.stream()?;
        let len = 79 * MIB;
        let mut rows = Vec::new();
        for parts in [1_u64, 2] {
            let time = self.time(1, len, |bed, ops| {
                let _bound = bed.device.bind()?;
                let (op, half) = (ops[0], len / 2);
                let started = Instant::now();
                let first = if parts == 2 { half } else { len };
                // SAFETY: as in `copy`.
                unsafe { bed.lane.copy_stream().copy(op.dst, op.src, first) }?;
                if parts == 2 {
                    // SAFETY: as in `copy`.
                    unsafe { other.copy(op.dst.offset(half), op.src.offset(half), len - half) }?;
                    other.synchronize()?;
                }
                bed.lane.copy_stream().synchronize()?;
                Ok(started.elapsed())
            })?;
            rows.push(format!("{parts} streams {}", show(len, time)));
        }
        println!("1 x 79 MiB by the driver: {}", rows.join(", "));
        Ok(())
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if let Ok(_bound) = self.device.bind() {
            for at in [self.from, self.to] {
                // SAFETY: allocated by `new`; every copy has been waited for.
                let _ = unsafe { self.device.api().free(at) };
            }
        }
    }
}

fn show(bytes: u64, time: Duration) -> String {
    let rate = bytes as f64 / time.as_secs_f64() / 1e9;
    format!("{:.1} us, {rate:.0} GB/s", time.as_secs_f64() * 1e6)
}

/// What the source holds: word number `word`.
fn source(word: u64) -> u64 {
    let mut x = word.wrapping_add(0x9E37_79B9_7F4A_7C15).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^= x >> 29;
    x.wrapping_mul(0x94D0_49BB_1331_11EB)
}

fn equals_source(bytes: &[u8], from: u64) -> bool {
    let head = (8 - from as usize % 8) % 8;
    let (head, rest) = bytes.split_at(head.min(bytes.len()));
    let byte = |at: u64| source(at / 8).to_le_bytes()[at as usize % 8];
    let start = from + head.len() as u64;
    let mut words = rest.chunks_exact(8);
    head.iter().enumerate().all(|(i, &b)| b == byte(from + i as u64))
        && words.by_ref().enumerate().all(|(i, w)| w == source(start / 8 + i as u64).to_le_bytes())
        && {
            let tail = words.remainder();
            let at = start + (rest.len() - tail.len()) as u64;
            tail.iter().enumerate().all(|(i, &b)| b == byte(at + i as u64))
        }
}

/// Numbers at random, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        let x = source(self.0) ^ (source(self.0) >> 31);
        if end == 0 { 0 } else { x % end }
    }
}
