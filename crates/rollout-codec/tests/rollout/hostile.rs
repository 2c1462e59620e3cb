//! Input from someone who wants to do harm: every answer is an error or a rollout, never a panic,
//! and never much memory for a length that nothing backs (see `tests/memory.rs`).

use proptest::{
    strategy::{Strategy, ValueTree},
    test_runner::{Config, TestRng, TestRunner},
};
use rollout_codec::{
    Blobs, Column, Dense, Library, Ragged, Rollout, RowKind, Template, Value,
    mooncake::{MemoryStore, ObjectStore, Reader, Reference},
    native::{Header, Options, Plan, ReadLimits, ReadRequest, RolloutView, read_plan},
    notation::{self, Layout as Arrangement},
};
use transport_core::{Dtype, RegionSlice, TensorMeta};
use xxhash_rust::xxh3::Xxh3;

use crate::{
    any::any_rollout,
    golden::{Golden, SAMPLES},
};

/// Numbers that lengths and positions must never be trusted with.
const NUMBERS: [&str; 13] = [
    "0",
    "1",
    "2",
    "63",
    "64",
    "65",
    "4096",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "-1",
];

/// Header and data that exercise every kind of field.
fn sample() -> (Vec<u8>, Vec<u8>) {
    let mut rollout = Rollout::default();
    let rows: [&[i32]; 3] = [&[1, 2, 3], &[], &[4, 5]];
    let add = |rollout: &mut Rollout<'_>, name: &str, column| {
        rollout.non_tensor.insert(name.to_owned(), column);
    };
    static SHARED: [i64; 4] = [7; 4];
    let aliased = Ragged::from_rows(RowKind::Torch, [&SHARED[..], &SHARED[..], &SHARED[1..2]]);
    add(&mut rollout, "aliased", Column::Ragged(aliased));
    add(&mut rollout, "ragged", Column::Ragged(Ragged::from_rows(RowKind::Torch, rows)));
    let mut tail = Ragged::new(Dtype::Int16, RowKind::Numpy, Template::tail([2])).unwrap();
    tail.push(vec![1; 8]).unwrap();
    tail.push_null();
    tail.push(vec![2; 4]).unwrap();
    add(&mut rollout, "tail", Column::Ragged(tail));
    let mut odd = Ragged::irregular(Dtype::Uint8, RowKind::Mixed(vec![true, false, true]));
    odd.push_shaped(&[2, 2], vec![1; 4]).unwrap();
    odd.push_shaped(&[], vec![1]).unwrap();
    odd.push_shaped(&[0, 3], vec![]).unwrap();
    add(&mut rollout, "odd", Column::Ragged(odd));
    let names = Blobs::from_text([Some("a"), None, Some("bc")]);
    add(&mut rollout, "names", Column::Blobs(names));
    let bytes = |b: &[u8]| Value::Bytes(b.to_vec().into());
    let map = |n: &str, v: Value| Value::Map([(n.to_owned(), v)].into_iter().collect());
    let nested = [map("x", bytes(b"1")), Value::Null, map("y", Value::List(vec![Value::Null]))];
    add(&mut rollout, "nested", Column::infer(&nested).unwrap());
    let media = [Value::List(vec![bytes(b"1"), bytes(b"")]), Value::Null, Value::List(vec![])];
    add(&mut rollout, "media", Column::infer(&media).unwrap());
    let ints = [Value::Int(1), Value::Null, Value::Int(3)];
    add(&mut rollout, "ints", Column::infer(&ints).unwrap());
    let meta = TensorMeta::new(Dtype::Float32, [3, 2]).unwrap();
    let dense = Dense::new(Library::Torch, meta, vec![0; 24]).unwrap();
    rollout.batch.insert("dense".into(), Column::Dense(dense));
    rollout.meta.insert("meta".into(), Value::List(vec![Value::Int(1)]));
    let plan = Plan::new(&rollout, &Options::default().narrow("ragged", Dtype::Int8)).unwrap();
    let (header, data) = plan.encode(1).unwrap();
    (header, data.as_ref().to_vec())
}

/// The header with another index, and lengths and checksum that fit it.
pub(crate) fn seal(header: &[u8], index: &[u8]) -> Vec<u8> {
    let mut out = [&header[..64], index].concat();
    let len = out.len() as u64;
    out[16..24].copy_from_slice(&len.to_le_bytes());
    out[48..56].copy_from_slice(&(index.len() as u64).to_le_bytes());
    let mut hasher = Xxh3::new();
    hasher.update(&out[..56]);
    hasher.update(index);
    let sum = hasher.digest();
    out[56..64].copy_from_slice(&sum.to_le_bytes());
    out
}

