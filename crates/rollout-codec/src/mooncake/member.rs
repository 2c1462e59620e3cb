//! Members: the payloads of a structured object, by name, with what they are.

use bytes::Bytes;
use transport_core::{Dtype, Error, ErrorKind, Result, TensorMeta};

use super::{Payload, jagged, tensor};
use crate::{Array, Library, Ragged, Value, element};

/// Name of the entry of the metadata that describes the members.
pub(crate) const SPECS: &str = "__mooncake_structured_fields__";

/// A member as it was read.
#[derive(Clone, Debug)]
pub struct Member {
    /// What it is.
    pub data: MemberData,
}

/// What a member is.
#[derive(Clone, Debug)]
pub enum MemberData {
    /// A run of bytes.
    Bytes(Bytes),
    /// A numpy array or torch tensor.
    Array(Array),
    /// A nested torch tensor.
    Jagged(Ragged<'static>),
}

impl Member {
    /// Interprets `payload` as `spec` (the member's entry of the metadata) says.
    pub(crate) fn new(spec: Option<&Value>, about: &Payload, payload: Bytes) -> Result<Self> {
        let unsupported = |why: &'static str| {
            Err(Error::new(ErrorKind::Unsupported, "read member", why)
                .remedy("write it as plain CPU tensors of at least one dimension"))
        };
        let text = |name| spec.and_then(|spec| spec.get(name)).and_then(Value::as_str);
        let data = match text("encoding").unwrap_or("bytes") {
            "bytes" => MemberData::Bytes(payload),
            "ndarray" => {
                let spec = spec.expect("an encoding was found in it");
                MemberData::Array(ndarray(spec, payload)?)
            }
            "torch_tensor" => {
                let format =
                    text("format").or_else(|| about.extra.get("format").and_then(Value::as_str));
                match format {
                    Some("torch_save") => {
                        return unsupported("torch_save payloads are pickles and are not read");
                    }
                    Some("tensor_parts") => {
                        let spec = spec.expect("an encoding was found in it");
                        MemberData::Jagged(jagged::parse(spec, &payload)?)
                    }
                    _ => MemberData::Array(tensor::parse(&payload)?),
                }
            }
            other => {
                return Err(Error::new(ErrorKind::Unsupported, "read member", "unknown encoding")
                    .with("encoding", other));
            }
        };
        Ok(Self { data })
    }

    /// The value as Mooncake's reader gives it: bytes from its pool are an array of uint8. A nested
    /// tensor is a list of tensors.
    pub fn to_value(&self) -> Result<Value> {
        Ok(match &self.data {
            MemberData::Bytes(bytes) if bytes.is_empty() => Value::Bytes(bytes.clone()),
            MemberData::Bytes(bytes) => {
                let meta = TensorMeta::new(Dtype::Uint8, [bytes.len() as u64]);
                let meta = meta.expect("as long as an existing slice");
                let array = Array::new(Library::Numpy, meta, bytes.clone());
                Value::Array(array.expect("as long as itself"))
            }
            MemberData::Array(array) => Value::Array(array.clone()),
            MemberData::Jagged(rows) => Value::List(rows.to_values()?),
        })
    }
}

fn ndarray(spec: &Value, payload: Bytes) -> Result<Array> {
    let corrupt = |why: &'static str| Error::new(ErrorKind::Corrupt, "read ndarray", why);
    let name = spec.get("dtype").and_then(Value::as_str);
    let shape = spec
        .get("shape")
        .and_then(Value::as_list)
        .and_then(|shape| shape.iter().map(Value::as_u64).collect::<Option<Vec<_>>>());
    let (Some(name), Some(shape)) = (name, shape) else {
        return Err(corrupt("no dtype or no shape"));
    };
    let (dtype, big_endian) = from_numpy(name)?;
    let meta = TensorMeta::new(dtype, shape)?;
    let payload = if big_endian { element::swap_bytes(dtype, &payload) } else { payload };
    Array::new(Library::Numpy, meta, payload)
        .map_err(|e| corrupt("the payload does not match dtype and shape").source(e))
}

const NUMPY: [(&str, Dtype); 14] = [
    ("f4", Dtype::Float32),
    ("f8", Dtype::Float64),
    ("f2", Dtype::Float16),
    ("i8", Dtype::Int64),
    ("i4", Dtype::Int32),
    ("i2", Dtype::Int16),
    ("i1", Dtype::Int8),
    ("u8", Dtype::Uint64),
    ("u4", Dtype::Uint32),
    ("u2", Dtype::Uint16),
    ("u1", Dtype::Uint8),
    ("b1", Dtype::Bool),
    ("c8", Dtype::Complex64),
    ("c16", Dtype::Complex128),
];

/// Element type of numpy's `dtype.str`, such as `<f4`, and whether it is big-endian.
pub(crate) fn from_numpy(name: &str) -> Result<(Dtype, bool)> {
    let (order, code) = name.split_at_checked(1).unwrap_or(("", name));
    NUMPY
        .iter()
        .find(|(known, _)| *known == code && matches!(order, "<" | ">" | "|" | "="))
        .map(|&(_, dtype)| (dtype, order == ">"))
        .ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "read ndarray", "unknown element type")
                .with("dtype", format_args!("{name:?}"))
        })
}

/// numpy's `dtype.str`; an error for types that numpy lacks.
pub(crate) fn to_numpy(dtype: Dtype) -> Result<String> {
    let code = NUMPY.iter().find(|(_, known)| *known == dtype).map(|(code, _)| *code);
    let code = code.ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "write ndarray", "numpy has no such element type")
            .with("dtype", dtype)
            .remedy("use the native layout, which keeps every element type")
    })?;
    let order = if dtype.size() == 1 { '|' } else { '<' };
    Ok(format!("{order}{code}"))
}
