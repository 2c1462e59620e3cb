//! The temporary folder of a run, which is gone soon after the run is, however it ends.
//!
//! Whoever takes part in a run may be killed, and all of them at once. So the pipeline and its
//! trainer hold a lock on the folder, which the kernel drops with them, and whoever finds a folder
//! that nobody holds removes it: the trainer or the servers that are left, or the next run.

use std::{
    fs::{self, DirBuilder, File, Metadata},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    fs::{Access, FlockOperation, Mode, OFlags, access, flock, open},
    io::Errno,
    process::geteuid,
};
use transport_core::{ClientId, Error, Result};

/// How the folders are named. Those of builds that held no lock have other names, and are never
/// taken for a dead run's.
const PREFIX: &str = "featurestore-run-locked-";
/// Longest wait for others to let go of a folder: as they do who are killed, or remove it.
const PATIENCE: Duration = Duration::from_secs(5);
/// The same where nobody seems to be killed: a parent is known to be gone only a moment later.
const MOMENT: Duration = Duration::from_millis(100);
/// Names that are tried for a folder; random as they are, the second one is new already.
const NAMES: usize = 4;
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(10);

/// Where temporary files go: what `TMPDIR` names, otherwise `/tmp`.
///
/// # Errors
/// If nothing can be made there.
pub(super) fn temporary() -> Result<PathBuf> {
    let path = std::env::temp_dir();
    let rights = Access::WRITE_OK | Access::EXEC_OK;
    let usable = match fs::metadata(&path) {
        Ok(found) if !found.is_dir() => Err(io::ErrorKind::NotADirectory.into()),
        Ok(_) => access(&path, rights).map_err(io::Error::from),
        Err(error) => Err(error),
    };
    usable.map(|()| path.clone()).map_err(|error| unusable(error, &path))
}

/// Says of the folder for temporary files, and of the variable that names it, that it is no good.
fn unusable(error: io::Error, path: &Path) -> Error {
    let named = if std::env::var_os("TMPDIR").is_some() { "TMPDIR" } else { "TMPDIR (not set)" };
    Error::io("use temporary folder", error)
        .with("folder", path.display())
        .with("variable", named)
        .remedy("let TMPDIR name a folder that is there and in which files can be made, or make it")
}

/// Folder of a run's channel and, unless it is wanted elsewhere, of its ledger. It goes with this.
#[derive(Debug)]
pub(super) struct ControlFolder {
    path: PathBuf,
    #[cfg_attr(not(test), expect(dead_code, reason = "the folder is held while it is there"))]
    held: Option<Held>,
}

impl ControlFolder {
    /// Makes a folder, which only this user can look into, and holds it.
    ///
    /// Others can read the names in a process's arguments: no process may be told of the folder
    /// before it is made. Where this process is killed first, the next run removes it.
    ///
    /// # Errors
    /// If it cannot be made, or would be open to others.
    pub(super) fn make() -> Result<Self> {
        Self::make_in(&temporary()?, || format!("{PREFIX}{}", ClientId::random()))
    }

