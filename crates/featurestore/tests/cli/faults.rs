//! Processes of the main job die: what is left is ended, in time, with the culprit's name.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::{Process, arguments, children, eventually, featurestore, parent};

/// Longest time from a death to the end of the job.
const BOUND: Duration = Duration::from_secs(30);

/// A job that takes minutes unless something ends it, with its children once they work.
fn long_job() -> (Process, Vec<u32>) {
    long_job_with(&[], &std::env::temp_dir())
}

/// The same with more arguments, and its temporary files in `temporary`.
fn long_job_with(more: &[&str], temporary: &Path) -> (Process, Vec<u32>) {
    let mut command = featurestore(&[
        "pipeline",
        "--samples",
        "200000",
        "--hidden",
        "64",
        "--taps",
        "1,2,3,4,5",
        "--servers",
        "2",
        "--arena",
        "16MiB",
        "--quantum",
        "4",
        "--json",
    ]);
    command.args(more).env("TMPDIR", temporary).stdin(Stdio::null());
    let job = Process::start(command);
    let mut found = Vec::new();
    eventually("two servers and a trainer run", || {
        found = children(job.id());
        found.len() == 3 && found.iter().any(|&pid| arguments(pid).contains(" trainer"))
    });
    std::thread::sleep(Duration::from_millis(500)); // samples are on their way
    (job, found)
}

fn pid(raw: u32) -> Pid {
    Pid::from_raw(i32::try_from(raw).expect("a process id")).expect("not zero")
}

fn kill(of: &[u32], with: &str) -> u32 {
    signal(of, with, Signal::KILL)
}

fn signal(of: &[u32], with: &str, signal: Signal) -> u32 {
    let victim = *of.iter().find(|&&pid| arguments(pid).contains(with)).expect("such a child");
    kill_process(pid(victim), signal).expect("the child runs");
    victim
}

fn all_gone(children: &[u32]) {
    eventually("no process of the job is left", || children.iter().all(|&c| parent(c).is_none()));
}

#[test]
fn a_killed_server_ends_the_job_by_name() {
    let (job, children) = long_job();
    let victim = kill(&children, " capture-server");
    let ended = job.end(BOUND);
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let line = ended.stderr.lines().last().expect("an error");
    let named = format!("(pid {victim}) died: signal: 9");
    let begins = "featurestore: run pipeline: peer gone: capture server ";
    assert!(line.starts_with(begins) && line.contains(&named), "{named}: {line}");
    assert_eq!(ended.stdout, "", "no report of a job that failed");
    all_gone(&children);
}

#[test]
fn a_killed_trainer_ends_the_job_by_name() {
    let (job, children) = long_job();
    let victim = kill(&children, " trainer");
    let ended = job.end(BOUND);
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let named = format!("peer gone: the trainer (pid {victim}) died: signal: 9");
    assert!(ended.stderr.contains(&named), "{}", ended.stderr);
    all_gone(&children);
}

#[test]
fn an_interrupted_job_ends_everything_that_it_started() {
    for signal in [Signal::INT, Signal::TERM] {
        let (job, children) = long_job();
        job.signal(signal);
        let ended = job.end(BOUND);
        assert_eq!(ended.status.code(), Some(1), "{signal:?}: {ended:?}");
        assert!(ended.stderr.contains("ended by SIG"), "{signal:?}: {}", ended.stderr);
        all_gone(&children);
    }
}

#[test]
fn a_killed_job_leaves_no_orphans() {
    let (job, children) = long_job();
    job.signal(Signal::KILL);
    job.end(BOUND);
    all_gone(&children);
}

/// What is in a folder.
fn left_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    entries.map(|entry| entry.expect("an entry").path()).collect()
}

#[test]
fn servers_remove_the_folder_of_a_run_whose_pipeline_and_trainer_are_killed() {
    let temporary = tempfile::tempdir().expect("a temporary folder");
    let (job, children) = long_job_with(&[], temporary.path());
    assert_eq!(left_in(temporary.path()).len(), 1, "of the run");
    job.signal(Signal::KILL);
    kill(&children, " trainer");
    job.end(BOUND);
    all_gone(&children);
    assert_eq!(left_in(temporary.path()), <[PathBuf; 0]>::default());
}

