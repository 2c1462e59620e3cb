//! The engine and the transport over it, between simulated machines, which are strangers to each
//! other as two processes are.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{
    Arena, ArenaConfig, Backing, RegionPool, ReserveOptions, SamplePlan,
    cuda::{
        ArenaKind, ArenaPeers, CudaError, Device, DeviceArenaConfig, DeviceBlock, DevicePtr,
        handle_to_hex,
        scripted::{Machine, ScriptedCuda},
    },
};
use control_proto::mooncake::handshake::{Buffer, Frame, Kind, SegmentDescriptor};
use parking_lot::Mutex;
use transport_core::{
    Descriptor, Destination, Dtype, ErrorKind, FeatureName, FetchOptions, FetchRequest, Generation,
    Ready, RegionMut, Release, RemoteAddr, SampleId, SampleKey, SessionName, StoreId, TensorMeta,
};

use super::{CopyPolicy, CudaEngine, CudaOptions, simulated::simulate_kernels};
use crate::{CaptureSink, DirectTransport, Engine, ReadOp, ReadOptions, SinkConfig};

const MIB: u64 = 1 << 20;
const BOUND: Duration = Duration::from_secs(20);

fn machine() -> Machine {
    Machine { fabric: None, devices: 2, ..Machine::default() }
}

struct Publisher {
    cuda: Arc<ScriptedCuda>,
    sink: CaptureSink,
}

impl Publisher {
    fn new(kind: ArenaKind) -> Self {
        Self::at(kind, SinkConfig::default())
    }

    fn at(kind: ArenaKind, config: SinkConfig) -> Self {
        Self::on(0, kind, config)
    }

    fn on(device: u32, kind: ArenaKind, config: SinkConfig) -> Self {
        let cuda = ScriptedCuda::new(machine());
        let device = Device::open(cuda.clone(), device).unwrap();
        let memory = DeviceArenaConfig::new(16 * MIB, ArenaPeers::Native).kinds([kind]);
        let backing = Backing::device(&device, &memory).unwrap();
        let arena = Arena::start(backing, ArenaConfig::default()).unwrap();
        Self { sink: CaptureSink::start(arena, config).unwrap(), cuda }
    }

    /// A sample of tensors of these lengths, each of one byte: `byte` and those that follow it.
    fn publish(&self, id: &str, byte: u8, lens: &[u64]) -> Arc<Descriptor> {
        let objects = lens.iter().enumerate().map(|(i, &len)| {
            let name = FeatureName::new(format!("t{i}")).unwrap();
            (name, TensorMeta::new(Dtype::Uint8, [len]).unwrap())
        });
        let store = StoreId::new("test").unwrap();
        let sample = SampleKey::new(store, SampleId::new(id).unwrap(), Generation(1));
        let plan = SamplePlan { sample, objects: objects.collect(), holder: None };
        let mut reservation =
            self.sink.reserve_blocking(vec![plan], ReserveOptions::default()).unwrap();
        for (i, &len) in lens.iter().enumerate().filter(|(_, len)| **len > 0) {
            let region = reservation.take(0, i);
            let at = DevicePtr(region.address() as u64);
            self.cuda.poke(at, &vec![byte + i as u8; len as usize]);
            reservation.put_back(0, i, region).unwrap();
        }
        Arc::new(reservation.publish_after_blocking(Ready::Now, BOUND).unwrap().remove(0))
    }
}

struct Reader {
    cuda: Arc<ScriptedCuda>,
    device: Device,
    engine: CudaEngine,
    pool: RegionPool,
}

impl Reader {
    fn new() -> Self {
        Self::with(CudaOptions::default())
    }

    fn with(options: CudaOptions) -> Self {
        let cuda = ScriptedCuda::new(machine());
        simulate_kernels(&cuda);
        let device = Device::open(cuda.clone(), 0).unwrap();
        let engine = CudaEngine::new(&device, options).unwrap();
        Self { pool: pool(&device), engine, device, cuda }
    }

    fn transport(&self) -> DirectTransport {
        let builder = DirectTransport::builder().engine(Engine::Cuda).pool(self.pool.clone());
        builder.cuda(self.engine.clone()).build().unwrap()
    }

    fn peek(&self, region: usize, len: usize) -> Vec<u8> {
        self.cuda.peek(DevicePtr(region as u64), len as u64)
    }

    fn ends_clean(self) {
        let Self { cuda, device, engine, pool } = self;
        assert_eq!(pool.stats().live_regions, 0);
        drop((engine, pool, device));
        assert_eq!(cuda.leaks(), Vec::<String>::new());
    }
}

