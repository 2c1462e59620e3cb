//! The list of cases, and how one is run.

use std::{
    any::Any,
    fmt,
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::Arc,
    task::Poll,
    time::Duration,
};

use super::{
    Harness, Hook, Outcome, Pair, Setup,
    context::{Stop, Verdict},
};
use crate::{Capabilities, Transport};

/// How long each transport of a pair may take to close at the end of a case.
const CLOSE_BOUND: Duration = Duration::from_secs(10);

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// One case of the suite.
#[non_exhaustive]
pub struct Case {
    /// Unique, a valid Rust identifier.
    pub name: &'static str,
    /// What must hold.
    pub summary: &'static str,
    /// What the pair must be like.
    pub setup: Setup,
    /// What the transport and the harness must be able to do.
    pub needs: &'static [Need],
    body: for<'a> fn(&'a mut Pair) -> Pin<Box<dyn Future<Output = Verdict> + Send + 'a>>,
}

/// What a case cannot do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Need {
    /// The publisher's health tells the size of an arena.
    Arena,
    /// The harness offers this hook.
    Hook(Hook),
    /// The consumer lacks [`Capabilities::device_memory`] or the publisher does.
    NoDeviceMemory,
    /// Both sides detect older lives: [`Capabilities::staleness_checked`].
    StalenessChecked,
    /// The consumer has [`Capabilities::views`].
    Views,
}

/// Every case, in the order in which [`run_all`](super::run_all) runs them.
pub fn cases() -> &'static [Case] {
    CASES
}

/// The case called `name`.
pub fn case(name: &str) -> Option<&'static Case> {
    CASES.iter().find(|c| c.name == name)
}

/// Runs the case called `name` and panics unless it passes, or does not apply and is listed in
/// `not_applicable`. [`conformance_tests!`](crate::conformance_tests) makes a test of each.
pub async fn assert_case(name: &str, harness: &dyn Harness, not_applicable: &[&str]) {
    let case = case(name).unwrap_or_else(|| panic!("{name} is not a case of the suite"));
    match case.run(harness).await {
        Outcome::Passed if not_applicable.contains(&name) => {
            panic!("{name} was not expected to apply to {}, but passed", harness.name())
        }
        Outcome::Passed => {}
        Outcome::NotApplicable(_) if not_applicable.contains(&name) => {}
        Outcome::NotApplicable(why) => {
            panic!("{name} should apply to {}, but: {why}", harness.name())
        }
        Outcome::Failed(why) => panic!("{name} ({}) fails on {harness:?}: {why}", case.summary),
    }
}

impl Case {
    /// Runs the case over a fresh pair and closes it. Never panics and never takes longer than
    /// [`Harness::case_timeout`] and the time that dropping the pair takes.
    pub async fn run(&self, harness: &dyn Harness) -> Outcome {
        for need in self.needs {
            if let Need::Hook(hook) = need
                && !harness.offers(*hook)
            {
                return Outcome::NotApplicable(format!("the harness does not offer {hook:?}"));
            }
        }
        let limit = harness.case_timeout();
        let run = catch_panic(self.run_on_pair(harness));
        match tokio::time::timeout(limit, run).await {
            Ok(Ok(Ok(()))) => Outcome::Passed,
            Ok(Ok(Err(Stop::Failed(why)))) => Outcome::Failed(why),
            Ok(Ok(Err(Stop::NotApplicable(why)))) => Outcome::NotApplicable(why),
            Ok(Err(panic)) => Outcome::Failed(format!("panicked: {panic}")),
            Err(_) => Outcome::Failed(format!("did not end within {limit:?}")),
        }
    }

    async fn run_on_pair(&self, harness: &dyn Harness) -> Verdict {
        let mut pair = harness
            .pair(&self.setup)
            .await
            .map_err(|e| Stop::Failed(format!("the harness cannot make a pair: {e:?}")))?;
        for need in self.needs {
            need.check(&pair).await?;
        }
        let may_be_killed = self.needs.contains(&Need::Hook(Hook::KillPublisher));
        let verdict = (self.body)(&mut pair).await;
        let closed = close(&pair, may_be_killed).await;
        verdict.and(closed)
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case")
            .field("name", &self.name)
            .field("summary", &self.summary)
            .field("setup", &self.setup)
            .field("needs", &self.needs)
            .finish_non_exhaustive()
    }
}

