//! Many pieces into one place that is not read again soon, hashed on the way.

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx2;

use twox_hash::XxHash3_64;

/// Fills `dest` with the bytes of `sources`, one source after the other.
///
/// For megabytes that are not read soon: where the processor can (x86-64 with AVX2) and `dest`
/// begins at a multiple of 64, they go past the caches, since an ordinary store first reads the
/// line that it changes. The bytes are visible to other threads as those of any other copy.
///
/// `sources` may be longer than `dest`. What does not fit is not read, but the processor is told
/// that it comes next.
///
/// # Panics
/// If `sources` are shorter than `dest`.
pub fn gather<'s>(dest: &mut [u8], sources: impl IntoIterator<Item = &'s [u8]>) {
    let mut sources = sources.into_iter().peekable();
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // Where one source is short the others are likely to be: an ordinary copy has less to do for
    // each, and no sum to save on.
    if sources.peek().is_some_and(|source| source.len() >= avx2::LONG)
        && dest.len() >= avx2::WORTHWHILE
        && is_x86_feature_detected!("avx2")
    {
        // SAFETY: the processor has AVX2.
        unsafe { avx2::gather(dest, &mut sources) };
        return;
    }
    one_by_one(dest, &mut sources);
}

/// Does what [`gather`] does, and returns the XXH3 (64 bits, seed 0) of `dest`.
///
/// # Panics
/// If `sources` are shorter than `dest`.
pub fn gather_xxh3<'s>(dest: &mut [u8], sources: impl IntoIterator<Item = &'s [u8]>) -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if dest.len() >= avx2::WORTHWHILE && is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { avx2::gather_xxh3(dest, &mut sources.into_iter()) };
    }
    one_by_one(dest, &mut sources.into_iter());
    XxHash3_64::oneshot(dest)
}

/// With ordinary copies.
fn one_by_one<'s>(mut dest: &mut [u8], sources: &mut impl Iterator<Item = &'s [u8]>) {
    while !dest.is_empty() {
        let source = sources.next().expect("the sources are as long as the destination");
        let (to, rest) = dest.split_at_mut(source.len().min(dest.len()));
        to.copy_from_slice(&source[..to.len()]);
        dest = rest;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Where the other code begins, where there is any.
    const WORTHWHILE: usize = 2 << 10;

    /// Bytes without a short period.
    fn noise(len: usize) -> Vec<u8> {
        (0..len as u32).map(|i| (i.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect()
    }

    /// Cuts `bytes` into pieces of the lengths of `cuts`, in turn.
    fn cut<'b>(mut bytes: &'b [u8], cuts: &[usize]) -> Vec<&'b [u8]> {
        let mut pieces = Vec::new();
        for len in cuts.iter().cycle() {
            let (piece, rest) = bytes.split_at((*len).min(bytes.len()));
            pieces.push(piece);
            bytes = rest;
            if bytes.is_empty() {
                break;
            }
        }
        pieces
    }

    /// Gathers `len` bytes in `cuts` to a destination that is `at` bytes off a line, with
    /// `beyond` bytes more in the sources.
    fn check(len: usize, at: usize, beyond: usize, cuts: &[usize]) {
        let source = noise(len + beyond);
        let sources = cut(&source, cuts);
        let mut memory = vec![0xee; len + 256];
        let at = memory.as_ptr().align_offset(64) + at;
        let sum = gather_xxh3(&mut memory[at..at + len], sources.iter().copied());
        assert_eq!(sum, XxHash3_64::oneshot(&source[..len]), "{len} at {at} in {cuts:?}");
        let is_whole = |memory: &[u8]| {
            let beside = memory[..at].iter().chain(&memory[at + len..]);
            memory[at..at + len] == source[..len] && beside.into_iter().all(|&b| b == 0xee)
        };
        assert!(is_whole(&memory), "{len} at {at} in {cuts:?}");
        memory.fill(0xee);
        gather(&mut memory[at..at + len], sources);
        assert!(is_whole(&memory), "{len} at {at} in {cuts:?}");
    }

    #[test]
    fn every_length_around_the_bounds_of_lines_stripes_and_scrambles() {
        let bounds = [0, 64, 240, 1024, WORTHWHILE, WORTHWHILE + 1024, 4 * WORTHWHILE];
        for bound in bounds {
            for len in (bound.max(66) - 66..bound + 67).step_by(if cfg!(miri) { 66 } else { 1 }) {
                check(len, 0, 0, &[len.max(1)]);
                check(len, 0, 0, &[97]);
            }
        }
    }

    #[test]
    fn any_place_and_sources_of_any_length() {
        let cuts: [&[usize]; 8] = [
            &[1],
            &[2000, 3, 70],
            &[64],
            &[63, 0, 65],
            &[8, 4096, 0, 0, 3],
            &[6400],
            &[10_000, 1],
            &[usize::MAX],
        ];
        for at in (0..66).step_by(if cfg!(miri) { 33 } else { 1 }) {
            for cuts in cuts {
                let len = if cfg!(miri) { 1024 } else { 19_968 };
                check(len + 32 + at, at, 0, cuts);
                check(len, at, 777, cuts);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 256 }))]

        #[test]
        fn any_pieces(
            len in 0usize..if cfg!(miri) { 3000 } else { 30_000 },
            at in 0usize..64,
            beyond in 0usize..9000,
            cuts in prop::collection::vec(
                prop_oneof![0usize..70, 0usize..9000, Just(64), Just(6144)], 1..12
            ).prop_filter("some bytes", |cuts| cuts.iter().any(|cut| *cut > 0)),
        ) {
            check(len, at, beyond, &cuts);
        }
    }

    #[test]
    fn sources_that_are_too_short_are_refused() {
        for len in [1, WORTHWHILE, 3 * WORTHWHILE] {
            for short in [1, 64, 65, 129] {
                let source = noise(len - short.min(len));
                let refused = |work: &dyn Fn()| {
                    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err()
                };
                assert!(refused(&|| gather(&mut vec![0; len], [&source[..]])), "{len} {short}");
                let hashed = || _ = gather_xxh3(&mut vec![0; len], [&source[..]]);
                assert!(refused(&hashed), "{len} {short}");
            }
        }
    }
}
