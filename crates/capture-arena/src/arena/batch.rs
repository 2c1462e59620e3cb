//! Batches: reserved whole or not at all, waiting in order, then published or given up.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Instant,
};

use transport_core::{ArenaOffset, ClientId, Error, ErrorKind, Result, Sequence};

use super::{CaptureArena, Holders, Id, Lives, Object, Sample, State};
use crate::{
    export::Exported,
    suballoc::{ArenaRange, SubAllocator, footprint},
};

/// The caller's own number for a reservation, by which the answer comes back.
pub type Ticket = u64;

/// A batch to reserve.
#[derive(Clone, Debug)]
pub struct BatchPlan {
    /// Its samples, in order.
    pub samples: Vec<PlannedSample>,
    /// Whether existing keys are replaced rather than refused.
    ///
    /// The old life stays until the new one is published; if there is no room for both, it is
    /// freed at once.
    pub replace: bool,
}

/// A sample to reserve.
#[derive(Clone, Debug)]
pub struct PlannedSample {
    /// Its objects, in order.
    pub objects: Vec<PlannedObject>,
    /// Client that holds the sample from its publication on.
    pub holder: Option<ClientId>,
}

/// An object to reserve.
#[derive(Clone, Debug)]
pub struct PlannedObject {
    /// Its key.
    pub key: Arc<str>,
    /// Its size; without bytes it takes no range.
    pub bytes: u64,
}

/// Ranges of a batch, to be filled and then published or given up.
#[derive(Debug)]
#[must_use]
pub struct Grant {
    /// Names the batch to [`CaptureArena::publish`] and [`CaptureArena::abort`].
    pub batch: u32,
    /// Offset of each object, sample by sample; none without bytes.
    pub offsets: Vec<Option<ArenaOffset>>,
}

#[derive(Debug)]
pub(super) struct Batch {
    objects: Vec<u32>,
    holders: Vec<(u32, ClientId)>, // sample and client
    reserved: u64,
}

#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) ticket: Ticket,
    pub(super) deadline: Instant,
    plan: BatchPlan,
    bytes: u64, // rounded up to units
    objects: usize,
    since: Instant,
    tried: Option<u64>, // changes at the last attempt
}

enum Refused {
    NoRoom,
    Error(Error),
}

impl CaptureArena {
    /// Takes ranges for a whole batch, or puts it in line: then the answer comes from
    /// [`Self::poll`], at the latest at its deadline.
    ///
    /// Fails at once with [`ErrorKind::AlreadyExists`] for a key that is published or being filled
    /// (unless `replace`), [`ErrorKind::Busy`] for a key of which clients still hold 64 older
    /// lives, [`ErrorKind::InvalidInput`] for a key that occurs twice, and
    /// [`ErrorKind::CapacityExceeded`] for a batch larger than the arena, or of more objects than
    /// it takes: as many as it has units, and 4096 at least.
    pub fn reserve(
        &mut self,
        plan: BatchPlan,
        ticket: Ticket,
        deadline: Instant,
        now: Instant,
    ) -> Result<Option<Grant>> {
        if self.closed {
            return Err(Error::new(ErrorKind::Closed, "reserve", "the arena is closed"));
        }
        let objects = || plan.samples.iter().flat_map(|s| &s.objects);
        if plan.samples.iter().any(|s| s.objects.is_empty()) {
            let why = "a sample has at least one object";
            return Err(Error::new(ErrorKind::InvalidInput, "reserve", why));
        }
        check_distinct(objects)?;
        let bytes = objects().fold(0u64, |sum, o| sum.saturating_add(footprint(o.bytes)));
        let count = objects().count();
        if bytes > self.space.report().capacity || count > self.max_objects() {
            return Err(self.never_fits(bytes, count));
        }
        self.check_older(&plan)?;
        self.check_absent(&plan)?;
        let mut new =
            Waiting { ticket, deadline, plan, bytes, objects: count, since: now, tried: None };
        if self.waiting.is_empty() {
            match self.attempt(&mut new, now) {
                Ok(grant) => return Ok(Some(grant)),
                Err(Refused::Error(error)) => return Err(error),
                Err(Refused::NoRoom) => {}
            }
        }
        self.waiting.push_back(new);
        Ok(None)
    }

