//! What went wrong for others: reports F44 to F51, each with a test of its own here or named
//! where it is.
//!
//! The layouts of F45 and F46 are `native::equal_lengths_are_laid_out_like_unequal_ones` too, offsets
//! of F48 are `hostile::bad_offsets_are_named` and in `bad_input`, F50 is
//! `schema::readers_that_expect_something_else_are_told`, and the transfers of F47 are counted in the
//! tests of the transport.

use rollout_codec::{
    Array, Codec, Column, Dense, FieldSchema, Library, Ragged, Rollout, RowKind, RowShape, Scalars,
    Template, Value, json,
    mooncake::{MemoryStore, ObjectStore, Place, Reader, Reference, Writer},
    native::{ALIGNMENT, Header, Options, Plan, RolloutView},
};
use transport_core::{Dtype, ErrorKind, Result, TensorMeta};

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

/// As Mooncake's objects, and their reference.
fn objects(rollout: &Rollout<'_>) -> (MemoryStore, Result<Reference>) {
    let mut store = MemoryStore::default();
    let put = Writer::new(&mut store, "reports")
        .and_then(|mut writer| writer.put(rollout, &Place::default(), &Default::default()));
    (store, put)
}

/// Through Mooncake's objects and back.
fn stored(rollout: &Rollout<'_>) -> Rollout<'static> {
    let (store, reference) = objects(rollout);
    Reader::new(&store).rollout(&reference.unwrap()).unwrap()
}

/// The same of complex numbers and all others, through Mooncake's layout.
#[test]
fn f44_bits_through_mooncakes_layout() {
    for dtype in Dtype::ALL {
        let row: Vec<u8> = match dtype {
            Dtype::Bool => vec![0, 1, 1, 0],
            // NaNs, infinities and negative zeros among them, whatever the type.
            _ => [0x00, 0x80, 0xff, 0x7f, 0x01, 0xc1, 0xf0, 0x7e].repeat(4),
        };
        for kind in [RowKind::Torch, RowKind::Numpy] {
            let mut column = Ragged::new(dtype, kind.clone(), Template::flat()).unwrap();
            column.push(row.clone()).unwrap();
            column.push(Vec::new()).unwrap();
            let rollout = with("x", Column::Ragged(column));
            let (store, reference) = objects(&rollout);
            match reference {
                Ok(reference) => {
                    let back = Reader::new(&store).rollout(&reference).unwrap();
                    let Column::Ragged(back) = &back.non_tensor["x"] else { panic!("{dtype}") };
                    assert_eq!((back.dtype(), back.row(0)), (dtype, Some(&row[..])), "{kind:?}");
                }
                // Never a stand-in: an error that names the field and the type.
                Err(error) => {
                    assert_eq!(error.context("field"), Some("x"), "{error}");
                    assert!(error.to_string().contains(dtype.name()), "{error}");
                    assert_eq!(store.keys().count(), 0, "nothing is left");
                }
            }
        }
    }
}

/// Which dimension is ragged is the schema's, however long the rows of a batch happen to be.
#[test]
fn f45_equal_rows_do_not_change_the_ragged_dimension() {
    let schema = FieldSchema::new(Codec::RaggedTensor).shape(RowShape::Ragged(1));
    for lengths in [&[3u64, 3, 3][..], &[5, 5], &[3], &[0], &[0, 0], &[1, 4]] {
        let rows = lengths.iter().map(|&length| {
            let meta = TensorMeta::new(Dtype::Int64, [3, length]).unwrap();
            let bytes: Vec<u8> = (0..meta.nbytes()).map(|i| i as u8).collect();
            Value::Array(Array::new(Library::Torch, meta, bytes).unwrap())
        });
        let rows = Value::List(rows.collect());
        let rollout = with("x", schema.column(&rows).unwrap());
        for back in [view(&rollout).rollout().unwrap(), stored(&rollout)] {
            let Column::Ragged(x) = &back.non_tensor["x"] else { panic!() };
            assert_eq!(x.to_values().unwrap(), rows_of(&rows), "{lengths:?}");
        }
        let header = view(&rollout);
        let template = header.ragged("x").unwrap().template().unwrap().clone();
        assert_eq!((&*template.before, &*template.after), (&[3][..], &[][..]), "{lengths:?}");
    }
}

fn rows_of(list: &Value) -> Vec<Value> {
    let Value::List(rows) = list else { panic!("a list") };
    rows.clone()
}

/// Rows of three dimensions of which the last is ragged, and longer than the fixed ones.
#[test]
fn f46_no_tail_is_cut() {
    let mut column = Ragged::new(
        Dtype::Float32,
        RowKind::Torch,
        Template { before: [2, 3].into(), after: [].into() },
    )
    .unwrap();
    let rows: Vec<Vec<u8>> = [1u64, 17, 0, 4]
        .map(|length| (0..2 * 3 * length * 4).map(|i| (i * 7) as u8).collect())
        .to_vec();
    rows.iter().for_each(|row| column.push(row.clone()).unwrap());
    let rollout = with("x", Column::Ragged(column));
    for back in [view(&rollout).rollout().unwrap(), stored(&rollout)] {
        let Column::Ragged(x) = &back.non_tensor["x"] else { panic!() };
        for (i, row) in rows.iter().enumerate() {
            assert_eq!(x.row(i), Some(&row[..]), "row {i}");
            assert_eq!(x.shape(i).unwrap(), [2, 3, row.len() as u64 / 24]);
        }
    }
}

/// As many offsets as rows and one, and data of whole elements: anything else is an error.
#[test]
fn f48_counts_that_do_not_fit() {
    let column = Ragged::from_rows(RowKind::Numpy, [&[1i64][..], &[2, 3]]);
    let rollout = with("x", Column::Ragged(column));
    let (header, _) = Plan::new(&rollout, &Options::default()).unwrap().encode(1).unwrap();
    let index = String::from_utf8(header[64..].to_vec()).unwrap();
    for (from, to) in [
        ("\"len\":24", "\"len\":16"), // one offset too few: of two rows
        ("\"len\":24", "\"len\":32"), // and too many
        ("\"len\":24", "\"len\":20"), // and half of one
        ("\"len\":24", "\"len\":9223372036854775807"), // and more than there is memory
    ] {
        // The offsets come first in the data, and the values, as long by chance, after them.
        assert!(index.contains(from), "{index}");
        let forged = index.replacen(from, to, 1);
        assert!(Header::parse(&seal(&header, forged.as_bytes())).is_err(), "{to}");
        let at = index.rfind(from).unwrap();
        let forged = format!("{}{to}{}", &index[..at], &index[at + from.len()..]);
        assert!(Header::parse(&seal(&header, forged.as_bytes())).is_err(), "values: {to}");
    }
    let (store, reference) = objects(&rollout);
    let reference = reference.unwrap();
    for (member, sizes) in [("x.offsets", [8usize, 16, 32, 23]), ("x.data", [23, 16, 32, 0])] {
        for size in sizes {
            let mut store = store.clone();
            let key = store.keys().find(|key| key.ends_with(member)).map(str::to_owned);
            let key = key.unwrap_or_else(|| panic!("{member}"));
            store.remove(&key).unwrap();
            store.insert(key.as_str(), vec![0; size]).unwrap();
            let error = Reader::new(&store).rollout(&reference).unwrap_err();
            assert_ne!(error.kind(), ErrorKind::Unexpected, "{member} of {size}: {error}");
        }
    }
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
