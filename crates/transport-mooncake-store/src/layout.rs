//! Which objects a sample has, and where each tensor is in them.

use std::sync::Arc;

use indexmap::IndexMap;
use transport_core::{Error, ErrorKind, FeatureName, RegionMut, Result, SampleKey, TensorMeta};

use crate::Layout;

/// Name of the object that small tensors share. Today's features are identifiers, so none is called
/// like this; one that is gets refused in the grouped layout.
const GROUP: &str = "@small";

/// One object of a sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Object {
    pub(crate) key: Arc<str>,
    pub(crate) bytes: u64,
    /// Tensors in it, by their index in the sample, in the order of their bytes.
    pub(crate) tensors: Vec<usize>,
}

/// Where the bytes of one tensor are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Nowhere: there are none.
    Empty,
    /// In one of the sample's objects.
    In { object: usize, offset: u64 },
}

/// The objects of one sample and the places of its tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) objects: Vec<Object>,
    pub(crate) places: Vec<Place>,
}

impl Plan {
    /// Plans a sample. The same on both sides, because it follows from names and shapes alone.
    pub(crate) fn new<'a>(
        layout: Layout,
        sample: &SampleKey,
        tensors: impl Iterator<Item = (&'a FeatureName, &'a TensorMeta)>,
    ) -> Result<Self> {
        let tensors: Vec<_> = tensors.collect();
        let grouped = group(layout, sample, &tensors)?;
        let mut places = vec![Place::Empty; tensors.len()];
        let mut objects = Vec::with_capacity(tensors.len());
        if !grouped.is_empty() {
            let mut bytes = 0;
            for &i in &grouped {
                places[i] = Place::In { object: 0, offset: bytes };
                bytes += tensors[i].1.nbytes(); // below the threshold each, so no overflow
            }
            let key = format!("{sample}/{GROUP}").into();
            objects.push(Object { key, bytes, tensors: grouped });
        }
        for (i, (name, meta)) in tensors.iter().enumerate() {
            if places[i] == Place::Empty && meta.nbytes() > 0 {
                places[i] = Place::In { object: objects.len(), offset: 0 };
                let key = sample.object(name).shared();
                objects.push(Object { key, bytes: meta.nbytes(), tensors: vec![i] });
            }
        }
        Ok(Self { objects, places })
    }

    /// Plans a sample as it is described.
    pub(crate) fn of_descriptor(
        layout: Layout,
        descriptor: &transport_core::Descriptor,
    ) -> Result<Self> {
        let features = descriptor.features.iter().map(|(name, f)| (name, &f.meta));
        Self::new(layout, &descriptor.sample, features)
    }

    /// Plans a sample that is about to be published.
    pub(crate) fn of_tensors(
        layout: Layout,
        sample: &SampleKey,
        tensors: &IndexMap<FeatureName, transport_core::Tensor>,
    ) -> Result<Self> {
        Self::new(layout, sample, tensors.iter().map(|(name, t)| (name, &t.meta)))
    }
}

impl Plan {
    /// Memory for each tensor, of the given lengths, so that those of one object lie end to end.
    pub(crate) fn regions(
        &self,
        lengths: &[u64],
        mut take: impl FnMut(usize) -> Result<RegionMut>,
    ) -> Result<Vec<RegionMut>> {
        let mut regions: Vec<Option<RegionMut>> = Vec::new();
        regions.resize_with(lengths.len(), || None);
        for object in &self.objects {
            let mut rest = take(object.bytes as usize)?;
            for &i in &object.tensors {
                let (own, tail) =
                    rest.split_at(lengths[i] as usize).expect("an object holds its tensors");
                regions[i] = Some(own);
                rest = tail;
            }
        }
        regions.into_iter().map(|r| r.map_or_else(|| RegionMut::zeroed(0), Ok)).collect()
    }
}

