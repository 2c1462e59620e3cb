//! A `mooncake_master` of one's own: loopback only, on free ports, and gone with its starter.

use std::{
    fs::File,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    os::unix::{fs::OpenOptionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, OnceLock},
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use rustix::{
    fs::OFlags,
    process::{Pid, Signal, kill_process, set_parent_process_death_signal},
};
use transport_core::{Error, ErrorKind, Result};

const START: &str = "start mooncake_master";
const ASK: &str = "ask mooncake_master";
/// Between a polite signal and one that cannot be ignored.
const GRACE: Duration = Duration::from_secs(5);
/// A free port may be taken by another process before the master binds it.
const ATTEMPTS: usize = 3;
/// Longest answer accepted from the admin port.
const MAX_ANSWER: u64 = 16 << 20;

/// What to start.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MasterOptions {
    /// The program.
    pub program: PathBuf,
    /// Where its log goes, behind what is there; thrown away if `None`. A link is refused.
    pub log: Option<PathBuf>,
    /// How long a read lease lasts; the master's own default (10 s in 0.3.13) if `None`.
    pub lease: Option<Duration>,
    /// Further flags, such as `--client_ttl=60`.
    pub flags: Vec<String>,
    /// How long it may take to become ready.
    pub startup: Duration,
}

impl MasterOptions {
    /// Starts this program.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            log: None,
            lease: None,
            flags: Vec::new(),
            startup: Duration::from_secs(30),
        }
    }

    /// Looks for the program: in `environment` if given, else in those that `VIRTUAL_ENV` and
    /// `CONDA_PREFIX` name, then in `PATH`.
    pub fn find(environment: Option<&Path>) -> Result<Self> {
        let mut places: Vec<PathBuf> = match environment {
            Some(environment) => vec![environment.join("bin")],
            None => ["VIRTUAL_ENV", "CONDA_PREFIX"]
                .iter()
                .filter_map(|name| std::env::var_os(name).filter(|value| !value.is_empty()))
                .map(|root| PathBuf::from(root).join("bin"))
                .collect(),
        };
        if environment.is_none() {
            let path = std::env::var_os("PATH").unwrap_or_default();
            places.extend(std::env::split_paths(&path));
        }
        let programs = places.iter().map(|place| place.join("mooncake_master"));
        if let Some(program) = programs.into_iter().find(|program| program.is_file()) {
            return Ok(Self::new(program));
        }
        let tried: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
        Err(Error::new(ErrorKind::NotFound, START, "there is no mooncake_master")
            .with("tried", tried.join(", "))
            .remedy("name a virtual environment with Mooncake's wheel: FEATURESTORE_MOONCAKE_VENV"))
    }

    /// Starts the program of a virtual environment with Mooncake's wheel in it.
    pub fn of_environment(environment: &Path) -> Self {
        Self::new(environment.join("bin/mooncake_master"))
    }

    /// Keeps the log in a file.
    #[must_use]
    pub fn log(mut self, path: impl Into<PathBuf>) -> Self {
        self.log = Some(path.into());
        self
    }

    /// Adds a flag, such as `--client_ttl=60`.
    #[must_use]
    pub fn flag(mut self, flag: impl Into<String>) -> Self {
        self.flags.push(flag.into());
        self
    }

    /// Sets how long a read lease lasts.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }
}

/// A running master. Dropping it ends the process; so does the death of this process.
#[derive(Debug)]
pub struct ManagedMaster {
    address: SocketAddr,
    admin: Admin,
    pid: u32,
    stop: Sender<()>,
    ended: Receiver<()>,
    status: Arc<OnceLock<ExitStatus>>,
}

