//! A publisher in a process of its own, for the conformance suite across processes.
//!
//! Argument: the size of the arena in bytes. Speaks the lines of `featurestore_tests::remote`.
#![forbid(unsafe_code)]

use std::{
    collections::HashMap,
    io::Write,
    sync::{Arc, Mutex},
};

use capture_arena::{Arena, ArenaConfig, Backing, FreeRequest, ObjectList};
use featurestore_tests::remote::{Answer, Ask, Failure, read_ask};
use transport_core::{Error, ErrorKind, Result, Transport};
use transport_mooncake_direct::{CaptureSink, DirectTransport, SinkConfig};

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<()> {
    let bytes = std::env::args().nth(1).and_then(|text| text.parse().ok());
    let bytes = bytes.ok_or_else(|| {
        Error::new(ErrorKind::InvalidInput, "start publisher", "the arena's size is missing")
    })?;
    let arena = Arena::start(Backing::shared(bytes)?, ArenaConfig::default())?;
    let sink = CaptureSink::start(arena, SinkConfig::default())?;
    let transport = Arc::new(DirectTransport::builder().sink(sink).build()?);
    say(&Answer { id: 0, ok: Some(serde_json::Value::Null), failure: None });

    let (asks, mut queue) = tokio::sync::mpsc::channel(64);
    std::thread::spawn(move || {
        let mut input = std::io::stdin().lock();
        while let Ok(Some(ask)) = read_ask(&mut input) {
            if asks.blocking_send(ask).is_err() {
                return;
            }
        }
    });
    let mut running = HashMap::new();
    let published: Published = Arc::default();
    while let Some((id, ask)) = queue.recv().await {
        if let Ask::Drop { id } = ask {
            if let Some(task) = running.remove(&id) {
                let task: tokio::task::JoinHandle<()> = task;
                task.abort();
                let _ = task.await; // what it has published is on the books now
            }
            let objects = published.lock().expect("no panic").remove(&id).unwrap_or_default();
            let arena = transport.sink().expect("a publisher").arena();
            arena.free(FreeRequest { client: None, objects, reply: None });
            continue;
        }
        let (transport, published) = (transport.clone(), published.clone());
        let task = tokio::spawn(async move {
            let (ok, failure) = match obey(&*transport, ask, id, &published).await {
                Ok(value) => (Some(value), None),
                Err(error) => (None, Some(Failure::from(&error))),
            };
            say(&Answer { id, ok, failure });
        });
        running.insert(id, task);
    }
    transport.close().await
}

/// Objects of each `publish`, for as long as its asker may turn out to be gone.
type Published = Arc<Mutex<HashMap<u64, ObjectList>>>;

async fn obey(
    transport: &dyn Transport,
    ask: Ask,
    id: u64,
    published: &Published,
) -> Result<serde_json::Value> {
    match ask {
        Ask::Publish { batch, options } => {
            let described = transport.publish(batch, options).await?;
            let objects = described.iter().flat_map(|descriptor| {
                let seqs = descriptor.features.values().map(|feature| feature.seq);
                descriptor.keys().map(|key| key.to_string()).zip(seqs).collect::<Vec<_>>()
            });
            published.lock().expect("no panic").insert(id, objects.collect());
            let mut results = Vec::new();
            for descriptor in described {
                let outcome = control_proto::capture::CaptureOutcome::Captured(descriptor);
                let mut json = Vec::new();
                control_proto::capture::write_result(&mut json, &outcome)?;
                results.push(serde_json::from_slice(&json).expect("a result is JSON"));
            }
            Ok(serde_json::Value::Array(results))
        }
        Ask::Health => {
            let health = transport.health().await?;
            Ok(serde_json::to_value(health).expect("health is JSON"))
        }
        Ask::Drop { .. } => unreachable!("handled where tasks are known"),
        Ask::Close => transport.close().await.map(|()| serde_json::Value::Null),
    }
}

fn say(answer: &Answer) {
    let line = serde_json::to_string(answer).expect("plain data") + "\n";
    let _ = std::io::stdout().lock().write_all(line.as_bytes()); // the test may be over
}