fn pool(device: &Device) -> RegionPool {
    let config = DeviceArenaConfig::new(16 * MIB, ArenaPeers::Nobody);
    RegionPool::new(Backing::device(device, &config).unwrap()).unwrap()
}

fn into_pool(descriptor: &Arc<Descriptor>) -> Vec<FetchRequest> {
    vec![FetchRequest::new(descriptor.clone(), Destination::Pool)]
}

fn soon() -> ReadOptions {
    ReadOptions::default().deadline(Instant::now() + BOUND)
}

#[test]
fn samples_of_every_kind_of_arena_are_fetched_held_and_released() {
    for kind in ArenaKind::ALL {
        let (publisher, reader) = (Publisher::new(kind), Reader::new());
        let transport = reader.transport();
        let lens = [3 * MIB, 0, 10_001];
        let samples = [publisher.publish("a", 10, &lens), publisher.publish("b", 20, &lens)];
        for _ in 0..3 {
            for (sample, byte) in samples.iter().zip([10, 20]) {
                let options = FetchOptions::default();
                let fetched = transport.fetch_blocking(into_pool(sample), &options).unwrap();
                for (i, tensor) in fetched[0].tensors.values().enumerate() {
                    if lens[i] > 0 {
                        assert_eq!(tensor.data.kind(), reader.device.region_kind());
                        let found = reader.peek(tensor.data.address(), tensor.data.len());
                        assert_eq!(found, vec![byte + i as u8; lens[i] as usize], "{kind}");
                    }
                }
                assert_eq!(reader.pool.stats().live_regions, 2, "handed out as the tensors");
            }
            assert_eq!(reader.pool.stats().live_regions, 0);
        }
        let stats = transport.cuda().unwrap().stats();
        assert_eq!((stats.peers, stats.blocks, stats.block_bytes), (1, 1, 16 * MIB), "{kind}");
        let opened = ["cuIpcOpenMemHandle", "cuMemImportFromShareableHandle"];
        let opened: u64 = opened.iter().map(|call| reader.cuda.calls(call)).sum();
        assert!(opened <= 3, "once, and by the probe of kinds: {opened}");
        let health = transport.health_blocking().unwrap();
        assert_eq!(health.host_payload_bytes, 0);
        assert_eq!(health.device_payload_bytes, 6 * (3 * MIB + 10_001));
        let releases = samples.iter().map(|sample| Release::from(sample.clone())).collect();
        assert_eq!(transport.release_blocking(releases).unwrap().released, 2);
        let health = publisher.sink.health_blocking().unwrap();
        assert_eq!(health.arena_largest_free, health.arena_bytes);
        let gone = transport.fetch_blocking(into_pool(&samples[0]), &FetchOptions::default());
        assert_eq!(gone.unwrap_err().kind(), ErrorKind::NotFound);
        transport.close_blocking();
        assert_eq!(reader.engine.stats().blocks, 0, "closed with the transport");
        drop(transport);
        reader.ends_clean();
    }
}

/// A link is better filled by the copy engine, from a smaller piece on than memory at hand.
#[test]
fn pieces_of_another_device_go_through_the_copy_engine_earlier() {
    let mut options = CudaOptions::default();
    options.policy = CopyPolicy { copy_from: 4 * MIB, copy_from_afar: MIB, ..options.policy };
    for kind in ArenaKind::ALL {
        let copies_from = |device| {
            let publisher = Publisher::on(device, kind, SinkConfig::default());
            let (reader, lens) = (Reader::with(options.clone()), [2 * MIB, 10_001]);
            let sample = publisher.publish("a", 10, &lens);
            let copies =
                || reader.cuda.calls("cuMemcpyAsync") + reader.cuda.calls("cuMemcpyBatchAsync");
            let transport = reader.transport();
            let before = copies();
            let fetched = transport.fetch_blocking(into_pool(&sample), &FetchOptions::default());
            let fetched = fetched.unwrap();
            for (i, tensor) in fetched[0].tensors.values().enumerate() {
                let found = reader.peek(tensor.data.address(), tensor.data.len());
                assert!(found.iter().all(|&byte| byte == 10 + i as u8));
            }
            let copied = copies() - before;
            drop((fetched, transport));
            reader.ends_clean();
            copied
        };
        assert_eq!((copies_from(0), copies_from(1)), (0, 1), "{kind}");
    }
}

