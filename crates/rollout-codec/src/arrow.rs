//! Arrow arrays as columns (feature `arrow`): numbers and bytes stay where Arrow has them.

use arrow_array::{Array, ArrayRef, cast::AsArray};
use arrow_buffer::Buffer;
use arrow_schema::DataType;
use bytes::Bytes;
use transport_core::{Dtype, Error, ErrorKind, Result};

use crate::{BlobKind, Blobs, Column, Piece, Ragged, RowKind, Scalars, Template};

impl Column<'_> {
    /// The column of one Arrow field, given as the chunks in which it came, in order.
    ///
    /// | Arrow | column |
    /// |---|---|
    /// | whole numbers, floats, truth values | scalars |
    /// | list, large list, fixed-size list of these | ragged, the list its first dimension |
    /// | the same with fixed-size lists inside | ragged with a fixed tail |
    /// | utf8, large utf8 | text |
    /// | binary, large binary, fixed-size binary | bytes |
    ///
    /// Null rows stay null. Truth values and numbers beside nulls are copied, all else is shared.
    ///
    /// # Errors
    /// Any other type, chunks of different types, and nulls inside a row.
    pub fn from_arrow(chunks: &[ArrayRef]) -> Result<Column<'static>> {
        let Some(first) = chunks.first() else {
            return Err(refuse("no chunk, and so no type"));
        };
        if let Some(other) = chunks.iter().find(|chunk| chunk.data_type() != first.data_type()) {
            return Err(refuse("chunks of different types")
                .with("expected", first.data_type())
                .with("found", other.data_type()));
        }
        match first.data_type() {
            DataType::Utf8 | DataType::LargeUtf8 => blobs(BlobKind::Utf8, chunks),
            DataType::Binary | DataType::LargeBinary | DataType::FixedSizeBinary(_) => {
                blobs(BlobKind::Bytes, chunks)
            }
            DataType::List(_) | DataType::LargeList(_) | DataType::FixedSizeList(..) => {
                ragged(chunks).map(Column::Ragged)
            }
            _ => scalars(chunks).map(Column::Scalars),
        }
    }
}

fn refuse(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidInput, "read Arrow array", why)
}

/// Element type of plain numbers.
fn dtype_of(kind: &DataType) -> Result<Dtype> {
    Ok(match kind {
        DataType::Boolean => Dtype::Bool,
        DataType::Int8 => Dtype::Int8,
        DataType::Int16 => Dtype::Int16,
        DataType::Int32 => Dtype::Int32,
        DataType::Int64 => Dtype::Int64,
        DataType::UInt8 => Dtype::Uint8,
        DataType::UInt16 => Dtype::Uint16,
        DataType::UInt32 => Dtype::Uint32,
        DataType::UInt64 => Dtype::Uint64,
        DataType::Float16 => Dtype::Float16,
        DataType::Float32 => Dtype::Float32,
        DataType::Float64 => Dtype::Float64,
        other => {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "read Arrow array",
                "no column of this type",
            )
            .with("type", other)
            .remedy("cast it to numbers, lists of numbers, text or binary"));
        }
    })
}

/// The elements of an array of plain numbers, nulls included.
fn elements(array: &dyn Array) -> Result<(Dtype, Bytes)> {
    let dtype = dtype_of(array.data_type())?;
    if dtype == Dtype::Bool {
        let bits = array.as_boolean().values();
        return Ok((dtype, bits.iter().map(u8::from).collect::<Vec<_>>().into()));
    }
    let data = array.to_data();
    let size = dtype.size() as usize;
    let buffer = data.buffers()[0].slice_with_length(data.offset() * size, data.len() * size);
    Ok((dtype, shared(buffer)))
}

fn shared(buffer: Buffer) -> Bytes {
    match buffer.is_empty() {
        true => Bytes::new(),
        false => Bytes::from_owner(buffer),
    }
}

fn scalars(chunks: &[ArrayRef]) -> Result<Scalars<'static>> {
    let dtype = dtype_of(chunks[0].data_type())?;
    if let [only] = chunks
        && only.null_count() == 0
    {
        return Scalars::new(dtype, elements(only)?.1);
    }
    let size = dtype.size() as usize;
    let mut data = Vec::new();
    let mut nulls = Vec::new();
    for chunk in chunks {
        let (_, bytes) = elements(chunk)?;
        let start = data.len();
        data.extend_from_slice(&bytes);
        for i in 0..chunk.len() {
            nulls.push(chunk.is_null(i));
            if chunk.is_null(i) {
                data[start + i * size..start + (i + 1) * size].fill(0);
            }
        }
    }
    Scalars::with_nulls(dtype, data, nulls)
}

/// One chunk of lists: where each row starts among `items`, and one more.
struct Lists {
    starts: Vec<usize>,
    items: ArrayRef,
}

