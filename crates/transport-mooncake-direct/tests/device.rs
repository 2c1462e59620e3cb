//! The capture sink over device memory, on a simulated machine.
//!
//! Needs no device: `cargo test -p transport-mooncake-direct --features cuda --test device`.

mod support;

use std::{
    io::{Read, Write},
    net::TcpStream,
    ptr::NonNull,
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{
    Arena, ArenaConfig, Backing, BaseAddress, FreeRequest, RegionPool, ReserveOptions, SamplePlan,
    cuda::{
        Access, ArenaKind, ArenaPeers, CudaError, Device, DeviceArenaConfig, DevicePtr, Event,
        Stream, handle_to_hex,
        scripted::{Machine, ScriptedCuda},
    },
};
use control_proto::mooncake::handshake::{Frame, Kind, MAX_FRAME_BYTES, SegmentDescriptor};
use indexmap::IndexMap;
use support::{MIB, eventually, key};
use transport_core::{
    Descriptor, Dtype, ErrorKind, FeatureName, Publication, PublishOptions, Ready, RegionSlice,
    RemoteAddr, SessionName, Tensor, TensorMeta, Transport,
};
use transport_mooncake_direct::{
    CaptureSink, DirectTransport, SinkConfig,
    device::{PROTOCOL_FABRIC, PROTOCOL_FD, PROTOCOL_IPC, open_block, receive_fd},
};

const BOUND: Duration = Duration::from_secs(20);

/// A publisher: a machine, a pool for what its model computes, and a sink.
struct Publisher {
    cuda: Arc<ScriptedCuda>,
    device: Device,
    captures: RegionPool,
    sink: CaptureSink,
}

fn publisher(peers: ArenaPeers) -> Publisher {
    publisher_on(Machine { fabric: None, ..Machine::default() }, peers)
}

fn publisher_on(machine: Machine, peers: ArenaPeers) -> Publisher {
    let cuda = ScriptedCuda::new(machine);
    let device = Device::open(cuda.clone(), 0).unwrap();
    let captures = pool(&device);
    let backing = Backing::device(&device, &DeviceArenaConfig::new(16 * MIB, peers)).unwrap();
    let arena = Arena::start(backing, ArenaConfig::default()).unwrap();
    let sink = CaptureSink::start(arena, SinkConfig::default()).unwrap();
    Publisher { cuda, device, captures, sink }
}

fn pool(device: &Device) -> RegionPool {
    let config = DeviceArenaConfig::new(16 * MIB, ArenaPeers::Nobody);
    RegionPool::new(Backing::device(device, &config).unwrap()).unwrap()
}

fn name(text: &str) -> FeatureName {
    FeatureName::new(text).unwrap()
}

fn meta(dtype: Dtype, bytes: u64) -> TensorMeta {
    TensorMeta::new(dtype, [bytes / dtype.size()]).unwrap()
}

fn options() -> PublishOptions {
    PublishOptions::default()
}

impl Publisher {
    /// Device memory that a producer's stream fills with `byte` once somebody waits for it.
    fn late(&self, stream: &Stream, byte: u8, len: u64) -> RegionSlice {
        let region = self.captures.take(len as usize).unwrap();
        let at = DevicePtr(region.address() as u64);
        self.cuda.poke(at, &vec![0; len as usize]);
        // SAFETY: the test's own region; that it is frozen before it is filled is what the ready
        // event of its publication is for.
        unsafe { stream.fill(at, byte, len) }.unwrap();
        region.freeze()
    }

    /// A sample as servers capture it: two states on the device, ids and mask on the host.
    fn sample(&self, id: &str, stream: &Stream, byte: u8) -> Publication {
        let states = [("hidden_state", byte, 3 * MIB), ("target", byte + 1, 5000)];
        let mut tensors: IndexMap<_, _> = states
            .into_iter()
            .map(|(state, byte, len)| {
                let data = self.late(stream, byte, len);
                (name(state), Tensor::new(meta(Dtype::Bfloat16, len), data).unwrap())
            })
            .collect();
        for (vector, byte) in [("input_ids", byte + 2), ("loss_mask", byte + 3)] {
            let data = RegionSlice::copy_of(&[byte; 808]);
            tensors.insert(name(vector), Tensor::new(meta(Dtype::Int64, 808), data).unwrap());
        }
        Publication::new(key(id), tensors, Ready::After(self.ready(stream)))
    }

    fn ready(&self, stream: &Stream) -> Arc<Event> {
        Arc::new(stream.record_new().unwrap())
    }

    fn bytes(&self, descriptor: &Descriptor, feature: &str) -> Vec<u8> {
        let feature = &descriptor.features[&name(feature)];
        let at = DevicePtr(feature.address.unwrap().0);
        self.cuda.peek(at, feature.meta.nbytes())
    }

    fn check(&self, descriptor: &Descriptor, byte: u8) {
        assert_eq!(self.bytes(descriptor, "hidden_state"), vec![byte; 3 * MIB as usize]);
        assert_eq!(self.bytes(descriptor, "target"), [byte + 1; 5000]);
        assert_eq!(self.bytes(descriptor, "input_ids"), [byte + 2; 808]);
        assert_eq!(self.bytes(descriptor, "loss_mask"), [byte + 3; 808]);
    }

    fn ends_clean(self) {
        let Self { cuda, device, captures, sink } = self;
        sink.close_blocking();
        drop((sink, captures, device));
        assert_eq!(cuda.leaks(), Vec::<String>::new());
    }
}

#[test]
fn d24_a_batch_is_copied_behind_its_events_and_is_there_when_it_is_described() {
    let publisher = publisher(ArenaPeers::NvlinkIntra);
    let stream = publisher.device.stream().unwrap();
    let batch = vec![publisher.sample("a", &stream, 10), publisher.sample("b", &stream, 20)];
    let described = publisher.sink.publish_blocking(batch, options()).unwrap();
    publisher.check(&described[0], 10);
    publisher.check(&described[1], 20);
    let health = publisher.sink.health_blocking().unwrap();
    assert_eq!(health.host_payload_bytes, 2 * 2 * 808, "ids and masks only");
    assert_eq!(health.device_payload_bytes, 2 * (3 * MIB + 5000));
    assert_eq!((health.resident_samples, health.quarantined_bytes), (2, 0));
    drop(stream);
    publisher.ends_clean();
}

#[tokio::test]
async fn the_async_way_does_the_same() {
    let publisher = publisher(ArenaPeers::Native);
    let stream = publisher.device.stream().unwrap();
    let batch = vec![publisher.sample("a", &stream, 10)];
    let described = publisher.sink.publish(batch, options()).await.unwrap();
    publisher.check(&described[0], 10);
    // And behind the contract of all transports.
    let transport = DirectTransport::builder().sink(publisher.sink.clone()).build().unwrap();
    assert!(transport.info().capabilities.device_memory);
    let batch = vec![publisher.sample("b", &stream, 20)];
    let described = transport.publish(batch, options()).await.unwrap();
    publisher.check(&described[0], 20);
    assert_eq!(transport.health().await.unwrap().device_payload_bytes, 2 * (3 * MIB + 5000));
    drop((transport, stream));
    publisher.ends_clean();
}

#[test]
fn samples_of_one_event_wait_once_and_host_events_are_waited_for() {
    #[derive(Debug)]
    struct Waited(std::sync::atomic::AtomicU32);
    impl transport_core::ReadyEvent for Waited {
        fn wait(&self, _timeout: Duration) -> transport_core::Result<()> {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            Ok(())
        }
    }
    let publisher = publisher(ArenaPeers::NvlinkIntra);
    let stream = publisher.device.stream().unwrap();
    let mut batch: Vec<_> =
        (0..4).map(|i| publisher.sample(&format!("s{i}"), &stream, i * 10)).collect();
    let event = publisher.ready(&stream);
    let host = Arc::new(Waited(0.into()));
    for (i, publication) in batch.iter_mut().enumerate() {
        publication.ready =
            if i == 3 { Ready::After(host.clone()) } else { Ready::After(event.clone()) };
    }
    let before = publisher.cuda.calls("cuStreamWaitEvent");
    publisher.sink.publish_blocking(batch, options()).unwrap();
    // Once for each of the copier's two streams, and one behind the other at the end.
    assert_eq!(publisher.cuda.calls("cuStreamWaitEvent"), before + 3);
    assert_eq!(host.0.load(std::sync::atomic::Ordering::Relaxed), 1);
}

#[test]
fn d21_a_cpu_tensor_needs_cuda_captures() {
    let publisher = publisher(ArenaPeers::NvlinkIntra);
    for dtype in [Dtype::Bfloat16, Dtype::Float32, Dtype::Float8E4m3fn] {
        let data = RegionSlice::copy_of(&[1; 64]);
        let tensors = [(name("hidden_state"), Tensor::new(meta(dtype, 64), data).unwrap())];
        let batch = vec![Publication::new(key("a"), tensors.into(), Ready::Now)];
        let error = publisher.sink.publish_blocking(batch, options()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("needs CUDA captures"), "{error}");
        assert_eq!(error.context("key"), Some("test/a/g1/hidden_state"));
    }
    let health = publisher.sink.health_blocking().unwrap();
    assert_eq!((health.published_samples, health.host_payload_bytes), (0, 0));
    assert_eq!(health.arena_free_bytes, health.arena_bytes);
}

#[test]
fn only_the_device_of_the_arena_is_touched() {
    let cuda = ScriptedCuda::new(Machine { devices: 8, ..Machine::default() });
    let device = Device::open(cuda.clone(), 5).unwrap();
    let config = DeviceArenaConfig::new(16 * MIB, ArenaPeers::NvlinkIntra);
    let arena = Arena::start(Backing::device(&device, &config).unwrap(), ArenaConfig::default());
    let sink = CaptureSink::start(arena.unwrap(), SinkConfig::default()).unwrap();
    let publisher = Publisher { captures: pool(&device), device, cuda: cuda.clone(), sink };
    let stream = publisher.device.stream().unwrap();
    let described =
        publisher.sink.publish_blocking(vec![publisher.sample("a", &stream, 1)], options());
    publisher.check(&described.unwrap()[0], 1);
    publisher.sink.health_blocking().unwrap();
    for other in (0..8).filter(|other| *other != 5) {
        assert_eq!(cuda.used(other), 0);
        let share = format!("context of {other}");
        assert!(!cuda.leaks().iter().any(|held| held.ends_with(&share)), "{:?}", cuda.leaks());
    }
    assert!(cuda.leaks().iter().any(|held| held.ends_with("context of 5")));
    drop(stream);
    publisher.ends_clean();
}

#[test]
fn sources_of_another_device_and_device_sources_of_a_host_arena_are_refused() {
    let like = Machine { devices: 2, ..Machine::default() };
    let publisher = publisher_on(like, ArenaPeers::NvlinkIntra);
    let other = Device::open(publisher.cuda.clone(), 1).unwrap();
    let sample = |pool: &RegionPool| {
        let data = pool.take(64).unwrap().freeze();
        let tensors = [(name("x"), Tensor::new(meta(Dtype::Float32, 64), data).unwrap())];
        vec![Publication::new(key("a"), tensors.into(), Ready::Now)]
    };
    let error = publisher.sink.publish_blocking(sample(&pool(&other)), options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert_eq!((error.context("device"), error.context("found")), (Some("0"), Some("1")));
    let health = publisher.sink.health_blocking().unwrap();
    assert_eq!(health.arena_free_bytes, health.arena_bytes, "the ranges are back");

    let host = support::sink(MIB);
    let error = host.publish_blocking(sample(&publisher.captures), options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[test]
fn a_producer_writes_straight_into_its_ranges() {
    let publisher = publisher(ArenaPeers::NvlinkIntra);
    let stream = publisher.device.stream().unwrap();
    let plan = |id: &str| SamplePlan {
        sample: key(id),
        objects: vec![(name("x"), meta(Dtype::Float32, MIB)), (name("y"), meta(Dtype::Int64, 8))],
        holder: None,
    };
    let reserve = |id: &str| {
        let plans = vec![plan(id)];
        publisher.sink.reserve_blocking(plans, ReserveOptions::default()).unwrap()
    };
    let write = |reservation: &mut transport_mooncake_direct::SinkReservation, byte| {
        for object in 0..2 {
            let mut region = reservation.take(0, object);
            let at = DevicePtr(region.as_mut_ptr() as u64);
            // SAFETY: the reserved range, which is ours until it is published.
            unsafe { stream.fill(at, byte, region.len() as u64) }.unwrap();
            reservation.put_back(0, object, region).unwrap();
        }
        publisher.ready(&stream)
    };

    // Saying nothing about when it is written is refused, and gives the ranges back.
    let error = reserve("a").publish_blocking().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("publish_after"), "{error}");

    let copies = publisher.cuda.calls("cuMemcpyAsync");
    let mut reservation = reserve("a");
    let ready = write(&mut reservation, 42);
    let described = reservation.publish_after_blocking(Ready::After(ready), BOUND).unwrap();
    assert_eq!(publisher.bytes(&described[0], "x"), vec![42; MIB as usize]);
    assert_eq!(publisher.bytes(&described[0], "y"), [42; 8]);
    assert_eq!(publisher.cuda.calls("cuMemcpyAsync"), copies, "no copy is made");
    let health = publisher.sink.health_blocking().unwrap();
    assert_eq!((health.host_payload_bytes, health.device_payload_bytes), (0, 0));

    // And the async way, with writes that are done.
    let mut reservation = reserve("b");
    write(&mut reservation, 43);
    stream.synchronize().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(reservation.publish_after(Ready::Now, BOUND)).unwrap();
    let mut reservation = reserve("c");
    let ready = write(&mut reservation, 44);
    let after = reservation.publish_after(Ready::After(ready), BOUND);
    let described = runtime.block_on(after).unwrap();
    assert_eq!(publisher.bytes(&described[0], "y"), [44; 8]);
    drop(stream);
    publisher.ends_clean();
}

#[test]
fn ranges_that_are_written_late_stay_out_of_use() {
    let publisher = publisher(ArenaPeers::NvlinkIntra);
    let stream = publisher.device.stream().unwrap();
    let plan = SamplePlan {
        sample: key("a"),
        objects: vec![(name("x"), meta(Dtype::Float32, MIB))],
        holder: None,
    };
    let plans = vec![plan];
    let mut reservation =
        publisher.sink.reserve_blocking(plans, ReserveOptions::default()).unwrap();
    let region = reservation.take(0, 0);
    for _ in 0..3 {
        // SAFETY: the reserved range.
        unsafe { stream.fill(DevicePtr(region.address() as u64), 1, MIB) }.unwrap();
    }
    reservation.put_back(0, 0, region).unwrap();
    let ready = publisher.ready(&stream);
    let late = reservation.publish_after_blocking(Ready::After(ready), Duration::ZERO);
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Timeout);
    // Each look lets simulated time pass.
    let health = publisher.sink.health_blocking().unwrap();
    assert_eq!((health.quarantined_bytes, health.reserved_bytes), (MIB, MIB));
    eventually("the range comes back", || {
        let health = publisher.sink.health_blocking().unwrap();
        health.quarantined_bytes == 0 && health.arena_free_bytes == health.arena_bytes
    });
    drop(stream);
    publisher.ends_clean();
}

#[test]
fn a_failure_at_any_step_publishes_nothing_and_keeps_nothing() {
    for call in [
        "cuMemGetAddressRange",
        "cuMemHostAlloc",
        "cuStreamWaitEvent",
        "cuMemcpyAsync",
        "cuEventRecord",
        "cuEventQuery",
    ] {
        let publisher = publisher(ArenaPeers::NvlinkIntra);
        let stream = publisher.device.stream().unwrap();
        let batch = vec![publisher.sample("a", &stream, 10), publisher.sample("b", &stream, 20)];
        publisher.cuda.fail(call, 0, 1, CudaError::OUT_OF_MEMORY);
        let error = publisher.sink.publish_blocking(batch, options()).unwrap_err();
        assert!(format!("{error:?}").contains("CUDA_ERROR_OUT_OF_MEMORY"), "{call}: {error:?}");
        eventually(call, || {
            let health = publisher.sink.health_blocking().unwrap();
            health.quarantined_bytes == 0 && health.arena_free_bytes == health.arena_bytes
        });
        let batch = vec![publisher.sample("a", &stream, 30)];
        let described = publisher.sink.publish_blocking(batch, options()).unwrap();
        publisher.check(&described[0], 30);
        assert_eq!(publisher.captures.stats().live_regions, 0, "sources are let go");
        drop(stream);
        publisher.ends_clean();
    }
}

#[test]
fn a_deadline_that_passes_gives_the_batch_up_and_its_memory_back_later() {
    let publisher = publisher(ArenaPeers::NvlinkIntra);
    let stream = publisher.device.stream().unwrap();
    let batch = vec![publisher.sample("a", &stream, 10)];
    let now = PublishOptions::default().deadline(Duration::ZERO);
    let error = publisher.sink.publish_blocking(batch, now).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Timeout | ErrorKind::CapacityExceeded), "{error}");
    eventually("the memory comes back", || {
        let health = publisher.sink.health_blocking().unwrap();
        health.quarantined_bytes == 0 && health.arena_free_bytes == health.arena_bytes
    });
    drop(stream);
    publisher.ends_clean();
}

