//! Reading some rows, or parts of rows, out of data that lies elsewhere.

use std::ops::Range;

use transport_core::{Error, ErrorKind, RegionSlice, Result};

use super::{
    Header,
    index::{Runs, Segment, ShapeRecord, What},
    ragged_view::{Words, check_runs, sub_range},
};

const OPERATION: &str = "plan reads";

fn invalid(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidInput, OPERATION, why)
}

/// Knows where each row of one field lies in the data.
#[derive(Clone, Debug)]
pub struct Locator {
    name: String,
    rows: u64,
    data_at: u64,
    places: Places,
}

#[derive(Clone, Debug)]
enum Places {
    /// Rows of the same length, some perhaps null.
    Even { row_bytes: u64, first_dim: Option<u64>, nulls: Option<RegionSlice> },
    Runs {
        /// Bytes of one unit of the offsets.
        step_bytes: u64,
        offsets: Words,
        alias: Option<Words>,
        nulls: Option<RegionSlice>,
        first_dim: FirstDim,
    },
}

/// Length of a row's first dimension.
#[derive(Clone, Copy, Debug)]
enum FirstDim {
    Ragged,
    Fixed(u64),
    Unknown,
}

impl Header {
    /// Finds out where the rows of the field `name` lie. `fetch` is called for the ranges of the
    /// data that hold its offsets, aliases and nulls; they are checked.
    ///
    /// Arrays, scalars, ragged columns and blobs can be read by row; dicts, media lists and nested
    /// columns only whole, by [`Self::field_range`].
    pub fn locator(
        &self,
        name: &str,
        mut fetch: impl FnMut(Range<u64>) -> Result<RegionSlice>,
    ) -> Result<Locator> {
        let mut get = |segment: &Segment| -> Result<RegionSlice> {
            let region = fetch(segment.at..segment.end())?;
            if region.len() as u64 != segment.len || !region.kind().is_host() {
                return Err(Error::new(
                    ErrorKind::ShortRead,
                    OPERATION,
                    "not the host memory that was asked for",
                )
                .with("expected_bytes", segment.len)
                .with("found_bytes", region.len()));
            }
            Ok(region)
        };
        let mut of_runs = |runs: &Runs, step_bytes, first_dim| -> Result<Places> {
            let offsets = Words(get(&runs.offsets)?);
            let alias = runs.alias.as_ref().map(&mut get).transpose()?.map(Words);
            let nulls = runs.nulls.as_ref().map(&mut get).transpose()?;
            check_runs(runs, &offsets, alias.as_ref())?;
            Ok(Places::Runs { step_bytes, offsets, alias, nulls, first_dim })
        };
        let (data, places) = match &self.field(name)?.what {
            What::Ragged(record) => {
                let first = match &record.shape {
                    ShapeRecord::Template { before, .. } => {
                        before.first().map_or(FirstDim::Ragged, |&dim| FirstDim::Fixed(dim))
                    }
                    ShapeRecord::Irregular { .. } => FirstDim::Unknown,
                };
                (&record.data, of_runs(&record.runs, record.step_bytes()?, first)?)
            }
            What::Blobs { runs, data, .. } => (data, of_runs(runs, 1, FirstDim::Ragged)?),
            What::Dense { wire, shape, data, .. } => {
                let row = transport_core::TensorMeta::new(*wire, &shape[1..])?;
                let first_dim = shape.get(1).copied();
                (data, Places::Even { row_bytes: row.nbytes(), first_dim, nulls: None })
            }
            What::Scalars { wire, data, nulls, .. } => {
                let nulls = nulls.as_ref().map(get).transpose()?;
                (data, Places::Even { row_bytes: wire.size(), first_dim: None, nulls })
            }
            _ => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    OPERATION,
                    "fields of this kind are read whole",
                )
                .with("field", name)
                .remedy("read the range that field_range gives"));
            }
        };
        Ok(Locator { name: name.to_owned(), rows: self.rows(), data_at: data.at, places })
    }
}

impl Locator {
    /// Where row `row` lies in the data; `None` for a null row.
    pub fn row(&self, row: u64) -> Result<Option<Range<u64>>> {
        if row >= self.rows {
            return Err(invalid("no such row")
                .with("field", &self.name)
                .with("row", row)
                .with("rows", self.rows));
        }
        // Below the number of rows, which have offsets or nulls in memory.
        let is_null = |nulls: &Option<RegionSlice>| {
            nulls.as_ref().is_some_and(|nulls| nulls.as_ref()[row as usize] == 1)
        };
        Ok(match &self.places {
            Places::Even { nulls, .. } | Places::Runs { nulls, .. } if is_null(nulls) => None,
            Places::Even { row_bytes, .. } => {
                let start = self.data_at + row * row_bytes;
                Some(start..start + row_bytes)
            }
            Places::Runs { step_bytes, offsets, alias, .. } => {
                let i = row as usize;
                let run = alias.as_ref().map_or(i, |alias| alias.get(i) as usize);
                let at = |i| self.data_at + offsets.get(i) * step_bytes;
                Some(at(run)..at(run + 1))
            }
        })
    }

