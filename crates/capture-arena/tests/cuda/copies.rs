//! The copier: order, exactness, and what becomes of memory when something goes wrong.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{
    Backing, RegionPool,
    cuda::{
        ArenaPeers, Copier, CopyPiece, CudaError, Device, DeviceArenaConfig, DevicePtr, Stream,
        scripted::{Machine, ScriptedCuda},
    },
};
use transport_core::{ErrorKind, RegionMut, RegionSlice, Result};

use crate::machine;

const MIB: u64 = 1 << 20;

struct Bench {
    cuda: Arc<ScriptedCuda>,
    device: Device,
    pool: RegionPool,
    copier: Copier,
}

fn bench() -> Bench {
    let (cuda, device) = machine(Machine::default());
    let pool = pool(&device);
    let copier = Copier::new(&device).unwrap();
    Bench { cuda, device, pool, copier }
}

fn pool(device: &Device) -> RegionPool {
    let config = DeviceArenaConfig::new(16 * MIB, ArenaPeers::Nobody);
    RegionPool::new(Backing::device(device, &config).unwrap()).unwrap()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

impl Bench {
    fn source(&self, byte: u8, len: usize) -> RegionSlice {
        let region = self.pool.take(len).unwrap();
        self.cuda.poke(DevicePtr(region.address() as u64), &vec![byte; len]);
        region.freeze()
    }

    fn bytes(&self, region: &RegionMut) -> Vec<u8> {
        self.cuda.peek(DevicePtr(region.address() as u64), region.len() as u64)
    }

    fn copy(&self, pieces: Vec<CopyPiece>) -> Result<Vec<RegionMut>> {
        Ok(self.copier.copy(pieces, &[], true, soon())?.regions)
    }

    fn piece(&self, src: RegionSlice) -> CopyPiece {
        CopyPiece { dst: self.pool.take(src.len()).unwrap(), src }
    }

    fn ends_clean(self) {
        let Self { cuda, device, pool, copier } = self;
        drop((device, pool, copier));
        assert_eq!(cuda.leaks(), Vec::<String>::new());
    }
}

#[test]
fn device_and_host_sources_arrive_whole_and_are_counted_apart() {
    let bench = bench();
    let ids: Vec<u8> = (0..1000).map(|i| i as u8).collect();
    let pieces = vec![
        bench.piece(bench.source(1, 3 * MIB as usize)),
        bench.piece(bench.source(2, 100)),
        bench.piece(RegionSlice::copy_of(&ids)),
        bench.piece(RegionSlice::copy_of(&[9; 64])),
        bench.piece(RegionSlice::copy_of(&[])),
    ];
    let copied = bench.copier.copy(pieces, &[], true, soon()).unwrap();
    assert_eq!((copied.host_bytes, copied.device_bytes), (1064, 3 * MIB + 100));
    let found: Vec<_> = copied.regions[..4].iter().map(|region| bench.bytes(region)).collect();
    assert_eq!(found[0], vec![1; 3 * MIB as usize]);
    assert_eq!(found[1], [2; 100]);
    assert_eq!(found[2], ids);
    assert_eq!(found[3], [9; 64]);
    assert!(copied.regions[4].is_empty());
    // Ids and mask lie side by side and went as one copy; the large and the small one apart.
    assert_eq!(bench.cuda.calls("cuMemcpyAsync"), 3 + bench_probe_copies(&bench));
    drop(copied);
    bench.ends_clean();
}

/// Copies that making the pool took.
fn bench_probe_copies(_bench: &Bench) -> u64 {
    let other = self::bench();
    other.cuda.calls("cuMemcpyAsync")
}

#[test]
fn copies_come_after_their_events_and_are_done_on_return() {
    for after in [true, false] {
        let bench = bench();
        let src = bench.source(0, 4096);
        let producer: Stream = bench.device.stream().unwrap();
        // SAFETY: the test's own region; that it is frozen already is what the event is for.
        unsafe { producer.fill(DevicePtr(src.address() as u64), 5, 4096) }.unwrap();
        let ready = producer.record_new().unwrap();
        let events = if after { vec![&ready] } else { Vec::new() };
        let copied = bench.copier.copy(vec![bench.piece(src)], &events, true, soon()).unwrap();
        assert_eq!(bench.bytes(&copied.regions[0])[..], [if after { 5 } else { 0 }; 4096]);
    }
}

#[test]
fn events_of_other_devices_order_too() {
    let cuda = ScriptedCuda::new(Machine { devices: 2, ..Machine::default() });
    let device = Device::open(cuda.clone(), 0).unwrap();
    let other = Device::open(cuda.clone(), 1).unwrap();
    let bench = Bench {
        pool: pool(&device),
        copier: Copier::new(&device).unwrap(),
        device,
        cuda: cuda.clone(),
    };
    let far = pool(&other).take(8).unwrap();
    let src = bench.source(0, 8);
    let producer = other.stream().unwrap();
    // SAFETY: as above.
    unsafe { producer.fill(DevicePtr(src.address() as u64), 6, 8) }.unwrap();
    let ready = producer.record_new().unwrap();
    let copied = bench.copier.copy(vec![bench.piece(src)], &[&ready], true, soon()).unwrap();
    assert_eq!(bench.bytes(&copied.regions[0]), [6; 8]);
    // A source on the other device is none of ours.
    let pieces = vec![bench.piece(RegionSlice::copy_of(&[1])), bench.piece(far.freeze())];
    let refused = bench.copy(pieces).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidInput);
    assert_eq!((refused.context("piece"), refused.context("found")), (Some("1"), Some("1")));
}

