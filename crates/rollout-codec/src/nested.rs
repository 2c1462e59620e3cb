//! Rows that are dicts and lists with arrays, bytes or pictures inside, as a tree of columns.

use indexmap::IndexMap;
use transport_core::Result;

use crate::{Column, Value};

/// Deepest nesting of dicts and lists.
pub const MAX_TREE_DEPTH: usize = 32;

/// A tree whose leaves are columns over all rows.
#[derive(Clone, Debug)]
pub struct Nested<'a> {
    /// The outermost dict or list.
    pub root: Branch<'a>,
}

/// One place in the structure, over all rows.
#[derive(Clone, Debug)]
pub enum Branch<'a> {
    /// A dict: some rows may lack some names.
    Dict {
        /// What rows have at this place.
        presence: Presence,
        /// The values by name.
        children: IndexMap<String, Self>,
    },
    /// A list.
    List {
        /// What rows have at this place.
        presence: Presence,
        /// Length of each row's list.
        lengths: Vec<u64>,
        /// The values by position, up to the longest list.
        children: Vec<Self>,
    },
    /// Values of one kind.
    Leaf {
        /// Rows that have nothing at this place, not even null.
        missing: Vec<bool>,
        /// The values; a missing row is null.
        column: Box<Column<'a>>,
    },
}

/// What the rows have at one place of the structure.
#[derive(Clone, Debug, Default)]
pub struct Presence {
    /// Rows that have nothing, not even null.
    pub missing: Vec<bool>,
    /// Rows that have the dict or list, and not null.
    pub present: Vec<bool>,
}

impl Nested<'_> {
    /// Number of rows.
    pub fn rows(&self) -> u64 {
        let missing = match &self.root {
            Branch::Dict { presence, .. } | Branch::List { presence, .. } => &presence.missing,
            Branch::Leaf { missing, .. } => missing,
        };
        missing.len() as u64
    }

    /// Whether any row is null.
    pub fn has_nulls(&self) -> bool {
        match &self.root {
            Branch::Dict { presence, .. } | Branch::List { presence, .. } => {
                presence.present.iter().any(|&present| !present)
            }
            Branch::Leaf { column, .. } => column.has_nulls(),
        }
    }

    /// The rows, put together again.
    pub fn to_values(&self) -> Result<Vec<Value>> {
        let rows = values(&self.root)?;
        Ok(rows.into_iter().map(|row| row.unwrap_or(Value::Null)).collect())
    }
}

/// The value of every row at one place; `None` where it is missing.
fn values(branch: &Branch<'_>) -> Result<Vec<Option<Value>>> {
    let join = |presence: &Presence, mut build: Box<dyn FnMut(usize) -> Value + '_>| {
        presence
            .missing
            .iter()
            .zip(&presence.present)
            .enumerate()
            .map(|(row, (&missing, &present))| match (missing, present) {
                (true, _) => None,
                (false, false) => Some(Value::Null),
                (false, true) => Some(build(row)),
            })
            .collect()
    };
    Ok(match branch {
        Branch::Leaf { missing, column } => column
            .to_values()?
            .into_iter()
            .zip(missing)
            .map(|(value, &missing)| (!missing).then_some(value))
            .collect(),
        Branch::Dict { presence, children } => {
            let mut parts = Vec::with_capacity(children.len());
            for (name, child) in children {
                parts.push((name, values(child)?));
            }
            let build = |row: usize| {
                let entry = |(name, part): &mut (&String, Vec<Option<Value>>)| {
                    part[row].take().map(|value| (name.clone(), value))
                };
                Value::Map(parts.iter_mut().filter_map(entry).collect())
            };
            join(presence, Box::new(build))
        }
        Branch::List { presence, lengths, children } => {
            let mut parts = children.iter().map(values).collect::<Result<Vec<_>>>()?;
            let build = |row: usize| {
                let length = lengths[row] as usize;
                let item = |part: &mut Vec<Option<Value>>| part[row].take().unwrap_or(Value::Null);
                let mut items: Vec<_> = parts.iter_mut().take(length).map(item).collect();
                items.resize(length, Value::Null);
                Value::List(items)
            };
            join(presence, Box::new(build))
        }
    })
}
