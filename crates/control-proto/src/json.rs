//! JSON objects taken apart without guessing: borrowed fields, no duplicates, bounded depth.

use std::{borrow::Cow, fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::value::RawValue;

/// Most fields that an object may have.
pub(crate) const MAX_FIELDS: usize = 256;

/// The fields of an object in their order, values unparsed.
#[derive(Debug, Default)]
pub(crate) struct RawObject<'a> {
    fields: Vec<(Cow<'a, str>, &'a RawValue)>,
}

/// Why a text is no usable object. Positions are bytes from the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ObjectFault {
    Syntax { at: usize },
    NotAnObject,
    Duplicate,
    TooManyFields,
}

#[derive(Default)]
struct Found<'a> {
    object: RawObject<'a>,
    fault: Option<ObjectFault>,
}

impl<'a> RawObject<'a> {
    /// Takes an object apart; a field that appears twice is refused, not overwritten.
    pub(crate) fn parse(text: &'a str) -> Result<Self, ObjectFault> {
        if !text.trim_ascii_start().starts_with('{') {
            return Err(ObjectFault::NotAnObject);
        }
        let found: Found<'a> = serde_json::from_str(text)
            .map_err(|error| ObjectFault::Syntax { at: byte_position(text, &error) })?;
        match found.fault {
            Some(fault) => Err(fault),
            None => Ok(found.object),
        }
    }

    /// The raw text of a field; a field that is null counts as absent.
    pub(crate) fn get(&self, name: &str) -> Option<&'a str> {
        let (_, value) = self.fields.iter().find(|(n, _)| n == name)?;
        (value.get() != "null").then_some(value.get())
    }

    /// Whether a field is there, be it null.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.fields.iter().any(|(n, _)| n == name)
    }

    /// Number of fields.
    pub(crate) fn len(&self) -> usize {
        self.fields.len()
    }

    /// All fields, in their order.
    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &'a str)> {
        self.fields.iter().map(|(name, value)| (&**name, value.get()))
    }

    /// A field parsed as `T`.
    pub(crate) fn field<T: Deserialize<'a>>(&self, name: &'static str) -> Result<T, FieldFault> {
        self.optional(name)?.ok_or(FieldFault { name, why: Fault::Missing })
    }

    /// A field that may be missing or null.
    pub(crate) fn optional<T: Deserialize<'a>>(
        &self,
        name: &'static str,
    ) -> Result<Option<T>, FieldFault> {
        let parse = |raw| {
            serde_json::from_str(raw)
                .map_err(|e| FieldFault { name, why: Fault::Type(Mismatch::of(&e)) })
        };
        self.get(name).map(parse).transpose()
    }
}

/// A field that is not what it has to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FieldFault {
    pub(crate) name: &'static str,
    pub(crate) why: Fault,
}

/// What is wrong with a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Missing,
    Type(Mismatch),
    /// The right type, and yet no value that can be used.
    Value,
}

impl From<&'static str> for FieldFault {
    fn from(name: &'static str) -> Self {
        Self { name, why: Fault::Value }
    }
}

/// What type a value has to have, and which it has. Types only: a value may be a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    pub(crate) expected: String,
    pub(crate) found: String,
}

impl Mismatch {
    /// Takes the types out of "invalid type: string \"x\", expected u64 at line 1 column 2".
    pub(crate) fn of(error: &serde_json::Error) -> Self {
        let text = error.to_string();
        let text = text.rsplit_once(" at line ").map_or(&*text, |(text, _)| text);
        let types = text.strip_prefix("invalid type: ").or(text.strip_prefix("invalid value: "));
        let types = types.and_then(|types| types.rsplit_once(", expected "));
        let (found, expected) = types.unwrap_or(("another", "another value"));
        let end = found.find(['`', '"']).unwrap_or(found.len());
        let name = |text: &str| {
            match text.trim() {
                "integer" => "a whole number",
                "u64" | "u32" | "u16" | "u8" | "usize" => "a whole number, not negative",
                "i64" | "i32" => "a whole number",
                "floating point" | "f64" => "a number",
                "boolean" => "a boolean",
                "string" => "a string",
                "sequence" => "a list",
                "map" => "an object",
                other => return other.chars().take(80).collect(),
            }
            .to_owned()
        };
        Self { expected: name(expected), found: name(&found[..end]) }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Found<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;

        impl<'de> Visitor<'de> for Fields {
            type Value = Found<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Found<'de>, A::Error> {
                let mut found = Found::default();
                while let Some(Text(name)) = map.next_key()? {
                    let fields = &mut found.object.fields;
                    if fields.len() == MAX_FIELDS {
                        found.fault = Some(ObjectFault::TooManyFields);
                    } else if fields.iter().any(|(n, _)| *n == name) {
                        found.fault = Some(ObjectFault::Duplicate);
                    }
                    if found.fault.is_some() {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        fields.push((name, map.next_value()?));
                    }
                }
                Ok(found)
            }
        }

