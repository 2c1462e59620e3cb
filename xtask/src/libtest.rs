//! Reading what `cargo test` prints: counts, and every test that failed or was not run, by name.

use std::mem;

/// What a run of `cargo test` did.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    /// `target: test` of each failure. A target that ended without a result counts as one.
    pub(crate) failed: Vec<String>,
    pub(crate) skipped: Vec<Skipped>,
}

/// A test that was not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Skipped {
    /// Test target and test, or the name of a whole step.
    pub(crate) what: String,
    pub(crate) why: String,
}

impl Skipped {
    pub(crate) fn new(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self { what: what.into(), why: why.into() }
    }

    /// The test without its target, as the harness knows it.
    pub(crate) fn test(&self) -> &str {
        self.what.split_once(": ").map_or(&self.what, |(_, test)| test)
    }
}

impl Tally {
    /// Adds what another run did.
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed.extend(other.failed);
        self.skipped.extend(other.skipped);
    }

    /// Takes in the notes of tests that found out while running that they cannot run here. They
    /// passed as far as the harness knows.
    ///
    /// A note is a line of a test's name, a tab, and why.
    pub(crate) fn add_notes(&mut self, notes: &str) {
        let mut seen = Vec::new();
        for note in notes.lines().filter(|note| !note.trim().is_empty()) {
            let (what, why) = note.split_once('\t').unwrap_or((note, "no reason noted"));
            let skipped = Skipped::new(what.trim(), why.trim());
            if !seen.contains(&skipped) {
                self.passed = self.passed.saturating_sub(1);
                seen.push(skipped);
            }
        }
        self.skipped.extend(seen);
    }

    /// Counts a failure unless as many tests ran as were asked for by name.
    pub(crate) fn require(&mut self, step: &str, asked: usize) {
        let run = self.passed + self.failed.len() as u64;
        if run < asked as u64 {
            self.failed.push(format!("{step}: {asked} asked for, {run} run"));
        }
    }

    /// Drops what `earlier` lists as skipped too, so that it is listed once.
    pub(crate) fn forget_skipped(&mut self, earlier: &Self) {
        self.skipped.retain(|test| !earlier.skipped.contains(test));
    }

    /// Takes out what is skipped for reasons that start so.
    pub(crate) fn take_skipped(&mut self, start: &str) -> Vec<Skipped> {
        let (taken, rest) = std::mem::take(&mut self.skipped)
            .into_iter()
            .partition(|skipped| skipped.why.starts_with(start));
        self.skipped = rest;
        taken
    }

    /// Ignored tests whose reason is that they need `tool`: `needs TOOL; ...`.
    pub(crate) fn waiting_for(&self, tool: &str) -> Vec<Skipped> {
        let start = format!("needs {tool};");
        self.skipped.iter().filter(|skipped| skipped.why.starts_with(&start)).cloned().collect()
    }

    /// The closing line of every run.
    pub(crate) fn line(&self) -> String {
        format!(
            "{} passed, {} failed, {} skipped",
            self.passed,
            self.failed.len(),
            self.skipped.len()
        )
    }
}

/// Reads the output of `cargo test --no-fail-fast`, standard error and output in order.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    tally: Tally,
    /// Target whose tests run now.
    target: String,
    /// Whether that target has printed no result yet.
    waiting: bool,
    /// Targets that printed none at all.
    silent: Vec<String>,
    /// Names read from the lines of the current target, checked against its counts.
    failed: Vec<String>,
    skipped: Vec<Skipped>,
    /// Inside the report of failures, where every line is shown.
    reporting: bool,
}

impl Reader {
    /// Takes the next line and says whether a person wants to see it: all but the lines of tests
    /// that passed.
    pub(crate) fn line(&mut self, line: &str) -> bool {
        let trimmed = line.trim_start();
        if let Some(target) = started_target(trimmed) {
            self.start(target);
            return true;
        }
        if let Some(counts) = trimmed.strip_prefix("test result: ").and_then(Counts::parse) {
            self.finish(&counts);
            return counts.passed + counts.failed + counts.ignored > 0;
        }
        if self.reporting {
            return true;
        }
        if trimmed == "failures:" {
            self.reporting = true;
            return true;
        }
        if let Some((name, result)) = line.strip_prefix("test ").and_then(split_result) {
            let name = format!("{}: {}", self.target, name.trim_end_matches(" - should panic"));
            match result {
                TestResult::Ok => return false,
                TestResult::Failed => self.failed.push(name),
                TestResult::Ignored(why) => self.skipped.push(Skipped::new(name, why)),
            }
            return true;
        }
        !(line.is_empty() || (line.starts_with("running ") && line.contains(" test")))
    }

