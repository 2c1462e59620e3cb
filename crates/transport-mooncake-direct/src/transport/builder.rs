//! Putting a transport together.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Duration,
};

use capture_arena::RegionPool;
use control_proto::{Secret, control::MAX_LEASE};
use parking_lot::Mutex;
use transport_core::{Capabilities, ClientId, Error, ErrorKind, MapMark, Result, TransportInfo};

use super::{
    DirectTransport, EngineState, Inner, publishers::Publishers, reach::Reach, transfer::Transfers,
    uses::Uses,
};
use crate::{CaptureSink, ControlOptions, MooncakeEngine, TcpEngine, TcpOptions, workers::Workers};

/// Fetches that run at a time; others wait in line.
const MAX_FETCHES: usize = 32;

/// How bytes are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Engine {
    /// From a process of the same host and user, by mapping its memory.
    Shm,
    /// From any Mooncake or featurestore process, over Mooncake's tcp wire.
    Tcp,
    /// From whatever Mooncake's own transfer engine reaches; see
    /// [`DirectTransportBuilder::mooncake`].
    Mooncake,
    /// From device memory of processes of the same host or NVLink fabric, into device memory; see
    /// [`DirectTransportBuilder::cuda`].
    #[cfg(feature = "cuda")]
    Cuda,
}

impl Engine {
    /// Registry name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Mooncake => "mooncake",
            #[cfg(feature = "cuda")]
            Self::Cuda => "cuda",
        }
    }
}

/// Settings of a [`DirectTransport`].
#[derive(Clone, Debug, Default)]
pub struct DirectTransportBuilder {
    engine: Option<Engine>,
    sink: Option<CaptureSink>,
    pool: Option<RegionPool>,
    client: Option<ClientId>,
    lease: Option<Duration>,
    token: Option<Secret>,
    tcp: TcpOptions,
    mooncake: Option<MooncakeEngine>,
    #[cfg(feature = "cuda")]
    cuda: Option<crate::cuda::CudaEngine>,
    #[cfg(feature = "cuda")]
    staging: Option<capture_arena::cuda::Staging>,
    control_attempts: Option<u32>,
    connect_timeout: Option<Duration>,
    reason: Option<String>,
    transfer_delay: Duration,
}

impl DirectTransportBuilder {
    /// Reads with this engine. Without one the transport only publishes.
    #[must_use]
    pub fn engine(mut self, engine: Engine) -> Self {
        self.engine = Some(engine);
        self
    }

    /// Publishes through this sink, which is closed with the transport. Without one the transport
    /// only consumes.
    #[must_use]
    pub fn sink(mut self, sink: CaptureSink) -> Self {
        self.sink = Some(sink);
        self
    }

    /// Receives [`Destination::Pool`](transport_core::Destination::Pool) reads here.
    #[must_use]
    pub fn pool(mut self, pool: RegionPool) -> Self {
        self.pool = Some(pool);
        self
    }

    /// Who this consumer is. Default: a random identity.
    #[must_use]
    pub fn client_id(mut self, client: ClientId) -> Self {
        self.client = Some(client);
        self
    }

    /// How long its claims outlive its last sign of life. Default: 30 seconds.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }

    /// What it proves to know to control listeners.
    #[must_use]
    pub fn token(mut self, token: Secret) -> Self {
        self.token = Some(token);
        self
    }

    /// How the tcp engine behaves.
    #[must_use]
    pub fn tcp(mut self, options: TcpOptions) -> Self {
        self.tcp = options;
        self
    }

    /// The engine behind [`Engine::Mooncake`], which is closed with the transport. The pool is
    /// registered with it.
    #[must_use]
    pub fn mooncake(mut self, engine: MooncakeEngine) -> Self {
        self.mooncake = Some(engine);
        self
    }