        deserializer.deserialize_map(Fields)
    }
}

/// A string that is borrowed where it holds no escapes.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub(crate) struct Text<'a>(#[serde(borrow)] pub(crate) Cow<'a, str>);

/// Why a text is no usable list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ListFault {
    Syntax { at: usize },
    Type(Mismatch),
    TooMany,
}

/// A list of at most `limit` items; reading stops at the first one too many.
pub(crate) fn bounded_list<'a, T: Deserialize<'a>>(
    text: &'a str,
    limit: usize,
) -> Result<Vec<T>, ListFault> {
    let mut exceeded = false;
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let seed = Bounded { limit, exceeded: &mut exceeded, item: PhantomData };
    let list = seed.deserialize(&mut deserializer).and_then(|l| deserializer.end().map(|()| l));
    list.map_err(|error| match error.classify() {
        _ if exceeded => ListFault::TooMany,
        serde_json::error::Category::Data => ListFault::Type(Mismatch::of(&error)),
        _ => ListFault::Syntax { at: byte_position(text, &error) },
    })
}

struct Bounded<'b, T> {
    limit: usize,
    exceeded: &'b mut bool,
    item: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for Bounded<'_, T> {
    type Value = Vec<T>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<T>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for Bounded<'_, T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            if items.len() == self.limit {
                *self.exceeded = true;
                return Err(A::Error::custom("too many items"));
            }
            items.push(item);
        }
        Ok(items)
    }
}

