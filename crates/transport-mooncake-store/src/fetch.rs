//! Fetching: whole objects into registered memory, tried again where that is safe.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use indexmap::IndexMap;
use mooncake_sys::StoreCode;
use transport_core::{
    Descriptor, Destination, Error, ErrorKind, FeatureName, FetchRequest, Fetched, Location,
    RegionMut, RegionSlice, Result, Tensor, TensorMeta,
};

use crate::{
    io,
    layout::{Object, Place, Plan},
    native::{Found, Wish},
    transport::Shared,
    workers::Flight,
};

/// One object on its way.
struct Read {
    key: Arc<str>,
    len: usize,                      // of the object
    ranges: Option<Vec<Range<u64>>>, // of it that are wanted; all of it if none
    region: Option<RegionMut>,       // being filled; from the pool once it is needed
    is_callers: bool,                // the region must come back as it is
    bytes: Option<RegionSlice>,
}

impl Read {
    /// Bytes that are wanted.
    fn wanted(&self) -> usize {
        let ranges = self.ranges.as_ref();
        ranges.map_or(self.len, |ranges| ranges.iter().map(|r| (r.end - r.start) as usize).sum())
    }
}

/// One request on its way.
struct Wanted {
    descriptor: Arc<Descriptor>,
    tensors: Vec<Part>,
}

/// One tensor of a request.
struct Part {
    index: usize, // in the descriptor
    place: Place, // `object` counts over all requests
    own: Option<RegionMut>,
    ranged: Option<TensorMeta>, // what ranges of it are together
}

/// Refuses what can never be fetched, before any byte moves. `ranges` of tensors may be read.
pub(crate) fn check(requests: &[FetchRequest], ranges: bool) -> Result<()> {
    for request in requests {
        let ranged = request.ranged(ranges)?;
        let FetchRequest { descriptor, names, destination, .. } = request;
        let fail = |kind, why: &'static str| {
            Err(Error::new(kind, "fetch", why).with("key", &descriptor.sample))
        };
        if !matches!(descriptor.location, Location::Store) {
            return fail(ErrorKind::InvalidInput, "the sample does not lie in a store");
        }
        let count = names.as_ref().map_or(descriptor.features.len(), Vec::len);
        if let Some(names) = names {
            let mut seen = HashSet::new();
            for name in names {
                if !descriptor.features.contains_key(name) || !seen.insert(name) {
                    return fail(ErrorKind::InvalidInput, "a name is unknown or asked for twice")
                        .map_err(|e| e.with("name", name));
                }
            }
        }
        match destination {
            Destination::Pool => {}
            Destination::Into(regions) => {
                if regions.len() != count {
                    return fail(ErrorKind::InvalidInput, "not one region for each tensor")
                        .map_err(|e| e.with("expected", count).with("found", regions.len()));
                }
                for (region, (name, meta)) in regions.iter().zip(asked(descriptor, names)) {
                    if !region.kind().is_host() {
                        return fail(
                            ErrorKind::Unsupported,
                            "the store transport fills host memory only",
                        );
                    }
                    let expected = ranged.as_ref().unwrap_or(meta).nbytes();
                    if region.len() as u64 != expected {
                        let error = Error::new(
                            ErrorKind::InvalidInput,
                            "fetch",
                            "a region has another length",
                        );
                        return Err(error
                            .with("key", descriptor.sample.object(name))
                            .with("expected", expected)
                            .with("found", region.len()));
                    }
                }
            }
            _ => {
                return fail(ErrorKind::Unsupported, "the store transport has no views")
                    .map_err(|e| e.remedy("fetch into the pool or into memory of your own"));
            }
        }
    }
    Ok(())
}

/// The tensors that a request asks for, in its order.
fn asked<'a>(
    descriptor: &'a Descriptor,
    names: &'a Option<Vec<FeatureName>>,
) -> Box<dyn Iterator<Item = (&'a FeatureName, &'a transport_core::TensorMeta)> + 'a> {
    let all = &descriptor.features;
    match names {
        None => Box::new(all.iter().map(|(name, f)| (name, &f.meta))),
        Some(names) => Box::new(
            names
                .iter()
                .filter_map(|name| all.get_key_value(name).map(|(name, f)| (name, &f.meta))),
        ),
    }
}