    /// The same in `temporary`, with the first of the names that is not taken.
    fn make_in(temporary: &Path, mut name: impl FnMut() -> String) -> Result<Self> {
        let until = Instant::now() + PATIENCE;
        let mut taken = 0;
        loop {
            let path = temporary.join(name());
            let made = DirBuilder::new().mode(0o700).create(&path);
            let held = made.and_then(|()| {
                hold(&path).inspect_err(|_| {
                    let _ = fs::remove_dir(&path); // which this run does not use
                })
            });
            match held {
                Ok(held) => return Ok(Self { path, held: Some(Held(held)) }),
                // Whoever made it knows of it, and may own it.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists && taken + 1 < NAMES => {
                    taken += 1;
                }
                // Another run may look at it between these two calls, and remove it.
                Err(e) if is_removed(&e) && temporary.is_dir() && Instant::now() < until => {}
                Err(e) => return Err(unusable(e, temporary)),
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ControlFolder {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// A share in holding a run's folder, for as long as it lives.
#[derive(Debug)]
pub(super) struct Held(
    #[expect(dead_code, reason = "it is open, and so the lock is held")] Option<File>,
);

/// Holds a run's folder that another process has made.
///
/// # Errors
/// If it is not there, is a link or no folder, is another user's, or others can look into it.
pub(super) fn join(folder: &Path) -> Result<Held> {
    join_as(folder, geteuid().as_raw())
}

fn join_as(folder: &Path, user: u32) -> Result<Held> {
    hold_as(folder, user).map(Held).map_err(|e| {
        Error::io("join run", e).with("folder", folder.display()).remedy(
            "run again; if it is there again, somebody else makes it: let TMPDIR name a folder of \
             your own, in which only you can make files",
        )
    })
}

/// Removes a run's folder, which may be held by this process.
pub(super) fn remove(folder: &Path) {
    // A trainer that is ending may still write there: then once more.
    for _ in 0..20 {
        match fs::remove_dir_all(folder) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => std::thread::sleep(PAUSE),
            _ => return,
        }
    }
}

/// Removes a run's folder that nobody holds, for a server of the run that ends. If `starter` is not
/// its parent any more those who were killed with it are waited for, for a while.
pub fn remove_abandoned(folder: &Path, starter: u32) {
    let since = Instant::now();
    while !remove_unheld(folder) {
        let is_orphan = std::os::unix::process::parent_id() != starter;
        if since.elapsed() > if is_orphan { PATIENCE } else { MOMENT } {
            break; // who holds it removes it
        }
        std::thread::sleep(PAUSE);
    }
}

/// Removes the folders of this user's runs of which every process is gone.
pub(super) fn sweep() {
    let removed = sweep_in(&std::env::temp_dir(), geteuid().as_raw());
    if removed > 0 {
        tracing::info!(removed, "removed what killed runs have left among the temporary files");
    }
}

fn sweep_in(temporary: &Path, user: u32) -> usize {
    let Ok(entries) = fs::read_dir(temporary) else { return 0 };
    let is_ours = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        let id = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        id.is_some_and(|id| id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()))
            // Of the entry itself: a link is nobody's run.
            && entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == user)
    };
    let ours = entries.flatten().filter(is_ours);
    ours.filter(|entry| remove_unheld(&entry.path()) && !entry.path().exists()).count()
}

/// Takes part in holding a folder of this user's that nobody else can look into. None where the file
/// system knows no locks of folders: there nobody can find that it is not held either.
fn hold(folder: &Path) -> io::Result<Option<File>> {
    hold_as(folder, geteuid().as_raw())
}

fn hold_as(folder: &Path, user: u32) -> io::Result<Option<File>> {
    lock(folder, FlockOperation::NonBlockingLockShared, |found| {
        let others = found.mode() & 0o077;
        if found.uid() != user {
            Err(refused(format!("it is another user's (uid {})", found.uid())))
        } else if others != 0 {
            Err(refused(format!("it is open to others (mode {:03o})", found.mode() & 0o777)))
        } else {
            Ok(())
        }
    })
}

fn refused(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

fn is_removed(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::WouldBlock)
}

/// Removes a folder that nobody holds. False if somebody does; true also if it is gone already, or
/// cannot be had.
fn remove_unheld(folder: &Path) -> bool {
    let user = geteuid().as_raw();
    let is_ours = |found: &Metadata| match found.uid() == user {
        true => Ok(()),
        false => Err(refused("it is another user's".into())),
    };
    match lock(folder, FlockOperation::NonBlockingLockExclusive, is_ours) {
        Ok(Some(_held)) => {
            remove(folder);
            true
        }
        Ok(None) => true,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    }
}