impl ManagedMaster {
    /// Starts a master and waits until it says that it serves.
    pub fn start(options: &MasterOptions) -> Result<Self> {
        let mut last = None;
        for _ in 0..ATTEMPTS {
            match Self::start_once(options, [free_port()?, free_port()?]) {
                Ok(master) => return Ok(master),
                Err(error) if error.kind() == ErrorKind::PeerGone => last = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(last.expect("at least one attempt"))
    }

    /// Starts a master at a given port again, as after a crash.
    pub fn start_at(options: &MasterOptions, port: u16) -> Result<Self> {
        Self::start_once(options, [port, free_port()?])
    }

    fn start_once(options: &MasterOptions, [rpc, metrics]: [u16; 2]) -> Result<Self> {
        let mut command = Command::new(&options.program);
        command
            .arg("--rpc_address=127.0.0.1")
            .arg(format!("--rpc_port={rpc}"))
            .arg("--metrics_host=127.0.0.1")
            .arg(format!("--metrics_port={metrics}"))
            .arg("--logtostderr=1")
            .stdin(Stdio::null());
        if let Some(lease) = options.lease {
            command.arg(format!("--default_kv_lease_ttl={}", lease.as_millis()));
        }
        command.args(&options.flags);
        match &options.log {
            Some(path) => {
                let no_link = OFlags::NOFOLLOW.bits().cast_signed();
                let mut options = File::options();
                options.create(true).append(true).mode(0o600).custom_flags(no_link);
                let log = options.open(path);
                let log = log.map_err(|e| Error::io(START, e).with("log", path.display()))?;
                let twin = log.try_clone().map_err(|e| Error::io(START, e))?;
                command.stdout(twin).stderr(log);
            }
            None => {
                command.stdout(Stdio::null()).stderr(Stdio::null());
            }
        }
        let child_setup =
            || set_parent_process_death_signal(Some(Signal::TERM)).map_err(std::io::Error::from);
        // SAFETY: between fork and exec only one system call is made, which needs no locks.
        unsafe { command.pre_exec(child_setup) };
        let (stop, stopped) = bounded(1);
        let (ended_tell, ended) = bounded(0);
        let (started_tell, started) = bounded(1);
        let status = Arc::new(OnceLock::new());
        let kept = status.clone();
        // The signal above comes when the starting *thread* ends, so one thread stays with it.
        thread::Builder::new()
            .name("mooncake-master".into())
            .spawn(move || keep(command, &started_tell, &stopped, ended_tell, &kept))
            .map_err(|e| Error::io(START, e))?;
        let spawned = started.recv().map_err(|_| {
            Error::new(ErrorKind::Unexpected, START, "the thread that starts it ended")
        })?;
        let pid = spawned.map_err(|e| {
            Error::io(START, e)
                .with("program", options.program.display())
                .remedy("install Mooncake's wheel and name its mooncake_master")
        })?;
        let at = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let admin = Admin::at(at(metrics));
        let master = Self { address: at(rpc), admin, pid, stop, ended, status };
        master.wait_ready(options.startup)?; // dropped on failure, which ends the process
        Ok(master)
    }

    fn wait_ready(&self, startup: Duration) -> Result<()> {
        let deadline = Instant::now() + startup;
        loop {
            if self.admin.get("/health").is_ok_and(|text| text.contains("\"ok\""))
                && TcpStream::connect_timeout(&self.address, Duration::from_secs(1)).is_ok()
            {
                return Ok(());
            }
            match self.ended.recv_timeout(Duration::from_millis(50)) {
                Err(RecvTimeoutError::Timeout) => {}
                _ => {
                    return Err(Error::new(ErrorKind::PeerGone, START, "the master ended at once")
                        .with("address", self.address)
                        .remedy("its log says why; keep it with the log option"));
                }
            }
            if Instant::now() >= deadline {
                return Err(Error::new(ErrorKind::Timeout, START, "the master is not ready")
                    .with("address", self.address)
                    .with("waited_ms", startup.as_millis()));
            }
        }
    }

    /// Where clients reach it.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// How it ended, if it has ended by itself; that is known after a tenth of a second.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        self.status.get().copied()
    }

    /// Where it answers questions about itself.
    pub fn admin(&self) -> Admin {
        self.admin
    }

    /// One of its metrics; see [`Metrics::value`].
    pub fn metric(&self, name: &str) -> Result<f64> {
        Ok(self.admin.metrics()?.value(name))
    }

    /// Ends the process and waits until it is gone.
    pub fn stop(self) {
        drop(self);
    }
}

/// Where a master answers questions about itself: its `--metrics_port`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admin(SocketAddr);

impl Admin {
    /// Asks at this address.
    pub fn at(address: SocketAddr) -> Self {
        Self(address)
    }

    /// The address.
    pub fn address(self) -> SocketAddr {
        self.0
    }

    /// What the master counts. Blocks, for some seconds at most.
    pub fn metrics(self) -> Result<Metrics> {
        self.get("/metrics").map(Metrics)
    }

