//! The trait over the simulated machine.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    os::fd::{BorrowedFd, OwnedFd},
    thread,
};

use super::{
    ScriptedCuda, State, context_of, device_of, refusal,
    work::{KeptArg, Op},
};
use crate::cuda::{
    Access, ContextId, CopyOp, CudaApi, CudaError, CudaResult, DeviceAttribute, DevicePtr,
    DriverInfo, EventId, FunctionId, HandleBytes, KernelArg, Launch, MemoryId, MemoryInfo,
    MemoryPlan, ModuleId, Optional, StreamId,
};

impl ScriptedCuda {
    /// Counts a call, and does it unless the script says otherwise.
    fn call<T>(
        &self,
        name: &'static str,
        call: impl FnOnce(&mut State) -> CudaResult<T>,
    ) -> CudaResult<T> {
        let mut state = self.state.lock();
        state.enter(name)?;
        call(&mut state)
    }

    /// [`Self::call`] that needs a current context; with its device.
    fn bound<T>(
        &self,
        name: &'static str,
        call: impl FnOnce(&mut State, u32) -> CudaResult<T>,
    ) -> CudaResult<T> {
        self.call(name, |state| {
            let device = state.bound(name)?;
            call(state, device)
        })
    }

    fn exists(&self, name: &'static str, device: u32) -> CudaResult<()> {
        if device < self.machine.devices {
            return Ok(());
        }
        Err(CudaError::new(name, CudaError::INVALID_DEVICE))
    }

    fn room(&self, name: &'static str, state: &State, device: u32, len: u64) -> CudaResult<()> {
        match len {
            0 => Err(CudaError::new(name, CudaError::INVALID_VALUE)),
            _ if state.space.used(device) + len > self.machine.memory => {
                Err(CudaError::new(name, CudaError::OUT_OF_MEMORY))
            }
            _ => Ok(()),
        }
    }
}

impl CudaApi for ScriptedCuda {
    fn driver(&self) -> &DriverInfo {
        &self.info
    }

    fn device_count(&self) -> CudaResult<u32> {
        self.call("cuDeviceGetCount", |_| Ok(self.machine.devices))
    }

    fn device_name(&self, device: u32) -> CudaResult<String> {
        self.call("cuDeviceGetName", |_| {
            self.exists("cuDeviceGetName", device)?;
            Ok(format!("Scripted GPU {device}"))
        })
    }

    fn device_uuid(&self, device: u32) -> CudaResult<[u8; 16]> {
        self.call("cuDeviceGetUuid", |_| {
            self.exists("cuDeviceGetUuid", device)?;
            Ok([device as u8 + 1; 16])
        })
    }

    fn device_attribute(&self, device: u32, attribute: DeviceAttribute) -> CudaResult<i32> {
        self.call("cuDeviceGetAttribute", |_| {
            self.exists("cuDeviceGetAttribute", device)?;
            Ok(match attribute {
                DeviceAttribute::Multiprocessors => 132,
                DeviceAttribute::ComputeMajor => 9,
                DeviceAttribute::ComputeMinor => 0,
                DeviceAttribute::RdmaWithVirtualMemory => i32::from(self.machine.rdma),
                DeviceAttribute::DmaBuf => {
                    i32::from(self.machine.optional.contains(&Optional::DmaBufExport))
                }
                // As drivers do: yes, whatever happens when they are asked to.
                DeviceAttribute::FabricHandles
                | DeviceAttribute::PosixFdHandles
                | DeviceAttribute::VirtualMemory => 1,
            })
        })
    }

    fn retain_context(&self, device: u32) -> CudaResult<ContextId> {
        self.call("cuDevicePrimaryCtxRetain", |state| {
            self.exists("cuDevicePrimaryCtxRetain", device)?;
            state.shares[device as usize] += 1;
            Ok(context_of(device))
        })
    }

    fn release_context(&self, device: u32) -> CudaResult<()> {
        self.call("cuDevicePrimaryCtxRelease", |state| {
            self.exists("cuDevicePrimaryCtxRelease", device)?;
            let shares = &mut state.shares[device as usize];
            let less = shares.checked_sub(1);
            let call = "cuDevicePrimaryCtxRelease";
            *shares = less.ok_or_else(|| CudaError::new(call, CudaError::INVALID_CONTEXT))?;
            Ok(())
        })
    }

    fn current_context(&self) -> CudaResult<Option<ContextId>> {
        self.call("cuCtxGetCurrent", |state| {
            let stack = state.contexts.get(&thread::current().id());
            Ok(stack.and_then(|stack| stack.last()).copied())
        })
    }

