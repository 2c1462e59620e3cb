//! A provider that tells new objects from old ones: no look before or after, in several calls.

mod fake;

use std::{sync::Arc, time::Duration};

use fake::{Calls, Cluster, FakeStore, Fault};
use transport_core::{
    ByteSize, Descriptor, Destination, Dtype, ErrorKind, FeatureName, FetchOptions, FetchRequest,
    Generation, Publication, PublishOptions, Ready, RegionSlice, Result, SampleId, SampleKey,
    StoreId, Tensor, TensorMeta, Transport,
};
use transport_mooncake_store::{StoreConfig, StoreTransport};

struct Bed {
    cluster: Arc<Cluster>,
    _client: Arc<FakeStore>,
    transport: StoreTransport,
}

fn bed() -> Bed {
    let cluster = Cluster::new();
    let mut config = StoreConfig::default().pool(ByteSize::mib(16), ByteSize::mib(16));
    config.backoff = Duration::from_millis(1);
    config.removal_patience = Duration::from_millis(50);
    let client = cluster.client_with_sessions();
    let transport = StoreTransport::start(client.clone(), config).unwrap();
    Bed { cluster, _client: client, transport }
}

fn name(i: usize) -> String {
    format!("x{i:04}")
}

fn key(i: usize) -> String {
    format!("s/{}/g1/t", name(i))
}

impl Bed {
    async fn publish(
        &self,
        samples: std::ops::Range<usize>,
        options: PublishOptions,
    ) -> Result<Vec<Arc<Descriptor>>> {
        let batch = samples.map(|i| {
            let meta = TensorMeta::new(Dtype::Uint8, [64]).unwrap();
            let tensor = Tensor::new(meta, RegionSlice::copy_of(&[i as u8; 64])).unwrap();
            let id = SampleId::new(name(i)).unwrap();
            let sample = SampleKey::new(StoreId::new("s").unwrap(), id, Generation(1));
            let tensors = [(FeatureName::new("t").unwrap(), tensor)].into();
            Publication::new(sample, tensors, Ready::Now)
        });
        let described = self.transport.publish(batch.collect(), options).await?;
        Ok(described.into_iter().map(Arc::new).collect())
    }

    async fn fetch(&self, described: &[Arc<Descriptor>]) {
        let request = |d: &Arc<Descriptor>| FetchRequest::new(d.clone(), Destination::Pool);
        let requests = described.iter().map(request).collect();
        let fetched = self.transport.fetch(requests, FetchOptions::default()).await.unwrap();
        for (i, sample) in fetched.iter().enumerate() {
            assert_eq!(sample.tensors[0].data.as_bytes().unwrap(), [i as u8; 64]);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_objects_are_written_side_by_side_and_nothing_is_looked_up() {
    let bed = bed();
    let described = bed.publish(0..1100, PublishOptions::default()).await.unwrap();
    let Calls { put, put_keys, exists, .. } = bed.cluster.calls();
    // Two threads, two lanes for each, two calls for each of these.
    assert_eq!((put, put_keys, exists), (8, 1100, 0));
    assert!(bed.cluster.all_hard_pinned());
    bed.fetch(&described).await;
    let again = bed.publish(0..1100, PublishOptions::default().replace(true)).await.unwrap();
    assert_eq!(bed.cluster.calls().exists, 0);
    bed.fetch(&again).await;
    assert_eq!(bed.transport.health().await.unwrap().resident_samples, 1100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_exists_undoes_all_the_others_and_stays() {
    let bed = bed();
    let all = PublishOptions::default();
    for taken in [0, 500, 1099] {
        bed.cluster.place(&key(taken), b"another's");
        let error = bed.publish(0..1100, all.clone()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
        assert_eq!(error.context("key"), Some(&*key(taken)), "{error}");
        assert_eq!(bed.cluster.keys(), [key(taken)], "what was there, and nothing else");
        assert_eq!(bed.cluster.value(&key(taken)).unwrap(), b"another's");
        bed.cluster.lose_everything();
    }
    let health = bed.transport.health().await.unwrap();
    assert_eq!((health.published_samples, health.resident_samples), (0, 0));
}

#[tokio::test]
async fn a_key_of_a_writer_that_died_is_said_to_be_one() {
    let bed = bed();
    bed.cluster.script([Fault::PutHalf("x0001")]);
    bed.publish(0..3, PublishOptions::default()).await.unwrap(); // as if it were another process
    let error = bed.publish(1..2, PublishOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unexpected, "{error}");
    assert!(error.to_string().contains("a writer that died"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_fails_and_a_full_store_leave_nothing() {
    let bed = bed();
    bed.cluster.script([Fault::Call("put", ErrorKind::PeerGone)]);
    let error = bed.publish(0..1100, PublishOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}");
    assert_eq!(bed.cluster.keys(), [""; 0]);
    bed.cluster.set_capacity(1000 * 64);
    let options = PublishOptions::default().deadline(Duration::from_millis(300));
    let error = bed.publish(0..1100, options).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CapacityExceeded, "{error}");
    assert_eq!(bed.cluster.keys(), [""; 0]);
    bed.cluster.set_capacity(u64::MAX);
    let described = bed.publish(0..1100, PublishOptions::default()).await.unwrap();
    bed.fetch(&described).await;
}

/// Not that a deadline has passed: the last call begins only where there is time for its answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_store_is_said_to_be_full_however_long_its_answers_take() {
    let bed = bed();
    bed.cluster.set_capacity(10);
    bed.cluster.set_delay_of_puts(Duration::from_millis(70));
    for deadline in [160, 230, 300] {
        let options = PublishOptions::default().deadline(Duration::from_millis(deadline));
        let error = bed.publish(0..1, options).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::CapacityExceeded, "{deadline} ms: {error}");
    }
}