#[test]
fn own_regions_are_filled_and_those_of_elsewhere_refused() {
    let (publisher, reader) = (Publisher::new(ArenaKind::Plain), Reader::new());
    let transport = reader.transport();
    let sample = publisher.publish("a", 5, &[70_000]);
    let fetch = |region: RegionMut| {
        let request = FetchRequest::new(sample.clone(), Destination::Into(vec![region]));
        transport.fetch_blocking(vec![request], &FetchOptions::default())
    };
    let own = reader.pool.take(70_000).unwrap();
    let at = own.address();
    let fetched = fetch(own).unwrap();
    assert_eq!(fetched[0].tensors[0].data.address(), at, "the caller's own memory");
    assert_eq!(reader.peek(at, 70_000), vec![5; 70_000]);
    drop(fetched);
    let other = Device::open(reader.cuda.clone(), 1).unwrap();
    let elsewhere = pool(&other);
    for wrong in [elsewhere.take(70_000).unwrap(), RegionMut::zeroed(70_000).unwrap()] {
        let error = fetch(wrong).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.context("key").is_some() && error.context("expected").is_some());
    }
    let view = FetchRequest::new(sample.clone(), Destination::View);
    let view = transport.fetch_blocking(vec![view], &FetchOptions::default()).unwrap_err();
    assert_eq!(view.kind(), ErrorKind::Unsupported);
    // The engine itself checks, too.
    let op = ReadOp::new(sample.features[0].address.unwrap(), elsewhere.take(8).unwrap());
    let error = reader.engine.read(publisher.sink.session(), vec![op], &soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert_eq!(elsewhere.stats().live_regions, 0);
    let host = RegionPool::new(Backing::heap(MIB).unwrap()).unwrap();
    for (engine, pool) in [(Engine::Cuda, host), (Engine::Tcp, elsewhere)] {
        let builder = DirectTransport::builder().engine(engine).cuda(reader.engine.clone());
        let error = builder.pool(pool).build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{error}");
    }
    drop((transport, other));
    reader.ends_clean();
}

#[test]
fn any_part_of_a_block_is_read_and_not_a_byte_beyond() {
    let (publisher, reader) = (Publisher::new(ArenaKind::PosixFd), Reader::new());
    let sample = publisher.publish("a", 9, &[4096]);
    let address = sample.features[0].address.unwrap().0;
    let (base, end) = {
        let arena = publisher.sink.arena();
        (arena.base().0, arena.base().0 + arena.capacity())
    };
    let read = |places: &[(u64, usize)]| {
        let op =
            |&(at, len): &(u64, usize)| ReadOp::new(RemoteAddr(at), reader.pool.take(len).unwrap());
        let ops = places.iter().map(op).collect();
        reader.engine.read(publisher.sink.session(), ops, &soon())
    };
    let ops = read(&[(address + 7, 9), (address, 1), (end - 1, 1), (base, 1)]).unwrap();
    assert_eq!(reader.peek(ops[0].dst.address(), 9), [9; 9]);
    drop(ops);
    let before = reader.cuda.calls("cuLaunchKernel");
    for (at, len) in [(end, 1), (end - 1, 2), (base - 1, 1), (base - 1, 2), (u64::MAX, 1)] {
        let error = read(&[(address, 1), (at, len)]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfRange, "{at:#x}: {error}");
        assert_eq!(error.context("operation").unwrap().to_string(), "1");
        assert!(error.context("peer").is_some());
    }
    assert_eq!(reader.cuda.calls("cuLaunchKernel"), before, "nothing was copied");
    reader.ends_clean();
}

#[test]
fn what_is_dead_is_closed_and_another_life_is_not_taken_for_it() {
    let reader = Reader::new();
    let transport = reader.transport();
    let first = Publisher::new(ArenaKind::Plain);
    let old = first.publish("a", 1, &[1000]);
    transport.fetch_blocking(into_pool(&old), &FetchOptions::default()).unwrap();
    assert_eq!(reader.engine.stats().blocks, 1);
    let port = |name: &SessionName| -> SocketAddr { name.to_string().parse().unwrap() };
    let (data, control) = (port(first.sink.session()), port(first.sink.control()));
    first.sink.close_blocking();
    drop(first);
    let config = SinkConfig { data_bind: data, control_bind: control, ..SinkConfig::default() };
    let second = Publisher::at(ArenaKind::Plain, config);
    let options = FetchOptions::default().deadline(Duration::from_secs(5));
    let error = transport.fetch_blocking(into_pool(&old), &options).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Stale | ErrorKind::PeerGone), "{error}");
    assert_eq!(reader.engine.stats().blocks, 0, "the dead publisher's memory is closed");
    let new = second.publish("a", 2, &[1000]);
    let fetched = transport.fetch_blocking(into_pool(&new), &FetchOptions::default()).unwrap();
    assert_eq!(reader.peek(fetched[0].tensors[0].data.address(), 1000), [2; 1000]);
    drop(fetched);
    // Gone for good, and nobody in its place.
    second.sink.close_blocking();
    let error = transport.fetch_blocking(into_pool(&new), &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}");
    assert_eq!(reader.engine.stats().blocks, 0, "closed, although nobody is read instead");
    let third = Publisher::new(ArenaKind::Plain);
    // The engine by itself asks whoever is there who it is.
    let epoch = old.location_epoch();
    let op = ReadOp::new(old.features[0].address.unwrap(), reader.pool.take(8).unwrap());
    let error =
        reader.engine.read(third.sink.session(), vec![op], &soon().epoch(epoch)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
    drop(transport);
    reader.ends_clean();
}

