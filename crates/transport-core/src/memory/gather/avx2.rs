//! Gathering with AVX2: a line of the destination is loaded once, hashed and stored.
//!
//! XXH3 reads its input in stripes of 64 bytes, which are the lines of the destination, counted from
//! its start. Both are made from the sources' bytes while these are in registers. The loop takes
//! about as long as the memory does, so what is left is to ask for the sources in time: the
//! processor's own prefetching begins anew with each source, and ends late behind it.

use std::arch::x86_64::{
    __m256i, _MM_HINT_NTA, _mm_prefetch, _mm_sfence, _mm256_add_epi64, _mm256_loadu_si256,
    _mm256_mul_epu32, _mm256_set1_epi64x, _mm256_setzero_si256, _mm256_shuffle_epi32,
    _mm256_slli_epi64, _mm256_srli_epi64, _mm256_storeu_si256, _mm256_stream_si256,
    _mm256_xor_si256,
};

use twox_hash::xxhash3_64::{DEFAULT_SECRET_LENGTH, SecretBuffer};

/// A line of the caches, and a stripe of XXH3.
const LINE: usize = 64;
/// Lines of the sources that are asked for before they are read. Fewer leave the memory idle at the
/// start of each source; more leave the nearest cache before they are read.
const AHEAD: usize = 96;
/// Bytes of a source that is copied from where it lies. Shorter ones are joined first: they would
/// cost more than the caches spare.
pub(super) const LONG: usize = 1 << 10;
/// Shorter destinations stay in the caches: they are cheap, and their ends would cost more than is
/// saved.
pub(super) const WORTHWHILE: usize = 2 << 10;
/// Lines of sources that are joined at a time.
const STAGE: usize = 64;
/// Stripes between two scrambles.
const ROUND: usize = 16;

/// Not generic: this is compiled here, with all that it calls.
pub(super) type Sources<'i, 's> = &'i mut dyn Iterator<Item = &'s [u8]>;

/// # Panics
/// If `sources` are shorter than `dest`, or this has fewer than two lines.
#[target_feature(enable = "avx2")]
pub(super) fn gather(dest: &mut [u8], sources: Sources<'_, '_>) {
    run::<false>(dest, sources);
}

/// The XXH3 of `dest`, after it was filled.
///
/// # Panics
/// If `sources` are shorter than `dest`, or this has fewer than five lines: shorter inputs have
/// other sums.
#[target_feature(enable = "avx2")]
pub(super) fn gather_xxh3(dest: &mut [u8], sources: Sources<'_, '_>) -> u64 {
    assert!(dest.len() > 4 * LINE, "long inputs only");
    run::<true>(dest, sources)
}

#[target_feature(enable = "avx2")]
fn run<const HASH: bool>(dest: &mut [u8], sources: Sources<'_, '_>) -> u64 {
    if dest.as_ptr().addr().is_multiple_of(LINE) {
        fill::<HASH, true>(dest, sources)
    } else {
        fill::<HASH, false>(dest, sources)
    }
}

