//! A client as they exist today, in plain Python, against a real server with real captures.

use std::{path::Path, process::Command};

use featurestore_tests::process::CaptureServer;
use serde_json::{Value, json};

fn data() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/minilm-capture")
}

fn int64(sample: &featurestore::input::Sample, name: &str) -> Vec<i64> {
    let name = transport_core::FeatureName::new(name).unwrap();
    let mut bytes = vec![0; sample.meta(&name).unwrap().nbytes() as usize];
    sample.read(&name, &mut bytes).unwrap();
    bytes.chunks(8).map(|word| i64::from_le_bytes(word.try_into().unwrap())).collect()
}

#[test]
#[ignore = "needs python3; cargo xtask test runs it where python3 is installed"]
fn a_plain_python_client_captures_reads_and_frees() {
    let folder = featurestore::input::Folder::open(&data()).unwrap();
    let prompts: Vec<Value> = folder
        .names()
        .map(|name| {
            let sample = folder.sample(name).unwrap();
            json!({
                "sample_id": format!("run:{name}"),
                "input_ids": int64(sample, "input_ids"),
                "loss_mask": int64(sample, "loss_mask"),
            })
        })
        .collect();
    let temporary = tempfile::tempdir().unwrap();
    let file = temporary.path().join("prompts.json");
    std::fs::write(&file, Value::from(prompts).to_string()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/plain_client.py");

    for extra in [&[][..], &["--proto", "1"], &["--proto", "2", "--plugin"]] {
        let server =
            CaptureServer::start("4MiB", &["--input", data().to_str().expect("a UTF-8 path")]);
        let output = Command::new("python3")
            .arg(&script)
            .arg(format!("http://{}", server.field("http")))
            .arg(&file)
            .args(extra)
            .output()
            .expect("python3 is installed");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{extra:?}: {stderr}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        for name in folder.names() {
            let sums = folder.sample(name).unwrap().sha256();
            assert_eq!(sums.len(), 4);
            for (tensor, sum) in sums {
                let found = &report["samples"][format!("run:{name}")][&tensor];
                assert_eq!(found, &json!(sum), "{extra:?} {name}/{tensor}");
            }
        }
        assert_eq!(report["before"]["resident_samples"], 3);
        let after = &report["after"];
        assert_eq!(after["resident_samples"], 0);
        assert_eq!(after["published_samples"], after["released_samples"]);
        assert_eq!(after["arena_largest_free"], after["arena_bytes"]);
        assert_eq!(after["duplicate_frees"], 1, "the key that never was");
        assert_eq!(after["protocol_errors"], 0);
    }
}
