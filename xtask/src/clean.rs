//! `cargo xtask clean-check`: what is committed is all that a build needs.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{Result, process, workspace::Workspace};

const LIMIT: Duration = Duration::from_secs(20 * 60);

/// Fails where something is uncommitted, or where a fresh clone does not build all its tests.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let status = process::output(workspace.git().args(["status", "--porcelain"]))?;
    if !status.is_empty() {
        return Err(format!("commit or remove:\n{}", status.trim_end()));
    }
    let clone = Clone::of(workspace)?;
    // A target directory of its own, kept: what is built here must not pass for the clone's.
    let mut build = workspace.cargo();
    build.current_dir(&clone.0).args(["test", "--workspace", "--no-run", "--locked"]);
    build.arg("--target-dir").arg(workspace.target.join("clean-check-build"));
    let ended = process::run(&mut build, &workspace.target, LIMIT, |line| println!("{line}"))?;
    match ended.problem() {
        Some(problem) => Err(format!("a fresh clone does not build: {problem}")),
        None => {
            println!("a fresh clone builds");
            Ok(())
        }
    }
}

/// A clone that goes when it is dropped.
struct Clone(PathBuf);

impl Clone {
    fn of(workspace: &Workspace) -> Result<Self> {
        let place = workspace.target.join("clean-check");
        remove(&place)?;
        let clone = Self(place);
        let mut git = workspace.git();
        git.args(["clone", "--quiet", "--no-hardlinks"]).arg(&workspace.root).arg(&clone.0);
        process::output(&mut git)?;
        Ok(clone)
    }
}

impl Drop for Clone {
    fn drop(&mut self) {
        if let Err(problem) = remove(&self.0) {
            eprintln!("{problem}");
        }
    }
}

fn remove(folder: &Path) -> Result<()> {
    if !folder.exists() {
        return Ok(());
    }
    fs::remove_dir_all(folder)
        .map_err(|error| format!("cannot remove {}: {error}", folder.display()))
}
