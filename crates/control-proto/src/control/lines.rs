//! Cutting byte streams into lines, within bounds per line, per connection and in total.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::Limits;

/// What all connections of a listener share: how many there may be, and how much may wait.
///
/// Half of [`Limits::total_bytes`] is split evenly among [`Limits::connections`], so that a peer
/// with lines of ordinary length is served whatever the others leave unfinished; the other half
/// goes to whoever needs more. Clones share one account.
#[derive(Clone)]
pub struct Budget(Arc<Account>);

struct Account {
    limits: Limits,
    /// Bytes that every connection may use without asking.
    own_bytes: usize,
    free_bytes: AtomicUsize,
    connections: AtomicUsize,
}

/// Why a connection cannot be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the limit of {limit} connections is reached")]
pub struct Refused {
    /// [`Limits::connections`].
    pub limit: usize,
}

impl Budget {
    /// An unused budget.
    pub fn new(limits: Limits) -> Self {
        let own_bytes = limits.total_bytes / 2 / limits.connections.max(1);
        let free_bytes = limits.total_bytes - own_bytes * limits.connections;
        Self(Arc::new(Account {
            limits,
            own_bytes,
            free_bytes: AtomicUsize::new(free_bytes),
            connections: AtomicUsize::new(0),
        }))
    }

    /// The bounds that it enforces.
    pub fn limits(&self) -> &Limits {
        &self.0.limits
    }

    /// Takes one more connection and gives it a decoder; dropping the decoder ends it.
    pub fn connect(&self) -> Result<LineDecoder, Refused> {
        let limit = self.0.limits.connections;
        self.0
            .connections
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < limit).then_some(n + 1))
            .map_err(|_| Refused { limit })?;
        Ok(LineDecoder {
            buffer: Vec::new(),
            line_ready: false,
            cap: self.0.limits.line_bytes.min(self.0.limits.connection_bytes),
            share: self.share_of(self.0.own_bytes),
            budget: self.clone(),
            counts: DecoderCounts::default(),
            fatal: None,
        })
    }

    /// An empty share, for what else waits on a connection, such as unsent replies.
    pub fn share(&self) -> Share {
        self.share_of(0)
    }

    fn share_of(&self, own: usize) -> Share {
        Share { budget: self.clone(), own, taken: 0 }
    }

    /// Connections at the moment.
    pub fn connections(&self) -> usize {
        self.0.connections.load(Ordering::Relaxed)
    }

    /// Bytes at hand to connections that need more than their own share.
    pub fn free_bytes(&self) -> usize {
        self.0.free_bytes.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Budget")
            .field("limits", &self.0.limits)
            .field("free_bytes", &self.free_bytes())
            .field("connections", &self.connections())
            .finish()
    }
}

/// Bytes that somebody keeps waiting, on the account of a [`Budget`]; given back on drop.
#[derive(Debug)]
pub struct Share {
    budget: Budget,
    own: usize,
    taken: usize,
}

impl Share {
    /// Changes the share to `bytes`; false, and no change, if the budget lacks them.
    #[must_use]
    pub fn resize(&mut self, bytes: usize) -> bool {
        let wanted = bytes.saturating_sub(self.own);
        let free = &self.budget.0.free_bytes;
        if let Some(more) = wanted.checked_sub(self.taken) {
            let taken = free
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| free.checked_sub(more));
            if taken.is_err() {
                return false;
            }
        } else {
            free.fetch_add(self.taken - wanted, Ordering::Relaxed);
        }
        self.taken = wanted;
        true
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.0.free_bytes.fetch_add(self.taken, Ordering::Relaxed);
    }
}

/// Why a connection must be closed: the end of the current line cannot be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Fatal {
    /// No newline within the longest line.
    #[error("a line is longer than {limit} bytes")]
    LineTooLong {
        /// The smaller of [`Limits::line_bytes`] and [`Limits::connection_bytes`].
        limit: usize,
    },
    /// All connections together keep too much waiting.
    #[error("unfinished lines of all connections reach {limit} bytes")]
    BudgetExhausted {
        /// [`Limits::total_bytes`].
        limit: usize,
    },
}

impl From<Fatal> for transport_core::Error {
    fn from(fatal: Fatal) -> Self {
        let kind = match fatal {
            Fatal::LineTooLong { .. } => transport_core::ErrorKind::Protocol,
            Fatal::BudgetExhausted { .. } => transport_core::ErrorKind::CapacityExceeded,
        };
        Self::new(kind, "read control line", fatal.to_string()).source(fatal)
    }
}

