//! Calls that share a pool without room for all of them.

mod fake;

use std::{sync::Arc, time::Duration};

use fake::Cluster;
use indexmap::IndexMap;
use transport_core::{
    ByteSize, Descriptor, Destination, Dtype, FeatureDescriptor, FeatureName, FetchOptions,
    FetchRequest, Fetched, Generation, Location, Publication, PublishOptions, Ready, RegionSlice,
    Release, ReleaseReport, Result, SampleId, SampleKey, StoreId, Tensor, TensorMeta, Transport,
};
use transport_mooncake_store::{StoreConfig, StoreTransport};

struct Bed {
    cluster: Arc<Cluster>,
    transport: Arc<StoreTransport>,
}

fn bed_with(change: impl FnOnce(&mut StoreConfig)) -> Bed {
    let cluster = Cluster::new();
    let mut config = StoreConfig::default();
    config.backoff = Duration::from_millis(1);
    change(&mut config);
    let transport = Arc::new(StoreTransport::start(cluster.client(), config).unwrap());
    Bed { cluster, transport }
}

fn sample(id: &str) -> SampleKey {
    SampleKey::new(StoreId::new("s").unwrap(), SampleId::new(id).unwrap(), Generation(1))
}

impl Bed {
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

    async fn release(&self, descriptors: &[Arc<Descriptor>]) -> ReleaseReport {
        let releases = descriptors.iter().map(|d| Release::from(d.clone())).collect();
        self.transport.release(releases).await.unwrap()
    }
}

/// More than the pool has room for at a time is written in several calls, also where several
/// publishes share it: none keeps a part of what it needs while it waits for the rest.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_copied_through_a_small_pool_goes_in_parts() {
    let bed = bed_with(|config| {
        *config = std::mem::take(config).pool(ByteSize::mib(8), ByteSize::mib(8));
        config.threads = 4;
    });
    let big = |id: String| {
        let meta = TensorMeta::new(Dtype::Uint8, [3u64 << 20]).unwrap();
        let data = RegionSlice::copy_of(&vec![7; 3 << 20]);
        let tensors = [(FeatureName::new("t").unwrap(), Tensor::new(meta, data).unwrap())].into();
        Publication::new(sample(&id), tensors, Ready::Now)
    };
    let publishes = (0..4).map(|i| {
        let batch: Vec<_> = (0..4).map(|j| big(format!("{i}-{j}"))).collect();
        let transport = bed.transport.clone();
        let options = PublishOptions::default().deadline(Duration::from_secs(20));
        tokio::spawn(async move { transport.publish(batch, options).await })
    });
    for published in publishes.collect::<Vec<_>>() {
        published.await.unwrap().unwrap();
    }
    assert_eq!(bed.cluster.keys().len(), 16);
    assert_eq!(bed.transport.stats().copied_bytes, 48 << 20);
}

fn placed(bed: &Bed, id: &str, bytes: usize) -> Arc<Descriptor> {
    bed.cluster.place(&format!("s/{id}/g1/x"), &vec![7u8; bytes]);
    let meta = TensorMeta::new(Dtype::Uint8, [bytes as u64]).unwrap();
    let feature = FeatureDescriptor::new(meta, None, None);
    let features = IndexMap::from([(FeatureName::new("x").unwrap(), feature)]);
    Arc::new(Descriptor::new(sample(id), features, None, Location::Store).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_that_grew_in_small_steps_serves_large_tensors_once_it_is_free() {
    let bed = bed_with(|c| {
        *c = c.clone().pool(ByteSize::mib(4), ByteSize::mib(0));
        c.pool_step = ByteSize::mib(1);
    });
    let small: Vec<_> = (0..4).map(|i| placed(&bed, &format!("a{i}"), 1 << 20)).collect();
    drop(bed.fetch(&small).await.unwrap());
    let large = placed(&bed, "large", 2 << 20);
    let got = bed.fetch_within(&[large], Duration::from_secs(2)).await;
    assert!(got.is_ok(), "{}", got.unwrap_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_fetches_of_several_parts_do_not_wait_for_each_other() {
    let bed = bed_with(|c| {
        *c = c.clone().pool(ByteSize::mib(4), ByteSize::mib(4));
        c.part_bytes = ByteSize::mib(1);
    });
    bed.cluster.set_transfer_delay(Duration::from_millis(20));
    let all: Vec<_> = (0..6).map(|i| placed(&bed, &format!("a{i}"), 1 << 20)).collect();
    let since = std::time::Instant::now();
    let three = |part: &[Arc<Descriptor>]| {
        let part = part.to_vec();
        let bed = &bed;
        async move { bed.fetch_within(&part, Duration::from_secs(3)).await.map(|f| f.len()) }
    };
    let (a, b) = tokio::join!(three(&all[..3]), three(&all[3..]));
    assert!(a.is_ok() && b.is_ok(), "{a:?} {b:?} after {:?}", since.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_do_not_wait_for_fetches_that_wait_for_room() {
    let bed = Arc::new(bed_with(|c| *c = c.clone().pool(ByteSize::mib(2), ByteSize::mib(2))));
    let all: Vec<_> = (0..4).map(|i| placed(&bed, &format!("a{i}"), 1 << 20)).collect();
    let held = bed.fetch(&all[..2]).await.unwrap();
    let waits: Vec<_> = (2..4)
        .map(|i| {
            let (bed, one) = (bed.clone(), all[i].clone());
            tokio::spawn(
                async move { bed.fetch_within(&[one], Duration::from_secs(4)).await.is_ok() },
            )
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let since = std::time::Instant::now();
    let report = bed.release(&all[..2]).await;
    let took = since.elapsed();
    drop(held);
    for one in waits {
        assert!(one.await.unwrap(), "it had room once the others were dropped");
    }
    assert!(took < Duration::from_secs(1), "release took {took:?}: {report:?}");
}
