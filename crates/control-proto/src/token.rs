//! The control protocol of token-authenticated captures: one JSON object a line, each answered.
//!
//! Samples are freed as a whole, by id and generation. Lines are at most [`MAX_LINE_BYTES`] long.

use std::fmt;

use serde::{Deserialize, Serialize};
use transport_core::{Error, ErrorKind, Generation, Result, SampleId};

use crate::{
    Secret,
    capture::Faults,
    json::{RawObject, Text, bounded_list, deeper_than, write_number, write_string, write_value},
};

const READ: Faults = Faults { kind: ErrorKind::Protocol, operation: "read token control line" };

/// Longest line in either direction, without its newline: 1 MiB.
pub const MAX_LINE_BYTES: usize = 1 << 20;

/// Most samples of one request.
pub const MAX_ITEMS: usize = 4096;

/// Deepest nesting of a line.
const MAX_NESTING: usize = 8;

/// Longest reason, in bytes.
const MAX_REASON_BYTES: usize = 1024;

/// What a server says to an operation that it does not know.
pub const UNSUPPORTED_OPERATION: &str = "unsupported control operation";

/// What a server says to a wrong token.
pub const INVALID_TOKEN: &str = "invalid control token";

/// One sample to let go of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Item {
    /// Sample.
    pub sample_id: SampleId,
    /// Its generation; another one makes the server refuse the whole request.
    pub generation: Generation,
}

/// Why samples are let go of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    /// They were used.
    Release,
    /// They are not wanted.
    Abort,
}

/// One line of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// `release` or `abort`.
    One {
        /// Which of the two.
        verb: Verb,
        /// Proof of the right to free.
        token: Secret,
        /// The sample.
        item: Item,
        /// Why, for people.
        reason: Option<String>,
    },
    /// `release_batch` or `abort_batch`; 1 to [`MAX_ITEMS`] samples.
    Batch {
        /// Which of the two.
        verb: Verb,
        /// Proof of the right to free.
        token: Secret,
        /// The samples.
        items: Vec<Item>,
        /// Why, for people.
        reason: Option<String>,
    },
    /// `health`; needs no token.
    Health,
}

impl Request {
    /// Reads a line, without its newline.
    ///
    /// An unknown operation is [`ErrorKind::Unsupported`]; answer it with
    /// [`Reply::Refused`] and [`UNSUPPORTED_OPERATION`].
    pub fn parse(line: &[u8]) -> Result<Self> {
        let object = RawObject::parse(checked_text(line)?).map_err(|f| READ.object(f))?;
        let Text(op) = object.field("op").map_err(|f| READ.field(f))?;
        let (verb, batch) = match &*op {
            "health" => return Ok(Self::Health),
            "release" => (Verb::Release, false),
            "abort" => (Verb::Abort, false),
            "release_batch" => (Verb::Release, true),
            "abort_batch" => (Verb::Abort, true),
            _ => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    READ.operation,
                    UNSUPPORTED_OPERATION,
                ));
            }
        };
        let Text(token) = object.field("token").map_err(|f| READ.field(f))?;
        let token = Secret::new(&*token).map_err(|_| READ.field("token"))?;
        let reason = object.optional("reason").map_err(|f| READ.field(f))?;
        let reason = match reason {
            Some(Text(reason)) if reason.len() > MAX_REASON_BYTES => {
                return Err(READ.field("reason"));
            }
            Some(Text(reason)) => Some(reason.into_owned()),
            None => None,
        };
        if !batch {
            return Ok(Self::One { verb, token, item: Item::parse(&object)?, reason });
        }
        let raw = object.get("items").ok_or_else(|| READ.missing("items"))?;
        let items: Vec<&serde_json::value::RawValue> =
            bounded_list(raw, MAX_ITEMS).map_err(|fault| READ.list("items", fault))?;
        if items.is_empty() {
            return Err(READ.field("items"));
        }
        let items = items.into_iter().map(|raw| {
            Item::parse(&RawObject::parse(raw.get()).map_err(|fault| READ.object(fault))?)
        });
        Ok(Self::Batch { verb, token, items: items.collect::<Result<_>>()?, reason })
    }

    /// Appends the line, with its newline.
    ///
    /// Refuses a batch without samples, with more than [`MAX_ITEMS`], or longer than
    /// [`MAX_LINE_BYTES`]; then nothing is appended.
    pub fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        let start = out.len();
        out.extend_from_slice(b"{\"op\":");
        match self {
            Self::Health => out.extend_from_slice(b"\"health\""),
            Self::One { verb, token, item, reason } => {
                write_string(out, verb.op(false));
                write_token(out, token);
                out.push(b',');
                item.write(out);
                write_reason(out, reason.as_deref());
            }
            Self::Batch { verb, token, items, reason } => {
                write_string(out, verb.op(true));
                write_token(out, token);
                out.extend_from_slice(b",\"items\":[");
                for (i, item) in items.iter().enumerate() {
                    out.extend_from_slice(if i == 0 { b"{" } else { b",{" });
                    item.write(out);
                    out.push(b'}');
                }
                out.push(b']');
                write_reason(out, reason.as_deref());
            }
        }
        out.extend_from_slice(b"}\n");
        let items = match self {
            Self::Batch { items, .. } => items.len(),
            _ => 1,
        };
        let bytes = out.len() - start - 1;
        if !(1..=MAX_ITEMS).contains(&items) || bytes > MAX_LINE_BYTES {
            out.truncate(start);
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "write token control line",
                "the batch does not fit a line",
            )
            .with("items", items)
            .with("max_items", MAX_ITEMS)
            .with("bytes", bytes)
            .with("max_bytes", MAX_LINE_BYTES)
            .remedy("split the batch"));
        }
        Ok(())
    }
}

