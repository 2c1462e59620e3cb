//! The files under `golden/` hold every format as documented, byte for byte: one test reads each
//! and checks what it means, one writes the same meaning and checks the bytes.

use std::{path::PathBuf, time::Duration};

use control_proto::{
    SampleRef, Secret,
    capture::{
        self, CaptureOutcome, CaptureRequest, Checksum, ChecksumKind, FailureCause, Form,
        Passthrough, Prompt, Row, SampleRequest,
    },
    control::{self, ArenaInfo, Code, Hello, Request, Response, ServerHello, ShmInfo},
    mooncake::{
        data::{HEADER_BYTES, Header, MAX_TRANSFER_BYTES, Opcode, STATUS_BYTES, Status, Version},
        handshake::{
            Buffer, Connection, Frame, Kind, MAX_FRAME_BYTES, Notify, ProbeReply, SegmentDescriptor,
        },
    },
    token::{self, Item, Reply, Verb},
};
use indexmap::IndexMap;
use transport_core::{
    ArenaLocation, ClientId, Descriptor, Dtype, Epoch, FeatureDescriptor, FeatureName, Generation,
    Health, Location, MapMark, RemoteAddr, SampleId, SampleKey, Sequence, StoreId, TensorMeta,
    TokenLocation,
};

const EPOCH: Epoch = Epoch(4_503_599_627_370_497);
const QUEUED: Option<FailureCause> = Some(FailureCause::Queued);
const BASE: u64 = 139_637_976_727_552;
const TOKEN: &str = "00112233445566778899aabbccddeeff0011223344556677";

