//! The main job from end to end, between real processes.

use std::process::Stdio;

use serde_json::Value;

use crate::common::{Process, STEP, Server, featurestore, has_device, run};

const REAL: [&str; 7] = ["pipeline", "--servers", "2", "--arena", "16MiB", "--seed", "42"];

const SMALL: [&str; 13] = [
    "pipeline",
    "--hidden",
    "64",
    "--taps",
    "5,19,33,47,61",
    "--servers",
    "2",
    "--arena",
    "16MiB",
    "--quantum",
    "3",
    "--seed",
    "42",
];

fn report(arguments: &[&str]) -> Value {
    let ended = run(arguments);
    assert!(ended.status.success(), "{arguments:?}: {}", ended.stderr);
    assert_eq!(ended.stdout.trim_end().lines().count(), 1, "one object and nothing else");
    serde_json::from_str(&ended.stdout).unwrap_or_else(|e| panic!("{e}: {}", ended.stdout))
}

fn number(report: &Value, field: &str) -> u64 {
    report[field].as_u64().unwrap_or_else(|| panic!("{field} in {report}"))
}

/// Every byte is accounted for: moved, compared, released, and the arenas are empty.
fn check(report: &Value, samples: u64, bytes_per_token: u64) {
    assert_eq!(number(report, "samples"), samples);
    assert_eq!(number(report, "bytes"), number(report, "tokens") * bytes_per_token);
    assert_eq!(number(report, "mismatches"), 0);
    let servers = report["servers"].as_array().expect("a list");
    let published: u64 = servers.iter().map(|s| number(s, "published_samples")).sum();
    assert_eq!(published, samples, "{report}");
    for server in servers {
        assert_eq!(number(server, "published_samples"), number(server, "released_samples"));
        assert_eq!(number(server, "arena_free_bytes"), number(server, "arena_bytes"));
        assert_eq!(number(server, "arena_largest_free"), number(server, "arena_bytes"));
        for zero in ["resident_samples", "reserved_bytes", "duplicate_frees"] {
            assert_eq!(number(server, zero), 0, "{zero}: {report}");
        }
        assert!(server["host_payload_bytes"].is_u64(), "{server}");
    }
    for time in ["capture", "materialize", "pipeline"] {
        let rate = report[&format!("{time}_samples_per_s")].as_f64();
        assert!(rate.is_some_and(|rate| rate > 0.0), "{time}: {report}");
    }
    for seconds in
        ["capture_elapsed_s", "materialize_active_s", "pipeline_elapsed_s", "cleanup_elapsed_s"]
    {
        assert!(report[seconds].as_f64().is_some_and(|s| s >= 0.0), "{seconds}: {report}");
    }
    let limit = 16 + 96; // MiB; the arena, and what a process may take beside it
    for process in ["server", "trainer"] {
        let peak = number(&report["peak_rss_bytes"], process) >> 20;
        assert!((1..=limit).contains(&peak), "{process}: {peak} MiB");
    }
}

#[test]
fn samples_come_through_shared_memory_and_go() {
    let report =
        report(&[&SMALL[..], &["--samples", "8", "--transport", "shm", "--json"]].concat());
    check(&report, 8, 6 * 64 * 2 + 16);
    assert_eq!(report["transport"], "shm");
    assert_eq!(report["verified_bytes"], report["bytes"]);
    assert_eq!(report["host_payload_bytes"], 0, "views copy nothing: {report}");
    assert_eq!(report["views"], true);
}

#[test]
fn samples_come_through_tcp_and_go() {
    let report =
        report(&[&SMALL[..], &["--samples", "8", "--transport", "tcp", "--json"]].concat());
    check(&report, 8, 6 * 64 * 2 + 16);
    assert_eq!(report["transport"], "tcp");
    assert_eq!(report["verified_bytes"], report["bytes"]);
    assert_eq!(report["host_payload_bytes"], report["bytes"], "each byte once: {report}");
    assert_eq!(report["views"], false);
}

