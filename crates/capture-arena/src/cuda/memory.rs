//! Device memory of this process and of others, given back step by step when dropped.

use std::{
    fmt,
    os::fd::{BorrowedFd, OwnedFd},
};

use transport_core::{Error, ErrorKind, Result};

use super::{Access, CudaResult, Device, DevicePtr, During, HandleBytes, MemoryId, MemoryPlan};

/// Physical memory of a device that this process made, or imported from another one.
pub(crate) struct Physical {
    device: Device,
    id: MemoryId,
}

impl Physical {
    pub(crate) fn create(device: &Device, len: u64, plan: &MemoryPlan) -> CudaResult<Self> {
        let id = device.with(|api| api.create(len, plan))?;
        Ok(Self { device: device.clone(), id })
    }

    pub(crate) fn import_fd(device: &Device, fd: BorrowedFd<'_>) -> CudaResult<Self> {
        let id = device.with(|api| api.import_fd(fd))?;
        Ok(Self { device: device.clone(), id })
    }

    pub(crate) fn import_fabric(device: &Device, handle: &HandleBytes) -> CudaResult<Self> {
        let id = device.with(|api| api.import_fabric(handle))?;
        Ok(Self { device: device.clone(), id })
    }

    pub(crate) fn export_fd(&self) -> CudaResult<OwnedFd> {
        self.device.with(|api| {
            // SAFETY: live until this is dropped.
            unsafe { api.export_fd(self.id) }
        })
    }

    pub(crate) fn export_fabric(&self) -> CudaResult<HandleBytes> {
        self.device.with(|api| {
            // SAFETY: live until this is dropped.
            unsafe { api.export_fabric(self.id) }
        })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        let _ = self.device.with(|api| {
            // SAFETY: made by a constructor, once. Where it is mapped it lives on.
            unsafe { api.release(self.id) }
        });
    }
}

/// Physical memory at an address.
pub(crate) struct Mapped {
    at: DevicePtr,
    len: u64,
    is_mapped: bool,
    memory: Physical, // dropped last
}

impl Mapped {
    /// Maps all `len` bytes of `memory` for its own device. A failure undoes what was done.
    pub(crate) fn new(memory: Physical, len: u64, access: Access) -> CudaResult<Self> {
        let device = memory.device.clone();
        let at = device.with(|api| api.reserve(len))?;
        let mut this = Self { at, len, is_mapped: false, memory };
        device.with(|api| {
            // SAFETY: just reserved, and live memory.
            unsafe { api.map(at, len, this.memory.id) }
        })?;
        this.is_mapped = true;
        device.with(|api| {
            // SAFETY: just mapped.
            unsafe { api.set_access(at, len, device.ordinal(), access) }
        })?;
        Ok(this)
    }

    pub(crate) fn address(&self) -> DevicePtr {
        self.at
    }

    pub(crate) fn memory(&self) -> &Physical {
        &self.memory
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let (at, len) = (self.at, self.len);
        let device = &self.memory.device;
        if self.is_mapped {
            let _ = device.with(|api| {
                // SAFETY: mapped by the constructor; every user of the address keeps this alive.
                unsafe { api.unmap(at, len) }
            });
        }
        let _ = device.with(|api| {
            // SAFETY: reserved by the constructor, and nothing is mapped there any more.
            unsafe { api.unreserve(at, len) }
        });
    }
}

/// A block as `cudaMalloc` makes it.
pub(crate) struct Plain {
    device: Device,
    at: DevicePtr,
}

impl Plain {
    pub(crate) fn new(device: &Device, len: u64) -> CudaResult<Self> {
        let at = device.with(|api| api.alloc(len))?;
        Ok(Self { device: device.clone(), at })
    }

    pub(crate) fn address(&self) -> DevicePtr {
        self.at
    }

    pub(crate) fn ipc_handle(&self) -> CudaResult<HandleBytes> {
        self.device.with(|api| {
            // SAFETY: live until this is dropped.
            unsafe { api.ipc_handle(self.at) }
        })
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        let _ = self.device.with(|api| {
            // SAFETY: allocated by the constructor; every user of the address keeps this alive.
            unsafe { api.free(self.at) }
        });
    }
}

/// One block of another process's device memory, mapped here; unmapped when dropped.
///
/// The bytes are the other process's: it may change them, and where it dies or frees the block
/// they stay mapped but mean nothing.
pub struct PeerMemory {
    place: Place,
    device: Device,
    len: u64,
    access: Access,
}

enum Place {
    Mapped(Mapped),
    Ipc(DevicePtr),
}

