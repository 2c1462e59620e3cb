//! From a column to the payloads of one field.

use bytes::Bytes;
use indexmap::IndexMap;
use transport_core::{Dtype, Error, ErrorKind, Result};

use super::{codec::escape, member::to_numpy, tensor};
use crate::{
    BlobKind, Blobs, Branch, Column, Dense, Library, MediaItem, MediaList, Nested, Piece, Pixels,
    Ragged, RowKind, Scalars, TensorDict, Value, value::map,
};

/// One payload, not yet cut into stored objects.
#[derive(Debug)]
pub(super) struct PayloadOut<'c> {
    /// Its entry in the metadata.
    pub(super) spec: Value,
    /// Its bytes, in order.
    pub(super) parts: Vec<Piece<'c>>,
    /// How it may be cut.
    pub(super) cut: Cut,
}

/// How a payload may be cut into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// After every so many bytes.
    Anywhere,
    /// Between parts only, unless one part alone is too large.
    BetweenParts,
    /// Never: a torch tensor is one object.
    Never,
}

/// A field made of several payloads.
#[derive(Debug)]
pub(super) struct FieldOut<'c> {
    pub(super) codec: &'static str,
    pub(super) metadata: IndexMap<String, Value>,
    pub(super) payloads: IndexMap<String, PayloadOut<'c>>,
}

/// The payloads of `column`; `inferred` adds why its codec was chosen, as Mooncake does for fields
/// without a schema. `path` is the field's place, which nested columns carry inside.
pub(super) fn encode<'c>(column: &Column<'c>, path: &str, inferred: bool) -> Result<FieldOut<'c>> {
    let mut field = match column {
        Column::Ragged(c) => ragged(c)?,
        Column::Scalars(c) => scalars(c)?,
        Column::Blobs(c) => blobs(c)?,
        Column::MediaList(c) => media_list(c)?,
        Column::TensorDict(c) => return tensor_dict(c),
        Column::Nested(c) => return nested(c, path),
        Column::Dense(_) => {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "encode column",
                "an array is no codec",
            )
            .remedy("put it in the batch section"));
        }
    };
    if inferred {
        explain(column, &mut field.metadata);
    }
    Ok(field)
}

/// The one payload of an array.
pub(super) fn dense<'c>(column: &Dense<'c>) -> Result<PayloadOut<'c>> {
    let (meta, data) = (column.meta(), column.data().clone());
    Ok(match column.library() {
        Library::Numpy => array(meta.dtype(), meta.shape(), vec![data])?,
        Library::Torch => {
            let spec = map([
                ("encoding", "torch_tensor".into()),
                ("dtype", Value::Str(format!("torch.{}", meta.dtype()))),
                ("shape", numbers(meta.shape())),
                ("element_size", meta.dtype().size().into()),
            ]);
            let header = Bytes::copy_from_slice(&tensor::header(meta)?);
            PayloadOut { spec, parts: vec![header.into(), data], cut: Cut::Never }
        }
    })
}

fn numbers(list: &[u64]) -> Value {
    Value::List(list.iter().map(|&n| n.into()).collect())
}

fn array<'c>(dtype: Dtype, shape: &[u64], parts: Vec<Piece<'c>>) -> Result<PayloadOut<'c>> {
    let spec = map([
        ("encoding", "ndarray".into()),
        ("dtype", Value::Str(to_numpy(dtype)?)),
        ("shape", numbers(shape)),
    ]);
    Ok(PayloadOut { spec, parts, cut: Cut::Anywhere })
}

