//! What trainers rely on today, and what went wrong for others, by its numbers; the tables are in
//! `tests/tests/annex_d.rs`.

mod fake;

use std::{sync::Arc, time::Duration};

use fake::{Cluster, FakeStore, Fault};
use indexmap::IndexMap;
use mooncake_sys::{
    GetItem, KeyResults, ProviderInfo, PutItem, ReplicaPolicy, StoreApi, StoreCode,
};
use parking_lot::Mutex;
use transport_core::{
    ByteSize, Descriptor, Destination, Dtype, ErrorKind, FeatureDescriptor, FeatureName,
    FetchOptions, FetchRequest, Fetched, Generation, Location, Publication, PublishOptions, Ready,
    RegionMut, RegionSlice, Release, Result, SampleId, SampleKey, StoreId, Tensor, TensorMeta,
    Transport,
};
use transport_mooncake_store::{Layout, StoreConfig, StoreTransport};

const FEATURES: [&str; 2] = ["hidden_states", "input_ids"];
/// How long a lease keeps an object, on the clock of the test.
const LEASE: Duration = Duration::from_secs(1);

/// A store whose leases also hold up forced removals, as older ones do. Asking whether a key exists
/// renews its lease, as the real one does.
#[derive(Debug)]
struct Leasing {
    inner: Arc<FakeStore>,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    now: Duration,
    leased_until: Duration,
    probes: usize,
    forced: Vec<bool>,
}

