//! The memory of an arena: private, shared with other processes of the same user, or a device's.
//!
//! Besides `cuda` the only module of the crate with `unsafe` code. It relies on one fact that the rest of the
//! crate keeps: bytes are written only through the region of the one live
//! [`ArenaRange`](crate::ArenaRange) that covers them, and that region is gone before the range
//! becomes readable; they are read only while the range is pinned or held.
#![allow(unsafe_code)]

mod sealed;

use std::{
    fmt,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::PathBuf,
    ptr::{NonNull, null_mut},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use rustix::{
    fs::{FileType, MemfdFlags, Mode, OFlags, SealFlags},
    mm::{Advice, MapFlags, ProtFlags},
};
use transport_core::{
    ArenaOffset, ByteSize, Error, ErrorKind, MapMark, RegionKind, RegionMut, RegionSlice, Result,
    memory::Owner,
};

pub use sealed::SealedBacking;

use crate::{limits, suballoc::footprint};

/// Seals that a shared arena must carry: its size never changes, so a reader never faults.
const SIZE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// One block of memory. Cloning copies no bytes; the last clone gives the memory back.
#[derive(Clone)]
pub struct Backing(Arc<Block>);

struct Block {
    memory: Memory,
    kind: RegionKind,
    shared: Option<(OwnedFd, SharedHandle)>,
}

enum Memory {
    Mapped(Mapping),
    #[cfg(feature = "cuda")]
    Device(crate::cuda::DeviceBlock),
}

impl Memory {
    fn start(&self) -> u64 {
        match self {
            Self::Mapped(map) => map.start.as_ptr() as u64,
            #[cfg(feature = "cuda")]
            Self::Device(block) => block.address().0,
        }
    }

    fn len(&self) -> u64 {
        match self {
            Self::Mapped(map) => map.len as u64,
            #[cfg(feature = "cuda")]
            Self::Device(block) => block.len(),
        }
    }

    /// The address of a range.
    ///
    /// # Panics
    /// If it does not lie inside, which the callers have checked.
    fn at(&self, offset: u64, len: u64) -> NonNull<u8> {
        match self {
            Self::Mapped(map) => map.at(offset, len),
            #[cfg(feature = "cuda")]
            Self::Device(block) => {
                let end = offset.checked_add(len).filter(|end| *end <= block.len());
                assert!(end.is_some(), "range outside the block");
                let address = block.address().offset(offset).0 as *mut u8;
                NonNull::new(address).expect("device memory is not at the null address")
            }
        }
    }
}

/// Where other processes of the same host and user find a shared arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedHandle {
    /// Which boot of which host: the kernel's random id.
    pub boot_id: String,
    /// Process that owns the memory.
    pub pid: u32,
    /// File descriptor in that process.
    pub fd: u32,
    /// Device of the file.
    pub dev: u64,
    /// Inode of the file: tells this memory from whatever else carries pid and fd later.
    pub ino: u64,
    /// Size, which is sealed.
    pub bytes: u64,
}

impl Backing {
    /// Private memory of this process. The operating system provides pages on first touch.
    ///
    /// Rounds up to 512 bytes. Refuses 0 and more than the machine or the control group has left.
    pub fn heap(bytes: u64) -> Result<Self> {
        let len = checked_len(bytes)?;
        let map = Mapping::anonymous(len)?;
        Ok(Self(Arc::new(Block {
            memory: Memory::Mapped(map),
            kind: RegionKind::Host,
            shared: None,
        })))
    }

    /// Memory that other processes of the same user can map, through [`Self::shared_handle`].
    ///
    /// The file has no name, is not inherited by child programs, cannot be executed, and its size
    /// is sealed. Same size rules as [`Self::heap`].
    pub fn shared(bytes: u64) -> Result<Self> {
        Self::memfd(bytes, SIZE_SEALS)
    }

    /// Memory as from [`Self::shared`], to be written once and then [sealed](SealedBacking::seal).
    /// Others cannot map it before.
    pub fn sealable(bytes: u64) -> Result<Self> {
        Self::memfd(bytes, SIZE_SEALS.difference(SealFlags::SEAL))
    }

