//! What is known about one peer: its metadata, and idle connections to it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use control_proto::mooncake::{data::Version, handshake::SegmentDescriptor};
use parking_lot::Mutex;
use transport_core::{Epoch, Error, ErrorKind, Result, SessionName};

use super::handshake::fetch_metadata;
use crate::net::{Conn, connect};

/// A peer by its session name, whatever process answers there.
#[derive(Debug)]
pub(super) struct Peer {
    session: SessionName,
    instance: Mutex<Option<Arc<Instance>>>,
}

/// One life of a peer: what it said about itself, and connections that are known to lead to it.
#[derive(Debug)]
pub(super) struct Instance {
    pub(super) metadata: SegmentDescriptor,
    /// Newest version that it speaks.
    pub(super) version: Version,
    data: SessionName,
    idle: Mutex<Vec<(Conn, Instant)>>,
    open: AtomicUsize,
    /// A failure made its metadata doubtful: the next read asks again.
    doubtful: AtomicBool,
}

/// Bounds of the connections to one peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct PoolBounds {
    pub(super) max_open: usize,
    pub(super) idle: Duration,
    pub(super) connect: Duration,
}

/// A connection in use; counted as open until it is dropped.
#[derive(Debug)]
pub(super) struct Lent {
    conn: Option<Conn>,
    instance: Arc<Instance>,
    /// It had served before.
    pub(super) reused: bool,
}

impl Peer {
    pub(super) fn new(session: SessionName) -> Self {
        Self { session, instance: Mutex::new(None) }
    }

    /// The peer's present life, from memory unless a failure has put it in doubt.
    ///
    /// Fails with [`ErrorKind::Stale`] if another life than `epoch` answers.
    pub(super) fn instance(
        &self,
        own: &SegmentDescriptor,
        epoch: Option<Epoch>,
        deadline: Instant,
    ) -> Result<Arc<Instance>> {
        let known = self.instance.lock().clone();
        if let Some(known) = known
            && !known.doubtful.load(Ordering::Relaxed)
            && (epoch.is_none() || known.epoch() == epoch)
        {
            return Ok(known);
        }
        let found = self.refresh(own, deadline)?;
        check_epoch(&self.session, epoch, found.epoch())?;
        Ok(found)
    }

    /// Asks the peer again. Connections to an older life are not used any more; reads that still
    /// run over them end on their own.
    pub(super) fn refresh(
        &self,
        own: &SegmentDescriptor,
        deadline: Instant,
    ) -> Result<Arc<Instance>> {
        let metadata = fetch_metadata(&self.session, own, deadline)?;
        let mut slot = self.instance.lock();
        if let Some(known) = &*slot
            && known.is_same_life(&metadata)
        {
            known.doubtful.store(false, Ordering::Relaxed);
            return Ok(known.clone());
        }
        let instance = Arc::new(Instance {
            data: metadata.data_session(&self.session)?,
            version: Version::of_peer(metadata.tcp_proto_version),
            metadata,
            idle: Mutex::default(),
            open: AtomicUsize::new(0),
            doubtful: AtomicBool::new(false),
        });
        *slot = Some(instance.clone());
        Ok(instance)
    }

    /// Takes a connection to `instance`: an idle one, or a new one.
    ///
    /// A new one is followed by a handshake: only while the same life answers is it certain that
    /// the data port, too, was that life's when the connection was made.
    pub(super) fn lend(
        &self,
        instance: &Arc<Instance>,
        own: &SegmentDescriptor,
        bounds: PoolBounds,
        deadline: Instant,
    ) -> Result<Lent> {
        if let Some(conn) = instance.take_idle(bounds.idle) {
            return Ok(Lent { conn: Some(conn), instance: instance.clone(), reused: true });
        }
        let open = instance.open.fetch_add(1, Ordering::Relaxed);
        let mut lent = Lent { conn: None, instance: instance.clone(), reused: false };
        if open >= bounds.max_open {
            return Err(Error::new(ErrorKind::Busy, "read", "too many connections to the peer")
                .with("peer", &self.session)
                .with("limit", bounds.max_open)
                .remedy("run fewer reads at a time, or allow more connections a peer"));
        }
        let connect_by = deadline.min(Instant::now() + bounds.connect);
        let stream = connect("connect", &instance.data, connect_by)
            .map_err(|e| e.with("session", &self.session))?;
        let conn = Conn::new(stream)
            .map_err(|e| Error::io("connect", e).with("session", &self.session))?;
        let answers = fetch_metadata(&self.session, own, connect_by)?;
        if !instance.is_same_life(&answers) {
            instance.doubtful.store(true, Ordering::Relaxed);
            return Err(Error::new(
                ErrorKind::PeerGone,
                "connect",
                "another process has taken over",
            )
            .with("session", &self.session));
        }
        lent.conn = Some(conn);
        Ok(lent)
    }

