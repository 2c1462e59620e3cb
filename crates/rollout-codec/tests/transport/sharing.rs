//! One copy for all readers of a process, and for all processes of a host.

use std::sync::Arc;

use rollout_codec::transport::{HostShare, RolloutConfig, RolloutTransport};
use transport_core::Transport;

use crate::support::{MIB, NoViews, empty, memory, rollouts, text};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_of_a_process_share_one_copy() {
    let memory = memory(64 * MIB);
    let over = rollouts(NoViews::new(memory.clone()), RolloutConfig::default());
    let handle = over.put(text(4 * MIB)).await.unwrap();
    let reads = (0..8).map(|_| {
        let (over, handle) = (over.clone(), handle.clone());
        tokio::spawn(async move { over.get(&handle).await.unwrap() })
    });
    let reads: Vec<_> = reads.collect();
    let mut samples = Vec::new();
    for read in reads {
        samples.push(read.await.unwrap());
    }
    let start = |sample: &rollout_codec::transport::Sample| {
        sample.view().ragged("tokens").unwrap().row(0).unwrap().bytes().as_ptr()
    };
    assert!(samples.iter().all(|sample| start(sample) == start(&samples[0])));
    let stats = over.stats();
    assert_eq!(stats.fetched_bytes, handle.data_bytes(), "read once");
    assert_eq!(stats.shared_bytes, 7 * handle.data_bytes());
    drop(samples);
    over.cleanup([&handle]).await.unwrap();
    empty(&*memory).await;
}

fn sharing(transport: Arc<dyn Transport>, share: &HostShare) -> RolloutTransport {
    rollouts(transport, RolloutConfig::default().host_share(share.clone()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_of_a_host_share_one_copy() {
    let folder = tempfile::tempdir().unwrap();
    let share = HostShare::new(folder.path().join("share")).unwrap();
    let files = || std::fs::read_dir(folder.path().join("share")).unwrap().count();
    let memory = memory(64 * MIB);
    let copies = NoViews::new(memory.clone());
    // Transports of their own stand for processes: they share nothing but the folder.
    let first = sharing(copies.clone(), &share);
    let second = sharing(copies.clone(), &share);
    let third = sharing(copies, &share);
    let handle = first.put(text(4 * MIB)).await.unwrap();
    let a = first.get(&handle).await.unwrap();
    let b = second.get(&handle).await.unwrap();
    assert_eq!(first.stats().fetched_bytes, handle.data_bytes());
    assert_eq!(
        (second.stats().fetched_bytes, second.stats().shared_bytes),
        (0, handle.data_bytes())
    );
    // The first goes: the second has it still, and gives it to the third.
    drop(a);
    assert_eq!(files(), 1);
    let c = third.get(&handle).await.unwrap();
    assert_eq!(third.stats().fetched_bytes, 0);
    b.view().verify(1).unwrap();
    // Some fields or rows are found as well where somebody has all.
    let fourth = sharing(NoViews::new(memory.clone()), &share);
    let rows = fourth.get_rows(&handle, &["tokens"], &[1], None).await.unwrap();
    assert!(rows.fields["tokens"].rows[0].as_ref().unwrap().as_ref().len() > 8);
    drop(fourth.get_fields(&handle, &["loss_masks"]).await.unwrap());
    assert_eq!(fourth.stats().fetched_bytes, 0);
    drop(rows);
    drop(b);
    c.view().verify(1).unwrap();
    drop(c);
    assert_eq!(files(), 0, "nobody has it");
    let rows = fourth.get_rows(&handle, &["tokens"], &[1], None).await.unwrap();
    let read = fourth.stats().fetched_bytes;
    assert!(0 < read && read < handle.data_bytes() / 2, "and nobody reads all for one row");
    drop(rows);
    assert_eq!(files(), 0);
    let again = third.get(&handle).await.unwrap();
    assert_eq!(third.stats().fetched_bytes, handle.data_bytes());
    drop(again);
    third.cleanup([&handle]).await.unwrap();
    empty(&*memory).await;
    assert_eq!(files(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_died_with_the_copy_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let share = HostShare::new(folder.path()).unwrap();
    let memory = memory(64 * MIB);
    let over = sharing(NoViews::new(memory.clone()), &share);
    let handle = over.put(text(MIB)).await.unwrap();
    drop(over.get(&handle).await.unwrap());
    let other = sharing(NoViews::new(memory.clone()), &share);
    let sample = other.get(&handle).await.unwrap();
    let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    // A process that is gone, a descriptor that is something else, and no line at all.
    let line = std::fs::read_to_string(&file).unwrap();
    drop(sample);
    let own = format!("\"pid\":{},", std::process::id());
    let dead = line.replace(&own, "\"pid\":4194305,");
    let other_file = line.replace("\"ino\":", "\"ino\":9");
    assert!(dead != line && other_file != line);
    std::fs::write(&file, format!("{dead}{other_file}no line\n")).unwrap();
    let before = other.stats().fetched_bytes;
    let sample = other.get(&handle).await.unwrap();
    assert_eq!(other.stats().fetched_bytes - before, handle.data_bytes(), "read anew");
    sample.view().verify(1).unwrap();
    drop(sample);
    over.cleanup([&handle]).await.unwrap();
    empty(&*memory).await;
}

#[test]
fn a_folder_that_others_can_write_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let error = HostShare::new(folder.path()).unwrap_err();
    assert_eq!(error.kind(), transport_core::ErrorKind::PermissionDenied);
}
