//! Arenas and pools in device memory: which kind they become, and what they do.

use capture_arena::{
    Arena, ArenaConfig, Backing, RegionPool, ReserveOptions, SamplePlan,
    cuda::{
        ArenaKind, ArenaPeers, CudaError, Device, DeviceArenaConfig, DeviceBlock, KindProbe, Tried,
        scripted::{Machine, ScriptedCuda},
    },
};
use transport_core::{
    Dtype, ErrorKind, FeatureName, Generation, RegionKind, SampleId, SampleKey, StoreId, TensorMeta,
};

use crate::machine;

const MIB: u64 = 1 << 20;

#[test]
fn probe_believes_what_happens_and_not_what_the_driver_says() {
    let (cuda, device) = machine(Machine::default());
    let probe = KindProbe::run(&device).unwrap();
    let Tried::Refused { step: "create", error } = probe.of(ArenaKind::Fabric) else {
        panic!("{probe:?}")
    };
    assert_eq!(error.code, CudaError::NOT_PERMITTED);
    assert_eq!(*probe.of(ArenaKind::PosixFd), Tried::Works { rdma: true });
    assert_eq!(*probe.of(ArenaKind::Plain), Tried::Works { rdma: true });
    assert_eq!(cuda.used(0), 0, "the granules are given back");
    drop(device);
    assert_eq!(cuda.leaks(), Vec::<String>::new());
}

#[test]
fn kind_is_decided_once_for_a_device() {
    let (cuda, device) = machine(Machine::default());
    device.kinds().unwrap();
    let made = cuda.calls("cuMemCreate");
    let config = DeviceArenaConfig::new(MIB, ArenaPeers::Native);
    let _one = DeviceBlock::create(&device, &config).unwrap();
    let _two = DeviceBlock::create(&device, &config).unwrap();
    assert_eq!(cuda.calls("cuMemCreate"), made + 2);
}

#[test]
fn each_peer_gets_memory_that_it_can_open() {
    let works = Machine { fabric: None, ..Machine::default() };
    let no_vmm = Machine { posix_fd: Some(801), ..Machine::default() };
    let cases = [
        (works.clone(), ArenaPeers::Nvlink, ArenaKind::Fabric),
        (works.clone(), ArenaPeers::Native, ArenaKind::Fabric),
        (works.clone(), ArenaPeers::NvlinkIntra, ArenaKind::Plain),
        (works, ArenaPeers::Rdma, ArenaKind::Plain),
        (Machine::default(), ArenaPeers::Native, ArenaKind::PosixFd),
        (Machine::default(), ArenaPeers::NvlinkIntra, ArenaKind::Plain),
        (no_vmm, ArenaPeers::Native, ArenaKind::Plain),
        (Machine { ipc: Some(801), ..Machine::default() }, ArenaPeers::Rdma, ArenaKind::Plain),
        (Machine { ipc: Some(801), ..Machine::default() }, ArenaPeers::Nobody, ArenaKind::Plain),
    ];
    for (like, peers, expected) in cases {
        let (cuda, device) = machine(like);
        let block = DeviceBlock::create(&device, &DeviceArenaConfig::new(3 * MIB, peers)).unwrap();
        assert_eq!(block.kind(), expected, "{peers:?}");
        assert_eq!(block.len(), 4 * MIB);
        let is_named = expected == ArenaKind::Fabric
            || (expected == ArenaKind::Plain && peers != ArenaPeers::Nobody);
        if cuda.calls("cuIpcGetMemHandle") > 0 && peers != ArenaPeers::Rdma {
            assert_eq!(block.handle().is_some(), is_named, "{peers:?}");
        }
        assert_eq!(block.export_fd().is_ok(), expected == ArenaKind::PosixFd);
        drop((block, device));
        assert_eq!(cuda.leaks(), Vec::<String>::new(), "{peers:?}");
    }
}

#[test]
fn nvlink_never_becomes_memory_that_a_peer_cannot_map() {
    let (cuda, device) = machine(Machine::default());
    let error = DeviceBlock::create(&device, &DeviceArenaConfig::new(MIB, ArenaPeers::Nvlink));
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let text = error.to_string();
    assert!(text.contains("fabric: create returned cuMemCreate: CUDA_ERROR_NOT_PERMITTED (800)"));
    assert!(text.contains("IMEX"), "{text}");
    assert_eq!(error.context("driver_says_fabric"), Some("true"), "which is not believed");
    assert!(error.context("imex_channel").is_some());
    // Nor by configuration.
    for (peers, kind) in [
        (ArenaPeers::Nvlink, ArenaKind::PosixFd),
        (ArenaPeers::Nvlink, ArenaKind::Plain),
        (ArenaPeers::NvlinkIntra, ArenaKind::Fabric),
    ] {
        let config = DeviceArenaConfig::new(MIB, peers).kinds([kind]);
        let error = DeviceBlock::create(&device, &config).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConfigInvalid);
        assert_eq!(error.context("kind"), Some(kind.name()));
    }
    assert_eq!(cuda.used(0), 0);
}

#[test]
fn only_kinds_that_are_allowed_are_taken() {
    let (_cuda, device) = machine(Machine::default());
    let native = DeviceArenaConfig::new(MIB, ArenaPeers::Native);
    let plain = native.clone().kinds([ArenaKind::Fabric, ArenaKind::Plain]);
    assert_eq!(DeviceBlock::create(&device, &plain).unwrap().kind(), ArenaKind::Plain);
    let fabric = native.clone().kinds([ArenaKind::Fabric]);
    let error = DeviceBlock::create(&device, &fabric).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    for bad in [native.clone().kinds([]), DeviceArenaConfig::new(0, ArenaPeers::Native)] {
        let error = DeviceBlock::create(&device, &bad).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConfigInvalid);
    }
}