#[test]
fn samples_are_received_where_the_trainer_wants_them() {
    let small = [&SMALL[..], &["--samples", "4", "--json"]].concat();
    let host = report(&[&small[..], &["--receive", "host"]].concat());
    check(&host, 4, 6 * 64 * 2 + 16);
    assert_eq!((&host["transport"], &host["on_device"]), (&"shm".into(), &false.into()));
    let reasons = host["transport_reasons"].as_array().expect("a list");
    for scheme in ["nvlink_intra", "nvlink"] {
        let found = reasons.iter().find(|found| found["scheme"] == scheme).expect("considered");
        assert_eq!((&found["configured"], &found["suitable"]), (&false.into(), &false.into()));
        assert!(found["reason"].as_str().is_some_and(|why| why.contains("receive = host")));
    }
    // A file that contradicts itself is put right by the flags, for all processes.
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    let text = b"transport = \"nvlink_intra\"\nreceive = \"host\"\n";
    std::io::Write::write_all(&mut file, text).expect("a writable file");
    let path = file.path().to_str().expect("UTF-8");
    let host = report(&[&small[..], &["--transport", "tcp", "--config", path]].concat());
    assert_eq!((&host["transport"], &host["on_device"]), (&"tcp".into(), &false.into()));

    for (flags, part) in [
        (["--transport", "shm", "--receive", "device"], "choose the transport tcp"),
        (["--transport", "mooncake", "--receive", "device"], "choose the transport tcp"),
        (["--transport", "nvlink_intra", "--receive", "host"], "choose the transport shm or tcp"),
    ] {
        let ended = run(&[&small[..], &flags].concat());
        assert_eq!(ended.status.code(), Some(1), "{flags:?}: {ended:?}");
        for part in [part, "setting=receive"] {
            assert!(ended.stderr.contains(part), "{flags:?}: {part}: {}", ended.stderr);
        }
        assert!(!ended.stderr.contains("pid"), "before anything is started: {}", ended.stderr);
    }
    for transport in ["tcp", "auto"] {
        let ended = run(&[&small[..], &["--receive", "device", "--transport", transport]].concat());
        if has_device() {
            let report: Value = serde_json::from_str(&ended.stdout).expect("a report");
            assert_eq!(report["on_device"], true, "{report}");
            continue;
        }
        assert_eq!(ended.status.code(), Some(1), "never into other memory: {ended:?}");
        let why = match cfg!(feature = "cuda") {
            true => "this machine has no CUDA driver",
            false => "build with --features cuda",
        };
        for part in [why, "setting=receive"] {
            assert!(ended.stderr.contains(part), "{transport}: {part}: {}", ended.stderr);
        }
    }
}

#[test]
fn the_plugin_form_and_the_automatic_choice_work_too() {
    let report = report(&[&SMALL[..], &["--samples", "5", "--plugin", "--json"]].concat());
    check(&report, 5, 6 * 64 * 2 + 16);
    assert_eq!(report["transport"], "shm", "everything is on this host");
    let reasons = report["transport_reasons"].as_array().expect("a list");
    for (scheme, suitable) in [("shm", true), ("tcp", false)] {
        let found = reasons.iter().find(|found| found["scheme"] == scheme).expect("considered");
        assert_eq!(found["available"], true, "{found}");
        assert_eq!(found["configured"], true, "{found}");
        assert_eq!(found["suitable"], suitable, "{found}");
        assert!(found["reason"].as_str().is_some_and(|why| why.contains("every server")));
    }
}

#[test]
fn real_captures_reproduce_their_manifest() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/minilm-capture");
    for transport in ["shm", "tcp"] {
        let report = report(
            &[
                &REAL[..],
                &["--quantum", "3", "--input", folder, "--transport", transport, "--json"],
            ]
            .concat(),
        );
        check(&report, 3, 1920 * 2 + 384 * 2 + 16);
        assert_eq!(number(&report, "tokens"), 5 + 8 + 10);
        assert_eq!(report["verified_bytes"], report["bytes"]);
    }
}

#[test]
fn a_manifest_that_disagrees_is_a_wrong_result() {
    let real = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/minilm-capture");
    let folder = tempfile::tempdir().expect("a temporary folder");
    for name in ["minilm-0000.safetensors", "minilm-0001.safetensors"] {
        std::fs::copy(format!("{real}/{name}"), folder.path().join(name)).expect("a copy");
    }
    let manifest = std::fs::read_to_string(format!("{real}/manifest.json")).expect("text");
    let mut manifest: Value = serde_json::from_str(&manifest).expect("JSON");
    manifest["samples"].as_array_mut().expect("a list").truncate(2);
    manifest["samples"][1]["tensors"]["loss_mask"]["sha256"] = "0".repeat(64).into();
    std::fs::write(folder.path().join("manifest.json"), manifest.to_string()).expect("written");
    let folder = folder.path().to_str().expect("UTF-8");
    let ended = run(&[&REAL[..], &["--quantum", "3", "--input", folder, "--json"]].concat());
    assert_eq!(ended.status.code(), Some(3), "{}", ended.stderr);
    assert!(ended.stderr.contains("loss_mask"), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).expect("the report all the same");
    assert_eq!(number(&report, "mismatches"), 1);
    assert_eq!(report["servers"][0]["resident_samples"], 0, "and everything is given back");
}