#[test]
fn freed_ranges_are_used_again() {
    let publisher = publisher(ArenaPeers::NvlinkIntra);
    let stream = publisher.device.stream().unwrap();
    for round in 0..20_u8 {
        let batch = vec![publisher.sample("a", &stream, round), publisher.sample("b", &stream, 99)];
        let described = publisher.sink.publish_blocking(batch, options()).unwrap();
        publisher.check(&described[0], round);
        publisher.check(&described[1], 99);
        let keys = described.iter().flat_map(|descriptor| {
            let key = |feature: &FeatureName| descriptor.sample.object(feature).shared();
            descriptor.features.keys().map(key).collect::<Vec<_>>()
        });
        let objects = keys.map(|key| (key.to_string(), None)).collect();
        publisher.sink.arena().free(FreeRequest { client: None, objects, reply: None });
    }
    let health = publisher.sink.health_blocking().unwrap();
    assert_eq!((health.published_samples, health.released_samples), (40, 40));
    assert_eq!(health.arena_largest_free, health.arena_bytes);
}

/// What the sink says about itself, as any Mooncake process asks for it.
fn metadata(session: &SessionName) -> (SegmentDescriptor, String) {
    let mut stream = TcpStream::connect(session.to_string()).unwrap();
    stream.set_read_timeout(Some(BOUND)).unwrap();
    let mut request = Vec::new();
    Frame::new(Kind::Metadata, &SegmentDescriptor::default().to_json()).encode(&mut request);
    stream.write_all(&request).unwrap();
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).unwrap();
    let (frame, _) = Frame::decode(&reply, MAX_FRAME_BYTES).unwrap().unwrap();
    (SegmentDescriptor::parse(frame.json).unwrap(), frame.json.to_owned())
}

