//! Manifests: which stored objects make up a structured object, and how long each is.

use std::collections::HashSet;

use indexmap::IndexMap;
use transport_core::{Error, ErrorKind, Result};

use crate::{Value, json, value::map};

/// One stored object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Its key.
    pub key: String,
    /// Its length.
    pub bytes: u64,
}

/// One payload: the concatenation of its chunks. Without bytes there are no chunks.
#[derive(Clone, Debug, PartialEq)]
pub struct Payload {
    /// Key below which the chunks are.
    pub key: String,
    /// Total length.
    pub bytes: u64,
    /// Stored objects in order.
    pub chunks: Vec<Chunk>,
    /// What torch writers add, such as `metadata_bytes`, `kind`, `format`; in written order.
    pub extra: IndexMap<String, Value>,
}

/// Description of one stored structured object.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    /// `<partition>/<id>`.
    pub object_id: String,
    /// The JSON metadata.
    pub meta: Payload,
    /// The payloads by member name.
    pub buffers: IndexMap<String, Payload>,
    /// Objects whose keys this one uses, where it was merged from several.
    pub buffer_object_ids: Option<Vec<String>>,
    /// Keys of older manifests and metadata that go when this object goes.
    pub cleanup_keys: Vec<String>,
}

const OPERATION: &str = "read manifest";

fn corrupt(why: &'static str) -> Error {
    Error::new(ErrorKind::Corrupt, OPERATION, why)
}

impl Manifest {
    /// Reads the manifest stored under `key` and returns it with the key prefix that its writer
    /// used. Every key in it must lie in the object's own namespace.
    pub fn parse(key: &str, bytes: &[u8]) -> Result<(Self, String)> {
        Self::parse_inner(key, bytes).map_err(|e| e.with("manifest_key", key))
    }

    fn parse_inner(key: &str, bytes: &[u8]) -> Result<(Self, String)> {
        let json = json::parse(bytes)?;
        let version = json.get("version").and_then(Value::as_u64);
        if version != Some(1) || json.get("layout").and_then(Value::as_str) != Some("bundle") {
            return Err(corrupt("neither version 1 nor layout bundle"));
        }
        let text = |name| json.get(name).and_then(Value::as_str);
        let object_id = text("object_id").ok_or_else(|| corrupt("no object_id"))?.to_owned();
        let prefix = key
            .strip_suffix("/manifest")
            .and_then(|rest| rest.strip_suffix(&object_id)?.strip_suffix('/'))
            .filter(|prefix| !prefix.is_empty())
            .ok_or_else(|| {
                corrupt("the key does not match object_id").with("object_id", &object_id)
            })?
            .to_owned();
        let texts = |name| -> Result<Option<Vec<String>>> {
            let Some(list) = json.get(name) else { return Ok(None) };
            let text = |item: &Value| item.as_str().map(str::to_owned);
            let list = list.as_list().and_then(|items| items.iter().map(text).collect());
            list.map(Some).ok_or_else(|| corrupt("expected a list of texts").with("entry", name))
        };
        let buffer_object_ids = texts("buffer_object_ids")?;
        let cleanup_keys = texts("cleanup_keys")?.unwrap_or_default();
        let base = format!("{prefix}/{object_id}/");
        let bases: Vec<_> = match &buffer_object_ids {
            Some(ids) => ids.iter().map(|id| format!("{prefix}/{id}/")).collect(),
            None => vec![base.clone()],
        };
        let inside = |key: &str| bases.iter().any(|base| key.starts_with(base));
        if let Some(key) = cleanup_keys.iter().find(|key| !inside(key)) {
            return Err(corrupt("a cleanup key is outside the object").with("key", key));
        }
        let meta = json.get("meta").ok_or_else(|| corrupt("no meta"))?;
        let meta = Payload::parse(meta, &|key| key.starts_with(&base))?;
        let buffers = json.get("buffers").and_then(Value::as_map);
        let buffers = buffers
            .ok_or_else(|| corrupt("no buffers"))?
            .iter()
            .map(|(name, payload)| {
                check_segment(name, "member")?;
                let payload = Payload::parse(payload, &inside);
                Ok((name.clone(), payload.map_err(|e| e.with("member", name))?))
            })
            .collect::<Result<_>>()?;
        let manifest = Self { object_id, meta, buffers, buffer_object_ids, cleanup_keys };
        manifest.check_unique()?;
        Ok((manifest, prefix))
    }

