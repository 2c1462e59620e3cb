//! The main job: capture servers, a trainer, and the producer that drives prompts between them.
//!
//! This process is the producer. It starts the servers and the trainer as processes of the same
//! binary, sends prompts to the servers over HTTP, announces what they capture in a channel that the
//! trainer reads, and ends everything that it started, also when something fails. Producer and
//! trainer are the library's: [`crate::producer`], [`crate::consumer`], [`crate::ack`].

mod blame;
mod children;
mod folder;
#[cfg_attr(not(feature = "store"), path = "master/absent.rs")]
mod master;
mod messages;
mod plan;
mod preset;
mod producer;
mod progress;
mod report;
pub mod trainer;
mod verify;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use control_proto::Secret;
use transport_core::{ByteSize, Error, ErrorKind, Result};

pub use folder::remove_abandoned;
pub use preset::{Preset, Style};
pub use report::{LedgerReport, MooncakeReport, PeakRss, Report, ServerReport, TrainerWait};

use crate::{
    config::{MooncakeConfig, Receive, Settings, TransportChoice},
    ledger::{Ledger, LedgerOptions},
    process::Signals,
    workload::{self, Model},
};
use children::{Server, Trainer};
use folder::ControlFolder;
use master::Store;
use messages::Start;
use plan::Plan;
use progress::Progress;

/// What the main job moves, and how.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Samples to move, at most so many of the folder's with `input`. Default: 64 synthetic ones, all of
    /// a folder.
    pub samples: Option<usize>,
    /// Capture servers to start.
    pub servers: usize,
    /// Arena of each server.
    pub arena: ByteSize,
    /// File with settings for the servers and the trainer, below those of the environment.
    pub config: Option<PathBuf>,
    /// GPU of whatever is not given another one.
    pub device: u32,
    /// GPUs of the servers' arenas, in turn. If any are named, an arena in host memory is an error.
    pub server_devices: Vec<u32>,
    /// GPU of the trainer's pool. If it is named, a trainer that receives in host memory is an error.
    pub trainer_device: Option<u32>,
    /// How the trainer reads.
    pub transport: TransportChoice,
    /// Where the trainer receives.
    pub receive: Receive,
    /// Whether an unavailable transport is an error.
    pub strict: bool,
    /// Where Mooncake and its store are, for [`TransportChoice::Store`].
    pub mooncake: MooncakeConfig,
    /// Samples that are acknowledged together.
    pub quantum: usize,
    /// Capture requests in flight.
    pub concurrency: usize,
    /// Width and layers of the synthetic hidden states.
    pub model: Model,
    /// Longest synthetic prompt, in tokens.
    pub max_length: u32,
    /// Seed of everything synthetic.
    pub seed: u64,
    /// Whether every tensor is compared with a checksum made where it was filled.
    pub verify: bool,
    /// Folder of safetensors files to move instead.
    pub input: Option<PathBuf>,
    /// Whether to move the published benchmark's load.
    pub paper: bool,
    /// Receive pool of the trainer; sized from the samples if none.
    pub pool: Option<ByteSize>,
    /// Whether requests have the plugin form rather than the patch form.
    pub plugin: bool,
    /// Whether progress is shown.
    pub progress: bool,
    /// How the parts work together.
    pub style: Style,
    /// The published setting that `style` comes from; its row is printed beside.
    pub preset: Option<Preset>,
    /// Samples a second that all servers together capture on average at most; each takes the longer
    /// the more tokens it has.
    pub server_rate: Option<f64>,
    /// File in which the trainer records what is trained, kept after the run; a temporary one if
    /// none is given. It must be new.
    pub ledger: Option<PathBuf>,
    /// What control connections have to show.
    pub token: Option<Secret>,
    /// How long nothing may be captured, verified or acknowledged until the run is given up.
    pub stall_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            samples: None,
            servers: 2,
            arena: ByteSize::mib(2048),
            config: None,
            device: 0,
            server_devices: Vec::new(),
            trainer_device: None,
            transport: TransportChoice::Auto,
            receive: Receive::Auto,
            strict: false,
            mooncake: MooncakeConfig::from_settings(&Settings::new()).expect("valid defaults"),
            quantum: 16,
            concurrency: 64,
            model: Model::paper(),
            max_length: workload::PAPER_MAX_LENGTH,
            seed: 42,
            verify: true,
            input: None,
            paper: false,
            pool: None,
            plugin: false,
            progress: true,
            style: Style::default(),
            preset: None,
            server_rate: None,
            ledger: None,
            token: None,
            stall_timeout: Duration::from_secs(120),
        }
    }
}

impl Options {
    /// The GPU of one server's arena.
    fn server_device(&self, index: usize) -> u32 {
        match self.server_devices.len() {
            0 => self.device,
            count => self.server_devices[index % count],
        }
    }

    /// What names GPUs that nothing would lie on, with arenas in host memory.
    fn idle_devices(&self) -> Option<&'static str> {
        let trainer = self.trainer_device.filter(|_| self.receive != Receive::Device);
        match (self.server_devices.is_empty(), trainer) {
            (false, _) => Some("--server-devices"),
            (true, Some(_)) => Some("--trainer-device"),
            (true, None) => None,
        }
    }
}

/// Runs the job to its end and reports. Mismatches, leaks and shortfalls are in the report; see
/// [`Report::verdict`].
pub async fn run(options: &Options) -> Result<Report> {
    let mut signals = Signals::listen()?;
    tokio::select! {
        outcome = job(options) => outcome,
        // Dropping the job ends every process that it has started.
        signal = signals.next() => Err(Error::new(
            ErrorKind::Closed,
            "run pipeline",
            format!("ended by {signal}, and with it everything that was started"),
        )),
    }
}

