//! Devices, and what belongs to one: streams, events and pinned memory, each given back when
//! dropped. None belongs to a thread: whoever calls binds the device for the length of the call.

use std::{
    any::Any,
    fmt,
    marker::PhantomData,
    ptr::NonNull,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use transport_core::{Error, ErrorKind, ReadyEvent, RegionKind, Result};

use super::{
    ContextId, CopyOp, CudaApi, CudaResult, DevicePtr, During, EventId, FunctionId, KernelArg,
    KindProbe, Launch, MemoryInfo, StreamId,
};

/// How long a wait with a bound spins before it starts to sleep between looks: longer than most
/// batches of copies take, since a nap would add what its timer is late.
const SPIN: Duration = Duration::from_millis(2);
/// Longest sleep between looks. Shorter ones are a fiftieth of what has been waited.
const NAP: Duration = Duration::from_millis(1);

/// A device of this process with a share in its primary context. Cheap to clone.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    api: Arc<dyn CudaApi>,
    ordinal: u32,
    context: ContextId,
    name: String,
    uuid: [u8; 16],
    kinds: OnceLock<KindProbe>,
}

impl Device {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for an ordinal that does not exist, naming how many there are.
    pub fn open(api: Arc<dyn CudaApi>, ordinal: u32) -> Result<Self> {
        const OPERATION: &str = "open CUDA device";
        let count = api.device_count().during(OPERATION)?;
        if ordinal >= count {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                OPERATION,
                "this process sees no such device",
            )
            .with("device", ordinal)
            .with("devices", count)
            .remedy("choose a smaller ordinal, or look at CUDA_VISIBLE_DEVICES"));
        }
        let named = |e: Error| e.with("device", ordinal);
        let name = api.device_name(ordinal).during(OPERATION).map_err(named)?;
        let uuid = api.device_uuid(ordinal).during(OPERATION).map_err(named)?;
        let context = api.retain_context(ordinal).during(OPERATION).map_err(|e| {
            named(e)
                .with("name", &name)
                .remedy("check with nvidia-smi that the device is usable and not exclusive")
        })?;
        Ok(Self(Arc::new(Inner { api, ordinal, context, name, uuid, kinds: OnceLock::new() })))
    }

    /// The calls.
    pub fn api(&self) -> &Arc<dyn CudaApi> {
        &self.0.api
    }

    /// Its number in this process.
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// Its name, such as `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its identity, the same in every process.
    pub fn uuid(&self) -> [u8; 16] {
        self.0.uuid
    }

    /// What its memory is called in regions.
    pub fn region_kind(&self) -> RegionKind {
        RegionKind::Cuda { device: self.0.ordinal }
    }

    /// Makes the device current on this thread until the guard is dropped; then whatever was
    /// current before is so again. Costs next to nothing where it is current already.
    pub fn bind(&self) -> Result<Bound<'_>> {
        self.bound().during("bind CUDA device").map_err(|e| e.with("device", self.0.ordinal))
    }

    /// [`Self::bind`], for the layer's own calls.
    pub(crate) fn bound(&self) -> CudaResult<Bound<'_>> {
        let Inner { api, context, .. } = &*self.0;
        let pushed = api.current_context()? != Some(*context);
        if pushed {
            // SAFETY: the context lives as long as our share in it.
            unsafe { api.push_context(*context) }?;
        }
        Ok(Bound { device: self, pushed, _of_this_thread: PhantomData })
    }

    /// Its memory now.
    pub fn memory(&self) -> Result<MemoryInfo> {
        self.with(|api| api.memory_info()).during("measure device memory")
    }

    /// Which kinds of memory it can make, found out once by doing it; see [`KindProbe::run`].
    pub fn kinds(&self) -> Result<&KindProbe> {
        if let Some(probe) = self.0.kinds.get() {
            return Ok(probe);
        }
        let probe = KindProbe::run(self)?;
        Ok(self.0.kinds.get_or_init(|| probe))
    }

    /// A new stream.
    pub fn stream(&self) -> Result<Stream> {
        let id = self.with(|api| api.stream_create()).during("create stream")?;
        Ok(Stream { device: self.clone(), id, owned: true })
    }

    /// A new event; `timed` if it is to be compared with another one.
    pub fn event(&self, timed: bool) -> Result<Event> {
        let id = self.with(|api| api.event_create(timed)).during("create event")?;
        Ok(Event { device: self.clone(), id, owned: true })
    }

    /// `len` zeroed bytes of host memory that copies from and to devices run fastest with.
    pub fn pinned(&self, len: usize) -> Result<Pinned> {
        const OPERATION: &str = "allocate pinned memory";
        let named = |e: Error| {
            e.with("bytes", len).remedy("free host memory, or raise the limit on locked memory")
        };
        let at = self.with(|api| api.host_alloc(len.max(1) as u64)).during(OPERATION);
        let at = at.map_err(named)?;
        let start = NonNull::new(at.0 as *mut u8).ok_or_else(|| {
            named(Error::new(ErrorKind::Unexpected, OPERATION, "the driver returned no address"))
        })?;
        // SAFETY: that many bytes have just been allocated.
        unsafe { start.write_bytes(0, len.max(1)) };
        Ok(Pinned { device: self.clone(), start, len })
    }

    /// Calls with the device bound.
    pub(crate) fn with<T>(
        &self,
        call: impl FnOnce(&dyn CudaApi) -> CudaResult<T>,
    ) -> CudaResult<T> {
        let _bound = self.bound()?;
        call(&*self.0.api)
    }
}

