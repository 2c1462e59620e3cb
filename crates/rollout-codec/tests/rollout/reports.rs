//! What went wrong for others: reports F44 to F51, each with a test of its own here or named
//! where it is.
//!
//! F45 and F46 are `native::equal_lengths_are_laid_out_like_unequal_ones`, F48 is
//! `hostile::bad_offsets_are_named`, F50 is `schema::readers_that_expect_something_else_are_told`,
//! and the transfers of F47 are counted in the tests of the transport.

use rollout_codec::{
    Column, Dense, Library, Ragged, Rollout, RowKind, Scalars, Template, Value, json,
    mooncake::{ObjectStore, Reader, Reference},
    native::{ALIGNMENT, Header, Options, Plan, RolloutView},
};
use transport_core::{Dtype, ErrorKind, TensorMeta};

use crate::{
    golden::{Golden, SAMPLES},
    hostile::seal,
};

fn view(rollout: &Rollout<'_>) -> RolloutView {
    let (header, data) = Plan::new(rollout, &Options::default()).unwrap().encode(1).unwrap();
    RolloutView::new(Header::parse(&header).unwrap(), data).unwrap()
}

fn with(name: &str, column: Column<'static>) -> Rollout<'static> {
    let mut rollout = Rollout::default();
    rollout.non_tensor.insert(name.into(), column);
    rollout
}

/// bfloat16 and its like keep their bits, and an element type that nobody knows is an error.
#[test]
fn f44_bits_of_unusual_element_types() {
    // 1e30, -0.0, NaNs with payloads, a subnormal, infinity.
    let bits: Vec<u8> = [0x7149u16, 0x8000, 0x7fc1, 0xff81, 0x0001, 0x7f80]
        .iter()
        .flat_map(|bits| bits.to_le_bytes())
        .collect();
    for dtype in [
        Dtype::Bfloat16,
        Dtype::Float8E4m3fn,
        Dtype::Float8E5m2,
        Dtype::Bool,
        Dtype::Uint16,
        Dtype::Float16,
    ] {
        let row = match dtype {
            Dtype::Bool => vec![0, 1, 1],
            _ => bits.clone(),
        };
        let mut column = Ragged::new(dtype, RowKind::Torch, Template::flat()).unwrap();
        column.push(row.clone()).unwrap();
        let view = view(&with("x", Column::Ragged(column)));
        let x = view.ragged("x").unwrap();
        assert_eq!((x.dtype(), x.row(0).unwrap().bytes()), (dtype, &row[..]));
    }
    let mut column = Ragged::new(Dtype::Complex64, RowKind::Numpy, Template::flat()).unwrap();
    column.push(vec![0xfe; 16]).unwrap();
    let (header, _) = Plan::new(&with("x", Column::Ragged(column)), &Options::default())
        .unwrap()
        .encode(1)
        .unwrap();
    let index = String::from_utf8(header[64..].to_vec()).unwrap();
    let unknown = index.replace("complex64", "complex65");
    assert_ne!(unknown, index);
    assert!(Header::parse(&seal(&header, unknown.as_bytes())).is_err());
}

/// Shapes and element types of arrays without bytes are kept.
#[test]
fn f47_arrays_without_bytes() {
    for shape in [&[0u64][..], &[0, 128], &[5, 0]] {
        let mut column =
            Ragged::new(Dtype::Bfloat16, RowKind::Torch, Template::tail(shape[1..].to_vec()))
                .unwrap();
        column.push_shaped(shape, vec![]).unwrap();
        column.push_shaped(shape, vec![]).unwrap();
        let view = view(&with("x", Column::Ragged(column)));
        let x = view.ragged("x").unwrap();
        assert_eq!((x.shape(0).as_deref(), x.dtype()), (Some(shape), Dtype::Bfloat16));
        let meta = TensorMeta::new(Dtype::Int8, shape).unwrap();
        let mut rollout = Rollout::default();
        let dense = Dense::new(Library::Torch, meta.clone(), vec![]).unwrap();
        rollout.batch.insert("d".into(), Column::Dense(dense));
        let Column::Dense(back) = self::view(&rollout).column("d").unwrap() else { panic!() };
        assert_eq!(back.meta(), &meta);
    }
    assert_eq!(view(&Rollout::default()).rollout().unwrap().rows().unwrap(), 0, "an empty dict");
}

/// The version is looked at before anything else, an unknown codec is named, and what Python has
/// as a list, an array or a tensor comes back as that. The samples are what both releases write.
#[test]
fn f49_versions_codecs_and_kinds() {
    let row = || Ragged::from_rows(RowKind::List, [&[1i64][..]]);
    let (mut header, _) = Plan::new(&with("x", Column::Ragged(row())), &Options::default())
        .unwrap()
        .encode(1)
        .unwrap();
    header[8] += 1;
    assert_eq!(Header::parse(&header).unwrap_err().kind(), ErrorKind::Unsupported);

    let golden = Golden::load("sample1");
    let text = golden.reference.as_ref().unwrap();
    let next = text.replacen("\"version\": 1", "\"version\": 3", 1);
    assert_ne!(&next, text);
    assert!(Reference::parse(next.as_bytes()).is_err());
    let other = text.replacen("typed_ragged", "typed_ragged_2", 1);
    let reference = Reference::parse(other.as_bytes()).unwrap();
    let error = Reader::new(&golden.dump.objects).rollout(&reference).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.context("codec").is_some_and(|codec| codec.contains("typed_ragged_2")));
    let manifest = golden.manifest_key().to_owned();
    let mut store = golden.dump.objects.clone();
    let bytes = store.get(&manifest).unwrap().unwrap();
    let bytes =
        String::from_utf8(bytes.to_vec()).unwrap().replacen("\"version\":1", "\"version\":2", 1);
    store.remove(&manifest).unwrap();
    store.insert(manifest.as_str(), bytes).unwrap();
    assert!(Reader::new(&store).members(&manifest).is_err());

    for kind in [RowKind::List, RowKind::Numpy, RowKind::Torch, RowKind::Mixed(vec![true, false])] {
        let rows = [&[1i64, 2][..], &[3]];
        let column = Ragged::from_rows(kind.clone(), rows);
        let expected = column.to_values().unwrap();
        let back = view(&with(
            "x",
            Column::Ragged(
                Ragged::from_values(&expected, None, None, rollout_codec::Rounding::Exact).unwrap(),
            ),
        ));
        let Column::Ragged(back) = back.column("x").unwrap() else { panic!() };
        assert_eq!(back.to_values().unwrap(), expected, "{kind:?}");
    }
    for name in SAMPLES {
        let golden = Golden::load(name);
        assert!(golden.decoded.contains("\"kinds\""), "{name} says what each value is");
    }
}

