//! The control listener of a real server against clients of all kinds, good, careless and hostile.

use std::time::{Duration, Instant};

use featurestore_tests::{
    STEP,
    capture::{Ask, OBJECTS, SAMPLE_ROOM, SMALL, health, names, objects, results},
    eventually,
    process::CaptureServer,
    wire::{Control, Data},
};
use serde_json::{Value, json};

fn server() -> CaptureServer {
    CaptureServer::start("4MiB", SMALL)
}

fn keys(results: &[Value]) -> Vec<String> {
    results.iter().flat_map(objects).map(|(key, _)| key).collect()
}

fn drained(server: &CaptureServer) {
    eventually("every byte is free", STEP, || {
        health(server, "arena_largest_free") == health(server, "arena_bytes")
    });
    assert_eq!(health(server, "published_samples"), health(server, "released_samples"));
}

#[test]
fn plain_lists_free_keys_split_anywhere_and_after_a_half_close() {
    let server = server();
    let captured = results(&server, &names("a", 3), Ask::default());
    let line = format!("{}\n", json!(keys(&captured)));
    let mut control = Control::connect(server.field("control"));
    for piece in line.as_bytes().chunks(7) {
        assert!(control.send(piece));
    }
    drained(&server);

    let captured = results(&server, &names("b", 3), Ask::default());
    let mut control = Control::connect(server.field("control"));
    control.send_line(&json!(keys(&captured)));
    control.half_close();
    drained(&server);
    assert_eq!(health(&server, "duplicate_frees"), 0);
}

#[test]
fn frees_of_what_is_gone_are_counted_and_change_nothing() {
    let server = server();
    let captured = results(&server, &names("a", 2), Ask::default());
    let (first, second) = (keys(&captured[..1]), keys(&captured[1..]));
    let mut one = Control::connect(server.field("control"));
    let mut two = Control::connect(server.field("control"));
    one.send_line(&json!([first.clone(), first.clone()].concat())); // twice in one line
    one.send_line(&json!(first)); // in two lines
    eventually("the first sample is free", STEP, || health(&server, "resident_samples") == 1);
    two.send_line(&json!(first)); // from two connections
    two.send_line(&json!(["no/such/g1/key", "not a key at all", ""]));
    let expected = (3 * OBJECTS + 3) as u64;
    eventually("all are counted", STEP, || health(&server, "duplicate_frees") == expected);
    assert_eq!(health(&server, "resident_samples"), 1);
    two.send_line(&json!(second));
    drained(&server);
    assert_eq!(health(&server, "released_samples"), 2);
}

#[test]
fn a_late_free_of_an_older_life_never_touches_the_newer_one() {
    let server = server();
    let names = names("k", 1);
    let mut control = Control::connect(server.field("control"));
    let hello = control.hello("client-a", 30_000);
    let free = |id: u64, result: &Value| json!({"op": "free", "id": id, "epoch": hello["epoch"], "objects": objects(result)});
    let older = results(&server, &names, Ask::default()).remove(0);
    let freed = control.ask(&free(1, &older));
    assert_eq!((&freed["gone"], &freed["stale"]), (&json!([]), &json!([])), "{freed}");
    let newer = results(&server, &names, Ask::default()).remove(0);
    let again = control.ask(&free(2, &older)); // late, and delivered twice
    let again_too = control.ask(&free(3, &older));
    for answer in [&again, &again_too] {
        assert_eq!(answer["stale"].as_array().map(Vec::len), Some(OBJECTS), "{answer}");
    }
    assert_eq!(health(&server, "resident_samples"), 1);
    assert_eq!(health(&server, "stale_frees"), 2 * OBJECTS as u64);
    control.ask(&free(4, &newer));
    drained(&server);
}

#[test]
fn another_life_of_the_server_is_refused_by_name() {
    let server = server();
    let captured = results(&server, &names("a", 1), Ask::default()).remove(0);
    let mut control = Control::connect(server.field("control"));
    control.hello("client-a", 30_000);
    let objects = objects(&captured);
    let answer = control.ask(&json!({"op": "free", "id": 7, "epoch": 12345, "objects": objects}));
    assert_eq!((&answer["op"], &answer["id"]), (&json!("error"), &json!(7)), "{answer}");
    assert_eq!(answer["code"], "stale_epoch", "{answer}");
    assert_eq!(health(&server, "resident_samples"), 1);
}

#[test]
fn two_holders_of_one_sample_both_have_to_let_go() {
    let server = server();
    let captured = results(&server, &names("a", 1), Ask::default()).remove(0);
    let objects = objects(&captured);
    let mut clients: Vec<(Control, Value)> = ["client-a", "client-b"]
        .map(|name| {
            let mut control = Control::connect(server.field("control"));
            let epoch = control.hello(name, 30_000)["epoch"].clone();
            (control, epoch)
        })
        .into();
    for (control, epoch) in &mut clients {
        let held = control.ask(&json!({"op": "hold", "id": 1, "epoch": epoch, "objects": objects}));
        assert_eq!(held["op"], "held", "{held}");
    }
    let (first, epoch) = &mut clients[0];
    first.ask(&json!({"op": "free", "id": 2, "epoch": epoch, "objects": objects}));
    assert_eq!(health(&server, "resident_samples"), 1, "the other one still holds it");
    let feature = &captured["features"]["hidden_states"];
    let address = feature["address"].as_u64().expect("an address");
    assert!(Data::connect(server.field("session")).read(address, 1024).is_ok());
    let (second, epoch) = &mut clients[1];
    second.ask(&json!({"op": "free", "id": 2, "epoch": epoch, "objects": objects}));
    drained(&server);
}