    unsafe fn push_context(&self, context: ContextId) -> CudaResult<()> {
        self.call("cuCtxPushCurrent", |state| {
            if state.shares.get(device_of(&context) as usize).is_none_or(|shares| *shares == 0) {
                return Err(CudaError::new("cuCtxPushCurrent", CudaError::INVALID_CONTEXT));
            }
            state.contexts.entry(thread::current().id()).or_default().push(context);
            Ok(())
        })
    }

    fn pop_context(&self) -> CudaResult<()> {
        self.call("cuCtxPopCurrent", |state| {
            let stack = state.contexts.entry(thread::current().id()).or_default();
            let popped = stack.pop().map(drop);
            popped.ok_or_else(|| CudaError::new("cuCtxPopCurrent", CudaError::INVALID_CONTEXT))
        })
    }

    fn memory_info(&self) -> CudaResult<MemoryInfo> {
        self.bound("cuMemGetInfo", |state, device| {
            let total = self.machine.memory;
            Ok(MemoryInfo { free: total.saturating_sub(state.space.used(device)), total })
        })
    }

    fn alloc(&self, len: u64) -> CudaResult<DevicePtr> {
        self.bound("cuMemAlloc", |state, device| {
            self.room("cuMemAlloc", state, device, len)?;
            state.space.plain(len, device)
        })
    }

    unsafe fn free(&self, at: DevicePtr) -> CudaResult<()> {
        self.call("cuMemFree", |state| {
            if let Some((_, _, device)) = state.space.around(at) {
                for stream in state.work.of_device(device) {
                    state.run(stream, None)?;
                }
            }
            state.space.free(at)
        })
    }

    fn address_range(&self, at: DevicePtr) -> CudaResult<(DevicePtr, u64)> {
        self.bound("cuMemGetAddressRange", |state, _| match state.space.around(at) {
            Some((start, len, _)) => Ok((start, len)),
            None => Err(CudaError::new("cuMemGetAddressRange", CudaError::NOT_FOUND)),
        })
    }

    fn device_of(&self, at: DevicePtr) -> CudaResult<Option<u32>> {
        self.call("cuPointerGetAttribute", |state| Ok(state.space.home(at)))
    }

    fn granularity(&self, plan: &MemoryPlan) -> CudaResult<u64> {
        self.call("cuMemGetAllocationGranularity", |_| {
            self.exists("cuMemGetAllocationGranularity", plan.device)?;
            Ok(self.machine.granularity)
        })
    }

    fn create(&self, len: u64, plan: &MemoryPlan) -> CudaResult<MemoryId> {
        const CALL: &str = "cuMemCreate";
        self.call(CALL, |state| {
            self.exists(CALL, plan.device)?;
            if let Some(code) = refusal(&self.machine, plan.share) {
                return Err(CudaError::new(CALL, code));
            }
            if !len.is_multiple_of(self.machine.granularity) || (plan.rdma && !self.machine.rdma) {
                return Err(CudaError::new(CALL, CudaError::INVALID_VALUE));
            }
            self.room(CALL, state, plan.device, len)?;
            state.space.create(len, plan.device).map(MemoryId)
        })
    }

    unsafe fn release(&self, memory: MemoryId) -> CudaResult<()> {
        self.call("cuMemRelease", |state| state.space.release(memory.0))
    }

    unsafe fn export_fd(&self, memory: MemoryId) -> CudaResult<OwnedFd> {
        self.call("cuMemExportToShareableHandle", |state| state.space.export_fd(memory.0))
    }

    unsafe fn export_fabric(&self, memory: MemoryId) -> CudaResult<HandleBytes> {
        self.call("cuMemExportToShareableHandle", |state| state.space.export_fabric(memory.0))
    }

    fn import_fd(&self, fd: BorrowedFd<'_>) -> CudaResult<MemoryId> {
        self.bound("cuMemImportFromShareableHandle", |state, device| {
            state.space.import_fd(fd, device).map(MemoryId)
        })
    }

    fn import_fabric(&self, handle: &HandleBytes) -> CudaResult<MemoryId> {
        self.bound("cuMemImportFromShareableHandle", |state, device| {
            state.space.import_fabric(handle, device).map(MemoryId)
        })
    }

    fn reserve(&self, len: u64) -> CudaResult<DevicePtr> {
        self.call("cuMemAddressReserve", |state| Ok(state.space.reserve(len)))
    }

    unsafe fn unreserve(&self, at: DevicePtr, len: u64) -> CudaResult<()> {
        self.call("cuMemAddressFree", |state| state.space.unreserve(at, len))
    }

    unsafe fn map(&self, at: DevicePtr, len: u64, memory: MemoryId) -> CudaResult<()> {
        self.call("cuMemMap", |state| state.space.map(at, len, memory.0))
    }

