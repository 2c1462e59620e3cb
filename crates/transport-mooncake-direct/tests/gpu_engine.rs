//! The cuda engine on a real device, reading another process's arena.
//!
//! `cargo test -p transport-mooncake-direct --features cuda --test gpu_engine -- --ignored
//! --test-threads=1`, or the executable that this builds, carried to a machine with a device and run
//! with the same two options. The second process is this executable again.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdout, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{
    Arena, ArenaConfig, Backing, RegionPool, ReserveOptions, SamplePlan,
    cuda::{ArenaKind, ArenaPeers, Device, DeviceArenaConfig, DevicePtr, driver},
};
use indexmap::IndexMap;
use transport_core::{
    ArenaLocation, Descriptor, Destination, Dtype, Epoch, ErrorKind, FeatureDescriptor,
    FeatureName, FetchOptions, FetchRequest, Fetched, Generation, Location, Ready, Release,
    RemoteAddr, Result, SampleId, SampleKey, Sequence, SessionName, StoreId, TensorMeta, Transport,
};
use transport_mooncake_direct::{
    CaptureSink, DirectTransport, Engine, ReadOp, ReadOptions, SinkConfig,
    cuda::{CudaEngine, CudaOptions},
};

const MIB: u64 = 1 << 20;
const BOUND: Duration = Duration::from_secs(30);
const ROLE: &str = "FEATURESTORE_GPU_ROLE";
const SAMPLES: usize = 16;
/// Lengths of the tensors of a sample: through the copy engine, through the kernel, and odd ones.
const LENS: [u64; 4] = [62 * MIB, 17 * MIB, 20_224, 7];
const KINDS: [ArenaKind; 2] = [ArenaKind::Plain, ArenaKind::PosixFd];

/// Ordinals of the reader's and of the publisher's device; 0 unless they are set.
const READER: &str = "FEATURESTORE_GPU_READER";
const PUBLISHER: &str = "FEATURESTORE_GPU_PUBLISHER";

fn device() -> Device {
    device_of(READER)
}

fn device_of(variable: &str) -> Device {
    let ordinal = std::env::var(variable).map_or(0, |n| n.parse().expect("a device's ordinal"));
    Device::open(driver().expect("a CUDA driver"), ordinal).expect("a device")
}

/// All devices of the machine.
fn devices() -> Vec<Device> {
    let api = driver().expect("a CUDA driver");
    let count = api.device_count().expect("a number of devices");
    (0..count).map(|ordinal| Device::open(api.clone(), ordinal).expect("a device")).collect()
}

fn name(i: usize) -> FeatureName {
    FeatureName::new(format!("t{i}")).unwrap()
}

fn meta(bytes: u64) -> TensorMeta {
    TensorMeta::new(Dtype::Uint8, [bytes]).unwrap()
}

fn key(i: usize) -> SampleKey {
    let (store, id) = (StoreId::new("gpu").unwrap(), SampleId::new(format!("s{i}")).unwrap());
    SampleKey::new(store, id, Generation(1))
}

/// What a tensor consists of.
fn byte(sample: usize, tensor: usize) -> u8 {
    (sample * LENS.len() + tensor) as u8
}

#[test]
#[ignore = "needs a CUDA device: the second process of the others"]
fn second_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (kind, is_on_each) = role.split_once(' ').map_or((&*role, false), |(kind, _)| (kind, true));
    let devices = if is_on_each { devices() } else { vec![device_of(PUBLISHER)] };
    let publish = |device: &Device| publish(device, kind.parse().unwrap());
    let sinks: Vec<CaptureSink> = devices.iter().map(publish).collect();
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    sinks.iter().for_each(CaptureSink::close_blocking);
}

