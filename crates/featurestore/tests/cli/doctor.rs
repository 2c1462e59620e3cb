//! `featurestore doctor`.

use serde_json::Value;

use crate::common::{Server, run};

fn findings(arguments: &[&str]) -> (Option<i32>, Value) {
    let ended = run(&[&["doctor", "--json"], arguments].concat());
    let json = serde_json::from_str(&ended.stdout);
    (ended.status.code(), json.unwrap_or_else(|e| panic!("{e}: {ended:?}")))
}

fn transport<'a>(findings: &'a Value, scheme: &str) -> &'a Value {
    let all = findings["transports"].as_array().expect("a list");
    all.iter().find(|t| t["scheme"] == scheme).unwrap_or_else(|| panic!("{scheme}: {findings}"))
}

#[test]
fn what_works_here_is_told_to_people_and_programs() {
    let (code, all) = findings(&[]);
    assert_eq!(
        (code, &all["configured"], &all["chosen"]),
        (Some(0), &"auto".into(), &"shm".into())
    );
    for scheme in ["shm", "tcp", "store"] {
        let found = transport(&all, scheme);
        assert!(found["available"].is_boolean() && found["suitable"].is_boolean(), "{found}");
        assert!(found["reason"].as_str().is_some_and(|why| !why.is_empty()), "{found}");
    }
    assert_eq!(transport(&all, "store")["configured"], false, "it has to be asked for by name");
    let ended = run(&["doctor"]);
    assert!(ended.status.success(), "{ended:?}");
    for part in ["memlock", "rdma devices", "gpu", "available", "used: shm"] {
        assert!(ended.stdout.contains(part), "{part}: {}", ended.stdout);
    }
}

#[test]
fn servers_that_are_named_are_asked() {
    let server = Server::start(&["capture-server", "--arena", "1MiB", "--arena-kind", "heap"]);
    let control = server.address("control");
    let (code, all) = findings(&["--server", &control]);
    assert_eq!((code, &all["chosen"]), (Some(0), &"tcp".into()), "its memory is private: {all}");
    assert_eq!(transport(&all, "shm")["available"], false);
    let (code, all) = findings(&["--server", &control, "--transport", "shm", "--strict"]);
    assert_eq!((code, &all["chosen"]), (Some(1), &Value::Null));
    assert!(all["problem"].as_str().is_some_and(|why| why.contains("private")), "{all}");
}

#[test]
fn what_receiving_on_a_device_takes_is_told() {
    let server = Server::start(&["capture-server", "--arena", "1MiB", "--transport", "shm"]);
    let control = server.address("control");
    let (_, all) = findings(&["--server", &control, "--receive", "device"]);
    let shm = transport(&all, "shm");
    assert_eq!((&shm["available"], &shm["configured"]), (&true.into(), &false.into()), "{shm}");
    assert!(shm["reason"].as_str().is_some_and(|why| why.contains("receive = device")), "{shm}");
    let tcp = transport(&all, "tcp");
    if crate::common::has_device() {
        assert_eq!(all["chosen"], "tcp", "{all}");
        return;
    }
    assert_eq!((&all["chosen"], &tcp["available"]), (&Value::Null, &false.into()), "{all}");
    let problem = all["problem"].as_str().expect("it says why");
    for part in ["tcp is not available", "setting=receive", "receive = host"] {
        assert!(problem.contains(part), "{part}: {problem}");
    }
    assert!(!problem.contains("shm is not available"), "it is left out: {problem}");
}

#[test]
fn only_strict_mode_fails_when_nothing_can_be_used() {
    for (arguments, code) in [
        (&["--transport", "store"][..], 0),
        (&["--transport", "store", "--strict"], 1),
        (&["--server", "127.0.0.1:1"], 0),
        (&["--server", "127.0.0.1:1", "--strict"], 1),
    ] {
        let (found, all) = findings(arguments);
        assert_eq!((found, &all["chosen"]), (Some(code), &Value::Null), "{arguments:?}: {all}");
        assert!(all["problem"].is_string(), "{all}");
    }
}

#[test]
fn a_server_that_is_silent_may_be_stopped() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = silent.local_addr().expect("bound").to_string();
    let (code, all) = findings(&["--server", &address, "--strict"]);
    assert_eq!(code, Some(1), "older ones are silent too, but nobody can tell: {all}");
    assert!(all["unreachable"].as_str().is_some_and(|why| why.contains(&address)), "{all}");
    let tcp = transport(&all, "tcp");
    assert_eq!(tcp["available"], true, "older servers are read by tcp");
    assert!(tcp["reason"].as_str().is_some_and(|why| why.contains("does not answer")), "{all}");
}
