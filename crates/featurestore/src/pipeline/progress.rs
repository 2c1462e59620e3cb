//! Progress of the main job: bars on a terminal, a line now and then elsewhere.

use std::{
    cell::Cell,
    io::IsTerminal,
    time::{Duration, Instant},
};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::{Options, children::Trainer};

/// Pause between two lines where there is no terminal.
const EVERY: Duration = Duration::from_secs(5);

pub(super) struct Progress {
    kind: Kind,
    total: usize,
    captured: Cell<usize>,
    verified: Cell<usize>,
    acked: Cell<usize>,
    bytes: Cell<u64>,
    last: Cell<Instant>,
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
            eprintln!("{}", trainer.choice);
            if std::io::stderr().is_terminal() { bars(total) } else { Kind::Lines }
        };
        Self {
            kind,
            total,
            captured: Cell::new(0),
            verified: Cell::new(0),
            acked: Cell::new(0),
            bytes: Cell::new(0),
            last: Cell::new(Instant::now()),
        }
    }

    pub(super) fn captured(&self) {
        self.captured.set(self.captured.get() + 1);
        if let Kind::Bars { captured, .. } = &self.kind {
            captured.inc(1);
        }
    }

    pub(super) fn verified(&self, bytes: u64) {
        self.verified.set(self.verified.get() + 1);
        self.bytes.set(self.bytes.get() + bytes);
        match &self.kind {
            Kind::Bars { verified, .. } => verified.inc(1),
            Kind::Lines if self.last.get().elapsed() >= EVERY => {
                self.last.set(Instant::now());
                self.line();
            }
            _ => {}
        }
    }

    pub(super) fn acked(&self, samples: usize) {
        self.acked.set(self.acked.get() + samples);
        if let Kind::Bars { acked, .. } = &self.kind {
            acked.inc(samples as u64);
        }
    }

    pub(super) fn finish(&self) {
        match &self.kind {
            Kind::Quiet => {}
            Kind::Lines => self.line(),
            Kind::Bars { captured, verified, acked } => {
                for bar in [captured, verified, acked] {
                    bar.finish();
                }
            }
        }
    }

    fn line(&self) {
        eprintln!(
            "captured {} of {}, verified {} ({:.2} GB), acknowledged {}",
            self.captured.get(),
            self.total,
            self.verified.get(),
            self.bytes.get() as f64 / 1e9,
            self.acked.get()
        );
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
