//! Which kind of device memory an arena is made of: what peers need, what the configuration allows,
//! and what the machine really does.

use std::{fmt, os::fd::AsFd, str::FromStr};

use transport_core::{Error, ErrorKind, Result};

use super::{
    Access, CudaError, CudaResult, Device, DeviceAttribute, DevicePtr, MemoryPlan, ShareAs,
    memory::{Mapped, Physical, Plain},
};

/// Least that a plain block is made of, in bytes: smaller ones share theirs with other blocks.
pub(super) const PLAIN_GRANULE: u64 = 2 << 20;

/// How the memory of a device arena is made, and with that how peers open it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ArenaKind {
    /// By a fabric handle, wherever the NVLink fabric reaches.
    Fabric,
    /// By a file descriptor, in processes of this host that it is sent to; also read-only.
    PosixFd,
    /// As `cudaMalloc` does it: by an IPC handle in processes of this host, and for network cards.
    Plain,
}

/// Who is to open the memory of an arena, which decides the kinds that will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ArenaPeers {
    /// Mooncake's `nvlink`: fabric memory, and nothing that a peer could not map.
    Nvlink,
    /// Mooncake's `nvlink_intra`: plain memory with an IPC handle.
    NvlinkIntra,
    /// Network cards.
    Rdma,
    /// Processes of this library, on this host or in this fabric.
    Native,
    /// Nobody: a pool that this process alone reads and writes.
    Nobody,
}

impl ArenaKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Fabric, Self::PosixFd, Self::Plain];

    /// Its name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fabric => "fabric",
            Self::PosixFd => "posix_fd",
            Self::Plain => "plain",
        }
    }

    pub(super) fn share(self) -> Option<ShareAs> {
        match self {
            Self::Fabric => Some(ShareAs::Fabric),
            Self::PosixFd => Some(ShareAs::PosixFd),
            Self::Plain => None,
        }
    }
}

impl fmt::Display for ArenaKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ArenaKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            Error::new(ErrorKind::ConfigInvalid, "read arena kind", "no such kind of memory")
                .with("found", text)
                .remedy("choose fabric, posix_fd or plain")
        })
    }
}

impl ArenaPeers {
    /// Kinds that these peers can open, the best first.
    pub fn kinds(self) -> &'static [ArenaKind] {
        match self {
            Self::Nvlink => &[ArenaKind::Fabric],
            Self::NvlinkIntra => &[ArenaKind::Plain],
            Self::Rdma => &[ArenaKind::Plain, ArenaKind::PosixFd, ArenaKind::Fabric],
            Self::Native => &[ArenaKind::Fabric, ArenaKind::PosixFd, ArenaKind::Plain],
            Self::Nobody => &[ArenaKind::Plain],
        }
    }

    /// Its name in errors.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nvlink => "nvlink",
            Self::NvlinkIntra => "nvlink_intra",
            Self::Rdma => "rdma",
            Self::Native => "native",
            Self::Nobody => "nobody",
        }
    }

    /// Whether they open plain memory by an IPC handle.
    pub(super) fn need_ipc(self) -> bool {
        matches!(self, Self::NvlinkIntra | Self::Native)
    }
}

/// What happened when a granule of one kind was made, handed out and taken in again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tried {
    /// It works.
    Works {
        /// Whether network cards may read and write it.
        rdma: bool,
    },
    /// This machine cannot or may not; the step that said so.
    Refused {
        /// Such as `create` or `export`.
        step: &'static str,
        /// What the driver returned.
        error: CudaError,
    },
    /// It broke otherwise; the step that did.
    Failed {
        /// As above.
        step: &'static str,
        /// As above.
        error: CudaError,
    },
}

/// What a device can do, found out by doing it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KindProbe {
    /// Device ordinal.
    pub device: u32,
    /// Each kind, in the order of [`ArenaKind::ALL`].
    pub kinds: Vec<(ArenaKind, Tried)>,
    /// Whether the driver says that fabric handles work, for comparison.
    pub says_fabric: bool,
    /// Whether this container sees a channel of the fabric's daemon (IMEX), without which fabric
    /// handles are refused.
    pub has_imex_channel: bool,
}

