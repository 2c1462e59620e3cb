//! MessagePack values, read with bounds and written as Python's `msgpack` writes them
//! (`use_bin_type`, smallest form of every number, doubles for floats).

use bytes::Bytes;
use indexmap::IndexMap;
use transport_core::{Error, ErrorKind, Result};

use crate::{Value, json::MAX_DEPTH};

/// Reads the first value of `bytes` and says how many bytes it took.
///
/// Extension types and map keys that are not text are refused by name.
pub fn parse_prefix(bytes: &Bytes) -> Result<(Value, usize)> {
    let mut reader = Reader { bytes, at: 0 };
    let value = reader.value(0)?;
    Ok((value, reader.at))
}

/// Reads exactly one value.
pub fn parse(bytes: &Bytes) -> Result<Value> {
    let (value, used) = parse_prefix(bytes)?;
    if used != bytes.len() {
        return Err(invalid(used, "something follows the value"));
    }
    Ok(value)
}

/// Appends one value.
pub fn write(value: &Value, out: &mut Vec<u8>) -> Result<()> {
    write_value(value, 0, out)
}

fn invalid(at: usize, why: &'static str) -> Error {
    Error::new(ErrorKind::Corrupt, "parse MessagePack", why).with("byte", at)
}

struct Reader<'a> {
    bytes: &'a Bytes,
    at: usize,
}

impl Reader<'_> {
    fn take(&mut self, len: usize) -> Result<&[u8]> {
        let end = self.at.checked_add(len).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| invalid(self.at, "the value is cut off"))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.take(N)?.try_into().expect("took N bytes"))
    }

    fn length(&mut self, width: usize) -> Result<usize> {
        Ok(match width {
            1 => usize::from(self.array::<1>()?[0]),
            2 => usize::from(u16::from_be_bytes(self.array()?)),
            _ => u32::from_be_bytes(self.array()?) as usize,
        })
    }

    fn value(&mut self, depth: usize) -> Result<Value> {
        if depth > MAX_DEPTH {
            return Err(invalid(self.at, "nested too deeply").with("max_depth", MAX_DEPTH));
        }
        let tag = self.array::<1>()?[0];
        Ok(match tag {
            0x00..=0x7f => Value::Int(tag.into()),
            0xe0..=0xff => Value::Int((tag as i8).into()),
            0x80..=0x8f => self.map(usize::from(tag & 15), depth)?,
            0x90..=0x9f => self.list(usize::from(tag & 15), depth)?,
            0xa0..=0xbf => self.text(usize::from(tag & 31))?,
            0xc0 => Value::Null,
            0xc2 => Value::Bool(false),
            0xc3 => Value::Bool(true),
            0xc4..=0xc6 => {
                let len = self.length(1 << (tag - 0xc4))?;
                let start = self.at;
                self.take(len)?;
                Value::Bytes(self.bytes.slice(start..start + len))
            }
            0xca => Value::Float(f32::from_be_bytes(self.array()?).into()),
            0xcb => Value::Float(f64::from_be_bytes(self.array()?)),
            0xcc => Value::Int(self.array::<1>()?[0].into()),
            0xcd => Value::Int(u16::from_be_bytes(self.array()?).into()),
            0xce => Value::Int(u32::from_be_bytes(self.array()?).into()),
            0xcf => Value::Int(u64::from_be_bytes(self.array()?).into()),
            0xd0 => Value::Int(i8::from_be_bytes(self.array()?).into()),
            0xd1 => Value::Int(i16::from_be_bytes(self.array()?).into()),
            0xd2 => Value::Int(i32::from_be_bytes(self.array()?).into()),
            0xd3 => Value::Int(i64::from_be_bytes(self.array()?).into()),
            0xd9..=0xdb => {
                let len = self.length(1 << (tag - 0xd9))?;
                self.text(len)?
            }
            0xdc | 0xdd => {
                let len = self.length(2 << (tag - 0xdc))?;
                self.list(len, depth)?
            }
            0xde | 0xdf => {
                let len = self.length(2 << (tag - 0xde))?;
                self.map(len, depth)?
            }
            0xc1 => return Err(invalid(self.at - 1, "an unused type byte")),
            0xc7..=0xc9 | 0xd4..=0xd8 => {
                return Err(invalid(self.at - 1, "extension types are not read")
                    .with("type_byte", format_args!("{tag:#04x}")));
            }
        })
    }

    fn text(&mut self, len: usize) -> Result<Value> {
        let at = self.at;
        let text = std::str::from_utf8(self.take(len)?);
        Ok(Value::Str(text.map_err(|_| invalid(at, "text is not UTF-8"))?.to_owned()))
    }

    fn list(&mut self, len: usize, depth: usize) -> Result<Value> {
        // A declared length allocates nothing: every item takes at least one byte to arrive.
        let mut items = Vec::with_capacity(len.min(self.bytes.len() - self.at));
        for _ in 0..len {
            items.push(self.value(depth + 1)?);
        }
        Ok(Value::List(items))
    }

    fn map(&mut self, len: usize, depth: usize) -> Result<Value> {
        let mut map = IndexMap::with_capacity(len.min((self.bytes.len() - self.at) / 2));
        for _ in 0..len {
            let at = self.at;
            let Value::Str(name) = self.value(depth + 1)? else {
                return Err(invalid(at, "a map key is not text"));
            };
            if map.insert(name, self.value(depth + 1)?).is_some() {
                return Err(invalid(at, "a map key occurs twice"));
            }
        }
        Ok(Value::Map(map))
    }
}

