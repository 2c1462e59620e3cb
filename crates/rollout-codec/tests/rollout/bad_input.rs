//! The list of bad and odd input, one test for each line of it, over both layouts where both have
//! it. What is damaged at random is in `hostile`.

use rollout_codec::{
    BlobKind, Blobs, Codec, Column, FieldSchema, Ragged, Rollout, RowKind, Scalars, Schema,
    Template, Value, json,
    mooncake::{MemoryStore, ObjectStore, Place, Reader, Reference, Writer, cleanup},
    native::{Dedup, Header, Limits, Options, Plan, RolloutView},
};
use transport_core::{Dtype, Error, ErrorKind, RegionSlice, Result, TensorMeta};

use crate::{
    any::same_rollout,
    golden::{Golden, SAMPLES},
    hostile::seal,
};

fn one(name: &str, column: Column<'static>) -> Rollout<'static> {
    let mut rollout = Rollout::default();
    rollout.non_tensor.insert(name.to_owned(), column);
    rollout
}

fn ragged(dtype: Dtype, rows: &[Option<Vec<u8>>]) -> Column<'static> {
    let mut column = Ragged::new(dtype, RowKind::Numpy, Template::flat()).unwrap();
    for row in rows {
        match row {
            Some(bytes) => column.push(bytes.clone()).unwrap(),
            None => column.push_null(),
        }
    }
    Column::Ragged(column)
}

fn encoded(rollout: &Rollout<'_>) -> (Vec<u8>, Vec<u8>) {
    let (header, data) = Plan::new(rollout, &Options::default()).unwrap().encode(1).unwrap();
    (header, data.as_ref().to_vec())
}

fn native(rollout: &Rollout<'_>) -> Rollout<'static> {
    let (header, data) = encoded(rollout);
    let view = RolloutView::new(Header::parse(&header).unwrap(), RegionSlice::copy_of(&data));
    let view = view.unwrap();
    view.verify(1).unwrap();
    view.rollout().unwrap()
}

/// Writes objects of at most `chunk` bytes, reads them back by the exported reference.
fn stored(rollout: &Rollout<'_>, chunk: u64) -> Result<(MemoryStore, Reference)> {
    let mut store = MemoryStore::default();
    let reference = Writer::new(&mut store, "bad")?
        .chunk_bytes(std::num::NonZeroU64::new(chunk).unwrap())
        .put(rollout, &Place::default(), &Default::default())?;
    let text = reference.to_json(json::Style::COMPACT)?;
    Ok((store, Reference::parse(text.as_bytes())?))
}

fn mooncake(rollout: &Rollout<'_>, chunk: u64) -> Rollout<'static> {
    let (mut store, reference) = stored(rollout, chunk).unwrap();
    let back = Reader::new(&store).rollout(&reference).unwrap();
    cleanup(&mut store, &reference).unwrap();
    assert!(store.is_empty());
    back
}

/// Comes back equal through both layouts.
fn survives(rollout: &Rollout<'_>) {
    assert!(same_rollout(rollout, &native(rollout)), "native: {rollout:?}");
    for chunk in [7, 1 << 20] {
        assert!(same_rollout(rollout, &mooncake(rollout, chunk)), "Mooncake: {rollout:?}");
    }
}

fn refused(header: &[u8]) -> Error {
    let error = Header::parse(header).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::InvalidInput), "{error}");
    error
}

fn sample() -> (Vec<u8>, Vec<u8>) {
    encoded(&one("x", ragged(Dtype::Uint8, &[Some(vec![1, 2, 3]), None, Some(vec![4])])))
}

#[test]
fn truncated_headers() {
    let (header, _) = sample();
    for cut in 0..header.len() {
        refused(&header[..cut]);
    }
}

#[test]
fn bit_flipped_headers() {
    let (header, _) = sample();
    for bit in 0..8 * header.len() {
        let mut flipped = header.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(Header::parse(&flipped).is_err(), "bit {bit}");
    }
}

