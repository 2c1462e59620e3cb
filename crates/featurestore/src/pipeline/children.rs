//! The processes that the pipeline starts. Each ends with its guard, and with this process.

use std::{
    os::unix::process::ExitStatusExt,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::{error::Elapsed, timeout},
};
use transport_core::{ClientId, Error, ErrorKind, Result};

use super::{
    Options,
    folder::ControlFolder,
    messages::{Event, Start},
    plan::Plan,
    report::ServerReport,
};
use crate::{
    choose::Choice,
    config::{MooncakeConfig, TransportChoice},
    process::at_rest,
};

/// How long a process may take to get ready.
const START: Duration = Duration::from_secs(30);
/// The same for each GiB of memory that it takes before.
const START_PER_GIB: Duration = Duration::from_secs(4);
/// How long a process may take to end after it was asked to.
const STOP: Duration = Duration::from_secs(15);

/// Pause between two looks at what is waited for.
pub(super) const LOOK: Duration = Duration::from_millis(100);

/// SIGKILL, which is also what the system sends where memory is short.
const KILLED: i32 = 9;

/// Address of a server's listeners.
const ANY_PORT: &str = "127.0.0.1:0";

fn command(options: &Options, mooncake: &MooncakeConfig, subcommand: &str) -> Result<Command> {
    let binary = std::env::current_exe().map_err(|e| Error::io("start process", e))?;
    let mut command = Command::new(binary);
    command
        .arg(subcommand)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        // An interrupt at the terminal is for this process, which then says what it ends.
        .process_group(0)
        // Two malloc arenas are plenty for a few threads, and keep the resident set near the pool.
        .env("MALLOC_ARENA_MAX", "2");
    if let Some(config) = &options.config {
        command.arg("--config").arg(config);
    }
    // Above whatever that file says.
    command.env("FEATURESTORE_TRANSPORT", options.transport.name());
    command.env("FEATURESTORE_RECEIVE", options.receive.name());
    if matches!(options.transport, TransportChoice::Store | TransportChoice::Mooncake) {
        command.envs(mooncake.variables());
        #[cfg(feature = "store")]
        command.envs(crate::mooncake::environment(mooncake));
    }
    Ok(command)
}

/// Waits for `future` until it has been looked for as often as fits into `limit`, and once more. So
/// the time during which this process was stopped itself does not count, and what came meanwhile is
/// seen.
///
/// # Errors
/// If it has not come.
async fn within<F: Future>(limit: Duration, future: F) -> std::result::Result<F::Output, Elapsed> {
    let mut future = std::pin::pin!(future);
    let mut waited = Duration::ZERO;
    loop {
        match timeout(LOOK, &mut future).await {
            Err(_) if waited < limit => waited += LOOK,
            done => return done,
        }
    }
}

fn lost(what: &str, why: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::PeerGone, "run pipeline", format!("{what} {why}"))
}

/// The error for a process that has not done something in time.
fn late(what: &str, child: &Child, why: impl std::fmt::Display) -> Error {
    match child.id().and_then(at_rest) {
        Some(state) => lost(what, format_args!("{why}: it {state}")),
        None => lost(what, why),
    }
}

/// The error for a process that has ended, and should not have.
pub(super) fn died(what: &str, status: std::io::Result<ExitStatus>) -> Error {
    ended(what, "died", status)
}

fn ended(what: &str, how: &str, status: std::io::Result<ExitStatus>) -> Error {
    let error = match &status {
        Ok(status) => lost(what, format_args!("{how}: {status}")),
        Err(error) => lost(what, format_args!("{how}: {error}")),
    };
    match status.ok().and_then(|status| status.signal()) {
        Some(KILLED) => error.remedy(
            "if nobody killed it, the system had no memory left (dmesg tells): use less, by \
             --arena or --pool",
        ),
        Some(_) => error,
        None => error.remedy("its own message is above"),
    }
}

/// The error for a process that has closed its output before it was ready.
async fn unready(what: &str, child: &mut Child) -> Error {
    const HOW: &str = "ended before it was ready";
    match within(STOP, child.wait()).await {
        Ok(status) => ended(what, HOW, status),
        Err(_) => late(what, child, "closed its output before it was ready"),
    }
}

