//! featurestore
#![forbid(unsafe_code)]
pub mod input;
pub mod workload;
