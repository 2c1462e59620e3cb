//! Copies into device memory that own what they read and write until they are done.

use std::{
    fmt,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use transport_core::{Error, ErrorKind, RegionKind, RegionMut, RegionSlice, Result};

use super::{Device, DevicePtr, Event, Pinned, Stream};
use crate::{Quarantine, Unfinished, suballoc::UNIT};

const COPY: &str = "copy to device";
/// Pieces up to this size go beside the large ones: each costs more time than its bytes do.
const SMALL: u64 = 256 << 10;
/// Most host bytes of one call: ids and masks of any batch that fits a device.
const MAX_STAGED: u64 = 64 << 20;
/// Least pinned memory of a lane.
const MIN_STAGING: u64 = 64 << 10;
/// How long copies that went wrong are waited for when the copier is dropped.
const LAST_WAIT: Duration = Duration::from_secs(2);

/// One copy: as many bytes as both have.
#[derive(Debug)]
pub struct CopyPiece {
    /// From memory of the copier's device, or of the host.
    pub src: RegionSlice,
    /// Into memory of the copier's device.
    pub dst: RegionMut,
}

/// Copies that are done.
#[derive(Debug)]
#[non_exhaustive]
pub struct Copied {
    /// The destinations, in order.
    pub regions: Vec<RegionMut>,
    /// Bytes that came from host memory.
    pub host_bytes: u64,
    /// Bytes that came from device memory.
    pub device_bytes: u64,
}

/// Copies into memory of one device, on streams of its own. Threads may share it.
///
/// Memory that a copy may still write is never given back: what a call leaves unfinished is kept,
/// counted, and let go of once the device is done with it.
pub struct Copier {
    device: Device,
    lanes: Mutex<Vec<Lane>>,
    stuck: Quarantine<Stuck>,
}

/// What one call at a time uses.
struct Lane {
    large: Stream,
    small: Stream,
    small_done: Event,
    done: Event,
    staging: Option<Pinned>,
}

/// What the device may still read and write. Its streams may be in an error; they are not used again.
struct Stuck {
    lane: Lane,
    _pieces: Vec<CopyPiece>, // kept for its Drop
    bytes: u64,
}

/// What is queued: one range each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    dst: u64,
    src: u64,
    len: u64,
}

