//! `featurestore rollout …`: both sides as processes, and Mooncake's objects as files.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
};

use serde_json::Value;

use crate::common::{Process, STEP, Server, featurestore, run};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../rollout-codec/tests/golden").join(name)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("paths of tests are UTF-8")
}

/// Runs a command that must succeed and prints one JSON value.
fn json(arguments: &[&str]) -> Value {
    let ended = run(arguments);
    assert!(ended.status.success(), "{arguments:?}: {}", ended.stderr);
    serde_json::from_str(&ended.stdout).unwrap_or_else(|e| panic!("{:?}: {e}", ended.stdout))
}

#[test]
fn stored_objects_are_decoded_and_encoded_byte_for_byte() {
    let folder = tempfile::tempdir().unwrap();
    for i in [1, 2, 4, 5, 6, 7] {
        let file = |part: &str| golden(&format!("sample{i}{part}"));
        let (objects, reference) = (file(".hex"), file("_ref.json"));
        let decoded = fs::read_to_string(file("_decoded.json")).unwrap();
        let arguments =
            ["rollout", "decode", "--objects", text(&objects), "--ref", text(&reference)];
        let ended = run(&arguments);
        assert_eq!(ended.stdout.trim_end(), decoded.trim_end(), "sample{i}: {}", ended.stderr);
        let line = json(&[&arguments[..], &["--json"]].concat());
        assert_eq!(line, serde_json::from_str::<Value>(&decoded).unwrap());

        let out = folder.path().join("out.hex");
        let out_ref = folder.path().join("out.json");
        let original = fs::read_to_string(&objects).unwrap();
        let note = original.lines().next().unwrap().trim_start_matches("# ");
        let chunk = match i {
            2 => "40",
            5 => "100",
            _ => "67108864",
        };
        let ended = run(&[
            "rollout",
            "encode",
            "--decoded",
            text(&file("_decoded.json")),
            "--ref",
            text(&reference),
            "--out",
            text(&out),
            "--out-ref",
            text(&out_ref),
            "--note",
            note,
            "--chunk-bytes",
            chunk,
        ]);
        assert!(ended.status.success(), "sample{i}: {}", ended.stderr);
        let objects_of = |text: &str| {
            let mut objects: Vec<String> =
                text.split("key ").skip(1).map(ToOwned::to_owned).collect();
            objects.sort();
            objects
        };
        let written = fs::read_to_string(&out).unwrap();
        assert_eq!(objects_of(&written), objects_of(&original), "sample{i}");
        let written = fs::read_to_string(&out_ref).unwrap();
        assert_eq!(written, fs::read_to_string(&reference).unwrap(), "sample{i}");

        let about = json(&[
            "rollout",
            "inspect",
            "--objects",
            text(&objects),
            "--ref",
            text(&reference),
            "--json",
        ]);
        assert!(about["fields"].as_object().is_some_and(|fields| !fields.is_empty()));
    }
}

