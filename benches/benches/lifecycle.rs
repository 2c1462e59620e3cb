//! What the lifecycle costs a trainer: the ledger, cleaning up, and waiting.
//!
//! `cargo bench -p featurestore-benches --bench lifecycle [-- ledger|cleanup|wait]`

use std::{
    fs::File,
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{Arena, ArenaConfig, Backing, ReserveOptions, SamplePlan};
use control_proto::token::{Reply, Request, Verb};
use featurestore::{
    consumer::{Consumer, ConsumerOptions, Materialized},
    ledger::{Ledger, LedgerOptions},
    lifecycle::{Retention, Samples},
    token::TokenReleaser,
};
use indexmap::IndexMap;
use transport_core::{
    Descriptor, Dtype, FeatureDescriptor, FeatureName, Generation, Location, RemoteAddr, SampleId,
    SampleKey, SessionName, StoreId, TensorMeta, TokenLocation,
};
use transport_mooncake_direct::{CaptureSink, DirectTransport, Engine, SinkConfig};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test --benches` runs this too, to see that it starts.
    if !args.iter().any(|arg| arg == "--bench") {
        println!("lifecycle: run with `cargo bench`");
        return;
    }
    let wanted: Vec<_> = args.iter().filter(|arg| !arg.starts_with("--")).collect();
    for (name, bench) in [("ledger", ledger as fn()), ("cleanup", cleanup), ("wait", wait)] {
        if wanted.is_empty() || wanted.iter().any(|w| *w == name) {
            bench();
        }
    }
}

fn quantile(times: &mut [Duration], part: f64) -> Duration {
    times.sort_unstable();
    times[((times.len() - 1) as f64 * part) as usize]
}

fn id(i: u64) -> SampleId {
    SampleId::new(format!("run:e0:task-{i:07}")).expect("a name")
}

/// One optimizer step of 128 samples in a young ledger and in one of 1,000,000 samples, beside a
/// plain write and fsync of as many bytes on the same disk.
fn ledger() {
    const SAMPLES: u64 = 128;
    println!(
        "\nledger: acknowledging 128 samples, medians (target: 1.5 ms beyond fsync, 10 % at 1M)"
    );
    // In the target folder, which is on the disk that is meant, not in a memory file system.
    let folder = std::env::current_exe().expect("a path").with_extension("bench");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    let mut plain = File::create(folder.join("plain")).expect("a file");
    let bytes = vec![7; 8 << 10];
    let mut fsyncs: Vec<Duration> = (0..200)
        .map(|_| {
            let start = Instant::now();
            plain.write_all(&bytes).expect("room");
            plain.sync_data().expect("synced");
            start.elapsed()
        })
        .collect();
    let fsync = quantile(&mut fsyncs, 0.5);
    let path = folder.join("ledger.db");
    let mut ledger = Ledger::open(&path, "bench", LedgerOptions::default()).expect("a ledger");
    let mut next = 0;
    let mut steps = |ledger: &mut Ledger, count: u64, size: u64| -> Vec<Duration> {
        (0..count)
            .map(|_| {
                let ids: Vec<SampleId> = (next * 10_000..next * 10_000 + size).map(id).collect();
                next += 1;
                let records: Vec<_> = ids.iter().map(|id| (id.clone(), vec![b'x'; 1200])).collect();
                ledger.commit(&records).expect("committed");
                let start = Instant::now();
                ledger.acknowledge(next, &ids).expect("durable");
                let elapsed = start.elapsed();
                ledger.freed(&ids);
                elapsed
            })
            .collect()
    };
    let mut young = steps(&mut ledger, 300, SAMPLES);
    steps(&mut ledger, 100, 10_000);
    let mut old = steps(&mut ledger, 300, SAMPLES);
    let (young_p50, old_p50) = (quantile(&mut young, 0.5), quantile(&mut old, 0.5));
    println!("{:>28} {:>12?}", "write and fsync of 8 KiB", fsync);
    println!("{:>28} {:>12?} (p99 {:?})", "young ledger", young_p50, quantile(&mut young, 0.99));
    println!(
        "{:>28} {:>12?} (p99 {:?}), {:+.1} %",
        format!("{} acknowledged", ledger.acknowledged().len()),
        old_p50,
        quantile(&mut old, 0.99),
        (old_p50.as_secs_f64() / young_p50.as_secs_f64() - 1.0) * 100.0
    );
    println!("{:>28} {:>12?}", "beyond its own fsync", young_p50.saturating_sub(fsync));
    drop(ledger);
    std::fs::remove_dir_all(&folder).expect("removed");
}

fn key(i: usize) -> SampleKey {
    SampleKey::new(StoreId::new("bench").expect("a name"), id(i as u64), Generation(1))
}

/// Publishes `count` samples of four tensors; the first has `bytes` bytes.
fn publish(sink: &CaptureSink, count: usize, bytes: u64) -> Vec<Arc<Descriptor>> {
    let objects: Vec<_> = [bytes, 512, 512, 512]
        .into_iter()
        .enumerate()
        .map(|(i, size)| {
            let meta = TensorMeta::new(Dtype::Uint8, [size]).expect("a shape");
            (FeatureName::new(format!("t{i}")).expect("a name"), meta)
        })
        .collect();
    let plan = |i| SamplePlan { sample: key(i), objects: objects.clone(), holder: None };
    let plans: Vec<_> = (0..count).map(plan).collect();
    let options = ReserveOptions::default();
    let reservation = sink.reserve_blocking(plans, options).expect("room");
    reservation.publish_blocking().expect("published").into_iter().map(Arc::new).collect()
}

fn sink(bytes: u64) -> CaptureSink {
    let backing = Backing::shared(bytes).expect("memory");
    let arena = Arena::start(backing, ArenaConfig::default()).expect("arena");
    CaptureSink::start(arena, SinkConfig::default()).expect("sink")
}

fn shm() -> Arc<DirectTransport> {
    Arc::new(DirectTransport::builder().engine(Engine::Shm).build().expect("transport"))
}

/// Freeing 512 samples of four tensors, confirmed, over both control wires.
fn cleanup() {
    const SAMPLES: usize = 512;
    println!(
        "\ncleanup: 512 samples, confirmed, medians (targets: 2 ms arena, 6 ms token; published 5.6 ms)"
    );
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let sink = sink(64 << 20);
    let mut times = Vec::new();
    for _ in 0..50 {
        let samples = Samples::over(shm(), Retention::default());
        let published = publish(&sink, SAMPLES, 4096);
        runtime.block_on(samples.adopt(&published)).expect("adopted");
        // The connection stands already, as it does at every boundary but the first.
        let first = runtime.block_on(samples.settle(&published[..1]));
        let start = Instant::now();
        let freed = runtime.block_on(samples.settle(&published[1..]));
        times.push(start.elapsed());
        assert_eq!((first.freed + freed.freed, freed.pending), (SAMPLES as u64, 0));
    }
    println!("{:>28} {:>12?}", "arena wire", quantile(&mut times, 0.5));

    let control = token_server();
    let releaser = TokenReleaser::default();
    let meta = TensorMeta::new(Dtype::Uint8, [4096]).expect("a shape");
    let samples: Vec<_> = (0..SAMPLES)
        .map(|i| {
            let feature = FeatureDescriptor::new(meta.clone(), Some(RemoteAddr(512)), None);
            let features = IndexMap::from([(FeatureName::new("x").expect("a name"), feature)]);
            let place = TokenLocation::new("rdma", control.clone(), control.clone(), "hush");
            let location = Location::Token(place);
            Arc::new(Descriptor::new(key(i), features, None, location).expect("a sample"))
        })
        .collect();
    let mut times: Vec<Duration> = (0..50)
        .map(|_| {
            let start = Instant::now();
            let report = releaser.release(&samples, Verb::Release).expect("asked");
            assert_eq!(report.released, SAMPLES as u64);
            start.elapsed()
        })
        .collect();
    println!("{:>28} {:>12?}", "token wire", quantile(&mut times, 0.5));
}

/// Answers release requests as the documented server does; it ends with this process.
fn token_server() -> SessionName {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut reader = BufReader::new(stream.try_clone().expect("a socket"));
            let mut line = Vec::new();
            if reader.read_until(b'\n', &mut line).is_err() {
                continue;
            }
            line.pop();
            let count = match Request::parse(&line) {
                Ok(Request::Batch { items, .. }) => items.len() as u64,
                _ => 1,
            };
            let reply = Reply::Freed { freed_bytes: count * 4096, released_samples: count };
            let mut out = Vec::new();
            reply.write(&mut out);
            let _ = stream.write_all(&out); // the client tells what it misses
        }
    });
    address.to_string().parse().expect("an address")
}

/// How long a training loop waits for each sample, with four read ahead.
fn wait() {
    const SAMPLES: usize = 2000;
    println!(
        "\nwait: shm views, prefetch 4, 1 ms of computing a sample (targets: p50 50 us, p99 1 ms)"
    );
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let sink = sink(256 << 20);
    let published = publish(&sink, SAMPLES, 64 << 10);
    let samples = Arc::new(Samples::over(shm(), Retention::default()));
    let mut times = runtime.block_on(async {
        let mut consumer = Consumer::new(samples.clone(), ConsumerOptions::default());
        consumer.feed(published.clone()).expect("taken");
        let mut times = Vec::with_capacity(SAMPLES);
        loop {
            let start = Instant::now();
            match consumer.next().await.expect("read") {
                Some(Materialized::Ready(leased)) => {
                    times.push(start.elapsed());
                    let token = leased.token.clone();
                    std::thread::sleep(Duration::from_millis(1));
                    drop(leased);
                    samples.release(&token).await;
                }
                Some(Materialized::Lost(id, error)) => panic!("{id}: {error}"),
                None => return times,
            }
        }
    });
    times.remove(0); // it connects and maps
    let (p50, p99) = (quantile(&mut times, 0.5), quantile(&mut times, 0.99));
    println!("{:>28} p50 {p50:?}, p99 {p99:?}", "");
    assert_eq!(runtime.block_on(samples.settle(&published)).pending, 0);
}
