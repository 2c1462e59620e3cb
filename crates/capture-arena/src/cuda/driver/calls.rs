//! Every call of the trait, as the driver has it.

use std::{
    ffi::{CString, c_int, c_void},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr::{from_mut, null, null_mut},
};

use cudarc::driver::sys;

use super::Driver;
use crate::cuda::{
    Access, ContextId, CopyOp, CudaApi, CudaError, CudaResult, DeviceAttribute, DevicePtr,
    DriverInfo, EventId, FunctionId, HANDLE_BYTES, HandleBytes, KernelArg, Launch, MemoryId,
    MemoryInfo, MemoryPlan, ModuleId, ShareAs, StreamId,
};

impl Driver {
    fn device(&self, ordinal: u32) -> CudaResult<sys::CUdevice> {
        let mut device = 0;
        // SAFETY: the out-pointer is to a live local; the driver checks the ordinal.
        unsafe { self.sys.cuDeviceGet(&mut device, as_int(ordinal)) }?;
        Ok(device)
    }
}

impl CudaApi for Driver {
    fn driver(&self) -> &DriverInfo {
        &self.info
    }

    fn device_count(&self) -> CudaResult<u32> {
        let mut count = 0;
        // SAFETY: the out-pointer is to a live local.
        unsafe { self.sys.cuDeviceGetCount(&mut count) }?;
        Ok(count.max(0) as u32)
    }

