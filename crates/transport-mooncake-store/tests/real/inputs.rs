//! What users and other programs hand to a real store, and clients that die in the middle.

use super::*;

/// A process of this test's own takes its part from here.
const MASTER: &str = "FEATURESTORE_TEST_MASTER";

/// This test again, in a process of its own.
fn another(test: &str, master: SocketAddr) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", &format!("inputs::{test}")]);
    command.env(MASTER, master.to_string()).stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(Stdio::null());
    command
}

/// The part of a process that [`another`] has started: the master that it is to talk to.
fn part() -> Option<SocketAddr> {
    std::env::var(MASTER).ok().map(|master| master.parse().unwrap())
}

fn one(id: &str, generation: u64, meta: TensorMeta, bytes: &[u8]) -> Publication {
    let sample = SampleKey { generation: Generation(generation), ..sample(id) };
    let tensor = Tensor::new(meta, RegionSlice::copy_of(bytes)).unwrap();
    Publication::new(sample, [(FeatureName::new("t0").unwrap(), tensor)].into(), Ready::Now)
}

fn bytes(len: u64) -> TensorMeta {
    TensorMeta::new(Dtype::Uint8, [len]).unwrap()
}

/// A sample of one tensor that somebody put, as long as somebody says.
fn described(id: &str, len: u64) -> Arc<Descriptor> {
    let feature = FeatureDescriptor::new(bytes(len), None, None);
    let features = [(FeatureName::new("t0").unwrap(), feature)].into();
    Arc::new(Descriptor::new(sample(id), features, None, Location::Store).unwrap())
}

async fn put(store: &StoreTransport, publication: Publication) -> Result<Arc<Descriptor>> {
    let mut described = store.publish(vec![publication], PublishOptions::default()).await?;
    Ok(Arc::new(described.remove(0)))
}