/// Reads everything in every way.
fn use_all(header: &[u8], data: &[u8]) -> bool {
    let Ok(header) = Header::parse(header) else { return false };
    let names: Vec<_> = header.fields().map(|field| field.name.to_owned()).collect();
    let region = RegionSlice::copy_of(data);
    for name in &names {
        let fetch = |range: std::ops::Range<u64>| {
            let range = usize::try_from(range.start).unwrap_or(usize::MAX)
                ..usize::try_from(range.end).unwrap_or(usize::MAX);
            region.slice(range).ok_or_else(|| {
                transport_core::Error::new(transport_core::ErrorKind::OutOfRange, "test", "outside")
            })
        };
        if let Ok(field) = header.locator(name, fetch) {
            let rows: Vec<u64> = (0..header.rows().min(8)).collect();
            let steps = vec![0..1; rows.len()];
            let request = ReadRequest { field: &field, rows: &rows, steps: None };
            let cut = ReadRequest { steps: Some(&steps), ..request };
            for request in [request, cut] {
                if let Ok(plan) = read_plan(&[request], ReadLimits::default()) {
                    let end = |f: &rollout_codec::native::Fragment| f.remote + f.len;
                    assert!(plan.fragments().iter().all(|f| end(f) <= header.data_bytes()));
                }
            }
        }
    }
    let Ok(view) = RolloutView::new(header, region) else { return false };
    let _ = view.verify(1);
    for name in &names {
        if let Ok(rows) = view.ragged(name) {
            for i in 0..rows.len() {
                let _ = (rows.row(i), rows.shape(i), rows.sub_row(i, 0..1), rows.row_region(i));
            }
        }
    }
    let Ok(rollout) = view.rollout() else { return false };
    let _ = notation::decoded(&rollout, Arrangement::Envelope);
    true
}

#[test]
fn forged_headers_are_refused_or_harmless() {
    let (header, data) = sample();
    assert!(use_all(&header, &data));
    let index = String::from_utf8(header[64..].to_vec()).unwrap();
    let mut tried = 0;
    // Every number of the index, replaced by every dangerous one.
    let is_digit = |c: char| c.is_ascii_digit();
    let mut at = 0;
    while let Some(start) = index[at..].find(is_digit).map(|i| at + i) {
        let end = index[start..].find(|c| !is_digit(c)).map_or(index.len(), |i| start + i);
        for number in NUMBERS {
            let forged = format!("{}{number}{}", &index[..start], &index[end..]);
            if forged != index {
                use_all(&seal(&header, forged.as_bytes()), &data);
                tried += 1;
            }
        }
        at = end;
    }
    assert!(tried > 1000, "{tried}");
    // Words swapped for other words, and pieces left out.
    for (from, to) in [
        ("int64", "int8"),
        ("int8", "float64"),
        ("int32", "complex128"),
        ("\"torch\"", "\"mixed\""),
        ("\"mixed\"", "\"list\""),
        ("template", "irregular"),
        ("non_tensor_batch", "meta_info"),
        ("meta_info", "batch"),
        ("\"ragged\"", "\"tail\""),
        ("utf8", "json"),
        ("utf8", "media"),
        ("dict", "list"),
        ("bytes", "message_pack"),
        ("\"xxh3\"", "\"sum\""),
        (",", ""),
        ("\"nulls\"", "\"alias\""),
        ("\"alias\"", "\"nulls\""),
        ("[", "{"),
        ("\"leaf\"", "\"dict\""),
    ] {
        let parts: Vec<_> = index.match_indices(from).map(|(i, _)| i).collect();
        assert!(!parts.is_empty(), "{from}");
        for i in parts {
            let forged = format!("{}{to}{}", &index[..i], &index[i + from.len()..]);
            use_all(&seal(&header, forged.as_bytes()), &data);
        }
    }
    // The fixed part, with a checksum that fits.
    for at in (8..56).step_by(8) {
        for word in [0, 1, 64, u64::MAX, i64::MAX as u64, 1 << 40] {
            let mut forged = header.clone();
            forged[at..at + 8].copy_from_slice(&word.to_le_bytes());
            let mut hasher = Xxh3::new();
            hasher.update(&forged[..56]);
            hasher.update(&forged[64..]);
            let sum = hasher.digest();
            forged[56..64].copy_from_slice(&sum.to_le_bytes());
            use_all(&forged, &data);
        }
    }
}

#[test]
fn another_version_is_named_before_anything_else_is_read() {
    let (mut header, _) = sample();
    header[8] = 2;
    header.truncate(70);
    let error = Header::parse(&header).unwrap_err();
    assert_eq!(error.kind(), transport_core::ErrorKind::Unsupported);
    assert_eq!((error.context("expected"), error.context("found")), (Some("1"), Some("2")));
}

#[test]
fn forged_data_is_refused_or_harmless() {
    let (header, data) = sample();
    for at in (0..data.len() / 8 * 8).step_by(8) {
        for word in [0, 1, 3, 255, u64::MAX, i64::MAX as u64, 1 << 40, u64::MAX / 8] {
            let mut forged = data.clone();
            forged[at..at + 8].copy_from_slice(&word.to_le_bytes());
            use_all(&header, &forged);
        }
    }
    for at in 0..data.len() {
        let mut forged = data.clone();
        forged[at] ^= 0x81;
        use_all(&header, &forged);
    }
    for len in [0, 1, data.len() - 1, data.len() + 1] {
        let mut forged = data.clone();
        forged.resize(len, 0);
        assert!(!use_all(&header, &forged));
    }
}

