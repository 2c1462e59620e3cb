//! Whether and how this process's GPU reads the servers' device memory.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{
    Backing, RegionPool,
    cuda::{ArenaPeers, CudaApi, Device, DeviceArenaConfig, driver},
};
use transport_core::{ByteSize, Result};
use transport_mooncake_direct::{
    DirectTransportBuilder, Engine, ReadOptions,
    cuda::{CudaEngine, CudaOptions},
};

use super::{
    Finding,
    direct::{Server, pool_too_large},
};
use crate::config::Config;

/// Longest time that opening one server's memory may take.
const PROBE: Duration = Duration::from_secs(5);

/// What was found about memory of devices.
#[derive(Debug)]
pub(super) struct Devices {
    /// Whether every arena is opened by its CUDA IPC handle.
    pub(super) intra: Finding,
    /// Whether every arena is opened by its handle of the NVLink fabric.
    pub(super) fabric: Finding,
    /// What has opened them.
    pub(super) reader: Option<Reader>,
}

/// The engine on this process's device, with the servers' memory open.
#[derive(Debug)]
pub(super) struct Reader(CudaEngine);

impl Devices {
    /// Nobody has looked.
    pub(super) fn left_out() -> Self {
        Self::none("not probed; ask for it by name: transport = nvlink_intra")
    }

    /// Neither way works.
    pub(super) fn none(why: &str) -> Self {
        Self { intra: Err(why.to_owned()), fabric: Err(why.to_owned()), reader: None }
    }
}

impl Reader {
    fn open(api: Result<Arc<dyn CudaApi>>, ordinal: u32) -> Result<Self> {
        let device = Device::open(api?, ordinal)?;
        CudaEngine::new(&device, CudaOptions::default()).map(Self)
    }

    /// Opens a server's arena: whatever the handle says, only this shows that it works.
    fn reach(&self, server: &Server) -> Result<()> {
        let Some(hello) = &server.hello else { return Ok(()) };
        let options = ReadOptions::default().epoch(Some(hello.epoch));
        let options = options.deadline(Instant::now() + PROBE);
        self.0.locate(&hello.session, hello.arena.base, 1, &options).map(drop)
    }

    /// Reads with this engine, into a pool of that size on its device.
    pub(super) fn receive(
        self,
        builder: DirectTransportBuilder,
        pool: ByteSize,
    ) -> Result<DirectTransportBuilder> {
        let config = DeviceArenaConfig::new(pool.get(), ArenaPeers::Nobody);
        let memory = Backing::device(self.0.device(), &config).map_err(pool_too_large)?;
        Ok(builder.engine(Engine::Cuda).cuda(self.0).pool(RegionPool::new(memory)?))
    }
}

/// Tries what this machine's GPU can do by itself.
pub(super) fn alone(config: &Config) -> Devices {
    alone_with(driver(), config.device)
}

fn alone_with(api: Result<Arc<dyn CudaApi>>, ordinal: u32) -> Devices {
    let tried = api.and_then(|api| {
        let device = Device::open(api, ordinal)?;
        let can = |peers| {
            let config = DeviceArenaConfig::new(1, peers);
            let made = Backing::device(&device, &config);
            let name = device.name();
            let good =
                format!("memory of {name} (device {ordinal}) can be shared; no server was asked");
            made.map(|_| good).map_err(|error| error.to_string())
        };
        let (intra, fabric) = (can(ArenaPeers::NvlinkIntra), can(ArenaPeers::Nvlink));
        Ok(Devices { intra, fabric, reader: None })
    });
    tried.unwrap_or_else(|error| Devices::none(&error.to_string()))
}

/// Opens every server's arena, if they are all in device memory. A device is only opened then.
pub(super) fn probe(config: &Config, servers: &[Server]) -> Devices {
    probe_with(driver, config.device, servers)
}

fn probe_with(
    api: impl FnOnce() -> Result<Arc<dyn CudaApi>>,
    ordinal: u32,
    servers: &[Server],
) -> Devices {
    let unlike = |fabric: bool| {
        let other = servers.iter().find(|server| match server.protocol.as_deref() {
            None => true,
            Some(protocol) => (protocol == "nvlink") != fabric,
        })?;
        Some(match other.protocol.as_deref() {
            None => format!("the server at {} keeps its samples in host memory", other.control),
            Some(found) => {
                format!("the memory of the server at {} is opened by {found}", other.control)
            }
        })
    };
    let (not_intra, not_fabric) = (unlike(false), unlike(true));
    if not_intra.is_some() && not_fabric.is_some() {
        let absent = |why: Option<String>| Err(why.unwrap_or_default());
        return Devices { intra: absent(not_intra), fabric: absent(not_fabric), reader: None };
    }
    let opened = Reader::open(api(), ordinal).and_then(|reader| {
        servers.iter().try_for_each(|server| {
            reader.reach(server).map_err(|e| e.with("server", &server.control))
        })?;
        Ok(reader)
    });
    let (finding, reader) = match opened {
        Ok(reader) => {
            let name = reader.0.device().name();
            let good =
                format!("every server's memory is open on {name} (device {ordinal}); one copy");
            (Ok(good), Some(reader))
        }
        Err(error) => (Err(error.to_string()), None),
    };
    match (not_intra, not_fabric) {
        (None, other) => Devices { intra: finding, fabric: Err(other.unwrap_or_default()), reader },
        (other, _) => Devices { intra: Err(other.unwrap_or_default()), fabric: finding, reader },
    }
}
