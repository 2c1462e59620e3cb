//! What a store must be able to do to hold structured objects.

use std::collections::BTreeMap;

use bytes::Bytes;
use transport_core::{Error, ErrorKind, Result};

/// A store of objects under text keys, such as Mooncake Store.
pub trait ObjectStore {
    /// The object under `key`, or `None` if there is none.
    fn get(&self, key: &str) -> Result<Option<Bytes>>;

    /// Stores the concatenation of `parts` under `key`. An existing key is an error.
    ///
    /// Objects of one `group` are leased and evicted together where the store can do that.
    fn put(&mut self, key: &str, parts: &[&[u8]], group: Option<&str>) -> Result<()>;

    /// Removes the object under `key`; `false` if there was none.
    fn remove(&mut self, key: &str) -> Result<bool>;
}

/// A store in this process's memory, in the order in which objects came.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore {
    objects: BTreeMap<String, Bytes>,
    order: Vec<String>,
}

impl MemoryStore {
    /// Keys in the order in which they were stored.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.order.iter().map(String::as_str)
    }

    /// Number of objects.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether there are no objects.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// Stores `object` as it is.
    pub fn insert(&mut self, key: impl Into<String>, object: impl Into<Bytes>) -> Result<()> {
        let key = key.into();
        if self.objects.contains_key(&key) {
            return Err(Error::new(ErrorKind::AlreadyExists, "put object", "the key exists")
                .with("key", key));
        }
        self.order.push(key.clone());
        self.objects.insert(key, object.into());
        Ok(())
    }
}

impl ObjectStore for MemoryStore {
    fn get(&self, key: &str) -> Result<Option<Bytes>> {
        Ok(self.objects.get(key).cloned())
    }

    fn put(&mut self, key: &str, parts: &[&[u8]], _group: Option<&str>) -> Result<()> {
        self.insert(key, parts.concat())
    }

    fn remove(&mut self, key: &str) -> Result<bool> {
        self.order.retain(|k| k != key);
        Ok(self.objects.remove(key).is_some())
    }
}
