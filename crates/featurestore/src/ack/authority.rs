//! Rank 0's part: the only reader of the channel and the only owner of the ledger.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::{Duration, Instant},
};

use control_proto::sample_ref::SampleRef;
use transport_core::{Error, ErrorKind, Result, SampleId};

use crate::{
    channel::RefReader,
    ledger::{Ledger, Standing},
};

/// Refs read from the channel at a time.
const POLL: usize = 4096;

/// How a run begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume {
    /// From nothing: the ledger must be empty.
    Fresh,
    /// From the checkpoint of this step, which must be the newest durable one; none if the run
    /// ended before its first.
    At(Option<u64>),
}

/// The samples of one optimizer step: for each rank, its refs.
pub type Window = Vec<Vec<SampleRef>>;

/// What an [`Authority`] counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct AuthorityStats {
    /// Samples handed to ranks.
    pub dispatched: u64,
    /// Publications of samples that were known already.
    pub duplicates: u64,
    /// Samples at the end that did not fill a window.
    pub dropped: u64,
    /// Samples in flight that a restart has handed out again.
    pub requeued: u64,
    /// Samples that could not be had any more.
    pub lost: u64,
}

/// Commits what is published, hands out whole windows, and records what is trained.
#[derive(Debug)]
pub struct Authority {
    reader: RefReader,
    ledger: Ledger,
    ranks: usize,
    per_rank: usize,
    waiting: VecDeque<SampleRef>,
    recovered: HashSet<SampleId>, // in flight before a restart; their first line is no duplicate
    out: HashSet<SampleId>,       // handed out and not acknowledged
    unfreed: HashMap<SampleId, SampleRef>, // to be freed again after a restart
    unsettled: Vec<SampleId>,     // acknowledged in this run, not known to be freed
    settled: u64,
    ended: bool,
    lost: HashMap<SampleId, u32>, // publications that were lost before a restart, not read yet
    patience: Option<Duration>,
    unheard: Option<Instant>, // since when nothing was published while nothing is trained either
    stats: AuthorityStats,
}

impl Authority {
    /// Begins or resumes a run whose `ranks` ranks take `per_rank` samples a step each.
    ///
    /// # Errors
    /// [`ErrorKind::ConfigInvalid`] if a fresh run has a ledger that is not empty, or a checkpoint
    /// is not the newest durable step.
    pub fn new(
        reader: RefReader,
        ledger: Ledger,
        ranks: usize,
        per_rank: usize,
        resume: Resume,
    ) -> Result<Self> {
        let refuse = |why: &'static str| Error::new(ErrorKind::ConfigInvalid, "resume", why);
        if ranks == 0 || per_rank == 0 {
            return Err(refuse("a window has at least one rank and one sample a rank"));
        }
        match resume {
            Resume::Fresh if !ledger.is_empty() => {
                return Err(refuse("a fresh online attempt cannot reuse a ledger")
                    .with("marker", ledger.marker().unwrap_or(0))
                    .remedy("resume from its checkpoint, or give a new ledger"));
            }
            Resume::At(step) if ledger.marker() != step => {
                let (marker, step) = (ledger.marker(), step);
                let why = if marker > step {
                    "the ledger is ahead of the checkpoint"
                } else {
                    "the checkpoint is ahead of the ledger"
                };
                let shown = |step: Option<u64>| step.map_or("none".into(), |s| s.to_string());
                return Err(refuse(why)
                    .with("ledger", shown(marker))
                    .with("checkpoint", shown(step))
                    .remedy("resume from the checkpoint of the ledger's step"));
            }
            _ => {}
        }
        reader.claim_quantum((ranks * per_rank) as u64, resume != Resume::Fresh)?;
        let parse = |(_, record): (SampleId, Vec<u8>)| SampleRef::parse(record.trim_ascii_end());
        let waiting: VecDeque<SampleRef> =
            ledger.in_flight()?.into_iter().map(parse).collect::<Result<_>>()?;
        let unfreed = ledger.unfreed()?.into_iter().map(parse).collect::<Result<Vec<_>>>()?;
        let lost = reader.lost_before()?;
        let mut authority = Self {
            reader,
            ledger,
            ranks,
            per_rank,
            recovered: waiting.iter().map(|sample| sample.sample_id.clone()).collect(),
            waiting,
            out: HashSet::new(),
            unfreed: unfreed.into_iter().map(|s| (s.sample_id.clone(), s)).collect(),
            unsettled: Vec::new(),
            settled: 0,
            ended: false,
            lost,
            patience: None,
            unheard: None,
            stats: AuthorityStats::default(),
        };
        // Everything that was published before, before anything is handed out again.
        while authority.read()? > 0 {}
        authority.stats.requeued = authority.waiting.len() as u64;
        Ok(authority)
    }

