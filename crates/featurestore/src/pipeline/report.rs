//! What a run of the main job came to.

use std::fmt;

use serde::{Deserialize, Serialize};
use transport_core::ByteSize;

use super::{Options, Preset, preset::PUBLISHED_ON, producer::Run};

/// Result of a run; `--json` prints it.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// Samples moved.
    pub samples: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Bytes of their tensors.
    pub bytes: u64,
    /// Bytes compared with a checksum made where they were filled.
    pub verified_bytes: u64,
    /// Tensors that differ.
    pub mismatches: u64,
    /// The first few that differ.
    pub differing: Vec<String>,
    /// Transport that moved them.
    pub transport: String,
    /// What was considered, and why this transport.
    pub transport_reasons: Vec<String>,
    /// Tensor payload that passed through the trainer's host memory.
    pub host_payload_bytes: u64,
    /// From the first request to the last capture.
    pub capture_elapsed_s: f64,
    /// Time during which the trainer was fetching; waits are not in it.
    pub materialize_active_s: f64,
    /// From the first request to the last sample read and compared.
    pub pipeline_elapsed_s: f64,
    /// Time that the trainer spent in acknowledgements, all samples together.
    pub cleanup_elapsed_s: f64,
    /// `samples / capture_elapsed_s`.
    pub capture_samples_per_s: f64,
    /// `samples / materialize_active_s`.
    pub materialize_samples_per_s: f64,
    /// `samples / pipeline_elapsed_s`.
    pub pipeline_samples_per_s: f64,
    /// Samples whose release the servers confirmed.
    pub released_samples: u64,
    /// Capture requests that were sent again.
    pub retries: u64,
    /// What each server measured at the end.
    pub servers: Vec<ServerReport>,
    /// Largest resident sets.
    pub peak_rss_bytes: PeakRss,
    /// Published setting that the run took.
    pub preset: Option<Preset>,
    /// Samples a second that all servers together captured at most.
    pub server_rate: Option<f64>,
    #[serde(skip)]
    expected: u64,
    #[serde(skip)]
    verify: bool,
}

/// One server at the end of a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
#[allow(missing_docs)] // the fields are those of `transport_core::Health`
pub struct ServerReport {
    pub arena_bytes: u64,
    pub arena_free_bytes: u64,
    pub arena_largest_free: u64,
    pub resident_samples: u64,
    pub reserved_bytes: u64,
    pub published_samples: u64,
    pub released_samples: u64,
    pub duplicate_frees: u64,
    pub stale_frees: u64,
    pub lease_expired_samples: u64,
    pub host_payload_bytes: u64,
    pub protocol_errors: u64,
    pub peak_rss_bytes: u64,
}

/// Largest resident set of any server, and of the trainer.
#[derive(Clone, Copy, Debug, Serialize)]
#[non_exhaustive]
#[allow(missing_docs)]
pub struct PeakRss {
    pub server: u64,
    pub trainer: u64,
}

impl Report {
    pub(super) fn new(options: &Options, run: Run, servers: Vec<ServerReport>) -> Self {
        let totals = run.totals;
        let rate = |seconds: f64| {
            if seconds > 0.0 { totals.samples as f64 / seconds } else { 0.0 }
        };
        let capture = run.capture_elapsed.as_secs_f64();
        let pipeline = run.pipeline_elapsed.as_secs_f64();
        let server = servers.iter().map(|s| s.peak_rss_bytes).max().unwrap_or(0);
        Self {
            samples: totals.samples,
            tokens: run.tokens,
            bytes: totals.bytes,
            verified_bytes: totals.verified_bytes,
            mismatches: totals.mismatches,
            differing: totals.differing,
            transport: run.transport,
            transport_reasons: run.reasons,
            host_payload_bytes: totals.host_payload_bytes,
            capture_elapsed_s: capture,
            materialize_active_s: totals.materialize_active_s,
            pipeline_elapsed_s: pipeline,
            cleanup_elapsed_s: totals.cleanup_s,
            capture_samples_per_s: rate(capture),
            materialize_samples_per_s: rate(totals.materialize_active_s),
            pipeline_samples_per_s: rate(pipeline),
            released_samples: totals.released.released,
            retries: run.retries,
            servers,
            peak_rss_bytes: PeakRss { server, trainer: totals.peak_rss_bytes },
            preset: options.preset,
            server_rate: options.server_rate,
            expected: run.samples as u64,
            verify: options.verify,
        }
    }

