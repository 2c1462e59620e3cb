//! A client that many transports use one after the other: a real one takes two seconds to come and go.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use mooncake_sys::{
    GetItem, KeyResults, ProviderInfo, PutItem, Replica, ReplicaPolicy, StoreApi, StoreCode,
};
use parking_lot::Mutex;
use transport_core::{Error, ErrorKind, Result};

/// Does what a client of its own would, up to its close: that takes back registrations and objects,
/// as the end of a real one would, and leaves the client itself to the next.
pub(crate) struct Lent {
    api: Arc<dyn StoreApi>,
    owns_memory: bool,
    closed: AtomicBool,
    registered: Mutex<BTreeSet<usize>>,
    keys: Mutex<BTreeSet<String>>,
}

impl Lent {
    /// `owns_memory`: the objects that it wrote lie in its own segment, and go with it.
    pub(crate) fn new(api: Arc<dyn StoreApi>, owns_memory: bool) -> Arc<Self> {
        Arc::new(Self {
            api,
            owns_memory,
            closed: AtomicBool::new(false),
            registered: Mutex::default(),
            keys: Mutex::default(),
        })
    }

    fn open(&self) -> Result<&dyn StoreApi> {
        if self.closed.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Closed, "use lent client", "it was closed"));
        }
        Ok(&*self.api)
    }

    fn note(&self, items: &[PutItem<'_>]) {
        self.keys.lock().extend(items.iter().map(|item| item.key.to_owned()));
    }
}

impl StoreApi for Lent {
    fn provider(&self) -> &ProviderInfo {
        self.api.provider()
    }

    fn hostname(&self) -> Result<String> {
        self.open()?.hostname()
    }

    fn health(&self) -> Result<()> {
        self.open()?.health()
    }

    unsafe fn register(&self, start: *mut u8, len: usize) -> Result<()> {
        // SAFETY: as the caller vouches.
        unsafe { self.open()?.register(start, len) }?;
        self.registered.lock().insert(start.expose_provenance());
        Ok(())
    }

    unsafe fn unregister(&self, start: *mut u8) -> Result<()> {
        // SAFETY: as the caller vouches.
        unsafe { self.open()?.unregister(start) }?;
        self.registered.lock().remove(&start.expose_provenance());
        Ok(())
    }

    unsafe fn put(&self, items: &[PutItem<'_>], policy: ReplicaPolicy) -> Result<KeyResults<()>> {
        self.note(items);
        // SAFETY: as the caller vouches.
        unsafe { self.open()?.put(items, policy) }
    }

    unsafe fn put_new(
        &self,
        items: &[PutItem<'_>],
        policy: ReplicaPolicy,
    ) -> Result<KeyResults<()>> {
        self.note(items);
        // SAFETY: as the caller vouches.
        unsafe { self.open()?.put_new(items, policy) }
    }

    unsafe fn get(&self, items: &[GetItem<'_>]) -> Result<KeyResults<u64>> {
        // SAFETY: as the caller vouches.
        unsafe { self.open()?.get(items) }
    }

    fn exists(&self, keys: &[&str]) -> Result<KeyResults<bool>> {
        self.open()?.exists(keys)
    }

    fn size(&self, key: &str) -> Result<Result<u64, StoreCode>> {
        self.open()?.size(key)
    }

    fn locate(&self, keys: &[&str]) -> Result<Option<Vec<Vec<Replica>>>> {
        self.open()?.locate(keys)
    }

    fn remove(&self, keys: &[&str], force: bool) -> Result<KeyResults<()>> {
        self.open()?.remove(keys, force)
    }

    fn close(&self) -> Result<()> {
        if self.closed.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        for start in std::mem::take(&mut *self.registered.lock()) {
            let start = std::ptr::with_exposed_provenance_mut(start);
            // SAFETY: no call is made any more through this client, and nobody else knows the memory.
            unsafe { self.api.unregister(start) }?;
        }
        let keys = std::mem::take(&mut *self.keys.lock());
        if self.owns_memory && !keys.is_empty() {
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            self.api.remove(&keys, true)?;
        }
        Ok(())
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            eprintln!("a lent client did not close: {error}");
        }
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lent").field(&self.api).finish()
    }
}
