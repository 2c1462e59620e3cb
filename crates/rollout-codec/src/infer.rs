//! Columns from values alone, when no schema says what they are.
//!
//! The order of the rules is Mooncake's, so that both sides make the same column of the same rows,
//! but for rows where Mooncake would give up a type: whole numbers beside floats or truth values
//! stay what they are, as MessagePack, and an empty list beside whole numbers makes no floats.

use indexmap::{IndexMap, IndexSet};
use transport_core::{Dtype, Error, ErrorKind, Result};

use crate::{
    BlobKind, Blobs, Branch, Column, MAX_TREE_DEPTH, MediaList, Nested, Presence, Ragged, Rounding,
    Scalars, Value, element,
};

/// More names than this make a dict one MessagePack row instead of a column a name.
const MAX_DICT_NAMES: usize = 64;
/// Longer lists are not split into a column a position.
const MAX_LIST_POSITIONS: usize = 8;

impl Column<'_> {
    /// The column that fits `values`; an error if none does. Nothing is ever pickled.
    pub fn infer(values: &[Value]) -> Result<Column<'static>> {
        let rows: Vec<Option<Value>> = values.iter().cloned().map(Some).collect();
        let root = branch(rows, 0)?;
        match root {
            Branch::Leaf { column, .. } => Ok(*column),
            root if has_memory(&root) => Ok(Column::Nested(Nested { root })),
            _ => leaf(values),
        }
    }
}

impl Scalars<'_> {
    /// Numbers and nulls; without `dtype`, whole numbers are int64 (uint64 where they need it),
    /// floats float64 and truth values bool, and rows of different kinds are an error.
    pub fn from_values(
        values: &[Value],
        dtype: Option<Dtype>,
        rounding: Rounding,
    ) -> Result<Scalars<'static>> {
        let dtype = match dtype {
            Some(dtype) => dtype,
            None => number_type(values)?,
        };
        let mut data = Vec::with_capacity(values.len() * dtype.size() as usize);
        let zero = if dtype == Dtype::Bool { Value::Bool(false) } else { Value::Int(0) };
        for (row, value) in values.iter().enumerate() {
            let value = if *value == Value::Null { &zero } else { value };
            element::push(dtype, value, rounding, &mut data).map_err(|e| e.with("row", row))?;
        }
        let nulls = values.iter().map(|value| *value == Value::Null).collect();
        Scalars::with_nulls(dtype, data, nulls)
    }
}

fn number_type(values: &[Value]) -> Result<Dtype> {
    let mut found = None;
    for (row, value) in values.iter().enumerate() {
        let dtype = match value {
            Value::Null => continue,
            Value::Bool(_) => Dtype::Bool,
            Value::Int(n) if *n > i64::MAX.into() => Dtype::Uint64,
            Value::Int(_) => Dtype::Int64,
            _ => Dtype::Float64,
        };
        found = Some(match (found, dtype) {
            (None, dtype) => dtype,
            (Some(before), dtype) if before == dtype => dtype,
            (Some(Dtype::Int64 | Dtype::Uint64), Dtype::Int64 | Dtype::Uint64) => Dtype::Uint64,
            (Some(before), dtype) => {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    "make column",
                    "numbers of different types",
                )
                .with("row", row)
                .with("expected", before)
                .with("found", dtype)
                .remedy("declare an element type in the schema"));
            }
        });
    }
    Ok(found.unwrap_or(Dtype::Int64))
}

