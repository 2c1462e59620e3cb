//! Which tensors each training strategy needs, and what they must look like.

use std::{fmt, str::FromStr};

use control_proto::capture::{Passthrough, SampleRequest};
use transport_core::{
    Descriptor, Dtype, Error, ErrorKind, FeatureName, Result, SampleKey, TensorMeta,
};

/// A way to train a draft model.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    serde::Serialize,
    serde::Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Strategy {
    /// Three layers beside the last hidden state, which is the target.
    Eagle3,
    /// As EAGLE3, several tokens at a time.
    Peagle,
    /// Some layers; no target.
    Dflash,
    /// As DFlash.
    Domino,
    /// Some layers beside the last hidden state.
    Dspark,
}

impl Strategy {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Eagle3, Self::Peagle, Self::Dflash, Self::Domino, Self::Dspark];

    /// Its name in refs and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Eagle3 => "eagle3",
            Self::Peagle => "peagle",
            Self::Dflash => "dflash",
            Self::Domino => "domino",
            Self::Dspark => "dspark",
        }
    }

    /// How a capture server calls the way it captures.
    pub const fn capture_method(self) -> &'static str {
        match self {
            Self::Eagle3 | Self::Peagle => "eagle3",
            Self::Dflash | Self::Domino => "dflash",
            Self::Dspark => "dspark",
        }
    }

    const fn eagle(self) -> bool {
        matches!(self, Self::Eagle3 | Self::Peagle)
    }

    /// Name of the concatenated layers.
    pub const fn aux(self) -> &'static str {
        if self.eagle() { "hidden_state" } else { "hidden_states" }
    }

    /// Name of the last hidden state, if it is captured.
    pub const fn last_hidden(self) -> Option<&'static str> {
        match self {
            Self::Eagle3 | Self::Peagle => Some("target"),
            Self::Dspark => Some("target_last_hidden_states"),
            Self::Dflash | Self::Domino => None,
        }
    }

    /// Names of the tensors that travel with the request.
    pub const fn passthrough(self) -> &'static [&'static str] {
        if self.eagle() {
            &["input_ids", "loss_mask", "attention_mask"]
        } else {
            &["input_ids", "loss_mask"]
        }
    }

    /// Least supervised tokens in a row.
    const fn supervised(self) -> usize {
        if self.eagle() { 1 } else { 2 }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Strategy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let folded = text.trim().to_ascii_lowercase().replace(['-', '_'], "");
        Self::ALL.into_iter().find(|strategy| strategy.name() == folded).ok_or_else(|| {
            Error::new(ErrorKind::ConfigInvalid, "read strategy", "unknown strategy")
                .with("found", format_args!("{text:?}"))
                .remedy(format!("use one of {}", Self::ALL.map(Self::name).join(", ")))
        })
    }
}

/// What samples of one run look like.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Layout {
    /// The way that is trained.
    pub strategy: Strategy,
    /// Width of one layer's hidden state; 0 if it is not known.
    pub hidden: u64,
    /// Layers that are captured, in order; none if they are not known.
    pub layers: Vec<i64>,
    /// Element type of hidden states. Default: bfloat16.
    pub dtype: Dtype,
}

