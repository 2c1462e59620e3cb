//! Handing memory to frameworks by the DLPack convention, without a copy.
//!
//! A tensor is exported once; whoever takes it over frees it with the deleter inside, which drops
//! the region and with it gives the memory back to its pool or publisher. In Python the pointer goes
//! into a capsule called [`ManagedTensor::CAPSULE`] or [`ManagedTensorVersioned::CAPSULE`].
//!
//! Memory is row-major; its first byte is where `data` points, so that `byte_offset` is always 0:
//! there are consumers that pass over it. Consumers that want `data` aligned to 256 bytes find it so
//! for whole tensors of arenas and pools, which start at multiples of 512.

use std::{
    ffi::c_void,
    fmt,
    ptr::{NonNull, null_mut},
};

use super::{RegionKind, RegionMut, RegionSlice};
use crate::{Dtype, Error, ErrorKind, Result, Tensor, TensorMeta};

/// A version of the DLPack convention.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Another number is another layout.
    pub major: u32,
    /// Grows with what a tensor may say.
    pub minor: u32,
}

impl Version {
    /// What is written here, and the oldest that names every element type.
    pub const V1_1: Self = Self { major: 1, minor: 1 };
    /// The first with a version inside.
    pub const V1_0: Self = Self { major: 1, minor: 0 };
}

/// Where the bytes are.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// One of the constants.
    pub kind: i32,
    /// Ordinal, 0 for host memory.
    pub id: i32,
}

impl Device {
    /// Host memory.
    pub const CPU: i32 = 1;
    /// Memory of a CUDA device.
    pub const CUDA: i32 = 2;
    /// Host memory that CUDA devices reach: page-locked.
    pub const CUDA_HOST: i32 = 3;
}

/// An element type.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataType {
    /// Class of numbers.
    pub code: u8,
    /// Bits of one number.
    pub bits: u8,
    /// Numbers of one element; 1.
    pub lanes: u16,
}

/// A tensor as consumers see it.
#[repr(C)]
#[derive(Debug)]
pub struct DlTensor {
    /// First byte.
    pub data: *mut c_void,
    /// Where it is.
    pub device: Device,
    /// Number of dimensions.
    pub ndim: i32,
    /// Element type.
    pub dtype: DataType,
    /// As many lengths as there are dimensions.
    pub shape: *mut i64,
    /// As many distances, in elements.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element; 0.
    pub byte_offset: u64,
}

/// The older form. It cannot say that a tensor is only to be read.
#[repr(C)]
#[derive(Debug)]
pub struct ManagedTensor {
    /// The tensor.
    pub tensor: DlTensor,
    /// For whoever made it; null here.
    pub context: *mut c_void,
    /// Ends the export; from any thread, once.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// The form since version 1.0.
#[repr(C)]
#[derive(Debug)]
pub struct ManagedTensorVersioned {
    /// The version that this was made by.
    pub version: Version,
    /// For whoever made it; null here.
    pub context: *mut c_void,
    /// Ends the export; from any thread, once.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
    /// See [`Self::READ_ONLY`].
    pub flags: u64,
    /// The tensor.
    pub tensor: DlTensor,
}

impl ManagedTensor {
    /// Name of the capsule in Python.
    pub const CAPSULE: &str = "dltensor";
}

impl ManagedTensorVersioned {
    /// Name of the capsule in Python.
    pub const CAPSULE: &str = "dltensor_versioned";
    /// Flag: the bytes are only to be read.
    pub const READ_ONLY: u64 = 1;
}

/// A tensor on its way to a framework.
#[derive(Debug)]
#[must_use = "choose the form that the consumer takes"]
pub struct Export {
    meta: TensorMeta,
    memory: Memory,
    page_locked: bool,
}

#[derive(Debug)]
enum Memory {
    Read(RegionSlice),
    Write(RegionMut),
}

impl Export {
    /// A tensor that others may look at too: it is only to be read.
    pub fn read_only(tensor: Tensor) -> Self {
        Self { meta: tensor.meta, memory: Memory::Read(tensor.data), page_locked: false }
    }

    /// Memory that is the consumer's alone, to read and to write.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the region is not as long as the tensor.
    pub fn writable(meta: TensorMeta, region: RegionMut) -> Result<Self> {
        if region.len() as u64 != meta.nbytes() {
            let why = "the region is not as long as the tensor";
            return Err(Error::new(ErrorKind::InvalidInput, EXPORT, why)
                .with("tensor", &meta)
                .with("expected", meta.nbytes())
                .with("found", region.len()));
        }
        Ok(Self { meta, memory: Memory::Write(region), page_locked: false })
    }