impl Copier {
    /// A copier with its first streams.
    pub fn new(device: &Device) -> Result<Self> {
        let lanes = Mutex::new(vec![Lane::new(device)?]);
        Ok(Self { device: device.clone(), lanes, stuck: Quarantine::new(LAST_WAIT) })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Copies all pieces after the events, and waits until they are copied, at most until
    /// `deadline`.
    ///
    /// Host memory goes through pinned memory, all of it at once. Views of one storage are looked
    /// up once, and neighbours are copied as one. `owns_padding` allows to write the bytes from the
    /// end of a destination to the next multiple of 512, as arenas and pools hand them out.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] before anything is queued for pieces whose ends differ in
    /// length or lie on other devices, and for views that leave device memory;
    /// [`ErrorKind::Timeout`]; whatever the device reports. The destinations are gone then, and go
    /// back to their owner as soon as the device is done with them.
    pub fn copy(
        &self,
        pieces: Vec<CopyPiece>,
        after: &[&Event],
        owns_padding: bool,
        deadline: Instant,
    ) -> Result<Copied> {
        self.stuck.sweep();
        let _bound = self.device.bind()?; // once, and not at every look below
        let (host, device) = self.check(&pieces)?;
        let mut lane = match self.lanes.lock().pop() {
            Some(lane) => lane,
            None => Lane::new(&self.device)?,
        };
        let queued = lane.queue(&pieces, host, after, owns_padding);
        let left = deadline.saturating_duration_since(Instant::now());
        let done = queued.and_then(|()| lane.done.synchronize_within(left));
        match done {
            Ok(()) => {
                self.lanes.lock().push(lane);
                let regions = pieces.into_iter().map(|piece| piece.dst).collect();
                Ok(Copied { regions, host_bytes: host, device_bytes: device })
            }
            Err(error) => {
                let bytes = pieces.iter().map(|piece| piece.dst.len() as u64).sum();
                self.stuck.keep(Stuck { lane, _pieces: pieces, bytes });
                self.stuck.sweep();
                Err(error)
            }
        }
    }

    /// Bytes that unfinished copies may still write.
    pub fn quarantined_bytes(&self) -> u64 {
        self.stuck.bytes()
    }

    /// Refuses what cannot be copied. Bytes from the host and from the device.
    fn check(&self, pieces: &[CopyPiece]) -> Result<(u64, u64)> {
        let invalid = |why| Error::new(ErrorKind::InvalidInput, COPY, why);
        let own = self.device.region_kind();
        let (mut host, mut device) = (0, 0);
        let mut storages = Vec::new();
        for (index, CopyPiece { src, dst }) in pieces.iter().enumerate() {
            let len = src.len() as u64;
            if src.len() != dst.len() {
                return Err(invalid("source and destination differ in length")
                    .with("piece", index)
                    .with("source_bytes", src.len())
                    .with("destination_bytes", dst.len()));
            }
            if len == 0 {
                continue;
            }
            if dst.kind() != own {
                return Err(invalid("the destination is not memory of this device")
                    .with("piece", index)
                    .with("device", self.device.ordinal())
                    .with("found", format_args!("{:?}", dst.kind())));
            }
            match src.kind() {
                kind if kind == own => {
                    look_up(&self.device, &mut storages, src.address() as u64, len)
                        .map_err(|e| e.with("piece", index))?;
                    device += len;
                }
                RegionKind::Cuda { device } => {
                    return Err(invalid("the source lies on another device")
                        .with("piece", index)
                        .with("device", self.device.ordinal())
                        .with("found", device)
                        .remedy("make the arena on the device of its captures"));
                }
                _ => host += len,
            }
        }
        if host > MAX_STAGED {
            return Err(Error::new(ErrorKind::CapacityExceeded, COPY, "too much host memory")
                .with("host_bytes", host)
                .with("max_bytes", MAX_STAGED)
                .remedy("capture on the device; only ids and masks come from the host"));
        }
        Ok((host, device))
    }
}

impl Unfinished for Stuck {
    fn is_over(&mut self) -> bool {
        self.lane.is_over()
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Lane {
    fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            large: device.stream()?,
            small: device.stream()?,
            small_done: device.event(false)?,
            done: device.event(false)?,
            staging: None,
        })
    }

    /// Whether the device no longer touches what was queued here. One that reports an error runs
    /// nothing any more.
    fn is_over(&self) -> bool {
        let over = |stream: &Stream| stream.is_done().unwrap_or(true);
        over(&self.large) && over(&self.small)
    }

    /// Queues everything, and the lane's event behind it.
    fn queue(
        &mut self,
        pieces: &[CopyPiece],
        host_bytes: u64,
        after: &[&Event],
        owns_padding: bool,
    ) -> Result<()> {
        for event in after {
            self.large.wait(event)?;
            self.small.wait(event)?;
        }
        let is_host = |piece: &&CopyPiece| piece.src.kind().is_host() && !piece.src.is_empty();
        let run = |piece: &CopyPiece| Run {
            dst: piece.dst.address() as u64,
            src: piece.src.address() as u64,
            len: piece.src.len() as u64,
        };
        let of_device = pieces.iter().filter(|piece| !piece.src.is_empty() && !is_host(piece));
        let of_device = join(of_device.map(run).collect());
        // The large ones first: they keep the device busy while the rest is queued.
        let (large, mut small): (Vec<_>, Vec<_>) =
            of_device.into_iter().partition(|run| run.len > SMALL);
        for run in large {
            copy(&self.large, run)?;
        }
        if host_bytes > 0 {
            let from_host: Vec<_> = pieces.iter().filter(is_host).collect();
            small.extend(self.stage(from_host, owns_padding)?);
        }
        if !small.is_empty() {
            for run in small {
                copy(&self.small, run)?;
            }
            self.small.record(&self.small_done)?;
            self.large.wait(&self.small_done)?;
        }
        self.large.record(&self.done)
    }

