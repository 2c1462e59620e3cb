//! The capture server over HTTP: the documented request and answer, refusals, life and death.

use std::{
    collections::HashSet,
    io::{Read, Write},
    net::TcpStream,
    os::unix::process::ExitStatusExt,
    process::Stdio,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::{STEP, Server, eventually, featurestore, http, run};

const MODEL: [&str; 4] = ["--hidden", "16", "--taps", "1,3"];

fn server(more: &[&str]) -> Server {
    let mut arguments = vec!["capture-server"];
    if !more.contains(&"--arena") {
        arguments.extend(["--arena", "1MiB"]);
    }
    if !more.contains(&"--hidden") {
        arguments.extend(MODEL);
    }
    arguments.extend(more);
    Server::start(&arguments)
}

fn payload(sample: &str, ids: &[i64]) -> Value {
    let shape = json!([1, ids.len()]);
    let mask: Vec<i64> = ids.iter().enumerate().map(|(i, _)| i64::from(i > 0)).collect();
    json!({
        "store_id": "run0", "sample_id": sample, "gen": 1, "replace": false,
        "features": {"aux": "hidden_states", "last_hidden": "target_last_hidden_states"},
        "passthrough": [
            {"name": "input_ids", "data": ids, "shape": shape, "dtype": "int64"},
            {"name": "loss_mask", "data": mask, "shape": shape, "dtype": "int64"},
        ],
    })
}

fn request(samples: &[(&str, &[i64])]) -> Value {
    json!({
        "input_ids": samples.iter().map(|(_, ids)| ids).collect::<Vec<_>>(),
        "extra_key": samples.iter().map(|(id, _)| format!("key of {id}")).collect::<Vec<_>>(),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        "spec_capture": samples.iter().map(|(id, ids)| payload(id, ids)).collect::<Vec<_>>(),
    })
}

/// Sends a request whose answer may take long.
fn send(server: &Server, body: &Value) -> std::net::TcpStream {
    let body = body.to_string();
    let mut stream = std::net::TcpStream::connect(server.address("http")).expect("it listens");
    let head =
        format!("POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all((head + &body).as_bytes()).expect("the server reads");
    stream
}

/// Writes one line to the control port.
fn control(server: &Server, line: &Value) -> std::net::TcpStream {
    let mut control = std::net::TcpStream::connect(server.address("control")).expect("it listens");
    let line = line.to_string() + "\n";
    control.write_all(line.as_bytes()).expect("it reads");
    control.set_read_timeout(Some(Duration::from_secs(20))).expect("a valid timeout");
    control
}

/// Keys of a sample's objects.
fn keys(sample: &str) -> Value {
    ["hidden_states", "target_last_hidden_states", "input_ids", "loss_mask"]
        .map(|name| format!("run0/{sample}/g1/{name}"))
        .to_vec()
        .into()
}

/// The one result of a row, in either form.
fn result(row: &Value) -> &Value {
    let capture = &row["meta_info"]["spec_capture"];
    capture.get(0).unwrap_or(capture)
}

fn names(features: &Value) -> Vec<&str> {
    features.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn the_documented_request_gets_the_documented_answer() {
    let server = server(&["--hidden", "5120", "--taps", "5,19,33,47,61"]);
    let (status, rows) = server.generate(&[], &request(&[("run0:task-1", &[5, 6, 7])]));
    assert_eq!((status, rows.as_array().map(Vec::len)), (200, Some(1)), "{rows}");
    let found = result(&rows[0]);
    assert_eq!(found["sample_id"], "run0:task-1");
    assert_eq!(found["store_id"], "run0");
    assert_eq!(found["gen"], 1);
    assert_eq!(found["aux_layer_ids"], json!([5, 19, 33, 47, 61]));
    let expected = [
        ("hidden_states", json!([1, 3, 25600]), "bfloat16"),
        ("target_last_hidden_states", json!([1, 3, 5120]), "bfloat16"),
        ("input_ids", json!([1, 3]), "int64"),
        ("loss_mask", json!([1, 3]), "int64"),
    ];
    let mut addresses = HashSet::new();
    for (name, shape, dtype) in expected {
        let feature = &found["features"][name];
        assert_eq!((&feature["shape"], &feature["dtype"]), (&shape, &json!(dtype)), "{name}");
        let address = feature["address"].as_u64().expect("an address");
        assert!(address > 0 && address.is_multiple_of(512), "{name}: {address:#x}");
        assert!(addresses.insert(address), "two tensors at one place");
        assert!(feature["seq"].as_u64().is_some_and(|seq| seq > 0), "{feature}");
    }
    assert_eq!(names(&found["features"]).len(), 4);
    assert_eq!(found["arena"]["session"], server.ready["session"]);
    assert_eq!(found["arena"]["control"], server.ready["control"]);
    assert!(found["arena"].get("holder").is_none(), "nobody asked for one");
    assert!(rows[0]["meta_info"].get("spec_capture_checksums").is_none(), "nor for checksums");
}

#[test]
fn features_come_in_the_order_of_the_arena() {
    let server = server(&[]);
    let body = request(&[("a", &[1, 2])]).to_string();
    let (_, _, text) = http(&server.address("http"), "POST", "/generate", &[], body.as_bytes());
    let places: Vec<_> =
        ["\"hidden_states\"", "\"target_last_hidden_states\"", "\"input_ids\"", "\"loss_mask\""]
            .map(|name| text.find(name).unwrap_or_else(|| panic!("{name} in {text}")))
            .into();
    assert!(places.is_sorted(), "{text}");
    let rows: Value = serde_json::from_str(&text).expect("JSON");
    let at = |name: &str| result(&rows[0])["features"][name]["address"].as_u64().expect("placed");
    assert!(at("hidden_states") < at("target_last_hidden_states"));
    assert!(at("input_ids") < at("loss_mask"));
}

#[test]
fn the_plugin_form_and_single_prompts_are_answered_in_kind() {
    let server = server(&[]);
    let plugin = json!({
        "input_ids": [[1, 2], [3]],
        "sampling_params": [
            {"max_new_tokens": 0, "custom_params": {"spec_capture": payload("a", &[1, 2]).to_string()}},
            {"max_new_tokens": 0, "custom_params": {"spec_capture": payload("b", &[3]).to_string()}},
        ],
    });
    let (status, rows) = server.generate(&[], &plugin);
    assert_eq!(status, 200, "{rows}");
    assert!(rows[1]["meta_info"]["spec_capture"].is_array(), "as the plugin answers: {rows}");
    assert_eq!(result(&rows[0])["sample_id"], "a");
    assert_eq!(result(&rows[1])["features"]["hidden_states"]["shape"], json!([1, 1, 32]));

    let single = json!({
        "input_ids": [1, 2, 3],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        "spec_capture": payload("c", &[1, 2, 3]),
    });
    let (status, row) = server.generate(&[], &single);
    assert_eq!(status, 200, "{row}");
    assert_eq!(result(&row)["sample_id"], "c", "one prompt, one row: {row}");
}

#[test]
fn headers_ask_for_a_holder_and_for_checksums() {
    let server = server(&[]);
    let headers = [("x-featurestore-holder", "trainer-7"), ("x-featurestore-checksums", "xxh3")];
    let (status, rows) = server.generate(&headers, &request(&[("a", &[1, 2])]));
    assert_eq!(status, 200, "{rows}");
    assert_eq!(result(&rows[0])["arena"]["holder"], "trainer-7");
    let sums = &rows[0]["meta_info"]["spec_capture_checksums"][0];
    for name in ["hidden_states", "target_last_hidden_states", "input_ids", "loss_mask"] {
        let sum = sums[name].as_str().unwrap_or_else(|| panic!("{name} in {sums}"));
        assert!(sum.len() == 21 && sum.starts_with("xxh3:"), "{sum}");
    }
    let ids: Vec<u8> = [1i64, 2].iter().flat_map(|id| id.to_le_bytes()).collect();
    let expected = format!("xxh3:{:016x}", xxhash_rust::xxh3::xxh3_64(&ids));
    assert_eq!(sums["input_ids"], json!(expected));
    let (status, answer) =
        server.generate(&[("x-featurestore-checksums", "md5")], &request(&[("b", &[1])]));
    assert_eq!(status, 400, "{answer}");
}

#[test]
fn rows_fail_alone_and_leave_nothing_behind() {
    let server = server(&[]);
    let mut body = request(&[("good", &[1, 2]), ("bad", &[1, 2])]);
    // The mask has a row too many for its prompt.
    body["spec_capture"][1]["passthrough"][1] =
        json!({"name": "loss_mask", "data": [0, 1, 1], "shape": [1, 3], "dtype": "int64"});
    let (status, rows) = server.generate(&[], &body);
    assert_eq!(status, 200, "{rows}");
    assert_eq!(result(&rows[0])["sample_id"], "good");
    assert!(result(&rows[0]).get("error").is_none(), "{rows}");
    let failed = result(&rows[1]);
    assert_eq!(failed["sample_id"], "bad");
    assert!(failed["error"].as_str().is_some_and(|e| e.contains("loss_mask")), "{failed}");
    let health = server.health();
    assert_eq!((&health["published_samples"], &health["reserved_bytes"]), (&json!(1), &json!(0)));
}

#[test]
fn a_repeated_sample_is_refused_unless_it_replaces() {
    let server = server(&[]);
    let mut body = request(&[("a", &[1, 2])]);
    let first = server.generate(&[], &body).1;
    let again = server.generate(&[], &body).1;
    let error = result(&again[0])["error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains("already exists"), "{again}");
    body["spec_capture"][0]["replace"] = json!(true);
    let replaced = server.generate(&[], &body).1;
    let seq = |rows: &Value| result(&rows[0])["features"]["input_ids"]["seq"].as_u64();
    assert!(seq(&replaced) > seq(&first), "another life: {replaced}");
    let health = server.health();
    assert_eq!(health["resident_samples"], 1, "{health}");
}

#[test]
fn unusable_requests_are_refused_with_a_reason() {
    let server = server(&[]);
    let address = server.address("http");
    let mut no_capture = request(&[("a", &[1])]);
    no_capture.as_object_mut().expect("an object").remove("spec_capture");
    let mut too_few = request(&[("a", &[1]), ("b", &[2])]);
    too_few["spec_capture"].as_array_mut().expect("a list").pop();
    for (body, part) in [
        ("", "object"),
        ("{", "JSON"),
        ("[]", "object"),
        ("{}", "input_ids"),
        (r#"{"input_ids":[]}"#, "prompt"),
        (&no_capture.to_string(), "what to capture"),
        (&too_few.to_string(), "spec_capture"),
        (&request(&[("a", &[])]).to_string(), "no tokens"),
    ] {
        let (status, _, answer) = http(&address, "POST", "/generate", &[], body.as_bytes());
        assert_eq!(status, 400, "{body}: {answer}");
        assert!(answer.contains(part), "{body}: {answer}");
    }
    let (status, ..) = http(&address, "GET", "/generate", &[], b"");
    assert_eq!(status, 405);
    let (status, ..) = http(&address, "GET", "/nowhere", &[], b"");
    assert_eq!(status, 404);
    let (status, ..) = http(&address, "GEN ERATE", "/", &[], b"");
    assert_eq!(status, 400);
    eventually("all eleven are counted", || server.health()["protocol_errors"] == 11);
    let (_, _, metrics) = http(&address, "GET", "/metrics", &[], b"");
    assert!(metrics.contains("featurestore_protocol_errors_total 11\n"), "{metrics}");
    let health = server.health();
    assert_eq!((&health["published_samples"], &health["reserved_bytes"]), (&json!(0), &json!(0)));
}

#[test]
fn a_body_that_claims_to_be_huge_is_refused_before_it_is_read() {
    let server = server(&[]);
    let length = (1u64 << 40).to_string();
    let address = server.address("http");
    let mut stream = std::net::TcpStream::connect(&address).expect("the server listens");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a valid timeout");
    let head = format!("POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n");
    std::io::Write::write_all(&mut stream, head.as_bytes()).expect("the server reads");
    let mut first = [0; 12];
    std::io::Read::read_exact(&mut stream, &mut first).expect("an answer without the body");
    assert_eq!(&first, b"HTTP/1.1 413");
    assert_eq!(server.health()["published_samples"], 0, "and it goes on serving");
}

#[test]
fn a_full_arena_fails_the_row_at_the_deadline_with_numbers_and_remedy() {
    let server = server(&["--arena", "64KiB", "--deadline", "300ms"]);
    let tokens = [7; 300]; // 300 tokens of 112 bytes: two do not fit
    assert!(result(&server.generate(&[], &request(&[("a", &tokens)])).1[0]).get("error").is_none());
    let start = Instant::now();
    let (status, rows) = server.generate(&[], &request(&[("b", &tokens)]));
    let waited = start.elapsed();
    assert_eq!(status, 200, "{rows}");
    let error = result(&rows[0])["error"].as_str().unwrap_or_default().to_owned();
    for part in ["larger arena", "FEATURESTORE_ARENA", "--quantum"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(!error.contains("runtime."), "no setting of somebody else: {error}");
    assert!(waited >= Duration::from_millis(250), "it waited for frees: {waited:?}");
    let (_, never) = server.generate(&[], &request(&[("c", &[7; 2000])]));
    let never = result(&never[0])["error"].as_str().unwrap_or_default().to_owned();
    for part in ["can never fit", "FEATURESTORE_ARENA", "shorter prompts"] {
        assert!(never.contains(part), "{part}: {never}");
    }
    let health = server.health();
    assert_eq!((&health["resident_samples"], &health["reserved_bytes"]), (&json!(1), &json!(0)));
}

#[test]
fn a_full_arena_goes_on_when_frees_come() {
    let server = server(&["--arena", "64KiB", "--deadline", "60s"]);
    let tokens = [7; 300];
    server.generate(&[], &request(&[("a", &tokens)]));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| server.generate(&[], &request(&[("b", &tokens)])));
        eventually("the second waits", || server.health()["samples_in_flight"] == 1);
        drop(control(&server, &keys("a")));
        let (status, rows) = waiting.join().expect("no panic");
        assert_eq!(status, 200, "{rows}");
        assert!(result(&rows[0]).get("error").is_none(), "it got the room: {rows}");
    });
    let health = server.health();
    assert_eq!((&health["published_samples"], &health["released_samples"]), (&json!(2), &json!(1)));
}

#[test]
fn a_client_that_leaves_in_mid_fill_keeps_its_place_until_the_fill_ends() {
    let server = server(&["--arena", "1GiB", "--hidden", "65536", "--max-in-flight", "1"]);
    let stream = send(&server, &request(&[("left", &[7; 1000])])); // hundreds of megabytes
    eventually("it is being filled", || server.health()["reserved_bytes"] != 0);
    drop(stream);
    let (mut looks, start) = (0, Instant::now());
    loop {
        let health = server.health();
        if health["reserved_bytes"] == 0 {
            break;
        }
        assert_eq!(health["samples_in_flight"], 1, "its range is being written: {health}");
        looks += 1;
        assert!(start.elapsed() < Duration::from_secs(60), "{health}");
    }
    assert!(looks > 0, "the fill was over before anybody looked");
    eventually("its place is free", || server.health()["samples_in_flight"] == 0);
    let health = server.health();
    assert_eq!(health["published_samples"], 0, "nobody waited for it: {health}");
    assert_eq!(health["arena_free_bytes"], health["arena_bytes"]);
}

#[test]
fn running_out_of_descriptors_is_said_seldom() {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let server = server(&[]);
    let pid = Pid::from_raw(server.process.id() as i32);
    let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
    let none = Rlimit { current: Some(4), maximum }; // all of which are open
    let before = prlimit(pid, Resource::Nofile, none).expect("the child is ours");
    let waiting = std::net::TcpStream::connect(server.address("http")).expect("it listens");
    std::thread::sleep(Duration::from_millis(1500));
    prlimit(pid, Resource::Nofile, before).expect("the child is ours");
    eventually("it takes connections again", || server.health()["published_samples"] == 0);
    drop(waiting);
    server.process.signal(Signal::TERM);
    let ended = server.process.end(STEP);
    let said = ended.stderr.matches("a connection was not accepted").count();
    assert!((1..=3).contains(&said), "{said} times in 1.5 s: {}", ended.stderr);
}

#[test]
fn clients_that_ask_for_nothing_new_see_nothing_new() {
    let server = server(&[]);
    let answer = |id: &str, headers: &[(&str, &str)]| {
        let body = request(&[(id, &[1, 2])]).to_string();
        http(&server.address("http"), "POST", "/generate", headers, body.as_bytes()).2
    };
    let plain = answer("a", &[]);
    for word in ["holder", "checksums", "xxh3"] {
        assert!(!plain.contains(word), "{word} in {plain}");
    }
    let asked = answer("b", &[("x-featurestore-checksums", "xxh3")]);
    let without: String = asked.split(",\"spec_capture_checksums\":").next().unwrap_or("").into();
    let shape = |text: &str| -> String {
        text.replace("\"b\"", "\"a\"").chars().filter(|c| !c.is_ascii_digit()).collect()
    };
    assert_eq!(shape(&plain), shape(&without) + "}}]", "but for the numbers, the same text");
}

#[test]
fn it_serves_ipv6() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        eprintln!("skipped: this machine has no IPv6 loopback");
        return;
    }
    let any = "[::1]:0";
    let server = server(&["--http", any, "--data", any, "--control", any]);
    let (status, rows) = server.generate(&[], &request(&[("a", &[1, 2])]));
    assert_eq!(status, 200, "{rows}");
    for endpoint in ["session", "control"] {
        let name = result(&rows[0])["arena"][endpoint].as_str().expect("a name").to_owned();
        assert!(name.starts_with("[::1]:"), "{endpoint}: {name}");
    }
    drop(control(&server, &keys("a")));
    eventually("the free is heard", || server.health()["released_samples"] == 1);
}

#[test]
fn a_token_has_to_be_shown_where_one_is_set() {
    let mut command = featurestore(&["capture-server", "--arena", "1MiB"]);
    command.env("FEATURESTORE_TOKEN", "hush-hush");
    let server = Server::spawn(command);
    for (token, reply) in [
        (json!("wrong"), "bad_token"),
        (Value::Null, "bad_token"),
        (json!("hush-hush"), "\"op\":\"hello\""),
    ] {
        let mut hello = json!({"op": "hello", "version": 1, "client": "c", "lease_ms": 1000});
        if !token.is_null() {
            hello["token"] = token;
        }
        let mut line = String::new();
        let stream = control(&server, &hello);
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stream), &mut line)
            .expect("an answer");
        assert!(line.contains(reply) && !line.contains("hush"), "{hello}: {line}");
    }
    assert!(!server.health().to_string().contains("hush"));
    server.process.signal(Signal::TERM);
    let ended = server.process.end(Duration::from_secs(20));
    assert!(!ended.stderr.contains("hush"), "{}", ended.stderr);
}

