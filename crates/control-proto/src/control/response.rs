//! What a server sends, only to clients that began with `hello`.

use std::time::Duration;

use transport_core::{Epoch, Health, RemoteAddr, Sequence, SessionName};

use super::{
    BadLine, Limits, VERSION, bad_field, checked_text, lease_from_millis,
    request::not_a_message,
    write::{millis, open_op, write_id},
};
use crate::json::{
    ListFault, RawObject, Text, bounded_list, write_number, write_string, write_value,
};

/// One line of a server.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Response {
    /// Answer to a client's `hello`.
    Hello(ServerHello),
    /// Answer to `hold`: every object that is not listed is held now.
    Held {
        /// Id of the request.
        id: u64,
        /// Positions of objects that do not exist any more.
        gone: Vec<u32>,
        /// Positions of objects whose key lives on in another life.
        stale: Vec<u32>,
    },
    /// Answer to `free`: every object that is not listed was released by this call.
    Freed {
        /// Id of the request.
        id: u64,
        /// Positions of objects that were gone before.
        gone: Vec<u32>,
        /// Positions of objects whose key lives on in another life.
        stale: Vec<u32>,
    },
    /// Answer to `health`.
    Health {
        /// Id of the request.
        id: u64,
        /// What the server measured.
        health: Health,
    },
    /// Answer to `ping`.
    Pong {
        /// Id of the request.
        id: u64,
    },
    /// A line was refused, or the connection is about to end.
    Error {
        /// Id of the request, if it could be made out.
        id: Option<u64>,
        /// What is wrong, for programs.
        code: Code,
        /// What is wrong, for people; at most [`Response::MAX_MESSAGE_BYTES`] bytes.
        message: String,
    },
}

/// What a server says about itself and its arena.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerHello {
    /// Version of the extended lines that the server speaks on this connection.
    pub version: u32,
    /// Life of the server process.
    pub epoch: Epoch,
    /// Where its bytes are read.
    pub session: SessionName,
    /// Lease that it grants to this client; whole milliseconds.
    pub lease: Duration,
    /// Its memory.
    pub arena: ArenaInfo,
    /// Newest life of an object published before this greeting, if the server tells: whatever is
    /// later was published while it knew this client.
    pub last_seq: Option<Sequence>,
}

impl ServerHello {
    /// Answers a `hello`, speaking [`VERSION`].
    pub fn new(epoch: Epoch, session: SessionName, lease: Duration, arena: ArenaInfo) -> Self {
        Self { version: VERSION, epoch, session, lease, arena, last_seq: None }
    }

    /// Tells the newest life published so far.
    #[must_use]
    pub fn last_seq(mut self, seq: Sequence) -> Self {
        self.last_seq = Some(seq);
        self
    }
}

/// One block of memory that a server publishes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaInfo {
    /// First address, in the server's address space.
    pub base: RemoteAddr,
    /// Size.
    pub bytes: u64,
    /// How a process of the same host maps it, if it can.
    pub shm: Option<ShmInfo>,
}

/// A shared mapping: file descriptor `fd` of process `pid`, on the host that booted as `boot_id`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShmInfo {
    /// The kernel's boot id; at most 128 bytes.
    pub boot_id: String,
    /// Process that keeps the descriptor open.
    pub pid: u32,
    /// Descriptor in that process.
    pub fd: u32,
    /// Device number of the file behind it.
    pub dev: u64,
    /// Inode number of the file behind it.
    pub ino: u64,
}

/// Why a server refused a line.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Code {
    /// The line is for another life of the server.
    StaleEpoch,
    /// The token is missing or wrong.
    BadToken,
    /// An object line came before `hello`.
    NeedHello,
    /// The client's version is not spoken here.
    UnsupportedVersion,
    /// The line is no request; see [`BadLine`].
    BadLine,
    /// A line has no end, or too much waits; the connection is closed.
    LineTooLong,
    /// The server has as many connections as it takes; the connection is closed.
    TooManyConnections,
    /// The client was silent for too long; its claims ended, the connection is closed.
    LeaseExpired,
    /// Another consumer of the client's name is connected or maps the server's memory; the
    /// connection is closed.
    ClientInUse,
    /// The server is shutting down; the connection is closed.
    Closing,
    /// The server failed to serve the line.
    Internal,
    /// A code of a newer server; at most 64 bytes.
    Other(Box<str>),
}

