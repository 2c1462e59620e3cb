//! One connection, read and written by the thread that owns it.

use std::{
    io::{IoSlice, IoSliceMut},
    net::TcpStream,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags},
};

/// How long one system call may block before the deadline and the stop flag are looked at.
const TICK: Duration = Duration::from_millis(100);

/// When to give up waiting.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Until<'a> {
    /// Latest end.
    pub(crate) deadline: Instant,
    /// Ends the wait early when set.
    pub(crate) stop: Option<&'a AtomicBool>,
}

impl Until<'_> {
    pub(crate) fn at(deadline: Instant) -> Self {
        Self { deadline, stop: None }
    }

    fn check(self, now: Instant) -> Result<Duration, Errno> {
        if self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            return Err(Errno::CANCELED);
        }
        let left = self.deadline.saturating_duration_since(now);
        if left.is_zero() { Err(Errno::TIMEDOUT) } else { Ok(left) }
    }
}

/// What a read brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// So many bytes, at least one.
    Bytes(usize),
    /// The peer sends no more.
    End,
}

/// A blocking connection whose every wait is bounded.
///
/// Errors: `TIMEDOUT` at the deadline, `CANCELED` when stopped, else what the system says.
#[derive(Debug)]
pub(crate) struct Conn {
    stream: Arc<TcpStream>,
    read_tick: Duration,
    write_tick: Duration,
}

impl Conn {
    pub(crate) fn new(stream: impl Into<Arc<TcpStream>>) -> std::io::Result<Self> {
        let stream = stream.into();
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(TICK))?;
        stream.set_write_timeout(Some(TICK))?;
        Ok(Self { stream, read_tick: TICK, write_tick: TICK })
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Reads into `parts` in order: all they hold, unless the deadline comes or the peer ends the
    /// stream first.
    pub(crate) fn receive(
        &mut self,
        parts: &mut [IoSliceMut<'_>],
        until: Until<'_>,
    ) -> Result<Received, Errno> {
        loop {
            let left = until.check(Instant::now())?;
            self.tick_for(left, true)?;
            let flags = RecvFlags::WAITALL;
            let read = match &mut *parts {
                [part] => rustix::net::recv(&self.stream, &mut **part, flags).map(|(n, _)| n),
                parts => {
                    let mut control = RecvAncillaryBuffer::new(&mut []);
                    rustix::net::recvmsg(&self.stream, parts, &mut control, flags).map(|m| m.bytes)
                }
            };
            match read {
                Ok(0) => return Ok(Received::End),
                Ok(n) => return Ok(Received::Bytes(n)),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Reads what is there, at least one byte.
    pub(crate) fn receive_some(
        &mut self,
        buffer: &mut [u8],
        until: Until<'_>,
    ) -> Result<Received, Errno> {
        loop {
            let left = until.check(Instant::now())?;
            self.tick_for(left, true)?;
            match rustix::net::recv(&self.stream, &mut *buffer, RecvFlags::empty()) {
                Ok((0, _)) => return Ok(Received::End),
                Ok((n, _)) => return Ok(Received::Bytes(n)),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Fills the whole buffer; the number of bytes is less only if the peer ended the stream.
    pub(crate) fn receive_exact(
        &mut self,
        buffer: &mut [u8],
        until: Until<'_>,
    ) -> Result<usize, Errno> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.receive(&mut [IoSliceMut::new(&mut buffer[filled..])], until)? {
                Received::Bytes(n) => filled += n,
                Received::End => break,
            }
        }
        Ok(filled)
    }

    /// Writes all of `parts`. `stall` bounds the time without any progress, `until` all of it.
    pub(crate) fn send(
        &mut self,
        mut parts: &mut [IoSlice<'_>],
        stall: Duration,
        until: Until<'_>,
    ) -> Result<(), Errno> {
        IoSlice::advance_slices(&mut parts, 0); // drops empty ones
        let mut progress = Instant::now();
        while !parts.is_empty() {
            let now = Instant::now();
            let left = until.check(now)?;
            if now.saturating_duration_since(progress) >= stall {
                return Err(Errno::TIMEDOUT);
            }
            self.tick_for(left.min(stall), false)?;
            let sent = match &*parts {
                [part] => rustix::net::send(&self.stream, part, SendFlags::NOSIGNAL),
                parts => {
                    let mut control = SendAncillaryBuffer::new(&mut []);
                    rustix::net::sendmsg(&self.stream, parts, &mut control, SendFlags::NOSIGNAL)
                }
            };
            match sent {
                Ok(n) => {
                    if n > 0 {
                        progress = Instant::now();
                    }
                    IoSlice::advance_slices(&mut parts, n);
                }
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Writes all of `bytes` by the deadline.
    pub(crate) fn send_all(&mut self, bytes: &[u8], until: Until<'_>) -> Result<(), Errno> {
        self.send(&mut [IoSlice::new(bytes)], Duration::MAX, until)
    }

    /// Whether the peer neither ended the stream nor sent anything: fit for the next exchange.
    pub(crate) fn is_quiet(&self) -> bool {
        let mut byte = [0u8; 1];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(rustix::net::recv(&self.stream, &mut byte[..], flags), Err(Errno::AGAIN))
    }

    /// Sets the system's own time limit, if it is not what is needed.
    fn tick_for(&mut self, left: Duration, read: bool) -> Result<(), Errno> {
        let want = left.clamp(Duration::from_millis(1), TICK);
        let tick = if read { &mut self.read_tick } else { &mut self.write_tick };
        if *tick != want {
            let set = if read {
                self.stream.set_read_timeout(Some(want))
            } else {
                self.stream.set_write_timeout(Some(want))
            };
            set.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::INVAL))?;
            *tick = want;
        }
        Ok(())
    }
}

impl AsFd for Conn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write, net::TcpListener};

    use super::*;

    fn pair() -> (Conn, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Conn::new(listener.accept().unwrap().0).unwrap(), client)
    }

    fn in_ms(ms: u64) -> Until<'static> {
        Until::at(Instant::now() + Duration::from_millis(ms))
    }

    #[test]
    fn waits_end_at_the_deadline_and_when_stopped() {
        let (mut conn, mut peer) = pair();
        let start = Instant::now();
        let mut buffer = [0; 8];
        assert_eq!(conn.receive_exact(&mut buffer, in_ms(30)), Err(Errno::TIMEDOUT));
        assert!(start.elapsed() < Duration::from_millis(500));
        let stop = AtomicBool::new(true);
        let until = Until { stop: Some(&stop), ..in_ms(10_000) };
        assert_eq!(conn.receive_exact(&mut buffer, until), Err(Errno::CANCELED));
        peer.write_all(b"abc").unwrap();
        drop(peer);
        assert_eq!(conn.receive_exact(&mut buffer, in_ms(5_000)), Ok(3));
        assert!(!conn.is_quiet());
    }

    #[test]
    fn a_peer_that_does_not_read_stalls_the_sender_only_so_long() {
        let (mut conn, _peer) = pair();
        assert!(conn.is_quiet());
        let big = vec![0; 64 << 20];
        let stall = Duration::from_millis(200);
        let sent = conn.send(&mut [IoSlice::new(&big)], stall, in_ms(20_000));
        assert_eq!(sent, Err(Errno::TIMEDOUT));
    }
}
