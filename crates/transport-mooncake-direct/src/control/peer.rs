//! One connection of the control listener: its bytes in and out, and what it may do.

use std::{
    net::{Shutdown, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use control_proto::control::{Code, Response, Share};
use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags},
};
use transport_core::{ClientId, MapMark};

/// Answers of the arena that may be outstanding before no more is read.
const MAX_INFLIGHT: usize = 1024;
/// Unsent bytes at which no more is read.
const MAX_UNSENT: usize = 256 << 10;
/// How long a connection that is being closed may take to read its last lines.
const LINGER: Duration = Duration::from_secs(1);
/// Bytes that a connection which is being closed may still send before it is cut off.
const MAX_DROPPED: usize = 4 << 20;

/// A connected client, or somebody who has not said who it is.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) stream: TcpStream,
    pub(super) address: SocketAddr,
    /// Has sent an object line, so it reads answers.
    pub(super) extended: bool,
    pub(super) client: Option<Client>,
    /// When it was accepted, until its first complete line.
    pub(super) mute_since: Option<Instant>,
    pub(super) inflight: usize,
    pub(super) watched: Watched,
    state: State,
    out: Vec<u8>,
    sent: usize,
    share: Share,
}

/// Who a connection belongs to.
#[derive(Clone, Debug)]
pub(super) struct Client {
    pub(super) id: ClientId,
    pub(super) lease: Duration,
    pub(super) mark: Option<MapMark>,
    pub(super) seen: Instant,
    /// When the arena was last told.
    pub(super) told: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// The peer sends no more, but reads the answers to what it sent.
    HalfClosed {
        until: Instant,
    },
    /// Being closed: what comes in is dropped, what is left goes out.
    Closing {
        until: Instant,
        finished: bool,
        dropped: usize,
    },
}

/// What the poller waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Watched {
    pub(super) read: bool,
    pub(super) write: bool,
}

/// What a read brought.
pub(super) enum Input {
    Bytes(usize),
    Nothing,
    End,
    Gone,
}

impl Peer {
    pub(super) fn new(stream: TcpStream, address: SocketAddr, share: Share) -> Self {
        Self {
            stream,
            address,
            extended: false,
            client: None,
            mute_since: Some(Instant::now()),
            inflight: 0,
            watched: Watched::default(),
            state: State::Open,
            out: Vec::new(),
            sent: 0,
            share,
        }
    }

    pub(super) fn receive(&mut self, buffer: &mut [u8]) -> Input {
        match rustix::net::recv(&self.stream, buffer, RecvFlags::DONTWAIT) {
            Ok((0, _)) => Input::End,
            Ok((n, _)) => {
                if let State::Closing { dropped, .. } = &mut self.state {
                    *dropped += n;
                }
                Input::Bytes(n)
            }
            Err(Errno::AGAIN | Errno::INTR) => Input::Nothing,
            Err(_) => Input::Gone,
        }
    }

    /// Queues an answer; false if the peer leaves too many unread.
    #[must_use]
    pub(super) fn answer(&mut self, response: &Response, limit: usize) -> bool {
        response.write(&mut self.out);
        let waiting = self.out.len() - self.sent;
        waiting <= limit && self.share.resize(self.out.capacity())
    }

    /// Queues an error for those that read answers.
    pub(super) fn complain(&mut self, id: Option<u64>, code: Code, message: String, limit: usize) {
        if self.extended {
            // A peer that leaves too much unread is closed at its next answer.
            let _ = self.answer(&Response::Error { id, code, message }, limit);
        }
    }

    /// Sends what the socket takes; false if the peer is gone.
    #[must_use]
    pub(super) fn flush(&mut self) -> bool {
        while self.sent < self.out.len() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.stream, &self.out[self.sent..], flags) {
                Ok(n) => self.sent += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return true,
                Err(_) => return false,
            }
        }
        self.out.clear();
        self.sent = 0;
        if self.out.capacity() > 64 << 10 {
            self.out = Vec::new();
            let shrunk = self.share.resize(0);
            debug_assert!(shrunk, "a share can always shrink");
        }
        if let State::Closing { finished, .. } = &mut self.state
            && !*finished
        {
            *finished = true;
            let _ = self.stream.shutdown(Shutdown::Write); // gone already otherwise
        }
        true
    }

    /// Nothing was read from it for so long, so its silence does not count.
    pub(super) fn excuse(&mut self, unread: Duration) {
        if let Some(client) = &mut self.client {
            client.seen += unread;
        }
        if let Some(since) = &mut self.mute_since {
            *since += unread;
        }
    }

    /// The peer sends no more.
    pub(super) fn half_close(&mut self, now: Instant) {
        if self.state == State::Open {
            self.state = State::HalfClosed { until: now + LINGER };
        }
    }

    /// Lets the last answers go out, then ends the connection.
    pub(super) fn close_soon(&mut self, now: Instant) {
        if !matches!(self.state, State::Closing { .. }) {
            self.state = State::Closing { until: now + LINGER, finished: false, dropped: 0 };
        }
    }

    /// Whether lines are still taken from it.
    pub(super) fn is_open(&self) -> bool {
        self.state == State::Open
    }

    /// Whether there is nothing left to wait for.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        let unsent = self.sent < self.out.len();
        match self.state {
            State::Open => false,
            State::HalfClosed { until } => now >= until || (!unsent && self.inflight == 0),
            State::Closing { until, dropped, .. } => now >= until || dropped > MAX_DROPPED,
        }
    }

    /// What the poller should wait for now.
    pub(super) fn wants(&self) -> Watched {
        let unsent = self.out.len() - self.sent;
        let full = self.inflight >= MAX_INFLIGHT || unsent >= MAX_UNSENT;
        Watched {
            read: match self.state {
                State::Open => !full,
                State::HalfClosed { .. } => false,
                State::Closing { .. } => true,
            },
            write: unsent > 0,
        }
    }
}