    /// Where entries `steps` of row `row`, along its first dimension, lie in the data.
    pub fn sub_row(&self, row: u64, steps: &Range<u64>) -> Result<Option<Range<u64>>> {
        let Some(whole) = self.row(row)? else { return Ok(None) };
        let bytes = whole.end - whole.start;
        let count = match &self.places {
            Places::Even { first_dim, .. } => *first_dim,
            Places::Runs { first_dim: FirstDim::Fixed(dim), .. } => Some(*dim),
            Places::Runs { first_dim: FirstDim::Unknown, .. } => None,
            Places::Runs { offsets, alias, .. } => {
                let run = alias.as_ref().map_or(row as usize, |a| a.get(row as usize) as usize);
                Some(offsets.get(run + 1) - offsets.get(run))
            }
        };
        let count = count.ok_or_else(|| {
            invalid("rows of this field have no first dimension to cut").with("field", &self.name)
        })?;
        let (from, to) = sub_range(bytes, count, steps).ok_or_else(|| {
            invalid("the row is shorter")
                .with("field", &self.name)
                .with("row", row)
                .with("entries", count)
                .with("asked", format_args!("{steps:?}"))
        })?;
        Ok(Some(whole.start + from..whole.start + to))
    }
}

/// Rows of one field.
#[derive(Clone, Copy, Debug)]
pub struct ReadRequest<'r> {
    /// The field.
    pub field: &'r Locator,
    /// The rows, in any order; a row may occur more than once.
    pub rows: &'r [u64],
    /// Entries of each row along its first dimension, one range a row; whole rows if `None`.
    pub steps: Option<&'r [Range<u64>]>,
}

impl ReadRequest<'_> {
    /// Where the rows, or the parts of them, lie in the data; `None` for a null row.
    pub(crate) fn ranges(&self) -> Result<Vec<Option<Range<u64>>>> {
        if self.steps.is_some_and(|steps| steps.len() != self.rows.len()) {
            return Err(invalid("not one range of entries a row")
                .with("field", &self.field.name)
                .with("rows", self.rows.len())
                .with("ranges", self.steps.map_or(0, <[_]>::len)));
        }
        let range = |(i, &row): (usize, &u64)| match self.steps {
            Some(steps) => self.field.sub_row(row, &steps[i]),
            None => self.field.row(row),
        };
        self.rows.iter().enumerate().map(range).collect()
    }
}

/// How reads are joined.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadLimits {
    /// Pieces that are at most this many bytes apart are read together.
    pub merge_gap: u64,
    /// Most fragments; the closest ones are joined until there are no more.
    pub max_fragments: usize,
    /// One bulk read is better when fragments make up at least this part of their span.
    pub bulk_part: f64,
}

impl Default for ReadLimits {
    /// Gaps of 4 KiB, 4,096 fragments (what Mooncake takes in one call), half of the span.
    fn default() -> Self {
        Self { merge_gap: 4 << 10, max_fragments: 4096, bulk_part: 0.5 }
    }
}

/// One read: `len` bytes at `remote` in the data go to `local` in the reader's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Start in the data.
    pub remote: u64,
    /// Length.
    pub len: u64,
    /// Start in the reader's buffer.
    pub local: u64,
}

/// What to read, and where each row will be.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadPlan {
    fragments: Vec<Fragment>,
    places: Vec<Vec<Option<Range<u64>>>>,
    wanted_bytes: u64,
    bulk: Option<Fragment>,
}

