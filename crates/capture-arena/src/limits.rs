//! What this machine and control group allow.

use std::{fs, path::Path};

use transport_core::{Error, Result};

/// Bytes of memory that this process could still get: the least of what the machine has available
/// and what each control group above this process leaves. `u64::MAX` where nothing says so.
pub fn available_memory() -> u64 {
    machine_available().unwrap_or(u64::MAX).min(group_available().unwrap_or(u64::MAX))
}

/// The kernel's random id of this boot: which host it is, and since when it runs.
pub fn boot_id() -> Result<String> {
    const PATH: &str = "/proc/sys/kernel/random/boot_id";
    fs::read_to_string(PATH)
        .map(|text| text.trim().to_owned())
        .map_err(|e| Error::io("read boot id", e).with("path", PATH))
}

fn machine_available() -> Option<u64> {
    parse_available(&fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn group_available() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = |prefix| groups.lines().find_map(|line| line.split_once(prefix)).map(|(_, p)| p);
    let unified = path("0::").and_then(|own| {
        group_left(
            Path::new("/sys/fs/cgroup"),
            own,
            "memory.max",
            "memory.current",
            "inactive_file",
        )
    });
    let old = path(":memory:").and_then(|own| {
        group_left(
            Path::new("/sys/fs/cgroup/memory"),
            own,
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        )
    });
    unified.into_iter().chain(old).min()
}

/// The least that any group from `own` up to the root of the mount leaves.
fn group_left(root: &Path, own: &str, limit: &str, usage: &str, cache: &str) -> Option<u64> {
    let start = root.join(own.trim_start_matches('/'));
    start
        .ancestors()
        .take_while(|group| group.starts_with(root))
        .filter_map(|group| {
            let number = |name| fs::read_to_string(group.join(name)).ok()?.trim().parse().ok();
            let limit: u64 = number(limit)?; // "max" is no number: no limit
            let used: u64 = number(usage)?;
            // Clean file pages count as used, but the kernel takes them back before it refuses.
            let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
            let clean = stat.lines().find_map(|line| {
                let (name, value) = line.split_once(' ')?;
                (name == cache).then(|| value.trim().parse::<u64>().ok()).flatten()
            });
            Some(limit.saturating_sub(used.saturating_sub(clean.unwrap_or(0))))
        })
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_in_kibibytes() {
        let text = "MemTotal:       24689764 kB\nMemAvailable:    1024 kB\n";
        assert_eq!(parse_available(text), Some(1 << 20));
        assert_eq!(parse_available("MemTotal: 1 kB\n"), None);
        assert!(available_memory() > 0);
    }

    #[test]
    fn the_tightest_control_group_counts() {
        let root = std::env::temp_dir().join(format!("fs-arena-groups-{}", std::process::id()));
        let leaf = root.join("a/b");
        fs::create_dir_all(&leaf).unwrap();
        let write = |dir: &Path, limit: &str, used: &str| {
            fs::write(dir.join("memory.max"), limit).unwrap();
            fs::write(dir.join("memory.current"), used).unwrap();
        };
        write(&leaf, "max", "10");
        write(&root.join("a"), "1000\n", "300\n");
        fs::write(root.join("a/memory.stat"), "anon 200\ninactive_file 100\n").unwrap();
        let left = || group_left(&root, "/a/b", "memory.max", "memory.current", "inactive_file");
        assert_eq!(left(), Some(800));
        write(&leaf, "50", "60");
        assert_eq!(left(), Some(0));
        fs::remove_dir_all(root).unwrap();
    }
}
