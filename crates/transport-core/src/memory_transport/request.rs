//! Calls as asked for, checked before any byte moves.

use std::{collections::HashSet, sync::Arc};

use crate::{
    Descriptor, Destination, Error, ErrorKind, FeatureName, FetchRequest, Publication, RegionMut,
    RegionSlice, Result,
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
}

/// Where one tensor goes.
pub(super) enum Sink {
    View,
    Pool,
    Region(RegionMut),
}

impl Plan {
    pub(super) fn new(request: FetchRequest) -> Result<Self> {
        let FetchRequest { descriptor, names, destination } = request;
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
        let sinks: Vec<_> = match destination {
            Destination::View => names.iter().map(|_| Sink::View).collect(),
            Destination::Pool => names.iter().map(|_| Sink::Pool).collect(),
            Destination::Into(regions) => {
                if regions.len() != names.len() {
                    return Err(invalid("not one destination per tensor")
                        .with("sample", &descriptor.sample)
                        .with("expected", names.len())
                        .with("found", regions.len()));
                }
                for (name, region) in names.iter().zip(&regions) {
                    let key = descriptor.sample.object(name);
                    let nbytes = descriptor.features[name].meta.nbytes();
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
                regions.into_iter().map(Sink::Region).collect()
            }
        };
        Ok(Self { descriptor, names, sinks })
    }
}

impl Sink {
    pub(super) fn copied_bytes(&self, source: &RegionSlice) -> u64 {
        if matches!(self, Self::View) { 0 } else { source.len() as u64 }
    }

    pub(super) fn fill(self, source: &RegionSlice) -> Result<RegionSlice> {
        let mut region = match self {
            Self::View => return Ok(source.clone()),
            Self::Pool => RegionMut::zeroed(source.len())?,
            Self::Region(region) => region,
        };
        let bytes = source.as_bytes().expect("the store is host memory");
        region.as_mut_bytes().expect("checked to be host memory").copy_from_slice(bytes);
        Ok(region.freeze())
    }
}