impl PartialEq for Device {
    /// Whether it is the same device, whichever handle it was opened by.
    fn eq(&self, other: &Self) -> bool {
        self.0.uuid == other.0.uuid && self.0.ordinal == other.0.ordinal
    }
}

impl Eq for Device {}

impl Drop for Inner {
    fn drop(&mut self) {
        // At the end of the process the driver may have gone already.
        let _ = self.api.release_context(self.ordinal);
    }
}

/// Keeps a device current on one thread.
pub struct Bound<'a> {
    device: &'a Device,
    pushed: bool,
    _of_this_thread: PhantomData<*const ()>,
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let _ = self.device.0.api.pop_context();
        }
    }
}

/// A queue of work of one device. Work runs in order; dropping it leaves queued work running.
pub struct Stream {
    device: Device,
    id: StreamId,
    owned: bool,
}

impl Stream {
    /// A stream that something else made and ends, such as a framework's current stream.
    ///
    /// # Safety
    /// It is a stream of that device and lives longer than this handle.
    pub unsafe fn foreign(device: &Device, id: StreamId) -> Self {
        Self { device: device.clone(), id, owned: false }
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The driver's handle.
    pub fn id(&self) -> StreamId {
        self.id
    }

    /// Waits until everything queued is done; reports what went wrong in it.
    pub fn synchronize(&self) -> Result<()> {
        self.with("synchronize stream", |api| {
            // SAFETY: our stream, or one that its owner keeps.
            unsafe { api.stream_synchronize(self.id) }
        })
    }

    /// Waits like [`Self::synchronize`], but at most `timeout`.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`]: work may still be running.
    pub fn synchronize_within(&self, timeout: Duration) -> Result<()> {
        until("synchronize stream", timeout, || self.is_done())
    }

    /// Whether everything queued is done.
    pub fn is_done(&self) -> Result<bool> {
        self.with("query stream", |api| {
            // SAFETY: as above.
            unsafe { api.stream_query(self.id) }
        })
    }

    /// Makes work that is queued from now on wait for `event`, which may be another device's.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.with("wait for event", |api| {
            // SAFETY: as above, for stream and event.
            unsafe { api.stream_wait_event(self.id, event.id) }
        })
    }

    /// Sets `event` behind the work that is queued now.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for an event of another device.
    pub fn record(&self, event: &Event) -> Result<()> {
        const OPERATION: &str = "record event";
        if event.device.ordinal() != self.device.ordinal() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                OPERATION,
                "an event is recorded in streams of its own device only",
            )
            .with("stream_device", self.device.ordinal())
            .with("event_device", event.device.ordinal())
            .remedy("make the event on the stream's device"));
        }
        self.with(OPERATION, |api| {
            // SAFETY: as above.
            unsafe { api.event_record(event.id, self.id) }
        })
    }

    /// A new event behind the work that is queued now.
    pub fn record_new(&self) -> Result<Event> {
        let event = self.device.event(false)?;
        self.record(&event)?;
        Ok(event)
    }

    /// Queues a copy.
    ///
    /// # Safety
    /// Both ranges stay mapped until the copy is done; nothing else uses the destination, or writes
    /// the source, until then.
    pub unsafe fn copy(&self, dst: DevicePtr, src: DevicePtr, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        self.with("queue copy", |api| {
            // SAFETY: the caller's promise.
            unsafe { api.copy(dst, src, len, self.id) }
        })
    }

    /// Queues many copies by one call of the driver; see [`CudaApi::copy_batch`].
    ///
    /// # Safety
    /// As [`Self::copy`], for each of them; no destination overlaps another one or a source.
    pub unsafe fn copy_batch(&self, ops: &[CopyOp]) -> Result<()> {
        self.with("queue copies", |api| {
            // SAFETY: the caller's promise.
            unsafe { api.copy_batch(ops, self.id) }
        })
    }

    /// Queues filling `len` bytes with `byte`.
    ///
    /// # Safety
    /// As [`Self::copy`], for the destination.
    pub unsafe fn fill(&self, at: DevicePtr, byte: u8, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        self.with("queue fill", |api| {
            // SAFETY: the caller's promise.
            unsafe { api.fill(at, byte, len, self.id) }
        })
    }

    /// Queues a kernel.
    ///
    /// # Safety
    /// The arguments are those that the kernel takes; what it reads and writes stays as in
    /// [`Self::copy`] until it is done.
    pub unsafe fn launch(
        &self,
        function: FunctionId,
        launch: Launch,
        args: &[KernelArg<'_>],
    ) -> Result<()> {
        self.with("launch kernel", |api| {
            // SAFETY: the caller's promise.
            unsafe { api.launch(function, launch, args, self.id) }
        })
    }

    fn with<T>(
        &self,
        operation: &'static str,
        call: impl FnOnce(&dyn CudaApi) -> CudaResult<T>,
    ) -> Result<T> {
        self.device
            .with(call)
            .during(operation)
            .map_err(|e| e.with("device", self.device.ordinal()))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned {
            let _ = self.device.with(|api| {
                // SAFETY: our own stream, once.
                unsafe { api.stream_destroy(self.id) }
            });
        }
    }
}

