//! The least HTTP/1.1 client that a test needs: one request a connection.

use std::{
    io::{Read, Write},
    net::TcpStream,
};

use serde_json::Value;

use crate::STEP;

/// Status and body of a `GET`.
pub fn get(address: &str, path: &str) -> (u16, String) {
    request(address, "GET", path, &[], "")
}

/// Status and JSON body of a `POST` of JSON.
pub fn post(address: &str, path: &str, headers: &[(&str, &str)], body: &Value) -> (u16, Value) {
    let (status, text) = request(address, "POST", path, headers, &body.to_string());
    let json = serde_json::from_str(&text).unwrap_or(Value::String(text));
    (status, json)
}

/// JSON of `GET /health`.
pub fn health(address: &str) -> Value {
    let (status, body) = get(address, "/health");
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).expect("health is JSON")
}

fn request(
    address: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> (u16, String) {
    let mut stream = TcpStream::connect(address).expect("the server listens");
    stream.set_read_timeout(Some(STEP * 2)).expect("a valid timeout");
    let mut head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n",
        body.len()
    );
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all((head + "\r\n" + body).as_bytes()).expect("the server reads");
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).expect("the server answers");
    let reply = String::from_utf8(reply).expect("text");
    let (head, body) = reply.split_once("\r\n\r\n").expect("a head and a body");
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).expect("a status");
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    (status, if chunked { unchunk(body) } else { body.to_owned() })
}

fn unchunk(mut body: &str) -> String {
    let mut text = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).expect("a chunk size");
        text.push_str(&rest[..size]);
        if size == 0 {
            break;
        }
        body = &rest[size + 2..];
    }
    text
}
