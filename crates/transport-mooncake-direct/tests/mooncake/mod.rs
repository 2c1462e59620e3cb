//! Processes of Mooncake's own, both generations of the released wheel.
#![allow(dead_code, unreachable_pub)] // each test binary uses its part

use std::{
    io::{BufRead, BufReader, Read, Seek, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc,
    time::Duration,
};

use serde_json::{Value, json};

#[path = "../../../mooncake-sys/tests/support/mod.rs"]
pub mod wheel;

/// Longest answer of a peer; Mooncake's own bound on a transfer is 30 s.
const PATIENCE: Duration = Duration::from_secs(60);

/// A generation of the wheel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Wheel {
    /// 0.3.13.
    Pinned,
    /// 0.3.14.
    Next,
}

impl Wheel {
    fn environment(self) -> PathBuf {
        match self {
            Self::Pinned => wheel::environment(),
            Self::Next => std::env::var_os("FEATURESTORE_MOONCAKE_NEXT_VENV").map_or_else(
                || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/mooncake-next-venv"),
                PathBuf::from,
            ),
        }
    }
}

/// Defines each test once for each generation of the wheel.
#[macro_export]
macro_rules! with_both_wheels {
    ($($test:ident),* $(,)?) => {
        mod pinned { $(
            #[test]
            #[ignore = "needs a Mooncake venv: cargo xtask mooncake-venv"]
            fn $test() { super::$test($crate::mooncake::Wheel::Pinned) }
        )* }
        mod next { $(
            #[test]
            #[ignore = "needs a Mooncake venv and FEATURESTORE_MOONCAKE_NEXT_VENV, one of the next \
                        generation: cargo xtask mooncake-venv"]
            fn $test() { super::$test($crate::mooncake::Wheel::Next) }
        )* }
    };
}

/// A process that runs `peer.py`. Ended when dropped.
pub struct Peer {
    child: Child,
    input: Option<ChildStdin>,
    lines: mpsc::Receiver<String>,
    log: std::fs::File,
    session: String,
    _stub: tempfile::TempDir,
}

impl Peer {
    /// A peer on loopback whose `protocol` argument is `tcp`.
    pub fn start(wheel: Wheel) -> Self {
        Self::start_as(wheel, "127.0.0.1", "tcp", &[])
    }

    pub fn start_as(
        wheel: Wheel,
        host: &str,
        protocol: &str,
        variables: &[(&str, String)],
    ) -> Self {
        let start = |_| Self::try_start_as(wheel, host, protocol, variables);
        (0..3).find_map(start).expect("Mooncake starts: see its log")
    }

    /// None if Mooncake finds no free ports, which it chooses at random.
    pub fn try_start_as(
        wheel: Wheel,
        host: &str,
        protocol: &str,
        variables: &[(&str, String)],
    ) -> Option<Self> {
        let venv = wheel.environment();
        let stub = tempfile::tempdir().unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mooncake/peer.py");
        let mut log = tempfile::tempfile().unwrap();
        let mut command = Command::new(venv.join("bin/python"));
        command.arg(script).args([host, protocol]);
        command.env("MC_TCP_BIND_ADDRESS", host.trim_matches(['[', ']'])).env("MC_FORCE_TCP", "1");
        if wheel == Wheel::Next {
            command.env("LD_LIBRARY_PATH", cuda(&venv, stub.path()));
        }
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log.try_clone().unwrap());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            // Ends with the process, or with the peer.
            for line in output.lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        let input = child.stdin.take();
        log.rewind().unwrap();
        let mut peer = Self { child, input, lines, log, session: String::new(), _stub: stub };
        let first = peer.answer();
        peer.session = first["session"].as_str().unwrap().to_owned();
        if first["code"] != 0 {
            eprintln!("Mooncake does not start: {}", peer.log_tail());
            return None;
        }
        Some(peer)
    }

    /// `host:port`, as Mooncake's users write it.
    pub fn session(&self) -> &str {
        &self.session
    }

    pub fn ask(&mut self, request: Value) -> Value {
        let line = request.to_string() + "\n";
        self.input.as_mut().unwrap().write_all(line.as_bytes()).unwrap();
        self.answer()
    }

    fn answer(&mut self) -> Value {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => serde_json::from_str(&line).unwrap(),
            Err(why) => panic!("no answer ({why}); its log ends:\n{}", self.log_tail()),
        }
    }

    fn log_tail(&mut self) -> String {
        let mut log = String::new();
        let _ = self.log.rewind();
        let _ = self.log.read_to_string(&mut log);
        let start = log.len().saturating_sub(3000);
        let start = (start..log.len()).find(|&at| log.is_char_boundary(at)).unwrap_or(0);
        log.split_off(start)
    }

    /// Registers `bytes` bytes of the tests' pattern and returns where they are.
    pub fn register(&mut self, bytes: u64, salt: u8) -> u64 {
        self.register_at(bytes, salt, None)
    }

    pub fn register_at(&mut self, bytes: u64, salt: u8, at: Option<u64>) -> u64 {
        let answer = self.ask(json!({"do": "register", "size": bytes, "salt": salt, "at": at}));
        assert_eq!(answer["code"], 0, "{answer}");
        answer["address"].as_u64().unwrap()
    }

    /// Ends it as nothing else does.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where the loader finds what a CUDA build needs: the pip package's runtime, and a driver without
/// devices where the machine has none.
fn cuda(venv: &Path, stub: &Path) -> std::ffi::OsString {
    let runtime = std::fs::read_dir(venv.join("lib"))
        .unwrap()
        .map(|entry| entry.unwrap().path().join("site-packages/nvidia/cu13/lib"))
        .find(|path| path.join("libcudart.so.13").exists())
        .expect("nvidia-cuda-runtime is installed in the venv");
    // SAFETY: asks the loader whether it knows a driver, whose initialisers may run.
    if unsafe { libloading::Library::new("libcuda.so.1") }.is_ok() {
        return runtime.into();
    }
    wheel::stub_cuda(stub);
    std::env::join_paths([stub, &runtime]).unwrap()
}
