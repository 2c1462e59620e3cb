//! Which Mooncake can be loaded here, what it can do, and where its store is.

#[cfg(feature = "mooncake")]
use mooncake_sys::cabi::{EngineLibrary, LibraryOptions, StoreLibrary};
#[cfg(feature = "mooncake-python")]
use mooncake_sys::python::Interpreter;
use mooncake_sys::{ReplicaPolicy, master::Admin};

use super::{Section, fields};
use crate::{
    choose,
    config::{Config, Master, MooncakeConfig},
    mooncake::{self, Provider},
};

/// Variables whose mere presence makes Mooncake choose a transport, whatever their value.
const FORCING: [&str; 6] = [
    "MC_FORCE_TCP",
    "MC_FORCE_HCA",
    "MC_FORCE_MNNVL",
    "MC_INTRANODE_NVLINK",
    "MC_INTRA_NVLINK",
    "MC_USE_TENT",
];

pub(super) fn examine(config: &Config) -> Section {
    let config = &config.mooncake;
    let mut section = Section::new("mooncake");
    libraries(&mut section, config);
    wheel(&mut section, config);
    match Provider::find(config) {
        Ok(provider) => section.fact("serves the store", provider.reason),
        Err(error) => section.fact("serves the store", format!("nothing: {error}")),
    };
    master(&mut section, config);
    let lease = config.lease.as_millis() as u64;
    section.fact("read lease ms", lease).advise_if(
        lease < 10_000,
        "reads of several trainers outlast short leases; 10 s is what holds in practice",
    );
    let policy = ReplicaPolicy::default();
    section.fact(
        "objects",
        fields([
            ("replicas", policy.replicas.into()),
            ("hard_pin", policy.hard_pin.into()),
            ("layout", "one a tensor".into()),
        ]),
    );
    section.fact("host", config.host.as_str());
    section.fact("protocol", config.protocol.as_str());
    environment(&mut section, config);
    section.fact("ports", "a client's ports are open on every address").advise_if(
        true,
        "no setting of Mooncake changes that: keep strangers away by a firewall or a network of \
         its own",
    );
    section
}

#[cfg(feature = "mooncake")]
fn libraries(section: &mut Section, config: &MooncakeConfig) {
    let options = mooncake::library_options(config);
    match StoreLibrary::load(&options) {
        Ok(library) => {
            let info = library.info();
            section.fact(
                "store library",
                fields([
                    ("file", info.file.display().to_string().into()),
                    ("version", info.version.clone().into()),
                    ("batch_remove", info.store.batch_remove.into()),
                    ("tenants", info.store.tenants.into()),
                ]),
            );
        }
        Err(error) => drop(section.fact("store library", error.to_string())),
    }
    let mut options = LibraryOptions::default();
    options.preload.clone_from(&config.preload);
    match EngineLibrary::load(&options) {
        Ok(library) => section.fact("engine library", library.info().to_string()),
        Err(error) => section.fact("engine library", error.to_string()),
    };
}

#[cfg(not(feature = "mooncake"))]
fn libraries(section: &mut Section, _: &MooncakeConfig) {
    section.fact("store library", "feature mooncake not built");
}

#[cfg(feature = "mooncake-python")]
fn wheel(section: &mut Section, config: &MooncakeConfig) {
    let interpreter = match Interpreter::start(&mooncake::wheel_options(config)) {
        Ok(interpreter) => interpreter,
        Err(error) => {
            section.fact("wheel", error.to_string());
            return;
        }
    };
    let wheel = interpreter.wheel();
    let version = wheel.distribution.as_ref().map(|(name, version)| format!("{name} {version}"));
    section.fact(
        "wheel",
        fields([
            ("version", version.into()),
            ("python", wheel.python.clone().into()),
            ("packages", wheel.packages.display().to_string().into()),
        ]),
    );
    let facts = match interpreter.inspect() {
        Ok(facts) => facts,
        Err(error) => {
            section.fact("wheel's modules", error.to_string());
            return;
        }
    };
    section.fact("libpython", facts.libpython.display().to_string());
    for (name, file) in [("wheel's store", facts.store), ("wheel's engine", facts.engine)] {
        let (text, missing) = match file {
            Ok(file) => (file.display().to_string(), false),
            Err(error) => (error.to_string(), true),
        };
        section.fact(name, text).advise_if(
            missing,
            "install the libraries that it needs: on Debian libibverbs1 libnuma1 libcurl4 librdmacm1",
        );
    }
    let flags = facts.flags.into_iter().map(|(name, yes)| (name, yes.into())).collect();
    section.fact("support flags", serde_json::Value::Object(flags));
}

#[cfg(not(feature = "mooncake-python"))]
fn wheel(section: &mut Section, _: &MooncakeConfig) {
    section.fact("wheel", "feature mooncake-python not built");
}

fn master(section: &mut Section, config: &MooncakeConfig) {
    let found = match &config.master {
        None => "none is named: set mooncake".to_owned(),
        Some(Master::Managed) => "started with the job".to_owned(),
        Some(Master::At(address)) => {
            choose::store::reach(address).unwrap_or_else(|error| error.to_string())
        }
    };
    section.fact("master", found);
    let Some(admin) = &config.admin else { return };
    let metrics = choose::store::address_of(admin).map(Admin::at).and_then(Admin::metrics);
    match metrics {
        Ok(metrics) => {
            let count = |name| (metrics.value(name) as u64).into();
            section.fact(
                "master's metrics",
                fields([
                    ("objects", count("master_key_count")),
                    ("allocated_bytes", count("master_allocated_bytes")),
                    ("capacity_bytes", count("master_total_capacity_bytes")),
                    ("clients", count("master_active_clients")),
                ]),
            );
        }
        Err(error) => drop(section.fact("master's metrics", error.to_string())),
    }
}

fn environment(section: &mut Section, config: &MooncakeConfig) {
    let forcing: Vec<&str> =
        FORCING.into_iter().filter(|name| std::env::var_os(name).is_some()).collect();
    let surprising = forcing.iter().any(|name| *name != "MC_FORCE_TCP");
    section.fact("forcing variables", forcing).advise_if(
        surprising,
        "they choose Mooncake's transport by being set, to 0 as well: unset what is not wanted",
    );
    let given: Vec<String> = mooncake::environment(config)
        .into_iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    section.fact("set when loaded", given);
}
