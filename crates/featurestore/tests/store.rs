//! Capture servers and the main job over a real Mooncake Store.
//!
//! `cargo xtask test` prepares what these need. By hand: `cargo xtask mooncake-venv`, then
//! `cargo test -p featurestore --features mooncake-python --test store -- --ignored`.
#![cfg(feature = "mooncake-python")]

#[allow(dead_code, unreachable_pub)] // shared with the tests of the command line
#[path = "cli/common.rs"]
mod common;
#[cfg(feature = "mooncake")]
#[path = "../../mooncake-sys/tests/support/mod.rs"]
mod support;

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use common::{Process, STEP, Server, arguments, children, eventually, featurestore, parent};
use mooncake_sys::master::{ManagedMaster, MasterOptions};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Longest run of one job.
const JOB: Duration = Duration::from_secs(180);

/// Longest time until the death of a process is noticed, on a busy machine.
const NOTICED: Duration = Duration::from_secs(20);

/// The virtual environment with Mooncake's wheel.
fn environment() -> PathBuf {
    let named = std::env::var_os("FEATURESTORE_MOONCAKE_VENV").map(PathBuf::from);
    let made = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/mooncake-venv");
    let path = named.unwrap_or(made);
    assert!(
        path.join("bin/mooncake_master").exists(),
        "no Mooncake at {}: run `cargo xtask mooncake-venv` or set FEATURESTORE_MOONCAKE_VENV",
        path.display()
    );
    path
}

fn master() -> ManagedMaster {
    ManagedMaster::start(&MasterOptions::of_environment(&environment())).expect("a master")
}

/// The command line with a store, whose temporary files go to `folder`.
fn over_store(arguments: &[&str], master: &str, folder: &Path) -> Command {
    let mut command = featurestore(arguments);
    command.args(["--transport", "store", "--mooncake", master, "--mooncake-venv"]);
    command.arg(environment()).env("TMPDIR", folder);
    command
}

const SMALL: [&str; 11] = [
    "pipeline",
    "--hidden",
    "256",
    "--taps",
    "5,19,33",
    "--servers",
    "2",
    "--arena",
    "128MiB",
    "--quantum",
    "8",
];

fn number(report: &Value, field: &str) -> u64 {
    report[field].as_u64().unwrap_or_else(|| panic!("{field} in {report}"))
}

/// Every byte is accounted for, by the servers and by the master.
fn check(report: &Value, samples: u64) {
    check_of(report, samples, 4); // one a tensor
}

/// The same, with so many objects a sample.
fn check_of(report: &Value, samples: u64, objects: u64) {
    assert_eq!(report["transport"], "store");
    assert_eq!(number(report, "samples"), samples);
    assert_eq!(number(report, "bytes"), number(report, "tokens") * (4 * 256 * 2 + 16));
    assert_eq!(report["verified_bytes"], report["bytes"]);
    assert_eq!(number(report, "mismatches"), 0);
    assert_eq!(number(report, "released_samples"), samples);
    let servers = report["servers"].as_array().expect("a list");
    let sum = |field| servers.iter().map(|s| number(s, field)).sum::<u64>();
    assert_eq!((sum("published_samples"), sum("released_samples")), (samples, samples));
    assert_eq!(sum("resident_samples"), 0);
    assert!(servers.iter().all(|s| number(s, "registrations") == 1), "{report}");
    assert_eq!(number(report, "registrations_while_running"), 0);
    let store = &report["mooncake"];
    assert_eq!(number(store, "written_objects"), objects * samples, "{report}");
    assert_eq!((number(store, "objects"), number(store, "allocated_bytes")), (0, 0), "{report}");
    assert_eq!(number(store, "evicted_objects"), 0);
    assert_eq!(number(store, "capacity_bytes"), 256 << 20);
}

