//! Memory that transfers read and write: owned, counted, and never freed under a transfer.
//!
//! [`RegionMut`] is the only handle to its bytes and may be written; [`RegionMut::freeze`] turns it
//! into a [`RegionSlice`], of which there may be many and which nobody writes. Both keep an *owner*
//! alive: the allocation, the mapping, the pool slot or the framework's tensor that the bytes
//! belong to. Dropping the last handle drops the owner, which gives the memory back.
//!
//! [`dlpack`] hands them to frameworks. This is the only module of the crate with `unsafe` code.
#![allow(unsafe_code)]

pub mod dlpack;
mod gather;

use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    any::Any,
    fmt,
    ops::Range,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use crate::{Error, ErrorKind, ReadyEvent, Result};

pub use gather::{gather, gather_xxh3};

/// Where bytes live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RegionKind {
    /// Private memory of this process.
    Host,
    /// Memory that other processes of this host can map.
    Shared,
    /// Memory of a CUDA device; the CPU cannot touch it.
    Cuda {
        /// Device ordinal.
        device: u32,
    },
    /// Nowhere yet: a [`Writer`](crate::Writer) brings the bytes when a transport has room for
    /// them.
    Unwritten,
}

impl RegionKind {
    /// Whether the CPU can read and write the bytes.
    #[inline]
    pub const fn is_host(self) -> bool {
        matches!(self, Self::Host | Self::Shared)
    }
}

/// Whatever keeps the bytes alive. Its `Drop` gives them back.
pub type Owner = Arc<dyn Any + Send + Sync>;

#[derive(Clone)]
struct Span {
    start: NonNull<u8>,
    len: usize,
    kind: RegionKind,
    _owner: Owner, // kept for its Drop
}

impl Span {
    fn keeping(self, also: Owner) -> Self {
        Self { _owner: Arc::new((self._owner, also)), ..self } // fields drop in this order
    }

    fn join(self, next: Self) -> std::result::Result<Self, (Self, Self)> {
        let is_next = self.kind == next.kind
            && self.kind != RegionKind::Unwritten
            && Arc::ptr_eq(&self._owner, &next._owner)
            && (self.start.as_ptr() as usize).checked_add(self.len)
                == Some(next.start.as_ptr() as usize);
        match self.len.checked_add(next.len).filter(|_| is_next) {
            Some(len) => Ok(Self { len, ..self }),
            None => Err((self, next)),
        }
    }
}

// SAFETY: a span is an address, a length and an owner that is itself Send and Sync. Which accesses
// are allowed is decided by the handle around it: unique for RegionMut, read-only for RegionSlice.
unsafe impl Send for Span {}
// SAFETY: as above; a shared span gives read access only.
unsafe impl Sync for Span {}

/// Unique handle to bytes that a transfer may write.
pub struct RegionMut(Span);

/// Counted view of bytes that nobody writes any more. Cloning and slicing copy no bytes.
///
/// That is also true of a view into another process's memory
/// ([`Destination::View`](crate::Destination::View)): it keeps the publisher from reusing the bytes
/// for as long as it lives.
#[derive(Clone)]
pub struct RegionSlice(Span);

