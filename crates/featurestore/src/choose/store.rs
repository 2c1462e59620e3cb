//! Whether and how this process reads from Mooncake Store.

use std::{
    net::{TcpStream, ToSocketAddrs},
    sync::Arc,
    time::Duration,
};

use transport_core::{ByteSize, Error, ErrorKind, Result, SessionName, Transport};
use transport_mooncake_store::{StoreConfig, StoreTransport};

use super::{Choice, DEFAULT_POOL, Finding};
use crate::{
    config::{Config, Master, MooncakeConfig},
    mooncake,
};

/// Longest time that the master may take to accept a connection.
const PROBE: Duration = Duration::from_secs(3);

/// Looks for Mooncake and for its master. Blocks.
pub(super) fn probe(config: &MooncakeConfig) -> Finding {
    let found = mooncake::Provider::find(config).map_err(|error| error.to_string())?;
    let Some(master) = &config.master else {
        return Err(format!("{}, but no master is named: set mooncake", found.reason));
    };
    let where_ = match master {
        Master::Managed => "a master is started with the job".to_owned(),
        Master::At(address) => {
            reach(address).map_err(|error| format!("{}, but {error}", found.reason))?
        }
    };
    Ok(format!("{}; {where_}; one copy", found.reason))
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

/// Joins the store as a trainer.
pub(super) async fn connect(config: &Config, choice: &Choice) -> Result<Arc<dyn Transport>> {
    let pool = config.pool.unwrap_or(DEFAULT_POOL);
    let transport = start(config.mooncake.clone(), 0, pool).await?;
    Ok(Arc::new(transport.because(choice.reason())))
}

/// Joins the store, with `segment` bytes of object memory and all of `pool` registered at once.
pub(crate) async fn start(
    config: MooncakeConfig,
    segment: u64,
    pool: ByteSize,
) -> Result<StoreTransport> {
    let joining = tokio::task::spawn_blocking(move || {
        let (api, _) = mooncake::join(&config, segment)?;
        let mut settings = StoreConfig::default().pool(pool, pool);
        settings.read_lease = Some(config.lease);
        StoreTransport::start(api, settings)
    });
    joining.await.map_err(|e| {
        Error::new(ErrorKind::Unexpected, "join Mooncake Store", "joining panicked").source(e)
    })?
}
