//! The publishing side: an arena, and the two listeners through which others read and free it.

mod fill;
mod late;
mod reservation;

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use capture_arena::{Arena, PublishedSample, ReserveOptions, SamplePlan};
use control_proto::{Secret, control::Limits};
use indexmap::IndexMap;
use tokio::sync::{oneshot, watch};
use transport_core::{
    ArenaLocation, ClientId, Descriptor, Error, ErrorKind, FeatureDescriptor, Health, Location,
    Publication, PublishOptions, Result, SessionName,
};

pub use self::reservation::SinkReservation;
use self::{
    fill::{Filler, Moved, plan_of},
    late::{LateWrites, late_writes},
};
use crate::{
    AllowList, AnonymousFrees, ControlServer, ControlServerConfig, ControlServerStats, DataServer,
    DataServerConfig, DataServerStats, WriteWindow, workers::Workers,
};

/// Batches that are copied, or wait for their ready events, at a time.
const MAX_COPIES: usize = 32;
/// How long `close` waits for copies that run.
const CLOSE_BOUND: Duration = Duration::from_secs(10);

/// How a [`CaptureSink`] listens and what it allows. [`Default`] serves this host only.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SinkConfig {
    /// Where the peer handshake is answered: the session of the descriptors. Default: any free port
    /// of 127.0.0.1.
    pub data_bind: SocketAddr,
    /// Where bytes are served; peers learn it from the handshake. Default: any free port of the
    /// host of `data_bind`.
    pub transfer_bind: Option<SocketAddr>,
    /// Where frees are taken. Default: any free port of 127.0.0.1.
    pub control_bind: SocketAddr,
    /// Host that peers are told to connect to. Default: the bound addresses; must be given for
    /// 0.0.0.0 and `[::]`.
    pub advertise_host: Option<String>,
    /// Who may connect, to any of the ports. Default: everybody.
    pub allow: AllowList,
    /// What clients of the control port must prove to know. Needed for any address but loopback,
    /// unless `anonymous_frees` says otherwise in so many words.
    pub token: Option<Secret>,
    /// Whose plain lists of keys are taken.
    pub anonymous_frees: AnonymousFrees,
    /// Bounds of the control port.
    pub limits: Limits,
    /// Longest lease granted. Default: 10 minutes.
    pub max_lease: Duration,
    /// Memory that peers may write. Default: none, every write is refused.
    pub writable: Option<WriteWindow>,
    /// Data connections at a time; each has a thread. Default: 256.
    pub max_data_connections: usize,
    /// How long a data connection may be idle. Default: 2 minutes.
    pub data_idle: Duration,
    /// How long a peer may stall within a transfer. Default: 10 seconds.
    pub data_stall: Duration,
    /// Takes tensors of this device into an arena in host memory, which is page-locked at the start.
    /// Their bytes are host payload. Default: none, device tensors are refused there.
    #[cfg(feature = "cuda")]
    pub staging: Option<capture_arena::cuda::Staging>,
}

impl Default for SinkConfig {
    fn default() -> Self {
        let (data, control) = (DataServerConfig::default(), ControlServerConfig::default());
        Self {
            data_bind: data.session_bind,
            transfer_bind: None,
            control_bind: control.bind,
            advertise_host: None,
            allow: AllowList::default(),
            token: None,
            anonymous_frees: AnonymousFrees::default(),
            limits: control.limits,
            max_lease: control.max_lease,
            writable: None,
            max_data_connections: data.max_connections,
            data_idle: data.idle,
            data_stall: data.stall,
            #[cfg(feature = "cuda")]
            staging: None,
        }
    }
}

impl SinkConfig {
    fn data(&self) -> DataServerConfig {
        DataServerConfig {
            session_bind: self.data_bind,
            data_bind: self.transfer_bind,
            advertise_host: self.advertise_host.clone(),
            allow: self.allow.clone(),
            writable: self.writable.clone(),
            max_connections: self.max_data_connections,
            idle: self.data_idle,
            stall: self.data_stall,
            ..DataServerConfig::default()
        }
    }

    fn control(&self) -> ControlServerConfig {
        ControlServerConfig {
            bind: self.control_bind,
            advertise_host: self.advertise_host.clone(),
            allow: self.allow.clone(),
            token: self.token.clone(),
            anonymous: self.anonymous_frees,
            limits: self.limits,
            max_lease: self.max_lease,
            ..ControlServerConfig::default()
        }
    }
}

