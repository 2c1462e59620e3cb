//! What reading another process's device memory costs beside plain copies of the driver.
//!
//! Needs a CUDA device: `cargo bench -p transport-mooncake-direct --features cuda --bench
//! cuda_engine`, or the executable that this builds, which needs nothing beside it. The publisher is
//! this executable again, with an arena of plain memory (protocol `nvlink_intra`) and with one of
//! file descriptors. With `--publisher-device N` and `--reader-device N` they are on two devices, and
//! the raw copies beside everything else go from one to the other. `--sweep` looks for the best policy
//! instead: how the kernel is launched, and from which length on the copy engine is better.
//!
//! `engine` is [`CudaEngine::read`] into regions in the caller's hands; `fetch` is
//! [`DirectTransport::fetch_blocking`] into the receive pool, with everything that a trainer gets
//! from it: claims, checks, slots of the pool and named tensors. `driver` is one copy a tensor on
//! one stream, waited for once. Times are medians of 30 after 3 to warm up; destinations are
//! poisoned before the last run of each and compared byte by byte after it.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{
    Arena, ArenaConfig, Backing, RegionPool, ReserveOptions, SamplePlan,
    cuda::{ArenaKind, ArenaPeers, Device, DeviceArenaConfig, DevicePtr, Pinned, Stream, driver},
};
use indexmap::IndexMap;
use transport_core::{
    ArenaLocation, ClientId, Descriptor, Destination, Dtype, Epoch, FeatureDescriptor, FeatureName,
    FetchOptions, FetchRequest, Fetched, Generation, Location, Ready, RegionSlice, RemoteAddr,
    Result, SampleId, SampleKey, Sequence, SessionName, StoreId, TensorMeta,
};
use transport_mooncake_direct::{
    CaptureSink, DirectTransport, Engine, ReadOp, ReadOptions, SinkConfig,
    cuda::{CopyPolicy, CudaEngine, CudaOptions},
};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const POISON: u8 = 0xEE;
const STAGE: usize = 64 << 20;
const RUNS: usize = 30;
const WARM: usize = 3;
const ARENA: u64 = 12 << 30;
const POOL: u64 = 5632 * MIB;
const BOUND: Duration = Duration::from_secs(60);
const ROLE: &str = "FEATURESTORE_BENCH_ROLE";
const PUBLISHER: &str = "--publisher-device";
const READER: &str = "--reader-device";
/// Sets of samples: name, samples, and tensors of each in bytes.
const SETS: &[(&str, usize, &[u64])] = &[
    ("79 MiB in one tensor", 64, &[79 * MIB]),
    ("79 MiB in four tensors", 64, &[62_128_128, 20_709_376, 20_224, 20_224]),
    ("1 GiB in one tensor", 1, &[1024 * MIB]),
    ("256 KiB", 128, &[256 * KIB; 4]),
    ("64 KiB", 512, &[64 * KIB; 4]),
    ("10 KiB", 1024, &[10 * KIB; 4]),
    ("4 KiB", 1, &[4 * KIB]),
];

