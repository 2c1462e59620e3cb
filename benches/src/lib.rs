//! The benches of the workspace are the files in `benches/`; `cargo xtask bench` runs them all.
#![forbid(unsafe_code)]
