//! Whether and how this process's GPU reads the servers' device memory.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{
    Backing,
    cuda::{ArenaPeers, CudaApi, Device, DeviceArenaConfig, driver},
};
use transport_core::{ByteSize, Result};
use transport_mooncake_direct::{
    DirectTransportBuilder, Engine, ReadOptions,
    cuda::{CudaEngine, CudaOptions},
};

use super::{Finding, direct::Server, receive::pool_on};
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
        let pool = pool_on(self.0.device(), pool)?;
        Ok(builder.engine(Engine::Cuda).cuda(self.0).pool(pool))
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

#[cfg(test)]
mod tests {
    use capture_arena::{
        Arena, ArenaConfig,
        cuda::{
            ArenaKind, CudaError,
            scripted::{Machine, ScriptedCuda},
        },
    };
    use transport_core::{Error, ErrorKind};
    use transport_mooncake_direct::{
        CaptureSink, SinkConfig, cuda::simulate_kernels, peer_protocol,
    };

    use super::*;
    use crate::{
        choose,
        config::{Receive, TransportChoice},
    };

    fn machine(machine: Machine) -> Arc<ScriptedCuda> {
        let cuda = ScriptedCuda::new(machine);
        simulate_kernels(&cuda);
        cuda
    }

    fn sink(backing: Backing) -> CaptureSink {
        let arena = Arena::start(backing, ArenaConfig::default()).unwrap();
        CaptureSink::start(arena, SinkConfig::default()).unwrap()
    }

    /// A publisher with an arena of that kind on a device of its own.
    fn on_device(kind: ArenaKind) -> CaptureSink {
        let cuda = machine(Machine { fabric: None, ..Machine::default() });
        let device = Device::open(cuda, 0).unwrap();
        let config = DeviceArenaConfig::new(1 << 20, ArenaPeers::Native).kinds([kind]);
        sink(Backing::device(&device, &config).unwrap())
    }

    fn asked(sinks: &[&CaptureSink]) -> Vec<Server> {
        let config = Config::default();
        let found =
            |sink: &&CaptureSink| super::super::direct::greet(sink.control(), &config).unwrap();
        sinks.iter().map(found).collect()
    }

    #[test]
    fn memory_is_opened_by_what_the_servers_have() {
        let plain = [on_device(ArenaKind::Plain), on_device(ArenaKind::Plain)];
        let servers = asked(&[&plain[0], &plain[1]]);
        assert_eq!(servers[0].protocol.as_deref(), Some("nvlink_intra"));
        let here = machine(Machine::default());
        let found = probe_with(|| Ok(here.clone()), 0, &servers);
        assert!(found.intra.as_ref().unwrap().contains("Scripted GPU 0"), "{found:?}");
        assert!(found.fabric.unwrap_err().contains("is opened by nvlink_intra"));
        let reader = found.reader.unwrap();
        assert_eq!(reader.0.stats().blocks, 2);
        drop(reader);
        assert_eq!(here.leaks(), Vec::<String>::new());

        let fabric = on_device(ArenaKind::Fabric);
        let here = machine(Machine { fabric: None, ..Machine::default() });
        let found = probe_with(|| Ok(here.clone()), 0, &asked(&[&fabric]));
        assert!(found.fabric.is_ok() && found.intra.is_err(), "{found:?}");
    }

    #[test]
    fn a_process_is_on_its_own_device_alone() {
        let plain = on_device(ArenaKind::Plain); // on the first device
        let here = machine(Machine { devices: 2, ..Machine::default() });
        let found = probe_with(|| Ok(here.clone()), 1, &asked(&[&plain]));
        assert!(found.intra.as_ref().unwrap().contains("(device 1)"), "{found:?}");
        let reader = found.reader.unwrap();
        let builder = transport_mooncake_direct::DirectTransport::builder();
        let transport = reader.receive(builder, ByteSize::mib(8)).unwrap().build().unwrap();
        let contexts: Vec<_> =
            here.leaks().into_iter().filter(|leak| leak.contains("context of")).collect();
        assert!(
            !contexts.is_empty() && contexts.iter().all(|c| c.ends_with("of 1")),
            "{contexts:?}"
        );
        drop(transport);
        assert_eq!(here.leaks(), Vec::<String>::new());
    }

    #[test]
    fn a_device_is_opened_only_where_every_arena_is_on_one() {
        let (plain, fabric) = (on_device(ArenaKind::Plain), on_device(ArenaKind::Fabric));
        let heap = sink(Backing::heap(1 << 20).unwrap());
        let never = || -> Result<Arc<dyn CudaApi>> { panic!("nobody needs a device") };
        for (servers, part) in [
            (asked(&[&heap]), "in host memory"),
            (asked(&[&plain, &heap]), "in host memory"),
            (asked(&[&plain, &fabric]), "is opened by nvlink"),
        ] {
            let found = probe_with(never, 0, &servers);
            assert!(found.intra.as_ref().unwrap_err().contains(part), "{found:?}");
            assert!(found.fabric.is_err() && found.reader.is_none());
        }
    }

    #[test]
    fn what_keeps_a_device_from_reading_is_said() {
        let plain = on_device(ArenaKind::Plain);
        let servers = asked(&[&plain]);
        let none = || Err(Error::new(ErrorKind::Unsupported, "load", "no CUDA driver"));
        assert!(probe_with(none, 0, &servers).intra.unwrap_err().contains("no CUDA driver"));
        let here = machine(Machine::default());
        let found = probe_with(|| Ok(here.clone()), 5, &servers);
        assert!(found.intra.unwrap_err().contains("sees no such device"));
        here.fail("cuIpcOpenMemHandle", 0, 1, CudaError::MAP_FAILED);
        let found = probe_with(|| Ok(here.clone()), 0, &servers);
        let why = found.intra.unwrap_err();
        assert!(why.contains("names no memory that lives") && why.contains("server="), "{why}");
        assert_eq!(here.leaks(), Vec::<String>::new());
    }

    #[test]
    fn without_a_device_samples_on_one_are_out_of_reach_and_nothing_is_taken_instead() {
        let plain = on_device(ArenaKind::Plain);
        let soon = Instant::now() + PROBE;
        assert_eq!(peer_protocol(plain.session(), soon).unwrap(), "nvlink_intra");
        if driver().is_ok() {
            return; // what there is instead is a real one
        }
        let servers = [plain.control().clone()];
        for asked in [TransportChoice::Auto, TransportChoice::Tcp, TransportChoice::NvlinkIntra] {
            let error = choose::choose(&Config::default().transport(asked), &servers).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{asked}: {error}");
            let part = match asked {
                TransportChoice::Tcp => "keeps its samples in device memory",
                _ => "no CUDA driver",
            };
            assert!(error.to_string().contains(part), "{asked}: {error}");
        }
        let config = Config::default().transport(TransportChoice::Tcp).receive(Receive::Device);
        let error = choose::choose(&config, &servers).unwrap_err().to_string();
        assert!(error.contains("keeps its samples in device memory"), "{error}");
        assert!(error.contains("nvlink_intra"), "what takes them: {error}");
    }
}
