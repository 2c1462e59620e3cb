//! Reads over one connection: headers go ahead, bodies land where they belong.

use std::{collections::VecDeque, io::IoSliceMut};

use control_proto::mooncake::data::{HEADER_BYTES, Header, Opcode, STATUS_BYTES, Status, Version};
use rustix::io::Errno;
use transport_core::{Error, ErrorKind};

use super::plan::Request;
use crate::net::{Conn, Received, Until};

/// Pieces of memory that one system call fills; the system takes 1024.
const MAX_SLICES: usize = 64;

/// How far requests run ahead of their answers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    pub(super) requests: usize,
    pub(super) bytes: u64,
}

/// Why a series of reads ended early. The connection must not be used again.
#[derive(Debug)]
pub(super) struct Failure {
    /// Operation whose bytes were waited for.
    pub(super) op: usize,
    /// Whether any byte of any answer had come.
    pub(super) answered: bool,
    pub(super) cause: Cause,
}

#[derive(Debug)]
pub(super) enum Cause {
    /// The peer refused the address.
    Rejected(Status),
    /// The peer ended the stream before or within a body.
    Short { expected: u64, found: u64 },
    /// The peer broke the protocol.
    Protocol(Error),
    /// The system says so: reset, timed out, cancelled.
    System(Errno),
}

/// A request that was sent, and how much of its answer has come.
struct Pending<'a> {
    request: Request<'a>,
    status: [u8; STATUS_BYTES],
    filled: u64, // of status and body together
}

/// Reads everything that `source` yields. On success the connection is ready for more.
pub(super) fn read_all<'a>(
    conn: &mut Conn,
    version: Version,
    window: Window,
    until: Until<'_>,
    mut source: impl FnMut() -> Option<Request<'a>>,
) -> Result<(), Failure> {
    let mut flow = Flow {
        conn,
        version,
        status_bytes: if version == Version::V2 { STATUS_BYTES as u64 } else { 0 },
        pending: VecDeque::new(),
        pending_bytes: 0,
        answered: false,
        until,
    };
    let mut exhausted = false;
    loop {
        if !exhausted {
            exhausted = flow.ask(window, &mut source)?;
        }
        if flow.pending.is_empty() {
            return Ok(());
        }
        flow.take(window)?;
    }
}

struct Flow<'c, 'a> {
    conn: &'c mut Conn,
    version: Version,
    status_bytes: u64,
    pending: VecDeque<Pending<'a>>,
    pending_bytes: u64,
    answered: bool,
    until: Until<'c>,
}