impl Verb {
    const fn op(self, batch: bool) -> &'static str {
        match (self, batch) {
            (Self::Release, false) => "release",
            (Self::Release, true) => "release_batch",
            (Self::Abort, false) => "abort",
            (Self::Abort, true) => "abort_batch",
        }
    }
}

impl Item {
    fn parse(object: &RawObject<'_>) -> Result<Self> {
        Ok(Self {
            sample_id: READ.parse(object, "sample_id")?,
            generation: object.field("generation").map_err(|f| READ.field(f))?,
        })
    }

    /// Appends the item's fields without braces.
    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"\"sample_id\":");
        write_string(out, self.sample_id.as_str());
        out.extend_from_slice(b",\"generation\":");
        write_number(out, self.generation.0);
    }
}

fn write_token(out: &mut Vec<u8>, token: &Secret) {
    out.extend_from_slice(b",\"token\":");
    write_string(out, token.expose());
}

fn write_reason(out: &mut Vec<u8>, reason: Option<&str>) {
    if let Some(reason) = reason {
        out.extend_from_slice(b",\"reason\":");
        write_string(out, reason);
    }
}

/// One line of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Samples were let go of.
    Freed {
        /// Bytes that came back.
        freed_bytes: u64,
        /// Samples asked for; counts those that were gone before, too.
        released_samples: u64,
    },
    /// What the server measured.
    Health(Box<Health>),
    /// Nothing was done.
    Refused {
        /// Why, in the server's words.
        error: String,
    },
}

impl Reply {
    /// Reads a line, without its newline. Unknown fields are ignored.
    pub fn parse(line: &[u8]) -> Result<Self> {
        let object = RawObject::parse(checked_text(line)?).map_err(|f| READ.object(f))?;
        if !object.field::<bool>("ok").map_err(|f| READ.field(f))? {
            return Ok(Self::Refused { error: READ.text(&object, "error")? });
        }
        if let Some(raw) = object.get("health") {
            RawObject::parse(raw).map_err(|fault| READ.object(fault))?;
            return object.field("health").map(Self::Health).map_err(|f| READ.field(f));
        }
        Ok(Self::Freed {
            freed_bytes: object.field("freed_bytes").map_err(|f| READ.field(f))?,
            released_samples: object.field("released_samples").map_err(|f| READ.field(f))?,
        })
    }

    /// Appends the line, with its newline.
    pub fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Freed { freed_bytes, released_samples } => {
                out.extend_from_slice(b"{\"ok\":true,\"freed_bytes\":");
                write_number(out, *freed_bytes);
                out.extend_from_slice(b",\"released_samples\":");
                write_number(out, *released_samples);
            }
            Self::Health(health) => {
                out.extend_from_slice(b"{\"ok\":true,\"health\":");
                write_value(out, health);
            }
            Self::Refused { error } => {
                out.extend_from_slice(b"{\"ok\":false,\"error\":");
                write_string(out, error);
            }
        }
        out.extend_from_slice(b"}\n");
    }

    /// Whether the server does not know the operation, so that a batch must be sent one by one.
    pub fn is_unsupported_operation(&self) -> bool {
        matches!(self, Self::Refused { error } if error.contains(UNSUPPORTED_OPERATION))
    }

    /// The refusal as an error, if it is one.
    pub fn into_result(self) -> Result<Self> {
        let Self::Refused { error } = self else { return Ok(self) };
        let kind = if error.contains(UNSUPPORTED_OPERATION) {
            ErrorKind::Unsupported
        } else if error.contains(INVALID_TOKEN) {
            ErrorKind::PermissionDenied
        } else if error.contains("stale release") {
            ErrorKind::Stale
        } else {
            ErrorKind::Protocol
        };
        let mut shown: String = error.chars().take(400).collect();
        shown.retain(|c| !c.is_control());
        Err(Error::new(kind, "token control", "the server refused the request")
            .with("reply", shown))
    }
}

