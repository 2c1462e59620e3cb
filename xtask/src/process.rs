//! Running commands: bounded in time, read line by line, and with nothing left behind.

use std::{
    collections::HashMap,
    fs,
    io::{self, BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, getpid, kill_process, set_child_subreaper};

use crate::Result;

/// Longest line that is kept whole; the rest of a longer one becomes lines of its own.
const MAX_LINE: u64 = 64 << 10;
/// Lines between the reader and the handler. A full queue holds the command back.
const QUEUE: usize = 1024;
/// How often a silent command is announced.
const HEARTBEAT: Duration = Duration::from_secs(60);
/// How long processes may take to end after the command that started them.
const GRACE: Duration = Duration::from_secs(3);

/// How a command ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// `None` where it was stopped at its limit.
    pub(crate) status: Option<ExitStatus>,
    /// Processes built in this workspace that outlived the command, and were stopped.
    pub(crate) left_running: Vec<String>,
    /// Wall time.
    pub(crate) took: Duration,
}

impl Ended {
    /// What is wrong with how it ended or with what it left running, or `None`.
    pub(crate) fn problem(&self) -> Option<String> {
        match (self.exit_problem(), self.leftover_problem()) {
            (Some(exit), Some(leftover)) => Some(format!("{exit}; {leftover}")),
            (exit, leftover) => exit.or(leftover),
        }
    }

    /// Why it did not exit by itself with status 0, or `None` where it did.
    pub(crate) fn exit_problem(&self) -> Option<String> {
        match self.status {
            None => Some(format!("stopped at its limit of {}", seconds(self.took))),
            Some(status) => (!status.success()).then(|| status.to_string()),
        }
    }

    /// What it left running, or `None`.
    pub(crate) fn leftover_problem(&self) -> Option<String> {
        (!self.left_running.is_empty())
            .then(|| format!("left running: {}", self.left_running.join("; ")))
    }
}

/// Makes this process the parent of every process that its commands leave behind, so that
/// [`run`] can find and stop them.
pub(crate) fn adopt_orphans() -> Result<()> {
    set_child_subreaper(Some(getpid()))
        .map_err(|error| format!("cannot adopt the processes of the tests: {error}"))
}