    /// The stored form.
    pub fn to_json(&self) -> String {
        let buffers = self.buffers.iter().map(|(name, p)| (name.clone(), p.to_value()));
        let mut entries = IndexMap::from([
            ("version".to_owned(), Value::Int(1)),
            ("layout".to_owned(), "bundle".into()),
            ("object_id".to_owned(), Value::Str(self.object_id.clone())),
            ("meta".to_owned(), self.meta.to_value()),
            ("buffers".to_owned(), Value::Map(buffers.collect())),
        ]);
        let texts = |list: &[String]| Value::List(list.iter().cloned().map(Value::Str).collect());
        if let Some(ids) = &self.buffer_object_ids {
            entries.insert("buffer_object_ids".into(), texts(ids));
        }
        if !self.cleanup_keys.is_empty() {
            entries.insert("cleanup_keys".into(), texts(&self.cleanup_keys));
        }
        json::write(&Value::Map(entries), json::Style::COMPACT_ASCII).expect("plain JSON")
    }

    /// Keys of the metadata and of all payloads.
    pub fn payload_keys(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.meta)
            .chain(self.buffers.values())
            .flat_map(|payload| &payload.chunks)
            .map(|chunk| chunk.key.as_str())
    }

    fn check_unique(&self) -> Result<()> {
        let mut seen = HashSet::new();
        match self.payload_keys().find(|key| !seen.insert(*key)) {
            Some(key) => Err(corrupt("two payloads share a stored object").with("key", key)),
            None => Ok(()),
        }
    }
}

impl Payload {
    fn parse(json: &Value, inside: &dyn Fn(&str) -> bool) -> Result<Self> {
        let entries = json.as_map().ok_or_else(|| corrupt("a payload is not a map"))?;
        let text = |json: &Value| json.get("key").and_then(Value::as_str).map(str::to_owned);
        let bytes = |json: &Value| json.get("bytes").and_then(Value::as_u64);
        let key = text(json).ok_or_else(|| corrupt("a payload has no key"))?;
        if !inside(&key) {
            return Err(corrupt("a payload key is outside the object").with("key", key));
        }
        let total = bytes(json).ok_or_else(|| corrupt("a payload has no length"))?;
        let chunks = json.get("chunks").and_then(Value::as_list);
        let chunks = chunks.ok_or_else(|| corrupt("a payload has no chunks"))?;
        let mut sum = 0u64;
        let below = format!("{key}/");
        let chunks = chunks
            .iter()
            .map(|chunk| {
                let (Some(chunk_key), Some(bytes)) = (text(chunk), bytes(chunk)) else {
                    return Err(corrupt("a chunk has no key or no length").with("key", &key));
                };
                if chunk_key != key && !chunk_key.starts_with(&below) {
                    return Err(corrupt("a chunk is outside its payload").with("key", chunk_key));
                }
                sum = sum.checked_add(bytes).ok_or_else(|| corrupt("chunk lengths overflow"))?;
                Ok(Chunk { key: chunk_key, bytes })
            })
            .collect::<Result<Vec<_>>>()?;
        if sum != total {
            return Err(corrupt("the chunks are not as long as the payload")
                .with("key", key)
                .with("expected", total)
                .with("found", sum));
        }
        let extra = entries
            .iter()
            .filter(|(name, _)| !matches!(name.as_str(), "key" | "bytes" | "chunks"))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        Ok(Self { key, bytes: total, chunks, extra })
    }

    /// JSON in the order of Mooncake's writer: `kind` before the length, `dtype` and `shape` before
    /// the chunks, everything else last.
    fn to_value(&self) -> Value {
        let chunks = self.chunks.iter().map(|chunk| {
            map([("key", Value::Str(chunk.key.clone())), ("bytes", chunk.bytes.into())])
        });
        let known = [("bytes", Value::from(self.bytes)), ("chunks", Value::List(chunks.collect()))];
        let mut entries = IndexMap::from([("key".to_owned(), Value::Str(self.key.clone()))]);
        let copy = |entries: &mut IndexMap<String, Value>, names: &[&str]| {
            for name in names {
                if let Some(value) = self.extra.get(*name) {
                    entries.insert((*name).to_owned(), value.clone());
                }
            }
        };
        let [bytes, chunks] = known;
        copy(&mut entries, &["kind"]);
        entries.insert(bytes.0.into(), bytes.1);
        copy(&mut entries, &["dtype", "shape"]);
        entries.insert(chunks.0.into(), chunks.1);
        for (name, value) in &self.extra {
            entries.entry(name.clone()).or_insert_with(|| value.clone());
        }
        Value::Map(entries)
    }
}

/// Refuses what cannot be one segment of a key.
pub(crate) fn check_segment(text: &str, what: &'static str) -> Result<()> {
    if text.is_empty() || text.contains('/') || text.chars().any(|c| c < ' ') {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            "make key",
            "empty, or with '/' or control characters",
        )
        .with(what, format_args!("{text:?}")));
    }
    Ok(())
}
