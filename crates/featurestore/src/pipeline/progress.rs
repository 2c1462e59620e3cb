//! Progress of the main job: bars on a terminal, a line now and then elsewhere.

use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use parking_lot::Mutex;

use super::{Options, children::Trainer};
use crate::process::note;

/// Pause between two lines where there is no terminal.
const EVERY: Duration = Duration::from_secs(5);

pub(super) struct Progress {
    kind: Kind,
    total: usize,
    counts: Mutex<Counts>,
}

/// How far a run is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    pub(super) captured: usize,
    pub(super) verified: usize,
    pub(super) acked: usize,
    bytes: u64,
    line: Instant, // the newest one
    /// When anything was captured, verified or acknowledged.
    pub(super) news: Instant,
    /// When the newest sample was captured.
    pub(super) last_captured: Instant,
    /// When the newest one was verified.
    pub(super) last_verified: Instant,
}

enum Kind {
    Quiet,
    Lines,
    Bars { captured: ProgressBar, verified: ProgressBar, acked: ProgressBar },
}

impl Progress {
    pub(super) fn new(options: &Options, total: usize, trainer: &Trainer) -> Self {
        let kind = if !options.progress {
            Kind::Quiet
        } else {
            note(&trainer.choice);
            if std::io::stderr().is_terminal() { bars(total) } else { Kind::Lines }
        };
        let now = Instant::now();
        let counts = Counts {
            captured: 0,
            verified: 0,
            acked: 0,
            bytes: 0,
            line: now,
            news: now,
            last_captured: now,
            last_verified: now,
        };
        Self { kind, total, counts: Mutex::new(counts) }
    }

    /// How far the run is.
    pub(super) fn counts(&self) -> Counts {
        *self.counts.lock()
    }

    pub(super) fn captured(&self) {
        let mut counts = self.counts.lock();
        counts.captured += 1;
        counts.last_captured = Instant::now();
        counts.news = counts.last_captured;
        if let Kind::Bars { captured, .. } = &self.kind {
            captured.inc(1);
        }
    }

    pub(super) fn verified(&self, bytes: u64) {
        let mut counts = self.counts.lock();
        counts.verified += 1;
        counts.bytes += bytes;
        counts.last_verified = Instant::now();
        counts.news = counts.last_verified;
        match &self.kind {
            Kind::Bars { verified, .. } => verified.inc(1),
            Kind::Lines if counts.line.elapsed() >= EVERY => {
                counts.line = Instant::now();
                self.line(&counts);
            }
            _ => {}
        }
    }

    pub(super) fn acked(&self, samples: usize) {
        let mut counts = self.counts.lock();
        counts.acked += samples;
        counts.news = Instant::now();
        if let Kind::Bars { acked, .. } = &self.kind {
            acked.inc(samples as u64);
        }
    }

    pub(super) fn finish(&self) {
        match &self.kind {
            Kind::Quiet => {}
            Kind::Lines => self.line(&self.counts()),
            Kind::Bars { captured, verified, acked } => {
                for bar in [captured, verified, acked] {
                    bar.finish();
                }
            }
        }
    }

    fn line(&self, counts: &Counts) {
        note(format_args!(
            "captured {} of {}, verified {} ({:.2} GB), acknowledged {}",
            counts.captured,
            self.total,
            counts.verified,
            counts.bytes as f64 / 1e9,
            counts.acked
        ));
    }
}

fn bars(total: usize) -> Kind {
    let style =
        ProgressStyle::with_template("{prefix:>13} {wide_bar} {pos:>4}/{len} {per_sec:>10}")
            .expect("a valid template");
    let all = MultiProgress::new();
    let bar = |name: &'static str| {
        let bar = all.add(ProgressBar::new(total as u64).with_style(style.clone()));
        bar.set_prefix(name);
        bar
    };
    Kind::Bars { captured: bar("captured"), verified: bar("verified"), acked: bar("acknowledged") }
}
