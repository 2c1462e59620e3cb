//! The conformance suite: what every [`Transport`] must do, as cases that anybody can run.
//!
//! Implement [`Harness`], which makes a fresh publisher and consumer, and run the suite over it:
//!
//! ```
//! # use std::sync::Arc;
//! # use transport_core::{MemoryTransport, Result, Transport, conformance::{self, Harness, Pair, Setup}};
//! #[derive(Debug)]
//! struct Memory;
//!
//! #[async_trait::async_trait]
//! impl Harness for Memory {
//!     fn name(&self) -> String {
//!         "memory".into()
//!     }
//!
//!     async fn pair(&self, setup: &Setup) -> Result<Pair> {
//!         let publisher = MemoryTransport::builder().arena_bytes(setup.arena_bytes).build()?;
//!         let consumer = publisher.client();
//!         Ok(Pair::new(Arc::new(publisher), Arc::new(consumer)))
//!     }
//! }
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! let case = conformance::case("empty_calls_do_nothing").expect("a case of the suite");
//! assert_eq!(case.run(&Memory).await, conformance::Outcome::Passed);
//! # });
//! ```
//!
//! [`run_all`] runs everything and returns a [`Report`]; [`conformance_tests!`] makes one test
//! function per case. A case that needs what the transport or the harness lacks is reported as not
//! applicable, with the reason; [`Report::verdict`] compares these with the list that the caller
//! expects, so that no case drops out unseen.
//!
//! [`conformance_tests!`]: crate::conformance_tests
//!
//! Cases run one after the other, each with a pair of its own and within
//! [`Harness::case_timeout`]. A panic in a case is a failure of that case.

mod capacity;
mod concurrency;
mod context;
mod destinations;
mod lifecycle;
mod peers;
mod publishing;
mod releasing;
mod report;
mod round_trip;
mod staleness;
mod suite;

pub use report::{CaseReport, Outcome, Report};
pub use suite::{Case, Need, assert_case, case, cases};

use std::{any::Any, fmt, future::Future, pin::Pin, sync::Arc, time::Duration};

use async_trait::async_trait;

use crate::{Result, Transport};

/// Makes the transports under test.
#[async_trait]
pub trait Harness: fmt::Debug + Send + Sync {
    /// What is tested, for the report: the transport and how its two sides are arranged.
    fn name(&self) -> String;

    /// Whether [`Self::pair`] honours a hook; cases that need another one are not applicable.
    fn offers(&self, hook: Hook) -> bool {
        let _ = hook;
        false
    }

    /// Starts a fresh publisher and consumer as `setup` asks for. They may be one object, two
    /// objects or two processes; all that was started must end when the pair is dropped.
    async fn pair(&self, setup: &Setup) -> Result<Pair>;

    /// How long one case may take, start and end of its pair included. Default: 60 seconds.
    fn case_timeout(&self) -> Duration {
        Duration::from_secs(60)
    }
}

/// Runs every case, one after the other.
pub async fn run_all(harness: &dyn Harness) -> Report {
    let mut report = Report::new(harness.name());
    for case in cases() {
        let start = std::time::Instant::now();
        let outcome = case.run(harness).await;
        report.cases.push(CaseReport { name: case.name, outcome, elapsed: start.elapsed() });
    }
    report
}

/// Something that a harness may be able to do beyond making a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Hook {
    /// [`Pair::kill_publisher`].
    KillPublisher,
    /// [`Setup::older_peer`].
    OlderPeer,
    /// [`Pair::second_consumer`].
    SecondConsumer,
    /// [`Setup::transfer_delay`].
    TransferDelay,
}

/// What a case asks of its pair.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Setup {
    /// Room for published tensors. The harness may round it up to whole pages, no further; a
    /// receive pool of the consumer must hold as much.
    pub arena_bytes: u64,
    /// The publisher speaks as older ones do: no epoch and no sequence numbers in its descriptors,
    /// no answers to frees. Asked for only with [`Hook::OlderPeer`].
    pub older_peer: bool,
    /// A second consumer is needed. Asked for only with [`Hook::SecondConsumer`].
    pub second_consumer: bool,
    /// Least time that each transfer into consumer memory takes, so that a case can look at one in
    /// flight; not zero only with [`Hook::TransferDelay`].
    pub transfer_delay: Duration,
}

impl Setup {
    /// A pair with `arena_bytes` of room and nothing special.
    pub const fn new(arena_bytes: u64) -> Self {
        Self {
            arena_bytes,
            older_peer: false,
            second_consumer: false,
            transfer_delay: Duration::ZERO,
        }
    }
}

/// Kills a publisher.
pub type KillPublisher =
    Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = Result<()>> + Send>> + Send + Sync>;

/// A publisher and its consumers.
#[non_exhaustive]
pub struct Pair {
    /// Publishes; the arena is behind it, and its health tells what is resident.
    pub publisher: Arc<dyn Transport>,
    /// Fetches and releases. May be the same object as `publisher`.
    pub consumer: Arc<dyn Transport>,
    /// Another client of the same publisher.
    pub second_consumer: Option<Arc<dyn Transport>>,
    /// Ends the publisher as a crash does: without a goodbye.
    pub kill_publisher: Option<KillPublisher>,
    _guard: Option<Box<dyn Any + Send + Sync>>, // kept for its Drop
}

impl Pair {
    /// A publisher and a consumer.
    pub fn new(publisher: Arc<dyn Transport>, consumer: Arc<dyn Transport>) -> Self {
        Self { publisher, consumer, second_consumer: None, kill_publisher: None, _guard: None }
    }

    /// Adds a second client of the publisher.
    #[must_use]
    pub fn second_consumer(mut self, consumer: Arc<dyn Transport>) -> Self {
        self.second_consumer = Some(consumer);
        self
    }

    /// Adds the way to kill the publisher.
    #[must_use]
    pub fn on_kill(mut self, kill: KillPublisher) -> Self {
        self.kill_publisher = Some(kill);
        self
    }

    /// Keeps `guard` until the pair is dropped, after its transports: a child process, a socket.
    #[must_use]
    pub fn keeping(mut self, guard: impl Any + Send + Sync) -> Self {
        self._guard = Some(Box::new(guard));
        self
    }
}

impl fmt::Debug for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pair")
            .field("publisher", &self.publisher)
            .field("consumer", &self.consumer)
            .field("second_consumer", &self.second_consumer)
            .field("kill_publisher", &self.kill_publisher.is_some())
            .finish_non_exhaustive()
    }
}
