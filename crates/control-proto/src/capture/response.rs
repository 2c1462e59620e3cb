//! The answer to a capture request: one row per prompt, each with its result.

use indexmap::IndexMap;
use serde_json::value::RawValue;
use transport_core::{Error, ErrorKind, FeatureName, Result, SampleKey};

use super::{
    CaptureOutcome, Checksum, Faults, Form, Limits, body_text, parse_result, write_result,
};
use crate::json::{RawObject, Text, bounded_list, write_string};

pub(super) const READ: Faults =
    Faults { kind: ErrorKind::Protocol, operation: "read capture response" };

/// Deepest list around rows and results.
const MAX_WRAPPERS: usize = 8;

/// What came back for one prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The sample, or why there is none.
    pub outcome: CaptureOutcome,
    /// Checksum of each tensor's bytes, if they were asked for.
    pub checksums: Option<IndexMap<FeatureName, Checksum>>,
}

/// Reads the answer to a request for `requested` samples, in their order.
///
/// Lists around rows and results are looked through. A row without a result is a failure that
/// another attempt does not mend; a row's own failure is one that it may. A wrong number of rows,
/// a result for another sample, or one that contradicts itself fails the whole answer.
pub fn parse_response(body: &[u8], requested: &[SampleKey], limits: &Limits) -> Result<Vec<Row>> {
    let text = body_text(body, limits, |why| READ.error(why))?;
    let raw: &RawValue = serde_json::from_str(text).map_err(|error| {
        READ.error("not JSON").with("at", crate::json::byte_position(text, &error))
    })?;
    let rows = flattened(raw.get(), limits.samples, "rows")?;
    if rows.len() != requested.len() {
        return Err(READ
            .error("there is not one row per prompt")
            .with("expected", requested.len())
            .with("found", rows.len()));
    }
    rows.into_iter()
        .zip(requested)
        .map(|(row, sample)| {
            parse_row(row, sample, limits).map_err(|error| error.with("requested", sample))
        })
        .collect()
}

fn parse_row(row: &str, requested: &SampleKey, limits: &Limits) -> Result<Row> {
    let object = |raw| RawObject::parse(raw).map_err(|fault| READ.object(fault));
    let row = object(row)?;
    let meta = row.get("meta_info").map(object).transpose()?;
    let field = |name| match meta.as_ref().and_then(|meta| meta.get(name)) {
        Some(raw) => flattened(raw, limits.samples, name),
        None => Ok(Vec::new()),
    };
    let (candidates, checksums) = (field("spec_capture")?, field("spec_capture_checksums")?);
    let Some(index) = matching(&candidates, requested)? else {
        let error = "the row has no capture result: does the server carry the capture patch \
                     or plugin, and is capturing turned on?";
        let outcome = CaptureOutcome::Failed {
            sample_id: requested.sample_id.clone(),
            error: error.into(),
            retryable: false,
            cause: None,
        };
        return Ok(Row { outcome, checksums: None });
    };
    let outcome = parse_result(candidates[index], limits)?;
    let same = match &outcome {
        CaptureOutcome::Captured(descriptor) => descriptor.sample == *requested,
        CaptureOutcome::Failed { sample_id, .. } => *sample_id == requested.sample_id,
    };
    if !same {
        let error = READ.error("wrong object identity");
        return Err(match &outcome {
            CaptureOutcome::Captured(descriptor) => error.with("found", &descriptor.sample),
            CaptureOutcome::Failed { sample_id, .. } => error.with("found", sample_id),
        });
    }
    let checksums = match checksums.get(index) {
        Some(raw) => Some(parse_checksums(raw, &outcome)?),
        None => None,
    };
    Ok(Row { outcome, checksums })
}

