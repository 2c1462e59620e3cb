//! The control listener against hand-written lines and hostile input, and the client against peers
//! that misbehave.

mod support;

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener},
    sync::Arc,
    time::{Duration, Instant},
};

use control_proto::Secret;
use support::*;
use transport_core::{ClientId, ErrorKind};
use transport_mooncake_direct::{
    AnonymousFrees, CaptureSink, ControlClient, ControlOptions, ControlServerConfig, Engine,
    SinkConfig,
};

fn hello(client: &str, lease_ms: u64) -> String {
    format!(r#"{{"op":"hello","version":1,"client":"{client}","lease_ms":{lease_ms}}}"#)
}

fn resident(sink: &CaptureSink) -> u64 {
    sink.health_blocking().unwrap().resident_samples
}

fn client(sink: &CaptureSink) -> ControlClient {
    let options = ControlOptions::new(ClientId::random());
    ControlClient::start(sink.control().clone(), options).unwrap()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

#[test]
fn lists_of_keys_free_one_way_split_anywhere_and_half_closed() {
    let sink = sink(MIB);
    for name in ["a", "b", "c"] {
        publish(&sink, name, 1, &[100, 100]);
    }
    let mut stream = raw(sink.control());
    stream.write_all(b"[\"test/a/g1/t0\",\"test/a/").unwrap();
    std::thread::sleep(Duration::from_millis(30));
    stream.write_all(b"g1/t1\"]\n\n[\"unknown\"]\n").unwrap();
    eventually("a is freed", || resident(&sink) == 2);
    // FIN right behind the lines, and a line that never ends behind them.
    say(&mut stream, r#"["test/b/g1/t0","test/b/g1/t1"]"#);
    say(&mut stream, r#"["test/c/g1/t0","test/c/g1/t1"]"#);
    stream.write_all(b"[\"test/").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert!(ends(&mut stream), "nobody answers lists");
    eventually("b and c are freed", || resident(&sink) == 0);
    let stats = sink.control_stats();
    assert_eq!((stats.freed_keys, stats.cut_lines, stats.bad_lines), (7, 1, 0));
    assert_eq!(sink.health_blocking().unwrap().duplicate_frees, 1);
}

#[test]
fn object_lines_are_answered_and_half_close_waits_for_the_answers() {
    let sink = sink(MIB);
    let sample = publish(&sink, "a", 1, &[100]);
    let epoch = sink.arena().epoch();
    let seq = sample.features[0].seq.unwrap();
    let mut stream = raw(sink.control());
    say(&mut stream, r#"{"op":"hold","id":1,"epoch":5,"objects":[]}"#);
    assert!(read_line(&mut stream).contains("need_hello"));
    say(&mut stream, hello("me", 5000));
    let greeting = read_line(&mut stream);
    assert!(greeting.contains(&format!("\"epoch\":{epoch}")), "{greeting}");
    assert!(greeting.contains("\"boot_id\""), "{greeting}");
    say(&mut stream, r#"{"op":"free","id":2,"epoch":5,"objects":[["test/a/g1/t0",1]]}"#);
    assert!(read_line(&mut stream).contains("stale_epoch"));
    say(&mut stream, "nonsense");
    assert!(read_line(&mut stream).contains("bad_line"));
    let hold = |id, seq: &str| {
        format!(r#"{{"op":"hold","id":{id},"epoch":{epoch},"objects":[["test/a/g1/t0",{seq}]]}}"#)
    };
    say(&mut stream, hold(3, "999"));
    assert!(read_line(&mut stream).contains(r#""id":3,"gone":[],"stale":[0]"#));
    say(&mut stream, hold(4, &seq.to_string()));
    assert!(read_line(&mut stream).contains(r#""id":4,"gone":[],"stale":[]"#));
    // Where it does not lie it is not claimed; given back, it stays.
    let at = address(&sample, 0);
    for (at, len) in [(at, 101), (at, 99), (at + 1, 99), (at - 512, 100)] {
        say(
            &mut stream,
            format!(
                r#"{{"op":"hold","id":5,"epoch":{epoch},"objects":[["test/a/g1/t0",{seq},{at},{len}]]}}"#
            ),
        );
        assert!(read_line(&mut stream).contains(r#""stale":[0]"#), "{len} at {at}");
    }
    let objects = format!(r#""epoch":{epoch},"objects":[["test/a/g1/t0",{seq}]]}}"#);
    say(&mut stream, format!(r#"{{"op":"unhold","id":6,{objects}"#));
    assert!(read_line(&mut stream).contains(r#"{"op":"pong","id":6}"#));
    assert_eq!(resident(&sink), 1);
    say(&mut stream, r#"{"op":"health","id":7}"#);
    assert!(read_line(&mut stream).contains("\"resident_samples\":1"));
    say(&mut stream, format!(r#"{{"op":"free","id":8,{objects}"#));
    say(&mut stream, format!(r#"{{"op":"free","id":9,{objects}"#));
    stream.shutdown(Shutdown::Write).unwrap();
    assert!(read_line(&mut stream).contains(r#""id":8,"gone":[],"stale":[]"#));
    assert!(read_line(&mut stream).contains(r#""id":9,"gone":[0]"#));
    assert!(ends(&mut stream));
    assert_eq!(resident(&sink), 0);
}

#[test]
fn a_bad_object_line_is_answered_even_if_it_is_the_first() {
    let sink = sink(MIB);
    for line in [r#"{"op":"hold","id":7,"epoch":"x"}"#, r#" {"op":"#] {
        let mut stream = raw(sink.control());
        say(&mut stream, line);
        let reply = read_line(&mut stream);
        assert!(reply.contains("\"error\"") && reply.contains("bad_line"), "{reply}");
        assert_eq!(reply.contains("\"id\":7"), line.contains("7"), "{reply}");
    }
    // Who sends lists reads no answers.
    let mut stream = raw(sink.control());
    say(&mut stream, "[\"a\"");
    stream.shutdown(Shutdown::Write).unwrap();
    assert!(ends(&mut stream));
    assert_eq!(sink.control_stats().bad_lines, 3);
}

#[test]
fn a_lost_client_keeps_its_lease_and_a_silent_one_twice_that() {
    let sink = sink(MIB);
    let holder = ClientId::new("lost").unwrap();
    publish_all(&sink, &[("a", 1)], &[10], Some(&holder));
    let mut stream = raw(sink.control());
    say(&mut stream, hello("lost", 400));
    read_line(&mut stream);
    drop(stream);
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!(resident(&sink), 1);
    eventually("the lease runs out", || resident(&sink) == 0);

    let silent = ClientId::new("silent").unwrap();
    publish_all(&sink, &[("b", 1)], &[10], Some(&silent));
    let mut stream = raw(sink.control());
    say(&mut stream, hello("silent", 300));
    read_line(&mut stream);
    let start = Instant::now();
    assert!(read_line(&mut stream).contains("lease_expired"));
    assert!(start.elapsed() >= Duration::from_millis(550), "{:?}", start.elapsed());
    assert!(ends(&mut stream));
    eventually("its claims end", || resident(&sink) == 0);
    assert_eq!(sink.health_blocking().unwrap().lease_expired_samples, 2);

    // A goodbye ends them at once.
    let leaving = ClientId::new("leaving").unwrap();
    publish_all(&sink, &[("c", 1)], &[10], Some(&leaving));
    let mut stream = raw(sink.control());
    say(&mut stream, hello("leaving", 60_000));
    read_line(&mut stream);
    say(&mut stream, r#"{"op":"bye"}"#);
    assert!(ends(&mut stream));
    eventually("its claims end", || resident(&sink) == 0);
}

#[test]
fn tokens_are_asked_for_and_never_shown() {
    let token = Secret::new("sesame-sesame").unwrap();
    let sink = sink_with(MIB, |config| config.token = Some(token.clone()));
    publish(&sink, "a", 1, &[10]);
    let mut stream = raw(sink.control());
    say(&mut stream, r#"["test/a/g1/t0"]"#);
    for wrong in ["", r#","token":"sesame-sesamf""#] {
        let line = hello("me", 5000);
        say(&mut stream, format!("{}{wrong}}}", &line[..line.len() - 1]));
        let reply = read_line(&mut stream);
        assert!(reply.contains("bad_token") && !reply.contains("sesame"), "{reply}");
    }
    say(&mut stream, r#"{"op":"health","id":1}"#);
    assert!(read_line(&mut stream).contains("need_hello"));
    assert_eq!(resident(&sink), 1);
    let line = hello("me", 5000);
    say(&mut stream, format!("{},\"token\":\"sesame-sesame\"}}", &line[..line.len() - 1]));
    assert!(read_line(&mut stream).contains("\"epoch\""));
    say(&mut stream, r#"["test/a/g1/t0"]"#);
    eventually("freed", || resident(&sink) == 0);

    let without = client(&sink);
    let error = without.connect(soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    let mut options = ControlOptions::new(ClientId::random());
    options.token = Some(token);
    assert!(!format!("{options:?}").contains("sesame"));
    let with = ControlClient::start(sink.control().clone(), options).unwrap();
    with.connect(soon()).unwrap();
}

#[test]
fn other_addresses_than_loopback_need_a_token_or_plain_words() {
    let start = |token: Option<&str>, anonymous| {
        let mut config = ControlServerConfig::default();
        config.bind = "0.0.0.0:0".parse().unwrap();
        config.advertise_host = Some("127.0.0.1".into());
        config.token = token.map(|t| Secret::new(t).unwrap());
        config.anonymous = anonymous;
        let session = "127.0.0.1:1".parse().unwrap();
        transport_mooncake_direct::ControlServer::start(arena(MIB), session, config)
    };
    let error = start(None, AnonymousFrees::LoopbackOnly).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConfigInvalid);
    assert!(error.to_string().contains("token"), "{error}");
    assert!(start(None, AnonymousFrees::Nobody).is_err());
    start(None, AnonymousFrees::Everybody).unwrap();
    start(Some("secret"), AnonymousFrees::LoopbackOnly).unwrap();
}

#[test]
fn noise_costs_counted_lines_and_nobody_else() {
    let sink = sink(MIB);
    publish(&sink, "a", 1, &[10]);
    let mut noisy = raw(sink.control());
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut noise = vec![0u8; 256 << 10];
    for byte in &mut noise {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        *byte = seed as u8;
    }
    noise.push(b'\n');
    noisy.write_all(&noise).unwrap();
    noisy
        .write_all(b"[\"\xff\xfe\"]\n[\"a\0b\"]\n[[[[[[[[[[\"a\"]]]]]]]]]]\n{\"op\":\"drop\"}\n")
        .unwrap();
    say(&mut noisy, r#"["test/a/g1/t0"]"#);
    eventually("the line behind the noise counts", || resident(&sink) == 0);
    assert!(sink.control_stats().bad_lines > 500);
}

#[test]
fn a_line_without_end_ends_its_connection_with_a_reason() {
    let sink = sink_with(MIB, |config| config.limits.line_bytes = 10_000);
    let mut stream = raw(sink.control());
    say(&mut stream, hello("endless", 5000));
    read_line(&mut stream);
    stream.write_all(&vec![b'x'; 9_000]).unwrap();
    let _ = stream.write_all(&vec![b'x'; 60_000]); // may be refused half-way
    assert!(read_line(&mut stream).contains("line_too_long"));
    assert!(ends(&mut stream));
    assert_eq!(sink.control_stats().closed_for_cause, 1);
}

#[test]
fn two_hundred_clients_without_a_newline_do_not_delay_the_others() {
    let sink = sink(MIB);
    let half_line = format!("[\"{}", "x".repeat(512 << 10));
    let _hoarders: Vec<_> = (0..200)
        .map(|_| {
            let mut stream = raw(sink.control());
            // The budget sends some of them away, which is the point.
            let _ = stream.write_all(half_line.as_bytes());
            stream
        })
        .collect();
    let client = client(&sink);
    for round in 0..20 {
        let sample = publish(&sink, &format!("s{round}"), 1, &[100]);
        let start = Instant::now();
        let ticket = client.free_later(vec![sample], Some(sink.arena().epoch())).unwrap();
        assert_eq!(ticket.wait(soon()).unwrap().released, 1);
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    }
}

#[test]
fn nothing_more_is_read_while_the_arena_is_behind() {
    const BOUND: usize = 16 << 20;
    let sink = sink(MIB);
    publish(&sink, "a", 1, &[10]);
    // The owner is kept busy by an answer until the test lets it go on.
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let busy = move |_| assert!(wait.recv_timeout(Duration::from_secs(20)).is_ok());
    let objects = capture_arena::ObjectList::new();
    let reply: Option<Box<dyn FnOnce(_) + Send>> = Some(Box::new(busy));
    sink.arena().free(capture_arena::FreeRequest { client: None, objects, reply });
    let line = format!("[{}\"u\"]\n", "\"u\",".repeat(60_000));
    let lines: u64 = 64; // more than 60 MiB of keys and entries
    let floods: Vec<_> = (0..2)
        .map(|_| {
            let (mut stream, line) = (raw(sink.control()), line.clone());
            stream.set_write_timeout(Some(Duration::from_secs(30))).unwrap();
            std::thread::spawn(move || {
                (0..lines / 2).for_each(|_| stream.write_all(line.as_bytes()).unwrap());
                stream
            })
        })
        .collect();
    eventually("the bound is reached", || sink.arena().backlog_bytes() > BOUND);
    for _ in 0..40 {
        std::thread::sleep(Duration::from_millis(5));
        let backlog = sink.arena().backlog_bytes();
        assert!(backlog < BOUND + (4 << 20), "{backlog} bytes wait");
    }
    go.send(()).unwrap();
    let mut streams: Vec<_> = floods.into_iter().map(|f| f.join().unwrap()).collect();
    say(&mut streams[0], r#"["test/a/g1/t0"]"#);
    eventually("everything is applied", || resident(&sink) == 0);
    eventually("and nothing lost", || sink.control_stats().freed_keys == lines * 60_001 + 1);
    eventually("nothing waits", || sink.arena().backlog_bytes() == 0);
}

#[test]
fn a_client_that_reads_no_answers_is_closed() {
    let sink = sink_with(MIB, |config| config.limits.connection_bytes = 64 << 10);
    let mut stream = raw(sink.control());
    stream.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    say(&mut stream, hello("deaf", 60_000));
    let pings = "{\"op\":\"ping\",\"id\":123456789}\n".repeat(20_000);
    let start = Instant::now();
    // Either the server stops reading, and then answers wait no more than allowed, or it closes.
    while start.elapsed() < Duration::from_secs(5) && stream.write_all(pings.as_bytes()).is_ok() {}
    let other = client(&sink);
    other.connect(soon()).unwrap();
    assert!(sink.control_stats().connections <= 2);
}

#[test]
fn a_thousand_idle_connections_are_cheap_and_one_more_is_refused() {
    let sink = sink_with(MIB, |config| config.limits.connections = 300);
    let idle: Vec<_> = (0..300).map(|_| raw(sink.control())).collect();
    eventually("all are taken", || sink.control_stats().connections == 300);
    assert!(ends(&mut raw(sink.control())));
    drop(idle);
    eventually("all are gone", || sink.control_stats().connections == 0);
    client(&sink).connect(soon()).unwrap();
}

#[test]
fn connections_that_say_nothing_do_not_shut_the_port_for_good() {
    let mut config = ControlServerConfig::default();
    config.limits.connections = 20;
    config.first_line = Duration::from_millis(700);
    let session = "127.0.0.1:1".parse().unwrap();
    let server =
        transport_mooncake_direct::ControlServer::start(arena(MIB), session, config).unwrap();
    let mut spoken = raw(server.address());
    say(&mut spoken, r#"["unknown"]"#);
    let mut mute: Vec<_> = (0..19).map(|_| raw(server.address())).collect();
    eventually("all are taken", || server.stats().connections == 20);
    mute[0].write_all(b"[\"half a line").unwrap();
    let begin = Instant::now();
    assert!(ends(&mut raw(server.address())), "one too many");
    for stream in &mut mute {
        assert!(ends(stream));
    }
    assert!(begin.elapsed() >= Duration::from_millis(300), "{:?}", begin.elapsed());
    drop(mute);
    eventually("their places are free", || server.stats().connections == 1);
    assert_eq!(server.stats().closed_for_cause, 19);
    // Who has sent a line may be silent.
    say(&mut spoken, r#"{"op":"ping","id":1}"#);
    assert!(read_line(&mut spoken).contains("pong"));
}

#[test]
fn sixty_thousand_frees_go_over_one_connection() {
    let sink = sink(32 * MIB);
    let client = client(&sink);
    let epoch = Some(sink.arena().epoch());
    let names: Vec<String> = (0..6000).map(|i| format!("s{i}")).collect();
    let samples: Vec<_> = names.iter().map(|name| (&**name, 1)).collect();
    let start = Instant::now();
    let mut released = 0;
    for _ in 0..10 {
        let published = publish_all(&sink, &samples, &[8], None);
        let tickets: Vec<_> = published
            .chunks(500)
            .map(|chunk| client.free_later(chunk.to_vec(), epoch).unwrap())
            .collect();
        for ticket in tickets {
            let report = ticket.wait(soon()).unwrap();
            assert_eq!((report.already_gone, report.stale, report.unconfirmed), (0, 0, 0));
            released += report.released;
        }
    }
    assert_eq!(released, 60_000);
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    assert_eq!((client.stats().connects, client.stats().outstanding), (1, 0));
    let health = sink.health_blocking().unwrap();
    assert_eq!((health.published_samples, health.released_samples), (60_000, 60_000));
}

#[test]
fn two_clients_freeing_one_key_free_it_once() {
    let sink = sink(MIB);
    let (a, b) = (client(&sink), client(&sink));
    let epoch = Some(sink.arena().epoch());
    let (mut released, mut gone) = (0, 0);
    for round in 0..50 {
        let sample = publish(&sink, &format!("s{round}"), 1, &[100, 10]);
        let tickets = [&a, &b].map(|c| c.free_later(vec![sample.clone()], epoch).unwrap());
        for ticket in tickets {
            let report = ticket.wait(soon()).unwrap();
            released += report.released;
            gone += report.already_gone;
        }
    }
    assert_eq!((released, gone), (50, 50));
    let health = sink.health_blocking().unwrap();
    assert_eq!((health.released_samples, health.duplicate_frees), (50, 100));
}

#[test]
fn many_threads_share_one_client() {
    let sink = sink(32 * MIB);
    let client = client(&sink);
    let epoch = Some(sink.arena().epoch());
    std::thread::scope(|scope| {
        for thread in 0..16 {
            let (client, sink) = (&client, &sink);
            scope.spawn(move || {
                let long = "x".repeat(thread * 50 + 1);
                // From one line to four.
                let names: Vec<_> = (0..40 + 30 * thread).map(|i| format!("{i}-{long}")).collect();
                let samples: Vec<_> = names.iter().map(|n| (&**n, 1)).collect();
                for _ in 0..5 {
                    let published = publish_all(sink, &samples, &[8, 8], None);
                    let first = client.free_later(published.clone(), epoch).unwrap();
                    let again = client.free_later(published, epoch).unwrap();
                    // Nothing overtakes anything, whoever writes it.
                    assert_eq!(first.wait(soon()).unwrap().released, samples.len() as u64);
                    assert_eq!(again.wait(soon()).unwrap().already_gone, samples.len() as u64);
                }
            });
        }
    });
    assert_eq!((client.stats().connects, sink.control_stats().bad_lines), (1, 0));
}

#[test]
fn an_older_server_is_freed_one_way_and_again_after_a_reconnect() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut options = ControlOptions::new(ClientId::random());
    options.hello_timeout = Duration::from_millis(200);
    let server = listener.local_addr().unwrap().into();
    let client = ControlClient::start(server, options).unwrap();
    let sample = publish(&sink(MIB), "a", 1, &[100]);
    let ticket = client.free_later(vec![sample.clone()], None).unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert!(read_line(&mut stream).starts_with("{\"op\":\"hello\""));
    assert_eq!(read_line(&mut stream), r#"["test/a/g1/t0"]"#);
    assert_eq!(ticket.wait(soon()).unwrap().unconfirmed, 1);
    // What needs an answer cannot be had from it.
    let error = client.health(soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let error = client.connect(soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}");
    assert!(error.message().contains("does not answer the greeting"), "nothing was lost: {error}");
    // The server goes away: the next free notices before it is sent, and the last one is repeated.
    drop(stream);
    std::thread::sleep(Duration::from_millis(50));
    let other = publish(&sink(MIB), "b", 1, &[100]);
    let ticket = client.free_later(vec![other], None).unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(read_line(&mut stream), r#"["test/a/g1/t0"]"#);
    assert_eq!(read_line(&mut stream), r#"["test/b/g1/t0"]"#);
    assert_eq!(ticket.wait(soon()).unwrap().unconfirmed, 1);
}

#[test]
fn unanswered_frees_are_sent_again_after_a_reconnect() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut options = ControlOptions::new(ClientId::random());
    options.lease = Duration::from_secs(30);
    let client = ControlClient::start(listener.local_addr().unwrap().into(), options).unwrap();
    let sample = publish(&sink(MIB), "a", 1, &[100]);
    let epoch = sample.epoch().unwrap();
    let greeting = format!(
        r#"{{"op":"hello","version":1,"epoch":{epoch},"session":"127.0.0.1:1","lease_ms":30000,"arena":{{"base":0,"bytes":512,"shm":null}}}}"#
    );
    let ticket = client.free_later(vec![sample], Some(epoch)).unwrap();
    let mut clients = Vec::new();
    for attempt in 0..3 {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        clients.push(read_line(&mut stream));
        say(&mut stream, &greeting);
        let line = read_line(&mut stream);
        assert!(line.contains("\"op\":\"free\"") && line.contains("test/a/g1/t0"), "{line}");
        let id = line.split("\"id\":").nth(1).unwrap().split(',').next().unwrap().to_owned();
        match attempt {
            0 => drop(stream),                                // before it answers
            1 => stream.write_all(b"{\"op\":\"fre").unwrap(), // within the answer
            _ => {
                say(&mut stream, format!(r#"{{"op":"freed","id":{id},"gone":[0],"stale":[]}}"#));
                // Sent three times: most likely an earlier one did it.
                assert_eq!(ticket.wait(soon()).unwrap().unconfirmed, 1);
                clients.push(String::new());
            }
        }
    }
    assert_eq!(clients[0], clients[1], "the same client id each time");
}

#[test]
fn a_server_that_is_not_there_is_reported_in_time() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut options = ControlOptions::new(ClientId::random());
    options.attempts = 3;
    let client = ControlClient::start(port.into(), options).unwrap();
    let sample = publish(&sink(MIB), "a", 1, &[100]);
    let start = Instant::now();
    let ticket = client.free_later(vec![sample], Some(transport_core::Epoch(1))).unwrap();
    let error = ticket.wait(soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}");
    assert!(error.is_temporary() && error.context("peer").is_some());
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(client.connect(soon()).unwrap_err().kind(), ErrorKind::PeerGone);
    assert_eq!(client.stats().outstanding, 0);
}

#[test]
fn outstanding_frees_are_bounded() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap(); // accepts and says nothing
    let mut options = ControlOptions::new(ClientId::random());
    options.max_outstanding = 5;
    let client = ControlClient::start(listener.local_addr().unwrap().into(), options).unwrap();
    let sample = publish(&sink(MIB), "a", 1, &[1, 1, 1]);
    let epoch = sample.epoch();
    client.free_later(vec![sample.clone()], epoch).unwrap();
    let error = client.free_later(vec![sample], epoch).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CapacityExceeded);
    let start = Instant::now();
    client.close(Duration::from_millis(200));
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn freeing_a_step_costs_the_trainer_next_to_nothing() {
    let sink = sink(32 * MIB);
    let consumer = consumer(Engine::Shm);
    let names: Vec<String> = (0..512).map(|i| format!("s{i}")).collect();
    let samples: Vec<_> = names.iter().map(|name| (&**name, 1)).collect();
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let published = publish_all(&sink, &samples, &[64, 64, 64, 64], None);
        let releases: Vec<_> = published.into_iter().map(Into::into).collect();
        let start = Instant::now();
        let pending = consumer.release_later(releases).unwrap();
        best = best.min(start.elapsed());
        assert_eq!(pending.wait(soon()).unwrap().released, 512);
    }
    // The bound of the release build is 1 ms; see the bench.
    assert!(best < Duration::from_millis(5), "{best:?}");
}

#[test]
fn closing_the_sink_tells_its_clients() {
    let sink = CaptureSink::start(arena(MIB), SinkConfig::default()).unwrap();
    let mut stream = raw(sink.control());
    say(&mut stream, hello("me", 5000));
    read_line(&mut stream);
    sink.close_blocking();
    sink.close_blocking();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("closing"), "{rest}");
    let _ = Arc::new(sink);
}
