//! One capture request: prompts in, adopted samples or reasons out.

use std::{collections::HashMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use control_proto::capture::{
    CHECKSUMS_HEADER, CaptureOutcome, CaptureRequest, Checksum, ChecksumKind, FailureCause, Form,
    HOLDER_HEADER, Limits, PATIENCE_HEADER, Prompt, Row, parse_response,
};
use control_proto::sample_ref::SampleRef;
use indexmap::IndexMap;
use parking_lot::Mutex;
use tokio::{task::spawn_blocking, time::Instant};
use transport_core::{
    ArenaLocation, ClientId, Descriptor, Dtype, Error, ErrorKind, ErrorStatus, FeatureDescriptor,
    FeatureName, Generation, Location, Release, Result, SampleId, SampleKey, SessionName, StoreId,
    TensorMeta, Transport,
};

use super::prompts::Task;
use crate::{
    layout::{Layout, Strategy},
    lifecycle::{Reclaim, Samples},
};

/// How prompts are sent to capture servers.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CaptureOptions {
    /// Store that the samples belong to.
    pub store: StoreId,
    /// What samples look like.
    pub layout: Layout,
    /// Where the request says what to capture.
    pub form: Form,
    /// Longest time of one request. Default: 300 seconds.
    pub timeout: Duration,
    /// How long a request waits for room in an arena before it makes way for others, at servers
    /// that take [`PATIENCE_HEADER`]; none for as long as the server has it wait. Default: 1 second.
    pub patience: Option<Duration>,
    /// Client for whom samples are held from their birth on.
    pub holder: Option<ClientId>,
    /// Checksums that servers are asked for, the kind that consumers like best first; refs then carry
    /// them in their metadata. Who receives on a device compares [`ChecksumKind::Mixsum`] only.
    /// Default: none.
    pub checksums: Vec<ChecksumKind>,
}

/// Entry of a ref's metadata that holds checksums by tensor, as [`Checksum`] writes them.
pub const CHECKSUMS: &str = "checksums";

impl CaptureOptions {
    /// The documented request in its patch form.
    pub fn new(store: StoreId, layout: Layout) -> Self {
        Self {
            store,
            layout,
            form: Form::Patch,
            timeout: Duration::from_secs(300),
            patience: Some(Duration::from_secs(1)),
            holder: None,
            checksums: Vec::new(),
        }
    }
}

/// Sends capture requests. Moves no tensor payload: it needs neither a device nor an engine.
#[derive(Debug)]
pub struct CaptureClient {
    http: reqwest::Client,
    options: CaptureOptions,
    samples: Arc<Samples>,
    endpoints: Arc<Endpoints>,
}

/// A sample that was captured and adopted.
#[derive(Debug)]
pub(super) struct Captured {
    pub(super) descriptor: Arc<Descriptor>,
    pub(super) checksums: Option<IndexMap<FeatureName, Checksum>>,
}

impl Captured {
    pub(super) fn id(&self) -> SampleId {
        self.descriptor.sample.sample_id.clone()
    }

    /// The line that tells consumers of it.
    pub(super) fn announce(&self, run: &str, strategy: Strategy) -> Result<SampleRef> {
        let mut sample = SampleRef::new(&self.descriptor, run, None, strategy.name())?;
        if let Some(checksums) = &self.checksums {
            let entry = |(name, sum): (&FeatureName, &Checksum)| {
                (name.to_string(), serde_json::Value::from(sum.to_string()))
            };
            let checksums: serde_json::Map<_, _> = checksums.iter().map(entry).collect();
            sample.metadata.insert(CHECKSUMS.into(), checksums.into());
        }
        Ok(sample)
    }
}

/// What ends a prompt for which there was no room as long as it had patience.
pub(super) const NO_ROOM: ErrorKind = ErrorKind::CapacityExceeded;
/// What ends a prompt that a server has not begun to work on, for others that came before.
pub(super) const PUT_OFF: ErrorKind = ErrorKind::Busy;

