//! Settings: where each value comes from, what it may be, and what is in force.
//!
//! Precedence: command line, then environment (`FEATURESTORE_…`), then file, then default. Values
//! have the same grammar everywhere; an unknown key is an error that names the nearest known one.

mod mooncake;
mod problems;
mod receive;
#[cfg(feature = "cli")]
mod server;
mod text;
mod trainer;
mod value;

use std::{collections::BTreeMap, ffi::OsString, fmt, path::Path};

use transport_core::{Error, ErrorKind, Result};

#[cfg(all(test, feature = "direct", any(feature = "mooncake", feature = "mooncake-python")))]
pub(crate) use mooncake::PROTOCOLS;
pub use mooncake::{Master, MooncakeConfig, StoreReads};
pub use problems::Problems;
pub use receive::Receive;
#[cfg(feature = "cli")]
pub use server::{ArenaKind, ServerConfig};
use text::of_yaml;
pub(crate) use text::{read_file, toml_table};
pub use trainer::{Config, TransportChoice};
pub use value::duration;
pub(crate) use value::suggestion;
use value::{fold, nearest};

/// One setting: its names and what it means.
#[derive(Debug)]
#[non_exhaustive]
pub struct Key {
    /// Name in a file, as flag (with `-` for `_`) and, upper-cased after `FEATURESTORE_`, in the
    /// environment.
    pub name: &'static str,
    /// Default as written in a file; none if there is no value unless somebody gives one.
    pub default: Option<&'static str>,
    /// What it means, for people.
    pub help: &'static str,
}

impl Key {
    /// Whether it is true or false.
    pub fn is_boolean(&self) -> bool {
        matches!(self.default, Some("true" | "false"))
    }

    /// Whether it makes a difference where samples are moved by `transport`, and received as
    /// `receive` says.
    pub fn counts_for(&self, transport: TransportChoice, receive: Receive) -> bool {
        use TransportChoice::{Auto, Mooncake, Shm, Store};
        match self.name {
            "mooncake"
            | "mooncake_admin"
            | "mooncake_lease"
            | "mooncake_reads"
            | "mooncake_group_below" => transport == Store,
            name if name.starts_with("mooncake_") => matches!(transport, Mooncake | Store),
            "arena_kind" | "data" | "control" | "advertise" | "token" => transport != Store,
            "populate" => transport != Store && !transport.is_of_devices(),
            "device" => transport == Auto || receive.is_on_device(transport),
            "pool" => transport != Shm,
            _ => true,
        }
    }

    /// Whether the value is never shown.
    fn secret(&self) -> bool {
        self.name == "token"
    }
}

const fn key(name: &'static str, default: &'static str, help: &'static str) -> Key {
    Key { name, default: Some(default), help }
}

const fn optional(name: &'static str, help: &'static str) -> Key {
    Key { name, default: None, help }
}

/// Every setting.
pub const KEYS: &[Key] = &[
    key(
        "transport",
        "auto",
        "how samples are moved: auto, nvlink_intra, nvlink, shm, tcp, mooncake or store",
    ),
    key(
        "receive",
        "auto",
        "where a trainer receives samples: device (memory of its GPU), host, or auto for device under \
         nvlink_intra and nvlink and host under the others",
    ),
    key("strict", "false", "whether an unavailable transport is an error before anything starts"),
    optional(
        "pool",
        "memory of a trainer or store server for samples on their way, such as 4GiB; if not given, \
         2GiB in a trainer, as the arena in a store server, and room for the largest samples in the \
         pipeline",
    ),
    key("lease", "30s", "how long a trainer that vanished keeps what it holds"),
    key("deadline", "30s", "longest time of one fetch, and of a wait for room in the arena"),
    optional("token", "secret that control connections have to show"),
    optional("arena", "size of a server's arena, such as 2GiB"),
    key(
        "arena_kind",
        "auto",
        "what an arena is made of: device, shared (other processes can map it), heap, or auto for \
         what the transport reads best",
    ),
    key(
        "populate",
        "false",
        "whether a server takes all memory of its arena before it is ready, not at its first use",
    ),
    key("device", "0", "number of the GPU that a server's arena or a trainer's pool is on"),
    key("http", "127.0.0.1:0", "address of the capture server's HTTP port; port 0 picks one"),
    key("data", "127.0.0.1:0", "address of the peer handshake that data sessions name"),
    key("control", "127.0.0.1:0", "address of the control listener that takes frees"),
    optional("advertise", "host that descriptors name instead of the bound address"),
    optional("allow", "comma-separated networks that may read, such as 10.0.0.0/8"),
    key("max_in_flight", "256", "samples that a server works on or lets wait; more are put off"),
    optional("rate", "samples a second that a server captures at most; for synthetic load"),
    optional("token_rate", "tokens a second that a server captures at most; for synthetic load"),
    optional("fill_threads", "threads that fill captured tensors; one a core if not given"),
    optional("mooncake", "Mooncake's master, host:port; the pipeline also takes managed"),
    optional("mooncake_admin", "address of the master's metrics, host:port"),
    key("mooncake_host", "127.0.0.1", "host by which other store clients reach this process"),
    key("mooncake_metadata", "P2PHANDSHAKE", "address of Mooncake's metadata server"),
    key(
        "mooncake_protocol",
        "tcp",
        "how Mooncake moves payload: tcp, rdma, nvlink or nvlink_intra",
    ),
    optional("mooncake_devices", "comma-separated RDMA devices; all if not given"),
    optional("mooncake_venv", "virtual environment with Mooncake's wheel"),
    optional("mooncake_library", "file of libmooncake_store.so; comes before the wheel"),
    optional("mooncake_preload", "comma-separated libraries to open before Mooncake's"),
    key("mooncake_lease", "10s", "the master's read leases, its default_kv_lease_ttl"),
    key(
        "mooncake_reads",
        "auto",
        "what reads the store's memory: mooncake (its engine), native (the tcp engine; protocol tcp \
         and no metadata server only), or auto (native where it can)",
    ),
    key(
        "mooncake_group_below",
        "0",
        "tensors of a sample below this size, such as 1MiB, share one object; alike on all sides, \
         and 0 (one object a tensor) where anything else reads the store",
    ),
];

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Built in.
    Default,
    /// A configuration file.
    File,
    /// An environment variable, by name.
    Environment(String),
    /// A command-line flag or a call of [`Settings::set`].
    Given,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File => f.write_str("file"),
            Self::Environment(name) => write!(f, "environment {name}"),
            Self::Given => f.write_str("command line"),
        }
    }
}

