//! A library with a C interface that exports tensors by DLPack: what an extension module does, and
//! what the test `dlpack` loads into Python.
#![allow(unsafe_code)] // names that the loader finds

use std::{
    ffi::c_void,
    ptr::null_mut,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
};

use transport_core::{
    Dtype, RegionMut, Tensor, TensorMeta,
    memory::dlpack::{Export, Version},
};

static LIVE: AtomicI64 = AtomicI64::new(0);

/// Counts the regions that live.
struct Counted;

impl Drop for Counted {
    fn drop(&mut self) {
        LIVE.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Regions that exports keep alive.
#[unsafe(no_mangle)]
pub extern "C" fn live_regions() -> i64 {
    LIVE.load(Ordering::SeqCst)
}

/// A tensor of 2 x 3 elements whose bytes are 1, 2, 3, …, behind 64 other bytes of its region.
///
/// `dtype` counts in `Dtype::ALL`; `minor` is the newest version 1 that the consumer understands,
/// or less than 0 for the form without a version. Null where the export is refused.
#[unsafe(no_mangle)]
pub extern "C" fn export_tensor(dtype: u32, minor: i32, is_writable: bool) -> *mut c_void {
    let dtype = Dtype::ALL[dtype as usize];
    let meta = TensorMeta::new(dtype, [2, 3]).expect("six elements");
    let mut region = RegionMut::zeroed(64 + meta.nbytes() as usize).expect("a few bytes");
    let bytes = region.as_mut_bytes().expect("host memory");
    bytes[64..].iter_mut().zip(1..).for_each(|(byte, i)| *byte = i);
    LIVE.fetch_add(1, Ordering::SeqCst);
    let (_, region) = region.keeping(Arc::new(Counted)).split_at(64).expect("long enough");
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