#[test]
fn more_samples_than_may_be_in_flight_are_put_off() {
    let server = server(&["--arena", "64KiB", "--deadline", "2s", "--max-in-flight", "1"]);
    let tokens = [7; 300];
    server.generate(&[], &request(&[("a", &tokens)]));
    let address = server.address("http");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| server.generate(&[], &request(&[("b", &tokens)])));
        eventually("the first waits", || server.health()["samples_in_flight"] == 1);
        let body = request(&[("c", &[1])]).to_string();
        let (status, head, answer) = http(&address, "POST", "/generate", &[], body.as_bytes());
        assert_eq!(status, 503, "{answer}");
        assert!(head.contains("\r\nretry-after: "), "{head}");
        assert!(answer.contains("--max-in-flight"), "{answer}");
        let (status, rows) = waiting.join().expect("no panic");
        assert_eq!(status, 200, "{rows}");
    });
    eventually("the place is free again", || server.health()["samples_in_flight"] == 0);
}

#[test]
fn a_client_that_goes_away_gives_its_place_up() {
    let server = server(&["--arena", "64KiB", "--deadline", "30s", "--max-in-flight", "1"]);
    server.generate(&[], &request(&[("a", &[7; 300])]));
    let stream = send(&server, &request(&[("b", &[7; 300])]));
    eventually("it waits for room", || server.health()["samples_in_flight"] == 1);
    drop(stream);
    eventually("its place is free", || server.health()["samples_in_flight"] == 0);
    assert_eq!(server.health()["reserved_bytes"], 0);
}

