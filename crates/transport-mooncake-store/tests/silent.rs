//! Owners of object memory that do not answer: only the first read waits for them.

mod fake;

use std::{
    io::{Read, Write},
    net::TcpListener,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use fake::{Cluster, FakeStore, Fault};
use transport_core::{
    ByteSize, Descriptor, Destination, Dtype, ErrorKind, FeatureName, FetchOptions, FetchRequest,
    Generation, Publication, PublishOptions, Ready, RegionSlice, Result, SampleId, SampleKey,
    StoreId, Tensor, TensorMeta, Transport,
};
use transport_mooncake_store::{StoreConfig, StoreTransport};

/// An owner of object memory, as far as its peer handshake goes.
struct Owner {
    listener: TcpListener,
}

impl Owner {
    fn new() -> Self {
        Self::at("127.0.0.1:0")
    }

    fn at(address: &str) -> Self {
        Self { listener: TcpListener::bind(address).unwrap() }
    }

    /// As Mooncake writes it: without brackets around IPv6 addresses.
    fn name(&self) -> String {
        self.listener.local_addr().unwrap().to_string().replace(['[', ']'], "")
    }

    /// Answers every probe from now on; before, the kernel takes connections and nobody reads.
    fn answer(&self) {
        let listener = self.listener.try_clone().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming().take(100) {
                let Ok(mut stream) = stream else { return };
                let mut length = [0; 8];
                if stream.read_exact(&mut length).is_ok() {
                    let _ = stream.write_all(b"\x15\0\0\0\0\0\0\0\x03{\"status\":\"success\"}");
                }
            }
        });
    }
}

fn sample(id: &str) -> SampleKey {
    SampleKey::new(StoreId::new("s").unwrap(), SampleId::new(id).unwrap(), Generation(1))
}

async fn publish(transport: &StoreTransport, ids: &[String]) -> Vec<Arc<Descriptor>> {
    let batch = ids.iter().map(|id| {
        let meta = TensorMeta::new(Dtype::Uint8, [1000]).unwrap();
        let tensor = Tensor::new(meta, RegionSlice::copy_of(&[7; 1000])).unwrap();
        let tensors = [(FeatureName::new("t").unwrap(), tensor)].into();
        Publication::new(sample(id), tensors, Ready::Now)
    });
    let described = transport.publish(batch.collect(), PublishOptions::default()).await.unwrap();
    described.into_iter().map(Arc::new).collect()
}

async fn fetch(
    transport: &StoreTransport,
    sample: &Arc<Descriptor>,
    within: Duration,
) -> Result<()> {
    let request = FetchRequest::new(sample.clone(), Destination::Pool);
    let options = FetchOptions::default().deadline(within);
    let fetched = transport.fetch(vec![request], options).await?;
    assert_eq!(fetched[0].tensors[0].data.as_bytes().unwrap(), [7; 1000]);
    Ok(())
}

fn config(silence: Duration) -> StoreConfig {
    let mut config = StoreConfig::default().pool(ByteSize::mib(16), ByteSize::mib(16));
    config.backoff = Duration::from_millis(1);
    config.segment_silence = Some(silence);
    config
}

struct Bed {
    cluster: Arc<Cluster>,
    client: Arc<FakeStore>,
    transport: Arc<StoreTransport>,
}

