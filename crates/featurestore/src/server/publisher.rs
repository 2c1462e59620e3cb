//! Where a server's samples go: an arena of its own, or Mooncake Store.

#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::time::Duration;

use capture_arena::{Arena, ArenaConfig, ReserveOptions, SamplePlan};
use control_proto::capture::ChecksumKind;
use transport_core::{Descriptor, Error, ErrorKind, Health, Ready, Result};
use transport_mooncake_direct::{AllowList, CaptureSink, SinkConfig, SinkReservation};

#[cfg(feature = "cuda")]
use super::fill::OnDevice;
#[cfg(feature = "store")]
use super::store::{StorePublisher, StoreReservation};
use super::{check_bind, memory::Memory};
use crate::config::{Problems, ServerConfig, TransportChoice};

/// What keeps a server's samples readable.
#[derive(Debug)]
pub(super) enum Publisher {
    Arena {
        arena: Arena,
        sink: CaptureSink,
        memory: &'static str,
        memory_reason: String,
        #[cfg(feature = "cuda")]
        device: Option<Arc<OnDevice>>,
    },
    #[cfg(feature = "store")]
    Store(StorePublisher),
}

/// Room for a batch of samples, to be filled and published.
#[derive(Debug)]
pub(super) enum Reserved {
    Arena(SinkReservation),
    #[cfg(feature = "store")]
    Store(StoreReservation),
}

/// What a server says of itself when it is ready.
#[derive(Debug)]
pub(super) struct Identity {
    pub(super) transport: &'static str,
    pub(super) session: String,
    pub(super) control: Option<String>,
    pub(super) epoch: Option<u64>,
    pub(super) capacity: u64,
    pub(super) memory: &'static str,
    pub(super) memory_reason: String,
}

impl Publisher {
    /// Takes the arena, or joins the store. What is wrong is noted.
    pub(super) async fn start(config: &ServerConfig, problems: &mut Problems) -> Option<Self> {
        if config.transport == TransportChoice::Store {
            return problems.note(Self::store(config).await);
        }
        let data = problems.note(check_bind("data", config.data));
        let control = problems.note(check_bind("control", config.control));
        let memory = problems.note(Memory::take(config));
        let (memory, ()) = (memory?, data.and(control)?);
        problems.note(Self::over(memory, config))
    }

    /// Publishes from an arena of that memory.
    pub(super) fn over(memory: Memory, config: &ServerConfig) -> Result<Self> {
        let settings = ArenaConfig::default().deadline(config.deadline).lease(config.lease);
        let arena = Arena::start(memory.backing, settings)?;
        let sink = CaptureSink::start(arena.clone(), sink_config(config))?;
        Ok(Self::Arena {
            arena,
            sink,
            memory: memory.name,
            memory_reason: memory.reason,
            #[cfg(feature = "cuda")]
            device: memory.tensors.map(|tensors| Arc::new(OnDevice::new(tensors))),
        })
    }

    #[cfg(feature = "store")]
    async fn store(config: &ServerConfig) -> Result<Self> {
        StorePublisher::start(config).await.map(Self::Store)
    }

    #[cfg(not(feature = "store"))]
    async fn store(_: &ServerConfig) -> Result<Self> {
        let error = Error::new(ErrorKind::Unsupported, "join Mooncake Store", "built without it");
        Err(error.remedy("build with --features mooncake-python, or mooncake for a C library"))
    }

    pub(super) fn identity(&self) -> Identity {
        match self {
            Self::Arena { arena, sink, memory, memory_reason, .. } => Identity {
                transport: "arena",
                session: sink.session().to_string(),
                control: Some(sink.control().to_string()),
                epoch: Some(arena.epoch().0),
                capacity: arena.capacity(),
                memory,
                memory_reason: memory_reason.clone(),
            },
            #[cfg(feature = "store")]
            Self::Store(store) => store.identity(),
        }
    }

