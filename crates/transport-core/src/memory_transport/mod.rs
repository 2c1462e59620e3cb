//! The reference transport: publisher and consumers in one process, every rule of the contract.
//!
//! It is slow only in that it copies at publish; use it in tests, on one host, and to see what a
//! transport is meant to do.

mod factory;
mod request;
mod store;
#[cfg(test)]
mod tests;
mod transfer;

pub use factory::factory;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use indexmap::IndexMap;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    ArenaLocation, ByteSize, Capabilities, ClientId, Descriptor, Epoch, Error, ErrorKind,
    ErrorStatus, FetchOptions, FetchRequest, Fetched, Health, Location, Publication,
    PublishOptions, Ready, RegionMut, RegionSlice, Release, ReleaseReport, Result, SessionName,
    Tensor, Transport, TransportInfo,
    deadline::{Deadline, Elapsed},
};
use request::{Plan, check_sources};
use store::{Claim, Filled, Store};
use transfer::Transfers;

/// Registry name of [`MemoryTransport`].
pub const SCHEME: &str = "memory";

/// Room is given out in these units, as in an arena.
const UNIT: u64 = 512;
/// How long `close` waits for copies under way.
const CLOSE_BOUND: Duration = Duration::from_secs(10);

/// Publishes samples to consumers in the same process.
///
/// The object that [`build`](MemoryTransportBuilder::build) gives is the owner: it publishes, and
/// fetches and releases as one client among others. [`client`](Self::client) makes more clients,
/// each with holds of its own, which cannot publish. When the owner is closed or dropped, everything
/// published is gone; a client that is closed or dropped gives back its holds.
///
/// # Limits
/// - Descriptors have the arena form with real addresses, but mean something only to transports of
///   the same owner: another one reports them as stale by their epoch.
/// - Every object has an allocation of its own, so the arena never fragments. Each takes whole units
///   of 512 bytes of the capacity.
/// - Room comes back when the last view, copy under way and hold are gone; a view that outlives
///   its release keeps its bytes and its room.
/// - Copies run on tokio's blocking threads: calls need a tokio runtime with time enabled.
///
/// ```
/// # use std::sync::Arc;
/// # use transport_core::*;
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let publisher = MemoryTransport::builder().arena_bytes(1 << 20).build()?;
/// let consumer = publisher.client();
///
/// let sample = SampleKey::new(StoreId::new("run0")?, SampleId::new("task-1")?, Generation(1));
/// let meta = TensorMeta::new(Dtype::Int32, [2])?;
/// let tensor = Tensor::new(meta, RegionSlice::copy_of(&[1, 0, 0, 0, 2, 0, 0, 0]))?;
/// let tensors = [(FeatureName::new("input_ids")?, tensor)].into_iter().collect();
/// let batch = vec![Publication::new(sample, tensors, Ready::Now)];
/// let descriptor = Arc::new(publisher.publish(batch, PublishOptions::default()).await?.remove(0));
///
/// let request = FetchRequest::new(descriptor.clone(), Destination::View);
/// let fetched = consumer.fetch(vec![request], FetchOptions::default()).await?;
/// assert_eq!(fetched[0].tensors["input_ids"].data.as_ref(), [1, 0, 0, 0, 2, 0, 0, 0]);
///
/// drop(fetched);
/// assert_eq!(consumer.release(vec![descriptor.into()]).await?.released, 1);
/// # Ok::<(), Error>(())
/// # }).unwrap();
/// ```
pub struct MemoryTransport {
    shared: Arc<Shared>,
    info: TransportInfo,
    client: ClientId,
    owner: bool,
    closed: AtomicBool,
}

/// Settings of a [`MemoryTransport`].
#[derive(Clone, Debug)]
pub struct MemoryTransportBuilder {
    arena_bytes: Option<u64>,
    older_peer: bool,
    transfer_delay: Duration,
}