fn main() -> Result<()> {
    // Cargo passes `--bench`; without a device there is nothing to measure.
    let api = match driver() {
        Ok(api) => api,
        Err(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    let publisher = device_of(PUBLISHER);
    if let Ok(role) = std::env::var(ROLE) {
        return publish(&Device::open(api, publisher)?, &role);
    }
    let device = Device::open(api, device_of(READER))?;
    let info = device.api().driver().clone();
    let kernel = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    println!("{}, driver for CUDA {}.{}", device.name(), info.version.0, info.version.1);
    println!("publisher on device {publisher}, reader on device {}", device.ordinal());
    println!("{}", kernel.lines().next().unwrap_or("kernel driver unknown"));
    if std::env::args().any(|argument| argument == "--sweep") {
        return Bed::new(&device, ArenaKind::PosixFd).and_then(|mut bed| bed.sweep());
    }
    for kind in [ArenaKind::Plain, ArenaKind::PosixFd] {
        println!("\narena of kind {kind}");
        if let Err(why) = Bed::new(&device, kind).and_then(|mut bed| bed.measure()) {
            println!("failed: {why}");
            std::process::exit(1);
        }
    }
    Ok(())
}

/// The device that an argument names; 0 without it.
fn device_of(argument: &str) -> u32 {
    let mut arguments = std::env::args().skip_while(|found| found != argument).skip(1);
    arguments.next().map_or(0, |text| number(&text) as u32)
}

/// The other process: an arena with everything that is read.
fn publish(device: &Device, role: &str) -> Result<()> {
    let (kind, client) = role.split_once(' ').expect("kind and client");
    let config = DeviceArenaConfig::new(ARENA, ArenaPeers::Native).kinds([kind.parse()?]);
    let backing = Backing::device(device, &config)?;
    // Whatever is published is told by its place.
    let (stream, base) = (device.stream()?, DevicePtr(backing.address()));
    let mut stage = device.pinned(STAGE)?;
    for start in (0..ARENA).step_by(STAGE) {
        for (i, word) in stage.as_mut_slice().chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&source(start / 8 + i as u64).to_le_bytes());
        }
        // SAFETY: an arena that nobody has taken anything from; the copy is waited for.
        unsafe { stream.copy(base.offset(start), stage.address(), STAGE as u64) }?;
        stream.synchronize()?;
    }
    let arena = Arena::start(backing, ArenaConfig::default())?;
    let epoch = arena.epoch();
    let sink = CaptureSink::start(arena, SinkConfig::default())?;
    say(&format!("{} {} {} {}", sink.session(), sink.control(), epoch.0, base.0));
    heard();
    let client: ClientId = client.parse()?;
    for (set, (_, samples, tensors)) in SETS.iter().enumerate() {
        let plan = |i| SamplePlan {
            sample: key(set, i),
            objects: tensors.iter().enumerate().map(|(j, &len)| (name(j), meta(len))).collect(),
            holder: Some(client.clone()),
        };
        let plans = (0..*samples).map(plan).collect();
        let reservation = sink.reserve_blocking(plans, ReserveOptions::default())?;
        for descriptor in reservation.publish_after_blocking(Ready::Now, BOUND)? {
            let features = descriptor.features.values();
            let places: Vec<_> = features
                .map(|f| format!("{} {}", f.address.expect("bytes").0, f.seq.expect("ours").0))
                .collect();
            say(&places.join(" "));
        }
    }
    heard();
    sink.close_blocking();
    Ok(())
}

/// This process: a trainer with a receive pool on the device.
struct Bed {
    publisher: Publisher,
    transport: DirectTransport,
    session: SessionName,
    epoch: Epoch,
    base: u64,
    sets: Vec<Vec<Arc<Descriptor>>>,
    pool: RegionPool,
    stream: Stream,
    stage: Pinned,
}

impl Bed {
    fn new(device: &Device, kind: ArenaKind) -> Result<Self> {
        let client = ClientId::random();
        let mut publisher = Publisher::start(&format!("{kind} {client}"));
        let line = publisher.line();
        let words: Vec<&str> = line.split(' ').collect();
        let (session, control): (SessionName, SessionName) = (words[0].parse()?, words[1].parse()?);
        let (epoch, base) = (Epoch(number(words[2])), number(words[3]));
        let engine = CudaEngine::new(device, CudaOptions::default())?;
        let config = DeviceArenaConfig::new(POOL, ArenaPeers::Nobody);
        let pool = RegionPool::new(Backing::device(device, &config)?)?;
        let transport = DirectTransport::builder()
            .engine(Engine::Cuda)
            .cuda(engine)
            .pool(pool.clone())
            .client_id(client.clone())
            .build()?;
        transport.announce(&control, Instant::now() + BOUND)?;
        publisher.tell();
        let mut sets = Vec::new();
        for (set, (_, samples, tensors)) in SETS.iter().enumerate() {
            let mut described = Vec::new();
            for i in 0..*samples {
                let line = publisher.line();
                let mut places = line.split(' ').map(number);
                let mut next = || places.next().expect("two a tensor");
                let features: IndexMap<_, _> = tensors
                    .iter()
                    .enumerate()
                    .map(|(j, &len)| {
                        let (address, seq) = (RemoteAddr(next()), Sequence(next()));
                        (name(j), FeatureDescriptor::new(meta(len), Some(address), Some(seq)))
                    })
                    .collect();
                let mut place = ArenaLocation::new(session.clone(), control.clone(), Some(epoch));
                place.holder = Some(client.clone());
                let at = Location::Arena(place);
                described.push(Arc::new(Descriptor::new(key(set, i), features, None, at)?));
            }
            sets.push(described);
        }
        let (stream, stage) = (device.stream()?, device.pinned(STAGE)?);
        Ok(Self { publisher, transport, session, epoch, base, sets, pool, stream, stage })
    }

