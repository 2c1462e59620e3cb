//! Which sample may have come to be on which server, in case this process dies.

use std::{
    fs::{File, OpenOptions},
    io::{Read, Seek, Write},
    path::Path,
};

use transport_core::{Error, Result, SampleId};

/// Requests that were about to be sent, a line each, in the channel's folder.
///
/// Lines are not synced: they are for a process that dies, not for a host that does, as that takes
/// the servers' clients with it.
#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    entries: Vec<(String, SampleId)>,
}

impl Journal {
    pub(super) fn open(folder: &Path) -> Result<Self> {
        let path = folder.join("producer.journal");
        let open = || {
            let mut file = OpenOptions::new().create(true).read(true).append(true).open(&path)?;
            let mut text = Vec::new();
            file.read_to_end(&mut text)?;
            Ok((file, text))
        };
        let (file, text) = open().map_err(|e: std::io::Error| {
            Error::io("open journal", e).with("file", path.display())
        })?;
        let text = String::from_utf8_lossy(&text);
        let entry = |line: &str| {
            let (url, id) = line.split_once('\t')?;
            Some((url.to_owned(), SampleId::new(id).ok()?))
        };
        let mut entries: Vec<_> = text.lines().filter_map(entry).collect();
        entries.sort_unstable();
        entries.dedup();
        Ok(Self { file, entries })
    }

    /// What an earlier life has left.
    pub(super) fn entries(&mut self) -> Vec<(String, SampleId)> {
        std::mem::take(&mut self.entries)
    }

    pub(super) fn note<'a>(
        &mut self,
        url: &str,
        ids: impl Iterator<Item = &'a SampleId>,
    ) -> Result<()> {
        let text: String = ids.map(|id| format!("{url}\t{id}\n")).collect();
        self.file.write_all(text.as_bytes()).map_err(|e| Error::io("write journal", e))
    }

    pub(super) fn clear(&mut self) -> Result<()> {
        let clear = self.file.set_len(0).and_then(|()| self.file.rewind());
        clear.map_err(|e| Error::io("clear journal", e))
    }
}
