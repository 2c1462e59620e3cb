//! Devices, streams and events.

use std::time::Duration;

use capture_arena::cuda::{
    ContextId, CopyOp, CudaApi, CudaError, Device, DevicePtr, Optional,
    scripted::{Machine, ScriptedCuda},
};
use transport_core::{ErrorKind, ReadyEvent};

use crate::machine;

#[test]
fn nothing_has_happened_before_somebody_waits() {
    let (cuda, device) = machine(Machine::default());
    let at = device.bind().map(|_bound| cuda.alloc(4096).unwrap()).unwrap();
    let stream = device.stream().unwrap();
    // SAFETY: our own block, until the end of the test.
    unsafe { stream.fill(at, 7, 4096) }.unwrap();
    let event = stream.record_new().unwrap();
    assert_eq!(cuda.peek(at, 4), [0; 4]);
    assert!(!event.is_done().unwrap(), "the first look lets time pass");
    event.synchronize_within(Duration::from_secs(5)).unwrap();
    assert_eq!(cuda.peek(at, 4096), [7; 4096]);
    assert!(event.is_done().unwrap() && stream.is_done().unwrap());
    drop((event, stream));
    // SAFETY: ours, once.
    unsafe { cuda.free(at) }.unwrap();
    drop(device);
    assert_eq!(cuda.leaks(), Vec::<String>::new());
}

#[test]
fn work_of_one_stream_waits_for_events_of_others_only_if_told() {
    for told in [true, false] {
        let (cuda, device) = machine(Machine::default());
        let bound = device.bind().unwrap();
        let (src, dst) = (cuda.alloc(4096).unwrap(), cuda.alloc(4096).unwrap());
        drop(bound);
        let (producer, copier) = (device.stream().unwrap(), device.stream().unwrap());
        // SAFETY: our own block.
        unsafe { producer.fill(src, 9, 4096) }.unwrap();
        let ready = producer.record_new().unwrap();
        if told {
            copier.wait(&ready).unwrap();
        }
        // SAFETY: our own blocks.
        unsafe { copier.copy(dst, src, 4096) }.unwrap();
        copier.synchronize().unwrap();
        assert_eq!(cuda.peek(dst, 1), [if told { 9 } else { 0 }]);
    }
}

#[test]
fn an_event_waits_with_a_bound_and_is_a_ready_event() {
    let (_cuda, device) = machine(Machine::default());
    let event = device.event(false).unwrap();
    ReadyEvent::wait(&event, Duration::ZERO).unwrap(); // never recorded
    let stream = device.stream().unwrap();
    stream.record(&event).unwrap();
    let late = ReadyEvent::wait(&event, Duration::ZERO).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Timeout);
    ReadyEvent::wait(&event, Duration::from_secs(5)).unwrap();
    assert!(ReadyEvent::as_any(&event).is_some_and(|any| any.is::<capture_arena::cuda::Event>()));
}

#[test]
fn devices_are_kept_apart() {
    let cuda = ScriptedCuda::new(Machine { devices: 2, ..Machine::default() });
    let one = Device::open(cuda.clone(), 0).unwrap();
    let two = Device::open(cuda.clone(), 1).unwrap();
    assert_ne!(one, two);
    assert_eq!(one, Device::open(cuda.clone(), 0).unwrap());
    let (stream, event) = (one.stream().unwrap(), two.event(false).unwrap());

    let refused = stream.record(&event).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidInput);
    assert_eq!(refused.context("stream_device"), Some("0"));
    assert_eq!(refused.context("event_device"), Some("1"));
    assert_eq!(cuda.calls("cuEventRecord"), 0, "refused before the driver is asked");
    // Waiting for another device's event is what events are for.
    two.stream().unwrap().record(&event).unwrap();
    stream.wait(&event).unwrap();
    stream.synchronize().unwrap();

    let none = Device::open(cuda, 2).unwrap_err();
    assert_eq!(none.kind(), ErrorKind::InvalidInput);
    assert_eq!((none.context("device"), none.context("devices")), (Some("2"), Some("2")));
}

