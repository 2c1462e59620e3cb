//! Odd and bad input on the way: the lines of the list that need a transport.

use std::{num::NonZeroU64, sync::Arc, time::Duration};

use rollout_codec::{
    Blobs, Column, Ragged, Rollout, RowKind, Template,
    transport::{RolloutConfig, RolloutTransport},
};
use transport_core::{Dtype, ErrorKind};

use crate::{
    any::same_rollout,
    support::{Keyed, MIB, NoViews, empty, memory, rollouts, text},
};

fn one(column: Column<'static>) -> Rollout<'static> {
    let mut rollout = Rollout::default();
    rollout.non_tensor.insert("x".into(), column);
    rollout
}

fn ragged(rows: &[Option<Vec<u8>>]) -> Rollout<'static> {
    let mut column = Ragged::new(Dtype::Uint8, RowKind::Torch, Template::flat()).unwrap();
    for row in rows {
        match row {
            Some(bytes) => column.push(bytes.clone()).unwrap(),
            None => column.push_null(),
        }
    }
    one(Column::Ragged(column))
}

/// F47 as well: no transfer of no bytes is asked for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollouts_without_rows_or_bytes() {
    let memory = memory(16 * MIB);
    let store = Keyed::new(memory.clone());
    let over = rollouts(store.clone(), RolloutConfig::default());
    for rollout in [
        Rollout::default(),
        ragged(&[]),
        ragged(&[Some(vec![]), Some(vec![])]),
        ragged(&[None, None]),
        ragged(&[Some(vec![1])]),
        one(Column::Blobs(Blobs::from_text([None::<&str>; 2]))),
    ] {
        let handle = over.put(rollout.clone()).await.unwrap();
        let sample = over.get(&handle).await.unwrap();
        assert!(same_rollout(&rollout, &sample.rollout().unwrap()), "{rollout:?}");
        drop(sample);
        over.cleanup([&handle]).await.unwrap();
        empty(&*memory).await;
    }
    assert!(store.fetches.lock().unwrap().iter().all(|&bytes| bytes > 0), "no empty transfer");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_larger_than_a_chunk() {
    let memory = memory(64 * MIB);
    let chunk = NonZeroU64::new(128 << 10).unwrap();
    for transport in [NoViews::new(memory.clone()), NoViews::whole(memory.clone())] {
        let over = rollouts(transport, RolloutConfig::default().chunks(chunk, 3));
        let large: Vec<u8> = (0..3 * MIB).map(|i| (i * 7) as u8).collect();
        let rollout = ragged(&[Some(vec![1; 5]), Some(large.clone()), Some(vec![2; 7])]);
        let handle = over.put(rollout.clone()).await.unwrap();
        let sample = over.get(&handle).await.unwrap();
        assert!(same_rollout(&rollout, &sample.rollout().unwrap()));
        drop(sample);
        let steps = [1_000_000..2_000_000, 6..7];
        let set = over.get_rows(&handle, &["x"], &[1, 2], Some(&steps)).await.unwrap();
        let found = set.fields["x"].rows[0].as_ref().unwrap().as_ref();
        assert!(found == &large[1_000_000..2_000_000]);
        drop(set);
        over.cleanup([&handle]).await.unwrap();
        empty(&*memory).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_producer_that_dies_between_data_and_manifest_gives_no_handle() {
    let memory = memory(64 * MIB);
    let store = Keyed::new(memory.clone());
    store.dies_at_root.store(true, std::sync::atomic::Ordering::SeqCst);
    let over = rollouts(store.clone(), RolloutConfig::default());
    let put = over.put_as("dp0/1", text(MIB));
    assert!(tokio::time::timeout(Duration::from_millis(500), put).await.is_err());
    // Here only its future was dropped, so it cleans up by itself; a killed one is swept.
    empty(&*memory).await;
}

/// Some read it in time and some do not; nobody reads half of it, and nothing is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cleanup_during_a_read() {
    let memory = memory(128 * MIB);
    let chunk = NonZeroU64::new(128 << 10).unwrap();
    let config = || RolloutConfig::default().chunks(chunk, 2);
    let expected = text(4 * MIB);
    let (mut read, mut missed) = (0, 0);
    for round in 0..40u64 {
        let producer = rollouts(memory.clone(), config());
        let reader: RolloutTransport = rollouts(NoViews::new(Arc::new(memory.client())), config());
        let handle = producer.put(text(4 * MIB)).await.unwrap();
        let task = tokio::spawn({
            let handle = handle.clone();
            async move { (reader.get(&handle).await, reader) }
        });
        tokio::time::sleep(Duration::from_micros(150 * round)).await;
        producer.cleanup([&handle]).await.unwrap();
        let (result, reader) = task.await.unwrap();
        match result {
            Ok(sample) => {
                assert!(same_rollout(&expected, &sample.rollout().unwrap()));
                read += 1;
            }
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Stale), "{error}");
                missed += 1;
            }
        }
        reader.settle().await;
        empty(&*memory).await;
    }
    assert_eq!(read + missed, 40);
}
