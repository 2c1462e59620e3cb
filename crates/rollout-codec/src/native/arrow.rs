//! Ragged fields as Arrow arrays over the same memory (feature `arrow`).

use std::sync::Arc;

use arrow_array::{
    ArrayRef, BooleanArray, FixedSizeListArray, LargeListArray, PrimitiveArray,
    types::{
        ArrowPrimitiveType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type,
        Int64Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
    },
};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_schema::Field;
use bytes::Bytes;
use transport_core::{Dtype, Error, ErrorKind, RegionSlice, Result};

use super::ragged_view::RaggedView;

impl RaggedView {
    /// The rows as an Arrow large list, whose items are fixed-size lists where rows have more than
    /// one dimension. Offsets and numbers are the memory of this view and keep it alive; only
    /// truth values, which Arrow packs into bits, are copied.
    ///
    /// Rows that share memory, rows without a common shape, a ragged dimension that is not the
    /// first, and element types that Arrow lacks (bfloat16, float8, complex) are errors.
    pub fn to_arrow(&self) -> Result<LargeListArray> {
        let unsupported = |why: &'static str| {
            Error::new(ErrorKind::Unsupported, "make Arrow array", why).with("dtype", self.dtype)
        };
        let template = self.template().filter(|template| template.before.is_empty());
        let template =
            template.ok_or_else(|| unsupported("rows are not ragged in their first dimension"))?;
        if self.alias.is_some() {
            return Err(unsupported("rows share memory").remedy("encode without deduplication"));
        }
        if template.after.contains(&0) {
            return Err(unsupported("rows without elements in a fixed dimension"));
        }
        let mut items = self.numbers().ok_or_else(|| unsupported("Arrow has no such type"))??;
        for &dim in template.after.iter().rev() {
            let size = i32::try_from(dim).map_err(|_| unsupported("a dimension is too large"))?;
            let field = Arc::new(Field::new_list_field(items.data_type().clone(), false));
            let list = FixedSizeListArray::try_new(field, size, items, None);
            items = Arc::new(list.map_err(arrow)?);
        }
        // Checked when the view was made: they start at 0, never go down, and end with the data.
        let offsets = ScalarBuffer::<i64>::new(aligned(&self.offsets.0, 8), 0, self.rows + 1);
        let nulls = self.nulls.as_ref().map(|nulls| {
            NullBuffer::new(BooleanBuffer::from_iter(nulls.as_ref().iter().map(|&null| null == 0)))
        });
        let field = Arc::new(Field::new_list_field(items.data_type().clone(), false));
        LargeListArray::try_new(field, OffsetBuffer::new(offsets), items, nulls).map_err(arrow)
    }

    /// All elements in one array; `None` if Arrow has no such type.
    fn numbers(&self) -> Option<Result<ArrayRef>> {
        fn primitive<T: ArrowPrimitiveType>(data: &RegionSlice) -> Result<ArrayRef> {
            let size = size_of::<T::Native>();
            let values = ScalarBuffer::new(aligned(data, size), 0, data.len() / size);
            Ok(Arc::new(PrimitiveArray::<T>::try_new(values, None).map_err(arrow)?))
        }
        let data = &self.data;
        Some(match self.dtype {
            Dtype::Float64 => primitive::<Float64Type>(data),
            Dtype::Float32 => primitive::<Float32Type>(data),
            Dtype::Float16 => primitive::<Float16Type>(data),
            Dtype::Int64 => primitive::<Int64Type>(data),
            Dtype::Int32 => primitive::<Int32Type>(data),
            Dtype::Int16 => primitive::<Int16Type>(data),
            Dtype::Int8 => primitive::<Int8Type>(data),
            Dtype::Uint64 => primitive::<UInt64Type>(data),
            Dtype::Uint32 => primitive::<UInt32Type>(data),
            Dtype::Uint16 => primitive::<UInt16Type>(data),
            Dtype::Uint8 => primitive::<UInt8Type>(data),
            Dtype::Bool => {
                let bits = BooleanBuffer::from_iter(data.as_ref().iter().map(|&b| b != 0));
                Ok(Arc::new(BooleanArray::new(bits, None)))
            }
            _ => return None,
        })
    }
}

/// The memory as an Arrow buffer; copied if it does not lie right for elements of `size` bytes,
/// which data that starts at a multiple of 64 never does.
fn aligned(region: &RegionSlice, size: usize) -> Buffer {
    match region.address().is_multiple_of(size) {
        true if !region.is_empty() => Buffer::from(Bytes::from_owner(region.clone())),
        _ => Buffer::from_slice_ref(region.as_ref()),
    }
}

fn arrow(error: arrow_schema::ArrowError) -> Error {
    Error::new(ErrorKind::Unexpected, "make Arrow array", error.to_string()).source(error)
}

#[cfg(test)]
mod tests {
    use arrow_array::{Array, cast::AsArray};

    use super::*;
    use crate::{
        Column, Ragged, Rollout, RowKind, Template,
        native::{Header, Options, Plan, RolloutView},
    };

    fn view(column: Ragged<'_>) -> RaggedView {
        let mut rollout = Rollout::default();
        rollout.non_tensor.insert("x".into(), Column::Ragged(column));
        let (header, data) = Plan::new(&rollout, &Options::default()).unwrap().encode(1).unwrap();
        let view = RolloutView::new(Header::parse(&header).unwrap(), data).unwrap();
        view.ragged("x").unwrap()
    }

    #[test]
    fn rows_are_lists_over_the_same_memory() {
        let mut column = Ragged::new(Dtype::Int32, RowKind::Torch, Template::tail([2])).unwrap();
        let bytes = |items: &[i32]| items.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>();
        column.push(bytes(&[1, 2, 3, 4])).unwrap();
        column.push_null();
        column.push(bytes(&[5, 6])).unwrap();
        let view = view(column);
        let range = view.row(0).unwrap().bytes().as_ptr_range();
        let list = view.to_arrow().unwrap();
        assert_eq!((list.len(), list.null_count(), list.is_null(1)), (3, 1, true));
        assert_eq!(list.value_offsets(), [0, 2, 2, 3]);
        let numbers = list.values().as_fixed_size_list().values();
        let numbers = numbers.as_primitive::<Int32Type>().values().clone();
        assert_eq!(numbers, [1, 2, 3, 4, 5, 6]);
        assert!(range.contains(&numbers.as_ptr().cast()), "no copy");
        drop((view, list));
        assert_eq!(numbers[5], 6, "still readable");
    }

    #[test]
    fn what_arrow_cannot_hold_is_refused() {
        let before = Template { before: [2].into(), after: [].into() };
        for column in [
            Ragged::new(Dtype::Bfloat16, RowKind::Torch, Template::flat()).unwrap(),
            Ragged::new(Dtype::Int8, RowKind::Torch, before).unwrap(),
            Ragged::irregular(Dtype::Int8, RowKind::Numpy),
        ] {
            assert_eq!(view(column).to_arrow().unwrap_err().kind(), ErrorKind::Unsupported);
        }
        let empty = Ragged::new(Dtype::Bool, RowKind::List, Template::flat()).unwrap();
        assert_eq!(view(empty).to_arrow().unwrap().len(), 0);
    }
}
