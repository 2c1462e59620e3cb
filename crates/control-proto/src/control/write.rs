//! How the lines of clients are written.

use std::time::Duration;

use transport_core::{Descriptor, Epoch, Error, ErrorKind, RemoteAddr, Result, Sequence};

use super::{Hello, Limits, Objects};
use crate::json::{write_number, write_string};

/// Length at which [`write_keys`] starts a new line. Short lines are read without a copy and are
/// within every connection's own share of the server's budget.
const KEY_LINE_BYTES: usize = 16 << 10;

/// Appends lists of keys, as many lines as it takes, and returns their number.
///
/// No keys, no line. A key is at most [`MAX_KEY_BYTES`](transport_core::MAX_KEY_BYTES) long.
pub fn write_keys<K: AsRef<str>>(out: &mut Vec<u8>, keys: impl IntoIterator<Item = K>) -> usize {
    let (mut lines, mut start) = (0, out.len());
    for key in keys {
        if lines == 0 || out.len() - start >= KEY_LINE_BYTES {
            if lines > 0 {
                out.extend_from_slice(b"]\n");
            }
            start = out.len();
            lines += 1;
            out.push(b'[');
        } else {
            out.push(b',');
        }
        write_string(out, key.as_ref());
    }
    if lines > 0 {
        out.extend_from_slice(b"]\n");
    }
    lines
}

/// Appends a `hello` line.
pub fn write_hello(out: &mut Vec<u8>, hello: &Hello) {
    out.extend_from_slice(b"{\"op\":\"hello\",\"version\":");
    write_number(out, hello.version.into());
    out.extend_from_slice(b",\"client\":");
    write_string(out, hello.client.as_str());
    out.extend_from_slice(b",\"lease_ms\":");
    write_number(out, millis(hello.lease));
    if let Some(token) = &hello.token {
        out.extend_from_slice(b",\"token\":");
        write_string(out, token.expose());
    }
    if let Some(mark) = hello.mapping {
        out.extend_from_slice(b",\"mapping\":");
        write_number(out, mark.0);
    }
    out.extend_from_slice(b"}\n");
}

/// Appends a `hold` line; see [`write_free`].
pub fn write_hold<K: AsRef<str>>(
    out: &mut Vec<u8>,
    id: u64,
    epoch: Epoch,
    objects: impl IntoIterator<Item = (K, Option<Sequence>)>,
    limits: &Limits,
) -> Result<()> {
    let objects = objects.into_iter().map(|(key, seq)| (key, seq, None));
    write_objects(out, "hold", id, epoch, objects, limits)
}

/// Appends a `hold` line that also says where each object is believed to lie; see [`write_free`].
pub fn write_hold_at<K: AsRef<str>>(
    out: &mut Vec<u8>,
    id: u64,
    epoch: Epoch,
    objects: impl IntoIterator<Item = (K, Option<Sequence>, Option<(RemoteAddr, u64)>)>,
    limits: &Limits,
) -> Result<()> {
    write_objects(out, "hold", id, epoch, objects, limits)
}

/// Appends an `unhold` line; see [`write_free`].
pub fn write_unhold<K: AsRef<str>>(
    out: &mut Vec<u8>,
    id: u64,
    epoch: Epoch,
    objects: impl IntoIterator<Item = (K, Option<Sequence>)>,
    limits: &Limits,
) -> Result<()> {
    let objects = objects.into_iter().map(|(key, seq)| (key, seq, None));
    write_objects(out, "unhold", id, epoch, objects, limits)
}

/// Appends a `free` line.
///
/// Nothing is appended, and an error returned, if the line would go beyond `limits`; it never does
/// with up to [`Objects::PER_LINE`] objects and default limits.
pub fn write_free<K: AsRef<str>>(
    out: &mut Vec<u8>,
    id: u64,
    epoch: Epoch,
    objects: impl IntoIterator<Item = (K, Option<Sequence>)>,
    limits: &Limits,
) -> Result<()> {
    let objects = objects.into_iter().map(|(key, seq)| (key, seq, None));
    write_objects(out, "free", id, epoch, objects, limits)
}