/// As where the system has no memory left for any of them.
#[test]
fn the_next_run_removes_what_one_has_left_that_was_killed_whole_and_nothing_of_another() {
    let temporary = tempfile::tempdir().expect("a temporary folder");
    let (job, children) = long_job_with(&[], temporary.path());
    let dead = left_in(temporary.path());
    for &child in children.iter().filter(|&&child| !arguments(child).contains(" trainer")) {
        kill_process(pid(child), Signal::STOP).expect("the server runs"); // they must not clean up
    }
    job.signal(Signal::KILL);
    kill(&children, " trainer");
    for &child in &children {
        let _ = kill_process(pid(child), Signal::KILL); // one is dead already
    }
    job.end(BOUND);
    all_gone(&children);
    assert_eq!(left_in(temporary.path()), dead, "nobody is left who could remove it");

    let (living, children) = long_job_with(&[], temporary.path());
    let other = left_in(temporary.path());
    assert!(other.len() == 1 && other != dead, "{other:?}");
    let mut next = featurestore(&["pipeline", "--hidden", "8", "--samples", "2"]);
    next.env("TMPDIR", temporary.path());
    let ended = Process::start(next).end(BOUND);
    assert!(ended.status.success(), "{ended:?}");
    assert_eq!(left_in(temporary.path()), other, "that of a run that lives stays");
    living.signal(Signal::TERM);
    let ended = living.end(BOUND);
    assert!(ended.stderr.contains("ended by SIGTERM"), "it lived: {}", ended.stderr);
    all_gone(&children);
    assert_eq!(left_in(temporary.path()), <[PathBuf; 0]>::default());
}

#[test]
fn a_stopped_trainer_does_not_make_memory_grow() {
    let (job, children) = long_job();
    let trainer = *children.iter().find(|&&c| arguments(c).contains(" trainer")).expect("it runs");
    kill_process(pid(trainer), Signal::STOP).expect("the trainer runs");
    std::thread::sleep(Duration::from_secs(2));
    let before = resident(job.id());
    std::thread::sleep(Duration::from_secs(2));
    let grown = resident(job.id()).saturating_sub(before);
    kill_process(pid(trainer), Signal::KILL).expect("the trainer is stopped");
    assert!(grown < 8 << 20, "{grown} bytes in 2 s: results pile up in the producer");
    let ended = job.end(BOUND);
    assert_eq!(ended.status.code(), Some(1));
    let named = format!("no progress: the trainer (pid {trainer}) is stopped");
    assert!(ended.stderr.contains(&named), "{named}: {}", ended.stderr);
    all_gone(&children);
}

/// Who reads a server's arguments must not be able to make the run's folder before the run does.
#[test]
fn the_folder_of_a_run_is_there_before_any_process_is_told_its_name() {
    use std::os::unix::fs::PermissionsExt;

    let temporary = tempfile::tempdir().expect("a temporary folder");
    let mut command = featurestore(&["pipeline", "--hidden", "8", "--samples", "2"]);
    command.env("TMPDIR", temporary.path()).stdin(Stdio::null());
    let job = Process::start(command);
    let mut mode = None;
    eventually("a server is started", || {
        let is_server = |&pid: &u32| arguments(pid).contains(" capture-server");
        let is_started = children(job.id()).iter().any(is_server);
        if is_started {
            let found = left_in(temporary.path()).first().and_then(|path| path.metadata().ok());
            mode = found.map(|folder| folder.permissions().mode() & 0o777);
        }
        is_started
    });
    let ended = job.end(BOUND);
    assert!(ended.status.success(), "{ended:?}");
    assert_eq!(mode, Some(0o700), "a server was told of a folder that was not there");
}

