//! Filling reserved ranges from what is published: by the CPU, or by the device that the arena is
//! on.

#[cfg(feature = "cuda")]
mod device;

use std::time::{Duration, Instant};

use capture_arena::{Arena, SamplePlan};
#[cfg(feature = "cuda")]
use transport_core::RegionKind;
use transport_core::{Error, ErrorKind, Publication, Ready, RegionMut, Result};

use super::{SinkConfig, SinkReservation};

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
    /// The CPU, and a device where that has the sources.
    #[cfg(feature = "cuda")]
    Both(device::ToHost),
}

impl Filler {
    /// The one for the arena's memory; its streams are made here.
    pub(super) fn new(arena: &Arena, config: &SinkConfig) -> Result<Self> {
        #[cfg(feature = "cuda")]
        match (arena.backing().device_block(), &config.staging) {
            (Some(block), None) => {
                return capture_arena::cuda::Copier::new(block.device()).map(Self::Device);
            }
            (None, Some(staging)) => return device::ToHost::new(staging, arena).map(Self::Both),
            (Some(_), Some(_)) => {
                let why = "an arena in device memory needs no staging";
                return Err(Error::new(ErrorKind::ConfigInvalid, "start sink", why)
                    .remedy("leave it out, or make the arena in host memory"));
            }
            (None, None) => {}
        }
        let _ = (arena, config);
        Ok(Self::Cpu)
    }

    /// Whether samples lie in host memory.
    pub(super) fn is_cpu(&self) -> bool {
        match self {
            Self::Cpu => true,
            #[cfg(feature = "cuda")]
            Self::Device(_) => false,
            #[cfg(feature = "cuda")]
            Self::Both(_) => true,
        }
    }

    /// Memory that unfinished copies may still write, in bytes.
    pub(super) fn quarantined_bytes(&self) -> u64 {
        match self {
            Self::Cpu => 0,
            #[cfg(feature = "cuda")]
            Self::Device(copier) => copier.quarantined_bytes(),
            #[cfg(feature = "cuda")]
            Self::Both(to_host) => to_host.quarantined_bytes(),
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
                        "copy the tensor to host memory first, or give the sink staging buffers",
                    ),
                    #[cfg(feature = "cuda")]
                    Self::Both(to_host)
                        if publication.unreachable() != Some(name)
                            || to_host.reads(tensor.data.kind()) =>
                    {
                        continue;
                    }
                    #[cfg(feature = "cuda")]
                    Self::Both(_) => (
                        "the tensor lies on another device than this sink reads",
                        "give the sink the staging buffers of that device",
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
            #[cfg(feature = "cuda")]
            Self::Both(to_host) => to_host.fill(&mut reservation, batch, deadline)?,
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
        host += write_sample(reservation, i, publication)?;
    }
    Ok(Moved { host, device: 0 })
}

/// Writes a sample whose sources are ready and in host memory; how many bytes those are.
fn write_sample(
    reservation: &mut SinkReservation,
    sample: usize,
    publication: &Publication,
) -> Result<u64> {
    let tensors = 0..publication.tensors.len();
    let mut regions: Vec<_> = tensors.map(|j| reservation.take(sample, j)).collect();
    let bytes = |region| RegionMut::as_mut_bytes(region).expect("an arena is host memory");
    let mut destinations: Vec<_> = regions.iter_mut().map(bytes).collect();
    publication.write_into(&mut destinations).map_err(|e| e.with("sample", &publication.sample))?;
    let mut written = 0;
    for (j, region) in regions.into_iter().enumerate() {
        written += region.len() as u64;
        reservation.put_back(sample, j, region)?;
    }
    Ok(written)
}
