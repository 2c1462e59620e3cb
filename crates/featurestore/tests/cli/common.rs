//! Processes of the binary under test, and the least HTTP client.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::PathBuf,
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

/// Longest time that any single step may take, on a busy machine.
pub(crate) const STEP: Duration = Duration::from_secs(60);

/// The binary that was built with these tests. Where they were carried to another machine, it is the
/// one that the environment names: elsewhere that one may have other features.
fn binary() -> PathBuf {
    let built = PathBuf::from(env!("CARGO_BIN_EXE_featurestore"));
    let named = || std::env::var_os("FEATURESTORE_BIN").map(PathBuf::from);
    if built.exists() { built } else { named().unwrap_or(built) }
}

/// The binary under test, without settings of the environment that runs the tests.
pub(crate) fn featurestore(arguments: &[&str]) -> Command {
    let mut command = Command::new(binary());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("FEATURESTORE_") {
            command.env_remove(name);
        }
    }
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A child process; killed and reaped when dropped.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    stdout: Option<thread::JoinHandle<String>>,
    stderr: Option<thread::JoinHandle<String>>,
}

/// What a process left behind.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Process {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap_or_else(|e| panic!("starting {command:?}: {e}"));
        let stdout = child.stdout.take().map(collect);
        let stderr = child.stderr.take().map(collect);
        Self { child, stdout, stderr }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Takes the end that keeps a child of a parent alive.
    pub(crate) fn stdin(&mut self) -> ChildStdin {
        self.child.stdin.take().expect("piped and not yet taken")
    }

    /// Whether it has not ended yet.
    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().expect("it can be waited for").is_none()
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), signal)
            .expect("the child is ours and not yet reaped");
    }

    /// Waits for the end; panics when it does not come within `limit`.
    pub(crate) fn end(mut self, limit: Duration) -> Ended {
        let deadline = Instant::now() + limit;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("the child is ours") {
                break status;
            }
            assert!(Instant::now() < deadline, "process {} still runs", self.id());
            thread::sleep(Duration::from_millis(5));
        };
        let text = |reader: Option<thread::JoinHandle<String>>| {
            reader.map_or_else(String::new, |r| r.join().expect("readers do not panic"))
        };
        Ended { status, stdout: text(self.stdout.take()), stderr: text(self.stderr.take()) }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended already
        let _ = self.child.wait();
    }
}

fn collect(mut from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Whether the binary under test can receive on a device of this machine.
pub(crate) fn has_device() -> bool {
    let opened = || capture_arena::cuda::Device::open(capture_arena::cuda::driver().ok()?, 0).ok();
    cfg!(feature = "cuda") && opened().is_some()
}

/// Runs the binary to its end.
pub(crate) fn run(arguments: &[&str]) -> Ended {
    Process::start(featurestore(arguments)).end(STEP)
}

/// A running capture server.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) process: Process,
    pub(crate) ready: Value,
}

impl Server {
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::spawn(featurestore(arguments))
    }

    /// Starts `command` and reads its ready line.
    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap_or_else(|e| panic!("starting {command:?}: {e}"));
        let stdout = child.stdout.take().expect("piped");
        let stderr = child.stderr.take().map(collect);
        let (send, first) = mpsc::channel();
        let rest = thread::spawn(move || {
            let mut lines = BufReader::new(stdout).lines();
            if let Some(Ok(line)) = lines.next() {
                let _ = send.send(line); // the test may have given up
            }
            lines.map_while(Result::ok).collect::<Vec<_>>().join("\n")
        });
        let process = Process { child, stdout: Some(rest), stderr };
        match first.recv_timeout(STEP) {
            Ok(line) => {
                let ready = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line:?}: {e}"));
                Self { process, ready }
            }
            Err(_) => panic!("no ready line: {:?}", process.end(STEP)),
        }
    }

    pub(crate) fn address(&self, field: &str) -> String {
        self.ready[field].as_str().unwrap_or_else(|| panic!("{field} in {}", self.ready)).into()
    }

    pub(crate) fn health(&self) -> Value {
        let (status, _, body) = http(&self.address("http"), "GET", "/health", &[], b"");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).expect("health is JSON")
    }

    pub(crate) fn generate(&self, headers: &[(&str, &str)], body: &Value) -> (u16, Value) {
        let body = body.to_string();
        let (status, _, text) =
            http(&self.address("http"), "POST", "/generate", headers, body.as_bytes());
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }
}

/// One request on a connection of its own: status, head and body of the answer.
pub(crate) fn http(
    address: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).expect("the server listens");
    stream.set_read_timeout(Some(STEP)).expect("a valid timeout");
    let mut head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
         content-length: {}\r\n",
        body.len()
    );
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    head += "\r\n";
    stream.write_all(head.as_bytes()).expect("the server reads");
    let _ = stream.write_all(body); // a refused body need not be read to its end
    let mut reply = Vec::new();
    let _ = stream.read_to_end(&mut reply); // a refusal may end in a reset
    let reply = String::from_utf8(reply).expect("text");
    let (head, body) = reply.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{reply:?}"));
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).expect("a status");
    (status, head.to_ascii_lowercase(), body.to_owned())
}

/// Polls `condition` until it holds.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + STEP;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not within {STEP:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Direct children of a process.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|p| parent(*p) == Some(pid)).collect()
}

/// Parent of a process; none if it is gone or a zombie.
pub(crate) fn parent(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    (state != "Z" && state != "X").then(|| fields.next()?.parse().ok())?
}

/// Arguments of a process, joined by blanks.
pub(crate) fn arguments(pid: u32) -> String {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ")
}
