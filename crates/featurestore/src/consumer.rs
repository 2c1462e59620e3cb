//! Reads samples ahead of the training loop, in order.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::{sync::oneshot, task::JoinHandle};
use transport_core::{Descriptor, Error, ErrorKind, Location, Result, SampleId, SessionName};

use crate::{
    layout::Layout,
    lifecycle::{Leased, Samples, Unclaimed},
};

/// How a [`Consumer`] reads.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConsumerOptions {
    /// Samples that are read at a time, ahead of the training loop. Default: 4.
    pub in_flight: usize,
    /// Readings are begun once no more samples than so many are read or being read, and then up to
    /// `in_flight`: together they cost a shared device one change of context. Default: 3.
    pub refill_at: usize,
    /// Samples of one server, of those begun at a time, that one call of the transport reads: a link
    /// between devices is better filled by one call than by several. Default: 1.
    pub together: usize,
    /// Bytes that are read ahead at most; one sample always is. For pools that have no room for
    /// `in_flight` of the largest. Default: no bound.
    pub max_bytes: Option<u64>,
    /// Longest time of one reading. Default: 30 seconds.
    pub deadline: Duration,
    /// What samples must look like; none checks nothing.
    pub layout: Option<Layout>,
}

impl Default for ConsumerOptions {
    fn default() -> Self {
        Self {
            in_flight: 4,
            refill_at: 3,
            together: 1,
            max_bytes: None,
            deadline: Duration::from_secs(30),
            layout: None,
        }
    }
}

/// What the training loop gets.
#[derive(Debug)]
pub enum Materialized {
    /// A sample, and the lease under which it is read.
    Ready(Leased),
    /// It cannot be had any more: its server is gone, or has another life.
    Lost(SampleId, Error),
}

/// Samples in the order in which they were handed to it, several of them on their way.
#[derive(Debug)]
pub struct Consumer {
    samples: Arc<Samples>,
    options: ConsumerOptions,
    waiting: VecDeque<Arc<Descriptor>>,
    reading: VecDeque<(Arc<Descriptor>, JoinHandle<Result<Unclaimed>>)>,
    bytes: u64, // of what is being read
    active: Arc<Mutex<Active>>,
}

/// Time during which anything was being read.
#[derive(Debug, Default)]
struct Active {
    readings: usize,
    since: Option<Instant>,
    total: Duration,
}

/// One reading, for as long as it lives.
struct Reading(Arc<Mutex<Active>>);

impl Reading {
    fn begin(active: &Arc<Mutex<Active>>) -> Self {
        let mut now = active.lock();
        now.readings += 1;
        now.since.get_or_insert_with(Instant::now);
        drop(now);
        Self(active.clone())
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut active = self.0.lock();
        active.readings -= 1;
        if active.readings == 0 {
            let since = active.since.take().expect("set by the first reading");
            active.total += since.elapsed();
        }
    }
}

/// A server that fails later than this lets those wait who ask it again.
const MOMENT: Duration = Duration::from_secs(1);
/// Pause between two looks whether a full pool has room.
const FULL: Duration = Duration::from_millis(1);

impl Consumer {
    /// Reads through `samples`. Must be used within a tokio runtime.
    pub fn new(samples: Arc<Samples>, options: ConsumerOptions) -> Self {
        let (waiting, reading) = (VecDeque::new(), VecDeque::new());
        Self { samples, options, waiting, reading, bytes: 0, active: Arc::default() }
    }

    /// Time during which samples were being read; waits for room are not in it.
    pub fn active(&self) -> Duration {
        self.active.lock().total
    }

    /// Hands samples over; those that fit into the bound are read from now on.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] if a sample is not what the layout says. Then none is taken.
    pub fn feed(&mut self, samples: impl IntoIterator<Item = Arc<Descriptor>>) -> Result<()> {
        let samples: Vec<_> = samples.into_iter().collect();
        if let Some(layout) = &self.options.layout {
            for sample in &samples {
                layout.check(sample)?;
            }
        }
        self.waiting.extend(samples);
        self.start();
        Ok(())
    }

