//! The transport over a real Mooncake Store: the wheel, a master, and Python on the other side.
//!
//! `cargo xtask test` prepares what these need. By hand:
//! `FEATURESTORE_MOONCAKE_VENV=… cargo test -p transport-mooncake-store --features mooncake-python
//! --test real -- --include-ignored`.
#![cfg(feature = "mooncake-python")]

#[path = "../../../mooncake-sys/tests/support/mod.rs"]
mod support;

#[cfg(feature = "cuda")]
mod device;
mod inputs;
#[path = "../lent/mod.rs"]
mod lent;

use std::{
    io::{BufRead, BufReader, Write},
    net::SocketAddr,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use indexmap::IndexMap;
use lent::Lent;
use mooncake_sys::{
    StoreApi, StoreSetup,
    master::{ManagedMaster, MasterOptions},
    python::{WheelOptions, WheelStore},
};
use transport_core::{
    ByteSize, Descriptor, Destination, Dtype, ErrorKind, FeatureDescriptor, FeatureName,
    FetchOptions, FetchRequest, Generation, Location, Publication, PublishOptions, Ready,
    RegionSlice, Release, Result, SampleId, SampleKey, StoreId, Tensor, TensorMeta, Transport,
    conformance::{Case, Harness, Need, Outcome, Pair, Setup, cases},
};
use transport_mooncake_store::{Layout, StoreConfig, StoreTransport};

const MIB: u64 = 1 << 20;

fn client(master: SocketAddr, segment: u64) -> Arc<dyn StoreApi> {
    let setup = StoreSetup::client("127.0.0.1", master.to_string()).segment(segment);
    Arc::new(WheelStore::connect(&WheelOptions::at(support::environment()), &setup).unwrap())
}

fn transport(master: SocketAddr, segment: u64, config: StoreConfig) -> Arc<StoreTransport> {
    Arc::new(StoreTransport::start(client(master, segment), config).unwrap())
}

fn small() -> StoreConfig {
    StoreConfig::default().pool(ByteSize::mib(256), ByteSize::mib(0))
}

fn pattern(len: u64, seed: u64) -> Vec<u8> {
    (0..len).map(|i| ((7 * i + seed) % 256) as u8).collect()
}

fn publication(id: &str, lens: &[u64]) -> Publication {
    let tensors = lens.iter().enumerate().map(|(i, &len)| {
        let meta = TensorMeta::new(Dtype::Uint8, [len]).unwrap();
        let data = RegionSlice::copy_of(&pattern(len, i as u64));
        (FeatureName::new(format!("t{i}")).unwrap(), Tensor::new(meta, data).unwrap())
    });
    Publication::new(sample(id), tensors.collect(), Ready::Now)
}

fn sample(id: &str) -> SampleKey {
    SampleKey::new(StoreId::new("real").unwrap(), SampleId::new(id).unwrap(), Generation(1))
}

async fn publish(transport: &StoreTransport, ids: &[&str], lens: &[u64]) -> Vec<Arc<Descriptor>> {
    let batch = ids.iter().map(|id| publication(id, lens)).collect();
    let described = transport.publish(batch, PublishOptions::default()).await.unwrap();
    described.into_iter().map(Arc::new).collect()
}

async fn fetch(transport: &StoreTransport, described: &[Arc<Descriptor>]) -> Result<()> {
    let request = |d: &Arc<Descriptor>| FetchRequest::new(d.clone(), Destination::Pool);
    let requests = described.iter().map(request).collect();
    for fetched in transport.fetch(requests, FetchOptions::default()).await? {
        for (i, tensor) in fetched.tensors.values().enumerate() {
            let want = pattern(tensor.meta.nbytes(), i as u64);
            assert!(tensor.data.as_bytes().unwrap() == want, "tensor {i} differs");
        }
    }
    Ok(())
}

fn releases(described: &[Arc<Descriptor>]) -> Vec<Release> {
    described.iter().map(|d| d.clone().into()).collect()
}

/// A Python process with a store client; ended when dropped.
struct Peer {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Peer {
    fn start(master: SocketAddr, segment: u64) -> Self {
        let mut child = Command::new(support::environment().join("bin/python"))
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/peer.py"))
            .args([master.to_string(), segment.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let mut peer = Self { child, answers };
        assert_eq!(peer.answer(), r#"{"setup": 0}"#);
        peer
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.answers.read_line(&mut line).unwrap() > 0, "the peer ended");
            if let Some(answer) = line.trim().strip_prefix("@@") {
                return answer.to_owned();
            }
        }
    }

    fn ask(&mut self, command: &str, key: &str, length: u64, seed: u64) -> String {
        self.send(command, key, length, seed);
        self.answer()
    }

    fn send(&mut self, command: &str, key: &str, length: u64, seed: u64) {
        let stdin = self.child.stdin.as_mut().unwrap();
        writeln!(stdin, r#"{{"cmd":"{command}","key":"{key}","length":{length},"seed":{seed}}}"#)
            .unwrap();
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Ends the process without a goodbye.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill(); // fails only if it ended already
        let _ = self.child.wait();
    }
}

/// Transports over the same two clients, one case after the other.
#[derive(Debug)]
struct Real {
    publisher: Arc<dyn StoreApi>,
    consumer: Arc<dyn StoreApi>,
}

#[async_trait]
impl Harness for Real {
    fn name(&self) -> String {
        "store transport over a real store".into()
    }

    async fn pair(&self, _: &Setup) -> Result<Pair> {
        let lent = |api: &Arc<dyn StoreApi>, owns_memory| -> Result<Arc<dyn Transport>> {
            let api = Lent::new(api.clone(), owns_memory);
            Ok(Arc::new(StoreTransport::start(api, small())?))
        };
        Ok(Pair::new(lent(&self.publisher, true)?, lent(&self.consumer, false)?))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
async fn the_conformance_suite_holds() {
    let master = support::master();
    let harness = Real {
        publisher: client(master.address(), 512 * MIB),
        consumer: client(master.address(), 0),
    };
    // Cases that cannot apply are left out beforehand; tests/conformance.rs lists them.
    let applies = |c: &&Case| c.needs.iter().all(|need| *need == Need::NoDeviceMemory);
    let cases: Vec<_> = cases().iter().filter(applies).collect();
    assert!(cases.len() >= 25, "only {} cases apply", cases.len());
    for case in cases {
        match case.run(&harness).await {
            Outcome::Passed => {}
            Outcome::NotApplicable(why) => println!("{}: {why}", case.name),
            Outcome::Failed(why) => panic!("{}: {why}", case.name),
        }
        assert_eq!(master.metric("master_key_count").unwrap(), 0.0, "{} leaves some", case.name);
    }
    drop(harness);
    master.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
async fn python_reads_what_rust_wrote_and_the_other_way_round() {
    let master = support::master();
    let mut peer = Peer::start(master.address(), 64 * MIB);
    let trainer = transport(master.address(), 0, small());
    let registered = |t: &StoreTransport| t.stats().registrations;

    let described = publish(&trainer, &["rust"], &[100_000, 8, 3 * MIB]).await;
    for (i, len) in [(0, 100_000), (1, 8), (2, 3 * MIB)] {
        let answer = peer.ask("get", &format!("real/rust/g1/t{i}"), len, i);
        assert_eq!(answer, format!(r#"{{"found": {len}, "equal": true}}"#));
    }
    let after_warm_up = registered(&trainer);

    for (i, len) in [(0, 70_000u64), (1, 2 * MIB)] {
        assert_eq!(peer.ask("put", &format!("real/python/g1/t{i}"), len, i), "0");
    }
    let features: IndexMap<_, _> = [(0, 70_000), (1, 2 * MIB)]
        .into_iter()
        .map(|(i, len)| {
            let meta = TensorMeta::new(Dtype::Uint8, [len]).unwrap();
            let feature = FeatureDescriptor::new(meta, None, None);
            (FeatureName::new(format!("t{i}")).unwrap(), feature)
        })
        .collect();
    let python = Descriptor::new(sample("python"), features, None, Location::Store).unwrap();
    let all = [described, vec![Arc::new(python)]].concat();
    for _ in 0..3 {
        fetch(&trainer, &all).await.unwrap();
    }
    assert_eq!(registered(&trainer), after_warm_up, "none on the hot path");
    assert_eq!(master.metric("master_key_count").unwrap(), 5.0);
    let report = trainer.release(releases(&all)).await.unwrap();
    assert_eq!((report.released, report.already_gone), (2, 0), "leased or not");
    let report = trainer.release(releases(&all)).await.unwrap();
    assert_eq!((report.released, report.already_gone), (0, 2));
    assert_eq!(master.metric("master_key_count").unwrap(), 0.0);
    assert_eq!(master.metric("master_allocated_bytes").unwrap(), 0.0);
    trainer.close().await.unwrap();
    drop(peer);
    master.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
async fn a_full_store_is_an_error_and_nothing_stays() {
    let master = support::master();
    for layout in [Layout::PerTensor, Layout::Grouped { below: ByteSize::mib(64) }] {
        let store = transport(master.address(), 32 * MIB, small().layout(layout));
        let batch = (0..8).map(|i| publication(&format!("{i}"), &[4 * MIB, 4 * MIB])).collect();
        let options = PublishOptions::default().deadline(Duration::from_secs(2));
        let error = store.publish(batch, options).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::CapacityExceeded, "{error}");
        assert_eq!(error.context("code"), Some("-200"), "{error}");
        assert_eq!(master.metric("master_key_count").unwrap(), 0.0);
        let described = publish(&store, &["a"], &[4 * MIB, 4 * MIB]).await;
        fetch(&store, &described).await.unwrap();
        store.close().await.unwrap();
    }
    master.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
async fn a_killed_segment_owner_is_an_error_in_time() {
    let master = support::master();
    let mut owner = Peer::start(master.address(), 64 * MIB);
    let trainer = transport(master.address(), 0, small());
    let described = publish(&trainer, &["a", "b"], &[100_000, 8]).await;
    fetch(&trainer, &described).await.unwrap();
    owner.kill();
    let start = Instant::now();
    let request = FetchRequest::new(described[0].clone(), Destination::Pool);
    let options = FetchOptions::default().deadline(Duration::from_secs(5));
    let error = trainer.fetch(vec![request], options).await.unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(7), "{:?}", start.elapsed());
    println!("after {:?}: {error}", start.elapsed());
    // A new owner of memory makes the store usable again, under the same keys.
    let _owner = Peer::start(master.address(), 64 * MIB);
    let start = Instant::now();
    let report = trainer.release(releases(&described)).await.unwrap();
    println!("release after {:?}: {report:?}", start.elapsed());
    assert_eq!(report.released + report.already_gone + report.unconfirmed, 2);
    let drained = trainer.drain_removals(Duration::from_secs(30)).await.unwrap();
    assert_eq!(drained.remaining, 0, "{drained:?}");
    let again = publish(&trainer, &["a", "b"], &[100_000, 8]).await;
    fetch(&trainer, &again).await.unwrap();
    drop(trainer);
    master.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
async fn a_restarted_master_has_forgotten_and_says_so() {
    let options = MasterOptions::of_environment(&support::environment());
    let master = ManagedMaster::start(&options).unwrap();
    let address = master.address();
    let store = transport(address, 64 * MIB, small());
    let described = publish(&store, &["a", "b"], &[100_000, 8]).await;
    fetch(&store, &described).await.unwrap();
    master.stop();
    let request = FetchRequest::new(described[0].clone(), Destination::Pool);
    let limit = FetchOptions::default().deadline(Duration::from_secs(5));
    let start = Instant::now();
    let error = store.fetch(vec![request], limit).await.unwrap_err();
    println!("without a master, after {:?}: {error}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(7));

    let master = ManagedMaster::start_at(&options, address.port()).unwrap();
    // The client finds the new master by itself, and mounts its memory again, within its own time.
    let deadline = Instant::now() + Duration::from_secs(60);
    let again = loop {
        let batch = vec![publication("c", &[1000])];
        let options = PublishOptions::default().deadline(Duration::from_secs(5));
        match store.publish(batch, options).await {
            Ok(described) => break Arc::new(described.into_iter().next().unwrap()),
            Err(error) if Instant::now() < deadline => println!("not yet: {error}"),
            Err(error) => panic!("the client does not come back: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    };
    fetch(&store, &[again]).await.unwrap();
    let error = fetch(&store, &described).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "old references are refused: {error}");
    let report = store.release(releases(&described)).await.unwrap();
    assert_eq!(report.already_gone, 2, "{report:?}");
    drop(store);
    master.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
async fn a_hung_owner_costs_one_deadline_and_is_read_when_it_is_back() {
    // Else the master forgets an owner, and what it holds, after ten seconds without a sign of life.
    let options = MasterOptions::of_environment(&support::environment()).flag("--client_ttl=300");
    let master = ManagedMaster::start(&options).unwrap();
    let mut first = Peer::start(master.address(), 64 * MIB);
    let api = client(master.address(), 0);
    let mut config = small().pool(ByteSize::mib(64), ByteSize::mib(64));
    config.segment_silence = Some(Duration::from_secs(1));
    let trainer = StoreTransport::start(api.clone(), config).unwrap();
    assert_eq!(first.ask("put", "probe", 8, 0), "0");
    let segments_of = |keys: &[&str]| -> Vec<Vec<String>> {
        let located = api.locate(keys).unwrap().expect("the wheel can tell").into_iter();
        located.map(|replicas| replicas.iter().map(|r| r.segment.to_string()).collect()).collect()
    };
    let first_segment = segments_of(&["probe"]).remove(0); // where else
    let second = Peer::start(master.address(), 64 * MIB);
    let ids: Vec<String> = (0..80).map(|i| format!("{i}")).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let described = publish(&trainer, &ids, &[5000]).await;
    fetch(&trainer, &described).await.unwrap();
    let keys: Vec<String> =
        described.iter().flat_map(|d| d.keys()).map(|k| k.to_string()).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let lies_in_first: Vec<bool> =
        segments_of(&keys).iter().map(|segments| *segments == first_segment).collect();
    let in_first = lies_in_first.iter().filter(|is| **is).count();
    assert!((10..70).contains(&in_first), "{in_first} of 80 in the first segment");

    first.signal(rustix::process::Signal::STOP);
    let deadline = Duration::from_secs(2);
    let (mut late, mut refused) = (0, 0);
    for (i, sample) in described.iter().enumerate() {
        let request = FetchRequest::new(sample.clone(), Destination::Pool);
        let options = FetchOptions::default().deadline(deadline);
        let start = Instant::now();
        match trainer.fetch(vec![request], options).await {
            Ok(_) => assert!(!lies_in_first[i]),
            Err(error) if error.kind() == ErrorKind::Timeout => late += 1,
            Err(error) => {
                assert_eq!(
                    (error.kind(), lies_in_first[i]),
                    (ErrorKind::PeerGone, true),
                    "{error}"
                );
                assert!(start.elapsed() < deadline, "refused at once: {:?}", start.elapsed());
                refused += 1;
            }
        }
    }
    assert_eq!((late, refused), (1, in_first - 1), "one waits, for all");
    let health = trainer.health().await.unwrap();
    assert_eq!(health.quarantined_bytes, 5000, "Mooncake still waits to fill it");

    first.signal(rustix::process::Signal::CONT);
    let end = Instant::now() + Duration::from_secs(40);
    while trainer.health().await.unwrap().quarantined_bytes > 0 {
        assert!(Instant::now() < end, "the memory does not come back");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await; // the silence is over
    fetch(&trainer, &described).await.unwrap();
    assert_eq!(trainer.release(releases(&described)).await.unwrap().released, 80);
    trainer.close().await.unwrap();
    drop((first, second));
    master.stop();
}

/// Other members take objects away as soon as their leases are over, and write others to the same
/// place: what a read that outlasts its lease may find.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
async fn what_is_read_after_its_lease_is_never_taken_for_data() {
    let lease = Duration::from_millis(40);
    let options = MasterOptions::of_environment(&support::environment()).lease(lease);
    let master = ManagedMaster::start(&options).unwrap();
    let owner = Peer::start(master.address(), 320 * MIB);
    let publisher = transport(master.address(), 0, small());
    let mut config = small().pool(ByteSize::mib(1024), ByteSize::mib(1024));
    config.read_lease = Some(lease);
    config.read_attempts = 2;
    let reader = transport(master.address(), 0, config);
    // The large object outlasts its lease on any machine, the small one seldom does.
    let lens = [128 * MIB, 4 << 10];
    let thief = client(master.address(), 0);
    let described = publish(&publisher, &["victim"], &lens).await;
    let keys: Vec<String> = described[0].keys().map(|key| key.to_string()).collect();
    let (mut good, mut refused, mut stolen) = (0, 0, 0);
    let mut small_one = false;
    // Until everything that the test is about has happened several times, on whatever machine.
    let end = Instant::now() + Duration::from_secs(60);
    while (good < 3 || refused < 3 || stolen < 3) && Instant::now() < end {
        let (theft, thieving) = (thief.clone(), keys.clone());
        let theft = tokio::task::spawn_blocking(move || {
            let keys: Vec<&str> = thieving.iter().map(String::as_str).collect();
            let end = Instant::now() + 4 * lease;
            let mut taken = 0;
            while Instant::now() < end && taken == 0 {
                taken += theft.remove(&keys, false).unwrap().iter().filter(|r| r.is_ok()).count();
            }
            taken
        });
        let filling = async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            // Other bytes, in the place of what was taken.
            let meta = TensorMeta::new(Dtype::Uint8, [129 * MIB]).unwrap();
            let data = RegionSlice::copy_of(&vec![0xEE; 129 << 20]);
            let tensors = [(FeatureName::new("x").unwrap(), Tensor::new(meta, data).unwrap())];
            let filler = Publication::new(sample("filler"), tensors.into(), Ready::Now);
            let options = PublishOptions::default().deadline(Duration::from_millis(200));
            publisher.publish(vec![filler], options.replace(true)).await
        };
        small_one = !small_one;
        let reading = async {
            if !small_one {
                return fetch(&reader, &described).await;
            }
            let request = FetchRequest::new(described[0].clone(), Destination::Pool)
                .names(vec![FeatureName::new("t1").unwrap()]);
            let fetched = reader.fetch(vec![request], FetchOptions::default()).await?;
            assert!(fetched[0].tensors[0].data.as_bytes().unwrap() == pattern(lens[1], 1));
            Ok(())
        };
        let (read, filled) = tokio::join!(reading, filling);
        match read {
            Ok(()) => good += 1, // and every byte was compared
            // Memory of failed reads is not used again until the client is closed.
            Err(error) if error.kind() == ErrorKind::CapacityExceeded => break,
            Err(error) => {
                let kinds = [ErrorKind::Stale, ErrorKind::NotFound];
                assert!(kinds.contains(&error.kind()), "{error}");
                refused += 1;
            }
        }
        stolen += theft.await.unwrap();
        if let Ok(filler) = filled {
            let filler: Vec<_> = filler.into_iter().map(Arc::new).collect();
            publisher.release(releases(&filler)).await.unwrap();
        }
        let again = vec![publication("victim", &lens)];
        publisher.publish(again, PublishOptions::default().replace(true)).await.unwrap();
    }
    println!("{good} good, {refused} refused, {stolen} objects taken away meanwhile");
    assert!(
        good > 0 && refused > 0 && stolen > 0,
        "{good} good, {refused} refused, {stolen} stolen"
    );
    drop((reader, publisher, owner));
    master.stop();
}
