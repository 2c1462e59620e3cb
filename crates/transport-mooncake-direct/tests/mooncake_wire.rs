//! The tcp wire against Mooncake itself: its processes read and write ours, and ours read theirs.
#![cfg(feature = "mooncake-python")]

mod mooncake;
mod support;

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
    time::{Duration, Instant},
};

use indexmap::IndexMap;
use mooncake::{Peer, Wheel};
use serde_json::{Value, json};
use support::*;
use transport_core::{
    ArenaLocation, Descriptor, Destination, Dtype, ErrorKind, FeatureDescriptor, FeatureName,
    FetchOptions, FetchRequest, Location, RegionMut, RemoteAddr, Result, SessionName, TensorMeta,
};
use transport_mooncake_direct::{Engine, ReadOp, ReadOptions, TcpEngine, TcpOptions, WriteWindow};

with_both_wheels!(
    mooncake_reads_an_arena_and_nothing_beside_it,
    mooncake_of_the_first_protocol_version_is_served,
    mooncake_writes_only_where_it_may,
    we_read_what_mooncake_registered,
    a_refusal_of_mooncake_is_understood,
    a_trainer_fetches_what_a_mooncake_server_captured,
    a_killed_mooncake_that_comes_back_is_not_mistaken_for_its_former_self,
    names_and_addresses_of_every_form_work,
);

fn options() -> ReadOptions {
    ReadOptions::default().deadline(Instant::now() + Duration::from_secs(20))
}

fn op(address: u64, len: u64) -> ReadOp {
    ReadOp::new(RemoteAddr(address), RegionMut::zeroed(len as usize).unwrap())
}

fn session(peer: &Peer) -> SessionName {
    peer.session().parse().unwrap()
}

/// Reads ranges in one call and compares them with the pattern.
fn read(engine: &TcpEngine, peer: &SessionName, ranges: &[(u64, u64)], salt: u8) -> Result<()> {
    let mut ops: Vec<_> = ranges.iter().map(|&(address, len)| op(address, len)).collect();
    engine.read(peer, &mut ops, &options())?;
    for mut op in ops {
        let bytes = op.dst.as_mut_bytes().unwrap();
        let wrong = bytes.iter().enumerate().find(|&(at, &found)| found != byte(salt, at));
        assert!(wrong.is_none(), "{wrong:?} of {:#x}", op.address.0);
    }
    Ok(())
}

fn ask_to_read(peer: &mut Peer, from: &SessionName, address: u64, size: u64, salt: u8) -> Value {
    let from = from.to_string();
    peer.ask(json!({
        "do": "read", "session": from, "address": address, "size": size, "salt": salt
    }))
}

fn done() -> Value {
    json!({"code": 0, "equal": true})
}

fn mooncake_reads_an_arena_and_nothing_beside_it(wheel: Wheel) {
    let sink = sink(128 * MIB);
    let mut peer = Peer::start(wheel);
    let sample = publish(&sink, "a", 7, &[1000, 200_000, 64 * MIB]);
    for (i, len) in [(0, 1000), (1, 200_000), (2, 64 * MIB)] {
        let answer = ask_to_read(&mut peer, sink.session(), address(&sample, i), len, 7);
        assert_eq!(answer, done(), "tensor {i}");
    }
    // The arena is registered as a whole, as far as Mooncake knows; what is not published is not
    // served all the same.
    let first = address(&sample, 0);
    for (at, size) in [(first, 1001), (first + 1000, 1), (first + 512 * 1000, 64)] {
        let answer = ask_to_read(&mut peer, sink.session(), at, size, 7);
        assert_ne!(answer["code"], 0, "{size} bytes at {at:#x}: {answer}");
    }
    let many: Vec<_> = (0..512).map(|i| (format!("m{i}"), 9)).collect();
    let many: Vec<_> = many.iter().map(|(name, salt)| (name.as_str(), *salt)).collect();
    let described = publish_all(&sink, &many, &[4096], None);
    let addresses: Vec<_> = described.iter().map(|sample| address(sample, 0)).collect();
    let batch = json!({
        "do": "read_many", "session": sink.session().to_string(), "addresses": addresses,
        "size": 4096, "salt": 9
    });
    assert_eq!(peer.ask(batch), done());
    // Freed is gone, for Mooncake too.
    say(&mut raw(sink.control()), format!("[{:?}]", sample.keys().next().unwrap().to_string()));
    eventually("the free is applied", || {
        ask_to_read(&mut peer, sink.session(), first, 1000, 7)["code"] != 0
    });
    let probe = json!({"do": "probe", "session": sink.session().to_string()});
    assert_eq!(peer.ask(probe.clone())["code"], 0);
    sink.close_blocking();
    assert_ne!(peer.ask(probe)["code"], 0, "nobody answers");
}

