//! What a store does when it does not do as it should, scripted.

mod fake;

use std::{sync::Arc, time::Duration};

use fake::{Calls, Cluster, FakeStore, Fault};
use indexmap::IndexMap;
use mooncake_sys::StoreApi;
use transport_core::{
    ByteSize, Descriptor, Destination, Dtype, ErrorKind, FeatureDescriptor, FeatureName,
    FetchOptions, FetchRequest, Fetched, Generation, Location, Publication, PublishOptions, Ready,
    RegionMut, RegionSlice, Release, Result, SampleId, SampleKey, StoreId, Tensor, TensorMeta,
    Transport,
};
use transport_mooncake_store::{Layout, StoreConfig, StoreTransport};

const NAMES: [&str; 4] = ["hidden_states", "target", "input_ids", "loss_mask"];

struct Bed {
    cluster: Arc<Cluster>,
    client: Arc<FakeStore>,
    transport: Arc<StoreTransport>,
}

fn bed_with(change: impl FnOnce(&mut StoreConfig)) -> Bed {
    let cluster = Cluster::new();
    let mut config = StoreConfig::default().pool(ByteSize::mib(16), ByteSize::mib(16));
    config.backoff = Duration::from_millis(1);
    config.removal_patience = Duration::from_millis(50);
    change(&mut config);
    let client = cluster.client();
    let transport = Arc::new(StoreTransport::start(client.clone(), config).unwrap());
    Bed { cluster, client, transport }
}

fn bed() -> Bed {
    bed_with(|_| {})
}

fn sample(id: &str) -> SampleKey {
    SampleKey::new(StoreId::new("s").unwrap(), SampleId::new(id).unwrap(), Generation(1))
}

fn bytes_of(id: &str, tensor: &str, len: usize) -> Vec<u8> {
    let seed = id.bytes().chain(tensor.bytes()).fold(7u8, |a, b| a.wrapping_mul(31) ^ b);
    (0..len).map(|i| seed.wrapping_add(i as u8)).collect()
}

fn metas() -> [(FeatureName, TensorMeta); 4] {
    let meta = |dtype, n| TensorMeta::new(dtype, [1u64, n]).unwrap();
    let metas = [
        meta(Dtype::Bfloat16, 500),
        meta(Dtype::Bfloat16, 100),
        meta(Dtype::Int64, 10),
        meta(Dtype::Int64, 10),
    ];
    let mut names = NAMES.iter().map(|n| FeatureName::new(n).unwrap());
    metas.map(|meta| (names.next().unwrap(), meta))
}

fn publication(id: &str) -> Publication {
    let tensors = metas().into_iter().map(|(name, meta)| {
        let bytes = bytes_of(id, name.as_str(), meta.nbytes() as usize);
        let data = RegionSlice::copy_of(&bytes);
        (name, Tensor::new(meta, data).unwrap())
    });
    Publication::new(sample(id), tensors.collect(), Ready::Now)
}

impl Bed {
    async fn publish(&self, ids: &[&str]) -> Result<Vec<Arc<Descriptor>>> {
        self.publish_with(ids, PublishOptions::default()).await
    }

    async fn publish_with(
        &self,
        ids: &[&str],
        options: PublishOptions,
    ) -> Result<Vec<Arc<Descriptor>>> {
        let batch = ids.iter().map(|id| publication(id)).collect();
        let described = self.transport.publish(batch, options).await?;
        Ok(described.into_iter().map(Arc::new).collect())
    }

    async fn fetch(&self, descriptors: &[Arc<Descriptor>]) -> Result<Vec<Fetched>> {
        self.fetch_within(descriptors, Duration::from_secs(20)).await
    }

    async fn fetch_within(
        &self,
        descriptors: &[Arc<Descriptor>],
        deadline: Duration,
    ) -> Result<Vec<Fetched>> {
        let request = |d: &Arc<Descriptor>| FetchRequest::new(d.clone(), Destination::Pool);
        let options = FetchOptions::default().deadline(deadline);
        self.transport.fetch(descriptors.iter().map(request).collect(), options).await
    }

    async fn release(&self, descriptors: &[Arc<Descriptor>]) -> transport_core::ReleaseReport {
        let releases = descriptors.iter().map(|d| Release::from(d.clone())).collect();
        self.transport.release(releases).await.unwrap()
    }
}

