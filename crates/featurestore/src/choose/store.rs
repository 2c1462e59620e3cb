//! Whether and how this process reads from Mooncake Store.

use std::{
    net::{TcpStream, ToSocketAddrs},
    sync::Arc,
    time::Duration,
};

use mooncake_sys::SegmentReader;
use transport_core::{ByteSize, Error, ErrorKind, Result, SessionName, Transport};
use transport_mooncake_store::{Layout, StoreConfig, StoreTransport};

use super::{Choice, DEFAULT_POOL, Finding, receive::OnDevice};
use crate::{
    config::{Config, Master, MooncakeConfig, StoreReads},
    mooncake,
};

/// Longest time that the master may take to accept a connection.
const PROBE: Duration = Duration::from_secs(3);

/// Looks for Mooncake and for its master. Blocks.
pub(crate) fn probe(config: &MooncakeConfig) -> Finding {
    let found = mooncake::Provider::find(config)
        .map_err(|error| mooncake::and_its_master(config, error).to_string())?;
    let Some(master) = &config.master else {
        return Err(format!("{}, but no master is named: set mooncake", found.reason));
    };
    let where_ = match master {
        Master::Managed => "a master is started with the job".to_owned(),
        Master::At(address) => {
            reach(address).map_err(|error| format!("{}, but {error}", found.reason))?
        }
    };
    let reads = match reader(config).map_err(|error| error.to_string())? {
        Some(reader) => reader.name().to_owned(),
        None => "Mooncake's engine".to_owned(),
    };
    Ok(format!("{}; {where_}; one copy, read by {reads}", found.reason))
}

/// Whether anything listens at the master's address. Others than `host:port` are taken as they are.
pub(crate) fn reach(address: &str) -> Result<String> {
    let Ok(name) = address.parse::<SessionName>() else {
        return Ok(format!("the master at {address} was not asked"));
    };
    let fail = |error| {
        Error::io("reach master", error)
            .with("master", address)
            .remedy("start mooncake_master, or correct the setting mooncake")
    };
    let mut last = None;
    for address in (name.host(), name.port()).to_socket_addrs().map_err(fail)?.take(4) {
        match TcpStream::connect_timeout(&address, PROBE) {
            Ok(_) => return Ok(format!("the master at {address} answers")),
            Err(error) => last = Some(fail(error)),
        }
    }
    Err(last.unwrap_or_else(|| {
        Error::new(ErrorKind::NotFound, "reach master", "the name of the host has no address")
            .with("master", address)
    }))
}

/// The first address of a name.
#[cfg(feature = "cli")]
pub(crate) fn address_of(name: &SessionName) -> Result<std::net::SocketAddr> {
    const RESOLVE: &str = "resolve name";
    let fail = |error| Error::io(RESOLVE, error).with("name", name);
    let mut addresses = (name.host(), name.port()).to_socket_addrs().map_err(fail)?;
    let missing = || {
        Error::new(ErrorKind::NotFound, RESOLVE, "the name of the host has no address")
            .with("name", name)
    };
    addresses.next().ok_or_else(missing)
}

/// Joins the store as a trainer, which receives on `receiver` if the survey has opened it.
pub(super) async fn connect(
    config: &Config,
    choice: &Choice,
    receiver: Option<OnDevice>,
) -> Result<Arc<dyn Transport>> {
    let pool = config.pool.unwrap_or(DEFAULT_POOL);
    let transport = start_on(config.mooncake.clone(), 0, pool, receiver).await?;
    Ok(Arc::new(transport.because(choice.reason())))
}

/// Joins the store, with `segment` bytes of object memory and all of `pool` registered at once.
#[cfg(any(feature = "cli", feature = "rollout"))]
pub(crate) async fn start(
    config: MooncakeConfig,
    segment: u64,
    pool: ByteSize,
) -> Result<StoreTransport> {
    start_on(config, segment, pool, None).await
}

