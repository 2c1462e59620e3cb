//! What a capture server is told.

use std::{net::SocketAddr, str::FromStr, time::Duration};

use control_proto::Secret;
use transport_core::{ByteSize, Error, Result, check_host};
use transport_mooncake_direct::Cidr;

use super::{
    MooncakeConfig, Problems, Receive, Settings, TransportChoice, duration,
    value::{bad, boolean, device, fold, nonzero_size, suggestion},
};

/// Most samples that a server may be told to work on at a time.
const MAX_IN_FLIGHT: usize = 1 << 20;
/// Most threads that a server may be told to fill tensors on.
const MAX_FILL_THREADS: usize = 1024;

/// What a server's arena is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArenaKind {
    /// What the transport reads best. Under `auto` that is device memory where there is a device
    /// with enough of it and trainers do not receive in host memory, and a memory file elsewhere.
    Auto,
    /// Device memory.
    Device,
    /// A memory file that processes of the same user can map.
    Shared,
    /// Private memory, read over tcp only.
    Heap,
}

/// How a capture server runs.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerConfig {
    /// Size of the arena.
    pub arena: ByteSize,
    /// What it is made of.
    pub arena_kind: ArenaKind,
    /// Whether its memory is taken before the server is ready.
    pub populate: bool,
    /// The GPU that it is on, where it is on one.
    pub device: u32,
    /// HTTP address.
    pub http: SocketAddr,
    /// Peer-handshake address.
    pub data: SocketAddr,
    /// Control address.
    pub control: SocketAddr,
    /// Host that descriptors name.
    pub advertise: Option<String>,
    /// Networks that may read.
    pub allow: Vec<Cidr>,
    /// Secret that control connections have to show.
    pub token: Option<Secret>,
    /// Samples that are worked on or wait.
    pub max_in_flight: usize,
    /// Threads that fill captured tensors.
    pub fill_threads: Option<usize>,
    /// Samples a second that are captured at most.
    pub rate: Option<f64>,
    /// Tokens a second that are captured at most.
    pub token_rate: Option<f64>,
    /// Longest wait for room.
    pub deadline: Duration,
    /// Lease of clients that have not announced themselves.
    pub lease: Duration,
    /// What it publishes through: the store, or an arena of its own for anything else.
    pub transport: TransportChoice,
    /// Where its trainers receive, as far as they are told by the same settings.
    pub receive: Receive,
    /// Memory for samples on their way to the store.
    pub pool: Option<ByteSize>,
    /// Where Mooncake and its store are.
    pub mooncake: MooncakeConfig,
}

impl ServerConfig {
    /// Checks and types what is in force. All that is wrong is reported at once.
    pub fn from_settings(settings: &Settings) -> Result<Self> {
        let mut problems = Problems::default();
        let arena = problems.note(settings.need("arena", nonzero_size));
        let arena_kind = problems.note(settings.need("arena_kind", str::parse));
        let populate = problems.note(settings.need("populate", boolean));
        let device = problems.note(settings.need("device", device));
        let http = problems.note(settings.need("http", address));
        let data = problems.note(settings.need("data", address));
        let control = problems.note(settings.need("control", address));
        let advertise = problems.note(settings.get("advertise", host));
        let allow = problems.note(settings.get("allow", networks));
        let token = problems.note(settings.get("token", |text| Secret::new(text)));
        let max_in_flight =
            problems.note(settings.need("max_in_flight", |text| bounded(text, MAX_IN_FLIGHT)));
        let fill_threads =
            problems.note(settings.get("fill_threads", |text| bounded(text, MAX_FILL_THREADS)));
        let token_rate = problems.note(settings.get("token_rate", rate));
        let rate = problems.note(settings.get("rate", rate));
        let deadline = problems.note(settings.need("deadline", duration));
        let lease = problems.note(settings.need("lease", duration));
        let transport: Option<TransportChoice> =
            problems.note(settings.need("transport", str::parse));
        let receive = problems.note(settings.need("receive", str::parse));
        let pool = problems.note(settings.get("pool", nonzero_size));
        let mooncake = problems.note(MooncakeConfig::from_settings(settings));
        if let (Some(data), Some(control), Some(advertise), Some(token)) =
            (data, control, &advertise, &token)
            && transport != Some(TransportChoice::Store)
        // which has no such listeners
        {
            problems.note(reachable([("data", data), ("control", control)], advertise.is_some()));
            problems.note(guarded(control, token.is_some()));
        }
        if let (Some(transport), Some(kind)) = (transport, arena_kind) {
            problems.note(readable(transport, kind));
        }
        problems.settle("configure")?;
        const NOTED: &str = "what is missing is a problem, and problems end this";
        Ok(Self {
            arena: arena.expect(NOTED),
            arena_kind: arena_kind.expect(NOTED),
            populate: populate.expect(NOTED),
            device: device.expect(NOTED),
            http: http.expect(NOTED),
            data: data.expect(NOTED),
            control: control.expect(NOTED),
            advertise: advertise.expect(NOTED),
            allow: allow.expect(NOTED).unwrap_or_default(),
            token: token.expect(NOTED),
            max_in_flight: max_in_flight.expect(NOTED),
            fill_threads: fill_threads.expect(NOTED),
            rate: rate.expect(NOTED),
            token_rate: token_rate.expect(NOTED),
            deadline: deadline.expect(NOTED),
            lease: lease.expect(NOTED),
            transport: transport.expect(NOTED),
            receive: receive.expect(NOTED),
            pool: pool.expect(NOTED),
            mooncake: mooncake.expect(NOTED),
        })
    }
}

