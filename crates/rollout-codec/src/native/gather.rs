//! The one copy: rows into the data, on several threads, with checksums while the bytes are still
//! in the cache.

use std::{ops::Range, sync::Mutex};

use transport_core::{Error, Result, gather, gather_xxh3};
use twox_hash::XxHash3_64;
use xxhash_rust::xxh3::Xxh3;

use super::{BLOCK_BYTES, narrow, plan::Planned};

/// A block of one segment, its destination, and the zeros before the segment.
struct Unit<'d> {
    segment: usize,
    /// Start within the segment.
    start: u64,
    padding: &'d mut [u8],
    dest: &'d mut [u8],
}

/// A failure, and the field that it belongs to.
type Failure = (usize, Error);

/// The checksum of one block: its segment, where it starts in it, and the sum.
pub(super) type BlockSum = (usize, u64, u64);

/// Where a segment lies in the data.
pub(super) trait Extent {
    fn at(&self) -> u64;
    fn len(&self) -> u64;
}

impl Extent for Planned<'_> {
    fn at(&self) -> u64 {
        self.at
    }

    fn len(&self) -> u64 {
        self.len
    }
}

/// Ends of the blocks of all segments, in order; the last is the end of the data.
fn block_ends<S: Extent>(segments: &[S], data_bytes: u64) -> impl Iterator<Item = u64> {
    let of_segment = |segment: &S| {
        let (at, len) = (segment.at(), segment.len());
        (1..=len.div_ceil(BLOCK_BYTES).max(1)).map(move |n| at + len.min(n * BLOCK_BYTES))
    };
    segments.iter().flat_map(of_segment).chain([data_bytes])
}

/// Cuts the data at ends of blocks, into parts of about `bytes`.
pub(super) fn parts<S: Extent>(segments: &[S], data_bytes: u64, bytes: u64) -> Vec<Range<u64>> {
    let mut parts = Vec::new();
    let (mut start, mut end) = (0, 0);
    for next in block_ends(segments, data_bytes) {
        if next - start > bytes && end > start {
            parts.push(start..end);
            start = end;
        }
        end = next;
    }
    if end > start || parts.is_empty() {
        parts.push(start..end);
    }
    parts
}

/// Gathers what lies in `part` into `data`; returns the checksums of its blocks if asked to.
pub(super) fn part(
    segments: &[Planned<'_>],
    part: &Range<u64>,
    data: &mut [u8],
    (threads, checksums): (usize, bool),
    is_last: bool,
) -> std::result::Result<Vec<BlockSum>, Failure> {
    let mut units = Vec::new();
    let mut rest = data;
    let mut end = part.start;
    // A segment that ended before belongs to an earlier part, also if it ended just there. One
    // without bytes belongs to the part that starts where it is.
    let first = segments.partition_point(|s| s.at + s.len <= part.start && s.at < part.start);
    for (i, segment) in segments.iter().enumerate().skip(first) {
        let mut start = part.start.saturating_sub(segment.at).min(segment.len);
        let is_later = segment.at == part.end && (segment.len > 0 || !is_last);
        if segment.at > part.end || is_later {
            break;
        }
        let padding = (segment.at + start).saturating_sub(end);
        let (mut padding, tail) = rest.split_at_mut(padding as usize);
        rest = tail;
        end = end.max(segment.at + start);
        loop {
            let len = (segment.len - start).min(BLOCK_BYTES);
            if end + len > part.end {
                break;
            }
            let (dest, tail) = rest.split_at_mut(len as usize);
            units.push(Unit { segment: i, start, padding: std::mem::take(&mut padding), dest });
            rest = tail;
            start += len;
            end += len;
            if start == segment.len {
                break;
            }
        }
        padding.fill(0);
    }
    rest.fill(0);
    let count = units.len();
    let queue = Mutex::new(units.into_iter());
    let work = || {
        let mut sums = Vec::new();
        loop {
            let next = queue.lock().expect("no thread panics with the lock").next();
            let Some(unit) = next else { return Ok(sums) };
            unit.padding.fill(0);
            let segment = &segments[unit.segment];
            let sum =
                fill(segment, unit.start, unit.dest, checksums).map_err(|e| (segment.field, e))?;
            sums.extend(sum.map(|sum| (unit.segment, unit.start, sum)));
        }
    };
    let helpers = threads.clamp(1, count.max(1)) - 1;
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..helpers).map(|_| scope.spawn(work)).collect();
        let mut sums = work()?;
        for handle in handles {
            sums.extend(handle.join().expect("gathering does not panic")?);
        }
        Ok(sums)
    })
}