    /// Ends the reading; `success` is whether the command said so by its status.
    pub(crate) fn finish_all(mut self, success: bool) -> Tally {
        self.start(String::new());
        if !success {
            // A target that aborts prints no result, and neither does one with its own harness.
            let silent = mem::take(&mut self.silent);
            self.tally.failed.extend(
                silent.into_iter().map(|target| format!("{target}: ended without a result")),
            );
        }
        self.tally
    }

    fn start(&mut self, target: String) {
        if self.waiting {
            self.silent.push(mem::take(&mut self.target));
            // What it printed before it ended is known all the same.
            self.tally.failed.append(&mut self.failed);
            self.tally.skipped.append(&mut self.skipped);
        }
        self.waiting = !target.is_empty();
        self.target = target;
        self.reporting = false;
    }

    fn finish(&mut self, counts: &Counts) {
        self.waiting = false;
        self.reporting = false;
        self.tally.passed += counts.passed;
        let named = self.failed.len() as u64;
        for _ in named..counts.failed {
            self.failed.push(format!("{}: a test whose line was not readable", self.target));
        }
        for _ in self.skipped.len() as u64..counts.ignored {
            self.skipped.push(Skipped::new(
                format!("{}: a test whose line was not readable", self.target),
                "ignored",
            ));
        }
        self.tally.failed.append(&mut self.failed);
        self.tally.skipped.append(&mut self.skipped);
    }
}

#[derive(Debug, PartialEq, Eq)]
enum TestResult<'a> {
    Ok,
    Failed,
    Ignored(&'a str),
}

/// Splits `name ... result`.
fn split_result(line: &str) -> Option<(&str, TestResult<'_>)> {
    let (name, result) = line.split_once(" ... ")?;
    if let Some(why) = result.strip_prefix("ignored") {
        let why = why.strip_prefix(", ").unwrap_or("ignored, without a reason");
        return Some((name, TestResult::Ignored(why)));
    }
    // Behind the result there may be a duration; before it, what the test printed uncaptured.
    if result.ends_with("ok") || result.starts_with("ok ") {
        return Some((name, TestResult::Ok));
    }
    if result.ends_with("FAILED") || result.starts_with("FAILED ") {
        return Some((name, TestResult::Failed));
    }
    None
}

#[derive(Debug, PartialEq, Eq)]
struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Counts {
    /// Parses `ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.01s`.
    fn parse(text: &str) -> Option<Self> {
        let (_, text) = text.split_once(". ")?;
        let count = |name: &str| -> Option<u64> {
            text.split("; ").find_map(|part| part.strip_suffix(name)?.trim().parse().ok())
        };
        Some(Self {
            passed: count("passed")?,
            failed: count("failed")?,
            ignored: count("ignored")?,
        })
    }
}

