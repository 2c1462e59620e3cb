//! The tcp engine against hand-written peers, some of which break the rules.

mod support;

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use support::*;
use transport_core::{ErrorKind, RegionMut, RemoteAddr, SessionName};
use transport_mooncake_direct::{ReadOp, ReadOptions, TcpEngine, TcpOptions};

/// What the peer does with one data connection.
type Script = dyn Fn(&mut TcpStream, usize) + Send + Sync;

/// A peer with a handshake port and a data port, ended on drop.
struct FakePeer {
    session: SessionName,
    ports: [SocketAddr; 2],
    stop: Arc<AtomicBool>,
    handshakes: Arc<AtomicUsize>,
    connections: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<()>>,
}

impl FakePeer {
    fn start(version: u32, script: impl Fn(&mut TcpStream, usize) + Send + Sync + 'static) -> Self {
        let data = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = data.local_addr().unwrap().port();
        let version = match version {
            1 => String::new(), // absent means 1
            version => format!(r#","tcp_proto_version":{version}"#),
        };
        let metadata = format!(
            r#"{{"buffers":[{{"addr":4096,"length":1048576,"name":"x"}}],"name":"fake","protocol":"tcp","rdma_server_name":"","tcp_data_port":{port}{version},"timestamp":"now","later":[1]}}"#
        );
        Self::with_metadata(data, metadata, script)
    }

    fn with_metadata(
        data: TcpListener,
        metadata: String,
        script: impl Fn(&mut TcpStream, usize) + Send + Sync + 'static,
    ) -> Self {
        let session_listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let session = session_listener.local_addr().unwrap();
        let ports = [session, data.local_addr().unwrap()];
        let stop = Arc::new(AtomicBool::new(false));
        let handshakes = Arc::new(AtomicUsize::new(0));
        let connections = Arc::new(AtomicUsize::new(0));
        let script: Arc<Script> = Arc::new(script);
        let mut threads = Vec::new();
        let (ended, counted) = (stop.clone(), handshakes.clone());
        threads.push(std::thread::spawn(move || {
            for stream in session_listener.incoming() {
                if ended.load(Ordering::SeqCst) {
                    return;
                }
                counted.fetch_add(1, Ordering::SeqCst);
                let mut stream = stream.unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
                let mut length = [0; 8];
                if stream.read_exact(&mut length).is_ok() {
                    let mut body = vec![0; u64::from_le_bytes(length) as usize];
                    stream.read_exact(&mut body).unwrap();
                    stream.write_all(&frame(Some(body[0]), &metadata)).unwrap();
                }
            }
        }));
        let (ended, counted) = (stop.clone(), connections.clone());
        threads.push(std::thread::spawn(move || {
            let mut serving = Vec::new();
            for stream in data.incoming() {
                if ended.load(Ordering::SeqCst) {
                    break;
                }
                let (mut stream, script) = (stream.unwrap(), script.clone());
                stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
                let nth = counted.fetch_add(1, Ordering::SeqCst);
                serving.push(std::thread::spawn(move || script(&mut stream, nth)));
            }
            serving.into_iter().for_each(|t| t.join().unwrap());
        }));
        Self { session: session.into(), ports, stop, handshakes, connections, threads }
    }
}

impl FakePeer {
    /// Stops answering handshakes, as a process that dies does. Data connections go on.
    fn stop_answering(&self) {
        self.stop.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.ports[0]));
        let gone = || TcpStream::connect(self.ports[0]).is_err();
        eventually("the handshake port is closed", gone);
    }
}

impl Drop for FakePeer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.ports.iter().for_each(|port| drop(TcpStream::connect(port)));
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

fn request(stream: &mut TcpStream) -> Option<(u64, u64, u8)> {
    let mut header = [0; 24];
    stream.read_exact(&mut header).ok()?;
    let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap());
    assert!(header[17..].iter().all(|&b| b == 0));
    Some((number(0), number(8), header[16]))
}