fn golden(path: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn text(path: &str) -> String {
    String::from_utf8(golden(path)).unwrap()
}

/// Bytes of a file of hexadecimal digits with comment lines.
fn hex(path: &str) -> Vec<u8> {
    let text = text(path);
    let digits: String = text.lines().filter(|line| !line.starts_with('#')).collect();
    let pairs = digits.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
    pairs.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

fn lines(path: &str) -> Vec<String> {
    text(path).lines().map(str::to_owned).collect()
}

fn name(name: &str) -> FeatureName {
    FeatureName::new(name).unwrap()
}

fn sample(id: &str) -> SampleKey {
    SampleKey::new(StoreId::new("run0").unwrap(), SampleId::new(id).unwrap(), Generation(1))
}

/// Name, shape, element type and offset of the tensors of a DSpark sample of three tokens.
fn tensors() -> [(&'static str, [u64; 3], Dtype, u64); 4] {
    [
        ("hidden_states", [1, 3, 25_600], Dtype::Bfloat16, 0),
        ("target_last_hidden_states", [1, 3, 5120], Dtype::Bfloat16, 153_600),
        ("input_ids", [1, 3, 0], Dtype::Int64, 184_320),
        ("loss_mask", [1, 3, 0], Dtype::Int64, 184_832),
    ]
}

fn descriptor(location: Location, with_seq: bool) -> Descriptor {
    let mut features = IndexMap::new();
    for (i, (n, shape, dtype, offset)) in tensors().into_iter().enumerate() {
        let rank = if shape[2] == 0 { 2 } else { 3 };
        let meta = TensorMeta::new(dtype, &shape[..rank]).unwrap();
        let address = (!matches!(location, Location::Store)).then_some(RemoteAddr(BASE + offset));
        let seq = with_seq.then_some(Sequence(7 + i as u64));
        features.insert(name(n), FeatureDescriptor::new(meta, address, seq));
    }
    let layers = Some(vec![5, 19, 33, 47, 61]);
    Descriptor::new(sample("run0:task-1"), features, layers, location).unwrap()
}

fn arena(epoch: Option<Epoch>, holder: Option<&str>) -> Location {
    let (session, control) = ("10.0.0.2:15459".parse().unwrap(), "10.0.0.2:41235".parse().unwrap());
    let mut arena = ArenaLocation::new(session, control, epoch);
    arena.holder = holder.map(|holder| ClientId::new(holder).unwrap());
    Location::Arena(arena)
}

fn token_location() -> Location {
    Location::Token(TokenLocation::new(
        "nvlink_intra",
        "10.0.0.2:15459".parse().unwrap(),
        "10.0.0.2:41235".parse().unwrap(),
        TOKEN,
    ))
}

/// File, what it holds, and whether it is written like that, too.
fn results() -> Vec<(&'static str, CaptureOutcome, bool)> {
    let no_layers = {
        let mut only = descriptor(Location::Store, false);
        only.features.truncate(1);
        only.aux_layer_ids = None;
        only
    };
    let captured = CaptureOutcome::Captured;
    vec![
        ("capture/result_store.json", captured(descriptor(Location::Store, false)), true),
        ("capture/result_store_no_layers.json", captured(no_layers), true),
        ("capture/result_arena.json", captured(descriptor(arena(None, None), false)), true),
        ("capture/result_nvlink.json", captured(descriptor(arena(None, None), false)), false),
        (
            "capture/result_arena_epoch.json",
            captured(descriptor(arena(Some(EPOCH), Some("trainer-0")), true)),
            true,
        ),
        ("capture/result_token.json", captured(descriptor(token_location(), false)), true),
        ("capture/result_failed.json", failed("run0:task-1", None), true),
        ("capture/result_failed_queued.json", failed("run0:task-1", QUEUED), true),
    ]
}

fn failed(id: &str, cause: Option<FailureCause>) -> CaptureOutcome {
    CaptureOutcome::Failed {
        sample_id: SampleId::new(id).unwrap(),
        error: "no room for 184832 bytes".into(),
        retryable: true,
        cause,
    }
}

fn responses_to_captures() -> Vec<(&'static str, Form, bool, Vec<Row>)> {
    let row = |outcome| Row { outcome, checksums: None };
    let captured = |location, seq| CaptureOutcome::Captured(descriptor(location, seq));
    let checksums = tensors()
        .into_iter()
        .zip(10..)
        .map(|(t, sum)| (name(t.0), Checksum::new(ChecksumKind::Xxh3, sum)))
        .collect();
    vec![
        (
            "capture/response_patch.json",
            Form::Patch,
            true,
            vec![row(captured(Location::Store, false)), row(failed("run0:task-2", None))],
        ),
        (
            "capture/response_plugin.json",
            Form::Plugin,
            false,
            vec![Row {
                outcome: captured(arena(Some(EPOCH), Some("trainer-0")), true),
                checksums: Some(checksums),
            }],
        ),
    ]
}

fn capture_requests() -> Vec<(&'static str, CaptureRequest)> {
    let carried = |n: &str, data: Vec<i64>| {
        Passthrough::new(name(n), TensorMeta::new(Dtype::Int64, [1, 3]).unwrap(), data).unwrap()
    };
    let mut wanted = SampleRequest::new(sample("run0:task-1"));
    wanted.aux = Some(name("hidden_states"));
    wanted.last_hidden = Some(name("target_last_hidden_states"));
    wanted.passthrough =
        vec![carried("input_ids", vec![5, 6, 7]), carried("loss_mask", vec![0, 1, 1])];
    let prompt = Prompt {
        input_ids: vec![5, 6, 7],
        extra_key: Some("0123456789abcdef0123456789abcdef".into()),
        sample: wanted,
    };
    let patch = CaptureRequest::new(Form::Patch, vec![prompt.clone()]);
    let mut again = prompt;
    again.sample.transport = Some("nvlink_intra".into());
    again.sample.replace = true;
    let mut plugin = CaptureRequest::new(Form::Plugin, vec![again]);
    plugin.batched = false;
    vec![("capture/request_patch.json", patch), ("capture/request_plugin.json", plugin)]
}

fn control_responses() -> Vec<Response> {
    let hello = |session: &str, shm| {
        let arena = ArenaInfo { base: RemoteAddr(BASE), bytes: 32 << 30, shm };
        let session = session.parse().unwrap();
        Response::Hello(ServerHello::new(EPOCH, session, Duration::from_secs(30), arena))
    };
    let shm = ShmInfo {
        boot_id: "6c0f4e5a-61a1-4a3e-9d5b-0d9c8f3e2b71".into(),
        pid: 4242,
        fd: 9,
        dev: 1,
        ino: 2051,
    };
    let mut health = Health::default();
    health.resident_samples = 2;
    health.resident_bytes = 368_736;
    health.arena_bytes = 32 << 30;
    health.arena_free_bytes = 34_359_369_216;
    health.arena_largest_free = 34_359_369_216;
    health.published_samples = 3;
    health.released_samples = 1;
    health.host_payload_bytes = 96;
    health.connected_peers = 1;
    let error = |id, code, message: &str| Response::Error { id, code, message: message.into() };
    vec![
        hello("10.0.0.2:15459", None),
        hello("[::1]:15459", Some(shm)),
        Response::Held { id: 1, gone: vec![1], stale: vec![] },
        Response::Freed { id: 2, gone: vec![], stale: vec![0, 1] },
        Response::Health { id: 3, health },
        Response::Pong { id: 4 },
        error(Some(5), Code::StaleEpoch, "the line is for another life of the server"),
        error(None, Code::BadLine, "the line is not JSON at byte 7"),
    ]
}

fn secret() -> Secret {
    Secret::new(TOKEN).unwrap()
}

fn token_requests() -> Vec<token::Request> {
    let item = |id: &str| Item { sample_id: SampleId::new(id).unwrap(), generation: Generation(1) };
    let reason = || Some("optimizer-boundary-durable-ack".to_owned());
    let one = |verb, reason| token::Request::One {
        verb,
        token: secret(),
        item: item("run0:task-1"),
        reason,
    };
    let batch =
        |verb, items, reason| token::Request::Batch { verb, token: secret(), items, reason };
    vec![
        one(Verb::Release, reason()),
        one(Verb::Abort, None),
        batch(Verb::Release, vec![item("run0:task-1")], reason()),
        batch(Verb::Abort, vec![item("run0:task-1"), item("run0:task-2")], None),
        token::Request::Health,
    ]
}

fn token_replies() -> Vec<Reply> {
    let health = token::Health {
        backend: "mooncake_gpu_direct".into(),
        session_id: "10.0.0.2:15459".into(),
        control_endpoint: "10.0.0.2:41235".into(),
        resident_samples: 1,
        resident_bytes: 184_368,
        resident_allocated_bytes: 184_832,
        arena_address: BASE,
        arena_bytes: 32 << 30,
        arena_free_bytes: 34_359_553_536,
        arena_largest_free_span: 34_359_553_536,
        published_samples: 1,
        control_requests: 2,
        control_batch_requests: 1,
        control_batch_items: 1,
        ..token::Health::default()
    };
    vec![
        Reply::Freed { freed_bytes: 184_368, released_samples: 1 },
        Reply::Refused { error: token::UNSUPPORTED_OPERATION.into() },
        Reply::Refused { error: token::INVALID_TOKEN.into() },
        Reply::Health(Box::new(health)),
    ]
}

fn tcp_peer() -> SegmentDescriptor {
    SegmentDescriptor {
        buffers: vec![Buffer::new(RemoteAddr(BASE), 64 << 20, "127.0.0.1:15459")],
        name: "127.0.0.1:15459".into(),
        protocol: "tcp".into(),
        tcp_data_host: "127.0.0.1".into(),
        tcp_data_port: 16_022,
        tcp_proto_version: 2,
        timestamp: "2026-08-22 10:00:00".into(),
        ..SegmentDescriptor::default()
    }
}

fn nvlink_peer() -> SegmentDescriptor {
    let mut buffer = Buffer::new(RemoteAddr(BASE), 2 << 20, "*");
    buffer.shm_name = (0..64).map(|byte| format!("{byte:02x}")).collect();
    SegmentDescriptor {
        buffers: vec![buffer],
        metadata_version: Some(0),
        name: "127.0.0.1:15460".into(),
        protocol: "nvlink_intra".into(),
        ..SegmentDescriptor::default()
    }
}

fn connection() -> Connection {
    Connection {
        local_nic_path: "10.0.0.1:15459@mlx5_0".into(),
        peer_nic_path: "10.0.0.2:15459@mlx5_1".into(),
        qp_num: vec![17, 18],
        ..Connection::default()
    }
}

fn notify() -> Notify {
    Notify { name: "trainer-0".into(), notify_msg: "done".into() }
}

/// File, type byte and JSON of the handshake frames that are written, too.
fn frames() -> Vec<(&'static str, Option<Kind>, String)> {
    vec![
        ("mooncake/metadata_tcp.hex", Some(Kind::Metadata), tcp_peer().to_json()),
        ("mooncake/metadata_nvlink_intra.hex", Some(Kind::Metadata), nvlink_peer().to_json()),
        ("mooncake/notify.hex", Some(Kind::Notify), notify().to_json()),
        ("mooncake/probe_reply.hex", Some(Kind::Probe), ProbeReply::success().to_json()),
    ]
}

fn headers() -> Vec<(&'static str, Header)> {
    let header = |opcode, version| Header {
        size: 4096,
        address: RemoteAddr(0x7f00_0000_1000),
        opcode,
        version,
    };
    vec![
        ("mooncake/read_v1.hex", header(Opcode::Read, Version::V1)),
        ("mooncake/write_v1.hex", header(Opcode::Write, Version::V1)),
        ("mooncake/read_v2.hex", header(Opcode::Read, Version::V2)),
        ("mooncake/write_v2.hex", header(Opcode::Write, Version::V2)),
    ]
}

#[test]
fn captures_are_read() {
    let limits = capture::Limits::default();
    for (file, expected, _) in results() {
        assert_eq!(capture::parse_result(&text(file), &limits).unwrap(), expected, "{file}");
    }
    for (file, request) in capture_requests() {
        assert_eq!(CaptureRequest::parse(&golden(file), &limits).unwrap(), request, "{file}");
    }
    for (file, _, _, rows) in responses_to_captures() {
        let keys: Vec<_> =
            rows.iter().map(|row| sample(row.outcome.sample_id().as_str())).collect();
        let found = capture::parse_response(&golden(file), &keys, &limits).unwrap();
        assert_eq!(found, rows, "{file}");
    }
    let requests = capture_requests();
    let wanted = &requests[0].1.prompts[0].sample;
    wanted.check_result(&descriptor(arena(None, None), false), 3).unwrap();
    assert!(wanted.check_result(&descriptor(arena(None, None), false), 4).is_err());
    let mut bytes = [0; 24];
    wanted.passthrough[0].write_le(&mut bytes);
    assert_eq!(bytes, *b"\x05\0\0\0\0\0\0\0\x06\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0");
}

#[test]
fn captures_are_written() {
    for (file, outcome, _) in results().into_iter().filter(|(_, _, written)| *written) {
        let mut out = Vec::new();
        capture::write_result(&mut out, &outcome).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), text(file), "{file}");
    }
    for (file, request) in capture_requests() {
        let mut out = Vec::new();
        request.write(&mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), text(file), "{file}");
    }
    for (file, form, batched, rows) in responses_to_captures() {
        let mut out = Vec::new();
        capture::write_response(&mut out, form, batched, &rows).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), text(file), "{file}");
    }
}

