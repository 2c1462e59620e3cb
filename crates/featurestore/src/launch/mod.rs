//! One file for a whole run: checked as a whole, and turned into what each role is started with.
//!
//! Precedence: environment, then file, then default. `featurestore config explain` prints every
//! value in force with its source.

mod check;
mod config;
mod render;
mod shape;
mod syntax;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, path::Path};

use transport_core::{Error, ErrorKind, Result};

pub use config::{
    Backend, Buffers, MooncakeSection, ProducerSection, Protocol, RunConfig, RunSection,
    ServerSection, Size, TrainerSection, TransportSection,
};
pub use render::{Format, LaunchPlan, Role};
pub use syntax::Syntax;

use crate::config::read_file;

/// A run over tcp, as a file: what has to be given, and little else.
pub const OVER_TCP: &str = include_str!("tcp.toml");
/// A run over the NVLink of one host, as a file.
pub const OVER_NVLINK: &str = include_str!("nvlink_intra.toml");

/// Environment variables that people use already, and what they set.
pub const VARIABLES: &[(&str, &str)] = &[
    ("MOONCAKE_PROTOCOL", "transport.protocol"),
    ("MOONCAKE_MASTER_SERVER_ADDR", "mooncake.master"),
    ("MOONCAKE_METADATA_SERVER", "mooncake.metadata_server"),
    ("MOONCAKE_LOCAL_HOSTNAME", "mooncake.local_hostname"),
    ("MOONCAKE_RDMA_DEVICES", "mooncake.rdma_devices"),
    ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "mooncake.segment_size"),
    ("MOONCAKE_LOCAL_BUFFER_SIZE", "mooncake.local_buffer_size"),
    ("MOONCAKE_DEFAULT_KV_LEASE_TTL", "mooncake.lease_ttl_ms"),
    ("SGLANG_SPEC_CAPTURE_ARENA_BYTES", "transport.arena"),
    ("SGLANG_SPEC_CAPTURE_NVLINK_ARENA_BYTES", "transport.arena"),
    ("SGLANG_SPEC_CAPTURE_GPU_PUT", "transport.gpu_put"),
    ("MC_FORCE_MNNVL", "transport.force_mnnvl"),
    ("DISAGG_BACKEND", "transport.backend"),
    ("DISAGG_STORE_ID", "run.store_id"),
    ("DISAGG_IN_FLIGHT_HIGH_WATERMARK", "producer.high_watermark"),
    ("DISAGG_IN_FLIGHT_LOW_WATERMARK", "producer.low_watermark"),
    ("DISAGG_RESIDENT_HIGH_WATERMARK_BYTES", "producer.high_watermark_bytes"),
    ("DISAGG_RESIDENT_LOW_WATERMARK_BYTES", "producer.low_watermark_bytes"),
    ("DISAGG_CLIENT_BUFFER_SIZE", "mooncake.local_buffer_size"),
    ("DISAGG_ASYNC_ACK", "trainer.async_ack"),
    ("LOADER_PREFETCH", "trainer.prefetch"),
];

/// A run's settings in force, checked, with where each comes from.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// The settings.
    pub config: RunConfig,
    /// What is not wrong, but will be regretted.
    pub notes: Vec<String>,
    sources: BTreeMap<String, String>,
}

impl Loaded {
    /// Reads a file, by its ending as [`Syntax`] says, and what `variable` answers for each of
    /// [`VARIABLES`], and checks it all.
    ///
    /// # Errors
    /// [`ErrorKind::ConfigInvalid`] with everything that is wrong, each with the reason.
    pub fn file(path: &Path, variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let text = read_file(path)?;
        let read = Self::text(&text, Syntax::of(path), variable);
        read.map_err(|e| e.with("file", path.display()))
    }

