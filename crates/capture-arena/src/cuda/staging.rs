//! Between host memory and a device at the full rate of the bus: memory that does not move, and
//! copies that run while their caller does something else.

use std::{
    collections::VecDeque,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use transport_core::{Error, ErrorKind, RegionKind, RegionMut, RegionSlice, Result};

use super::{Device, DevicePtr, During, Event, Stream, copies};
use crate::{Backing, Quarantine, RegionPool, Unfinished, suballoc::UNIT};

const STAGE: &str = "copy between host and device";
/// How often it is looked for a buffer that another call gives back.
const NAP: Duration = Duration::from_micros(50);
/// How long copies that went wrong are waited for when the staging is dropped.
const LAST_WAIT: Duration = Duration::from_secs(2);

/// Keeps host memory where it is, so that devices copy from and to it by themselves. Takes the
/// kernel a while for much memory: once for an arena or a pool, never for a call.
pub struct PageLock {
    device: Device,
    backing: Backing,
}

/// How much memory a [`Staging`] has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StagingConfig {
    /// Bytes of a buffer. Default: 4 MiB, which takes a bus a tenth of a millisecond, and a
    /// connection a multiple of that.
    pub buffer_bytes: u64,
    /// Buffers, of all calls together; a call has two or more of them in flight if it gets them.
    /// Default: 32.
    pub buffers: u32,
}

impl Default for StagingConfig {
    fn default() -> Self {
        Self { buffer_bytes: 4 << 20, buffers: 32 }
    }
}

/// Page-locked buffers of the host, and copies between the host and one device. Cheap to clone;
/// threads may share it.
///
/// Memory that a copy may still write is never given back: what a call leaves unfinished is kept,
/// counted, and let go of once the device is done with it.
#[derive(Clone)]
pub struct Staging(Arc<Inner>);

struct Inner {
    device: Device,
    config: StagingConfig,
    buffers: Option<Buffers>,
    streams: Mutex<Vec<Stream>>,
    stuck: Quarantine<Stuck>,
}

struct Buffers {
    pool: RegionPool,
    _lock: PageLock, // kept for its Drop
}

/// Part of what goes across.
#[derive(Debug)]
pub struct Part {
    /// From memory of the host or of the device.
    pub src: RegionSlice,
    /// Into which of the destinations.
    pub to: usize,
    /// From which byte of it on.
    pub at: u64,
}

/// Copies of one call into destinations that it owns until they are done.
#[must_use = "finish it, or it is given up"]
pub struct Crossing {
    staging: Staging,
    stream: Option<Stream>,
    to: Vec<RegionMut>,
    owns_padding: bool,
    groups: VecDeque<(Event, Vec<Part>)>,
    spare: Vec<Event>,
    blocks: Vec<(u64, u64)>, // device memory that sources were found in
}

/// What the device may still read and write.
struct Stuck {
    stream: Stream,
    bytes: u64,
    _to: Vec<RegionMut>,                   // kept for its Drop
    _groups: VecDeque<(Event, Vec<Part>)>, // likewise
}

impl PageLock {
    /// Locks all of `backing`, which is memory of the host, for every device.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for device memory; whatever the driver reports, such as that the
    /// machine does not allow so much locked memory.
    pub fn new(device: &Device, backing: &Backing) -> Result<Self> {
        const OPERATION: &str = "page-lock host memory";
        if !backing.kind().is_host() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                OPERATION,
                "it is not memory of the host",
            )
            .with("found", format_args!("{:?}", backing.kind())));
        }
        let (start, len) = (DevicePtr(backing.address()), backing.bytes_len());
        let locked = device.with(|api| {
            // SAFETY: memory that the backing keeps mapped, and that is unlocked before.
            unsafe { api.host_register(start, len) }
        });
        locked.during(OPERATION).map_err(|e| {
            e.with("bytes", len).remedy("raise the limit on locked memory, or lock less of it")
        })?;
        Ok(Self { device: device.clone(), backing: backing.clone() })
    }
}

impl Drop for PageLock {
    fn drop(&mut self) {
        let start = DevicePtr(self.backing.address());
        let _ = self.device.with(|api| {
            // SAFETY: locked by `new`; whoever copies keeps the lock until that is done.
            unsafe { api.host_unregister(start) }
        });
    }
}