fn lists(chunk: &ArrayRef) -> Lists {
    match chunk.data_type() {
        DataType::List(_) => {
            let list = chunk.as_list::<i32>();
            let starts = list.value_offsets().iter().map(|&at| at as usize).collect();
            Lists { starts, items: list.values().clone() }
        }
        DataType::LargeList(_) => {
            let list = chunk.as_list::<i64>();
            let starts = list.value_offsets().iter().map(|&at| at as usize).collect();
            Lists { starts, items: list.values().clone() }
        }
        _ => {
            let list = chunk.as_fixed_size_list();
            let size = list.value_length() as usize;
            let starts = (0..=list.len()).map(|i| i * size).collect();
            Lists { starts, items: list.values().clone() }
        }
    }
}

fn ragged(chunks: &[ArrayRef]) -> Result<Ragged<'static>> {
    let mut column: Option<Ragged<'static>> = None;
    for chunk in chunks {
        let Lists { starts, mut items } = lists(chunk);
        let no_nulls = |array: &ArrayRef| match array.null_count() {
            0 => Ok(()),
            nulls => Err(refuse("nulls inside of rows").with("nulls", nulls)),
        };
        // Fixed-size lists inside are the other dimensions.
        let mut tail = Vec::new();
        no_nulls(&items)?;
        while let DataType::FixedSizeList(_, size) = items.data_type() {
            tail.push(*size as u64);
            items = items.as_fixed_size_list().values().clone();
            no_nulls(&items)?;
        }
        let (dtype, bytes) = elements(&items)?;
        let step = tail.iter().product::<u64>() as usize * dtype.size() as usize;
        let column = match &mut column {
            Some(column) => column,
            None => column.insert(Ragged::new(dtype, RowKind::Numpy, Template::tail(&tail[..]))?),
        };
        for (i, row) in starts.windows(2).enumerate() {
            if chunk.is_null(i) {
                column.push_null();
                continue;
            }
            let data = bytes.slice(row[0] * step..row[1] * step);
            let length = (row[1] - row[0]) as u64;
            column.push_shaped(&[&[length], &tail[..]].concat(), data)?;
        }
    }
    Ok(column.expect("there is a chunk"))
}

fn blobs(kind: BlobKind, chunks: &[ArrayRef]) -> Result<Column<'static>> {
    let mut rows = Vec::new();
    for chunk in chunks {
        let data = chunk.to_data();
        let (starts, bytes): (Vec<usize>, Bytes) = match chunk.data_type() {
            DataType::Utf8 => {
                let text = chunk.as_string::<i32>();
                (widened(text.value_offsets()), shared(text.values().clone()))
            }
            DataType::LargeUtf8 => {
                let text = chunk.as_string::<i64>();
                (widened(text.value_offsets()), shared(text.values().clone()))
            }
            DataType::Binary => {
                let binary = chunk.as_binary::<i32>();
                (widened(binary.value_offsets()), shared(binary.values().clone()))
            }
            DataType::LargeBinary => {
                let binary = chunk.as_binary::<i64>();
                (widened(binary.value_offsets()), shared(binary.values().clone()))
            }
            DataType::FixedSizeBinary(size) => {
                let size = *size as usize;
                let starts = (0..=data.len()).map(|i| (data.offset() + i) * size).collect();
                (starts, shared(data.buffers()[0].clone()))
            }
            _ => unreachable!("only called for these"),
        };
        for (i, row) in starts.windows(2).enumerate() {
            let piece = (!chunk.is_null(i)).then(|| Piece::from(bytes.slice(row[0]..row[1])));
            rows.push(piece);
        }
    }
    Ok(Column::Blobs(Blobs { kind, rows, pixels: Vec::new() }))
}

