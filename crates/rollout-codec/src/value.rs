//! Values as Python holds them: what rows of a rollout are, when they are not raw memory.

use bytes::Bytes;
use indexmap::IndexMap;
use transport_core::{Dtype, Error, ErrorKind, Result, TensorMeta};

use crate::element;

/// A value with nothing lost: whole numbers are not floats, lists are not arrays, bytes are not
/// text.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the names say it
pub enum Value {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(String),
    Bytes(Bytes),
    List(Vec<Self>),
    Map(IndexMap<String, Self>),
    Array(Array),
    Image(Image),
}

/// Which library's object an array is on the Python side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Library {
    /// `numpy.ndarray`.
    Numpy,
    /// `torch.Tensor` on the CPU.
    Torch,
}

/// An array of numbers: element type, shape, and its row-major little-endian bytes.
///
/// Cloning copies no bytes. Two arrays are equal when their bytes are, so NaN equals itself.
#[derive(Clone, PartialEq, Eq)]
pub struct Array {
    library: Library,
    meta: TensorMeta,
    data: Bytes,
}

/// Lists that an array without elements may turn into.
pub(crate) const MAX_EMPTY_LISTS: u64 = 1 << 20;

/// Raw pixels of a decoded picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Pixel format by its PIL name, such as `RGB`.
    pub mode: String,
    /// Width and height in pixels.
    pub size: [u32; 2],
    /// File format that the picture came from, such as `PNG`, if known.
    pub format: Option<String>,
    /// The pixels, row by row from the top.
    pub data: Bytes,
}

impl Value {
    /// Equality that takes NaN as equal to itself and tells -0.0 from 0.0.
    pub fn same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Float(a), Self::Float(b)) => {
                a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
            }
            (Self::List(a), Self::List(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.same(b))
            }
            (Self::Map(a), Self::Map(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|((n, a), (m, b))| n == m && a.same(b))
            }
            _ => self == other,
        }
    }

    /// The Python type of the value, such as `list` or `ndarray int64[2, 3]`.
    pub fn kind(&self) -> String {
        match self {
            Self::Null => "NoneType".into(),
            Self::Bool(_) => "bool".into(),
            Self::Int(_) => "int".into(),
            Self::Float(_) => "float".into(),
            Self::Str(_) => "str".into(),
            Self::Bytes(_) => "bytes".into(),
            Self::List(_) => "list".into(),
            Self::Map(_) => "dict".into(),
            Self::Array(array) => array.kind(),
            Self::Image(_) => "Image".into(),
        }
    }

    /// The entry `name` of a map.
    pub fn get(&self, name: &str) -> Option<&Self> {
        match self {
            Self::Map(map) => map.get(name),
            _ => None,
        }
    }

    /// The text, if it is one.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(s) => Some(s),
            _ => None,
        }
    }

    /// The whole number, if it is one that is not negative and fits.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Int(n) => u64::try_from(*n).ok(),
            _ => None,
        }
    }

    /// The items, if it is a list.
    pub fn as_list(&self) -> Option<&[Self]> {
        match self {
            Self::List(items) => Some(items),
            _ => None,
        }
    }

    /// The entries, if it is a map.
    pub fn as_map(&self) -> Option<&IndexMap<String, Self>> {
        match self {
            Self::Map(map) => Some(map),
            _ => None,
        }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Str(text.to_owned())
    }
}

impl From<u64> for Value {
    fn from(n: u64) -> Self {
        Self::Int(n.into())
    }
}

