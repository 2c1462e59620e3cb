//! JSON as Python's `json` module reads and writes it, without loss.
//!
//! Three things set it apart from a strict JSON library: `NaN`, `Infinity` and `-Infinity` are
//! numbers, whole numbers stay whole up to 128 bits, and numbers are written exactly as Python
//! writes them, which byte equality with Mooncake's structured objects needs.

use indexmap::IndexMap;
use transport_core::{Error, ErrorKind, Result};

use crate::Value;

/// Deepest nesting that is read or written.
pub const MAX_DEPTH: usize = 100;

/// How to lay out written JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Style {
    /// Escape everything outside printable ASCII.
    pub ascii: bool,
    /// Put every item on a line of its own, indented by this many blanks a level; no blanks
    /// anywhere when `None`.
    pub indent: Option<usize>,
}

impl Style {
    /// `json.dumps(.., separators=(",", ":"))`.
    pub const COMPACT_ASCII: Self = Self { ascii: true, indent: None };
    /// `json.dumps(.., ensure_ascii=False, separators=(",", ":"))`.
    pub const COMPACT: Self = Self { ascii: false, indent: None };
    /// `json.dumps(.., indent=1)`.
    pub const PRETTY: Self = Self { ascii: true, indent: Some(1) };
}

/// Reads one JSON document.
pub fn parse(bytes: &[u8]) -> Result<Value> {
    let text = std::str::from_utf8(bytes).map_err(|e| invalid(e.valid_up_to(), "not UTF-8"))?;
    let mut parser = Parser { text, at: 0 };
    let value = parser.value(0)?;
    parser.blanks();
    if parser.at != text.len() {
        return Err(invalid(parser.at, "something follows the document"));
    }
    Ok(value)
}

/// Writes one JSON document.
///
/// Bytes, arrays and images have no JSON form: [`crate::notation`] gives them one.
pub fn write(value: &Value, style: Style) -> Result<String> {
    let mut out = String::new();
    write_value(value, style, 0, &mut out)?;
    Ok(out)
}

