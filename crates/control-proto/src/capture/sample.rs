//! What to capture of one prompt, and the small tensors that travel with the request.

use transport_core::{
    Descriptor, Dtype, Error, ErrorKind, FeatureName, Generation, Result, SampleKey, TensorMeta,
};

use super::{
    Limits,
    request::{READ, Raw},
};
use crate::json::{RawObject, Text, bounded_list, write_number, write_string, write_value};

/// What to capture of one prompt, and under which names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleRequest {
    /// Identity of the sample.
    pub sample: SampleKey,
    /// Whether objects of an earlier attempt are replaced.
    pub replace: bool,
    /// Name for the concatenated hidden states of the tapped layers.
    pub aux: Option<FeatureName>,
    /// Name for the last hidden state.
    pub last_hidden: Option<FeatureName>,
    /// Tensors that travel with the request and are stored beside the captured ones.
    pub passthrough: Vec<Passthrough>,
    /// Transport that the client can read from, where it says so.
    pub transport: Option<String>,
}

/// A small integer tensor that the request carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passthrough {
    name: FeatureName,
    meta: TensorMeta,
    data: Vec<i64>,
}

impl SampleRequest {
    /// Asks for nothing yet.
    pub fn new(sample: SampleKey) -> Self {
        Self {
            sample,
            replace: false,
            aux: None,
            last_hidden: None,
            passthrough: Vec::new(),
            transport: None,
        }
    }

    /// Names of the sample's tensors, in the order in which they are stored.
    pub fn names(&self) -> impl Iterator<Item = &FeatureName> {
        let carried = self.passthrough.iter().map(Passthrough::name);
        self.aux.iter().chain(&self.last_hidden).chain(carried)
    }

    /// Reads the object, as in `spec_capture`.
    pub fn parse(json: &str, limits: &Limits) -> Result<Self> {
        let object = RawObject::parse(json).map_err(|fault| READ.object(fault))?;
        let sample = SampleKey::new(
            READ.parse(&object, "store_id")?,
            READ.parse(&object, "sample_id")?,
            Generation(object.field("gen").map_err(|field| READ.field(field))?),
        );
        let mut request = Self::new(sample.clone());
        match request.parse_rest(&object, limits) {
            Ok(()) => Ok(request),
            Err(error) => Err(error.with("sample", sample)),
        }
    }

    fn parse_rest(&mut self, object: &RawObject<'_>, limits: &Limits) -> Result<()> {
        let optional = |name| object.optional(name).map_err(|field| READ.field(field));
        self.replace = optional("replace")?.unwrap_or(false);
        if let Some(features) = object.get("features") {
            self.parse_features(features)?;
        }
        if let Some(raw) = object.get("passthrough") {
            let tensors: Vec<Raw<'_>> = bounded_list(raw, limits.features)
                .map_err(|fault| READ.list("passthrough", fault))?;
            self.passthrough = tensors
                .into_iter()
                .enumerate()
                .map(|(i, raw)| {
                    Passthrough::parse(raw.get(), limits)
                        .map_err(|e| e.with("in", format_args!("passthrough[{i}]")))
                })
                .collect::<Result<_>>()?;
        }
        if let Some(Text(transport)) =
            object.optional("transport").map_err(|field| READ.field(field))?
        {
            if transport.is_empty() || transport.len() > 64 {
                return Err(READ.field("transport"));
            }
            self.transport = Some(transport.into_owned());
        }
        self.check(limits)
    }

    fn parse_features(&mut self, json: &str) -> Result<()> {
        let features = READ.object_at(json, "features")?;
        for (source, raw) in features.iter().filter(|(_, raw)| *raw != "null") {
            let (place, field) = match source {
                "aux" => (&mut self.aux, "features.aux"),
                "last_hidden" => (&mut self.last_hidden, "features.last_hidden"),
                _ => {
                    return Err(READ
                        .error("a feature has an unknown source")
                        .with("found", format_args!("{:?}", super::shortened(source)))
                        .remedy("use aux, last_hidden, or passthrough tensors"));
                }
            };
            let Text(name) = serde_json::from_str(raw).map_err(|e| READ.wrong_type(field, &e))?;
            *place = Some(FeatureName::new(name).map_err(|e| READ.unusable(field, e))?);
        }
        Ok(())
    }

    fn check(&self, limits: &Limits) -> Result<()> {
        let names: Vec<_> = self.names().collect();
        if names.is_empty() || names.len() > limits.features {
            return Err(READ
                .error("the number of tensors is out of range")
                .with("key", &self.sample)
                .with("found", names.len())
                .with("max", limits.features));
        }
        let twice = names.iter().enumerate().find(|(i, name)| names[..*i].contains(name));
        match twice {
            Some((_, name)) => Err(READ
                .error("two tensors have the same name")
                .with("key", self.sample.object(name))),
            None => Ok(()),
        }
    }

