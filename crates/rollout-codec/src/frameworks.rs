//! Schemas of the rollout dicts of reinforcement-learning frameworks.

use transport_core::Dtype;

use crate::{Codec, FieldSchema, RowShape, Schema};

fn tokens(dtype: Dtype) -> FieldSchema {
    FieldSchema::new(Codec::RaggedTensor).dtype(dtype).shape(RowShape::Ragged(0))
}

fn numbers(dtype: Dtype) -> FieldSchema {
    FieldSchema::new(Codec::Ndarray).dtype(dtype)
}

impl Schema {
    /// What slime's rollout side puts for one data-parallel rank.
    ///
    /// | fields | rows |
    /// |---|---|
    /// | `tokens` | int64 `[total]`, a torch tensor each |
    /// | `loss_masks`, `rollout_top_p_token_ids`, `rollout_top_p_token_offsets` | int32, ragged |
    /// | `rollout_log_probs`, `teacher_log_probs` | float32 `[response]` |
    /// | `rollout_routed_experts` | any whole numbers, `[total - 1, layers, top-k]` |
    /// | `partition`, `response_lengths`, `truncated`, `round_number`, `rollout_ids` | int64 |
    /// | `sample_indices` | int64 or null |
    /// | `rewards` | floats as float64; dicts and mixed numbers as MessagePack |
    /// | `rollout_mask_sums` | one float32 tensor over all rows |
    /// | `source_names` | text |
    /// | `prompt`, `multimodal_train_inputs` | whatever the rows are |
    /// | `metadata` | MessagePack |
    /// | `raw_reward`, `total_lengths`, `global_batch_sizes`, `num_microbatches`, `micro_batch_indices` | not row by row: meta |
    pub fn slime() -> Self {
        let auto = || FieldSchema::new(Codec::Auto).nullable();
        let mut schema = Self::new()
            .field("tokens", tokens(Dtype::Int64))
            .field("loss_masks", tokens(Dtype::Int32))
            .field("rollout_log_probs", tokens(Dtype::Float32))
            .field("rollout_top_p_token_ids", tokens(Dtype::Int32))
            .field("rollout_top_p_token_offsets", tokens(Dtype::Int32))
            .field("teacher_log_probs", tokens(Dtype::Float32))
            .field(
                "rollout_routed_experts",
                FieldSchema::new(Codec::RaggedTensor).shape(RowShape::Ragged(0)),
            )
            .field("sample_indices", numbers(Dtype::Int64).nullable())
            .field("rewards", auto())
            .field("rollout_mask_sums", FieldSchema::new(Codec::Tensor).dtype(Dtype::Float32))
            .field("source_names", FieldSchema::new(Codec::Utf8))
            .field("prompt", auto())
            .field("multimodal_train_inputs", auto())
            .field("metadata", FieldSchema::new(Codec::MessagePack).nullable());
        for name in ["partition", "response_lengths", "truncated", "round_number", "rollout_ids"] {
            schema = schema.field(name, numbers(Dtype::Int64));
        }
        for name in [
            "raw_reward",
            "total_lengths",
            "global_batch_sizes",
            "num_microbatches",
            "micro_batch_indices",
        ] {
            schema = schema.field(name, FieldSchema::meta());
        }
        schema
    }

    /// What miles, a fork of slime, puts: its tokens are int32, and it adds `rollout_indexer_topk`
    /// (int32, ragged), `opd_reverse_kl` (float32, ragged), `weight_versions` (MessagePack) and
    /// `dynamic_global_batch_size` (meta).
    pub fn miles() -> Self {
        Self::slime()
            .field("tokens", tokens(Dtype::Int32))
            .field("rollout_indexer_topk", tokens(Dtype::Int32))
            .field("opd_reverse_kl", tokens(Dtype::Float32))
            .field("weight_versions", FieldSchema::new(Codec::MessagePack).nullable())
            .field("dynamic_global_batch_size", FieldSchema::meta())
    }

    /// What slime's open change for Mooncake declares, for objects that its Python side reads.
    ///
    /// Unlike [`Self::slime`] it rounds `rewards` to float32, allows no null in `sample_indices`
    /// and takes `prompt` as text.
    pub fn slime_mooncake() -> Self {
        Self::slime()
            .field("rewards", numbers(Dtype::Float32).rounded())
            .field("sample_indices", numbers(Dtype::Int64))
            .field("prompt", FieldSchema::new(Codec::Utf8))
            .field("multimodal_train_inputs", FieldSchema::new(Codec::RaggedTensorDict).nullable())
    }
}
