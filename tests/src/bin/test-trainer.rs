//! A trainer that the fault tests kill: reads capture results from standard input, one a line,
//! fetches them, says so, and keeps them until it is ended. It fails if a byte of them changes.
//!
//! Arguments: `shm` or `tcp`, the client id, and the lease in milliseconds.
#![forbid(unsafe_code)]

use std::{io::BufRead, sync::Arc, time::Duration};

use capture_arena::{Backing, RegionPool};
use control_proto::capture::{CaptureOutcome, Limits, parse_result};
use transport_core::{Destination, FetchOptions, FetchRequest, Fetched};
use transport_mooncake_direct::{DirectTransport, Engine};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [engine, client, lease] = &arguments[..] else { return Err("three arguments".into()) };
    let builder = DirectTransport::builder()
        .client_id(client.parse()?)
        .lease(Duration::from_millis(lease.parse()?));
    let builder = match engine.as_str() {
        "shm" => builder.engine(Engine::Shm),
        "tcp" => builder.engine(Engine::Tcp).pool(RegionPool::new(Backing::heap(64 << 20)?)?),
        other => return Err(format!("no engine {other}").into()),
    };
    let transport = builder.build()?;
    let mut requests = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let CaptureOutcome::Captured(descriptor) = parse_result(&line?, &Limits::default())? else {
            return Err("not a capture".into());
        };
        let destination = if engine == "shm" { Destination::View } else { Destination::Pool };
        requests.push(FetchRequest::new(Arc::new(descriptor), destination));
    }
    let fetched = transport.fetch_blocking(requests, &FetchOptions::default())?;
    let first = sum(&fetched);
    println!("holding {}", fetched.len());
    // The test ends this process long before.
    for _ in 0..2400 {
        std::thread::sleep(Duration::from_millis(50));
        if sum(&fetched) != first {
            return Err("what was fetched has changed".into());
        }
    }
    Ok(())
}

/// A checksum of everything fetched.
fn sum(fetched: &[Fetched]) -> u64 {
    let tensors = fetched.iter().flat_map(|sample| sample.tensors.values());
    let bytes = tensors.flat_map(|tensor| tensor.data.as_ref());
    bytes.fold(0, |sum: u64, &byte| sum.rotate_left(5).wrapping_mul(31) ^ u64::from(byte))
}