#[test]
fn memory_for_network_cards_where_it_is_offered() {
    for rdma in [true, false] {
        let (_cuda, device) = machine(Machine { rdma, ..Machine::default() });
        let config = DeviceArenaConfig::new(MIB, ArenaPeers::Native);
        let block = DeviceBlock::create(&device, &config).unwrap();
        assert_eq!((block.kind(), block.is_rdma_capable()), (ArenaKind::PosixFd, rdma));
    }
    // Offered and then refused: had without it, but not for network cards.
    let (cuda, device) = machine(Machine::default());
    device.kinds().unwrap();
    cuda.fail("cuMemCreate", 0, 1, CudaError::NOT_SUPPORTED);
    let config = DeviceArenaConfig::new(MIB, ArenaPeers::Native);
    assert!(!DeviceBlock::create(&device, &config).unwrap().is_rdma_capable());
}

#[test]
fn an_arena_of_device_memory_keeps_the_same_books() {
    let (cuda, device) = machine(Machine::default());
    let config = DeviceArenaConfig::new(4 * MIB, ArenaPeers::NvlinkIntra);
    let backing = Backing::device(&device, &config).unwrap();
    assert_eq!(backing.kind(), RegionKind::Cuda { device: 0 });
    assert!(backing.shared_handle().is_none());
    let block = backing.device_block().unwrap().address();
    assert_eq!(backing.address(), block.0);
    let arena = Arena::start(backing.clone(), ArenaConfig::default()).unwrap();
    let meta = TensorMeta::new(Dtype::Uint8, [1000]).unwrap();
    let plan = SamplePlan {
        sample: SampleKey::new(
            StoreId::new("s").unwrap(),
            SampleId::new("a").unwrap(),
            Generation(1),
        ),
        objects: vec![(FeatureName::new("x").unwrap(), meta)],
        holder: None,
    };
    let mut batch = arena.reserve_blocking(vec![plan], ReserveOptions::default()).unwrap();
    let mut region = batch.take(0, 0);
    assert_eq!(region.kind(), RegionKind::Cuda { device: 0 });
    assert!(region.as_mut_bytes().is_none());
    let at = capture_arena::cuda::DevicePtr(region.address() as u64);
    assert_eq!(at, block);
    cuda.poke(at, &[7; 1000]);
    batch.put_back(0, 0, region).unwrap();
    let published = batch.publish_blocking().unwrap();
    let address = published[0].objects[0].address.unwrap();
    let pinned = arena.export().pin(address, 1000).unwrap();
    assert!(pinned.as_bytes().is_none());
    let view = pinned.into_slice();
    assert_eq!(view.kind(), RegionKind::Cuda { device: 0 });
    assert_eq!(cuda.peek(capture_arena::cuda::DevicePtr(view.address() as u64), 1000), [7; 1000]);
    // The view keeps the memory, whatever goes first.
    arena.close();
    drop((arena, backing, device));
    assert!(cuda.used(0) > 0);
    drop(view);
    assert_eq!(cuda.leaks(), Vec::<String>::new());
}

#[test]
fn a_pool_of_device_memory_hands_out_device_regions() {
    let (cuda, device) = machine(Machine::default());
    let config = DeviceArenaConfig::new(2 * MIB, ArenaPeers::Nobody);
    let pool = RegionPool::new(Backing::device(&device, &config).unwrap()).unwrap();
    let (one, two) = (pool.take(1000).unwrap(), pool.take(1000).unwrap());
    assert_eq!(two.address() - one.address(), 1024);
    assert_eq!(one.kind(), RegionKind::Cuda { device: 0 });
    drop((pool, one, device));
    drop(two);
    assert_eq!(cuda.leaks(), Vec::<String>::new());
}

#[test]
fn two_arenas_on_two_devices_and_any_order_of_dropping() {
    for order in 0..24_usize {
        let cuda = ScriptedCuda::new(Machine { devices: 2, ..Machine::default() });
        let devices: Vec<_> = (0..2).map(|i| Device::open(cuda.clone(), i).unwrap()).collect();
        let arenas: Vec<_> = devices
            .iter()
            .map(|device| {
                let config = DeviceArenaConfig::new(2 * MIB, ArenaPeers::Native);
                Backing::device(device, &config).unwrap()
            })
            .collect();
        assert_eq!((cuda.used(0), cuda.used(1)), (2 * MIB, 2 * MIB));
        assert_eq!(arenas[1].kind(), RegionKind::Cuda { device: 1 });
        let streams: Vec<_> = devices.iter().map(|device| device.stream().unwrap()).collect();
        let events: Vec<_> = streams.iter().map(|stream| stream.record_new().unwrap()).collect();
        let mut things: Vec<Box<dyn std::any::Any>> =
            vec![Box::new(devices), Box::new(arenas), Box::new(streams), Box::new(events)];
        let mut rest = order;
        for left in (1..=4).rev() {
            drop(things.remove(rest % left));
            rest /= left;
        }
        assert_eq!(cuda.leaks(), Vec::<String>::new(), "order {order}");
    }
}
