//! What a file lacks and what it has too much, all of it at once: serde stops at the first.

use serde_json::Value;
use transport_core::{Error, ErrorKind, Result};

use super::config::RunConfig;
use crate::config::{Problems, suggestion};

/// Refuses settings that are missing, and those that nothing knows.
pub(super) fn check(table: &toml::Table) -> Result<()> {
    let schema = RunConfig::schema();
    let mut shape = Shape { schema: &schema, problems: Problems::default() };
    shape.table("", &schema, table);
    shape.problems.settle("read configuration")
}

struct Shape<'a> {
    schema: &'a Value,
    problems: Problems,
}

impl<'a> Shape<'a> {
    /// Compares a table with its schema. What has the wrong type is left to serde.
    fn table(&mut self, path: &str, schema: &'a Value, table: &toml::Table) {
        let Some(known) = schema["properties"].as_object() else { return };
        let at = |name: &str| {
            if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
        };
        for name in table.keys().filter(|name| !known.contains_key(*name)) {
            let unknown =
                Error::new(ErrorKind::ConfigInvalid, "read configuration", "unknown field")
                    .with("found", at(name))
                    .remedy(suggestion(name, known.keys().map(String::as_str)));
            self.problems.note(Err::<(), _>(unknown));
        }
        let required: Vec<_> = schema["required"].as_array().into_iter().flatten().collect();
        let empty = toml::Table::new();
        for (name, of) in known {
            let path = at(name);
            let of = self.resolved(of);
            match table.get(name) {
                Some(toml::Value::Table(table)) if of.get("properties").is_some() => {
                    self.table(&path, of, table);
                }
                Some(toml::Value::Array(items)) if of.get("items").is_some() => {
                    let of = self.resolved(&of["items"]);
                    let tables = items.iter().enumerate();
                    for (i, table) in tables.filter_map(|(i, item)| Some((i, item.as_table()?))) {
                        self.table(&format!("{path}[{i}]"), of, table);
                    }
                }
                Some(_) => {}
                None if !required.iter().any(|required| *required == name) => {}
                None if of.get("properties").is_some() => self.table(&path, of, &empty),
                None => {
                    let missing =
                        Error::new(ErrorKind::ConfigInvalid, "read configuration", "missing field")
                            .with("setting", path)
                            .remedy(of["description"].as_str().unwrap_or_default().to_owned());
                    self.problems.note(Err::<(), _>(missing));
                }
            }
        }
    }

    /// What a schema refers to.
    fn resolved(&self, schema: &'a Value) -> &'a Value {
        let name = schema["$ref"].as_str().and_then(|name| name.strip_prefix("#/$defs/"));
        match name {
            Some(name) if self.schema["$defs"][name].get("properties").is_some() => {
                &self.schema["$defs"][name]
            }
            _ => schema, // with a description of its own
        }
    }
}