/// Fills `dest`, past the caches if it `STREAM`s: it must begin at a multiple of a line then.
#[target_feature(enable = "avx2")]
fn fill<const HASH: bool, const STREAM: bool>(dest: &mut [u8], sources: Sources<'_, '_>) -> u64 {
    let too_short = "the sources are as long as the destination";
    let len = dest.len();
    assert!(!STREAM || dest.as_ptr().addr().is_multiple_of(LINE), "whole lines only");
    let mut sources = sources.peekable();
    let mut sum = Sum::new();
    // The last stripe is the last 64 bytes, wherever the one before it ends. Both stay in the
    // cache, since they are read again.
    let (lines, end) = dest.split_at_mut(((len - 1) / LINE - 1) * LINE);
    let mut to = lines.as_chunks_mut::<LINE>().0;
    // Lines that are made of the ends of sources, and of short ones.
    let (mut stage, mut staged) = ([[0; LINE]; STAGE], 0);
    let mut from: &[u8] = &[];
    while !to.is_empty() {
        if from.is_empty() {
            from = sources.next().expect(too_short);
        }
        let is_long = from.len() >= LONG;
        if staged == 0 && is_long {
            let whole = from.as_chunks::<LINE>().0;
            let (now, later) = to.split_at_mut(whole.len().min(to.len()));
            let (whole, more) = whole.split_at(now.len());
            from = &from[now.len() * LINE..];
            let next = match sources.peek() {
                Some(next) if more.is_empty() => next.as_ptr(),
                _ => from.as_ptr(),
            };
            // All but the last lines ask for lines of the same source.
            let (head, tail) = whole.split_at(whole.len().saturating_sub(AHEAD));
            let (to_head, to_tail) = now.split_at_mut(head.len());
            let rest = &whole[whole.len() - head.len()..];
            sum.lines::<HASH, STREAM>(to_head, head, rest.as_ptr().cast());
            sum.lines::<HASH, STREAM>(to_tail, tail, next);
            to = later;
            continue;
        }
        // Of a long source only what completes a line.
        let room = STAGE.min(to.len()) * LINE - staged;
        let taken = if is_long { staged.next_multiple_of(LINE) - staged } else { room };
        let (head, rest) = from.split_at(from.len().min(taken));
        stage.as_flattened_mut()[staged..staged + head.len()].copy_from_slice(head);
        staged += head.len();
        from = rest;
        if head.len() == room || (is_long && staged.is_multiple_of(LINE)) {
            let (now, later) = to.split_at_mut(staged / LINE);
            sum.lines::<HASH, STREAM>(now, &stage[..now.len()], from.as_ptr());
            (to, staged) = (later, 0);
        }
    }
    let mut rest = &mut end[..];
    loop {
        let (now, later) = rest.split_at_mut(from.len().min(rest.len()));
        now.copy_from_slice(&from[..now.len()]);
        rest = later;
        if rest.is_empty() {
            break;
        }
        from = sources.next().expect(too_short);
    }
    if STREAM {
        // Orders the stores past the caches before later ones, as ordinary stores are.
        _mm_sfence();
    }
    if !HASH {
        return 0;
    }
    sum.stripe(end.first_chunk().expect("longer than a line"));
    sum.finish(end.last_chunk().expect("longer than a line"), len)
}

/// XXH3 of an input of more than 240 bytes, stripe by stripe.
struct Sum {
    secret: &'static [u8; DEFAULT_SECRET_LENGTH],
    /// Four of the eight numbers each.
    accumulators: [__m256i; 2],
    /// Stripes since the last scramble.
    stripes: usize,
}

impl Sum {
    const PRIME32: [u32; 3] = [0x9e37_79b1, 0x85eb_ca77, 0xc2b2_ae3d];
    const PRIME64: [u64; 5] = [
        0x9e37_79b1_85eb_ca87,
        0xc2b2_ae3d_27d4_eb4f,
        0x1656_67b1_9e37_79f9,
        0x85eb_ca77_c2b2_ae63,
        0x27d4_eb2f_1656_67c5,
    ];

    #[target_feature(enable = "avx2")]
    fn new() -> Self {
        let [a, b, c] = Self::PRIME32.map(u64::from);
        let [d, e, f, g, h] = Self::PRIME64;
        let start = [c, d, e, f, g, b, h, a].map(u64::to_le_bytes);
        Self {
            secret: SecretBuffer::default().into_secret(),
            accumulators: load(start.as_flattened().try_into().expect("64 bytes")),
            stripes: 0,
        }
    }

