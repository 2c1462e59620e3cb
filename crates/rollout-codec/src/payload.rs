//! A deterministic rollout dict, for benches and tests in any language.
//!
//! It is shaped like what slime's rollout side builds for one data-parallel rank: many ragged rows
//! whose lengths have the long right tail of mathematics with a cap of 32k tokens. Every number
//! comes from splitmix64 of a counter and every length from an integer quantile table, so another
//! language makes the same bytes.

use std::fmt;

use transport_core::{Dtype, TensorMeta};

use crate::{
    Blobs, Column, Dense, Library, Piece, Ragged, Rollout, RowKind, Scalars, Template, Value,
};

const SEED: u64 = 0x51_13e0_1709;
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
/// Rows repeat after this many, each repetition in memory of its own.
const BASE_ROWS: u64 = 1000;
const VOCABULARY: u64 = 151_936;
const EXPERTS: u64 = 128;
const LAYERS: u64 = 48;
const TOP_K: u64 = 8;
/// A response of this length was cut off.
const TRUNCATED_AT: u64 = 30_000;

/// Lengths at 0/16, 1/16 .. 16/16 of all rows.
type Quantiles = [u64; 17];
const RESPONSE: Quantiles = [
    64, 700, 1300, 1900, 2600, 3300, 4100, 5000, 6000, 7200, 8600, 10300, 12400, 15000, 18500,
    24000, 32768,
];
const PROMPT: Quantiles =
    [32, 60, 75, 88, 100, 112, 125, 140, 156, 175, 198, 226, 262, 312, 390, 560, 1024];

/// What the numbers of a seed are for.
mod purpose {
    pub(super) const PROMPT: u64 = 1;
    pub(super) const RESPONSE: u64 = 2;
    pub(super) const TOKENS: u64 = 3;
    pub(super) const LOG_PROBS: u64 = 4;
    pub(super) const TEACHER: u64 = 5;
    pub(super) const REWARDS: u64 = 7;
    pub(super) const EXPERTS: u64 = 8;
}

/// Which ragged fields there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Tokens, masks and log-probs: many small rows.
    Text,
    /// And the log-probs of a teacher.
    TextTeacher,
    /// And the routed experts: few large rows.
    TextExperts,
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::TextTeacher => "text+teacher",
            Self::TextExperts => "text+r3",
        })
    }
}

/// Rows in memory of their own, as a producer has them.
#[derive(Clone, Debug)]
pub struct Payload {
    profile: Profile,
    prompt: Vec<u64>,
    response: Vec<u64>,
    fields: Vec<RaggedRows>,
}

/// The rows of one ragged field.
#[derive(Clone, Debug)]
pub struct RaggedRows {
    /// Its name.
    pub name: &'static str,
    /// Element type.
    pub dtype: Dtype,
    /// Fixed dimensions after the ragged one.
    pub tail: Vec<u64>,
    /// Little-endian elements, one allocation a row.
    pub rows: Vec<Box<[u8]>>,
}

impl RaggedRows {
    /// Wrapping sum of all rows read as little-endian u64 words, each row padded with zeros to
    /// whole words; and the number of elements.
    pub fn checksum(&self) -> (u64, u64) {
        let mut sum = 0u64;
        for word in self.rows.iter().flat_map(|row| row.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..word.len()].copy_from_slice(word);
            sum = sum.wrapping_add(u64::from_le_bytes(bytes));
        }
        let bytes: u64 = self.rows.iter().map(|row| row.len() as u64).sum();
        (sum, bytes / self.dtype.size())
    }
}

impl Payload {
    /// Rows until their bytes are at least `target_bytes`.
    pub fn new(profile: Profile, target_bytes: u64) -> Self {
        let mut total = 0;
        let (mut prompt, mut response) = (Vec::new(), Vec::new());
        while total < target_bytes {
            let base = prompt.len() as u64 % BASE_ROWS;
            let (p, r) = (
                length(&PROMPT, draw(seed(purpose::PROMPT, 0), base)),
                length(&RESPONSE, draw(seed(purpose::RESPONSE, 0), base)),
            );
            total += row_bytes(profile, p, r);
            prompt.push(p);
            response.push(r);
        }
        let mut payload = Self { profile, prompt, response, fields: Vec::new() };
        payload.add("tokens", Dtype::Int64, vec![], |base, p, r| {
            elements(seed(purpose::TOKENS, base), p + r, |x| {
                ((x % VOCABULARY) as i64).to_le_bytes()
            })
        });
        payload.add("loss_masks", Dtype::Int32, vec![], mask);
        payload.add("rollout_log_probs", Dtype::Float32, vec![], |base, _, r| {
            log_probs(purpose::LOG_PROBS, base, r)
        });
        match profile {
            Profile::Text => {}
            Profile::TextTeacher => {
                payload.add("teacher_log_probs", Dtype::Float32, vec![], |base, _, r| {
                    log_probs(purpose::TEACHER, base, r)
                });
            }
            Profile::TextExperts => {
                let tail = vec![LAYERS, TOP_K];
                payload.add("rollout_routed_experts", Dtype::Int32, tail, |base, p, r| {
                    let count = (p + r - 1) * LAYERS * TOP_K;
                    elements(seed(purpose::EXPERTS, base), count, |x| {
                        ((x % EXPERTS) as i32).to_le_bytes()
                    })
                });
            }
        }
        payload
    }

