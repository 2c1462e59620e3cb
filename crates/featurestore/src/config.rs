//! Settings: where each value comes from, what it may be, and what is in force.
//!
//! Precedence: command line, then environment (`FEATURESTORE_…`), then file, then default. Values
//! have the same grammar everywhere; an unknown key is an error that names the nearest known one.

mod problems;
mod value;

use std::{collections::BTreeMap, fmt, net::SocketAddr, path::Path, str::FromStr, time::Duration};

use control_proto::Secret;
use transport_core::{ByteSize, Error, ErrorKind, Result};
use transport_mooncake_direct::Cidr;

pub use problems::Problems;
pub use value::duration;
pub(crate) use value::nearest;
use value::{address, bad, boolean, bounded, fold, host, networks, nonzero_size, rate, suggestion};

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
    key("transport", "auto", "how samples are read: auto, shm or tcp"),
    key("strict", "false", "whether an unavailable transport is an error before anything starts"),
    optional("pool", "receive pool of a trainer that reads by tcp, such as 4GiB"),
    key("lease", "30s", "how long a trainer that vanished keeps what it holds"),
    key("deadline", "30s", "longest time of one fetch, and of a wait for room in the arena"),
    optional("token", "secret that control connections have to show"),
    optional("arena", "size of a server's arena, such as 2GiB; never guessed"),
    key("arena_kind", "shared", "shared (other processes can map it) or heap"),
    key("http", "127.0.0.1:0", "address of the capture server's HTTP port; port 0 picks one"),
    key("data", "127.0.0.1:0", "address of the peer handshake that data sessions name"),
    key("control", "127.0.0.1:0", "address of the control listener that takes frees"),
    optional("advertise", "host that descriptors name instead of the bound address"),
    optional("allow", "comma-separated networks that may read, such as 10.0.0.0/8"),
    key("max_in_flight", "256", "samples that a server works on or lets wait; more are put off"),
    optional("rate", "samples a second that a server captures at most; for synthetic load"),
    optional("fill_threads", "threads that fill captured tensors; default: one a core"),
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

    /// Adds a TOML file below what is there already.
    pub fn file(mut self, path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| Error::io("read configuration", e).with("file", path.display()))?;
        self.text(&text).map_err(|e| e.with("file", path.display()))?;
        Ok(self)
    }

    /// Adds TOML text below what is there already.
    pub fn text(&mut self, text: &str) -> Result<()> {
        let table: toml::Table = toml::from_str(text).map_err(|e| {
            Error::new(ErrorKind::ConfigInvalid, "read configuration", e.message().to_owned())
                .with("at_byte", e.span().map_or(0, |s| s.start))
        })?;
        for (name, value) in table {
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

    /// Adds what `variable` answers for each `FEATURESTORE_…` name, above a file.
    pub fn environment(mut self, variable: impl Fn(&str) -> Option<String>) -> Self {
        for known in KEYS {
            let name = format!("FEATURESTORE_{}", known.name.to_ascii_uppercase());
            if let Some(text) = variable(&name) {
                let entry = self.values.entry(known.name);
                let source = Source::Environment(name);
                entry
                    .and_modify(|(value, from)| {
                        if *from == Source::File {
                            (*value, *from) = (text.clone(), source.clone());
                        }
                    })
                    .or_insert((text, source));
            }
        }
        self
    }

    /// Sets a value above all others.
    pub fn set(&mut self, name: &str, text: impl Into<String>) -> Result<()> {
        self.values.insert(find(name)?.name, (text.into(), Source::Given));
        Ok(())
    }

    /// Gives a value below all others, where there is no default or another one is wanted.
    pub fn or_default(mut self, name: &str, text: impl Into<String>) -> Result<Self> {
        let entry = self.values.entry(find(name)?.name);
        entry.or_insert_with(|| (text.into(), Source::Default));
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

fn invalid(name: &'static str, source: &Source, why: &'static str) -> Error {
    Error::new(ErrorKind::ConfigInvalid, "configure", why)
        .with("setting", name)
        .with("source", source)
}

/// How samples are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportChoice {
    /// The best that a probe finds usable.
    Auto,
    /// The publisher's memory, mapped: same host only.
    Shm,
    /// Mooncake's tcp wire.
    Tcp,
}

impl FromStr for TransportChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match fold(text).as_str() {
            "auto" => Ok(Self::Auto),
            "shm" => Ok(Self::Shm),
            "tcp" => Ok(Self::Tcp),
            other => Err(Error::new(ErrorKind::ConfigInvalid, "configure", "unknown transport")
                .with("found", format_args!("{text:?}"))
                .remedy(suggestion(other, ["auto", "shm", "tcp"].into_iter()))),
        }
    }
}

impl fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        })
    }
}

/// How a trainer reads. Made from [`Settings`] or with [`Default`] and the builder methods.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Config {
    /// How samples are read.
    pub transport: TransportChoice,
    /// Whether an unavailable transport is an error before anything starts.
    pub strict: bool,
    /// Receive pool, for transports that copy.
    pub pool: Option<ByteSize>,
    /// How long what this process holds outlives it.
    pub lease: Duration,
    /// Longest time of one fetch.
    pub deadline: Duration,
    /// Secret for control connections.
    pub token: Option<Secret>,
}

