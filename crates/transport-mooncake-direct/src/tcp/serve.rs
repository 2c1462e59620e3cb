//! One data connection, as the server sees it.

use std::{
    io::IoSlice,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use capture_arena::{ExportTable, PinnedRange};
use control_proto::mooncake::data::{HEADER_BYTES, Header, Opcode, STATUS_BYTES, Status, Version};
use rustix::io::Errno;
use transport_core::{Error, Result};

use super::window::WriteWindow;
use crate::net::{Conn, Received, Until};

/// Requests that are answered with one system call.
const MAX_ANSWERS: usize = 32;
/// Bytes of bodies after which an answer is sent at once.
const ENOUGH_BYTES: u64 = 256 << 10;
/// Slowest peer that is waited for beyond the stall limit, in bytes a second.
const MIN_RATE: u64 = 1 << 20;

/// Bounds of one connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Between two requests.
    pub(super) idle: Duration,
    /// For the first request, for the rest of a started one, and without progress in sending.
    pub(super) stall: Duration,
    /// Largest transfer.
    pub(super) max_transfer: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) reads: AtomicU64,
    pub(super) read_bytes: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) write_bytes: AtomicU64,
    pub(super) rejected: AtomicU64,
    pub(super) protocol_errors: AtomicU64,
    pub(super) handshakes: AtomicU64,
    pub(super) last_error: parking_lot::Mutex<Option<String>>,
}

impl Counters {
    pub(super) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    pub(super) fn failed(&self, error: &Error) {
        Self::add(&self.protocol_errors, 1);
        *self.last_error.lock() = Some(error.to_string());
    }
}

/// What a connection is served from.
pub(super) struct Served<'a> {
    pub(super) exports: &'a ExportTable,
    pub(super) window: Option<&'a WriteWindow>,
    pub(super) bounds: Bounds,
    pub(super) counters: &'a Counters,
}

/// Answers requests until the peer leaves, breaks the rules, or stalls.
///
/// The error, if any, is the peer's doing; a connection that simply ends is none.
pub(super) fn serve(conn: Conn, served: &Served<'_>, stop: &AtomicBool) -> Result<()> {
    Session { conn, served, stop, input: Input::new(), answers: Vec::with_capacity(MAX_ANSWERS) }
        .run()
}

/// Headers that have come but are not answered yet.
struct Input {
    bytes: [u8; HEADER_BYTES * 2 * MAX_ANSWERS],
    start: usize,
    end: usize,
}

impl Input {
    fn new() -> Self {
        Self { bytes: [0; HEADER_BYTES * 2 * MAX_ANSWERS], start: 0, end: 0 }
    }

    fn take_header(&mut self) -> Option<[u8; HEADER_BYTES]> {
        let header = *self.bytes[self.start..self.end].first_chunk()?;
        self.start += HEADER_BYTES;
        Some(header)
    }

    fn is_empty(&self) -> bool {
        self.start == self.end
    }

    fn room(&mut self) -> &mut [u8] {
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        &mut self.bytes[self.end..]
    }
}

struct Answer {
    status: [u8; STATUS_BYTES],
    version: Version,
    body: Option<PinnedRange>,
}

/// Whether the connection goes on.
enum Next {
    More,
    End,
}

struct Session<'a> {
    conn: Conn,
    served: &'a Served<'a>,
    stop: &'a AtomicBool,
    input: Input,
    answers: Vec<Answer>,
}

