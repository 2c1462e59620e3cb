//! What `rollout decode`, `encode` and `inspect` do, without files or a terminal.

use std::{collections::HashSet, num::NonZeroU64};

use indexmap::IndexMap;
use transport_core::{Error, ErrorKind, Result};

use crate::{
    Codec, Library, Rollout, Schema, Value,
    mooncake::{
        DEFAULT_CHUNK_BYTES, Dump, MemberData, ObjectStore, Place, Reader, Reference, SPECS, Writer,
    },
    notation::{self, Layout},
    restore,
    value::map,
};

/// The decoded record of the rollout that `reference` names.
pub fn decode(objects: &Dump, reference: &Reference, layout: Layout) -> Result<Value> {
    decode_stored(&objects.objects, reference, layout)
}

/// [`decode`] out of any store.
pub fn decode_stored<S: ObjectStore + ?Sized>(
    store: &S,
    reference: &Reference,
    layout: Layout,
) -> Result<Value> {
    notation::decoded(&Reader::new(store).rollout(reference)?, layout)
}

/// The decoded record of the members of one object.
pub fn decode_members(objects: &Dump, manifest_key: &str) -> Result<Value> {
    decode_stored_members(&objects.objects, manifest_key)
}

/// [`decode_members`] out of any store.
pub fn decode_stored_members<S: ObjectStore + ?Sized>(
    store: &S,
    manifest_key: &str,
) -> Result<Value> {
    Reader::new(store).members(manifest_key)?.decoded()
}

/// How to encode.
#[derive(Clone, Debug)]
pub struct EncodeOptions {
    /// First segment of all keys.
    pub prefix: String,
    /// Where the rollout goes.
    pub place: Place,
    /// Bytes of the largest stored object.
    pub chunk_bytes: NonZeroU64,
    /// The first object id; the others count up from it. Random if `None`.
    pub first_id: Option<u128>,
    /// A reference whose codecs, element types and structure to use again.
    pub like: Option<Reference>,
    /// What fields are, if no reference says so.
    pub schema: Schema,
}

impl Default for EncodeOptions {
    /// Prefix `bundle`, chunks of 64 MiB, random ids, and every field what its rows look like.
    fn default() -> Self {
        Self {
            prefix: "bundle".into(),
            place: Place::default(),
            chunk_bytes: NonZeroU64::new(DEFAULT_CHUNK_BYTES).expect("not zero"),
            first_id: None,
            like: None,
            schema: Schema::new(),
        }
    }
}

/// Stored objects and reference of a decoded record: the inverse of [`decode`] and of
/// [`decode_members`]. There is no reference for a record of members.
pub fn encode(decoded: &Value, options: &EncodeOptions) -> Result<(Dump, Option<Reference>)> {
    let mut dump = Dump::default();
    let reference = encode_stored(&mut dump.objects, decoded, options)?;
    Ok((dump, reference))
}

/// [`encode`] into any store.
pub fn encode_stored<S: ObjectStore + ?Sized>(
    store: &mut S,
    decoded: &Value,
    options: &EncodeOptions,
) -> Result<Option<Reference>> {
    let mut writer = Writer::new(store, &options.prefix)?.chunk_bytes(options.chunk_bytes);
    if let Some(first) = options.first_id {
        let mut next = first;
        writer = writer.ids(move || {
            next += 1;
            next - 1
        });
    }
    let part = |name: &'static str| {
        decoded.get(name).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, "encode decoded record", "an entry is missing")
                .with("entry", name)
        })
    };
    if part("layout")?.as_str() == Some("members") {
        let mut metadata = part("metadata")?.as_map().cloned().unwrap_or_default();
        let specs = metadata.shift_remove(SPECS);
        let values = restore::section(part("values")?, part("kinds")?)?;
        let members = members(values, specs.as_ref())?;
        writer.put_members(&metadata, &members, &options.place.partition)?;
        return Ok(None);
    }
    let (rollout, schema) = rollout(decoded, options)?;
    let inferred = |name: &&String| schema.fields().get(*name).is_none_or(|field| field.inferred);
    let inferred: HashSet<String> = rollout.non_tensor.keys().filter(inferred).cloned().collect();
    writer.put(&rollout, &options.place, &inferred).map(Some)
}

fn members(
    values: IndexMap<String, Value>,
    specs: Option<&Value>,
) -> Result<IndexMap<String, MemberData>> {
    values
        .into_iter()
        .map(|(name, value)| {
            let spec = specs.and_then(|specs| specs.get(&name));
            let encoding = spec.and_then(|spec| spec.get("encoding")).and_then(Value::as_str);
            let data = match value {
                Value::Bytes(bytes) => MemberData::Bytes(bytes),
                Value::Array(array) if encoding == Some("bytes") => {
                    MemberData::Bytes(array.data().clone())
                }
                Value::Array(array) => MemberData::Array(array),
                other => {
                    return Err(Error::new(
                        ErrorKind::InvalidInput,
                        "encode decoded record",
                        "a member is neither bytes nor an array",
                    )
                    .with("member", name)
                    .with("found", other.kind()));
                }
            };
            Ok((name, data))
        })
        .collect()
}

