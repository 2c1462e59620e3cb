//! From descriptors to refs and back: where `metadata` and URI say the bytes are.

use indexmap::IndexMap;
use serde_json::{Map, Value, json};
use transport_core::{
    ArenaLocation, Descriptor, Epoch, Error, ErrorKind, FeatureDescriptor, FeatureName, Generation,
    Location, Result, SampleKey, Sequence, StoreId, TokenLocation,
};

use super::{FeatureSpec, SampleRef};
use crate::{
    capture::{Faults, checked_nbytes, control_endpoint, feature_address, token_transport},
    json::{RawObject, bounded_list},
};

const WRITE: Faults = Faults { kind: ErrorKind::InvalidInput, operation: "write sample ref" };
const LOCATE: Faults = Faults { kind: ErrorKind::Protocol, operation: "locate sample" };

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
            estimated_bytes: checked_nbytes(features.values().map(|f| &f.meta), WRITE)?,
            metadata,
        })
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
    let number = |raw, field| serde_json::from_str(raw).map_err(|e| LOCATE.wrong_type(field, &e));
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
    let raw = object.get(field).ok_or_else(|| LOCATE.missing(field))?;
    RawObject::parse(raw).map_err(|fault| LOCATE.object(fault))
}

#[cfg(test)]
mod tests {
    use super::{super::tests::line, *};

    fn locate(line: &str) -> Result<Descriptor> {
        SampleRef::parse(line.as_bytes())?.descriptor()
    }

    const TOKEN: &str = r#"{"generation":1,"mooncake_gpu_direct":{"transport":"rdma","session_id":"h:1","control_endpoint":"h:2","control_token":"hush","features":{"x":{"address":512,"nbytes":16}}}}"#;

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