    fn measure(&mut self) -> Result<()> {
        println!("| read | driver | engine | fetch | engine / driver | fetch / driver |");
        println!("|---|---|---|---|---|---|");
        for (set, count) in [
            (0, 1),
            (0, 64),
            (1, 1),
            (1, 8),
            (1, 64),
            (2, 1),
            (3, 128),
            (4, 512),
            (5, 1024),
            (6, 1),
        ] {
            let (what, _, tensors) = SETS[set];
            let bytes = tensors.iter().sum::<u64>() * count as u64;
            let driver = self.driver(set, count)?;
            let engine = self.engine(set, count)?;
            let fetch = self.fetch(set, count, count)?;
            let ratio = |time: Duration| time.as_secs_f64() / driver.as_secs_f64();
            println!(
                "| {count} x {} x {what} | {} | {} | {} | {:.3} | {:.3} |",
                tensors.len(),
                show(bytes, driver),
                show(bytes, engine),
                show(bytes, fetch),
                ratio(engine),
                ratio(fetch),
            );
        }
        let bytes = 64 * SETS[1].2.iter().sum::<u64>();
        for each in [1, 8] {
            let time = self.fetch(1, 64, each)?;
            println!("64 x 4 x 79 MiB, fetched in calls of {each}: {}", show(bytes, time));
        }
        let health = self.transport.health_blocking()?;
        let stats = self.transport.cuda().expect("the engine").stats();
        println!("{stats:?}");
        println!(
            "host payload {} bytes, device payload {} bytes",
            health.host_payload_bytes, health.device_payload_bytes
        );
        assert_eq!(health.host_payload_bytes, 0, "no payload passes through the host");
        self.publisher.tell();
        Ok(())
    }

    /// Figures of other policies than the default, over pieces that are no neighbours.
    fn sweep(&mut self) -> Result<()> {
        let device = self.stream.device().clone();
        let engine = |policy: CopyPolicy| {
            let mut options = CudaOptions::default();
            options.policy = policy;
            CudaEngine::new(&device, options)
        };
        let usual = CopyPolicy::default();
        let kernel_only = CopyPolicy { copy_from: u64::MAX, copy_from_afar: u64::MAX, ..usual };
        println!("| pieces | blocks | rounds | time |\n|---|---|---|---|");
        for (count, len) in [(4096, 10 * KIB), (512, 256 * KIB)] {
            for blocks_each in [1, 2, 4, 8] {
                for rounds in [1, 2, 4, 8] {
                    let engine = engine(CopyPolicy { blocks_each, rounds, ..kernel_only })?;
                    let time = self.read_pieces(&engine, count, len)?;
                    let shown = show(count * len, time);
                    println!(
                        "| {count} x {} KiB | {blocks_each} | {rounds} | {shown} |",
                        len / KIB
                    );
                }
            }
        }
        println!("\n| pieces | in one launch | a part ahead |\n|---|---|---|");
        for (count, len) in [(4096, 10 * KIB), (2048, 64 * KIB), (512, 256 * KIB)] {
            let mut row = format!("| {count} x {} KiB |", len / KIB);
            for ahead in [false, true] {
                let engine = engine(CopyPolicy { ahead, ..kernel_only })?;
                let time = self.read_pieces(&engine, count, len)?;
                row += &format!(" {} |", show(count * len, time));
            }
            println!("{row}");
        }
        println!("\n| pieces | kernel | copy engine | kernel / copy engine |\n|---|---|---|---|");
        let copies_only = CopyPolicy { copy_from: 0, copy_from_afar: 0, ..usual };
        let (kernel, copies) = (engine(kernel_only)?, engine(copies_only)?);
        for count in [1, 2, 8] {
            for shift in 18..27 {
                let len = 1 << shift;
                let by_kernel = self.read_pieces(&kernel, count, len)?;
                let by_copies = self.read_pieces(&copies, count, len)?;
                println!(
                    "| {count} x {} KiB | {} | {} | {:.3} |",
                    len / KIB,
                    show(count * len, by_kernel),
                    show(count * len, by_copies),
                    by_kernel.as_secs_f64() / by_copies.as_secs_f64(),
                );
            }
        }
        self.publisher.tell();
        Ok(())
    }

