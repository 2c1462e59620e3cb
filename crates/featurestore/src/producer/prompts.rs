//! Prompts that wait to be captured.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;
use transport_core::{Error, ErrorKind, ErrorStatus, Result, SampleId};

use super::capture::{NO_ROOM, PUT_OFF};

/// One prompt to capture.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Task {
    /// The sample that it becomes.
    pub sample_id: SampleId,
    /// Token ids.
    pub input_ids: Vec<i64>,
    /// 1 where a token is trained on, 0 elsewhere.
    pub loss_mask: Vec<i64>,
    /// Place in the order of publication.
    pub(super) order: u64,
    /// Attempts that failed.
    pub(super) attempt: u32,
    /// Since when servers have had no room for it.
    refused: Option<Instant>,
    /// Room that the sample takes in an arena, if that is known better than by its layout.
    room: Option<u64>,
}

impl Task {
    /// A prompt that was not tried yet.
    pub fn new(sample_id: SampleId, input_ids: Vec<i64>, loss_mask: Vec<i64>) -> Self {
        Self { sample_id, input_ids, loss_mask, order: 0, attempt: 0, refused: None, room: None }
    }

    /// Tells how many bytes of an arena the sample takes.
    #[must_use]
    pub fn room(mut self, bytes: u64) -> Self {
        self.room = Some(bytes);
        self
    }

    /// Bytes of an arena that the sample takes, where a layout takes `layout` for its tokens.
    pub(super) fn bytes(&self, layout: impl FnOnce(u64) -> u64) -> u64 {
        self.room.unwrap_or_else(|| layout(self.tokens()))
    }

    pub(super) fn tokens(&self) -> u64 {
        self.input_ids.len() as u64
    }
}

/// Which prompts go into one request together.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    serde::Serialize,
    serde::Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Batching {
    /// Neighbours, as they come.
    #[default]
    Shuffle,
    /// Those of similar length, so that little is computed for padding.
    LengthBucketed,
}

/// Prompts that wait, and how often each has failed.
#[derive(Debug)]
pub(super) struct Pool {
    waiting: VecDeque<Task>,
    batching: Batching,
    attempts: u32,
    pub(super) retries: u64,
}

impl Pool {
    pub(super) fn new(batching: Batching, attempts: u32) -> Self {
        Self { waiting: VecDeque::new(), batching, attempts: attempts.max(1), retries: 0 }
    }