    /// Says of host memory that it is page-locked, so that consumers may copy from and to it in the
    /// background. Nothing is said of device memory.
    pub fn page_locked(mut self) -> Self {
        self.page_locked = true;
        self
    }

    /// The form with a version, for a consumer that understands at most `newest`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a consumer from before version 1, for an element type that its
    /// version does not name, and for memory that is nowhere yet.
    pub fn versioned(self, newest: Version) -> Result<Exported<ManagedTensorVersioned>> {
        let written = newest.min(Version::V1_1);
        if written.major != Version::V1_1.major {
            return Err(unsupported("the consumer reads older layouts only")
                .with("expected", Version::V1_1.major)
                .with("found", newest.major)
                .remedy("ask for the form without a version"));
        }
        self.check(written)?;
        let flags = match self.memory {
            Memory::Read(_) => ManagedTensorVersioned::READ_ONLY,
            Memory::Write(_) => 0,
        };
        self.held(|tensor| ManagedTensorVersioned {
            version: written,
            context: null_mut(),
            deleter: Some(delete::<ManagedTensorVersioned>),
            flags,
            tensor,
        })
    }

    /// The older form, for consumers that name no version. They must not write what is exported
    /// [to be read](Self::read_only), which this form cannot tell them.
    ///
    /// # Errors
    /// As [`Self::versioned`] for version 1.0.
    pub fn unversioned(self) -> Result<Exported<ManagedTensor>> {
        self.check(Version::V1_0)?;
        self.held(|tensor| ManagedTensor {
            tensor,
            context: null_mut(),
            deleter: Some(delete::<ManagedTensor>),
        })
    }

    fn check(&self, version: Version) -> Result<()> {
        let (_, since) = data_type(self.meta.dtype());
        if version >= since {
            return Ok(());
        }
        Err(unsupported("the consumer's version of DLPack has no such element type")
            .with("dtype", self.meta.dtype())
            .with("expected", format_args!("DLPack {}.{}", since.major, since.minor))
            .with("found", format_args!("DLPack {}.{}", version.major, version.minor))
            .remedy("view the tensor as uint8, or use a newer framework"))
    }

    fn held<M>(self, head: impl FnOnce(DlTensor) -> M) -> Result<Exported<M>> {
        let (kind, data) = match &self.memory {
            Memory::Read(slice) => (slice.kind(), slice.as_ptr().cast_mut()),
            Memory::Write(region) => (region.kind(), region.0.start.as_ptr()),
        };
        let device = match kind {
            RegionKind::Cuda { device } => {
                let id = i32::try_from(device).map_err(|_| unsupported("no such device"))?;
                Device { kind: Device::CUDA, id }
            }
            RegionKind::Unwritten => {
                return Err(unsupported("the tensor is not written yet")
                    .remedy("publish it, and export what is fetched"));
            }
            _ if self.page_locked => Device { kind: Device::CUDA_HOST, id: 0 },
            _ => Device { kind: Device::CPU, id: 0 },
        };
        // Lengths are at most i64::MAX beside others that are not zero; where one is zero, distances
        // mean nothing.
        let shape: Vec<i64> = self.meta.shape().iter().map(|&length| length as i64).collect();
        let ndim = shape.len();
        let mut lengths = [shape.as_slice(), shape.as_slice()].concat(); // then distances
        let mut distance = 1_i64;
        for place in lengths[ndim..].iter_mut().rev() {
            distance = distance.saturating_mul(std::mem::replace(place, distance).max(1));
        }
        let (dtype, _) = data_type(self.meta.dtype());
        let start = lengths.as_mut_ptr();
        // SAFETY: as many lengths as dimensions, followed by as many distances.
        let strides = unsafe { start.add(ndim) };
        let tensor = DlTensor {
            data: data.cast(),
            device,
            ndim: ndim as i32,
            dtype,
            shape: start,
            strides,
            byte_offset: 0,
        };
        let held = Held { head: head(tensor), _lengths: lengths, _memory: self.memory };
        let whole = NonNull::new(Box::into_raw(Box::new(held))).expect("a box is somewhere");
        Ok(Exported(whole))
    }
}

const EXPORT: &str = "export tensor";

fn unsupported(why: &'static str) -> Error {
    Error::new(ErrorKind::Unsupported, EXPORT, why)
}

/// How DLPack names an element type, and the version that is the first to do so.
fn data_type(dtype: Dtype) -> (DataType, Version) {
    let (code, since) = match dtype {
        Dtype::Int64 | Dtype::Int32 | Dtype::Int16 | Dtype::Int8 => (0, Version::V1_0),
        Dtype::Uint64 | Dtype::Uint32 | Dtype::Uint16 | Dtype::Uint8 => (1, Version::V1_0),
        Dtype::Float64 | Dtype::Float32 | Dtype::Float16 => (2, Version::V1_0),
        Dtype::Bfloat16 => (4, Version::V1_0),
        Dtype::Complex64 | Dtype::Complex128 => (5, Version::V1_0),
        Dtype::Bool => (6, Version::V1_0),
        Dtype::Float8E4m3fn => (10, Version::V1_1),
        Dtype::Float8E5m2 => (12, Version::V1_1),
    };
    (DataType { code, bits: dtype.size() as u8 * 8, lanes: 1 }, since)
}

/// An export that nobody has taken over; dropping it ends it.
pub struct Exported<M>(NonNull<Held<M>>);

/// What the consumer keeps alive.
#[repr(C)] // the head first: its address is that of the whole
struct Held<M> {
    head: M,
    _lengths: Vec<i64>, // what shape and strides point to
    _memory: Memory,    // kept for its Drop
}

// SAFETY: the memory inside is Send and Sync, and the pointers of the head lead to what the export
// owns.
unsafe impl<M> Send for Exported<M> {}

impl<M> Exported<M> {
    /// Hands it over: whoever has the pointer calls the deleter once, after the last use.
    #[must_use = "nobody else calls the deleter"]
    pub fn into_raw(self) -> NonNull<M> {
        let head = self.0.cast();
        std::mem::forget(self);
        head
    }

