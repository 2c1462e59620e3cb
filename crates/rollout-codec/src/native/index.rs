//! The index of a header: which fields there are, what they are, and where their segments lie.

use serde::{Deserialize, Serialize};
use transport_core::{Dtype, Error, ErrorKind, Result, TensorMeta};

use super::{ALIGNMENT, align};
use crate::{BlobKind, Library, MAX_TREE_DEPTH, Section, Template};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    pub(super) fields: Vec<FieldRecord>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FieldRecord {
    pub(super) name: String,
    pub(super) section: Section,
    pub(super) what: What,
}

/// A run of bytes in the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Segment {
    pub(super) at: u64,
    pub(super) len: u64,
    #[serde(default, with = "hex_sum", skip_serializing_if = "Option::is_none")]
    pub(super) xxh3: Option<u64>,
}

impl Segment {
    pub(super) fn end(&self) -> u64 {
        self.at + self.len // checked by `Index::check`
    }
}

/// What a field is. Every variant lists its segments in the order in which they lie in the data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum What {
    Ragged(RaggedRecord),
    Dense {
        #[serde(with = "dtype")]
        dtype: Dtype,
        #[serde(with = "dtype")]
        wire: Dtype,
        library: LibraryTag,
        shape: Vec<u64>,
        data: Segment,
    },
    Scalars {
        #[serde(with = "dtype")]
        dtype: Dtype,
        #[serde(with = "dtype")]
        wire: Dtype,
        data: Segment,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        nulls: Option<Segment>,
    },
    Blobs {
        holds: BlobTag,
        runs: Runs,
        /// JSON list of pixel layouts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pixels: Option<Segment>,
        data: Segment,
    },
    MediaList {
        items: u64,
        row_offsets: Segment,
        byte_offsets: Segment,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        nulls: Option<Segment>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pixels: Option<Segment>,
        data: Segment,
    },
    TensorDict {
        nulls: Segment,
        columns: Vec<Named<RaggedRecord>>,
    },
    Nested {
        root: Box<BranchRecord>,
    },
    /// MessagePack of one value.
    Meta {
        value: Segment,
    },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Named<T> {
    pub(super) name: String,
    pub(super) what: T,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RaggedRecord {
    #[serde(with = "dtype")]
    pub(super) dtype: Dtype,
    /// Element type in the data, smaller where the writer narrowed.
    #[serde(with = "dtype")]
    pub(super) wire: Dtype,
    pub(super) rows_are: RowsAre,
    pub(super) shape: ShapeRecord,
    /// Where rows lie, in steps of the ragged dimension; in elements if rows have no template.
    pub(super) runs: Runs,
    /// For irregular rows: u64 rank and then as many dimensions as the widest row has, a row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) shapes: Option<Segment>,
    /// For mixed rows: 1 where a row is an array.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) arrays: Option<Segment>,
    pub(super) data: Segment,
}

/// Offsets of rows, and which rows share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Runs {
    /// Number of stored runs; the number of rows unless some share one.
    pub(super) stored: u64,
    /// The last offset.
    pub(super) total: u64,
    /// u64 a stored run, and one more.
    pub(super) offsets: Segment,
    /// u64 a row: its stored run. Only where rows share runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) alias: Option<Segment>,
    /// 1 where a row is null.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) nulls: Option<Segment>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum ShapeRecord {
    Template { before: Vec<u64>, after: Vec<u64> },
    Irregular { width: u64 },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum BranchRecord {
    Dict { missing: Segment, present: Segment, children: Vec<Named<Self>> },
    List { missing: Segment, present: Segment, lengths: Segment, children: Vec<Self> },
    Leaf { missing: Segment, what: What },
}

macro_rules! tags {
    ($(#[$doc:meta])* $tag:ident for $of:ty { $($name:ident => $value:expr),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub(super) enum $tag { $($name),* }

        impl From<$of> for $tag {
            fn from(value: $of) -> Self {
                $(if value == $value { return Self::$name; })*
                unreachable!("all values have a tag")
            }
        }

        impl From<$tag> for $of {
            fn from(tag: $tag) -> Self {
                match tag { $($tag::$name => $value),* }
            }
        }
    };
}

tags!(LibraryTag for Library { Numpy => Library::Numpy, Torch => Library::Torch });
tags!(BlobTag for BlobKind {
    Bytes => BlobKind::Bytes, Utf8 => BlobKind::Utf8, Json => BlobKind::Json,
    MessagePack => BlobKind::MessagePack, Media => BlobKind::Media,
});

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RowsAre {
    Numpy,
    Torch,
    List,
    Mixed,
}

mod dtype {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use transport_core::Dtype;

    pub(super) fn serialize<S: Serializer>(dtype: &Dtype, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(dtype.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Dtype, D::Error> {
        String::deserialize(d)?.parse().map_err(D::Error::custom)
    }
}

/// Sixteen hexadecimal digits, so that the index is as long before the sums are known as after.
mod hex_sum {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(sum: &Option<u64>, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&format!("{:016x}", sum.expect("skipped if none")))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
        let text = String::deserialize(d)?;
        let digits = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
        match u64::from_str_radix(&text, 16) {
            Ok(sum) if digits => Ok(Some(sum)),
            _ => Err(D::Error::custom("a checksum is not 16 hexadecimal digits")),
        }
    }
}

impl Index {
    /// Visits every segment in the order of the data.
    pub(super) fn segments(&self) -> Vec<Segment> {
        let mut copy = self.clone();
        let mut segments = Vec::new();
        copy.visit(&mut |segment| segments.push(*segment));
        segments
    }

    /// Visits every segment in the order of the data, for changing it.
    pub(super) fn visit(&mut self, visit: &mut dyn FnMut(&mut Segment)) {
        self.fields.iter_mut().for_each(|field| field.what.visit(visit));
    }

    /// Checks everything that can be checked without the data.
    pub(super) fn check(&self, rows: u64, data_bytes: u64) -> Result<()> {
        let mut names = std::collections::HashSet::new();
        for field in &self.fields {
            let meta = field.section == Section::Meta;
            if !names.insert((meta, field.name.as_str())) {
                return Err(corrupt("a name occurs twice").with("field", &field.name));
            }
            if meta != matches!(field.what, What::Meta { .. }) {
                return Err(corrupt("a field is not in its section").with("field", &field.name));
            }
            field.what.check(rows, 0).map_err(|e| e.with("field", &field.name))?;
        }
        let mut end = 0u64;
        for segment in self.segments() {
            if Some(segment.at) != align(end) {
                return Err(corrupt("a segment is not where the one before it ends")
                    .with("at", segment.at)
                    .with("expected", format_args!("{:?}", align(end))));
            }
            end = segment.at.checked_add(segment.len).ok_or_else(|| {
                corrupt("a segment is longer than an address space").with("at", segment.at)
            })?;
        }
        if align(end) != Some(data_bytes) {
            return Err(corrupt("the segments do not fill the data")
                .with("segments_end", end)
                .with("data_bytes", data_bytes)
                .with("alignment", ALIGNMENT));
        }
        Ok(())
    }
}

pub(super) fn corrupt(why: &'static str) -> Error {
    Error::new(ErrorKind::Corrupt, "read rollout header", why)
}

/// Refuses a segment that is not `count` times `size` bytes long.
fn check_len(segment: &Segment, count: Option<u64>, size: u64, what: &'static str) -> Result<()> {
    if count.and_then(|count| count.checked_mul(size)) == Some(segment.len) {
        return Ok(());
    }
    Err(corrupt("a segment does not have the length that its field says")
        .with("segment", what)
        .with("expected_count", format_args!("{count:?}"))
        .with("item_bytes", size)
        .with("found_bytes", segment.len))
}

fn check_flags(segment: Option<&Segment>, rows: u64, what: &'static str) -> Result<()> {
    segment.map_or(Ok(()), |segment| check_len(segment, Some(rows), 1, what))
}

impl Runs {
    fn visit(&mut self, visit: &mut dyn FnMut(&mut Segment)) {
        visit(&mut self.offsets);
        self.alias.iter_mut().for_each(&mut *visit);
        self.nulls.iter_mut().for_each(visit);
    }

    fn check(&self, rows: u64) -> Result<()> {
        check_len(&self.offsets, self.stored.checked_add(1), 8, "offsets")?;
        match &self.alias {
            Some(alias) => check_len(alias, Some(rows), 8, "alias")?,
            None if self.stored == rows => {}
            None => return Err(corrupt("not one stored run a row").with("stored", self.stored)),
        }
        check_flags(self.nulls.as_ref(), rows, "nulls")
    }
}

impl RaggedRecord {
    fn visit(&mut self, visit: &mut dyn FnMut(&mut Segment)) {
        self.runs.visit(visit);
        self.shapes.iter_mut().for_each(&mut *visit);
        self.arrays.iter_mut().for_each(&mut *visit);
        visit(&mut self.data);
    }

    /// Bytes of one step of the ragged dimension in the data.
    pub(super) fn step_bytes(&self) -> Result<u64> {
        match &self.shape {
            ShapeRecord::Template { before, after } => {
                let template =
                    Template { before: before.as_slice().into(), after: after.as_slice().into() };
                template.step_bytes(self.wire)
            }
            ShapeRecord::Irregular { .. } => Ok(self.wire.size()),
        }
    }

    fn check(&self, rows: u64) -> Result<()> {
        check_wire(self.dtype, self.wire)?;
        self.runs.check(rows)?;
        match (&self.shape, &self.shapes) {
            (ShapeRecord::Template { before, after }, None) => {
                // The logical type is the larger one: its sizes must not overflow either.
                let template =
                    Template { before: before.as_slice().into(), after: after.as_slice().into() };
                template.step_bytes(self.dtype)?;
            }
            (ShapeRecord::Irregular { width }, Some(shapes)) => {
                if *width > TensorMeta::MAX_RANK as u64 {
                    return Err(corrupt("too many dimensions").with("width", width));
                }
                check_len(shapes, rows.checked_mul(width + 1), 8, "shapes")?;
            }
            _ => return Err(corrupt("shapes where there is a template, or neither")),
        }
        match (self.rows_are, &self.arrays) {
            (RowsAre::Mixed, Some(arrays)) => check_flags(Some(arrays), rows, "arrays")?,
            (RowsAre::Mixed, None) | (_, Some(_)) => {
                return Err(corrupt("which rows are arrays is missing, or not asked for"));
            }
            _ => {}
        }
        check_len(&self.data, Some(self.runs.total), self.step_bytes()?, "data")
    }
}

fn check_wire(dtype: Dtype, wire: Dtype) -> Result<()> {
    if dtype == wire || super::narrow::is_narrowing(dtype, wire) {
        return Ok(());
    }
    Err(corrupt("the data's element type is no narrower form of the field's")
        .with("dtype", dtype)
        .with("wire", wire))
}

impl What {
    fn visit(&mut self, visit: &mut dyn FnMut(&mut Segment)) {
        match self {
            Self::Ragged(ragged) => ragged.visit(visit),
            Self::Dense { data, .. } => visit(data),
            Self::Scalars { data, nulls, .. } => {
                visit(data);
                nulls.iter_mut().for_each(visit);
            }
            Self::Blobs { runs, pixels, data, .. } => {
                runs.visit(visit);
                pixels.iter_mut().for_each(&mut *visit);
                visit(data);
            }
            Self::MediaList { row_offsets, byte_offsets, nulls, pixels, data, .. } => {
                visit(row_offsets);
                visit(byte_offsets);
                nulls.iter_mut().for_each(&mut *visit);
                pixels.iter_mut().for_each(&mut *visit);
                visit(data);
            }
            Self::TensorDict { nulls, columns } => {
                visit(nulls);
                columns.iter_mut().for_each(|column| column.what.visit(visit));
            }
            Self::Nested { root } => root.visit(visit),
            Self::Meta { value } => visit(value),
        }
    }

    fn check(&self, rows: u64, depth: usize) -> Result<()> {
        match self {
            Self::Ragged(ragged) => ragged.check(rows),
            Self::Dense { dtype, wire, shape, data, .. } => {
                check_wire(*dtype, *wire)?;
                TensorMeta::new(*dtype, shape.as_slice())?;
                let meta = TensorMeta::new(*wire, shape.as_slice())?;
                if shape.first() != Some(&rows) {
                    return Err(corrupt("the first dimension is not the number of rows")
                        .with("array", meta));
                }
                check_len(data, Some(meta.nbytes()), 1, "data")
            }
            Self::Scalars { dtype, wire, data, nulls } => {
                check_wire(*dtype, *wire)?;
                check_len(data, Some(rows), wire.size(), "data")?;
                check_flags(nulls.as_ref(), rows, "nulls")
            }
            Self::Blobs { runs, data, .. } => {
                runs.check(rows)?;
                check_len(data, Some(runs.total), 1, "data")
            }
            Self::MediaList { items, row_offsets, byte_offsets, nulls, .. } => {
                check_len(row_offsets, rows.checked_add(1), 8, "row_offsets")?;
                check_len(byte_offsets, items.checked_add(1), 8, "byte_offsets")?;
                check_flags(nulls.as_ref(), rows, "nulls")
            }
            Self::TensorDict { nulls, columns } => {
                check_flags(Some(nulls), rows, "nulls")?;
                check_names(columns.iter().map(|column| &column.name))?;
                columns.iter().try_for_each(|column| column.what.check(rows))
            }
            Self::Nested { root } if depth == 0 => root.check(rows, 0),
            Self::Nested { .. } | Self::Meta { .. } if depth > 0 => {
                Err(corrupt("a leaf with a structure of its own"))
            }
            Self::Nested { .. } | Self::Meta { .. } => Ok(()),
        }
    }
}

impl BranchRecord {
    fn visit(&mut self, visit: &mut dyn FnMut(&mut Segment)) {
        match self {
            Self::Dict { missing, present, children } => {
                visit(missing);
                visit(present);
                children.iter_mut().for_each(|child| child.what.visit(visit));
            }
            Self::List { missing, present, lengths, children } => {
                visit(missing);
                visit(present);
                visit(lengths);
                children.iter_mut().for_each(|child| child.visit(visit));
            }
            Self::Leaf { missing, what } => {
                visit(missing);
                what.visit(visit);
            }
        }
    }

    fn check(&self, rows: u64, depth: usize) -> Result<()> {
        if depth > MAX_TREE_DEPTH {
            return Err(corrupt("nested too deeply").with("max_depth", MAX_TREE_DEPTH));
        }
        let flags = |segment| check_flags(Some(segment), rows, "missing or present");
        match self {
            Self::Dict { missing, present, children } => {
                flags(missing)?;
                flags(present)?;
                check_names(children.iter().map(|child| &child.name))?;
                children.iter().try_for_each(|child| child.what.check(rows, depth + 1))
            }
            Self::List { missing, present, lengths, children } => {
                flags(missing)?;
                flags(present)?;
                check_len(lengths, Some(rows), 8, "lengths")?;
                children.iter().try_for_each(|child| child.check(rows, depth + 1))
            }
            Self::Leaf { missing, what } => {
                flags(missing)?;
                what.check(rows, depth + 1)
            }
        }
    }
}

fn check_names<'n>(names: impl Iterator<Item = &'n String>) -> Result<()> {
    let mut seen = std::collections::HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(corrupt("a name occurs twice").with("name", name));
        }
    }
    Ok(())
}
