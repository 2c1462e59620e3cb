//! The suite must fail on transports that break the contract: each way of breaking it here is
//! noticed by the cases that are about it.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use transport_core::{
    Descriptor, Destination, Error, ErrorKind, FetchOptions, FetchRequest, Fetched, Health,
    Location, MemoryTransport, Publication, PublishOptions, Ready, Release, ReleaseReport, Result,
    Transport, TransportInfo,
    conformance::{self, Harness, Hook, Outcome, Pair, Setup},
    layers::{Fault, FaultLayer, Layer},
};

/// A way to break the contract.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Vice {
    /// Keeps fetched regions for ever.
    LeaksRegions,
    /// Copies the source before its event has happened.
    IgnoresReady,
    /// Publishes what fits and leaves it there when the rest fails.
    PublishesInPart,
    /// Fetches whatever the key has now.
    IgnoresSequence,
    /// Fetches from whatever publisher there is now.
    IgnoresEpoch,
    /// Answers the second release like the first.
    ForgetsReleases,
    /// Releases whatever the key has now.
    ReleasesNewer,
    /// Waits for room for as long as it takes.
    IgnoresDeadline,
    /// Goes on after close.
    StaysOpen,
    /// Gives other memory than was asked for.
    IgnoresDestination,
    /// Answers the last request first.
    MixesUpOrder,
    /// Reports what looks good.
    InventsHealth,
    /// Passes copies for views.
    CopiesViews,
    /// Fails without saying what about.
    DoesNotNameKeys,
    /// Panics in publish.
    Panics,
    /// Never ends a fetch.
    Hangs,
}

/// The reference transport with one vice.
struct Vicious {
    inner: Arc<dyn Transport>,
    vice: Vice,
}

impl Vicious {
    fn is(&self, vice: Vice) -> bool {
        self.vice == vice
    }

    fn without_lives(&self, descriptor: &Arc<Descriptor>, sequence: bool) -> Arc<Descriptor> {
        let mut descriptor = (**descriptor).clone();
        if let Location::Arena(arena) = &mut descriptor.location {
            arena.epoch = None;
        }
        if sequence {
            descriptor.features.values_mut().for_each(|f| {
                f.seq = None;
                f.address = None;
            });
        }
        Arc::new(descriptor)
    }
}

#[async_trait]
impl Transport for Vicious {
    fn info(&self) -> &TransportInfo {
        self.inner.info()
    }

    async fn publish(
        &self,
        mut batch: Vec<Publication>,
        mut options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        match self.vice {
            Vice::IgnoresReady => batch.iter_mut().for_each(|p| p.ready = Ready::Now),
            Vice::IgnoresDeadline => options.deadline = Duration::from_secs(3600),
            Vice::PublishesInPart => {
                let mut described = Vec::new();
                for publication in batch {
                    described.extend(self.inner.publish(vec![publication], options.clone()).await?);
                }
                return Ok(described);
            }
            Vice::Panics => panic!("a vice"),
            _ => {}
        }
        self.inner.publish(batch, options).await
    }

    async fn fetch(
        &self,
        mut requests: Vec<FetchRequest>,
        options: FetchOptions,
    ) -> Result<Vec<Fetched>> {
        let asked: Vec<_> = requests.iter().map(|r| r.descriptor.clone()).collect();
        for request in &mut requests {
            match (self.vice, &mut request.destination) {
                (Vice::LeaksRegions, d @ Destination::Into(_)) => {
                    std::mem::forget(std::mem::replace(d, Destination::Pool));
                }
                (Vice::IgnoresDestination, d @ Destination::Into(_)) => *d = Destination::Pool,
                (Vice::CopiesViews, d @ Destination::View) => *d = Destination::Pool,
                (Vice::IgnoresSequence, _) => {
                    request.descriptor = self.without_lives(&request.descriptor, true);
                }
                (Vice::IgnoresEpoch, _) => {
                    request.descriptor = self.without_lives(&request.descriptor, false);
                }
                (Vice::Hangs, _) => std::future::pending().await,
                _ => {}
            }
        }
        if self.is(Vice::MixesUpOrder) {
            requests.reverse();
        }
        let mut fetched = self.inner.fetch(requests, options).await.map_err(|error| {
            if self.is(Vice::DoesNotNameKeys) {
                Error::new(error.kind(), "fetch", "no")
            } else {
                error
            }
        })?;
        if !self.is(Vice::MixesUpOrder) {
            for (fetched, asked) in fetched.iter_mut().zip(asked) {
                fetched.descriptor = asked;
            }
        }
        Ok(fetched)
    }

