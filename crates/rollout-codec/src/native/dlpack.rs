//! Rows and fields for frameworks, by the DLPack convention.
//!
//! Every export keeps the memory where the rollout arrived until the consumer is done with it, says
//! that it is only to be read, and copies nothing: several rows and views may share the memory.

use transport_core::{Dtype, Result, Tensor, TensorMeta, memory::dlpack::Export};

use super::{
    RolloutView,
    ragged_view::{RaggedView, ViewShapes},
};

impl RaggedView {
    /// Row `i` for a framework; `None` for a null row or one that does not exist.
    pub fn row_dlpack(&self, i: usize) -> Option<Export> {
        self.row_tensor(i).map(Export::read_only)
    }

    /// All rows as one array, joined along their first dimension, and as int64 where each begins and
    /// the last one ends in it: what frameworks make jagged tensors of. Null rows have no length.
    ///
    /// `None` where they are no such array: rows that share bytes, that have shapes of their own, or
    /// that vary in another dimension than the first.
    pub fn flat(&self) -> Option<(Tensor, Tensor)> {
        let ViewShapes::Template { template, .. } = &self.shapes else { return None };
        if self.alias.is_some() || !template.before.is_empty() {
            return None;
        }
        let steps = self.offsets.get(self.offsets.len() - 1);
        let values = TensorMeta::new(self.dtype, template.shape(steps)).ok()?;
        // No offset is beyond the length of the data: the bits of u64 are those of i64.
        let offsets = TensorMeta::new(Dtype::Int64, [self.offsets.len() as u64]).ok()?;
        Some((
            Tensor::new(values, self.data.clone()).ok()?,
            Tensor::new(offsets, self.offsets.0.clone()).ok()?,
        ))
    }
}

impl RolloutView {
    /// What [`Self::dense`] gives, for a framework.
    ///
    /// # Errors
    /// As [`Self::dense`].
    pub fn dlpack(&self, name: &str) -> Result<Export> {
        self.dense(name).map(Export::read_only)
    }
}
