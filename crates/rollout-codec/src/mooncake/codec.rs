//! From the payloads of one field to a column.

use bytes::Bytes;
use indexmap::IndexMap;
use transport_core::{Dtype, Error, ErrorKind, Result};

use super::{Encoded, Member, MemberData};
use crate::{
    Array, BlobKind, Blobs, Branch, Column, MAX_TREE_DEPTH, MediaItem, MediaList, Nested, Pixels,
    Presence, Ragged, RowKind, Scalars, TensorDict, Value, json, msgpack, ragged::common_template,
};

const OPERATION: &str = "decode column";

fn corrupt(why: &'static str) -> Error {
    Error::new(ErrorKind::Corrupt, OPERATION, why)
}

/// The payloads of one field, by payload name.
pub(super) struct Payloads<'m> {
    pub(super) members: &'m IndexMap<String, Member>,
    /// From payload name to member name.
    pub(super) names: IndexMap<String, String>,
}

impl Payloads<'_> {
    fn member(&self, payload: &str) -> Result<&MemberData> {
        self.names
            .get(payload)
            .and_then(|member| self.members.get(member))
            .map(|member| &member.data)
            .ok_or_else(|| {
                Error::new(ErrorKind::NotFound, OPERATION, "a payload is missing")
                    .with("payload", payload)
            })
    }

    fn array(&self, payload: &str) -> Result<&Array> {
        match self.member(payload)? {
            MemberData::Array(array) => Ok(array),
            _ => Err(corrupt("a payload is not an array").with("payload", payload)),
        }
    }

    fn bytes(&self, payload: &str) -> Result<&Bytes> {
        Ok(match self.member(payload)? {
            MemberData::Array(array) => array.data(),
            MemberData::Bytes(bytes) => bytes,
            MemberData::Jagged(_) => {
                return Err(corrupt("a payload is a nested tensor").with("payload", payload));
            }
        })
    }

    /// A truth value a row.
    fn flags(&self, payload: &str, rows: u64) -> Result<Vec<bool>> {
        let array = self.array(payload)?;
        if array.dtype() != Dtype::Bool || array.shape() != [rows] {
            return Err(corrupt("expected one truth value a row")
                .with("payload", payload)
                .with("rows", rows)
                .with("found", array.meta()));
        }
        Ok(array.data().iter().map(|&b| b != 0).collect())
    }

    /// Whole numbers that are not negative, of the given shape.
    fn numbers(&self, payload: &str, shape: &[u64]) -> Result<Vec<u64>> {
        let array = self.array(payload)?;
        let wrong = |why| corrupt(why).with("payload", payload).with("found", array.meta());
        if array.shape() != shape {
            return Err(
                wrong("not of the expected shape").with("expected", format_args!("{shape:?}"))
            );
        }
        let widths = match array.dtype() {
            Dtype::Int64 => array.data().chunks_exact(8).map(long).collect(),
            Dtype::Int16 => array.data().chunks_exact(2).map(short).collect(),
            _ => None::<Vec<u64>>,
        };
        widths.ok_or_else(|| wrong("expected int64 or int16 numbers that are not negative"))
    }

    /// Offsets of `rows` rows: from 0, never down, up to exactly `end`.
    fn offsets(&self, payload: &str, rows: u64, end: u64) -> Result<Vec<u64>> {
        let count = rows.checked_add(1).ok_or_else(|| corrupt("too many rows"))?;
        let offsets = self.numbers(payload, &[count])?;
        let wrong = |why| corrupt(why).with("payload", payload);
        if offsets[0] != 0 {
            return Err(wrong("offsets do not start at 0").with("found", offsets[0]));
        }
        if let Some(row) = offsets.windows(2).position(|pair| pair[0] > pair[1]) {
            return Err(wrong("offsets go down").with("row", row));
        }
        let last = offsets[rows as usize];
        if last != end {
            return Err(wrong("offsets do not end where the data ends")
                .with("expected", end)
                .with("found", last));
        }
        Ok(offsets)
    }
}

fn long(bytes: &[u8]) -> Option<u64> {
    u64::try_from(i64::from_le_bytes(bytes.try_into().ok()?)).ok()
}

