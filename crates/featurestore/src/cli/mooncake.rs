//! The environment that Mooncake reads.

use featurestore::{TransportChoice, config::MooncakeConfig};
use transport_core::Result;

/// Sees to it that Mooncake finds the variables that it reads when it is loaded, by starting this
/// program anew with them: a process must not change its environment once it has threads.
#[cfg(feature = "store")]
pub(super) fn prepare(transport: TransportChoice, config: &MooncakeConfig) -> Result<()> {
    use std::os::unix::process::CommandExt;
    use transport_core::Error;
    /// Set by this function, so that it never goes round in a circle.
    const DONE: &str = "FEATURESTORE_MOONCAKE_PREPARED";

    let missing = featurestore::mooncake::environment(config);
    let loads_it = matches!(transport, TransportChoice::Store | TransportChoice::Mooncake);
    if !loads_it || missing.is_empty() || std::env::var_os(DONE).is_some() {
        return Ok(());
    }
    let fail = |error| Error::io("start anew for Mooncake", error);
    let program = std::env::current_exe().map_err(fail)?;
    let arguments = std::env::args_os().skip(1);
    let mut command = std::process::Command::new(program);
    Err(fail(command.args(arguments).envs(missing).env(DONE, "1").exec())) // only if it fails
}

#[cfg(not(feature = "store"))]
pub(super) fn prepare(_: TransportChoice, _: &MooncakeConfig) -> Result<()> {
    Ok(()) // a build without Mooncake says so where it is needed
}
