//! Tensors that are written and summed up where they are, on a device.
//!
//! `tensors.ptx` is made from `tensors.cu` as [`GatherKernel`](super::GatherKernel)'s code is.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use capture_arena::{
    Quarantine, Unfinished,
    cuda::{
        ArenaPeers, Device, DeviceArenaConfig, DeviceAttribute, DeviceBlock, DevicePtr, FunctionId,
        KernelArg, Launch, Pinned, Stream,
    },
};
use parking_lot::Mutex;
use transport_core::{Error, ErrorKind, RegionMut, RegionSlice, Result};

use super::{
    kernel::as_bytes,
    module::Module,
    wait::{is_signalled, until},
};

/// The device code. Ends with a zero byte, as the driver wants it.
const PTX: &str = concat!(include_str!("tensors.ptx"), "\0");
/// Tensors that are summed up by one launch.
const PIECES: usize = 64;
/// Threads of a block.
const THREADS: u32 = 512;
/// Bytes for which a kernel takes one more block, as long as the device has room.
const BLOCK_BYTES: u64 = 64 << 10;
/// Blocks on each multiprocessor.
const BLOCKS_EACH: u32 = 2;
/// Tensors begin at multiples of this.
const ALIGNMENT: usize = 16;
/// Pinned memory of a lane: bytes of the host go through it part by part.
const STAGING: u64 = 16 << 20;
/// Words in front of the pieces, as `tensors.cu` has them.
const HEAD_WORDS: usize = 5;
/// Bytes of the sums; the counter of blocks is behind them on the device, the ticket in the host.
const SUMS: u64 = (PIECES * size_of::<u64>()) as u64;
/// How long work that went wrong is waited for at the end.
const LAST_WAIT: Duration = Duration::from_secs(2);

/// What a tensor is made of.
#[derive(Debug)]
#[non_exhaustive]
pub enum Content {
    /// Finite bfloat16 numbers, four of them of each counter, made on the device: word number `n` of
    /// 64 bits, counted from 1, is made of `counter + n * 0x9e3779b97f4a7c15`.
    Synthetic {
        /// Where the counting begins.
        counter: u64,
    },
    /// Bytes of the host, as many as the tensor has.
    Host(Vec<u8>),
}

/// Tensors that are written.
#[derive(Debug)]
#[non_exhaustive]
pub struct Written {
    /// Their memory, in order.
    pub regions: Vec<RegionMut>,
    /// Their [`Mixsum`](control_proto::capture::Mixsum)s, computed on the device from what is there
    /// now; empty if they were not asked for.
    pub sums: Vec<u64>,
    /// Bytes that came from the host.
    pub host_bytes: u64,
}

/// Writes tensors on one device and sums tensors up there. Threads may share it; cheap to clone.
///
/// Memory that the device may still use is never given back: what a call leaves unfinished is kept,
/// and let go of once the device is done with it.
#[derive(Clone)]
pub struct DeviceTensors(Arc<Inner>);

struct Inner {
    write: FunctionId,
    sum: FunctionId,
    most_blocks: u32,
    lanes: Mutex<Vec<Lane>>,
    stuck: Quarantine<Stuck>,
    module: Module,
}

/// What one call at a time uses.
struct Lane {
    stream: Stream,
    sums: DeviceBlock, // and the counter
    found: Pinned,     // the sums, and the ticket
    ticket: u32,
    staging: Option<Pinned>,
}

/// What the device may still use.
struct Stuck {
    lane: Lane,
    memory: Memory, // kept for its Drop
}

/// The tensors of a call.
struct Memory {
    written: Vec<RegionMut>,
    _read: Vec<RegionSlice>, // kept for its Drop
}

#[derive(Clone, Copy)]
struct Piece {
    at: u64,
    len: u64,
}

impl DeviceTensors {
    /// Loads the kernels, which takes the driver some milliseconds.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the driver is older than CUDA 12.3.
    pub fn load(device: &Device) -> Result<Self> {
        const OPERATION: &str = "load tensor kernels";
        let module = Module::load(device, PTX.as_bytes(), OPERATION)?;
        let (write, sum) = (module.function("write_synthetic")?, module.function("sum_mixed")?);
        let multiprocessors = module.attribute(DeviceAttribute::Multiprocessors)?.max(1);
        let lanes = Mutex::new(vec![Lane::new(device)?]);
        let most_blocks = multiprocessors * BLOCKS_EACH;
        let stuck = Quarantine::new(LAST_WAIT);
        Ok(Self(Arc::new(Inner { write, sum, most_blocks, lanes, stuck, module })))
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.0.module.device()
    }