async fn job(options: &Options) -> Result<Report> {
    let plan = Plan::new(options)?;
    plan.check(options)?;
    check_built(options.transport, options.receive)?;
    if let Some(path) = &options.ledger {
        check_ledger(path, plan.run_id()).map_err(|e| e.with("ledger", path.display()))?;
    }
    folder::temporary()?; // before what needs it says so in other words
    folder::sweep();
    let store = Store::of(options).await?;
    let outcome = tokio::select! {
        outcome = job_over(options, plan, &store) => outcome,
        dead = store.died() => Err(dead),
    };
    match outcome {
        Ok(report) => store.stop().await.map(|()| report),
        Err(error) => Err(store.explain(error).await),
    }
}

/// Refuses what servers or trainer could only refuse each.
fn check_built(transport: TransportChoice, receive: Receive) -> Result<()> {
    receive.check(transport)?;
    let mooncake = cfg!(any(feature = "mooncake", feature = "mooncake-python"));
    let remedy = match transport {
        TransportChoice::Store | TransportChoice::Mooncake if !mooncake => {
            "build with --features mooncake-python for Mooncake's wheel, or mooncake for a C library"
        }
        of_devices if of_devices.is_of_devices() && !cfg!(feature = "cuda") => {
            "build with --features cuda"
        }
        _ if receive == Receive::Device && !cfg!(feature = "cuda") => {
            let why = "built without receiving on devices";
            return Err(Error::new(ErrorKind::Unsupported, "run pipeline", why)
                .with("setting", "receive")
                .with("found", receive)
                .remedy("build with --features cuda, or receive in host memory: --receive host"));
        }
        _ => return Ok(()),
    };
    let error = Error::new(ErrorKind::Unsupported, "run pipeline", "built without this transport");
    Err(error.with("transport", transport).remedy(remedy))
}

/// Refuses a ledger that the trainer could not begin, before anything is started.
fn check_ledger(path: &Path, run: &str) -> Result<()> {
    let refuse = |why: &'static str| {
        let error = Error::new(ErrorKind::ConfigInvalid, "check ledger", why);
        error.remedy("give a new file; one of an earlier run stays what it is")
    };
    let found = std::fs::metadata(path);
    if found.as_ref().is_ok_and(|file| file.len() == 0) {
        return Err(refuse("the file is empty, and no ledger"));
    }
    let ledger = Ledger::open(path, run, LedgerOptions::default())?;
    if !ledger.is_empty() {
        return Err(refuse("a new run cannot reuse a ledger that has recorded something"));
    }
    drop(ledger);
    if found.is_err() {
        // The trainer makes it again; a run that fails before leaves nothing.
        std::fs::remove_file(path).map_err(|e| Error::io("check ledger", e))?;
    }
    Ok(())
}

async fn job_over(options: &Options, plan: Plan, store: &Store) -> Result<Report> {
    // Two samples are read while another is compared; one more against fragments.
    let pool_of = |samples: u64| {
        options.pool.map_or(samples.saturating_mul(plan.largest()).max(1 << 20), ByteSize::get)
    };

    let mut servers = Vec::new();
    let folder = ControlFolder::make()?; // before any process is told its name
    for index in 0..options.servers {
        servers.push(Server::start(options, &store.config, index, pool_of(4), &plan, &folder)?);
    }
    for server in &mut servers {
        server.ready().await?; // they get ready side by side
    }
    let are_on_device = servers.iter().all(|server| server.is_on_device);
    if let Some(flag) = options.idle_devices().filter(|_| !are_on_device) {
        return Err(Error::new(
            ErrorKind::ConfigInvalid,
            "start pipeline",
            "GPUs are named, and the servers' arenas are in host memory",
        )
        .with("flag", flag)
        .with("transport", options.transport)
        .remedy(
            "use --transport nvlink_intra, which says what it lacks here; or leave out \
             --server-devices, and --trainer-device unless with --receive device",
        ));
    }
    // From device to device more are read together; see the trainer.
    let pool = pool_of(if are_on_device { 8 } else { 4 });
    let absolute =
        |path: &PathBuf| std::path::absolute(path).map_err(|e| Error::io("find file", e));
    let ledger = match &options.ledger {
        Some(path) => absolute(path)?,
        None => folder.path().join("ledger.db"),
    };
    let start = Start {
        strict: options.strict,
        peers: servers.iter().filter_map(|s| s.control.clone()).collect(),
        pool_bytes: pool,
        quantum: options.quantum,
        verify: options.verify,
        serial: options.style.serial,
        run: plan.run_id().to_owned(),
        folder: folder.path().to_owned(),
        ledger,
        input: options.input.as_ref().map(absolute).transpose()?,
    };
    let started = tokio::select! {
        started = Trainer::start(options, &store.config, &start, &folder) => started,
        dead = blame::any_death(&mut servers) => return Err(dead),
    };
    let trainer = match started {
        Ok(trainer) => trainer,
        Err(error) => return Err(blame::of(error, &mut servers, None).await),
    };
    let progress = Arc::new(Progress::new(options, plan.len(), &trainer));
    let outcome =
        producer::run(options, &mut servers, trainer, &plan, folder.path(), &progress).await;
    progress.finish();
    let run = outcome?;
    let mut reports = Vec::new();
    for server in &servers {
        reports.push(server.health().await?);
    }
    let mooncake = store.report().await?; // while the servers' memory is in the store
    drop(folder); // before the servers end, which look whether it is left
    for server in servers {
        server.stop().await?;
    }
    Ok(Report::new(options, run, reports, mooncake))
}
