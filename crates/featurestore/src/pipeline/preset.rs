//! The published benchmark's two settings, and its rows.

use std::{fmt, str::FromStr};

use transport_core::{Error, ErrorKind, Result};

use crate::producer::{Batching, Routing};

/// How the parts of the main job work together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Style {
    /// Prompts of one request.
    pub lease: usize,
    /// Batches of prompts that are prepared ahead.
    pub prefetch: usize,
    /// Prompts of one batch.
    pub ingest_batch: usize,
    /// How requests are spread.
    pub routing: Routing,
    /// Which prompts go together; none keeps their order.
    pub batching: Option<Batching>,
    /// Whether samples are read only once captures rest, one after the other, and freed one by one.
    pub serial: bool,
}

impl Default for Style {
    fn default() -> Self {
        Self {
            lease: 1,
            prefetch: 0,
            ingest_batch: 128,
            routing: Routing::MostRoom,
            batching: None,
            serial: false,
        }
    }
}

/// The settings of the published benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Preset {
    /// Lease 1, no prefetch, shared routing, shuffled, serial materialization.
    Controlled,
    /// Lease 8, prefetch 4, least tokens, length bucketed, batch cleanup, overlap.
    Tuned,
}

impl Preset {
    /// What it stands for.
    pub fn style(self) -> Style {
        match self {
            Self::Controlled => Style {
                routing: Routing::Shared,
                batching: Some(Batching::Shuffle),
                serial: true,
                ..Style::default()
            },
            Self::Tuned => Style {
                lease: 8,
                prefetch: 4,
                routing: Routing::LeastTokens,
                batching: Some(Batching::LengthBucketed),
                ..Style::default()
            },
        }
    }

    /// The published row: capture, materialization and pipeline in samples a second, elapsed and
    /// cleanup in seconds.
    pub(super) fn published(self) -> [f64; 5] {
        match self {
            Self::Controlled => [64.3044, 120.3692, 41.4005, 12.3676, 0.6383],
            Self::Tuned => [67.2924, 120.6860, 61.9381, 8.2663, 0.0056],
        }
    }
}

/// Where the published rows were measured.
pub(super) const PUBLISHED_ON: &str = "published: 8 x H200 with two TP4 replicas of a 27B model, \
     read over RDMA by one H200 of another host, 512 samples";

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Controlled => "controlled",
            Self::Tuned => "tuned",
        })
    }
}

impl FromStr for Preset {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.trim().to_ascii_lowercase().as_str() {
            "controlled" => Ok(Self::Controlled),
            "tuned" => Ok(Self::Tuned),
            other => Err(Error::new(ErrorKind::ConfigInvalid, "configure", "unknown preset")
                .with("found", format_args!("{text:?}"))
                .remedy(crate::config::suggestion(other, ["controlled", "tuned"].into_iter()))),
        }
    }
}

/// The order in which prompts are sent: batches of `ingest` prompts, each arranged by itself. Those
/// of similar length are put together later, among the prompts that wait.
pub(super) fn order(
    count: usize,
    ingest: usize,
    batching: Option<Batching>,
    seed: u64,
) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    if batching == Some(Batching::Shuffle) {
        for batch in order.chunks_mut(ingest.max(1)) {
            batch.sort_by_key(|&index| {
                xxhash_rust::xxh3::xxh3_64_with_seed(&index.to_le_bytes(), seed)
            });
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_prompt_is_sent_once_in_any_order() {
        for batching in [None, Some(Batching::Shuffle), Some(Batching::LengthBucketed)] {
            let order = order(300, 128, batching, 7);
            assert_eq!(order.is_sorted(), batching != Some(Batching::Shuffle));
            for (i, batch) in order.chunks(128).enumerate() {
                assert!(batch.iter().all(|index| index / 128 == i), "batches stay apart");
            }
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..300).collect::<Vec<_>>());
        }
        assert_eq!(Preset::Tuned.style().lease, 8);
        assert!("tunde".parse::<Preset>().unwrap_err().to_string().contains("did you mean tuned"));
    }
}
