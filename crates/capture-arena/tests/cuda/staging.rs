//! Page-locked buffers, and copies that run behind their caller's back.

use std::time::{Duration, Instant};

use capture_arena::{
    Backing, RegionPool,
    cuda::{
        ArenaPeers, CudaError, Device, DeviceArenaConfig, DevicePtr, PageLock, Part, Staging,
        StagingConfig, scripted::Machine,
    },
};
use transport_core::{ErrorKind, RegionMut, RegionSlice};

use crate::machine;

const MIB: u64 = 1 << 20;

fn pool(device: &Device) -> RegionPool {
    let config = DeviceArenaConfig::new(4 * MIB, ArenaPeers::Nobody);
    RegionPool::new(Backing::device(device, &config).unwrap()).unwrap()
}

fn small() -> StagingConfig {
    let mut config = StagingConfig::default();
    (config.buffer_bytes, config.buffers) = (1000, 3); // 1024 bytes each
    config
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn filled(mut buffer: RegionMut, byte: u8) -> RegionSlice {
    buffer.as_mut_bytes().unwrap().fill(byte);
    buffer.freeze()
}

#[test]
fn more_bytes_than_all_buffers_have_pass_through_them() {
    let (cuda, device) = machine(Machine::default());
    let pool = pool(&device);
    let staging = Staging::new(&device, small()).unwrap();
    assert_eq!(cuda.calls("cuMemHostRegister"), 1);
    let to = vec![pool.take(10 * 1024).unwrap(), pool.take(700).unwrap()];
    let (at, other) = (to[0].address(), to[1].address());
    let mut crossing = staging.begin(to, true).unwrap();
    for i in 0..10 {
        let src = filled(crossing.buffer(soon()).unwrap(), i + 1);
        assert_eq!(src.len(), 1024);
        crossing.send(vec![Part { src, to: 0, at: u64::from(i) * 1024 }]).unwrap();
    }
    // Up to the padding, and not further.
    let src = filled(crossing.buffer(soon()).unwrap(), 77);
    for (len, at, fits) in [(1024, 0, true), (1024, 1, false), (1, 1024, false)] {
        let part = Part { src: src.slice(0..len).unwrap(), to: 1, at };
        let sent = crossing.send(vec![part]);
        assert_eq!(sent.is_ok(), fits, "{len} at {at}: {sent:?}");
    }
    drop(src);
    let none = Part { src: RegionSlice::copy_of(&[1]), to: 2, at: 0 };
    assert_eq!(crossing.send(vec![none]).unwrap_err().kind(), ErrorKind::InvalidInput);
    let back = crossing.finish(soon()).unwrap();
    assert_eq!((back[0].address(), back[1].address()), (at, other));
    let found = cuda.peek(DevicePtr(at as u64), 10 * 1024);
    let expected: Vec<u8> = (0..10 * 1024).map(|i| (i / 1024) as u8 + 1).collect();
    assert_eq!(found, expected);
    assert_eq!(cuda.peek(DevicePtr(other as u64), 1024), [77; 1024]);
    assert_eq!(cuda.calls("cuMemHostRegister"), 1, "locked once, and never for a call");
    // The other way, with neighbours as one.
    let copies = cuda.calls("cuMemcpyAsync");
    let src = back.into_iter().next().unwrap().freeze();
    let mut crossing = staging.begin(vec![RegionMut::zeroed(2048).unwrap()], false).unwrap();
    let half = |i: usize| Part {
        src: src.slice(i * 1024..(i + 1) * 1024).unwrap(),
        to: 0,
        at: i as u64 * 1024,
    };
    crossing.send(vec![half(0), half(1)]).unwrap();
    let mut back = crossing.finish(soon()).unwrap();
    assert_eq!(back[0].as_mut_bytes().unwrap(), &expected[..2048]);
    assert_eq!(cuda.calls("cuMemcpyAsync"), copies + 1);
    drop((src, staging, pool, device));
    assert_eq!(cuda.leaks(), Vec::<String>::new());
}

#[test]
fn what_is_given_up_stays_until_the_device_is_done() {
    let (cuda, device) = machine(Machine::default());
    let pool = pool(&device);
    let staging = Staging::new(&device, small()).unwrap();
    let mut crossing = staging.begin(vec![pool.take(1024).unwrap()], false).unwrap();
    for byte in [1, 2] {
        let src = filled(crossing.buffer(soon()).unwrap(), byte);
        crossing.send(vec![Part { src, to: 0, at: 0 }]).unwrap();
    }
    let late = crossing.finish(Instant::now()).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Timeout, "{late}");
    assert_eq!(pool.stats().live_regions, 1, "out of everybody's reach");
    let deadline = soon();
    while staging.quarantined_bytes() > 0 {
        assert!(Instant::now() < deadline, "the copies end");
    }
    assert_eq!(pool.stats().live_regions, 0);
    // A buffer that nobody gives back is waited for until the deadline.
    let mut holders: Vec<_> = (0..3).map(|_| staging.begin(Vec::new(), false).unwrap()).collect();
    let taken: Vec<_> = holders.iter_mut().map(|c| c.buffer(soon()).unwrap()).collect();
    let mut waiting = staging.begin(Vec::new(), false).unwrap();
    let none = waiting.buffer(Instant::now() + Duration::from_millis(20)).unwrap_err();
    assert_eq!(none.kind(), ErrorKind::Timeout, "{none}");
    drop(taken);
    waiting.buffer(soon()).unwrap();
    drop((holders, waiting, staging, pool, device));
    assert_eq!(cuda.leaks(), Vec::<String>::new());
}