    async fn release(&self, mut releases: Vec<Release>) -> Result<ReleaseReport> {
        let count = releases.len() as u64;
        if self.is(Vice::ReleasesNewer) {
            for release in &mut releases {
                release.descriptor = self.without_lives(&release.descriptor, true);
            }
        }
        let mut report = self.inner.release(releases).await?;
        if self.is(Vice::ForgetsReleases) {
            report = ReleaseReport::default();
            report.released = count;
        }
        Ok(report)
    }

    async fn health(&self) -> Result<Health> {
        let mut health = self.inner.health().await?;
        if self.is(Vice::InventsHealth) {
            health.released_samples = health.published_samples;
            health.quarantined_bytes = 0;
        }
        Ok(health)
    }

    async fn close(&self) -> Result<()> {
        if self.is(Vice::StaysOpen) {
            return Ok(());
        }
        self.inner.close().await
    }
}

impl fmt::Debug for Vicious {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({:?})", self.vice, self.inner)
    }
}

/// Memory transports, each side wrapped.
struct Wrapped<F>(F);

impl<F> fmt::Debug for Wrapped<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Wrapped")
    }
}

#[async_trait]
impl<F: Fn(Arc<dyn Transport>) -> Arc<dyn Transport> + Send + Sync> Harness for Wrapped<F> {
    fn name(&self) -> String {
        "wrapped".into()
    }

    fn offers(&self, hook: Hook) -> bool {
        hook == Hook::TransferDelay
    }

    async fn pair(&self, setup: &Setup) -> Result<Pair> {
        let publisher = MemoryTransport::builder()
            .arena_bytes(setup.arena_bytes)
            .transfer_delay(setup.transfer_delay)
            .build()?;
        let consumer = publisher.client();
        Ok(Pair::new((self.0)(Arc::new(publisher)), (self.0)(Arc::new(consumer))))
    }

    fn case_timeout(&self) -> Duration {
        Duration::from_secs(6)
    }
}

async fn noticed(harness: &dyn Harness, name: &str) -> String {
    match conformance::case(name).unwrap_or_else(|| panic!("no case {name}")).run(harness).await {
        Outcome::Failed(why) => why,
        other => panic!("{name}: {other:?}"),
    }
}

/// One test per vice: the cases that must notice it.
macro_rules! vices {
    ($($test:ident: $vice:ident => [$($case:ident),+ $(,)?];)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $test() {
            let harness = Wrapped(|inner| {
                Arc::new(Vicious { inner, vice: Vice::$vice }) as Arc<dyn Transport>
            });
            for case in [$(stringify!($case)),+] {
                println!("{case}: {}", noticed(&harness, case).await);
            }
        }
    )*};
}