fn write_value(value: &Value, depth: usize, out: &mut Vec<u8>) -> Result<()> {
    let refuse = |why: &'static str| Error::new(ErrorKind::InvalidInput, "write MessagePack", why);
    if depth > MAX_DEPTH {
        return Err(refuse("nested too deeply"));
    }
    match value {
        Value::Null => out.push(0xc0),
        Value::Bool(false) => out.push(0xc2),
        Value::Bool(true) => out.push(0xc3),
        Value::Int(n) => write_int(*n, out)
            .ok_or_else(|| refuse("a whole number needs more than 64 bits").with("value", n))?,
        Value::Float(x) => {
            out.push(0xcb);
            out.extend(x.to_be_bytes());
        }
        Value::Str(s) => write_text(s, out)?,
        Value::Bytes(b) => {
            write_length(b.len(), None, [Some(0xc4), Some(0xc5), Some(0xc6)], out)?;
            out.extend(b.as_ref());
        }
        Value::List(items) => {
            write_length(items.len(), Some((0x90, 15)), [None, Some(0xdc), Some(0xdd)], out)?;
            items.iter().try_for_each(|item| write_value(item, depth + 1, out))?;
        }
        Value::Map(map) => {
            write_length(map.len(), Some((0x80, 15)), [None, Some(0xde), Some(0xdf)], out)?;
            for (name, item) in map {
                write_text(name, out)?;
                write_value(item, depth + 1, out)?;
            }
        }
        Value::Array(_) => return Err(refuse("an array is no MessagePack value")),
        Value::Image(_) => return Err(refuse("an image is no MessagePack value")),
    }
    Ok(())
}

fn write_text(text: &str, out: &mut Vec<u8>) -> Result<()> {
    write_length(text.len(), Some((0xa0, 31)), [Some(0xd9), Some(0xda), Some(0xdb)], out)?;
    out.extend(text.as_bytes());
    Ok(())
}

