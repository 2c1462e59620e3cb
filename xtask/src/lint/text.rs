//! What the text of the repository must not have: traces of the machine it was written on, stand-ins
//! for code, unsafe code outside its few places, tests switched off without a reason.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use crate::{
    libtest::Skipped,
    lint::{Check, rust_source::RustSource},
    workspace::Workspace,
};

/// Longest source below `crates/*/src`, in lines.
const MAX_LINES: usize = 600;

/// Sources that are longer, and why that reads better than several.
const LONG_FILES: &[(&str, &str)] = &[];

/// Where `unsafe` may stand, a source or a folder of them, and what for.
const UNSAFE_PLACES: &[(&str, &str)] = &[
    ("benches/benches/arena.rs", "counts what the books allocate"),
    ("benches/examples/cuda_store.rs", "copies between addresses"),
    ("crates/capture-arena/src/backing", "maps memory"),
    ("crates/capture-arena/src/backing.rs", "maps memory"),
    ("crates/capture-arena/src/cuda", "calls the CUDA driver"),
    ("crates/capture-arena/tests/cuda", "queues copies of device memory"),
    ("crates/capture-arena/tests/gpu.rs", "queues copies of device memory"),
    ("crates/capture-arena/src/pin.rs", "loom's cells, in the models of the pins"),
    ("crates/capture-arena/tests/arena/processes.rs", "views what its publisher never frees"),
    ("crates/mooncake-sys", "calls C libraries, in its tests too"),
    ("crates/transport-core/examples/dlpack_export.rs", "hands tensors to Python as C structs"),
    ("crates/rollout-codec/examples/dlpack_rollout.rs", "is loaded by Python as a C library is"),
    ("crates/transport-mooncake-store/tests/device.rs", "queues work of a producer"),
    ("crates/transport-mooncake-store/tests/fake", "is called as a C library is"),
    ("crates/transport-mooncake-store/tests/lent", "passes such calls on"),
    ("crates/transport-mooncake-store/tests/reference.rs", "passes such calls on"),
    ("crates/rollout-codec/tests/memory.rs", "counts what decoding allocates"),
    ("crates/transport-core/src/memory", "hands out views of memory"),
    ("crates/transport-core/src/memory.rs", "hands out views of memory"),
    ("crates/transport-mooncake-direct/benches", "copies between addresses"),
    ("crates/transport-mooncake-direct/examples/dlpack_device.rs", "hands tensors to Python"),
    ("crates/transport-mooncake-direct/tests", "calls a transfer engine, and is called as one"),
    ("crates/transport-mooncake-direct/src", "the engines map and fill memory of others"),
    ("crates/transport-mooncake-direct/tests/device.rs", "queues work of a producer"),
    ("crates/transport-mooncake-direct/tests/gpu_sink.rs", "queues work of a producer"),
    ("crates/transport-mooncake-store/src", "registers memory with a C library"),
];

/// Crates that say `#![forbid(unsafe_code)]` in each of their roots.
const UNSAFE_FREE: &[&str] =
    &["crates/control-proto", "crates/featurestore", "benches", "tests", "xtask"];

/// Starts of paths that only exist on the machine of whoever wrote them.
const MACHINE_PATHS: &[&str] = &["/home/", "/root/", "/Users/"];

/// Files that name such paths on purpose, and why.
const NAMES_PATHS: &[(&str, &str)] = &[("xtask/src/lint/text.rs", "it says what to look for")];

/// Looks at every text that git has or would have.
pub(super) fn check(workspace: &Workspace) -> Check {
    let files = workspace.files().map_err(|why| Skipped::new("text of the sources", why))?;
    let traces = Traces::of_this_machine(&workspace.root);
    let mut problems = Vec::new();
    for file in &files {
        // What is not UTF-8 is data.
        if let Ok(text) = fs::read_to_string(workspace.root.join(file)) {
            problems.extend(check_file(file, &text, &traces));
        }
    }
    for (listed, _) in LONG_FILES.iter().chain(NAMES_PATHS) {
        if !files.iter().any(|file| file == Path::new(listed)) {
            problems.push(format!("{listed}: listed in xtask/src/lint/text.rs and not there"));
        }
    }
    Ok(problems)
}

/// What gives away the machine that something was written on.
struct Traces(Vec<String>);

