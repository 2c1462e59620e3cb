//! Device memory and an engine that fills the host's: bytes pass through page-locked buffers, and go
//! on to the device while the next ones arrive.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use capture_arena::{
    UNIT,
    cuda::{Crossing, Part, Staging},
};
use parking_lot::Mutex;
use transport_core::{Error, ErrorKind, RegionMut, RemoteAddr, Result, SessionName};

use crate::{
    ReadOp, ReadOptions, TcpEngine,
    net::timed_out,
    tcp::{ReadError, lanes},
};

/// How often it is looked for a free buffer.
const NAP: Duration = Duration::from_micros(50);

/// What such reads go through.
pub(super) struct Staged<'a> {
    pub(super) engine: &'a TcpEngine,
    pub(super) staging: &'a Staging,
    /// Destinations are followed by padding that is theirs.
    pub(super) owns_padding: bool,
}

/// A piece of an operation on its way through a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    /// Which operation of those into device memory.
    op: usize,
    /// First byte of it, and how many.
    at: u64,
    len: u64,
    /// Bytes of the buffer, padding included.
    room: u64,
}

impl Staged<'_> {
    /// Fills the destination of every operation, and gives them back in order.
    pub(super) fn read(
        &self,
        session: &SessionName,
        ops: Vec<ReadOp>,
        options: &ReadOptions,
    ) -> Result<Vec<ReadOp>, ReadError> {
        let is_device = |op: &ReadOp| !op.dst.kind().is_host() && !op.dst.is_empty();
        let (places, direct_places): (Vec<usize>, Vec<usize>) =
            (0..ops.len()).partition(|&i| is_device(&ops[i]));
        let (across, mut direct): (Vec<_>, Vec<_>) = ops.into_iter().partition(is_device);
        let at = |places: &[usize], failed: ReadError| ReadError {
            op: failed.op.map(|op| places[op]),
            ..failed
        };
        self.engine
            .read_ops(session, &mut direct, options)
            .map_err(|failed| at(&direct_places, failed))?;
        let (addresses, to): (Vec<_>, Vec<_>) =
            across.into_iter().map(|op| (op.address, op.dst)).unzip();
        let to =
            self.across(session, &addresses, to, options).map_err(|failed| at(&places, failed))?;
        let across = addresses.into_iter().zip(to).map(|(address, dst)| ReadOp::new(address, dst));
        let mut all: Vec<_> =
            places.into_iter().zip(across).chain(direct_places.into_iter().zip(direct)).collect();
        all.sort_unstable_by_key(|(place, _)| *place);
        Ok(all.into_iter().map(|(_, op)| op).collect())
    }

    fn across(
        &self,
        session: &SessionName,
        addresses: &[RemoteAddr],
        to: Vec<RegionMut>,
        options: &ReadOptions,
    ) -> Result<Vec<RegionMut>, ReadError> {
        let lens: Vec<u64> = to.iter().map(|to| to.len() as u64).collect();
        let buffers = fill(&lens, self.staging.config().buffer_bytes, self.owns_padding);
        let crossing = Mutex::new(self.staging.begin(to, self.owns_padding)?);
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        // Each reads one buffer after the other over a connection of its own.
        let readers = self.engine.lanes().min(buffers.len()).max(1);
        lanes::run(readers - 1, |_| {
            while let Some(pieces) = buffers.get(next.fetch_add(1, Ordering::Relaxed))
                && !failed.load(Ordering::Relaxed)
            {
                self.bring(session, addresses, pieces, &crossing, options)
                    .inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
            }
            Ok::<_, ReadError>(())
        })?;
        Ok(crossing.into_inner().finish(options.deadline)?)
    }

    /// Reads one buffer full, and sends it on.
    fn bring(
        &self,
        session: &SessionName,
        addresses: &[RemoteAddr],
        pieces: &[Piece],
        crossing: &Mutex<Crossing>,
        options: &ReadOptions,
    ) -> Result<(), ReadError> {
        let short =
            || Error::new(ErrorKind::Unexpected, "read", "a buffer is shorter than planned");
        let mut rest = buffer(crossing, options)?;
        let (mut ops, mut paddings) = (Vec::new(), Vec::new());
        for piece in pieces {
            let (place, behind) = rest.split_at(piece.room as usize).ok_or_else(short)?;
            let (dst, mut padding) = place.split_at(piece.len as usize).ok_or_else(short)?;
            // It shows nothing of earlier samples.
            padding.as_mut_bytes().expect("host memory").fill(0);
            ops.push(ReadOp::new(RemoteAddr(addresses[piece.op].0 + piece.at), dst));
            paddings.push(padding);
            rest = behind;
        }
        self.engine
            .read_ops(session, &mut ops, options)
            .map_err(|failed| ReadError { op: failed.op.map(|op| pieces[op].op), ..failed })?;
        let parts = ops.into_iter().zip(paddings).zip(pieces).map(|((op, padding), piece)| {
            let src = op.dst.freeze().join(padding.freeze());
            let src = src.unwrap_or_else(|(bytes, _)| bytes); // cut apart above
            Part { src, to: piece.op, at: piece.at }
        });
        Ok(crossing.lock().send(parts.collect())?)
    }
}

/// Takes a buffer. The lock is not kept while none is free: others bring theirs meanwhile.
fn buffer(crossing: &Mutex<Crossing>, options: &ReadOptions) -> Result<RegionMut> {
    loop {
        if let Some(buffer) = crossing.lock().try_buffer()? {
            return Ok(buffer);
        }
        let is_stopped = options.stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed));
        if is_stopped || Instant::now() >= options.deadline {
            return Err(timed_out("read").with("waits_for", "a free staging buffer"));
        }
        std::thread::sleep(NAP);
    }
}

/// Cuts operations of these lengths so that they fill buffers of `bytes` bytes.
fn fill(lens: &[u64], bytes: u64, owns_padding: bool) -> Vec<Vec<Piece>> {
    let mut buffers: Vec<Vec<Piece>> = Vec::new();
    let mut left = 0;
    for (op, &whole) in lens.iter().enumerate() {
        let mut at = 0;
        while at < whole {
            if left == 0 {
                buffers.push(Vec::new());
                left = bytes;
            }
            let len = left.min(whole - at);
            let padded = len.next_multiple_of(UNIT); // both lengths of buffers are multiples
            let ends = at + len == whole;
            let room = if owns_padding && ends { padded } else { len };
            buffers.last_mut().expect("just made").push(Piece { op, at, len, room });
            at += len;
            left -= room;
        }
    }
    buffers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_fill_buffers_to_the_last_byte() {
        let piece = |op, at, len, room| Piece { op, at, len, room };
        let buffers = fill(&[700, 2048, 1], 1024, true);
        assert_eq!(
            buffers,
            [
                vec![piece(0, 0, 700, 1024)],
                vec![piece(1, 0, 1024, 1024)],
                vec![piece(1, 1024, 1024, 1024)],
                vec![piece(2, 0, 1, 512)],
            ]
        );
        let buffers = fill(&[700, 600, 0, 3], 1024, false);
        assert_eq!(
            buffers,
            [
                vec![piece(0, 0, 700, 700), piece(1, 0, 324, 324)],
                vec![piece(1, 324, 276, 276), piece(3, 0, 3, 3)],
            ]
        );
        assert!(fill(&[0, 0], 1024, true).is_empty());
    }
}