    fn memfd(bytes: u64, seals: SealFlags) -> Result<Self> {
        const OPERATION: &str = "create shared arena";
        let failed = |e: rustix::io::Errno| {
            Error::io(OPERATION, e.into()).with("bytes", bytes).remedy(
                "check the limit on open files and the memory of the control group, \
                 or use the heap backing with the tcp engine",
            )
        };
        let len = checked_len(bytes)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("featurestore-arena", flags | MemfdFlags::NOEXEC_SEAL)
            // Kernels before 6.3 know no such flag.
            .or_else(|_| rustix::fs::memfd_create("featurestore-arena", flags))
            .map_err(failed)?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(failed)?;
        let map = Mapping::of_file(&fd, len, true, OPERATION)?;
        // With the writable mapping made, no other process can make one. Since Linux 5.1.
        let _ = rustix::fs::fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE);
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(failed)?;
        let stat = rustix::fs::fstat(&fd).map_err(failed)?;
        let handle = SharedHandle {
            boot_id: limits::boot_id()?,
            pid: std::process::id(),
            fd: fd.as_raw_fd() as u32,
            dev: stat.st_dev,
            ino: stat.st_ino,
            bytes: len as u64,
        };
        let shared = Some((fd, handle));
        Ok(Self(Arc::new(Block { memory: Memory::Mapped(map), kind: RegionKind::Shared, shared })))
    }

    /// Memory of a device. Made and checked here, not at the first capture; see
    /// [`DeviceBlock::create`](crate::cuda::DeviceBlock::create).
    #[cfg(feature = "cuda")]
    pub fn device(
        device: &crate::cuda::Device,
        config: &crate::cuda::DeviceArenaConfig,
    ) -> Result<Self> {
        let block = crate::cuda::DeviceBlock::create(device, config)?;
        let kind = device.region_kind();
        Ok(Self(Arc::new(Block { memory: Memory::Device(block), kind, shared: None })))
    }

    /// The device memory; none for memory of the host.
    #[cfg(feature = "cuda")]
    pub fn device_block(&self) -> Option<&crate::cuda::DeviceBlock> {
        match &self.0.memory {
            Memory::Device(block) => Some(block),
            Memory::Mapped(_) => None,
        }
    }

    /// Takes all of the memory now, on up to `threads` threads, rather than page by page at its first
    /// touch, which costs the first captures several times what they write. What is in it stays.
    ///
    /// Kernels before 5.14 cannot, and device memory is taken already: then nothing happens.
    ///
    /// # Errors
    /// What the operating system says if the memory is not to be had.
    pub fn populate(&self, threads: usize) -> Result<()> {
        match &self.0.memory {
            Memory::Mapped(map) => map.populate(threads),
            #[cfg(feature = "cuda")]
            Memory::Device(_) => Ok(()),
        }
    }

    /// Size in bytes; a multiple of 512.
    pub fn bytes_len(&self) -> u64 {
        self.0.memory.len()
    }

    /// First address.
    pub fn address(&self) -> u64 {
        self.0.memory.start()
    }

    /// Where it lies, and whether other processes of the host can map it.
    pub fn kind(&self) -> RegionKind {
        self.0.kind
    }

    /// How other processes find it; none for private memory.
    pub fn shared_handle(&self) -> Option<&SharedHandle> {
        self.0.shared.as_ref().map(|(_, handle)| handle)
    }

    /// Whether some process still maps this memory under `mark`.
    ///
    /// True also when the kernel does not tell: memory that may be seen is not given out again.
    pub(crate) fn is_mapped_by(&self, mark: MapMark) -> bool {
        self.0.shared.as_ref().is_some_and(|(fd, _)| locks::is_locked(fd, mark).unwrap_or(true))
    }

    /// A region to write. The caller owns the range and has no other region of it; `owner` keeps
    /// the range.
    pub(crate) fn region(&self, offset: ArenaOffset, len: u64, owner: Owner) -> RegionMut {
        let start = self.0.memory.at(offset.0, len);
        // SAFETY: inside the mapping, which is zeroed or written memory, or inside the device's
        // block, and which `owner` keeps alive; the range is the caller's alone (module docs).
        unsafe { RegionMut::from_foreign(start, len as usize, self.0.kind, owner) }
    }

    /// A view of bytes that nobody writes as long as `owner` lives.
    pub(crate) fn view(&self, offset: ArenaOffset, len: u64, owner: Owner) -> RegionSlice {
        let start = self.0.memory.at(offset.0, len);
        // SAFETY: as in `region`, but the range is published and pinned (module docs).
        unsafe { RegionSlice::from_foreign(start, len as usize, self.0.kind, owner) }
    }

    /// Bytes of a published range that is pinned at least as long as the borrow; none in device
    /// memory, which the CPU cannot reach.
    pub(crate) fn bytes(&self, offset: ArenaOffset, len: u64) -> Option<&[u8]> {
        if !self.0.kind.is_host() {
            return None;
        }
        let start = self.0.memory.at(offset.0, len);
        // SAFETY: inside the mapping; published and pinned, so nobody writes (module docs).
        Some(unsafe { std::slice::from_raw_parts(start.as_ptr(), len as usize) })
    }
}

