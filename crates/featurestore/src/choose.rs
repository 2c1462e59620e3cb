//! Choosing a transport: once, from the configuration and a probe, with the reasons kept.

use std::{
    fmt,
    io::{Read, Write},
    net::{TcpStream, ToSocketAddrs},
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{Backing, MappedBacking, RegionPool, SharedHandle};
use control_proto::control::{Hello, Limits, Response, write_bye, write_hello};
use transport_core::{
    ByteSize, ClientId, Error, ErrorKind, MapMark, Result, SessionName, Transport,
};
use transport_mooncake_direct::{DirectTransport, Engine};

use crate::config::{Config, TransportChoice};

/// Longest time that one server may take to answer a probe.
const PROBE: Duration = Duration::from_secs(5);
/// Receive pool where none is configured.
const DEFAULT_POOL: ByteSize = ByteSize::mib(2048);

/// What was considered, and what came of it.
#[derive(Clone, Debug, serde::Serialize)]
#[non_exhaustive]
pub struct Choice {
    /// Every transport that exists here, best first.
    pub candidates: Vec<Candidate>,
    /// Name of the chosen one.
    pub chosen: String,
}

/// One transport that was considered.
#[derive(Clone, Debug, serde::Serialize)]
#[non_exhaustive]
pub struct Candidate {
    /// Its name.
    pub transport: &'static str,
    /// Whether it works between this process and the servers.
    pub available: bool,
    /// Whether the configuration allows it.
    pub configured: bool,
    /// Whether it is the right one when it is available.
    pub suitable: bool,
    /// Why, or why not.
    pub reason: String,
}

impl Choice {
    /// The choice as a small table, a line each.
    pub fn lines(&self) -> impl Iterator<Item = String> + '_ {
        let head = "transport  available  configured  suitable  reason".to_owned();
        let yes = |flag| if flag { "yes" } else { "no" };
        let row = move |c: &Candidate| {
            let chosen = if c.transport == self.chosen { "*" } else { " " };
            format!(
                "{chosen} {:<9}{:<11}{:<12}{:<10}{}",
                c.transport,
                yes(c.available),
                yes(c.configured),
                yes(c.suitable),
                c.reason
            )
        };
        std::iter::once(head).chain(self.candidates.iter().map(row))
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, line) in self.lines().enumerate() {
            write!(f, "{}{line}", if i == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

/// Chooses, and puts the transport together.
pub(crate) async fn open(
    config: &Config,
    servers: &[SessionName],
    client: &ClientId,
) -> Result<(Arc<dyn Transport>, Choice)> {
    let choice = {
        let (config, servers) = (config.clone(), servers.to_vec());
        tokio::task::spawn_blocking(move || choose(&config, &servers)).await.map_err(|e| {
            Error::new(ErrorKind::Unexpected, "choose", "the probe panicked").source(e)
        })??
    };
    let reason = choice.candidates.iter().find(|c| c.transport == choice.chosen);
    let mut builder = DirectTransport::builder()
        .client_id(client.clone())
        .lease(config.lease)
        .reason(reason.map_or("", |c| c.reason.as_str()));
    if let Some(token) = &config.token {
        builder = builder.token(token.clone());
    }
    builder = if choice.chosen == "shm" {
        builder.engine(Engine::Shm)
    } else {
        let pool = config.pool.unwrap_or(DEFAULT_POOL);
        builder.engine(Engine::Tcp).pool(RegionPool::new(Backing::heap(pool.get())?)?)
    };
    let transport = Arc::new(builder.build()?);
    announce(transport.clone(), servers.to_vec()).await;
    Ok((transport, choice))
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

/// Decides which transport reads from `servers`, given by their control addresses.
///
/// `shm` is available when the memory of every server really can be mapped here; `tcp` when every
/// server answers. Nothing is left connected. Blocks.
///
/// # Errors
/// In strict mode, or for a transport asked for by name, when that one is not available; and when
/// none is.
pub fn choose(config: &Config, servers: &[SessionName]) -> Result<Choice> {
    let asked = config.transport;
    let mut shm = Ok(());
    let mut tcp = Ok(());
    for server in servers {
        match greet(server, config) {
            Ok(shared) if shm.is_ok() => {
                shm = shared.and_then(|h| MappedBacking::open(&h, MapMark::random()).map(drop))
            }
            Ok(_) => {}
            Err(error) => {
                shm = shm.and(Err(Error::new(error.kind(), "probe shm", error.to_string())));
                tcp = tcp.and(Err(error));
            }
        }
    }
    let candidate = |transport, choice, outcome: &Result<()>, good: &str| Candidate {
        transport,
        available: outcome.is_ok(),
        configured: asked == TransportChoice::Auto || asked == choice,
        suitable: outcome.is_ok(),
        reason: match outcome {
            Ok(()) => good.to_owned(),
            Err(error) => error.to_string(),
        },
    };
    let mut candidates = vec![
        candidate("shm", TransportChoice::Shm, &shm, "every server's memory is mapped; no copies"),
        candidate("tcp", TransportChoice::Tcp, &tcp, "every server answers; one copy"),
    ];
    if candidates[0].available && candidates[0].configured {
        candidates[1].suitable = asked == TransportChoice::Tcp; // a copy that shm spares
    }
    let usable = candidates.iter().find(|c| c.available && c.configured);
    let Some(chosen) = usable.map(|c| c.transport.to_owned()) else {
        let why: Vec<String> = candidates
            .iter()
            .filter(|c| c.configured)
            .map(|c| format!("{}: {}", c.transport, c.reason))
            .collect();
        return Err(Error::new(
            ErrorKind::Unsupported,
            "choose transport",
            format!("{asked} is not available: {}", why.join("; ")),
        )
        .remedy("start the servers on this host as the same user for shm, or choose tcp"));
    };
    if config.strict && asked == TransportChoice::Auto && chosen != "shm" {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "choose transport",
            format!(
                "strict mode takes only the best transport, and shm is not available: {}",
                candidates[0].reason
            ),
        )
        .remedy("name the transport, such as --transport tcp, or leave strict mode"));
    }
    Ok(Choice { candidates, chosen })
}

/// Says hello to a server's control listener: how its memory is mapped, or why it cannot be.
fn greet(server: &SessionName, config: &Config) -> Result<Result<SharedHandle>> {
    let fail = |e| Error::io("probe server", e).with("server", server);
    let end = Instant::now() + PROBE;
    let mut addresses = (server.host(), server.port()).to_socket_addrs().map_err(fail)?;
    let address = addresses.next().ok_or_else(|| {
        Error::new(ErrorKind::NotFound, "probe server", "the name has no address")
            .with("server", server)
    })?;
    let mut stream = TcpStream::connect_timeout(&address, PROBE).map_err(fail)?;
    stream.set_write_timeout(Some(PROBE)).map_err(fail)?;
    let hello = Hello::new(ClientId::random(), config.lease, config.token.clone());
    let mut line = Vec::new();
    write_hello(&mut line, &hello);
    stream.write_all(&line).map_err(fail)?;
    let limits = Limits::default();
    let mut reply = Vec::new();
    while !reply.ends_with(b"\n") {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || reply.len() > limits.line_bytes {
            return Ok(Err(no_shm(server, "it does not answer hello: an older server")));
        }
        stream.set_read_timeout(Some(left)).map_err(fail)?;
        let mut byte = [0; 4096];
        match stream.read(&mut byte) {
            Ok(0) => return Ok(Err(no_shm(server, "it closed instead of answering hello"))),
            Ok(n) => reply.extend_from_slice(&byte[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(fail(e)),
        }
    }
    let mut bye = Vec::new();
    write_bye(&mut bye);
    let _ = stream.write_all(&bye); // the probe holds nothing that a lost goodbye could keep
    let end_of_line = reply.iter().position(|&b| b == b'\n').unwrap_or(reply.len());
    match Response::parse(&reply[..end_of_line], &limits)? {
        Response::Hello(hello) => Ok(match hello.arena.shm {
            None => Err(no_shm(server, "its arena is private memory")),
            Some(shm) => Ok(SharedHandle {
                boot_id: shm.boot_id,
                pid: shm.pid,
                fd: shm.fd,
                dev: shm.dev,
                ino: shm.ino,
                bytes: hello.arena.bytes,
            }),
        }),
        Response::Error { code, message, .. } => {
            Err(Error::new(ErrorKind::PermissionDenied, "probe server", message)
                .with("server", server)
                .with("code", code.as_str()))
        }
        _ => Err(Error::new(ErrorKind::Protocol, "probe server", "not an answer to hello")
            .with("server", server)),
    }
}

fn no_shm(server: &SessionName, why: &'static str) -> Error {
    Error::new(ErrorKind::Unsupported, "probe shm", why).with("server", server)
}
