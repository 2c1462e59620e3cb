//! `cargo xtask lint`: everything but the tests that has to hold before a change is merged.

mod binary;
mod layers;
mod rust_source;
mod text;

use std::{
    process::Command,
    time::{Duration, Instant},
};

use crate::{
    Result,
    libtest::Skipped,
    process::{self, seconds},
    workspace::Workspace,
};

/// Longest single command: a build of all dependencies from nothing, on two slow cores.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Packages with code for devices, and the feature that has all of it.
const CUDA: &[(&str, &str)] = &[
    ("capture-arena", "scripted-cuda"),
    ("transport-mooncake-direct", "cuda"),
    ("featurestore", "cuda"),
];

/// What a check found: problems, each with the offender and what to do; or why it was not run.
type Check = Result<Vec<String>, Skipped>;

/// Runs every check, also after a failed one, and fails where one found a problem.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let mut report =
        Report { started: Instant::now(), passed: 0, failed: Vec::new(), skipped: Vec::new() };
    let names = |public: bool| {
        workspace
            .members
            .iter()
            .filter(move |member| !public || member.is_public())
            .map(|member| member.name.as_str())
    };

    // What takes no time comes first.
    report.check("text of the sources", || text::check(workspace));
    report.check("dependency direction", || Ok(layers::check(&workspace.members)));
    report.check("manifests", || Ok(manifests(workspace)));
    report.check("Cargo.lock is current", || {
        command(
            workspace,
            workspace.cargo().args(["metadata", "--locked", "--format-version=1", "--quiet"]),
        )
    });
    report.check("format", || {
        command(
            workspace,
            workspace.cargo().args(["fmt", "--all", "--check", "--", "--color=never"]),
        )
    });
    if workspace.root.join("fuzz/Cargo.toml").is_file() {
        report.check("format of fuzz", || {
            let mut fmt = workspace.cargo();
            command(
                workspace,
                fmt.args([
                    "fmt",
                    "--manifest-path",
                    "fuzz/Cargo.toml",
                    "--check",
                    "--",
                    "--color=never",
                ]),
            )
        });
    }
    report.check("packages of a default build", || Ok(binary::packages(workspace)));
    for with in binary::LIBRARY_FEATURES {
        let title = format!("packages of the library, features {with:?}");
        report.check(&title, || Ok(binary::library_packages(workspace, with)));
        report.check(&format!("clippy featurestore, features {with:?}"), || {
            let mut clippy = workspace.cargo();
            clippy.args(["clippy", "--no-deps", "--package", "featurestore", "--lib"]);
            clippy.args(["--no-default-features", "--features", with]);
            command(workspace, clippy.args(["--", "-D", "warnings"]))
        });
    }
    report.check("licences, sources and bans", || deny(workspace));
    for name in names(false) {
        // One at a time: built together, one member would get the features that another asks for.
        // The first run leaves out the tests, whose dependencies bring features too.
        for extra in [&[][..], &["--all-targets"]] {
            let title = format!("clippy {name} {}", extra.join(" "));
            report.check(title.trim_end(), || {
                let mut clippy = workspace.cargo();
                clippy.args(["clippy", "--no-deps", "--package", name]).args(extra);
                command(workspace, clippy.args(["--", "-D", "warnings"]))
            });
        }
    }
    for (name, feature) in CUDA {
        report.check(&format!("clippy {name} {feature}"), || {
            let mut clippy = workspace.cargo();
            clippy.args(["clippy", "--no-deps", "--package", name, "--features", feature]);
            command(workspace, clippy.args(["--all-targets", "--", "-D", "warnings"]))
        });
        report.check(&format!("docs {name} {feature}"), || {
            let mut doc = workspace.cargo();
            doc.env("RUSTDOCFLAGS", "-D warnings");
            doc.args(["doc", "--no-deps", "--package", name, "--features", feature]);
            command(workspace, &mut doc)
        });
    }
    for name in names(true) {
        report.check(&format!("docs {name}"), || {
            let mut doc = workspace.cargo();
            doc.env("RUSTDOCFLAGS", "-D warnings");
            command(workspace, doc.args(["doc", "--no-deps", "--package", name]))
        });
    }
    report.check("libraries of the release binary", || {
        let mut build = workspace.cargo();
        build.args(["build", "--release", "--package", "featurestore", "--bins"]);
        let problems = command(workspace, &mut build)?;
        if problems.is_empty() { binary::libraries(workspace) } else { Ok(problems) }
    });
    report.close()
}

struct Report {
    started: Instant,
    passed: usize,
    failed: Vec<String>,
    skipped: Vec<Skipped>,
}

