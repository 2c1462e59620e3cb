//! Flags of the commands that use Mooncake, and the environment that it reads.

use clap::Args;
use featurestore::{
    Settings, TransportChoice,
    config::{Master, MooncakeConfig},
};
use transport_core::Result;

/// Where Mooncake is. More settings are in the file and the environment; see `config show`.
#[derive(Clone, Debug, Args)]
pub(super) struct MooncakeArgs {
    /// Master of the store, HOST:PORT. The pipeline also takes managed: one of its own, on loopback,
    /// that ends with it.
    #[arg(long, value_name = "MASTER")]
    mooncake: Option<Master>,
    /// Virtual environment with Mooncake's wheel.
    #[arg(long, value_name = "DIR")]
    mooncake_venv: Option<String>,
    /// File of libmooncake_store.so; comes before the wheel.
    #[arg(long, value_name = "FILE")]
    mooncake_library: Option<String>,
    /// Address of the master's metrics, HOST:PORT.
    #[arg(long, value_name = "ADDRESS")]
    mooncake_admin: Option<String>,
}

impl MooncakeArgs {
    pub(super) fn apply(&self, settings: &mut Settings) -> Result<()> {
        let given = [
            ("mooncake", self.mooncake.as_ref().map(ToString::to_string)),
            ("mooncake_venv", self.mooncake_venv.clone()),
            ("mooncake_library", self.mooncake_library.clone()),
            ("mooncake_admin", self.mooncake_admin.clone()),
        ];
        for (name, value) in given {
            if let Some(value) = value {
                settings.set(name, value)?;
            }
        }
        Ok(())
    }
}

#[cfg(feature = "rollout")]
impl MooncakeArgs {
    /// The flags again, for a process that this one starts.
    pub(super) fn flags(&self) -> Vec<std::ffi::OsString> {
        [
            ("--mooncake", self.mooncake.as_ref().map(ToString::to_string)),
            ("--mooncake-venv", self.mooncake_venv.clone()),
            ("--mooncake-library", self.mooncake_library.clone()),
            ("--mooncake-admin", self.mooncake_admin.clone()),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some([name.into(), value?.into()]))
        .flatten()
        .collect()
    }
}

/// Sees to it that Mooncake finds the variables that it reads when it is loaded, by starting this
/// program anew with them: a process must not change its environment once it has threads.
#[cfg(feature = "store")]
pub(super) fn prepare(transport: TransportChoice, config: &MooncakeConfig) -> Result<()> {
    use std::os::unix::process::CommandExt;
    use transport_core::Error;
    /// Set by this function, so that it never goes round in a circle.
    const DONE: &str = "FEATURESTORE_MOONCAKE_PREPARED";

    let missing = featurestore::mooncake::environment(config);
    if transport != TransportChoice::Store || missing.is_empty() || std::env::var_os(DONE).is_some()
    {
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
