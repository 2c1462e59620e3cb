//! References to samples: the lines through which producers tell consumers what is published.
//!
//! A line has exactly 14 fields, and 7 per tensor. Where the bytes are is said in `metadata`:
//!
//! | key in `metadata` | location |
//! |---|---|
//! | `mooncake_arena` (older: `mooncake_nvlink`) | [`Location::Arena`] |
//! | `mooncake_gpu_direct` | [`Location::Token`] |
//! | neither | [`Location::Store`] |
//!
//! The arena's object holds `session`, `control` and `addresses`, and three additions that other
//! readers ignore: `epoch`, `seqs` and `holder`.

use std::fmt;

use indexmap::IndexMap;
use serde_json::{Map, Value, json};
use transport_core::{
    ArenaLocation, Descriptor, Epoch, Error, ErrorKind, FeatureDescriptor, FeatureName, Generation,
    Location, Result, SampleId, SampleKey, Sequence, StoreId, TensorMeta, TokenLocation,
};

use crate::{
    capture::{
        Faults, checked_nbytes, control_endpoint, feature_address, parse_meta, token_transport,
    },
    json::{RawObject, Text, bounded_list, write_number, write_string, write_value},
};

const READ: Faults = Faults { kind: ErrorKind::Protocol, operation: "read sample ref" };
const LOCATE: Faults = Faults { kind: ErrorKind::Protocol, operation: "locate sample" };

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
    /// Announces what `descriptor` describes.
    ///
    /// `num_tokens` is the second dimension of the first tensor that has one.
    pub fn new(
        descriptor: &Descriptor,
        run_id: impl Into<String>,
        source_task_id: Option<String>,
        strategy: impl Into<String>,
    ) -> Result<Self> {
        let Descriptor { sample, features, aux_layer_ids, location, .. } = descriptor;
        let SampleKey { store_id, sample_id, generation } = sample;
        let mut metadata = Map::new();
        metadata.insert("generation".into(), generation.0.into());
        if let Some(layers) = aux_layer_ids {
            metadata.insert("aux_layer_ids".into(), layers.clone().into());
        }
        let addresses = || features.iter().filter_map(|(n, f)| Some((n, f, f.address?.0)));
        let feature_store_uri = match location {
            Location::Store => format!("mooncake://{store_id}/{sample_id}"),
            Location::Arena(arena) => {
                let numbers = |numbers: Vec<(&FeatureName, u64)>| -> Value {
                    numbers
                        .into_iter()
                        .map(|(n, x)| (n.to_string(), Value::from(x)))
                        .collect::<Map<_, _>>()
                        .into()
                };
                let mut place = Map::new();
                place.insert("session".into(), arena.session.to_string().into());
                place.insert("control".into(), arena.control.to_string().into());
                place.insert(
                    "addresses".into(),
                    numbers(addresses().map(|(n, _, a)| (n, a)).collect()),
                );
                if let Some(epoch) = arena.epoch {
                    place.insert("epoch".into(), epoch.0.into());
                }
                let seqs: Vec<_> =
                    features.iter().filter_map(|(n, f)| Some((n, f.seq?.0))).collect();
                if !seqs.is_empty() {
                    place.insert("seqs".into(), numbers(seqs));
                }
                if let Some(holder) = &arena.holder {
                    place.insert("holder".into(), holder.as_str().into());
                }
                metadata.insert("mooncake_arena".into(), place.into());
                format!("mooncake://{store_id}/{sample_id}")
            }
            Location::Token(token) => {
                let features: Map<_, _> = addresses()
                    .map(|(name, feature, address)| {
                        let nbytes = feature.meta.nbytes();
                        (name.to_string(), json!({"address": address, "nbytes": nbytes}))
                    })
                    .collect();
                metadata.insert("transport".into(), "sglang_server_capture_gpu_direct".into());
                metadata.insert(
                    "mooncake_gpu_direct".into(),
                    json!({
                        "transport": token.transport,
                        "session_id": token.session.to_string(),
                        "control_endpoint": token.control.to_string(),
                        "control_token": token.token,
                        "features": features,
                    }),
                );
                format!("mooncake+gpu://{}/{store_id}/{sample_id}", token.session)
            }
            _ => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "write sample ref",
                    "the location has no form in a ref",
                )
                .with("sample", sample));
            }
        };
        let tokens = features.values().find_map(|f| f.meta.shape().get(1).copied());
        Ok(Self {
            sample_id: sample_id.clone(),
            run_id: run_id.into(),
            source_task_id,
            feature_store_uri,
            feature_keys: features
                .keys()
                .map(|n| (n.clone(), format!("{sample_id}/{n}")))
                .collect(),
            feature_specs: features
                .iter()
                .map(|(n, f)| (n.clone(), FeatureSpec::new(f.meta.clone())))
                .collect(),
            strategy: strategy.into(),
            schema_version: 1,
            target_model_version: "unknown".into(),
            draft_weight_version: None,
            tokenizer_version: "unknown".into(),
            num_tokens: tokens.unwrap_or(0),
            estimated_bytes: checked_nbytes(features.values().map(|f| &f.meta), READ)?,
            metadata,
        })
    }

    /// Reads a line. Missing fields that have a default get it; unknown ones are refused.
    pub fn parse(line: &[u8]) -> Result<Self> {
        if line.len() > MAX_LINE_BYTES {
            return Err(READ.error("the line is too long").with("max_bytes", MAX_LINE_BYTES));
        }
        let text = std::str::from_utf8(line)
            .map_err(|e| READ.error("the line is not UTF-8").with("at", e.valid_up_to()))?;
        let object = known_fields(text, &FIELDS)?;
        let text_or = |name: &'static str, default: &str| match object.get(name) {
            Some(_) => READ.text(&object, name),
            None => Ok(default.to_owned()),
        };
        let number = |name, default| {
            Ok::<u64, Error>(object.optional(name).map_err(|f| READ.field(f))?.unwrap_or(default))
        };
        if !object.contains("source_task_id") {
            return Err(READ.field("source_task_id")); // may be null, but has no default
        }
        let mut feature_keys = IndexMap::new();
        for (name, raw) in features(&object, "feature_keys")?.iter() {
            let Text(key) = serde_json::from_str(raw).map_err(|_| READ.field("feature_keys"))?;
            feature_keys.insert(FeatureName::new(name)?, key.into_owned());
        }
        let mut feature_specs = IndexMap::new();
        for (name, raw) in features(&object, "feature_specs")?.iter() {
            let name = FeatureName::new(name)?;
            let spec = parse_spec(&name, raw)
                .map_err(|error| error.with("feature", format_args!("{:?}", name.as_str())))?;
            feature_specs.insert(name, spec);
        }
        Ok(Self {
            sample_id: READ.parse(&object, "sample_id")?,
            run_id: READ.text(&object, "run_id")?,
            source_task_id: optional_text(&object, "source_task_id")?,
            feature_store_uri: READ.text(&object, "feature_store_uri")?,
            feature_keys,
            feature_specs,
            strategy: READ.text(&object, "strategy")?,
            schema_version: number("schema_version", 1)?,
            target_model_version: text_or("target_model_version", "unknown")?,
            draft_weight_version: optional_text(&object, "draft_weight_version")?,
            tokenizer_version: text_or("tokenizer_version", "unknown")?,
            num_tokens: number("num_tokens", 0)?,
            estimated_bytes: number("estimated_bytes", 0)?,
            metadata: optional_map(&object, "metadata")?,
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

    /// What the ref says about identity, tensors and location.
    pub fn descriptor(&self) -> Result<Descriptor> {
        let text = serde_json::to_string(&self.metadata).expect("JSON values are serialisable");
        let metadata = RawObject::parse(&text).map_err(|fault| LOCATE.object(fault))?;
        let generation = metadata.field("generation").map_err(|_| {
            LOCATE.error("the metadata has no generation").with("sample", &self.sample_id)
        })?;
        let named = |name| {
            metadata.get(name).map(|raw| RawObject::parse(raw).map_err(|f| LOCATE.object(f)))
        };
        let arena = named("mooncake_arena").transpose()?;
        let nvlink = named("mooncake_nvlink").transpose()?;
        let token = named("mooncake_gpu_direct").transpose()?;
        let (location, places) = match (arena, nvlink, token) {
            (None, None, None) => (Location::Store, Places::default()),
            (Some(object), None, None) | (None, Some(object), None) => locate_arena(&object)?,
            (None, None, Some(object)) => locate_token(&object)?,
            _ => return Err(LOCATE.error("the metadata names two locations")),
        };
        let store_id = self.store_id(&location)?;
        let sample = SampleKey::new(store_id, self.sample_id.clone(), Generation(generation));
        let mut features = IndexMap::with_capacity(self.feature_keys.len());
        for name in self.feature_keys.keys() {
            let lost = |why| LOCATE.error(why).with("key", sample.object(name));
            let spec = self.feature_specs.get(name).ok_or_else(|| lost("a key has no spec"))?;
            let place = places.get(name.as_str()).copied().unwrap_or_default();
            if place.nbytes.is_some_and(|found| found != spec.meta.nbytes()) {
                return Err(lost("nbytes does not fit shape and element type")
                    .with("expected", spec.meta.nbytes()));
            }
            let address = place
                .address
                .map(|address| feature_address(address, &spec.meta, LOCATE))
                .transpose()
                .map_err(|error| error.with("key", sample.object(name)))?;
            features.insert(
                name.clone(),
                FeatureDescriptor::new(spec.meta.clone(), address, place.seq.map(Sequence)),
            );
        }
        if features.is_empty() {
            return Err(LOCATE.error("there are no tensors").with("sample", &sample));
        }
        checked_nbytes(features.values().map(|f| &f.meta), LOCATE)?;
        let aux_layer_ids = match metadata.get("aux_layer_ids") {
            Some(raw) => {
                Some(bounded_list(raw, 1024).map_err(|f| LOCATE.list("aux_layer_ids", f))?)
            }
            None => None,
        };
        Descriptor::new(sample, features, aux_layer_ids, location)
    }

    /// The store, out of the URI, whose other parts must agree with the rest of the ref.
    fn store_id(&self, location: &Location) -> Result<StoreId> {
        let invalid =
            |why| LOCATE.error(why).with("uri", format_args!("{:?}", self.feature_store_uri));
        let uri = &*self.feature_store_uri;
        let rest = match (uri.strip_prefix("mooncake://"), uri.strip_prefix("mooncake+gpu://")) {
            (Some(rest), _) => rest,
            (None, Some(rest)) => {
                let Location::Token(token) = location else {
                    return Err(invalid("the uri names a session, but the metadata does not"));
                };
                rest.strip_prefix(&token.session.to_string())
                    .and_then(|rest| rest.strip_prefix('/'))
                    .ok_or_else(|| invalid("uri and metadata name different sessions"))?
            }
            (None, None) => {
                return Err(invalid("the scheme is unknown")
                    .remedy("use refs of mooncake:// or mooncake+gpu:// samples"));
            }
        };
        match rest.split_once('/') {
            Some((store, sample)) if sample == self.sample_id.as_str() => StoreId::new(store),
            _ => Err(invalid("uri and sample id do not agree").with("sample", &self.sample_id)),
        }
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

/// Where one tensor is, by what the metadata says.
#[derive(Clone, Copy, Default)]
struct Place {
    address: Option<u64>,
    nbytes: Option<u64>,
    seq: Option<u64>,
}

type Places = IndexMap<String, Place>;

fn locate_arena(object: &RawObject<'_>) -> Result<(Location, Places)> {
    let mut location = ArenaLocation::new(
        LOCATE.parse(object, "session")?,
        control_endpoint(object, "control", LOCATE)?,
        object.optional::<Epoch>("epoch").map_err(|field| LOCATE.field(field))?,
    );
    if object.get("holder").is_some() {
        location.holder = Some(LOCATE.parse(object, "holder")?);
    }
    let number = |raw, field| serde_json::from_str(raw).map_err(|_| LOCATE.field(field));
    let mut places = Places::new();
    for (name, raw) in located(object, "addresses")?.iter() {
        places.entry(name.to_owned()).or_default().address = Some(number(raw, "addresses")?);
    }
    if object.get("seqs").is_some() {
        for (name, raw) in located(object, "seqs")?.iter() {
            places.entry(name.to_owned()).or_default().seq = Some(number(raw, "seqs")?);
        }
    }
    Ok((Location::Arena(location), places))
}

fn locate_token(object: &RawObject<'_>) -> Result<(Location, Places)> {
    let token = LOCATE.text(object, "control_token")?;
    if crate::Secret::new(&*token).is_err() {
        return Err(LOCATE.field("control_token"));
    }
    let location = TokenLocation::new(
        token_transport(&LOCATE.text(object, "transport")?, LOCATE)?,
        LOCATE.parse(object, "session_id")?,
        control_endpoint(object, "control_endpoint", LOCATE)?,
        token,
    );
    let mut places = Places::new();
    for (name, raw) in located(object, "features")?.iter() {
        let feature = RawObject::parse(raw).map_err(|fault| LOCATE.object(fault))?;
        let number = |field| feature.field(field).map(Some).map_err(|f| LOCATE.field(f));
        let place = Place { address: number("address")?, nbytes: number("nbytes")?, seq: None };
        places.insert(name.to_owned(), place);
    }
    Ok((Location::Token(location), places))
}

/// An object with one entry per tensor.
fn located<'a>(object: &RawObject<'a>, field: &'static str) -> Result<RawObject<'a>> {
    let raw = object.get(field).ok_or_else(|| LOCATE.field(field))?;
    RawObject::parse(raw).map_err(|fault| LOCATE.object(fault))
}

fn features<'a>(object: &RawObject<'a>, field: &'static str) -> Result<RawObject<'a>> {
    let raw = object.get(field).ok_or_else(|| READ.field(field))?;
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
    use super::*;

    fn line(metadata: &str) -> String {
        format!(
            r#"{{"sample_id":"r:t","run_id":"r","source_task_id":null,"feature_store_uri":"mooncake://s/r:t","feature_keys":{{"x":"r:t/x"}},"feature_specs":{{"x":{{"name":"x","shape":[1,2],"dtype":"int64"}}}},"strategy":"dflash","metadata":{metadata}}}"#
        )
    }

    fn locate(line: &str) -> Result<Descriptor> {
        SampleRef::parse(line.as_bytes())?.descriptor()
    }

    const TOKEN: &str = r#"{"generation":1,"mooncake_gpu_direct":{"transport":"rdma","session_id":"h:1","control_endpoint":"h:2","control_token":"hush","features":{"x":{"address":512,"nbytes":16}}}}"#;

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

    #[test]
    fn refs_that_contradict_themselves_locate_nothing() {
        let arena = r#"{"session":"h:1","control":"h:2","addresses":{"x":512}}"#;
        let good = line(&format!(r#"{{"generation":1,"mooncake_nvlink":{arena}}}"#));
        assert!(matches!(locate(&good).unwrap().location, Location::Arena(_)));
        for (line, why) in [
            (line("{}"), "generation"),
            (
                line(&format!(
                    r#"{{"generation":1,"mooncake_arena":{arena},"mooncake_nvlink":{arena}}}"#
                )),
                "two locations",
            ),
            (good.replace("mooncake://s/r:t", "mooncake://s/r:u"), "agree"),
            (good.replace("mooncake://", "mem://"), "scheme"),
            (good.replace("mooncake://", "mooncake+gpu://h:1/"), "session"),
            (good.replace(r#"{"x":512}"#, "{}"), "no address"),
            (good.replace("512", "0"), "null"),
            (good.replace("\"h:2\"", "\"http://h:2\""), "abandoned"),
            (line(TOKEN).replace("16", "17"), "nbytes"),
            (line(TOKEN).replace("rdma", "smoke"), "transport"),
            (line(TOKEN).replace("mooncake://", "mooncake+gpu://h:9/"), "different sessions"),
        ] {
            let error = locate(&line).unwrap_err().to_string();
            assert!(error.contains(why), "{line}: {error}");
            assert!(!error.contains("hush"));
        }
    }

    #[test]
    fn every_location_comes_back() {
        let token = line(TOKEN).replace("mooncake://", "mooncake+gpu://h:1/");
        let arena = r#"{"generation":1,"aux_layer_ids":[5,19],"mooncake_arena":{"session":"h:1","control":"h:2","addresses":{"x":512},"epoch":7,"seqs":{"x":3},"holder":"c"}}"#;
        for line in [line(r#"{"generation":1}"#), line(arena), token] {
            let descriptor = locate(&line).unwrap();
            let again = SampleRef::new(&descriptor, "r", None, "dflash").unwrap();
            let mut out = Vec::new();
            again.write(&mut out);
            assert_eq!(SampleRef::parse(&out).unwrap(), again);
            assert_eq!(again.descriptor().unwrap(), descriptor);
            assert_eq!((again.num_tokens, again.estimated_bytes), (2, 16));
            assert!(!format!("{again:?}").contains("hush"));
        }
    }
}
