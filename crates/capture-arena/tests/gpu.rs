//! Device memory on a real device.
//!
//! `cargo test -p capture-arena --features cuda --test gpu -- --ignored --test-threads=1`, or the
//! executable that this builds, carried to a machine with a device and run with the same two
//! options. It needs nothing beside it. Second processes are this executable again.

use std::{
    io::{BufRead, BufReader, Write},
    os::fd::{AsFd, OwnedFd},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use capture_arena::cuda::{
    Access, ArenaKind, ArenaPeers, CopyOp, Device, DeviceArenaConfig, DeviceAttribute, DeviceBlock,
    DevicePtr, KernelArg, KindProbe, Launch, MIN_CUDA_VERSION, Optional, PeerMemory, Pinned,
    Stream, Tried, driver, handle_from_hex, handle_to_hex,
};
use transport_core::{ErrorKind, ReadyEvent};

const MIB: u64 = 1 << 20;
const BOUND: Duration = Duration::from_secs(20);
/// What a second process is to do, and with what.
const ROLE: &str = "FEATURESTORE_GPU_ROLE";

fn device() -> Device {
    Device::open(driver().expect("a CUDA driver"), 0).expect("a device")
}

fn block(device: &Device, kind: ArenaKind, bytes: u64) -> DeviceBlock {
    let config = DeviceArenaConfig::new(bytes, ArenaPeers::Native).kinds([kind]);
    DeviceBlock::create(device, &config).expect("memory of a kind that works")
}

/// Kinds that this device has.
fn kinds(device: &Device) -> Vec<ArenaKind> {
    let probe = device.kinds().expect("a probe");
    let works = |kind: &ArenaKind| matches!(probe.of(*kind), Tried::Works { .. });
    ArenaKind::ALL.into_iter().filter(works).collect()
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(seed | 1) >> 3) as u8 ^ seed as u8).collect()
}

fn write(stream: &Stream, at: DevicePtr, bytes: &[u8]) {
    let mut pinned = stream.device().pinned(bytes.len()).unwrap();
    pinned.as_mut_slice().copy_from_slice(bytes);
    // SAFETY: the test's own memory, and the copy is waited for.
    unsafe { stream.copy(at, pinned.address(), bytes.len() as u64) }.unwrap();
    stream.synchronize().unwrap();
}