/// Appends a `free` line with every object of some samples; see [`write_free`].
pub fn write_free_samples<'a>(
    out: &mut Vec<u8>,
    id: u64,
    epoch: Epoch,
    samples: impl IntoIterator<Item = &'a Descriptor>,
    limits: &Limits,
) -> Result<()> {
    let mut line = ObjectLine::open(out, "free", id, epoch, limits);
    let mut key = String::new();
    for sample in samples {
        // The keys of a sample differ in their ends only, so the rest is made once.
        key.clear();
        sample.sample.push_prefix(&mut key);
        let prefix = key.len();
        for (name, feature) in &sample.features {
            key.truncate(prefix);
            key.push_str(name.as_str());
            line.push(&key, feature.seq, None)?;
        }
    }
    line.close();
    Ok(())
}

fn write_objects<K: AsRef<str>>(
    out: &mut Vec<u8>,
    op: &str,
    id: u64,
    epoch: Epoch,
    objects: impl IntoIterator<Item = (K, Option<Sequence>, Option<(RemoteAddr, u64)>)>,
    limits: &Limits,
) -> Result<()> {
    let mut line = ObjectLine::open(out, op, id, epoch, limits);
    for (key, seq, range) in objects {
        line.push(key.as_ref(), seq, range)?;
    }
    line.close();
    Ok(())
}

/// A line with objects that is being written.
struct ObjectLine<'a> {
    out: &'a mut Vec<u8>,
    start: usize,
    count: usize,
    limits: &'a Limits,
}

impl<'a> ObjectLine<'a> {
    fn open(out: &'a mut Vec<u8>, op: &str, id: u64, epoch: Epoch, limits: &'a Limits) -> Self {
        let start = out.len();
        open_op(out, op);
        write_id(out, id);
        out.extend_from_slice(b",\"epoch\":");
        write_number(out, epoch.0);
        out.extend_from_slice(b",\"objects\":[");
        Self { out, start, count: 0, limits }
    }

    /// Appends an object; after an error nothing of the line is left.
    fn push(
        &mut self,
        key: &str,
        seq: Option<Sequence>,
        range: Option<(RemoteAddr, u64)>,
    ) -> Result<()> {
        let Self { out, start, count, limits } = self;
        out.extend_from_slice(if *count == 0 { b"[" } else { b",[" });
        write_string(out, key);
        match seq {
            Some(seq) => {
                out.push(b',');
                write_number(out, seq.0);
            }
            None => out.extend_from_slice(b",null"),
        }
        if let Some((address, bytes)) = range {
            out.push(b',');
            write_number(out, address.0);
            out.push(b',');
            write_number(out, bytes);
        }
        out.push(b']');
        *count += 1;
        let bytes = out.len() - *start + b"]}".len();
        if *count > limits.keys_per_line || bytes > limits.line_bytes {
            out.truncate(*start);
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "write control line",
                "too many objects for one line",
            )
            .with("max_objects", limits.keys_per_line)
            .with("max_bytes", limits.line_bytes)
            .remedy(format!("send {} objects a line", Objects::PER_LINE)));
        }
        Ok(())
    }

    fn close(self) {
        self.out.extend_from_slice(b"]}\n");
    }
}

/// Appends a `health` line.
pub fn write_health(out: &mut Vec<u8>, id: u64) {
    open_op(out, "health");
    write_id(out, id);
    out.extend_from_slice(b"}\n");
}

/// Appends a `ping` line.
pub fn write_ping(out: &mut Vec<u8>, id: u64) {
    open_op(out, "ping");
    write_id(out, id);
    out.extend_from_slice(b"}\n");
}

/// Appends a `bye` line.
pub fn write_bye(out: &mut Vec<u8>) {
    out.extend_from_slice(b"{\"op\":\"bye\"}\n");
}

/// Appends `{"op":"…"`.
pub(super) fn open_op(out: &mut Vec<u8>, op: &str) {
    out.extend_from_slice(b"{\"op\":\"");
    out.extend_from_slice(op.as_bytes());
    out.push(b'"');
}