    fn device_name(&self, device: u32) -> CudaResult<String> {
        let device = self.device(device)?;
        let mut name = [0; 256];
        // SAFETY: writes a text with its end into a live local of the length that is given.
        unsafe { self.sys.cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device) }?;
        let name: Vec<u8> = name.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
        Ok(String::from_utf8_lossy(&name).into_owned())
    }

    fn device_uuid(&self, device: u32) -> CudaResult<[u8; 16]> {
        let device = self.device(device)?;
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        if self.sys.has("cuDeviceGetUuid_v2") {
            // SAFETY: the out-pointer is to a live local.
            unsafe { self.sys.cuDeviceGetUuid_v2(&mut uuid, device) }?;
        } else {
            // SAFETY: as above.
            unsafe { self.sys.cuDeviceGetUuid(&mut uuid, device) }?;
        }
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    fn device_attribute(&self, device: u32, attribute: DeviceAttribute) -> CudaResult<i32> {
        use sys::CUdevice_attribute_enum as A;
        let attribute = match attribute {
            DeviceAttribute::Multiprocessors => A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            DeviceAttribute::ComputeMajor => A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            DeviceAttribute::ComputeMinor => A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            DeviceAttribute::FabricHandles => A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
            DeviceAttribute::PosixFdHandles => {
                A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            }
            DeviceAttribute::RdmaWithVirtualMemory => {
                A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
            }
            DeviceAttribute::DmaBuf => A::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
            DeviceAttribute::VirtualMemory => {
                A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
            }
        };
        let device = self.device(device)?;
        let mut value = 0;
        // SAFETY: the out-pointer is to a live local.
        unsafe { self.sys.cuDeviceGetAttribute(&mut value, attribute, device) }?;
        Ok(value)
    }

    fn retain_context(&self, device: u32) -> CudaResult<ContextId> {
        let device = self.device(device)?;
        let mut context = null_mut();
        // SAFETY: the out-pointer is to a live local.
        unsafe { self.sys.cuDevicePrimaryCtxRetain(&mut context, device) }?;
        Ok(ContextId(context as u64))
    }

    fn release_context(&self, device: u32) -> CudaResult<()> {
        let device = self.device(device)?;
        // SAFETY: counted by the driver; a share too many is an error of its own.
        unsafe { self.sys.cuDevicePrimaryCtxRelease_v2(device) }
    }

    fn current_context(&self) -> CudaResult<Option<ContextId>> {
        let mut context = null_mut();
        // SAFETY: the out-pointer is to a live local.
        unsafe { self.sys.cuCtxGetCurrent(&mut context) }?;
        Ok((!context.is_null()).then_some(ContextId(context as u64)))
    }

    unsafe fn push_context(&self, context: ContextId) -> CudaResult<()> {
        // SAFETY: a live context (contract).
        unsafe { self.sys.cuCtxPushCurrent_v2(context.0 as _) }
    }

    fn pop_context(&self) -> CudaResult<()> {
        let mut context = null_mut();
        // SAFETY: the out-pointer is to a live local; an empty stack is an error.
        unsafe { self.sys.cuCtxPopCurrent_v2(&mut context) }
    }

    fn memory_info(&self) -> CudaResult<MemoryInfo> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the out-pointers are to live locals.
        unsafe { self.sys.cuMemGetInfo_v2(&mut free, &mut total) }?;
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    }

    fn alloc(&self, len: u64) -> CudaResult<DevicePtr> {
        let mut at = 0;
        // SAFETY: the out-pointer is to a live local.
        unsafe { self.sys.cuMemAlloc_v2(&mut at, len as usize) }?;
        Ok(DevicePtr(at))
    }

    unsafe fn free(&self, at: DevicePtr) -> CudaResult<()> {
        // SAFETY: allocated by `alloc` and no longer used (contract).
        unsafe { self.sys.cuMemFree_v2(at.0) }
    }

    fn address_range(&self, at: DevicePtr) -> CudaResult<(DevicePtr, u64)> {
        let (mut base, mut len) = (0, 0);
        // SAFETY: the out-pointers are to live locals; any address may be asked about.
        unsafe { self.sys.cuMemGetAddressRange_v2(&mut base, &mut len, at.0) }?;
        Ok((DevicePtr(base), len as u64))
    }

    fn device_of(&self, at: DevicePtr) -> CudaResult<Option<u32>> {
        use sys::CUpointer_attribute_enum as A;
        const DEVICE_MEMORY: u32 = 2;
        let mut kind = 0_u32;
        // SAFETY: this attribute is 32 bits wide; any address may be asked about.
        let asked = unsafe {
            self.sys.cuPointerGetAttribute(
                from_mut(&mut kind).cast(),
                A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                at.0,
            )
        };
        match asked {
            Ok(()) if kind == DEVICE_MEMORY => {}
            Ok(()) => return Ok(None),
            // Memory that CUDA has never heard of.
            Err(error) if error.code == CudaError::INVALID_VALUE => return Ok(None),
            Err(error) => return Err(error),
        }
        let mut ordinal: c_int = 0;
        // SAFETY: as above.
        unsafe {
            self.sys.cuPointerGetAttribute(
                from_mut(&mut ordinal).cast(),
                A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                at.0,
            )
        }?;
        Ok(u32::try_from(ordinal).ok())
    }

    fn granularity(&self, plan: &MemoryPlan) -> CudaResult<u64> {
        use sys::CUmemAllocationGranularity_flags_enum as G;
        let (prop, mut granularity) = (prop(plan), 0);
        // SAFETY: both pointers are to live locals.
        unsafe {
            self.sys.cuMemGetAllocationGranularity(
                &mut granularity,
                &prop,
                G::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        }?;
        Ok(granularity as u64)
    }

    fn create(&self, len: u64, plan: &MemoryPlan) -> CudaResult<MemoryId> {
        let (prop, mut memory) = (prop(plan), 0);
        // SAFETY: both pointers are to live locals.
        unsafe { self.sys.cuMemCreate(&mut memory, len as usize, &prop, 0) }?;
        Ok(MemoryId(memory))
    }

    unsafe fn release(&self, memory: MemoryId) -> CudaResult<()> {
        // SAFETY: a live handle (contract).
        unsafe { self.sys.cuMemRelease(memory.0) }
    }

    unsafe fn export_fd(&self, memory: MemoryId) -> CudaResult<OwnedFd> {
        use sys::CUmemAllocationHandleType_enum as H;
        let mut fd: c_int = -1;
        // SAFETY: this type of handle is an integer; the memory is live (contract).
        unsafe {
            self.sys.cuMemExportToShareableHandle(
                from_mut(&mut fd).cast(),
                memory.0,
                H::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                0,
            )
        }?;
        owned("cuMemExportToShareableHandle", fd)
    }

    unsafe fn export_fabric(&self, memory: MemoryId) -> CudaResult<HandleBytes> {
        use sys::CUmemAllocationHandleType_enum as H;
        let mut handle = [0; HANDLE_BYTES];
        const { assert!(size_of::<sys::CUmemFabricHandle>() == HANDLE_BYTES) };
        // SAFETY: this type of handle is that many bytes; the memory is live (contract).
        unsafe {
            self.sys.cuMemExportToShareableHandle(
                handle.as_mut_ptr().cast(),
                memory.0,
                H::CU_MEM_HANDLE_TYPE_FABRIC,
                0,
            )
        }?;
        Ok(handle)
    }

    fn import_fd(&self, fd: BorrowedFd<'_>) -> CudaResult<MemoryId> {
        use sys::CUmemAllocationHandleType_enum as H;
        let mut memory = 0;
        // SAFETY: this type of handle is an integer in place of a pointer; the driver checks that
        // the descriptor, which is open, is one of its own.
        unsafe {
            self.sys.cuMemImportFromShareableHandle(
                &mut memory,
                fd.as_raw_fd() as usize as *mut c_void,
                H::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            )
        }?;
        Ok(MemoryId(memory))
    }

    fn import_fabric(&self, handle: &HandleBytes) -> CudaResult<MemoryId> {
        use sys::CUmemAllocationHandleType_enum as H;
        let (mut memory, mut handle) = (0, *handle);
        // SAFETY: both pointers are to live locals; the driver checks the handle.
        unsafe {
            self.sys.cuMemImportFromShareableHandle(
                &mut memory,
                handle.as_mut_ptr().cast(),
                H::CU_MEM_HANDLE_TYPE_FABRIC,
            )
        }?;
        Ok(MemoryId(memory))
    }

    fn reserve(&self, len: u64) -> CudaResult<DevicePtr> {
        let mut at = 0;
        // SAFETY: the out-pointer is to a live local; the driver chooses the place.
        unsafe { self.sys.cuMemAddressReserve(&mut at, len as usize, 0, 0, 0) }?;
        Ok(DevicePtr(at))
    }

    unsafe fn unreserve(&self, at: DevicePtr, len: u64) -> CudaResult<()> {
        // SAFETY: reserved by `reserve`, nothing mapped there any more (contract).
        unsafe { self.sys.cuMemAddressFree(at.0, len as usize) }
    }

    unsafe fn map(&self, at: DevicePtr, len: u64, memory: MemoryId) -> CudaResult<()> {
        // SAFETY: reserved addresses and live memory (contract).
        unsafe { self.sys.cuMemMap(at.0, len as usize, 0, memory.0, 0) }
    }

    unsafe fn unmap(&self, at: DevicePtr, len: u64) -> CudaResult<()> {
        // SAFETY: mapped by `map` and no longer used (contract).
        unsafe { self.sys.cuMemUnmap(at.0, len as usize) }
    }

    unsafe fn set_access(
        &self,
        at: DevicePtr,
        len: u64,
        device: u32,
        access: Access,
    ) -> CudaResult<()> {
        use sys::CUmemAccess_flags_enum as F;
        let flags = match access {
            Access::Read => F::CU_MEM_ACCESS_FLAGS_PROT_READ,
            Access::ReadWrite => F::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let description = sys::CUmemAccessDesc { location: location(device), flags };
        // SAFETY: mapped addresses (contract); one description, a live local.
        unsafe { self.sys.cuMemSetAccess(at.0, len as usize, &description, 1) }
    }

    unsafe fn ipc_handle(&self, at: DevicePtr) -> CudaResult<HandleBytes> {
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: allocated by `alloc` (contract); the out-pointer is to a live local.
        unsafe { self.sys.cuIpcGetMemHandle(&mut handle, at.0) }?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    fn ipc_open(&self, handle: &HandleBytes) -> CudaResult<DevicePtr> {
        const LAZY_ENABLE_PEER_ACCESS: u32 = 1;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as _) };
        let mut at = 0;
        // SAFETY: the out-pointer is to a live local; the driver checks the handle.
        unsafe { self.sys.cuIpcOpenMemHandle_v2(&mut at, handle, LAZY_ENABLE_PEER_ACCESS) }?;
        Ok(DevicePtr(at))
    }

    unsafe fn ipc_close(&self, at: DevicePtr) -> CudaResult<()> {
        // SAFETY: opened by `ipc_open` and no longer used (contract).
        unsafe { self.sys.cuIpcCloseMemHandle(at.0) }
    }

    unsafe fn export_dma_buf(&self, at: DevicePtr, len: u64) -> CudaResult<OwnedFd> {
        use sys::CUmemRangeHandleType_enum as H;
        let mut fd: c_int = -1;
        // SAFETY: this type of handle is an integer; the range is mapped (contract).
        unsafe {
            self.sys.cuMemGetHandleForAddressRange(
                from_mut(&mut fd).cast(),
                at.0,
                len as usize,
                H::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
                0,
            )
        }?;
        owned("cuMemGetHandleForAddressRange", fd)
    }

    fn host_alloc(&self, len: u64) -> CudaResult<DevicePtr> {
        const PORTABLE: u32 = 1;
        let mut at = null_mut();
        // SAFETY: the out-pointer is to a live local.
        unsafe { self.sys.cuMemHostAlloc(&mut at, len as usize, PORTABLE) }?;
        Ok(DevicePtr(at as u64))
    }

    unsafe fn host_free(&self, at: DevicePtr) -> CudaResult<()> {
        // SAFETY: allocated by `host_alloc` and no longer used (contract).
        unsafe { self.sys.cuMemFreeHost(at.0 as *mut c_void) }
    }

    unsafe fn host_register(&self, at: DevicePtr, len: u64) -> CudaResult<()> {
        const PORTABLE: u32 = 1;
        // SAFETY: host memory that stays mapped until it is unregistered (contract).
        unsafe { self.sys.cuMemHostRegister_v2(at.0 as *mut c_void, len as usize, PORTABLE) }
    }

    unsafe fn host_unregister(&self, at: DevicePtr) -> CudaResult<()> {
        // SAFETY: registered by `host_register` and no longer used (contract).
        unsafe { self.sys.cuMemHostUnregister(at.0 as *mut c_void) }
    }

    fn stream_create(&self) -> CudaResult<StreamId> {
        const NON_BLOCKING: u32 = 1;
        let mut stream = null_mut();
        // SAFETY: the out-pointer is to a live local.
        unsafe { self.sys.cuStreamCreate(&mut stream, NON_BLOCKING) }?;
        Ok(StreamId(stream as u64))
    }

    unsafe fn stream_destroy(&self, stream: StreamId) -> CudaResult<()> {
        // SAFETY: a live stream of ours (contract).
        unsafe { self.sys.cuStreamDestroy_v2(stream.0 as _) }
    }

    unsafe fn stream_synchronize(&self, stream: StreamId) -> CudaResult<()> {
        // SAFETY: a live stream (contract).
        unsafe { self.sys.cuStreamSynchronize(stream.0 as _) }
    }

    unsafe fn stream_query(&self, stream: StreamId) -> CudaResult<bool> {
        // SAFETY: a live stream (contract).
        done(unsafe { self.sys.cuStreamQuery(stream.0 as _) })
    }

    unsafe fn stream_wait_event(&self, stream: StreamId, event: EventId) -> CudaResult<()> {
        // SAFETY: a live stream and event (contract).
        unsafe { self.sys.cuStreamWaitEvent(stream.0 as _, event.0 as _, 0) }
    }

    fn event_create(&self, timed: bool) -> CudaResult<EventId> {
        const DISABLE_TIMING: u32 = 2;
        let mut event = null_mut();
        let flags = if timed { 0 } else { DISABLE_TIMING };
        // SAFETY: the out-pointer is to a live local.
        unsafe { self.sys.cuEventCreate(&mut event, flags) }?;
        Ok(EventId(event as u64))
    }

    unsafe fn event_destroy(&self, event: EventId) -> CudaResult<()> {
        // SAFETY: a live event of ours (contract).
        unsafe { self.sys.cuEventDestroy_v2(event.0 as _) }
    }

    unsafe fn event_record(&self, event: EventId, stream: StreamId) -> CudaResult<()> {
        // SAFETY: a live event and stream (contract).
        unsafe { self.sys.cuEventRecord(event.0 as _, stream.0 as _) }
    }

    unsafe fn event_synchronize(&self, event: EventId) -> CudaResult<()> {
        // SAFETY: a live event (contract).
        unsafe { self.sys.cuEventSynchronize(event.0 as _) }
    }

    unsafe fn event_query(&self, event: EventId) -> CudaResult<bool> {
        // SAFETY: a live event (contract).
        done(unsafe { self.sys.cuEventQuery(event.0 as _) })
    }

    unsafe fn event_elapsed_ms(&self, start: EventId, end: EventId) -> CudaResult<f32> {
        let mut elapsed = 0.0;
        // SAFETY: live events (contract); the out-pointer is to a live local.
        unsafe { self.sys.cuEventElapsedTime(&mut elapsed, start.0 as _, end.0 as _) }?;
        Ok(elapsed)
    }

    unsafe fn copy(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        len: u64,
        stream: StreamId,
    ) -> CudaResult<()> {
        // SAFETY: both ranges are live until the copy is done (contract).
        unsafe { self.sys.cuMemcpyAsync(dst.0, src.0, len as usize, stream.0 as _) }
    }

    unsafe fn copy_batch(&self, ops: &[CopyOp], stream: StreamId) -> CudaResult<()> {
        use sys::CUmemcpySrcAccessOrder_enum as Order;
        if ops.is_empty() {
            return Ok(());
        }
        let mut dsts: Vec<u64> = ops.iter().map(|op| op.dst.0).collect();
        let mut srcs: Vec<u64> = ops.iter().map(|op| op.src.0).collect();
        let mut lens: Vec<usize> = ops.iter().map(|op| op.len as usize).collect();
        let anywhere = sys::CUmemLocation {
            type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_INVALID,
            id: 0,
        };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: Order::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: anywhere,
            dstLocHint: anywhere,
            flags: 0,
        };
        let (mut first, mut failed) = (0, 0);
        // SAFETY: three lists of that length and one attribute for all of them, read before the
        // call returns; all ranges are live until the copies are done (contract).
        unsafe {
            self.sys.cuMemcpyBatchAsync(
                dsts.as_mut_ptr(),
                srcs.as_mut_ptr(),
                lens.as_mut_ptr(),
                ops.len(),
                &mut attributes,
                &mut first,
                1,
                &mut failed,
                stream.0 as _,
            )
        }
    }

    unsafe fn fill(&self, at: DevicePtr, byte: u8, len: u64, stream: StreamId) -> CudaResult<()> {
        // SAFETY: the range is live until it is filled (contract).
        unsafe { self.sys.cuMemsetD8Async(at.0, byte, len as usize, stream.0 as _) }
    }

    fn module_load(&self, image: &[u8]) -> CudaResult<ModuleId> {
        const CALL: &str = "cuModuleLoadData";
        let is_text = !image.starts_with(b"\x7fELF") && !image.starts_with(b"P\xEDU\xBA");
        if image.is_empty() || (is_text && image.last() != Some(&0)) {
            return Err(CudaError::new(CALL, CudaError::INVALID_VALUE)); // would be read beyond
        }
        let mut module = null_mut();
        // SAFETY: a text with its end, or a binary, which says how long it is.
        unsafe { self.sys.cuModuleLoadData(&mut module, image.as_ptr().cast()) }?;
        Ok(ModuleId(module as u64))
    }

    unsafe fn module_unload(&self, module: ModuleId) -> CudaResult<()> {
        // SAFETY: a live module of which no kernel runs (contract).
        unsafe { self.sys.cuModuleUnload(module.0 as _) }
    }

    unsafe fn module_function(&self, module: ModuleId, name: &str) -> CudaResult<FunctionId> {
        let name = CString::new(name)
            .map_err(|_| CudaError::new("cuModuleGetFunction", CudaError::NOT_FOUND))?;
        let mut function = null_mut();
        // SAFETY: a live module (contract) and a text with its end.
        unsafe { self.sys.cuModuleGetFunction(&mut function, module.0 as _, name.as_ptr()) }?;
        Ok(FunctionId(function as u64))
    }

    unsafe fn launch(
        &self,
        function: FunctionId,
        launch: Launch,
        args: &[KernelArg<'_>],
        stream: StreamId,
    ) -> CudaResult<()> {
        const MOST: usize = 32;
        if args.len() > MOST {
            return Err(CudaError::new("cuLaunchKernel", CudaError::INVALID_VALUE));
        }
        // Little-endian, so a 32-bit value is the first half of its 64-bit slot.
        let mut values = [0_u64; MOST];
        let mut pointers = [null_mut::<c_void>(); MOST];
        for ((arg, value), pointer) in args.iter().zip(&mut values).zip(&mut pointers) {
            *value = match *arg {
                KernelArg::U64(value) => value,
                KernelArg::U32(value) => u64::from(value),
                KernelArg::Bytes(bytes) => {
                    *pointer = bytes.as_ptr().cast_mut().cast(); // only read
                    continue;
                }
            };
            *pointer = from_mut(value).cast();
        }
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        // SAFETY: the arguments are the kernel's (contract), and are read before the call returns.
        unsafe {
            self.sys.cuLaunchKernel(
                function.0 as _,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                launch.shared_bytes,
                stream.0 as _,
                pointers.as_mut_ptr(),
                null_mut(),
            )
        }
    }
}

