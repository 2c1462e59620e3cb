//! The contract that every transport keeps.

use std::{any::Any, fmt, ops::Range, sync::Arc, time::Duration};

use async_trait::async_trait;
use indexmap::IndexMap;

use crate::{
    ClientId, Descriptor, Dtype, Error, ErrorKind, FeatureName, RegionKind, RegionMut, RegionSlice,
    Result, SampleKey, TensorMeta,
};

/// Deadline of a fetch or publish that names none.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(30);

/// Moves samples from publishers to consumers.
///
/// One object may publish, consume, or both; [`Capabilities`] say which, and a call that the
/// transport cannot serve fails with [`ErrorKind::Unsupported`] before any byte moves. No transport
/// ever hands a call to another one.
#[async_trait]
pub trait Transport: fmt::Debug + Send + Sync {
    /// Scheme, engine, capabilities, and why this one was chosen. Never blocks.
    fn info(&self) -> &TransportInfo;

    /// Makes a batch of samples readable by consumers and returns one descriptor each, in order.
    ///
    /// Requires [`Capabilities::publish`].
    ///
    /// # Behaviour
    /// - All or nothing: either every sample of the batch is readable and described, or none is and
    ///   every byte that was placed is free again.
    /// - A key that exists fails with [`ErrorKind::AlreadyExists`], unless `options.replace`; then
    ///   the old object drains: it stays readable for those that hold it and goes when they let go.
    /// - Two samples of one batch with the same key are refused.
    /// - Waits for room until `options.deadline`, then fails with [`ErrorKind::CapacityExceeded`].
    /// - Copies start after each publication's ready event and are complete on return.
    /// - An empty batch publishes nothing.
    async fn publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>>;

    /// Reads samples and returns them in the order of `requests`.
    ///
    /// Requires [`Capabilities::fetch`], and [`Capabilities::views`] for [`Destination::View`].
    ///
    /// # Behaviour
    /// - Never partial data and never old data: a short read, an older life of a key, another life
    ///   of the publisher, or an address outside what it published is an error that names key,
    ///   expected and found, and the whole call fails.
    /// - Owned destinations go in and come back filled. When the call fails, passes its deadline or
    ///   its future is dropped, memory that a transfer may still write stays out of use
    ///   ([`Health::quarantined_bytes`]) until the transfer is known to be over; then it goes back
    ///   to its owner.
    /// - Names must be those of the descriptor, each once, and destinations as many and as long as
    ///   the tensors asked for; otherwise the call fails with [`ErrorKind::InvalidInput`] before any
    ///   byte moves, and regions go back to their owners at once.
    /// - Of a tensor whose [`FetchRequest::ranges`] are given, only these bytes move.
    /// - A tensor without bytes is returned without a transfer.
    /// - From a successful fetch until [`Self::release`], the publisher keeps the bytes; what a view
    ///   shows, also until the view is dropped, however long this process is out of touch with it.
    async fn fetch(
        &self,
        requests: Vec<FetchRequest>,
        options: FetchOptions,
    ) -> Result<Vec<Fetched>>;

    /// Tells the publishers that samples are no longer needed, so that their memory comes back.
    ///
    /// # Behaviour
    /// - Idempotent: what is gone is counted in [`ReleaseReport::already_gone`].
    /// - A descriptor of an older life of a key never touches a newer one:
    ///   [`ReleaseReport::stale`].
    /// - A sample with live views is let go of at once, but goes back to its publisher only when the
    ///   last view of it is dropped: until then its bytes stay what they are, its key may stay
    ///   taken, and it is counted ([`ReleaseReport::deferred`], [`Health::deferred_samples`]). It
    ///   cannot be fetched again meanwhile, and releasing it again reports it as already gone.
    async fn release(&self, releases: Vec<Release>) -> Result<ReleaseReport>;

    /// Ends this client's holds on samples and frees nothing: other clients may still come for
    /// them. What drains goes with its last holder.
    ///
    /// For consumers that are done with a sample that somebody else releases. A hold that views
    /// need ends with the last of them, or stays if the sample is fetched again before. Nothing
    /// happens to samples that this client does not hold, or where the transport knows no holds.
    async fn let_go(&self, samples: Vec<Arc<Descriptor>>) -> Result<()> {
        let _ = samples; // no holds, nothing to end
        Ok(())
    }