#[test]
fn oversized_headers() {
    let (header, _) = sample();
    refused(&[&header[..], b" "].concat());
    // A space more in the index, with lengths and checksum that fit: the same index, too long.
    let longer = seal(&header, &[&header[64..], b" "].concat());
    let limits = Limits { header_bytes: header.len() as u64, ..Limits::default() };
    assert!(Header::parse_within(&header, limits).is_ok());
    let error = Header::parse_within(&longer, limits).unwrap_err();
    assert!(error.to_string().contains("longer than accepted"), "{error}");
    let limits = Limits { data_bytes: 64, ..Limits::default() };
    assert!(Header::parse_within(&header, limits).is_err());
}

/// The index of the sample, with one text replaced by another, sealed again.
fn forged(header: &[u8], from: &str, to: &str) -> Vec<u8> {
    let index = String::from_utf8(header[64..].to_vec()).unwrap();
    assert!(index.contains(from), "{from} in {index}");
    seal(header, index.replacen(from, to, 1).as_bytes())
}

#[test]
fn self_contradictory_headers() {
    let (header, _) = sample();
    for (from, to) in [
        ("\"total\":4", "\"total\":5"),
        ("\"stored\":3", "\"stored\":2"),
        ("\"len\":4", "\"len\":5"),
        ("\"at\":64", "\"at\":0"),
        ("\"at\":64", "\"at\":128"),
        ("\"wire\":\"uint8\"", "\"wire\":\"int64\""),
        ("non_tensor_batch", "meta_info"),
        ("\"template\":", "\"irregular\":"),
        ("\"rows_are\":\"numpy\"", "\"rows_are\":\"mixed\""),
    ] {
        refused(&forged(&header, from, to));
    }
    // The fixed part against the index: rows, and bytes of data.
    for at in [24, 40] {
        let mut other = header.clone();
        other[at] ^= 64;
        refused(&seal(&other, &header[64..]));
    }
    // One name twice.
    let index = String::from_utf8(header[64..].to_vec()).unwrap();
    let field = index.strip_prefix("{\"fields\":[").unwrap().strip_suffix("]}").unwrap();
    let twice = format!("{{\"fields\":[{field},{field}]}}");
    refused(&seal(&header, twice.as_bytes()));
}

fn with_offsets(offsets: [u64; 4]) -> Error {
    let (header, mut data) = sample();
    for (i, offset) in offsets.iter().enumerate() {
        data[8 * i..8 * i + 8].copy_from_slice(&offset.to_le_bytes());
    }
    let view = RolloutView::new(Header::parse(&header).unwrap(), RegionSlice::copy_of(&data));
    let error = view.unwrap().ragged("x").unwrap_err();
    assert_eq!((error.kind(), error.context("field")), (ErrorKind::Corrupt, Some("x")));
    error
}

/// The same field as Mooncake's objects, with other offsets.
fn with_stored_offsets(offsets: [u64; 4]) -> Error {
    let rollout = one("x", ragged(Dtype::Uint8, &[Some(vec![1, 2, 3]), None, Some(vec![4])]));
    let (mut store, reference) = stored(&rollout, 1 << 20).unwrap();
    let key = store.keys().find(|key| key.ends_with("x.offsets")).unwrap().to_owned();
    store.remove(&key).unwrap();
    let bytes: Vec<u8> = offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect();
    store.insert(key.as_str(), bytes).unwrap();
    Reader::new(&store).rollout(&reference).unwrap_err()
}

#[test]
fn offsets_that_go_down() {
    for offsets in [[0, 3, 2, 4], [0, 4, 3, 4], [3, 3, 3, 4], [1, 3, 3, 4]] {
        with_offsets(offsets);
        with_stored_offsets(offsets);
    }
}

#[test]
fn offsets_past_the_end() {
    for offsets in [[0, 3, 3, 5], [0, 3, 5, 5], [0, 3, 3, 3], [0, 3, 3, 1 << 40]] {
        with_offsets(offsets);
        with_stored_offsets(offsets);
    }
}

#[test]
fn offsets_that_overflow() {
    for offset in [u64::MAX, 1 << 63, u64::MAX / 8 + 1, i64::MAX as u64] {
        with_offsets([0, 3, 3, offset]);
        with_offsets([0, offset, offset, 4]);
        with_stored_offsets([0, 3, 3, offset]);
        with_stored_offsets([0, offset, offset, 4]);
    }
}

