//! What publishing from device memory costs beside plain copies of the driver, on one device.
//!
//! Needs a CUDA device: `cargo bench -p transport-mooncake-direct --features cuda --bench
//! cuda_arena`, or the executable that this builds, which needs nothing beside it. Every row is a
//! line of JSON as soon as it is measured; a table of all of them ends the run. Times are from the
//! batch in the caller's hands to its descriptors, medians of 30 after 3 to warm up. Arenas are
//! poisoned before, and what was published is compared byte by byte after it was measured.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{
    Arena, ArenaConfig, Backing, FreeRequest, RegionPool, ReserveOptions, SamplePlan,
    cuda::{
        ArenaKind, ArenaPeers, Device, DeviceArenaConfig, DevicePtr, Event, KindProbe, Stream,
        driver,
    },
};
use indexmap::IndexMap;
use serde_json::{Value, json};
use transport_core::{
    Descriptor, Dtype, FeatureName, Generation, Publication, PublishOptions, Ready, RegionSlice,
    Result, SampleId, SampleKey, StoreId, Tensor, TensorMeta,
};
use transport_mooncake_direct::{CaptureSink, SinkConfig};

const MIB: u64 = 1 << 20;
/// Samples of a batch.
const BATCH: usize = 8;
/// Batches whose sources lie apart, so that none is left in the cache.
const ROTATE: usize = 3;
const RUNS: usize = 30;
const WARM: usize = 3;
/// 79 MiB a sample: three hidden states and a target of 4,096 values of two bytes a token.
const TOKENS: u64 = 2528;
const STATE: u64 = TOKENS * 3 * 4096 * 2;
const TARGET: u64 = TOKENS * 4096 * 2;
const VECTOR: u64 = TOKENS * 8;
const POISON: u8 = 0xEE;

fn main() -> Result<()> {
    // Cargo passes `--bench`; without a device there is nothing to measure.
    let device = match driver().and_then(|api| Device::open(api, 0)) {
        Ok(device) => device,
        Err(why) => {
            println!("skipped: {why}");
            return Ok(());
        }
    };
    let mut table = Table::default();
    table.machine(&device)?;
    table.kinds(&device)?;
    for peers in [ArenaPeers::NvlinkIntra, ArenaPeers::Native] {
        let bed = Bed::new(&device, peers, &mut table)?;
        bed.publish(&mut table)?;
        bed.in_place(&mut table)?;
    }
    pinned(&device, &mut table)?;
    table.print();
    Ok(())
}

/// Rows as they were measured.
#[derive(Default)]
struct Table(Vec<[String; 4]>);

impl Table {
    fn note(&mut self, what: &str, value: Value) {
        println!("{}", json!({ "what": what, "value": value }));
        let text = match &value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        self.0.push([what.to_owned(), text, String::new(), String::new()]);
    }

    /// A time, with the rate of `bytes`, and its ratio to another time.
    fn time(&mut self, what: &str, median: Duration, bytes: u64, beside: Option<Duration>) {
        let us = median.as_secs_f64() * 1e6;
        let rate = bytes as f64 / median.as_secs_f64() / 1e9;
        let ratio = beside.map(|beside| median.as_secs_f64() / beside.as_secs_f64());
        println!(
            "{}",
            json!({ "what": what, "median_us": us, "bytes": bytes, "gb_per_s": rate, "ratio": ratio })
        );
        self.0.push([
            what.to_owned(),
            format!("{us:.1} us"),
            if bytes > 0 { format!("{rate:.0} GB/s") } else { String::new() },
            ratio.map(|ratio| format!("{ratio:.3} x")).unwrap_or_default(),
        ]);
    }

    fn machine(&mut self, device: &Device) -> Result<()> {
        let info = device.api().driver();
        self.note("device", json!(device.name()));
        self.note("driver", json!(format!("CUDA {}.{}", info.version.0, info.version.1)));
        let kernel = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
        self.note("kernel driver", json!(kernel.lines().next().unwrap_or("unknown")));
        self.note("library", json!(info.library));
        self.note("free MiB", json!(device.memory()?.free / MIB));
        Ok(())
    }

