//! Stored objects as a text file: `# note`, then per object `key`, `len`, hexadecimal lines, `end`.

use std::fmt::Write;

use transport_core::{Error, ErrorKind, Result};

use super::{MemoryStore, ObjectStore};
use crate::notation::{hex, unhex};

/// A dump: a note and the objects in stored order.
#[derive(Clone, Debug, Default)]
pub struct Dump {
    /// What the first line says.
    pub note: String,
    /// The objects.
    pub objects: MemoryStore,
}

impl Dump {
    /// Reads a dump.
    pub fn parse(text: &str) -> Result<Self> {
        let mut dump = Self::default();
        let mut lines = text.lines().enumerate();
        while let Some((number, line)) = lines.next() {
            let bad = |why: &'static str| {
                Error::new(ErrorKind::Corrupt, "parse dump", why).with("line", number + 1)
            };
            if let Some(note) = line.strip_prefix('#') {
                dump.note = note.trim().to_owned();
                continue;
            }
            let key = line.strip_prefix("key ").ok_or_else(|| bad("expected a key"))?;
            let len: usize = lines
                .next()
                .and_then(|(_, line)| line.strip_prefix("len ")?.parse().ok())
                .ok_or_else(|| bad("expected the length of the object after its key"))?;
            let mut bytes = Vec::new();
            loop {
                match lines.next() {
                    Some((_, "end")) => break,
                    Some((_, line)) => {
                        bytes.extend(unhex(line).ok_or_else(|| bad("not hexadecimal"))?);
                    }
                    None => return Err(bad("the object does not end")),
                }
            }
            if bytes.len() != len {
                return Err(bad("the object is not as long as it says")
                    .with("key", key)
                    .with("expected", len)
                    .with("found", bytes.len()));
            }
            dump.objects.insert(key, bytes)?;
        }
        Ok(dump)
    }

    /// The dump as text.
    pub fn to_text(&self) -> Result<String> {
        let mut out = format!("# {}\n", self.note);
        for key in self.objects.keys() {
            let bytes = self.objects.get(key)?.expect("a key of the store");
            let fail = "writing to a string";
            writeln!(out, "key {key}\nlen {}", bytes.len()).expect(fail);
            for line in bytes.chunks(32) {
                writeln!(out, "{}", hex(line)).expect(fail);
            }
            out.push_str("end\n");
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_survives() {
        let text = "# note; prefix p\nkey p/a\nlen 3\n0001ff\nend\nkey p/b\nlen 33\n".to_owned()
            + &"ab".repeat(32)
            + "\ncd\nend\n";
        let dump = Dump::parse(&text).unwrap();
        assert_eq!(dump.note, "note; prefix p");
        assert_eq!(dump.objects.get("p/a").unwrap().unwrap(), vec![0, 1, 255]);
        assert_eq!(dump.to_text().unwrap(), text);
    }

    #[test]
    fn damaged_dumps_are_refused() {
        for text in [
            "len 3\n",
            "key a\n",
            "key a\nlen x\nend\n",
            "key a\nlen 1\n",
            "key a\nlen 2\n00\nend\n",
            "key a\nlen 1\n0\nend\n",
            "key a\nlen 0\nend\nkey a\nlen 0\nend\n",
        ] {
            assert!(Dump::parse(text).is_err(), "{text:?}");
        }
    }
}
