//! Columns as rows of values, the way Python would hold them.

use bytes::Bytes;
use indexmap::IndexMap;
use transport_core::{Error, ErrorKind, Result, TensorMeta};

use crate::{
    Array, BlobKind, Blobs, Column, Dense, Image, MediaList, Piece, Pixels, Scalars, TensorDict,
    Value, element, json, msgpack, value::MAX_EMPTY_LISTS,
};

impl Column<'_> {
    /// One value a row. Arrays and bytes share the column's counted memory; borrowed memory is
    /// copied.
    pub fn to_values(&self) -> Result<Vec<Value>> {
        match self {
            Self::Ragged(c) => c.to_values(),
            Self::Dense(c) => c.to_values(),
            Self::Scalars(c) => c.to_values(),
            Self::Blobs(c) => c.to_values(),
            Self::MediaList(c) => c.to_values(),
            Self::TensorDict(c) => c.to_values(),
            Self::Nested(c) => c.to_values(),
        }
    }
}

impl Dense<'_> {
    /// One array a row; one number a row if the column has a single dimension.
    pub fn to_values(&self) -> Result<Vec<Value>> {
        let shape = &self.meta().shape()[1..];
        if shape.is_empty() {
            return element::values(self.meta().dtype(), self.data());
        }
        let row = TensorMeta::new(self.meta().dtype(), shape)?;
        if row.nbytes() == 0 && self.rows() > MAX_EMPTY_LISTS {
            return Err(Error::new(ErrorKind::Corrupt, "list array", "too many empty rows")
                .with("array", self.meta())
                .with("max", MAX_EMPTY_LISTS));
        }
        let bytes = self.data().to_bytes();
        let size = row.nbytes() as usize;
        (0..self.rows() as usize)
            .map(|i| {
                let data = bytes.slice(i * size..(i + 1) * size);
                Ok(Value::Array(Array::new(self.library(), row.clone(), data)?))
            })
            .collect()
    }
}

impl Scalars<'_> {
    /// One number a row, or null.
    pub fn to_values(&self) -> Result<Vec<Value>> {
        let mut values = element::values(self.dtype(), self.data())?;
        for (value, &null) in values.iter_mut().zip(self.nulls()) {
            if null {
                *value = Value::Null;
            }
        }
        Ok(values)
    }
}

impl Blobs<'_> {
    /// One value a row: text, bytes, what the JSON or MessagePack says, or a picture.
    pub fn to_values(&self) -> Result<Vec<Value>> {
        let value = |(i, row): (usize, &Option<Piece<'_>>)| {
            let Some(piece) = row else { return Ok(Value::Null) };
            match self.kind {
                BlobKind::Bytes => Ok(Value::Bytes(piece.to_bytes())),
                BlobKind::Utf8 => text(piece).map(|text| Value::Str(text.to_owned())),
                BlobKind::Json => json::parse(piece),
                BlobKind::MessagePack => msgpack::parse(&piece.to_bytes()),
                BlobKind::Media => {
                    media(piece.to_bytes(), self.pixels.get(i).and_then(Option::as_ref))
                }
            }
            .map_err(|e| e.with("row", i))
        };
        self.rows.iter().enumerate().map(value).collect()
    }

    /// Text rows.
    pub fn from_text<T: AsRef<str>>(rows: impl IntoIterator<Item = Option<T>>) -> Blobs<'static> {
        let piece = |row: Option<T>| {
            row.map(|text| Piece::Shared(Bytes::copy_from_slice(text.as_ref().as_bytes())))
        };
        Blobs {
            kind: BlobKind::Utf8,
            rows: rows.into_iter().map(piece).collect(),
            pixels: Vec::new(),
        }
    }

    /// Rows of `kind` from values; a value of another kind is an error that names the row.
    pub fn from_values(kind: BlobKind, values: &[Value]) -> Result<Blobs<'static>> {
        let mut pixels = Vec::new();
        let row = |(i, value): (usize, &Value)| -> Result<Option<Piece<'static>>> {
            let bytes: Bytes = match (kind, value) {
                // A null row is no JSON or MessagePack null: it has no bytes at all.
                (_, Value::Null) => return Ok(None),
                (BlobKind::Bytes | BlobKind::Media, Value::Bytes(bytes)) => bytes.clone(),
                (BlobKind::Media, Value::Image(image)) => {
                    pixels.resize(values.len(), None);
                    pixels[i] = Some(image.pixels());
                    image.data.clone()
                }
                (BlobKind::Utf8, Value::Str(text)) => Bytes::copy_from_slice(text.as_bytes()),
                (BlobKind::Json, value) => json::write(value, json::Style::COMPACT)?.into(),
                (BlobKind::MessagePack, value) => {
                    let mut out = Vec::new();
                    msgpack::write(value, &mut out)?;
                    out.into()
                }
                (kind, other) => return Err(unfit(kind, other)),
            };
            Ok(Some(bytes.into()))
        };
        let mut row = row;
        let rows = values
            .iter()
            .enumerate()
            .map(|(i, value)| row((i, value)).map_err(|e| e.with("row", i)))
            .collect::<Result<_>>()?;
        Ok(Blobs { kind, rows, pixels })
    }
}

