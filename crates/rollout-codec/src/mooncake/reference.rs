//! References: what a producer hands to consumers out of band, as JSON.

use indexmap::IndexMap;
use transport_core::{Error, ErrorKind, Result};

use crate::{Section, Value, json, value::map};

const TYPE: &str = "mooncake_dataproto_ref";

/// Where a rollout is stored and what its columns are made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Reference {
    /// 1 or 2.
    pub version: u64,
    /// Number of rows.
    pub batch_size: u64,
    /// Name of the producer's data set.
    pub namespace: String,
    /// Second segment of all keys, such as `dp0`.
    pub partition: String,
    /// Positions of the rows in the whole batch, if the producer said so.
    pub global_indexes: Option<Vec<i128>>,
    /// Manifest key of each stage.
    pub stages: IndexMap<String, String>,
    /// Where each field is.
    pub fields: IndexMap<String, FieldLocation>,
    /// Values that have no rows.
    pub meta: IndexMap<String, Value>,
    /// Fields that are made of several payloads.
    pub encoded: IndexMap<String, Encoded>,
    /// Store group that all objects belong to.
    pub storage_group: Option<String>,
}

/// Where one field is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldLocation {
    /// Stage that holds it.
    pub stage: String,
    /// Member of the stage's object.
    pub member: String,
    /// Section of the record: never [`Section::Meta`].
    pub section: Section,
}

/// A field that is made of several payloads.
#[derive(Clone, Debug, PartialEq)]
pub struct Encoded {
    /// How, such as `typed_ragged`.
    pub codec: String,
    /// Number of rows.
    pub rows: u64,
    /// What the codec needs to know beside the payloads.
    pub metadata: IndexMap<String, Value>,
    /// Member of each payload.
    pub members: IndexMap<String, String>,
}

impl Reference {
    /// Reads an exported reference of version 1 or 2.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        Self::from_value(&json::parse(bytes)?)
    }

    /// Takes an exported reference that is JSON already.
    pub fn from_value(json: &Value) -> Result<Self> {
        let corrupt = |why: &'static str| Error::new(ErrorKind::Corrupt, "import reference", why);
        let text = |json: &Value, name: &str| {
            json.get(name).and_then(Value::as_str).filter(|s| !s.is_empty()).map(str::to_owned)
        };
        if json.get("type").and_then(Value::as_str) != Some(TYPE) {
            return Err(corrupt("not a Mooncake reference"));
        }
        let version = json.get("version").and_then(Value::as_u64).unwrap_or(0);
        if !matches!(version, 1 | 2) {
            return Err(Error::new(ErrorKind::Unsupported, "import reference", "unknown version")
                .with("version", version)
                .with("known", "1, 2"));
        }
        if json.get("kind").and_then(Value::as_str) != Some("bundle_stages") {
            return Err(corrupt("unknown kind of reference"));
        }
        let entries = |name: &'static str| {
            json.get(name)
                .and_then(Value::as_map)
                .ok_or_else(|| corrupt("an entry is missing or not a map").with("entry", name))
        };
        let or_empty = |name: &'static str| match json.get(name) {
            None => Ok(IndexMap::new()),
            Some(_) => entries(name).cloned(),
        };
        let stages = entries("stage_refs")?
            .iter()
            .map(|(stage, value)| Some((stage.clone(), text(value, "manifest_key")?)))
            .collect::<Option<IndexMap<_, _>>>()
            .ok_or_else(|| corrupt("a stage has no manifest_key"))?;
        let mut fields = IndexMap::new();
        for (name, value) in entries("field_index")? {
            let bad = |why| corrupt(why).with("field", name);
            let section = match value.get("section").and_then(Value::as_str) {
                Some("batch") => Section::Batch,
                Some("non_tensor_batch") => Section::NonTensor,
                _ => return Err(bad("unknown section")),
            };
            let (Some(stage), Some(member)) = (text(value, "stage"), text(value, "member")) else {
                return Err(bad("no stage or no member"));
            };
            if name.is_empty() || !stages.contains_key(&stage) {
                return Err(bad("empty name or unknown stage"));
            }
            fields.insert(name.clone(), FieldLocation { stage, member, section });
        }
        let mut encoded = IndexMap::new();
        for (name, value) in or_empty("encoded_non_tensor")? {
            if !fields.contains_key(&name) {
                return Err(corrupt("an encoded field is not indexed").with("field", name));
            }
            let field = Encoded::from_value(&value).map_err(|e| e.with("field", &name))?;
            encoded.insert(name, field);
        }
        let storage_group = match json.get("storage_group_id") {
            None | Some(Value::Null) if version == 1 => None,
            Some(Value::Str(id)) if !id.is_empty() => Some(id.clone()),
            _ => return Err(corrupt("storage_group_id is missing or not a text")),
        };
        let indexes = |item: &Value| match item {
            Value::Int(n) => Ok(*n),
            _ => Err(corrupt("global_indexes holds something else than whole numbers")),
        };
        let global_indexes = match json.get("global_indexes") {
            None | Some(Value::Null) => None,
            Some(Value::List(items)) => Some(items.iter().map(indexes).collect::<Result<_>>()?),
            _ => return Err(corrupt("global_indexes is not a list")),
        };
        Ok(Self {
            version,
            batch_size: json
                .get("batch_size")
                .and_then(Value::as_u64)
                .ok_or_else(|| corrupt("no batch_size"))?,
            namespace: text(json, "namespace").unwrap_or_else(|| "default".into()),
            partition: text(json, "partition").unwrap_or_else(|| "default".into()),
            global_indexes,
            stages,
            fields,
            meta: or_empty("meta_info")?,
            encoded,
            storage_group,
        })
    }

    /// The exported form, entry for entry in the order of Mooncake's writer.
    pub fn to_value(&self) -> Value {
        fn entries<T>(items: &IndexMap<String, T>, value: impl Fn(&T) -> Value) -> Value {
            Value::Map(items.iter().map(|(name, item)| (name.clone(), value(item))).collect())
        }
        let text = |text: &String| Value::Str(text.clone());
        let global = self.global_indexes.as_ref().map_or(Value::Null, |list| {
            Value::List(list.iter().copied().map(Value::Int).collect())
        });
        let mut value = map([
            ("type", TYPE.into()),
            ("version", self.version.into()),
            ("kind", "bundle_stages".into()),
            ("batch_size", self.batch_size.into()),
            ("namespace", text(&self.namespace)),
            ("partition", text(&self.partition)),
            ("global_indexes", global),
            ("stage_refs", entries(&self.stages, |key| map([("manifest_key", text(key))]))),
            (
                "field_index",
                entries(&self.fields, |field| {
                    map([
                        ("stage", text(&field.stage)),
                        ("member", text(&field.member)),
                        ("section", field.section.name().into()),
                    ])
                }),
            ),
            ("meta_info", Value::Map(self.meta.clone())),
            ("encoded_non_tensor", entries(&self.encoded, Encoded::to_value)),
        ]);
        if let (Some(group), Value::Map(entries)) = (&self.storage_group, &mut value) {
            entries.insert("storage_group_id".into(), text(group));
        }
        value
    }

    /// The exported form as JSON; refuses meta values that JSON cannot hold.
    pub fn to_json(&self, style: json::Style) -> Result<String> {
        json::write(&self.to_value(), style)
    }
}