    /// Samples that were handed over and not returned yet.
    pub fn len(&self) -> usize {
        self.waiting.len() + self.reading.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn start(&mut self) {
        if self.reading.len() > self.options.refill_at {
            return;
        }
        let most = self.options.max_bytes.unwrap_or(u64::MAX);
        let room = self.options.in_flight.max(1) - self.reading.len();
        let mut begun = Vec::new();
        while begun.len() < room {
            let Some(sample) = self.waiting.front() else { break };
            let bytes = self.bytes.saturating_add(sample.nbytes());
            if bytes > most && !(self.reading.is_empty() && begun.is_empty()) {
                break;
            }
            begun.extend(self.waiting.pop_front());
            self.bytes = bytes;
        }
        let mut readings: Vec<(usize, JoinHandle<_>)> = Vec::with_capacity(begun.len());
        for group in groups(&begun, self.options.together) {
            match group[..] {
                [at] => readings.push((at, self.read(&begun[at], Duration::ZERO))),
                _ => {
                    let samples = group.iter().map(|&at| begun[at].clone()).collect();
                    readings.extend(group.into_iter().zip(self.read_together(samples)));
                }
            }
        }
        readings.sort_unstable_by_key(|(at, _)| *at);
        self.reading.extend(begun.into_iter().zip(readings.into_iter().map(|(_, it)| it)));
    }

    /// Reads samples of one server with one call, and each by itself if that fails: in the time that
    /// is left, and not at all if the server has let them wait.
    fn read_together(&self, group: Vec<Arc<Descriptor>>) -> Vec<JoinHandle<Result<Unclaimed>>> {
        let (samples, deadline) = (self.samples.clone(), self.options.deadline);
        let (active, all) = (self.active.clone(), group.clone());
        let (answer, answers): (Vec<_>, Vec<_>) = group.iter().map(|_| oneshot::channel()).unzip();
        let begun = Instant::now();
        tokio::spawn(async move {
            let read = async {
                samples.adopt(&all).await?;
                let _reading = Reading::begin(&active);
                samples.get_many(&all, deadline).await
            };
            match read.await {
                Ok(leased) => {
                    for (answer, leased) in answer.into_iter().zip(leased) {
                        let _ = answer.send(Ok(Unclaimed::new(&samples, leased))); // or nobody waits
                    }
                }
                Err(error) => {
                    let error = error.with("samples_of_the_call", all.len());
                    answer.into_iter().for_each(|answer| drop(answer.send(Err(error.repeated()))));
                }
            }
        });
        let each = group.into_iter().zip(answers).map(|(sample, answer)| {
            let (samples, active) = (self.samples.clone(), self.active.clone());
            tokio::spawn(async move {
                let left = match answer.await {
                    Ok(Ok(leased)) => return Ok(leased),
                    Ok(Err(error)) => match left_after(&error, &sample, begun, deadline) {
                        Some(left) => left,
                        None => return Err(error),
                    },
                    Err(_) => deadline, // nobody knows what became of the call
                };
                read_alone(samples, active, sample, left).await
            })
        });
        each.collect()
    }

    fn read(&self, sample: &Arc<Descriptor>, pause: Duration) -> JoinHandle<Result<Unclaimed>> {
        let (samples, deadline) = (self.samples.clone(), self.options.deadline);
        let (sample, active) = (sample.clone(), self.active.clone());
        tokio::spawn(async move {
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
            read_alone(samples, active, sample, deadline).await
        })
    }

    /// The next sample, in order; none if nothing was handed over.
    ///
    /// # Errors
    /// What makes going on senseless: bytes that are not what was described, a closed store, a
    /// receive pool that stays full for as long as one reading may take. The sample stays with the
    /// caller's books; nothing is leased for it.
    pub async fn next(&mut self) -> Result<Option<Materialized>> {
        let mut end = None;
        let outcome = loop {
            let Some((_, reading)) = self.reading.front_mut() else { return Ok(None) };
            // A dropped future leaves the reading where it is.
            let outcome = reading.await.map_err(|e| {
                Error::new(ErrorKind::Unexpected, "materialize", "reading panicked").source(e)
            });
            match outcome.and_then(|outcome| outcome) {
                Err(error)
                    if error.kind() == ErrorKind::CapacityExceeded
                        && error.is_temporary()
                        && Instant::now()
                            < *end
                                .get_or_insert_with(|| Instant::now() + self.options.deadline) =>
                {
                    let sample = self.reading[0].0.clone();
                    self.reading[0].1 = self.read(&sample, FULL);
                    // Those behind must not keep the room that this one needs.
                    self.give_back_followers().await;
                }
                outcome => break outcome,
            }
        };
        let (sample, _) = self.reading.pop_front().expect("it was read");
        self.bytes -= sample.nbytes();
        self.start();
        let id = sample.sample.sample_id.clone();
        match outcome {
            Ok(leased) => Ok(Some(Materialized::Ready(leased.take()))),
            Err(error) => match error.kind() {
                ErrorKind::NotFound
                | ErrorKind::Stale
                | ErrorKind::PeerGone
                | ErrorKind::OutOfRange
                | ErrorKind::Timeout => Ok(Some(Materialized::Lost(id, error))),
                _ => Err(error),
            },
        }
    }

    /// Ends the readings behind the first; they are begun again later.
    async fn give_back_followers(&mut self) {
        while let [_, .., (_, reading)] = self.reading.make_contiguous() {
            let outcome = reading.await; // a dropped future leaves the reading where it is
            let (sample, _) = self.reading.pop_back().expect("it was read");
            self.bytes -= sample.nbytes();
            self.waiting.push_front(sample);
            if let Ok(Ok(leased)) = outcome {
                let Leased { fetched, token } = leased.take();
                drop(fetched);
                self.samples.release(&token).await;
            }
        }
    }

    /// Stops reading, and gives back what was never returned, oldest first, without leases.
    pub async fn close(mut self, bound: Duration) -> Vec<Arc<Descriptor>> {
        let mut left = Vec::new();
        let end = tokio::time::Instant::now() + bound;
        for (sample, mut reading) in self.reading.drain(..) {
            match tokio::time::timeout_at(end, &mut reading).await {
                Ok(Ok(Ok(leased))) => {
                    self.samples.release(&leased.take().token).await;
                }
                Ok(_) => {}
                Err(_) => reading.abort(), // its lease ends with it
            }
            left.push(sample);
        }
        left.extend(self.waiting.drain(..));
        left
    }
}

async fn read_alone(
    samples: Arc<Samples>,
    active: Arc<Mutex<Active>>,
    sample: Arc<Descriptor>,
    deadline: Duration,
) -> Result<Unclaimed> {
    samples.adopt(std::slice::from_ref(&sample)).await?;
    let _reading = Reading::begin(&active);
    let leased = samples.get(&sample, deadline).await?;
    Ok(Unclaimed::new(&samples, leased))
}

/// How long a sample may be read by itself after a call for several has failed. None if the server
/// has let them wait: it would do so again.
fn left_after(
    error: &Error,
    sample: &Descriptor,
    begun: Instant,
    deadline: Duration,
) -> Option<Duration> {
    let is_servers = matches!(error.kind(), ErrorKind::PeerGone | ErrorKind::Timeout);
    if !is_servers || server(sample).is_none() {
        return Some(deadline); // another sample may be to blame
    }
    let spent = begun.elapsed();
    deadline.checked_sub(spent).filter(|left| spent < MOMENT && !left.is_zero())
}

/// The server that has a sample; none in a store, whose servers nobody knows here.
fn server(sample: &Descriptor) -> Option<&SessionName> {
    match &sample.location {
        Location::Arena(arena) => Some(&arena.control),
        Location::Token(token) => Some(&token.control),
        _ => None,
    }
}

/// Places of samples that are read by one call each: of one server, so that none waits for another's,
/// and at most so many.
fn groups(samples: &[Arc<Descriptor>], most: usize) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (at, sample) in samples.iter().enumerate() {
        let of_server = |group: &&mut Vec<usize>| server(&samples[group[0]]) == server(sample);
        match groups.iter_mut().rev().find(of_server) {
            Some(group) if group.len() < most => group.push(at),
            _ => groups.push(vec![at]),
        }
    }
    groups
}

impl Drop for Consumer {
    fn drop(&mut self) {
        for (_, reading) in &self.reading {
            reading.abort();
        }
    }
}

#[cfg(test)]
mod tests;