impl Layout {
    /// Refuses layers that the strategy cannot use.
    pub fn new(strategy: Strategy, hidden: u64, layers: Vec<i64>) -> Result<Self> {
        let refuse = |why: &'static str| {
            Error::new(ErrorKind::ConfigInvalid, "describe layout", why)
                .with("strategy", strategy)
                .with("layers", format_args!("{layers:?}"))
        };
        if hidden == 0 {
            return Err(refuse("the width of a hidden state is zero"));
        }
        if layers.is_empty() || (strategy.eagle() && layers.len() != 3) {
            return Err(refuse("the number of layers does not fit the strategy")
                .remedy("EAGLE3 and P-EAGLE take exactly 3 layers, the others at least one"));
        }
        let mut sorted = layers.clone();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() != layers.len() || layers.iter().any(|&layer| layer < 0) {
            return Err(refuse("a layer is negative or named twice"));
        }
        Ok(Self { strategy, hidden, layers, dtype: Dtype::Bfloat16 })
    }

    /// Only the tensors' names and lengths: for samples that are moved and not trained on.
    pub fn names_of(strategy: Strategy) -> Self {
        Self { strategy, hidden: 0, layers: Vec::new(), dtype: Dtype::Bfloat16 }
    }

    /// EAGLE3's usual layers of a model with `layers` layers.
    pub fn eagle_layers(layers: i64) -> Vec<i64> {
        vec![1, layers / 2 - 1, layers - 4]
    }

    /// What to capture of a prompt.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a prompt without tokens, a mask of another length or with
    /// other numbers than 0 and 1, or too little to supervise, unless only names are known. A mask
    /// is never made up.
    pub fn request(
        &self,
        sample: SampleKey,
        input_ids: &[i64],
        loss_mask: &[i64],
    ) -> Result<SampleRequest> {
        let refuse = |why: &'static str| {
            Error::new(ErrorKind::InvalidInput, "check prompt", why)
                .with("sample_id", &sample.sample_id)
                .with("tokens", input_ids.len())
                .with("mask", loss_mask.len())
        };
        if input_ids.is_empty() {
            return Err(refuse("the prompt has no tokens"));
        }
        if loss_mask.len() != input_ids.len() {
            return Err(refuse("the loss mask is missing or has another length than the prompt")
                .remedy("give a mask for every prompt; it is never assumed to be all ones"));
        }
        if loss_mask.iter().any(|mark| !(0..=1).contains(mark)) {
            return Err(refuse("the loss mask holds other numbers than 0 and 1"));
        }
        let most = loss_mask.split(|&mark| mark == 0).map(<[i64]>::len).max().unwrap_or(0);
        if most < self.strategy.supervised() && self.hidden > 0 {
            return Err(refuse("too few supervised tokens in a row")
                .with("expected", self.strategy.supervised())
                .with("found", most));
        }
        let mut request = SampleRequest::new(sample.clone());
        request.aux = Some(FeatureName::new(self.strategy.aux())?);
        request.last_hidden = self.strategy.last_hidden().map(FeatureName::new).transpose()?;
        let meta = TensorMeta::new(Dtype::Int64, [1, input_ids.len() as u64])?;
        for &name in self.strategy.passthrough() {
            let data = match name {
                "input_ids" => input_ids.to_vec(),
                "loss_mask" => loss_mask.to_vec(),
                _ => vec![1; input_ids.len()],
            };
            let name = FeatureName::new(name)?;
            request.passthrough.push(Passthrough::new(name, meta.clone(), data)?);
        }
        Ok(request)
    }

    /// Checks that a captured sample is what the strategy trains on: names, widths, lengths,
    /// element types and layers. Says exactly what differs.
    pub fn check(&self, sample: &Descriptor) -> Result<u64> {
        let wrong = |why: &'static str| {
            Error::new(ErrorKind::Corrupt, "check sample", why)
                .with("key", &sample.sample)
                .with("strategy", self.strategy)
        };
        let mut expected: Vec<&str> = vec![self.strategy.aux()];
        expected.extend(self.strategy.last_hidden());
        expected.extend(self.strategy.passthrough());
        let found: Vec<&str> = sample.features.keys().map(FeatureName::as_str).collect();
        let named = |names: &[&str]| names.join(", ");
        if found.len() != expected.len() || expected.iter().any(|name| !found.contains(name)) {
            return Err(wrong("the tensors are others than the strategy trains on")
                .with("expected", named(&expected))
                .with("found", named(&found)));
        }
        match &sample.aux_layer_ids {
            _ if self.hidden == 0 => {}
            Some(layers) if *layers == self.layers => {}
            Some(layers) => {
                return Err(wrong("the hidden states come from other layers")
                    .with("expected", format_args!("{:?}", self.layers))
                    .with("found", format_args!("{layers:?}")));
            }
            None => {
                return Err(wrong("the server does not say which layers it has captured")
                    .with("expected", format_args!("{:?}", self.layers))
                    .remedy("use a capture server that reports aux_layer_ids"));
            }
        }
        let ids = &sample.features["input_ids"].meta;
        let [1, tokens] = *ids.shape() else {
            return Err(wrong("input_ids is not one row").with("found", ids));
        };
        if self.hidden == 0 {
            return Ok(tokens); // the lengths were compared with the request's
        }
        let width = self.hidden.saturating_mul(self.layers.len() as u64);
        for name in expected {
            let meta = if name == self.strategy.aux() {
                TensorMeta::new(self.dtype, [1, tokens, width])?
            } else if Some(name) == self.strategy.last_hidden() {
                TensorMeta::new(self.dtype, [1, tokens, self.hidden])?
            } else {
                TensorMeta::new(Dtype::Int64, [1, tokens])?
            };
            let found = &sample.features[name].meta;
            if *found != meta {
                return Err(wrong("a tensor has another type, width or length")
                    .with("tensor", name)
                    .with("expected", meta)
                    .with("found", found));
            }
        }
        Ok(tokens)
    }

    /// Bytes of one sample of `tokens` tokens, as far as they are known.
    pub fn bytes(&self, tokens: u64) -> u64 {
        let last = u64::from(self.strategy.last_hidden().is_some());
        let width = (self.layers.len() as u64 + last).saturating_mul(self.hidden);
        let ids = 8 * self.strategy.passthrough().len() as u64;
        width.saturating_mul(self.dtype.size()).saturating_add(ids).saturating_mul(tokens)
    }
}

#[cfg(test)]
mod tests {
    use indexmap::IndexMap;
    use transport_core::{FeatureDescriptor, Generation, Location, SampleId, StoreId};

    use super::*;

    fn key() -> SampleKey {
        SampleKey::new(StoreId::new("run").unwrap(), SampleId::new("a").unwrap(), Generation(1))
    }

    fn layout(strategy: Strategy) -> Layout {
        Layout::new(strategy, 8, vec![1, 3, 5]).unwrap()
    }

