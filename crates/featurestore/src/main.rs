//! Command line of featurestore.
fn main() {}
