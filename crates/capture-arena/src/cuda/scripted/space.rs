//! Simulated memory: files that stand for physical memory, and addresses that only devices have.

use std::{
    collections::{BTreeMap, HashMap},
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    ptr::{NonNull, copy, null_mut},
    sync::{Arc, Weak},
};

use rustix::{
    fs::{MemfdFlags, Mode, OFlags},
    mm::{MapFlags, ProtFlags},
};

use crate::cuda::{Access, CudaError, CudaResult, DevicePtr, HANDLE_BYTES, HandleBytes};

/// Addresses of one stand-in: more than any test uses, since none is given out twice.
const WINDOW: u64 = 1 << 40;
/// Unused addresses between two blocks.
const GAP: u64 = 2 << 20;
const FILE: &str = "scripted-cuda-";

/// All memory that one stand-in knows.
pub(super) struct Space {
    instance: u64,
    window: Window,
    next: u64,
    blocks: BTreeMap<u64, Block>,
    physical: HashMap<u64, (Arc<Physical>, bool)>, // and whether this stand-in made it
    last_physical: u64,
    made: Vec<(u32, Weak<Physical>)>,
    host: HashMap<u64, u64>, // pinned, by address: length
}

/// What lies at some addresses.
struct Block {
    len: u64,
    sort: Sort,
    memory: Option<Arc<Physical>>,
    device: u32,
    access: Option<Access>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sort {
    Plain,
    Reserved,
    Opened,
}

struct Window(NonNull<u8>);

// SAFETY: addresses that nobody can access.
unsafe impl Send for Window {}

/// Simulated physical memory: a file, mapped where only the stand-in looks.
pub(super) struct Physical {
    fd: OwnedFd,
    ino: u64,
    start: NonNull<u8>,
    len: u64,
    device: u32, // that it is opened for
    home: u32,   // that it lies on
}

// SAFETY: plain shared memory, accessed under the stand-in's lock; what another stand-in does to
// it at the same time is as on a device.
unsafe impl Send for Physical {}
// SAFETY: as above.
unsafe impl Sync for Physical {}

impl Physical {
    fn create(len: u64, device: u32) -> CudaResult<Arc<Self>> {
        let out = |_| CudaError::new("cuMemCreate", CudaError::OUT_OF_MEMORY);
        // Whoever opens it has to find out where it lies.
        let name = format!("{FILE}{device}");
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).map_err(out)?;
        rustix::fs::ftruncate(&fd, len).map_err(out)?;
        Self::of(fd, device)
    }

    fn of(fd: OwnedFd, device: u32) -> CudaResult<Arc<Self>> {
        let bad = |_| CudaError::new("cuMemImportFromShareableHandle", CudaError::INVALID_VALUE);
        let stat = rustix::fs::fstat(&fd).map_err(bad)?;
        let len = stat.st_size as u64;
        let protect = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping, of a file that nobody shortens.
        let start = unsafe {
            rustix::mm::mmap(null_mut(), len as usize, protect, MapFlags::SHARED, &fd, 0)
        };
        let start = NonNull::new(start.map_err(bad)?.cast()).expect("not at the null address");
        let home = home_of(&fd).unwrap_or(device);
        Ok(Arc::new(Self { fd, ino: stat.st_ino, start, len, device, home }))
    }
}

/// The device that a file stands for memory of; none if it stands for none.
fn home_of(fd: &impl AsRawFd) -> Option<u32> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
    let (_, number) = link.to_str()?.split_once(FILE)?;
    number.split(' ').next()?.parse().ok()
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: mapped by the constructor with this length.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len as usize) };
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: mapped by the constructor with this length.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), WINDOW as usize) };
    }
}

impl Space {
    pub(super) fn new(instance: u64) -> Self {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping that nobody can access.
        let start = unsafe {
            rustix::mm::mmap_anonymous(null_mut(), WINDOW as usize, ProtFlags::empty(), flags)
        };
        let start = NonNull::new(start.expect("address space").cast()).expect("not null");
        Self {
            // Two processes count alike.
            instance: instance | u64::from(std::process::id()) << 32,
            next: (start.as_ptr() as u64).next_multiple_of(GAP) + GAP,
            window: Window(start),
            blocks: BTreeMap::new(),
            physical: HashMap::new(),
            last_physical: 0,
            made: Vec::new(),
            host: HashMap::new(),
        }
    }

