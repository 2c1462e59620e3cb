//! What a run of the main job came to.

use std::{fmt, path::PathBuf};

use serde::{Deserialize, Serialize};
use transport_core::ByteSize;

use super::{Options, Preset, preset::PUBLISHED_ON, producer::Run};
use crate::{choose::Candidate, server::Paced};

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
    pub transport_reasons: Vec<Candidate>,
    /// Whether the trainer saw the samples where the server keeps them, without a copy.
    pub views: bool,
    /// Whether the trainer received them in memory of its GPU.
    pub on_device: bool,
    /// Tensor payload that passed through the trainer's host memory.
    pub host_payload_bytes: u64,
    /// From the first request to the last capture.
    pub capture_elapsed_s: f64,
    /// Time during which the trainer was fetching; waits are not in it.
    pub materialize_active_s: f64,
    /// From the first request to the last sample read and compared.
    pub pipeline_elapsed_s: f64,
    /// Time that the trainer spent in freeing what was acknowledged, all samples together.
    pub cleanup_elapsed_s: f64,
    /// How long the training loop waited for samples.
    pub trainer_wait: TrainerWait,
    /// The durable record of what was trained.
    pub ledger: LedgerReport,
    /// `samples / capture_elapsed_s`.
    pub capture_samples_per_s: f64,
    /// `samples / materialize_active_s`.
    pub materialize_samples_per_s: f64,
    /// `samples / pipeline_elapsed_s`.
    pub pipeline_samples_per_s: f64,
    /// Samples whose release the servers confirmed.
    pub released_samples: u64,
    /// Memory registrations of the trainer after it was ready, and of the servers after they
    /// were: none, because registered memory is pooled.
    pub registrations_while_running: u64,
    /// What the store's master counted after the last release; none without a store, or where its
    /// metrics are is not known.
    pub mooncake: Option<MooncakeReport>,
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

/// How long a training loop waited, with several samples read ahead.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TrainerWait {
    /// Median wait for a sample that had been announced, in microseconds.
    pub p50_us: u64,
    /// Of a hundred such waits, one is longer.
    pub p99_us: u64,
    /// The longest one.
    pub max_us: u64,
    /// Time in all during which nothing was announced that was not compared: captures were waited
    /// for.
    pub starved_s: f64,
    /// Time in all of comparing, on however many threads.
    pub compared_s: f64,
    /// Time in all of waiting until the step before was durable and freed.
    pub boundaries_s: f64,
}

/// What the ledger of a run has recorded.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LedgerReport {
    /// Where it is; none if it was temporary.
    pub path: Option<PathBuf>,
    /// Steps that are durable.
    pub steps: u64,
    /// Samples that are.
    pub acknowledged: u64,
    /// Transactions, each synced to the disk.
    pub transactions: u64,
    /// Time in them, on threads beside the training loop.
    pub elapsed_s: f64,
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
    pub registrations: u64,
    #[serde(skip_deserializing)]
    pub registrations_while_running: u64,
    pub protocol_errors: u64,
    pub peak_rss_bytes: u64,
    /// What it has done with its time, where its rate was limited.
    pub paced: Option<Paced>,
}