impl PeerMemory {
    /// Opens the whole block that an IPC handle names; it may be written.
    ///
    /// # Errors
    /// [`ErrorKind::PeerGone`] where the process that made it is gone, [`ErrorKind::InvalidInput`]
    /// in the process that made it, which uses its own address.
    pub fn open_ipc(device: &Device, handle: &HandleBytes) -> Result<Self> {
        const OPERATION: &str = "open IPC handle";
        let at = device.with(|api| api.ipc_open(handle)).map_err(|e| not_opened(e, OPERATION))?;
        let mut this = Self {
            place: Place::Ipc(at),
            device: device.clone(),
            len: 0,
            access: Access::ReadWrite,
        };
        let (base, len) = device.with(|api| api.address_range(at)).during(OPERATION)?;
        if base != at {
            return Err(Error::new(
                ErrorKind::Protocol,
                OPERATION,
                "the handle does not name the start of a block",
            )
            .with("base", base)
            .with("found", at));
        }
        this.len = len;
        Ok(this)
    }

    /// Maps `len` bytes, a whole block, by the file descriptor of its memory.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a descriptor of anything else or another length.
    pub fn import_fd(
        device: &Device,
        fd: BorrowedFd<'_>,
        len: u64,
        access: Access,
    ) -> Result<Self> {
        const OPERATION: &str = "import file descriptor";
        let failed = |e| not_opened(e, OPERATION).with("bytes", len);
        let memory = Physical::import_fd(device, fd).map_err(failed)?;
        let mapped = Mapped::new(memory, len, access).map_err(failed)?;
        Ok(Self { place: Place::Mapped(mapped), device: device.clone(), len, access })
    }

    /// Maps `len` bytes, a whole block, by their fabric handle.
    ///
    /// # Errors
    /// [`ErrorKind::PermissionDenied`] and [`ErrorKind::Unsupported`] where this machine is not
    /// part of the fabric.
    pub fn import_fabric(
        device: &Device,
        handle: &HandleBytes,
        len: u64,
        access: Access,
    ) -> Result<Self> {
        const OPERATION: &str = "import fabric handle";
        let failed = |e| not_opened(e, OPERATION).with("bytes", len);
        let memory = Physical::import_fabric(device, handle).map_err(failed)?;
        let mapped = Mapped::new(memory, len, access).map_err(failed)?;
        Ok(Self { place: Place::Mapped(mapped), device: device.clone(), len, access })
    }

    /// Where it starts in this process.
    pub fn address(&self) -> DevicePtr {
        match &self.place {
            Place::Mapped(mapped) => mapped.address(),
            Place::Ipc(at) => *at,
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no bytes; never so.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What this process may do with it.
    pub fn access(&self) -> Access {
        self.access
    }

    /// The device that it is mapped for.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The address of `len` bytes at `offset`; none if they do not lie inside.
    pub fn range(&self, offset: u64, len: u64) -> Option<DevicePtr> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| self.address().offset(offset))
    }
}

impl Drop for PeerMemory {
    fn drop(&mut self) {
        if let Place::Ipc(at) = self.place {
            let _ = self.device.with(|api| {
                // SAFETY: opened by the constructor; every user of the address keeps this alive.
                unsafe { api.ipc_close(at) }
            });
        }
    }
}

fn not_opened(error: super::CudaError, operation: &'static str) -> Error {
    use super::CudaError as E;
    let why = |kind, why: &'static str, remedy: &'static str| {
        Error::new(kind, operation, format!("{why}: {error}")).source(error.clone()).remedy(remedy)
    };
    match error.code {
        E::INVALID_CONTEXT => why(
            ErrorKind::InvalidInput,
            "the memory is this process's own",
            "use its own address; a handle is for other processes",
        ),
        // What drivers return where the process that made the handle is gone.
        E::MAP_FAILED | E::INVALID_HANDLE => why(
            ErrorKind::PeerGone,
            "the handle names no memory that lives",
            "ask the peer for new metadata; it has restarted or freed the memory",
        ),
        E::NOT_PERMITTED | E::NOT_SUPPORTED => why(
            if error.code == E::NOT_PERMITTED {
                ErrorKind::PermissionDenied
            } else {
                ErrorKind::Unsupported
            },
            "this machine may not map the memory of that peer",
            "run both in one container, or choose another protocol for the peer",
        ),
        _ => error.during(operation),
    }
}

impl fmt::Debug for PeerMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerMemory")
            .field("device", &self.device.ordinal())
            .field("len", &self.len)
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}