#[test]
fn members_need_a_manifest_key_only() {
    let (objects, decoded) = (golden("sample3.hex"), golden("sample3_decoded.json"));
    let dump = fs::read_to_string(&objects).unwrap();
    let key = dump.lines().find_map(|line| line.strip_prefix("key ")).unwrap();
    let ended = run(&["rollout", "decode", "--objects", text(&objects), "--manifest", key]);
    let expected = fs::read_to_string(&decoded).unwrap();
    assert_eq!(ended.stdout.trim_end(), expected.trim_end(), "{}", ended.stderr);
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.hex");
    let ended = run(&[
        "rollout",
        "encode",
        "--decoded",
        text(&decoded),
        "--out",
        text(&out),
        "--prefix",
        "golden3",
        "--first-id",
        "a0000000000000000000000000000005",
    ]);
    assert!(ended.status.success(), "{}", ended.stderr);
    let written = fs::read_to_string(&out).unwrap();
    assert_eq!(written.lines().skip(1).count(), dump.lines().skip(1).count());

    let missing = run(&["rollout", "decode", "--objects", text(&objects), "--manifest", "no/key"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(missing.stderr.contains("no/key"), "{}", missing.stderr);
    assert_eq!(run(&["rollout", "decode", "--objects", text(&objects)]).status.code(), Some(2));
}

/// A producer that stays until its guard goes.
fn producer(arguments: &[&str]) -> Server {
    let mut command = featurestore(&[&["rollout", "put"], arguments].concat());
    command.stdin(Stdio::piped());
    Server::spawn(command)
}

#[test]
fn what_one_process_puts_another_gets() {
    let folder = tempfile::tempdir().unwrap();
    let handle = folder.path().join("handle.json");
    for transport in ["shm", "tcp"] {
        let put = producer(&[
            "--transport",
            transport,
            "--payload",
            "text:128MiB",
            "--memory",
            "192MiB",
            "--handle-out",
            text(&handle),
        ]);
        assert_eq!(put.ready["gathered_bytes"], put.ready["data_bytes"], "one copy");
        assert_eq!(put.ready["copied_bytes"], 0);
        let flags = ["--handle", text(&handle), "--transport", transport, "--pool", "192MiB"];
        let got = json(&[&["rollout", "get"], &flags[..]].concat());
        assert_eq!(got["rows"], put.ready["rows"]);
        assert_eq!(got["transport"], transport);
        // As the payload's specification has them.
        for (name, checksum, elements) in [
            ("tokens", "00000096aace515d", 8_515_985),
            ("loss_masks", "003d8427003d85fb", 8_299_795),
            ("rollout_log_probs", "a8d5c57c4676de96", 8_299_795),
        ] {
            let expected = serde_json::json!({"checksum": checksum, "elements": elements});
            assert_eq!(got["fields"][name], expected, "{name}");
        }
        let moved = if transport == "shm" { "viewed_bytes" } else { "fetched_bytes" };
        assert_eq!(got[moved], got["data_bytes"]);
        assert_eq!(got["copied_bytes"], 0);

        // The line that put prints is as good as the file.
        let line = folder.path().join("line.json");
        fs::write(&line, put.ready.to_string()).unwrap();
        let from_line = ["--handle", text(&line), "--transport", transport, "--pool", "192MiB"];
        let about = json(&[&["rollout", "inspect", "--json"], &from_line[..]].concat());
        let fields = about["fields"].as_array().unwrap();
        let tokens = fields.iter().find(|field| field["name"] == "tokens").unwrap();
        assert_eq!((&tokens["dtype"], &tokens["checked"]), (&"int64".into(), &true.into()));
        assert_eq!(tokens["rows"], got["rows"]);
        let table = run(&[&["rollout", "inspect", "--header-only"], &flags[..]].concat());
        assert!(table.stdout.contains("not compared"), "{} {}", table.stdout, table.stderr);

        let rows =
            [&["rollout", "get", "--fields", "tokens", "--rows", "1,0"], &flags[..]].concat();
        let rows = json(&rows);
        let lengths = rows["fields"]["tokens"]["row_bytes"].clone();
        assert_eq!(lengths, serde_json::json!([8 * (338 + 3865), 8 * (73 + 5281)]));

        let clean = [text(&handle), "--transport", transport, "--pool", "192MiB"];
        let clean = [&["rollout", "cleanup"], &clean[..]].concat();
        assert_eq!(json(&clean)["removed"], 1);
        assert_eq!(json(&clean)["already_gone"], 1);
        let gone = run(&[&["rollout", "get"], &flags[..]].concat());
        assert_eq!(gone.status.code(), Some(1));
        assert!(gone.stderr.contains("not found"), "{}", gone.stderr);

        let mut process: Process = put.process;
        drop(process.stdin());
        let ended = process.end(STEP);
        assert!(ended.status.success(), "{}", ended.stderr);
    }
    assert_eq!(json(&["rollout", "cleanup"])["removed"], 0, "none is fine");
}

#[test]
fn real_files_are_put_and_checked() {
    let captures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/minilm-capture");
    let folder = tempfile::tempdir().unwrap();
    let handle = folder.path().join("handle.json");
    let put =
        producer(&["--input", text(&captures), "--memory", "64MiB", "--handle-out", text(&handle)]);
    assert_eq!(put.ready["rows"], 3);
    let about = json(&["rollout", "inspect", "--json", "--handle", text(&handle)]);
    let fields = about["fields"].as_array().unwrap();
    assert!(fields.len() > 2 && fields.iter().all(|field| field["checked"] == true), "{about}");
    let ids = fields.iter().find(|field| field["name"] == "input_ids").unwrap();
    assert_eq!(ids["dtype"], "int64");
}

/// What `pipeline --input` takes for granted holds here too: the files are what their manifest says.
#[test]
fn a_folder_that_differs_from_its_manifest_is_not_put() {
    let captures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/minilm-capture");
    let folder = tempfile::tempdir().unwrap();
    let manifest = folder.path().join("manifest.json");
    let file = "minilm-0001.safetensors";
    fs::copy(captures.join(file), folder.path().join(file)).unwrap();
    let listed: Value =
        serde_json::from_slice(&fs::read(captures.join("manifest.json")).unwrap()).unwrap();
    let tensors = &listed["samples"][1]["tensors"];
    assert_eq!(listed["samples"][1]["file"], file);
    let other = |name: &str, sum: &str| {
        let mut tensors = tensors.clone();
        tensors[name] = serde_json::json!({"sha256": sum});
        tensors
    };
    let put = ["rollout", "put", "--input", text(folder.path()), "--memory", "64MiB"];
    for (file, tensors, says) in [
        (file, other("loss_mask", &"0".repeat(64)), &["another sha256", "loss_mask", file][..]),
        (file, other("nothing", ""), &["lacks a tensor", "nothing", file]),
        ("gone.safetensors", tensors.clone(), &["lacks a file", "gone.safetensors"]),
    ] {
        let content = serde_json::json!({"samples": [{"file": file, "tensors": tensors}]});
        fs::write(&manifest, content.to_string()).unwrap();
        let ended = run(&put);
        assert_eq!(ended.status.code(), Some(1), "{ended:?}");
        for part in says {
            assert!(ended.stderr.contains(part), "{part}: {}", ended.stderr);
        }
    }
    let content = serde_json::json!({"samples": [{"file": file, "tensors": tensors}]});
    fs::write(&manifest, content.to_string()).unwrap();
    assert_eq!(run(&put).status.code(), Some(0), "as it is, it is put");
    fs::remove_file(&manifest).unwrap();
    std::os::unix::fs::symlink("manifest.json", &manifest).unwrap();
    let ended = run(&put);
    assert!(ended.stderr.contains("manifest.json"), "{}", ended.stderr);
}

#[test]
fn the_bench_compares_what_it_moves() {
    let bench =
        ["rollout", "bench", "--payload", "text:4MiB", "--reps", "2", "--warmup", "1", "--check"];
    for transport in ["shm", "tcp"] {
        let flags = ["--transport", transport, "--pool", "64MiB", "--json"];
        let ended = run(&[&bench[..], &flags[..]].concat());
        assert!(ended.status.success(), "{}", ended.stderr);
        let lines: Vec<Value> =
            ended.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let steps: Vec<&str> = lines.iter().filter_map(|line| line["step"].as_str()).collect();
        assert_eq!(steps, ["put", "get", "put+get", "consume", "counters"]);
        assert!(lines[0]["median_ms"].as_f64().unwrap() > 0.0);
        let counters = &lines[4];
        assert_eq!(counters["extra_copied_bytes"], 0);
        assert_eq!(
            (&counters["copies_a_put"], &counters["copies_a_get"]),
            (&1.0.into(), &0.0.into())
        );
        let moved = if transport == "shm" { 0.0 } else { 1.0 };
        assert_eq!(counters["moved_a_get"], moved);
        assert_eq!(counters["within_peak_limit"], true, "{counters}");
        // What the benches read by name.
        for name in [
            "/gathered_bytes_a_put",
            "/producer_peak_above_input_bytes",
            "/reader_peak_above_start_bytes",
            "/reader/fetched_bytes",
            "/reader/copied_bytes",
        ] {
            assert!(counters.pointer(name).and_then(Value::as_u64).is_some(), "{name}: {counters}");
        }
    }
}

/// Four processes that share nothing but a folder read a rollout once, while any of them has it.
#[test]
fn readers_of_a_host_read_once_whoever_dies() {
    let folder = tempfile::tempdir().unwrap();
    let (handle, share) = (folder.path().join("handle.json"), folder.path().join("share"));
    let put = producer(&[
        "--transport",
        "tcp",
        "--payload",
        "text:32MiB",
        "--memory",
        "64MiB",
        "--handle-out",
        text(&handle),
    ]);
    let get =
        ["rollout", "get", "--handle", text(&handle), "--transport", "tcp", "--pool", "64MiB"];
    let get = [&get[..], &["--share", text(&share)]].concat();
    let hold = || {
        let mut command = featurestore(&[&get[..], &["--hold"]].concat());
        command.stdin(Stdio::piped());
        Server::spawn(command)
    };
    let bytes = &put.ready["data_bytes"];
    let read = |got: &Value| (got["fetched_bytes"].clone(), got["shared_bytes"].clone());
    let first = hold();
    assert_eq!(read(&first.ready), (bytes.clone(), 0.into()));
    let second = hold();
    assert_eq!(read(&second.ready), (0.into(), bytes.clone()), "found with the first");
    assert_eq!(second.ready["fields"], first.ready["fields"]);
    drop(first); // killed
    assert_eq!(read(&json(&get)), (0.into(), bytes.clone()), "found with the second");
    drop(second);
    assert_eq!(read(&json(&get)), (bytes.clone(), 0.into()), "nobody has it any more");
}

#[cfg(feature = "arrow")]
#[test]
fn arrow_and_parquet_files_are_put_and_checked() {
    use std::sync::Arc;

    use arrow_array::{
        ArrayRef, Int64Array, ListArray, RecordBatch, StringArray, types::Int64Type,
    };

    let batch = |from: i64| {
        let rows = (from..from + 3).map(|n| (n != 4).then(|| (0..n).map(Some).collect::<Vec<_>>()));
        let lists: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(rows));
        let numbers: ArrayRef =
            Arc::new(Int64Array::from_iter((from..from + 3).map(|n| (n != 5).then_some(n))));
        let text: ArrayRef = Arc::new(StringArray::from_iter_values(["a", "", "né"]));
        let columns = [("tokens", lists, true), ("index", numbers, true), ("text", text, false)];
        RecordBatch::try_from_iter_with_nullable(columns).unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let schema = batch(0).schema();
    for name in ["a.arrow", "b.parquet", "c.arrows"] {
        let file = fs::File::create(path(name)).unwrap();
        match name {
            "a.arrow" => {
                let mut out = arrow_ipc::writer::FileWriter::try_new(file, &schema).unwrap();
                out.write(&batch(0)).unwrap();
                out.write(&batch(3)).unwrap();
                out.finish().unwrap();
            }
            "b.parquet" => {
                let mut out =
                    parquet::arrow::ArrowWriter::try_new(file, schema.clone(), None).unwrap();
                out.write(&batch(0)).unwrap();
                out.write(&batch(3)).unwrap();
                out.close().unwrap();
            }
            _ => {
                let mut out = arrow_ipc::writer::StreamWriter::try_new(file, &schema).unwrap();
                out.write(&batch(0)).unwrap();
                out.write(&batch(3)).unwrap();
                out.finish().unwrap();
            }
        }
    }
    let handle = path("handle.json");
    let check = |input: &Path, files: u64| {
        let put =
            producer(&["--input", text(input), "--memory", "16MiB", "--handle-out", text(&handle)]);
        assert_eq!(put.ready["rows"], 6 * files, "{}", put.ready);
        let about = json(&["rollout", "inspect", "--json", "--handle", text(&handle)]);
        let kinds: Vec<_> =
            about["fields"].as_array().unwrap().iter().map(|f| &f["kind"]).collect();
        assert_eq!(kinds, ["ragged", "scalars", "utf8"], "{about}");
        let fields = ["--fields", "tokens,index", "--rows", "5,4,0"];
        let rows = json(&[&["rollout", "get", "--handle", text(&handle)], &fields[..]].concat());
        assert_eq!(rows["fields"]["tokens"]["row_bytes"], serde_json::json!([40, null, 0]));
        assert_eq!(rows["fields"]["index"]["row_bytes"], serde_json::json!([null, 8, 8]));
    };
    for name in ["a.arrow", "b.parquet", "c.arrows"] {
        check(&path(name), 1);
    }
    check(folder.path(), 3);
    // Damage is named.
    let bytes = fs::read(path("b.parquet")).unwrap();
    fs::write(path("b.parquet"), &bytes[..bytes.len() - 9]).unwrap();
    let bad = run(&["rollout", "put", "--input", text(&path("b.parquet"))]);
    assert_eq!(bad.status.code(), Some(1));
    assert!(bad.stderr.contains("b.parquet"), "{}", bad.stderr);
}

#[cfg(not(feature = "arrow"))]
#[test]
fn tables_need_a_feature_and_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.parquet");
    fs::write(&file, "PAR1").unwrap();
    let ended = run(&["rollout", "put", "--input", text(&file)]);
    assert_eq!(ended.status.code(), Some(1));
    assert!(ended.stderr.contains("--features arrow"), "{}", ended.stderr);
}

/// What does not answer is told from what is not there, and nobody is sent to another process.
#[test]
fn a_producer_that_is_stopped_or_gone_is_named_as_what_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let handle = folder.path().join("handle.json");
    let put =
        producer(&["--payload", "text:1MiB", "--memory", "16MiB", "--handle-out", text(&handle)]);
    put.process.signal(rustix::process::Signal::STOP);
    let ended = run(&["rollout", "get", "--handle", text(&handle)]);
    let says = "takes connections and does not answer the greeting";
    assert!(ended.stderr.contains(says), "{}", ended.stderr);
    drop(put);
    let ended = run(&["rollout", "get", "--handle", text(&handle)]);
    for says in ["cannot be reached", "a producer"] {
        assert!(ended.stderr.contains(says), "{}", ended.stderr);
    }
}