#[test]
fn views_of_one_storage_are_looked_up_once() {
    let bench = bench();
    let storage = bench.source(3, 1 << 20);
    let views = (0..64).map(|i| storage.slice(i * 100..i * 100 + 700).unwrap());
    let pieces: Vec<_> = views.map(|view| bench.piece(view)).collect();
    let before = bench.cuda.calls("cuMemGetAddressRange");
    let regions = bench.copy(pieces).unwrap();
    assert_eq!(bench.cuda.calls("cuMemGetAddressRange"), before + 1);
    assert!(regions.iter().all(|region| bench.bytes(region) == [3; 700]));
}

#[test]
fn neighbours_are_copied_as_one() {
    let bench = bench();
    let storage = bench.source(3, 512 * 64);
    let pieces: Vec<_> =
        (0..64).map(|i| bench.piece(storage.slice(i * 512..(i + 1) * 512).unwrap())).collect();
    let before = bench.cuda.calls("cuMemcpyAsync");
    bench.copy(pieces).unwrap();
    assert_eq!(bench.cuda.calls("cuMemcpyAsync"), before + 1);
}

#[test]
fn padding_that_is_not_ours_is_left_alone() {
    for ours in [true, false] {
        let bench = bench();
        let region = bench.pool.take(1024).unwrap();
        let at = DevicePtr(region.address() as u64);
        bench.cuda.poke(at, &[0xEE; 1024]);
        let (head, tail) = region.split_at(512).unwrap();
        let (head, _padding) = head.split_at(100).unwrap();
        let pieces = [(head, 1), (tail, 2)].map(|(dst, byte)| CopyPiece {
            src: RegionSlice::copy_of(&vec![byte; dst.len()]),
            dst,
        });
        let before = bench.cuda.calls("cuMemcpyAsync");
        bench.copier.copy(pieces.into(), &[], ours, soon()).unwrap();
        assert_eq!(bench.cuda.calls("cuMemcpyAsync"), before + if ours { 1 } else { 2 });
        let found = bench.cuda.peek(at, 1024);
        assert_eq!(found[..100], [1; 100]);
        assert_eq!(found[100..512], if ours { [0; 412] } else { [0xEE; 412] });
        assert_eq!(found[512..], [2; 512]);
    }
}

