//! Producers that die between data and root, and what is removed of theirs.

use std::{fs, path::Path, sync::atomic::Ordering, time::Duration};

use rollout_codec::transport::{Journal, RolloutConfig, RolloutTransport};
use transport_core::{ErrorKind, Transport};

use crate::support::{Keyed, MIB, empty, memory, rollouts, text};

fn config(folder: &Path) -> RolloutConfig {
    let chunk = std::num::NonZeroU64::new(MIB).unwrap();
    RolloutConfig::default().chunks(chunk, 2).journal(Journal::new(folder).unwrap())
}

fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Puts until all data is written, and stops there for good, as a killed process does. Its journal
/// is still locked, for this process lives: a copy of it is what a dead one leaves.
async fn killed_before_its_root(store: &Keyed, over: &RolloutTransport, folder: &Path, name: &str) {
    store.dies_at_root.store(true, Ordering::SeqCst);
    let mut put = Box::pin(over.put_as(name, text(4 * MIB)));
    for _ in 0..1000 {
        let ended = tokio::time::timeout(Duration::from_millis(5), &mut put).await;
        assert!(ended.is_err(), "{ended:?}");
        let text = files(folder).pop().map(|file| fs::read_to_string(file).unwrap());
        // The line about the root is the last that is written before it.
        if let Some(text) = text.filter(|text| text.contains("featurestore_rollout")) {
            std::mem::forget(put);
            fs::write(folder.join("left"), text).unwrap();
            store.dies_at_root.store(false, Ordering::SeqCst);
            return;
        }
    }
    panic!("the put does not come to its root");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_killed_producer_left_is_swept_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let memory = memory(64 * MIB);
    let store = Keyed::new(memory.clone());
    let over = rollouts(store.clone(), config(folder.path()));
    // Lives, under the name that the dead one had as well.
    let alive = over.put_as("dp0/1", text(2 * MIB)).await.unwrap();
    assert!(files(folder.path()).is_empty(), "nothing is noted of a put that ended");
    let before = memory.health().await.unwrap().resident_samples;

    killed_before_its_root(&store, &over, folder.path(), "dp0/1").await;
    assert!(memory.health().await.unwrap().resident_samples > before);

    let sweeper = rollouts(store.clone(), config(folder.path()));
    let report = sweeper.sweep().await.unwrap();
    assert_eq!((report.swept, report.left), (1, 0), "one lives still: {report:?}");
    assert!(report.removed >= 4, "{report:?}");
    assert_eq!(memory.health().await.unwrap().resident_samples, before);
    let sample = over.get(&alive).await.unwrap();
    sample.view().verify(1).unwrap();
    drop(sample);
    assert_eq!(files(folder.path()).len(), 1, "of the put that is on its way");
    assert_eq!(sweeper.sweep().await.unwrap(), Default::default(), "again");
    over.cleanup([&alive]).await.unwrap();
    empty(&*memory).await;
}

/// Everything is written, and only the handle did not get out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_root_whose_handle_did_not_get_out_is_swept_with_its_data() {
    let folder = tempfile::tempdir().unwrap();
    let memory = memory(64 * MIB);
    let store = Keyed::new(memory.clone());
    let over = rollouts(store.clone(), config(folder.path()));
    let mut put = Box::pin(over.put_as("dp0/1", text(4 * MIB)));
    let mut journal = String::new();
    let handle = loop {
        let ended = tokio::time::timeout(Duration::from_micros(200), &mut put).await;
        if let Some(file) = files(folder.path()).pop()
            && let Ok(text) = fs::read_to_string(file)
            && text.contains("featurestore_rollout")
        {
            journal = text;
        }
        if let Ok(ended) = ended {
            break ended.unwrap();
        }
    };
    if journal.is_empty() {
        // Too fast to be seen: as the journal has it.
        journal = handle.to_json().unwrap() + "\n";
    }
    fs::write(folder.path().join("left"), journal).unwrap();
    let report = over.sweep().await.unwrap();
    assert_eq!((report.swept, report.left), (1, 0), "{report:?}");
    let error = over.get(&handle).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn puts_that_fail_or_are_dropped_leave_no_journal() {
    let folder = tempfile::tempdir().unwrap();
    let memory = memory(4 * MIB);
    let store = Keyed::new(memory.clone());
    let short = config(folder.path()).deadline(Duration::from_millis(300));
    let over = rollouts(store.clone(), short);
    assert!(over.put(text(8 * MIB)).await.is_err());
    assert!(files(folder.path()).is_empty());
    let over = rollouts(store.clone(), config(folder.path()));
    for micros in 0..20 {
        let put = over.put(text(2 * MIB));
        if let Ok(done) = tokio::time::timeout(Duration::from_micros(300 * micros), put).await {
            over.cleanup([&done.unwrap()]).await.unwrap();
        }
        empty(&*memory).await;
    }
    for _ in 0..400 {
        if files(folder.path()).is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(files(folder.path()).is_empty(), "{:?}", files(folder.path()));
    assert_eq!(over.sweep().await.unwrap(), Default::default());
}

#[tokio::test]
async fn a_sweep_needs_a_journal_and_goes_on_past_what_is_no_entry() {
    let folder = tempfile::tempdir().unwrap();
    let store = Keyed::new(memory(MIB));
    let error = rollouts(store.clone(), RolloutConfig::default()).sweep().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConfigInvalid);
    let over = rollouts(store, config(folder.path()));
    fs::write(folder.path().join("cut"), "{\"half").unwrap();
    assert_eq!(over.sweep().await.unwrap().swept, 1, "an unfinished line was about nothing");
    fs::write(folder.path().join("bad"), "no line\n").unwrap();
    fs::create_dir(folder.path().join("folder")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, folder.path().join("pipe"), 0o600.into()).unwrap();
    for name in ["a", "z"] {
        fs::write(folder.path().join(name), "{\"half").unwrap();
    }
    let report = over.sweep().await.unwrap();
    assert_eq!((report.swept, report.unreadable.len()), (2, 3), "{report:?}");
    for name in ["bad", "folder", "pipe"] {
        let told = |problem: &&String| problem.contains(&format!("/{name}"));
        let problem = report.unreadable.iter().find(told).expect("it is named");
        assert!(problem.contains("remove it if"), "what to do: {problem}");
        assert!(folder.path().join(name).exists(), "nobody's to remove");
    }
}
