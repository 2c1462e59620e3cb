//! The shm engine: another process's arena, mapped into this one.
#![allow(unsafe_code)]

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use capture_arena::{MappedBacking, SharedHandle};
use control_proto::control::ArenaInfo;
use parking_lot::Mutex;
use transport_core::{
    ArenaOffset, Error, ErrorKind, MapMark, RegionMut, RegionSlice, RemoteAddr, Result, SessionName,
};

use crate::transport::InUse;

/// Bytes that are copied between two looks at the stop flag.
const CHUNK: usize = 16 << 20;

/// The mapping of one life of one publisher. Goes with the last view of it.
#[derive(Debug)]
pub(crate) struct SharedArena {
    info: ArenaInfo,
    server: SessionName,
    mark: MapMark,
    mapping: Mutex<Option<MappedBacking>>,
}

impl SharedArena {
    pub(crate) fn new(info: ArenaInfo, server: SessionName, mark: MapMark) -> Self {
        Self { info, server, mark, mapping: Mutex::new(None) }
    }

    /// `len` bytes at `address`, where the publisher put them.
    ///
    /// The range lies in an object of the sample that is in use.
    pub(crate) fn view(
        &self,
        address: RemoteAddr,
        len: u64,
        sample: &Arc<InUse>,
    ) -> Result<RegionSlice> {
        let outside = || {
            Error::new(ErrorKind::OutOfRange, "view", "the range lies outside the mapped arena")
                .with("address", format_args!("{:#x}", address.0))
                .with("bytes", len)
        };
        let offset = address.0.checked_sub(self.info.base.0).ok_or_else(outside)?;
        // SAFETY: the use keeps the mapping. It was registered before the claim of the sample was
        // relied on, and while it lives this client sends no release of the sample; the publisher
        // keeps a claim of this client's for as long as the arena is mapped under its mark.
        let view = unsafe { sample.mapping().view(ArenaOffset(offset), len, sample.clone()) };
        view.ok_or_else(outside)
    }

    /// The publisher's memory; mapped at the first call.
    pub(crate) fn mapping(&self) -> Result<MappedBacking> {
        let mut mapping = self.mapping.lock();
        if let Some(mapping) = &*mapping {
            return Ok(mapping.clone());
        }
        let shm = self.info.shm.as_ref().ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "map arena", "the publisher's memory is private")
                .with("peer", &self.server)
                .remedy("give the publisher a shared backing, or use the tcp engine")
        })?;
        let handle = SharedHandle {
            boot_id: shm.boot_id.clone(),
            pid: shm.pid,
            fd: shm.fd,
            dev: shm.dev,
            ino: shm.ino,
            bytes: self.info.bytes,
        };
        let opened =
            MappedBacking::open(&handle, self.mark).map_err(|e| e.with("peer", &self.server))?;
        Ok(mapping.insert(opened).clone())
    }
}

/// Copies a view; ends early when `stop` is set.
pub(crate) fn copy(
    source: &RegionSlice,
    destination: &mut RegionMut,
    stop: &Arc<AtomicBool>,
) -> Result<()> {
    let (Some(from), Some(to)) = (source.as_bytes(), destination.as_mut_bytes()) else {
        return Err(Error::new(ErrorKind::Unsupported, "copy", "not host memory"));
    };
    for (from, to) in from.chunks(CHUNK).zip(to.chunks_mut(CHUNK)) {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Closed, "copy", "the fetch was given up"));
        }
        to.copy_from_slice(from);
    }
    Ok(())
}