/// Keys of all objects of samples.
pub(crate) fn keys(shared: &Shared, samples: &[Arc<Descriptor>]) -> Result<Vec<Arc<str>>> {
    let mut keys = Vec::new();
    for descriptor in samples {
        let plan = Plan::of_descriptor(shared.config.layout, descriptor)?;
        keys.extend(plan.objects.into_iter().map(|object| object.key));
    }
    Ok(keys)
}

/// Reads everything that is asked for. Blocks.
pub(crate) fn run(
    shared: &Shared,
    flight: &Flight,
    requests: Vec<FetchRequest>,
) -> Result<Vec<Fetched>> {
    let mut planned = Planned::default();
    let wanted: Vec<_> =
        requests.into_iter().map(|r| plan(shared, r, &mut planned)).collect::<Result<_>>()?;
    let mut reads = planned.reads;
    read_all(shared, flight, &mut reads)?;
    let bytes = reads.iter().map(|r| r.wanted() as u64).sum();
    shared.ledger.host_bytes.fetch_add(bytes, Ordering::Relaxed);
    Ok(wanted.into_iter().map(|w| assemble(shared, w, &reads)).collect())
}

/// The objects to read, each once: Mooncake answers a key that is twice in one call with success
/// twice, and fills only one of the destinations.
#[derive(Default)]
struct Planned {
    reads: Vec<Read>,
    by_key: HashMap<Arc<str>, usize>,
}

impl Planned {
    /// The read of an object; `own` gives memory of the caller to read it into, if it is new.
    fn read(
        &mut self,
        key: &Arc<str>,
        bytes: u64,
        own: impl FnOnce() -> Option<RegionMut>,
    ) -> Result<usize> {
        let len = bytes as usize;
        if let Some(&i) = self.by_key.get(key) {
            if self.reads[i].len == len {
                return Ok(i);
            }
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "fetch",
                "two descriptors of the call give the same object different lengths",
            )
            .with("key", key)
            .with("expected", self.reads[i].len)
            .with("found", len));
        }
        let read = self.push(key, len, None, own());
        self.by_key.insert(key.clone(), read);
        Ok(read)
    }

    /// The read of ranges of what lies at `offset` in an object; `own` gives memory of the caller,
    /// which Mooncake's engine never sees and therefore need not know.
    fn cut(
        &mut self,
        object: &Object,
        offset: u64,
        ranges: &[Range<u64>],
        own: impl FnOnce() -> Option<RegionMut>,
    ) -> Place {
        if ranges.iter().all(Range::is_empty) {
            return Place::Empty;
        }
        let ranges = ranges.iter().map(|range| range.start + offset..range.end + offset);
        let read = self.push(&object.key, object.bytes as usize, Some(ranges.collect()), own());
        Place::In { object: read, offset: 0 }
    }

    fn push(
        &mut self,
        key: &Arc<str>,
        len: usize,
        ranges: Option<Vec<Range<u64>>>,
        region: Option<RegionMut>,
    ) -> usize {
        let (key, is_callers) = (key.clone(), region.is_some());
        self.reads.push(Read { key, len, ranges, region, is_callers, bytes: None });
        self.reads.len() - 1
    }
}

fn plan(shared: &Shared, request: FetchRequest, planned: &mut Planned) -> Result<Wanted> {
    let ranged = request.ranged(true)?;
    let FetchRequest { descriptor, names, ranges, destination, .. } = request;
    let resident = shared.ledger.resident(&descriptor.sample);
    let described = descriptor.features.values().find_map(|f| f.seq);
    if let (Some(found), Some(expected)) = (resident.and_then(|r| r.seq), described)
        && expected != found
    {
        return Err(Error::new(ErrorKind::Stale, "fetch", "the sample was published anew")
            .with("key", &descriptor.sample)
            .with("expected", expected)
            .with("found", found));
    }
    let plan = Plan::of_descriptor(shared.config.layout, &descriptor)?;
    let indexes: Vec<usize> = match &names {
        None => (0..descriptor.features.len()).collect(),
        Some(names) => names.iter().filter_map(|n| descriptor.features.get_index_of(n)).collect(),
    };
    let mut own = match destination {
        Destination::Into(regions) => regions.into_iter().map(Some).collect(),
        _ => Vec::new(),
    };
    own.resize_with(indexes.len(), || None);
    let mut tensors = Vec::with_capacity(indexes.len());
    for (index, mut own) in indexes.into_iter().zip(own) {
        let place = match plan.places[index] {
            Place::Empty => Place::Empty,
            Place::In { object, offset } => {
                let object = &plan.objects[object];
                match &ranges {
                    Some(ranges) => planned.cut(object, offset, ranges, || own.take()),
                    None => {
                        let direct = || {
                            own.take_if(|region| {
                                object.tensors.len() == 1
                                    && shared.memory.knows(region.address(), region.len())
                            })
                        };
                        Place::In {
                            object: planned.read(&object.key, object.bytes, direct)?,
                            offset,
                        }
                    }
                }
            }
        };
        tensors.push(Part { index, place, own, ranged: ranged.clone() });
    }
    Ok(Wanted { descriptor, tensors })
}

