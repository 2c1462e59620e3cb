//! Which transports there are, what they can do, and why one cannot be used here.
//!
//! Nothing registers itself: a program puts a [`Registry`] together from the factories it wants,
//! and the same program with the same settings always chooses the same way.

use std::{collections::BTreeMap, fmt, str::FromStr, sync::Arc};

use async_trait::async_trait;

use crate::{Capabilities, Error, ErrorKind, Result, Transport};

/// Name of a transport: lower-case ASCII letters and digits, parted by `_`.
///
/// Parsing trims, folds case and takes `-` for `_`: ` NVLink-Intra ` is `nvlink_intra`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scheme(Box<str>);

/// Settings of one transport: text by name, read when the transport is built.
///
/// Names are folded as [`Scheme`]s are, so `arena-bytes` and `ARENA_BYTES` are one setting.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings(BTreeMap<String, String>);

/// Makes transports of one scheme.
#[async_trait]
pub trait Factory: fmt::Debug + Send + Sync {
    /// The scheme it is registered under.
    fn scheme(&self) -> Scheme;

    /// What the transport is for, in one line without a full stop.
    fn summary(&self) -> &str;

    /// What its transports can do at best.
    fn capabilities(&self) -> Capabilities;

    /// Names of the settings that [`Self::build`] reads.
    fn settings(&self) -> &[&str];

    /// Looks whether a transport could be built and would be of use, without keeping anything.
    async fn probe(&self, settings: &Settings) -> Probe;

    /// Builds a transport. `reason` says why it was chosen, for
    /// [`TransportInfo::reason`](crate::TransportInfo::reason).
    async fn build(&self, settings: &Settings, reason: &str) -> Result<Arc<dyn Transport>>;
}

/// Whether a transport can be used, in three parts that have different remedies.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Probe {
    /// This host has what it needs: devices, libraries, rights.
    pub available: Answer,
    /// The settings it needs are there and make sense.
    pub configured: Answer,
    /// It can do the job at hand: reach the peer, hold the memory.
    pub suitable: Answer,
}

/// Yes, or why not.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Yes.
    Yes,
    /// No, and what is missing.
    No(String),
}

/// A scheme as [`Registry::list`] shows it.
#[derive(Clone, Debug, serde::Serialize)]
#[non_exhaustive]
pub struct Listed {
    /// Its name.
    pub scheme: Scheme,
    /// What it is for.
    pub summary: String,
    /// What it can do at best.
    pub capabilities: Capabilities,
    /// Whether it can be used.
    pub probe: Probe,
}

/// Factories by scheme.
#[derive(Debug, Default)]
pub struct Registry(BTreeMap<Scheme, Arc<dyn Factory>>);

impl Registry {
    /// A registry without any transport.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a factory; a scheme that is there already is refused.
    pub fn register(&mut self, factory: Arc<dyn Factory>) -> Result<()> {
        use std::collections::btree_map::Entry;
        match self.0.entry(factory.scheme()) {
            Entry::Vacant(place) => {
                place.insert(factory);
                Ok(())
            }
            Entry::Occupied(place) => Err(Error::new(
                ErrorKind::AlreadyExists,
                "register transport",
                "the scheme is taken by another factory",
            )
            .with("scheme", place.key())
            .with("registered", place.get().summary())
            .remedy("register each transport once, at one place")),
        }
    }

    /// The registered schemes, in alphabetical order.
    pub fn schemes(&self) -> impl Iterator<Item = &Scheme> {
        self.0.keys()
    }

    /// The factory of a scheme by its name as people write it. An unknown name is an error that
    /// lists what is known and points to the nearest.
    pub fn factory(&self, name: &str) -> Result<&Arc<dyn Factory>> {
        let known = || self.0.keys().map(Scheme::as_str);
        Scheme::from_str(name)
            .ok()
            .and_then(|scheme| self.0.get(&scheme))
            .ok_or_else(|| unknown("choose transport", "unknown transport", name, known()))
    }

    /// Every scheme with its capabilities and whether it can be used with `settings`, which give the
    /// settings of one scheme; probes run one after the other.
    pub async fn list(&self, settings: impl Fn(&Scheme) -> Settings) -> Vec<Listed> {
        let mut listed = Vec::with_capacity(self.0.len());
        for (scheme, factory) in &self.0 {
            let settings = settings(scheme);
            let mut probe = factory.probe(&settings).await;
            if let (Answer::Yes, Err(error)) =
                (&probe.configured, settings.check_known(factory.settings()))
            {
                probe.configured = Answer::No(error.to_string());
            }
            listed.push(Listed {
                scheme: scheme.clone(),
                summary: factory.summary().into(),
                capabilities: factory.capabilities(),
                probe,
            });
        }
        listed
    }

