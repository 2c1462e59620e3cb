//! Objects with their lives: what lines that hold, free or give back are mostly made of.

use std::{fmt, slice};

use serde::{
    Deserialize, Deserializer,
    de::{SeqAccess, Visitor},
};
use transport_core::{RemoteAddr, Sequence};

use super::{BadLine, Limits, bad_field};
use crate::json::{ListFault, RawObject, Text, bounded_list, needs_no_escape};

/// The objects of a `hold`, `free` or `unhold` line, in order; at most [`Limits::keys_per_line`].
///
/// Each is `["key",SEQ]`, or `["key",SEQ,ADDRESS,BYTES]` where the sender says where it believes
/// the object to lie.
#[derive(Clone)]
pub struct Objects<'a>(Form<'a>);

#[derive(Clone)]
enum Form<'a> {
    /// Objects without spaces and escapes, as they are written here, checked.
    Plain {
        text: &'a str,
        count: usize,
    },
    Decoded(Vec<Object<'a>>),
}

#[derive(Clone)]
struct Object<'a> {
    key: Text<'a>,
    seq: Option<Sequence>,
    range: Option<(RemoteAddr, u64)>,
}

/// Key, life and place of an object.
type Parts<'k> = (&'k str, Option<Sequence>, Option<(RemoteAddr, u64)>);

impl<'a> Objects<'a> {
    /// Number of objects in a line that every server with default limits takes, whatever the keys.
    pub const PER_LINE: usize = 256;

    pub(super) fn parse(object: &RawObject<'a>, limits: &Limits) -> Result<Self, BadLine> {
        let list = object.get("objects").ok_or(bad_field("objects"))?;
        let limit = limits.keys_per_line;
        if let Some(plain) = Self::parse_plain(list, limit) {
            return Ok(plain);
        }
        let objects = bounded_list(list, limit).map_err(|fault| match fault {
            ListFault::TooMany => BadLine::TooManyKeys { limit },
            ListFault::Type(_) | ListFault::Syntax { .. } => bad_field("objects"),
        })?;
        Ok(Self(Form::Decoded(objects)))
    }

    /// Looks at a list in the one form in which it is mostly written; none if it is anything else.
    fn parse_plain(list: &'a str, limit: usize) -> Option<Self> {
        let text = list.strip_prefix('[')?.strip_suffix(']')?;
        if text.contains('\\') {
            return None;
        }
        let (mut rest, mut count) = (text, 0);
        while !rest.is_empty() {
            let (key, ..) = take_plain(&mut rest)?;
            // A comma is followed by another object.
            rest = if rest.is_empty() {
                rest
            } else {
                rest.strip_prefix(',').filter(|r| !r.is_empty())?
            };
            count += 1;
            if count > limit || !needs_no_escape(key) {
                return None;
            }
        }
        Some(Self(Form::Plain { text, count }))
    }

    /// Number of objects.
    pub fn len(&self) -> usize {
        match &self.0 {
            Form::Plain { count, .. } => *count,
            Form::Decoded(objects) => objects.len(),
        }
    }

    /// Whether there are no objects.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Key of each object, and the life that is meant: the current one, whichever it is, if `None`.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, Option<Sequence>)> + '_ {
        self.parts().map(|(key, seq, _)| (key, seq))
    }

    /// First address and length of each object, in the same order, where the sender says so.
    pub fn ranges(&self) -> impl ExactSizeIterator<Item = Option<(RemoteAddr, u64)>> + '_ {
        self.parts().map(|(_, _, range)| range)
    }

    fn parts(&self) -> AllParts<'_> {
        match &self.0 {
            Form::Plain { text, count } => AllParts::Plain { text, count: *count },
            Form::Decoded(objects) => AllParts::Decoded(objects.iter()),
        }
    }
}

/// Takes an object off the start of a plain list; none if it is written in any other way.
fn take_plain<'a>(rest: &mut &'a str) -> Option<Parts<'a>> {
    let text = rest.strip_prefix("[\"")?;
    let end = memchr::memchr(b'"', text.as_bytes())?;
    let (key, text) = text.split_at(end);
    let mut text = text.strip_prefix("\",")?;
    let seq = match text.strip_prefix("null") {
        Some(after) => {
            text = after;
            None
        }
        None => Some(Sequence(take_number(&mut text)?)),
    };
    let mut range = None;
    if let Some(after) = text.strip_prefix(',') {
        text = after;
        let address = RemoteAddr(take_number(&mut text)?);
        text = text.strip_prefix(',')?;
        range = Some((address, take_number(&mut text)?));
    }
    *rest = text.strip_prefix(']')?;
    Some((key, seq, range))
}

/// Takes a number off the start of a text, as JSON has it; none for one that may not fit.
fn take_number(text: &mut &str) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, rest) = text.split_at(digits);
    if digits == 0 || digits > 19 || (digits > 1 && number.starts_with('0')) {
        return None;
    }
    *text = rest;
    Some(number.bytes().fold(0, |all, digit| all * 10 + u64::from(digit - b'0')))
}

