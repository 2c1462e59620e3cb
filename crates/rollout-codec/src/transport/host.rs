//! One copy a host: readers of a rollout in several processes share the memory of the first.
//!
//! A folder holds one small file for each rollout that is being shared, and in it one line for each
//! process that has the data: where its memory is found. The file's lock is held while lines are
//! changed, and by the first reader while it reads, so that the others wait for it. The memory is
//! sealed and mapped read-only, and lives as long as any of the processes; lines of processes that
//! died lead nowhere and are dropped by the next reader.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use capture_arena::{Backing, RegionPool, SealedBacking, SharedHandle};
use rustix::fs::FlockOperation;
use transport_core::{ArenaOffset, Error, ErrorKind, RegionMut, RegionSlice, Result};
use xxhash_rust::xxh3::xxh3_128;

use super::{Handle, folder};

const OPERATION: &str = "share rollout";
/// How often a taken lock is looked at again.
const POLL: Duration = Duration::from_millis(2);
/// How long a process that lets go waits for the lock before it leaves its line to others.
const LEAVE: Duration = Duration::from_millis(100);
/// How long a transport may take to let go of memory that it has filled.
const SEAL: Duration = Duration::from_secs(5);
/// Largest file of lines; each has less than 200 bytes.
const MAX_BYTES: u64 = 1 << 20;

/// A folder through which the readers of a host find each other.
#[derive(Clone, Debug)]
pub struct HostShare(Arc<PathBuf>);

impl HostShare {
    /// Uses `folder`, which is made for this user alone, in a folder that exists; refuses one that
    /// others can write.
    pub fn new(folder: impl Into<PathBuf>) -> Result<Self> {
        folder::private(folder.into(), OPERATION).map(|folder| Self(Arc::new(folder)))
    }

    /// The data of a rollout: found in another process, or read by `read` into memory that the
    /// others will find.
    pub(super) async fn read(
        &self,
        handle: &Handle,
        bytes: u64,
        deadline: Instant,
        read: impl AsyncFnOnce(RegionMut) -> Result<RegionSlice>,
    ) -> Result<(RegionSlice, Shared)> {
        let path = self.path(handle);
        let mut file = Locked::wait(&path, deadline).await?;
        if let Some(found) = file.join(&path, bytes)? {
            return Ok(found);
        }
        let backing = Backing::sealable(bytes)?;
        let region = RegionPool::new(backing.clone())?.take(bytes as usize)?;
        let sealed = match read(region).await {
            Ok(data) => {
                drop(data);
                seal(backing).await
            }
            Err(error) => Err(error),
        };
        let sealed = match sealed {
            Ok(sealed) => sealed,
            Err(error) => {
                file.remove(&path);
                return Err(error);
            }
        };
        let own = Line::of(sealed.shared_handle());
        file.write(std::slice::from_ref(&own))?;
        let data = sealed.slice(ArenaOffset(0), bytes).expect("at least as long as asked for");
        Ok((data, Shared { path, line: own, read_here: true }))
    }

    /// The data of a rollout, if another process has it or is just reading it.
    pub(super) async fn find(
        &self,
        handle: &Handle,
        bytes: u64,
        deadline: Instant,
    ) -> Result<Option<(RegionSlice, Shared)>> {
        let path = self.path(handle);
        if !path.exists() {
            return Ok(None);
        }
        let mut file = Locked::wait(&path, deadline).await?;
        let found = file.join(&path, bytes)?;
        if found.is_none() {
            file.remove(&path); // made by looking, or left by the dead
        }
        Ok(found)
    }

    /// Removes the file of a rollout if no living process shares it.
    pub(super) fn forget(&self, handle: &Handle) {
        let path = self.path(handle);
        if !path.exists() {
            return;
        }
        if let Ok(Some(mut file)) = Locked::try_new(&path)
            && file.lines().is_ok_and(|lines| !lines.iter().any(Line::lives))
        {
            file.remove(&path);
        }
    }

    fn path(&self, handle: &Handle) -> PathBuf {
        let name = format!("{}|{:016x}", handle.root().sample, handle.xxh3());
        self.0.join(format!("{:032x}", xxh3_128(name.as_bytes())))
    }
}