#[test]
fn sample_refs_are_read() {
    for (file, location, seq) in [
        ("sample_ref/store.jsonl", Location::Store, false),
        ("sample_ref/arena.jsonl", arena(None, None), false),
        ("sample_ref/nvlink.jsonl", arena(None, None), false),
        ("sample_ref/arena_epoch.jsonl", arena(Some(EPOCH), Some("trainer-0")), true),
        ("sample_ref/token.jsonl", token_location(), false),
    ] {
        let parsed = SampleRef::parse(&golden(file)).unwrap();
        let mut expected = descriptor(location, seq);
        expected.aux_layer_ids = None; // only refs written here carry the layers
        assert_eq!(parsed.descriptor().unwrap(), expected, "{file}");
        assert_eq!((parsed.num_tokens, parsed.estimated_bytes), (3, expected.nbytes()));
        let target = &parsed.feature_specs["target_last_hidden_states"];
        assert_eq!(target.target_repr.as_deref(), Some("hidden_state"));
    }
}

#[test]
fn sample_refs_are_written() {
    for file in ["store", "arena", "nvlink", "arena_epoch", "token"] {
        let golden = golden(&format!("sample_ref/{file}.jsonl"));
        let parsed = SampleRef::parse(&golden).unwrap();
        let mut out = Vec::new();
        parsed.write(&mut out);
        assert_eq!(out, golden, "{file} comes out as it came in");

        // The location is written as documented by whoever starts from a descriptor.
        let again =
            SampleRef::new(&parsed.descriptor().unwrap(), "run0", Some("task-1".into()), "dspark")
                .unwrap();
        let key = match file {
            "arena" | "nvlink" | "arena_epoch" => "mooncake_arena",
            _ => "mooncake_gpu_direct",
        };
        let documented = match file {
            "nvlink" => parsed.metadata.get("mooncake_nvlink"),
            _ => parsed.metadata.get(key),
        };
        assert_eq!(again.metadata.get(key), documented, "{file}");
        assert_eq!(again.feature_store_uri, parsed.feature_store_uri, "{file}");
        assert_eq!(again.feature_keys, parsed.feature_keys, "{file}");
    }
}