#[test]
fn what_cannot_be_copied_is_refused_before_anything_is_queued() {
    let bench = bench();
    let before = bench.cuda.calls("cuMemcpyAsync");
    let short = CopyPiece { src: bench.source(1, 8), dst: bench.pool.take(9).unwrap() };
    let error = bench.copy(vec![short]).unwrap_err();
    assert_eq!(error.context("destination_bytes"), Some("9"));

    let to_host = CopyPiece { src: bench.source(1, 8), dst: RegionMut::zeroed(8).unwrap() };
    assert_eq!(bench.copy(vec![to_host]).unwrap_err().kind(), ErrorKind::InvalidInput);

    // A view that says it is longer than its storage is.
    let block = bench.pool.backing().device_block().unwrap();
    let start = block.address().offset(block.len() - 8).0 as *mut u8;
    let (start, kind) = (std::ptr::NonNull::new(start).unwrap(), bench.device.region_kind());
    // SAFETY: no byte of it is touched, which the test shows.
    let beyond = unsafe { RegionSlice::from_foreign(start, 16, kind, Arc::new(())) };
    let error = bench.copy(vec![bench.piece(beyond)]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("leaves its device memory"), "{error}");
    assert_eq!(bench.cuda.calls("cuMemcpyAsync"), before);
    assert_eq!(bench.copier.quarantined_bytes(), 0);
}

#[test]
fn memory_that_a_late_copy_may_write_is_kept_until_it_is_over() {
    let bench = bench();
    let src = bench.source(7, 1000);
    let piece = bench.piece(src);
    let place = piece.dst.address() as u64;
    let taken = bench.pool.stats().live_regions;
    let late = bench.copier.copy(vec![piece], &[], true, Instant::now());
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(bench.pool.stats().live_regions, taken, "source and destination");
    // Every look lets simulated time pass; then the copy is over and the memory goes back.
    let mut looks = 0;
    while bench.copier.quarantined_bytes() > 0 {
        looks += 1;
        assert!(looks < 100);
    }
    assert_eq!(bench.pool.stats().live_regions, 0);
    assert_eq!(bench.cuda.peek(DevicePtr(place), 1000), [7; 1000], "it went where it was to");
    bench.ends_clean();
}

#[test]
fn a_copier_is_dropped_with_copies_under_way() {
    let bench = bench();
    let pieces = vec![bench.piece(bench.source(7, 1000))];
    assert!(bench.copier.copy(pieces, &[], true, Instant::now()).is_err());
    bench.ends_clean();
}

#[test]
fn every_call_may_fail() {
    let calls = [
        "cuMemGetAddressRange",
        "cuMemHostAlloc",
        "cuStreamWaitEvent",
        "cuMemcpyAsync",
        "cuEventRecord",
        "cuEventQuery",
        "work",
    ];
    for call in calls {
        for code in [CudaError::OUT_OF_MEMORY, CudaError::ILLEGAL_ADDRESS] {
            let bench = bench();
            let pieces = vec![
                bench.piece(bench.source(7, MIB as usize)),
                bench.piece(RegionSlice::copy_of(&[1; 100])),
            ];
            bench.cuda.fail(call, 0, 1, code);
            let failed = bench.copy(pieces).unwrap_err();
            let name = format!("({code})");
            let text = format!("{failed:?}");
            assert!(text.contains(&name), "{call}: {text}");
            let mut looks = 0;
            while bench.copier.quarantined_bytes() > 0 {
                looks += 1;
                assert!(looks < 100, "{call}");
            }
            assert_eq!(bench.pool.stats().live_regions, 0, "{call}");
            if call != "work" {
                let pieces = vec![bench.piece(bench.source(8, 10))];
                let regions = bench.copy(pieces).expect("the copier works on");
                assert_eq!(bench.bytes(&regions[0]), [8; 10], "{call}");
                drop(regions);
                bench.ends_clean();
            }
        }
    }
}

#[test]
fn threads_share_a_copier() {
    let bench = bench();
    std::thread::scope(|scope| {
        for thread in 0..8_u8 {
            let bench = &bench;
            scope.spawn(move || {
                for round in 0..20_u8 {
                    let byte = thread * 20 + round;
                    let pieces = vec![
                        bench.piece(bench.source(byte, 300_000)),
                        bench.piece(RegionSlice::copy_of(&[byte; 777])),
                    ];
                    let regions = bench.copy(pieces).unwrap();
                    assert_eq!(bench.bytes(&regions[0]), vec![byte; 300_000]);
                    assert_eq!(bench.bytes(&regions[1]), [byte; 777]);
                }
            });
        }
    });
    bench.ends_clean();
}
