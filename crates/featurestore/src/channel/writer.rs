//! The producer's end.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Read, Seek, SeekFrom, Write},
    path::Path,
};

use control_proto::sample_ref::SampleRef;
use rustix::fs::{FlockOperation, flock};
use transport_core::{Error, ErrorKind, Result, SampleId};

use super::Files;

/// What lines are appended to.
pub(super) trait Lines: fmt::Debug + Send {
    /// Appends a part, at least one byte.
    fn append(&mut self, bytes: &[u8]) -> std::io::Result<usize>;
    fn sync(&mut self) -> std::io::Result<()>;
    /// Takes back what follows the first `length` bytes.
    fn cut(&mut self, length: u64) -> std::io::Result<()>;
}

impl Lines for File {
    fn append(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.write(bytes)
    }
    fn sync(&mut self) -> std::io::Result<()> {
        self.sync_data()
    }
    fn cut(&mut self, length: u64) -> std::io::Result<()> {
        self.set_len(length)?;
        self.seek(SeekFrom::Start(length)).map(drop)
    }
}

/// Why a batch was not published as a whole.
#[derive(Debug)]
pub struct Unpublished {
    /// How many of its refs, from the first, consumers can see; those are theirs now.
    pub published: usize,
    /// What went wrong.
    pub error: Error,
}

impl fmt::Display for Unpublished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for Unpublished {}

/// Appends refs to a channel. One at a time: the claim ends with the process.
#[derive(Debug)]
pub struct RefWriter {
    files: Files,
    lines: Box<dyn Lines>,
    length: u64,
    published: u64,
    counts: HashMap<SampleId, u32>, // publications of each sample, those before a restart included
    _claim: File,
}

impl RefWriter {
    /// Opens a channel for writing, and cuts off what a crash has left of a last line.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] while another producer has it; [`ErrorKind::Closed`] if it is closed.
    pub fn open(folder: &Path) -> Result<Self> {
        let writer = Self::reopen(folder)?;
        match writer.end()? {
            None => Ok(writer),
            Some(_) => Err(Error::new(ErrorKind::Closed, "open channel", "the channel has ended")
                .with("folder", folder.display())
                .remedy("give each run a fresh reference channel")),
        }
    }