struct HeapBlock {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the block is plain memory; access goes through RegionMut and RegionSlice only.
unsafe impl Send for HeapBlock {}
// SAFETY: as above.
unsafe impl Sync for HeapBlock {}

impl Drop for HeapBlock {
    fn drop(&mut self) {
        // SAFETY: allocated in `RegionMut::zeroed` with this layout, and freed once, here.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

impl RegionMut {
    /// Alignment of memory from [`Self::zeroed`], in bytes.
    pub const ALIGNMENT: usize = 512;

    /// Allocates `len` zeroed bytes on the heap, aligned to [`Self::ALIGNMENT`].
    pub fn zeroed(len: usize) -> Result<Self> {
        let layout = Layout::from_size_align(len.max(1), Self::ALIGNMENT).map_err(|_| {
            Error::new(ErrorKind::InvalidInput, "allocate region", "too large for an address space")
                .with("requested_bytes", len)
        })?;
        // SAFETY: the layout has a non-zero size.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })
            .unwrap_or_else(|| handle_alloc_error(layout));
        let owner = Arc::new(HeapBlock { start, layout });
        Ok(Self(Span { start, len, kind: RegionKind::Host, _owner: owner }))
    }

    /// Wraps memory that something else allocated: a mapping, an arena range, a framework's tensor.
    ///
    /// # Safety
    /// Until the last handle made from this one is gone, and as long as `owner` lives:
    /// - `start .. start + len` stays allocated memory of `kind`, and initialised if the CPU can
    ///   reach it;
    /// - nothing else in this process reads or writes those bytes, except through handles made
    ///   from this one;
    /// - another process or device writes them only while a transfer into this handle runs.
    pub unsafe fn from_foreign(
        start: NonNull<u8>,
        len: usize,
        kind: RegionKind,
        owner: Owner,
    ) -> Self {
        Self(Span { start, len, kind, _owner: owner })
    }

    /// Number of bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Where the bytes live.
    #[inline]
    pub fn kind(&self) -> RegionKind {
        self.0.kind
    }

    /// First address, for handing to an operating-system or device call.
    #[inline]
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.start.as_ptr()
    }

    /// First address as a number, for a descriptor or a log.
    #[inline]
    pub fn address(&self) -> usize {
        self.0.start.as_ptr() as usize
    }

    /// The bytes, if the CPU can reach them.
    pub fn as_mut_bytes(&mut self) -> Option<&mut [u8]> {
        // SAFETY: host memory that is allocated and initialised (constructors), and `&mut self` on
        // the unique handle excludes every other access.
        self.0
            .kind
            .is_host()
            .then(|| unsafe { std::slice::from_raw_parts_mut(self.0.start.as_ptr(), self.0.len) })
    }

    /// Cuts the region in two at `mid`; `None` if it is shorter.
    pub fn split_at(self, mid: usize) -> Option<(Self, Self)> {
        let rest = self.0.len.checked_sub(mid)?;
        // SAFETY: `mid <= len`, so the address stays within or one past the allocation.
        let second = unsafe { self.0.start.add(mid) };
        let tail = Span { start: second, len: rest, ..self.0.clone() };
        Some((Self(Span { len: mid, ..self.0 }), Self(tail)))
    }

    /// Puts two regions together that [`Self::split_at`] cut from one. Gives `self` and `next` back
    /// if they do not lie like that.
    pub fn join(self, next: Self) -> std::result::Result<Self, (Self, Self)> {
        self.0.join(next.0).map(Self).map_err(|(own, next)| (Self(own), Self(next)))
    }

    /// Keeps the first `len` bytes and lets go of the rest; `None` if it is shorter.
    #[must_use]
    pub fn truncate(self, len: usize) -> Option<Self> {
        (len <= self.0.len).then(|| Self(Span { len, ..self.0 }))
    }

    /// Keeps `also` alive as long as the region or anything made from it, and drops it after the
    /// memory itself: a pool slot's ticket, or a guard that tells when the memory went back.
    #[must_use]
    pub fn keeping(self, also: Owner) -> Self {
        Self(self.0.keeping(also))
    }

    /// Ends writing: from here on the bytes are only read.
    #[inline]
    pub fn freeze(self) -> RegionSlice {
        RegionSlice(self.0)
    }
}

impl RegionMut {
    /// Host memory that says it is device memory: what a transport without device support must
    /// refuse, for the conformance suite.
    pub(crate) fn pretended_device(len: usize) -> Result<Self> {
        let region = Self::zeroed(len)?;
        Ok(Self(Span { kind: RegionKind::Cuda { device: 0 }, ..region.0 }))
    }
}

/// A source whose bytes arrive when its ready event is waited for, for the conformance suite.
///
/// The slice shows zeros before. The contract forbids reading it before [`ReadyEvent::wait`]
/// returns; a transport that does so sees the zeros and fails its case.
pub(crate) struct LateSource {
    region: RegionSlice,
    bytes: Vec<u8>,
    delay: Duration,
}

impl LateSource {
    /// A source of `bytes`, which take `delay` to arrive.
    pub(crate) fn new(bytes: Vec<u8>, delay: Duration) -> Result<Self> {
        Ok(Self { region: RegionMut::zeroed(bytes.len())?.freeze(), bytes, delay })
    }

