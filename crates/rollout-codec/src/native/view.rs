//! Decoding: views over the data that keep it alive.

use bytes::Bytes;
use indexmap::IndexMap;
use transport_core::{Dtype, Error, ErrorKind, RegionSlice, Result, Tensor, TensorMeta};

use super::{
    Header, gather,
    index::{BranchRecord, Index, RaggedRecord, RowsAre, Runs, Segment, ShapeRecord, What},
    narrow,
    plan::meta_value,
    ragged_view::{RaggedView, ViewShapes, Words, check_offsets, check_runs},
};
use crate::{
    BlobKind, Blobs, Branch, Column, Dense, MediaItem, MediaList, Nested, Pixels, Presence,
    Rollout, RowKind, Scalars, Section, Template, TensorDict, Value, json, msgpack,
};

const OPERATION: &str = "read rollout";

fn corrupt(why: &'static str) -> Error {
    Error::new(ErrorKind::Corrupt, OPERATION, why)
}

/// Bytes of a field are not those that the producer wrote.
pub(super) fn mismatch(field: &str, expected: u64, found: u64) -> Error {
    corrupt("a checksum does not match")
        .with("field", field)
        .with("expected", format_args!("{expected:016x}"))
        .with("found", format_args!("{found:016x}"))
        .remedy("fetch it again; if that does not help, the producer's copy is damaged")
}

/// A rollout in the memory where it arrived.
///
/// Nothing is copied or checked before it is asked for. Everything that it gives out keeps the
/// memory alive.
#[derive(Clone, Debug)]
pub struct RolloutView {
    header: Header,
    /// Runs of the data that are at hand: where each starts, and its bytes.
    parts: Vec<(u64, RegionSlice)>,
}

impl RolloutView {
    /// A view of the whole data.
    pub fn new(header: Header, data: RegionSlice) -> Result<Self> {
        if data.len() as u64 != header.data_bytes() {
            return Err(Error::new(
                ErrorKind::ShortRead,
                OPERATION,
                "the data is not as long as the header says",
            )
            .with("expected_bytes", header.data_bytes())
            .with("found_bytes", data.len()));
        }
        Self::of_parts(header, vec![(0, data)])
    }

