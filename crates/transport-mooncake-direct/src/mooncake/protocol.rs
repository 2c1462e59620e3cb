//! Names of Mooncake's transports.

use std::{fmt, str::FromStr};

use transport_core::{Error, ErrorKind, RegionKind, Result};

/// How Mooncake moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Protocol {
    /// Sockets; host memory.
    Tcp,
    /// RDMA network cards; host and device memory.
    Rdma,
    /// NVLink between nodes; device memory.
    Nvlink,
    /// NVLink within a node; device memory.
    NvlinkIntra,
}

impl Protocol {
    const ALL: [Self; 4] = [Self::Tcp, Self::Rdma, Self::Nvlink, Self::NvlinkIntra];

    /// Mooncake's name of it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
            Self::Nvlink => "nvlink",
            Self::NvlinkIntra => "nvlink_intra",
        }
    }

    /// Whether it can write memory of this kind.
    pub(super) fn takes(self, kind: RegionKind) -> bool {
        match self {
            Self::Tcp => kind.is_host(),
            Self::Rdma => true,
            Self::Nvlink | Self::NvlinkIntra => !kind.is_host(),
        }
    }
}

impl FromStr for Protocol {
    type Err = Error;

    /// Takes the names in any case, with blanks around them and `-` for `_`.
    fn from_str(text: &str) -> Result<Self> {
        let name = text.trim().to_ascii_lowercase().replace('-', "_");
        Self::ALL.into_iter().find(|protocol| protocol.name() == name).ok_or_else(|| {
            Error::new(ErrorKind::ConfigInvalid, "read protocol", "no such protocol of Mooncake")
                .with("found", format_args!("{text:?}"))
                .with("known", Self::ALL.map(Self::name).join(", "))
        })
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_however_they_are_written() {
        for protocol in Protocol::ALL {
            assert_eq!(protocol.name().parse::<Protocol>().unwrap(), protocol);
        }
        assert_eq!(" TCP\n".parse::<Protocol>().unwrap(), Protocol::Tcp);
        assert_eq!("NVLink-Intra".parse::<Protocol>().unwrap(), Protocol::NvlinkIntra);
        let error = "nvlink intra".parse::<Protocol>().unwrap_err();
        assert!(error.context("known").unwrap().contains("nvlink_intra"), "{error}");
        assert!("".parse::<Protocol>().is_err());
    }

    #[test]
    fn memory_that_a_protocol_cannot_reach_is_known() {
        let (host, device) = (RegionKind::Shared, RegionKind::Cuda { device: 1 });
        assert!(Protocol::Tcp.takes(host) && !Protocol::Tcp.takes(device));
        assert!(Protocol::Rdma.takes(host) && Protocol::Rdma.takes(device));
        assert!(!Protocol::NvlinkIntra.takes(host) && Protocol::Nvlink.takes(device));
    }
}