/// Iterator over what an [`Objects`] holds.
enum AllParts<'k> {
    Plain { text: &'k str, count: usize },
    Decoded(slice::Iter<'k, Object<'k>>),
}

impl<'k> Iterator for AllParts<'k> {
    type Item = Parts<'k>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Self::Plain { text, count } => {
                let parts = take_plain(text)?;
                *text = text.strip_prefix(',').unwrap_or(text);
                *count -= 1;
                Some(parts)
            }
            Self::Decoded(objects) => {
                objects.next().map(|Object { key: Text(key), seq, range }| (&**key, *seq, *range))
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = match self {
            Self::Plain { count, .. } => *count,
            Self::Decoded(objects) => objects.len(),
        };
        (left, Some(left))
    }
}

impl ExactSizeIterator for AllParts<'_> {}

impl PartialEq for Objects<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.parts().eq(other.parts())
    }
}

impl Eq for Objects<'_> {}

impl fmt::Debug for Objects<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Object<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Parts;
        impl<'de> Visitor<'de> for Parts {
            type Value = Object<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key, a sequence number, and perhaps an address and a length")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Object<'de>, A::Error> {
                let short = |n| serde::de::Error::invalid_length(n, &self);
                let key = seq.next_element()?.ok_or_else(|| short(0))?;
                let life = seq.next_element()?.ok_or_else(|| short(1))?;
                let range = match seq.next_element::<RemoteAddr>()? {
                    Some(at) => Some((at, seq.next_element()?.ok_or_else(|| short(3))?)),
                    None => None,
                };
                Ok(Object { key, seq: life, range })
            }
        }
        deserializer.deserialize_seq(Parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(list: &str) -> Result<Objects<'_>, BadLine> {
        // The line lives as long as the test.
        let line: &'static str = Box::leak(format!("{{\"objects\":{list}}}").into_boxed_str());
        Objects::parse(&RawObject::parse(line)?, &Limits::default())
    }

    #[test]
    fn both_forms_are_read_alike() {
        let most = u64::MAX.to_string();
        let (nines, most) = ("9999999999999999999", most.as_str());
        for (list, plain) in [
            ("[]", true),
            (r#"[["a/b/g1/c",0]]"#, true),
            (r#"[["a",1],["",null],["ü[],",3,4096,512],["d",null,0,0]]"#, true),
            (&format!(r#"[["a",{nines},{nines},{nines}]]"#), true),
            (&format!(r#"[["a",{most},{most},{most}]]"#), false),
            (r#"[["a\"b",1]]"#, false),
            (r#"[["a", 1]]"#, false),
            (r#"[ ["a",1]]"#, false),
            ("[[\"a\",1]\n]", false),
        ] {
            let found = parse(list).unwrap();
            assert_eq!(matches!(found.0, Form::Plain { .. }), plain, "{list}");
            let decoded: Vec<Object<'_>> = bounded_list(list, 10).unwrap();
            let decoded = Objects(Form::Decoded(decoded));
            assert_eq!(found, decoded, "{list}");
            for objects in [found, decoded] {
                assert_eq!(objects.len(), objects.iter().count(), "{list}");
                assert_eq!(objects.iter().len(), objects.ranges().count(), "{list}");
                assert_eq!(objects.is_empty(), list == "[]");
            }
        }
    }

    #[test]
    fn what_is_no_object_is_refused_whatever_its_form() {
        for list in [
            "{}",
            "7",
            r#"["a",1]"#,
            r#"[["a"]]"#,
            r#"[["a",-1]]"#,
            r#"[["a",1.5]]"#,
            r#"[["a",1e3]]"#,
            r#"[["a",18446744073709551616]]"#,
            r#"[["a",1,2]]"#,
            r#"[["a",1,null,2]]"#,
            r#"[["a",1,2,3,4]]"#,
            r#"[["a",true]]"#,
            r#"[[null,1]]"#,
            r#"[["a",1],[]]"#,
        ] {
            assert_eq!(parse(list).unwrap_err(), bad_field("objects"), "{list}");
        }
        for list in [
            r#"[["a",01]]"#,
            r#"[["a",1],]"#,
            r#"[["a",1]["b",2]]"#,
            r#"[["a",1]"#,
            "[[\"a\0\",1]]",
        ] {
            assert!(Objects::parse_plain(list, 10).is_none(), "{list}");
            assert!(parse(list).is_err(), "{list}");
        }
        let three = r#"[["a",1],["b",1],["c",1]]"#;
        let line = format!("{{\"objects\":{three}}}");
        let few = Limits { keys_per_line: 2, ..Limits::default() };
        let error = Objects::parse(&RawObject::parse(&line).unwrap(), &few).unwrap_err();
        assert_eq!(error, BadLine::TooManyKeys { limit: 2 });
    }
}