impl Code {
    const KNOWN: [(Self, &'static str); 11] = [
        (Self::StaleEpoch, "stale_epoch"),
        (Self::BadToken, "bad_token"),
        (Self::NeedHello, "need_hello"),
        (Self::UnsupportedVersion, "unsupported_version"),
        (Self::BadLine, "bad_line"),
        (Self::LineTooLong, "line_too_long"),
        (Self::TooManyConnections, "too_many_connections"),
        (Self::LeaseExpired, "lease_expired"),
        (Self::ClientInUse, "client_in_use"),
        (Self::Closing, "closing"),
        (Self::Internal, "internal"),
    ];

    /// The code on the wire.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Other(code) => code,
            known => Self::KNOWN.iter().find(|(c, _)| c == known).map_or("internal", |(_, n)| n),
        }
    }

    fn parse(text: &str) -> Result<Self, BadLine> {
        if let Some((code, _)) = Self::KNOWN.into_iter().find(|(_, name)| *name == text) {
            return Ok(code);
        }
        if text.is_empty() || text.len() > 64 || text.chars().any(char::is_control) {
            return Err(bad_field("code"));
        }
        Ok(Self::Other(text.into()))
    }
}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Response {
    /// Longest message of an error, in bytes; longer ones are cut.
    pub const MAX_MESSAGE_BYTES: usize = 4096;

    /// Reads a line, without its newline. Fields that this version does not know are ignored.
    pub fn parse(line: &[u8], limits: &Limits) -> Result<Self, BadLine> {
        let text = checked_text(line, limits)?;
        if !text.trim_ascii_start().starts_with('{') {
            return Err(not_a_message(text));
        }
        let object = RawObject::parse(text)?;
        let Text(op) = object.field("op").map_err(bad_field)?;
        let id = || object.field("id").map_err(bad_field);
        let places = |name| -> Result<Vec<u32>, BadLine> {
            let limit = limits.keys_per_line;
            let list = object.get(name).ok_or(bad_field(name))?;
            bounded_list(list, limit).map_err(|fault| match fault {
                ListFault::TooMany => BadLine::TooManyKeys { limit },
                ListFault::Type(_) | ListFault::Syntax { .. } => bad_field(name),
            })
        };
        Ok(match &*op {
            "hello" => Self::Hello(ServerHello::parse(&object)?),
            "held" => Self::Held { id: id()?, gone: places("gone")?, stale: places("stale")? },
            "freed" => Self::Freed { id: id()?, gone: places("gone")?, stale: places("stale")? },
            "health" => {
                // Looked at first because serde would take a list for the fields in order.
                RawObject::parse(object.get("health").ok_or(bad_field("health"))?)?;
                Self::Health { id: id()?, health: object.field("health").map_err(bad_field)? }
            }
            "pong" => Self::Pong { id: id()? },
            "error" => {
                let Text(code) = object.field("code").map_err(bad_field)?;
                let message: Option<Text<'_>> = object.optional("message").map_err(bad_field)?;
                Self::Error {
                    id: object.optional("id").map_err(bad_field)?,
                    code: Code::parse(&code)?,
                    message: message.map_or_else(String::new, |Text(m)| cut(&m).to_owned()),
                }
            }
            _ => return Err(BadLine::UnknownOp),
        })
    }

    /// Appends the line, with its newline.
    pub fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Hello(hello) => hello.write(out),
            Self::Held { id, gone, stale } => write_outcome(out, "held", *id, gone, stale),
            Self::Freed { id, gone, stale } => write_outcome(out, "freed", *id, gone, stale),
            Self::Health { id, health } => {
                open_op(out, "health");
                write_id(out, *id);
                out.extend_from_slice(b",\"health\":");
                write_value(out, health);
            }
            Self::Pong { id } => {
                open_op(out, "pong");
                write_id(out, *id);
            }
            Self::Error { id, code, message } => {
                open_op(out, "error");
                match id {
                    Some(id) => write_id(out, *id),
                    None => out.extend_from_slice(b",\"id\":null"),
                }
                out.extend_from_slice(b",\"code\":");
                write_string(out, code.as_str());
                out.extend_from_slice(b",\"message\":");
                write_string(out, cut(message));
            }
        }
        out.extend_from_slice(b"}\n");
    }
}