    /// The memory that the bytes arrive in.
    pub(crate) fn region(&self) -> RegionSlice {
        self.region.clone()
    }
}

impl ReadyEvent for LateSource {
    fn wait(&self, timeout: Duration) -> Result<()> {
        std::thread::sleep(self.delay.min(timeout));
        if self.delay > timeout {
            return Err(Error::new(ErrorKind::Timeout, "wait for source", "not ready in time"));
        }
        for (at, &byte) in self.bytes.iter().enumerate() {
            // SAFETY: `at < bytes.len() == region.len()`, so the address stays inside.
            let place = unsafe { self.region.0.start.add(at) };
            // SAFETY: the byte is allocated, initialised heap memory that `region` keeps alive, and
            // is at all times written atomically, here. Whoever keeps the contract reads it only
            // after this function returned.
            let place = unsafe { AtomicU8::from_ptr(place.as_ptr()) };
            place.store(byte, Ordering::Release);
        }
        Ok(())
    }
}

impl fmt::Debug for LateSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LateSource").field("len", &self.bytes.len()).finish_non_exhaustive()
    }
}

impl RegionSlice {
    /// Wraps memory that something else allocated and that is only read from here on.
    ///
    /// # Safety
    /// Until the last clone of this handle is gone, and as long as `owner` lives,
    /// `start .. start + len` stays allocated memory of `kind`, initialised if the CPU can reach
    /// it, and nobody writes it. The one exception is a source that is published with
    /// [`Ready::After`](crate::Ready::After): it may be written until that event has happened, and
    /// nobody reads it before.
    pub unsafe fn from_foreign(
        start: NonNull<u8>,
        len: usize,
        kind: RegionKind,
        owner: Owner,
    ) -> Self {
        Self(Span { start, len, kind, _owner: owner })
    }

    /// Stands for `len` bytes that do not exist yet and that nobody can reach: the tensors of a
    /// publication that is [written in place](crate::Publication::written).
    pub fn unwritten(len: usize) -> Self {
        let (start, kind) = (NonNull::dangling(), RegionKind::Unwritten);
        Self(Span { start, len, kind, _owner: Arc::new(()) })
    }

    /// Copies `bytes` to the heap.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut region = RegionMut::zeroed(bytes.len()).expect("as long as an existing slice");
        region.as_mut_bytes().expect("heap memory").copy_from_slice(bytes);
        region.freeze()
    }

    /// Number of bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Where the bytes live.
    #[inline]
    pub fn kind(&self) -> RegionKind {
        self.0.kind
    }

    /// First address, for handing to an operating-system or device call.
    pub fn as_ptr(&self) -> *const u8 {
        self.0.start.as_ptr()
    }

    /// First address as a number, for a descriptor or a log.
    #[inline]
    pub fn address(&self) -> usize {
        self.0.start.as_ptr() as usize
    }

    /// The bytes, if the CPU can reach them.
    pub fn as_bytes(&self) -> Option<&[u8]> {
        // SAFETY: host memory that is allocated and initialised (constructors), and nobody writes
        // it while a RegionSlice exists.
        self.0
            .kind
            .is_host()
            .then(|| unsafe { std::slice::from_raw_parts(self.0.start.as_ptr(), self.0.len) })
    }

    /// Keeps `also` alive as long as this handle and those made from it; see
    /// [`RegionMut::keeping`].
    #[must_use]
    pub fn keeping(self, also: Owner) -> Self {
        Self(self.0.keeping(also))
    }

    /// Puts two slices together that were cut from one: the same owner, end to end. Gives `self`
    /// and `next` back if they do not lie like that.
    pub fn join(self, next: Self) -> std::result::Result<Self, (Self, Self)> {
        self.0.join(next.0).map(Self).map_err(|(own, next)| (Self(own), Self(next)))
    }

    /// The bytes in `range`; `None` if it does not lie inside.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        let len = range.end.checked_sub(range.start)?;
        if range.end > self.0.len {
            return None;
        }
        if self.0.kind == RegionKind::Unwritten {
            return Some(Self(Span { len, ..self.0.clone() })); // there is no address to move
        }
        // SAFETY: `start <= end <= len`, so the address stays within or one past the allocation.
        let start = unsafe { self.0.start.add(range.start) };
        Some(Self(Span { start, len, ..self.0.clone() }))
    }
}

impl AsRef<[u8]> for RegionSlice {
    /// The bytes.
    ///
    /// # Panics
    /// On device memory, which the CPU cannot reach; [`Self::as_bytes`] asks first.
    fn as_ref(&self) -> &[u8] {
        self.as_bytes().expect("host memory")
    }
}