    fn kinds(&mut self, device: &Device) -> Result<()> {
        let started = Instant::now();
        let probe = KindProbe::run(device)?;
        self.time("probe of all kinds", started.elapsed(), 0, None);
        for kind in ArenaKind::ALL {
            self.note(&format!("kind {kind}"), json!(format!("{:?}", probe.of(kind))));
        }
        Ok(())
    }

    fn print(&self) {
        let width = self.0.iter().map(|row| row[0].len()).max().unwrap_or_default();
        println!();
        for [what, time, rate, ratio] in &self.0 {
            println!("{what:width$}  {time:>12}  {rate:>10}  {ratio:>8}");
        }
    }
}

/// Captures of a model on the device, and a sink over an arena.
struct Bed {
    device: Device,
    peers: ArenaPeers,
    stream: Stream,
    sources: Vec<[RegionSlice; 4]>, // a sample each
    captures: RegionPool,
    spare: RegionPool,
    sink: CaptureSink,
}

impl Bed {
    fn new(device: &Device, peers: ArenaPeers, table: &mut Table) -> Result<Self> {
        let backing = |bytes, peers| Backing::device(device, &DeviceArenaConfig::new(bytes, peers));
        let started = Instant::now();
        let memory = backing(2048 * MIB, peers)?;
        let kind = memory.device_block().expect("device memory").kind();
        table.time(&format!("{kind}: create 2 GiB"), started.elapsed(), 0, None);
        let stream = device.stream()?;
        let (at, len) = (DevicePtr(memory.address()), memory.bytes_len());
        // SAFETY: an arena that nobody has taken anything from.
        unsafe { stream.fill(at, POISON, len) }?;
        let captures = RegionPool::new(backing(2304 * MIB, ArenaPeers::Nobody)?)?;
        let spare = RegionPool::new(backing(1024 * MIB, ArenaPeers::Nobody)?)?;
        let part = |sample: usize, index: usize, len: u64| -> Result<RegionSlice> {
            let region = captures.take(len as usize)?;
            let at = DevicePtr(region.address() as u64);
            // SAFETY: the region just taken; it is waited for below.
            unsafe { stream.fill(at, byte(sample, index), len) }?;
            Ok(region.freeze())
        };
        // By tensor and not by sample, as a model makes them: no two of a sample are neighbours,
        // which would be copied as one.
        let mut columns =
            [STATE, TARGET, VECTOR, VECTOR].into_iter().enumerate().map(|(index, len)| {
                (0..BATCH * ROTATE).map(|i| part(i, index, len)).collect::<Result<Vec<_>>>()
            });
        let mut next = || columns.next().expect("four columns");
        let (states, targets, ids, masks) = (next()?, next()?, next()?, next()?);
        let rest = targets.into_iter().zip(ids).zip(masks);
        let sources = states.into_iter().zip(rest);
        let sources = sources.map(|(a, ((b, c), d))| [a, b, c, d]).collect();
        stream.synchronize()?;
        let arena = Arena::start(memory, ArenaConfig::default())?;
        let sink = CaptureSink::start(arena, SinkConfig::default())?;
        Ok(Self { device: device.clone(), peers, stream, sources, captures, spare, sink })
    }

    fn label(&self, what: &str) -> String {
        let block = self.sink.arena().backing().device_block().expect("device memory");
        format!("{}: {what}", block.kind())
    }

    /// The batch of one round, its ids and masks on the device or on the host.
    fn batch(&self, round: usize, on_host: bool) -> Result<Vec<Publication>> {
        let ready: Arc<Event> = Arc::new(self.stream.record_new()?);
        (0..BATCH)
            .map(|sample| {
                let source = round % ROTATE * BATCH + sample;
                let mut tensors = IndexMap::new();
                for (index, data) in self.sources[source].iter().enumerate() {
                    let dtype = if index < 2 { Dtype::Bfloat16 } else { Dtype::Int64 };
                    let data = if on_host && index >= 2 {
                        RegionSlice::copy_of(&vec![byte(source, index); data.len()])
                    } else {
                        data.clone()
                    };
                    let meta = TensorMeta::new(dtype, [1, data.len() as u64 / dtype.size()])?;
                    tensors.insert(name(index), Tensor::new(meta, data)?);
                }
                Ok(Publication::new(key(sample), tensors, Ready::After(ready.clone())))
            })
            .collect()
    }

