//! The lines between the pipeline and its trainer: one JSON object each, over pipes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use transport_core::ReleaseReport;

use crate::choose::Choice;

/// First line to the trainer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Start {
    /// `auto`, `shm`, `tcp` or `store`.
    pub(super) transport: String,
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
    /// Whether samples are freed one by one.
    pub(super) serial: bool,
}

/// Further lines to the trainer: one captured sample each.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Job {
    /// Number of the sample in the run.
    pub(super) index: usize,
    /// The capture result as the server wrote it, arena form.
    pub(super) result: Box<serde_json::value::RawValue>,
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
        /// Which.
        index: usize,
    },
    /// Samples are acknowledged: their memory is free again.
    Acked {
        /// Which.
        indices: Vec<usize>,
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
    /// Time spent in acknowledgements.
    pub(super) cleanup_s: f64,
    /// Outcome of all acknowledgements.
    pub(super) released: Released,
    /// Tensor payload that passed through the trainer's host memory.
    pub(super) host_payload_bytes: u64,
    /// Memory registrations that reading samples has cost.
    pub(super) registrations: u64,
    /// Largest resident set.
    pub(super) peak_rss_bytes: u64,
}

/// [`ReleaseReport`] as it travels.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Released {
    pub(super) released: u64,
    pub(super) already_gone: u64,
    pub(super) stale: u64,
    pub(super) unconfirmed: u64,
    pub(super) deferred: u64,
}

impl From<ReleaseReport> for Released {
    fn from(report: ReleaseReport) -> Self {
        let ReleaseReport { released, already_gone, stale, unconfirmed, deferred, .. } = report;
        Self { released, already_gone, stale, unconfirmed, deferred }
    }
}
