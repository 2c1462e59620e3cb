//! Prints how fast one core makes synthetic tensors, with and without their checksum.
//!
//!     cargo run --release -p featurestore --example fill_speed
#![forbid(unsafe_code)]

use std::{hint::black_box, time::Instant};

use control_proto::capture::{ChecksumKind, Mixsum};
use featurestore::workload::Stream;
use transport_core::{FeatureName, Result, SampleId};

/// Bytes of the tensor: far more than any cache holds.
const BYTES: usize = 256 << 20;
const ROUNDS: usize = 5;

fn main() -> Result<()> {
    let stream = Stream::new(42, &SampleId::new("sample")?, &FeatureName::new("hidden_states")?);
    let mut tensor = vec![0xff; BYTES]; // touched, so that no page is provided while the clock runs
    let mut best = |name: &str, work: &dyn Fn(&mut [u8])| {
        let seconds = (0..ROUNDS).map(|_| {
            let start = Instant::now();
            work(&mut tensor);
            black_box(&tensor);
            start.elapsed().as_secs_f64()
        });
        let seconds = seconds.fold(f64::INFINITY, f64::min);
        println!("{name:<22} {:6.2} GB/s", BYTES as f64 / 1e9 / seconds);
    };
    best("make", &|out| stream.write(0, out));
    for kind in ChecksumKind::ALL {
        let name = format!("make, and {kind}");
        best(&name, &|out| _ = black_box(stream.write_hashed(out, kind)));
    }
    best("xxh3", &|out| _ = black_box(xxhash_rust::xxh3::xxh3_64(out)));
    best("mixsum", &|out| _ = black_box(Mixsum::of(out)));
    best("fill with a constant", &|out| out.fill(7));
    Ok(())
}
