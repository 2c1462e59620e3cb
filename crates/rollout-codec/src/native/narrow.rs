//! Whole numbers in fewer bytes, with every number checked, and back.

use transport_core::{Dtype, Error, ErrorKind, RegionMut, RegionSlice, Result};

trait Int: Copy {
    const SIZE: usize;
    fn read(bytes: &[u8]) -> i64;
    /// Writes the number; `false` if it does not fit.
    fn write(n: i64, out: &mut [u8]) -> bool;
}

macro_rules! ints {
    ($($t:ty),*) => {$(
        impl Int for $t {
            const SIZE: usize = size_of::<$t>();

            fn read(bytes: &[u8]) -> i64 {
                // Above i64::MAX a u64 turns negative, which no narrower unsigned type takes; the
                // signed ones are not offered for it.
                <$t>::from_le_bytes(bytes.try_into().expect("one element")) as i64
            }

            fn write(n: i64, out: &mut [u8]) -> bool {
                out.copy_from_slice(&(n as $t).to_le_bytes());
                n as $t as i64 == n
            }
        }
    )*};
}
ints!(i64, i32, i16, i8, u64, u32, u16, u8);

/// Whether `wire` can hold some of the whole numbers of `dtype` in fewer bytes.
pub(super) fn is_narrowing(dtype: Dtype, wire: Dtype) -> bool {
    let signed = |d| matches!(d, Dtype::Int64 | Dtype::Int32 | Dtype::Int16 | Dtype::Int8);
    let unsigned = |d| matches!(d, Dtype::Uint64 | Dtype::Uint32 | Dtype::Uint16 | Dtype::Uint8);
    wire.size() < dtype.size()
        && (signed(dtype) && (signed(wire) || unsigned(wire)) || unsigned(dtype) && unsigned(wire))
}

/// Converts elements; the index of the first that does not fit is the error.
fn convert<F: Int, T: Int>(from: &[u8], to: &mut [u8]) -> std::result::Result<(), usize> {
    let mut fits = true;
    for (from, to) in from.chunks_exact(F::SIZE).zip(to.chunks_exact_mut(T::SIZE)) {
        fits &= T::write(F::read(from), to);
    }
    if fits {
        return Ok(());
    }
    let first = from
        .chunks_exact(F::SIZE)
        .position(|from| !T::write(F::read(from), &mut [0; 8][..T::SIZE]));
    Err(first.expect("one did not fit"))
}

fn convert_from<F: Int>(
    from: &[u8],
    to_dtype: Dtype,
    to: &mut [u8],
) -> std::result::Result<(), usize> {
    match to_dtype {
        Dtype::Int64 => convert::<F, i64>(from, to),
        Dtype::Int32 => convert::<F, i32>(from, to),
        Dtype::Int16 => convert::<F, i16>(from, to),
        Dtype::Int8 => convert::<F, i8>(from, to),
        Dtype::Uint64 => convert::<F, u64>(from, to),
        Dtype::Uint32 => convert::<F, u32>(from, to),
        Dtype::Uint16 => convert::<F, u16>(from, to),
        _ => convert::<F, u8>(from, to),
    }
}