#[test]
fn a_mooncake_process_finds_what_it_needs_in_the_handshake() {
    for (peers, protocol) in
        [(ArenaPeers::NvlinkIntra, PROTOCOL_IPC), (ArenaPeers::Nvlink, PROTOCOL_FABRIC)]
    {
        let publisher = publisher(peers);
        let backing = publisher.sink.arena().backing().clone();
        let block = backing.device_block().unwrap();
        let (descriptor, json) = metadata(publisher.sink.session());
        assert_eq!(descriptor.protocol, protocol);
        assert_eq!((descriptor.tcp_data_port, descriptor.tcp_proto_version), (0, 1));
        assert_eq!(descriptor.metadata_version, Some(0));
        assert_eq!(descriptor.name, publisher.sink.session().to_string());
        let [buffer] = &descriptor.buffers[..] else { panic!("{json}") };
        assert_eq!((buffer.addr, buffer.length), (block.address().0, 16 * MIB));
        assert_eq!(buffer.name, "*");
        assert_eq!(buffer.shm_name, handle_to_hex(block.handle().unwrap()));
        assert!(json.contains(&format!("\"shm_name\":\"{}\"", buffer.shm_name)));
        assert_eq!(descriptor.featurestore_epoch, Some(publisher.sink.arena().epoch()));
    }
}

