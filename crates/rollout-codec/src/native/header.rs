//! The header: everything about a rollout but its bytes.

use transport_core::{Dtype, ErrorKind, Result};
use xxhash_rust::xxh3::Xxh3;

use super::index::{Index, ShapeRecord, What, corrupt};
use crate::{Section, Template};

const MAGIC: [u8; 8] = *b"FSROLLUT";
const VERSION: u32 = 1;
const PREAMBLE_BYTES: usize = 64;
const SUM_AT: usize = 56;

/// What a reader accepts at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a header.
    pub header_bytes: u64,
    /// Bytes of data.
    pub data_bytes: u64,
}

impl Default for Limits {
    /// 16 MiB of header, 1 TiB of data.
    fn default() -> Self {
        Self { header_bytes: 16 << 20, data_bytes: 1 << 40 }
    }
}

/// A header that was checked: its segments lie in the data, in order, and have the lengths that
/// their fields need.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    generation: u64,
    rows: u64,
    data_bytes: u64,
    pub(super) index: Index,
}

/// What the header says about one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldInfo<'h> {
    /// Its name.
    pub name: &'h str,
    /// Where it belongs.
    pub section: Section,
    /// What it is, such as `ragged` or `utf8`.
    pub kind: &'static str,
    /// Element type, if it has one.
    pub dtype: Option<Dtype>,
    /// Element type in the data; smaller than `dtype` where the writer narrowed.
    pub wire: Option<Dtype>,
    /// Bytes of its segments.
    pub bytes: u64,
    /// Whether its bytes have checksums.
    pub checksums: bool,
}

impl Header {
    pub(super) fn new(generation: u64, rows: u64, data_bytes: u64, index: Index) -> Self {
        Self { generation, rows, data_bytes, index }
    }