#[test]
fn control_lines_are_read() {
    let limits = control::Limits::default();
    let requests = lines("control/requests.jsonl");
    let parsed: Vec<_> =
        requests.iter().map(|line| Request::parse(line.as_bytes(), &limits).unwrap()).collect();
    let Request::Keys(keys) = &parsed[0] else { panic!("not a list of keys") };
    let key = |n: &str| format!("run0/run0:task-1/g1/{n}");
    assert!(keys.iter().eq([key("hidden_states"), key("loss_mask")]));
    let hello = |token: Option<&str>| {
        let token = token.map(|token| Secret::new(token).unwrap());
        Hello::new(ClientId::new("trainer-0").unwrap(), Duration::from_secs(30), token)
    };
    assert_eq!(parsed[1], Request::Hello(hello(None)));
    assert_eq!(parsed[2], Request::Hello(hello(Some("hush"))));
    let Request::Hold { id: 1, epoch: EPOCH, objects } = &parsed[3] else { panic!("not a hold") };
    let (hidden, mask) = (key("hidden_states"), key("loss_mask"));
    let found: Vec<_> = objects.iter().collect();
    assert_eq!(found, [(&*hidden, Some(Sequence(7))), (&*mask, None)]);
    let Request::Free { id: 2, epoch: EPOCH, objects } = &parsed[4] else { panic!("not a free") };
    let found: Vec<_> = objects.iter().collect();
    assert_eq!(found, [(&*hidden, Some(Sequence(7))), (&*mask, Some(Sequence(8)))]);
    let mapped = hello(None).mapping(MapMark(4_503_599_627_370_499));
    assert_eq!(
        parsed[5..],
        [Request::Health { id: 3 }, Request::Ping { id: 4 }, Request::Bye, Request::Hello(mapped)]
    );

    let responses = lines("control/responses.jsonl");
    let parsed: Vec<_> =
        responses.iter().map(|line| Response::parse(line.as_bytes(), &limits).unwrap()).collect();
    assert_eq!(parsed, control_responses());
}

