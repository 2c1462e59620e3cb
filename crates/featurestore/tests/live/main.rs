//! Rollouts through a real Mooncake Store: exchanged with Mooncake's own Python code, both ways, and
//! put and got by processes of this crate.
//!
//! `cargo xtask test` prepares what these need. By hand:
//! `FEATURESTORE_MOONCAKE_VENV=… FEATURESTORE_MOONCAKE_NEXT_VENV=… cargo test -p featurestore
//! --features mooncake-python --test live -- --include-ignored`.

#[path = "../../../mooncake-sys/tests/support/mod.rs"]
mod support;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio},
    time::{Duration, Instant},
};

use mooncake_sys::master::ManagedMaster;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
/// Longest time that any single step may take, on a busy machine.
const STEP: Duration = Duration::from_secs(60);

/// A Python process with a store client that adds memory; ended when dropped.
struct Peer {
    child: Child,
    input: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    fn start(master: &ManagedMaster, venv: &Path, preload: &[PathBuf]) -> Self {
        let preload: Vec<_> = preload.iter().map(|p| p.display().to_string()).collect();
        let mut child = Command::new(venv.join("bin/python"))
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/live/peer.py"))
            .args([master.address().to_string(), (256 * MIB).to_string()])
            .env("LD_PRELOAD", preload.join(":"))
            .env("MC_TCP_BIND_ADDRESS", "127.0.0.1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let mut peer = Self { child, input, answers };
        let ready = peer.answer();
        assert_eq!(ready["setup"], 0, "{ready}");
        peer
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.answers.read_line(&mut line).unwrap() > 0, "the peer ended");
            if let Some(answer) = line.trim().strip_prefix("@@") {
                let answer: Value = serde_json::from_str(answer).unwrap();
                assert!(answer.get("error").is_none(), "{answer}");
                return answer;
            }
        }
    }

    fn ask(&mut self, ask: Value) -> Value {
        writeln!(self.input, "{ask}").unwrap();
        self.answer()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended already
        let _ = self.child.wait();
    }
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_featurestore"));
    command.args(arguments).env("FEATURESTORE_MOONCAKE_VENV", support::environment());
    command.stdin(Stdio::null());
    command
}

