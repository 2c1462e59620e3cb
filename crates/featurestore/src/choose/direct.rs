//! Whether and how the engines of the direct transport reach the servers.

use std::{
    io::{Read, Write},
    net::{TcpStream, ToSocketAddrs},
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{Backing, MappedBacking, RegionPool, SharedHandle};
use control_proto::control::{
    Code, Hello, Limits, Response, ServerHello, ShmInfo, write_bye, write_hello,
};
use transport_core::{
    ByteSize, ClientId, Error, ErrorKind, MapMark, Result, SessionName, Transport,
};
use transport_mooncake_direct::{DirectTransport, DirectTransportBuilder, Engine, peer_protocol};

use super::{
    Choice, DEFAULT_POOL, Finding, Probe,
    device::{self, Devices, Reader},
    receive::OnDevice,
};
use crate::config::{Config, Receive};

/// Protocols of memory that only devices read.
const OF_DEVICES: [&str; 3] = ["nvlink_intra", "nvlink", "featurestore_fd"];

/// Longest time that one server may take to answer a probe.
const PROBE: Duration = Duration::from_secs(5);

/// A server that answered.
#[derive(Clone, Debug)]
pub(super) struct Server {
    /// Its control address.
    pub(super) control: SessionName,
    /// What it said; nothing if it is an older one.
    pub(super) hello: Option<ServerHello>,
    /// By which protocol devices read its arena; none if that is host memory.
    pub(super) protocol: Option<String>,
}

/// Puts the chosen engine together, and announces this client. `reader` and `receiver` are what the
/// survey has opened.
pub(super) async fn connect(
    config: &Config,
    servers: &[SessionName],
    client: &ClientId,
    choice: &Choice,
    reader: Option<Reader>,
    receiver: Option<OnDevice>,
) -> Result<Arc<dyn Transport>> {
    let mut builder = DirectTransport::builder()
        .client_id(client.clone())
        .lease(config.lease)
        .reason(choice.reason());
    if let Some(token) = &config.token {
        builder = builder.token(token.clone());
    }
    builder = match choice.chosen.as_str() {
        "shm" => builder.engine(Engine::Shm),
        "nvlink_intra" | "nvlink" => {
            on_device(config, reader.map(|reader| move |pool| reader.receive(builder, pool)))
                .await?
        }
        "tcp" if config.receive == Receive::Device => {
            let receiver = receiver.map(|receiver| move |pool| receiver.receive(builder, pool));
            on_device(config, receiver).await?
        }
        _ => {
            let pool = config.pool.unwrap_or(DEFAULT_POOL);
            let memory = Backing::heap(pool.get()).map_err(pool_too_large)?;
            builder.engine(Engine::Tcp).pool(RegionPool::new(memory)?)
        }
    };
    #[cfg(any(feature = "mooncake", feature = "mooncake-python"))]
    if choice.chosen == "mooncake" {
        let settings = config.mooncake.clone();
        let started = tokio::task::spawn_blocking(move || super::engine::start(&settings)).await;
        let engine = started.map_err(|e| failed(ErrorKind::Unexpected, "panicked").source(e))??;
        builder = builder.engine(Engine::Mooncake).mooncake(engine);
    }
    let transport = Arc::new(builder.build()?);
    announce(transport.clone(), servers.to_vec()).await;
    Ok(transport)
}

/// Has what the survey has opened receive into a pool on its device.
async fn on_device<R>(config: &Config, receive: Option<R>) -> Result<DirectTransportBuilder>
where
    R: FnOnce(ByteSize) -> Result<DirectTransportBuilder> + Send + 'static,
{
    let receive = receive.ok_or_else(|| {
        Error::new(ErrorKind::Unexpected, "open", "the probe has not opened a device")
    })?;
    let pool = config.pool.unwrap_or(DEFAULT_POOL);
    let built = tokio::task::spawn_blocking(move || receive(pool));
    built.await.map_err(|e| failed(ErrorKind::Unexpected, "panicked").source(e))?
}

/// Names the setting that a receive pool comes from.
pub(super) fn pool_too_large(error: Error) -> Error {
    error.with("setting", "pool").remedy("set a smaller pool: FEATURESTORE_POOL, Config::pool")
}

/// Tells the servers who this client is, before anything is captured for it: what is published for
/// it from then on is held for it, and its first fetch needs no round trip of its own.
async fn announce(transport: Arc<DirectTransport>, servers: Vec<SessionName>) {
    let announced = tokio::task::spawn_blocking(move || {
        for server in servers {
            if let Err(error) = transport.announce(&server, Instant::now() + PROBE) {
                // Older servers know no clients; a fetch works without, and says what is wrong.
                tracing::debug!(%server, %error, "not announced");
            }
        }
    });
    if announced.await.is_err() {
        tracing::error!("announcing this client panicked");
    }
}

/// Asks every server or, without one, tries what this machine can do by itself. Devices are only
/// looked at if they are `wanted`. Blocks.
pub(super) fn probe(config: &Config, servers: &[SessionName], wanted: bool) -> Probe {
    if servers.is_empty() {
        return Probe {
            shm: alone(map_own(), "a memory file was mapped here; no server was asked"),
            tcp: alone(listen(), "loopback works; no server was asked"),
            devices: if wanted { device::alone(config) } else { Devices::left_out() },
            unreachable: None,
            silent: None,
        };
    }
    let mut found = Probe {
        shm: Ok("every server's memory is mapped; no copies".into()),
        tcp: Ok("every server answers; one copy".into()),
        devices: Devices::left_out(),
        unreachable: None,
        silent: None,
    };
    let mut answered = Vec::new();
    for server in servers {
        match greet(server, config) {
            Ok(server) => {
                if let Err(error) = map(&server) {
                    found.shm = found.shm.and(Err(error.to_string()));
                }
                if server.hello.is_none() {
                    let why = format!(
                        "the server at {} does not answer hello within {PROBE:?}: an older one, or \
                         one that is stopped",
                        server.control
                    );
                    found.tcp = found.tcp.map(|_| format!("{why}; one copy"));
                    found.silent.get_or_insert(why);
                }
                if server.protocol.is_some() {
                    found.tcp = found.tcp.and(Err(format!(
                        "the server at {} keeps its samples in device memory",
                        server.control
                    )));
                }
                answered.push(server);
            }
            Err(error) => {
                found.shm = found.shm.and(Err(error.to_string()));
                found.tcp = found.tcp.and(Err(error.to_string()));
                found.unreachable.get_or_insert(error);
            }
        }
    }
    if wanted {
        found.devices = match &found.unreachable {
            Some(error) => Devices::none(&error.to_string()),
            None => device::probe(config, &answered),
        };
    }
    found
}

/// Maps a server's memory, and lets go of it again.
fn map(server: &Server) -> Result<()> {
    let no_shm = |why: &'static str| {
        Err(Error::new(ErrorKind::Unsupported, "probe shm", why).with("server", &server.control))
    };
    let Some(hello) = &server.hello else {
        return no_shm("it does not answer hello: an older server");
    };
    let Some(ShmInfo { boot_id, pid, fd, dev, ino }) = hello.arena.shm.clone() else {
        return no_shm(match server.protocol {
            Some(_) => "its arena is device memory",
            None => "its arena is private memory",
        });
    };
    let handle = SharedHandle { boot_id, pid, fd, dev, ino, bytes: hello.arena.bytes };
    MappedBacking::open(&handle, MapMark::random()).map(drop)
}

