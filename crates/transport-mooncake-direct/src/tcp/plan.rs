//! What to ask a peer for: neighbours joined, giants cut.

use transport_core::RemoteAddr;

/// One request on the wire, and where its bytes go.
#[derive(Debug)]
pub(super) struct Request<'a> {
    pub(super) address: RemoteAddr,
    pub(super) len: u64,
    /// First of the operations that it serves.
    pub(super) op: usize,
    pub(super) parts: Parts<'a>,
}

/// Destinations of one request, in order. Mostly one.
#[derive(Debug)]
pub(super) enum Parts<'a> {
    One(&'a mut [u8]),
    Many(Vec<&'a mut [u8]>),
}

impl<'a> Parts<'a> {
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut &'a mut [u8]> {
        match self {
            Self::One(part) => std::slice::from_mut(part).iter_mut(),
            Self::Many(parts) => parts.iter_mut(),
        }
    }

    fn push(&mut self, part: &'a mut [u8]) {
        match self {
            Self::One(first) => *self = Self::Many(vec![std::mem::take(first), part]),
            Self::Many(parts) => parts.push(part),
        }
    }

    fn count(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Many(parts) => parts.len(),
        }
    }
}

/// One operation: a remote range, its destination, and whether it may be joined to the one before.
pub(super) struct Piece<'a> {
    pub(super) address: RemoteAddr,
    pub(super) dst: &'a mut [u8],
    pub(super) joinable: bool,
}

/// Most destinations of one request: as many as one system call takes with room to spare.
const MAX_PARTS: usize = 32;

/// Turns operations into requests of at most `max_bytes`, in order. Operations without bytes need
/// none.
pub(super) fn plan<'a>(
    pieces: impl IntoIterator<Item = Piece<'a>>,
    max_bytes: u64,
) -> Vec<Request<'a>> {
    let max = usize::try_from(max_bytes).unwrap_or(usize::MAX).max(1);
    let pieces = pieces.into_iter();
    let mut requests: Vec<Request<'a>> = Vec::with_capacity(pieces.size_hint().0);
    for (op, piece) in pieces.enumerate() {
        let Piece { mut address, mut dst, joinable } = piece;
        if joinable
            && let Some(last) = requests.last_mut()
            && last.address.checked_add(last.len) == Some(address)
            && last.len + dst.len() as u64 <= max_bytes
            && last.parts.count() < MAX_PARTS
            && !dst.is_empty()
        {
            last.len += dst.len() as u64;
            last.parts.push(dst);
            continue;
        }
        while !dst.is_empty() {
            let cut = max.min(dst.len());
            let (head, rest) = dst.split_at_mut(cut);
            requests.push(Request { address, len: head.len() as u64, op, parts: Parts::One(head) });
            address = RemoteAddr(address.0.wrapping_add(cut as u64)); // unused after the last
            dst = rest;
        }
    }
    requests
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(pieces: &[(u64, usize, bool)], max: u64) -> Vec<(u64, u64, usize, usize)> {
        let mut memory = vec![vec![0u8; 1 << 12]; pieces.len()];
        let pieces = pieces.iter().zip(&mut memory).map(|(&(address, len, joinable), memory)| {
            Piece { address: RemoteAddr(address), dst: &mut memory[..len], joinable }
        });
        plan(pieces, max)
            .into_iter()
            .map(|mut r| {
                let bytes: usize = r.parts.iter_mut().map(|p| p.len()).sum();
                assert_eq!(bytes as u64, r.len);
                (r.address.0, r.len, r.op, r.parts.count())
            })
            .collect()
    }

    #[test]
    fn neighbours_join_and_giants_are_cut() {
        let found = planned(
            &[(100, 10, false), (110, 5, true), (115, 0, true), (120, 4, true), (124, 4, false)],
            1000,
        );
        assert_eq!(found, [(100, 15, 0, 2), (120, 4, 3, 1), (124, 4, 4, 1)]);
        assert_eq!(planned(&[(0, 25, false)], 10), [(0, 10, 0, 1), (10, 10, 0, 1), (20, 5, 0, 1)]);
        assert_eq!(planned(&[(0, 8, false), (8, 8, true)], 10), [(0, 8, 0, 1), (8, 8, 1, 1)]);
        assert_eq!(planned(&[(u64::MAX, 0, false)], 10), []);
    }
}
