//! The rows of a ragged field, as views.

use std::ops::Range;

use bytes::Bytes;
use transport_core::{Dtype, Error, ErrorKind, RegionSlice, Result, Tensor, TensorMeta};

use super::index::Runs;
use crate::{Element, Ragged, RowKind, Template};

fn corrupt(why: &'static str) -> Error {
    Error::new(ErrorKind::Corrupt, "read rollout", why)
}

/// u64 numbers in the data, wherever they lie.
#[derive(Clone, Debug)]
pub(super) struct Words(pub(super) RegionSlice);

impl Words {
    pub(super) fn len(&self) -> usize {
        self.0.len() / 8
    }

    pub(super) fn get(&self, i: usize) -> u64 {
        let bytes = &self.0.as_ref()[8 * i..8 * i + 8];
        u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
    }
}

/// Offsets from 0, never down, up to exactly `end`.
pub(super) fn check_offsets(offsets: &Words, end: u64) -> Result<()> {
    let numbers = offsets.0.as_ref().chunks_exact(8);
    let mut last = 0;
    for (i, number) in numbers.enumerate() {
        let number = u64::from_le_bytes(number.try_into().expect("eight bytes"));
        if number < last || (i == 0 && number != 0) {
            return Err(corrupt("offsets do not start at 0 or go down").with("position", i));
        }
        last = number;
    }
    if last != end {
        return Err(corrupt("offsets do not end where the data ends")
            .with("expected", end)
            .with("found", last));
    }
    Ok(())
}

pub(super) fn check_runs(runs: &Runs, offsets: &Words, alias: Option<&Words>) -> Result<()> {
    check_offsets(offsets, runs.total)?;
    let beyond = |alias: &Words| (0..alias.len()).find(|&row| alias.get(row) >= runs.stored);
    match alias.and_then(beyond) {
        Some(row) => Err(corrupt("a row points at a run that is not stored").with("row", row)),
        None => Ok(()),
    }
}

#[derive(Clone, Debug)]
pub(super) enum ViewShapes {
    Template { template: Template, step_bytes: u64 },
    PerRow { width: usize, words: Words },
}

/// The rows of a ragged field, in the memory where they arrived.
///
/// A field that was narrowed is widened once, into memory of its own.
#[derive(Clone, Debug)]
pub struct RaggedView {
    pub(super) dtype: Dtype,
    pub(super) rows: usize,
    pub(super) kind: RowKind,
    pub(super) shapes: ViewShapes,
    pub(super) offsets: Words,
    pub(super) alias: Option<Words>,
    pub(super) nulls: Option<RegionSlice>,
    pub(super) data: RegionSlice,
}

/// One row.
#[derive(Clone, Copy, Debug)]
pub struct RowRef<'v> {
    dtype: Dtype,
    bytes: &'v [u8],
}

impl<'v> RowRef<'v> {
    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Row-major little-endian elements.
    pub fn bytes(&self) -> &'v [u8] {
        self.bytes
    }

    /// The elements; `None` if they are of another type, or lie where this type cannot be read.
    /// Data that starts at a multiple of [`super::ALIGNMENT`] lies right for every type.
    pub fn elements<T: Element>(&self) -> Option<&'v [T]> {
        (T::DTYPE == self.dtype).then(|| bytemuck::try_cast_slice(self.bytes).ok()).flatten()
    }
}

impl RaggedView {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// What Python object a row is.
    pub fn kind(&self) -> &RowKind {
        &self.kind
    }

    /// Common shape of the rows; `None` if every row has its own.
    pub fn template(&self) -> Option<&Template> {
        match &self.shapes {
            ViewShapes::Template { template, .. } => Some(template),
            ViewShapes::PerRow { .. } => None,
        }
    }

