//! What a device arena says about itself in the handshake.

use capture_arena::{
    Arena, boot_id,
    cuda::{ArenaKind, handle_to_hex},
};
use control_proto::mooncake::handshake::{Buffer, DeviceShare, SegmentDescriptor};
use transport_core::{Error, ErrorKind, RemoteAddr, Result, SessionName};

use super::FdServer;

/// Plain memory by CUDA IPC handle, as Mooncake's transport of that name reads it.
pub const PROTOCOL_IPC: &str = "nvlink_intra";
/// Fabric memory by its handle, as Mooncake's transport of that name reads it.
pub const PROTOCOL_FABRIC: &str = "nvlink";
/// Memory by file descriptor, between processes of this library.
pub const PROTOCOL_FD: &str = "featurestore_fd";

/// A device arena that other processes can open.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) descriptor: SegmentDescriptor,
    pub(crate) fds: Option<FdServer>,
}

impl Shared {
    /// Describes the arena, and starts handing out its file descriptor if that is its handle. None
    /// for an arena in host memory.
    pub(crate) fn of(arena: &Arena, session: &SessionName) -> Result<Option<Self>> {
        const OPERATION: &str = "share device arena";
        let Some(block) = arena.backing().device_block() else { return Ok(None) };
        if arena.base() != RemoteAddr(block.address().0) {
            return Err(Error::new(
                ErrorKind::ConfigInvalid,
                OPERATION,
                "descriptors of a device arena carry the memory's real addresses",
            )
            .with("expected", block.address())
            .with("found", format_args!("{:#x}", arena.base().0))
            .remedy("leave the arena's base address at its default"));
        }
        let (protocol, fds) = match block.kind() {
            ArenaKind::PosixFd => {
                (PROTOCOL_FD, Some(FdServer::start(arena.backing(), arena.epoch())?))
            }
            ArenaKind::Fabric => (PROTOCOL_FABRIC, None),
            _ => (PROTOCOL_IPC, None),
        };
        if fds.is_none() && block.handle().is_none() {
            return Err(Error::new(
                ErrorKind::ConfigInvalid,
                OPERATION,
                "the arena was made for nobody to open",
            )
            .with("kind", block.kind())
            .remedy("make it for its peers: nvlink_intra, nvlink or native"));
        }
        let buffer = Buffer {
            addr: block.address().0,
            length: block.len(),
            name: "*".into(),
            shm_name: block.handle().map(handle_to_hex).unwrap_or_default(),
        };
        let device = DeviceShare {
            boot_id: boot_id()?,
            device_uuid: uuid_to_hex(block.device().uuid()),
            fd_socket: fds.as_ref().map(|fds| fds.name().to_owned()),
        };
        let descriptor = SegmentDescriptor {
            buffers: vec![buffer],
            featurestore_device: Some(device),
            featurestore_epoch: Some(arena.epoch()),
            metadata_version: Some(0),
            name: session.to_string(),
            protocol: protocol.into(),
            ..SegmentDescriptor::default()
        };
        Ok(Some(Self { descriptor, fds }))
    }
}

fn uuid_to_hex(uuid: [u8; 16]) -> String {
    uuid.iter().map(|byte| format!("{byte:02x}")).collect()
}