/// The smallest form; unsigned where the number is not negative. `None` beyond 64 bits.
fn write_int(n: i128, out: &mut Vec<u8>) -> Option<()> {
    match n {
        0..=0x7f => out.push(n as u8),
        0x80..=0xff => out.extend([0xcc, n as u8]),
        0x100..=0xffff => {
            out.push(0xcd);
            out.extend((n as u16).to_be_bytes());
        }
        0x1_0000..=0xffff_ffff => {
            out.push(0xce);
            out.extend((n as u32).to_be_bytes());
        }
        0x1_0000_0000.. => {
            let n = u64::try_from(n).ok()?;
            out.push(0xcf);
            out.extend(n.to_be_bytes());
        }
        -0x20..=-1 => out.push(n as i8 as u8),
        -0x80..=-0x21 => out.extend([0xd0, n as i8 as u8]),
        -0x8000..=-0x81 => {
            out.push(0xd1);
            out.extend((n as i16).to_be_bytes());
        }
        -0x8000_0000..=-0x8001 => {
            out.push(0xd2);
            out.extend((n as i32).to_be_bytes());
        }
        _ => {
            let n = i64::try_from(n).ok()?;
            out.push(0xd3);
            out.extend(n.to_be_bytes());
        }
    }
    Some(())
}

/// `short` is the type byte and largest length of the form that carries its length inside it;
/// `tags` are those with a length of 1, 2 and 4 bytes.
fn write_length(
    len: usize,
    short: Option<(u8, usize)>,
    tags: [Option<u8>; 3],
    out: &mut Vec<u8>,
) -> Result<()> {
    match (len, short, tags) {
        (len, Some((tag, max)), _) if len <= max => out.push(tag | len as u8),
        (0..=0xff, _, [Some(tag), ..]) => out.extend([tag, len as u8]),
        (0..=0xffff, _, [_, Some(tag), _]) => {
            out.push(tag);
            out.extend((len as u16).to_be_bytes());
        }
        (_, _, [.., Some(tag)]) if u32::try_from(len).is_ok() => {
            out.push(tag);
            out.extend((len as u32).to_be_bytes());
        }
        _ => {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "write MessagePack",
                "a value is longer than 2^32 - 1",
            )
            .with("found", len));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn integers_take_their_smallest_form() {
        for (n, len) in [
            (0, 1),
            (127, 1),
            (128, 2),
            (255, 2),
            (256, 3),
            (65_535, 3),
            (65_536, 5),
            (1 << 32, 9),
            (-1, 1),
            (-32, 1),
            (-33, 2),
            (-128, 2),
            (-129, 3),
            (-32_769, 5),
            (i64::MIN.into(), 9),
            (u64::MAX.into(), 9),
        ] {
            let mut out = Vec::new();
            write(&Value::Int(n), &mut out).unwrap();
            assert_eq!(out.len(), len, "{n}");
            assert_eq!(parse(&out.into()).unwrap(), Value::Int(n));
        }
        assert!(write(&Value::Int(1 << 64), &mut Vec::new()).is_err());
    }

    #[test]
    fn bad_values_are_refused_without_allocating() {
        for bytes in [
            &[][..],
            &[0xc1],
            &[0xc7, 0, 0],
            &[0xdd, 0xff, 0xff, 0xff, 0xff],
            &[0xdf, 0xff, 0xff, 0xff, 0xff],
            &[0xc6, 0xff, 0xff, 0xff, 0xff],
            &[0xa2, 0xff, 0xff],
            &[0x81, 0x01, 0x01],
            &[0x01, 0x02],
        ] {
            assert!(parse(&Bytes::copy_from_slice(bytes)).is_err(), "{bytes:x?}");
        }
        assert!(parse(&Bytes::from(vec![0x91; 100_000])).is_err(), "no stack overflow");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes: Vec<u8>) {
            let _ = parse(&bytes.into());
        }

        #[test]
        fn values_survive(value in crate::value::tests::any_plain_value()) {
            let mut out = Vec::new();
            if write(&value, &mut out).is_ok() {
                prop_assert!(parse(&out.into()).unwrap().same(&value));
            }
        }
    }
}