/// Runs `command` for at most `limit` and hands each line of its output, both streams in the order
/// written, to `on_line`.
///
/// At the limit the command and all its descendants are killed. When it ends by itself, processes
/// whose executable lies in `target` and that are still alive after a grace of 3 s are killed and
/// named in [`Ended::left_running`]. No other process is ever touched.
pub(crate) fn run(
    command: &mut Command,
    target: &Path,
    limit: Duration,
    mut on_line: impl FnMut(&str),
) -> Result<Ended> {
    let program = PathBuf::from(command.get_program());
    let failed = |error: io::Error| format!("cannot run {}: {error}", program.display());
    let started = Instant::now();

    let (reader, writer) = io::pipe().map_err(failed)?;
    command.stdin(Stdio::null()).stdout(writer.try_clone().map_err(failed)?).stderr(writer);
    let spawned = command.spawn();
    // The command keeps its ends of the pipe; it must not keep the end of the output from showing.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = spawned.map_err(failed)?;

    let lines = read_lines(reader);
    let mut last_line = Instant::now();
    let mut exited: Option<(ExitStatus, Instant)> = None;
    loop {
        match lines.recv_timeout(Duration::from_millis(50)) {
            Ok(line) => {
                last_line = Instant::now();
                on_line(&line);
                // An endless stream of lines must not keep the limit from being looked at.
                if started.elapsed() < limit {
                    continue;
                }
            }
            Err(RecvTimeoutError::Disconnected) if exited.is_some() => break,
            Err(RecvTimeoutError::Disconnected) => thread::sleep(Duration::from_millis(20)),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if exited.is_none() {
            exited = child.try_wait().map_err(failed)?.map(|status| (status, Instant::now()));
        }
        match exited {
            // Something else may hold the pipe open for ever.
            Some((_, at)) if at.elapsed() > GRACE => break,
            Some(_) => {}
            None if started.elapsed() >= limit => {
                kill_tree(&mut child);
                return Ok(Ended {
                    status: None,
                    left_running: Vec::new(),
                    took: started.elapsed(),
                });
            }
            None => {}
        }
        if last_line.elapsed() > HEARTBEAT {
            last_line = Instant::now();
            println!("    ... still running after {}", seconds(started.elapsed()));
        }
    }
    let status = exited.map(|(status, _)| status);
    Ok(Ended { status, left_running: stop_leftovers(target), took: started.elapsed() })
}

/// Runs `command` and returns its standard output, or what is wrong. For short questions.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("cannot run {program}: {error}"))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{program}: {}: {}", output.status, stderr.trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A duration as a person writes it, to the second.
pub(crate) fn seconds(duration: Duration) -> String {
    let whole = duration.as_secs();
    if whole < 120 { format!("{whole} s") } else { format!("{} min {} s", whole / 60, whole % 60) }
}

fn read_lines(reader: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::sync_channel(QUEUE);
    thread::spawn(move || {
        let mut reader = BufReader::new(reader);
        loop {
            let mut line = Vec::new();
            match reader.by_ref().take(MAX_LINE).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            let line = String::from_utf8_lossy(&line);
            if sender.send(line.trim_end_matches(['\n', '\r']).to_owned()).is_err() {
                return;
            }
        }
    });
    receiver
}

fn kill_tree(child: &mut Child) {
    // Killing a parent hands its children to this process, so look again until none is left.
    for _ in 0..20 {
        let mut victims = descendants();
        victims.retain(|process| process.state != 'Z');
        if victims.is_empty() {
            break;
        }
        for victim in &victims {
            victim.kill();
        }
        thread::sleep(Duration::from_millis(50));
        // Reaps it; that it was killed is known.
        let _ = child.try_wait();
    }
}

fn stop_leftovers(target: &Path) -> Vec<String> {
    // The kernel names executables by their real paths.
    let target = &target.canonicalize().unwrap_or_else(|_| target.to_owned());
    let ours = || -> Vec<Process> {
        descendants()
            .into_iter()
            .filter(|process| process.state != 'Z' && process.runs_from(target))
            .collect()
    };
    let until = Instant::now() + GRACE;
    let mut left = ours();
    while !left.is_empty() && Instant::now() < until {
        thread::sleep(Duration::from_millis(50));
        left = ours();
    }
    left.iter()
        .map(|process| {
            process.kill();
            format!("{} (process {})", process.name, process.pid.as_raw_nonzero())
        })
        .collect()
}

struct Process {
    pid: Pid,
    parent: i32,
    state: char,
    name: String,
}

impl Process {
    /// Parses `/proc/PID/stat`; the name in it may hold spaces and parentheses.
    fn parse(stat: &str) -> Option<Self> {
        let (pid, rest) = stat.split_once(" (")?;
        let (name, rest) = rest.rsplit_once(") ")?;
        let mut fields = rest.split(' ');
        Some(Self {
            pid: Pid::from_raw(pid.parse().ok()?)?,
            name: name.to_owned(),
            state: fields.next()?.chars().next()?,
            parent: fields.next()?.parse().ok()?,
        })
    }

    fn runs_from(&self, target: &Path) -> bool {
        fs::read_link(format!("/proc/{}/exe", self.pid.as_raw_nonzero()))
            .is_ok_and(|exe| exe.starts_with(target))
    }

    fn kill(&self) {
        // It may have ended by itself meanwhile.
        let _ = kill_process(self.pid, Signal::KILL);
    }
}

/// Every process below this one, at this moment.
fn descendants() -> Vec<Process> {
    let mut children: HashMap<i32, Vec<Process>> = HashMap::new();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    for entry in entries {
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        if let Some(process) = Process::parse(&stat) {
            children.entry(process.parent).or_default().push(process);
        }
    }
    let mut found = Vec::new();
    let mut parents = vec![getpid().as_raw_nonzero().get()];
    while let Some(parent) = parents.pop() {
        for process in children.remove(&parent).unwrap_or_default() {
            parents.push(process.pid.as_raw_nonzero().get());
            found.push(process);
        }
    }
    found
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Mutex, MutexGuard};

    use super::*;

    /// These tests look at, and kill, the children of the whole process.
    static ALONE: Mutex<()> = Mutex::new(());

    /// Holds those tests off while another one has children of its own.
    pub(crate) fn alone() -> MutexGuard<'static, ()> {
        ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn lines_of_both_streams_come_in_order() {
        let _alone = alone();
        let mut lines = Vec::new();
        let ended = run(
            &mut shell("echo one; echo two >&2; printf three; exit 3"),
            Path::new("/nonexistent"),
            Duration::from_secs(20),
            |line| lines.push(line.to_owned()),
        )
        .unwrap();
        assert_eq!(lines, ["one", "two", "three"]);
        assert_eq!(ended.status.unwrap().code(), Some(3));
        assert!(ended.problem().unwrap().contains('3'));
    }

    #[test]
    fn limit_ends_the_command_and_what_it_started() {
        let _alone = alone();
        let mut inner = None;
        let ended = run(
            &mut shell("sleep 60 & echo $!; yes"),
            Path::new("/nonexistent"),
            Duration::from_millis(500),
            |line| {
                inner.get_or_insert_with(|| line.to_owned());
            },
        )
        .unwrap();
        assert!(ended.status.is_none());
        assert!(ended.took < Duration::from_secs(15), "took {:?}", ended.took);
        let stat = fs::read_to_string(format!("/proc/{}/stat", inner.unwrap()));
        let gone = stat.map_or(true, |stat| Process::parse(&stat).unwrap().state == 'Z');
        assert!(gone, "the sleeping child outlived the limit");
    }

    #[test]
    fn process_from_the_target_directory_that_stays_is_named_and_stopped() {
        let _alone = alone();
        adopt_orphans().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let lingering = folder.path().join("lingering");
        fs::copy("/bin/sh", &lingering).unwrap();
        let script =
            format!("{} -c 'while :; do sleep 1; done' >/dev/null 2>&1 &", lingering.display());
        let target = folder.path().canonicalize().unwrap();
        let ended = run(&mut shell(&script), &target, Duration::from_secs(30), |_| {}).unwrap();
        assert!(ended.exit_problem().is_none());
        assert!(ended.problem().unwrap().contains("lingering"), "{ended:?}");
    }

    #[test]
    fn stat_with_a_hostile_name_is_parsed() {
        let process = Process::parse("42 (a) b (c)) S 7 42 42 0 -1").unwrap();
        assert_eq!(process.pid.as_raw_nonzero().get(), 42);
        assert_eq!(process.name, "a) b (c)");
        assert_eq!((process.state, process.parent), ('S', 7));
        assert!(Process::parse("").is_none());
    }

    #[test]
    fn missing_program_is_named() {
        let mut command = Command::new("no-such-program-here");
        let error = output(&mut command).unwrap_err();
        assert!(error.contains("no-such-program-here"), "{error}");
    }
}
