//! What a device copies: into an arena of its own, or out of its memory into the host's.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{
    Arena,
    cuda::{Copier, CopyPiece, Event, PageLock, Part, Staging},
};
use transport_core::{Dtype, Publication, Ready, ReadyEvent, RegionKind, Result, TensorMeta};

use super::{Moved, SinkReservation, left, write_sample};

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
    let after = events(batch, deadline)?;
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

/// What copies on a stream wait for. Events that no stream can wait for are waited for here.
fn events<'a>(
    batch: impl IntoIterator<Item = &'a Publication>,
    deadline: Option<Instant>,
) -> Result<Vec<&'a Event>> {
    let mut seen: Vec<&Arc<dyn ReadyEvent>> = Vec::new();
    let mut after = Vec::new();
    for publication in batch {
        let Ready::After(event) = &publication.ready else { continue };
        if seen.iter().any(|seen| Arc::ptr_eq(seen, event)) {
            continue;
        }
        match event.as_any().and_then(|any| any.downcast_ref()) {
            Some(event) => after.push(event),
            None => {
                event.wait(left(deadline)).map_err(|e| e.with("sample", &publication.sample))?
            }
        }
        seen.push(event);
    }
    Ok(after)
}

/// Copies tensors of a device into an arena in host memory, which does not move meanwhile.
#[derive(Debug)]
pub(in crate::sink) struct ToHost {
    staging: Staging,
    lock: Arc<PageLock>,
}

impl ToHost {
    pub(super) fn new(staging: &Staging, arena: &Arena) -> Result<Self> {
        let lock = Arc::new(PageLock::new(staging.device(), arena.backing())?);
        Ok(Self { staging: staging.clone(), lock })
    }

    pub(super) fn quarantined_bytes(&self) -> u64 {
        self.staging.quarantined_bytes()
    }

    /// Whether the device reads such memory.
    pub(super) fn reads(&self, kind: RegionKind) -> bool {
        kind == self.staging.device().region_kind()
    }

    /// Starts what the device copies, writes the rest meanwhile, and waits for both.
    pub(super) fn fill(
        &self,
        reservation: &mut SinkReservation,
        batch: &[Publication],
        deadline: Option<Instant>,
    ) -> Result<Moved> {
        let on_device = |publication: &&Publication| {
            publication.tensors.values().any(|tensor| self.reads(tensor.data.kind()))
        };
        let after = events(batch.iter().filter(on_device), deadline)?;
        let (mut to, mut parts, mut places) = (Vec::new(), Vec::new(), Vec::new());
        let mut host = 0;
        for (i, publication) in batch.iter().enumerate().filter(|(_, p)| on_device(p)) {
            for (j, tensor) in publication.tensors.values().enumerate() {
                if self.reads(tensor.data.kind()) {
                    host += tensor.data.len() as u64;
                    parts.push(Part { src: tensor.data.clone(), to: to.len(), at: 0 });
                    to.push(reservation.take(i, j).keeping(self.lock.clone()));
                    places.push((i, j));
                }
            }
        }
        // What is not waited for stays out of use, with the range, the sources and the lock.
        let mut crossing = self.staging.begin(to, true)?;
        for event in after {
            crossing.after(event)?;
        }
        if !parts.is_empty() {
            crossing.send(parts)?;
        }
        for (i, publication) in batch.iter().enumerate() {
            let beside = on_device(&publication);
            if beside && publication.tensors.values().all(|t| self.reads(t.data.kind())) {
                continue;
            }
            if let Ready::After(event) = &publication.ready {
                event.wait(left(deadline)).map_err(|e| e.with("sample", &publication.sample))?;
            }
            if !beside {
                host += write_sample(reservation, i, publication)?;
                continue;
            }
            for (j, tensor) in publication.tensors.values().enumerate() {
                let Some(source) = tensor.data.as_bytes() else { continue };
                reservation.bytes_mut(i, j).copy_from_slice(source);
                host += source.len() as u64;
            }
        }
        let until = deadline.unwrap_or_else(|| Instant::now() + LONGEST);
        for (region, (i, j)) in crossing.finish(until)?.into_iter().zip(places) {
            reservation.put_back(i, j, region)?;
        }
        Ok(Moved { host, device: 0 })
    }
}
