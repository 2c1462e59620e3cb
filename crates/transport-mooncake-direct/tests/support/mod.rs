//! What the tests share: a publisher in this process, samples, and raw sockets with deadlines.
#![allow(dead_code, unreachable_pub)] // each test binary uses its part

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{Arena, ArenaConfig, Backing, ReserveOptions, SamplePlan};
use transport_core::{
    ClientId, Descriptor, Destination, Dtype, FeatureName, FetchOptions, FetchRequest, Generation,
    SampleId, SampleKey, SessionName, StoreId, TensorMeta,
};
use transport_mooncake_direct::{CaptureSink, DirectTransport, Engine, SinkConfig};

pub const MIB: u64 = 1 << 20;

pub fn arena(bytes: u64) -> Arena {
    Arena::start(Backing::shared(bytes).unwrap(), ArenaConfig::default()).unwrap()
}

pub fn sink_with(bytes: u64, configure: impl FnOnce(&mut SinkConfig)) -> CaptureSink {
    let mut config = SinkConfig::default();
    configure(&mut config);
    CaptureSink::start(arena(bytes), config).unwrap()
}

pub fn sink(bytes: u64) -> CaptureSink {
    sink_with(bytes, |_| {})
}

pub fn key(sample: &str) -> SampleKey {
    SampleKey::new(StoreId::new("test").unwrap(), SampleId::new(sample).unwrap(), Generation(1))
}

/// The byte at `at` of a tensor whose data follow from `salt`.
pub fn byte(salt: u8, at: usize) -> u8 {
    salt.wrapping_mul(31).wrapping_add((at % 251) as u8)
}

/// Publishes samples of byte tensors of these lengths.
pub fn publish_all(
    sink: &CaptureSink,
    samples: &[(&str, u8)],
    lengths: &[u64],
    holder: Option<&ClientId>,
) -> Vec<Arc<Descriptor>> {
    let plans = samples
        .iter()
        .map(|(name, _)| SamplePlan {
            sample: key(name),
            objects: lengths
                .iter()
                .enumerate()
                .map(|(i, &len)| {
                    let meta = TensorMeta::new(Dtype::Uint8, [len]).unwrap();
                    (FeatureName::new(format!("t{i}")).unwrap(), meta)
                })
                .collect(),
            holder: holder.cloned(),
        })
        .collect();
    let options = ReserveOptions::default().replace(true).deadline(Duration::from_secs(20));
    let mut reservation = sink.reserve_blocking(plans, options).unwrap();
    for (i, &(_, salt)) in samples.iter().enumerate() {
        for j in 0..lengths.len() {
            for (at, to) in reservation.bytes_mut(i, j).iter_mut().enumerate() {
                *to = byte(salt, at);
            }
        }
    }
    reservation.publish_blocking().unwrap().into_iter().map(Arc::new).collect()
}

pub fn publish(sink: &CaptureSink, sample: &str, salt: u8, lengths: &[u64]) -> Arc<Descriptor> {
    publish_all(sink, &[(sample, salt)], lengths, None).remove(0)
}

pub fn consumer(engine: Engine) -> DirectTransport {
    let pool = capture_arena::RegionPool::new(Backing::heap(64 * MIB).unwrap()).unwrap();
    DirectTransport::builder()
        .engine(engine)
        .pool(pool)
        .lease(Duration::from_secs(10))
        .build()
        .unwrap()
}

/// Fetches into the pool and compares.
pub fn fetch_and_check(
    consumer: &DirectTransport,
    descriptor: &Arc<Descriptor>,
    salt: u8,
) -> transport_core::Result<()> {
    let request = FetchRequest::new(descriptor.clone(), Destination::Pool);
    let options = FetchOptions::default().deadline(Duration::from_secs(10));
    let fetched = consumer.fetch_blocking(vec![request], &options)?;
    for (name, tensor) in &fetched[0].tensors {
        let wrong = tensor.data.as_ref().iter().enumerate().find(|&(at, &b)| b != byte(salt, at));
        assert!(wrong.is_none(), "{}/{name}: {wrong:?}", descriptor.sample);
    }
    Ok(())
}

pub fn view(
    consumer: &DirectTransport,
    sample: &Arc<transport_core::Descriptor>,
) -> transport_core::Result<transport_core::Fetched> {
    let request = FetchRequest::new(sample.clone(), Destination::View);
    let options = FetchOptions::default().deadline(Duration::from_secs(10));
    consumer.fetch_blocking(vec![request], &options).map(|mut fetched| fetched.remove(0))
}

/// Waits until `done`, at most 10 seconds.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < deadline, "{what}: not within 10 s");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A raw connection whose every read and write ends within 10 seconds.
pub fn raw(address: impl Into<RawAddress>) -> TcpStream {
    let RawAddress(address) = address.into();
    let stream = TcpStream::connect_timeout(&address, Duration::from_secs(5)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}

pub struct RawAddress(SocketAddr);

impl From<&SessionName> for RawAddress {
    fn from(name: &SessionName) -> Self {
        Self(SocketAddr::new(name.host().parse().unwrap(), name.port()))
    }
}

impl From<SocketAddr> for RawAddress {
    fn from(address: SocketAddr) -> Self {
        Self(address)
    }
}

pub fn read_n(stream: &mut TcpStream, n: usize) -> Vec<u8> {
    let mut bytes = vec![0; n];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// Whether the peer ends the connection without another byte.
pub fn ends(stream: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => rest.is_empty(),
        Err(e) => e.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

pub fn read_line(stream: &mut TcpStream) -> String {
    let mut line = Vec::new();
    let mut byte = [0];
    loop {
        stream.read_exact(&mut byte).unwrap();
        if byte[0] == b'\n' {
            return String::from_utf8(line).unwrap();
        }
        line.push(byte[0]);
    }
}

pub fn say(stream: &mut TcpStream, line: impl AsRef<[u8]>) {
    stream.write_all(line.as_ref()).unwrap();
    stream.write_all(b"\n").unwrap();
}

/// A 24-byte request header, written by hand.
pub fn header(size: u64, address: u64, opcode: u8) -> [u8; 24] {
    let mut bytes = [0; 24];
    bytes[..8].copy_from_slice(&size.to_le_bytes());
    bytes[8..16].copy_from_slice(&address.to_le_bytes());
    bytes[16] = opcode;
    bytes
}

/// A handshake frame, written by hand.
pub fn frame(kind: Option<u8>, json: &str) -> Vec<u8> {
    let mut bytes = ((json.len() + usize::from(kind.is_some())) as u64).to_le_bytes().to_vec();
    bytes.extend(kind);
    bytes.extend_from_slice(json.as_bytes());
    bytes
}

/// Sends one handshake frame and returns the body of the reply, type byte included.
pub fn handshake(session: &SessionName, request: &[u8]) -> Vec<u8> {
    let mut stream = raw(session);
    stream.write_all(request).unwrap();
    let length = u64::from_le_bytes(read_n(&mut stream, 8).try_into().unwrap());
    assert!(length < 1 << 20);
    read_n(&mut stream, length as usize)
}

/// Where the data port of a session is.
pub fn data_port(session: &SessionName) -> SocketAddr {
    let reply = handshake(session, &frame(Some(1), "{}"));
    let metadata: serde_json::Value = serde_json::from_slice(&reply[1..]).unwrap();
    let host = metadata["tcp_data_host"].as_str().unwrap().parse().unwrap();
    SocketAddr::new(host, metadata["tcp_data_port"].as_u64().unwrap() as u16)
}

pub fn address(descriptor: &Descriptor, tensor: usize) -> u64 {
    descriptor.features[tensor].address.unwrap().0
}
