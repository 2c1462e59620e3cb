//! What clients send: lists of keys, and objects with an `op`.

use std::time::Duration;

use serde::de::IgnoredAny;
use transport_core::{ClientId, Epoch, MapMark};

use super::{
    BadLine, KeyList, Limits, Objects, VERSION, bad_field, checked_text, lease_from_millis, utf8,
};
use crate::{
    Secret,
    json::{RawObject, Text, byte_position},
};

/// One line of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Request<'a> {
    /// `["key",…]`: frees the current life of each key; no answer.
    Keys(KeyList<'a>),
    /// First extended line: says who the client is.
    Hello(Hello),
    /// Claims published objects for this client.
    Hold {
        /// Comes back in the answer.
        id: u64,
        /// Life of the server that the objects belong to.
        epoch: Epoch,
        /// What to claim.
        objects: Objects<'a>,
    },
    /// Ends this client's claim; an object goes when nobody holds it.
    Free {
        /// Comes back in the answer.
        id: u64,
        /// Life of the server that the objects belong to.
        epoch: Epoch,
        /// What to free.
        objects: Objects<'a>,
    },
    /// Ends this client's claim, but leaves the object where it is, even if nobody holds it now.
    Unhold {
        /// Comes back in the answer, a pong.
        id: u64,
        /// Life of the server that the objects belong to.
        epoch: Epoch,
        /// What to give back.
        objects: Objects<'a>,
    },
    /// Asks for the server's measurements.
    Health {
        /// Comes back in the answer.
        id: u64,
    },
    /// Shows that the client lives.
    Ping {
        /// Comes back in the answer.
        id: u64,
    },
    /// Drops every claim of this client; the connection ends.
    Bye,
}

impl<'a> Request<'a> {
    /// Reads a line, without its newline. Fields that this version does not know are ignored.
    pub fn parse(line: &'a [u8], limits: &Limits) -> Result<Self, BadLine> {
        match line.trim_ascii_start().first() {
            Some(b'[') => KeyList::parse(line, limits).map(Self::Keys),
            Some(b'{') => Self::parse_op(checked_text(line, limits)?, limits),
            _ => Err(not_a_message(utf8(line)?)),
        }
    }

    fn parse_op(text: &'a str, limits: &Limits) -> Result<Self, BadLine> {
        let object = RawObject::parse(text)?;
        let Text(op) = object.field("op").map_err(bad_field)?;
        let id = || object.field("id").map_err(bad_field);
        let epoch = || object.field("epoch").map_err(bad_field);
        Ok(match &*op {
            "hello" => Self::Hello(Hello::parse(&object)?),
            "hold" => {
                Self::Hold { id: id()?, epoch: epoch()?, objects: Objects::parse(&object, limits)? }
            }
            "free" => {
                Self::Free { id: id()?, epoch: epoch()?, objects: Objects::parse(&object, limits)? }
            }
            "unhold" => Self::Unhold {
                id: id()?,
                epoch: epoch()?,
                objects: Objects::parse(&object, limits)?,
            },
            "health" => Self::Health { id: id()? },
            "ping" => Self::Ping { id: id()? },
            "bye" => Self::Bye,
            _ => return Err(BadLine::UnknownOp),
        })
    }

    /// The id of a bad line, if it can be made out, for the error reply.
    pub fn id_of(line: &[u8], limits: &Limits) -> Option<u64> {
        RawObject::parse(checked_text(line, limits).ok()?).ok()?.field("id").ok()
    }
}

pub(super) fn not_a_message(text: &str) -> BadLine {
    match serde_json::from_str::<IgnoredAny>(text) {
        Ok(_) => BadLine::NotAMessage,
        Err(error) => BadLine::NotJson { at: byte_position(text, &error) },
    }
}

/// How an extended client introduces itself.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hello {
    /// Version of the extended lines that the client speaks.
    pub version: u32,
    /// Who the client is; its claims survive the connection by the lease.
    pub client: ClientId,
    /// How long its claims outlive its last sign of life; whole milliseconds up to
    /// [`MAX_LEASE`](super::MAX_LEASE).
    pub lease: Duration,
    /// Proof of the right to free, where the server asks for one.
    pub token: Option<Secret>,
    /// The mark under which the client maps the server's memory, if it does: while that mapping
    /// exists, its claims outlive every lease.
    pub mapping: Option<MapMark>,
}

impl Hello {
    /// Introduces `client`, speaking [`VERSION`].
    pub fn new(client: ClientId, lease: Duration, token: Option<Secret>) -> Self {
        Self { version: VERSION, client, lease, token, mapping: None }
    }

    /// Says under which mark the client maps the server's memory.
    #[must_use]
    pub fn mapping(mut self, mark: MapMark) -> Self {
        self.mapping = Some(mark);
        self
    }

    fn parse(object: &RawObject<'_>) -> Result<Self, BadLine> {
        let text = |name| object.field::<Text<'_>>(name).map_err(bad_field);
        let Text(client) = text("client")?;
        let token = match object.optional::<Text<'_>>("token").map_err(bad_field)? {
            Some(Text(token)) => Some(Secret::new(&*token).map_err(|_| bad_field("token"))?),
            None => None,
        };
        let mapping: Option<MapMark> = object.optional("mapping").map_err(bad_field)?;
        if mapping.is_some_and(|mark| mark.0 == 0 || mark > MapMark::MAX) {
            return Err(bad_field("mapping"));
        }
        Ok(Self {
            version: object.field("version").map_err(bad_field)?,
            client: ClientId::new(client).map_err(|_| bad_field("client"))?,
            lease: lease_from_millis(object.field("lease_ms").map_err(bad_field)?)?,
            token,
            mapping,
        })
    }
}