/// F48: offsets are the attacker's favourite.
#[test]
fn bad_offsets_are_named() {
    let rows: [&[u8]; 3] = [&[1], &[2, 3], &[4]];
    let mut rollout = Rollout::default();
    let column = Column::Ragged(Ragged::from_rows(RowKind::List, rows));
    rollout.non_tensor.insert("x".into(), column);
    let (header, data) = Plan::new(&rollout, &Options::default()).unwrap().encode(1).unwrap();
    for offsets in [[1u64, 1, 3, 4], [0, 3, 1, 4], [0, 1, 3, 5], [0, 1, 3, 3], [0, u64::MAX, 3, 4]]
    {
        let mut forged = data.as_ref().to_vec();
        for (i, offset) in offsets.iter().enumerate() {
            forged[8 * i..8 * i + 8].copy_from_slice(&offset.to_le_bytes());
        }
        let header = Header::parse(&header).unwrap();
        let view = RolloutView::new(header, RegionSlice::copy_of(&forged)).unwrap();
        let error = view.ragged("x").unwrap_err();
        assert_eq!(error.context("field"), Some("x"), "{offsets:?}");
        assert!(error.message().contains("offsets"), "{error}");
    }
}

fn read_golden(golden: &Golden, store: &MemoryStore) -> Result<(), transport_core::Error> {
    let reader = Reader::new(store);
    match &golden.reference {
        Some(text) => {
            let rollout = reader.rollout(&Reference::parse(text.as_bytes())?)?;
            notation::decoded(&rollout, Arrangement::Envelope)?;
        }
        None => drop(reader.members(golden.manifest_key())?.decoded()?),
    }
    Ok(())
}

fn with_object(objects: &MemoryStore, key: &str, bytes: Option<Vec<u8>>) -> MemoryStore {
    let mut store = objects.clone();
    store.remove(key).unwrap();
    if let Some(bytes) = bytes {
        store.insert(key, bytes).unwrap();
    }
    store
}

#[test]
fn missing_and_wrongly_sized_objects_are_errors() {
    for name in SAMPLES {
        let golden = Golden::load(name);
        let objects = &golden.dump.objects;
        for key in objects.keys() {
            let bytes = objects.get(key).unwrap().unwrap().to_vec();
            let cut = bytes[..bytes.len() - 1].to_vec();
            let long = [&bytes[..], b"\0"].concat();
            for (what, object) in [("missing", None), ("cut", Some(cut)), ("long", Some(long))] {
                let store = with_object(objects, key, object);
                let error = read_golden(&golden, &store).expect_err(what);
                assert!(error.to_string().contains("key="), "{name} {key} {what}: {error}");
            }
        }
    }
}

#[test]
fn damaged_objects_and_references_never_panic() {
    for name in SAMPLES {
        let golden = Golden::load(name);
        let objects = &golden.dump.objects;
        for key in objects.keys() {
            let bytes = objects.get(key).unwrap().unwrap().to_vec();
            let json = bytes.first() == Some(&b'{') && key.contains("/m");
            for at in (0..bytes.len()).step_by(if json { 5 } else { 1 }) {
                let mut forged = bytes.clone();
                forged[at] ^= if at % 2 == 0 { 0x01 } else { 0x80 };
                let _ = read_golden(&golden, &with_object(objects, key, Some(forged)));
            }
        }
        let Some(text) = &golden.reference else { continue };
        for at in 0..text.len() {
            if !text.as_bytes()[at].is_ascii_digit()
                || (at > 0 && text.as_bytes()[at - 1].is_ascii_alphanumeric())
            {
                continue;
            }
            let end = text[at..].find(|c: char| !c.is_ascii_digit()).map_or(text.len(), |i| at + i);
            for number in NUMBERS {
                let forged = format!("{}{number}{}", &text[..at], &text[end..]);
                if let Ok(reference) = Reference::parse(forged.as_bytes()) {
                    let reader = Reader::new(objects);
                    if let Ok(rollout) = reader.rollout(&reference) {
                        let _ = notation::decoded(&rollout, Arrangement::Flat);
                    }
                }
            }
        }
    }
}

/// A fuzzer's loop with a fixed seed: random rollouts, random damage.
#[test]
fn random_damage_never_panics() {
    let rng = TestRng::from_seed(proptest::test_runner::RngAlgorithm::ChaCha, &[42; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let damage = proptest::collection::vec((0usize..1 << 20, proptest::num::u8::ANY), 1..6);
    for _ in 0..300 {
        let rollout = any_rollout().new_tree(&mut runner).unwrap().current();
        let (header, data) = Plan::new(&rollout, &Options::default()).unwrap().encode(1).unwrap();
        let damage = damage.new_tree(&mut runner).unwrap().current();
        let mut forged = data.as_ref().to_vec();
        let mut index = header[64..].to_vec();
        for (at, byte) in damage {
            if !forged.is_empty() {
                let len = forged.len();
                forged[at % len] = byte;
            }
            let len = index.len();
            index[at % len] = byte;
        }
        use_all(&header, &forged);
        use_all(&seal(&header, &index), data.as_ref());
    }
}