#[test]
fn a_plain_free_of_a_held_sample_drains_it_until_the_holder_lets_go() {
    let server = server();
    let ask = Ask { holder: Some("client-a"), ..Ask::default() };
    let captured = results(&server, &names("a", 1), ask).remove(0);
    assert_eq!(captured["arena"]["holder"], "client-a");
    let mut holder = Control::connect(server.field("control"));
    let epoch = holder.hello("client-a", 30_000)["epoch"].clone();
    let mut stranger = Control::connect(server.field("control"));
    stranger.send_line(&json!(keys(std::slice::from_ref(&captured))));
    // The same key may be published again at once, but never in the same place.
    let mut newer = None;
    eventually("the key may be published again", STEP, || {
        let answer = featurestore_tests::capture::request(&server, &names("a", 1), Ask::default());
        let result = &answer[0]["meta_info"]["spec_capture"];
        let result = result.as_array().map_or(result, |inner| &inner[0]).clone();
        if result.get("error").is_none() {
            newer = Some(result);
            return true;
        }
        assert!(result["error"].as_str().is_some_and(|e| e.contains("exists")), "{result}");
        false
    });
    let newer = newer.expect("published");
    for (name, feature) in captured["features"].as_object().expect("features") {
        assert_ne!(feature["address"], newer["features"][name]["address"], "{name}");
    }
    let free = |id: u64, result: &Value| json!({"op": "free", "id": id, "epoch": epoch, "objects": objects(result)});
    holder.ask(&free(1, &captured));
    holder.ask(&free(2, &newer));
    drained(&server);
}

#[test]
fn holders_that_vanish_give_everything_back_within_their_lease() {
    let server = server();
    let ask = Ask { holder: Some("client-a"), ..Ask::default() };
    results(&server, &names("a", 40), ask);
    let mut control = Control::connect(server.field("control"));
    control.hello("client-a", 500);
    drop(control); // no goodbye: as a crash looks from here
    let lost = Instant::now();
    eventually("the lease ends", STEP, || health(&server, "resident_samples") == 0);
    let waited = lost.elapsed();
    assert!(waited >= Duration::from_millis(400), "the lease is kept: {waited:?}");
    assert!(waited < Duration::from_secs(5), "and it ends: {waited:?}");
    assert_eq!(health(&server, "lease_expired_samples"), 40);
    drained(&server);
}

#[test]
fn a_goodbye_gives_everything_back_at_once() {
    let server = server();
    let ask = Ask { holder: Some("client-a"), ..Ask::default() };
    results(&server, &names("a", 4), ask);
    let mut control = Control::connect(server.field("control"));
    control.hello("client-a", 60_000);
    control.send_line(&json!({"op": "bye"}));
    drained(&server);
}

#[test]
fn bad_lines_cost_one_error_each_and_nothing_else() {
    let server = server();
    let captured = results(&server, &names("a", 1), Ask::default());
    let mut control = Control::connect(server.field("control"));
    let deep = "[".repeat(100_000) + "\n";
    let bad: [&[u8]; 8] = [
        b"\x00\x01\x02\xff\xfe\n",
        b"[\"\xff\xfe\"]\n",
        b"[\"a\0b\"\n",
        b"{\"op\":\"explode\"}\n",
        b"{\"op\":\"free\",\"id\":-1}\n",
        b"[1,2,3]\n",
        b"null\n",
        deep.as_bytes(),
    ];
    for line in bad {
        assert!(control.send(line), "the connection goes on");
    }
    eventually("each is counted once", STEP, || health(&server, "protocol_errors") == 8);
    control.send_line(&json!(keys(&captured)));
    drained(&server);
}

#[test]
fn endless_lines_are_cut_off_and_do_not_hold_up_others() {
    let server = server();
    let captured = results(&server, &names("a", 8), Ask::default());
    // 200 clients that send 2 MB without a newline and idle.
    let piece = vec![b'x'; 1 << 16];
    let mut hostile: Vec<Control> =
        (0..200).map(|_| Control::connect(server.field("control"))).collect();
    for client in &mut hostile {
        for _ in 0..32 {
            if !client.send(&piece) {
                break; // closed already, as it should be
            }
        }
    }
    let start = Instant::now();
    let mut good = Control::connect(server.field("control"));
    good.send_line(&json!(keys(&captured)));
    drained(&server);
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());

    // One that would send 10 GiB is stopped long before.
    let mut endless = Control::connect(server.field("control"));
    let piece = vec![b'y'; 1 << 20];
    let sent = (0..10 * 1024).take_while(|_| endless.send(&piece)).count();
    assert!(sent < 100, "{sent} MiB were taken without a newline");
    assert!(health(&server, "peak_rss_bytes") < (4 + 96) << 20, "no line is kept without end");
}