/// The rollout of a decoded record, and the schema that was used.
fn rollout(decoded: &Value, options: &EncodeOptions) -> Result<(Rollout<'static>, Schema)> {
    let schema = match &options.like {
        Some(reference) => Schema::from_reference(reference)?,
        None => options.schema.clone(),
    };
    let (Some(values), Some(kinds)) = (decoded.get("values"), decoded.get("kinds")) else {
        return Err(Error::new(
            ErrorKind::Corrupt,
            "encode decoded record",
            "no values or no kinds",
        ));
    };
    let rollout = match decoded.get("layout").and_then(Value::as_str) {
        Some("flat") => {
            let mut values = restore::section(values, kinds)?;
            nested_arrays(&mut values, options.like.as_ref())?;
            schema.rollout(&values)?
        }
        Some("envelope") => {
            let section = |name: &str| match (values.get(name), kinds.get(name)) {
                (Some(values), Some(kinds)) => restore::section(values, kinds),
                _ => Ok(IndexMap::new()),
            };
            let mut non_tensor = section("non_tensor_batch")?;
            nested_arrays(&mut non_tensor, options.like.as_ref())?;
            schema.rollout_of_sections(&section("batch")?, &non_tensor, &section("meta_info")?)?
        }
        other => {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "encode decoded record",
                "unknown layout",
            )
            .with("layout", other.unwrap_or("none")));
        }
    };
    Ok((rollout, schema))
}

/// Arrays deep inside nested rows, which only the reference knows of.
fn nested_arrays(values: &mut IndexMap<String, Value>, like: Option<&Reference>) -> Result<()> {
    for (name, encoded) in like.iter().flat_map(|reference| &reference.encoded) {
        let (Some(Value::List(rows)), "structured_recursive") =
            (values.get_mut(name), encoded.codec.as_str())
        else {
            continue;
        };
        let text = |value: Option<&Value>| value.and_then(Value::as_str).map(str::to_owned);
        let root = text(encoded.metadata.get("root_path")).unwrap_or_default();
        let leaves = encoded.metadata.get("leaves").and_then(Value::as_list).unwrap_or_default();
        for leaf in leaves {
            let about = |entry: &str| text(leaf.get("metadata").and_then(|m| m.get(entry)));
            let codec = Codec::parse(&text(leaf.get("codec")).unwrap_or_default())?;
            let library = match (codec, about("row_format").as_deref()) {
                (Codec::RaggedTensor, _) => Library::Torch,
                (Codec::TypedRagged, Some("ndarray")) => Library::Numpy,
                _ => continue,
            };
            let path = text(leaf.get("path")).unwrap_or_default();
            let steps = path.strip_prefix(&root).and_then(restore::steps);
            let (Some(steps), Some(dtype)) = (steps, about("dtype")) else { continue };
            let dtype = dtype.parse()?;
            for row in rows.iter_mut() {
                restore::arrays_at(row, &steps, library, dtype)?;
            }
        }
    }
    Ok(())
}

/// Fields, element types, rows and bytes of a rollout: for people and tests.
pub fn inspect(objects: &Dump, reference: &Reference) -> Result<Value> {
    let reader = Reader::new(&objects.objects);
    let mut stages = IndexMap::new();
    let mut payload_bytes = IndexMap::new();
    for (stage, key) in &reference.stages {
        let (manifest, _) = reader.manifest(key)?;
        let keys = manifest.payload_keys().count() as u64 + 1;
        let bytes = manifest.buffers.values().fold(0u64, |n, p| n.saturating_add(p.bytes));
        stages.insert(
            stage.clone(),
            map([
                ("manifest_key", Value::Str(key.clone())),
                ("objects", keys.into()),
                ("payload_bytes", bytes.into()),
            ]),
        );
        for (member, payload) in manifest.buffers {
            payload_bytes.insert((stage.clone(), member), payload.bytes);
        }
    }
    let rollout = reader.rollout(reference)?;
    let fields = reference.fields.iter().map(|(name, location)| {
        let column = rollout.column(name).expect("every indexed field was read");
        let encoded = reference.encoded.get(name);
        let own = [location.member.clone()];
        let members: Vec<&String> = match encoded {
            Some(encoded) => encoded.members.values().collect(),
            None => own.iter().collect(),
        };
        let bytes = members
            .iter()
            .filter_map(|member| payload_bytes.get(&(location.stage.clone(), (*member).clone())));
        let dtype = column.dtype().map_or(Value::Null, |dtype| dtype.name().into());
        let about = map([
            ("section", location.section.name().into()),
            ("codec", encoded.map_or("array", |encoded| &encoded.codec).into()),
            ("dtype", dtype),
            ("rows", column.rows().into()),
            ("bytes", bytes.sum::<u64>().into()),
        ]);
        (name.clone(), about)
    });
    Ok(map([
        ("rows", reference.batch_size.into()),
        ("stages", Value::Map(stages)),
        ("fields", Value::Map(fields.collect())),
        ("meta", Value::List(reference.meta.keys().cloned().map(Value::Str).collect())),
    ]))
}
