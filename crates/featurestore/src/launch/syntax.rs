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
        match self {
            Self::Toml => crate::config::toml_table(text),
            // Aliases, nesting and sizes are bounded by its defaults; a key that stands twice, and
            // null, are errors.
            Self::Yaml => {
                let options = serde_saphyr::options! { strict_booleans: true, with_snippet: false };
                serde_saphyr::from_str_with_options(text, options).map_err(|e| {
                    let line = e.to_string().trim().replace('\n', " ");
                    Error::new(ErrorKind::ConfigInvalid, "read configuration", line)
                })
            }
        }
    }
}
