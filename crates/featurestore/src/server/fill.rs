//! Filling what was reserved: by the CPU, or on the device that the arena is on.

#[cfg(feature = "cuda")]
mod device;

use std::sync::Arc;

use control_proto::capture::{Checksum, ChecksumKind};
use transport_core::{Error, ErrorKind, Result};

#[cfg(feature = "cuda")]
pub(super) use device::OnDevice;

use super::{Shared, generate::Asking, publisher::Reserved};

/// A batch to fill.
#[derive(Debug)]
pub(super) struct Fill {
    state: Arc<Shared>,
    work: Arc<Asking>,
    /// Which prompts it is of.
    places: Vec<usize>,
    /// How many tensors each sample has.
    objects: Vec<usize>,
    checksums: Option<ChecksumKind>,
}

impl Fill {
    pub(super) fn new(
        state: Arc<Shared>,
        work: Arc<Asking>,
        places: Vec<usize>,
        objects: Vec<usize>,
        checksums: Option<ChecksumKind>,
    ) -> Self {
        Self { state, work, places, objects, checksums }
    }

    /// Fills the batch on a blocking thread, of which there are as many as `--fill-threads`. Returns
    /// the checksums of each sample's tensors, if they were asked for.
    pub(super) async fn run(self, reservation: Reserved) -> Result<(Reserved, Vec<Vec<Checksum>>)> {
        #[cfg(feature = "cuda")]
        let reservation = match (reservation, self.state.publisher.device().cloned()) {
            (Reserved::Arena(arena), Some(device)) => {
                let (arena, sums) = device.fill(self, arena).await?;
                return Ok((Reserved::Arena(arena), sums));
            }
            (elsewhere, _) => elsewhere,
        };
        let mut reservation = reservation;
        let filling = tokio::task::spawn_blocking(move || {
            let filled = self.fill_by_cpu(&mut reservation);
            // In this order: ranges are given up before the place is, also if nobody waits.
            filled.map(|sums| (reservation, sums, self))
        });
        let (reservation, sums, _) = filling.await.unwrap_or_else(|e| {
            Err(Error::new(ErrorKind::Unexpected, "capture", "filling a sample failed").source(e))
        })?;
        Ok((reservation, sums))
    }

    fn fill_by_cpu(&self, reservation: &mut Reserved) -> Result<Vec<Vec<Checksum>>> {
        let sample = |(sample, (&place, &objects)): (usize, (&usize, &usize))| {
            let prompt = &self.work.prompts[place];
            let mut sums = Vec::new();
            for object in 0..objects {
                let out = reservation.bytes_mut(sample, object);
                sums.extend(self.state.source.fill(prompt, object, out, self.checksums)?);
            }
            Ok(sums)
        };
        self.places.iter().zip(&self.objects).enumerate().map(sample).collect()
    }
}
