//! Writing structured objects into a store, and removing them.

use std::collections::HashSet;

use indexmap::IndexMap;
use transport_core::{Error, ErrorKind, Result};

use super::{
    Chunk, Encoded, FieldLocation, Manifest, ObjectStore, Payload, Reader, Reference,
    encode::{self, Cut, PayloadOut},
    manifest::check_segment,
    member::SPECS,
};
use crate::{Column, Piece, Rollout, Section, Value, json, value::map};

/// Bytes of the largest stored object, unless the writer says otherwise.
pub const DEFAULT_CHUNK_BYTES: u64 = 64 << 20;

/// Where a rollout goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Name of the data set.
    pub namespace: String,
    /// Second segment of all keys.
    pub partition: String,
    /// Name of the stage that writes.
    pub stage: String,
}

impl Default for Place {
    fn default() -> Self {
        let default = || "default".to_owned();
        Self { namespace: default(), partition: default(), stage: default() }
    }
}

/// Writes structured objects into a store.
pub struct Writer<'s, S: ?Sized> {
    store: &'s mut S,
    prefix: String,
    chunk_bytes: u64,
    ids: Box<dyn FnMut() -> Result<u128> + Send + 's>,
}

impl<'s, S: ObjectStore + ?Sized> Writer<'s, S> {
    /// A writer of keys below `prefix`, from which slashes at either end are dropped.
    pub fn new(store: &'s mut S, prefix: &str) -> Result<Self> {
        let prefix = prefix.trim_matches('/').to_owned();
        if prefix.is_empty() || prefix.chars().any(|c| c < ' ') {
            return Err(Error::new(
                ErrorKind::ConfigInvalid,
                "write structured object",
                "the key prefix is empty or has control characters",
            )
            .with("prefix", format_args!("{prefix:?}")));
        }
        Ok(Self {
            store,
            prefix,
            chunk_bytes: DEFAULT_CHUNK_BYTES,
            ids: Box::new(|| {
                let mut bytes = [0; 16];
                getrandom::fill(&mut bytes).map_err(|e| {
                    Error::new(ErrorKind::Unexpected, "make object id", e.to_string())
                })?;
                Ok(u128::from_le_bytes(bytes))
            }),
        })
    }

    /// Sets the length of the largest stored object. Torch tensors are never cut.
    #[must_use]
    pub fn chunk_bytes(mut self, bytes: std::num::NonZeroU64) -> Self {
        self.chunk_bytes = bytes.get();
        self
    }

    /// Takes object ids from `next` instead of the operating system's random numbers. A rollout
    /// draws two: for its store group, then for its object.
    #[must_use]
    pub fn ids(mut self, mut next: impl FnMut() -> u128 + Send + 's) -> Self {
        self.ids = Box::new(move || Ok(next()));
        self
    }

    /// Stores a rollout and returns the reference that its consumers need.
    ///
    /// The manifest comes last. On failure everything that was written is removed again.
    /// Fields in `inferred` carry a note that no schema chose their codec.
    pub fn put(
        &mut self,
        rollout: &Rollout<'_>,
        place: &Place,
        inferred: &HashSet<String>,
    ) -> Result<Reference> {
        let rows = rollout.rows()?;
        let mut members = IndexMap::new();
        let mut fields = IndexMap::new();
        let mut encoded = IndexMap::new();
        for (section, columns) in
            [(Section::Batch, &rollout.batch), (Section::NonTensor, &rollout.non_tensor)]
        {
            for (name, column) in columns {
                if name.is_empty() {
                    let why = "a field without a name, which no reader takes";
                    return Err(Error::new(
                        ErrorKind::InvalidInput,
                        "write structured object",
                        why,
                    )
                    .with("field", "\"\""));
                }
                let member = format!("{}.{name}", section.name());
                let field = |e: Error| e.with("field", name);
                if let Column::Dense(array) = column {
                    members.insert(member.clone(), encode::dense(array).map_err(field)?);
                } else if section == Section::Batch {
                    return Err(field(Error::new(
                        ErrorKind::InvalidInput,
                        "write structured object",
                        "the batch section holds arrays only",
                    )));
                } else {
                    let out = encode::encode(column, &member, inferred.contains(name));
                    let out = out.map_err(field)?;
                    let mut names = IndexMap::new();
                    for (payload, data) in out.payloads {
                        let full = format!("{member}.{payload}");
                        names.insert(payload, full.clone());
                        if members.insert(full, data).is_some() {
                            return Err(field(Error::new(
                                ErrorKind::InvalidInput,
                                "write structured object",
                                "two fields have a member of the same name",
                            )));
                        }
                    }
                    encoded.insert(
                        name.clone(),
                        Encoded {
                            codec: out.codec.to_owned(),
                            rows,
                            metadata: out.metadata,
                            members: names,
                        },
                    );
                }
                let location = FieldLocation { stage: place.stage.clone(), member, section };
                fields.insert(name.clone(), location);
            }
        }
        let group = format!("structured-{:032x}", (self.ids)()?);
        let mut reference = Reference {
            version: 1,
            batch_size: rows,
            namespace: place.namespace.clone(),
            partition: place.partition.clone(),
            global_indexes: None,
            stages: IndexMap::new(),
            fields,
            meta: rollout.meta.clone(),
            encoded,
            storage_group: Some(group.clone()),
        };
        // A consumer gets the reference as JSON: refuse what has no such form before writing.
        reference.to_json(json::Style::COMPACT)?;
        if !members.is_empty() {
            let metadata = map([
                ("layout", "dataproto_stage".into()),
                (
                    "dataproto",
                    map([
                        ("version", 1.into()),
                        ("namespace", place.namespace.as_str().into()),
                        ("partition", place.partition.as_str().into()),
                        ("stage", place.stage.as_str().into()),
                        ("batch_size", rows.into()),
                    ]),
                ),
            ]);
            let key = self.put_object(metadata, members, &place.partition, Some(&group))?;
            reference.stages.insert(place.stage.clone(), key);
        }
        Ok(reference)
    }

