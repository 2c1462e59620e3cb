//! What each role is started with: command lines and environments.

use std::{collections::BTreeMap, fmt::Write, net::SocketAddr};

use serde::Serialize;

use super::config::{Backend, Protocol, RunConfig, ServerSection};

/// How a plan is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// One object.
    Json,
    /// Lines to paste into a shell.
    Shell,
}

/// One process to start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Role {
    /// What it is, such as `server-0` or `trainer`.
    pub name: String,
    /// Where it runs; `localhost` if nothing says otherwise.
    pub host: String,
    /// Roles of a smaller phase must run first; stop them in reverse.
    pub phase: u8,
    /// Command line; empty if the file does not say.
    pub argv: Vec<String>,
    /// Environment.
    pub env: BTreeMap<String, String>,
}

/// Every process of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LaunchPlan {
    /// In the order of starting.
    pub roles: Vec<Role>,
}

/// Tokens that a capture server needs beyond the longest prompt.
const HEADROOM: u64 = 7;

impl LaunchPlan {
    pub(super) fn new(config: &RunConfig) -> Self {
        let mut roles = Vec::new();
        if config.transport.backend == Backend::Mooncake && !nvlink(config) {
            roles.push(master(config));
        }
        for (index, server) in config.server.iter().enumerate() {
            roles.push(capture_server(config, index, server));
        }
        let shared = clients(config);
        let mut producer = shared.clone();
        producer.insert("CUDA_VISIBLE_DEVICES".into(), String::new()); // it never touches a device
        producer.insert(
            "DISAGG_IN_FLIGHT_HIGH_WATERMARK".into(),
            config.producer.high_watermark.to_string(),
        );
        producer.insert(
            "DISAGG_IN_FLIGHT_LOW_WATERMARK".into(),
            config.producer.low_watermark.to_string(),
        );
        for (name, size) in [
            ("DISAGG_RESIDENT_HIGH_WATERMARK_BYTES", config.producer.high_watermark_bytes),
            ("DISAGG_RESIDENT_LOW_WATERMARK_BYTES", config.producer.low_watermark_bytes),
        ] {
            if let Some(size) = size {
                producer.insert(name.into(), size.0.get().to_string());
            }
        }
        roles.push(Role {
            name: "producer".into(),
            host: "localhost".into(),
            phase: 2,
            argv: config.producer.command.clone(),
            env: producer,
        });
        for rank in 0..config.trainer.ranks {
            let mut env = shared.clone();
            env.insert("RANK".into(), rank.to_string());
            env.insert("WORLD_SIZE".into(), config.trainer.ranks.to_string());
            env.insert("FEATURESTORE_LEADER".into(), config.trainer.leader.clone());
            env.insert("DISAGG_ASYNC_ACK".into(), u8::from(config.trainer.async_ack).to_string());
            env.insert("LOADER_PREFETCH".into(), config.trainer.prefetch.to_string());
            if let Some(receive) = config.transport.receive() {
                env.insert("FEATURESTORE_RECEIVE".into(), receive.name().into());
            }
            roles.push(Role {
                name: format!("trainer-{rank}"),
                host: "localhost".into(),
                phase: 2,
                argv: config.trainer.command.clone(),
                env,
            });
        }
        Self { roles }
    }

    /// The plan as text in `format`.
    pub fn render(&self, format: Format) -> String {
        let mut out = String::new();
        match format {
            Format::Json => {
                out = serde_json::to_string_pretty(self).expect("plain data");
                out.push('\n');
            }
            Format::Text => {
                for role in &self.roles {
                    let _ = writeln!(out, "{} on {} (phase {})", role.name, role.host, role.phase);
                    for (name, value) in &role.env {
                        let _ = writeln!(out, "    {name}={value}");
                    }
                    let command = if role.argv.is_empty() {
                        "(your own command, with this environment)".into()
                    } else {
                        role.argv.join(" ")
                    };
                    let _ = writeln!(out, "  $ {command}");
                }
            }
            Format::Shell => {
                for role in &self.roles {
                    let _ = writeln!(out, "# {} on {}, phase {}", role.name, role.host, role.phase);
                    out.push_str("env");
                    for (name, value) in &role.env {
                        let _ = write!(out, " {name}={}", quoted(value));
                    }
                    for argument in &role.argv {
                        let _ = write!(out, " {}", quoted(argument));
                    }
                    out.push('\n');
                }
            }
        }
        out
    }
}

/// One word for a POSIX shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

fn nvlink(config: &RunConfig) -> bool {
    matches!(config.transport.protocol, Some(Protocol::Nvlink | Protocol::NvlinkIntra))
}

fn master(config: &RunConfig) -> Role {
    let address = config.mooncake.master.clone().unwrap_or_default();
    let (host, port) = address.rsplit_once(':').unwrap_or((&address, "50051"));
    let ttl = format!("--default_kv_lease_ttl={}", config.mooncake.lease_ttl_ms);
    Role {
        name: "mooncake-master".into(),
        host: host.to_owned(),
        phase: 0,
        argv: vec!["mooncake_master".into(), format!("--port={port}"), ttl],
        env: BTreeMap::new(),
    }
}

