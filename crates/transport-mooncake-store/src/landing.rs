//! Fetches into device memory: what has been read is copied there while the next part is read.

use std::{
    collections::{HashMap, HashSet},
    time::Instant,
};

use transport_core::{RegionMut, RegionSlice, Result};

use crate::device::{Crossing, DeviceMemory};

/// A tensor of a fetch: which request, and which of its tensors.
pub(crate) type Place = (usize, usize);

/// Destinations on a device, by the read that brings their bytes to the host.
#[derive(Default)]
pub(crate) struct Landings {
    waiting: HashMap<usize, Vec<Landing>>,
    /// Reads whose bytes stay on the host, too.
    kept: HashSet<usize>,
    under_way: Option<(Crossing, Vec<Place>)>,
    landed: Vec<(Place, RegionMut)>,
}

struct Landing {
    place: Place,
    offset: u64,
    to: RegionMut,
}

impl Landings {
    /// Bytes from `offset` on of what `read` brings go to memory of the device.
    pub(crate) fn expect(&mut self, read: usize, offset: u64, place: Place, to: RegionMut) {
        self.waiting.entry(read).or_default().push(Landing { place, offset, to });
    }

    /// What `read` brings is used on the host.
    pub(crate) fn keep(&mut self, read: usize) {
        self.kept.insert(read);
    }

    /// Whether nothing goes to a device.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Sends what a read has brought on its way, once what was sent before has arrived. Gives the
    /// bytes back if they are used on the host.
    pub(crate) fn send(
        &mut self,
        device: &DeviceMemory,
        brought: impl IntoIterator<Item = (usize, RegionSlice)>,
        deadline: Instant,
    ) -> Result<Vec<(usize, RegionSlice)>> {
        let (mut copies, mut places, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        for (read, bytes) in brought {
            for Landing { place, offset, to } in self.waiting.remove(&read).unwrap_or_default() {
                let range = offset as usize..offset as usize + to.len();
                copies.push((bytes.slice(range).expect("planned to lie inside"), to));
                places.push(place);
            }
            if self.kept.contains(&read) {
                kept.push((read, bytes));
            }
        }
        self.settle(deadline)?;
        if !copies.is_empty() {
            self.under_way = Some((device.begin(copies)?, places));
        }
        Ok(kept)
    }

    /// Waits for what is under way; its memory on the host is free then.
    pub(crate) fn settle(&mut self, deadline: Instant) -> Result<()> {
        if let Some((crossing, places)) = self.under_way.take() {
            self.landed.extend(places.into_iter().zip(crossing.finish(deadline)?));
        }
        Ok(())
    }

    /// Waits for the last, and gives all destinations back.
    pub(crate) fn finish(mut self, deadline: Instant) -> Result<Vec<(Place, RegionMut)>> {
        self.settle(deadline)?;
        Ok(self.landed)
    }
}
