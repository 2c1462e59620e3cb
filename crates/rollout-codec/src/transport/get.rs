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
    root::Root,
};
use crate::{
    Rollout,
    native::{Header, RolloutView},
};

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

    /// Reads some fields: of a copy only the data samples that hold them.
    pub async fn get_fields(&self, handle: &Handle, fields: &[&str]) -> Result<Sample> {
        let ranges = |header: &Header| {
            fields.iter().map(|field| header.field_range(field)).collect::<Result<Vec<_>>>()
        };
        let (header, parts) = self.0.ranges(handle, ranges).await?;
        self.0.counters.got();
        Ok(Sample { view: RolloutView::of_parts((*header).clone(), parts)? })
    }
}

/// Runs of the data: where each starts, and its bytes.
pub(super) type Runs = Vec<(u64, RegionSlice)>;

impl Inner {
    /// Fetches and checks the root. The caller has the entry's lock and either leases the samples
    /// or lets them go.
    pub(super) async fn read_root(&self, handle: &Handle) -> Result<Root> {
        let deadline = Instant::now() + self.config.deadline;
        let root = handle.root();
        let views = self.transport.info().capabilities.views;
        let destination = if views { Destination::View } else { Destination::Pool };
        let region = fetch(&self.transport, root.clone(), destination, deadline).await?;
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

    async fn read_whole(&self, handle: &Handle, entry: &Arc<Entry>) -> Result<Arc<Whole>> {
        let root = self.read_root(handle).await?;
        let lease = self.leases.lease(entry, root.descriptors());
        let deadline = Instant::now() + self.config.deadline;
        let views = self.transport.info().capabilities.views;
        let bytes = root.header.data_bytes();
        let (data, shared, moved) = match &self.config.host_share {
            Some(share) if !views && bytes > 0 => {
                let read = async |region: RegionMut| {
                    let region = self.config.registered(region)?;
                    let data = self.fill(&root, 0..root.parts.len(), region, deadline).await?;
                    self.counters.fetched(bytes);
                    self.check(&root, &data, true).await?;
                    Ok(data)
                };
                let (data, shared) = share.read(handle, bytes, deadline, read).await?;
                if !shared.was_read_here() {
                    self.counters.shared(bytes);
                }
                (data, Some(shared), false) // whoever moved it has checked it
            }
            _ => (self.run(&root, 0..root.parts.len(), deadline).await?, None, !views),
        };
        self.check(&root, &data, moved).await?;
        let whole = Arc::new(Whole { header: root.header, data, _shared: shared, _lease: lease });
        entry.set_whole(&whole);
        Ok(whole)
    }

    /// Reads the ranges that `wanted` finds in the header, and keeps them like any view.
    pub(super) async fn ranges(
        &self,
        handle: &Handle,
        wanted: impl FnOnce(&Header) -> Result<Vec<Range<u64>>>,
    ) -> Result<(Arc<Header>, Runs)> {
        let entry = self.leases.entry(handle);
        let _locked = entry.lock().await;
        entry.check_alive(handle)?;
        let views = self.transport.info().capabilities.views;
        if let Some(whole) = entry.whole() {
            wanted(&whole.header)?; // names are checked all the same
            self.counters.shared(whole.data.len() as u64);
            return Ok((whole.header.clone(), vec![(0, whole.data())]));
        }
        if views {
            let whole = self.read_whole(handle, &entry).await?;
            wanted(&whole.header)?;
            return Ok((whole.header.clone(), vec![(0, whole.data())]));
        }
        let root = self.read_root(handle).await?;
        let lease = self.leases.lease(&entry, root.descriptors());
        let deadline = Instant::now() + self.config.deadline;
        let mut parts: Vec<Range<usize>> =
            wanted(&root.header)?.iter().map(|range| root.parts_of(range)).collect();
        parts.sort_unstable_by_key(|parts| (parts.start, parts.end));
        let mut runs: Vec<Range<usize>> = Vec::new();
        for part in parts.into_iter().filter(|part| !part.is_empty()) {
            match runs.last_mut() {
                Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
                _ => runs.push(part),
            }
        }
        let mut read = Vec::with_capacity(runs.len());
        for run in runs {
            let start = root.parts[run.start].range.start;
            let data = self.run(&root, run, deadline).await?;
            read.push((start, data.keeping(lease.clone())));
        }
        if self.wants_check(&root.header, true) {
            let view = RolloutView::of_parts((*root.header).clone(), read.clone())?;
            self.verify(view).await?;
        }
        Ok((root.header, read))
    }

    /// A run of data samples as one slice: a view, or read into one region.
    async fn run(&self, root: &Root, run: Range<usize>, deadline: Instant) -> Result<RegionSlice> {
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
        let data = fetch(&self.transport, descriptor, destination, deadline).await?;
        if views {
            self.counters.viewed(bytes);
        } else {
            self.counters.fetched(bytes);
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
        let in_flight = Arc::new(Semaphore::new(self.config.in_flight));
        let mut calls = JoinSet::new();
        let mut rest = region;
        for (index, part) in root.parts[run.clone()].iter().enumerate() {
            let bytes = part.descriptor.nbytes() as usize;
            let (own, tail) = rest.split_at(bytes).expect("as long as the parts together");
            rest = tail;
            let (transport, in_flight) = (self.transport.clone(), in_flight.clone());
            let descriptor = part.descriptor.clone();
            calls.spawn(async move {
                let _permit = in_flight.acquire_owned().await.map_err(|_| {
                    Error::new(ErrorKind::Closed, "get rollout", "another part failed")
                })?;
                let destination = Destination::Into(vec![own]);
                let data = fetch(&transport, descriptor, destination, deadline).await?;
                Ok::<_, Error>((index, data))
            });
        }
        let mut parts: Vec<Option<RegionSlice>> = vec![None; run.len()];
        let mut failure = None;
        while let Some(done) = calls.join_next().await {
            match done.expect("fetching does not panic") {
                Ok((index, data)) => parts[index] = Some(data),
                Err(error) => {
                    in_flight.close(); // what waits for its turn ends; what runs is waited for
                    failure = failure.or(Some(error));
                }
            }
        }
        match failure {
            Some(error) => Err(error),
            None => self.joined(parts.into_iter().flatten().collect()),
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

    fn wants_check(&self, header: &Header, moved: bool) -> bool {
        match self.config.verify {
            Verify::Never => false,
            Verify::Moved => moved && header.fields().all(|field| field.checksums),
            Verify::Always => true,
        }
    }

    async fn verify(&self, view: RolloutView) -> Result<()> {
        let threads = self.config.threads;
        let checked = tokio::task::spawn_blocking(move || view.verify(threads)).await;
        checked.expect("verifying does not panic")
    }
}

/// Reads the one tensor of a sample.
async fn fetch(
    transport: &Arc<dyn Transport>,
    descriptor: Arc<Descriptor>,
    destination: Destination,
    deadline: Instant,
) -> Result<RegionSlice> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let options = FetchOptions::default().deadline(left);
    let request = FetchRequest::new(descriptor.clone(), destination);
    let mut fetched = transport.fetch(vec![request], options).await?;
    let tensor = fetched.pop().and_then(|mut one| one.tensors.pop()).map(|(_, tensor)| tensor);
    let tensor = tensor.filter(|tensor| tensor.data.len() as u64 == descriptor.nbytes());
    tensor.map(|tensor| tensor.data).ok_or_else(|| {
        Error::new(ErrorKind::ShortRead, "get rollout", "the transport gave another tensor")
            .with("key", &descriptor.sample)
            .with("expected_bytes", descriptor.nbytes())
    })
}