/// Values as text, with their sources: the layers put on top of each other. `Debug` masks secrets.
#[derive(Clone, Default)]
pub struct Settings {
    values: BTreeMap<&'static str, (String, Source)>,
}

impl Settings {
    /// Nothing but defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a file below what is there already: YAML if it ends in `.yaml` or `.yml`, which needs the
    /// feature `lifecycle`, and TOML otherwise.
    pub fn file(mut self, path: &Path) -> Result<Self> {
        let end = path.extension().map(|end| end.to_ascii_lowercase());
        let yaml = end.is_some_and(|end| end == "yaml" || end == "yml");
        let text = read_file(path)?;
        let read = if yaml { of_yaml(&text).and_then(|t| self.table(t)) } else { self.text(&text) };
        read.map_err(|e| e.with("file", path.display()))?;
        Ok(self)
    }

    /// Adds TOML text below what is there already.
    pub fn text(&mut self, text: &str) -> Result<()> {
        self.table(toml_table(text)?)
    }

    fn table(&mut self, table: toml::Table) -> Result<()> {
        for (name, value) in table {
            if value.is_table() {
                let why = "a value of the wrong type: no setting is a table";
                return Err(Error::new(ErrorKind::ConfigInvalid, "read configuration", why)
                    .with("found", format_args!("[{name}]"))
                    .remedy(
                        "write lines such as lease = \"30s\"; the file of a run is for \
                         `featurestore plan` and `featurestore config check`",
                    ));
            }
            let known = find(&name)?;
            let text = match value {
                toml::Value::String(text) => text,
                toml::Value::Integer(number) => number.to_string(),
                toml::Value::Boolean(flag) => flag.to_string(),
                toml::Value::Array(items) if items.iter().all(toml::Value::is_str) => {
                    items.iter().filter_map(toml::Value::as_str).collect::<Vec<_>>().join(",")
                }
                other => {
                    return Err(invalid(known.name, &Source::File, "a value of the wrong type")
                        .with("found", other.type_str()));
                }
            };
            self.values.entry(known.name).or_insert((text, Source::File));
        }
        Ok(())
    }

