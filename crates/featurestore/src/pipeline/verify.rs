//! Compares what the trainer read with checksums made where it was filled.

use std::collections::BTreeMap;

use control_proto::capture::Checksum;
use transport_core::{Error, ErrorKind, Fetched, Result};
use xxhash_rust::xxh3::xxh3_64;

use super::messages::Job;
use crate::input::sha256_hex;

/// Bytes compared, and the tensors that differ.
pub(super) fn compare(job: &Job, fetched: &Fetched) -> Result<(u64, Vec<String>)> {
    let mut bytes = 0;
    let mut differing = Vec::new();
    for (name, tensor) in &fetched.tensors {
        let found = tensor.data.as_bytes().ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "compare", "a tensor is not in host memory")
        })?;
        let sum =
            |sums: &Option<BTreeMap<String, String>>| sums.as_ref()?.get(name.as_str()).cloned();
        let key = || fetched.descriptor.sample.object(name).to_string();
        let (xxh3, sha256) = (sum(&job.checksums), sum(&job.sha256));
        if xxh3.is_none() && sha256.is_none() {
            return Err(Error::new(
                ErrorKind::NotFound,
                "compare",
                "a tensor came without checksum",
            )
            .with("key", key())
            .remedy("the server must answer x-featurestore-checksums; or give --no-verify"));
        }
        let same = xxh3.is_none_or(|sum| sum == Checksum(xxh3_64(found)).to_string())
            && sha256.is_none_or(|sum| sum == sha256_hex(found));
        bytes += found.len() as u64;
        if !same {
            differing.push(key());
        }
    }
    Ok((bytes, differing))
}