fn bytes(parts: Vec<Piece<'_>>) -> PayloadOut<'_> {
    PayloadOut { spec: map([("encoding", "bytes".into())]), parts, cut: Cut::Anywhere }
}

fn int64<'c>(shape: &[u64], items: impl IntoIterator<Item = u64>) -> PayloadOut<'c> {
    let data: Vec<u8> = items.into_iter().flat_map(|n| (n as i64).to_le_bytes()).collect();
    array(Dtype::Int64, shape, vec![data.into()]).expect("numpy has int64")
}

fn flags<'c>(items: impl IntoIterator<Item = bool>) -> PayloadOut<'c> {
    let data: Vec<u8> = items.into_iter().map(u8::from).collect();
    array(Dtype::Bool, &[data.len() as u64], vec![data.into()]).expect("numpy has bool")
}

/// Sums of the first 0, 1, 2 .. lengths.
fn offsets<'c>(lengths: impl IntoIterator<Item = u64>) -> PayloadOut<'c> {
    let mut total = 0;
    let sums = lengths.into_iter().map(|len| {
        total += len; // lengths of memory that exists: no overflow
        total
    });
    let all: Vec<u64> = std::iter::once(0).chain(sums).collect();
    int64(&[all.len() as u64], all)
}

fn payloads<'c, const N: usize>(
    items: [(&str, PayloadOut<'c>); N],
) -> IndexMap<String, PayloadOut<'c>> {
    items.into_iter().map(|(name, payload)| (name.to_owned(), payload)).collect()
}

fn metadata<const N: usize>(entries: [(&str, Value); N]) -> IndexMap<String, Value> {
    entries.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn ragged<'c>(column: &Ragged<'c>) -> Result<FieldOut<'c>> {
    let rows = column.rows() as usize;
    let shapes: Vec<_> = (0..rows).map(|i| column.shape(i)).collect();
    let arrays = matches!(column.kind(), RowKind::Numpy | RowKind::Torch);
    // Rows that are all arrays share one layout; lists, and no rows at all, have another one, in
    // which a null row counts as an empty list.
    let dims = if arrays && rows > 0 { array_dims(&shapes) } else { list_dims(&shapes) };
    let size = column.dtype().size();
    let lengths =
        column.pieces().iter().map(|row| row.as_ref().map_or(0, |r| r.len() as u64 / size));
    let parts: Vec<_> = if arrays {
        column.pieces().iter().flatten().cloned().collect()
    } else {
        let empty = || Piece::Shared(Bytes::new());
        column.pieces().iter().map(|row| row.clone().unwrap_or_else(empty)).collect()
    };
    let total = column.nbytes() / size;
    let mut data = array(column.dtype(), &[total], parts)?;
    if data.parts.len() > 1 {
        data.cut = Cut::BetweenParts;
    }
    let shape_items = dims.shapes.iter().flatten().copied();
    let shape_table = int64(&[rows as u64, dims.width as u64], shape_items);
    let ndims: Vec<u8> = dims.ranks.iter().flat_map(|&n| (n as i16).to_le_bytes()).collect();
    let ndims = array(Dtype::Int16, &[rows as u64], vec![ndims.into()])?;
    let torch = *column.kind() == RowKind::Torch;
    let dtype = match torch {
        true => format!("torch.{}", column.dtype()),
        false => column.dtype().to_string(),
    };
    let (row_format, which) = match column.kind() {
        RowKind::Mixed(flags) => {
            ("mixed", Value::List(flags.iter().map(|&flag| Value::Bool(flag)).collect()))
        }
        RowKind::List if rows > 0 => ("list", Value::Null),
        _ => ("ndarray", Value::Null),
    };
    let mut metadata = metadata([
        ("dtype", Value::Str(dtype)),
        ("max_ndim", (dims.max_rank as u64).into()),
        ("shape_policy", "ragged".into()),
        ("row_format", row_format.into()),
        ("ndarray_rows", which),
    ]);
    if arrays && rows > 0 {
        metadata.insert("physical_layout".into(), "contiguous_flat".into());
    }
    Ok(FieldOut {
        codec: if torch { "ragged_tensor" } else { "typed_ragged" },
        metadata,
        payloads: payloads([
            ("data", data),
            ("offsets", offsets(lengths)),
            ("shapes", shape_table),
            ("ndims", ndims),
            ("nulls", flags(shapes.iter().map(Option::is_none))),
        ]),
    })
}

