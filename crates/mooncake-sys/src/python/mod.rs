//! Mooncake's official pip wheel, through an interpreter that is embedded at run time.
//!
//! Nothing of Python is linked: `libpython` is opened by the dynamic loader, in the version that the
//! wheel was built for, and only functions of its stable interface are used. So one build of this
//! crate serves every Python from 3.10 on, and a build needs no Python. (Binding a fixed version at
//! build time would save nothing at run time: a Python call costs well under a microsecond, the way to
//! the interpreter's thread costs more, and both are small beside what Mooncake does;
//! `examples/call_cost.rs` measures them.)
//!
//! The process has one interpreter, run by a few threads of its own ([`WheelOptions::threads`]);
//! callers hand them a job and wait. Addresses go in as numbers, no payload is copied, and the calls
//! that move or register payload give up the interpreter's lock while they run. Those that move much
//! wait on threads of a lower priority, as many again: Mooncake spins while it waits, and would take
//! the core that its own threads need to move the bytes. If the process runs Python already, that
//! interpreter is used, provided that its version fits, and all threads are alike: those of its own
//! must not wait for the lock while a thread of a lower priority holds it.
//!
//! Both generations of the wheel are served: 0.3.13, where `mooncake.store` is an extension module,
//! and 0.3.14, where it is a package.
//!
//! # Where the wheel is looked for
//! The directory in [`WheelOptions`], else `FEATURESTORE_MOONCAKE_VENV`, `VIRTUAL_ENV` and
//! `CONDA_PREFIX`, in this order: a virtual environment, or the directory of packages itself.
//! `libpython` is taken from [`WheelOptions::libpython`], else from the Python that the environment
//! was made with, else from the loader's path.

mod engine;
mod inspect;
mod libpython;
mod object;
mod runtime;
mod store;
mod transfer;
mod wheel;

pub use engine::WheelEngine;
pub use inspect::WheelFacts;
pub use runtime::Interpreter;
pub use store::WheelStore;
pub use wheel::{Wheel, WheelOptions};
