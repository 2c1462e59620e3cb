//! What passing through the host costs beside plain copies between page-locked memory and a device.
//!
//! Needs a CUDA device: `cargo bench -p transport-mooncake-direct --features cuda --bench
//! cuda_pinned`, or the executable that this builds, which needs nothing beside it.
//!
//! `raw` is one copy of all bytes between one page-locked block and the device, waited for once.
//! `staged` is the way of a fetch by tcp without the network: buffer after buffer is taken, its first
//! word written, and sent on. `publish` is a whole publication of device tensors into an arena in
//! host memory. The rows of tcp are whole fetches from this process's own sink, into host and into
//! device memory. Each round runs all contenders of a row in turn; times are medians of 15 rounds
//! after 2 to warm up; what was written is poisoned before the last round, and compared byte by byte
//! after it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{
    Arena, ArenaConfig, Backing, RegionPool,
    cuda::{
        ArenaPeers, Device, DeviceArenaConfig, DevicePtr, Part, Pinned, Staging, StagingConfig,
        Stream, driver,
    },
};
use transport_core::{
    Descriptor, Destination, Dtype, FeatureName, FetchOptions, FetchRequest, Fetched, Generation,
    Publication, PublishOptions, Ready, RegionMut, Release, Result, SampleId, SampleKey, StoreId,
    Tensor, TensorMeta,
};
use transport_mooncake_direct::{CaptureSink, DirectTransport, Engine, SinkConfig};

const MIB: u64 = 1 << 20;
const SAMPLES: u64 = 8;
const STATE: u64 = 79 * MIB;
const ALL: u64 = SAMPLES * STATE;
const POISON: u8 = 0xEE;
const ROUNDS: usize = 15;
const WARM: usize = 2;

