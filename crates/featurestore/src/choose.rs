//! Choosing a transport: once, from the configuration and a probe, with the reasons kept.

#[cfg(feature = "direct")]
mod direct;

use std::{fmt, sync::Arc};

use transport_core::{ClientId, Error, ErrorKind, Result, SessionName, Transport};

use crate::config::{Config, TransportChoice};

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

#[cfg(feature = "direct")]
use direct::{connect, probe};

#[cfg(not(feature = "direct"))]
fn probe(_: &Config, _: &[SessionName]) -> Probe {
    let absent = || Err("built without the feature direct".to_owned());
    Probe { shm: absent(), tcp: absent(), unreachable: None }
}

#[cfg(not(feature = "direct"))]
async fn connect(
    _: &Config,
    _: &[SessionName],
    _: &ClientId,
    choice: &Choice,
) -> Result<Arc<dyn Transport>> {
    Err(Error::new(ErrorKind::Unsupported, "open", "this build has no such transport")
        .with("transport", &choice.chosen))
}

/// Decides which transport reads from `servers`, given by their control addresses.
///
/// `shm` is available when the memory of every server really can be mapped here; `tcp` when every
/// server answers. Nothing is left connected. Blocks, for at most 5 s a server.
///
/// # Errors
/// - [`ErrorKind::PeerGone`] or [`ErrorKind::Timeout`], temporary: a server does not answer.
/// - [`ErrorKind::PermissionDenied`], permanent: a server refuses the token.
/// - [`ErrorKind::Protocol`], permanent: what answers is no control listener.
/// - [`ErrorKind::Unsupported`], permanent: the transport asked for by name is not available or,
///   in strict mode, the best one is not.
pub fn choose(config: &Config, servers: &[SessionName]) -> Result<Choice> {
    let asked = config.transport;
    let Probe { shm, tcp, unreachable } = probe(config, servers);
    let candidate = |transport, choice, finding: Finding| Candidate {
        transport,
        available: finding.is_ok(),
        configured: asked == TransportChoice::Auto || asked == choice,
        suitable: finding.is_ok(),
        reason: finding.unwrap_or_else(|why| why),
    };
    let mut candidates = vec![
        candidate("shm", TransportChoice::Shm, shm),
        candidate("tcp", TransportChoice::Tcp, tcp),
    ];
    if candidates[0].available && candidates[0].configured {
        candidates[1].suitable = asked == TransportChoice::Tcp; // a copy that shm spares
    }
    let usable = candidates.iter().find(|c| c.available && c.configured);
    let Some(chosen) = usable.map(|c| c.transport.to_owned()) else {
        if let Some(cause) = unreachable {
            return Err(cause); // no transport of this kind is to blame
        }
        let why = candidates.iter().filter(|c| c.configured);
        let why: Vec<String> =
            why.map(|c| format!("{} is not available: {}", c.transport, c.reason)).collect();
        return Err(Error::new(ErrorKind::Unsupported, "choose transport", why.join("; "))
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
