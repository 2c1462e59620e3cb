//! A lane: streams of one device and what it takes to run batches of copies on them, one at a time.

use std::{
    fmt,
    sync::atomic::AtomicU32,
    time::{Duration, Instant},
};

use capture_arena::cuda::{CopyOp, Device, DevicePtr, During, Pinned, Stream};
use transport_core::{Error, ErrorKind, Result};

use super::{
    kernel::{GatherKernel, INLINE},
    sequence::{HEAD_WORDS, PIECE_WORDS, Sequence, Signal},
    wait::{is_signalled, until},
};

/// Pieces of the longest list; longer batches take several.
const LIST_PIECES: usize = 16 << 10;
/// Most pieces that travel with a launch.
const MOST_INLINE: usize = INLINE[INLINE.len() - 1];
/// Words in front of the list. In host memory: the one that tells that the kernel is done, and the
/// head of pieces that travel with a launch, right before them. On the device: the counter of
/// blocks.
const FRONT_WORDS: usize = 32;
const FRONT: usize = FRONT_WORDS * 8;
const LIST_BYTES: usize = LIST_PIECES * PIECE_WORDS * 8;
/// How long a lane that is dropped waits for work that nobody waited for.
const DROP_BOUND: Duration = Duration::from_secs(10);

/// What goes through the copy engine, and how the kernel is used for the rest.
///
/// The defaults are from measurements on an H200; see `benches/results`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyPolicy {
    /// Pieces of at least so many bytes go through the copy engine, one call each; shorter ones
    /// through the kernel, all in one launch.
    pub copy_from: u64,
    /// The same for pieces that come from another device, over a link that the kernel fills less
    /// well.
    pub copy_from_afar: u64,
    /// Batches of more pieces have their list uploaded. Others, at most 1,360, are sent along with
    /// the launch.
    pub upload_above: usize,
    /// Uploaded lists stay in host memory, where the kernel reads them.
    pub list_in_host_memory: bool,
    /// Blocks of the kernel on each multiprocessor.
    pub blocks_each: u32,
    /// Chunks that each warp gets, where there is enough work.
    pub rounds: u32,
    /// How the end is waited for.
    pub wait: Wait,
}

/// How the end of a batch is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wait {
    /// Looks at a word in host memory that the kernel writes. Copies are asked about.
    Signal,
    /// Asks the driver again and again.
    Ask,
    /// Leaves it to the driver, without a bound.
    Driver,
}

impl Default for CopyPolicy {
    fn default() -> Self {
        Self {
            copy_from: 48 << 20,
            copy_from_afar: 8 << 20,
            upload_above: INLINE[1],
            list_in_host_memory: false,
            blocks_each: 4,
            rounds: 2,
            wait: Wait::Signal,
        }
    }
}

/// Runs batches of copies, one at a time: large pieces through the copy engine, the others through
/// the gather kernel. Both at once where a batch has both.
///
/// Belongs to no thread. Every call costs the calling thread what it takes, and no other one.
pub struct CopyLane {
    queue: Queue, // dropped first: waits for who uses the list
    host: Pinned, // signal and head, then the list
}

/// All of a lane but the list that is written down, and what runs.
struct Queue {
    kernel: GatherKernel,
    policy: CopyPolicy,
    gathers: Stream,
    copies: Stream,
    in_host: DevicePtr, // where the lane's host memory begins
    device: Lists,      // counter, then the list
    ticket: u32,
    signalled: bool, // the last launch of the batch writes the ticket
    is_gathering: bool,
    is_copying: bool,
}

impl CopyLane {
    /// A lane on the kernel's device.
    pub fn new(kernel: &GatherKernel, policy: CopyPolicy) -> Result<Self> {
        let device = kernel.device();
        let gathers = device.stream()?;
        let block = Lists::new(device, (FRONT + LIST_BYTES) as u64)?;
        // SAFETY: just allocated, and nothing else uses it.
        unsafe { gathers.fill(block.at, 0, FRONT as u64) }?;
        gathers.synchronize()?;
        let host = device.pinned(FRONT + LIST_BYTES)?;
        let queue = Queue {
            kernel: kernel.clone(),
            policy,
            gathers,
            copies: device.stream()?,
            in_host: host.address(),
            device: block,
            ticket: 0,
            signalled: false,
            is_gathering: false,
            is_copying: false,
        };
        Ok(Self { queue, host })
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        self.queue.kernel.device()
    }

    /// How it copies.
    pub fn policy(&self) -> &CopyPolicy {
        &self.queue.policy
    }

    /// Changes how it copies, from the next batch on.
    pub fn set_policy(&mut self, policy: CopyPolicy) {
        self.queue.policy = policy;
    }

    /// The stream of the copy engine, for work that comes before or after a batch.
    pub fn copy_stream(&self) -> &Stream {
        &self.queue.copies
    }

