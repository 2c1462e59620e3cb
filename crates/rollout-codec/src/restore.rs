//! From the decoded form of [`crate::notation`] back to values, arrays included.

use indexmap::IndexMap;
use transport_core::{Dtype, Error, ErrorKind, Result, TensorMeta};

use crate::{Array, Library, Rounding, Value, element, notation::unplain};

fn corrupt(why: &'static str) -> Error {
    Error::new(ErrorKind::Corrupt, "read decoded values", why)
}

/// The values of one section, with the arrays that `kinds` speaks of.
pub(crate) fn section(values: &Value, kinds: &Value) -> Result<IndexMap<String, Value>> {
    let values = values.as_map().ok_or_else(|| corrupt("values is not a map"))?;
    values
        .iter()
        .map(|(name, value)| {
            let field = field(value, kinds.get(name)).map_err(|e| e.with("field", name));
            Ok((name.clone(), field?))
        })
        .collect()
}

fn field(value: &Value, kind: Option<&Value>) -> Result<Value> {
    let value = unplain(value)?;
    let Some(kind) = kind else { return Ok(value) };
    if let Some(array) = kind.get("value").and_then(Value::as_str).and_then(array_kind) {
        return to_array(&value, array).map(Value::Array);
    }
    let (Value::List(rows), Some(kinds)) = (&value, kind.get("rows").and_then(Value::as_list))
    else {
        return Ok(value);
    };
    if rows.len() != kinds.len() {
        return Err(corrupt("values and kinds have different numbers of rows"));
    }
    let row = |(row, kind): (&Value, &Value)| one(row, kind);
    Ok(Value::List(rows.iter().zip(kinds).map(row).collect::<Result<_>>()?))
}

/// A row whose kind is a text, or a text for each of its items.
fn one(value: &Value, kind: &Value) -> Result<Value> {
    match (value, kind) {
        (_, Value::Str(kind)) => match array_kind(kind) {
            Some(array) => to_array(value, array).map(Value::Array),
            None => Ok(value.clone()),
        },
        (Value::Map(entries), Value::Map(kinds)) => {
            let entry = |(name, item): (&String, &Value)| {
                let item = kinds.get(name).map_or_else(|| Ok(item.clone()), |kind| one(item, kind));
                Ok((name.clone(), item?))
            };
            Ok(Value::Map(entries.iter().map(entry).collect::<Result<_>>()?))
        }
        (Value::List(items), Value::List(kinds)) if items.len() == kinds.len() => {
            let item = |(item, kind): (&Value, &Value)| one(item, kind);
            Ok(Value::List(items.iter().zip(kinds).map(item).collect::<Result<_>>()?))
        }
        _ => Err(corrupt("a row is not what its kind says")),
    }
}

/// Library, element type and shape of `ndarray int64[2, 3]` or `torch.float32[0]`; `None` for
/// other kinds, among them numpy's arrays of objects.
fn array_kind(kind: &str) -> Option<(Library, Dtype, Vec<u64>)> {
    let (library, rest) = match (kind.strip_prefix("ndarray "), kind.strip_prefix("torch.")) {
        (Some(rest), _) => (Library::Numpy, rest),
        (_, Some(rest)) => (Library::Torch, rest),
        _ => return None,
    };
    let (dtype, dims) = rest.strip_suffix(']')?.split_once('[')?;
    let dims = dims.split(',').map(str::trim).filter(|dim| !dim.is_empty());
    let shape = dims.map(|dim| dim.parse().ok()).collect::<Option<_>>()?;
    Some((library, dtype.parse().ok()?, shape))
}

fn to_array(value: &Value, (library, dtype, shape): (Library, Dtype, Vec<u64>)) -> Result<Array> {
    let mut data = Vec::new();
    flatten(value, &shape, &mut |x| element::push(dtype, x, Rounding::Exact, &mut data))?;
    Array::new(library, TensorMeta::new(dtype, shape)?, data)
}

fn flatten(value: &Value, shape: &[u64], push: &mut dyn FnMut(&Value) -> Result<()>) -> Result<()> {
    match (value, shape) {
        (value, []) => push(value),
        (Value::List(items), [len, rest @ ..]) if items.len() as u64 == *len => {
            items.iter().try_for_each(|item| flatten(item, rest, push))
        }
        _ => Err(corrupt("a list does not have the shape that its kind says")),
    }
}

/// Makes arrays of the lists at `path` in a row: the decoded form says what the items of a dict
/// are, but not what is deeper inside.
pub(crate) fn arrays_at(
    row: &mut Value,
    path: &[Step],
    library: Library,
    dtype: Dtype,
) -> Result<()> {
    match (row, path) {
        (row @ Value::List(_), []) => {
            let mut shape = Vec::new();
            let mut at = &*row;
            while let Value::List(items) = at {
                shape.push(items.len() as u64);
                match items.first() {
                    Some(first) => at = first,
                    None => break,
                }
            }
            *row = Value::Array(to_array(row, (library, dtype, shape))?);
        }
        (Value::Map(entries), [Step::Name(name), rest @ ..]) => {
            if let Some(item) = entries.get_mut(name) {
                arrays_at(item, rest, library, dtype)?;
            }
        }
        (Value::List(items), [Step::Index(i), rest @ ..]) => {
            if let Some(item) = items.get_mut(*i) {
                arrays_at(item, rest, library, dtype)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// One step of a path into a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Name(String),
    Index(usize),
}

/// The steps of a path such as `.m.q[0]`, with `\` before a literal `.`, `[` or `\`.
pub(crate) fn steps(path: &str) -> Option<Vec<Step>> {
    let mut steps = Vec::new();
    let mut rest = path;
    while let Some(first) = rest.chars().next() {
        rest = &rest[1..];
        match first {
            '.' => {
                let mut name = String::new();
                let mut chars = rest.char_indices();
                let end = loop {
                    match chars.next() {
                        None => break rest.len(),
                        Some((i, '.' | '[')) => break i,
                        Some((_, '\\')) => name.push(chars.next()?.1),
                        Some((_, c)) => name.push(c),
                    }
                };
                rest = &rest[end..];
                steps.push(Step::Name(name));
            }
            '[' => {
                let (index, after) = rest.split_once(']')?;
                steps.push(Step::Index(index.parse().ok()?));
                rest = after;
            }
            _ => return None,
        }
    }
    Some(steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_split_where_names_end() {
        let name = |s: &str| Step::Name(s.to_owned());
        assert_eq!(
            steps(".m.q[10].\\[x\\.y\\\\").unwrap(),
            [name("m"), name("q"), Step::Index(10), name("[x.y\\")]
        );
        assert_eq!(steps("").unwrap(), []);
        assert!(steps("m").is_none());
        assert!(steps("[1").is_none());
    }

    #[test]
    fn kinds_of_arrays_are_read() {
        let read = |kind| array_kind(kind).map(|(_, dtype, shape)| (dtype, shape));
        assert_eq!(read("ndarray int64[2, 3]"), Some((Dtype::Int64, vec![2, 3])));
        assert_eq!(read("torch.bfloat16[]"), Some((Dtype::Bfloat16, vec![])));
        for other in
            ["ndarray object[3]", "list", "_OwnerBackedList", "torch.x[1]", "ndarray int8[a]"]
        {
            assert_eq!(read(other), None, "{other}");
        }
    }
}
