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
/// Most pieces that travel with a launch ahead.
const INLINE_AHEAD: usize = INLINE[1];
/// Batches from so many pieces on are launched in two halves, both uploaded.
const HALVES_FROM: usize = 1024;
/// Words in front of the list. In host memory: those that tell that a launch is done, and the head of
/// pieces that travel with a launch, right before them. On the device: the counters of blocks.
const FRONT_WORDS: usize = 32;
const FRONT: usize = FRONT_WORDS * 8;
/// Where the words of a batch's last launch are in front of the list, and those of one ahead of it.
const LAST: u64 = 0;
const AHEAD: u64 = 64;
const LIST_BYTES: usize = LIST_PIECES * PIECE_WORDS * 8;
/// How long a lane that is dropped waits for work that nobody waited for.
const DROP_BOUND: Duration = Duration::from_secs(10);

/// After how many pieces of a batch those are launched; never, if it is small.
fn ahead_of(pieces: usize) -> usize {
    match pieces {
        HALVES_FROM.. => pieces / 2,
        _ if pieces >= 2 * INLINE_AHEAD => INLINE_AHEAD,
        _ => usize::MAX,
    }
}

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
    /// Whether a part of a large batch is launched while the rest of it is still written down.
    pub ahead: bool,
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
            ahead: true,
            list_in_host_memory: false,
            blocks_each: 2,
            rounds: 8,
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
    ahead: Stream, // of what is launched before the whole list is written
    gathers: Stream,
    copies: Stream,
    in_host: DevicePtr, // where the lane's host memory begins
    device: Lists,      // counter, then the list
    ticket: u32,
    signalled: bool, // the last launch of the batch writes the ticket, and the one ahead of it too
    is_ahead: bool,
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
            ahead: device.stream()?,
            gathers,
            copies: device.stream()?,
            in_host: host.address(),
            device: block,
            ticket: 0,
            signalled: false,
            is_ahead: false,
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
        !self.queue.is_ahead && !self.queue.is_gathering && !self.queue.is_copying
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
        let mut writer = self.begin(ops.len(), deadline)?;
        let mut rest = ops;
        while !rest.is_empty() {
            let is_usual = |op: &&CopyOp| op.len > 0 && op.len < copy_from;
            let run = rest.iter().take_while(is_usual).copied();
            // SAFETY: the caller's promise.
            let (taken, _) = unsafe { writer.add_run(run) };
            let Some((op, later)) = rest[taken..].split_first() else { break };
            // SAFETY: as above.
            unsafe { writer.add(*op, copy_from) }?;
            rest = later;
        }
        // SAFETY: as above.
        unsafe { writer.launch() }
    }

    /// Begins a batch of about `pieces`, which are told one by one.
    pub(super) fn begin(&mut self, pieces: usize, deadline: Instant) -> Result<Writer<'_>> {
        if !self.is_idle() {
            return Err(Error::new(ErrorKind::Busy, "copy", "the lane's last batch still runs")
                .remedy("finish it first, or use another lane"));
        }
        let Self { queue, host } = self;
        queue.ticket = queue.ticket.wrapping_add(1);
        queue.signalled = false;
        let words = &mut host.as_mut_words()[..FRONT_WORDS + LIST_PIECES * PIECE_WORDS];
        let ahead = if queue.policy.ahead { ahead_of(pieces) } else { usize::MAX };
        Ok(Writer { list: Sequence::default(), first: 0, ahead, words, deadline, queue })
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
        let ahead = match self.is_ahead {
            true => self.finish_gather(&self.ahead, AHEAD, deadline),
            false => Ok(()),
        };
        if ahead.as_ref().is_err_and(|e| e.kind() == ErrorKind::Timeout) {
            return ahead;
        }
        self.is_ahead = false;
        let gathered = match self.is_gathering {
            true => self.finish_gather(&self.gathers, LAST, deadline),
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
        ahead.and(gathered).and(copied)
    }

    /// Launches a full list, so that it may be written from its start again.
    ///
    /// # Safety
    /// As [`CopyLane::start`], of the pieces of the list.
    #[cold]
    unsafe fn make_room(&mut self, first: usize, list: Sequence, deadline: Instant) -> Result<()> {
        self.is_gathering = true;
        // SAFETY: the caller's promise.
        unsafe { self.launch_list(&self.gathers, first, list, None) }?;
        // The lists are still read.
        until("copy", deadline, || Ok(self.gathers.is_done()? && self.ahead.is_done()?))
    }

    /// Launches what is written while more of it is being written.
    ///
    /// # Safety
    /// As [`CopyLane::start`], of the pieces of the list.
    #[cold]
    unsafe fn launch_ahead(&mut self, words: &mut [u64], list: Sequence) -> Result<()> {
        let signal = self.signal(AHEAD);
        self.is_ahead = true;
        match list.count as usize <= INLINE_AHEAD {
            // SAFETY: the caller's promise; the signal's words are the lane's.
            true => unsafe { self.launch_inline(&self.ahead, words, list, signal) },
            // SAFETY: as above.
            false => unsafe { self.launch_list(&self.ahead, 0, list, signal) },
        }
    }

    /// How a launch tells that it is done, if it does.
    fn signal(&self, place: u64) -> Option<Signal> {
        (self.policy.wait == Wait::Signal).then(|| Signal {
            blocks: self.device.at.offset(place).0,
            done: self.in_host.offset(place).0,
            ticket: self.ticket,
        })
    }

    /// Queues a launch that carries the list, which lies at the begin of `words`.
    ///
    /// # Safety
    /// As [`CopyLane::start`], of the pieces of the list.
    unsafe fn launch_inline(
        &self,
        stream: &Stream,
        words: &mut [u64],
        list: Sequence,
        signal: Option<Signal>,
    ) -> Result<()> {
        let share = self.kernel.share(self.policy.blocks_each, self.policy.rounds);
        let words = &mut words[FRONT_WORDS - HEAD_WORDS..];
        // SAFETY: the caller's promise.
        unsafe { self.kernel.launch_inline(stream, words, list, share, signal) }
    }

    /// Queues a launch that reads the list, whose pieces are those from `first` on, and its upload
    /// before.
    ///
    /// # Safety
    /// As [`CopyLane::start`], of the pieces of the list.
    unsafe fn launch_list(
        &self,
        stream: &Stream,
        first: usize,
        list: Sequence,
        signal: Option<Signal>,
    ) -> Result<()> {
        let share = self.kernel.share(self.policy.blocks_each, self.policy.rounds);
        let bytes = list.count as usize * PIECE_WORDS * 8;
        let from = (FRONT + first * PIECE_WORDS * 8) as u64;
        let in_host = self.in_host.offset(from);
        let at = if self.policy.list_in_host_memory {
            in_host
        } else {
            let at = self.device.at.offset(from);
            // SAFETY: the lane's own memory, which nothing uses before the launch that follows.
            unsafe { stream.copy(at, in_host, bytes as u64) }?;
            at
        };
        // SAFETY: the list is there when the stream gets to the launch, and is written again only
        // when it is past; the rest is the caller's promise.
        unsafe { self.kernel.launch_list(stream, at, list, share, signal) }
    }

    fn finish_gather(&self, stream: &Stream, place: u64, deadline: Instant) -> Result<()> {
        match self.policy.wait {
            Wait::Driver => stream.synchronize(),
            _ if !self.signalled => until("copy", deadline, || stream.is_done()),
            _ => {
                let word = self.in_host.offset(place).0 as *mut u32;
                // SAFETY: aligned memory of the lane, which nothing but the kernel writes.
                let word = unsafe { AtomicU32::from_ptr(word) };
                until("copy", deadline, || {
                    // Also where a launch failed before the one that tells.
                    Ok(is_signalled(word, self.ticket) || stream.is_done()?)
                })
            }
        }
    }
}