impl Staging {
    /// Makes and locks the buffers.
    ///
    /// # Errors
    /// [`ErrorKind::ConfigInvalid`] for fewer than two buffers or empty ones; as
    /// [`Backing::heap`] and [`PageLock::new`].
    pub fn new(device: &Device, config: StagingConfig) -> Result<Self> {
        let config =
            StagingConfig { buffer_bytes: config.buffer_bytes.next_multiple_of(UNIT), ..config };
        if config.buffers < 2 || config.buffer_bytes == 0 {
            return Err(Error::new(ErrorKind::ConfigInvalid, "make staging buffers", "too few")
                .with("buffers", config.buffers)
                .with("buffer_bytes", config.buffer_bytes)
                .remedy("use two buffers or more of some megabytes"));
        }
        let backing = Backing::heap(config.buffer_bytes.saturating_mul(config.buffers.into()))?;
        let lock = PageLock::new(device, &backing)?;
        let buffers = Buffers { pool: RegionPool::new(backing)?, _lock: lock };
        Self::make(device, config, Some(buffers))
    }

    /// Without buffers: for callers whose own memory is page-locked, and that only [send](Crossing::send).
    ///
    /// # Errors
    /// What the device reports.
    pub fn without_buffers(device: &Device) -> Result<Self> {
        Self::make(device, StagingConfig { buffer_bytes: 0, buffers: 0 }, None)
    }

    fn make(device: &Device, config: StagingConfig, buffers: Option<Buffers>) -> Result<Self> {
        Ok(Self(Arc::new(Inner {
            device: device.clone(),
            config,
            buffers,
            streams: Mutex::new(vec![device.stream()?]),
            stuck: Quarantine::new(LAST_WAIT),
        })))
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// What it was made with.
    pub fn config(&self) -> StagingConfig {
        self.0.config
    }

    /// Memory that unfinished copies may still write, in bytes.
    pub fn quarantined_bytes(&self) -> u64 {
        self.0.stuck.bytes()
    }

    /// Begins copies into `to`: memory of the device, or page-locked memory of the host.
    ///
    /// `owns_padding` allows parts to reach beyond the end of a destination to the next multiple of
    /// 512, as arenas and pools hand them out, so that what lies side by side goes as one.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for destinations on another device.
    pub fn begin(&self, to: Vec<RegionMut>, owns_padding: bool) -> Result<Crossing> {
        self.0.stuck.sweep();
        let own = self.0.device.region_kind();
        let elsewhere = to.iter().find(|to| to.kind() != own && !to.kind().is_host());
        if let Some(elsewhere) = elsewhere.filter(|to| !to.is_empty()) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                STAGE,
                "the destination lies elsewhere",
            )
            .with("device", self.0.device.ordinal())
            .with("found", format_args!("{:?}", elsewhere.kind()))
            .remedy("use buffers for the device that the destination lies on"));
        }
        let idle = self.0.streams.lock().pop();
        let stream = match idle {
            Some(stream) => stream,
            None => self.0.device.stream()?,
        };
        Ok(Crossing {
            staging: self.clone(),
            stream: Some(stream),
            to,
            owns_padding,
            groups: VecDeque::new(),
            spare: Vec::new(),
            blocks: Vec::new(),
        })
    }
}

impl Crossing {
    /// The destinations.
    pub fn to(&self) -> &[RegionMut] {
        &self.to
    }

    /// Makes what is sent from now on wait for `event`.
    pub fn after(&self, event: &Event) -> Result<()> {
        self.stream().wait(event)
    }

    /// Takes a buffer, whose bytes are sent next. Where none is free, waits for the copies of this
    /// call that are under way, or for another call to give one back.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`]; what the device reports.
    pub fn buffer(&mut self, deadline: Instant) -> Result<RegionMut> {
        loop {
            if let Some(buffer) = self.try_buffer()? {
                return Ok(buffer);
            }
            if Instant::now() >= deadline {
                return Err(Error::new(ErrorKind::Timeout, STAGE, "no buffer is free in time")
                    .with("buffers", self.staging.0.config.buffers)
                    .remedy("make more buffers, or run fewer calls at a time"));
            }
            match self.groups.front() {
                Some((done, _)) => done.synchronize_within(left(deadline))?,
                None => std::thread::sleep(NAP),
            }
        }
    }

    /// Takes a buffer if one is free.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if there are none; what the device reports.
    pub fn try_buffer(&mut self) -> Result<Option<RegionMut>> {
        self.let_go_of_done()?;
        let inner = &self.staging.0;
        let none = || Error::new(ErrorKind::Unsupported, STAGE, "it was made without buffers");
        let buffers = inner.buffers.as_ref().ok_or_else(none)?;
        Ok(buffers.pool.take(inner.config.buffer_bytes as usize).ok())
    }