    /// Makes the base rows once and copies them for every repetition.
    fn add(
        &mut self,
        name: &'static str,
        dtype: Dtype,
        tail: Vec<u64>,
        row: impl Fn(u64, u64, u64) -> Box<[u8]>,
    ) {
        let mut rows: Vec<Box<[u8]>> = Vec::with_capacity(self.prompt.len());
        for (i, (&p, &r)) in self.prompt.iter().zip(&self.response).enumerate() {
            let made = match i.checked_sub(BASE_ROWS as usize) {
                Some(before) => rows[before].clone(),
                None => row(i as u64, p, r),
            };
            rows.push(made);
        }
        self.fields.push(RaggedRows { name, dtype, tail, rows });
    }

    /// Which ragged fields there are.
    pub fn profile(&self) -> Profile {
        self.profile
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.prompt.len()
    }

    /// Bytes of all ragged rows.
    pub fn nbytes(&self) -> u64 {
        let row = |(&p, &r)| row_bytes(self.profile, p, r);
        self.prompt.iter().zip(&self.response).map(row).sum()
    }

    /// The ragged fields.
    pub fn fields(&self) -> &[RaggedRows] {
        &self.fields
    }

    /// Lengths of prompt and response of each row.
    pub fn lengths(&self) -> impl Iterator<Item = (u64, u64)> {
        self.prompt.iter().copied().zip(self.response.iter().copied())
    }

    /// The whole dict, with torch rows that borrow this payload's memory.
    pub fn rollout(&self) -> Rollout<'_> {
        fn borrowed(field: &RaggedRows) -> Vec<Piece<'_>> {
            field.rows.iter().map(|row| Piece::Borrowed(row)).collect()
        }
        self.dict(self.fields.iter().map(borrowed).collect())
    }

    /// The whole dict, which takes over this payload's memory.
    pub fn into_rollout(mut self) -> Rollout<'static> {
        let rows = |field: &mut RaggedRows| {
            let rows = std::mem::take(&mut field.rows);
            rows.into_iter().map(|row| Piece::Shared(row.into())).collect()
        };
        let pieces = self.fields.iter_mut().map(rows).collect();
        self.dict(pieces)
    }

    /// The dict, with these rows in its ragged fields.
    fn dict<'r>(&self, pieces: Vec<Vec<Piece<'r>>>) -> Rollout<'r> {
        let rows = self.rows();
        let bit = |i: usize| draw(seed(purpose::REWARDS, 0), i as u64) & 1;
        let ints = |items: &mut dyn Iterator<Item = u64>| {
            let data: Vec<u8> = items.flat_map(|n| (n as i64).to_le_bytes()).collect();
            Column::Scalars(Scalars::new(Dtype::Int64, data).expect("whole elements"))
        };
        let mut rollout = Rollout::default();
        let ones = |row: &[u8]| row.chunks(4).filter(|mask| mask[0] == 1).count() as f32;
        let sums: Vec<u8> = pieces[1].iter().flat_map(|row| ones(row).to_le_bytes()).collect();
        let add = |rollout: &mut Rollout<'_>, name: &str, column: Column<'static>| {
            rollout.non_tensor.insert(name.to_owned(), column);
        };
        for name in ["partition", "sample_indices", "rollout_ids"] {
            add(&mut rollout, name, ints(&mut (0..rows as u64)));
        }
        add(&mut rollout, "response_lengths", ints(&mut self.response.iter().copied()));
        let truncated = self.response.iter().map(|&r| u64::from(r >= TRUNCATED_AT));
        add(&mut rollout, "truncated", ints(&mut { truncated }));
        let rewards: Vec<u8> =
            (0..rows).flat_map(|i| (bit(i) as f64 - 0.5).to_le_bytes()).collect();
        let rewards = Scalars::new(Dtype::Float64, rewards).expect("whole elements");
        add(&mut rollout, "rewards", Column::Scalars(rewards));
        let names = Blobs::from_text(vec![Some("dapo-math-17k"); rows]);
        add(&mut rollout, "source_names", Column::Blobs(names));
        for (field, pieces) in self.fields.iter().zip(pieces) {
            let template = Template::tail(field.tail.clone());
            let mut column = Ragged::new(field.dtype, RowKind::Torch, template).expect("small");
            for row in pieces {
                column.push(row).expect("whole steps");
            }
            rollout.non_tensor.insert(field.name.to_owned(), Column::Ragged(column));
        }
        let meta = TensorMeta::new(Dtype::Float32, [rows as u64]).expect("as long as the rows");
        let sums = Dense::new(Library::Torch, meta, sums).expect("one a row");
        rollout.batch.insert("rollout_mask_sums".into(), Column::Dense(sums));
        let list = |items: &mut dyn Iterator<Item = Value>| Value::List(items.collect());
        let n = Value::Int(rows as i128);
        for (name, value) in [
            ("raw_reward", list(&mut (0..rows).map(|i| Value::Float(bit(i) as f64)))),
            ("total_lengths", list(&mut self.lengths().map(|(p, r)| Value::from(p + r)))),
            ("global_batch_sizes", Value::List(vec![n.clone()])),
            ("num_microbatches", Value::List(vec![n])),
            (
                "micro_batch_indices",
                list(&mut (0..rows).map(|i| Value::List(vec![Value::Int(i as i128)]))),
            ),
        ] {
            rollout.meta.insert(name.into(), value);
        }
        rollout
    }
}

