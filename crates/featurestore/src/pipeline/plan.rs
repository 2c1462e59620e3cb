//! What a run moves: the size of every sample now, its prompt when it is sent.

use std::sync::Arc;

use transport_core::{Error, ErrorKind, Result, SampleId};

use super::Options;
use crate::{
    input::Folder,
    workload::{self, Model, Prompt},
};

/// Servers that one run starts at most: each is a process with an arena.
const MAX_SERVERS: usize = 256;

/// The samples of a run. Cheap to clone, and small: prompts are made or read on demand.
#[derive(Clone, Debug)]
pub(super) struct Plan(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    run_id: String,
    prompts: Prompts,
    sizes: Vec<Size>,
}

/// Synthetic samples of a run that does not say how many.
const SYNTHETIC: usize = 64;

#[derive(Debug)]
enum Prompts {
    Synthetic { seed: u64 },
    Folder { folder: Folder, names: Vec<String> },
}

#[derive(Clone, Copy, Debug)]
struct Size {
    tokens: u64,
    arena_bytes: u64,
}

impl Plan {
    /// Decides what is moved. Only headers of input files are read.
    pub(super) fn new(options: &Options) -> Result<Self> {
        let run_id = format!("pipeline-{}", options.seed);
        let (prompts, sizes) = match &options.input {
            Some(path) => from_folder(Folder::open(path)?, options.samples)?,
            None => {
                let lengths = if options.paper {
                    workload::paper_lengths(options.seed)
                } else {
                    let samples = options.samples.unwrap_or(SYNTHETIC);
                    workload::lengths(samples, options.max_length, options.seed)
                };
                let size = |&tokens: &u32| synthetic_size(&options.model, u64::from(tokens));
                let sizes = lengths.iter().map(size).collect::<Result<_>>()?;
                (Prompts::Synthetic { seed: options.seed }, sizes)
            }
        };
        Ok(Self(Arc::new(Inner { run_id, prompts, sizes })))
    }

    /// Number of samples.
    pub(super) fn len(&self) -> usize {
        self.0.sizes.len()
    }

    /// Tokens of all samples together.
    pub(super) fn tokens(&self) -> u64 {
        self.0.sizes.iter().map(|size| size.tokens).sum()
    }

    /// Room that all samples together would take in arenas.
    pub(super) fn bytes(&self) -> u64 {
        self.0.sizes.iter().fold(0, |all, size| all.saturating_add(size.arena_bytes))
    }

    /// Room that the tensors of one sample take in an arena.
    pub(super) fn arena_bytes(&self, index: usize) -> u64 {
        self.0.sizes[index].arena_bytes
    }

    /// Room of the largest sample.
    pub(super) fn largest(&self) -> u64 {
        self.0.sizes.iter().map(|size| size.arena_bytes).max().unwrap_or(0)
    }

    /// Makes or reads one prompt, `checked` against the manifest of the input.
    pub(super) fn prompt(&self, index: usize, checked: bool) -> Result<Prompt> {
        let Inner { run_id, prompts, sizes } = &*self.0;
        match prompts {
            Prompts::Synthetic { seed } => {
                workload::prompt(run_id, index, sizes[index].tokens as u32, *seed)
            }
            Prompts::Folder { folder, names } => {
                let id = SampleId::new(format!("{run_id}:{}", names[index]))?;
                folder.sample(&names[index])?.prompt(id, checked)
            }
        }
    }

    /// Number of a sample in the run.
    pub(super) fn index_of(&self, id: &SampleId) -> Option<usize> {
        let name = id.as_str().strip_prefix(&*self.0.run_id)?.strip_prefix(':')?;
        match &self.0.prompts {
            Prompts::Synthetic { .. } => name.strip_prefix("task-")?.parse().ok(),
            Prompts::Folder { names, .. } => names.iter().position(|known| known == name),
        }
    }

    /// Name of the run, which every sample's id begins with.
    pub(super) fn run_id(&self) -> &str {
        &self.0.run_id
    }

    /// Refuses a run that could only ever wait: a sample that is larger than an arena or the pool,
    /// or one that does not fit beside the samples whose quantum is not full yet.
    pub(super) fn check(&self, options: &Options) -> Result<()> {
        let refuse = |why: &'static str| Error::new(ErrorKind::ConfigInvalid, "plan pipeline", why);
        for (name, count) in [
            ("samples", self.len()),
            ("servers", options.servers),
            ("quantum", options.quantum),
            ("concurrency", options.concurrency),
        ] {
            if count == 0 {
                return Err(refuse("must be at least 1").with("setting", name));
            }
        }
        if options.servers > MAX_SERVERS {
            return Err(refuse("so many servers are no use on one machine")
                .with("servers", options.servers)
                .with("most", MAX_SERVERS));
        }
        let (arena, largest) = (options.arena.get(), self.largest());
        if largest > arena {
            return Err(refuse("a sample is larger than an arena")
                .with("sample_bytes", largest)
                .with("arena_bytes", arena)
                .remedy("give a larger --arena or a smaller --max-length"));
        }
        if let Some(pool) = options.pool.filter(|pool| largest > pool.get()) {
            return Err(refuse("a sample is larger than the receive pool")
                .with("sample_bytes", largest)
                .with("pool_bytes", pool.get())
                .remedy("give a larger --pool or a smaller --max-length"));
        }
        self.check_quanta(options)
    }

