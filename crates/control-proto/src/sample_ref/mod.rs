//! References to samples: the lines through which producers tell consumers what is published.
//!
//! A line has exactly 14 fields, and 7 per tensor. Where the bytes are is said in `metadata`:
//!
//! | key in `metadata` | location |
//! |---|---|
//! | `mooncake_arena` (older: `mooncake_nvlink`) | [`Arena`](transport_core::Location::Arena) |
//! | `mooncake_gpu_direct` | [`Token`](transport_core::Location::Token) |
//! | neither | [`Store`](transport_core::Location::Store) |
//!
//! The arena's object holds `session`, `control` and `addresses`, and three additions that other
//! readers ignore: `epoch`, `seqs` and `holder`.

mod locate;

use std::fmt;

use indexmap::IndexMap;
use serde_json::{Map, Value};
use transport_core::{Error, ErrorKind, FeatureName, Result, SampleId, TensorMeta};

use crate::{
    capture::{Faults, parse_meta},
    json::{RawObject, Text, write_number, write_string, write_value},
};

const READ: Faults = Faults { kind: ErrorKind::Protocol, operation: "read sample ref" };

/// Longest line that is read: 1 MiB.
pub const MAX_LINE_BYTES: usize = 1 << 20;

/// Most tensors of one sample.
const MAX_FEATURES: usize = 64;

const FIELDS: [&str; 14] = [
    "sample_id",
    "run_id",
    "source_task_id",
    "feature_store_uri",
    "feature_keys",
    "feature_specs",
    "strategy",
    "schema_version",
    "target_model_version",
    "draft_weight_version",
    "tokenizer_version",
    "num_tokens",
    "estimated_bytes",
    "metadata",
];

const SPEC_FIELDS: [&str; 7] =
    ["name", "shape", "dtype", "device_hint", "required", "target_repr", "target_meta"];

/// One published sample, as producers announce it to consumers.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct SampleRef {
    /// Sample within its store.
    pub sample_id: SampleId,
    /// Training run.
    pub run_id: String,
    /// Prompt task that it came from.
    pub source_task_id: Option<String>,
    /// `mooncake://{store_id}/{sample_id}`, or `mooncake+gpu://{session}/{store_id}/{sample_id}`.
    pub feature_store_uri: String,
    /// `{sample_id}/{name}` by name, in the order of reading.
    pub feature_keys: IndexMap<FeatureName, String>,
    /// What each tensor is.
    pub feature_specs: IndexMap<FeatureName, FeatureSpec>,
    /// Training strategy, such as `dspark`.
    pub strategy: String,
    /// Version of this record: 1.
    pub schema_version: u64,
    /// Version of the model that was captured; `unknown` by default.
    pub target_model_version: String,
    /// Version of the draft model, if it matters.
    pub draft_weight_version: Option<String>,
    /// Version of the tokenizer; `unknown` by default.
    pub tokenizer_version: String,
    /// Tokens of the prompt.
    pub num_tokens: u64,
    /// Bytes of all tensors.
    pub estimated_bytes: u64,
    /// Whatever else is said, among it the generation and the location. May hold a control token,
    /// so `Debug` shows only its keys.
    pub metadata: Map<String, Value>,
}

/// What one tensor of a [`SampleRef`] is.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct FeatureSpec {
    /// Element type and shape.
    pub meta: TensorMeta,
    /// Device that it is meant for.
    pub device_hint: Option<String>,
    /// Whether training needs it; true by default.
    pub required: bool,
    /// How a target is represented: `logits`, `pruned_logits` or `hidden_state`.
    pub target_repr: Option<String>,
    /// More about a target.
    pub target_meta: Map<String, Value>,
}

impl FeatureSpec {
    /// A required tensor.
    pub fn new(meta: TensorMeta) -> Self {
        Self { meta, device_hint: None, required: true, target_repr: None, target_meta: Map::new() }
    }
}

impl SampleRef {
    /// Reads a line. Missing fields that have a default get it; unknown ones are refused.
    pub fn parse(line: &[u8]) -> Result<Self> {
        if line.len() > MAX_LINE_BYTES {
            return Err(READ.error("the line is too long").with("max_bytes", MAX_LINE_BYTES));
        }
        let text = std::str::from_utf8(line)
            .map_err(|e| READ.error("the line is not UTF-8").with("at", e.valid_up_to()))?;
        let object = known_fields(text, &FIELDS)?;
        let sample_id: SampleId = READ.parse(&object, "sample_id")?;
        Self::parse_fields(&object, sample_id.clone())
            .map_err(|error| error.with("sample", sample_id))
    }

