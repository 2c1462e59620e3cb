//! What a rollout holds, for people and scripts.

use rollout_codec::{
    Column, Rollout,
    native::{Header, RolloutView},
};
use serde::Serialize;
use transport_core::{Error, ErrorKind, Result};

/// One field.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct FieldReport {
    /// Its name.
    pub name: String,
    /// Section that it belongs to.
    pub section: &'static str,
    /// What it is, such as `ragged`.
    pub kind: &'static str,
    /// Element type, if it has one.
    pub dtype: Option<String>,
    /// Element type in the data, if that is a smaller one.
    pub narrowed: Option<String>,
    /// Rows; none for a value that belongs to no row.
    pub rows: Option<u64>,
    /// Bytes of its encoded data.
    pub bytes: u64,
    /// Whether its checksum was compared: true if it matched, false if there is none, none if
    /// nobody looked.
    pub checked: Option<bool>,
}

/// What the header says of each field; with `view`, checksums are compared as well.
pub fn inspect_header(header: &Header, view: Option<&RolloutView>) -> Result<Vec<FieldReport>> {
    let checked = match view {
        None => false,
        Some(view) => {
            let unchecked: Vec<_> =
                header.fields().filter(|f| !f.checksums).map(|f| f.name.to_owned()).collect();
            if unchecked.is_empty() {
                view.verify(2)?;
            }
            true
        }
    };
    let all = header.fields().all(|field| field.checksums);
    let report = |field: rollout_codec::native::FieldInfo<'_>| FieldReport {
        name: field.name.to_owned(),
        section: field.section.name(),
        kind: field.kind,
        dtype: field.dtype.map(|dtype| dtype.name().to_owned()),
        narrowed: field.wire.filter(|w| Some(*w) != field.dtype).map(|w| w.name().to_owned()),
        rows: (field.kind != "meta").then_some(header.rows()),
        bytes: field.bytes,
        checked: checked.then_some(all),
    };
    Ok(header.fields().map(report).collect())
}

/// Of each ragged field of a rollout: its name, the wrapping sum of its rows read as little-endian
/// u64 words, each row padded with zeros to whole words, and its number of elements.
pub fn payload_checksums(rollout: &Rollout<'_>) -> Result<Vec<(String, u64, u64)>> {
    let mut sums = Vec::new();
    for (name, column) in &rollout.non_tensor {
        let Column::Ragged(column) = column else { continue };
        let (mut sum, mut bytes) = (0u64, 0u64);
        for row in (0..column.rows() as usize).filter_map(|row| column.row(row)) {
            bytes += row.len() as u64;
            let (words, rest) = row.as_chunks::<8>();
            sum = words.iter().fold(sum, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)));
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            sum = sum.wrapping_add(u64::from_le_bytes(last));
        }
        let size = column.dtype().size();
        if bytes % size != 0 {
            return Err(Error::new(ErrorKind::Corrupt, "sum rollout", "not whole elements")
                .with("field", name));
        }
        sums.push((name.clone(), sum, bytes / size));
    }
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use rollout_codec::payload::{Payload, Profile};

    use super::*;

    #[test]
    fn sums_are_those_of_the_payload() {
        let payload = Payload::new(Profile::TextTeacher, 3 << 20);
        let sums = payload_checksums(&payload.rollout()).unwrap();
        assert_eq!(sums.len(), payload.fields().len());
        for (field, (name, sum, count)) in payload.fields().iter().zip(sums) {
            assert_eq!((field.name, field.checksum()), (name.as_str(), (sum, count)));
        }
    }
}
