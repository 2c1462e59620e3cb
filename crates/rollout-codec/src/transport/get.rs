//! Getting: the root, then as much of the data as is asked for.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{sync::Semaphore, task::JoinSet};
use transport_core::{
    Descriptor, Destination, Error, ErrorKind, FetchOptions, FetchRequest, RegionMut, RegionSlice,
    Result, Transport,
};

use super::{
    Handle, Inner, RolloutTransport, Verify,
    host::Shared,
    lease::{Entry, Lease},
    root::{Part, Root},
};
use crate::{
    Rollout,
    native::{Arrived, Arriving, Header, RolloutView},
};

/// How much is read at a time where the checksums of one piece are made while the next one comes.
const PIECE: u64 = 16 << 20;

/// A rollout, or some of its fields, where it arrived. Everything that is made from it keeps it.
#[derive(Clone, Debug)]
pub struct Sample {
    view: RolloutView,
}

impl Sample {
    /// The fields, as views.
    pub fn view(&self) -> &RolloutView {
        &self.view
    }

    /// What there is.
    pub fn header(&self) -> &Header {
        self.view.header()
    }

    /// Everything, as columns that share the memory.
    pub fn rollout(&self) -> Result<Rollout<'static>> {
        self.view.rollout()
    }
}

/// All the data of a rollout, in this process, as long as anybody looks at it.
#[derive(Debug)]
pub(super) struct Whole {
    pub(super) header: Arc<Header>,
    data: RegionSlice,
    _shared: Option<Shared>,
    _lease: Arc<Lease>, // after the memory
}

impl Whole {
    fn sample(self: &Arc<Self>) -> Result<Sample> {
        let data = self.data.clone().keeping(self.clone());
        Ok(Sample { view: RolloutView::new((*self.header).clone(), data)? })
    }

    pub(super) fn data(self: &Arc<Self>) -> RegionSlice {
        self.data.clone().keeping(self.clone())
    }
}

impl RolloutTransport {
    /// What a rollout holds, from its root alone.
    pub async fn header(&self, handle: &Handle) -> Result<Header> {
        let entry = self.0.leases.entry(handle);
        let _locked = entry.lock().await;
        entry.check_alive(handle)?;
        if let Some(whole) = entry.whole() {
            return Ok((*whole.header).clone());
        }
        let root = self.0.read_root(handle).await?;
        drop(self.0.leases.lease(&entry, root.descriptors()));
        Ok((*root.header).clone())
    }

    /// Reads all of a rollout: views where the transport gives them, else a copy that all readers
    /// in this process share, and those of this host if so configured.
    pub async fn get(&self, handle: &Handle) -> Result<Sample> {
        let whole = self.0.whole(handle).await?;
        self.0.counters.got();
        whole.sample()
    }

    /// Reads some fields: of a copy only their bytes, or only the data samples that hold them where
    /// the transport reads no [ranges](transport_core::Capabilities::ranges) of them.
    pub async fn get_fields(&self, handle: &Handle, fields: &[&str]) -> Result<Sample> {
        let mut opened = self.0.open(handle).await?;
        let ranges = fields.iter().map(|field| opened.header().field_range(field));
        let ranges = ranges.collect::<Result<Vec<_>>>()?;
        opened.read(&ranges).await?;
        self.0.counters.got();
        Ok(Sample { view: opened.view()? })
    }
}

