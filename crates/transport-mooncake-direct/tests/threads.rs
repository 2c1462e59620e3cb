//! What was started is stopped. Alone in its process, so that every thread can be accounted for.

mod support;

use std::time::{Duration, Instant};

use support::*;
use transport_core::{Destination, FetchOptions, FetchRequest, RegionMut, Transport};
use transport_mooncake_direct::{DirectTransport, Engine};

fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.starts_with("fs-") || name.starts_with("arena-")).collect()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn closing_and_dropping_end_every_thread_and_socket() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let before = descriptors();
    for close in [true, false] {
        for engine in [Engine::Tcp, Engine::Shm] {
            let sink = sink(MIB);
            let sample = publish(&sink, "a", 1, &[10]);
            let transport = DirectTransport::builder().sink(sink).engine(engine).build().unwrap();
            runtime.block_on(async {
                let region = RegionMut::zeroed(10).unwrap();
                let request = FetchRequest::new(sample, Destination::Into(vec![region]));
                transport.fetch(vec![request], FetchOptions::default()).await.unwrap();
                assert!(threads().len() >= 5, "{:?}", threads());
                let start = Instant::now();
                if close {
                    transport.close().await.unwrap();
                } else {
                    drop(transport);
                }
                assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
            });
            eventually("all threads end", || threads().is_empty());
            eventually("all descriptors are closed", || descriptors() == before);
        }
    }
}