fn short(bytes: &[u8]) -> Option<u64> {
    u64::try_from(i16::from_le_bytes(bytes.try_into().ok()?)).ok()
}

/// The column that the payloads of `encoded` hold.
pub(super) fn decode(
    members: &IndexMap<String, Member>,
    encoded: &Encoded,
) -> Result<Column<'static>> {
    let payloads = Payloads { members, names: encoded.members.clone() };
    leaf(&encoded.codec, encoded.rows, &encoded.metadata, &payloads)
}

fn leaf(
    codec: &str,
    rows: u64,
    metadata: &IndexMap<String, Value>,
    payloads: &Payloads<'_>,
) -> Result<Column<'static>> {
    let blobs = |kind| blobs(kind, rows, metadata, payloads).map(Column::Blobs);
    match codec {
        "typed_ragged" | "ragged_tensor" => {
            ragged(codec == "ragged_tensor", rows, metadata, payloads).map(Column::Ragged)
        }
        "ragged_tensor_dict" => tensor_dict(rows, metadata, payloads).map(Column::TensorDict),
        "ndarray" => {
            let array = payloads.array("data")?;
            if array.shape() != [rows] {
                return Err(corrupt("not one number a row").with("found", array.meta()));
            }
            let nulls = payloads.flags("nulls", rows)?;
            Scalars::with_nulls(array.dtype(), array.data().clone(), nulls).map(Column::Scalars)
        }
        "bytes_ragged" => blobs(BlobKind::Bytes),
        "media_bytes" => blobs(BlobKind::Media),
        "utf8_ragged" => blobs(BlobKind::Utf8),
        "json_ragged" => blobs(BlobKind::Json),
        "msgpack_ragged" => msgpack_rows(rows, payloads).map(Column::Blobs),
        "media_list_ragged" => media_list(rows, metadata, payloads).map(Column::MediaList),
        "structured_recursive" => nested(rows, metadata, payloads).map(Column::Nested),
        other => Err(Error::new(ErrorKind::Unsupported, OPERATION, "unknown codec")
            .with("codec", format_args!("{other:?}"))),
    }
}

fn ragged(
    torch: bool,
    rows: u64,
    metadata: &IndexMap<String, Value>,
    payloads: &Payloads<'_>,
) -> Result<Ragged<'static>> {
    let default = if torch { "torch.float32" } else { "int64" };
    let dtype: Dtype =
        metadata.get("dtype").map_or(Some(default), Value::as_str).unwrap_or_default().parse()?;
    let data = payloads.bytes("data")?;
    if let MemberData::Array(array) = payloads.member("data")?
        && array.dtype() != dtype
    {
        return Err(corrupt("the data is not of the declared element type")
            .with("declared", dtype)
            .with("found", array.meta()));
    }
    let size = dtype.size();
    if !(data.len() as u64).is_multiple_of(size) {
        return Err(corrupt("the data ends within an element").with("bytes", data.len()));
    }
    let offsets = payloads.offsets("offsets", rows, data.len() as u64 / size)?;
    let nulls = payloads.flags("nulls", rows)?;
    let ndims = payloads.numbers("ndims", &[rows])?;
    let width = match payloads.array("shapes")?.shape() {
        &[found, width] if found == rows => width,
        other => {
            return Err(corrupt("not one shape a row").with("found", format_args!("{other:?}")));
        }
    };
    let dims = payloads.numbers("shapes", &[rows, width])?;
    let shape = |row: usize| -> Result<&[u64]> {
        let start = row * width as usize;
        dims.get(start..start + width as usize)
            .and_then(|dims| dims.get(..ndims[row] as usize))
            .ok_or_else(|| corrupt("a row has more dimensions than shapes has").with("row", row))
    };
    let kind = match metadata.get("row_format").and_then(Value::as_str) {
        _ if torch => RowKind::Torch,
        Some("ndarray") => RowKind::Numpy,
        Some("mixed") => {
            let flags = metadata.get("ndarray_rows").and_then(Value::as_list);
            let flags = flags.and_then(|flags| {
                let flag = |flag: &Value| match flag {
                    Value::Bool(b) => Some(*b),
                    _ => None,
                };
                flags.iter().map(flag).collect::<Option<Vec<_>>>()
            });
            let flags = flags.filter(|flags| flags.len() as u64 == rows);
            RowKind::Mixed(flags.ok_or_else(|| corrupt("ndarray_rows is not one flag a row"))?)
        }
        _ => RowKind::List,
    };
    let mut shapes = Vec::with_capacity(nulls.len());
    for (row, &null) in nulls.iter().enumerate() {
        shapes.push(if null { &[][..] } else { shape(row)? });
    }
    let present = shapes.iter().zip(&nulls).filter(|&(_, null)| !null).map(|(&shape, _)| shape);
    let mut column = match common_template(present) {
        Some(template) => Ragged::new(dtype, kind, template)?,
        None => Ragged::irregular(dtype, kind),
    };
    for (row, shape) in shapes.into_iter().enumerate() {
        let bytes = (offsets[row] * size) as usize..(offsets[row + 1] * size) as usize;
        if !nulls[row] {
            column.push_shaped(shape, data.slice(bytes)).map_err(|e| {
                corrupt("a row does not match its shape").with("row", row).source(e)
            })?;
        } else if bytes.is_empty() {
            column.push_null();
        } else {
            return Err(corrupt("a null row has data").with("row", row));
        }
    }
    Ok(column)
}

