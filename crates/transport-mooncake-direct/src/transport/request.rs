//! What a fetch is asked for, checked before any byte moves.

use std::{ops::Range, sync::Arc};

use capture_arena::RegionPool;
use smallvec::SmallVec;
use transport_core::{
    ArenaLocation, Descriptor, Destination, Error, ErrorKind, FeatureDescriptor, FeatureName,
    FetchRequest, Location, ObjectKey, RegionMut, RemoteAddr, Result, TensorMeta,
};

use super::reach::Reach;

/// One sample to read, checked.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) descriptor: Arc<Descriptor>,
    pub(super) tensors: Vec<WantedTensor>,
    /// Tensors are read where they are.
    pub(super) view: bool,
    /// Tensors go to slots of the pool.
    #[cfg(feature = "cuda")]
    pooled: bool,
}

/// One tensor to read.
#[derive(Debug)]
pub(super) struct WantedTensor {
    /// Which of the descriptor's it is.
    feature: usize,
    pub(super) address: RemoteAddr,
    /// What is read of it, if not all.
    pub(super) part: Option<Box<PartOf>>,
    /// Where it goes; none for a view.
    pub(super) region: Option<RegionMut>,
}

/// Some bytes of a tensor.
#[derive(Debug)]
pub(super) struct PartOf {
    /// Checked to lie in the tensor.
    pub(super) ranges: Vec<Range<u64>>,
    /// All of them, one after the other.
    meta: TensorMeta,
}

impl WantedTensor {
    /// How many operations read it.
    pub(super) fn ops(&self) -> usize {
        self.part.as_ref().map_or(1, |part| part.ranges.len())
    }
}

impl Wanted {
    /// Checks a request; whatever can be seen without asking anybody.
    pub(super) fn check(
        request: FetchRequest,
        (views, ranges): (bool, bool),
        reach: Reach,
        pool: Option<&RegionPool>,
    ) -> Result<Self> {
        let part = request.ranged(ranges)?;
        let FetchRequest { descriptor, names, ranges, destination, .. } = request;
        arena_of(&descriptor)?;
        if views {
            check_lives("fetch", &descriptor)?;
        }
        let mut wanted = Self {
            tensors: Vec::with_capacity(names.as_ref().map_or(descriptor.features.len(), Vec::len)),
            view: matches!(destination, Destination::View),
            #[cfg(feature = "cuda")]
            pooled: matches!(destination, Destination::Pool),
            descriptor,
        };
        match names {
            None => {
                for feature in 0..wanted.descriptor.features.len() {
                    wanted.add(feature)?;
                }
            }
            Some(names) => {
                for (i, name) in names.iter().enumerate() {
                    let invalid = |kind, why| {
                        let key = wanted.descriptor.sample.object(name);
                        Error::new(kind, "fetch", why).with("key", key)
                    };
                    let feature =
                        wanted.descriptor.features.get_index_of(name).ok_or_else(|| {
                            invalid(ErrorKind::NotFound, "the sample has no such tensor")
                        })?;
                    if names[..i].contains(name) {
                        let why = "the tensor is asked for twice";
                        return Err(invalid(ErrorKind::InvalidInput, why));
                    }
                    wanted.add(feature)?;
                }
            }
        }
        if let (Some(ranges), Some(meta), [one]) = (ranges, part, &mut *wanted.tensors) {
            one.part = Some(Box::new(PartOf { ranges, meta }));
        }
        wanted.place(destination, views, reach, pool)?;
        Ok(wanted)
    }

    /// Adds one of the descriptor's tensors.
    fn add(&mut self, feature: usize) -> Result<()> {
        let described = &self.descriptor.features[feature];
        let bytes = described.meta.nbytes();
        let address = match described.address {
            Some(address) => address,
            None if bytes == 0 => RemoteAddr(0),
            None => {
                let (why, key) = ("the tensor has no address", self.key_of(feature));
                return Err(Error::new(ErrorKind::InvalidInput, "fetch", why).with("key", key));
            }
        };
        if address.checked_add(bytes).is_none() {
            return Err(outside(self.key_of(feature), address, bytes, "the address space"));
        }
        self.tensors.push(WantedTensor { feature, address, part: None, region: None });
        Ok(())
    }

