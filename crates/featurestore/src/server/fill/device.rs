//! Filling on the device that the arena is on: batches that wait for it are written together.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use control_proto::capture::{Checksum, ChecksumKind};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, oneshot};
use transport_core::{Error, ErrorKind, RegionMut, Result};
use transport_mooncake_direct::{
    SinkReservation,
    cuda::{Content, DeviceTensors, Written},
};

use super::Fill;
use crate::source::checksum;

/// Batches that are written together at most.
const TOGETHER: usize = 32;

/// What writes an arena's tensors on its device.
///
/// One writing is under way at a time, and takes along whatever came while the one before was: other
/// processes that use the device wait for each piece of work by itself, and each costs a change of
/// context.
#[derive(Debug)]
pub(in crate::server) struct OnDevice {
    tensors: DeviceTensors,
    turn: Semaphore,
    waiting: Mutex<Vec<Job>>,
}

/// A batch, and who waits for it.
#[derive(Debug)]
struct Job {
    reservation: SinkReservation, // dropped before the batch's place is
    fill: Fill,
    done: oneshot::Sender<Filled>,
}

type Filled = Result<(SinkReservation, Vec<Vec<Checksum>>)>;

/// A batch whose regions are taken.
struct Begun {
    job: Job,
    tensors: usize,
    /// Checksums of bytes that were given.
    given: Vec<Option<Checksum>>,
}

impl OnDevice {
    pub(in crate::server) fn new(tensors: DeviceTensors) -> Self {
        Self { tensors, turn: Semaphore::new(1), waiting: Mutex::default() }
    }

    pub(super) async fn fill(self: &Arc<Self>, fill: Fill, reservation: SinkReservation) -> Filled {
        let (done, filled) = oneshot::channel();
        self.waiting.lock().push(Job { reservation, fill, done });
        let this = self.clone();
        // A task of its own, because others' batches may be among those that it writes.
        tokio::spawn(async move {
            let _turn = this.turn.acquire().await.expect("never closed");
            let jobs = {
                let mut waiting = this.waiting.lock();
                let count = waiting.len().min(TOGETHER);
                waiting.drain(..count).collect::<Vec<_>>()
            };
            if jobs.is_empty() {
                return; // an earlier turn has taken it along
            }
            let writer = this.clone();
            // Who waits learns from the channels if this panics.
            let _ = tokio::task::spawn_blocking(move || writer.write(jobs)).await;
        });
        filled.await.unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Unexpected, "capture", "filling a sample failed"))
        })
    }

    /// Writes batches and tells who waits for them. One that cannot be begun fails alone.
    fn write(&self, jobs: Vec<Job>) {
        let (mut begun, mut wanted, mut bound) = (Vec::new(), Vec::new(), Duration::ZERO);
        let mut summed = false;
        for mut job in jobs {
            let mut own = Vec::new();
            match job.begin(&mut own) {
                Ok(given) => {
                    bound = bound.max(job.fill.state.deadline);
                    summed |= job.fill.checksums.is_some();
                    begun.push(Begun { job, tensors: own.len(), given });
                    wanted.extend(own);
                }
                Err(error) => {
                    drop(own);
                    job.fail(error);
                }
            }
        }
        if begun.is_empty() {
            return;
        }
        match self.tensors.write(wanted, summed, Instant::now() + bound) {
            Ok(Written { regions, sums, .. }) => {
                let (mut regions, mut sums) = (regions.into_iter(), sums.into_iter());
                for begun in begun {
                    let own = regions.by_ref().take(begun.tensors).collect();
                    let made = sums.by_ref().take(begun.tensors).collect();
                    begun.end(own, made);
                }
            }
            Err(error) => {
                let again = || Error::new(error.kind(), "capture", error.to_string());
                for Begun { job, .. } in begun {
                    job.fail(again());
                }
            }
        }
    }
}

impl Job {
    /// Takes every region, with what it is to hold. What is made is made where it is published; what
    /// is given goes through host memory, and is counted.
    fn begin(&mut self, wanted: &mut Vec<(RegionMut, Content)>) -> Result<Vec<Option<Checksum>>> {
        let Self { fill, reservation, .. } = self;
        let source = &fill.state.source;
        let (mut given, mut host_bytes) = (Vec::new(), 0);
        for (sample, (&place, &objects)) in fill.places.iter().zip(&fill.objects).enumerate() {
            let prompt = &fill.work.prompts[place];
            for object in 0..objects {
                let content = match source.made(prompt, object) {
                    Some(stream) => {
                        given.push(None);
                        Content::Synthetic { counter: stream.counter() }
                    }
                    None => {
                        let reserved = &reservation.samples()[sample];
                        let mut bytes = vec![0; reserved.objects[object].meta.nbytes() as usize];
                        source.read(prompt, object, &mut bytes)?;
                        source.check(prompt, object, &bytes)?;
                        host_bytes += bytes.len() as u64;
                        given.push(fill.checksums.map(|kind| checksum(kind, &bytes)));
                        Content::Host(bytes)
                    }
                };
                wanted.push((reservation.take(sample, object), content));
            }
        }
        reservation.count_host_payload(host_bytes);
        Ok(given)
    }

    /// In this order: ranges are given up before the place is.
    fn fail(self, error: Error) {
        let Self { reservation, fill, done } = self;
        drop(reservation);
        let _ = done.send(Err(error)); // nobody may wait any more
        drop(fill);
    }
}

impl Begun {
    /// Gives the regions back to the reservation, and the reservation to who waits for it.
    fn end(self, regions: Vec<RegionMut>, made: Vec<u64>) {
        let Self { mut job, given, .. } = self;
        let mut regions = regions.into_iter();
        for (sample, &objects) in job.fill.objects.iter().enumerate() {
            for (object, region) in (0..objects).zip(regions.by_ref()) {
                if let Err(error) = job.reservation.put_back(sample, object, region) {
                    return job.fail(error);
                }
            }
        }
        let Job { reservation, fill, done } = job;
        // Of bytes that were given, the sum is that of the host: so the way to the device is
        // checked too.
        let sum = |(made, given): (u64, Option<Checksum>)| {
            given.unwrap_or(Checksum::new(ChecksumKind::Mixsum, made))
        };
        let mut sums = made.into_iter().zip(given).map(sum);
        let sample = |&objects: &usize| sums.by_ref().take(objects).collect();
        let sums = fill.objects.iter().map(sample).collect();
        let _ = done.send(Ok((reservation, sums))); // as above
    }
}