/// A capture server of this run.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) name: String,
    pub(super) http: String,
    pub(super) control: Option<String>,
    pub(super) arena_bytes: u64,
    pub(super) is_on_device: bool,
    registrations: u64,
    bound: Duration, // until it is ready
    child: Child,
    lines: Option<Lines<BufReader<ChildStdout>>>, // until it is ready
    _stdin: ChildStdin, // its end tells the server that this process is gone
    client: reqwest::Client,
}

impl Server {
    /// Starts the process; [`Self::ready`] waits for it.
    pub(super) fn start(
        options: &Options,
        mooncake: &MooncakeConfig,
        index: usize,
        pool: u64,
        plan: &Plan,
        folder: &ControlFolder,
    ) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // Memory that the run needs anyway is taken before it begins, as registering it would.
        let arenas = options.arena.get().saturating_mul(options.servers as u64);
        let on_host =
            options.transport != TransportChoice::Store && !options.transport.is_of_devices();
        let fills_arenas = on_host && plan.bytes() >= arenas;
        let gib = if fills_arenas { arenas >> 30 } else { 0 }; // side by side
        let bound = START + START_PER_GIB * u32::try_from(gib).unwrap_or(u32::MAX).min(900);
        let mut command = command(options, mooncake, "capture-server")?;
        command.arg("--exit-with-parent").arg("--run-folder").arg(folder.path());
        let mut flags = vec![
            ("--arena", options.arena.to_string()),
            ("--fill-threads", (cores / options.servers).max(1).to_string()),
            (
                "--max-in-flight",
                options.concurrency.saturating_mul(options.style.lease).to_string(),
            ),
            ("--seed", options.seed.to_string()),
            ("--http", ANY_PORT.into()), // several servers cannot share configured ports
        ];
        if options.transport == TransportChoice::Store {
            flags.push(("--pool", pool.to_string()));
        } else {
            flags.extend([("--data", ANY_PORT.into()), ("--control", ANY_PORT.into())]);
        }
        if options.transport == TransportChoice::Auto || options.transport.is_of_devices() {
            flags.push(("--device", options.server_device(index).to_string()));
        }
        if fills_arenas {
            flags.push(("--populate", "true".into()));
        }
        if options.input.is_none() {
            let taps: Vec<String> = options.model.taps.iter().map(ToString::to_string).collect();
            flags.push(("--hidden", options.model.hidden.to_string()));
            flags.push(("--taps", taps.join(",")));
        }
        for (flag, value) in flags {
            command.arg(format!("{flag}={value}")); // a value may begin with a dash
        }
        if let Some(rate) = options.server_rate {
            // As inference takes its time: by the tokens.
            let mean_tokens = plan.tokens() as f64 / plan.len() as f64;
            let rate = rate * mean_tokens / options.servers as f64;
            command.arg(format!("--token-rate={rate}"));
        }
        if let Some(input) = &options.input {
            let mut flag = std::ffi::OsString::from("--input=");
            flag.push(input);
            command.arg(flag);
        }
        let mut child = command.spawn().map_err(|e| Error::io("start capture server", e))?;
        let name = format!("capture server {index} (pid {})", child.id().unwrap_or(0));
        let stdin = child.stdin.take().expect("piped");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        Ok(Self {
            name,
            http: String::new(),
            control: None,
            arena_bytes: 0,
            is_on_device: false,
            registrations: 0,
            bound,
            child,
            lines: Some(lines),
            _stdin: stdin,
            client: reqwest::Client::new(),
        })
    }

    /// Waits until the server can be reached.
    pub(super) async fn ready(&mut self) -> Result<()> {
        let mut lines = self.lines.take().expect("ready is waited for once");
        let bound = self.bound;
        let line = match within(bound, lines.next_line()).await {
            Ok(Ok(Some(line))) => line,
            Ok(_) => return Err(unready(&self.name, &mut self.child).await),
            Err(_) => {
                let why = format_args!("was not ready within {bound:?}");
                return Err(late(&self.name, &self.child, why));
            }
        };
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        let ready: Value = serde_json::from_str(&line)
            .map_err(|e| lost(&self.name, "printed no ready line").source(e))?;
        self.http = ready["http"].as_str().unwrap_or_default().to_owned();
        self.control = ready["control"].as_str().map(str::to_owned);
        self.arena_bytes = ready["arena_bytes"].as_u64().unwrap_or(0);
        self.is_on_device = ready["memory"] == "device";
        self.registrations = ready["registrations"].as_u64().unwrap_or(0);
        Ok(())
    }

    /// What the server measures of itself.
    pub(super) async fn health(&self) -> Result<ServerReport> {
        let url = format!("http://{}/health", self.http);
        let fail = |e: reqwest::Error| {
            late(&self.name, &self.child, "did not answer GET /health").source(e)
        };
        let answer = self.client.get(url).timeout(STOP).send().await.map_err(fail)?;
        let mut report: ServerReport = answer.json().await.map_err(fail)?;
        report.registrations_while_running = report.registrations - self.registrations;
        Ok(report)
    }

    /// Completes when the process ends, which it should not.
    pub(super) async fn died(&mut self) -> Error {
        died(&self.name, self.child.wait().await)
    }

    /// What keeps the process from doing anything, if the kernel says so.
    pub(super) fn at_rest(&self) -> Option<&'static str> {
        self.child.id().and_then(at_rest)
    }

    /// Asks the server to end and waits for it.
    pub(super) async fn stop(mut self) -> Result<()> {
        drop(self._stdin);
        match within(STOP, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => Err(lost(&self.name, format_args!("ended badly: {status}"))),
            Ok(Err(error)) => Err(Error::io("stop capture server", error)),
            Err(_) => {
                let why = format_args!("did not end within {STOP:?}, and is killed");
                Err(late(&self.name, &self.child, why))
            }
        }
    }
}