fn invalid(at: usize, why: &'static str) -> Error {
    Error::new(ErrorKind::Corrupt, "parse JSON", why).with("byte", at)
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl Parser<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn blanks(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn take(&mut self, word: &str) -> bool {
        let found = self.text[self.at..].starts_with(word);
        if found {
            self.at += word.len();
        }
        found
    }

    fn value(&mut self, depth: usize) -> Result<Value> {
        if depth > MAX_DEPTH {
            return Err(invalid(self.at, "nested too deeply").with("max_depth", MAX_DEPTH));
        }
        self.blanks();
        match self.peek() {
            Some(b'{') => self.map(depth),
            Some(b'[') => self.list(depth),
            Some(b'"') => Ok(Value::Str(self.string()?)),
            Some(b't') if self.take("true") => Ok(Value::Bool(true)),
            Some(b'f') if self.take("false") => Ok(Value::Bool(false)),
            Some(b'n') if self.take("null") => Ok(Value::Null),
            Some(b'N') if self.take("NaN") => Ok(Value::Float(f64::NAN)),
            Some(b'I') if self.take("Infinity") => Ok(Value::Float(f64::INFINITY)),
            Some(b'-') if self.take("-Infinity") => Ok(Value::Float(f64::NEG_INFINITY)),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => Err(invalid(self.at, "expected a value")),
        }
    }

    fn map(&mut self, depth: usize) -> Result<Value> {
        self.at += 1;
        let mut map = IndexMap::new();
        self.blanks();
        if self.take("}") {
            return Ok(Value::Map(map));
        }
        loop {
            self.blanks();
            if self.peek() != Some(b'"') {
                return Err(invalid(self.at, "expected a name"));
            }
            let name = self.string()?;
            self.blanks();
            if !self.take(":") {
                return Err(invalid(self.at, "expected a colon"));
            }
            let value = self.value(depth + 1)?;
            if map.insert(name, value).is_some() {
                return Err(invalid(self.at, "a name occurs twice in one object"));
            }
            self.blanks();
            if self.take("}") {
                return Ok(Value::Map(map));
            }
            if !self.take(",") {
                return Err(invalid(self.at, "expected a comma or a closing brace"));
            }
        }
    }

    fn list(&mut self, depth: usize) -> Result<Value> {
        self.at += 1;
        let mut items = Vec::new();
        self.blanks();
        if self.take("]") {
            return Ok(Value::List(items));
        }
        loop {
            items.push(self.value(depth + 1)?);
            self.blanks();
            if self.take("]") {
                return Ok(Value::List(items));
            }
            if !self.take(",") {
                return Err(invalid(self.at, "expected a comma or a closing bracket"));
            }
        }
    }

    fn string(&mut self) -> Result<String> {
        self.at += 1;
        let mut out = String::new();
        loop {
            let rest = &self.text[self.at..];
            let stop = rest
                .find(|c: char| c == '"' || c == '\\' || c < ' ')
                .ok_or_else(|| invalid(self.at, "a string does not end"))?;
            out.push_str(&rest[..stop]);
            self.at += stop;
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(out);
                }
                Some(b'\\') => out.push(self.escape()?),
                _ => return Err(invalid(self.at, "a control character in a string")),
            }
        }
    }

    fn escape(&mut self) -> Result<char> {
        self.at += 1;
        let kind = self.peek().ok_or_else(|| invalid(self.at, "a string does not end"))?;
        self.at += 1;
        Ok(match kind {
            b'"' => '"',
            b'\\' => '\\',
            b'/' => '/',
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let first = self.hex4()?;
                let code = if (0xd800..0xdc00).contains(&first) && self.take("\\u") {
                    let second = self.hex4()?;
                    if !(0xdc00..0xe000).contains(&second) {
                        return Err(invalid(self.at, "half a surrogate pair is not a character"));
                    }
                    0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00)
                } else {
                    first
                };
                char::from_u32(code)
                    .ok_or_else(|| invalid(self.at, "half a surrogate pair is not a character"))?
            }
            _ => return Err(invalid(self.at, "unknown escape")),
        })
    }

    fn hex4(&mut self) -> Result<u32> {
        let digits = self
            .text
            .get(self.at..self.at + 4)
            .filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()))
            .ok_or_else(|| invalid(self.at, "expected four hexadecimal digits"))?;
        self.at += 4;
        Ok(u32::from_str_radix(digits, 16).expect("four hexadecimal digits"))
    }

    fn number(&mut self) -> Result<Value> {
        let start = self.at;
        let digits = |parser: &mut Self| {
            let from = parser.at;
            while matches!(parser.peek(), Some(b'0'..=b'9')) {
                parser.at += 1;
            }
            parser.at - from
        };
        self.take("-");
        let leading_zero = self.peek() == Some(b'0');
        let whole = digits(self);
        if whole == 0 || (leading_zero && whole > 1) {
            return Err(invalid(start, "not a number"));
        }
        let mut float = false;
        if self.take(".") {
            float = true;
            if digits(self) == 0 {
                return Err(invalid(start, "not a number"));
            }
        }
        if self.take("e") || self.take("E") {
            float = true;
            let _ = self.take("+") || self.take("-");
            if digits(self) == 0 {
                return Err(invalid(start, "not a number"));
            }
        }
        let text = &self.text[start..self.at];
        if float {
            return Ok(Value::Float(text.parse().map_err(|_| invalid(start, "not a number"))?));
        }
        text.parse().map(Value::Int).map_err(|_| {
            invalid(start, "a whole number needs more than 128 bits")
                .remedy("send such numbers as text")
        })
    }
}

fn write_value(value: &Value, style: Style, depth: usize, out: &mut String) -> Result<()> {
    let refuse = |why: &'static str| Err(Error::new(ErrorKind::InvalidInput, "write JSON", why));
    if depth > MAX_DEPTH {
        return refuse("nested too deeply");
    }
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Int(n) => out.push_str(&n.to_string()),
        Value::Float(x) => write_float(*x, out),
        Value::Str(s) => write_string(s, style.ascii, out),
        Value::List(items) => {
            write_items(items, ('[', ']'), style, depth, out, |item, out| {
                write_value(item, style, depth + 1, out)
            })?;
        }
        Value::Map(map) => {
            write_items(map, ('{', '}'), style, depth, out, |(name, item), out| {
                write_string(name, style.ascii, out);
                out.push_str(if style.indent.is_some() { ": " } else { ":" });
                write_value(item, style, depth + 1, out)
            })?;
        }
        Value::Bytes(_) => return refuse("bytes have no JSON form"),
        Value::Array(_) => return refuse("an array has no JSON form"),
        Value::Image(_) => return refuse("an image has no JSON form"),
    }
    Ok(())
}