fn alone(tried: Result<()>, good: &str) -> Finding {
    tried.map(|()| good.to_owned()).map_err(|error| error.to_string())
}

/// Makes a memory file and maps it as another process would.
fn map_own() -> Result<()> {
    let backing = Backing::shared(4096)?;
    let handle = backing.shared_handle().ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "probe shm", "memory files cannot be shared here")
    })?;
    MappedBacking::open(handle, MapMark::random()).map(drop)
}

fn listen() -> Result<()> {
    let io = |error| Error::io("probe tcp", error);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").map_err(io)?;
    let address = listener.local_addr().map_err(io)?;
    TcpStream::connect_timeout(&address, PROBE).map(drop).map_err(io)
}

/// Says hello to a server's control listener, and asks what its memory is where only devices might
/// read it.
pub(super) fn greet(server: &SessionName, config: &Config) -> Result<Server> {
    let limits = Limits::default();
    let mut answer = Server { control: server.clone(), hello: None, protocol: None };
    let Some(line) = first_line(server, config, &limits).map_err(|e| e.with("server", server))?
    else {
        return Ok(answer);
    };
    if line.starts_with(b"HTTP/") {
        return Err(failed(ErrorKind::Protocol, "not a control listener (it speaks HTTP)")
            .with("server", server)
            .remedy("give the control address of the server's ready line, not its http address"));
    }
    let hello = match Response::parse(&line, &limits) {
        Ok(Response::Hello(hello)) => hello,
        Ok(Response::Error { code, message, .. }) => {
            let error = match code {
                Code::BadToken => failed(ErrorKind::PermissionDenied, message)
                    .remedy("set the server's token: FEATURESTORE_TOKEN, or Config::token"),
                Code::TooManyConnections => failed(ErrorKind::Busy, message),
                Code::Closing => failed(ErrorKind::PeerGone, message),
                Code::UnsupportedVersion => failed(ErrorKind::Unsupported, message),
                _ => failed(ErrorKind::Protocol, message),
            };
            return Err(error.with("server", server).with("code", code.as_str()));
        }
        Ok(_) | Err(_) => {
            return Err(failed(ErrorKind::Protocol, "not an answer to hello")
                .with("server", server)
                .remedy("give the control address of a capture server, as its ready line has it"));
        }
    };
    if hello.arena.shm.is_none() {
        // Who does not tell keeps its samples where every engine reads them.
        let told = peer_protocol(&hello.session, Instant::now() + PROBE).ok();
        answer.protocol = told.filter(|protocol| OF_DEVICES.contains(&protocol.as_str()));
    }
    answer.hello = Some(hello);
    Ok(answer)
}