fn assemble(shared: &Shared, wanted: Wanted, reads: &[Read]) -> Fetched {
    let Wanted { descriptor, tensors } = wanted;
    let tensors: IndexMap<_, _> = tensors
        .into_iter()
        .map(|Part { index, place, own, ranged }| {
            let (name, feature) =
                descriptor.features.get_index(index).expect("planned from this descriptor");
            let meta = ranged.unwrap_or_else(|| feature.meta.clone());
            let bytes = match place {
                Place::Empty => None,
                Place::In { object, offset } => {
                    let object = reads[object].bytes.as_ref().expect("every read has succeeded");
                    let start = offset as usize;
                    let range = start..start + meta.nbytes() as usize;
                    Some(object.slice(range).expect("planned to lie inside"))
                }
            };
            let data = match (own, bytes) {
                (Some(mut own), Some(bytes)) => {
                    let to = own.as_mut_bytes().expect("checked to be host memory");
                    to.copy_from_slice(bytes.as_bytes().expect("the pool is host memory"));
                    shared.ledger.copied_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                    own.freeze()
                }
                (Some(empty), None) => empty.freeze(),
                (None, Some(bytes)) => bytes,
                (None, None) => RegionSlice::copy_of(&[]),
            };
            let tensor = Tensor::new(meta, data).expect("as long as planned");
            (name.clone(), tensor)
        })
        .collect();
    Fetched::new(descriptor, tensors, false)
}

/// Reads every object, in calls of bounded size, some of them more than once.
fn read_all(shared: &Shared, flight: &Flight, reads: &mut [Read]) -> Result<()> {
    let config = &shared.config;
    let mut open: Vec<usize> = (0..reads.len()).collect();
    let mut part_bytes = config.part_bytes.get();
    let mut pause = config.backoff;
    for attempt in 1.. {
        let mut again: Vec<Again> = Vec::new();
        let mut rest = &open[..];
        let (mut largest, mut slowest) = (0, Duration::ZERO);
        while !rest.is_empty() {
            let mut bytes = 0u64;
            let fits = |&&i: &&usize| {
                bytes = bytes.saturating_add(reads[i].wanted() as u64);
                bytes <= part_bytes
            };
            let count = rest.iter().take(config.part_keys).take_while(fits).count().max(1);
            let (part, later) = rest.split_at(count);
            largest = part.iter().map(|&i| reads[i].wanted() as u64).sum::<u64>().max(largest);
            let start = Instant::now();
            read_part(shared, flight, reads, part, &mut again)?;
            slowest = start.elapsed().max(slowest);
            rest = later;
        }
        let failed_keys = again.len();
        let Some(first) = again.first_mut() else { return Ok(()) };
        let (key, code) = (reads[first.index].key.clone(), first.code);
        let failed = |error: Error| {
            let error = error.with("key", key).with("failed_keys", failed_keys);
            let error =
                error.with("attempts", attempt).with("slowest_call_ms", slowest.as_millis());
            match config.read_lease {
                Some(lease) => error.with("read_lease_ms", lease.as_millis()),
                None => error,
            }
        };
        if attempt >= config.read_attempts {
            return Err(failed(first.error.take().unwrap_or_else(|| explain(code))));
        }
        if flight.pause(pause).is_err() {
            let why = "the deadline passed between attempts";
            return Err(failed(Error::new(ErrorKind::Timeout, "fetch", why).with("code", code)));
        }
        pause = (pause * 2).min(Duration::from_secs(1));
        if again.iter().any(|one| one.code == StoreCode::LEASE_EXPIRED) {
            // Each call takes new leases. Half of what was too much, which may be far below the most.
            part_bytes = (part_bytes.min(largest) / 2).max(1);
        }
        shared.ledger.read_retries.fetch_add(again.len() as u64, Ordering::Relaxed);
        open = again.into_iter().map(|one| one.index).collect();
    }
    unreachable!("the loop ends by returning")
}

