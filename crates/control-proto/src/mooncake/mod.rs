//! Mooncake's transfer engine over tcp: how peers introduce themselves and how bytes move.
//!
//! A session name `host:port` is the address of the [`handshake`]: one request and one reply per
//! connection, which say where the [`data`] port is. Data connections carry any number of reads
//! and writes, one after the other.

pub mod data;
pub mod handshake;