fn write_items<T>(
    items: impl IntoIterator<Item = T>,
    (open, close): (char, char),
    style: Style,
    depth: usize,
    out: &mut String,
    mut write: impl FnMut(T, &mut String) -> Result<()>,
) -> Result<()> {
    let newline = |out: &mut String, depth: usize| {
        if let Some(width) = style.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', width * depth));
        }
    };
    out.push(open);
    let mut empty = true;
    for item in items {
        if !empty {
            out.push(',');
        }
        empty = false;
        newline(out, depth + 1);
        write(item, out)?;
    }
    if !empty {
        newline(out, depth);
    }
    out.push(close);
    Ok(())
}

/// The shortest digits that read back as the same number, with an exponent where Python uses one:
/// below 1e-4 and from 1e16 on.
pub(crate) fn write_float(x: f64, out: &mut String) {
    if x.is_nan() {
        return out.push_str("NaN");
    }
    if x.is_infinite() {
        return out.push_str(if x > 0.0 { "Infinity" } else { "-Infinity" });
    }
    let scientific = format!("{x:e}");
    let (mantissa, exponent) = scientific.split_once('e').expect("Rust's {:e} has an exponent");
    let exponent: i32 = exponent.parse().expect("Rust's exponent is a number");
    if x == 0.0 || (-4..16).contains(&exponent) {
        let plain = format!("{x}");
        let whole = !plain.contains('.');
        out.push_str(&plain);
        if whole {
            out.push_str(".0");
        }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        out.push_str(&format!("{mantissa}e{sign}{:02}", exponent.abs()));
    }
}

fn write_string(text: &str, ascii: bool, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (ascii && c > '~') => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_are_written_as_python_writes_them() {
        // From `python3 -c 'import json; print(json.dumps([...]))'`.
        for (x, text) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (9007199254740992.0, "9007199254740992.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (5e-324, "5e-324"),
            (1.7976931348623157e308, "1.7976931348623157e+308"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(write(&Value::Float(x), Style::COMPACT).unwrap(), text);
            let back = parse(text.as_bytes()).unwrap();
            assert!(matches!(back, Value::Float(y) if y.to_bits() == x.to_bits() || x.is_nan()));
        }
        let big = (1i128 << 64).to_string();
        assert_eq!(parse(big.as_bytes()).unwrap(), Value::Int(1 << 64));
    }

    #[test]
    fn strings_are_escaped_as_python_escapes_them() {
        let text = Value::Str("a\"\\\n\u{1}\u{7f}é😀".into());
        assert_eq!(
            write(&text, Style::COMPACT_ASCII).unwrap(),
            "\"a\\\"\\\\\\n\\u0001\\u007f\\u00e9\\ud83d\\ude00\""
        );
        assert_eq!(write(&text, Style::COMPACT).unwrap(), "\"a\\\"\\\\\\n\\u0001\u{7f}é😀\"");
        assert_eq!(parse(b"\"\\ud83d\\ude00\\/\"").unwrap(), Value::Str("😀/".into()));
    }

    #[test]
    fn indentation_matches() {
        let value = parse(br#"{"a":[1,[],{}],"b":null}"#).unwrap();
        assert_eq!(
            write(&value, Style::PRETTY).unwrap(),
            "{\n \"a\": [\n  1,\n  [],\n  {}\n ],\n \"b\": null\n}"
        );
    }

    #[test]
    fn bad_documents_are_refused() {
        for text in [
            "",
            "{",
            "[1,]",
            "01",
            "1.",
            "+1",
            "-",
            "nul",
            "\"\\x\"",
            "\"\\ud800\"",
            "\"\u{1}\"",
            "{\"a\":1,\"a\":2}",
            "[1] 2",
            "\"\\ud800\\u0041\"",
            "1e",
            "{1:2}",
            "999999999999999999999999999999999999999999",
        ] {
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
        assert!(parse(&[0xff]).is_err());
        assert!(parse("[".repeat(100_000).as_bytes()).is_err(), "no stack overflow");
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "\\PC*") {
            let _ = parse(text.as_bytes());
        }

        #[test]
        fn values_survive(value in crate::value::tests::any_plain_value()) {
            for style in [Style::COMPACT, Style::COMPACT_ASCII, Style::PRETTY] {
                let text = write(&value, style).unwrap();
                prop_assert!(parse(text.as_bytes()).unwrap().same(&value), "{}", text);
            }
        }
    }
}