/// The column of one leaf.
fn leaf(values: &[Value]) -> Result<Column<'static>> {
    let mut present = values.iter().filter(|value| **value != Value::Null).peekable();
    if present.peek().is_none() {
        return Blobs::from_values(BlobKind::Json, values).map(Column::Blobs);
    }
    let all = |test: fn(&Value) -> bool| present.clone().all(test);
    let numbers = |v: &Value| matches!(v, Value::Bool(_) | Value::Int(_) | Value::Float(_));
    let blobs = |kind| Blobs::from_values(kind, values).map(Column::Blobs);
    let ragged = || Ragged::from_values(values, None, None, Rounding::Exact).map(Column::Ragged);
    if all(|v| matches!(v, Value::List(items) if items.iter().all(is_media))) {
        return MediaList::from_values(values).map(Column::MediaList);
    }
    if all(|v| matches!(v, Value::Array(_))) {
        return ragged();
    }
    if all(|v| matches!(v, Value::List(_))) {
        // Lists that are no rectangles of numbers are objects.
        return ragged().or_else(|_| blobs(BlobKind::MessagePack));
    }
    if all(numbers) {
        return Scalars::from_values(values, None, Rounding::Exact)
            .map(Column::Scalars)
            .or_else(|_| blobs(BlobKind::MessagePack));
    }
    if all(|v| matches!(v, Value::Bytes(_))) {
        return blobs(BlobKind::Bytes);
    }
    if all(|v| matches!(v, Value::Image(_))) {
        return blobs(BlobKind::Media);
    }
    if all(|v| matches!(v, Value::Str(_))) {
        return blobs(BlobKind::Utf8);
    }
    // Rows of several kinds, such as texts beside lists of messages, are objects if they can be.
    blobs(BlobKind::MessagePack).map_err(|e| {
        let mut kinds: IndexSet<String> = present.map(Value::kind).collect();
        kinds.sort_unstable();
        Error::new(ErrorKind::InvalidInput, "infer column", "no codec fits rows of these kinds")
            .with("kinds", kinds.into_iter().collect::<Vec<_>>().join(", "))
            .remedy("make the rows alike, or declare the field in the schema")
            .source(e)
    })
}

fn is_media(item: &Value) -> bool {
    matches!(item, Value::Bytes(_) | Value::Image(_))
}

/// Whether any leaf is raw memory, which alone is worth taking the structure apart.
fn has_memory(branch: &Branch<'_>) -> bool {
    match branch {
        Branch::Dict { children, .. } => children.values().any(has_memory),
        Branch::List { children, .. } => children.iter().any(has_memory),
        Branch::Leaf { column, .. } => match &**column {
            Column::Ragged(c) => *c.kind() != crate::RowKind::List,
            Column::Blobs(c) => matches!(c.kind, BlobKind::Bytes | BlobKind::Media),
            Column::MediaList(_) => true,
            _ => false,
        },
    }
}

/// Takes rows apart at one place; `None` is a row that has nothing there.
fn branch(rows: Vec<Option<Value>>, depth: usize) -> Result<Branch<'static>> {
    if depth > MAX_TREE_DEPTH {
        return Err(Error::new(ErrorKind::InvalidInput, "infer column", "nested too deeply")
            .with("max_depth", MAX_TREE_DEPTH));
    }
    let presence = || Presence {
        missing: rows.iter().map(Option::is_none).collect(),
        present: rows
            .iter()
            .map(|row| matches!(row, Some(Value::Map(_) | Value::List(_))))
            .collect(),
    };
    // Below a null there is null; below a dict without the name, nothing.
    if let Some(mut names) = dict_names(&rows) {
        names.sort_unstable();
        let presence = presence();
        let mut children = IndexMap::new();
        for name in names {
            let child = rows.iter().map(|row| match row {
                Some(Value::Map(map)) => map.get(&name).cloned(),
                _ => Some(Value::Null),
            });
            children.insert(name.clone(), branch(child.collect(), depth + 1)?);
        }
        return Ok(Branch::Dict { presence, children });
    }
    if let Some(longest) = list_positions(&rows) {
        let presence = presence();
        let lengths = rows.iter().map(|row| match row {
            Some(Value::List(items)) => items.len() as u64,
            _ => 0,
        });
        let lengths = lengths.collect();
        let mut children = Vec::new();
        for i in 0..longest {
            let child = rows.iter().map(|row| match row {
                Some(Value::List(items)) => items.get(i).cloned(),
                _ => Some(Value::Null),
            });
            children.push(branch(child.collect(), depth + 1)?);
        }
        return Ok(Branch::List { presence, lengths, children });
    }
    let missing = rows.iter().map(Option::is_none).collect();
    let values: Vec<_> = rows.into_iter().map(|row| row.unwrap_or(Value::Null)).collect();
    Ok(Branch::Leaf { missing, column: Box::new(leaf(&values)?) })
}