    /// Measures what is held, free and in flight at this moment.
    async fn health(&self) -> Result<Health>;

    /// Stops taking calls, waits for those in flight within a bound, and ends what was started.
    /// Idempotent. Calls after it fail with [`ErrorKind::Closed`].
    async fn close(&self) -> Result<()>;
}

/// What a transport can do. A missing capability is an error before any byte moves.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Capabilities {
    /// `publish` works.
    pub publish: bool,
    /// `fetch` and `release` work.
    pub fetch: bool,
    /// [`Destination::View`]: tensors are read where the publisher put them, without a copy.
    pub views: bool,
    /// [`FetchRequest::ranges`]: some bytes of a tensor are read without the others. Where that
    /// depends on who holds a sample, a fetch of ranges that cannot be read alone fails with
    /// [`ErrorKind::Unsupported`]: they are never cut from what is read whole.
    pub ranges: bool,
    /// Peers on other hosts can be reached.
    pub cross_host: bool,
    /// Sources and destinations in device memory are taken.
    pub device_memory: bool,
    /// An older life of a key or publisher is always detected.
    pub staleness_checked: bool,
    /// A consumer that dies gives back what it held after a stated time.
    pub leases: bool,
}

/// Names a transport and says why it was chosen.
#[derive(Clone, Debug, serde::Serialize)]
#[non_exhaustive]
pub struct TransportInfo {
    /// Registry name, such as `shm`, `tcp`, `memory`.
    pub scheme: String,
    /// Library or engine that moves the bytes, with its version.
    pub engine: String,
    /// What it can do.
    pub capabilities: Capabilities,
    /// Why this transport was chosen, for people.
    pub reason: String,
}

impl TransportInfo {
    /// Describes a transport that nothing has chosen yet.
    pub fn new(
        scheme: impl Into<String>,
        engine: impl Into<String>,
        capabilities: Capabilities,
    ) -> Self {
        Self {
            scheme: scheme.into(),
            engine: engine.into(),
            capabilities,
            reason: "constructed directly".into(),
        }
    }

    /// Records why it was chosen.
    #[must_use]
    pub fn because(mut self, reason: impl Into<String>) -> Self {
        self.reason = reason.into();
        self
    }
}

/// When the bytes of a source are final. Asked for at construction, so that it cannot be forgotten.
#[derive(Clone, Debug)]
pub enum Ready {
    /// They are final now.
    Now,
    /// They are final once this event has happened; the copy waits for it.
    After(Arc<dyn ReadyEvent>),
}

/// Something to wait for before a source may be read, such as a CUDA event.
pub trait ReadyEvent: fmt::Debug + Send + Sync {
    /// Blocks until the event has happened, at most `timeout`.
    fn wait(&self, timeout: Duration) -> Result<()>;

    /// The event itself, for a transport that can order its work after it without blocking a
    /// thread, such as after a CUDA event. None: there is only [`Self::wait`].
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }
}

/// Writes the tensors of a sample straight into the memory that a transport sends or shares, so
/// that no copy of them exists before.
pub trait Writer: fmt::Debug + Send + Sync {
    /// Fills `destinations`: one for each tensor of the publication, in its order, each as long as
    /// its tensor.
    ///
    /// Every byte has to be written: they hold whatever was there before. Called on a thread that
    /// may block, and once more where a publish is tried again. An error ends the publish, and
    /// nothing of its batch stays.
    fn write(&self, destinations: &mut [&mut [u8]]) -> Result<()>;
}

/// One sample to publish.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Publication {
    /// Identity; its object keys must be new unless `replace` is asked for.
    pub sample: SampleKey,
    /// Tensors by name, in the order in which they are placed and described.
    pub tensors: IndexMap<FeatureName, Tensor>,
    /// When the sources may be read.
    pub ready: Ready,
    /// Model layers of the hidden states, passed on to the descriptor.
    pub aux_layer_ids: Option<Vec<i64>>,
    /// Consumer that will fetch the sample. A transport with [`Capabilities::leases`] holds the
    /// sample for it from the start, so that it cannot vanish or leak between publish and fetch.
    pub holder: Option<ClientId>,
    /// Brings the bytes of all tensors, whose data is then [unwritten](RegionSlice::unwritten).
    pub writer: Option<Arc<dyn Writer>>,
}

