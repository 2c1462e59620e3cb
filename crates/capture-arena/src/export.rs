//! Which addresses peers may read: the published objects, found by address and pinned while read.

use std::{
    collections::BTreeMap,
    fmt,
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::RwLock;
use transport_core::{ArenaOffset, Error, ErrorKind, RegionSlice, RemoteAddr, Sequence};

use crate::{Backing, pin::PinCell};

/// Readable ranges by offset. The owner writes it, any number of readers look things up.
pub(crate) struct ExportIndex {
    objects: RwLock<BTreeMap<u64, Arc<Exported>>>,
    last_seq: AtomicU64, // of everything published so far
    reclaim: Box<dyn Fn(u32) + Send + Sync>,
}

/// One readable object.
pub(crate) struct Exported {
    pub(crate) cell: PinCell,
    len: u64,
    object: u32,
}

impl ExportIndex {
    /// `reclaim` is told, once, each retired object whose last read has ended.
    pub(crate) fn new(reclaim: impl Fn(u32) + Send + Sync + 'static) -> Self {
        let (objects, last_seq) = (RwLock::default(), AtomicU64::new(0));
        Self { objects, last_seq, reclaim: Box::new(reclaim) }
    }

    /// Makes objects readable, all at once. `last_seq` is the newest life among them.
    pub(crate) fn insert(
        &self,
        batch: impl IntoIterator<Item = (ArenaOffset, Arc<Exported>)>,
        last_seq: u64,
    ) {
        self.last_seq.store(last_seq, Ordering::Release);
        let mut objects = self.objects.write();
        for (offset, exported) in batch {
            objects.insert(offset.0, exported);
        }
    }

    /// Turns new reads of the object away. True if none is running.
    pub(crate) fn retire(&self, offset: ArenaOffset) -> bool {
        let exported = self.objects.write().remove(&offset.0);
        exported.expect("only exported objects are retired").cell.retire()
    }

    /// Starts a read of `len` bytes at `offset`, all inside one readable object.
    pub(crate) fn pin(self: &Arc<Self>, offset: u64, len: u64) -> Result<Pin, &'static str> {
        if len == 0 {
            return Err("a read has at least one byte");
        }
        let objects = self.objects.read();
        let (start, exported) =
            objects.range(..=offset).next_back().ok_or("no published object lies there")?;
        let within = offset - start;
        if within >= exported.len {
            return Err("no published object lies there");
        }
        if len > exported.len - within {
            return Err("the range leaves its object");
        }
        if !exported.cell.pin() {
            return Err("the object is being taken away");
        }
        Ok(Pin { exported: exported.clone(), index: self.clone() })
    }
}

impl Exported {
    pub(crate) fn new(object: u32, len: u64) -> Arc<Self> {
        Arc::new(Self { cell: PinCell::new(), len, object })
    }
}

/// What peers may read. Cheap to clone; every lookup is safe against a concurrent free.
#[derive(Clone)]
pub struct ExportTable {
    pub(crate) index: Arc<ExportIndex>,
    pub(crate) backing: Backing,
    pub(crate) base: RemoteAddr,
}

impl ExportTable {
    /// Keeps `len` bytes at `address` from being reused until the returned handle is dropped.
    ///
    /// The whole range must lie inside one object that is published, or still held by somebody.
    pub fn pin(&self, address: RemoteAddr, len: u64) -> Result<PinnedRange, ExportError> {
        let refuse = |reason| ExportError { address, len, reason };
        let offset =
            address.0.checked_sub(self.base.0).ok_or(refuse("it lies before the arena"))?;
        let pin = self.index.pin(offset, len).map_err(refuse)?;
        Ok(PinnedRange { pin, backing: self.backing.clone(), offset: ArenaOffset(offset), len })
    }

    /// Whether a readable object lies there, from its first byte to its last.
    pub fn is_object(&self, address: RemoteAddr, len: u64) -> bool {
        let offset = address.0.checked_sub(self.base.0);
        let objects = self.index.objects.read();
        offset.and_then(|offset| objects.get(&offset)).is_some_and(|object| object.len == len)
    }

    /// The newest life published so far; what is published from now on has a later one.
    pub fn last_sequence(&self) -> Sequence {
        Sequence(self.index.last_seq.load(Ordering::Acquire))
    }

    /// Number of readable objects.
    pub fn len(&self) -> usize {
        self.index.objects.read().len()
    }

    /// Whether nothing is readable.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Why a range may not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportError {
    /// First address asked for.
    pub address: RemoteAddr,
    /// Bytes asked for.
    pub len: u64,
    /// What is wrong with it.
    pub reason: &'static str,
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x} may not be read: {}", self.len, self.address.0, self.reason)
    }
}

impl std::error::Error for ExportError {}

impl From<ExportError> for Error {
    fn from(error: ExportError) -> Self {
        Self::new(ErrorKind::OutOfRange, "read arena", error.reason)
            .with("address", format_args!("{:#x}", error.address.0))
            .with("bytes", error.len)
            .remedy("fetch with a current descriptor, and release it only after reading")
    }
}

/// A running read: these bytes do not change until it is dropped.
pub struct PinnedRange {
    pin: Pin,
    backing: Backing,
    offset: ArenaOffset,
    len: u64,
}

/// A running read without its bytes: the range is not reused until it is dropped.
pub struct Pin {
    exported: Arc<Exported>,
    index: Arc<ExportIndex>,
}

impl PinnedRange {
    /// The same bytes as a counted view; the pin lasts as long as the last view of them.
    pub fn into_slice(self) -> RegionSlice {
        let Self { pin, backing, offset, len } = self;
        backing.view(offset, len, Arc::new((pin, backing.clone())))
    }
}

impl PinnedRange {
    /// The bytes; none in device memory, which the CPU cannot reach.
    pub fn as_bytes(&self) -> Option<&[u8]> {
        self.backing.bytes(self.offset, self.len)
    }
}

impl Deref for PinnedRange {
    type Target = [u8];

    /// The bytes.
    ///
    /// # Panics
    /// In device memory; [`Self::as_bytes`] asks first.
    fn deref(&self) -> &[u8] {
        self.as_bytes().expect("host memory")
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if self.exported.cell.unpin() {
            (self.index.reclaim)(self.exported.object);
        }
    }
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pin").field("object", &self.exported.object).finish_non_exhaustive()
    }
}

impl fmt::Debug for ExportIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExportIndex").field("objects", &self.objects.read().len()).finish()
    }
}

impl fmt::Debug for ExportTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExportTable")
            .field("base", &self.base)
            .field("objects", &self.len())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for PinnedRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedRange")
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
