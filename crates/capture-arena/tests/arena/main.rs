//! The arena as its users see it: threads, processes, clients.
#![cfg(not(loom))]

mod common;
mod here;
mod lifetimes;
mod model;
mod model_clients;
mod pool;
mod processes;
mod reference;
