//! Wrappers around any [`Transport`] that are transports themselves.
//!
//! | layer | adds |
//! |---|---|
//! | [`TraceLayer`] | a tracing span around each call |
//! | [`MetricsLayer`] | counters and latency histograms that can be read |
//! | [`RetryLayer`] | more attempts after temporary errors |
//! | [`TimeoutLayer`] | a bound on every call, also on those without a deadline of their own |
//! | [`LimitLayer`] | at most so many calls and bytes at once |
//! | [`FaultLayer`] | failures, delays and damage, from a seed, for tests |
//!
//! # Order
//! [`Stack::with`] puts each layer around what is there, so the last one added is the outermost.
//! From the inside out, in the order of the table read upwards:
//!
//! - `fault` is innermost: everything else must cope with what it does.
//! - `limit` inside `timeout` and `retry`: waiting for one's turn counts against the attempt, and
//!   a call that sleeps before its next attempt takes nobody's turn.
//! - `timeout` inside `retry`: it bounds one attempt, and a timeout is a reason for the next. The
//!   other way round it bounds all attempts together, which the caller's deadline does already,
//!   and one attempt that hangs takes the time of all.
//! - `metrics` and `trace` outside `retry` show what callers see; a second `metrics` inside it
//!   counts attempts.
//!
//! `Debug` shows the stack, outermost first:
//!
//! ```
//! # use transport_core::{MemoryTransport, layers::*};
//! let transport = MemoryTransport::builder().arena_bytes(1 << 20).build()?;
//! let metrics = MetricsLayer::new();
//! let transport = Stack::new(transport)
//!     .with(&TimeoutLayer::new())
//!     .with(&RetryLayer::new())
//!     .with(&metrics)
//!     .build();
//! assert_eq!(
//!     format!("{transport:?}"),
//!     "Metrics(Retry(4 attempts, Timeout(30s, Memory(owner, 1MiB))))"
//! );
//! # Ok::<(), transport_core::Error>(())
//! ```
//!
//! A layer never changes [`Transport::info`], and keeps the contract if the transport inside does,
//! but for [`FaultLayer`], whose job is to break it.

mod fault;
mod limit;
mod metrics;
mod retry;
#[cfg(test)]
mod scripted;
mod timeout;
mod trace;

pub use fault::{Fault, FaultLayer, Injected};
pub use limit::LimitLayer;
pub use metrics::{Latency, MetricsLayer, MetricsSnapshot, OperationSnapshot};
pub use retry::{RetryEvent, RetryLayer};
pub use timeout::TimeoutLayer;
pub use trace::TraceLayer;

use std::{fmt, sync::Arc};

use crate::{Publication, Transport};

/// Wraps transports.
pub trait Layer: fmt::Debug {
    /// Puts the layer around `inner`. State that belongs to the layer, such as its counters, is
    /// shared by all transports that it wraps.
    fn layer(&self, inner: Arc<dyn Transport>) -> Arc<dyn Transport>;
}

/// Puts layers around a transport, from the inside out.
#[derive(Debug)]
pub struct Stack(Arc<dyn Transport>);

impl Stack {
    /// Starts from the innermost transport.
    pub fn new(transport: impl Transport + 'static) -> Self {
        Self(Arc::new(transport))
    }

    /// Starts from a transport that is shared already.
    pub fn from_shared(transport: Arc<dyn Transport>) -> Self {
        Self(transport)
    }

    /// Puts `layer` around everything so far.
    #[must_use]
    pub fn with(self, layer: &dyn Layer) -> Self {
        Self(layer.layer(self.0))
    }

    /// The whole stack as one transport.
    pub fn build(self) -> Arc<dyn Transport> {
        self.0
    }
}

/// A method of [`Transport`] that moves bytes or talks to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// [`Transport::publish`].
    Publish,
    /// [`Transport::fetch`].
    Fetch,
    /// [`Transport::release`].
    Release,
    /// [`Transport::health`].
    Health,
    /// [`Transport::close`].
    Close,
}

impl Operation {
    /// Every operation.
    pub const ALL: [Self; 5] =
        [Self::Publish, Self::Fetch, Self::Release, Self::Health, Self::Close];

    /// The name of the method.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Publish => "publish",
            Self::Fetch => "fetch",
            Self::Release => "release",
            Self::Health => "health",
            Self::Close => "close",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Bytes of all tensors of a batch.
fn published_bytes(batch: &[Publication]) -> u64 {
    batch.iter().flat_map(|p| p.tensors.values()).map(|t| t.meta.nbytes()).sum()
}
