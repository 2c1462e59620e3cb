//! Reading segments without Mooncake's engine: the master says where an object lies and grants the
//! lease, and the bytes come from the owner over its own wire.

use std::{
    collections::{HashMap, HashSet},
    fs,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use mooncake_sys::{Replica, SegmentRead, SegmentReader, StoreApi};
use parking_lot::Mutex;
use transport_core::{Error, ErrorKind, RegionMut, RemoteAddr, Result, SessionName};

use crate::{memory::joined, segments::handshake, transport::Shared, workers::Flight};

/// Segments that are read at the same time by one call.
const AT_A_TIME: usize = 4;

/// The reader of a transport, and what is known about segments.
#[derive(Debug)]
pub(crate) struct Native {
    reader: Arc<dyn SegmentReader>,
    /// By which others reach the object memory of this client, if it has any.
    host: Option<String>,
    /// Segments that are known, and whether they are left to Mooncake.
    left: Mutex<HashMap<Arc<str>, bool>>,
    bytes: AtomicU64,
}

/// What became of an object that was not left to Mooncake.
#[derive(Debug)]
pub(crate) enum Found {
    /// It is as long as it should be, and its region holds what was wished of it.
    Whole,
    /// It has another length, and was not read.
    Length(u64),
    /// It was not read, or not to its end, and may be tried again. The error is with the first one
    /// of its segment.
    Failed(Option<Error>),
}

/// What is wanted of an object.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish<'a> {
    /// How long the object is.
    pub(crate) len: u64,
    /// All of it, if none.
    pub(crate) ranges: Option<&'a [Range<u64>]>,
}

impl Wish<'_> {
    /// The reads that fill `region`, of an object that begins at `address`.
    fn reads(&self, address: RemoteAddr, region: RegionMut) -> Vec<SegmentRead> {
        let Some(ranges) = self.ranges else { return vec![SegmentRead { address, dst: region }] };
        let mut reads = Vec::with_capacity(ranges.len());
        let mut rest = region;
        for range in ranges {
            let (dst, tail) = rest
                .split_at((range.end - range.start) as usize)
                .expect("the region is as long as the ranges together");
            rest = tail;
            let address = RemoteAddr(address.0.saturating_add(range.start)); // the master's word
            reads.push(SegmentRead { address, dst });
        }
        reads
    }
}

/// Objects of one segment.
struct Group {
    segment: SessionName,
    name: Arc<str>,
    /// Each object, and how many of the reads are its.
    objects: Vec<(usize, usize)>,
    reads: Vec<SegmentRead>,
}

impl Native {
    /// Reads through `reader`, for the client behind `api`.
    pub(crate) fn new(reader: Arc<dyn SegmentReader>, api: &dyn StoreApi) -> Result<Self> {
        let host = match api.provider().store.object_memory {
            true => api.hostname()?.parse().ok().map(|name: SessionName| name.host().to_owned()),
            false => None,
        };
        Ok(Self { reader, host, left: Mutex::default(), bytes: AtomicU64::new(0) })
    }

