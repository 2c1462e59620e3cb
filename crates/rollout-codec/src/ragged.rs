//! Ragged columns: numeric rows of different lengths.

use bytes::Bytes;
use transport_core::{Dtype, Error, ErrorKind, Result, TensorMeta};

use crate::{Array, Library, Piece, Rounding, Value, element};

/// What Python object a row is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// `numpy.ndarray`.
    Numpy,
    /// `torch.Tensor`.
    Torch,
    /// Nested lists of numbers.
    List,
    /// A numpy array where `true`, lists where `false`.
    Mixed(Vec<bool>),
}

/// Shape of every row but for one dimension: `before`, then the ragged one, then `after`.
///
/// It comes from the schema, never from the data: a batch whose rows happen to have equal lengths
/// is laid out like any other.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Template {
    /// Fixed dimensions before the ragged one; empty in all fields of slime.
    pub before: Box<[u64]>,
    /// Fixed dimensions after it, such as `[48, 8]` for routed experts.
    pub after: Box<[u64]>,
}

impl Template {
    /// Rows of one dimension.
    pub fn flat() -> Self {
        Self::default()
    }

    /// Rows `[ragged, after..]`.
    pub fn tail(after: impl Into<Box<[u64]>>) -> Self {
        Self { before: [].into(), after: after.into() }
    }

    /// Shape of a row with `length` in the ragged dimension.
    pub fn shape(&self, length: u64) -> Vec<u64> {
        [&*self.before, &[length], &*self.after].concat()
    }

    /// Number of dimensions of a row.
    pub fn rank(&self) -> usize {
        self.before.len() + 1 + self.after.len()
    }

    /// Bytes of a row of length 1; refuses a product that overflows.
    pub fn step_bytes(&self, dtype: Dtype) -> Result<u64> {
        Ok(TensorMeta::new(dtype, self.shape(1))?.nbytes())
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Shapes {
    Fixed { template: Template, step_bytes: u64, lengths: Vec<u64> },
    PerRow(Vec<Box<[u64]>>),
}

/// Numeric rows of one element type.
#[derive(Clone, Debug)]
pub struct Ragged<'a> {
    dtype: Dtype,
    kind: RowKind,
    shapes: Shapes,
    rows: Vec<Option<Piece<'a>>>,
}

impl<'a> Ragged<'a> {
    /// An empty column whose rows all follow `template`.
    pub fn new(dtype: Dtype, kind: RowKind, template: Template) -> Result<Self> {
        let step_bytes = template.step_bytes(dtype)?;
        let shapes = Shapes::Fixed { template, step_bytes, lengths: Vec::new() };
        Ok(Self { dtype, kind, shapes, rows: Vec::new() })
    }

    /// An empty column in which every row has a shape of its own.
    pub fn irregular(dtype: Dtype, kind: RowKind) -> Self {
        Self { dtype, kind, shapes: Shapes::PerRow(Vec::new()), rows: Vec::new() }
    }

    /// A column of one-dimensional rows, straight from the producer's memory.
    ///
    /// ```
    /// use rollout_codec::{Ragged, RowKind};
    /// let (a, b) = (vec![1i64, 2, 3], vec![4i64]);
    /// let tokens = Ragged::from_rows(RowKind::Torch, [&a[..], &b[..]]);
    /// assert_eq!((tokens.rows(), tokens.length(0), tokens.nbytes()), (2, Some(3), 32));
    /// ```
    pub fn from_rows<T: Element>(kind: RowKind, rows: impl IntoIterator<Item = &'a [T]>) -> Self {
        let mut column =
            Self::new(T::DTYPE, kind, Template::flat()).expect("one element does not overflow");
        for row in rows {
            column.push(bytemuck::cast_slice::<T, u8>(row)).expect("whole elements");
        }
        column
    }

    /// Appends a row; its length follows from its bytes.
    pub fn push(&mut self, bytes: impl Into<Piece<'a>>) -> Result<()> {
        let bytes = bytes.into();
        let Shapes::Fixed { template, step_bytes, .. } = &self.shapes else {
            return Err(self.refuse("the row needs a shape").remedy("use push_shaped"));
        };
        let length = match step_bytes {
            0 => return Err(self.refuse("an empty row needs a shape").remedy("use push_shaped")),
            step if (bytes.len() as u64).is_multiple_of(*step) => bytes.len() as u64 / step,
            step => {
                return Err(self
                    .refuse("the bytes of the row are no whole number of steps")
                    .with("row", self.rows.len())
                    .with("row_bytes", bytes.len())
                    .with("step_bytes", step)
                    .with("fixed_dims", format_args!("{:?}", template.shape(1))));
            }
        };
        self.append(length, bytes);
        Ok(())
    }