#[cfg(test)]
mod tests {
    use transport_core::{Error, RemoteAddr, Sequence};

    use super::{super::write_hold_at, *};

    fn parse(line: &str) -> Result<Request<'_>, BadLine> {
        Request::parse(line.as_bytes(), &Limits::default())
    }

    #[test]
    fn lines_with_an_op_are_read_whatever_the_order_of_their_fields() {
        let line =
            r#"{"objects":[["k",3],["l",null]],"id":7,"later":{"x":[1]},"epoch":9,"op":"free"}"#;
        let Request::Free { id: 7, epoch: Epoch(9), objects } = parse(line).unwrap() else {
            panic!("not a free line");
        };
        let found: Vec<_> = objects.iter().collect();
        assert_eq!(found, [("k", Some(Sequence(3))), ("l", None)]);
        let line = r#"{"op":"unhold","id":7,"epoch":9,"objects":[["k",3,4096,100],["l",null]]}"#;
        let Request::Unhold { id: 7, epoch: Epoch(9), objects } = parse(line).unwrap() else {
            panic!("not an unhold line");
        };
        let ranges: Vec<_> = objects.ranges().collect();
        assert_eq!(ranges, [Some((RemoteAddr(4096), 100)), None]);
        let mut out = Vec::new();
        let again = objects.iter().zip(objects.ranges()).map(|((k, s), r)| (k, s, r));
        write_hold_at(&mut out, 7, Epoch(9), again, &Limits::default()).unwrap();
        assert_eq!(out, format!("{}\n", line.replace("unhold", "hold")).as_bytes());
        assert_eq!(parse(r#"{"op":"p\u0069ng","id":1}"#), Ok(Request::Ping { id: 1 }));
        assert_eq!(parse(r#"{"op":"bye"}"#), Ok(Request::Bye));
    }

    #[test]
    fn bad_lines_are_named() {
        let deep = format!("{{\"op\":\"bye\",\"x\":{}{}}}", "[".repeat(9), "]".repeat(9));
        for (line, bad) in [
            ("nonsense", BadLine::NotJson { at: 2 }),
            ("17", BadLine::NotAMessage),
            ("{}", bad_field("op")),
            (r#"{"op":7}"#, bad_field("op")),
            (r#"{"op":"drop"}"#, BadLine::UnknownOp),
            (r#"{"op":"ping"}"#, bad_field("id")),
            (r#"{"op":"ping","id":-1}"#, bad_field("id")),
            (r#"{"op":"ping","id":1,"id":2}"#, BadLine::BadFields),
            (r#"{"op":"hold","id":1,"objects":[]}"#, bad_field("epoch")),
            (r#"{"op":"hold","id":1,"epoch":1}"#, bad_field("objects")),
            (r#"{"op":"hold","id":1,"epoch":1,"objects":["k"]}"#, bad_field("objects")),
            (r#"{"op":"hold","id":1,"epoch":1,"objects":[["k",-1]]}"#, bad_field("objects")),
            (r#"{"op":"hold","id":1,"epoch":1,"objects":[["k",1,2]]}"#, bad_field("objects")),
            (r#"{"op":"hold","id":1,"epoch":1,"objects":[["k",1,2,3,4]]}"#, bad_field("objects")),
            (r#"{"op":"hello","version":1,"client":"a/b","lease_ms":1}"#, bad_field("client")),
            (r#"{"op":"hello","version":1,"client":"a","lease_ms":0}"#, bad_field("lease_ms")),
            (
                r#"{"op":"hello","version":1,"client":"a","lease_ms":1,"mapping":0}"#,
                bad_field("mapping"),
            ),
            (
                r#"{"op":"hello","version":1,"client":"a","lease_ms":1,"mapping":9007199254740993}"#,
                bad_field("mapping"),
            ),
            (
                r#"{"op":"hello","version":1,"client":"a","lease_ms":86400001}"#,
                bad_field("lease_ms"),
            ),
            (
                r#"{"op":"hello","version":1,"client":"a","lease_ms":1,"token":""}"#,
                bad_field("token"),
            ),
            (&deep, BadLine::TooDeep { limit: 8 }),
        ] {
            assert_eq!(parse(line).unwrap_err(), bad, "{line}");
        }
        let limits = Limits::default();
        assert_eq!(Request::parse(b"[\"\xff\"]", &limits), Err(BadLine::NotUtf8 { at: 2 }));
        assert_eq!(Request::parse(b"\0", &limits), Err(BadLine::NotJson { at: 1 }));
        assert_eq!(Request::id_of(br#"{"op":"drop","id":4}"#, &limits), Some(4));
        assert_eq!(Request::id_of(b"{", &limits), None);
    }

    #[test]
    fn tokens_are_neither_printed_nor_in_errors() {
        let line = r#"{"op":"hello","version":1,"client":"a","lease_ms":1,"token":"hush"}"#;
        assert!(!format!("{:?}", parse(line).unwrap()).contains("hush"));
        let twice = line.replace("\"version\"", "\"token\":\"hush\",\"version\"");
        let error = Error::from(parse(&twice).unwrap_err());
        assert!(!format!("{error} {error:?}").contains("hush"));
    }
}
