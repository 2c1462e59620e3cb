//! Synthetic captures: prompts with a long right tail, and hidden states that anybody can regenerate.
//!
//! Every tensor is a pure function of `(seed, sample id, tensor name)`, word by word, so any part
//! of it can be made again for a comparison. Values are finite bfloat16 numbers with magnitudes
//! from 1/8 to 1/2.

use std::collections::HashSet;

use control_proto::capture::{Checksum, ChecksumKind, Mixsum};
use transport_core::{Dtype, Error, ErrorKind, FeatureName, Result, SampleId, TensorMeta};
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// Samples of the published benchmark.
pub const PAPER_SAMPLES: usize = 512;
/// Tokens of the published benchmark, all samples together.
pub const PAPER_TOKENS: u64 = 659_071;
/// Longest prompt of the published benchmark, in tokens.
pub const PAPER_MAX_LENGTH: u32 = 8192;

/// Shape of the hidden states that a model leaves: what a token costs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// Width of one layer's hidden state.
    pub hidden: u32,
    /// Layers whose hidden states are captured.
    pub taps: Vec<i64>,
}

impl Model {
    /// The model of the published benchmark: 5 taps of width 5,120.
    pub fn paper() -> Self {
        Self { hidden: 5120, taps: vec![5, 19, 33, 47, 61] }
    }

    /// Refuses layers that are named twice, and more than a model has.
    pub fn new(hidden: u32, taps: Vec<i64>) -> Result<Self> {
        const MOST: usize = 1024;
        let refuse = |why: &'static str| {
            let shown = &taps[..taps.len().min(16)];
            Err(Error::new(ErrorKind::ConfigInvalid, "configure", why)
                .with("taps", format_args!("{shown:?}"))
                .remedy("give the number of each captured layer once: --taps 5,19,33"))
        };
        if taps.len() > MOST {
            return refuse("too many taps");
        }
        if taps.iter().collect::<HashSet<_>>().len() < taps.len() {
            return refuse("a tap is named twice");
        }
        Ok(Self { hidden, taps })
    }

    /// Bytes of one token: the taps and the last hidden state in bfloat16, id and mask in int64.
    pub fn bytes_per_token(&self) -> u64 {
        (self.taps.len() as u64 + 1) * u64::from(self.hidden) * 2 + 16
    }

    /// The concatenated taps of a prompt: bfloat16 `[1, tokens, taps * hidden]`.
    pub fn aux_meta(&self, tokens: u64) -> Result<TensorMeta> {
        let width = self.taps.len() as u64 * u64::from(self.hidden);
        TensorMeta::new(Dtype::Bfloat16, [1, tokens, width])
    }

    /// The last hidden state of a prompt: bfloat16 `[1, tokens, hidden]`.
    pub fn last_hidden_meta(&self, tokens: u64) -> Result<TensorMeta> {
        TensorMeta::new(Dtype::Bfloat16, [1, tokens, u64::from(self.hidden)])
    }
}

/// One prompt to capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Identity of the sample that it becomes.
    pub sample_id: SampleId,
    /// Token ids.
    pub input_ids: Vec<i64>,
    /// 1 where a token is trained on, 0 elsewhere; as long as `input_ids`.
    pub loss_mask: Vec<i64>,
}

/// Lengths in tokens of `samples` prompts, at most `max_length` each: mean about a sixth of the
/// maximum, with a long right tail. The same on every machine.
pub fn lengths(samples: usize, max_length: u32, seed: u64) -> Vec<u32> {
    // Sixteenths of the distribution for a maximum of 8,192 tokens; linear between the knots.
    const KNOTS: [u64; 17] = [
        64, 180, 280, 370, 460, 560, 660, 770, 890, 1020, 1170, 1350, 1580, 1880, 2330, 3200, 8192,
    ];
    let length = |i: usize| {
        let draw = mix(seed ^ 0x6c65_6e67_7468_7321, i as u64) >> 48;
        let (knot, part) = ((draw >> 12) as usize, draw & 4095);
        let tokens = KNOTS[knot] + (((KNOTS[knot + 1] - KNOTS[knot]) * part) >> 12);
        ((tokens * u64::from(max_length)) / 8192).max(1) as u32
    };
    (0..samples).map(length).collect()
}