    /// Sends bytes on their way, and returns at once. Sources stay until they are copied; neighbours
    /// go together.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a part that leaves its destination or the device memory of
    /// its source, before anything of the call is sent; what the device reports.
    pub fn send(&mut self, parts: Vec<Part>) -> Result<()> {
        let invalid = |why, part: &Part| {
            Error::new(ErrorKind::InvalidInput, STAGE, why)
                .with("destination", part.to)
                .with("at", part.at)
                .with("bytes", part.src.len())
        };
        let device = self.staging.0.device.clone();
        let own = device.region_kind();
        let _bound = device.bind()?; // once for all calls
        let mut runs: Vec<Run> = Vec::with_capacity(parts.len());
        for part in parts.iter().filter(|part| !part.src.is_empty()) {
            let len = part.src.len() as u64;
            let to = self.to.get(part.to).ok_or_else(|| invalid("no such destination", part))?;
            let room = match self.owns_padding {
                true => (to.len() as u64).next_multiple_of(UNIT),
                false => to.len() as u64,
            };
            if part.at.checked_add(len).is_none_or(|end| end > room) {
                return Err(invalid("the part is longer than what is left there", part));
            }
            match part.src.kind() {
                kind if kind == own => {
                    copies::look_up(&device, &mut self.blocks, part.src.address() as u64, len)?
                }
                kind if kind.is_host() => {}
                found => {
                    return Err(invalid("the source is out of reach", part)
                        .with("found", format_args!("{found:?}")));
                }
            }
            let run = Run {
                dst: to.address() as u64 + part.at,
                src: part.src.address() as u64,
                len,
                kinds: (to.kind(), part.src.kind()),
            };
            match runs.last_mut() {
                Some(last) if last.is_before(&run) => last.len += len,
                _ => runs.push(run),
            }
        }
        let event = match self.spare.pop() {
            Some(event) => event,
            None => device.event(false)?,
        };
        self.groups.push_back((event, parts)); // kept, whatever of it is queued
        let stream = self.stream.as_ref().expect("until it ends");
        for run in runs {
            // SAFETY: the source is kept by the group, and the destination by the crossing, which
            // has the only handle to it. Both go into quarantine where this is not waited for.
            unsafe { stream.copy(DevicePtr(run.dst), DevicePtr(run.src), run.len) }?;
        }
        let (event, _) = self.groups.back().expect("just pushed");
        stream.record(event)
    }

    /// Waits until all is copied, and gives the destinations back.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`]; what the device reports. The destinations go back to their owners
    /// once the device is done with them.
    pub fn finish(mut self, deadline: Instant) -> Result<Vec<RegionMut>> {
        if let Some((last, _)) = self.groups.back() {
            last.synchronize_within(left(deadline))?;
        }
        self.groups.clear();
        self.staging.0.streams.lock().extend(self.stream.take());
        Ok(std::mem::take(&mut self.to))
    }

    /// Gives the buffers back that are copied.
    fn let_go_of_done(&mut self) -> Result<()> {
        while let Some((done, _)) = self.groups.front() {
            if !done.is_done()? {
                break;
            }
            let (event, _parts) = self.groups.pop_front().expect("looked at");
            self.spare.push(event);
        }
        Ok(())
    }

    fn stream(&self) -> &Stream {
        self.stream.as_ref().expect("until it ends")
    }
}

impl Drop for Crossing {
    fn drop(&mut self) {
        let Some(stream) = self.stream.take() else { return };
        let to = std::mem::take(&mut self.to);
        let bytes = to.iter().map(|to| to.len() as u64).sum();
        let groups = std::mem::take(&mut self.groups);
        if groups.is_empty() {
            return; // nothing was sent, or all of it is waited for
        }
        self.staging.0.stuck.keep(Stuck { stream, bytes, _to: to, _groups: groups });
        self.staging.0.stuck.sweep();
    }
}

impl Unfinished for Stuck {
    /// Whether the device no longer touches it; one that reports an error runs nothing any more.
    fn is_over(&mut self) -> bool {
        self.stream.is_done().unwrap_or(true)
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// What is copied as one.
struct Run {
    dst: u64,
    src: u64,
    len: u64,
    kinds: (RegionKind, RegionKind),
}

impl Run {
    /// Whether `next` begins where this ends, in both.
    fn is_before(&self, next: &Self) -> bool {
        let ends = (self.dst + self.len, self.src + self.len);
        self.kinds == next.kinds && ends == (next.dst, next.src)
    }
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

impl fmt::Debug for PageLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageLock").field("backing", &self.backing).finish_non_exhaustive()
    }
}

impl fmt::Debug for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staging")
            .field("device", &self.0.device)
            .field("config", &self.0.config)
            .field("quarantine", &self.0.stuck)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Crossing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Crossing")
            .field("to", &self.to.len())
            .field("under_way", &self.groups.len())
            .finish_non_exhaustive()
    }
}