    /// Checks that a result is what was asked for: the same sample, the same names, and `tokens`
    /// rows wherever a tensor has a second dimension.
    pub fn check_result(&self, descriptor: &Descriptor, tokens: u64) -> Result<()> {
        let wrong = |why: &'static str| Error::new(ErrorKind::Corrupt, "check capture result", why);
        if descriptor.sample != self.sample {
            return Err(wrong("wrong object identity")
                .with("expected", &self.sample)
                .with("found", &descriptor.sample));
        }
        if let Some(name) = self.names().find(|name| !descriptor.features.contains_key(*name)) {
            return Err(wrong("a tensor is missing").with("key", self.sample.object(name)));
        }
        if descriptor.features.len() != self.names().count() {
            return Err(wrong("there are tensors that were not asked for")
                .with("key", &self.sample)
                .with("expected", self.names().count())
                .with("found", descriptor.features.len()));
        }
        for (name, feature) in &descriptor.features {
            let rows = feature.meta.shape().get(1).copied().unwrap_or(tokens);
            if rows != tokens {
                return Err(wrong("a tensor has another length than the prompt")
                    .with("key", self.sample.object(name))
                    .with("expected", tokens)
                    .with("found", rows));
            }
        }
        for sent in &self.passthrough {
            let found = &descriptor.features[&sent.name].meta;
            if *found != sent.meta {
                return Err(wrong("a tensor of the request came back as another")
                    .with("key", self.sample.object(&sent.name))
                    .with("expected", &sent.meta)
                    .with("found", found));
            }
        }
        Ok(())
    }

    /// Appends the object.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"store_id\":");
        write_string(out, self.sample.store_id.as_str());
        out.extend_from_slice(b",\"sample_id\":");
        write_string(out, self.sample.sample_id.as_str());
        out.extend_from_slice(b",\"gen\":");
        write_number(out, self.sample.generation.0);
        out.extend_from_slice(b",\"replace\":");
        write_value(out, &self.replace);
        out.extend_from_slice(b",\"features\":{");
        let sources = [("aux", &self.aux), ("last_hidden", &self.last_hidden)];
        let named = sources.into_iter().filter_map(|(source, name)| Some((source, name.as_ref()?)));
        for (i, (source, name)) in named.enumerate() {
            if i > 0 {
                out.push(b',');
            }
            write_string(out, source);
            out.push(b':');
            write_string(out, name.as_str());
        }
        out.extend_from_slice(b"},\"passthrough\":[");
        for (i, tensor) in self.passthrough.iter().enumerate() {
            if i > 0 {
                out.push(b',');
            }
            tensor.write(out);
        }
        out.push(b']');
        if let Some(transport) = &self.transport {
            out.extend_from_slice(b",\"transport\":");
            write_string(out, transport);
        }
        out.push(b'}');
    }
}

impl Passthrough {
    /// A tensor of whole numbers; their number must fit the shape and each must fit the element
    /// type, which is an integer type or bool.
    pub fn new(name: FeatureName, meta: TensorMeta, data: Vec<i64>) -> Result<Self> {
        let invalid = |why: &'static str| {
            READ.error(why).with("feature", format_args!("{:?}", name.as_str())).with("meta", &meta)
        };
        let range = match meta.dtype() {
            Dtype::Int64 => i64::MIN..=i64::MAX,
            Dtype::Int32 => i32::MIN.into()..=i32::MAX.into(),
            Dtype::Int16 => i16::MIN.into()..=i16::MAX.into(),
            Dtype::Int8 => i8::MIN.into()..=i8::MAX.into(),
            Dtype::Uint8 => 0..=u8::MAX.into(),
            Dtype::Bool => 0..=1,
            _ => return Err(invalid("passthrough tensors hold whole numbers")),
        };
        if data.len() as u64 != meta.nbytes() / meta.dtype().size() {
            return Err(invalid("the data does not fit the shape").with("found", data.len()));
        }
        if let Some(value) = data.iter().find(|value| !range.contains(value)) {
            return Err(invalid("a number does not fit the element type").with("found", value));
        }
        Ok(Self { name, meta, data })
    }

    /// Its name.
    pub fn name(&self) -> &FeatureName {
        &self.name
    }

    /// Element type and shape.
    pub fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    /// The numbers, in row-major order.
    pub fn data(&self) -> &[i64] {
        &self.data
    }

    /// Writes the numbers as stored: little-endian, in the element type.
    ///
    /// # Panics
    /// If `out` is not exactly as long as the tensor.
    pub fn write_le(&self, out: &mut [u8]) {
        assert_eq!(out.len() as u64, self.meta.nbytes(), "the destination fits the tensor");
        let size = self.meta.dtype().size() as usize;
        for (place, value) in out.chunks_exact_mut(size).zip(&self.data) {
            place.copy_from_slice(&value.to_le_bytes()[..size]); // truncation keeps the value
        }
    }

    fn parse(json: &str, limits: &Limits) -> Result<Self> {
        let object = RawObject::parse(json).map_err(|fault| READ.object(fault))?;
        let name: FeatureName = READ.parse(&object, "name")?;
        let named = |error: Error| error.with("feature", format_args!("{:?}", name.as_str()));
        let meta = super::parse_meta(&object, READ).map_err(named)?;
        let raw = object.get("data").ok_or_else(|| READ.missing("data")).map_err(named)?;
        let most = limits.prompt_tokens.saturating_mul(16); // a few numbers per token
        let data =
            bounded_list(raw, most).map_err(|fault| READ.list("data", fault)).map_err(named)?;
        Self::new(name, meta, data)
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"name\":");
        write_string(out, self.name.as_str());
        out.extend_from_slice(b",\"data\":");
        write_value(out, &self.data);
        out.extend_from_slice(b",\"shape\":");
        write_value(out, self.meta.shape());
        out.extend_from_slice(b",\"dtype\":");
        write_string(out, self.meta.dtype().name());
        out.push(b'}');
    }
}
