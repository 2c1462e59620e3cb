//! Columns: one field of a rollout, over all its rows.
//!
//! A column knows its element type, how rows are shaped, which rows are null and what Python
//! object a row is; its bytes stay wherever the producer has them until an encoder gathers them.

use std::{fmt, ops::Deref};

use bytes::Bytes;
use indexmap::IndexMap;
use transport_core::{Dtype, Error, ErrorKind, RegionSlice, Result, TensorMeta};

use crate::{Array, Library, nested::Nested, ragged::Ragged};

/// A run of bytes: borrowed from the producer, or counted.
#[derive(Clone)]
pub enum Piece<'a> {
    /// Memory that the producer keeps for as long as the column is used.
    Borrowed(&'a [u8]),
    /// Memory that lives as long as anyone holds it.
    Shared(Bytes),
}

impl Piece<'_> {
    /// The bytes as counted memory; copies borrowed ones.
    pub fn to_bytes(&self) -> Bytes {
        match self {
            Self::Borrowed(bytes) => Bytes::copy_from_slice(bytes),
            Self::Shared(bytes) => bytes.clone(),
        }
    }
}

impl Deref for Piece<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }
}

impl<'a> From<&'a [u8]> for Piece<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Borrowed(bytes)
    }
}

impl From<Bytes> for Piece<'_> {
    fn from(bytes: Bytes) -> Self {
        Self::Shared(bytes)
    }
}

impl From<Vec<u8>> for Piece<'_> {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Shared(bytes.into())
    }
}

impl TryFrom<RegionSlice> for Piece<'_> {
    type Error = Error;

    /// Refuses device memory, which the CPU cannot gather from.
    fn try_from(region: RegionSlice) -> Result<Self> {
        if !region.kind().is_host() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "make column",
                "the row lives in device memory",
            )
            .remedy("copy rows to host memory first"));
        }
        Ok(Self::Shared(Bytes::from_owner(region)))
    }
}

impl fmt::Debug for Piece<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

/// One field over all rows.
#[derive(Clone, Debug)]
pub enum Column<'a> {
    /// Numeric rows of different lengths.
    Ragged(Ragged<'a>),
    /// One array whose first dimension is the row.
    Dense(Dense<'a>),
    /// One number a row, some perhaps null.
    Scalars(Scalars<'a>),
    /// One run of bytes a row: text, bytes, JSON, MessagePack or a picture.
    Blobs(Blobs<'a>),
    /// A list of pictures or byte strings a row.
    MediaList(MediaList<'a>),
    /// A dict from name to tensor a row.
    TensorDict(TensorDict<'a>),
    /// Dicts and lists with arrays or bytes inside.
    Nested(Nested<'a>),
}

impl Column<'_> {
    /// Number of rows.
    pub fn rows(&self) -> u64 {
        match self {
            Self::Ragged(c) => c.rows(),
            Self::Dense(c) => c.rows(),
            Self::Scalars(c) => c.rows(),
            Self::Blobs(c) => c.rows.len() as u64,
            Self::MediaList(c) => c.rows.len() as u64,
            Self::TensorDict(c) => c.nulls.len() as u64,
            Self::Nested(c) => c.rows(),
        }
    }

    /// Element type, if the column has one.
    pub fn dtype(&self) -> Option<Dtype> {
        match self {
            Self::Ragged(c) => Some(c.dtype()),
            Self::Dense(c) => Some(c.meta.dtype()),
            Self::Scalars(c) => Some(c.dtype),
            _ => None,
        }
    }

    /// Whether any row is null.
    pub fn has_nulls(&self) -> bool {
        match self {
            Self::Ragged(c) => c.has_nulls(),
            Self::Dense(_) => false,
            Self::Scalars(c) => c.nulls.iter().any(|&null| null),
            Self::Blobs(c) => c.rows.iter().any(Option::is_none),
            Self::MediaList(c) => c.rows.iter().any(Option::is_none),
            Self::TensorDict(c) => c.nulls.iter().any(|&null| null),
            Self::Nested(c) => c.has_nulls(),
        }
    }
}

/// One array whose first dimension is the row.
#[derive(Clone, Debug)]
pub struct Dense<'a> {
    library: Library,
    meta: TensorMeta,
    data: Piece<'a>,
}

impl<'a> Dense<'a> {
    /// An array over `data`, which must have exactly the bytes that `meta` says.
    pub fn new(library: Library, meta: TensorMeta, data: impl Into<Piece<'a>>) -> Result<Self> {
        let data = data.into();
        let invalid = |why: &'static str| {
            Error::new(ErrorKind::InvalidInput, "make column", why).with("array", &meta)
        };
        if meta.shape().is_empty() {
            return Err(invalid("a single number is no column"));
        }
        if data.len() as u64 != meta.nbytes() {
            return Err(invalid("the bytes do not match element type and shape")
                .with("expected_bytes", meta.nbytes())
                .with("found_bytes", data.len()));
        }
        Ok(Self { library, meta, data })
    }

    /// Length of the first dimension.
    pub fn rows(&self) -> u64 {
        self.meta.shape()[0]
    }

    /// Whose object it is on the Python side.
    pub fn library(&self) -> Library {
        self.library
    }

    /// Element type and shape.
    pub fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    /// Row-major little-endian elements.
    pub fn data(&self) -> &Piece<'a> {
        &self.data
    }

    /// The whole array.
    pub fn to_array(&self) -> Array {
        Array::new(self.library, self.meta.clone(), self.data.to_bytes())
            .expect("checked by the constructor")
    }
}

/// One number a row. A null row has a zero in `data`.
#[derive(Clone, Debug)]
pub struct Scalars<'a> {
    dtype: Dtype,
    data: Piece<'a>,
    nulls: Vec<bool>,
}

impl<'a> Scalars<'a> {
    /// Numbers without a null.
    pub fn new(dtype: Dtype, data: impl Into<Piece<'a>>) -> Result<Self> {
        let data = data.into();
        let rows = data.len() as u64 / dtype.size();
        Self::with_nulls(dtype, data, vec![false; rows as usize])
    }

    /// Numbers of which those with `true` in `nulls` do not count.
    pub fn with_nulls(dtype: Dtype, data: impl Into<Piece<'a>>, nulls: Vec<bool>) -> Result<Self> {
        let data = data.into();
        if Some(data.len() as u64) != (nulls.len() as u64).checked_mul(dtype.size()) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "make column",
                "bytes and nulls disagree about the number of rows",
            )
            .with("dtype", dtype)
            .with("bytes", data.len())
            .with("rows", nulls.len()));
        }
        Ok(Self { dtype, data, nulls })
    }

    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.nulls.len() as u64
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Little-endian elements.
    pub fn data(&self) -> &Piece<'a> {
        &self.data
    }

    /// Which rows are null.
    pub fn nulls(&self) -> &[bool] {
        &self.nulls
    }
}