/// Publishes the samples from an arena on `device`, and says where they are.
fn publish(device: &Device, kind: ArenaKind) -> CaptureSink {
    let memory = DeviceArenaConfig::new(1536 * MIB, ArenaPeers::Native).kinds([kind]);
    let backing = Backing::device(device, &memory).unwrap();
    let arena = Arena::start(backing, ArenaConfig::default()).unwrap();
    let epoch = arena.epoch();
    let sink = CaptureSink::start(arena, SinkConfig::default()).unwrap();
    let plan = |i| SamplePlan {
        sample: key(i),
        objects: LENS.iter().enumerate().map(|(j, &len)| (name(j), meta(len))).collect(),
        holder: None,
    };
    let plans = (0..SAMPLES).map(plan).collect();
    let mut reservation = sink.reserve_blocking(plans, ReserveOptions::default()).unwrap();
    let stream = device.stream().unwrap();
    for i in 0..SAMPLES {
        for (j, &len) in LENS.iter().enumerate() {
            let region = reservation.take(i, j);
            // SAFETY: a reserved range, ours until it is published.
            unsafe { stream.fill(DevicePtr(region.address() as u64), byte(i, j), len) }.unwrap();
            reservation.put_back(i, j, region).unwrap();
        }
    }
    let ready = Ready::After(Arc::new(stream.record_new().unwrap()));
    let described = reservation.publish_after_blocking(ready, BOUND).unwrap();
    let base = sink.arena().base().0;
    say(&format!("{} {} {} {base}", sink.session(), sink.control(), epoch.0));
    for descriptor in described {
        let places = descriptor.features.values();
        let places = places.map(|f| format!("{} {}", f.address.unwrap().0, f.seq.unwrap().0));
        say(&places.collect::<Vec<_>>().join(" "));
    }
    sink
}

fn say(line: &str) {
    println!("peer: {line}");
    std::io::stdout().flush().unwrap();
}

struct Publisher {
    child: Child,
    stdout: BufReader<ChildStdout>,
    arena: Published,
}

/// What is published from one arena.
struct Published {
    session: SessionName,
    control: SessionName,
    epoch: Epoch,
    base: u64,
    samples: Vec<Arc<Descriptor>>,
}

impl Publisher {
    fn start(kind: ArenaKind) -> Self {
        Self::with(kind.name())
    }

    fn with(role: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let only = ["second_process", "--exact", "--ignored", "--nocapture", "--test-threads=1"];
        command.env(ROLE, role).args(only).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let arena = Published::read(&mut stdout);
        Self { child, stdout, arena }
    }
}

impl std::ops::Deref for Publisher {
    type Target = Published;
    fn deref(&self) -> &Published {
        &self.arena
    }
}

impl Published {
    fn read(stdout: &mut BufReader<ChildStdout>) -> Self {
        let head = line(stdout);
        let words: Vec<&str> = head.split(' ').collect();
        let (session, control): (SessionName, SessionName) =
            (words[0].parse().unwrap(), words[1].parse().unwrap());
        let (epoch, base) = (Epoch(words[2].parse().unwrap()), words[3].parse().unwrap());
        let describe = |i| {
            let line = line(stdout);
            let mut numbers = line.split(' ').map(|word| word.parse::<u64>().unwrap());
            let mut next = || numbers.next().unwrap();
            let features: IndexMap<_, _> = (0..LENS.len())
                .map(|j| {
                    let (address, seq) = (RemoteAddr(next()), Sequence(next()));
                    (name(j), FeatureDescriptor::new(meta(LENS[j]), Some(address), Some(seq)))
                })
                .collect();
            let place = ArenaLocation::new(session.clone(), control.clone(), Some(epoch));
            Arc::new(Descriptor::new(key(i), features, None, Location::Arena(place)).unwrap())
        };
        let samples = (0..SAMPLES).map(describe).collect();
        Self { session, control, epoch, base, samples }
    }
}

fn line(stdout: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    while stdout.read_line(&mut line).unwrap() > 0 {
        if let Some((_, said)) = line.trim_end().split_once("peer: ") {
            return said.to_owned();
        }
        line.clear();
    }
    panic!("the second process ended");
}