/// What a token-authenticated server measures of itself. Absent fields are 0 or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)] // the names are the server's
pub struct Health {
    pub backend: String,
    pub session_id: String,
    pub control_endpoint: String,
    pub resident_samples: u64,
    pub resident_bytes: u64,
    pub resident_allocated_bytes: u64,
    pub reserved_bytes: u64,
    pub arena_address: u64,
    pub arena_bytes: u64,
    pub arena_free_bytes: u64,
    pub arena_largest_free_span: u64,
    pub published_samples: u64,
    pub released_samples: u64,
    pub device_staging_bytes: u64,
    pub host_payload_bytes: u64,
    pub control_requests: u64,
    pub control_batch_requests: u64,
    pub control_batch_items: u64,
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} at {}: {} samples, {} of {} bytes free",
            self.backend,
            self.session_id,
            self.resident_samples,
            self.arena_free_bytes,
            self.arena_bytes
        )
    }
}

fn checked_text(line: &[u8]) -> Result<&str> {
    if line.len() > MAX_LINE_BYTES {
        return Err(READ.error("the line is too long").with("max_bytes", MAX_LINE_BYTES));
    }
    let text = std::str::from_utf8(line)
        .map_err(|error| READ.error("the line is not UTF-8").with("at", error.valid_up_to()))?;
    if deeper_than(text, MAX_NESTING) {
        return Err(READ.error("the line nests too deeply").with("max_nesting", MAX_NESTING));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(id: &str) -> Item {
        Item { sample_id: SampleId::new(id).unwrap(), generation: Generation(1) }
    }

    fn batch(items: Vec<Item>) -> Request {
        let token = Secret::new("hush").unwrap();
        Request::Batch { verb: Verb::Abort, token, items, reason: None }
    }

    #[test]
    fn tokens_stay_hidden_and_bad_lines_are_refused() {
        let mut out = Vec::new();
        batch(vec![item("a")]).write(&mut out).unwrap();
        assert!(!format!("{:?}", Request::parse(out.trim_ascii()).unwrap()).contains("hush"));
        let line = std::str::from_utf8(&out).unwrap().trim();
        for (line, kind) in [
            (line.replace("abort_batch", "abort_all"), ErrorKind::Unsupported),
            (line.replace("\"hush\"", "\"hush\",\"token\":\"hush\""), ErrorKind::Protocol),
            (line.replace("\"hush\"", "[\"hush\"]"), ErrorKind::Protocol),
            (line.replace("\"hush\"", "\"hu\\nsh\""), ErrorKind::Protocol),
            (line.replace(":1", ":-1"), ErrorKind::Protocol),
            (line.replace("{\"sample_id\":\"a\",\"generation\":1}", ""), ErrorKind::Protocol),
            (line.replace("abort_batch", "abort"), ErrorKind::Protocol),
            ("x".repeat(MAX_LINE_BYTES + 1), ErrorKind::Protocol),
        ] {
            let error = Request::parse(line.as_bytes()).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(!format!("{error} {error:?}").contains("hush"), "{error:?}");
        }
    }

    #[test]
    fn batches_have_bounds_both_ways() {
        let mut out = b"before\n".to_vec();
        assert!(batch(vec![]).write(&mut out).is_err());
        assert!(batch(vec![item("a"); MAX_ITEMS + 1]).write(&mut out).is_err());
        assert!(batch(vec![item(&"x".repeat(1000)); MAX_ITEMS]).write(&mut out).is_err());
        assert_eq!(out, b"before\n");
        batch(vec![item("a"); MAX_ITEMS]).write(&mut out).unwrap();
        let line = std::str::from_utf8(&out[7..]).unwrap().trim();
        assert!(Request::parse(line.as_bytes()).is_ok());
        let more = line.replace("]}", ",{\"sample_id\":\"a\",\"generation\":1}]}");
        assert!(Request::parse(more.as_bytes()).unwrap_err().to_string().contains("too long"));
    }

    #[test]
    fn refusals_say_what_to_do_next() {
        for (error, kind) in [
            ("unsupported control operation: 'release_batch'", ErrorKind::Unsupported),
            ("invalid control token", ErrorKind::PermissionDenied),
            ("stale release of x", ErrorKind::Stale),
            ("boom", ErrorKind::Protocol),
        ] {
            let mut out = Vec::new();
            Reply::Refused { error: error.into() }.write(&mut out);
            let reply = Reply::parse(out.trim_ascii()).unwrap();
            assert_eq!(reply.is_unsupported_operation(), kind == ErrorKind::Unsupported);
            assert_eq!(reply.into_result().unwrap_err().kind(), kind);
        }
        assert!(Reply::parse(b"{\"ok\":true}").is_err());
        assert!(Reply::parse(b"{\"ok\":true,\"health\":[1]}").is_err());
        let health = Reply::parse(b"{\"ok\":true,\"health\":{\"resident_samples\":3,\"x\":{}}}");
        let Reply::Health(health) = health.unwrap() else { panic!("not health") };
        assert_eq!(health.resident_samples, 3);
    }
}
