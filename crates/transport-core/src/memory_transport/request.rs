//! Calls as asked for, checked before any byte moves.

use std::{collections::HashSet, ops::Range, sync::Arc};

use crate::{
    Descriptor, Destination, Error, ErrorKind, FeatureName, FetchRequest, Publication, RegionMut,
    RegionSlice, Result, TensorMeta,
};

/// Refuses sources that can never be published.
pub(super) fn check_sources(batch: &[Publication]) -> Result<()> {
    for publication in batch {
        if publication.tensors.is_empty() {
            let why = "a sample without tensors cannot be named or released";
            return Err(Error::new(ErrorKind::InvalidInput, "publish", why)
                .with("sample", &publication.sample));
        }
        if let Some(name) = publication.unreachable() {
            let why = "the source is device memory";
            return Err(Error::new(ErrorKind::Unsupported, "publish", why)
                .with("key", publication.sample.object(name)));
        }
        for (name, tensor) in &publication.tensors {
            let key = || publication.sample.object(name);
            if tensor.data.len() as u64 != tensor.meta.nbytes() {
                let why = "the bytes do not fit element type and shape";
                return Err(Error::new(ErrorKind::InvalidInput, "publish", why)
                    .with("key", key())
                    .with("expected", tensor.meta.nbytes())
                    .with("found", tensor.data.len()));
            }
        }
    }
    Ok(())
}

/// A fetch request whose parts fit each other.
pub(super) struct Plan {
    pub(super) descriptor: Arc<Descriptor>,
    pub(super) names: Vec<FeatureName>,
    pub(super) sinks: Vec<Sink>, // one per name
    /// What is read of the one tensor, if not all of it.
    pub(super) part: Option<TensorMeta>,
}

/// Where one tensor goes.
pub(super) struct Sink {
    place: SinkPlace,
    /// Bytes of the tensor that go there, if not all.
    ranges: Option<Vec<Range<u64>>>,
}

enum SinkPlace {
    View,
    Pool,
    Region(RegionMut),
}

impl Plan {
    pub(super) fn new(request: FetchRequest) -> Result<Self> {
        let part = request.ranged(true)?;
        let FetchRequest { descriptor, names, ranges, destination } = request;
        let invalid = |why| Error::new(ErrorKind::InvalidInput, "fetch", why);
        let names = names.unwrap_or_else(|| descriptor.features.keys().cloned().collect());
        let mut seen = HashSet::new();
        for name in &names {
            let key = descriptor.sample.object(name);
            if !descriptor.features.contains_key(name) {
                return Err(invalid("the sample has no tensor of this name").with("key", key));
            }
            if !seen.insert(name) {
                return Err(invalid("the tensor is asked for twice").with("key", key));
            }
        }
        let places: Vec<_> = match destination {
            Destination::View => names.iter().map(|_| SinkPlace::View).collect(),
            Destination::Pool => names.iter().map(|_| SinkPlace::Pool).collect(),
            Destination::Into(regions) => {
                if regions.len() != names.len() {
                    return Err(invalid("not one destination per tensor")
                        .with("sample", &descriptor.sample)
                        .with("expected", names.len())
                        .with("found", regions.len()));
                }
                for (name, region) in names.iter().zip(&regions) {
                    let key = descriptor.sample.object(name);
                    let meta = part.as_ref().unwrap_or(&descriptor.features[name].meta);
                    let nbytes = meta.nbytes();
                    if region.len() as u64 != nbytes {
                        return Err(invalid("the destination is not as long as the tensor")
                            .with("key", key)
                            .with("expected", nbytes)
                            .with("found", region.len()));
                    }
                    if !region.kind().is_host() {
                        let why = "the destination is device memory";
                        return Err(
                            Error::new(ErrorKind::Unsupported, "fetch", why).with("key", key)
                        );
                    }
                }
                regions.into_iter().map(SinkPlace::Region).collect()
            }
        };
        let sink = |place| Sink { place, ranges: ranges.clone() };
        let sinks = places.into_iter().map(sink).collect();
        Ok(Self { descriptor, names, sinks, part })
    }
}

impl Sink {
    pub(super) fn copied_bytes(&self, source: &RegionSlice) -> u64 {
        if matches!(self.place, SinkPlace::View) { 0 } else { self.bytes(source) }
    }

    fn bytes(&self, source: &RegionSlice) -> u64 {
        let all = source.len() as u64;
        self.ranges.as_ref().map_or(all, |ranges| ranges.iter().map(|r| r.end - r.start).sum())
    }

    pub(super) fn fill(self, source: &RegionSlice) -> Result<RegionSlice> {
        let bytes = self.bytes(source) as usize;
        let mut region = match self.place {
            SinkPlace::View => return Ok(source.clone()),
            SinkPlace::Pool => RegionMut::zeroed(bytes)?,
            SinkPlace::Region(region) => region,
        };
        let source = source.as_bytes().expect("the store is host memory");
        let mut to = region.as_mut_bytes().expect("checked to be host memory");
        match self.ranges {
            None => to.copy_from_slice(source),
            Some(ranges) => {
                for range in ranges {
                    let from = &source[range.start as usize..range.end as usize];
                    let (here, rest) = to.split_at_mut(from.len());
                    here.copy_from_slice(from);
                    to = rest;
                }
            }
        }
        Ok(region.freeze())
    }
}