#[test]
fn every_kind_is_opened_from_the_handshake_alone() {
    for (peers, kinds) in [
        (ArenaPeers::Native, vec![ArenaKind::PosixFd]),
        (ArenaPeers::NvlinkIntra, vec![ArenaKind::Plain]),
        (ArenaPeers::Nvlink, vec![ArenaKind::Fabric]),
    ] {
        let like = Machine { fabric: None, ..Machine::default() };
        let cuda = ScriptedCuda::new(like.clone());
        let device = Device::open(cuda.clone(), 0).unwrap();
        let config = DeviceArenaConfig::new(16 * MIB, peers).kinds(kinds.clone());
        let backing = Backing::device(&device, &config).unwrap();
        let arena = Arena::start(backing, ArenaConfig::default()).unwrap();
        let sink = CaptureSink::start(arena, SinkConfig::default()).unwrap();
        let publisher = Publisher { captures: pool(&device), device, cuda, sink };
        let stream = publisher.device.stream().unwrap();
        let batch = vec![publisher.sample("a", &stream, 1), publisher.sample("b", &stream, 50)];
        let described = publisher.sink.publish_blocking(batch, options()).unwrap();

        let reader = ScriptedCuda::new(like);
        let reading = Device::open(reader.clone(), 0).unwrap();
        let (peer, _) = metadata(publisher.sink.session());
        let address = described[1].features[&name("hidden_state")].address.unwrap();
        let deadline = Instant::now() + BOUND;
        let block = open_block(&reading, &peer, address, deadline).unwrap();
        let at = block.locate(address, 3 * MIB).unwrap();
        assert_eq!(reader.peek(at, 3 * MIB), vec![50; 3 * MIB as usize], "{kinds:?}");
        let read_only =
            if peers == ArenaPeers::NvlinkIntra { Access::ReadWrite } else { Access::Read };
        assert_eq!(block.memory().access(), read_only);
        // A sub-range, the last byte, and one beyond.
        let (base, end) = (block.base(), RemoteAddr(block.base().0 + block.bytes()));
        assert_eq!(reader.peek(block.locate(RemoteAddr(address.0 + 7), 1).unwrap(), 1), [50]);
        assert!(block.locate(RemoteAddr(end.0 - 1), 1).is_ok());
        for (address, len) in [(end, 1), (RemoteAddr(base.0 - 1), 1), (RemoteAddr(end.0 - 1), 2)] {
            assert_eq!(block.locate(address, len).unwrap_err().kind(), ErrorKind::OutOfRange);
            if address != RemoteAddr(end.0 - 1) {
                let none = open_block(&reading, &peer, address, deadline).unwrap_err();
                assert_eq!(none.kind(), ErrorKind::OutOfRange);
            }
        }
        drop((block, stream));
        // Gone is gone.
        publisher.ends_clean();
        let error = open_block(&reading, &peer, address, deadline).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerGone, "{kinds:?}: {error}");
        drop(reading);
        assert_eq!(reader.leaks(), Vec::<String>::new());
    }
}