fn check(fetched: &[Fetched]) {
    for sample in fetched {
        let id = sample.descriptor.sample.sample_id.as_str();
        for (name, tensor) in &sample.tensors {
            let want = bytes_of(id, name.as_str(), tensor.meta.nbytes() as usize);
            assert!(tensor.data.as_bytes().unwrap() == want, "{id}/{name} differs");
        }
    }
}

#[tokio::test]
async fn objects_are_raw_bytes_under_the_keys_that_others_read() {
    let bed = bed();
    let described = bed.publish(&["run:t1"]).await.unwrap();
    let keys = bed.cluster.keys();
    assert_eq!(
        keys,
        [
            "s/run:t1/g1/hidden_states",
            "s/run:t1/g1/input_ids",
            "s/run:t1/g1/loss_mask",
            "s/run:t1/g1/target"
        ]
    );
    for key in &keys {
        let name = key.rsplit('/').next().unwrap();
        let value = bed.cluster.value(key).unwrap();
        assert_eq!(value, bytes_of("run:t1", name, value.len()), "{key}: bytes and nothing else");
    }
    assert!(bed.cluster.all_hard_pinned());
    check(&bed.fetch(&described).await.unwrap());

    // What an older publisher in another process wrote, described without lives.
    let meta = TensorMeta::new(Dtype::Uint8, [3]).unwrap();
    bed.cluster.place("s/other/g1/x", &[1, 2, 3]);
    let feature = FeatureDescriptor::new(meta, None, None);
    let features = IndexMap::from([(FeatureName::new("x").unwrap(), feature)]);
    let other = Descriptor::new(sample("other"), features, None, Location::Store).unwrap();
    let fetched = bed.fetch(&[Arc::new(other)]).await.unwrap();
    assert_eq!(fetched[0].tensors["x"].data.as_bytes().unwrap(), [1, 2, 3]);
}

#[tokio::test]
async fn the_hot_path_registers_nothing_and_makes_batch_calls() {
    let bed = bed();
    let registered = bed.transport.stats().registrations;
    let before = bed.cluster.calls();
    let ids: Vec<String> = (0..32).map(|i| format!("r:{i}")).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let described = bed.publish(&ids).await.unwrap();
    check(&bed.fetch(&described).await.unwrap());
    assert_eq!(bed.release(&described).await.released, 32);
    let after = bed.cluster.calls();
    assert_eq!(
        after,
        Calls {
            put: before.put + 1,
            put_keys: before.put_keys + 128,
            get: before.get + 1,
            get_keys: before.get_keys + 128,
            exists: before.exists + 2,
            remove: before.remove + 1,
            remove_keys: before.remove_keys + 128,
            ..before
        }
    );
    assert_eq!(bed.transport.stats().registrations, registered, "none after the first");
    assert_eq!(bed.cluster.keys(), [""; 0]);
}

#[tokio::test]
async fn sources_in_registered_memory_are_not_copied() {
    for layout in [Layout::PerTensor, Layout::Grouped { below: ByteSize::mib(1) }] {
        let bed = bed_with(|c| c.layout = layout);
        let metas = metas();
        let regions = bed.transport.take_sample(&sample("a"), &metas).unwrap();
        let mut tensors = IndexMap::new();
        for ((name, meta), mut region) in metas.into_iter().zip(regions) {
            let bytes = bytes_of("a", name.as_str(), region.len());
            region.as_mut_bytes().unwrap().copy_from_slice(&bytes);
            tensors.insert(name, Tensor::new(meta, region.freeze()).unwrap());
        }
        let batch = vec![Publication::new(sample("a"), tensors, Ready::Now)];
        let described = bed.transport.publish(batch, PublishOptions::default()).await.unwrap();
        let described = Arc::new(described.into_iter().next().unwrap());
        check(&bed.fetch(&[described]).await.unwrap());
        assert_eq!(bed.transport.stats().copied_bytes, 0, "{layout:?}");
        let objects = if layout == Layout::PerTensor { 4 } else { 1 };
        assert_eq!(bed.cluster.keys().len(), objects);
    }
}

