//! A rollout: everything that one put hands over.

use indexmap::IndexMap;
use transport_core::{Error, ErrorKind, Result};

use crate::{Column, Value};

/// Where a field belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Section {
    /// One array over all rows.
    #[serde(rename = "batch")]
    Batch,
    /// Anything else with one entry a row.
    #[serde(rename = "non_tensor_batch")]
    NonTensor,
    /// One value for the whole rollout.
    #[serde(rename = "meta_info")]
    Meta,
}

impl Section {
    /// The name that Mooncake and verl use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Batch => "batch",
            Self::NonTensor => "non_tensor_batch",
            Self::Meta => "meta_info",
        }
    }
}

/// An ordered record of columns with the same number of rows, and of values that have no rows.
#[derive(Clone, Debug, Default)]
pub struct Rollout<'a> {
    /// Arrays over all rows.
    pub batch: IndexMap<String, Column<'a>>,
    /// Other columns.
    pub non_tensor: IndexMap<String, Column<'a>>,
    /// Values that belong to no row, such as the lengths of all samples of the step.
    pub meta: IndexMap<String, Value>,
}

impl<'a> Rollout<'a> {
    /// Number of rows; refuses columns that disagree and names that occur in two sections.
    pub fn rows(&self) -> Result<u64> {
        let fail = |why: &'static str, name: &str| {
            Error::new(ErrorKind::InvalidInput, "check rollout", why).with("field", name)
        };
        let mut rows: Option<(u64, &str)> = None;
        for (name, column) in self.batch.iter().chain(&self.non_tensor) {
            let found = column.rows();
            match rows {
                None => rows = Some((found, name)),
                Some((expected, other)) if expected != found => {
                    return Err(fail("columns have different numbers of rows", name)
                        .with("rows", found)
                        .with("other_field", other)
                        .with("other_rows", expected));
                }
                Some(_) => {}
            }
        }
        if let Some(name) = self.non_tensor.keys().find(|name| self.batch.contains_key(*name)) {
            return Err(fail("a name occurs in two sections", name));
        }
        Ok(rows.map_or(0, |(rows, _)| rows))
    }

    /// The column `name`, wherever it belongs.
    pub fn column(&self, name: &str) -> Option<&Column<'a>> {
        self.batch.get(name).or_else(|| self.non_tensor.get(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Blobs;

    #[test]
    fn columns_must_agree() {
        let text = |n| Column::Blobs(Blobs::from_text(vec![Some("x"); n]));
        let mut rollout = Rollout::default();
        assert_eq!(rollout.rows().unwrap(), 0);
        rollout.non_tensor.insert("a".into(), text(2));
        assert_eq!(rollout.rows().unwrap(), 2);
        rollout.non_tensor.insert("b".into(), text(3));
        assert!(rollout.rows().is_err());
        rollout.non_tensor.insert("b".into(), text(2));
        rollout.batch.insert("b".into(), text(2));
        assert!(rollout.rows().is_err());
    }
}
