//! The capture sink over the memory of a real device, read by other processes.
//!
//! `cargo test -p transport-mooncake-direct --features cuda --test gpu_sink -- --ignored
//! --test-threads=1`, or the executable that this builds, carried to a machine with a device and run
//! with the same two options. Second processes are this executable again. The tests named
//! `mooncake_` also need a `python3` with torch and the wheel `mooncake-transfer-engine-cuda13`;
//! leave them out with `--skip mooncake_`.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{
    Arena, ArenaConfig, Backing, FreeRequest, RegionPool, ReserveOptions, SamplePlan,
    cuda::{ArenaPeers, Device, DeviceArenaConfig, DevicePtr, Event, Stream, driver},
};
use control_proto::mooncake::handshake::{Frame, Kind, MAX_FRAME_BYTES, SegmentDescriptor};
use indexmap::IndexMap;
use transport_core::{
    Descriptor, Dtype, ErrorKind, FeatureName, Generation, Publication, PublishOptions, Ready,
    RegionSlice, RemoteAddr, SampleId, SampleKey, SessionName, StoreId, Tensor, TensorMeta,
};
use transport_mooncake_direct::{CaptureSink, SinkConfig, device::open_block};

const MIB: u64 = 1 << 20;
const STATE: u64 = 79 * MIB;
const BOUND: Duration = Duration::from_secs(30);
/// What a second process is to do, and with what.
const ROLE: &str = "FEATURESTORE_GPU_ROLE";

struct Publisher {
    device: Device,
    captures: RegionPool,
    sink: CaptureSink,
}

fn device() -> Device {
    Device::open(driver().expect("a CUDA driver"), 0).expect("a device")
}

fn publisher(peers: ArenaPeers) -> Publisher {
    let device = device();
    let backing =
        |bytes, peers| Backing::device(&device, &DeviceArenaConfig::new(bytes, peers)).unwrap();
    let captures = RegionPool::new(backing(2048 * MIB, ArenaPeers::Nobody)).unwrap();
    let arena = Arena::start(backing(2048 * MIB, peers), ArenaConfig::default()).unwrap();
    let sink = CaptureSink::start(arena, SinkConfig::default()).unwrap();
    Publisher { device, captures, sink }
}

fn name(text: &str) -> FeatureName {
    FeatureName::new(text).unwrap()
}

fn key(id: &str) -> SampleKey {
    SampleKey::new(StoreId::new("gpu").unwrap(), SampleId::new(id).unwrap(), Generation(1))
}

fn meta(dtype: Dtype, bytes: u64) -> TensorMeta {
    TensorMeta::new(dtype, [bytes / dtype.size()]).unwrap()
}

impl Publisher {
    fn stream(&self) -> Stream {
        self.device.stream().unwrap()
    }

    /// Device memory that `stream` fills: with poison, many times over, and at last with `byte`.
    fn late(&self, stream: &Stream, byte: u8, len: u64) -> RegionSlice {
        let region = self.captures.take(len as usize).unwrap();
        let at = DevicePtr(region.address() as u64);
        for poison in (0..20).map(|i| 0xE0 + i).chain([byte]) {
            // SAFETY: the test's own region; that it is frozen before it is filled is what the
            // ready event of its publication is for.
            unsafe { stream.fill(at, poison, len) }.unwrap();
        }
        region.freeze()
    }

    fn sample(&self, id: &str, stream: &Stream, byte: u8) -> Publication {
        let states = [("hidden_state", byte, STATE), ("target", byte + 1, 100_000)];
        let mut tensors: IndexMap<_, _> = states
            .into_iter()
            .map(|(state, byte, len)| {
                let data = self.late(stream, byte, len);
                (name(state), Tensor::new(meta(Dtype::Bfloat16, len), data).unwrap())
            })
            .collect();
        for (vector, byte) in [("input_ids", byte + 2), ("loss_mask", byte + 3)] {
            let data = RegionSlice::copy_of(&[byte; 8088]);
            tensors.insert(name(vector), Tensor::new(meta(Dtype::Int64, 8088), data).unwrap());
        }
        let ready: Arc<Event> = Arc::new(stream.record_new().unwrap());
        Publication::new(key(id), tensors, Ready::After(ready))
    }