impl MemoryTransportBuilder {
    /// Room for published tensors, in bytes; rounded down to 512. Must be given.
    #[must_use]
    pub fn arena_bytes(mut self, bytes: u64) -> Self {
        self.arena_bytes = Some(bytes);
        self
    }

    /// Describes samples as older publishers do, without epoch and sequence numbers, so that
    /// staleness cannot be checked. Default: no.
    #[must_use]
    pub fn older_peer(mut self, older: bool) -> Self {
        self.older_peer = older;
        self
    }

    /// Least time that each fetch with a copy takes, so that tests can look at a transfer in
    /// flight. Default: zero.
    #[must_use]
    pub fn transfer_delay(mut self, delay: Duration) -> Self {
        self.transfer_delay = delay;
        self
    }

    /// Makes the owner.
    pub fn build(self) -> Result<MemoryTransport> {
        let invalid = |why: &'static str| Error::new(ErrorKind::ConfigInvalid, "build memory", why);
        let bytes = self.arena_bytes.ok_or_else(|| {
            invalid("the size of the arena is not given").remedy("set `arena_bytes`, such as 1GiB")
        })?;
        let units =
            u32::try_from(bytes / UNIT).ok().filter(|&units| units > 0).ok_or_else(|| {
                invalid("the arena must have 512 bytes to 2 TiB").with("found", bytes)
            })?;
        let session = SessionName::new("memory", 1).expect("a valid name");
        let shared = Shared {
            store: Store::new(Epoch::random()),
            units,
            room: Arc::new(Semaphore::new(units as usize)),
            transfers: Arc::default(),
            session,
            older_peer: self.older_peer,
            transfer_delay: self.transfer_delay,
            closed: AtomicBool::new(false),
            clients: AtomicU64::new(0),
            copied_bytes: AtomicU64::new(0),
            last_error: Mutex::new(None),
        };
        Ok(MemoryTransport::new(Arc::new(shared), true))
    }
}

struct Shared {
    store: Arc<Store>,
    units: u32,
    room: Arc<Semaphore>, // closed together with the owner
    transfers: Arc<Transfers>,
    session: SessionName,
    older_peer: bool,
    transfer_delay: Duration,
    closed: AtomicBool,
    clients: AtomicU64,
    copied_bytes: AtomicU64,
    last_error: Mutex<Option<String>>,
}

impl MemoryTransport {
    /// Starts from the defaults; the size of the arena must be given.
    pub fn builder() -> MemoryTransportBuilder {
        MemoryTransportBuilder {
            arena_bytes: None,
            older_peer: false,
            transfer_delay: Duration::ZERO,
        }
    }

    /// Another consumer of the same samples, with an identity and holds of its own.
    pub fn client(&self) -> Self {
        Self::new(self.shared.clone(), false)
    }

    /// Who this is, for [`Publication::holder`].
    pub fn client_id(&self) -> &ClientId {
        &self.client
    }

    fn new(shared: Arc<Shared>, owner: bool) -> Self {
        let capabilities = Self::capabilities(owner, shared.older_peer);
        let engine = concat!("in-process ", env!("CARGO_PKG_VERSION"));
        shared.clients.fetch_add(u64::from(!owner), Ordering::SeqCst);
        Self {
            shared,
            info: TransportInfo::new(SCHEME, engine, capabilities),
            client: ClientId::random(),
            owner,
            closed: AtomicBool::new(false),
        }
    }

    fn capabilities(owner: bool, older_peer: bool) -> Capabilities {
        Capabilities {
            publish: owner,
            fetch: true,
            views: true,
            ranges: true,
            cross_host: false,
            device_memory: false,
            staleness_checked: !older_peer,
            leases: false,
        }
    }