impl Traces {
    fn of_this_machine(root: &Path) -> Self {
        let mut traces: Vec<String> = MACHINE_PATHS.iter().map(|&path| path.to_owned()).collect();
        let folders = [Some(root.to_owned()), env::var_os("CARGO_HOME").map(PathBuf::from)];
        for folder in folders.into_iter().flatten() {
            // A folder right below `/` has a name that may well be a word of a text.
            if folder.components().count() > 2 {
                traces.push(folder.display().to_string());
            }
        }
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        // Short names are words too.
        if host.trim().len() >= 8 && host.trim() != "localhost" {
            traces.push(host.trim().to_owned());
        }
        Self(traces)
    }

    fn find(&self, line: &str) -> Option<&str> {
        self.0.iter().map(String::as_str).find(|trace| {
            line.match_indices(trace).any(|(at, _)| {
                // "https://host/home/" and "a/home/" are no paths of a machine.
                let before = line[..at].chars().next_back();
                !before.is_some_and(|char| char.is_alphanumeric() || "._-/}".contains(char))
            })
        })
    }
}

fn check_file(file: &Path, text: &str, traces: &Traces) -> Vec<String> {
    let mut found = Findings { file, problems: Vec::new() };
    if !NAMES_PATHS.iter().any(|(listed, _)| file == Path::new(listed)) {
        for (number, line) in text.lines().enumerate() {
            if let Some(trace) = traces.find(line) {
                found.at(
                    number,
                    &format!("{trace}: a trace of one machine; write what holds on all"),
                );
            }
        }
    }
    if file.extension().is_some_and(|extension| extension == "rs") {
        let source = RustSource::parse(text);
        found.length(text);
        found.stand_ins(&source);
        found.unsafe_code(&source);
        found.silent_ignores(&source);
    }
    found.problems
}

struct Findings<'a> {
    file: &'a Path,
    problems: Vec<String>,
}

impl Findings<'_> {
    /// Adds a problem of a line counted from 0.
    fn at(&mut self, line: usize, what: &str) {
        self.problems.push(format!("{}:{}: {what}", self.file.display(), line + 1));
    }

    fn length(&mut self, text: &str) {
        let mut parts = self.file.components().map(|part| part.as_os_str());
        let is_limited = parts.next().is_some_and(|part| part == "crates")
            && parts.nth(1).is_some_and(|part| part == "src");
        let lines = text.lines().count();
        let listed = LONG_FILES.iter().any(|(listed, _)| self.file == Path::new(listed));
        if is_limited && !listed && lines > MAX_LINES {
            self.at(
                lines - 1,
                &format!(
                    "longer than {MAX_LINES} lines; split it by what its parts do, \
                 or list it in xtask/src/lint/text.rs with the reason"
                ),
            );
        }
        if listed && lines <= MAX_LINES {
            self.at(0, "no longer a long file; drop it from xtask/src/lint/text.rs");
        }
    }

    fn stand_ins(&mut self, source: &RustSource) {
        for name in ["todo", "unimplemented", "dbg"] {
            for line in source.lines_with_word(name) {
                if source.code[line].contains(&format!("{name}!")) {
                    self.at(line, &format!("{name}! is a stand-in; finish it or return an error"));
                }
            }
        }
    }

    fn unsafe_code(&mut self, source: &RustSource) {
        let is_place = UNSAFE_PLACES.iter().any(|(place, _)| self.file.starts_with(place));
        for line in source.lines_with_word("unsafe") {
            if !is_place {
                self.at(line, "unsafe outside its places; see CONTRIBUTING, \"Unsafe code\"");
            } else if opens_block(source, line) && !source.is_marked(line, "SAFETY:") {
                self.at(line, "unsafe without a `// SAFETY:` comment right above it");
            }
        }
        let is_root = self.file.ends_with("src/lib.rs") || self.file.ends_with("src/main.rs");
        let forbids = || source.code.iter().any(|line| line.contains("#![forbid(unsafe_code)]"));
        if is_root && UNSAFE_FREE.iter().any(|place| self.file.starts_with(place)) && !forbids() {
            self.at(0, "say #![forbid(unsafe_code)] at the top");
        }
    }

    fn silent_ignores(&mut self, source: &RustSource) {
        for line in source.lines_with_word("ignore") {
            if source.code[line].contains("#[ignore]") {
                self.at(line, "say why and how to run it: #[ignore = \"needs ...: command\"]");
            }
        }
        for (line, comment) in source.comments.iter().enumerate() {
            let fence = comment.trim_start_matches(['/', '!', ' ', '*']).strip_prefix("```");
            if fence.is_some_and(|tags| tags.split(',').any(|tag| tag.trim() == "ignore")) {
                self.at(line, "an example that nobody compiles; use no_run, or text");
            }
        }
    }
}

