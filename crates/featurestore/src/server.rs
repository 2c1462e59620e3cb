//! The capture server: an arena that answers `POST /generate` as inference servers do.

mod fill;
mod generate;
mod listen;
mod memory;
mod metrics;
mod pace;
mod publisher;
#[cfg(feature = "store")]
mod store;
#[cfg(all(test, feature = "cuda"))]
mod tests;

use std::{
    io::Read,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    Json, Router,
    extract::State,
    http::header,
    middleware::map_response_with_state,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use control_proto::capture::Limits;
use rustix::process::{Signal, kill_process};
use serde::Serialize;
use tokio::{net::TcpListener, sync::Semaphore};
use transport_core::{Error, Health, Result};
use transport_mooncake_direct::AllowList;

use crate::{
    config::{Problems, ServerConfig},
    process::{Signals, peak_rss_bytes},
    source::Source,
};
pub use pace::Paced;
use publisher::Publisher;

/// Longest body of a request: half a million tokens, with ids and masks.
const MAX_BODY: usize = 8 << 20;
/// Memory of requests in flight, all together: their bodies, and the numbers read from them.
const MAX_BODIES: usize = 48 << 20;
/// Memory that a byte of a body takes at most: two bytes of text can become eight.
const BODY_COST: usize = 5;
/// Bytes of each body that are not counted, so that small requests never wait for large ones.
const BODY_FREE: usize = 16 << 10;
/// Unit in which [`MAX_BODIES`] is handed out.
const BODY_UNIT: usize = 1 << 10;

/// A running capture server.
#[derive(Debug)]
pub struct CaptureServer {
    state: Arc<Shared>,
    listener: TcpListener,
    http: SocketAddr,
    allow: AllowList,
    registrations: u64,
}

#[derive(Debug)]
struct Shared {
    publisher: Publisher,
    source: Source,
    limits: Limits,
    bodies: Arc<Semaphore>, // one a `BODY_UNIT` of bodies in flight
    deadline: Duration,
    max_in_flight: usize,
    places: Arc<Semaphore>, // one a sample that is worked on or waits
    pace: Option<pace::Pace>,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    requests: AtomicU64,
    captured: AtomicU64,
    failed: AtomicU64,
    put_off: AtomicU64,
    refused: AtomicU64, // HTTP requests, for what they are
}

/// The line that a server prints when it is ready.
#[derive(Debug, Serialize)]
pub struct ReadyLine {
    /// Always true.
    pub ready: bool,
    /// Process id.
    pub pid: u32,
    /// `arena`, or `store` for a server that publishes through Mooncake Store.
    pub transport: &'static str,
    /// HTTP address.
    pub http: String,
    /// Data session; in a store, the name that it has there.
    pub session: String,
    /// Control address; none in a store.
    pub control: Option<String>,
    /// Life of the arena; none in a store.
    pub epoch: Option<u64>,
    /// Size of the arena, or of the object memory that the server adds to a store.
    pub arena_bytes: u64,
    /// What samples lie in: `device`, `shared`, `heap` or, with a store, `store`.
    pub memory: &'static str,
    /// Why in that.
    pub memory_reason: String,
    /// Memory registrations so far; no sample adds one.
    pub registrations: u64,
}

/// What `GET /health` answers: the measured [`Health`], and the server's own numbers.
#[derive(Debug, Serialize)]
struct HealthReport {
    #[serde(flatten)]
    health: Health,
    epoch: Option<u64>,
    session: String,
    control: Option<String>,
    samples_in_flight: usize,
    peak_rss_bytes: u64,
    paced: Option<pace::Paced>, // where the rate is limited
}

impl CaptureServer {
    /// Takes the arena, or joins the store, and binds every port. All that is wrong is reported at
    /// once.
    pub async fn bind(config: &ServerConfig, source: Source) -> Result<Self> {
        let mut problems = Problems::default();
        let listener = problems.note(bind_http(config.http).await);
        let publisher = Publisher::start(config, &mut problems).await;
        problems.settle("start capture server")?;
        let (Some(listener), Some(publisher)) = (listener, publisher) else {
            unreachable!("what is missing is a problem, and problems end this");
        };
        Self::over(listener, publisher, config, source).await
    }

    async fn over(
        listener: TcpListener,
        publisher: Publisher,
        config: &ServerConfig,
        source: Source,
    ) -> Result<Self> {
        let registrations = publisher.health().await?.registrations;
        let http = listener.local_addr().map_err(|e| Error::io("bind http port", e))?;
        let state = Arc::new(Shared {
            publisher,
            source,
            limits: Limits { body_bytes: MAX_BODY, ..Limits::default() },
            bodies: Arc::new(Semaphore::new(MAX_BODIES / BODY_UNIT)),
            deadline: config.deadline,
            max_in_flight: config.max_in_flight,
            places: Arc::new(Semaphore::new(config.max_in_flight)),
            pace: pace::Pace::new(config.rate, config.token_rate),
            counts: Counts::default(),
        });
        let allow = AllowList::new(config.allow.clone());
        Ok(Self { state, listener, http, allow, registrations })
    }

    /// What to print once the server can be reached.
    pub fn ready_line(&self) -> ReadyLine {
        let identity = self.state.publisher.identity();
        ReadyLine {
            ready: true,
            pid: std::process::id(),
            transport: identity.transport,
            http: self.http.to_string(),
            session: identity.session,
            control: identity.control,
            epoch: identity.epoch,
            arena_bytes: identity.capacity,
            memory: identity.memory,
            memory_reason: identity.memory_reason,
            registrations: self.registrations,
        }
    }

    /// Serves until `end` completes, then lets requests in flight finish within a bound.
    pub async fn serve(self, end: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        let app = Router::new()
            .route("/generate", post(generate::generate))
            .route("/health", get(health))
            .route("/metrics", get(prometheus))
            .layer(map_response_with_state(self.state.clone(), count_refused))
            .with_state(self.state.clone());
        let state = self.state.clone();
        let unreadable = move || bump(&state.counts.refused, 1);
        listen::serve(self.listener, app, &self.allow, unreadable, end, listen::Bounds::default())
            .await;
        self.state.publisher.close().await
    }
}

async fn bind_http(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|e| {
        Error::io("bind http port", e)
            .with("address", address)
            .remedy("choose another --http address, or port 0 for any free one")
    })
}

