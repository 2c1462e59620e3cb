//! Filling reserved ranges from what is published: by the CPU, or by the device that the arena is
//! on.

use std::time::{Duration, Instant};

use capture_arena::{Arena, SamplePlan};
#[cfg(feature = "cuda")]
use transport_core::RegionKind;
use transport_core::{Error, ErrorKind, Publication, Ready, RegionMut, Result};

use super::SinkReservation;

/// Tensor payload that publishing moved, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Moved {
    /// Through host memory of this process.
    pub(super) host: u64,
    /// Within the device.
    pub(super) device: u64,
}

/// Who copies.
#[derive(Debug)]
pub(super) enum Filler {
    Cpu,
    #[cfg(feature = "cuda")]
    Device(capture_arena::cuda::Copier),
}

impl Filler {
    /// The one for the arena's memory; its streams are made here.
    pub(super) fn new(arena: &Arena) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Some(block) = arena.backing().device_block() {
            return capture_arena::cuda::Copier::new(block.device()).map(Self::Device);
        }
        let _ = arena;
        Ok(Self::Cpu)
    }

    /// Whether samples are written by the CPU.
    pub(super) fn is_cpu(&self) -> bool {
        matches!(self, Self::Cpu)
    }

    /// Memory that unfinished copies may still write, in bytes.
    pub(super) fn quarantined_bytes(&self) -> u64 {
        match self {
            Self::Cpu => 0,
            #[cfg(feature = "cuda")]
            Self::Device(copier) => copier.quarantined_bytes(),
        }
    }

    /// Refuses sources that it cannot copy, before anything is reserved.
    pub(super) fn check(&self, batch: &[Publication]) -> Result<()> {
        for publication in batch {
            for (name, tensor) in &publication.tensors {
                let (why, remedy) = match self {
                    Self::Cpu if publication.unreachable() != Some(name) => continue,
                    Self::Cpu => (
                        "this sink cannot read device memory",
                        "copy the tensor to host memory first",
                    ),
                    #[cfg(feature = "cuda")]
                    Self::Device(_) if tensor.data.kind() == RegionKind::Unwritten => (
                        "a writer in host memory cannot fill an arena in device memory",
                        "reserve the sample, write it on the device, and publish it after that",
                    ),
                    #[cfg(feature = "cuda")]
                    Self::Device(_)
                        if !tensor.data.kind().is_host()
                            || device::may_come_from_host(&tensor.meta) =>
                    {
                        continue;
                    }
                    #[cfg(feature = "cuda")]
                    Self::Device(_) => (
                        "an arena in device memory needs CUDA captures",
                        "capture on the arena's device; only ids and masks may come from the host",
                    ),
                };
                return Err(Error::new(ErrorKind::Unsupported, "publish", why)
                    .with("key", publication.sample.object(name))
                    .with("tensor", &tensor.meta)
                    .remedy(remedy));
            }
        }
        Ok(())
    }

    /// Copies each source once it is final; done on return.
    pub(super) fn fill(
        &self,
        mut reservation: SinkReservation,
        batch: &[Publication],
        deadline: Option<Instant>,
    ) -> Result<SinkReservation> {
        let moved = match self {
            Self::Cpu => fill_by_cpu(&mut reservation, batch, deadline)?,
            #[cfg(feature = "cuda")]
            Self::Device(copier) => device::fill(copier, &mut reservation, batch, deadline)?,
        };
        for (i, publication) in batch.iter().enumerate() {
            reservation.set_aux_layer_ids(i, publication.aux_layer_ids.clone());
        }
        reservation.moved = Some(moved);
        Ok(reservation)
    }
}

/// What has to be reserved for a sample.
pub(super) fn plan_of(publication: &Publication) -> SamplePlan {
    let tensors = publication.tensors.iter();
    SamplePlan {
        sample: publication.sample.clone(),
        objects: tensors.map(|(name, tensor)| (name.clone(), tensor.meta.clone())).collect(),
        holder: publication.holder.clone(),
    }
}

