//! The store calls that a transport makes.

use std::{fmt, sync::Arc};

use transport_core::{Error, ErrorKind, RemoteAddr, Result};

use crate::{ProviderInfo, StoreCode};

pub(crate) const SETUP: &str = "set up Mooncake Store";

/// One answer per key, in the order of the keys.
pub type KeyResults<T> = Vec<Result<T, StoreCode>>;

/// One object to write.
#[derive(Clone, Copy, Debug)]
pub struct PutItem<'a> {
    /// Key; holds no NUL.
    pub key: &'a str,
    /// First byte of the value.
    pub start: *const u8,
    /// Bytes of the value; not 0, which Mooncake refuses.
    pub len: usize,
}

/// One object to read.
#[derive(Clone, Copy, Debug)]
pub struct GetItem<'a> {
    /// Key; holds no NUL.
    pub key: &'a str,
    /// First byte of the destination.
    pub start: *mut u8,
    /// Bytes of the destination; not 0, and at least as long as the object.
    pub len: usize,
}

/// Where one replica of an object lies in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    /// Segment that holds it: `host:port` of the owner's peer handshake where no metadata server is
    /// used.
    pub segment: Arc<str>,
    /// Its first byte, in the owner's address space.
    pub address: RemoteAddr,
    /// Its length in bytes.
    pub len: u64,
}

/// How an object is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReplicaPolicy {
    /// Copies; at least 1.
    pub replicas: usize,
    /// Never evicted; only a removal takes it away.
    pub hard_pin: bool,
}

impl Default for ReplicaPolicy {
    /// One copy, hard-pinned.
    fn default() -> Self {
        Self { replicas: 1, hard_pin: true }
    }
}

/// A client of Mooncake Store, ready for use.
///
/// Calls block; any thread may make them, several at a time.
///
/// # Memory
/// The unsafe calls hand addresses to a library that knows nothing of lifetimes:
/// - while a call runs, the memory of its items stays allocated, sources are not written, and
///   destinations are neither read nor written by anybody else;
/// - after [`Self::put`] has returned, sources are free again;
/// - after [`Self::get`] has returned, a destination is free again if its result is a length, or a
///   code other than [`StoreCode::TRANSFER_FAIL`] and [`StoreCode::LEASE_EXPIRED`]. With these two
///   the peer may still write into it: it must stay allocated and unused for as long as the client
///   lives. The same holds when the call itself fails.
pub trait StoreApi: fmt::Debug + Send + Sync {
    /// Which file serves the calls.
    fn provider(&self) -> &ProviderInfo;

    /// The name under which the cluster knows this client, `host:port`.
    fn hostname(&self) -> Result<String>;

    /// Whether the client works and reaches its master.
    fn health(&self) -> Result<()>;

    /// Makes memory known to the engine, as the source or destination of later calls.
    ///
    /// Ranges must not overlap what is registered already, not even the same range twice.
    ///
    /// # Safety
    /// `start .. start + len` stays allocated until [`Self::unregister`] has returned for it.
    unsafe fn register(&self, start: *mut u8, len: usize) -> Result<()>;

    /// Takes back a registration.
    ///
    /// # Safety
    /// No call that names this memory runs or is made later.
    unsafe fn unregister(&self, start: *mut u8) -> Result<()>;

