//! Processors, memory, limits and network devices, as the kernel has them.

use std::{fs, path::Path};

use rustix::process::{Resource, getrlimit};
use serde_json::Value;

use super::{Section, fields};

/// Capability of locking any amount of memory.
const CAP_IPC_LOCK: u64 = 14;
/// Most devices of a kind that are listed.
const DEVICES: usize = 64;

pub(super) fn examine() -> Section {
    let mut section = Section::new("machine");
    section.fact("cores", std::thread::available_parallelism().map_or(1, usize::from));
    let memory = read("/proc/meminfo");
    let kib = |name: &str| number_after(&memory, name).map(|kib| kib * 1024);
    section.fact(
        "memory",
        fields([
            ("total_bytes", kib("MemTotal:").into()),
            ("available_bytes", kib("MemAvailable:").into()),
        ]),
    );
    memlock(&mut section);
    shm(&mut section);
    section.fact(
        "huge pages",
        fields([
            ("total", number_after(&memory, "HugePages_Total:").into()),
            ("free", number_after(&memory, "HugePages_Free:").into()),
            ("size_bytes", kib("Hugepagesize:").into()),
            ("transparent", chosen("/sys/kernel/mm/transparent_hugepage/enabled")),
        ]),
    );
    let files = getrlimit(Resource::Nofile).current;
    section
        .fact("open files", files)
        .advise_if(files.is_some_and(|n| n < 1024), "raise it: ulimit -n 65536");
    section.fact("network", networks(Path::new("/sys/class/net")));
    let rdma = rdma(Path::new("/sys/class/infiniband"));
    section.fact("rdma devices", rdma);
    section
}

/// How much memory may be locked, which is what registration with a network device does.
fn memlock(section: &mut Section) {
    let limit = getrlimit(Resource::Memlock).current;
    let status = read("/proc/self/status");
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let capabilities = capabilities.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    let unlimited = capabilities.is_some_and(|set| set & (1 << CAP_IPC_LOCK) != 0);
    let value = match (unlimited, limit) {
        (true, _) => Value::from("unlimited (CAP_IPC_LOCK)"),
        (false, None) => Value::from("unlimited"),
        (false, Some(bytes)) => Value::from(bytes),
    };
    let small = !unlimited && limit.is_some_and(|bytes| bytes < 1 << 30);
    section.fact("memlock", value).advise_if(
        small,
        "RDMA needs as much as is registered: raise it with ulimit -l or limits.conf",
    );
}

/// Room of the file system behind POSIX shared memory. Arenas are memory files, which it does not
/// limit; other programs beside them need it.
fn shm(section: &mut Section) {
    match rustix::fs::statvfs("/dev/shm") {
        Ok(room) => section.fact(
            "shm",
            fields([
                ("size_bytes", (room.f_blocks * room.f_frsize).into()),
                ("free_bytes", (room.f_bavail * room.f_frsize).into()),
            ]),
        ),
        Err(error) => section.fact("shm", format!("/dev/shm: {error}")),
    };
}

/// Network interfaces that are not loopback.
fn networks(folder: &Path) -> Value {
    let describe = |name: String| {
        let of = |what: &str| read(folder.join(&name).join(what)).trim().to_owned();
        let speed = of("speed").parse::<i64>().ok().filter(|mbps| *mbps > 0);
        fields([
            ("name", name.clone().into()),
            ("state", of("operstate").into()),
            ("mbps", speed.into()),
            ("mtu", of("mtu").parse::<u64>().ok().into()),
        ])
    };
    names(folder).into_iter().filter(|name| name != "lo").map(describe).collect()
}

/// RDMA devices with their ports.
fn rdma(folder: &Path) -> Value {
    let mut found = Vec::new();
    for device in names(folder) {
        let ports = folder.join(&device).join("ports");
        for port in names(&ports) {
            let of = |what: &str| read(ports.join(&port).join(what)).trim().to_owned();
            found.push(fields([
                ("device", device.clone().into()),
                ("port", port.clone().into()),
                ("state", of("state").into()),
                ("link", of("link_layer").into()),
                ("rate", of("rate").into()),
            ]));
        }
    }
    found.into()
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.flatten().filter_map(|e| e.file_name().into_string().ok()).take(DEVICES).collect();
    names.sort();
    names
}

/// The choice in brackets of a file such as `always [madvise] never`.
fn chosen(path: &str) -> Value {
    let text = read(path);
    let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    chosen.map(|(chosen, _)| chosen.to_owned()).into()
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn number_after(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_from_the_kernels_files() {
        let folder = tempfile::tempdir().unwrap();
        let port = folder.path().join("mlx5_0/ports/1");
        fs::create_dir_all(&port).unwrap();
        for (file, text) in [("state", "4: ACTIVE\n"), ("link_layer", "InfiniBand\n")] {
            fs::write(port.join(file), text).unwrap();
        }
        let found = rdma(folder.path());
        assert_eq!(found[0]["device"], "mlx5_0");
        assert_eq!((&found[0]["state"], &found[0]["rate"]), (&"4: ACTIVE".into(), &"".into()));
        for name in ["lo", "eth0"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        fs::write(folder.path().join("eth0/speed"), "-1\n").unwrap();
        fs::write(folder.path().join("eth0/mtu"), "9000\n").unwrap();
        let found = networks(folder.path());
        assert_eq!(found[0]["name"], "eth0");
        assert_eq!((&found[0]["mbps"], &found[0]["mtu"]), (&Value::Null, &9000.into()));
        assert_eq!(rdma(Path::new("/nonexistent")), Value::Array(Vec::new()));
    }

    #[test]
    fn numbers_stand_after_their_names() {
        let text = "A:  7 kB\nAB: 8\n";
        assert_eq!((number_after(text, "AB:"), number_after(text, "C:")), (Some(8), None));
    }
}
