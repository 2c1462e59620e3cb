//! The transport: one engine, one identity, and what is known about every publisher.

mod builder;

pub use builder::{DirectTransport, DirectTransportBuilder, Engine, PendingRelease};