fn left(deadline: Option<Instant>) -> Duration {
    deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()))
}

fn fill_by_cpu(
    reservation: &mut SinkReservation,
    batch: &[Publication],
    deadline: Option<Instant>,
) -> Result<Moved> {
    let mut host = 0;
    for (i, publication) in batch.iter().enumerate() {
        if let Ready::After(event) = &publication.ready {
            event.wait(left(deadline)).map_err(|e| e.with("sample", &publication.sample))?;
        }
        let tensors = 0..publication.tensors.len();
        let mut regions: Vec<_> = tensors.map(|j| reservation.take(i, j)).collect();
        let bytes = |region| RegionMut::as_mut_bytes(region).expect("an arena is host memory");
        let mut destinations: Vec<_> = regions.iter_mut().map(bytes).collect();
        publication
            .write_into(&mut destinations)
            .map_err(|e| e.with("sample", &publication.sample))?;
        for (j, region) in regions.into_iter().enumerate() {
            host += region.len() as u64;
            reservation.put_back(i, j, region)?;
        }
    }
    Ok(Moved { host, device: 0 })
}

#[cfg(feature = "cuda")]
mod device {
    use std::{
        sync::Arc,
        time::{Duration, Instant},
    };

    use capture_arena::cuda::{Copier, CopyPiece, Event};
    use transport_core::{Dtype, Publication, Ready, ReadyEvent, Result, TensorMeta};

    use super::{Moved, SinkReservation, left};

    /// Longest wait for copies without a deadline.
    const LONGEST: Duration = Duration::from_secs(24 * 3600);

    /// Whether a tensor may start on the host under a device protocol: ids and masks come with the
    /// request. What a model computes is floating point, and is on the device already.
    pub(super) fn may_come_from_host(meta: &TensorMeta) -> bool {
        matches!(
            meta.dtype(),
            Dtype::Int64
                | Dtype::Int32
                | Dtype::Int16
                | Dtype::Int8
                | Dtype::Uint64
                | Dtype::Uint32
                | Dtype::Uint16
                | Dtype::Uint8
                | Dtype::Bool
        )
    }

    /// Queues all copies behind the events of all sources, and waits for them once.
    pub(super) fn fill(
        copier: &Copier,
        reservation: &mut SinkReservation,
        batch: &[Publication],
        deadline: Option<Instant>,
    ) -> Result<Moved> {
        let mut seen: Vec<&Arc<dyn ReadyEvent>> = Vec::new();
        let mut after: Vec<&Event> = Vec::new();
        for publication in batch {
            let Ready::After(event) = &publication.ready else { continue };
            if seen.iter().any(|seen| Arc::ptr_eq(seen, event)) {
                continue;
            }
            match event.as_any().and_then(|any| any.downcast_ref()) {
                Some(event) => after.push(event),
                // Not one that a stream can wait for.
                None => {
                    event
                        .wait(left(deadline))
                        .map_err(|e| e.with("sample", &publication.sample))?;
                }
            }
            seen.push(event);
        }
        let objects = batch.iter().map(|publication| publication.tensors.len());
        let mut pieces = Vec::with_capacity(objects.sum());
        for (i, publication) in batch.iter().enumerate() {
            for (j, tensor) in publication.tensors.values().enumerate() {
                let dst = reservation.take(i, j);
                pieces.push(CopyPiece { src: tensor.data.clone(), dst });
            }
        }
        let until = deadline.unwrap_or_else(|| Instant::now() + LONGEST);
        // An arena's ranges reach to the next multiple of 512.
        let copied = copier.copy(pieces, &after, true, until)?;
        let mut regions = copied.regions.into_iter();
        for (i, publication) in batch.iter().enumerate() {
            for (j, region) in (0..publication.tensors.len()).zip(regions.by_ref()) {
                reservation.put_back(i, j, region)?;
            }
        }
        Ok(Moved { host: copied.host_bytes, device: copied.device_bytes })
    }
}
