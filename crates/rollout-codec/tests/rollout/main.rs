//! Rollouts through both layouts, from friends and from foes.

mod any;
mod bad_input;
mod corpus;
mod golden;
mod hostile;
mod mooncake;
mod native;
mod reports;
mod schema;
