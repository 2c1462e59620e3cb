//! The control lines between trainers and a capture server.
//!
//! One TCP connection per trainer and server carries newline-terminated JSON lines. A client that
//! only sends lists of keys (`["key",…]`) frees one way and gets no answer. A client that starts
//! with a `hello` object may also hold objects, free single lives of them with an answer, ask for
//! the server's health, and ping.
//!
//! - [`LineDecoder`] cuts a byte stream into lines, within the bounds of [`Limits`] and [`Budget`];
//! - [`Request`] and [`Response`] are what a line means; parsing borrows from the line;
//! - [`write_keys`], [`write_hello`], [`write_hold`], [`write_free`],
//!   [`write_free_samples`], [`write_health`], [`write_ping`], [`write_bye`] and [`Response::write`] append whole lines to a buffer.
//!
//! A bad line is a [`BadLine`]: one counted error, and the connection goes on. A line without an
//! end is a [`Fatal`]: the connection is closed, since its next line cannot be found.

mod keys;
mod lines;
mod objects;
mod request;
mod response;
mod write;

use transport_core::{Error, ErrorKind};

pub use keys::{KeyList, Keys};
pub use lines::{Budget, DecoderCounts, Fatal, LineDecoder, Refused, Share};
pub use objects::Objects;
pub use request::{Hello, Request};
pub use response::{ArenaInfo, Code, Response, ServerHello, ShmInfo};
pub use write::{
    write_bye, write_free, write_free_samples, write_health, write_hello, write_hold,
    write_hold_at, write_keys, write_ping, write_unhold,
};

/// Version of the extended lines that this crate speaks.
pub const VERSION: u32 = 1;

/// Longest lease that can be asked for or granted: one day.
pub const MAX_LEASE: std::time::Duration = std::time::Duration::from_secs(86_400);

/// Bounds on what peers may send and leave waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest line, in bytes without its newline.
    pub line_bytes: usize,
    /// Deepest nesting of arrays and objects in a line.
    pub nesting: usize,
    /// Most keys or objects in a line.
    pub keys_per_line: usize,
    /// Most bytes that wait on one connection, in each direction.
    pub connection_bytes: usize,
    /// Most bytes that wait on all connections together.
    pub total_bytes: usize,
    /// Most connections at a time.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            line_bytes: 1 << 20,
            nesting: 8,
            keys_per_line: 65_536,
            connection_bytes: 2 << 20,
            total_bytes: 64 << 20,
            connections: 1024,
        }
    }
}

/// Why a line was refused. Small and free of the line's content, which may hold a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum BadLine {
    /// Bytes that are no text.
    #[error("the line is not UTF-8 at byte {at}")]
    NotUtf8 {
        /// Bytes from the start of the line.
        at: usize,
    },
    /// Text that is no JSON.
    #[error("the line is not JSON at byte {at}")]
    NotJson {
        /// Bytes from the start of the line.
        at: usize,
    },
    /// JSON that is neither a list of keys nor an object.
    #[error("the line is neither a list of keys nor an object")]
    NotAMessage,
    /// Arrays and objects within each other.
    #[error("the line nests deeper than {limit}")]
    TooDeep {
        /// [`Limits::nesting`].
        limit: usize,
    },
    /// A list that is too long.
    #[error("the line holds more than {limit} keys")]
    TooManyKeys {
        /// [`Limits::keys_per_line`].
        limit: usize,
    },
    /// An object with too many fields, or one field twice.
    #[error("the object has a field twice, or too many fields")]
    BadFields,
    /// An `op` that this version does not know.
    #[error("the op is unknown")]
    UnknownOp,
    /// A field that is missing, of another type, or out of range.
    #[error("the field {field:?} is missing or unusable")]
    BadField {
        /// Name of the field.
        field: &'static str,
    },
}

impl BadLine {
    /// Names of all reasons, for counters.
    pub const REASONS: [&'static str; 8] = [
        "not_utf8",
        "not_json",
        "not_a_message",
        "too_deep",
        "too_many_keys",
        "bad_fields",
        "unknown_op",
        "bad_field",
    ];

    /// The reason's place in [`Self::REASONS`].
    pub const fn index(self) -> usize {
        match self {
            Self::NotUtf8 { .. } => 0,
            Self::NotJson { .. } => 1,
            Self::NotAMessage => 2,
            Self::TooDeep { .. } => 3,
            Self::TooManyKeys { .. } => 4,
            Self::BadFields => 5,
            Self::UnknownOp => 6,
            Self::BadField { .. } => 7,
        }
    }

    /// The reason's name, such as `not_json`.
    pub const fn reason(self) -> &'static str {
        Self::REASONS[self.index()]
    }
}

impl From<BadLine> for Error {
    fn from(bad: BadLine) -> Self {
        Self::new(ErrorKind::Protocol, "parse control line", bad.to_string())
            .with("reason", bad.reason())
            .source(bad)
    }
}

impl From<crate::json::ObjectFault> for BadLine {
    fn from(fault: crate::json::ObjectFault) -> Self {
        use crate::json::ObjectFault;
        match fault {
            ObjectFault::Syntax { at } => Self::NotJson { at },
            ObjectFault::NotAnObject => Self::NotAMessage,
            ObjectFault::Duplicate | ObjectFault::TooManyFields => Self::BadFields,
        }
    }
}

fn bad_field(fault: impl Into<crate::json::FieldFault>) -> BadLine {
    BadLine::BadField { field: fault.into().name }
}

/// The text of a line, within the nesting limit.
fn checked_text<'a>(line: &'a [u8], limits: &Limits) -> Result<&'a str, BadLine> {
    let text = utf8(line)?;
    if crate::json::deeper_than(text, limits.nesting) {
        return Err(BadLine::TooDeep { limit: limits.nesting });
    }
    Ok(text)
}

fn utf8(line: &[u8]) -> Result<&str, BadLine> {
    std::str::from_utf8(line).map_err(|error| BadLine::NotUtf8 { at: error.valid_up_to() })
}

/// A lease in whole milliseconds, from 1 to [`MAX_LEASE`].
fn lease_from_millis(millis: u64) -> Result<std::time::Duration, BadLine> {
    let lease = std::time::Duration::from_millis(millis);
    if lease.is_zero() || lease > MAX_LEASE {
        return Err(bad_field("lease_ms"));
    }
    Ok(lease)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_named_once_each() {
        let all = [
            BadLine::NotUtf8 { at: 0 },
            BadLine::NotJson { at: 0 },
            BadLine::NotAMessage,
            BadLine::TooDeep { limit: 8 },
            BadLine::TooManyKeys { limit: 8 },
            BadLine::BadFields,
            BadLine::UnknownOp,
            BadLine::BadField { field: "id" },
        ];
        for (index, bad) in all.into_iter().enumerate() {
            assert_eq!(bad.index(), index);
            let error = Error::from(bad);
            assert_eq!(error.context("reason"), Some(BadLine::REASONS[index]));
            assert_eq!(error.kind(), ErrorKind::Protocol);
        }
    }
}