/// What became of one prompt of a request.
pub(super) type Attempt = (Task, Result<Captured>);

/// What became of a request.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) prompts: Vec<Attempt>,
    /// Whether the server did its part, whatever became of single prompts.
    pub(super) served: bool,
}

impl CaptureClient {
    /// Adopts what is captured into `samples`.
    pub fn new(options: CaptureOptions, samples: Arc<Samples>, endpoints: Arc<Endpoints>) -> Self {
        Self { http: reqwest::Client::new(), options, samples, endpoints }
    }

    pub(super) fn key(&self, task: &Task) -> SampleKey {
        // Always generation 1: an attempt that replaces the one before strands nothing under g1.
        SampleKey::new(self.options.store.clone(), task.sample_id.clone(), Generation(1))
    }

    /// Whether the server at `url` is the one that holds `descriptor`, as far as is known.
    pub(super) fn is_at(&self, url: &str, descriptor: &Descriptor) -> bool {
        self.endpoints.is_at(url, descriptor)
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.options.layout
    }

    /// Largest free range of a server's arena, if it tells.
    pub(super) async fn largest_free(&self, url: &str) -> Option<u64> {
        let url = format!("{}/health", url.trim_end_matches('/'));
        let answer = self.http.get(url).timeout(Duration::from_secs(2)).send().await.ok()?;
        let body = bounded_body(answer, 1 << 20).await.ok()?;
        let health: transport_core::Health = serde_json::from_slice(&body).ok()?;
        (health.arena_bytes > 0).then_some(health.arena_largest_free)
    }

    /// Captures prompts on the server at `url` and adopts the samples: all rows are checked before
    /// any is adopted.
    pub(super) async fn capture(&self, url: &str, tasks: Vec<Task>) -> Answer {
        let mut prompts = Vec::with_capacity(tasks.len());
        let (mut sent, mut answers) = (Vec::new(), Vec::new());
        for task in tasks {
            match self.options.layout.request(self.key(&task), &task.input_ids, &task.loss_mask) {
                Ok(mut sample) => {
                    sample.replace = task.attempt > 0; // a lost answer may have left objects
                    let extra_key = Some(ClientId::random().to_string()); // fresh each attempt
                    let input_ids = task.input_ids.clone();
                    prompts.push(Prompt { input_ids, extra_key, sample });
                    sent.push(task);
                }
                Err(error) => answers.push((task, Err(error))),
            }
        }
        if sent.is_empty() {
            return Answer { prompts: answers, served: true };
        }
        let keys: Vec<SampleKey> = sent.iter().map(|task| self.key(task)).collect();
        self.samples.track(url, &keys);
        let request = CaptureRequest::new(self.options.form, prompts);
        let sent_at = Instant::now();
        let served = match self.exchange(url, &request, &keys).await {
            Ok(rows) => {
                let patience = self.options.patience;
                let no_room = patience.is_some_and(|most| sent_at.elapsed() >= most);
                answers.extend(self.settle(url, sent, &request.prompts, rows, no_room).await);
                true
            }
            Err(error) => {
                let put_off = error.kind() == PUT_OFF;
                answers.extend(sent.into_iter().map(|task| (task, Err(error.repeated()))));
                put_off // and so it lives
            }
        };
        Answer { prompts: answers, served }
    }