    /// Copies lines and hashes them; for each one line is asked for, from `ahead` on.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn lines<const HASH: bool, const STREAM: bool>(
        &mut self,
        mut to: &mut [[u8; LINE]],
        mut from: &[[u8; LINE]],
        mut ahead: *const u8,
    ) {
        while !from.is_empty() {
            let count = if HASH { from.len().min(ROUND - self.stripes) } else { from.len() };
            let (now, later) = from.split_at(count);
            let (to_now, to_later) = to.split_at_mut(count);
            let mut accumulators = self.accumulators;
            for (i, (to, from)) in to_now.iter_mut().zip(now).enumerate() {
                // SAFETY: a hint, which accesses nothing, wherever it points. Newer compilers know.
                #[allow(unused_unsafe)]
                unsafe {
                    _mm_prefetch::<_MM_HINT_NTA>(ahead.cast())
                };
                ahead = ahead.wrapping_add(LINE);
                let data = load(from);
                store::<STREAM>(to, data);
                if HASH {
                    let key = load(self.key(8 * (self.stripes + i)));
                    accumulators = accumulate(accumulators, data, key);
                }
            }
            self.accumulators = accumulators;
            if HASH {
                self.count(count);
            }
            (from, to) = (later, to_later);
        }
    }

    #[target_feature(enable = "avx2")]
    fn stripe(&mut self, stripe: &[u8; LINE]) {
        let key = load(self.key(8 * self.stripes));
        self.accumulators = accumulate(self.accumulators, load(stripe), key);
        self.count(1);
    }

    /// Counts stripes, and scrambles at the end of a round.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn count(&mut self, stripes: usize) {
        self.stripes += stripes;
        if self.stripes < ROUND {
            return;
        }
        self.stripes = 0;
        let key = load(self.key(DEFAULT_SECRET_LENGTH - LINE));
        let prime = _mm256_set1_epi64x(i64::from(Self::PRIME32[0]));
        for (accumulator, key) in self.accumulators.iter_mut().zip(key) {
            let mixed = _mm256_xor_si256(*accumulator, _mm256_srli_epi64::<47>(*accumulator));
            let mixed = _mm256_xor_si256(mixed, key);
            let low = _mm256_mul_epu32(mixed, prime);
            let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime);
            *accumulator = _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high));
        }
    }

    /// The sum, given the last 64 bytes of an input of `len` bytes.
    #[target_feature(enable = "avx2")]
    fn finish(self, last: &[u8; LINE], len: usize) -> u64 {
        let key = load(self.key(DEFAULT_SECRET_LENGTH - LINE - 7));
        let accumulators = accumulate(self.accumulators, load(last), key);
        let mut bytes = [0; LINE];
        store::<false>(&mut bytes, accumulators);
        let mut sum = (len as u64).wrapping_mul(Self::PRIME64[0]);
        for (pair, key) in bytes.as_chunks::<16>().0.iter().zip(self.key(11).as_chunks::<16>().0) {
            let mixed = u128::from_le_bytes(*pair) ^ u128::from_le_bytes(*key);
            let product = u128::from(mixed as u64) * (mixed >> 64);
            sum = sum.wrapping_add(product as u64 ^ (product >> 64) as u64);
        }
        sum ^= sum >> 37;
        sum = sum.wrapping_mul(0x1656_6791_9e37_79f9);
        sum ^ (sum >> 32)
    }

    /// 64 bytes of the secret.
    #[inline]
    fn key(&self, at: usize) -> &[u8; LINE] {
        self.secret[at..].first_chunk().expect("within the secret")
    }
}

#[target_feature(enable = "avx2")]
#[inline]
fn accumulate(accumulators: [__m256i; 2], data: [__m256i; 2], key: [__m256i; 2]) -> [__m256i; 2] {
    let mut sums = [_mm256_setzero_si256(); 2];
    for (i, sum) in sums.iter_mut().enumerate() {
        let keyed = _mm256_xor_si256(data[i], key[i]);
        let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
        let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(data[i]);
        *sum = _mm256_add_epi64(_mm256_add_epi64(accumulators[i], swapped), product);
    }
    sums
}

#[target_feature(enable = "avx2")]
#[inline]
fn load(line: &[u8; LINE]) -> [__m256i; 2] {
    let mut vectors = [_mm256_setzero_si256(); 2];
    for (vector, half) in vectors.iter_mut().zip(line.as_chunks::<32>().0) {
        // SAFETY: half a line is a vector, which may lie anywhere.
        *vector = unsafe { _mm256_loadu_si256(half.as_ptr().cast()) };
    }
    vectors
}

/// Past the caches if it `STREAM`s: `line` is a line of the destination then, so aligned.
#[target_feature(enable = "avx2")]
#[inline]
fn store<const STREAM: bool>(line: &mut [u8; LINE], data: [__m256i; 2]) {
    let (halves, _) = line.as_chunks_mut::<32>();
    for (half, vector) in halves.iter_mut().zip(data) {
        let half = half.as_mut_ptr().cast();
        if STREAM {
            // SAFETY: half a line is a vector, and the destination begins at a multiple of a line,
            // as was asserted.
            unsafe { _mm256_stream_si256(half, vector) }
        } else {
            // SAFETY: half a line is a vector, which may lie anywhere.
            unsafe { _mm256_storeu_si256(half, vector) }
        }
    }
}