    /// A view of some fields only: pairs of where a run of the data starts and its bytes, such as
    /// the ranges that [`Header::field_range`] gives.
    pub fn of_parts(header: Header, parts: Vec<(u64, RegionSlice)>) -> Result<Self> {
        if let Some((_, part)) = parts.iter().find(|(_, part)| !part.kind().is_host()) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                OPERATION,
                "the data is in device memory",
            )
            .with("bytes", part.len())
            .remedy("copy the header's and the offsets' ranges to the host"));
        }
        Ok(Self { header, parts })
    }

    /// What there is.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Checks the checksums of everything that is at hand, on `threads` threads. Fields without
    /// checksums are an error.
    pub fn verify(&self, threads: usize) -> Result<()> {
        let fields = self.header.index.fields.iter();
        let mut work = Vec::new();
        for field in fields {
            let one = Index { fields: vec![field.clone()] };
            for segment in one.segments() {
                let Ok(region) = self.bytes(&segment) else { continue };
                let expected = segment.xxh3.ok_or_else(|| {
                    Error::new(ErrorKind::Unsupported, OPERATION, "there are no checksums")
                        .with("field", &field.name)
                })?;
                work.push((field.name.as_str(), region, expected));
            }
        }
        // Longest first, so that the threads end together.
        work.sort_by_key(|(_, region, _)| std::cmp::Reverse(region.len()));
        let next = std::sync::atomic::AtomicUsize::new(0);
        let check = || loop {
            let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let Some((field, region, expected)) = work.get(i) else { return Ok(()) };
            let found = gather::sum(region.as_ref());
            if found != *expected {
                return Err(mismatch(field, *expected, found));
            }
        };
        let helpers = threads.clamp(1, work.len().max(1)) - 1;
        std::thread::scope(|scope| {
            let handles: Vec<_> = (0..helpers).map(|_| scope.spawn(check)).collect();
            let own = check();
            handles.into_iter().try_for_each(|h| h.join().expect("hashing does not panic"))?;
            own
        })
    }

    /// The rows of a ragged field.
    pub fn ragged(&self, name: &str) -> Result<RaggedView> {
        match &self.header.field(name)?.what {
            What::Ragged(record) => self.ragged_of(record).map_err(|e| e.with("field", name)),
            _ => Err(Error::new(ErrorKind::InvalidInput, OPERATION, "the field is not ragged")
                .with("field", name)
                .remedy("use column, which takes every kind")),
        }
    }

    /// The one array of a dense field, or the numbers of a scalar field without nulls: over the same
    /// memory unless it was narrowed.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for other fields, [`ErrorKind::NotFound`] if there is none of this
    /// name or its data is not at hand.
    pub fn dense(&self, name: &str) -> Result<Tensor> {
        let rows = [self.header.rows()];
        let (dtype, wire, shape, data) = match &self.header.field(name)?.what {
            What::Dense { dtype, wire, shape, data, .. } => (dtype, wire, shape.as_slice(), data),
            What::Scalars { dtype, wire, data, nulls: None } => (dtype, wire, &rows[..], data),
            _ => {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    OPERATION,
                    "the field is not one array",
                )
                .with("field", name)
                .remedy("use column, which takes every kind"));
            }
        };
        Tensor::new(TensorMeta::new(*dtype, shape)?, self.widened(data, *dtype, *wire)?)
    }

    /// One field, of any kind but meta, as a column that shares the data's memory.
    pub fn column(&self, name: &str) -> Result<Column<'static>> {
        self.column_of(&self.header.field(name)?.what).map_err(|e| e.with("field", name))
    }

    /// A value that belongs to no row.
    pub fn meta(&self, name: &str) -> Result<Value> {
        let field = self.header.index.fields.iter();
        let field = field.filter(|field| field.section == Section::Meta).find(|f| f.name == name);
        match field.map(|field| &field.what) {
            Some(What::Meta { value }) => {
                meta_value(self.shared(value)?).map_err(|e| e.with("field", name))
            }
            _ => Err(Error::new(ErrorKind::NotFound, OPERATION, "no such meta value")
                .with("field", format_args!("{name:?}"))),
        }
    }

    /// Everything, as columns that share the data's memory.
    pub fn rollout(&self) -> Result<Rollout<'static>> {
        let mut rollout = Rollout::default();
        for field in &self.header.index.fields {
            let name = field.name.clone();
            let column = || self.column_of(&field.what).map_err(|e| e.with("field", &field.name));
            match field.section {
                Section::Batch => drop(rollout.batch.insert(name, column()?)),
                Section::NonTensor => drop(rollout.non_tensor.insert(name, column()?)),
                Section::Meta => {
                    let value = self.meta(&field.name)?;
                    rollout.meta.insert(name, value);
                }
            }
        }
        rollout.rows()?;
        Ok(rollout)
    }

    fn bytes(&self, segment: &Segment) -> Result<RegionSlice> {
        let slice = |(start, part): &(u64, RegionSlice)| {
            let from = usize::try_from(segment.at.checked_sub(*start)?).ok()?;
            part.slice(from..from.checked_add(usize::try_from(segment.len).ok()?)?)
        };
        self.parts.iter().find_map(slice).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, OPERATION, "a segment was not fetched")
                .with("at", segment.at)
                .with("bytes", segment.len)
        })
    }

    fn shared(&self, segment: &Segment) -> Result<Bytes> {
        Ok(match segment.len {
            0 => Bytes::new(),
            _ => Bytes::from_owner(self.bytes(segment)?),
        })
    }

    fn flags(&self, segment: &Segment) -> Result<Vec<bool>> {
        let bytes = self.shared(segment)?;
        if bytes.iter().any(|&b| b > 1) {
            return Err(corrupt("a flag is neither 0 nor 1"));
        }
        Ok(bytes.iter().map(|&b| b == 1).collect())
    }

    fn flags_or(&self, segment: Option<&Segment>, rows: u64) -> Result<Vec<bool>> {
        match segment {
            Some(segment) => self.flags(segment),
            None => Ok(vec![false; checked_rows(rows)?]),
        }
    }

    /// `wire` numbers as `dtype` numbers: the same memory unless they differ.
    fn widened(&self, segment: &Segment, dtype: Dtype, wire: Dtype) -> Result<RegionSlice> {
        narrow::widened(self.bytes(segment)?, dtype, wire)
    }

    fn ragged_of(&self, record: &RaggedRecord) -> Result<RaggedView> {
        let rows = checked_rows(self.header.rows())?;
        let offsets = Words(self.bytes(&record.runs.offsets)?);
        let alias = match &record.runs.alias {
            Some(alias) => Some(Words(self.bytes(alias)?)),
            None => None,
        };
        check_runs(&record.runs, &offsets, alias.as_ref())?;
        let nulls = match &record.runs.nulls {
            Some(segment) => {
                self.flags(segment)?; // only for the check
                Some(self.bytes(segment)?)
            }
            None => None,
        };
        let view = RaggedView {
            dtype: record.dtype,
            rows,
            shapes: match (&record.shape, &record.shapes) {
                (ShapeRecord::Template { before, after }, _) => {
                    let template = Template {
                        before: before.as_slice().into(),
                        after: after.as_slice().into(),
                    };
                    let step_bytes = template.step_bytes(record.dtype)?;
                    ViewShapes::Template { template, step_bytes }
                }
                (ShapeRecord::Irregular { width }, Some(segment)) => ViewShapes::PerRow {
                    width: *width as usize,
                    words: Words(self.bytes(segment)?),
                },
                _ => unreachable!("checked with the header"),
            },
            kind: match (record.rows_are, &record.arrays) {
                (RowsAre::Numpy, _) => RowKind::Numpy,
                (RowsAre::Torch, _) => RowKind::Torch,
                (RowsAre::List, _) => RowKind::List,
                (RowsAre::Mixed, Some(segment)) => RowKind::Mixed(self.flags(segment)?),
                (RowsAre::Mixed, None) => unreachable!("checked with the header"),
            },
            offsets,
            alias,
            nulls,
            data: self.widened(&record.data, record.dtype, record.wire)?,
        };
        view.check()?;
        Ok(view)
    }

    fn column_of(&self, what: &What) -> Result<Column<'static>> {
        let rows = self.header.rows();
        Ok(match what {
            What::Ragged(record) => Column::Ragged(self.ragged_of(record)?.to_column()?),
            What::Dense { dtype, wire, library, shape, data } => {
                let data = Bytes::from_owner(self.widened(data, *dtype, *wire)?);
                let meta = TensorMeta::new(*dtype, shape.as_slice())?;
                Column::Dense(Dense::new((*library).into(), meta, data)?)
            }
            What::Scalars { dtype, wire, data, nulls } => {
                let data = Bytes::from_owner(self.widened(data, *dtype, *wire)?);
                let nulls = self.flags_or(nulls.as_ref(), rows)?;
                Column::Scalars(Scalars::with_nulls(*dtype, data, nulls)?)
            }
            What::Blobs { holds, runs, pixels, data } => {
                Column::Blobs(self.blobs((*holds).into(), runs, pixels.as_ref(), data)?)
            }
            What::MediaList { items, row_offsets, byte_offsets, nulls, pixels, data } => {
                let (starts, bounds) =
                    (Words(self.bytes(row_offsets)?), Words(self.bytes(byte_offsets)?));
                check_offsets(&starts, *items)?;
                check_offsets(&bounds, data.len)?;
                let nulls = self.flags_or(nulls.as_ref(), rows)?;
                let row =
                    |(i, &null): (usize, &bool)| match (null, starts.get(i + 1) - starts.get(i)) {
                        (true, 0) => Ok(None),
                        (true, _) => Err(corrupt("a null row has items").with("row", i)),
                        (false, count) => Ok(Some(count)),
                    };
                let pixels = self.pixels(pixels.as_ref(), *items)?;
                let bytes = self.shared(data)?;
                let item = |(i, pixels): (usize, Option<Pixels>)| MediaItem {
                    data: bytes.slice(bounds.get(i) as usize..bounds.get(i + 1) as usize).into(),
                    pixels,
                };
                Column::MediaList(MediaList {
                    rows: nulls.iter().enumerate().map(row).collect::<Result<_>>()?,
                    items: pixels.into_iter().enumerate().map(item).collect(),
                })
            }
            What::TensorDict { nulls, columns } => {
                let nulls = self.flags(nulls)?;
                let mut map = IndexMap::new();
                for column in columns {
                    let tensors = self.ragged_of(&column.what).and_then(|view| view.to_column());
                    let tensors = tensors.map_err(|e| e.with("key", &column.name))?;
                    let lonely = |&row: &usize| nulls[row] && tensors.row(row).is_some();
                    if let Some(row) = (0..nulls.len()).find(lonely) {
                        return Err(corrupt("a null row has data").with("row", row));
                    }
                    map.insert(column.name.clone(), tensors);
                }
                Column::TensorDict(TensorDict { columns: map, nulls })
            }
            What::Nested { root } => Column::Nested(Nested { root: self.branch(root)? }),
            What::Meta { .. } => {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    OPERATION,
                    "the field has no rows",
                )
                .remedy("use meta"));
            }
        })
    }

    fn blobs(
        &self,
        kind: BlobKind,
        runs: &Runs,
        pixels: Option<&Segment>,
        data: &Segment,
    ) -> Result<Blobs<'static>> {
        let offsets = Words(self.bytes(&runs.offsets)?);
        let alias = match &runs.alias {
            Some(alias) => Some(Words(self.bytes(alias)?)),
            None => None,
        };
        check_runs(runs, &offsets, alias.as_ref())?;
        let nulls = self.flags_or(runs.nulls.as_ref(), self.header.rows())?;
        let bytes = self.shared(data)?;
        let row = |(i, &null): (usize, &bool)| {
            let run = alias.as_ref().map_or(i, |alias| alias.get(i) as usize);
            let range = offsets.get(run) as usize..offsets.get(run + 1) as usize;
            match null {
                true if range.is_empty() => Ok(None),
                true => Err(corrupt("a null row has data").with("row", i)),
                false => {
                    let row = bytes.slice(range);
                    check_blob(kind, &row).map_err(|e| e.with("row", i))?;
                    Ok(Some(row.into()))
                }
            }
        };
        let pixels = match pixels {
            Some(_) => self.pixels(pixels, self.header.rows())?,
            None => Vec::new(),
        };
        let rows = nulls.iter().enumerate().map(row).collect::<Result<_>>()?;
        Ok(Blobs { kind, rows, pixels })
    }

    fn pixels(&self, segment: Option<&Segment>, count: u64) -> Result<Vec<Option<Pixels>>> {
        let Some(segment) = segment else { return Ok(vec![None; checked_rows(count)?]) };
        let list: Vec<Option<Pixels>> = serde_json::from_slice(&self.shared(segment)?)
            .map_err(|e| corrupt("pixel layouts cannot be read").source(e))?;
        if list.len() as u64 != count {
            return Err(corrupt("not one pixel layout an item").with("found", list.len()));
        }
        Ok(list)
    }

    fn branch(&self, record: &BranchRecord) -> Result<Branch<'static>> {
        let presence = |missing, present| {
            Ok::<_, Error>(Presence {
                missing: self.flags(missing)?,
                present: self.flags(present)?,
            })
        };
        Ok(match record {
            BranchRecord::Dict { missing, present, children } => Branch::Dict {
                presence: presence(missing, present)?,
                children: children
                    .iter()
                    .map(|child| Ok((child.name.clone(), self.branch(&child.what)?)))
                    .collect::<Result<_>>()?,
            },
            BranchRecord::List { missing, present, lengths, children } => {
                let words = Words(self.bytes(lengths)?);
                let lengths: Vec<u64> = (0..words.len()).map(|i| words.get(i)).collect();
                if let Some(row) = lengths.iter().position(|&len| len > children.len() as u64) {
                    return Err(corrupt("a list is longer than its positions").with("row", row));
                }
                Branch::List {
                    presence: presence(missing, present)?,
                    lengths,
                    children: children.iter().map(|c| self.branch(c)).collect::<Result<_>>()?,
                }
            }
            BranchRecord::Leaf { missing, what } => Branch::Leaf {
                missing: self.flags(missing)?,
                column: Box::new(self.column_of(what)?),
            },
        })
    }
}

/// Rows that have segments in memory: their number is no empty promise.
fn checked_rows(rows: u64) -> Result<usize> {
    usize::try_from(rows).map_err(|_| corrupt("too many rows").with("rows", rows))
}

/// Reads every row once, so that a column that was accepted can always be shown.
fn check_blob(kind: BlobKind, bytes: &Bytes) -> Result<()> {
    match kind {
        BlobKind::Utf8 => {
            std::str::from_utf8(bytes).map(drop).map_err(|e| corrupt("text is not UTF-8").source(e))
        }
        BlobKind::Json => json::parse(bytes).map(drop),
        BlobKind::MessagePack => msgpack::parse(bytes).map(drop),
        BlobKind::Bytes | BlobKind::Media => Ok(()),
    }
}