    /// Stores named byte strings and arrays with metadata, and returns the manifest key, which is
    /// all that a reader needs.
    pub fn put_members(
        &mut self,
        metadata: &IndexMap<String, Value>,
        members: &IndexMap<String, super::MemberData>,
        partition: &str,
    ) -> Result<String> {
        if metadata.contains_key(SPECS) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "write structured object",
                "a reserved entry of the metadata",
            )
            .with("entry", SPECS));
        }
        let mut metadata = metadata.clone();
        metadata.entry("layout".into()).or_insert("structured".into());
        let member = |(name, data): (&String, &super::MemberData)| {
            let out = match data {
                super::MemberData::Bytes(bytes) => PayloadOut {
                    spec: map([("encoding", "bytes".into())]),
                    parts: vec![bytes.clone().into()],
                    cut: Cut::Anywhere,
                },
                super::MemberData::Array(array) => encode::dense(&crate::Dense::new(
                    array.library(),
                    array.meta().clone(),
                    array.data().clone(),
                )?)?,
                super::MemberData::Jagged(_) => {
                    return Err(Error::new(
                        ErrorKind::Unsupported,
                        "write structured object",
                        "nested tensors are only read",
                    )
                    .with("member", name)
                    .remedy("write their rows as a ragged column"));
                }
            };
            Ok((name.clone(), out))
        };
        let members = members.iter().map(member).collect::<Result<_>>()?;
        self.put_object(Value::Map(metadata), members, partition, None)
    }

    fn put_object(
        &mut self,
        metadata: Value,
        members: IndexMap<String, PayloadOut<'_>>,
        partition: &str,
        group: Option<&str>,
    ) -> Result<String> {
        check_segment(partition, "partition")?;
        members.keys().try_for_each(|name| check_segment(name, "member"))?;
        let object_id = format!("{partition}/{:032x}", (self.ids)()?);
        let base = format!("{}/{object_id}", self.prefix);
        let manifest_key = format!("{base}/manifest");
        let mut written = Vec::new();
        let write = || -> Result<()> {
            let Value::Map(mut metadata) = metadata else { unreachable!("made from a map") };
            if !members.is_empty() {
                let specs = members.iter().map(|(name, out)| (name.clone(), out.spec.clone()));
                metadata.insert(SPECS.into(), Value::Map(specs.collect()));
            }
            let text = json::write(&Value::Map(metadata), json::Style::COMPACT_ASCII)?;
            let meta = PayloadOut {
                spec: Value::Null,
                parts: vec![Piece::from(text.into_bytes())],
                cut: Cut::Anywhere,
            };
            let meta = self.put_payload(format!("{base}/meta"), &meta, group, &mut written)?;
            let mut buffers = IndexMap::new();
            for (name, out) in &members {
                let key = format!("{base}/buffer/{name}");
                let payload = self.put_payload(key, out, group, &mut written);
                buffers.insert(name.clone(), payload.map_err(|e| e.with("member", name))?);
            }
            let manifest = Manifest {
                object_id,
                meta,
                buffers,
                buffer_object_ids: None,
                cleanup_keys: Vec::new(),
            };
            self.store.put(&manifest_key, &[manifest.to_json().as_bytes()], group)
        };
        match write() {
            Ok(()) => Ok(manifest_key),
            Err(error) => {
                // Best effort: the error that stopped the write is the one to report.
                for key in written {
                    let _ = self.store.remove(&key);
                }
                Err(error)
            }
        }
    }

    fn put_payload(
        &mut self,
        key: String,
        out: &PayloadOut<'_>,
        group: Option<&str>,
        written: &mut Vec<String>,
    ) -> Result<Payload> {
        let groups = cut(&out.parts, out.cut, self.chunk_bytes);
        let mut chunks = Vec::with_capacity(groups.len());
        for (i, parts) in groups.iter().enumerate() {
            let key = if groups.len() == 1 { key.clone() } else { format!("{key}/chunk/{i}") };
            self.store.put(&key, parts, group)?;
            written.push(key.clone());
            chunks.push(Chunk { key, bytes: parts.iter().map(|part| part.len() as u64).sum() });
        }
        let mut extra = IndexMap::new();
        if out.cut == Cut::Never {
            extra.insert("kind".into(), "tensor".into());
            for name in ["dtype", "shape"] {
                extra.insert(name.into(), out.spec.get(name).expect("a tensor's spec").clone());
            }
            extra.insert("metadata_bytes".into(), (super::tensor::HEADER_BYTES as u64).into());
        }
        let bytes = chunks.iter().map(|chunk| chunk.bytes).sum();
        Ok(Payload { key, bytes, chunks, extra })
    }
}

