//! What a process knows of itself, and how it talks to people.

use std::{fmt, io::Write};

/// Writes a line to standard error. Where that is full or closed nobody reads it, and the work goes
/// on: unlike `eprintln!`, this does not panic.
pub(crate) fn note(line: impl fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Largest resident set of this process so far, in bytes; 0 where the system does not say.
pub(crate) fn peak_rss_bytes() -> u64 {
    std::fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| {
            let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
            line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()
        })
        .map_or(0, |kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_process_has_some_memory() {
        assert!(super::peak_rss_bytes() > 100_000);
    }
}
