//! A copy whose destination is not read again soon, and whose source is looked at on the way.

/// Bytes that are looked at, and then copied from the nearest cache. Longer pieces keep the
/// processor from looking at one while it copies the other; shorter ones cost calls.
const PIECE: usize = 2 << 10;
/// Bytes that are asked for ahead of the piece in hand: two pieces.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const AHEAD: usize = 2 * PIECE;
/// Shorter copies stay in the caches: they are cheap, and their ends would cost more than is saved.
const WORTHWHILE: usize = 2 * PIECE;

/// Copies `source` to `dest` in pieces, each handed to `look` first, while it is in the cache.
///
/// For megabytes that are hashed on the way and not read soon. Long copies go past the caches where
/// the processor can (x86-64): an ordinary store first reads the line that it changes, which is a
/// third of all traffic, and the system's `memcpy` spares it only in one large call. The bytes are
/// visible to other threads as those of any other copy.
///
/// # Panics
/// If the lengths differ.
pub fn copy_streaming(dest: &mut [u8], source: &[u8], mut look: impl FnMut(&[u8])) {
    assert_eq!(dest.len(), source.len(), "both are as long");
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if source.len() >= WORTHWHILE {
        return x86::copy(dest, source, look);
    }
    for (to, from) in dest.chunks_mut(PIECE).zip(source.chunks(PIECE)) {
        look(from);
        to.copy_from_slice(from);
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86 {
    use std::arch::x86_64::{
        __m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_stream_si128,
    };

    use super::{AHEAD, PIECE};

    /// Bytes of a cache line, which is written whole.
    const LINE: usize = 64;

    pub(super) fn copy(dest: &mut [u8], source: &[u8], mut look: impl FnMut(&[u8])) {
        let head = dest.as_ptr().align_offset(LINE).min(dest.len());
        let (first, dest) = dest.split_at_mut(head);
        look(&source[..head]);
        first.copy_from_slice(&source[..head]);
        let source = &source[head..];
        for (i, (to, from)) in dest.chunks_mut(PIECE).zip(source.chunks(PIECE)).enumerate() {
            let next = (i * PIECE + AHEAD).min(source.len());
            prefetch(&source[next..(next + PIECE).min(source.len())]);
            look(from);
            stream(to, from);
        }
        // SAFETY: every x86-64 processor has it. It orders the stores past the caches before later
        // ones, as ordinary stores are.
        unsafe { _mm_sfence() }
    }

    fn prefetch(bytes: &[u8]) {
        for line in bytes.chunks(LINE) {
            // SAFETY: a hint, which every x86-64 processor has and which accesses nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) }
        }
    }

    /// `to` begins at a multiple of a line, and both are as long.
    fn stream(to: &mut [u8], from: &[u8]) {
        assert!(to.as_ptr().cast::<[u8; LINE]>().align_offset(LINE) == 0 || to.is_empty());
        let (lines, tail) = to.as_chunks_mut::<LINE>();
        let (whole, rest) = from.as_chunks::<LINE>();
        for (to, from) in lines.iter_mut().zip(whole) {
            let (to, from) = (to.as_mut_ptr().cast::<__m128i>(), from.as_ptr().cast::<__m128i>());
            // SAFETY: the 64 bytes of `from` are four vectors, which may lie anywhere, and every
            // x86-64 processor has the instruction.
            let load = |i| unsafe { _mm_loadu_si128(from.wrapping_add(i)) };
            let line = [0, 1, 2, 3].map(load);
            for (i, vector) in line.into_iter().enumerate() {
                // SAFETY: the 64 bytes of `to` are four vectors, aligned as asserted above, and
                // every x86-64 processor has the instruction.
                unsafe { _mm_stream_si128(to.wrapping_add(i), vector) }
            }
        }
        tail.copy_from_slice(rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_at_any_place_is_seen_and_copied_and_nothing_beside_it() {
        let source: Vec<u8> = (0..20_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
        let lens = [0, 1, 64, PIECE, WORTHWHILE - 1, WORTHWHILE, WORTHWHILE + 63, 3 * PIECE + 65];
        for at in (0..66).step_by(if cfg!(miri) { 13 } else { 1 }) {
            for len in lens.into_iter().chain([8 * PIECE + 7]) {
                let mut dest = vec![0xee; 18_000];
                let mut seen = Vec::new();
                let from = &source[at / 2..][..len];
                copy_streaming(&mut dest[at..][..len], from, |piece| seen.extend_from_slice(piece));
                assert!(seen == from, "{len} bytes at {at}");
                assert!(dest[at..][..len] == *from, "{len} bytes at {at}");
                let beside = dest[..at].iter().chain(&dest[at + len..]);
                assert!(beside.into_iter().all(|&b| b == 0xee), "{len} bytes at {at}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "both are as long")]
    fn lengths_must_agree() {
        copy_streaming(&mut [0; 3], &[0; 4], |_| ());
    }
}