    fn check_open(&self, operation: &'static str) -> Result<()> {
        if self.closed.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Closed, operation, "the transport was closed"));
        }
        if self.shared.closed.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::PeerGone, operation, "the publisher was closed")
                .status(ErrorStatus::Permanent));
        }
        Ok(())
    }

    /// Keeps the newest failure for [`Health::last_error`].
    fn note<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            *self.shared.last_error.lock() = Some(error.to_string());
        }
        result
    }

    async fn try_publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        self.check_open("publish")?;
        if !self.owner {
            return Err(Error::new(ErrorKind::Unsupported, "publish", "a client only consumes")
                .with("scheme", SCHEME)
                .remedy("publish through the transport that `client` was called on"));
        }
        let deadline = Deadline::after(options.deadline);
        check_sources(&batch)?;
        let keys = batch.iter().flat_map(|p| p.tensors.keys().map(|n| p.sample.object(n)));
        let claim = self.shared.store.claim_keys(keys.collect(), options.replace)?;
        let reserved = self.shared.reserve(&batch, deadline).await?;
        let described: Vec<_> = batch
            .iter()
            .map(|p| (p.sample.clone(), p.aux_layer_ids.clone(), p.holder.clone()))
            .collect();
        let shared = self.shared.clone();
        let fill = move || -> Result<(Vec<Filled>, Reserved, Claim)> {
            let mut reserved = reserved;
            let filled = batch
                .into_iter()
                .map(|publication| shared.fill(publication, &mut reserved, deadline))
                .collect::<Result<_>>()?;
            Ok((filled, reserved, claim))
        };
        let (filled, reserved, claim) =
            self.shared.transfers.run("publish", deadline, 0, fill).await?;
        let features = self.shared.store.publish(filled)?;
        drop((reserved, claim)); // after the keys exist: none is free in between
        described
            .into_iter()
            .zip(features)
            .map(|((sample, aux_layer_ids, holder), mut features)| {
                let mut arena = ArenaLocation::new(
                    self.shared.session.clone(),
                    self.shared.session.clone(),
                    Some(self.shared.store.epoch()),
                );
                arena.holder = holder;
                if self.shared.older_peer {
                    arena.epoch = None;
                    features.values_mut().for_each(|f| f.seq = None);
                }
                Descriptor::new(sample, features, aux_layer_ids, Location::Arena(arena))
            })
            .collect()
    }

    async fn try_fetch(
        &self,
        requests: Vec<FetchRequest>,
        options: FetchOptions,
    ) -> Result<Vec<Fetched>> {
        self.check_open("fetch")?;
        let deadline = Deadline::after(options.deadline);
        let plans = requests.into_iter().map(Plan::new).collect::<Result<Vec<_>>>()?;
        let wanted: Vec<_> =
            plans.iter().map(|p| (&*p.descriptor, p.names.iter().collect())).collect();
        let (sources, holds) = self.shared.store.hold(&self.client, &wanted)?;

        let mut answers = Vec::with_capacity(plans.len());
        let mut copies = Vec::new();
        for (plan, sources) in plans.into_iter().zip(sources) {
            answers.push((plan.descriptor, plan.names, plan.part));
            copies.extend(sources.into_iter().zip(plan.sinks));
        }
        let bytes = copies.iter().map(|(source, sink)| sink.copied_bytes(source)).sum();
        let data = if bytes == 0 {
            copies.into_iter().map(|(source, sink)| sink.fill(&source)).collect::<Result<_>>()?
        } else {
            let delay = self.shared.transfer_delay;
            let copy = move || -> Result<Vec<RegionSlice>> {
                std::thread::sleep(delay);
                copies.into_iter().map(|(source, sink)| sink.fill(&source)).collect()
            };
            self.shared.transfers.run("fetch", deadline, bytes, copy).await?
        };
        self.shared.copied_bytes.fetch_add(bytes, Ordering::SeqCst);
        self.check_open("fetch")?;
        holds.confirm();

        let mut data = data.into_iter();
        let fetched = answers.into_iter().map(|(descriptor, names, part)| {
            let tensors = names.into_iter().zip(&mut data).map(|(name, data)| {
                let whole = || descriptor.features[&name].meta.clone();
                let meta = part.clone().unwrap_or_else(whole);
                (name, Tensor { meta, data })
            });
            let tensors: IndexMap<_, _> = tensors.collect();
            let checked = descriptor.epoch().is_some()
                && tensors.keys().all(|name| descriptor.features[name].seq.is_some());
            Fetched::new(descriptor, tensors, checked)
        });
        Ok(fetched.collect())
    }

    async fn try_release(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
        self.check_open("release")?;
        let mut report = ReleaseReport::default();
        for release in releases {
            report.merge(self.shared.store.release(&self.client, &release.descriptor));
        }
        Ok(report)
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Transport for MemoryTransport {
    fn info(&self) -> &TransportInfo {
        &self.info
    }

    async fn publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        self.note(self.try_publish(batch, options).await)
    }

    async fn fetch(
        &self,
        requests: Vec<FetchRequest>,
        options: FetchOptions,
    ) -> Result<Vec<Fetched>> {
        self.note(self.try_fetch(requests, options).await)
    }

    async fn release(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
        self.note(self.try_release(releases).await)
    }

    async fn let_go(&self, samples: Vec<Arc<Descriptor>>) -> Result<()> {
        self.check_open("let go")?;
        self.shared.store.let_go(&self.client, &samples);
        Ok(())
    }

    async fn health(&self) -> Result<Health> {
        self.check_open("health")?;
        let shared = &*self.shared;
        let tally = shared.store.tally();
        // Released first: what is released in between then counts as resident, not as negative.
        let released_samples = tally.released_samples.load(Ordering::SeqCst);
        let published_samples = tally.published_samples.load(Ordering::SeqCst);
        let free = shared.room.available_permits() as u64 * UNIT;
        let (duplicate_frees, stale_frees) = shared.store.frees();
        Ok(Health {
            resident_samples: published_samples - released_samples,
            resident_bytes: tally.resident_bytes.load(Ordering::SeqCst),
            reserved_bytes: tally.reserved_bytes.load(Ordering::SeqCst),
            arena_bytes: u64::from(shared.units) * UNIT,
            arena_free_bytes: free,
            arena_largest_free: free,
            published_samples,
            released_samples,
            duplicate_frees,
            stale_frees,
            deferred_samples: tally.deferred_samples.load(Ordering::SeqCst),
            host_payload_bytes: shared.copied_bytes.load(Ordering::SeqCst),
            quarantined_bytes: shared.transfers.quarantined_bytes(),
            connected_peers: shared.clients.load(Ordering::SeqCst),
            last_error: shared.last_error.lock().clone(),
            ..Health::default()
        })
    }

    async fn close(&self) -> Result<()> {
        self.closed.store(true, Ordering::SeqCst);
        if self.owner {
            self.shared.closed.store(true, Ordering::SeqCst);
            self.shared.room.close(); // wakes those that wait for room
        }
        self.shared.transfers.idle(CLOSE_BOUND).await.map_err(|Elapsed| {
            Error::new(ErrorKind::Timeout, "close", "copies are still running")
                .with("waited", format_args!("{CLOSE_BOUND:?}"))
                .remedy("call close again; a source's ready event may be stuck")
        })?;
        self.let_go();
        Ok(())
    }
}

