//! `plan`, and `config check`, `explain` and `schema`: a run's file.

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, ValueEnum};
use featurestore::launch::{Format, Loaded, OVER_NVLINK, OVER_TCP, RunConfig};
use transport_core::Result;

use super::{columns, say};

/// A run's file.
#[derive(Debug, Args)]
#[command(after_long_help = examples())]
pub(super) struct RunFile {
    /// File of the run, in TOML or (.yaml, .yml) YAML; environment variables such as MOONCAKE_PROTOCOL come before it.
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

#[derive(Debug, Args)]
#[command(after_long_help = examples())]
pub(super) struct PlanArgs {
    #[command(flatten)]
    run: RunFile,
    /// How the plan is printed.
    #[arg(long, value_enum, default_value_t = As::Text)]
    format: As,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum As {
    /// For people.
    Text,
    /// One JSON object.
    Json,
    /// Lines to paste into a shell.
    Shell,
}

impl RunFile {
    fn load(&self) -> Result<Loaded> {
        let loaded = Loaded::file(&self.file, |name| std::env::var(name).ok())?;
        for note in &loaded.notes {
            super::note(format_args!("featurestore: note: {note}"));
        }
        Ok(loaded)
    }
}

pub(super) fn plan(args: &PlanArgs) -> Result<ExitCode> {
    let format = match args.format {
        As::Text => Format::Text,
        As::Json => Format::Json,
        As::Shell => Format::Shell,
    };
    say(args.run.load()?.plan().render(format).trim_end())?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn check(run: &RunFile) -> Result<ExitCode> {
    let loaded = run.load()?;
    let quantum = loaded.config.trainer.quantum();
    say(format_args!("{}: fine; one optimizer step takes {quantum} samples", run.file.display()))?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn explain(run: &RunFile) -> Result<ExitCode> {
    let lines = run.load()?.explain();
    say(columns(lines.into_iter().map(|(path, value, source)| [path, value, source])))?;
    Ok(ExitCode::SUCCESS)
}

/// Files to begin with.
fn examples() -> String {
    format!(
        "A file over tcp:\n\n{OVER_TCP}\n\
         A file over the NVLink of one host, with SGLang's capture servers and Mooncake:\n\n\
         {OVER_NVLINK}\n\
         `featurestore config schema` has every setting with its meaning."
    )
}

pub(super) fn schema() -> Result<ExitCode> {
    say(format_args!("{:#}", RunConfig::schema()))?;
    Ok(ExitCode::SUCCESS)
}
