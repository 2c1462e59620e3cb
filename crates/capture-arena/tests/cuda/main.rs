//! Device memory on a simulated machine, whose calls fail when the test says so.
//!
//! Needs no device: `cargo test -p capture-arena --features scripted-cuda --test cuda`.

mod blocks;
mod copies;
mod faults;
mod peers;
mod staging;
mod streams;

use std::sync::Arc;

use capture_arena::cuda::{
    Device,
    scripted::{Machine, ScriptedCuda},
};

/// A machine and its first device.
fn machine(machine: Machine) -> (Arc<ScriptedCuda>, Device) {
    let cuda = ScriptedCuda::new(machine);
    let device = Device::open(cuda.clone(), 0).unwrap();
    (cuda, device)
}