    fn parse_fields(object: &RawObject<'_>, sample_id: SampleId) -> Result<Self> {
        let text_or = |name: &'static str, default: &str| match object.get(name) {
            Some(_) => READ.text(object, name),
            None => Ok(default.to_owned()),
        };
        let number = |name, default| {
            Ok::<u64, Error>(object.optional(name).map_err(|f| READ.field(f))?.unwrap_or(default))
        };
        if !object.contains("source_task_id") {
            return Err(READ.field("source_task_id")); // may be null, but has no default
        }
        let mut feature_keys = IndexMap::new();
        for (name, raw) in features(object, "feature_keys")?.iter() {
            let Text(key) =
                serde_json::from_str(raw).map_err(|e| READ.wrong_type("feature_keys", &e))?;
            feature_keys.insert(FeatureName::new(name)?, key.into_owned());
        }
        let mut feature_specs = IndexMap::new();
        for (name, raw) in features(object, "feature_specs")?.iter() {
            let name = FeatureName::new(name)?;
            let spec = parse_spec(&name, raw)
                .map_err(|error| error.with("feature", format_args!("{:?}", name.as_str())))?;
            feature_specs.insert(name, spec);
        }
        Ok(Self {
            sample_id,
            run_id: READ.text(object, "run_id")?,
            source_task_id: optional_text(object, "source_task_id")?,
            feature_store_uri: READ.text(object, "feature_store_uri")?,
            feature_keys,
            feature_specs,
            strategy: READ.text(object, "strategy")?,
            schema_version: number("schema_version", 1)?,
            target_model_version: text_or("target_model_version", "unknown")?,
            draft_weight_version: optional_text(object, "draft_weight_version")?,
            tokenizer_version: text_or("tokenizer_version", "unknown")?,
            num_tokens: number("num_tokens", 0)?,
            estimated_bytes: number("estimated_bytes", 0)?,
            metadata: optional_map(object, "metadata")?,
        })
    }

    /// Appends the line: all 14 fields, compact, with its newline.
    pub fn write(&self, out: &mut Vec<u8>) {
        let mut fields = FIELDS.iter();
        let mut field = |out: &mut Vec<u8>| {
            let name = fields.next().expect("14 fields are written");
            out.push(if *name == FIELDS[0] { b'{' } else { b',' });
            write_string(out, name);
            out.push(b':');
        };
        let text = |out: &mut Vec<u8>, text: &str| write_string(out, text);
        field(out);
        text(out, self.sample_id.as_str());
        field(out);
        text(out, &self.run_id);
        field(out);
        write_value(out, &self.source_task_id);
        field(out);
        text(out, &self.feature_store_uri);
        field(out);
        write_map(out, &self.feature_keys, |out, _, key| write_string(out, key));
        field(out);
        write_map(out, &self.feature_specs, write_spec);
        field(out);
        text(out, &self.strategy);
        field(out);
        write_number(out, self.schema_version);
        field(out);
        text(out, &self.target_model_version);
        field(out);
        write_value(out, &self.draft_weight_version);
        field(out);
        text(out, &self.tokenizer_version);
        field(out);
        write_number(out, self.num_tokens);
        field(out);
        write_number(out, self.estimated_bytes);
        field(out);
        write_value(out, &self.metadata);
        out.extend_from_slice(b"}\n");
    }
}

impl fmt::Debug for SampleRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SampleRef")
            .field("sample_id", &self.sample_id)
            .field("run_id", &self.run_id)
            .field("source_task_id", &self.source_task_id)
            .field("feature_store_uri", &self.feature_store_uri)
            .field("feature_specs", &self.feature_specs)
            .field("strategy", &self.strategy)
            .field("num_tokens", &self.num_tokens)
            .field("metadata", &self.metadata.keys())
            .finish_non_exhaustive()
    }
}

fn features<'a>(object: &RawObject<'a>, field: &'static str) -> Result<RawObject<'a>> {
    let raw = object.get(field).ok_or_else(|| READ.missing(field))?;
    let features = RawObject::parse(raw).map_err(|fault| READ.object(fault))?;
    if features.len() > MAX_FEATURES {
        return Err(READ.error("too many tensors").with("found", features.len()));
    }
    Ok(features)
}

