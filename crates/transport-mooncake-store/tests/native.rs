//! Objects that are read without Mooncake's engine.

mod fake;

use std::{
    net::TcpListener,
    sync::Arc,
    time::{Duration, Instant},
};

use fake::{
    Cluster, FakeStore,
    reader::{FakeReader, Turn},
};
use transport_core::{
    ByteSize, Descriptor, Destination, Dtype, ErrorKind, FeatureName, FetchOptions, FetchRequest,
    Generation, Publication, PublishOptions, Ready, RegionMut, RegionSlice, Result, SampleId,
    SampleKey, StoreId, Tensor, TensorMeta, Transport,
};
use transport_mooncake_store::{StoreConfig, StoreTransport};

const LEN: u64 = 1000;

struct Bed {
    cluster: Arc<Cluster>,
    _client: Arc<FakeStore>,
    reader: Arc<FakeReader>,
    transport: StoreTransport,
    _own: TcpListener, // the handshake of this process's segment
}

/// Objects called `a…` lie at one owner, `b…` at another, and `own…` in this process.
fn bed_with(change: impl FnOnce(&mut StoreConfig)) -> Bed {
    bed_of(|cluster| cluster.client_with_sessions(), change)
}

fn bed_of(
    client: impl FnOnce(&Arc<Cluster>) -> Arc<FakeStore>,
    change: impl FnOnce(&mut StoreConfig),
) -> Bed {
    let cluster = Cluster::new();
    cluster.set_segment("/a", "127.0.0.1:17".into());
    cluster.set_segment("/b", "127.0.0.1:18".into());
    let own = TcpListener::bind("127.0.0.1:0").unwrap();
    cluster.set_segment("/own", own.local_addr().unwrap().to_string());
    let mut config = StoreConfig::default().pool(ByteSize::mib(16), ByteSize::mib(16));
    config.backoff = Duration::from_millis(1);
    config.segment_silence = None;
    change(&mut config);
    let (client, reader) = (client(&cluster), Arc::<FakeReader>::default());
    let transport =
        StoreTransport::start_with(client.clone(), config, Some(reader.clone())).unwrap();
    Bed { cluster, _client: client, reader, transport, _own: own }
}

fn bed() -> Bed {
    bed_with(|_| {})
}

fn bytes_of(id: &str) -> Vec<u8> {
    id.bytes().cycle().take(LEN as usize).collect()
}

impl Bed {
    async fn publish(&self, ids: &[&str]) -> Vec<Arc<Descriptor>> {
        let batch = ids.iter().map(|id| {
            let meta = TensorMeta::new(Dtype::Uint8, [LEN]).unwrap();
            let tensor = Tensor::new(meta, RegionSlice::copy_of(&bytes_of(id))).unwrap();
            let sample = SampleId::new(*id).unwrap();
            let sample = SampleKey::new(StoreId::new("s").unwrap(), sample, Generation(1));
            let tensors = [(FeatureName::new("t").unwrap(), tensor)].into();
            Publication::new(sample, tensors, Ready::Now)
        });
        let options = PublishOptions::default();
        let described = self.transport.publish(batch.collect(), options).await.unwrap();
        described.into_iter().map(Arc::new).collect()
    }

    /// Reads into the pool, and compares every byte.
    async fn fetch(&self, described: &[Arc<Descriptor>]) -> Result<()> {
        self.fetch_within(described, Duration::from_secs(20)).await
    }

    async fn fetch_within(&self, described: &[Arc<Descriptor>], within: Duration) -> Result<()> {
        let request = |d: &Arc<Descriptor>| FetchRequest::new(d.clone(), Destination::Pool);
        let requests = described.iter().map(request).collect();
        let options = FetchOptions::default().deadline(within);
        for fetched in self.transport.fetch(requests, options).await? {
            let id = fetched.descriptor.sample.sample_id.as_str();
            assert!(fetched.tensors[0].data.as_bytes().unwrap() == bytes_of(id), "{id} differs");
        }
        Ok(())
    }
}

