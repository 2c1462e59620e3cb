//! Connecting to a session name within a deadline, whatever kind of host it names.

use std::{
    net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use transport_core::{Error, ErrorKind, Result, SessionName};

use super::timed_out;

/// Look-ups of host names that may run at once; they cannot be interrupted.
const MAX_LOOKUPS: usize = 8;
static LOOKUPS: AtomicUsize = AtomicUsize::new(0);

/// Connects to `peer` by `deadline`, trying each address of its host in order.
pub(crate) fn connect(
    operation: &'static str,
    peer: &SessionName,
    deadline: Instant,
) -> Result<TcpStream> {
    let addresses = resolve(operation, peer, deadline)?;
    let mut last = None;
    for (i, address) in addresses.iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now());
        // Addresses that swallow packets must leave time for the others.
        let share = left / (addresses.len() - i) as u32;
        if share < Duration::from_millis(1) {
            break;
        }
        match TcpStream::connect_timeout(address, share) {
            // Without a listener, a socket on this host can end up connected to itself.
            Ok(stream) if stream.local_addr().ok() == Some(*address) => {
                last = Some(std::io::ErrorKind::ConnectionRefused.into());
            }
            Ok(stream) => {
                stream.set_nodelay(true).map_err(|e| Error::io(operation, e).with("peer", peer))?;
                return Ok(stream);
            }
            Err(e) => last = Some(e),
        }
    }
    Err(match last {
        None => timed_out(operation).with("peer", peer),
        Some(e) if e.kind() == std::io::ErrorKind::TimedOut => {
            timed_out(operation).with("peer", peer).source(e)
        }
        Some(e) => Error::io(operation, e)
            .with("peer", peer)
            .remedy("check that the peer is running and that its port is reachable from here"),
    })
}

fn resolve(
    operation: &'static str,
    peer: &SessionName,
    deadline: Instant,
) -> Result<Vec<SocketAddr>> {
    if let Ok(ip) = peer.host().parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, peer.port())]);
    }
    let unknown = |why: String| {
        Error::new(ErrorKind::NotFound, operation, "the host name is not known")
            .with("peer", peer)
            .with("reason", why)
            .remedy("check the name, or give the address itself")
    };
    if LOOKUPS.fetch_add(1, Ordering::Relaxed) >= MAX_LOOKUPS {
        LOOKUPS.fetch_sub(1, Ordering::Relaxed);
        return Err(Error::new(ErrorKind::Busy, operation, "too many host names are looked up")
            .with("peer", peer)
            .with("limit", MAX_LOOKUPS));
    }
    let (sender, receiver) = crossbeam_channel::bounded(1);
    let (host, port) = (peer.host().to_owned(), peer.port());
    std::thread::Builder::new()
        .name("fs-lookup".into())
        .spawn(move || {
            let found = (&*host, port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            LOOKUPS.fetch_sub(1, Ordering::Relaxed);
            let _ = sender.send(found); // nobody waits any more: the deadline passed
        })
        .map_err(|e| {
            LOOKUPS.fetch_sub(1, Ordering::Relaxed);
            Error::io(operation, e).with("peer", peer)
        })?;
    match receiver.recv_deadline(deadline) {
        Ok(Ok(addresses)) if !addresses.is_empty() => Ok(addresses),
        Ok(Ok(_)) => Err(unknown("it has no addresses".into())),
        Ok(Err(e)) => Err(unknown(e.to_string())),
        Err(_) => Err(timed_out(operation).with("peer", peer)),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    #[test]
    fn names_and_both_families_are_reached() {
        for (bind, host) in
            [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "::1"), ("127.0.0.1:0", "localhost")]
        {
            let listener = TcpListener::bind(bind).unwrap();
            let peer = SessionName::new(host, listener.local_addr().unwrap().port()).unwrap();
            assert!(connect("test", &peer, soon()).unwrap().nodelay().unwrap(), "{peer}");
        }
    }

    #[test]
    fn nobody_there_is_a_gone_peer_and_a_bad_name_is_named() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let error =
            connect("test", &SessionName::new("127.0.0.1", port).unwrap(), soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerGone);
        let past = Instant::now();
        let peer = SessionName::new("127.0.0.1", port).unwrap();
        assert_eq!(connect("test", &peer, past).unwrap_err().kind(), ErrorKind::Timeout);
    }
}
