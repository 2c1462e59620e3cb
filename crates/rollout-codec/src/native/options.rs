//! How to encode.

use indexmap::IndexMap;
use transport_core::Dtype;

/// Which rows are stored once although several have them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dedup {
    /// None: every row is stored.
    None,
    /// Rows that are the same memory: the same address and length.
    #[default]
    SameMemory,
    /// Rows with the same bytes. Reads all rows while planning.
    SameBytes,
}

/// How to encode.
#[derive(Clone, Debug)]
pub struct Options {
    pub(super) generation: u64,
    pub(super) checksums: bool,
    pub(super) dedup: Dedup,
    pub(super) narrow: IndexMap<String, Dtype>,
}

impl Default for Options {
    /// Generation 0, with checksums, rows of the same memory stored once, nothing narrowed.
    fn default() -> Self {
        Self { generation: 0, checksums: true, dedup: Dedup::SameMemory, narrow: IndexMap::new() }
    }
}

impl Options {
    /// Sets the number that tells this rollout from others under the same name.
    #[must_use]
    pub fn generation(self, generation: u64) -> Self {
        Self { generation, ..self }
    }

    /// Sets whether segments get checksums, which cost a pass over bytes that are in the cache.
    #[must_use]
    pub fn checksums(self, checksums: bool) -> Self {
        Self { checksums, ..self }
    }

    /// Sets which rows are stored once.
    #[must_use]
    pub fn dedup(self, dedup: Dedup) -> Self {
        Self { dedup, ..self }
    }

    /// Stores the whole numbers of `field` as `wire`. Encoding fails if one does not fit; readers
    /// get the field's own type back.
    #[must_use]
    pub fn narrow(mut self, field: impl Into<String>, wire: Dtype) -> Self {
        self.narrow.insert(field.into(), wire);
        self
    }
}
