//! Folders through which processes of one user find each other.

use std::{
    fs::{self, DirBuilder},
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::PathBuf,
};

use transport_core::{Error, ErrorKind, Result};

/// Makes the folder for this user alone; refuses one that others can write.
pub(super) fn private(folder: PathBuf, operation: &'static str) -> Result<PathBuf> {
    let failed = |e| Error::io(operation, e).with("folder", folder.display());
    DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(failed)?;
    let found = fs::symlink_metadata(&folder).map_err(failed)?;
    let mine = found.uid() == rustix::process::geteuid().as_raw();
    if !found.is_dir() || !mine || found.mode() & 0o022 != 0 {
        return Err(Error::new(
            ErrorKind::PermissionDenied,
            operation,
            "the folder is not this user's alone",
        )
        .with("folder", folder.display())
        .with("mode", format_args!("{:o}", found.mode() & 0o7777))
        .remedy("choose a folder that only this user can write"));
    }
    Ok(folder)
}