impl StoreApi for Leasing {
    fn provider(&self) -> &ProviderInfo {
        self.inner.provider()
    }
    fn hostname(&self) -> Result<String> {
        self.inner.hostname()
    }
    fn health(&self) -> Result<()> {
        self.inner.health()
    }
    unsafe fn register(&self, start: *mut u8, len: usize) -> Result<()> {
        // SAFETY: passed on as it came.
        unsafe { self.inner.register(start, len) }
    }
    unsafe fn unregister(&self, start: *mut u8) -> Result<()> {
        // SAFETY: passed on as it came.
        unsafe { self.inner.unregister(start) }
    }
    unsafe fn put(&self, items: &[PutItem<'_>], policy: ReplicaPolicy) -> Result<KeyResults<()>> {
        // SAFETY: passed on as it came.
        unsafe { self.inner.put(items, policy) }
    }
    unsafe fn put_new(
        &self,
        items: &[PutItem<'_>],
        policy: ReplicaPolicy,
    ) -> Result<KeyResults<()>> {
        // SAFETY: passed on as it came.
        unsafe { self.inner.put_new(items, policy) }
    }
    unsafe fn get(&self, items: &[GetItem<'_>]) -> Result<KeyResults<u64>> {
        // SAFETY: passed on as it came.
        unsafe { self.inner.get(items) }
    }
    fn exists(&self, keys: &[&str]) -> Result<KeyResults<bool>> {
        let mut seen = self.seen.lock();
        seen.probes += keys.len();
        seen.leased_until = seen.now + LEASE;
        self.inner.exists(keys)
    }
    fn size(&self, key: &str) -> Result<Result<u64, StoreCode>> {
        self.inner.size(key)
    }
    fn remove(&self, keys: &[&str], force: bool) -> Result<KeyResults<()>> {
        let mut seen = self.seen.lock();
        seen.forced.extend(keys.iter().map(|_| force));
        if seen.now < seen.leased_until {
            return Ok(keys.iter().map(|_| Err(StoreCode::OBJECT_HAS_LEASE)).collect());
        }
        self.inner.remove(keys, force)
    }
    fn close(&self) -> Result<()> {
        self.inner.close()
    }
}

struct Bed {
    cluster: Arc<Cluster>,
    store: Arc<Leasing>,
    transport: StoreTransport,
}

fn bed() -> Bed {
    let cluster = Cluster::new();
    // With sessions nothing is looked up before it is written: a look would lease what was there.
    let mut config = StoreConfig::default().pool(ByteSize::mib(1), ByteSize::mib(1));
    config.removal_patience = Duration::ZERO; // the test repeats, on its own clock
    let store = Arc::new(Leasing { inner: cluster.client_with_sessions(), seen: Mutex::default() });
    let transport = StoreTransport::start(store.clone(), config).unwrap();
    Bed { cluster, store, transport }
}

fn key(id: &str, generation: u64) -> SampleKey {
    let store = StoreId::new("test").unwrap();
    SampleKey::new(store, SampleId::new(id).unwrap(), Generation(generation))
}

impl Bed {
    async fn publish(&self, sample: SampleKey) -> Arc<Descriptor> {
        let tensor = |name: &&str| {
            let meta = TensorMeta::new(Dtype::Int64, [1, 3]).unwrap();
            let data = RegionSlice::copy_of(&[7; 24]);
            (FeatureName::new(name).unwrap(), Tensor::new(meta, data).unwrap())
        };
        let tensors: IndexMap<_, _> = FEATURES.iter().map(tensor).collect();
        let batch = vec![Publication::new(sample, tensors, Ready::Now)];
        let mut described = self.transport.publish(batch, PublishOptions::default()).await.unwrap();
        Arc::new(described.remove(0))
    }

    async fn fetch(&self, sample: &Arc<Descriptor>) -> Result<Vec<Fetched>> {
        let request = FetchRequest::new(sample.clone(), Destination::Pool);
        self.transport.fetch(vec![request], FetchOptions::default()).await
    }

    async fn release(&self, sample: &Arc<Descriptor>) -> transport_core::ReleaseReport {
        self.transport.release(vec![Release::from(sample.clone())]).await.unwrap()
    }
}

/// What a producer does after a restart with captures whose answers it never got: it knows names and
/// no sizes, and says once that all tensors are small and once that all are large.
#[tokio::test]
async fn samples_of_which_only_names_are_known_are_freed_whatever_shares_an_object() {
    for layout in [Layout::PerTensor, Layout::Grouped { below: ByteSize::new(1024).unwrap() }] {
        let cluster = Cluster::new();
        let start = || {
            let config = StoreConfig::default().pool(ByteSize::mib(1), ByteSize::mib(1));
            StoreTransport::start(cluster.client(), config.layout(layout)).unwrap()
        };
        let (publisher, restarted) = (start(), start());
        let sizes = [("small", 8), ("smaller", 3), ("large", 5000)];
        let tensor = |&(name, len): &(&str, usize)| {
            let meta = TensorMeta::new(Dtype::Uint8, [len as u64]).unwrap();
            let tensor = Tensor::new(meta, RegionSlice::copy_of(&vec![7; len])).unwrap();
            (FeatureName::new(name).unwrap(), tensor)
        };
        let tensors = sizes.iter().map(tensor).collect();
        let batch = vec![Publication::new(key("a", 1), tensors, Ready::Now)];
        let described = publisher.publish(batch, PublishOptions::default()).await.unwrap();
        assert!(!cluster.keys().is_empty());
        for bytes in [1, 1 << 40] {
            let mut named = described[0].clone();
            for feature in named.features.values_mut() {
                feature.meta = TensorMeta::new(Dtype::Uint8, [bytes]).unwrap();
                feature.seq = None;
            }
            restarted.release(vec![Release::from(Arc::new(named))]).await.unwrap();
        }
        assert!(cluster.keys().is_empty(), "{layout:?} leaves {:?}", cluster.keys());
    }
}

/// The lease of a reader that has looked just before is over after its second, because nothing that
/// frees looks again: upstream asks twice a feature, each of which renews the lease.
#[tokio::test]
async fn d8_removals_outlive_a_lease_and_never_renew_it() {
    let bed = bed();
    let sample = bed.publish(key("a", 1)).await;
    let keys = FEATURES.map(|name| format!("test/a/g1/{name}"));
    let keys = keys.each_ref().map(String::as_str);
    assert_eq!(bed.store.exists(&keys).unwrap(), [Ok(true), Ok(true)]);
    let probes = bed.store.seen.lock().probes;
    assert_eq!(bed.release(&sample).await.unconfirmed, 1, "the first attempt");
    let mut attempts = 1;
    let drained = loop {
        bed.store.seen.lock().now += Duration::from_millis(250);
        attempts += 1;
        let drained = bed.transport.drain_removals(Duration::ZERO).await.unwrap();
        if drained.remaining == 0 || attempts == 20 {
            break drained;
        }
    };
    assert_eq!((attempts, drained.removed), (5, 2));
    assert_eq!(bed.store.seen.lock().probes, probes, "0 probes, where upstream counts 2 a feature");
    assert_eq!(bed.cluster.keys(), [""; 0]);
}

/// Upstream forces only when it drains; a removal that waits for a lease is one that can be lost.
#[tokio::test]
async fn d9_every_pass_forces_every_feature_and_one_is_enough() {
    let bed = bed();
    let sample = bed.publish(key("a", 1)).await;
    bed.fetch(&sample).await.unwrap(); // reading leases it
    assert_eq!(bed.release(&sample).await.released, 1);
    assert_eq!(bed.store.seen.lock().forced, [true; FEATURES.len()], "one pass, all forced");
    let again = bed.publish(key("b", 1)).await;
    bed.cluster.script([Fault::Remove("b/g1/input_ids", -714)]);
    assert_eq!(bed.release(&again).await.unconfirmed, 1);
    let drained = bed.transport.drain_removals(Duration::ZERO).await.unwrap();
    assert_eq!((drained.removed, drained.remaining), (1, 0));
    assert!(bed.store.seen.lock().forced.iter().all(|&forced| forced));
    assert_eq!(bed.store.seen.lock().forced.len(), 2 * FEATURES.len() + 1, "only what was left");
}

#[tokio::test]
async fn d13_a_short_read_and_another_generation_are_never_data() {
    let bed = bed();
    let sample = bed.publish(key("a", 1)).await;
    bed.cluster.script([Fault::GetLen("hidden_states", 23)]);
    let error = bed.fetch(&sample).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ShortRead, "{error}");
    assert!(error.to_string().contains("short read"), "{error}");
    bed.release(&sample).await;
    let newer = bed.publish(key("a", 2)).await;
    let error = bed.fetch(&sample).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    bed.fetch(&newer).await.unwrap();
}

/// A batch whose transfer outlasts the leases is cut until the parts do not, and only what failed is
/// read again; where that is not enough the error says how long it took, and how long it may.
#[tokio::test]
async fn f19_a_batch_that_outlasts_its_leases_is_read_in_parts_that_do_not() {
    let cluster = Cluster::new();
    let mut config = StoreConfig::default().pool(ByteSize::mib(1), ByteSize::mib(1));
    config.backoff = Duration::from_millis(1);
    config.read_lease = Some(Duration::from_millis(100));
    let transport = StoreTransport::start(cluster.client(), config).unwrap();
    let publication = |id: usize| {
        let meta = TensorMeta::new(Dtype::Uint8, [64]).unwrap();
        let tensor = Tensor::new(meta, RegionSlice::copy_of(&[id as u8; 64])).unwrap();
        let tensors = [(FeatureName::new("t").unwrap(), tensor)].into();
        Publication::new(key(&id.to_string(), 1), tensors, Ready::Now)
    };
    let batch = (0..16).map(publication).collect();
    let described = transport.publish(batch, PublishOptions::default()).await.unwrap();
    let described: Vec<_> = described.into_iter().map(Arc::new).collect();
    let fetch = async || {
        let request = |d: &Arc<Descriptor>| FetchRequest::new(d.clone(), Destination::Pool);
        let requests = described.iter().map(request).collect();
        transport.fetch(requests, FetchOptions::default()).await
    };
    // 16 or 8 at a time take too long, 4 do not.
    cluster.set_delay_of_each(Duration::from_millis(14));
    let before = cluster.calls();
    for (id, fetched) in fetch().await.unwrap().iter().enumerate() {
        assert_eq!(fetched.tensors[0].data.as_bytes().unwrap(), [id as u8; 64]);
    }
    let after = cluster.calls();
    assert!(after.get - before.get > 2 + 4, "{after:?}");
    assert!(after.get_keys - before.get_keys >= 3 * 16, "{after:?}");
    // One is too much.
    cluster.set_delay_of_each(Duration::from_millis(101));
    let described = &described[..1];
    let request = FetchRequest::new(described[0].clone(), Destination::Pool);
    let error = transport.fetch(vec![request], FetchOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
    let took: u64 = error.context("slowest_call_ms").unwrap().parse().unwrap();
    assert!(took >= 101, "{error}");
    assert_eq!(error.context("read_lease_ms"), Some("100"), "{error}");
    assert_eq!(error.context("failed_keys"), Some("1"), "{error}");
}

/// Memory goes back to the allocator only when the engine has forgotten it, whoever takes it next;
/// and what is known to one client is registered anew with the next.
#[tokio::test]
async fn f22_memory_is_registered_again_and_never_twice_at_a_time() {
    let cluster = Cluster::new();
    let config = StoreConfig::default().pool(ByteSize::mib(1), ByteSize::mib(1));
    let start = || {
        let client = cluster.client();
        (client.clone(), StoreTransport::start(client, config.clone()).unwrap())
    };
    let (client, transport) = start();
    let ranges = client.registered_ranges();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            // The allocator hands the same addresses out again, to whichever thread asks.
            scope.spawn(|| {
                for _ in 0..500 {
                    let region = transport.register(RegionMut::zeroed(4096).unwrap()).unwrap();
                    assert!(client.registered_ranges() > ranges);
                    drop(region);
                }
            });
        }
    });
    assert_eq!(client.registered_ranges(), ranges);
    // Again, and a part of it, are not registered at all.
    let region = transport.register(RegionMut::zeroed(4096).unwrap()).unwrap();
    let region = transport.register(region).unwrap();
    let (head, tail) = region.split_at(100).unwrap();
    let (head, tail) = (transport.register(head).unwrap(), transport.register(tail).unwrap());
    assert_eq!(client.registered_ranges(), ranges + 1);
    // Memory that is registered in part is not one region, so that no overlap can be asked for.
    let (other, rest) = RegionMut::zeroed(4096).unwrap().split_at(2048).unwrap();
    let other = transport.register(other).unwrap();
    assert!(other.join(rest).is_err());
    // The connection goes, and comes back.
    transport.close().await.unwrap();
    let (client, transport) = start();
    let head = transport.register(head).unwrap();
    drop(tail);
    assert!(client.registered_ranges() > 1 && !head.is_empty());
}

