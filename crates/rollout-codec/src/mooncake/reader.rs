//! Reading structured objects out of a store.

use bytes::{Bytes, BytesMut};
use indexmap::IndexMap;
use transport_core::{Error, ErrorKind, Result};

use super::{Manifest, Member, MemberData, ObjectStore, Payload, Reference, codec, member::SPECS};
use crate::{Column, Dense, Rollout, Section, Value, json, notation, value::map};

/// What a reader accepts at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one manifest or one metadata document.
    pub json_bytes: u64,
    /// Bytes of one payload.
    pub payload_bytes: u64,
}

impl Default for Limits {
    /// 256 MiB of JSON, 1 TiB a payload.
    fn default() -> Self {
        Self { json_bytes: 256 << 20, payload_bytes: 1 << 40 }
    }
}

/// Reads structured objects out of a store.
///
/// A payload of one stored object is used where the store put it; one of several chunks is put
/// together once.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'s, S: ?Sized> {
    store: &'s S,
    limits: Limits,
}

/// The members of one structured object, by name.
#[derive(Clone, Debug)]
pub struct Members {
    /// The user's metadata, with the description of the members.
    pub metadata: Value,
    /// The members in the order of the manifest.
    pub members: IndexMap<String, Member>,
}

impl<'s, S: ObjectStore + ?Sized> Reader<'s, S> {
    /// A reader with default limits.
    pub fn new(store: &'s S) -> Self {
        Self { store, limits: Limits::default() }
    }

