//! Where Mooncake's store is, and what loads it.

use std::{fmt, path::PathBuf, str::FromStr, time::Duration};

use transport_core::{ByteSize, Error, Result, SessionName, check_host};

use super::{
    Problems, Settings, duration,
    value::{bad, fold, suggestion},
};

/// A master of Mooncake Store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Master {
    /// One that the command starts, and ends with itself.
    Managed,
    /// One that runs: `host:port`, or an address of another form such as `etcd://…`.
    At(String),
}

impl FromStr for Master {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let address = text.trim();
        if fold(address) == "managed" {
            return Ok(Self::Managed);
        }
        if !address.contains("://") {
            address.parse::<SessionName>().map_err(|why| {
                bad("not a master", text)
                    .source(why)
                    .remedy("write managed, or the master's address such as 127.0.0.1:50051")
            })?;
        }
        Ok(Self::At(address.to_owned()))
    }
}

impl fmt::Display for Master {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Managed => "managed",
            Self::At(address) => address,
        })
    }
}

/// What reads the object memory of other processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StoreReads {
    /// The native tcp engine where it can, else Mooncake's own.
    #[default]
    Auto,
    /// The native tcp engine. An error where the protocol is another, or a metadata server is used.
    Native,
    /// Mooncake's own engine.
    Mooncake,
}

impl FromStr for StoreReads {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match fold(text).as_str() {
            "auto" => Ok(Self::Auto),
            "native" => Ok(Self::Native),
            "mooncake" => Ok(Self::Mooncake),
            _ => Err(bad("no way to read", text).remedy("write auto, native or mooncake")),
        }
    }
}

impl fmt::Display for StoreReads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Native => "native",
            Self::Mooncake => "mooncake",
        })
    }
}

/// How a process finds Mooncake and joins a store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MooncakeConfig {
    /// The store's master.
    pub master: Option<Master>,
    /// Where the master serves its metrics.
    pub admin: Option<SessionName>,
    /// Host by which other clients reach this process.
    pub host: String,
    /// `P2PHANDSHAKE`, or the address of a metadata server.
    pub metadata: String,
    /// How payload moves.
    pub protocol: String,
    /// RDMA devices, separated by commas; empty for all.
    pub devices: String,
    /// Virtual environment with the wheel; searched for if none.
    pub venv: Option<PathBuf>,
    /// File of the C library; searched for if none, after the wheel.
    pub library: Option<PathBuf>,
    /// Libraries to open before Mooncake's, in order.
    pub preload: Vec<PathBuf>,
    /// How long the master's read leases last.
    pub lease: Duration,
    /// What reads the object memory of other processes.
    pub reads: StoreReads,
    /// Tensors of a sample below this size share one object; 0 for none.
    pub group_below: ByteSize,
}

impl MooncakeConfig {
    /// Checks and types what is in force. All that is wrong is reported at once.
    pub fn from_settings(settings: &Settings) -> Result<Self> {
        let mut problems = Problems::default();
        let text = |text: &str| match text.trim() {
            "" => Err(bad("the setting is empty", text)),
            trimmed => Ok(trimmed.to_owned()),
        };
        let path = |found: &str| text(found).map(PathBuf::from);
        let paths = |found: &str| -> Result<Vec<PathBuf>> {
            Ok(found.split(',').map(str::trim).filter(|p| !p.is_empty()).map(Into::into).collect())
        };
        let host = |found: &str| {
            check_host(found).map_err(|why| bad(why, found)).map(|()| found.to_owned())
        };
        let master = problems.note(settings.get("mooncake", str::parse));
        let admin = problems.note(settings.get("mooncake_admin", str::parse));
        let host = problems.note(settings.need("mooncake_host", host));
        let metadata = problems.note(settings.need("mooncake_metadata", text));
        let protocol = problems.note(settings.need("mooncake_protocol", protocol));
        let devices = problems.note(settings.get("mooncake_devices", text));
        let venv = problems.note(settings.get("mooncake_venv", path));
        let library = problems.note(settings.get("mooncake_library", path));
        let preload = problems.note(settings.get("mooncake_preload", paths));
        let lease = problems.note(settings.need("mooncake_lease", duration));
        let reads = problems.note(settings.need("mooncake_reads", str::parse));
        let group_below = problems.note(settings.need("mooncake_group_below", str::parse));
        problems.settle("configure")?;
        const NOTED: &str = "what is missing is a problem, and problems end this";
        Ok(Self {
            master: master.expect(NOTED),
            admin: admin.expect(NOTED),
            host: host.expect(NOTED),
            metadata: metadata.expect(NOTED),
            protocol: protocol.expect(NOTED),
            devices: devices.expect(NOTED).unwrap_or_default(),
            venv: venv.expect(NOTED),
            library: library.expect(NOTED),
            preload: preload.expect(NOTED).unwrap_or_default(),
            lease: lease.expect(NOTED),
            reads: reads.expect(NOTED),
            group_below: group_below.expect(NOTED),
        })
    }

    /// Whether the name of a segment is `host:port` of its owner's handshake.
    #[cfg(feature = "store")]
    pub(crate) fn segments_are_sessions(&self) -> bool {
        self.metadata == "P2PHANDSHAKE"
    }

