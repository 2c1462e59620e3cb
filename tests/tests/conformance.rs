//! The conformance suite across processes: the publisher is a child process, and may be killed.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use capture_arena::{Backing, RegionPool};
use featurestore_tests::remote::RemotePublisher;
use transport_core::{
    Result, Transport,
    conformance::{Harness, Hook, Pair, Setup},
};
use transport_mooncake_direct::{DirectTransport, Engine};

#[derive(Debug)]
struct Processes(Engine);

impl Processes {
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
impl Harness for Processes {
    fn name(&self) -> String {
        format!("{:?} across processes", self.0)
    }

    fn offers(&self, hook: Hook) -> bool {
        matches!(hook, Hook::KillPublisher | Hook::SecondConsumer | Hook::TransferDelay)
    }

    async fn pair(&self, setup: &Setup) -> Result<Pair> {
        let program = env!("CARGO_BIN_EXE_test-publisher");
        let publisher = Arc::new(RemotePublisher::start(program, setup.arena_bytes).await?);
        let doomed = publisher.clone();
        let mut pair = Pair::new(publisher, self.consumer(setup)?)
            .on_kill(Box::new(move || Box::pin(async move { doomed.kill().await })));
        if setup.second_consumer {
            pair = pair.second_consumer(self.consumer(setup)?);
        }
        Ok(pair)
    }
}

mod shm {
    use super::*;
    transport_core::conformance_tests!(
        Processes(Engine::Shm),
        not_applicable: ["an_older_publisher_is_read"]
    );
}

mod tcp {
    use super::*;
    transport_core::conformance_tests!(
        Processes(Engine::Tcp),
        not_applicable: [
            "an_older_publisher_is_read",
            "views_show_the_bytes",
            "views_are_unmoved_by_other_samples",
            "a_release_waits_for_views",
            "a_view_outlives_its_consumer",
            "views_of_the_replaced_life_stay",
        ]
    );
}
