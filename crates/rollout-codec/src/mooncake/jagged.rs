//! Nested torch tensors with a jagged layout: packed values, offsets, and perhaps lengths.

use bytes::Bytes;
use transport_core::{Dtype, Error, ErrorKind, Result};

use super::tensor;
use crate::{Array, Ragged, RowKind, Template, Value};

fn corrupt(why: &'static str) -> Error {
    Error::new(ErrorKind::Corrupt, "read nested tensor", why)
}

/// Reads a payload of several tensors, one after the other, as `spec` describes them.
///
/// Rows share the payload's memory where the ragged dimension is the first one, and are copied
/// together otherwise.
pub(super) fn parse(spec: &Value, payload: &Bytes) -> Result<Ragged<'static>> {
    let sizes = spec.get("part_bytes").and_then(Value::as_list).and_then(|sizes| {
        sizes.iter().map(|n| usize::try_from(n.as_u64()?).ok()).collect::<Option<Vec<_>>>()
    });
    let sizes = sizes.ok_or_else(|| corrupt("part_bytes is not a list of lengths"))?;
    let has_lengths = spec.get("has_lengths") == Some(&Value::Bool(true));
    if sizes.len() != 2 + usize::from(has_lengths) {
        return Err(corrupt("not as many parts as there should be").with("parts", sizes.len()));
    }
    let mut rest = payload.clone();
    let mut parts = Vec::new();
    for size in sizes {
        if size > rest.len() {
            return Err(corrupt("the payload is cut off").with("bytes", payload.len()));
        }
        parts.push(tensor::parse(&rest.split_to(size))?);
    }
    if !rest.is_empty() {
        return Err(corrupt("something follows the last part").with("bytes", rest.len()));
    }
    let dim = spec.get("ragged_idx").map_or(Some(1), Value::as_u64).unwrap_or(0);
    let values = &parts[0];
    let dim = usize::try_from(dim).ok().and_then(|dim| dim.checked_sub(1));
    let dim = dim.filter(|&dim| dim < values.shape().len());
    let dim = dim.ok_or_else(|| corrupt("the values do not have the ragged dimension"))?;
    let starts = numbers(&parts[1])?;
    let Some(rows) = starts.len().checked_sub(1) else {
        return Err(corrupt("there are no offsets"));
    };
    let lengths = match parts.get(2) {
        Some(lengths) => numbers(lengths)?,
        None => starts
            .windows(2)
            .map(|pair| pair[1].checked_sub(pair[0]))
            .collect::<Option<_>>()
            .ok_or_else(|| corrupt("offsets go down"))?,
    };
    if lengths.len() != rows {
        return Err(corrupt("not one length a row").with("rows", rows));
    }
    let (before, after) = (&values.shape()[..dim], &values.shape()[dim + 1..]);
    let template = Template { before: before.into(), after: after.into() };
    let mut column = Ragged::new(values.dtype(), RowKind::Torch, template.clone())?;
    let packed = values.shape()[dim];
    for (row, (&start, &length)) in starts.iter().zip(&lengths).enumerate() {
        if start.checked_add(length).is_none_or(|end| end > packed) {
            return Err(corrupt("a row lies outside the values").with("row", row));
        }
        column.push_shaped(&template.shape(length), cut(values, dim, start, length))?;
    }
    Ok(column)
}

/// Entries `start .. start + length` of dimension `dim`, which are there.
fn cut(values: &Array, dim: usize, start: u64, length: u64) -> Bytes {
    if values.data().is_empty() {
        return Bytes::new();
    }
    let size = |dims: &[u64]| dims.iter().product::<u64>(); // of an existing array: no overflow
    let step = (size(&values.shape()[dim + 1..]) * values.dtype().size()) as usize;
    let (from, len) = (start as usize * step, length as usize * step);
    if dim == 0 {
        return values.data().slice(from..from + len);
    }
    let block = values.shape()[dim] as usize * step;
    let outer = size(&values.shape()[..dim]) as usize;
    (0..outer)
        .flat_map(|i| &values.data()[i * block + from..i * block + from + len])
        .copied()
        .collect()
}