    /// [`Self::time_reads`] of `count` pieces from places apart.
    fn read_pieces(&mut self, engine: &CudaEngine, count: u64, len: u64) -> Result<Duration> {
        let piece = |i: u64| {
            let from = RemoteAddr(self.base + i * 7919 % count * len.next_multiple_of(512));
            Ok(ReadOp::new(from, self.pool.take(len as usize)?))
        };
        let ops = (0..count).map(piece).collect::<Result<Vec<_>>>()?;
        self.time_reads(engine, ops)
    }

    /// Median of reading them; the last run is checked.
    fn time_reads(&mut self, engine: &CudaEngine, mut ops: Vec<ReadOp>) -> Result<Duration> {
        let mut times = Vec::new();
        for run in 1..=WARM + RUNS {
            if run == WARM + RUNS {
                self.poison()?;
            }
            let options = ReadOptions::default().epoch(Some(self.epoch));
            let started = Instant::now();
            ops = engine.read(&self.session, ops, &options)?;
            times.push(started.elapsed());
        }
        for ReadOp { address, dst, .. } in ops {
            self.verify(address.0, &dst.freeze())?;
        }
        Ok(median(times))
    }

    fn ops(&self, set: usize, count: usize) -> Result<Vec<ReadOp>> {
        let tensors = self.sets[set][..count].iter().flat_map(|sample| sample.features.values());
        tensors
            .map(|feature| {
                let dst = self.pool.take(feature.meta.nbytes() as usize)?;
                Ok(ReadOp::new(feature.address.expect("bytes"), dst))
            })
            .collect()
    }

    fn driver(&mut self, set: usize, count: usize) -> Result<Duration> {
        let mut ops = self.ops(set, count)?;
        // The mapping that the engine has; a second one is not to be had.
        let probe = ops.len();
        let mut copies = Vec::with_capacity(probe);
        let engine = self.transport.cuda().expect("the engine").clone();
        let options = ReadOptions::default().epoch(Some(self.epoch));
        for op in &mut ops {
            let src = engine.locate(&self.session, op.address, op.dst.len() as u64, &options)?;
            copies.push((DevicePtr(op.dst.as_mut_ptr() as u64), src, op.dst.len() as u64));
        }
        let device = self.stream.device().clone();
        let mut times = Vec::new();
        for _ in 0..WARM + RUNS {
            let _bound = device.bind()?;
            let started = Instant::now();
            for &(dst, src, len) in &copies {
                // SAFETY: regions of this bench, and published memory; waited for below.
                unsafe { self.stream.copy(dst, src, len) }?;
            }
            self.stream.synchronize()?;
            times.push(started.elapsed());
        }
        Ok(median(times))
    }

    fn engine(&mut self, set: usize, count: usize) -> Result<Duration> {
        let ops = self.ops(set, count)?;
        let engine = self.transport.cuda().expect("the engine").clone();
        self.time_reads(&engine, ops)
    }