    /// Whether nothing runs that was started here.
    pub fn is_idle(&self) -> bool {
        !self.queue.is_gathering && !self.queue.is_copying
    }

    /// Copies, and returns when all is done.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] at the deadline: the copies may still run, and both ends must stay
    /// until [`Self::finish`] has succeeded or reported something else.
    ///
    /// # Safety
    /// As [`Self::start`].
    pub unsafe fn run(&mut self, ops: &[CopyOp], deadline: Instant) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.start(ops, deadline) }?;
        self.finish(deadline)
    }

    /// Starts copying. An error may leave a part running; [`Self::finish`] tells when it is over.
    ///
    /// The deadline counts where a batch needs several lists, each of which waits for the one
    /// before.
    ///
    /// # Safety
    /// All ranges stay mapped until the copies are done. Nothing else uses the destinations until
    /// then, and nothing writes the sources. No destination overlaps another one or a source.
    pub unsafe fn start(&mut self, ops: &[CopyOp], deadline: Instant) -> Result<()> {
        let device = self.device().clone();
        let _bound = device.bind()?; // once for all calls
        let copy_from = self.policy().copy_from;
        let mut writer = self.begin(deadline)?;
        for op in ops {
            // SAFETY: the caller's promise.
            unsafe { writer.add(*op, copy_from) }?;
        }
        // SAFETY: as above.
        unsafe { writer.launch() }
    }

    /// Begins a batch that is told piece by piece.
    pub(super) fn begin(&mut self, deadline: Instant) -> Result<Writer<'_>> {
        if !self.is_idle() {
            return Err(Error::new(ErrorKind::Busy, "copy", "the lane's last batch still runs")
                .remedy("finish it first, or use another lane"));
        }
        let Self { queue, host } = self;
        queue.ticket = queue.ticket.wrapping_add(1);
        queue.signalled = false;
        let words = &mut host.as_mut_words()[..FRONT_WORDS + LIST_PIECES * PIECE_WORDS];
        Ok(Writer { list: Sequence::default(), words, deadline, queue })
    }

    /// Waits until all that was started is done.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] at the deadline: it may still run. Any other error: nothing runs any
    /// more, and nobody knows what was copied.
    pub fn finish(&mut self, deadline: Instant) -> Result<()> {
        self.queue.finish(deadline)
    }
}

impl Queue {
    fn finish(&mut self, deadline: Instant) -> Result<()> {
        let gathered = match self.is_gathering {
            true => self.finish_gather(deadline),
            false => Ok(()),
        };
        if gathered.as_ref().is_err_and(|e| e.kind() == ErrorKind::Timeout) {
            return gathered;
        }
        self.is_gathering = false;
        let copied = match (self.is_copying, self.policy.wait) {
            (false, _) => Ok(()),
            (true, Wait::Driver) => self.copies.synchronize(),
            (true, _) => until("copy", deadline, || self.copies.is_done()),
        };
        if copied.as_ref().is_err_and(|e| e.kind() == ErrorKind::Timeout) {
            return copied;
        }
        self.is_copying = false;
        gathered.and(copied)
    }

    /// Launches a full list, so that it may be written from its start again.
    ///
    /// # Safety
    /// As [`CopyLane::start`], of the pieces of the list.
    #[cold]
    unsafe fn make_room(&mut self, list: Sequence, deadline: Instant) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_list(list, None) }?;
        until("copy", deadline, || self.gathers.is_done()) // the list is still read
    }

    /// Queues a launch that carries the list, which lies in `words`.
    ///
    /// # Safety
    /// As [`CopyLane::start`], of the pieces of the list.
    unsafe fn launch_inline(
        &mut self,
        words: &mut [u64],
        list: Sequence,
        signal: Option<Signal>,
    ) -> Result<()> {
        let share = self.kernel.share(self.policy.blocks_each, self.policy.rounds);
        self.is_gathering = true;
        let words = &mut words[FRONT_WORDS - HEAD_WORDS..];
        // SAFETY: the caller's promise.
        unsafe { self.kernel.launch_inline(&self.gathers, words, list, share, signal) }
    }

    /// Queues a launch that reads the list, and its upload before.
    ///
    /// # Safety
    /// As [`CopyLane::start`], of the pieces of the list.
    unsafe fn launch_list(&mut self, list: Sequence, signal: Option<Signal>) -> Result<()> {
        let share = self.kernel.share(self.policy.blocks_each, self.policy.rounds);
        let bytes = list.count as usize * PIECE_WORDS * 8;
        let in_host = self.in_host.offset(FRONT as u64);
        self.is_gathering = true;
        let at = if self.policy.list_in_host_memory {
            in_host
        } else {
            let at = self.device.at.offset(FRONT as u64);
            // SAFETY: the lane's own memory, which nothing uses before the launch that follows.
            unsafe { self.gathers.copy(at, in_host, bytes as u64) }?;
            at
        };
        // SAFETY: the list is there when the stream gets to the launch, and is written again only
        // when it is past; the rest is the caller's promise.
        unsafe { self.kernel.launch_list(&self.gathers, at, list, share, signal) }
    }

    fn finish_gather(&self, deadline: Instant) -> Result<()> {
        match self.policy.wait {
            Wait::Driver => self.gathers.synchronize(),
            _ if !self.signalled => until("copy", deadline, || self.gathers.is_done()),
            _ => {
                let word = self.in_host.0 as *mut u32;
                // SAFETY: aligned memory of the lane, which nothing but the kernel writes.
                let word = unsafe { AtomicU32::from_ptr(word) };
                until("copy", deadline, || {
                    // Also where a launch failed before the one that tells.
                    Ok(is_signalled(word, self.ticket) || self.gathers.is_done()?)
                })
            }
        }
    }
}

