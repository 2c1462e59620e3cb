//! Rollouts of every kind of column, for property tests.

use indexmap::IndexMap;
use proptest::prelude::*;
use rollout_codec::{
    BlobKind, Blobs, Column, Dense, Image, Library, MediaList, Ragged, Rollout, RowKind, Scalars,
    Template, TensorDict, Value,
};
use transport_core::{Dtype, TensorMeta};

/// Whether two rollouts hold the same, bit for bit.
pub(crate) fn same_rollout(a: &Rollout<'_>, b: &Rollout<'_>) -> bool {
    let columns = |a: &IndexMap<String, Column<'_>>, b: &IndexMap<String, Column<'_>>| {
        a.len() == b.len() && a.iter().zip(b).all(|((n, a), (m, b))| n == m && same_column(a, b))
    };
    let meta = |a: &IndexMap<String, Value>, b: &IndexMap<String, Value>| {
        a.len() == b.len() && a.iter().zip(b).all(|((n, a), (m, b))| n == m && a.same(b))
    };
    columns(&a.batch, &b.batch) && columns(&a.non_tensor, &b.non_tensor) && meta(&a.meta, &b.meta)
}

fn same_column(a: &Column<'_>, b: &Column<'_>) -> bool {
    match (a, b) {
        (Column::Ragged(a), Column::Ragged(b)) => same_ragged(a, b),
        (Column::Dense(a), Column::Dense(b)) => a.to_array() == b.to_array(),
        (Column::Scalars(a), Column::Scalars(b)) => {
            a.dtype() == b.dtype() && a.data()[..] == b.data()[..] && a.nulls() == b.nulls()
        }
        (Column::TensorDict(a), Column::TensorDict(b)) => {
            a.nulls == b.nulls
                && a.columns.len() == b.columns.len()
                && a.columns
                    .iter()
                    .zip(&b.columns)
                    .all(|((n, a), (m, b))| n == m && same_ragged(a, b))
        }
        (Column::Blobs(a), Column::Blobs(b)) => {
            a.kind == b.kind && same_values(&a.to_values().unwrap(), &b.to_values().unwrap())
        }
        (Column::MediaList(a), Column::MediaList(b)) => {
            same_values(&a.to_values().unwrap(), &b.to_values().unwrap())
        }
        (Column::Nested(a), Column::Nested(b)) => {
            same_values(&a.to_values().unwrap(), &b.to_values().unwrap())
        }
        _ => false,
    }
}

fn same_values(a: &[Value], b: &[Value]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.same(b))
}

fn same_ragged(a: &Ragged<'_>, b: &Ragged<'_>) -> bool {
    a.dtype() == b.dtype()
        && a.kind() == b.kind()
        && a.template() == b.template()
        && a.rows() == b.rows()
        && (0..a.rows() as usize).all(|i| a.row(i) == b.row(i) && a.shape(i) == b.shape(i))
}

/// A rollout of up to 6 rows and one column of every kind, some left out.
pub(crate) fn any_rollout() -> impl Strategy<Value = Rollout<'static>> {
    (0usize..6).prop_flat_map(|rows| {
        let columns = prop::collection::vec(any_column(rows), 0..6);
        let dense = prop::option::of(any_dense(rows));
        let meta = prop::collection::vec(any_plain(), 0..3);
        (columns, dense, meta).prop_map(|(columns, dense, meta)| {
            let mut rollout = Rollout::default();
            for (i, column) in columns.into_iter().enumerate() {
                rollout.non_tensor.insert(format!("column {i}"), column);
            }
            if let Some(dense) = dense {
                rollout.batch.insert("dense".into(), Column::Dense(dense));
            }
            for (i, value) in meta.into_iter().enumerate() {
                rollout.meta.insert(format!("meta {i}"), value);
            }
            rollout
        })
    })
}