/// As by ^Z at a terminal: its processes go on meanwhile, and what they said is not lost.
#[test]
fn a_run_whose_pipeline_was_stopped_itself_goes_on() {
    let (job, children) = long_job_with(&["--stall-timeout", "3s"], &std::env::temp_dir());
    for _ in 0..2 {
        job.signal(Signal::STOP);
        std::thread::sleep(Duration::from_secs(5));
        job.signal(Signal::CONT);
        std::thread::sleep(Duration::from_secs(1));
    }
    job.signal(Signal::TERM);
    let ended = job.end(BOUND);
    assert!(ended.stderr.contains("ended by SIGTERM"), "it lived: {}", ended.stderr);
    assert!(!ended.stderr.contains("no progress"), "{}", ended.stderr);
    all_gone(&children);
}

#[test]
fn a_stopped_server_is_named_before_anybody_gives_up() {
    let (job, children) = long_job();
    let victim = signal(&children, " capture-server", Signal::STOP);
    std::thread::sleep(Duration::from_secs(4));
    job.signal(Signal::TERM);
    let ended = job.end(BOUND);
    let named = format!("(pid {victim}) is stopped");
    let line = ended.stderr.lines().find(|line| line.contains(&named));
    let line = line.unwrap_or_else(|| panic!("{named}: {}", ended.stderr));
    assert!(line.contains("no progress: capture server "), "{line}");
    all_gone(&children);
}

#[test]
fn a_run_that_stands_still_is_given_up_when_it_is_told_to_and_says_what_it_waited_for() {
    let (job, children) = long_job_with(&["--stall-timeout", "3s"], &std::env::temp_dir());
    let victim = signal(&children, " capture-server", Signal::STOP);
    let start = Instant::now();
    let ended = job.end(BOUND);
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert!(start.elapsed() >= Duration::from_secs(3), "{:?}", start.elapsed());
    let line = ended.stderr.lines().last().expect("an error");
    assert!(line.contains("run pipeline: timed out: no progress: capture server "), "{line}");
    let named = format!("(pid {victim}) is stopped");
    for part in [&*named, "for=3s", "waited_for=samples, ", " to be captured by the servers"] {
        assert!(line.contains(part), "{part}: {line}");
    }
    assert!(line.contains("SIGCONT"), "{line}");
    all_gone(&children);
}

/// A limit on the size of files stands for a full disk. It neither ends a process without a word nor
/// is it said by each of the processes.
#[test]
fn a_ledger_that_cannot_grow_is_named_once() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let ledger = folder.path().join("run.db");
    let file = ledger.to_str().expect("UTF-8");
    for blocks in [20, 600] {
        let limited = format!("ulimit -f {blocks} && exec \"$0\" \"$@\"");
        let binary = featurestore(&[]).get_program().to_owned();
        let mut command = featurestore(&[]);
        command = {
            let mut shell = std::process::Command::new("sh");
            shell.args(["-c", &limited]).arg(binary).args(["pipeline", "--ledger", file]);
            shell.args(["--hidden", "64", "--taps", "1,2", "--arena", "16MiB", "--quantum", "1"]);
            shell.args(["--transport", "tcp", "--samples", "2000", "--max-length", "64"]);
            for (name, _) in command.get_envs() {
                shell.env_remove(name);
            }
            shell.env("FEATURESTORE_ARENA_KIND", "heap").stdin(Stdio::null());
            shell.stdout(Stdio::piped()).stderr(Stdio::piped());
            shell
        };
        let ended = Process::start(command).end(BOUND);
        assert_eq!(ended.status.code(), Some(1), "{blocks}: {ended:?}");
        let lines = || ended.stderr.lines().filter(|line| line.contains("ledger: "));
        assert_eq!(lines().count(), 1, "{blocks}: {}", ended.stderr);
        assert!(lines().all(|line| line.contains(file)), "{blocks}: {}", ended.stderr);
        for end in ["", "-wal", "-shm"] {
            let _ = std::fs::remove_file(format!("{file}{end}")); // what there is
        }
    }
}

/// Resident bytes of a process.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it is listed");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}
