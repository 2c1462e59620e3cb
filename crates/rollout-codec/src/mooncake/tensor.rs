//! Payloads of torch tensors: a 304-byte header, then the elements.

use bytes::Bytes;
use transport_core::{Dtype, Error, ErrorKind, Result, TensorMeta};

use crate::{Array, Library};

/// Bytes before the elements.
pub(crate) const HEADER_BYTES: usize = 304;

const MAGIC: u32 = 0x4d4f_4f4e;
const VERSION: u16 = 1;
const MAX_RANK: usize = 8;
const UNUSED: i64 = -1;

/// Element types by their number in the header.
const DTYPES: [Dtype; 15] = [
    Dtype::Float32,
    Dtype::Float64,
    Dtype::Int8,
    Dtype::Uint8,
    Dtype::Int16,
    Dtype::Uint16,
    Dtype::Int32,
    Dtype::Uint32,
    Dtype::Int64,
    Dtype::Uint64,
    Dtype::Bool,
    Dtype::Float16,
    Dtype::Bfloat16,
    Dtype::Float8E4m3fn,
    Dtype::Float8E5m2,
];

/// Reads a tensor; its elements stay where they are.
pub(crate) fn parse(payload: &Bytes) -> Result<Array> {
    let corrupt = |why: &'static str| Error::new(ErrorKind::Corrupt, "read torch tensor", why);
    if payload.len() < HEADER_BYTES {
        return Err(corrupt("shorter than its header").with("bytes", payload.len()));
    }
    let field = |at: usize, len: usize| &payload[at..at + len];
    let u16_at = |at| u16::from_le_bytes(field(at, 2).try_into().expect("two bytes"));
    let u32_at = |at| u32::from_le_bytes(field(at, 4).try_into().expect("four bytes"));
    let u64_at = |at| u64::from_le_bytes(field(at, 8).try_into().expect("eight bytes"));
    if u32_at(0) != MAGIC || u16_at(4) != VERSION || usize::from(u16_at(6)) != HEADER_BYTES {
        return Err(corrupt("unknown magic, version or header size")
            .with("magic", format_args!("{:#x}", u32_at(0)))
            .with("version", u16_at(4)));
    }
    if u32_at(16) != 0 {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "read torch tensor",
            "a shard of a distributed tensor",
        ));
    }
    let dtype = DTYPES.get(u32_at(8) as usize);
    let dtype = *dtype.ok_or_else(|| corrupt("unknown element type").with("number", u32_at(8)))?;
    let rank = u32_at(12) as usize;
    if rank > MAX_RANK {
        return Err(corrupt("too many dimensions").with("found", rank));
    }
    let dims = (0..MAX_RANK).map(|i| u64_at(104 + 8 * i) as i64);
    let shape = dims
        .take(rank)
        .map(|dim| u64::try_from(dim).map_err(|_| corrupt("a negative dimension")))
        .collect::<Result<Vec<_>>>()?;
    let (offset, bytes) = (u64_at(24), u64_at(32));
    let end = offset.checked_add(bytes).filter(|&end| end == payload.len() as u64);
    if end.is_none() || offset < HEADER_BYTES as u64 {
        return Err(corrupt("the elements are not where the header says")
            .with("data_offset", offset)
            .with("data_bytes", bytes)
            .with("payload_bytes", payload.len()));
    }
    let meta = TensorMeta::new(dtype, shape)?;
    Array::new(Library::Torch, meta, payload.slice(offset as usize..))
        .map_err(|e| corrupt("the elements do not match the shape").source(e))
}

/// The header of a tensor.
pub(crate) fn header(meta: &TensorMeta) -> Result<[u8; HEADER_BYTES]> {
    let unsupported = |why: &'static str| {
        Error::new(ErrorKind::Unsupported, "write torch tensor", why).with("tensor", meta)
    };
    let number = DTYPES.iter().position(|&d| d == meta.dtype());
    let number =
        number.ok_or_else(|| unsupported("Mooncake has no number for the element type"))?;
    let shape = meta.shape();
    if shape.is_empty() || shape.len() > MAX_RANK {
        return Err(unsupported("Mooncake stores tensors of 1 to 8 dimensions"));
    }
    let mut header = [0; HEADER_BYTES];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &MAGIC.to_le_bytes());
    put(4, &VERSION.to_le_bytes());
    put(6, &(HEADER_BYTES as u16).to_le_bytes());
    put(8, &(number as u32).to_le_bytes());
    put(12, &(shape.len() as u32).to_le_bytes());
    put(24, &(HEADER_BYTES as u64).to_le_bytes());
    put(32, &meta.nbytes().to_le_bytes());
    for i in 0..MAX_RANK {
        let dim = shape.get(i).map_or(UNUSED, |&dim| dim as i64);
        put(40 + 8 * i, &dim.to_le_bytes()); // global shape
        put(104 + 8 * i, &dim.to_le_bytes()); // local shape
    }
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_survive_and_damage_is_seen() {
        for dtype in DTYPES {
            let meta = TensorMeta::new(dtype, [2, 0, 3]).unwrap();
            let bytes = header(&meta).unwrap().to_vec();
            let array = parse(&bytes.into()).unwrap();
            assert_eq!((array.meta(), array.library()), (&meta, Library::Torch));
        }
        let meta = TensorMeta::new(Dtype::Int32, [2]).unwrap();
        let good = [&header(&meta).unwrap()[..], &[1, 0, 0, 0, 2, 0, 0, 0]].concat();
        assert_eq!(&**parse(&good.clone().into()).unwrap().data(), &good[304..]);
        for at in [0, 4, 6, 8, 9, 12, 13, 16, 24, 31, 32, 104, 111] {
            let mut bad = good.clone();
            bad[at] ^= 0x90;
            assert!(parse(&bad.into()).is_err(), "byte {at}");
        }
        for len in [0, 303, 304, 311] {
            assert!(parse(&Bytes::copy_from_slice(&good[..len])).is_err(), "{len} bytes");
        }
    }
}