#[test]
fn shapes_whose_product_overflows() {
    let error = Ragged::new(Dtype::Int64, RowKind::Torch, Template::tail([1 << 40, 1 << 40]));
    assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidInput);
    assert!(TensorMeta::new(Dtype::Int64, [u64::MAX, 2]).is_err());
    let (header, _) = sample();
    for dims in ["[4294967296,4294967296]", "[18446744073709551615]", "[9223372036854775808,2]"] {
        let error = Header::parse(&forged(&header, "\"after\":[]", &format!("\"after\":{dims}")));
        assert!(error.is_err(), "{dims}");
    }
    // A row of Mooncake's whose shape overflows.
    let rollout = one("x", ragged(Dtype::Int64, &[Some(vec![0; 16])]));
    let (mut store, reference) = stored(&rollout, 1 << 20).unwrap();
    let key = store.keys().find(|key| key.ends_with("x.shapes")).unwrap().to_owned();
    store.remove(&key).unwrap();
    store.insert(key.as_str(), (1u64 << 62).to_le_bytes().to_vec()).unwrap();
    assert!(Reader::new(&store).rollout(&reference).is_err());
}

#[test]
fn rows_of_mixed_dtype() {
    let array = |dtype: Dtype| {
        let meta = TensorMeta::new(dtype, [2]).unwrap();
        let bytes = vec![1; meta.nbytes() as usize];
        Value::Array(rollout_codec::Array::new(rollout_codec::Library::Torch, meta, bytes).unwrap())
    };
    let rows = [array(Dtype::Int32), array(Dtype::Int64)];
    for codec in [Codec::TypedRagged, Codec::RaggedTensor] {
        let error = FieldSchema::new(codec).column(&Value::List(rows.to_vec())).unwrap_err();
        assert_eq!(error.context("row"), Some("1"), "{error}");
        assert_eq!(
            (error.context("expected"), error.context("found")),
            (Some("int32"), Some("int64"))
        );
    }
    assert!(Column::infer(&rows).is_err());
}

#[test]
fn a_missing_member() {
    let golden = Golden::load("sample1");
    let mut reference = Reference::parse(golden.reference.as_ref().unwrap().as_bytes()).unwrap();
    let (_, encoded) = reference.encoded.iter_mut().next().unwrap();
    let (payload, member) = encoded.members.iter_mut().next().unwrap();
    let payload = payload.clone();
    *member = "non_tensor_batch.nothing".to_owned();
    let error = Reader::new(&golden.dump.objects).rollout(&reference).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert_eq!(error.context("payload"), Some(&*payload), "{error}");
    assert!(error.context("field").is_some(), "{error}");
}

/// Reads a sample from whose chunks one was replaced; which one is left to `change`.
fn with_chunk(change: impl Fn(&[u8]) -> Option<Vec<u8>>) -> Vec<(String, Error)> {
    let mut errors = Vec::new();
    for name in SAMPLES {
        let golden = Golden::load(name);
        let chunks = golden.dump.objects.keys().filter(|key| key.contains("/chunk/"));
        for key in chunks.map(ToOwned::to_owned).collect::<Vec<_>>() {
            let mut store = golden.dump.objects.clone();
            let bytes = store.get(&key).unwrap().unwrap();
            store.remove(&key).unwrap();
            if let Some(bytes) = change(&bytes) {
                store.insert(key.as_str(), bytes).unwrap();
            }
            let reference = Reference::parse(golden.reference.as_ref().unwrap().as_bytes());
            let error = Reader::new(&store).rollout(&reference.unwrap()).unwrap_err();
            assert_eq!(error.context("key"), Some(&*key), "{error}");
            errors.push((key, error));
        }
    }
    assert!(errors.len() > 10, "{}", errors.len());
    errors
}

#[test]
fn a_missing_chunk() {
    for (key, error) in with_chunk(|_| None) {
        assert_eq!(error.kind(), ErrorKind::NotFound, "{key}: {error}");
    }
}

#[test]
fn a_chunk_of_the_wrong_size() {
    let short = with_chunk(|bytes| Some(bytes[..bytes.len() - 1].to_vec()));
    let long = with_chunk(|bytes| Some([bytes, &[0]].concat()));
    for (key, error) in short.into_iter().chain(long) {
        assert_eq!(error.kind(), ErrorKind::ShortRead, "{key}: {error}");
        assert!(error.context("expected").is_some() && error.context("found").is_some());
    }
}

