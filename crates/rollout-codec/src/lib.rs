//! Rollout dicts as typed columns, laid out in memory without pickling.
//!
//! A [`Rollout`] is an ordered map from name to [`Column`]: ragged, dense or scalar numbers, text,
//! bytes, JSON and MessagePack objects, dicts of tensors, pictures, and nested structures. It is
//! written in one of two layouts:
//!
//! - [`native`]: one small header and one data buffer of aligned segments, gathered once, straight
//!   into the memory that a transport sends, and read back as views;
//! - [`mooncake`]: the objects that `mooncake.structured_object_store` writes, byte for byte.
//!
//! Nothing is ever pickled, rounded, narrowed or dropped unless the [`Schema`] says so.
#![forbid(unsafe_code)]

#[cfg(feature = "arrow")]
mod arrow;
mod column;
pub mod commands;
mod contract;
mod element;
mod frameworks;
pub mod fuzzing;
mod infer;
pub mod json;
pub mod mooncake;
pub mod msgpack;
pub mod native;
mod nested;
pub mod notation;
pub mod payload;
mod ragged;
mod restore;
mod rollout;
mod rows;
mod schema;
#[cfg(feature = "transport")]
pub mod transport;
mod value;

pub use column::{
    BlobKind, Blobs, Column, Dense, MediaItem, MediaList, Piece, Pixels, Scalars, TensorDict,
};
pub use element::Rounding;
pub use nested::{Branch, MAX_TREE_DEPTH, Nested, Presence};
pub use ragged::{Element, Ragged, RowKind, Template};
pub use rollout::{Rollout, Section};
pub use schema::{Codec, FieldSchema, RowShape, Schema};
pub use value::{Array, Image, Library, Value};
