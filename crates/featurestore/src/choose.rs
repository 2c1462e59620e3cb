//! Choosing a transport: once, from the configuration and a probe, with the reasons kept.

#[cfg(feature = "direct")]
mod direct;
#[cfg_attr(
    not(all(feature = "direct", any(feature = "mooncake", feature = "mooncake-python"))),
    path = "choose/engine/absent.rs"
)]
mod engine;
#[cfg(feature = "store")]
pub(crate) mod store;

use std::{fmt, sync::Arc};

use transport_core::{ByteSize, ClientId, Error, ErrorKind, Result, SessionName, Transport};

use crate::config::{Config, TransportChoice};

/// Receive pool where none is configured.
#[cfg_attr(not(any(feature = "direct", feature = "store")), expect(dead_code))]
const DEFAULT_POOL: ByteSize = ByteSize::mib(2048);

/// What was considered, and what came of it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[non_exhaustive]
pub struct Choice {
    /// Every transport that exists here, best first.
    pub candidates: Vec<Candidate>,
    /// Name of the chosen one.
    pub chosen: String,
}

/// One transport that was considered.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[non_exhaustive]
pub struct Candidate {
    /// Its name, such as `shm`.
    pub scheme: String,
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
    /// Why the chosen one was chosen.
    #[cfg_attr(not(any(feature = "direct", feature = "store")), expect(dead_code))]
    pub(crate) fn reason(&self) -> &str {
        let chosen = self.candidates.iter().find(|c| c.scheme == self.chosen);
        chosen.map_or("", |c| c.reason.as_str())
    }

