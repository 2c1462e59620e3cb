//! The capture server: an arena that answers `POST /generate` as inference servers do.

mod generate;
mod metrics;

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
    extract::{DefaultBodyLimit, State},
    http::header,
    response::IntoResponse,
    routing::{get, post},
};
use capture_arena::{Arena, ArenaConfig, Backing};
use serde::Serialize;
use tokio::sync::{Notify, Semaphore};
use transport_core::{Error, ErrorKind, Health, Result};
use transport_mooncake_direct::{AllowList, CaptureSink, SinkConfig};

use crate::{
    config::{ArenaKind, ServerConfig},
    process::peak_rss_bytes,
    source::Source,
};

/// How long requests in flight may take after the server was asked to end.
const GRACE: Duration = Duration::from_secs(10);

/// A running capture server.
#[derive(Debug)]
pub struct CaptureServer {
    state: Arc<Shared>,
    listener: tokio::net::TcpListener,
    http: SocketAddr,
}

#[derive(Debug)]
struct Shared {
    arena: Arena,
    sink: CaptureSink,
    source: Source,
    limits: control_proto::capture::Limits,
    deadline: Duration,
    max_in_flight: usize,
    places: Semaphore, // one a sample that is worked on or waits
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
        let listener = tokio::net::TcpListener::bind(config.http).await.map_err(|e| {
            Error::io("bind http port", e)
                .with("address", config.http)
                .remedy("choose another --http address, or port 0 for any free one")
        });
        let arena = match config.arena_kind {
            ArenaKind::Shared => Backing::shared(config.arena.get()),
            ArenaKind::Heap => Backing::heap(config.arena.get()),
        }
        .and_then(|backing| {
            let settings = ArenaConfig::default().deadline(config.deadline).lease(config.lease);
            Arena::start(backing, settings)
        });
        let (listener, arena) = match (listener, arena) {
            (Ok(listener), Ok(arena)) => (listener, arena),
            (Err(a), Err(b)) => {
                return Err(Error::new(
                    ErrorKind::ConfigInvalid,
                    "start capture server",
                    format!("two problems: {a}; and {b}"),
                ));
            }
            (Err(e), _) | (_, Err(e)) => return Err(e),
        };
        let sink = CaptureSink::start(arena.clone(), sink_config(config)?)?;
        let http = listener.local_addr().map_err(|e| Error::io("bind http port", e))?;
        let state = Arc::new(Shared {
            arena,
            sink,
            source,
            limits: control_proto::capture::Limits::default(),
            deadline: config.deadline,
            max_in_flight: config.max_in_flight,
            places: Semaphore::new(config.max_in_flight),
            counts: Counts::default(),
        });
        Ok(Self { state, listener, http })
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
        let body = DefaultBodyLimit::max(self.state.limits.body_bytes);
        let app = Router::new()
            .route("/generate", post(generate::generate).layer(body))
            .route("/health", get(health))
            .route("/metrics", get(prometheus))
            .with_state(self.state.clone());
        let ending = Arc::new(Notify::new());
        let told = ending.clone();
        let graceful = async move {
            end.await;
            told.notify_one();
        };
        let server = axum::serve(self.listener, app).with_graceful_shutdown(graceful);
        let overdue = async {
            ending.notified().await;
            tokio::time::sleep(GRACE).await;
        };
        let served = tokio::select! {
            served = server => served.map_err(|e| Error::io("serve http", e)),
            () = overdue => {
                tracing::warn!("requests still in flight after {GRACE:?}; ending without them");
                Ok(())
            }
        };
        let closed = self.state.sink.close().await;
        self.state.arena.close();
        served.and(closed)
    }
}

fn sink_config(config: &ServerConfig) -> Result<SinkConfig> {
    let mut sink = SinkConfig::default();
    sink.data_bind = config.data;
    sink.control_bind = config.control;
    sink.advertise_host.clone_from(&config.advertise);
    sink.token.clone_from(&config.token);
    let networks = config.allow.iter().map(|network| network.parse());
    sink.allow = AllowList::new(networks.collect::<Result<_>>()?);
    Ok(sink)
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
/// process holds its other end.
pub async fn end_of_life(with_parent: bool) {
    use tokio::signal::unix::{SignalKind, signal};
    let mut term = signal(SignalKind::terminate()).expect("a signal that can be handled");
    let mut int = signal(SignalKind::interrupt()).expect("a signal that can be handled");
    let parent = async {
        if !with_parent {
            return std::future::pending().await;
        }
        let (send, gone) = tokio::sync::oneshot::channel();
        // A thread of its own: a blocked read must not keep the runtime from ending.
        std::thread::spawn(move || {
            let mut input = std::io::stdin().lock();
            while matches!(input.read(&mut [0; 256]), Ok(n) if n > 0) {}
            let _ = send.send(());
        });
        let _ = gone.await;
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
        () = parent => {}
    }
}

fn bump(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}