#[test]
fn metadata_that_does_not_fit_is_refused() {
    let publisher = publisher_on(Machine::default(), ArenaPeers::Native);
    let reader = ScriptedCuda::new(Machine::default());
    let reading = Device::open(reader, 0).unwrap();
    let (right, _) = metadata(publisher.sink.session());
    assert_eq!(right.protocol, PROTOCOL_FD);
    assert_eq!(right.buffers[0].shm_name, "", "there is no handle to be opened by");
    let at = RemoteAddr(right.buffers[0].addr);
    let kind = |change: &dyn Fn(&mut SegmentDescriptor)| {
        let mut peer = right.clone();
        change(&mut peer);
        open_block(&reading, &peer, at, Instant::now() + BOUND).unwrap_err().kind()
    };
    let share = |peer: &mut SegmentDescriptor| peer.featurestore_device.clone().unwrap();
    assert_eq!(kind(&|p| p.protocol = "rdma".into()), ErrorKind::Unsupported);
    assert_eq!(kind(&|p| p.protocol = PROTOCOL_IPC.into()), ErrorKind::Protocol);
    assert_eq!(kind(&|p| p.featurestore_device = None), ErrorKind::Protocol);
    assert_eq!(kind(&|p| p.buffers[0].length += 1), ErrorKind::Protocol);
    assert_eq!(kind(&|p| p.featurestore_epoch = Some(transport_core::Epoch(1))), ErrorKind::Stale);
    let other = |p: &mut SegmentDescriptor| {
        let mut other = share(p);
        other.boot_id = "another".into();
        p.featurestore_device = Some(other);
    };
    assert_eq!(kind(&other), ErrorKind::Unsupported);
    let nowhere = |p: &mut SegmentDescriptor| {
        let mut other = share(p);
        other.fd_socket = Some("featurestore-nowhere".into());
        p.featurestore_device = Some(other);
    };
    assert_eq!(kind(&nowhere), ErrorKind::PeerGone);
    // And what is right is opened, any number of times.
    let socket = share(&mut right.clone()).fd_socket.unwrap();
    for _ in 0..3 {
        assert_eq!(receive_fd(&socket, Instant::now() + BOUND).unwrap().1.bytes, 16 * MIB);
    }
    let _one = open_block(&reading, &right, at, Instant::now() + BOUND).unwrap();
    let _two = open_block(&reading, &right, at, Instant::now() + BOUND).unwrap();
}