impl FromStr for ArenaKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match fold(text).as_str() {
            "auto" => Ok(Self::Auto),
            "device" => Ok(Self::Device),
            "shared" => Ok(Self::Shared),
            "heap" => Ok(Self::Heap),
            other => Err(bad("unknown kind of arena", text)
                .remedy(suggestion(other, ["auto", "device", "shared", "heap"].into_iter()))),
        }
    }
}

/// A transport reads either devices or the host, and maps nothing private.
fn readable(transport: TransportChoice, kind: ArenaKind) -> Result<()> {
    let (why, remedy) = match kind {
        ArenaKind::Shared | ArenaKind::Heap if transport.is_of_devices() => (
            "this transport reads device memory only",
            "leave out arena_kind, or choose the transport shm or tcp",
        ),
        ArenaKind::Heap if transport == TransportChoice::Shm => (
            "this transport maps memory, and that of a heap arena is private",
            "leave out arena_kind, or choose the transport tcp",
        ),
        ArenaKind::Device if !transport.is_of_devices() && transport != TransportChoice::Auto => {
            ("this transport reads host memory only", "choose the transport nvlink_intra")
        }
        _ => return Ok(()),
    };
    let kind = format!("{kind:?}").to_ascii_lowercase();
    Err(bad(why, &kind).with("setting", "arena_kind").with("transport", transport).remedy(remedy))
}

/// Descriptors name a host that trainers can connect to.
fn reachable(addresses: [(&'static str, SocketAddr); 2], advertised: bool) -> Result<()> {
    let every = addresses.into_iter().find(|(_, address)| address.ip().is_unspecified());
    match every.filter(|_| !advertised) {
        None => Ok(()),
        Some((setting, address)) => {
            let why = "every interface is no address that trainers can connect to";
            Err(bad(why, &address.to_string()).with("setting", setting).remedy(
                "give --advertise HOST (or set FEATURESTORE_ADVERTISE): the name or address by \
                 which trainers reach this host",
            ))
        }
    }
}

/// A control listener that other hosts reach asks for a token.
fn guarded(control: SocketAddr, token: bool) -> Result<()> {
    if token || control.ip().to_canonical().is_loopback() {
        return Ok(());
    }
    let why = "a control listener that is not on loopback needs a token";
    Err(bad(why, &control.to_string()).with("setting", "control").remedy(
        "set FEATURESTORE_TOKEN for the server and for its trainers, or token in their \
         configuration files; or listen on 127.0.0.1",
    ))
}

fn bounded(text: &str, most: usize) -> Result<usize> {
    text.trim().parse().ok().filter(|n| (1..=most).contains(n)).ok_or_else(|| {
        bad("not a number within its bounds", text).with("least", 1).with("most", most)
    })
}

/// How many a second: more than zero, and something that a clock can pace.
fn rate(text: &str) -> Result<f64> {
    text.trim()
        .parse()
        .ok()
        .filter(|rate| (0.001..=1e9).contains(rate))
        .ok_or_else(|| bad("not a number a second", text).remedy("write such as 67.3"))
}

fn host(text: &str) -> Result<String> {
    check_host(text).map_err(|why| bad(why, text)).map(|()| text.to_owned())
}

fn networks(text: &str) -> Result<Vec<Cidr>> {
    text.split(',').map(str::trim).filter(|n| !n.is_empty()).map(str::parse).collect()
}

fn address(text: &str) -> Result<SocketAddr> {
    text.trim().parse().map_err(|_| {
        bad("not an address and port", text)
            .remedy("write 127.0.0.1:9000 or [::1]:9000; port 0 picks a free one")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_of_the_arena_is_never_guessed() {
        let error = ServerConfig::from_settings(&Settings::new()).unwrap_err().to_string();
        assert!(error.contains("--arena") && error.contains("FEATURESTORE_ARENA"), "{error}");
    }

    #[test]
    fn an_arena_is_of_what_its_transport_reads() {
        let read = |transport: &str, kind: &str| {
            let mut settings = Settings::new().or_default("arena", "1MiB").unwrap();
            settings.set("transport", transport).unwrap();
            settings.set("arena_kind", kind).unwrap();
            settings.set("device", "1").unwrap();
            ServerConfig::from_settings(&settings).map(|config| config.device)
        };
        for (transport, kind) in [
            ("auto", "device"),
            ("auto", "shared"),
            ("nvlink_intra", "device"),
            ("nvlink", "auto"),
            ("tcp", "heap"),
        ] {
            assert_eq!(read(transport, kind).unwrap(), 1, "{transport}, {kind}");
        }
        for (transport, kind) in
            [("nvlink_intra", "shared"), ("nvlink", "heap"), ("shm", "device"), ("shm", "heap")]
        {
            let error = read(transport, kind).unwrap_err().to_string();
            assert!(error.contains("arena_kind") && error.contains(transport), "{error}");
        }
        for wrong in ["-1", "gpu", "1024", ""] {
            let mut settings = Settings::new().or_default("arena", "1MiB").unwrap();
            settings.set("device", wrong).unwrap();
            let error = ServerConfig::from_settings(&settings).unwrap_err().to_string();
            assert!(error.contains("device"), "{error}");
        }
    }

    #[test]
    fn the_secret_is_masked() {
        let mut settings = Settings::new().or_default("arena", "1MiB").unwrap();
        settings.set("token", "hush").unwrap();
        let shown = format!("{:?}", ServerConfig::from_settings(&settings).unwrap());
        assert!(!shown.contains("hush"), "{shown}");
    }
}