/// Locks the folder, no link to one, that is at `folder` when this returns, and that `check` accepts.
/// None where the file system cannot lock.
fn lock(
    folder: &Path,
    operation: FlockOperation,
    check: impl Fn(&Metadata) -> io::Result<()>,
) -> io::Result<Option<File>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = match open(folder, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOTDIR | Errno::LOOP) => {
            return Err(refused("it is no folder, or a link".into()));
        }
        Err(error) => return Err(error.into()),
    };
    check(&file.metadata()?)?;
    match flock(&file, operation) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Err(io::ErrorKind::WouldBlock.into()),
        Err(Errno::NOTSUP | Errno::BADF | Errno::INVAL | Errno::NOLCK | Errno::NOSYS) => {
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    }
    // Whoever had it before may have removed it meanwhile, and another one may be there.
    let (ours, there) = (file.metadata()?, fs::symlink_metadata(folder)?);
    match (ours.dev(), ours.ino()) == (there.dev(), there.ino()) {
        true => Ok(Some(file)),
        false => Err(io::ErrorKind::NotFound.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::PermissionsExt,
        sync::atomic::{AtomicBool, Ordering},
    };

    use super::*;

    fn made(temporary: &Path) -> ControlFolder {
        ControlFolder::make_in(temporary, || format!("{PREFIX}{}", ClientId::random())).unwrap()
    }

    /// A folder as a process leaves it that is killed.
    fn left(temporary: &Path) -> PathBuf {
        let mut folder = made(temporary);
        fs::write(folder.path().join("refs.jsonl"), "a line\n").unwrap();
        folder.held = None;
        let path = folder.path().to_owned();
        std::mem::forget(folder);
        path
    }

    #[test]
    fn only_what_nobody_holds_is_removed() {
        let temporary = tempfile::tempdir().unwrap();
        let user = geteuid().as_raw();
        let dead = left(temporary.path());
        let living = made(temporary.path());
        let orphan = left(temporary.path()); // its trainer lives
        let trainer = join(&orphan).unwrap();
        assert_eq!(sweep_in(temporary.path(), user), 1);
        assert!(!dead.exists() && living.path().exists() && orphan.exists());
        drop(trainer);
        assert_eq!(sweep_in(temporary.path(), user), 1);
        assert!(living.path().exists() && !orphan.exists());
        let path = living.path().to_owned();
        drop(living);
        assert!(!path.exists());
    }

    #[test]
    fn what_is_not_this_users_run_is_left_alone() {
        let temporary = tempfile::tempdir().unwrap();
        let at = |name: &str| temporary.path().join(name);
        let user = geteuid().as_raw();
        let dead = left(temporary.path());
        assert_eq!(sweep_in(temporary.path(), user + 1), 0, "another user's");
        assert!(dead.exists());
        for other in ["featurestore-run-0123", "featurestore-run-locked-", "else"] {
            fs::create_dir(at(other)).unwrap();
        }
        let target = at("else").join("kept");
        fs::create_dir(&target).unwrap();
        let link = at(&format!("{PREFIX}{}", ClientId::random()));
        std::os::unix::fs::symlink(&target, &link).unwrap();
        assert_eq!(sweep_in(temporary.path(), user), 1);
        assert!(!dead.exists() && target.exists() && link.symlink_metadata().is_ok());
        assert!(at("featurestore-run-0123").exists() && at("featurestore-run-locked-").exists());
    }

    #[test]
    fn a_name_that_is_taken_is_never_used() {
        let temporary = tempfile::tempdir().unwrap();
        fs::create_dir(temporary.path().join("mine")).unwrap();
        std::os::unix::fs::symlink("mine", temporary.path().join("link")).unwrap();
        let mut names = ["mine", "link", "new"].into_iter().map(str::to_owned);
        let folder = ControlFolder::make_in(temporary.path(), || names.next().unwrap()).unwrap();
        assert_eq!(folder.path(), temporary.path().join("new"));
        assert_eq!(fs::metadata(folder.path()).unwrap().mode() & 0o777, 0o700);
        let error = ControlFolder::make_in(temporary.path(), || "link".into()).unwrap_err();
        assert!(error.to_string().contains("let TMPDIR name a folder"), "{error}");
        drop(folder);
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 2, "what was there stays");
    }

    #[test]
    fn what_others_can_have_made_or_can_look_into_is_not_joined() {
        let temporary = tempfile::tempdir().unwrap();
        let user = geteuid().as_raw();
        let folder = made(temporary.path());
        let refusal = |path: &Path, user| join_as(path, user).unwrap_err().to_string();
        join_as(folder.path(), user).unwrap();
        assert!(refusal(folder.path(), user + 1).contains("it is another user's"));
        for mode in [0o701, 0o740, 0o777] {
            fs::set_permissions(folder.path(), fs::Permissions::from_mode(mode)).unwrap();
            let error = refusal(folder.path(), user);
            assert!(error.contains(&format!("it is open to others (mode {mode:o})")), "{error}");
            assert!(error.contains("let TMPDIR name a folder of your own"), "{error}");
        }
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let (link, file) = (temporary.path().join("link"), temporary.path().join("file"));
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        fs::write(&file, "").unwrap();
        for path in [link, file] {
            assert!(refusal(&path, user).contains("it is no folder, or a link"), "{path:?}");
            assert!(remove_unheld(&path) && path.exists(), "{path:?} is left alone");
        }
    }

    /// Two runs begin while others sweep: none loses its folder.
    #[test]
    fn a_folder_that_is_made_while_others_sweep_is_there() {
        let temporary = tempfile::tempdir().unwrap();
        let user = geteuid().as_raw();
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !ended.load(Ordering::Relaxed) {
                        sweep_in(temporary.path(), user);
                    }
                });
            }
            for _ in 0..500 {
                let folder = made(temporary.path());
                fs::write(folder.path().join("refs.jsonl"), "").unwrap();
                assert!(folder.path().is_dir());
            }
            ended.store(true, Ordering::Relaxed);
        });
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 0);
    }
}