    pub(super) fn used(&self, device: u32) -> u64 {
        let of_device = self.made.iter().filter(|(on, _)| *on == device);
        of_device.filter_map(|(_, memory)| memory.upgrade()).map(|memory| memory.len).sum()
    }

    pub(super) fn leaks(&self) -> Vec<String> {
        let blocks = self.blocks.iter();
        let mut leaks: Vec<String> = blocks
            .map(|(at, block)| format!("{:?} block of {} bytes at {at:#x}", block.sort, block.len))
            .collect();
        leaks.extend(self.physical.keys().map(|id| format!("physical memory {id}")));
        leaks.extend(self.host.keys().map(|at| format!("host memory at {at:#x}")));
        leaks
    }

    fn take(&mut self, len: u64) -> u64 {
        let at = self.next;
        self.next += len.next_multiple_of(GAP) + GAP;
        let end = self.window.0.as_ptr() as u64 + WINDOW;
        assert!(self.next < end, "the stand-in is out of addresses");
        at
    }

    pub(super) fn plain(&mut self, len: u64, device: u32) -> CudaResult<DevicePtr> {
        let memory = Physical::create(len, device)?;
        self.made.push((device, Arc::downgrade(&memory)));
        Ok(self.place(len, Sort::Plain, Some(memory), device))
    }

    fn place(
        &mut self,
        len: u64,
        sort: Sort,
        memory: Option<Arc<Physical>>,
        device: u32,
    ) -> DevicePtr {
        let at = self.take(len);
        let access = memory.is_some().then_some(Access::ReadWrite);
        self.blocks.insert(at, Block { len, sort, memory, device, access });
        DevicePtr(at)
    }

    fn remove(&mut self, call: &'static str, at: DevicePtr, sort: Sort) -> CudaResult<Block> {
        match self.blocks.get(&at.0) {
            Some(block) if block.sort == sort => Ok(self.blocks.remove(&at.0).expect("just seen")),
            _ => Err(CudaError::new(call, CudaError::INVALID_VALUE)),
        }
    }

    pub(super) fn free(&mut self, at: DevicePtr) -> CudaResult<()> {
        self.remove("cuMemFree", at, Sort::Plain).map(drop)
    }

    pub(super) fn close(&mut self, at: DevicePtr) -> CudaResult<()> {
        self.remove("cuIpcCloseMemHandle", at, Sort::Opened).map(drop)
    }

    pub(super) fn reserve(&mut self, len: u64) -> DevicePtr {
        self.place(len, Sort::Reserved, None, 0)
    }

    pub(super) fn unreserve(&mut self, at: DevicePtr, len: u64) -> CudaResult<()> {
        let invalid = || CudaError::new("cuMemAddressFree", CudaError::INVALID_VALUE);
        let block = self.blocks.get(&at.0).ok_or_else(invalid)?;
        if block.len != len || block.memory.is_some() {
            return Err(invalid());
        }
        self.remove("cuMemAddressFree", at, Sort::Reserved).map(drop)
    }

    pub(super) fn create(&mut self, len: u64, device: u32) -> CudaResult<u64> {
        let memory = Physical::create(len, device)?;
        self.made.push((device, Arc::downgrade(&memory)));
        Ok(self.know(memory, true))
    }

    fn know(&mut self, memory: Arc<Physical>, made: bool) -> u64 {
        self.last_physical += 1;
        self.physical.insert(self.last_physical, (memory, made));
        self.last_physical
    }

    pub(super) fn release(&mut self, id: u64) -> CudaResult<()> {
        let gone = self.physical.remove(&id).map(drop);
        gone.ok_or_else(|| CudaError::new("cuMemRelease", CudaError::INVALID_VALUE))
    }

    fn known(&self, call: &'static str, id: u64) -> CudaResult<&Arc<Physical>> {
        let known = self.physical.get(&id).map(|(memory, _)| memory);
        known.ok_or_else(|| CudaError::new(call, CudaError::INVALID_HANDLE))
    }

    pub(super) fn export_fd(&self, id: u64) -> CudaResult<OwnedFd> {
        const CALL: &str = "cuMemExportToShareableHandle";
        let copied = self.known(CALL, id)?.fd.try_clone();
        copied.map_err(|_| CudaError::new(CALL, CudaError::INVALID_VALUE))
    }

    pub(super) fn export_fabric(&self, id: u64) -> CudaResult<HandleBytes> {
        let memory = self.known("cuMemExportToShareableHandle", id)?;
        Ok(self.handle(*b"FABR", memory))
    }