    /// Takes a waiting batch out of line: nobody waits for the answer any more.
    pub fn cancel(&mut self, ticket: Ticket) {
        self.waiting.retain(|w| w.ticket != ticket);
    }

    /// Makes a filled batch readable, all at once, and returns the life of each object in order.
    ///
    /// No writer may be left. Fails with [`ErrorKind::Stale`] if a later reservation has taken over
    /// one of the keys; the batch is given up then.
    pub fn publish(&mut self, batch: u32, now: Instant) -> Result<Vec<Sequence>> {
        Ok(self.publish_lives(batch, now)?.into_iter().map(|(_, seq)| seq).collect())
    }

    /// [`Self::publish`], which also names the objects to [`Self::unpublish`].
    pub(crate) fn publish_lives(
        &mut self,
        batch: u32,
        now: Instant,
    ) -> Result<Vec<(u32, Sequence)>> {
        let taken_over = self.batches[batch as usize].objects.iter().find(|&&id| {
            let lives = self.lives.get(self.objects[id as usize].lives as usize);
            lives.is_none_or(|lives| lives.filling != Some(Id::new(id)))
        });
        if let Some(&id) = taken_over {
            let key = self.objects[id as usize].key.clone();
            self.abort(batch);
            return Err(Error::new(
                ErrorKind::Stale,
                "publish",
                "a later reservation has taken over the key",
            )
            .with("key", key)
            .remedy("drop this result: the retry that replaced it counts"));
        }
        let Batch { objects, holders, reserved } = self.batches.remove(batch as usize);
        self.counts.reserved_bytes -= reserved;
        self.changes += 1; // a batch in line may replace what is published here
        let mut born = Vec::with_capacity(objects.len());
        let mut exports = Vec::with_capacity(objects.len());
        for &id in &objects {
            self.last_seq += 1;
            let object = &mut self.objects[id as usize];
            (object.state, object.seq) = (State::Published, Sequence(self.last_seq));
            born.push((id, object.seq));
            self.counts.resident_objects += 1;
            if let Some(range) = &object.range {
                self.counts.resident_bytes += range.len();
                exports.push((range.offset(), Exported::new(id, range.len())));
            }
            let lives = &mut self.lives[object.lives as usize];
            lives.filling = None;
            let old = lives.current.replace(Id::new(id));
            let sample = &mut self.samples[object.sample as usize];
            if !sample.published {
                (sample.published, sample.since) = (true, now);
                let sample = object.sample;
                self.oldest.push(&mut self.samples, sample);
                self.counts.reserved_samples -= 1;
                self.counts.resident_samples += 1;
                self.counts.published_samples += 1;
            }
            if let Some(old) = old {
                self.retire(old.index());
            }
        }
        self.index.insert(exports, self.last_seq);
        if !holders.is_empty() {
            let known = |(sample, client)| (sample, self.clients.known(&client, now));
            let holders: HashMap<u32, u32> = holders.into_iter().map(known).collect();
            for &id in &objects {
                if let Some(&client) = holders.get(&self.objects[id as usize].sample) {
                    self.add_hold(id, client);
                }
            }
        }
        if !self.remembered.is_empty() {
            for id in objects {
                self.apply_remembered(id);
            }
        }
        Ok(born)
    }

    /// Frees what [`Self::publish_lives`] has published and nobody has learned of.
    pub(crate) fn unpublish(&mut self, lives: &[(u32, Sequence)]) {
        for &(id, seq) in lives {
            let is_there = |books: &Self| {
                let object = books.objects.get(id as usize);
                object.is_some_and(|o| o.state == State::Published && o.seq == seq)
            };
            while is_there(self) {
                match self.objects[id as usize].first_holder() {
                    Some(client) => self.end_hold(id, client),
                    None => self.retire(id),
                }
            }
        }
    }