/// Plans the reads for some rows of some fields.
pub fn read_plan(requests: &[ReadRequest<'_>], limits: ReadLimits) -> Result<ReadPlan> {
    let remote = requests.iter().map(ReadRequest::ranges).collect::<Result<Vec<_>>>()?;
    let Joined { fragments, wanted_bytes, bulk } =
        join(remote.iter().flatten().flatten().cloned(), limits);
    let place = |range: &Range<u64>| {
        let after = fragments.partition_point(|fragment| fragment.remote <= range.start);
        match after.checked_sub(1).map(|i| &fragments[i]) {
            Some(f) if !range.is_empty() => {
                let start = f.local + (range.start - f.remote);
                start..start + (range.end - range.start)
            }
            _ => 0..0,
        }
    };
    let places = remote
        .iter()
        .map(|rows| rows.iter().map(|row| row.as_ref().map(place)).collect())
        .collect();
    Ok(ReadPlan { fragments, places, wanted_bytes, bulk })
}

/// Reads that cover some ranges of the data.
pub(crate) struct Joined {
    pub(crate) fragments: Vec<Fragment>,
    pub(crate) wanted_bytes: u64,
    pub(crate) bulk: Option<Fragment>,
}

/// Merges neighbours, and those that are closest until there are few enough.
pub(crate) fn join(ranges: impl IntoIterator<Item = Range<u64>>, limits: ReadLimits) -> Joined {
    let mut wanted: Vec<_> = ranges.into_iter().filter(|range| !range.is_empty()).collect();
    wanted.sort_unstable_by_key(|range| (range.start, range.end));
    let mut joined: Vec<Range<u64>> = Vec::new();
    let mut wanted_bytes = 0;
    let mut seen = 0; // end of what was counted
    for range in wanted {
        wanted_bytes += range.end.saturating_sub(range.start.max(seen));
        seen = seen.max(range.end);
        match joined.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(limits.merge_gap) => {
                last.end = last.end.max(range.end);
            }
            _ => joined.push(range),
        }
    }
    join_closest(&mut joined, limits.max_fragments.max(1));
    let mut local = 0;
    let fragments: Vec<_> = joined
        .iter()
        .map(|range| {
            let fragment = Fragment { remote: range.start, len: range.end - range.start, local };
            local += fragment.len;
            fragment
        })
        .collect();
    let bulk = match (fragments.first(), fragments.last()) {
        (Some(first), Some(last)) if fragments.len() > 1 => {
            let span = last.remote + last.len - first.remote;
            (local as f64 >= span as f64 * limits.bulk_part).then_some(Fragment {
                remote: first.remote,
                len: span,
                local: 0,
            })
        }
        _ => None,
    };
    Joined { fragments, wanted_bytes, bulk }
}

/// Joins neighbours across the smallest gaps until there are at most `max` ranges.
fn join_closest(ranges: &mut Vec<Range<u64>>, max: usize) {
    let Some(excess) = ranges.len().checked_sub(max).filter(|&n| n > 0) else { return };
    let mut gaps: Vec<(u64, usize)> =
        ranges.windows(2).enumerate().map(|(i, w)| (w[1].start - w[0].end, i + 1)).collect();
    gaps.sort_unstable();
    let mut close: Vec<usize> = gaps.into_iter().take(excess).map(|(_, i)| i).collect();
    close.sort_unstable();
    let mut close = close.into_iter().peekable();
    let mut out: Vec<Range<u64>> = Vec::with_capacity(max);
    for (i, range) in ranges.drain(..).enumerate() {
        match out.last_mut() {
            Some(last) if close.next_if_eq(&i).is_some() => last.end = range.end,
            _ => out.push(range),
        }
    }
    *ranges = out;
}

impl ReadPlan {
    /// The reads, in the order of the data.
    pub fn fragments(&self) -> &[Fragment] {
        &self.fragments
    }

    /// Length of the buffer that the reads fill.
    pub fn local_bytes(&self) -> u64 {
        self.fragments.last().map_or(0, |last| last.local + last.len)
    }

    /// Bytes that were asked for; the rest of [`Self::local_bytes`] are gaps.
    pub fn wanted_bytes(&self) -> u64 {
        self.wanted_bytes
    }

    /// One read of everything between the first and the last fragment, where that is better than
    /// many: the fragments are close together. Rows are then where [`Self::bulk_place`] says.
    pub fn bulk(&self) -> Option<Fragment> {
        self.bulk
    }

    /// Where the row at position `i` of request `request` is in the buffer; `None` for a null row.
    ///
    /// # Panics
    /// If there is no such request or position.
    pub fn place(&self, request: usize, i: usize) -> Option<Range<u64>> {
        self.places[request][i].clone()
    }

    /// [`Self::place`] in the buffer of the [`Self::bulk`] read.
    ///
    /// # Panics
    /// If there is no such request or position.
    pub fn bulk_place(&self, request: usize, i: usize) -> Option<Range<u64>> {
        let local = self.place(request, i)?;
        if local.is_empty() {
            return Some(0..0);
        }
        let after = self.fragments.partition_point(|f| f.local <= local.start);
        let fragment = &self.fragments[after - 1];
        let start = fragment.remote + (local.start - fragment.local) - self.fragments[0].remote;
        Some(start..start + (local.end - local.start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closest_neighbours_are_joined() {
        let mut ranges = vec![0..1, 10..11, 12..13, 100..101, 103..104];
        join_closest(&mut ranges, 3);
        assert_eq!(ranges, [0..1, 10..13, 100..104]);
        join_closest(&mut ranges, 1);
        assert_eq!(ranges.first(), Some(&(0..104)));
        join_closest(&mut ranges, 1);
        assert_eq!(ranges.len(), 1);
    }
}