/// The table of shapes: `width` numbers a row, of which the first `ranks[row]` count.
struct Dims {
    max_rank: usize,
    width: usize,
    shapes: Vec<Vec<u64>>,
    ranks: Vec<usize>,
}

fn array_dims(shapes: &[Option<Vec<u64>>]) -> Dims {
    let mut present = shapes.iter().flatten();
    let max_rank = present.clone().map(Vec::len).max().unwrap_or(0);
    let width = max_rank.max(1);
    // Where all rows have the same tail, null rows have it too.
    let tail = present.next().and_then(|first| first.get(1..)).filter(|tail| {
        !tail.contains(&0) && shapes.iter().flatten().all(|s| s.get(1..) == Some(tail))
    });
    let row = |shape: &Option<Vec<u64>>| match (shape, tail) {
        (Some(shape), _) => padded(shape, width),
        (None, Some(tail)) => [&[0], tail].concat(),
        (None, None) => vec![0; width],
    };
    Dims {
        max_rank,
        width,
        shapes: shapes.iter().map(row).collect(),
        ranks: shapes.iter().map(|shape| shape.as_ref().map_or(0, Vec::len)).collect(),
    }
}

fn list_dims(shapes: &[Option<Vec<u64>>]) -> Dims {
    let empty = vec![0];
    let shapes: Vec<_> = shapes.iter().map(|shape| shape.as_ref().unwrap_or(&empty)).collect();
    let max_rank = shapes.iter().map(|shape| shape.len()).max().unwrap_or(0);
    let width = max_rank.max(1);
    Dims {
        max_rank,
        width,
        ranks: shapes.iter().map(|shape| shape.len()).collect(),
        shapes: shapes.into_iter().map(|shape| padded(shape, width)).collect(),
    }
}

fn padded(shape: &[u64], width: usize) -> Vec<u64> {
    let mut row = shape.to_vec();
    row.resize(width, 0);
    row
}

fn scalars<'c>(column: &Scalars<'c>) -> Result<FieldOut<'c>> {
    let rows = column.rows();
    Ok(FieldOut {
        codec: "ndarray",
        metadata: metadata([
            ("dtype", Value::Str(column.dtype().to_string())),
            ("shape", numbers(&[rows])),
        ]),
        payloads: payloads([
            ("data", array(column.dtype(), &[rows], vec![column.data().clone()])?),
            ("nulls", flags(column.nulls().iter().copied())),
        ]),
    })
}

fn blobs<'c>(column: &Blobs<'c>) -> Result<FieldOut<'c>> {
    let pixels = |i: usize| column.pixels.get(i).and_then(Option::as_ref);
    let mut metadata = IndexMap::new();
    if column.pixels.iter().any(Option::is_some) {
        let rows = column.rows.iter().enumerate();
        let list = rows.map(|(i, row)| encoding(row.is_some(), pixels(i)));
        metadata.insert("media_encodings".into(), Value::List(list.collect()));
        add_media_types(&mut metadata, "media_types", true);
    }
    let lengths = column.rows.iter().map(|row| row.as_ref().map_or(0, |r| r.len() as u64));
    Ok(FieldOut {
        codec: match column.kind {
            BlobKind::Bytes => "bytes_ragged",
            BlobKind::Utf8 => "utf8_ragged",
            BlobKind::Json => "json_ragged",
            BlobKind::MessagePack => "msgpack_ragged",
            BlobKind::Media => "media_bytes",
        },
        metadata,
        payloads: payloads([
            ("data", bytes(column.rows.iter().flatten().cloned().collect())),
            ("offsets", offsets(lengths)),
            ("nulls", flags(column.rows.iter().map(Option::is_none))),
        ]),
    })
}

fn add_media_types(metadata: &mut IndexMap<String, Value>, name: &str, source: bool) {
    metadata.insert(name.into(), Value::List(vec!["image/raw".into()]));
    if source {
        metadata.insert("encode_source".into(), "raw_pixels_from_object".into());
    }
}

