//! The consumers' end.

use std::{
    collections::HashMap,
    fs::{File, OpenOptions},
    io::{Read, Seek, SeekFrom, Write},
    path::Path,
};

use control_proto::sample_ref::{MAX_LINE_BYTES, SampleRef};
use transport_core::{Error, ErrorKind, Result, SampleId};

use super::{Files, LOST};

/// Reads refs of a channel from its beginning. Only one process of a run does.
#[derive(Debug)]
pub struct RefReader {
    pub(super) files: Files,
    file: Option<File>,
    offset: u64,
    partial: Vec<u8>,
    settled: u64,
}

/// What [`RefReader::poll`] found.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Polled {
    /// New refs, in the order of publication.
    pub refs: Vec<SampleRef>,
    /// Nothing follows.
    pub ended: bool,
}

impl RefReader {
    /// Opens a channel, which need not exist yet.
    pub fn open(folder: &Path) -> Result<Self> {
        let files = Files::open(folder)?;
        let settled = files.number("consumed_count")?.unwrap_or(0);
        Ok(Self { files, file: None, offset: 0, partial: Vec::new(), settled })
    }

    /// Says how many samples one optimizer step takes. A fresh channel takes it once; a run that is
    /// resumed must say the same.
    pub fn claim_quantum(&self, quantum: u64, resumed: bool) -> Result<()> {
        if self.files.create("consumer_quantum", &format!("{quantum}\n"))? {
            return Ok(());
        }
        let found = self.files.number("consumer_quantum")?;
        let refuse = |why: &'static str| {
            Error::new(ErrorKind::ConfigInvalid, "claim channel", why)
                .with("expected", found.unwrap_or(0))
                .with("found", quantum)
        };
        match (resumed, found == Some(quantum)) {
            (true, true) => Ok(()),
            (true, false) => Err(refuse("the quantum has changed across resume")
                .remedy("resume with the same ranks x batch x accumulation")),
            (false, _) => Err(refuse("another consumer has claimed this channel")
                .remedy("a new run needs a fresh reference channel")),
        }
    }

    /// Reads up to `most` new whole lines; never waits. A failure of the producer is an error even
    /// if lines remain.
    pub fn poll(&mut self, most: usize) -> Result<Polled> {
        if let Some(why) = self.files.read("failed")? {
            return Err(Error::new(ErrorKind::PeerGone, "read refs", "the producer failed")
                .with("reason", why.trim()));
        }
        // Looked at before the lines: whatever was written before it is read below.
        let closed = self.files.read("closed")?.is_some();
        let mut polled = Polled::default();
        while polled.refs.len() < most {
            if let Some(end) = self.partial.iter().position(|&b| b == b'\n') {
                let line: Vec<u8> = self.partial.drain(..=end).collect();
                if end > 0 {
                    polled.refs.push(SampleRef::parse(&line[..end])?);
                }
                continue;
            }
            if self.partial.len() > MAX_LINE_BYTES {
                return Err(Error::new(ErrorKind::Protocol, "read refs", "a line is too long")
                    .with("max_bytes", MAX_LINE_BYTES));
            }
            if self.read_more()? == 0 {
                polled.ended = closed;
                break;
            }
        }
        Ok(polled)
    }

    fn read_more(&mut self) -> Result<usize> {
        let io = |e| Error::io("read refs", e);
        if self.file.is_none() {
            match File::open(&self.files.refs) {
                Ok(file) => self.file = Some(file),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(0),
                Err(e) => return Err(io(e)),
            }
        }
        let file = self.file.as_mut().expect("opened above");
        file.seek(SeekFrom::Start(self.offset)).map_err(io)?;
        let mut block = vec![0; 256 << 10];
        let read = file.read(&mut block).map_err(io)?;
        // Only whole lines are taken: a writer that failed takes half a line back.
        let whole = block[..read].iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        let taken = if whole == 0 && read == block.len() { read } else { whole };
        self.partial.extend_from_slice(&block[..taken]);
        self.offset += taken as u64;
        Ok(taken)
    }

    /// Lines that are settled.
    pub fn settled(&self) -> u64 {
        self.settled
    }

    /// Tells the producer how many lines are settled in all. Smaller numbers change nothing.
    pub fn settle(&mut self, total: u64) -> Result<()> {
        if total > self.settled {
            self.files.replace("consumed_count", &format!("{total}\n"))?;
            self.settled = total;
        }
        Ok(())
    }

    /// Asks the producer to capture samples again that cannot be had any more.
    pub fn lost<'a>(&self, ids: impl IntoIterator<Item = &'a SampleId>) -> Result<()> {
        let text: String = ids.into_iter().map(|id| format!("{id}\n")).collect();
        if text.is_empty() {
            return Ok(());
        }
        let append = || {
            let path = self.files.side(LOST);
            let mut file = OpenOptions::new().create(true).append(true).open(path)?;
            file.write_all(text.as_bytes())?;
            file.sync_data()
        };
        append().map_err(|e| Error::io("report lost samples", e))
    }

    /// How often each sample has been reported as lost so far.
    pub(crate) fn lost_before(&self) -> Result<HashMap<SampleId, u32>> {
        self.files.lost()
    }

    /// Says that everything is consumed.
    pub fn done(&self) -> Result<()> {
        self.files.replace("consumer_done", "done\n")
    }

    /// Says why the consumers gave up.
    pub fn fail(&self, reason: &str) -> Result<()> {
        self.files.replace("consumer_failed", reason)
    }
}