    /// Writes objects, one result for each.
    ///
    /// Mooncake never overwrites: a key that exists answers `Ok` and keeps its old value. A key
    /// whose writer died half-way does the same and stays unreadable.
    ///
    /// # Safety
    /// The trait's section on memory.
    unsafe fn put(&self, items: &[PutItem<'_>], policy: ReplicaPolicy) -> Result<KeyResults<()>>;

    /// Writes objects that are not there yet, one result for each.
    ///
    /// Unlike [`Self::put`], it says what happened: a key that is taken, by a complete object or by
    /// a writer that has not finished, answers [`StoreCode::OBJECT_ALREADY_EXISTS`], also when two
    /// processes write it at the same moment; `Ok` means that the object is the caller's and can be
    /// read. Where it answers another code, or fails as a whole, there is no object of the caller's.
    /// Needs [`StoreCapabilities::put_new`](crate::StoreCapabilities::put_new).
    ///
    /// # Safety
    /// The trait's section on memory.
    unsafe fn put_new(
        &self,
        items: &[PutItem<'_>],
        policy: ReplicaPolicy,
    ) -> Result<KeyResults<()>> {
        let _ = (items, policy);
        Err(Error::new(ErrorKind::Unsupported, "put", "the provider has no put sessions"))
    }

    /// Reads whole objects and says how long each is.
    ///
    /// Each found object gets a read lease. A destination that is too short answers
    /// [`StoreCode::INVALID_PARAMS`].
    ///
    /// # Safety
    /// The trait's section on memory.
    unsafe fn get(&self, items: &[GetItem<'_>]) -> Result<KeyResults<u64>>;

    /// Whether each key names a complete object. Renews the read lease of those that do, so it must
    /// not be used to wait for a lease to end.
    fn exists(&self, keys: &[&str]) -> Result<KeyResults<bool>>;

    /// Length of an object in bytes.
    fn size(&self, key: &str) -> Result<Result<u64, StoreCode>>;

    /// Where the replicas of each object lie that are complete and in memory; none for a key that is
    /// not there. Each found object gets a read lease, as from [`Self::get`]. `None` if the provider
    /// cannot tell.
    fn locate(&self, keys: &[&str]) -> Result<Option<Vec<Vec<Replica>>>> {
        let _ = keys;
        Ok(None)
    }

    /// Removes objects. Without `force` a leased object answers [`StoreCode::OBJECT_HAS_LEASE`].
    fn remove(&self, keys: &[&str], force: bool) -> Result<KeyResults<()>>;

    /// Waits for running calls, unmounts the own segment and leaves the cluster. Idempotent; later
    /// calls fail with [`ErrorKind::Closed`].
    fn close(&self) -> Result<()>;
}

/// Finds out within seconds whether anything listens at the master's address; Mooncake itself takes
/// more than a minute to give up. Addresses of another form, such as `etcd://…`, are not probed.
#[cfg(any(feature = "mooncake", feature = "mooncake-python"))]
pub(crate) fn probe_master(setup: &StoreSetup) -> Result<()> {
    use std::net::{TcpStream, ToSocketAddrs};
    let Ok(name) = setup.master.parse::<transport_core::SessionName>() else { return Ok(()) };
    let gone = |why: std::io::Error| {
        Error::new(ErrorKind::PeerGone, SETUP, "the master cannot be reached")
            .with("master", &setup.master)
            .source(why)
            .remedy("check that mooncake_master runs and that its address is right")
    };
    let mut last = std::io::Error::from(std::io::ErrorKind::AddrNotAvailable);
    for address in (name.host(), name.port()).to_socket_addrs().map_err(gone)?.take(4) {
        match TcpStream::connect_timeout(&address, std::time::Duration::from_secs(3)) {
            Ok(_) => return Ok(()),
            Err(why) => last = why,
        }
    }
    Err(gone(last))
}

/// Reads the answer of Mooncake's health check.
#[cfg(any(feature = "mooncake", feature = "mooncake-python"))]
pub(crate) fn check_health(answer: i64) -> Result<()> {
    let operation = "check Mooncake Store";
    match answer {
        0 => Ok(()),
        1 => Err(Error::new(ErrorKind::Closed, operation, "the client is not set up")),
        2 => Err(Error::new(ErrorKind::PeerGone, operation, "the master cannot be reached")
            .remedy("check that mooncake_master runs and that its address is right")),
        other => Err(Error::new(ErrorKind::Unexpected, operation, "the client is not healthy")
            .with("code", other)),
    }
}

#[cfg(any(feature = "mooncake", feature = "mooncake-python"))]
pub(crate) fn setup_failed(code: StoreCode, setup: &StoreSetup, info: &ProviderInfo) -> Error {
    code.error(SETUP)
        .with("master", &setup.master)
        .with("protocol", &setup.protocol)
        .with("provider", info)
        .remedy(
            "check that the master runs and is reachable, and that host, protocol and devices \
             exist; Mooncake's own log on standard error has the details",
        )
}

/// How a client joins a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreSetup {
    /// Host by which other members reach this process; Mooncake adds a port.
    pub local_host: String,
    /// `P2PHANDSHAKE`, or the address of a metadata server.
    pub metadata: String,
    /// Bytes of object memory that this process adds to the pool; 0 for a pure client.
    pub segment_bytes: u64,
    /// Bytes of Mooncake's own staging memory. Calls on registered memory need little of it.
    pub buffer_bytes: u64,
    /// `tcp`, `rdma`, ….
    pub protocol: String,
    /// RDMA devices, separated by commas; empty for all.
    pub devices: String,
    /// Master, `host:port`.
    pub master: String,
    /// Tenant, where the provider knows them.
    pub tenant: Option<String>,
}

impl StoreSetup {
    /// A pure tcp client on `local_host`, which needs no metadata server.
    pub fn client(local_host: impl Into<String>, master: impl Into<String>) -> Self {
        Self {
            local_host: local_host.into(),
            metadata: "P2PHANDSHAKE".into(),
            segment_bytes: 0,
            buffer_bytes: 16 << 20,
            protocol: "tcp".into(),
            devices: String::new(),
            master: master.into(),
            tenant: None,
        }
    }

    /// Adds object memory to the pool.
    #[must_use]
    pub fn segment(mut self, bytes: u64) -> Self {
        self.segment_bytes = bytes;
        self
    }

    /// Refuses what no client can start with: blanks and upper case in the protocol's name, which
    /// Mooncake takes for another protocol without a word, and empty or NUL-bearing texts.
    pub fn check(&self) -> Result<()> {
        let bad = |what: &'static str, why: &'static str, found: &str| {
            Err(Error::new(ErrorKind::ConfigInvalid, SETUP, why)
                .with("setting", what)
                .with("found", format_args!("{found:?}")))
        };
        for (what, text, may_be_empty) in [
            ("local_host", &self.local_host, false),
            ("metadata", &self.metadata, false),
            ("protocol", &self.protocol, false),
            ("devices", &self.devices, true),
            ("master", &self.master, false),
        ] {
            if text.contains('\0') {
                return bad(what, "the setting holds a NUL", text);
            }
            if text.trim().len() != text.len() {
                return bad(what, "the setting begins or ends with a blank", text);
            }
            if text.is_empty() && !may_be_empty {
                return bad(what, "the setting is empty", text);
            }
        }
        if self.protocol.chars().any(char::is_uppercase) {
            return bad("protocol", "protocol names are in lower case", &self.protocol);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setups_that_mislead_mooncake_are_refused() {
        let good = StoreSetup::client("127.0.0.1", "127.0.0.1:50051").segment(1 << 20);
        good.check().unwrap();
        let bad: [fn(&mut StoreSetup); 5] = [
            |s| s.protocol = "TCP".into(),
            |s| s.protocol = " tcp".into(),
            |s| s.master.clear(),
            |s| s.local_host = "a\0b".into(),
            |s| s.metadata = "P2PHANDSHAKE ".into(),
        ];
        for change in bad {
            let mut setup = good.clone();
            change(&mut setup);
            let error = setup.check().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConfigInvalid);
            assert!(error.context("setting").is_some(), "{error}");
        }
    }
}
