//! What is put comes back: whole, by field, by row, in one piece or many.

use std::{
    num::NonZeroU64,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use proptest::{prelude::*, test_runner::TestRunner};
use rollout_codec::{
    Column, Scalars,
    native::{self, Options, ReadLimits},
    transport::{HostShare, RolloutConfig, RolloutTransport, Take, Verify},
};
use transport_core::{Dtype, MemoryTransport, RegionMut, SampleKey};

use crate::{
    any::{any_rollout, same_rollout},
    support::{MIB, NoViews, SlowLink, empty, memory, rollouts, text},
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

/// What a transport can do for a reader of some bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Can {
    Views,
    Ranges,
    WholeSamples,
}

fn over(memory: &Arc<MemoryTransport>, can: Can, config: RolloutConfig) -> RolloutTransport {
    match can {
        Can::Views => rollouts(memory.clone(), config),
        Can::Ranges => rollouts(NoViews::new(memory.clone()), config),
        Can::WholeSamples => {
            let chunk = NonZeroU64::new(MIB).unwrap();
            rollouts(NoViews::whole(memory.clone()), config.chunks(chunk, 2))
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fields_and_rows_are_read_alone() {
    let memory = memory(128 * MIB);
    for can in [Can::Views, Can::Ranges, Can::WholeSamples] {
        let over = over(&memory, can, RolloutConfig::default());
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
        let read = over.stats().fetched_bytes;
        let wanted: u64 = fields
            .header()
            .fields()
            .filter(|f| matches!(f.name, "loss_masks" | "rewards"))
            .map(|f| f.bytes)
            .sum();
        match can {
            Can::Views => assert_eq!(read, 0),
            Can::Ranges => assert!(read < wanted + (8 << 10), "{read} bytes for {wanted}"),
            Can::WholeSamples => assert!(read < handle.data_bytes() / 2, "{read}"),
        }
        if can != Can::Views {
            assert!(fields.view().ragged("tokens").is_err(), "was not read");
        }
        drop((masks, fields));

        let before = over.stats().fetched_bytes;
        let names = ["tokens", "rollout_log_probs"];
        let rows = [7, 0, 7, 5];
        let set = over.get_rows(&handle, &names, &rows, None).await.unwrap();
        let mut wanted = 0;
        for name in names {
            for (i, row) in rows.iter().enumerate() {
                let found = set.fields[name].rows[i].as_ref().unwrap().as_ref();
                assert_eq!(found, expected(name, *row as usize), "{name} {row}");
                wanted += found.len() as u64;
            }
        }
        let read = over.stats().fetched_bytes - before;
        match can {
            Can::Views => assert_eq!(read, 0),
            // Offsets, and gaps of a few KiB; one row is asked for twice, and read once.
            Can::Ranges => assert!(read < wanted + (32 << 10), "{read} bytes for {wanted}"),
            Can::WholeSamples => assert!(read < handle.data_bytes() / 2, "{read}"),
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

/// Ranges may be refused where a sample lies: then it is read whole, once, and not for each piece.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_read_in_pieces_is_read_whole_and_once() {
    let memory = memory(128 * MIB);
    let folder = tempfile::tempdir().unwrap();
    let share = HostShare::new(folder.path()).unwrap();
    let heap: Take = Arc::new(RegionMut::zeroed);
    // The one data sample; the second of two.
    for (chunk, refused) in [
        (None, (|_| true) as fn(&SampleKey) -> bool),
        (NonZeroU64::new(21 * MIB), |key| key.sample_id.as_str().ends_with(":1")),
    ] {
        for shared in [false, true] {
            let link = NoViews::refusing(memory.clone(), refused);
            let mut config = RolloutConfig::default().take(heap.clone());
            config.chunk_bytes = chunk;
            config.host_share = shared.then(|| share.clone());
            let over = rollouts(link.clone(), config);
            let handle = over.put(text(40 * MIB)).await.unwrap();
            let moved = || link.moved.swap(0, Ordering::SeqCst);
            moved();
            let sample = over.get(&handle).await.unwrap();
            assert!(same_rollout(&text(40 * MIB), &sample.rollout().unwrap()));
            // What others hold may have come for nothing, once.
            let (all, root) = (handle.data_bytes(), 64 << 10);
            let read = moved();
            let most = if chunk.is_some() { all + 21 * MIB } else { all } + root;
            assert!((all..=most).contains(&read), "{read} bytes for {all}");
            drop(sample);
            // The second read of a row's bytes finds them where the first had to read all.
            let rows = over.get_rows(&handle, &["tokens"], &[3], None).await.unwrap();
            assert!(!rows.fields["tokens"].rows[0].as_ref().unwrap().is_empty());
            let read = moved();
            assert!(read <= all + root, "{read} bytes for a row of {all}");
            drop(rows);
            let fields = over.get_fields(&handle, &["tokens", "rewards"]).await.unwrap();
            fields.view().ragged("tokens").unwrap();
            let read = moved();
            assert!(read <= most, "{read} bytes for two fields of {all}");
            drop(fields);
            over.cleanup([&handle]).await.unwrap();
            empty(&*memory).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranges_are_merged_capped_and_read_in_bulk_where_that_is_better() {
    let memory = memory(128 * MIB);
    let whole = text(16 * MIB);
    let rollout_codec::Column::Ragged(tokens) = &whole.non_tensor["tokens"] else { panic!() };
    let all: Vec<u64> = (0..tokens.rows()).collect();
    let odd: Vec<u64> = all.iter().copied().skip(1).step_by(2).collect();
    let limits =
        |merge_gap, max_fragments, bulk_part| ReadLimits { merge_gap, max_fragments, bulk_part };
    // Rows, limits, ranges, and whether one read of all of them is better.
    let odd_count = odd.len() as u64;
    for (rows, reads, ranges, bulk) in [
        (&all, limits(0, 4096, 0.5), 1, false),
        (&odd, limits(0, 4096, 2.0), odd_count, false),
        (&odd, limits(0, 3, 2.0), 3, false),
        (&odd, limits(u64::MAX, 4096, 2.0), 1, false),
        (&odd, limits(0, 4096, 0.1), odd_count, true),
    ] {
        for chunk in [None, NonZeroU64::new(MIB)] {
            let mut config = RolloutConfig::default().reads(reads);
            config.chunk_bytes = chunk;
            let over = rollouts(NoViews::new(memory.clone()), config);
            let handle = over.put(text(16 * MIB)).await.unwrap();
            let set = over.get_rows(&handle, &["tokens"], rows, None).await.unwrap();
            for (row, found) in rows.iter().zip(&set.fields["tokens"].rows) {
                assert_eq!(found.as_ref().unwrap().as_ref(), tokens.row(*row as usize).unwrap());
            }
            let stats = over.stats();
            // One range more for the offsets.
            assert_eq!((stats.ranges, stats.bulk_reads), (ranges + 1, bulk.into()), "{reads:?}");
            assert_eq!(stats.copied_bytes, 0);
            drop(set);
            over.cleanup([&handle]).await.unwrap();
            empty(&*memory).await;
        }
    }
}

/// Nulls are nulls, and numbers that the producer narrowed are the field's own, also row by row.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_narrowed_fields_and_null_numbers() {
    let memory = memory(64 * MIB);
    for can in [Can::Views, Can::Ranges, Can::WholeSamples] {
        let encoding = native::Options::default()
            .narrow("tokens", Dtype::Uint32)
            .narrow("sample_indices", Dtype::Int16);
        let over = over(&memory, can, RolloutConfig::default().encoding(encoding));
        let mut rollout = text(2 * MIB);
        let rows = rollout.rows().unwrap() as usize;
        let mut nulls = vec![false; rows];
        nulls[1] = true;
        let numbers = (0..rows as i64).flat_map(|n| (n * !nulls[n as usize] as i64).to_le_bytes());
        let column = Scalars::with_nulls(Dtype::Int64, numbers.collect::<Vec<u8>>(), nulls.clone());
        rollout.non_tensor.insert("sample_indices".into(), Column::Scalars(column.unwrap()));
        let Column::Ragged(tokens) = rollout.non_tensor["tokens"].clone() else { panic!() };
        let handle = over.put(rollout).await.unwrap();
        let steps = [3..9, 0..2, 1..1];
        let fields = ["tokens", "sample_indices"];
        let set = over.get_rows(&handle, &fields[..1], &[2, 0, 1], Some(&steps)).await.unwrap();
        let found = &set.fields["tokens"];
        assert_eq!(found.dtype, Some(Dtype::Int64));
        assert_eq!(found.rows[0].as_ref().unwrap().as_ref(), &tokens.row(2).unwrap()[24..72]);
        assert_eq!(found.rows[1].as_ref().unwrap().as_ref(), &tokens.row(0).unwrap()[..16]);
        assert!(found.rows[2].as_ref().unwrap().is_empty());
        let set = over.get_rows(&handle, &fields, &[1, 2], None).await.unwrap();
        assert_eq!(set.fields["tokens"].rows[0].as_ref().unwrap().as_ref(), tokens.row(1).unwrap());
        let indices = &set.fields["sample_indices"].rows;
        assert!(indices[0].is_none(), "null, and no 0");
        assert_eq!(indices[1].as_ref().unwrap().as_ref(), 2i64.to_le_bytes());
        drop(set);
        over.cleanup([&handle]).await.unwrap();
        empty(&*memory).await;
    }
}

/// While a part is sent the next one is gathered, and never more than the configured number wait.
#[tokio::test]
async fn gathering_and_sending_overlap() {
    let rollout = text(8 * MIB);
    let parts = native::Plan::new(&rollout, &Options::default()).unwrap().parts(MIB).len();
    let put = async |patience, in_flight| {
        let link = SlowLink::new(memory(64 * MIB), parts, patience);
        let config = RolloutConfig::default().chunks(NonZeroU64::new(MIB).unwrap(), in_flight);
        rollouts(link.clone(), config).put(rollout.clone()).await.unwrap();
        link.sent()
    };
    for in_flight in [2, 3] {
        let sent = put(Duration::from_secs(20), in_flight).await;
        assert_eq!(sent.overlapped, parts - 1, "each but the last: {sent:?}");
        assert!((2..=in_flight).contains(&sent.most), "{sent:?}");
    }
    let sent = put(Duration::from_millis(5), 1).await;
    assert_eq!((sent.overlapped, sent.most), (0, 1), "one at a time");
}
