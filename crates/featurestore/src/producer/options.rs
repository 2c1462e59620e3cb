//! How a producer works, and what it has done.

use std::time::Duration;

#[cfg(doc)]
use super::Producer;
use super::{Batching, Routing};

/// How a [`Producer`] works.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ProducerOptions {
    /// Base URLs of the capture servers.
    pub servers: Vec<String>,
    /// Most prompts of one request. Default: 8.
    pub lease: usize,
    /// Requests in flight to each server. Default: 1.
    pub concurrency: usize,
    /// Requests in flight to all servers together; none for as many as each server may have.
    pub in_flight: Option<usize>,
    /// Size in bytes of each server's arena, in the order of `servers`. Where it is given, nothing
    /// is sent that would not fit beside what is captured and not settled.
    pub arenas: Vec<u64>,
    /// How requests are spread.
    pub routing: Routing,
    /// Which prompts go together.
    pub batching: Batching,
    /// Batches of prompts that are prepared ahead. Default: 0.
    pub prefetch: usize,
    /// Prompts of one such batch. Default: 128.
    pub ingest_batch: usize,
    /// Whether samples are published in the order of their prompts. Default: true.
    pub ordered: bool,
    /// Samples that may wait for an earlier one. Default: 1,024.
    pub reorder_buffer: usize,
    /// Whether captures go on while consumers read. Otherwise what is captured is published once
    /// captures rest, and they rest until all of it but less than a quantum is settled. Default:
    /// true.
    pub overlap: bool,
    /// Attempts for one prompt. Default: 5.
    pub attempts: u32,
    /// Pause before a prompt is sent again; twice as long after each failure, up to 16 times.
    /// Default: 200 ms.
    pub pause: Duration,
    /// How long servers may have no room for a prompt, or put it off, until that counts as a failed
    /// attempt. Default: 30 seconds.
    pub room_timeout: Duration,
    /// Failures in a row after which a server is dropped. Default: 3.
    pub server_failures: u32,
    /// How long a dropped server is left alone before it is tried again; none for ever.
    pub revive: Option<Duration>,
    /// Training run and strategy that refs name.
    pub run_id: String,
    /// Pause between looks at what consumers have settled. Default: 200 ms.
    pub poll: Duration,
    /// Whether the servers are asked how much room their arenas have in one piece; for servers that
    /// answer `GET /health`. Default: false.
    pub arena_feedback: bool,
    /// How long consumers may settle nothing while the producer is paused; none for ever.
    pub peer_timeout: Option<Duration>,
}

impl ProducerOptions {
    /// The defaults, for these servers.
    pub fn new(servers: Vec<String>, run_id: impl Into<String>) -> Self {
        Self {
            servers,
            lease: 8,
            concurrency: 1,
            in_flight: None,
            arenas: Vec::new(),
            routing: Routing::Shared,
            batching: Batching::Shuffle,
            prefetch: 0,
            ingest_batch: 128,
            ordered: true,
            reorder_buffer: 1024,
            overlap: true,
            attempts: 5,
            pause: Duration::from_millis(200),
            room_timeout: Duration::from_secs(30),
            server_failures: 3,
            revive: None,
            run_id: run_id.into(),
            poll: Duration::from_millis(200),
            arena_feedback: false,
            peer_timeout: None,
        }
    }
}

/// What a producer has done.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Produced {
    /// Samples published by this run of the producer.
    pub published: u64,
    /// Prompts that were published before.
    pub skipped: u64,
    /// Attempts beyond the first.
    pub retries: u64,
    /// Samples captured again because consumers had lost them.
    pub recaptured: u64,
    /// Times that it paused, and went on.
    pub pauses: u64,
    /// Times that it went on.
    pub resumes: u64,
    /// Servers dropped.
    pub servers_dropped: u64,
    /// Tensor payload that passed through this process: none does.
    pub host_payload_bytes: u64,
}
