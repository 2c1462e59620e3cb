//! Handing out the file descriptor of a block of device memory, to processes of the same user.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use capture_arena::Backing;
use control_proto::fd_grant::{GRANT_BYTES, Grant};
use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg, sockopt::socket_peercred,
    },
    process::Uid,
};
use transport_core::{Epoch, Error, ErrorKind, Result};

use crate::net::Waker;

const SERVE: &str = "hand out file descriptor";
const RECEIVE: &str = "receive file descriptor";
/// How long no connection is taken after one could not be.
const BACK_OFF: Duration = Duration::from_millis(100);
/// Longest name of a socket in the abstract namespace.
const MAX_NAME: usize = 107;

/// Hands a block's file descriptor to whoever of the same user connects, until it is dropped.
#[derive(Debug)]
pub struct FdServer {
    name: String,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    stop: AtomicBool,
    waker: Waker,
    granted: AtomicU64,
    refused: AtomicU64,
}

/// What an [`FdServer`] has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FdServerStats {
    /// Descriptors sent.
    pub granted: u64,
    /// Connections of other users, and those that ended first.
    pub refused: u64,
}

impl FdServer {
    /// Starts handing out the descriptor of `backing`, which is device memory of kind `posix_fd`.
    pub fn start(backing: &Backing, epoch: Epoch) -> Result<Self> {
        let block = backing.device_block().ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, SERVE, "the arena is not in device memory")
        })?;
        let (fd, grant) = (block.export_fd()?, Grant { epoch, bytes: block.len() });
        let name = format!("featurestore-{}-{:x}", std::process::id(), epoch.0);
        let failed = |e| Error::io(SERVE, e).with("socket", &name);
        let address = SocketAddr::from_abstract_name(&name).map_err(failed)?;
        let listener = UnixListener::bind_addr(&address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            waker: Waker::new()?,
            granted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        });
        let serving = shared.clone();
        let thread = std::thread::Builder::new()
            .name("fs-fd".into())
            .spawn(move || serving.serve(&listener, &fd, grant))
            .map_err(failed)?;
        Ok(Self { name, shared, thread: Mutex::new(Some(thread)) })
    }

    /// Name of the socket, in the abstract namespace.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it has done so far.
    pub fn stats(&self) -> FdServerStats {
        FdServerStats {
            granted: self.shared.granted.load(Ordering::Relaxed),
            refused: self.shared.refused.load(Ordering::Relaxed),
        }
    }

    /// Ends and joins its thread. Idempotent.
    pub fn close(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.waker.wake();
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join(); // a panic there has been printed
        }
    }
}

impl Drop for FdServer {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn serve(&self, listener: &UnixListener, fd: &OwnedFd, grant: Grant) {
        while !self.stop.load(Ordering::Relaxed) {
            let mut fds =
                [PollFd::new(listener, PollFlags::IN), PollFd::new(&self.waker, PollFlags::IN)];
            if let Err(error) = poll(&mut fds, None::<&Timespec>)
                && error != rustix::io::Errno::INTR
            {
                tracing::error!(%error, "polling for readers of device memory failed");
                return;
            }
            match listener.accept() {
                // The message always fits an empty socket, so nobody can hold this thread up.
                Ok((stream, _)) => match send(&stream, fd, grant) {
                    Ok(()) => drop(self.granted.fetch_add(1, Ordering::Relaxed)),
                    Err(error) => {
                        tracing::debug!(%error, "a reader of device memory was turned away");
                        self.refused.fetch_add(1, Ordering::Relaxed);
                    }
                },
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot take a reader of device memory");
                    std::thread::sleep(BACK_OFF);
                }
            }
        }
    }
}