    pub(super) fn arena(&self) -> &ArenaLocation {
        arena_of(&self.descriptor).expect("checked at construction")
    }

    pub(super) fn name(&self, tensor: usize) -> &FeatureName {
        self.described(self.tensors[tensor].feature).0
    }

    pub(super) fn meta(&self, tensor: usize) -> &TensorMeta {
        &self.described(self.tensors[tensor].feature).1.meta
    }

    /// Whether each operation fills a slot of the pool, whose padding is its own.
    #[cfg(feature = "cuda")]
    pub(super) fn owns_padding(&self) -> bool {
        self.pooled && self.tensors.iter().all(|tensor| tensor.part.is_none())
    }

    /// What the caller gets.
    pub(super) fn result(&self, tensor: usize) -> &TensorMeta {
        self.tensors[tensor].part.as_ref().map_or_else(|| self.meta(tensor), |part| &part.meta)
    }

    pub(super) fn key(&self, tensor: usize) -> ObjectKey {
        self.key_of(self.tensors[tensor].feature)
    }

    fn key_of(&self, feature: usize) -> ObjectKey {
        self.descriptor.sample.object(self.described(feature).0)
    }

    fn described(&self, feature: usize) -> (&FeatureName, &FeatureDescriptor) {
        self.descriptor.features.get_index(feature).expect("looked up when it was added")
    }

    fn place(
        &mut self,
        destination: Destination,
        views: bool,
        reach: Reach,
        pool: Option<&RegionPool>,
    ) -> Result<()> {
        match destination {
            Destination::View if views => Ok(()),
            Destination::View => {
                Err(Error::new(ErrorKind::Unsupported, "fetch", "this engine gives no views")
                    .with("sample", &self.descriptor.sample)
                    .remedy("fetch into the pool or into own regions, or use the shm engine"))
            }
            Destination::Pool => {
                let pool = pool.ok_or_else(|| {
                    Error::new(ErrorKind::Unsupported, "fetch", "the transport has no receive pool")
                        .remedy("give the transport a pool, or fetch into own regions")
                })?;
                let mut regions = SmallVec::<[RegionMut; 4]>::new();
                // Where a length is no address space's, neither is it the pool's.
                let lens = (0..self.tensors.len())
                    .map(|i| usize::try_from(self.result(i).nbytes()).unwrap_or(usize::MAX));
                // Names the pool's size as what was found: the tensor cannot be that large.
                pool.take_all(lens, |region| regions.push(region)).map_err(|(i, e)| {
                    let (bytes, capacity) = (self.result(i).nbytes(), pool.stats().capacity);
                    let error = match bytes > capacity {
                        true => too_large(self.key(i), bytes).source(e),
                        false => e.with("key", self.key(i)),
                    };
                    error.with("found", format_args!("a pool of {capacity} bytes"))
                })?;
                for (tensor, region) in self.tensors.iter_mut().zip(regions) {
                    tensor.region = Some(region);
                }
                Ok(())
            }
            Destination::Into(regions) => {
                if regions.len() != self.tensors.len() {
                    return Err(Error::new(
                        ErrorKind::InvalidInput,
                        "fetch",
                        "not one region for each tensor",
                    )
                    .with("sample", &self.descriptor.sample)
                    .with("expected", self.tensors.len())
                    .with("found", regions.len()));
                }
                for (i, region) in regions.into_iter().enumerate() {
                    let expected = self.result(i).nbytes();
                    if !region.is_empty() {
                        reach.check(region.kind()).map_err(|e| e.with("key", self.key(i)))?;
                    }
                    if region.len() as u64 != expected {
                        return Err(Error::new(
                            ErrorKind::InvalidInput,
                            "fetch",
                            "the region is not as long as its tensor",
                        )
                        .with("key", self.key(i))
                        .with("expected", expected)
                        .with("found", region.len()));
                    }
                    self.tensors[i].region = Some(region);
                }
                Ok(())
            }
            _ => Err(Error::new(ErrorKind::Unsupported, "fetch", "an unknown destination")),
        }
    }
}