#[test]
fn null_where_the_schema_forbids_it() {
    let rows = json::parse(b"[[1],null,[2]]").unwrap();
    let forbids = FieldSchema::new(Codec::TypedRagged);
    let error = forbids.column(&rows).unwrap_err();
    assert_eq!(error.context("row"), Some("1"), "{error}");
    survives(&one("x", forbids.nullable().column(&rows).unwrap()));
}

#[test]
fn zero_rows() {
    let rollout = one("x", ragged(Dtype::Float32, &[]));
    survives(&rollout);
    let Column::Ragged(x) = &native(&rollout).non_tensor["x"] else { panic!() };
    assert_eq!((x.rows(), x.dtype()), (0, Dtype::Float32), "the element type is kept");
    survives(&one("n", Column::Scalars(Scalars::new(Dtype::Int64, vec![]).unwrap())));
    survives(&one("t", Column::Blobs(Blobs::from_text([None::<&str>; 0]))));
}

#[test]
fn zero_length_rows() {
    let rollout = one("x", ragged(Dtype::Int16, &[Some(vec![]), Some(vec![1, 0]), Some(vec![])]));
    survives(&rollout);
    let all = one("x", ragged(Dtype::Int16, &[Some(vec![]), Some(vec![])]));
    survives(&all);
    let Column::Ragged(x) = &native(&all).non_tensor["x"] else { panic!() };
    assert_eq!((x.shape(1), x.dtype()), (Some(vec![0]), Dtype::Int16));
}

#[test]
fn all_rows_null() {
    survives(&one("x", ragged(Dtype::Int32, &[None, None, None])));
    let nulls = Scalars::with_nulls(Dtype::Float64, vec![0; 16], vec![true; 2]).unwrap();
    survives(&one("n", Column::Scalars(nulls)));
    survives(&one("t", Column::Blobs(Blobs::from_text([None::<&str>; 2]))));
}

#[test]
fn one_row_only() {
    survives(&one("x", ragged(Dtype::Uint64, &[Some(vec![9; 24])])));
}

#[test]
fn equal_rows() {
    let rows = vec![Some(vec![5u8; 48]); 4];
    let rollout = one("x", ragged(Dtype::Int32, &rows));
    survives(&rollout);
    // The same bytes are kept once if asked for, and come back as four rows.
    let options = Options::default().dedup(Dedup::SameBytes);
    let (header, data) = Plan::new(&rollout, &options).unwrap().encode(1).unwrap();
    let view = RolloutView::new(Header::parse(&header).unwrap(), data).unwrap();
    assert!(same_rollout(&rollout, &view.rollout().unwrap()));
}

#[test]
fn a_row_larger_than_a_chunk() {
    let row = |n: usize| Some((0..n).map(|i| i as u8).collect::<Vec<_>>());
    let rollout = one("x", ragged(Dtype::Uint8, &[row(3), row(1000), row(5)]));
    let (store, reference) = stored(&rollout, 100).unwrap();
    let chunks: Vec<usize> = store
        .keys()
        .filter(|key| key.contains("x.data/chunk/"))
        .map(|key| store.get(key).unwrap().unwrap().len())
        .collect();
    assert_eq!((chunks.iter().sum::<usize>(), chunks.len()), (1008, 11), "cut within the row");
    assert!(same_rollout(&rollout, &Reader::new(&store).rollout(&reference).unwrap()));
}

