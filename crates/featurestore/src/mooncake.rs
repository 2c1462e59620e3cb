//! Mooncake's store: which library serves it here, and how a process joins it.

use std::sync::Arc;

#[cfg(feature = "mooncake")]
use mooncake_sys::cabi::{LibraryOptions, StoreLibrary};
#[cfg(feature = "mooncake-python")]
use mooncake_sys::python::{Wheel, WheelOptions, WheelStore};
use mooncake_sys::{StoreApi, StoreSetup};
use transport_core::{Error, ErrorKind, Result};

use crate::config::{Master, MooncakeConfig};

const FIND: &str = "find Mooncake";

/// What would serve the store here.
#[derive(Debug)]
pub(crate) struct Provider {
    kind: Kind,
    /// Why this one.
    pub(crate) reason: String,
}

#[derive(Debug)]
enum Kind {
    #[cfg(feature = "mooncake")]
    Library(StoreLibrary),
    #[cfg(feature = "mooncake-python")]
    Wheel(WheelOptions),
}

impl Provider {
    /// Decides: a library that is named, else the wheel, else a library that is found. What is
    /// named and does not do is an error.
    pub(crate) fn find(config: &MooncakeConfig) -> Result<Self> {
        #[cfg(feature = "mooncake")]
        if config.library.is_some() || named_library() {
            return library(config, "its file is named");
        }
        if !cfg!(feature = "mooncake") && config.library.is_some() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                FIND,
                "a library is named, and this build opens none",
            )
            .with("setting", "mooncake_library")
            .remedy("build with the feature mooncake"));
        }
        #[cfg(feature = "mooncake-python")]
        let missing = match wheel(config) {
            Ok(provider) => return Ok(provider),
            Err(error) => error,
        };
        #[cfg(not(feature = "mooncake-python"))]
        let missing = Error::new(ErrorKind::Unsupported, FIND, "this build loads no wheel")
            .remedy("build with the feature mooncake-python (the wheel) or mooncake (a library)");
        #[cfg(feature = "mooncake")]
        if config.venv.is_none()
            && let Ok(provider) = library(config, "there is no wheel, and the library was found")
        {
            return Ok(provider);
        }
        Err(missing)
    }

    /// Joins a store.
    fn connect(&self, setup: &StoreSetup) -> Result<Arc<dyn StoreApi>> {
        match &self.kind {
            #[cfg(feature = "mooncake")]
            Kind::Library(library) => Ok(Arc::new(library.connect(setup)?)),
            #[cfg(feature = "mooncake-python")]
            Kind::Wheel(options) => Ok(Arc::new(WheelStore::connect(options, setup)?)),
            #[cfg(not(any(feature = "mooncake", feature = "mooncake-python")))]
            _ => unreachable!("nothing serves the store in this build, and {setup:?} is not used"),
        }
    }
}

#[cfg(feature = "mooncake")]
fn named_library() -> bool {
    std::env::var_os(StoreLibrary::VARIABLE).is_some_and(|file| !file.is_empty())
}

#[cfg(feature = "mooncake")]
pub(crate) fn library_options(config: &MooncakeConfig) -> LibraryOptions {
    let mut options = LibraryOptions::default();
    options.path.clone_from(&config.library);
    options.preload.clone_from(&config.preload);
    options
}

#[cfg(feature = "mooncake")]
fn library(config: &MooncakeConfig, why: &str) -> Result<Provider> {
    let library = StoreLibrary::load(&library_options(config))?;
    let reason = format!("{}: {why}", library.info());
    Ok(Provider { kind: Kind::Library(library), reason })
}

#[cfg(feature = "mooncake-python")]
pub(crate) fn wheel_options(config: &MooncakeConfig) -> WheelOptions {
    let mut options = WheelOptions::default();
    options.environment.clone_from(&config.venv);
    options.preload.clone_from(&config.preload);
    options
}

#[cfg(feature = "mooncake-python")]
fn wheel(config: &MooncakeConfig) -> Result<Provider> {
    let options = wheel_options(config);
    let wheel = Wheel::find(&options)?;
    let version = match &wheel.distribution {
        Some((name, version)) => format!("{name} {version}"),
        None => "of unknown version".into(),
    };
    let reason = format!("wheel {version} in {}", wheel.packages.display());
    Ok(Provider { kind: Kind::Wheel(options), reason })
}

/// How this process joins, adding `segment` bytes of object memory.
pub(crate) fn setup(config: &MooncakeConfig, segment: u64) -> Result<StoreSetup> {
    let missing = |why, remedy| {
        Err(Error::new(ErrorKind::ConfigInvalid, "join Mooncake Store", why)
            .with("setting", "mooncake")
            .remedy(remedy))
    };
    let master = match &config.master {
        Some(Master::At(address)) => address,
        Some(Master::Managed) => {
            return missing(
                "only the pipeline starts a master",
                "start mooncake_master and give its address: --mooncake HOST:PORT",
            );
        }
        None => {
            return missing(
                "no master is named",
                "give --mooncake HOST:PORT or set FEATURESTORE_MOONCAKE; the pipeline also takes \
                 --mooncake managed",
            );
        }
    };
    let mut setup = StoreSetup::client(&config.host, master).segment(segment);
    setup.metadata.clone_from(&config.metadata);
    setup.protocol.clone_from(&config.protocol);
    setup.devices.clone_from(&config.devices);
    setup.check()?;
    check_forced(config, |name| std::env::var_os(name).is_some())?;
    Ok(setup)
}