    /// Kinds of checksums that are made where the tensors are.
    pub(super) fn checksums(&self) -> &'static [ChecksumKind] {
        #[cfg(feature = "cuda")]
        if self.device().is_some() {
            return &[ChecksumKind::Mixsum];
        }
        &ChecksumKind::ALL
    }

    /// What writes tensors, where the arena is on a device.
    #[cfg(feature = "cuda")]
    pub(super) fn device(&self) -> Option<&Arc<OnDevice>> {
        match self {
            Self::Arena { device, .. } => device.as_ref(),
            #[cfg(feature = "store")]
            Self::Store(_) => None,
        }
    }

    /// Takes room for a batch: for all of it, or none.
    pub(super) async fn reserve(
        &self,
        plans: Vec<SamplePlan>,
        options: ReserveOptions,
    ) -> Result<Reserved> {
        match self {
            Self::Arena { sink, .. } => {
                let reserved = sink.reserve(plans, options).await.map_err(how_to_make_room);
                reserved.map(Reserved::Arena)
            }
            #[cfg(feature = "store")]
            Self::Store(store) => store.reserve(plans, options).await.map(Reserved::Store),
        }
    }

    pub(super) async fn health(&self) -> Result<Health> {
        match self {
            Self::Arena { sink, .. } => sink.health().await,
            #[cfg(feature = "store")]
            Self::Store(store) => store.health().await,
        }
    }

    pub(super) async fn close(&self) -> Result<()> {
        match self {
            Self::Arena { arena, sink, .. } => {
                let closed = sink.close().await;
                arena.close();
                closed
            }
            #[cfg(feature = "store")]
            Self::Store(store) => store.close().await,
        }
    }
}

impl Reserved {
    /// The bytes of one tensor in host memory; they hold whatever was there before.
    pub(super) fn bytes_mut(&mut self, sample: usize, object: usize) -> &mut [u8] {
        match self {
            Self::Arena(reservation) => reservation.bytes_mut(sample, object),
            #[cfg(feature = "store")]
            Self::Store(reservation) => reservation.bytes_mut(sample, object),
        }
    }

    /// Records which model layers a sample's hidden states were taken from.
    pub(super) fn set_aux_layer_ids(&mut self, sample: usize, layers: Option<Vec<i64>>) {
        match self {
            Self::Arena(reservation) => reservation.set_aux_layer_ids(sample, layers),
            #[cfg(feature = "store")]
            Self::Store(reservation) => reservation.set_aux_layer_ids(sample, layers),
        }
    }

    /// Makes the batch readable and describes it.
    pub(super) async fn publish(self) -> Result<Vec<Descriptor>> {
        match self {
            // Whoever filled it has waited for what it wrote.
            Self::Arena(reservation) => reservation.publish_after(Ready::Now, Duration::ZERO).await,
            #[cfg(feature = "store")]
            Self::Store(reservation) => reservation.publish().await,
        }
    }
}

/// Names the settings of this server, and of its trainers, that make room.
fn how_to_make_room(error: Error) -> Error {
    match error.kind() {
        ErrorKind::CapacityExceeded if error.is_temporary() => error.remedy(
            "start the server with a larger arena (--arena or FEATURESTORE_ARENA), or keep a lower \
             watermark: release samples sooner (pipeline --quantum)",
        ),
        ErrorKind::CapacityExceeded => error.remedy(
            "start the server with a larger arena (--arena or FEATURESTORE_ARENA), or send fewer \
             or shorter prompts in a request",
        ),
        _ => error,
    }
}

fn sink_config(config: &ServerConfig) -> SinkConfig {
    let mut sink = SinkConfig::default();
    sink.data_bind = config.data;
    sink.control_bind = config.control;
    sink.advertise_host.clone_from(&config.advertise);
    sink.token.clone_from(&config.token);
    sink.allow = AllowList::new(config.allow.clone());
    sink
}
