//! What stands for the store of a run in a build without Mooncake.

use transport_core::{Error, Result};

use super::{Options, report::MooncakeReport};
use crate::config::MooncakeConfig;

#[derive(Debug)]
pub(super) struct Store {
    pub(super) config: MooncakeConfig,
}

impl Store {
    pub(super) async fn of(options: &Options) -> Result<Self> {
        Ok(Self { config: options.mooncake.clone() })
    }

    pub(super) async fn report(&self) -> Result<Option<MooncakeReport>> {
        Ok(None)
    }

    pub(super) async fn died(&self) -> Error {
        std::future::pending().await
    }

    pub(super) async fn explain(&self, error: Error) -> Error {
        error
    }

    pub(super) async fn stop(self) -> Result<()> {
        Ok(())
    }
}