fn prop(plan: &MemoryPlan) -> sys::CUmemAllocationProp {
    use sys::CUmemAllocationHandleType_enum as H;
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: match plan.share {
            ShareAs::Fabric => H::CU_MEM_HANDLE_TYPE_FABRIC,
            ShareAs::PosixFd => H::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        },
        location: location(plan.device),
        win32HandleMetaData: null::<c_void>().cast_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: u8::from(plan.rdma),
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn location(device: u32) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE,
        id: as_int(device),
    }
}

/// An ordinal beyond the range is none that exists.
fn as_int(ordinal: u32) -> c_int {
    c_int::try_from(ordinal).unwrap_or(c_int::MAX)
}

fn done(asked: CudaResult<()>) -> CudaResult<bool> {
    match asked {
        Ok(()) => Ok(true),
        Err(error) if error.code == CudaError::NOT_READY => Ok(false),
        Err(error) => Err(error),
    }
}

fn owned(call: &'static str, fd: c_int) -> CudaResult<OwnedFd> {
    if fd < 0 {
        return Err(CudaError::new(call, CudaError::INVALID_HANDLE));
    }
    // SAFETY: a descriptor that the driver has just opened for us.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // Programs that this process starts get no hold on the memory.
    let _ = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC);
    Ok(fd)
}