#[test]
fn a_client_that_ends_its_side_gets_its_answers() {
    let server = server(&["--arena", "64KiB", "--deadline", "30s"]);
    server.generate(&[], &request(&[("a", &[7; 300])]));
    let mut stream = send(&server, &request(&[("b", &[7; 300])]));
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").expect("the server reads");
    stream.shutdown(std::net::Shutdown::Write).expect("connected");
    stream.set_read_timeout(Some(STEP)).expect("a valid timeout");
    eventually("it waits for room", || server.health()["samples_in_flight"] == 1);
    std::thread::sleep(Duration::from_millis(300)); // so that the end is seen while it waits
    control(&server, &keys("a"));
    let mut answers = String::new();
    stream.read_to_string(&mut answers).expect("answers, and then the end");
    let finals: Vec<&str> =
        answers.split("HTTP/1.1 ").filter(|a| !a.is_empty() && !a.starts_with("100 ")).collect();
    assert_eq!(finals.len(), 2, "{answers}");
    assert!(finals[0].starts_with("200 ") && finals[0].contains("\"address\""), "{answers}");
    assert!(finals[1].starts_with("200 ") && finals[1].contains("resident_samples"), "{answers}");

    let mut stream = std::net::TcpStream::connect(server.address("http")).expect("it listens");
    stream.write_all(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{").unwrap();
    stream.shutdown(std::net::Shutdown::Write).expect("connected");
    let mut refused = String::new();
    stream.read_to_string(&mut refused).expect("an answer, or the end");
    assert!(!refused.contains("100 Continue"), "half a request is not answered: {refused}");
    assert_eq!(server.health()["samples_in_flight"], 0);
}

#[test]
fn health_and_metrics_tell_the_same_numbers() {
    let server = server(&[]);
    server.generate(&[], &request(&[("a", &[1, 2]), ("b", &[3])]));
    let health = server.health();
    for field in [
        "resident_samples",
        "resident_bytes",
        "reserved_bytes",
        "arena_bytes",
        "arena_free_bytes",
        "arena_largest_free",
        "published_samples",
        "released_samples",
        "duplicate_frees",
        "stale_frees",
        "lease_expired_samples",
        "host_payload_bytes",
        "device_payload_bytes",
        "quarantined_bytes",
        "connected_peers",
        "protocol_errors",
    ] {
        assert!(health[field].is_u64(), "{field} in {health}");
    }
    assert_eq!(health["published_samples"], 2);
    assert_eq!(health["arena_bytes"], 1 << 20);
    let (status, head, text) = http(&server.address("http"), "GET", "/metrics", &[], b"");
    assert_eq!(status, 200);
    assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    for line in [
        "featurestore_arena_bytes 1048576".to_owned(),
        "featurestore_published_samples_total 2".to_owned(),
        format!("featurestore_resident_bytes {}", health["resident_bytes"]),
    ] {
        assert!(text.lines().any(|l| l == line), "{line} in {text}");
    }
}

#[test]
fn frees_by_key_bring_the_memory_back() {
    let server = server(&[]);
    server.generate(&[], &request(&[("a", &[1, 2])]));
    drop(control(&server, &keys("a"))); // closed at once, as today's clients may
    eventually("the arena is one free range", || {
        let health = server.health();
        health["released_samples"] == 1 && health["arena_largest_free"] == health["arena_bytes"]
    });
}

#[test]
fn an_arena_has_to_be_given_and_has_to_fit() {
    for (arguments, parts) in [
        (&["capture-server"][..], &["--arena", "FEATURESTORE_ARENA"][..]),
        (&["capture-server", "--arena", "0"], &["arena", "zero"]),
        (&["capture-server", "--arena=-5"], &["arena"]),
        (&["capture-server", "--arena", "50%"], &["arena", "2GiB"]),
        (&["capture-server", "--arena", "900TiB"], &["arena"]),
        (&["capture-server", "--arena", "1MiB", "--arena-kind", "heep"], &["heap"]),
        (
            &["capture-server", "--arena", "1MiB", "--transport", "shm", "--arena-kind", "heap"],
            &["arena_kind", "private"],
        ),
        (&["capture-server", "--arena", "1MiB", "--input", "/nowhere"], &["/nowhere"]),
        (
            &["capture-server", "--arena", "1MiB", "--control", "0.0.0.0:0", "--advertise", "me"],
            &["FEATURESTORE_TOKEN"],
        ),
        (
            &["capture-server", "--arena", "1MiB", "--data", "0.0.0.0:0"],
            &["--advertise", "FEATURESTORE_ADVERTISE"],
        ),
        (
            &["capture-server", "--arena", "1MiB", "--data", "[::]:0", "--control", "[::]:0"],
            &["--advertise", "FEATURESTORE_TOKEN"],
        ),
    ] {
        let ended = run(arguments);
        assert!(!ended.status.success(), "{arguments:?}: {ended:?}");
        assert_eq!(ended.stdout, "", "{arguments:?}");
        for part in parts {
            assert!(ended.stderr.contains(part), "{arguments:?}: {}", ended.stderr);
        }
    }
}

#[test]
fn everything_wrong_at_the_start_is_reported_at_once() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let taken = taken.local_addr().expect("bound").to_string();
    let ended = run(&["capture-server", "--arena", "900TiB", "--http", &taken]);
    assert!(!ended.status.success());
    for part in [taken.as_str(), "port 0", "arena"] {
        assert!(ended.stderr.contains(part), "{part} in {}", ended.stderr);
    }
    let ended = run(&["capture-server", "--arena", "0", "--deadline", "soon", "--http", "nowhere"]);
    assert!(!ended.status.success());
    for part in ["zero", "soon", "nowhere"] {
        assert!(ended.stderr.contains(part), "{part} in {}", ended.stderr);
    }
    for flag in ["--data", "--control"] {
        let ended = run(&["capture-server", "--arena", "1MiB", flag, &taken]);
        assert!(!ended.status.success());
        assert!(ended.stderr.contains(&taken), "{flag}: {}", ended.stderr);
    }
}

#[test]
fn it_ends_on_signals_and_with_who_started_it() {
    for signal in [Signal::TERM, Signal::INT] {
        let server = server(&[]);
        server.process.signal(signal);
        let ended = server.process.end(Duration::from_secs(20));
        assert!(ended.status.success(), "{signal:?}: {ended:?}");
        assert_eq!(ended.stdout, "", "only the ready line goes to standard output");
    }
    let mut command = featurestore(&["capture-server", "--arena", "1MiB", "--exit-with-parent"]);
    command.stdin(Stdio::piped());
    let mut server = Server::spawn(command);
    drop(server.process.stdin());
    let ended = server.process.end(Duration::from_secs(20));
    assert!(ended.status.success(), "{ended:?}");
}

/// A server with a request that waits for room for longer than any test.
fn waiting(mut command: std::process::Command) -> (Server, TcpStream) {
    command.args(["--arena", "64KiB", "--deadline", "10m"]).args(MODEL);
    let server = Server::spawn(command);
    server.generate(&[], &request(&[("a", &[7; 300])]));
    let waiting = send(&server, &request(&[("b", &[7; 300])]));
    eventually("it waits for room", || server.health()["samples_in_flight"] == 1);
    (server, waiting)
}

#[test]
fn another_signal_ends_it_at_once_and_one_that_is_sent_twice_does_not() {
    let (mut server, _waiting) = waiting(featurestore(&["capture-server"]));
    server.process.signal(Signal::INT);
    server.process.signal(Signal::TERM); // as `timeout` does to a process and its group
    std::thread::sleep(Duration::from_millis(700));
    assert!(server.process.is_alive(), "both are one wish");
    server.process.signal(Signal::INT);
    let ended = server.process.end(Duration::from_secs(5));
    assert_eq!(ended.status.signal(), Some(Signal::KILL.as_raw()), "{ended:?}");
}

#[test]
fn the_end_of_its_parent_is_no_signal() {
    let mut command = featurestore(&["capture-server", "--exit-with-parent"]);
    command.stdin(Stdio::piped());
    let (mut server, _waiting) = waiting(command);
    drop(server.process.stdin());
    std::thread::sleep(Duration::from_millis(700));
    server.process.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(700));
    assert!(server.process.is_alive(), "it is the first signal");
    server.process.signal(Signal::TERM);
    let ended = server.process.end(Duration::from_secs(5));
    assert_eq!(ended.status.signal(), Some(Signal::KILL.as_raw()), "{ended:?}");
}