/// Whether the `unsafe` of a line opens a block or an implementation.
fn opens_block(source: &RustSource, line: usize) -> bool {
    let code = source.code[line..].iter().take(2).map(String::as_str).collect::<Vec<_>>().join(" ");
    code.split("unsafe").skip(1).any(|rest| {
        let rest = rest.trim_start();
        rest.starts_with('{') || rest.starts_with("impl")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(file: &str, text: &str) -> Vec<String> {
        let traces = Traces(vec!["/root/".to_owned(), "/srv/builds/featurestore".to_owned()]);
        check_file(Path::new(file), text, &traces)
    }

    #[test]
    fn paths_of_a_machine_are_found_in_any_text() {
        let found = problems("README.md", "fine\nsee /srv/builds/featurestore/out\n");
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("README.md:2: "), "{found:?}");
        assert_eq!(problems("a.rs", "const A: &str = \"/root/x\";\n").len(), 1);
        assert_eq!(problems("a.md", "https://example.org/root/x and target/root/x"), [""; 0]);
    }

    #[test]
    fn stand_ins_are_found_in_code_only() {
        let found =
            problems("crates/a/src/b.rs", "fn a() { todo!() }\n// todo! later\nfn todo() {}\n");
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("b.rs:1:"), "{found:?}");
        assert_eq!(problems("a.rs", "unimplemented!(\"x\")").len(), 1);
    }

    #[test]
    fn unsafe_belongs_to_its_places() {
        let bare = "fn a() { unsafe { b() } }\n";
        assert!(problems("crates/featurestore/src/a.rs", bare)[0].contains("outside its places"));
        assert!(problems("crates/transport-core/src/memory.rs", bare)[0].contains("SAFETY"));
        let marked = "// SAFETY: `b` has no precondition.\nunsafe { b() }\n";
        assert_eq!(problems("crates/transport-core/src/memory.rs", marked), [""; 0]);
        assert_eq!(problems("crates/transport-core/src/memory/view.rs", marked), [""; 0]);
        let function = "/// # Safety\n/// - `p` is valid.\nunsafe fn a(p: *const u8) {}\n";
        assert_eq!(problems("crates/transport-core/src/memory.rs", function), [""; 0]);
        let implementation = "\nunsafe impl Send for A {}\n";
        assert_eq!(problems("crates/transport-core/src/memory.rs", implementation).len(), 1);
    }

    #[test]
    fn crates_without_unsafe_say_so() {
        assert_eq!(problems("crates/control-proto/src/lib.rs", "//! x\n").len(), 1);
        let said = "//! x\n#![forbid(unsafe_code)]\n";
        assert_eq!(problems("crates/control-proto/src/lib.rs", said), [""; 0]);
        assert_eq!(problems("crates/transport-core/src/lib.rs", "//! x\n"), [""; 0]);
    }

    #[test]
    fn long_sources_of_crates_are_found() {
        let long = "fn a() {}\n".repeat(MAX_LINES + 1);
        assert_eq!(problems("crates/a/src/b.rs", &long).len(), 1);
        assert_eq!(problems("crates/a/tests/b.rs", &long), [""; 0]);
        assert_eq!(problems("crates/a/src/b.rs", &"fn a() {}\n".repeat(MAX_LINES)), [""; 0]);
    }

    #[test]
    fn tests_are_not_switched_off_in_silence() {
        assert_eq!(problems("a.rs", "#[test]\n#[ignore]\nfn a() {}\n").len(), 1);
        assert_eq!(
            problems("a.rs", "#[test]\n#[ignore = \"needs a GPU: x\"]\nfn a() {}\n"),
            [""; 0]
        );
        assert_eq!(problems("a.rs", "/// ```ignore\n/// x\n/// ```\n").len(), 1);
        assert_eq!(problems("a.rs", "/// ```no_run\n/// x\n/// ```\n"), [""; 0]);
    }
}