#[test]
fn mistakes_are_named() {
    for (arguments, says) in [
        (&["rollout", "put", "--payload", "prose"][..], "text+r3"),
        (&["rollout", "put", "--narrow", "tokens"], "FIELD=TYPE"),
        (&["rollout", "get"], "--handle"),
        (&["rollout", "inspect"], "--handle"),
        (&["rollout", "get", "--handle", "x", "--rows", "1"], "--fields"),
        (&["rollout", "get", "--handle", "x", "--hold", "--cleanup"], "--cleanup"),
        (&["rollout", "sweep"], "--journal"),
        (&["rollout", "bench", "--reps", "0"], "--reps"),
        (&["rollout", "put", "--chunk", "0"], "nothing fits"),
    ] {
        let ended = run(arguments);
        assert_eq!(ended.status.code(), Some(2), "{arguments:?}");
        assert!(ended.stderr.contains(says), "{arguments:?}: {}", ended.stderr);
    }
    let folder = tempfile::tempdir().unwrap();
    let put = ["rollout", "put", "--payload", "text:1MiB", "--journal", text(folder.path())];
    let ended = run(&put);
    assert_eq!(ended.status.code(), Some(1));
    assert!(ended.stderr.contains("outlives its producer"), "{}", ended.stderr);
    // As the README has it: a sweep is over a store.
    let ended = run(&["rollout", "sweep", "--journal", text(folder.path())]);
    assert!(ended.stderr.contains("join Mooncake Store"), "{}", ended.stderr);
    for (out, says) in [("gone/h.json", "no such folder"), ("", "that is a folder")] {
        let out = folder.path().join(out);
        let put = ["rollout", "put", "--payload", "text:1MiB", "--handle-out", text(&out)];
        let ended = run(&put);
        assert!(ended.stderr.contains(says) && ended.stdout.is_empty(), "{ended:?}");
    }
    let gone = folder.path().join("mistyped/folder");
    let put = ["rollout", "put", "--payload", "text:1MiB", "--share", text(&gone)];
    for arguments in [&put[..], &["rollout", "sweep", "--journal", text(&gone)]] {
        let ended = run(arguments);
        assert_eq!(ended.status.code(), Some(1), "{ended:?}");
        assert!(ended.stderr.contains(text(&gone)), "{}", ended.stderr);
        assert!(!gone.parent().expect("it has one").exists(), "{arguments:?}: nothing is made");
    }
    let file = folder.path().join("handle.json");
    fs::write(&file, "{}").unwrap();
    let ended = run(&["rollout", "get", "--handle", text(&file)]);
    assert_eq!(ended.status.code(), Some(1));
    assert!(ended.stderr.contains("handle.json"), "{}", ended.stderr);
}

