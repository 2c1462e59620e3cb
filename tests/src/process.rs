//! Child processes that end with their guard.

use std::{
    env,
    ffi::OsStr,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::STEP;

/// Path of the `featurestore` binary: `FEATURESTORE_BIN`, or the one of this build, built first if
/// need be.
pub fn featurestore() -> PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        if let Some(built) = env::var_os("FEATURESTORE_BIN") {
            return built.into();
        }
        let test = env::current_exe().expect("the running test has a path");
        let profile = test.parent().and_then(|p| p.parent()).expect("target/PROFILE/deps/test");
        let path = profile.join(format!("featurestore{}", env::consts::EXE_SUFFIX));
        let mut build = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        build.args(["build", "--quiet", "--package", "featurestore", "--bin", "featurestore"]);
        if profile.ends_with("release") {
            build.arg("--release");
        }
        let status = build.status().expect("cargo can be started");
        assert!(status.success(), "building the featurestore binary failed");
        assert!(path.exists(), "no binary at {}", path.display());
        path
    })
    .clone()
}

/// A child process; killed and reaped when dropped.
#[derive(Debug)]
pub struct Process(Child);

impl Process {
    /// Starts `command`.
    pub fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap_or_else(|e| panic!("starting {command:?}: {e}")))
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// Kills it as a crash does and waits for the end.
    pub fn kill(&mut self) {
        let _ = self.0.kill(); // it may have ended already
        let _ = self.0.wait();
    }

    /// Stops the process where it is, until [`Self::resume`].
    pub fn pause(&self) {
        self.signal(rustix::process::Signal::STOP);
    }

    /// Lets a stopped process go on.
    pub fn resume(&self) {
        self.signal(rustix::process::Signal::CONT);
    }

    /// Asks it to end.
    pub fn terminate(&self) {
        self.signal(rustix::process::Signal::TERM);
    }

    /// Whether it has not ended.
    pub fn is_running(&mut self) -> bool {
        self.0.try_wait().expect("the child is ours").is_none()
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, signal).expect("the child is ours and not yet reaped");
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().expect("the child is ours")
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// When it does not end within `limit`.
    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.0.try_wait().expect("the child is ours") {
                return status;
            }
            assert!(Instant::now() < end, "process {} still runs after {limit:?}", self.0.id());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl From<Child> for Process {
    fn from(child: Child) -> Self {
        Self(child)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts the test trainer `program` as `client`, with a lease of one second, and waits until it
/// holds every one of `captured`.
///
/// # Panics
/// When it does not.
pub fn start_trainer(program: &str, engine: &str, client: &str, captured: &[Value]) -> Process {
    let mut command = Command::new(program);
    command.args([engine, client, "1000"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("the test trainer starts");
    let mut stdin = child.stdin.take().expect("piped");
    let stdout = child.stdout.take().expect("piped");
    for result in captured {
        writeln!(stdin, "{result}").expect("it reads");
    }
    drop(stdin);
    let child = Process::from(child);
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).expect("it says something");
    assert_eq!(line.trim(), format!("holding {}", captured.len()));
    child
}

/// A running `featurestore capture-server`.
#[derive(Debug)]
pub struct CaptureServer {
    /// The process.
    pub process: Process,
    /// The line that it printed when it was ready.
    pub ready: Value,
}

impl CaptureServer {
    /// Starts a server on loopback with an arena of `arena` and further `arguments`, and waits
    /// until it is ready.
    pub fn start(arena: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new(featurestore());
        command.args(["capture-server", "--arena", arena]).args(arguments);
        Self::spawn(&mut command)
    }

    /// Starts `command`, which must end up as a capture server.
    pub fn spawn(command: &mut Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut process = Process::start(command);
        let stdout = process.0.stdout.take().expect("piped");
        let (send, receive) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(stdout).lines();
            if let Some(Ok(line)) = lines.next() {
                let _ = send.send(line); // the test may have given up
            }
            for _ in lines {} // a full pipe must never stop the server
        });
        let line = receive.recv_timeout(STEP).expect("a ready line in time");
        let ready = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line:?}: {e}"));
        Self { process, ready }
    }

    /// A text field of the ready line.
    pub fn field(&self, name: &str) -> &str {
        self.ready[name].as_str().unwrap_or_else(|| panic!("{name} in {}", self.ready))
    }
}

/// Runs `featurestore` to its end and returns exit code, standard output and standard error.
///
/// # Panics
/// When it does not end within `limit`.
pub fn run<S: AsRef<OsStr>>(arguments: &[S], limit: Duration) -> (Option<i32>, String, String) {
    use std::io::Read;
    let mut command = Command::new(featurestore());
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = Process::start(&mut command);
    let mut stdout = process.0.stdout.take().expect("piped");
    let mut stderr = process.0.stderr.take().expect("piped");
    let out = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = stdout.read_to_string(&mut text);
        text
    });
    let err = std::thread::spawn(move || {
        let mut text = String::new();
        let _ = stderr.read_to_string(&mut text);
        text
    });
    let status = process.wait(limit);
    (status.code(), out.join().expect("no panic"), err.join().expect("no panic"))
}