fn encoding(present: bool, pixels: Option<&Pixels>) -> Value {
    match pixels {
        _ if !present => map([("kind", "null".into())]),
        None => map([("kind", "bytes".into())]),
        Some(pixels) => map([
            ("kind", "pil_raw".into()),
            ("mode", Value::Str(pixels.mode.clone())),
            ("size", numbers(&pixels.size.map(u64::from))),
            ("format", pixels.format.clone().map_or(Value::Null, Value::Str)),
        ]),
    }
}

fn media_list<'c>(column: &MediaList<'c>) -> Result<FieldOut<'c>> {
    let items: &[MediaItem<'c>] = &column.items;
    let list = items.iter().map(|item| encoding(true, item.pixels.as_ref())).collect();
    let mut metadata = metadata([
        ("encode_source", "raw_pixels_from_object".into()),
        ("media_encodings", Value::List(list)),
    ]);
    if items.iter().any(|item| item.pixels.is_some()) {
        add_media_types(&mut metadata, "media_types", false);
    }
    Ok(FieldOut {
        codec: "media_list_ragged",
        metadata,
        payloads: payloads([
            ("data", bytes(items.iter().map(|item| item.data.clone()).collect())),
            ("row_offsets", offsets(column.rows.iter().map(|row| row.unwrap_or(0)))),
            ("byte_offsets", offsets(items.iter().map(|item| item.data.len() as u64))),
            ("nulls", flags(column.rows.iter().map(Option::is_none))),
        ]),
    })
}

fn tensor_dict<'c>(column: &TensorDict<'c>) -> Result<FieldOut<'c>> {
    let mut payloads = payloads([("null_mask", flags(column.nulls.iter().copied()))]);
    let mut codecs = IndexMap::new();
    for (key, tensors) in &column.columns {
        if key.is_empty() || key.contains(['.', '/', '\\']) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "encode column",
                "Mooncake allows no empty key and no '.', '/' or '\\' in one",
            )
            .with("key", format_args!("{key:?}")));
        }
        let field = ragged(tensors).map_err(|e| e.with("key", key))?;
        if field.codec != "ragged_tensor" {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "encode column",
                "Mooncake's dicts hold torch tensors only",
            )
            .with("key", key));
        }
        for (name, payload) in field.payloads {
            payloads.insert(format!("{key}.{name}"), payload);
        }
        codecs.insert(key.clone(), Value::Map(field.metadata));
    }
    let keys = column.columns.keys().map(|key| Value::Str(key.clone()));
    Ok(FieldOut {
        codec: "ragged_tensor_dict",
        metadata: metadata([
            ("keys", Value::List(keys.collect())),
            ("key_codecs", Value::Map(codecs)),
        ]),
        payloads,
    })
}

fn nested<'c>(column: &Nested<'c>, path: &str) -> Result<FieldOut<'c>> {
    let mut out = NestedOut::default();
    out.add(&column.root, path)?;
    let mut payloads = out.node_payloads;
    payloads.extend(out.leaf_payloads);
    Ok(FieldOut {
        codec: "structured_recursive",
        metadata: metadata([
            ("schema_source", "inferred_from_runtime_values".into()),
            ("structure_version", 1.into()),
            ("root_path", path.into()),
            ("nodes", Value::List(out.nodes)),
            ("leaves", Value::List(out.leaves)),
        ]),
        payloads,
    })
}

#[derive(Default)]
struct NestedOut<'c> {
    nodes: Vec<Value>,
    leaves: Vec<Value>,
    node_payloads: IndexMap<String, PayloadOut<'c>>,
    leaf_payloads: IndexMap<String, PayloadOut<'c>>,
}

