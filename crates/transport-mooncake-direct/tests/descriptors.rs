//! Listeners without a descriptor left. Alone in its process, whose limit it lowers.

mod support;

use std::{
    net::{SocketAddr, TcpStream},
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use rustix::{
    net::{AddressFamily, SocketType},
    process::{Resource, Rlimit, getrlimit, setrlimit},
};
use support::*;

static WARNINGS: AtomicUsize = AtomicUsize::new(0);

/// Counts what is logged as a warning.
struct Warnings;

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        WARNINGS.fetch_add(1, Ordering::Relaxed);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// A socket that needs no more descriptors to connect.
fn socket() -> TcpStream {
    rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap().into()
}

fn connect(stream: &TcpStream, address: SocketAddr) {
    rustix::net::connect(stream, &address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
}

#[test]
fn running_out_of_descriptors_is_said_seldom_and_delays_nobody_who_is_connected() {
    tracing::subscriber::set_global_default(Warnings).unwrap();
    let sink = sink(MIB);
    let session = SocketAddr::new(sink.session().host().parse().unwrap(), sink.session().port());
    let control = SocketAddr::new(sink.control().host().parse().unwrap(), sink.control().port());
    let mut connected = raw(sink.control());
    say(&mut connected, r#"{"op":"ping","id":0}"#);
    read_line(&mut connected);
    let (mut late, data) = (socket(), socket());
    let limit = getrlimit(Resource::Nofile);
    // All of which are open; `poll` takes no list that is longer than the limit.
    setrlimit(Resource::Nofile, Rlimit { current: Some(4), maximum: limit.maximum }).unwrap();
    connect(&late, control);
    connect(&data, session);

    let (start, mut slowest) = (Instant::now(), Duration::ZERO);
    while start.elapsed() < Duration::from_millis(1500) {
        let asked = Instant::now();
        say(&mut connected, r#"{"op":"ping","id":1}"#);
        assert!(read_line(&mut connected).contains("pong"));
        slowest = slowest.max(asked.elapsed());
        std::thread::sleep(Duration::from_millis(7));
    }
    setrlimit(Resource::Nofile, limit).unwrap();
    let warnings = WARNINGS.load(Ordering::Relaxed);
    assert!((2..=6).contains(&warnings), "{warnings} warnings of three listeners in 1.5 s");
    say(&mut late, r#"{"op":"ping","id":2}"#);
    assert!(read_line(&mut late).contains("pong"), "it is taken once there are descriptors again");
    data_port(sink.session()); // and so are those who read
    assert!(slowest < Duration::from_millis(250), "{slowest:?}");
}