fn mooncake_of_the_first_protocol_version_is_served(wheel: Wheel) {
    let sink = sink(MIB);
    let first_version = [("MC_TCP_PROTO", "1".to_owned())];
    let mut peer = Peer::start_as(wheel, "127.0.0.1", "tcp", &first_version);
    let sample = publish(&sink, "a", 7, &[1000, 200_000]);
    let (first, second) = (address(&sample, 0), address(&sample, 1));
    assert_eq!(ask_to_read(&mut peer, sink.session(), first, 1000, 7), done());
    assert_eq!(ask_to_read(&mut peer, sink.session(), second, 200_000, 7), done());
    assert_ne!(ask_to_read(&mut peer, sink.session(), first, 1001, 7)["code"], 0);
    assert_eq!(ask_to_read(&mut peer, sink.session(), first, 1000, 7), done(), "and goes on");
    let registered = peer.register(300_000, 3);
    let engine = TcpEngine::new(TcpOptions::default());
    read(&engine, &session(&peer), &[(registered, 300_000)], 3).unwrap();
}

fn mooncake_writes_only_where_it_may(wheel: Wheel) {
    let window = WriteWindow::new(RegionMut::zeroed(100_000).unwrap()).unwrap();
    let open = sink_with(MIB, |config| config.writable = Some(window.clone()));
    let mut peer = Peer::start(wheel);
    let mut write = |address: u64, size: u64, message: Option<&str>| {
        let code = peer.ask(json!({
            "do": "write", "session": open.session().to_string(), "address": address,
            "size": size, "salt": 5, "message": message
        }));
        code["code"].as_i64().unwrap()
    };
    let at = window.address().0;
    assert_eq!(write(at + 10, 90_000, None), 0);
    let expected: Vec<_> = (0..90_000).map(|i| byte(5, i)).collect();
    assert_eq!(window.read(RemoteAddr(at + 10), 90_000).unwrap(), expected);
    assert_eq!(write(at + 10, 100, Some("written")), 0, "the notification is answered too");
    assert_ne!(write(at + 10, 99_991, None), 0, "one byte too far");
    let sample = publish(&open, "a", 7, &[1000]);
    assert_ne!(write(address(&sample, 0), 1000, None), 0, "what is published is not writable");
    fetch_and_check(&consumer(Engine::Tcp), &sample, 7).unwrap();
    assert_eq!(open.data_stats().writes, 2);
}

