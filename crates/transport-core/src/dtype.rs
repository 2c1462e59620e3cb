//! Element types and tensor shapes.

use std::{fmt, str::FromStr};

use smallvec::SmallVec;

use crate::{Error, ErrorKind, Result};

/// Element type of a tensor, by its torch name without the `torch.` prefix.
///
/// The first ten are those of the capture wire; the rest appear in rollouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)] // the names are torch's
pub enum Dtype {
    Float32,
    Float64,
    Float16,
    Bfloat16,
    Int64,
    Int32,
    Int16,
    Int8,
    Uint8,
    Bool,
    Uint16,
    Uint32,
    Uint64,
    Float8E4m3fn,
    Float8E5m2,
    Complex64,
    Complex128,
}

impl Dtype {
    /// Every element type, capture types first.
    pub const ALL: [Self; 17] = [
        Self::Float32,
        Self::Float64,
        Self::Float16,
        Self::Bfloat16,
        Self::Int64,
        Self::Int32,
        Self::Int16,
        Self::Int8,
        Self::Uint8,
        Self::Bool,
        Self::Uint16,
        Self::Uint32,
        Self::Uint64,
        Self::Float8E4m3fn,
        Self::Float8E5m2,
        Self::Complex64,
        Self::Complex128,
    ];

    /// The name on the wire, such as `bfloat16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Float64 => "float64",
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
            Self::Int64 => "int64",
            Self::Int32 => "int32",
            Self::Int16 => "int16",
            Self::Int8 => "int8",
            Self::Uint8 => "uint8",
            Self::Bool => "bool",
            Self::Uint16 => "uint16",
            Self::Uint32 => "uint32",
            Self::Uint64 => "uint64",
            Self::Float8E4m3fn => "float8_e4m3fn",
            Self::Float8E5m2 => "float8_e5m2",
            Self::Complex64 => "complex64",
            Self::Complex128 => "complex128",
        }
    }

    /// Bytes of one element: 1, 2, 4, 8 or 16.
    pub const fn size(self) -> u64 {
        match self {
            Self::Complex128 => 16,
            Self::Float64 | Self::Int64 | Self::Uint64 | Self::Complex64 => 8,
            Self::Float32 | Self::Int32 | Self::Uint32 => 4,
            Self::Float16 | Self::Bfloat16 | Self::Int16 | Self::Uint16 => 2,
            Self::Int8 | Self::Uint8 | Self::Bool | Self::Float8E4m3fn | Self::Float8E5m2 => 1,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Dtype {
    type Err = Error;

    /// Accepts the wire name, with or without `torch.`; an unknown name is never guessed at.
    fn from_str(name: &str) -> Result<Self> {
        let bare = name.strip_prefix("torch.").unwrap_or(name);
        Self::ALL.into_iter().find(|d| d.name() == bare).ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, "parse dtype", "unknown element type")
                .with("found", format_args!("{name:?}"))
                .remedy(format!("use one of {}", Self::ALL.map(Self::name).join(", ")))
        })
    }
}

/// Element type and shape of a tensor; its size in bytes is known to fit in 63 bits.
///
/// Memory is row-major (C order) and contiguous; strides do not exist here.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct TensorMeta {
    dtype: Dtype,
    shape: SmallVec<[u64; 4]>, // in place for nearly all: a fetch copies one for each tensor
    nbytes: u64,
}

impl TensorMeta {
    /// Largest number of dimensions accepted.
    pub const MAX_RANK: usize = 32;

    /// Describes a tensor; refuses a shape whose byte size exceeds `i64::MAX` or whose rank
    /// exceeds [`Self::MAX_RANK`]. A dimension of zero is fine: the tensor has no bytes.
    pub fn new(dtype: Dtype, shape: impl Into<Box<[u64]>>) -> Result<Self> {
        let shape = shape.into();
        let invalid = |why: &'static str| {
            Error::new(ErrorKind::InvalidInput, "describe tensor", why)
                .with("dtype", dtype)
                .with("shape", format_args!("{shape:?}"))
        };
        if shape.len() > Self::MAX_RANK {
            return Err(invalid("too many dimensions").with("max_rank", Self::MAX_RANK));
        }
        // Zero anywhere makes the tensor empty, but the other dimensions must still make sense.
        let mut nonzero = shape.iter().filter(|&&d| d != 0);
        let bytes = nonzero
            .try_fold(dtype.size(), |acc, &d| acc.checked_mul(d))
            .filter(|&n| n <= i64::MAX as u64)
            .ok_or_else(|| invalid("the size in bytes overflows"))?;
        let nbytes = if shape.contains(&0) { 0 } else { bytes };
        Ok(Self { dtype, shape: SmallVec::from_slice(&shape), nbytes })
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Dimensions, outermost first.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Size in bytes.
    #[inline]
    pub fn nbytes(&self) -> u64 {
        self.nbytes
    }
}

impl fmt::Debug for TensorMeta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape)
    }
}

impl fmt::Display for TensorMeta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_parses_back() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype.name().parse::<Dtype>().unwrap(), dtype);
            assert_eq!(format!("torch.{dtype}").parse::<Dtype>().unwrap(), dtype);
        }
        let error = "float7".parse::<Dtype>().unwrap_err();
        assert!(error.to_string().contains("bfloat16"), "{error}");
    }

    #[test]
    fn sizes_are_exact_and_checked() {
        let meta = TensorMeta::new(Dtype::Bfloat16, [1, 8192, 25600]).unwrap();
        assert_eq!(meta.nbytes(), 419_430_400);
        assert_eq!(TensorMeta::new(Dtype::Int64, []).unwrap().nbytes(), 8, "0-d is one element");
        assert_eq!(TensorMeta::new(Dtype::Int64, [3, 0]).unwrap().nbytes(), 0);
        assert!(TensorMeta::new(Dtype::Int64, [u64::MAX, 2]).is_err());
        assert!(TensorMeta::new(Dtype::Int64, [u64::MAX, 2, 0]).is_err(), "nonsense beside a zero");
        assert!(TensorMeta::new(Dtype::Uint8, [1 << 63]).is_err());
        assert!(TensorMeta::new(Dtype::Uint8, vec![1; 33]).is_err());
    }
}