trait LocationEpoch {
    fn location_epoch(&self) -> Option<transport_core::Epoch>;
}

impl LocationEpoch for Descriptor {
    fn location_epoch(&self) -> Option<transport_core::Epoch> {
        match &self.location {
            transport_core::Location::Arena(arena) => arena.epoch,
            _ => None,
        }
    }
}

#[test]
fn memory_of_a_read_that_ran_out_of_time_is_kept_until_the_device_is_done() {
    // One copy a piece; a simulated device does one at each look.
    let policy = CopyPolicy { copy_from: 1, ..CopyPolicy::default() };
    let options = CudaOptions { policy, ..CudaOptions::default() };
    let (publisher, reader) = (Publisher::new(ArenaKind::Plain), Reader::with(options));
    let sample = publisher.publish("a", 3, &[64 * 1024]);
    let address = sample.features[0].address.unwrap().0;
    let ops = |count: u64| -> Vec<ReadOp> {
        let op = |i| ReadOp::new(RemoteAddr(address + i * 512), reader.pool.take(512).unwrap());
        (0..count).map(op).collect()
    };
    drop(reader.engine.read(publisher.sink.session(), ops(1), &soon()).unwrap());
    let late = soon().deadline(Instant::now());
    let error = reader.engine.read(publisher.sink.session(), ops(100), &late).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert_eq!(reader.pool.stats().live_regions, 100, "out of everybody's reach");
    reader.engine.retain(|_, _| false); // the mapping stays as well
    assert_eq!(reader.engine.quarantined_bytes(), 100 * 512);
    let deadline = Instant::now() + BOUND;
    while reader.engine.quarantined_bytes() > 0 {
        assert!(Instant::now() < deadline, "the copies end");
    }
    assert_eq!(reader.pool.stats().live_regions, 0);
    let again = reader.engine.read(publisher.sink.session(), ops(3), &soon()).unwrap();
    assert_eq!(reader.peek(again[2].dst.address(), 512), [3; 512]);
    drop(again);
    reader.ends_clean();
}

#[test]
fn a_failure_at_any_step_gives_everything_back_and_the_next_read_works() {
    for call in
        ["cuIpcOpenMemHandle", "cuMemGetAddressRange", "cuMemcpyAsync", "cuLaunchKernel", "work"]
    {
        let (publisher, reader) = (Publisher::new(ArenaKind::Plain), Reader::new());
        let transport = reader.transport();
        let sample = publisher.publish("a", 3, &[2000, 10]);
        let times = if call == "cuMemcpyAsync" { 0 } else { 1 };
        reader.cuda.fail(call, 0, times, CudaError::ILLEGAL_ADDRESS);
        let fetched = transport.fetch_blocking(into_pool(&sample), &FetchOptions::default());
        assert_eq!(fetched.is_err(), times > 0, "{call}");
        drop(fetched);
        reader.cuda.heal();
        if call == "work" {
            // Such a fault takes the context with it: nothing runs on the device any more.
            assert_eq!(reader.pool.stats().live_regions, 0, "{call}");
            continue;
        }
        assert_eq!(reader.pool.stats().live_regions, 0, "{call}");
        let fetched =
            transport.fetch_blocking(into_pool(&sample), &FetchOptions::default()).unwrap();
        assert_eq!(reader.peek(fetched[0].tensors[1].data.address(), 10), [4; 10], "{call}");
        drop(fetched);
        assert_eq!(transport.health_blocking().unwrap().quarantined_bytes, 0);
        drop(transport);
        reader.ends_clean();
    }
}

/// A peer that tells no life, as Mooncake's: whatever it says at the moment.
struct Plain {
    session: SessionName,
    says: Arc<Mutex<SegmentDescriptor>>,
}

