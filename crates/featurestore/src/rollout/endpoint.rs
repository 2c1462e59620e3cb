//! One side of an exchange of rollouts.

use std::{path::PathBuf, sync::Arc};

use capture_arena::{Arena, ArenaConfig, Backing, RegionPool};
use rollout_codec::transport::{HostShare, Journal, RolloutConfig, RolloutTransport};
use transport_core::{ByteSize, ClientId, Error, ErrorKind, Result, Transport};
use transport_mooncake_direct::{CaptureSink, DirectTransport, Engine, SinkConfig};

use crate::config::{Config, Receive, TransportChoice};

/// Receive pool of a reader, if nothing is configured.
const DEFAULT_POOL: ByteSize = ByteSize::mib(2048);

/// How to put an [`Endpoint`] together.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// The transport, its pool and deadline, and where Mooncake is.
    pub config: Config,
    /// How rollouts are put and got.
    pub rollouts: RolloutConfig,
    /// Memory that this process adds: the arena of a producer over `shm` or `tcp`, which needs one,
    /// or object memory of a store. None for a reader.
    pub memory: Option<ByteSize>,
    /// Folder through which readers of this host find each other; see [`HostShare`].
    pub share: Option<PathBuf>,
    /// Folder in which puts to a store note what they are about to write; see [`Journal`].
    pub journal: Option<PathBuf>,
}

/// A transport of rollouts, and what this process keeps for it.
#[derive(Debug)]
pub struct Endpoint {
    rollouts: RolloutTransport,
    keeps_bytes: bool,
    #[cfg(feature = "store")]
    store: Option<Arc<transport_mooncake_store::StoreTransport>>,
}

impl Endpoint {
    /// Opens a producer over `shm` or `tcp` if there is to be memory, a reader if there is not, or
    /// joins a store. `auto` means `shm`. Memory of a GPU as the place to receive in is refused.
    pub async fn open(options: Options) -> Result<Self> {
        let Options { config, mut rollouts, memory, share, journal } = options;
        if config.receive == Receive::Device {
            let why = "rollouts are read in host memory only";
            return Err(Error::new(ErrorKind::Unsupported, "open rollouts", why)
                .with("setting", "receive")
                .with("found", config.receive)
                .remedy("set receive = host"));
        }
        rollouts = rollouts.deadline(config.deadline);
        if let Some(folder) = share {
            rollouts = rollouts.host_share(HostShare::new(folder)?);
        }
        if let Some(folder) = journal {
            if config.transport != TransportChoice::Store {
                let why = "only what lies in a store outlives its producer and needs a journal";
                return Err(Error::new(ErrorKind::ConfigInvalid, "open rollouts", why)
                    .with("transport", config.transport)
                    .remedy("leave the journal out, or choose the transport store"));
            }
            rollouts = rollouts.journal(Journal::new(folder)?);
        }
        match config.transport {
            TransportChoice::Store => Self::store(config, rollouts, memory).await,
            choice => Self::direct(&config, choice, rollouts, memory),
        }
    }

    fn direct(
        config: &Config,
        choice: TransportChoice,
        rollouts: RolloutConfig,
        memory: Option<ByteSize>,
    ) -> Result<Self> {
        let engine = match choice {
            TransportChoice::Tcp => Engine::Tcp,
            TransportChoice::Auto | TransportChoice::Shm => Engine::Shm,
            other => {
                let why = "rollouts do not move by this transport";
                return Err(Error::new(ErrorKind::Unsupported, "open rollouts", why)
                    .with("transport", other)
                    .remedy("choose shm, tcp or store"));
            }
        };
        let mut builder = DirectTransport::builder()
            .client_id(ClientId::random())
            .lease(config.lease)
            .engine(engine)
            .reason("named on the command line, or the default: shm");
        if let Some(token) = &config.token {
            builder = builder.token(token.clone());
        }
        if let Some(bytes) = memory {
            let backing = Backing::shared(bytes.get())?;
            let settings = ArenaConfig::default().deadline(config.deadline).lease(config.lease);
            let arena = Arena::start(backing, settings)?;
            let mut sink = SinkConfig::default();
            sink.token.clone_from(&config.token);
            builder = builder.sink(CaptureSink::start(arena, sink)?);
        }
        if engine == Engine::Tcp {
            let pool = config.pool.unwrap_or(DEFAULT_POOL);
            let pool = RegionPool::new(Backing::heap(pool.get())?)?;
            builder = builder.pool(pool);
        }
        let transport: Arc<dyn Transport> = Arc::new(builder.build()?);
        Ok(Self {
            rollouts: RolloutTransport::new(transport, rollouts)?,
            keeps_bytes: memory.is_some(),
            #[cfg(feature = "store")]
            store: None,
        })
    }

    #[cfg(feature = "store")]
    async fn store(
        config: Config,
        rollouts: RolloutConfig,
        memory: Option<ByteSize>,
    ) -> Result<Self> {
        let pool = config.pool.unwrap_or(DEFAULT_POOL);
        let segment = memory.map_or(0, ByteSize::get);
        let store = Arc::new(crate::choose::store::start(config.mooncake, segment, pool).await?);
        let (pool, known) = (store.clone(), store.clone());
        let rollouts = rollouts
            .take(Arc::new(move |bytes| pool.take(bytes)))
            .register(Arc::new(move |region| known.register(region)));
        Ok(Self {
            rollouts: RolloutTransport::new(store.clone(), rollouts)?,
            keeps_bytes: segment > 0,
            store: Some(store),
        })
    }

    #[cfg(not(feature = "store"))]
    async fn store(_: Config, _: RolloutConfig, _: Option<ByteSize>) -> Result<Self> {
        let error = Error::new(ErrorKind::Unsupported, "join Mooncake Store", "built without it");
        Err(error.remedy("build with --features mooncake-python, or mooncake for a C library"))
    }

    /// Puts, gets and cleans up.
    pub fn rollouts(&self) -> &RolloutTransport {
        &self.rollouts
    }

    /// Whether what is put lies in the memory of this process, and goes with it.
    pub fn keeps_bytes(&self) -> bool {
        self.keeps_bytes
    }

    /// The store, for Mooncake's own layout.
    #[cfg(feature = "store")]
    pub fn objects(&self, operation: &'static str) -> Result<super::StoreObjects> {
        self.store.clone().map(super::StoreObjects::new).ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, operation, "Mooncake's layout lies in a store")
                .remedy("choose --transport store")
        })
    }

    /// Ends what was started.
    pub async fn close(&self) -> Result<()> {
        self.rollouts.close().await
    }
}
