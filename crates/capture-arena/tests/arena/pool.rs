//! Receive and buffer memory.

use std::{collections::BTreeSet, thread};

use capture_arena::{Backing, RegionPool};
use transport_core::{ErrorKind, RegionMut};

fn pool(bytes: u64) -> RegionPool {
    RegionPool::new(Backing::heap(bytes).unwrap()).unwrap()
}

#[test]
fn a_region_comes_back_with_its_last_handle() {
    let pool = pool(4096);
    let mut region = pool.take(4096).unwrap();
    assert_eq!(region.address() as u64, pool.backing().address());
    region.as_mut_bytes().unwrap().fill(1);
    let (head, tail) = region.split_at(1000).unwrap();
    let view = tail.freeze().slice(10..20).unwrap();
    drop(head);
    assert_eq!(pool.take(1).unwrap_err().kind(), ErrorKind::CapacityExceeded);
    assert_eq!(view.as_ref(), [1; 10]);
    drop(view);
    assert!(pool.take(4096).is_ok());
    let stats = pool.stats();
    assert_eq!((stats.taken, stats.refused, stats.peak), (2, 1, 4096));
    assert_eq!((stats.free, stats.largest, stats.live_regions), (4096, 4096, 0));
}

#[test]
fn a_full_pool_says_what_is_free() {
    let pool = pool(4096);
    let regions: Vec<_> = (0..8).map(|_| pool.take(500).unwrap()).collect();
    let addresses: BTreeSet<_> = regions.iter().map(|r| r.address()).collect();
    assert_eq!(addresses.len(), 8);
    drop(regions.into_iter().step_by(2).collect::<Vec<_>>());
    assert!(pool.take(0).unwrap().is_empty());
    let kept: Vec<_> = (0..4).map(|_| pool.take(512).unwrap()).collect();
    drop(kept);
    let error = pool.take(5000).unwrap_err();
    for part in
        ["no room", "requested_bytes=5000", "free_bytes=4096", "largest_range=4096", "pool larger"]
    {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
}

#[test]
fn regions_that_are_taken_together_are_all_there_or_none() {
    let pool = pool(4096);
    let mut taken = Vec::new();
    pool.take_all([600, 0, 1000, 512], |region| taken.push(region)).unwrap();
    assert_eq!(taken.iter().map(RegionMut::len).collect::<Vec<_>>(), [600, 0, 1000, 512]);
    let stats = pool.stats();
    assert_eq!((stats.live_regions, stats.taken, stats.free, stats.peak), (3, 3, 1536, 2560));
    let mut none = Vec::new();
    let (at, error) = pool.take_all([512, 0, 1024, 1], |region| none.push(region)).unwrap_err();
    assert_eq!((at, none.len(), pool.stats().free), (3, 0, 1536), "{error}");
    assert_eq!((error.context("requested_bytes"), pool.stats().refused), (Some("1"), 1));
    taken.remove(2);
    assert_eq!(pool.stats().free, 2560, "each goes back by itself");
    drop(taken);
    assert_eq!((pool.stats().largest, pool.stats().live_regions), (4096, 0));
}

#[test]
fn quarantined_memory_is_counted_and_out_of_reach() {
    let pool = pool(4096);
    let kept = pool.quarantine(pool.take(3000).unwrap());
    assert_eq!((pool.stats().quarantined_bytes, pool.stats().quarantined), (3000, 1));
    let error = pool.take(3000).unwrap_err();
    assert_eq!(error.context("quarantined_bytes"), Some("3000"));
    drop(kept);
    assert_eq!((pool.stats().quarantined_bytes, pool.stats().free), (0, 4096));
    assert!(pool.take(3000).is_ok());
}

#[test]
fn many_threads_share_a_pool() {
    let pool = pool(1 << 20);
    thread::scope(|scope| {
        for t in 0..4u8 {
            let pool = &pool;
            scope.spawn(move || {
                let mut kept = Vec::new();
                for i in 0..500usize {
                    let mut region = pool.take(1 + (i * 37) % 20_000).unwrap();
                    region.as_mut_bytes().unwrap().fill(t);
                    kept.push(region.freeze());
                    if kept.len() > 5 {
                        let oldest = kept.remove(0);
                        assert!(oldest.as_ref().iter().all(|&b| b == t), "two owners");
                    }
                }
            });
        }
    });
    let stats = pool.stats();
    assert_eq!((stats.taken, stats.free, stats.largest), (2000, 1 << 20, 1 << 20));
    assert!(stats.peak > 0 && stats.peak <= 1 << 20);
}