#[test]
fn waiting_requests_do_not_keep_it_from_ending() {
    let server = server(&["--arena", "64KiB", "--deadline", "10m"]);
    server.generate(&[], &request(&[("a", &[7; 300])]));
    let _waiting = send(&server, &request(&[("b", &[7; 300])]));
    eventually("it waits for room", || server.health()["samples_in_flight"] == 1);
    server.process.signal(Signal::TERM);
    let start = Instant::now();
    server.process.end(Duration::from_secs(30));
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn real_captures_are_served_by_the_name_of_their_file() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/minilm-capture");
    let server = Server::start(&["capture-server", "--arena", "1MiB", "--input", folder]);
    let ids = [1i64; 5];
    let (status, rows) = server.generate(&[], &request(&[("minilm-0000", &ids)]));
    assert_eq!(status, 200, "{rows}");
    let shape = &result(&rows[0])["features"]["hidden_states"]["shape"];
    assert_eq!(shape, &json!([1, 5, 1920]), "{rows}");
    let (_, rows) = server.generate(&[], &request(&[("minilm-0001", &ids)]));
    let error = result(&rows[0])["error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains("not as long as its prompt"), "eight tokens, not five: {rows}");
    let (_, rows) = server.generate(&[], &request(&[("minilm-9999", &ids)]));
    assert!(result(&rows[0])["error"].is_string(), "{rows}");
}

#[test]
fn networks_that_may_not_connect_are_turned_away_from_http_too() {
    let server = Server::start(&["capture-server", "--arena", "1MiB", "--allow", "10.0.0.0/8"]);
    let mut stream =
        std::net::TcpStream::connect(server.address("http")).expect("the port is open");
    let _ = std::io::Write::write_all(&mut stream, b"GET /health HTTP/1.1\r\n\r\n");
    let mut answer = Vec::new();
    let _ = std::io::Read::read_to_end(&mut stream, &mut answer); // a reset is as good as an end
    assert!(answer.is_empty(), "{}", String::from_utf8_lossy(&answer));
}

#[test]
fn the_request_of_the_readme_is_answered() {
    let readme = include_str!("../../../../README.md");
    let (head, rest) = readme.split_once("$ curl -H '").expect("an example with curl");
    assert!(head.contains("-- capture-server --arena 1GiB --http 127.0.0.1:8080\n"));
    let (header, rest) = rest.split_once("' http://127.0.0.1:8080/generate -d '").expect("a URL");
    let (name, value) = header.split_once(": ").expect("a header");
    let body: Value = serde_json::from_str(rest.split('\'').next().expect("a body")).expect("JSON");
    let server = server(&[]);
    let (status, rows) = server.generate(&[(name, value)], &body);
    assert_eq!(status, 200, "{rows}");
    assert_eq!(result(&rows)["arena"]["holder"], value, "{rows}");
}
