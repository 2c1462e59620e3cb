//! Rust and Mooncake reading each other's device memory, beside two Mooncake processes.
//!
//! Needs a CUDA device and a `python3` with torch and the wheel mooncake-transfer-engine-cuda13:
//! `cargo bench -p transport-mooncake-direct --features cuda --bench cuda_mooncake`, or the
//! executable that this builds. All run on one card, with protocol `nvlink_intra`; with
//! `--reader-device N` and `--owner-device N` those who read are on one, and those who are read on
//! the other.
//!
//! Three processes: this one, with an arena and an engine; a Mooncake process that owns memory; and
//! one that reads. Every round reads the same ranges in turn: Mooncake from Mooncake, Rust from
//! Mooncake, Mooncake from Rust. Several ranges are one call of Rust's, and one after the other with
//! Mooncake. Each reader times its own calls, `transfer_sync_read` by Python's
//! clock and [`CudaEngine::read`] by Rust's, after one that is not counted: the card takes more time
//! to turn from one process to another than to read. Times are medians of 30 rounds after 3 to warm
//! up; destinations are poisoned before the last call and compared byte by byte after it.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use capture_arena::{
    Arena, ArenaConfig, Backing, RegionPool, ReserveOptions, SamplePlan,
    cuda::{ArenaKind, ArenaPeers, Device, DeviceArenaConfig, DevicePtr, Stream, driver},
};
use transport_core::{
    Dtype, FeatureName, Generation, Ready, RegionMut, RemoteAddr, Result, SampleId, SampleKey,
    SessionName, StoreId, TensorMeta,
};
use transport_mooncake_direct::{
    CaptureSink, ReadOp, ReadOptions, SinkConfig,
    cuda::{CudaEngine, CudaOptions},
};

const MIB: u64 = 1 << 20;
/// What is read: name, length of a range, ranges.
const READS: &[(&str, u64, u64)] = &[
    ("1 x 4 KiB", 4 << 10, 1),
    ("1 x 79 MiB", 79 * MIB, 1),
    ("8 x 79 MiB", 79 * MIB, 8),
    ("1 x 1 GiB", 1024 * MIB, 1),
];
const OWNED: u64 = 1024 * MIB;
const OURS: u8 = 77;
const THEIRS: u8 = 55;
const POISON: u8 = 0xEE;
const ROUNDS: usize = 30;
const WARM: usize = 3;
const BOUND: Duration = Duration::from_secs(60);

/// How both Mooncake processes begin, and what they do: `read SESSION ADDRESS LENGTH COUNT BYTE`
/// reads so many ranges and says how many nanoseconds that took and whether all have the byte;
/// poisons before, if BYTE is not 0.
const PYTHON: &str = r#"
import os, sys, time
os.environ['MC_INTRANODE_NVLINK'] = '1'
import torch
from mooncake.engine import TransferEngine
owned, byte = int(sys.argv[1]), int(sys.argv[2])
torch.cuda.set_device(int(sys.argv[3]))
e = TransferEngine()
t = torch.full((owned,), byte, dtype=torch.uint8, device='cuda')
torch.cuda.synchronize()
assert e.initialize('127.0.0.1', 'P2PHANDSHAKE', 'nvlink_intra', '') == 0
assert e.register_memory(t.data_ptr(), owned) == 0
def say(*words): print('peer:', *words, flush=True)
say('127.0.0.1:%d' % e.get_rpc_port(), t.data_ptr())
for line in sys.stdin:
    _, session, address, length, count, byte = line.split()
    address, length, count, byte = int(address), int(length), int(count), int(byte)
    at = t.data_ptr()
    places = [i * length % (owned - length + 1) for i in range(count)]
    assert e.transfer_sync_read(session, at, address, length) == 0
    if byte:
        t.fill_(0xEE)
        torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for place in places:
        code = e.transfer_sync_read(session, at + place, address + place, length)
        assert code == 0, code
    took = time.perf_counter_ns() - start
    right = True
    if byte:
        torch.cuda.synchronize()
        right = all(bool((t[p:p + length] == byte).all()) for p in places)
    say(took, int(right))