fn numbers(array: &Array) -> Result<Vec<u64>> {
    let wide = match array.dtype() {
        Dtype::Int64 => 8,
        Dtype::Int32 => 4,
        _ => return Err(corrupt("offsets are not whole numbers").with("found", array.meta())),
    };
    let number = |bytes: &[u8]| {
        let n = match bytes.try_into() {
            Ok(eight) => i64::from_le_bytes(eight),
            Err(_) => i32::from_le_bytes(bytes.try_into().ok()?).into(),
        };
        u64::try_from(n).ok()
    };
    let numbers = array.data().chunks_exact(wide).map(number).collect::<Option<_>>();
    numbers.ok_or_else(|| corrupt("a negative offset"))
}

#[cfg(test)]
mod tests {
    use transport_core::TensorMeta;

    use super::*;
    use crate::json;

    fn part(dtype: Dtype, shape: &[u64], data: &[u8]) -> Vec<u8> {
        let meta = TensorMeta::new(dtype, shape).unwrap();
        [&tensor::header(&meta).unwrap()[..], data].concat()
    }

    fn words(items: &[i64]) -> Vec<u8> {
        let bytes: Vec<u8> = items.iter().flat_map(|n| n.to_le_bytes()).collect();
        part(Dtype::Int64, &[items.len() as u64], &bytes)
    }

    fn read(parts: &[Vec<u8>], ragged_idx: u64) -> Result<Ragged<'static>> {
        let sizes: Vec<_> = parts.iter().map(Vec::len).collect();
        let spec = format!(
            "{{\"part_bytes\":{sizes:?},\"has_lengths\":{},\"ragged_idx\":{ragged_idx}}}",
            parts.len() == 3
        );
        parse(&json::parse(spec.as_bytes()).unwrap(), &parts.concat().into())
    }

    #[test]
    fn rows_are_cut_out_of_packed_values() {
        let values = part(Dtype::Uint8, &[3, 2], &[1, 2, 3, 4, 5, 6]);
        let column = read(&[values.clone(), words(&[0, 2, 2, 3])], 1).unwrap();
        assert_eq!(
            (column.row(0).unwrap(), column.shape(0).unwrap()),
            (&[1, 2, 3, 4][..], vec![2, 2])
        );
        assert_eq!((column.row(1).unwrap(), column.row(2).unwrap()), (&[][..], &[5, 6][..]));
        // Holes: a row may be shorter than its place.
        let column = read(&[values, words(&[0, 2, 3]), words(&[1, 1])], 1).unwrap();
        assert_eq!((column.row(0).unwrap(), column.row(1).unwrap()), (&[1, 2][..], &[5, 6][..]));
        // The second dimension is ragged.
        let values = part(Dtype::Uint8, &[2, 3], &[1, 2, 3, 4, 5, 6]);
        let column = read(&[values, words(&[0, 1, 3])], 2).unwrap();
        assert_eq!((column.row(0).unwrap(), column.shape(0).unwrap()), (&[1, 4][..], vec![2, 1]));
        assert_eq!(
            (column.row(1).unwrap(), column.shape(1).unwrap()),
            (&[2, 3, 5, 6][..], vec![2, 2])
        );
    }

    #[test]
    fn contradictions_are_refused() {
        let values = || part(Dtype::Uint8, &[3], &[1, 2, 3]);
        for (parts, dim) in [
            (vec![values(), words(&[0, 4])], 1),
            (vec![values(), words(&[0, 2, 1])], 1),
            (vec![values(), words(&[-1, 2])], 1),
            (vec![values(), words(&[])], 1),
            (vec![values(), words(&[0, 3]), words(&[i64::MAX])], 1),
            (vec![values(), words(&[0, 3]), words(&[1, 1])], 1),
            (vec![values(), words(&[0, 3])], 2),
            (vec![values(), words(&[0, 3])], 0),
            (vec![values()], 1),
            (vec![values(), part(Dtype::Uint8, &[1], &[0])], 1),
            (vec![part(Dtype::Uint8, &[1 << 40, 0], &[]), words(&[0, 1])], 2),
        ] {
            assert!(read(&parts, dim).is_err(), "{dim} {}", parts.len());
        }
    }
}