/// Neither hangs nor reads for long, whatever a file turns out to be.
#[test]
fn inputs_that_are_no_files_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    std::os::unix::fs::symlink("loop", at("loop")).unwrap();
    fs::write(at("nil"), "").unwrap();
    let golden = ["sample1_ref.json", "sample1.hex", "sample1_decoded.json"].map(golden);
    let [reference, objects, decoded] = [0, 1, 2].map(|i| text(&golden[i]));
    for (path, says) in [
        ("/dev/zero", &["too large"][..]),
        (text(folder.path()), &["invalid input: Is a directory"]),
        (&at("loop"), &["symbolic links"]),
        (&at("nil"), &["not a handle", "no object in the file", "expected a value"]),
        (&at("gone"), &["No such file"]),
    ] {
        for arguments in [
            &["get", "--handle", path][..],
            &["cleanup", path],
            &["inspect", "--handle", path],
            &["inspect", "--objects", path, "--ref", reference],
            &["decode", "--objects", path, "--ref", reference],
            &["decode", "--objects", objects, "--ref", path],
            &["encode", "--decoded", path, "--out", "/dev/null"],
            &["encode", "--decoded", decoded, "--schema", path, "--out", "/dev/null"],
        ] {
            let begun = std::time::Instant::now();
            let ended = run(&[&["rollout"], arguments].concat());
            assert_eq!(ended.status.code(), Some(1), "{arguments:?}: {ended:?}");
            assert!(ended.stderr.contains(path), "{arguments:?}: {}", ended.stderr);
            let is_said = says.iter().any(|part| ended.stderr.contains(part));
            assert!(is_said, "{arguments:?}: {says:?}: {}", ended.stderr);
            let took = begun.elapsed();
            assert!(took < STEP / 6, "{arguments:?}: {took:?}");
        }
    }
}