fn tensor_dict(
    rows: u64,
    metadata: &IndexMap<String, Value>,
    payloads: &Payloads<'_>,
) -> Result<TensorDict<'static>> {
    let nulls = payloads.flags("null_mask", rows)?;
    let keys = metadata.get("keys").map_or(Some(&[][..]), Value::as_list);
    let keys = keys.ok_or_else(|| corrupt("keys is not a list"))?;
    let mut columns = IndexMap::new();
    for key in keys {
        let key = key.as_str().ok_or_else(|| corrupt("a key is not a text"))?;
        let about = metadata.get("key_codecs").and_then(|codecs| codecs.get(key));
        let about = about.and_then(Value::as_map).cloned().unwrap_or_default();
        let column = ragged(true, rows, &about, &payloads.below(&format!("{key}.")))
            .map_err(|e| e.with("key", key))?;
        let lonely = |row: usize| nulls[row] && column.row(row).is_some();
        if let Some(row) = (0..nulls.len()).find(|&row| lonely(row)) {
            return Err(corrupt("a null row has data").with("key", key).with("row", row));
        }
        if columns.insert(key.to_owned(), column).is_some() {
            return Err(corrupt("a key occurs twice").with("key", key));
        }
    }
    Ok(TensorDict { columns, nulls })
}

impl Payloads<'_> {
    /// The payloads whose names start with `prefix`, without it.
    fn below(&self, prefix: &str) -> Payloads<'_> {
        let names = self.names.iter().filter_map(|(name, member)| {
            Some((name.strip_prefix(prefix)?.to_owned(), member.clone()))
        });
        Payloads { members: self.members, names: names.collect() }
    }
}

fn blobs(
    kind: BlobKind,
    rows: u64,
    metadata: &IndexMap<String, Value>,
    payloads: &Payloads<'_>,
) -> Result<Blobs<'static>> {
    let data = payloads.bytes("data")?;
    let offsets = payloads.offsets("offsets", rows, data.len() as u64)?;
    let nulls = payloads.flags("nulls", rows)?;
    let pixels = match (kind, metadata.get("media_encodings")) {
        (BlobKind::Media, Some(list)) => pixel_layouts(list, rows)?,
        _ => Vec::new(),
    };
    let mut out = Vec::with_capacity(nulls.len());
    for (row, &null) in nulls.iter().enumerate() {
        let range = offsets[row] as usize..offsets[row + 1] as usize;
        out.push(match null {
            true if range.is_empty() => None,
            true => return Err(corrupt("a null row has data").with("row", row)),
            false => Some(data.slice(range).into()),
        });
    }
    let column = Blobs { kind, rows: out, pixels };
    check_rows(&column)?;
    Ok(column)
}

/// Reads text and JSON once, so that a column that was accepted can always be shown.
fn check_rows(column: &Blobs<'_>) -> Result<()> {
    for (row, bytes) in column.rows.iter().enumerate() {
        let Some(bytes) = bytes else { continue };
        let fine = match column.kind {
            BlobKind::Utf8 => std::str::from_utf8(bytes)
                .map(drop)
                .map_err(|e| corrupt("text is not UTF-8").source(e)),
            BlobKind::Json => json::parse(bytes).map(drop),
            _ => Ok(()),
        };
        fine.map_err(|e| e.with("row", row))?;
    }
    Ok(())
}