    /// The engine behind [`Engine::Cuda`]. The pool lies on its device.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn cuda(mut self, engine: crate::cuda::CudaEngine) -> Self {
        self.cuda = Some(engine);
        self
    }

    /// Page-locked buffers through which [`Engine::Tcp`] fills memory of their device too: the pool
    /// or the caller's. Such bytes are host payload.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub fn staging(mut self, staging: capture_arena::cuda::Staging) -> Self {
        self.staging = Some(staging);
        self
    }

    /// How often connecting to a control listener is tried before frees are given up. Default: 5.
    #[must_use]
    pub fn control_attempts(mut self, attempts: u32) -> Self {
        self.control_attempts = Some(attempts);
        self
    }

    /// How long one attempt to connect may take. Default: 3 seconds to a control listener, 5 to a
    /// data port.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = Some(timeout);
        self
    }

    /// Why this transport was chosen, for people.
    #[must_use]
    pub fn reason(mut self, reason: impl Into<String>) -> Self {
        self.reason = Some(reason.into());
        self
    }

    /// Least time that each fetch with a copy takes, so that tests can look at a transfer in
    /// flight. Default: zero.
    #[must_use]
    pub fn transfer_delay(mut self, delay: Duration) -> Self {
        self.transfer_delay = delay;
        self
    }

    /// Puts the transport together. Nothing is connected yet.
    ///
    /// Refuses one that could neither publish nor fetch, and a lease that no server grants.
    pub fn build(self) -> Result<DirectTransport> {
        let invalid = |why| Error::new(ErrorKind::ConfigInvalid, "build transport", why);
        if self.engine.is_none() && self.sink.is_none() {
            return Err(invalid("neither an engine nor a sink")
                .remedy("choose an engine to read with, a sink to publish through, or both"));
        }
        let mut control = ControlOptions::new(self.client.unwrap_or_else(ClientId::random));
        control.token = self.token;
        let mark = MapMark::random();
        control.mapping = (self.engine == Some(Engine::Shm)).then_some(mark);
        if let Some(lease) = self.lease {
            if lease < Duration::from_millis(100) || lease > MAX_LEASE {
                return Err(invalid("the lease is out of range")
                    .with("found", format_args!("{lease:?}"))
                    .remedy("choose a lease of 100 ms to one day; 30 s is usual"));
            }
            control.lease = lease;
        }
        control.attempts = self.control_attempts.unwrap_or(control.attempts);
        let mut tcp = self.tcp;
        if let Some(timeout) = self.connect_timeout {
            (control.connect_timeout, tcp.connect_timeout) = (timeout, timeout);
        }
        let mut capabilities = {
            let mut can = Capabilities::default();
            can.publish = self.sink.is_some();
            can.fetch = self.engine.is_some();
            can.views = self.engine == Some(Engine::Shm);
            can.cross_host = self.engine != Some(Engine::Shm);
            // No engine but one reads it.
            can.device_memory = self.engine.is_none()
                && self.sink.as_ref().is_some_and(|sink| !sink.arena().backing().kind().is_host());
            can.staleness_checked = true;
            can.leases = true;
            #[cfg(feature = "cuda")]
            if self.engine == Some(Engine::Cuda) {
                can.cross_host = false; // but within a fabric
                can.device_memory = true;
            }
            #[cfg(feature = "cuda")]
            if self.engine == Some(Engine::Tcp) && self.staging.is_some() {
                can.device_memory = true;
            }
            can
        };
        let scheme = self.engine.map_or("direct", Engine::name);
        let version = env!("CARGO_PKG_VERSION");
        let state = match self.engine {
            None => None,
            Some(Engine::Shm) => Some(EngineState::Shm),
            Some(Engine::Tcp) => Some(EngineState::Tcp(TcpEngine::new(tcp))),
            Some(Engine::Mooncake) => {
                let engine = self.mooncake.ok_or_else(|| {
                    invalid("no started engine of Mooncake")
                        .remedy("start a MooncakeEngine and give it to the builder")
                })?;
                if let Some(pool) = &self.pool {
                    engine.register_pool(pool)?;
                }
                Some(EngineState::Mooncake(engine))
            }
            #[cfg(feature = "cuda")]
            Some(Engine::Cuda) => Some(EngineState::Cuda(self.cuda.ok_or_else(|| {
                invalid("no engine for device memory")
                    .remedy("make a CudaEngine on the trainer's device and give it to the builder")
            })?)),
        };
        let reach = match &state {
            #[cfg(feature = "cuda")]
            Some(EngineState::Cuda(engine)) => {
                Reach { host: false, device: Some(engine.device().region_kind()) }
            }
            #[cfg(feature = "cuda")]
            Some(EngineState::Tcp(_)) => {
                let device = self.staging.as_ref().map(|staging| staging.device().region_kind());
                Reach { host: true, device }
            }
            _ => Reach::HOST,
        };
        #[cfg(feature = "cuda")]
        if self.staging.is_some() && self.engine != Some(Engine::Tcp) {
            return Err(invalid("only the tcp engine goes through staging buffers")
                .with("engine", scheme)
                .remedy("leave them out, or read with the tcp engine"));
        }
        if let Some(pool) = &self.pool {
            check_pool(pool, reach)?;
        }
        let engine = match self.engine {
            Some(Engine::Shm) => format!("featurestore shm {version}"),
            Some(Engine::Tcp) => format!("featurestore tcp {version}, Mooncake wire 1 and 2"),
            Some(Engine::Mooncake) => match &state {
                Some(EngineState::Mooncake(engine)) => {
                    format!("protocol {} of {}", engine.protocol(), engine.provider())
                }
                _ => unreachable!("made above"),
            },
            #[cfg(feature = "cuda")]
            Some(Engine::Cuda) => match &state {
                Some(EngineState::Cuda(engine)) => {
                    format!("featurestore cuda {version}, {}", engine.device().name())
                }
                _ => unreachable!("made above"),
            },
            None => format!("featurestore sink {version}"),
        };
        capabilities.ranges = state.as_ref().is_some_and(EngineState::reads_ranges);
        let mut info = TransportInfo::new(scheme, engine, capabilities);
        if let Some(reason) = self.reason {
            info = info.because(reason);
        }
        let inner = Inner {
            engine: state,
            reach,
            #[cfg(feature = "cuda")]
            staging: self.staging,
            pool: self.pool,
            client: control.client.clone(),
            // Only what is mapped can be seen while it is freed.
            by_name: (self.engine == Some(Engine::Shm)).then(|| Publishers::stranger(&control)),
            publishers: Publishers::new(control, mark),
            uses: Arc::<Uses>::default(),
            transfers: Transfers::default(),
            transfer_delay: self.transfer_delay,
            host_bytes: AtomicU64::new(0),
            device_bytes: AtomicU64::new(0),
            last_error: Mutex::default(),
            closed: AtomicBool::new(false),
        };
        let jobs = Workers::new("fs-fetch", MAX_FETCHES);
        Ok(DirectTransport { info, inner: inner.into(), sink: self.sink, jobs })
    }
}

/// Refuses a pool that the engine cannot fill.
fn check_pool(pool: &RegionPool, reach: Reach) -> Result<()> {
    let found = pool.backing().kind();
    if reach.takes(found) {
        return Ok(());
    }
    let remedy = match reach.device {
        Some(_) => "make the pool in memory of the engine's device",
        None => "make the pool in host memory, or read with the cuda engine",
    };
    Err(Error::new(
        ErrorKind::ConfigInvalid,
        "build transport",
        "the engine cannot fill the receive pool",
    )
    .with("expected", reach.name())
    .with("found", format_args!("{found:?}"))
    .remedy(remedy))
}
