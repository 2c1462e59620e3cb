//! [`Transport`](transport_core::Transport) over Mooncake Store: objects in a distributed pool.
//!
//! Each tensor is one hard-pinned object at `{store_id}/{sample_id}/g{gen}/{name}` whose value is
//! the raw bytes: what today's capture servers write and trainers read. A tensor without bytes has
//! no object. Payload only moves between objects and *registered* memory, through the batch calls;
//! registration happens when the pool grows and never per call
//! ([`StoreStats::registrations`] proves it).
//!
//! ```no_run
//! # fn main() -> transport_core::Result<()> {
//! use mooncake_sys::{StoreApi, StoreSetup};
//! use transport_mooncake_store::{StoreConfig, StoreTransport};
//! # fn connect(_: &StoreSetup) -> transport_core::Result<std::sync::Arc<dyn StoreApi>> { todo() }
//! # fn todo() -> transport_core::Result<std::sync::Arc<dyn StoreApi>> { unreachable!() }
//! let setup = StoreSetup::client("127.0.0.1", "127.0.0.1:50051");
//! let transport = StoreTransport::start(connect(&setup)?, StoreConfig::default())?;
//! # Ok(()) }
//! ```
//!
//! # What the store cannot do, and what follows
//! - It cannot tell two lives of a key apart. Within this process an older descriptor is recognised
//!   by its sequence number; across processes it is not, so
//!   [`Capabilities::staleness_checked`](transport_core::Capabilities::staleness_checked) is false.
//! - It never overwrites. Where the provider has put sessions
//!   ([`StoreCapabilities::put_new`](mooncake_sys::StoreCapabilities::put_new): the wheel, in clients
//!   without object memory of their own), the write itself says that a key is taken. Elsewhere writing
//!   an existing key succeeds and keeps the old value: there a publish looks before it writes, and
//!   again afterwards, and two *processes* that publish one key at the same moment are not told apart.
//! - It has no holds: a forced removal takes an object away under a reader, whose read then fails.
//!   Only [`release`](transport_core::Transport::release) and a publish with `replace` remove.
//! - Mooncake's engine never cancels: memory of a read that failed half-way is quarantined until the
//!   client is closed.
//!
//! # Reads past Mooncake's engine
//! With a [`SegmentReader`](mooncake_sys::SegmentReader) ([`StoreTransport::start_with`]) the master
//! says where an object lies and grants the lease, and the bytes come from the owner of its segment
//! over the reader's own wire. What has taken longer than the lease is read again, as ever. Left to
//! Mooncake are objects in this client's own segment, and in segments whose owners turn out to speak
//! another wire, with a warning.
//!
//! A client with a reader and without object memory reads
//! [ranges](transport_core::Capabilities::ranges) of tensors: a range is another address. Ranges of
//! what is left to Mooncake all the same are refused with
//! [`Unsupported`](transport_core::ErrorKind::Unsupported), and no byte moves: its engine reads whole
//! objects, so that whoever wants pieces of one reads it whole, once.
//!
//! The native tcp engine (`transport_mooncake_direct::TcpEngine`) is
//! such a reader: it moves large objects about twice as fast as Mooncake's, and the memory of a read
//! that failed is free again at once.
//!
//! # Device memory
//! The store only knows memory of the host. With the feature `cuda` and a `DeviceMemory`
//! (`StoreTransport::start_on_device`) tensors may also lie on a device, and be fetched to it: the pool
//! is page-locked then, and the device copies between it and its own memory at the rate of the bus,
//! while the store moves another part of the same call. All of it is host payload.
//!
//! # Grouped layout
//! [`Layout::Grouped`] puts the small tensors of a sample into one object, `…/g{gen}/@small`, and
//! so makes fewer, larger objects. It is off by default, because other readers of the store do not
//! know it. Both sides must be configured alike; a descriptor does not say which layout it means.

#![deny(unsafe_code)] // but for `io`

mod config;
#[cfg_attr(not(feature = "cuda"), path = "device/absent.rs")]
mod device;
mod fetch;
mod io;
mod landing;
mod layout;
mod ledger;
mod memory;
mod native;
mod objects;
mod publish;
mod reading;
mod release;
mod segments;
mod transport;
mod workers;

pub use config::{Layout, StoreConfig};
#[cfg(feature = "cuda")]
pub use device::DeviceMemory;
pub use ledger::{DrainReport, StoreStats};
pub use transport::StoreTransport;