    async fn exchange(
        &self,
        url: &str,
        request: &CaptureRequest,
        keys: &[SampleKey],
    ) -> Result<Vec<Row>> {
        let mut body = Vec::new();
        request.write(&mut body)?;
        let failed = |e: reqwest::Error| {
            let kind = if e.is_timeout() { ErrorKind::Timeout } else { ErrorKind::PeerGone };
            Error::new(kind, "capture", "the server did not answer").with("server", url).source(e)
        };
        let mut request = self
            .http
            .post(format!("{url}/generate"))
            .timeout(self.options.timeout)
            .header("content-type", "application/json");
        if let Some(holder) = &self.options.holder {
            request = request.header(HOLDER_HEADER, holder.as_str());
        }
        if let Some(patience) = self.options.patience {
            request = request.header(PATIENCE_HEADER, patience.as_millis().to_string());
        }
        let kinds: Vec<_> = self.options.checksums.iter().map(|kind| kind.name()).collect();
        if !kinds.is_empty() {
            request = request.header(CHECKSUMS_HEADER, kinds.join(", "));
        }
        let answer = request.body(body).send().await.map_err(failed)?;
        let status = answer.status();
        let limits = Limits::default();
        let body = bounded_body(answer, limits.body_bytes).await?;
        if !status.is_success() {
            let kind = match status.as_u16() {
                429 | 503 => PUT_OFF,
                500.. => ErrorKind::PeerGone,
                _ => ErrorKind::InvalidInput,
            };
            let text = String::from_utf8_lossy(&body[..body.len().min(500)]).into_owned();
            return Err(Error::new(kind, "capture", text)
                .with("server", url)
                .with("status", status.as_u16()));
        }
        // A row for another sample, store or generation fails the whole answer: nothing in it can
        // be trusted. What it may have left is provisional still, and is reclaimed.
        parse_response(&body, keys, &limits)
            .map_err(|error| error.with("server", url).status(ErrorStatus::Temporary))
    }

    /// Adopts the good rows together, and frees the bad ones on the server that has them. With
    /// `no_room`, rows to be tried again that do not say why have waited for room until their patience
    /// was over.
    async fn settle(
        &self,
        url: &str,
        tasks: Vec<Task>,
        asked: &[Prompt],
        rows: Vec<Row>,
        no_room: bool,
    ) -> Vec<Attempt> {
        let (mut answers, mut good, mut bad) = (Vec::new(), Vec::new(), Vec::new());
        for ((task, prompt), Row { outcome, checksums }) in tasks.into_iter().zip(asked).zip(rows) {
            match outcome {
                CaptureOutcome::Captured(descriptor) => {
                    self.endpoints.learn(url, &descriptor);
                    let asked = prompt.sample.check_result(&descriptor, task.tokens());
                    let checked = asked.and_then(|()| self.options.layout.check(&descriptor));
                    let descriptor = Arc::new(descriptor);
                    match checked {
                        Ok(_) => good.push((task, Captured { descriptor, checksums })),
                        Err(error) => {
                            bad.push(descriptor);
                            answers.push((task, Err(error.with("server", url))));
                        }
                    }
                }
                CaptureOutcome::Failed { error, retryable, cause, .. } => {
                    // The server's own word that it holds nothing of it.
                    let key = self.key(&task);
                    self.samples.untrack(url, &key);
                    let kind = match cause {
                        _ if !retryable => ErrorKind::InvalidInput,
                        Some(FailureCause::NoRoom) => NO_ROOM,
                        Some(FailureCause::Queued) => PUT_OFF,
                        None if no_room => NO_ROOM,
                        _ => ErrorKind::Unexpected, // the server's own words say what
                    };
                    let error = Error::new(kind, "capture", error).with("server", url);
                    answers.push((
                        task,
                        Err(match retryable {
                            true => error.status(ErrorStatus::Temporary),
                            false => error,
                        }),
                    ));
                }
            }
        }
        let descriptors: Vec<_> = good.iter().map(|(_, it)| it.descriptor.clone()).collect();
        match self.samples.adopt(&descriptors).await {
            Ok(_) => {
                // Only here: an earlier attempt on another server may have left the same sample.
                // Two addresses of one server are one place: a free there would free this one.
                for descriptor in &descriptors {
                    let key = &descriptor.sample;
                    self.samples.untrack(url, key);
                    for place in self.samples.places(key) {
                        if self.endpoints.is_at(&place, descriptor) {
                            self.samples.untrack(&place, key);
                        }
                    }
                }
                answers.extend(good.into_iter().map(|(task, captured)| (task, Ok(captured))));
            }
            Err(error) => {
                let text = error.to_string();
                let kind = error.kind();
                let permanent = ErrorStatus::Permanent;
                let refused = || Error::new(kind, "capture", text.clone()).status(permanent);
                answers.extend(good.into_iter().map(|(task, _)| (task, Err(refused()))));
            }
        }
        for descriptor in &bad {
            self.samples.untrack(url, &descriptor.sample);
        }
        if !bad.is_empty() {
            self.samples.settle(&bad).await;
        }
        answers
    }
}

