//! What puts are about to write, kept where it outlives them: if their process dies before the
//! handle is out, [`sweep`](super::RolloutTransport::sweep) finds it here and removes it.
//!
//! A folder holds one file for each put on its way, locked for as long as the put lives. A file
//! that nobody has locked belongs to a put that died.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use control_proto::sample_ref::SampleRef;
use indexmap::IndexMap;
use rustix::fs::FlockOperation;
use transport_core::{
    Descriptor, Dtype, Error, ErrorKind, FeatureDescriptor, FeatureName, Location, Result,
    SampleKey, TensorMeta,
};

use super::{Handle, folder};

const OPERATION: &str = "keep journal of puts";
/// Largest file that is read: as many lines as a rollout may have data samples.
const MAX_BYTES: u64 = 64 << 20;

/// A folder in which puts say what they are about to write.
///
/// For stores, whose objects outlive the process that wrote them. What a producer keeps in its own
/// memory goes with it and needs no journal.
#[derive(Clone, Debug)]
pub struct Journal(Arc<PathBuf>);

/// The file of one put; gone when it is dropped.
#[derive(Debug)]
pub(super) struct Entry {
    path: PathBuf,
    file: File,
    stays: bool,
}

/// What a put that died had begun to write.
#[derive(Debug)]
pub(super) struct Abandoned {
    path: PathBuf,
    _locked: File, // keeps others from sweeping the same
    pub(super) data: Vec<Arc<Descriptor>>,
    /// There if everything was written, and only the handle did not get out.
    pub(super) handle: Option<Handle>,
}

impl Journal {
    /// Uses `folder`, which is made for this user alone, in a folder that exists; refuses one that
    /// others can write.
    pub fn new(folder: impl Into<PathBuf>) -> Result<Self> {
        folder::private(folder.into(), OPERATION).map(|folder| Self(Arc::new(folder)))
    }

    /// Notes that these data samples are about to be written.
    pub(super) fn begin(&self, data: &[(SampleKey, u64)]) -> Result<Entry> {
        let mut lines = Vec::new();
        for (key, bytes) in data {
            let sample = stored(key.clone(), super::root::DATA, *bytes)?;
            SampleRef::new(&sample, "rollout", None, "rollout")?.write(&mut lines);
        }
        let mut name = [0; 16];
        getrandom::fill(&mut name)
            .map_err(|e| Error::new(ErrorKind::Unexpected, OPERATION, e.to_string()))?;
        let name = format!("{:032x}", u128::from_le_bytes(name));
        // Under a name that nobody sweeps until it is locked and whole.
        let early = self.0.join(format!(".{name}"));
        let path = self.0.join(name);
        let failed = |e| Error::io(OPERATION, e).with("folder", self.0.display());
        let mut file = OpenOptions::new()
            .append(true)
            .read(true)
            .create_new(true)
            .mode(0o600)
            .open(&early)
            .map_err(failed)?;
        let mut write = || {
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            file.write_all(&lines)?;
            file.sync_data()?;
            fs::rename(&early, &path)
        };
        if let Err(error) = write() {
            let _ = fs::remove_file(&early);
            return Err(failed(error));
        }
        Ok(Entry { path, file, stays: false })
    }

    /// What puts left that died, and what else lies there, as errors that name it. Others cannot see
    /// the same while it is looked at.
    pub(super) fn abandoned(&self) -> Result<(Vec<Abandoned>, Vec<Error>)> {
        let failed = |e| Error::io(OPERATION, e).with("folder", self.0.display());
        let (mut found, mut unreadable) = (Vec::new(), Vec::new());
        for entry in self.0.read_dir().map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            match Abandoned::open(&entry.path()) {
                Ok(abandoned) => found.extend(abandoned),
                Err(error) => unreadable.push(error.remedy(
                    "remove it if no producer wrote it; only entries belong into a journal",
                )),
            }
        }
        Ok((found, unreadable))
    }
}

impl Entry {
    /// Notes that the root is about to be written, and what the handle will be.
    pub(super) fn root(&self, handle: &Handle) -> Result<()> {
        let line = handle.to_json()? + "\n";
        let failed = |e| Error::io(OPERATION, e).with("file", self.path.display());
        (&self.file).write_all(line.as_bytes()).map_err(failed)
    }

    /// Leaves the file to a sweep: something of the put could not be taken back.
    pub(super) fn leave(&mut self) {
        self.stays = true;
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if !self.stays {
            remove(&self.path);
        }
    }
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        let file = path.display();
        tracing::warn!(%error, %file, "the journal of a put that ended could not be removed");
    }
}

impl Abandoned {
    /// Nothing of the put is left.
    pub(super) fn done(self) {
        remove(&self.path);
    }

    /// None if somebody is at it, or it is gone.
    fn open(path: &Path) -> Result<Option<Self>> {
        let failed = |e| Error::io(OPERATION, e).with("file", path.display());
        // Whatever it is, looking at it does not wait: a pipe would, for somebody to write.
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let opened = OpenOptions::new().read(true).append(true).custom_flags(flags).open(path);
        let file = match opened {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(failed(e)),
        };
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(Error::new(ErrorKind::InvalidInput, OPERATION, "not a file")
                .with("file", path.display()));
        }
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(e) => return Err(failed(e.into())),
        }
        // Whoever had the lock may have removed the file.
        let same = fs::metadata(path).is_ok_and(|now| {
            file.metadata().is_ok_and(|own| (own.dev(), own.ino()) == (now.dev(), now.ino()))
        });
        if !same {
            return Ok(None);
        }
        let mut text = Vec::new();
        (&file).take(MAX_BYTES).read_to_end(&mut text).map_err(failed)?;
        let mut data = Vec::new();
        let mut handle = None;
        for line in text.split_inclusive(|&byte| byte == b'\n') {
            // A line that its writer did not finish says nothing: what it is about was not begun.
            let Some(line) = line.strip_suffix(b"\n") else { break };
            match Handle::parse(line) {
                Ok(found) => handle = Some(found),
                Err(_) => {
                    let sample = SampleRef::parse(line).and_then(|line| line.descriptor());
                    let sample = sample.map_err(|e| e.with("file", path.display()))?;
                    data.push(Arc::new(sample));
                }
            }
        }
        Ok(Some(Self { path: path.to_owned(), _locked: file, data, handle }))
    }
}

/// A sample of one tensor of bytes, as a store has it.
pub(super) fn stored(key: SampleKey, name: &'static str, bytes: u64) -> Result<Descriptor> {
    let meta = TensorMeta::new(Dtype::Uint8, [bytes])?;
    let feature = FeatureDescriptor::new(meta, None, None);
    let features = IndexMap::from([(FeatureName::new(name)?, feature)]);
    Descriptor::new(key, features, None, Location::Store)
}
