//! Vocabulary and contract of featurestore: what is moved, by whom, and what must hold.
//!
//! - names and places: [`ObjectKey`], [`SampleKey`], [`SessionName`], [`Epoch`], [`Sequence`];
//! - tensors: [`Dtype`], [`TensorMeta`], [`Tensor`];
//! - memory: [`RegionMut`], [`RegionSlice`];
//! - the contract: [`Transport`], and [`Error`], which says what failed and what to do;
//! - the reference: [`MemoryTransport`];
//! - the proof: [`conformance`], the suite that every transport passes.
#![deny(unsafe_code)] // but for `memory`

mod bytesize;
pub mod conformance;
mod deadline;
mod descriptor;
mod dtype;
mod error;
pub mod layers;
pub mod memory;
pub mod memory_transport;
mod names;
pub mod registry;
mod rng;
mod seldom;
mod session;
mod transport;

pub use bytesize::ByteSize;
pub use descriptor::{ArenaLocation, Descriptor, FeatureDescriptor, Location, TokenLocation};
pub use dtype::{Dtype, TensorMeta};
pub use error::{Error, ErrorKind, ErrorStatus, Result};
pub use memory::{RegionKind, RegionMut, RegionSlice, gather, gather_xxh3};
pub use memory_transport::MemoryTransport;
pub use names::{
    ArenaOffset, ClientId, Epoch, FeatureName, Generation, MAX_KEY_BYTES, MapMark, ObjectKey,
    RemoteAddr, SampleId, SampleKey, Sequence, StoreId,
};
pub use seldom::Seldom;
pub use session::{SessionName, check_host};
pub use transport::{
    Capabilities, DEFAULT_DEADLINE, Destination, FetchOptions, FetchRequest, Fetched, Health,
    Publication, PublishOptions, Ready, ReadyEvent, Release, ReleaseReport, Tensor, Transport,
    TransportInfo, Writer,
};