fn main() -> Result<()> {
    // Cargo passes `--bench`; without a device there is nothing to measure.
    let device = match driver().and_then(|api| Device::open(api, 0)) {
        Ok(device) => device,
        Err(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    let info = device.api().driver().clone();
    let kernel = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    println!("{}, driver for CUDA {}.{}", device.name(), info.version.0, info.version.1);
    println!("{}", kernel.lines().next().unwrap_or("kernel driver unknown"));
    let mut bed = Bed::new(&device)?;
    println!("| {SAMPLES} x 79 MiB | time | raw / time |\n|---|---|---|");
    bed.up()?;
    bed.down()?;
    bed.tcp()
}

struct Bed {
    device: Device,
    stream: Stream,
    block: Pinned, // as long as all samples
    memory: RegionPool,
    staging: Staging,
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.drain(..WARM);
    times.sort();
    times[times.len() / 2]
}

fn row(what: &str, bytes: u64, time: Duration, raw: Duration) {
    let rate = bytes as f64 / time.as_secs_f64() / 1e9;
    let ratio = raw.as_secs_f64() / time.as_secs_f64();
    println!("| {what} | {:.0} us, {rate:.1} GB/s | {ratio:.3} |", time.as_secs_f64() * 1e6);
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// The byte at `at` of all bytes.
fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

impl Bed {
    fn new(device: &Device) -> Result<Self> {
        let config = DeviceArenaConfig::new(3 * ALL, ArenaPeers::Nobody);
        Ok(Self {
            device: device.clone(),
            stream: device.stream()?,
            block: device.pinned(ALL as usize)?,
            memory: RegionPool::new(Backing::device(device, &config)?)?,
            staging: Staging::new(device, StagingConfig::default())?,
        })
    }

    fn regions(&self) -> Result<Vec<RegionMut>> {
        (0..SAMPLES).map(|_| self.memory.take(STATE as usize)).collect()
    }

    fn fill(&self, at: u64, byte: u8, len: u64) -> Result<()> {
        // SAFETY: memory of this bench that nothing else uses meanwhile; waited for.
        unsafe { self.stream.fill(DevicePtr(at), byte, len) }?;
        self.stream.synchronize()
    }

    /// One copy between the block and device memory at `at`; how long it took.
    fn raw(&self, at: u64, len: u64, up: bool) -> Result<Duration> {
        let (host, there) = (self.block.address(), DevicePtr(at));
        let (dst, src) = if up { (there, host) } else { (host, there) };
        let started = Instant::now();
        // SAFETY: memory of this bench that nothing else uses meanwhile; waited for.
        unsafe { self.stream.copy(dst, src, len) }?;
        self.stream.synchronize()?;
        Ok(started.elapsed())
    }

    /// Brings device memory to the block and compares it.
    fn check(&mut self, at: u64, len: u64, expected: impl Fn(u64) -> u8) -> Result<()> {
        self.block.as_mut_slice()[..len as usize].fill(POISON);
        self.raw(at, len, false)?;
        let found = &self.block.as_slice()[..len as usize];
        let wrong = found.iter().zip(0..).position(|(&byte, at)| byte != expected(at));
        assert_eq!(wrong, None, "wrong bytes");
        Ok(())
    }

    /// From the host to the device.
    fn up(&mut self) -> Result<()> {
        let bytes = self.staging.config().buffer_bytes;
        let whole = self.memory.take(ALL as usize)?;
        let mut to = self.regions()?;
        // The buffers keep what is written into them here; a call writes one word of each.
        let mut crossing = self.staging.begin(Vec::new(), true)?;
        let mut buffers = Vec::new();
        for _ in 0..self.staging.config().buffers {
            let mut buffer = crossing.buffer(soon())?;
            let words = buffer.as_mut_bytes().expect("host memory").iter_mut().zip(0..);
            words.for_each(|(place, at)| *place = byte(at));
            buffers.push(buffer);
        }
        drop((buffers, crossing));
        let (mut raw, mut staged) = (Vec::new(), Vec::new());
        for round in 1..=WARM + ROUNDS {
            raw.push(self.raw(whole.address() as u64, ALL, true)?);
            if round == WARM + ROUNDS {
                for to in &to {
                    self.fill(to.address() as u64, POISON, STATE)?;
                }
            }
            let started = Instant::now();
            let mut crossing = self.staging.begin(to, true)?;
            for sample in 0..SAMPLES {
                for at in (0..STATE).step_by(bytes as usize) {
                    let mut buffer = crossing.buffer(soon())?;
                    let place = buffer.as_mut_bytes().expect("host memory");
                    place[..8].copy_from_slice(&(sample * STATE + at).to_le_bytes());
                    let len = bytes.min(STATE - at) as usize;
                    let src = buffer.truncate(len).expect("no longer").freeze();
                    crossing.send(vec![Part { src, to: sample as usize, at }])?;
                }
            }
            to = crossing.finish(soon())?;
            staged.push(started.elapsed());
        }
        for (sample, to) in (0..SAMPLES).zip(&to) {
            let expected = |at: u64| match at % bytes {
                head @ 0..8 => (sample * STATE + at - head).to_le_bytes()[head as usize],
                behind => byte(behind),
            };
            self.check(to.address() as u64, STATE, expected)?;
        }
        let (raw, staged) = (median(raw), median(staged));
        row("host to device, raw", ALL, raw, raw);
        row("host to device, staged", ALL, staged, raw);
        Ok(())
    }

    fn sources(&mut self) -> Result<Vec<(u64, Tensor)>> {
        let mut sources = Vec::new();
        for sample in 0..SAMPLES {
            let region = self.memory.take(STATE as usize)?;
            let words = self.block.as_mut_slice()[..STATE as usize].iter_mut().zip(0..);
            words.for_each(|(place, at)| *place = byte(sample * STATE + at));
            self.raw(region.address() as u64, STATE, true)?;
            let meta = TensorMeta::new(Dtype::Bfloat16, [STATE / 2])?;
            sources.push((sample, Tensor::new(meta, region.freeze())?));
        }
        Ok(sources)
    }

    fn sink(&self) -> Result<CaptureSink> {
        let arena = Arena::start(Backing::shared(2 * ALL)?, ArenaConfig::default())?;
        let mut config = SinkConfig::default();
        config.staging = Some(self.staging.clone());
        CaptureSink::start(arena, config)
    }

    /// From the device to the host: what publishing does.
    fn down(&mut self) -> Result<()> {
        let sources = self.sources()?;
        let whole = self.memory.take(ALL as usize)?;
        let sink = self.sink()?;
        let viewer = DirectTransport::builder().engine(Engine::Shm).build()?;
        let (mut raw, mut published) = (Vec::new(), Vec::new());
        for round in 1..=WARM + ROUNDS {
            raw.push(self.raw(whole.address() as u64, ALL, false)?);
            let batch = publications(&sources);
            let started = Instant::now();
            let described = sink.publish_blocking(batch, PublishOptions::default())?;
            published.push(started.elapsed());
            let described: Vec<_> = described.into_iter().map(Arc::new).collect();
            if round == WARM + ROUNDS {
                let fetched = fetch(&viewer, &described, || Destination::View)?;
                for (sample, fetched) in (0..SAMPLES).zip(&fetched) {
                    let found = fetched.tensors[0].data.as_ref().iter().zip(sample * STATE..);
                    let wrong = found.clone().position(|(&found, at)| found != byte(at));
                    assert_eq!(wrong, None, "wrong bytes in sample {sample}");
                }
            }
            let releases = described.into_iter().map(Release::from).collect();
            viewer.release_blocking(releases)?;
        }
        let health = sink.health_blocking()?;
        assert_eq!(health.host_payload_bytes, (WARM + ROUNDS) as u64 * ALL);
        let (raw, published) = (median(raw), median(published));
        row("device to host, raw", ALL, raw, raw);
        row("device to host, published", ALL, published, raw);
        Ok(())
    }

    /// Whole fetches by tcp.
    fn tcp(&mut self) -> Result<()> {
        let sources = self.sources()?;
        let sink = self.sink()?;
        let described = sink.publish_blocking(publications(&sources), PublishOptions::default())?;
        let described: Vec<_> = described.into_iter().map(Arc::new).collect();
        drop(sources);
        let host = RegionPool::new(Backing::heap(2 * ALL)?)?;
        let builder = || DirectTransport::builder().engine(Engine::Tcp);
        let to_host = builder().pool(host).build()?;
        let to_device =
            builder().pool(self.memory.clone()).staging(self.staging.clone()).build()?;
        let (mut plain, mut staged) = (Vec::new(), Vec::new());
        for round in 1..=WARM + ROUNDS {
            let started = Instant::now();
            drop(fetch(&to_host, &described, || Destination::Pool)?);
            plain.push(started.elapsed());
            let last = round == WARM + ROUNDS;
            if last {
                let backing = self.memory.backing();
                self.fill(backing.address(), POISON, backing.bytes_len())?;
            }
            let started = Instant::now();
            let fetched = fetch(&to_device, &described, || Destination::Pool)?;
            staged.push(started.elapsed());
            for (sample, fetched) in (0..SAMPLES).zip(&fetched).filter(|_| last) {
                let at = fetched.tensors[0].data.address() as u64;
                self.check(at, STATE, |at| byte(sample * STATE + at))?;
            }
        }
        let (plain, staged) = (median(plain), median(staged));
        row("fetched by tcp into host memory", ALL, plain, plain);
        row("fetched by tcp into device memory", ALL, staged, plain);
        println!("(the last two are compared with each other)");
        assert_eq!(self.device.region_kind(), self.memory.backing().kind());
        Ok(())
    }
}

fn publications(sources: &[(u64, Tensor)]) -> Vec<Publication> {
    let publication = |(sample, tensor): &(u64, Tensor)| {
        let store = StoreId::new("bench").expect("a name");
        let id = SampleId::new(sample.to_string()).expect("a name");
        let name = FeatureName::new("state").expect("a name");
        let key = SampleKey::new(store, id, Generation(1));
        Publication::new(key, [(name, tensor.clone())].into(), Ready::Now)
    };
    sources.iter().map(publication).collect()
}

fn fetch(
    transport: &DirectTransport,
    samples: &[Arc<Descriptor>],
    destination: impl Fn() -> Destination,
) -> Result<Vec<Fetched>> {
    let request = |sample: &Arc<Descriptor>| FetchRequest::new(sample.clone(), destination());
    transport.fetch_blocking(samples.iter().map(request).collect(), &FetchOptions::default())
}
