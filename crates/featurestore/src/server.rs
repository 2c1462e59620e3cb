//! The capture server: an arena that answers `POST /generate` as inference servers do.

mod generate;
mod listen;
mod metrics;
mod pace;

use std::{
    io::Read,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    extract::State,
    http::header,
    response::IntoResponse,
    routing::{get, post},
};
use capture_arena::{Arena, ArenaConfig, Backing};
use control_proto::capture::Limits;
use serde::Serialize;
use tokio::{net::TcpListener, sync::Semaphore};
use transport_core::{Error, Health, Result};
use transport_mooncake_direct::{AllowList, CaptureSink, SinkConfig};

use crate::{
    config::{ArenaKind, Problems, ServerConfig},
    process::peak_rss_bytes,
    source::Source,
};

/// How long requests in flight may take after the server was asked to end.
const GRACE: Duration = Duration::from_secs(10);

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
}

#[derive(Debug)]
struct Shared {
    arena: Arena,
    sink: CaptureSink,
    source: Source,
    limits: Limits,
    bodies: Semaphore, // one a `BODY_UNIT` of bodies in flight
    deadline: Duration,
    max_in_flight: usize,
    places: Semaphore, // one a sample that is worked on or waits
    pace: Option<pace::Pace>,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    requests: AtomicU64,
    captured: AtomicU64,
    failed: AtomicU64,
    put_off: AtomicU64,
}

/// The line that a server prints when it is ready.
#[derive(Debug, Serialize)]
pub struct ReadyLine {
    /// Always true.
    pub ready: bool,
    /// Process id.
    pub pid: u32,
    /// HTTP address.
    pub http: String,
    /// Data session.
    pub session: String,
    /// Control address.
    pub control: String,
    /// Life of the arena.
    pub epoch: u64,
    /// Size of the arena.
    pub arena_bytes: u64,
}

/// What `GET /health` answers: the measured [`Health`], and the server's own numbers.
#[derive(Debug, Serialize)]
struct HealthReport {
    #[serde(flatten)]
    health: Health,
    epoch: u64,
    session: String,
    control: String,
    samples_in_flight: usize,
    peak_rss_bytes: u64,
}

impl CaptureServer {
    /// Takes the arena and binds every port. All that is wrong is reported at once.
    pub async fn bind(config: &ServerConfig, source: Source) -> Result<Self> {
        let mut problems = Problems::default();
        let listener = problems.note(bind_http(config.http).await);
        problems.note(check_bind("data", config.data));
        problems.note(check_bind("control", config.control));
        let backing = problems.note(match config.arena_kind {
            ArenaKind::Shared => Backing::shared(config.arena.get()),
            ArenaKind::Heap => Backing::heap(config.arena.get()),
        });
        problems.settle("start capture server")?;
        let (Some(listener), Some(backing)) = (listener, backing) else {
            unreachable!("what is missing is a problem, and problems end this");
        };
        let settings = ArenaConfig::default().deadline(config.deadline).lease(config.lease);
        let arena = Arena::start(backing, settings)?;
        let sink = CaptureSink::start(arena.clone(), sink_config(config))?;
        let http = listener.local_addr().map_err(|e| Error::io("bind http port", e))?;
        let state = Arc::new(Shared {
            arena,
            sink,
            source,
            limits: Limits { body_bytes: MAX_BODY, ..Limits::default() },
            bodies: Semaphore::new(MAX_BODIES / BODY_UNIT),
            deadline: config.deadline,
            max_in_flight: config.max_in_flight,
            places: Semaphore::new(config.max_in_flight),
            pace: config.rate.map(pace::Pace::new),
            counts: Counts::default(),
        });
        Ok(Self { state, listener, http, allow: AllowList::new(config.allow.clone()) })
    }

    /// What to print once the server can be reached.
    pub fn ready_line(&self) -> ReadyLine {
        ReadyLine {
            ready: true,
            pid: std::process::id(),
            http: self.http.to_string(),
            session: self.state.sink.session().to_string(),
            control: self.state.sink.control().to_string(),
            epoch: self.state.arena.epoch().0,
            arena_bytes: self.state.arena.capacity(),
        }
    }

    /// Serves until `end` completes, then lets requests in flight finish within a bound.
    pub async fn serve(self, end: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        let app = Router::new()
            .route("/generate", post(generate::generate))
            .route("/health", get(health))
            .route("/metrics", get(prometheus))
            .with_state(self.state.clone());
        listen::serve(self.listener, app, &self.allow, end, GRACE).await;
        let closed = self.state.sink.close().await;
        self.state.arena.close();
        closed
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

fn sink_config(config: &ServerConfig) -> SinkConfig {
    let mut sink = SinkConfig::default();
    sink.data_bind = config.data;
    sink.control_bind = config.control;
    sink.advertise_host.clone_from(&config.advertise);
    sink.token.clone_from(&config.token);
    sink.allow = AllowList::new(config.allow.clone());
    sink
}

impl Shared {
    async fn report(&self) -> Result<HealthReport> {
        Ok(HealthReport {
            health: self.sink.health().await?,
            epoch: self.arena.epoch().0,
            session: self.sink.session().to_string(),
            control: self.sink.control().to_string(),
            samples_in_flight: self.max_in_flight - self.places.available_permits(),
            peak_rss_bytes: peak_rss_bytes(),
        })
    }
}

async fn health(State(state): State<Arc<Shared>>) -> axum::response::Response {
    match state.report().await {
        Ok(report) => Json(report).into_response(),
        Err(error) => generate::refusal(&error),
    }
}

async fn prometheus(State(state): State<Arc<Shared>>) -> axum::response::Response {
    match state.report().await {
        Ok(report) => (
            [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")],
            metrics::render(&report, &state.counts),
        )
            .into_response(),
        Err(error) => generate::refusal(&error),
    }
}

/// Completes on SIGINT, SIGTERM or, with `with_parent`, when standard input ends: the parent
/// process holds its other end. Signals count from this call on, not only from the first poll. A
/// second signal ends the process at once.
pub fn end_of_life(with_parent: bool) -> Result<impl Future<Output = ()> + Send + 'static> {
    use tokio::signal::unix::{SignalKind, signal};
    let handled = |kind| signal(kind).map_err(|e| Error::io("handle signal", e));
    let mut term = handled(SignalKind::terminate())?;
    let mut int = handled(SignalKind::interrupt())?;
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
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
            _ = gone => {}
        }
        tokio::spawn(async move {
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
            }
            tracing::warn!("a second signal: ending without the requests in flight");
            std::process::exit(1);
        });
    })
}

fn bump(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}
