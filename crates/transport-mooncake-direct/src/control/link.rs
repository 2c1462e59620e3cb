//! One connection to a server, as the client sees it: bytes out, lines in.

use std::{net::TcpStream, sync::Arc, time::Instant};

use control_proto::control::{Budget, Limits, LineDecoder};
use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags},
};
use transport_core::{Error, ErrorKind, Result};

/// An open connection that never blocks.
#[derive(Debug)]
pub(super) struct Link {
    stream: Arc<TcpStream>,
    decoder: LineDecoder,
    out: Vec<u8>,
    sent: usize,
    buffer: Vec<u8>,
    pub(super) heard: Instant,
}

impl Link {
    pub(super) fn new(stream: TcpStream, limits: Limits) -> Result<Self> {
        stream.set_nonblocking(true).map_err(|e| Error::io("connect", e))?;
        let decoder = Budget::new(Limits { connections: 1, ..limits })
            .connect()
            .map_err(|e| Error::new(ErrorKind::Busy, "connect", e.to_string()))?;
        Ok(Self {
            stream: Arc::new(stream),
            decoder,
            out: Vec::new(),
            sent: 0,
            buffer: vec![0; 64 << 10],
            heard: Instant::now(),
        })
    }

    /// The socket, to wait for it.
    pub(super) fn stream(&self) -> Arc<TcpStream> {
        self.stream.clone()
    }

    /// Where lines to send are appended.
    pub(super) fn out(&mut self) -> &mut Vec<u8> {
        &mut self.out
    }

    /// Bytes that wait to be sent.
    pub(super) fn unsent(&self) -> usize {
        self.out.len() - self.sent
    }

    /// Sends what the socket takes.
    pub(super) fn flush(&mut self) -> Result<(), Errno> {
        while self.sent < self.out.len() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.stream, &self.out[self.sent..], flags) {
                Ok(n) => self.sent += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(e) => return Err(e),
            }
        }
        self.out.clear();
        self.sent = 0;
        if self.out.capacity() > 1 << 20 {
            self.out = Vec::new();
        }
        Ok(())
    }

    /// Whether the peer has ended the connection, as far as can be seen without taking anything.
    pub(super) fn has_ended(&self) -> bool {
        let mut byte = [0u8; 1];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(&self.stream, &mut byte[..], flags) {
            Ok((n, _)) => n == 0,
            Err(e) => !matches!(e, Errno::AGAIN | Errno::INTR),
        }
    }

    /// Hands every line that has come to `take`; an error ends the connection.
    pub(super) fn receive(&mut self, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        loop {
            let flags = RecvFlags::DONTWAIT;
            let n = match rustix::net::recv(&self.stream, &mut self.buffer[..], flags) {
                Ok((0, _)) => {
                    return Err(Error::new(
                        ErrorKind::PeerGone,
                        "control",
                        "the server closed the connection",
                    ));
                }
                Ok((n, _)) => n,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(()),
                Err(e) => return Err(Error::io("control", e.into())),
            };
            self.heard = Instant::now();
            let mut input = &self.buffer[..n];
            while let Some(line) = self.decoder.next_line(&mut input)? {
                take(line)?;
            }
            if n < self.buffer.len() {
                return Ok(());
            }
        }
    }
}