/// Refuses a variable that makes Mooncake run another transport than the protocol says: it counts
/// even if it is empty, and Mooncake does not say a word.
fn check_forced(config: &MooncakeConfig, is_set: impl Fn(&str) -> bool) -> Result<()> {
    const FORCES_TCP: &str = "MC_FORCE_TCP"; // comes before all others
    if config.protocol != "rdma" || !is_set(FORCES_TCP) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::ConfigInvalid,
        "join Mooncake Store",
        "a variable makes Mooncake run another transport than the one asked for",
    )
    .with("setting", "mooncake_protocol")
    .with("expected", &config.protocol)
    .with("variable", FORCES_TCP)
    .remedy("unset the variable, or choose its protocol"))
}

/// Joins the store: the client, and what serves it and why. All that is missing is said at once.
/// Blocks.
pub(crate) fn join(config: &MooncakeConfig, segment: u64) -> Result<(Arc<dyn StoreApi>, String)> {
    match (setup(config, segment), Provider::find(config)) {
        (Ok(setup), Ok(provider)) => Ok((provider.connect(&setup)?, provider.reason)),
        (Ok(_), Err(error)) => Err(and_its_master(config, error)),
        (Err(error), Ok(_)) => Err(error),
        (Err(error), Err(also)) => Err(error.with("also", also)),
    }
}

/// Without Mooncake nobody gets as far as its master: says here if that is not there either.
pub(crate) fn and_its_master(config: &MooncakeConfig, error: Error) -> Error {
    let Some(Master::At(address)) = &config.master else { return error };
    match crate::choose::store::reach(address) {
        Ok(_) => error,
        Err(also) => error.with("also", also),
    }
}

/// Variables that Mooncake reads once, when it is loaded, with the values that suit this
/// configuration; those that the environment has already are left out.
///
/// - `MC_FORCE_TCP`: without it the protocol that is asked for does not choose the transport;
/// - `MC_FORCE_HCA`: without it a machine on which no device for rdma is found runs tcp instead;
/// - `MC_TCP_BIND_ADDRESS`: the address that peers are told, where the host is one. Mooncake's ports
///   are open on every address all the same: no setting of 0.3.13 changes that;
/// - `MC_USE_IPV6`: without it Mooncake listens at no IPv6 address, and asks none;
/// - `MC_LOG_LEVEL`: its log on standard error is for failures.
pub fn environment(config: &MooncakeConfig) -> Vec<(&'static str, String)> {
    let runs = |protocol: &str| (config.protocol == protocol).then(|| "1".to_owned());
    let address = config.host.parse::<std::net::IpAddr>().ok();
    [
        ("MC_FORCE_TCP", runs("tcp")),
        ("MC_FORCE_HCA", runs("rdma")),
        ("MC_TCP_BIND_ADDRESS", address.map(|address| address.to_string())),
        ("MC_USE_IPV6", address.filter(|address| address.is_ipv6()).map(|_| "1".to_owned())),
        ("MC_LOG_LEVEL", Some("ERROR".to_owned())),
    ]
    .into_iter()
    .filter(|(name, _)| std::env::var_os(name).is_none())
    .filter_map(|(name, value)| Some((name, value?)))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rdma_never_becomes_tcp_without_a_word() {
        let settings = crate::Settings::new();
        let mut config = MooncakeConfig::from_settings(&settings).unwrap();
        assert!(check_forced(&config, |_| true).is_ok(), "tcp is what is asked for");
        config.protocol = "rdma".into();
        assert!(check_forced(&config, |_| false).is_ok());
        let error = check_forced(&config, |name| name == "MC_FORCE_TCP").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{error}");
        let set = environment(&config);
        if std::env::var_os("MC_FORCE_HCA").is_none() {
            assert!(set.contains(&("MC_FORCE_HCA", "1".into())), "no fall-back: {set:?}");
        }
        assert!(set.iter().all(|(name, _)| *name != "MC_FORCE_TCP"), "{set:?}");
    }

    #[test]
    fn a_host_in_ipv6_has_mooncake_speak_it() {
        let mut config = MooncakeConfig::from_settings(&crate::Settings::new()).unwrap();
        let six = ("MC_USE_IPV6", "1".to_owned());
        for (host, is_six) in
            [("::1", true), ("2001:db8::2", true), ("127.0.0.1", false), ("a", false)]
        {
            config.host = host.into();
            let said = std::env::var_os(six.0).is_some();
            assert_eq!(environment(&config).contains(&six), is_six && !said, "{host}");
        }
    }

    /// Before anything is loaded or captured, and not one after the other.
    #[test]
    fn f62_all_that_a_store_lacks_is_said_at_once() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let nobody = listener.local_addr().unwrap().to_string();
        drop(listener);
        let folder = tempfile::tempdir().unwrap();
        let mut settings = crate::Settings::new();
        let venv = folder.path().display().to_string();
        settings.set("mooncake_venv", &venv).unwrap();
        settings.set("mooncake", &nobody).unwrap();
        let config = MooncakeConfig::from_settings(&settings).unwrap();
        let why = Provider::find(&config).unwrap_err().kind();
        let error = join(&config, 0).unwrap_err();
        assert_eq!(error.kind(), why, "{error}");
        let also = error.context("also").unwrap();
        assert!(also.contains(&nobody) && also.contains("mooncake_master"), "{error}");
        // As the choice of a transport sees it, and with no master named.
        let said = crate::choose::store::probe(&config).unwrap_err();
        assert!(said.contains(&nobody), "{said}");
        settings.set("mooncake", "managed").unwrap();
        let config = MooncakeConfig::from_settings(&settings).unwrap();
        let error = join(&config, 0).unwrap_err();
        assert_eq!(error.context("setting"), Some("mooncake"), "{error}");
        assert!(error.context("also").is_some(), "{error}");
    }
}
