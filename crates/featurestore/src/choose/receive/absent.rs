//! What stands in for receiving on a GPU in builds without it.

#[cfg(any(feature = "direct", feature = "store"))]
use transport_core::ByteSize;
use transport_core::{Error, ErrorKind, Result};
#[cfg(feature = "direct")]
use transport_mooncake_direct::DirectTransportBuilder;
#[cfg(feature = "store")]
use {
    mooncake_sys::{SegmentReader, StoreApi},
    std::sync::Arc,
    transport_mooncake_store::{StoreConfig, StoreTransport},
};

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

    #[cfg(feature = "store")]
    pub(super) fn start_store(
        self,
        _: Arc<dyn StoreApi>,
        _: StoreConfig,
        _: Option<Arc<dyn SegmentReader>>,
        _: ByteSize,
    ) -> Result<StoreTransport> {
        match self {}
    }
}
