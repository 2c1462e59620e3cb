//! The lines between the pipeline and its trainer: one JSON object each, over pipes. Samples are not
//! among them: those are announced in the run's channel.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

use super::report::{LedgerReport, TrainerWait};
use crate::choose::Choice;

/// The only line to the trainer. Its input ends with the pipeline.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Start {
    /// Whether an unavailable transport is an error.
    pub(super) strict: bool,
    /// Control addresses of the servers.
    pub(super) peers: Vec<String>,
    /// Size of the receive pool, if the transport needs one.
    pub(super) pool_bytes: u64,
    /// Samples an optimizer step.
    pub(super) quantum: usize,
    /// Whether tensors are compared with their checksums.
    pub(super) verify: bool,
    /// Whether samples are read one after the other, and freed one by one.
    pub(super) serial: bool,
    /// Name of the run.
    pub(super) run: String,
    /// Folder of the channel; temporary.
    pub(super) folder: PathBuf,
    /// File of the ledger.
    pub(super) ledger: PathBuf,
    /// Folder of the input, whose manifest may know what tensors must be.
    pub(super) input: Option<PathBuf>,
}

/// What a sample's tensors are compared with.
#[derive(Debug)]
pub(super) struct Job {
    /// `xxh3:…` by tensor, made where the tensor was filled.
    pub(super) checksums: Option<BTreeMap<String, String>>,
    /// sha256 by tensor, from the input's manifest.
    pub(super) sha256: Option<BTreeMap<String, String>>,
}

/// Lines from the trainer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Event {
    /// It has chosen a transport and reads samples.
    Ready {
        /// Client id, to hold samples for.
        client: String,
        /// What was considered, and why this transport.
        choice: Choice,
        /// Whether samples are seen where the server keeps them; copied otherwise.
        views: bool,
    },
    /// A sample is read and compared.
    Verified {
        /// Its bytes.
        bytes: u64,
    },
    /// Samples are durably acknowledged, and their memory is free again.
    Acked {
        /// How many.
        samples: usize,
    },
    /// Everything is done; the trainer ends.
    Done(Box<Totals>),
    /// The trainer gives up.
    Failed {
        /// Why.
        error: String,
    },
}

/// What the trainer counted.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Totals {
    /// Samples read.
    pub(super) samples: u64,
    /// Bytes read.
    pub(super) bytes: u64,
    /// Bytes compared with a checksum.
    pub(super) verified_bytes: u64,
    /// Tensors that differ.
    pub(super) mismatches: u64,
    /// The first few that differ, for people.
    pub(super) differing: Vec<String>,
    /// Time during which a fetch was under way.
    pub(super) materialize_active_s: f64,
    /// Time spent in freeing what was acknowledged.
    pub(super) cleanup_s: f64,
    /// Samples whose memory is free again.
    pub(super) released: u64,
    /// How long the training loop waited for samples.
    pub(super) wait: TrainerWait,
    /// What recording them durably has cost.
    pub(super) ledger: LedgerReport,
    /// Tensor payload that passed through the trainer's host memory.
    pub(super) host_payload_bytes: u64,
    /// Memory registrations that reading samples has cost.
    pub(super) registrations: u64,
    /// Largest resident set.
    pub(super) peak_rss_bytes: u64,
}
