//! Schemas: what each field of a rollout is, said once instead of guessed from every batch.

use indexmap::IndexMap;
use transport_core::{Dtype, Error, ErrorKind, Result, TensorMeta};

use crate::{
    BlobKind, Blobs, Column, Dense, Library, MediaList, Ragged, Rollout, Rounding, RowKind,
    Scalars, Section, Template, TensorDict, Value, element, mooncake,
};

/// How the rows of a field are stored, by Mooncake's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// `auto`: whatever fits the rows.
    Auto,
    /// `tensor`: one array over all rows.
    Tensor,
    /// `ndarray`: one number a row.
    Ndarray,
    /// `typed_ragged`: numeric rows, arrays or lists.
    TypedRagged,
    /// `ragged_tensor`: numeric rows that come back as torch tensors.
    RaggedTensor,
    /// `ragged_tensor_dict`: a dict from name to tensor a row.
    RaggedTensorDict,
    /// `bytes_ragged`.
    Bytes,
    /// `media_bytes`: bytes or a picture a row.
    Media,
    /// `media_list_ragged`: a list of bytes or pictures a row.
    MediaList,
    /// `utf8_ragged`.
    Utf8,
    /// `json_ragged`.
    Json,
    /// `msgpack_ragged`.
    MessagePack,
    /// `structured_recursive`: dicts and lists with arrays or bytes inside.
    Nested,
}

impl Codec {
    const NAMES: [(&str, Self); 13] = [
        ("auto", Self::Auto),
        ("tensor", Self::Tensor),
        ("ndarray", Self::Ndarray),
        ("typed_ragged", Self::TypedRagged),
        ("ragged_tensor", Self::RaggedTensor),
        ("ragged_tensor_dict", Self::RaggedTensorDict),
        ("bytes_ragged", Self::Bytes),
        ("media_bytes", Self::Media),
        ("media_list_ragged", Self::MediaList),
        ("utf8_ragged", Self::Utf8),
        ("json_ragged", Self::Json),
        ("msgpack_ragged", Self::MessagePack),
        ("structured_recursive", Self::Nested),
    ];

    /// The name, such as `typed_ragged`.
    pub fn name(self) -> &'static str {
        let found = Self::NAMES.iter().find(|(_, codec)| *codec == self);
        found.expect("every codec has a name").0
    }

    /// The codec of that name; an unknown name is an error.
    pub fn parse(name: &str) -> Result<Self> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, codec)| *codec).ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "read schema", "unknown codec")
                .with("codec", format_args!("{name:?}"))
                .remedy(format!("use one of {}", Self::NAMES.map(|(name, _)| name).join(", ")))
        })
    }
}

/// Which dimension of a row is ragged, and what the others are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowShape {
    /// Anything: rows without a common shape are stored with a shape each.
    Any,
    /// This dimension is ragged; the others are the same in all rows, whatever they are.
    Ragged(usize),
    /// Exactly this.
    Exactly(Template),
}

/// What one field is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldSchema {
    /// How its rows are stored.
    pub codec: Codec,
    /// Where it belongs.
    pub section: Section,
    /// Element type; the data's own if `None`.
    pub dtype: Option<Dtype>,
    /// Whether rows may be null.
    pub nullable: bool,
    /// Whether numbers may be rounded to `dtype`.
    pub rounding: Rounding,
    /// Shape of ragged rows.
    pub shape: RowShape,
    /// Names that dict rows may have; any if `None`.
    pub keys: Option<Vec<String>>,
    /// The codec was found by looking at rows and not declared by anyone. Mooncake's layout
    /// carries a note about it.
    pub inferred: bool,
}

impl FieldSchema {
    /// A field of rows that may not be null, with the data's own element type.
    pub fn new(codec: Codec) -> Self {
        let section = if codec == Codec::Tensor { Section::Batch } else { Section::NonTensor };
        Self {
            codec,
            section,
            dtype: None,
            nullable: false,
            rounding: Rounding::Exact,
            shape: RowShape::Any,
            keys: None,
            inferred: false,
        }
    }

