//! How a trainer reads.

use std::{fmt, str::FromStr, time::Duration};

use control_proto::Secret;
use transport_core::{ByteSize, Error, ErrorKind, Result};

use super::{
    MooncakeConfig, Settings, duration,
    value::{boolean, fold, nonzero_size, suggestion},
};

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
    /// Mooncake's own transfer engine, by the protocol of the setting `mooncake_protocol`.
    Mooncake,
    /// Mooncake Store.
    Store,
}

impl FromStr for TransportChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match fold(text).as_str() {
            "auto" => Ok(Self::Auto),
            "shm" => Ok(Self::Shm),
            "tcp" => Ok(Self::Tcp),
            "mooncake" => Ok(Self::Mooncake),
            "store" => Ok(Self::Store),
            other => Err(Error::new(ErrorKind::ConfigInvalid, "configure", "unknown transport")
                .with("found", format_args!("{text:?}"))
                .remedy(suggestion(
                    other,
                    ["auto", "shm", "tcp", "mooncake", "store"].into_iter(),
                ))),
        }
    }
}

impl fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Mooncake => "mooncake",
            Self::Store => "store",
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
    /// Where Mooncake and its store are.
    pub mooncake: MooncakeConfig,
}

impl Default for Config {
    fn default() -> Self {
        Self::from_settings(&Settings::new()).expect("the defaults are valid")
    }
}

impl Config {
    /// Checks and types what is in force.
    ///
    /// # Errors
    /// [`ErrorKind::ConfigInvalid`] or [`ErrorKind::InvalidInput`], permanent: a value cannot be
    /// used; the error names the setting and where its value comes from.
    pub fn from_settings(settings: &Settings) -> Result<Self> {
        Ok(Self {
            transport: settings.need("transport", str::parse)?,
            strict: settings.need("strict", boolean)?,
            pool: settings.get("pool", nonzero_size)?,
            lease: settings.need("lease", duration)?,
            deadline: settings.need("deadline", duration)?,
            token: settings.get("token", |text| Secret::new(text))?,
            mooncake: MooncakeConfig::from_settings(settings)?,
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

    /// Sets the secret to show to control listeners that ask for one.
    #[must_use]
    pub fn token(mut self, token: Secret) -> Self {
        self.token = Some(token);
        self
    }
}
