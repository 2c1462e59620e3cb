//! Commands and flags.

mod doctor;
mod flags;
mod launch;
mod mooncake;
#[cfg(feature = "rollout")]
mod rollout;

use std::{io::IsTerminal, path::PathBuf, process::ExitCode, time::Duration};

use clap::{Args, Parser, Subcommand};
use featurestore::{
    Config, ServerConfig, Settings,
    config::{Problems, duration},
    input::Folder,
    pipeline::{self, Options, Preset},
    process::{Notes, PRINT, note, say, survive_file_limits},
    server::{CaptureServer, end_of_life},
    source::Source,
    workload::Model,
};
use flags::{Flags, OfPipeline, OfServer};
use tracing_subscriber::EnvFilter;
use transport_core::{Error, ErrorKind, Result};

/// Moves captured tensors from inference servers to trainers.
#[derive(Debug, Parser)]
#[command(name = "featurestore", version, about, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  featurestore pipeline                          the main job: 64 synthetic samples
  featurestore pipeline --paper --json           the published benchmark's load
  featurestore pipeline --input DIR              real captures (*.safetensors)
  featurestore capture-server --arena 2GiB       one capture server
  featurestore rollout bench                     puts and gets across processes, by shm
  featurestore doctor                            what works here, and why
  featurestore config show --config FILE         settings in force, with their sources
  featurestore plan run.toml                     what each role of a run is started with

Exit codes: 0 success, 1 failure, 2 wrong usage, 3 the job ran but its result is wrong.
Log level: RUST_LOG, such as RUST_LOG=debug; default warn.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs the main job: capture servers, a trainer, every byte verified and given back.
    Pipeline(Box<PipelineArgs>),
    /// Owns an arena and answers POST /generate with captures; GET /health, GET /metrics.
    CaptureServer(Box<ServerArgs>),
    /// Says what this machine can do and whether the configured transport can be used.
    Doctor(Box<doctor::DoctorArgs>),
    /// Puts, gets, inspects and measures rollouts; reads and writes Mooncake's objects.
    #[cfg(feature = "rollout")]
    #[command(subcommand)]
    Rollout(Box<rollout::RolloutCommand>),
    /// Prints what each role of a run is started with: command line and environment.
    Plan(launch::PlanArgs),
    /// Shows and checks settings.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// The pipeline's trainer; started by the pipeline.
    #[command(hide = true)]
    Trainer {
        /// File with settings, in TOML or (.yaml, .yml) YAML.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Folder of the run, which the trainer removes if the pipeline is gone.
        #[arg(long, value_name = "DIR")]
        folder: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Checks the file of a run: everything that is wrong, each with the reason.
    Check(launch::RunFile),
    /// Prints every value in force of a run's file and where it comes from.
    Explain(launch::RunFile),
    /// Prints the JSON schema of a run's file.
    Schema,
    /// Prints every setting in force and where it comes from.
    Show {
        /// File with settings, in TOML or (.yaml, .yml) YAML.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
}

/// What synthetic captures look like.
#[derive(Debug, Args)]
struct ModelArgs {
    /// Width of a synthetic hidden state [default: 5120]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    hidden: Option<u32>,
    /// Layers whose hidden states are captured in synthetic samples [default: 5,19,33,47,61]
    #[arg(long, value_delimiter = ',')]
    taps: Option<Vec<i64>>,
    /// Seed of synthetic content.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Folder of safetensors files to serve instead of synthetic content.
    #[arg(long, value_name = "DIR")]
    input: Option<PathBuf>,
}

impl ModelArgs {
    fn model(&self) -> Result<Model> {
        let paper = Model::paper();
        Model::new(self.hidden.unwrap_or(paper.hidden), self.taps.clone().unwrap_or(paper.taps))
    }

    /// Tells of flags that make no difference, because the files of a folder are as they are.
    fn tell_idle(&self, max_length: bool) {
        if self.input.is_none() {
            return;
        }
        let given = [
            ("hidden", self.hidden.is_some()),
            ("taps", self.taps.is_some()),
            ("max-length", max_length),
        ];
        for (flag, _) in given.into_iter().filter(|(_, given)| *given) {
            note(format_args!(
                "featurestore: note: --{flag} makes no difference here: samples of --input are as they are"
            ));
        }
    }
}

#[derive(Debug, Args)]
#[command(after_help = flags::elsewhere())]
struct PipelineArgs {
    /// Samples to move [default: 64 synthetic ones; all of --input, otherwise its first]
    #[arg(long, value_parser = clap::value_parser!(u32).range(0..=10_000_000))]
    samples: Option<u32>,
    /// Capture servers to start.
    #[arg(long, default_value_t = 2)]
    servers: usize,
    /// GPUs of the servers' arenas, in turn, such as 0,1; --device if not given.
    #[arg(long, value_delimiter = ',', value_name = "DEVICES")]
    server_devices: Vec<u32>,
    /// GPU of the trainer's pool; --device if not given.
    #[arg(long, value_name = "DEVICE")]
    trainer_device: Option<u32>,
    /// File with settings, in TOML or (.yaml, .yml) YAML; flags and FEATURESTORE_* variables come
    /// before it. What counts here: arena, arena_kind, transport, receive, strict, pool, device, lease,
    /// deadline, token.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    flags: Flags<OfPipeline>,
    /// Samples acknowledged together, as at an optimizer step.
    #[arg(long, default_value_t = 16)]
    quantum: usize,
    /// Capture requests in flight.
    #[arg(long, default_value_t = 64)]
    concurrency: usize,
    /// The published benchmark's setting: controlled or tuned. Prints its row beside this run's.
    #[arg(long)]
    preset: Option<Preset>,
    /// Prompts of one batch that is read, arranged and prepared together.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    ingest_batch: u32,
    /// Samples a second that all servers together capture at most, such as 67.3; long ones take
    /// longer than short ones.
    #[arg(long, value_parser = rate, allow_negative_numbers = true)]
    server_rate: Option<f64>,
    /// File in which the trainer durably records what is trained, before anything is freed; it must
    /// be new, and stays after the run. Temporary if not given.
    #[arg(long, value_name = "PATH")]
    ledger: Option<PathBuf>,
    /// How long nothing may be captured, verified or acknowledged until the run is given up, such as
    /// 10m [default: 2m, or twice the deadline if that is more]
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    stall_timeout: Option<Duration>,
    /// Longest synthetic prompt, in tokens [default: 8192]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    max_length: Option<u32>,
    /// The published benchmark's load: 512 samples, 659,071 tokens, 40,503,867,376 bytes.
    #[arg(long, conflicts_with_all = ["samples", "max_length", "hidden", "taps", "input"])]
    paper: bool,
    /// Send requests in the plugin form rather than the patch form.
    #[arg(long)]
    plugin: bool,
    /// Do not compare tensors with their checksums.
    #[arg(long)]
    no_verify: bool,
    /// Print one JSON object on standard output, and nothing else there.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelArgs,
}

#[derive(Debug, Args)]
#[command(after_help = flags::elsewhere())]
struct ServerArgs {
    /// File with settings, in TOML or (.yaml, .yml) YAML; flags and FEATURESTORE_* variables come
    /// before it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    flags: Flags<OfServer>,
    /// End when standard input ends, so that the server never outlives who started it.
    #[arg(long)]
    exit_with_parent: bool,
    /// Folder of the run whose pipeline starts the server, removed at the end if the run is gone.
    #[arg(long, hide = true, value_name = "DIR", requires = "exit_with_parent")]
    run_folder: Option<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
}

fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse::<f64>().ok().filter(|rate| (0.001..=1e6).contains(rate));
    rate.ok_or_else(|| "not a number of samples a second, such as 67.3".to_owned())
}

