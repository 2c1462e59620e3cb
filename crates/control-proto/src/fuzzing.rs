//! What the fuzz targets and the corpus test run: each function takes any bytes, and panics if a
//! parser does, or if what it accepts does not survive being written and read again.

use transport_core::{Error, SampleKey};

use crate::{
    capture::{self, CaptureOutcome, CaptureRequest},
    control::{self, Budget, Limits, Request, Response},
    mooncake::{
        data::{HEADER_BYTES, Header, MAX_TRANSFER_BYTES, STATUS_BYTES, Status},
        handshake::{
            Connection, Frame, Kind, MAX_FRAME_BYTES, Notify, ProbeReply, SegmentDescriptor,
        },
    },
    sample_ref::SampleRef,
    token,
};

/// An entry function.
pub type Target = fn(&[u8]);

/// Every entry function by the name of its fuzz target.
pub const TARGETS: [(&str, Target); 6] = [
    ("control_lines", control_lines),
    ("capture", capture),
    ("sample_ref", sample_ref),
    ("token", token),
    ("handshake", handshake),
    ("data_frames", data_frames),
];

/// Feeds a stream in pieces whose size the first byte gives, and reads every line both ways.
pub fn control_lines(data: &[u8]) {
    let Some((&piece, stream)) = data.split_first() else { return };
    let limits = Limits {
        line_bytes: 4096,
        connection_bytes: 8192,
        total_bytes: 64 << 10,
        connections: 4,
        keys_per_line: 64,
        ..Limits::default()
    };
    let budget = Budget::new(limits);
    let mut decoder = budget.connect().expect("the first connection");
    'stream: for chunk in stream.chunks(usize::from(piece).max(1)) {
        let mut input = chunk;
        loop {
            match decoder.next_line(&mut input) {
                Ok(Some(line)) => control_line(line, &limits),
                Ok(None) => break,
                Err(_) => break 'stream,
            }
        }
        assert!(decoder.buffered() <= limits.line_bytes, "a line is bounded");
    }
    let whole = stream.len() as u64 == decoder.counts().bytes;
    let lost = decoder.finish();
    assert!(!whole || stream.last() != Some(&b'\n') || lost.is_none(), "nothing whole is lost");
    drop(decoder);
    assert_eq!(budget.connections(), 0);
    assert_eq!(budget.free_bytes(), limits.total_bytes / 2, "every byte is given back");
}

fn control_line(line: &[u8], limits: &Limits) {
    let mut out = Vec::new();
    match Request::parse(line, limits) {
        Ok(Request::Keys(keys)) => {
            let oracle: Vec<String> = serde_json::from_slice(line).expect("a list of strings");
            assert!(keys.iter().eq(&oracle), "serde_json reads the same keys");
            control::write_keys(&mut out, &keys);
        }
        Ok(Request::Hello(hello)) => {
            control::write_hello(&mut out, &hello);
            assert_eq!(Request::parse(trimmed(&out), limits), Ok(Request::Hello(hello)));
        }
        Ok(Request::Hold { id, epoch, objects }) => {
            // Escapes may be written longer than they came.
            let roomy = Limits { line_bytes: usize::MAX, ..*limits };
            control::write_hold(&mut out, id, epoch, objects.iter(), &roomy).expect("room");
            assert_eq!(
                Request::parse(trimmed(&out), &roomy),
                Ok(Request::Hold { id, epoch, objects: objects.clone() })
            );
        }
        Ok(_) => {}
        Err(bad) => {
            let error = Error::from(bad).to_string();
            assert!(error.len() < 400, "errors do not repeat the line");
        }
    }
    if let Ok(response) = Response::parse(line, limits) {
        response.write(&mut out);
        let last = trimmed(&out).rsplit(|&b| b == b'\n').next().expect("a line");
        assert_eq!(Response::parse(last, limits), Ok(response));
    }
}

fn trimmed(out: &[u8]) -> &[u8] {
    out.strip_suffix(b"\n").expect("lines end in a newline")
}