/// A pipe in a folder of input is nothing that could be waited for.
#[test]
fn pipes_among_the_files_of_an_input_are_refused() {
    for name in ["x.safetensors", "manifest.json", "x.parquet"] {
        let folder = tempfile::tempdir().unwrap();
        let real = "../../tests/data/minilm-capture/minilm-0000.safetensors";
        let real = Path::new(env!("CARGO_MANIFEST_DIR")).join(real);
        fs::copy(real, folder.path().join("a.safetensors")).unwrap();
        let pipe = folder.path().join(name);
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, 0o600.into(), 0).unwrap();
        let mut commands = vec![vec!["rollout", "put", "--input"]];
        if name != "x.parquet" {
            commands.push(vec!["pipeline", "--input"]);
        }
        for mut arguments in commands {
            arguments.push(text(folder.path()));
            let ended = run(&arguments);
            assert_eq!(ended.status.code(), Some(1), "{arguments:?}: {ended:?}");
            assert!(
                ended.stderr.contains("folder=") || ended.stderr.contains(name),
                "{}",
                ended.stderr
            );
        }
    }
}

#[test]
fn a_payload_that_cannot_fit_is_refused_before_it_is_built() {
    for more in [&["--memory", "1MiB"][..], &["--memory", "2TiB"]] {
        let ended = run(&[&["rollout", "put", "--payload", "text:1TiB"], more].concat());
        assert_eq!(ended.status.code(), Some(1), "{ended:?}");
        assert!(ended.stderr.contains("larger than the memory"), "{}", ended.stderr);
    }
    let ended = run(&["rollout", "bench", "--payload", "text:1TiB"]);
    assert!(ended.stderr.contains("larger than the memory"), "{}", ended.stderr);
}