    fn fetch(&mut self, set: usize, count: usize, each: usize) -> Result<Duration> {
        let samples = self.sets[set][..count].to_vec();
        let mut times = Vec::new();
        for run in 1..=WARM + RUNS {
            let is_checked = run == WARM + RUNS;
            if is_checked {
                self.poison()?;
            }
            let requests: Vec<Vec<_>> = samples
                .chunks(each)
                .map(|samples| {
                    let request =
                        |s: &Arc<Descriptor>| FetchRequest::new(s.clone(), Destination::Pool);
                    samples.iter().map(request).collect()
                })
                .collect();
            let options = FetchOptions::default();
            let mut fetched: Vec<Fetched> = Vec::with_capacity(count);
            let started = Instant::now();
            for requests in requests {
                fetched.extend(self.transport.fetch_blocking(requests, &options)?);
            }
            times.push(started.elapsed());
            if is_checked {
                for (sample, fetched) in samples.iter().zip(&fetched) {
                    for (feature, tensor) in sample.features.values().zip(fetched.tensors.values())
                    {
                        self.verify(feature.address.expect("bytes").0, &tensor.data)?;
                    }
                }
            }
        }
        Ok(median(times))
    }

    /// Poisons the whole pool, also what is in the caller's hands.
    fn poison(&self) -> Result<()> {
        let backing = self.pool.backing();
        // SAFETY: nothing reads or writes the pool at this moment.
        unsafe { self.stream.fill(DevicePtr(backing.address()), POISON, backing.bytes_len()) }?;
        self.stream.synchronize()
    }

    fn verify(&mut self, address: u64, data: &RegionSlice) -> Result<()> {
        let len = data.len() as u64;
        for start in (0..len).step_by(STAGE) {
            let part = (len - start).min(STAGE as u64);
            let from = DevicePtr(data.address() as u64).offset(start);
            // SAFETY: fetched memory, into memory of this bench; waited for.
            unsafe { self.stream.copy(self.stage.address(), from, part) }?;
            self.stream.synchronize()?;
            let first = (address - self.base + start) / 8;
            let words = self.stage.as_slice()[..part as usize].chunks_exact(8);
            let wrong =
                words.enumerate().position(|(i, w)| w != source(first + i as u64).to_le_bytes());
            assert_eq!(wrong, None, "wrong bytes in the piece at {address:#x}");
        }
        Ok(())
    }
}

/// The other process, ended with its handle.
struct Publisher {
    child: Child,
    stdout: BufReader<std::process::ChildStdout>,
}

impl Publisher {
    fn start(role: &str) -> Self {
        let executable = std::env::current_exe().expect("this executable");
        let mut command = Command::new(executable);
        command.arg(PUBLISHER).arg(device_of(PUBLISHER).to_string());
        command.env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a second process");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, stdout }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        while self.stdout.read_line(&mut line).expect("a pipe") > 0 {
            if let Some(said) = line.trim_end().strip_prefix("peer: ") {
                return said.to_owned();
            }
            line.clear();
        }
        panic!("the publisher ended: {:?}", self.child.wait());
    }

    fn tell(&mut self) {
        let stdin = self.child.stdin.as_mut().expect("piped");
        stdin.write_all(b"go\n").expect("a pipe");
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let deadline = Instant::now() + Duration::from_secs(20);
        while Instant::now() < deadline {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(line: &str) {
    println!("peer: {line}");
    std::io::stdout().flush().expect("a pipe");
}

fn heard() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a pipe");
}

fn number(text: &str) -> u64 {
    text.parse().expect("a number")
}

fn name(tensor: usize) -> FeatureName {
    FeatureName::new(format!("t{tensor}")).expect("a name")
}

fn key(set: usize, sample: usize) -> SampleKey {
    let store = StoreId::new("bench").expect("a name");
    let id = SampleId::new(format!("{set}-{sample}")).expect("a name");
    SampleKey::new(store, id, Generation(1))
}

fn meta(bytes: u64) -> TensorMeta {
    TensorMeta::new(Dtype::Bfloat16, [bytes / 2]).expect("a shape")
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.drain(..WARM);
    times.sort();
    times[times.len() / 2]
}

fn show(bytes: u64, time: Duration) -> String {
    let rate = bytes as f64 / time.as_secs_f64() / 1e9;
    format!("{:.1} us, {rate:.0} GB/s", time.as_secs_f64() * 1e6)
}

/// What the arena holds: word number `word`.
fn source(word: u64) -> u64 {
    let mut x = word.wrapping_add(0x9E37_79B9_7F4A_7C15).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^= x >> 29;
    x.wrapping_mul(0x94D0_49BB_1331_11EB)
}
