//! The store's calls in safe terms: payload in regions, whose lifetimes do what the contract wants.
//!
//! The only module of the crate with `unsafe` code.
#![allow(unsafe_code)]

use std::{
    any::Any,
    ptr::NonNull,
    sync::{Arc, Weak},
};

use mooncake_sys::{GetItem, KeyResults, PutItem, ReplicaPolicy, StoreApi};
use transport_core::{Error, ErrorKind, RegionMut, RegionSlice, Result};

/// Bytes to write as one object: one slice, or several that lie end to end.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    slices: Vec<RegionSlice>, // keep the bytes alive
    len: usize,
}

impl Source {
    /// The slices as one range of bytes; `None` if they do not lie end to end, or are none.
    pub(crate) fn new(slices: Vec<RegionSlice>) -> Option<Self> {
        let joined = slices.windows(2).all(|w| w[0].address() + w[0].len() == w[1].address());
        let len = slices.iter().map(RegionSlice::len).sum();
        (joined && !slices.is_empty()).then_some(Self { slices, len })
    }

    pub(crate) fn address(&self) -> usize {
        self.slices[0].address()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

/// Writes objects from registered memory: `only_new` ones, where the provider can tell, or whatever
/// [`StoreApi::put`] makes of those that exist.
pub(crate) fn put(
    api: &dyn StoreApi,
    objects: &[(&str, &Source)],
    policy: ReplicaPolicy,
    only_new: bool,
) -> Result<KeyResults<()>> {
    let item = |&(key, source): &(_, &Source)| PutItem {
        key,
        start: source.slices[0].as_ptr(),
        len: source.len,
    };
    let items: Vec<_> = objects.iter().map(item).collect();
    let results = if only_new {
        // SAFETY: the slices behind the sources are borrowed for the call: their memory stays
        // allocated and nobody writes it. Those of one source lie end to end, so all `len` bytes
        // are theirs.
        unsafe { api.put_new(&items, policy) }
    } else {
        // SAFETY: as above.
        unsafe { api.put(&items, policy) }
    }?;
    one_each(results, objects.len(), "put")
}

/// Reads objects into registered memory.
///
/// The caller must not let go of the regions whose result is a failed transfer or an expired lease,
/// nor of any if the call fails: the peer may still write them.
pub(crate) fn get(
    api: &dyn StoreApi,
    objects: &mut [(&str, &mut RegionMut)],
) -> Result<KeyResults<u64>> {
    let items: Vec<_> = objects
        .iter_mut()
        .map(|(key, region)| GetItem { key, start: region.as_mut_ptr(), len: region.len() })
        .collect();
    // SAFETY: the regions are borrowed for the call as the only handles to their memory. What may
    // still be written after the call is kept by the callers in this crate, as demanded above.
    let results = unsafe { api.get(&items) }?;
    one_each(results, objects.len(), "get")
}

fn one_each<T>(results: KeyResults<T>, keys: usize, call: &'static str) -> Result<KeyResults<T>> {
    if results.len() == keys {
        return Ok(results);
    }
    Err(Error::new(ErrorKind::Protocol, call, "the store did not answer once for each key")
        .with("expected", keys)
        .with("found", results.len()))
}

/// Memory known to the store's engine, until it is dropped.
pub(crate) struct Registration {
    api: Weak<dyn StoreApi>, // a closed client has no registrations
    start: usize,
    len: usize,
    _memory: Arc<dyn Any + Send + Sync>,
}

impl Registration {
    /// Registers `len` bytes that stay allocated as long as `memory` lives.
    ///
    /// If that fails, `memory` is kept for ever: some of several network devices may have it
    /// registered all the same.
    pub(crate) fn new(
        api: &Arc<dyn StoreApi>,
        start: usize,
        len: usize,
        memory: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let pointer = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: `memory` keeps the bytes allocated, and is kept until after `unregister`.
        if let Err(error) = unsafe { api.register(pointer, len) } {
            std::mem::forget(memory);
            return Err(error.with("bytes", len).remedy(
                "check the limit on locked memory, and that the range is not registered already",
            ));
        }
        Ok(Self { api: Arc::downgrade(api), start, len, _memory: memory })
    }

    pub(crate) fn range(&self) -> (usize, usize) {
        (self.start, self.len)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let Some(api) = self.api.upgrade() else { return };
        let pointer = std::ptr::with_exposed_provenance_mut(self.start);
        // SAFETY: calls name this memory only through regions that keep this registration.
        if let Err(error) = unsafe { api.unregister(pointer) }
            && error.kind() != ErrorKind::Closed
        {
            tracing::warn!(%error, "memory stays registered");
            std::mem::forget(self._memory.clone()); // the engine still knows it
        }
    }
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registration").field("len", &self.len).finish_non_exhaustive()
    }
}

/// The same bytes as `region`, with `owner` in its place; the owner keeps the region.
pub(crate) fn rewrap(
    region: RegionMut,
    own: impl FnOnce(RegionMut) -> Result<Arc<dyn Any + Send + Sync>>,
) -> Result<RegionMut> {
    let (start, len, kind) = (region.address(), region.len(), region.kind());
    let owner = own(region)?;
    let start = NonNull::new(std::ptr::with_exposed_provenance_mut(start));
    let start = start.expect("a region never starts at 0");
    // SAFETY: the region was the only handle to these bytes; it now lies in the owner, which never
    // touches it, and keeps the bytes allocated.
    Ok(unsafe { RegionMut::from_foreign(start, len, kind, owner) })
}
