use std::time::Instant;

use transport_core::{
    Dtype, FeatureName, Generation, MemoryTransport, Publication, PublishOptions, Ready,
    RegionSlice, Release, SampleKey, StoreId, Tensor, TensorMeta, Transport,
};

use super::*;
use crate::{flaky::sample, layout::Strategy, lifecycle::Retention};

async fn published(publisher: &MemoryTransport, count: usize) -> Vec<Arc<Descriptor>> {
    let batch = (0..count).map(|i| sample(&format!("s-{i}"), 1, &[i as u8])).collect();
    let described = publisher.publish(batch, PublishOptions::default()).await.unwrap();
    described.into_iter().map(Arc::new).collect()
}

async fn store(count: usize) -> (MemoryTransport, Arc<Samples>, Vec<Arc<Descriptor>>) {
    let publisher = MemoryTransport::builder().arena_bytes(1 << 20).build().unwrap();
    let described = published(&publisher, count).await;
    let samples = Samples::over(Arc::new(publisher.client()), Retention::default());
    (publisher, Arc::new(samples), described)
}

#[tokio::test(flavor = "multi_thread")]
async fn samples_come_in_order_several_under_way_and_lost_ones_are_named() {
    for together in [1, 3] {
        in_order(ConsumerOptions { together, ..ConsumerOptions::default() }).await;
    }
}

