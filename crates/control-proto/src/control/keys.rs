//! Lists of keys: the line that today's clients send, and the one that must be read fastest.

use std::borrow::Cow;

use serde::de::IgnoredAny;

use super::{BadLine, Limits, utf8};
use crate::json::{ListFault, Text, bounded_list, deeper_than};

/// The keys of one line, in order; borrowed from it unless they hold escapes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyList<'a>(Form<'a>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Form<'a> {
    /// Quoted keys without escapes, separated by commas and spaces, checked.
    Plain {
        text: &'a str,
        count: usize,
    },
    Decoded(Vec<Text<'a>>),
}

impl<'a> KeyList<'a> {
    /// Reads a line that starts with `[`.
    pub(super) fn parse(line: &'a [u8], limits: &Limits) -> Result<Self, BadLine> {
        let text = utf8(line)?;
        let simple = !line.iter().fold(false, |any, &b| any | (b < b' ') | (b == b'\\'));
        if simple && let Some(list) = Self::parse_plain(text, limits)? {
            return Ok(list);
        }
        if deeper_than(text, limits.nesting) {
            return Err(BadLine::TooDeep { limit: limits.nesting });
        }
        let limit = limits.keys_per_line;
        let keys = bounded_list(text, limit).map_err(|fault| match fault {
            ListFault::Syntax { at } => BadLine::NotJson { at },
            ListFault::TooMany => BadLine::TooManyKeys { limit },
            // What follows the first item of another type has not been read yet.
            ListFault::Type(_) => match serde_json::from_str::<IgnoredAny>(text) {
                Ok(_) => BadLine::NotAMessage,
                Err(error) => BadLine::NotJson { at: crate::json::byte_position(text, &error) },
            },
        })?;
        Ok(Self(Form::Decoded(keys)))
    }

    /// Reads a list of strings in a text without escapes and control characters; `None` if it is
    /// something else.
    fn parse_plain(text: &'a str, limits: &Limits) -> Result<Option<Self>, BadLine> {
        let Some(text) = text.trim_matches(' ').strip_prefix('[') else { return Ok(None) };
        let Some(text) = text.strip_suffix(']') else { return Ok(None) };
        let mut rest = text.trim_start_matches(' ').as_bytes();
        let mut count = 0;
        if rest.is_empty() {
            return Ok(Some(Self(Form::Plain { text, count })));
        }
        loop {
            let Some(key) = rest.strip_prefix(b"\"") else { return Ok(None) };
            let Some(end) = memchr::memchr(b'"', key) else { return Ok(None) };
            if count == limits.keys_per_line {
                return Err(BadLine::TooManyKeys { limit: limits.keys_per_line });
            }
            count += 1;
            rest = skip_spaces(&key[end + 1..]);
            match rest.split_first() {
                None => return Ok(Some(Self(Form::Plain { text, count }))),
                Some((b',', after)) => rest = skip_spaces(after),
                Some(_) => return Ok(None),
            }
        }
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        match &self.0 {
            Form::Plain { count, .. } => *count,
            Form::Decoded(keys) => keys.len(),
        }
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The keys.
    pub fn iter(&self) -> Keys<'_> {
        Keys(match &self.0 {
            Form::Plain { text, count } => Left::Plain { text, count: *count },
            Form::Decoded(keys) => Left::Decoded(keys.iter()),
        })
    }
}

fn skip_spaces(mut bytes: &[u8]) -> &[u8] {
    while let [b' ', rest @ ..] = bytes {
        bytes = rest;
    }
    bytes
}

/// Iterator over the keys of a [`KeyList`].
#[derive(Clone, Debug)]
pub struct Keys<'k>(Left<'k>);

#[derive(Clone, Debug)]
enum Left<'k> {
    Plain { text: &'k str, count: usize },
    Decoded(std::slice::Iter<'k, Text<'k>>),
}

impl<'k> Iterator for Keys<'k> {
    type Item = &'k str;

    fn next(&mut self) -> Option<&'k str> {
        match &mut self.0 {
            Left::Plain { text, count } => {
                let open = memchr::memchr(b'"', text.as_bytes())?;
                let rest = text.get(open + 1..)?;
                let close = memchr::memchr(b'"', rest.as_bytes())?;
                *text = rest.get(close + 1..)?;
                *count -= 1;
                rest.get(..close)
            }
            Left::Decoded(keys) => keys.next().map(|Text(key)| match key {
                Cow::Borrowed(key) => *key,
                Cow::Owned(key) => key,
            }),
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = match &self.0 {
            Left::Plain { count, .. } => *count,
            Left::Decoded(keys) => keys.len(),
        };
        (left, Some(left))
    }
}

impl ExactSizeIterator for Keys<'_> {}

impl<'k> IntoIterator for &'k KeyList<'_> {
    type Item = &'k str;
    type IntoIter = Keys<'k>;

    fn into_iter(self) -> Keys<'k> {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Vec<String>, BadLine> {
        let list = KeyList::parse(line.as_bytes(), &Limits::default())?;
        assert_eq!(list.iter().len(), list.len());
        let keys: Vec<_> = list.iter().map(str::to_owned).collect();
        assert_eq!(keys.len(), list.len());
        Ok(keys)
    }

    #[test]
    fn both_paths_read_the_same_lists() {
        for (line, keys) in [
            ("[]", vec![]),
            ("[ ]", vec![]),
            (r#"[""]"#, vec![""]),
            (r#"["a/b/g1/c","d"]"#, vec!["a/b/g1/c", "d"]),
            (r#" [ "a" , "b" ] "#, vec!["a", "b"]),
            ("[\"a\",\t\"b\"]\r", vec!["a", "b"]),
            (r#"["a\"b","\u00fc"]"#, vec!["a\"b", "ü"]),
            (r#"["],[",","]"#, vec!["],[", ","]),
        ] {
            assert_eq!(parse(line).unwrap(), keys, "{line}");
        }
    }

    #[test]
    fn what_is_no_list_of_keys_is_named() {
        for (line, reason) in [
            (r#"["a",]"#, "not_json"),
            (r#"["a"#, "not_json"),
            (r#"["a" "b"]"#, "not_json"),
            (r#"["a"]]"#, "not_json"),
            (r#"["a\x"]"#, "not_json"),
            ("[\"a\0\"]", "not_json"),
            (r#"["a",1]"#, "not_a_message"),
            (r#"["a",1,}"#, "not_json"),
            (r#"[["a"]]"#, "not_a_message"),
            (r#"[[[[[[[[["a"]]]]]]]]]"#, "too_deep"),
        ] {
            assert_eq!(parse(line).unwrap_err().reason(), reason, "{line}");
        }
        let few = Limits { keys_per_line: 2, ..Limits::default() };
        for line in [r#"["a","b","c"]"#, r#"["a","b","\u0063"]"#] {
            let error = KeyList::parse(line.as_bytes(), &few).unwrap_err();
            assert_eq!(error, BadLine::TooManyKeys { limit: 2 });
        }
    }
}
