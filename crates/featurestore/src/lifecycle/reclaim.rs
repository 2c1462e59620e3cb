//! Freeing samples whose capture was never answered, wherever they may be.

use std::fmt::Debug;

use async_trait::async_trait;
use transport_core::{Error, ErrorKind, Result, SampleKey};

/// Frees a sample at a place that may or may not hold it.
#[async_trait]
pub trait Reclaim: Debug + Send + Sync {
    /// Frees whatever `place` holds of `sample`; nothing there is fine.
    ///
    /// # Errors
    /// If the place could not be asked, so that it may still hold the sample.
    async fn reclaim(&self, place: &str, sample: &SampleKey) -> Result<()>;
}

/// Knows no places: nothing can be reclaimed.
#[derive(Clone, Copy, Debug)]
pub struct Nowhere;

#[async_trait]
impl Reclaim for Nowhere {
    async fn reclaim(&self, _: &str, _: &SampleKey) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "reclaim", "no way to reach capture servers is set")
            .remedy("give `Samples::reclaiming` what reaches them"))
    }
}
