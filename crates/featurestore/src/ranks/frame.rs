//! The bytes between ranks: length (u32 LE), kind (u8), call (u64 LE), payload.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use transport_core::{Error, ErrorKind, Result};

/// What is sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// Who joins.
    Hello(Hello),
    /// One rank's contribution.
    Part { call: u64, bytes: Vec<u8> },
    /// What the leader gives to all.
    Answer { call: u64, parts: Vec<Vec<u8>> },
    /// Why there is no answer; `fatal` if the group is broken.
    Failed { call: u64, message: String, fatal: bool },
}

/// Who joins. Its `Debug` shows no token.
#[derive(PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) run: String,
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) token: String,
}

impl std::fmt::Debug for Hello {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hello").field("run", &self.run).field("rank", &self.rank).finish()
    }
}

const MAGIC: &[u8; 8] = b"fsranks1";

fn bad(why: &'static str) -> Error {
    Error::new(ErrorKind::Protocol, "ranks", why)
}

impl Frame {
    fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; 4];
        let mut head = |kind: u8, call: u64| {
            out.push(kind);
            out.extend_from_slice(&call.to_le_bytes());
        };
        match self {
            Self::Hello(hello) => {
                head(0, 0);
                out.extend_from_slice(MAGIC);
                out.extend_from_slice(&hello.rank.to_le_bytes());
                out.extend_from_slice(&hello.size.to_le_bytes());
                text(&mut out, hello.run.as_bytes());
                text(&mut out, hello.token.as_bytes());
            }
            Self::Part { call, bytes } => {
                head(1, *call);
                out.extend_from_slice(bytes);
            }
            Self::Answer { call, parts } => {
                head(2, *call);
                out.extend_from_slice(&(parts.len() as u32).to_le_bytes());
                parts.iter().for_each(|part| text(&mut out, part));
            }
            Self::Failed { call, message, fatal } => {
                head(if *fatal { 4 } else { 3 }, *call);
                out.extend_from_slice(message.as_bytes());
            }
        }
        let length = (out.len() - 4) as u32;
        out[..4].copy_from_slice(&length.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8]) -> Result<Self> {
        let mut rest = bytes;
        let kind = take(&mut rest, 1)?[0];
        let call = number(&mut rest, 8)?;
        Ok(match kind {
            0 => {
                if take(&mut rest, 8)? != MAGIC {
                    return Err(bad("not a rank of this version"));
                }
                let (rank, size) = (number(&mut rest, 4)? as u32, number(&mut rest, 4)? as u32);
                let (run, token) = (piece(&mut rest)?, piece(&mut rest)?);
                let text = |bytes| String::from_utf8(bytes).map_err(|_| bad("not UTF-8"));
                Self::Hello(Hello { run: text(run)?, rank, size, token: text(token)? })
            }
            1 => Self::Part { call, bytes: rest.to_vec() },
            2 => {
                let count = number(&mut rest, 4)?;
                let parts = (0..count).map(|_| piece(&mut rest)).collect::<Result<_>>()?;
                Self::Answer { call, parts }
            }
            3 | 4 => Self::Failed {
                call,
                message: String::from_utf8_lossy(rest).into_owned(),
                fatal: kind == 4,
            },
            _ => return Err(bad("an unknown kind of frame")),
        })
    }
}

fn text(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(bytes);
}

fn take<'a>(rest: &mut &'a [u8], count: usize) -> Result<&'a [u8]> {
    let (head, tail) = rest.split_at_checked(count).ok_or_else(|| bad("a frame is cut off"))?;
    *rest = tail;
    Ok(head)
}

fn number(rest: &mut &[u8], bytes: usize) -> Result<u64> {
    let mut whole = [0; 8];
    whole[..bytes].copy_from_slice(take(rest, bytes)?);
    Ok(u64::from_le_bytes(whole))
}

fn piece(rest: &mut &[u8]) -> Result<Vec<u8>> {
    let length = number(rest, 4)? as usize;
    Ok(take(rest, length)?.to_vec())
}

/// Time left until `deadline`, never zero, which would mean no bound.
fn left(deadline: Instant) -> Result<Duration> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => {
            Err(Error::new(ErrorKind::Timeout, "ranks", "a rank did not answer in time")
                .remedy("check whether that rank still trains, or give the group more time"))
        }
        left => Ok(left),
    }
}

pub(super) fn write_frame(stream: &mut TcpStream, frame: &Frame, deadline: Instant) -> Result<()> {
    let bytes = frame.encode();
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let io = |e| Error::io("ranks", e);
        stream.set_write_timeout(Some(left(deadline)?)).map_err(io)?;
        match stream.write(rest) {
            Ok(0) => return Err(gone()),
            Ok(written) => rest = &rest[written..],
            Err(e) if again(&e) => {}
            Err(e) => return Err(io(e)),
        }
    }
    Ok(())
}

/// Reads one frame of at most about `most` bytes.
pub(super) fn read_frame(stream: &mut TcpStream, most: usize, deadline: Instant) -> Result<Frame> {
    /// Heads and lengths beside the payload.
    const HEADS: usize = 64 << 10;
    let mut length = [0; 4];
    read_all(stream, &mut length, deadline)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > most.saturating_add(HEADS) {
        return Err(bad("a frame is too long").with("bytes", length).with("max_bytes", most));
    }
    let mut bytes = Vec::new();
    // Memory grows with what arrives, not with what is announced.
    while bytes.len() < length {
        let start = bytes.len();
        bytes.resize(length.min(start + (1 << 20)), 0);
        read_all(stream, &mut bytes[start..], deadline)?;
    }
    Frame::decode(&bytes)
}

fn read_all(stream: &mut TcpStream, mut out: &mut [u8], deadline: Instant) -> Result<()> {
    while !out.is_empty() {
        let io = |e| Error::io("ranks", e);
        stream.set_read_timeout(Some(left(deadline)?)).map_err(io)?;
        match stream.read(out) {
            Ok(0) => return Err(gone()),
            Ok(read) => out = &mut out[read..],
            Err(e) if again(&e) => {}
            Err(e) => return Err(io(e)),
        }
    }
    Ok(())
}

fn again(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

fn gone() -> Error {
    Error::new(ErrorKind::PeerGone, "ranks", "a rank has gone away")
        .remedy("restart all ranks from the newest checkpoint")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn frames_survive_and_junk_is_an_error_not_a_panic(
            call: u64, parts: Vec<Vec<u8>>, message: String, fatal: bool, junk: Vec<u8>,
        ) {
            for frame in [
                Frame::Part { call, bytes: junk.clone() },
                Frame::Answer { call, parts },
                Frame::Failed { call, message: message.clone(), fatal },
                Frame::Hello(Hello { run: message, rank: 3, size: 8, token: "t".into() }),
            ] {
                let bytes = frame.encode();
                prop_assert_eq!(Frame::decode(&bytes[4..]).unwrap(), frame);
                let _ = Frame::decode(&bytes[4..bytes.len() / 2 + 2]);
            }
            let _ = Frame::decode(&junk);
        }
    }
}
