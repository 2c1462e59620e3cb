//! Raw control and data connections.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
};

use serde_json::{Value, json};

use crate::STEP;

/// A control connection that sends exactly what it is told to.
#[derive(Debug)]
pub struct Control {
    stream: TcpStream,
    lines: BufReader<TcpStream>,
}

impl Control {
    /// Connects to `address`.
    pub fn connect(address: &str) -> Self {
        let stream = TcpStream::connect(address).expect("the control listener listens");
        stream.set_read_timeout(Some(STEP)).expect("a valid timeout");
        stream.set_write_timeout(Some(STEP)).expect("a valid timeout");
        let lines = BufReader::new(stream.try_clone().expect("a second handle"));
        Self { stream, lines }
    }

    /// Sends bytes as they are; false if the peer is gone.
    pub fn send(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).is_ok()
    }

    /// Sends one JSON line.
    pub fn send_line(&mut self, line: &Value) {
        assert!(self.send(format!("{line}\n").as_bytes()), "the peer is gone: {line}");
    }

    /// Receives one line; `None` when the peer closed.
    pub fn receive(&mut self) -> Option<Value> {
        let mut line = String::new();
        match self.lines.read_line(&mut line) {
            Ok(0) => None,
            Ok(_) => Some(serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line:?}: {e}"))),
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => None,
            Err(e) => panic!("no line in time: {e}"),
        }
    }

    /// Sends one line and receives the answer.
    pub fn ask(&mut self, line: &Value) -> Value {
        self.send_line(line);
        self.receive().unwrap_or_else(|| panic!("closed instead of answering {line}"))
    }

    /// Says hello as `client` with a lease, and returns the server's hello.
    pub fn hello(&mut self, client: &str, lease_ms: u64) -> Value {
        let hello = json!({"op": "hello", "version": 1, "client": client, "lease_ms": lease_ms});
        let answer = self.ask(&hello);
        assert_eq!(answer["op"], "hello", "{answer}");
        answer
    }

    /// Ends the sending half only.
    pub fn half_close(&self) {
        self.stream.shutdown(std::net::Shutdown::Write).expect("connected");
    }
}

/// Session name, arena buffers and protocol version by Mooncake's peer handshake.
pub fn handshake(session: &str) -> Value {
    let own = json!({"name": "raw", "protocol": "tcp", "buffers": []}).to_string();
    let mut stream = TcpStream::connect(session).expect("the session listens");
    stream.set_read_timeout(Some(STEP)).expect("a valid timeout");
    let mut frame = (own.len() as u64 + 1).to_le_bytes().to_vec();
    frame.push(1);
    frame.extend(own.as_bytes());
    stream.write_all(&frame).expect("the peer reads");
    let mut length = [0; 8];
    stream.read_exact(&mut length).expect("a length");
    let mut body = vec![0; usize::try_from(u64::from_le_bytes(length)).expect("a sane length")];
    stream.read_exact(&mut body).expect("a body");
    assert_eq!(body[0], 1, "a metadata reply");
    serde_json::from_slice(&body[1..]).expect("JSON")
}

/// One data connection of version 2.
#[derive(Debug)]
pub struct Data(TcpStream);

impl Data {
    /// Connects to the data port that the handshake of `session` names.
    pub fn connect(session: &str) -> Self {
        let meta = handshake(session);
        let host = meta["tcp_data_host"].as_str().unwrap_or("127.0.0.1").to_owned();
        let port = meta["tcp_data_port"].as_u64().expect("a data port") as u16;
        let stream = TcpStream::connect((host.as_str(), port)).expect("the data port listens");
        stream.set_read_timeout(Some(STEP)).expect("a valid timeout");
        Self(stream)
    }

    /// Reads a range; `Err` carries the status code of a refusal, or -1 for a closed connection.
    pub fn read(&mut self, address: u64, length: u64) -> Result<Vec<u8>, i64> {
        let mut header = [0; 24];
        header[..8].copy_from_slice(&length.to_le_bytes());
        header[8..16].copy_from_slice(&address.to_le_bytes());
        header[16] = 0x80;
        self.0.write_all(&header).map_err(|_| -1)?;
        let mut status = [0; 8];
        self.0.read_exact(&mut status).map_err(|_| -1)?;
        let status = u64::from_le_bytes(status);
        assert_eq!(status >> 32, 0x4D43_5456, "a status frame");
        if status as u32 != 0 {
            return Err(i64::from(status as u32));
        }
        let mut body = vec![0; usize::try_from(length).expect("a sane length")];
        self.0.read_exact(&mut body).map_err(|_| -1)?;
        Ok(body)
    }
}