    fn check(&self, descriptor: &Descriptor, byte: u8) {
        let stream = self.stream();
        for (feature, byte) in [
            ("hidden_state", byte),
            ("target", byte + 1),
            ("input_ids", byte + 2),
            ("loss_mask", byte + 3),
        ] {
            let feature = &descriptor.features[&name(feature)];
            let found = read(&stream, DevicePtr(feature.address.unwrap().0), feature.meta.nbytes());
            let wrong = found.iter().position(|&found| found != byte);
            assert_eq!(wrong, None, "{:?}", descriptor.sample);
        }
    }

    fn free(&self, described: &[Descriptor]) {
        let objects = described.iter().flat_map(|descriptor| {
            let key = |feature: &FeatureName| {
                (descriptor.sample.object(feature).shared().to_string(), None)
            };
            descriptor.features.keys().map(key).collect::<Vec<_>>()
        });
        let objects = objects.collect();
        self.sink.arena().free(FreeRequest { client: None, objects, reply: None });
    }
}

fn read(stream: &Stream, at: DevicePtr, len: u64) -> Vec<u8> {
    let pinned = stream.device().pinned(len as usize).unwrap();
    // SAFETY: published memory, and the copy is waited for.
    unsafe { stream.copy(pinned.address(), at, len) }.unwrap();
    stream.synchronize().unwrap();
    pinned.as_slice().to_vec()
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn batches_are_copied_behind_the_kernels_that_fill_them() {
    let publisher = publisher(ArenaPeers::NvlinkIntra);
    let stream = publisher.stream();
    for round in 0..4_u8 {
        let batch: Vec<_> =
            (0..8).map(|i| publisher.sample(&format!("s{i}"), &stream, 20 * round + i)).collect();
        let described = publisher.sink.publish_blocking(batch, PublishOptions::default()).unwrap();
        for (i, descriptor) in described.iter().enumerate() {
            publisher.check(descriptor, 20 * round + i as u8);
        }
        publisher.free(&described);
    }
    let health = publisher.sink.health_blocking().unwrap();
    println!("{health:?}");
    assert_eq!(health.host_payload_bytes, 4 * 8 * 2 * 8088, "ids and masks only");
    assert_eq!(health.device_payload_bytes, 4 * 8 * (STATE + 100_000));
    assert_eq!((health.published_samples, health.released_samples), (32, 32));
    assert_eq!(health.arena_largest_free, health.arena_bytes);
    assert_eq!(publisher.captures.stats().live_regions, 0);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn what_is_written_in_place_is_published_without_a_copy() {
    let publisher = publisher(ArenaPeers::Native);
    let stream = publisher.stream();
    let plan = SamplePlan {
        sample: key("a"),
        objects: vec![(name("hidden_state"), meta(Dtype::Bfloat16, STATE))],
        holder: None,
    };
    let options = ReserveOptions::default();
    let mut reservation = publisher.sink.reserve_blocking(vec![plan], options).unwrap();
    let mut region = reservation.take(0, 0);
    for byte in [0xEE, 0xED, 77] {
        // SAFETY: the reserved range, which is ours until it is published.
        unsafe { stream.fill(DevicePtr(region.as_mut_ptr() as u64), byte, STATE) }.unwrap();
    }
    reservation.put_back(0, 0, region).unwrap();
    let ready = Ready::After(Arc::new(stream.record_new().unwrap()));
    let described = reservation.publish_after_blocking(ready, BOUND).unwrap();
    let feature = &described[0].features[&name("hidden_state")];
    let found = read(&stream, DevicePtr(feature.address.unwrap().0), STATE);
    assert!(found.iter().all(|&byte| byte == 77));
    let health = publisher.sink.health_blocking().unwrap();
    assert_eq!((health.host_payload_bytes, health.device_payload_bytes), (0, 0));
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn a_cpu_tensor_needs_cuda_captures() {
    let publisher = publisher(ArenaPeers::NvlinkIntra);
    let data = RegionSlice::copy_of(&[1; 64]);
    let tensors = [(name("hidden_state"), Tensor::new(meta(Dtype::Bfloat16, 64), data).unwrap())];
    let batch = vec![Publication::new(key("a"), tensors.into(), Ready::Now)];
    let error = publisher.sink.publish_blocking(batch, PublishOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("needs CUDA captures"), "{error}");
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn another_process_opens_the_arena_from_its_handshake() {
    for peers in [ArenaPeers::Native, ArenaPeers::NvlinkIntra] {
        let publisher = publisher(peers);
        println!("{:?}", publisher.sink.arena().backing().device_block());
        let stream = publisher.stream();
        let batch = vec![publisher.sample("a", &stream, 3), publisher.sample("b", &stream, 90)];
        let described = publisher.sink.publish_blocking(batch, PublishOptions::default()).unwrap();
        for (descriptor, byte) in described.iter().zip([3, 90]) {
            let address = descriptor.features[&name("hidden_state")].address.unwrap().0;
            let session = publisher.sink.session();
            let mut peer = Peer::start(&format!("read {session} {address} {STATE}"));
            assert_eq!(peer.line(), format!("all {byte}"), "{peers:?}");
            peer.end();
        }
        // A reader that dies while it has the arena open changes nothing.
        let address = described[0].features[&name("hidden_state")].address.unwrap().0;
        let mut peer = Peer::start(&format!("read {} {address} {STATE}", publisher.sink.session()));
        peer.line();
        peer.child.kill().unwrap();
        peer.child.wait().unwrap();
        let batch = vec![publisher.sample("c", &stream, 5)];
        let described = publisher.sink.publish_blocking(batch, PublishOptions::default()).unwrap();
        publisher.check(&described[0], 5);
    }
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn a_process_with_a_live_arena_ends_as_it_wants_to() {
    for (role, code) in [("return", 0), ("exit", 7), ("panic", 101)] {
        let mut peer = Peer::start(&format!("end {role}"));
        assert_eq!(peer.line(), "published", "{role}");
        assert_eq!(peer.end().code(), Some(code), "{role}");
    }
    let mut peer = Peer::start("end wait");
    assert_eq!(peer.line(), "published");
    let pid = peer.child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(peer.end().signal(), Some(15), "its own end, and no crash");
}

#[test]
#[ignore = "needs a CUDA device and Mooncake for it: cargo xtask test --gpu"]
fn mooncake_reads_a_rust_arena() {
    let publisher = publisher(ArenaPeers::NvlinkIntra);
    let stream = publisher.stream();
    let batch = vec![publisher.sample("a", &stream, 3), publisher.sample("b", &stream, 90)];
    let described = publisher.sink.publish_blocking(batch, PublishOptions::default()).unwrap();
    let address = described[1].features[&name("hidden_state")].address.unwrap().0;
    let script = format!(
        "{PYTHON}\n\
         session, address, length = '{}', {address}, {STATE}\n\
         t = torch.full((length,), 0xEE, dtype=torch.uint8, device='cuda')\n\
         torch.cuda.synchronize()\n\
         assert e.register_memory(t.data_ptr(), length) == 0\n\
         times = []\n\
         for i in range(30):\n\
         \x20   start = time.perf_counter()\n\
         \x20   assert e.transfer_sync_read(session, t.data_ptr(), address, length) == 0\n\
         \x20   times.append(time.perf_counter() - start)\n\
         torch.cuda.synchronize()\n\
         assert bool((t == 90).all())\n\
         times.sort()\n\
         print('peer: read %.1f us, %.0f GB/s' % (times[15]*1e6, length/times[15]/1e9), flush=True)\n",
        publisher.sink.session(),
    );
    let mut peer = Peer::python(&script);
    println!("mooncake reads rust: {}", peer.line());
    peer.end();
}

#[test]
#[ignore = "needs a CUDA device and Mooncake for it: cargo xtask test --gpu"]
fn mooncake_memory_is_opened_by_rust() {
    let script = format!(
        "{PYTHON}\n\
         length = {STATE}\n\
         whole = torch.full((length + 4096,), 55, dtype=torch.uint8, device='cuda')\n\
         t = whole[2048:2048 + length]\n\
         torch.cuda.synchronize()\n\
         assert e.register_memory(whole.data_ptr(), whole.numel()) == 0\n\
         print('peer: 127.0.0.1:%d %d' % (e.get_rpc_port(), t.data_ptr()), flush=True)\n\
         sys.stdin.readline()\n"
    );
    let mut python = Peer::python(&script);
    let line = python.line();
    let (session, address) = line.split_once(' ').unwrap();
    let (device, address) = (device(), RemoteAddr(address.parse().unwrap()));
    let peer = metadata(&session.parse().unwrap());
    println!("{peer:?}");
    let block = open_block(&device, &peer, address, Instant::now() + BOUND).unwrap();
    let stream = device.stream().unwrap();
    let own = RegionPool::new(
        Backing::device(&device, &DeviceArenaConfig::new(128 * MIB, ArenaPeers::Nobody)).unwrap(),
    )
    .unwrap();
    let into = own.take(STATE as usize).unwrap();
    let into = DevicePtr(into.address() as u64);
    let from = block.locate(address, STATE).unwrap();
    let mut times = Vec::new();
    for _ in 0..30 {
        let start = Instant::now();
        // SAFETY: our own region, and memory that the other process keeps until it is told to end.
        unsafe { stream.copy(into, from, STATE) }.unwrap();
        stream.synchronize().unwrap();
        times.push(start.elapsed());
    }
    times.sort();
    println!("rust reads mooncake: {:?}", times[15]);
    assert!(read(&stream, into, STATE).iter().all(|&byte| byte == 55));
    drop(block);
    python.end();
}

/// How both Mooncake processes begin.
const PYTHON: &str = "
import os, sys, time
os.environ['MC_INTRANODE_NVLINK'] = '1'
import torch
from mooncake.engine import TransferEngine
e = TransferEngine()
torch.zeros(1, device='cuda')
assert e.initialize('127.0.0.1', 'P2PHANDSHAKE', 'nvlink_intra', '') == 0
";

/// What the process at `session` says about itself.
fn metadata(session: &SessionName) -> SegmentDescriptor {
    let mut stream = TcpStream::connect(session.to_string()).unwrap();
    stream.set_read_timeout(Some(BOUND)).unwrap();
    let mut request = Vec::new();
    Frame::new(Kind::Metadata, &SegmentDescriptor::default().to_json()).encode(&mut request);
    stream.write_all(&request).unwrap();
    let mut reply = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        if let Some((frame, _)) = Frame::decode(&reply, MAX_FRAME_BYTES).unwrap() {
            return SegmentDescriptor::parse(frame.json).unwrap();
        }
        let n = stream.read(&mut chunk).unwrap();
        assert!(n > 0, "the peer hung up");
        reply.extend_from_slice(&chunk[..n]);
    }
}

/// The role of a second process; run as a test of its own it has nothing to do.
#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn second_process() {
    let Ok(role) = std::env::var(ROLE) else {
        println!("the entry of second processes, which other tests start");
        return;
    };
    let words: Vec<_> = role.split(' ').collect();
    match words[..] {
        ["read", session, address, len] => {
            let device = device();
            let (address, len) = (RemoteAddr(address.parse().unwrap()), len.parse().unwrap());
            let peer = metadata(&session.parse().unwrap());
            let deadline = Instant::now() + BOUND;
            let block = open_block(&device, &peer, address, deadline).unwrap();
            let beyond = block.locate(RemoteAddr(block.base().0 + block.bytes() - 1), 2);
            assert_eq!(beyond.unwrap_err().kind(), ErrorKind::OutOfRange);
            let stream = device.stream().unwrap();
            let found = read(&stream, block.locate(address, len).unwrap(), len);
            match found.iter().find(|&&byte| byte != found[0]) {
                None => say(&format!("all {}", found[0])),
                Some(other) => say(&format!("{} and {other}", found[0])),
            }
            heard();
        }
        ["end", how] => {
            let publisher = publisher(ArenaPeers::NvlinkIntra);
            let stream = publisher.stream();
            let batch = vec![publisher.sample("a", &stream, 1)];
            publisher.sink.publish_blocking(batch, PublishOptions::default()).unwrap();
            say("published");
            match how {
                "return" => {}
                "exit" => std::process::exit(7),
                "panic" => panic!("as it was told to"),
                _ => heard(),
            }
        }
        _ => panic!("no such role: {role}"),
    }
}

/// A second process, ended with its handle.
struct Peer {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Peer {
    fn start(role: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(ROLE, role).args([
            "second_process",
            "--exact",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ]);
        Self::of(command)
    }

    fn python(script: &str) -> Self {
        let mut command = Command::new("python3");
        command.args(["-c", script]);
        Self::of(command)
    }

    fn of(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { stdin: child.stdin.take(), stdout, child }
    }

    /// The next line that the other process says; what else is printed is passed over.
    fn line(&mut self) -> String {
        let mut line = String::new();
        while self.stdout.read_line(&mut line).unwrap() > 0 {
            if let Some((_, said)) = line.trim_end().split_once("peer: ") {
                return said.to_owned();
            }
            line.clear();
        }
        panic!("the second process ended: {:?}", self.child.wait());
    }

    /// Tells it to end, and waits until it has.
    fn end(mut self) -> ExitStatus {
        drop(self.stdin.take());
        let deadline = Instant::now() + BOUND;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "the second process does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(line: &str) {
    println!("peer: {line}");
    std::io::stdout().flush().unwrap();
}

fn heard() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}