impl KindProbe {
    /// Makes a granule of each kind, exports it, imports it where one process can do both, maps it,
    /// and has the device write and read it. What the driver says about itself is not believed.
    ///
    /// # Errors
    /// [`ErrorKind::CapacityExceeded`] where the device has no memory for a granule: that says
    /// nothing about what it can do.
    pub fn run(device: &Device) -> Result<Self> {
        let mut kinds = Vec::with_capacity(ArenaKind::ALL.len());
        for kind in ArenaKind::ALL {
            let tried = try_kind(device, kind);
            if let Tried::Failed { step, error } = &tried
                && error.is_out_of_memory()
            {
                return Err(
                    super::arena::refused(device, PROBE, step, error.clone(), 0).with("kind", kind)
                );
            }
            kinds.push((kind, tried));
        }
        let asked = device
            .with(|api| api.device_attribute(device.ordinal(), DeviceAttribute::FabricHandles));
        let channels = std::fs::read_dir(IMEX_CHANNELS);
        Ok(Self {
            device: device.ordinal(),
            kinds,
            says_fabric: asked.is_ok_and(|says| says == 1),
            has_imex_channel: channels.is_ok_and(|mut entries| entries.next().is_some()),
        })
    }

    /// What came out for one kind.
    ///
    /// # Panics
    /// Never: every kind is tried.
    pub fn of(&self, kind: ArenaKind) -> &Tried {
        let found = self.kinds.iter().find(|(of, _)| *of == kind);
        &found.expect("every kind is tried").1
    }

    /// Chooses the first of `allowed` that works. Only a refusal moves on to the next.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where none works, naming what each returned, and whatever else
    /// went wrong.
    pub(super) fn choose(
        &self,
        allowed: &[ArenaKind],
        peers: ArenaPeers,
    ) -> Result<(ArenaKind, bool)> {
        let mut refusals = Vec::new();
        for &kind in allowed {
            match self.of(kind) {
                Tried::Works { rdma } if *rdma || peers != ArenaPeers::Rdma => {
                    return Ok((kind, *rdma));
                }
                Tried::Works { .. } => refusals.push(format!("{kind}: not for network cards")),
                // Network cards need no handle, and a pool is opened by nobody.
                Tried::Refused { step: "export", .. }
                    if kind == ArenaKind::Plain && !peers.need_ipc() =>
                {
                    return Ok((kind, true));
                }
                Tried::Refused { step, error } => {
                    refusals.push(format!("{kind}: {step} returned {error}"));
                }
                Tried::Failed { step, error } => {
                    return Err(error
                        .clone()
                        .during(PROBE)
                        .with("device", self.device)
                        .with("kind", kind)
                        .with("step", step)
                        .remedy(
                            "a device that fails so is not usable; look at dmesg for its Xid",
                        ));
                }
            }
        }
        let mut error = Error::new(
            ErrorKind::Unsupported,
            PROBE,
            "no kind of memory that is allowed works on this device",
        )
        .with("device", self.device)
        .with("peers", peers.name())
        .with("tried", refusals.join("; "));
        if allowed.contains(&ArenaKind::Fabric) {
            error = error
                .with("driver_says_fabric", self.says_fabric)
                .with("imex_channel", self.has_imex_channel);
        }
        Err(error.remedy(match peers {
            ArenaPeers::Nvlink => {
                "fabric memory needs an IMEX channel in this container; or use nvlink_intra \
                 between processes of one host"
            }
            _ => "allow another kind of memory, or use a transport over host memory",
        }))
    }
}

const PROBE: &str = "probe device memory";
/// Where the driver puts the fabric's channels.
const IMEX_CHANNELS: &str = "/dev/nvidia-caps-imex-channels";

/// What an older driver returns for a type of handle that it does not know counts as a refusal.
fn is_refusal(step: &str, error: &CudaError) -> bool {
    error.is_refusal() || (step == "create" && error.code == CudaError::INVALID_VALUE)
}

