//! Checksums of data that arrives in parts, made while the next part is on its way.

use std::ops::Range;

use transport_core::{Error, ErrorKind, Result};

use super::{
    BLOCK_BYTES, Header,
    gather::{self, BlockSum, Extent},
    index::{Index, Segment},
    view::mismatch,
};

/// The segments of a rollout, in the order of the data, and the checksums that they should have.
#[derive(Clone, Debug)]
pub(crate) struct Arriving {
    fields: Vec<String>,
    /// Each segment, and which field it belongs to.
    segments: Vec<(Segment, usize)>,
    data_bytes: u64,
}

/// Checksums of what lay in one part.
#[derive(Debug, Default)]
pub(crate) struct Arrived(Vec<BlockSum>);

impl Arriving {
    pub(crate) fn new(header: &Header) -> Self {
        let mut segments = Vec::new();
        for (i, field) in header.index.fields.iter().enumerate() {
            let one = Index { fields: vec![field.clone()] };
            segments.extend(one.segments().into_iter().map(|segment| (segment, i)));
        }
        let fields = header.index.fields.iter().map(|field| field.name.clone()).collect();
        Self { fields, segments, data_bytes: header.data_bytes() }
    }

    /// Cuts the data into parts of about `bytes`, so that no block lies in two.
    pub(crate) fn parts(&self, bytes: u64) -> Vec<Range<u64>> {
        gather::parts(&self.segments, self.data_bytes, bytes)
    }

    /// The checksums of the blocks that lie in `part` of the data, which is `data`.
    pub(crate) fn sums(&self, part: &Range<u64>, data: &[u8]) -> Arrived {
        let mut sums = Vec::new();
        let first = self.segments.partition_point(|(segment, _)| segment.end() <= part.start);
        for (i, (segment, _)) in self.segments.iter().enumerate().skip(first) {
            if segment.at >= part.end {
                break;
            }
            let skipped = part.start.saturating_sub(segment.at).div_ceil(BLOCK_BYTES);
            for start in (skipped * BLOCK_BYTES..segment.len).step_by(BLOCK_BYTES as usize) {
                let end = segment.at + segment.len.min(start + BLOCK_BYTES);
                if end > part.end {
                    break;
                }
                let from = (segment.at + start - part.start) as usize;
                let block = &data[from..(end - part.start) as usize];
                sums.push((i, start, gather::block_sum(block)));
            }
        }
        Arrived(sums)
    }

    /// Compares the checksums of all parts; false if a block lay in two of them, or in none.
    pub(crate) fn compare(&self, parts: impl IntoIterator<Item = Arrived>) -> Result<bool> {
        let mut sums: Vec<_> = parts.into_iter().flat_map(|part| part.0).collect();
        let empty = self.segments.iter().enumerate().filter(|(_, (segment, _))| segment.len == 0);
        sums.extend(empty.map(|(i, _)| (i, 0, gather::block_sum(&[]))));
        let Some(sums) = gather::join(&self.segments, sums) else { return Ok(false) };
        for ((segment, field), found) in self.segments.iter().zip(sums) {
            let field = &self.fields[*field];
            match segment.xxh3 {
                Some(expected) if expected != found => {
                    return Err(mismatch(field, expected, found));
                }
                Some(_) => {}
                None => {
                    let why = "there are no checksums";
                    return Err(Error::new(ErrorKind::Unsupported, "read rollout", why)
                        .with("field", field));
                }
            }
        }
        Ok(true)
    }
}

impl Extent for (Segment, usize) {
    fn at(&self) -> u64 {
        self.0.at
    }

    fn len(&self) -> u64 {
        self.0.len
    }
}

#[cfg(test)]
mod tests {
    use transport_core::Dtype;

    use super::*;
    use crate::{
        Column, Rollout, Scalars,
        native::{Options, Plan},
    };

    fn encoded(rows: u64) -> (Header, Vec<u8>) {
        let mut rollout = Rollout::default();
        let bytes = |seed: u8, len: u64| -> Vec<u8> {
            (0..len)
                .map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 9) as u8 ^ seed))
                .collect()
        };
        for (name, dtype, size) in [("a", Dtype::Float32, 4), ("b", Dtype::Uint8, 1)] {
            let scalars = Scalars::new(dtype, bytes(size as u8, rows * size)).unwrap();
            rollout.non_tensor.insert(name.into(), Column::Scalars(scalars));
        }
        let plan = Plan::new(&rollout, &Options::default()).unwrap();
        let mut data = vec![0; plan.data_bytes() as usize];
        let header = plan.encode_into(&mut data, 2).unwrap();
        (Header::parse(&header).unwrap(), data)
    }

    fn compare(arriving: &Arriving, parts: &[Range<u64>], data: &[u8]) -> Result<bool> {
        let of =
            |part: &Range<u64>| arriving.sums(part, &data[part.start as usize..part.end as usize]);
        // In any order, as they arrive.
        arriving.compare(parts.iter().rev().map(of))
    }

    #[test]
    fn parts_say_what_the_whole_says() {
        for rows in [0, 1, 100, BLOCK_BYTES / 4, BLOCK_BYTES + 7, 3 * BLOCK_BYTES] {
            let (header, mut data) = encoded(rows);
            let arriving = Arriving::new(&header);
            for bytes in [1, BLOCK_BYTES, 300_000, 1 << 30] {
                let parts = arriving.parts(bytes);
                assert!(
                    parts.iter().all(|part| part.end - part.start <= bytes.max(BLOCK_BYTES + 64))
                );
                assert_eq!(parts.last().unwrap().end, data.len() as u64);
                assert!(compare(&arriving, &parts, &data).unwrap(), "{rows} rows, {bytes}");
                // Without the one that holds the last block; padding may be a part of its own.
                let block = |part: &Range<u64>| {
                    let bytes = &data[part.start as usize..part.end as usize];
                    !arriving.sums(part, bytes).0.is_empty()
                };
                let Some(last) = parts.iter().rposition(block) else { continue };
                assert!(!compare(&arriving, &parts[..last], &data).unwrap(), "{rows}, {bytes}");
            }
            // Parts that cut a block say so.
            if rows > 100 {
                let half = rows / 2 + 1;
                let parts = [0..half, half..data.len() as u64];
                assert!(!compare(&arriving, &parts, &data).unwrap(), "{rows} rows");
            }
            for flip in [0, rows * 4 / 2, (rows * 4).saturating_sub(1)] {
                if rows == 0 {
                    continue;
                }
                data[flip as usize] ^= 1;
                let error = compare(&arriving, &arriving.parts(300_000), &data).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
                assert_eq!(error.context("field"), Some("a"), "{error}");
                data[flip as usize] ^= 1;
            }
        }
    }
}