    /// Adds the `FEATURESTORE_…` variables among `variables` above a file; usually those of
    /// [`std::env::vars_os`].
    ///
    /// # Errors
    /// [`ErrorKind::ConfigInvalid`] for such a variable that is no setting, with the nearest name,
    /// and for one that is not UTF-8. Left alone are variables that container platforms set for a
    /// service called `featurestore` (`FEATURESTORE_PORT…`, `FEATURESTORE_SERVICE_…`), and those that
    /// this project sets for itself and its tests.
    pub fn environment(
        mut self,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self> {
        for (name, value) in variables {
            let name = name.to_string_lossy().into_owned();
            let Some(setting) = name.strip_prefix(PREFIX) else { continue };
            let Some(known) = KEYS.iter().find(|k| k.name.to_ascii_uppercase() == setting) else {
                if is_foreign(setting) {
                    continue;
                }
                return Err(unknown_variable(&name, setting));
            };
            let source = Source::Environment(name);
            let Ok(text) = value.into_string() else {
                return Err(invalid(known.name, &source, "the value is not UTF-8"));
            };
            match self.values.get(known.name) {
                Some((_, from)) if *from != Source::File => {}
                _ => _ = self.values.insert(known.name, (text, source)),
            }
        }
        Ok(self)
    }

    /// Sets a value above all others.
    pub fn set(&mut self, name: &str, text: impl Into<String>) -> Result<()> {
        self.values.insert(find(name)?.name, (text.into(), Source::Given));
        Ok(())
    }

    /// Gives a value below all others, where there is no default or another one is wanted.
    pub fn or_default(self, name: &str, text: impl Into<String>) -> Result<Self> {
        self.or(name, text.into(), Source::Default)
    }

    /// The same for the value of another program's variable.
    #[cfg(feature = "rollout")]
    pub(crate) fn or_variable(self, name: &str, text: String, variable: &str) -> Result<Self> {
        self.or(name, text, Source::Environment(variable.to_owned()))
    }

    fn or(mut self, name: &str, text: String, source: Source) -> Result<Self> {
        self.values.entry(find(name)?.name).or_insert((text, source));
        Ok(self)
    }

    /// What is in force: every key with its value, if any, and its source. Secrets are masked.
    pub fn effective(&self) -> impl Iterator<Item = (&'static Key, Option<String>, Source)> + '_ {
        KEYS.iter().map(|known| match self.values.get(known.name) {
            Some((_, source)) if known.secret() => (known, Some("(set)".into()), source.clone()),
            Some((text, source)) => (known, Some(text.clone()), source.clone()),
            None => (known, known.default.map(Into::into), Source::Default),
        })
    }

    fn text_of(&self, name: &'static str) -> (Option<&str>, Source) {
        match self.values.get(name) {
            Some((text, source)) => (Some(text), source.clone()),
            None => {
                let known = KEYS.iter().find(|k| k.name == name).expect("a key of the table");
                (known.default, Source::Default)
            }
        }
    }

    fn get<T>(
        &self,
        name: &'static str,
        parse: impl FnOnce(&str) -> Result<T, Error>,
    ) -> Result<Option<T>> {
        let (text, source) = self.text_of(name);
        text.map(parse).transpose().map_err(|e| e.with("setting", name).with("source", source))
    }

    fn need<T>(
        &self,
        name: &'static str,
        parse: impl FnOnce(&str) -> Result<T, Error>,
    ) -> Result<T> {
        self.get(name, parse)?.ok_or_else(|| {
            let dashed = name.replace('_', "-");
            Error::new(ErrorKind::ConfigInvalid, "configure", "a setting is missing")
                .with("setting", name)
                .remedy(format!(
                    "give --{dashed}, set FEATURESTORE_{}, or put {name} in the file",
                    name.to_ascii_uppercase()
                ))
        })
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.effective().map(|(known, value, source)| (known.name, (value, source)));
        f.debug_map().entries(shown).finish()
    }
}

/// The known key of that name, blanks and case aside, `-` and `_` alike.
fn find(name: &str) -> Result<&'static Key> {
    let folded = fold(name);
    KEYS.iter().find(|k| k.name == folded).ok_or_else(|| {
        let known = KEYS.iter().map(|k| k.name);
        Error::new(ErrorKind::ConfigInvalid, "configure", "unknown setting")
            .with("found", format_args!("{name:?}"))
            .remedy(suggestion(&folded, known))
    })
}

/// How every variable begins that is a setting.
const PREFIX: &str = "FEATURESTORE_";

/// Whether a variable is somebody else's, though it begins as settings do.
fn is_foreign(name: &str) -> bool {
    let of_platforms = ["PORT", "SERVICE_"].iter().any(|start| name.starts_with(start));
    let ours = [
        "BIN",
        "LEADER",
        "MOONCAKE_NEXT_VENV",
        "MOONCAKE_PREPARED",
        "STORE_LIBRARY_DIR",
        "TEST_NOTES",
        "TORCH_VENV",
    ];
    of_platforms || ours.contains(&name)
}

/// Never shows the value, which may be a secret.
fn unknown_variable(name: &str, setting: &str) -> Error {
    let known = KEYS.iter().map(|k| k.name);
    let remedy = match nearest(&fold(setting), known.clone()) {
        Some(nearest) => format!("did you mean {PREFIX}{}?", nearest.to_ascii_uppercase()),
        None => format!("unset it; known: {}", known.collect::<Vec<_>>().join(", ")),
    };
    Error::new(ErrorKind::ConfigInvalid, "configure", "an environment variable is no setting")
        .with("variable", name)
        .remedy(remedy)
}

fn invalid(name: &'static str, source: &Source, why: &'static str) -> Error {
    Error::new(ErrorKind::ConfigInvalid, "configure", why)
        .with("setting", name)
        .with("source", source)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn names_of_transports_are_forgiving_but_never_guessed() {
        for text in ["SHM", " shm ", "Shm"] {
            assert_eq!(text.parse::<TransportChoice>().unwrap(), TransportChoice::Shm);
        }
        let error = "shn".parse::<TransportChoice>().unwrap_err().to_string();
        assert!(error.contains("did you mean shm"), "{error}");
        for text in ["nvlink_intra", "NVLink-Intra"] {
            assert_eq!(text.parse::<TransportChoice>().unwrap(), TransportChoice::NvlinkIntra);
        }
        for text in ["", "rdma", "cuda"] {
            let error = text.parse::<TransportChoice>().unwrap_err().to_string();
            assert!(error.contains("auto, nvlink_intra, nvlink, shm, tcp"), "{error}");
        }
    }

    #[test]
    fn flag_beats_environment_beats_file_beats_default() {
        let environment = [
            ("FEATURESTORE_LEASE", "2s"),
            ("FEATURESTORE_TRANSPORT", "tcp"),
            ("LEASE", "9s"),
            ("FEATURESTORE_PORT", "tcp://10.0.0.1:80"), // of a service called featurestore
            ("FEATURESTORE_SERVICE_HOST", "10.0.0.1"),
            ("FEATURESTORE_LEADER", "10.0.0.1:9000"), // of trainers that a plan starts
            ("FEATURESTORE_BIN", "target/release/featurestore"),
        ]
        .map(|(name, value)| (name.into(), value.into()));
        let mut settings = Settings::new();
        settings.text("transport = \"shm\"\nlease = \"1s\"\ndeadline = \"3s\"\n").unwrap();
        let mut settings = settings.environment(environment).unwrap();
        settings.set("transport", "auto").unwrap();
        let config = Config::from_settings(&settings).unwrap();
        assert_eq!(config.transport, TransportChoice::Auto);
        assert_eq!(config.lease, Duration::from_secs(2));
        assert_eq!(config.deadline, Duration::from_secs(3));
        let sources: BTreeMap<_, _> =
            settings.effective().map(|(k, _, source)| (k.name, source.to_string())).collect();
        assert_eq!(sources["transport"], "command line");
        assert_eq!(sources["lease"], "environment FEATURESTORE_LEASE");
        assert_eq!(sources["deadline"], "file");
        assert_eq!(sources["strict"], "default");
    }

    #[test]
    fn mistakes_name_setting_source_and_remedy() {
        for (text, parts) in [
            ("trasport = \"shm\"", &["unknown setting", "did you mean transport"][..]),
            ("transport = 3.5", &["wrong type", "transport"]),
            ("lease = \"soon\"", &["not a duration", "lease", "file"]),
            ("strict = \"maybe\"", &["neither true nor false"]),
            ("pool = 0", &["zero", "pool"]),
            ("x = [", &["read configuration"]),
            ("[transport]\nbackend = \"tcp\"", &["[transport]", "featurestore plan"]),
        ] {
            let mut settings = Settings::new();
            let error = settings
                .text(text)
                .and_then(|()| Config::from_settings(&settings).map(drop))
                .unwrap_err()
                .to_string();
            for part in parts {
                assert!(error.contains(part), "{text}: {error}");
            }
        }
    }

    #[test]
    fn a_variable_that_is_no_setting_is_refused_with_the_nearest_name() {
        for (name, part) in [
            ("FEATURESTORE_TOKN", "did you mean FEATURESTORE_TOKEN?"),
            ("FEATURESTORE_MAX_INFLIGHT", "did you mean FEATURESTORE_MAX_IN_FLIGHT?"),
            ("FEATURESTORE_lease", "did you mean FEATURESTORE_LEASE?"),
            ("FEATURESTORE_SOMETHING_ELSE", "known: transport"),
        ] {
            let variables = [(name.into(), "hush".into())];
            let error = Settings::new().environment(variables).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(name), "{error}");
            assert!(!error.contains("hush"), "{error}");
        }
    }

    #[test]
    fn secrets_are_masked() {
        let mut settings = Settings::new();
        settings.set("token", "hush").unwrap();
        assert!(settings.effective().all(|(_, value, _)| value.as_deref() != Some("hush")));
        let config = Config::from_settings(&settings).unwrap();
        for shown in [format!("{settings:?}"), format!("{config:?}")] {
            assert!(!shown.contains("hush"), "{shown}");
        }
        settings.set("token", "hush\n").unwrap(); // not a secret that a line can carry
        let error = Config::from_settings(&settings).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hush"), "{error}");
    }
}
