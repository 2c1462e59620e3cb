//! The main job on a real device.
//!
//! `cargo test -p featurestore --features cuda --test gpu -- --ignored --test-threads=1`, or the
//! executable that this builds, carried to a machine with a device and run with the same two options
//! and with `FEATURESTORE_BIN` naming the command line beside it. What is called `mooncake_` needs the
//! feature `mooncake-python` too, and python3 with Mooncake's wheel, or its virtual environment in
//! `FEATURESTORE_MOONCAKE_VENV`.

#[path = "cli/common.rs"]
#[allow(dead_code)]
mod common;

use std::time::{Duration, Instant};

use capture_arena::{
    Backing, RegionPool,
    cuda::{ArenaPeers, Device, DeviceArenaConfig, driver},
};
use common::{STEP, Server, run};
use control_proto::capture::Mixsum;
use featurestore::workload::Stream;
use serde_json::Value;
use transport_core::{FeatureName, RegionMut, SampleId};
use transport_mooncake_direct::cuda::{Content, DeviceTensors};

fn device() -> Device {
    Device::open(driver().expect("a CUDA driver"), 0).expect("a device")
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn stream(name: &str) -> Stream {
    Stream::new(42, &SampleId::new("gpu").unwrap(), &FeatureName::new(name).unwrap())
}

/// Lengths around those of a vector, of a block, and of a paper's sample.
fn lens() -> Vec<usize> {
    let mut lens: Vec<usize> = (1..=40).collect();
    lens.extend([511, 512, 513, 8191, 65_535, 65_552, (1 << 20) + 7, 20_709_376, 62_128_130]);
    lens
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn the_kernels_make_and_sum_up_what_the_host_does() {
    let device = device();
    let tensors = DeviceTensors::load(&device).unwrap();
    let memory = DeviceArenaConfig::new(1 << 30, ArenaPeers::Nobody);
    let pool = RegionPool::new(Backing::device(&device, &memory).unwrap()).unwrap();
    let lens = lens();
    let host = |(i, &len): (usize, &usize)| {
        let mut bytes = vec![0; len];
        stream(&format!("t{i}")).write(0, &mut bytes);
        bytes
    };
    let bytes: Vec<Vec<u8>> = lens.iter().enumerate().map(host).collect();
    let expected: Vec<u64> = bytes.iter().map(|bytes| Mixsum::of(bytes)).collect();

    // The sums of bytes that the host made; then of those that the device made.
    let given = bytes.into_iter().map(|bytes| (pool.take(bytes.len()).unwrap(), bytes));
    let given = given.map(|(region, bytes)| (region, Content::Host(bytes))).collect();
    let written = tensors.write(given, true, soon()).unwrap();
    assert_eq!(written.sums, expected, "summed up on the device");
    assert_eq!(written.host_bytes, lens.iter().sum::<usize>() as u64);
    drop(written);
    let made = lens.iter().enumerate().map(|(i, &len)| {
        let counter = stream(&format!("t{i}")).counter();
        (pool.take(len).unwrap(), Content::Synthetic { counter })
    });
    let written = tensors.write(made.collect(), true, soon()).unwrap();
    assert_eq!(written.sums, expected, "made on the device");
    assert_eq!(written.host_bytes, 0);
    let frozen: Vec<_> = written.regions.into_iter().map(RegionMut::freeze).collect();
    assert_eq!(tensors.sums(&frozen, soon()).unwrap(), expected);

    // A byte that differs is seen, wherever it is.
    let last = frozen.len() - 1;
    let rate = |what: &str, work: &mut dyn FnMut()| {
        const RUNS: u32 = 20;
        work();
        let begun = Instant::now();
        (0..RUNS).for_each(|_| work());
        let each = begun.elapsed() / RUNS;
        let gb = lens[last] as f64 / each.as_secs_f64() / 1e9;
        println!("{what} {} bytes: {each:?}, {gb:.0} GB/s", lens[last]);
    };
    rate("sum up", &mut || drop(tensors.sums(&frozen[last..], soon()).unwrap()));
    let mut region = Some(pool.take(lens[last]).unwrap());
    rate("make", &mut || {
        let made = vec![(region.take().unwrap(), Content::Synthetic { counter: 1 })];
        region = tensors.write(made, false, soon()).unwrap().regions.pop();
    });
    let whole = frozen[last].clone();
    for start in [16, 4096, 62_128_112] {
        let part = whole.slice(start..whole.len()).unwrap();
        let mut bytes = vec![0; whole.len()];
        stream(&format!("t{last}")).write(0, &mut bytes);
        let sum = tensors.sums(&[part], soon()).unwrap();
        assert_eq!(sum, [Mixsum::of(&bytes[start..])], "from byte {start} on");
        bytes[start + 1] ^= 4;
        assert_ne!(sum, [Mixsum::of(&bytes[start..])]);
    }
}

/// Real captures, with their manifest.
fn folder() -> String {
    let built =
        || concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/minilm-capture").to_owned();
    std::env::var("FEATURESTORE_TEST_DATA").unwrap_or_else(|_| built())
}

fn report(arguments: &[&str]) -> Value {
    let small = ["pipeline", "--hidden", "512", "--taps", "5,19,33", "--arena", "64MiB"];
    let arguments = [&small[..], &["--quantum", "3", "--json"], arguments].concat();
    let ended = run(&arguments);
    assert!(ended.status.success(), "{arguments:?}: {}", ended.stderr);
    serde_json::from_str(&ended.stdout).unwrap_or_else(|e| panic!("{e}: {}", ended.stdout))
}

/// Every byte is accounted for, and none of the hidden states passed through the host.
fn check(report: &Value, host_bytes_per_token: u64) {
    assert_eq!(report["transport"], "nvlink_intra", "{report}");
    assert_eq!(report["views"], false);
    assert_eq!(report["verified_bytes"], report["bytes"], "{report}");
    assert_eq!(report["mismatches"], 0);
    assert_eq!(report["host_payload_bytes"], 0, "in the trainer: {report}");
    let number = |value: &Value| value.as_u64().expect("a number");
    let (mut host, mut published) = (0, 0);
    for server in report["servers"].as_array().expect("a list") {
        assert_eq!(server["published_samples"], server["released_samples"], "{report}");
        assert_eq!(server["arena_largest_free"], server["arena_bytes"], "{report}");
        host += number(&server["host_payload_bytes"]);
        published += number(&server["published_samples"]);
    }
    assert_eq!(published, number(&report["samples"]));
    assert_eq!(host, number(&report["tokens"]) * host_bytes_per_token, "{report}");
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn the_main_job_runs_on_the_device() {
    for transport in ["nvlink_intra", "auto"] {
        let report = report(&["--samples", "24", "--transport", transport]);
        check(&report, 16); // ids and masks
    }
}

/// Every byte came through the host of the trainer, once, and was compared on its device.
fn check_staged(report: &Value, transport: &str) {
    assert_eq!(report["transport"], transport, "{report}");
    assert_eq!((&report["on_device"], &report["views"]), (&true.into(), &false.into()));
    assert_eq!(report["verified_bytes"], report["bytes"], "{report}");
    assert_eq!(report["mismatches"], 0);
    assert_eq!(report["host_payload_bytes"], report["bytes"], "in the trainer: {report}");
    let reasons = report["transport_reasons"].as_array().expect("a list");
    let chosen = reasons.iter().find(|found| found["scheme"] == transport).expect("considered");
    let reason = chosen["reason"].as_str().expect("text");
    assert!(reason.contains("(device 0), through page-locked buffers"), "{reason}");
    for server in report["servers"].as_array().expect("a list") {
        assert_eq!(server["published_samples"], server["released_samples"], "{report}");
        assert_eq!(server["arena_largest_free"], server["arena_bytes"], "{report}");
    }
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn the_main_job_ends_on_the_device_over_tcp() {
    // Tensors smaller than a buffer, and larger ones.
    let over = ["--transport", "tcp", "--receive", "device"];
    check_staged(&report(&[&over[..], &["--samples", "24"]].concat()), "tcp");
    check_staged(&report(&[&over[..], &["--input", &folder()]].concat()), "tcp");
    let large =
        ["pipeline", "--samples", "24", "--max-length", "2048", "--arena", "1GiB", "--json"];
    let ended = run(&[&large[..], &over].concat());
    assert!(ended.status.success(), "{}", ended.stderr);
    check_staged(&serde_json::from_str(&ended.stdout).expect("one object"), "tcp");

    // The probe's choice, where the servers' arenas are in host memory.
    let server = Server::start(&["capture-server", "--arena=64MiB", "--transport=tcp"]);
    let control = server.address("control");
    let doctor = ["doctor", "--strict", "--receive", "device", "--server", &control];
    let ended = run(&[&doctor[..], &["--transport", "auto"]].concat());
    assert!(ended.status.success() && ended.stdout.contains("used: tcp"), "{}", ended.stdout);
    server.process.signal(rustix::process::Signal::TERM);
    assert!(server.process.end(STEP).status.success());
}

#[cfg(feature = "mooncake-python")]
#[test]
#[ignore = "needs a CUDA device and Mooncake: cargo xtask test --gpu"]
fn mooncake_store_samples_end_on_the_device() {
    let venv = std::env::var("FEATURESTORE_MOONCAKE_VENV").ok(); // not of its own, it is python3's
    let venv = venv.map_or_else(Vec::new, |venv| vec![format!("--mooncake-venv={venv}")]);
    let venv: Vec<&str> = venv.iter().map(String::as_str).collect();
    let over = ["--samples", "24", "--transport", "store", "--mooncake", "managed"];
    for reads in ["native", "mooncake"] {
        let more = ["--receive", "device", "--mooncake-reads", reads];
        let report = report(&[&over[..], &more, &venv].concat());
        let reasons = report["transport_reasons"].to_string();
        assert_eq!(report["transport"], "store", "{report}");
        assert_eq!((&report["on_device"], &report["mismatches"]), (&true.into(), &0.into()));
        assert_eq!(report["verified_bytes"], report["bytes"], "{report}");
        assert!(reasons.contains("through page-locked buffers"), "{reasons}");
        assert_eq!(report["host_payload_bytes"], report["bytes"], "in the trainer: {report}");
    }
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn real_captures_are_brought_to_the_device() {
    let report = report(&["--input", &folder(), "--transport", "nvlink_intra"]);
    check(&report, 1920 * 2 + 384 * 2 + 16); // all of it is in files
}

#[test]
#[ignore = "needs a CUDA device: cargo xtask test --gpu"]
fn what_does_not_work_says_why() {
    let fails = |arguments: &[&str], parts: &[&str]| {
        let ended = run(arguments);
        assert!(!ended.status.success(), "{arguments:?}");
        for part in parts {
            assert!(ended.stderr.contains(part), "{part}: {}", ended.stderr);
        }
    };
    let devices = ["pipeline", "--samples", "1", "--transport", "nvlink_intra"];
    fails(&[&devices[..], &["--device", "63"]].concat(), &["sees no such device", "63"]);
    fails(&[&devices[..], &["--arena", "900GiB"]].concat(), &["choose an arena smaller than"]);
    fails(&[&devices[..], &["--pool", "900GiB"]].concat(), &["smaller pool"]);
    let staged = ["pipeline", "--samples", "1", "--transport", "tcp", "--receive", "device"];
    fails(
        &[&staged[..], &["--device", "63"]].concat(),
        &["sees no such device", "setting=receive"],
    );
    fails(&[&staged[..], &["--pool", "900GiB"]].concat(), &["smaller pool", "setting=pool"]);
    // Samples in device memory are read by nothing but a device.
    let server = Server::start(&["capture-server", "--arena=64MiB", "--transport=nvlink_intra"]);
    assert_eq!(server.ready["memory"], "device", "{}", server.ready);
    let control = server.address("control");
    for (transport, receive, code) in [
        ("nvlink_intra", "auto", 0),
        ("nvlink_intra", "device", 0),
        ("auto", "auto", 0),
        ("auto", "device", 0),
        ("auto", "host", 1),
        ("tcp", "auto", 1),
        ("tcp", "device", 1),
        ("shm", "auto", 1),
    ] {
        let asked = ["--strict", "--transport", transport, "--receive", receive];
        let ended = run(&[&["doctor", "--server", &control][..], &asked].concat());
        assert_eq!(ended.status.code(), Some(code), "{transport}, {receive}: {}", ended.stdout);
    }
    server.process.signal(rustix::process::Signal::TERM);
    let ended = server.process.end(STEP);
    assert!(ended.status.success(), "{}", ended.stderr);
}