fn send(stream: &UnixStream, fd: &OwnedFd, grant: Grant) -> Result<()> {
    check_user(stream, SERVE)?;
    stream.set_nonblocking(true).map_err(|e| Error::io(SERVE, e))?;
    let fds = [fd.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    assert!(beside.push(SendAncillaryMessage::ScmRights(&fds)), "room for one descriptor");
    let message = grant.encode();
    let sent = sendmsg(stream, &[IoSlice::new(&message)], &mut beside, SendFlags::NOSIGNAL);
    match sent.map_err(|e| Error::io(SERVE, e.into()))? {
        GRANT_BYTES => Ok(()),
        found => Err(Error::new(ErrorKind::PeerGone, SERVE, "the message was cut short")
            .with("found", found)),
    }
}

/// Receives the descriptor that the server behind `name` hands out, and what it is of. The server
/// must be of the same user.
///
/// # Errors
/// [`ErrorKind::PeerGone`] where nobody listens, [`ErrorKind::PermissionDenied`] for another user's
/// server, [`ErrorKind::Timeout`], [`ErrorKind::Protocol`].
pub fn receive_fd(name: &str, deadline: Instant) -> Result<(OwnedFd, Grant)> {
    let named = |e: Error| e.with("socket", name.chars().take(MAX_NAME).collect::<String>());
    receive(name, deadline).map_err(named)
}

fn receive(name: &str, deadline: Instant) -> Result<(OwnedFd, Grant)> {
    if name.is_empty() || name.len() > MAX_NAME {
        return Err(Error::new(ErrorKind::Protocol, RECEIVE, "no name of a socket"));
    }
    let failed = |e| {
        Error::io(RECEIVE, e).remedy(
            "ask the peer for its metadata again; run both in one network namespace, or make the \
             arena of kind plain",
        )
    };
    let address = SocketAddr::from_abstract_name(name).map_err(failed)?;
    let stream = UnixStream::connect_addr(&address).map_err(failed)?;
    check_user(&stream, RECEIVE)?;
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    stream.set_read_timeout(Some(left)).map_err(failed)?;

    let mut message = [0; GRANT_BYTES + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut message)];
    let received = recvmsg(&stream, &mut parts, &mut beside, RecvFlags::CMSG_CLOEXEC);
    let received = received.map_err(|e| match e {
        rustix::io::Errno::AGAIN => Error::new(ErrorKind::Timeout, RECEIVE, "nothing came in time"),
        e => Error::io(RECEIVE, e.into()),
    })?;
    // Whatever else came is closed with the list.
    let mut fds: Vec<OwnedFd> = beside
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    if received.bytes == 0 {
        return Err(Error::new(ErrorKind::PeerGone, RECEIVE, "the peer hung up")
            .remedy("run both processes as the same user"));
    }
    let grant = Grant::decode(&message[..received.bytes])?;
    match (fds.pop(), fds.is_empty()) {
        (Some(fd), true) => Ok((fd, grant)),
        _ => Err(Error::new(ErrorKind::Protocol, RECEIVE, "no descriptor came with the message")),
    }
}

/// Refuses an end that is not of this process's user.
fn check_user(stream: &UnixStream, operation: &'static str) -> Result<()> {
    let peer = socket_peercred(stream).map_err(|e| Error::io(operation, e.into()))?;
    same_user(peer.uid, rustix::process::geteuid(), operation)
}

fn same_user(peer: Uid, own: Uid, operation: &'static str) -> Result<()> {
    if peer == own {
        return Ok(());
    }
    Err(Error::new(ErrorKind::PermissionDenied, operation, "the other process is another user's")
        .with("expected_uid", own.as_raw())
        .with("found_uid", peer.as_raw())
        .remedy("run both processes as the same user"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    fn listen(name: &str) -> UnixListener {
        let name = format!("{name}-{}", std::process::id());
        UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap()
    }

    fn full(name: &str) -> String {
        format!("{name}-{}", std::process::id())
    }

    #[test]
    fn a_descriptor_arrives_with_what_it_is_of() {
        let listener = listen("grant");
        let grant = Grant { epoch: Epoch(5), bytes: 4096 };
        let server = std::thread::spawn(move || {
            let fd = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&fd, 4096).unwrap();
            send(&listener.accept().unwrap().0, &fd, grant).unwrap();
        });
        let (fd, found) = receive_fd(&full("grant"), soon()).unwrap();
        server.join().unwrap();
        assert_eq!(found, grant);
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_size, 4096);
        let flags = rustix::io::fcntl_getfd(&fd).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "programs do not inherit it");
    }

    #[test]
    fn another_user_gets_nothing_and_is_trusted_with_nothing() {
        let (own, other) = (Uid::from_raw(1000), Uid::from_raw(1001));
        same_user(own, own, SERVE).unwrap();
        for (peer, own) in [(other, own), (own, other), (Uid::ROOT, own), (own, Uid::ROOT)] {
            let refused = same_user(peer, own, SERVE).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
            assert_eq!(refused.context("found_uid"), Some(&*peer.as_raw().to_string()));
        }
    }

    #[test]
    fn servers_that_misbehave_are_refused() {
        let none = receive_fd("no-such-featurestore-socket", soon()).unwrap_err();
        assert_eq!(none.kind(), ErrorKind::PeerGone);
        for name in ["", &"x".repeat(108)] {
            assert_eq!(receive_fd(name, soon()).unwrap_err().kind(), ErrorKind::Protocol);
        }
        let good = Grant { epoch: Epoch(1), bytes: 1 }.encode();
        let cases = [
            (&good[..], ErrorKind::Protocol), // without a descriptor
            (&good[..GRANT_BYTES - 1], ErrorKind::Protocol),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", ErrorKind::Protocol),
            (b"", ErrorKind::PeerGone),
        ];
        for (i, (bytes, kind)) in cases.into_iter().enumerate() {
            let name = format!("bad{i}");
            let listener = listen(&name);
            let bytes = bytes.to_vec();
            let server = std::thread::spawn(move || listener.accept().unwrap().0.write_all(&bytes));
            let error = receive_fd(&full(&name), soon()).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.context("socket").is_some());
            server.join().unwrap().unwrap();
        }
        // One that says nothing.
        let _silent = listen("silent");
        let soon = Instant::now() + Duration::from_millis(50);
        assert_eq!(receive_fd(&full("silent"), soon).unwrap_err().kind(), ErrorKind::Timeout);
    }
}