impl Inner {
    /// Fetches and checks the root. The caller has the entry's lock and either leases the samples
    /// or lets them go.
    pub(super) async fn read_root(&self, handle: &Handle) -> Result<Root> {
        let deadline = Instant::now() + self.config.deadline;
        let root = handle.root();
        let views = self.transport.info().capabilities.views;
        let destination = if views { Destination::View } else { Destination::Pool };
        let request = FetchRequest::new(root.clone(), destination);
        let region = fetch(&self.transport, request, root.nbytes(), deadline).await?;
        let bytes = region.as_bytes().ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "get rollout", "the root is in device memory")
        })?;
        let parsed = Root::parse(handle, bytes);
        if parsed.is_err() {
            let _ = self.transport.let_go(vec![root.clone()]).await;
        }
        parsed
    }

    /// The whole rollout, at hand or read now.
    pub(super) async fn whole(&self, handle: &Handle) -> Result<Arc<Whole>> {
        let entry = self.leases.entry(handle);
        let _locked = entry.lock().await;
        entry.check_alive(handle)?;
        if let Some(whole) = entry.whole() {
            self.counters.shared(whole.data.len() as u64);
            return Ok(whole);
        }
        self.read_whole(handle, &entry).await
    }

    pub(super) async fn read_whole(
        &self,
        handle: &Handle,
        entry: &Arc<Entry>,
    ) -> Result<Arc<Whole>> {
        let root = self.read_root(handle).await?;
        let lease = self.leases.lease(entry, root.descriptors());
        let deadline = Instant::now() + self.config.deadline;
        let pieces = self.checks_on_the_way(&root);
        let (data, shared) = match self.data(handle, &root, pieces, deadline).await {
            // Where it lies it is not read in pieces, and no byte of the refused ones has moved.
            Err(error) if pieces && error.kind() == ErrorKind::Unsupported => {
                self.data(handle, &root, false, deadline).await?
            }
            read => read?,
        };
        let whole = Arc::new(Whole { header: root.header, data, _shared: shared, _lease: lease });
        entry.set_whole(&whole);
        Ok(whole)
    }

    /// All the data, checked: in pieces, of which the checksums are made while the next ones come,
    /// or in whole data samples.
    async fn data(
        &self,
        handle: &Handle,
        root: &Root,
        pieces: bool,
        deadline: Instant,
    ) -> Result<(RegionSlice, Option<Shared>)> {
        let views = self.transport.info().capabilities.views;
        let bytes = root.header.data_bytes();
        let (data, shared, unchecked) = match &self.config.host_share {
            Some(share) if !views && bytes > 0 => {
                let read = async |region: RegionMut| {
                    let region = self.config.registered(region)?;
                    self.read_into(root, region, pieces, deadline).await
                };
                let (data, shared) = share.read(handle, bytes, deadline, read).await?;
                if !shared.was_read_here() {
                    self.counters.shared(bytes);
                }
                (data, Some(shared), Some(false)) // whoever moved it has checked it
            }
            // Memory that is there already; other memory would cost more than is gained.
            _ if self.config.take.is_some() && pieces => {
                let region = self.config.memory(bytes as usize)?;
                (self.read_into(root, region, pieces, deadline).await?, None, None)
            }
            _ => (self.run(root, 0..root.parts.len(), deadline).await?, None, Some(!views)),
        };
        if let Some(moved) = unchecked {
            self.check(root, &data, moved).await?;
        }
        Ok((data, shared))
    }

    /// The whole rollout, if another process of this host has it.
    pub(super) async fn find_whole(
        &self,
        handle: &Handle,
        entry: &Arc<Entry>,
        root: &Root,
        lease: &Arc<Lease>,
        deadline: Instant,
    ) -> Result<Option<Arc<Whole>>> {
        let bytes = root.header.data_bytes();
        let Some(share) = self.config.host_share.as_ref().filter(|_| bytes > 0) else {
            return Ok(None);
        };
        let Some((data, shared)) = share.find(handle, bytes, deadline).await? else {
            return Ok(None);
        };
        self.counters.shared(bytes);
        self.check(root, &data, false).await?; // whoever moved it has checked it
        let header = root.header.clone();
        let whole = Whole { header, data, _shared: Some(shared), _lease: lease.clone() };
        let whole = Arc::new(whole);
        entry.set_whole(&whole);
        Ok(Some(whole))
    }

    /// A run of data samples as one slice: a view, or read into one region.
    pub(super) async fn run(
        &self,
        root: &Root,
        run: Range<usize>,
        deadline: Instant,
    ) -> Result<RegionSlice> {
        if run.is_empty() {
            return Ok(RegionMut::zeroed(0)?.freeze());
        }
        let bytes: u64 = root.parts[run.clone()].iter().map(|p| p.descriptor.nbytes()).sum();
        let views = self.transport.info().capabilities.views;
        if run.len() != 1 {
            let region = self.config.memory(bytes as usize)?;
            let data = self.fill(root, run, region, deadline).await?;
            self.counters.fetched(bytes);
            if views {
                self.counters.copied(bytes); // in one piece it would have been a view
            }
            return Ok(data);
        }
        let destination = if views { Destination::View } else { Destination::Pool };
        let descriptor = root.parts[run.start].descriptor.clone();
        let request = FetchRequest::new(descriptor, destination);
        let data = fetch(&self.transport, request, bytes, deadline).await?;
        if views {
            self.counters.viewed(bytes);
        } else {
            self.counters.fetched(bytes);
        }
        Ok(data)
    }

    /// Whether a rollout's checksums are made while it comes.
    fn checks_on_the_way(&self, root: &Root) -> bool {
        let capabilities = &self.transport.info().capabilities;
        capabilities.ranges
            && !capabilities.views
            && root.header.data_bytes() >= 2 * PIECE
            && self.wants_check(&root.header, true)
    }

    /// Reads all of a rollout's data into one region, and compares the checksums if so configured.
    async fn read_into(
        &self,
        root: &Root,
        region: RegionMut,
        pieces: bool,
        deadline: Instant,
    ) -> Result<RegionSlice> {
        if !pieces {
            let data = self.fill(root, 0..root.parts.len(), region, deadline).await?;
            self.counters.fetched(root.header.data_bytes());
            self.check(root, &data, true).await?;
            return Ok(data);
        }
        let sums = Arc::new(Arriving::new(&root.header));
        let ends: Vec<u64> = sums.parts(PIECE).into_iter().map(|piece| piece.end).collect();
        let mut pieces = Vec::with_capacity(ends.len() + root.parts.len());
        for Part { range, descriptor } in &root.parts {
            let mut start = range.start;
            let first = ends.partition_point(|end| *end <= range.start);
            let inside = ends[first..].iter().take_while(|end| **end < range.end);
            for end in inside.copied().chain([range.end]) {
                let is_all = (start..end) == *range;
                let piece = start - range.start..end - range.start;
                pieces.push(Piece {
                    descriptor: descriptor.clone(),
                    ranges: (!is_all).then(|| vec![piece]),
                    bytes: end - start,
                    sums: Some((sums.clone(), start..end)),
                });
                start = end;
            }
        }
        let (data, arrived) = self.fill_with(pieces, region, deadline).await?;
        self.counters.fetched(root.header.data_bytes());
        if !sums.compare(arrived)? {
            self.check(root, &data, true).await?; // parts that were cut elsewhere
        }
        Ok(data)
    }

    /// Reads data samples into one region, several at a time.
    async fn fill(
        &self,
        root: &Root,
        run: Range<usize>,
        region: RegionMut,
        deadline: Instant,
    ) -> Result<RegionSlice> {
        let pieces = root.parts[run].iter().map(|part| {
            let Part { descriptor, .. } = part.clone();
            Piece { bytes: descriptor.nbytes(), descriptor, ranges: None, sums: None }
        });
        Ok(self.fill_with(pieces.collect(), region, deadline).await?.0)
    }

    /// Fills a region with pieces of data samples, in order, several at a time. Gives the checksums
    /// that were asked for, too.
    pub(super) async fn fill_with(
        &self,
        pieces: Vec<Piece>,
        region: RegionMut,
        deadline: Instant,
    ) -> Result<(RegionSlice, Vec<Arrived>)> {
        let in_flight = Arc::new(Semaphore::new(self.config.in_flight));
        let mut calls = JoinSet::new();
        let mut parts: Vec<Option<RegionSlice>> = vec![None; pieces.len()];
        let mut rest = region;
        let mut reads = Vec::with_capacity(pieces.len());
        for (index, piece) in pieces.into_iter().enumerate() {
            let (own, tail) =
                rest.split_at(piece.bytes as usize).expect("as long as the pieces together");
            rest = tail;
            reads.push((index, own, piece));
        }
        // The first piece of each sample comes first: if one is refused, little has moved for nothing.
        reads.sort_by_key(|(.., piece)| !piece.is_first());
        for (index, own, Piece { descriptor, ranges, bytes, sums }) in reads {
            let Ok(permit) = in_flight.clone().acquire_owned().await else {
                break; // another has failed
            };
            let (transport, in_flight) = (self.transport.clone(), in_flight.clone());
            calls.spawn(async move {
                let mut request = FetchRequest::new(descriptor, Destination::Into(vec![own]));
                request.ranges = ranges;
                let data = fetch(&transport, request, bytes, deadline).await;
                let data = data.inspect_err(|_| in_flight.close())?;
                drop(permit); // the next one comes while the checksums of this one are made
                let arrived = match sums {
                    Some(sums) => Some(sum(sums, data.clone()).await),
                    None => None,
                };
                Ok::<_, Error>((index, data, arrived))
            });
        }
        let (mut failure, mut sums) = (None, Vec::new());
        while let Some(done) = calls.join_next().await {
            match done.expect("fetching does not panic") {
                Ok((index, data, arrived)) => {
                    parts[index] = Some(data);
                    sums.extend(arrived);
                }
                Err(error) => failure = failure.or(Some(error)), // what runs is waited for
            }
        }
        match failure {
            Some(error) => Err(error),
            None => Ok((self.joined(parts.into_iter().flatten().collect())?, sums)),
        }
    }

    /// Slices that were one region, as one again.
    fn joined(&self, parts: Vec<RegionSlice>) -> Result<RegionSlice> {
        let total: usize = parts.iter().map(RegionSlice::len).sum();
        let mut parts = parts.into_iter();
        let Some(mut whole) = parts.next() else { return Ok(RegionMut::zeroed(0)?.freeze()) };
        let mut apart = Vec::new(); // only where a transport gave back other memory
        for next in parts {
            whole = match whole.join(next) {
                Ok(joined) => joined,
                Err((head, next)) => {
                    apart.push(head);
                    next
                }
            };
        }
        if apart.is_empty() {
            return Ok(whole);
        }
        apart.push(whole);
        let mut region = RegionMut::zeroed(total)?;
        let mut rest = region.as_mut_bytes().expect("heap memory");
        for part in &apart {
            let (to, tail) = rest.split_at_mut(part.len());
            to.copy_from_slice(part.as_ref());
            rest = tail;
        }
        self.counters.copied(total as u64);
        Ok(region.freeze())
    }

    /// Compares the checksums of all data, if it was moved and the configuration wants it.
    async fn check(&self, root: &Root, data: &RegionSlice, moved: bool) -> Result<()> {
        if !self.wants_check(&root.header, moved) {
            return Ok(());
        }
        self.verify(RolloutView::new((*root.header).clone(), data.clone())?).await
    }

    pub(super) fn wants_check(&self, header: &Header, moved: bool) -> bool {
        match self.config.verify {
            Verify::Never => false,
            Verify::Moved => moved && header.fields().all(|field| field.checksums),
            Verify::Always => true,
        }
    }

    pub(super) async fn verify(&self, view: RolloutView) -> Result<()> {
        let threads = self.config.threads;
        let checked = tokio::task::spawn_blocking(move || view.verify(threads)).await;
        checked.expect("verifying does not panic")
    }
}

