//! What is put comes back: whole, by field, by row, in one piece or many.

use std::num::NonZeroU64;

use proptest::{prelude::*, test_runner::TestRunner};
use rollout_codec::transport::{RolloutConfig, Verify};

use crate::{
    any::{any_rollout, same_rollout},
    support::{MIB, NoViews, empty, memory, rollouts, text},
};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

#[test]
fn every_rollout_comes_back_by_views_and_by_copies() {
    let runtime = runtime();
    let mut runner = TestRunner::new(ProptestConfig::with_cases(60));
    let case = (any_rollout(), any::<bool>());
    let run = |rollout, views: bool| async move {
        let memory = memory(64 * MIB);
        let config = RolloutConfig::default().verify(Verify::Always);
        let over = match views {
            true => rollouts(memory.clone(), config),
            false => rollouts(NoViews::new(memory.clone()), config),
        };
        let handle = over.put(rollout_static(&rollout)).await.unwrap();
        let sample = over.get(&handle).await.unwrap();
        let same = same_rollout(&rollout, &sample.rollout().unwrap());
        drop(sample);
        over.cleanup([&handle]).await.unwrap();
        empty(&*memory).await;
        same
    };
    runner
        .run(&case, |(rollout, views)| {
            prop_assert!(runtime.block_on(run(rollout, views)));
            Ok(())
        })
        .unwrap();
}

fn rollout_static(rollout: &rollout_codec::Rollout<'static>) -> rollout_codec::Rollout<'static> {
    rollout.clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_copy_on_put_and_none_on_get_into_views() {
    let memory = memory(64 * MIB);
    let over = rollouts(memory.clone(), RolloutConfig::default());
    let handle = over.put(text(8 * MIB)).await.unwrap();
    let bytes = handle.data_bytes();
    let header = over.header(&handle).await.unwrap();
    assert_eq!(header.fields().find(|f| f.name == "tokens").unwrap().kind, "ragged");
    let moved = |health: transport_core::Health| health.host_payload_bytes;
    let after_put = moved(over.health().await.unwrap());
    let sample = over.get(&handle).await.unwrap();
    assert!(moved(over.health().await.unwrap()) - after_put < 64 << 10, "the root only");
    let stats = over.stats();
    assert_eq!((stats.puts, stats.gathered_bytes), (1, bytes), "one copy on put");
    assert_eq!((stats.viewed_bytes, stats.fetched_bytes, stats.copied_bytes), (bytes, 0, 0));
    assert_eq!(stats.leased, 1);
    drop(sample);
    assert_eq!(over.cleanup([&handle]).await.unwrap().removed, 1);
    empty(&*memory).await;
    assert_eq!(over.stats().outstanding, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_keys_unless_parts_are_asked_for() {
    let memory = memory(64 * MIB);
    let copies = NoViews::new(memory.clone());
    let whole = rollouts(copies.clone(), RolloutConfig::default());
    let handle = whole.put(text(4 * MIB)).await.unwrap();
    assert_eq!(memory_samples(&whole).await, 2, "a header and a data object");
    whole.cleanup([&handle]).await.unwrap();
    empty(&*memory).await;

    let config = RolloutConfig::default().chunks(NonZeroU64::new(MIB).unwrap(), 3);
    let parts = rollouts(copies, config);
    let handle = parts.put(text(4 * MIB)).await.unwrap();
    assert!(memory_samples(&parts).await > 4);
    let sample = parts.get(&handle).await.unwrap();
    assert!(same_rollout(&text(4 * MIB), &sample.rollout().unwrap()));
    let stats = parts.stats();
    assert_eq!((stats.fetched_bytes, stats.copied_bytes), (handle.data_bytes(), 0));
    drop(sample);
    parts.cleanup([&handle]).await.unwrap();
    empty(&*memory).await;
}

async fn memory_samples(over: &rollout_codec::transport::RolloutTransport) -> u64 {
    over.health().await.unwrap().resident_samples
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fields_and_rows_are_read_alone() {
    let memory = memory(128 * MIB);
    for views in [true, false] {
        let config = RolloutConfig::default();
        let chunk = NonZeroU64::new(MIB).unwrap();
        let over = match views {
            true => rollouts(memory.clone(), config),
            false => rollouts(NoViews::new(memory.clone()), config.chunks(chunk, 2)),
        };
        let handle = over.put(text(16 * MIB)).await.unwrap();
        let whole = text(16 * MIB);
        let expected = |name: &str, row: usize| match &whole.non_tensor[name] {
            rollout_codec::Column::Ragged(column) => column.row(row).unwrap().to_vec(),
            other => panic!("{other:?}"),
        };

        let fields = over.get_fields(&handle, &["loss_masks", "rewards"]).await.unwrap();
        let masks = fields.view().ragged("loss_masks").unwrap();
        assert_eq!(masks.row(3).unwrap().bytes(), expected("loss_masks", 3));
        assert_eq!(fields.view().column("rewards").unwrap().rows(), handle.rows());
        if !views {
            assert!(fields.view().ragged("tokens").is_err(), "was not read");
            let read = over.stats().fetched_bytes;
            assert!(read < handle.data_bytes() / 2, "{read} of {}", handle.data_bytes());
        }
        drop((masks, fields));

        let before = over.stats().fetched_bytes;
        let names = ["tokens", "rollout_log_probs"];
        let rows = [7, 0, 7, 5];
        let set = over.get_rows(&handle, &names, &rows, None).await.unwrap();
        for name in names {
            for (i, row) in rows.iter().enumerate() {
                let found = set.fields[name].rows[i].as_ref().unwrap().as_ref();
                assert_eq!(found, expected(name, *row as usize), "{name} {row}");
            }
        }
        if !views {
            let read = over.stats().fetched_bytes - before;
            assert!(read < handle.data_bytes() / 2, "{read} of {}", handle.data_bytes());
        }
        let steps = [2..5, 0..0];
        let part = over.get_rows(&handle, &["tokens"], &[4, 1], Some(&steps)).await.unwrap();
        let found = part.fields["tokens"].rows[0].as_ref().unwrap().as_ref();
        assert_eq!(found, &expected("tokens", 4)[16..40]);
        assert_eq!(part.fields["tokens"].rows[1].as_ref().unwrap().len(), 0);
        for (fields, rows) in [(&["nothing"][..], &[0][..]), (&["tokens"], &[100_000])] {
            assert!(over.get_rows(&handle, fields, rows, None).await.is_err());
        }
        assert!(over.get_rows(&handle, &["tokens"], &[1], Some(&[])).await.is_err());
        drop((set, part));
        over.cleanup([&handle]).await.unwrap();
        empty(&*memory).await;
    }
}
