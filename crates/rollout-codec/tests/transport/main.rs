//! Rollouts over transports: what is put comes back, once, and goes.
#![cfg(feature = "transport")]

#[path = "../rollout/any.rs"]
mod any;
mod cleanup;
mod failures;
mod handles;
mod parts;
mod sharing;
mod support;