vices! {
    leaked_regions: LeaksRegions => [
        own_regions_come_back_filled, a_dropped_fetch_gives_its_memory_back_once,
        one_bad_request_fails_the_call,
    ];
    sources_read_too_early: IgnoresReady => [
        a_ready_event_orders_the_copy, an_event_that_does_not_happen_undoes_the_batch,
    ];
    batches_published_in_part: PublishesInPart => [
        a_duplicate_key_undoes_the_batch, one_key_twice_in_a_batch_is_refused,
        a_batch_that_fits_in_part_leaves_nothing,
    ];
    sequences_ignored: IgnoresSequence => [
        an_older_descriptor_cannot_be_fetched, another_sequence_is_refused,
        an_address_beside_the_object_is_refused,
    ];
    epochs_ignored: IgnoresEpoch => [another_epoch_is_refused];
    releases_forgotten: ForgetsReleases => [
        release_is_idempotent, one_sample_twice_in_one_release,
        a_stale_release_leaves_the_newer_life_alone, concurrent_releases_count_once,
    ];
    newer_lives_released: ReleasesNewer => [a_stale_release_leaves_the_newer_life_alone];
    deadlines_ignored: IgnoresDeadline => [a_full_arena_times_out];
    close_ignored: StaysOpen => [close_ends_the_consumer, close_ends_the_publisher];
    destinations_ignored: IgnoresDestination => [
        own_regions_come_back_filled,
        a_destination_of_another_length_is_refused, another_number_of_destinations_is_refused,
    ];
    answers_in_another_order: MixesUpOrder => [many_samples_round_trip];
    health_invented: InventsHealth => [
        health_counts_exactly, a_dropped_fetch_is_quarantined_until_over,
    ];
    copies_passed_for_views: CopiesViews => [views_show_the_bytes];
    keys_not_named: DoesNotNameKeys => [
        a_released_sample_cannot_be_fetched, another_epoch_is_refused, a_longer_tensor_is_refused,
    ];
    panics_caught: Panics => [every_dtype_round_trips];
    hangs_ended: Hangs => [every_dtype_round_trips];
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_bytes() {
    for fault in [Fault::corrupt(), Fault::truncate()] {
        let harness = Wrapped(move |inner| FaultLayer::seeded(3).with(fault.clone()).layer(inner));
        for case in [
            "every_dtype_round_trips",
            "many_samples_round_trip",
            "pool_memory_outlives_the_release",
            "views_show_the_bytes",
            "concurrent_tasks_lose_nothing",
        ] {
            println!("{case}: {}", noticed(&harness, case).await);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_answers() {
    let faults = Fault::lose_answer(ErrorKind::PeerGone).nth(1);
    let harness = Wrapped(move |inner| FaultLayer::seeded(3).with(faults.clone()).layer(inner));
    noticed(&harness, "every_dtype_round_trips").await;
}

/// A transport of somebody else's crate, with the methods that have no default and none else.
///
/// Do not add to it: what it lacks after a change, every such crate lacks.
#[derive(Debug)]
struct Theirs(Arc<dyn Transport>);

#[async_trait]
impl Transport for Theirs {
    fn info(&self) -> &TransportInfo {
        self.0.info()
    }

    async fn publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        let options = PublishOptions::default().replace(options.replace).deadline(options.deadline);
        self.0.publish(batch, options).await
    }

    async fn fetch(
        &self,
        requests: Vec<FetchRequest>,
        options: FetchOptions,
    ) -> Result<Vec<Fetched>> {
        self.0.fetch(requests, FetchOptions::default().deadline(options.deadline)).await
    }

    async fn release(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
        self.0.release(releases).await
    }

    async fn health(&self) -> Result<Health> {
        self.0.health().await
    }

    async fn close(&self) -> Result<()> {
        self.0.close().await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f64_a_transport_of_anyone_needs_the_methods_of_today_and_no_more() {
    let harness = Wrapped(|inner| Arc::new(Theirs(inner)) as Arc<dyn Transport>);
    for case in ["every_dtype_round_trips", "a_duplicate_key_undoes_the_batch"] {
        let outcome = conformance::case(case).expect("a case").run(&harness).await;
        assert!(matches!(outcome, Outcome::Passed), "{case}: {outcome:?}");
    }
    let inner = Arc::new(MemoryTransport::builder().arena_bytes(1 << 20).build().unwrap());
    let theirs: &dyn Transport = &Theirs(inner);
    theirs.let_go(Vec::new()).await.unwrap(); // by default there is nothing to let go of
}