/// Another process's arena, mapped read-only.
#[derive(Clone)]
pub struct MappedBacking(Arc<Mapping>);

impl MappedBacking {
    /// Maps the memory that `handle` describes, and marks it as mapped for as long as it is.
    ///
    /// The publisher sees the mark wherever this process runs and whatever becomes of it: it goes
    /// with the last mapping, also of children that this process has forked.
    ///
    /// Refuses a handle of another host or boot, of a process or descriptor that is gone or is now
    /// something else, and memory whose size is not sealed or not as described.
    pub fn open(handle: &SharedHandle, mark: MapMark) -> Result<Self> {
        let (fd, len) = open_shared(handle, SIZE_SEALS)?;
        locks::lock(&fd, mark).map_err(|e| {
            Error::io(MAP, e)
                .with("pid", handle.pid)
                .remedy("the kernel cannot mark the arena as mapped: use the tcp engine")
        })?;
        // The mapping keeps the open file, and with it the lock.
        Ok(Self(Arc::new(Mapping::of_file(&fd, len, false, MAP)?)))
    }

    /// Size in bytes.
    pub fn bytes_len(&self) -> u64 {
        self.0.len as u64
    }

    /// `len` bytes at `offset`; `None` if they do not lie inside.
    ///
    /// # Safety
    /// As long as `owner` lives, a clone of this mapping does, and nobody writes the range: it is
    /// frozen, or the publisher counts this process, under the mark that the arena was mapped
    /// with, among the holders of the object that the range lies in.
    pub unsafe fn view(&self, offset: ArenaOffset, len: u64, owner: Owner) -> Option<RegionSlice> {
        if offset.0.checked_add(len)? > self.bytes_len() {
            return None;
        }
        let start = self.0.at(offset.0, len);
        // SAFETY: inside a mapping that cannot shrink and that the owner keeps; the publisher
        // writes a range only while nobody holds it, and the owner keeps the hold.
        Some(unsafe { RegionSlice::from_foreign(start, len as usize, RegionKind::Shared, owner) })
    }
}

const MAP: &str = "map shared arena";