fn widened<T: Copy + TryInto<usize>>(offsets: &[T]) -> Vec<usize> {
    let wide = |at: &T| (*at).try_into().ok().expect("Arrow's offsets are not negative");
    offsets.iter().map(wide).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{
        BinaryArray, BooleanArray, FixedSizeBinaryArray, FixedSizeListArray, Float32Array,
        Int64Array, LargeListArray, LargeStringArray, ListArray, StringArray, TimestampSecondArray,
        types::Int64Type,
    };
    use arrow_buffer::OffsetBuffer;
    use arrow_schema::Field;

    use super::*;
    use crate::Value;

    fn column(chunks: &[ArrayRef]) -> Column<'static> {
        Column::from_arrow(chunks).unwrap()
    }

    #[test]
    fn lists_are_ragged_rows_over_the_same_memory() {
        let lists = ListArray::from_iter_primitive::<Int64Type, _, _>([
            Some(vec![Some(1), Some(2), Some(3)]),
            None,
            Some(vec![]),
            Some(vec![Some(4)]),
        ]);
        let memory = lists.values().as_primitive::<Int64Type>().values().as_ptr();
        let whole: ArrayRef = Arc::new(lists);
        let Column::Ragged(rows) = column(std::slice::from_ref(&whole)) else { panic!() };
        assert_eq!((rows.dtype(), rows.rows()), (Dtype::Int64, 4));
        assert_eq!(rows.row(0).unwrap().as_ptr(), memory.cast(), "no copy");
        let numbers = |n: &[i64]| n.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(rows.row(0).unwrap(), numbers(&[1, 2, 3]));
        assert_eq!((rows.row(1), rows.row(2)), (None, Some(&[][..])));
        assert_eq!(rows.row(3).unwrap(), numbers(&[4]));
        // A slice of it, and two chunks.
        let Column::Ragged(rows) = column(&[whole.slice(2, 2), whole.slice(0, 1)]) else {
            panic!()
        };
        assert_eq!((rows.row(0), rows.row(1)), (Some(&[][..]), Some(&numbers(&[4])[..])));
        assert_eq!(rows.row(2).unwrap(), numbers(&[1, 2, 3]));
    }

    #[test]
    fn fixed_lists_inside_are_the_tail() {
        let floats: ArrayRef = Arc::new(Float32Array::from_iter_values((0..12).map(|n| n as f32)));
        let field =
            |array: &ArrayRef| Arc::new(Field::new_list_field(array.data_type().clone(), false));
        let pairs: ArrayRef =
            Arc::new(FixedSizeListArray::new(field(&floats), 2, floats.clone(), None));
        let offsets = OffsetBuffer::new(vec![0i64, 1, 1, 6].into());
        let rows: ArrayRef =
            Arc::new(LargeListArray::new(field(&pairs), offsets, pairs.clone(), None));
        let Column::Ragged(rows) = column(&[rows]) else { panic!() };
        assert_eq!(rows.template().unwrap(), &Template::tail([2]));
        assert_eq!((rows.shape(0).unwrap(), rows.shape(1).unwrap()), (vec![1, 2], vec![0, 2]));
        assert_eq!(rows.row(2).unwrap()[..4], 2f32.to_le_bytes());
        let Column::Ragged(fixed) = column(&[pairs]) else { panic!() };
        assert_eq!((fixed.rows(), fixed.shape(5).unwrap()), (6, vec![2]));
    }

    #[test]
    fn numbers_text_and_bytes_keep_their_nulls() {
        let numbers: ArrayRef = Arc::new(Int64Array::from(vec![Some(7), None, Some(9)]));
        let Column::Scalars(found) = column(&[numbers.clone(), numbers]) else { panic!() };
        assert_eq!(found.nulls(), [false, true, false, false, true, false]);
        assert_eq!(found.data()[8..16], [0; 8]);
        let flags: ArrayRef = Arc::new(BooleanArray::from(vec![true, false, true]));
        let Column::Scalars(found) = column(&[flags]) else { panic!() };
        assert_eq!((found.dtype(), &found.data()[..]), (Dtype::Bool, &[1, 0, 1][..]));
        let text = [Some("a"), None, Some("né")];
        let small: ArrayRef = Arc::new(StringArray::from(text.to_vec()));
        let large: ArrayRef = Arc::new(LargeStringArray::from(text.to_vec()));
        for array in [small, large] {
            let Column::Blobs(found) = column(&[array.slice(1, 2), array]) else { panic!() };
            let values = found.to_values().unwrap();
            let expected = [text[1], text[2], text[0], text[1], text[2]];
            let expected = expected.map(|t| t.map_or(Value::Null, Value::from));
            assert_eq!(values, expected);
        }
        let bytes: ArrayRef = Arc::new(BinaryArray::from_vec(vec![b"x", b""]));
        let fixed: ArrayRef = Arc::new(
            FixedSizeBinaryArray::try_from_iter([b"ab", b"cd", b"ef"].into_iter()).unwrap(),
        );
        let Column::Blobs(found) = column(&[bytes]) else { panic!() };
        assert_eq!((found.kind, found.rows.len()), (BlobKind::Bytes, 2));
        let Column::Blobs(found) = column(&[fixed.slice(1, 2)]) else { panic!() };
        assert_eq!(&**found.rows[0].as_ref().unwrap(), b"cd");
    }

    #[test]
    fn what_is_no_column_is_refused() {
        let time: ArrayRef = Arc::new(TimestampSecondArray::from(vec![1]));
        let error = Column::from_arrow(&[time]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.context("type").is_some(), "{error}");
        let holes = ListArray::from_iter_primitive::<Int64Type, _, _>([Some(vec![Some(1), None])]);
        let error = Column::from_arrow(&[Arc::new(holes)]).unwrap_err();
        assert!(error.to_string().contains("nulls inside"), "{error}");
        let a: ArrayRef = Arc::new(Int64Array::from(vec![1]));
        let b: ArrayRef = Arc::new(Float32Array::from(vec![1.0]));
        assert!(Column::from_arrow(&[a, b]).is_err());
        assert!(Column::from_arrow(&[]).is_err());
    }
}
