//! What the workspace consists of, as `cargo metadata` tells it.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use crate::{Result, process};

/// The members of the workspace and where things lie.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// Folder of the workspace's `Cargo.toml`.
    pub(crate) root: PathBuf,
    /// Where builds go.
    pub(crate) target: PathBuf,
    /// In the order of cargo.
    pub(crate) members: Vec<Member>,
}

/// One package of the workspace.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) name: String,
    /// Folder, relative to the workspace's root.
    pub(crate) folder: PathBuf,
    pub(crate) license: Option<String>,
    pub(crate) rust_version: Option<String>,
    /// Whether a plain `cargo build` in the root builds it.
    pub(crate) is_default: bool,
    pub(crate) dependencies: Vec<Dependency>,
    /// Names of the bench targets.
    pub(crate) benches: Vec<String>,
    /// The test targets, the library's own not among them.
    pub(crate) tests: Vec<TestTarget>,
    /// Names of its features.
    pub(crate) features: BTreeSet<String>,
}

impl Member {
    /// Whether others are meant to build on it: everything below `crates/`.
    pub(crate) fn is_public(&self) -> bool {
        self.folder.starts_with("crates")
    }

    /// Test targets that hold tests which one of these features turns on, as their sources say.
    pub(crate) fn tests_for(&self, features: &[&str]) -> Vec<String> {
        let is_gated = |test: &&TestTarget| {
            let source = fs::read_to_string(&test.file).unwrap_or_default();
            features.iter().any(|&feature| {
                test.needs.iter().any(|needed| needed == feature)
                    || source.contains(&format!("feature = \"{feature}\""))
            })
        };
        self.tests.iter().filter(is_gated).map(|test| test.name.clone()).collect()
    }

    /// Whether it has models of its lock-free parts.
    pub(crate) fn uses_loom(&self) -> bool {
        self.dependencies.iter().any(|dependency| dependency.name == "loom")
    }
}

/// A target of integration tests.
#[derive(Debug)]
pub(crate) struct TestTarget {
    pub(crate) name: String,
    /// Its main file.
    file: PathBuf,
    /// Features without which cargo leaves it out.
    needs: Vec<String>,
}

/// One line of a package's dependency tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// Whether it is named by path, which only members are.
    pub(crate) is_local: bool,
}

impl Workspace {
    /// Asks cargo about the workspace that this program was built in.
    pub(crate) fn load() -> Result<Self> {
        // Set by `cargo run`, and right even where the program is started from another folder.
        let manifest = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
        let folder = manifest
            .as_deref()
            .and_then(Path::parent)
            .ok_or("start this as `cargo xtask ...` inside the repository")?;
        let mut command = cargo();
        command.current_dir(folder).args(["metadata", "--format-version=1", "--no-deps"]);
        let text = process::output(&mut command)?;
        Self::parse(&text)
    }

    /// Reads the answer of `cargo metadata`.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let metadata: Value = serde_json::from_str(text)
            .map_err(|error| format!("cargo metadata did not print JSON: {error}"))?;
        let root = PathBuf::from(string(&metadata, "workspace_root")?);
        let target = PathBuf::from(string(&metadata, "target_directory")?);
        let defaults: Vec<&str> = array(&metadata, "workspace_default_members")?
            .iter()
            .filter_map(Value::as_str)
            .collect();
        let mut members = Vec::new();
        for package in array(&metadata, "packages")? {
            let manifest = PathBuf::from(string(package, "manifest_path")?);
            let folder = manifest.parent().unwrap_or(&root);
            members.push(Member {
                name: string(package, "name")?,
                folder: folder.strip_prefix(&root).unwrap_or(folder).to_owned(),
                license: string(package, "license").ok(),
                rust_version: string(package, "rust_version").ok(),
                is_default: defaults.contains(&string(package, "id")?.as_str()),
                dependencies: array(package, "dependencies")?
                    .iter()
                    .map(|dependency| {
                        Ok(Dependency {
                            name: string(dependency, "name")?,
                            is_local: dependency["path"].is_string(),
                        })
                    })
                    .collect::<Result<_>>()?,
                benches: targets(package, "bench")?
                    .map(|target| string(target, "name"))
                    .collect::<Result<_>>()?,
                tests: targets(package, "test")?
                    .map(|target| {
                        Ok(TestTarget {
                            name: string(target, "name")?,
                            file: PathBuf::from(string(target, "src_path")?),
                            needs: array(target, "required-features")
                                .map(|needed| needed.iter().filter_map(Value::as_str))
                                .into_iter()
                                .flatten()
                                .map(str::to_owned)
                                .collect(),
                        })
                    })
                    .collect::<Result<_>>()?,
                features: package["features"]
                    .as_object()
                    .map(|features| features.keys().cloned().collect())
                    .unwrap_or_default(),
            });
        }
        Ok(Self { root, target, members })
    }

    /// A `cargo` of the same toolchain, run in the root.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = cargo();
        command.current_dir(&self.root);
        command
    }

    /// A program run in the root.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root);
        command
    }

    /// A `git` that takes the repository whoever owns it, as in a container.
    pub(crate) fn git(&self) -> Command {
        let mut command = self.command("git");
        command.arg("-c").arg(format!("safe.directory={}", self.root.display()));
        command
    }

    /// A `cargo` of the nightly toolchain, where rustup has one.
    pub(crate) fn nightly_cargo(&self) -> Command {
        let mut command = self.command("rustup");
        forget_toolchain(&mut command);
        command.args(["run", "nightly", "cargo"]);
        command
    }

    /// The release build of the command line.
    pub(crate) fn release_binary(&self) -> PathBuf {
        self.target.join("release/featurestore")
    }

    pub(crate) fn member(&self, name: &str) -> Option<&Member> {
        self.members.iter().find(|member| member.name == name)
    }

    /// Files that git tracks or would track, relative to the root, sorted.
    pub(crate) fn files(&self) -> Result<Vec<PathBuf>> {
        let mut command = self.git();
        command.args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"]);
        let listing = process::output(&mut command)?;
        let mut files: Vec<PathBuf> =
            listing.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect();
        files.sort();
        files.dedup();
        files.retain(|file| self.root.join(file).is_file());
        Ok(files)
    }
}

fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // What `cargo run` told this program about itself is nothing to tell the packages it builds.
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&*name);
        }
    }
    command
}

/// Drops what pins a command to the toolchain that this program was started with.
fn forget_toolchain(command: &mut Command) {
    for name in ["RUSTUP_TOOLCHAIN", "CARGO", "RUSTC", "RUSTDOC"] {
        command.env_remove(name);
    }
}

/// A package's targets of one kind.
fn targets<'a>(package: &'a Value, kind: &'a str) -> Result<impl Iterator<Item = &'a Value>> {
    Ok(array(package, "targets")?.iter().filter(move |target| target["kind"][0] == kind))
}

fn string(value: &Value, key: &str) -> Result<String> {
    value[key].as_str().map(str::to_owned).ok_or_else(|| {
        format!("cargo metadata has no text at {key:?}; is this cargo older than 1.88?")
    })
}

fn array<'a>(value: &'a Value, key: &str) -> Result<&'a [Value]> {
    value[key].as_array().map(Vec::as_slice).ok_or_else(|| {
        format!("cargo metadata has no list at {key:?}; is this cargo older than 1.88?")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const METADATA: &str = r#"{
        "workspace_root": "/w", "target_directory": "/w/target",
        "workspace_default_members": ["path+file:///w/crates/arena#0.1.0"],
        "packages": [
            {"name": "arena", "id": "path+file:///w/crates/arena#0.1.0", "license": "Apache-2.0",
             "rust_version": "1.88", "manifest_path": "/w/crates/arena/Cargo.toml",
             "targets": [{"kind": ["lib"], "name": "arena"}, {"kind": ["bench"], "name": "churn"},
                         {"kind": ["test"], "name": "golden", "src_path": "/w/golden.rs",
                          "required-features": ["large"]}],
             "features": {"default": [], "fast": ["dep:x"]},
             "dependencies": [
                {"name": "core", "path": "/w/crates/core", "kind": null},
                {"name": "loom", "kind": null, "target": "cfg(loom)"}]},
            {"name": "tool", "id": "path+file:///w/tool#0.1.0", "license": null,
             "rust_version": null, "manifest_path": "/w/tool/Cargo.toml",
             "targets": [], "dependencies": []}
        ]}"#;

    #[test]
    fn metadata_is_read() {
        let workspace = Workspace::parse(METADATA).unwrap();
        let arena = workspace.member("arena").unwrap();
        assert!(arena.is_default && arena.is_public() && arena.uses_loom());
        assert_eq!((&*arena.benches, &*arena.tests[0].name), (&["churn".to_owned()][..], "golden"));
        assert_eq!(arena.folder, Path::new("crates/arena"));
        assert!(arena.features.contains("fast"));
        assert!(arena.dependencies[0].is_local && !arena.dependencies[1].is_local);
        let tool = workspace.member("tool").unwrap();
        assert!(!tool.is_default && !tool.is_public() && !tool.uses_loom());
        assert_eq!(tool.license, None);
        assert!(workspace.member("other").is_none());
    }

    #[test]
    fn tests_behind_a_feature_are_found_in_their_sources() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("golden.rs");
        fs::write(&file, "#![cfg(feature = \"fast\")]\n").unwrap();
        let metadata = METADATA.replace("/w/golden.rs", &file.to_string_lossy());
        let workspace = Workspace::parse(&metadata).unwrap();
        let arena = workspace.member("arena").unwrap();
        assert_eq!(arena.tests_for(&["slow", "fast"]), ["golden"]);
        assert!(arena.tests_for(&["slow"]).is_empty());
        assert_eq!(arena.tests_for(&["large"]), ["golden"], "as its manifest says");
    }

    #[test]
    fn answer_without_a_field_names_it() {
        let error = Workspace::parse(r#"{"workspace_root": "/w"}"#).unwrap_err();
        assert!(error.contains("target_directory"), "{error}");
    }
}
