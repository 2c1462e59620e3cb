//! Device memory for an arena or a pool: one block, made and checked at start-up.

use std::{fmt, os::fd::OwnedFd};

use transport_core::{ByteSize, Error, ErrorKind, Result};

use super::{
    Access, ArenaKind, ArenaPeers, CudaError, CudaResult, Device, DevicePtr, During, HANDLE_BYTES,
    HandleBytes,
    kinds::{PLAIN_GRANULE, create, touch},
    memory::{Mapped, Plain},
};

const CREATE: &str = "create device arena";

/// What a device arena is to be.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeviceArenaConfig {
    /// Size in bytes; rounded up to what the device gives out, 2 MiB as a rule.
    pub bytes: u64,
    /// Who is to open it.
    pub peers: ArenaPeers,
    /// Kinds of memory that may be used, the one to be preferred first. Each must be one that the
    /// peers can open. The next is taken only where the device refuses the one before.
    pub kinds: Vec<ArenaKind>,
}

impl DeviceArenaConfig {
    /// `bytes` for `peers`, of the first kind that works among those they can open.
    pub fn new(bytes: u64, peers: ArenaPeers) -> Self {
        Self { bytes, peers, kinds: peers.kinds().to_vec() }
    }

    /// Sets the kinds that may be used.
    #[must_use]
    pub fn kinds(mut self, kinds: impl Into<Vec<ArenaKind>>) -> Self {
        self.kinds = kinds.into();
        self
    }
}

/// One block of device memory, and how other processes find it. Freed when dropped.
///
/// Work that was queued on it must be done by then.
pub struct DeviceBlock {
    place: Place,
    handle: Option<HandleBytes>,
    device: Device,
    len: u64,
    rdma: bool,
}

enum Place {
    Mapped(Mapped, ArenaKind),
    Plain(Plain),
}

impl DeviceBlock {
    /// Chooses the kind by a probe of the device, makes the memory, exports it, and has the device
    /// write and read both its ends.
    ///
    /// # Errors
    /// [`ErrorKind::CapacityExceeded`] where the device has too little memory, whatever else is
    /// allowed; [`ErrorKind::Unsupported`] where no kind that is allowed works;
    /// [`ErrorKind::ConfigInvalid`].
    pub fn create(device: &Device, config: &DeviceArenaConfig) -> Result<Self> {
        config.check()?;
        let with_size = |e: Error| e.with("requested", show(config.bytes));
        let probe = device.kinds().map_err(with_size)?;
        let (kind, rdma) = probe.choose(&config.kinds, config.peers).map_err(with_size)?;
        let mut step = "create";
        let made = Self::make(device, kind, config, rdma, &mut step);
        made.map_err(|error| refused(device, CREATE, step, error, config.bytes).with("kind", kind))
    }

    fn make(
        device: &Device,
        kind: ArenaKind,
        config: &DeviceArenaConfig,
        rdma: bool,
        step: &mut &'static str,
    ) -> CudaResult<Self> {
        let (place, handle, len, rdma) = match kind {
            ArenaKind::Plain => {
                let len = config.bytes.checked_next_multiple_of(PLAIN_GRANULE);
                let len =
                    len.ok_or_else(|| CudaError::new("cuMemAlloc", CudaError::INVALID_VALUE))?;
                let block = Plain::new(device, len)?;
                *step = "export";
                let handle = match block.ipc_handle() {
                    Ok(handle) => Some(handle),
                    Err(error) if error.is_refusal() && !config.peers.need_ipc() => None,
                    Err(error) => return Err(error),
                };
                (Place::Plain(block), handle, len, rdma)
            }
            ArenaKind::Fabric | ArenaKind::PosixFd => {
                let share = kind.share().expect("not plain");
                let (memory, len, rdma) = create(device, share, config.bytes)?;
                *step = "export";
                let handle = match kind {
                    ArenaKind::Fabric => Some(memory.export_fabric()?),
                    _ => memory.export_fd().map(|_| None)?,
                };
                *step = "map";
                let mapped = Mapped::new(memory, len, Access::ReadWrite)?;
                (Place::Mapped(mapped, kind), handle, len, rdma)
            }
        };
        let this = Self { place, handle, device: device.clone(), len, rdma };
        *step = "access";
        touch(device, this.address(), len)?;
        Ok(this)
    }