fn capture_server(config: &RunConfig, index: usize, server: &ServerSection) -> Role {
    let (run, transport) = (&config.run, &config.transport);
    let layers = run.layers.iter().map(ToString::to_string);
    let size = transport.arena.map(|size| size.0.get().to_string());
    let mut env = BTreeMap::new();
    let mut argv: Vec<String>;
    if matches!(transport.backend, Backend::Shm | Backend::Tcp) {
        let ip = server.address().expect("checked before");
        let at = |port| SocketAddr::new(ip, port);
        let shared = if transport.backend == Backend::Shm { "shared" } else { "heap" };
        argv = vec!["featurestore".into(), "capture-server".into()];
        argv.extend([
            format!("--arena={}", size.unwrap_or_default()),
            format!("--arena-kind={shared}"),
            format!("--http={}", at(server.port)),
            format!("--data={}", at(0)),
            format!("--control={}", at(server.control_port)),
            format!("--hidden={}", run.hidden),
            format!("--taps={}", layers.collect::<Vec<_>>().join(",")),
        ]);
    } else {
        argv = ["python", "-m", "sglang.launch_server", "--model-path", &*run.model]
            .map(str::to_owned)
            .to_vec();
        argv.extend(["--host".into(), server.host.clone()]);
        argv.extend(["--port".into(), server.port.to_string()]);
        argv.extend(["--skip-tokenizer-init".into(), "--tp-size".into()]);
        argv.push(server.gpus.len().max(1).to_string());
        argv.extend(["--chunked-prefill-size".into(), "-1".into()]);
        argv.extend(["--context-length".into(), (run.max_length + HEADROOM).to_string()]);
        argv.extend(["--enable-spec-capture".into(), "--spec-capture-method".into()]);
        argv.push(run.strategy.capture_method().into());
        argv.push("--spec-capture-aux-layer-ids".into());
        argv.extend(layers);
        env = mooncake(config);
        if let Some(size) = size {
            env.insert("SGLANG_SPEC_CAPTURE_ARENA_BYTES".into(), size);
            env.insert("SGLANG_SPEC_CAPTURE_CONTROL_PORT".into(), server.control_port.to_string());
        }
        if let Some(gpu_put) = transport.gpu_put {
            env.insert("SGLANG_SPEC_CAPTURE_GPU_PUT".into(), u8::from(gpu_put).to_string());
        }
        env.insert(
            "MOONCAKE_GLOBAL_SEGMENT_SIZE".into(),
            config.mooncake.segment_size.0.get().to_string(),
        );
    }
    if !server.gpus.is_empty() {
        let gpus: Vec<String> = server.gpus.iter().map(ToString::to_string).collect();
        env.insert("CUDA_VISIBLE_DEVICES".into(), gpus.join(","));
    }
    argv.extend(server.extra_args.iter().cloned());
    env.extend(server.env.clone());
    Role { name: format!("server-{index}"), host: server.host.clone(), phase: 1, argv, env }
}

/// What producer and trainers share.
fn clients(config: &RunConfig) -> BTreeMap<String, String> {
    let run = &config.run;
    let mut env = mooncake(config);
    let url = |server: &ServerSection| {
        let host = &server.host;
        // An address with colons needs brackets before a port.
        let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
        format!("http://{host}:{}", server.port)
    };
    let urls: Vec<String> = config.server.iter().map(url).collect();
    env.insert("DISAGG_BACKEND".into(), config.transport.backend.name().into());
    env.insert("DISAGG_STORE_ID".into(), run.store_id.clone().unwrap_or_else(|| run.id.clone()));
    env.insert(
        "DISAGG_REF_CHANNEL".into(),
        run.control_dir.join("refs.jsonl").display().to_string(),
    );
    env.insert("DISAGG_DB".into(), run.control_dir.join("ledger.db").display().to_string());
    env.insert("DISAGG_SERVER_URLS".into(), urls.join(","));
    if !env.contains_key("MOONCAKE_PROTOCOL") {
        return env;
    }
    // Capture servers own all object memory.
    env.insert("DISAGG_CLIENT_SEGMENT_SIZE".into(), "0".into());
    env
}

fn mooncake(config: &RunConfig) -> BTreeMap<String, String> {
    let mut env = BTreeMap::new();
    let Some(protocol) = config.transport.protocol else { return env };
    let settings = &config.mooncake;
    env.insert("MOONCAKE_PROTOCOL".into(), protocol.name().into());
    env.insert("MOONCAKE_RDMA_DEVICES".into(), settings.rdma_devices.clone());
    env.insert("MOONCAKE_LOCAL_BUFFER_SIZE".into(), settings.local_buffer_size.0.get().to_string());
    for (name, value) in [
        ("MOONCAKE_MASTER_SERVER_ADDR", &settings.master),
        ("MOONCAKE_METADATA_SERVER", &settings.metadata_server),
        ("MOONCAKE_LOCAL_HOSTNAME", &settings.local_hostname),
    ] {
        if let Some(value) = value {
            env.insert(name.into(), value.clone());
        }
    }
    match protocol {
        Protocol::Nvlink => {
            env.insert("MC_FORCE_MNNVL".into(), "1".into());
        }
        Protocol::NvlinkIntra => {
            // One name selects the transport, the other is the documented one.
            env.insert("MC_INTRANODE_NVLINK".into(), "1".into());
            env.insert("MC_INTRA_NVLINK".into(), "1".into());
        }
        Protocol::Rdma => {
            env.insert("MC_FORCE_HCA".into(), "1".into()); // rather fail than come up on tcp
        }
        Protocol::Tcp => {}
    }
    env
}