impl<'a> Flow<'_, 'a> {
    /// Sends headers until the window is full; true if there are no more.
    fn ask(
        &mut self,
        window: Window,
        source: &mut impl FnMut() -> Option<Request<'a>>,
    ) -> Result<bool, Failure> {
        // Topped up in portions, so that many small reads do not cost a system call each.
        let portion = window.requests.div_ceil(2);
        if self.pending.len() > window.requests - portion {
            return Ok(false);
        }
        let mut headers = [0; HEADER_BYTES * 64];
        let (mut used, mut exhausted) = (0, false);
        while self.pending.len() < window.requests
            && used < headers.len()
            && (self.pending.is_empty() || self.pending_bytes < window.bytes)
        {
            let Some(request) = source() else {
                exhausted = true;
                break;
            };
            let header = Header {
                size: request.len,
                address: request.address,
                opcode: Opcode::Read,
                version: self.version,
            };
            headers[used..used + HEADER_BYTES].copy_from_slice(&header.encode());
            used += HEADER_BYTES;
            self.pending_bytes += request.len;
            self.pending.push_back(Pending { request, status: [0; STATUS_BYTES], filled: 0 });
        }
        if used > 0 {
            // Headers are small: they fit into the socket's buffers even when the peer is busy.
            self.conn
                .send_all(&headers[..used], self.until)
                .map_err(|e| self.failure(Cause::System(e)))?;
        }
        Ok(exhausted)
    }

    /// Receives once, into as many destinations as are waiting.
    fn take(&mut self, window: Window) -> Result<(), Failure> {
        let most = window.requests.div_ceil(2);
        let mut slices: Vec<IoSliceMut<'_>> = Vec::with_capacity(8);
        let mut wanted = 0;
        for pending in self.pending.iter_mut().take(most) {
            let large = pending.request.len >= 64 << 10;
            // A large body is read on its own, so that what comes after it can be asked for.
            if slices.len() >= MAX_SLICES - 34 || (large && !slices.is_empty()) {
                break;
            }
            let mut skip = pending.filled as usize;
            let status = self.status_bytes as usize;
            if skip < status {
                slices.push(IoSliceMut::new(&mut pending.status[skip..]));
                wanted += status - skip;
                skip = 0;
            } else {
                skip -= status;
            }
            for part in pending.request.parts.iter_mut() {
                if skip >= part.len() {
                    skip -= part.len();
                    continue;
                }
                let rest = &mut part[skip..];
                skip = 0;
                wanted += rest.len();
                slices.push(IoSliceMut::new(rest));
            }
            if large {
                break;
            }
        }
        debug_assert!(wanted > 0, "complete answers are taken off the front");
        let received = self.conn.receive(&mut slices, self.until);
        drop(slices);
        match received {
            Ok(Received::Bytes(n)) => {
                self.answered = true;
                self.account(n as u64)
            }
            Ok(Received::End) => Err(self.failure(self.short())),
            Err(e) => Err(self.failure(Cause::System(e))),
        }
    }

    /// Attributes received bytes to the answers in order.
    fn account(&mut self, mut bytes: u64) -> Result<(), Failure> {
        while bytes > 0 {
            let Some(front) = self.pending.front_mut() else { break };
            let total = self.status_bytes + front.request.len;
            let step = bytes.min(total - front.filled);
            let had_status = front.filled >= self.status_bytes;
            front.filled += step;
            bytes -= step;
            if !had_status && front.filled >= self.status_bytes {
                match Status::decode(front.status) {
                    Ok(Status::Ok) => {}
                    Ok(status) => return Err(self.failure(Cause::Rejected(status))),
                    Err(error) => return Err(self.failure(Cause::Protocol(error))),
                }
            }
            if front.filled == total {
                self.pending_bytes -= front.request.len;
                self.pending.pop_front();
            }
        }
        Ok(())
    }

    fn short(&self) -> Cause {
        let (expected, found) = self.pending.front().map_or((0, 0), |front| {
            (front.request.len, front.filled.saturating_sub(self.status_bytes))
        });
        Cause::Short { expected, found }
    }

    fn failure(&self, cause: Cause) -> Failure {
        let op = self.pending.front().map_or(0, |front| front.request.op);
        Failure { op, answered: self.answered, cause }
    }
}

impl Failure {
    /// Whether the connection, not the request, may be to blame: it had been idle, and the peer
    /// may have closed it.
    pub(super) fn is_stale_connection(&self) -> bool {
        !self.answered
            && matches!(
                self.cause,
                Cause::Short { .. } | Cause::System(Errno::CONNRESET | Errno::PIPE)
            )
    }

    /// Kind and message for people.
    pub(super) fn describe(&self) -> (ErrorKind, &'static str) {
        match &self.cause {
            Cause::Rejected(_) => {
                (ErrorKind::OutOfRange, "the peer publishes nothing at this address")
            }
            Cause::Short { .. } => {
                (ErrorKind::ShortRead, "the peer sent fewer bytes than asked for")
            }
            Cause::Protocol(_) => (ErrorKind::Protocol, "the peer's answer makes no sense"),
            Cause::System(Errno::TIMEDOUT) => (ErrorKind::Timeout, "the deadline passed"),
            Cause::System(Errno::CANCELED) => (ErrorKind::Closed, "the read was given up"),
            Cause::System(_) => (ErrorKind::PeerGone, "the connection broke"),
        }
    }
}
