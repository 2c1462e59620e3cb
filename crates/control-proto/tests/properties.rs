//! What must hold for any input: nothing panics, pieces make no difference, and what is written
//! reads back.

use std::time::Duration;

use control_proto::{
    SampleRef, Secret,
    capture::{self, CaptureOutcome},
    control::{self, BadLine, Budget, Fatal, Hello, Limits, Request, Response},
    fuzzing::TARGETS,
    mooncake::{
        data::{Header, MAX_TRANSFER_BYTES, Opcode, Status, Version},
        handshake::{Buffer, Frame, Kind, MAX_FRAME_BYTES, SegmentDescriptor},
    },
    token,
};
use indexmap::IndexMap;
use proptest::{collection::vec, option, prelude::*, sample::Index};
use transport_core::{
    ArenaLocation, ClientId, Descriptor, Dtype, Epoch, FeatureDescriptor, FeatureName, Generation,
    Location, MapMark, RemoteAddr, SampleId, SampleKey, Sequence, SessionName, StoreId, TensorMeta,
    TokenLocation,
};

/// Feeds `stream` in pieces and returns the lines and the fatal error, if one came.
fn decode(stream: &[u8], cuts: &[Index], limits: Limits) -> (Vec<Vec<u8>>, Result<(), Fatal>) {
    let budget = Budget::new(limits);
    let mut decoder = budget.connect().unwrap();
    let mut ends: Vec<_> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
    ends.extend([0, stream.len()]);
    ends.sort_unstable();
    let mut lines = Vec::new();
    for piece in ends.windows(2) {
        let mut input = &stream[piece[0]..piece[1]];
        loop {
            match decoder.next_line(&mut input) {
                Ok(Some(line)) => lines.push(line.to_vec()),
                Ok(None) => break,
                Err(fatal) => return (lines, Err(fatal)),
            }
        }
        assert!(decoder.buffered() <= limits.line_bytes);
    }
    (lines, Ok(()))
}

/// Text in which everything that JSON must escape is frequent.
fn key() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => "[a-z0-9_:/]{0,40}",
        2 => "[ -~]{0,20}",
        1 => any::<String>().prop_map(|s| s.chars().take(20).collect()),
    ]
}

fn name() -> impl Strategy<Value = String> {
    "[a-z_][a-z0-9_ü\"\\\\]{0,12}"
}

fn session() -> impl Strategy<Value = SessionName> {
    (
        prop_oneof![Just("10.0.0.2"), Just("::1"), Just("fe80::1%eth0"), Just("node-7.example")],
        1..=u16::MAX,
    )
        .prop_map(|(host, port)| SessionName::new(host, port).unwrap())
}

fn location() -> impl Strategy<Value = Location> {
    prop_oneof![
        Just(Location::Store),
        (session(), session(), option::of(1..1u64 << 53), option::of("[a-z0-9]{1,8}")).prop_map(
            |(session, control, epoch, holder)| {
                let mut arena = ArenaLocation::new(session, control, epoch.map(Epoch));
                arena.holder = holder.map(|holder| ClientId::new(holder).unwrap());
                Location::Arena(arena)
            }
        ),
        (session(), session(), prop_oneof![Just("rdma"), Just("nvlink"), Just("nvlink_intra")])
            .prop_map(|(session, control, transport)| {
                Location::Token(TokenLocation::new(transport, session, control, "\"hush\""))
            }),
    ]
}