#[test]
fn the_same_seed_moves_the_same_load() {
    let of = |seed: &str| {
        report(&[&SMALL[..11], &["--seed", seed, "--samples", "6", "--json"]].concat())
    };
    let (a, b, c) = (of("1"), of("1"), of("2"));
    assert_eq!((&a["tokens"], &a["bytes"]), (&b["tokens"], &b["bytes"]));
    assert_ne!(a["tokens"], c["tokens"]);
}

#[test]
fn without_checks_nothing_is_verified() {
    let report = report(&[&SMALL[..], &["--samples", "4", "--no-verify", "--json"]].concat());
    check(&report, 4, 6 * 64 * 2 + 16);
    assert_eq!(report["verified_bytes"], 0);
}

#[test]
fn arenas_are_reused_many_times_over() {
    // 60 samples of about 1 MiB through two arenas of 8 MiB.
    let arguments = [
        "pipeline",
        "--hidden",
        "64",
        "--taps",
        "1,2,3,4,5",
        "--servers",
        "2",
        "--arena",
        "8MiB",
        "--quantum",
        "4",
        "--samples",
        "60",
        "--json",
    ];
    for transport in ["shm", "tcp"] {
        let report = report(&[&arguments[..], &["--transport", transport]].concat());
        check(&report, 60, 6 * 64 * 2 + 16);
        assert!(number(&report, "bytes") > 2 * 2 * (8 << 20), "{report}");
    }
}

/// Prompts of like length go together, and windows of the longest would take all there is: what is
/// sent leaves room for the rest of its window. In proportion this is the published load in two
/// arenas of 2 GiB.
#[test]
fn both_settings_finish_in_arenas_with_room_for_few_windows() {
    for preset in ["tuned", "controlled"] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let ledger = folder.path().join("kept.db");
        let ledger = ledger.to_str().expect("UTF-8");
        let mut command = featurestore(&[
            "pipeline",
            "--hidden",
            "64",
            "--samples",
            "200",
            "--arena",
            "28MiB",
            "--preset",
            preset,
            "--ledger",
            ledger,
            "--json",
        ]);
        let temporary = folder.path().join("tmp");
        std::fs::create_dir(&temporary).expect("a folder");
        command.env("TMPDIR", &temporary);
        let ended = Process::start(command).end(STEP);
        assert!(ended.status.success(), "{preset}: {}", ended.stderr);
        let report: Value = serde_json::from_str(&ended.stdout).expect("a report");
        assert_eq!(number(&report, "released_samples"), 200, "{report}");
        assert_eq!(number(&report["ledger"], "acknowledged"), 200, "{report}");
        assert_eq!(number(&report["ledger"], "steps"), 200_u64.div_ceil(16), "{report}");
        assert!(report["trainer_wait"]["p99_us"].is_u64(), "{report}");
        assert!(std::fs::metadata(ledger).is_ok_and(|file| file.len() > 0), "it is kept");
        assert_eq!(std::fs::read_dir(&temporary).expect("a folder").count(), 0, "and nothing else");
        let again = run(&["pipeline", "--hidden", "8", "--samples", "2", "--ledger", ledger]);
        assert_eq!(again.status.code(), Some(1), "another run's ledger is not written over");
        assert!(again.stderr.contains("cannot reuse a ledger"), "{}", again.stderr);
    }
}