/// A store's master, as its own metrics have it.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct MooncakeReport {
    /// Its address.
    pub master: String,
    /// Whether this run started and ended it.
    pub managed: bool,
    /// Objects in the store (`master_key_count`).
    pub objects: u64,
    /// Bytes that they take (`master_allocated_bytes`).
    pub allocated_bytes: u64,
    /// Object memory of all members (`master_total_capacity_bytes`).
    pub capacity_bytes: u64,
    /// Members that it hears of (`master_active_clients`).
    pub clients: u64,
    /// Objects ever written, counted where their writing ended.
    pub written_objects: u64,
    /// Objects that it took away by itself.
    pub evicted_objects: u64,
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
    pub(super) fn new(
        options: &Options,
        run: Run,
        servers: Vec<ServerReport>,
        mooncake: Option<MooncakeReport>,
    ) -> Self {
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
            transport: run.choice.chosen,
            transport_reasons: run.choice.candidates,
            views: run.views,
            on_device: run.on_device,
            host_payload_bytes: totals.host_payload_bytes,
            capture_elapsed_s: capture,
            materialize_active_s: totals.materialize_active_s,
            pipeline_elapsed_s: pipeline,
            cleanup_elapsed_s: totals.cleanup_s,
            trainer_wait: totals.wait,
            ledger: LedgerReport { path: options.ledger.clone(), ..totals.ledger },
            capture_samples_per_s: rate(capture),
            materialize_samples_per_s: rate(totals.materialize_active_s),
            pipeline_samples_per_s: rate(pipeline),
            released_samples: totals.released,
            registrations_while_running: totals.registrations
                + servers.iter().map(|s| s.registrations_while_running).sum::<u64>(),
            mooncake,
            retries: run.produced.retries,
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
        check(
            self.ledger.acknowledged == self.samples,
            format!("{} of {} samples are durable", self.ledger.acknowledged, self.samples),
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
        check(
            self.registrations_while_running == 0,
            format!("memory was registered {} times for samples", self.registrations_while_running),
        );
        // A master of somebody else's may have objects of others.
        if let Some(master) = self.mooncake.as_ref().filter(|master| master.managed) {
            check(
                master.objects == 0 && master.allocated_bytes == 0,
                format!(
                    "{} objects of {} bytes are left in the store",
                    master.objects, master.allocated_bytes
                ),
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
        let place = if self.on_device { ", received on the device" } else { "" };
        writeln!(f, "transport      {}{place}", self.transport)?;
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
            write!(f, "{name:<14} {seconds:.3} s, {rate:.1} samples/s, ")?;
            if self.views && name == "materialize" {
                writeln!(f, "as views: no bytes are moved")?;
            } else {
                writeln!(f, "{:.2} GB/s", gb_per_s(seconds))?;
            }
        }
        let TrainerWait { p50_us, p99_us, starved_s, compared_s, boundaries_s, .. } =
            self.trainer_wait;
        writeln!(
            f,
            "trainer wait   p50 {p50_us} us, p99 {p99_us} us for what was captured; {starved_s:.3} s \
             for captures, {boundaries_s:.3} s at boundaries; comparing took {compared_s:.3} s"
        )?;
        writeln!(f, "cleanup        {:.3} ms for all samples", self.cleanup_elapsed_s * 1e3)?;
        writeln!(
            f,
            "ledger         {} samples in {} steps, {} transactions in {:.1} ms{}",
            self.ledger.acknowledged,
            self.ledger.steps,
            self.ledger.transactions,
            self.ledger.elapsed_s * 1e3,
            self.ledger
                .path
                .as_ref()
                .map_or_else(String::new, |path| format!(": {}", path.display()))
        )?;
        writeln!(f, "host payload   {} in the trainer", size(self.host_payload_bytes))?;
        for (i, s) in self.servers.iter().enumerate() {
            let released = s.released_samples;
            write!(f, "server {i}       published {}, released {released}, ", s.published_samples)?;
            if s.arena_bytes > 0 {
                write!(
                    f,
                    "free {} of {} (largest {}), ",
                    size(s.arena_free_bytes),
                    size(s.arena_bytes),
                    size(s.arena_largest_free)
                )?;
            }
            let (frees, peak) = (s.duplicate_frees, size(s.peak_rss_bytes));
            writeln!(f, "duplicate frees {frees}, peak memory {peak}")?;
            if let Some(Paced { busy_s, idle_s, late_s, .. }) = s.paced {
                writeln!(
                    f,
                    "               captures took {busy_s:.3} s by the rate, {idle_s:.3} s nothing was \
                     asked for, answers were late by {late_s:.3} s"
                )?;
            }
        }
        if let Some(m) = &self.mooncake {
            writeln!(
                f,
                "store          {}: {} objects written, {} left ({} of {}), {} evicted",
                m.master,
                m.written_objects,
                m.objects,
                size(m.allocated_bytes),
                size(m.capacity_bytes),
                m.evicted_objects
            )?;
        }
        writeln!(f, "registrations  {} while running", self.registrations_while_running)?;
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
