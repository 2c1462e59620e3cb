//! A JSON form of decoded rollouts for people, tests and other languages.
//!
//! `layout` says how the record is arranged, `values` holds it as plain JSON, and `kinds` says what
//! Python object each value, and each row, is: `torch.float32[2, 3]`, `ndarray int64[5]`, `list`.
//! Bytes are `{"$bytes": "00ff"}`, floats that are not finite `{"$float": "nan"}`, and pictures
//! `{"$image": {"mode", "size", "bytes"}}`.

use indexmap::IndexMap;
use transport_core::{Error, ErrorKind, Result};

use crate::{Column, Ragged, Rollout, RowKind, Value, value::map};

/// How a rollout is arranged for its reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// One dict: meta, then arrays, then other columns, as `get(type="dict")` gives it.
    Flat,
    /// A dict of the three sections, as `get_dataproto` gives it.
    Envelope,
}

/// A field by its name: value and kind.
type Shown = (String, (Value, Value));

/// The whole record: `layout`, `values` and `kinds`.
pub fn decoded(rollout: &Rollout<'_>, layout: Layout) -> Result<Value> {
    let in_envelope = layout == Layout::Envelope;
    let sections = [
        ("batch", columns(&rollout.batch, in_envelope)?),
        ("non_tensor_batch", columns(&rollout.non_tensor, in_envelope)?),
        ("meta_info", meta(&rollout.meta)?),
    ];
    if in_envelope {
        let pick = |part: fn(&(Value, Value)) -> &Value| {
            let entry = |(name, fields): &(&str, Vec<Shown>)| {
                let fields = fields.iter().map(|(n, field)| (n.clone(), part(field).clone()));
                ((*name).to_owned(), Value::Map(fields.collect()))
            };
            Value::Map(sections.iter().map(entry).collect())
        };
        let (values, kinds) = (pick(|field| &field.0), pick(|field| &field.1));
        return Ok(map([("layout", "envelope".into()), ("values", values), ("kinds", kinds)]));
    }
    let [batch, non_tensor, meta] = sections.map(|(_, fields)| fields);
    let (mut values, mut kinds) = (IndexMap::new(), IndexMap::new());
    for (name, (value, kind)) in meta.into_iter().chain(batch).chain(non_tensor) {
        kinds.insert(name.clone(), kind);
        if values.insert(name.clone(), value).is_some() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "flatten rollout",
                "a name occurs in two sections",
            )
            .with("field", name)
            .remedy("read it as an envelope"));
        }
    }
    Ok(map([
        ("layout", "flat".into()),
        ("values", Value::Map(values)),
        ("kinds", Value::Map(kinds)),
    ]))
}

/// Plain JSON of a value; see the module for what JSON lacks.
pub fn plain(value: &Value) -> Result<Value> {
    Ok(match value {
        Value::Bytes(bytes) => map([("$bytes", Value::Str(hex(bytes)))]),
        Value::Float(x) if !x.is_finite() => {
            let name = match (x.is_nan(), x.is_sign_negative()) {
                (true, _) => "nan",
                (false, true) => "-inf",
                (false, false) => "inf",
            };
            map([("$float", name.into())])
        }
        Value::List(items) => Value::List(items.iter().map(plain).collect::<Result<_>>()?),
        Value::Map(entries) => Value::Map(
            entries
                .iter()
                .map(|(name, item)| Ok((name.clone(), plain(item)?)))
                .collect::<Result<_>>()?,
        ),
        Value::Array(array) => plain(&array.to_value()?)?,
        Value::Image(image) => {
            let size = image.size.map(|n| Value::Int(n.into())).to_vec();
            map([(
                "$image",
                map([
                    ("mode", Value::Str(image.mode.clone())),
                    ("size", Value::List(size)),
                    ("bytes", Value::Str(hex(&image.data))),
                ]),
            )])
        }
        other => other.clone(),
    })
}