impl Publication {
    /// A sample whose sources are final at `ready`.
    pub fn new(sample: SampleKey, tensors: IndexMap<FeatureName, Tensor>, ready: Ready) -> Self {
        Self { sample, tensors, ready, aux_layer_ids: None, holder: None, writer: None }
    }

    /// A sample that `writer` writes in the place where consumers read it, once there is room.
    pub fn written(
        sample: SampleKey,
        tensors: IndexMap<FeatureName, TensorMeta>,
        writer: Arc<dyn Writer>,
    ) -> Self {
        let unwritten = |(name, meta): (FeatureName, TensorMeta)| {
            let data = RegionSlice::unwritten(meta.nbytes() as usize);
            (name, Tensor { meta, data })
        };
        let tensors = tensors.into_iter().map(unwritten).collect();
        Self { writer: Some(writer), ..Self::new(sample, tensors, Ready::Now) }
    }

    /// The first tensor whose bytes this process can neither read nor write: device memory.
    pub fn unreachable(&self) -> Option<&FeatureName> {
        self.unreachable_beside(None)
    }

    /// The first tensor that lies neither in memory of the host nor of `device`.
    pub fn unreachable_beside(&self, device: Option<RegionKind>) -> Option<&FeatureName> {
        let reachable = |tensor: &Tensor| {
            let kind = tensor.data.kind();
            let is_written = kind == RegionKind::Unwritten && self.writer.is_some();
            kind.is_host() || Some(kind) == device || is_written
        };
        self.tensors.iter().find(|(_, tensor)| !reachable(tensor)).map(|(name, _)| name)
    }

    /// Brings the bytes of all tensors: copies their data, or lets the writer write. For transports,
    /// once the sources are ready.
    ///
    /// # Panics
    /// If a tensor is [unreachable](Self::unreachable), or if there is not one destination for each
    /// tensor, as long as it.
    pub fn write_into(&self, destinations: &mut [&mut [u8]]) -> Result<()> {
        assert_eq!(destinations.len(), self.tensors.len(), "one destination for each tensor");
        if let Some(writer) = &self.writer {
            return writer.write(destinations);
        }
        for (tensor, destination) in self.tensors.values().zip(destinations) {
            let source = tensor.data.as_bytes().expect("checked to be host memory");
            destination.copy_from_slice(source);
        }
        Ok(())
    }

    /// The same sample with its bytes in memory of their own, for transports that cannot have them
    /// written in place.
    pub fn materialized(mut self) -> Result<Self> {
        let Some(writer) = self.writer.take() else { return Ok(self) };
        let mut regions = Vec::with_capacity(self.tensors.len());
        for tensor in self.tensors.values() {
            regions.push(RegionMut::zeroed(tensor.data.len())?);
        }
        let bytes = |region| RegionMut::as_mut_bytes(region).expect("heap memory");
        writer.write(&mut regions.iter_mut().map(bytes).collect::<Vec<_>>())?;
        for (tensor, region) in self.tensors.values_mut().zip(regions) {
            tensor.data = region.freeze();
        }
        Ok(self)
    }

    /// Names the consumer to hold the sample for.
    #[must_use]
    pub fn held_by(mut self, holder: ClientId) -> Self {
        self.holder = Some(holder);
        self
    }
}

/// A tensor: what it is, and its bytes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Tensor {
    /// Element type and shape.
    pub meta: TensorMeta,
    /// Exactly `meta.nbytes()` bytes, row-major, little-endian.
    pub data: RegionSlice,
}

impl Tensor {
    /// Puts meta and bytes together; their lengths must agree.
    pub fn new(meta: TensorMeta, data: RegionSlice) -> Result<Self> {
        if data.len() as u64 != meta.nbytes() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "describe tensor",
                "the bytes do not fit element type and shape",
            )
            .with("tensor", &meta)
            .with("expected", meta.nbytes())
            .with("found", data.len()));
        }
        Ok(Self { meta, data })
    }
}

/// Options of [`Transport::publish`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PublishOptions {
    /// Whether an existing key is replaced rather than refused.
    pub replace: bool,
    /// How long the whole batch may wait for room and for its ready events.
    pub deadline: Duration,
}