impl Drop for Publisher {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn pool(device: &Device, bytes: u64) -> RegionPool {
    let config = DeviceArenaConfig::new(bytes, ArenaPeers::Nobody);
    let backing = Backing::device(device, &config).unwrap();
    let stream = device.stream().unwrap();
    // SAFETY: memory that nobody has taken anything from yet.
    unsafe { stream.fill(DevicePtr(backing.address()), 0xEE, backing.bytes_len()) }.unwrap();
    stream.synchronize().unwrap();
    RegionPool::new(backing).unwrap()
}

fn trainer(device: &Device, pool: &RegionPool) -> DirectTransport {
    let engine = CudaEngine::new(device, CudaOptions::default()).unwrap();
    let builder = DirectTransport::builder().engine(Engine::Cuda).cuda(engine);
    builder.pool(pool.clone()).build().unwrap()
}

fn requests(samples: &[Arc<Descriptor>]) -> Vec<FetchRequest> {
    samples.iter().map(|s| FetchRequest::new(s.clone(), Destination::Pool)).collect()
}

fn fetch(transport: &DirectTransport, samples: &[Arc<Descriptor>]) -> Result<Vec<Fetched>> {
    let options = FetchOptions::default().deadline(Duration::from_secs(10));
    transport.fetch_blocking(requests(samples), &options)
}

fn bytes_at(device: &Device, at: u64, len: u64) -> Vec<u8> {
    let (stream, pinned) = (device.stream().unwrap(), device.pinned(len as usize).unwrap());
    // SAFETY: device memory of this test, into its own; waited for.
    unsafe { stream.copy(pinned.address(), DevicePtr(at), len) }.unwrap();
    stream.synchronize().unwrap();
    pinned.as_slice().to_vec()
}

fn check(device: &Device, first: usize, fetched: &[Fetched]) {
    for (i, sample) in fetched.iter().enumerate() {
        for (j, tensor) in sample.tensors.values().enumerate() {
            let found = bytes_at(device, tensor.data.address() as u64, LENS[j]);
            let expected = byte(first + i, j);
            let wrong = found.iter().position(|&found| found != expected);
            assert_eq!(wrong, None, "sample {} tensor {j}", first + i);
        }
    }
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn samples_of_another_process_are_fetched_and_released() {
    for kind in KINDS {
        let (device, publisher) = (device(), Publisher::start(kind));
        let pool = pool(&device, 1536 * MIB);
        let transport = trainer(&device, &pool);
        let fetched = fetch(&transport, &publisher.samples).unwrap();
        check(&device, 0, &fetched);
        println!("{kind}: {:?}", transport.cuda().unwrap().stats());
        assert_eq!(transport.cuda().unwrap().stats().blocks, 1);
        let slots = pool.stats().live_regions;
        assert_eq!(slots, (SAMPLES * LENS.len()) as u64, "slots are the tensors");
        drop(fetched);
        assert_eq!(pool.stats().live_regions, 0);
        let health = transport.health_blocking().unwrap();
        assert_eq!(health.host_payload_bytes, 0);
        assert_eq!(health.device_payload_bytes, SAMPLES as u64 * LENS.iter().sum::<u64>());
        let releases = publisher.samples.iter().cloned().map(Release::from).collect();
        let report = transport.release_blocking(releases).unwrap();
        assert_eq!(report.released, SAMPLES as u64);
        let health =
            transport.publisher_health(&publisher.control, Instant::now() + BOUND).unwrap();
        assert_eq!(health.arena_largest_free, health.arena_bytes, "one free range");
        assert_eq!(health.host_payload_bytes, 0);
    }
}

/// One process has an arena on each of its devices, another an engine and a pool on each: every pair of
/// them, over every path between devices that the machine has.
#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn an_arena_on_each_device_of_a_process_is_read_to_each_device_of_another() {
    let devices = devices();
    println!("{} devices", devices.len());
    for kind in KINDS {
        let mut publisher = Publisher::with(&format!("{kind} each"));
        let more: Vec<_> =
            (1..devices.len()).map(|_| Published::read(&mut publisher.stdout)).collect();
        let pools: Vec<_> = devices.iter().map(|device| pool(device, 512 * MIB)).collect();
        // What a trainer holds goes when it ends, so all of them end together.
        let trainers: Vec<_> =
            devices.iter().zip(&pools).map(|(device, pool)| trainer(device, pool)).collect();
        for (device, transport) in devices.iter().zip(&trainers) {
            for arena in std::iter::once(&publisher.arena).chain(&more) {
                let fetched = fetch(transport, &arena.samples[..4]).unwrap();
                let kind = fetched[0].tensors[0].data.kind();
                assert_eq!(kind, device.region_kind(), "on the reader's device");
                check(device, 0, &fetched);
            }
            assert_eq!(transport.cuda().unwrap().stats().blocks, devices.len() as u64);
        }
    }
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn the_async_face_and_many_threads_read_the_same() {
    let (device, publisher) = (device(), Publisher::start(ArenaKind::Plain));
    let pool = pool(&device, 3072 * MIB);
    let transport = Arc::new(trainer(&device, &pool));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let fetched = runtime
        .block_on(transport.fetch(requests(&publisher.samples[..4]), FetchOptions::default()))
        .unwrap();
    check(&device, 0, &fetched);
    drop(fetched);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (transport, samples, device) = (&transport, &publisher.samples, &device);
            scope.spawn(move || {
                for round in 0..10 {
                    let first = (thread * 2 + round) % (SAMPLES - 1);
                    let fetched = fetch(transport, &samples[first..first + 2]).unwrap();
                    if round % 5 == 0 {
                        check(device, first, &fetched);
                    }
                }
            });
        }
    });
    assert_eq!(transport.cuda().unwrap().stats().blocks, 1, "opened once");
    assert_eq!(pool.stats().live_regions, 0);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn any_part_of_a_block_is_read_and_not_a_byte_beyond() {
    for kind in KINDS {
        let (device, publisher) = (device(), Publisher::start(kind));
        let pool = pool(&device, 64 * MIB);
        let engine = CudaEngine::new(&device, CudaOptions::default()).unwrap();
        let read = |at: u64, len: u64| {
            let op = ReadOp::new(RemoteAddr(at), pool.take(len as usize).unwrap());
            let options = ReadOptions::default().epoch(Some(publisher.epoch));
            let ops = engine.read(&publisher.session, vec![op], &options)?;
            Ok::<_, transport_core::Error>(bytes_at(&device, ops[0].dst.address() as u64, len))
        };
        let first = publisher.samples[0].features[0].address.unwrap().0;
        assert_eq!(read(first + 13, 100_001).unwrap(), vec![byte(0, 0); 100_001]);
        let (base, end) = (publisher.base, publisher.base + 1536 * MIB);
        println!("{kind}: {first:#x} in {base:#x}..{end:#x}");
        read(base, 1).unwrap();
        read(end - 1, 1).unwrap();
        for (at, len) in [(end, 1), (end - 1, 2), (base - 1, 2)] {
            assert_eq!(read(at, len).unwrap_err().kind(), ErrorKind::OutOfRange);
        }
    }
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn a_publisher_that_dies_is_an_error_in_time_and_its_memory_is_closed() {
    for kind in KINDS {
        let (device, mut publisher) = (device(), Publisher::start(kind));
        let theirs = device_of(PUBLISHER); // where the memory is that has to come back
        let pool = pool(&device, 256 * MIB);
        let transport = trainer(&device, &pool);
        let fetched = fetch(&transport, &publisher.samples[..1]).unwrap();
        let held = theirs.memory().unwrap().free;
        publisher.child.kill().unwrap();
        publisher.child.wait().unwrap();
        let started = Instant::now();
        let error = fetch(&transport, &publisher.samples[1..2]).unwrap_err();
        println!("{kind}: after {:?}: {error}", started.elapsed());
        assert!(matches!(error.kind(), ErrorKind::PeerGone | ErrorKind::Timeout), "{error}");
        assert!(started.elapsed() < Duration::from_secs(12));
        transport.health_blocking().unwrap(); // closes what is dead, if nothing did so before
        assert_eq!(transport.cuda().unwrap().stats().blocks, 0);
        let deadline = Instant::now() + BOUND;
        while theirs.memory().unwrap().free < held + 1500 * MIB {
            assert!(Instant::now() < deadline, "the dead arena's memory goes back to the device");
            std::thread::sleep(Duration::from_millis(20));
        }
        check(&device, 0, &fetched); // what was fetched is the trainer's own
    }
}
