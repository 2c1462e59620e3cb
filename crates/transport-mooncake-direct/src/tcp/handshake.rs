//! The peer handshake over a socket, both sides: one request and one reply per connection.

use std::{
    io::IoSlice,
    net::Shutdown,
    sync::atomic::AtomicBool,
    time::{Duration, Instant},
};

use control_proto::mooncake::handshake::{
    Connection, Frame, Kind, LENGTH_BYTES, MAX_FRAME_BYTES, Notify, ProbeReply, SegmentDescriptor,
};
use rustix::io::Errno;
use transport_core::{Error, ErrorKind, Result, SessionName};

use crate::net::{Conn, Until, connect, timed_out};

/// Answers one request with what this process says about itself.
pub(super) fn answer(
    mut conn: Conn,
    own: &SegmentDescriptor,
    bound: Duration,
    stop: &AtomicBool,
) -> Result<()> {
    const OPERATION: &str = "answer handshake";
    let until = Until { deadline: Instant::now() + bound, stop: Some(stop) };
    let body = receive_body(&mut conn, OPERATION, until)?;
    let request = Frame::decode_body(&body)?;
    let reply = match request.kind {
        Some(Kind::Metadata) => own.to_json(),
        Some(Kind::Notify) => {
            let notify = Notify::parse(request.json)?;
            tracing::debug!(from = notify.name, "notified by a peer");
            Notify { name: own.name.clone(), notify_msg: String::new() }.to_json()
        }
        Some(Kind::Probe) => ProbeReply::success().to_json(),
        Some(Kind::Connection) => refusal(&own.protocol),
        // The first generation tells its requests apart by what is in them.
        None => match SegmentDescriptor::parse(request.json) {
            Ok(peer) if !peer.protocol.is_empty() || !peer.buffers.is_empty() => own.to_json(),
            _ => refusal(&own.protocol),
        },
    };
    let mut out = Vec::with_capacity(reply.len() + LENGTH_BYTES + 1);
    Frame { kind: request.kind, json: &reply }.encode(&mut out);
    conn.send_all(&out, until).map_err(|e| failed(OPERATION, e))
}

fn refusal(protocol: &str) -> String {
    Connection::refuse(format!("this peer serves {protocol} only")).to_json()
}

/// Asks the peer at `session` what it says about itself.
pub(crate) fn fetch_metadata(
    session: &SessionName,
    own: &SegmentDescriptor,
    deadline: Instant,
) -> Result<SegmentDescriptor> {
    let body = ask(session, Kind::Metadata, &own.to_json(), deadline)?;
    let reply = Frame::decode_body(&body).map_err(|e| e.with("peer", session))?;
    if !matches!(reply.kind, Some(Kind::Metadata) | None) {
        return Err(Error::new(ErrorKind::Protocol, "handshake", "not a metadata reply")
            .with("peer", session));
    }
    SegmentDescriptor::parse(reply.json).map_err(|e| e.with("peer", session))
}

/// The transport by which the peer at `session` says that its memory is reached, such as `tcp` or
/// `nvlink_intra`.
///
/// # Errors
/// [`ErrorKind::PeerGone`], [`ErrorKind::Timeout`], [`ErrorKind::Protocol`].
pub fn peer_protocol(session: &SessionName, deadline: Instant) -> Result<String> {
    Ok(fetch_metadata(session, &SegmentDescriptor::default(), deadline)?.protocol)
}

/// Asks the peer at `session` whether it lives.
pub(super) fn probe(session: &SessionName, deadline: Instant) -> Result<()> {
    let body = ask(session, Kind::Probe, "{}", deadline)?;
    let reply = Frame::decode_body(&body).map_err(|e| e.with("peer", session))?;
    let status = ProbeReply::parse(reply.json).map_err(|e| e.with("peer", session))?.status;
    if status == "success" {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Unexpected, "probe peer", "the peer says that it is not well")
        .with("peer", session)
        .with("status", status.chars().take(80).collect::<String>()))
}

const NO_ANSWER: &str = "check that the peer is not stopped, and that this is its data address (the \
     session of its samples) and not another port of it; or allow more time";

fn ask(session: &SessionName, kind: Kind, json: &str, deadline: Instant) -> Result<Vec<u8>> {
    const OPERATION: &str = "handshake";
    let until = Until::at(deadline);
    let with_peer = |e: Error| e.with("peer", session);
    let stream = connect(OPERATION, session, deadline)?;
    let mut conn = Conn::new(stream).map_err(|e| with_peer(Error::io(OPERATION, e)))?;
    let mut out = Vec::with_capacity(json.len() + LENGTH_BYTES + 1);
    Frame::new(kind, json).encode(&mut out);
    conn.send(&mut [IoSlice::new(&out)], Duration::MAX, until)
        .map_err(|e| with_peer(failed(OPERATION, e)))?;
    let body = receive_body(&mut conn, OPERATION, until).map_err(|e| {
        // Other servers wait for a line that never comes.
        let silent = e.kind() == ErrorKind::Timeout;
        with_peer(if silent { e.remedy(NO_ANSWER) } else { e })
    })?;
    // The reply is here; whether the peer still listens does not matter.
    let _ = conn.stream().shutdown(Shutdown::Both);
    Ok(body)
}

fn receive_body(conn: &mut Conn, operation: &'static str, until: Until<'_>) -> Result<Vec<u8>> {
    let short = |expected: usize, found: usize| {
        Error::new(ErrorKind::PeerGone, operation, "the connection ended within a frame")
            .with("expected", expected)
            .with("found", found)
    };
    let mut length = [0; LENGTH_BYTES];
    match conn.receive_exact(&mut length, until).map_err(|e| failed(operation, e))? {
        LENGTH_BYTES => {}
        found => return Err(short(LENGTH_BYTES, found)),
    }
    let length = Frame::body_len(length, MAX_FRAME_BYTES)?;
    // Grows with what comes: a length alone reserves nothing.
    let mut body = Vec::new();
    while body.len() < length {
        let (start, step) = (body.len(), (length - body.len()).min(64 << 10));
        body.resize(start + step, 0);
        let found =
            conn.receive_exact(&mut body[start..], until).map_err(|e| failed(operation, e))?;
        if found < step {
            return Err(short(length, start + found));
        }
    }
    Ok(body)
}

fn failed(operation: &'static str, error: Errno) -> Error {
    match error {
        Errno::TIMEDOUT => timed_out(operation),
        Errno::CANCELED => Error::new(ErrorKind::Closed, operation, "the server is closing"),
        e => Error::io(operation, e.into()),
    }
}
