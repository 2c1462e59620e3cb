//! Checksums of tensors: which kinds there are, how one is asked for, and the one that devices make.

use std::{fmt, str::FromStr};

use transport_core::{Error, ErrorKind, Result};

use super::response::READ;

/// Multiplier of a word's place.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
/// Multiplier of a word.
const MULTIPLIER: u64 = 0xd6e8_feb8_6659_fd93;

/// How the bytes of a tensor are summed up, to 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChecksumKind {
    /// XXH3, which one thread computes from the first byte to the last.
    Xxh3,
    /// [`Mixsum`], of which any number of threads compute parts in any order.
    Mixsum,
}

impl ChecksumKind {
    /// Every kind.
    pub const ALL: [Self; 2] = [Self::Xxh3, Self::Mixsum];

    /// Its name in requests, and before the digits of a checksum.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Xxh3 => "xxh3",
            Self::Mixsum => "mixsum",
        }
    }

    /// Reads the value of [`CHECKSUMS_HEADER`](super::CHECKSUMS_HEADER): the kinds that the client
    /// can compare, the one that it likes best first. Unknown ones are left out.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where none of them is known.
    pub fn parse_list(text: &str) -> Result<Vec<Self>> {
        let kinds: Vec<_> = text.split(',').filter_map(|name| Self::of(name.trim())).collect();
        if kinds.is_empty() {
            return Err(Error::new(ErrorKind::Unsupported, "capture", "unknown checksum")
                .with("header", super::CHECKSUMS_HEADER)
                .with("found", format_args!("{:?}", super::shortened(text)))
                .remedy("ask for xxh3, mixsum or both"));
        }
        Ok(kinds)
    }

    fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for ChecksumKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A checksum of 64 bits; its kind, a colon and 16 hexadecimal digits on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Checksum {
    /// How it was made.
    pub kind: ChecksumKind,
    /// Its value.
    pub value: u64,
}

impl Checksum {
    /// A checksum of that kind.
    pub const fn new(kind: ChecksumKind, value: u64) -> Self {
        Self { kind, value }
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{:016x}", self.kind, self.value)
    }
}

impl FromStr for Checksum {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parse = || {
            let (kind, digits) = text.split_once(':')?;
            let all_digits = digits.len() == 16 && digits.bytes().all(|b| b.is_ascii_hexdigit());
            let digits = all_digits.then_some(digits)?;
            Some(Self::new(ChecksumKind::of(kind)?, u64::from_str_radix(digits, 16).ok()?))
        };
        parse().ok_or_else(|| READ.error("not a checksum of the form xxh3:<16 hexadecimal digits>"))
    }
}

/// A sum of mixed words, for memory that many threads read at once.
///
/// The bytes are taken as little-endian words of 64 bits, the last one filled up with zeros, and
/// counted from 1; word 0 is the number of bytes. The checksum is the sum, modulo 2^64, of
/// `mix(word ^ number * 0x9e3779b97f4a7c15)` over all of them, where `mix` does twice
/// `x ^= x >> 32; x *= 0xd6e8feb86659fd93`, and `x ^= x >> 32` at the end. So every bit and every
/// place counts, and parts can be summed up in any order. It finds damage, not forgery.
///
/// ```
/// use control_proto::capture::Mixsum;
/// let mut parts = Mixsum::default();
/// parts.update(&[1; 24]);
/// parts.update(&[2; 5]);
/// assert_eq!(parts.finish(), Mixsum::of(&[&[1; 24][..], &[2; 5]].concat()));
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Mixsum {
    sum: u64,
    bytes: u64,
}

impl Mixsum {
    /// The checksum of `bytes`.
    pub fn of(bytes: &[u8]) -> u64 {
        let mut whole = Self::default();
        whole.update(bytes);
        whole.finish()
    }