/// Position of the requested sample's result: the only one, or the one with its id.
fn matching(candidates: &[&str], requested: &SampleKey) -> Result<Option<usize>> {
    if candidates.len() < 2 {
        return Ok((candidates.len() == 1).then_some(0));
    }
    let mut found = None;
    for (index, candidate) in candidates.iter().enumerate() {
        let candidate = RawObject::parse(candidate).map_err(|fault| READ.object(fault))?;
        let Ok(Text(id)) = candidate.field("sample_id") else { continue };
        if id == requested.sample_id.as_str() && found.replace(index).is_some() {
            return Err(READ.error("two results are for the same sample"));
        }
    }
    found.map(Some).ok_or_else(|| {
        READ.error("no result is for the requested sample").with("results", candidates.len())
    })
}

fn parse_checksums(
    json: &str,
    outcome: &CaptureOutcome,
) -> Result<IndexMap<FeatureName, Checksum>> {
    let object = RawObject::parse(json).map_err(|fault| READ.object(fault))?;
    let mut checksums = IndexMap::with_capacity(object.len());
    for (name, raw) in object.iter() {
        let known = match outcome {
            CaptureOutcome::Captured(descriptor) => descriptor.features.contains_key(name),
            CaptureOutcome::Failed { .. } => false,
        };
        if !known {
            return Err(READ.error("there is a checksum of a tensor that there is not"));
        }
        let Text(text) =
            serde_json::from_str(raw).map_err(|e| READ.wrong_type("spec_capture_checksums", &e))?;
        checksums.insert(FeatureName::new(name)?, text.parse()?);
    }
    Ok(checksums)
}

/// The items of a list, and of lists in it; what is no list is its only item.
fn flattened<'a>(raw: &'a str, limit: usize, field: &'static str) -> Result<Vec<&'a str>> {
    let mut items = vec![raw];
    for _ in 0..=MAX_WRAPPERS {
        if !items.iter().any(|item| item.starts_with('[')) {
            items.retain(|item| *item != "null");
            return Ok(items);
        }
        let mut inner = Vec::new();
        for item in items {
            if item.starts_with('[') {
                let list: Vec<&RawValue> =
                    bounded_list(item, limit).map_err(|fault| READ.list(field, fault))?;
                inner.extend(list.into_iter().map(RawValue::get));
            } else {
                inner.push(item);
            }
            if inner.len() > limit {
                return Err(READ.error("a list is too long").with("field", field));
            }
        }
        items = inner;
    }
    Err(READ.error("lists are nested too deeply").with("field", field))
}

/// Appends the answer to a request of `form`: a list of rows if it was `batched`, otherwise one row.
pub fn write_response(out: &mut Vec<u8>, form: Form, batched: bool, rows: &[Row]) -> Result<()> {
    if !batched && rows.len() != 1 {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            "write capture response",
            "a request that is not batched has one row",
        )
        .with("found", rows.len()));
    }
    if batched {
        out.push(b'[');
    }
    for (i, row) in rows.iter().enumerate() {
        if i > 0 {
            out.push(b',');
        }
        write_row(out, form, row)?;
    }
    if batched {
        out.push(b']');
    }
    Ok(())
}