#[test]
fn failures_are_errors_and_everything_comes_back() {
    for call in ["cuMemHostRegister", "cuStreamCreate", "cuMemcpyAsync", "cuEventRecord", "work"] {
        let (cuda, device) = machine(Machine::default());
        let pool = pool(&device);
        cuda.fail(call, 0, 1, CudaError::OUT_OF_MEMORY);
        let run = || {
            let staging = Staging::new(&device, small())?;
            let mut crossing = staging.begin(vec![pool.take(1024)?], false)?;
            let src = filled(crossing.buffer(soon())?, 1);
            crossing.send(vec![Part { src, to: 0, at: 0 }])?;
            crossing.finish(soon()).map(drop)
        };
        let error = run().unwrap_err();
        assert!(error.to_string().contains("OUT_OF_MEMORY"), "{call}: {error}");
        cuda.heal();
        assert_eq!(pool.stats().live_regions, 0, "{call}");
        if call == "work" {
            continue; // such a fault takes the context with it
        }
        run().unwrap();
        drop((pool, device));
        assert_eq!(cuda.leaks(), Vec::<String>::new(), "{call}");
    }
}

#[test]
fn what_cannot_be_locked_or_reached_is_refused() {
    let (cuda, device) = machine(Machine { devices: 2, ..Machine::default() });
    let other = Device::open(cuda.clone(), 1).unwrap();
    let (own, elsewhere) = (pool(&device), pool(&other));
    let error = PageLock::new(&device, own.backing()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    for (buffer_bytes, buffers) in [(0, 4), (4096, 1)] {
        let mut config = small();
        (config.buffer_bytes, config.buffers) = (buffer_bytes, buffers);
        let error = Staging::new(&device, config).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{error}");
    }
    let staging = Staging::new(&device, small()).unwrap();
    let error = staging.begin(vec![elsewhere.take(1).unwrap()], false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let mut crossing = staging.begin(vec![own.take(512).unwrap()], false).unwrap();
    for src in [elsewhere.take(8).unwrap().freeze(), RegionSlice::unwritten(8)] {
        let error = crossing.send(vec![Part { src, to: 0, at: 0 }]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    }
    drop((crossing, staging, own, elsewhere, other, device));
    assert_eq!(cuda.leaks(), Vec::<String>::new());
}
