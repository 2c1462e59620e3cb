//! What a default build pulls in and what its binary is linked with.

use crate::{libtest::Skipped, lint::Check, process, workspace::Workspace};

/// Packages that no default build may pull in, and why.
const BANNED: &[(&str, &str)] = &[
    ("bindgen", "a build needs no libclang: bindings are committed"),
    ("cudarc", "CUDA is behind the feature `cuda`"),
    ("openssl-sys", "a build needs no system libraries"),
    ("pyo3", "Python is behind the feature `mooncake-python`"),
    ("pyo3-ffi", "Python is behind the feature `mooncake-python`"),
];

/// Packages that only featurestore's command line and its lifecycle may pull in: who links the
/// library without those pays for none of them.
const COMMAND_LINE: &[&str] = &[
    "axum",
    "clap",
    "hyper",
    "hyper-util",
    "indicatif",
    "reqwest",
    "rusqlite",
    "safetensors",
    "schemars",
    "sha2",
    "tower",
    "tracing-subscriber",
];

/// Features of featurestore that libraries may ask for, each checked by itself.
pub(super) const LIBRARY_FEATURES: &[&str] = &["", "direct", "store"];

/// Libraries that every Linux machine has, by the start of their file names.
const ALLOWED: &[&str] = &[
    "ld-linux",
    "libc.so",
    "libdl.so",
    "libgcc_s.so",
    "libm.so",
    "libpthread.so",
    "librt.so",
    "linux-vdso",
];

/// Names each banned package that a default build of a default member pulls in.
pub(super) fn packages(workspace: &Workspace) -> Vec<String> {
    let mut problems = Vec::new();
    for member in workspace.members.iter().filter(|member| member.is_default) {
        let mut tree = workspace.cargo();
        tree.args(["tree", "--package", &member.name, "--edges", "normal,build"]);
        match process::output(tree.args(["--prefix", "none", "--format", "{p}"])) {
            Ok(tree) => problems.extend(banned(&member.name, &tree)),
            Err(problem) => problems.push(problem),
        }
    }
    problems
}

/// Names each package of the command line that the library pulls in, with the features `with`.
pub(super) fn library_packages(workspace: &Workspace, with: &str) -> Vec<String> {
    let mut tree = workspace.cargo();
    tree.args(["tree", "--package", "featurestore", "--edges", "normal,build"]);
    tree.args(["--no-default-features", "--features", with]);
    match process::output(tree.args(["--prefix", "none", "--format", "{p}"])) {
        Ok(tree) => {
            let found = COMMAND_LINE.iter().filter(|name| pulls_in(&tree, name));
            let problem = |name| {
                format!(
                    "featurestore without its feature `cli` pulls in {name}; find it with: \
                     cargo tree -p featurestore --no-default-features --features {with} -i {name}"
                )
            };
            found.map(problem).collect()
        }
        Err(problem) => vec![problem],
    }
}

/// Names each library of the release binary that a bare machine may lack.
pub(super) fn libraries(workspace: &Workspace) -> Check {
    let binary = workspace.release_binary();
    if process::output(workspace.command("ldd").arg("--version")).is_err() {
        return Err(Skipped::new("libraries of the release binary", "no ldd on this machine"));
    }
    let problems = match process::output(workspace.command("ldd").arg(&binary)) {
        Ok(listing) => foreign(&listing),
        // Fully static.
        Err(problem) if problem.contains("not a dynamic executable") => Vec::new(),
        Err(problem) => vec![problem],
    };
    Ok(problems)
}

fn banned(member: &str, tree: &str) -> Vec<String> {
    let mut problems = Vec::new();
    for (name, why) in BANNED {
        if pulls_in(tree, name) {
            problems.push(format!(
                "{member}: a default build pulls in {name}, but {why}; \
                 find it with: cargo tree -p {member} -i {name}"
            ));
        }
    }
    problems
}

/// Whether the output of `cargo tree` has a package of that whole name.
fn pulls_in(tree: &str, name: &str) -> bool {
    tree.lines().any(|line| line.split(' ').next() == Some(name))
}

fn foreign(listing: &str) -> Vec<String> {
    let mut problems = Vec::new();
    for line in listing.lines().map(str::trim).filter(|line| !line.is_empty()) {
        // "libc.so.6 => /lib/... (0x...)", "/lib64/ld-linux-x86-64.so.2 (0x...)", "linux-vdso.so.1 (...)"
        let name = line.split_whitespace().next().unwrap_or_default();
        let file = name.rsplit('/').next().unwrap_or_default();
        if line == "statically linked" || ALLOWED.iter().any(|allowed| file.starts_with(allowed)) {
            continue;
        }
        problems
            .push(format!("the release binary is linked with {file}; load it at run time instead"));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn banned_package_is_named_whole() {
        let tree = "featurestore v0.1.0 (path)\nbindgen-helper v1.0.0\ncudarc v0.19.10\n";
        let problems = banned("featurestore", tree);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].contains("cudarc") && problems[0].contains("cargo tree"));
    }

    #[test]
    fn library_pulls_in_nothing_of_the_command_line() {
        let _alone = crate::process::tests::alone();
        let workspace = Workspace::load().unwrap();
        for with in LIBRARY_FEATURES {
            assert_eq!(library_packages(&workspace, with), Vec::<String>::new(), "{with:?}");
        }
        let problems = library_packages(&workspace, "cli");
        assert!(problems.iter().any(|problem| problem.contains("axum")), "{problems:?}");
    }

    #[test]
    fn system_libraries_pass_and_others_do_not() {
        let good = "\
\tlinux-vdso.so.1 (0x00007ffd)
\tlibgcc_s.so.1 => /lib/x86_64-linux-gnu/libgcc_s.so.1 (0x00007f00)
\tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007f00)
\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f00)
\t/lib64/ld-linux-x86-64.so.2 (0x00007f00)
";
        assert_eq!(foreign(good), Vec::<String>::new());
        assert_eq!(foreign("\tstatically linked\n"), Vec::<String>::new());
        for library in ["libcuda.so.1", "libibverbs.so.1", "libpython3.12.so.1.0", "libstdc++.so.6"]
        {
            let problems = foreign(&format!("{good}\t{library} => not found\n"));
            assert_eq!(problems.len(), 1, "{library}");
            assert!(problems[0].contains(library));
        }
    }
}
