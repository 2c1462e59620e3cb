//! The gather kernel: many pieces of memory copied by one launch.
//!
//! `gather.ptx` is made from `gather.cu` and loaded by the driver, which makes machine code of it
//! for whatever device is there. After a change of `gather.cu`, with the NVRTC library of CUDA 12.3
//! where the loader finds it:
//!
//! ```text
//! cargo run -p xtask --features ptx -- ptx
//! ```

use std::sync::Arc;

use capture_arena::cuda::{
    Device, DeviceAttribute, DevicePtr, FunctionId, KernelArg, Launch, Stream,
};
use transport_core::Result;

use super::{
    module::Module,
    sequence::{HEAD_WORDS, PIECE_WORDS, Sequence, Share, Signal},
};

/// The device code. Ends with a zero byte, as the driver wants it.
const PTX: &str = concat!(include_str!("gather.ptx"), "\0");
/// Pieces that travel with a launch: a kernel for each number, the smallest one costs least.
pub(super) const INLINE: [usize; 3] = [8, 168, 1360];
const INLINE_NAMES: [&str; 3] = ["gather_inline_8", "gather_inline_168", "gather_inline_1360"];
const LIST_NAME: &str = "gather_list";

/// The kernel, loaded on one device. Cheap to clone.
#[derive(Clone, Debug)]
pub struct GatherKernel(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    list: FunctionId,
    inline: [FunctionId; 3],
    multiprocessors: u32,
    module: Module,
}

impl GatherKernel {
    /// Loads it, which takes the driver some milliseconds.
    ///
    /// # Errors
    /// [`Unsupported`] where the driver is older than CUDA 12.3.
    ///
    /// [`Unsupported`]: transport_core::ErrorKind::Unsupported
    pub fn load(device: &Device) -> Result<Self> {
        Self::load_code(device, PTX.as_bytes())
    }

    /// Loads other code with the same kernels, to compare with: PTX ended by a zero byte, or a
    /// binary.
    #[doc(hidden)]
    pub fn load_code(device: &Device, code: &[u8]) -> Result<Self> {
        let module = Module::load(device, code, "load gather kernel")?;
        let multiprocessors = module.attribute(DeviceAttribute::Multiprocessors)?.max(1);
        let list = module.function(LIST_NAME)?;
        let mut inline = [FunctionId(0); 3];
        for (place, name) in inline.iter_mut().zip(INLINE_NAMES) {
            *place = module.function(name)?;
        }
        Ok(Self(Arc::new(Loaded { list, inline, multiprocessors, module })))
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        self.0.module.device()
    }

    pub(super) fn share(&self, blocks_each: u32, rounds: u32) -> Share {
        Share { multiprocessors: self.0.multiprocessors, blocks_each, rounds }
    }

    /// Queues one launch for the pieces of `sequence`, which travel with it: `words` is room for the
    /// head, then the pieces, then at least as many as the next of [`INLINE`] has. It may be written
    /// again at once.
    ///
    /// # Panics
    /// If there are more pieces than a launch takes, or `words` ends early.
    ///
    /// # Safety
    /// As [`Stream::copy`], for each piece; no destination overlaps another one or a source. What
    /// the signal names lives until it has come.
    pub(super) unsafe fn launch_inline(
        &self,
        stream: &Stream,
        words: &mut [u64],
        sequence: Sequence,
        share: Share,
        signal: Option<Signal>,
    ) -> Result<()> {
        let which = INLINE.iter().position(|&n| n >= sequence.count as usize);
        let which = which.expect("no more pieces than the largest kernel takes");
        let words = &mut words[..HEAD_WORDS + INLINE[which] * PIECE_WORDS];
        let deal = sequence.deal(share);
        let head = words.first_chunk_mut().expect("as long as a head at least");
        sequence.write_head(&deal, signal, head);
        let launch =
            Launch { grid: [deal.blocks, 1, 1], block: [deal.threads, 1, 1], shared_bytes: 0 };
        let args = [KernelArg::Bytes(as_bytes(words))];
        // SAFETY: one structure of that size is what this kernel takes; the rest is the caller's
        // promise.
        unsafe { stream.launch(self.0.inline[which], launch, &args) }
    }

    /// Queues one launch for pieces that lie in memory at `list`.
    ///
    /// # Safety
    /// `list` holds the pieces of `sequence` once the stream gets there, and until it is past; for
    /// the pieces as [`Self::launch_inline`].
    pub(super) unsafe fn launch_list(
        &self,
        stream: &Stream,
        list: DevicePtr,
        sequence: Sequence,
        share: Share,
        signal: Option<Signal>,
    ) -> Result<()> {
        let deal = sequence.deal(share);
        let mut head = [0; HEAD_WORDS];
        sequence.write_head(&deal, signal, &mut head);
        let launch =
            Launch { grid: [deal.blocks, 1, 1], block: [deal.threads, 1, 1], shared_bytes: 0 };
        let args = [KernelArg::Bytes(as_bytes(&head)), KernelArg::U64(list.0)];
        // SAFETY: a head and an address are what this kernel takes; the rest is the caller's
        // promise.
        unsafe { stream.launch(self.0.list, launch, &args) }
    }
}

/// The bytes of words, as they lie in memory.
pub(super) fn as_bytes(words: &[u64]) -> &[u8] {
    // SAFETY: every byte of an integer is initialised, and bytes are aligned anywhere.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), size_of_val(words)) }
}