    /// Adds the bytes that come next.
    ///
    /// # Panics
    /// If there were bytes before that do not end a word.
    pub fn update(&mut self, bytes: &[u8]) {
        assert!(self.bytes.is_multiple_of(8), "only the last part may end within a word");
        let mut place = (self.bytes / 8).wrapping_mul(GAMMA);
        self.bytes += bytes.len() as u64;
        let (words, rest) = bytes.as_chunks();
        for word in words {
            place = place.wrapping_add(GAMMA);
            self.sum = self.sum.wrapping_add(mix(u64::from_le_bytes(*word) ^ place));
        }
        if !rest.is_empty() {
            let mut word = [0; 8];
            word[..rest.len()].copy_from_slice(rest);
            place = place.wrapping_add(GAMMA);
            self.sum = self.sum.wrapping_add(mix(u64::from_le_bytes(word) ^ place));
        }
    }

    /// The checksum of all bytes that were added.
    pub fn finish(self) -> u64 {
        self.sum.wrapping_add(mix(self.bytes))
    }
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 32)).wrapping_mul(MULTIPLIER);
    x = (x ^ (x >> 32)).wrapping_mul(MULTIPLIER);
    x ^ (x >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    }

    /// Made from the definition by a program in another language.
    const GOLDEN: [(usize, u64); 6] = [
        (0, 0),
        (1, 0x8f91_7fc8_e0dc_1a49),
        (8, 0xb0d6_23a1_3e72_c123),
        (13, 0xbabc_78a3_d0ff_271b),
        (512, 0x43b6_3601_69b7_45f9),
        (100_003, 0x0a7e_52cf_1738_c339),
    ];

    #[test]
    fn the_sum_is_as_it_is_defined() {
        for (len, sum) in GOLDEN {
            assert_eq!(Mixsum::of(&bytes(len)), sum, "{len} bytes: {:#x}", Mixsum::of(&bytes(len)));
        }
    }

    #[test]
    fn every_bit_every_place_and_the_length_count() {
        let bytes = bytes(1000);
        let sum = Mixsum::of(&bytes);
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 1 << (at % 8);
            assert_ne!(Mixsum::of(&other), sum, "a bit of byte {at}");
        }
        let mut swapped = bytes.clone();
        swapped[..16].rotate_left(8);
        assert_ne!(Mixsum::of(&swapped), sum, "two words changed places");
        let longer = [&bytes[..], &[0]].concat();
        assert_ne!(Mixsum::of(&longer), sum, "a zero at the end");
    }

    #[test]
    fn parts_come_to_the_same() {
        let bytes = bytes(4099);
        for cut in [0, 8, 64, 4096] {
            let mut parts = Mixsum::default();
            parts.update(&bytes[..cut]);
            parts.update(&bytes[cut..]);
            assert_eq!(parts.finish(), Mixsum::of(&bytes), "{cut}");
        }
    }

    #[test]
    fn kinds_are_asked_for_in_order_and_strangers_are_skipped() {
        use ChecksumKind::{Mixsum, Xxh3};
        assert_eq!(ChecksumKind::parse_list("xxh3").unwrap(), [Xxh3]);
        assert_eq!(ChecksumKind::parse_list(" mixsum,md5 , xxh3").unwrap(), [Mixsum, Xxh3]);
        for none in ["", "md5", "XXH3", ","] {
            let error = ChecksumKind::parse_list(none).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{none}");
        }
    }

    #[test]
    fn checksums_survive_their_text() {
        for kind in ChecksumKind::ALL {
            let sum = Checksum::new(kind, 0xff);
            assert_eq!(sum.to_string(), format!("{kind}:00000000000000ff"));
            assert_eq!(sum.to_string().parse::<Checksum>().unwrap(), sum);
        }
        for bad in ["", "xxh3", "xxh3:ff", "md5:00000000000000ff", "xxh3:+0000000000000ff"] {
            assert!(bad.parse::<Checksum>().is_err(), "{bad}");
        }
    }
}