    pub(super) fn import_fd(&mut self, fd: BorrowedFd<'_>, device: u32) -> CudaResult<u64> {
        let invalid = || CudaError::new("cuMemImportFromShareableHandle", CudaError::INVALID_VALUE);
        home_of(&fd).ok_or_else(invalid)?;
        let memory = Physical::of(fd.try_clone_to_owned().map_err(|_| invalid())?, device)?;
        Ok(self.know(memory, false))
    }

    pub(super) fn import_fabric(&mut self, handle: &HandleBytes, device: u32) -> CudaResult<u64> {
        let memory =
            self.open_handle("cuMemImportFromShareableHandle", *b"FABR", handle, device)?;
        Ok(self.know(memory, false))
    }

    pub(super) fn map(&mut self, at: DevicePtr, len: u64, id: u64) -> CudaResult<()> {
        let invalid = || CudaError::new("cuMemMap", CudaError::INVALID_VALUE);
        let memory = self.known("cuMemMap", id)?.clone();
        let block = self.blocks.get_mut(&at.0).ok_or_else(invalid)?;
        let fits = block.sort == Sort::Reserved && block.len == len && memory.len >= len;
        if !fits || block.memory.is_some() {
            return Err(invalid());
        }
        (block.device, block.memory) = (memory.device, Some(memory));
        Ok(())
    }

    pub(super) fn unmap(&mut self, at: DevicePtr, len: u64) -> CudaResult<()> {
        match self.blocks.get_mut(&at.0) {
            Some(block) if block.sort == Sort::Reserved && block.len == len => {
                block.access = None;
                let was = block.memory.take();
                was.map(drop).ok_or_else(|| CudaError::new("cuMemUnmap", CudaError::INVALID_VALUE))
            }
            _ => Err(CudaError::new("cuMemUnmap", CudaError::INVALID_VALUE)),
        }
    }

    pub(super) fn set_access(&mut self, at: DevicePtr, access: Access) -> CudaResult<()> {
        match self.blocks.get_mut(&at.0) {
            Some(block) if block.memory.is_some() => {
                block.access = Some(access);
                Ok(())
            }
            _ => Err(CudaError::new("cuMemSetAccess", CudaError::INVALID_VALUE)),
        }
    }

    pub(super) fn ipc_handle(&self, at: DevicePtr) -> CudaResult<HandleBytes> {
        match self.blocks.get(&at.0) {
            Some(Block { sort: Sort::Plain, memory: Some(memory), .. }) => {
                Ok(self.handle(*b"IPCH", memory))
            }
            _ => Err(CudaError::new("cuIpcGetMemHandle", CudaError::INVALID_VALUE)),
        }
    }

    pub(super) fn ipc_open(&mut self, handle: &HandleBytes, device: u32) -> CudaResult<DevicePtr> {
        let memory = self.open_handle("cuIpcOpenMemHandle", *b"IPCH", handle, device)?;
        Ok(self.place(memory.len, Sort::Opened, Some(memory), device))
    }

    fn handle(&self, magic: [u8; 4], memory: &Physical) -> HandleBytes {
        let mut handle = [0; HANDLE_BYTES];
        handle[..4].copy_from_slice(&magic);
        handle[4..8].copy_from_slice(&std::process::id().to_le_bytes());
        handle[8..12].copy_from_slice(&memory.fd.as_raw_fd().to_le_bytes());
        handle[16..24].copy_from_slice(&memory.ino.to_le_bytes());
        handle[24..32].copy_from_slice(&self.instance.to_le_bytes());
        handle
    }

    fn open_handle(
        &self,
        call: &'static str,
        magic: [u8; 4],
        handle: &HandleBytes,
        device: u32,
    ) -> CudaResult<Arc<Physical>> {
        let gone = || CudaError::new(call, CudaError::MAP_FAILED);
        let number = |at: usize| {
            let bytes = handle[at..at + 8].try_into().expect("eight bytes");
            u64::from_le_bytes(bytes)
        };
        if handle[..4] != magic {
            return Err(CudaError::new(call, CudaError::INVALID_VALUE));
        }
        if magic == *b"IPCH" && number(24) == self.instance {
            return Err(CudaError::new(call, CudaError::INVALID_CONTEXT));
        }
        let (pid, fd) = (number(4) as u32, number(8) as u32);
        let path = format!("/proc/{pid}/fd/{fd}");
        let file = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let memory = Physical::of(file.map_err(|_| gone())?, device).map_err(|_| gone())?;
        if memory.ino == number(16) { Ok(memory) } else { Err(gone()) }
    }