    /// Payload that came this way.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn close(&self) {
        self.reader.close();
    }

    /// Reads what is wished of the objects that it can, in place of the `None` in `found`, each into
    /// its region. What stays `None` is left to Mooncake. Fails where the call as a whole is over:
    /// the master does not answer, the deadline has passed, or nobody waits any more. Then nothing
    /// reads any more either.
    ///
    /// Ranges of an object that would be left to Mooncake fail the call with
    /// [`ErrorKind::Unsupported`], before a byte moves where the owner is known: Mooncake's engine
    /// reads whole objects, and all of one for each piece of it would cost the square of its length.
    pub(crate) fn read(
        &self,
        shared: &Shared,
        flight: &Flight,
        keys: &[&str],
        wishes: &[Wish<'_>],
        regions: &mut [Option<RegionMut>],
        found: &mut [Option<Found>],
    ) -> Result<()> {
        let Some(located) = shared.api.locate(keys)? else {
            let ranged = wishes.iter().position(|wish| wish.ranges.is_some());
            return ranged.map_or(Ok(()), |i| Err(whole_only(keys[i])));
        };
        let mut groups: Vec<Group> = Vec::new();
        for (i, replicas) in located.iter().enumerate() {
            let Some((replica, at)) = self.choose(replicas, &mut groups) else {
                if wishes[i].ranges.is_none() {
                    continue;
                }
                return Err(match shared.api.size(keys[i])? {
                    Err(code) => code.error("fetch").with("key", keys[i]),
                    Ok(_) => whole_only(keys[i]).with("segments", names(replicas)),
                });
            };
            let dst = regions[i].take_if(|_| wishes[i].len == replica.len);
            let Some(dst) = dst else {
                found[i] = Some(Found::Length(replica.len));
                continue;
            };
            let reads = wishes[i].reads(replica.address, dst);
            groups[at].objects.push((i, reads.len()));
            groups[at].reads.extend(reads);
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
                    self.left.lock().insert(group.name.clone(), true);
                    let ranged = group.objects.iter().find(|(i, _)| wishes[*i].ranges.is_some());
                    if let (Some(&(i, _)), Some(error)) = (ranged, error.take()) {
                        let refused = whole_only(keys[i]).with("segment", &group.name);
                        return Err(refused.source(error));
                    }
                }
                _ => {}
            }
            let mut reads = reads.into_iter();
            for (i, count) in group.objects {
                let region = joined(reads.by_ref().take(count).map(|read| read.dst))?;
                found[i] = Some(if is_whole {
                    self.bytes.fetch_add(region.len() as u64, Ordering::Relaxed);
                    Found::Whole
                } else {
                    Found::Failed(error.take())
                });
                regions[i] = Some(region);
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
        let replica = replicas.iter().find(|replica| !self.is_left(&replica.segment))?;
        let segment = handshake(&replica.segment)?; // it was, a moment ago
        let name = replica.segment.clone();
        groups.push(Group { segment, name, objects: Vec::new(), reads: Vec::new() });
        Some((replica, groups.len() - 1))
    }

    /// Whether a segment is left to Mooncake: it is this client's own, from which Mooncake copies
    /// without a wire, or its name is not that of a handshake.
    fn is_left(&self, name: &Arc<str>) -> bool {
        if let Some(is_left) = self.left.lock().get(name) {
            return *is_left;
        }
        let is_own =
            |name: SessionName| self.host.as_deref() == Some(name.host()) && listens(name.port());
        let is_left = handshake(name).is_none_or(is_own);
        self.left.lock().insert(name.clone(), is_left);
        is_left
    }
}

/// Ranges of an object that only Mooncake's engine reaches.
fn whole_only(key: &str) -> Error {
    let why = "only Mooncake's engine reaches the owner of the object, and it reads whole objects";
    Error::new(ErrorKind::Unsupported, "fetch", why)
        .with("key", key)
        .remedy("fetch the whole tensor, once")
}

/// The segments that hold an object, for a message.
fn names(replicas: &[Replica]) -> String {
    let names: Vec<&str> = replicas.iter().map(|replica| &*replica.segment).collect();
    names.join(", ")
}

/// Whether this process listens on a port: the segment's name is not the client's, and no call says
/// which it is. If the system does not tell, the answer is no, and a read takes the wire.
///
/// A process that inherited the sockets of the one that started it, as Mooncake leaves them, answers
/// yes for that one's segments: so only those with object memory of their own ask.
fn listens(port: u16) -> bool {
    const LISTEN: &str = "0A";
    let mut sockets = HashSet::new();
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        for line in fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            let [_, local, _, LISTEN, _, _, _, _, _, inode, ..] = fields[..] else { continue };
            let found = local.rsplit_once(':').and_then(|(_, p)| u16::from_str_radix(p, 16).ok());
            if found == Some(port) {
                sockets.insert(format!("socket:[{inode}]"));
            }
        }
    }
    let Ok(files) = fs::read_dir("/proc/self/fd") else { return false };
    let mut links = files.flatten().filter_map(|file| fs::read_link(file.path()).ok());
    !sockets.is_empty()
        && links.any(|link| link.to_str().is_some_and(|link| sockets.contains(link)))
}