#[tokio::test]
async fn what_others_hold_is_read_from_them_and_the_rest_by_mooncake() {
    let bed = bed_of(Cluster::client_with_memory, |_| {});
    assert!(!bed.transport.info().capabilities.ranges, "the rest is read whole");
    let described = bed.publish(&["a1", "b1", "a2", "own", "nowhere"]).await;
    bed.fetch(&described).await.unwrap();
    let mut segments = bed.reader.segments.lock().clone();
    segments.sort();
    assert_eq!(segments, ["127.0.0.1:17", "127.0.0.1:18"], "one call an owner");
    assert_eq!(bed.transport.stats().native_bytes, 3 * LEN);
    let calls = bed.cluster.calls();
    assert_eq!((calls.located, calls.get, calls.get_keys), (1, 1, 2), "the own one and nowhere");
    assert_eq!(bed.transport.health().await.unwrap().host_payload_bytes, 10 * LEN);
    bed.transport.close().await.unwrap();
    assert!(bed.reader.closed.load(std::sync::atomic::Ordering::SeqCst));
}

#[tokio::test]
async fn a_client_without_memory_leaves_nothing_to_mooncake() {
    // Also where this process listens at the segment's address: it inherited the socket of the
    // process that started it.
    let bed = bed();
    let described = bed.publish(&["a1", "own"]).await;
    bed.fetch(&described).await.unwrap();
    assert_eq!((bed.transport.stats().native_bytes, bed.cluster.calls().get), (2 * LEN, 0));
}

/// Mooncake's names of segments: IPv6 addresses have no brackets, and the port is the last part.
#[tokio::test]
async fn segments_at_ipv6_addresses_and_named_hosts_are_read_from_their_owners() {
    let bed = bed();
    let names =
        [("/x", "::1:17"), ("/y", "2001:db8::2:65535"), ("/z", "[::1]:17"), ("/w", "trainer-3:17")];
    names.into_iter().for_each(|(text, name)| bed.cluster.set_segment(text, name.into()));
    let described = bed.publish(&["x", "y", "z", "w"]).await;
    bed.fetch(&described).await.unwrap();
    let mut asked = bed.reader.segments.lock().clone();
    asked.sort();
    assert_eq!(asked, ["[2001:db8::2]:65535", "[::1]:17", "[::1]:17", "trainer-3:17"]);
    // What is no name of a handshake is Mooncake's to know, such as the key of a metadata server.
    for name in ["a:b:17", "::1:65536", "::1:", "host", "", "::g:17"] {
        let bed = self::bed();
        bed.cluster.set_segment("/odd", name.into());
        let described = bed.publish(&["odd"]).await;
        bed.fetch(&described).await.unwrap();
        assert_eq!((bed.reader.calls(), bed.cluster.calls().get), (0, 1), "{name:?}");
    }
}

#[tokio::test]
async fn a_failed_read_is_tried_again_into_the_same_memory() {
    let bed = bed();
    let described = bed.publish(&["a1", "b1"]).await;
    bed.reader.script([Turn::Fail(ErrorKind::PeerGone), Turn::Fail(ErrorKind::ShortRead)]);
    bed.fetch(&described).await.unwrap();
    let health = bed.transport.health().await.unwrap();
    assert_eq!(health.quarantined_bytes, 0, "nothing can write it any more");
    // Memory of the caller, too, which Mooncake's engine would have spoiled.
    let own = bed.transport.take(LEN as usize).unwrap();
    let address = own.address();
    bed.reader.script([Turn::Fail(ErrorKind::PeerGone)]);
    let request = FetchRequest::new(described[0].clone(), Destination::Into(vec![own]));
    let fetched = bed.transport.fetch(vec![request], FetchOptions::default()).await.unwrap();
    let data = &fetched[0].tensors[0].data;
    assert_eq!((data.address(), data.as_bytes().unwrap()), (address, &bytes_of("a1")[..]));

    bed.reader.script([Turn::Fail(ErrorKind::PeerGone); 4]);
    let error = bed.fetch(&described[..1]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}");
    assert_eq!(error.context("attempts"), Some("4"), "{error}");
    assert_eq!(error.context("key"), Some("s/a1/g1/t"), "{error}");
}

