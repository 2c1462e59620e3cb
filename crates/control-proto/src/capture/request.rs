//! The body of `POST /generate` that asks for captures.

use indexmap::IndexMap;
use serde_json::value::RawValue;
use transport_core::{Error, ErrorKind, Result};

use super::{Faults, Limits, SampleRequest, body_text};
use crate::json::{RawObject, Text, bounded_list, write_number, write_string, write_value};

pub(super) const READ: Faults =
    Faults { kind: ErrorKind::InvalidInput, operation: "read capture request" };

/// Fields that have a meaning here and cannot be set through [`CaptureRequest::other`].
const RESERVED: [&str; 4] = ["input_ids", "extra_key", "sampling_params", "spec_capture"];

/// Where a request carries what to capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// Top-level `spec_capture`: one object per prompt.
    Patch,
    /// `sampling_params.custom_params.spec_capture`: the same object as a JSON string.
    Plugin,
}

/// A request to run prompts and capture their hidden states.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CaptureRequest {
    /// How it says what to capture.
    pub form: Form,
    /// Whether prompts came as a list, so that a list answers; otherwise there is one prompt.
    pub batched: bool,
    /// The prompts, in order; at least one.
    pub prompts: Vec<Prompt>,
    /// How to sample, the same for all.
    pub sampling: Sampling,
    /// Further fields as JSON text, for the server as they are; none of them reserved.
    pub other: IndexMap<String, String>,
}

/// One prompt of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// Token ids.
    pub input_ids: Vec<i64>,
    /// Fresh text per attempt that keeps prefix caches from serving a part of the prompt.
    pub extra_key: Option<String>,
    /// What to capture.
    pub sample: SampleRequest,
}

/// Sampling parameters that matter to captures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Temperature; 0 is greedy.
    pub temperature: f64,
    /// Tokens to generate after the prompt: 1 in the patch form, 0 in the plugin form.
    pub max_new_tokens: u64,
}

impl CaptureRequest {
    /// A request with greedy sampling and the number of new tokens that `form` asks for.
    pub fn new(form: Form, prompts: Vec<Prompt>) -> Self {
        let max_new_tokens = match form {
            Form::Patch => 1,
            Form::Plugin => 0,
        };
        let sampling = Sampling { temperature: 0.0, max_new_tokens };
        Self { form, batched: true, prompts, sampling, other: IndexMap::new() }
    }

    /// Reads a body. Fields without a meaning here are kept in [`Self::other`].
    pub fn parse(body: &[u8], limits: &Limits) -> Result<Self> {
        let text = body_text(body, limits, |why| READ.error(why))?;
        let object = RawObject::parse(text).map_err(|fault| READ.object(fault))?;
        let (batched, input_ids) = parse_input_ids(&object, limits)?;
        let extra_keys = parse_extra_keys(&object, input_ids.len())?;
        let (sampling, plugin) = parse_sampling(&object, limits)?;
        let patch = object.get("spec_capture").map(|raw| one_or_list(raw, limits)).transpose()?;
        let (form, samples) = match (patch, plugin) {
            (Some(raw), None) => {
                let samples: Result<Vec<_>> =
                    raw.into_iter().map(|raw| SampleRequest::parse(raw.get(), limits)).collect();
                (Form::Patch, samples?)
            }
            (None, Some(texts)) => {
                let samples: Result<Vec<_>> =
                    texts.iter().map(|text| SampleRequest::parse(text, limits)).collect();
                (Form::Plugin, samples?)
            }
            (None, None) => {
                return Err(READ
                    .error("nothing says what to capture")
                    .remedy("set spec_capture, or sampling_params.custom_params.spec_capture"));
            }
            (Some(_), Some(_)) => {
                return Err(READ.error("spec_capture is given twice").remedy(
                    "use either spec_capture or sampling_params.custom_params.spec_capture",
                ));
            }
        };
        if samples.len() != input_ids.len() {
            return Err(READ
                .error("there is not one spec_capture per prompt")
                .with("expected", input_ids.len())
                .with("found", samples.len()));
        }
        let prompts = input_ids.into_iter().zip(extra_keys).zip(samples);
        let prompts = prompts
            .map(|((input_ids, extra_key), sample)| Prompt { input_ids, extra_key, sample })
            .collect();
        let rest = object.iter().filter(|(name, _)| !RESERVED.contains(name));
        let other = rest.map(|(name, raw)| (name.to_owned(), raw.to_owned())).collect();
        Ok(Self { form, batched, prompts, sampling, other })
    }

    /// Appends the body.
    ///
    /// Refuses a request without prompts, one that is not batched with several, and reserved names
    /// in [`Self::other`].
    pub fn write(&self, out: &mut Vec<u8>) -> Result<()> {
        let invalid = |why| Error::new(ErrorKind::InvalidInput, "write capture request", why);
        if self.prompts.is_empty() || (!self.batched && self.prompts.len() > 1) {
            return Err(invalid("the number of prompts does not fit"));
        }
        if let Some(name) = self.other.keys().find(|name| RESERVED.contains(&&***name)) {
            return Err(invalid("a reserved field is set").with("field", name));
        }
        for (name, value) in &self.other {
            if serde_json::from_str::<&RawValue>(value).is_err() {
                return Err(invalid("a further field is not JSON").with("field", name));
            }
        }
        if !self.sampling.temperature.is_finite() {
            return Err(invalid("the temperature is not a number"));
        }
        out.extend_from_slice(b"{\"input_ids\":");
        self.write_each(out, |out, prompt| write_value(out, &prompt.input_ids));
        if self.prompts.iter().any(|prompt| prompt.extra_key.is_some()) {
            out.extend_from_slice(b",\"extra_key\":");
            self.write_each(out, |out, prompt| write_value(out, &prompt.extra_key));
        }
        out.extend_from_slice(b",\"sampling_params\":");
        match self.form {
            Form::Patch => {
                self.write_sampling(out);
                out.extend_from_slice(b"},\"spec_capture\":");
                self.write_each(out, |out, prompt| prompt.sample.write(out));
            }
            Form::Plugin => self.write_each(out, |out, prompt| {
                self.write_sampling(out);
                out.extend_from_slice(b",\"custom_params\":{\"spec_capture\":");
                let mut json = Vec::new();
                prompt.sample.write(&mut json);
                write_string(out, &String::from_utf8_lossy(&json));
                out.extend_from_slice(b"}}");
            }),
        }
        for (name, value) in &self.other {
            out.push(b',');
            write_string(out, name);
            out.push(b':');
            out.extend_from_slice(value.as_bytes());
        }
        out.push(b'}');
        Ok(())
    }