    /// Connections in use and idle, to its present life.
    pub(super) fn open(&self) -> usize {
        self.instance.lock().as_ref().map_or(0, |i| i.open.load(Ordering::Relaxed))
    }

    /// Closes idle connections and forgets what is known.
    pub(super) fn forget(&self) {
        if let Some(instance) = self.instance.lock().take() {
            instance.close_idle();
        }
    }
}

/// Compares the life that answers with the one that is meant.
pub(crate) fn check_epoch(
    session: &SessionName,
    expected: Option<Epoch>,
    found: Option<Epoch>,
) -> Result<()> {
    match (expected, found) {
        (Some(expected), Some(found)) if expected != found => {
            Err(Error::new(ErrorKind::Stale, "read", "the peer has restarted")
                .with("peer", session)
                .with("expected", expected)
                .with("found", found)
                .remedy("its samples are gone: capture them again"))
        }
        // A peer that tells no life cannot be compared.
        _ => Ok(()),
    }
}

impl Instance {
    pub(super) fn epoch(&self) -> Option<Epoch> {
        self.metadata.featurestore_epoch
    }

    /// The next read asks for its metadata again, and no idle connection is used before.
    pub(super) fn doubt(&self) {
        self.doubtful.store(true, Ordering::Relaxed);
        self.close_idle();
    }

    /// Version to try first.
    ///
    /// Ours speak both, and the older one moves large bodies up to twice as fast: behind a status
    /// frame of 8 bytes the kernel copies every body, on both sides, between addresses that are
    /// aligned differently. What it cannot say, why a read is refused, the newer one is asked for
    /// when it matters.
    pub(super) fn first_version(&self) -> Version {
        if self.epoch().is_some() { Version::V1 } else { self.version }
    }

    fn is_same_life(&self, metadata: &SegmentDescriptor) -> bool {
        let own = &self.metadata;
        match (own.featurestore_epoch, metadata.featurestore_epoch) {
            (Some(a), Some(b)) => a == b,
            (None, None) => {
                // Other peers have no identity: everything that matters must be the same.
                (&own.buffers, &own.name, own.tcp_data_port, &own.tcp_data_host)
                    == (
                        &metadata.buffers,
                        &metadata.name,
                        metadata.tcp_data_port,
                        &metadata.tcp_data_host,
                    )
                    && own.tcp_proto_version == metadata.tcp_proto_version
            }
            _ => false,
        }
    }

    fn take_idle(&self, max_idle: Duration) -> Option<Conn> {
        loop {
            let (conn, since) = self.idle.lock().pop()?;
            if since.elapsed() < max_idle && conn.is_quiet() {
                return Some(conn);
            }
            drop(conn);
            self.open.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn close_idle(&self) {
        let idle = std::mem::take(&mut *self.idle.lock());
        self.open.fetch_sub(idle.len(), Ordering::Relaxed);
    }
}

impl Lent {
    pub(super) fn conn(&mut self) -> &mut Conn {
        self.conn.as_mut().expect("there until it is given back")
    }

    /// Puts the connection back for the next read: it must be between two exchanges.
    pub(super) fn give_back(mut self) {
        let Some(conn) = self.conn.take() else { return };
        if self.instance.doubtful.load(Ordering::Relaxed) {
            return; // counted out by the drop
        }
        self.instance.open.fetch_add(1, Ordering::Relaxed); // the drop takes one off
        self.instance.idle.lock().push((conn, Instant::now()));
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.instance.open.fetch_sub(1, Ordering::Relaxed);
    }
}