#[tokio::test]
async fn memory_of_the_caller_is_registered_once_and_filled_in_place() {
    let bed = bed();
    let described = bed.publish(&["a"]).await.unwrap();
    let copied = bed.transport.stats().copied_bytes;
    let ranges = bed.client.registered_ranges();
    let mut regions = Vec::new();
    for (_, meta) in metas() {
        let region = RegionMut::zeroed(meta.nbytes() as usize).unwrap();
        regions.push(bed.transport.register(region).unwrap());
    }
    assert_eq!(bed.client.registered_ranges(), ranges + 4);
    let addresses: Vec<_> = regions.iter().map(RegionMut::address).collect();
    let request = FetchRequest::new(described[0].clone(), Destination::Into(regions));
    let fetched = bed.transport.fetch(vec![request], FetchOptions::default()).await.unwrap();
    check(&fetched);
    let found: Vec<_> = fetched[0].tensors.values().map(|t| t.data.address()).collect();
    assert_eq!(found, addresses);
    assert_eq!(bed.transport.stats().copied_bytes, copied);
    drop(fetched);
    assert_eq!(bed.client.registered_ranges(), ranges, "taken back with the last handle");
}

#[tokio::test]
async fn parts_of_registered_memory_are_not_registered_again() {
    let bed = bed();
    let before = bed.client.registered_ranges();
    let whole = bed.transport.register(RegionMut::zeroed(4096).unwrap()).unwrap();
    let (head, tail) = whole.split_at(1000).unwrap();
    let address = tail.address();
    let tail = bed.transport.register(tail).unwrap();
    assert_eq!((tail.address(), bed.client.registered_ranges()), (address, before + 1));
    drop(tail);
    assert_eq!(bed.client.registered_ranges(), before + 1, "the head is still there");
    drop(head);
    assert_eq!(bed.client.registered_ranges(), before);
}

#[tokio::test]
async fn a_registration_that_fails_is_an_error_and_no_memory() {
    let bed = bed();
    bed.cluster.script([Fault::Call("register", ErrorKind::Unexpected)]);
    let error = bed.transport.register(RegionMut::zeroed(100).unwrap()).unwrap_err();
    assert_eq!(error.context("bytes"), Some("100"), "{error}");
}

#[tokio::test]
async fn an_expired_lease_and_a_failed_transfer_are_read_again_elsewhere() {
    for code in [-707, -800] {
        let bed = bed();
        let described = bed.publish(&["a", "b"]).await.unwrap();
        bed.cluster
            .script([Fault::Get("a/g1/hidden_states", code), Fault::Get("b/g1/target", code)]);
        let keys = bed.cluster.calls().get_keys;
        let fetched = bed.fetch(&described).await.unwrap();
        // The late peers of the failed reads have written by now, with the second call.
        check(&fetched);
        assert_eq!(bed.cluster.calls().get_keys, keys + 8 + 2, "only the failed keys again");
        assert_eq!(bed.transport.stats().read_retries, 2);
        let health = bed.transport.health().await.unwrap();
        assert_eq!(health.quarantined_bytes, 1000 + 200);
        for _ in 0..20 {
            check(&bed.fetch(&described).await.unwrap()); // never given out again
        }
        check(&fetched);
        bed.transport.close().await.unwrap();
        assert!(bed.client.is_closed());
    }
}

#[tokio::test]
async fn reads_that_keep_failing_end_with_key_code_and_count() {
    let bed = bed();
    let described = bed.publish(&["a", "b"]).await.unwrap();
    bed.cluster.script(vec![Fault::Get("/target", -707); 8]);
    let error = bed.fetch(&described).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
    assert_eq!(error.context("key"), Some("s/a/g1/target"));
    assert_eq!(error.context("failed_keys"), Some("2"));
    assert_eq!(error.context("attempts"), Some("4"));
    assert!(error.to_string().contains("default_kv_lease_ttl"), "{error}");
    assert_eq!(bed.cluster.faults_left(), 0);
    check(&bed.fetch(&described).await.unwrap()); // usable afterwards
}

#[tokio::test]
async fn quarantine_is_bounded() {
    let bed = bed_with(|c| c.max_quarantined = ByteSize::new(500).unwrap());
    let described = bed.publish(&["a"]).await.unwrap();
    bed.cluster.script([Fault::Get("hidden_states", -800)]);
    let error = bed.fetch(&described).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CapacityExceeded, "{error}");
    assert_eq!(error.context("quarantined_bytes"), Some("1000"));
}