fn explain(code: StoreCode) -> Error {
    let error = code.error("fetch");
    match code {
        StoreCode::LEASE_EXPIRED => error.remedy(
            "raise the master's default_kv_lease_ttl (and read_lease with it) or read less at a \
             time: the read takes longer than its lease",
        ),
        _ => error,
    }
}

/// An object worth another attempt, and why the last one failed.
struct Again {
    index: usize,
    code: StoreCode,
    error: Option<Error>, // what is known beyond the code
}

/// Reads `some` of the objects through Mooncake's engine, with one call: an answer for each.
fn read_by_mooncake(
    shared: &Shared,
    flight: &Flight,
    keys: &[&str],
    regions: &mut [Option<RegionMut>],
    some: &[usize],
) -> Result<Vec<std::result::Result<u64, StoreCode>>> {
    let mut taken: Vec<_> = some
        .iter()
        .map(|&i| (keys[i], regions[i].take().expect("only taken to be read")))
        .collect();
    let mut objects: Vec<_> = taken.iter_mut().map(|(key, region)| (*key, region)).collect();
    if objects.is_empty() {
        return Ok(Vec::new());
    }
    let bytes = objects.iter().map(|(_, region)| region.len() as u64).sum();
    let answers =
        flight.transfer(bytes, || shared.ledger.timed(|| io::get(&*shared.api, &mut objects)))?;
    // These two are answered before anything is sent.
    if let Err(error) = &answers
        && !matches!(error.kind(), ErrorKind::Closed | ErrorKind::InvalidInput)
    {
        taken.into_iter().for_each(|(_, region)| shared.memory.quarantine(region));
        return answers;
    }
    for (&i, (_, region)) in some.iter().zip(taken) {
        regions[i] = Some(region);
    }
    answers
}

