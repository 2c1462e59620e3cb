//! Publishing through Mooncake Store, in the form that today's capture servers have.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{BATCHES_BEFORE, ReserveOptions, SamplePlan};
use transport_core::{
    Descriptor, Error, ErrorKind, FeatureName, Health, Publication, PublishOptions, Ready,
    RegionMut, Result, SampleKey, Tensor, TensorMeta, Transport,
};
use transport_mooncake_store::StoreTransport;

use super::publisher::Identity;
use crate::{choose, config::ServerConfig};

/// Pause before full staging memory is looked at again.
const POLL: Duration = Duration::from_millis(2);

/// A member of the store: it adds object memory, and writes samples from staging memory that was
/// registered when it joined.
#[derive(Debug)]
pub(super) struct StorePublisher {
    transport: Arc<StoreTransport>,
    session: String,
    segment: u64,
    deadline: Duration,
    /// The next batch to take staging memory; fair, so that none waits for ever.
    turn: tokio::sync::Mutex<()>,
}

impl StorePublisher {
    pub(super) async fn start(config: &ServerConfig) -> Result<Self> {
        let segment = config.arena.get();
        let pool = config.pool.unwrap_or(config.arena);
        let transport = choose::store::start(config.mooncake.clone(), segment, pool).await?;
        let transport = Arc::new(transport);
        let session = {
            let transport = transport.clone();
            let asking = tokio::task::spawn_blocking(move || transport.hostname());
            asking.await.map_err(|e| {
                Error::new(ErrorKind::Unexpected, "join Mooncake Store", "asking panicked")
                    .source(e)
            })??
        };
        let deadline = config.deadline;
        Ok(Self { transport, session, segment, deadline, turn: tokio::sync::Mutex::default() })
    }

    pub(super) fn identity(&self) -> Identity {
        Identity {
            transport: "store",
            session: self.session.clone(),
            control: None,
            epoch: None,
            capacity: self.segment,
            memory: "store",
            memory_reason: "object memory that this server adds to the store".into(),
        }
    }

    pub(super) async fn health(&self) -> Result<Health> {
        self.transport.health().await
    }

    pub(super) async fn close(&self) -> Result<()> {
        self.transport.close().await
    }

    /// Takes staging memory for a batch; waits for it until the deadline.
    pub(super) async fn reserve(
        &self,
        plans: Vec<SamplePlan>,
        options: ReserveOptions,
    ) -> Result<StoreReservation> {
        let deadline = options.deadline.unwrap_or(self.deadline);
        let end = Instant::now() + deadline;
        let late =
            |error: Error| error.remedy("give a larger --pool, or send fewer prompts at a time");
        let turn = tokio::time::timeout(deadline, self.turn.lock()).await;
        let _turn = turn.map_err(|_| {
            let why = "batches that came before wait for staging memory, and none overtakes them";
            late(Error::new(ErrorKind::Busy, "reserve", why).with(BATCHES_BEFORE, "at least 1"))
        })?;
        loop {
            let staged: Result<Vec<Staged>> =
                plans.iter().map(|plan| Staged::new(&self.transport, plan)).collect();
            match staged {
                Ok(samples) => {
                    let transport = self.transport.clone();
                    let publish = PublishOptions::default().replace(options.replace);
                    return Ok(StoreReservation { transport, samples, publish, end });
                }
                Err(error)
                    if error.kind() == ErrorKind::CapacityExceeded
                        && error.is_temporary()
                        && Instant::now() < end =>
                {
                    tokio::time::sleep(POLL).await;
                }
                Err(error) => return Err(late(error)),
            }
        }
    }
}

/// A batch in staging memory.
#[derive(Debug)]
pub(super) struct StoreReservation {
    transport: Arc<StoreTransport>,
    samples: Vec<Staged>,
    publish: PublishOptions,
    end: Instant,
}

#[derive(Debug)]
struct Staged {
    sample: SampleKey,
    tensors: Vec<(FeatureName, TensorMeta, RegionMut)>,
    aux_layer_ids: Option<Vec<i64>>,
}

impl Staged {
    fn new(transport: &StoreTransport, plan: &SamplePlan) -> Result<Self> {
        let regions = transport.take_sample(&plan.sample, &plan.objects)?;
        let named = plan.objects.iter().cloned().zip(regions);
        let tensors = named.map(|((name, meta), region)| (name, meta, region)).collect();
        Ok(Self { sample: plan.sample.clone(), tensors, aux_layer_ids: None })
    }

    fn publication(self) -> Result<Publication> {
        let tensor = |(name, meta, region): (_, _, RegionMut)| {
            Tensor::new(meta, region.freeze()).map(|tensor| (name, tensor))
        };
        let tensors = self.tensors.into_iter().map(tensor).collect::<Result<_>>()?;
        let mut publication = Publication::new(self.sample, tensors, Ready::Now);
        publication.aux_layer_ids = self.aux_layer_ids;
        Ok(publication)
    }
}

impl StoreReservation {
    pub(super) fn bytes_mut(&mut self, sample: usize, object: usize) -> &mut [u8] {
        let (_, _, region) = &mut self.samples[sample].tensors[object];
        region.as_mut_bytes().expect("staging memory is host memory")
    }

    pub(super) fn set_aux_layer_ids(&mut self, sample: usize, layers: Option<Vec<i64>>) {
        self.samples[sample].aux_layer_ids = layers;
    }

    pub(super) async fn publish(self) -> Result<Vec<Descriptor>> {
        let batch = self.samples.into_iter().map(Staged::publication).collect::<Result<_>>()?;
        let left = self.end.saturating_duration_since(Instant::now()).max(LEAST);
        self.transport.publish(batch, self.publish.deadline(left)).await
    }
}

/// A batch that was filled is given this long at least: its work is done.
const LEAST: Duration = Duration::from_secs(5);
