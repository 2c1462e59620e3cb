//! A batch whose ranges are reserved: filled by whoever likes, then published.

use std::{sync::Arc, time::Duration};

use capture_arena::{Reservation, ReservedSample};
use tokio::sync::oneshot;
use transport_core::{
    ClientId, Descriptor, Error, ErrorKind, Ready, ReadyEvent, RegionMut, Result,
};

use super::{CaptureSink, closed, fill::Moved, late::Late};

/// Ranges of a batch that are being filled; dropping it gives the batch up.
#[derive(Debug)]
#[must_use = "dropping a reservation gives it up"]
pub struct SinkReservation {
    sink: CaptureSink,
    reservation: Reservation,
    holders: Vec<Option<ClientId>>,
    aux_layer_ids: Vec<Option<Vec<i64>>>,
    pub(super) moved: Option<Moved>,
}

impl SinkReservation {
    pub(super) fn new(
        sink: CaptureSink,
        reservation: Reservation,
        holders: Vec<Option<ClientId>>,
    ) -> Self {
        let aux_layer_ids = vec![None; holders.len()];
        Self { sink, reservation, holders, aux_layer_ids, moved: None }
    }

    /// The samples, in the order in which they were asked for.
    pub fn samples(&self) -> &[ReservedSample] {
        self.reservation.samples()
    }

    /// The bytes of one tensor; they hold whatever was there before.
    ///
    /// # Panics
    /// If there is no such tensor, its region is taken, or the arena is in device memory.
    pub fn bytes_mut(&mut self, sample: usize, object: usize) -> &mut [u8] {
        self.reservation.bytes_mut(sample, object)
    }

    /// Hands the region of one tensor to a writer; see [`Reservation::take`]. In device memory its
    /// address is what a kernel or a framework's tensor is made to write.
    ///
    /// # Panics
    /// If there is no such tensor, or its region is taken already.
    pub fn take(&mut self, sample: usize, object: usize) -> RegionMut {
        self.reservation.take(sample, object)
    }

    /// Takes a region back from its writer; see [`Reservation::put_back`].
    pub fn put_back(&mut self, sample: usize, object: usize, region: RegionMut) -> Result<()> {
        self.reservation.put_back(sample, object, region)
    }

    /// Counts bytes that a writer brought from the host into an arena in device memory.
    pub fn count_host_payload(&mut self, bytes: u64) {
        self.moved.get_or_insert_default().host += bytes;
    }

    /// Records which model layers a sample's hidden states were taken from.
    ///
    /// # Panics
    /// If there is no such sample.
    pub fn set_aux_layer_ids(&mut self, sample: usize, layers: Option<Vec<i64>>) {
        self.aux_layer_ids[sample] = layers;
    }

    /// Makes the batch readable, all at once, and describes it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for an arena in device memory, whose writes may still run:
    /// [`Self::publish_after`] says when they are done.
    pub async fn publish(self) -> Result<Vec<Descriptor>> {
        self.check_written()?;
        self.publish_filled().await
    }

    /// [`Self::publish`] for threads that may block.
    pub fn publish_blocking(self) -> Result<Vec<Descriptor>> {
        self.check_written()?;
        self.publish_filled_blocking()
    }

    /// Waits until what was queued to write the ranges is done, then publishes.
    ///
    /// If it is not done in time, the batch is given up, and its ranges stay out of use until it is
    /// done.
    pub async fn publish_after(self, ready: Ready, timeout: Duration) -> Result<Vec<Descriptor>> {
        let Ready::After(event) = ready else { return self.publish_filled().await };
        let (done, waited) = oneshot::channel();
        let copies = self.sink.0.copies.clone();
        // The batch goes with the wait, so that its ranges are nobody's while it runs.
        copies.run(move || drop(done.send(self.written(event, timeout))))?;
        let filled = waited.await.unwrap_or_else(|_| Err(closed("publish")));
        filled?.publish_filled().await
    }

    /// [`Self::publish_after`] for threads that may block.
    pub fn publish_after_blocking(
        self,
        ready: Ready,
        timeout: Duration,
    ) -> Result<Vec<Descriptor>> {
        let this = match ready {
            Ready::Now => self,
            Ready::After(event) => self.written(event, timeout)?,
        };
        this.publish_filled_blocking()
    }

    /// Waits for what writes the ranges, and keeps them out of use where that is late.
    fn written(self, event: Arc<dyn ReadyEvent>, timeout: Duration) -> Result<Self> {
        match event.wait(timeout) {
            Ok(()) => Ok(self),
            Err(error) => {
                if error.kind() == ErrorKind::Timeout {
                    self.sink.0.late.keep(Late { event, reservation: self.reservation });
                }
                Err(error)
            }
        }
    }

    fn check_written(&self) -> Result<()> {
        if self.sink.0.filler.is_cpu() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::InvalidInput,
            "publish",
            "the device may still be writing these ranges",
        )
        .remedy("publish after the event that is recorded behind the writes: publish_after"))
    }

    pub(super) async fn publish_filled(self) -> Result<Vec<Descriptor>> {
        let Self { sink, reservation, holders, aux_layer_ids, moved } = self;
        let published = sink.unless_closed("publish", reservation.publish()).await?;
        sink.describe(published, holders, aux_layer_ids, moved)
    }

    pub(super) fn publish_filled_blocking(self) -> Result<Vec<Descriptor>> {
        let Self { sink, reservation, holders, aux_layer_ids, moved } = self;
        sink.check_open("publish")?;
        let published = reservation.publish_blocking()?;
        sink.describe(published, holders, aux_layer_ids, moved)
    }
}