    /// A value that belongs to no row.
    pub fn meta() -> Self {
        Self { section: Section::Meta, ..Self::new(Codec::Auto) }
    }

    /// Sets the element type.
    #[must_use]
    pub fn dtype(self, dtype: Dtype) -> Self {
        Self { dtype: Some(dtype), ..self }
    }

    /// Allows null rows.
    #[must_use]
    pub fn nullable(self) -> Self {
        Self { nullable: true, ..self }
    }

    /// Says which dimension of a row is ragged.
    #[must_use]
    pub fn shape(self, shape: RowShape) -> Self {
        Self { shape, ..self }
    }

    /// Lets floats be rounded to the element type.
    #[must_use]
    pub fn rounded(self) -> Self {
        Self { rounding: Rounding::Nearest, ..self }
    }

    /// Reads Mooncake's `FieldSchema(codec, nullable, metadata)` written as JSON. Its readers
    /// round floats to `dtype`, so this one does.
    pub fn from_value(value: &Value) -> Result<Self> {
        let bad = |why: &'static str| Error::new(ErrorKind::ConfigInvalid, "read schema", why);
        let codec = value.get("codec").and_then(Value::as_str);
        let mut field = Self::new(Codec::parse(codec.ok_or_else(|| bad("no codec"))?)?).rounded();
        field.nullable = match value.get("nullable") {
            None => true,
            Some(Value::Bool(nullable)) => *nullable,
            Some(_) => return Err(bad("nullable is not a truth value")),
        };
        let entry = |name| value.get("metadata").and_then(|metadata| metadata.get(name));
        if let Some(section) = entry("section") {
            field.section = match section.as_str() {
                Some("batch") => Section::Batch,
                Some("non_tensor_batch") => Section::NonTensor,
                Some("meta_info") => Section::Meta,
                _ => return Err(bad("unknown section")),
            };
        }
        if let Some(dtype) = entry("dtype") {
            field.dtype = Some(dtype.as_str().ok_or_else(|| bad("dtype is not a text"))?.parse()?);
        }
        if let Some(keys) = entry("keys") {
            let text = |key: &Value| key.as_str().map(str::to_owned);
            let keys = keys.as_list().and_then(|keys| keys.iter().map(text).collect());
            field.keys = Some(keys.ok_or_else(|| bad("keys is not a list of texts"))?);
        }
        Ok(field)
    }

