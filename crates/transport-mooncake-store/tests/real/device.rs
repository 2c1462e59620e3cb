//! Memory of a device at the ends of a real store. The device is simulated, what is between is not.

use capture_arena::{
    Backing, RegionPool,
    cuda::{
        ArenaPeers, Device, DeviceArenaConfig, DevicePtr,
        scripted::{Machine, ScriptedCuda},
    },
};
use transport_mooncake_store::DeviceMemory;

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
async fn python_reads_what_a_device_wrote_and_the_other_way_round() {
    let lens = [3 * MIB + 1, 8, 100_000];
    let master = support::master();
    let mut peer = Peer::start(master.address(), 64 * MIB);
    let cuda = ScriptedCuda::new(Machine::default());
    let device = Device::open(cuda.clone(), 0).unwrap();
    let memory = DeviceArenaConfig::new(32 * MIB, ArenaPeers::Nobody);
    let pool = RegionPool::new(Backing::device(&device, &memory).unwrap()).unwrap();
    let on = DeviceMemory::new(&device).unwrap().receive_in(pool.clone()).unwrap();
    let config = small().pool(ByteSize::mib(64), ByteSize::mib(64));
    let api = client(master.address(), 0);
    let store = StoreTransport::start_on_device(api, config, None, on).unwrap();
    let registered = store.stats().registrations;

    let mut sample = publication("rust", &lens);
    for (i, tensor) in (0..).zip(sample.tensors.values_mut()) {
        let region = pool.take(tensor.data.len()).unwrap();
        cuda.poke(DevicePtr(region.address() as u64), &pattern(lens[i as usize], i));
        tensor.data = region.freeze();
    }
    let described = store.publish(vec![sample], PublishOptions::default()).await.unwrap();
    for (i, len) in (0..).zip(lens) {
        let answer = peer.ask("get", &format!("real/rust/g1/t{i}"), len, i);
        assert_eq!(answer, format!(r#"{{"found": {len}, "equal": true}}"#));
        assert_eq!(peer.ask("put", &format!("real/python/g1/t{i}"), len, i), "0");
    }
    let mut python = described[0].clone();
    python.sample = super::sample("python");
    let described: Vec<_> = described.into_iter().chain([python]).map(Arc::new).collect();
    for _ in 0..3 {
        let request = |d: &Arc<Descriptor>| FetchRequest::new(d.clone(), Destination::Pool);
        let requests = described.iter().map(request).collect();
        for fetched in store.fetch(requests, FetchOptions::default()).await.unwrap() {
            for (i, tensor) in (0..).zip(fetched.tensors.values()) {
                assert_eq!(tensor.data.kind(), device.region_kind());
                let at = DevicePtr(tensor.data.address() as u64);
                let found = cuda.peek(at, tensor.data.len() as u64);
                assert!(found == pattern(lens[i as usize], i), "tensor {i} differs");
            }
        }
    }
    assert_eq!(store.stats().registrations, registered, "none on the hot path");
    assert_eq!(pool.stats().live_regions, 0);
    let report = store.release(releases(&described)).await.unwrap();
    assert_eq!(report.released + report.already_gone, 2, "{report:?}");
    assert_eq!(master.metric("master_key_count").unwrap(), 0.0);
    store.close().await.unwrap();
    drop((store, pool, device));
    assert_eq!(cuda.leaks(), Vec::<String>::new());
    drop(peer);
    master.stop();
}
