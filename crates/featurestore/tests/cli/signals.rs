//! What ends a process: signals, whatever becomes of its output; and what it leaves then.

use std::{
    io::{PipeReader, PipeWriter, Write},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    process::Signal,
};

use crate::common::{Process, STEP, arguments, children, eventually, featurestore, parent};

/// Longest time from a signal to the end.
const BOUND: Duration = Duration::from_secs(20);

/// A pipe that is full; who holds its other end does not read.
fn full() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    let flags = fcntl_getfl(&writer).expect("flags");
    fcntl_setfl(&writer, flags | OFlags::NONBLOCK).expect("set flags");
    for size in [1 << 12, 1] {
        while writer.write(&vec![b'x'; size]).is_ok() {}
    }
    fcntl_setfl(&writer, flags).expect("set flags"); // they are shared with who inherits it
    (reader, writer)
}

/// A job of minutes, whose temporary files go to `folder`.
fn pipeline(folder: &Path) -> Command {
    let mut command = featurestore(&["pipeline", "--samples", "200000", "--hidden", "64"]);
    command.args(["--taps", "1,2", "--arena", "16MiB", "--quantum", "4", "--json"]);
    command.env("TMPDIR", folder).env("RUST_LOG", "debug");
    command
}

/// The same command where SIGHUP is not ignored, as it is for all that is started under `nohup`.
fn hanging_up(command: &Command) -> Command {
    let mut reset = Command::new("env");
    reset.arg("--default-signal=HUP").arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => reset.env(name, value),
            None => reset.env_remove(name),
        };
    }
    reset.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    reset
}

fn working(job: &Process) -> Vec<u32> {
    let mut found = Vec::new();
    eventually("two servers and a trainer run", || {
        found = children(job.id());
        found.len() == 3 && found.iter().any(|&pid| arguments(pid).contains(" trainer"))
    });
    std::thread::sleep(Duration::from_millis(500)); // samples are on their way
    found
}

fn all_gone(children: &[u32]) {
    eventually("no process is left", || children.iter().all(|&child| parent(child).is_none()));
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).expect("readable").next().is_none()
}

#[test]
fn a_job_whose_notes_nobody_reads_ends_on_signals_and_leaves_nothing() {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP, Signal::KILL] {
        let folder = tempfile::tempdir().unwrap();
        let (_reader, stderr) = full();
        let mut command = hanging_up(&pipeline(folder.path()));
        command.stderr(stderr);
        let job = Process::start(command);
        let children = working(&job);
        job.signal(signal);
        let ended = job.end(BOUND);
        assert_eq!(ended.status.code(), (signal != Signal::KILL).then_some(1), "{ended:?}");
        all_gone(&children);
        eventually("the run's folder is gone", || is_empty(folder.path()));
    }
}

#[test]
fn a_result_that_nobody_takes_does_not_keep_a_process_from_ending() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = featurestore(&["pipeline", "--samples", "2", "--hidden", "64", "--json"]);
    job.args(["--taps", "1,2", "--max-length", "64", "--arena", "16MiB"]);
    let mut server = featurestore(&["capture-server", "--arena", "1MiB"]);
    server.args(["--hidden", "64", "--taps", "1,2"]);
    let mut put = featurestore(&["rollout", "put", "--payload", "text:1MiB"]);
    put.args(["--memory", "64MiB"]);
    for (mut command, name) in [(job, "pipeline"), (server, "server"), (put, "put")] {
        let (_reader, stdout) = full();
        command.stdout(stdout).stdin(Stdio::piped()).env("TMPDIR", folder.path());
        let mut process = Process::start(command);
        let _stdin = process.stdin();
        let tasks = format!("/proc/{}/task", process.id());
        eventually("the process prints its result", || {
            let named = |task: &std::fs::DirEntry| {
                std::fs::read_to_string(task.path().join("comm")).unwrap_or_default()
            };
            let mut tasks = std::fs::read_dir(&tasks).into_iter().flatten().flatten();
            tasks.any(|task| named(&task).trim() == "stdout")
        });
        let begun = Instant::now();
        process.signal(Signal::TERM);
        let ended = process.end(BOUND);
        assert_eq!(ended.status.code(), Some(1), "{name}: {ended:?}");
        assert!(ended.stderr.contains("SIGTERM"), "{name}: {}", ended.stderr);
        assert!(begun.elapsed() < BOUND, "{name}");
    }
}

#[test]
fn a_hang_up_is_a_request_to_end_unless_nohup_says_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let job = Process::start(hanging_up(&pipeline(folder.path())));
    let children = working(&job);
    job.signal(Signal::HUP);
    let ended = job.end(BOUND);
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert!(ended.stderr.contains("SIGHUP"), "{}", ended.stderr);
    all_gone(&children);
    assert!(is_empty(folder.path()));

    let mut under = Command::new("nohup");
    let plain = pipeline(folder.path());
    under.arg(plain.get_program()).args(plain.get_args());
    under.env("TMPDIR", folder.path()).stdin(Stdio::null());
    under.stdout(Stdio::piped()).stderr(Stdio::piped());
    let job = Process::start(under);
    let children = working(&job);
    job.signal(Signal::HUP);
    std::thread::sleep(Duration::from_millis(300));
    assert!(parent(job.id()).is_some(), "it goes on");
    job.signal(Signal::INT);
    assert_eq!(job.end(BOUND).status.code(), Some(1));
    all_gone(&children);
}

#[test]
fn a_job_that_is_killed_while_it_starts_leaves_no_folder() {
    let folder = tempfile::tempdir().unwrap();
    for round in 0..12 {
        let mut command = pipeline(folder.path());
        command.env("RUST_LOG", "warn");
        let job = Process::start(command);
        let mut found = Vec::new();
        eventually("a trainer is started", || {
            found = children(job.id());
            found.iter().any(|&pid| arguments(pid).contains(" trainer"))
        });
        std::thread::sleep(Duration::from_millis(round * 3));
        job.signal(Signal::KILL);
        job.end(STEP);
        all_gone(&found);
        eventually("the run's folder is gone", || is_empty(folder.path()));
    }
}
