//! Mistakes, gathered.

use transport_core::{Error, Result};

/// Everything that is wrong, so that it can be reported at once.
#[derive(Debug, Default)]
pub struct Problems(Vec<Error>);

impl Problems {
    /// Notes what failed; gives what did not.
    pub fn note<T>(&mut self, outcome: Result<T>) -> Option<T> {
        outcome.map_err(|error| self.0.push(error)).ok()
    }

    /// Fails if anything was noted: with the one problem, or with all of them, a line each.
    pub fn settle(mut self, operation: &'static str) -> Result<()> {
        if self.0.len() < 2 {
            return self.0.pop().map_or(Ok(()), Err);
        }
        let (kind, count) = (self.0[0].kind(), self.0.len());
        // Most are of this kind and this operation too, which is said once.
        let known = format!("{operation}: {kind}: ");
        let line = |error: &Error| {
            let line = error.to_string();
            line.strip_prefix(&known).map_or_else(|| line.clone(), ToOwned::to_owned)
        };
        let list: Vec<String> = self.0.iter().map(line).collect();
        let message = format!("{count} problems:\n- {}", list.join("\n- "));
        Err(Error::new(kind, operation, message))
    }
}