#[test]
fn binding_leaves_the_thread_as_it_was() {
    let cuda = ScriptedCuda::new(Machine { devices: 2, ..Machine::default() });
    let one = Device::open(cuda.clone(), 0).unwrap();
    let two = Device::open(cuda.clone(), 1).unwrap();
    assert_eq!(cuda.current_context().unwrap(), None);
    let outer = one.bind().unwrap();
    let of_one: ContextId = cuda.current_context().unwrap().unwrap();
    two.memory().unwrap();
    assert_eq!(cuda.current_context().unwrap(), Some(of_one));
    let pushes = cuda.calls("cuCtxPushCurrent");
    one.memory().unwrap();
    assert_eq!(cuda.calls("cuCtxPushCurrent"), pushes, "bound already");
    drop(outer);
    assert_eq!(cuda.current_context().unwrap(), None);
    // Another thread has none, and is given one for the length of its call.
    std::thread::scope(|scope| {
        scope.spawn(|| one.stream().unwrap().synchronize().unwrap());
    });
    drop((one, two));
    assert_eq!(cuda.leaks(), Vec::<String>::new());
}

#[test]
fn a_context_that_cannot_be_had_is_an_error_that_names_the_device() {
    let cuda = ScriptedCuda::new(Machine::default());
    cuda.fail("cuDevicePrimaryCtxRetain", 0, 1, 46);
    let error = Device::open(cuda.clone(), 0).unwrap_err();
    assert!(error.to_string().contains("CUDA_ERROR_DEVICE_UNAVAILABLE (46)"), "{error}");
    assert_eq!(error.context("device"), Some("0"));
    assert_eq!(cuda.leaks(), Vec::<String>::new());
}

#[test]
fn copies_go_any_way_and_batches_are_optional() {
    for has_batches in [true, false] {
        let optional = if has_batches { vec![Optional::BatchCopy] } else { Vec::new() };
        let (cuda, device) = machine(Machine { optional, ..Machine::default() });
        let mut pinned = device.pinned(64).unwrap();
        pinned.as_mut_slice().copy_from_slice(&std::array::from_fn::<u8, 64, _>(|i| i as u8));
        let at = device.bind().map(|_bound| cuda.alloc(4096).unwrap()).unwrap();
        let stream = device.stream().unwrap();
        let op =
            |dst, src, len| CopyOp { dst: at.offset(dst), src: pinned.address().offset(src), len };
        let ops = [op(0, 0, 32), op(100, 32, 32)];
        // SAFETY: our own memory, until the stream is done.
        let queued = unsafe { stream.copy_batch(&ops) };
        if !has_batches {
            let error = queued.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains("cuMemcpyBatchAsync"), "{error}");
            continue;
        }
        let back = device.pinned(32).unwrap();
        // SAFETY: as above.
        unsafe { stream.copy(back.address(), at.offset(100), 32) }.unwrap();
        stream.synchronize().unwrap();
        assert_eq!(back.as_slice(), &pinned.as_slice()[32..]);
        assert_eq!(cuda.peek(at, 32), &pinned.as_slice()[..32]);
    }
}

#[test]
fn work_that_fails_is_reported_by_whoever_waits() {
    let (cuda, device) = machine(Machine::default());
    let stream = device.stream().unwrap();
    cuda.fail("work", 0, 1, CudaError::ILLEGAL_ADDRESS);
    let at = device.bind().map(|_bound| cuda.alloc(4096).unwrap()).unwrap();
    // SAFETY: our own block.
    unsafe { stream.fill(at, 1, 8) }.unwrap();
    let event = stream.record_new().unwrap();
    let error = event.synchronize().unwrap_err();
    assert!(error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS (700)"), "{error}");
    assert!(stream.synchronize().is_err(), "and by everybody after");
}

#[test]
fn the_stand_in_finds_accesses_outside_of_blocks() {
    let (cuda, device) = machine(Machine::default());
    let at = device.bind().map(|_bound| cuda.alloc(4096).unwrap()).unwrap();
    for (start, len) in [(at, 4097), (at.offset(4096), 1), (DevicePtr(at.0 - 1), 1)] {
        let (cuda, device) = (cuda.clone(), device.clone());
        let read = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| cuda.peek(start, len)));
        assert!(read.is_err(), "{start} {len}");
        assert_eq!(device.memory().unwrap().free, (1 << 30) - 4096);
    }
    assert_eq!(cuda.device_of(at.offset(4095)).unwrap(), Some(0));
    assert_eq!(cuda.device_of(at.offset(4096)).unwrap(), None);
}