impl MemoryTransport {
    fn let_go(&self) {
        if self.owner {
            self.shared.store.close();
        } else {
            self.shared.store.forget(&self.client);
        }
    }
}

impl Drop for MemoryTransport {
    fn drop(&mut self) {
        if self.owner {
            self.shared.closed.store(true, Ordering::SeqCst);
            self.shared.room.close();
        } else {
            self.shared.clients.fetch_sub(1, Ordering::SeqCst);
        }
        self.let_go();
    }
}

impl fmt::Debug for MemoryTransport {
    /// The role and the size, such as `Memory(owner, 64MiB)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let role = if self.owner { "owner" } else { "client" };
        let size = ByteSize::new(u64::from(self.shared.units) * UNIT).expect("at most 2 TiB");
        write!(f, "Memory({role}, {size})")
    }
}

/// Room of a batch that is being filled.
struct Reserved {
    permit: OwnedSemaphorePermit,
    holder: Arc<Store>, // its tally counts the units that are still in `permit`
}

impl Reserved {
    fn take(&mut self, units: u32) -> OwnedSemaphorePermit {
        let part = self.permit.split(units as usize).expect("the sum of the batch was reserved");
        self.count_down(u64::from(units));
        part
    }

    fn count_down(&self, units: u64) {
        self.holder.tally().reserved_bytes.fetch_sub(units * UNIT, Ordering::SeqCst);
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.count_down(self.permit.num_permits() as u64);
    }
}

