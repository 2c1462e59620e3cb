//! What a capture server fills its samples with.

use control_proto::capture::{Checksum, ChecksumKind, Mixsum, Prompt};
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

    /// Fills tensor `index` of the plan into `out`; returns its checksum of the kind that is `wanted`.
    pub fn fill(
        &self,
        prompt: &Prompt,
        index: usize,
        out: &mut [u8],
        wanted: Option<ChecksumKind>,
    ) -> Result<Option<Checksum>> {
        match (self.made(prompt, index), wanted) {
            (Some(stream), Some(kind)) => return Ok(Some(stream.write_hashed(out, kind))),
            (Some(stream), None) => stream.write(0, out),
            (None, kind) => {
                self.read(prompt, index, out)?;
                if kind == Some(ChecksumKind::Mixsum) {
                    self.check(prompt, index, out)?;
                }
            }
        }
        Ok(wanted.map(|kind| checksum(kind, out)))
    }

    /// What tensor `index` of the plan is made by; none if its bytes are given.
    pub fn made(&self, prompt: &Prompt, index: usize) -> Option<Stream> {
        let Self::Synthetic { seed, .. } = self else { return None };
        let name = captured(prompt, index)?;
        Some(Stream::new(*seed, &prompt.sample.sample.sample_id, name))
    }

    /// Reads tensor `index` of the plan, whose bytes are given, into `out`.
    pub fn read(&self, prompt: &Prompt, index: usize, out: &mut [u8]) -> Result<()> {
        let request = &prompt.sample;
        match (captured(prompt, index), self) {
            (None, _) => {
                let before = request.names().count() - request.passthrough.len();
                request.passthrough[index - before].write_le(out);
                Ok(())
            }
            (Some(name), Self::Folder(folder)) => {
                folder.sample(request.sample.sample_id.as_str())?.read(name, out)
            }
            (Some(_), Self::Synthetic { .. }) => unreachable!("it is made, not given"),
        }
    }

    /// Compares the bytes of tensor `index` of the plan with a manifest, if there is one. Those for
    /// who compares on a device: there nobody can, and such a one asks for the checksum that devices
    /// make.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] for other bytes than are listed.
    pub fn check(&self, prompt: &Prompt, index: usize, bytes: &[u8]) -> Result<()> {
        let (Self::Folder(folder), Some(name)) = (self, captured(prompt, index)) else {
            return Ok(()); // what the request gives is known to who sends it
        };
        let request = &prompt.sample.sample;
        let checked = folder.sample(request.sample_id.as_str())?.check(name, bytes);
        checked.map_err(|e| e.with("key", request.object(name)))
    }
}

/// The checksum of bytes of the host.
pub fn checksum(kind: ChecksumKind, bytes: &[u8]) -> Checksum {
    let value = match kind {
        ChecksumKind::Xxh3 => xxh3_64(bytes),
        ChecksumKind::Mixsum => Mixsum::of(bytes),
    };
    Checksum::new(kind, value)
}

/// The name of tensor `index` of the plan, if the model makes it rather than the request.
fn captured(prompt: &Prompt, index: usize) -> Option<&FeatureName> {
    let request = &prompt.sample;
    request.aux.iter().chain(&request.last_hidden).nth(index)
}
