//! What this library asks of CUDA, as a trait: the driver, or a stand-in whose failures are scripted.

use std::{
    fmt,
    os::fd::{BorrowedFd, OwnedFd},
};

use super::CudaResult;

/// An address in device memory, or in host memory that the device can reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevicePtr(pub u64);

/// The context of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContextId(pub u64);

/// A stream: work on it runs in order. The driver's own handle, also of a foreign stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamId(pub u64);

/// An event: a point in a stream. The driver's own handle, also of a foreign event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventId(pub u64);

/// Physical memory without an address: made by [`CudaApi::create`] or imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryId(pub u64);

/// Loaded device code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ModuleId(pub u64);

/// A kernel of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FunctionId(pub u64);

/// Length of an IPC or fabric handle, in bytes.
pub const HANDLE_BYTES: usize = 64;

/// A handle that names memory in other processes: of CUDA IPC, or of the NVLink fabric.
pub type HandleBytes = [u8; HANDLE_BYTES];

/// How physical memory can be handed to other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ShareAs {
    /// By a handle that works wherever the NVLink fabric reaches.
    Fabric,
    /// By a file descriptor.
    PosixFd,
}

/// What physical memory is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Device that it lies on.
    pub device: u32,
    /// How it is handed on.
    pub share: ShareAs,
    /// Whether network cards may read and write it.
    pub rdma: bool,
}

/// What a device may do with mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read it.
    Read,
    /// Read and write it.
    ReadWrite,
}

/// What can be asked about a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceAttribute {
    /// Number of multiprocessors.
    Multiprocessors,
    /// Major number of the compute capability.
    ComputeMajor,
    /// Minor number of the compute capability.
    ComputeMinor,
    /// Says that fabric handles work. Some machines say so and refuse to make them.
    FabricHandles,
    /// Says that memory can be exported as a file descriptor.
    PosixFdHandles,
    /// Says that physical memory can be made for network cards.
    RdmaWithVirtualMemory,
    /// Says that memory can be exported as a DMA buffer.
    DmaBuf,
    /// Says that memory can be reserved, made and mapped apart.
    VirtualMemory,
}

/// Calls that a driver may be too old to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Optional {
    /// Many copies by one call: [`CudaApi::copy_batch`].
    BatchCopy,
    /// Export as a DMA buffer: [`CudaApi::export_dma_buf`].
    DmaBufExport,
}

/// Which driver this is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverInfo {
    /// Newest CUDA version that it serves: major and minor.
    pub version: (u32, u32),
    /// The file that was loaded, where known.
    pub library: String,
    /// Optional calls that it has.
    pub optional: Vec<Optional>,
}

/// Memory of a device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free now.
    pub free: u64,
    /// In all.
    pub total: u64,
}

/// One copy of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyOp {
    /// To.
    pub dst: DevicePtr,
    /// From.
    pub src: DevicePtr,
    /// Bytes.
    pub len: u64,
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks, in three dimensions.
    pub grid: [u32; 3],
    /// Threads a block, in three dimensions.
    pub block: [u32; 3],
    /// Dynamic shared memory a block, in bytes.
    pub shared_bytes: u32,
}

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KernelArg<'a> {
    /// An address or any other 64-bit value.
    U64(u64),
    /// A 32-bit value.
    U32(u32),
    /// A structure, passed by value: as many bytes as the kernel takes.
    Bytes(&'a [u8]),
}

/// The calls of the CUDA driver that this library uses. Every failure names its call and code.
///
/// Calls that say *bound* need the device's context to be current on the calling thread;
/// [`Device::bind`](super::Device::bind) sees to it. Addresses are unified: a copy may have either
/// end in host memory.
///
/// # Safety
/// The unsafe calls share one contract: handles and addresses are live, were given out by this
/// object (or, where it says foreign, by the same driver in this process), and stay live until the
/// device has finished whatever the call queues; memory that the device writes is not used
/// otherwise until then.
#[allow(clippy::missing_safety_doc)] // the contract is the trait's
pub trait CudaApi: fmt::Debug + Send + Sync {
    /// Which driver this is.
    fn driver(&self) -> &DriverInfo;

    // Devices and contexts.

