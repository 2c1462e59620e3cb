//! Filling what was reserved: by the CPU, or on the device that the arena is on.

use std::sync::Arc;

use control_proto::capture::{Checksum, ChecksumKind};
use transport_core::{Error, ErrorKind, Result};

use super::{Shared, generate::Asking, publisher::Reserved};

/// A batch to fill.
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
    pub(super) async fn run(
        self,
        mut reservation: Reserved,
    ) -> Result<(Reserved, Vec<Vec<Checksum>>)> {
        #[cfg(feature = "cuda")]
        let state = self.state.clone();
        #[cfg(feature = "cuda")]
        let _turn = match state.publisher.device() {
            Some(device) => Some(device.turns.acquire().await.expect("never closed")),
            None => None,
        };
        let filling = tokio::task::spawn_blocking(move || {
            let filled = self.fill(&mut reservation);
            // In this order: ranges are given up before the place is, also if nobody waits.
            filled.map(|sums| (reservation, sums, self))
        });
        let (reservation, sums, _) = filling.await.unwrap_or_else(|e| {
            Err(Error::new(ErrorKind::Unexpected, "capture", "filling a sample failed").source(e))
        })?;
        Ok((reservation, sums))
    }

    fn fill(&self, reservation: &mut Reserved) -> Result<Vec<Vec<Checksum>>> {
        #[cfg(feature = "cuda")]
        if let Some(device) = self.state.publisher.device()
            && let Some(reservation) = reservation.in_arena()
        {
            return self.fill_on_device(&device.tensors, reservation);
        }
        self.fill_by_cpu(reservation)
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

    /// Everything at once, so that the device is waited for once. What is made is made where it is
    /// published; what is given goes through host memory, and is counted.
    #[cfg(feature = "cuda")]
    fn fill_on_device(
        &self,
        tensors: &transport_mooncake_direct::cuda::DeviceTensors,
        reservation: &mut transport_mooncake_direct::SinkReservation,
    ) -> Result<Vec<Vec<Checksum>>> {
        use std::time::Instant;

        use transport_mooncake_direct::cuda::Content;

        use crate::{input::sha256_hex, source::checksum};

        let source = &self.state.source;
        let (mut wanted, mut given) = (Vec::new(), Vec::new());
        for (sample, (&place, &objects)) in self.places.iter().zip(&self.objects).enumerate() {
            let prompt = &self.work.prompts[place];
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
                        // Nobody can compare it with the manifest once it is on the device.
                        let expected = source.sha256(prompt, object);
                        if expected.is_some_and(|expected| expected != sha256_hex(&bytes)) {
                            let why = "the file and its manifest disagree";
                            let name = &reserved.objects[object].name;
                            return Err(Error::new(ErrorKind::Corrupt, "capture", why)
                                .with("key", reserved.sample.object(name)));
                        }
                        given.push(self.checksums.map(|kind| checksum(kind, &bytes)));
                        Content::Host(bytes)
                    }
                };
                wanted.push((reservation.take(sample, object), content));
            }
        }
        let deadline = Instant::now() + self.state.deadline;
        let written = tensors.write(wanted, self.checksums.is_some(), deadline)?;
        reservation.count_host_payload(written.host_bytes);
        let mut regions = written.regions.into_iter();
        for (sample, &objects) in self.objects.iter().enumerate() {
            for (object, region) in (0..objects).zip(regions.by_ref()) {
                reservation.put_back(sample, object, region)?;
            }
        }
        // Of bytes that were given, the sum is that of the host: so the way to the device is
        // checked too.
        let mut sums = written
            .sums
            .into_iter()
            .zip(given)
            .map(|(made, given)| given.unwrap_or(Checksum::new(ChecksumKind::Mixsum, made)));
        let sample = |&objects: &usize| sums.by_ref().take(objects).collect();
        Ok(self.objects.iter().map(sample).collect())
    }
}