fn layered(file: Option<&std::path::Path>) -> Result<Settings> {
    let settings = match file {
        Some(file) => Settings::new().file(file)?,
        None => Settings::new(),
    };
    settings.environment(std::env::vars_os())
}

pub(crate) fn run() -> ExitCode {
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(Notes::default)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    if let Err(error) = survive_file_limits() {
        tracing::debug!(%error, "files that grow beyond their limit will end this process");
    }
    let outcome = match cli.command {
        Command::Pipeline(args) => pipeline(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::CaptureServer(args) => capture_server(&args),
        #[cfg(feature = "rollout")]
        Command::Rollout(command) => rollout::run(*command),
        Command::Plan(args) => launch::plan(&args),
        Command::Config(ConfigCommand::Check(run)) => launch::check(&run),
        Command::Config(ConfigCommand::Explain(run)) => launch::explain(&run),
        Command::Config(ConfigCommand::Schema) => launch::schema(),
        Command::Config(ConfigCommand::Show { config }) => show(config.as_deref()),
        Command::Trainer { config, folder } => trainer(config.as_deref(), folder),
    };
    outcome.unwrap_or_else(|error| {
        if error.operation() == PRINT && error.kind() == ErrorKind::PeerGone {
            return ExitCode::from(BROKEN_PIPE); // as `head` ends others
        }
        note(format_args!("featurestore: {error}"));
        ExitCode::FAILURE
    })
}

fn runtime(workers: usize, blocking: usize) -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(workers)
        .max_blocking_threads(blocking)
        .enable_all()
        .build()
        .map_err(|e| Error::io("start runtime", e))
}