/// Seals what was read. A thread of the transport may still be about to drop its handle.
async fn seal(mut backing: Backing) -> Result<SealedBacking> {
    let end = Instant::now() + SEAL;
    loop {
        match SealedBacking::seal(backing)? {
            Ok(sealed) => return Ok(sealed),
            Err(_) if Instant::now() >= end => {
                let why = "the transport does not let go of what it has read";
                return Err(Error::new(ErrorKind::Busy, OPERATION, why));
            }
            Err(back) => backing = back,
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// This process's part in sharing one rollout; its line goes when it is dropped.
#[derive(Debug)]
pub(super) struct Shared {
    path: PathBuf,
    line: Line,
    read_here: bool,
}

impl Shared {
    pub(super) fn was_read_here(&self) -> bool {
        self.read_here
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let end = Instant::now() + LEAVE;
        loop {
            match Locked::try_new(&self.path) {
                Ok(Some(mut file)) => {
                    let Ok(mut lines) = file.lines() else { return };
                    lines.retain(|line| *line != self.line);
                    if lines.iter().any(Line::lives) {
                        let _ = file.write(&lines); // a line that stays leads nowhere
                    } else {
                        file.remove(&self.path);
                    }
                    return;
                }
                Ok(None) if Instant::now() < end => std::thread::sleep(POLL),
                _ => return,
            }
        }
    }
}

/// Where one process has the data.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Line {
    boot_id: String,
    pid: u32,
    fd: u32,
    dev: u64,
    ino: u64,
    bytes: u64,
}

impl Line {
    fn of(handle: &SharedHandle) -> Self {
        let SharedHandle { boot_id, pid, fd, dev, ino, bytes } = handle.clone();
        Self { boot_id, pid, fd, dev, ino, bytes }
    }

    fn handle(&self) -> SharedHandle {
        let Self { boot_id, pid, fd, dev, ino, bytes } = self.clone();
        SharedHandle { boot_id, pid, fd, dev, ino, bytes }
    }

    fn lives(&self) -> bool {
        SealedBacking::open(&self.handle()).is_ok()
    }
}

/// The file of one rollout, locked.
struct Locked(File);

impl Locked {
    async fn wait(path: &Path, deadline: Instant) -> Result<Self> {
        loop {
            if let Some(locked) = Self::try_new(path)? {
                return Ok(locked);
            }
            if Instant::now() >= deadline {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    OPERATION,
                    "another process reads the rollout and has not finished",
                )
                .with("file", path.display()));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// `None` while somebody else has the lock.
    fn try_new(path: &Path) -> Result<Option<Self>> {
        let failed = |e| Error::io(OPERATION, e).with("file", path.display());
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(failed)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(e) => return Err(failed(e.into())),
        }
        // Whoever had the lock may have removed the file.
        let same = fs::metadata(path).is_ok_and(|now| {
            file.metadata().is_ok_and(|own| (own.dev(), own.ino()) == (now.dev(), now.ino()))
        });
        Ok(same.then_some(Self(file)))
    }

    /// The lines; what cannot be read is none.
    fn lines(&mut self) -> Result<Vec<Line>> {
        let failed = |e| Error::io(OPERATION, e);
        let mut text = Vec::new();
        self.0.seek(SeekFrom::Start(0)).map_err(failed)?;
        (&self.0).take(MAX_BYTES).read_to_end(&mut text).map_err(failed)?;
        Ok(text.split(|&b| b == b'\n').filter_map(|l| serde_json::from_slice(l).ok()).collect())
    }

    /// Takes part in what a living process has, if one has it.
    fn join(&mut self, path: &Path, bytes: u64) -> Result<Option<(RegionSlice, Shared)>> {
        let lines = self.lines()?;
        let found = lines.iter().find_map(|line| {
            let sealed = SealedBacking::open(&line.handle()).ok()?;
            (sealed.bytes_len() >= bytes).then_some(sealed)
        });
        let Some(sealed) = found else { return Ok(None) };
        let data = sealed.slice(ArenaOffset(0), bytes).expect("just compared");
        let own = Line::of(sealed.shared_handle());
        // Who is gone will not be back.
        let mut living: Vec<Line> = lines.into_iter().filter(Line::lives).collect();
        living.push(own.clone());
        self.write(&living)?;
        Ok(Some((data, Shared { path: path.to_owned(), line: own, read_here: false })))
    }

    fn write(&mut self, lines: &[Line]) -> Result<()> {
        let failed = |e| Error::io(OPERATION, e);
        let mut text = Vec::new();
        for line in lines {
            serde_json::to_writer(&mut text, line).expect("plain data");
            text.push(b'\n');
        }
        self.0.seek(SeekFrom::Start(0)).map_err(failed)?;
        self.0.set_len(0).map_err(failed)?;
        self.0.write_all(&text).map_err(failed)
    }

    fn remove(self, path: &Path) {
        let _ = fs::remove_file(path); // an empty file is read as no lines
    }
}
