//! Some rows of some fields.

use std::ops::Range;

use indexmap::IndexMap;
use transport_core::{Dtype, RegionSlice, Result};

use super::{Handle, RolloutTransport, Verify};
use crate::{
    Template,
    native::{self, Locator, ReadRequest},
};

/// Rows of one field, in the order asked for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FieldRows {
    /// Element type, if the field has one: the field's own also where the producer narrowed it.
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
    /// Of a copy only their bytes are read, first those with the offsets and then those of the rows:
    /// neighbours together, at most so many fragments, and one span where that is better
    /// ([`RolloutConfig::reads`](super::RolloutConfig::reads)). Where the transport reads no
    /// [ranges](transport_core::Capabilities::ranges) of them, the data samples that hold them are
    /// read, once.
    ///
    /// Checksums are of whole segments: what is read of one alone cannot be compared, unless
    /// [`Verify::Always`] is set, which reads the fields whole.
    pub async fn get_rows(
        &self,
        handle: &Handle,
        fields: &[&str],
        rows: &[u64],
        steps: Option<&[Range<u64>]>,
    ) -> Result<RowSet> {
        let mut opened = self.0.open(handle).await?;
        let mut ranges = Vec::new();
        for name in fields {
            match self.0.config.verify {
                Verify::Always => ranges.push(opened.header().field_range(name)?),
                _ => ranges.extend(opened.header().index_ranges(name)?),
            }
        }
        opened.read(&ranges).await?;
        let locate = |name: &&str| opened.header().locator(name, |range| opened.cut(&range));
        let locators: Vec<Locator> = fields.iter().map(locate).collect::<Result<_>>()?;
        let ranges = |field| ReadRequest { field, rows, steps }.ranges();
        let places = locators.iter().map(ranges).collect::<Result<Vec<_>>>()?;
        let wanted: Vec<_> = places.iter().flatten().flatten().cloned().collect();
        opened.read(&wanted).await?;
        self.0.counters.got();
        let header = opened.header();
        let infos: IndexMap<&str, _> =
            header.fields().map(|field| (field.name, field.dtype.zip(field.wire))).collect();
        let mut set = RowSet::default();
        for (&name, places) in fields.iter().zip(places) {
            let types = infos[name];
            let row = |place: Option<Range<u64>>| {
                let Some(range) = place else { return Ok(None) };
                let stored = opened.cut(&range)?;
                match types {
                    Some((dtype, wire)) => native::widened(stored, dtype, wire).map(Some),
                    None => Ok(Some(stored)),
                }
            };
            let rows = places.into_iter().map(row).collect::<Result<_>>();
            let rows = rows.map_err(|e| e.with("field", name))?;
            let (dtype, template) = (types.map(|(dtype, _)| dtype), header.template(name));
            set.fields.insert(name.to_owned(), FieldRows { dtype, template, rows });
        }
        Ok(set)
    }
}
