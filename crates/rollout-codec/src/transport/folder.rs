//! Folders through which processes of one user find each other.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::PathBuf,
};

use transport_core::{Error, ErrorKind, Result};

/// Makes the folder for this user alone, in one that exists; refuses one that others can write.
pub(super) fn private(folder: PathBuf, operation: &'static str) -> Result<PathBuf> {
    let failed = |e| Error::io(operation, e).with("folder", folder.display());
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(failed(e).remedy(
                "correct the path, or make the folder that it is to be in: only the last one of a \
                 path is made",
            ));
        }
        made => made.map_err(failed)?,
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_folder_is_made_and_no_path_to_it() {
        let parent = tempfile::tempdir().unwrap();
        let deep = parent.path().join("mistyped/share");
        let error = private(deep, "share").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert!(error.to_string().contains("correct the path"), "{error}");
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0, "nothing is left behind");
        let share = parent.path().join("share");
        for _ in 0..2 {
            let made = private(share.clone(), "share").unwrap();
            assert_eq!(fs::metadata(made).unwrap().mode() & 0o7777, 0o700);
        }
        fs::write(parent.path().join("file"), "").unwrap();
        assert!(private(parent.path().join("file"), "share").is_err());
    }
}