    /// Makes [`poll`](Self::poll) fail once nothing was published for longer than `most`, while nothing
    /// that was handed out is still to be acknowledged: a producer that died says nothing. By default
    /// it waits for ever.
    #[must_use]
    pub fn patience(mut self, most: Duration) -> Self {
        self.patience = Some(most);
        self
    }

    /// Trained samples whose memory may not be free since a crash: free them, then tell
    /// [`freed`](Self::freed).
    pub fn unfreed(&self) -> Vec<SampleRef> {
        self.unfreed.values().cloned().collect()
    }

    /// Takes note of samples whose memory is free.
    pub fn freed<'a>(&mut self, ids: impl IntoIterator<Item = &'a SampleId>) {
        let ids: Vec<&SampleId> = ids.into_iter().collect();
        for id in &ids {
            self.unfreed.remove(*id);
        }
        self.ledger.freed(ids);
    }

    /// The next whole window, if enough is published; every rank gets as many as every other.
    /// Everything in it is durably in flight.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] for a producer that is silent beyond the [`patience`](Self::patience).
    pub fn poll(&mut self) -> Result<Option<Window>> {
        let quantum = self.ranks * self.per_rank;
        let heard = self.waiting.len() < quantum && self.read()? > 0;
        if self.waiting.len() >= quantum {
            self.unheard = None;
            return Ok(Some(self.hand_out(quantum)));
        }
        if heard || self.ended || !self.idle() {
            self.unheard = None; // while steps are trained the producer may have to wait for them
            return Ok(None);
        }
        let silent = self.unheard.get_or_insert_with(Instant::now).elapsed();
        match self.patience.filter(|most| silent > *most) {
            None => Ok(None),
            Some(most) => Err(Error::new(
                ErrorKind::Timeout,
                "wait for samples",
                "the producer has published nothing",
            )
            .with("for", format_args!("{most:?}"))
            .with("waiting", self.waiting.len())
            .with("window", quantum)
            .remedy("see whether the producer and its servers live; then resume")),
        }
    }

    fn hand_out(&mut self, samples: usize) -> Window {
        let mut window: Window = vec![Vec::new(); self.ranks];
        for (i, sample) in self.waiting.drain(..samples).enumerate() {
            self.out.insert(sample.sample_id.clone());
            window[i % self.ranks].push(sample);
        }
        self.stats.dispatched += samples as u64;
        window
    }

    /// Reads what is new in the channel; how many lines there were.
    fn read(&mut self) -> Result<usize> {
        let polled = self.reader.poll(POLL)?;
        self.ended = polled.ended;
        let (lines, before) = (polled.refs.len(), self.settled);
        let mut fresh = Vec::with_capacity(lines);
        let mut dead = Vec::new();
        for sample in polled.refs {
            match self.lost.get_mut(&sample.sample_id).filter(|left| **left > 0) {
                Some(left) => {
                    *left -= 1;
                    self.settled += 1;
                    dead.push(sample);
                }
                None => fresh.push(sample),
            }
        }
        self.bury(&dead)?;
        let record = |sample: &SampleRef| {
            let mut record = Vec::new();
            sample.write(&mut record);
            (sample.sample_id.clone(), record)
        };
        let batch: Vec<_> = fresh.iter().map(record).collect();
        let standings = self.ledger.commit(&batch)?;
        for (sample, standing) in fresh.into_iter().zip(standings) {
            match standing {
                Standing::New => self.waiting.push_back(sample),
                Standing::InFlight if self.recovered.remove(&sample.sample_id) => {}
                // The first line of a sample that is trained and settled counts as one of those.
                Standing::InFlight | Standing::Acknowledged => {
                    self.stats.duplicates += 1;
                    self.settled += 1;
                }
            }
        }
        if self.settled > before {
            self.reader.settle(self.settled)?;
        }
        Ok(lines)
    }

    /// Forgets publications whose loss was reported just before a crash.
    fn bury(&mut self, dead: &[SampleRef]) -> Result<()> {
        for sample in dead {
            if self.waiting.contains(sample) {
                self.waiting.retain(|waiting| waiting != sample);
                self.recovered.remove(&sample.sample_id);
                self.ledger.lost([&sample.sample_id])?;
            }
        }
        Ok(())
    }

    /// Whether the producer has ended and no whole window is left.
    pub fn ended(&self) -> bool {
        self.ended && self.waiting.len() < self.ranks * self.per_rank
    }

    /// Nothing is handed out and unacknowledged.
    pub fn idle(&self) -> bool {
        self.out.is_empty()
    }

    /// Hands out the samples at the end that fill no window as a smaller one, for runs whose last
    /// step may be smaller than the others; none if there is nothing left. Ranks may get different
    /// numbers of samples.
    pub fn last_window(&mut self) -> Result<Option<Window>> {
        if !self.ended() {
            return Err(Error::new(ErrorKind::InvalidInput, "end run", "the run has not ended"));
        }
        let left = self.waiting.len();
        Ok((left > 0).then(|| self.hand_out(left)))
    }

    /// Takes the samples at the end that fill no window: they are settled untrained, and the caller
    /// frees them.
    pub fn take_tail(&mut self) -> Result<Vec<SampleRef>> {
        if !self.ended() {
            return Err(Error::new(ErrorKind::InvalidInput, "drop tail", "the run has not ended"));
        }
        let tail: Vec<SampleRef> = self.waiting.drain(..).collect();
        self.ledger.lost(tail.iter().map(|sample| &sample.sample_id))?;
        self.stats.dropped += tail.len() as u64;
        self.settled += tail.len() as u64;
        self.reader.settle(self.settled)?;
        Ok(tail)
    }

    /// Makes a step durable, and asks for lost samples again. Returns what became durable.
    pub(super) fn record(
        &mut self,
        step: u64,
        trained: &[SampleId],
        lost: &[SampleId],
    ) -> Result<u64> {
        let stranger = trained.iter().chain(lost).find(|id| !self.out.contains(*id));
        let again = self.ledger.marker() == Some(step);
        if let Some(id) = stranger.filter(|_| !again) {
            return Err(Error::new(
                ErrorKind::NotFound,
                "acknowledge",
                "a sample was not handed out",
            )
            .with("sample_id", id)
            .with("step", step));
        }
        let new = self.ledger.acknowledge(step, trained)?.new as u64;
        for id in trained {
            if self.out.remove(id) {
                self.unsettled.push(id.clone());
                self.settled += 1;
            }
        }
        self.lose(lost)?;
        Ok(new)
    }

    fn lose(&mut self, lost: &[SampleId]) -> Result<()> {
        let lost: Vec<&SampleId> = lost.iter().filter(|id| self.out.contains(*id)).collect();
        if lost.is_empty() {
            return Ok(());
        }
        // Asked for first: forgotten but not asked for would be a sample that nobody captures.
        self.reader.lost(lost.iter().copied())?;
        self.ledger.lost(lost.iter().copied())?;
        for id in &lost {
            self.out.remove(*id);
        }
        self.stats.lost += lost.len() as u64;
        self.settled += lost.len() as u64;
        Ok(())
    }

    /// Takes note of what is freed, all but `pending`, and tells the producer what is settled.
    pub(super) fn settle<'a>(&mut self, pending: impl Iterator<Item = &'a str>) -> Result<()> {
        let pending: HashSet<&str> = pending.collect();
        let (left, freed): (Vec<_>, Vec<_>) = std::mem::take(&mut self.unsettled)
            .into_iter()
            .partition(|id| pending.contains(id.as_str()));
        self.unsettled = left;
        self.ledger.freed(&freed);
        self.reader.settle(self.settled)
    }

    /// The newest durable step.
    pub fn marker(&self) -> Option<u64> {
        self.ledger.marker()
    }

    /// The ledger, to be looked at.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// What it counts.
    pub fn stats(&self) -> AuthorityStats {
        self.stats
    }

    /// Makes everything noted durable and tells the producer that the consumers are done.
    pub fn finish(&mut self) -> Result<()> {
        self.ledger.flush()?;
        self.reader.done()
    }

    /// Tells the producer why the consumers give up.
    pub fn fail(&self, reason: &str) -> Result<()> {
        self.reader.fail(reason)
    }
}