prop_compose! {
    fn descriptor()(
        store in "[a-z0-9:]{1,8}",
        id in "[a-z0-9:/ü]{1,12}",
        generation in any::<u64>(),
        location in location(),
        layers in option::of(vec(any::<i64>(), 0..5)),
        tensors in vec(
            (name(), 0..Dtype::ALL.len(), vec(0u64..100, 0..4), 1..1u64 << 60, option::of(any::<u64>())),
            1..6,
        ),
    ) -> Descriptor {
        let sample = SampleKey::new(
            StoreId::new(store).unwrap(),
            SampleId::new(id).unwrap(),
            Generation(generation),
        );
        let features: IndexMap<_, _> = tensors.into_iter().map(|(name, dtype, shape, address, seq)| {
            let meta = TensorMeta::new(Dtype::ALL[dtype], shape).unwrap();
            let address = (!matches!(location, Location::Store)).then_some(RemoteAddr(address));
            let seq = if matches!(location, Location::Arena(_)) { seq.map(Sequence) } else { None };
            (FeatureName::new(name).unwrap(), FeatureDescriptor::new(meta, address, seq))
        }).collect();
        Descriptor::new(sample, features, layers, location).unwrap()
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(data in vec(any::<u8>(), 0..600)) {
        for (_, target) in TARGETS {
            target(&data);
        }
    }

    #[test]
    fn nearly_good_bytes_never_panic(
        file in any::<Index>(),
        changes in vec((any::<Index>(), any::<u8>()), 0..6),
        cut in any::<Index>(),
    ) {
        for (name, target) in TARGETS {
            let folder = format!("{}/../../fuzz/corpus/{name}", env!("CARGO_MANIFEST_DIR"));
            let mut files: Vec<_> =
                std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
            files.sort();
            let mut data = std::fs::read(&files[file.index(files.len())]).unwrap();
            for (place, byte) in &changes {
                let place = place.index(data.len());
                data[place] = *byte;
            }
            target(&data);
            data.truncate(cut.index(data.len() + 1));
            target(&data);
        }
    }

    #[test]
    fn pieces_make_no_difference(
        lines in vec(vec(any::<u8>().prop_filter("no newline", |b| *b != b'\n'), 0..60), 0..20),
        tail in vec(Just(b'x'), 0..60),
        cuts in vec(any::<Index>(), 0..30),
        line_bytes in 30usize..70,
    ) {
        let mut stream = lines.join(&b'\n');
        if !lines.is_empty() {
            stream.push(b'\n');
        }
        stream.extend_from_slice(&tail);
        let limits = Limits { line_bytes, ..Limits::default() };
        let mut expected = Vec::new();
        let mut fatal = Ok(());
        for line in lines.iter().chain([&tail]) {
            if line.len() > line_bytes {
                fatal = Err(Fatal::LineTooLong { limit: line_bytes });
                break;
            }
            expected.push(line.clone());
        }
        if fatal.is_ok() {
            expected.pop(); // the tail has no end
        }
        expected.retain(|line| !line.trim_ascii().is_empty());
        prop_assert_eq!(decode(&stream, &cuts, limits), (expected, fatal));
    }

    #[test]
    fn keys_are_read_as_serde_json_reads_them(
        keys in vec(key(), 0..20),
        ascii in any::<bool>(),
        space in prop_oneof![Just(""), Just(" "), Just("\t")],
        change in option::of((any::<Index>(), any::<u8>())),
    ) {
        let items: Vec<_> = keys.iter().map(|key| {
            let json = serde_json::to_string(key).unwrap();
            if ascii { escaped(&json) } else { json }
        }).collect();
        let separator = format!("{space},{space}");
        let mut line =
            format!("{space}[{space}{}{space}]{space}", items.join(&separator)).into_bytes();
        if let Some((place, byte)) = change {
            let place = place.index(line.len());
            line[place] = byte;
        }
        let limits = Limits::default();
        let oracle = serde_json::from_slice::<Vec<String>>(&line);
        match (Request::parse(&line, &limits), oracle) {
            (Ok(Request::Keys(found)), Ok(oracle)) => {
                prop_assert_eq!(found.len(), oracle.len());
                prop_assert!(found.iter().eq(&oracle));
            }
            (Err(_), Err(_)) => {}
            (found, oracle) => prop_assert!(false, "{found:?} but {oracle:?}"),
        }
    }

    #[test]
    fn written_keys_come_back(keys in vec(key(), 0..400), pad in 0usize..200) {
        let keys: Vec<_> = keys.into_iter().map(|key| key + &"p".repeat(pad)).collect();
        let mut out = Vec::new();
        let lines = control::write_keys(&mut out, &keys);
        let (found, end) = decode(&out, &[], Limits::default());
        prop_assert_eq!((found.len(), end), (lines, Ok(())));
        let mut read = Vec::new();
        for line in &found {
            let Ok(Request::Keys(list)) = Request::parse(line, &Limits::default()) else {
                panic!("not a list of keys");
            };
            read.extend(list.iter().map(str::to_owned));
        }
        prop_assert_eq!(read, keys);
    }

    #[test]
    fn written_requests_come_back(
        id in any::<u64>(),
        epoch in any::<u64>(),
        objects in vec((key(), option::of(any::<u64>().prop_map(Sequence))), 0..30),
        lease in 1..86_400_001u64,
        token in option::of("[ -~]{1,40}"),
        mapping in option::of(1..=MapMark::MAX.0),
    ) {
        let limits = Limits::default();
        let mut hello = Hello::new(
            ClientId::random(),
            Duration::from_millis(lease),
            token.map(|token| Secret::new(token).unwrap()),
        );
        hello.mapping = mapping.map(MapMark);
        let given = || objects.iter().map(|(key, seq)| (key, *seq));
        let mut out = Vec::new();
        control::write_hello(&mut out, &hello);
        control::write_hold(&mut out, id, Epoch(epoch), given(), &limits).unwrap();
        control::write_free(&mut out, id, Epoch(epoch), given(), &limits).unwrap();
        control::write_health(&mut out, id);
        control::write_ping(&mut out, id);
        control::write_bye(&mut out);
        let (lines, _) = decode(&out, &[], limits);
        let requests: Vec<_> =
            lines.iter().map(|line| Request::parse(line, &limits).unwrap()).collect();
        prop_assert_eq!(&requests[0], &Request::Hello(hello));
        let (Request::Hold { objects: held, .. }, Request::Free { objects: freed, .. }) =
            (&requests[1], &requests[2])
        else {
            panic!("not hold and free");
        };
        for found in [held, freed] {
            prop_assert!(found.iter().eq(objects.iter().map(|(key, seq)| (&**key, *seq))));
        }
        prop_assert_eq!(&requests[3..], [Request::Health { id }, Request::Ping { id }, Request::Bye]);
    }

    #[test]
    fn written_answers_come_back(
        id in any::<u64>(),
        gone in vec(any::<u32>(), 0..50),
        stale in vec(any::<u32>(), 0..50),
        message in any::<String>(),
    ) {
        for response in [
            Response::Held { id, gone: gone.clone(), stale: stale.clone() },
            Response::Freed { id, gone: gone.clone(), stale: stale.clone() },
            Response::Error { id: Some(id), code: control::Code::Internal, message },
        ] {
            let mut out = Vec::new();
            response.write(&mut out);
            let (lines, _) = decode(&out, &[], Limits::default());
            prop_assert_eq!(lines.len(), 1, "one whole line");
            prop_assert_eq!(Response::parse(&lines[0], &Limits::default()), Ok(response));
        }
    }

    #[test]
    fn a_bad_line_costs_itself_only(
        bad in vec(any::<u8>().prop_filter("no newline", |b| *b != b'\n'), 1..50),
        cuts in vec(any::<Index>(), 0..10),
    ) {
        let stream = [b"[\"before\"]\n", &bad[..], b"\n[\"after\"]\n"].concat();
        let limits = Limits::default();
        let (lines, end) = decode(&stream, &cuts, limits);
        prop_assert_eq!(end, Ok(()));
        let ok = lines.iter().filter(|line| Request::parse(line, &limits).is_ok()).count();
        prop_assert!(ok >= 2);
        prop_assert!(Request::parse(lines.last().unwrap(), &limits).is_ok());
        for bad in lines.iter().filter_map(|line| Request::parse(line, &limits).err()) {
            prop_assert!(BadLine::REASONS.contains(&bad.reason()));
        }
    }

    #[test]
    fn written_results_and_refs_come_back(descriptor in descriptor()) {
        let outcome = CaptureOutcome::Captured(descriptor.clone());
        let mut out = Vec::new();
        capture::write_result(&mut out, &outcome).unwrap();
        let text = std::str::from_utf8(&out).unwrap();
        prop_assert_eq!(capture::parse_result(text, &capture::Limits::default()).unwrap(), outcome);

        let announced = SampleRef::new(&descriptor, "run0", Some("task".into()), "dspark").unwrap();
        let mut out = Vec::new();
        announced.write(&mut out);
        let read = SampleRef::parse(&out).unwrap();
        prop_assert_eq!(read.descriptor().unwrap(), descriptor);
        prop_assert_eq!(read, announced);
    }

    #[test]
    fn written_token_lines_come_back(
        ids in vec("[ -~]{1,20}", 1..40),
        generation in any::<u64>(),
        reason in option::of(key()),
    ) {
        let items: Vec<_> = ids.iter().map(|id| token::Item {
            sample_id: SampleId::new(id).unwrap(),
            generation: Generation(generation),
        }).collect();
        let secret = Secret::new("se\"cret\\").unwrap();
        for verb in [token::Verb::Release, token::Verb::Abort] {
            let request = token::Request::Batch {
                verb,
                token: secret.clone(),
                items: items.clone(),
                reason: reason.clone(),
            };
            let mut out = Vec::new();
            request.write(&mut out).unwrap();
            let line = out.strip_suffix(b"\n").unwrap();
            prop_assert!(!line.contains(&b'\n'));
            prop_assert_eq!(token::Request::parse(line).unwrap(), request);
        }
    }

    #[test]
    fn frames_come_back_whatever_follows(
        texts in vec(("[ -~ü]{0,40}", 0..4usize), 1..5),
        rest in vec(any::<u8>(), 0..8),
    ) {
        let kinds = [Kind::Connection, Kind::Metadata, Kind::Notify, Kind::Probe];
        let mut stream = Vec::new();
        for (text, kind) in &texts {
            Frame::new(kinds[*kind], text).encode(&mut stream);
        }
        let len = stream.len();
        stream.extend_from_slice(&rest[..rest.len().min(7)]);
        let mut input = &*stream;
        for (text, kind) in &texts {
            let (frame, used) = Frame::decode(input, MAX_FRAME_BYTES).unwrap().unwrap();
            prop_assert_eq!(frame, Frame::new(kinds[*kind], text));
            input = &input[used..];
        }
        prop_assert_eq!(input.len(), stream.len() - len);
        prop_assert_eq!(Frame::decode(input, MAX_FRAME_BYTES).unwrap(), None);
    }

    #[test]
    fn peers_come_back(
        port in any::<u16>(),
        version in any::<u32>(),
        buffers in vec((0..1u64 << 62, 0..1u64 << 62, "[ -~]{0,10}"), 0..5),
        protocol in any::<String>(),
    ) {
        let peer = SegmentDescriptor {
            buffers: buffers
                .into_iter()
                .map(|(addr, length, name)| Buffer::new(RemoteAddr(addr), length, name))
                .collect(),
            protocol,
            tcp_data_port: port,
            tcp_proto_version: version,
            ..SegmentDescriptor::default()
        };
        prop_assert_eq!(SegmentDescriptor::parse(&peer.to_json()).unwrap(), peer);
    }

    #[test]
    fn headers_come_back(
        size in 0..MAX_TRANSFER_BYTES,
        address in 0..1u64 << 63,
        read in any::<bool>(),
        v1 in any::<bool>(),
        padding in any::<[u8; 7]>(),
        code in any::<u32>(),
    ) {
        let header = Header {
            size,
            address: RemoteAddr(address),
            opcode: if read { Opcode::Read } else { Opcode::Write },
            version: if v1 { Version::V1 } else { Version::V2 },
        };
        let mut bytes = header.encode();
        bytes[17..].copy_from_slice(&padding);
        prop_assert_eq!(Header::decode(&bytes, MAX_TRANSFER_BYTES).unwrap(), header);
        let status = Status::from_code(code);
        prop_assert_eq!(Status::decode(status.encode()).unwrap(), status);
    }
}

/// A JSON text with everything beyond ASCII escaped, as Python writes it.
fn escaped(json: &str) -> String {
    let mut out = String::new();
    for c in json.chars() {
        if c.is_ascii() {
            out.push(c);
        } else {
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    out
}
