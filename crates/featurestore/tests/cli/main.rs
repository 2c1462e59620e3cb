//! The command line as people and other processes use it: every test starts the real binary.
//!
//! Whatever a test starts is owned by a guard that ends it, and every wait has a bound.

mod common;
mod config;
mod doctor;
mod faults;
mod pipeline;
mod rollout;
mod server;
mod signals;