/// Nothing is started for a run whose trainer could not begin its ledger.
#[test]
fn a_ledger_that_cannot_be_begun_is_refused_before_anything_starts() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    std::fs::write(at("empty"), "").expect("room");
    std::fs::write(at("text"), "no ledger\n".repeat(1000)).expect("room");
    for (name, why) in [
        ("empty", "empty, and no ledger"),
        ("text", "file is not a database (doing=open, ledger="),
        (".", "that is a folder"),
        ("no/such/folder/l.db", "folder exists"),
    ] {
        let path = at(name);
        let before = std::fs::read(&path).ok();
        let mut command = featurestore(&["pipeline", "--hidden", "8", "--samples", "2"]);
        command.args(["--ledger", &path]).env("TMPDIR", folder.path());
        let ended = Process::start(command).end(STEP);
        assert_eq!(ended.status.code(), Some(1), "{name}: {}", ended.stderr);
        assert!(ended.stderr.contains(why) && ended.stderr.contains(&path), "{}", ended.stderr);
        assert!(!ended.stderr.contains("transport      available"), "no trainer was asked");
        assert!(!ended.stderr.contains("trainer"), "{}", ended.stderr);
        assert_eq!(std::fs::read(&path).ok(), before, "{name} is left as it was");
    }
    let left = std::fs::read_dir(folder.path()).expect("a folder").count();
    assert_eq!(left, 2, "nothing else is made");
}

/// The folder for temporary files, by whom it was chosen, and before anything that needs it fails in
/// words of its own.
#[test]
fn a_temporary_folder_that_is_no_good_is_named_with_its_variable() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("file");
    std::fs::write(&file, "").expect("room");
    let missing = folder.path().join("missing");
    for (path, why) in [(&missing, "No such file"), (&file, "not a directory")] {
        for more in [&[][..], &["--transport", "shm"]] {
            let mut command = featurestore(&["pipeline", "--hidden", "8", "--samples", "2"]);
            command.args(more).env("TMPDIR", path);
            let ended = Process::start(command).end(STEP);
            assert_eq!(ended.status.code(), Some(1), "{}", ended.stderr);
            let line = ended.stderr.lines().last().expect("an error");
            let named = format!("(folder={}, variable=TMPDIR); ", path.display());
            assert!(line.contains(why) && line.contains(&named), "{line}");
            assert!(!ended.stderr.contains("transport      available"), "nothing was started");
        }
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1);
}

/// Both servers together never go beyond the rate, and are kept busy at it.
#[test]
fn limited_servers_are_kept_busy_and_no_faster() {
    let (samples, rate) = (240.0, 120.0);
    let arguments = ["pipeline", "--hidden", "64", "--arena", "28MiB", "--preset", "tuned"];
    let load = ["--samples", "240", "--server-rate", "120", "--json"];
    let report = report(&[&arguments[..], &load].concat());
    let seconds = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("a time in {report}"));
    let servers = report["servers"].as_array().expect("a list");
    let paced = |name: &str| servers.iter().map(|s| seconds(&s["paced"][name])).sum::<f64>();
    let busy = paced("busy_s") / servers.len() as f64;
    assert!(
        (busy * rate / samples - 1.0).abs() < 0.001,
        "by its tokens each has its share: {busy}"
    );
    assert!(seconds(&report["pipeline_elapsed_s"]) > 0.95 * samples / rate, "{report}");
    assert!(paced("idle_s") < 0.3 * paced("busy_s"), "there was always something to do: {report}");
    for part in ["starved_s", "compared_s", "boundaries_s"] {
        assert!(seconds(&report["trainer_wait"][part]) >= 0.0, "{part}");
    }
}

/// The arena's memory, which else comes page by page with the first captures.
#[test]
fn a_server_has_its_memory_before_it_is_ready_if_asked_to() {
    for (more, has) in [(&["--populate"][..], true), (&[], false)] {
        let arguments = ["capture-server", "--arena", "96MiB", "--transport", "shm"];
        let server = Server::start(&[&arguments[..], more].concat());
        let peak = server.health()["peak_rss_bytes"].as_u64().expect("measured");
        assert_eq!(peak > 96 << 20, has, "{more:?}: {peak}");
    }
}

#[test]
fn a_full_arena_makes_the_servers_wait_and_nothing_is_lost() {
    let tight = ["--arena", "1MiB", "--max-length", "512", "--quantum", "2", "--samples", "40"];
    let report = report(&[&["pipeline", "--hidden", "64", "--json"][..], &tight].concat());
    check(&report, 40, 6 * 64 * 2 + 16);
}