/// Planned, and its offsets written, without the memory that the rows would take.
#[test]
fn more_than_2_to_the_31_elements_in_a_field() {
    let mebi = vec![7u8; 1 << 20];
    let rows = 2500u64; // 2.6 G elements
    let mut column = Ragged::new(Dtype::Uint8, RowKind::Torch, Template::flat()).unwrap();
    for _ in 0..rows {
        column.push(&mebi[..]).unwrap();
    }
    let mut rollout = Rollout::default();
    rollout.non_tensor.insert("x".into(), Column::Ragged(column));
    let options = Options::default().dedup(Dedup::None).checksums(false);
    let plan = Plan::new(&rollout, &options).unwrap();
    let elements = rows << 20;
    assert!(elements > 1 << 31 && plan.data_bytes() > elements, "{}", plan.data_bytes());
    let header = Header::parse(&plan.join([]).unwrap()).unwrap();
    assert!(header.field_range("x").unwrap().end > elements);
    // The first part holds the offsets alone.
    let first = plan.parts(1).remove(0);
    assert!(first.end < 1 << 20);
    let mut bytes = vec![0; first.end as usize];
    plan.encode_part(&first, &mut bytes, 1).unwrap();
    let offsets = RegionSlice::copy_of(&bytes);
    let locator = header
        .locator("x", |range| {
            Ok(offsets.slice(range.start as usize..range.end as usize).expect("the first part"))
        })
        .unwrap();
    let last = locator.row(rows - 1).unwrap().unwrap();
    assert_eq!(last.end - last.start, 1 << 20);
    assert!(last.start > 1 << 31);
    let cut = locator.sub_row(rows - 1, &(5..9)).unwrap().unwrap();
    assert_eq!(cut, last.start + 5..last.start + 9);
}

#[test]
fn nan_and_infinities_bit_exact() {
    let bits = [0x7fc0_0001u32, 0xffc0_dead, 0x7f80_0001, 0x7f80_0000, 0xff80_0000, 0x8000_0000, 1];
    let row: Vec<u8> = bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let mut rollout = one("x", ragged(Dtype::Float32, &[Some(row)]));
    for (name, value) in [("nan", f64::NAN), ("inf", f64::INFINITY), ("zero", -0.0)] {
        rollout.meta.insert(name.into(), Value::Float(value));
    }
    assert!(same_rollout(&rollout, &native(&rollout)));
    survives(&one("x", rollout.non_tensor["x"].clone()));
    let doubles: Vec<u8> = [f64::NAN, f64::NEG_INFINITY, f64::from_bits(0x7ff0_0000_0000_0001)]
        .iter()
        .flat_map(|x| x.to_bits().to_le_bytes())
        .collect();
    survives(&one("n", Column::Scalars(Scalars::new(Dtype::Float64, doubles).unwrap())));
}

const NAMES: [&str; 7] = ["a/b", "a.b", "\u{1}\n", "数", "", "\"\\", "x\u{0}y"];

#[test]
fn names_with_slashes_dots_control_characters_and_others() {
    let column = || ragged(Dtype::Uint8, &[Some(vec![1])]);
    let mut rollout = Rollout::default();
    for name in NAMES {
        rollout.non_tensor.insert(name.into(), column());
    }
    assert!(same_rollout(&rollout, &native(&rollout)));
    // Mooncake makes keys of names: what cannot be one is refused by name, before a byte is written.
    for name in NAMES {
        let rollout = one(name, column());
        let is_key = !name.is_empty() && !name.contains('/') && !name.chars().any(|c| c < ' ');
        match stored(&rollout, 1 << 20) {
            Ok((store, reference)) => {
                assert!(is_key, "{name:?}");
                let back = Reader::new(&store).rollout(&reference).unwrap();
                assert!(same_rollout(&rollout, &back), "{name:?}");
            }
            Err(error) => {
                assert!(!is_key, "{name:?}: {error}");
                assert_eq!(error.kind(), ErrorKind::InvalidInput);
                let named = error.context("member").or(error.context("field"));
                assert!(named.is_some(), "{error}");
            }
        }
    }
}

#[test]
fn sample_indices_with_nulls() {
    let rows = json::parse(b"[7,null,9]").unwrap();
    for schema in [Schema::slime(), Schema::slime().strict()] {
        let dict = [("sample_indices".to_owned(), rows.clone())].into_iter().collect();
        let rollout = schema.rollout(&dict).unwrap();
        survives(&rollout);
        let Column::Scalars(column) = &native(&rollout).non_tensor["sample_indices"] else {
            panic!()
        };
        assert_eq!((column.dtype(), column.nulls()), (Dtype::Int64, &[false, true, false][..]));
        // A null is told from a 0 also where one row is looked for.
        let (header, data) = encoded(&rollout);
        let header = Header::parse(&header).unwrap();
        let data = RegionSlice::copy_of(&data);
        let fetch = |range: std::ops::Range<u64>| {
            Ok(data.slice(range.start as usize..range.end as usize).unwrap())
        };
        let locator = header.locator("sample_indices", fetch).unwrap();
        assert!(locator.row(1).unwrap().is_none() && locator.row(2).unwrap().is_some());
    }
}