impl Default for PublishOptions {
    fn default() -> Self {
        Self { replace: false, deadline: DEFAULT_DEADLINE }
    }
}

impl PublishOptions {
    /// Replaces existing keys.
    #[must_use]
    pub fn replace(mut self, replace: bool) -> Self {
        self.replace = replace;
        self
    }

    /// Bounds the wait.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }
}

/// Where fetched bytes go.
#[derive(Debug)]
#[non_exhaustive]
pub enum Destination {
    /// Nowhere: read them where the publisher put them. Needs [`Capabilities::views`].
    View,
    /// Into the transport's own receive pool.
    Pool,
    /// Into the caller's memory: one region per requested tensor, in the order of the request, each
    /// exactly as long as its tensor.
    Into(Vec<RegionMut>),
}

/// One sample to read.
#[derive(Debug)]
#[non_exhaustive]
pub struct FetchRequest {
    /// What to read.
    pub descriptor: Arc<Descriptor>,
    /// Tensors to read, by name; all of them, in the descriptor's order, if `None`.
    pub names: Option<Vec<FeatureName>>,
    /// Bytes to read of the one tensor that is asked for; all of them if `None`. See
    /// [`Self::ranges`].
    pub ranges: Option<Vec<Range<u64>>>,
    /// Where the bytes go.
    pub destination: Destination,
}

impl FetchRequest {
    /// Reads all tensors of a sample.
    pub fn new(descriptor: Arc<Descriptor>, destination: Destination) -> Self {
        Self { descriptor, names: None, ranges: None, destination }
    }

    /// Reads only some tensors.
    #[must_use]
    pub fn names(mut self, names: Vec<FeatureName>) -> Self {
        self.names = Some(names);
        self
    }

    /// Reads only some bytes of one tensor: each range, in the order given, one after the other.
    /// What comes back is a tensor of bytes, as long as all ranges together.
    ///
    /// Needs [`Capabilities::ranges`], and a destination other than [`Destination::View`], which
    /// shows the whole tensor at no cost. [`ErrorKind::Unsupported`] asks for the whole tensor
    /// instead.
    #[must_use]
    pub fn ranges(mut self, ranges: Vec<Range<u64>>) -> Self {
        self.ranges = Some(ranges);
        self
    }

    /// For transports: what a request with ranges gives, once it is checked; `None` for whole
    /// tensors. `able` is the transport's [`Capabilities::ranges`].
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the transport cannot do it or a view is asked for;
    /// [`ErrorKind::InvalidInput`] for more than one tensor, and for a range that goes down or past
    /// the end of the tensor, with key, expected and found.
    pub fn ranged(&self, able: bool) -> Result<Option<TensorMeta>> {
        let Some(ranges) = &self.ranges else { return Ok(None) };
        let fail =
            |kind, why| Err(Error::new(kind, "fetch", why).with("sample", &self.descriptor.sample));
        if !able || matches!(self.destination, Destination::View) {
            return fail(ErrorKind::Unsupported, "ranges of a tensor cannot be read this way")
                .map_err(|e| e.remedy("fetch the whole tensor"));
        }
        let features = &self.descriptor.features;
        let only = match self.names.as_deref() {
            None if features.len() == 1 => features.first(),
            Some([name]) => features.get_key_value(name),
            _ => None,
        };
        let Some((name, feature)) = only else {
            return fail(ErrorKind::InvalidInput, "ranges are of one tensor of the sample");
        };
        let bytes = feature.meta.nbytes();
        let mut total = 0u64;
        for range in ranges {
            let len = range.end.checked_sub(range.start).filter(|_| range.end <= bytes);
            let Some(sum) = len.and_then(|len| total.checked_add(len)) else {
                return Err(Error::new(ErrorKind::InvalidInput, "fetch", "no range of the tensor")
                    .with("key", self.descriptor.sample.object(name))
                    .with("expected", format_args!("a range within {bytes} bytes"))
                    .with("found", format_args!("{range:?}")));
            };
            total = sum;
        }
        TensorMeta::new(Dtype::Uint8, [total]).map(Some)
    }
}

/// Options of [`Transport::fetch`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FetchOptions {
    /// How long the whole call may take.
    pub deadline: Duration,
}