impl Default for Config {
    fn default() -> Self {
        Self::from_settings(&Settings::new()).expect("the defaults are valid")
    }
}

impl Config {
    /// Checks and types what is in force.
    pub fn from_settings(settings: &Settings) -> Result<Self> {
        Ok(Self {
            transport: settings.need("transport", str::parse)?,
            strict: settings.need("strict", boolean)?,
            pool: settings.get("pool", nonzero_size)?,
            lease: settings.need("lease", duration)?,
            deadline: settings.need("deadline", duration)?,
            token: settings.get("token", |text| Secret::new(text))?,
        })
    }

    /// Chooses how samples are read.
    #[must_use]
    pub fn transport(mut self, transport: TransportChoice) -> Self {
        self.transport = transport;
        self
    }

    /// Makes an unavailable transport an error before anything starts.
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Sets the size of the receive pool.
    #[must_use]
    pub fn pool(mut self, pool: ByteSize) -> Self {
        self.pool = Some(pool);
        self
    }

    /// Sets how long what this process holds outlives it.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets the longest time of one fetch.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }
}

/// What a server's arena is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArenaKind {
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
    /// Longest wait for room.
    pub deadline: Duration,
    /// Lease of clients that have not announced themselves.
    pub lease: Duration,
}

impl ServerConfig {
    /// Checks and types what is in force. All that is wrong is reported at once.
    pub fn from_settings(settings: &Settings) -> Result<Self> {
        let mut problems = Problems::default();
        let arena = problems.note(settings.need("arena", nonzero_size));
        let arena_kind = problems.note(settings.need("arena_kind", str::parse));
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
        let rate = problems.note(settings.get("rate", rate));
        let deadline = problems.note(settings.need("deadline", duration));
        let lease = problems.note(settings.need("lease", duration));
        problems.settle("configure")?;
        const NOTED: &str = "what is missing is a problem, and problems end this";
        Ok(Self {
            arena: arena.expect(NOTED),
            arena_kind: arena_kind.expect(NOTED),
            http: http.expect(NOTED),
            data: data.expect(NOTED),
            control: control.expect(NOTED),
            advertise: advertise.expect(NOTED),
            allow: allow.expect(NOTED).unwrap_or_default(),
            token: token.expect(NOTED),
            max_in_flight: max_in_flight.expect(NOTED),
            fill_threads: fill_threads.expect(NOTED),
            rate: rate.expect(NOTED),
            deadline: deadline.expect(NOTED),
            lease: lease.expect(NOTED),
        })
    }
}

impl FromStr for ArenaKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match fold(text).as_str() {
            "shared" => Ok(Self::Shared),
            "heap" => Ok(Self::Heap),
            other => Err(bad("unknown kind of arena", text)
                .remedy(suggestion(other, ["shared", "heap"].into_iter()))),
        }
    }
}

/// Most samples that a server may be told to work on at a time.
const MAX_IN_FLIGHT: usize = 1 << 20;
/// Most threads that a server may be told to fill tensors on.
const MAX_FILL_THREADS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_transports_are_forgiving_but_never_guessed() {
        for text in ["SHM", " shm ", "Shm"] {
            assert_eq!(text.parse::<TransportChoice>().unwrap(), TransportChoice::Shm);
        }
        let error = "shn".parse::<TransportChoice>().unwrap_err().to_string();
        assert!(error.contains("did you mean shm"), "{error}");
        for text in ["", "rdma", "nvlink-intra"] {
            let error = text.parse::<TransportChoice>().unwrap_err().to_string();
            assert!(error.contains("auto, shm, tcp"), "{error}");
        }
    }

    #[test]
    fn flag_beats_environment_beats_file_beats_default() {
        let environment = |name: &str| match name {
            "FEATURESTORE_LEASE" => Some("2s".to_owned()),
            "FEATURESTORE_TRANSPORT" => Some("tcp".to_owned()),
            _ => None,
        };
        let mut settings = Settings::new();
        settings.text("transport = \"shm\"\nlease = \"1s\"\ndeadline = \"3s\"\n").unwrap();
        let mut settings = settings.environment(environment);
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
        let error = ServerConfig::from_settings(&Settings::new()).unwrap_err().to_string();
        assert!(error.contains("--arena") && error.contains("FEATURESTORE_ARENA"), "{error}");
    }

    #[test]
    fn secrets_are_masked() {
        let mut settings = Settings::new();
        settings.set("token", "hush").unwrap();
        assert!(settings.effective().all(|(_, value, _)| value.as_deref() != Some("hush")));
        let server = settings.clone().or_default("arena", "1MiB").unwrap();
        for shown in [
            format!("{settings:?}"),
            format!("{:?}", Config::from_settings(&settings).unwrap()),
            format!("{:?}", ServerConfig::from_settings(&server).unwrap()),
        ] {
            assert!(!shown.contains("hush"), "{shown}");
        }
        settings.set("token", "hush\n").unwrap(); // not a secret that a line can carry
        let error = Config::from_settings(&settings).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hush"), "{error}");
    }
}