    /// Where it starts.
    pub fn address(&self) -> DevicePtr {
        match &self.place {
            Place::Mapped(mapped, _) => mapped.address(),
            Place::Plain(block) => block.address(),
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no bytes; never so.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Which kind it became.
    pub fn kind(&self) -> ArenaKind {
        match self.place {
            Place::Mapped(_, kind) => kind,
            Place::Plain(_) => ArenaKind::Plain,
        }
    }

    /// Whether network cards may read and write it.
    pub fn is_rdma_capable(&self) -> bool {
        self.rdma
    }

    /// The handle by which other processes open the whole block: of the fabric, or of CUDA IPC for
    /// plain memory. None where a file descriptor is the handle.
    pub fn handle(&self) -> Option<&HandleBytes> {
        self.handle.as_ref()
    }

    /// A file descriptor by which other processes map the block.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for the other kinds.
    pub fn export_fd(&self) -> Result<OwnedFd> {
        const OPERATION: &str = "export file descriptor";
        match &self.place {
            Place::Mapped(mapped, ArenaKind::PosixFd) => {
                mapped.memory().export_fd().during(OPERATION)
            }
            _ => Err(Error::new(
                ErrorKind::Unsupported,
                OPERATION,
                "memory of this kind has no file descriptor",
            )
            .with("kind", self.kind())
            .remedy("use its handle, or make the arena of kind posix_fd")),
        }
    }

    /// A DMA buffer of the whole block, for registering it with network cards.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where driver or device cannot.
    pub fn export_dma_buf(&self) -> Result<OwnedFd> {
        let exported = self.device.with(|api| {
            // SAFETY: our own block.
            unsafe { api.export_dma_buf(self.address(), self.len) }
        });
        exported.during("export DMA buffer").map_err(|e| {
            e.with("kind", self.kind())
                .remedy("use a driver for CUDA 11.7 or newer with open kernel modules, or peermem")
        })
    }
}

impl DeviceArenaConfig {
    fn check(&self) -> Result<()> {
        let invalid = |why| Error::new(ErrorKind::ConfigInvalid, CREATE, why);
        if self.bytes == 0 {
            return Err(invalid("an arena has at least one byte")
                .remedy("set the arena's size, such as 32GiB; it is never guessed"));
        }
        if self.kinds.is_empty() {
            return Err(invalid("no kind of memory is allowed")
                .remedy("allow one, such as plain for nvlink_intra"));
        }
        let possible = self.peers.kinds();
        match self.kinds.iter().find(|kind| !possible.contains(kind)) {
            None => Ok(()),
            Some(kind) => {
                let names: Vec<_> = possible.iter().map(|kind| kind.name()).collect();
                Err(invalid("the peers cannot open memory of this kind")
                    .with("kind", kind)
                    .with("peers", self.peers.name())
                    .remedy(format!("allow only {}", names.join(", "))))
            }
        }
    }
}

/// What the driver refused, with what a person needs to know to change it.
pub(super) fn refused(
    device: &Device,
    operation: &'static str,
    step: &str,
    error: CudaError,
    bytes: u64,
) -> Error {
    let out_of_memory = error.is_out_of_memory();
    let error = error
        .during(operation)
        .with("step", step)
        .with("device", device.ordinal())
        .with("name", device.name());
    let error = if bytes > 0 { error.with("requested", show(bytes)) } else { error };
    let memory = device.memory();
    let error = match &memory {
        Ok(memory) => error.with("free", show(memory.free)).with("total", show(memory.total)),
        Err(_) => error,
    };
    match memory {
        Ok(memory) if out_of_memory => error.remedy(format!(
            "choose an arena smaller than the {} that are free, or end what else uses the device",
            show(memory.free)
        )),
        _ if out_of_memory => error.remedy("choose a smaller arena"),
        _ => error.remedy("allow another kind of memory, or look at dmesg for what the device did"),
    }
}

fn show(bytes: u64) -> String {
    ByteSize::new(bytes).map_or_else(|| "2^63 or more".into(), |b| format!("{b:#}"))
}

/// A handle as Mooncake writes it: two lower-case digits a byte.
pub fn handle_to_hex(handle: &HandleBytes) -> String {
    use fmt::Write;
    let mut text = String::with_capacity(2 * HANDLE_BYTES);
    for byte in handle {
        write!(text, "{byte:02x}").expect("writing to a string");
    }
    text
}

/// Reads a handle as Mooncake writes it; digits of either case.
///
/// # Errors
/// [`ErrorKind::Protocol`] for anything but 128 hexadecimal digits.
pub fn handle_from_hex(text: &str) -> Result<HandleBytes> {
    let refuse = || {
        Error::new(ErrorKind::Protocol, "read memory handle", "not 128 hexadecimal digits")
            .with("found", text.chars().take(16).collect::<String>())
            .with("length", text.len())
    };
    let digit = |byte: u8| (byte as char).to_digit(16).map(|digit| digit as u8);
    let mut handle = [0; HANDLE_BYTES];
    if text.len() != 2 * HANDLE_BYTES {
        return Err(refuse());
    }
    for (byte, pair) in handle.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let (high, low) = digit(pair[0]).zip(digit(pair[1])).ok_or_else(refuse)?;
        *byte = high << 4 | low;
    }
    Ok(handle)
}

impl fmt::Debug for DeviceBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBlock")
            .field("device", &self.device.ordinal())
            .field("kind", &self.kind())
            .field("len", &self.len)
            .field("rdma", &self.rdma)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_survive_their_text() {
        let handle: HandleBytes = std::array::from_fn(|i| (i * 37) as u8);
        let text = handle_to_hex(&handle);
        assert_eq!(text.len(), 128);
        assert!(text.starts_with("00254a6f"));
        assert_eq!(handle_from_hex(&text).unwrap(), handle);
        assert_eq!(handle_from_hex(&text.to_uppercase()).unwrap(), handle);
        for bad in ["", "00", &text[1..], &format!("{}g", &text[1..]), &"é".repeat(64)] {
            assert_eq!(handle_from_hex(bad).unwrap_err().kind(), ErrorKind::Protocol, "{bad}");
        }
    }
}
