//! Choosing a transport: once, from the configuration and a probe, with the reasons kept.

#[cfg(feature = "direct")]
#[cfg_attr(not(feature = "cuda"), path = "choose/device/absent.rs")]
mod device;
#[cfg(feature = "direct")]
mod direct;
#[cfg_attr(
    not(all(feature = "direct", any(feature = "mooncake", feature = "mooncake-python"))),
    path = "choose/engine/absent.rs"
)]
mod engine;
#[cfg_attr(not(feature = "cuda"), path = "choose/receive/absent.rs")]
mod receive;
#[cfg(feature = "store")]
pub(crate) mod store;

use std::{fmt, sync::Arc};

use transport_core::{ByteSize, ClientId, Error, ErrorKind, Result, SessionName, Transport};

use self::receive::OnDevice;
use crate::config::{Config, Receive, TransportChoice};

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
        let head = "transport      available  configured  suitable  reason".to_owned();
        let yes = |flag| if flag { "yes" } else { "no" };
        let row = move |c: &Candidate| {
            let chosen = if c.scheme == self.chosen { "*" } else { " " };
            format!(
                "{chosen} {:<13}{:<11}{:<12}{:<10}{}",
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
    #[cfg(feature = "direct")]
    devices: device::Devices,
    /// Why a server could not be asked at all, where one could not.
    unreachable: Option<Error>,
    /// Which server took the question and did not answer, where one did not: older ones never do.
    silent: Option<String>,
}

/// What a survey found.
pub(crate) struct Survey {
    /// Every transport that this build knows, best first.
    pub(crate) candidates: Vec<Candidate>,
    /// Why a server could not be asked at all, where one could not.
    pub(crate) unreachable: Option<Error>,
    /// Which server took the question and did not answer, where one did not: older ones never do.
    #[cfg_attr(not(feature = "cli"), allow(dead_code))] // only doctor tells
    pub(crate) silent: Option<String>,
    /// What has opened the servers' device memory already.
    #[cfg(feature = "direct")]
    reader: Option<device::Reader>,
    /// The device on which is received what comes through the host.
    #[cfg_attr(not(any(feature = "direct", feature = "store")), expect(dead_code))]
    receiver: Option<OnDevice>,
    /// Whether there is none where one is needed.
    lacks_device: bool,
}

/// Chooses, and puts the transport together.
pub(crate) async fn open(
    config: &Config,
    servers: &[SessionName],
    client: &ClientId,
) -> Result<(Arc<dyn Transport>, Choice)> {
    open_with(config, servers, client, OnDevice::open).await
}

async fn open_with(
    config: &Config,
    servers: &[SessionName],
    client: &ClientId,
    open_device: impl FnOnce(&Config) -> Result<OnDevice> + Send + 'static,
) -> Result<(Arc<dyn Transport>, Choice)> {
    let (mut survey, choice) = {
        let (config, servers) = (config.clone(), servers.to_vec());
        let choosing = tokio::task::spawn_blocking(move || {
            let survey = survey_with(&config, &servers, Scope::Asked, open_device);
            decide(&config, survey)
        });
        choosing.await.map_err(|e| {
            Error::new(ErrorKind::Unexpected, "choose", "the probe panicked").source(e)
        })??
    };
    let transport = connect(config, servers, client, &choice, &mut survey).await?;
    Ok((transport, choice))
}

/// Puts the chosen transport together.
async fn connect(
    config: &Config,
    servers: &[SessionName],
    client: &ClientId,
    choice: &Choice,
    survey: &mut Survey,
) -> Result<Arc<dyn Transport>> {
    match choice.chosen.as_str() {
        #[cfg(feature = "store")]
        "store" => store::connect(config, choice, survey.receiver.take()).await,
        #[cfg(feature = "direct")]
        "nvlink_intra" | "nvlink" | "shm" | "tcp" | "mooncake" => {
            let (reader, receiver) = (survey.reader.take(), survey.receiver.take());
            direct::connect(config, servers, client, choice, reader, receiver).await
        }
        absent => {
            let _ = (config, servers, client, survey); // a build without any transport
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

/// Looks at every transport that this build knows. Blocks.
pub(crate) fn survey(config: &Config, servers: &[SessionName], scope: Scope) -> Survey {
    survey_with(config, servers, scope, OnDevice::open)
}

fn survey_with(
    config: &Config,
    servers: &[SessionName],
    scope: Scope,
    open_device: impl FnOnce(&Config) -> Result<OnDevice>,
) -> Survey {
    let asked = config.transport;
    let (stores, auto) = (asked == TransportChoice::Store, asked == TransportChoice::Auto);
    let everything = scope == Scope::Everything;
    let devices_wanted = match everything || asked.is_of_devices() {
        true => true,
        // By itself a device says nothing about the servers.
        false => auto && !servers.is_empty() && config.receive != Receive::Host,
    };
    let found = if everything || !stores {
        probe(config, servers, devices_wanted)
    } else {
        Probe::left_out("not probed, because the store is asked for")
    };
    let store = if everything || stores {
        probe_store(config)
    } else {
        Err("not probed; ask for it by name: transport = store".to_owned())
    };
    // Nothing that it reaches is out of reach of tcp, unless another protocol is asked for.
    let engine = match asked {
        TransportChoice::Mooncake => engine::probe(&config.mooncake),
        _ if everything => engine::look(&config.mooncake),
        _ => Err("not probed; ask for it by name: transport = mooncake".to_owned()),
    };
    #[cfg(feature = "direct")]
    let (intra, fabric, reader) = {
        let device::Devices { intra, fabric, reader } = found.devices;
        (intra, fabric, reader)
    };
    #[cfg(not(feature = "direct"))]
    let (intra, fabric): (Finding, Finding) = (found.tcp.clone(), found.tcp.clone());
    // Opened once, and only if something would be received on it.
    let through_host = config.receive == Receive::Device && !asked.is_of_devices();
    let receives = through_host && (found.tcp.is_ok() || store.is_ok());
    let receiver = receives.then(|| open_device(config));
    let received = |finding: Finding| match (&receiver, finding) {
        (Some(Ok(device)), Ok(good)) => Ok(format!("{good}, {}", device.place())),
        (Some(Err(error)), Ok(_)) => Err(error.to_string()),
        (_, finding) => finding,
    };
    let candidate = |choice: TransportChoice, finding: Finding| {
        // Where a sample is was decided by who published it: nothing that is found here takes it
        // from a server's memory to the store.
        let by_name = matches!(choice, TransportChoice::Store | TransportChoice::Mooncake);
        let refusal = config.receive.refusal(choice);
        let configured = refusal.is_none() && (asked == choice || (auto && !by_name));
        let left_out = match refusal {
            Some((why, _)) => format!("; left out: receive = {}, and {why}", config.receive),
            None => String::new(),
        };
        Candidate {
            scheme: choice.to_string(),
            available: finding.is_ok(),
            configured,
            suitable: finding.is_ok() && refusal.is_none() && (configured || !by_name),
            reason: finding.unwrap_or_else(|why| why) + &left_out,
        }
    };
    let mut candidates = vec![
        candidate(TransportChoice::NvlinkIntra, intra),
        candidate(TransportChoice::Nvlink, fabric),
        candidate(TransportChoice::Shm, found.shm),
        candidate(TransportChoice::Tcp, received(found.tcp)),
        candidate(TransportChoice::Store, received(store)),
        candidate(TransportChoice::Mooncake, engine),
    ];
    let mapped = candidates.iter().any(|c| c.scheme == "shm" && c.available && c.configured);
    if let Some(tcp) = candidates.iter_mut().find(|c| c.scheme == "tcp" && mapped) {
        tcp.suitable = asked == TransportChoice::Tcp; // a copy that shm spares
    }
    Survey {
        candidates,
        unreachable: found.unreachable,
        silent: found.silent,
        #[cfg(feature = "direct")]
        reader,
        lacks_device: matches!(receiver, Some(Err(_))), // why, the candidates say
        receiver: receiver.and_then(Result::ok),
    }
}

impl Probe {
    /// Nobody has looked, or can.
    fn left_out(why: &str) -> Self {
        Self {
            shm: Err(why.to_owned()),
            tcp: Err(why.to_owned()),
            #[cfg(feature = "direct")]
            devices: device::Devices::none(why),
            unreachable: None,
            silent: None,
        }
    }
}

#[cfg(feature = "direct")]
use direct::probe;

#[cfg(not(feature = "direct"))]
fn probe(_: &Config, _: &[SessionName], _: bool) -> Probe {
    Probe::left_out("built without the feature direct")
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
/// `nvlink_intra` and `nvlink` are available when the memory of every server lies on devices and
/// really can be opened on [`Config::device`]; `shm` when the memory of every server really can be
/// mapped here; `tcp` when every server answers. Where [`Config::receive`] asks for memory of the GPU,
/// `tcp` needs that device too, and `shm` is left out; where it asks for host memory, the first two
/// are. The others have to be asked for by name: `store` is available when Mooncake is here and its
/// master answers, `mooncake` when Mooncake is here and runs the configured protocol. Nothing is left
/// connected. Blocks, for at most 5 s a server.
///
/// # Errors
/// - [`ErrorKind::PeerGone`] or [`ErrorKind::Timeout`], temporary: a server does not answer.
/// - [`ErrorKind::PermissionDenied`], permanent: a server refuses the token.
/// - [`ErrorKind::Protocol`], permanent: what answers is no control listener.
/// - [`ErrorKind::Unsupported`], permanent: the transport asked for by name is not available or,
///   in strict mode, the best one is not.
/// - [`ErrorKind::ConfigInvalid`], permanent: the transport asked for by name cannot bring samples
///   where [`Config::receive`] wants them.
pub fn choose(config: &Config, servers: &[SessionName]) -> Result<Choice> {
    decide(config, survey(config, servers, Scope::Asked)).map(|(_, choice)| choice)
}

/// Takes the first candidate that is available and configured.
pub(crate) fn decide(config: &Config, survey: Survey) -> Result<(Survey, Choice)> {
    let asked = config.transport;
    config.receive.check(asked)?;
    let candidates = survey.candidates.clone();
    let usable = candidates.iter().find(|c| c.available && c.configured);
    let Some(chosen) = usable.map(|c| c.scheme.clone()) else {
        if let Some(cause) = survey.unreachable {
            return Err(cause); // no transport of this kind is to blame
        }
        let why = candidates.iter().filter(|c| c.configured);
        let why: Vec<String> =
            why.map(|c| format!("{} is not available: {}", c.scheme, c.reason)).collect();
        let error = Error::new(ErrorKind::Unsupported, "choose transport", why.join("; "));
        return Err(match asked {
            _ if survey.lacks_device => error.remedy(
                "give this process a GPU and a build with --features cuda, or receive in host memory: \
                 receive = host",
            ),
            TransportChoice::Store | TransportChoice::Mooncake => error,
            TransportChoice::NvlinkIntra | TransportChoice::Nvlink => error.remedy(
                "start the servers with the same transport, and give this process a GPU that \
                 reaches theirs",
            ),
            _ if config.receive == Receive::Device => error.remedy(
                "to receive on a device, samples in host memory take the transport tcp, and those in \
                 device memory nvlink_intra and a GPU that reaches theirs",
            ),
            _ => error.remedy(
                "start the servers on this host as the same user for shm, or choose tcp; samples in \
                 device memory need a trainer with a GPU that receives on it",
            ),
        });
    };
    // Where samples are received on a device, nothing but tcp takes them out of host memory.
    let best_is_shm = asked == TransportChoice::Auto && config.receive != Receive::Device;
    if config.strict && best_is_shm && chosen == "tcp" {
        let shm = candidates.iter().find(|c| c.scheme == "shm");
        return Err(Error::new(
            ErrorKind::Unsupported,
            "choose transport",
            format!(
                "strict mode takes only the best transport, and shm is not available: {}",
                shm.map_or("", |shm| shm.reason.as_str())
            ),
        )
        .remedy("name the transport, such as --transport tcp, or leave strict mode"));
    }
    Ok((survey, Choice { candidates, chosen }))
}