/// The body, which ends at `most` bytes at the latest.
async fn bounded_body(mut answer: reqwest::Response, most: usize) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        match answer.chunk().await {
            Ok(Some(part)) if body.len() + part.len() <= most => body.extend_from_slice(&part),
            Ok(Some(_)) => {
                return Err(Error::new(ErrorKind::Protocol, "capture", "the answer is too long")
                    .with("max_bytes", most));
            }
            Ok(None) => return Ok(body),
            Err(e) => {
                return Err(
                    Error::new(ErrorKind::PeerGone, "capture", "the answer broke off").source(e)
                );
            }
        }
    }
}

/// Where each server takes frees, learnt from what it has captured, or told.
#[derive(Debug)]
pub struct Endpoints {
    transport: Arc<dyn Transport>,
    strategy: Strategy,
    known: Mutex<HashMap<String, Vec<Location>>>,
}

impl Endpoints {
    /// Frees go through `transport`, also those of samples of which only the name is known, such as
    /// after a restart.
    pub fn new(transport: Arc<dyn Transport>, strategy: Strategy) -> Self {
        Self { transport, strategy, known: Mutex::default() }
    }

    /// Tells where the arena of the server at `url` takes frees, before it has captured anything.
    pub fn tell(&self, url: &str, control: SessionName) {
        let arena = ArenaLocation::new(control.clone(), control, None);
        self.add(url, Location::Arena(arena));
    }

    /// Tells that the server at `url` publishes to a store, which `transport` has joined, before it has
    /// captured anything.
    pub fn tell_store(&self, url: &str) {
        self.add(url, Location::Store);
    }

    pub(super) fn learn(&self, url: &str, descriptor: &Descriptor) {
        let mut location = descriptor.location.clone();
        if let Location::Arena(arena) = &mut location {
            arena.holder = None;
        }
        self.add(url, location);
    }

    fn add(&self, url: &str, location: Location) {
        let mut known = self.known.lock();
        let places = known.entry(url.trim_end_matches('/').to_owned()).or_default();
        places.retain(|known| !same_control(known, &location)); // the newest life is what answers
        places.push(location);
    }

    /// Whether the server at `url` takes frees where `descriptor` is freed. A store is one place.
    fn is_at(&self, url: &str, descriptor: &Descriptor) -> bool {
        descriptor.location == Location::Store
            || self.places(url).iter().any(|place| same_control(place, &descriptor.location))
    }

    /// Locations at which a sample may be freed without knowing where it lies.
    fn places(&self, url: &str) -> Vec<Location> {
        self.known.lock().get(url.trim_end_matches('/')).cloned().unwrap_or_default()
    }
}

fn same_control(a: &Location, b: &Location) -> bool {
    match (a, b) {
        (Location::Arena(a), Location::Arena(b)) => a.control == b.control,
        (Location::Token(a), Location::Token(b)) => a.control == b.control,
        (a, b) => a == b,
    }
}