    /// Reads and checks a header.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        Self::parse_within(bytes, Limits::default())
    }

    /// Reads and checks a header, within `limits`.
    pub fn parse_within(bytes: &[u8], limits: Limits) -> Result<Self> {
        let preamble: &[u8; PREAMBLE_BYTES] = bytes
            .first_chunk()
            .ok_or_else(|| corrupt("shorter than a header").with("found_bytes", bytes.len()))?;
        if preamble[..8] != MAGIC {
            return Err(corrupt("not the header of a rollout"));
        }
        let word =
            |at: usize| u64::from_le_bytes(preamble[at..at + 8].try_into().expect("eight bytes"));
        // The version decides what the rest means: it comes first.
        if word(8) != u64::from(VERSION) {
            return Err(transport_core::Error::new(
                ErrorKind::Unsupported,
                "read rollout header",
                "written by another version",
            )
            .with("expected", VERSION)
            .with("found", word(8))
            .remedy("use the same release on both sides"));
        }
        let (header_bytes, data_bytes, index_bytes) = (word(16), word(24), word(48));
        if header_bytes != bytes.len() as u64
            || header_bytes.checked_sub(PREAMBLE_BYTES as u64) != Some(index_bytes)
        {
            return Err(corrupt("the header is not as long as it says")
                .with("expected", header_bytes)
                .with("index_bytes", index_bytes)
                .with("found", bytes.len()));
        }
        if header_bytes > limits.header_bytes || data_bytes > limits.data_bytes {
            return Err(corrupt("longer than accepted")
                .with("header_bytes", header_bytes)
                .with("data_bytes", data_bytes));
        }
        let index = &bytes[PREAMBLE_BYTES..];
        if word(SUM_AT) != checksum(preamble, index) {
            return Err(corrupt("the checksum of the header does not match"));
        }
        let rows = word(40);
        let index: Index = serde_json::from_slice(index)
            .map_err(|e| corrupt("the index cannot be read").source(e))?;
        index.check(rows, data_bytes)?;
        Ok(Self { generation: word(32), rows, data_bytes, index })
    }

    /// The stored form.
    pub fn to_bytes(&self) -> Vec<u8> {
        let index = serde_json::to_vec(&self.index).expect("plain data");
        let mut preamble = [0; PREAMBLE_BYTES];
        let mut put =
            |at: usize, word: u64| preamble[at..at + 8].copy_from_slice(&word.to_le_bytes());
        put(8, VERSION.into());
        put(16, (PREAMBLE_BYTES + index.len()) as u64);
        put(24, self.data_bytes);
        put(32, self.generation);
        put(40, self.rows);
        put(48, index.len() as u64);
        preamble[..8].copy_from_slice(&MAGIC);
        let sum = checksum(&preamble, &index);
        preamble[SUM_AT..].copy_from_slice(&sum.to_le_bytes());
        [&preamble[..], &index].concat()
    }

    /// What the writer chose to tell this rollout from others under the same name.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Length of the data.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// What there is, in order.
    pub fn fields(&self) -> impl Iterator<Item = FieldInfo<'_>> {
        self.index.fields.iter().map(|field| {
            let one = Index { fields: vec![field.clone()] };
            let segments = one.segments();
            let (kind, dtype, wire) = describe(&field.what);
            FieldInfo {
                name: &field.name,
                section: field.section,
                kind,
                dtype,
                wire,
                bytes: segments.iter().map(|segment| segment.len).sum(),
                checksums: segments.iter().all(|segment| segment.xxh3.is_some()),
            }
        })
    }

    /// The shape of a ragged field's rows; `None` if they have none in common or it is no ragged
    /// field.
    pub fn template(&self, name: &str) -> Option<Template> {
        match &self.index.fields.iter().find(|field| field.name == name)?.what {
            What::Ragged(record) => match &record.shape {
                ShapeRecord::Template { before, after } => Some(Template {
                    before: before.as_slice().into(),
                    after: after.as_slice().into(),
                }),
                ShapeRecord::Irregular { .. } => None,
            },
            _ => None,
        }
    }

    /// The bytes of the data that hold the field `name`, for reading it alone.
    pub fn field_range(&self, name: &str) -> Result<std::ops::Range<u64>> {
        let field = self.field(name)?;
        let segments = Index { fields: vec![field.clone()] }.segments();
        Ok(match (segments.first(), segments.last()) {
            (Some(first), Some(last)) => first.at..last.end(),
            _ => 0..0,
        })
    }

    /// The bytes of the data that say where the rows of the field `name` lie: what
    /// [`Self::locator`] asks for.
    #[cfg(feature = "transport")]
    pub(crate) fn index_ranges(&self, name: &str) -> Result<Vec<std::ops::Range<u64>>> {
        let of_runs = |runs: &super::index::Runs| vec![Some(runs.offsets), runs.alias, runs.nulls];
        let segments = match &self.field(name)?.what {
            What::Ragged(record) => of_runs(&record.runs),
            What::Blobs { runs, .. } => of_runs(runs),
            What::Scalars { nulls, .. } => vec![*nulls],
            _ => Vec::new(),
        };
        Ok(segments.into_iter().flatten().map(|segment| segment.at..segment.end()).collect())
    }

    pub(super) fn field(&self, name: &str) -> Result<&super::index::FieldRecord> {
        self.index.fields.iter().find(|field| field.name == name).ok_or_else(|| {
            transport_core::Error::new(ErrorKind::NotFound, "read rollout", "no such field")
                .with("field", format_args!("{name:?}"))
                .with(
                    "fields",
                    self.index.fields.iter().map(|f| f.name.as_str()).collect::<Vec<_>>().join(" "),
                )
        })
    }
}

fn checksum(preamble: &[u8; PREAMBLE_BYTES], index: &[u8]) -> u64 {
    let mut hasher = Xxh3::new();
    hasher.update(&preamble[..SUM_AT]);
    hasher.update(index);
    hasher.digest()
}

fn describe(what: &What) -> (&'static str, Option<Dtype>, Option<Dtype>) {
    use super::index::BlobTag;
    match what {
        What::Ragged(ragged) => ("ragged", Some(ragged.dtype), Some(ragged.wire)),
        What::Dense { dtype, wire, .. } => ("dense", Some(*dtype), Some(*wire)),
        What::Scalars { dtype, wire, .. } => ("scalars", Some(*dtype), Some(*wire)),
        What::Blobs { holds, .. } => {
            let kind = match holds {
                BlobTag::Bytes => "bytes",
                BlobTag::Utf8 => "utf8",
                BlobTag::Json => "json",
                BlobTag::MessagePack => "message_pack",
                BlobTag::Media => "media",
            };
            (kind, None, None)
        }
        What::MediaList { .. } => ("media_list", None, None),
        What::TensorDict { .. } => ("tensor_dict", None, None),
        What::Nested { .. } => ("nested", None, None),
        What::Meta { .. } => ("meta", None, None),
    }
}
