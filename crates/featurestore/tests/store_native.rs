//! The store transport as trainers run it by default: what another process holds is read by the
//! native tcp engine, whole and in ranges.
//!
//! `cargo test -p featurestore --features mooncake-python --test store_native -- --ignored`.
#![cfg(all(feature = "mooncake-python", feature = "direct"))]

#[path = "../../transport-mooncake-store/tests/lent/mod.rs"]
mod lent;
#[path = "../../mooncake-sys/tests/support/mod.rs"]
mod support;

use std::{
    io::{BufRead, BufReader, Lines, Write},
    net::SocketAddr,
    process::{Child, ChildStdout, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use lent::Lent;
use mooncake_sys::{
    SegmentReader, StoreApi, StoreSetup,
    python::{WheelOptions, WheelStore},
};
use transport_core::{
    ByteSize, Descriptor, Destination, Dtype, FeatureDescriptor, FeatureName, FetchOptions,
    FetchRequest, Generation, Location, Publication, PublishOptions, Ready, RegionSlice, Result,
    SampleId, SampleKey, StoreId, Tensor, TensorMeta, Transport,
    conformance::{Case, Harness, Need, Outcome, Pair, Setup, cases},
};
use transport_mooncake_direct::{TcpEngine, TcpOptions};
use transport_mooncake_store::{StoreConfig, StoreTransport};

const SEGMENT: u64 = 512 << 20;

/// A Python process that adds object memory; ended when dropped.
struct Owner {
    child: Child,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Owner {
    fn start(master: SocketAddr, host: &str) -> Self {
        let script =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../transport-mooncake-store/tests/peer.py");
        let mut child = Command::new(support::environment().join("bin/python"))
            .args([script, &master.to_string(), &SEGMENT.to_string(), host])
            .envs((host == "::1").then_some(("MC_USE_IPV6", "1")))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut owner = Self { child, answers };
        assert_eq!(owner.answer(), r#"{"setup": 0}"#);
        owner
    }

    fn answer(&mut self) -> String {
        let mut lines = self.answers.by_ref().map(Result::unwrap);
        let answer = lines.find_map(|line| Some(line.strip_prefix("@@")?.to_owned()));
        answer.expect("the owner of the memory ended")
    }

    /// Puts an object whose byte number i is 7 i.
    fn put(&mut self, key: &str, length: u64) {
        let ask = format!(r#"{{"cmd": "put", "key": "{key}", "length": {length}, "seed": 0}}"#);
        writeln!(self.child.stdin.as_mut().unwrap(), "{ask}").unwrap();
        assert_eq!(self.answer(), "0");
    }

    /// Takes the memory out of the store.
    fn leave(mut self) {
        drop(self.child.stdin.take());
        self.child.wait().unwrap();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.child.kill(); // fails only if it ended already
        let _ = self.child.wait();
    }
}

/// Transports over the same two clients, one case after the other.
#[derive(Debug)]
struct Native {
    publisher: Arc<dyn StoreApi>,
    consumer: Arc<dyn StoreApi>,
}

#[async_trait]
impl Harness for Native {
    fn name(&self) -> String {
        "store transport over a real store, reads by the native engine".into()
    }

    async fn pair(&self, _: &Setup) -> Result<Pair> {
        Ok(Pair::new(transport(&self.publisher, true)?, transport(&self.consumer, false)?))
    }
}

fn transport(api: &Arc<dyn StoreApi>, removes: bool) -> Result<Arc<StoreTransport>> {
    let api = Lent::new(api.clone(), removes);
    let reader: Arc<dyn SegmentReader> = Arc::new(TcpEngine::new(TcpOptions::default()));
    let config = StoreConfig::default().pool(ByteSize::mib(256), ByteSize::mib(0));
    Ok(Arc::new(StoreTransport::start_with(api, config, Some(reader))?))
}

fn client(master: SocketAddr) -> Arc<dyn StoreApi> {
    let setup = StoreSetup::client("127.0.0.1", master.to_string());
    Arc::new(WheelStore::connect(&WheelOptions::at(support::environment()), &setup).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
async fn the_conformance_suite_holds() {
    let master = support::master();
    let owner = Owner::start(master.address(), "127.0.0.1");
    let harness =
        Native { publisher: client(master.address()), consumer: client(master.address()) };
    // Cases that cannot apply are left out beforehand; the crate's tests/conformance.rs lists them.
    let applies = |case: &&Case| case.needs.iter().all(|need| *need == Need::NoDeviceMemory);
    let cases: Vec<_> = cases().iter().filter(applies).collect();
    assert!(cases.iter().any(|case| case.name == "ranges_are_read_alone_or_refused"));
    for case in cases {
        match case.run(&harness).await {
            Outcome::Passed => {}
            Outcome::NotApplicable(why) => println!("{}: {why}", case.name),
            Outcome::Failed(why) => panic!("{}: {why}", case.name),
        }
        assert_eq!(master.metric("master_key_count").unwrap(), 0.0, "{} leaves some", case.name);
    }

    drop((harness, owner));
    master.stop();
}

const LEN: u64 = 4 << 20;

/// Bytes that differ from sample to sample, and from place to place.
fn bytes_of(id: usize) -> Vec<u8> {
    (0..LEN as usize).map(|i| (i % 251 + id) as u8).collect()
}

fn publication(id: usize) -> Publication {
    let meta = TensorMeta::new(Dtype::Uint8, [LEN]).unwrap();
    let tensor = Tensor::new(meta, RegionSlice::copy_of(&bytes_of(id))).unwrap();
    let (store, sample) = (StoreId::new("native").unwrap(), SampleId::new(id.to_string()).unwrap());
    let tensors = [(FeatureName::new("t").unwrap(), tensor)].into();
    Publication::new(SampleKey::new(store, sample, Generation(1)), tensors, Ready::Now)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
async fn sixty_four_gets_at_once_are_whole_and_ranges_move_nothing_else() {
    let master = support::master();
    let api = client(master.address());
    let store = transport(&api, true).unwrap();
    // Another client of Mooncake's, told of no IPv6, finds nothing there.
    let mut six = Owner::start(master.address(), "::1");
    six.put("native/64/g1/t", LEN);
    let sample = publication(64);
    let features = sample.tensors.iter().map(|(name, tensor)| {
        (name.clone(), FeatureDescriptor::new(tensor.meta.clone(), None, None))
    });
    let at_six = Descriptor::new(sample.sample, features.collect(), None, Location::Store);
    let request = FetchRequest::new(Arc::new(at_six.unwrap()), Destination::Pool);
    let fetched = store.fetch(vec![request], FetchOptions::default()).await.unwrap();
    let found = fetched[0].tensors[0].data.as_bytes().unwrap();
    assert!(found.iter().enumerate().all(|(i, &byte)| byte == (7 * i) as u8));
    assert_eq!(store.stats().native_bytes, LEN);
    drop((fetched, six.leave()));

    let owner = Owner::start(master.address(), "localhost");
    let batch = (0..64).map(publication).collect();
    let described = store.publish(batch, PublishOptions::default()).await.unwrap();
    let described: Vec<_> = described.into_iter().map(Arc::new).collect();
    let options = || FetchOptions::default().deadline(Duration::from_secs(60));
    let mut gets = tokio::task::JoinSet::new();
    for (id, descriptor) in described.iter().cloned().enumerate() {
        let store = store.clone();
        gets.spawn(async move {
            let request = FetchRequest::new(descriptor, Destination::Pool);
            let fetched = store.fetch(vec![request], options()).await.unwrap();
            assert!(fetched[0].tensors[0].data.as_bytes().unwrap() == bytes_of(id), "{id} differs");
        });
    }
    while let Some(get) = gets.join_next().await {
        get.unwrap();
    }
    assert_eq!(store.stats().native_bytes, 65 * LEN);
    let request = FetchRequest::new(described[7].clone(), Destination::Pool);
    let request = request.ranges(vec![1_000_000..1_000_003, 5..5, LEN - 1..LEN, 0..2]);
    let fetched = store.fetch(vec![request], options()).await.unwrap();
    let all = bytes_of(7);
    let expected = [&all[1_000_000..1_000_003], &all[LEN as usize - 1..], &all[..2]].concat();
    assert_eq!(fetched[0].tensors[0].data.as_bytes().unwrap(), expected);
    assert_eq!(store.stats().native_bytes, 65 * LEN + 6, "nothing else has moved");
    drop(fetched);
    store.close().await.unwrap();
    drop((store, api, owner));
    master.stop();
}