#[async_trait]
impl Reclaim for Endpoints {
    async fn reclaim(&self, place: &str, sample: &SampleKey) -> Result<()> {
        let locations = self.places(place);
        if locations.is_empty() {
            return Err(Error::new(
                ErrorKind::NotFound,
                "reclaim",
                "it is not known where the server takes frees",
            )
            .with("server", place)
            .remedy("tell the producer the server's control address"));
        }
        let mut names = vec![self.strategy.aux()];
        names.extend(self.strategy.last_hidden());
        names.extend(self.strategy.passthrough());
        for location in locations {
            for &bytes in sizes(&location) {
                let meta = TensorMeta::new(Dtype::Uint8, [bytes])?;
                let features = names
                    .iter()
                    .map(|name| {
                        let feature = FeatureDescriptor::new(meta.clone(), None, None);
                        Ok((FeatureName::new(name)?, feature))
                    })
                    .collect::<Result<_>>()?;
                let located = location.clone();
                let descriptor = Descriptor::new(sample.clone(), features, None, located)?;
                match self.transport.release(vec![Release::from(Arc::new(descriptor))]).await {
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::Stale => {} // gone with that life
                    Err(error) => return Err(error.with("server", place)),
                }
            }
        }
        Ok(())
    }
}

/// Sizes that tensors of which only the names are known are said to have, to be freed. In an arena a
/// free names only keys, and tensors without bytes need no address. In a store a tensor without bytes
/// has no object: it may have one of its own, or share one with others that are small.
fn sizes(location: &Location) -> &'static [u64] {
    match location {
        Location::Store => &[1, 1 << 40],
        _ => &[0],
    }
}

/// Runs `work` where it may block.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    spawn_blocking(work).await.map_err(|e| {
        Error::new(ErrorKind::Unexpected, "produce", "a worker thread panicked").source(e)
    })
}

#[cfg(test)]
mod tests {
    use transport_core::{
        Capabilities, FetchOptions, FetchRequest, Fetched, Generation, Health, Publication,
        PublishOptions, ReleaseReport, StoreId, TransportInfo,
    };

    use super::*;

    /// Notes what is released.
    #[derive(Debug)]
    struct Notes(TransportInfo, Mutex<Vec<Arc<Descriptor>>>);

    #[async_trait]
    impl Transport for Notes {
        fn info(&self) -> &TransportInfo {
            &self.0
        }
        async fn publish(&self, _: Vec<Publication>, _: PublishOptions) -> Result<Vec<Descriptor>> {
            unreachable!("nothing is published")
        }
        async fn fetch(&self, _: Vec<FetchRequest>, _: FetchOptions) -> Result<Vec<Fetched>> {
            unreachable!("nothing is fetched")
        }
        async fn release(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
            self.1.lock().extend(releases.into_iter().map(|release| release.descriptor));
            Ok(ReleaseReport::default())
        }
        async fn health(&self) -> Result<Health> {
            Ok(Health::default())
        }
        async fn close(&self) -> Result<()> {
            Ok(())
        }
    }

    /// A tensor without bytes has no object in a store: a free that says so frees nothing.
    #[tokio::test]
    async fn what_may_be_in_a_store_is_freed_as_small_and_as_large() {
        let info = TransportInfo::new("store", "notes", Capabilities::default());
        let notes = Arc::new(Notes(info, Mutex::default()));
        let endpoints = Endpoints::new(notes.clone(), Strategy::Dspark);
        let id = SampleId::new("a").unwrap();
        let key = SampleKey::new(StoreId::new("run").unwrap(), id, Generation(1));
        assert!(endpoints.reclaim("http://a", &key).await.is_err(), "nobody has told where");
        endpoints.tell_store("http://a/");
        endpoints.reclaim("http://a", &key).await.unwrap();
        let released = notes.1.lock().clone();
        let of = |descriptor: &Arc<Descriptor>| {
            assert_eq!((&descriptor.sample, &descriptor.location), (&key, &Location::Store));
            let sizes: Vec<u64> = descriptor.features.values().map(|f| f.meta.nbytes()).collect();
            assert_eq!(sizes.len(), 4, "all that the strategy has");
            sizes[0]
        };
        assert_eq!(released.iter().map(of).collect::<Vec<_>>(), [1, 1 << 40]);
    }
}
