//! What the benches in `benches/` share; `cargo xtask bench` runs them all.
#![forbid(unsafe_code)]

use serde_json::Value;

/// The number at `pointer` (`/reader/copied_bytes`) of a report that a program printed.
///
/// A report without it measured nothing: an error that says so, never a number in its place.
pub fn number(report: &Value, pointer: &str) -> Result<f64, String> {
    let found = report.pointer(pointer).and_then(Value::as_f64);
    found.ok_or_else(|| format!("no number at {pointer} in {report}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_missing_or_no_number_is_an_error_that_names_it() {
        let report = json!({"peak_bytes": 3, "reader": {"wait_us": 1.5, "text": "7"}, "not": null});
        assert_eq!(number(&report, "/peak_bytes"), Ok(3.0));
        assert_eq!(number(&report, "/reader/wait_us"), Ok(1.5));
        for missing in ["/peak", "/reader/peak_bytes", "/reader/text", "/not", "/reader"] {
            let why = number(&report, missing).unwrap_err();
            assert!(why.contains(&format!("at {missing} ")), "{why}");
        }
    }
}
