//! What a server's arena is made of: taken and checked at start-up, not at the first capture.

use capture_arena::Backing;
use transport_core::{Error, Result};

use crate::config::{ArenaKind, Receive, ServerConfig, TransportChoice};

/// Most threads that take an arena's memory: more only wait for each other in the kernel.
const POPULATORS: usize = 8;

/// Memory of an arena, and why it is of that kind.
pub(super) struct Memory {
    pub(super) backing: Backing,
    pub(super) name: &'static str,
    pub(super) reason: String,
    #[cfg(feature = "cuda")]
    pub(super) tensors: Option<transport_mooncake_direct::cuda::DeviceTensors>,
}

impl Memory {
    /// Takes the memory that the settings ask for. Only `auto` for both transport and kind goes on
    /// to another kind, and says why.
    pub(super) fn take(config: &ServerConfig) -> Result<Self> {
        let (transport, kind) = (config.transport, config.arena_kind);
        match kind {
            ArenaKind::Heap => Self::host(kind, config, "asked for: arena_kind = heap".into()),
            ArenaKind::Shared => Self::host(kind, config, "asked for: arena_kind = shared".into()),
            ArenaKind::Device => device::take(config),
            ArenaKind::Auto if transport.is_of_devices() => device::take(config),
            ArenaKind::Auto
                if transport == TransportChoice::Auto && config.receive == Receive::Host =>
            {
                let reason = "what trainers receive in host memory: receive = host".into();
                Self::host(ArenaKind::Shared, config, reason)
            }
            ArenaKind::Auto if transport == TransportChoice::Auto => match device::take(config) {
                Ok(memory) => Ok(memory),
                Err(why) => {
                    let reason = format!("device memory is not to be had: {why}");
                    tracing::info!(%reason, "the arena is host memory");
                    Self::host(ArenaKind::Shared, config, reason)
                }
            },
            ArenaKind::Auto => {
                let reason = format!("what the transport {transport} reads best");
                Self::host(ArenaKind::Shared, config, reason)
            }
        }
    }

    fn host(kind: ArenaKind, config: &ServerConfig, reason: String) -> Result<Self> {
        let bytes = config.arena.get();
        let (name, backing) = match kind {
            ArenaKind::Heap => ("heap", Backing::heap(bytes)?),
            _ => ("shared", Backing::shared(bytes)?),
        };
        if config.populate {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            backing.populate(cores.min(POPULATORS))?;
        }
        Ok(Self {
            backing,
            name,
            reason,
            #[cfg(feature = "cuda")]
            tensors: None,
        })
    }
}

/// Names the settings that a device arena comes from.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
fn of_settings(error: Error, config: &ServerConfig) -> Error {
    match config.arena_kind {
        ArenaKind::Device => error.with("setting", "arena_kind").with("found", "device"),
        _ => error.with("setting", "transport").with("found", config.transport),
    }
}

#[cfg(feature = "cuda")]
pub(super) mod device {
    use std::sync::Arc;

    use capture_arena::{
        Backing,
        cuda::{ArenaPeers, CudaApi, Device, DeviceArenaConfig, driver},
    };
    use transport_core::Result;
    use transport_mooncake_direct::cuda::DeviceTensors;

    use super::{Memory, of_settings};
    use crate::config::{ServerConfig, TransportChoice};

    pub(super) fn take(config: &ServerConfig) -> Result<Memory> {
        driver().and_then(|api| take_with(api, config)).map_err(|e| of_settings(e, config))
    }

    pub(in super::super) fn take_with(
        api: Arc<dyn CudaApi>,
        config: &ServerConfig,
    ) -> Result<Memory> {
        let device = Device::open(api, config.device)?;
        let peers = match config.transport {
            TransportChoice::Nvlink => ArenaPeers::Nvlink,
            _ => ArenaPeers::NvlinkIntra,
        };
        let wanted = DeviceArenaConfig::new(config.arena.get(), peers);
        let backing = Backing::device(&device, &wanted)?;
        let kind = backing.device_block().map(|block| block.kind().name()).unwrap_or_default();
        let reason = format!("{kind} memory of {} (device {})", device.name(), config.device);
        let tensors = Some(DeviceTensors::load(&device)?);
        Ok(Memory { backing, name: "device", reason, tensors })
    }
}

#[cfg(not(feature = "cuda"))]
mod device {
    use transport_core::{Error, ErrorKind, Result};

    use super::{Memory, of_settings};
    use crate::config::ServerConfig;

    pub(super) fn take(config: &ServerConfig) -> Result<Memory> {
        let error = Error::new(ErrorKind::Unsupported, "create device arena", "built without it");
        Err(of_settings(error.remedy("build with --features cuda"), config))
    }
}
