//! Elements of arrays as values, and values as elements, exactly.

use bytes::Bytes;
use half::{bf16, f16};
use transport_core::{Dtype, Error, ErrorKind, Result};

use crate::Value;

/// Whether a number that the element type cannot hold exactly is an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// Every number must come back as it went in.
    #[default]
    Exact,
    /// Floats are rounded to the nearest one that the element type has, as numpy does. Whole
    /// numbers out of range and fractions in integer types are still errors.
    Nearest,
}

/// Every element of `data`; the length must be a multiple of the element size.
pub(crate) fn values(dtype: Dtype, data: &[u8]) -> Result<Vec<Value>> {
    fn each<const N: usize>(data: &[u8], value: impl Fn([u8; N]) -> Value) -> Vec<Value> {
        data.chunks_exact(N).map(|c| value(c.try_into().expect("N bytes"))).collect()
    }
    let float = |x: f64| Value::Float(x);
    if !(data.len() as u64).is_multiple_of(dtype.size()) {
        return Err(Error::new(ErrorKind::Corrupt, "read elements", "a fraction of an element")
            .with("dtype", dtype)
            .with("bytes", data.len()));
    }
    Ok(match dtype {
        Dtype::Float64 => each(data, |b| float(f64::from_le_bytes(b))),
        Dtype::Float32 => each(data, |b| float(f32::from_le_bytes(b).into())),
        Dtype::Float16 => each(data, |b| float(f16::from_le_bytes(b).to_f64())),
        Dtype::Bfloat16 => each(data, |b| float(bf16::from_le_bytes(b).to_f64())),
        Dtype::Float8E5m2 => each(data, |[b]| float(e5m2(b))),
        Dtype::Float8E4m3fn => each(data, |[b]| float(e4m3fn(b))),
        Dtype::Int64 => each(data, |b| Value::Int(i64::from_le_bytes(b).into())),
        Dtype::Int32 => each(data, |b| Value::Int(i32::from_le_bytes(b).into())),
        Dtype::Int16 => each(data, |b| Value::Int(i16::from_le_bytes(b).into())),
        Dtype::Int8 => each(data, |b| Value::Int(i8::from_le_bytes(b).into())),
        Dtype::Uint64 => each(data, |b| Value::Int(u64::from_le_bytes(b).into())),
        Dtype::Uint32 => each(data, |b| Value::Int(u32::from_le_bytes(b).into())),
        Dtype::Uint16 => each(data, |b| Value::Int(u16::from_le_bytes(b).into())),
        Dtype::Uint8 => each(data, |[b]| Value::Int(b.into())),
        Dtype::Bool => each(data, |[b]| Value::Bool(b != 0)),
        _ => return Err(unsupported(dtype)),
    })
}

/// Appends one number as an element.
pub(crate) fn push(
    dtype: Dtype,
    value: &Value,
    rounding: Rounding,
    out: &mut Vec<u8>,
) -> Result<()> {
    let refuse = |why: &'static str| {
        let found = match value {
            Value::Int(n) => n.to_string(),
            Value::Float(x) => x.to_string(),
            other => other.kind(),
        };
        Error::new(ErrorKind::InvalidInput, "write elements", why)
            .with("dtype", dtype)
            .with("found", found)
    };
    macro_rules! int {
        ($t:ty) => {{
            let n = whole(value).ok_or_else(|| refuse("not a whole number"))?;
            let n = <$t>::try_from(n).map_err(|_| refuse("out of range of the element type"))?;
            out.extend(n.to_le_bytes());
        }};
    }
    macro_rules! float {
        ($narrow:expr, $widen:expr) => {{
            let x = number(value, rounding)
                .ok_or_else(|| refuse("not a number that a float holds exactly"))?;
            let narrow = $narrow(x);
            let back: f64 = $widen(narrow);
            let exact = back == x || (back.is_nan() && x.is_nan());
            if !exact && (rounding == Rounding::Exact || back.is_infinite() && x.is_finite()) {
                return Err(refuse("the element type does not hold the number exactly")
                    .remedy("declare float64, or allow rounding in the schema"));
            }
            out.extend(narrow.to_le_bytes());
        }};
    }
    match dtype {
        Dtype::Float64 => float!(|x: f64| x, |x: f64| x),
        Dtype::Float32 => float!(|x: f64| x as f32, f64::from),
        Dtype::Float16 => float!(f16::from_f64, |x: f16| x.to_f64()),
        Dtype::Bfloat16 => float!(bf16::from_f64, |x: bf16| x.to_f64()),
        Dtype::Float8E5m2 => float!(|x| nearest(x, e5m2), e5m2),
        Dtype::Float8E4m3fn => float!(|x| nearest(x, e4m3fn), e4m3fn),
        Dtype::Int64 => int!(i64),
        Dtype::Int32 => int!(i32),
        Dtype::Int16 => int!(i16),
        Dtype::Int8 => int!(i8),
        Dtype::Uint64 => int!(u64),
        Dtype::Uint32 => int!(u32),
        Dtype::Uint16 => int!(u16),
        Dtype::Uint8 => int!(u8),
        Dtype::Bool => match value {
            Value::Bool(b) => out.push((*b).into()),
            Value::Int(0 | 1) => out.push(u8::from(*value == Value::Int(1))),
            _ => return Err(refuse("not a truth value")),
        },
        _ => return Err(unsupported(dtype)),
    }
    Ok(())
}

