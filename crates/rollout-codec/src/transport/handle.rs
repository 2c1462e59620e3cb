//! Handles: what a producer gives to its readers.

use std::sync::Arc;

use control_proto::sample_ref::SampleRef;
use serde_json::value::RawValue;
use transport_core::{Descriptor, Error, ErrorKind, Result};

/// Longest handle, in bytes of its JSON text.
pub const MAX_HANDLE_BYTES: usize = 4096;

const TYPE: &str = "featurestore_rollout";
const VERSION: u64 = 1;
/// Longest root object that a reader fetches.
const MAX_ROOT_BYTES: u64 = 64 << 20;

/// Names one rollout: a few hundred bytes of JSON, whatever it holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Handle {
    root: Arc<Descriptor>,
    header_bytes: u64,
    data_bytes: u64,
    rows: u64,
    generation: u64,
    xxh3: u64,
}

/// What a handle says beside its root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct About {
    pub(super) header_bytes: u64,
    pub(super) data_bytes: u64,
    pub(super) rows: u64,
    pub(super) generation: u64,
    /// Checksum of the root object.
    pub(super) xxh3: u64,
}

#[derive(serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Text<'t> {
    r#type: String,
    version: u64,
    rows: u64,
    header_bytes: u64,
    data_bytes: u64,
    generation: String, // all 64 bits, which not every JSON reader keeps
    xxh3: String,
    #[serde(borrow)]
    root: &'t RawValue,
}

impl Handle {
    pub(super) fn new(root: Descriptor, about: About) -> Self {
        let About { header_bytes, data_bytes, rows, generation, xxh3 } = about;
        Self { root: Arc::new(root), header_bytes, data_bytes, rows, generation, xxh3 }
    }

    /// The handle as one line of JSON, at most [`MAX_HANDLE_BYTES`] long.
    pub fn to_json(&self) -> Result<String> {
        let mut root = Vec::new();
        SampleRef::new(&self.root, "rollout", None, "rollout")?.write(&mut root);
        let root = String::from_utf8(root).expect("JSON is UTF-8");
        let root = RawValue::from_string(root.trim_end().to_owned()).expect("one JSON value");
        let text = Text {
            r#type: TYPE.into(),
            version: VERSION,
            rows: self.rows,
            header_bytes: self.header_bytes,
            data_bytes: self.data_bytes,
            generation: format!("{:016x}", self.generation),
            xxh3: format!("{:016x}", self.xxh3),
            root: &root,
        };
        let text = serde_json::to_string(&text).expect("plain data");
        if text.len() > MAX_HANDLE_BYTES {
            return Err(Error::new(ErrorKind::InvalidInput, "write handle", "too long")
                .with("bytes", text.len())
                .with("max_bytes", MAX_HANDLE_BYTES)
                .remedy("choose a shorter store id"));
        }
        Ok(text)
    }

    /// Reads a handle.
    pub fn parse(json: &[u8]) -> Result<Self> {
        let corrupt = |why: &'static str| Error::new(ErrorKind::Corrupt, "read handle", why);
        if json.len() > MAX_HANDLE_BYTES {
            return Err(corrupt("longer than a handle gets")
                .with("bytes", json.len())
                .with("max_bytes", MAX_HANDLE_BYTES));
        }
        let text: Text<'_> = serde_json::from_slice(json).map_err(|e| {
            corrupt("not a handle of a rollout")
                .source(e)
                .remedy("pass on unchanged what put returned")
        })?;
        if text.r#type != TYPE {
            return Err(corrupt("not a handle of a rollout").with("type", text.r#type));
        }
        if text.version != VERSION {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "read handle",
                "written by another version",
            )
            .with("expected", VERSION)
            .with("found", text.version)
            .remedy("use the same release on both sides"));
        }
        let hex = |name: &'static str, text: &str| {
            (text.len() == 16).then(|| u64::from_str_radix(text, 16).ok()).flatten().ok_or_else(
                || {
                    corrupt("not sixteen hexadecimal digits")
                        .with("entry", name)
                        .with("found", text)
                },
            )
        };
        let root = SampleRef::parse(text.root.get().as_bytes())?.descriptor()?;
        let found = root.nbytes();
        if root.features.len() != 1 || text.header_bytes > found || found > MAX_ROOT_BYTES {
            return Err(corrupt("the root is not the root of a rollout")
                .with("tensors", root.features.len())
                .with("bytes", found)
                .with("header_bytes", text.header_bytes));
        }
        Ok(Self {
            root: Arc::new(root),
            header_bytes: text.header_bytes,
            data_bytes: text.data_bytes,
            rows: text.rows,
            generation: hex("generation", &text.generation)?,
            xxh3: hex("xxh3", &text.xxh3)?,
        })
    }

    /// Where the root is.
    pub fn root(&self) -> &Arc<Descriptor> {
        &self.root
    }

    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Bytes of the header.
    pub fn header_bytes(&self) -> u64 {
        self.header_bytes
    }

    /// Bytes of the encoded data.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// What the producer chose to tell this rollout from others under the same name.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Checksum of the root object, and so of the header with the checksums of all fields.
    pub fn xxh3(&self) -> u64 {
        self.xxh3
    }
}