/// Publishes samples from an arena: copies or lets others fill them, describes them, serves their
/// bytes and takes their frees. Cheap to clone; the last clone closes it.
#[derive(Clone, Debug)]
pub struct CaptureSink(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    arena: Arena,
    data: Arc<DataServer>,
    control: ControlServer,
    copies: Workers,
    filler: Filler,
    late: LateWrites,
    closed: watch::Sender<bool>,
    host_bytes: AtomicU64,
    device_bytes: AtomicU64,
}

impl CaptureSink {
    /// Starts both listeners over `arena`.
    pub fn start(arena: Arena, config: SinkConfig) -> Result<Self> {
        let filler = Filler::new(&arena, &config)?;
        let data = Arc::new(DataServer::start(&arena, &config.data())?);
        let measured = Arc::downgrade(&data);
        let health = move |mut health: Health| {
            if let Some(data) = measured.upgrade() {
                add_data(&mut health, data.stats());
            }
            health
        };
        let control = ControlServer::start_with(
            arena.clone(),
            data.session().clone(),
            config.control(),
            Arc::new(health),
        )?;
        Ok(Self(Arc::new(Inner {
            arena,
            data,
            control,
            copies: Workers::new("fs-publish", MAX_COPIES),
            filler,
            late: late_writes(),
            closed: watch::channel(false).0,
            host_bytes: AtomicU64::new(0),
            device_bytes: AtomicU64::new(0),
        })))
    }

    /// Where the bytes are read: the data session of every descriptor.
    pub fn session(&self) -> &SessionName {
        self.0.data.session()
    }

    /// Where frees are taken: the control endpoint of every descriptor.
    pub fn control(&self) -> &SessionName {
        self.0.control.control()
    }

    /// The arena that it publishes from.
    pub fn arena(&self) -> &Arena {
        &self.0.arena
    }

    /// What the data ports have done so far.
    pub fn data_stats(&self) -> DataServerStats {
        self.0.data.stats()
    }

    /// What the control port has seen so far.
    pub fn control_stats(&self) -> ControlServerStats {
        self.0.control.stats()
    }

    /// Takes ranges for a whole batch, to be filled by the caller; waits for room until the
    /// deadline. See [`Arena::reserve`] for what can go wrong.
    pub async fn reserve(
        &self,
        batch: Vec<SamplePlan>,
        options: ReserveOptions,
    ) -> Result<SinkReservation> {
        let holders = batch.iter().map(|plan| plan.holder.clone()).collect();
        let reservation =
            self.unless_closed("reserve", self.0.arena.reserve(batch, options)).await?;
        Ok(SinkReservation::new(self.clone(), reservation, holders))
    }

    /// [`Self::reserve`] for threads that may block.
    pub fn reserve_blocking(
        &self,
        batch: Vec<SamplePlan>,
        options: ReserveOptions,
    ) -> Result<SinkReservation> {
        self.check_open("reserve")?;
        let holders = batch.iter().map(|plan| plan.holder.clone()).collect();
        let reservation = self.0.arena.reserve_blocking(batch, options)?;
        Ok(SinkReservation::new(self.clone(), reservation, holders))
    }