/// Makes one call. Objects worth another attempt go to `again`; any other failure is an error.
fn read_part(
    shared: &Shared,
    flight: &Flight,
    reads: &mut [Read],
    part: &[usize],
    again: &mut Vec<Again>,
) -> Result<()> {
    let mut bytes = 0;
    let mut regions = Vec::with_capacity(part.len());
    for &i in part {
        bytes += reads[i].wanted() as u64;
        let region = match reads[i].region.take() {
            Some(region) => region,
            None => take(shared, flight, &reads[i])?,
        };
        regions.push(Some(region));
    }
    let start = Instant::now();
    let keys: Vec<Arc<str>> = part.iter().map(|&i| reads[i].key.clone()).collect();
    let keys: Vec<&str> = keys.iter().map(AsRef::as_ref).collect();
    let mut found: Vec<Option<Found>> = part.iter().map(|_| None).collect();
    if let Some(native) = &shared.native {
        let wish =
            |&i: &usize| Wish { len: reads[i].len as u64, ranges: reads[i].ranges.as_deref() };
        let wishes: Vec<_> = part.iter().map(wish).collect();
        flight.transfer(bytes, || {
            let read = || native.read(shared, flight, &keys, &wishes, &mut regions, &mut found);
            shared.ledger.timed(read)
        })??;
    }
    // Whole objects: ranges that the reader does not read are refused.
    let left: Vec<usize> = (0..part.len()).filter(|&i| found[i].is_none()).collect();
    let mut answers: Vec<_> = part.iter().map(|_| None).collect();
    let read = read_by_mooncake(shared, flight, &keys, &mut regions, &left)?;
    left.into_iter().zip(read).for_each(|(i, answer)| answers[i] = Some(answer));
    let late = shared.config.read_lease.is_some_and(|lease| start.elapsed() >= lease);
    let regions = regions.into_iter().map(|region| region.expect("given back by whoever read it"));
    let mut fatal = None;
    let mut failed = Vec::new();
    for (((&i, region), found), answer) in part.iter().zip(regions).zip(found).zip(answers) {
        let read = &mut reads[i];
        let result = match found {
            Some(Found::Whole) => Ok(read.len as u64),
            Some(Found::Length(len)) => Ok(len),
            Some(Found::Failed(error)) => {
                failed.push(read.key.clone());
                read.region = Some(region); // nothing writes it any more
                again.push(Again { index: i, code: StoreCode::TRANSFER_FAIL, error });
                continue;
            }
            None => answer.expect("one answer for each that was left"),
        };
        match result {
            Ok(found) if found == read.len as u64 && !late => {
                read.bytes = Some(region.freeze());
            }
            Ok(found) if found == read.len as u64 => {
                read.region = Some(region); // complete, but perhaps another object's
                again.push(Again { index: i, code: StoreCode::LEASE_EXPIRED, error: None });
            }
            Ok(found) => {
                let kind =
                    if found < read.len as u64 { ErrorKind::ShortRead } else { ErrorKind::Corrupt };
                fatal.get_or_insert(wrong_length(kind, read, found));
            }
            Err(code @ (StoreCode::TRANSFER_FAIL | StoreCode::LEASE_EXPIRED)) => {
                if code == StoreCode::TRANSFER_FAIL {
                    failed.push(read.key.clone());
                }
                shared.memory.quarantine(region); // the peer may still write it
                if read.is_callers {
                    let error = explain(code).with("key", &read.key).remedy(
                        "fetch again: memory of the caller is not tried twice, because the failed \
                         transfer may still write it",
                    );
                    fatal.get_or_insert(error);
                } else if shared.memory.quarantined_bytes() > shared.config.max_quarantined.get() {
                    let error = Error::new(
                        ErrorKind::CapacityExceeded,
                        "fetch",
                        "too much memory is in quarantine after failed reads",
                    )
                    .with("key", &read.key)
                    .with("code", code)
                    .with("quarantined_bytes", shared.memory.quarantined_bytes())
                    .remedy("find out why reads fail; closing the transport gives the memory back");
                    fatal.get_or_insert(error);
                } else {
                    again.push(Again { index: i, code, error: None });
                }
            }
            Err(StoreCode::INVALID_PARAMS) => {
                fatal.get_or_insert(too_long(shared, read));
            }
            Err(code) if code.error("fetch").is_temporary() => {
                read.region = Some(region);
                again.push(Again { index: i, code, error: None });
            }
            Err(code) => {
                fatal.get_or_insert(code.error("fetch").with("key", &read.key));
            }
        }
    }
    if !failed.is_empty() {
        // No second wait for an owner that is gone.
        let keys: Vec<&str> = failed.iter().map(AsRef::as_ref).collect();
        shared.segments.suspect(&keys);
        shared.segments.check(&keys)?;
    }
    fatal.map_or(Ok(()), Err)
}

/// Takes memory for a read.
fn take(shared: &Shared, flight: &Flight, read: &Read) -> Result<RegionMut> {
    shared.memory.take(read.wanted(), flight).map_err(|e| no_memory(shared, read, e))
}

/// Memory is short: perhaps only because the descriptor asks for more than there is.
fn no_memory(shared: &Shared, read: &Read, error: Error) -> Error {
    match shared.api.size(&read.key) {
        Ok(Ok(found)) if found < read.len as u64 => wrong_length(ErrorKind::ShortRead, read, found),
        _ => error.with("key", &read.key),
    }
}

fn wrong_length(kind: ErrorKind, read: &Read, found: u64) -> Error {
    Error::new(kind, "fetch", "the object has another length than described")
        .with("key", &read.key)
        .with("expected", read.len)
        .with("found", found)
}

/// Finds out why the store refused a read: mostly because the object is longer than described.
fn too_long(shared: &Shared, read: &Read) -> Error {
    match shared.api.size(&read.key) {
        Ok(Ok(found)) if found != read.len as u64 => wrong_length(ErrorKind::Corrupt, read, found),
        _ => StoreCode::INVALID_PARAMS.error("fetch").with("key", &read.key),
    }
}
