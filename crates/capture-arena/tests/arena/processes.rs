//! Shared arenas across processes, and processes that end with a live arena.
//!
//! The other process is this test program again: `child` does what an environment variable says.

use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, ErrorKind as Io, Read, Write},
    os::{fd::AsRawFd, unix::process::ExitStatusExt},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use capture_arena::{Arena, ArenaConfig, Backing, MappedBacking, SharedHandle};
use rustix::fs::{MemfdFlags, SealFlags};
use transport_core::{ArenaOffset, ErrorKind, MapMark, RegionKind, RegionSlice};

use crate::common::*;

const ROLE: &str = "ARENA_TEST_ROLE";
const BYTES: u64 = 1 << 20;

/// Not a test by itself: what the other process does.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let arena = Arena::start(Backing::shared(BYTES).unwrap(), ArenaConfig::default()).unwrap();
    let mut batch = arena.reserve_blocking(vec![plan("a", &[5000])], soon(1000)).unwrap();
    batch.bytes_mut(0, 0).fill(0xA5);
    batch.publish_blocking().unwrap();
    let unfinished = arena.reserve_blocking(vec![plan("b", &[5000])], soon(1000)).unwrap();
    let SharedHandle { boot_id, pid, fd, dev, ino, bytes } =
        arena.backing().shared_handle().unwrap();
    // Past the test harness, which captures `print!`.
    writeln!(std::io::stderr(), "handle {boot_id} {pid} {fd} {dev} {ino} {bytes}").unwrap();
    // Until the parent says so, or is gone.
    let _ = std::io::stdin().read(&mut [0]);
    match role.as_str() {
        "return" => {}
        "panic" => panic!("with a live arena"),
        "exit" => std::process::exit(7),
        "wait" => thread::sleep(Duration::from_secs(60)),
        other => panic!("unknown role {other}"),
    }
    drop((unfinished, arena));
}

/// The other process; killed when dropped.
struct Publisher {
    process: Child,
    handle: SharedHandle,
}

impl Publisher {
    fn start(role: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "processes::child", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let line =
            lines.find_map(|l| l.unwrap().strip_prefix("handle ").map(String::from)).unwrap();
        thread::spawn(move || lines.for_each(drop)); // so that the pipe never fills
        let words: Vec<&str> = line.split(' ').collect();
        let number = |i: usize| words[i].parse::<u64>().unwrap();
        let handle = SharedHandle {
            boot_id: words[0].into(),
            pid: number(1) as u32,
            fd: number(2) as u32,
            dev: number(3),
            ino: number(4),
            bytes: number(5),
        };
        Self { process, handle }
    }

    /// Lets it go on, and waits for its end.
    fn finish(mut self) -> std::process::ExitStatus {
        drop(self.process.stdin.take());
        self.wait()
    }

    fn wait(&mut self) -> std::process::ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A view that keeps its mapping.
#[allow(unsafe_code)]
fn view(mapped: &MappedBacking, offset: u64, len: u64) -> Option<RegionSlice> {
    let owner = std::sync::Arc::new(mapped.clone());
    // SAFETY: the owner keeps the mapping, and the publisher of these tests, which frees nothing,
    // never writes a byte again.
    unsafe { mapped.view(ArenaOffset(offset), len, owner) }
}

#[test]
fn another_process_reads_without_a_copy() {
    let publisher = Publisher::start("return");
    let mapped = MappedBacking::open(&publisher.handle, MapMark::random()).unwrap();
    assert_eq!(mapped.bytes_len(), BYTES);
    let view = view(&mapped, 0, 5000).unwrap();
    assert_eq!(view.kind(), RegionKind::Shared);
    assert!(view.as_ref().iter().all(|&b| b == 0xA5));
    assert!(self::view(&mapped, BYTES - 10, 11).is_none());
    assert!(self::view(&mapped, u64::MAX, 2).is_none());
    // The memory outlives its maker for those who have mapped it, and for nobody else.
    let handle = publisher.handle.clone();
    drop(mapped);
    assert!(publisher.finish().success());
    assert!(view.as_ref().iter().all(|&b| b == 0xA5));
    assert_eq!(
        MappedBacking::open(&handle, MapMark::random()).unwrap_err().kind(),
        ErrorKind::PeerGone
    );
}

#[test]
fn nobody_else_can_write() {
    let publisher = Publisher::start("return");
    let handle = &publisher.handle;
    let mapped = MappedBacking::open(handle, MapMark::random()).unwrap();
    let view = view(&mapped, 0, 1).unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|l| l.contains(&format!(" {} ", handle.ino))).unwrap();
    assert!(line.contains(" r--s "), "{line}");
    // Not even by opening the file again for writing (sealed since Linux 5.1).
    let path = format!("/proc/{}/fd/{}", handle.pid, handle.fd);
    let mut file = OpenOptions::new().write(true).open(path).unwrap();
    assert_eq!(file.write(&[0]).unwrap_err().kind(), Io::PermissionDenied);
    assert_eq!(file.set_len(0).unwrap_err().kind(), Io::PermissionDenied);
    assert_eq!(view.as_ref(), [0xA5]);
}