    /// Row `i`; `None` for a null row or one that does not exist.
    pub fn row(&self, i: usize) -> Option<RowRef<'_>> {
        let bytes = self.data.as_ref().get(self.range(i)?)?;
        Some(RowRef { dtype: self.dtype, bytes })
    }

    /// Row `i` as counted memory, which outlives this view.
    pub fn row_region(&self, i: usize) -> Option<RegionSlice> {
        self.data.slice(self.range(i)?)
    }

    /// Row `i` as a tensor over the same memory, which outlives this view; `None` for a null row or
    /// one that does not exist. [`Self::row_dlpack`] gives it to a framework.
    pub fn row_tensor(&self, i: usize) -> Option<Tensor> {
        let meta = TensorMeta::new(self.dtype, self.shape(i)?).ok()?;
        Tensor::new(meta, self.row_region(i)?).ok()
    }

    /// Entries `steps` of row `i` along its first dimension; `None` for a null row, one that does
    /// not exist, or one that is shorter.
    pub fn sub_row(&self, i: usize, steps: Range<u64>) -> Option<RowRef<'_>> {
        let row = self.range(i)?;
        let first = *self.shape(i)?.first()?;
        let (from, to) = sub_range(row.len() as u64, first, &steps)?;
        let bytes = self.data.as_ref().get(row.start + from as usize..row.start + to as usize)?;
        Some(RowRef { dtype: self.dtype, bytes })
    }

    /// All rows, in order.
    pub fn iter(&self) -> impl Iterator<Item = Option<RowRef<'_>>> {
        (0..self.rows).map(|i| self.row(i))
    }

    /// Shape of row `i`; `None` for a null row or one that does not exist.
    pub fn shape(&self, i: usize) -> Option<Vec<u64>> {
        if self.is_null(i) || i >= self.rows {
            return None;
        }
        Some(match &self.shapes {
            ViewShapes::Template { template, .. } => {
                let run = self.run(i);
                template.shape(self.offsets.get(run + 1) - self.offsets.get(run))
            }
            ViewShapes::PerRow { width, words } => {
                let at = i * (width + 1);
                (1..=words.get(at) as usize).map(|d| words.get(at + d)).collect()
            }
        })
    }

    /// The rows as a column that shares this view's memory.
    pub fn to_column(&self) -> Result<Ragged<'static>> {
        let bytes = Bytes::from_owner(self.data.clone());
        let mut column = match &self.shapes {
            ViewShapes::Template { template, .. } => {
                Ragged::new(self.dtype, self.kind.clone(), template.clone())?
            }
            ViewShapes::PerRow { .. } => Ragged::irregular(self.dtype, self.kind.clone()),
        };
        let flat = matches!(&self.shapes, ViewShapes::Template { step_bytes: 1.., .. });
        for i in 0..self.rows {
            match self.range(i) {
                None => column.push_null(),
                Some(range) if flat => column.push(bytes.slice(range))?,
                Some(range) => {
                    let shape = self.shape(i).expect("not null");
                    column.push_shaped(&shape, bytes.slice(range))?;
                }
            }
        }
        Ok(column)
    }

    fn is_null(&self, i: usize) -> bool {
        self.nulls.as_ref().is_some_and(|nulls| nulls.as_ref().get(i) == Some(&1))
    }

    fn run(&self, i: usize) -> usize {
        self.alias.as_ref().map_or(i, |alias| alias.get(i) as usize)
    }

    fn range(&self, i: usize) -> Option<Range<usize>> {
        if i >= self.rows || self.is_null(i) {
            return None;
        }
        let run = self.run(i);
        let step = match &self.shapes {
            ViewShapes::Template { step_bytes, .. } => *step_bytes,
            ViewShapes::PerRow { .. } => self.dtype.size(),
        };
        // The last offset times the step is the length of the data: no product overflows.
        let at = |offset: u64| (offset * step) as usize;
        Some(at(self.offsets.get(run))..at(self.offsets.get(run + 1)))
    }

    /// What offsets, nulls and shapes say must fit together.
    pub(super) fn check(&self) -> Result<()> {
        if self.nulls.is_some() {
            for i in (0..self.rows).filter(|&i| self.is_null(i)) {
                let run = self.run(i);
                if self.offsets.get(run) != self.offsets.get(run + 1) {
                    return Err(corrupt("a null row has data").with("row", i));
                }
            }
        }
        let ViewShapes::PerRow { width, words } = &self.shapes else { return Ok(()) };
        for i in (0..self.rows).filter(|&i| !self.is_null(i)) {
            if words.get(i * (width + 1)) > *width as u64 {
                return Err(corrupt("a row has more dimensions than there are").with("row", i));
            }
            let shape = self.shape(i).expect("not null");
            let meta = TensorMeta::new(self.dtype, shape).map_err(|e| e.with("row", i))?;
            let bytes = self.range(i).expect("not null").len() as u64;
            if meta.nbytes() != bytes {
                return Err(corrupt("a row does not match its shape")
                    .with("row", i)
                    .with("shape", meta)
                    .with("bytes", bytes));
            }
        }
        Ok(())
    }
}

/// Bytes of entries `steps` among `count` entries that together have `bytes` bytes.
pub(super) fn sub_range(bytes: u64, count: u64, steps: &Range<u64>) -> Option<(u64, u64)> {
    if steps.start > steps.end || steps.end > count {
        return None;
    }
    let step = bytes.checked_div(count).unwrap_or(0);
    Some((steps.start * step, steps.end * step))
}