    /// Gives a batch up: its ranges are free again. No writer may be left.
    pub fn abort(&mut self, batch: u32) {
        let Batch { objects, reserved, .. } = self.batches.remove(batch as usize);
        self.counts.reserved_bytes -= reserved;
        for id in objects {
            let object = self.objects.remove(id as usize);
            self.remembered.remove(&id);
            self.end_life(object.lives, &object.key, |lives| &mut lives.filling, id);
            if let Some(range) = object.range {
                self.space.free(range);
            }
            self.changes += 1;
            let sample = &mut self.samples[object.sample as usize];
            sample.live -= 1;
            if sample.live == 0 {
                self.samples.remove(object.sample as usize);
                self.counts.reserved_samples -= 1;
            }
        }
    }

    pub(super) fn poll_waiting(&mut self, now: Instant) -> Vec<(Ticket, Result<Grant>)> {
        let mut answers = Vec::new();
        loop {
            while let Some(mut head) = self.waiting.pop_front() {
                match self.attempt(&mut head, now) {
                    Ok(grant) => answers.push((head.ticket, Ok(grant))),
                    Err(Refused::Error(error)) => answers.push((head.ticket, Err(error))),
                    Err(Refused::NoRoom) => {
                        self.waiting.push_front(head);
                        break;
                    }
                }
            }
            let overdue = self.waiting.iter().position(|w| w.deadline <= now);
            let Some(before) = overdue else { return answers };
            let late = self.waiting.remove(before).expect("found above");
            let waited = now.saturating_duration_since(late.since);
            let error = match before > 0 && self.fits(&late) {
                true => self.not_its_turn(late.bytes, before, waited),
                false => self.no_room(late.bytes, late.objects, waited, now),
            };
            answers.push((late.ticket, Err(error)));
        }
    }

    fn attempt(&mut self, waiting: &mut Waiting, now: Instant) -> Result<Grant, Refused> {
        if waiting.tried == Some(self.changes) {
            return Err(Refused::NoRoom);
        }
        if waiting.tried.is_some() {
            self.check_older(&waiting.plan).map_err(Refused::Error)?;
            self.check_absent(&waiting.plan).map_err(Refused::Error)?;
        }
        let mut ranges = self.place(&waiting.plan, waiting.bytes);
        if ranges.is_none() && waiting.plan.replace && self.retire_old(&waiting.plan) {
            ranges = self.place(&waiting.plan, waiting.bytes);
        }
        waiting.tried = Some(self.changes);
        let ranges = ranges.ok_or(Refused::NoRoom)?;
        let plan =
            std::mem::replace(&mut waiting.plan, BatchPlan { samples: Vec::new(), replace: false });
        Ok(self.grant(plan, ranges, waiting.bytes, now))
    }

    /// Whether there is room for a batch now.
    fn fits(&mut self, waiting: &Waiting) -> bool {
        let ranges = self.place(&waiting.plan, waiting.bytes);
        let fits = ranges.is_some();
        ranges.into_iter().flatten().flatten().for_each(|range| self.space.free(range));
        fits
    }

    /// A range for each object with bytes, or none at all.
    ///
    /// Tries the batch's own order first, which readers may expect of its addresses, and then the
    /// longest first, which fits more often.
    fn place(&mut self, plan: &BatchPlan, bytes: u64) -> Option<Vec<Option<ArenaRange>>> {
        let lens = || plan.samples.iter().flat_map(|s| &s.objects).map(|o| o.bytes);
        let count = lens().count();
        if self.space.free_bytes() < bytes || self.objects.len() + count > self.max_objects() {
            return None;
        }
        self.place_in_order(count, lens().enumerate()).or_else(|| {
            let mut longest_first: Vec<(usize, u64)> = lens().enumerate().collect();
            longest_first.sort_by_key(|&(_, len)| std::cmp::Reverse(len));
            self.place_in_order(count, longest_first)
        })
    }