/// Whether the sink will be able to bind `address`, so that all problems are known at once.
fn check_bind(flag: &'static str, address: SocketAddr) -> Result<()> {
    std::net::TcpListener::bind(address).map(drop).map_err(|e| {
        Error::io("bind port", e)
            .with("setting", flag)
            .with("address", address)
            .remedy(format!("choose another --{flag} address, or port 0 for any free one"))
    })
}

impl Shared {
    async fn report(&self) -> Result<HealthReport> {
        // Before anything is measured: whatever is reserved then has its place counted.
        let samples_in_flight = self.max_in_flight - self.places.available_permits();
        let identity = self.publisher.identity();
        let mut health = self.publisher.health().await?;
        health.protocol_errors += self.counts.refused.load(Ordering::Relaxed);
        Ok(HealthReport {
            health,
            epoch: identity.epoch,
            session: identity.session,
            control: identity.control,
            samples_in_flight,
            peak_rss_bytes: peak_rss_bytes(),
            paced: self.pace.as_ref().map(pace::Pace::paced),
        })
    }
}

/// Counts the answers that say that a request was wrong. Those that only come too early are not.
async fn count_refused(State(state): State<Arc<Shared>>, response: Response) -> Response {
    if response.status().is_client_error() {
        bump(&state.counts.refused, 1);
    }
    response
}

async fn health(State(state): State<Arc<Shared>>) -> Response {
    match state.report().await {
        Ok(report) => Json(report).into_response(),
        Err(error) => generate::refusal(&error),
    }
}

async fn prometheus(State(state): State<Arc<Shared>>) -> Response {
    match state.report().await {
        Ok(report) => (
            [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")],
            metrics::render(&report, &state.counts),
        )
            .into_response(),
        Err(error) => generate::refusal(&error),
    }
}

/// Signals within this time are one.
const SAME_WISH: Duration = Duration::from_millis(500);

/// Completes on SIGINT, SIGTERM, SIGHUP or, with `with_parent`, when standard input ends: the parent
/// process holds its other end. Signals count from this call on, not only from the first poll.
///
/// Another signal, half a second or more after the first, ends the process at once as SIGKILL
/// would. One that follows at once is the same wish: `timeout` and terminals tell a process and its
/// group. The end of standard input is no signal.
pub fn end_of_life(with_parent: bool) -> Result<impl Future<Output = ()> + Send + 'static> {
    let mut signals = Signals::listen()?;
    let (send, gone) = tokio::sync::oneshot::channel::<()>();
    let kept = if with_parent {
        // A thread of its own: a blocked read must not keep the runtime from ending.
        std::thread::spawn(move || {
            let mut input = std::io::stdin().lock();
            while matches!(input.read(&mut [0; 256]), Ok(n) if n > 0) {}
            drop(send);
        });
        None
    } else {
        Some(send) // lives as long as the future: nothing but a signal ends it
    };
    Ok(async move {
        let _kept = kept;
        let mut first = tokio::select! {
            _ = signals.next() => Some(Instant::now()),
            _ = gone => None,
        };
        tokio::spawn(async move {
            loop {
                signals.next().await;
                if first.get_or_insert_with(Instant::now).elapsed() >= SAME_WISH {
                    break;
                }
            }
            tracing::warn!("another signal: ending without the requests in flight");
            // Not by way of `exit`, which would take C++ libraries down below their own threads.
            let _ = kill_process(rustix::process::getpid(), Signal::KILL);
        });
    })
}

fn bump(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}
