//! Samples over any transport: adopted, leased, kept until they are settled, freed exactly once.
//!
//! ```text
//! unknown -> provisional -> adopted -> leased (any number of times) -> settled
//!                |             |                                          |
//!                '- reclaimed -'------------- aborted -------------------'|
//!                                                                         v
//!                             freed: at once here, then on its server, retried until confirmed
//! ```

mod lease;
mod reclaim;
mod report;
mod residents;
#[cfg(test)]
mod tests;

use std::{
    collections::HashSet,
    future::poll_fn,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use control_proto::token::Verb;
use parking_lot::Mutex;
use transport_core::{
    Descriptor, Error, ErrorKind, Location, Publication, PublishOptions, Release, Result, SampleId,
    SampleKey, SessionName, Transport,
};

pub(crate) use lease::Unclaimed;
pub use reclaim::{Nowhere, Reclaim};
pub use report::{Collected, Freed, Leased, SampleHealth};
use residents::Residents;
pub use residents::{LeaseToken, Released, Retention};

use crate::token::TokenReleaser;

/// Samples in arenas that are freed in one call, as parts of a step: a line or two for each server.
const PART: usize = 128;

/// Samples of one run over one transport. Cheap to share behind an [`Arc`].
///
/// A call that frees is over logically when it returns or fails: nobody here can read the sample
/// any more. What its server has not confirmed stays pending, is counted in [`SampleHealth`], and
/// is tried again by [`gc`](Self::gc) and [`drain`](Self::drain).
#[derive(Debug)]
pub struct Samples {
    transport: Arc<dyn Transport>,
    reclaim: Arc<dyn Reclaim>,
    tokens: Arc<TokenReleaser>,
    books: Mutex<Residents>,
    counts: Mutex<Counts>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    adopted: u64,
    freed: u64,
    already_gone: u64,
    force_freed: u64,
    force_freed_bytes: u64,
    expired_leases: u64,
}

impl Samples {
    /// Samples over `transport`, kept as `retention` says.
    pub fn over(transport: Arc<dyn Transport>, retention: Retention) -> Self {
        Self {
            transport,
            reclaim: Arc::new(Nowhere),
            tokens: Arc::default(),
            books: Mutex::new(Residents::new(retention)),
            counts: Mutex::default(),
        }
    }

    /// Says how samples are reclaimed whose capture was never answered.
    #[must_use]
    pub fn reclaiming(mut self, reclaim: Arc<dyn Reclaim>) -> Self {
        self.reclaim = reclaim;
        self
    }

    /// Says how servers are asked that free by token.
    #[must_use]
    pub fn asking(mut self, tokens: TokenReleaser) -> Self {
        self.tokens = Arc::new(tokens);
        self
    }

    /// The transport underneath.
    pub fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }

    /// How samples are kept.
    pub fn retention(&self) -> Retention {
        self.books.lock().retention.clone()
    }

    /// Publishes samples and adopts them: all or none.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a sample without tensors; [`ErrorKind::CapacityExceeded`]
    /// over the hard cap, before anything is published.
    pub async fn put(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Arc<Descriptor>>> {
        if let Some(empty) = batch.iter().find(|publication| publication.tensors.is_empty()) {
            return Err(Error::new(ErrorKind::InvalidInput, "put", "a sample has no tensors")
                .with("key", &empty.sample));
        }
        let tensors = batch.iter().flat_map(|publication| publication.tensors.values());
        self.check_room(tensors.map(|tensor| tensor.meta.nbytes()).sum())?;
        let described = self.transport.publish(batch, options).await?;
        let described: Vec<_> = described.into_iter().map(Arc::new).collect();
        match self.adopt(&described).await {
            Ok(_) => Ok(described),
            Err(error) => {
                self.free_all(&described);
                self.send_pending(Some(&keys(&described))).await;
                Err(error)
            }
        }
    }

    fn free_all(&self, samples: &[Arc<Descriptor>]) {
        let mut books = self.books.lock();
        samples.iter().for_each(|descriptor| books.free(descriptor));
    }

    fn check_room(&self, bytes: u64) -> Result<()> {
        let books = self.books.lock();
        match books.retention.max_resident_bytes {
            Some(limit) if books.bytes.saturating_add(bytes) > limit => {
                Err(Error::new(ErrorKind::CapacityExceeded, "put", "hard cap exceeded")
                    .with("resident_bytes", books.bytes)
                    .with("requested_bytes", bytes)
                    .with("max_resident_bytes", limit)
                    .remedy("free samples first, or raise the cap"))
            }
            _ => Ok(()),
        }
    }

    /// Notes, before a request is sent, that `place` (a server's base URL) may come to hold these
    /// samples. Until they are adopted, [`reclaim`](Self::reclaim) finds them there.
    pub fn track<'a>(&self, place: &str, samples: impl IntoIterator<Item = &'a SampleKey>) {
        let mut books = self.books.lock();
        for key in samples {
            books.track(key.clone(), place.to_owned());
        }
    }

    /// Notes that `place` holds nothing of a sample after all, in its own words.
    pub fn untrack(&self, place: &str, sample: &SampleKey) {
        self.books.lock().untrack(place, sample);
    }

    /// Places that may hold a sample whose answer has not come.
    pub fn places(&self, sample: &SampleKey) -> Vec<String> {
        self.books.lock().places(sample)
    }

    /// Hands samples over to somebody else, such as the consumers of a channel: they are neither
    /// freed here nor resident any more.
    pub fn hand_over<'a>(&self, ids: impl IntoIterator<Item = &'a SampleId>) {
        let mut books = self.books.lock();
        for id in ids {
            books.hand_over(id);
        }
    }

    /// Takes captured samples over from their servers: all or none. The same one again changes
    /// nothing; a newer life frees the one before it.
    pub async fn adopt(&self, samples: &[Arc<Descriptor>]) -> Result<u64> {
        let outcome = self.book(samples);
        let freed = match &outcome {
            Ok((_, replaced)) => keys(replaced),
            Err(_) => keys(samples),
        };
        if !freed.is_empty() {
            self.send_pending(Some(&freed)).await;
        }
        outcome.map(|(adopted, _)| adopted)
    }

    /// Writes samples into the books; gives those whose memory is replaced by theirs.
    fn book(&self, samples: &[Arc<Descriptor>]) -> Result<(u64, Vec<Arc<Descriptor>>)> {
        let (mut adopted, mut replaced) = (Vec::new(), Vec::new());
        let mut books = self.books.lock();
        let now = Instant::now();
        for descriptor in samples {
            let known = books.contains(&descriptor.sample.sample_id);
            match books.adopt(descriptor.clone(), now) {
                Ok(Some(before)) => replaced.push((before, descriptor)),
                Ok(None) if known => {}
                Ok(None) => adopted.push(descriptor),
                Err(error) => {
                    // None is taken over: those of this call that were adopted are freed.
                    for descriptor in adopted {
                        books.forget(&descriptor.sample.sample_id);
                    }
                    for descriptor in samples {
                        if !books.contains(&descriptor.sample.sample_id) {
                            books.free(descriptor);
                        }
                    }
                    return Err(error);
                }
            }
        }
        self.counts.lock().adopted += (adopted.len() + replaced.len()) as u64;
        let count = (adopted.len() + replaced.len()) as u64;
        // A replacing capture has the same keys: the server has freed the old life already, and
        // only a descriptor with another key names memory that is still taken.
        replaced.retain(|(before, after)| {
            before.sample != after.sample || before.location != after.location
        });
        let replaced: Vec<_> = replaced.into_iter().map(|(before, _)| before).collect();
        replaced.iter().for_each(|before| books.free(before));
        Ok((count, replaced))
    }

    /// Ends a lease. Idempotent: a lease that is over already is [`Released::Unknown`], and never
    /// ends anybody else's. Without retention the last lease frees the sample.
    pub async fn release(&self, token: &LeaseToken) -> Released {
        let (released, gone) = self.books.lock().release(token);
        if let Some(descriptor) = gone {
            self.send_pending(Some(std::slice::from_ref(&descriptor.sample))).await;
        }
        released
    }

    /// Frees one sample, whatever reads it.
    pub async fn abort(&self, id: &SampleId) -> Freed {
        self.abort_many(std::slice::from_ref(id)).await
    }

    /// Frees samples, each by itself: one that is unknown or fails stops none of the others.
    pub async fn abort_many(&self, ids: &[SampleId]) -> Freed {
        let mut unknown = 0;
        let mut freed = Vec::with_capacity(ids.len());
        {
            let mut books = self.books.lock();
            for id in ids {
                match books.forget(id) {
                    Some(descriptor) => freed.push(descriptor.sample.clone()),
                    None => unknown += 1,
                }
            }
        }
        let mut outcome = self.send_pending(Some(&freed)).await;
        outcome.already_gone += unknown;
        self.counts.lock().already_gone += unknown;
        outcome
    }

    /// Frees samples that need not have been adopted here, such as those that a ledger names after
    /// a restart.
    pub async fn settle(&self, samples: &[Arc<Descriptor>]) -> Freed {
        let mut freed = Freed::default();
        let mut sent = Vec::new();
        // All of it is freed here, and on its way, before anything is waited for.
        for part in parts(samples) {
            let batch = {
                let mut books = self.books.lock();
                books.settle(part);
                let pending = |sample: &Arc<Descriptor>| books.pending.get(&sample.sample).cloned();
                part.iter().filter_map(pending).collect()
            };
            let mut sending = Box::pin(self.send(batch));
            match poll_fn(|cx| Poll::Ready(sending.as_mut().poll(cx))).await {
                Poll::Ready(part) => freed.add(part),
                Poll::Pending => sent.push(sending),
            }
        }
        // Side by side: a server that does not answer is waited for once, not once for each part.
        poll_fn(|cx| {
            sent.retain_mut(|sending| match sending.as_mut().poll(cx) {
                Poll::Ready(part) => {
                    freed.add(part);
                    false
                }
                Poll::Pending => true,
            });
            if sent.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        freed
    }

    /// Ends leases whose time is over, frees what has been held too long and is not read, and
    /// tries pending frees once more. Does not wait between attempts and forgets nothing.
    pub async fn gc(&self, now: Instant) -> Collected {
        let (expired, swept) = self.books.lock().sweep(now);
        let bytes: u64 = swept.iter().map(|descriptor| descriptor.nbytes()).sum();
        {
            let mut counts = self.counts.lock();
            counts.force_freed += swept.len() as u64;
            counts.force_freed_bytes += bytes;
            counts.expired_leases += expired as u64;
        }
        self.send_pending(None).await;
        Collected {
            force_freed: swept.len() as u64,
            force_freed_bytes: bytes,
            expired_leases: expired as u64,
            release_pending: self.release_pending(),
        }
    }

    /// Tries the pending frees of `ids` once, or all of them; those that remain are in the result.
    pub async fn retry_frees(&self, ids: Option<&[SampleId]>) -> (Freed, Vec<SampleId>) {
        let ids = ids.map(|ids| ids.iter().collect::<HashSet<_>>());
        let wanted = |key: &SampleKey| ids.as_ref().is_none_or(|ids| ids.contains(&key.sample_id));
        let keys: Vec<SampleKey> =
            self.books.lock().pending.keys().filter(|key| wanted(key)).cloned().collect();
        let freed = self.send_pending(Some(&keys)).await;
        let books = self.books.lock();
        let left = keys.into_iter().filter(|key| books.pending.contains_key(key));
        (freed, left.map(|key| key.sample_id).collect())
    }

    /// Tries pending frees up to `attempts` times, `interval` apart.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if some remain, naming up to 16. They stay pending: nothing is forgotten.
    pub async fn drain(
        &self,
        ids: Option<&[SampleId]>,
        attempts: u32,
        interval: Duration,
    ) -> Result<Freed> {
        if attempts == 0 {
            return Err(Error::new(ErrorKind::InvalidInput, "drain", "at least one attempt"));
        }
        let mut total = Freed::default();
        for attempt in 1..=attempts {
            let (freed, left) = self.retry_frees(ids).await;
            total.freed += freed.freed;
            total.already_gone += freed.already_gone;
            if left.is_empty() {
                return Ok(total);
            }
            if attempt == attempts {
                let named: Vec<&str> = left.iter().take(16).map(SampleId::as_str).collect();
                return Err(Error::new(
                    ErrorKind::Busy,
                    "drain",
                    format!("could not drain {} pending", left.len()),
                )
                .with("attempts", attempts)
                .with("samples", named.join(", "))
                .remedy("check that their servers can be reached, then drain again"));
            }
            if !interval.is_zero() {
                tokio::time::sleep(interval).await;
            }
        }
        Ok(total)
    }

    /// Gives up the pending frees of a server that is known to be dead: its memory went with it.
    /// Returns how many there were.
    pub fn write_off(&self, control: &SessionName) -> u64 {
        let mut books = self.books.lock();
        let before = books.pending.len();
        books.pending.retain(|_, descriptor| match &descriptor.location {
            Location::Arena(arena) => arena.control != *control,
            Location::Token(token) => token.control != *control,
            _ => true,
        });
        let gone = (before - books.pending.len()) as u64;
        self.counts.lock().already_gone += gone;
        gone
    }

    /// Frees, on every place that may hold them, samples that were asked for and never answered.
    /// Returns how many there were.
    ///
    /// # Errors
    /// If a place could not be asked; what it may hold stays provisional.
    pub async fn reclaim(&self) -> Result<u64> {
        let all = self.books.lock().take_provisional();
        let (mut count, mut failure) = (0, None);
        for (key, places) in all {
            let mut left = residents::Places::new();
            for place in places {
                if let Err(error) = self.reclaim.reclaim(&place, &key).await {
                    failure.get_or_insert(error.with("place", &place).with("key", &key));
                    left.insert(place);
                }
            }
            if left.is_empty() {
                count += 1;
            } else {
                self.books.lock().put_back_provisional(key, left);
            }
        }
        match failure {
            None => Ok(count),
            Some(error) => Err(error.with("reclaimed", count)),
        }
    }

    /// Frees that are not confirmed.
    pub fn release_pending(&self) -> u64 {
        self.books.lock().pending.len() as u64
    }

    /// What is held, and what has happened.
    pub fn health(&self) -> SampleHealth {
        let (books, counts) = (self.books.lock(), *self.counts.lock());
        SampleHealth {
            resident_samples: books.len() as u64,
            resident_bytes: books.bytes,
            max_resident_bytes: books.retention.max_resident_bytes,
            provisional: books.provisional() as u64,
            active_leases: books.leases() as u64,
            release_pending: books.pending.len() as u64,
            adopted: counts.adopted,
            freed: counts.freed,
            already_gone: counts.already_gone,
            force_freed: counts.force_freed,
            remembered: books.remembered() as u64,
            oldest_age_s: books.oldest(Instant::now()).map_or(0.0, |age| age.as_secs_f64()),
        }
    }

    /// Sends pending frees: those of `keys`, or all.
    async fn send_pending(&self, keys: Option<&[SampleKey]>) -> Freed {
        let batch: Vec<Arc<Descriptor>> = {
            let books = self.books.lock();
            match keys {
                Some(keys) => {
                    keys.iter().filter_map(|key| books.pending.get(key).cloned()).collect()
                }
                None => books.pending.values().cloned().collect(),
            }
        };
        self.send(batch).await
    }

    /// Sends pending frees. What a server confirms is not pending any more.
    async fn send(&self, batch: Vec<Arc<Descriptor>>) -> Freed {
        if batch.is_empty() {
            return Freed::default();
        }
        let mut outcome = Freed::default();
        let confirmed = match self.release_batch(&batch, batch.len() == 1).await {
            Ok(report) => {
                outcome = report;
                batch
            }
            // One bad server or sample must not hold up the others: ask one place at a time.
            Err(error) if batch.len() > 1 => {
                tracing::debug!(%error, samples = batch.len(), "freeing place by place");
                let mut confirmed = Vec::new();
                for group in by_place(batch) {
                    match self.release_batch(&group, true).await {
                        Ok(report) => {
                            outcome.freed += report.freed;
                            outcome.already_gone += report.already_gone;
                            confirmed.extend(group);
                        }
                        Err(error) => {
                            tracing::warn!(%error, samples = group.len(), "not freed yet");
                            outcome.pending += group.len() as u64;
                        }
                    }
                }
                confirmed
            }
            Err(error) => {
                tracing::warn!(%error, key = %batch[0].sample, "not freed yet");
                outcome.pending += 1;
                Vec::new()
            }
        };
        self.books.lock().confirm(&confirmed);
        let mut counts = self.counts.lock();
        counts.freed += outcome.freed;
        counts.already_gone += outcome.already_gone;
        outcome
    }

    async fn release_batch(&self, batch: &[Arc<Descriptor>], one_place: bool) -> Result<Freed> {
        let behind_token = |d: &&Arc<Descriptor>| matches!(d.location, Location::Token(_));
        let tokens: Vec<_> = batch.iter().filter(behind_token).cloned().collect();
        let releases: Vec<Release> =
            batch.iter().filter(|d| !behind_token(d)).cloned().map(Release::from).collect();
        let mut freed = Freed::default();
        if !tokens.is_empty() {
            freed.freed += self.release_tokens(tokens).await?;
        }
        if releases.is_empty() {
            return Ok(freed);
        }
        let count = releases.len() as u64;
        match self.transport.release(releases).await {
            Ok(report) => {
                // What is deferred goes back by itself, with the last view of it.
                freed.freed += report.released + report.unconfirmed + report.deferred;
                freed.already_gone += report.already_gone + report.stale;
                Ok(freed)
            }
            // The memory of a server that has another life now is gone with the old one.
            Err(error) if error.kind() == ErrorKind::Stale && one_place => {
                freed.already_gone += count;
                Ok(freed)
            }
            Err(error) => Err(error),
        }
    }

    /// Frees samples behind tokens; an error if any is not confirmed.
    async fn release_tokens(&self, samples: Vec<Arc<Descriptor>>) -> Result<u64> {
        let releaser = self.tokens.clone();
        let asking = move || releaser.release(&samples, Verb::Release);
        let report = tokio::task::spawn_blocking(asking).await.map_err(|e| {
            Error::new(ErrorKind::Unexpected, "release", "asking panicked").source(e)
        })??;
        match report.failed.into_iter().next() {
            None => Ok(report.released),
            // Another generation lives there: this one is gone.
            Some((_, ids, error)) if error.kind() == ErrorKind::Stale && ids.len() == 1 => {
                Ok(report.released)
            }
            Some((_, _, error)) => Err(error),
        }
    }
}

/// The parts in which a step is freed: what lies in arenas in several, so that their servers work on
/// one while the next is looked for; anything else in one.
fn parts(samples: &[Arc<Descriptor>]) -> std::slice::Chunks<'_, Arc<Descriptor>> {
    let in_arenas = samples.iter().all(|sample| matches!(sample.location, Location::Arena(_)));
    samples.chunks(if in_arenas { PART } else { samples.len().max(1) })
}

fn keys(samples: &[Arc<Descriptor>]) -> Vec<SampleKey> {
    samples.iter().map(|descriptor| descriptor.sample.clone()).collect()
}

/// Groups by the server that answers for them.
fn by_place(batch: Vec<Arc<Descriptor>>) -> Vec<Vec<Arc<Descriptor>>> {
    let mut groups: Vec<Vec<Arc<Descriptor>>> = Vec::new();
    for descriptor in batch {
        let same = |group: &&mut Vec<Arc<Descriptor>>| {
            use transport_core::Location::{Arena, Store, Token};
            match (&group[0].location, &descriptor.location) {
                (Arena(a), Arena(b)) => a.control == b.control && a.epoch == b.epoch,
                (Token(a), Token(b)) => a.control == b.control,
                (Store, Store) => true,
                _ => false,
            }
        };
        match groups.iter_mut().find(same) {
            Some(group) => group.push(descriptor),
            None => groups.push(vec![descriptor]),
        }
    }
    groups
}
