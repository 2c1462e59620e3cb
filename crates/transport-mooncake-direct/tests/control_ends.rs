//! What a control client does at the end: when the server refuses it, and when it is closed while
//! others still hand something over.

mod support;

use std::{
    net::{TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use support::*;
use transport_core::{ClientId, ErrorKind, SessionName};
use transport_mooncake_direct::{ControlClient, ControlOptions};

/// A server in front of another one, whose greeting it passes on, or refuses.
struct Door {
    address: SessionName,
    connections: Arc<AtomicUsize>,
    refuses: Arc<Mutex<Option<&'static str>>>,
    open: Arc<Mutex<Option<TcpStream>>>,
}

impl Door {
    fn before(real: SessionName) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let door = Self {
            address: listener.local_addr().unwrap().into(),
            connections: Arc::default(),
            refuses: Arc::default(),
            open: Arc::default(),
        };
        let (connections, refuses, open) =
            (door.connections.clone(), door.refuses.clone(), door.open.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                connections.fetch_add(1, Ordering::SeqCst);
                let greeting = read_line(&mut stream);
                if let Some(code) = *refuses.lock() {
                    let line = format!(r#"{{"op":"error","code":"{code}","message":"no"}}"#);
                    say(&mut stream, line);
                    continue;
                }
                let mut there = raw(&real);
                say(&mut there, greeting);
                let answer = read_line(&mut there);
                // Kept before the client hears of it, so that a test can end it from then on.
                let mut open = open.lock();
                say(&mut stream, answer);
                *open = Some(stream);
            }
        });
        door
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

#[test]
fn a_client_that_is_refused_after_a_restart_does_not_come_back_by_itself() {
    for (code, kind) in [
        ("bad_token", ErrorKind::PermissionDenied),
        ("unsupported_version", ErrorKind::Unsupported),
    ] {
        let sink = sink(MIB);
        let door = Door::before(sink.control().clone());
        let client =
            ControlClient::start(door.address.clone(), ControlOptions::new(ClientId::random()))
                .unwrap();
        client.connect(soon()).unwrap();
        *door.refuses.lock() = Some(code);
        *door.open.lock() = None;
        eventually("it comes back", || door.connections() == 2);
        std::thread::sleep(Duration::from_millis(700));
        assert_eq!(door.connections(), 2, "{code}: nobody had anything to say");
        let stats = client.stats();
        assert!(!stats.connected, "{stats:?}");
        assert!(!stats.last_error.unwrap().contains("closed the connection"), "the reason is kept");

        // A question is answered by the refusal, and many do not make a storm.
        let (begin, mut asked) = (Instant::now(), 0);
        while begin.elapsed() < Duration::from_millis(600) {
            assert_eq!(client.health(soon()).unwrap_err().kind(), kind);
            asked += 1;
        }
        let pauses = begin.elapsed().as_millis() / 50;
        assert!(asked <= pauses + 1, "{asked} questions in {pauses} pauses of 50 ms");
        assert!(door.connections() <= 2 + asked as usize);

        *door.refuses.lock() = None;
        assert!(client.connect(soon()).unwrap().connected, "it is let in again");
    }
}

#[test]
fn frees_and_questions_raced_with_close_end() {
    const ROUNDS: u64 = 400;
    let sink = sink(MIB);
    let (mut stuck, mut left) = (0, 0);
    for round in 0..ROUNDS {
        let id = ClientId::random();
        let sample = publish_all(&sink, &[(&format!("s{round}"), 1)], &[10], Some(&id)).remove(0);
        let client = ControlClient::start(sink.control().clone(), ControlOptions::new(id)).unwrap();
        // Half of them have a connection, to which callers write themselves.
        if round % 2 == 0 {
            client.connect(soon()).unwrap();
        }
        std::thread::scope(|scope| {
            let frees = scope.spawn(|| {
                let mut tickets = Vec::new();
                while tickets.len() < 20_000
                    && let Ok(ticket) = client.free_later(vec![sample.clone()], sample.epoch())
                {
                    tickets.push(ticket);
                }
                tickets
            });
            let asks = scope.spawn(|| {
                loop {
                    if let Err(error) = client.health(Instant::now() + Duration::from_secs(2)) {
                        return error.kind();
                    }
                }
            });
            std::thread::sleep(Duration::from_micros(50 + (round % 7) * 60));
            client.close(Duration::ZERO);
            for ticket in frees.join().unwrap() {
                match ticket.wait(Instant::now() + Duration::from_millis(300)) {
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::Closed => {}
                    Err(_) => stuck += 1,
                }
            }
            stuck += u64::from(asks.join().unwrap() != ErrorKind::Closed);
        });
        left += client.stats().outstanding;
    }
    assert_eq!((stuck, left), (0, 0), "stuck, and outstanding, after {ROUNDS} rounds");
}

#[test]
fn frees_handed_over_before_close_are_sent() {
    let sink = sink(MIB);
    for round in 0..400 {
        let id = ClientId::random();
        let sample = publish_all(&sink, &[(&format!("s{round}"), 1)], &[10], Some(&id)).remove(0);
        let client = ControlClient::start(sink.control().clone(), ControlOptions::new(id)).unwrap();
        let epoch = sample.epoch();
        let ticket = client.free_later(vec![sample], epoch).unwrap();
        let begin = Instant::now();
        client.close(Duration::from_secs(10));
        assert!(begin.elapsed() < Duration::from_secs(5), "it ends with the last answer");
        let report = ticket.wait(soon()).unwrap_or_else(|e| panic!("round {round}: {e}"));
        assert_eq!(report.released, 1);
    }
}