    /// Opens a channel that may have ended, to see what was published.
    pub(crate) fn reopen(folder: &Path) -> Result<Self> {
        let files = Files::open(folder)?;
        let io = |e| Error::io("open channel", e);
        let claim_path = files.side("producer_claim");
        let mut claim = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&claim_path)
            .map_err(io)?;
        flock(&claim, FlockOperation::NonBlockingLockExclusive).map_err(|e| {
            Error::new(ErrorKind::Busy, "open channel", "another producer writes this channel")
                .with("claim", claim_path.display())
                .remedy("end it first, or give this run a folder of its own")
                .source(std::io::Error::from(e))
        })?;
        claim.set_len(0).map_err(io)?;
        claim.write_all(format!("pid={}\n", std::process::id()).as_bytes()).map_err(io)?;
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&files.refs)
            .map_err(io)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(io)?;
        let whole = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        file.cut(whole as u64).map_err(io)?;
        let mut counts = HashMap::new();
        let mut published = 0;
        for line in bytes[..whole].split(|&b| b == b'\n').filter(|line| !line.is_empty()) {
            *counts.entry(SampleRef::parse(line)?.sample_id).or_insert(0) += 1;
            published += 1;
        }
        let length = whole as u64;
        Ok(Self { files, lines: Box::new(file), length, published, counts, _claim: claim })
    }

    #[cfg(test)]
    pub(super) fn with_lines(mut self, lines: Box<dyn Lines>) -> Self {
        self.lines = lines;
        self
    }

    /// Publishes refs in order, and makes them durable.
    ///
    /// A ref belongs to the consumers once its whole line is written, also if making it durable
    /// fails; the others of a batch that fails stay the caller's.
    pub fn publish(&mut self, refs: &[SampleRef]) -> Result<(), Unpublished> {
        let mut text = Vec::new();
        let mut ends = Vec::with_capacity(refs.len());
        for sample in refs {
            sample.write(&mut text);
            ends.push(text.len());
        }
        let mut written = 0;
        let mut failure = None;
        while written < text.len() {
            match self.lines.append(&text[written..]) {
                Ok(0) => failure = Some(std::io::ErrorKind::WriteZero.into()),
                Ok(more) => written += more,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => failure = Some(e),
            }
            if failure.is_some() {
                break;
            }
        }
        let published = ends.iter().take_while(|&&end| end <= written).count();
        let whole = published.checked_sub(1).map_or(0, |last| ends[last]);
        self.length += whole as u64;
        self.published += published as u64;
        for sample in &refs[..published] {
            *self.counts.entry(sample.sample_id.clone()).or_insert(0) += 1;
        }
        if written > whole {
            // Half a line would swallow the next one.
            if let Err(e) = self.lines.cut(self.length) {
                tracing::error!(error = %e, "half a line could not be taken back");
            }
        }
        let failure = failure.or_else(|| self.lines.sync().err());
        match failure {
            None => Ok(()),
            Some(e) => {
                let total = refs.len();
                let message = format!("publishing failed after {published}/{total} durable refs");
                let kind = Error::io("publish refs", std::io::Error::from(e.kind())).kind();
                let error = Error::new(kind, "publish refs", message)
                    .with("file", self.files.refs.display())
                    .remedy("see to the disk of the control folder")
                    .source(e);
                Err(Unpublished { published, error })
            }
        }
    }

    /// How the channel has ended, if it has.
    pub(crate) fn end(&self) -> Result<Option<Result<()>>> {
        if let Some(why) = self.files.read("failed")? {
            let error = Error::new(ErrorKind::Closed, "publish refs", "the channel has failed")
                .with("reason", why.trim())
                .remedy("give each run a fresh reference channel");
            return Ok(Some(Err(error)));
        }
        Ok(self.files.read("closed")?.map(|_| Ok(())))
    }

    /// Lines ever published in this channel.
    pub fn published(&self) -> u64 {
        self.published
    }

    /// Lines that consumers have settled.
    pub fn settled(&self) -> Result<u64> {
        Ok(self.files.number("consumed_count")?.unwrap_or(0))
    }

    /// Samples of one optimizer step, once the consumers have said so.
    pub fn quantum(&self) -> Result<Option<u64>> {
        self.files.number("consumer_quantum")
    }

    /// Whether a sample must be captured: never published, or lost as often as it was.
    pub fn wants(&self, id: &SampleId, lost: &HashMap<SampleId, u32>) -> bool {
        let published = self.counts.get(id).copied().unwrap_or(0);
        published <= lost.get(id).copied().unwrap_or(0)
    }

    /// The newest publication of each of `ids` that has one.
    pub(crate) fn newest(&self, ids: &HashSet<SampleId>) -> Result<HashMap<SampleId, SampleRef>> {
        let mut newest = HashMap::new();
        if ids.is_empty() {
            return Ok(newest);
        }
        let io = |e| Error::io("read refs", e);
        let mut lines = BufReader::new(File::open(&self.files.refs).map_err(io)?);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line).map_err(io)? > 0 {
            let sample = SampleRef::parse(line.trim_ascii_end())?;
            if ids.contains(&sample.sample_id) {
                newest.insert(sample.sample_id.clone(), sample);
            }
            line.clear();
        }
        Ok(newest)
    }

    /// How often consumers have lost each sample. Ids that cannot be had any more are captured
    /// again.
    pub fn lost(&self) -> Result<HashMap<SampleId, u32>> {
        self.files.lost()
    }

    /// How the consumers have ended: `Ok(true)` when they are done.
    ///
    /// # Errors
    /// [`ErrorKind::PeerGone`] with their reason if they have failed.
    pub fn consumers_done(&self) -> Result<bool> {
        if let Some(why) = self.files.read("consumer_failed")? {
            return Err(Error::new(ErrorKind::PeerGone, "publish refs", "the consumers failed")
                .with("reason", why.trim()));
        }
        Ok(self.files.read("consumer_done")?.is_some())
    }

    /// Says that nothing follows.
    pub fn close(self) -> Result<()> {
        self.files.replace("closed", "closed\n")
    }

    /// Says that nothing follows because of a failure.
    pub fn fail(self, reason: &str) -> Result<()> {
        self.files.replace("failed", reason)
    }
}