impl<S: ?Sized> std::fmt::Debug for Writer<'_, S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer")
            .field("prefix", &self.prefix)
            .field("chunk_bytes", &self.chunk_bytes)
            .finish_non_exhaustive()
    }
}

/// Removes everything that belongs to a rollout: payloads first, each manifest last, so that an
/// interrupted cleanup can be run again. What is gone already is fine. Returns how many objects
/// were removed.
pub fn cleanup<S: ObjectStore + ?Sized>(store: &mut S, reference: &Reference) -> Result<u64> {
    reference.stages.values().try_fold(0, |n, key| Ok(n + remove(store, key)?))
}

/// Removes one structured object by its manifest key; see [`cleanup`].
pub fn remove<S: ObjectStore + ?Sized>(store: &mut S, manifest_key: &str) -> Result<u64> {
    if store.get(manifest_key)?.is_none() {
        return Ok(0);
    }
    let (manifest, _) = Reader::new(store).manifest(manifest_key)?;
    let mut removed = 0;
    for key in manifest.payload_keys().chain(manifest.cleanup_keys.iter().map(String::as_str)) {
        removed += u64::from(store.remove(key)?);
    }
    removed += u64::from(store.remove(manifest_key)?);
    Ok(removed)
}

/// Groups the bytes of a payload into stored objects.
fn cut<'p>(parts: &'p [Piece<'_>], cut: Cut, limit: u64) -> Vec<Vec<&'p [u8]>> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let mut groups: Vec<Vec<&[u8]>> = Vec::new();
    let parts = parts.iter().map(|part| &**part).filter(|part| !part.is_empty());
    match cut {
        Cut::Never => groups.extend(Some(parts.collect::<Vec<_>>()).filter(|p| !p.is_empty())),
        Cut::BetweenParts if parts.clone().all(|part| part.len() <= limit) => {
            let mut room = 0;
            for part in parts {
                if part.len() > room {
                    groups.push(Vec::new());
                    room = limit;
                }
                room -= part.len();
                groups.last_mut().expect("pushed when there was no room").push(part);
            }
        }
        Cut::BetweenParts | Cut::Anywhere => {
            let mut room = 0;
            for mut part in parts {
                while !part.is_empty() {
                    if room == 0 {
                        groups.push(Vec::new());
                        room = limit;
                    }
                    let (head, tail) = part.split_at(part.len().min(room));
                    room -= head.len();
                    groups.last_mut().expect("pushed when there was no room").push(head);
                    part = tail;
                }
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(parts: &[usize], how: Cut, limit: u64) -> Vec<usize> {
        let parts: Vec<Piece<'_>> = parts.iter().map(|&n| vec![1; n].into()).collect();
        let sum = |group: &Vec<&[u8]>| group.iter().map(|part| part.len()).sum();
        cut(&parts, how, limit).iter().map(sum).collect()
    }

    #[test]
    fn payloads_are_cut_where_readers_expect() {
        assert_eq!(lengths(&[40, 40, 40], Cut::BetweenParts, 100), [80, 40]);
        assert_eq!(lengths(&[40, 0, 60, 1], Cut::BetweenParts, 100), [100, 1]);
        assert_eq!(lengths(&[40, 101], Cut::BetweenParts, 100), [100, 41], "one row is too long");
        assert_eq!(lengths(&[40, 40, 40], Cut::Anywhere, 100), [100, 20]);
        assert_eq!(lengths(&[304, 500], Cut::Never, 100), [804]);
        assert!(lengths(&[0, 0], Cut::Anywhere, 100).is_empty());
        assert!(lengths(&[], Cut::Never, 100).is_empty());
    }
}