    /// Writes tensors, sums up what is there then if `summed`, and waits for both, at most until
    /// `deadline`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] before anything is written for memory of another device or at an
    /// odd address, and for bytes of another length than their tensor; [`ErrorKind::Timeout`];
    /// whatever the device reports. The regions are gone then, and go back to their owner once the
    /// device is done with them.
    pub fn write(
        &self,
        tensors: Vec<(RegionMut, Content)>,
        summed: bool,
        deadline: Instant,
    ) -> Result<Written> {
        let mut host_bytes = 0;
        for (region, content) in &tensors {
            self.check(region.kind(), region.address(), region.len())?;
            if let Content::Host(bytes) = content {
                host_bytes += bytes.len() as u64;
                if bytes.len() != region.len() {
                    return Err(invalid("the bytes are not as many as their tensor has")
                        .with("expected", region.len())
                        .with("found", bytes.len()));
                }
            }
        }
        let (written, contents): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
        let pieces: Vec<_> = written.iter().map(Piece::of_region).collect();
        let memory = Memory { written, _read: Vec::new() };
        let (memory, sums) = self.run(memory, deadline, |lane| {
            lane.make_room(host_bytes)?;
            lane.write(&self.0, &pieces, &contents, deadline)?;
            match summed {
                true => lane.sum(&self.0, &pieces, deadline),
                false => lane.stream.synchronize_within(left(deadline)).map(|()| Vec::new()),
            }
        })?;
        Ok(Written { regions: memory.written, sums, host_bytes })
    }

    /// The [`Mixsum`](control_proto::capture::Mixsum) of each tensor, computed on the device.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn sums(&self, tensors: &[RegionSlice], deadline: Instant) -> Result<Vec<u64>> {
        for tensor in tensors {
            self.check(tensor.kind(), tensor.address(), tensor.len())?;
        }
        let pieces: Vec<_> = tensors.iter().map(Piece::of_slice).collect();
        let memory = Memory { written: Vec::new(), _read: tensors.to_vec() };
        let summed = self.run(memory, deadline, |lane| lane.sum(&self.0, &pieces, deadline));
        summed.map(|(_, sums)| sums)
    }

    fn check(&self, kind: transport_core::RegionKind, address: usize, len: usize) -> Result<()> {
        let expected = self.device().region_kind();
        if len == 0 || (kind == expected && address.is_multiple_of(ALIGNMENT)) {
            return Ok(());
        }
        let error = match kind == expected {
            true => invalid("the tensor does not begin at a multiple of 16")
                .with("address", DevicePtr(address as u64)),
            false => invalid("the tensor is not memory of this device")
                .with("expected", format_args!("{expected:?}"))
                .with("found", format_args!("{kind:?}")),
        };
        Err(error)
    }

    /// Does the work of one call on a lane. Memory and lane are kept where the device is not done.
    fn run<T>(
        &self,
        memory: Memory,
        deadline: Instant,
        work: impl FnOnce(&mut Lane) -> Result<T>,
    ) -> Result<(Memory, T)> {
        self.0.stuck.sweep();
        let _bound = self.device().bind()?; // once, and not for every call below
        let idle = self.0.lanes.lock().pop();
        let mut lane = match idle {
            Some(lane) => lane,
            None => Lane::new(self.device())?,
        };
        match work(&mut lane) {
            Ok(done) => {
                self.0.lanes.lock().push(lane);
                Ok((memory, done))
            }
            Err(error) => {
                // What was queued may run although a later step failed.
                let _ = lane.stream.synchronize_within(left(deadline));
                self.0.stuck.keep(Stuck { lane, memory });
                self.0.stuck.sweep(); // it may be over already
                Err(error)
            }
        }
    }
}

impl Unfinished for Stuck {
    fn is_over(&mut self) -> bool {
        self.lane.is_over()
    }

    fn bytes(&self) -> u64 {
        self.memory.written.iter().map(|region| region.len() as u64).sum()
    }
}

impl Lane {
    fn new(device: &Device) -> Result<Self> {
        let stream = device.stream()?;
        let config = DeviceArenaConfig::new(2 * SUMS, ArenaPeers::Nobody);
        let sums = DeviceBlock::create(device, &config)?;
        // SAFETY: just made, and nothing else uses it.
        unsafe { stream.fill(sums.address(), 0, 2 * SUMS) }?;
        stream.synchronize()?;
        let found = device.pinned(2 * SUMS as usize)?;
        Ok(Self { stream, sums, found, ticket: 0, staging: None })
    }

    /// Whether the device no longer touches what was queued here. One that reports an error runs
    /// nothing any more.
    fn is_over(&self) -> bool {
        self.stream.is_done().unwrap_or(true)
    }

    /// Pinned memory for so many bytes, or as many as there ever are.
    fn make_room(&mut self, host_bytes: u64) -> Result<()> {
        let wanted = host_bytes.next_power_of_two().clamp(64 << 10, STAGING) as usize;
        let has = self.staging.as_ref().map_or(0, Pinned::len);
        if host_bytes > 0 && has < wanted {
            self.staging = None;
            self.staging = Some(self.stream.device().pinned(wanted)?);
        }
        Ok(())
    }