    unsafe fn unmap(&self, at: DevicePtr, len: u64) -> CudaResult<()> {
        self.call("cuMemUnmap", |state| state.space.unmap(at, len))
    }

    unsafe fn set_access(
        &self,
        at: DevicePtr,
        _len: u64,
        device: u32,
        access: Access,
    ) -> CudaResult<()> {
        self.call("cuMemSetAccess", |state| {
            self.exists("cuMemSetAccess", device)?;
            state.space.set_access(at, access)
        })
    }

    unsafe fn ipc_handle(&self, at: DevicePtr) -> CudaResult<HandleBytes> {
        self.bound("cuIpcGetMemHandle", |state, _| match self.machine.ipc {
            Some(code) => Err(CudaError::new("cuIpcGetMemHandle", code)),
            None => state.space.ipc_handle(at),
        })
    }

    fn ipc_open(&self, handle: &HandleBytes) -> CudaResult<DevicePtr> {
        self.bound("cuIpcOpenMemHandle", |state, device| state.space.ipc_open(handle, device))
    }

    unsafe fn ipc_close(&self, at: DevicePtr) -> CudaResult<()> {
        self.bound("cuIpcCloseMemHandle", |state, _| state.space.close(at))
    }

    unsafe fn export_dma_buf(&self, at: DevicePtr, len: u64) -> CudaResult<OwnedFd> {
        self.bound("cuMemGetHandleForAddressRange", |state, _| {
            if self.info.has(Optional::DmaBufExport) {
                return state.space.dma_buf(at, len);
            }
            Err(CudaError::new("cuMemGetHandleForAddressRange", CudaError::NOT_SUPPORTED))
        })
    }

    fn host_alloc(&self, len: u64) -> CudaResult<DevicePtr> {
        self.bound("cuMemHostAlloc", |state, _| {
            // SAFETY: not of size zero.
            let at = unsafe { alloc_zeroed(layout(len)) } as u64;
            state.space.host_add(at, len);
            Ok(DevicePtr(at))
        })
    }

    unsafe fn host_free(&self, at: DevicePtr) -> CudaResult<()> {
        self.bound("cuMemFreeHost", |state, device| {
            for stream in state.work.of_device(device) {
                state.run(stream, None)?;
            }
            let len = state.space.host_remove(at.0);
            let len =
                len.ok_or_else(|| CudaError::new("cuMemFreeHost", CudaError::INVALID_VALUE))?;
            // SAFETY: allocated by `host_alloc` with this layout, once.
            unsafe { dealloc(at.0 as *mut u8, layout(len)) };
            Ok(())
        })
    }

    unsafe fn host_register(&self, at: DevicePtr, len: u64) -> CudaResult<()> {
        const ALREADY: u32 = 712;
        self.bound("cuMemHostRegister", |state, _| {
            if state.space.host_add(at.0, len) {
                return Ok(());
            }
            Err(CudaError::new("cuMemHostRegister", ALREADY))
        })
    }

    unsafe fn host_unregister(&self, at: DevicePtr) -> CudaResult<()> {
        const CALL: &str = "cuMemHostUnregister";
        self.bound(CALL, |state, _| {
            let was = state.space.host_remove(at.0).map(drop);
            was.ok_or_else(|| CudaError::new(CALL, CudaError::INVALID_VALUE))
        })
    }

    fn stream_create(&self) -> CudaResult<StreamId> {
        self.bound("cuStreamCreate", |state, device| Ok(state.work.new_stream(device)))
    }

    unsafe fn stream_destroy(&self, stream: StreamId) -> CudaResult<()> {
        self.call("cuStreamDestroy", |state| {
            let ran = state.run(stream, None);
            state.work.forget_stream(stream);
            ran
        })
    }

    unsafe fn stream_synchronize(&self, stream: StreamId) -> CudaResult<()> {
        self.call("cuStreamSynchronize", |state| state.run(stream, None))
    }

    unsafe fn stream_query(&self, stream: StreamId) -> CudaResult<bool> {
        self.call("cuStreamQuery", |state| {
            let idle = state.work.is_idle("cuStreamQuery", stream)?;
            if !idle {
                state.step(stream)?; // time passes
            }
            Ok(idle)
        })
    }

    unsafe fn stream_wait_event(&self, stream: StreamId, event: EventId) -> CudaResult<()> {
        self.call("cuStreamWaitEvent", |state| {
            state.work.wait_for("cuStreamWaitEvent", stream, event)
        })
    }

    fn event_create(&self, timed: bool) -> CudaResult<EventId> {
        self.bound("cuEventCreate", |state, device| Ok(state.work.new_event(device, timed)))
    }

