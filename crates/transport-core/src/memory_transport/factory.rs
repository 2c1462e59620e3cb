//! Builds memory transports from settings.

use std::sync::Arc;

use async_trait::async_trait;

use super::{MemoryTransport, SCHEME};
use crate::{
    ByteSize, Capabilities, Result, Transport,
    registry::{Answer, Factory, Probe, Scheme, Settings},
};

const ARENA_BYTES: &str = "arena_bytes";

/// The factory of [`SCHEME`]. Setting: `arena_bytes`, a size, which must be given.
pub fn factory() -> Arc<dyn Factory> {
    Arc::new(MemoryFactory)
}

#[derive(Debug)]
struct MemoryFactory;

#[async_trait]
impl Factory for MemoryFactory {
    fn scheme(&self) -> Scheme {
        SCHEME.parse().expect("a valid name")
    }

    fn summary(&self) -> &str {
        "publisher and consumers in one process, for tests"
    }

    fn capabilities(&self) -> Capabilities {
        MemoryTransport::capabilities(true, false)
    }

    fn settings(&self) -> &[&str] {
        &[ARENA_BYTES]
    }

    async fn probe(&self, settings: &Settings) -> Probe {
        match settings.require::<ByteSize>(ARENA_BYTES) {
            Ok(_) => Probe::USABLE,
            Err(error) => Probe { configured: Answer::No(error.to_string()), ..Probe::USABLE },
        }
    }

    async fn build(&self, settings: &Settings, reason: &str) -> Result<Arc<dyn Transport>> {
        let bytes = settings.require::<ByteSize>(ARENA_BYTES)?.get();
        let mut transport = MemoryTransport::builder().arena_bytes(bytes).build()?;
        transport.info.reason = reason.into();
        Ok(Arc::new(transport))
    }
}