/// Reads a capture result, response and request.
pub fn capture(data: &[u8]) {
    let limits = capture::Limits::default();
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(outcome) = capture::parse_result(text, &limits)
    {
        let mut out = Vec::new();
        capture::write_result(&mut out, &outcome).expect("what was read can be written");
        let again = std::str::from_utf8(&out).expect("JSON is UTF-8");
        let again = capture::parse_result(again, &limits).expect("what was written can be read");
        assert_eq!(again, outcome);
        if let CaptureOutcome::Captured(descriptor) = &outcome {
            let _ = descriptor.nbytes();
            let sample: SampleKey = descriptor.sample.clone();
            let response = [b"{\"meta_info\":{\"spec_capture\":", &*out, b"}}"].concat();
            capture::parse_response(&response, &[sample], &limits).expect("one row");
        }
    }
    if let Ok(request) = CaptureRequest::parse(data, &limits) {
        let mut out = Vec::new();
        request.write(&mut out).expect("what was read can be written");
        let again = CaptureRequest::parse(&out, &limits).expect("what was written can be read");
        assert_eq!(again, request);
    }
    let _ = capture::parse_response(data, &[], &limits);
}

/// Reads a ref, and locates its sample.
pub fn sample_ref(data: &[u8]) {
    let Ok(parsed) = SampleRef::parse(data) else { return };
    let mut out = Vec::new();
    parsed.write(&mut out);
    assert!(!trimmed(&out).contains(&b'\n'), "one line");
    if out.len() <= crate::sample_ref::MAX_LINE_BYTES {
        let again = SampleRef::parse(&out).expect("what was written can be read");
        assert_eq!(again, parsed);
    }
    if let Ok(descriptor) = parsed.descriptor() {
        let again = SampleRef::new(&descriptor, "run", None, "strategy").expect("a known location");
        assert_eq!(again.descriptor().expect("located before"), descriptor);
    }
}

/// Reads a line of either side.
pub fn token(data: &[u8]) {
    if let Ok(request) = token::Request::parse(data) {
        let mut out = Vec::new();
        if request.write(&mut out).is_ok() {
            assert_eq!(token::Request::parse(trimmed(&out)).expect("just written"), request);
        }
    }
    if let Ok(reply) = token::Reply::parse(data) {
        let mut out = Vec::new();
        reply.write(&mut out);
        if out.len() <= token::MAX_LINE_BYTES {
            assert_eq!(token::Reply::parse(trimmed(&out)).expect("just written"), reply);
        }
        let _ = reply.into_result();
    }
}

/// Takes frames off a stream and reads what is in them.
pub fn handshake(data: &[u8]) {
    let mut input = data;
    while let Ok(Some((frame, used))) = Frame::decode(input, MAX_FRAME_BYTES) {
        let mut out = Vec::new();
        frame.encode(&mut out);
        assert_eq!(out, input[..used], "frames are written as they were read");
        input = &input[used..];
        match frame.kind {
            Some(Kind::Metadata) => {
                if let Ok(peer) = SegmentDescriptor::parse(frame.json) {
                    let again = SegmentDescriptor::parse(&peer.to_json()).expect("just written");
                    assert_eq!(again, peer);
                    let _ = peer.data_session(&"host:1".parse().expect("a session"));
                }
            }
            Some(Kind::Notify) => {
                if let Ok(notify) = Notify::parse(frame.json) {
                    assert_eq!(Notify::parse(&notify.to_json()).expect("just written"), notify);
                }
            }
            Some(Kind::Probe) => {
                let _ = ProbeReply::parse(frame.json);
            }
            Some(Kind::Connection) | None => {
                let _ = Connection::parse(frame.json);
            }
        }
    }
}

/// Reads a header or a status frame off each place of the input.
pub fn data_frames(data: &[u8]) {
    for bytes in data.windows(HEADER_BYTES).step_by(8) {
        let bytes: &[u8; HEADER_BYTES] = bytes.try_into().expect("a window of that size");
        if let Ok(header) = Header::decode(bytes, MAX_TRANSFER_BYTES) {
            assert!(header.address.checked_add(header.size).is_some());
            assert_eq!(header.encode()[..17], bytes[..17], "all but the padding comes back");
        }
    }
    for bytes in data.chunks_exact(STATUS_BYTES) {
        let bytes: [u8; STATUS_BYTES] = bytes.try_into().expect("a chunk of that size");
        if let Ok(status) = Status::decode(bytes) {
            assert_eq!(status.encode(), bytes);
        }
    }
}