async fn start_on(
    config: MooncakeConfig,
    segment: u64,
    pool: ByteSize,
    receiver: Option<OnDevice>,
) -> Result<StoreTransport> {
    let joining = tokio::task::spawn_blocking(move || {
        let reader = reader(&config)?;
        let (api, _) = mooncake::join(&config, segment)?;
        let settings = settings(&config, pool);
        match receiver {
            Some(device) => device.start_store(api, settings, reader, pool),
            None => StoreTransport::start_with(api, settings, reader),
        }
    });
    joining.await.map_err(|e| {
        Error::new(ErrorKind::Unexpected, "join Mooncake Store", "joining panicked").source(e)
    })?
}

fn settings(config: &MooncakeConfig, pool: ByteSize) -> StoreConfig {
    let mut settings = StoreConfig::default().pool(pool, pool);
    settings.read_lease = Some(config.lease);
    if !config.segments_are_sessions() {
        settings.segment_silence = None; // nobody could be asked for a sign of life
    }
    if config.group_below.get() > 0 {
        settings.layout = Layout::Grouped { below: config.group_below };
    }
    settings
}

/// What reads the memory of others, if it is not Mooncake's engine.
fn reader(config: &MooncakeConfig) -> Result<Option<Arc<dyn SegmentReader>>> {
    let why_not = if !cfg!(feature = "direct") {
        Some("this build has no native tcp engine")
    } else if config.protocol != "tcp" {
        Some("the store's protocol is not tcp")
    } else if !config.segments_are_sessions() {
        Some("segments that a metadata server knows are not found by their names")
    } else {
        None
    };
    match (config.reads, why_not) {
        (StoreReads::Mooncake, _) | (StoreReads::Auto, Some(_)) => Ok(None),
        (StoreReads::Native, Some(why)) => {
            Err(Error::new(ErrorKind::ConfigInvalid, "join Mooncake Store", why)
                .with("setting", "mooncake_reads")
                .remedy("set it to auto or mooncake"))
        }
        (StoreReads::Auto | StoreReads::Native, None) => Ok(native()),
    }
}

#[cfg(feature = "direct")]
fn native() -> Option<Arc<dyn SegmentReader>> {
    use transport_mooncake_direct::{TcpEngine, TcpOptions};
    Some(Arc::new(TcpEngine::new(TcpOptions::default())))
}

#[cfg(not(feature = "direct"))]
fn native() -> Option<Arc<dyn SegmentReader>> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Settings;

    fn config(set: &[(&str, &str)]) -> MooncakeConfig {
        let mut settings = Settings::new();
        set.iter().for_each(|&(name, text)| settings.set(name, text).unwrap());
        MooncakeConfig::from_settings(&settings).unwrap()
    }

    #[test]
    fn settings_of_the_store_follow_those_of_mooncake() {
        let pool = ByteSize::mib(1);
        let plain = settings(&config(&[("mooncake_lease", "3s")]), pool);
        assert_eq!(plain.layout, Layout::PerTensor, "others read it");
        assert_eq!(plain.read_lease, Some(Duration::from_secs(3)));
        assert!(plain.segment_silence.is_some());
        let grouped = settings(&config(&[("mooncake_group_below", "64KiB")]), pool);
        assert_eq!(grouped.layout, Layout::Grouped { below: "64KiB".parse().unwrap() });
        // With a metadata server no segment's name leads to its owner.
        let served = settings(&config(&[("mooncake_metadata", "http://127.0.0.1:1/m")]), pool);
        assert_eq!(served.segment_silence, None);
    }

    #[test]
    fn reads_are_native_where_they_can_be_and_never_otherwise() {
        let read = |set: &[(&str, &str)]| reader(&config(set)).map(|reader| reader.is_some());
        let native = cfg!(feature = "direct");
        assert_eq!(read(&[]).unwrap(), native);
        assert!(!read(&[("mooncake_reads", "mooncake")]).unwrap());
        for other in [("mooncake_protocol", "rdma"), ("mooncake_metadata", "http://127.0.0.1:1/m")]
        {
            assert!(!read(&[other]).unwrap());
            let refused = read(&[other, ("mooncake_reads", "native")]).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ConfigInvalid, "{refused}");
            assert_eq!(refused.context("setting"), Some("mooncake_reads"));
        }
    }
}
