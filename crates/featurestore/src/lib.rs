//! featurestore
#![forbid(unsafe_code)]
pub mod config;
pub mod input;
pub mod workload;
