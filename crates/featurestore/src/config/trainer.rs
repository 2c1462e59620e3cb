//! How a trainer reads.

use std::{fmt, str::FromStr, time::Duration};

use control_proto::Secret;
use transport_core::{ByteSize, Error, ErrorKind, Result};

use super::{
    MooncakeConfig, Receive, Settings, duration,
    value::{boolean, device, fold, nonzero_size, suggestion},
};

/// How samples are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TransportChoice {
    /// The best that a probe finds usable.
    Auto,
    /// The publisher's device memory, by CUDA IPC: same host only.
    NvlinkIntra,
    /// The publisher's device memory, by handles of the NVLink fabric.
    Nvlink,
    /// The publisher's memory, mapped: same host only.
    Shm,
    /// Mooncake's tcp wire.
    Tcp,
    /// Mooncake's own transfer engine, by the protocol of the setting `mooncake_protocol`.
    Mooncake,
    /// Mooncake Store.
    Store,
}

impl TransportChoice {
    /// All choices.
    pub const ALL: [Self; 7] = [
        Self::Auto,
        Self::NvlinkIntra,
        Self::Nvlink,
        Self::Shm,
        Self::Tcp,
        Self::Mooncake,
        Self::Store,
    ];

    /// Its name in settings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::NvlinkIntra => "nvlink_intra",
            Self::Nvlink => "nvlink",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Mooncake => "mooncake",
            Self::Store => "store",
        }
    }

    /// Whether it moves samples from device memory into device memory, and nothing else.
    pub const fn is_of_devices(self) -> bool {
        matches!(self, Self::NvlinkIntra | Self::Nvlink)
    }
}

impl FromStr for TransportChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let folded = fold(text);
        Self::ALL.into_iter().find(|choice| choice.name() == folded).ok_or_else(|| {
            Error::new(ErrorKind::ConfigInvalid, "configure", "unknown transport")
                .with("found", format_args!("{text:?}"))
                .remedy(suggestion(&folded, Self::ALL.into_iter().map(Self::name)))
        })
    }
}

impl fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How a trainer reads. Made from [`Settings`] or with [`Default`] and the builder methods.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Config {
    /// How samples are read.
    pub transport: TransportChoice,
    /// Where samples come to lie.
    pub receive: Receive,
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
    /// The GPU that samples are received on, where they are on one.
    pub device: u32,
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
    /// used, by itself or with this transport; the error names the setting, and where a value that
    /// cannot be read comes from.
    pub fn from_settings(settings: &Settings) -> Result<Self> {
        let (transport, receive): (TransportChoice, Receive) =
            (settings.need("transport", str::parse)?, settings.need("receive", str::parse)?);
        receive.check(transport)?;
        Ok(Self {
            transport,
            receive,
            strict: settings.need("strict", boolean)?,
            pool: settings.get("pool", nonzero_size)?,
            lease: settings.need("lease", duration)?,
            deadline: settings.need("deadline", duration)?,
            token: settings.get("token", |text| Secret::new(text))?,
            device: settings.need("device", device)?,
            mooncake: MooncakeConfig::from_settings(settings)?,
        })
    }

    /// Chooses how samples are read.
    #[must_use]
    pub fn transport(mut self, transport: TransportChoice) -> Self {
        self.transport = transport;
        self
    }

    /// Chooses where samples come to lie. What the transport cannot do is refused when it is opened.
    #[must_use]
    pub fn receive(mut self, receive: Receive) -> Self {
        self.receive = receive;
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

    /// Chooses the GPU that samples are received on, where they are on one.
    #[must_use]
    pub fn device(mut self, device: u32) -> Self {
        self.device = device;
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