    /// Appends a list of what `write` makes of each prompt, or just that of the only prompt.
    fn write_each(&self, out: &mut Vec<u8>, write: impl Fn(&mut Vec<u8>, &Prompt)) {
        if self.batched {
            out.push(b'[');
        }
        for (i, prompt) in self.prompts.iter().enumerate() {
            if i > 0 {
                out.push(b',');
            }
            write(out, prompt);
        }
        if self.batched {
            out.push(b']');
        }
    }

    /// Appends the sampling object but for its closing brace.
    fn write_sampling(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"temperature\":");
        write_value(out, &self.sampling.temperature);
        out.extend_from_slice(b",\"max_new_tokens\":");
        write_number(out, self.sampling.max_new_tokens);
    }
}

pub(super) type Raw<'a> = &'a serde_json::value::RawValue;

/// A list's items, or the one item that stands for a list.
fn one_or_list<'a>(raw: &'a str, limits: &Limits) -> Result<Vec<Raw<'a>>> {
    if raw.starts_with('[') {
        bounded_list(raw, limits.samples).map_err(|fault| READ.list("spec_capture", fault))
    } else {
        Ok(vec![serde_json::from_str(raw).map_err(|_| READ.field("spec_capture"))?])
    }
}

fn parse_input_ids(object: &RawObject<'_>, limits: &Limits) -> Result<(bool, Vec<Vec<i64>>)> {
    let list = |raw, most| bounded_list(raw, most).map_err(|fault| READ.list("input_ids", fault));
    let raw = object.get("input_ids").ok_or_else(|| READ.field("input_ids"))?;
    let nested = raw.strip_prefix('[').is_some_and(|r| r.trim_ascii_start().starts_with('['));
    if !nested {
        let ids = list(raw, limits.prompt_tokens)?;
        if ids.is_empty() {
            return Err(READ.error("a prompt has no tokens"));
        }
        return Ok((false, vec![ids]));
    }
    let prompts: Vec<Raw<'_>> =
        bounded_list(raw, limits.samples).map_err(|fault| READ.list("input_ids", fault))?;
    let prompts: Vec<_> = prompts
        .into_iter()
        .map(|prompt| list(prompt.get(), limits.prompt_tokens))
        .collect::<Result<_>>()?;
    if prompts.iter().any(Vec::is_empty) {
        return Err(READ.error("a prompt has no tokens"));
    }
    Ok((true, prompts))
}

fn parse_extra_keys(object: &RawObject<'_>, prompts: usize) -> Result<Vec<Option<String>>> {
    let keys = match object.get("extra_key") {
        None => return Ok(vec![None; prompts]),
        Some(raw) if raw.starts_with('[') => {
            bounded_list(raw, prompts).map_err(|fault| READ.list("extra_key", fault))?
        }
        Some(raw) => vec![serde_json::from_str(raw).map_err(|_| READ.field("extra_key"))?],
    };
    if keys.len() != prompts {
        return Err(READ
            .error("there is not one extra_key per prompt")
            .with("expected", prompts)
            .with("found", keys.len()));
    }
    Ok(keys)
}

/// The sampling parameters, and what they say to capture in the plugin form.
fn parse_sampling(
    object: &RawObject<'_>,
    limits: &Limits,
) -> Result<(Sampling, Option<Vec<String>>)> {
    let mut sampling = Sampling { temperature: 1.0, max_new_tokens: 128 }; // the server's defaults
    let Some(raw) = object.get("sampling_params") else { return Ok((sampling, None)) };
    let field = |name| READ.field(name);
    let (mut texts, all) = (Vec::new(), one_or_list(raw, limits)?);
    for raw in &all {
        let params = RawObject::parse(raw.get()).map_err(|fault| READ.object(fault))?;
        if let Some(temperature) = params.optional("temperature").map_err(field)? {
            sampling.temperature = temperature;
        }
        if let Some(tokens) = params.optional("max_new_tokens").map_err(field)? {
            sampling.max_new_tokens = tokens;
        }
        let Some(custom) = params.get("custom_params") else { continue };
        let custom = RawObject::parse(custom).map_err(|fault| READ.object(fault))?;
        if let Some(Text(text)) = custom.optional("spec_capture").map_err(field)? {
            texts.push(text.into_owned());
        }
    }
    match texts.len() {
        0 => Ok((sampling, None)),
        found if found == all.len() => Ok((sampling, Some(texts))),
        found => Err(READ
            .error("only some sampling_params say what to capture")
            .with("expected", all.len())
            .with("found", found)),
    }
}