fn try_kind(device: &Device, kind: ArenaKind) -> Tried {
    let mut step = "create";
    let tried = match kind.share() {
        None => try_plain(device, &mut step).map(|()| true),
        Some(share) => try_shared(device, share, &mut step),
    };
    match tried {
        Ok(rdma) => Tried::Works { rdma },
        Err(error) if is_refusal(step, &error) => Tried::Refused { step, error },
        Err(error) => Tried::Failed { step, error },
    }
}

fn try_plain(device: &Device, step: &mut &'static str) -> CudaResult<()> {
    let block = Plain::new(device, PLAIN_GRANULE)?;
    *step = "access";
    touch(device, block.address(), PLAIN_GRANULE)?;
    *step = "export";
    // Only another process can open it.
    block.ipc_handle().map(drop)
}

fn try_shared(device: &Device, share: ShareAs, step: &mut &'static str) -> CudaResult<bool> {
    let (memory, granule, rdma) = create(device, share, 1)?;
    *step = "export";
    let imported = match share {
        ShareAs::Fabric => {
            let handle = memory.export_fabric()?;
            *step = "import";
            Physical::import_fabric(device, &handle)?
        }
        ShareAs::PosixFd => {
            let fd = memory.export_fd()?;
            *step = "import";
            Physical::import_fd(device, fd.as_fd())?
        }
    };
    *step = "map";
    let own = Mapped::new(memory, granule, Access::ReadWrite)?;
    let other = Mapped::new(imported, granule, Access::ReadWrite)?;
    *step = "access";
    touch(device, own.address(), granule)?;
    touch(device, other.address(), granule)?;
    Ok(rdma)
}

/// Makes physical memory of at least `len` bytes, for network cards too where that is offered; with
/// its length, and whether it is.
pub(super) fn create(
    device: &Device,
    share: ShareAs,
    len: u64,
) -> CudaResult<(Physical, u64, bool)> {
    let attribute = DeviceAttribute::RdmaWithVirtualMemory;
    let offered = device.with(|api| api.device_attribute(device.ordinal(), attribute));
    let mut plan = MemoryPlan { device: device.ordinal(), share, rdma: offered? == 1 };
    loop {
        let granule = device.with(|api| api.granularity(&plan))?.max(1);
        let rounded = len.checked_next_multiple_of(granule);
        let rounded =
            rounded.ok_or_else(|| CudaError::new("cuMemCreate", CudaError::INVALID_VALUE))?;
        match Physical::create(device, rounded, &plan) {
            Ok(memory) => return Ok((memory, rounded, plan.rdma)),
            // Offered, and then not had: the same without, which says which of both is refused.
            Err(error) if plan.rdma && is_refusal("create", &error) => plan.rdma = false,
            Err(error) => return Err(error),
        }
    }
}

/// Has the device write and read the first and the last bytes.
pub(super) fn touch(device: &Device, at: DevicePtr, len: u64) -> CudaResult<()> {
    const CALL: &str = "compare";
    let unlike = || CudaError::new(CALL, CudaError::ILLEGAL_ADDRESS);
    let mut found = [0_u8; 8];
    let stream = Scratch { device, id: device.with(|api| api.stream_create())? };
    for (start, byte) in [(at, 0xA5), (at.offset(len - 8), 0x5A)] {
        let to = DevicePtr(found.as_mut_ptr() as u64);
        device.with(|api| {
            // SAFETY: eight bytes of a block that only the caller knows.
            unsafe { api.fill(start, byte, 8, stream.id) }?;
            // SAFETY: as above, into a local that outlives the wait below.
            unsafe { api.copy(to, start, 8, stream.id) }?;
            // SAFETY: our own stream.
            unsafe { api.stream_synchronize(stream.id) }
        })?;
        if std::hint::black_box(found) != [byte; 8] {
            return Err(unlike());
        }
    }
    Ok(())
}

struct Scratch<'a> {
    device: &'a Device,
    id: super::StreamId,
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        let _ = self.device.with(|api| {
            // SAFETY: our own stream, once. Whatever is queued on it is waited for first, since it
            // may write a local.
            let _ = unsafe { api.stream_synchronize(self.id) };
            // SAFETY: as above.
            unsafe { api.stream_destroy(self.id) }
        });
    }
}