    /// Adds a prompt behind the others; before them if it was sent already and had no room.
    pub(super) fn add(&mut self, task: Task) {
        match task.refused {
            Some(_) => self.waiting.push_front(task),
            None => self.waiting.push_back(task),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Bytes that the next lease needs at most.
    pub(super) fn next_bytes(&self, most: usize, size: impl Fn(&Task) -> u64) -> u64 {
        self.waiting.iter().take(most).map(size).sum()
    }

    /// The prompt that is in the next lease for sure.
    pub(super) fn oldest(&self) -> Option<&Task> {
        self.waiting.front()
    }

    /// Puts the largest prompt of at most `most` bytes before all others, or else the smallest.
    pub(super) fn largest_first(&mut self, most: u64, size: impl Fn(&Task) -> u64) {
        let fit = |at: &usize| {
            let bytes = size(&self.waiting[*at]);
            if bytes <= most { (0, most - bytes) } else { (1, bytes) }
        };
        let best = (0..self.waiting.len()).min_by_key(fit);
        if let Some(task) = best.and_then(|at| self.waiting.remove(at)) {
            self.waiting.push_front(task);
        }
    }

    /// Puts the smallest prompt before all others.
    pub(super) fn smallest_first(&mut self, size: impl Fn(&Task) -> u64) {
        self.largest_first(0, size);
    }

    /// Takes up to `most` prompts for one request, as long as their `size` fits into `room`. The
    /// oldest is always among them, so that none waits for ever.
    pub(super) fn lease(
        &mut self,
        most: usize,
        mut room: u64,
        size: impl Fn(&Task) -> u64,
    ) -> Vec<Task> {
        let mut lease = self.arranged(most);
        let mut fits = |task: &Task| {
            let left = room.checked_sub(size(task));
            room = left.unwrap_or(0);
            left.is_some()
        };
        let whole = lease.iter().skip_while(|task| fits(task)).count();
        let keep = (lease.len() - whole).max(1).min(lease.len());
        for task in lease.drain(keep..).rev() {
            self.waiting.push_front(task);
        }
        lease
    }

    fn arranged(&mut self, most: usize) -> Vec<Task> {
        let Some(oldest) = self.waiting.pop_front() else { return Vec::new() };
        let mut lease = vec![oldest];
        match self.batching {
            Batching::Shuffle => {
                let more = most.saturating_sub(1).min(self.waiting.len());
                lease.extend(self.waiting.drain(..more));
            }
            Batching::LengthBucketed => {
                // Of what waits, those nearest in length to the oldest.
                let tokens = lease[0].tokens();
                let mut near: Vec<(u64, usize)> = self
                    .waiting
                    .iter()
                    .enumerate()
                    .map(|(at, task)| (task.tokens().abs_diff(tokens), at))
                    .collect();
                near.sort_unstable();
                near.truncate(most.saturating_sub(1));
                let mut at: Vec<usize> = near.into_iter().map(|(_, at)| at).collect();
                at.sort_unstable_by(|a, b| b.cmp(a));
                let taken = at.into_iter().filter_map(|at| self.waiting.remove(at));
                lease.extend(taken.collect::<Vec<_>>().into_iter().rev());
            }
        }
        lease
    }

    /// Takes the prompt with that place in the order, if it waits.
    pub(super) fn take(&mut self, order: u64) -> Option<Task> {
        let at = self.waiting.iter().position(|task| task.order == order)?;
        self.waiting.remove(at)
    }

    /// Takes note that a server had no room, or put the prompt off, and gives the prompt back to be sent again: that counts
    /// as a failed attempt only once it has gone on for `most`.
    pub(super) fn refused(
        &mut self,
        mut task: Task,
        error: &Error,
        most: Duration,
    ) -> Result<Task> {
        if task.refused.get_or_insert_with(Instant::now).elapsed() < most {
            return Ok(task);
        }
        task.refused = None;
        self.failed(task, error)
    }

    /// Takes note of a failed attempt, and gives the prompt back to be tried again later, until it
    /// has had all its attempts.
    pub(super) fn failed(&mut self, mut task: Task, error: &Error) -> Result<Task> {
        task.attempt += 1;
        if !error.is_temporary() || task.attempt >= self.attempts {
            let (kind, why, remedy) = match error.kind() {
                NO_ROOM if error.is_temporary() => (
                    NO_ROOM,
                    "no server had room for a prompt",
                    "give the servers larger arenas, or settle samples sooner, then run again",
                ),
                PUT_OFF if error.is_temporary() => (
                    PUT_OFF,
                    "the servers put a prompt off for others that came before",
                    "send fewer requests at a time, or let them wait for longer, then run again",
                ),
                _ => (
                    ErrorKind::InvalidInput,
                    "a prompt cannot be captured",
                    "look at the prompt and at the servers' logs, then run again",
                ),
            };
            return Err(Error::new(kind, "capture", why)
                .status(ErrorStatus::Permanent)
                .with("sample_id", &task.sample_id)
                .with("attempts", task.attempt)
                .with("reason", error)
                .remedy(remedy));
        }
        self.retries += 1;
        Ok(task)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(batching: Batching, lengths: &[usize]) -> Pool {
        let mut pool = Pool::new(batching, 3);
        for (i, &length) in lengths.iter().enumerate() {
            let id = SampleId::new(format!("t{i}")).unwrap();
            pool.add(Task::new(id, vec![0; length], vec![1; length]));
        }
        pool
    }

    fn lease(pool: &mut Pool, most: usize) -> Vec<Task> {
        pool.lease(most, u64::MAX, Task::tokens)
    }

    fn lengths(lease: &[Task]) -> Vec<u64> {
        lease.iter().map(Task::tokens).collect()
    }

    #[test]
    fn buckets_hold_similar_lengths_and_always_the_oldest() {
        let given = [100, 5, 99, 7, 101, 6];
        let mut pool = pool(Batching::LengthBucketed, &given);
        assert_eq!(lengths(&lease(&mut pool, 3)), [100, 99, 101]);
        assert_eq!(lengths(&lease(&mut pool, 2)), [5, 6]);
        assert_eq!(lengths(&lease(&mut pool, 9)), [7]);
        assert!(lease(&mut pool, 9).is_empty());
        let mut pool = self::pool(Batching::Shuffle, &given);
        assert_eq!(lengths(&lease(&mut pool, 4)), [100, 5, 99, 7]);
    }

    #[test]
    fn a_lease_ends_where_the_room_does_and_what_is_left_keeps_its_place() {
        let mut pool = pool(Batching::Shuffle, &[4, 3, 2, 1]);
        assert_eq!(lengths(&pool.lease(4, 8, Task::tokens)), [4, 3]);
        assert_eq!(lengths(&pool.lease(4, 0, Task::tokens)), [2], "never none");
        assert_eq!(lengths(&pool.lease(4, 8, Task::tokens)), [1]);
        assert!(pool.lease(4, 8, Task::tokens).is_empty());
        let mut pool = self::pool(Batching::Shuffle, &[4, 1, 2]);
        pool.smallest_first(Task::tokens);
        assert_eq!(lengths(&lease(&mut pool, 3)), [1, 4, 2]);
        let mut pool = self::pool(Batching::Shuffle, &[9, 2, 5, 3]);
        pool.largest_first(4, Task::tokens);
        assert_eq!(lengths(&lease(&mut pool, 2)), [3, 9]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_prompt_without_room_goes_first_again_and_fails_late() {
        let most = Duration::from_secs(30);
        let full = Error::new(ErrorKind::Busy, "capture", "no room");
        let mut pool = pool(Batching::Shuffle, &[1, 2]);
        let task = lease(&mut pool, 1).remove(0);
        let task = pool.refused(task, &full, most).unwrap();
        pool.add(task);
        let task = lease(&mut pool, 1).remove(0);
        assert_eq!((task.tokens(), task.attempt, pool.retries), (1, 0, 0));
        tokio::time::advance(most).await;
        let task = pool.refused(task, &full, most).unwrap();
        assert_eq!((task.attempt, pool.retries), (1, 1), "half a minute is a failure");
        pool.add(task);
        assert_eq!(lengths(&lease(&mut pool, 2)), [2, 1], "like any other");
    }

    #[test]
    fn a_poisoned_prompt_is_given_up_and_goes_to_the_end_before() {
        let mut pool = pool(Batching::Shuffle, &[1, 2]);
        let busy = || Error::new(ErrorKind::Busy, "capture", "full");
        for _ in 0..2 {
            let task = lease(&mut pool, 1).remove(0);
            assert_eq!(task.tokens(), 1);
            let again = pool.failed(task, &busy()).unwrap();
            pool.add(again);
            let other = lease(&mut pool, 1).remove(0);
            assert_eq!(other.tokens(), 2, "it does not hold up others");
            pool.add(other);
        }
        let task = lease(&mut pool, 1).remove(0);
        let error = pool.failed(task, &busy()).unwrap_err();
        assert_eq!(error.context("attempts"), Some("3"), "{error}");
        let task = lease(&mut pool, 1).remove(0);
        let refused = Error::new(ErrorKind::Corrupt, "check", "other layers");
        assert!(pool.failed(task, &refused).is_err(), "another attempt does not mend it");
        assert_eq!(pool.retries, 2);
    }
}