fn write_row(out: &mut Vec<u8>, form: Form, row: &Row) -> Result<()> {
    out.extend_from_slice(b"{\"text\":\"\",\"meta_info\":{\"spec_capture\":");
    match form {
        Form::Patch => write_result(out, &row.outcome)?,
        Form::Plugin => {
            out.push(b'[');
            write_result(out, &row.outcome)?;
            out.push(b']');
        }
    }
    if let Some(checksums) = &row.checksums {
        out.extend_from_slice(b",\"spec_capture_checksums\":[{");
        for (i, (name, checksum)) in checksums.iter().enumerate() {
            if i > 0 {
                out.push(b',');
            }
            write_string(out, name.as_str());
            out.push(b':');
            write_string(out, &checksum.to_string());
        }
        out.extend_from_slice(b"}]");
    }
    out.extend_from_slice(b"}}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{super::ChecksumKind, *};
    use transport_core::{Generation, SampleId, StoreId};

    fn key(id: &str) -> SampleKey {
        SampleKey::new(StoreId::new("s").unwrap(), SampleId::new(id).unwrap(), Generation(1))
    }

    fn result(id: &str) -> String {
        format!(
            r#"{{"sample_id":"{id}","store_id":"s","gen":1,"features":{{"x":{{"shape":[1],"dtype":"int8"}}}}}}"#
        )
    }

    fn row(capture: &str) -> String {
        format!(r#"{{"text":"","meta_info":{{"spec_capture":{capture}}}}}"#)
    }

    fn parse(body: &str, ids: &[&str]) -> Result<Vec<Row>> {
        let keys: Vec<_> = ids.iter().map(|id| key(id)).collect();
        parse_response(body.as_bytes(), &keys, &Limits::default())
    }

    #[test]
    fn rows_are_matched_through_wrappers() {
        let both = format!("[[{}],[[{}]]]", result("b"), result("a"));
        for (body, ids) in [
            (row(&result("a")), &["a"][..]),
            (format!("[{}]", row(&format!("[[{}]]", result("a")))), &["a"]),
            (format!("[[{}],{}]", row(&both), row(&both)), &["a", "b"]),
        ] {
            let rows = parse(&body, ids).unwrap();
            let found: Vec<_> = rows.iter().map(|row| row.outcome.sample_id().as_str()).collect();
            assert_eq!(found, ids, "{body}");
        }
    }

    #[test]
    fn what_does_not_match_fails_the_answer() {
        let twice = format!("[{},{}]", result("a"), result("a"));
        let deep = format!("{}{}{}", "[".repeat(20), row("null"), "]".repeat(20));
        for (body, why) in [
            ("[]".into(), "one row per prompt"),
            ("nonsense".into(), "not JSON"),
            (row(&result("b")), "wrong object identity"),
            (row(&result("a").replace("\"gen\":1", "\"gen\":2")), "wrong object identity"),
            (row(&result("a").replace("\"s\"", "\"t\"")), "wrong object identity"),
            (row(r#"{"sample_id":"b","error":"x"}"#), "wrong object identity"),
            (row(&twice), "same sample"),
            (row(&format!("[{},{}]", result("b"), result("c"))), "no result"),
            (row("7"), "not an object"),
            (deep, "too deeply"),
        ] {
            let error = parse(&body, &["a"]).unwrap_err();
            assert!(error.to_string().contains(why), "{body}: {error}");
            assert!(
                why == "one row per prompt"
                    || why.contains("JSON")
                    || why.contains("deep")
                    || error.context("requested").is_some()
            );
        }
    }

    #[test]
    fn a_missing_result_asks_for_the_patch() {
        for body in [row("null"), row("[]"), r#"{"text":""}"#.into()] {
            let rows = parse(&body, &["a"]).unwrap();
            let CaptureOutcome::Failed { error, retryable, .. } = &rows[0].outcome else {
                panic!("not a failure");
            };
            assert!(error.contains("patch") && !retryable);
        }
    }

    #[test]
    fn checksums_travel_beside_the_result() {
        let meta = format!(
            r#"{},"spec_capture_checksums":[{{"x":"xxh3:00000000000000ff"}}]"#,
            result("a")
        );
        let rows = parse(&row(&meta), &["a"]).unwrap();
        assert_eq!(
            rows[0].checksums.as_ref().unwrap()["x"],
            Checksum::new(ChecksumKind::Xxh3, 255)
        );
        for form in [Form::Patch, Form::Plugin] {
            let mut out = Vec::new();
            write_response(&mut out, form, true, &rows).unwrap();
            assert_eq!(parse(std::str::from_utf8(&out).unwrap(), &["a"]).unwrap(), rows);
        }
        assert!(parse(&row(&meta.replace("\"x\":\"xx", "\"y\":\"xx")), &["a"]).is_err());
        assert!(parse(&row(&meta.replace("00ff\"", "0ff\"")), &["a"]).is_err());
    }
}