fn we_read_what_mooncake_registered(wheel: Wheel) {
    let mut peer = Peer::start(wheel);
    let name = session(&peer);
    let large = peer.register(64 * MIB, 3);
    let engine = TcpEngine::new(TcpOptions::default());
    let deadline = Instant::now() + Duration::from_secs(10);
    engine.probe(&name, deadline).unwrap();
    let metadata = engine.metadata(&name, deadline).unwrap();
    assert_eq!((&*metadata.protocol, metadata.name.parse().ok()), ("tcp", Some(name.clone())));
    assert_eq!(metadata.tcp_proto_version, 2);
    assert!(metadata.covers(RemoteAddr(large), 64 * MIB));
    read(&engine, &name, &[(large, 64 * MIB)], 3).unwrap();
    // Ranges that start a whole number of periods apart hold the same bytes.
    let pieces: Vec<_> = (0..512).map(|i| (large + i * 251 * 400, 70_000)).collect();
    read(&engine, &name, &pieces, 3).unwrap();
    // Registered after the metadata was learned.
    let later = peer.register(5000, 4);
    read(&engine, &name, &[(later, 5000)], 4).unwrap();
    let error = read(&engine, &name, &[(large, 64 * MIB + 1)], 3).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfRange, "{error}");
    read(&engine, &name, &[(later, 5000)], 4).unwrap();
    let mut three = TcpOptions::default();
    (three.lanes, three.lane_bytes) = (3, MIB);
    let lanes = TcpEngine::new(three);
    read(&lanes, &name, &pieces, 3).unwrap();
    assert_eq!(lanes.stats().connections, 3);
}

fn a_refusal_of_mooncake_is_understood(wheel: Wheel) {
    let mut peer = Peer::start(wheel);
    let name = session(&peer);
    let (stays, goes) = (peer.register(8192, 3), peer.register(8192, 4));
    let engine = TcpEngine::new(TcpOptions::default());
    read(&engine, &name, &[(goes, 8192)], 4).unwrap();
    assert_eq!(peer.ask(json!({"do": "unregister", "address": goes})), json!({"code": 0}));
    // What is known about the peer covers the range still: it is the peer that refuses.
    let mut ops = [op(stays, 100), op(goes, 100), op(stays, 100)];
    let error = engine.read(&name, &mut ops, &options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfRange, "{error}");
    assert_eq!(error.context("operation"), Some("1"), "{error}");
    assert_eq!(error.context("status"), Some("1"), "{error}");
    read(&engine, &name, &[(stays, 8192)], 3).unwrap();
}

fn a_trainer_fetches_what_a_mooncake_server_captured(wheel: Wheel) {
    let mut peer = Peer::start(wheel);
    let tensors: Vec<_> = [(70_000, 3), (8, 3), (2 * MIB, 3)]
        .into_iter()
        .map(|(len, salt)| (peer.register(len, salt), len))
        .collect();
    // Such a server takes frees on a socket of its own, as lists of keys.
    let frees = TcpListener::bind("127.0.0.1:0").unwrap();
    let control: SessionName = frees.local_addr().unwrap().to_string().parse().unwrap();
    let features: IndexMap<_, _> = tensors
        .iter()
        .enumerate()
        .map(|(i, &(address, len))| {
            let meta = TensorMeta::new(Dtype::Uint8, [len]).unwrap();
            let feature = FeatureDescriptor::new(meta, Some(RemoteAddr(address)), None);
            (FeatureName::new(format!("t{i}")).unwrap(), feature)
        })
        .collect();
    let location = Location::Arena(ArenaLocation::new(session(&peer), control, None));
    let sample = Arc::new(Descriptor::new(key("a"), features, None, location).unwrap());
    let consumer = consumer(Engine::Tcp);
    for _ in 0..3 {
        fetch_and_check(&consumer, &sample, 3).unwrap();
    }
    let request = FetchRequest::new(sample.clone(), Destination::Pool);
    let fetched = consumer.fetch_blocking(vec![request], &FetchOptions::default()).unwrap();
    assert!(!fetched[0].staleness_checked, "a server that tells no life cannot be checked");
}