/// A map from its entries, in order.
pub(crate) fn map<const N: usize>(entries: [(&str, Value); N]) -> Value {
    Value::Map(entries.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}

impl Array {
    /// An array over `data`, which must have exactly the bytes that `meta` says.
    pub fn new(library: Library, meta: TensorMeta, data: impl Into<Bytes>) -> Result<Self> {
        let data = data.into();
        if data.len() as u64 != meta.nbytes() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "make array",
                "the bytes do not match element type and shape",
            )
            .with("array", &meta)
            .with("expected_bytes", meta.nbytes())
            .with("found_bytes", data.len()));
        }
        Ok(Self { library, meta, data })
    }

    /// Whose object it is on the Python side.
    pub fn library(&self) -> Library {
        self.library
    }

    /// Element type and shape.
    pub fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.meta.dtype()
    }

    /// Dimensions, outermost first.
    pub fn shape(&self) -> &[u64] {
        self.meta.shape()
    }

    /// Row-major little-endian elements.
    pub fn data(&self) -> &Bytes {
        &self.data
    }

    /// `ndarray int64[2, 3]` or `torch.int64[2, 3]`.
    pub fn kind(&self) -> String {
        let prefix = match self.library {
            Library::Numpy => "ndarray ",
            Library::Torch => "torch.",
        };
        format!("{prefix}{}{:?}", self.meta.dtype(), self.meta.shape())
    }

    /// Nested lists of numbers, or one number if there are no dimensions.
    pub fn to_value(&self) -> Result<Value> {
        // An array without elements can still claim any number of empty lists.
        let outer = self.shape().iter().take_while(|&&d| d != 0);
        let lists = outer.fold(1u64, |n, &d| n.saturating_mul(d));
        if self.data.is_empty() && lists > MAX_EMPTY_LISTS {
            return Err(Error::new(ErrorKind::Corrupt, "list array", "too many empty lists")
                .with("array", &self.meta)
                .with("max", MAX_EMPTY_LISTS));
        }
        let mut elements = element::values(self.meta.dtype(), &self.data)?.into_iter();
        Ok(nest(self.meta.shape(), &mut elements))
    }
}

/// Arranges elements in lists of lists; `elements` holds at least as many as the shape asks for.
fn nest(shape: &[u64], elements: &mut impl Iterator<Item = Value>) -> Value {
    match shape {
        [] => elements.next().expect("one element for every position of the shape"),
        // Without elements the outer lists are still there, and they may be many: [1000000, 0].
        [len, rest @ ..] => Value::List((0..*len).map(|_| nest(rest, elements)).collect()),
    }
}

impl std::fmt::Debug for Array {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({} bytes)", self.kind(), self.data.len())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Values that JSON and MessagePack can both hold.
    pub(crate) fn any_plain_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::Bool),
            any::<i64>().prop_map(|n| Value::Int(n.into())),
            any::<u64>().prop_map(|n| Value::Int(n.into())),
            any::<f64>().prop_map(Value::Float),
            Just(Value::Float(f64::NAN)),
            Just(Value::Float(f64::NEG_INFINITY)),
            "\\PC{0,40}".prop_map(Value::Str),
            "[\\x00-\\x7f]{0,8}".prop_map(Value::Str),
        ];
        leaf.prop_recursive(4, 64, 20, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..20).prop_map(Value::List),
                prop::collection::vec(("\\PC{0,8}", inner), 0..20)
                    .prop_map(|entries| Value::Map(entries.into_iter().collect())),
            ]
        })
    }

    #[test]
    fn arrays_know_their_python_type_and_nest() {
        let meta = TensorMeta::new(Dtype::Int16, [2, 1, 2]).unwrap();
        let array = Array::new(Library::Numpy, meta.clone(), vec![1, 0, 2, 0, 3, 0, 255, 255]);
        let array = array.unwrap();
        assert_eq!(array.kind(), "ndarray int16[2, 1, 2]");
        let text = crate::json::write(&array.to_value().unwrap(), crate::json::Style::COMPACT);
        assert_eq!(text.unwrap(), "[[[1,2]],[[3,-1]]]");
        assert!(Array::new(Library::Torch, meta, vec![0; 7]).is_err());
        let empty = TensorMeta::new(Dtype::Float32, [0, 3]).unwrap();
        let empty = Array::new(Library::Torch, empty, vec![]).unwrap();
        assert_eq!(
            (empty.kind().as_str(), empty.to_value().unwrap()),
            ("torch.float32[0, 3]", Value::List(vec![]))
        );
    }
}