/// Lengths of the published benchmark's load: 512 prompts, 659,071 tokens, at most 8,192 each.
pub fn paper_lengths(seed: u64) -> Vec<u32> {
    let mut lengths = lengths(PAPER_SAMPLES, PAPER_MAX_LENGTH, seed);
    let mut total: u64 = lengths.iter().map(|&l| u64::from(l)).sum();
    // The draw comes close; the rest is spread evenly, within the bounds of a prompt.
    while total != PAPER_TOKENS {
        for length in &mut lengths {
            let missing = PAPER_TOKENS as i64 - total as i64;
            let step = (missing / PAPER_SAMPLES as i64).clamp(-64, 64);
            let step = if step == 0 { missing.signum() } else { step };
            let changed = (i64::from(*length) + step).clamp(16, i64::from(PAPER_MAX_LENGTH));
            total = total.wrapping_add_signed(changed - i64::from(*length));
            *length = changed as u32;
        }
    }
    lengths
}

/// The prompt of sample `index`, `tokens` long. The first third is the prompt proper and is not
/// trained on.
pub fn prompt(run_id: &str, index: usize, tokens: u32, seed: u64) -> Result<Prompt> {
    const VOCABULARY: u64 = 151_936;
    let sample_id = SampleId::new(format!("{run_id}:task-{index:06}"))?;
    let key = mix(seed ^ 0x7072_6f6d_7074_7321, index as u64);
    let input_ids =
        (0..u64::from(tokens)).map(|j| (mix(key, j) % VOCABULARY) as i64).collect::<Vec<_>>();
    let loss_mask = (0..tokens).map(|j| i64::from(j >= tokens / 3)).collect();
    Ok(Prompt { sample_id, input_ids, loss_mask })
}

/// One synthetic tensor, by name.
#[derive(Clone, Copy, Debug)]
pub struct Stream(u64);

/// Bytes made and hashed at a time: they stay in the second-level cache.
const BLOCK: usize = 256 << 10;
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

impl Stream {
    /// The content of tensor `name` of a sample.
    pub fn new(seed: u64, sample: &SampleId, name: &FeatureName) -> Self {
        let sample = xxh3_64_with_seed(sample.as_str().as_bytes(), seed);
        Self(xxh3_64_with_seed(name.as_str().as_bytes(), sample))
    }

    /// What the words count on from: word number `n`, counted from 1, is made of it plus `n` times
    /// `0x9e3779b97f4a7c15`.
    pub fn counter(self) -> u64 {
        self.0
    }

    /// Writes the tensor's bytes from byte `offset` on, which is a multiple of 8.
    pub fn write(self, offset: u64, out: &mut [u8]) {
        debug_assert!(offset.is_multiple_of(8));
        let mut counter = self.0.wrapping_add((offset / 8 + 1).wrapping_mul(GAMMA));
        let mut words = out.chunks_exact_mut(8);
        for word in &mut words {
            word.copy_from_slice(&four_bfloat16(counter).to_le_bytes());
            counter = counter.wrapping_add(GAMMA);
        }
        let tail = words.into_remainder();
        let last = four_bfloat16(counter).to_le_bytes();
        let len = tail.len();
        tail.copy_from_slice(&last[..len]);
    }

    /// Writes the whole tensor and returns the checksum of its bytes, touching memory once.
    pub fn write_hashed(self, out: &mut [u8], kind: ChecksumKind) -> Checksum {
        let value = match kind {
            ChecksumKind::Xxh3 => {
                let mut hash = Xxh3::new();
                self.write_blocks(out, |block| hash.update(block));
                hash.digest()
            }
            ChecksumKind::Mixsum => {
                let mut sum = Mixsum::default();
                self.write_blocks(out, |block| sum.update(block));
                sum.finish()
            }
        };
        Checksum::new(kind, value)
    }

    fn write_blocks(self, out: &mut [u8], mut written: impl FnMut(&[u8])) {
        let mut offset = 0;
        for block in out.chunks_mut(BLOCK) {
            self.write(offset, block);
            written(block);
            offset += block.len() as u64;
        }
    }
}

