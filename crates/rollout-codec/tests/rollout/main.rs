//! Rollouts through both layouts, from friends and from foes.

mod any;
mod corpus;
mod golden;
mod hostile;
mod mooncake;
mod native;
mod schema;