    /// The same settings as variables of the environment, for a process that is started.
    #[cfg(feature = "cli")]
    pub(crate) fn variables(&self) -> Vec<(&'static str, String)> {
        let path = |path: &PathBuf| path.display().to_string();
        let preload: Vec<_> = self.preload.iter().map(path).collect();
        let given = |text: &String| (!text.is_empty()).then(|| text.clone());
        [
            ("FEATURESTORE_MOONCAKE", self.master.as_ref().map(ToString::to_string)),
            ("FEATURESTORE_MOONCAKE_ADMIN", self.admin.as_ref().map(ToString::to_string)),
            ("FEATURESTORE_MOONCAKE_HOST", given(&self.host)),
            ("FEATURESTORE_MOONCAKE_METADATA", given(&self.metadata)),
            ("FEATURESTORE_MOONCAKE_PROTOCOL", given(&self.protocol)),
            ("FEATURESTORE_MOONCAKE_DEVICES", given(&self.devices)),
            ("FEATURESTORE_MOONCAKE_VENV", self.venv.as_ref().map(path)),
            ("FEATURESTORE_MOONCAKE_LIBRARY", self.library.as_ref().map(path)),
            ("FEATURESTORE_MOONCAKE_PRELOAD", given(&preload.join(","))),
            ("FEATURESTORE_MOONCAKE_LEASE", Some(format!("{}ms", self.lease.as_millis()))),
            ("FEATURESTORE_MOONCAKE_READS", Some(self.reads.to_string())),
            ("FEATURESTORE_MOONCAKE_GROUP_BELOW", Some(self.group_below.get().to_string())),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
        .collect()
    }
}

/// Mooncake's names of its transports, as far as this project knows them.
pub(crate) const PROTOCOLS: [&str; 4] = ["tcp", "rdma", "nvlink", "nvlink_intra"];

fn protocol(found: &str) -> Result<String> {
    let name = fold(found);
    if PROTOCOLS.contains(&name.as_str()) {
        return Ok(name);
    }
    let known = suggestion(&name, PROTOCOLS.into_iter());
    Err(bad("no such protocol of Mooncake", found).remedy(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masters_are_managed_or_somewhere() {
        for text in ["managed", " Managed "] {
            assert_eq!(text.parse::<Master>().unwrap(), Master::Managed);
        }
        for text in ["127.0.0.1:50051", "[::1]:1", "etcd://a:1;b:2"] {
            let master: Master = text.parse().unwrap();
            assert_eq!(master, Master::At(text.into()));
            assert_eq!(master.to_string(), text);
        }
        for text in ["", "manage", "127.0.0.1", "http:50051:1", "127.0.0.1:0"] {
            let error = text.parse::<Master>().unwrap_err().to_string();
            assert!(error.contains("managed"), "{text}: {error}");
        }
    }

    #[cfg(feature = "cli")]
    #[test]
    fn a_process_that_is_started_has_the_same_settings() {
        let mut settings = Settings::new();
        for (name, text) in [
            ("mooncake", "127.0.0.1:50051"),
            ("mooncake_admin", "127.0.0.1:9003"),
            ("mooncake_host", "::1"),
            ("mooncake_protocol", "rdma"),
            ("mooncake_devices", "a,b"),
            ("mooncake_venv", "/v"),
            ("mooncake_library", "/l.so"),
            ("mooncake_preload", "/a.so,/b.so"),
            ("mooncake_lease", "1500ms"),
            ("mooncake_reads", "Native"),
            ("mooncake_group_below", "1MiB"),
        ] {
            settings.set(name, text).unwrap();
        }
        let config = MooncakeConfig::from_settings(&settings).unwrap();
        let variables = config.variables().into_iter();
        let variables = variables.map(|(name, value)| (name.into(), value.into()));
        let settings = Settings::new().environment(variables).unwrap();
        assert_eq!(MooncakeConfig::from_settings(&settings).unwrap(), config);
    }

    #[test]
    fn every_mistake_is_named() {
        let mut settings = Settings::new();
        for (name, text) in [
            ("mooncake", "nowhere"),
            ("mooncake_lease", "soon"),
            ("mooncake_venv", " "),
            ("mooncake_reads", "somehow"),
            ("mooncake_group_below", "small"),
            ("mooncake_protocol", "rmda"),
        ] {
            settings.set(name, text).unwrap();
        }
        let error = MooncakeConfig::from_settings(&settings).unwrap_err().to_string();
        for part in [
            "6 problems",
            "mooncake_lease",
            "mooncake_venv",
            "mooncake_reads",
            "group",
            "did you mean rdma? known: tcp, rdma, nvlink, nvlink_intra",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
        let mut settings = Settings::new();
        settings.set("mooncake_protocol", " TCP ").unwrap();
        settings.set("mooncake_preload", "a.so, b.so,").unwrap();
        let config = MooncakeConfig::from_settings(&settings).unwrap();
        assert_eq!((config.protocol.as_str(), config.preload.len()), ("tcp", 2));
    }
}