    /// The choice as a small table, a line each.
    pub fn lines(&self) -> impl Iterator<Item = String> + '_ {
        let head = "transport  available  configured  suitable  reason".to_owned();
        let yes = |flag| if flag { "yes" } else { "no" };
        let row = move |c: &Candidate| {
            let chosen = if c.scheme == self.chosen { "*" } else { " " };
            format!(
                "{chosen} {:<9}{:<11}{:<12}{:<10}{}",
                c.scheme,
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

/// What a probe says of one transport: whether it works, and why or why not.
type Finding = Result<String, String>;

/// What a probe of the servers found.
struct Probe {
    shm: Finding,
    tcp: Finding,
    /// Why a server could not be asked at all, where one could not.
    unreachable: Option<Error>,
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
    let transport = connect(config, servers, client, &choice).await?;
    Ok((transport, choice))
}

/// Puts the chosen transport together.
async fn connect(
    config: &Config,
    servers: &[SessionName],
    client: &ClientId,
    choice: &Choice,
) -> Result<Arc<dyn Transport>> {
    match choice.chosen.as_str() {
        #[cfg(feature = "store")]
        "store" => store::connect(config, choice).await,
        #[cfg(feature = "direct")]
        "shm" | "tcp" | "mooncake" => direct::connect(config, servers, client, choice).await,
        absent => {
            let _ = (config, servers, client); // a build without any transport
            Err(Error::new(ErrorKind::Unsupported, "open", "this build has no such transport")
                .with("transport", absent))
        }
    }
}

/// What a survey looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// What the configuration asks for.
    Asked,
    /// Everything that this build has.
    #[cfg_attr(not(feature = "cli"), allow(dead_code))]
    Everything,
}

/// Every transport that this build knows, best first, and why a server could not be asked at all,
/// where one could not. Blocks.
pub(crate) fn survey(
    config: &Config,
    servers: &[SessionName],
    scope: Scope,
) -> (Vec<Candidate>, Option<Error>) {
    let asked = config.transport;
    let stores = asked == TransportChoice::Store;
    let everything = scope == Scope::Everything;
    let Probe { shm, tcp, unreachable } = if everything || !stores {
        probe(config, servers)
    } else {
        let left_out = || Err("not probed, because the store is asked for".to_owned());
        Probe { shm: left_out(), tcp: left_out(), unreachable: None }
    };
    let store = if everything || stores {
        probe_store(config)
    } else {
        Err("not probed; ask for it by name: transport = store".to_owned())
    };
    let candidate = |scheme: &str, configured, finding: Finding| Candidate {
        scheme: scheme.to_owned(),
        available: finding.is_ok(),
        configured,
        suitable: finding.is_ok(),
        reason: finding.unwrap_or_else(|why| why),
    };
    // Nothing that it reaches is out of reach of tcp, unless another protocol is asked for.
    let engine = match asked {
        TransportChoice::Mooncake => engine::probe(&config.mooncake),
        _ if everything => engine::look(&config.mooncake),
        _ => Err("not probed; ask for it by name: transport = mooncake".to_owned()),
    };
    let auto = asked == TransportChoice::Auto;
    let mut candidates = vec![
        candidate("shm", auto || asked == TransportChoice::Shm, shm),
        candidate("tcp", auto || asked == TransportChoice::Tcp, tcp),
        // Where a sample is was decided by who published it: nothing that is found here takes it
        // from a server's memory to the store.
        candidate("store", stores, store),
        candidate("mooncake", asked == TransportChoice::Mooncake, engine),
    ];
    if candidates[0].available && candidates[0].configured {
        candidates[1].suitable = asked == TransportChoice::Tcp; // a copy that shm spares
    }
    for by_name in &mut candidates[2..] {
        by_name.suitable &= by_name.configured;
    }
    (candidates, unreachable)
}

#[cfg(feature = "direct")]
use direct::probe;

#[cfg(not(feature = "direct"))]
fn probe(_: &Config, _: &[SessionName]) -> Probe {
    let absent = || Err("built without the feature direct".to_owned());
    Probe { shm: absent(), tcp: absent(), unreachable: None }
}

#[cfg(feature = "store")]
fn probe_store(config: &Config) -> Finding {
    store::probe(&config.mooncake)
}

#[cfg(not(feature = "store"))]
fn probe_store(_: &Config) -> Finding {
    Err("built without Mooncake; build with --features mooncake-python for the wheel, or mooncake \
         for a library"
        .to_owned())
}

/// Decides which transport reads from `servers`, given by their control addresses.
///
/// `shm` is available when the memory of every server really can be mapped here; `tcp` when every
/// server answers. The others have to be asked for by name: `store` is available when Mooncake is here
/// and its master answers, `mooncake` when Mooncake is here and runs the configured protocol. Nothing is left connected. Blocks, for at most 5 s a server.
///
/// # Errors
/// - [`ErrorKind::PeerGone`] or [`ErrorKind::Timeout`], temporary: a server does not answer.
/// - [`ErrorKind::PermissionDenied`], permanent: a server refuses the token.
/// - [`ErrorKind::Protocol`], permanent: what answers is no control listener.
/// - [`ErrorKind::Unsupported`], permanent: the transport asked for by name is not available or,
///   in strict mode, the best one is not.
pub fn choose(config: &Config, servers: &[SessionName]) -> Result<Choice> {
    let (candidates, unreachable) = survey(config, servers, Scope::Asked);
    decide(config, candidates, unreachable)
}

/// Takes the first candidate that is available and configured.
pub(crate) fn decide(
    config: &Config,
    candidates: Vec<Candidate>,
    unreachable: Option<Error>,
) -> Result<Choice> {
    let asked = config.transport;
    let usable = candidates.iter().find(|c| c.available && c.configured);
    let Some(chosen) = usable.map(|c| c.scheme.clone()) else {
        if let Some(cause) = unreachable {
            return Err(cause); // no transport of this kind is to blame
        }
        let why = candidates.iter().filter(|c| c.configured);
        let why: Vec<String> =
            why.map(|c| format!("{} is not available: {}", c.scheme, c.reason)).collect();
        let error = Error::new(ErrorKind::Unsupported, "choose transport", why.join("; "));
        return Err(match asked {
            TransportChoice::Store | TransportChoice::Mooncake => error,
            _ => error
                .remedy("start the servers on this host as the same user for shm, or choose tcp"),
        });
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