    /// What the consumer will see.
    pub fn get(&self) -> &M {
        // SAFETY: ours until it is handed over; made whole by `held`.
        unsafe { &self.0.as_ref().head }
    }
}

impl<M> Drop for Exported<M> {
    fn drop(&mut self) {
        // SAFETY: boxed by `held`, and not handed over: nobody else ends it.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// Ends an export.
///
/// # Safety
/// `head` comes from [`Exported::into_raw`] of that form, and is not used again.
unsafe extern "C" fn delete<M>(head: *mut M) {
    // SAFETY: boxed by `held`, whose first field it is; the pointer was made from that of the whole.
    drop(unsafe { Box::from_raw(head.cast::<Held<M>>()) });
}

impl<M: fmt::Debug> fmt::Debug for Exported<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Exported").field(self.get()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc, Weak,
        atomic::{AtomicPtr, Ordering},
    };

    use super::*;

    /// A region of bytes 0, 1, 2, … and what tells whether it lives.
    fn region(len: usize) -> (RegionMut, Weak<()>) {
        let guard = Arc::new(());
        let alive = Arc::downgrade(&guard);
        let mut region = RegionMut::zeroed(len).unwrap();
        region.as_mut_bytes().unwrap().iter_mut().zip(0..).for_each(|(byte, i)| *byte = i);
        (region.keeping(guard), alive)
    }

    fn meta(dtype: Dtype, shape: &[u64]) -> TensorMeta {
        TensorMeta::new(dtype, shape).unwrap()
    }

    fn numbers(at: *const i64, count: i32) -> Vec<i64> {
        // SAFETY: as many as the export says.
        unsafe { std::slice::from_raw_parts(at, count as usize) }.to_vec()
    }

    #[test]
    fn the_layouts_are_those_of_the_convention() {
        assert_eq!((size_of::<DlTensor>(), align_of::<DlTensor>()), (48, 8));
        assert_eq!((size_of::<ManagedTensor>(), size_of::<ManagedTensorVersioned>()), (64, 80));
        assert_eq!(std::mem::offset_of!(ManagedTensorVersioned, flags), 24);
        assert_eq!(std::mem::offset_of!(ManagedTensorVersioned, tensor), 32);
        assert_eq!(std::mem::offset_of!(DlTensor, dtype), 20);
    }