/// Truth values take a byte each, single numbers have no dimensions, and big-endian arrays are
/// turned round.
#[test]
fn f51_small_traps() {
    let mut rollout = Rollout::default();
    let mut flags = Ragged::new(Dtype::Bool, RowKind::Numpy, Template::flat()).unwrap();
    flags.push(vec![1; 7]).unwrap();
    let mut floats = Ragged::new(Dtype::Float32, RowKind::Numpy, Template::flat()).unwrap();
    floats.push(1.5f32.to_le_bytes().to_vec()).unwrap();
    rollout.non_tensor.insert("flags".into(), Column::Ragged(flags));
    rollout.non_tensor.insert("floats".into(), Column::Ragged(floats));
    let mut single = Ragged::irregular(Dtype::Float64, RowKind::Numpy);
    single.push_shaped(&[], 2.5f64.to_le_bytes().to_vec()).unwrap();
    rollout.non_tensor.insert("single".into(), Column::Ragged(single));
    let scalars = Scalars::new(Dtype::Bool, vec![1]).unwrap();
    rollout.non_tensor.insert("scalar".into(), Column::Scalars(scalars));
    let view = view(&rollout);
    for name in ["flags", "floats", "single"] {
        let range = view.header().field_range(name).unwrap();
        assert_eq!(range.start % ALIGNMENT, 0, "{name}");
    }
    assert_eq!(view.ragged("flags").unwrap().row(0).unwrap().bytes(), [1; 7]);
    let floats = view.ragged("floats").unwrap();
    assert_eq!(floats.row(0).unwrap().elements::<f32>().unwrap(), [1.5]);
    assert_eq!(view.ragged("single").unwrap().shape(0).unwrap(), [0u64; 0]);

    // Mooncake's member of a big-endian machine.
    let golden = Golden::load("sample3");
    let key = golden.manifest_key().to_owned();
    let mut store = golden.dump.objects.clone();
    let meta = store.keys().find(|key| key.ends_with("/meta")).unwrap().to_owned();
    let text = String::from_utf8(store.get(&meta).unwrap().unwrap().to_vec()).unwrap();
    let forged = text.replacen("<u2", ">u2", 1);
    assert_ne!(forged, text);
    store.remove(&meta).unwrap();
    store.insert(meta.as_str(), forged).unwrap();
    let decoded = Reader::new(&store).members(&key).unwrap().decoded().unwrap();
    let arr = decoded.get("values").unwrap().get("arr").unwrap();
    assert_eq!(*arr, json::parse(b"[0,256,512,768,1024]").unwrap());
    assert!(matches!(arr, Value::List(_)));
}