/// Bytes of caller and pool memory that a call may write.
pub(super) fn destination_bytes(requests: &[FetchRequest]) -> u64 {
    let bytes = |request: &FetchRequest| match &request.destination {
        Destination::View => 0,
        Destination::Into(regions) => regions.iter().map(|r| r.len() as u64).sum(),
        _ if request.ranges.is_some() => {
            let ranges = request.ranges.iter().flatten();
            ranges.map(|r| r.end.saturating_sub(r.start)).fold(0, u64::saturating_add)
        }
        _ => match &request.names {
            None => request.descriptor.nbytes(),
            Some(names) => names
                .iter()
                .filter_map(|name| request.descriptor.features.get(name))
                .map(|f| f.meta.nbytes())
                .sum(),
        },
    };
    requests.iter().map(bytes).fold(0, u64::saturating_add)
}

/// Where an arena sample lies.
pub(super) fn arena_of(descriptor: &Descriptor) -> Result<&ArenaLocation> {
    let found = match &descriptor.location {
        Location::Arena(arena) => return Ok(arena),
        Location::Store => "Mooncake Store",
        Location::Token(_) => "buffers behind a token",
        _ => "something unknown",
    };
    Err(Error::new(ErrorKind::Unsupported, "fetch", "the sample does not lie in an arena")
        .with("sample", &descriptor.sample)
        .with("expected", "an arena")
        .with("found", found)
        .remedy("use the transport that the sample was published for"))
}

/// Whether a descriptor says which life of its sample it is about.
pub(super) fn tells_life(descriptor: &Descriptor) -> bool {
    arena_of(descriptor).is_ok_and(|arena| arena.epoch.is_some())
        && descriptor.features.values().all(|feature| feature.seq.is_some())
}

/// Refuses samples that cannot be held for certain: while their memory is looked at, whoever
/// publishes it must know which life is meant.
pub(super) fn check_lives(operation: &'static str, descriptor: &Descriptor) -> Result<()> {
    let unknown = descriptor.features.iter().find(|(_, feature)| feature.seq.is_none());
    let missing = match (arena_of(descriptor)?.epoch, unknown) {
        (None, _) => "epoch",
        (_, Some(_)) => "sequence number",
        _ => return Ok(()),
    };
    let key = match unknown {
        Some((name, _)) => descriptor.sample.object(name).to_string(),
        None => descriptor.sample.to_string(),
    };
    let why = "the descriptor does not say which life of the sample it is about";
    Err(Error::new(ErrorKind::Unsupported, operation, why)
        .with("key", key)
        .with("missing", missing)
        .remedy("older publishers cannot be mapped: use the tcp engine"))
}

pub(super) fn outside(
    key: ObjectKey,
    address: RemoteAddr,
    bytes: u64,
    of: impl std::fmt::Display,
) -> Error {
    Error::new(ErrorKind::OutOfRange, "fetch", "the tensor cannot lie at its address")
        .with("key", key)
        .with("expected", format_args!("{bytes} bytes within {of}"))
        .with("found", format_args!("{:#x}", address.0))
        .remedy("the descriptor is damaged or of another publisher: capture the sample again")
}

fn too_large(key: ObjectKey, bytes: u64) -> Error {
    Error::new(ErrorKind::OutOfRange, "fetch", "the tensor is larger than the receive pool")
        .with("key", key)
        .with("expected", format_args!("{bytes} bytes"))
        .remedy("give the transport a larger pool, or check the descriptor")
}