    fn captured(layout: &Layout, tokens: u64) -> Descriptor {
        let s = layout.strategy;
        let mut shapes = vec![(s.aux(), Dtype::Bfloat16, vec![1, tokens, 24])];
        shapes.extend(s.last_hidden().map(|n| (n, Dtype::Bfloat16, vec![1, tokens, 8])));
        shapes.extend(s.passthrough().iter().map(|&n| (n, Dtype::Int64, vec![1, tokens])));
        describe(shapes, Some(layout.layers.clone()))
    }

    fn describe(shapes: Vec<(&str, Dtype, Vec<u64>)>, layers: Option<Vec<i64>>) -> Descriptor {
        let feature = |(name, dtype, shape): (&str, Dtype, Vec<u64>)| {
            let meta = TensorMeta::new(dtype, shape).unwrap();
            (FeatureName::new(name).unwrap(), FeatureDescriptor::new(meta, None, None))
        };
        let features: IndexMap<_, _> = shapes.into_iter().map(feature).collect();
        Descriptor::new(key(), features, layers, Location::Store).unwrap()
    }

    #[test]
    fn every_strategy_takes_its_own_layout_and_no_other() {
        for strategy in Strategy::ALL {
            let own = layout(strategy);
            let sample = captured(&own, 7);
            assert_eq!(own.check(&sample).unwrap(), 7);
            assert_eq!(sample.nbytes(), own.bytes(7));
            for other in Strategy::ALL {
                let same =
                    (other.aux(), other.last_hidden()) == (strategy.aux(), strategy.last_hidden());
                assert_eq!(layout(other).check(&sample).is_ok(), same, "{strategy} as {other}");
            }
            let request = own.request(key(), &[1, 2, 3], &[0, 1, 1]).unwrap();
            let names: Vec<_> = request.names().map(FeatureName::as_str).collect();
            assert_eq!(names.len(), sample.features.len());
            assert_eq!(strategy.to_string().to_uppercase().parse::<Strategy>().unwrap(), strategy);
        }
        assert_eq!(
            Layout::new(Strategy::Dspark, 5120, vec![5, 19, 33, 47, 61]).unwrap().bytes(1),
            61_456
        );
        assert_eq!("P-EAGLE".parse::<Strategy>().unwrap(), Strategy::Peagle);
        assert!("eagle2".parse::<Strategy>().unwrap_err().to_string().contains("dspark"));
    }

    #[test]
    fn d7_what_differs_is_named() {
        let layout = layout(Strategy::Dspark);
        let good = captured(&layout, 4);
        let change = |name: &str, dtype, shape: Vec<u64>| {
            let mut sample = good.clone();
            let meta = TensorMeta::new(dtype, shape).unwrap();
            let name = FeatureName::new(name).unwrap();
            sample.features[&name] = FeatureDescriptor::new(meta, None, None);
            sample
        };
        let mut other_layers = good.clone();
        other_layers.aux_layer_ids = Some(vec![1, 3, 6]);
        let mut no_layers = good.clone();
        no_layers.aux_layer_ids = None;
        let mut fewer = good.clone();
        fewer.features.shift_remove("loss_mask");
        for (sample, part) in [
            (change("hidden_states", Dtype::Bfloat16, vec![1, 4, 16]), "tensor=hidden_states"),
            (change("hidden_states", Dtype::Float16, vec![1, 4, 24]), "float16"),
            (change("target_last_hidden_states", Dtype::Bfloat16, vec![1, 3, 8]), "[1, 3, 8]"),
            (change("loss_mask", Dtype::Int64, vec![1, 5]), "tensor=loss_mask"),
            (change("input_ids", Dtype::Int64, vec![4]), "not one row"),
            (other_layers, "[1, 3, 6]"),
            (no_layers, "does not say which layers"),
            (fewer, "others than the strategy"),
        ] {
            let error = layout.check(&sample).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
            assert!(!error.is_temporary());
        }
    }

    #[test]
    fn masks_are_never_made_up() {
        let dspark = layout(Strategy::Dspark);
        for (ids, mask, part) in [
            (vec![], vec![], "no tokens"),
            (vec![1, 2], vec![], "missing"),
            (vec![1, 2], vec![1], "another length"),
            (vec![1, 2], vec![1, 2], "other numbers"),
            (vec![1, 2, 3], vec![1, 0, 1], "too few supervised"),
        ] {
            let error = dspark.request(key(), &ids, &mask).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
        let eagle = layout(Strategy::Eagle3);
        assert!(eagle.request(key(), &[1, 2, 3], &[0, 1, 0]).is_ok(), "one is enough for EAGLE");
        assert!(eagle.request(key(), &[1, 2, 3], &[0, 0, 0]).is_err());
        assert!(Layout::new(Strategy::Eagle3, 8, vec![1, 2]).is_err());
        assert!(Layout::new(Strategy::Dflash, 8, vec![1, 1]).is_err());
        assert_eq!(Layout::eagle_layers(36), [1, 17, 32]);
    }
}
