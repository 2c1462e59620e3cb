//! Mooncake's structured objects: JSON manifests and metadata over plain payload objects.
//!
//! An object is stored under several keys below `<prefix>/<partition>/<id>/`: payloads under
//! `buffer/<member>`, perhaps cut into `/chunk/<n>`, their description under `meta`, and last the
//! `manifest`, whose presence means that the rest is complete. What the columns of a rollout are
//! made of is not in the store: it travels in the [`Reference`] that a producer hands to its
//! consumers.
//!
//! The layout is that of `mooncake.structured_object_store` 0.3.13 and 0.3.14. It has no checksums
//! and no alignment; everything that is read is bounds-checked here.

mod codec;
mod dump;
mod encode;
mod jagged;
mod manifest;
mod member;
mod reader;
mod reference;
mod store;
mod tensor;
mod writer;

pub(crate) use member::SPECS;

pub use dump::Dump;
pub use manifest::{Chunk, Manifest, Payload};
pub use member::{Member, MemberData};
pub use reader::{Limits, Members, Reader};
pub use reference::{Encoded, FieldLocation, Reference};
pub use store::{MemoryStore, ObjectStore};
pub use writer::{DEFAULT_CHUNK_BYTES, Place, Writer, cleanup, remove};
