//! The root object: the header, then one line for each data sample.

use std::{ops::Range, sync::Arc};

use control_proto::sample_ref::SampleRef;
use transport_core::{Descriptor, Error, ErrorKind, Result};
use xxhash_rust::xxh3::xxh3_64;

use super::Handle;
use crate::native::Header;

/// Name of the one tensor of a root, and of a data sample.
pub(super) const HEADER: &str = "header";
pub(super) const DATA: &str = "data";

/// Most data samples of one rollout.
const MAX_PARTS: usize = 1 << 16;

/// A root that was read and checked.
#[derive(Clone, Debug)]
pub(super) struct Root {
    pub(super) descriptor: Arc<Descriptor>,
    pub(super) header: Arc<Header>,
    pub(super) parts: Vec<Part>,
}

/// One data sample.
#[derive(Clone, Debug)]
pub(super) struct Part {
    /// The bytes of the data that it holds.
    pub(super) range: Range<u64>,
    pub(super) descriptor: Arc<Descriptor>,
}

/// The bytes of a root object.
pub(super) fn write(mut header: Vec<u8>, parts: &[Descriptor]) -> Result<Vec<u8>> {
    for part in parts {
        SampleRef::new(part, "rollout", None, "rollout")?.write(&mut header);
    }
    Ok(header)
}

impl Root {
    /// Reads a root object; everything in it comes from a peer.
    pub(super) fn parse(handle: &Handle, bytes: &[u8]) -> Result<Self> {
        let corrupt = |why: &'static str| {
            Error::new(ErrorKind::Corrupt, "read rollout", why).with("key", &handle.root().sample)
        };
        let found = xxh3_64(bytes);
        if found != handle.xxh3() {
            return Err(corrupt("the root is not the one that the handle means")
                .with("expected", format_args!("{:016x}", handle.xxh3()))
                .with("found", format_args!("{found:016x}"))
                .remedy("fetch it again; the handle may belong to an older life of its key"));
        }
        let header_bytes = usize::try_from(handle.header_bytes()).ok();
        let (header, lines) = header_bytes
            .and_then(|at| bytes.split_at_checked(at))
            .ok_or_else(|| corrupt("the root is shorter than its header"))?;
        let header = Header::parse(header)?;
        if (header.data_bytes(), header.rows(), header.generation())
            != (handle.data_bytes(), handle.rows(), handle.generation())
        {
            return Err(corrupt("header and handle disagree")
                .with("data_bytes", header.data_bytes())
                .with("rows", header.rows())
                .with("generation", header.generation()));
        }
        let mut parts = Vec::new();
        let mut end = 0u64;
        for line in lines.split_inclusive(|&byte| byte == b'\n') {
            if parts.len() == MAX_PARTS {
                return Err(corrupt("too many data samples").with("max", MAX_PARTS));
            }
            let descriptor = SampleRef::parse(line.strip_suffix(b"\n").unwrap_or(line))?;
            let descriptor = descriptor.descriptor()?;
            let start = end;
            end = Some(descriptor.nbytes())
                .filter(|_| descriptor.features.len() == 1)
                .and_then(|bytes| start.checked_add(bytes))
                .ok_or_else(|| corrupt("a data sample is no run of bytes"))?;
            parts.push(Part { range: start..end, descriptor: Arc::new(descriptor) });
        }
        if end != header.data_bytes() {
            return Err(corrupt("the data samples are not as long as the data")
                .with("expected", header.data_bytes())
                .with("found", end));
        }
        Ok(Self { descriptor: handle.root().clone(), header: Arc::new(header), parts })
    }

    /// Every sample of the rollout, the root last.
    pub(super) fn descriptors(&self) -> Vec<Arc<Descriptor>> {
        let parts = self.parts.iter().map(|part| part.descriptor.clone());
        parts.chain([self.descriptor.clone()]).collect()
    }

    /// The data samples that hold some of the bytes in `range`.
    pub(super) fn parts_of(&self, range: &Range<u64>) -> Range<usize> {
        if range.is_empty() {
            return 0..0;
        }
        let first = self.parts.partition_point(|part| part.range.end <= range.start);
        let last = self.parts.partition_point(|part| part.range.start < range.end);
        first..last
    }
}