/// MessagePack rows are found by reading one value after the other; the offsets are only checked.
fn msgpack_rows(rows: u64, payloads: &Payloads<'_>) -> Result<Blobs<'static>> {
    let column = blobs(BlobKind::MessagePack, rows, &IndexMap::new(), payloads)?;
    for (row, bytes) in column.rows.iter().enumerate() {
        if let Some(bytes) = bytes {
            msgpack::parse(&bytes.to_bytes()).map_err(|e| e.with("row", row))?;
        }
    }
    Ok(column)
}

fn pixel_layouts(list: &Value, count: u64) -> Result<Vec<Option<Pixels>>> {
    let list = list.as_list().filter(|list| list.len() as u64 == count);
    let list = list.ok_or_else(|| corrupt("media_encodings is not one entry an item"))?;
    list.iter()
        .map(|about| {
            if about.get("kind").and_then(Value::as_str) != Some("pil_raw") {
                return Ok(None);
            }
            let size =
                |i: usize| u32::try_from(about.get("size")?.as_list()?.get(i)?.as_u64()?).ok();
            let mode = about.get("mode").and_then(Value::as_str);
            let (Some(mode), Some(width), Some(height)) = (mode, size(0), size(1)) else {
                return Err(corrupt("a picture has no mode or no size"));
            };
            let format = about.get("format").and_then(Value::as_str).map(str::to_owned);
            Ok(Some(Pixels { mode: mode.to_owned(), size: [width, height], format }))
        })
        .collect()
}

fn media_list(
    rows: u64,
    metadata: &IndexMap<String, Value>,
    payloads: &Payloads<'_>,
) -> Result<MediaList<'static>> {
    let data = payloads.bytes("data")?;
    let items = match payloads.array("byte_offsets")?.shape() {
        &[n] if n > 0 => n - 1,
        _ => return Err(corrupt("byte_offsets is not a list of at least one number")),
    };
    let bounds = payloads.offsets("byte_offsets", items, data.len() as u64)?;
    let starts = payloads.offsets("row_offsets", rows, items)?;
    let nulls = payloads.flags("nulls", rows)?;
    let pixels = match metadata.get("media_encodings") {
        Some(list) => pixel_layouts(list, items)?,
        None => vec![None; items as usize],
    };
    let mut column = MediaList::default();
    for (row, &null) in nulls.iter().enumerate() {
        let count = starts[row + 1] - starts[row];
        column.rows.push(match null {
            true if count == 0 => None,
            true => return Err(corrupt("a null row has items").with("row", row)),
            false => Some(count),
        });
    }
    for (pair, pixels) in bounds.windows(2).zip(pixels) {
        let data = data.slice(pair[0] as usize..pair[1] as usize).into();
        column.items.push(MediaItem { data, pixels });
    }
    Ok(column)
}

fn nested(
    rows: u64,
    metadata: &IndexMap<String, Value>,
    payloads: &Payloads<'_>,
) -> Result<Nested<'static>> {
    if metadata.get("structure_version").is_some_and(|v| *v != Value::Int(1)) {
        return Err(Error::new(ErrorKind::Unsupported, OPERATION, "unknown structure version"));
    }
    let by_path = |name: &'static str| -> Result<IndexMap<String, &Value>> {
        let list = metadata.get(name).map_or(Some(&[][..]), Value::as_list);
        let list = list.ok_or_else(|| corrupt("not a list").with("entry", name))?;
        let mut map = IndexMap::new();
        for item in list {
            let path = item.get("path").and_then(Value::as_str);
            let path = path.ok_or_else(|| corrupt("no path").with("entry", name))?;
            if map.insert(path.to_owned(), item).is_some() {
                return Err(corrupt("a path occurs twice").with("path", path));
            }
        }
        Ok(map)
    };
    let tree = Tree { rows, nodes: by_path("nodes")?, leaves: by_path("leaves")?, payloads };
    let root = metadata.get("root_path").and_then(Value::as_str);
    let root = root.ok_or_else(|| corrupt("no root_path"))?;
    Ok(Nested { root: tree.branch(root, 0)? })
}