async fn read(store: &StoreTransport, sample: &Arc<Descriptor>) -> Result<Vec<u8>> {
    let request = FetchRequest::new(sample.clone(), Destination::Pool);
    let fetched = store.fetch(vec![request], FetchOptions::default()).await?;
    Ok(fetched[0].tensors[0].data.as_bytes().unwrap().to_vec())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
async fn missing_empty_wrong_and_taken_objects_are_told_apart() {
    let master = support::master();
    let mut peer = Peer::start(master.address(), 64 * MIB);
    let store = transport(master.address(), 0, small());

    // Mooncake's `get` gives the same for no such key as for nothing, and no error.
    assert_eq!(peer.ask("value", "real/none/g1/t0", 0, 0), r#"{"bytes": 0, "exists": 0}"#);
    let error = read(&store, &described("none", 100)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert_eq!(error.context("key"), Some("real/none/g1/t0"), "{error}");

    // Nothing is no object, and comes back as nothing.
    let nothing = put(&store, one("nothing", 1, bytes(0), &[])).await.unwrap();
    assert_eq!(master.metric("master_key_count").unwrap(), 0.0);
    assert_eq!(read(&store, &nothing).await.unwrap(), [0; 0]);
    assert_eq!(store.release(vec![nothing.into()]).await.unwrap().released, 1);

    // Larger than every segment, and than this process may receive.
    let huge = vec![1; 65 << 20];
    let end = Instant::now() + Duration::from_secs(60);
    let error = loop {
        let batch = vec![one("huge", 1, bytes(65 * MIB), &huge)];
        let options = PublishOptions::default().deadline(Duration::from_secs(1));
        match store.publish(batch, options).await.unwrap_err() {
            // Reads of other tests that hang may have the interpreter's threads for a while.
            late if late.kind() == ErrorKind::Timeout && Instant::now() < end => {}
            error => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::CapacityExceeded, "{error}");
    assert_eq!(error.context("code"), Some("-200"), "{error}");
    assert_eq!(master.metric("master_key_count").unwrap(), 0.0);
    assert_eq!(peer.ask("put", "real/long/g1/t0", 1000, 0), "0");
    let error = read(&store, &described("long", 1 << 40)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ShortRead, "{error}");
    for (len, kind) in [(1001, ErrorKind::ShortRead), (999, ErrorKind::Corrupt)] {
        let error = read(&store, &described("long", len)).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(error.context("expected"), Some(len.to_string().as_str()), "{error}");
        assert_eq!(error.context("found"), Some("1000"), "{error}");
    }
    assert_eq!(read(&store, &described("long", 1000)).await.unwrap(), pattern(1000, 0));

    // A key that exists: Mooncake's put says 0 and keeps the old value.
    assert_eq!(peer.ask("put", "real/long/g1/t0", 1000, 7), "0");
    let ours = pattern(1000, 9);
    let error = put(&store, one("long", 1, bytes(1000), &ours)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
    let kept = r#"{"found": 1000, "equal": true}"#;
    assert_eq!(peer.ask("get", "real/long/g1/t0", 1000, 0), kept);
    let options = PublishOptions::default().replace(true);
    store.publish(vec![one("long", 1, bytes(1000), &ours)], options).await.unwrap();
    assert_eq!(peer.ask("get", "real/long/g1/t0", 1000, 9), kept);

    store.close().await.unwrap();
    drop(peer);
    master.stop();
}

/// Hosts and masters by name, and in IPv6; a protocol in another form is refused before anybody is
/// asked. In a process of its own, in whose environment everything is set that might mislead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
async fn clients_of_every_form_find_the_store_whatever_the_environment_says() {
    let Some(master) = part() else {
        let master = support::master();
        let owner = Peer::start(master.address(), 64 * MIB);
        let test = "clients_of_every_form_find_the_store_whatever_the_environment_says";
        let mut child = another(test, master.address());
        child.envs([
            ("MC_FORCE_MNNVL", "0"),
            ("MC_INTRANODE_NVLINK", ""),
            ("MC_INTRA_NVLINK", "no"),
        ]);
        assert!(child.status().unwrap().success());
        assert_eq!(master.metric("master_put_start_requests_total").unwrap(), 0.0);
        assert_eq!(master.metric("master_key_count").unwrap(), 3.0, "one of each client");
        drop(owner);
        return master.stop();
    };
    let wheel = WheelOptions::at(support::environment());
    let by_name = format!("localhost:{}", master.port());
    let mut clients = Vec::new();
    for (host, at) in [("localhost", &by_name), ("::1", &by_name), ("127.0.0.1", &by_name)] {
        let client = WheelStore::connect(&wheel, &StoreSetup::client(host, at)).unwrap();
        clients.push(StoreTransport::start(Arc::new(client), small()).unwrap());
    }
    let mut all = Vec::new();
    for (i, client) in clients.iter().enumerate() {
        let publication = one(&format!("of {i}"), 1, bytes(5000), &pattern(5000, i as u64));
        all.push(put(client, publication).await.unwrap());
    }
    // Several engines in one process, each reading what the others wrote.
    for client in &clients {
        for (i, sample) in all.iter().enumerate() {
            assert_eq!(read(client, sample).await.unwrap(), pattern(5000, i as u64));
        }
    }
    for protocol in ["TCP", " tcp", "tcp\n", ""] {
        let mut setup = StoreSetup::client("127.0.0.1", "127.0.0.1:1");
        setup.protocol = protocol.into();
        let error = WheelStore::connect(&wheel, &setup).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{protocol:?}: {error}");
        assert_eq!(error.context("setting"), Some("protocol"), "{error}");
    }
    for client in clients {
        client.close().await.unwrap();
    }
}

/// The writer is a process of this test's own that is killed while its bytes are on their way to an
/// owner that has stopped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
async fn f20_a_writer_killed_in_mid_put_keeps_nobody_from_the_sample() {
    const LEN: u64 = 16 * MIB;
    let value = |seed| one("killed", seed, bytes(LEN), &pattern(LEN, seed));
    if let Some(master) = part() {
        let store = transport(master, 0, small());
        let _ = store.publish(vec![value(1)], PublishOptions::default()).await;
        return;
    }
    let options = MasterOptions::of_environment(&support::environment())
        .flag("--put_start_discard_timeout_sec=1")
        .flag("--put_start_release_timeout_sec=2");
    let master = ManagedMaster::start(&options).unwrap();
    let owner = Peer::start(master.address(), 64 * MIB);
    let store = transport(master.address(), 0, small());
    owner.signal(rustix::process::Signal::STOP);
    let test = "f20_a_writer_killed_in_mid_put_keeps_nobody_from_the_sample";
    let begun = Instant::now();
    let mut writer = another(test, master.address()).spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(30);
    // The master has given it its place; the bytes cannot get there.
    while master.metric("master_allocated_bytes").unwrap() < LEN as f64 {
        assert!(writer.try_wait().unwrap().is_none() && Instant::now() < end, "it never began");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    writer.kill().unwrap();
    writer.wait().unwrap();
    owner.signal(rustix::process::Signal::CONT);

    // What it left is no data, and its name is taken for a while; the next generation's is not.
    let error = read(&store, &described("killed", LEN)).await.unwrap_err();
    assert!(error.kind() != ErrorKind::Timeout, "{error}");
    let first = put(&store, value(1)).await;
    let next = put(&store, value(2)).await.unwrap();
    assert_eq!(read(&store, &next).await.unwrap(), pattern(LEN, 2));
    match &first {
        Err(error) => assert!(error.to_string().contains("a writer that died"), "{error}"),
        Ok(_) => assert!(begun.elapsed() > Duration::from_secs(1), "it was still taken"),
    }

    // The master gives up what was never completed: then the name, and the room, are free again.
    let end = Instant::now() + Duration::from_secs(20);
    let mut again = first;
    while let Err(error) = again {
        assert!(Instant::now() < end, "{error}");
        tokio::time::sleep(Duration::from_millis(100)).await;
        again = put(&store, value(1)).await;
    }
    let again = again.unwrap();
    assert_eq!(read(&store, &again).await.unwrap(), pattern(LEN, 1));
    let report = store.release(releases(&[next, again])).await.unwrap();
    assert_eq!(report.released, 2, "{report:?}");
    while master.metric("master_allocated_bytes").unwrap() > 0.0 {
        assert!(Instant::now() < end, "room is lost");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    store.close().await.unwrap();
    drop(owner);
    master.stop();
}

/// A producer that ends waits for its consumers as long as it was told, and then says what is lost;
/// they are told that it is gone, and do not wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
async fn f24_a_producer_that_ends_waits_for_its_consumers_and_then_is_gone() {
    let master = support::master();
    let mut config = small();
    config.close_linger = Duration::from_secs(1);
    let producer = transport(master.address(), 64 * MIB, config);
    let trainer = transport(master.address(), 0, small());
    let ids: Vec<String> = (0..20).map(|i| format!("{i}")).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let published = publish(&producer, &ids, &[100_000]).await;
    fetch(&trainer, &published[..12]).await.unwrap();
    assert_eq!(trainer.release(releases(&published[..12])).await.unwrap().released, 12);
    let start = Instant::now();
    producer.close().await.unwrap();
    assert!(start.elapsed() >= Duration::from_secs(1), "eight are left: it waits");
    let start = Instant::now();
    for sample in &published[12..] {
        let error = fetch(&trainer, std::slice::from_ref(sample)).await.unwrap_err();
        let gone = [ErrorKind::NotFound, ErrorKind::PeerGone];
        assert!(gone.contains(&error.kind()), "{error}");
    }
    // Mooncake itself would wait half a minute for each.
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    drop((producer, trainer));
    master.stop();
}