    /// Copies a batch into the arena and publishes it, all or nothing; see
    /// [`Transport::publish`](transport_core::Transport::publish).
    pub async fn publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        self.check_open("publish")?;
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        self.0.filler.check(&batch)?;
        let deadline = Instant::now().checked_add(options.deadline);
        let plans = batch.iter().map(plan_of).collect();
        let reserve = ReserveOptions::default().replace(options.replace).deadline(options.deadline);
        let reservation = self.reserve(plans, reserve).await?;
        let (done, filled) = oneshot::channel();
        let this = self.clone();
        self.0.copies.run(move || {
            let filled = this.0.filler.fill(reservation, &batch, deadline);
            // The last handle of a sink closes it, which waits for this thread.
            drop((this, batch));
            // A caller that went away gives the batch up with the message.
            let _ = done.send(filled);
        })?;
        let filled = self.unless_closed("publish", async {
            filled.await.unwrap_or_else(|_| {
                Err(Error::new(ErrorKind::Closed, "publish", "the copy was given up"))
            })
        });
        filled.await?.publish_filled().await
    }

    /// [`Self::publish`] for threads that may block; copies on this thread, which saves a hop.
    pub fn publish_blocking(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        self.check_open("publish")?;
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        self.0.filler.check(&batch)?;
        let deadline = Instant::now().checked_add(options.deadline);
        let plans = batch.iter().map(plan_of).collect();
        let reserve = ReserveOptions::default().replace(options.replace).deadline(options.deadline);
        let reservation = self.reserve_blocking(plans, reserve)?;
        self.0.filler.fill(reservation, &batch, deadline)?.publish_filled_blocking()
    }

    /// Measures the arena, the connections and the bytes that passed through.
    pub async fn health(&self) -> Result<Health> {
        self.check_open("health")?;
        let arena = self.0.arena.health().await?;
        Ok(self.complete(arena.into()))
    }

    /// [`Self::health`] for threads that may block.
    pub fn health_blocking(&self) -> Result<Health> {
        self.check_open("health")?;
        let arena = self.0.arena.health_blocking()?;
        Ok(self.complete(arena.into()))
    }

    /// Ends waiting publications, every connection, both listeners and the arena. Idempotent.
    pub async fn close(&self) -> Result<()> {
        let this = self.clone();
        let (done, closed) = oneshot::channel();
        // Joining threads blocks, so it has one of its own.
        let closing = std::thread::Builder::new().name("fs-close".into()).spawn(move || {
            this.close_blocking();
            let _ = done.send(());
        });
        match closing {
            Ok(_) => drop(closed.await),
            Err(_) => self.close_blocking(),
        }
        Ok(())
    }

    /// [`Self::close`] for threads that may block.
    pub fn close_blocking(&self) {
        self.0.close();
    }

    /// Ends publications that wait, and refuses new ones.
    pub(crate) fn stop_publishing(&self) {
        self.0.closed.send_replace(true);
    }

    fn complete(&self, mut health: Health) -> Health {
        add_data(&mut health, self.0.data.stats());
        let control = self.0.control.stats();
        health.connected_peers += control.connections;
        health.protocol_errors +=
            control.bad_lines + control.refused_lines + control.closed_for_cause;
        health.last_error = health.last_error.take().or(control.last_error);
        health.host_payload_bytes += self.0.host_bytes.load(Ordering::Relaxed);
        health.device_payload_bytes += self.0.device_bytes.load(Ordering::Relaxed);
        health.quarantined_bytes += self.0.filler.quarantined_bytes() + self.0.late.bytes();
        health
    }

    fn check_open(&self, operation: &'static str) -> Result<()> {
        if *self.0.closed.borrow() { Err(closed(operation)) } else { Ok(()) }
    }

    async fn unless_closed<T>(
        &self,
        operation: &'static str,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let mut signal = self.0.closed.subscribe();
        tokio::select! {
            biased;
            _ = signal.wait_for(|closed| *closed) => Err(closed(operation)),
            done = work => done,
        }
    }

    /// Describes what the arena has published. What nobody copied was written where it is: through
    /// the host into its own memory, on the device without the host.
    fn describe(
        &self,
        published: Vec<PublishedSample>,
        holders: Vec<Option<ClientId>>,
        aux_layer_ids: Vec<Option<Vec<i64>>>,
        moved: Option<Moved>,
    ) -> Result<Vec<Descriptor>> {
        let mut bytes = 0;
        let described = published
            .into_iter()
            .zip(holders)
            .zip(aux_layer_ids)
            .map(|((sample, holder), layers)| {
                let mut place = ArenaLocation::new(
                    self.session().clone(),
                    self.control().clone(),
                    Some(self.0.arena.epoch()),
                );
                place.holder = holder;
                let features: IndexMap<_, _> = sample
                    .objects
                    .into_iter()
                    .map(|object| {
                        bytes += object.meta.nbytes();
                        let feature =
                            FeatureDescriptor::new(object.meta, object.address, Some(object.seq));
                        (object.name, feature)
                    })
                    .collect();
                Descriptor::new(sample.sample, features, layers, Location::Arena(place))
            })
            .collect();
        let written = if self.0.filler.is_cpu() { bytes } else { 0 };
        let moved = moved.unwrap_or(Moved { host: written, device: 0 });
        self.0.host_bytes.fetch_add(moved.host, Ordering::Relaxed);
        self.0.device_bytes.fetch_add(moved.device, Ordering::Relaxed);
        described
    }
}

impl Inner {
    fn close(&self) {
        self.closed.send_replace(true);
        self.control.close();
        self.data.close();
        self.arena.close();
        self.copies.close(CLOSE_BOUND);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

fn closed(operation: &'static str) -> Error {
    Error::new(ErrorKind::Closed, operation, "the sink is closed")
}

fn add_data(health: &mut Health, data: DataServerStats) {
    health.connected_peers += data.connections;
    health.protocol_errors += data.protocol_errors + data.rejected;
    health.last_error = health.last_error.take().or(data.last_error);
}