    /// The device that what is at an address lies on, whichever opened it.
    pub(super) fn home(&self, at: DevicePtr) -> Option<u32> {
        let (start, _, _) = self.around(at)?;
        Some(self.blocks[&start.0].memory.as_ref()?.home)
    }

    /// Start, length and device of the block around an address.
    pub(super) fn around(&self, at: DevicePtr) -> Option<(DevicePtr, u64, u32)> {
        let (start, block) = self.blocks.range(..=at.0).next_back()?;
        let inside = at.0 - start < block.len && block.memory.is_some();
        inside.then_some((DevicePtr(*start), block.len, block.device))
    }

    pub(super) fn dma_buf(&self, at: DevicePtr, len: u64) -> CudaResult<OwnedFd> {
        const CALL: &str = "cuMemGetHandleForAddressRange";
        let invalid = || CudaError::new(CALL, CudaError::INVALID_VALUE);
        let (start, whole, _) = self.around(at).ok_or_else(invalid)?;
        let fits = at.0 - start.0 + len <= whole && (at.0 | len).is_multiple_of(4096);
        let memory = self.blocks[&start.0].memory.as_ref().filter(|_| fits).ok_or_else(invalid)?;
        memory.fd.try_clone().map_err(|_| invalid())
    }

    pub(super) fn host_add(&mut self, at: u64, len: u64) -> bool {
        let known = self.host.contains_key(&at);
        self.host.insert(at, len);
        !known
    }

    pub(super) fn host_remove(&mut self, at: u64) -> Option<u64> {
        self.host.remove(&at)
    }

    pub(super) fn memory(&mut self) -> SimulatedMemory<'_> {
        SimulatedMemory { space: self }
    }
}

/// Memory as a simulated device sees it.
#[derive(Debug)]
pub struct SimulatedMemory<'a> {
    space: &'a mut Space,
}

impl SimulatedMemory<'_> {
    /// Reads `len` bytes of device or host memory.
    pub fn read(&mut self, at: DevicePtr, len: u64) -> CudaResult<Vec<u8>> {
        let from = self.find(at, len, Access::Read)?;
        let mut bytes = vec![0; len as usize];
        // SAFETY: as many bytes as were found, or host memory of the caller's; the new vector is
        // none of either.
        unsafe { copy(from, bytes.as_mut_ptr(), len as usize) };
        Ok(bytes)
    }

    /// Writes device or host memory.
    pub fn write(&mut self, at: DevicePtr, bytes: &[u8]) -> CudaResult<()> {
        let to = self.find(at, bytes.len() as u64, Access::ReadWrite)?;
        // SAFETY: as above; where both overlap, `copy` minds it.
        unsafe { copy(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Copies between device and host memory in any direction.
    pub fn copy(&mut self, dst: DevicePtr, src: DevicePtr, len: u64) -> CudaResult<()> {
        let from = self.find(src, len, Access::Read)?;
        let to = self.find(dst, len, Access::ReadWrite)?;
        // SAFETY: as above.
        unsafe { copy(from, to, len as usize) };
        Ok(())
    }

    /// Where the stand-in has the bytes: all of them in one block that may be accessed so. Addresses
    /// that are no device's are host memory of the caller, who answers for them.
    fn find(&self, at: DevicePtr, len: u64, access: Access) -> CudaResult<*mut u8> {
        let illegal = || CudaError::new("work", CudaError::ILLEGAL_ADDRESS);
        let start = self.space.window.0.as_ptr() as u64;
        if at.0 < start || at.0 >= start + WINDOW {
            return Ok(at.0 as *mut u8);
        }
        let (first, block) = self.space.blocks.range(..=at.0).next_back().ok_or_else(illegal)?;
        let offset = at.0 - first;
        let inside = offset.checked_add(len).is_some_and(|end| end <= block.len);
        let allowed = match block.access {
            Some(Access::ReadWrite) => true,
            Some(Access::Read) => access == Access::Read,
            None => false,
        };
        let memory = block.memory.as_ref().filter(|_| inside && allowed).ok_or_else(illegal)?;
        // SAFETY: inside the block, and no block is longer than its memory.
        Ok(unsafe { memory.start.add(offset as usize) }.as_ptr())
    }
}

impl std::fmt::Debug for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Space").field("blocks", &self.blocks.len()).finish_non_exhaustive()
    }
}