    /// The column of `value`: a list with one entry a row, or an array over all rows.
    pub fn column(&self, value: &Value) -> Result<Column<'static>> {
        let column = self.build(value)?;
        if !self.nullable && column.has_nulls() {
            let null = |row: &Value| *row == Value::Null;
            let row = value.as_list().and_then(|rows| rows.iter().position(null));
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "make column",
                "a null where the schema allows none",
            )
            .with("row", row.unwrap_or(0))
            .remedy("mark the field as nullable"));
        }
        Ok(column)
    }

    fn build(&self, value: &Value) -> Result<Column<'static>> {
        let rows;
        let values = match (self.codec, value) {
            (Codec::Tensor, value) => return self.tensor(value).map(Column::Dense),
            // An array where nothing else was asked for is an array.
            (Codec::Auto, Value::Array(_)) => return self.tensor(value).map(Column::Dense),
            (_, Value::List(rows)) => rows,
            (_, Value::Array(array)) if !array.shape().is_empty() => {
                let column =
                    Dense::new(array.library(), array.meta().clone(), array.data().clone())?;
                rows = column.to_values()?;
                &rows
            }
            (_, other) => {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    "make column",
                    "neither a list nor an array",
                )
                .with("found", other.kind()));
            }
        };
        let blobs = |kind| Blobs::from_values(kind, values).map(Column::Blobs);
        match self.codec {
            Codec::Tensor => unreachable!("returned above"),
            Codec::Auto | Codec::Nested => Column::infer(values),
            Codec::Ndarray => {
                Scalars::from_values(values, self.dtype, self.rounding).map(Column::Scalars)
            }
            Codec::TypedRagged => self.ragged(values).map(Column::Ragged),
            Codec::RaggedTensor => {
                self.ragged(values).map(|c| Column::Ragged(c.with_kind(RowKind::Torch)))
            }
            Codec::RaggedTensorDict => self.tensor_dict(values).map(Column::TensorDict),
            Codec::Bytes => blobs(BlobKind::Bytes),
            Codec::Media => blobs(BlobKind::Media),
            Codec::Utf8 => blobs(BlobKind::Utf8),
            Codec::Json => blobs(BlobKind::Json),
            Codec::MessagePack => blobs(BlobKind::MessagePack),
            Codec::MediaList => MediaList::from_values(values).map(Column::MediaList),
        }
    }

    fn ragged(&self, values: &[Value]) -> Result<Ragged<'static>> {
        let template = match &self.shape {
            RowShape::Any => None,
            RowShape::Exactly(template) => Some(template.clone()),
            RowShape::Ragged(dim) => Some(ragged_at(*dim, values)?),
        };
        Ragged::from_values(values, self.dtype, template, self.rounding)
    }

    fn tensor(&self, value: &Value) -> Result<Dense<'static>> {
        let array = match value {
            Value::Array(array) => array.clone(),
            Value::List(items) => {
                let dtype = self.dtype.unwrap_or(Dtype::Float32);
                let mut data = Vec::new();
                for (row, item) in items.iter().enumerate() {
                    element::push(dtype, item, self.rounding, &mut data)
                        .map_err(|e| e.with("row", row))?;
                }
                let meta = TensorMeta::new(dtype, [items.len() as u64])?;
                crate::Array::new(Library::Torch, meta, data)?
            }
            other => {
                return Err(Error::new(ErrorKind::InvalidInput, "make column", "not an array")
                    .with("found", other.kind()));
            }
        };
        if self.dtype.is_some_and(|dtype| dtype != array.dtype()) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "make column",
                "an array of another element type",
            )
            .with("expected", self.dtype.expect("checked"))
            .with("found", array.dtype()));
        }
        Dense::new(array.library(), array.meta().clone(), array.data().clone())
    }

    fn tensor_dict(&self, values: &[Value]) -> Result<TensorDict<'static>> {
        let fail = |why, row: usize| {
            Error::new(ErrorKind::InvalidInput, "make column", why).with("row", row)
        };
        let mut names = std::collections::BTreeSet::new();
        for (i, row) in values.iter().enumerate() {
            match row {
                Value::Null => {}
                Value::Map(map) => {
                    if let Some(name) =
                        map.iter().find_map(|(n, v)| (*v == Value::Null).then_some(n))
                    {
                        return Err(fail("a null instead of a tensor", i).with("key", name));
                    }
                    names.extend(map.keys().cloned());
                }
                other => return Err(fail("a row is no dict", i).with("found", other.kind())),
            }
        }
        let keys = match &self.keys {
            None => names.into_iter().collect(),
            Some(keys) => match names.iter().find(|name| !keys.contains(name)) {
                Some(name) => return Err(fail("a key that is not declared", 0).with("key", name)),
                None => keys.clone(),
            },
        };
        let mut columns = IndexMap::new();
        for key in keys {
            let of = |row: &Value| row.get(&key).cloned().unwrap_or(Value::Null);
            let tensors: Vec<_> = values.iter().map(of).collect();
            let column = self.ragged(&tensors).map_err(|e| e.with("key", &key))?;
            columns.insert(key, column.with_kind(RowKind::Torch));
        }
        Ok(TensorDict { columns, nulls: values.iter().map(|row| *row == Value::Null).collect() })
    }
}

