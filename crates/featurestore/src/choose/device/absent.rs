//! What stands in for memory of devices in builds without it.

use transport_core::{ByteSize, Result};
use transport_mooncake_direct::DirectTransportBuilder;

use super::{Finding, direct::Server};
use crate::config::Config;

const ABSENT: &str = "built without the feature cuda; build with --features cuda";

#[derive(Debug)]
pub(super) struct Devices {
    pub(super) intra: Finding,
    pub(super) fabric: Finding,
    pub(super) reader: Option<Reader>,
}

/// There is none.
#[derive(Debug)]
pub(super) enum Reader {}

impl Devices {
    pub(super) fn left_out() -> Self {
        Self::none(ABSENT)
    }

    pub(super) fn none(why: &str) -> Self {
        Self { intra: Err(why.to_owned()), fabric: Err(why.to_owned()), reader: None }
    }
}

impl Reader {
    pub(super) fn receive(
        self,
        _: DirectTransportBuilder,
        _: ByteSize,
    ) -> Result<DirectTransportBuilder> {
        match self {}
    }
}

pub(super) fn alone(_: &Config) -> Devices {
    Devices::left_out()
}

pub(super) fn probe(_: &Config, _: &[Server]) -> Devices {
    Devices::left_out()
}