/// The target that a line of cargo announces, or `None`.
fn started_target(line: &str) -> Option<String> {
    if let Some(name) = line.strip_prefix("Doc-tests ") {
        return Some(format!("{name} (docs)"));
    }
    // Running unittests src/lib.rs (target/debug/deps/capture_arena-0123456789abcdef)
    let (_, file) = line.strip_prefix("Running ")?.rsplit_once(" (")?;
    let file = file.strip_suffix(')')?.rsplit('/').next()?;
    let name = match file.rsplit_once('-') {
        Some((name, hash)) if hash.len() == 16 => name,
        _ => file,
    };
    Some(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(output: &str, success: bool) -> (Tally, String) {
        let mut reader = Reader::default();
        let shown: Vec<&str> = output.lines().filter(|line| reader.line(line)).collect();
        (reader.finish_all(success), shown.join("\n"))
    }

    const MIXED: &str = "\
   Compiling capture-arena v0.1.0
     Running unittests src/lib.rs (target/debug/deps/capture_arena-0123456789abcdef)

running 4 tests
test arena::tests::fits ... ok
test arena::tests::four_gib ... ignored, needs 5 GiB of memory: cargo test -p capture-arena -- --ignored four_gib
test arena::tests::lost ... FAILED
test arena::tests::panics - should panic ... ok

failures:

---- arena::tests::lost stdout ----
test inner ... ok

assertion failed: left == right

failures:
    arena::tests::lost

test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.02s

error: test failed, to rerun pass `-p capture-arena --lib`
   Doc-tests capture_arena

running 2 tests
test crates/capture-arena/src/lib.rs - Arena (line 7) ... ignored
test crates/capture-arena/src/lib.rs - Arena::hold (line 9) ... ok

test result: ok. 1 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.11s
";

    #[test]
    fn counts_names_and_reasons_are_read() {
        let (tally, _) = read(MIXED, false);
        assert_eq!(tally.failed, ["capture_arena: arena::tests::lost"]);
        assert_eq!(
            tally.skipped,
            [
                Skipped::new(
                    "capture_arena: arena::tests::four_gib",
                    "needs 5 GiB of memory: cargo test -p capture-arena -- --ignored four_gib"
                ),
                Skipped::new(
                    "capture_arena (docs): crates/capture-arena/src/lib.rs - Arena (line 7)",
                    "ignored, without a reason"
                ),
            ]
        );
        assert_eq!(tally.line(), "3 passed, 1 failed, 2 skipped");
    }

    #[test]
    fn lines_of_passing_tests_are_hidden_and_reports_are_not() {
        let (_, shown) = read(MIXED, false);
        assert!(!shown.contains("fits"));
        assert!(!shown.contains("running 4 tests"));
        assert!(
            shown.contains("---- arena::tests::lost stdout ----\ntest inner ... ok\n\nassertion")
        );
        assert!(shown.contains("Compiling capture-arena"));
        assert!(shown.contains("error: test failed"));
    }

    #[test]
    fn target_that_aborts_is_a_failure() {
        let output = "\
     Running tests/faults.rs (target/debug/deps/faults-0123456789abcdef)
running 2 tests
test first ... ok
error: test failed, to rerun pass `-p featurestore-tests --test faults`
Caused by:
  process didn't exit successfully: `...` (signal: 6, SIGABRT: process abort signal)
     Running tests/next.rs (target/debug/deps/next-0123456789abcdef)
test result: ok. 5 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s
";
        let (tally, shown) = read(output, false);
        assert_eq!(tally.failed, ["faults: ended without a result"]);
        assert_eq!(tally.passed, 5);
        assert!(shown.contains("SIGABRT"));
    }

    #[test]
    fn target_with_its_own_harness_is_no_failure() {
        let output = "     Running tests/own.rs (target/debug/deps/own-0123456789abcdef)\nfine\n";
        let (tally, _) = read(output, true);
        assert_eq!(tally, Tally::default());
    }

    #[test]
    fn lines_broken_by_uncaptured_output_are_still_counted() {
        let output = "\
     Running unittests src/lib.rs (target/debug/deps/x-0123456789abcdef)
test a ... server says hello
ok
test b ... server says hello
ignored
test c ... noise FAILED
test result: FAILED. 1 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out; finished in 1.00s
";
        let (tally, _) = read(output, false);
        assert_eq!((tally.passed, tally.failed.len(), tally.skipped.len()), (1, 2, 1));
        assert_eq!(tally.failed[0], "x: c");
        assert!(tally.failed[1].contains("not readable"));
    }

    #[test]
    fn notes_turn_passes_into_skips_once() {
        let mut tally = Tally { passed: 3, ..Tally::default() };
        tally.add_notes("python_client\tno python3 on this machine\n\npython_client\tno python3 on this machine\n");
        assert_eq!(tally.skipped, [Skipped::new("python_client", "no python3 on this machine")]);
        assert_eq!(tally.line(), "2 passed, 0 failed, 1 skipped");
    }

    #[test]
    fn tests_that_wait_for_a_tool_are_found_by_their_reason() {
        let python = Skipped::new("plain: frees::late", "needs python3; runs where it is");
        let tally = Tally {
            skipped: vec![python.clone(), Skipped::new("x: y", "needs python3.14t; and more")],
            ..Tally::default()
        };
        assert_eq!(tally.waiting_for("python3"), [python]);
        assert_eq!(tally.waiting_for("python3")[0].test(), "frees::late");
        assert_eq!(tally.waiting_for("perl"), []);
    }

    #[test]
    fn tests_asked_for_have_to_run() {
        let mut tally = Tally { passed: 1, failed: vec!["x: y".into()], ..Tally::default() };
        tally.require("step", 2);
        assert_eq!(tally.failed, ["x: y"]);
        tally.require("step", 3);
        assert_eq!(tally.failed[1], "step: 3 asked for, 2 run");
    }

    #[test]
    fn what_is_skipped_twice_is_listed_once() {
        let skipped = |names: &[&str]| Tally {
            skipped: names.iter().map(|name| Skipped::new(*name, "why")).collect(),
            ..Tally::default()
        };
        let mut again = skipped(&["a: b", "c: d"]);
        again.forget_skipped(&skipped(&["a: b"]));
        assert_eq!(again, skipped(&["c: d"]));
    }

    #[test]
    fn counts_need_all_three_numbers() {
        assert!(Counts::parse("ok. 3 passed; 0 failed").is_none());
        assert!(Counts::parse("nonsense").is_none());
        let counts = Counts::parse("FAILED. 3 passed; 2 failed; 1 ignored; 0 measured").unwrap();
        assert_eq!(counts, Counts { passed: 3, failed: 2, ignored: 1 });
    }

    #[test]
    fn results_are_added() {
        let (mut tally, _) = read(MIXED, false);
        let (other, _) = read(MIXED, false);
        tally.add(other);
        assert_eq!(tally.line(), "6 passed, 2 failed, 4 skipped");
    }
}