#[tokio::test]
async fn an_owner_of_another_wire_is_left_to_mooncake_for_good() {
    let bed = bed();
    let described = bed.publish(&["a1", "b1"]).await;
    bed.reader.script([Turn::Fail(ErrorKind::Unsupported), Turn::Fail(ErrorKind::Protocol)]);
    for _ in 0..3 {
        bed.fetch(&described).await.unwrap();
    }
    assert_eq!(bed.reader.calls(), 2);
    assert_eq!(bed.cluster.calls().get_keys, 6);
}

#[tokio::test]
async fn another_length_is_not_even_read() {
    let bed = bed();
    let described = bed.publish(&["a1"]).await;
    for (len, kind) in [(LEN - 1, ErrorKind::ShortRead), (LEN + 1, ErrorKind::Corrupt)] {
        bed.cluster.place("s/a1/g1/t", &vec![0; len as usize]);
        let error = bed.fetch(&described).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(error.context("found"), Some(len.to_string().as_str()), "{error}");
    }
    bed.cluster.lose_everything();
    let error = bed.fetch(&described).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert_eq!(bed.reader.calls(), 0);
}

#[tokio::test]
async fn what_outlasts_its_lease_is_not_taken_for_data() {
    let bed = bed_with(|config| config.read_lease = Some(Duration::from_millis(50)));
    let described = bed.publish(&["a1"]).await;
    let late = Turn::Slow(Duration::from_millis(60));
    bed.reader.script([late]);
    bed.fetch(&described).await.unwrap();
    assert_eq!((bed.reader.calls(), bed.transport.stats().read_retries), (2, 1));
    bed.reader.script([late; 4]);
    let error = bed.fetch(&described).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
}

#[tokio::test]
async fn an_owner_that_hangs_costs_the_deadline_and_no_memory() {
    let bed = bed();
    let described = bed.publish(&["a1", "b1"]).await;
    bed.reader.script([Turn::Hang, Turn::Hang]);
    let within = Duration::from_millis(200);
    let error = bed.fetch_within(&described, within).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    bed.fetch(&described).await.unwrap();
    let health = bed.transport.health().await.unwrap();
    assert_eq!(health.quarantined_bytes, 0, "the read has ended");
}

