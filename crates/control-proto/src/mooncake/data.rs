//! Frames of the data port: a header of 24 bytes, a status frame in version 2, raw bytes.
//!
//! | | client sends | server answers |
//! |---|---|---|
//! | read, version 1 | header | `size` bytes |
//! | read, version 2 | header | status; then, if it is [`Status::Ok`], `size` bytes |
//! | write, version 1 | header, `size` bytes | nothing |
//! | write, version 2 | header, `size` bytes | status |
//!
//! All numbers are little-endian. A connection takes the next header after each exchange.

use transport_core::{Error, ErrorKind, RemoteAddr, Result};

/// Length of a header.
pub const HEADER_BYTES: usize = 24;

/// Length of a status frame.
pub const STATUS_BYTES: usize = 8;

/// Largest transfer that [`Header::decode`] takes unless told otherwise: 64 GiB.
pub const MAX_TRANSFER_BYTES: u64 = 64 << 30;

const VERSION_2: u8 = 0x80;
const STATUS_MAGIC: u32 = 0x4D43_5456; // "MCTV"

/// Which way the bytes go, as the client sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Opcode {
    /// From the server to the client.
    Read,
    /// From the client to the server.
    Write,
}

/// Version of the exchange; a peer says in its handshake metadata which one it speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Version {
    /// No status frame: a refused address ends the connection.
    V1,
    /// With a status frame.
    V2,
}

impl Version {
    /// The version to use with a peer whose metadata says `tcp_proto_version`.
    pub const fn of_peer(tcp_proto_version: u32) -> Self {
        if tcp_proto_version >= 2 { Self::V2 } else { Self::V1 }
    }
}

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// Number of bytes.
    pub size: u64,
    /// Where they are in the server's address space.
    pub address: RemoteAddr,
    /// Which way they go.
    pub opcode: Opcode,
    /// How the exchange goes on.
    pub version: Version,
}

impl Header {
    /// The header as sent; the padding is zero.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..8].copy_from_slice(&self.size.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.address.0.to_le_bytes());
        let opcode = match self.opcode {
            Opcode::Read => 0,
            Opcode::Write => 1,
        };
        bytes[16] = match self.version {
            Version::V1 => opcode,
            Version::V2 => opcode | VERSION_2,
        };
        bytes
    }

    /// Reads a header; what the padding holds does not matter.
    ///
    /// Refuses an unknown opcode, more than `max_bytes`, and a range beyond the address space. The
    /// connection cannot go on after an error.
    pub fn decode(bytes: &[u8; HEADER_BYTES], max_bytes: u64) -> Result<Self> {
        let [size @ .., _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _] = *bytes;
        let [_, _, _, _, _, _, _, _, address @ .., opcode, _, _, _, _, _, _, _] = *bytes;
        let (size, address) = (u64::from_le_bytes(size), RemoteAddr(u64::from_le_bytes(address)));
        let invalid = |why: &'static str| {
            Error::new(ErrorKind::Protocol, "read transfer header", why)
                .with("size", size)
                .with("address", format_args!("{:#x}", address.0))
                .with("opcode", format_args!("{opcode:#04x}"))
        };
        let version = if opcode & VERSION_2 == 0 { Version::V1 } else { Version::V2 };
        let opcode = match opcode & !VERSION_2 {
            0 => Opcode::Read,
            1 => Opcode::Write,
            _ => return Err(invalid("the opcode is neither read nor write")),
        };
        if size > max_bytes {
            return Err(invalid("the transfer is too large").with("max_bytes", max_bytes));
        }
        if address.checked_add(size).is_none() {
            return Err(invalid("the range leaves the address space"));
        }
        Ok(Self { size, address, opcode, version })
    }
}

/// How a server answers in version 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// The bytes follow, or were written.
    Ok,
    /// The range does not lie in one registered buffer.
    AddressRejected,
    /// A code of a newer peer, above 1.
    Other(u32),
}

impl Status {
    /// The code of a status; `Other(0)` and `Other(1)` are the named ones.
    pub const fn code(self) -> u32 {
        match self {
            Self::Ok => 0,
            Self::AddressRejected => 1,
            Self::Other(code) => code,
        }
    }

    /// The status of a code.
    pub const fn from_code(code: u32) -> Self {
        match code {
            0 => Self::Ok,
            1 => Self::AddressRejected,
            code => Self::Other(code),
        }
    }

    /// The frame as sent.
    pub fn encode(self) -> [u8; STATUS_BYTES] {
        (u64::from(STATUS_MAGIC) << 32 | u64::from(self.code())).to_le_bytes()
    }

    /// Reads a frame; refuses one without the magic, which means that the peer speaks another
    /// version or that the stream is out of step.
    pub fn decode(bytes: [u8; STATUS_BYTES]) -> Result<Self> {
        let frame = u64::from_le_bytes(bytes);
        if frame >> 32 != u64::from(STATUS_MAGIC) {
            return Err(Error::new(
                ErrorKind::Protocol,
                "read transfer status",
                "not a status frame",
            )
            .with("expected", format_args!("{STATUS_MAGIC:#010x} in the upper half"))
            .with("found", format_args!("{frame:#018x}")));
        }
        Ok(Self::from_code(frame as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_have_the_documented_bytes() {
        let header = Header {
            size: 0x0102_0304,
            address: RemoteAddr(0x7f00_0000_1000),
            opcode: Opcode::Write,
            version: Version::V2,
        };
        let bytes = header.encode();
        assert_eq!(bytes[0..8], [4, 3, 2, 1, 0, 0, 0, 0]);
        assert_eq!(bytes[8..16], [0, 0x10, 0, 0, 0, 0x7f, 0, 0]);
        assert_eq!(bytes[16..], [0x81, 0, 0, 0, 0, 0, 0, 0]);
        let mut dirty = bytes;
        dirty[17..].fill(0xAA);
        assert_eq!(Header::decode(&dirty, MAX_TRANSFER_BYTES).unwrap(), header);
        assert_eq!(Header { version: Version::V1, ..header }.encode()[16], 1);
        assert_eq!(Header { opcode: Opcode::Read, ..header }.encode()[16], 0x80);
    }

    #[test]
    fn absurd_headers_are_refused() {
        let mut bytes = [0; HEADER_BYTES];
        bytes[16] = 2;
        assert!(Header::decode(&bytes, 10).is_err());
        bytes[16] = 0;
        bytes[0] = 11;
        let error = Header::decode(&bytes, 10).unwrap_err();
        assert_eq!(error.context("max_bytes"), Some("10"));
        bytes[8..16].fill(0xff);
        assert!(Header::decode(&bytes, 11).unwrap_err().to_string().contains("address space"));
        bytes[0] = 0;
        assert!(Header::decode(&bytes, 11).is_ok(), "no bytes, no overflow");
    }

    #[test]
    fn status_frames_have_the_documented_bytes() {
        assert_eq!(Status::Ok.encode(), *b"\0\0\0\0VTCM");
        assert_eq!(Status::AddressRejected.encode(), *b"\x01\0\0\0VTCM");
        for code in [0, 1, 2, u32::MAX] {
            let status = Status::from_code(code);
            assert_eq!((status.code(), Status::decode(status.encode()).unwrap()), (code, status));
        }
        assert!(Status::decode(*b"\0\0\0\0MCTV").is_err());
    }
}