/// A point in a stream, to wait for. One that was never recorded has happened.
pub struct Event {
    device: Device,
    id: EventId,
    owned: bool,
}

impl Event {
    /// An event that something else made and ends, such as a framework's.
    ///
    /// # Safety
    /// It is an event of that device and lives longer than this handle.
    pub unsafe fn foreign(device: &Device, id: EventId) -> Self {
        Self { device: device.clone(), id, owned: false }
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The driver's handle.
    pub fn id(&self) -> EventId {
        self.id
    }

    /// Whether it has happened; reports what went wrong before it.
    pub fn is_done(&self) -> Result<bool> {
        let asked = self.device.with(|api| {
            // SAFETY: our event, or one that its owner keeps.
            unsafe { api.event_query(self.id) }
        });
        asked.during("query event")
    }

    /// Waits for it.
    pub fn synchronize(&self) -> Result<()> {
        let waited = self.device.with(|api| {
            // SAFETY: as above.
            unsafe { api.event_synchronize(self.id) }
        });
        waited.during("wait for event")
    }

    /// Waits for it, at most `timeout`.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`].
    pub fn synchronize_within(&self, timeout: Duration) -> Result<()> {
        until("wait for event", timeout, || self.is_done())
    }

    /// Time from this event to a later one. Both are timed and have happened.
    pub fn elapsed(&self, until: &Self) -> Result<Duration> {
        let asked = self.device.with(|api| {
            // SAFETY: as above, for both.
            unsafe { api.event_elapsed_ms(self.id, until.id) }
        });
        let milliseconds = asked.during("compare events")?;
        Ok(Duration::from_secs_f32(milliseconds.max(0.0) / 1000.0))
    }
}

impl ReadyEvent for Event {
    fn wait(&self, timeout: Duration) -> Result<()> {
        self.synchronize_within(timeout)
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.owned {
            let _ = self.device.with(|api| {
                // SAFETY: our own event, once.
                unsafe { api.event_destroy(self.id) }
            });
        }
    }
}

/// Host memory that does not move. Copies that use it must be done before it is dropped.
pub struct Pinned {
    device: Device,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory; access goes through the borrow of the handle.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Its address, which devices may use too.
    pub fn address(&self) -> DevicePtr {
        DevicePtr(self.start.as_ptr() as u64)
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The whole words, to write. No copy may be under way that uses what is written.
    #[inline]
    pub fn as_mut_words(&mut self) -> &mut [u64] {
        // SAFETY: allocated, in pages, and zeroed by the constructor; every pattern of bits is an
        // integer; borrowed with the handle.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.len / 8) }
    }

    /// The bytes. No copy into it may be under way.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: allocated and zeroed by the constructor; borrowed with the handle.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The bytes, to write. No copy from or into it may be under way.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is unique.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let at = self.address();
        let _ = self.device.with(|api| {
            // SAFETY: allocated by the constructor, once.
            unsafe { api.host_free(at) }
        });
    }
}

/// Looks until it is done: first as fast as it can, then with naps.
fn until(
    operation: &'static str,
    timeout: Duration,
    mut is_done: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let started = Instant::now();
    while !is_done()? {
        let waited = started.elapsed();
        if waited >= timeout {
            return Err(Error::new(
                ErrorKind::Timeout,
                operation,
                "the device is not done in time",
            )
            .with("timeout_ms", timeout.as_millis())
            .remedy("look for a kernel that does not end, or allow more time"));
        }
        if waited < SPIN {
            std::hint::spin_loop();
        } else {
            std::thread::sleep(NAP.min(waited / 50).min(timeout - waited));
        }
    }
    Ok(())
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("ordinal", &self.0.ordinal)
            .field("name", &self.0.name)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Bound<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bound").field("device", &self.device).finish_non_exhaustive()
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("device", &self.device.ordinal()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("device", &self.device.ordinal()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("len", &self.len).finish_non_exhaustive()
    }
}