    /// Gathers host bytes in pinned memory, laid out as their destinations are.
    fn stage(&mut self, mut pieces: Vec<&CopyPiece>, owns_padding: bool) -> Result<Vec<Run>> {
        pieces.sort_unstable_by_key(|piece| piece.dst.address());
        // A run reaches over the padding between neighbours, if that is ours.
        let mut runs: Vec<(Run, Vec<&CopyPiece>)> = Vec::new();
        let mut staged = 0;
        for piece in pieces {
            let (dst, len) = (piece.dst.address() as u64, piece.src.len() as u64);
            if let Some((run, members)) = runs.last_mut() {
                let end = run.dst + run.len;
                let reach = if owns_padding { end.next_multiple_of(UNIT) } else { end };
                if dst >= end && dst <= reach {
                    staged += dst + len - end;
                    run.len = dst + len - run.dst;
                    members.push(piece);
                    continue;
                }
            }
            // Runs are aligned in the staging memory: copies like that.
            let src = u64::next_multiple_of(staged, UNIT);
            staged = src + len;
            runs.push((Run { dst, src, len }, vec![piece]));
        }
        let staging = self.staging(staged)?;
        let base = staging.address().0;
        let bytes = staging.as_mut_slice();
        let mut placed = Vec::with_capacity(runs.len());
        for (run, members) in runs {
            let mut filled = run.src as usize;
            for piece in members {
                let at = (run.src + piece.dst.address() as u64 - run.dst) as usize;
                let source = piece.src.as_bytes().expect("host memory");
                bytes[filled..at].fill(0); // padding shows nothing of earlier batches
                filled = at + source.len();
                bytes[at..filled].copy_from_slice(source);
            }
            placed.push(Run { src: base + run.src, ..run });
        }
        Ok(placed)
    }

    /// Pinned memory of at least `len` bytes. Nothing is under way from it.
    fn staging(&mut self, len: u64) -> Result<&mut Pinned> {
        let fits = self.staging.as_ref().is_some_and(|pinned| pinned.len() as u64 >= len);
        if !fits {
            self.staging = None;
            let len = len.next_power_of_two().max(MIN_STAGING);
            self.staging = Some(self.large.device().pinned(len as usize)?);
        }
        Ok(self.staging.as_mut().expect("just made"))
    }
}

/// Makes sure that a range is memory of a device, asking the driver only about storages that
/// no earlier view lay in. A framework's storage may consist of several blocks in a row.
pub(super) fn look_up(
    device: &Device,
    storages: &mut Vec<(u64, u64)>,
    start: u64,
    len: u64,
) -> Result<()> {
    let outside = || {
        Error::new(ErrorKind::InvalidInput, COPY, "the source leaves its device memory")
            .with("address", DevicePtr(start))
            .with("bytes", len)
            .remedy("the tensor has been freed, or its address or length is wrong")
    };
    let end = start.checked_add(len).ok_or_else(outside)?;
    let mut at = start;
    while at < end {
        let known = storages.iter().find(|(base, end)| (*base..*end).contains(&at));
        let (_, known_end) = match known {
            Some(known) => *known,
            None => {
                let found = device.with(|api| api.address_range(DevicePtr(at)));
                let (base, len) = found.map_err(|error| outside().source(error))?;
                let storage = (base.0, base.0.saturating_add(len));
                if !(storage.0..storage.1).contains(&at) {
                    return Err(outside());
                }
                storages.push(storage);
                storage
            }
        };
        at = known_end;
    }
    Ok(())
}

/// Queues one copy.
fn copy(stream: &Stream, run: Run) -> Result<()> {
    // SAFETY: the range was checked to be memory of the device or is the lane's staging memory, and
    // goes to ranges of which the caller owns the only handles. Pieces and lane are kept until the
    // device is done with them.
    unsafe { stream.copy(DevicePtr(run.dst), DevicePtr(run.src), run.len) }
}

/// Makes neighbours in source and destination one.
fn join(mut runs: Vec<Run>) -> Vec<Run> {
    runs.sort_unstable_by_key(|run| run.dst);
    let mut joined: Vec<Run> = Vec::with_capacity(runs.len());
    for run in runs {
        match joined.last_mut() {
            Some(last) if last.dst + last.len == run.dst && last.src + last.len == run.src => {
                last.len += run.len;
            }
            _ => joined.push(run),
        }
    }
    joined
}

impl fmt::Debug for Copier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copier")
            .field("device", &self.device)
            .field("unfinished", &self.stuck)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_in_both_become_one() {
        let run = |dst, src, len| Run { dst, src, len };
        let joined = join(vec![run(100, 10, 5), run(0, 0, 4), run(105, 15, 5), run(4, 8, 4)]);
        assert_eq!(joined, [run(0, 0, 4), run(4, 8, 4), run(100, 10, 10)]);
    }
}
