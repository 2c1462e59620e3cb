//! The data server against hand-written bytes: both versions, refusals, hostile input.

mod support;

use std::{
    io::{Read, Write},
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::{Duration, Instant},
};

use support::*;
use transport_core::{ErrorKind, RegionMut, RemoteAddr};
use transport_mooncake_direct::{AllowList, CaptureSink, Engine, SinkConfig, WriteWindow};

const OK: [u8; 8] = *b"\0\0\0\0VTCM";
const REJECTED: [u8; 8] = *b"\x01\0\0\0VTCM";

fn expected(salt: u8, range: std::ops::Range<usize>) -> Vec<u8> {
    range.map(|at| byte(salt, at)).collect()
}

#[test]
fn metadata_says_what_mooncake_peers_need() {
    let sink = sink(MIB);
    let reply = handshake(sink.session(), &frame(Some(1), r#"{"name":"x","protocol":"tcp"}"#));
    assert_eq!(reply[0], 1);
    let metadata: serde_json::Value = serde_json::from_slice(&reply[1..]).unwrap();
    assert_eq!(metadata["name"], sink.session().to_string());
    assert_eq!(metadata["protocol"], "tcp");
    assert_eq!(metadata["tcp_proto_version"], 2);
    assert_eq!(metadata["buffers"][0]["addr"], sink.arena().base().0);
    assert_eq!(metadata["buffers"][0]["length"], MIB);
    assert_eq!(metadata["featurestore_epoch"], sink.arena().epoch().0);
}

#[test]
fn probes_notifications_and_old_frames_are_answered_alike() {
    let sink = sink(MIB);
    let reply = handshake(sink.session(), &frame(Some(3), "{}"));
    assert_eq!(reply, b"\x03{\"status\":\"success\"}");
    let reply = handshake(sink.session(), &frame(Some(2), r#"{"name":"a","notify_msg":"b"}"#));
    assert_eq!(reply[0], 2);
    // Queue pairs are refused with a reason, and frames without a type byte come back without.
    let connection = r#"{"local_nic_path":"a@b","qp_num":[1]}"#;
    for (request, at) in [(frame(Some(0), connection), 1), (frame(None, connection), 0)] {
        let reply = handshake(sink.session(), &request);
        let json: serde_json::Value = serde_json::from_slice(&reply[at..]).unwrap();
        assert!(json["reply_msg"].as_str().unwrap().contains("tcp"), "{json}");
    }
    let old = handshake(sink.session(), &frame(None, r#"{"protocol":"tcp","buffers":[]}"#));
    assert_eq!(old[0], b'{');
}

#[test]
fn both_versions_are_served_mixed_and_ahead_of_their_answers() {
    let sink = sink(MIB);
    let sample = publish(&sink, "a", 7, &[1000, 70_000]);
    let mut stream = raw(data_port(sink.session()));
    // A header in two pieces, then several at once.
    let first = header(1000, address(&sample, 0), 0);
    stream.write_all(&first[..5]).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    stream.write_all(&first[5..]).unwrap();
    assert_eq!(read_n(&mut stream, 1000), expected(7, 0..1000));
    let mut many = Vec::new();
    for i in 0..200u64 {
        let opcode = if i % 2 == 0 { 0x80 } else { 0 };
        many.extend(header(100, address(&sample, 1) + i * 300, opcode));
    }
    stream.write_all(&many).unwrap();
    for i in 0..200 {
        if i % 2 == 0 {
            assert_eq!(read_n(&mut stream, 8), OK);
        }
        assert_eq!(read_n(&mut stream, 100), expected(7, i * 300..i * 300 + 100), "{i}");
    }
    // Counted once sent, which the reader may learn first.
    eventually("all are counted", || sink.data_stats().reads == 201);
    let stats = sink.data_stats();
    assert_eq!((stats.read_bytes, stats.rejected), (21_000, 0));
}

#[test]
fn only_published_ranges_are_served() {
    let sink = sink(MIB);
    let sample = publish(&sink, "a", 7, &[1000, 1000]);
    let (first, port) = (address(&sample, 0), data_port(sink.session()));
    let mut stream = raw(port);
    for (size, at) in [
        (1001, first),          // into the padding
        (1, first + 1000),      // in the padding
        (1100, first),          // into the neighbour
        (1, first - 1),         // before the arena
        (8, first + 512 * 100), // nothing there
        (1, 0),
        (1, u64::MAX - 1),
    ] {
        stream.write_all(&header(size, at, 0x80)).unwrap();
        assert_eq!(read_n(&mut stream, 8), REJECTED, "{size} at {at:#x}");
    }
    stream.write_all(&header(10, first + 990, 0x80)).unwrap();
    assert_eq!(read_n(&mut stream, 18)[8..], expected(7, 990..1000), "the connection goes on");
    // Version 1 knows no other refusal than the end.
    let mut old = raw(port);
    old.write_all(&header(1001, first, 0)).unwrap();
    assert!(ends(&mut old));
    // What is freed is not served any more.
    let control = &mut raw(sink.control());
    say(control, format!("[\"{}\",\"{}\"]", sample.keys().next().unwrap(), "no/such/g1/key"));
    eventually("the free is applied", || {
        stream.write_all(&header(10, first, 0x80)).unwrap();
        let status = read_n(&mut stream, 8);
        if status == OK {
            read_n(&mut stream, 10);
        }
        status == REJECTED
    });
}

#[test]
fn absurd_headers_end_the_connection_and_nothing_else() {
    let sink = sink(MIB);
    let sample = publish(&sink, "a", 7, &[1000]);
    let port = data_port(sink.session());
    for (size, at, opcode) in [
        (u64::MAX, address(&sample, 0), 0x80),
        (u64::MAX, 0, 0x80),
        (1 << 40, u64::MAX - 5, 0x80),
        (8, address(&sample, 0), 0x83),
        (8, address(&sample, 0), 0x03),
        (u64::MAX, 0, 0x81),
    ] {
        let mut stream = raw(port);
        stream.write_all(&header(size, at, opcode)).unwrap();
        if opcode & 0x80 != 0 {
            assert_eq!(read_n(&mut stream, 8), REJECTED);
        }
        assert!(ends(&mut stream), "{size:#x} {at:#x} {opcode:#x}");
    }
    let mut stream = raw(port);
    stream.write_all(&header(8, address(&sample, 0), 0)).unwrap();
    assert_eq!(read_n(&mut stream, 8), expected(7, 0..8));
    eventually("all are counted", || sink.data_stats().protocol_errors == 6);
}

#[test]
fn writes_are_refused_unless_there_is_a_window() {
    let closed = sink(MIB);
    let sample = publish(&closed, "a", 7, &[1000]);
    let port = data_port(closed.session());
    let mut stream = raw(port);
    stream.write_all(&header(100_000, address(&sample, 0), 0x81)).unwrap();
    stream.write_all(&vec![9; 100_000]).unwrap();
    assert_eq!(read_n(&mut stream, 8), REJECTED);
    stream.write_all(&header(10, address(&sample, 0), 0x80)).unwrap();
    assert_eq!(read_n(&mut stream, 18)[8..], expected(7, 0..10), "unchanged");
    let mut old = raw(port);
    old.write_all(&header(4, address(&sample, 0), 1)).unwrap();
    assert!(ends(&mut old));

    let window = WriteWindow::new(RegionMut::zeroed(200_000).unwrap()).unwrap();
    let open = sink_with(MIB, |config| config.writable = Some(window.clone()));
    let at = window.address().0;
    let mut stream = raw(data_port(open.session()));
    let body: Vec<u8> = (0..100_000).map(|i| i as u8).collect();
    stream.write_all(&header(100_000, at + 50, 0x81)).unwrap();
    stream.write_all(&body).unwrap();
    assert_eq!(read_n(&mut stream, 8), OK);
    stream.write_all(&header(3, at, 1)).unwrap();
    stream.write_all(b"abc").unwrap();
    stream.write_all(&header(200_001, at, 0x81)).unwrap();
    stream.write_all(&vec![1; 200_001]).unwrap();
    assert_eq!(read_n(&mut stream, 8), REJECTED);
    assert_eq!(window.read(RemoteAddr(at + 50), 100_000).unwrap(), body);
    assert_eq!(window.read(RemoteAddr(at), 4).unwrap(), b"abc\0");
    assert_eq!(open.data_stats().writes, 2);
}

#[test]
fn noise_on_the_handshake_port_harms_nobody() {
    let sink = sink_with(MIB, |config| config.data_stall = Duration::from_millis(300));
    for noise in [
        &b"\xff\xff\xff\xff\xff\xff\xff\xff"[..],
        b"\0\0\0\0\0\0\0\0",
        b"\x05\0\0\0\0\0\0\0\x09junk",
        b"\x03\0\0\0\0\0\0\0\x01{",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x10\x00\x00\x00\x00\x00only the beginning",
        b"abc",
    ] {
        let mut stream = raw(sink.session());
        stream.write_all(noise).unwrap();
        assert!(ends(&mut stream), "{noise:?}");
    }
    assert_eq!(handshake(sink.session(), &frame(Some(3), "{}"))[0], 3);
    // Silence does not keep a place for ever either.
    let silent: Vec<_> = (0..40).map(|_| raw(sink.session())).collect();
    eventually("silent peers are sent away", || {
        let mut stream = raw(sink.session());
        let sent = stream.write_all(&frame(Some(3), "{}")).is_ok();
        let mut reply = [0; 8];
        sent && stream.read_exact(&mut reply).is_ok()
    });
    drop(silent);
}

#[test]
fn idle_and_stalling_connections_are_closed() {
    let sink = sink_with(64 * MIB, |config| {
        config.data_idle = Duration::from_millis(200);
        config.data_stall = Duration::from_millis(300);
    });
    let sample = publish(&sink, "a", 7, &[32 * MIB]);
    let port = data_port(sink.session());
    // Never asks, stops within a header, falls silent after an answer.
    let mut silent = raw(port);
    let mut torn = raw(port);
    torn.write_all(&header(1, address(&sample, 0), 0)[..10]).unwrap();
    let mut idle = raw(port);
    idle.write_all(&header(1, address(&sample, 0), 0)).unwrap();
    read_n(&mut idle, 1);
    let start = Instant::now();
    assert!(ends(&mut silent) && ends(&mut torn) && ends(&mut idle));
    assert!(start.elapsed() < Duration::from_secs(5));
    // Asks for much and reads nothing: its pin must not last.
    let mut slow = raw(port);
    slow.write_all(&header(32 * MIB, address(&sample, 0), 0)).unwrap();
    say(&mut raw(sink.control()), format!("[\"{}\"]", sample.keys().next().unwrap()));
    eventually("the range comes back", || {
        sink.health_blocking().unwrap().arena_free_bytes == 64 * MIB
    });
    assert_eq!(sink.health_blocking().unwrap().resident_samples, 0);
}

#[test]
fn connections_are_bounded_and_addresses_checked() {
    let few = sink_with(MIB, |config| config.max_data_connections = 3);
    let port = data_port(few.session());
    let _held: Vec<_> = (0..3).map(|_| raw(port)).collect();
    eventually("all three are taken", || few.data_stats().connections == 3);
    assert!(ends(&mut raw(port)));
    assert_eq!(few.data_stats().refused_connections, 1);

    let blocks = vec!["10.0.0.0/8".parse().unwrap()];
    let shut = sink_with(MIB, |config| config.allow = AllowList::new(blocks));
    for port in [shut.session(), shut.control()] {
        assert!(ends(&mut raw(port)), "{port}");
    }
    eventually("both are counted", || {
        shut.data_stats().refused_connections == 1 && shut.control_stats().refused_connections == 1
    });
    let blocks = vec!["127.0.0.0/8".parse().unwrap()];
    let open = sink_with(MIB, |config| config.allow = AllowList::new(blocks));
    assert_eq!(handshake(open.session(), &frame(Some(3), "{}"))[0], 3);
}

#[test]
fn ipv6_is_served_like_ipv4() {
    let loopback = SocketAddr::new(IpAddr::V6(Ipv6Addr::LOCALHOST), 0);
    let sink = sink_with(MIB, |config| {
        (config.data_bind, config.control_bind) = (loopback, loopback);
    });
    assert!(sink.session().to_string().starts_with("[::1]:"));
    for engine in [Engine::Tcp, Engine::Shm] {
        let sample = publish(&sink, engine.name(), 7, &[1000, 5]);
        fetch_and_check(&consumer(engine), &sample, 7).unwrap();
    }
}

#[test]
fn a_port_that_is_taken_is_named_with_a_remedy() {
    let first = sink(MIB);
    for what in ["data", "control"] {
        let mut config = SinkConfig::default();
        match what {
            "data" => config.data_bind.set_port(first.session().port()),
            _ => config.control_bind.set_port(first.control().port()),
        }
        let error = CaptureSink::start(arena(MIB), config).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{error}");
        assert!(error.to_string().contains("another process has the port"), "{error}");
        assert!(error.context("address").is_some());
    }
    // An address that says nothing to peers needs a name.
    let mut config = SinkConfig::default();
    config.data_bind = "0.0.0.0:0".parse().unwrap();
    let error = CaptureSink::start(arena(MIB), config).unwrap_err();
    assert!(error.to_string().contains("advertised host"), "{error}");
}