async fn in_order(options: ConsumerOptions) {
    let (publisher, samples, all) = store(20).await;
    let gone = Release::from(all[7].clone());
    publisher.release(vec![gone]).await.unwrap();
    let mut consumer = Consumer::new(samples.clone(), options);
    consumer.feed(all).unwrap();
    assert_eq!(consumer.len(), 20);
    for i in 0..20_u8 {
        match consumer.next().await.unwrap().unwrap() {
            Materialized::Ready(leased) => {
                assert_eq!(leased.tensors["x"].data.as_ref(), [i]);
                samples.release(&leased.token).await;
            }
            Materialized::Lost(id, error) => {
                assert_eq!((i, id.as_str()), (7, "s-7"), "{error}");
            }
        }
    }
    assert!(consumer.next().await.unwrap().is_none() && consumer.is_empty());
    assert_eq!(samples.health().active_leases, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn d20_closing_gives_back_what_was_never_returned_and_leaves_no_lease() {
    let (_publisher, samples, all) = store(10).await;
    let mut consumer = Consumer::new(samples.clone(), ConsumerOptions::default());
    consumer.feed(all.clone()).unwrap();
    let Some(Materialized::Ready(first)) = consumer.next().await.unwrap() else {
        panic!("the first is there");
    };
    samples.release(&first.token).await;
    let left = consumer.close(Duration::from_secs(5)).await;
    assert_eq!(left, all[1..]);
    assert_eq!(samples.health().active_leases, 0);
    // They may be handed out again.
    let mut again = Consumer::new(samples.clone(), ConsumerOptions::default());
    again.feed(left).unwrap();
    assert!(matches!(again.next().await.unwrap(), Some(Materialized::Ready(_))));
    drop(again);
}

#[tokio::test(flavor = "multi_thread")]
async fn d20_closing_is_bounded_when_a_reading_stalls() {
    let (_publisher, samples, all) = store(3).await;
    let reading = {
        let (samples, sample) = (samples.clone(), all[0].clone());
        tokio::spawn(async move {
            samples.adopt(std::slice::from_ref(&sample)).await?;
            std::future::pending::<Result<Unclaimed>>().await
        })
    };
    let mut consumer = Consumer::new(samples.clone(), ConsumerOptions::default());
    consumer.reading.push_back((all[0].clone(), reading));
    consumer.bytes += all[0].nbytes();
    consumer.waiting.extend(all[1..].iter().cloned());
    let start = Instant::now();
    let left = consumer.close(Duration::from_millis(100)).await;
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(left, all);
    assert_eq!(samples.health().active_leases, 0);
}

/// The channel's lines, a copying transport, and two EAGLE3 samples of lengths 6 and 9.
#[tokio::test(flavor = "multi_thread")]
async fn d25_eagle3_samples_come_through_refs_byte_by_byte() {
    use crate::channel::{RefReader, RefWriter};
    use control_proto::sample_ref::SampleRef;
    let layout = Layout::new(Strategy::Eagle3, 4, vec![1, 3, 5]).unwrap();
    let publisher = MemoryTransport::builder().arena_bytes(1 << 20).build().unwrap();
    let fill = |len: u64, at: usize| (0..len).map(|i| (i as usize * 31 + at) as u8).collect();
    let sample = |tokens: u64| {
        let shapes = [
            ("hidden_state", Dtype::Bfloat16, vec![1, tokens, 12]),
            ("target", Dtype::Bfloat16, vec![1, tokens, 4]),
            ("input_ids", Dtype::Int64, vec![1, tokens]),
            ("loss_mask", Dtype::Int64, vec![1, tokens]),
            ("attention_mask", Dtype::Int64, vec![1, tokens]),
        ];
        let tensor = |(at, (name, dtype, shape)): (usize, (&str, Dtype, Vec<u64>))| {
            let meta = TensorMeta::new(dtype, shape).unwrap();
            let bytes: Vec<u8> = fill(meta.nbytes(), at);
            let tensor = Tensor::new(meta, RegionSlice::copy_of(&bytes)).unwrap();
            (FeatureName::new(name).unwrap(), tensor)
        };
        let id = SampleId::new(format!("run:task-{tokens}")).unwrap();
        let key = SampleKey::new(StoreId::new("run").unwrap(), id, Generation(1));
        let tensors = shapes.into_iter().enumerate().map(tensor).collect();
        let mut publication = Publication::new(key, tensors, Ready::Now);
        publication.aux_layer_ids = Some(vec![1, 3, 5]);
        publication
    };
    let batch = vec![sample(6), sample(9)];
    let described = publisher.publish(batch, PublishOptions::default()).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let refs: Vec<_> =
        described.iter().map(|d| SampleRef::new(d, "run", None, "eagle3").unwrap()).collect();
    RefWriter::open(folder.path()).unwrap().publish(&refs).unwrap();

    let read = RefReader::open(folder.path()).unwrap().poll(9).unwrap().refs;
    let client = Arc::new(publisher.client());
    let samples = Arc::new(Samples::over(client, Retention::default()));
    let options = ConsumerOptions { layout: Some(layout), ..ConsumerOptions::default() };
    let mut consumer = Consumer::new(samples, options);
    consumer.feed(read.iter().map(|r| Arc::new(r.descriptor().unwrap()))).unwrap();
    for tokens in [6, 9] {
        let Some(Materialized::Ready(leased)) = consumer.next().await.unwrap() else {
            panic!("it is there");
        };
        assert_eq!(leased.descriptor.features["target"].meta.shape(), [1, tokens, 4]);
        for (at, tensor) in leased.tensors.values().enumerate() {
            let expected: Vec<u8> = fill(tensor.meta.nbytes(), at);
            assert_eq!(tensor.data.as_ref(), expected);
        }
    }
}

/// A receive pool with room for two and a half samples, and four readings at a time: they wait for
/// room, and none waits for another for ever.
#[cfg(feature = "direct")]
#[tokio::test(flavor = "multi_thread")]
async fn a_full_pool_delays_and_the_first_in_line_gets_the_room() {
    use capture_arena::{Arena, ArenaConfig, Backing, RegionPool, ReserveOptions, SamplePlan};
    use transport_mooncake_direct::{CaptureSink, DirectTransport, Engine, SinkConfig};
    const BYTES: u64 = 64 << 10;
    let arena = Arena::start(Backing::heap(4 << 20).unwrap(), ArenaConfig::default()).unwrap();
    let sink = CaptureSink::start(arena, SinkConfig::default()).unwrap();
    let plan = |i| {
        let id = SampleId::new(format!("s-{i}")).unwrap();
        let sample = SampleKey::new(StoreId::new("run").unwrap(), id, Generation(1));
        let meta = TensorMeta::new(Dtype::Uint8, [BYTES]).unwrap();
        SamplePlan { sample, objects: vec![(FeatureName::new("x").unwrap(), meta)], holder: None }
    };
    let (long, short) = (Duration::from_secs(20), Duration::from_micros(300));
    // Also for a loop that has something else to do now and then, and drops the future.
    for (max_bytes, patience) in [(None, long), (Some(BYTES), long), (None, short)] {
        let plans: Vec<_> = (0..24).map(plan).collect();
        let mut batch = sink.reserve(plans, ReserveOptions::default()).await.unwrap();
        (0..24).for_each(|i| batch.bytes_mut(i, 0).fill(i as u8));
        let all: Vec<_> = batch.publish().await.unwrap().into_iter().map(Arc::new).collect();
        let pool = RegionPool::new(Backing::heap(BYTES * 5 / 2).unwrap()).unwrap();
        let transport = DirectTransport::builder().engine(Engine::Tcp).pool(pool).build().unwrap();
        let samples = Arc::new(Samples::over(Arc::new(transport), Retention::default()));
        let options = ConsumerOptions { max_bytes, ..ConsumerOptions::default() };
        let mut consumer = Consumer::new(samples.clone(), options);
        consumer.feed(all.clone()).unwrap();
        let mut before = None; // held while the next one is waited for, as a training loop does
        for i in 0..24_u8 {
            let start = Instant::now();
            let next = loop {
                match tokio::time::timeout(patience, consumer.next()).await {
                    Ok(next) => break next,
                    Err(_) => assert!(start.elapsed() < long, "in time"),
                }
            };
            let leased = match next.unwrap().expect("fed") {
                Materialized::Ready(leased) => leased,
                Materialized::Lost(id, error) => panic!("{id} is there: {error}"),
            };
            assert!(leased.tensors["x"].data.as_ref().iter().all(|&byte| byte == i));
            samples.release(&leased.token).await;
            before.replace(leased);
        }
        drop(before);
        assert!(consumer.is_empty() && consumer.active() > Duration::ZERO);
        assert_eq!(samples.health().active_leases, 0, "max_bytes {max_bytes:?}");
        assert_eq!(samples.settle(&all).await.freed, 24);
        samples.transport().close().await.unwrap();
    }
    sink.close().await.unwrap();
}

#[tokio::test]
async fn what_the_strategy_cannot_train_on_is_refused_before_it_is_read() {
    let (_publisher, samples, all) = store(1).await;
    let layout = Layout::new(Strategy::Dspark, 8, vec![1]).unwrap();
    let options = ConsumerOptions { layout: Some(layout), ..ConsumerOptions::default() };
    let mut consumer = Consumer::new(samples, options);
    let error = consumer.feed(all).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(consumer.is_empty());
}

/// What one call reads together is leased for each, and given back for each.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_read_together_leaves_no_lease_when_it_is_dropped() {
    let (_publisher, samples, all) = store(10).await;
    let options =
        ConsumerOptions { in_flight: 8, together: 4, refill_at: 0, ..ConsumerOptions::default() };
    for wait in [Duration::ZERO, Duration::from_millis(50)] {
        let mut consumer = Consumer::new(samples.clone(), options.clone());
        consumer.feed(all.clone()).unwrap();
        let Some(Materialized::Ready(first)) = consumer.next().await.unwrap() else {
            panic!("the first is there");
        };
        samples.release(&first.token).await;
        tokio::time::sleep(wait).await; // the others are read, or under way
        drop(consumer);
        let end = Instant::now() + Duration::from_secs(5);
        while samples.health().active_leases > 0 {
            assert!(Instant::now() < end, "{:?}", samples.health());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// A memory transport whose server at `dead:1` lets every call wait until its deadline.
#[derive(Debug)]
struct HalfDead {
    inner: MemoryTransport,
    waited: Mutex<Vec<usize>>, // samples of each call that waited
    says: ErrorKind,
    after: Duration,
}

#[async_trait::async_trait]
impl Transport for HalfDead {
    fn info(&self) -> &transport_core::TransportInfo {
        self.inner.info()
    }
    async fn publish(&self, _: Vec<Publication>, _: PublishOptions) -> Result<Vec<Descriptor>> {
        unreachable!("it only reads")
    }
    async fn fetch(
        &self,
        requests: Vec<transport_core::FetchRequest>,
        options: transport_core::FetchOptions,
    ) -> Result<Vec<transport_core::Fetched>> {
        let is_dead = |r: &transport_core::FetchRequest| {
            server(&r.descriptor).is_some_and(|server| server.to_string() == "dead:1")
        };
        if requests.iter().any(is_dead) {
            self.waited.lock().push(requests.len());
            tokio::time::sleep(self.after.min(options.deadline)).await;
            return Err(Error::new(self.says, "fetch", "the server says nothing"));
        }
        self.inner.fetch(requests, options).await
    }
    async fn release(&self, releases: Vec<Release>) -> Result<transport_core::ReleaseReport> {
        self.inner.release(releases).await
    }
    async fn health(&self) -> Result<transport_core::Health> {
        self.inner.health().await
    }
    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

/// Samples of two servers, of which one is silent: those of the other come at once, and the silent
/// one's are all lost after one deadline, or after one failure to reach it.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_read_together_waits_for_a_dead_server_once_and_for_others_not_at_all() {
    const DEADLINE: Duration = Duration::from_millis(2500);
    let (soon, late) = (Duration::from_millis(1200), Duration::from_secs(60));
    for (says, after, fails) in
        [(ErrorKind::Timeout, late, DEADLINE), (ErrorKind::PeerGone, soon, soon)]
    {
        let (publisher, _, mut all) = store(8).await;
        for sample in all.iter_mut().skip(1).step_by(2) {
            let dead = || "dead:1".parse::<SessionName>().unwrap();
            let location = transport_core::ArenaLocation::new(dead(), dead(), None);
            Arc::make_mut(sample).location = Location::Arena(location);
        }
        let (inner, waited) = (publisher.client(), Mutex::default());
        let transport = Arc::new(HalfDead { inner, waited, says, after });
        let samples = Arc::new(Samples::over(transport.clone(), Retention::default()));
        let mut consumer = Consumer::new(
            samples.clone(),
            ConsumerOptions {
                in_flight: 8,
                together: 8,
                refill_at: 0,
                deadline: DEADLINE,
                ..ConsumerOptions::default()
            },
        );
        let start = Instant::now();
        consumer.feed(all).unwrap();
        for i in 0..8_u8 {
            match consumer.next().await.unwrap().unwrap() {
                Materialized::Ready(leased) => {
                    assert_eq!((leased.tensors["x"].data.as_ref(), i % 2), (&[i][..], 0));
                    samples.release(&leased.token).await;
                }
                Materialized::Lost(id, error) => {
                    assert_eq!((id.to_string(), i % 2), (format!("s-{i}"), 1));
                    assert_eq!(error.kind(), says, "{error}");
                    assert_eq!(error.context("samples_of_the_call"), Some("4"), "{error}");
                }
            }
            if i == 0 {
                assert!(start.elapsed() < fails / 2, "at once: {:?}", start.elapsed());
            }
        }
        let most = fails + fails / 2;
        assert!(start.elapsed() < most, "one wait: {:?}", start.elapsed());
        assert_eq!(*transport.waited.lock(), [4], "asked once, for all");
        assert_eq!(samples.health().active_leases, 0);
    }
}