impl Need {
    async fn check(self, pair: &Pair) -> Verdict {
        let lacks = |side: &Arc<dyn Transport>, has: fn(&Capabilities) -> bool| {
            (!has(&side.info().capabilities)).then(|| side.info().scheme.clone())
        };
        let (publisher, consumer) = (&pair.publisher, &pair.consumer);
        let missing = match self {
            Self::Arena => (publisher.health().await?.arena_bytes == 0)
                .then(|| "the publisher has no arena of a known size".into()),
            Self::Hook(Hook::SecondConsumer) => {
                pair.second_consumer.is_none().then(|| "the pair has no second consumer".into())
            }
            Self::Hook(Hook::KillPublisher) => {
                pair.kill_publisher.is_none().then(|| "the pair cannot kill its publisher".into())
            }
            Self::Hook(_) => None, // asked of the harness
            Self::NoDeviceMemory => (lacks(publisher, |c| c.device_memory).is_none()
                && lacks(consumer, |c| c.device_memory).is_none())
            .then(|| "both sides take device memory".into()),
            Self::StalenessChecked => lacks(publisher, |c| c.staleness_checked)
                .or_else(|| lacks(consumer, |c| c.staleness_checked))
                .map(|scheme| format!("{scheme} does not check staleness")),
            Self::Views => {
                lacks(consumer, |c| c.views).map(|scheme| format!("{scheme} gives no views"))
            }
        };
        missing.map_or(Ok(()), |why| Err(Stop::NotApplicable(why)))
    }
}

async fn close(pair: &Pair, publisher_may_be_gone: bool) -> Verdict {
    let consumers = pair.second_consumer.iter().chain([&pair.consumer]);
    for (side, may_fail) in
        consumers.map(|c| (c, false)).chain([(&pair.publisher, publisher_may_be_gone)])
    {
        match tokio::time::timeout(CLOSE_BOUND, side.close()).await {
            Ok(Err(_)) if may_fail => {}
            Ok(Ok(())) => {}
            Ok(Err(e)) => return Err(Stop::Failed(format!("close at the end failed: {e:?}"))),
            Err(_) => {
                return Err(Stop::Failed(format!(
                    "close at the end did not return within {CLOSE_BOUND:?}: {side:?}"
                )));
            }
        }
    }
    Ok(())
}

/// Awaits `future`; a panic inside becomes its message.
async fn catch_panic<T>(future: impl Future<Output = T>) -> Result<T, String> {
    let mut future = pin!(future);
    poll_fn(move |cx| {
        // A future that panicked is never polled again, so what it left behind is only dropped.
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
            Err(panic) => Poll::Ready(Err(panic_message(&*panic))),
        }
    })
    .await
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into())
}

/// Makes the list of cases and the macro of one test per case from one table.
macro_rules! suite {
    (($d:tt) $(
        $module:ident::$name:ident: $summary:literal, $setup:expr $(, needs $($need:expr),+)?;
    )*) => {
        static CASES: &[Case] = &[$(Case {
            name: stringify!($name),
            summary: $summary,
            setup: $setup,
            needs: &[$($($need),+)?],
            body: |pair| Box::pin(super::$module::$name(pair)),
        }),*];

        /// Makes one `#[tokio::test]` per case of the [conformance suite](crate::conformance).
        ///
        /// Takes an expression that gives a [`Harness`](crate::conformance::Harness), evaluated in
        /// each test, and the names of the cases that are expected not to apply. The calling crate
        /// needs tokio with `macros` and `rt-multi-thread`.
        ///
        /// ```text
        /// mod conformance {
        ///     transport_core::conformance_tests!(super::MyHarness, not_applicable: ["views_share_memory"]);
        /// }
        /// ```
        #[macro_export]
        macro_rules! conformance_tests {
            ($d harness:expr, not_applicable: [$d($d absent:literal),* $d(,)?]) => {$(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $name() {
                    let harness = $d harness;
                    $crate::conformance::assert_case(
                        stringify!($name),
                        &harness,
                        &[$d($d absent),*],
                    )
                    .await;
                }
            )*};
        }
    };
}