"#;

fn main() -> Result<()> {
    // Cargo passes `--bench`; without a device there is nothing to measure.
    let (reading, owning) = (ordinal("--reader-device"), ordinal("--owner-device"));
    let device = match driver().and_then(|api| Device::open(api, reading)) {
        Ok(device) => device,
        Err(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    println!("{}, driver for CUDA {:?}", device.name(), device.api().driver().version);
    println!("device {reading} reads device {owning}");
    let owner = Mooncake::start(THEIRS, owning);
    let mut reader = Mooncake::start(POISON, reading);
    let mut ours = Ours::new(&device, &Device::open(device.api().clone(), owning)?)?;
    println!(
        "| read | Mooncake from Mooncake | Rust from Mooncake | ratio of rates \
         | Mooncake from Rust | ratio of rates |\n|---|---|---|---|---|---|"
    );
    for &(what, len, count) in READS {
        let mut times = [Vec::new(), Vec::new(), Vec::new()];
        for round in 1..=WARM + ROUNDS {
            let last = round == WARM + ROUNDS;
            let check = |byte| if last { byte } else { 0 };
            times[0].push(reader.read(&owner.session, owner.address, len, count, check(THEIRS)));
            times[1].push(ours.read(&owner.session, owner.address, len, count, last)?);
            let (session, address) = (ours.sink.session().clone(), ours.address);
            times[2].push(reader.read(&session, address, len, count, check(OURS)));
        }
        let [pair, rust, mooncake] = times.map(median);
        let show = |time: Duration| {
            let rate = (len * count) as f64 / time.as_secs_f64() / 1e9;
            format!("{:.1} us, {rate:.0} GB/s", time.as_secs_f64() * 1e6)
        };
        let ratio = |time: Duration| pair.as_secs_f64() / time.as_secs_f64();
        println!(
            "| {what} | {} | {} | {:.3} | {} | {:.3} |",
            show(pair),
            show(rust),
            ratio(rust),
            show(mooncake),
            ratio(mooncake)
        );
    }
    println!("all bytes equal");
    Ok(())
}

/// The number behind an argument; 0 without it.
fn ordinal(argument: &str) -> u32 {
    let mut arguments = std::env::args().skip_while(|found| found != argument).skip(1);
    arguments.next().map_or(0, |text| text.parse().expect("a device's ordinal"))
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.drain(..WARM);
    times.sort();
    times[times.len() / 2]
}

/// Ranges of a read, one after the other in the owner's memory, from its start again at its end.
fn places(len: u64, count: u64) -> impl Iterator<Item = u64> {
    (0..count).map(move |i| i * len % (OWNED - len + 1))
}

/// This process: what Mooncake reads on one device, and what reads Mooncake on the other.
struct Ours {
    sink: CaptureSink,
    address: u64,
    engine: CudaEngine,
    pool: RegionPool,
    stream: Stream,
}

impl Ours {
    fn new(reading: &Device, owning: &Device) -> Result<Self> {
        let config = DeviceArenaConfig::new(OWNED + 2 * MIB, ArenaPeers::NvlinkIntra);
        let backing = Backing::device(owning, &config.kinds([ArenaKind::Plain]))?;
        let sink = CaptureSink::start(
            Arena::start(backing, ArenaConfig::default())?,
            SinkConfig::default(),
        )?;
        let sample = SampleKey::new(StoreId::new("bench")?, SampleId::new("s")?, Generation(1));
        let meta = TensorMeta::new(Dtype::Uint8, [OWNED])?;
        let objects = vec![(FeatureName::new("state")?, meta)];
        let plan = SamplePlan { sample, objects, holder: None };
        let mut reservation = sink.reserve_blocking(vec![plan], ReserveOptions::default())?;
        let (region, stream) = (reservation.take(0, 0), owning.stream()?);
        // SAFETY: a reserved range, ours until it is published; waited for.
        unsafe { stream.fill(DevicePtr(region.address() as u64), OURS, OWNED) }?;
        stream.synchronize()?;
        reservation.put_back(0, 0, region)?;
        let described = reservation.publish_after_blocking(Ready::Now, BOUND)?;
        let address = described[0].features[0].address.expect("bytes").0;
        let config = DeviceArenaConfig::new(OWNED + 2 * MIB, ArenaPeers::Nobody);
        let pool = RegionPool::new(Backing::device(reading, &config)?)?;
        let engine = CudaEngine::new(reading, CudaOptions::default())?;
        Ok(Self { sink, address, engine, pool, stream: reading.stream()? })
    }

    fn read(
        &mut self,
        session: &SessionName,
        address: u64,
        len: u64,
        count: u64,
        is_checked: bool,
    ) -> Result<Duration> {
        let whole = self.pool.take(OWNED as usize)?;
        let at = whole.address() as u64;
        let mut rest = Some(whole);
        let ops: Vec<ReadOp> = places(len, count)
            .map(|place| {
                let cut = |region: RegionMut| region.split_at(len as usize);
                let (dst, behind) = rest.take().and_then(cut).expect("as long as all ranges");
                rest = Some(behind);
                ReadOp::new(RemoteAddr(address + place), dst)
            })
            .collect();
        let ops = self.engine.read(session, ops, &ReadOptions::default())?;
        if is_checked {
            // SAFETY: a region of this bench that nothing reads into meanwhile; waited for.
            unsafe { self.stream.fill(DevicePtr(at), POISON, OWNED) }?;
            self.stream.synchronize()?;
        }
        let started = Instant::now();
        let ops = self.engine.read(session, ops, &ReadOptions::default())?;
        let took = started.elapsed();
        if is_checked {
            let mut pinned = self.stream.device().pinned((len * count) as usize)?;
            // SAFETY: what was read just now, into memory of this bench; waited for.
            unsafe { self.stream.copy(pinned.address(), DevicePtr(at), len * count) }?;
            self.stream.synchronize()?;
            let wrong = pinned.as_mut_slice().iter().position(|&byte| byte != THEIRS);
            assert_eq!(wrong, None, "wrong bytes");
        }
        drop(ops);
        Ok(took)
    }
}

/// A Mooncake process, ended with its handle.
struct Mooncake {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    session: SessionName,
    address: u64,
}

impl Mooncake {
    fn start(byte: u8, device: u32) -> Self {
        let mut command = Command::new("python3");
        command.args(["-c", PYTHON, &OWNED.to_string(), &byte.to_string(), &device.to_string()]);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("python3");
        let stdin = child.stdin.take().expect("piped");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let said = line(&mut stdout);
        let (session, address) = said.split_once(' ').expect("session and address");
        let (session, address) =
            (session.parse().expect("a session"), address.parse().expect("an address"));
        Self { child, stdin, stdout, session, address }
    }

    fn read(
        &mut self,
        session: &SessionName,
        address: u64,
        len: u64,
        count: u64,
        byte: u8,
    ) -> Duration {
        writeln!(self.stdin, "read {session} {address} {len} {count} {byte}").expect("a pipe");
        self.stdin.flush().expect("a pipe");
        let said = line(&mut self.stdout);
        let (took, right) = said.split_once(' ').expect("time and verdict");
        assert_eq!(right, "1", "Mooncake has wrong bytes");
        Duration::from_nanos(took.parse().expect("a number"))
    }
}

/// The next line that the process says; what else is printed is passed over.
fn line(stdout: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    while stdout.read_line(&mut line).expect("a pipe") > 0 {
        if let Some((_, said)) = line.trim_end().split_once("peer: ") {
            return said.to_owned();
        }
        line.clear();
    }
    panic!("the Mooncake process ended");
}

impl Drop for Mooncake {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