/// Opens memory that another process shares, and checks that it is what the handle describes and
/// has the seals; also its length.
fn open_shared(handle: &SharedHandle, needed: SealFlags) -> Result<(OwnedFd, usize)> {
    let refuse = |kind, why: &'static str| {
        Error::new(kind, MAP, why).with("pid", handle.pid).with("fd", handle.fd)
    };
    let boot_id = limits::boot_id()?;
    if handle.boot_id != boot_id {
        return Err(refuse(ErrorKind::Unsupported, "the arena is on another host or boot")
            .with("expected", &handle.boot_id)
            .with("found", boot_id)
            .remedy("use the tcp engine for servers on other hosts"));
    }
    let path = PathBuf::from(format!("/proc/{}/fd/{}", handle.pid, handle.fd));
    let gone = "the process or its arena is gone";
    // A path first: whatever is there by now is looked at before it is opened.
    let place = rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(
        |e| match e {
            rustix::io::Errno::NOENT | rustix::io::Errno::SRCH => refuse(ErrorKind::PeerGone, gone)
                .remedy("ask the server for a new descriptor; it has restarted or closed"),
            rustix::io::Errno::ACCESS | rustix::io::Errno::PERM => {
                refuse(ErrorKind::PermissionDenied, "not allowed to look into the process").remedy(
                    "run server and trainer as the same user and in the same container, \
                         or use the tcp engine",
                )
            }
            other => Error::io(MAP, other.into()).with("path", path.display()),
        },
    )?;
    let stat = rustix::fs::fstat(&place).map_err(|e| Error::io(MAP, e.into()))?;
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !regular || (stat.st_dev, stat.st_ino) != (handle.dev, handle.ino) {
        return Err(refuse(ErrorKind::PeerGone, "something else has taken the arena's place")
            .with("expected", format_args!("inode {}:{}", handle.dev, handle.ino))
            .with("found", format_args!("inode {}:{}", stat.st_dev, stat.st_ino))
            .remedy("ask the server for a new descriptor; it has restarted or closed"));
    }
    let again = format!("/proc/self/fd/{}", place.as_raw_fd());
    let fd = rustix::fs::open(again, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| Error::io(MAP, e.into()).with("path", path.display()))?;
    let seals = rustix::fs::fcntl_get_seals(&fd).unwrap_or(SealFlags::empty());
    if !seals.contains(needed) {
        return Err(refuse(ErrorKind::Protocol, "the arena's size is not sealed")
            .remedy("only memory made by a capture server can be mapped"));
    }
    if stat.st_size as u64 != handle.bytes || handle.bytes == 0 {
        return Err(refuse(ErrorKind::Protocol, "the arena is not as large as described")
            .with("expected", handle.bytes)
            .with("found", stat.st_size));
    }
    let len = usize::try_from(handle.bytes)
        .map_err(|_| refuse(ErrorKind::Protocol, "too large for an address space"))?;
    Ok((fd, len))
}

fn checked_len(bytes: u64) -> Result<usize> {
    const OPERATION: &str = "create arena";
    if bytes == 0 {
        return Err(Error::new(
            ErrorKind::ConfigInvalid,
            OPERATION,
            "an arena has at least one byte",
        )
        .remedy("set the arena's size, such as 32GiB; it is never guessed"));
    }
    let rounded = footprint(bytes);
    let available = limits::available_memory();
    if rounded > available {
        let show = |bytes| {
            ByteSize::new(bytes).map_or_else(|| "2^63 or more".into(), |b| format!("{b:#}"))
        };
        return Err(Error::new(
            ErrorKind::ConfigInvalid,
            OPERATION,
            "the arena is larger than the memory that is left",
        )
        .with("requested", show(bytes))
        .with("available", show(available))
        .remedy("choose a smaller arena, or raise the memory limit of the control group"));
    }
    usize::try_from(rounded).map_err(|_| {
        Error::new(ErrorKind::ConfigInvalid, OPERATION, "too large for an address space")
    })
}