struct Tree<'m> {
    rows: u64,
    nodes: IndexMap<String, &'m Value>,
    leaves: IndexMap<String, &'m Value>,
    payloads: &'m Payloads<'m>,
}

impl Tree<'_> {
    fn branch(&self, path: &str, depth: usize) -> Result<Branch<'static>> {
        let at = |e: Error| e.with("path", path);
        if depth > MAX_TREE_DEPTH {
            return Err(at(corrupt("nested too deeply")));
        }
        match (self.nodes.get(path), self.leaves.get(path)) {
            (Some(node), None) => self.node(path, node, depth),
            (None, Some(leaf)) => self.leaf(leaf).map_err(at),
            (None, None) => Err(at(corrupt("nothing describes this place"))),
            (Some(_), Some(_)) => Err(at(corrupt("both a node and a leaf"))),
        }
    }

    fn node(&self, path: &str, node: &Value, depth: usize) -> Result<Branch<'static>> {
        let flags = |name: &str, otherwise: bool| match node.get(name).and_then(Value::as_str) {
            Some(payload) => self.payloads.flags(payload, self.rows),
            None => Ok(vec![otherwise; self.rows as usize]),
        };
        let presence = Presence {
            missing: flags("missing_payload", false)?,
            present: flags("row_mask_payload", true)?,
        };
        let children = node.get("children").and_then(Value::as_list);
        let children = children.ok_or_else(|| corrupt("a node without children"))?;
        match node.get("node_type").and_then(Value::as_str) {
            Some("dict") => {
                let mut map = IndexMap::new();
                for name in children {
                    let name = name.as_str().ok_or_else(|| corrupt("a name is not a text"))?;
                    let child = self.branch(&format!("{path}.{}", escape(name)), depth + 1)?;
                    if map.insert(name.to_owned(), child).is_some() {
                        return Err(corrupt("a name occurs twice").with("name", name));
                    }
                }
                Ok(Branch::Dict { presence, children: map })
            }
            Some("list") => {
                let mut list = Vec::new();
                for (i, index) in children.iter().enumerate() {
                    if index.as_u64() != Some(i as u64) {
                        return Err(
                            corrupt("positions of a list are not 0, 1, 2 ..").with("path", path)
                        );
                    }
                    list.push(self.branch(&format!("{path}[{i}]"), depth + 1)?);
                }
                let lengths = match node.get("lengths_payload").and_then(Value::as_str) {
                    Some(payload) => self.payloads.numbers(payload, &[self.rows])?,
                    None => vec![list.len() as u64; self.rows as usize],
                };
                if let Some(row) = lengths.iter().position(|&len| len > list.len() as u64) {
                    return Err(corrupt("a list is longer than its positions")
                        .with("path", path)
                        .with("row", row));
                }
                Ok(Branch::List { presence, lengths, children: list })
            }
            _ => Err(corrupt("unknown node type").with("path", path)),
        }
    }

    fn leaf(&self, about: &Value) -> Result<Branch<'static>> {
        let encoded = Encoded::from_value(about)?;
        if encoded.rows != self.rows || encoded.codec == "structured_recursive" {
            return Err(corrupt("a leaf with other rows or a structure of its own"));
        }
        // Payload names of a leaf are payload names of the field, which name the members.
        let global = |name: &String| self.payloads.names.get(name).cloned();
        let names = encoded
            .members
            .iter()
            .map(|(local, name)| Some((local.clone(), global(name)?)))
            .collect::<Option<IndexMap<_, _>>>()
            .ok_or_else(|| corrupt("a payload of a leaf is not a payload of the field"))?;
        let payloads = Payloads { members: self.payloads.members, names };
        Ok(Branch::Leaf {
            missing: payloads.flags("missing", self.rows)?,
            column: Box::new(leaf(&encoded.codec, self.rows, &encoded.metadata, &payloads)?),
        })
    }
}

/// A name as it stands in a path.
pub(super) fn escape(name: &str) -> String {
    name.replace('\\', "\\\\").replace('.', "\\.").replace('[', "\\[")
}
