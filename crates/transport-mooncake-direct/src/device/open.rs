//! Opening another process's device memory from what it says about itself.

use std::{os::fd::AsFd, time::Instant};

use capture_arena::{
    boot_id,
    cuda::{Access, Device, DevicePtr, PeerMemory, handle_from_hex},
};
use control_proto::mooncake::handshake::{Buffer, SegmentDescriptor};
use transport_core::{Error, ErrorKind, RemoteAddr, Result};

use super::{PROTOCOL_FABRIC, PROTOCOL_FD, PROTOCOL_IPC, receive_fd};

const OPEN: &str = "open device memory of peer";

/// A whole block of another process, mapped here; unmapped when dropped.
#[derive(Debug)]
pub struct OpenedBlock {
    memory: PeerMemory,
    base: RemoteAddr,
    bytes: u64,
    is_afar: bool,
}

impl OpenedBlock {
    /// First address, in the other process.
    pub fn base(&self) -> RemoteAddr {
        self.base
    }

    /// Length in bytes, as the other process says.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it lies on another device than the one that it is mapped for.
    pub fn is_afar(&self) -> bool {
        self.is_afar
    }

    /// The mapping.
    pub fn memory(&self) -> &PeerMemory {
        &self.memory
    }

    /// Where `len` bytes at the other process's `address` are in this one.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfRange`] if they do not all lie in the block, if only for the last byte.
    pub fn locate(&self, address: RemoteAddr, len: u64) -> Result<DevicePtr> {
        let offset = address.0.checked_sub(self.base.0);
        let inside = offset.filter(|offset| *offset <= self.bytes && len <= self.bytes - *offset);
        inside.and_then(|offset| self.memory.range(offset, len)).ok_or_else(|| {
            Error::new(ErrorKind::OutOfRange, OPEN, "the range leaves the peer's block")
                .with("address", format_args!("{:#x}", address.0))
                .with("bytes", len)
                .with("block", format_args!("{:#x}", self.base.0))
                .with("block_bytes", self.bytes)
                .remedy("fetch with a current descriptor of that peer")
        })
    }
}

/// Opens the block of `peer` that `address` lies in, for `device`: read-only where its handle
/// allows that.
///
/// Reads only; the caller keeps the block open for as long as it uses it, and opens none twice.
///
/// # Errors
/// [`ErrorKind::OutOfRange`] where the peer has no such memory, [`ErrorKind::Unsupported`] for
/// another protocol or host, [`ErrorKind::PeerGone`] for a handle of what no longer is,
/// [`ErrorKind::Stale`] where another process has taken the peer's place.
pub fn open_block(
    device: &Device,
    peer: &SegmentDescriptor,
    address: RemoteAddr,
    deadline: Instant,
) -> Result<OpenedBlock> {
    let named = |e: Error| e.with("peer", &peer.name).with("protocol", &peer.protocol);
    let buffer =
        peer.buffers.iter().find(|buffer| buffer.contains(address, 1)).ok_or_else(|| {
            named(
                Error::new(ErrorKind::OutOfRange, OPEN, "the peer has no memory there")
                    .with("address", format_args!("{:#x}", address.0))
                    .remedy("fetch with a current descriptor of that peer"),
            )
        })?;
    let memory = open(device, peer, buffer, deadline).map_err(named)?;
    // A block of the driver's may be longer than what is registered of it, and never shorter.
    if memory.len() < buffer.length {
        return Err(named(
            Error::new(ErrorKind::Protocol, OPEN, "the peer's block is shorter than it says")
                .with("expected", buffer.length)
                .with("found", memory.len()),
        ));
    }
    // Where the driver does not tell, it is taken for memory at hand.
    let lies_on = device.bind().map(|_bound| device.api().device_of(memory.address()));
    let is_afar = matches!(lies_on, Ok(Ok(Some(ordinal))) if ordinal != device.ordinal());
    Ok(OpenedBlock { memory, base: RemoteAddr(buffer.addr), bytes: buffer.length, is_afar })
}

fn open(
    device: &Device,
    peer: &SegmentDescriptor,
    buffer: &Buffer,
    deadline: Instant,
) -> Result<PeerMemory> {
    let unsupported = |why| Error::new(ErrorKind::Unsupported, OPEN, why);
    if let Some(share) = &peer.featurestore_device
        && peer.protocol != PROTOCOL_FABRIC
    {
        let own = boot_id()?;
        if share.boot_id != own {
            return Err(unsupported("the peer is on another host")
                .with("expected", own)
                .with("found", share.boot_id.chars().take(40).collect::<String>())
                .remedy("use nvlink in one fabric, rdma or tcp between hosts"));
        }
    }
    match &*peer.protocol {
        PROTOCOL_IPC => PeerMemory::open_ipc(device, &handle_from_hex(&buffer.shm_name)?),
        PROTOCOL_FABRIC => {
            let handle = handle_from_hex(&buffer.shm_name)?;
            PeerMemory::import_fabric(device, &handle, buffer.length, Access::Read)
        }
        PROTOCOL_FD => {
            let socket = peer.featurestore_device.as_ref().and_then(|s| s.fd_socket.as_ref());
            let socket = socket.ok_or_else(|| {
                Error::new(
                    ErrorKind::Protocol,
                    OPEN,
                    "the peer does not say where its descriptor is",
                )
            })?;
            let (fd, grant) = receive_fd(socket, deadline)?;
            if peer.featurestore_epoch.is_some_and(|epoch| epoch != grant.epoch) {
                return Err(Error::new(ErrorKind::Stale, OPEN, "another process has taken over")
                    .with("socket", socket)
                    .remedy("ask the peer for its metadata again"));
            }
            if grant.bytes != buffer.length {
                return Err(Error::new(ErrorKind::Protocol, OPEN, "the memory has another length")
                    .with("expected", buffer.length)
                    .with("found", grant.bytes));
            }
            PeerMemory::import_fd(device, fd.as_fd(), grant.bytes, Access::Read)
        }
        _ => Err(unsupported("the peer's memory is reached by another protocol").remedy(
            "choose the engine of the peer's protocol, or start the peer with nvlink_intra",
        )),
    }
}