    /// [`Self::file`], from text.
    pub fn text(
        text: &str,
        syntax: Syntax,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self> {
        let wrong =
            |message: String| Error::new(ErrorKind::ConfigInvalid, "read configuration", message);
        let mut table = syntax.table(text)?;
        let mut sources = BTreeMap::new();
        flatten("", &table, &mut |path, _| {
            sources.insert(path, "file".to_owned());
        });
        for &(name, path) in VARIABLES {
            let Some(value) = variable(name).filter(|value| !value.trim().is_empty()) else {
                continue;
            };
            if let Some(other) = sources.get(path).filter(|s| s.starts_with("environment")) {
                return Err(wrong(format!("{path} is set twice"))
                    .with("first", other)
                    .with("second", name)
                    .remedy("unset one of them"));
            }
            set(&mut table, path, typed(path, &value).map_err(|e| e.with("variable", name))?);
            sources.insert(path.to_owned(), format!("environment {name}"));
        }
        shape::check(&table)?;
        // The second line of its message says in which setting.
        let config = RunConfig::deserialize_from(table)
            .map_err(|e| wrong(e.to_string().trim().replace('\n', " ")))?;
        let notes = check::check(&config, &sources)?;
        Ok(Self { config, notes, sources })
    }

    /// Every value in force, with its source: environment, file or default.
    pub fn explain(&self) -> Vec<(String, String, String)> {
        let Ok(toml::Value::Table(table)) = toml::Value::try_from(&self.config) else {
            return Vec::new();
        };
        let mut lines = Vec::new();
        flatten("", &table, &mut |path, value| {
            let source = self.sources.get(&path).cloned().unwrap_or_else(|| "default".into());
            lines.push((path, value.to_string(), source));
        });
        lines
    }

    /// What each role is started with.
    pub fn plan(&self) -> LaunchPlan {
        LaunchPlan::new(&self.config)
    }
}

impl RunConfig {
    fn deserialize_from(table: toml::Table) -> std::result::Result<Self, toml::de::Error> {
        table.try_into()
    }

    /// The JSON schema of the file.
    pub fn schema() -> serde_json::Value {
        schemars::schema_for!(Self).to_value()
    }
}

fn flatten(prefix: &str, table: &toml::Table, each: &mut impl FnMut(String, &toml::Value)) {
    for (name, value) in table {
        let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        match value {
            toml::Value::Table(table) => flatten(&path, table, each),
            toml::Value::Array(items)
                if items.iter().all(toml::Value::is_table) && !items.is_empty() =>
            {
                for (i, item) in items.iter().enumerate() {
                    if let toml::Value::Table(table) = item {
                        flatten(&format!("{path}[{i}]"), table, each);
                    }
                }
            }
            value => each(path, value),
        }
    }
}

fn set(table: &mut toml::Table, path: &str, value: toml::Value) {
    if let Some((section, name)) = path.split_once('.') {
        let entry = table.entry(section).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        if let toml::Value::Table(section) = entry {
            section.insert(name.to_owned(), value);
        }
    }
}

/// A variable's text as the value that its setting takes.
fn typed(path: &str, text: &str) -> Result<toml::Value> {
    let bad = |why: &'static str| {
        Error::new(ErrorKind::ConfigInvalid, "read environment", why)
            .with("setting", path)
            .with("found", format_args!("{text:?}"))
    };
    let text = text.trim();
    Ok(match path {
        "transport.gpu_put" | "transport.force_mnnvl" | "trainer.async_ack" => {
            match text.to_ascii_lowercase().as_str() {
                "1" | "true" | "yes" | "on" => true.into(),
                "0" | "false" | "no" | "off" => false.into(),
                _ => return Err(bad("neither true nor false")),
            }
        }
        "mooncake.lease_ttl_ms"
        | "producer.high_watermark"
        | "producer.low_watermark"
        | "trainer.prefetch" => {
            let number = text.parse::<u32>().map_err(|_| bad("not a number"))?;
            i64::from(number).into()
        }
        _ => text.into(),
    })
}
