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
use tokio::{net::TcpListener, sync::Semaphore, task::JoinSet, time::sleep};
use transport_core::Seldom;
use transport_mooncake_direct::AllowList;

use half_closed::Connection;

/// Connections at a time; more wait to be accepted.
const CONNECTIONS: usize = 1024;
/// Longest wait for the head of a request, also on a connection that was used before.
const HEAD: Duration = Duration::from_secs(20);
/// Pause after a connection could not be accepted, as when file descriptors have run out.
const PAUSE: Duration = Duration::from_millis(50);

/// Serves whom `allow` lets connect until `end`, then lets requests in flight finish for at most
/// `grace`. What is left then is cut off. Calls `unreadable` for what is no HTTP request.
pub(super) async fn serve(
    listener: TcpListener,
    app: Router,
    allow: &AllowList,
    unreadable: impl Fn() + Clone + Send + 'static,
    end: impl Future<Output = ()>,
    grace: Duration,
) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let graceful = GracefulShutdown::new();
    let mut connections = JoinSet::new(); // aborts what is left when it is dropped
    let mut end = std::pin::pin!(end);
    let mut log = Seldom::default();
    loop {
        let accepted = async {
            let place = places.clone().acquire_owned().await.expect("never closed");
            listener.accept().await.map(|(stream, peer)| (place, stream, peer))
        };
        tokio::select! {
            () = &mut end => break,
            Some(_) = connections.join_next() => {}
            accepted = accepted => match accepted {
                Ok((_, _, peer)) if !allow.allows(peer.ip()) => {
                    tracing::debug!(%peer, "not on the list of networks that may connect");
                }
                Ok((place, stream, _)) => {
                    let _ = stream.set_nodelay(true); // slower without, never wrong
                    let mut http = http1::Builder::new();
                    http.timer(TokioTimer::new()).header_read_timeout(HEAD);
                    let app = TowerToHyperService::new(app.clone());
                    let stream = Connection::new(stream);
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
    if tokio::time::timeout(grace, graceful.shutdown()).await.is_err() {
        tracing::warn!("requests still in flight after {grace:?}; ending without them");
    }
}