fn row_bytes(profile: Profile, prompt: u64, response: u64) -> u64 {
    let text = 8 * (prompt + response) + 4 * response + 4 * response;
    text + match profile {
        Profile::Text => 0,
        Profile::TextTeacher => 4 * response,
        Profile::TextExperts => 4 * (prompt + response - 1) * LAYERS * TOP_K,
    }
}

/// Number `i` of the stream `seed`: splitmix64 in counter mode.
fn draw(seed: u64, i: u64) -> u64 {
    let z = i.wrapping_add(1).wrapping_mul(GAMMA).wrapping_add(seed);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn seed(purpose: u64, row: u64) -> u64 {
    SEED.wrapping_add(purpose.wrapping_mul(0x1_0000_0001))
        .wrapping_add(row.wrapping_mul(0x9e37_79b9))
}

/// The length at position `u` of the table, linear between its knots.
fn length(table: &Quantiles, u: u64) -> u64 {
    let p = u >> 48;
    let (knot, part) = ((p >> 12) as usize, p & 4095);
    table[knot] + (((table[knot + 1] - table[knot]) * part) >> 12)
}

fn elements<const N: usize>(seed: u64, count: u64, element: impl Fn(u64) -> [u8; N]) -> Box<[u8]> {
    (0..count).flat_map(|j| element(draw(seed, j))).collect()
}

/// Ones; in every eighth row the second quarter, a tool's answer, is zero.
fn mask(base: u64, _prompt: u64, response: u64) -> Box<[u8]> {
    let tool = base.is_multiple_of(8);
    let one = |j: u64| i32::from(!(tool && (response / 4..response / 2).contains(&j)));
    (0..response).flat_map(|j| one(j).to_le_bytes()).collect()
}

/// Exact in any language: a 24-bit whole number, times powers of two. Zero is -0.0.
fn log_probs(purpose: u64, base: u64, response: u64) -> Box<[u8]> {
    elements(seed(purpose, base), response, |x| {
        let unit = (x >> 40) as f32 * (1.0 / 16_777_216.0);
        (-unit * 4.0).to_le_bytes()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rows_have_the_specified_lengths() {
        let payload = Payload::new(Profile::Text, 1 << 20);
        let first: Vec<_> = payload.lengths().take(5).collect();
        assert_eq!(first, [(73, 5281), (338, 3865), (139, 9650), (166, 25207), (98, 4246)]);
    }

    #[test]
    fn payloads_have_the_specified_sizes_and_checksums() {
        for (profile, rows, bytes, sums) in [
            (
                Profile::Text,
                967,
                134_526_240,
                &[
                    ("tokens", 0x0000_0096_aace_515d, 8_515_985),
                    ("loss_masks", 0x003d_8427_003d_85fb, 8_299_795),
                    ("rollout_log_probs", 0xa8d5_c57c_4676_de96, 8_299_795),
                ][..],
            ),
            (
                Profile::TextTeacher,
                775,
                134_318_828,
                &[
                    ("tokens", 0x0000_0078_aa1d_b909, 6_819_811),
                    ("loss_masks", 0x0031_3974_0031_3ae3, 6_646_695),
                    ("rollout_log_probs", 0x388d_6775_151c_991c, 6_646_695),
                    ("teacher_log_probs", 0xa5fc_d358_1e4f_4bb9, 6_646_695),
                ],
            ),
            (
                Profile::TextExperts,
                10,
                137_093_568,
                &[
                    ("tokens", 0x0000_0001_90f6_5eb9, 88_354),
                    ("loss_masks", 0x0000_a4c0_0000_a4c6, 86_294),
                    ("rollout_log_probs", 0xd79d_acf3_230b_7d08, 86_294),
                    ("rollout_routed_experts", 0x4032_6309_4037_35d5, 33_924_096),
                ],
            ),
        ] {
            let payload = Payload::new(profile, 128 << 20);
            assert_eq!((payload.rows(), payload.nbytes()), (rows, bytes), "{profile}");
            for (field, &(name, sum, count)) in payload.fields().iter().zip(sums) {
                assert_eq!(field.name, name, "{profile}");
                assert_eq!(field.checksum(), (sum, count), "{profile} {name}");
            }
            assert_eq!(payload.fields().len(), sums.len());
        }
    }
}
