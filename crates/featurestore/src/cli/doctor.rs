//! `featurestore doctor`.

use std::{path::PathBuf, process::ExitCode};

use clap::Args;
use featurestore::{Config, doctor};
use transport_core::{Error, ErrorKind, Result, SessionName};

use super::{
    flags::{self, Flags, OfDoctor},
    layered, say,
};

#[derive(Debug, Args)]
#[command(after_help = flags::elsewhere())]
pub(super) struct DoctorArgs {
    /// Control address of a capture server to ask, HOST:PORT; may be given several times.
    #[arg(long, value_name = "ADDRESS")]
    server: Vec<SessionName>,
    /// File with settings, in TOML or (.yaml, .yml) YAML; flags and FEATURESTORE_* variables come before it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    flags: Flags<OfDoctor>,
    /// Print one JSON object on standard output, and nothing else there.
    #[arg(long)]
    json: bool,
}

/// Prints what was found. Fails in strict mode if the configured transport cannot be used.
pub(super) fn run(args: &DoctorArgs) -> Result<ExitCode> {
    let settings = args.flags.over(layered(args.config.as_deref())?)?;
    let config = Config::from_settings(&settings)?;
    let findings = doctor::examine(&config, &args.server);
    if args.json {
        let json = serde_json::to_string(&findings)
            .map_err(|e| Error::new(ErrorKind::Unexpected, "report", "not JSON").source(e))?;
        say(json)?;
    } else {
        say(&findings)?;
    }
    let failed = config.strict && !findings.is_usable();
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
