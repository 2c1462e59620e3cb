//! Fetching: which objects a call needs, and what becomes of their bytes.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::{Arc, atomic::Ordering},
};

use indexmap::IndexMap;
use transport_core::{
    Descriptor, Destination, Error, ErrorKind, FeatureName, FetchRequest, Fetched, Location,
    RegionKind, RegionMut, RegionSlice, Result, Tensor, TensorMeta,
};

use crate::{
    device::DeviceMemory,
    landing::Landings,
    layout::{Object, Place, Plan},
    memory::wait_for_room,
    publish::beyond_reach,
    reading::{Read, read_all},
    transport::Shared,
    workers::Flight,
};

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
    landed: Option<RegionMut>,  // on the device
    ranged: Option<TensorMeta>, // what ranges of it are together
}

/// Refuses what can never be fetched, before any byte moves. `ranges` of tensors may be read.
///
/// Destinations lie on the host, or are memory of the kind `device`.
pub(crate) fn check(
    requests: &[FetchRequest],
    ranges: bool,
    device: Option<RegionKind>,
) -> Result<()> {
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
                    if !region.kind().is_host() && Some(region.kind()) != device {
                        return Err(beyond_reach("fetch", device)
                            .with("key", descriptor.sample.object(name))
                            .with("found", format_args!("{:?}", region.kind())));
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
    let requests = receive_on_device(shared, flight, requests)?;
    let mut planned = Planned::default();
    let mut wanted: Vec<_> =
        requests.into_iter().map(|r| plan(shared, r, &mut planned)).collect::<Result<_>>()?;
    let mut landings = land(&mut wanted);
    let mut reads = planned.reads;
    read_all(shared, flight, &mut reads, &mut landings)?;
    for ((request, tensor), region) in landings.finish(flight.deadline())? {
        let part: &mut Part = &mut wanted[request].tensors[tensor];
        shared.ledger.copied_bytes.fetch_add(region.len() as u64, Ordering::Relaxed);
        part.landed = Some(region);
    }
    let bytes = reads.iter().map(|r| r.wanted() as u64).sum();
    shared.ledger.host_bytes.fetch_add(bytes, Ordering::Relaxed);
    Ok(wanted.into_iter().map(|w| assemble(shared, w, &reads)).collect())
}

/// Gives reads into the pool their destinations, where that lies on the device: of the whole call, or
/// none, so that no two calls wait for each other.
fn receive_on_device(
    shared: &Shared,
    flight: &Flight,
    mut requests: Vec<FetchRequest>,
) -> Result<Vec<FetchRequest>> {
    let Some(pool) = shared.memory.device().and_then(DeviceMemory::pool) else {
        return Ok(requests);
    };
    let mut lens = Vec::new();
    for request in &requests {
        if matches!(request.destination, Destination::Pool) {
            let ranged = request.ranged(true)?;
            let tensors = asked(&request.descriptor, &request.names);
            lens.extend(tensors.map(|(_, m)| ranged.as_ref().unwrap_or(m).nbytes() as usize));
        }
    }
    let regions = wait_for_room(flight, || {
        let mut regions = Vec::with_capacity(lens.len());
        let taken = pool.take_all(lens.iter().copied(), |region| regions.push(region));
        taken.map(|()| regions).map_err(|(_, error)| error)
    })?;
    let mut regions = regions.into_iter();
    for request in &mut requests {
        if matches!(request.destination, Destination::Pool) {
            let count = asked(&request.descriptor, &request.names).count();
            request.destination = Destination::Into(regions.by_ref().take(count).collect());
        }
    }
    Ok(requests)
}

/// Takes the destinations on the device out of a plan: their bytes come over the host.
fn land(wanted: &mut [Wanted]) -> Landings {
    let mut landings = Landings::default();
    for (request, wanted) in wanted.iter_mut().enumerate() {
        for (tensor, part) in wanted.tensors.iter_mut().enumerate() {
            let Place::In { object, offset } = part.place else { continue };
            match part.own.take_if(|own| !own.kind().is_host()) {
                Some(own) => landings.expect(object, offset, (request, tensor), own),
                None => landings.keep(object),
            }
        }
    }
    landings
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
                    Some(ranges) => planned.cut(object, offset, ranges, || {
                        own.take_if(|region| region.kind().is_host())
                    }),
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
        tensors.push(Part { index, place, own, landed: None, ranged: ranged.clone() });
    }
    Ok(Wanted { descriptor, tensors })
}

fn assemble(shared: &Shared, wanted: Wanted, reads: &[Read]) -> Fetched {
    let Wanted { descriptor, tensors } = wanted;
    let tensors: IndexMap<_, _> = tensors
        .into_iter()
        .map(|Part { index, place, own, landed, ranged }| {
            let (name, feature) =
                descriptor.features.get_index(index).expect("planned from this descriptor");
            let meta = ranged.unwrap_or_else(|| feature.meta.clone());
            let bytes = match place {
                Place::In { .. } if landed.is_some() => landed.map(RegionMut::freeze),
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
