//! Memory that was written once and that nobody can write again.

use std::{
    fmt,
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
};

use rustix::fs::SealFlags;
use transport_core::{ArenaOffset, Error, ErrorKind, RegionKind, RegionSlice, Result};

use super::{Backing, Block, MAP, Mapping, SIZE_SEALS, SharedHandle, open_shared};

/// What the file must carry: neither its size nor its bytes ever change.
const SEALS: SealFlags = SIZE_SEALS.union(SealFlags::WRITE);

/// Memory that no process can write any more, mapped read-only.
///
/// Every process that has it can show it to others, also when the one that wrote it is gone; it
/// lives as long as any of them has it.
#[derive(Clone)]
pub struct SealedBacking(Arc<Sealed>);

struct Sealed {
    map: Mapping,
    handle: SharedHandle,
    _fd: OwnedFd, // by which others find it
}

impl SealedBacking {
    /// Ends writing for good. Gives the backing back while anybody else has it, or a region of it.
    ///
    /// # Errors
    /// If it does not come from [`Backing::sealable`], or the kernel does not seal it.
    pub fn seal(backing: Backing) -> Result<std::result::Result<Self, Backing>> {
        const OPERATION: &str = "seal memory";
        let block = match Arc::try_unwrap(backing.0) {
            Ok(block) => block,
            Err(shared) => return Ok(Err(Backing(shared))),
        };
        let Block { memory, shared, .. } = block;
        let Some((fd, handle)) = shared else {
            return Err(Error::new(ErrorKind::InvalidInput, OPERATION, "private memory"));
        };
        let len = usize::try_from(memory.len()).expect("was mapped");
        drop(memory); // the kernel seals only what nobody can write
        rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE | SealFlags::SEAL).map_err(|e| {
            Error::io(OPERATION, e.into()).remedy("make the memory with Backing::sealable")
        })?;
        let map = Mapping::of_file(&fd, len, false, OPERATION)?;
        Ok(Ok(Self(Arc::new(Sealed { map, handle, _fd: fd }))))
    }

    /// Maps memory that another process has sealed; see [`super::MappedBacking::open`] for what is
    /// refused.
    pub fn open(handle: &SharedHandle) -> Result<Self> {
        let (fd, len) = open_shared(handle, SEALS)?;
        let map = Mapping::of_file(&fd, len, false, MAP)?;
        let own =
            SharedHandle { pid: std::process::id(), fd: fd.as_raw_fd() as u32, ..handle.clone() };
        Ok(Self(Arc::new(Sealed { map, handle: own, _fd: fd })))
    }

    /// How other processes find it in this one.
    pub fn shared_handle(&self) -> &SharedHandle {
        &self.0.handle
    }

    /// Size in bytes.
    pub fn bytes_len(&self) -> u64 {
        self.0.map.len as u64
    }

    /// `len` bytes at `offset`; `None` if they do not lie inside. They never change, and the memory
    /// lives as long as they are looked at.
    pub fn slice(&self, offset: ArenaOffset, len: u64) -> Option<RegionSlice> {
        if offset.0.checked_add(len)? > self.bytes_len() {
            return None;
        }
        let start = self.0.map.at(offset.0, len);
        // SAFETY: inside a mapping that the owner keeps, of a file whose size and bytes are sealed:
        // no process can write it or make it shorter.
        Some(unsafe {
            RegionSlice::from_foreign(start, len as usize, RegionKind::Shared, self.0.clone())
        })
    }
}

impl fmt::Debug for SealedBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealedBacking").field("handle", &self.0.handle).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MappedBacking, RegionPool};

    #[test]
    #[cfg_attr(miri, ignore = "maps shared memory")]
    fn what_is_sealed_is_shown_and_stays() {
        let backing = Backing::sealable(4096).unwrap();
        let early = backing.shared_handle().unwrap().clone();
        assert!(SealedBacking::open(&early).is_err(), "not sealed yet");
        let mut region = RegionPool::new(backing.clone()).unwrap().take(4096).unwrap();
        region.as_mut_bytes().unwrap()[7] = 7;
        let backing = SealedBacking::seal(backing).unwrap().unwrap_err();
        drop(region);
        let sealed = SealedBacking::seal(backing).unwrap().unwrap();
        let other = SealedBacking::open(sealed.shared_handle()).unwrap();
        let third = SealedBacking::open(other.shared_handle()).unwrap();
        drop((sealed, other));
        assert_eq!(third.slice(ArenaOffset(0), 8).unwrap().as_ref(), [0, 0, 0, 0, 0, 0, 0, 7]);
        assert!(third.slice(ArenaOffset(4000), 97).is_none());
        assert!(SealedBacking::open(&early).is_err(), "the first process let it go");
    }

    #[test]
    #[cfg_attr(miri, ignore = "maps shared memory")]
    fn an_arena_is_not_taken_for_sealed_memory() {
        let arena = Backing::shared(4096).unwrap();
        assert!(SealedBacking::open(arena.shared_handle().unwrap()).is_err());
        assert!(SealedBacking::seal(arena).is_err(), "its seals are final");
        assert!(SealedBacking::seal(Backing::heap(4096).unwrap()).is_err());
        let sealable = Backing::sealable(4096).unwrap();
        let handle = sealable.shared_handle().unwrap();
        let mark = transport_core::MapMark::random();
        assert!(MappedBacking::open(handle, mark).is_err(), "its size could still be unsealed");
    }
}