    /// Appends a row of the given shape, which must fit the template and the bytes.
    pub fn push_shaped(&mut self, shape: &[u64], bytes: impl Into<Piece<'a>>) -> Result<()> {
        let bytes = bytes.into();
        let meta = TensorMeta::new(self.dtype, shape)?;
        let wrong = |why| {
            self.refuse(why)
                .with("row", self.rows.len())
                .with("row_shape", &meta)
                .with("row_bytes", bytes.len())
        };
        if bytes.len() as u64 != meta.nbytes() {
            return Err(wrong("the bytes do not match the shape"));
        }
        let length = match &self.shapes {
            Shapes::PerRow(_) => None,
            Shapes::Fixed { template, .. } => {
                let at = template.before.len();
                if shape.len() != template.rank()
                    || shape[..at] != *template.before
                    || shape[at + 1..] != *template.after
                {
                    return Err(wrong("the shape does not fit the declared one")
                        .with("declared_before", format_args!("{:?}", template.before))
                        .with("declared_after", format_args!("{:?}", template.after)));
                }
                Some(shape[at])
            }
        };
        match length {
            Some(length) => self.append(length, bytes),
            None => {
                let Shapes::PerRow(shapes) = &mut self.shapes else { unreachable!() };
                shapes.push(shape.into());
                self.rows.push(Some(bytes));
            }
        }
        Ok(())
    }

    /// Appends a null row.
    pub fn push_null(&mut self) {
        match &mut self.shapes {
            Shapes::Fixed { lengths, .. } => lengths.push(0),
            Shapes::PerRow(shapes) => shapes.push([].into()),
        }
        self.rows.push(None);
    }

    fn append(&mut self, length: u64, bytes: Piece<'a>) {
        match &mut self.shapes {
            Shapes::Fixed { lengths, .. } => lengths.push(length),
            Shapes::PerRow(_) => unreachable!("only called for a fixed template"),
        }
        self.rows.push(Some(bytes));
    }

    fn refuse(&self, why: &'static str) -> Error {
        Error::new(ErrorKind::InvalidInput, "make ragged column", why).with("dtype", self.dtype)
    }

    /// Rows from values: arrays, nested lists of numbers, or nulls.
    ///
    /// Without `dtype`, arrays bring their own, lists of whole numbers are int64, lists of floats
    /// float64 and lists of truth values bool; empty lists do not take part. Rows of different
    /// element types are an error. Without `template`, a common one is used where all
    /// rows have one with the first dimension ragged.
    pub fn from_values(
        values: &[Value],
        dtype: Option<Dtype>,
        template: Option<Template>,
        rounding: Rounding,
    ) -> Result<Ragged<'static>> {
        let fail = |row: usize, why: &'static str| {
            Error::new(ErrorKind::InvalidInput, "make ragged column", why).with("row", row)
        };
        let kind = row_kind(values)?;
        let dtype = match dtype {
            Some(dtype) => dtype,
            None => common_dtype(values)?,
        };
        let mut rows = Vec::with_capacity(values.len());
        for (i, value) in values.iter().enumerate() {
            rows.push(match value {
                Value::Null => None,
                Value::Array(array) if array.dtype() == dtype => {
                    Some((array.shape().to_vec(), array.data().clone()))
                }
                Value::Array(array) => {
                    return Err(fail(i, "rows of different element types")
                        .with("expected", dtype)
                        .with("found", array.dtype())
                        .remedy("convert the rows, or declare the element type they have"));
                }
                list => {
                    let mut shape = ListShape::default();
                    let mut bytes = Vec::new();
                    flatten(list, 0, &mut shape, &mut |x| {
                        element::push(dtype, x, rounding, &mut bytes)
                    })
                    .map_err(|e| e.with("row", i))?;
                    Some((shape.dims, Bytes::from(bytes)))
                }
            });
        }
        let template = template
            .or_else(|| common_template(rows.iter().flatten().map(|(shape, _)| &shape[..])));
        let mut column = match template {
            Some(template) => Ragged::new(dtype, kind, template)?,
            None => Ragged::irregular(dtype, kind),
        };
        for row in rows {
            match row {
                Some((shape, bytes)) => column.push_shaped(&shape, bytes)?,
                None => column.push_null(),
            }
        }
        Ok(column)
    }

    /// The same rows as other Python objects.
    #[must_use]
    pub fn with_kind(self, kind: RowKind) -> Self {
        Self { kind, ..self }
    }

    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.rows.len() as u64
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
            Shapes::Fixed { template, .. } => Some(template),
            Shapes::PerRow(_) => None,
        }
    }

    /// Bytes of row `i`; `None` for a null row.
    pub fn row(&self, i: usize) -> Option<&[u8]> {
        self.rows[i].as_deref()
    }

    /// Bytes of all rows; `None` for a null row.
    pub fn pieces(&self) -> &[Option<Piece<'a>>] {
        &self.rows
    }

    /// Length of row `i` in the ragged dimension; `None` if rows have no common template.
    pub fn length(&self, i: usize) -> Option<u64> {
        match &self.shapes {
            Shapes::Fixed { lengths, .. } => Some(lengths[i]),
            Shapes::PerRow(_) => None,
        }
    }

    /// Shape of row `i`; `None` for a null row.
    pub fn shape(&self, i: usize) -> Option<Vec<u64>> {
        self.rows[i].as_ref().map(|_| match &self.shapes {
            Shapes::Fixed { template, lengths, .. } => template.shape(lengths[i]),
            Shapes::PerRow(shapes) => shapes[i].to_vec(),
        })
    }

    /// Bytes of all rows together.
    pub fn nbytes(&self) -> u64 {
        self.rows.iter().flatten().map(|row| row.len() as u64).sum()
    }

    /// Whether any row is null.
    pub fn has_nulls(&self) -> bool {
        self.rows.iter().any(Option::is_none)
    }

    /// The rows as Python would hold them. Arrays share the column's counted memory.
    pub fn to_values(&self) -> Result<Vec<Value>> {
        (0..self.rows.len())
            .map(|i| {
                let (Some(shape), Some(piece)) = (self.shape(i), &self.rows[i]) else {
                    return Ok(Value::Null);
                };
                let (library, list) = match &self.kind {
                    RowKind::Torch => (Library::Torch, false),
                    RowKind::Numpy => (Library::Numpy, false),
                    RowKind::List => (Library::Numpy, true),
                    RowKind::Mixed(arrays) => (Library::Numpy, !arrays[i]),
                };
                let meta = TensorMeta::new(self.dtype, shape)?;
                let array = Array::new(library, meta, piece.to_bytes())?;
                if list { array.to_value() } else { Ok(Value::Array(array)) }
            })
            .collect()
    }
}