#[test]
fn handles_that_do_not_fit_are_refused() {
    let publisher = Publisher::start("return");
    let right = || publisher.handle.clone();
    let kind = |handle: SharedHandle| {
        let error = MappedBacking::open(&handle, MapMark::random()).unwrap_err();
        assert!(error.to_string().contains(';'), "says what to do: {error}");
        error.kind()
    };
    assert_eq!(kind(SharedHandle { boot_id: "other".into(), ..right() }), ErrorKind::Unsupported);
    assert_eq!(kind(SharedHandle { ino: right().ino + 1, ..right() }), ErrorKind::PeerGone);
    assert_eq!(kind(SharedHandle { dev: right().dev + 1, ..right() }), ErrorKind::PeerGone);
    assert_eq!(kind(SharedHandle { fd: 9999, ..right() }), ErrorKind::PeerGone);
    assert_eq!(kind(SharedHandle { fd: 0, ..right() }), ErrorKind::PeerGone, "a pipe");
    assert_eq!(kind(SharedHandle { pid: u32::MAX / 4, ..right() }), ErrorKind::PeerGone);
    let sizes = [0, BYTES - 512, BYTES + 512, u64::MAX].map(|bytes| {
        MappedBacking::open(&SharedHandle { bytes, ..right() }, MapMark::random())
            .unwrap_err()
            .kind()
    });
    assert_eq!(sizes, [ErrorKind::Protocol; 4]);
    assert!(MappedBacking::open(&right(), MapMark::random()).is_ok());
}

/// A handle to something of our own.
fn own_handle(file: &File, bytes: u64) -> SharedHandle {
    let stat = rustix::fs::fstat(file).unwrap();
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    SharedHandle {
        boot_id: boot_id.trim().into(),
        pid: std::process::id(),
        fd: file.as_raw_fd() as u32,
        dev: stat.st_dev,
        ino: stat.st_ino,
        bytes,
    }
}

#[test]
fn memory_that_could_shrink_is_refused() {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create("arena-test", flags).unwrap());
    file.set_len(4096).unwrap();
    let refused = MappedBacking::open(&own_handle(&file, 4096), MapMark::random()).unwrap_err();
    assert!(refused.to_string().contains("not sealed"), "{refused}");
    rustix::fs::fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK).unwrap();
    assert!(
        MappedBacking::open(&own_handle(&file, 4096), MapMark::random()).is_err(),
        "seals could be added"
    );
    rustix::fs::fcntl_add_seals(&file, SealFlags::SEAL).unwrap();
    assert!(MappedBacking::open(&own_handle(&file, 4096), MapMark::random()).is_ok());
    // A file on disk has no seals at all.
    let file = File::open(std::env::current_exe().unwrap()).unwrap();
    let len = file.metadata().unwrap().len();
    assert!(MappedBacking::open(&own_handle(&file, len), MapMark::random()).is_err());
}

#[test]
fn a_shared_arena_is_sealed_and_not_inherited() {
    let backing = Backing::shared(1000).unwrap();
    let handle = backing.shared_handle().unwrap();
    assert_eq!((backing.bytes_len(), handle.bytes), (1024, 1024));
    let path = format!("/proc/self/fd/{}", handle.fd);
    let file = File::open(&path).unwrap();
    let seals = rustix::fs::fcntl_get_seals(&file).unwrap();
    assert!(seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL));
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", handle.fd)).unwrap();
    let flags = info.lines().find_map(|l| l.strip_prefix("flags:")).unwrap();
    let flags = u32::from_str_radix(flags.trim(), 8).unwrap();
    assert_ne!(flags & 0o2_000_000, 0, "close-on-exec");
    assert!(Backing::heap(4096).unwrap().shared_handle().is_none());
}

#[test]
fn memory_is_taken_at_once_where_that_is_asked_for_and_keeps_what_is_in_it() {
    const BYTES: u64 = 160 << 20; // several pieces, the last one smaller
    let backing = Backing::shared(BYTES).unwrap();
    let handle = backing.shared_handle().unwrap();
    let file = File::open(format!("/proc/self/fd/{}", handle.fd)).unwrap();
    let taken = || std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) * 512;
    assert_eq!(taken(), 0, "pages come with their first touch");
    backing.populate(3).unwrap();
    assert_eq!(taken(), BYTES);
    backing.populate(1).unwrap();
    Backing::heap(4096).unwrap().populate(0).unwrap();
}

#[test]
fn sizes_that_cannot_be_are_refused_at_once() {
    for make in [Backing::heap as fn(u64) -> _, Backing::shared] {
        let error = make(0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConfigInvalid);
        assert!(error.to_string().contains("never guessed"), "{error}");
        for bytes in [1 << 50, u64::MAX] {
            let error = make(bytes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConfigInvalid);
            assert!(error.to_string().contains("larger than the memory"), "{error}");
            assert!(error.context("available").is_some());
        }
    }
}

#[test]
fn a_process_that_ends_with_a_live_arena_ends_as_it_meant_to() {
    assert_eq!(Publisher::start("return").finish().code(), Some(0));
    assert_eq!(Publisher::start("panic").finish().code(), Some(101));
    assert_eq!(Publisher::start("exit").finish().code(), Some(7));
    let mut waiting = Publisher::start("wait");
    let pid = rustix::process::Pid::from_child(&waiting.process);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(waiting.wait().signal(), Some(15));
    assert!(MappedBacking::open(&waiting.handle, MapMark::random()).is_err());
}
