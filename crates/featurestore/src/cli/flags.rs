//! Settings as flags: names, defaults and help come from the one table of settings.

use std::{fmt, marker::PhantomData, str::FromStr};

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use featurestore::{
    Config, Receive, Settings,
    config::{KEYS, Key, Source, TransportChoice},
};
use transport_core::{ByteSize, Error, ErrorKind, Result};

/// Which settings a command takes as flags.
pub(super) trait Selection: fmt::Debug + Clone + Send + Sync + 'static {
    /// Their names; those of Mooncake's settings come after them.
    const NAMES: &[&str];
    /// Defaults of this command alone, below those of the environment and of the file.
    const DEFAULTS: &[(&str, &str)] = &[];

    /// Settings without a default that this command cannot do without.
    const REQUIRED: &[&str] = &[];

    /// Whether the value of one setting can be used, where that can be said of it alone.
    fn check(_name: &str, _value: &str) -> Result<()> {
        Ok(())
    }

    /// Why a setting makes no difference to this command, if it makes none.
    fn idle(key: &Key, transport: TransportChoice, receive: Receive) -> Option<String> {
        unused(key, transport, receive)
    }
}

/// Flags of `pipeline`.
#[derive(Clone, Debug)]
pub(super) struct OfPipeline;

impl Selection for OfPipeline {
    const NAMES: &[&str] = &["arena", "transport", "receive", "strict", "pool", "device"];
    const DEFAULTS: &[(&str, &str)] = &[("arena", "2GiB")];

    fn check(name: &str, value: &str) -> Result<()> {
        if name == "arena" {
            return value.parse::<ByteSize>().map(drop);
        }
        let mut settings = Settings::new();
        settings.set(name, value)?;
        Config::from_settings(&settings).map(drop)
    }

    fn idle(key: &Key, transport: TransportChoice, receive: Receive) -> Option<String> {
        match key.name {
            "http" | "data" | "control" | "fill_threads" | "max_in_flight" => {
                Some("the pipeline chooses it for each of its servers".to_owned())
            }
            _ => unused(key, transport, receive),
        }
    }
}

/// Flags of `doctor`.
#[derive(Clone, Debug)]
pub(super) struct OfDoctor;

impl Selection for OfDoctor {
    const NAMES: &[&str] = &["transport", "receive", "strict", "lease", "device"];

    /// It looks at everything, whatever is asked for.
    fn idle(_: &Key, _: TransportChoice, _: Receive) -> Option<String> {
        None
    }
}

/// Flags of `capture-server`; what is wrong with them is reported all at once, by the server.
#[derive(Clone, Debug)]
pub(super) struct OfServer;

impl Selection for OfServer {
    const NAMES: &[&str] = &[
        "arena",
        "transport",
        "pool",
        "arena_kind",
        "populate",
        "device",
        "http",
        "data",
        "control",
        "advertise",
        "allow",
        "max_in_flight",
        "fill_threads",
        "rate",
        "token_rate",
        "deadline",
        "lease",
    ];
    const REQUIRED: &[&str] = &["arena"];

    /// On which device its trainers receive is nothing to it.
    fn idle(key: &Key, transport: TransportChoice, _: Receive) -> Option<String> {
        unused(key, transport, Receive::Auto)
    }
}

/// Flags of `rollout`.
#[cfg(feature = "rollout")]
#[derive(Clone, Debug)]
pub(super) struct OfRollout;

#[cfg(feature = "rollout")]
impl Selection for OfRollout {
    const NAMES: &[&str] = &["transport", "pool", "lease", "deadline"];

    fn check(name: &str, value: &str) -> Result<()> {
        OfPipeline::check(name, value)
    }

    /// Its pool counts for every transport.
    fn idle(key: &Key, transport: TransportChoice, receive: Receive) -> Option<String> {
        (key.name != "pool").then(|| unused(key, transport, receive)).flatten()
    }
}

/// Settings that were given as flags.
#[derive(Clone, Debug)]
pub(super) struct Flags<S> {
    given: Vec<(&'static str, String)>,
    selection: PhantomData<S>,
}

impl<S: Selection> Flags<S> {
    /// The settings in force: flags above `settings`, this command's defaults below. A flag about
    /// Mooncake is refused where Mooncake moves nothing: whoever gives it counts on it.
    pub(super) fn over(&self, mut settings: Settings) -> Result<Settings> {
        for (name, value) in &self.given {
            settings.set(name, value)?;
        }
        let idle = Self::idle(&settings)
            .find(|(key, source, _)| *source == Source::Given && key.name.starts_with("mooncake"));
        if let Some((key, source, why)) = idle {
            return Err(Error::new(ErrorKind::ConfigInvalid, "configure", why)
                .with("setting", key.name)
                .with("source", source)
                .remedy("leave it out, or choose the transport that it is meant for"));
        }
        S::DEFAULTS.iter().try_fold(settings, |all, (name, value)| all.or_default(name, *value))
    }

