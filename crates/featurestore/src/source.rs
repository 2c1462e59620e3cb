//! What a capture server fills its samples with.

use control_proto::capture::{Checksum, Prompt};
use transport_core::{Error, ErrorKind, FeatureName, Result, TensorMeta};
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    input::Folder,
    workload::{Model, Stream},
};

/// Where captured tensors come from.
#[derive(Debug)]
pub enum Source {
    /// Deterministic synthetic hidden states.
    Synthetic {
        /// Widths and layers.
        model: Model,
        /// Seed of the content.
        seed: u64,
    },
    /// Files of a folder: the sample id ends in the file's name.
    Folder(Folder),
}

impl Source {
    /// Layers that the hidden states come from, if they are known.
    pub fn aux_layer_ids(&self) -> Option<Vec<i64>> {
        match self {
            Self::Synthetic { model, .. } => Some(model.taps.clone()),
            Self::Folder(_) => None,
        }
    }

    /// Tensors of the sample that `prompt` asks for, in the order in which they are stored.
    ///
    /// Refuses tensors whose second dimension is not the prompt's length.
    pub fn plan(&self, prompt: &Prompt) -> Result<Vec<(FeatureName, TensorMeta)>> {
        let request = &prompt.sample;
        let tokens = prompt.input_ids.len() as u64;
        let mut tensors = Vec::new();
        for (name, last) in request
            .aux
            .iter()
            .map(|n| (n, false))
            .chain(request.last_hidden.iter().map(|n| (n, true)))
        {
            let meta = match self {
                Self::Synthetic { model, .. } if last => model.last_hidden_meta(tokens)?,
                Self::Synthetic { model, .. } => model.aux_meta(tokens)?,
                Self::Folder(folder) => {
                    folder.sample(request.sample.sample_id.as_str())?.meta(name)?.clone()
                }
            };
            tensors.push((name.clone(), meta));
        }
        for tensor in &request.passthrough {
            tensors.push((tensor.name().clone(), tensor.meta().clone()));
        }
        for (name, meta) in &tensors {
            if meta.shape().get(1).is_some_and(|&rows| rows != tokens) {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    "capture",
                    "a tensor is not as long as its prompt",
                )
                .with("key", request.sample.object(name))
                .with("expected", tokens)
                .with("found", meta));
            }
        }
        Ok(tensors)
    }

    /// Fills tensor `index` of the plan into `out`; returns its checksum if `hashed`.
    pub fn fill(
        &self,
        prompt: &Prompt,
        index: usize,
        out: &mut [u8],
        hashed: bool,
    ) -> Result<Option<Checksum>> {
        let request = &prompt.sample;
        let captured =
            usize::from(request.aux.is_some()) + usize::from(request.last_hidden.is_some());
        if let Some(carried) = index.checked_sub(captured) {
            request.passthrough[carried].write_le(out);
        } else {
            let name = request.names().nth(index).expect("an index of the plan");
            let sample = &request.sample.sample_id;
            match self {
                Self::Synthetic { seed, .. } => {
                    let stream = Stream::new(*seed, sample, name);
                    if hashed {
                        return Ok(Some(Checksum(stream.write_hashed(out))));
                    }
                    stream.write(0, out);
                }
                Self::Folder(folder) => folder.sample(sample.as_str())?.read(name, out)?,
            }
        }
        Ok(hashed.then(|| Checksum(xxh3_64(out))))
    }
}