impl Session<'_> {
    fn run(mut self) -> Result<()> {
        let mut wait = self.served.bounds.stall; // nobody connects to be silent
        loop {
            match self.wait_for_header(wait)? {
                Next::End => return Ok(()),
                Next::More => {}
            }
            if let Next::End = self.answer_all()? {
                return Ok(());
            }
            wait = self.served.bounds.idle;
        }
    }

    fn until(&self, wait: Duration) -> Until<'static> {
        Until::at(Instant::now() + wait)
    }

    /// Returns with at least one whole header at hand.
    fn wait_for_header(&mut self, wait: Duration) -> Result<Next> {
        let mut until = Until { stop: Some(self.stop), ..self.until(wait) };
        while self.input.end - self.input.start < HEADER_BYTES {
            let idle = self.input.is_empty();
            match self.conn.receive_some(self.input.room(), until) {
                Ok(Received::Bytes(n)) => {
                    self.input.end += n;
                    if idle {
                        until.deadline = Instant::now() + self.served.bounds.stall;
                    }
                }
                // Idle connections end on either side; a header cut short is a fault.
                Ok(Received::End) | Err(Errno::TIMEDOUT) if idle => return Ok(Next::End),
                Err(Errno::CANCELED) => return Ok(Next::End),
                Ok(Received::End) => {
                    return Err(protocol("the connection ended within a header"));
                }
                Err(e) => return ended(e),
            }
        }
        Ok(Next::More)
    }

    /// Answers every whole header at hand.
    fn answer_all(&mut self) -> Result<Next> {
        let mut bytes = 0;
        while let Some(header) = self.input.take_header() {
            let header = match Header::decode(&header, self.served.bounds.max_transfer) {
                Ok(header) => header,
                Err(error) => return self.refuse_nonsense(&header, error),
            };
            match header.opcode {
                Opcode::Read => {
                    let body = self.served.exports.pin(header.address, header.size);
                    let refused = body.is_err();
                    if let Err(reason) = &body {
                        Counters::add(&self.served.counters.rejected, 1);
                        tracing::debug!(%reason, "read refused");
                    }
                    if refused && header.version == Version::V1 {
                        self.flush()?;
                        return Ok(Next::End); // version 1 has no other way to say no
                    }
                    let status = if refused { Status::AddressRejected } else { Status::Ok };
                    bytes += if refused { 0 } else { header.size };
                    self.answers.push(Answer {
                        status: status.encode(),
                        version: header.version,
                        body: body.ok(),
                    });
                    if self.answers.len() >= MAX_ANSWERS || bytes >= ENOUGH_BYTES {
                        if let Next::End = self.flush()? {
                            return Ok(Next::End);
                        }
                        bytes = 0;
                    }
                }
                Opcode::Write => {
                    if let Next::End = self.flush()? {
                        return Ok(Next::End);
                    }
                    if let Next::End = self.take_write(header)? {
                        return Ok(Next::End);
                    }
                }
            }
        }
        self.flush()
    }

    /// Sends what is answered so far, status frames and bodies together.
    fn flush(&mut self) -> Result<Next> {
        if self.answers.is_empty() {
            return Ok(Next::More);
        }
        let mut parts = Vec::with_capacity(2 * self.answers.len());
        let mut bytes = 0;
        for answer in &self.answers {
            if answer.version == Version::V2 {
                parts.push(IoSlice::new(&answer.status));
            }
            if let Some(body) = &answer.body {
                parts.push(IoSlice::new(body));
                bytes += body.len() as u64;
            }
        }
        let stall = self.served.bounds.stall;
        let until = Until {
            stop: Some(self.stop),
            ..self.until(stall + Duration::from_secs(bytes / MIN_RATE))
        };
        let sent = self.conn.send(&mut parts, stall, until);
        drop(parts);
        let reads = self.answers.iter().filter(|a| a.body.is_some()).count();
        self.answers.clear(); // unpins
        match sent {
            Ok(()) => {
                Counters::add(&self.served.counters.reads, reads as u64);
                Counters::add(&self.served.counters.read_bytes, bytes);
                Ok(Next::More)
            }
            Err(e) => ended(e),
        }
    }

    /// A header that cannot be obeyed: the rest of the stream makes no sense.
    fn refuse_nonsense(&mut self, header: &[u8; HEADER_BYTES], error: Error) -> Result<Next> {
        self.flush()?;
        if header[16] & 0x80 != 0 {
            let until = self.until(self.served.bounds.stall);
            // The peer may be gone already; the connection ends in any case.
            let _ = self.conn.send_all(&Status::AddressRejected.encode(), until);
        }
        Counters::add(&self.served.counters.rejected, 1);
        Err(error)
    }

    /// Takes the body of a write. A refused one is read and dropped, so that the peer sees the
    /// status; where there is none, the connection ends.
    fn take_write(&mut self, header: Header) -> Result<Next> {
        let window =
            self.served.window.filter(|window| window.range(header.address, header.size).is_some());
        if window.is_none() {
            Counters::add(&self.served.counters.rejected, 1);
            tracing::debug!(
                address = header.address.0,
                bytes = header.size,
                writable = self.served.window.is_some(),
                "write refused"
            );
            if header.version == Version::V1 {
                return Ok(Next::End);
            }
        }
        let stall = self.served.bounds.stall;
        let mut left = header.size;
        let mut chunk = vec![0; (64 << 10).min(left as usize)];
        let overall = Instant::now() + stall + Duration::from_secs(left / MIN_RATE);
        while left > 0 {
            let want = chunk.len().min(left as usize);
            let at_hand = (self.input.end - self.input.start).min(want);
            let n = if at_hand > 0 {
                let from = self.input.start;
                chunk[..at_hand].copy_from_slice(&self.input.bytes[from..from + at_hand]);
                self.input.start += at_hand;
                at_hand
            } else {
                let deadline = overall.min(Instant::now() + stall);
                let until = Until { deadline, stop: Some(self.stop) };
                match self.conn.receive_some(&mut chunk[..want], until) {
                    Ok(Received::Bytes(n)) => n,
                    Ok(Received::End) => {
                        return Err(protocol("the connection ended within a write"));
                    }
                    Err(e) => return ended(e),
                }
            };
            if let Some(window) = window {
                let done = header.size - left;
                let address = header.address.checked_add(done).expect("inside the window");
                assert!(window.write(address, &chunk[..n]), "checked above");
            }
            left -= n as u64;
        }
        if window.is_some() {
            Counters::add(&self.served.counters.writes, 1);
            Counters::add(&self.served.counters.write_bytes, header.size);
        }
        if header.version == Version::V2 {
            let status = if window.is_some() { Status::Ok } else { Status::AddressRejected };
            let until = self.until(stall);
            return match self.conn.send_all(&status.encode(), until) {
                Ok(()) => Ok(Next::More),
                Err(e) => ended(e),
            };
        }
        Ok(Next::More)
    }
}

fn protocol(message: &'static str) -> Error {
    Error::new(transport_core::ErrorKind::Protocol, "serve data connection", message)
}

/// What the end of a connection means: a peer that leaves is no fault, one that stalls is.
fn ended(error: Errno) -> Result<Next> {
    match error {
        Errno::CANCELED | Errno::CONNRESET | Errno::PIPE => Ok(Next::End),
        Errno::TIMEDOUT => Err(Error::new(
            transport_core::ErrorKind::Timeout,
            "serve data connection",
            "the peer stalled within an exchange",
        )),
        e => Err(Error::io("serve data connection", e.into())),
    }
}
