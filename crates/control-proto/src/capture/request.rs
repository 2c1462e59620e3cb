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
                (Form::Patch, parse_samples(raw.into_iter().map(|raw| raw.get()), limits)?)
            }
            (None, Some(texts)) => {
                (Form::Plugin, parse_samples(texts.iter().map(String::as_str), limits)?)
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
        Ok(vec![serde_json::from_str(raw).map_err(|e| READ.wrong_type("spec_capture", &e))?])
    }
}

/// What to capture of each prompt; an error says of which prompt it speaks.
fn parse_samples<'a>(
    samples: impl Iterator<Item = &'a str>,
    limits: &Limits,
) -> Result<Vec<SampleRequest>> {
    let parse = |(i, json)| {
        SampleRequest::parse(json, limits)
            .map_err(|e| e.with("in", format_args!("spec_capture[{i}]")))
    };
    samples.enumerate().map(parse).collect()
}

fn parse_input_ids(object: &RawObject<'_>, limits: &Limits) -> Result<(bool, Vec<Vec<i64>>)> {
    let list = |raw, most| bounded_list(raw, most).map_err(|fault| READ.list("input_ids", fault));
    let raw = object.get("input_ids").ok_or_else(|| READ.missing("input_ids"))?;
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
        Some(raw) => vec![serde_json::from_str(raw).map_err(|e| READ.wrong_type("extra_key", &e))?],
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
        let params = READ.object_at(raw.get(), "sampling_params")?;
        if let Some(temperature) = params.optional("temperature").map_err(field)? {
            sampling.temperature = temperature;
        }
        if let Some(tokens) = params.optional("max_new_tokens").map_err(field)? {
            sampling.max_new_tokens = tokens;
        }
        let Some(custom) = params.get("custom_params") else { continue };
        let custom = READ.object_at(custom, "custom_params")?;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said of a good request after `from` in it became `to`.
    fn refusal(from: &str, to: &str) -> String {
        let good = r#"{"input_ids": [[1, 2]], "sampling_params": {"temperature": 0},
            "spec_capture": [{"store_id": "run", "sample_id": "a", "gen": 1, "replace": false,
                "features": {"aux": "hidden", "last_hidden": "last"},
                "passthrough": [{"name": "ids", "data": [1, 2], "shape": [1, 2],
                                 "dtype": "int64"}]}]}"#;
        let parse = |text: &str| CaptureRequest::parse(text.as_bytes(), &Limits::default());
        parse(good).unwrap();
        assert_eq!(good.matches(from).count(), 1, "{from}");
        parse(&good.replace(from, to)).unwrap_err().to_string()
    }

    #[test]
    fn a_refusal_names_the_field_and_both_types() {
        for (from, to, parts) in [
            (r#""hidden""#, "[5]", &["features.aux", "expected=a string", "found=a list"][..]),
            (r#""last""#, "true", &["features.last_hidden", "a string", "found=a boolean"]),
            (r#""hidden""#, r#""a/b""#, &["features.aux", "unusable", "why="]),
            (r#"{"aux": "hidden", "last_hidden": "last"}"#, "5", &["features", "not an object"]),
            (r#""gen": 1"#, r#""gen": "1""#, &["field=gen", "a whole number", "found=a string"]),
            (r#""gen": 1"#, r#""gen": null"#, &["a field is missing", "field=gen"]),
            (r#""store_id": "run", "#, "", &["a field is missing", "store_id", "spec_capture[0]"]),
            (r#""run""#, r#""""#, &["field=store_id", "unusable", "why="]),
            (r#""replace": false"#, r#""replace": 0"#, &["replace", "a boolean", "whole number"]),
            ("[[1, 2]]", "[[1, 2.5]]", &["input_ids", "a whole number", "found=a number"]),
            ("[[1, 2]]", r#""text""#, &["input_ids", "expected=a list", "found=a string"]),
            (r#""data": [1, 2]"#, r#""data": {}"#, &["data", "a list", "passthrough[0]"]),
            (r#""dtype": "int64""#, r#""dtype": 64"#, &["dtype", "a string", "passthrough[0]"]),
            ("\"temperature\": 0", "\"temperature\": \"0\"", &["temperature", "a number"]),
        ] {
            let text = refusal(from, to);
            for part in parts {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
    }
}