#[tokio::test]
async fn a_read_that_outlasts_its_lease_is_not_trusted() {
    let bed = bed_with(|c| c.read_lease = Some(Duration::from_millis(60)));
    let described = bed.publish(&["a", "b", "c"]).await.unwrap();
    bed.cluster.script([Fault::Slow(Duration::from_millis(80))]);
    check(&bed.fetch(&described).await.unwrap());
    assert_eq!(bed.transport.stats().read_retries, 12, "the whole call, however it answered");
}

#[tokio::test]
async fn another_length_is_never_data() {
    for (found, kind) in
        [(0, ErrorKind::ShortRead), (500, ErrorKind::ShortRead), (1001, ErrorKind::Corrupt)]
    {
        let bed = bed();
        let described = bed.publish(&["a"]).await.unwrap();
        bed.cluster.script([Fault::GetLen("hidden_states", found)]);
        let error = bed.fetch(&described).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(error.context("key"), Some("s/a/g1/hidden_states"));
        assert_eq!(error.context("expected"), Some("1000"));
        assert_eq!(error.context("found"), Some(found.to_string().as_str()));
    }
    let bed = bed();
    let described = bed.publish(&["a"]).await.unwrap();
    bed.release(&described).await;
    bed.cluster.place("s/a/g1/hidden_states", &[0; 2000]); // longer: the store answers -600
    let error = bed.fetch(&described).await.unwrap_err();
    assert_eq!((error.kind(), error.context("found")), (ErrorKind::Corrupt, Some("2000")));
}

