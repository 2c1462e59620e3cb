//! The segments of a rollout: what goes where, and what the index says about it.

use std::collections::HashMap;

use transport_core::{Dtype, Error, Result};

use super::{
    Dedup, align,
    index::{BranchRecord, Named, RaggedRecord, RowsAre, Runs, Segment, ShapeRecord, What},
    narrow::is_narrowing,
    plan::{Planned, refuse, too_large},
};
use crate::{
    Blobs, Branch, Column, Dense, MediaList, Piece, Pixels, Ragged, RowKind, Scalars, TensorDict,
};

/// Adds segments in the order in which [`Index::visit`] meets them.
pub(super) struct Builder<'p> {
    pub(super) segments: Vec<Planned<'p>>,
    pub(super) end: u64,
    pub(super) field: usize,
    pub(super) checksums: bool,
    pub(super) dedup: Dedup,
}

impl<'p> Builder<'p> {
    fn add(
        &mut self,
        sources: impl IntoIterator<Item = Piece<'p>>,
        convert: Conversion,
    ) -> Result<Segment> {
        let at = align(self.end).ok_or_else(too_large)?;
        let mut len = 0u64;
        let mut placed = Vec::new();
        for source in sources {
            let bytes = match (source.len() as u64, convert) {
                (bytes, None) => bytes,
                (bytes, Some((from, to))) => bytes / from.size() * to.size(),
            };
            if bytes > 0 {
                placed.push((len, source));
                len = len.checked_add(bytes).ok_or_else(too_large)?;
            }
        }
        self.end = at.checked_add(len).ok_or_else(too_large)?;
        self.segments.push(Planned { at, len, convert, sources: placed, field: self.field });
        // A sum of zero holds the place, so that the header is as long as it will be.
        Ok(Segment { at, len, xxh3: self.checksums.then_some(0) })
    }

    pub(super) fn made(&mut self, bytes: Vec<u8>) -> Result<Segment> {
        self.add([Piece::from(bytes)], None)
    }

    fn words(&mut self, words: impl IntoIterator<Item = u64>) -> Result<Segment> {
        self.made(words.into_iter().flat_map(u64::to_le_bytes).collect())
    }

    fn flags(&mut self, flags: impl IntoIterator<Item = bool>) -> Result<Segment> {
        self.made(flags.into_iter().map(u8::from).collect())
    }

    /// Flags, unless none is set.
    fn set_flags(&mut self, flags: &[bool]) -> Result<Option<Segment>> {
        match flags.contains(&true) {
            true => self.flags(flags.iter().copied()).map(Some),
            false => Ok(None),
        }
    }

    pub(super) fn column(&mut self, column: &Column<'p>, wire: Option<Dtype>) -> Result<What> {
        let narrowable =
            matches!(column, Column::Ragged(_) | Column::Dense(_) | Column::Scalars(_));
        if let (Some(wire), false) = (wire, narrowable) {
            return Err(refuse("only numbers can be narrowed").with("wire", wire));
        }
        match column {
            Column::Ragged(c) => self.ragged(c, wire).map(What::Ragged),
            Column::Dense(c) => self.dense(c, wire),
            Column::Scalars(c) => self.scalars(c, wire),
            Column::Blobs(c) => self.blobs(c),
            Column::MediaList(c) => self.media_list(c),
            Column::TensorDict(c) => self.tensor_dict(c),
            Column::Nested(c) => Ok(What::Nested { root: Box::new(self.branch(&c.root)?) }),
        }
    }

    fn dense(&mut self, column: &Dense<'p>, wire: Option<Dtype>) -> Result<What> {
        let (dtype, wire, convert) = wire_type(column.meta().dtype(), wire)?;
        Ok(What::Dense {
            dtype,
            wire,
            library: column.library().into(),
            shape: column.meta().shape().to_vec(),
            data: self.add([column.data().clone()], convert)?,
        })
    }

    fn scalars(&mut self, column: &Scalars<'p>, wire: Option<Dtype>) -> Result<What> {
        let (dtype, wire, convert) = wire_type(column.dtype(), wire)?;
        let data = self.add([column.data().clone()], convert)?;
        Ok(What::Scalars { dtype, wire, data, nulls: self.set_flags(column.nulls())? })
    }

