//! What contradicts what, and why.

use std::collections::{BTreeMap, HashSet};

use transport_core::{Error, ErrorKind, Result};

use super::config::{Backend, Buffers, Protocol, RunConfig, ServerSection};
use crate::{
    config::{Problems, Receive, TransportChoice},
    flow::Watermarks,
    layout::Layout,
};

/// Everything that is wrong at once; what will be regretted otherwise.
pub(super) fn check(config: &RunConfig, sources: &BTreeMap<String, String>) -> Result<Vec<String>> {
    let mut problems = Problems::default();
    let mut notes = Vec::new();
    let refuse = |settings: &'static str, why: &'static str, remedy: &'static str| {
        Err::<(), _>(
            Error::new(ErrorKind::ConfigInvalid, "check configuration", why)
                .with("settings", settings)
                .remedy(remedy),
        )
    };
    let transport = &config.transport;
    let mooncake = matches!(transport.backend, Backend::Mooncake | Backend::MooncakeGpuDirect);
    let nvlink = matches!(transport.protocol, Some(Protocol::Nvlink | Protocol::NvlinkIntra));

    let run = &config.run;
    problems.note(Layout::new(run.strategy, run.hidden, run.layers.clone()));
    let is_name = |c: char| c != '/' && !c.is_control();
    if run.id.is_empty() || !run.id.chars().all(is_name) {
        problems.note(
            refuse(
                "run.id",
                "it names files and objects, and is empty or has a slash or control characters",
                "write a plain name, such as draft-1",
            )
            .map_err(|e| e.with("found", format_args!("{:?}", run.id))),
        );
    }
    if !(1..=WIDEST).contains(&run.hidden) {
        problems.note(
            refuse(
                "run.hidden",
                "no capture server takes that width of a hidden state",
                "give the width of one layer, from 1 to 1048576",
            )
            .map_err(|e| e.with("found", run.hidden)),
        );
    }
    if run.max_length == 0 {
        problems.note(refuse("run.max_length", "prompts have no tokens", "give at least 1"));
    }
    match transport.protocol {
        None if mooncake => {
            problems.note(refuse(
                "transport.protocol",
                "Mooncake would choose a protocol by itself",
                "name it: rdma, nvlink, nvlink_intra or tcp",
            ));
        }
        Some(_) if !mooncake => {
            problems.note(refuse(
                "transport.protocol, transport.backend",
                "the backend moves bytes by itself and takes no protocol",
                "leave transport.protocol out, or choose a mooncake backend",
            ));
        }
        Some(Protocol::Tcp) if transport.backend == Backend::MooncakeGpuDirect => {
            problems.note(refuse(
                "transport.protocol, transport.backend",
                "device memory cannot be read over sockets",
                "choose rdma, nvlink or nvlink_intra",
            ));
        }
        _ => {}
    }
    if nvlink && transport.gpu_put == Some(false) {
        problems.note(refuse(
            "transport.gpu_put (SGLANG_SPEC_CAPTURE_GPU_PUT=0), transport.protocol",
            "it conflicts with nvlink, which always publishes from device memory",
            "unset SGLANG_SPEC_CAPTURE_GPU_PUT",
        ));
    }
    if transport.gpu_put == Some(true)
        && !matches!(transport.protocol, Some(Protocol::Rdma))
        && !nvlink
    {
        problems.note(refuse(
            "transport.gpu_put (SGLANG_SPEC_CAPTURE_GPU_PUT=1), transport.protocol",
            "publishing from device memory requires MOONCAKE_PROTOCOL=rdma",
            "choose rdma, or unset SGLANG_SPEC_CAPTURE_GPU_PUT",
        ));
    }
    let arena = !(mooncake && transport.backend == Backend::Mooncake && !nvlink);
    if arena && transport.arena.is_none() {
        problems.note(refuse(
            "transport.arena",
            "the size of the servers' arenas is not given, and memory is never taken by a guess",
            "set transport.arena or SGLANG_SPEC_CAPTURE_ARENA_BYTES, such as 32GiB",
        ));
    }
    if nvlink && transport.receive_buffers != Some(Buffers::Cuda) {
        problems.note(refuse(
            "transport.receive_buffers, transport.protocol",
            "nvlink cannot write into host memory",
            "set receive_buffers=cuda: transport.receive_buffers = \"cuda\"",
        ));
    }
    let by_shm = |receive: Receive| receive.refusal(TransportChoice::Shm);
    if transport.backend == Backend::Shm
        && let Some((why, remedy)) = transport.receive().and_then(by_shm)
    {
        problems.note(refuse("transport.receive_buffers, transport.backend", why, remedy));
    }
    if transport.protocol == Some(Protocol::Nvlink) && !transport.force_mnnvl {
        problems.note(refuse(
            "transport.force_mnnvl (MC_FORCE_MNNVL)",
            "on hosts with RDMA devices Mooncake would choose those instead of NVLink",
            "set MC_FORCE_MNNVL=1, or transport.force_mnnvl = true",
        ));
    }
    if transport.protocol == Some(Protocol::Rdma) && transport.force_mnnvl {
        problems.note(refuse(
            "transport.force_mnnvl, transport.protocol",
            "MC_FORCE_MNNVL would replace rdma by NVLink",
            "unset MC_FORCE_MNNVL, or choose nvlink",
        ));
    }
    if transport.backend == Backend::Mooncake && !nvlink && config.mooncake.master.is_none() {
        problems.note(refuse(
            "mooncake.master (MOONCAKE_MASTER_SERVER_ADDR)",
            "the store has no master",
            "give the address of mooncake_master",
        ));
    }

    let (producer, trainer) = (&config.producer, &config.trainer);
    let bytes = |size: Option<super::Size>| size.map(|size| size.0.get());
    let mut marks =
        Watermarks::new(producer.high_watermark, producer.low_watermark, trainer.quantum());
    marks.high_bytes = bytes(producer.high_watermark_bytes);
    marks.low_bytes = bytes(producer.low_watermark_bytes);
    problems.note(marks.check());
    match (bytes(producer.max_resident_bytes), marks.high_bytes) {
        (Some(cap), Some(high)) if cap < high => {
            problems.note(refuse(
                "producer.max_resident_bytes, producer.high_watermark_bytes",
                "the hard cap is under the high mark, so the run would fail instead of pausing",
                "raise the cap or lower the mark",
            ));
        }
        _ => {}
    }
    if producer.lease == 0 || producer.concurrency == 0 {
        problems.note(refuse(
            "producer.lease, producer.concurrency",
            "nothing would ever be sent",
            "give at least 1",
        ));
    }
    if config.server.is_empty() {
        problems.note(refuse("server", "there is no capture server", "add a [[server]] table"));
    }
    match leader(&config.trainer.leader) {
        None => problems.note(
            refuse(
                "trainer.leader",
                "not an address that ranks can reach",
                "write HOST:PORT of rank 0, such as 127.0.0.1:29600",
            )
            .map_err(|e| e.with("found", format_args!("{:?}", config.trainer.leader))),
        ),
        Some((host, port)) => problems.note(
            match config.server.iter().any(|server| {
                server.host == host && [server.port, server.control_port].contains(&port)
            }) {
                true => refuse(
                    "trainer.leader, server",
                    "a capture server has that port",
                    "give each its own",
                ),
                false => Ok(()),
            },
        ),
    };
    let mut ports = HashSet::new();
    for server in &config.server {
        if server.port == 0 {
            problems.note(refuse(
                "server.port",
                "the producer has to know it, and the system would choose another each time",
                "give a port",
            ));
        }
        for name in server.env.keys().filter(|name| !is_variable(name)) {
            problems.note(
                refuse(
                    "server.env",
                    "not a name that shells take for a variable",
                    "use letters, digits and _, and no digit first",
                )
                .map_err(|e| e.with("found", format_args!("{name:?}"))),
            );
        }
        for (name, value) in &server.env {
            if value.contains('\0') {
                problems.note(
                    refuse("server.env", "a value has a zero byte", "leave it out")
                        .map_err(|e| e.with("name", format_args!("{name:?}"))),
                );
            }
        }
        for port in [server.port, server.control_port] {
            if port != 0 && !ports.insert((&server.host, port)) {
                problems.note(
                    refuse(
                        "server.port, server.control_port",
                        "a port is used twice on a host",
                        "give each its own",
                    )
                    .map_err(|e| e.with("host", &server.host).with("port", port)),
                );
            }
        }
        problems.note(transport_core::check_host(&server.host).map_err(|why| {
            Error::new(ErrorKind::ConfigInvalid, "check configuration", why)
                .with("settings", "server.host")
                .with("found", format_args!("{:?}", server.host))
        }));
    }
    if sources.get("transport.arena").is_some_and(|s| s.contains("NVLINK_ARENA_BYTES")) {
        notes.push(
            "SGLANG_SPEC_CAPTURE_NVLINK_ARENA_BYTES is the older name of \
             SGLANG_SPEC_CAPTURE_ARENA_BYTES"
                .into(),
        );
    }
    let ours = matches!(transport.backend, Backend::Shm | Backend::Tcp);
    for server in config.server.iter().filter(|server| ours && !server.host.is_empty()) {
        if server.address().is_none() {
            problems.note(
                refuse(
                    "server.host",
                    "a capture server listens at an address, and the name may mean another one \
                     where it runs",
                    "write the IP address of the server's own host; a trainer that knows it by \
                     name can be told so with extra_args = [\"--advertise=NAME\"]",
                )
                .map_err(|e| e.with("found", format_args!("{:?}", server.host))),
            );
        }
    }
    if transport.gpu_put == Some(false) && transport.protocol == Some(Protocol::Rdma) {
        notes.push(
            "SGLANG_SPEC_CAPTURE_GPU_PUT=0: captures go through CPU staging before they are \
             published"
                .into(),
        );
    }
    for server in config.server.iter().filter(|server| ours && is_reachable(server)) {
        if !server.env.contains_key("FEATURESTORE_TOKEN") {
            notes.push(format!(
                "server.host {} is not loopback: its capture server wants FEATURESTORE_TOKEN, and \
                 so do its trainers",
                server.host
            ));
        }
    }
    if marks.high_samples < marks.quantum.saturating_mul(6) {
        notes.push(format!(
            "producer.high_watermark is under 6 times the quantum of {}: the producer will pause \
             often",
            marks.quantum
        ));
    }
    if transport.backend == Backend::Mooncake && config.mooncake.lease_ttl_ms < 10_000 {
        notes.push("mooncake.lease_ttl_ms under 10000 expires under several ranks".into());
    }
    if let (Some(arena), Ok(layout)) =
        (transport.arena, Layout::new(run.strategy, run.hidden, run.layers.clone()))
    {
        let arenas = arena.0.get().saturating_mul(config.server.len() as u64);
        let window = layout.bytes(run.max_length).saturating_mul(marks.quantum);
        let shortest = layout.bytes(1);
        for (settings, size) in [
            ("transport.arena", Some(arena.0.get())),
            ("producer.max_resident_bytes", bytes(producer.max_resident_bytes)),
        ] {
            if size.is_some_and(|size| size < shortest) {
                problems.note(
                    refuse(settings, "not even a prompt of one token fits", "give more")
                        .map_err(|e| e.with("bytes_of_one_token", shortest)),
                );
            }
        }
        if window > arenas {
            notes.push(format!(
                "one optimizer step of longest prompts takes {window} bytes, and all arenas \
                 together have {arenas}"
            ));
        }
    }
    problems.settle("check configuration")?;
    Ok(notes)
}

/// Whether other hosts may reach the server.
fn is_reachable(server: &ServerSection) -> bool {
    server.address().is_some_and(|ip| !ip.to_canonical().is_loopback())
}

/// Widest hidden state that a capture server takes.
const WIDEST: u64 = 1 << 20;

/// Host and port that ranks connect to.
fn leader(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|v6| v6.strip_suffix(']')).unwrap_or(host);
    let port = port.parse().ok().filter(|&port| port != 0)?;
    transport_core::check_host(host).is_ok().then_some((host, port))
}

/// Whether a shell takes `name` for a variable's.
fn is_variable(name: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    name.starts_with(|c: char| word(c) && !c.is_ascii_digit()) && name.chars().all(word)
}
