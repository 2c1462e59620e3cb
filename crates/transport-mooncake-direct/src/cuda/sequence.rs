//! How the gather kernel is told what to copy: pieces in a sequence of units.

use capture_arena::cuda::CopyOp;

/// Bytes of a unit, as the kernel has it.
pub(super) const UNIT: u64 = 1 << UNIT_BITS;
const UNIT_BITS: u32 = 9;
/// 64-bit words of one piece: source, destination, and place in the sequence plus padding.
pub(super) const PIECE_WORDS: usize = 3;
/// 64-bit words in front of the pieces.
pub(super) const HEAD_WORDS: usize = 5;
/// Shortest chunk, in units: as much as a warp has in flight.
const MIN_CHUNK: u64 = 4;
/// Longest chunk, in units. Longer ones would spread the warps over more memory at a time than the
/// device has address translations for at hand.
const MAX_CHUNK: u64 = 128;
/// Warps of a block, at least and at most.
const WARPS: (u64, u64) = (2, 16);

/// Pieces that were written down, and the length of their sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sequence {
    /// Pieces.
    pub(super) count: u32,
    /// Bytes of their units.
    pub(super) bytes: u64,
}

/// How the work is dealt out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Deal {
    /// Units of a chunk.
    pub(super) chunk_units: u32,
    /// Blocks of the launch.
    pub(super) blocks: u32,
    /// Threads of a block.
    pub(super) threads: u32,
}

/// How much of a device a launch may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// Multiprocessors of the device.
    pub(super) multiprocessors: u32,
    /// Blocks of 512 threads on each of them.
    pub(super) blocks_each: u32,
    /// Chunks that each warp gets, if there is enough work.
    pub(super) rounds: u32,
}

impl Sequence {
    /// Writes a piece down in its place behind the others. It has bytes.
    #[inline(always)]
    pub(super) fn push(&mut self, op: &CopyOp, place: &mut [u64; PIECE_WORDS]) {
        let whole = op.len.next_multiple_of(UNIT);
        *place = [op.src.0, op.dst.0, self.bytes | (whole - op.len)];
        self.bytes += whole;
        self.count += 1;
    }

    fn units(&self) -> u64 {
        self.bytes >> UNIT_BITS
    }

    /// Cuts the sequence so that every warp of the share has work, and none much more than others.
    pub(super) fn deal(&self, share: Share) -> Deal {
        let multiprocessors = u64::from(share.multiprocessors.max(1));
        let most_blocks = multiprocessors * u64::from(share.blocks_each.max(1));
        let wanted = most_blocks * WARPS.1 * u64::from(share.rounds.max(1));
        // Whole steps of a warp, so that only the last chunk of a piece is short.
        let chunk = self.units().div_ceil(wanted).next_multiple_of(MIN_CHUNK);
        let chunk = chunk.clamp(MIN_CHUNK, MAX_CHUNK);
        let chunks = self.units().div_ceil(chunk).max(1);
        // Little work is spread over all multiprocessors, in small blocks.
        let warps = chunks.div_ceil(multiprocessors).clamp(WARPS.0, WARPS.1);
        let blocks = chunks.div_ceil(warps).min(most_blocks);
        Deal { chunk_units: chunk as u32, blocks: blocks as u32, threads: warps as u32 * 32 }
    }

    /// Writes what the kernel is told besides the pieces: what it reads as `Head`.
    pub(super) fn write_head(
        &self,
        deal: &Deal,
        signal: Option<Signal>,
        words: &mut [u64; HEAD_WORDS],
    ) {
        let (blocks, done, ticket) =
            signal.map_or((0, 0, 0), |signal| (signal.blocks, signal.done, signal.ticket));
        words[0] = self.units();
        words[1] = blocks;
        words[2] = done;
        words[3] = u64::from(self.count) | u64::from(deal.chunk_units) << 32;
        words[4] = u64::from(ticket);
    }
}

/// How the kernel says that it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Signal {
    /// Address of the counter of blocks, on the device.
    pub(super) blocks: u64,
    /// Address of the word that the ticket is written to, in host memory.
    pub(super) done: u64,
    /// The number to write.
    pub(super) ticket: u32,
}

#[cfg(test)]
mod tests {
    use capture_arena::cuda::DevicePtr;
    use proptest::prelude::*;

    use super::*;

    fn op(len: u64) -> CopyOp {
        CopyOp { dst: DevicePtr(7), src: DevicePtr(9), len }
    }

    #[test]
    fn pieces_are_placed_one_after_the_other() {
        let mut sequence = Sequence::default();
        let mut places = [[0; PIECE_WORDS]; 4];
        for (place, len) in places.iter_mut().zip([1, 512, 513, 10 << 10]) {
            sequence.push(&op(len), place);
        }
        assert_eq!(sequence, Sequence { count: 4, bytes: (1 + 1 + 2 + 20) * 512 });
        assert_eq!(places[0], [9, 7, 511]);
        assert_eq!([places[1][2], places[2][2], places[3][2]], [512, 1024 + 511, 2048]);
    }

    #[test]
    fn a_head_is_laid_out_as_the_kernel_reads_it() {
        let sequence = Sequence { count: 3, bytes: 1 << 49 };
        let deal = Deal { chunk_units: 12, blocks: 1, threads: 64 };
        let mut words = [9; HEAD_WORDS];
        let signal = Signal { blocks: 0x10, done: 0x20, ticket: 5 };
        sequence.write_head(&deal, Some(signal), &mut words);
        assert_eq!(words, [1 << 40, 0x10, 0x20, 3 | 12 << 32, 5]);
        sequence.write_head(&deal, None, &mut words);
        assert_eq!(words[1..3], [0, 0]);
    }

    proptest! {
        #[test]
        fn every_unit_is_dealt_out_once(
            units in 1_u64..1 << 34, multiprocessors in 1_u32..200, blocks_each in 1_u32..5,
            rounds in 1_u32..9,
        ) {
            let share = Share { multiprocessors, blocks_each, rounds };
            let deal = Sequence { count: 1, bytes: units * UNIT }.deal(share);
            prop_assert!(deal.threads.is_multiple_of(32) && deal.threads <= 512);
            prop_assert!(deal.blocks >= 1 && deal.blocks <= multiprocessors * blocks_each);
            let chunks = units.div_ceil(u64::from(deal.chunk_units));
            let warps = u64::from(deal.blocks) * u64::from(deal.threads / 32);
            // No block without work.
            prop_assert!(chunks > warps - u64::from(deal.threads / 32));
            // Where warps take several chunks, all the share is at work.
            prop_assert!(chunks <= warps || deal.blocks == multiprocessors * blocks_each);
        }
    }
}
