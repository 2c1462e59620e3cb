//! What became of a run.

use std::{fmt, time::Duration};

/// What became of one case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The transport did what the contract says.
    Passed,
    /// It did not; the text says what was expected and what was found.
    Failed(String),
    /// The case needs what the transport or the harness lacks; the text says what.
    NotApplicable(String),
}

/// One case of a [`Report`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CaseReport {
    /// The case.
    pub name: &'static str,
    /// What became of it.
    pub outcome: Outcome,
    /// How long it took.
    pub elapsed: Duration,
}

/// What became of every case. `Display` prints one line each and a summary.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// The harness.
    pub harness: String,
    /// In the order in which they ran.
    pub cases: Vec<CaseReport>,
}

impl Report {
    pub(super) fn new(harness: String) -> Self {
        Self { harness, cases: Vec::new() }
    }

    /// Names of the cases that passed.
    pub fn passed(&self) -> Vec<&'static str> {
        self.select(|o| matches!(o, Outcome::Passed))
    }

    /// Names of the cases that failed.
    pub fn failed(&self) -> Vec<&'static str> {
        self.select(|o| matches!(o, Outcome::Failed(_)))
    }

    /// Names of the cases that did not apply.
    pub fn not_applicable(&self) -> Vec<&'static str> {
        self.select(|o| matches!(o, Outcome::NotApplicable(_)))
    }

    /// `Ok` if nothing failed and exactly the cases in `expected_not_applicable` did not apply;
    /// otherwise the whole report as text, differences first.
    ///
    /// Naming the cases keeps one from dropping out unseen when a capability gets lost.
    pub fn verdict(&self, expected_not_applicable: &[&str]) -> Result<(), String> {
        let mut complaints = Vec::new();
        for case in &self.cases {
            let expected = expected_not_applicable.contains(&case.name);
            match &case.outcome {
                Outcome::Failed(why) => complaints.push(format!("{} failed: {why}", case.name)),
                Outcome::NotApplicable(why) if !expected => {
                    complaints.push(format!("{} should apply, but: {why}", case.name));
                }
                Outcome::Passed if expected => {
                    complaints.push(format!("{} was not expected to apply, but passed", case.name));
                }
                _ => {}
            }
        }
        for name in expected_not_applicable {
            if !self.cases.iter().any(|c| c.name == *name) {
                complaints.push(format!("{name} is not a case of the suite"));
            }
        }
        if complaints.is_empty() {
            return Ok(());
        }
        Err(format!("{}\n\n{self}", complaints.join("\n")))
    }

    fn select(&self, wanted: impl Fn(&Outcome) -> bool) -> Vec<&'static str> {
        self.cases.iter().filter(|c| wanted(&c.outcome)).map(|c| c.name).collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "conformance of {}", self.harness)?;
        let width = self.cases.iter().map(|c| c.name.len()).max().unwrap_or(0);
        for case in &self.cases {
            let ms = case.elapsed.as_secs_f64() * 1e3;
            let (word, why) = match &case.outcome {
                Outcome::Passed => ("ok", None),
                Outcome::Failed(why) => ("FAILED", Some(why)),
                Outcome::NotApplicable(why) => ("n/a", Some(why)),
            };
            write!(f, "  {:<width$}  {word:<6} {ms:>9.1} ms", case.name)?;
            match why {
                Some(why) => writeln!(f, "  {why}")?,
                None => writeln!(f)?,
            }
        }
        write!(
            f,
            "{} passed, {} failed, {} not applicable",
            self.passed().len(),
            self.failed().len(),
            self.not_applicable().len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let case = |name, outcome| CaseReport { name, outcome, elapsed: Duration::ZERO };
        Report {
            harness: "fake".into(),
            cases: vec![
                case("good", Outcome::Passed),
                case("absent", Outcome::NotApplicable("no views".into())),
            ],
        }
    }

    #[test]
    fn nothing_drops_out_unseen() {
        let mut report = report();
        assert_eq!(report.verdict(&["absent"]), Ok(()));
        assert!(report.verdict(&[]).unwrap_err().contains("absent should apply, but: no views"));
        assert!(report.verdict(&["absent", "good"]).unwrap_err().contains("but passed"));
        assert!(report.verdict(&["absent", "typo"]).unwrap_err().contains("typo is not a case"));
        report.cases[0].outcome = Outcome::Failed("wrong bytes".into());
        assert!(report.verdict(&["absent"]).unwrap_err().contains("good failed: wrong bytes"));
    }

    #[test]
    fn display_counts() {
        let text = report().to_string();
        assert!(text.ends_with("1 passed, 0 failed, 1 not applicable"), "{text}");
        assert_eq!(text.lines().count(), 4);
    }
}