    /// Places the samples one after the other as the run does, and gives room back only when a
    /// whole quantum is through.
    fn check_quanta(&self, options: &Options) -> Result<()> {
        let mut free = vec![options.arena.get(); options.servers];
        let mut unacknowledged = Vec::new(); // server and bytes of each, oldest first
        for (index, size) in self.0.sizes.iter().enumerate() {
            let mut roomiest = roomiest(&free);
            if free[roomiest] < size.arena_bytes {
                let through = unacknowledged.len() / options.quantum * options.quantum;
                for (server, bytes) in unacknowledged.drain(..through) {
                    free[server] += bytes;
                }
                roomiest = self::roomiest(&free);
            }
            if free[roomiest] < size.arena_bytes {
                let why = "a quantum does not fit into the arenas, so nothing would ever be freed";
                return Err(Error::new(ErrorKind::ConfigInvalid, "plan pipeline", why)
                    .with("sample", index)
                    .with("sample_bytes", size.arena_bytes)
                    .with("quantum", options.quantum)
                    .with("unacknowledged_samples", unacknowledged.len())
                    .with("unacknowledged_bytes", unacknowledged.iter().map(|u| u.1).sum::<u64>())
                    .with("arenas", format_args!("{} of {}", options.servers, options.arena))
                    .remedy("give a larger --arena, more --servers, or a smaller --quantum"));
            }
            free[roomiest] -= size.arena_bytes;
            unacknowledged.push((roomiest, size.arena_bytes));
        }
        Ok(())
    }
}

/// The server with the most free bytes.
fn roomiest(free: &[u64]) -> usize {
    (0..free.len()).max_by_key(|&server| free[server]).expect("at least one server")
}

fn from_folder(folder: Folder, most: Option<usize>) -> Result<(Prompts, Vec<Size>)> {
    let names = folder.names().take(most.unwrap_or(usize::MAX));
    let names: Vec<String> = names.map(Into::into).collect();
    let size = |name: &String| {
        let sample = folder.sample(name)?;
        let arena_bytes = sample.tensors().map(|(_, meta)| room(meta.nbytes())).sum();
        Ok(Size { tokens: sample.tokens()?, arena_bytes })
    };
    let sizes = names.iter().map(size).collect::<Result<_>>()?;
    Ok((Prompts::Folder { folder, names }, sizes))
}

fn synthetic_size(model: &Model, tokens: u64) -> Result<Size> {
    let tensors = [
        model.aux_meta(tokens)?.nbytes(),
        model.last_hidden_meta(tokens)?.nbytes(),
        8 * tokens, // input_ids
        8 * tokens, // loss_mask
    ];
    Ok(Size { tokens, arena_bytes: tensors.into_iter().map(room).sum() })
}

/// Room that a tensor takes in an arena, which hands out multiples of 512 bytes.
fn room(nbytes: u64) -> u64 {
    nbytes.next_multiple_of(512)
}

#[cfg(test)]
mod tests {
    use transport_core::ByteSize;

    use super::*;

    fn checked(options: &Options) -> Result<()> {
        Plan::new(options)?.check(options)
    }

    #[test]
    fn the_published_load_is_planned_to_the_byte() {
        let options = Options { paper: true, ..Options::default() };
        let plan = Plan::new(&options).unwrap();
        assert_eq!((plan.len(), plan.tokens()), (512, workload::PAPER_TOKENS));
        plan.check(&options).unwrap();
        let prompt = plan.prompt(511, true).unwrap();
        assert_eq!(prompt.input_ids.len() as u64, plan.0.sizes[511].tokens);
    }

    #[test]
    fn runs_that_could_only_wait_are_refused_with_the_numbers() {
        let options =
            |arena, quantum| Options { arena: ByteSize::mib(arena), quantum, ..Options::default() };
        for (options, part) in [
            (options(1, 16), "larger than an arena"),
            (options(600, 64), "unacknowledged_samples"),
            (Options { servers: 0, ..Options::default() }, "at least 1 (setting=servers)"),
            (Options { pool: Some(ByteSize::mib(1)), ..Options::default() }, "receive pool"),
        ] {
            let error = checked(&options).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn samples_that_fit_only_in_arenas_of_their_own_are_no_deadlock() {
        // Two samples of about 9 of 16 MiB: one an arena, both in a quantum.
        let options = Options {
            samples: Some(6),
            max_length: 8192,
            model: Model { hidden: 64, taps: vec![1] },
            quantum: 2,
            ..Options::default()
        };
        let plan = Plan::new(&options).unwrap();
        let fits = Options { arena: ByteSize::new(plan.largest()).unwrap(), ..options.clone() };
        plan.check(&fits).unwrap();
        let alone = Options { servers: 1, ..fits };
        assert!(plan.check(&alone).is_err(), "the second never finds room");
    }
}
