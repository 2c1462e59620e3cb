//! Reading segments without Mooncake's engine: the master says where an object lies and grants the
//! lease, and the bytes come from the owner over its own wire.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use mooncake_sys::{Replica, SegmentRead, SegmentReader};
use parking_lot::Mutex;
use transport_core::{Error, ErrorKind, RegionMut, Result, SessionName};

use crate::{transport::Shared, workers::Flight};

/// Segments that are read at the same time by one call.
const AT_A_TIME: usize = 4;

/// The reader of a transport, and what is known about segments.
#[derive(Debug)]
pub(crate) struct Native {
    reader: Arc<dyn SegmentReader>,
    own: String, // this process's segment, which Mooncake copies from without a wire
    unsuited: Mutex<HashSet<Arc<str>>>,
    bytes: AtomicU64,
}

/// What became of an object that was not left to Mooncake.
#[derive(Debug)]
pub(crate) enum Found {
    /// It is as long as its region, which holds it.
    Whole,
    /// It has another length, and was not read.
    Length(u64),
    /// It was not read, or not to its end, and may be tried again. The error is with the first one
    /// of its segment.
    Failed(Option<Error>),
}

/// Objects of one segment.
struct Group {
    segment: SessionName,
    name: Arc<str>,
    indexes: Vec<usize>,
    reads: Vec<SegmentRead>,
}

impl Native {
    pub(crate) fn new(reader: Arc<dyn SegmentReader>, own: String) -> Self {
        let (unsuited, bytes) = (Mutex::default(), AtomicU64::new(0));
        Self { reader, own, unsuited, bytes }
    }

    /// Payload that came this way.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn close(&self) {
        self.reader.close();
    }

    /// Reads the objects that it can, in place of the `None` in `found`, each into its region. What
    /// stays `None` is left to Mooncake. Fails only before it reads.
    pub(crate) fn read(
        &self,
        shared: &Shared,
        flight: &Flight,
        keys: &[&str],
        regions: &mut [Option<RegionMut>],
        found: &mut [Option<Found>],
    ) -> Result<()> {
        let Some(located) = shared.api.locate(keys)? else { return Ok(()) };
        let mut groups: Vec<Group> = Vec::new();
        for (i, replicas) in located.iter().enumerate() {
            let Some((replica, at)) = self.choose(replicas, &mut groups) else { continue };
            let dst = regions[i].take_if(|region| region.len() as u64 == replica.len);
            let Some(dst) = dst else {
                found[i] = Some(Found::Length(replica.len));
                continue;
            };
            groups[at].indexes.push(i);
            groups[at].reads.push(SegmentRead { address: replica.address, dst });
        }
        groups.retain(|group| !group.reads.is_empty());
        let queue = Mutex::new(groups.into_iter());
        let done = Mutex::new(Vec::new());
        let work = || {
            loop {
                let Some(mut group) = queue.lock().next() else { return };
                let reads = std::mem::take(&mut group.reads);
                let (deadline, stop) = (flight.deadline(), flight.stop());
                let (reads, result) = self.reader.read(&group.segment, reads, deadline, stop);
                done.lock().push((group, reads, result));
            }
        };
        let more = queue.lock().len().saturating_sub(1).min(AT_A_TIME - 1);
        thread::scope(|scope| {
            (0..more).for_each(|_| drop(scope.spawn(work)));
            work();
        });
        for (group, reads, result) in done.into_inner() {
            let is_whole = result.is_ok();
            let mut error = result.err();
            match error.as_ref().map(Error::kind) {
                Some(ErrorKind::Timeout | ErrorKind::Closed) => return Err(error.expect("is some")),
                Some(ErrorKind::Unsupported | ErrorKind::Protocol) => {
                    tracing::warn!(segment = &*group.name, ?error, "left to Mooncake's engine");
                    self.unsuited.lock().insert(group.name);
                }
                _ => {}
            }
            for (i, read) in group.indexes.into_iter().zip(reads) {
                found[i] = Some(if is_whole {
                    self.bytes.fetch_add(read.dst.len() as u64, Ordering::Relaxed);
                    Found::Whole
                } else {
                    Found::Failed(error.take())
                });
                regions[i] = Some(read.dst);
            }
        }
        Ok(())
    }

    /// The replica to read, and the group of its segment: one that is read from anyway, if possible.
    fn choose<'r>(
        &self,
        replicas: &'r [Replica],
        groups: &mut Vec<Group>,
    ) -> Option<(&'r Replica, usize)> {
        for (at, group) in groups.iter().enumerate() {
            if let Some(replica) = replicas.iter().find(|r| *r.segment == *group.name) {
                return Some((replica, at));
            }
        }
        let unsuited = self.unsuited.lock();
        let replica =
            replicas.iter().find(|r| *r.segment != *self.own && !unsuited.contains(&r.segment))?;
        let segment = replica.segment.parse().ok()?; // else not the name of a handshake
        let name = replica.segment.clone();
        groups.push(Group { segment, name, indexes: Vec::new(), reads: Vec::new() });
        Some((replica, groups.len() - 1))
    }
}
