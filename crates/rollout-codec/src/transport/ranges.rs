//! Reading some bytes of a rollout: ranges where the transport reads them, else the data samples
//! that hold them.

use std::{ops::Range, sync::Arc, time::Instant};

use tokio::sync::OwnedMutexGuard;
use transport_core::{Error, ErrorKind, RegionSlice, Result};

use super::{
    Handle, Inner,
    get::{Piece, Whole},
    lease::Lease,
    root::Root,
};
use crate::native::{self, Header, RolloutView};

/// A rollout of which some bytes are read.
pub(super) struct Opened<'i> {
    inner: &'i Inner,
    header: Arc<Header>,
    /// What is at hand: where each run of the data starts, and its bytes, in that order. They keep
    /// the lease.
    runs: Vec<(u64, RegionSlice)>,
    /// Where the rest is; none if everything is at hand.
    rest: Option<(Root, Arc<Lease>)>,
    /// Whether the transport reads ranges of it, as far as is known.
    alone: bool,
    deadline: Instant,
    _locked: OwnedMutexGuard<()>,
}

impl Inner {
    /// Opens a rollout: all of it where that costs nothing, else its root.
    pub(super) async fn open(&self, handle: &Handle) -> Result<Opened<'_>> {
        let entry = self.leases.entry(handle);
        let locked = entry.lock().await;
        entry.check_alive(handle)?;
        let deadline = Instant::now() + self.config.deadline;
        let at_hand = |whole: Arc<Whole>, locked| Opened {
            inner: self,
            header: whole.header.clone(),
            runs: vec![(0, whole.data())],
            rest: None,
            alone: false,
            deadline,
            _locked: locked,
        };
        if let Some(whole) = entry.whole() {
            self.counters.shared(whole.data().len() as u64);
            return Ok(at_hand(whole, locked));
        }
        if self.transport.info().capabilities.views {
            return Ok(at_hand(self.read_whole(handle, &entry).await?, locked));
        }
        let root = self.read_root(handle).await?;
        let lease = self.leases.lease(&entry, root.descriptors());
        if let Some(whole) = self.find_whole(handle, &entry, &root, &lease, deadline).await? {
            return Ok(at_hand(whole, locked));
        }
        let header = root.header.clone();
        let (runs, rest) = (Vec::new(), Some((root, lease)));
        let alone = self.transport.info().capabilities.ranges;
        Ok(Opened { inner: self, header, runs, rest, alone, deadline, _locked: locked })
    }
}

impl Opened<'_> {
    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    /// What is at hand, as a view.
    pub(super) fn view(&self) -> Result<RolloutView> {
        RolloutView::of_parts((*self.header).clone(), self.runs.clone())
    }

    /// Brings ranges of the data, unless they are at hand.
    pub(super) async fn read(&mut self, ranges: &[Range<u64>]) -> Result<()> {
        let Some((root, lease)) = &self.rest else { return Ok(()) };
        let missing = |range: &&Range<u64>| !range.is_empty() && self.cut(range).is_err();
        let wanted: Vec<_> = ranges.iter().filter(missing).cloned().collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let inner = self.inner;
        let alone = match self.alone {
            true => inner.read_ranges(root, wanted.clone(), self.deadline).await.map(Some),
            false => Ok(None),
        };
        let read = match alone {
            Ok(Some(read)) => read,
            Err(error) if error.kind() != ErrorKind::Unsupported => return Err(error),
            _ => {
                self.alone = false; // it would be refused again
                inner.read_parts(root, wanted, self.deadline).await?
            }
        };
        if inner.wants_check(&self.header, true) {
            inner.verify(RolloutView::of_parts((*self.header).clone(), read.clone())?).await?;
        }
        let lease = lease.clone();
        let kept = read.into_iter().map(|(start, data)| (start, data.keeping(lease.clone())));
        self.runs.extend(kept);
        self.runs.sort_by_key(|(start, _)| *start);
        Ok(())
    }

    /// The bytes of the data in `range`, which were read.
    pub(super) fn cut(&self, range: &Range<u64>) -> Result<RegionSlice> {
        if range.is_empty() {
            return Ok(RegionSlice::copy_of(&[]));
        }
        let slice = |(start, run): &(u64, RegionSlice)| {
            let from = usize::try_from(range.start.checked_sub(*start)?).ok()?;
            run.slice(from..from.checked_add(usize::try_from(range.end - range.start).ok()?)?)
        };
        // Mostly in the last run that starts before it; an earlier one may be longer.
        let near = self.runs.partition_point(|(start, _)| *start <= range.start);
        self.runs[..near].iter().rev().find_map(slice).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "get rows", "the bytes were not read")
                .with("range", format_args!("{range:?}"))
        })
    }
}

impl Inner {
    /// Reads ranges alone, or one span of them where that is better.
    async fn read_ranges(
        &self,
        root: &Root,
        wanted: Vec<Range<u64>>,
        deadline: Instant,
    ) -> Result<Vec<(u64, RegionSlice)>> {
        let native::Joined { fragments, bulk, .. } = native::join(wanted, self.config.reads);
        self.counters.ranges(fragments.len() as u64, bulk.is_some());
        let fragments = bulk.map_or(fragments, |bulk| vec![bulk]);
        // Fragments are in the order of the data, and so are the pieces of each sample.
        let mut pieces: Vec<(usize, Piece)> = Vec::new();
        for fragment in &fragments {
            let range = fragment.remote..fragment.remote + fragment.len;
            for index in root.parts_of(&range) {
                let part = &root.parts[index];
                let start = range.start.max(part.range.start) - part.range.start;
                let end = range.end.min(part.range.end) - part.range.start;
                if pieces.last().is_none_or(|(last, _)| *last != index) {
                    let descriptor = part.descriptor.clone();
                    let ranges = Some(Vec::new());
                    pieces.push((index, Piece { descriptor, ranges, bytes: 0, sums: None }));
                }
                let (_, piece) = pieces.last_mut().expect("there, or just pushed");
                piece.ranges.get_or_insert_default().push(start..end);
                piece.bytes += end - start;
            }
        }
        let mut pieces: Vec<Piece> = pieces.into_iter().map(|(_, piece)| piece).collect();
        for piece in &mut pieces {
            piece.ranges.take_if(|_| piece.bytes == piece.descriptor.nbytes());
        }
        let bytes = fragments.last().map_or(0, |last| last.local + last.len);
        let region = self.config.memory(bytes as usize)?;
        let (data, _) = self.fill_with(pieces, region, deadline).await?;
        self.counters.fetched(bytes);
        let run = |fragment: &native::Fragment| {
            let local = fragment.local as usize..(fragment.local + fragment.len) as usize;
            (fragment.remote, data.slice(local).expect("as long as the fragments together"))
        };
        Ok(fragments.iter().map(run).collect())
    }

    /// Reads the data samples that hold the ranges.
    async fn read_parts(
        &self,
        root: &Root,
        wanted: Vec<Range<u64>>,
        deadline: Instant,
    ) -> Result<Vec<(u64, RegionSlice)>> {
        let mut parts: Vec<Range<usize>> =
            wanted.iter().map(|range| root.parts_of(range)).collect();
        parts.sort_unstable_by_key(|parts| (parts.start, parts.end));
        let mut runs: Vec<Range<usize>> = Vec::new();
        for part in parts {
            match runs.last_mut() {
                Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
                _ => runs.push(part),
            }
        }
        let mut read = Vec::with_capacity(runs.len());
        for run in runs {
            let start = root.parts[run.start].range.start;
            read.push((start, self.run(root, run, deadline).await?));
        }
        Ok(read)
    }
}
