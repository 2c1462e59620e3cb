//! The conformance suite over the reference transport, one test a case.

use std::sync::Arc;

use async_trait::async_trait;
use transport_core::{
    MemoryTransport, Result, Transport,
    conformance::{Harness, Hook, Pair, Setup},
};

/// Owner and clients of one store.
#[derive(Debug)]
struct Memory;

#[async_trait]
impl Harness for Memory {
    fn name(&self) -> String {
        "memory, publisher and consumer apart".into()
    }

    fn offers(&self, hook: Hook) -> bool {
        matches!(
            hook,
            Hook::KillPublisher | Hook::OlderPeer | Hook::SecondConsumer | Hook::TransferDelay
        )
    }

    async fn pair(&self, setup: &Setup) -> Result<Pair> {
        let publisher = MemoryTransport::builder()
            .arena_bytes(setup.arena_bytes)
            .older_peer(setup.older_peer)
            .transfer_delay(setup.transfer_delay)
            .build()?;
        let (first, second) = (publisher.client(), publisher.client());
        let publisher: Arc<dyn Transport> = Arc::new(publisher);
        let killed = publisher.clone();
        Ok(Pair::new(publisher, Arc::new(first))
            .second_consumer(Arc::new(second))
            .on_kill(Box::new(move || Box::pin(async move { killed.close().await }))))
    }
}

mod apart {
    transport_core::conformance_tests!(super::Memory, not_applicable: []);
}
