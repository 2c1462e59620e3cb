//! A publisher in a process of its own, for the conformance suite across processes.
//!
//! Argument: the size of the arena in bytes. Speaks the lines of `featurestore_tests::remote`.
#![forbid(unsafe_code)]

use std::{io::Write, sync::Arc};

use capture_arena::{Arena, ArenaConfig, Backing};
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
    let mut running = std::collections::HashMap::new();
    while let Some((id, ask)) = queue.recv().await {
        if let Ask::Drop { id } = ask {
            if let Some(task) = running.remove(&id) {
                tokio::task::AbortHandle::abort(&task);
            }
            continue;
        }
        let transport = transport.clone();
        let task = tokio::spawn(async move {
            let (ok, failure) = match obey(&*transport, ask).await {
                Ok(value) => (Some(value), None),
                Err(error) => (None, Some(Failure::from(&error))),
            };
            say(&Answer { id, ok, failure });
        });
        running.insert(id, task.abort_handle());
    }
    transport.close().await
}

async fn obey(transport: &dyn Transport, ask: Ask) -> Result<serde_json::Value> {
    match ask {
        Ask::Publish { batch, options } => {
            let described = transport.publish(batch, options).await?;
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