/// The same samples of the same length with other elements, and another job's: keys hold the store
/// and the generation, descriptors the elements and shape, and nothing is overwritten in silence.
#[tokio::test]
async fn f28_another_deployments_bytes_are_never_taken() {
    let bed = bed();
    let publish = async |store: &str, generation, dtype: Dtype, shape: &[u64], byte| {
        let sample = SampleKey { store_id: StoreId::new(store).unwrap(), ..key("a", generation) };
        let meta = TensorMeta::new(dtype, shape).unwrap();
        let data = RegionSlice::copy_of(&vec![byte; meta.nbytes() as usize]);
        let tensors = [(FeatureName::new("taps").unwrap(), Tensor::new(meta, data).unwrap())];
        let batch = vec![Publication::new(sample, tensors.into(), Ready::Now)];
        let mut described = bed.transport.publish(batch, PublishOptions::default()).await?;
        Ok::<_, transport_core::Error>(Arc::new(described.remove(0)))
    };
    let bf16 = publish("test", 1, Dtype::Bfloat16, &[4, 8], 1).await.unwrap();
    // The server comes back with other taps under the same name: refused, and what was there stays.
    let error = publish("test", 1, Dtype::Float8E4m3fn, &[8, 8], 2).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
    let fp8 = publish("test", 2, Dtype::Float8E4m3fn, &[8, 8], 2).await.unwrap();
    let other = publish("other", 1, Dtype::Float8E4m3fn, &[8, 8], 3).await.unwrap();
    assert_eq!(
        bed.cluster.keys(),
        ["other/a/g1/taps", "test/a/g1/taps", "test/a/g2/taps"],
        "an object each"
    );
    for (descriptor, dtype, byte) in [
        (&bf16, Dtype::Bfloat16, 1),
        (&fp8, Dtype::Float8E4m3fn, 2),
        (&other, Dtype::Float8E4m3fn, 3),
    ] {
        let fetched = bed.fetch(descriptor).await.unwrap();
        let taps = &fetched[0].tensors[0];
        assert_eq!((taps.meta.dtype(), taps.data.as_bytes().unwrap()), (dtype, &[byte; 64][..]));
    }
    // A reader that was told of another number of bytes gets an error and no bytes.
    let wide = TensorMeta::new(Dtype::Float32, [8, 8]).unwrap();
    let features = [(FeatureName::new("taps").unwrap(), FeatureDescriptor::new(wide, None, None))];
    let told = Descriptor::new(key("a", 1), features.into(), None, Location::Store).unwrap();
    let error = bed.fetch(&Arc::new(told)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ShortRead, "{error}");
    assert_eq!((error.context("expected"), error.context("found")), (Some("256"), Some("64")));
}
