//! Batches of copies on a simulated device.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::cuda::{
    CopyOp, CudaApi, Device, DevicePtr,
    scripted::{Machine, ScriptedCuda},
};
use transport_core::ErrorKind;

use super::{simulated::simulate_kernels, *};

struct Bed {
    cuda: Arc<ScriptedCuda>,
    device: Device,
    kernel: GatherKernel,
    from: DevicePtr,
    to: DevicePtr,
}

const BYTES: u64 = 8 << 20;

impl Bed {
    fn new() -> Self {
        let cuda = ScriptedCuda::new(Machine::default());
        simulate_kernels(&cuda);
        let device = Device::open(cuda.clone(), 0).unwrap();
        let kernel = GatherKernel::load(&device).unwrap();
        let _bound = device.bind().unwrap();
        let (from, to) = (cuda.alloc(BYTES).unwrap(), cuda.alloc(BYTES).unwrap());
        drop(_bound);
        let bytes: Vec<u8> =
            (0..BYTES as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        cuda.poke(from, &bytes);
        cuda.poke(to, &vec![0xEE; BYTES as usize]);
        Self { cuda, device, kernel, from, to }
    }

    /// Pieces of those lengths, a byte apart at both ends, in reverse order at the destination.
    fn pieces(&self, lens: &[u64]) -> Vec<CopyOp> {
        let mut end: u64 = lens.iter().map(|len| len + 1).sum();
        let mut start = 0;
        assert!(end <= BYTES);
        let op = |&len: &u64| {
            end -= len + 1;
            let op = CopyOp { src: self.from.offset(start), dst: self.to.offset(end), len };
            start += len + 1;
            op
        };
        lens.iter().map(op).collect()
    }

    fn check(&self, ops: &[CopyOp]) {
        let mut expected = vec![0xEE; BYTES as usize];
        for op in ops {
            let at = (op.dst.0 - self.to.0) as usize;
            expected[at..at + op.len as usize].copy_from_slice(&self.cuda.peek(op.src, op.len));
        }
        assert!(self.cuda.peek(self.to, BYTES) == expected);
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _bound = self.device.bind().unwrap();
        for at in [self.from, self.to] {
            // SAFETY: allocated by `new`; no lane is left.
            let _ = unsafe { self.cuda.free(at) };
        }
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

fn copy(lane: &mut CopyLane, ops: &[CopyOp]) -> transport_core::Result<()> {
    // SAFETY: ranges of the bed's memory that nothing else uses, apart from each other.
    unsafe { lane.run(ops, soon()) }
}

#[test]
fn every_way_of_telling_and_waiting_copies_the_same_bytes() {
    let waits = [Wait::Signal, Wait::Ask, Wait::Driver];
    let lens: Vec<u64> = (0..1750).map(|i| [0, 1, 511, 512, 513, 4096, 9999][i % 7]).collect();
    for wait in waits {
        for (upload_above, list_in_host_memory, copy_from, ahead) in [
            (usize::MAX, false, u64::MAX, false),
            (usize::MAX, false, 4096, false),
            (0, false, u64::MAX, false),
            (0, true, 9999, false),
            (0, false, 1, false),
            (0, false, u64::MAX, true),
            (168, false, 9999, true),
            (168, true, u64::MAX, true),
        ] {
            for n in [0, 1, 2, 9, 169, 336, 900, 1360, 1361, 1750] {
                let bed = Bed::new();
                let policy = CopyPolicy {
                    copy_from,
                    upload_above,
                    ahead,
                    list_in_host_memory,
                    wait,
                    ..CopyPolicy::default()
                };
                let mut lane = CopyLane::new(&bed.kernel, policy).unwrap();
                let ops = bed.pieces(&lens[..n]);
                copy(&mut lane, &ops).unwrap();
                bed.check(&ops);
                assert!(lane.is_idle());
                copy(&mut lane, &ops).unwrap(); // the counters and lists serve again
            }
        }
    }
}

#[test]
fn more_pieces_than_a_list_has_take_several() {
    // Also with nothing left for the last one, and with a part launched ahead.
    for (count, ahead) in [(40_000, false), (2 * (16 << 10), false), (40_000, true)] {
        let bed = Bed::new();
        let policy = CopyPolicy { upload_above: 0, ahead, ..CopyPolicy::default() };
        let mut lane = CopyLane::new(&bed.kernel, policy).unwrap();
        let ops = bed.pieces(&vec![3; count]);
        copy(&mut lane, &ops).unwrap();
        bed.check(&ops);
    }
}

#[test]
fn large_pieces_take_the_copy_engine_and_small_ones_one_launch() {
    let bed = Bed::new();
    let mut lane =
        CopyLane::new(&bed.kernel, CopyPolicy { copy_from: 1 << 20, ..CopyPolicy::default() })
            .unwrap();
    let before = bed.cuda.calls("cuMemcpyAsync");
    let ops = bed.pieces(&[1 << 20, 10, 2 << 20, 20, 30]);
    copy(&mut lane, &ops).unwrap();
    bed.check(&ops);
    assert_eq!(bed.cuda.calls("cuMemcpyAsync") - before, 2);
    assert_eq!(bed.cuda.calls("cuLaunchKernel"), 1);
}

#[test]
fn a_failed_launch_is_an_error_and_the_lane_waits_for_what_runs() {
    let bed = Bed::new();
    let mut lane =
        CopyLane::new(&bed.kernel, CopyPolicy { copy_from: 1 << 20, ..CopyPolicy::default() })
            .unwrap();
    bed.cuda.fail("cuLaunchKernel", 0, 1, 719);
    let ops = bed.pieces(&[1 << 20, 10]);
    // SAFETY: as in `copy`.
    let error = unsafe { lane.start(&ops, soon()) }.unwrap_err();
    assert!(error.to_string().contains("cuLaunchKernel"), "{error}");
    assert!(!lane.is_idle());
    // SAFETY: as in `copy`.
    let busy = unsafe { lane.start(&ops, soon()) }.unwrap_err();
    assert_eq!(busy.kind(), ErrorKind::Busy);
    lane.finish(soon()).unwrap();
    copy(&mut lane, &ops).unwrap();
    bed.check(&ops);
}

#[test]
fn what_was_launched_ahead_is_waited_for_when_the_rest_fails() {
    for count in [500, 1500] {
        let bed = Bed::new();
        let mut lane = CopyLane::new(&bed.kernel, CopyPolicy::default()).unwrap();
        bed.cuda.fail("cuLaunchKernel", 1, 1, 719);
        let ops = bed.pieces(&vec![64; count]);
        // SAFETY: as in `copy`.
        let error = unsafe { lane.start(&ops, soon()) }.unwrap_err();
        assert!(error.to_string().contains("cuLaunchKernel"), "{error}");
        assert!(!lane.is_idle());
        lane.finish(soon()).unwrap();
        copy(&mut lane, &ops).unwrap();
        bed.check(&ops);
        assert_eq!(bed.cuda.calls("cuLaunchKernel"), 4, "two for each batch");
    }
}

#[test]
fn a_fault_of_the_device_ends_the_wait() {
    let bed = Bed::new();
    let mut lane = CopyLane::new(&bed.kernel, CopyPolicy::default()).unwrap();
    bed.cuda.fail("work", 0, u64::MAX, 700);
    let ops = bed.pieces(&[10, 20]);
    let error = copy(&mut lane, &ops).unwrap_err();
    assert!(error.to_string().contains("ILLEGAL_ADDRESS"), "{error}");
    assert!(lane.is_idle());
}

#[test]
fn an_old_driver_is_refused_by_name() {
    let cuda = ScriptedCuda::new(Machine { version: (12, 2), ..Machine::default() });
    let device = Device::open(cuda, 0).unwrap();
    let error = GatherKernel::load(&device).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("CUDA 12.3"), "{error}");
}

#[test]
fn the_device_code_is_made_from_the_source_beside_it() {
    for (name, source, made) in [
        ("gather", include_str!("gather.cu"), include_str!("gather.ptx")),
        ("tensors", include_str!("tensors.cu"), include_str!("tensors.ptx")),
    ] {
        let hash = source.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let first = made.lines().next().unwrap();
        let expected = format!("{name}.cu {hash:016x}");
        assert!(first.ends_with(&expected), "{name}.ptx is old: run what kernel.rs names");
    }
}

#[test]
fn nothing_is_left_behind() {
    let calls = [
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuStreamCreate",
        "cuMemAlloc",
        "cuMemsetD8Async",
        "cuStreamSynchronize",
        "cuMemHostAlloc",
    ];
    for call in calls {
        for skip in 0..4 {
            let cuda = ScriptedCuda::new(Machine::default());
            simulate_kernels(&cuda);
            let device = Device::open(cuda.clone(), 0).unwrap();
            cuda.fail(call, skip, 1, 2);
            let made = GatherKernel::load(&device)
                .and_then(|kernel| CopyLane::new(&kernel, CopyPolicy::default()));
            assert!(made.is_err() || skip > 0, "{call} was not called");
            drop(made);
            cuda.heal();
            drop(device);
            assert_eq!(cuda.leaks(), Vec::<String>::new(), "after {call}, skipping {skip}");
        }
    }
}