fn logs(folder: &Path) -> usize {
    std::fs::read_dir(folder).expect("the folder is ours").count()
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn the_main_job_runs_over_a_store_of_its_own() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (form, samples) in [(None, "64"), (Some("--plugin"), "5")] {
        let arguments = [&SMALL[..], &["--samples", samples, "--json"]].concat();
        let mut command = over_store(&arguments, "managed", folder.path());
        command.args(form);
        let process = Process::start(command);
        let pid = process.id();
        let mut seen = Vec::new();
        eventually("a master, two servers and a trainer", || {
            seen = children(pid);
            seen.len() == 4
        });
        let ended = process.end(JOB);
        assert!(ended.status.success(), "{}", ended.stderr);
        check(&serde_json::from_str(&ended.stdout).expect("one object"), samples.parse().unwrap());
        assert!(seen.iter().all(|child| parent(*child).is_none()), "all it started has ended");
        assert_eq!(logs(folder.path()), 0, "a good run leaves no log");
    }
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn the_main_job_runs_over_a_store_that_is_there() {
    for (settings, objects) in [
        (&[][..], 4),
        (&["--mooncake-reads", "mooncake"], 4),
        (&["--mooncake-group-below", "1GiB", "--mooncake-host", "::1"], 1),
    ] {
        let master = master();
        let folder = tempfile::tempdir().expect("a temporary folder");
        let admin = master.admin().address().to_string();
        let common = ["--samples", "12", "--json", "--mooncake-admin", admin.as_str()];
        let arguments = [&SMALL[..], &common, settings].concat();
        let address = master.address().to_string();
        let ended = Process::start(over_store(&arguments, &address, folder.path())).end(JOB);
        assert!(ended.status.success(), "{settings:?}: {}", ended.stderr);
        check_of(&serde_json::from_str(&ended.stdout).expect("one object"), 12, objects);
        assert!(master.metric("master_key_count").is_ok(), "it is left running");
        master.stop();
    }
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn what_receiving_from_the_store_on_a_device_lacks_is_said() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let arguments = [&SMALL[..], &["--samples", "4", "--json", "--receive", "device"]].concat();
    let ended = Process::start(over_store(&arguments, "managed", folder.path())).end(JOB);
    if common::has_device() {
        let report: Value = serde_json::from_str(&ended.stdout).expect("one object");
        check(&report, 4);
        assert_eq!(report["on_device"], true, "{report}");
        return;
    }
    assert_eq!(ended.status.code(), Some(1), "never into other memory: {ended:?}");
    let why = match cfg!(feature = "cuda") {
        true => "store is not available: load CUDA driver",
        false => "build with --features cuda",
    };
    for part in [why, "setting=receive"] {
        assert!(ended.stderr.contains(part), "{part}: {}", ended.stderr);
    }
}

#[cfg(feature = "mooncake")]
#[test]
#[ignore = "needs a Mooncake venv and FEATURESTORE_STORE_LIBRARY_DIR, a directory with \
            libmooncake_store.so below mooncake/ and libcudart.so.13: cargo xtask mooncake-venv"]
fn the_main_job_runs_through_the_c_library() {
    let root = std::env::var_os("FEATURESTORE_STORE_LIBRARY_DIR").expect("names the directory");
    let root = Path::new(&root);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let logs_in = tempfile::tempdir().expect("a temporary folder");
    let preload = [support::stub_cuda(folder.path()), root.join("libcudart.so.13")];
    let preload = preload.map(|path| path.display().to_string()).join(",");
    let arguments = [&SMALL[..], &["--samples", "24", "--json"]].concat();
    let mut command = over_store(&arguments, "managed", logs_in.path());
    command.args(["--mooncake-preload", &preload, "--mooncake-library"]);
    command.arg(root.join("mooncake/libmooncake_store.so"));
    let ended = Process::start(command).end(JOB);
    assert!(ended.status.success(), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).expect("one object");
    check(&report, 24);
    let reasons = report["transport_reasons"].to_string();
    assert!(reasons.contains("C library: ") && reasons.contains("its file is named"), "{reasons}");
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn what_was_started_ends_with_the_job_however_it_ends() {
    let long = [&SMALL[..], &["--samples", "100000", "--json"]].concat();
    let is = |pid: &u32, what| arguments(*pid).contains(what);
    for how in ["SIGTERM", "SIGINT", "a server", "the master", "a stopped master"] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let process = Process::start(over_store(&long, "managed", folder.path()));
        let mut seen = Vec::new();
        eventually("a master, two servers and a trainer", || {
            seen = children(process.id());
            seen.len() == 4
        });
        std::thread::sleep(Duration::from_millis(500)); // samples are on their way
        let victim = |what| *seen.iter().find(|pid| is(pid, what)).expect("it runs");
        let send = |pid: u32, signal| {
            let pid = rustix::process::Pid::from_raw(pid as i32).expect("not 0");
            rustix::process::kill_process(pid, signal).expect("it runs");
        };
        let (master, server) = (victim("mooncake_master"), victim("capture-server"));
        match how {
            "SIGTERM" => process.signal(Signal::TERM),
            "SIGINT" => process.signal(Signal::INT),
            "a server" => send(server, Signal::KILL),
            "the master" => send(master, Signal::KILL),
            _ => {
                send(master, Signal::STOP);
                std::thread::sleep(Duration::from_secs(4)); // it is told, and others wait still
                process.signal(Signal::TERM);
            }
        }
        let ended = process.end(if how == "the master" { NOTICED } else { JOB });
        assert_eq!(ended.status.code(), Some(1), "{how}: {}", ended.stderr);
        let named = match how {
            "a server" => format!("(pid {server}) died: signal: 9"),
            "the master" => format!("gone: mooncake_master (pid {master}) died: signal: 9"),
            "a stopped master" => {
                format!("featurestore: mooncake_master (pid {master}) is stopped")
            }
            signal => signal.to_owned(),
        };
        assert!(ended.stderr.contains(&named), "{how}: {named}: {}", ended.stderr);
        eventually("all it started has ended", || {
            seen.iter().all(|child| parent(*child).is_none())
        });
        assert_eq!(logs(folder.path()), 1, "{how}: the log is kept");
        assert!(ended.stderr.contains("featurestore-mooncake-master-"), "{}", ended.stderr);
    }
}

/// Reads objects with Mooncake's own client: length and content of each, or null.
const READ: &str = "\
import json, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 64 << 20, 'tcp', '', sys.argv[1]) == 0
found = {key: store.get(key).hex() if store.is_exist(key) == 1 else None for key in sys.argv[2:]}
print('@@' + json.dumps(found), flush=True)
store.close()
";

fn read(master: &str, keys: &[String]) -> Value {
    let output = Command::new(environment().join("bin/python"))
        .args(["-c", READ, master])
        .args(keys)
        .output()
        .expect("Python runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find_map(|line| line.strip_prefix("@@"));
    serde_json::from_str(line.unwrap_or_else(|| panic!("{output:?}"))).expect("JSON")
}

fn request(sample: &str, tokens: &[i64], replace: bool) -> Value {
    let rows = json!([1, tokens.len()]);
    json!({
        "input_ids": [tokens],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        "spec_capture": [{
            "store_id": "run", "sample_id": sample, "gen": 1, "replace": replace,
            "features": {"aux": "hidden_states", "last_hidden": "target"},
            "passthrough": [{"name": "input_ids", "data": tokens, "shape": rows, "dtype": "int64"}],
        }],
    })
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn a_server_publishes_as_those_of_today_do() {
    let master = master();
    let address = master.address().to_string();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let arguments = ["capture-server", "--arena", "32MiB", "--hidden", "8", "--taps", "1,2"];
    let server = Server::spawn(over_store(&arguments, &address, folder.path()));
    assert_eq!(
        (&server.ready["transport"], &server.ready["control"]),
        (&json!("store"), &Value::Null)
    );
    assert_eq!(number(&server.ready, "registrations"), 1);

    // To the byte: no address, no arena, no sequence number, no holder, and this order of fields.
    let body = request("run:task-1", &[7, 8, 9], false).to_string();
    let headers = [("x-featurestore-holder", "trainer-1")];
    let (status, _, text) =
        common::http(&server.address("http"), "POST", "/generate", &headers, body.as_bytes());
    assert_eq!(status, 200, "{text}");
    let result = concat!(
        r#"{"sample_id":"run:task-1","store_id":"run","gen":1,"aux_layer_ids":[1,2],"features":{"#,
        r#""hidden_states":{"shape":[1,3,16],"dtype":"bfloat16"},"#,
        r#""target":{"shape":[1,3,8],"dtype":"bfloat16"},"#,
        r#""input_ids":{"shape":[1,3],"dtype":"int64"}}}"#
    );
    let row = format!(r#"[{{"text":"","meta_info":{{"spec_capture":{result}}}}}]"#);
    assert_eq!(text, row);

    // As raw bytes under the documented keys, for Mooncake's own client.
    let key = |name: &str| format!("run/run:task-1/g1/{name}");
    let keys = ["hidden_states", "target", "input_ids", "absent"].map(key);
    let objects = read(&address, &keys);
    let bytes = |name: &str| objects[key(name)].as_str().map(|hex| hex.len() / 2);
    assert_eq!((bytes("hidden_states"), bytes("target")), (Some(3 * 16 * 2), Some(3 * 8 * 2)));
    let ids: String =
        [7u64, 8, 9].iter().flat_map(|id| id.to_le_bytes()).map(|b| format!("{b:02x}")).collect();
    assert_eq!(objects[key("input_ids")], ids);
    assert_eq!(objects[key("absent")], Value::Null);

    // A key that exists is refused, or replaced as asked.
    let again = server.generate(&[], &request("run:task-1", &[1, 2, 3], false)).1.to_string();
    assert!(again.contains("the key exists"), "{again}");
    let health = server.health();
    assert_eq!((number(&health, "published_samples"), number(&health, "released_samples")), (1, 0));
    let again = server.generate(&[], &request("run:task-1", &[1, 2], true)).1.to_string();
    assert!(again.contains(r#""shape":[1,2,16]"#), "{again}");
    assert_eq!(read(&address, &keys)[key("input_ids")].as_str().map(str::len), Some(2 * 16));
    let health = server.health();
    assert_eq!((number(&health, "published_samples"), number(&health, "resident_samples")), (2, 1));
    assert_eq!(number(&health, "registrations"), 1, "none on the hot path");
    assert_eq!(master.metric("master_key_count").expect("metrics"), 3.0);

    server.process.signal(Signal::TERM);
    let ended = server.process.end(STEP);
    assert!(ended.status.success(), "{}", ended.stderr);
    master.stop();
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn a_request_that_never_fits_is_refused_and_one_that_does_waits() {
    let master = master();
    let address = master.address().to_string();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let arguments = [
        "capture-server",
        "--arena",
        "16MiB",
        "--pool",
        "1MiB",
        "--hidden",
        "1024",
        "--taps",
        "1",
        "--deadline",
        "3s",
    ];
    let server = Server::spawn(over_store(&arguments, &address, folder.path()));
    let tokens: Vec<i64> = (0..400).collect(); // 1.6 MiB with both hidden states
    let (_, refused) = server.generate(&[], &request("run:large", &tokens, false));
    let refused = refused.to_string();
    assert!(refused.contains("--pool"), "{refused}");
    let tokens: Vec<i64> = (0..200).collect();
    let names: Vec<String> = (0..6).map(|i| format!("run:{i}")).collect();
    std::thread::scope(|scope| {
        let asked: Vec<_> = names
            .iter()
            .map(|name| scope.spawn(|| server.generate(&[], &request(name, &tokens, false)).1))
            .collect();
        for answer in asked {
            let answer = answer.join().expect("no panic").to_string();
            assert!(answer.contains(r#""shape":[1,200,1024]"#), "{answer}");
        }
    });
    assert_eq!(number(&server.health(), "registrations"), 1);
    server.process.signal(Signal::TERM);
    assert!(server.process.end(STEP).status.success());
    master.stop();
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn the_doctor_knows_the_wheel_and_the_master() {
    let master = master();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (address, admin) = (master.address().to_string(), master.admin().address().to_string());
    let arguments = ["doctor", "--strict", "--json", "--mooncake-admin", &admin];
    let doctor = |master: &str| {
        let ended = Process::start(over_store(&arguments, master, folder.path())).end(STEP);
        let json: Value =
            serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{ended:?}"));
        (ended.status.code(), json)
    };
    let (code, all) = doctor(&address);
    assert_eq!((code, &all["chosen"]), (Some(0), &json!("store")), "{all}");
    let facts = all["sections"].as_array().expect("a list").iter();
    let facts = facts.flat_map(|section| section["facts"].as_array().expect("a list"));
    let fact = |name: &str| {
        let mut found = facts.clone().filter(|fact| fact["name"] == name);
        found.next().unwrap_or_else(|| panic!("{name}: {all}"))["value"].clone()
    };
    for (name, file) in [("wheel's store", "store"), ("wheel's engine", "engine")] {
        let path = fact(name).as_str().map(PathBuf::from).expect("a path");
        assert!(path.is_file() && path.to_string_lossy().contains(file), "{}", path.display());
    }
    assert!(fact("support flags")["SUPPORT_CUDA"].is_boolean());
    assert!(fact("master").as_str().is_some_and(|text| text.contains("answers")));
    assert_eq!(fact("master's metrics")["objects"], 0);
    assert_eq!(fact("objects")["hard_pin"], true);
    master.stop();

    let (code, all) = doctor(&address);
    assert_eq!((code, &all["chosen"]), (Some(1), &Value::Null), "{all}");
    assert!(all["problem"].as_str().is_some_and(|why| why.contains(&address)), "{all}");
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn a_store_that_is_not_there_is_named_at_once() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let nobody = "127.0.0.1:1";
    for (arguments, master, parts) in [
        (&["capture-server", "--arena", "1MiB"][..], nobody, &["master", nobody][..]),
        (&["capture-server", "--arena", "1MiB"], "managed", &["only the pipeline", "--mooncake"]),
        (&["pipeline", "--samples", "1", "--max-length", "64"], nobody, &["master", nobody]),
        (&["pipeline", "--samples", "1", "--max-length", "64"], "nonsense", &["managed"]),
    ] {
        let ended = Process::start(over_store(arguments, master, folder.path())).end(STEP);
        assert!(matches!(ended.status.code(), Some(1 | 2)), "{ended:?}");
        for part in parts {
            assert!(ended.stderr.contains(part), "{arguments:?} {master}: {}", ended.stderr);
        }
    }
}

/// The log of a managed master is the first thing that goes there.
#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn a_temporary_folder_that_is_not_there_is_named_before_a_master_is_started() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let missing = folder.path().join("missing");
    let arguments = ["pipeline", "--samples", "1", "--max-length", "64"];
    let ended = Process::start(over_store(&arguments, "managed", &missing)).end(STEP);
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let named = format!("(folder={}, variable=TMPDIR); let TMPDIR name", missing.display());
    let line = ended.stderr.lines().last().expect("an error");
    assert!(line.contains(&named) && !line.contains("mooncake_master"), "{line}");
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn the_main_job_runs_through_mooncakes_own_engine() {
    let arguments =
        [&SMALL[..], &["--samples", "12", "--json", "--transport", " MoonCake "]].concat();
    let mut command = featurestore(&arguments);
    command.arg("--mooncake-venv").arg(environment());
    // Whatever these say, the engine runs what it is told to, or says that it does not.
    command.env("MC_FORCE_MNNVL", "0").env("MC_INTRANODE_NVLINK", "");
    let ended = Process::start(command).end(JOB);
    assert!(ended.status.success(), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).expect("one object");
    assert_eq!(report["transport"], "mooncake");
    assert_eq!(report["verified_bytes"], report["bytes"]);
    assert_eq!((number(&report, "mismatches"), number(&report, "released_samples")), (0, 12));

    let refused = [&arguments[..], &["--mooncake-protocol", "rdma"]].concat();
    let mut command = featurestore(&refused);
    command.arg("--mooncake-venv").arg(environment());
    let ended = Process::start(command).end(JOB);
    if Path::new("/sys/class/infiniband").exists() {
        return; // there may be a card that runs it
    }
    assert!(!ended.status.success(), "it never takes tcp instead: {}", ended.stdout);
    assert!(ended.stderr.contains("another transport than the one asked for"), "{}", ended.stderr);
}
