//! What a process knows of itself, how it talks to people, and what asks it to end.
//!
//! Whoever started a process may not read what it writes, and a full pipe blocks who writes to it.
//! So a thread of each stream's own writes, and nobody waits for it for good: a [`note`] is given up
//! after a moment, a result that [`say`] prints when a signal asks the process to end.

use std::{
    fmt, io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
};
use transport_core::{Error, ErrorKind, Result};

/// Longest wait for a note to be taken; the next ones do not wait until one was.
const MOMENT: Duration = Duration::from_millis(500);
/// Pause between two looks at the signals, for a result that nobody takes.
const LOOK: Duration = Duration::from_millis(20);
/// Notes that wait for a reader; more are dropped.
const WAITING: usize = 64;

/// What fails when a result cannot be printed.
pub const PRINT: &str = "print result";

/// Writes a line to standard error. Where that is full or closed nobody reads it, and the work goes
/// on: unlike `eprintln!`, this neither panics nor blocks for longer than a moment.
pub fn note(line: impl fmt::Display) {
    tell(format!("{line}\n").into_bytes());
}

/// Standard error for log lines, each written at once as [`note`] does.
#[derive(Clone, Copy, Debug, Default)]
pub struct Notes;

impl io::Write for Notes {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        tell(line.to_vec());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Prints a line on standard output and waits until it is taken; a closed or full one is an error,
/// not a panic.
///
/// # Errors
/// What the system says; and `Closed` if nobody takes the line and a signal asks the process to end.
pub fn say(line: impl fmt::Display) -> Result<()> {
    static OUT: OnceLock<Option<Stream>> = OnceLock::new();
    let cannot = || Error::new(ErrorKind::CapacityExceeded, PRINT, "no thread can be started");
    let stream = OUT.get_or_init(|| Stream::start("stdout", io::stdout()));
    let done = stream.as_ref().and_then(|stream| stream.write(format!("{line}\n").into_bytes()));
    let done = done.ok_or_else(cannot)?;
    loop {
        match done.recv_timeout(LOOK) {
            Ok(written) => return written.map_err(|e| Error::io(PRINT, e)),
            Err(RecvTimeoutError::Disconnected) => return Err(cannot()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(signal) = Signals::newest() {
            let why = format!("nobody reads standard output, and {signal} came");
            return Err(Error::new(ErrorKind::Closed, PRINT, why));
        }
    }
}

fn tell(line: Vec<u8>) {
    static ERR: OnceLock<Option<Stream>> = OnceLock::new();
    let stream = ERR.get_or_init(|| Stream::start("stderr", io::stderr()));
    let Some(stream) = stream else { return };
    let is_stuck = stream.is_stuck.load(Ordering::Relaxed);
    if let Some(done) = stream.write(line)
        && !is_stuck
        && matches!(done.recv_timeout(MOMENT), Err(RecvTimeoutError::Timeout))
    {
        stream.is_stuck.store(true, Ordering::Relaxed);
    }
}

/// A stream that a thread of its own writes to.
struct Stream {
    lines: SyncSender<Line>,
    /// A line was waited for in vain, and none has been taken since.
    is_stuck: Arc<AtomicBool>,
}

struct Line {
    bytes: Vec<u8>,
    done: SyncSender<io::Result<()>>,
}

impl Stream {
    /// None where no thread can be started.
    fn start(name: &str, mut to: impl io::Write + Send + 'static) -> Option<Self> {
        let (lines, waiting) = sync_channel::<Line>(WAITING);
        let is_stuck = Arc::new(AtomicBool::new(false));
        let stuck = is_stuck.clone();
        let write = move || {
            for Line { bytes, done } in waiting {
                let written = to.write_all(&bytes).and_then(|()| to.flush());
                stuck.store(false, Ordering::Relaxed);
                let _ = done.send(written); // who waited may have given up
            }
        };
        std::thread::Builder::new().name(name.into()).spawn(write).ok()?;
        Some(Self { lines, is_stuck })
    }

    /// Hands a line over; what comes of it is received. None if too many wait.
    fn write(&self, bytes: Vec<u8>) -> Option<Receiver<io::Result<()>>> {
        let (done, outcome) = sync_channel(1);
        self.lines.try_send(Line { bytes, done }).ok().map(|()| outcome)
    }
}

/// SIGINT, SIGTERM and SIGHUP, which ask this process to end, from [`Self::listen`] on. Then they no
/// longer end it by themselves.
///
/// A thread of its own hears them: they count also while everything else is busy.
#[derive(Debug)]
pub struct Signals {
    seen: watch::Receiver<Seen>,
    taken: u64,
}

/// How many there were, and which came last.
type Seen = (u64, &'static str);

static HEARD: Mutex<Option<watch::Receiver<Seen>>> = Mutex::new(None);

impl Signals {
    /// Listens from now on.
    pub fn listen() -> Result<Self> {
        let mut heard = HEARD.lock();
        let seen = match &*heard {
            Some(seen) => seen.clone(),
            None => heard.insert(hear()?).clone(),
        };
        let taken = seen.borrow().0;
        Ok(Self { seen, taken })
    }

    /// The next one, by name.
    pub async fn next(&mut self) -> &'static str {
        let taken = self.taken;
        let seen = self.seen.wait_for(|seen| seen.0 > taken).await.map(|seen| *seen);
        self.taken += 1;
        match seen {
            Ok((_, name)) => name,
            Err(_) => std::future::pending().await, // the thread lives as long as the process
        }
    }

    /// The newest that came so far.
    fn newest() -> Option<&'static str> {
        let heard = HEARD.lock();
        let seen = *heard.as_ref()?.borrow();
        (seen.0 > 0).then_some(seen.1)
    }
}

fn hear() -> Result<watch::Receiver<Seen>> {
    let fail = |e| Error::io("handle signals", e);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    let runtime = runtime.map_err(fail)?;
    let entered = runtime.enter();
    let mut int = signal(SignalKind::interrupt()).map_err(fail)?;
    let mut term = signal(SignalKind::terminate()).map_err(fail)?;
    // Whom nohup started is not to hear of it.
    let mut hup = match ignores_hangup() {
        true => None,
        false => Some(signal(SignalKind::hangup()).map_err(fail)?),
    };
    drop(entered);
    let (send, seen) = watch::channel((0, ""));
    let listen = async move {
        loop {
            let name = tokio::select! {
                _ = int.recv() => "SIGINT",
                _ = term.recv() => "SIGTERM",
                () = hang_up(&mut hup) => "SIGHUP",
            };
            send.send_modify(|seen| *seen = (seen.0 + 1, name));
        }
    };
    let thread = std::thread::Builder::new().name("signals".into());
    thread.spawn(move || runtime.block_on(listen)).map_err(fail)?;
    Ok(seen)
}

/// From now on a write beyond the limit on files' sizes is an error, as one to a full disk is. The
/// system would end the process, without a word.
pub fn survive_file_limits() -> Result<()> {
    let fail = |e| Error::io("handle signals", e);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    let runtime = runtime.map_err(fail)?;
    let _entered = runtime.enter();
    // Nobody listens: that somebody could is enough.
    let exceeded = rustix::process::Signal::XFSZ.as_raw();
    signal(SignalKind::from_raw(exceeded)).map(drop).map_err(fail)
}

async fn hang_up(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => drop(signal.recv().await),
        None => std::future::pending().await,
    }
}

fn ignores_hangup() -> bool {
    let ignored = status("SigIgn:").and_then(|mask| u64::from_str_radix(&mask, 16).ok());
    ignored.is_some_and(|mask| mask & 1 != 0) // SIGHUP is 1, the lowest bit
}

/// What keeps another process from doing anything, if the kernel says so.
pub(crate) fn at_rest(pid: u32) -> Option<&'static str> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    let Ok(stat) = stat else { return Some("is gone") };
    // The name before the state is in brackets, and may have any others in it.
    match stat.rsplit_once(") ")?.1.chars().next()? {
        'T' | 't' => Some(STOPPED),
        'D' => Some("waits in the kernel, as for a disk that does not answer"),
        'Z' | 'X' => Some("has ended"),
        _ => None,
    }
}

