//! One thread per accepted connection: bounded, named, stopped and joined at close.

use std::{
    collections::HashMap,
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use transport_core::{Error, Result, Seldom};

use super::{AllowList, Conn, Waker};

/// How long no connection is accepted after one could not be: most likely there are no descriptors
/// left, and others must end first.
const BACK_OFF: Duration = Duration::from_millis(100);

/// How an [`Acceptor`] takes connections.
#[derive(Clone, Debug)]
pub(crate) struct AcceptorConfig {
    /// Name of its threads; at most 15 bytes are shown by the system.
    pub(crate) name: &'static str,
    pub(crate) max_connections: usize,
    pub(crate) allow: AllowList,
}

/// Accepts connections and runs a handler for each on a thread of its own.
#[derive(Debug)]
pub(crate) struct Acceptor {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    address: SocketAddr,
}

#[derive(Debug)]
struct Shared {
    config: AcceptorConfig,
    stop: AtomicBool,
    waker: Waker,
    open: AtomicUsize,
    refused: AtomicU64,
    connections: Mutex<HashMap<u64, Open>>,
    finished: Mutex<Vec<JoinHandle<()>>>,
}

/// An open connection, and the thread that serves it once it has started.
type Open = (Arc<TcpStream>, Option<JoinHandle<()>>);

/// Serves one connection until it ends or the flag is set.
pub(crate) trait Handler: Fn(Conn, SocketAddr, &AtomicBool) + Send + Sync + 'static {}
impl<F: Fn(Conn, SocketAddr, &AtomicBool) + Send + Sync + 'static> Handler for F {}

impl Acceptor {
    pub(crate) fn start(
        listener: TcpListener,
        config: AcceptorConfig,
        handler: impl Handler,
    ) -> Result<Self> {
        let failed = |e| Error::io("start listener", e).with("listener", config.name);
        let address = listener.local_addr().map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let shared = Arc::new(Shared {
            config: config.clone(),
            stop: AtomicBool::new(false),
            waker: Waker::new()?,
            open: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
            connections: Mutex::default(),
            finished: Mutex::default(),
        });
        let (accepting, handler) = (shared.clone(), Arc::new(handler));
        let thread = std::thread::Builder::new()
            .name(config.name.into())
            .spawn(move || accept_all(&listener, &accepting, &handler))
            .map_err(failed)?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)), address })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connections at the moment.
    pub(crate) fn open(&self) -> usize {
        self.shared.open.load(Ordering::Relaxed)
    }

    /// Connections turned away: not on the list, or one too many.
    pub(crate) fn refused(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed)
    }

    /// Ends every connection and joins every thread. Idempotent.
    pub(crate) fn close(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.waker.wake();
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join(); // a panic there has been printed
        }
        let mut threads = Vec::new();
        for (stream, thread) in self.shared.connections.lock().values_mut() {
            let _ = stream.shutdown(Shutdown::Both); // already gone otherwise
            threads.extend(thread.take());
        }
        threads.append(&mut self.shared.finished.lock());
        for thread in threads {
            let _ = thread.join();
        }
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.close();
    }
}

fn accept_all(listener: &TcpListener, shared: &Arc<Shared>, handler: &Arc<impl Handler>) {
    let (mut next_id, mut log) = (0, Seldom::default());
    while !shared.stop.load(Ordering::Relaxed) {
        for thread in std::mem::take(&mut *shared.finished.lock()) {
            let _ = thread.join();
        }
        let mut fds =
            [PollFd::new(listener, PollFlags::IN), PollFd::new(&shared.waker, PollFlags::IN)];
        // Now and then even without a connection, to join threads that have finished.
        let timeout = Timespec { tv_sec: 1, tv_nsec: 0 };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => {
                tracing::error!(listener = shared.config.name, error = %e, "polling failed");
                return;
            }
        }
        loop {
            match listener.accept() {
                Ok((stream, peer)) => {
                    next_id += 1;
                    admit(next_id, stream, peer, shared, handler);
                }
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionAborted => {}
                Err(e) => {
                    if log.is_due(Instant::now()) {
                        tracing::warn!(listener = shared.config.name, error = %e, "cannot accept");
                    }
                    std::thread::sleep(BACK_OFF);
                    break;
                }
            }
            if shared.stop.load(Ordering::Relaxed) {
                break;
            }
        }
    }
}

fn admit(
    id: u64,
    stream: TcpStream,
    peer: SocketAddr,
    shared: &Arc<Shared>,
    handler: &Arc<impl Handler>,
) {
    let config = &shared.config;
    let reason = if !config.allow.allows(peer.ip()) {
        "not on the allow-list"
    } else if shared.open.load(Ordering::Relaxed) >= config.max_connections {
        "too many connections"
    } else if let Err(error) = serve(id, stream, peer, shared, handler) {
        tracing::warn!(listener = config.name, %peer, %error, "cannot serve a connection");
        return;
    } else {
        return;
    };
    shared.refused.fetch_add(1, Ordering::Relaxed);
    tracing::debug!(listener = config.name, %peer, reason, "connection refused");
}

fn serve(
    id: u64,
    stream: TcpStream,
    peer: SocketAddr,
    shared: &Arc<Shared>,
    handler: &Arc<impl Handler>,
) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let stream = Arc::new(stream);
    let conn = Conn::new(stream.clone())?;
    let (inner, handler) = (shared.clone(), handler.clone());
    shared.open.fetch_add(1, Ordering::Relaxed);
    // The entry is there before the thread can look for it.
    let mut connections = shared.connections.lock();
    connections.insert(id, (stream, None));
    let spawned = std::thread::Builder::new().name(shared.config.name.into()).spawn(move || {
        let done = Done { id, shared: inner };
        handler(conn, peer, &done.shared.stop);
    });
    match spawned {
        Ok(thread) => {
            if let Some((_, slot)) = connections.get_mut(&id) {
                *slot = Some(thread);
            }
            Ok(())
        }
        Err(e) => {
            connections.remove(&id);
            shared.open.fetch_sub(1, Ordering::Relaxed);
            Err(e)
        }
    }
}

/// Takes a connection off the books, also when its handler panics.
struct Done {
    id: u64,
    shared: Arc<Shared>,
}

impl Drop for Done {
    fn drop(&mut self) {
        // Both under one lock, so that whoever closes finds the thread in one place or the other.
        let mut connections = self.shared.connections.lock();
        let thread = connections.remove(&self.id).and_then(|(_, thread)| thread);
        self.shared.finished.lock().extend(thread);
        drop(connections);
        self.shared.open.fetch_sub(1, Ordering::Relaxed);
    }
}