    /// Tells of settings that make no difference here. They may be meant for another command or
    /// another transport, so they are no error; where Mooncake is on this machine is true for all
    /// commands, so it is not worth a word.
    pub(super) fn tell_idle(settings: &Settings) {
        const PLACES: [&str; 3] = ["mooncake_venv", "mooncake_library", "mooncake_preload"];
        for (key, source, why) in Self::idle(settings) {
            if !PLACES.contains(&key.name) {
                let (name, why) = (key.name, format!("makes no difference here: {why}"));
                super::note(format_args!("featurestore: note: {name} (from: {source}) {why}"));
            }
        }
    }

    /// What is given and makes no difference, and why.
    fn idle(settings: &Settings) -> impl Iterator<Item = (&'static Key, Source, String)> {
        // A value that is none is said elsewhere.
        let transport = value(settings, "transport");
        let receive = value(settings, "receive");
        let given = settings.effective().filter(|(_, _, source)| *source != Source::Default);
        given.filter_map(move |(key, _, source)| {
            Some((key, source, S::idle(key, transport?, receive?)?))
        })
    }

    /// With one more, above the others.
    #[cfg(feature = "rollout")]
    pub(super) fn with(mut self, name: &'static str, value: &str) -> Self {
        self.given.push((name, value.to_owned()));
        self
    }

    /// The flags again, for a process that this one starts.
    #[cfg(feature = "rollout")]
    pub(super) fn again(&self) -> impl Iterator<Item = String> {
        self.given.iter().map(|(name, value)| format!("--{}={value}", name.replace('_', "-")))
    }

    fn keys() -> impl Iterator<Item = &'static Key> {
        let mooncake = KEYS.iter().filter(|key| key.name.starts_with("mooncake"));
        S::NAMES.iter().map(|name| find(name)).chain(mooncake)
    }
}

impl<S: Selection> Args for Flags<S> {
    fn augment_args(command: Command) -> Command {
        Self::keys().fold(command, |command, key| command.arg(flag::<S>(key)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<S: Selection> FromArgMatches for Flags<S> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = |key: &'static Key| Some((key.name, matches.get_one(key.name).cloned()?));
        Ok(Self { given: Self::keys().filter_map(given).collect(), selection: PhantomData })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

fn flag<S: Selection>(key: &'static Key) -> Arg {
    let default = S::DEFAULTS.iter().find(|(name, _)| *name == key.name).map(|(_, value)| *value);
    let mut help = key.help.to_owned();
    help[..1].make_ascii_uppercase();
    if let Some(default) = default.or(key.default) {
        help += &format!(" [default: {default}]");
    } else if S::REQUIRED.contains(&key.name) {
        help += " [required, here or elsewhere]";
    }
    let arg = Arg::new(key.name)
        .long(key.name.replace('_', "-"))
        .value_name(key.name.to_ascii_uppercase())
        .help(help)
        .value_parser(|text: &str| S::check(key.name, text).map(|()| text.to_owned()));
    if key.is_boolean() {
        return arg.num_args(0..=1).require_equals(true).default_missing_value("true");
    }
    arg
}

/// What stands below the flags: where else settings come from, and the one that is no flag.
pub(super) fn elsewhere() -> String {
    let token = find("token");
    format!(
        "A setting can also be given as FEATURESTORE_NAME in the environment, or as name = \"value\" in the file;\n\
         `featurestore config show` prints all that are in force.\n\
         No flag, because others would see it: FEATURESTORE_TOKEN, {}.",
        token.help
    )
}

/// What a setting is in force as.
fn value<T: FromStr>(settings: &Settings, name: &str) -> Option<T> {
    settings.effective().find(|(key, ..)| key.name == name)?.1?.parse().ok()
}

/// Why the transport makes no use of a setting, if it makes none.
fn unused(key: &Key, transport: TransportChoice, receive: Receive) -> Option<String> {
    let why = || format!("transport {transport} has no use for it");
    (!key.counts_for(transport, receive)).then(why)
}

fn find(name: &str) -> &'static Key {
    KEYS.iter().find(|key| key.name == name).expect("a name of the table")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_a_flag_somewhere_or_said_to_be_none() {
        for key in KEYS {
            let mut flags = Flags::<OfPipeline>::keys().chain(Flags::<OfServer>::keys());
            let is_flag = flags.any(|flag| flag.name == key.name);
            assert!(is_flag != (key.name == "token"), "{}", key.name);
        }
        for name in OfPipeline::NAMES.iter().chain(OfServer::NAMES).chain(OfDoctor::NAMES) {
            find(name);
        }
    }
}