/// Answers every read with bytes that follow from the address.
fn serve_all(stream: &mut TcpStream, v2: bool) {
    while let Some((size, address, opcode)) = request(stream) {
        assert_eq!(opcode, if v2 { 0x80 } else { 0 });
        if v2 {
            stream.write_all(b"\0\0\0\0VTCM").unwrap();
        }
        let body: Vec<u8> = (0..size).map(|i| (address + i) as u8).collect();
        if stream.write_all(&body).is_err() {
            return;
        }
    }
}

fn op(address: u64, len: usize) -> ReadOp {
    ReadOp::new(RemoteAddr(address), RegionMut::zeroed(len).unwrap())
}

fn within(ms: u64) -> ReadOptions {
    ReadOptions::default().deadline(Instant::now() + Duration::from_millis(ms))
}

fn check(ops: &mut [ReadOp]) {
    for op in ops {
        let start = op.address.0;
        let bytes = op.dst.as_mut_bytes().unwrap();
        assert!(bytes.iter().enumerate().all(|(i, &b)| b == (start + i as u64) as u8));
    }
}

#[test]
fn both_versions_are_spoken_as_the_peer_says() {
    for version in [1, 2] {
        let peer = FakePeer::start(version, move |stream, _| serve_all(stream, version == 2));
        let engine = TcpEngine::new(TcpOptions::default());
        let mut ops: Vec<_> = (0..500).map(|i| op(4096 + i * 1000, 1 + i as usize * 2)).collect();
        ops.push(op(4096, 0)); // nothing to ask for
        ops.push(op(4096, 1 << 20));
        engine.read(&peer.session, &mut ops, &within(10_000)).unwrap();
        check(&mut ops);
        engine.read(&peer.session, &mut ops[..3], &within(10_000)).unwrap();
        assert_eq!(peer.connections.load(Ordering::SeqCst), 1, "one connection, reused");
        assert_eq!(engine.stats().reads, 505);
    }
}

#[test]
fn neighbours_of_one_object_cost_one_request() {
    let peer = FakePeer::start(2, |stream, _| {
        let mut sizes = Vec::new();
        while let Some((size, address, _)) = request(stream) {
            sizes.push(size);
            stream.write_all(b"\0\0\0\0VTCM").unwrap();
            let body: Vec<u8> = (0..size).map(|i| (address + i) as u8).collect();
            stream.write_all(&body).unwrap();
        }
        assert_eq!(sizes, [300, 100]);
    });
    let engine = TcpEngine::new(TcpOptions::default());
    let mut ops: Vec<_> = (0..4).map(|i| op(5000 + i * 100, 100)).collect();
    (ops[1].same_object, ops[2].same_object) = (true, true);
    engine.read(&peer.session, &mut ops, &within(10_000)).unwrap();
    check(&mut ops);
    engine.close();
}