fn pipeline(args: &PipelineArgs) -> Result<ExitCode> {
    let settings = args.flags.over(layered(args.config.as_deref())?)?;
    let config = Config::from_settings(&settings)?;
    Flags::<OfPipeline>::tell_idle(&settings);
    let mut options = Options::default();
    args.model.tell_idle(args.max_length.is_some());
    options.samples = args.samples.map(|samples| samples as usize);
    options.servers = args.servers;
    options.arena = ServerConfig::from_settings(&settings)?.arena;
    options.config.clone_from(&args.config);
    options.transport = config.transport;
    options.receive = config.receive;
    options.device = config.device;
    options.server_devices.clone_from(&args.server_devices);
    options.trainer_device = args.trainer_device;
    options.strict = config.strict;
    options.mooncake = config.mooncake;
    options.pool = config.pool;
    options.quantum = args.quantum;
    options.concurrency = args.concurrency;
    options.model = args.model.model()?;
    options.max_length = args.max_length.unwrap_or(options.max_length);
    options.seed = args.model.seed;
    options.verify = !args.no_verify;
    options.input = args.model.input.clone();
    options.paper = args.paper;
    options.plugin = args.plugin;
    options.style = args.preset.map(Preset::style).unwrap_or_default();
    options.style.ingest_batch = args.ingest_batch as usize;
    options.preset = args.preset;
    options.server_rate = args.server_rate;
    options.ledger.clone_from(&args.ledger);
    options.token = config.token;
    let stall_timeout = || options.stall_timeout.max(2 * config.deadline);
    options.stall_timeout = args.stall_timeout.unwrap_or_else(stall_timeout);
    let report = runtime(2, 8)?.block_on(pipeline::run(&options))?;
    if args.json {
        let json = serde_json::to_string(&report)
            .map_err(|e| Error::new(ErrorKind::Unexpected, "report", "not JSON").source(e))?;
        say(json)?;
    } else {
        say(&report)?;
    }
    let wrong = report.verdict();
    for problem in &wrong {
        note(format_args!("featurestore: wrong result: {problem}"));
    }
    Ok(if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(3) })
}

/// Exit code of a program whose reader has left, which SIGPIPE would have ended.
const BROKEN_PIPE: u8 = 128 + 13;

fn trainer(file: Option<&std::path::Path>, folder: PathBuf) -> Result<ExitCode> {
    let config = Config::from_settings(&layered(file)?)?;
    mooncake::prepare(config.transport, &config.mooncake)?;
    let trained = runtime(1, 4)?.block_on(pipeline::trainer::run(config, folder))?;
    Ok(if trained { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn capture_server(args: &ServerArgs) -> Result<ExitCode> {
    let starter = std::os::unix::process::parent_id();
    let mut problems = Problems::default();
    let settings = layered(args.config.as_deref()).and_then(|file| args.flags.over(file));
    if !args.exit_with_parent
        && let Ok(settings) = &settings
    {
        Flags::<OfServer>::tell_idle(settings); // who starts it for its own ends knows
    }
    let config = problems.note(settings.and_then(|s| ServerConfig::from_settings(&s)));
    args.model.tell_idle(false);
    let source = problems.note(match &args.model.input {
        Some(folder) => Folder::open(folder).map(Source::Folder),
        None => args.model.model().map(|model| Source::Synthetic { model, seed: args.model.seed }),
    });
    problems.settle("start capture server")?;
    let (Some(config), Some(source)) = (config, source) else {
        unreachable!("what is missing is a problem, and problems end this");
    };
    mooncake::prepare(config.transport, &config.mooncake)?;
    let fill = config.fill_threads;
    let fill = fill.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let runtime = runtime(2, fill)?;
    let served = runtime.block_on(async {
        let server = CaptureServer::bind(&config, source).await?;
        let end = end_of_life(args.exit_with_parent)?; // before anybody can know of this process
        let ready = serde_json::to_string(&server.ready_line())
            .map_err(|e| Error::new(ErrorKind::Unexpected, "report", "not JSON").source(e))?;
        say(ready)?;
        server.serve(end).await
    });
    if let Some(folder) = &args.run_folder {
        pipeline::remove_abandoned(folder, starter);
    }
    // A fill that hangs, as on a dead file system, must not keep the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    served.map(|()| ExitCode::SUCCESS)
}

fn show(file: Option<&std::path::Path>) -> Result<ExitCode> {
    let settings = layered(file)?;
    // A value that cannot be used is an error here already, not at the start of a server.
    let mut problems = Problems::default();
    problems.note(Config::from_settings(&settings));
    problems.note(ServerConfig::from_settings(&settings.clone().or_default("arena", "1MiB")?));
    problems.settle("configure")?;
    say(columns(settings.effective().map(|(key, value, source)| {
        let value = value.unwrap_or_else(|| "-".to_owned());
        [key.name.to_owned(), value, source.to_string(), key.help.to_owned()]
    })))?;
    Ok(ExitCode::SUCCESS)
}

/// Rows with their columns below each other, two blanks apart. The last one is as long as it is.
fn columns<const N: usize>(rows: impl Iterator<Item = [String; N]>) -> String {
    let rows: Vec<_> = rows.collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..N - 1).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &[String; N]| {
        let padded = row.iter().zip(&widths).map(|(text, &width)| format!("{text:<width$}  "));
        padded.collect::<String>() + &row[N - 1]
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}