/// An object none of whose fields is unknown.
fn known_fields<'a>(text: &'a str, known: &[&str]) -> Result<RawObject<'a>> {
    let object = RawObject::parse(text).map_err(|fault| READ.object(fault))?;
    if let Some((name, _)) = object.iter().find(|(name, _)| !known.contains(name)) {
        let name: String = name.chars().take(80).collect();
        return Err(READ
            .error("a field is unknown")
            .with("field", format_args!("{name:?}"))
            .remedy("update the reader, or have the writer leave the field out"));
    }
    Ok(object)
}

fn optional_text(object: &RawObject<'_>, field: &'static str) -> Result<Option<String>> {
    object.get(field).map(|_| READ.text(object, field)).transpose()
}

fn optional_map(object: &RawObject<'_>, field: &'static str) -> Result<Map<String, Value>> {
    Ok(object.optional(field).map_err(|field| READ.field(field))?.unwrap_or_default())
}

fn parse_spec(name: &FeatureName, json: &str) -> Result<FeatureSpec> {
    let object = known_fields(json, &SPEC_FIELDS)?;
    if READ.text(&object, "name")? != name.as_str() {
        return Err(READ.error("a spec is for another tensor than its key says"));
    }
    Ok(FeatureSpec {
        meta: parse_meta(&object, READ)?,
        device_hint: optional_text(&object, "device_hint")?,
        required: object.optional("required").map_err(|f| READ.field(f))?.unwrap_or(true),
        target_repr: optional_text(&object, "target_repr")?,
        target_meta: optional_map(&object, "target_meta")?,
    })
}

fn write_spec(out: &mut Vec<u8>, name: &FeatureName, spec: &FeatureSpec) {
    out.extend_from_slice(b"{\"name\":");
    write_string(out, name.as_str());
    out.extend_from_slice(b",\"shape\":");
    write_value(out, spec.meta.shape());
    out.extend_from_slice(b",\"dtype\":");
    write_string(out, spec.meta.dtype().name());
    out.extend_from_slice(b",\"device_hint\":");
    write_value(out, &spec.device_hint);
    out.extend_from_slice(b",\"required\":");
    write_value(out, &spec.required);
    out.extend_from_slice(b",\"target_repr\":");
    write_value(out, &spec.target_repr);
    out.extend_from_slice(b",\"target_meta\":");
    write_value(out, &spec.target_meta);
    out.push(b'}');
}

fn write_map<T>(
    out: &mut Vec<u8>,
    map: &IndexMap<FeatureName, T>,
    write: impl Fn(&mut Vec<u8>, &FeatureName, &T),
) {
    out.push(b'{');
    for (i, (name, value)) in map.iter().enumerate() {
        if i > 0 {
            out.push(b',');
        }
        write_string(out, name.as_str());
        out.push(b':');
        write(out, name, value);
    }
    out.push(b'}');
}

#[cfg(test)]
mod tests {
    use transport_core::Generation;

    use super::*;

    pub(super) fn line(metadata: &str) -> String {
        format!(
            r#"{{"sample_id":"r:t","run_id":"r","source_task_id":null,"feature_store_uri":"mooncake://s/r:t","feature_keys":{{"x":"r:t/x"}},"feature_specs":{{"x":{{"name":"x","shape":[1,2],"dtype":"int64"}}}},"strategy":"dflash","metadata":{metadata}}}"#
        )
    }

    #[test]
    fn missing_defaults_are_filled_and_unknown_fields_refused() {
        let parsed = SampleRef::parse(line(r#"{"generation":3}"#).as_bytes()).unwrap();
        assert_eq!((&*parsed.tokenizer_version, parsed.schema_version), ("unknown", 1));
        assert!(parsed.feature_specs["x"].required);
        assert_eq!(parsed.descriptor().unwrap().sample.generation, Generation(3));
        for (from, to, why) in [
            ("\"strategy\"", "\"later\":1,\"strategy\"", "unknown"),
            ("\"name\":\"x\"", "\"name\":\"x\",\"later\":1", "unknown"),
            ("\"name\":\"x\"", "\"name\":\"y\"", "another tensor"),
            ("\"source_task_id\":null,", "", "source_task_id"),
            ("\"run_id\":\"r\",", "", "run_id"),
            ("\"run_id\":\"r\"", "\"run_id\":\"r\",\"run_id\":\"r\"", "twice"),
        ] {
            let error = SampleRef::parse(line("{}").replace(from, to).as_bytes()).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