/// Runs a command that must succeed within a bound; what it printed.
fn run(arguments: &[&str]) -> String {
    let mut child =
        command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let end = Instant::now() + STEP;
    // What these commands print fits in a pipe.
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            let _ = child.kill();
            panic!("{arguments:?} does not end: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    assert!(status.success(), "{arguments:?}: {}", text(stderr));
    text(stdout)
}

/// The line of JSON that a command printed, among what Mooncake itself may print.
fn json_of(printed: &str) -> Value {
    let line = printed.lines().find(|line| line.starts_with('{'));
    serde_json::from_str(line.unwrap_or_else(|| panic!("{printed:?}"))).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn keys(master: &ManagedMaster) -> f64 {
    master.metric("master_key_count").unwrap()
}

/// Everything that both sides can hand to each other, with one generation of the Python code.
fn exchange(venv: &Path, preload: &[PathBuf]) {
    let dicts = [
        ("slime", None),
        ("large", Some(100_000)),
        ("one row", None),
        ("nested", None),
        ("layouts", None),
        ("layouts", Some(16)),
    ];
    exchange_all(venv, preload, &dicts);
}

/// Each dict by name, perhaps cut after so many bytes: what Python puts and Rust gets, and the
/// other way round; then each side removes what the other one wrote.
fn exchange_all(venv: &Path, preload: &[PathBuf], dicts: &[(&str, Option<u64>)]) {
    let master = support::master();
    let address = master.address().to_string();
    let mut peer = Peer::start(&master, venv, preload);
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let live = ["--live", "--mooncake", &address, "--pool", "64MiB"];
    let layout = "flat";
    for &(name, chunk) in dicts {
        // Python puts, Rust gets.
        let mut ask = json!({"op": "put", "name": name});
        if let Some(chunk) = chunk {
            ask["chunk"] = chunk.into();
        }
        let put = peer.ask(ask);
        assert!(keys(&master) > 2.0);
        let (theirs, decoded) = (file("theirs.json"), file("decoded.json"));
        fs::write(&theirs, put["ref"].to_string()).unwrap();
        let flags = ["rollout", "decode", "--ref", text(&theirs), "--layout", layout, "--json"];
        let printed = run_to_file(&[&flags[..], &live[..]].concat(), &decoded);
        let record = json_of(&printed);
        let expected = put["values"].as_object().unwrap();
        let found = record["values"].as_object().unwrap();
        assert_eq!(found.len(), expected.len(), "{name}");
        for (field, value) in expected {
            assert_eq!(&found[field], value, "{name}: {field}");
        }
        for (field, kinds) in put["arrays"].as_object().unwrap() {
            assert_eq!(&record["kinds"][field]["rows"], kinds, "{name}: {field}");
        }

        // Rust puts the same under keys of its own, Python gets.
        let ours = file("ours.json");
        let chunk = chunk.unwrap_or(64 << 20).to_string();
        fs::write(&decoded, record.to_string()).unwrap();
        let flags = [
            "rollout",
            "encode",
            "--decoded",
            text(&decoded),
            "--like",
            text(&theirs),
            "--prefix",
            "ours",
            "--first-id",
            "77",
            "--out-ref",
            text(&ours),
            "--chunk-bytes",
            &chunk,
        ];
        run(&[&flags[..], &live[..]].concat());
        let our_ref: Value = serde_json::from_slice(&fs::read(&ours).unwrap()).unwrap();
        let got = peer.ask(json!({"op": "get", "name": name, "ref": our_ref, "prefix": "ours"}));
        assert_eq!(got["why"], Value::Null, "{name}");

        // Python removes what Rust wrote, and Rust what Python wrote.
        peer.ask(json!({"op": "cleanup", "ref": our_ref, "prefix": "ours"}));
        let cleanup = ["rollout", "cleanup", "--ref", text(&theirs)];
        let cleanup = [&cleanup[..], &live[1..]].concat();
        let removed = json_of(&run(&cleanup))["removed_objects"].as_u64().unwrap();
        assert!(removed > 2, "{removed}");
        assert_eq!(keys(&master), 0.0, "{name}: keys are left");
        assert_eq!(json_of(&run(&cleanup))["removed_objects"], 0, "again");
        peer.ask(json!({"op": "cleanup", "ref": our_ref, "prefix": "ours"}));
    }
}

/// Runs a command that prints more than a pipe holds.
fn run_to_file(arguments: &[&str], file: &Path) -> String {
    let out = fs::File::create(file).unwrap();
    let mut child = command(arguments).stdout(out).stderr(Stdio::piped()).spawn().unwrap();
    let end = Instant::now() + STEP;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > end {
            let _ = child.kill();
            panic!("{arguments:?} does not end: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let errors = child.wait_with_output().unwrap().stderr;
    assert!(status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&errors));
    fs::read_to_string(file).unwrap()
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn what_either_side_puts_the_other_gets_and_removes() {
    exchange(&support::environment(), &[]);
}

#[test]
#[ignore = "needs a Mooncake venv and FEATURESTORE_MOONCAKE_NEXT_VENV, a venv with \
            mooncake-transfer-engine-cuda13 0.3.14 and nvidia-cuda-runtime: \
            cargo xtask mooncake-venv"]
fn the_newer_python_code_exchanges_as_well() {
    let venv = std::env::var_os("FEATURESTORE_MOONCAKE_NEXT_VENV").expect("names the venv");
    let venv = PathBuf::from(venv);
    let folder = tempfile::tempdir().unwrap();
    let runtime = fs::read_dir(venv.join("lib"))
        .unwrap()
        .map(|e| e.unwrap().path().join("site-packages/nvidia/cu13/lib/libcudart.so.13"))
        .find(|path| path.exists())
        .expect("nvidia-cuda-runtime is installed in the venv");
    // A machine with a driver needs no stand-in.
    let probe = "import ctypes; ctypes.CDLL('libcuda.so.1')";
    let python = Command::new(venv.join("bin/python")).args(["-c", probe]).output().unwrap();
    let mut preload = Vec::new();
    if !python.status.success() {
        preload.push(support::stub_cuda(folder.path()));
    }
    preload.push(runtime);
    exchange(&venv, &preload);
}

#[test]
#[ignore = "needs a Mooncake venv and FEATURESTORE_TORCH_VENV, a venv with the same wheel, msgpack and \
            torch"]
fn torch_rows_and_tensors_are_exchanged() {
    let venv = std::env::var_os("FEATURESTORE_TORCH_VENV").expect("names the venv");
    exchange_all(&PathBuf::from(venv), &[], &[("tensors", None), ("tensors", Some(16))]);
}

/// A producer of this crate that keeps its bytes, until its standard input ends.
struct Producer {
    child: Child,
    ready: Value,
}

impl Producer {
    fn start(arguments: &[&str]) -> Self {
        let mut command = command(arguments);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready = lines.by_ref().map_while(Result::ok).find(|line| line.starts_with('{'));
        let ready = serde_json::from_str(&ready.expect("the producer prints its handle")).unwrap();
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, ready }
    }

    fn end(mut self) {
        drop(self.child.stdin.take());
        let end = Instant::now() + STEP;
        while self.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "the producer does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended already
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn a_rollout_takes_two_keys_and_leaves_none() {
    let master = support::master();
    let address = master.address().to_string();
    let folder = tempfile::tempdir().unwrap();
    let handle = folder.path().join("handle.json");
    let share = folder.path().join("share");
    let store = ["--transport", "store", "--mooncake", &address, "--pool", "192MiB"];
    for chunk in [None, Some("32MiB")] {
        let mut arguments = vec![
            "rollout",
            "put",
            "--payload",
            "text:128MiB",
            "--memory",
            "320MiB",
            "--handle-out",
            text(&handle),
        ];
        arguments.extend(store);
        if let Some(chunk) = chunk {
            arguments.extend(["--chunk", chunk, "--in-flight", "2"]);
        }
        let producer = Producer::start(&arguments);
        assert_eq!(producer.ready["gathered_bytes"], producer.ready["data_bytes"]);
        assert_eq!(producer.ready["copied_bytes"], 0);
        if chunk.is_none() {
            assert_eq!(keys(&master), 2.0);
        }
        for share in [None, Some(text(&share))] {
            let mut arguments = vec!["rollout", "get", "--handle", text(&handle)];
            arguments.extend(store);
            if let Some(share) = share {
                arguments.extend(["--share", share]);
            }
            let got = json_of(&run(&arguments));
            // As the payload's specification has it.
            assert_eq!(got["fields"]["tokens"]["checksum"], "00000096aace515d", "{got}");
            assert_eq!(got["fetched_bytes"], got["data_bytes"]);
            assert_eq!(got["copied_bytes"], 0);
        }
        let cleanup = [&["rollout", "cleanup", text(&handle)], &store[..]].concat();
        assert_eq!(json_of(&run(&cleanup))["removed"], 1);
        assert_eq!(keys(&master), 0.0);
        assert_eq!(json_of(&run(&cleanup))["already_gone"], 1);
        producer.end();
    }
}

#[test]
#[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
fn what_a_killed_producer_left_cannot_be_read_and_is_swept() {
    let master = support::master();
    let address = master.address().to_string();
    let folder = tempfile::tempdir().unwrap();
    let handle = folder.path().join("handle.json");
    let journal = folder.path().join("journal");
    // The memory is another's, so that the objects outlive their producer.
    let peer = Peer::start(&master, &support::environment(), &[]);
    let store = ["--transport", "store", "--mooncake", &address, "--pool", "192MiB"];
    let put = [
        "rollout",
        "put",
        "--payload",
        "text:64MiB",
        "--chunk",
        "1MiB",
        "--in-flight",
        "1",
        "--journal",
        text(&journal),
        "--handle-out",
        text(&handle),
    ];
    let mut command = command(&[&put[..], &store[..]].concat());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let end = Instant::now() + STEP;
    while keys(&master) < 3.0 {
        assert!(Instant::now() < end, "nothing is written");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!handle.exists(), "there is no handle without everything behind it");
    assert!(keys(&master) >= 3.0, "what it wrote is there, and pinned");
    let sweep = [&["rollout", "sweep", "--journal", text(&journal)], &store[..]].concat();
    // All but an object that was half written: only the master can end that, in its own time.
    let whole = keys(&master);
    let report = json_of(&run(&sweep));
    let number = |name: &str| report[name].as_u64().unwrap();
    assert!(number("removed") as f64 >= whole - 1.0, "{report}, {whole} keys");
    assert_eq!(number("swept") + number("left"), 1, "{report}");
    assert!(keys(&master) <= number("left") as f64, "{report}");
    // Again: nothing, or what was left before.
    let again = json_of(&run(&sweep));
    assert_eq!((&again["swept"], &again["left"]), (&0.into(), &report["left"]), "{again}");
    drop(peer);
}