    /// Builds the transport called `name`, or says what keeps it from being built. Never builds
    /// another one in its place.
    pub async fn build(
        &self,
        name: &str,
        settings: &Settings,
        reason: &str,
    ) -> Result<Arc<dyn Transport>> {
        let factory = self.factory(name)?;
        settings.check_known(factory.settings())?;
        if let Some((part, why)) = factory.probe(settings).await.problem() {
            let kind = match part {
                "configured" => ErrorKind::ConfigInvalid,
                _ => ErrorKind::Unsupported,
            };
            return Err(Error::new(kind, "choose transport", why.to_owned())
                .with("scheme", factory.scheme())
                .with("not", part));
        }
        factory.build(settings, reason).await
    }
}

impl Probe {
    /// Everything is there.
    pub const USABLE: Self =
        Self { available: Answer::Yes, configured: Answer::Yes, suitable: Answer::Yes };

    /// Whether the transport can be used.
    pub fn is_usable(&self) -> bool {
        self.problem().is_none()
    }

    /// The first of the three parts that is missing, and why.
    pub fn problem(&self) -> Option<(&'static str, &str)> {
        [
            ("available", &self.available),
            ("configured", &self.configured),
            ("suitable", &self.suitable),
        ]
        .into_iter()
        .find_map(|(part, answer)| match answer {
            Answer::Yes => None,
            Answer::No(why) => Some((part, why.as_str())),
        })
    }
}

impl fmt::Display for Probe {
    /// `usable`, or the first part that is missing and why.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.problem() {
            None => f.write_str("usable"),
            Some((part, why)) => write!(f, "not {part}: {why}"),
        }
    }
}

impl Scheme {
    /// The folded name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Scheme {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let folded = fold(text);
        let good = |part: &str| {
            !part.is_empty() && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
        };
        if folded.len() > 64 || !folded.split('_').all(good) {
            let why = "not a transport name";
            return Err(Error::new(ErrorKind::ConfigInvalid, "parse transport name", why)
                .with("found", format_args!("{:?}", clip(text)))
                .remedy("write letters and digits, parted by single '_' or '-'"));
        }
        Ok(Self(folded.into()))
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

impl serde::Serialize for Scheme {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl Settings {
    /// No settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a setting; a name that is there already gets the new value.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.0.insert(fold(name), value.to_string());
        self
    }

    /// The value of a setting, if it is there. Blanks around it do not count.
    pub fn get<T: FromStr<Err: fmt::Display>>(&self, name: &str) -> Result<Option<T>> {
        let Some(text) = self.0.get(&fold(name)) else { return Ok(None) };
        text.trim().parse().map(Some).map_err(|error: T::Err| {
            Error::new(ErrorKind::ConfigInvalid, "read setting", error.to_string())
                .with("setting", name)
                .with("found", format_args!("{:?}", clip(text)))
        })
    }

    /// The value of a setting that must be there.
    pub fn require<T: FromStr<Err: fmt::Display>>(&self, name: &str) -> Result<T> {
        self.get(name)?.ok_or_else(|| {
            Error::new(ErrorKind::ConfigInvalid, "read setting", "a setting is missing")
                .with("setting", name)
                .remedy(format!("set `{name}`"))
        })
    }

    /// Refuses a setting that is not in `known`, pointing to the nearest that is.
    pub fn check_known(&self, known: &[&str]) -> Result<()> {
        for name in self.0.keys() {
            if !known.iter().any(|k| fold(k) == *name) {
                return Err(unknown(
                    "read setting",
                    "unknown setting",
                    name,
                    known.iter().copied(),
                ));
            }
        }
        Ok(())
    }
}

impl<N: AsRef<str>, V: fmt::Display> FromIterator<(N, V)> for Settings {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(pairs: I) -> Self {
        pairs.into_iter().fold(Self::new(), |all, (name, value)| all.with(name.as_ref(), value))
    }
}

/// The candidate that a mistyped name most likely meant: at most a third of its letters changed,
/// added, left out or swapped with a neighbour.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let name: String = fold(name).chars().take(64).collect();
    candidates
        .into_iter()
        .map(|candidate| (strsim::osa_distance(&name, &fold(candidate)), candidate))
        .filter(|(distance, candidate)| *distance <= (candidate.chars().count() / 3).max(1))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

fn unknown<'a>(
    operation: &'static str,
    why: &'static str,
    name: &str,
    known: impl Iterator<Item = &'a str>,
) -> Error {
    let known: Vec<_> = known.collect();
    let nearest = nearest(name, known.iter().copied());
    let error = Error::new(ErrorKind::ConfigInvalid, operation, why)
        .with("found", format_args!("{:?}", clip(name)))
        .with("known", if known.is_empty() { "none".into() } else { known.join(", ") });
    match nearest {
        Some(nearest) => {
            error.with("nearest", nearest).remedy(format!("did you mean `{nearest}`?"))
        }
        None => error.remedy("use one of the known names"),
    }
}

fn fold(name: &str) -> String {
    name.trim().to_lowercase().replace('-', "_")
}