    /// Number of devices that this process may see.
    fn device_count(&self) -> CudaResult<u32>;
    /// Its name, such as `NVIDIA H200`.
    fn device_name(&self, device: u32) -> CudaResult<String>;
    /// Its identity, the same in every process.
    fn device_uuid(&self, device: u32) -> CudaResult<[u8; 16]>;
    /// What the driver says about it.
    fn device_attribute(&self, device: u32, attribute: DeviceAttribute) -> CudaResult<i32>;
    /// Takes a share in the primary context of a device, which other libraries use too.
    fn retain_context(&self, device: u32) -> CudaResult<ContextId>;
    /// Gives one share back.
    fn release_context(&self, device: u32) -> CudaResult<()>;
    /// The context that is current on this thread.
    fn current_context(&self) -> CudaResult<Option<ContextId>>;
    /// Makes a context current on this thread.
    unsafe fn push_context(&self, context: ContextId) -> CudaResult<()>;
    /// Makes the one before it current again.
    fn pop_context(&self) -> CudaResult<()>;
    /// Memory of the bound device.
    fn memory_info(&self) -> CudaResult<MemoryInfo>;

    // Memory.

    /// Allocates `len` bytes on the bound device, as `cudaMalloc` does.
    fn alloc(&self, len: u64) -> CudaResult<DevicePtr>;
    /// Frees what [`Self::alloc`] gave. Waits for the device.
    unsafe fn free(&self, at: DevicePtr) -> CudaResult<()>;
    /// Start and length of the allocation that an address lies in. Bound; foreign addresses too.
    fn address_range(&self, at: DevicePtr) -> CudaResult<(DevicePtr, u64)>;
    /// Ordinal of the device that an address lies on; none for host memory. Foreign addresses too.
    fn device_of(&self, at: DevicePtr) -> CudaResult<Option<u32>>;
    /// Unit in which physical memory of this sort comes, in bytes.
    fn granularity(&self, plan: &MemoryPlan) -> CudaResult<u64>;
    /// Makes physical memory. `len` is a multiple of the granularity.
    fn create(&self, len: u64, plan: &MemoryPlan) -> CudaResult<MemoryId>;
    /// Lets go of physical memory; it is freed once it is mapped nowhere, in any process.
    unsafe fn release(&self, memory: MemoryId) -> CudaResult<()>;
    /// A file descriptor of physical memory.
    unsafe fn export_fd(&self, memory: MemoryId) -> CudaResult<OwnedFd>;
    /// A fabric handle of physical memory.
    unsafe fn export_fabric(&self, memory: MemoryId) -> CudaResult<HandleBytes>;
    /// Physical memory of another process, by its file descriptor.
    fn import_fd(&self, fd: BorrowedFd<'_>) -> CudaResult<MemoryId>;
    /// Physical memory of another process, by its fabric handle.
    fn import_fabric(&self, handle: &HandleBytes) -> CudaResult<MemoryId>;
    /// Reserves addresses.
    fn reserve(&self, len: u64) -> CudaResult<DevicePtr>;
    /// Gives reserved addresses back.
    unsafe fn unreserve(&self, at: DevicePtr, len: u64) -> CudaResult<()>;
    /// Puts physical memory, from its start, at reserved addresses.
    unsafe fn map(&self, at: DevicePtr, len: u64, memory: MemoryId) -> CudaResult<()>;
    /// Undoes [`Self::map`].
    unsafe fn unmap(&self, at: DevicePtr, len: u64) -> CudaResult<()>;
    /// Says what a device may do with mapped memory.
    unsafe fn set_access(
        &self,
        at: DevicePtr,
        len: u64,
        device: u32,
        access: Access,
    ) -> CudaResult<()>;
    /// An IPC handle of the block of [`Self::alloc`] that starts at `at`. Bound.
    unsafe fn ipc_handle(&self, at: DevicePtr) -> CudaResult<HandleBytes>;
    /// Maps another process's block, by its IPC handle. Bound; not in the process that made it.
    fn ipc_open(&self, handle: &HandleBytes) -> CudaResult<DevicePtr>;
    /// Undoes [`Self::ipc_open`]. Bound.
    unsafe fn ipc_close(&self, at: DevicePtr) -> CudaResult<()>;
    /// A DMA buffer of a range, for network cards. See [`Optional::DmaBufExport`]. Bound.
    unsafe fn export_dma_buf(&self, at: DevicePtr, len: u64) -> CudaResult<OwnedFd>;
    /// Allocates `len` bytes of host memory that never move, for every device. Bound.
    fn host_alloc(&self, len: u64) -> CudaResult<DevicePtr>;
    /// Frees what [`Self::host_alloc`] gave. Bound.
    unsafe fn host_free(&self, at: DevicePtr) -> CudaResult<()>;
    /// Keeps foreign host memory from moving. Bound.
    unsafe fn host_register(&self, at: DevicePtr, len: u64) -> CudaResult<()>;
    /// Undoes [`Self::host_register`]. Bound.
    unsafe fn host_unregister(&self, at: DevicePtr) -> CudaResult<()>;

    // Streams and events.

    /// A stream of the bound device that waits for no other one.
    fn stream_create(&self) -> CudaResult<StreamId>;
    /// Ends a stream; its work still runs to its end.
    unsafe fn stream_destroy(&self, stream: StreamId) -> CudaResult<()>;
    /// Waits until the work on a stream is done; reports what went wrong in it.
    unsafe fn stream_synchronize(&self, stream: StreamId) -> CudaResult<()>;
    /// Whether the work on a stream is done.
    unsafe fn stream_query(&self, stream: StreamId) -> CudaResult<bool>;
    /// Makes later work on a stream wait for an event, of whatever device.
    unsafe fn stream_wait_event(&self, stream: StreamId, event: EventId) -> CudaResult<()>;
    /// An event of the bound device. One that is `timed` costs more and can be compared.
    fn event_create(&self, timed: bool) -> CudaResult<EventId>;
    /// Ends an event.
    unsafe fn event_destroy(&self, event: EventId) -> CudaResult<()>;
    /// Sets an event behind the work that is on a stream now. Both are of one device.
    unsafe fn event_record(&self, event: EventId, stream: StreamId) -> CudaResult<()>;
    /// Waits for an event. One that was never recorded has happened.
    unsafe fn event_synchronize(&self, event: EventId) -> CudaResult<()>;
    /// Whether an event has happened.
    unsafe fn event_query(&self, event: EventId) -> CudaResult<bool>;
    /// Milliseconds between two timed events that have happened.
    unsafe fn event_elapsed_ms(&self, start: EventId, end: EventId) -> CudaResult<f32>;

    // Work.

    /// Queues a copy between any two places. Bound.
    unsafe fn copy(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        len: u64,
        stream: StreamId,
    ) -> CudaResult<()>;
    /// Queues many copies by one call, in no order among themselves; sources are read in stream
    /// order. See [`Optional::BatchCopy`]. Bound.
    unsafe fn copy_batch(&self, ops: &[CopyOp], stream: StreamId) -> CudaResult<()>;
    /// Queues filling `len` bytes with `byte`. Bound.
    unsafe fn fill(&self, at: DevicePtr, byte: u8, len: u64, stream: StreamId) -> CudaResult<()>;
    /// Loads device code: PTX text ended by a zero byte, or a binary. Bound.
    fn module_load(&self, image: &[u8]) -> CudaResult<ModuleId>;
    /// Unloads it. Bound.
    unsafe fn module_unload(&self, module: ModuleId) -> CudaResult<()>;
    /// A kernel by its name.
    unsafe fn module_function(&self, module: ModuleId, name: &str) -> CudaResult<FunctionId>;
    /// Queues a kernel. The arguments are those that it takes. Bound.
    unsafe fn launch(
        &self,
        function: FunctionId,
        launch: Launch,
        args: &[KernelArg<'_>],
        stream: StreamId,
    ) -> CudaResult<()>;
}

impl DriverInfo {
    /// Whether the driver has an optional call.
    pub fn has(&self, call: Optional) -> bool {
        self.optional.contains(&call)
    }
}

impl DevicePtr {
    /// The address `bytes` further on.
    ///
    /// # Panics
    /// Beyond the last address, in debug builds.
    #[must_use]
    #[inline]
    pub fn offset(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