/// What [`at_rest`] says of a process that goes on if it is told to.
pub(crate) const STOPPED: &str = "is stopped, by SIGSTOP or a debugger";

/// Largest resident set of this process so far, in bytes; 0 where the system does not say.
pub fn peak_rss_bytes() -> u64 {
    let kib =
        status("VmHWM:").and_then(|text| text.strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.map_or(0, |kib| kib * 1024)
}

/// A line of what the system says of this process.
fn status(name: &str) -> Option<String> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    text.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_some_memory() {
        assert!(peak_rss_bytes() > 100_000);
    }

    #[test]
    fn processes_that_do_nothing_are_told_from_others() {
        use rustix::process::{Pid, Signal, kill_process};
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let id = child.id();
        let becomes = |expected: Option<&str>| {
            let until = std::time::Instant::now() + Duration::from_secs(10);
            while at_rest(id) != expected && std::time::Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(at_rest(id), expected);
        };
        becomes(None);
        kill_process(Pid::from_child(&child), Signal::STOP).unwrap();
        becomes(Some(STOPPED));
        child.kill().unwrap();
        becomes(Some("has ended"));
        child.wait().unwrap();
        becomes(Some("is gone"));
    }

    #[test]
    fn a_stream_that_nobody_reads_takes_lines_until_too_many_wait() {
        /// Blocks until somebody lets it go on.
        struct Full(Receiver<()>);
        impl io::Write for Full {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.recv().map_err(|_| io::ErrorKind::BrokenPipe)?;
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (go, full) = sync_channel(0);
        let stream = Stream::start("test", Full(full)).unwrap();
        let first = stream.write(b"1".to_vec()).unwrap();
        let taken = (0..2 * WAITING).filter_map(|_| stream.write(b"n".to_vec())).count();
        assert!((WAITING - 1..=WAITING).contains(&taken), "{taken}");
        assert!(matches!(first.recv_timeout(LOOK), Err(RecvTimeoutError::Timeout)));
        go.send(()).unwrap();
        first.recv().unwrap().unwrap();
        drop(go);
    }
}