impl Report {
    fn check(&mut self, name: &str, check: impl FnOnce() -> Check) {
        println!("== {name} ({})", seconds(self.started.elapsed()));
        match check() {
            Ok(problems) if problems.is_empty() => self.passed += 1,
            Ok(problems) => {
                for problem in &problems {
                    println!("{problem}");
                }
                self.failed.push(name.to_owned());
            }
            Err(skipped) => {
                println!("not run: {}", skipped.why);
                self.skipped.push(skipped);
            }
        }
    }

    fn close(self) -> Result<()> {
        println!("\n== result ({})", seconds(self.started.elapsed()));
        for Skipped { what, why } in &self.skipped {
            println!("not run: {what}: {why}");
        }
        for name in &self.failed {
            println!("failed: {name}");
        }
        println!(
            "checks: {} good, {} bad, {} not run",
            self.passed,
            self.failed.len(),
            self.skipped.len()
        );
        if self.failed.is_empty() { Ok(()) } else { Err("checks failed".to_owned()) }
    }
}

/// Runs a command whose output says what is wrong.
fn command(workspace: &Workspace, command: &mut Command) -> Check {
    let mut lines = Vec::new();
    let problem =
        process::run(command, &workspace.target, LIMIT, |line| lines.push(line.to_owned()))
            .map_or_else(Some, |ended| ended.problem());
    Ok(match problem {
        Some(problem) => {
            lines.retain(|line| !is_progress(line));
            lines.push(problem);
            lines
        }
        None => Vec::new(),
    })
}

/// Whether cargo only says what it is doing.
fn is_progress(line: &str) -> bool {
    const VERBS: [&str; 8] = [
        "Blocking",
        "Checking",
        "Compiling",
        "Documenting",
        "Downloaded",
        "Downloading",
        "Finished",
        "Fresh",
    ];
    let line = line.trim_start();
    VERBS.iter().any(|verb| line.strip_prefix(verb).is_some_and(|rest| rest.starts_with(' ')))
}

fn deny(workspace: &Workspace) -> Check {
    const NAME: &str = "licences, sources and bans";
    if process::output(workspace.cargo().args(["deny", "--version"])).is_err() {
        return Err(Skipped::new(
            NAME,
            "cargo-deny is not installed: cargo install --locked cargo-deny",
        ));
    }
    let mut deny = workspace.cargo();
    deny.args(["deny", "--all-features", "--locked", "check", "--hide-inclusion-graph"]);
    command(workspace, deny.args(["bans", "licenses", "sources"]))
}

/// What every member says about itself.
fn manifests(workspace: &Workspace) -> Vec<String> {
    let mut problems = Vec::new();
    for member in &workspace.members {
        let manifest = member.folder.join("Cargo.toml");
        let mut wrong = |what: &str| problems.push(format!("{}: {what}", manifest.display()));
        if member.license.as_deref() != Some("Apache-2.0") {
            wrong("say license.workspace = true");
        }
        if member.rust_version.is_none() {
            wrong("say rust-version.workspace = true");
        }
        let text = std::fs::read_to_string(workspace.root.join(&manifest)).unwrap_or_default();
        if !inherits_lints(&text) {
            wrong("say [lints] workspace = true");
        }
    }
    problems
}

fn inherits_lints(manifest: &str) -> bool {
    let mut lines = manifest.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    lines.any(|line| line == "lints.workspace = true")
        || manifest.split_once("[lints]").is_some_and(|(_, rest)| {
            let table = rest.split("\n[").next().unwrap_or_default();
            table.lines().any(|line| line.trim() == "workspace = true")
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lints_are_inherited_in_either_spelling() {
        assert!(inherits_lints("[package]\nname = \"a\"\n\n[lints]\nworkspace = true\n"));
        assert!(inherits_lints("lints.workspace = true # all of them\n"));
        assert!(!inherits_lints("[package]\nname = \"a\"\n"));
        assert!(!inherits_lints(
            "[lints]\nrust.missing_docs = \"allow\"\n[features]\nworkspace = true\n"
        ));
    }

    #[test]
    fn progress_of_cargo_is_told_from_findings() {
        assert!(is_progress("    Checking serde v1.0.229"));
        assert!(!is_progress("error: unused variable: `Checking`"));
        assert!(!is_progress("Checkings"));
    }

    #[test]
    fn report_goes_on_after_a_bad_check() {
        let mut report =
            Report { started: Instant::now(), passed: 0, failed: Vec::new(), skipped: Vec::new() };
        report.check("bad", || Ok(vec!["a.rs: offends".to_owned()]));
        report.check("good", || Ok(Vec::new()));
        report.check("absent", || Err(Skipped::new("absent", "no tool")));
        assert_eq!((report.passed, report.failed.len(), report.skipped.len()), (1, 1, 1));
        assert!(report.close().is_err());
    }
}
