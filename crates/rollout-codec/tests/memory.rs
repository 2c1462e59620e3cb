//! How much memory encoding and decoding take, counted by the allocator: nothing but offsets on
//! the way in, nothing but views on the way out, and nothing for lengths that no byte backs.
//!
//! One test only: the counters are the process's.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

use rollout_codec::{
    mooncake::{Dump, ObjectStore, Reader},
    native::{Header, Options, Plan, RolloutView},
    payload::{Payload, Profile},
};
use xxhash_rust::xxh3::Xxh3;

#[test]
fn memory_is_bounded_by_what_is_there() {
    let payload = Payload::new(Profile::Text, 32 << 20);
    let rollout = payload.rollout();
    let bytes = payload.nbytes() as usize;

    // Planning copies no row; gathering needs no buffer beside its destination.
    let (plan, planned) = measure(|| Plan::new(&rollout, &Options::default()).unwrap());
    assert!(planned.peak < bytes / 20, "planning took {} bytes", planned.peak);
    let mut data = transport_core::RegionMut::zeroed(plan.data_bytes() as usize).unwrap();
    let (header, gathered) = measure(|| plan.encode_into(data.as_mut_bytes().unwrap(), 2).unwrap());
    assert!(gathered.peak < bytes / 20, "gathering took {} bytes", gathered.peak);

    // Views take no memory worth the name, whatever is asked of them.
    let data = data.freeze();
    let ((), viewed) = measure(|| {
        let view = RolloutView::new(Header::parse(&header).unwrap(), data.clone()).unwrap();
        view.verify(2).unwrap();
        let tokens = view.ragged("tokens").unwrap();
        assert_eq!(tokens.iter().flatten().map(|row| row.bytes().len()).sum::<usize>() % 8, 0);
        let rollout = view.rollout().unwrap();
        assert_eq!(rollout.rows().unwrap() as usize, payload.rows());
    });
    assert!(viewed.peak < bytes / 20, "decoding took {} bytes", viewed.peak);

    // A header that promises more than there is.
    let index = String::from_utf8(header[64..].to_vec()).unwrap();
    let total = index.split("\"total\":").nth(1).unwrap().split(',').next().unwrap();
    for number in ["9223372036854775807", "1099511627776"] {
        let forged =
            index.replacen(&format!("\"total\":{total}"), &format!("\"total\":{number}"), 1);
        assert_ne!(forged, index);
        let forged = seal(&header, forged.as_bytes());
        let (parsed, taken) = measure(|| Header::parse(&forged));
        assert!(parsed.is_err());
        assert!(taken.largest < 1 << 20, "{} bytes at once", taken.largest);
    }

    // A manifest that promises more than there is.
    let path = format!("{}/tests/golden/sample5.hex", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let mut store = Dump::parse(&text).unwrap().objects;
    let key = store.keys().next().unwrap().to_owned();
    let manifest = String::from_utf8(store.get(&key).unwrap().unwrap().to_vec()).unwrap();
    let forged = manifest.replace("\"bytes\":240", "\"bytes\":800000000000");
    let forged = forged.replacen("\"bytes\":80}", "\"bytes\":799999999840}", 1);
    assert_ne!(forged, manifest);
    store.remove(&key).unwrap();
    store.insert(key.as_str(), forged).unwrap();
    let (read, taken) = measure(|| Reader::new(&store).members(&key));
    let error = read.unwrap_err();
    assert!(error.to_string().contains("not as long as the manifest says"), "{error}");
    assert!(taken.largest < 1 << 20, "{} bytes at once", taken.largest);
}

/// The header with another index, and lengths and checksum that fit it.
fn seal(header: &[u8], index: &[u8]) -> Vec<u8> {
    let mut out = [&header[..64], index].concat();
    let len = out.len() as u64;
    out[16..24].copy_from_slice(&len.to_le_bytes());
    out[48..56].copy_from_slice(&(index.len() as u64).to_le_bytes());
    let mut hasher = Xxh3::new();
    hasher.update(&out[..56]);
    hasher.update(index);
    let sum = hasher.digest();
    out[56..64].copy_from_slice(&sum.to_le_bytes());
    out
}

struct Taken {
    /// Most bytes above what was allocated before.
    peak: usize,
    /// Bytes of the largest allocation.
    largest: usize,
}

fn measure<T>(work: impl FnOnce() -> T) -> (T, Taken) {
    let before = NOW.load(Ordering::SeqCst);
    PEAK.store(before, Ordering::SeqCst);
    LARGEST.store(0, Ordering::SeqCst);
    let out = work();
    let peak = PEAK.load(Ordering::SeqCst) - before;
    (out, Taken { peak, largest: LARGEST.load(Ordering::SeqCst) })
}

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static LARGEST: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: hands every call on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::SeqCst) + layout.size();
        PEAK.fetch_max(now, Ordering::SeqCst);
        LARGEST.fetch_max(layout.size(), Ordering::SeqCst);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::SeqCst);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;