#[test]
fn large_batches_use_several_connections() {
    let peer = FakePeer::start(2, |stream, _| serve_all(stream, true));
    let mut options = TcpOptions::default();
    (options.lanes, options.lane_bytes) = (3, 1 << 20);
    let engine = TcpEngine::new(options);
    for _ in 0..3 {
        let mut ops: Vec<_> = (0..40).map(|i| op(4096 + i, 1_000_000)).collect();
        engine.read(&peer.session, &mut ops, &within(20_000)).unwrap();
        check(&mut ops);
    }
    let connections = peer.connections.load(Ordering::SeqCst);
    assert!((2..=3).contains(&connections), "{connections}");
    engine.close();
    assert_eq!(engine.stats().connections, 0);
    let error = engine.read(&peer.session, &mut [op(4096, 1)], &within(1000)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
}

#[test]
fn a_refusal_names_the_operation_and_costs_the_connection() {
    let peer = FakePeer::start(2, |stream, _| {
        while let Some((size, address, _)) = request(stream) {
            if address == 9000 {
                stream.write_all(b"\x01\0\0\0VTCM").unwrap();
            } else {
                stream.write_all(b"\0\0\0\0VTCM").unwrap();
                stream.write_all(&vec![1; size as usize]).unwrap();
            }
        }
    });
    let engine = TcpEngine::new(TcpOptions::default());
    let mut ops = [op(4096, 10), op(5000, 10), op(9000, 7), op(6000, 10)];
    let error = engine.read(&peer.session, &mut ops, &within(5000)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfRange, "{error}");
    assert_eq!(error.context("operation"), Some("2"));
    assert_eq!(error.context("address"), Some("0x2328"));
    assert_eq!(engine.stats().connections, 0, "in an unknown state, so not kept");
    engine.read(&peer.session, &mut [op(4096, 10)], &within(5000)).unwrap();
    // Outside of what the peer says it has, nothing is even sent.
    let handshakes = peer.handshakes.load(Ordering::SeqCst);
    let error = engine.read(&peer.session, &mut [op(1 << 30, 1)], &within(5000)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfRange);
    assert_eq!(peer.handshakes.load(Ordering::SeqCst), handshakes + 1, "asked once more");
}

#[test]
fn a_short_answer_of_a_living_peer_names_expected_and_found() {
    let peer = FakePeer::start(2, |stream, _| {
        if request(stream).is_some() {
            stream.write_all(b"\0\0\0\0VTCM").unwrap();
            stream.write_all(&[7; 600]).unwrap();
        }
    });
    let engine = TcpEngine::new(TcpOptions::default());
    let error = engine.read(&peer.session, &mut [op(4096, 1000)], &within(5000)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ShortRead, "{error}");
    assert_eq!((error.context("expected"), error.context("found")), (Some("1000"), Some("600")));
}

#[test]
fn nonsense_instead_of_a_status_is_a_protocol_error() {
    let peer = FakePeer::start(2, |stream, _| {
        while request(stream).is_some() {
            let _ = stream.write_all(&[0x55; 2000]);
        }
    });
    let engine = TcpEngine::new(TcpOptions::default());
    let error = engine.read(&peer.session, &mut [op(4096, 1000)], &within(5000)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert_eq!(engine.stats().connections, 0);
}

#[test]
fn a_connection_that_the_peer_closed_while_idle_is_replaced_unseen() {
    // Each connection serves two reads and is closed.
    let peer = FakePeer::start(1, |stream, _| {
        for _ in 0..2 {
            let Some((size, address, _)) = request(stream) else { return };
            let body: Vec<u8> = (0..size).map(|i| (address + i) as u8).collect();
            stream.write_all(&body).unwrap();
        }
    });
    let engine = TcpEngine::new(TcpOptions::default());
    for _ in 0..10 {
        let mut ops = [op(4100, 100)];
        engine.read(&peer.session, &mut ops, &within(5000)).unwrap();
        check(&mut ops);
    }
}

#[test]
fn deadlines_hold_for_silent_peers_and_dripping_ones() {
    let peer = FakePeer::start(1, |stream, nth| {
        if request(stream).is_none() {
            return;
        }
        for _ in 0..200 {
            if nth % 2 == 1 && stream.write_all(b"x").is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let engine = TcpEngine::new(TcpOptions::default());
    for _ in 0..2 {
        let start = Instant::now();
        let error = engine.read(&peer.session, &mut [op(4096, 1000)], &within(150)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(start.elapsed() < Duration::from_millis(1500), "{:?}", start.elapsed());
    }
    // And a read that is given up ends soon.
    let stop = Arc::new(AtomicBool::new(false));
    let options = within(20_000).stop(stop.clone());
    let (session, engine) = (peer.session.clone(), engine.clone());
    let read = std::thread::spawn(move || engine.read(&session, &mut [op(4096, 1000)], &options));
    std::thread::sleep(Duration::from_millis(100));
    let start = Instant::now();
    stop.store(true, Ordering::SeqCst);
    assert!(read.join().unwrap().is_err());
    assert!(start.elapsed() < Duration::from_secs(1));
}

#[test]
fn peers_without_a_data_port_or_with_noise_for_metadata_are_named() {
    for (metadata, kind, word) in [
        (r#"{"protocol":"rdma","buffers":[]}"#, ErrorKind::Unsupported, "data port"),
        ("{", ErrorKind::Protocol, "JSON"),
        (
            r#"{"buffers":[{"addr":1,"length":18446744073709551615}]}"#,
            ErrorKind::Protocol,
            "buffer",
        ),
    ] {
        let data = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = FakePeer::with_metadata(data, metadata.into(), |_, _| {});
        let engine = TcpEngine::new(TcpOptions::default());
        let error = engine.read(&peer.session, &mut [op(4096, 1)], &within(5000)).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(word), "{error}");
        assert_eq!(error.context("peer"), Some(&*peer.session.to_string()));
    }
}

#[test]
fn connections_to_a_peer_are_bounded() {
    let release = Arc::new(AtomicBool::new(false));
    let held = release.clone();
    let peer = FakePeer::start(1, move |stream, _| {
        while let Some((size, ..)) = request(stream) {
            while !held.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(5));
            }
            stream.write_all(&vec![0; size as usize]).unwrap();
        }
    });
    let mut options = TcpOptions::default();
    options.max_connections = 2;
    let engine = TcpEngine::new(options);
    std::thread::scope(|scope| {
        let reads: Vec<_> = (0..2)
            .map(|_| scope.spawn(|| engine.read(&peer.session, &mut [op(4096, 1)], &within(8000))))
            .collect();
        eventually("both wait", || peer.connections.load(Ordering::SeqCst) == 2);
        let error = engine.read(&peer.session, &mut [op(4096, 1)], &within(8000)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        release.store(true, Ordering::SeqCst);
        reads.into_iter().for_each(|read| read.join().unwrap().unwrap());
    });
}

#[test]
fn a_peer_that_dies_within_a_read_is_gone() {
    let (half, died) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (sent, dead) = (half.clone(), died.clone());
    let peer = FakePeer::start(2, move |stream, _| {
        if request(stream).is_none() {
            return;
        }
        stream.write_all(b"\0\0\0\0VTCM").unwrap();
        stream.write_all(&[7; 500]).unwrap();
        sent.store(true, Ordering::SeqCst);
        eventually("it may die", || dead.load(Ordering::SeqCst));
    });
    let engine = TcpEngine::new(TcpOptions::default());
    std::thread::scope(|scope| {
        let read = scope.spawn(|| engine.read(&peer.session, &mut [op(4096, 1000)], &within(8000)));
        eventually("half of it came", || half.load(Ordering::SeqCst));
        peer.stop_answering();
        died.store(true, Ordering::SeqCst);
        let error = read.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}");
    });
    assert_eq!(engine.stats().connections, 0);
}

#[test]
fn our_own_peers_say_why_even_where_the_first_answer_could_not() {
    let sink = sink(MIB);
    let sample = publish(&sink, "a", 7, &[1000, 1000]);
    let engine = TcpEngine::new(TcpOptions::default());
    let at = address(&sample, 0);
    let mut ops = [op(at, 1000), op(at + 512, 488), op(at, 1001), op(at + 1024, 1000)];
    let error = engine.read(sink.session(), &mut ops, &within(5000)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfRange, "{error}");
    assert_eq!(error.context("operation"), Some("2"));
    engine.read(sink.session(), &mut ops[..2], &within(5000)).unwrap();
    let (first, second) = (ops[0].dst.as_mut_bytes().unwrap()[999], 999);
    assert_eq!(first, byte(7, second));
    let stale = within(5000).epoch(Some(transport_core::Epoch(1)));
    let error = engine.read(sink.session(), &mut ops[..1], &stale).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
    assert_eq!(error.context("expected"), Some("1"));
}