#[tokio::test]
async fn a_key_is_read_once_a_call() {
    // Mooncake fills one of two destinations of the same key and answers success for both.
    let bed = bed();
    let described = bed.publish(&["a"]).await.unwrap();
    let own = || metas().map(|(_, m)| RegionMut::zeroed(m.nbytes() as usize).unwrap()).into();
    let requests = vec![
        FetchRequest::new(described[0].clone(), Destination::Pool),
        FetchRequest::new(described[0].clone(), Destination::Into(own())),
        FetchRequest::new(described[0].clone(), Destination::Into(own())),
        FetchRequest::new(described[0].clone(), Destination::Pool),
    ];
    let fetched = bed.transport.fetch(requests, FetchOptions::default()).await.unwrap();
    assert_eq!(fetched.len(), 4);
    check(&fetched);
    assert_eq!(bed.cluster.calls().get_keys, 4);

    let name = FeatureName::new("hidden_states").unwrap();
    let feature =
        |n| FeatureDescriptor::new(TensorMeta::new(Dtype::Uint8, [n]).unwrap(), None, None);
    let other = |n| {
        let features = IndexMap::from([(name.clone(), feature(n))]);
        Arc::new(Descriptor::new(sample("a"), features, None, Location::Store).unwrap())
    };
    let error = bed.fetch(&[other(1000), other(999)]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
}

#[tokio::test]
async fn one_failed_object_undoes_the_batch() {
    let bed = bed();
    bed.publish(&["old"]).await.unwrap();
    let keys = bed.cluster.keys();
    for (fault, kind, key) in [
        (Fault::Put("b/g1/input_ids", -600), ErrorKind::InvalidInput, "s/b/g1/input_ids"),
        (Fault::PutHalf("a/g1/target"), ErrorKind::Unexpected, "s/a/g1/target"),
    ] {
        bed.cluster.script([fault]);
        let error = bed.publish(&["a", "b"]).await.unwrap_err();
        assert_eq!((error.kind(), error.context("key")), (kind, Some(key)), "{error}");
        assert_eq!(bed.cluster.keys(), keys, "nothing of the batch stays");
    }
    let error = bed.publish(&["new", "old"]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    assert_eq!(bed.cluster.keys(), keys, "neither the new one, nor one less");
    check(&bed.fetch(&bed.publish(&["a", "b"]).await.unwrap()).await.unwrap());
}

#[tokio::test]
async fn another_writers_object_is_never_removed() {
    let bed = bed_with(|c| c.part_keys = 5);
    // The second call of two fails at its second key; the third sample is never tried.
    bed.cluster.script([Fault::Put("b/g1/input_ids", -705)]);
    let error = bed.publish(&["a", "b", "c"]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
    assert_eq!(bed.cluster.keys(), ["s/b/g1/input_ids"], "theirs stays, ours is gone");
}

#[tokio::test]
async fn a_write_that_fails_for_a_moment_is_repeated() {
    let bed = bed();
    bed.cluster.script([Fault::Put("target", -800), Fault::Put("input_ids", -901)]);
    let described = bed.publish(&["a"]).await.unwrap();
    check(&bed.fetch(&described).await.unwrap());
}

#[tokio::test]
async fn a_full_store_waits_for_a_release_and_then_gives_up() {
    let bed = bed();
    bed.cluster.set_capacity(1360 * 2);
    let described = bed.publish(&["a", "b"]).await.unwrap();
    let options = PublishOptions::default().deadline(Duration::from_millis(300));
    let error = bed.publish_with(&["c"], options).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CapacityExceeded, "{error}");
    assert!(error.context("requested_bytes").is_some());
    assert_eq!(bed.cluster.keys().len(), 8, "nothing of it stays");

    let waiting = bed.publish(&["c"]);
    let releasing = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        bed.release(&described[..1]).await
    };
    let (published, released) = tokio::join!(waiting, releasing);
    assert_eq!(released.released, 1);
    check(&bed.fetch(&published.unwrap()).await.unwrap());
}

#[tokio::test]
async fn a_dropped_publish_leaves_nothing() {
    let bed = bed();
    bed.cluster.set_capacity(1360);
    let held = bed.publish(&["a"]).await.unwrap();
    let waiting = tokio::time::timeout(Duration::from_millis(50), bed.publish(&["b"])).await;
    assert!(waiting.is_err(), "there is no room");
    bed.release(&held).await;
    for _ in 0..500 {
        tokio::time::sleep(Duration::from_millis(2)).await;
        if bed.cluster.keys().is_empty() {
            break;
        }
    }
    assert_eq!(bed.cluster.keys(), [""; 0]);
    check(&bed.fetch(&bed.publish(&["b"]).await.unwrap()).await.unwrap());
}

#[tokio::test]
async fn what_cannot_be_removed_is_kept_in_mind_and_removed_later() {
    let bed = bed();
    let described = bed.publish(&["a", "b"]).await.unwrap();
    bed.cluster.script(vec![Fault::Remove("a/g1/target", -714); 20]);
    let exists = bed.cluster.calls().exists;
    let report = bed.release(&described).await;
    assert_eq!((report.released, report.unconfirmed), (1, 1), "{report:?}");
    assert_eq!(bed.cluster.calls().exists, exists, "looking would renew the lease in the way");
    assert_eq!(bed.cluster.keys(), ["s/a/g1/target"]);
    assert_eq!(bed.transport.stats().pending_removals, 1);

    let drained = bed.transport.drain_removals(Duration::from_millis(3)).await.unwrap();
    assert_eq!((drained.removed, drained.remaining), (0, 1));
    assert_eq!(drained.remaining_keys, ["s/a/g1/target"]);
    let drained = bed.transport.drain_removals(Duration::from_secs(5)).await.unwrap();
    assert_eq!((drained.removed, drained.remaining), (1, 0));
    let health = bed.transport.health().await.unwrap();
    assert_eq!((health.published_samples, health.released_samples), (2, 2));
}

#[tokio::test]
async fn a_pending_removal_never_takes_a_newer_life() {
    let bed = bed();
    let described = bed.publish(&["a"]).await.unwrap();
    bed.cluster.script([Fault::Call("remove", ErrorKind::PeerGone); 1]);
    bed.cluster.script(vec![Fault::Remove("a/g1", -900); 40]);
    assert_eq!(bed.release(&described).await.unconfirmed, 1);
    let again = bed.publish(&["a"]).await.unwrap(); // first the old, then the new
    assert_eq!(bed.transport.stats().pending_removals, 0);
    let drained = bed.transport.drain_removals(Duration::from_secs(1)).await.unwrap();
    assert_eq!(drained.removed, 0);
    check(&bed.fetch(&again).await.unwrap());
    assert_eq!(bed.transport.release(vec![described[0].clone().into()]).await.unwrap().stale, 1);
    check(&bed.fetch(&again).await.unwrap());
    let stale = bed.fetch(&described).await.unwrap_err();
    assert_eq!(stale.kind(), ErrorKind::Stale, "{stale}");
}

#[tokio::test]
async fn close_reports_what_it_could_not_remove() {
    let bed = bed();
    let described = bed.publish(&["a"]).await.unwrap();
    bed.cluster.script(vec![Fault::Remove("target", -706); 1000]);
    assert_eq!(bed.release(&described).await.unconfirmed, 1);
    let error = bed.transport.close().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert_eq!(error.context("keys"), Some("s/a/g1/target"));
    assert!(bed.client.is_closed(), "but closed it is");
    bed.transport.close().await.unwrap();
    assert_eq!(bed.fetch(&described).await.unwrap_err().kind(), ErrorKind::Closed);
}

#[tokio::test]
async fn gone_counts_as_removed() {
    let bed = bed();
    let described = bed.publish(&["a"]).await.unwrap();
    bed.cluster.lose_everything();
    assert_eq!(bed.release(&described).await.already_gone, 1);
    assert_eq!(bed.transport.stats().pending_removals, 0);
    let error = bed.fetch(&described).await.unwrap_err();
    assert_eq!((error.kind(), error.context("code")), (ErrorKind::NotFound, Some("-704")));
}

#[tokio::test]
async fn health_notices_what_others_released() {
    let bed = bed();
    let described = bed.publish(&["a", "b"]).await.unwrap();
    let config = StoreConfig::default();
    let trainer = StoreTransport::start(bed.cluster.client(), config).unwrap();
    let report = trainer.release(vec![described[0].clone().into()]).await.unwrap();
    assert_eq!(report.released, 1);
    let health = bed.transport.health().await.unwrap();
    assert_eq!((health.resident_samples, health.released_samples), (1, 1));
    assert_eq!(health.resident_bytes, 1360);
}

#[tokio::test]
async fn a_closing_publisher_waits_for_its_consumers() {
    let bed = bed_with(|c| c.close_linger = Duration::from_secs(20));
    let described = bed.publish(&["a"]).await.unwrap();
    let trainer = StoreTransport::start(bed.cluster.client(), StoreConfig::default()).unwrap();
    let consuming = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!bed.client.is_closed(), "the sample would be lost");
        trainer.release(vec![described[0].clone().into()]).await.unwrap();
    };
    let (closed, ()) = tokio::join!(bed.transport.close(), consuming);
    closed.unwrap();
    assert!(bed.client.is_closed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hung_peer_costs_a_deadline_and_memory_until_it_answers() {
    let bed = bed();
    let described = bed.publish(&["a"]).await.unwrap();
    bed.cluster.hang(true);
    let error = bed.fetch_within(&described, Duration::from_millis(100)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    let health = bed.transport.health().await.unwrap();
    assert_eq!(health.quarantined_bytes, 1360, "the peer may still write");
    bed.cluster.hang(false);
    for _ in 0..500 {
        if bed.transport.health().await.unwrap().quarantined_bytes == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(bed.transport.health().await.unwrap().quarantined_bytes, 0);
    check(&bed.fetch(&described).await.unwrap());
}

#[tokio::test]
async fn large_calls_are_cut_by_bytes_and_keys() {
    let bed = bed_with(|c| {
        c.part_keys = 5;
        c.part_bytes = ByteSize::new(1100).unwrap();
    });
    let described = bed.publish(&["a", "b", "c"]).await.unwrap();
    check(&bed.fetch(&described).await.unwrap());
    let calls = bed.cluster.calls();
    assert_eq!((calls.put, calls.get), (6, 6), "1000 | 200 80 80 | for each of three");
    assert_eq!(bed.release(&described).await.released, 3);
    assert_eq!(bed.cluster.calls().remove, 3, "12 keys by 5");
}

#[tokio::test]
async fn a_closed_client_is_never_called() {
    let bed = bed();
    let described = bed.publish(&["a"]).await.unwrap();
    bed.client.close().unwrap();
    let error = bed.fetch(&described).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert_eq!(bed.transport.health().await.unwrap().quarantined_bytes, 0, "nothing was sent");
}