/// Reverses the bytes of every element.
pub(crate) fn swap_bytes(dtype: Dtype, data: &[u8]) -> Bytes {
    let unit = match dtype {
        Dtype::Complex64 => 4, // two floats
        Dtype::Complex128 => 8,
        other => other.size() as usize,
    };
    let mut out = data.to_vec();
    out.chunks_exact_mut(unit).for_each(<[u8]>::reverse);
    out.into()
}

fn unsupported(dtype: Dtype) -> Error {
    Error::new(ErrorKind::Unsupported, "convert elements", "no number form for the element type")
        .with("dtype", dtype)
        .remedy("move such columns as arrays; only their raw bytes are kept")
}

fn whole(value: &Value) -> Option<i128> {
    match value {
        Value::Int(n) => Some(*n),
        Value::Bool(b) => Some((*b).into()),
        _ => None,
    }
}

fn number(value: &Value, rounding: Rounding) -> Option<f64> {
    match value {
        Value::Float(x) => Some(*x),
        _ => {
            let n = whole(value)?;
            let x = n as f64;
            (rounding == Rounding::Nearest || x as i128 == n).then_some(x)
        }
    }
}

/// Sign, 5 bits of exponent, 2 of mantissa: the upper half of a float16.
fn e5m2(byte: u8) -> f64 {
    f16::from_bits(u16::from(byte) << 8).to_f64()
}

/// Sign, 4 bits of exponent, 3 of mantissa; no infinities, one NaN of each sign.
fn e4m3fn(byte: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa * 2f64.powi(-9),
        _ => (8.0 + mantissa) * 2f64.powi(exponent - 10),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The eight-bit float nearest to `x`, ties to the even one; with its sign for zero.
fn nearest(x: f64, value: fn(u8) -> f64) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    if x.is_nan() {
        return sign | 0x7f;
    }
    let distance = |byte: u8| {
        let candidate = value(byte);
        if candidate == x.abs() { 0.0 } else { (candidate - x.abs()).abs() }
    };
    let best = (0..0x7f)
        .filter(|&b| !value(b).is_nan())
        .min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))))
        .expect("there are candidates");
    sign | best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_pattern_of_small_types_survives() {
        for dtype in [Dtype::Float8E4m3fn, Dtype::Float8E5m2, Dtype::Int8, Dtype::Uint8] {
            let all: Vec<u8> = (0..=255).collect();
            let mut back = Vec::new();
            for (byte, value) in all.iter().zip(values(dtype, &all).unwrap()) {
                back.clear();
                push(dtype, &value, Rounding::Exact, &mut back).unwrap();
                let nan = matches!(value, Value::Float(x) if x.is_nan());
                assert!(back == [*byte] || nan, "{dtype} {byte:#x} {value:?} {back:x?}");
            }
        }
        for dtype in [Dtype::Float16, Dtype::Bfloat16, Dtype::Int16, Dtype::Uint16] {
            let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
            for (bits, value) in all.chunks(2).zip(values(dtype, &all).unwrap()) {
                let mut back = Vec::new();
                push(dtype, &value, Rounding::Exact, &mut back).unwrap();
                let nan = matches!(value, Value::Float(x) if x.is_nan());
                assert!(back == bits || nan, "{dtype} {bits:x?} {value:?} {back:x?}");
            }
        }
    }

    #[test]
    fn known_values() {
        let v = |dtype, bytes: &[u8]| values(dtype, bytes).unwrap().remove(0);
        assert_eq!(v(Dtype::Float8E4m3fn, &[0x7e]), Value::Float(448.0));
        assert_eq!(v(Dtype::Float8E4m3fn, &[0x38]), Value::Float(1.0));
        assert_eq!(v(Dtype::Float8E5m2, &[0x7b]), Value::Float(57344.0));
        assert_eq!(v(Dtype::Bfloat16, &[0x80, 0x3f]), Value::Float(1.0));
        assert_eq!(v(Dtype::Uint64, &[0xff; 8]), Value::Int(u64::MAX.into()));
    }

    #[test]
    fn nothing_is_rounded_or_cut_unless_asked() {
        let push = |dtype, value: Value, rounding| push(dtype, &value, rounding, &mut Vec::new());
        assert!(push(Dtype::Float32, Value::Float(0.1), Rounding::Exact).is_err());
        assert!(push(Dtype::Float32, Value::Float(0.1), Rounding::Nearest).is_ok());
        assert!(push(Dtype::Float32, Value::Float(1e300), Rounding::Nearest).is_err());
        assert!(push(Dtype::Float64, Value::Int((1 << 53) + 1), Rounding::Exact).is_err());
        assert!(push(Dtype::Int64, Value::Float(1.0), Rounding::Nearest).is_err());
        assert!(push(Dtype::Int32, Value::Int(1 << 31), Rounding::Nearest).is_err());
        assert!(push(Dtype::Uint8, Value::Int(-1), Rounding::Nearest).is_err());
        assert!(push(Dtype::Bool, Value::Int(2), Rounding::Nearest).is_err());
        assert!(push(Dtype::Int64, Value::Str("1".into()), Rounding::Nearest).is_err());
        assert!(push(Dtype::Complex64, Value::Int(1), Rounding::Nearest).is_err());
        assert!(values(Dtype::Int32, &[0; 5]).is_err());
    }

    #[test]
    fn swapping_twice_is_nothing() {
        assert_eq!(swap_bytes(Dtype::Int32, &[1, 2, 3, 4]), vec![4, 3, 2, 1]);
        assert_eq!(
            swap_bytes(Dtype::Complex64, &[1, 2, 3, 4, 5, 6, 7, 8]),
            vec![4, 3, 2, 1, 8, 7, 6, 5]
        );
    }
}
