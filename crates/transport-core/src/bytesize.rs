//! Sizes in bytes as people write them: one grammar for flags, files and environment variables.

use std::{fmt, str::FromStr};

use crate::{Error, ErrorKind, Result};

/// A number of bytes, at most 2^63 - 1.
///
/// Grammar: a whole or decimal number, optional blanks, an optional unit, case ignored.
/// `KiB MiB GiB TiB` and the bare letters `K M G T` are powers of 1024; `KB MB GB TB` are powers
/// of 1000; no unit (or `B`) means bytes. A decimal number must come out as whole bytes.
/// Negative numbers, exponents, percentages and hexadecimal are refused.
///
/// ```
/// use transport_core::ByteSize;
/// assert_eq!("32GiB".parse::<ByteSize>()?.get(), 32 << 30);
/// assert_eq!("32 GB".parse::<ByteSize>()?.get(), 32_000_000_000);
/// assert_eq!("1.5g".parse::<ByteSize>()?.get(), 3 << 29);
/// # Ok::<(), transport_core::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ByteSize(u64);

impl ByteSize {
    /// Exactly `bytes`; `None` above 2^63 - 1.
    pub const fn new(bytes: u64) -> Option<Self> {
        if bytes <= i64::MAX as u64 { Some(Self(bytes)) } else { None }
    }

    /// `n` times 1024^2 bytes, saturating.
    pub const fn mib(n: u32) -> Self {
        Self((n as u64) << 20)
    }

    /// The number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl FromStr for ByteSize {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = |why: &'static str| {
            Error::new(ErrorKind::ConfigInvalid, "parse size", why)
                .with("found", format_args!("{text:?}"))
                .remedy("write a number and a unit, such as 2GiB, 512MiB or 1500000")
        };
        let text = text.trim();
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let scale: u64 = match unit.trim_start().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ if number.is_empty() => return Err(invalid("does not start with a number")),
            _ => return Err(invalid("unknown unit")),
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() || (number.contains('.') && fraction.is_empty()) {
            return Err(invalid("does not start with a number"));
        }
        let too_large = || invalid("larger than 2^63 - 1 bytes");
        let whole: u128 = whole.parse().map_err(|_| too_large())?;
        if fraction.len() > 18 || fraction.contains('.') {
            return Err(invalid("not a decimal number"));
        }
        let denominator = 10u128.pow(fraction.len() as u32);
        let fraction: u128 = if fraction.is_empty() {
            0
        } else {
            fraction.parse().map_err(|_| invalid("not a decimal number"))?
        };
        let part = fraction * u128::from(scale);
        if !part.is_multiple_of(denominator) {
            return Err(invalid("does not come out as whole bytes"));
        }
        let bytes = whole
            .checked_mul(u128::from(scale))
            .and_then(|b| b.checked_add(part / denominator))
            .ok_or_else(too_large)?;
        u64::try_from(bytes).ok().and_then(Self::new).ok_or_else(too_large)
    }
}

impl fmt::Display for ByteSize {
    /// The largest binary unit that leaves a whole number, such as `2GiB`; `{:#}` rounds to two
    /// decimals instead, such as `37.72 GiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u64); 4] =
            [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        if f.alternate() {
            for (unit, scale) in UNITS {
                if self.0 >= scale {
                    return write!(f, "{:.2} {unit}", self.0 as f64 / scale as f64);
                }
            }
            return write!(f, "{} B", self.0);
        }
        for (unit, scale) in UNITS {
            if self.0 >= scale && self.0.is_multiple_of(scale) {
                return write!(f, "{}{unit}", self.0 / scale);
            }
        }
        write!(f, "{}", self.0)
    }
}

impl fmt::Debug for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl serde::Serialize for ByteSize {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for ByteSize {
    /// Takes a string in the grammar above or a bare whole number of bytes.
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"2GiB\" or a number of bytes")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<ByteSize, E> {
                ByteSize::new(bytes).ok_or_else(|| E::custom("larger than 2^63 - 1 bytes"))
            }

            fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<ByteSize, E> {
                u64::try_from(bytes).map(ByteSize).map_err(|_| E::custom("a size is not negative"))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_write_sizes_in_many_ways() {
        for (text, bytes) in [
            ("32GiB", 32 << 30),
            ("32 GB", 32_000_000_000),
            ("32g", 32 << 30),
            ("0", 0),
            ("34359738367", 34_359_738_367),
            (" 512 MiB ", 512 << 20),
            ("0.5k", 512),
            ("1b", 1),
        ] {
            assert_eq!(text.parse::<ByteSize>().unwrap().get(), bytes, "{text}");
        }
        for text in
            ["1.5e9", "-5", "50%", "0x10", "", "GiB", ".5g", "1.", "1.5", "1.2.3k", "9999999T"]
        {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    #[test]
    fn display_parses_back() {
        for bytes in [0, 1, 1023, 1024, 1536, 2 << 30, (2 << 30) + 512, i64::MAX as u64] {
            let size = ByteSize::new(bytes).unwrap();
            assert_eq!(size.to_string().parse::<ByteSize>().unwrap(), size);
        }
        assert_eq!(format!("{:#}", ByteSize(40_503_867_376)), "37.72 GiB");
    }
}
