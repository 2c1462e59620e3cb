//! `featurestore rollout …`.

mod bench;
mod exchange;
mod files;

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Subcommand};
use featurestore::{
    Config, TransportChoice,
    rollout::{Endpoint, Input, Options, PayloadSpec, environment},
};
use rollout_codec::{native, transport::RolloutConfig};
use transport_core::{ByteSize, Dtype, Result};

use super::{
    flags::{Flags, OfRollout},
    layered, mooncake, note,
};

#[derive(Debug, Subcommand)]
pub(super) enum RolloutCommand {
    /// Puts a rollout, prints its handle, and keeps it readable where this process has the bytes.
    Put(exchange::PutArgs),
    /// Gets a rollout by its handle, compares its checksums, and prints what it holds.
    Get(exchange::GetArgs),
    /// Removes rollouts by their handles: none, one or many.
    Cleanup(exchange::CleanupArgs),
    /// Removes what producers have left in a store that were killed in the middle of a put.
    Sweep(exchange::SweepArgs),
    /// Prints fields, element types, rows and bytes of a handle or a dump, and compares checksums.
    Inspect(exchange::InspectArgs),
    /// Measures puts here and gets in another process.
    Bench(bench::BenchArgs),
    /// Reads stored objects of Mooncake in the dump format and prints the decoded record.
    Decode(files::DecodeArgs),
    /// Writes a decoded record as stored objects of Mooncake: the inverse of decode.
    Encode(files::EncodeArgs),
    /// The reading process of bench; started by it.
    #[command(hide = true)]
    Reader(bench::ReaderArgs),
}

pub(super) fn run(command: RolloutCommand) -> Result<ExitCode> {
    match command {
        RolloutCommand::Put(args) => exchange::put(&args),
        RolloutCommand::Get(args) => exchange::get(&args),
        RolloutCommand::Cleanup(args) => exchange::cleanup(&args),
        RolloutCommand::Sweep(args) => exchange::sweep(&args),
        RolloutCommand::Inspect(args) => exchange::inspect(&args),
        RolloutCommand::Bench(args) => bench::run(&args),
        RolloutCommand::Decode(args) => files::decode(&args),
        RolloutCommand::Encode(args) => files::encode(&args),
        RolloutCommand::Reader(args) => bench::reader(&args),
    }
}

/// How a command reaches rollouts.
#[derive(Clone, Debug, Args)]
struct TransportArgs {
    /// File with settings, in TOML or (.yaml, .yml) YAML; flags and FEATURESTORE_* variables come before it, and MOONCAKE_*
    /// and MC_* variables after it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    flags: Flags<OfRollout>,
    /// Largest data object [default: none over shm, else 1GiB].
    #[arg(long, value_parser = chunk)]
    chunk: Option<ByteSize>,
    /// Data objects on their way at a time.
    #[arg(long, default_value_t = 2)]
    in_flight: usize,
    /// Threads that gather and verify [default: cores, at most 4].
    #[arg(long)]
    threads: Option<usize>,
    /// Folder through which readers of this host share one copy, over tcp and store.
    #[arg(long, value_name = "DIR")]
    share: Option<PathBuf>,
}

impl TransportArgs {
    /// Over a store, whatever is configured.
    fn over_store(&self) -> Self {
        Self { flags: self.flags.clone().with("transport", "store"), ..self.clone() }
    }

    fn options(&self, memory: Option<ByteSize>) -> Result<Options> {
        let settings = self.flags.over(layered(self.config.as_deref())?)?;
        let (settings, segment) = environment::apply(settings, |name| std::env::var(name).ok())?;
        let mut rollouts = RolloutConfig::default();
        if let Some(bytes) = self.chunk.and_then(|size| std::num::NonZeroU64::new(size.get())) {
            rollouts = rollouts.chunks(bytes, self.in_flight);
        }
        rollouts.in_flight = self.in_flight;
        if let Some(threads) = self.threads {
            rollouts = rollouts.threads(threads);
        }
        let mut options = Options::default();
        options.config = Config::from_settings(&settings)?;
        if options.config.transport == TransportChoice::Auto {
            options.config.transport = TransportChoice::Shm;
        }
        // The variable is meant for producers over a store.
        let segment = segment.filter(|_| options.config.transport == TransportChoice::Store);
        options.memory = memory.or(segment);
        options.rollouts = rollouts;
        if self.share.is_some() && options.config.transport == TransportChoice::Shm {
            let why = "readers by shm see the producer's memory as it is";
            note(format_args!("featurestore: note: --share makes no difference here: {why}"));
        }
        options.share.clone_from(&self.share);
        Ok(options)
    }

    /// The flags again, for a process that this one starts.
    fn flags(&self) -> Vec<std::ffi::OsString> {
        let mut flags: Vec<std::ffi::OsString> = Vec::new();
        let mut add = |name: &str, value: Option<std::ffi::OsString>| {
            if let Some(value) = value {
                flags.push(name.into());
                flags.push(value);
            }
        };
        add("--config", self.config.clone().map(Into::into));
        add("--chunk", self.chunk.map(|size| size.to_string().into()));
        add("--in-flight", Some(self.in_flight.to_string().into()));
        add("--threads", self.threads.map(|threads| threads.to_string().into()));
        add("--share", self.share.clone().map(Into::into));
        flags.extend(self.flags.again().map(Into::into));
        flags
    }
}

/// Opens one side; starts this program anew first if Mooncake needs other variables.
async fn open(options: Options) -> Result<Endpoint> {
    Endpoint::open(options).await
}

fn prepare(options: &Options) -> Result<()> {
    mooncake::prepare(options.config.transport, &options.config.mooncake)
}

/// What is put.
#[derive(Clone, Debug, Args)]
#[group(required = false, multiple = false)]
struct InputArgs {
    /// Deterministic payload: text, text+teacher or text+r3, and its size [default: text:128MiB].
    #[arg(long, value_name = "PROFILE:SIZE")]
    payload: Option<PayloadSpec>,
    /// Folder of safetensors files: a row each, and a field for each name of a tensor. Or a file of
    /// Arrow IPC (.arrow, .feather) or Parquet (.parquet), or a folder of such files.
    #[arg(long, value_name = "PATH")]
    input: Option<PathBuf>,
}

impl InputArgs {
    fn input(&self) -> Input {
        match (&self.input, self.payload) {
            (Some(path), _) => Input::Files(path.clone()),
            (None, payload) => Input::Payload(
                payload.unwrap_or_else(|| "text".parse().expect("a profile of payloads")),
            ),
        }
    }
}

/// A size that something fits into.
fn chunk(text: &str) -> std::result::Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|e: transport_core::Error| e.to_string())?;
    if size.get() == 0 { Err("nothing fits into 0 bytes".to_owned()) } else { Ok(size) }
}

/// `FIELD=TYPE`, for storing whole numbers in fewer bytes.
fn narrow(text: &str) -> std::result::Result<(String, Dtype), String> {
    let (field, dtype) = text.split_once('=').ok_or("write FIELD=TYPE, such as tokens=int32")?;
    Ok((field.to_owned(), dtype.parse().map_err(|e: transport_core::Error| e.to_string())?))
}

fn encoding(narrowed: &[(String, Dtype)], checksums: bool) -> native::Options {
    let plain = native::Options::default().checksums(checksums);
    narrowed.iter().fold(plain, |options, (field, dtype)| options.narrow(field.clone(), *dtype))
}