#[test]
fn control_lines_are_written() {
    let limits = control::Limits::default();
    let golden_lines = golden("control/requests.jsonl");
    let mut out = Vec::new();
    for line in lines("control/requests.jsonl") {
        match Request::parse(line.as_bytes(), &limits).unwrap() {
            Request::Keys(keys) => assert_eq!(control::write_keys(&mut out, &keys), 1),
            Request::Hello(hello) => control::write_hello(&mut out, &hello),
            Request::Hold { id, epoch, objects } => {
                control::write_hold(&mut out, id, epoch, objects.iter(), &limits).unwrap();
            }
            Request::Free { id, epoch, objects } => {
                control::write_free(&mut out, id, epoch, objects.iter(), &limits).unwrap();
            }
            Request::Health { id } => control::write_health(&mut out, id),
            Request::Ping { id } => control::write_ping(&mut out, id),
            Request::Bye => control::write_bye(&mut out),
            other => panic!("not in the file: {other:?}"),
        }
    }
    assert_eq!(out, golden_lines);

    let mut out = Vec::new();
    control_responses().iter().for_each(|response| response.write(&mut out));
    assert_eq!(String::from_utf8(out).unwrap(), text("control/responses.jsonl"));
}

#[test]
fn token_lines_are_read() {
    let parse = |line: &String| token::Request::parse(line.as_bytes()).unwrap();
    let parsed: Vec<_> = lines("token/requests.jsonl").iter().map(parse).collect();
    assert_eq!(parsed, token_requests());
    let parse = |line: &String| Reply::parse(line.as_bytes()).unwrap();
    let parsed: Vec<_> = lines("token/replies.jsonl").iter().map(parse).collect();
    assert_eq!(parsed, token_replies());
}

#[test]
fn token_lines_are_written() {
    let mut out = Vec::new();
    token_requests().iter().for_each(|request| request.write(&mut out).unwrap());
    assert_eq!(String::from_utf8(out).unwrap(), text("token/requests.jsonl"));
    let mut out = Vec::new();
    token_replies().iter().for_each(|reply| reply.write(&mut out));
    assert_eq!(String::from_utf8(out).unwrap(), text("token/replies.jsonl"));
}