/// A mapping that is taken down with its last user.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory; who may access which bytes is decided by the handles around it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn anonymous(len: usize) -> Result<Self> {
        let protect = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start = unsafe { rustix::mm::mmap_anonymous(null_mut(), len, protect, flags) };
        Self::checked(start, len, "create arena")
    }

    fn of_file(fd: impl AsFd, len: usize, write: bool, operation: &'static str) -> Result<Self> {
        let write = if write { ProtFlags::WRITE } else { ProtFlags::empty() };
        let (protect, flags) = (ProtFlags::READ | write, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a fresh mapping at an address of the kernel's choice. The file's size is sealed,
        // or about to be by its only owner, so no access faults.
        let start = unsafe { rustix::mm::mmap(null_mut(), len, protect, flags, fd, 0) };
        Self::checked(start, len, operation)
    }

    fn checked(
        start: rustix::io::Result<*mut std::ffi::c_void>,
        len: usize,
        operation: &'static str,
    ) -> Result<Self> {
        let start = start.map_err(|e| Error::io(operation, e.into()).with("bytes", len))?;
        let start = NonNull::new(start.cast()).ok_or_else(|| {
            Error::new(ErrorKind::Unexpected, operation, "mapped at the null address")
        })?;
        let this = Self { start, len };
        this.advise();
        Ok(this)
    }

    /// Asks for huge pages, which make the first touch of 79 MB samples several times cheaper.
    fn advise(&self) {
        let start = self.start.as_ptr().cast();
        // SAFETY: our own mapping; the advice changes no contents. A refusal costs only speed.
        let _ = unsafe { rustix::mm::madvise(start, self.len, Advice::LinuxHugepage) };
    }

    /// Takes every page of a writable mapping.
    fn populate(&self, threads: usize) -> Result<()> {
        /// Bytes that one call takes: whole pages of any size, and soon done.
        const PIECE: usize = 64 << 20;
        let next = AtomicUsize::new(0);
        let take = || {
            loop {
                let at = next.fetch_add(PIECE, Ordering::Relaxed);
                if at >= self.len {
                    return Ok(());
                }
                let len = PIECE.min(self.len - at);
                let start = self.at(at as u64, len as u64).as_ptr().cast();
                // SAFETY: our own writable mapping; the advice changes no contents.
                match unsafe { rustix::mm::madvise(start, len, Advice::LinuxPopulateWrite) } {
                    Ok(()) => {}
                    Err(rustix::io::Errno::INVAL) => return Ok(()), // an older kernel
                    Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {
                        // Some pages are left to their first touch.
                    }
                    Err(e) => return Err(e),
                }
            }
        };
        let taken = std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(take)).collect();
            let own = take();
            others.into_iter().fold(own, |all, it| all.and(it.join().expect("it cannot panic")))
        });
        taken.map_err(|e| {
            Error::io("take the arena's memory", e.into())
                .with("bytes", self.len)
                .remedy("choose a smaller arena, or raise the memory limit of the control group")
        })
    }

    /// The address of a range.
    ///
    /// # Panics
    /// If it does not lie inside, which the callers have checked.
    fn at(&self, offset: u64, len: u64) -> NonNull<u8> {
        let end = offset.checked_add(len).filter(|end| *end <= self.len as u64);
        assert!(end.is_some(), "range outside the mapping");
        // SAFETY: just checked to stay within or one past the mapping.
        unsafe { self.start.add(offset as usize) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by the constructor with this length, and every handle into it keeps this
        // owner alive.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Locks that belong to an open file and not to a process. They end with the last descriptor or
/// mapping of that opening, so that a lock taken for a mapping tells whether it still exists.
mod locks {
    use std::{
        io,
        os::fd::{AsRawFd, OwnedFd},
    };

    use transport_core::MapMark;

    /// Locks the byte of `mark`, shared.
    pub(super) fn lock(fd: &OwnedFd, mark: MapMark) -> io::Result<()> {
        call(fd, libc::F_OFD_SETLK, &mut of(mark, libc::F_RDLCK))
    }

    /// Whether another opening of the file has locked the byte of `mark`.
    pub(super) fn is_locked(fd: &OwnedFd, mark: MapMark) -> io::Result<bool> {
        let mut lock = of(mark, libc::F_WRLCK);
        call(fd, libc::F_OFD_GETLK, &mut lock)?;
        Ok(i32::from(lock.l_type) != libc::F_UNLCK)
    }

    fn of(mark: MapMark, kind: i32) -> libc::flock {
        libc::flock {
            l_type: kind as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: mark.0.min(MapMark::MAX.0) as libc::off_t, // far beyond the end, which is fine
            l_len: 1,
            l_pid: 0, // asked for by the kernel
        }
    }

    fn call(fd: &OwnedFd, command: i32, lock: &mut libc::flock) -> io::Result<()> {
        // SAFETY: an open descriptor, and a lock that lives for the call, which these two commands
        // read and fill.
        match unsafe { libc::fcntl(fd.as_raw_fd(), command, std::ptr::from_mut(lock)) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backing")
            .field("kind", &self.0.kind)
            .field("bytes", &self.bytes_len())
            .field("shared", &self.shared_handle())
            .finish()
    }
}

impl fmt::Debug for MappedBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MappedBacking").field("bytes", &self.bytes_len()).finish()
    }
}