    fn get(self, path: &str) -> Result<String> {
        let failed = |e| Error::io(ASK, e).with("admin", self.0);
        let second = Duration::from_secs(1);
        let mut stream = TcpStream::connect_timeout(&self.0, second).map_err(failed)?;
        stream.set_read_timeout(Some(second * 5)).map_err(failed)?;
        stream.set_write_timeout(Some(second)).map_err(failed)?;
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).map_err(failed)?;
        let mut answer = Vec::new();
        stream.take(MAX_ANSWER).read_to_end(&mut answer).map_err(failed)?;
        let text = String::from_utf8_lossy(&answer).into_owned();
        if !text.starts_with("HTTP/1.1 200") {
            return Err(Error::new(ErrorKind::Protocol, ASK, "not answered well")
                .with("admin", self.0)
                .with("path", path));
        }
        Ok(text)
    }
}

/// What a master counted at one moment, in Prometheus' text form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metrics(String);

impl Metrics {
    /// One metric, summed over its labels; 0 if there is none of that name.
    pub fn value(&self, name: &str) -> f64 {
        let value = |line: &str| {
            let rest = line.strip_prefix(name)?;
            if !rest.starts_with([' ', '{']) {
                return None;
            }
            rest.rsplit_once(' ')?.1.parse::<f64>().ok()
        };
        self.0.lines().filter_map(value).sum()
    }
}

impl Drop for ManagedMaster {
    fn drop(&mut self) {
        let _ = self.stop.try_send(()); // full or closed: it is ending already
        let _ = self.ended.recv_timeout(GRACE * 2); // closes when the process is gone
    }
}

/// Starts the process, waits for its end or for the word to end it, and leaves nothing behind.
fn keep(
    mut command: Command,
    started: &Sender<std::io::Result<u32>>,
    stop: &Receiver<()>,
    _ended: Sender<()>, // closes when this returns
    own: &OnceLock<ExitStatus>,
) {
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            drop(started.send(Err(error)));
            return;
        }
    };
    drop(started.send(Ok(child.id())));
    // Ends when told to, or when nobody is left to tell.
    while stop.recv_timeout(Duration::from_millis(100)) == Err(RecvTimeoutError::Timeout) {
        if let Ok(Some(status)) = child.try_wait() {
            tracing::warn!(%status, "mooncake_master ended by itself");
            let _ = own.set(status); // it ends once
            return;
        }
    }
    let status = end(&mut child);
    tracing::debug!(?status, "ended mooncake_master");
}

fn end(child: &mut Child) -> Option<ExitStatus> {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::TERM); // fails only if it is gone, which is waited for
    }
    let deadline = Instant::now() + GRACE;
    while Instant::now() < deadline {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        thread::sleep(Duration::from_millis(10));
    }
    drop(child.kill());
    child.wait().ok()
}

fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|e| Error::io(START, e))?;
    Ok(listener.local_addr().map_err(|e| Error::io(START, e))?.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_summed_over_labels_and_names_are_whole() {
        let text = "# HELP a b\na 2\na_total 7\nb{x=\"1\"} 3\nb{x=\"2\"} 4.5\n";
        let metrics = Metrics(text.into());
        let values = ["a", "b", "c", "a_tot"].map(|name| metrics.value(name));
        assert_eq!(values, [2.0, 7.5, 0.0, 0.0]);
    }

    #[test]
    fn a_program_that_is_missing_or_ends_is_reported() {
        let error = ManagedMaster::start(&MasterOptions::new("/nonexistent/master")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        let error = ManagedMaster::start(&MasterOptions::new("/bin/false")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}");
    }

    #[test]
    fn a_log_that_is_a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (log, target) = (dir.path().join("log"), dir.path().join("target"));
        std::os::unix::fs::symlink(&target, &log).unwrap();
        let options = MasterOptions::new("/bin/false").log(&log);
        let error = ManagedMaster::start(&options).unwrap_err();
        assert_eq!(error.context("log"), log.to_str(), "{error}");
        assert!(!target.exists());
    }

    #[test]
    fn a_program_that_never_serves_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("master");
        let pid_file = dir.path().join("pid");
        let script = format!("#!/bin/sh\necho $$ > {}\nexec sleep 60\n", pid_file.display());
        std::fs::write(&program, script).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&program, mode).unwrap();
        let mut options = MasterOptions::new(&program);
        options.startup = Duration::from_millis(500);
        let error = ManagedMaster::start(&options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let pid: i32 = std::fs::read_to_string(&pid_file).unwrap().trim().parse().unwrap();
        let gone = rustix::process::test_kill_process(Pid::from_raw(pid).unwrap());
        assert_eq!(gone, Err(rustix::io::Errno::SRCH), "it must not outlive the error");
    }
}