/// The trainer of this run.
#[derive(Debug)]
pub(super) struct Trainer {
    pub(super) name: String,
    pub(super) client: ClientId,
    pub(super) choice: Choice,
    pub(super) views: bool,
    pub(super) child: Child,
    pub(super) stdin: ChildStdin,
    pub(super) events: Events,
}

impl Trainer {
    pub(super) async fn start(
        options: &Options,
        mooncake: &MooncakeConfig,
        start: &Start,
        folder: &ControlFolder,
    ) -> Result<Self> {
        let mut child = command(options, mooncake, "trainer")?
            .arg("--folder")
            .arg(folder.path())
            .env(
                "FEATURESTORE_DEVICE",
                options.trainer_device.unwrap_or(options.device).to_string(),
            )
            .spawn()
            .map_err(|e| Error::io("start trainer", e))?;
        let name = format!("the trainer (pid {})", child.id().unwrap_or(0));
        let mut stdin = child.stdin.take().expect("piped");
        let mut events = Events(BufReader::new(child.stdout.take().expect("piped")).lines());
        let mut line = serde_json::to_vec(start).expect("plain data");
        line.push(b'\n');
        stdin.write_all(&line).await.map_err(|e| lost(&name, "is gone").source(e))?;
        let Ok(ready) = within(START, events.next()).await else {
            return Err(late(&name, &child, format_args!("was not ready within {START:?}")));
        };
        match ready? {
            Some(Event::Ready { client, choice, views }) => {
                let client = client.parse()?;
                Ok(Self { name, client, choice, views, child, stdin, events })
            }
            Some(Event::Failed { error }) => Err(lost(&name, format_args!("failed: {error}"))),
            Some(other) => Err(lost(&name, format_args!("began with {other:?}"))),
            None => Err(unready(&name, &mut child).await),
        }
    }
}

/// Events of the trainer.
#[derive(Debug)]
pub(super) struct Events(Lines<BufReader<ChildStdout>>);

impl Events {
    /// The next event; none when the trainer has closed its output.
    pub(super) async fn next(&mut self) -> Result<Option<Event>> {
        let line =
            self.0.next_line().await.map_err(|e| lost("the trainer", "is gone").source(e))?;
        line.map(|line| {
            serde_json::from_str(&line)
                .map_err(|e| lost("the trainer", format_args!("said {line:?}")).source(e))
        })
        .transpose()
    }
}

/// Waits for a child that was asked to end.
pub(super) async fn reap(child: &mut Child, what: &str) -> Result<()> {
    match within(STOP, child.wait()).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(lost(what, format_args!("ended badly: {status}"))),
        Ok(Err(error)) => Err(Error::io("stop process", error)),
        Err(_) => Err(late(what, child, format_args!("did not end within {STOP:?}"))),
    }
}
