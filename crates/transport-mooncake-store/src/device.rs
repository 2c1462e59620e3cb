//! Samples in memory of a device: the transport's pool on the host does not move, so that the device
//! copies from it and to it by itself, while the store works on something else.

use std::{any::Any, sync::Arc, time::Instant};

use capture_arena::{
    Backing, RegionPool,
    cuda::{self, Device, PageLock, Part, Staging},
};
use transport_core::{Error, ErrorKind, RegionKind, RegionMut, RegionSlice, Result};

/// A device whose memory a [`StoreTransport`](crate::StoreTransport) takes beside the host's.
///
/// The store itself only knows memory of the host: every byte crosses the bus, through the
/// transport's pool, which is page-locked as it grows. All of it is host payload.
#[derive(Clone, Debug)]
pub struct DeviceMemory {
    staging: Staging,
    pool: Option<RegionPool>,
}

impl DeviceMemory {
    /// Takes tensors of `device`, and fills memory of the caller on it.
    ///
    /// # Errors
    /// What the device reports.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self { staging: Staging::without_buffers(device)?, pool: None })
    }

    /// Receives [`Destination::Pool`](transport_core::Destination::Pool) reads in `pool`, and not in
    /// the pool on the host, which is then only on their way.
    ///
    /// # Errors
    /// [`ErrorKind::ConfigInvalid`] if it does not lie on the device.
    pub fn receive_in(mut self, pool: RegionPool) -> Result<Self> {
        let found = pool.backing().kind();
        if found != self.kind() {
            let why = "the receive pool does not lie on the device";
            return Err(Error::new(ErrorKind::ConfigInvalid, "configure store transport", why)
                .with("expected", format_args!("{:?}", self.kind()))
                .with("found", format_args!("{found:?}"))
                .remedy("make the pool in memory of that device"));
        }
        self.pool = Some(pool);
        Ok(self)
    }

    /// Its kind of memory.
    pub(crate) fn kind(&self) -> RegionKind {
        self.staging.device().region_kind()
    }

    /// Where reads are received, if not on the host.
    pub(crate) fn pool(&self) -> Option<&RegionPool> {
        self.pool.as_ref()
    }

    /// Keeps memory of the host where it is, as long as the answer lives.
    pub(crate) fn lock(&self, backing: &Backing) -> Result<Arc<dyn Any + Send + Sync>> {
        Ok(Arc::new(PageLock::new(self.staging.device(), backing)?))
    }

    /// Memory that the device may still write after a failure.
    pub(crate) fn quarantined_bytes(&self) -> u64 {
        self.staging.quarantined_bytes()
    }

    /// Begins to copy each slice into its region, between the pool on the host and the device.
    pub(crate) fn begin(&self, copies: Vec<(RegionSlice, RegionMut)>) -> Result<Crossing> {
        let (from, to): (Vec<_>, Vec<_>) = copies.into_iter().unzip();
        let mut crossing = self.staging.begin(to, false)?;
        let part = |(to, src)| Part { src, to, at: 0 };
        crossing.send(from.into_iter().enumerate().map(part).collect())?;
        Ok(Crossing(crossing))
    }
}

/// Copies that run. Dropped, it keeps what they may touch until they are done.
#[derive(Debug)]
pub(crate) struct Crossing(cuda::Crossing);

impl Crossing {
    /// Waits for all copies, and gives the regions back in order.
    pub(crate) fn finish(self, deadline: Instant) -> Result<Vec<RegionMut>> {
        self.0.finish(deadline)
    }
}
