//! Through which a producer tells consumers what is published: a file of lines in a folder that
//! both can reach, and small files beside it.
//!
//! | file | written by | says |
//! |---|---|---|
//! | `refs.jsonl` | producer | one [`SampleRef`](control_proto::sample_ref::SampleRef) a line; a line counts once its newline is there |
//! | `refs.jsonl.closed` | producer | nothing follows |
//! | `refs.jsonl.failed` | producer | why nothing follows; beats `.closed` |
//! | `refs.jsonl.producer_claim` | producer | locked while a producer lives |
//! | `refs.jsonl.consumed_count` | consumer | lines that are settled, as a decimal number |
//! | `refs.jsonl.consumer_quantum` | consumer | samples of one optimizer step, all ranks together |
//! | `refs.jsonl.consumer_done`, `.consumer_failed` | consumer | how it ended |
//! | `refs.jsonl.lost` | consumer | ids that cannot be had any more and must be captured again |

mod reader;
#[cfg(test)]
mod tests;
mod writer;

use std::{
    collections::HashMap,
    fs,
    io::{ErrorKind as Io, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use transport_core::{Error, ErrorKind, Result, SampleId};

pub use reader::{Polled, RefReader};
pub use writer::{RefWriter, Unpublished};

/// The lines of `.lost`, whole ones only.
const LOST: &str = "lost";

/// Where a channel's files are.
#[derive(Clone, Debug)]
struct Files {
    refs: PathBuf,
}

impl Files {
    /// Makes the folder if it is not there, but none above it: a path that is mistyped, or whose
    /// disk is not mounted, would become another channel than that of the peers.
    fn open(folder: &Path) -> Result<Self> {
        let fail = |e| Error::io("open channel", e).with("folder", folder.display());
        match fs::create_dir(folder) {
            Err(_) if folder.is_dir() => {}
            Err(e) if e.kind() == Io::NotFound => {
                return Err(fail(e).remedy(
                    "correct the path, or make the folder that it is to be in: only the last one of \
                     a path is made",
                ));
            }
            made => made.map_err(fail)?,
        }
        Ok(Self { refs: folder.join("refs.jsonl") })
    }

    fn side(&self, suffix: &str) -> PathBuf {
        let mut name = self.refs.clone().into_os_string();
        name.push(".");
        name.push(suffix);
        name.into()
    }

    /// A file that no other call writes.
    fn draft(&self, suffix: &str) -> PathBuf {
        static DRAFTS: AtomicU64 = AtomicU64::new(0);
        let number = DRAFTS.fetch_add(1, Ordering::Relaxed);
        self.side(&format!("{suffix}.draft.{}.{number}", std::process::id()))
    }

    /// The text of a small file, if it is there.
    fn read(&self, suffix: &str) -> Result<Option<String>> {
        let path = self.side(suffix);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(e) if e.kind() == Io::NotFound => Ok(None),
            Err(e) => Err(Error::io("read channel", e).with("file", path.display())),
        }
    }

    fn number(&self, suffix: &str) -> Result<Option<u64>> {
        let Some(text) = self.read(suffix)? else { return Ok(None) };
        text.trim().parse().map(Some).map_err(|_| {
            Error::new(ErrorKind::Corrupt, "read channel", "not a number")
                .with("file", self.side(suffix).display())
        })
    }

    /// How often each sample was lost. Half a last line does not count.
    fn lost(&self) -> Result<HashMap<SampleId, u32>> {
        let mut lost = HashMap::new();
        let text = self.read(LOST)?.unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        for id in whole.lines() {
            *lost.entry(SampleId::new(id)?).or_insert(0) += 1;
        }
        Ok(lost)
    }

    /// Replaces a small file as a whole: a reader sees the old text or the new one.
    fn replace(&self, suffix: &str, text: &str) -> Result<()> {
        let (path, draft) = (self.side(suffix), self.draft(suffix));
        let write = || {
            let mut file = fs::File::create(&draft)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&draft, &path)
        };
        write().map_err(|e| Error::io("write channel", e).with("file", path.display()))
    }

    /// Creates a small file unless it is there; whether this call made it. It appears whole.
    fn create(&self, suffix: &str, text: &str) -> Result<bool> {
        let (path, draft) = (self.side(suffix), self.draft(suffix));
        let write = || {
            let mut file = fs::File::create(&draft)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            let linked = fs::hard_link(&draft, &path);
            fs::remove_file(&draft)?;
            linked
        };
        match write() {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == Io::AlreadyExists => Ok(false),
            Err(e) => Err(Error::io("write channel", e).with("file", path.display())),
        }
    }
}