/// Whether brackets outside strings nest deeper than `limit`. Does not check syntax.
pub(crate) fn deeper_than(text: &str, limit: usize) -> bool {
    let (mut depth, mut rest) = (0usize, text.as_bytes());
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        match byte {
            // Most of a long line is in its strings: their insides are skipped in large steps.
            b'"' => loop {
                let Some(end) = memchr::memchr2(b'"', b'\\', rest) else { return false };
                let escape = rest[end] == b'\\';
                rest = rest.get(end + 1 + usize::from(escape)..).unwrap_or_default();
                if !escape {
                    break;
                }
            },
            b'[' | b'{' => {
                depth += 1;
                if depth > limit {
                    return true;
                }
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    false
}

/// Where an error of serde_json is, in bytes from the start of `text`.
pub(crate) fn byte_position(text: &str, error: &serde_json::Error) -> usize {
    let before: usize =
        text.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum();
    (before + error.column()).min(text.len())
}

/// Whether a text is written as it is between its quotes.
pub(crate) fn needs_no_escape(text: &str) -> bool {
    // Looks at all of it, whatever is found: a loop without an early end is several times as fast.
    !text.bytes().fold(false, |any, b| any | (b < 0x20) | (b == b'"') | (b == b'\\'))
}

/// Appends a JSON string literal.
pub(crate) fn write_string(out: &mut Vec<u8>, text: &str) {
    if needs_no_escape(text) {
        out.push(b'"');
        out.extend_from_slice(text.as_bytes());
        out.push(b'"');
    } else {
        write_value(out, text);
    }
}

/// Appends a value as compact JSON.
pub(crate) fn write_value<T: serde::Serialize + ?Sized>(out: &mut Vec<u8>, value: &T) {
    // The types written here have string keys and finite numbers, and a Vec takes every write.
    serde_json::to_writer(out, value).expect("plain data is always serialisable");
}

/// Appends a number in decimal.
pub(crate) fn write_number(out: &mut Vec<u8>, number: u64) {
    let mut digits = [0u8; 20];
    let mut start = digits.len();
    let mut rest = number;
    loop {
        start -= 1;
        digits[start] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[start..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_taken_apart_and_duplicates_refused() {
        let object = RawObject::parse(r#" {"a\u0062":[1,2],"c":null} "#).unwrap();
        assert_eq!(object.field::<Vec<u64>>("ab"), Ok(vec![1, 2]));
        assert_eq!(object.get("c"), None);
        let why = Fault::Type(Mismatch {
            expected: "a whole number, not negative".into(),
            found: "a list".into(),
        });
        assert_eq!(object.field::<u64>("ab"), Err(FieldFault { name: "ab", why }));
        assert_eq!(object.field::<u64>("c"), Err(FieldFault { name: "c", why: Fault::Missing }));
        assert_eq!(object.optional::<u64>("c"), Ok(None));
        let fault = |text: &str| RawObject::parse(text).unwrap_err();
        assert_eq!(fault(r#"{"a":1,"\u0061":1}"#), ObjectFault::Duplicate);
        assert_eq!(fault("[1]"), ObjectFault::NotAnObject);
        assert_eq!(fault(r#"{"a":}"#), ObjectFault::Syntax { at: 6 });
        let many = (0..257).map(|i| format!("\"{i}\":0")).collect::<Vec<_>>().join(",");
        assert_eq!(fault(&format!("{{{many}}}")), ObjectFault::TooManyFields);
    }

    #[test]
    fn lists_are_bounded() {
        assert_eq!(bounded_list::<u8>("[1, 2]", 2), Ok(vec![1, 2]));
        assert_eq!(bounded_list::<u8>("[1,2,3", 2), Err(ListFault::TooMany));
        assert!(matches!(bounded_list::<u8>("[1,\"\"]", 2), Err(ListFault::Type(_))));
        assert_eq!(bounded_list::<u8>("[1", 2), Err(ListFault::Syntax { at: 2 }));
        assert_eq!(bounded_list::<u8>("[1]x", 2), Err(ListFault::Syntax { at: 4 }));
    }

    #[test]
    fn mismatches_name_types_and_never_values() {
        fn found<'a, T: Deserialize<'a> + fmt::Debug>(text: &'a str) -> (String, String) {
            let Mismatch { expected, found } =
                Mismatch::of(&serde_json::from_str::<T>(text).unwrap_err());
            (expected, found)
        }
        let pair = |expected: &str, found: &str| (expected.to_owned(), found.to_owned());
        assert_eq!(found::<Text<'_>>("[5]"), pair("a string", "a list"));
        assert_eq!(found::<Text<'_>>("5"), pair("a string", "a whole number"));
        assert_eq!(found::<i64>("1.5"), pair("a whole number", "a number"));
        assert_eq!(found::<bool>("{}"), pair("a boolean", "an object"));
        assert_eq!(found::<u64>("-7"), pair("a whole number, not negative", "a whole number"));
        let secret = r#""hush, expected `hush` at line \" hush""#;
        assert_eq!(found::<bool>(secret), pair("a boolean", "a string"));
        assert!(!format!("{:?}", found::<Vec<u8>>(secret)).contains("hush"));
        assert!(!format!("{:?}", found::<u8>("\"hush")).contains("hush"));
    }

    #[test]
    fn depth_ignores_brackets_in_strings() {
        assert!(!deeper_than(r#"["[[[[\"[[",1]"#, 1));
        assert!(deeper_than("[[1]]", 1));
        assert!(!deeper_than("[[1],[2]]", 2));
        assert!(deeper_than(r#"["a\\",[1]]"#, 1), "the string ends after its escape");
        for cut in [r#"["["#, r#"["\"#, r#"["\"["#] {
            assert!(!deeper_than(cut, 1), "{cut}");
        }
    }

    #[test]
    fn strings_and_numbers_are_written_as_serde_json_does() {
        for text in ["", "plain", "a\"b\\c\n\u{1}", "grün"] {
            let mut out = Vec::new();
            write_string(&mut out, text);
            assert_eq!(out, serde_json::to_vec(text).unwrap());
        }
        for number in [0, 9, 10, u64::MAX] {
            let mut out = Vec::new();
            write_number(&mut out, number);
            assert_eq!(out, number.to_string().into_bytes());
        }
    }
}