impl ServerHello {
    fn parse(object: &RawObject<'_>) -> Result<Self, BadLine> {
        let Text(session) = object.field("session").map_err(bad_field)?;
        let arena = RawObject::parse(object.get("arena").ok_or(bad_field("arena"))?)?;
        Ok(Self {
            version: object.field("version").map_err(bad_field)?,
            epoch: object.field("epoch").map_err(bad_field)?,
            session: session.parse().map_err(|_| bad_field("session"))?,
            lease: lease_from_millis(object.field("lease_ms").map_err(bad_field)?)?,
            arena: ArenaInfo::parse(&arena)?,
            last_seq: object.optional("last_seq").map_err(bad_field)?,
        })
    }

    /// Appends the line but for its closing brace.
    fn write(&self, out: &mut Vec<u8>) {
        open_op(out, "hello");
        out.extend_from_slice(b",\"version\":");
        write_number(out, self.version.into());
        out.extend_from_slice(b",\"epoch\":");
        write_number(out, self.epoch.0);
        out.extend_from_slice(b",\"session\":");
        write_string(out, &self.session.to_string());
        out.extend_from_slice(b",\"lease_ms\":");
        write_number(out, millis(self.lease));
        if let Some(seq) = self.last_seq {
            out.extend_from_slice(b",\"last_seq\":");
            write_number(out, seq.0);
        }
        out.extend_from_slice(b",\"arena\":{\"base\":");
        write_number(out, self.arena.base.0);
        out.extend_from_slice(b",\"bytes\":");
        write_number(out, self.arena.bytes);
        out.extend_from_slice(b",\"shm\":");
        match &self.arena.shm {
            None => out.extend_from_slice(b"null"),
            Some(shm) => {
                out.extend_from_slice(b"{\"boot_id\":");
                write_string(out, &shm.boot_id);
                for (name, number) in [
                    ("pid", shm.pid.into()),
                    ("fd", shm.fd.into()),
                    ("dev", shm.dev),
                    ("ino", shm.ino),
                ] {
                    out.push(b',');
                    write_string(out, name);
                    out.push(b':');
                    write_number(out, number);
                }
                out.push(b'}');
            }
        }
        out.push(b'}');
    }
}

impl ArenaInfo {
    fn parse(object: &RawObject<'_>) -> Result<Self, BadLine> {
        let base = RemoteAddr(object.field("base").map_err(bad_field)?);
        let bytes = object.field("bytes").map_err(bad_field)?;
        if base.checked_add(bytes).is_none() {
            return Err(bad_field("bytes"));
        }
        let shm = match object.get("shm") {
            Some(raw) => Some(ShmInfo::parse(&RawObject::parse(raw)?)?),
            None => None,
        };
        Ok(Self { base, bytes, shm })
    }
}

impl ShmInfo {
    fn parse(object: &RawObject<'_>) -> Result<Self, BadLine> {
        let Text(boot_id) = object.field("boot_id").map_err(bad_field)?;
        if boot_id.len() > 128 {
            return Err(bad_field("boot_id"));
        }
        Ok(Self {
            boot_id: boot_id.into_owned(),
            pid: object.field("pid").map_err(bad_field)?,
            fd: object.field("fd").map_err(bad_field)?,
            dev: object.field("dev").map_err(bad_field)?,
            ino: object.field("ino").map_err(bad_field)?,
        })
    }
}