    fn ragged(&mut self, column: &Ragged<'p>, wire: Option<Dtype>) -> Result<RaggedRecord> {
        let (dtype, wire, convert) = wire_type(column.dtype(), wire)?;
        let (rows_are, arrays) = match column.kind() {
            RowKind::Numpy => (RowsAre::Numpy, None),
            RowKind::Torch => (RowsAre::Torch, None),
            RowKind::List => (RowsAre::List, None),
            RowKind::Mixed(arrays) => (RowsAre::Mixed, Some(arrays)),
        };
        let element = dtype.size();
        let length = |row: usize| match column.length(row) {
            Some(length) => length,
            None => column.row(row).map_or(0, |bytes| bytes.len() as u64 / element),
        };
        let (runs, stored) = self.runs(column.pieces(), length)?;
        let (shape, shapes) = match column.template() {
            Some(template) => {
                let (before, after) = (template.before.to_vec(), template.after.to_vec());
                (ShapeRecord::Template { before, after }, None)
            }
            None => {
                let shapes: Vec<_> = (0..column.pieces().len())
                    .map(|row| column.shape(row).unwrap_or_default())
                    .collect();
                let width = shapes.iter().map(Vec::len).max().unwrap_or(0);
                let words = shapes.iter().flat_map(|shape| {
                    let pad = width - shape.len();
                    std::iter::once(shape.len() as u64)
                        .chain(shape.iter().copied())
                        .chain(std::iter::repeat_n(0, pad))
                });
                (ShapeRecord::Irregular { width: width as u64 }, Some(self.words(words)?))
            }
        };
        let arrays = match arrays {
            Some(arrays) => Some(self.flags(arrays.iter().copied())?),
            None => None,
        };
        let data = self.add(stored, convert)?;
        Ok(RaggedRecord { dtype, wire, rows_are, shape, runs, shapes, arrays, data })
    }

    /// Offsets, aliases and nulls of rows, and the rows that are stored.
    fn runs(
        &mut self,
        rows: &[Option<Piece<'p>>],
        length: impl Fn(usize) -> u64,
    ) -> Result<(Runs, Vec<Piece<'p>>)> {
        let (first, alias) = unique(rows, self.dedup);
        let mut offsets = Vec::with_capacity(first.len() + 1);
        let mut total = 0u64;
        offsets.push(0);
        for &row in &first {
            total = total.checked_add(length(row)).ok_or_else(too_large)?;
            offsets.push(total);
        }
        let stored = first.len() as u64;
        let offsets = self.words(offsets)?;
        let alias = match alias {
            Some(alias) => Some(self.words(alias)?),
            None => None,
        };
        let nulls: Vec<bool> = rows.iter().map(Option::is_none).collect();
        let nulls = self.set_flags(&nulls)?;
        let sources = first.into_iter().filter_map(|row| rows[row].clone());
        Ok((Runs { stored, total, offsets, alias, nulls }, sources.collect()))
    }

    fn blobs(&mut self, column: &Blobs<'p>) -> Result<What> {
        let len = |row: usize| column.rows[row].as_ref().map_or(0, |bytes| bytes.len() as u64);
        let (runs, stored) = self.runs(&column.rows, len)?;
        let pixels = self.pixels(column.pixels.iter().map(Option::as_ref))?;
        let data = self.add(stored, None)?;
        Ok(What::Blobs { holds: column.kind.into(), runs, pixels, data })
    }

    fn pixels<'x>(
        &mut self,
        pixels: impl Iterator<Item = Option<&'x Pixels>> + Clone,
    ) -> Result<Option<Segment>> {
        if pixels.clone().all(|pixels| pixels.is_none()) {
            return Ok(None);
        }
        let list: Vec<_> = pixels.collect();
        self.made(serde_json::to_vec(&list).expect("plain data")).map(Some)
    }

    fn media_list(&mut self, column: &MediaList<'p>) -> Result<What> {
        let sums = |lengths: &mut dyn Iterator<Item = u64>| {
            let mut total = 0u64;
            let mut sums = vec![0];
            for len in lengths {
                total = total.checked_add(len).ok_or_else(too_large)?;
                sums.push(total);
            }
            Ok::<_, Error>(sums)
        };
        let items = column.items.len() as u64;
        let rows = sums(&mut column.rows.iter().map(|row| row.unwrap_or(0)))?;
        if rows.last() != Some(&items) {
            return Err(refuse("rows do not count as many items as there are"));
        }
        let row_offsets = self.words(rows)?;
        let bytes = sums(&mut column.items.iter().map(|item| item.data.len() as u64))?;
        let byte_offsets = self.words(bytes)?;
        let nulls: Vec<bool> = column.rows.iter().map(Option::is_none).collect();
        let nulls = self.set_flags(&nulls)?;
        let pixels = self.pixels(column.items.iter().map(|item| item.pixels.as_ref()))?;
        let data = self.add(column.items.iter().map(|item| item.data.clone()), None)?;
        Ok(What::MediaList { items, row_offsets, byte_offsets, nulls, pixels, data })
    }