/// The value that [`plain`] made this JSON of, but for arrays, which are lists in it.
pub fn unplain(value: &Value) -> Result<Value> {
    let bad = |why: &'static str| Error::new(ErrorKind::Corrupt, "read decoded values", why);
    Ok(match value {
        Value::List(items) => Value::List(items.iter().map(unplain).collect::<Result<_>>()?),
        Value::Map(entries) => match entries.first().map(|(name, item)| (name.as_str(), item)) {
            Some(("$bytes", hex)) if entries.len() == 1 => {
                let bytes = hex.as_str().and_then(unhex);
                Value::Bytes(bytes.ok_or_else(|| bad("$bytes is not hexadecimal"))?.into())
            }
            Some(("$float", name)) if entries.len() == 1 => Value::Float(match name.as_str() {
                Some("nan") => f64::NAN,
                Some("inf") => f64::INFINITY,
                Some("-inf") => f64::NEG_INFINITY,
                _ => return Err(bad("$float is none of nan, inf and -inf")),
            }),
            Some(("$image", parts)) if entries.len() == 1 => {
                let size = |i: usize| {
                    let n = parts.get("size")?.as_list()?.get(i)?.as_u64()?;
                    u32::try_from(n).ok()
                };
                let image = || {
                    Some(crate::Image {
                        mode: parts.get("mode")?.as_str()?.to_owned(),
                        size: [size(0)?, size(1)?],
                        format: None,
                        data: unhex(parts.get("bytes")?.as_str()?)?.into(),
                    })
                };
                Value::Image(image().ok_or_else(|| bad("$image lacks mode, size or bytes"))?)
            }
            _ => Value::Map(
                entries
                    .iter()
                    .map(|(name, item)| Ok((name.clone(), unplain(item)?)))
                    .collect::<Result<_>>()?,
            ),
        },
        other => other.clone(),
    })
}

fn meta(meta: &IndexMap<String, Value>) -> Result<Vec<Shown>> {
    meta.iter()
        .map(|(name, value)| {
            let mut kind = IndexMap::from([("value".to_owned(), Value::Str(value.kind()))]);
            if let Value::List(rows) = value {
                kind.insert("rows".into(), Value::List(rows.iter().map(row_kind).collect()));
            }
            Ok((name.clone(), (plain(value)?, Value::Map(kind))))
        })
        .collect()
}

fn columns(columns: &IndexMap<String, Column<'_>>, in_envelope: bool) -> Result<Vec<Shown>> {
    let field = |(name, column): (&String, &Column<'_>)| {
        let (value, kind) = match column {
            Column::Dense(dense) => {
                let array = dense.to_array();
                (plain(&Value::Array(array.clone()))?, map([("value", Value::Str(array.kind()))]))
            }
            column => {
                let rows = column.to_values()?;
                let holder = match column {
                    _ if in_envelope => format!("ndarray object[{}]", rows.len()),
                    Column::Ragged(ragged) if is_pool_view(ragged) => "_OwnerBackedList".into(),
                    _ => "list".into(),
                };
                let kinds = rows.iter().map(row_kind).collect();
                (
                    plain(&Value::List(rows))?,
                    map([("value", Value::Str(holder)), ("rows", Value::List(kinds))]),
                )
            }
        };
        Ok((name.clone(), (value, kind)))
    };
    columns.iter().map(|entry| field(entry).map_err(|e: Error| e.with("field", entry.0))).collect()
}

/// Whether Mooncake's reader gives the rows as views of its buffer pool, in a list of its own kind.
fn is_pool_view(ragged: &Ragged<'_>) -> bool {
    let regular = ragged.template().is_some_and(|template| template.before.is_empty());
    *ragged.kind() == RowKind::Numpy && regular && ragged.nbytes() > 0
}

fn row_kind(row: &Value) -> Value {
    match row {
        Value::Map(entries) => Value::Map(
            entries.iter().map(|(name, item)| (name.clone(), Value::Str(item.kind()))).collect(),
        ),
        Value::List(items)
            if !matches!(
                items.first(),
                None | Some(Value::Int(_) | Value::Float(_) | Value::Bool(_))
            ) =>
        {
            Value::List(items.iter().map(|item| Value::Str(item.kind())).collect())
        }
        other => Value::Str(other.kind()),
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut out, byte| {
        write!(out, "{byte:02x}").expect("writing to a string");
        out
    })
}

pub(crate) fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |c: u8| (c as char).to_digit(16).map(|d| d as u8);
    let pair = |p: &[u8]| match p {
        [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
        _ => None,
    };
    text.as_bytes().chunks(2).map(pair).collect()
}