fn write_outcome(out: &mut Vec<u8>, op: &str, id: u64, gone: &[u32], stale: &[u32]) {
    open_op(out, op);
    write_id(out, id);
    for (name, places) in [("gone", gone), ("stale", stale)] {
        out.push(b',');
        write_string(out, name);
        out.extend_from_slice(b":[");
        for (i, place) in places.iter().enumerate() {
            if i > 0 {
                out.push(b',');
            }
            write_number(out, (*place).into());
        }
        out.push(b']');
    }
}

/// At most [`Response::MAX_MESSAGE_BYTES`] of a message, in whole characters.
fn cut(message: &str) -> &str {
    let mut end = message.len().min(Response::MAX_MESSAGE_BYTES);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    &message[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(response: Response) -> String {
        let mut out = Vec::new();
        response.write(&mut out);
        let line = out.strip_suffix(b"\n").unwrap();
        assert!(!line.contains(&b'\n'));
        assert_eq!(Response::parse(line, &Limits::default()).unwrap(), response);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn every_code_and_answer_comes_back() {
        for (code, name) in Code::KNOWN {
            assert_eq!(code.as_str(), name);
            round_trip(Response::Error { id: None, code, message: "why\n\"so\"".into() });
        }
        let code = Code::Other("from_the_future".into());
        round_trip(Response::Error { id: Some(3), code, message: String::new() });
        let mut health = Health::default();
        health.resident_samples = 3;
        health.last_error = Some("x".into());
        round_trip(Response::Health { id: 1, health });
        let line = round_trip(Response::Held { id: 2, gone: vec![0, 7], stale: vec![] });
        assert_eq!(line, "{\"op\":\"held\",\"id\":2,\"gone\":[0,7],\"stale\":[]}\n");
    }

    #[test]
    fn greetings_may_tell_the_newest_life() {
        let arena = ArenaInfo { base: RemoteAddr(4096), bytes: 512, shm: None };
        let session = "h:1".parse().unwrap();
        let hello = ServerHello::new(Epoch(5), session, std::time::Duration::from_secs(30), arena);
        let line = round_trip(Response::Hello(hello.clone()));
        assert!(!line.contains("last_seq"), "{line}");
        let line = round_trip(Response::Hello(hello.last_seq(Sequence(7))));
        assert!(line.contains("\"last_seq\":7,\"arena\""), "{line}");
    }

    #[test]
    fn messages_are_cut_between_characters() {
        let message = "ü".repeat(4000);
        let mut out = Vec::new();
        Response::Error { id: None, code: Code::Internal, message }.write(&mut out);
        let Response::Error { message, .. } =
            Response::parse(out.trim_ascii(), &Limits::default()).unwrap()
        else {
            panic!("not an error");
        };
        assert_eq!(message.len(), 4096);
    }

    #[test]
    fn absurd_answers_are_refused() {
        let hello = |arena: &str| {
            format!(
                "{{\"op\":\"hello\",\"version\":1,\"epoch\":5,\"session\":\"h:1\",\"lease_ms\":9,\"arena\":{arena}}}"
            )
        };
        for (line, bad) in [
            (hello("{\"base\":1,\"bytes\":18446744073709551615,\"shm\":null}"), bad_field("bytes")),
            (
                hello("{\"base\":1,\"bytes\":1,\"shm\":{\"boot_id\":\"b\",\"pid\":-1}}"),
                bad_field("pid"),
            ),
            (hello("[]"), BadLine::NotAMessage),
            (hello("{\"base\":1,\"bytes\":1}").replace("h:1", "h"), bad_field("session")),
            ("{\"op\":\"freed\",\"id\":1,\"gone\":[-1],\"stale\":[]}".into(), bad_field("gone")),
            ("{\"op\":\"error\",\"code\":\"\"}".into(), bad_field("code")),
            ("[]".into(), BadLine::NotAMessage),
        ] {
            let found = Response::parse(line.as_bytes(), &Limits::default()).unwrap_err();
            assert_eq!(found, bad, "{line}");
        }
        assert!(
            Response::parse(hello("{\"base\":1,\"bytes\":1}").as_bytes(), &Limits::default())
                .is_ok()
        );
    }
}