/// The template of rows whose dimension `dim` is ragged; the first array says what the others are.
fn ragged_at(dim: usize, values: &[Value]) -> Result<Template> {
    let shape = values.iter().find_map(|value| match value {
        Value::Array(array) => Some(array.shape().to_vec()),
        _ => None,
    });
    match shape {
        None if dim == 0 => Ok(Template::flat()),
        Some(shape) if dim < shape.len() => {
            Ok(Template { before: shape[..dim].into(), after: shape[dim + 1..].into() })
        }
        found => Err(Error::new(
            ErrorKind::InvalidInput,
            "make ragged column",
            "rows do not have the ragged dimension that the schema names",
        )
        .with("dimension", dim)
        .with("found", format_args!("{found:?}"))),
    }
}

/// What the fields of a rollout are.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Schema {
    fields: IndexMap<String, FieldSchema>,
    strict: bool,
}

impl Schema {
    /// A schema that lists nothing: every field is what its rows look like.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds or replaces a field.
    #[must_use]
    pub fn field(mut self, name: impl Into<String>, field: FieldSchema) -> Self {
        self.fields.insert(name.into(), field);
        self
    }

    /// Refuses fields that are not listed, instead of looking at their rows.
    #[must_use]
    pub fn strict(mut self) -> Self {
        self.strict = true;
        self
    }

    /// Whether fields that are not listed are refused.
    pub fn is_strict(&self) -> bool {
        self.strict
    }

    /// The listed fields.
    pub fn fields(&self) -> &IndexMap<String, FieldSchema> {
        &self.fields
    }

    /// Reads `{name: {codec, nullable, metadata}}`, Mooncake's schemas written as JSON.
    pub fn from_value(value: &Value) -> Result<Self> {
        let map = value.as_map().ok_or_else(|| {
            Error::new(ErrorKind::ConfigInvalid, "read schema", "not a map from name to field")
        })?;
        let field = |(name, value): (&String, &Value)| {
            let field = FieldSchema::from_value(value).map_err(|e| e.with("field", name))?;
            Ok((name.clone(), field))
        };
        Ok(Self { fields: map.iter().map(field).collect::<Result<_>>()?, strict: false })
    }

    /// The schema that a Mooncake reference implies.
    pub fn from_reference(reference: &mooncake::Reference) -> Result<Self> {
        let mut schema = Self::new();
        for (name, location) in &reference.fields {
            let field = match reference.encoded.get(name) {
                None => {
                    FieldSchema { section: location.section, ..FieldSchema::new(Codec::Tensor) }
                }
                Some(encoded) => {
                    let dtype = match encoded.metadata.get("dtype").and_then(Value::as_str) {
                        Some(name) => Some(name.parse()?),
                        None => None,
                    };
                    let codec = Codec::parse(&encoded.codec).map_err(|e| e.with("field", name))?;
                    let keys = encoded.metadata.get("keys").and_then(Value::as_list);
                    let keys = keys.map(|keys| {
                        keys.iter().filter_map(Value::as_str).map(str::to_owned).collect()
                    });
                    FieldSchema {
                        dtype,
                        keys,
                        inferred: encoded.metadata.contains_key("schema_source"),
                        ..FieldSchema::new(codec).nullable().rounded()
                    }
                }
            };
            schema.fields.insert(name.clone(), field);
        }
        for name in reference.meta.keys() {
            schema.fields.insert(name.clone(), FieldSchema::meta());
        }
        Ok(schema)
    }

