//! What the fuzz targets and the corpus test run: each function takes any bytes, and panics if a
//! reader does, or if what it accepts does not survive being written and read again.

use bytes::Bytes;
use transport_core::RegionSlice;
use xxhash_rust::xxh3::Xxh3;

use crate::{
    json,
    mooncake::{Dump, Reader, Reference},
    msgpack,
    native::{Header, Options, Plan, RolloutView},
    notation::{self, Layout},
};

/// An entry function.
pub type Target = fn(&[u8]);

/// Every entry function by the name of its fuzz target.
pub const TARGETS: &[(&str, Target)] = &[
    ("rollout_native", native),
    ("rollout_objects", objects),
    ("rollout_values", values),
    #[cfg(feature = "transport")]
    ("rollout_handle", handle),
];

/// Largest input that is looked at.
const MAX_BYTES: usize = 1 << 20;

/// A native rollout: two bytes with the length of the header, little-endian, then header and data.
/// The header's checksum is put right, so that the checks behind it are reached.
pub fn native(input: &[u8]) {
    let Some((length, rest)) = input.split_first_chunk::<2>() else { return };
    let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
    let (header, data) = rest.split_at(length);
    let mut header = header.to_vec();
    if header.len() >= 64 && input.len() <= MAX_BYTES {
        let mut sum = Xxh3::new();
        sum.update(&header[..56]);
        sum.update(&header[64..]);
        header[56..64].copy_from_slice(&sum.digest().to_le_bytes());
    }
    let Ok(parsed) = Header::parse(&header) else { return };
    assert_eq!(Header::parse(&parsed.to_bytes()).expect("just read"), parsed);
    for field in parsed.fields() {
        let _ = parsed.field_range(field.name);
    }
    let Ok(view) = RolloutView::new(parsed, RegionSlice::copy_of(data)) else { return };
    let _ = view.verify(1);
    let Ok(rollout) = view.rollout() else { return };
    // What is accepted can be shown, and written again.
    let _ = notation::decoded(&rollout, Layout::Envelope);
    let plan = Plan::new(&rollout, &Options::default()).expect("what was read can be planned");
    let (header, data) = plan.encode(1).expect("nothing is narrowed");
    let header = Header::parse(&header).expect("just written");
    let again = RolloutView::new(header, data).expect("just written");
    again.verify(1).expect("just written");
    again.rollout().expect("just written");
}

/// Mooncake's objects: a dump, a zero byte, and a reference.
pub fn objects(input: &[u8]) {
    let mut parts = input.splitn(2, |&byte| byte == 0);
    let (Some(dump), Some(reference)) = (parts.next(), parts.next()) else { return };
    let Ok(dump) = std::str::from_utf8(dump) else { return };
    let Ok(dump) = Dump::parse(dump) else { return };
    if let Some(key) = dump.objects.keys().next() {
        let _ = Reader::new(&dump.objects).members(key).and_then(|members| members.decoded());
    }
    let Ok(reference) = Reference::parse(reference) else { return };
    let Ok(rollout) = Reader::new(&dump.objects).rollout(&reference) else { return };
    let _ = notation::decoded(&rollout, Layout::Flat);
    let _ = notation::decoded(&rollout, Layout::Envelope);
}

/// Objects of JSON and MessagePack.
pub fn values(input: &[u8]) {
    if let Ok(value) = msgpack::parse(&Bytes::copy_from_slice(input)) {
        let mut bytes = Vec::new();
        if msgpack::write(&value, &mut bytes).is_ok() {
            assert!(msgpack::parse(&bytes.into()).expect("just written").same(&value));
        }
    }
    if let Ok(value) = json::parse(input) {
        let text = json::write(&value, json::Style::COMPACT).expect("just read");
        assert!(json::parse(text.as_bytes()).expect("just written").same(&value));
    }
}

/// A handle.
#[cfg(feature = "transport")]
pub fn handle(input: &[u8]) {
    use crate::transport::Handle;
    let Ok(handle) = Handle::parse(input) else { return };
    if let Ok(text) = handle.to_json() {
        let again = Handle::parse(text.as_bytes()).expect("just written");
        assert_eq!(again.to_json().expect("it was before"), text);
    }
}
