//! Objects under keys of the caller, for layouts that are not one object for each tensor.

use std::sync::atomic::Ordering;

use mooncake_sys::{ReplicaPolicy, StoreCode};
use transport_core::{Error, ErrorKind, RegionMut, RegionSlice, Result};

use crate::{
    StoreTransport,
    io::{self, Source},
};

/// Keys of one call that removes.
const KEYS_A_CALL: usize = 4096;

/// All of these block, and none waits for room.
impl StoreTransport {
    /// Reads a whole object into registered memory; `None` if there is none of this key.
    pub fn read_object(&self, key: &str) -> Result<Option<RegionSlice>> {
        self.open("read object")?;
        let shared = self.shared();
        let bytes = match shared.api.size(key)? {
            Ok(bytes) => bytes,
            Err(StoreCode::OBJECT_NOT_FOUND) => return Ok(None),
            Err(code) => return Err(code.error("read object").with("key", key)),
        };
        let mut region = shared.memory.try_take(bytes as usize)?;
        if bytes == 0 {
            return Ok(Some(region.freeze()));
        }
        let answer = io::get(&*shared.api, &mut [(key, &mut region)]);
        let code = match answer {
            Ok(results) => match results[0] {
                Ok(found) if found == bytes => {
                    shared.ledger.host_bytes.fetch_add(bytes, Ordering::Relaxed);
                    return Ok(Some(region.freeze()));
                }
                Ok(found) => {
                    return Err(Error::new(
                        ErrorKind::ShortRead,
                        "read object",
                        "the object changed its length while it was read",
                    )
                    .with("key", key)
                    .with("expected", bytes)
                    .with("found", found));
                }
                Err(code) => code,
            },
            Err(error) => {
                shared.memory.quarantine(region); // the peer may still write it
                return Err(error.with("key", key));
            }
        };
        if matches!(code, StoreCode::TRANSFER_FAIL | StoreCode::LEASE_EXPIRED) {
            shared.memory.quarantine(region);
        }
        match code {
            StoreCode::OBJECT_NOT_FOUND => Ok(None),
            code => Err(code.error("read object").with("key", key)),
        }
    }

    /// Writes the concatenation of `parts` as one hard-pinned object. A key that exists is an error,
    /// and so is an object without bytes, which the store does not have.
    pub fn write_object(&self, key: &str, parts: &[&[u8]]) -> Result<()> {
        self.open("write object")?;
        let shared = self.shared();
        let refuse = |kind, why| Err(Error::new(kind, "write object", why).with("key", key));
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        if bytes == 0 {
            return refuse(ErrorKind::InvalidInput, "the store has no objects without bytes");
        }
        let only_new = shared.api.provider().store.put_new;
        if !only_new && self.has_object(key)? {
            return refuse(ErrorKind::AlreadyExists, "the key exists");
        }
        let mut region: RegionMut = shared.memory.try_take(bytes)?;
        let mut rest = region.as_mut_bytes().expect("the pool is host memory");
        for part in parts {
            let (to, tail) = rest.split_at_mut(part.len());
            to.copy_from_slice(part);
            rest = tail;
        }
        let source = Source::new(vec![region.freeze()]).expect("one slice lies end to end");
        let results = io::put(&*shared.api, &[(key, &source)], ReplicaPolicy::default(), only_new)?;
        results[0].map_err(|code| code.error("write object").with("key", key))?;
        shared.ledger.host_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        if only_new || self.has_object(key)? {
            return Ok(());
        }
        refuse(ErrorKind::Unexpected, "the object cannot be read after it was written")
    }

    /// Removes objects, leased or not, and says of each whether there was one.
    pub fn remove_objects(&self, keys: &[&str]) -> Result<Vec<bool>> {
        self.open("remove objects")?;
        let mut removed = Vec::with_capacity(keys.len());
        for part in keys.chunks(KEYS_A_CALL) {
            for (key, result) in part.iter().zip(self.shared().api.remove(part, true)?) {
                removed.push(match result {
                    Ok(()) => true,
                    Err(StoreCode::OBJECT_NOT_FOUND) => false,
                    Err(code) => return Err(code.error("remove objects").with("key", key)),
                });
            }
        }
        Ok(removed)
    }

    /// Whether there is a complete object of this key.
    pub fn has_object(&self, key: &str) -> Result<bool> {
        self.open("look for object")?;
        let mut found = self.shared().api.exists(&[key])?;
        let answer = found.pop().ok_or_else(|| {
            Error::new(ErrorKind::Protocol, "look for object", "the store did not answer")
        })?;
        answer.map_err(|code| code.error("look for object").with("key", key))
    }
}