fn debug(name: &str, span: &Span, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.debug_struct(name).field("kind", &span.kind).field("len", &span.len).finish_non_exhaustive()
}

impl fmt::Debug for RegionMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug("RegionMut", &self.0, f)
    }
}

impl fmt::Debug for RegionSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug("RegionSlice", &self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    struct Guard(Arc<AtomicUsize>, Vec<u8>);

    impl Drop for Guard {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn write_split_freeze_slice() {
        let mut region = RegionMut::zeroed(1000).unwrap();
        assert_eq!(region.address() % RegionMut::ALIGNMENT, 0);
        region.as_mut_bytes().unwrap()[700] = 7;
        let (head, tail) = region.split_at(700).unwrap();
        assert_eq!((head.len(), tail.len()), (700, 300));
        let tail = tail.freeze();
        drop(head);
        assert_eq!(tail.slice(0..1).unwrap().as_bytes().unwrap(), [7]);
        assert!(tail.slice(0..301).is_none());
        #[allow(clippy::reversed_empty_ranges)]
        {
            assert!(tail.slice(2..1).is_none());
        }
    }

    #[test]
    fn the_owner_lives_as_long_as_the_last_view() {
        let drops = Arc::new(AtomicUsize::new(0));
        let mut guard = Guard(drops.clone(), vec![3; 64]);
        let start = NonNull::new(guard.1.as_mut_ptr()).unwrap();
        // SAFETY: the guard owns the vector, and nothing else touches it from here on.
        let region =
            unsafe { RegionMut::from_foreign(start, 64, RegionKind::Host, Arc::new(guard)) };
        let view = region.freeze().slice(8..16).unwrap();
        assert_eq!(drops.load(Ordering::SeqCst), 0);
        assert_eq!(view.as_bytes().unwrap(), [3; 8]);
        drop(view);
        assert_eq!(drops.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_kept_owner_lives_as_long_as_the_last_view() {
        let drops = Arc::new(AtomicUsize::new(0));
        let guard: Owner = Arc::new(Guard(drops.clone(), Vec::new()));
        let (head, tail) = RegionMut::zeroed(8).unwrap().keeping(guard).split_at(4).unwrap();
        let view = tail.freeze();
        drop(head);
        assert_eq!(drops.load(Ordering::SeqCst), 0);
        drop(view);
        assert_eq!(drops.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn device_memory_is_never_handed_to_the_cpu() {
        let kind = RegionKind::Cuda { device: 0 };
        // SAFETY: no byte is ever touched, which the test shows.
        let mut region =
            unsafe { RegionMut::from_foreign(NonNull::dangling(), 8, kind, Arc::new(())) };
        assert!(region.as_mut_bytes().is_none());
        assert!(region.freeze().as_bytes().is_none());
    }

    #[test]
    fn only_what_was_cut_apart_is_joined() {
        let mut region = RegionMut::zeroed(10).unwrap();
        region.as_mut_bytes().unwrap()[9] = 9;
        let (head, tail) = region.split_at(4).unwrap();
        let whole = head.freeze().join(tail.freeze()).unwrap();
        assert_eq!((whole.len(), whole.as_bytes().unwrap()[9]), (10, 9));
        let (head, middle) = (whole.slice(0..4).unwrap(), whole.slice(5..6).unwrap());
        let (head, _) = head.join(middle).unwrap_err();
        let (_, _) = head.clone().join(RegionSlice::copy_of(&[1])).unwrap_err();
        let (_, _) = whole.slice(4..6).unwrap().join(head).unwrap_err();
    }

    #[test]
    fn what_is_not_written_yet_cannot_be_read() {
        let slice = RegionSlice::unwritten(8);
        assert_eq!((slice.len(), slice.as_bytes()), (8, None));
        let part = slice.slice(2..5).unwrap();
        assert_eq!((part.len(), part.as_bytes()), (3, None));
        assert!(!slice.kind().is_host());
    }

    #[test]
    fn empty_regions_are_fine_and_absurd_ones_are_refused() {
        assert!(RegionMut::zeroed(0).unwrap().is_empty());
        assert!(RegionMut::zeroed(usize::MAX).is_err());
    }
}