#[test]
fn a_full_arena_waits_for_frees_and_then_says_what_holds_it() {
    let room = 16 * SAMPLE_ROOM;
    let size = room.to_string();
    let arguments = [SMALL, &["--deadline", "2s"]].concat();
    let server = CaptureServer::start(&size, &arguments);
    let captured = results(&server, &names("a", 16), Ask::default());
    assert_eq!(health(&server, "arena_free_bytes"), 0);

    // With frees coming, the next one waits and gets its place.
    let control = server.field("control").to_owned();
    let first = json!(keys(&captured[..1]));
    let freeing = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        Control::connect(&control).send_line(&first);
    });
    let start = Instant::now();
    results(&server, &names("b", 1), Ask::default());
    assert!(start.elapsed() >= Duration::from_millis(250));
    freeing.join().expect("no panic");

    // Without, it fails at its deadline and names numbers, holders and remedies.
    let start = Instant::now();
    let answer = featurestore_tests::capture::request(&server, &names("c", 1), Ask::default());
    let waited = start.elapsed();
    let text = answer.to_string();
    assert!(waited >= Duration::from_millis(1900) && waited < Duration::from_secs(8), "{waited:?}");
    for part in ["no room", "t/a-00001/g1", "larger arena", "watermark", "FEATURESTORE_ARENA"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(health(&server, "resident_samples"), 16, "nothing is left of the failed one");
    assert_eq!(health(&server, "reserved_bytes"), 0);
}

#[test]
fn only_published_ranges_are_served() {
    let server = server();
    let captured = results(&server, &names("a", 2), Ask::default());
    let feature = &captured[0]["features"]["hidden_states"];
    let address = feature["address"].as_u64().expect("an address");
    let mut data = Data::connect(server.field("session"));
    assert_eq!(data.read(address, 1024).expect("published").len(), 1024);
    for (what, address, length) in [
        ("one byte past the object", address, 1025),
        ("before the object", address - 1, 8),
        ("nowhere", 0x1000, 8),
        ("around the end of the address space", u64::MAX - 3, 8),
        ("more than any address space", address, u64::MAX),
    ] {
        let mut data = Data::connect(server.field("session"));
        assert!(data.read(address, length).is_err(), "{what}");
    }
    Control::connect(server.field("control")).send_line(&json!(keys(&captured)));
    drained(&server);
    let mut data = Data::connect(server.field("session"));
    assert!(data.read(address, 1024).is_err(), "what is freed is not served");
}

/// A request with patience waits for room for as long as it says; then another, smaller one that
/// waited behind it has its turn.
#[test]
fn a_request_waits_for_room_as_long_as_it_has_patience() {
    let arena = 16 * SAMPLE_ROOM;
    let server = CaptureServer::start(&arena.to_string(), SMALL);
    results(&server, &names("resident", 10), Ask::default());
    let request = |prefix: &str, count, patience| {
        let start = Instant::now();
        let ask = Ask { patience: Some(patience), ..Ask::default() };
        let answer = featurestore_tests::capture::request(&server, &names(prefix, count), ask);
        (answer, start.elapsed())
    };
    std::thread::scope(|scope| {
        let large = scope.spawn(|| request("large", 10, "500"));
        std::thread::sleep(Duration::from_millis(100)); // it is in line
        let (small, waited) = request("small", 2, "20000");
        assert!(small.to_string().contains("hidden_states"), "{small}");
        assert!(waited < Duration::from_secs(10), "behind the large one: {waited:?}");
        let (large, waited) = large.join().unwrap();
        assert!(large.to_string().contains("no room in the arena"), "{large}");
        assert!((450..10_000).contains(&waited.as_millis()), "{waited:?}");
    });
    // Without any patience: what has no room is told from what only waits for its turn.
    std::thread::scope(|scope| {
        let large = scope.spawn(|| request("large", 14, "2000"));
        std::thread::sleep(Duration::from_millis(100)); // it is in line
        let (small, _) = request("little", 1, "0");
        let cause = |answer: &Value| {
            let row = answer.get(0).unwrap_or(answer);
            row["meta_info"]["spec_capture"]["cause"].as_str().map(str::to_owned)
        };
        assert_eq!(cause(&small).as_deref(), Some("queued"), "{small}");
        assert!(!small.to_string().contains("no room"), "{small}");
        let (other, _) = request("other", 13, "0");
        assert_eq!(cause(&other).as_deref(), Some("no_room"), "{other}");
        let (large, _) = large.join().unwrap();
        assert_eq!(cause(&large).as_deref(), Some("no_room"), "{large}");
    });
    let (refused, _) = request("bad", 1, "soon");
    assert!(refused.to_string().contains("the patience is no number"), "{refused}");
}
