//! What is to be said to a server, and what it has not answered yet.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use control_proto::control::{
    Limits, Objects, write_free_samples, write_health, write_hold_at, write_keys, write_ping,
    write_unhold,
};
use crossbeam_channel::Sender;
use transport_core::{Epoch, Error, ErrorKind, Health, RemoteAddr, Result, Sequence};

use super::ticket::{Batch, Fate};

/// An object to claim: its key, its life, and where it is believed to lie.
#[derive(Clone, Debug)]
pub(crate) struct ClaimObject {
    pub(crate) key: Arc<str>,
    pub(crate) seq: Option<Sequence>,
    pub(crate) range: Option<(RemoteAddr, u64)>,
}

/// Something to say.
#[derive(Debug)]
pub(super) enum Item {
    Free(FreeLine),
    Ask(Ask),
}

/// Frees of neighbouring samples of one batch, as they go into one line.
#[derive(Debug)]
pub(super) struct FreeLine {
    pub(super) batch: Arc<Batch>,
    pub(super) samples: Range<usize>,
    /// It may have been applied before: an answer was lost.
    pub(super) resent: bool,
}

/// A question, and who waits for the answer.
#[derive(Debug)]
pub(super) struct Ask {
    pub(super) question: Question,
    pub(super) deadline: Instant,
    pub(super) reply: Option<Sender<Result<Answer>>>,
}

#[derive(Debug)]
pub(super) enum Question {
    /// Connect and greet, nothing else.
    Connect,
    Hold {
        epoch: Epoch,
        objects: Vec<ClaimObject>,
    },
    Unhold {
        epoch: Epoch,
        objects: Vec<ClaimObject>,
    },
    Health,
    Ping,
}

#[derive(Debug)]
pub(super) enum Answer {
    Done,
    Held { gone: Vec<u32>, stale: Vec<u32> },
    Health(Box<Health>),
}

/// A line that was sent and not answered.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) item: Item,
    pub(super) at: Instant,
}

/// Splits a batch into lines. Samples are not torn, so that each is settled by one answer.
pub(super) fn lines(batch: &Arc<Batch>) -> impl Iterator<Item = FreeLine> + '_ {
    let mut next = 0;
    std::iter::from_fn(move || {
        let start = next;
        let mut objects = 0;
        while let Some(sample) = batch.samples.get(next) {
            let more = sample.features.len();
            if next > start && objects + more > Objects::PER_LINE {
                break;
            }
            objects += more;
            next += 1;
        }
        (next > start).then(|| FreeLine {
            batch: batch.clone(),
            samples: start..next,
            resent: false,
        })
    })
}

impl Item {
    /// Whether only a server that answers can do it.
    pub(super) fn needs_answers(&self) -> bool {
        match self {
            Self::Free(line) => line.batch.epoch.is_some(),
            Self::Ask(ask) => !matches!(ask.question, Question::Connect),
        }
    }

    /// Tells whoever waits that it could not be done.
    pub(super) fn fail(self, error: impl FnOnce() -> Error) {
        match self {
            Self::Free(line) => line.batch.fail(line.samples.len(), error),
            Self::Ask(ask) => ask.answer(|| Err(error())),
        }
    }

    /// Number of objects, for the bound on what is outstanding.
    pub(super) fn objects(&self) -> usize {
        match self {
            Self::Free(line) => line.objects(),
            Self::Ask(_) => 0,
        }
    }
}

impl Ask {
    pub(super) fn answer(self, answer: impl FnOnce() -> Result<Answer>) {
        if let Some(reply) = self.reply {
            let _ = reply.send(answer()); // the caller's deadline has passed
        }
    }

    pub(super) fn write(&self, out: &mut Vec<u8>, id: u64, limits: &Limits) -> Result<()> {
        match &self.question {
            Question::Connect => Ok(()),
            Question::Hold { epoch, objects } => {
                let objects = objects.iter().map(|o| (&*o.key, o.seq, o.range));
                write_hold_at(out, id, *epoch, objects, limits)
            }
            Question::Unhold { epoch, objects } => {
                let objects = objects.iter().map(|o| (&*o.key, o.seq));
                write_unhold(out, id, *epoch, objects, limits)
            }
            Question::Health => {
                write_health(out, id);
                Ok(())
            }
            Question::Ping => {
                write_ping(out, id);
                Ok(())
            }
        }
    }
}

impl FreeLine {
    pub(super) fn objects(&self) -> usize {
        self.batch.samples[self.samples.clone()].iter().map(|s| s.features.len()).sum()
    }

    /// As an object line, which is answered.
    pub(super) fn write(
        &self,
        out: &mut Vec<u8>,
        id: u64,
        epoch: Epoch,
        limits: &Limits,
    ) -> Result<()> {
        let samples = &self.batch.samples[self.samples.clone()];
        write_free_samples(out, id, epoch, samples.iter().map(|sample| &**sample), limits)
    }

    /// As lists of keys, which are not answered.
    pub(super) fn write_keys(&self, out: &mut Vec<u8>) {
        let samples = &self.batch.samples[self.samples.clone()];
        write_keys(out, samples.iter().flat_map(|s| s.keys().map(|key| key.shared())));
    }

    /// What an answer means for each sample. Positions are those of objects in the line.
    pub(super) fn settle(&self, gone: &[u32], stale: &[u32]) {
        let mut first = 0;
        let fates = self.batch.samples[self.samples.clone()].iter().map(|sample| {
            let objects = first..first + sample.features.len() as u32;
            first = objects.end;
            let among = |list: &[u32]| list.iter().filter(|i| objects.contains(i)).count();
            let (gone, stale) = (among(gone), among(stale));
            if stale > 0 {
                Fate::Stale
            } else if gone < objects.len() {
                Fate::Released
            } else if self.resent {
                Fate::Unconfirmed // most likely by the first attempt
            } else {
                Fate::Gone
            }
        });
        self.batch.settle(fates.collect::<Vec<_>>());
    }

    pub(super) fn settle_all(&self, fate: Fate) {
        self.batch.settle(self.samples.clone().map(|_| fate));
    }
}

/// Waits between attempts to connect.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backoff {
    attempts: u32,
    next: Instant,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(50);
    const LONGEST: Duration = Duration::from_secs(2);

    pub(super) fn new() -> Self {
        Self { attempts: 0, next: Instant::now() }
    }

    /// Counts a failure and returns how many there were in a row.
    pub(super) fn failed(&mut self) -> u32 {
        let wait = Self::FIRST.saturating_mul(1 << self.attempts.min(10)).min(Self::LONGEST);
        self.attempts += 1;
        self.next = Instant::now() + wait;
        self.attempts
    }

    pub(super) fn due(&self) -> Instant {
        self.next
    }
}

pub(super) const IS_IT_THERE: &str = "check that the process which published runs (a capture \
     server, or a producer), and that this is its control address; its memory is gone if it has ended";

pub(super) fn unreachable(peer: &transport_core::SessionName, reason: &Error) -> Error {
    Error::new(ErrorKind::PeerGone, "control", "the server cannot be reached")
        .with("peer", peer)
        .with("reason", reason)
        .remedy(IS_IT_THERE)
}
