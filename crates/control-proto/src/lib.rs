//! Every byte format that two processes exchange, parsed and written without any I/O.
//!
//! - [`capture`]: capture requests, and results in every form that publishers use;
//! - [`sample_ref`]: the lines through which producers announce samples to consumers;
//! - [`control`]: the line protocol between trainers and a capture server, which frees what was
//!   captured;
//! - [`token`]: the acknowledged control protocol of token-authenticated captures;
//! - [`fd_grant`]: what comes with the file descriptor of device memory;
//! - [`mooncake`]: the peer handshake and the tcp data frames of Mooncake's transfer engine.
//!
//! What a peer sends is never trusted: lengths, counts and nesting are bounded, arithmetic is
//! checked, and a bad line or frame is a typed error that costs the sender and nobody else.
#![forbid(unsafe_code)]

pub mod capture;
pub mod control;
pub mod fd_grant;
#[doc(hidden)]
pub mod fuzzing;
mod json;
pub mod mooncake;
pub mod sample_ref;
mod secret;
pub mod token;

pub use sample_ref::{FeatureSpec, SampleRef};
pub use secret::Secret;

/// `host:port` names; the one parser of the workspace.
pub mod session {
    pub use transport_core::{SessionName, check_host};
}