#[test]
fn dict_rewards() {
    let rewards = json::parse(br#"[{"acc":1.0,"fmt":0.5},{"acc":0.0,"fmt":null}]"#).unwrap();
    let dict = [("rewards".to_owned(), rewards.clone())].into_iter().collect();
    // Declared as numbers they are refused by name; left open they are objects.
    let numbers = Schema::new().field("rewards", FieldSchema::new(Codec::Ndarray));
    let error = numbers.rollout(&dict).unwrap_err();
    assert_eq!((error.context("field"), error.context("row")), (Some("rewards"), Some("0")));
    for codec in [Codec::Json, Codec::MessagePack, Codec::Auto] {
        let schema = Schema::new().field("rewards", FieldSchema::new(codec));
        let rollout = schema.rollout(&dict).unwrap();
        survives(&rollout);
        let Column::Blobs(column) = &native(&rollout).non_tensor["rewards"] else { panic!() };
        assert!(matches!(column.kind, BlobKind::Json | BlobKind::MessagePack));
        assert_eq!(Value::List(column.to_values().unwrap()), rewards);
    }
    let slime = Schema::slime().rollout(&dict).unwrap();
    let values = match &native(&slime).non_tensor["rewards"] {
        Column::Blobs(column) => column.to_values().unwrap(),
        other => panic!("{other:?}"),
    };
    assert_eq!(Value::List(values), rewards);
}

/// Everything is there but the manifest, which comes last: nothing can be read.
#[test]
fn a_producer_that_dies_between_data_and_manifest() {
    /// Ends, as a killed process does, before the manifest.
    struct Dies(MemoryStore);
    impl ObjectStore for Dies {
        fn get(&self, key: &str) -> Result<Option<bytes::Bytes>> {
            self.0.get(key)
        }
        fn put(&mut self, key: &str, parts: &[&[u8]], group: Option<&str>) -> Result<()> {
            if key.ends_with("/manifest") {
                panic!("killed");
            }
            self.0.put(key, parts, group)
        }
        fn remove(&mut self, key: &str) -> Result<bool> {
            self.0.remove(key)
        }
    }
    let rollout = one("x", ragged(Dtype::Int32, &[Some(vec![1; 400])]));
    let (whole, reference) = stored(&rollout, 100).unwrap();
    let mut store = Dies(MemoryStore::default());
    let killed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut writer = Writer::new(&mut store, "bad").unwrap();
        let _ = writer.put(&rollout, &Place::default(), &Default::default());
    }));
    assert!(killed.is_err() && store.0.len() > 2);
    // By the reference that it would have given.
    let error = Reader::new(&store).rollout(&reference).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert!(error.context("manifest_key").is_some());
    assert_eq!(cleanup(&mut store, &reference).unwrap(), 0, "no manifest, nothing to follow");
    assert!(Reader::new(&whole).rollout(&reference).is_ok());
}

/// Objects that vanish while they are read: an error that names the first that is missing.
#[test]
fn a_cleanup_during_a_read() {
    struct Vanishing(std::cell::RefCell<(MemoryStore, usize)>);
    impl ObjectStore for Vanishing {
        fn get(&self, key: &str) -> Result<Option<bytes::Bytes>> {
            let (store, left) = &mut *self.0.borrow_mut();
            if *left == 0 {
                return Ok(None);
            }
            *left -= 1;
            store.get(key)
        }
        fn put(&mut self, _: &str, _: &[&[u8]], _: Option<&str>) -> Result<()> {
            unreachable!("only read")
        }
        fn remove(&mut self, _: &str) -> Result<bool> {
            unreachable!("only read")
        }
    }
    let rollout = one("x", ragged(Dtype::Int32, &[Some(vec![1; 400]), Some(vec![2; 40])]));
    let (store, reference) = stored(&rollout, 100).unwrap();
    for reads in 0..store.len() {
        let vanishing = Vanishing(std::cell::RefCell::new((store.clone(), reads)));
        let error = Reader::new(&vanishing).rollout(&reference).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    }
    let all = Vanishing(std::cell::RefCell::new((store.clone(), store.len())));
    assert!(Reader::new(&all).rollout(&reference).is_ok());
}
