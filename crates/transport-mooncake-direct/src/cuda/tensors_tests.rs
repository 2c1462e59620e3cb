//! Tensors on a simulated device.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{
    Backing, RegionPool,
    cuda::{
        ArenaPeers, CudaError, Device, DeviceArenaConfig, DevicePtr,
        scripted::{Machine, ScriptedCuda},
    },
};
use control_proto::capture::Mixsum;
use transport_core::{ErrorKind, RegionMut};

use super::{Content, DeviceTensors, simulated::simulate_kernels};

struct Bed {
    cuda: Arc<ScriptedCuda>,
    device: Device,
    pool: RegionPool,
}

impl Bed {
    fn new() -> Self {
        let cuda = ScriptedCuda::new(Machine { devices: 2, ..Machine::default() });
        simulate_kernels(&cuda);
        let device = Device::open(cuda.clone(), 0).unwrap();
        let config = DeviceArenaConfig::new(64 << 20, ArenaPeers::Nobody);
        let pool = RegionPool::new(Backing::device(&device, &config).unwrap()).unwrap();
        Self { cuda, device, pool }
    }

    fn take(&self, len: usize) -> RegionMut {
        let region = self.pool.take(len).unwrap();
        if len > 0 {
            self.cuda.poke(DevicePtr(region.address() as u64), &vec![0xEE; len]);
        }
        region
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

#[test]
fn what_was_written_is_there_and_summed_up() {
    let bed = Bed::new();
    let tensors = DeviceTensors::load(&bed.device).unwrap();
    // More than the staging memory holds, odd lengths, and none at all.
    let lens = [20 << 20, 7, 0, 4099];
    let contents: Vec<_> = lens.iter().map(|&len| (bed.take(len), bytes(len))).collect();
    let host: usize = lens.iter().sum();
    let mut wanted: Vec<_> =
        contents.into_iter().map(|(region, bytes)| (region, Content::Host(bytes))).collect();
    wanted.push((bed.take(1001), Content::Synthetic { counter: 7 }));
    let written = tensors.write(wanted, true, soon()).unwrap();
    assert_eq!(written.host_bytes, host as u64);
    assert_eq!(written.regions.len(), 5);
    for ((region, &len), sum) in written.regions.iter().zip(&lens).zip(&written.sums) {
        assert_eq!(*sum, Mixsum::of(&bytes(len)), "{len}");
        if len > 0 {
            assert!(bed.cuda.peek(DevicePtr(region.address() as u64), len as u64) == bytes(len));
        }
    }
    let made = bed.cuda.peek(DevicePtr(written.regions[4].address() as u64), 1001);
    assert_eq!(written.sums[4], Mixsum::of(&made));
    assert!(made.chunks_exact(2).all(|number| number[1] & 0x7f == 0x3e));

    let frozen: Vec<_> = written.regions.into_iter().map(RegionMut::freeze).collect();
    assert_eq!(tensors.sums(&frozen, soon()).unwrap(), written.sums);
    // More than one launch takes.
    let many: Vec<_> = (0..200).map(|i| frozen[3].slice(i * 16..i * 16 + 100).unwrap()).collect();
    for (i, sum) in tensors.sums(&many, soon()).unwrap().into_iter().enumerate() {
        assert_eq!(sum, Mixsum::of(&bytes(4099)[i * 16..][..100]), "{i}");
    }
    drop((frozen, many, tensors));
    assert_eq!(bed.pool.stats().free, bed.pool.stats().capacity);
}

#[test]
fn what_cannot_be_written_is_refused_before_anything_is() {
    let bed = Bed::new();
    let tensors = DeviceTensors::load(&bed.device).unwrap();
    let host = || RegionMut::zeroed(16).unwrap();
    let odd = bed.take(64).split_at(8).unwrap().1;
    let untouched = bed.take(64);
    let at = DevicePtr(untouched.address() as u64);
    for (bad, content, part) in [
        (host(), Content::Host(bytes(16)), "not memory of this device"),
        (odd, Content::Synthetic { counter: 1 }, "multiple of 16"),
        (bed.take(64), Content::Host(bytes(63)), "not as many"),
    ] {
        let fine = (bed.take(64), Content::Synthetic { counter: 1 });
        let error = tensors.write(vec![fine, (bad, content)], false, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains(part), "{error}");
    }
    assert_eq!(bed.cuda.peek(at, 64), [0xEE; 64]);
    let error = tensors.sums(&[host().freeze()], soon()).unwrap_err();
    assert!(error.to_string().contains("Host"), "{error}");
    let other = Device::open(bed.cuda.clone(), 1).unwrap();
    let error = DeviceTensors::load(&other).unwrap().sums(&[untouched.freeze()], soon());
    assert!(error.unwrap_err().to_string().contains("device: 1"));
}

#[test]
fn a_failure_at_any_step_leaves_nothing_behind() {
    for call in [
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuStreamCreate",
        "cuMemAlloc",
        "cuMemHostAlloc",
        "cuLaunchKernel",
        "cuMemcpyAsync",
        "cuMemsetD8Async",
        "work",
    ] {
        for skip in 0..3 {
            let bed = Bed::new();
            bed.cuda.fail(call, skip, 1, CudaError::OUT_OF_MEMORY);
            let outcome = DeviceTensors::load(&bed.device).and_then(|tensors| {
                let wanted = vec![
                    (bed.take(4096), Content::Host(bytes(4096))),
                    (bed.take(512), Content::Synthetic { counter: 3 }),
                ];
                tensors.write(wanted, true, soon()).map(drop)
            });
            assert!(outcome.is_err() || skip > 0, "{call} was not called");
            assert_eq!(bed.pool.stats().free, bed.pool.stats().capacity, "{call}, {skip}");
            bed.cuda.heal();
            let Bed { cuda, device, pool } = bed;
            drop((pool, device));
            if call != "work" {
                assert_eq!(cuda.leaks(), Vec::<String>::new(), "after {call}, skipping {skip}");
            }
        }
    }
}

#[test]
fn memory_that_the_device_may_still_use_stays_out_of_use() {
    let bed = Bed::new();
    let tensors = DeviceTensors::load(&bed.device).unwrap();
    // One kernel a tensor; a simulated device does one at each look.
    let wanted = (0..100).map(|i| (bed.take(64), Content::Synthetic { counter: i }));
    let error = tensors.write(wanted.collect(), true, Instant::now()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let free = || bed.pool.stats().free;
    assert!(free() < bed.pool.stats().capacity, "the device may still write it");
    let mut rounds = 0;
    while free() < bed.pool.stats().capacity {
        let again = vec![(bed.take(16), Content::Synthetic { counter: 4 })];
        drop(tensors.write(again, true, soon()).unwrap());
        rounds += 1;
        assert!(rounds < 200, "it never comes back");
    }
    assert!(rounds > 50, "not before the device was done: {rounds}");
}