#[test]
fn mooncake_frames_are_read() {
    let body = |file: &str| {
        let bytes = hex(file);
        let (frame, used) = Frame::decode(&bytes, MAX_FRAME_BYTES).unwrap().unwrap();
        assert_eq!(used, bytes.len(), "{file}");
        (frame.kind, frame.json.to_owned())
    };
    let metadata = |file| {
        let (kind, json) = body(file);
        assert_eq!(kind, Some(Kind::Metadata));
        SegmentDescriptor::parse(&json).unwrap()
    };
    assert_eq!(metadata("mooncake/metadata_tcp.hex"), tcp_peer());
    assert_eq!(metadata("mooncake/metadata_nvlink_intra.hex"), nvlink_peer());
    let old = metadata("mooncake/metadata_old_peer.hex");
    assert_eq!(Version::of_peer(old.tcp_proto_version), Version::V1);
    let session = "127.0.0.1:15461".parse().unwrap();
    assert_eq!(old.data_session(&session).unwrap().port(), 16_023);
    assert!(old.covers(RemoteAddr(4096), 8192));
    let (kind, json) = body("mooncake/notify.hex");
    assert_eq!((kind, Notify::parse(&json).unwrap()), (Some(Kind::Notify), notify()));
    let (kind, json) = body("mooncake/probe_reply.hex");
    assert_eq!(
        (kind, ProbeReply::parse(&json).unwrap()),
        (Some(Kind::Probe), ProbeReply::success())
    );
    let (kind, json) = body("mooncake/connection_untyped.hex");
    assert_eq!((kind, Connection::parse(&json).unwrap()), (None, connection()));

    for (file, header) in headers() {
        let bytes: [u8; HEADER_BYTES] = hex(file).try_into().unwrap();
        assert_eq!(Header::decode(&bytes, MAX_TRANSFER_BYTES).unwrap(), header, "{file}");
    }
    for (file, status) in [("ok", Status::Ok), ("rejected", Status::AddressRejected)] {
        let bytes: [u8; STATUS_BYTES] =
            hex(&format!("mooncake/status_{file}.hex")).try_into().unwrap();
        assert_eq!(Status::decode(bytes).unwrap(), status);
    }
}

#[test]
fn mooncake_frames_are_written() {
    for (file, kind, json) in frames() {
        let mut out = Vec::new();
        Frame { kind, json: &json }.encode(&mut out);
        assert_eq!(out, hex(file), "{file}");
    }
    let bytes = hex("mooncake/connection_untyped.hex");
    let (frame, _) = Frame::decode(&bytes, MAX_FRAME_BYTES).unwrap().unwrap();
    let mut out = Vec::new();
    frame.encode(&mut out);
    assert_eq!(out, bytes, "an old peer is answered in its own framing");
    for (file, header) in headers() {
        assert_eq!(header.encode()[..], hex(file), "{file}");
    }
    assert_eq!(Status::Ok.encode()[..], hex("mooncake/status_ok.hex"));
    assert_eq!(Status::AddressRejected.encode()[..], hex("mooncake/status_rejected.hex"));
}

/// What is wrong with one tensor of many samples must be found by its reader.
#[test]
fn a_bad_tensor_is_named_with_its_sample_wherever_it_stands() {
    use control_proto::capture::{SampleRequest, parse_result};
    let limits = control_proto::capture::Limits::default();
    let bad = [
        (r#""shape":[2],"dtype":"float7""#, "float7"),
        (r#""shape":[-2],"dtype":"int64""#, "-2"),
        (r#""shape":[9223372036854775807,2],"dtype":"int64""#, "9223372036854775807"),
        (r#""shape":"two","dtype":"int64""#, "two"),
        (r#""shape":[2]"#, "dtype"),
        (r#""dtype":"int64""#, "shape"),
    ];
    let sample = r#""store_id":"run0","sample_id":"task-7","gen":1"#;
    for (meta, found) in bad {
        let carried = format!(r#"{{"name":"mask","data":[1,2],{meta}}}"#);
        let request = format!(r#"{{{sample},"passthrough":[{carried}]}}"#);
        let result = format!(r#"{{{sample},"features":{{"mask":{{{meta}}}}}}}"#);
        let line = format!(
            r#"{{"sample_id":"task-7","run_id":"r","source_task_id":null,"feature_store_uri":"mooncake://run0/task-7","feature_keys":{{}},"feature_specs":{{"mask":{{"name":"mask",{meta}}}}},"strategy":"s","metadata":{{}}}}"#
        );
        for (what, error) in [
            ("request", SampleRequest::parse(&request, &limits).unwrap_err()),
            ("result", parse_result(&result, &limits).unwrap_err()),
            ("reference", SampleRef::parse(line.as_bytes()).unwrap_err()),
        ] {
            assert_eq!(error.context("feature"), Some("\"mask\""), "{what}: {error}");
            let sample = error.context("sample").unwrap_or_default();
            assert!(sample.contains("task-7"), "{what}: {error}");
            assert!(error.to_string().contains(found), "{what}: {error}");
        }
    }
}
