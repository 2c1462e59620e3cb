//! A control line that is lost between client and server, while their connection lives on.

mod support;

use std::{
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    time::{Duration, Instant},
};

use support::*;
use transport_core::{ClientId, SessionName};
use transport_mooncake_direct::{ControlClient, ControlOptions};

#[test]
fn f13_a_free_that_is_lost_on_the_way_is_sent_again() {
    let sink = sink(MIB);
    let client = ClientId::random();
    let sample = publish_all(&sink, &[("a", 1)], &[100, 100], Some(&client)).remove(0);
    let mut options = ControlOptions::new(client);
    options.lease = Duration::from_secs(2);
    let client =
        ControlClient::start(loses_one(sink.control(), "\"op\":\"free\""), options).unwrap();
    let epoch = sample.epoch();
    let ticket = client.free_later(vec![sample], epoch).unwrap();
    let report = ticket.wait(Instant::now() + Duration::from_secs(30)).unwrap();
    assert_eq!((report.released, report.unconfirmed), (1, 0), "{report:?}");
    assert_eq!(client.stats().connects, 2, "pings were answered all the time");
    let health = sink.health_blocking().unwrap();
    assert_eq!((health.resident_samples, health.duplicate_frees), (0, 0));
}

/// A proxy in front of `server` that drops the first line with this text and passes all others on.
fn loses_one(server: &SessionName, text: &'static str) -> SessionName {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, server) = (listener.local_addr().unwrap(), server.clone());
    std::thread::spawn(move || {
        let mut left = 1;
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            let mut there = raw(&server);
            let (mut answers, mut back) = (there.try_clone().unwrap(), stream.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut answers, &mut back); // until one of them leaves
                let _ = back.shutdown(std::net::Shutdown::Both);
            });
            pass_on(stream, &mut there, text, &mut left);
            let _ = there.shutdown(std::net::Shutdown::Both);
        }
    });
    address.into()
}

/// Passes lines on until the client leaves.
fn pass_on(from: TcpStream, to: &mut TcpStream, text: &str, left: &mut usize) {
    for line in BufReader::new(from).lines() {
        let Ok(line) = line else { return };
        if *left > 0 && line.contains(text) {
            *left -= 1;
        } else if writeln!(to, "{line}").is_err() {
            return;
        }
    }
}
