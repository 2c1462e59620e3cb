//! Memory that peers may write, where the configuration says so.

use std::sync::Arc;

use parking_lot::Mutex;
use transport_core::{Error, ErrorKind, RegionMut, RemoteAddr, Result};

/// A block of host memory that peers may write through the data port.
///
/// Nothing that is published lies in it. Clones share the block.
#[derive(Clone, Debug)]
pub struct WriteWindow {
    address: RemoteAddr,
    len: u64,
    region: Arc<Mutex<RegionMut>>,
}

impl WriteWindow {
    /// Lets peers write `region`.
    pub fn new(mut region: RegionMut) -> Result<Self> {
        if region.as_mut_bytes().is_none() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "open write window",
                "peers can write host memory only",
            ));
        }
        let (address, len) = (RemoteAddr(region.address() as u64), region.len() as u64);
        Ok(Self { address, len, region: Arc::new(Mutex::new(region)) })
    }

    /// First address.
    pub fn address(&self) -> RemoteAddr {
        self.address
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A copy of `len` bytes at `address`; `None` if they do not lie inside.
    pub fn read(&self, address: RemoteAddr, len: u64) -> Option<Vec<u8>> {
        let range = self.range(address, len)?;
        Some(self.region.lock().as_mut_bytes()?[range].to_vec())
    }

    /// Writes `bytes` at `address`; false if they do not lie inside.
    pub(crate) fn write(&self, address: RemoteAddr, bytes: &[u8]) -> bool {
        let Some(range) = self.range(address, bytes.len() as u64) else { return false };
        match self.region.lock().as_mut_bytes() {
            Some(region) => {
                region[range].copy_from_slice(bytes);
                true
            }
            None => false,
        }
    }

    pub(crate) fn range(&self, address: RemoteAddr, len: u64) -> Option<std::ops::Range<usize>> {
        let offset = address.0.checked_sub(self.address.0)?;
        let end = offset.checked_add(len).filter(|&end| end <= self.len)?;
        Some(offset as usize..end as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_inside_can_be_written() {
        let window = WriteWindow::new(RegionMut::zeroed(16).unwrap()).unwrap();
        let at = |offset| RemoteAddr(window.address().0 + offset);
        assert!(window.write(at(12), b"abcd"));
        assert_eq!(window.read(at(11), 5).unwrap(), b"\0abcd");
        assert!(!window.write(at(13), b"abcd"));
        assert!(!window.write(RemoteAddr(window.address().0 - 1), b"a"));
        assert!(window.range(at(0), u64::MAX).is_none());
    }
}