pub(super) fn write_id(out: &mut Vec<u8>, id: u64) {
    out.extend_from_slice(b",\"id\":");
    write_number(out, id);
}

/// Whole milliseconds, at least 1.
pub(super) fn millis(lease: Duration) -> u64 {
    u64::try_from(lease.as_millis()).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use transport_core::{
        Dtype, FeatureDescriptor, FeatureName, Generation, Location, SampleId, SampleKey, StoreId,
        TensorMeta,
    };

    use super::{super::Request, *};

    #[test]
    fn key_lines_split_before_they_grow_long() {
        let keys: Vec<_> =
            (0..1000).map(|i| format!("run0/run0:task-{i:08}/g1/hidden_states")).collect();
        let mut out = Vec::new();
        let lines = write_keys(&mut out, &keys);
        assert_eq!(write_keys(&mut out, &[] as &[&str]), 0);
        assert_eq!(out.iter().filter(|&&b| b == b'\n').count(), lines);
        let mut found = Vec::new();
        for line in out.strip_suffix(b"\n").unwrap().split(|&b| b == b'\n') {
            assert!(line.len() < KEY_LINE_BYTES + 1100);
            let Request::Keys(list) = Request::parse(line, &Limits::default()).unwrap() else {
                panic!("not a list");
            };
            found.extend(list.iter().map(str::to_owned));
        }
        assert_eq!(found, keys);
    }

    #[test]
    fn a_line_that_would_be_too_long_is_not_begun() {
        let limits = Limits { line_bytes: 100, ..Limits::default() };
        let mut out = b"before\n".to_vec();
        let objects = || (0..20).map(|_| ("key", None));
        let error = write_free(&mut out, 1, Epoch(1), objects(), &limits).unwrap_err();
        assert_eq!(error.context("max_bytes"), Some("100"));
        assert_eq!(out, b"before\n");
        let few = Limits { keys_per_line: 19, ..Limits::default() };
        assert!(write_hold(&mut out, 1, Epoch(1), objects(), &few).is_err());
        let key = "\"".repeat(transport_core::MAX_KEY_BYTES);
        let objects = (0..Objects::PER_LINE).map(|_| (&key, Some(Sequence(u64::MAX))));
        write_free(&mut out, 1, Epoch(1), objects, &Limits::default()).unwrap();
    }

    #[test]
    fn samples_are_written_as_their_objects_are() {
        let sample = |id: &str, names: &[(&str, Option<u64>)]| {
            let meta = TensorMeta::new(Dtype::Uint8, [0]).unwrap();
            let features = names.iter().map(|&(name, seq)| {
                let feature = FeatureDescriptor::new(meta.clone(), None, seq.map(Sequence));
                (FeatureName::new(name).unwrap(), feature)
            });
            let key = SampleKey::new(
                StoreId::new("run\"0").unwrap(),
                SampleId::new(id).unwrap(),
                Generation(7),
            );
            Descriptor::new(key, features.collect(), None, Location::Store).unwrap()
        };
        let samples = [
            sample("a/b\\", &[("x", Some(3)), ("\"longer\"", None)]),
            sample("c", &[]),
            sample("ü", &[("y", Some(u64::MAX))]),
        ];
        let (mut whole, mut each) = (Vec::new(), Vec::new());
        write_free_samples(&mut whole, 4, Epoch(9), &samples, &Limits::default()).unwrap();
        let objects = || {
            samples.iter().flat_map(|s| {
                s.features.iter().map(|(name, f)| (s.sample.object(name).shared(), f.seq))
            })
        };
        write_free(&mut each, 4, Epoch(9), objects(), &Limits::default()).unwrap();
        assert_eq!(String::from_utf8(whole).unwrap(), String::from_utf8(each).unwrap());
        let few = Limits { keys_per_line: 2, ..Limits::default() };
        let mut out = b"before\n".to_vec();
        write_free_samples(&mut out, 4, Epoch(9), &samples, &few).unwrap_err();
        assert_eq!(out, b"before\n");
    }
}
