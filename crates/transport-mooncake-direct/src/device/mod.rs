//! Device memory between processes: what a publisher tells about its arena, and how a reader opens
//! it.
//!
//! Mooncake's own fields carry the handle wherever there is one (`shm_name`: of CUDA IPC under
//! `nvlink_intra`, of the fabric under `nvlink`), always of the whole block, with its first address
//! and length; a descriptor's address less that first address is the offset in the block. So a
//! Mooncake process reads such an arena, and [`open_block`] opens a Mooncake process's memory.
//!
//! Memory whose handle is a file descriptor goes under the protocol [`PROTOCOL_FD`], between
//! processes of this library. The descriptor is sent over a Unix socket and not fetched out of the
//! publisher's process: fetching (`pidfd_getfd`) needs the rights of a debugger, which most hosts
//! deny to siblings of one user, while a socket works for any process of the same user, and the
//! kernel tells both ends who the other is.

mod fd;
mod open;
mod segment;

pub use fd::{FdServer, FdServerStats, receive_fd};
pub use open::{OpenedBlock, open_block};
pub(crate) use segment::Shared;
pub use segment::{PROTOCOL_FABRIC, PROTOCOL_FD, PROTOCOL_IPC};
