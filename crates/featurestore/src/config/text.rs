//! The texts of files of settings.

use std::path::Path;

use transport_core::{Error, ErrorKind, Result};

use crate::files::read_at_most;

#[cfg(feature = "lifecycle")]
pub(super) fn of_yaml(text: &str) -> Result<toml::Table> {
    crate::launch::Syntax::Yaml.table(text)
}

#[cfg(not(feature = "lifecycle"))]
pub(super) fn of_yaml(_: &str) -> Result<toml::Table> {
    let why = "this build reads no YAML";
    Err(Error::new(ErrorKind::Unsupported, "read configuration", why)
        .remedy("write TOML, or build with --features lifecycle"))
}

/// Longest file of settings.
const MAX_FILE: u64 = 1 << 20;

/// The text of a file of settings.
pub(crate) fn read_file(path: &Path) -> Result<String> {
    let bytes = read_at_most("read configuration", path, MAX_FILE)?;
    String::from_utf8(bytes).map_err(|e| {
        Error::new(ErrorKind::ConfigInvalid, "read configuration", "the file is not UTF-8")
            .with("file", path.display())
            .with("at_byte", e.utf8_error().valid_up_to())
            .source(e)
    })
}

/// The settings in TOML text, whatever they are called.
pub(crate) fn toml_table(text: &str) -> Result<toml::Table> {
    toml::from_str(text).map_err(|e| {
        let why = match e.span() {
            Some(span) => {
                // Of a key that stands twice the message says nothing but that.
                let found = text.get(span.clone()).filter(|found| is_key(found));
                let found = found.map_or_else(String::new, |key| format!(" {key:?}"));
                format!("{}{found} at {}", e.message(), place(text, span.start))
            }
            None => e.message().to_owned(),
        };
        let line = why.trim().replace('\n', " ");
        Error::new(ErrorKind::ConfigInvalid, "read configuration", line)
    })
}

/// Where a byte of a text stands, as editors count.
fn place(text: &str, at: usize) -> String {
    let before = text.get(..at).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|&c| c != '\n').count() + 1;
    format!("line {line}, column {column}")
}

fn is_key(found: &str) -> bool {
    (1..=64).contains(&found.len())
        && found.chars().all(|c| c.is_ascii_alphanumeric() || "-_.\"'".contains(c))
}