/// Writes the pieces of a batch into the lane's list.
pub(super) struct Writer<'a> {
    list: Sequence, // written and not launched yet
    first: usize,   // place of its first piece
    ahead: usize,   // pieces after which it is launched
    words: &'a mut [u64],
    deadline: Instant,
    queue: &'a mut Queue,
}

impl Writer<'_> {
    /// Adds pieces, all for the kernel, as long as `pieces` has some and there is room up to the next
    /// launch; how many, and their bytes. Others, and what starts that launch, are for [`Self::add`].
    ///
    /// A function of its own, for thousands of small pieces: what changes with each of them stays in
    /// registers then.
    ///
    /// # Safety
    /// As [`CopyLane::start`].
    #[inline(never)]
    pub(super) unsafe fn add_run(&mut self, pieces: impl Iterator<Item = CopyOp>) -> (usize, u64) {
        let (mut list, mut bytes) = (self.list, 0);
        let before = list.count as usize;
        let room = (self.ahead - 1).saturating_sub(before);
        let at = FRONT_WORDS + (self.first + before) * PIECE_WORDS;
        let (places, _) = self.words[at..].as_chunks_mut();
        for (place, op) in places.iter_mut().take(room).zip(pieces) {
            list.push(&op, place);
            bytes += op.len;
        }
        self.list = list;
        (list.count as usize - before, bytes)
    }

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
        let at = FRONT_WORDS + (self.first + self.list.count as usize) * PIECE_WORDS;
        let place = match self.words.get_mut(at..at + PIECE_WORDS) {
            Some(place) => place,
            None => {
                // SAFETY: as above.
                unsafe { self.queue.make_room(self.first, self.list, self.deadline) }?;
                (self.list, self.first) = (Sequence::default(), 0);
                &mut self.words[FRONT_WORDS..FRONT_WORDS + PIECE_WORDS]
            }
        };
        self.list.push(&op, place.first_chunk_mut().expect("as long as a piece"));
        if self.list.count as usize == self.ahead {
            // SAFETY: as above.
            unsafe { self.queue.launch_ahead(self.words, self.list) }?;
            // An uploaded list is still read; one that travels is not.
            self.first = if self.ahead <= INLINE_AHEAD { 0 } else { self.ahead };
            (self.list, self.ahead) = (Sequence::default(), usize::MAX);
        }
        Ok(())
    }

    /// Launches what was added and does not run yet.
    ///
    /// # Safety
    /// As [`CopyLane::start`].
    pub(super) unsafe fn launch(self) -> Result<()> {
        let Self { list, first, words, queue, .. } = self;
        queue.signalled = queue.policy.wait == Wait::Signal;
        if list.count == 0 {
            return Ok(());
        }
        let signal = queue.signal(LAST);
        queue.is_gathering = true;
        if first == 0 && list.count as usize <= queue.policy.upload_above.min(MOST_INLINE) {
            // SAFETY: the caller's promise; the signal's words are the lane's.
            return unsafe { queue.launch_inline(&queue.gathers, words, list, signal) };
        }
        // SAFETY: as above.
        unsafe { queue.launch_list(&queue.gathers, first, list, signal) }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let deadline = Instant::now() + DROP_BOUND;
        let waited = self.finish(deadline).err().map(|e| e.kind());
        // A signal says that the bytes are there; the launch itself ends a moment later.
        let ended =
            until("copy", deadline, || Ok(self.gathers.is_done()? && self.ahead.is_done()?));
        let ended = ended.err().map(|e| e.kind());
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