/// What a decoder has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecoderCounts {
    /// Bytes fed.
    pub bytes: u64,
    /// Lines handed out; blank ones are not.
    pub lines: u64,
}

/// Cuts the byte stream of one connection into lines.
///
/// A line that lies within the fed bytes is handed out where it lies; only what is split between
/// two feeds is copied. Made by [`Budget::connect`].
///
/// ```
/// use control_proto::control::{Budget, Limits};
/// let mut decoder = Budget::new(Limits::default()).connect()?;
/// for (chunk, expected) in [(&b"[\"a\"]\n[\"b"[..], &b"[\"a\"]"[..]), (b"\"]\n", b"[\"b\"]")] {
///     let mut input = chunk;
///     while let Some(line) = decoder.next_line(&mut input)? {
///         assert_eq!(line, expected);
///     }
/// }
/// assert_eq!(decoder.finish(), None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct LineDecoder {
    /// Start of a line whose end has not come, or the whole line that was handed out last.
    buffer: Vec<u8>,
    line_ready: bool,
    cap: usize,
    share: Share,
    budget: Budget,
    counts: DecoderCounts,
    fatal: Option<Fatal>,
}

impl LineDecoder {
    /// Smallest buffer for a split line; most lines fit.
    const FIRST_BYTES: usize = 4096;

    /// Takes the next line off `input`, without its newline; `None` when `input` is used up.
    ///
    /// Call it until it returns `None`: then everything is either handed out or kept. Blank lines
    /// are skipped. After an error every further call returns the same error.
    pub fn next_line<'s, 'i: 's>(
        &'s mut self,
        input: &mut &'i [u8],
    ) -> Result<Option<&'s [u8]>, Fatal> {
        if self.line_ready {
            self.line_ready = false;
            self.forget_line();
        }
        if let Some(fatal) = self.fatal {
            return Err(fatal);
        }
        while let Some(end) = memchr::memchr(b'\n', input) {
            let (head, rest) = input.split_at(end);
            *input = &rest[1..];
            self.counts.bytes += head.len() as u64 + 1;
            if self.buffer.is_empty() {
                if head.len() > self.cap {
                    return Err(self.fail(Fatal::LineTooLong { limit: self.cap }));
                }
                if !head.trim_ascii_start().is_empty() {
                    self.counts.lines += 1;
                    return Ok(Some(head));
                }
            } else {
                self.keep(head)?;
                if self.buffer.trim_ascii_start().is_empty() {
                    self.forget_line();
                } else {
                    self.line_ready = true;
                    self.counts.lines += 1;
                    return Ok(Some(&self.buffer));
                }
            }
        }
        let tail = std::mem::take(input);
        self.counts.bytes += tail.len() as u64;
        self.keep(tail)?;
        Ok(None)
    }

    /// Ends the stream; returns the length of a line whose end never came and which is lost.
    pub fn finish(&mut self) -> Option<usize> {
        let lost = if self.line_ready { 0 } else { self.buffer.len() };
        self.line_ready = false;
        self.release();
        (lost > 0).then_some(lost)
    }

    /// Bytes of an unfinished line that are kept.
    pub fn buffered(&self) -> usize {
        if self.line_ready { 0 } else { self.buffer.len() }
    }

    /// What it has seen.
    pub fn counts(&self) -> DecoderCounts {
        self.counts
    }

    fn keep(&mut self, part: &[u8]) -> Result<(), Fatal> {
        let len = self.buffer.len().saturating_add(part.len());
        if len > self.cap {
            return Err(self.fail(Fatal::LineTooLong { limit: self.cap }));
        }
        if len > self.buffer.capacity() {
            let doubled = self.buffer.capacity().saturating_mul(2).max(Self::FIRST_BYTES);
            let capacity = doubled.min(self.cap).max(len);
            if !self.share.resize(capacity) {
                let limit = self.budget.0.limits.total_bytes;
                return Err(self.fail(Fatal::BudgetExhausted { limit }));
            }
            self.buffer.reserve_exact(capacity - self.buffer.len());
        }
        self.buffer.extend_from_slice(part);
        Ok(())
    }

    /// Drops a finished line; a buffer beyond the connection's own share goes back at once.
    fn forget_line(&mut self) {
        self.buffer.clear();
        if self.buffer.capacity() > self.budget.0.own_bytes {
            self.release();
        }
    }

    fn release(&mut self) {
        self.buffer = Vec::new();
        let shrunk = self.share.resize(0);
        debug_assert!(shrunk, "a share can always shrink");
    }

    fn fail(&mut self, fatal: Fatal) -> Fatal {
        self.release();
        self.fatal = Some(fatal);
        fatal
    }
}