#[test]
fn an_arena_that_nobody_can_open_is_refused_at_the_start() {
    let cuda = ScriptedCuda::new(Machine { ipc: Some(801), ..Machine::default() });
    let device = Device::open(cuda.clone(), 0).unwrap();
    let config = DeviceArenaConfig::new(2 * MIB, ArenaPeers::Nobody);
    let backing = Backing::device(&device, &config).unwrap();
    let arena = Arena::start(backing, ArenaConfig::default()).unwrap();
    let error = CaptureSink::start(arena, SinkConfig::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConfigInvalid);
    // Nor what it cannot do.
    let config = DeviceArenaConfig::new(2 * MIB, ArenaPeers::Native);
    let backing = Backing::device(&device, &config).unwrap();
    let arena = Arena::start(backing, ArenaConfig::default()).unwrap();
    let mut port = SinkConfig::default();
    port.transfer_bind = Some(([127, 0, 0, 1], 0).into());
    let error = CaptureSink::start(arena, port).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConfigInvalid);
    // Nor one whose descriptors would name addresses that are not the memory's.
    let config = DeviceArenaConfig::new(2 * MIB, ArenaPeers::Native);
    let backing = Backing::device(&device, &config).unwrap();
    let fixed = ArenaConfig::default().base(BaseAddress::Fixed(RemoteAddr(4096)));
    let arena = Arena::start(backing, fixed).unwrap();
    let error = CaptureSink::start(arena, SinkConfig::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConfigInvalid);
    drop(device);
    assert_eq!(cuda.leaks(), Vec::<String>::new());
}

/// A view of device memory that nobody owns any more is none that may be copied.
#[test]
fn a_freed_source_is_noticed() {
    let publisher = publisher(ArenaPeers::NvlinkIntra);
    let stale = {
        let other = pool(&publisher.device);
        other.take(4096).unwrap().address()
    };
    let start = NonNull::new(stale as *mut u8).unwrap();
    // SAFETY: not so: the memory is gone. The driver knows it, and no byte is touched.
    let data = unsafe {
        RegionSlice::from_foreign(start, 4096, publisher.device.region_kind(), Arc::new(()))
    };
    let tensors = [(name("x"), Tensor::new(meta(Dtype::Float32, 4096), data).unwrap())];
    let batch = vec![Publication::new(key("a"), tensors.into(), Ready::Now)];
    let error = publisher.sink.publish_blocking(batch, options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("freed"), "{error}");
}
