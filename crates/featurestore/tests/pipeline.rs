//! The main job between real processes, through the binary.

use std::{
    path::Path,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;

/// Longest time of one run.
const LIMIT: Duration = Duration::from_secs(120);

fn featurestore(arguments: &[&str]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_featurestore"))
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let end = Instant::now() + LIMIT;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("{arguments:?} took more than {LIMIT:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}

fn pipeline(arguments: &[&str]) -> Value {
    let output = featurestore(&[&["pipeline", "--json"], arguments].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {}\n{stderr}", output.status);
    serde_json::from_slice(&output.stdout).expect("one JSON object and nothing else")
}

fn number(report: &Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("{name} in {report}"))
}

/// What must hold after every run.
fn check(report: &Value, samples: u64) {
    assert_eq!(number(report, "samples"), samples);
    assert_eq!(number(report, "mismatches"), 0);
    assert_eq!(number(report, "verified_bytes"), number(report, "bytes"));
    let mut published = 0;
    for server in report["servers"].as_array().unwrap() {
        assert_eq!(number(server, "published_samples"), number(server, "released_samples"));
        assert_eq!(number(server, "arena_free_bytes"), number(server, "arena_bytes"));
        assert_eq!(number(server, "arena_largest_free"), number(server, "arena_bytes"));
        assert_eq!(number(server, "resident_samples"), 0);
        assert_eq!(number(server, "reserved_bytes"), 0);
        assert_eq!(number(server, "duplicate_frees"), 0);
        published += number(server, "published_samples");
    }
    assert_eq!(published, samples);
    for name in [
        "tokens",
        "host_payload_bytes",
        "capture_elapsed_s",
        "materialize_active_s",
        "pipeline_elapsed_s",
        "cleanup_elapsed_s",
        "capture_samples_per_s",
        "materialize_samples_per_s",
        "pipeline_samples_per_s",
    ] {
        assert!(report[name].is_number(), "{name} in {report}");
    }
    // The arena, the pool or the mapping, and 96 MiB: here at most 64 MiB of each.
    for who in ["server", "trainer"] {
        let peak = number(&report["peak_rss_bytes"], who);
        assert!(peak > 0 && peak < (64 + 96) << 20, "{who}: {peak}");
    }
}

const SMALL: &[&str] =
    &["--samples", "24", "--hidden", "64", "--max-length", "512", "--arena", "16MiB"];

#[test]
fn shm_moves_everything_without_a_copy_in_the_trainer() {
    let report = pipeline(&[SMALL, &["--transport", "shm", "--quantum", "5"]].concat());
    check(&report, 24);
    assert_eq!(report["transport"], "shm");
    assert_eq!(number(&report, "host_payload_bytes"), 0);
}

#[test]
fn tcp_moves_everything_with_one_copy() {
    let report = pipeline(&[SMALL, &["--transport", "tcp", "--plugin"]].concat());
    check(&report, 24);
    assert_eq!(report["transport"], "tcp");
    assert_eq!(number(&report, "host_payload_bytes"), number(&report, "bytes"));
}

#[test]
fn auto_takes_shm_on_one_host_and_says_why() {
    let report = pipeline(&[SMALL, &["--servers", "3", "--concurrency", "2"]].concat());
    check(&report, 24);
    assert_eq!(report["transport"], "shm");
    let reasons = report["transport_reasons"].to_string();
    assert!(reasons.contains("mapped"), "{reasons}");
}

#[test]
fn a_full_arena_makes_the_servers_wait_and_nothing_is_lost() {
    let tight = ["--samples", "40", "--hidden", "64", "--max-length", "512", "--arena", "1MiB"];
    let report = pipeline(&[&tight, &["--quantum", "2"][..]].concat());
    check(&report, 40);
}

#[test]
fn real_captures_keep_every_sha256() {
    let input = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/minilm-capture");
    for transport in ["shm", "tcp"] {
        let report = pipeline(&[
            "--input",
            input.to_str().unwrap(),
            "--transport",
            transport,
            "--arena",
            "4MiB",
            "--quantum",
            "2",
        ]);
        check(&report, 3);
        assert_eq!(number(&report, "tokens"), 23);
        assert_eq!(number(&report, "bytes"), 106_352);
    }
}

#[test]
fn runs_that_cannot_work_say_what_to_do() {
    for (arguments, parts) in [
        (&["pipeline", "--samples", "0"][..], &["at least 1"][..]),
        (&["pipeline", "--arena", "1MiB"], &["larger than an arena", "--arena"]),
        (&["pipeline", "--transport", "smh"], &["did you mean shm"]),
        (&["pipeline", "--paper", "--samples", "3"], &["cannot be used with"]),
        (&["pipeline", "--input", "/nonexistent"], &["/nonexistent"]),
        (&["capture-server"], &["arena", "FEATURESTORE_ARENA"]),
        (&["capture-server", "--arena", "0"], &["zero"]),
        (&["capture-server", "--arena", "64TiB"], &["memory"]),
        (&["capture-server", "--arena", "16MiB", "--control", "0.0.0.0:0"], &["token"]),
    ] {
        let output = featurestore(arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        for part in parts {
            assert!(stderr.contains(part), "{arguments:?}: {stderr}");
        }
    }
}

#[test]
fn config_show_names_every_source() {
    let output = featurestore(&["config", "show"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("transport") && text.contains("default"));
}
