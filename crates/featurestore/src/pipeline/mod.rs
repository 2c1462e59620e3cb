//! The main job: capture servers, a trainer, and the producer that drives prompts between them.
//!
//! This process is the producer. It starts the servers and the trainer as processes of the same
//! binary, sends prompts to the servers over HTTP, hands the results to the trainer, and ends
//! everything that it started, also when something fails.

mod children;
mod messages;
mod producer;
mod progress;
mod report;
pub mod trainer;

use std::{path::PathBuf, sync::Arc};

use transport_core::{ByteSize, Error, ErrorKind, Result};

pub use report::{PeakRss, Report, ServerReport};

use crate::{
    config::TransportChoice,
    input::Folder,
    workload::{self, Model, Prompt},
};
use children::{Server, Trainer};
use messages::Start;
use producer::Producer;
use progress::Progress;

/// What the main job moves, and how.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Synthetic samples to move; ignored with `input`.
    pub samples: usize,
    /// Capture servers to start.
    pub servers: usize,
    /// Arena of each server.
    pub arena: ByteSize,
    /// How the trainer reads.
    pub transport: TransportChoice,
    /// Whether an unavailable transport is an error.
    pub strict: bool,
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
}

impl Default for Options {
    fn default() -> Self {
        Self {
            samples: 64,
            servers: 2,
            arena: ByteSize::mib(2048),
            transport: TransportChoice::Auto,
            strict: false,
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
        }
    }
}

/// One sample of the run, before it is captured.
#[derive(Debug)]
pub(crate) struct Planned {
    pub(crate) prompt: Prompt,
    /// Room that its tensors take in an arena.
    pub(crate) arena_bytes: u64,
    pub(crate) sha256: Option<std::collections::BTreeMap<String, String>>,
}

/// Runs the job to its end and reports. Mismatches, leaks and shortfalls are in the report; see
/// [`Report::verdict`].
pub async fn run(options: &Options) -> Result<Report> {
    let folder = options.input.as_deref().map(Folder::open).transpose()?;
    let plan = plan(options, folder.as_ref())?;
    check_room(options, &plan)?;
    let largest = plan.iter().map(|p| p.arena_bytes).max().unwrap_or(0);
    // One sample is read while another waits and a third is compared; one more against fragments.
    let pool = options.pool.map_or((4 * largest).max(1 << 20), ByteSize::get);

    let mut servers = Vec::new();
    for index in 0..options.servers {
        servers.push(Server::start(options, index).await?);
    }
    let start = Start {
        transport: options.transport.to_string(),
        strict: options.strict,
        peers: servers.iter().map(|s| s.control.clone()).collect(),
        pool_bytes: pool,
        quantum: options.quantum,
        verify: options.verify,
    };
    let trainer = Trainer::start(&start).await?;
    let progress = Progress::new(options, &plan, &trainer);
    let outcome = Producer::new(options, &mut servers, trainer, plan, &progress).run().await;
    progress.finish();
    let run = outcome?;
    let mut reports = Vec::new();
    for server in &servers {
        reports.push(server.health().await?);
    }
    for server in servers {
        server.stop().await?;
    }
    Ok(Report::new(options, run, reports))
}

fn plan(options: &Options, folder: Option<&Folder>) -> Result<Arc<[Planned]>> {
    let run_id = format!("pipeline-{}", options.seed);
    if let Some(folder) = folder {
        let planned = |name: &str| -> Result<Planned> {
            let sample = folder.sample(name)?;
            let id = transport_core::SampleId::new(format!("{run_id}:{name}"))?;
            let sums = sample.sha256();
            Ok(Planned {
                prompt: sample.prompt(id)?,
                arena_bytes: sample.tensors().map(|(_, meta)| room(meta.nbytes())).sum(),
                sha256: (!sums.is_empty()).then(|| sums.into_iter().collect()),
            })
        };
        return folder.names().map(planned).collect();
    }
    let lengths = if options.paper {
        workload::paper_lengths(options.seed)
    } else {
        workload::lengths(options.samples, options.max_length, options.seed)
    };
    let planned = |(index, &tokens): (usize, &u32)| -> Result<Planned> {
        let length = u64::from(tokens);
        let tensors = [
            options.model.aux_meta(length)?.nbytes(),
            options.model.last_hidden_meta(length)?.nbytes(),
            8 * length,
            8 * length,
        ];
        Ok(Planned {
            prompt: workload::prompt(&run_id, index, tokens, options.seed)?,
            arena_bytes: tensors.into_iter().map(room).sum(),
            sha256: None,
        })
    };
    lengths.iter().enumerate().map(planned).collect()
}

/// Room that a tensor takes in an arena, which hands out multiples of 512 bytes.
fn room(nbytes: u64) -> u64 {
    nbytes.next_multiple_of(512)
}

/// Refuses a run that could only ever wait: a sample larger than an arena, or a quantum that the
/// arenas cannot hold together with the next sample.
fn check_room(options: &Options, plan: &[Planned]) -> Result<()> {
    let refuse = |why: &'static str| Error::new(ErrorKind::ConfigInvalid, "plan pipeline", why);
    if plan.is_empty() || options.servers == 0 || options.quantum == 0 || options.concurrency == 0 {
        return Err(refuse("samples, servers, quantum and concurrency must be at least 1"));
    }
    let arena = options.arena.get();
    if let Some(large) = plan.iter().find(|p| p.arena_bytes > arena) {
        return Err(refuse("a sample is larger than an arena")
            .with("sample_id", &large.prompt.sample_id)
            .with("sample_bytes", large.arena_bytes)
            .with("arena_bytes", arena)
            .remedy("give a larger --arena or a smaller --max-length"));
    }
    let sizes: Vec<u64> = plan.iter().map(|p| p.arena_bytes).collect();
    let needed =
        sizes.windows(options.quantum.min(sizes.len())).map(|w| w.iter().sum::<u64>()).max();
    let needed = needed.unwrap_or(0);
    let room = arena.saturating_mul(options.servers as u64);
    if needed > room {
        return Err(refuse(
            "a quantum does not fit into the arenas, so nothing would ever be freed",
        )
        .with("quantum", options.quantum)
        .with("quantum_bytes", needed)
        .with("all_arenas_bytes", room)
        .remedy("give a larger --arena, more --servers, or a smaller --quantum"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_load_is_planned_to_the_byte() {
        let options = Options { paper: true, ..Options::default() };
        let plan = plan(&options, None).unwrap();
        let tokens: usize = plan.iter().map(|p| p.prompt.input_ids.len()).sum();
        assert_eq!((plan.len(), tokens as u64), (512, workload::PAPER_TOKENS));
        check_room(&options, &plan).unwrap();
    }

    #[test]
    fn runs_that_could_only_wait_are_refused_with_the_numbers() {
        for (options, part) in [
            (Options { arena: ByteSize::mib(1), ..Options::default() }, "larger than an arena"),
            (Options { quantum: 64, arena: ByteSize::mib(600), ..Options::default() }, "quantum"),
            (Options { servers: 0, ..Options::default() }, "at least 1"),
        ] {
            let plan = plan(&options, None).unwrap();
            let error = check_room(&options, &plan).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
