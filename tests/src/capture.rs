//! Captures small samples from a server over raw HTTP.

use std::sync::Arc;

use control_proto::capture::{HOLDER_HEADER, PATIENCE_HEADER};
use serde_json::{Value, json};
use transport_core::Descriptor;

use crate::{http, process::CaptureServer};

/// Flags of a server with small samples: 8 tokens take 4 objects of at most 1 KiB.
pub const SMALL: &[&str] = &["--hidden", "64", "--taps", "1"];
/// Room that one sample of [`samples`] takes in the arena.
pub const SAMPLE_ROOM: u64 = 1024 + 1024 + 512 + 512;
/// Objects of one sample.
pub const OBJECTS: usize = 4;

/// Who the samples are for, and whether they replace older ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ask<'a> {
    /// Client to hold them for.
    pub holder: Option<&'a str>,
    /// Replaces samples of the same name.
    pub replace: bool,
    /// Milliseconds for which it waits for room.
    pub patience: Option<&'a str>,
}

/// Captures samples `names` of 8 tokens each and returns the results as JSON.
///
/// # Panics
/// When the server does not capture all of them.
pub fn results(server: &CaptureServer, names: &[String], ask: Ask<'_>) -> Vec<Value> {
    let answer = request(server, names, ask);
    let found: Vec<Value> = answer
        .as_array()
        .unwrap_or_else(|| panic!("{answer}"))
        .iter()
        .map(|row| {
            let mut result = &row["meta_info"]["spec_capture"];
            while let Some(inner) = result.as_array() {
                result = &inner[0];
            }
            result.clone()
        })
        .collect();
    assert_eq!(found.len(), names.len());
    found
}

/// Sends one request for samples `names` and returns the answer as it is.
pub fn request(server: &CaptureServer, names: &[String], ask: Ask<'_>) -> Value {
    let ids = [1, 2, 3, 4, 5, 6, 7, 8];
    let payload = |name: &String| {
        json!({
            "store_id": "t", "sample_id": name, "gen": 1, "replace": ask.replace,
            "features": {"aux": "hidden_states", "last_hidden": "target_last_hidden_states"},
            "passthrough": [
                {"name": "input_ids", "data": ids, "shape": [1, 8], "dtype": "int64"},
                {"name": "loss_mask", "data": ids, "shape": [1, 8], "dtype": "int64"},
            ],
        })
    };
    let body = json!({
        "input_ids": names.iter().map(|_| ids).collect::<Vec<_>>(),
        "extra_key": names.iter().map(|name| format!("{name}-key")).collect::<Vec<_>>(),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        "spec_capture": names.iter().map(payload).collect::<Vec<_>>(),
    });
    let holder = ask.holder.map(|it| (HOLDER_HEADER, it));
    let patience = ask.patience.map(|it| (PATIENCE_HEADER, it));
    let headers: Vec<_> = holder.into_iter().chain(patience).collect();
    http::post(server.field("http"), "/generate", &headers, &body).1
}

/// [`results`], parsed.
pub fn samples(server: &CaptureServer, names: &[String], ask: Ask<'_>) -> Vec<Arc<Descriptor>> {
    let limits = control_proto::capture::Limits::default();
    results(server, names, ask)
        .iter()
        .map(|result| {
            match control_proto::capture::parse_result(&result.to_string(), &limits).unwrap() {
                control_proto::capture::CaptureOutcome::Captured(descriptor) => {
                    Arc::new(descriptor)
                }
                other => panic!("{other:?}"),
            }
        })
        .collect()
}

/// `count` names of samples that start with `prefix`.
pub fn names(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|i| format!("{prefix}-{i:05}")).collect()
}

/// Keys of a result's objects, with their sequence numbers.
pub fn objects(result: &Value) -> Vec<(String, u64)> {
    let text = |name: &str| result[name].as_str().expect("text");
    let features = result["features"].as_object().unwrap_or_else(|| panic!("{result}"));
    let prefix = format!("{}/{}/g{}", text("store_id"), text("sample_id"), result["gen"]);
    let key = |(name, feature): (&String, &Value)| {
        (format!("{prefix}/{name}"), feature["seq"].as_u64().expect("a sequence number"))
    };
    features.iter().map(key).collect()
}

/// A number of the server's health.
pub fn health(server: &CaptureServer, name: &str) -> u64 {
    let health = http::health(server.field("http"));
    health[name].as_u64().unwrap_or_else(|| panic!("{name} in {health}"))
}