impl<'c> NestedOut<'c> {
    fn add(&mut self, branch: &Branch<'c>, path: &str) -> Result<()> {
        let (presence, node_type, children, lengths) = match branch {
            Branch::Leaf { missing, column } => return self.add_leaf(missing, column, path),
            Branch::Dict { presence, children } => {
                let names = children.keys().map(|name| Value::Str(name.clone())).collect();
                (presence, "dict", names, None)
            }
            Branch::List { presence, lengths, children } => {
                let positions = (0..children.len()).map(|i| Value::Int(i as i128)).collect();
                (presence, "list", positions, Some(lengths))
            }
        };
        let id = self.nodes.len();
        let mut node = metadata([
            ("id", Value::Int(id as i128)),
            ("path", path.into()),
            ("node_type", node_type.into()),
            ("children", Value::List(children)),
        ]);
        let mut payload = |kind: &str, payload| {
            let name = format!("node.{id}.{kind}");
            node.insert(format!("{kind}_payload"), Value::Str(name.clone()));
            self.node_payloads.insert(name, payload);
        };
        payload("missing", flags(presence.missing.iter().copied()));
        payload("row_mask", flags(presence.present.iter().copied()));
        if let Some(lengths) = lengths {
            payload("lengths", int64(&[lengths.len() as u64], lengths.iter().copied()));
        }
        self.nodes.push(Value::Map(node));
        match branch {
            Branch::Dict { children, .. } => children
                .iter()
                .try_for_each(|(name, child)| self.add(child, &format!("{path}.{}", escape(name)))),
            Branch::List { children, .. } => children
                .iter()
                .enumerate()
                .try_for_each(|(i, child)| self.add(child, &format!("{path}[{i}]"))),
            Branch::Leaf { .. } => unreachable!("returned above"),
        }
    }

    fn add_leaf(&mut self, missing: &[bool], column: &Column<'c>, path: &str) -> Result<()> {
        let id = self.leaves.len();
        let field = encode(column, path, true).map_err(|e| e.with("path", path))?;
        let mut members = IndexMap::new();
        let missing = ("missing".to_owned(), flags(missing.iter().copied()));
        for (name, payload) in field.payloads.into_iter().chain([missing]) {
            let global = format!("leaf.{id}.{name}");
            members.insert(name, Value::Str(global.clone()));
            self.leaf_payloads.insert(global, payload);
        }
        self.leaves.push(map([
            ("id", Value::Int(id as i128)),
            ("path", path.into()),
            ("codec", field.codec.into()),
            ("rows", column.rows().into()),
            ("metadata", Value::Map(field.metadata)),
            ("payload_members", Value::Map(members)),
        ]));
        Ok(())
    }
}

/// Why the codec was chosen, in Mooncake's words.
fn explain(column: &Column<'_>, metadata: &mut IndexMap<String, Value>) {
    let (reason, normalized) = match column {
        Column::Ragged(c) => match c.kind() {
            RowKind::Torch => ("all non-null rows are Tensor", "torch.Tensor"),
            RowKind::Numpy => ("all rows are numeric ndarray", "numeric sequence"),
            RowKind::List | RowKind::Mixed(_) => {
                ("all rows are numeric sequences", "numeric sequence")
            }
        },
        Column::Scalars(_) => ("all rows are numeric scalar", "numeric scalar"),
        Column::MediaList(_) => ("all rows are media lists", "media list"),
        Column::Blobs(c) => match c.kind {
            BlobKind::Bytes => ("all rows are bytes-like", "bytes-like"),
            BlobKind::Utf8 => ("all rows are str", "str"),
            BlobKind::Media => ("all rows are media", "media"),
            BlobKind::MessagePack => ("all rows are msgpack-like", "msgpack"),
            BlobKind::Json => ("all rows are null or missing", "json"),
        },
        Column::Dense(_) | Column::TensorDict(_) | Column::Nested(_) => return,
    };
    metadata.insert("schema_source".into(), "inferred_from_runtime_values".into());
    metadata.insert("decision_reason".into(), reason.into());
    metadata.insert("normalized_type".into(), normalized.into());
    if matches!(column, Column::Ragged(c) if *c.kind() == RowKind::Numpy) {
        metadata.insert("recursive_source".into(), "ndarray".into());
    }
}