/// What is read of one data sample.
pub(super) struct Piece {
    pub(super) descriptor: Arc<Descriptor>,
    /// All of it if none.
    pub(super) ranges: Option<Vec<Range<u64>>>,
    /// How much that is.
    pub(super) bytes: u64,
    /// Of what checksums are made, and which bytes of the data it is.
    pub(super) sums: Option<(Arc<Arriving>, Range<u64>)>,
}

impl Piece {
    /// Whether the sample begins with it.
    fn is_first(&self) -> bool {
        let first = self.ranges.as_ref().map(|ranges| ranges.first());
        first.is_none_or(|range| range.is_none_or(|range| range.start == 0))
    }
}

/// Makes the checksums of a piece that has come.
async fn sum((sums, range): (Arc<Arriving>, Range<u64>), data: RegionSlice) -> Arrived {
    let sum = move || data.as_bytes().map(|data| sums.sums(&range, data)).unwrap_or_default();
    tokio::task::spawn_blocking(sum).await.expect("making checksums does not panic")
}

/// Reads the one tensor of a sample, or `bytes` of it.
async fn fetch(
    transport: &Arc<dyn Transport>,
    request: FetchRequest,
    bytes: u64,
    deadline: Instant,
) -> Result<RegionSlice> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let options = FetchOptions::default().deadline(left);
    let descriptor = request.descriptor.clone();
    let mut fetched = transport.fetch(vec![request], options).await?;
    let tensor = fetched.pop().and_then(|mut one| one.tensors.pop()).map(|(_, tensor)| tensor);
    let tensor = tensor.filter(|tensor| tensor.data.len() as u64 == bytes);
    tensor.map(|tensor| tensor.data).ok_or_else(|| {
        Error::new(ErrorKind::ShortRead, "get rollout", "the transport gave another tensor")
            .with("key", &descriptor.sample)
            .with("expected_bytes", bytes)
    })
}
