//! Ranges while they are filled: who may write them, and when they come back.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use crossbeam_channel::Sender;
use tokio::sync::oneshot;
use transport_core::{
    ClientId, Error, ErrorKind, FeatureName, RegionMut, RemoteAddr, Result, SampleKey, Sequence,
    TensorMeta,
};

use crate::{
    Backing,
    arena::{BatchPlan, PlannedObject, PlannedSample},
    owner::{Command, Desk, Granted, block_on, closed},
};

/// A sample to reserve ranges for.
#[derive(Clone, Debug)]
pub struct SamplePlan {
    /// Identity.
    pub sample: SampleKey,
    /// Tensors, in the order in which they are described.
    pub objects: Vec<(FeatureName, TensorMeta)>,
    /// Client that holds the sample from its publication on.
    pub holder: Option<ClientId>,
}

/// A sample whose ranges are reserved.
#[derive(Clone, Debug)]
pub struct ReservedSample {
    /// Identity.
    pub sample: SampleKey,
    /// Tensors, in order.
    pub objects: Vec<ReservedObject>,
}

/// A tensor whose range is reserved.
#[derive(Clone, Debug)]
pub struct ReservedObject {
    /// Name within the sample.
    pub name: FeatureName,
    /// Element type and shape.
    pub meta: TensorMeta,
    /// Where its bytes will be read. The arena's base for a tensor without bytes, which takes no
    /// range.
    pub address: RemoteAddr,
}

/// A sample that is readable.
#[derive(Clone, Debug)]
pub struct PublishedSample {
    /// Identity.
    pub sample: SampleKey,
    /// Tensors, in order.
    pub objects: Vec<PublishedObject>,
}

/// A tensor that is readable.
#[derive(Clone, Debug)]
pub struct PublishedObject {
    /// Name within the sample.
    pub name: FeatureName,
    /// Element type and shape.
    pub meta: TensorMeta,
    /// Where its bytes are; the arena's base for a tensor without bytes.
    pub address: Option<RemoteAddr>,
    /// Which life of its key this is.
    pub seq: Sequence,
}

/// Ranges of a batch that are being filled.
///
/// Dropping it gives the batch up; the ranges come back when the last region that
/// [`Self::take`] handed out is gone too.
#[must_use = "dropping a reservation gives it up"]
pub struct Reservation {
    guard: Arc<FillGuard>,
    base: RemoteAddr,
    samples: Vec<ReservedSample>,
    regions: Vec<Vec<Option<RegionMut>>>, // none while a writer has it
}

impl Reservation {
    pub(crate) fn new(granted: Granted, samples: Vec<SamplePlan>, base: RemoteAddr) -> Self {
        let Granted { grant, guard } = granted;
        let mut offsets = grant.offsets.into_iter();
        let mut regions = Vec::with_capacity(samples.len());
        let mut reserve = |sample: SamplePlan| {
            let mut own = Vec::with_capacity(sample.objects.len());
            let objects = sample.objects.into_iter().map(|(name, meta)| {
                let offset = offsets.next().expect("one a planned object");
                own.push(Some(match offset {
                    Some(at) => guard.backing.region(at, meta.nbytes(), guard.clone()),
                    None => RegionMut::zeroed(0).expect("no bytes always fit"),
                }));
                let address = RemoteAddr(base.0 + offset.map_or(0, |at| at.0));
                ReservedObject { name, meta, address }
            });
            let reserved = ReservedSample { sample: sample.sample, objects: objects.collect() };
            regions.push(own);
            reserved
        };
        let samples = samples.into_iter().map(&mut reserve).collect();
        Self { guard, base, samples, regions }
    }

    /// The samples, in the order in which they were asked for.
    pub fn samples(&self) -> &[ReservedSample] {
        &self.samples
    }

    /// The bytes of one tensor. They hold whatever was there before.
    ///
    /// # Panics
    /// If there is no such tensor, its region is taken, or the arena is in device memory, which is
    /// written at the address of [`Self::take`]'s region.
    pub fn bytes_mut(&mut self, sample: usize, object: usize) -> &mut [u8] {
        let region = self.regions[sample][object].as_mut().expect("the region is not taken");
        region.as_mut_bytes().expect("an arena in host memory")
    }

    /// Hands the region of one tensor to a writer, on whatever thread. It has to come back through
    /// [`Self::put_back`] before the batch can be published.
    ///
    /// # Panics
    /// If there is no such tensor, or its region is taken already.
    pub fn take(&mut self, sample: usize, object: usize) -> RegionMut {
        self.regions[sample][object].take().expect("the region is not taken")
    }