/// Four finite bfloat16 numbers: the sign and the mantissa are drawn, the exponent nearly not.
fn four_bfloat16(counter: u64) -> u64 {
    let mut z = counter;
    z = (z ^ (z >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    z ^= z >> 32;
    (z & 0x80ff_80ff_80ff_80ff) | 0x3e00_3e00_3e00_3e00
}

fn mix(key: u64, index: u64) -> u64 {
    let mut z = key.wrapping_add((index + 1).wrapping_mul(GAMMA));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Compares a tensor with what [`Stream::write`] makes, and names the first byte that differs.
pub fn compare(stream: Stream, found: &[u8]) -> Result<()> {
    let mut expected = vec![0; BLOCK];
    for (i, block) in found.chunks(BLOCK).enumerate() {
        let expected = &mut expected[..block.len()];
        stream.write((i * BLOCK) as u64, expected);
        if let Some(at) = block.iter().zip(&*expected).position(|(a, b)| a != b) {
            return Err(Error::new(ErrorKind::Corrupt, "compare", "a byte differs")
                .with("offset", i * BLOCK + at)
                .with("expected", expected[at])
                .with("found", block[at]));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use xxhash_rust::xxh3::xxh3_64;

    use super::*;

    fn stream() -> Stream {
        Stream::new(42, &SampleId::new("a").unwrap(), &FeatureName::new("x").unwrap())
    }

    #[test]
    fn the_published_load_comes_out_exactly() {
        for seed in [0, 42, u64::MAX] {
            let lengths = paper_lengths(seed);
            assert_eq!(lengths.len(), PAPER_SAMPLES);
            let tokens: u64 = lengths.iter().map(|&l| u64::from(l)).sum();
            assert_eq!(tokens, PAPER_TOKENS);
            assert!(lengths.iter().all(|l| (16..=PAPER_MAX_LENGTH).contains(l)));
            assert!(lengths.iter().max().unwrap() > &4000, "a long tail");
        }
        assert_eq!(Model::paper().bytes_per_token() * PAPER_TOKENS, 40_503_867_376);
    }

    #[test]
    fn lengths_and_prompts_are_the_same_on_every_machine() {
        assert_eq!(lengths(6, 8192, 42), lengths(7, 8192, 42)[..6]);
        assert_ne!(lengths(6, 8192, 42), lengths(6, 8192, 43));
        let prompt = prompt("run", 3, 10, 42).unwrap();
        assert_eq!(prompt.sample_id.as_str(), "run:task-000003");
        assert_eq!(prompt.loss_mask, [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]);
        assert_eq!(xxh3_64(format!("{:?}", prompt.input_ids).as_bytes()), PROMPT_HASH);
        let mut bytes = [0; 4096];
        let hash = stream().write_hashed(&mut bytes, ChecksumKind::Xxh3);
        assert_eq!(hash, Checksum::new(ChecksumKind::Xxh3, STREAM_HASH));
    }
    const PROMPT_HASH: u64 = 10_282_779_737_618_722_597;
    const STREAM_HASH: u64 = 16_697_154_698_451_836_367;

    #[test]
    fn any_part_can_be_made_again() {
        let mut whole = vec![0; 3 * BLOCK + 1234];
        let hash = stream().write_hashed(&mut whole, ChecksumKind::Xxh3);
        assert_eq!(hash.value, xxh3_64(&whole));
        let sum = stream().write_hashed(&mut whole, ChecksumKind::Mixsum);
        assert_eq!(sum.value, Mixsum::of(&whole));
        let mut part = vec![0; 1001];
        stream().write(BLOCK as u64 - 16, &mut part);
        assert_eq!(part, whole[BLOCK - 16..][..1001]);
        compare(stream(), &whole).unwrap();
        whole[BLOCK + 5] ^= 1;
        let error = compare(stream(), &whole).unwrap_err();
        assert_eq!(error.context("offset"), Some((BLOCK + 5).to_string().as_str()));
    }

    #[test]
    fn values_are_finite_and_differ() {
        let mut bytes = vec![0; 4096];
        stream().write(0, &mut bytes);
        let values: Vec<f32> = bytes
            .chunks(2)
            .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
            .collect();
        assert!(values.iter().all(|v| (0.125..0.5).contains(&v.abs())), "{values:?}");
        let mut sorted: Vec<u16> =
            bytes.chunks(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
        sorted.sort_unstable();
        sorted.dedup();
        assert!(sorted.len() > 400, "of 512 possible values, {}", sorted.len());
    }
}