#[tokio::test]
async fn a_reader_needs_the_length_of_leases() {
    let mut config = StoreConfig::default();
    config.read_lease = None;
    let (client, reader) = (Cluster::new().client(), Arc::<FakeReader>::default());
    let error = StoreTransport::start_with(client, config, Some(reader)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{error}");
    assert_eq!(error.context("setting"), Some("read_lease"));
    let bed = bed();
    assert!(bed.transport.info().engine.ends_with("; reads by a fake reader"));
}

/// A request of ranges of the one tensor of a sample, and what it should give.
fn ranged(
    described: &Arc<Descriptor>,
    ranges: &[(u64, u64)],
    own: Option<RegionMut>,
) -> (FetchRequest, Vec<u8>) {
    let bytes = bytes_of(described.sample.sample_id.as_str());
    let wanted = ranges.iter().flat_map(|&(from, to)| &bytes[from as usize..to as usize]);
    let wanted: Vec<u8> = wanted.copied().collect();
    let destination = own.map_or(Destination::Pool, |own| Destination::Into(vec![own]));
    let ranges = ranges.iter().map(|&(from, to)| from..to).collect();
    (FetchRequest::new(described.clone(), destination).ranges(ranges), wanted)
}

async fn fetch_ranged(bed: &Bed, asked: Vec<(FetchRequest, Vec<u8>)>) {
    let (requests, wanted): (Vec<_>, Vec<_>) = asked.into_iter().unzip();
    let fetched = bed.transport.fetch(requests, FetchOptions::default()).await.unwrap();
    for (fetched, wanted) in fetched.iter().zip(wanted) {
        let data = &fetched.tensors[0].data;
        assert!(data.as_bytes().unwrap() == wanted, "{} differs", fetched.descriptor.sample);
    }
}

#[tokio::test]
async fn ranges_of_what_others_hold_are_read_alone() {
    let bed = bed();
    let described = bed.publish(&["a1", "b1"]).await;
    let own = RegionMut::zeroed(307).unwrap(); // memory that no engine knows
    let address = own.address();
    let (request, wanted) = ranged(&described[0], &[(993, 1000), (0, 300)], Some(own));
    bed.reader.script([Turn::Fail(ErrorKind::PeerGone)]); // tried again into the same memory
    let fetched = bed.transport.fetch(vec![request], FetchOptions::default()).await.unwrap();
    let data = &fetched[0].tensors[0].data;
    assert_eq!((data.address(), data.as_bytes().unwrap()), (address, &wanted[..]));
    // Several of one object, and the object, in one call.
    let asked = vec![
        ranged(&described[0], &[(5, 6)], None),
        ranged(&described[1], &[(0, 1000)], None),
        ranged(&described[0], &[(0, 1000)], None),
        ranged(&described[0], &[(7, 7), (1, 3), (2, 4)], None),
    ];
    fetch_ranged(&bed, asked).await;
    let stats = bed.transport.stats();
    assert_eq!(stats.native_bytes, 307 + 1 + 1000 + 1000 + 4, "no other bytes have moved");
    assert_eq!(bed.cluster.calls().get, 0);
    assert_eq!(bed.transport.health().await.unwrap().quarantined_bytes, 0);
}

/// Mooncake's engine reads whole objects: cutting pieces from them would read an object of n pieces
/// n times.
#[tokio::test]
async fn ranges_that_the_reader_cannot_read_are_refused_before_a_byte_moves() {
    let bed = bed();
    let described = bed.publish(&["b1", "a1", "nowhere"]).await;
    bed.reader.script([Turn::Fail(ErrorKind::Unsupported)]); // the owner of `b…`, for good
    let refused = async |asked: Vec<(FetchRequest, Vec<u8>)>| {
        let requests = asked.into_iter().map(|(request, _)| request).collect();
        bed.transport.fetch(requests, FetchOptions::default()).await.unwrap_err()
    };
    for piece in 0..64 {
        let asked = ranged(&described[0], &[(piece * 15, piece * 15 + 15)], None);
        let error = refused(vec![asked]).await;
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert_eq!(error.context("key"), Some("s/b1/g1/t"), "{error}");
        assert!(error.to_string().contains("fetch the whole tensor"), "{error}");
    }
    // Nor of others in the same call, nor of what lies where nobody says.
    let own = Some(RegionMut::zeroed(10).unwrap());
    for other in [ranged(&described[0], &[(0, 10)], own), ranged(&described[2], &[(0, 1)], None)] {
        let error = refused(vec![ranged(&described[1], &[(1, 2)], None), other]).await;
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    }
    assert_eq!(bed.reader.calls(), 1, "the owner was asked once");
    assert_eq!((bed.transport.stats().native_bytes, bed.cluster.calls().get), (0, 0));
    // The whole is Mooncake's to read.
    bed.fetch(&described).await.unwrap();
    assert_eq!((bed.transport.stats().native_bytes, bed.cluster.calls().get_keys), (LEN, 2));
    // What is not there is not there.
    bed.cluster.lose_everything();
    let error = refused(vec![ranged(&described[0], &[(0, 10)], None)]).await;
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    let nothing = vec![ranged(&described[0], &[(0, 10)], None).0.names(vec![])];
    let error = bed.transport.fetch(nothing, FetchOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

#[tokio::test]
async fn a_provider_that_does_not_say_where_objects_lie_reads_no_ranges() {
    let reader = Arc::<FakeReader>::default();
    let (client, config) = (Cluster::new().client(), StoreConfig::default());
    let transport = StoreTransport::start_with(client, config, Some(reader)).unwrap();
    assert!(!transport.info().capabilities.ranges);
}

#[tokio::test]
async fn two_hundred_thousand_ranges_are_one_call_to_the_owner() {
    let bed = bed();
    let described = bed.publish(&["a1"]).await;
    // Every third is empty; they overlap, and come in no order.
    let range = |i: u64| {
        let start = i * 7919 % LEN;
        (start, if i.is_multiple_of(3) { start } else { (start + i % 5).min(LEN) })
    };
    let ranges: Vec<_> = (0..200_000).map(range).collect();
    let (request, wanted) = ranged(&described[0], &ranges, None);
    let start = Instant::now();
    fetch_ranged(&bed, vec![(request, wanted)]).await;
    assert_eq!(bed.reader.calls(), 1);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}
