//! The conformance suite over both engines, with one object and with two.
//!
//! Not applicable in one process: killing the publisher, which `restart.rs` comes close to. One
//! object has no other side to close, and tcp gives no views.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use capture_arena::{Arena, ArenaConfig, Backing, RegionPool};
use transport_core::{
    Descriptor, FetchOptions, FetchRequest, Fetched, Health, Location, Publication, PublishOptions,
    Release, ReleaseReport, Result, Transport, TransportInfo,
    conformance::{Harness, Hook, Pair, Setup},
};
use transport_mooncake_direct::{CaptureSink, DirectTransport, Engine, SinkConfig};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Sides {
    /// One object publishes and consumes.
    One,
    /// One publishes, others consume, in the same process.
    Two,
}

#[derive(Debug)]
struct Direct(Engine, Sides);

impl Direct {
    fn consumer(&self, setup: &Setup) -> Result<Arc<dyn Transport>> {
        let pool = RegionPool::new(Backing::heap(setup.arena_bytes)?)?;
        let builder = DirectTransport::builder()
            .engine(self.0)
            .pool(pool)
            .transfer_delay(setup.transfer_delay)
            .lease(Duration::from_secs(10));
        Ok(Arc::new(builder.build()?))
    }
}

#[async_trait]
impl Harness for Direct {
    fn name(&self) -> String {
        format!("{} ({:?} objects)", self.0.name(), self.1)
    }

    fn offers(&self, hook: Hook) -> bool {
        match hook {
            Hook::TransferDelay | Hook::SecondConsumer => true,
            // Older publishers cannot be mapped.
            Hook::OlderPeer => self.0 == Engine::Tcp && self.1 == Sides::Two,
            _ => false,
        }
    }

    async fn pair(&self, setup: &Setup) -> Result<Pair> {
        let arena = Arena::start(Backing::shared(setup.arena_bytes)?, ArenaConfig::default())?;
        let sink = CaptureSink::start(arena, SinkConfig::default())?;
        let builder = DirectTransport::builder().sink(sink);
        let mut pair = match self.1 {
            Sides::One => {
                let pool = RegionPool::new(Backing::heap(setup.arena_bytes)?)?;
                let builder =
                    builder.engine(self.0).pool(pool).transfer_delay(setup.transfer_delay);
                let both: Arc<dyn Transport> = Arc::new(builder.build()?);
                Pair::new(both.clone(), both)
            }
            Sides::Two => {
                let publisher = builder.build()?;
                let publisher: Arc<dyn Transport> = match setup.older_peer {
                    true => Arc::new(Older(publisher)),
                    false => Arc::new(publisher),
                };
                Pair::new(publisher, self.consumer(setup)?)
            }
        };
        if setup.second_consumer {
            pair = pair.second_consumer(self.consumer(setup)?);
        }
        Ok(pair)
    }
}

/// Describes samples as older publishers do.
#[derive(Debug)]
struct Older(DirectTransport);

#[async_trait]
impl Transport for Older {
    fn info(&self) -> &TransportInfo {
        self.0.info()
    }

    async fn publish(
        &self,
        batch: Vec<Publication>,
        options: PublishOptions,
    ) -> Result<Vec<Descriptor>> {
        let mut described = self.0.publish(batch, options).await?;
        for descriptor in &mut described {
            if let Location::Arena(arena) = &mut descriptor.location {
                arena.epoch = None;
            }
            descriptor.features.values_mut().for_each(|feature| feature.seq = None);
        }
        Ok(described)
    }

    async fn fetch(&self, r: Vec<FetchRequest>, o: FetchOptions) -> Result<Vec<Fetched>> {
        self.0.fetch(r, o).await
    }

    async fn release(&self, releases: Vec<Release>) -> Result<ReleaseReport> {
        self.0.release(releases).await
    }

    async fn health(&self) -> Result<Health> {
        self.0.health().await
    }

    async fn close(&self) -> Result<()> {
        self.0.close().await
    }
}

mod shm_one_object {
    use super::*;
    transport_core::conformance_tests!(
        Direct(Engine::Shm, Sides::One),
        not_applicable: [
            "a_killed_publisher_is_an_error_in_time",
            "a_view_outlives_its_consumer",
            "close_ends_the_consumer",
            "an_older_publisher_is_read",
            "a_missing_capability_is_an_error",
        ]
    );
}

mod shm_two_objects {
    use super::*;
    transport_core::conformance_tests!(
        Direct(Engine::Shm, Sides::Two),
        not_applicable: [
            "a_killed_publisher_is_an_error_in_time",
            "an_older_publisher_is_read",
        ]
    );
}

mod tcp_one_object {
    use super::*;
    transport_core::conformance_tests!(
        Direct(Engine::Tcp, Sides::One),
        not_applicable: [
            "a_killed_publisher_is_an_error_in_time",
            "close_ends_the_consumer",
            "an_older_publisher_is_read",
            "views_show_the_bytes",
            "views_are_unmoved_by_other_samples",
            "a_release_waits_for_views",
            "a_view_outlives_its_consumer",
            "views_of_the_replaced_life_stay",
        ]
    );
}

mod tcp_two_objects {
    use super::*;
    transport_core::conformance_tests!(
        Direct(Engine::Tcp, Sides::Two),
        not_applicable: [
            "a_killed_publisher_is_an_error_in_time",
            "views_show_the_bytes",
            "views_are_unmoved_by_other_samples",
            "a_release_waits_for_views",
            "a_view_outlives_its_consumer",
            "views_of_the_replaced_life_stay",
        ]
    );
}