    unsafe fn event_destroy(&self, event: EventId) -> CudaResult<()> {
        self.call("cuEventDestroy", |state| {
            if let Some((stream, which)) = state.work.pending("cuEventDestroy", event)? {
                state.run(stream, Some((event.0, which)))?;
            }
            state.work.end_event("cuEventDestroy", event)
        })
    }

    unsafe fn event_record(&self, event: EventId, stream: StreamId) -> CudaResult<()> {
        self.call("cuEventRecord", |state| state.work.record("cuEventRecord", event, stream))
    }

    unsafe fn event_synchronize(&self, event: EventId) -> CudaResult<()> {
        self.call("cuEventSynchronize", |state| {
            match state.work.pending("cuEventSynchronize", event)? {
                Some((stream, which)) => state.run(stream, Some((event.0, which))),
                None => state.work.check(),
            }
        })
    }

    unsafe fn event_query(&self, event: EventId) -> CudaResult<bool> {
        self.call("cuEventQuery", |state| match state.work.pending("cuEventQuery", event)? {
            Some((stream, _)) => {
                state.step(stream)?; // time passes
                Ok(false)
            }
            None => state.work.check().map(|()| true),
        })
    }

    unsafe fn event_elapsed_ms(&self, start: EventId, end: EventId) -> CudaResult<f32> {
        self.call("cuEventElapsedTime", |state| state.work.elapsed(start, end))
    }

    unsafe fn copy(
        &self,
        dst: DevicePtr,
        src: DevicePtr,
        len: u64,
        stream: StreamId,
    ) -> CudaResult<()> {
        self.bound("cuMemcpyAsync", |state, device| {
            state.work.push("cuMemcpyAsync", stream, device, Op::Copy { dst, src, len })
        })
    }

    unsafe fn copy_batch(&self, ops: &[CopyOp], stream: StreamId) -> CudaResult<()> {
        const CALL: &str = "cuMemcpyBatchAsync";
        self.bound(CALL, |state, device| {
            if !self.info.has(Optional::BatchCopy) {
                return Err(CudaError::new(CALL, CudaError::NOT_SUPPORTED));
            }
            // In no order: the last first.
            for &CopyOp { dst, src, len } in ops.iter().rev() {
                state.work.push(CALL, stream, device, Op::Copy { dst, src, len })?;
            }
            Ok(())
        })
    }

    unsafe fn fill(&self, at: DevicePtr, byte: u8, len: u64, stream: StreamId) -> CudaResult<()> {
        self.bound("cuMemsetD8Async", |state, device| {
            state.work.push("cuMemsetD8Async", stream, device, Op::Fill { at, byte, len })
        })
    }

    fn module_load(&self, image: &[u8]) -> CudaResult<ModuleId> {
        self.bound("cuModuleLoadData", |state, _| {
            if image.last() != Some(&0) {
                return Err(CudaError::new("cuModuleLoadData", CudaError::INVALID_VALUE));
            }
            state.modules += 1;
            Ok(ModuleId(1))
        })
    }

    unsafe fn module_unload(&self, _module: ModuleId) -> CudaResult<()> {
        self.bound("cuModuleUnload", |state, _| {
            state.modules = state.modules.saturating_sub(1);
            Ok(())
        })
    }

    unsafe fn module_function(&self, _module: ModuleId, name: &str) -> CudaResult<FunctionId> {
        self.call("cuModuleGetFunction", |state| {
            if !state.kernels.contains_key(name) {
                return Err(CudaError::new("cuModuleGetFunction", CudaError::NOT_FOUND));
            }
            state.functions.push(name.to_owned());
            Ok(FunctionId(state.functions.len() as u64))
        })
    }

    unsafe fn launch(
        &self,
        function: FunctionId,
        launch: Launch,
        args: &[KernelArg<'_>],
        stream: StreamId,
    ) -> CudaResult<()> {
        const CALL: &str = "cuLaunchKernel";
        self.bound(CALL, |state, device| {
            let name = state.functions.get((function.0 as usize).wrapping_sub(1));
            let kernel = name.and_then(|name| state.kernels.get(name)).cloned();
            let kernel = kernel.ok_or_else(|| CudaError::new(CALL, CudaError::INVALID_HANDLE))?;
            let threads: u64 = launch.block.iter().map(|&n| u64::from(n)).product();
            if !(1..=1024).contains(&threads) || launch.grid.contains(&0) {
                return Err(CudaError::new(CALL, CudaError::INVALID_VALUE));
            }
            let args = args.iter().map(KeptArg::of).collect();
            state.work.push(CALL, stream, device, Op::Kernel { kernel, launch, args })
        })
    }
}

fn layout(len: u64) -> Layout {
    Layout::from_size_align(len as usize, 4096).expect("as much as a test allocates")
}