fn bed(silence: Duration) -> Bed {
    let cluster = Cluster::new();
    let client = cluster.client();
    let transport = StoreTransport::start(client.clone(), config(silence)).unwrap();
    Bed { cluster, client, transport: Arc::new(transport) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_reads_of_a_silent_owner_wait_once() {
    let Bed { cluster, client, transport } = bed(Duration::from_secs(60));
    let (silent, lively) = (Owner::new(), Owner::new());
    lively.answer();
    let ids = |node: &str| (0..200).map(|i| format!("{node}-{i}")).collect::<Vec<_>>();
    cluster.set_segment("/dead-", silent.name());
    cluster.set_segment("/live-", lively.name());
    let (dead, live) =
        (publish(&transport, &ids("dead")).await, publish(&transport, &ids("live")).await);
    cluster.hang_reads_of(Some("/dead-"));
    let deadline = Duration::from_secs(2);
    let start = Instant::now();
    for (i, sample) in dead.iter().enumerate() {
        let error = fetch(&transport, sample, deadline).await.unwrap_err();
        if i == 0 {
            assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
            continue;
        }
        assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}");
        assert_eq!(error.context("segment"), Some(silent.name().as_str()), "{error}");
        assert!(error.context("key").unwrap().starts_with("s/dead-"), "{error}");
        if i % 20 == 0 {
            fetch(&transport, &live[i], deadline).await.unwrap(); // others are not held up
        }
    }
    let took = start.elapsed();
    assert!(took < deadline + Duration::from_secs(3), "one deadline, not 200: {took:?}");
    let stats = transport.stats();
    assert_eq!((stats.silent_segments, stats.refused_fetches), (1, 199));
    cluster.hang_reads_of(None);
    transport.close().await.unwrap();
    assert!(client.is_closed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_comes_back_is_read_again() {
    let Bed { cluster, transport, .. } = bed(Duration::from_millis(200));
    let owner = Owner::new();
    cluster.set_segment("/a", owner.name());
    let described = publish(&transport, &["a".into()]).await;
    cluster.hang_reads_of(Some("/a"));
    let deadline = Duration::from_millis(100);
    let late = fetch(&transport, &described[0], deadline).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Timeout, "{late}");
    let second = Duration::from_secs(10);
    let refused = fetch(&transport, &described[0], second).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::PeerGone, "{refused}");
    // Still silent when its time is over: asked again, and left alone again.
    tokio::time::sleep(Duration::from_millis(250)).await;
    let refused = fetch(&transport, &described[0], second).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::PeerGone, "{refused}");
    owner.answer();
    cluster.hang_reads_of(None);
    tokio::time::sleep(Duration::from_millis(250)).await;
    fetch(&transport, &described[0], second).await.unwrap();
    assert_eq!(transport.stats().silent_segments, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_read_of_an_owner_that_answers_blames_nobody() {
    // And one that cannot be asked, as its name is that of a key in a metadata server.
    let owners = ["127.0.0.1:0", "[::1]:0"].map(Owner::at);
    owners.iter().for_each(Owner::answer);
    for name in [owners[0].name(), owners[1].name(), "trainer-3".into()] {
        let Bed { cluster, transport, .. } = bed(Duration::from_secs(60));
        cluster.set_segment("/a", name);
        let described = publish(&transport, &["a".into()]).await;
        cluster.script([Fault::Slow(Duration::from_millis(200))]);
        let late = fetch(&transport, &described[0], Duration::from_millis(50)).await.unwrap_err();
        assert_eq!(late.kind(), ErrorKind::Timeout, "{late}");
        fetch(&transport, &described[0], Duration::from_secs(10)).await.unwrap();
        assert_eq!(transport.stats().silent_segments, 0);
        let asked = cluster.calls().located;
        for _ in 0..5 {
            fetch(&transport, &described[0], Duration::from_secs(10)).await.unwrap();
        }
        assert_eq!(cluster.calls().located, asked, "nobody is asked while all is well");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_transfer_from_a_silent_owner_is_not_repeated() {
    let Bed { cluster, transport, .. } = bed(Duration::from_secs(60));
    let gone = Owner::new().name(); // nobody listens there any more
    cluster.set_segment("/a", gone);
    let described = publish(&transport, &["a".into()]).await;
    cluster.script(vec![Fault::Get("/a", -800); 4]);
    let error = fetch(&transport, &described[0], Duration::from_secs(10)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}");
    assert_eq!(cluster.faults_left(), 3, "one attempt");
    let health = transport.health().await.unwrap();
    assert_eq!(health.quarantined_bytes, 1000, "the memory of that one is not used again");
}

#[tokio::test]
async fn a_provider_that_cannot_tell_changes_nothing() {
    let Bed { cluster, transport, .. } = bed(Duration::from_secs(60));
    let described = publish(&transport, &["a".into()]).await;
    cluster.script([Fault::Get("/a", -800)]);
    fetch(&transport, &described[0], Duration::from_secs(10)).await.unwrap();
    assert_eq!(transport.stats().silent_segments, 0);
}
