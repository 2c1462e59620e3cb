//! Mooncake's structured objects in a real store.

use std::{fmt, sync::Arc};

use bytes::Bytes;
use rollout_codec::mooncake::ObjectStore;
use transport_core::{Error, ErrorKind, Result};
use transport_mooncake_store::StoreTransport;

/// Objects of Mooncake Store under their keys, as
/// [`mooncake::Reader`](rollout_codec::mooncake::Reader) and
/// [`mooncake::Writer`](rollout_codec::mooncake::Writer) use them. Calls block.
///
/// Objects are hard-pinned, so that none of a group is evicted without the others; the store's
/// groups are not used.
#[derive(Clone)]
pub struct StoreObjects(Arc<StoreTransport>);

impl StoreObjects {
    pub(crate) fn new(store: Arc<StoreTransport>) -> Self {
        Self(store)
    }
}

impl ObjectStore for StoreObjects {
    fn get(&self, key: &str) -> Result<Option<Bytes>> {
        let Some(region) = self.0.read_object(key)? else { return Ok(None) };
        if !region.kind().is_host() {
            return Err(Error::new(ErrorKind::Unsupported, "read object", "not in host memory"));
        }
        Ok(Some(Bytes::from_owner(region)))
    }

    fn put(&mut self, key: &str, parts: &[&[u8]], _group: Option<&str>) -> Result<()> {
        self.0.write_object(key, parts)
    }

    fn remove(&mut self, key: &str) -> Result<bool> {
        Ok(self.0.remove_objects(&[key])?.pop().unwrap_or(false))
    }
}

impl fmt::Debug for StoreObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StoreObjects").finish_non_exhaustive()
    }
}
