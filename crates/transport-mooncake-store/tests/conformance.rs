//! The conformance suite over a fake store, and over a real one where there is one.

mod fake;

use std::sync::Arc;

use async_trait::async_trait;
use fake::{Cluster, reader::FakeReader};
use transport_core::{
    ByteSize, Result, Transport,
    conformance::{Harness, Hook, Outcome, Pair, Report, Setup, run_all},
};
use transport_mooncake_store::{Layout, StoreConfig, StoreTransport};

#[derive(Debug)]
struct Fake {
    layout: Layout,
    one_object: bool, // publisher and consumer are the same
    modern: bool,     // put sessions, and reads past Mooncake's engine
}

fn config(layout: Layout) -> StoreConfig {
    StoreConfig::default().layout(layout).pool(ByteSize::mib(256), ByteSize::mib(0))
}

#[async_trait]
impl Harness for Fake {
    fn name(&self) -> String {
        format!("store transport over a fake store, {:?}", self.layout)
    }

    fn offers(&self, hook: Hook) -> bool {
        matches!(hook, Hook::KillPublisher | Hook::TransferDelay)
    }

    async fn pair(&self, setup: &Setup) -> Result<Pair> {
        let cluster = Cluster::new();
        cluster.set_transfer_delay(setup.transfer_delay);
        let client = || -> Result<Arc<dyn Transport>> {
            let mut config = config(self.layout);
            config.segment_silence = None; // nobody is behind the names of segments
            if !self.modern {
                return Ok(Arc::new(StoreTransport::start(cluster.client(), config)?));
            }
            cluster.set_segment("", "127.0.0.1:17".into());
            let api = cluster.client_with_sessions();
            let reader = FakeReader { delay: setup.transfer_delay, ..FakeReader::default() };
            Ok(Arc::new(StoreTransport::start_with(api, config, Some(Arc::new(reader)))?))
        };
        let lost = cluster.clone();
        let publisher = client()?;
        let consumer = if self.one_object { publisher.clone() } else { client()? };
        Ok(Pair::new(publisher, consumer).on_kill(Box::new(move || {
            Box::pin(async move {
                lost.lose_everything();
                Ok(())
            })
        })))
    }
}

mod one_object_for_each_tensor {
    transport_core::conformance_tests!(
        super::Fake { layout: super::Layout::PerTensor, one_object: true, modern: false },
        not_applicable: [
            // The size of the pool is not known to a client.
            "a_batch_that_fits_in_part_leaves_nothing",
            "a_dropped_publish_leaves_nothing",
            "a_full_arena_times_out",
            "a_full_arena_waits_for_a_release",
            "closing_ends_a_waiting_publish",
            "close_ends_the_consumer", // the publisher's case covers the one object
            "more_than_the_arena_is_refused",
            // Keys, not addresses, and nothing to look at in place.
            "a_release_waits_for_views",
            "a_view_outlives_its_consumer",
            "an_address_beside_the_object_is_refused",
            "an_address_outside_the_arena_is_refused",
            "views_are_unmoved_by_other_samples",
            "views_of_the_replaced_life_stay",
            "views_show_the_bytes",
            // The store has neither lives of keys nor holds.
            "a_holder_reads_a_draining_life_again",
            "a_release_for_another_epoch_does_nothing",
            "a_replaced_life_cannot_be_fetched",
            "a_replaced_life_waits_for_all_holders",
            "a_sample_goes_with_its_last_holder",
            "a_stale_release_leaves_the_newer_life_alone",
            "a_stranger_cannot_take_memory_from_a_holder",
            "what_drains_goes_when_it_is_let_go",
            "an_older_descriptor_cannot_be_fetched",
            "an_older_publisher_is_read",
            "an_unknown_key_is_refused",
            "another_epoch_is_refused",
            "another_sequence_is_refused",
            "concurrent_releases_count_once",
            "health_counts_exactly",
            "one_sample_twice_in_one_release",
            "release_is_idempotent",
            "staleness_is_reported_as_checked",
            "the_replaced_life_drains",
            "what_was_never_fetched_can_be_released",
        ]
    );
}

/// Cases that want the key of one tensor in an error; here it is the key of the object that small
/// tensors share.
const NAMED_BY_THE_GROUP: &[&str] = &[
    "a_duplicate_key_undoes_the_batch",
    "a_longer_tensor_is_refused",
    "a_wider_element_type_is_refused",
    "one_bad_request_fails_the_call",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_clients_keep_the_contract_as_well() {
    let layout = Layout::PerTensor;
    for modern in [false, true] {
        let report = run_all(&Fake { layout, one_object: false, modern }).await;
        assert_eq!(failed(&report), [""; 0], "{report}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_grouped_layout_differs_only_in_the_names_of_its_errors() {
    let report = run_all(&Fake { layout: grouped(), one_object: true, modern: false }).await;
    assert_eq!(failed(&report), NAMED_BY_THE_GROUP, "{report}");
}

fn grouped() -> Layout {
    Layout::Grouped { below: ByteSize::mib(1) }
}

fn failed(report: &Report) -> Vec<&'static str> {
    let failed =
        |c: &&transport_core::conformance::CaseReport| matches!(c.outcome, Outcome::Failed(_));
    report.cases.iter().filter(failed).map(|c| c.name).collect()
}