impl Default for FetchOptions {
    fn default() -> Self {
        Self { deadline: DEFAULT_DEADLINE }
    }
}

impl FetchOptions {
    /// Bounds the call.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }
}

/// One sample as read.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Fetched {
    /// What was read.
    pub descriptor: Arc<Descriptor>,
    /// The tensors, in the order asked for. Their memory lives as long as they do, and its bytes do
    /// not change, also those of views whose sample is released or whose publisher is gone.
    pub tensors: IndexMap<FeatureName, Tensor>,
    /// Whether the publisher's and the objects' lives were compared with the descriptor's; false
    /// with older peers that do not tell.
    pub staleness_checked: bool,
}

impl Fetched {
    /// Puts a fetched sample together.
    pub fn new(
        descriptor: Arc<Descriptor>,
        tensors: IndexMap<FeatureName, Tensor>,
        staleness_checked: bool,
    ) -> Self {
        Self { descriptor, tensors, staleness_checked }
    }

    /// Bytes of the fetched tensors.
    pub fn nbytes(&self) -> u64 {
        self.tensors.values().map(|t| t.meta.nbytes()).sum()
    }
}

/// One sample to let go of.
#[derive(Clone, Debug)]
pub struct Release {
    /// The sample as it was described; its epoch and sequence numbers say which life is meant.
    pub descriptor: Arc<Descriptor>,
}

impl From<Arc<Descriptor>> for Release {
    fn from(descriptor: Arc<Descriptor>) -> Self {
        Self { descriptor }
    }
}

/// What became of a call to [`Transport::release`], in samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct ReleaseReport {
    /// This call let go of them.
    pub released: u64,
    /// They were gone before.
    pub already_gone: u64,
    /// The key lives on in a newer life, which was left alone.
    pub stale: u64,
    /// Sent to a peer that does not answer frees; taken as released.
    pub unconfirmed: u64,
    /// Views of them are alive in this process: this call let go of them, and the publisher is told
    /// when the last view is dropped.
    pub deferred: u64,
}

impl ReleaseReport {
    /// Adds another report.
    pub fn merge(&mut self, other: Self) {
        self.released += other.released;
        self.already_gone += other.already_gone;
        self.stale += other.stale;
        self.unconfirmed += other.unconfirmed;
        self.deferred += other.deferred;
    }
}

/// What a transport measures of itself. Bytes unless the name says otherwise.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Health {
    /// Published samples that are not yet released.
    pub resident_samples: u64,
    /// Bytes of their tensors.
    pub resident_bytes: u64,
    /// Ranges reserved for samples that are being filled.
    pub reserved_bytes: u64,
    /// Size of the arena; 0 for a transport without one.
    pub arena_bytes: u64,
    /// Free bytes of the arena.
    pub arena_free_bytes: u64,
    /// Largest free range of the arena.
    pub arena_largest_free: u64,
    /// Samples ever published.
    pub published_samples: u64,
    /// Samples whose memory ever came back.
    pub released_samples: u64,
    /// Frees of objects that were already gone.
    pub duplicate_frees: u64,
    /// Frees of an older life of an object that lives on.
    pub stale_frees: u64,
    /// Samples that came back because their holder died.
    pub lease_expired_samples: u64,
    /// Holders that are silent for longer than their lease, or have said goodbye, but whose process
    /// still maps the arena: what they hold stays where it is until it does so no more.
    pub stalled_clients: u64,
    /// Samples that were released here while views of them were alive, and go back with the last.
    pub deferred_samples: u64,
    /// Tensor payload that passed through host memory of this process.
    pub host_payload_bytes: u64,
    /// Tensor payload that moved within or between devices.
    pub device_payload_bytes: u64,
    /// Memory that an unfinished transfer may still write.
    pub quarantined_bytes: u64,
    /// Times that memory was registered with an engine. It grows while pools grow, and never with
    /// the samples that are moved. Left out of JSON where nothing was ever registered.
    #[serde(skip_serializing_if = "is_zero")]
    pub registrations: u64,
    /// Open connections to or from peers.
    pub connected_peers: u64,
    /// Lines, frames or requests of peers that were refused.
    pub protocol_errors: u64,
    /// The newest failure, for people.
    pub last_error: Option<String>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}