    fn tensor_dict(&mut self, column: &TensorDict<'p>) -> Result<What> {
        let rows = column.nulls.len() as u64;
        let nulls = self.flags(column.nulls.iter().copied())?;
        let mut columns = Vec::new();
        for (name, tensors) in &column.columns {
            if tensors.rows() != rows {
                return Err(refuse("a name has another number of rows").with("key", name));
            }
            let what = self.ragged(tensors, None).map_err(|e| e.with("key", name))?;
            columns.push(Named { name: name.clone(), what });
        }
        Ok(What::TensorDict { nulls, columns })
    }

    fn branch(&mut self, branch: &Branch<'p>) -> Result<BranchRecord> {
        Ok(match branch {
            Branch::Dict { presence, children } => {
                let missing = self.flags(presence.missing.iter().copied())?;
                let present = self.flags(presence.present.iter().copied())?;
                let children = children
                    .iter()
                    .map(|(name, child)| {
                        Ok(Named { name: name.clone(), what: self.branch(child)? })
                    })
                    .collect::<Result<_>>()?;
                BranchRecord::Dict { missing, present, children }
            }
            Branch::List { presence, lengths, children } => {
                let missing = self.flags(presence.missing.iter().copied())?;
                let present = self.flags(presence.present.iter().copied())?;
                let lengths = self.words(lengths.iter().copied())?;
                let children =
                    children.iter().map(|child| self.branch(child)).collect::<Result<_>>()?;
                BranchRecord::List { missing, present, lengths, children }
            }
            Branch::Leaf { missing, column } => {
                let missing = self.flags(missing.iter().copied())?;
                BranchRecord::Leaf { missing, what: self.column(column, None)? }
            }
        })
    }
}

/// Element types of sources and of the data, where they differ.
pub(super) type Conversion = Option<(Dtype, Dtype)>;

/// The element types of the field and of the data, and both if they differ.
fn wire_type(dtype: Dtype, wire: Option<Dtype>) -> Result<(Dtype, Dtype, Conversion)> {
    match wire {
        None => Ok((dtype, dtype, None)),
        Some(wire) if wire == dtype => Ok((dtype, dtype, None)),
        Some(wire) if is_narrowing(dtype, wire) => Ok((dtype, wire, Some((dtype, wire)))),
        Some(wire) => Err(refuse("no narrower form of the element type")
            .with("dtype", dtype)
            .with("wire", wire)
            .remedy("narrow whole numbers to smaller whole numbers only")),
    }
}

/// The first row of each stored run, and each row's run if any two share one.
fn unique(rows: &[Option<Piece<'_>>], dedup: Dedup) -> (Vec<usize>, Option<Vec<u64>>) {
    let all = || ((0..rows.len()).collect(), None);
    match dedup {
        Dedup::None => return all(),
        Dedup::SameMemory => {
            // Producers mostly give every row memory of its own, in rising order: nothing to find.
            let mut last = 0;
            let rising = rows.iter().flatten().filter(|row| !row.is_empty()).all(|row| {
                let start = row.as_ptr() as usize;
                let rises = start >= last;
                last = start + row.len();
                rises
            });
            if rising {
                return all();
            }
        }
        Dedup::SameBytes => {}
    }
    let mut first = Vec::new();
    let mut alias = Vec::with_capacity(rows.len());
    let mut by_memory: HashMap<(usize, usize), u64> = HashMap::new();
    let mut by_bytes: HashMap<&[u8], u64> = HashMap::new();
    for (i, row) in rows.iter().enumerate() {
        let new = first.len() as u64;
        let run = match row.as_deref() {
            Some(bytes) if !bytes.is_empty() => match dedup {
                Dedup::SameBytes => *by_bytes.entry(bytes).or_insert(new),
                _ => *by_memory.entry((bytes.as_ptr() as usize, bytes.len())).or_insert(new),
            },
            _ => new,
        };
        if run == new {
            first.push(i);
        }
        alias.push(run);
    }
    if first.len() == rows.len() { all() } else { (first, Some(alias)) }
}
