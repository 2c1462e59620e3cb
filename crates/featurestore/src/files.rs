//! Files that people name: opened without hanging, and read no further than they may be long.

use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::Path,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use transport_core::{Error, ErrorKind, Result};

/// How long a pipe may say nothing, from the first byte that is waited for on.
const SILENCE: Duration = Duration::from_secs(10);
/// Most that is read of a device: a terminal says little, and others never end.
const MOST_OF_DEVICE: u64 = 1 << 20;

/// Reads a file for `operation`, or what comes through a pipe such as `<(…)` of a shell, of `most` bytes at most.
///
/// # Errors
/// What the system says; `InvalidInput` for a file that is longer, or a device; and `Timeout`
/// for a pipe that nobody writes into.
pub fn read_at_most(operation: &'static str, path: &Path, most: u64) -> Result<Vec<u8>> {
    read_within(operation, path, most, SILENCE).map_err(|e| e.with("file", path.display()))
}

/// The same for what can only be a regular file.
#[cfg(any(feature = "cli", feature = "rollout"))]
pub(crate) fn read_regular(operation: &'static str, path: &Path, most: u64) -> Result<Vec<u8>> {
    let file = open_regular(path).map_err(|e| Error::io(operation, e));
    file.and_then(|file| read(operation, &file, most, SILENCE))
        .map_err(|e| e.with("file", path.display()))
}

/// Opens a regular file, and nothing that could block for ever, such as a pipe.
#[cfg(any(feature = "cli", feature = "rollout"))]
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let file = open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(file)
}

/// Does not wait for a pipe's other end, and neither do reads.
fn open(path: &Path) -> io::Result<File> {
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    File::options().read(true).custom_flags(nonblocking).open(path)
}

fn read_within(
    operation: &'static str,
    path: &Path,
    most: u64,
    silence: Duration,
) -> Result<Vec<u8>> {
    let file = open(path).map_err(|e| Error::io(operation, e))?;
    read(operation, &file, most, silence)
}

fn read(operation: &'static str, file: &File, most: u64, silence: Duration) -> Result<Vec<u8>> {
    let failed = |e| Error::io(operation, e);
    let kind = file.metadata().map_err(failed)?.file_type();
    let is_file = kind.is_file();
    let most = if kind.is_char_device() { most.min(MOST_OF_DEVICE) } else { most };
    let mut content = Vec::new();
    let mut rest = file.take(most.saturating_add(1));
    let mut until = Instant::now() + silence;
    loop {
        if !is_file && !is_readable(file, until).map_err(failed)? {
            let why = "nobody writes into the pipe";
            return Err(Error::new(ErrorKind::Timeout, operation, why)
                .with("waited", format_args!("{silence:?}")));
        }
        let before = content.len();
        match rest.read_to_end(&mut content) {
            Ok(_) => break,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(failed(e)),
        }
        if content.len() > before {
            until = Instant::now() + silence;
        }
    }
    if content.len() as u64 > most {
        return Err(Error::new(ErrorKind::InvalidInput, operation, "the file is too large")
            .with("max_bytes", most));
    }
    Ok(content)
}

/// Waits until there is something to read, or its end.
fn is_readable(file: &File, until: Instant) -> io::Result<bool> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(file, PollFlags::IN)], Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            ready => return Ok(ready? > 0),
        }
    }
}

#[cfg(all(test, feature = "cli"))]
mod tests {
    use std::io::Write;

    use super::*;

    const MOMENT: Duration = Duration::from_millis(100);

    fn fifo(folder: &Path) -> std::path::PathBuf {
        let path = folder.join("pipe");
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &path, kind, 0o600.into(), 0).unwrap();
        path
    }

    #[test]
    fn what_is_no_file_neither_hangs_nor_is_read_without_end() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::os::unix::fs::symlink("loop", at("loop")).unwrap();
        std::fs::write(at("four"), "1234").unwrap();
        for (path, says) in [
            (fifo(folder.path()), "nobody writes"),
            ("/dev/zero".into(), "too large"),
            (folder.path().into(), "directory"),
            (at("loop"), "symbolic links"),
            (at("none"), "No such file"),
        ] {
            let error = read_within("read", &path, 1 << 16, MOMENT).unwrap_err().to_string();
            assert!(error.contains(says), "{}: {error}", path.display());
            assert!(open_regular(&path).is_err(), "{}", path.display());
        }
        assert_eq!(read_at_most("read", &at("four"), 4).unwrap(), b"1234");
        let error = read_at_most("read", &at("four"), 3).unwrap_err();
        assert!(error.to_string().contains("four"), "{error}");
        assert_eq!(read_at_most("read", "/dev/null".as_ref(), 3).unwrap(), b"");
    }

    #[test]
    fn pipes_are_read_to_their_end_however_late_it_comes() {
        let folder = tempfile::tempdir().unwrap();
        let path = fifo(folder.path());
        let to = path.clone();
        let writing = std::thread::spawn(move || {
            std::thread::sleep(MOMENT / 2);
            let mut pipe = File::options().write(true).open(to)?;
            for part in ["late ", "and in ", "parts"] {
                pipe.write_all(part.as_bytes())?;
                std::thread::sleep(MOMENT / 2);
            }
            io::Result::Ok(())
        });
        let read = read_within("read", &path, 1 << 16, 10 * MOMENT).unwrap();
        assert_eq!(read, b"late and in parts");
        writing.join().unwrap().unwrap();
    }
}