impl Plain {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let session = listener.local_addr().unwrap().into();
        let says = Arc::new(Mutex::new(SegmentDescriptor::default()));
        let saying = says.clone();
        // Ends with the process.
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut length = [0; 8];
                stream.read_exact(&mut length).unwrap();
                let mut body = vec![0; u64::from_le_bytes(length) as usize];
                stream.read_exact(&mut body).unwrap();
                let mut reply = Vec::new();
                Frame::new(Kind::Metadata, &saying.lock().to_json()).encode(&mut reply);
                stream.write_all(&reply).unwrap();
            }
        });
        Self { session, says }
    }

    fn say(&self, protocol: &str, block: &DeviceBlock) {
        let buffer = Buffer {
            addr: 0x7f00_0000_0000,
            length: block.len(),
            name: "*".into(),
            shm_name: handle_to_hex(block.handle().unwrap()),
        };
        *self.says.lock() = SegmentDescriptor {
            buffers: vec![buffer],
            protocol: protocol.into(),
            ..SegmentDescriptor::default()
        };
    }
}

#[test]
fn a_block_that_its_peer_registers_anew_is_opened_anew() {
    let options = CudaOptions { trust: Duration::ZERO, ..CudaOptions::default() };
    let (reader, peer) = (Reader::with(options), Plain::start());
    let cuda = ScriptedCuda::new(machine());
    let device = Device::open(cuda.clone(), 0).unwrap();
    let block = |byte: u8| {
        let config = DeviceArenaConfig::new(2 * MIB, ArenaPeers::NvlinkIntra);
        let block = DeviceBlock::create(&device, &config).unwrap();
        cuda.poke(block.address(), &[byte; 100]);
        block
    };
    let read = || {
        let op = ReadOp::new(RemoteAddr(0x7f00_0000_0000), reader.pool.take(100).unwrap());
        let ops = reader.engine.read(&peer.session, vec![op], &soon())?;
        Ok::<_, transport_core::Error>(reader.peek(ops[0].dst.address(), 100))
    };
    let first = block(1);
    peer.say("nvlink_intra", &first);
    assert_eq!(read().unwrap(), [1; 100]);
    assert_eq!(read().unwrap(), [1; 100]);
    assert_eq!(reader.cuda.calls("cuIpcOpenMemHandle"), 1);
    let second = block(2);
    peer.say("nvlink_intra", &second);
    drop(first);
    assert_eq!(read().unwrap(), [2; 100], "the same address means other memory now");
    assert_eq!(reader.engine.stats().blocks, 1);
    assert_eq!(reader.cuda.calls("cuIpcCloseMemHandle"), 1);
    peer.say("tcp", &second);
    let error = read().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.context("protocol").is_some(), "{error}");
    peer.say("nvlink_intra", &second);
    drop(second);
    assert_eq!(read().unwrap_err().kind(), ErrorKind::PeerGone, "the handle names nothing");
    let none = Plain::start();
    let op = ReadOp::new(RemoteAddr(5), reader.pool.take(1).unwrap());
    let error = reader.engine.read(&none.session, vec![op], &soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfRange, "{error}");
    reader.ends_clean();
}

#[test]
fn a_peer_that_tells_no_life_is_trusted_for_a_while_and_no_longer() {
    let trust = Duration::from_millis(400);
    let options = CudaOptions { trust, ..CudaOptions::default() };
    let (reader, peer) = (Reader::with(options), Plain::start());
    let cuda = ScriptedCuda::new(machine());
    let device = Device::open(cuda.clone(), 0).unwrap();
    let block = |byte: u8| {
        let config = DeviceArenaConfig::new(2 * MIB, ArenaPeers::NvlinkIntra);
        let block = DeviceBlock::create(&device, &config).unwrap();
        cuda.poke(block.address(), &[byte; 100]);
        block
    };
    let read = || {
        let op = ReadOp::new(RemoteAddr(0x7f00_0000_0000), reader.pool.take(100).unwrap());
        let ops = reader.engine.read(&peer.session, vec![op], &soon()).unwrap();
        reader.peek(ops[0].dst.address(), 100)[0]
    };
    let first = block(1);
    peer.say("nvlink_intra", &first);
    let asked = Instant::now();
    assert_eq!(read(), 1);
    let second = block(2);
    peer.say("nvlink_intra", &second);
    let found = read();
    assert!(found == 1 || asked.elapsed() >= trust, "what was told just now is not asked again");
    std::thread::sleep(trust);
    assert_eq!(read(), 2, "and after that what the peer says by then");
    let too_long = CudaOptions { trust: CudaOptions::MAX_TRUST * 2, ..CudaOptions::default() };
    let error = CudaEngine::new(&reader.device, too_long).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{error}");
    reader.ends_clean();
}
