//! What comes with the file descriptor of a block of device memory.
//!
//! Whoever connects to the owner's Unix socket is sent one message of [`GRANT_BYTES`], with the
//! descriptor beside it, and the connection ends. Nothing is asked.
//!
//! ```
//! use control_proto::fd_grant::Grant;
//! use transport_core::Epoch;
//! let grant = Grant { epoch: Epoch(7), bytes: 1 << 21 };
//! assert_eq!(Grant::decode(&grant.encode())?, grant);
//! # Ok::<(), transport_core::Error>(())
//! ```

use transport_core::{Epoch, Error, ErrorKind, Result};

/// Length of the message.
pub const GRANT_BYTES: usize = 24;

const MAGIC: [u8; 4] = *b"FSFD";
const VERSION: u32 = 1;

/// Which memory a file descriptor is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Life of the process that owns it.
    pub epoch: Epoch,
    /// Length in bytes; never 0.
    pub bytes: u64,
}

impl Grant {
    /// The message: `FSFD`, version 1, epoch and length, little-endian.
    pub fn encode(&self) -> [u8; GRANT_BYTES] {
        let mut out = [0; GRANT_BYTES];
        out[..4].copy_from_slice(&MAGIC);
        out[4..8].copy_from_slice(&VERSION.to_le_bytes());
        out[8..16].copy_from_slice(&self.epoch.0.to_le_bytes());
        out[16..].copy_from_slice(&self.bytes.to_le_bytes());
        out
    }

    /// Reads the message.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] for anything else, also of another length.
    pub fn decode(message: &[u8]) -> Result<Self> {
        let refuse = |why| Error::new(ErrorKind::Protocol, "receive file descriptor", why);
        let Ok(message) = <&[u8; GRANT_BYTES]>::try_from(message) else {
            return Err(refuse("the message has another length").with("found", message.len()));
        };
        let number =
            |at: usize| u64::from_le_bytes(message[at..at + 8].try_into().expect("eight bytes"));
        let version = u32::from_le_bytes(message[4..8].try_into().expect("four bytes"));
        if message[..4] != MAGIC {
            return Err(refuse("the message is of something else"));
        }
        if version != VERSION {
            return Err(refuse("the message is of another version")
                .with("expected", VERSION)
                .with("found", version));
        }
        match number(16) {
            0 => Err(refuse("the memory has no bytes")),
            bytes => Ok(Self { epoch: Epoch(number(8)), bytes }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_message_itself_is_read() {
        let grant = Grant { epoch: Epoch(0x0102), bytes: 512 };
        let good = grant.encode();
        assert_eq!(&good[..10], b"FSFD\x01\0\0\0\x02\x01");
        for at in [0, 3, 4, 7] {
            let mut bad = good;
            bad[at] ^= 1;
            assert_eq!(Grant::decode(&bad).unwrap_err().kind(), ErrorKind::Protocol, "{at}");
        }
        assert!(Grant::decode(&good[1..]).is_err());
        assert!(Grant::decode(&[&good[..], b"x"].concat()).is_err());
        assert!(Grant::decode(&Grant { bytes: 0, ..grant }.encode()).is_err());
    }
}
