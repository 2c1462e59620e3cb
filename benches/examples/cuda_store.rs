//! What tensors on a device cost on their way through Mooncake Store, beside tensors on the host.
//!
//! ```text
//! MC_FORCE_TCP=1 FEATURESTORE_MOONCAKE_VENV=… cargo run --release -p featurestore-benches \
//!     --features mooncake-python,cuda --example cuda_store -- [ROUNDS]
//! ```
//!
//! Needs a CUDA device; the executable that this builds needs nothing beside it and the wheel. Two
//! processes on loopback tcp: one provides object memory, this one publishes and fetches, under a
//! master of its own. Samples are a state of 60 MiB, a target of 19 MiB, and two small tensors.
//!
//! `host` has its tensors in registered memory: nothing is copied beside what the store does.
//! `device` has them on the device, through the transport's page-locked pool. `by hand` is what is
//! done without that: the tensors one after the other between the device and registered memory, then
//! or before that the same as `host`. Who begins a round changes from round to round. Destinations are
//! poisoned before the last round, and every byte is compared after it.

use std::{
    env,
    error::Error,
    io::{Read, Write},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{
    Backing, RegionPool,
    cuda::{ArenaPeers, Device, DeviceArenaConfig, DevicePtr, Stream, driver},
};
use indexmap::IndexMap;
use mooncake_sys::{
    StoreSetup,
    master::{ManagedMaster, MasterOptions},
    python::{WheelOptions, WheelStore},
};
use transport_core::{
    ByteSize, Descriptor, Destination, Dtype, FeatureName, FetchOptions, FetchRequest, Fetched,
    Generation, Publication, PublishOptions, Ready, RegionMut, Release, SampleId, SampleKey,
    StoreId, Tensor, TensorMeta, Transport,
};
use transport_mooncake_direct::{TcpEngine, TcpOptions};
use transport_mooncake_store::{DeviceMemory, StoreConfig, StoreTransport};

type AnyResult<T> = Result<T, Box<dyn Error>>;

const MIB: u64 = 1 << 20;
const LENS: [(&str, u64); 4] =
    [("state", 60 * MIB), ("target", 19 * MIB), ("ids", 64 << 10), ("mask", 64 << 10)];
const SAMPLES: u64 = 8;
const SEGMENT: u64 = 4 << 30;
const WARM: usize = 2;
const POISON: u8 = 0xEE;
const PROVIDE: &str = "provide";
const WAYS: [&str; 3] = ["host", "device", "by hand"];

#[tokio::main]
async fn main() -> AnyResult<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let venv = env::var_os("FEATURESTORE_MOONCAKE_VENV").map(PathBuf::from);
    let venv = venv.ok_or("set FEATURESTORE_MOONCAKE_VENV: cargo xtask mooncake-venv makes one")?;
    if env::var_os("MC_FORCE_TCP").is_none() {
        return Err("set MC_FORCE_TCP=1: else the devices of the machine decide".into());
    }
    if let [first, master] = &arguments[..]
        && first == PROVIDE
    {
        return provide(&venv, master);
    }
    let rounds: usize = arguments.first().map_or(Ok(15), |n| n.parse())?;
    let device = match driver().and_then(|api| Device::open(api, 0)) {
        Ok(device) => device,
        Err(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    let version = device.api().driver().version;
    println!("{}, driver for CUDA {}.{}", device.name(), version.0, version.1);
    let master = ManagedMaster::start(&MasterOptions::of_environment(&venv))?;
    let address = master.address().to_string();
    let provider = Provider::start(&address)?;
    let mut bed = Bed::join(&device, &venv, &address)?;
    println!("{}; {rounds} rounds", bed.host.info().engine);
    bed.run(rounds).await?;
    println!("objects left in the master: {}", master.metric("master_key_count")?);
    bed.host.close().await?;
    bed.device.close().await?;
    drop(provider);
    master.stop();
    Ok(())
}

/// Provides object memory until the standard input ends.
fn provide(venv: &std::path::Path, master: &str) -> AnyResult<()> {
    let setup = StoreSetup::client("127.0.0.1", master).segment(SEGMENT);
    let _client = WheelStore::connect(&WheelOptions::at(venv), &setup)?;
    println!("ready");
    std::io::stdout().flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// The process that provides; ended when dropped.
struct Provider(Child);

impl Provider {
    fn start(master: &str) -> AnyResult<Self> {
        let mut command = Command::new(env::current_exe()?);
        command.args([PROVIDE, master]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = Self(command.stderr(Stdio::null()).spawn()?);
        let output = child.0.stdout.as_mut().ok_or("no standard output")?;
        let mut found = Vec::new();
        while !found.ends_with(b"ready\n") {
            let mut byte = [0];
            if output.read(&mut byte)? == 0 {
                return Err("the provider of object memory did not start".into());
            }
            found.extend(byte);
        }
        Ok(child)
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        let _ = self.0.kill(); // fails only if it ended already
        let _ = self.0.wait();
    }
}

/// A sample's tensors, by name.
type Tensors = IndexMap<FeatureName, Tensor>;

struct Bed {
    stream: Stream,
    memory: RegionPool,
    host: StoreTransport,
    device: StoreTransport,
    on_host: Vec<Tensors>,
    on_device: Vec<Tensors>,
    serial: u64,
}

fn names() -> AnyResult<Vec<(FeatureName, TensorMeta)>> {
    let named = LENS.iter().map(|&(name, len)| {
        Ok((FeatureName::new(name)?, TensorMeta::new(Dtype::Bfloat16, [len / 2])?))
    });
    named.collect()
}

/// The byte at `at` of a tensor.
fn byte(sample: u64, tensor: usize, at: u64) -> u8 {
    let at = at.wrapping_add(sample << 32).wrapping_add((tensor as u64) << 40);
    (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

impl Bed {
    fn join(device: &Device, venv: &std::path::Path, master: &str) -> AnyResult<Self> {
        let all = SAMPLES * 80 * MIB;
        let memory = DeviceArenaConfig::new(3 * all, ArenaPeers::Nobody);
        let memory = RegionPool::new(Backing::device(device, &memory)?)?;
        let pool = ByteSize::new(3 * all).ok_or("a size")?;
        let client = || -> AnyResult<_> {
            let setup = StoreSetup::client("127.0.0.1", master);
            Ok(Arc::new(WheelStore::connect(&WheelOptions::at(venv), &setup)?))
        };
        let config = || StoreConfig::default().pool(pool, pool);
        let reader = || Some(Arc::new(TcpEngine::new(TcpOptions::default())) as _);
        let on = DeviceMemory::new(device)?.receive_in(memory.clone())?;
        let mut bed = Self {
            stream: device.stream()?,
            host: StoreTransport::start_with(client()?, config(), reader())?,
            device: StoreTransport::start_on_device(client()?, config(), reader(), on)?,
            memory,
            on_host: Vec::new(),
            on_device: Vec::new(),
            serial: 0,
        };
        for sample in 0..SAMPLES {
            let (mut here, mut there) = (Tensors::new(), Tensors::new());
            let regions = bed.host.take_sample(&bed.key("source", sample)?, &names()?)?;
            for (t, ((name, meta), mut region)) in names()?.into_iter().zip(regions).enumerate() {
                let bytes = region.as_mut_bytes().ok_or("host memory")?;
                (0..).zip(bytes).for_each(|(at, place)| *place = byte(sample, t, at));
                let region = region.freeze();
                let on_device = bed.memory.take(region.len())?;
                bed.copy(region.address(), on_device.address(), region.len())?;
                here.insert(name.clone(), Tensor::new(meta.clone(), region)?);
                there.insert(name, Tensor::new(meta, on_device.freeze())?);
            }
            bed.on_host.push(here);
            bed.on_device.push(there);
        }
        Ok(bed)
    }

    fn key(&self, way: &str, sample: u64) -> AnyResult<SampleKey> {
        let id = SampleId::new(format!("{way}:{}:{sample}", self.serial).replace(' ', "-"))?;
        Ok(SampleKey::new(StoreId::new("bench")?, id, Generation(1)))
    }

    /// One copy in any direction, waited for.
    fn copy(&self, from: usize, to: usize, len: usize) -> AnyResult<()> {
        let (from, to) = (DevicePtr(from as u64), DevicePtr(to as u64));
        // SAFETY: memory of this bench that nothing else uses meanwhile; waited for.
        unsafe { self.stream.copy(to, from, len as u64) }?;
        Ok(self.stream.synchronize()?)
    }

    async fn run(&mut self, rounds: usize) -> AnyResult<()> {
        let mut times = [[const { Vec::new() }; 3], [const { Vec::new() }; 3]];
        for round in 0..WARM + rounds {
            self.serial += 1;
            let last = round + 1 == WARM + rounds;
            for turn in 0..WAYS.len() {
                let way = (round + turn) % WAYS.len();
                let (put, get) = self.once(way, last).await?;
                if round >= WARM {
                    times[0][way].push(put);
                    times[1][way].push(get);
                }
            }
        }
        let bytes = SAMPLES * LENS.iter().map(|(_, len)| len).sum::<u64>();
        println!("| {SAMPLES} samples, {bytes} bytes | put | host / it | get | host / it |");
        println!("|---|---|---|---|---|");
        let mut medians = [[Duration::ZERO; 3]; 2];
        for (call, times) in times.iter_mut().enumerate() {
            for (way, times) in times.iter_mut().enumerate() {
                times.sort();
                medians[call][way] = times[times.len() / 2];
            }
        }
        for (way, name) in WAYS.iter().enumerate() {
            let cell = |call: usize| {
                let (all, median) = (&times[call][way], medians[call][way].as_secs_f64());
                let of = |part: f64| all[((all.len() - 1) as f64 * part) as usize].as_secs_f64();
                let host = medians[call][0].as_secs_f64();
                format!(
                    "{:.1} ms ({:.1} to {:.1}), {:.2} GB/s | {:.3}",
                    median * 1e3,
                    of(0.1) * 1e3,
                    of(0.9) * 1e3,
                    bytes as f64 / median / 1e9,
                    host / median
                )
            };
            println!("| {name} | {} | {} |", cell(0), cell(1));
        }
        Ok(())
    }

    /// Puts and gets all samples, and compares them if asked to.
    async fn once(&self, way: usize, check: bool) -> AnyResult<(Duration, Duration)> {
        let transport = if WAYS[way] == "device" { &self.device } else { &self.host };
        let batch = |tensors: &[Tensors]| -> AnyResult<Vec<_>> {
            let publications = (0..).zip(tensors).map(|(sample, tensors)| {
                Ok(Publication::new(self.key(WAYS[way], sample)?, tensors.clone(), Ready::Now))
            });
            publications.collect()
        };
        let started = Instant::now();
        let batch = match WAYS[way] {
            "host" => batch(&self.on_host)?,
            "device" => batch(&self.on_device)?,
            _ => batch(&self.brought_by_hand()?)?,
        };
        let described = transport.publish(batch, PublishOptions::default()).await?;
        let put = started.elapsed();
        let described: Vec<_> = described.into_iter().map(Arc::new).collect();

        // As large as everything together: whatever the fetch takes is poisoned.
        if check {
            self.poison()?;
        }
        let to = self.regions()?;
        let started = Instant::now();
        let fetched = fetch(transport, &described).await?;
        let mut landed = Vec::new();
        if WAYS[way] == "by hand" {
            for (tensor, to) in fetched.iter().flat_map(|f| f.tensors.values()).zip(&to) {
                self.copy(tensor.data.address(), to.address(), to.len())?;
            }
            landed = to;
        }
        let get = started.elapsed();
        if check {
            self.compare(way, &fetched, &landed)?;
        }
        let releases: Vec<Release> = described.into_iter().map(Into::into).collect();
        transport.release(releases).await?;
        Ok((put, get))
    }

    /// Regions for every tensor of every sample on the device.
    fn regions(&self) -> AnyResult<Vec<RegionMut>> {
        let lens = (0..SAMPLES).flat_map(|_| LENS.iter().map(|&(_, len)| len as usize));
        Ok(lens.map(|len| self.memory.take(len)).collect::<Result<_, _>>()?)
    }

    /// The tensors of the device in registered memory, copied one after the other.
    fn brought_by_hand(&self) -> AnyResult<Vec<Tensors>> {
        let mut all = Vec::new();
        for (sample, tensors) in (0..).zip(&self.on_device) {
            let regions = self.host.take_sample(&self.key("by hand", sample)?, &names()?)?;
            let mut brought = Tensors::new();
            for ((name, tensor), region) in tensors.iter().zip(regions) {
                self.copy(tensor.data.address(), region.address(), region.len())?;
                brought.insert(name.clone(), Tensor::new(tensor.meta.clone(), region.freeze())?);
            }
            all.push(brought);
        }
        Ok(all)
    }

    fn poison(&self) -> AnyResult<()> {
        for region in self.regions()? {
            let at = DevicePtr(region.address() as u64);
            // SAFETY: memory of this bench that nothing else uses meanwhile; waited for.
            unsafe { self.stream.fill(at, POISON, region.len() as u64) }?;
        }
        Ok(self.stream.synchronize()?)
    }

    fn compare(&self, way: usize, fetched: &[Fetched], landed: &[RegionMut]) -> AnyResult<()> {
        let mut places = landed.iter().map(RegionMut::address);
        for (sample, fetched) in (0..).zip(fetched) {
            for (t, tensor) in fetched.tensors.values().enumerate() {
                let mut found = RegionMut::zeroed(tensor.data.len())?;
                let bytes = if WAYS[way] == "host" {
                    tensor.data.as_bytes().ok_or("host memory")?
                } else {
                    let at = places.next().unwrap_or(tensor.data.address());
                    self.copy(at, found.address(), found.len())?;
                    found.as_mut_bytes().ok_or("host memory")?
                };
                let wrong = (0..).zip(bytes).find(|&(at, &found)| found != byte(sample, t, at));
                if let Some((at, _)) = wrong {
                    return Err(format!("{}: byte {at} of tensor {t} differs", WAYS[way]).into());
                }
            }
        }
        Ok(())
    }
}

async fn fetch(from: &StoreTransport, samples: &[Arc<Descriptor>]) -> AnyResult<Vec<Fetched>> {
    let request = |sample: &Arc<Descriptor>| FetchRequest::new(sample.clone(), Destination::Pool);
    Ok(from.fetch(samples.iter().map(request).collect(), FetchOptions::default()).await?)
}
