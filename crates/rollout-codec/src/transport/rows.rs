//! Some rows of some fields.

use indexmap::IndexMap;
use std::ops::Range;
use transport_core::{Dtype, Error, ErrorKind, RegionSlice, Result};

use super::{Handle, RolloutTransport, get::Runs};
use crate::{
    Template,
    native::{Header, Locator},
};

/// Rows of one field, in the order asked for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FieldRows {
    /// Element type, if the field has one. Fields that the producer narrowed are read whole.
    pub dtype: Option<Dtype>,
    /// Common shape of the rows of a ragged field.
    pub template: Option<Template>,
    /// Row-major little-endian bytes; `None` for a null row.
    pub rows: Vec<Option<RegionSlice>>,
}

/// Rows of several fields. Every slice keeps the rollout's lease.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct RowSet {
    /// The fields, in the order asked for.
    pub fields: IndexMap<String, FieldRows>,
}

impl RolloutTransport {
    /// Reads rows, in any order and number, of some fields; of each row only the entries in `steps`
    /// along its first dimension, if that is given, one range a row.
    ///
    /// Of a copy only the data samples that hold them are read: first those with the offsets, then
    /// those with the rows.
    pub async fn get_rows(
        &self,
        handle: &Handle,
        fields: &[&str],
        rows: &[u64],
        steps: Option<&[Range<u64>]>,
    ) -> Result<RowSet> {
        if steps.is_some_and(|steps| steps.len() != rows.len()) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "get rows",
                "not one range of entries a row",
            )
            .with("rows", rows.len())
            .with("ranges", steps.map_or(0, <[_]>::len)));
        }
        let mut about = Vec::new(); // of each field: where its offsets are
        let offsets = |header: &Header| {
            for field in header.fields().filter(|field| field.wire != field.dtype) {
                if fields.contains(&field.name) {
                    return Err(Error::new(
                        ErrorKind::Unsupported,
                        "get rows",
                        "the producer narrowed the field",
                    )
                    .with("field", field.name)
                    .remedy("read it whole with get_fields, which widens it"));
                }
            }
            let mut ranges = Vec::new();
            for name in fields {
                let own = header.index_ranges(name)?;
                ranges.extend(own.iter().cloned());
                about.push(own);
            }
            Ok(ranges)
        };
        let (header, index) = self.0.ranges(handle, offsets).await?;
        let locators: Vec<Locator> = fields
            .iter()
            .map(|name| header.locator(name, |range| cut(&index, &range)))
            .collect::<Result<_>>()?;
        let place = |locator: &Locator, (i, &row): (usize, &u64)| match steps {
            Some(steps) => locator.sub_row(row, &steps[i]),
            None => locator.row(row),
        };
        let places: Vec<Vec<Option<Range<u64>>>> = locators
            .iter()
            .map(|locator| rows.iter().enumerate().map(|row| place(locator, row)).collect())
            .collect::<Result<_>>()?;
        // What came with the offsets is at hand.
        let wanted: Vec<_> = places
            .iter()
            .flatten()
            .flatten()
            .filter(|range| cut(&index, range).is_err())
            .cloned()
            .collect();
        let mut data = index;
        if !wanted.is_empty() {
            data.extend(self.0.ranges(handle, |_| Ok(wanted)).await?.1);
        }
        self.0.counters.got();
        let infos: IndexMap<&str, Option<Dtype>> =
            header.fields().map(|field| (field.name, field.dtype)).collect();
        let mut set = RowSet::default();
        for (&name, places) in fields.iter().zip(places) {
            let rows = places
                .into_iter()
                .map(|place| place.map(|range| cut(&data, &range)).transpose())
                .collect::<Result<_>>()?;
            let (dtype, template) = (infos[name], header.template(name));
            set.fields.insert(name.to_owned(), FieldRows { dtype, template, rows });
        }
        Ok(set)
    }
}

/// The bytes of the data in `range`.
fn cut(runs: &Runs, range: &Range<u64>) -> Result<RegionSlice> {
    if range.is_empty() {
        return Ok(RegionSlice::copy_of(&[]));
    }
    let slice = |(start, run): &(u64, RegionSlice)| {
        let from = usize::try_from(range.start.checked_sub(*start)?).ok()?;
        run.slice(from..from.checked_add(usize::try_from(range.end - range.start).ok()?)?)
    };
    runs.iter().find_map(slice).ok_or_else(|| {
        Error::new(ErrorKind::NotFound, "get rows", "the bytes were not read")
            .with("range", format_args!("{range:?}"))
    })
}
