//! The languages that a run's file may be written in.

use std::path::Path;

use transport_core::{Error, ErrorKind, Result};

/// A language for files of settings. What can be said is the same in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Syntax {
    /// TOML; files that end in anything but the next two.
    #[default]
    Toml,
    /// YAML 1.2; files that end in `.yaml` or `.yml`.
    Yaml,
}

impl Syntax {
    /// By the file's ending.
    pub fn of(path: &Path) -> Self {
        let end = path.extension().map(|end| end.to_string_lossy().to_ascii_lowercase());
        match end.as_deref() {
            Some("yaml" | "yml") => Self::Yaml,
            _ => Self::Toml,
        }
    }

    /// The settings, whatever they are called.
    pub(crate) fn table(self, text: &str) -> Result<toml::Table> {
        let read = match self {
            Self::Toml => toml::from_str(text).map_err(|e| match e.span() {
                Some(span) => {
                    // Of a key that stands twice the message says nothing but that.
                    let found = text.get(span.clone()).filter(|found| is_key(found));
                    let found = found.map_or_else(String::new, |key| format!(" {key:?}"));
                    format!("{}{found} at {}", e.message(), place(text, span.start))
                }
                None => e.message().to_owned(),
            }),
            // Aliases, nesting and sizes are bounded by its defaults; a key that stands twice, and
            // null, are errors.
            Self::Yaml => {
                let options = serde_saphyr::options! { strict_booleans: true, with_snippet: false };
                serde_saphyr::from_str_with_options(text, options).map_err(|e| e.to_string())
            }
        };
        read.map_err(|message| {
            let line = message.trim().replace('\n', " ");
            Error::new(ErrorKind::ConfigInvalid, "read configuration", line)
        })
    }
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
