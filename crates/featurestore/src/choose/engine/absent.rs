//! What stands in for Mooncake's transfer engine in builds without it.

use super::Finding;
use crate::config::MooncakeConfig;

pub(super) fn look(config: &MooncakeConfig) -> Finding {
    probe(config)
}

pub(super) fn probe(_: &MooncakeConfig) -> Finding {
    Err("built without Mooncake; build with --features mooncake-python for the wheel, or mooncake \
         for a library"
        .to_owned())
}