/// Converts elements between two types of which one is a narrowing of the other.
pub(super) fn elements(
    from_dtype: Dtype,
    from: &[u8],
    to_dtype: Dtype,
    to: &mut [u8],
) -> Result<()> {
    debug_assert_eq!(
        from.len() as u64 / from_dtype.size(),
        to.len() as u64 / to_dtype.size(),
        "as many elements on both sides"
    );
    let done = match from_dtype {
        Dtype::Int64 => convert_from::<i64>(from, to_dtype, to),
        Dtype::Int32 => convert_from::<i32>(from, to_dtype, to),
        Dtype::Int16 => convert_from::<i16>(from, to_dtype, to),
        Dtype::Int8 => convert_from::<i8>(from, to_dtype, to),
        Dtype::Uint64 => convert_from::<u64>(from, to_dtype, to),
        Dtype::Uint32 => convert_from::<u32>(from, to_dtype, to),
        Dtype::Uint16 => convert_from::<u16>(from, to_dtype, to),
        _ => convert_from::<u8>(from, to_dtype, to),
    };
    done.map_err(|element| {
        let size = from_dtype.size() as usize;
        let at = element * size;
        let found = crate::element::values(from_dtype, &from[at..at + size]);
        let found = found.ok().and_then(|mut values| match values.pop() {
            Some(crate::Value::Int(n)) => Some(n),
            _ => None,
        });
        Error::new(ErrorKind::InvalidInput, "narrow elements", "a number does not fit")
            .with("from", from_dtype)
            .with("to", to_dtype)
            .with("element", element)
            .with("found", found.unwrap_or_default())
            .remedy("narrow less, or not at all")
    })
}

/// `wire` numbers as `dtype` numbers: the same memory unless they differ.
pub(crate) fn widened(narrow: RegionSlice, dtype: Dtype, wire: Dtype) -> Result<RegionSlice> {
    if dtype == wire {
        return Ok(narrow);
    }
    let elements = narrow.len() as u64 / wire.size();
    let len = elements.checked_mul(dtype.size()).and_then(|n| usize::try_from(n).ok());
    let len = len.ok_or_else(|| {
        Error::new(ErrorKind::Corrupt, "widen elements", "too long for an address space")
    })?;
    let mut wide = RegionMut::zeroed(len)?;
    self::elements(wire, narrow.as_ref(), dtype, wide.as_mut_bytes().expect("host memory"))?;
    Ok(wide.freeze())
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTS: [Dtype; 8] = [
        Dtype::Int64,
        Dtype::Int32,
        Dtype::Int16,
        Dtype::Int8,
        Dtype::Uint64,
        Dtype::Uint32,
        Dtype::Uint16,
        Dtype::Uint8,
    ];

    #[test]
    fn what_fits_comes_back_and_what_does_not_is_refused() {
        let numbers: Vec<i128> = [7, 8, 15, 16, 31, 32, 63, 64]
            .into_iter()
            .flat_map(|bits| {
                (-2..=1).flat_map(move |d| [(1i128 << bits) + d, -(1i128 << bits) + d])
            })
            .chain([0, 1, -1])
            .collect();
        let range = |d: Dtype| {
            let bits = d.size() * 8;
            match d.name().starts_with('u') {
                true => 0..=(1i128 << bits) - 1,
                false => -(1i128 << (bits - 1))..=(1i128 << (bits - 1)) - 1,
            }
        };
        for dtype in INTS {
            for wire in INTS.into_iter().filter(|&wire| is_narrowing(dtype, wire)) {
                for &n in numbers.iter().filter(|n| range(dtype).contains(n)) {
                    let wide = &n.to_le_bytes()[..dtype.size() as usize];
                    let mut narrow = vec![0; wire.size() as usize];
                    let fits = elements(dtype, wide, wire, &mut narrow).is_ok();
                    assert_eq!(fits, range(wire).contains(&n), "{n}: {dtype} as {wire}");
                    if fits {
                        let mut back = vec![0; dtype.size() as usize];
                        elements(wire, &narrow, dtype, &mut back).unwrap();
                        assert_eq!(back, wide, "{n}: {dtype} as {wire}");
                    }
                }
            }
        }
    }

    #[test]
    fn only_whole_numbers_are_narrowed() {
        assert!(is_narrowing(Dtype::Int64, Dtype::Uint8));
        assert!(!is_narrowing(Dtype::Uint64, Dtype::Int32), "the sign would be ambiguous");
        assert!(!is_narrowing(Dtype::Int32, Dtype::Int32));
        assert!(!is_narrowing(Dtype::Int16, Dtype::Int32));
        assert!(!is_narrowing(Dtype::Float64, Dtype::Float32));
        assert!(!is_narrowing(Dtype::Int64, Dtype::Bool));
    }
}
