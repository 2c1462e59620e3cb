//! What a store transport may use and how long it may take.

use std::time::Duration;

use transport_core::{ByteSize, Error, ErrorKind, Result};

/// Which objects a sample has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// One object for each tensor, as every peer of today expects.
    #[default]
    PerTensor,
    /// Tensors shorter than `below` share one object, `@small`: packed, ordered by element size
    /// from large to small and then as published, so that each is aligned to its element.
    Grouped {
        /// Bytes from which a tensor gets an object of its own.
        below: ByteSize,
    },
}

/// Settings of a [`StoreTransport`](crate::StoreTransport).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StoreConfig {
    /// Which objects a sample has; alike on both sides.
    pub layout: Layout,
    /// Most registered memory of the pool.
    pub pool: ByteSize,
    /// Step in which the pool grows; larger requests get a step of their own.
    pub pool_step: ByteSize,
    /// Registered memory to have from the start.
    pub prewarm: ByteSize,
    /// Threads that call the store: how many calls run at once; twice as many where many objects are
    /// written, which mostly wait for the master. Mooncake's calls busy-wait, so more than one for each
    /// core only does harm.
    pub threads: usize,
    /// Most payload of one call to the store.
    pub part_bytes: ByteSize,
    /// Most keys of one call to the store.
    pub part_keys: usize,
    /// How long the master's read leases last (its `default_kv_lease_ttl`). A read that takes this
    /// long is not trusted, whatever it answers, and tried again in smaller parts. `None` trusts
    /// the library's own check, which older versions lack in one path.
    pub read_lease: Option<Duration>,
    /// How often one object is read before the fetch fails.
    pub read_attempts: u32,
    /// First pause between attempts of any kind; doubled each time, up to a second.
    pub backoff: Duration,
    /// Most memory in quarantine; a read that failed half-way is only tried again below it.
    pub max_quarantined: ByteSize,
    /// How long the owner of a segment is left alone that failed a read and gives no sign of life on
    /// its peer handshake: reads of what it holds fail at once until then. `None` switches that off,
    /// which is needed where segments are not named `host:port` of their handshake, as with a
    /// metadata server.
    pub segment_silence: Option<Duration>,
    /// How long a release may try to remove objects that are busy before it leaves them to later
    /// calls; also the time that `close` gives to what is left.
    pub removal_patience: Duration,
    /// How long `close` waits until all samples published here were released by their consumers.
    /// Matters where this process owns object memory, which goes with it.
    pub close_linger: Duration,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            layout: Layout::PerTensor,
            pool: ByteSize::mib(8 << 10),
            pool_step: ByteSize::mib(64),
            prewarm: ByteSize::mib(0),
            threads: 2,
            part_bytes: ByteSize::mib(256),
            part_keys: 4096,
            read_lease: Some(Duration::from_secs(10)),
            read_attempts: 4,
            backoff: Duration::from_millis(20),
            max_quarantined: ByteSize::mib(1 << 10),
            segment_silence: Some(Duration::from_secs(10)),
            removal_patience: Duration::from_secs(2),
            close_linger: Duration::ZERO,
        }
    }
}

impl StoreConfig {
    /// Sets which objects a sample has.
    #[must_use]
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Sets how large the pool may become, and how much of it to have from the start.
    #[must_use]
    pub fn pool(mut self, most: ByteSize, prewarm: ByteSize) -> Self {
        self.pool = most;
        self.prewarm = prewarm;
        self
    }

    /// Refuses settings that cannot work.
    pub fn check(&self) -> Result<()> {
        let bad = |setting: &'static str, why: &'static str| {
            Err(Error::new(ErrorKind::ConfigInvalid, "configure store transport", why)
                .with("setting", setting))
        };
        if self.pool.get() == 0 {
            return bad("pool", "reads and unregistered sources need a pool");
        }
        if self.pool_step.get() == 0 {
            return bad("pool_step", "a pool does not grow in steps of nothing");
        }
        if self.prewarm > self.pool {
            return bad("prewarm", "more than the pool may have");
        }
        if !(1..=16).contains(&self.threads) {
            return bad("threads", "1 to 16 threads call the store");
        }
        if self.part_bytes.get() == 0 || self.part_keys == 0 {
            return bad("part_bytes, part_keys", "a call moves something");
        }
        if self.read_attempts == 0 {
            return bad("read_attempts", "an object is read at least once");
        }
        if self.read_lease.is_some_and(|lease| lease.is_zero()) {
            return bad("read_lease", "no read is that fast; leave it out to switch the check off");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_cannot_work_are_refused() {
        StoreConfig::default().check().unwrap();
        let bad: [fn(&mut StoreConfig); 7] = [
            |c| c.pool = ByteSize::mib(0),
            |c| c.pool_step = ByteSize::mib(0),
            |c| c.prewarm = ByteSize::new(c.pool.get() + 1).unwrap(),
            |c| c.threads = 0,
            |c| c.part_keys = 0,
            |c| c.read_attempts = 0,
            |c| c.read_lease = Some(Duration::ZERO),
        ];
        for change in bad {
            let mut config = StoreConfig::default();
            change(&mut config);
            let error = config.check().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConfigInvalid);
        }
    }
}
