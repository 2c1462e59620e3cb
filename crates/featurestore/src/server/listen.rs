//! HTTP connections, bounded in number and in how long a request's head may take.

mod half_closed;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::Router;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
    time::{sleep, timeout},
};
use transport_core::Seldom;
use transport_mooncake_direct::AllowList;

use half_closed::Connection;

/// Most bytes of a request's head, and of what is read or written of a connection at a time.
const BUFFER: usize = 64 << 10;
/// Connections at a time that are told that there are too many.
const REFUSALS: usize = 64;
/// What those are told.
const TOO_MANY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n\
    connection: close\r\ncontent-length: 31\r\n\r\ntoo many connections; try later";
/// Pause after a connection could not be accepted, as when file descriptors have run out.
const PAUSE: Duration = Duration::from_millis(50);

/// What connections may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Connections at a time; more are refused.
    pub(super) connections: usize,
    /// Longest wait for the head of a request, also on a connection that was used before.
    pub(super) head: Duration,
    /// Longest time that a client may take no byte of an answer.
    pub(super) stall: Duration,
    /// How long requests in flight may take at the end.
    pub(super) grace: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { connections: 1024, head: seconds(20), stall: seconds(20), grace: seconds(10) }
    }
}

/// Serves whom `allow` lets connect until `end`, then lets requests in flight finish for a
/// while. What is left then is cut off. Calls `unreadable` for what is no HTTP request.
pub(super) async fn serve(
    listener: TcpListener,
    app: Router,
    allow: &AllowList,
    unreadable: impl Fn() + Clone + Send + 'static,
    end: impl Future<Output = ()>,
    bounds: Bounds,
) {
    let places = Arc::new(Semaphore::new(bounds.connections));
    let refusals = Arc::new(Semaphore::new(REFUSALS));
    let graceful = GracefulShutdown::new();
    let mut connections = JoinSet::new(); // aborts what is left when it is dropped
    let mut end = std::pin::pin!(end);
    let mut log = Seldom::default();
    loop {
        tokio::select! {
            () = &mut end => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((_, peer)) if !allow.allows(peer.ip()) => {
                    tracing::debug!(%peer, "not on the list of networks that may connect");
                }
                Ok((stream, _)) => {
                    let Ok(place) = places.clone().try_acquire_owned() else {
                        if let Ok(place) = refusals.clone().try_acquire_owned() {
                            connections.spawn(async move {
                                refuse(stream).await;
                                drop(place);
                            });
                        }
                        continue;
                    };
                    let _ = stream.set_nodelay(true); // slower without, never wrong
                    let mut http = http1::Builder::new();
                    http.timer(TokioTimer::new()).header_read_timeout(bounds.head);
                    http.max_buf_size(BUFFER);
                    let app = TowerToHyperService::new(app.clone());
                    let stream = Connection::new(stream, bounds.stall);
                    let answering = stream.answering();
                    let service =
                        service_fn(move |request| answering.clone().answer(&app, request));
                    let connection = http.serve_connection(TokioIo::new(stream), service);
                    let connection = graceful.watch(connection);
                    let unreadable = unreadable.clone();
                    connections.spawn(async move {
                        if let Err(error) = connection.await {
                            if error.is_parse() {
                                unreadable();
                            }
                            tracing::debug!(%error, "a connection ended badly");
                        }
                        drop(place);
                    });
                }
                Err(error) => {
                    if log.is_due(Instant::now()) {
                        tracing::warn!(%error, "a connection was not accepted");
                    }
                    sleep(PAUSE).await;
                }
            },
        }
    }
    drop(listener);
    if timeout(bounds.grace, graceful.shutdown()).await.is_err() {
        tracing::warn!("requests still in flight after {:?}; ending without them", bounds.grace);
    }
}

/// Tells a client that it is one too many, and lets it read that: what is closed over bytes that
/// nobody has read is reset.
async fn refuse(mut stream: TcpStream) {
    let told = async {
        stream.write_all(TOO_MANY).await?;
        stream.shutdown().await?;
        while stream.read(&mut [0; 1024]).await? > 0 {}
        std::io::Result::Ok(())
    };
    let _ = timeout(Duration::from_secs(1), told).await; // who is gone need not know
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn ask(address: std::net::SocketAddr) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8_lossy(&answer).into_owned()
    }

    #[tokio::test]
    async fn clients_that_never_read_are_cut_off_and_others_are_told_meanwhile() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stall = Duration::from_secs(2);
        let bounds = Bounds { connections: 4, stall, ..Bounds::default() };
        let large = "x".repeat(64 << 20); // more than the system keeps
        let app = Router::new()
            .route("/", axum::routing::get(|| async { "hello" }))
            .route("/large", axum::routing::get(|| async { large }));
        let serving = tokio::spawn(async move {
            let allow = AllowList::new(Vec::new());
            serve(listener, app, &allow, || (), std::future::pending(), bounds).await;
        });
        let mut deaf = Vec::new();
        for _ in 0..bounds.connections {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
            deaf.push(stream);
        }
        let refused = timeout(stall, ask(address)).await.expect("nobody waits for a place");
        assert!(refused.starts_with("HTTP/1.1 503") && refused.ends_with("try later"), "{refused}");
        let begun = Instant::now();
        while !ask(address).await.ends_with("hello") {
            assert!(begun.elapsed() < 10 * stall, "the deaf ones keep their places");
            sleep(PAUSE).await;
        }
        drop(deaf);
        serving.abort();
    }

    #[tokio::test]
    async fn an_endless_head_is_refused_before_it_takes_memory() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(async move {
            let allow = AllowList::new(Vec::new());
            let bounds = Bounds::default();
            serve(listener, Router::new(), &allow, || (), std::future::pending(), bounds).await;
        });
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = format!("GET / HTTP/1.1\r\nx: {}", "a".repeat(2 * BUFFER));
        let _ = stream.write_all(head.as_bytes()).await; // it may be refused before it is sent
        let mut answer = [0; 12];
        let answered = timeout(Duration::from_secs(5), stream.read(&mut answer)).await;
        let answered = answered.expect("it does not wait for the rest");
        assert!(answered.is_err() || &answer == b"HTTP/1.1 431", "{:?}", answer.escape_ascii());
        serving.abort();
    }
}