    #[test]
    fn a_view_is_read_only_and_lives_until_the_consumer_is_done() {
        let (region, alive) = region(64);
        let part = region.freeze().slice(8..56).unwrap();
        let at = part.address();
        let tensor = Tensor::new(meta(Dtype::Float32, &[2, 3, 2]), part).unwrap();
        let exported = Export::read_only(tensor).versioned(Version::V1_1).unwrap();
        let seen = exported.get();
        assert_eq!((seen.version, seen.flags), (Version::V1_1, 1));
        let tensor = &seen.tensor;
        assert_eq!((tensor.data as usize, tensor.byte_offset), (at, 0));
        assert_eq!(tensor.device, Device { kind: Device::CPU, id: 0 });
        assert_eq!(tensor.dtype, DataType { code: 2, bits: 32, lanes: 1 });
        assert_eq!(numbers(tensor.shape, tensor.ndim), [2, 3, 2]);
        assert_eq!(numbers(tensor.strides, tensor.ndim), [6, 2, 1]);
        let raw = exported.into_raw();
        assert!(alive.upgrade().is_some());
        // SAFETY: a consumer's look at what it took over.
        let seen = unsafe { raw.as_ref() };
        // SAFETY: 48 bytes, as the shape says.
        let bytes = unsafe { std::slice::from_raw_parts(seen.tensor.data.cast::<u8>(), 48) };
        assert_eq!(bytes[47], 55);
        let deleter = seen.deleter.unwrap();
        let raw = AtomicPtr::new(raw.as_ptr());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let raw = raw.load(Ordering::Relaxed);
                // SAFETY: once, after the last use.
                unsafe { deleter(raw) }
            });
        });
        assert!(alive.upgrade().is_none());
    }

    #[test]
    fn what_nobody_takes_over_is_given_back() {
        let (region, alive) = region(6);
        let export = Export::writable(meta(Dtype::Uint8, &[6]), region).unwrap();
        let exported = export.page_locked().versioned(Version { major: 1, minor: 7 }).unwrap();
        assert_eq!((exported.get().version, exported.get().flags), (Version::V1_1, 0));
        assert_eq!(exported.get().tensor.device, Device { kind: Device::CUDA_HOST, id: 0 });
        drop(exported);
        assert!(alive.upgrade().is_none());
    }

    #[test]
    fn devices_and_shapes_of_every_sort_are_told() {
        let kind = RegionKind::Cuda { device: 3 };
        // SAFETY: no byte is ever touched.
        let region = unsafe { RegionMut::from_foreign(NonNull::dangling(), 8, kind, Arc::new(())) };
        let export = Export::writable(meta(Dtype::Complex64, &[]), region).unwrap();
        let exported = export.page_locked().unversioned().unwrap();
        let tensor = &exported.get().tensor;
        assert_eq!(tensor.device, Device { kind: Device::CUDA, id: 3 });
        assert_eq!((tensor.ndim, tensor.dtype.bits), (0, 64));
        let empty = Tensor::new(meta(Dtype::Bool, &[4, 0, 5]), RegionSlice::copy_of(&[])).unwrap();
        let exported = Export::read_only(empty).unversioned().unwrap();
        let tensor = &exported.get().tensor;
        assert_eq!(numbers(tensor.shape, tensor.ndim), [4, 0, 5]);
        assert_eq!(numbers(tensor.strides, tensor.ndim), [5, 5, 1]);
        assert_eq!(tensor.dtype, DataType { code: 6, bits: 8, lanes: 1 });
    }

    #[test]
    fn what_a_consumer_does_not_understand_is_an_error() {
        let float8 = || {
            let (region, _) = region(4);
            Export::writable(meta(Dtype::Float8E5m2, &[4]), region).unwrap()
        };
        assert_eq!(float8().versioned(Version::V1_1).unwrap().get().tensor.dtype.code, 12);
        for error in [
            float8().versioned(Version::V1_0).unwrap_err(),
            float8().unversioned().unwrap_err(),
            float8().versioned(Version { major: 0, minor: 8 }).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        }
        let newer = float8().versioned(Version { major: 2, minor: 0 }).unwrap();
        assert_eq!(newer.get().version, Version::V1_1, "newer consumers read older versions");
        let unwritten = Tensor::new(meta(Dtype::Int8, &[2]), RegionSlice::unwritten(2)).unwrap();
        let error = Export::read_only(unwritten).unversioned().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        let (short, alive) = region(3);
        let error = Export::writable(meta(Dtype::Int32, &[1]), short).unwrap_err();
        assert_eq!((error.kind(), error.context("found")), (ErrorKind::InvalidInput, Some("3")));
        assert!(alive.upgrade().is_none());
    }
}