/// What the bytes of a [`Blobs`] row mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the names say it
pub enum BlobKind {
    Bytes,
    Utf8,
    Json,
    MessagePack,
    /// Bytes, or raw pixels described by [`Blobs::pixels`].
    Media,
}

/// One run of bytes a row.
#[derive(Clone, Debug)]
pub struct Blobs<'a> {
    /// What they mean.
    pub kind: BlobKind,
    /// The bytes; `None` for a null row.
    pub rows: Vec<Option<Piece<'a>>>,
    /// For pictures: how the pixels are laid out; `None` for a row of plain bytes. Either empty or
    /// one a row.
    pub pixels: Vec<Option<Pixels>>,
}

/// Layout of raw pixels.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Pixels {
    /// Pixel format by its PIL name, such as `RGB`.
    pub mode: String,
    /// Width and height.
    pub size: [u32; 2],
    /// File format that the picture came from.
    pub format: Option<String>,
}

/// A list of pictures or byte strings a row.
#[derive(Clone, Debug, Default)]
pub struct MediaList<'a> {
    /// How many items each row has; `None` for a null row.
    pub rows: Vec<Option<u64>>,
    /// The items of all rows, one after the other.
    pub items: Vec<MediaItem<'a>>,
}

/// One item of a [`MediaList`].
#[derive(Clone, Debug)]
pub struct MediaItem<'a> {
    /// Bytes or pixels.
    pub data: Piece<'a>,
    /// How the pixels are laid out; `None` for plain bytes.
    pub pixels: Option<Pixels>,
}

/// A dict from name to tensor a row. A row that lacks a name has a null in that name's column.
#[derive(Clone, Debug)]
pub struct TensorDict<'a> {
    /// One ragged column a name.
    pub columns: IndexMap<String, Ragged<'a>>,
    /// Rows that are null altogether.
    pub nulls: Vec<bool>,
}

#[cfg(test)]
mod tests {
    use transport_core::RegionMut;

    use super::*;

    #[test]
    fn constructors_check_sizes() {
        let meta = TensorMeta::new(Dtype::Int32, [2, 3]).unwrap();
        assert_eq!(Dense::new(Library::Numpy, meta.clone(), vec![0; 24]).unwrap().rows(), 2);
        assert!(Dense::new(Library::Numpy, meta, vec![0; 23]).is_err());
        let scalar = TensorMeta::new(Dtype::Int32, []).unwrap();
        assert!(Dense::new(Library::Numpy, scalar, vec![0; 4]).is_err());
        assert_eq!(Scalars::new(Dtype::Float64, vec![0; 16]).unwrap().rows(), 2);
        assert!(Scalars::new(Dtype::Float64, vec![0; 15]).is_err());
        assert!(Scalars::with_nulls(Dtype::Bool, vec![0; 2], vec![false; 3]).is_err());
    }

    #[test]
    fn a_piece_keeps_its_region_alive() {
        let region = RegionMut::zeroed(16).unwrap().freeze();
        let piece = Piece::try_from(region.slice(4..8).unwrap()).unwrap();
        assert_eq!(piece.as_ptr(), region.as_bytes().unwrap()[4..].as_ptr(), "no copy");
        drop(region);
        assert_eq!(&*piece, [0; 4]);
    }
}