/// The first line that the server answers to hello, without its end; none if none came in time.
fn first_line(server: &SessionName, config: &Config, limits: &Limits) -> Result<Option<Vec<u8>>> {
    let fail = |e| {
        Error::io("reach server", e).remedy(
            "is the capture server running? give its control address; set the token if it asks \
             for one",
        )
    };
    let end = Instant::now() + PROBE;
    let mut addresses = (server.host(), server.port()).to_socket_addrs().map_err(fail)?;
    let address = addresses
        .next()
        .ok_or_else(|| failed(ErrorKind::NotFound, "the name of the host has no address"))?;
    let mut stream = TcpStream::connect_timeout(&address, PROBE).map_err(fail)?;
    stream.set_write_timeout(Some(PROBE)).map_err(fail)?;
    let hello = Hello::new(ClientId::random(), config.lease, config.token.clone());
    let mut line = Vec::new();
    write_hello(&mut line, &hello);
    stream.write_all(&line).map_err(fail)?;
    let mut reply = Vec::new();
    loop {
        if let Some(end_of_line) = reply.iter().position(|&b| b == b'\n') {
            reply.truncate(end_of_line);
            let mut bye = Vec::new();
            write_bye(&mut bye);
            let _ = stream.write_all(&bye); // the probe holds nothing that a lost bye could keep
            return Ok(Some(reply));
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || reply.len() > limits.line_bytes {
            return Ok(None);
        }
        stream.set_read_timeout(Some(left)).map_err(fail)?;
        let mut bytes = [0; 4096];
        match stream.read(&mut bytes) {
            Ok(0) => return Err(closed()),
            Ok(n) => reply.extend_from_slice(&bytes[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return Err(closed()),
            Err(e) => return Err(fail(e)),
        }
    }
}

fn failed(kind: ErrorKind, why: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(kind, "reach server", why)
}

fn closed() -> Error {
    failed(ErrorKind::PeerGone, "it closed instead of answering hello")
        .remedy("give the control address of a capture server, as its ready line has it")
}
