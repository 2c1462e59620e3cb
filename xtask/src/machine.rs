//! What a measurement has to say about the machine, without naming it.

use std::{fmt, fs, process::Command, thread};

use crate::process;

/// The facts that a figure means nothing without.
#[derive(Debug)]
pub(crate) struct Machine {
    cores: usize,
    cpu: String,
    memory_gib: f64,
    kernel: String,
    rustc: String,
}

impl Machine {
    /// Asks the kernel and the compiler. What cannot be found out is called unknown.
    pub(crate) fn look() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Self {
            cores: thread::available_parallelism().map_or(0, usize::from),
            cpu: cpu_model(&read("/proc/cpuinfo")),
            memory_gib: total_memory_gib(&read("/proc/meminfo")),
            kernel: or_unknown(read("/proc/sys/kernel/osrelease").trim()),
            rustc: process::output(Command::new("rustc").arg("--version"))
                .map_or_else(|_| "unknown".to_owned(), |version| or_unknown(version.trim())),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "cores:  {}", self.cores)?;
        writeln!(f, "cpu:    {}", self.cpu)?;
        writeln!(f, "memory: {:.1} GiB", self.memory_gib)?;
        writeln!(f, "kernel: {}", self.kernel)?;
        writeln!(f, "rustc:  {}", self.rustc)
    }
}

fn cpu_model(cpuinfo: &str) -> String {
    let value = |key: &str| {
        cpuinfo.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            (name.trim() == key).then(|| value.trim())
        })
    };
    // Arm kernels give numbers only.
    match (value("model name"), value("CPU implementer"), value("CPU part")) {
        (Some(model), ..) => model.to_owned(),
        (None, Some(implementer), Some(part)) => format!("implementer {implementer} part {part}"),
        _ => "unknown".to_owned(),
    }
}

fn total_memory_gib(meminfo: &str) -> f64 {
    let kib = meminfo.lines().find_map(|line| {
        line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse::<f64>().ok()
    });
    kib.unwrap_or_default() / f64::from(1 << 20)
}

fn or_unknown(text: &str) -> String {
    if text.is_empty() { "unknown".to_owned() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_is_named_on_both_architectures() {
        assert_eq!(cpu_model("processor\t: 0\nmodel name\t: A CPU @ 2 GHz\n"), "A CPU @ 2 GHz");
        let arm = "CPU implementer\t: 0x41\nCPU part\t: 0xd40\n";
        assert_eq!(cpu_model(arm), "implementer 0x41 part 0xd40");
        assert_eq!(cpu_model(""), "unknown");
    }

    #[test]
    fn memory_is_in_gib() {
        let gib = total_memory_gib("MemTotal:       25165824 kB\nMemFree: 1 kB\n");
        assert!((gib - 24.0).abs() < 1e-9);
        assert!(total_memory_gib("").abs() < 1e-9);
    }
}