fn read(stream: &Stream, at: DevicePtr, len: usize) -> Vec<u8> {
    let pinned = stream.device().pinned(len).unwrap();
    // SAFETY: as above.
    unsafe { stream.copy(pinned.address(), at, len as u64) }.unwrap();
    stream.synchronize().unwrap();
    pinned.as_slice().to_vec()
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn the_driver_says_what_it_is() {
    let api = driver().unwrap();
    let info = api.driver();
    println!("driver: {info:?}");
    assert!(info.version >= MIN_CUDA_VERSION);
    assert!(info.library.contains("libcuda"), "{}", info.library);
    for ordinal in 0..api.device_count().unwrap() {
        let device = Device::open(api.clone(), ordinal).unwrap();
        let memory = device.memory().unwrap();
        println!("device {ordinal}: {} {:02x?} {memory:?}", device.name(), device.uuid());
        assert!(memory.total > 0 && memory.free <= memory.total);
        for attribute in [
            DeviceAttribute::Multiprocessors,
            DeviceAttribute::ComputeMajor,
            DeviceAttribute::FabricHandles,
            DeviceAttribute::PosixFdHandles,
            DeviceAttribute::RdmaWithVirtualMemory,
            DeviceAttribute::DmaBuf,
            DeviceAttribute::VirtualMemory,
        ] {
            println!("  {attribute:?} = {}", api.device_attribute(ordinal, attribute).unwrap());
        }
    }
    let none = Device::open(api.clone(), api.device_count().unwrap()).unwrap_err();
    assert_eq!(none.kind(), ErrorKind::InvalidInput);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn a_probe_gives_everything_back() {
    let device = device();
    KindProbe::run(&device).unwrap(); // whatever the driver keeps for good, it has now
    let before = device.memory().unwrap().free;
    let probe = KindProbe::run(&device).unwrap();
    println!("{probe:#?}");
    assert!(matches!(probe.of(ArenaKind::Plain), Tried::Works { .. }));
    assert_eq!(KindProbe::run(&device).unwrap(), probe);
    assert_eq!(device.memory().unwrap().free, before);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn every_kind_is_made_checked_and_freed() {
    let device = device();
    for kind in kinds(&device) {
        drop(block(&device, kind, 64 * MIB));
        let before = device.memory().unwrap().free;
        let memory = block(&device, kind, 256 * MIB + 1);
        assert_eq!((memory.kind(), memory.len()), (kind, 258 * MIB));
        assert!(before - device.memory().unwrap().free >= 256 * MIB);
        let (api, inside) = (device.api(), memory.address().offset(77));
        let bound = device.bind().unwrap();
        println!("{kind}: range {:?}", api.address_range(inside).unwrap());
        println!("{kind}: dma-buf {:?}", memory.export_dma_buf().map(|_| ()));
        drop(bound);
        assert_eq!(api.device_of(inside).unwrap(), Some(0));
        drop(memory);
        assert_eq!(device.memory().unwrap().free, before, "{kind}");
    }
    let host = pattern(1, 4096);
    assert_eq!(device.api().device_of(DevicePtr(host.as_ptr() as u64)).unwrap(), None);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn too_much_memory_is_refused_by_size_and_name() {
    let device = device();
    let free = device.memory().unwrap().free;
    for kind in kinds(&device) {
        let config = DeviceArenaConfig::new(free + MIB, ArenaPeers::Native).kinds([kind]);
        let error = DeviceBlock::create(&device, &config).unwrap_err();
        println!("{error}");
        assert_eq!(error.kind(), ErrorKind::CapacityExceeded, "{kind}");
        assert!(error.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY"));
        assert!(error.context("free").is_some() && error.context("requested").is_some());
    }
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn copies_fills_and_batches_are_exact() {
    let device = device();
    let stream = device.stream().unwrap();
    let memory = block(&device, ArenaKind::Plain, 64 * MIB);
    let at = memory.address();
    let bytes = pattern(5, 3 * MIB as usize + 13);
    write(&stream, at.offset(MIB), &bytes);
    // SAFETY: ranges of the test's own block that do not overlap, waited for below.
    unsafe { stream.copy(at.offset(8 * MIB + 1), at.offset(MIB), bytes.len() as u64) }.unwrap();
    assert_eq!(read(&stream, at.offset(8 * MIB + 1), bytes.len()), bytes);

    if device.api().driver().has(Optional::BatchCopy) {
        let op = |i: u64| CopyOp {
            dst: at.offset(20 * MIB + i * 70_000),
            src: at.offset(MIB + i * 1000),
            len: 999,
        };
        let ops: Vec<_> = (0..100).map(op).collect();
        // SAFETY: as above.
        unsafe { stream.copy_batch(&ops) }.unwrap();
        // Pinned memory in a batch, too.
        let mut pinned = device.pinned(512).unwrap();
        pinned.as_mut_slice().copy_from_slice(&bytes[..512]);
        let ops = [0, 256].map(|i| CopyOp {
            dst: at.offset(40 * MIB + i),
            src: pinned.address().offset(i),
            len: 256,
        });
        // SAFETY: as above.
        unsafe { stream.copy_batch(&ops) }.unwrap();
        stream.synchronize().unwrap();
        for i in 0..100_usize {
            let copied = read(&stream, at.offset(20 * MIB + i as u64 * 70_000), 999);
            assert_eq!(copied, &bytes[i * 1000..i * 1000 + 999], "{i}");
        }
        assert_eq!(read(&stream, at.offset(40 * MIB), 512), &bytes[..512]);
    } else {
        println!("the driver has no batch copies");
    }
    // SAFETY: as above.
    unsafe { stream.fill(at, 0xEE, MIB) }.unwrap();
    let seen = read(&stream, at, MIB as usize + 8);
    assert!(seen[..MIB as usize].iter().all(|&byte| byte == 0xEE));
    assert_eq!(seen[MIB as usize..], bytes[..8]);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn registered_host_memory_is_copied_from() {
    let device = device();
    let stream = device.stream().unwrap();
    let memory = block(&device, ArenaKind::Plain, 2 * MIB);
    let bytes = pattern(9, MIB as usize);
    let at = DevicePtr(bytes.as_ptr() as u64);
    let bound = device.bind().unwrap();
    // SAFETY: the vector lives until it is unregistered.
    unsafe { device.api().host_register(at, MIB) }.unwrap();
    // SAFETY: as above.
    unsafe { stream.copy(memory.address(), at, MIB) }.unwrap();
    stream.synchronize().unwrap();
    // SAFETY: registered above, no copy runs.
    unsafe { device.api().host_unregister(at) }.unwrap();
    drop(bound);
    assert_eq!(read(&stream, memory.address(), bytes.len()), bytes);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn events_order_streams_and_tell_time() {
    let device = device();
    let (one, two) = (device.stream().unwrap(), device.stream().unwrap());
    let memory = block(&device, ArenaKind::Plain, 2048 * MIB);
    let at = memory.address();
    let (start, end) = (device.event(true).unwrap(), device.event(true).unwrap());
    one.record(&start).unwrap();
    for byte in 0..20_u8 {
        // SAFETY: the test's own block, waited for below.
        unsafe { one.fill(at, byte, 1024 * MIB) }.unwrap();
    }
    one.record(&end).unwrap();
    two.wait(&end).unwrap();
    // SAFETY: as above; ordered after the fills by the event.
    unsafe { two.copy(at.offset(1024 * MIB), at, 1024 * MIB) }.unwrap();
    let late = ReadyEvent::wait(&end, Duration::ZERO).err().map(|error| error.kind());
    println!("right after queueing: {late:?}");
    two.synchronize_within(BOUND).unwrap();
    assert_eq!(read(&two, at.offset(2048 * MIB - 4), 4), [19; 4]);
    let took = start.elapsed(&end).unwrap();
    println!("20 fills of 1 GiB: {took:?}");
    assert!(took > Duration::from_millis(1) && took < BOUND);
}

/// Stores its second parameter where its first one points.
const PTX: &str = "
.version 7.0
.target sm_75
.address_size 64
.visible .entry put(.param .u64 at, .param .u32 value)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [at];
    cvta.to.global.u64 %rd2, %rd1;
    ld.param.u32 %r1, [value];
    st.global.u32 [%rd2], %r1;
    ret;
}
\0";

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn kernels_are_loaded_from_text_and_get_their_arguments() {
    let device = device();
    let stream = device.stream().unwrap();
    let memory = block(&device, ArenaKind::Plain, 2 * MIB);
    let bound = device.bind().unwrap();
    let api = device.api();
    assert!(api.module_load(&PTX.as_bytes()[..PTX.len() - 1]).is_err(), "no end");
    let module = api.module_load(PTX.as_bytes()).unwrap();
    // SAFETY: just loaded.
    let missing = unsafe { api.module_function(module, "no_such_kernel") }.unwrap_err();
    println!("{missing}");
    // SAFETY: as above.
    let put = unsafe { api.module_function(module, "put") }.unwrap();
    let launch = Launch { grid: [1, 1, 1], block: [1, 1, 1], shared_bytes: 0 };
    let at = memory.address().offset(4096);
    // SAFETY: the kernel's own arguments; it is waited for by the read.
    unsafe { stream.launch(put, launch, &[KernelArg::U64(at.0), KernelArg::U32(0xDEAD_BEEF)]) }
        .unwrap();
    assert_eq!(read(&stream, at, 4), 0xDEAD_BEEF_u32.to_le_bytes());
    // SAFETY: nothing of it runs.
    unsafe { api.module_unload(module) }.unwrap();
    drop(bound);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn another_process_reads_every_kind() {
    let device = device();
    let stream = device.stream().unwrap();
    for kind in kinds(&device) {
        let memory = block(&device, kind, 64 * MIB);
        let bytes = pattern(11, 5 * MIB as usize);
        write(&stream, memory.address().offset(7 * MIB + 512), &bytes);
        let mut peer = Peer::start(&format!("read {kind} {}", named(&memory)), fd_of(&memory));
        assert_eq!(peer.line(), format!("sum {}", sum(&bytes)), "{kind}");
        // What is written later is seen without opening anything again.
        let later = pattern(12, bytes.len());
        write(&stream, memory.address().offset(7 * MIB + 512), &later);
        peer.say("again");
        assert_eq!(peer.line(), format!("sum {}", sum(&later)), "{kind}");
        peer.end();
    }
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn what_a_peer_may_only_read_it_cannot_write() {
    let device = device();
    let memory = block(&device, ArenaKind::PosixFd, 2 * MIB);
    let stream = device.stream().unwrap();
    write(&stream, memory.address(), &[3; 64]);
    let role = format!("write posix_fd {}", named(&memory));
    let mut peer = Peer::start(&role, fd_of(&memory));
    let said = peer.line();
    println!("{said}");
    assert!(said.starts_with("refused "), "{said}");
    peer.end();
    // The error is the peer's alone, and the bytes are as they were.
    assert_eq!(read(&stream, memory.address(), 64), [3; 64]);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn a_handle_of_a_process_that_is_gone_opens_nothing() {
    let device = device();
    let mut peer = Peer::start("own plain", None);
    let handle = handle_from_hex(&peer.line()).unwrap();
    // While it lives it opens, once in a process at a time.
    drop(PeerMemory::open_ipc(&device, &handle).unwrap());
    peer.end();
    let error = PeerMemory::open_ipc(&device, &handle).unwrap_err();
    println!("{error}");
    assert_ne!(error.kind(), ErrorKind::CapacityExceeded);
    // And this process goes on.
    block(&device, ArenaKind::Plain, 2 * MIB);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn own_handles_are_refused() {
    let device = device();
    let memory = block(&device, ArenaKind::Plain, 2 * MIB);
    let error = PeerMemory::open_ipc(&device, memory.handle().unwrap()).unwrap_err();
    println!("{error}");
    block(&device, ArenaKind::Plain, 2 * MIB);
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn a_peer_that_dies_while_it_has_memory_mapped_leaves_the_owner_alone() {
    let device = device();
    let stream = device.stream().unwrap();
    for kind in kinds(&device) {
        let before = device.memory().unwrap().free;
        let memory = block(&device, kind, 64 * MIB);
        write(&stream, memory.address().offset(7 * MIB + 512), &pattern(1, 5 * MIB as usize));
        let mut peer = Peer::start(&format!("read {kind} {}", named(&memory)), fd_of(&memory));
        peer.line();
        peer.child.kill().unwrap();
        peer.child.wait().unwrap();
        let bytes = pattern(2, 5 * MIB as usize);
        write(&stream, memory.address(), &bytes);
        assert_eq!(read(&stream, memory.address(), bytes.len()), bytes, "{kind}");
        drop(memory);
        let deadline = Instant::now() + BOUND;
        while device.memory().unwrap().free < before && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20)); // the dead process is cleaned up
        }
        assert!(device.memory().unwrap().free >= before, "{kind}");
    }
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn threads_need_not_be_told_about_devices() {
    let device = device();
    let memory = block(&device, ArenaKind::Plain, 64 * MIB);
    std::thread::scope(|scope| {
        for i in 0..8_u64 {
            let (device, at) = (device.clone(), memory.address().offset(i * 4 * MIB));
            scope.spawn(move || {
                let stream = device.stream().unwrap();
                let bytes = pattern(i, 4 * MIB as usize);
                write(&stream, at, &bytes);
                assert_eq!(read(&stream, at, bytes.len()), bytes);
            });
        }
    });
    assert_eq!(device.api().current_context().unwrap(), None, "this thread is as it was");
}

// Second processes.

/// The role of a second process; run as a test of its own it has nothing to do.
#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn second_process() {
    let Ok(role) = std::env::var(ROLE) else {
        println!("the entry of second processes, which other tests start");
        return;
    };
    let device = device();
    let stream = device.stream().unwrap();
    let mut words = role.split(' ');
    match words.next() {
        Some("own") => {
            let memory = block(&device, ArenaKind::Plain, 2 * MIB);
            say(&handle_to_hex(memory.handle().unwrap()));
            heard();
        }
        Some(what @ ("read" | "write")) => {
            let kind: ArenaKind = words.next().unwrap().parse().unwrap();
            let len: u64 = words.next().unwrap().parse().unwrap();
            let handle = words.next().unwrap();
            let opened = match kind {
                ArenaKind::PosixFd => {
                    // The descriptor is this process's standard error, which nothing else uses.
                    let fd = std::io::stderr();
                    PeerMemory::import_fd(&device, fd.as_fd(), len, Access::Read)
                }
                ArenaKind::Fabric => {
                    let handle = handle_from_hex(handle).unwrap();
                    PeerMemory::import_fabric(&device, &handle, len, Access::Read)
                }
                _ => PeerMemory::open_ipc(&device, &handle_from_hex(handle).unwrap()),
            };
            let memory = opened.unwrap();
            assert_eq!(memory.len(), len);
            let at = memory.range(7 * MIB + 512, 5 * MIB);
            if what == "write" {
                // SAFETY: mapped; whether it may be written is the question.
                let queued = unsafe { stream.fill(memory.address(), 1, 64) };
                match queued.and_then(|()| stream.synchronize()) {
                    Ok(()) => say("written"),
                    Err(error) => say(&format!("refused {error}")),
                }
                std::process::exit(0); // its context is lost
            }
            say(&format!("sum {}", sum(&read(&stream, at.unwrap(), 5 * MIB as usize))));
            if heard() == "again" {
                say(&format!("sum {}", sum(&read(&stream, at.unwrap(), 5 * MIB as usize))));
                heard();
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
    fn start(role: &str, fd: Option<OwnedFd>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["second_process", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if let Some(fd) = fd {
            command.stderr(fd);
        }
        let mut child = command.spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { stdin: child.stdin.take(), stdout, child }
    }

    /// The next line that the role says; what the test harness prints is passed over.
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

    fn say(&mut self, line: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    fn end(mut self) {
        drop(self.stdin.take());
        let deadline = Instant::now() + BOUND;
        while self.child.try_wait().unwrap().is_none() {
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

fn heard() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

fn named(memory: &DeviceBlock) -> String {
    let handle = memory.handle().map_or_else(|| "-".to_owned(), handle_to_hex);
    format!("{} {handle}", memory.len())
}

fn fd_of(memory: &DeviceBlock) -> Option<OwnedFd> {
    (memory.kind() == ArenaKind::PosixFd).then(|| memory.export_fd().unwrap())
}

fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |sum: u64, &byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)))
}

/// Pinned memory is plain memory to the CPU.
#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn pinned_memory_starts_zeroed() {
    let pinned: Pinned = device().pinned(1 << 20).unwrap();
    assert!(pinned.as_slice().iter().all(|&byte| byte == 0));
    assert_eq!(pinned.len(), 1 << 20);
}
