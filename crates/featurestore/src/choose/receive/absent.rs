//! What stands in for receiving on a GPU in builds without it.

use transport_core::{Error, ErrorKind, Result};
#[cfg(feature = "direct")]
use {transport_core::ByteSize, transport_mooncake_direct::DirectTransportBuilder};

use crate::config::Config;

/// There is none.
#[derive(Debug)]
pub(super) enum OnDevice {}

impl OnDevice {
    pub(super) fn open(config: &Config) -> Result<Self> {
        let why = "built without the feature cuda";
        Err(Error::new(ErrorKind::Unsupported, "open device", why)
            .with("setting", "receive")
            .with("found", config.receive)
            .remedy("build with --features cuda"))
    }

    pub(super) fn place(&self) -> String {
        match *self {}
    }

    #[cfg(feature = "direct")]
    pub(super) fn receive(
        self,
        _: DirectTransportBuilder,
        _: ByteSize,
    ) -> Result<DirectTransportBuilder> {
        match self {}
    }
}
