//! Where a trainer receives.

use std::{fmt, str::FromStr};

use transport_core::{Error, Result};

use super::{
    TransportChoice,
    value::{bad, fold, suggestion},
};

/// Where samples come to lie in a trainer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receive {
    /// Where the transport brings them by itself: in memory of the GPU under the transports of
    /// devices, in host memory under the others.
    Auto,
    /// In host memory.
    Host,
    /// In memory of the GPU, whatever moves them there.
    Device,
}

impl Receive {
    /// All choices.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Host, Self::Device];

    /// Its name in settings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Host => "host",
            Self::Device => "device",
        }
    }

    /// Whether samples that come by `transport`, which is not `auto`, are received on a device.
    pub const fn is_on_device(self, transport: TransportChoice) -> bool {
        matches!(self, Self::Device) || transport.is_of_devices()
    }

    /// Why `transport` cannot bring samples there, and what to do; none if it can.
    pub(crate) const fn refusal(
        self,
        transport: TransportChoice,
    ) -> Option<(&'static str, &'static str)> {
        match (self, transport) {
            (Self::Host, TransportChoice::NvlinkIntra | TransportChoice::Nvlink) => Some((
                "this transport fills device memory only",
                "leave out receive; or choose the transport shm or tcp, for servers whose arenas \
                 are in host memory",
            )),
            (Self::Device, TransportChoice::Shm) => Some((
                "its views lie in the server's memory",
                "choose the transport tcp, which brings samples to the GPU through page-locked \
                 buffers, or nvlink_intra, for servers whose arenas are on a GPU",
            )),
            (Self::Device, TransportChoice::Mooncake) => Some((
                "Mooncake's engine fills host memory only here",
                "choose the transport tcp, store or nvlink_intra",
            )),
            _ => None,
        }
    }

    /// Refuses a transport that cannot bring samples there.
    pub(crate) fn check(self, transport: TransportChoice) -> Result<()> {
        match self.refusal(transport) {
            None => Ok(()),
            Some((why, remedy)) => Err(bad(why, self.name())
                .with("setting", "receive")
                .with("transport", transport)
                .remedy(remedy)),
        }
    }
}

impl FromStr for Receive {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let folded = fold(text);
        Self::ALL.into_iter().find(|choice| choice.name() == folded).ok_or_else(|| {
            bad("unknown place to receive in", text)
                .remedy(suggestion(&folded, Self::ALL.into_iter().map(Self::name)))
        })
    }
}

impl fmt::Display for Receive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use transport_core::ErrorKind;

    use super::*;
    use crate::config::{Config, Settings};

    fn read(transport: &str, receive: &str) -> Result<Receive> {
        let mut settings = Settings::new();
        settings.set("transport", transport).unwrap();
        settings.set("receive", receive).unwrap();
        Config::from_settings(&settings).map(|config| config.receive)
    }

    #[test]
    fn names_are_forgiving_but_never_guessed() {
        assert_eq!(Config::default().receive, Receive::Auto);
        assert_eq!(read("tcp", " Device ").unwrap(), Receive::Device);
        for (text, part) in [("devise", "did you mean device"), ("cuda", "auto, host, device")] {
            let error = read("tcp", text).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("setting=receive"), "{error}");
        }
    }

    #[test]
    fn a_transport_that_cannot_bring_samples_there_is_refused_with_another() {
        for (transport, receive, remedy) in [
            ("nvlink_intra", "host", "choose the transport shm or tcp"),
            ("nvlink", "host", "choose the transport shm or tcp"),
            ("shm", "device", "choose the transport tcp"),
            ("mooncake", "device", "choose the transport tcp"),
        ] {
            let error = read(transport, receive).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConfigInvalid, "{error}");
            assert_eq!(error.context("setting"), Some("receive"), "{error}");
            assert_eq!(error.context("transport"), Some(transport), "{error}");
            assert!(error.to_string().contains(remedy), "{error}");
        }
        for transport in TransportChoice::ALL {
            assert_eq!(read(transport.name(), "auto").unwrap(), Receive::Auto, "{transport}");
        }
        for transport in ["auto", "nvlink_intra", "nvlink", "tcp", "store"] {
            assert_eq!(read(transport, "device").unwrap(), Receive::Device, "{transport}");
        }
        for transport in ["auto", "shm", "tcp", "mooncake", "store"] {
            assert_eq!(read(transport, "host").unwrap(), Receive::Host, "{transport}");
        }
    }
}