    fn place_in_order(
        &mut self,
        count: usize,
        lens: impl IntoIterator<Item = (usize, u64)>,
    ) -> Option<Vec<Option<ArenaRange>>> {
        let mut ranges: Vec<Option<ArenaRange>> = Vec::new();
        ranges.resize_with(count, || None);
        for (i, len) in lens {
            if len == 0 {
                continue;
            }
            match self.space.allocate(len) {
                Ok(range) => ranges[i] = Some(range),
                Err(_) => {
                    ranges.into_iter().flatten().for_each(|range| self.space.free(range));
                    return None;
                }
            }
        }
        Some(ranges)
    }

    fn grant(
        &mut self,
        plan: BatchPlan,
        ranges: Vec<Option<ArenaRange>>,
        reserved: u64,
        now: Instant,
    ) -> Grant {
        let offsets = ranges.iter().map(|r| r.as_ref().map(ArenaRange::offset)).collect();
        let mut ranges = ranges.into_iter();
        let mut batch =
            Batch { objects: Vec::with_capacity(ranges.len()), holders: Vec::new(), reserved };
        for planned in plan.samples {
            let live = planned.objects.len() as u32;
            let sample = self.samples.insert(Sample::filling(live, now)) as u32;
            self.counts.reserved_samples += 1;
            for PlannedObject { key, .. } in planned.objects {
                let lives = *self
                    .keys
                    .entry(key.clone())
                    .or_insert_with(|| self.lives.insert(Lives::default()) as u32);
                let id = self.objects.insert(Object {
                    key,
                    range: ranges.next().expect("one a planned object"),
                    seq: Sequence(0),
                    holders: Holders::None,
                    sample,
                    lives,
                    state: State::Filling,
                }) as u32;
                self.lives[lives as usize].filling = Some(Id::new(id));
                batch.objects.push(id);
            }
            batch.holders.extend(planned.holder.map(|client| (sample, client)));
        }
        self.counts.reserved_bytes += reserved;
        Grant { batch: self.batches.insert(batch) as u32, offsets }
    }

    fn check_absent(&self, plan: &BatchPlan) -> Result<()> {
        if plan.replace {
            return Ok(());
        }
        let keys = plan.samples.iter().flat_map(|s| &s.objects).map(|o| &o.key);
        for key in keys {
            if let Some(Lives { current, .. }) = self.lives(key) {
                let state = if current.is_some() { "published" } else { "being filled" };
                return Err(Error::new(
                    ErrorKind::AlreadyExists,
                    "reserve",
                    "the key already exists",
                )
                .with("key", key)
                .with("state", state)
                .remedy("free it first, or ask to replace it"));
            }
        }
        Ok(())
    }

    /// Frees what a replacing batch replaces; whether there was anything.
    fn retire_old(&mut self, plan: &BatchPlan) -> bool {
        let mut any = false;
        for key in plan.samples.iter().flat_map(|s| &s.objects).map(|o| &o.key) {
            if let Some(old) = self.lives(key).and_then(|lives| lives.current) {
                self.retire(old.index());
                any = true;
            }
        }
        any
    }
}

fn check_distinct<'a, I: Iterator<Item = &'a PlannedObject>>(
    objects: impl Fn() -> I,
) -> Result<()> {
    let mut seen = HashSet::new();
    let several = objects().nth(1).is_some();
    match several.then(|| objects().find(|o| !seen.insert(&*o.key))).flatten() {
        None => Ok(()),
        Some(twice) => {
            Err(Error::new(ErrorKind::InvalidInput, "reserve", "the batch holds a key twice")
                .with("key", &twice.key))
        }
    }
}