/// An arena with room for everything that most cases publish.
const ROOMY: Setup = Setup::new(4 * MIB);
/// Takes 16 MiB tensors, also where sizes are rounded up.
const LARGE: Setup = Setup::new(64 * MIB);
/// An arena that a few tensors fill.
const SMALL: Setup = Setup::new(256 * KIB);
const TWO_IN_A_SMALL_ARENA: Setup = Setup { second_consumer: true, ..SMALL };
const TWO_CONSUMERS: Setup = Setup { second_consumer: true, ..ROOMY };
const OLDER_PEER: Setup = Setup { older_peer: true, ..ROOMY };
const SLOW: Setup = Setup { transfer_delay: Duration::from_millis(400), ..LARGE };

suite! { ($)
    round_trip::every_dtype_round_trips:
        "every element type comes back bit by bit", ROOMY;
    round_trip::empty_tensors_round_trip:
        "tensors without bytes come back beside others and alone", ROOMY;
    round_trip::zero_dimensional_tensors_round_trip:
        "a tensor without dimensions is one element", ROOMY;
    round_trip::many_tensors_round_trip:
        "100 tensors of a sample come back in order", ROOMY;
    round_trip::many_samples_round_trip:
        "64 samples of a call come back in the order of the requests", ROOMY;
    round_trip::a_large_tensor_round_trips:
        "16 MiB come back bit by bit", LARGE;
    round_trip::descriptors_say_what_was_published:
        "names, order, shapes and layer ids are those of the publication", ROOMY;
    round_trip::some_names_in_the_order_asked:
        "a subset of names gives these tensors in this order", ROOMY;
    round_trip::a_sample_may_be_fetched_again:
        "a held sample can be fetched any number of times and is released once", ROOMY;
    round_trip::one_sample_twice_in_one_call:
        "two requests for one sample give two answers", ROOMY;

    destinations::views_show_the_bytes:
        "a view shows the published bytes where they are, without a copy", ROOMY,
        needs Need::Views;
    destinations::views_are_unmoved_by_other_samples:
        "a held view stays the same while other samples come and go", SMALL, needs Need::Views;
    destinations::a_release_waits_for_views:
        "a released sample stays what it is, and counted, until its last view is dropped", SMALL,
        needs Need::Views, Need::StalenessChecked;
    destinations::a_view_outlives_its_consumer:
        "closing a consumer does not change what its views show", TWO_IN_A_SMALL_ARENA,
        needs Need::Views, Need::StalenessChecked, Need::Hook(Hook::SecondConsumer);
    destinations::pool_memory_outlives_the_release:
        "what was fetched into the pool stays the same after its release", SMALL;
    destinations::own_regions_come_back_filled:
        "regions of the caller come back filled, are kept, and go back to their owner", ROOMY;
    destinations::ranges_are_read_alone_or_refused:
        "ranges of a tensor are read without the rest of it, or refused", ROOMY;
    destinations::destinations_mix_in_one_call:
        "requests of one call may have different destinations", ROOMY;
    destinations::nothing_writes_beside_the_destination:
        "bytes beside the caller's regions stay the same", ROOMY;
    destinations::a_destination_of_another_length_is_refused:
        "a region that is too short or too long is refused and goes back to its owner", ROOMY;
    destinations::another_number_of_destinations_is_refused:
        "there must be one region for each tensor asked for", ROOMY;
    destinations::unknown_and_repeated_names_are_refused:
        "names must be those of the sample, each once", ROOMY;
    destinations::a_dropped_fetch_gives_its_memory_back_once:
        "regions of a dropped fetch go back to their owner, and the transport stays usable", LARGE;
    destinations::a_dropped_fetch_is_quarantined_until_over:
        "regions of a dropped or late fetch are counted and kept until the transfer is over", SLOW,
        needs Need::Hook(Hook::TransferDelay);

    publishing::a_duplicate_key_undoes_the_batch:
        "an existing key is refused, and nothing of its batch stays", ROOMY;
    publishing::one_key_twice_in_a_batch_is_refused:
        "two samples of a batch must not share a key, replacing or not", ROOMY;
    publishing::a_key_is_free_after_its_release:
        "a released key can be published again", ROOMY;
    publishing::replacing_shows_the_new_bytes:
        "replace makes the new bytes readable", ROOMY;
    publishing::a_replaced_life_cannot_be_fetched:
        "the descriptor of a replaced life does not pass for the new one", ROOMY,
        needs Need::StalenessChecked;
    publishing::the_replaced_life_drains:
        "a held life that was replaced goes when its holder lets go", ROOMY,
        needs Need::StalenessChecked;
    publishing::views_of_the_replaced_life_stay:
        "a view of a life that was replaced ten times still shows it", ROOMY,
        needs Need::Views, Need::StalenessChecked;
    publishing::a_holder_reads_a_draining_life_again:
        "a replaced life can be fetched again by those that hold it", ROOMY,
        needs Need::StalenessChecked;
    publishing::a_ready_event_orders_the_copy:
        "sources are read after their ready events, and publish waits for all of them", ROOMY;
    publishing::an_event_that_does_not_happen_undoes_the_batch:
        "a ready event that is late ends the publish in time, and nothing stays", ROOMY;
    publishing::published_bytes_are_a_copy_of_their_own:
        "sources may go as soon as publish returns", ROOMY;

    publishing::a_writer_writes_where_it_is_read:
        "a writer brings every byte once, beside samples with data", ROOMY;
    publishing::a_writer_that_fails_undoes_the_batch:
        "an error of a writer ends the publish and leaves nothing", ROOMY;

    releasing::letting_go_frees_nothing:
        "a sample that its reader let go is still there to fetch and to release", ROOMY;
    releasing::release_is_idempotent:
        "the second release of a sample reports it as already gone", ROOMY,
        needs Need::StalenessChecked;
    releasing::one_sample_twice_in_one_release:
        "a sample that is listed twice is released once", ROOMY, needs Need::StalenessChecked;
    releasing::what_was_never_fetched_can_be_released:
        "a sample that nobody fetched is released like any other", ROOMY,
        needs Need::StalenessChecked;
    releasing::a_released_sample_cannot_be_fetched:
        "a fetch after the release fails and names the key", ROOMY;
    releasing::an_older_descriptor_cannot_be_fetched:
        "a descriptor of an older life never gives the bytes of a newer one", ROOMY,
        needs Need::StalenessChecked;
    releasing::a_stale_release_leaves_the_newer_life_alone:
        "a release of an older life is reported as stale and frees nothing", ROOMY,
        needs Need::StalenessChecked;
    releasing::a_release_for_another_epoch_does_nothing:
        "a release for another life of the publisher frees nothing", ROOMY,
        needs Need::StalenessChecked;

    staleness::another_epoch_is_refused:
        "a descriptor of another life of the publisher is refused", ROOMY,
        needs Need::StalenessChecked;
    staleness::another_sequence_is_refused:
        "a descriptor of another life of an object is refused", ROOMY,
        needs Need::StalenessChecked;
    staleness::an_address_outside_the_arena_is_refused:
        "an address far from everything published is refused", ROOMY;
    staleness::an_address_beside_the_object_is_refused:
        "an address that is a little off is refused", ROOMY;
    staleness::a_longer_tensor_is_refused:
        "a shape with more bytes than were published is refused", ROOMY;
    staleness::a_wider_element_type_is_refused:
        "an element type with more bytes than were published is refused", ROOMY;
    staleness::an_unknown_key_is_refused:
        "a key that was never published is an error to fetch and gone to release", ROOMY,
        needs Need::StalenessChecked;
    staleness::one_bad_request_fails_the_call:
        "one released sample fails the whole fetch, and all regions go back", ROOMY;

    capacity::a_full_arena_waits_for_a_release:
        "a publish without room goes on when a sample is released", SMALL, needs Need::Arena;
    capacity::a_full_arena_times_out:
        "a publish without room fails at its deadline and leaves nothing behind", SMALL,
        needs Need::Arena;
    capacity::a_batch_that_fits_in_part_leaves_nothing:
        "a batch gets all its room or none", SMALL, needs Need::Arena;
    capacity::more_than_the_arena_is_refused:
        "a batch larger than the arena fails", SMALL, needs Need::Arena;
    capacity::a_dropped_publish_leaves_nothing:
        "a dropped publish takes no room and no key", SMALL, needs Need::Arena;
    capacity::closing_ends_a_waiting_publish:
        "close does not wait for room that never comes", SMALL, needs Need::Arena;

    peers::a_sample_goes_with_its_last_holder:
        "a sample that two clients hold goes when both let go", TWO_CONSUMERS,
        needs Need::Hook(Hook::SecondConsumer), Need::StalenessChecked;
    peers::a_stranger_cannot_take_memory_from_a_holder:
        "a release by another client never takes what a client holds", TWO_CONSUMERS,
        needs Need::Hook(Hook::SecondConsumer);
    peers::what_drains_goes_when_it_is_let_go:
        "a sample that somebody else released goes when its reader lets go", TWO_CONSUMERS,
        needs Need::Hook(Hook::SecondConsumer), Need::StalenessChecked;
    peers::a_replaced_life_waits_for_all_holders:
        "a replaced life goes with the last of its holders", TWO_CONSUMERS,
        needs Need::Hook(Hook::SecondConsumer), Need::StalenessChecked;
    peers::a_killed_publisher_is_an_error_in_time:
        "calls to a publisher that died fail within their deadline", ROOMY,
        needs Need::Hook(Hook::KillPublisher);
    peers::an_older_publisher_is_read:
        "an older publisher is read, and staleness reported as not checked", OLDER_PEER,
        needs Need::Hook(Hook::OlderPeer);
    peers::staleness_is_reported_as_checked:
        "a fetch says that staleness was checked where the capability says so", ROOMY,
        needs Need::StalenessChecked;

    concurrency::concurrent_tasks_lose_nothing:
        "four producers and four consumers: what is published is released", SMALL;
    concurrency::one_of_many_publishers_of_a_key_wins:
        "of concurrent publishers of one key exactly one succeeds", ROOMY;
    concurrency::concurrent_releases_count_once:
        "of concurrent releases of a sample exactly one counts", ROOMY,
        needs Need::StalenessChecked;

    lifecycle::empty_calls_do_nothing:
        "publish, fetch and release of nothing succeed and count nothing", ROOMY;
    lifecycle::health_counts_exactly:
        "resident, published, released and duplicate counts are exact at every step", ROOMY,
        needs Need::StalenessChecked;
    lifecycle::a_missing_capability_is_an_error:
        "what the capabilities exclude fails before any byte moves", ROOMY;
    lifecycle::device_memory_is_refused:
        "device memory is refused without the capability", ROOMY, needs Need::NoDeviceMemory;
    lifecycle::close_ends_the_consumer:
        "close is idempotent, and calls to a closed consumer fail", ROOMY;
    lifecycle::close_ends_the_publisher:
        "close is idempotent, and calls to a closed publisher fail", ROOMY;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_found() {
        for c in cases() {
            assert!(std::ptr::eq(case(c.name).unwrap(), c), "{} appears twice", c.name);
            assert!(!c.summary.is_empty());
        }
        assert!(case("no such case").is_none());
    }

    #[tokio::test]
    async fn a_panic_becomes_its_message() {
        assert_eq!(catch_panic(async { 1 }).await, Ok(1));
        let caught = catch_panic(async { panic!("boo {}", 7) }).await;
        assert_eq!(caught, Err::<(), _>("boo 7".into()));
    }
}
