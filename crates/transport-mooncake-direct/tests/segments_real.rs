//! The tcp engine as a reader of a real store's segment, which Mooncake's wheel serves.
//!
//! `cargo xtask test` prepares what this needs.
#![cfg(feature = "mooncake-python")]

#[path = "../../mooncake-sys/tests/support/mod.rs"]
mod wheel;

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use mooncake_sys::{
    PutItem, ReplicaPolicy, SegmentRead, SegmentReader, StoreApi, StoreSetup,
    python::{WheelOptions, WheelStore},
};
use transport_core::{ErrorKind, RegionMut, RemoteAddr, Result, SessionName};
use transport_mooncake_direct::{TcpEngine, TcpOptions};

fn read(
    reader: &dyn SegmentReader,
    segment: &SessionName,
    places: &[(RemoteAddr, u64)],
) -> (Vec<RegionMut>, Result<()>) {
    let read = |&(address, len): &(RemoteAddr, u64)| SegmentRead {
        address,
        dst: RegionMut::zeroed(len as usize).unwrap(),
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    let stop = Arc::new(AtomicBool::new(false));
    let reads = places.iter().map(read).collect();
    let (reads, result) = reader.read(segment, reads, deadline, &stop);
    (reads.into_iter().map(|read| read.dst).collect(), result)
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn objects_are_read_where_the_master_says_they_lie() {
    let master = wheel::master();
    let setup = StoreSetup::client("127.0.0.1", master.address().to_string()).segment(256 << 20);
    let store = WheelStore::connect(&WheelOptions::at(wheel::environment()), &setup).unwrap();
    let lens = [1u64, 511, 4096, 70_001, 24 << 20];
    let values: Vec<Vec<u8>> =
        lens.iter().map(|&len| (0..len).map(|i| (i * 7 + len) as u8).collect()).collect();
    let keys: Vec<String> = lens.iter().map(|len| format!("s/{len}")).collect();
    let mut items = Vec::new();
    for (key, value) in keys.iter().zip(&values) {
        items.push(PutItem { key, start: value.as_ptr(), len: value.len() });
    }
    // SAFETY: the values are borrowed for the call.
    let put = unsafe { store.put(&items, ReplicaPolicy::default()) }.unwrap();
    assert!(put.iter().all(Result::is_ok), "{put:?}");

    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let located = store.locate(&keys).unwrap().expect("the wheel can tell");
    let places: Vec<_> = located.iter().map(|found| (found[0].address, found[0].len)).collect();
    let segment: SessionName = located[0][0].segment.parse().unwrap();
    let engine = TcpEngine::new(TcpOptions::default());
    for _ in 0..3 {
        let (found, result) = read(&engine, &segment, &places);
        result.unwrap();
        for (mut found, value) in found.into_iter().zip(&values) {
            assert!(found.as_mut_bytes().unwrap() == &value[..], "{} bytes", value.len());
        }
    }
    // What is refused gives the memory back as well.
    let beyond = RemoteAddr(places[0].0.0 + (1 << 40));
    let (found, result) = read(&engine, &segment, &[places[0], (beyond, 10)]);
    assert_eq!((found.len(), result.unwrap_err().kind()), (2, ErrorKind::OutOfRange));

    store.close().unwrap();
    let (found, result) = read(&engine, &segment, &places);
    let gone = [ErrorKind::PeerGone, ErrorKind::OutOfRange]; // its memory, and then itself
    assert!(found.len() == places.len() && gone.contains(&result.unwrap_err().kind()));
    SegmentReader::close(&engine);
    let closed = read(&engine, &segment, &places).1.unwrap_err();
    assert_eq!(closed.kind(), ErrorKind::Closed);
    master.stop();
}