/// A number type that rows can be made of in Rust.
pub trait Element: bytemuck::Pod {
    /// Its element type.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($t:ty => $d:ident),*) => {
        $(impl Element for $t { const DTYPE: Dtype = Dtype::$d; })*
    };
}
elements!(f32 => Float32, f64 => Float64, i64 => Int64, i32 => Int32, i16 => Int16, i8 => Int8,
    u64 => Uint64, u32 => Uint32, u16 => Uint16, u8 => Uint8);

/// The shape that all rows share but for their first dimension; `None` if there is none.
pub(crate) fn common_template<'s>(mut shapes: impl Iterator<Item = &'s [u64]>) -> Option<Template> {
    let Some(first) = shapes.next() else { return Some(Template::flat()) };
    let tail = first.get(1..)?;
    shapes.all(|shape| shape.get(1..) == Some(tail)).then(|| Template::tail(tail))
}

fn row_kind(values: &[Value]) -> Result<RowKind> {
    let library = |library: Library| {
        values.iter().any(|v| matches!(v, Value::Array(a) if a.library() == library))
    };
    let lists = values.iter().any(|v| !matches!(v, Value::Array(_) | Value::Null));
    Ok(match (library(Library::Torch), library(Library::Numpy), lists) {
        (true, false, false) => RowKind::Torch,
        (true, ..) => {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "make ragged column",
                "torch tensors beside other rows",
            ));
        }
        (false, true, true) => {
            RowKind::Mixed(values.iter().map(|v| matches!(v, Value::Array(_))).collect())
        }
        (false, false, true) => RowKind::List,
        (false, _, false) => RowKind::Numpy,
    })
}

fn common_dtype(values: &[Value]) -> Result<Dtype> {
    let mut found: Option<Dtype> = None;
    let mut meet = |row: usize, dtype: Dtype| {
        let both = match found {
            None => dtype,
            Some(before) if before == dtype => dtype,
            Some(before) => {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    "make ragged column",
                    "rows of different element types",
                )
                .with("row", row)
                .with("expected", before)
                .with("found", dtype)
                .remedy("convert the rows, or declare an element type in the schema"));
            }
        };
        found = Some(both);
        Ok(())
    };
    for (i, value) in values.iter().enumerate() {
        match value {
            Value::Null => {}
            Value::Array(array) => meet(i, array.dtype())?,
            list => flatten(list, 0, &mut ListShape::default(), &mut |x| {
                let dtype = match x {
                    Value::Bool(_) => Dtype::Bool,
                    Value::Int(_) => Dtype::Int64,
                    _ => Dtype::Float64,
                };
                meet(i, dtype)
            })?,
        }
    }
    Ok(found.unwrap_or(Dtype::Int64))
}

