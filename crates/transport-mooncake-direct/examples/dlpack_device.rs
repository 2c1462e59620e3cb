//! A library with a C interface that exports slots of a receive pool on a CUDA device by DLPack: what
//! an extension module does, and what the test `gpu_dlpack` loads into Python.
#![allow(unsafe_code)] // names that the loader finds

use std::{
    ffi::c_void,
    ptr::null_mut,
    sync::{LazyLock, Mutex},
};

use capture_arena::{
    Backing, RegionPool,
    cuda::{ArenaPeers, Device, DeviceArenaConfig, DevicePtr, driver},
};
use transport_core::{
    Dtype, RegionMut, Result, Tensor, TensorMeta,
    memory::dlpack::{Export, Version},
};

const ROWS: u64 = 1000;
const COLUMNS: u64 = 33;

struct Bed {
    device: Device,
    pool: RegionPool,
}

static BED: LazyLock<Bed> = LazyLock::new(|| {
    let bed = || -> Result<Bed> {
        let device = Device::open(driver()?, 0)?;
        let config = DeviceArenaConfig::new(64 << 20, ArenaPeers::Nobody);
        let pool = RegionPool::new(Backing::device(&device, &config)?)?;
        Ok(Bed { device, pool })
    };
    bed().expect("a CUDA device")
});

/// Slots of the pool that exports keep.
#[unsafe(no_mangle)]
pub extern "C" fn live_regions() -> u64 {
    BED.pool.stats().live_regions
}

/// Address of the slot that was exported last.
static LAST: Mutex<u64> = Mutex::new(0);

/// As [`LAST`].
#[unsafe(no_mangle)]
pub extern "C" fn last_address() -> u64 {
    *LAST.lock().expect("no panic")
}

/// A slot of 1,000 x 33 32-bit integers 0, 1, 2, …; null where the export is refused.
#[unsafe(no_mangle)]
pub extern "C" fn export_slot(minor: i32, is_writable: bool) -> *mut c_void {
    let meta = TensorMeta::new(Dtype::Int32, [ROWS, COLUMNS]).expect("a shape");
    let mut region = BED.pool.take(meta.nbytes() as usize).expect("room in the pool");
    fill(&mut region).expect("a copy to the device");
    *LAST.lock().expect("no panic") = region.address() as u64;
    let export = match is_writable {
        true => Export::writable(meta, region),
        false => Tensor::new(meta, region.freeze()).map(Export::read_only),
    };
    let export = export.expect("as long as the tensor");
    let raw = match u32::try_from(minor) {
        Ok(minor) => {
            export.versioned(Version { major: 1, minor }).map(|e| e.into_raw().as_ptr().cast())
        }
        Err(_) => export.unversioned().map(|e| e.into_raw().as_ptr().cast()),
    };
    raw.unwrap_or(null_mut())
}

fn fill(region: &mut RegionMut) -> Result<()> {
    let mut stage = BED.device.pinned(region.len())?;
    for (i, word) in stage.as_mut_slice()[..region.len()].chunks_exact_mut(4).enumerate() {
        word.copy_from_slice(&(i as i32).to_le_bytes());
    }
    let stream = BED.device.stream()?;
    let to = DevicePtr(region.address() as u64);
    // SAFETY: a slot that is ours alone, and memory of this function; waited for.
    unsafe { stream.copy(to, stage.address(), region.len() as u64) }?;
    stream.synchronize()
}