    /// Everything that is wrong with the run; empty if nothing is.
    pub fn verdict(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut check = |holds: bool, what: String| {
            if !holds {
                wrong.push(what);
            }
        };
        check(
            self.samples == self.expected,
            format!("{} of {} samples arrived", self.samples, self.expected),
        );
        check(
            self.mismatches == 0,
            format!("{} tensors differ, first {}", self.mismatches, self.differing.join(", ")),
        );
        check(
            !self.verify || self.verified_bytes == self.bytes,
            format!("{} of {} bytes were compared", self.verified_bytes, self.bytes),
        );
        check(
            self.released_samples == self.samples,
            format!("{} of {} samples were released", self.released_samples, self.samples),
        );
        for (i, s) in self.servers.iter().enumerate() {
            check(
                s.published_samples == s.released_samples && s.resident_samples == 0,
                format!(
                    "server {i} published {} samples and released {}",
                    s.published_samples, s.released_samples
                ),
            );
            check(
                s.arena_free_bytes == s.arena_bytes && s.arena_largest_free == s.arena_bytes,
                format!(
                    "the arena of server {i} is not one free range: {} free, largest {}, of {}",
                    s.arena_free_bytes, s.arena_largest_free, s.arena_bytes
                ),
            );
            check(
                s.reserved_bytes == 0,
                format!("server {i} has {} bytes reserved", s.reserved_bytes),
            );
        }
        wrong
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = |bytes: u64| {
            ByteSize::new(bytes).map_or_else(|| bytes.to_string(), |size| format!("{size:#}"))
        };
        let gb_per_s = |seconds: f64| {
            if seconds > 0.0 { self.bytes as f64 / 1e9 / seconds } else { 0.0 }
        };
        writeln!(f, "transport      {}", self.transport)?;
        writeln!(
            f,
            "moved          {} samples, {} tokens, {} bytes ({})",
            self.samples,
            self.tokens,
            self.bytes,
            size(self.bytes)
        )?;
        writeln!(
            f,
            "verified       {} bytes, {} tensors differ",
            self.verified_bytes, self.mismatches
        )?;
        for (name, seconds, rate) in [
            ("capture", self.capture_elapsed_s, self.capture_samples_per_s),
            ("materialize", self.materialize_active_s, self.materialize_samples_per_s),
            ("pipeline", self.pipeline_elapsed_s, self.pipeline_samples_per_s),
        ] {
            writeln!(
                f,
                "{name:<14} {seconds:.3} s, {rate:.1} samples/s, {:.2} GB/s",
                gb_per_s(seconds)
            )?;
        }
        writeln!(f, "cleanup        {:.3} ms for all samples", self.cleanup_elapsed_s * 1e3)?;
        writeln!(f, "host payload   {} in the trainer", size(self.host_payload_bytes))?;
        for (i, s) in self.servers.iter().enumerate() {
            writeln!(
                f,
                "server {i}       published {}, released {}, free {} of {} (largest {}), \
                 duplicate frees {}, peak memory {}",
                s.published_samples,
                s.released_samples,
                size(s.arena_free_bytes),
                size(s.arena_bytes),
                size(s.arena_largest_free),
                s.duplicate_frees,
                size(s.peak_rss_bytes)
            )?;
        }
        write!(f, "trainer        peak memory {}", size(self.peak_rss_bytes.trainer))?;
        let Some(preset) = self.preset else { return Ok(()) };
        write!(f, "\n\n{preset:<14} {:>14} {:>14}", "this run", "published")?;
        let here = [
            self.capture_samples_per_s,
            self.materialize_samples_per_s,
            self.pipeline_samples_per_s,
            self.pipeline_elapsed_s,
            self.cleanup_elapsed_s,
        ];
        let names = ["capture /s", "materialize /s", "pipeline /s", "elapsed s", "cleanup s"];
        for ((name, here), published) in names.into_iter().zip(here).zip(preset.published()) {
            write!(f, "\n{name:<14} {here:>14.4} {published:>14.4}")?;
        }
        if let Some(rate) = self.server_rate {
            write!(f, "\nservers were limited to {rate} samples a second together")?;
        }
        write!(f, "\n{PUBLISHED_ON}")
    }
}
