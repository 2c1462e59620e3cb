//! Element types of safetensors files.

use transport_core::{Dtype, Error, ErrorKind, Result};

/// The element type that a file names.
pub(crate) fn dtype(stored: safetensors::Dtype) -> Result<Dtype> {
    use safetensors::Dtype as St;
    Ok(match stored {
        St::BOOL => Dtype::Bool,
        St::U8 => Dtype::Uint8,
        St::I8 => Dtype::Int8,
        St::F8_E5M2 => Dtype::Float8E5m2,
        St::F8_E4M3 => Dtype::Float8E4m3fn,
        St::I16 => Dtype::Int16,
        St::U16 => Dtype::Uint16,
        St::F16 => Dtype::Float16,
        St::BF16 => Dtype::Bfloat16,
        St::I32 => Dtype::Int32,
        St::U32 => Dtype::Uint32,
        St::F32 => Dtype::Float32,
        St::F64 => Dtype::Float64,
        St::I64 => Dtype::Int64,
        St::U64 => Dtype::Uint64,
        other => {
            return Err(Error::new(ErrorKind::Unsupported, "open sample", "unknown element type")
                .with("found", format_args!("{other:?}")));
        }
    })
}
