//! Cleaning up: none, one or many, once, and never under a view.

use rollout_codec::transport::{Handle, RolloutConfig};
use transport_core::{ErrorKind, Transport};

use crate::support::{MIB, NoViews, empty, memory, rollouts, text};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn none_one_or_many_and_again() {
    let memory = memory(64 * MIB);
    let over = rollouts(memory.clone(), RolloutConfig::default());
    assert_eq!(over.cleanup(None).await.unwrap(), Default::default());
    let mut handles = Vec::new();
    for _ in 0..3 {
        handles.push(over.put(text(MIB)).await.unwrap());
    }
    assert_eq!(over.stats().outstanding, 3);
    let report = over.cleanup(Some(&handles[0])).await.unwrap();
    assert_eq!((report.removed, report.already_gone), (1, 0));
    let report = over.cleanup(&handles).await.unwrap();
    assert_eq!((report.removed, report.already_gone), (2, 1));
    let report = over.cleanup(&handles).await.unwrap();
    assert_eq!((report.removed, report.already_gone), (0, 3));
    empty(&*memory).await;
    assert_eq!(over.stats().outstanding, 0);
    let error = over.get(&handles[1]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cleanup_waits_for_the_last_view() {
    let memory = memory(64 * MIB);
    for transport in [memory.clone() as std::sync::Arc<dyn Transport>, NoViews::new(memory.clone())]
    {
        let over = rollouts(transport, RolloutConfig::default());
        let handle = over.put(text(MIB)).await.unwrap();
        let sample = over.get(&handle).await.unwrap();
        let row = sample.view().ragged("tokens").unwrap().row_region(2).unwrap();
        let before = row.as_ref().to_vec();
        drop(sample);
        let report = over.cleanup([&handle]).await.unwrap();
        assert_eq!((report.removed, report.deferred), (0, 1));
        assert_eq!(over.cleanup([&handle]).await.unwrap().deferred, 1, "still the same");
        assert_eq!(over.stats().outstanding, 0, "counted once");
        let error = over.get(&handle).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "nobody new may read it");
        // Whatever takes its place, the row stays.
        let other = over.put(text(MIB)).await.unwrap();
        assert_eq!(memory.health().await.unwrap().resident_samples, 4);
        assert_eq!(row.as_ref(), before);
        over.cleanup([&other]).await.unwrap();
        drop(row);
        empty(&*memory).await;
        assert_eq!(over.stats().leased, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_let_go_and_leave_it_to_others() {
    let memory = memory(64 * MIB);
    let producer = rollouts(memory.clone(), RolloutConfig::default());
    let readers: Vec<_> = (0..3)
        .map(|_| rollouts(std::sync::Arc::new(memory.client()), RolloutConfig::default()))
        .collect();
    let handle = producer.put(text(2 * MIB)).await.unwrap();
    let handle = Handle::parse(handle.to_json().unwrap().as_bytes()).unwrap();
    // One after the other: nobody's end is the end of the rollout.
    for reader in &readers {
        for _ in 0..3 {
            let sample = reader.get(&handle).await.unwrap();
            assert_eq!(sample.view().ragged("tokens").unwrap().len() as u64, handle.rows());
        }
    }
    for reader in &readers {
        reader.settle().await; // their holds have ended
    }
    let held = readers[0].get(&handle).await.unwrap();
    // A stranger removes it: the holder keeps it, nobody else gets it any more.
    assert_eq!(readers[1].cleanup([&handle]).await.unwrap().removed, 1);
    assert!(readers[2].get(&handle).await.is_err());
    assert_eq!(memory.health().await.unwrap().resident_samples, 2);
    assert_eq!(held.view().ragged("tokens").unwrap().row(0).unwrap().bytes().len(), 8 * 5354);
    drop(held);
    empty(&*memory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_and_ends_of_reads_do_not_overtake_each_other() {
    let memory = memory(64 * MIB);
    let over = rollouts(memory.clone(), RolloutConfig::default());
    let handle = over.put(text(MIB)).await.unwrap();
    let mut tasks = Vec::new();
    for _ in 0..4 {
        let (over, handle) = (over.clone(), handle.clone());
        tasks.push(tokio::spawn(async move {
            for _ in 0..100 {
                let sample = over.get(&handle).await.unwrap();
                tokio::task::yield_now().await;
                let tokens = sample.view().ragged("tokens").unwrap();
                assert_eq!(tokens.row(0).unwrap().bytes().len(), 8 * 5354);
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    over.cleanup([&handle]).await.unwrap();
    empty(&*memory).await;
}