fn any_column(rows: usize) -> impl Strategy<Value = Column<'static>> {
    prop_oneof![
        any_ragged(rows).prop_map(Column::Ragged),
        any_irregular(rows).prop_map(Column::Ragged),
        any_scalars(rows).prop_map(Column::Scalars),
        any_blobs(rows).prop_map(Column::Blobs),
        any_media(rows).prop_map(Column::MediaList),
        any_dict(rows).prop_map(Column::TensorDict),
        any_nested(rows),
    ]
}

fn any_dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(Dtype::ALL.to_vec())
}

fn any_bytes(len: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), len)
}

fn any_ragged(rows: usize) -> impl Strategy<Value = Ragged<'static>> {
    let dims = || prop::collection::vec(0u64..4, 0..3);
    let kind = prop_oneof![
        Just(RowKind::Numpy),
        Just(RowKind::Torch),
        Just(RowKind::List),
        prop::collection::vec(any::<bool>(), rows).prop_map(RowKind::Mixed),
    ];
    let lengths = prop::collection::vec(prop::option::weighted(0.9, 0u64..6), rows);
    (any_dtype(), kind, dims(), dims(), lengths, any::<u8>()).prop_map(
        |(dtype, kind, before, after, lengths, salt)| {
            let template = Template { before: before.into(), after: after.into() };
            let mut column = Ragged::new(dtype, kind, template.clone()).unwrap();
            for (i, length) in lengths.into_iter().enumerate() {
                match length {
                    None => column.push_null(),
                    Some(length) => {
                        let shape = template.shape(length);
                        let meta = TensorMeta::new(dtype, shape.clone()).unwrap();
                        let bytes = noise(meta.nbytes(), salt.wrapping_add(i as u8 % 3));
                        column.push_shaped(&shape, bytes).unwrap();
                    }
                }
            }
            column
        },
    )
}

fn any_irregular(rows: usize) -> impl Strategy<Value = Ragged<'static>> {
    let shape = prop::collection::vec(0u64..4, 0..4);
    let shapes = prop::collection::vec(prop::option::weighted(0.9, shape), rows);
    (any_dtype(), shapes).prop_map(|(dtype, shapes)| {
        let mut column = Ragged::irregular(dtype, RowKind::Numpy);
        for (i, shape) in shapes.into_iter().enumerate() {
            match shape {
                None => column.push_null(),
                Some(shape) => {
                    let meta = TensorMeta::new(dtype, shape.clone()).unwrap();
                    column.push_shaped(&shape, noise(meta.nbytes(), i as u8)).unwrap();
                }
            }
        }
        column
    })
}

fn noise(len: u64, salt: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(salt)).collect()
}

fn any_dense(rows: usize) -> impl Strategy<Value = Dense<'static>> {
    let library = prop::sample::select(vec![Library::Numpy, Library::Torch]);
    (any_dtype(), library, prop::collection::vec(0u64..4, 0..3)).prop_map(
        move |(dtype, library, tail)| {
            let shape = [&[rows as u64][..], &tail].concat();
            let meta = TensorMeta::new(dtype, shape).unwrap();
            let bytes = noise(meta.nbytes(), 3);
            Dense::new(library, meta, bytes).unwrap()
        },
    )
}

fn any_scalars(rows: usize) -> impl Strategy<Value = Scalars<'static>> {
    let nulls = prop::collection::vec(prop::bool::weighted(0.1), rows);
    (any_dtype(), nulls).prop_flat_map(|(dtype, nulls)| {
        any_bytes(nulls.len() * dtype.size() as usize)
            .prop_map(move |bytes| Scalars::with_nulls(dtype, bytes, nulls.clone()).unwrap())
    })
}

fn any_plain() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(|n| Value::Int(n.into())),
        any::<u64>().prop_map(|n| Value::Int(n.into())),
        any::<f64>().prop_map(Value::Float),
        Just(Value::Float(f64::NAN)),
        "\\PC{0,8}".prop_map(Value::Str),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::List),
            prop::collection::vec(("\\PC{0,4}", inner), 0..4)
                .prop_map(|entries| Value::Map(entries.into_iter().collect())),
        ]
    })
}