/// Writes the pieces of a batch into the lane's list.
///
/// A local variable of whoever loops over the pieces: what changes with each of them stays in
/// registers then, and is not waited for as it would be in the lane's memory.
pub(super) struct Writer<'a> {
    list: Sequence, // written and not launched yet
    words: &'a mut [u64],
    deadline: Instant,
    queue: &'a mut Queue,
}

impl Writer<'_> {
    /// Adds a piece. Those of `copy_from` bytes and more start at once, others when the batch is
    /// launched, or when there is no room for more of them.
    ///
    /// # Safety
    /// As [`CopyLane::start`].
    #[inline(always)]
    pub(super) unsafe fn add(&mut self, op: CopyOp, copy_from: u64) -> Result<()> {
        if op.len >= copy_from {
            self.queue.is_copying = true;
            // SAFETY: the caller's promise.
            return unsafe { self.queue.copies.copy(op.dst, op.src, op.len) };
        }
        if op.len == 0 {
            return Ok(());
        }
        let at = FRONT_WORDS + self.list.count as usize * PIECE_WORDS;
        let place = match self.words.get_mut(at..at + PIECE_WORDS) {
            Some(place) => place,
            None => {
                // SAFETY: as above.
                unsafe { self.queue.make_room(self.list, self.deadline) }?;
                self.list = Sequence::default();
                &mut self.words[FRONT_WORDS..FRONT_WORDS + PIECE_WORDS]
            }
        };
        self.list.push(&op, place.first_chunk_mut().expect("as long as a piece"));
        Ok(())
    }

    /// Launches what was added and does not run yet.
    ///
    /// # Safety
    /// As [`CopyLane::start`].
    pub(super) unsafe fn launch(self) -> Result<()> {
        let Self { list, words, queue, .. } = self;
        if list.count == 0 {
            return Ok(());
        }
        let signal = (queue.policy.wait == Wait::Signal).then_some(Signal {
            blocks: queue.device.at.0,
            done: queue.in_host.0,
            ticket: queue.ticket,
        });
        queue.signalled = signal.is_some();
        if list.count as usize <= queue.policy.upload_above.min(MOST_INLINE) {
            // SAFETY: the caller's promise; the signal's words are the lane's.
            return unsafe { queue.launch_inline(words, list, signal) };
        }
        // SAFETY: as above.
        unsafe { queue.launch_list(list, signal) }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let deadline = Instant::now() + DROP_BOUND;
        let waited = self.finish(deadline).err().map(|e| e.kind());
        // A signal says that the bytes are there; the launch itself ends a moment later.
        let ended = until("copy", deadline, || self.gathers.is_done()).err().map(|e| e.kind());
        if waited == Some(ErrorKind::Timeout) || ended == Some(ErrorKind::Timeout) {
            // Lists that the device may still read are never given back.
            self.device.forget();
        }
    }
}

impl fmt::Debug for CopyLane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyLane")
            .field("device", &self.device().ordinal())
            .field("policy", self.policy())
            .field("idle", &self.is_idle())
            .finish_non_exhaustive()
    }
}

/// Memory of the device for the counter and the lists of pieces, given back when dropped.
struct Lists {
    device: Device,
    at: DevicePtr,
    is_forgotten: bool,
}

impl Lists {
    fn new(device: &Device, len: u64) -> Result<Self> {
        let _bound = device.bind()?;
        let at = device.api().alloc(len).during("allocate lists on the device")?;
        Ok(Self { device: device.clone(), at, is_forgotten: false })
    }

    fn forget(&mut self) {
        self.is_forgotten = true;
    }
}

impl Drop for Lists {
    fn drop(&mut self) {
        if !self.is_forgotten
            && let Ok(_bound) = self.device.bind()
        {
            // SAFETY: allocated by `new`; the lane has waited for its users.
            let _ = unsafe { self.device.api().free(self.at) };
        }
    }
}