    /// Queues writing all tensors.
    fn write(
        &mut self,
        kernels: &Inner,
        pieces: &[Piece],
        contents: &[Content],
        deadline: Instant,
    ) -> Result<()> {
        // What is made on the device first: it runs while the host's bytes are staged.
        for (piece, content) in pieces.iter().zip(contents) {
            let Content::Synthetic { counter } = content else { continue };
            if piece.len == 0 {
                continue;
            }
            let args =
                [KernelArg::U64(piece.at), KernelArg::U64(piece.len), KernelArg::U64(*counter)];
            let launch = launch([kernels.blocks(piece.len), 1, 1]);
            // SAFETY: address, length and counter are what this kernel takes. The range is the
            // caller's alone, and kept until the stream is done with it.
            unsafe { self.stream.launch(kernels.write, launch, &args) }?;
        }
        let mut used = 0; // of the staging memory
        for (piece, content) in pieces.iter().zip(contents) {
            let Content::Host(bytes) = content else { continue };
            let mut done = 0;
            while done < bytes.len() {
                let staging = self.staging.as_mut().expect("made before");
                if used >= staging.len() {
                    self.stream.synchronize_within(left(deadline))?;
                    used = 0;
                }
                let part = (bytes.len() - done).min(staging.len() - used);
                staging.as_mut_slice()[used..][..part].copy_from_slice(&bytes[done..][..part]);
                let from = staging.address().offset(used as u64);
                let to = DevicePtr(piece.at + done as u64);
                // SAFETY: as above, out of the lane's own memory, whose bytes are written again
                // only after the stream was waited for.
                unsafe { self.stream.copy(to, from, part as u64) }?;
                done += part;
                used = (used + part).next_multiple_of(ALIGNMENT);
            }
        }
        Ok(())
    }

    /// Sums up all pieces and waits for that.
    fn sum(&mut self, kernels: &Inner, pieces: &[Piece], deadline: Instant) -> Result<Vec<u64>> {
        let mut sums = Vec::with_capacity(pieces.len());
        for pieces in pieces.chunks(PIECES) {
            self.ticket = self.ticket.wrapping_add(1);
            let done = self.found.address().offset(SUMS);
            let mut words = [0; HEAD_WORDS + 2 * PIECES];
            words[..HEAD_WORDS].copy_from_slice(&[
                self.sums.address().0,
                self.sums.address().offset(SUMS).0,
                self.found.address().0,
                done.0,
                pieces.len() as u64 | u64::from(self.ticket) << 32,
            ]);
            for (place, piece) in words[HEAD_WORDS..].chunks_exact_mut(2).zip(pieces) {
                place.copy_from_slice(&[piece.at, piece.len]);
            }
            let longest = pieces.iter().map(|piece| piece.len).max().unwrap_or(0);
            let grid = [kernels.blocks(longest), pieces.len() as u32, 1];
            let args = [KernelArg::Bytes(as_bytes(&words))];
            // SAFETY: one structure of that size is what this kernel takes. The pieces and the
            // lane's memory are kept until the stream is done with them.
            unsafe { self.stream.launch(kernels.sum, launch(grid), &args) }?;
            self.wait(done, deadline)?;
            let (found, _) = self.found.as_slice().as_chunks();
            sums.extend(found[..pieces.len()].iter().map(|sum| u64::from_ne_bytes(*sum)));
        }
        Ok(sums)
    }

    /// Waits until the kernel has written its ticket; what was queued before it is done then too.
    fn wait(&self, done: DevicePtr, deadline: Instant) -> Result<()> {
        // SAFETY: an aligned word of the lane, which nothing but the kernel writes.
        let word = unsafe { AtomicU32::from_ptr(done.0 as *mut u32) };
        until("sum up tensors", deadline, || {
            if is_signalled(word, self.ticket) {
                return Ok(true);
            }
            match self.stream.is_done()? {
                // The word may have come between the two.
                true if word.load(Ordering::Acquire) != self.ticket => {
                    let why = "the kernel has ended without its sums";
                    Err(Error::new(ErrorKind::Unexpected, "sum up tensors", why))
                }
                is_done => Ok(is_done),
            }
        })
    }
}

impl Inner {
    /// Blocks for so many bytes.
    fn blocks(&self, len: u64) -> u32 {
        len.div_ceil(BLOCK_BYTES).clamp(1, self.most_blocks.into()) as u32
    }
}

impl Piece {
    fn of_region(region: &RegionMut) -> Self {
        Self { at: region.address() as u64, len: region.len() as u64 }
    }

    fn of_slice(slice: &RegionSlice) -> Self {
        Self { at: slice.address() as u64, len: slice.len() as u64 }
    }
}

fn launch(grid: [u32; 3]) -> Launch {
    Launch { grid, block: [THREADS, 1, 1], shared_bytes: 0 }
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

fn invalid(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidInput, "work on device tensors", why)
}

impl fmt::Debug for DeviceTensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceTensors").field("device", self.device()).finish_non_exhaustive()
    }
}
