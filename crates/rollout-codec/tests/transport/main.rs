//! Rollouts over transports: what is put comes back, once, and goes.
#![cfg(feature = "transport")]

#[path = "../rollout/any.rs"]
mod any;
mod bad_input;
mod cleanup;
mod failures;
mod handles;
mod parts;
mod sharing;
mod support;
mod sweep;