    /// Takes a region back from its writer.
    ///
    /// Refuses any other region than the one that [`Self::take`] handed out there.
    pub fn put_back(&mut self, sample: usize, object: usize, region: RegionMut) -> Result<()> {
        let refuse = |why| Error::new(ErrorKind::InvalidInput, "put back region", why);
        let (Some(reserved), Some(place)) = (
            self.samples.get(sample).and_then(|s| s.objects.get(object)),
            self.regions.get_mut(sample).and_then(|s| s.get_mut(object)),
        ) else {
            return Err(refuse("the reservation has no such tensor"));
        };
        let nbytes = reserved.meta.nbytes();
        let expected = match nbytes {
            0 => region.address() as u64,
            _ => self.guard.backing.address() + (reserved.address.0 - self.base.0),
        };
        let fits = region.len() as u64 == nbytes && region.address() as u64 == expected;
        if place.is_some() || !fits {
            return Err(refuse("not the region that was taken")
                .with("tensor", &reserved.name)
                .with("expected_bytes", nbytes)
                .with("found_bytes", region.len()));
        }
        *place = Some(region);
        Ok(())
    }

    /// Makes the batch readable, all at once.
    ///
    /// Dropping the future may leave the batch unpublished or published and freed again, but never
    /// published for good.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if a writer still has a region, [`ErrorKind::Stale`] if a later
    /// reservation has taken over one of the keys, [`ErrorKind::Closed`]. The batch is given up.
    pub async fn publish(self) -> Result<Vec<PublishedSample>> {
        let Self { guard, samples, regions, .. } = self;
        let taken = regions.iter().zip(&samples).find_map(|(regions, sample)| {
            let object = regions.iter().position(Option::is_none)?;
            Some(sample.sample.object(&sample.objects[object].name))
        });
        if let Some(key) = taken {
            return Err(Error::new(ErrorKind::Busy, "publish", "a writer still has a region")
                .with("key", key)
                .remedy("put every region back before publishing"));
        }
        drop(regions); // no writer is left
        let births = guard.publish()?.await.map_err(|_| closed("publish"))??;
        let mut seqs = births.heard().into_iter().map(|(_, seq)| seq);
        let object = |object: ReservedObject, seq| PublishedObject {
            name: object.name,
            meta: object.meta,
            address: Some(object.address),
            seq,
        };
        Ok(samples
            .into_iter()
            .map(|sample| {
                // Zip asks its left side first, so it never takes one of `seqs` too many.
                let objects = sample.objects.into_iter().zip(seqs.by_ref());
                PublishedSample {
                    sample: sample.sample,
                    objects: objects.map(|(o, seq)| object(o, seq)).collect(),
                }
            })
            .collect())
    }

    /// [`Self::publish`] for threads that may block.
    pub fn publish_blocking(self) -> Result<Vec<PublishedSample>> {
        block_on(self.publish())
    }
}

/// Checks a batch and splits it into what the books and what the writer need to know.
pub(crate) fn plan(batch: Vec<SamplePlan>, replace: bool) -> Result<(BatchPlan, Vec<SamplePlan>)> {
    let planned = |sample: &SamplePlan| PlannedSample {
        objects: sample
            .objects
            .iter()
            .map(|(name, meta)| PlannedObject {
                key: sample.sample.object(name).shared(),
                bytes: meta.nbytes(),
            })
            .collect(),
        holder: sample.holder.clone(),
    };
    if batch.is_empty() {
        let why = "the batch holds no samples";
        return Err(Error::new(ErrorKind::InvalidInput, "reserve", why));
    }
    Ok((BatchPlan { samples: batch.iter().map(planned).collect(), replace }, batch))
}

/// What a batch has become. Freed again if nobody takes it, wherever the message was by then.
pub(crate) struct Births {
    lives: Vec<(u32, Sequence)>, // objects of the books
    commands: Sender<Command>,
}

impl Births {
    pub(crate) fn new(lives: Vec<(u32, Sequence)>, commands: Sender<Command>) -> Self {
        Self { lives, commands }
    }

    /// The objects; from here on they stay.
    pub(crate) fn heard(mut self) -> Vec<(u32, Sequence)> {
        std::mem::take(&mut self.lives)
    }
}

impl Drop for Births {
    fn drop(&mut self) {
        if !self.lives.is_empty() {
            // A closed arena needs no range back.
            let _ = self.commands.send(Command::Unpublish(std::mem::take(&mut self.lives)));
        }
    }
}

/// Kept by every region of a batch: the last one to go gives the batch up, unless it was settled.
pub(crate) struct FillGuard {
    batch: u32,
    settled: AtomicBool,
    desk: Desk,
    backing: Backing, // a writer may outlive the arena
}

impl FillGuard {
    pub(crate) fn new(batch: u32, desk: Desk, backing: Backing) -> Self {
        Self { batch, settled: AtomicBool::new(false), desk, backing }
    }

    fn publish(&self) -> Result<oneshot::Receiver<Result<Births>>> {
        let (reply, answer) = oneshot::channel();
        self.settled.store(true, Ordering::Relaxed);
        self.desk.ask("publish", Command::Publish { batch: self.batch, reply })?;
        Ok(answer)
    }
}

impl Drop for FillGuard {
    fn drop(&mut self) {
        if !*self.settled.get_mut() {
            // A closed arena needs no range back.
            self.desk.tell(Command::Abort(self.batch));
        }
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation").field("samples", &self.samples).finish_non_exhaustive()
    }
}