impl Encoded {
    pub(crate) fn from_value(value: &Value) -> Result<Self> {
        let corrupt = |why: &'static str| Error::new(ErrorKind::Corrupt, "import reference", why);
        let codec = value.get("codec").and_then(Value::as_str);
        let rows = value.get("rows").and_then(Value::as_u64);
        let (Some(codec), Some(rows)) = (codec, rows) else {
            return Err(corrupt("an encoded field has no codec or no rows"));
        };
        let members = value
            .get("payload_members")
            .and_then(Value::as_map)
            .and_then(|members| {
                let member = |(name, member): (&String, &Value)| {
                    Some((name.clone(), member.as_str()?.to_owned()))
                };
                members.iter().map(member).collect()
            })
            .ok_or_else(|| corrupt("an encoded field has no payload_members"))?;
        let metadata = match value.get("metadata") {
            None | Some(Value::Null) => IndexMap::new(),
            Some(Value::Map(map)) => map.clone(),
            Some(_) => return Err(corrupt("the metadata of an encoded field is not a map")),
        };
        Ok(Self { codec: codec.to_owned(), rows, metadata, members })
    }

    pub(crate) fn to_value(&self) -> Value {
        let members = self.members.iter();
        map([
            ("codec", Value::Str(self.codec.clone())),
            ("rows", self.rows.into()),
            ("metadata", Value::Map(self.metadata.clone())),
            (
                "payload_members",
                Value::Map(members.map(|(n, m)| (n.clone(), Value::Str(m.clone()))).collect()),
            ),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictions_are_refused() {
        let good = r#"{"type":"mooncake_dataproto_ref","version":2,"kind":"bundle_stages",
            "batch_size":1,"namespace":"n","partition":"p","global_indexes":[3],
            "stage_refs":{"s":{"manifest_key":"k"}},
            "field_index":{"f":{"stage":"s","member":"m","section":"batch"}},
            "meta_info":{},"encoded_non_tensor":{},"storage_group_id":"g"}"#;
        let reference = Reference::parse(good.as_bytes()).unwrap();
        let again = reference.to_json(json::Style::PRETTY).unwrap();
        assert_eq!(Reference::parse(again.as_bytes()).unwrap(), reference);
        for (from, to) in [
            ("mooncake_dataproto_ref", "other"),
            ("\"version\":2", "\"version\":3"),
            ("bundle_stages", "bundle"),
            ("\"stage\":\"s\"", "\"stage\":\"t\""),
            ("\"section\":\"batch\"", "\"section\":\"meta_info\""),
            ("\"storage_group_id\":\"g\"", "\"storage_group_id\":null"),
            ("[3]", "[3.5]"),
            ("\"batch_size\":1", "\"batch_size\":-1"),
            ("\"encoded_non_tensor\":{}", "\"encoded_non_tensor\":{\"x\":{}}"),
        ] {
            let bad = good.replace(from, to);
            assert_ne!(bad, good, "{from}");
            assert!(Reference::parse(bad.as_bytes()).is_err(), "{to}");
        }
    }
}