impl Drop for LineDecoder {
    fn drop(&mut self) {
        self.budget.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(decoder: &mut LineDecoder, chunk: &[u8]) -> Result<Vec<Vec<u8>>, Fatal> {
        let (mut input, mut found) = (chunk, Vec::new());
        while let Some(line) = decoder.next_line(&mut input)? {
            found.push(line.to_vec());
        }
        assert!(input.is_empty());
        Ok(found)
    }

    #[test]
    fn split_lines_come_out_whole_and_blank_ones_do_not() {
        let mut decoder = Budget::new(Limits::default()).connect().unwrap();
        assert_eq!(lines(&mut decoder, b"one\n\n \r\ntw").unwrap(), [b"one"]);
        assert_eq!(decoder.buffered(), 2);
        assert_eq!(lines(&mut decoder, b"").unwrap(), [b""; 0]);
        assert_eq!(lines(&mut decoder, b"o\nthree\nfo").unwrap(), [&b"two"[..], b"three"]);
        assert_eq!(decoder.counts(), DecoderCounts { bytes: 20, lines: 3 });
        assert_eq!(decoder.finish(), Some(2));
        assert_eq!(decoder.finish(), None);
    }

    #[test]
    fn a_line_without_end_is_fatal_and_gives_its_memory_back() {
        let limits = Limits { line_bytes: 100_000, ..Limits::default() };
        let budget = Budget::new(limits);
        let free = budget.free_bytes();
        let mut decoder = budget.connect().unwrap();
        let chunk = [b'x'; 30_000];
        for _ in 0..3 {
            assert_eq!(lines(&mut decoder, &chunk).unwrap(), [b""; 0]);
        }
        assert!(budget.free_bytes() < free);
        let fatal = Fatal::LineTooLong { limit: 100_000 };
        assert_eq!(lines(&mut decoder, &chunk), Err(fatal));
        assert_eq!(lines(&mut decoder, b"[]\n"), Err(fatal), "it stays that way");
        assert_eq!(budget.free_bytes(), free);
        let mut decoder = budget.connect().unwrap();
        assert_eq!(
            lines(&mut decoder, &[b"y".repeat(100_000), b"\n".to_vec()].concat()).unwrap().len(),
            1
        );
        let long = [b"y".repeat(100_001), b"\n".to_vec()].concat();
        assert_eq!(lines(&mut decoder, &long), Err(fatal), "also when it comes in one piece");
    }

    #[test]
    fn two_hundred_endless_lines_leave_the_others_served() {
        let budget = Budget::new(Limits::default());
        let mut greedy: Vec<_> = (0..200).map(|_| budget.connect().unwrap()).collect();
        let mut honest = budget.connect().unwrap();
        let megabyte = vec![b'x'; 1 << 20];
        let closed = greedy
            .iter_mut()
            .filter_map(|d| lines(d, &megabyte).err())
            .inspect(|fatal| assert!(matches!(fatal, Fatal::BudgetExhausted { .. })))
            .count();
        assert!((100..200).contains(&closed), "{closed}");
        let kept: usize = greedy.iter().map(LineDecoder::buffered).sum();
        assert!(kept <= budget.limits().total_bytes, "{kept}");
        let own = vec![b'y'; 30_000];
        assert_eq!(lines(&mut honest, &own).unwrap(), [b""; 0]);
        assert_eq!(lines(&mut honest, b"\n").unwrap(), [own]);
        let before = budget.connections();
        drop(greedy);
        assert_eq!((before, budget.connections()), (201, 1));
        assert_eq!(budget.free_bytes(), 32 << 20);
    }

    #[test]
    fn connections_and_shares_are_counted() {
        let limits = Limits { connections: 2, total_bytes: 1000, ..Limits::default() };
        let budget = Budget::new(limits);
        let first = budget.connect().unwrap();
        let _second = budget.connect().unwrap();
        assert_eq!(budget.connect().unwrap_err(), Refused { limit: 2 });
        drop(first);
        assert!(budget.connect().is_ok());
        let mut share = budget.share();
        assert!(share.resize(500));
        assert!(!share.resize(501));
        assert!(share.resize(100));
        assert_eq!(budget.free_bytes(), 400);
        drop(share);
        assert_eq!(budget.free_bytes(), 500);
    }
}