fn any_blobs(rows: usize) -> impl Strategy<Value = Blobs<'static>> {
    let column = |kind: BlobKind, value: BoxedStrategy<Value>| {
        let row = prop::option::weighted(0.9, value);
        prop::collection::vec(row, rows).prop_map(move |rows| {
            let rows: Vec<_> = rows.into_iter().map(|row| row.unwrap_or(Value::Null)).collect();
            Blobs::from_values(kind, &rows).unwrap()
        })
    };
    let bytes = || prop::collection::vec(any::<u8>(), 0..9).prop_map(|b| Value::Bytes(b.into()));
    prop_oneof![
        column(BlobKind::Bytes, bytes().boxed()),
        column(BlobKind::Utf8, "\\PC{0,9}".prop_map(Value::Str).boxed()),
        column(BlobKind::Json, any_plain().boxed()),
        column(BlobKind::MessagePack, any_plain().boxed()),
        column(BlobKind::Media, any_item().boxed()),
    ]
}

fn any_item() -> impl Strategy<Value = Value> {
    let image = (1u32..3, 1u32..3).prop_map(|(w, h)| {
        Value::Image(Image {
            mode: "L".into(),
            size: [w, h],
            format: Some("PNG".into()),
            data: noise(u64::from(w * h), 5).into(),
        })
    });
    let bytes = prop::collection::vec(any::<u8>(), 0..9).prop_map(|b| Value::Bytes(b.into()));
    prop_oneof![bytes, image]
}

fn any_media(rows: usize) -> impl Strategy<Value = MediaList<'static>> {
    let row = prop_oneof![
        1 => Just(Value::Null),
        9 => prop::collection::vec(any_item(), 0..3).prop_map(Value::List),
    ];
    prop::collection::vec(row, rows).prop_map(|rows| MediaList::from_values(&rows).unwrap())
}

fn any_dict(rows: usize) -> impl Strategy<Value = TensorDict<'static>> {
    let columns = prop::collection::vec(any_ragged(rows), 0..3);
    let nulls = prop::collection::vec(prop::bool::weighted(0.1), rows);
    (columns, nulls).prop_map(|(columns, nulls)| {
        let mut dict = TensorDict { columns: IndexMap::new(), nulls };
        for (i, column) in columns.into_iter().enumerate() {
            let mut kept =
                Ragged::new(column.dtype(), RowKind::Torch, column.template().unwrap().clone())
                    .unwrap();
            for row in 0..dict.nulls.len() {
                match (column.row(row), column.shape(row)) {
                    (Some(bytes), Some(shape)) if !dict.nulls[row] => {
                        kept.push_shaped(&shape, bytes.to_vec()).unwrap();
                    }
                    _ => kept.push_null(),
                }
            }
            dict.columns.insert(format!("key {i}"), kept);
        }
        dict
    })
}

fn any_nested(rows: usize) -> impl Strategy<Value = Column<'static>> {
    let entry = |name: &'static str| {
        let value = prop_oneof![
            Just(Value::Null),
            prop::collection::vec(any::<u8>(), 0..5).prop_map(|b| Value::Bytes(b.into())),
        ];
        prop::option::of(value).prop_map(move |value| value.map(|v| (name.to_owned(), v)))
    };
    let row = (entry("a.b"), entry("c"), prop::option::of(0usize..3)).prop_map(|(a, b, list)| {
        let mut map: IndexMap<String, Value> = a.into_iter().chain(b).collect();
        if let Some(len) = list {
            let item = Value::Map(IndexMap::from([(
                "x".to_owned(),
                Value::Bytes(vec![len as u8].into()),
            )]));
            map.insert("l".into(), Value::List(vec![item; len]));
        }
        Value::Map(map)
    });
    let row = prop_oneof![1 => Just(Value::Null), 9 => row];
    prop::collection::vec(row, rows).prop_map(|mut rows| {
        // Names in order: structures are rebuilt with sorted names.
        for row in &mut rows {
            if let Value::Map(map) = row {
                map.sort_keys();
            }
        }
        Column::infer(&rows).unwrap()
    })
}
