//! The one copy: rows into the data, on several threads, with checksums while the bytes are still
//! in the cache.

use std::{hash::Hasher, sync::Mutex};

use transport_core::{Error, Result};
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

/// Gathers all segments; returns their checksums if asked to.
pub(super) fn into(
    segments: &[Planned<'_>],
    data: &mut [u8],
    threads: usize,
    checksums: bool,
) -> std::result::Result<Option<Vec<u64>>, Failure> {
    let mut units = Vec::new();
    let mut rest = data;
    let mut end = 0;
    for (i, segment) in segments.iter().enumerate() {
        let (mut padding, tail) = rest.split_at_mut((segment.at - end) as usize);
        let (mut bytes, tail) = tail.split_at_mut(segment.len as usize);
        (rest, end) = (tail, segment.at + segment.len);
        let mut start = 0;
        loop {
            let (dest, more) = bytes.split_at_mut(bytes.len().min(BLOCK_BYTES as usize));
            units.push(Unit { segment: i, start, padding: std::mem::take(&mut padding), dest });
            start += BLOCK_BYTES;
            bytes = more;
            if bytes.is_empty() {
                break;
            }
        }
    }
    rest.fill(0);
    let count = units.len();
    let queue = Mutex::new(units.into_iter().enumerate());
    let work = || {
        let mut sums = Vec::new();
        loop {
            let next = queue.lock().expect("no thread panics with the lock").next();
            let Some((index, unit)) = next else { return Ok(sums) };
            unit.padding.fill(0);
            let segment = &segments[unit.segment];
            let mut hasher = checksums.then(XxHash3_64::new);
            fill(segment, unit.start, unit.dest, hasher.as_mut())
                .map_err(|e| (segment.field, e))?;
            if let Some(hasher) = hasher {
                sums.push((index, unit.segment, hasher.finish()));
            }
        }
    };
    let helpers = threads.clamp(1, count.max(1)) - 1;
    let mut sums = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..helpers).map(|_| scope.spawn(work)).collect();
        let mut sums = work()?;
        for handle in handles {
            sums.extend(handle.join().expect("gathering does not panic")?);
        }
        Ok(sums)
    })?;
    if !checksums {
        return Ok(None);
    }
    sums.sort_unstable();
    let mut hashers = vec![Xxh3::new(); segments.len()];
    for (_, segment, sum) in sums {
        hashers[segment].update(&sum.to_le_bytes());
    }
    Ok(Some(hashers.iter().map(Xxh3::digest).collect()))
}

/// Bytes that are copied before they are hashed. A larger copy may go past the caches, and the
/// hash would have to fetch from memory what was just written.
const STRIDE: usize = 4 << 10;

/// Fills `dest` with the bytes of `segment` from `start` on, and hashes them.
fn fill(
    segment: &Planned<'_>,
    start: u64,
    dest: &mut [u8],
    mut hasher: Option<&mut XxHash3_64>,
) -> Result<()> {
    let first = segment.sources.partition_point(|(at, _)| *at <= start).saturating_sub(1);
    let mut at = start;
    let mut dest = dest;
    for (source_at, source) in &segment.sources[first.min(segment.sources.len())..] {
        if dest.is_empty() {
            break;
        }
        let skip = at - source_at;
        let bytes = source.bytes();
        let taken = match segment.convert {
            None => {
                let from = &bytes[skip as usize..];
                let len = from.len().min(dest.len());
                match hasher.as_deref_mut() {
                    None => dest[..len].copy_from_slice(&from[..len]),
                    Some(hasher) => {
                        let strides = dest[..len].chunks_mut(STRIDE).zip(from.chunks(STRIDE));
                        for (to, from) in strides {
                            to.copy_from_slice(&from[..to.len()]);
                            hasher.write(to);
                        }
                    }
                }
                len
            }
            Some((wide, wire)) => {
                // Blocks are a multiple of every element size: elements are never cut.
                let from = &bytes[(skip / wire.size() * wide.size()) as usize..];
                let elements =
                    (from.len() as u64 / wide.size()).min(dest.len() as u64 / wire.size());
                let len = (elements * wire.size()) as usize;
                let from = &from[..(elements * wide.size()) as usize];
                narrow::elements(wide, from, wire, &mut dest[..len])?;
                if let Some(hasher) = hasher.as_deref_mut() {
                    hasher.write(&dest[..len]);
                }
                len
            }
        };
        dest = &mut dest[taken..];
        at += taken as u64;
    }
    debug_assert!(dest.is_empty(), "sources are as long as their segment");
    Ok(())
}

/// The checksum of a segment, from its sources.
pub(super) fn sum_sources(segment: &Planned<'_>) -> u64 {
    let mut whole = Xxh3::new();
    let mut block = Xxh3::new();
    let mut room = BLOCK_BYTES as usize;
    for (_, source) in &segment.sources {
        let mut bytes = source.bytes();
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

/// The checksum of a segment, from its bytes.
pub(super) fn sum(bytes: &[u8]) -> u64 {
    let mut whole = Xxh3::new();
    let mut rest = bytes;
    loop {
        let (block, more) = rest.split_at(rest.len().min(BLOCK_BYTES as usize));
        whole.update(&XxHash3_64::oneshot(block).to_le_bytes());
        rest = more;
        if rest.is_empty() {
            return whole.digest();
        }
    }
}