fn present(rows: &[Option<Value>]) -> impl Iterator<Item = &Value> + Clone {
    rows.iter().flatten().filter(|value| **value != Value::Null)
}

fn dict_names(rows: &[Option<Value>]) -> Option<Vec<String>> {
    let mut names = IndexSet::new();
    for value in present(rows) {
        names.extend(value.as_map()?.keys().cloned());
    }
    let any = present(rows).next().is_some();
    (any && names.len() <= MAX_DICT_NAMES).then(|| names.into_iter().collect())
}

fn list_positions(rows: &[Option<Value>]) -> Option<usize> {
    let mut longest = None;
    for value in present(rows) {
        let items = value.as_list()?;
        let nested = |item: &Value| matches!(item, Value::Null | Value::Map(_) | Value::List(_));
        if !items.iter().all(nested) {
            return None;
        }
        longest = longest.max(Some(items.len()));
    }
    longest.filter(|&n| n <= MAX_LIST_POSITIONS)
}

#[cfg(test)]
mod tests {
    use transport_core::TensorMeta;

    use super::*;
    use crate::{Array, Library, json};

    fn rows(text: &str) -> Vec<Value> {
        json::parse(text.as_bytes()).unwrap().as_list().unwrap().to_vec()
    }

    fn array(len: u64) -> Value {
        let meta = TensorMeta::new(Dtype::Uint8, [len]).unwrap();
        Value::Array(Array::new(Library::Numpy, meta, vec![7; len as usize]).unwrap())
    }

    #[test]
    fn each_kind_of_rows_finds_its_column() {
        for (text, wanted) in [
            ("[1,null,3]", "Scalars"),
            ("[1,2.5]", "MessagePack"),
            ("[1,18446744073709551615]", "Uint64"),
            ("[true,false]", "Bool"),
            ("[true,1]", "MessagePack"),
            ("[[1],[2.5]]", "MessagePack"),
            ("[[1],[],[2]]", "Int64"),
            ("[[1,2],[3]]", "Ragged"),
            ("[[1,[2]]]", "MessagePack"),
            ("[\"a\",null]", "Utf8"),
            ("[{\"a\":1},null]", "MessagePack"),
            ("[null,null]", "Json"),
            ("[1,\"a\",[null]]", "MessagePack"),
        ] {
            let column = Column::infer(&rows(text)).unwrap();
            assert!(format!("{column:?}").contains(wanted), "{text}: {column:?}");
            assert_eq!(column.to_values().unwrap(), rows(text));
        }
        assert!(Column::infer(&[array(1), Value::Int(1)]).is_err());
    }

    #[test]
    fn structures_with_memory_inside_are_taken_apart_and_put_together() {
        let map = |entries: Vec<(&str, Value)>| {
            Value::Map(entries.into_iter().map(|(n, v)| (n.to_owned(), v)).collect())
        };
        let rows = vec![
            map(vec![("a.b", array(3)), ("m", map(vec![("q[0]", array(1)), ("z", Value::Null)]))]),
            Value::Null,
            map(vec![("m", Value::Null)]),
            map(vec![]),
            map(vec![(
                "m",
                map(vec![("l", Value::List(vec![Value::Null, map(vec![("x", array(0))])]))]),
            )]),
        ];
        let column = Column::infer(&rows).unwrap();
        assert!(matches!(column, Column::Nested(_)));
        assert_eq!(column.to_values().unwrap(), rows);
    }

    #[test]
    fn depth_is_bounded() {
        let deep = (0..200)
            .fold(array(1), |inner, _| Value::Map(IndexMap::from([("x".to_owned(), inner)])));
        assert!(Column::infer(&[deep]).is_err());
    }
}