/// The tensors that share an object, in the order of their bytes; none, or at least two.
fn group(
    layout: Layout,
    sample: &SampleKey,
    tensors: &[(&FeatureName, &TensorMeta)],
) -> Result<Vec<usize>> {
    let Layout::Grouped { below } = layout else { return Ok(Vec::new()) };
    if tensors.iter().any(|(name, _)| name.as_str() == GROUP) {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            "plan sample",
            "the name is taken by the object that small tensors share",
        )
        .with("key", format_args!("{sample}/{GROUP}"))
        .remedy("rename the tensor, or use one object for each tensor"));
    }
    let small = |&i: &usize| (1..below.get()).contains(&tensors[i].1.nbytes());
    let mut grouped: Vec<_> = (0..tensors.len()).filter(small).collect();
    if grouped.len() < 2 {
        return Ok(Vec::new());
    }
    // Every size is a multiple of its element's, and these are powers of two: in this order each
    // offset is a multiple of its element's size without padding. The sort is stable.
    grouped.sort_by_key(|&i| std::cmp::Reverse(tensors[i].1.dtype().size()));
    Ok(grouped)
}

#[cfg(test)]
mod tests {
    use transport_core::{ByteSize, Dtype, Generation, SampleId, StoreId};

    use super::*;

    fn sample() -> SampleKey {
        let (store, sample) = (StoreId::new("s").unwrap(), SampleId::new("r:t/1").unwrap());
        SampleKey::new(store, sample, Generation(1))
    }

    fn plan(layout: Layout, tensors: &[(&str, Dtype, u64)]) -> Result<Plan> {
        let tensors: Vec<_> = tensors
            .iter()
            .map(|&(name, dtype, n)| {
                (FeatureName::new(name).unwrap(), TensorMeta::new(dtype, [n]).unwrap())
            })
            .collect();
        Plan::new(layout, &sample(), tensors.iter().map(|(n, m)| (n, m)))
    }

    const MIXED: &[(&str, Dtype, u64)] = &[
        ("hidden", Dtype::Bfloat16, 500),
        ("flags", Dtype::Bool, 3),
        ("none", Dtype::Int64, 0),
        ("ids", Dtype::Int64, 5),
        ("mask", Dtype::Int64, 7),
    ];

    #[test]
    fn one_object_for_each_tensor_with_bytes() {
        let plan = plan(Layout::PerTensor, MIXED).unwrap();
        let keys: Vec<_> = plan.objects.iter().map(|o| (&*o.key, o.bytes)).collect();
        assert_eq!(
            keys,
            [
                ("s/r:t/1/g1/hidden", 1000),
                ("s/r:t/1/g1/flags", 3),
                ("s/r:t/1/g1/ids", 40),
                ("s/r:t/1/g1/mask", 56)
            ]
        );
        assert_eq!(plan.places[2], Place::Empty);
        assert_eq!(plan.places[3], Place::In { object: 2, offset: 0 });
    }

    #[test]
    fn small_tensors_share_an_object_and_stay_aligned() {
        let layout = Layout::Grouped { below: ByteSize::new(1000).unwrap() };
        let grouped = plan(layout, MIXED).unwrap();
        let keys: Vec<_> = grouped.objects.iter().map(|o| (&*o.key, o.bytes)).collect();
        assert_eq!(keys, [("s/r:t/1/g1/@small", 99), ("s/r:t/1/g1/hidden", 1000)]);
        assert_eq!(grouped.objects[0].tensors, [3, 4, 1], "widest elements first");
        assert_eq!(
            grouped.places,
            [
                Place::In { object: 1, offset: 0 },
                Place::In { object: 0, offset: 96 },
                Place::Empty,
                Place::In { object: 0, offset: 0 },
                Place::In { object: 0, offset: 40 },
            ]
        );
        let alone = plan(layout, &MIXED[..2]).unwrap();
        assert_eq!(
            alone,
            plan(Layout::PerTensor, &MIXED[..2]).unwrap(),
            "one alone needs no group"
        );
        let taken = plan(layout, &[(GROUP, Dtype::Bool, 1)]).unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::InvalidInput);
        assert!(plan(Layout::PerTensor, &[(GROUP, Dtype::Bool, 1)]).is_ok());
    }
}