    /// Makes a rollout of a flat dict.
    ///
    /// Listed fields go where the schema says. Others follow Mooncake's rule: arrays with one entry
    /// a row are batch fields, lists with one entry a row other columns, everything else is meta.
    /// The number of rows is that of the listed columns, or else the common length of the arrays,
    /// or else of the lists; lengths that disagree are an error.
    pub fn rollout(&self, values: &IndexMap<String, Value>) -> Result<Rollout<'static>> {
        let rows = self.count_rows(values)?;
        let mut rollout = Rollout::default();
        for (name, value) in values {
            let found;
            let field = match self.fields.get(name) {
                Some(field) => field,
                None if self.strict => return Err(unlisted(name)),
                None => {
                    found = guess(value, rows);
                    &found
                }
            };
            let column = || field.column(value).map_err(|e| e.with("field", name));
            match field.section {
                Section::Meta => drop(rollout.meta.insert(name.clone(), value.clone())),
                Section::Batch => drop(rollout.batch.insert(name.clone(), column()?)),
                Section::NonTensor => drop(rollout.non_tensor.insert(name.clone(), column()?)),
            }
        }
        rollout.rows()?;
        Ok(rollout)
    }

    /// Makes a rollout of values that are sorted into sections already.
    pub fn rollout_of_sections(
        &self,
        batch: &IndexMap<String, Value>,
        non_tensor: &IndexMap<String, Value>,
        meta: &IndexMap<String, Value>,
    ) -> Result<Rollout<'static>> {
        let mut rollout = Rollout { meta: meta.clone(), ..Rollout::default() };
        for (section, values) in [(Section::Batch, batch), (Section::NonTensor, non_tensor)] {
            for (name, value) in values {
                let auto = FieldSchema { section, ..FieldSchema::new(Codec::Auto).nullable() };
                let field = match self.fields.get(name) {
                    Some(field) if field.section == section => field,
                    _ if self.strict => return Err(unlisted(name)),
                    _ => &auto,
                };
                let column = field.column(value).map_err(|e| e.with("field", name))?;
                match section {
                    Section::Batch => rollout.batch.insert(name.clone(), column),
                    _ => rollout.non_tensor.insert(name.clone(), column),
                };
            }
        }
        rollout.rows()?;
        Ok(rollout)
    }

    fn count_rows(&self, values: &IndexMap<String, Value>) -> Result<Option<u64>> {
        let listed = |name: &String| self.fields.get(name).map(|field| field.section);
        let arrays = |(name, value): &(&String, &Value)| {
            listed(name).is_none()
                && matches!(value, Value::Array(array) if !array.shape().is_empty())
        };
        let columns = |(name, _): &(&String, &Value)| {
            listed(name).is_some_and(|section| section != Section::Meta)
        };
        let lists =
            |(name, value): &(&String, &Value)| listed(name).is_none() && value.as_list().is_some();
        for pick in [&columns as &dyn Fn(&(&String, &Value)) -> bool, &arrays, &lists] {
            let mut rows = None;
            for (name, value) in values.iter().filter(|entry| pick(entry)) {
                let Some(len) = length(value) else { continue };
                if *rows.get_or_insert(len) != len {
                    return Err(Error::new(
                        ErrorKind::InvalidInput,
                        "make rollout",
                        "fields disagree about the number of rows",
                    )
                    .with("field", name)
                    .with("rows", len)
                    .with("other_rows", rows.expect("set above"))
                    .remedy("declare which fields are meta_info in the schema"));
                }
            }
            if rows.is_some() {
                return Ok(rows);
            }
        }
        Ok(None)
    }
}

fn length(value: &Value) -> Option<u64> {
    match value {
        Value::List(items) => Some(items.len() as u64),
        Value::Array(array) => array.shape().first().copied(),
        _ => None,
    }
}

fn guess(value: &Value, rows: Option<u64>) -> FieldSchema {
    match value {
        _ if rows.is_none() || length(value) != rows => FieldSchema::meta(),
        Value::Array(_) => FieldSchema::new(Codec::Tensor),
        _ => FieldSchema { inferred: true, ..FieldSchema::new(Codec::Auto).nullable() },
    }
}

fn unlisted(name: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, "make rollout", "a field that the schema does not list")
        .with("field", name)
        .remedy("add the field to the schema, or use a schema that is not strict")
}