fn a_killed_mooncake_that_comes_back_is_not_mistaken_for_its_former_self(wheel: Wheel) {
    const AT: u64 = 0x6000_0000_0000;
    let ports = few_free_ports();
    let folder = tempfile::tempdir().unwrap();
    let reuse = mooncake::wheel::compile(folder.path(), "reuse.so", REUSE);
    let start = || {
        let variables = [
            ("LD_PRELOAD", reuse.display().to_string()),
            ("MC_MIN_RPC_PORT", ports[0].to_string()),
            ("MC_MAX_RPC_PORT", ports[1].to_string()),
        ];
        Peer::try_start_as(wheel, "127.0.0.1", "tcp", &variables)
    };
    let engine = TcpEngine::new(TcpOptions::default());
    let mut peer = (0..20).find_map(|_| start()).expect("it finds its two ports");
    let name = session(&peer);
    let again = || {
        let same = |peer: &Peer| session(peer) == name;
        (0..60).find_map(|_| start().filter(same)).expect("it comes back at the same address")
    };
    let at = peer.register_at(64 * 1024, 3, Some(AT));
    read(&engine, &name, &[(at, 64 * 1024)], 3).unwrap();
    for life in 4..6u8 {
        peer.kill();
        let start_of_wait = Instant::now();
        let error = read(&engine, &name, &[(at, 100)], life - 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}");
        assert!(start_of_wait.elapsed() < Duration::from_secs(10));
        peer = again();
        // The same session, the same address, the same length: other bytes.
        assert_eq!(peer.register_at(64 * 1024, life, Some(AT)), at);
        read(&engine, &name, &[(at, 64 * 1024)], life).unwrap();
    }
    // Nobody asked meanwhile: connections of the former life are still in the pool.
    peer.kill();
    peer = again();
    assert_eq!(peer.register_at(64 * 1024, 9, Some(AT)), at);
    match read(&engine, &name, &[(at, 64 * 1024)], 9) {
        Ok(()) => {} // compared: the new bytes
        Err(error) => assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}"),
    }
    read(&engine, &name, &[(at, 64 * 1024)], 9).unwrap();
}

/// First and last of three free ports, where Mooncake lets its ports be chosen: below those that
/// the system hands out. It takes two of them at random.
fn few_free_ports() -> [u16; 2] {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = 20_000 + (std::process::id() % 4000) as u16 * 2;
    let free = |port| TcpListener::bind(("0.0.0.0", port)).is_ok();
    loop {
        let first = start + NEXT.fetch_add(3, Ordering::Relaxed);
        assert!(first < 30_000, "no three neighbouring ports are free");
        if (first..first + 3).all(free) {
            return [first, first + 2];
        }
    }
}

/// Lets a process take ports whose former connections are not yet forgotten, as it could a minute
/// later.
const REUSE: &str = "
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
int bind(int socket, const struct sockaddr *address, socklen_t length) {
    int yes = 1;
    if (address->sa_family == AF_INET || address->sa_family == AF_INET6)
        setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    return (int)syscall(SYS_bind, socket, address, length);
}
";

fn names_and_addresses_of_every_form_work(wheel: Wheel) {
    let engine = TcpEngine::new(TcpOptions::default());
    let v6 = [("MC_USE_IPV6", "1".to_owned())];
    // Mooncake's argument `protocol` chooses nothing: whatever it is, tcp is what it tells.
    for (host, protocol, variables) in
        [("127.0.0.1", " TCP ", &[][..]), ("localhost", "rdma", &[]), ("[::1]", "tcp", &v6)]
    {
        let mut peer = Peer::start_as(wheel, host, protocol, variables);
        let name = session(&peer);
        let metadata = engine.metadata(&name, Instant::now() + Duration::from_secs(10)).unwrap();
        assert_eq!(metadata.protocol, "tcp", "{host} {protocol:?}");
        let at = peer.register(10_000, 3);
        read(&engine, &name, &[(at, 10_000)], 3).unwrap();

        let loopback = SocketAddr::new(IpAddr::V6(Ipv6Addr::LOCALHOST), 0);
        let sink = sink_with(MIB, |config| match host {
            "[::1]" => (config.data_bind, config.control_bind) = (loopback, loopback),
            "localhost" => config.advertise_host = Some("localhost".into()),
            _ => {}
        });
        let sample = publish(&sink, "a", 7, &[10_000]);
        let answer = ask_to_read(&mut peer, sink.session(), address(&sample, 0), 10_000, 7);
        assert_eq!(answer, done(), "{} for {host}", sink.session());
    }
}
