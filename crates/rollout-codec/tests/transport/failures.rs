//! Puts that fail leave nothing, and reads of what is not whole fail.

use std::{num::NonZeroU64, sync::Arc, time::Duration};

use control_proto::sample_ref::SampleRef;
use rollout_codec::transport::{RolloutConfig, Verify};
use transport_core::{
    Destination, Dtype, ErrorKind, FetchOptions, FetchRequest, RegionMut, Transport,
    layers::{Fault, FaultLayer, Layer, Operation},
};

use crate::support::{MIB, NoViews, empty, memory, rollouts, text};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_without_room_leaves_nothing() {
    let memory = memory(4 * MIB);
    for chunk in [MIB, 256 << 10] {
        let config = RolloutConfig::default()
            .chunks(NonZeroU64::new(chunk).unwrap(), 2)
            .deadline(Duration::from_millis(300));
        let over = rollouts(memory.clone(), config);
        let error = over.put(text(8 * MIB)).await.unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::CapacityExceeded | ErrorKind::Timeout),
            "{error}"
        );
        assert!(error.context("rollout").is_some());
        empty(&*memory).await;
        let health = memory.health().await.unwrap();
        assert_eq!((health.reserved_bytes, health.arena_free_bytes), (0, 4 * MIB));
        assert_eq!(over.stats().puts, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_put_leaves_nothing() {
    let memory = memory(64 * MIB);
    let config = RolloutConfig::default().chunks(NonZeroU64::new(256 << 10).unwrap(), 1);
    let over = rollouts(memory.clone(), config);
    for round in 0..40 {
        let put = over.put(text(8 * MIB));
        if let Ok(done) = tokio::time::timeout(Duration::from_micros(250 * round), put).await {
            over.cleanup([&done.unwrap()]).await.unwrap();
        }
        empty(&*memory).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_taken_name_leaves_the_first_rollout_alone() {
    let memory = memory(64 * MIB);
    let over = rollouts(memory.clone(), RolloutConfig::default());
    let first = over.put_as("dp0/1", text(MIB)).await.unwrap();
    let error = over.put_as("dp0/1", text(2 * MIB)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
    let sample = over.get(&first).await.unwrap();
    sample.view().verify(2).unwrap();
    drop(sample);
    over.cleanup([&first]).await.unwrap();
    empty(&*memory).await;
    let again = over.put_as("dp0/1", text(MIB)).await.unwrap();
    over.cleanup([&again]).await.unwrap();
    empty(&*memory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_that_do_not_fit_their_narrow_type_undo_the_put() {
    let memory = memory(64 * MIB);
    let encoding = rollout_codec::native::Options::default().narrow("tokens", Dtype::Int16);
    let over = rollouts(memory.clone(), RolloutConfig::default().encoding(encoding));
    let error = over.put(text(MIB)).await.unwrap_err();
    assert_eq!(error.context("field"), Some("tokens"), "{error}");
    empty(&*memory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_on_the_way_is_found_out() {
    let memory = memory(64 * MIB);
    let layer = FaultLayer::seeded(7).with(Fault::corrupt().on(Operation::Fetch));
    let damaged: Arc<dyn Transport> = layer.layer(NoViews::new(memory.clone()));
    let good = rollouts(memory.clone(), RolloutConfig::default());
    let bad = rollouts(damaged, RolloutConfig::default().verify(Verify::Moved));
    let handle = good.put(text(MIB)).await.unwrap();
    let error = bad.get(&handle).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(good.get(&handle).await.is_ok());
    good.cleanup([&handle]).await.unwrap();
    empty(&*memory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_to_any_piece_of_much_data_is_found_out() {
    let memory = memory(128 * MIB);
    let chunk = NonZeroU64::new(17 * MIB).unwrap();
    let whole = RolloutConfig::default().take(Arc::new(RegionMut::zeroed));
    for put in [RolloutConfig::default(), RolloutConfig::default().chunks(chunk, 2)] {
        let good = rollouts(memory.clone(), put);
        let handle = good.put(text(40 * MIB)).await.unwrap();
        // The first call is for the root; pieces of 16 MiB follow, checked as they come.
        for nth in [2, 3, 4] {
            let layer =
                FaultLayer::seeded(nth).with(Fault::corrupt().on(Operation::Fetch).nth(nth));
            let bad = rollouts(layer.layer(NoViews::new(memory.clone())), whole.clone());
            let error = bad.get(&handle).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "call {nth}: {error}");
            assert!(error.context("field").is_some(), "call {nth}: {error}");
            assert_eq!(layer.injected().len(), 1);
            // The same again, whole this time: nothing of the failure is kept.
            let copied = bad.stats().copied_bytes;
            let sample = bad.get(&handle).await.unwrap();
            assert_eq!(bad.stats().copied_bytes, copied, "the pieces are one region");
            sample.view().verify(2).unwrap();
        }
        good.cleanup([&handle]).await.unwrap();
        empty(&*memory).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn data_without_a_root_is_no_rollout_and_lost_data_is_an_error() {
    let memory = memory(64 * MIB);
    let over = rollouts(memory.clone(), RolloutConfig::default());
    let handle = over.put_as("half", text(MIB)).await.unwrap();
    // As if a cleanup had died after the data: the next one finishes, and a read fails.
    let request = FetchRequest::new(handle.root().clone(), Destination::View);
    let fetched = memory.fetch(vec![request], FetchOptions::default()).await.unwrap();
    let root =
        fetched[0].tensors["header"].data.as_ref()[handle.header_bytes() as usize..].to_vec();
    drop(fetched);
    let data = SampleRef::parse(root.trim_ascii_end()).unwrap().descriptor().unwrap();
    let data = Arc::new(data);
    assert_eq!(memory.release(vec![data.into()]).await.unwrap().released, 1);
    let error = over.get(&handle).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert!(error.context("key").is_some());
    assert_eq!(over.cleanup([&handle]).await.unwrap().removed, 1);
    empty(&*memory).await;
}

#[tokio::test]
async fn settings_that_cannot_work_are_refused() {
    let memory = memory(MIB);
    for config in [
        RolloutConfig::default().threads(0),
        RolloutConfig::default().deadline(Duration::ZERO),
        RolloutConfig::default().chunks(NonZeroU64::new(1).unwrap(), 2),
        RolloutConfig::default().chunks(NonZeroU64::new(MIB).unwrap(), 0),
    ] {
        let error = rollout_codec::transport::RolloutTransport::new(memory.clone(), config);
        assert_eq!(error.unwrap_err().kind(), ErrorKind::ConfigInvalid);
    }
}