fn clip(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_transport;

    #[derive(Debug)]
    struct Fake(&'static str, Probe);

    #[async_trait]
    impl Factory for Fake {
        fn scheme(&self) -> Scheme {
            self.0.parse().unwrap()
        }

        fn summary(&self) -> &str {
            "a fake"
        }

        fn capabilities(&self) -> Capabilities {
            Capabilities { fetch: true, ..Capabilities::default() }
        }

        fn settings(&self) -> &[&str] {
            &["endpoint"]
        }

        async fn probe(&self, _: &Settings) -> Probe {
            self.1.clone()
        }

        async fn build(&self, _: &Settings, _: &str) -> Result<Arc<dyn Transport>> {
            panic!("an unusable transport must not be built")
        }
    }

    fn registry() -> Registry {
        let mut registry = Registry::new();
        registry.register(memory_transport::factory()).unwrap();
        for (scheme, probe) in [
            ("rdma", Probe { available: Answer::No("no device".into()), ..Probe::USABLE }),
            (
                "nvlink_intra",
                Probe { suitable: Answer::No("the peer is far".into()), ..Probe::USABLE },
            ),
            ("tcp", Probe { configured: Answer::No("no endpoint".into()), ..Probe::USABLE }),
        ] {
            registry.register(Arc::new(Fake(scheme, probe))).unwrap();
        }
        registry
    }

    #[test]
    fn names_are_taken_as_people_write_them() {
        let registry = registry();
        for (text, scheme) in [
            ("RDMA", "rdma"),
            (" rdma ", "rdma"),
            ("nvlink-intra", "nvlink_intra"),
            ("NVLINK_INTRA", "nvlink_intra"),
            ("\tTcp\n", "tcp"),
        ] {
            assert_eq!(registry.factory(text).unwrap().scheme().as_str(), scheme);
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known_and_points_to_the_nearest() {
        let registry = registry();
        for (text, nearest) in [
            ("rmda", Some("rdma")),
            ("nvlinkintra", Some("nvlink_intra")),
            ("tpc", Some("tcp")),
            ("memmory", Some("memory")),
            ("", None),
            ("carrier pigeon", None),
        ] {
            let error = registry.factory(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConfigInvalid);
            assert_eq!(error.context("known"), Some("memory, nvlink_intra, rdma, tcp"));
            assert_eq!(error.context("nearest"), nearest, "{text}");
        }
        let empty = Registry::new();
        assert_eq!(empty.factory("tcp").unwrap_err().context("known"), Some("none"));
    }

    #[test]
    fn bad_names_are_no_schemes() {
        for text in ["", "_", "a__b", "a b", "a/b", "é", "-a", &"x".repeat(65)] {
            assert!(text.parse::<Scheme>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_scheme_is_registered_once() {
        let mut registry = registry();
        let error = registry.register(Arc::new(Fake("TCP", Probe::USABLE))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        assert_eq!(error.context("scheme"), Some("tcp"));
        assert_eq!(registry.schemes().count(), 4);
    }

    #[tokio::test]
    async fn the_list_says_what_can_be_used_and_why_not() {
        let settings = |scheme: &Scheme| match scheme.as_str() {
            "memory" => Settings::new().with("arena-bytes", "1MiB"),
            _ => Settings::new(),
        };
        let list = registry().list(settings).await;
        let lines: Vec<_> = list.iter().map(|l| format!("{} {}", l.scheme, l.probe)).collect();
        assert_eq!(
            lines,
            [
                "memory usable",
                "nvlink_intra not suitable: the peer is far",
                "rdma not available: no device",
                "tcp not configured: no endpoint",
            ]
        );
        assert!(list[0].capabilities.publish && !list[2].capabilities.publish);
        let json = serde_json::to_value(&list[2]).unwrap();
        assert_eq!(json["probe"]["available"]["no"], "no device");
        assert_eq!(json["probe"]["suitable"], "yes");

        let list = registry().list(|_| Settings::new().with("arena_byte", 1)).await;
        let (part, why) = list[0].probe.problem().unwrap();
        assert!(part == "configured" && why.contains("arena_bytes"), "{part}: {why}");
    }

    #[tokio::test]
    async fn only_what_can_be_used_is_built() {
        let registry = registry();
        for (scheme, kind) in [
            ("rdma", ErrorKind::Unsupported),
            ("tcp", ErrorKind::ConfigInvalid),
            ("nvlink-intra", ErrorKind::Unsupported),
        ] {
            let error = registry.build(scheme, &Settings::new(), "asked for").await.unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
        }
        let settings = Settings::new().with("Arena-Bytes", " 1 MiB ");
        let memory = registry.build("Memory", &settings, "asked for in a test").await.unwrap();
        assert_eq!(memory.info().reason, "asked for in a test");
        assert_eq!(memory.health().await.unwrap().arena_bytes, 1 << 20);

        let typo = Settings::new().with("arena_bites", "1MiB");
        let error = registry.build("memory", &typo, "").await.unwrap_err();
        assert_eq!(error.context("nearest"), Some("arena_bytes"));
        for bad in [Settings::new(), Settings::new().with("arena_bytes", "-1")] {
            let error = registry.build("memory", &bad, "").await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{error}");
        }
    }
}