impl MediaList<'_> {
    /// A list of bytes and pictures a row.
    pub fn to_values(&self) -> Result<Vec<Value>> {
        let mut items = self.items.iter();
        self.rows
            .iter()
            .map(|row| {
                let Some(count) = row else { return Ok(Value::Null) };
                let taken = items.by_ref().take(*count as usize);
                let list: Vec<_> = taken
                    .map(|item| media(item.data.to_bytes(), item.pixels.as_ref()))
                    .collect::<Result<_>>()?;
                if list.len() as u64 != *count {
                    return Err(Error::new(
                        ErrorKind::Corrupt,
                        "read media lists",
                        "rows count more items than there are",
                    ));
                }
                Ok(Value::List(list))
            })
            .collect()
    }

    /// Rows from lists of bytes and pictures.
    pub fn from_values(values: &[Value]) -> Result<MediaList<'static>> {
        let mut column = MediaList::default();
        for (i, value) in values.iter().enumerate() {
            match value {
                Value::Null => column.rows.push(None),
                Value::List(list) => {
                    column.rows.push(Some(list.len() as u64));
                    for item in list {
                        let (data, pixels) = match item {
                            Value::Bytes(bytes) => (bytes.clone(), None),
                            Value::Image(image) => (image.data.clone(), Some(image.pixels())),
                            other => return Err(unfit(BlobKind::Media, other).with("row", i)),
                        };
                        column.items.push(crate::MediaItem { data: data.into(), pixels });
                    }
                }
                other => return Err(unfit(BlobKind::Media, other).with("row", i)),
            }
        }
        Ok(column)
    }
}

impl TensorDict<'_> {
    /// One dict a row; a name that the row lacks is left out.
    pub fn to_values(&self) -> Result<Vec<Value>> {
        let mut rows: Vec<Option<IndexMap<String, Value>>> =
            self.nulls.iter().map(|&null| (!null).then(IndexMap::new)).collect();
        for (name, column) in &self.columns {
            for (row, value) in rows.iter_mut().zip(column.to_values()?) {
                if let (Some(row), false) = (row, value == Value::Null) {
                    row.insert(name.clone(), value);
                }
            }
        }
        Ok(rows.into_iter().map(|row| row.map_or(Value::Null, Value::Map)).collect())
    }
}

impl Image {
    pub(crate) fn pixels(&self) -> Pixels {
        Pixels { mode: self.mode.clone(), size: self.size, format: self.format.clone() }
    }
}

fn media(data: Bytes, pixels: Option<&Pixels>) -> Result<Value> {
    Ok(match pixels {
        None => Value::Bytes(data),
        Some(p) => Value::Image(Image {
            mode: p.mode.clone(),
            size: p.size,
            format: p.format.clone(),
            data,
        }),
    })
}

fn text(bytes: &[u8]) -> Result<&str> {
    std::str::from_utf8(bytes).map_err(|e| {
        Error::new(ErrorKind::Corrupt, "read text", "not UTF-8").with("byte", e.valid_up_to())
    })
}

fn unfit(kind: BlobKind, value: &Value) -> Error {
    Error::new(ErrorKind::InvalidInput, "make column", "a row of another kind")
        .with("expected", format_args!("{kind:?}"))
        .with("found", value.kind())
}