impl Shared {
    /// Waits for the room of a whole batch, first come, first served.
    async fn reserve(&self, batch: &[Publication], deadline: Deadline) -> Result<Reserved> {
        let full = |why: &'static str, bytes: u64| {
            let free = self.room.available_permits() as u64 * UNIT;
            Error::new(ErrorKind::CapacityExceeded, "publish", why)
                .with("requested_bytes", bytes)
                .with("free_bytes", free)
                .with("arena_bytes", u64::from(self.units) * UNIT)
                .remedy("use a larger arena, or a lower watermark")
        };
        let bytes = batch.iter().map(units).try_fold(0u64, |sum, n| sum.checked_add(n?));
        let bytes = bytes.and_then(|units| units.checked_mul(UNIT)).unwrap_or(u64::MAX);
        let wanted = u32::try_from(bytes / UNIT).ok().filter(|&wanted| wanted <= self.units);
        let Some(wanted) = wanted else {
            return Err(
                full("the batch is larger than the arena", bytes).status(ErrorStatus::Permanent)
            );
        };
        let permit = deadline
            .run(self.room.clone().acquire_many_owned(wanted))
            .await
            .map_err(|Elapsed| full("no room for the batch before the deadline", bytes))?
            .map_err(|_| Error::new(ErrorKind::Closed, "publish", "the transport was closed"))?;
        self.store.tally().reserved_bytes.fetch_add(bytes, Ordering::SeqCst);
        Ok(Reserved { permit, holder: self.store.clone() })
    }

    /// Waits for the source and copies it. Blocks.
    fn fill(
        &self,
        publication: Publication,
        reserved: &mut Reserved,
        deadline: Deadline,
    ) -> Result<Filled> {
        if let Ready::After(event) = &publication.ready {
            event.wait(deadline.remaining())?;
        }
        let units = units(&publication).expect("reserved before");
        let mut regions = Vec::with_capacity(publication.tensors.len());
        for tensor in publication.tensors.values() {
            regions.push(RegionMut::zeroed(tensor.data.len())?);
        }
        let bytes = |region| RegionMut::as_mut_bytes(region).expect("heap memory");
        let mut destinations: Vec<_> = regions.iter_mut().map(bytes).collect();
        publication.write_into(&mut destinations)?;
        let sample = publication.sample;
        let mut objects = IndexMap::with_capacity(regions.len());
        for ((name, tensor), region) in publication.tensors.into_iter().zip(regions) {
            self.copied_bytes.fetch_add(region.len() as u64, Ordering::SeqCst);
            let key = sample.object(&name);
            objects.insert(name, (key, tensor.meta, region.freeze()));
        }
        let room = reserved.take(u32::try_from(units).expect("no more than the arena"));
        Ok(Filled { objects, room, holder: publication.holder })
    }
}

/// Units of room that a sample takes; `None` beyond what can be counted.
fn units(publication: &Publication) -> Option<u64> {
    publication
        .tensors
        .values()
        .try_fold(0u64, |sum, tensor| sum.checked_add(tensor.meta.nbytes().div_ceil(UNIT)))
}