/// The checksum of each segment, from those of all blocks; `None` if a block is missing or there
/// twice.
pub(super) fn join<S: Extent>(segments: &[S], mut sums: Vec<BlockSum>) -> Option<Vec<u64>> {
    sums.sort_unstable();
    let mut sums = sums.into_iter();
    let mut whole = Vec::with_capacity(segments.len());
    for (i, segment) in segments.iter().enumerate() {
        let mut hasher = Xxh3::new();
        for block in 0..segment.len().div_ceil(BLOCK_BYTES).max(1) {
            let (_, _, sum) = sums.next().filter(|s| (s.0, s.1) == (i, block * BLOCK_BYTES))?;
            hasher.update(&sum.to_le_bytes());
        }
        whole.push(hasher.digest());
    }
    sums.next().is_none().then_some(whole)
}

/// Fills `dest`, which is one block, with the bytes of `segment` from `start` on; returns its
/// checksum if asked to.
fn fill(segment: &Planned<'_>, start: u64, dest: &mut [u8], checksum: bool) -> Result<Option<u64>> {
    let first = segment.sources.partition_point(|(at, _)| *at <= start).saturating_sub(1);
    let sources = segment.sources.get(first..).unwrap_or_default();
    // Blocks are a multiple of every element size: elements are never cut.
    let skip = sources.first().map_or(0, |(at, _)| start - at);
    let skip = match segment.convert {
        None => skip,
        Some((wide, wire)) => skip / wire.size() * wide.size(),
    };
    let sources = sources.iter().enumerate().map(|(i, (_, source))| {
        let source: &[u8] = source;
        if i == 0 { &source[skip as usize..] } else { source }
    });
    let Some((wide, wire)) = segment.convert else {
        return Ok(match checksum {
            true => Some(gather_xxh3(dest, sources)),
            false => {
                gather(dest, sources);
                None
            }
        });
    };
    let mut rest = &mut *dest;
    for source in sources {
        if rest.is_empty() {
            break;
        }
        let elements = (source.len() as u64 / wide.size()).min(rest.len() as u64 / wire.size());
        let (to, later) = rest.split_at_mut((elements * wire.size()) as usize);
        narrow::elements(wide, &source[..(elements * wide.size()) as usize], wire, to)?;
        rest = later;
    }
    debug_assert!(rest.is_empty(), "sources are as long as their segment");
    Ok(checksum.then(|| block_sum(dest)))
}

/// The checksum of a segment, from its sources.
pub(super) fn sum_sources(segment: &Planned<'_>) -> u64 {
    let mut whole = Xxh3::new();
    let mut block = Xxh3::new();
    let mut room = BLOCK_BYTES as usize;
    for (_, source) in &segment.sources {
        let mut bytes: &[u8] = source;
        while !bytes.is_empty() {
            let (head, tail) = bytes.split_at(bytes.len().min(room));
            block.update(head);
            room -= head.len();
            bytes = tail;
            if room == 0 {
                whole.update(&block.digest().to_le_bytes());
                block.reset();
                room = BLOCK_BYTES as usize;
            }
        }
    }
    if room < BLOCK_BYTES as usize || segment.len == 0 {
        whole.update(&block.digest().to_le_bytes());
    }
    whole.digest()
}

/// The checksum of one block.
pub(super) fn block_sum(block: &[u8]) -> u64 {
    XxHash3_64::oneshot(block)
}

/// The checksum of a segment, from its bytes.
pub(super) fn sum(bytes: &[u8]) -> u64 {
    let mut whole = Xxh3::new();
    let mut rest = bytes;
    loop {
        let (block, more) = rest.split_at(rest.len().min(BLOCK_BYTES as usize));
        whole.update(&block_sum(block).to_le_bytes());
        rest = more;
        if rest.is_empty() {
            return whole.digest();
        }
    }
}