    /// Sets what is accepted at most.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Reads all fields of a rollout.
    pub fn rollout(&self, reference: &Reference) -> Result<Rollout<'static>> {
        self.fields(reference, |_| true)
    }

    /// Reads the fields that `wanted` names, and nothing of the others.
    pub fn fields(
        &self,
        reference: &Reference,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Rollout<'static>> {
        let mut members = IndexMap::new();
        for (stage, key) in &reference.stages {
            let mut names: Vec<&str> = Vec::new();
            for (name, location) in &reference.fields {
                if location.stage == *stage && wanted(name) {
                    match reference.encoded.get(name) {
                        Some(encoded) => names.extend(encoded.members.values().map(|m| &**m)),
                        None => names.push(&location.member),
                    }
                }
            }
            if !names.is_empty() {
                let read = self.read(key, |name| names.contains(&name))?;
                members.insert(stage.as_str(), read.members);
            }
        }
        let mut rollout = Rollout { meta: reference.meta.clone(), ..Rollout::default() };
        for (name, location) in reference.fields.iter().filter(|(name, _)| wanted(name)) {
            let members = &members[location.stage.as_str()];
            let column = match reference.encoded.get(name) {
                Some(encoded) => codec::decode(members, encoded),
                None => whole(members, &location.member),
            };
            let column = column.map_err(|e| e.with("field", name))?;
            if column.rows() != reference.batch_size {
                return Err(corrupt("a field has not as many rows as the reference says")
                    .with("field", name)
                    .with("expected", reference.batch_size)
                    .with("found", column.rows()));
            }
            match location.section {
                Section::Batch => rollout.batch.insert(name.clone(), column),
                _ => rollout.non_tensor.insert(name.clone(), column),
            };
        }
        Ok(rollout)
    }

    /// Reads one structured object by its manifest key, without a reference.
    pub fn members(&self, manifest_key: &str) -> Result<Members> {
        self.read(manifest_key, |_| true)
    }

    /// Reads and checks a manifest; the text is the key prefix that its writer used.
    pub fn manifest(&self, manifest_key: &str) -> Result<(Manifest, String)> {
        let bytes = self.store.get(manifest_key)?.ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "read manifest", "no such object")
                .with("manifest_key", manifest_key)
                .remedy("the producer has not finished, or the object was cleaned up")
        })?;
        self.check_json(bytes.len() as u64, manifest_key)?;
        Manifest::parse(manifest_key, &bytes)
    }

    fn read(&self, manifest_key: &str, wanted: impl Fn(&str) -> bool) -> Result<Members> {
        let (manifest, _) = self.manifest(manifest_key)?;
        self.check_json(manifest.meta.bytes, &manifest.meta.key)?;
        let metadata = json::parse(&self.payload(&manifest.meta)?)
            .map_err(|e| e.with("key", &manifest.meta.key))?;
        let specs = metadata.get(SPECS);
        if specs.is_some_and(|specs| specs.as_map().is_none()) {
            return Err(corrupt("the description of the members is not a map"));
        }
        let mut members = IndexMap::new();
        for (name, payload) in &manifest.buffers {
            if wanted(name) {
                let spec = specs.and_then(|specs| specs.get(name));
                let member = self
                    .payload(payload)
                    .and_then(|bytes| Member::new(spec, payload, bytes))
                    .map_err(|e| e.with("member", name))?;
                members.insert(name.clone(), member);
            }
        }
        Ok(Members { metadata, members })
    }

    fn payload(&self, payload: &Payload) -> Result<Bytes> {
        if payload.bytes > self.limits.payload_bytes {
            return Err(corrupt("a payload is longer than accepted")
                .with("key", &payload.key)
                .with("bytes", payload.bytes)
                .with("max", self.limits.payload_bytes));
        }
        // All parts are at hand before room is made for them: no length is taken on trust.
        let mut parts = payload
            .chunks
            .iter()
            .map(|chunk| {
                let bytes = self.store.get(&chunk.key)?.ok_or_else(|| {
                    Error::new(ErrorKind::NotFound, "read payload", "a stored object is missing")
                        .with("key", &chunk.key)
                        .with("expected_bytes", chunk.bytes)
                        .remedy("it was evicted or cleaned up; pin objects until they are read")
                })?;
                if bytes.len() as u64 != chunk.bytes {
                    return Err(Error::new(
                        ErrorKind::ShortRead,
                        "read payload",
                        "a stored object is not as long as the manifest says",
                    )
                    .with("key", &chunk.key)
                    .with("expected", chunk.bytes)
                    .with("found", bytes.len()));
                }
                Ok(bytes)
            })
            .collect::<Result<Vec<_>>>()?;
        if parts.len() == 1 {
            return Ok(parts.remove(0));
        }
        let mut whole = BytesMut::with_capacity(parts.iter().map(Bytes::len).sum());
        parts.iter().for_each(|part| whole.extend_from_slice(part));
        Ok(whole.freeze())
    }

    fn check_json(&self, bytes: u64, key: &str) -> Result<()> {
        if bytes > self.limits.json_bytes {
            return Err(corrupt("a JSON document is longer than accepted")
                .with("key", key)
                .with("bytes", bytes)
                .with("max", self.limits.json_bytes));
        }
        Ok(())
    }
}

impl Members {
    /// `layout`, `metadata`, `values` and `kinds`, as [`notation::decoded`] writes them.
    pub fn decoded(&self) -> Result<Value> {
        let (mut values, mut kinds) = (IndexMap::new(), IndexMap::new());
        for (name, member) in &self.members {
            let value = member.to_value()?;
            values.insert(name.clone(), notation::plain(&value)?);
            kinds.insert(name.clone(), map([("value", Value::Str(value.kind()))]));
        }
        Ok(map([
            ("layout", "members".into()),
            ("metadata", self.metadata.clone()),
            ("values", Value::Map(values)),
            ("kinds", Value::Map(kinds)),
        ]))
    }
}

/// A field that is one member.
fn whole(members: &IndexMap<String, Member>, name: &str) -> Result<Column<'static>> {
    match members.get(name).map(|member| &member.data) {
        Some(MemberData::Array(array)) => {
            Dense::new(array.library(), array.meta().clone(), array.data().clone())
                .map(Column::Dense)
        }
        Some(MemberData::Jagged(rows)) => Ok(Column::Ragged(rows.clone())),
        Some(MemberData::Bytes(_)) => Err(corrupt("a field is bytes without a codec")),
        None => Err(Error::new(ErrorKind::NotFound, "read field", "a member is missing")
            .with("member", name)),
    }
}

fn corrupt(why: &'static str) -> Error {
    Error::new(ErrorKind::Corrupt, "read structured object", why)
}