/// Shape of nested lists, as far as they were seen.
#[derive(Default)]
struct ListShape {
    dims: Vec<u64>,
    /// A number was seen, so there are no more dimensions.
    complete: bool,
}

/// Visits the numbers of nested lists and finds their shape; lists of uneven length are refused.
fn flatten(
    value: &Value,
    depth: usize,
    shape: &mut ListShape,
    visit: &mut impl FnMut(&Value) -> Result<()>,
) -> Result<()> {
    let refuse = |why| Error::new(ErrorKind::InvalidInput, "read row", why);
    match value {
        Value::List(items) => {
            if depth >= TensorMeta::MAX_RANK {
                return Err(refuse("lists nested too deeply"));
            }
            match shape.dims.get(depth) {
                None if shape.complete => return Err(refuse("numbers beside lists")),
                None => shape.dims.push(items.len() as u64),
                Some(&len) if len == items.len() as u64 => {}
                Some(_) => return Err(refuse("inner lists of different lengths")),
            }
            items.iter().try_for_each(|item| flatten(item, depth + 1, shape, visit))
        }
        Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
            if shape.dims.len() > depth {
                return Err(refuse("numbers beside lists"));
            }
            shape.complete = true;
            visit(value)
        }
        other => Err(refuse("not a number").with("found", other.kind())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> Value {
        crate::json::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn the_ragged_dimension_is_declared_not_guessed() {
        // Rows [3, L]: equal lengths, one row and L = 0 change nothing about the layout.
        let template = Template { before: [3].into(), after: [].into() };
        for lengths in [&[2, 2][..], &[3], &[0], &[1, 0, 4]] {
            let mut column = Ragged::new(Dtype::Int16, RowKind::Torch, template.clone()).unwrap();
            for &l in lengths {
                column.push(vec![0; 6 * l]).unwrap();
            }
            for (i, &l) in lengths.iter().enumerate() {
                assert_eq!(column.shape(i).unwrap(), [3, l as u64]);
            }
        }
        let mut column = Ragged::new(Dtype::Int16, RowKind::Torch, template).unwrap();
        assert!(column.push(vec![0; 7]).is_err());
        assert!(column.push_shaped(&[2, 3], vec![0; 12]).is_err());
    }

    #[test]
    fn a_fixed_dimension_of_zero_keeps_the_length() {
        let mut column =
            Ragged::new(Dtype::Float32, RowKind::Numpy, Template::tail([0, 128])).unwrap();
        assert!(column.push(vec![]).is_err(), "the length cannot be known");
        column.push_shaped(&[5, 0, 128], vec![]).unwrap();
        assert_eq!(column.shape(0).unwrap(), [5, 0, 128]);
    }

    #[test]
    fn lists_bring_their_type_and_shape() {
        let rows = [list("[1,2]"), list("[]"), Value::Null, list("[3]")];
        let column = Ragged::from_values(&rows, None, None, Rounding::Exact).unwrap();
        assert_eq!((column.dtype(), column.kind()), (Dtype::Int64, &RowKind::List));
        assert_eq!(column.to_values().unwrap(), rows);
        let rows = [list("[[1.5],[2.0]]"), list("[[3.0]]")];
        let column = Ragged::from_values(&rows, None, None, Rounding::Exact).unwrap();
        assert_eq!(column.dtype(), Dtype::Float64);
        assert_eq!(column.template().unwrap(), &Template::tail([1]));
        let rows = [list("[[1,2]]"), list("[1,2]")];
        let column = Ragged::from_values(&rows, None, None, Rounding::Exact).unwrap();
        assert!(column.template().is_none());
        assert_eq!(column.to_values().unwrap(), rows);
    }

    #[test]
    fn mixed_rows_are_refused() {
        let array = |dtype| {
            let meta = TensorMeta::new(dtype, [0]).unwrap();
            Value::Array(Array::new(Library::Numpy, meta, vec![]).unwrap())
        };
        for rows in [
            vec![array(Dtype::Int32), array(Dtype::Int64)],
            vec![array(Dtype::Int32), list("[1.5]")],
            vec![list("[true]"), list("[1]")],
            vec![list("[1]"), list("[1.5]")],
            vec![list("[[1],[2,3]]")],
            vec![list("[1,[2]]")],
            vec![list("[\"a\"]")],
        ] {
            assert!(Ragged::from_values(&rows, None, None, Rounding::Exact).is_err(), "{rows:?}");
        }
    }

    #[test]
    fn overflowing_templates_are_refused() {
        assert!(Ragged::new(Dtype::Int64, RowKind::List, Template::tail([u64::MAX, 2])).is_err());
    }
}
