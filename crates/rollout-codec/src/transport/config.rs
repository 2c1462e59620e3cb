//! How rollouts are put and got.

use std::{fmt, num::NonZeroU64, sync::Arc, time::Duration};

use capture_arena::RegionPool;
use transport_core::{DEFAULT_DEADLINE, Error, ErrorKind, RegionMut, Result, StoreId};

use super::{HostShare, Journal};
use crate::native::{BLOCK_BYTES, Options, ReadLimits};

/// When checksums are compared on `get`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Never.
    Never,
    /// Where bytes were moved; views show what the publisher wrote.
    #[default]
    Moved,
    /// Always.
    Always,
}

/// Makes memory known to the engine of a transport, and gives it back as it is.
pub type Register = Arc<dyn Fn(RegionMut) -> Result<RegionMut> + Send + Sync>;

/// Gives so many bytes of memory that the engine of a transport knows.
pub type Take = Arc<dyn Fn(usize) -> Result<RegionMut> + Send + Sync>;

/// How rollouts are put and got.
#[derive(Clone)]
#[non_exhaustive]
pub struct RolloutConfig {
    /// First part of all keys. Default: `rollout`.
    pub store_id: StoreId,
    /// How rollouts are encoded.
    pub encoding: Options,
    /// Most bytes of one data sample. Default: none for a transport with views, else 1 GiB, which
    /// keeps an ordinary rollout at two keys.
    ///
    /// Smaller parts overlap gathering with sending, and let gets of some fields or rows read
    /// less; each is a key of its own, and views of a rollout in several parts take a copy.
    pub chunk_bytes: Option<NonZeroU64>,
    /// Data samples on their way at a time, of one put or get. Default: 2.
    pub in_flight: usize,
    /// Threads that gather one data sample, and that verify one rollout. Default: as many as there
    /// are cores, at most 4.
    pub threads: usize,
    /// When checksums are compared.
    pub verify: Verify,
    /// How reads of some rows or fields are joined, where the transport reads ranges.
    pub reads: ReadLimits,
    /// Longest put, and longest get. Default: 30 seconds.
    pub deadline: Duration,
    /// Gives memory for what is read in several parts, such as that of a registered pool. Default:
    /// the heap.
    pub take: Option<Take>,
    /// Makes memory that does not come from `take` known to the transport's engine.
    pub register: Option<Register>,
    /// Readers on this host that get the same rollout over a transport without views read it once.
    /// Default: each reads by itself.
    pub host_share: Option<HostShare>,
    /// Where puts note what they are about to write, so that it can be
    /// [swept](super::RolloutTransport::sweep) if they die. Default: nowhere.
    pub journal: Option<Journal>,
}

impl Default for RolloutConfig {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            store_id: StoreId::new("rollout").expect("a valid name"),
            encoding: Options::default(),
            chunk_bytes: None,
            in_flight: 2,
            threads: cores.min(4),
            verify: Verify::default(),
            reads: ReadLimits::default(),
            deadline: DEFAULT_DEADLINE,
            take: None,
            register: None,
            host_share: None,
            journal: None,
        }
    }
}

impl RolloutConfig {
    /// Sets the first part of all keys.
    #[must_use]
    pub fn store_id(self, store_id: StoreId) -> Self {
        Self { store_id, ..self }
    }

    /// Sets how rollouts are encoded.
    #[must_use]
    pub fn encoding(self, encoding: Options) -> Self {
        Self { encoding, ..self }
    }

    /// Sets the size of data samples, and how many are on their way at a time.
    #[must_use]
    pub fn chunks(self, bytes: NonZeroU64, in_flight: usize) -> Self {
        Self { chunk_bytes: Some(bytes), in_flight, ..self }
    }

    /// Sets how many threads gather.
    #[must_use]
    pub fn threads(self, threads: usize) -> Self {
        Self { threads, ..self }
    }

    /// Sets when checksums are compared.
    #[must_use]
    pub fn verify(self, verify: Verify) -> Self {
        Self { verify, ..self }
    }

    /// Sets how reads of some rows or fields are joined.
    #[must_use]
    pub fn reads(self, reads: ReadLimits) -> Self {
        Self { reads, ..self }
    }

    /// Bounds each put and each get.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// Reads what comes in several parts into `pool`.
    #[must_use]
    pub fn pool(self, pool: RegionPool) -> Self {
        self.take(Arc::new(move |bytes| pool.take(bytes)))
    }

    /// Reads what comes in several parts into memory that `take` gives.
    #[must_use]
    pub fn take(self, take: Take) -> Self {
        Self { take: Some(take), ..self }
    }

    /// Makes other memory known to the transport's engine with `register`.
    #[must_use]
    pub fn register(self, register: Register) -> Self {
        Self { register: Some(register), ..self }
    }

    /// Reads each rollout once a host.
    #[must_use]
    pub fn host_share(self, share: HostShare) -> Self {
        Self { host_share: Some(share), ..self }
    }

    /// Notes in `journal` what puts are about to write.
    #[must_use]
    pub fn journal(self, journal: Journal) -> Self {
        Self { journal: Some(journal), ..self }
    }

    pub(super) fn check(&self) -> Result<()> {
        let bad = |setting: &'static str, why: &'static str| {
            Err(Error::new(ErrorKind::ConfigInvalid, "configure rollouts", why)
                .with("setting", setting))
        };
        if !(1..=64).contains(&self.in_flight) {
            return bad("in_flight", "1 to 64 data samples may be on their way");
        }
        if !(1..=256).contains(&self.threads) {
            return bad("threads", "1 to 256 threads gather");
        }
        if self.chunk_bytes.is_some_and(|bytes| bytes.get() < BLOCK_BYTES) {
            return bad("chunk_bytes", "a data sample holds at least a block of 128 KiB");
        }
        if self.deadline.is_zero() {
            return bad("deadline", "nothing is that fast");
        }
        Ok(())
    }

    /// Memory of the reader.
    pub(super) fn memory(&self, bytes: usize) -> Result<RegionMut> {
        match &self.take {
            Some(take) => take(bytes),
            None => self.registered(RegionMut::zeroed(bytes)?),
        }
    }

    /// The same memory, known to the engine.
    pub(super) fn registered(&self, region: RegionMut) -> Result<RegionMut> {
        match &self.register {
            Some(register) => register(region),
            None => Ok(region),
        }
    }
}

impl fmt::Debug for RolloutConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RolloutConfig")
            .field("store_id", &self.store_id)
            .field("chunk_bytes", &self.chunk_bytes)
            .field("in_flight", &self.in_flight)
            .field("threads", &self.threads)
            .field("verify", &self.verify)
            .field("deadline", &self.deadline)
            .field("host_share", &self.host_share)
            .field("journal", &self.journal)
            .finish_non_exhaustive()
    }
}