    /// Publishes a batch again and again, and copies the same bytes plainly beside it.
    fn publish(&self, table: &mut Table) -> Result<()> {
        const BYTES: u64 = BATCH as u64 * (STATE + TARGET);
        const ALL: u64 = BYTES + 2 * BATCH as u64 * VECTOR;
        let whole = self.raw(2, true)?;
        table.time(&self.label("raw copies, 8 x 79 MiB"), whole, BYTES, None);
        let large = self.raw(2, false)?;
        table.time(&self.label("raw copies, large tensors only"), large, BYTES, Some(whole));
        let raw = self.raw(4, false)?;
        table.time(&self.label("raw copies, all 32 tensors"), raw, ALL, Some(whole));

        for on_host in [false, true] {
            let place = if on_host { "ids on the host" } else { "ids on the device" };
            let median = self.timed(on_host, |batch| {
                self.sink.publish_blocking(batch, PublishOptions::default())
            })?;
            let what = self.label(&format!("publish 8 x 79 MiB, {place}"));
            table.time(&format!("{what} / raw 8 x 79 MiB"), median, ALL, Some(whole));
            table.time(&format!("{what} / raw 32 tensors"), median, ALL, Some(raw));
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build();
        let runtime = runtime.expect("threads");
        let median = self.timed(true, |batch| {
            runtime.block_on(self.sink.publish(batch, PublishOptions::default()))
        })?;
        table.time(&self.label("publish 8 x 79 MiB, async"), median, ALL, Some(whole));
        let health = self.sink.health_blocking()?;
        table.note(&self.label("host payload bytes"), json!(health.host_payload_bytes));
        table.note(&self.label("device payload bytes"), json!(health.device_payload_bytes));
        table.note(
            &self.label("arena is one free range"),
            json!(health.arena_largest_free == health.arena_bytes),
        );
        Ok(())
    }

    /// Plain copies on one stream, and one wait: of the first tensors of each sample, or of as many
    /// bytes in one copy a sample.
    fn raw(&self, tensors: usize, joined: bool) -> Result<Duration> {
        let into = self.spare.take(BATCH * 80 * MIB as usize)?;
        let into = DevicePtr(into.address() as u64);
        let _bound = self.device.bind()?;
        let run = |round: usize| -> Result<Duration> {
            let samples = &self.sources[round % ROTATE * BATCH..][..BATCH];
            self.stream.synchronize()?;
            let started = Instant::now();
            for (i, sample) in samples.iter().enumerate() {
                let mut at = into.offset(i as u64 * 80 * MIB);
                if joined {
                    let piece = (round % ROTATE * BATCH + i) as u64;
                    let from = DevicePtr(self.captures.backing().address() + piece * 80 * MIB);
                    // SAFETY: a region of ours, and a piece of the sources' pool.
                    unsafe { self.stream.copy(at, from, STATE + TARGET) }?;
                    continue;
                }
                for source in &sample[..tensors] {
                    let len = source.len() as u64;
                    // SAFETY: as above, one source.
                    unsafe { self.stream.copy(at, DevicePtr(source.address() as u64), len) }?;
                    at = at.offset(len.next_multiple_of(512));
                }
            }
            self.stream.synchronize()?;
            Ok(started.elapsed())
        };
        median(run)
    }

    /// Times `publish`, and checks what it published.
    fn timed(
        &self,
        on_host: bool,
        publish: impl Fn(Vec<Publication>) -> Result<Vec<Descriptor>>,
    ) -> Result<Duration> {
        median(|round| {
            let batch = self.batch(round, on_host)?;
            self.stream.synchronize()?;
            let started = Instant::now();
            let described = publish(batch)?;
            let took = started.elapsed();
            if round < ROTATE {
                self.check(&described, round)?;
            }
            self.free(&described)?;
            Ok(took)
        })
    }

    fn check(&self, described: &[Descriptor], round: usize) -> Result<()> {
        let mut pinned = self.device.pinned(STATE as usize)?;
        for (sample, descriptor) in described.iter().enumerate() {
            for (index, feature) in descriptor.features.values().enumerate() {
                let len = feature.meta.nbytes();
                let from = DevicePtr(feature.address.expect("an arena's").0);
                // SAFETY: published memory; it is waited for.
                unsafe { self.stream.copy(pinned.address(), from, len) }?;
                self.stream.synchronize()?;
                let expected = byte(round % ROTATE * BATCH + sample, index);
                let found = &pinned.as_mut_slice()[..len as usize];
                let wrong = found.iter().position(|&found| found != expected);
                assert_eq!(wrong, None, "sample {sample}, tensor {index}, round {round}");
            }
        }
        Ok(())
    }

    fn free(&self, described: &[Descriptor]) -> Result<()> {
        let mut keys = Vec::new();
        for descriptor in described {
            let key = |feature| (descriptor.sample.object(feature).shared().to_string(), None);
            keys.extend(descriptor.features.keys().map(key));
        }
        let objects = keys.into_iter().collect();
        self.sink.arena().free(FreeRequest { client: None, objects, reply: None });
        // Answered after the free: the next batch finds an empty arena.
        self.sink.health_blocking().map(drop)
    }

    /// Reserve, write, publish, without the writing: what is left is what the path costs.
    fn in_place(&self, table: &mut Table) -> Result<()> {
        let event: Arc<Event> = Arc::new(self.stream.record_new()?);
        self.stream.synchronize()?;
        for (samples, bytes) in [(1, 4096), (1, STATE), (BATCH, 4096), (BATCH, STATE + TARGET)] {
            let median = median(|_| {
                let plans = (0..samples).map(|i| plan(i, bytes)).collect::<Result<Vec<_>>>()?;
                let started = Instant::now();
                let mut reservation =
                    self.sink.reserve_blocking(plans, ReserveOptions::default())?;
                for i in 0..samples {
                    // What the producer needs: the address.
                    let region = reservation.take(i, 0);
                    std::hint::black_box(region.address());
                    reservation.put_back(i, 0, region)?;
                }
                let ready = Ready::After(event.clone());
                let described =
                    reservation.publish_after_blocking(ready, Duration::from_secs(5))?;
                let took = started.elapsed();
                self.free(&described)?;
                Ok(took)
            })?;
            let what = format!("in place, {samples} x {} KiB, a sample", bytes / 1024);
            table.time(&self.label(&what), median / samples as u32, 0, None);
        }
        let _ = self.peers;
        Ok(())
    }
}

/// What the machine's pinned copies reach, for comparison.
fn pinned(device: &Device, table: &mut Table) -> Result<()> {
    const LEN: u64 = 256 * MIB;
    let config = DeviceArenaConfig::new(LEN, ArenaPeers::Nobody);
    let memory = Backing::device(device, &config)?;
    let (stream, host) = (device.stream()?, device.pinned(LEN as usize)?);
    let ends = (DevicePtr(memory.address()), host.address());
    for (what, dst, src) in
        [("pinned to device", ends.0, ends.1), ("device to pinned", ends.1, ends.0)]
    {
        let median = median(|_| {
            let started = Instant::now();
            // SAFETY: our own memory on both ends, and it is waited for.
            unsafe { stream.copy(dst, src, LEN) }?;
            stream.synchronize()?;
            Ok(started.elapsed())
        })?;
        table.time(what, median, LEN, None);
    }
    Ok(())
}

/// The middle one of [`RUNS`] times, after some that do not count.
fn median(mut run: impl FnMut(usize) -> Result<Duration>) -> Result<Duration> {
    let mut times = Vec::with_capacity(RUNS);
    for round in 0..WARM + RUNS {
        let took = run(round)?;
        if round >= WARM {
            times.push(took);
        }
    }
    times.sort();
    Ok(times[RUNS / 2])
}

fn plan(sample: usize, bytes: u64) -> Result<SamplePlan> {
    let meta = TensorMeta::new(Dtype::Bfloat16, [bytes / 2])?;
    Ok(SamplePlan { sample: key(sample), objects: vec![(name(0), meta)], holder: None })
}

fn byte(sample: usize, index: usize) -> u8 {
    (sample * 4 + index + 1) as u8
}

fn name(index: usize) -> FeatureName {
    FeatureName::new(["hidden_state", "target", "input_ids", "loss_mask"][index]).expect("a name")
}

fn key(sample: usize) -> SampleKey {
    let id = SampleId::new(format!("s{sample}")).expect("a name");
    SampleKey::new(StoreId::new("bench").expect("a name"), id, Generation(1))
}