#[test]
fn settings_of_file_and_environment_reach_every_process() {
    let small = [
        "pipeline",
        "--hidden",
        "8",
        "--taps",
        "1",
        "--samples",
        "3",
        "--quantum",
        "2",
        "--max-length",
        "64",
        "--json",
    ];
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::io::Write::write_all(
        &mut file,
        b"transport = \"shm\"\narena = \"3MiB\"\ntoken = \"hush\"\n",
    )
    .expect("a writable file");
    let path = file.path().to_str().expect("UTF-8").to_owned();
    let mut command = featurestore(&[&small[..], &["--config", &path]].concat());
    command.env("FEATURESTORE_TRANSPORT", "tcp");
    let ended = Process::start(command).end(STEP);
    assert!(ended.status.success(), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).expect("a report");
    assert_eq!(report["transport"], "tcp", "the environment comes before the file");
    assert_eq!(report["servers"][0]["arena_bytes"], 3 << 20, "and the file before the default");
    assert!(!ended.stderr.contains("hush"), "{}", ended.stderr);

    let mut command = featurestore(&[&small[..], &["--transport", "shm"]].concat());
    command.env("FEATURESTORE_ARENA_KIND", "heap").env("FEATURESTORE_ARENA", "2MiB");
    let ended = Process::start(command).end(STEP);
    assert_eq!(ended.status.code(), Some(1), "never another transport than the one asked for");
    assert!(ended.stderr.contains("arena_kind"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("pid"), "before any server is started: {}", ended.stderr);
}

#[test]
fn settings_that_make_no_difference_are_refused_or_told() {
    let small = ["pipeline", "--samples", "2", "--hidden", "8", "--taps", "1", "--arena", "4MiB"];
    let small = [&small[..], &["--max-length", "64", "--json"]].concat();
    for (flags, setting) in [
        (&["--mooncake", "managed"][..], "mooncake"),
        (&["--transport", "tcp", "--mooncake-reads", "native"], "mooncake_reads"),
        (&["--transport", "mooncake", "--mooncake-admin", "127.0.0.1:1"], "mooncake_admin"),
    ] {
        let ended = run(&[&small[..], flags].concat());
        assert_eq!(ended.status.code(), Some(1), "{flags:?}: {ended:?}");
        let parts = ["has no use for it", &format!("setting={setting}"), "command line"];
        for part in parts {
            assert!(ended.stderr.contains(part), "{flags:?}: {part}: {}", ended.stderr);
        }
    }
    let ended = run(&["capture-server", "--arena", "1MiB", "--mooncake", "127.0.0.1:1"]);
    assert_eq!(ended.status.code(), Some(1), "it would not be in that store: {ended:?}");
    assert!(ended.stderr.contains("has no use for it"), "{}", ended.stderr);

    for (flags, setting) in [
        (["--transport", "shm", "--pool", "1MiB"], "pool"),
        (["--transport", "tcp", "--device", "1"], "device"),
    ] {
        let ended = run(&[&small[..], &flags].concat());
        assert!(ended.status.success(), "the same flags may go with every transport: {ended:?}");
        let told = format!("note: {setting} (from: command line) makes no difference here");
        assert!(ended.stderr.contains(&told), "{}", ended.stderr);
    }

    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::io::Write::write_all(&mut file, b"max_in_flight = 7\nlease = \"9s\"\n").expect("written");
    let path = file.path().to_str().expect("UTF-8");
    let mut command = featurestore(&[&small[..], &["--config", path]].concat());
    command.env("FEATURESTORE_HTTP", "127.0.0.1:1").env("FEATURESTORE_MOONCAKE_VENV", "/nowhere");
    let ended = Process::start(command).end(STEP);
    assert!(ended.status.success(), "they may be meant for another command: {}", ended.stderr);
    let notes: Vec<&str> = ended.stderr.lines().filter(|line| line.contains("note:")).collect();
    assert_eq!(notes.len(), 2, "each once, and no other: {}", ended.stderr);
    assert!(notes[0].contains("http (from: environment FEATURESTORE_HTTP)"), "{notes:?}");
    assert!(notes[1].contains("max_in_flight (from: file)"), "{notes:?}");

    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/minilm-capture");
    let real = ["--input", folder, "--max-length", "9", "--taps", "1", "--hidden", "8"];
    let first = [&REAL[..], &real, &["--samples", "2", "--quantum", "2", "--json"]].concat();
    let ended = run(&first[..]);
    assert!(ended.status.success(), "{ended:?}");
    for flag in ["--max-length", "--taps", "--hidden"] {
        let told = format!("note: {flag} makes no difference here");
        assert!(ended.stderr.contains(&told), "{}", ended.stderr);
    }
    let report: Value = serde_json::from_str(&ended.stdout).expect("a report");
    assert_eq!(number(&report, "samples"), 2, "the folder has three");
}

#[test]
fn a_person_gets_a_table_and_no_escape_codes_in_a_pipe() {
    let ended = run(&[&SMALL[..], &["--samples", "3"]].concat());
    assert!(ended.status.success(), "{}", ended.stderr);
    for part in ["transport", "verified", "server 1", "peak memory"] {
        assert!(ended.stdout.contains(part), "{part} in {}", ended.stdout);
    }
    assert!(!ended.stdout.contains('\x1b') && !ended.stderr.contains('\x1b'));
    let materialize = |text: &str| {
        let line = text.lines().find(|line| line.starts_with("materialize"));
        line.unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    let line = materialize(&ended.stdout);
    assert!(line.contains("views") && !line.contains("GB/s"), "nothing is moved: {line}");
    let ended = run(&[&SMALL[..], &["--samples", "3", "--transport", "tcp"]].concat());
    assert!(materialize(&ended.stdout).contains("GB/s"), "{}", ended.stdout);
    assert!(
        ended.stderr.contains("available") && ended.stderr.contains("suitable"),
        "why this transport: {}",
        ended.stderr
    );
}

#[test]
fn runs_that_could_never_end_are_refused_up_front() {
    for (arguments, parts) in [
        (
            &["--quantum", "64", "--samples", "64", "--arena", "8MiB"][..],
            &["quantum", "--arena"][..],
        ),
        (&["--arena", "64KiB", "--samples", "8"], &["larger than an arena", "--max-length"]),
        (&["--servers", "0"], &["servers"]),
        (&["--servers", "100000"], &["servers=100000", "most=256"]),
        (&["--quantum", "0"], &["quantum"]),
        (&["--concurrency", "0"], &["concurrency"]),
        (&["--samples", "0"], &["samples"]),
        (&["--paper"], &["cannot be used with"]),
        (&["--input", "/nowhere"], &["/nowhere"]),
    ] {
        let fixed = ["pipeline", "--hidden", "64", "--taps", "1,2,3,4,5"];
        let ended = run(&[&fixed[..], arguments].concat());
        assert!(matches!(ended.status.code(), Some(1 | 2)), "{arguments:?}: {ended:?}");
        for part in parts {
            assert!(ended.stderr.contains(part), "{arguments:?}: {}", ended.stderr);
        }
    }
}

#[test]
fn a_run_goes_on_when_nobody_can_be_told_of_its_progress() {
    let mut command =
        featurestore(&["pipeline", "--samples", "2", "--hidden", "16", "--taps", "1"]);
    command.args(["--arena", "16MiB", "--max-length", "64", "--json"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command.stderr(std::fs::File::create("/dev/full").expect("a device that is always full"));
    let ended = command.output().expect("it starts");
    assert!(ended.status.success(), "{ended:?}");
    let report: Value = serde_json::from_slice(&ended.stdout).expect("a report");
    assert_eq!(number(&report, "released_samples"), 2);
}

#[test]
fn gpus_that_nothing_would_use_are_refused() {
    for flags in [["--server-devices", "0"], ["--trainer-device", "1"]] {
        let mut arguments = vec!["pipeline", "--samples", "1", "--arena", "16MiB"];
        arguments.extend(["--hidden", "16", "--taps", "1", "--transport", "shm"]);
        arguments.extend(flags);
        let ended = run(&arguments);
        assert!(!ended.status.success());
        assert!(ended.stderr.contains("arenas are in host memory"), "{}", ended.stderr);
    }
}

#[cfg(not(feature = "store"))]
#[test]
fn a_build_without_mooncake_says_how_to_get_one() {
    for arguments in [
        &["pipeline", "--transport", "store", "--mooncake", "managed", "--samples", "1"][..],
        &["capture-server", "--transport", "store", "--mooncake", "127.0.0.1:1", "--arena", "1MiB"],
    ] {
        let ended = run(arguments);
        assert_eq!(ended.status.code(), Some(1), "{arguments:?}: {ended:?}");
        assert!(ended.stderr.contains("--features mooncake-python"), "{}", ended.stderr);
    }
}

/// A quantum larger than any job is one step at its end.
#[test]
fn a_quantum_beyond_everything_is_one_step() {
    let quantum = u64::MAX.to_string();
    let small = ["--samples", "4", "--hidden", "64", "--arena", "16MiB", "--max-length", "64"];
    let report = report(&[&["pipeline", "--json", "--quantum", &*quantum][..], &small].concat());
    assert_eq!((&report["samples"], &report["mismatches"]), (&4.into(), &0.into()), "{report}");
}
