//! The one file that says what a run is made of.

use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
    str::FromStr,
};

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use transport_core::{ByteSize, Error, ErrorKind, Result};

use crate::{
    config::Receive,
    layout::Strategy,
    producer::{Batching, Routing},
};

/// A size as people write it: `32GiB`, `1.5GB`, or a number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, JsonSchema)]
#[schemars(transparent)]
pub struct Size(#[schemars(with = "String")] pub ByteSize);

impl Serialize for Size {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Text(String),
            Number(i64),
        }
        let text = match Written::deserialize(deserializer)? {
            Written::Text(text) => text,
            Written::Number(number) => number.to_string(),
        };
        let size: ByteSize = text.parse().map_err(serde::de::Error::custom)?;
        if size.get() == 0 {
            return Err(serde::de::Error::custom("the size is zero"));
        }
        Ok(Self(size))
    }
}

macro_rules! names {
    ($(#[$doc:meta])* $name:ident, $what:literal, { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
        pub enum $name { $($(#[$vdoc])* #[serde(rename = $text)] $variant,)+ }

        impl $name {
            /// Its name in files and environment variables.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }

        impl FromStr for $name {
            type Err = Error;

            /// Blanks and case aside, `-` and `_` alike; what is not known is never guessed at.
            fn from_str(text: &str) -> Result<Self> {
                let folded = text.trim().to_ascii_lowercase().replace('-', "_");
                match &*folded {
                    $($text => Ok(Self::$variant),)+
                    other => Err(Error::new(
                        ErrorKind::ConfigInvalid, "configure", concat!("unknown ", $what),
                    )
                    .with("found", format_args!("{text:?}"))
                    .remedy(crate::config::suggestion(other, [$($text),+].into_iter()))),
                }
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

names!(
    /// What carries the samples.
    Backend, "backend", {
        /// Mooncake Store: hard-pinned objects in a distributed pool.
        Mooncake = "mooncake",
        /// Arenas on the servers' GPUs, read through Mooncake.
        MooncakeGpuDirect = "mooncake_gpu_direct",
        /// Memory of capture servers on this host, mapped.
        Shm = "shm",
        /// Memory of capture servers, read over tcp.
        Tcp = "tcp",
    }
);

names!(
    /// What Mooncake moves bytes with.
    Protocol, "protocol", {
        /// InfiniBand or RoCE.
        Rdma = "rdma",
        /// NVLink across the nodes of one domain.
        Nvlink = "nvlink",
        /// NVLink within a node.
        NvlinkIntra = "nvlink_intra",
        /// Sockets.
        Tcp = "tcp",
    }
);

names!(
    /// Where a trainer receives.
    Buffers, "kind of receive buffers", {
        /// Device memory.
        Cuda = "cuda",
        /// Pinned host memory.
        Pinned = "pinned",
        /// Ordinary host memory.
        Pageable = "pageable",
    }
);

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct RunConfig {
    /// What is trained on what.
    pub run: RunSection,
    /// What carries the samples.
    pub transport: TransportSection,
    /// Capture servers.
    #[serde(default)]
    pub server: Vec<ServerSection>,
    /// Who sends the prompts.
    #[serde(default)]
    pub producer: ProducerSection,
    /// Who trains.
    #[serde(default)]
    pub trainer: TrainerSection,
    /// Where Mooncake is reached.
    #[serde(default)]
    pub mooncake: MooncakeSection,
}

/// `[run]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct RunSection {
    /// Name of the run; also the store's, unless that is given.
    pub id: String,
    /// Store that the samples belong to.
    pub store_id: Option<String>,
    /// How the draft model is trained.
    pub strategy: Strategy,
    /// Width of one layer's hidden state.
    pub hidden: u64,
    /// Layers that are captured.
    pub layers: Vec<i64>,
    /// Longest prompt, in tokens.
    pub max_length: u64,
    /// The target model, as the inference server takes it.
    pub model: String,
    /// Folder of the channel and the ledger, reachable from producer and trainers.
    pub control_dir: PathBuf,
}

/// `[transport]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct TransportSection {
    /// What carries the samples.
    pub backend: Backend,
    /// What Mooncake moves bytes with; only with its backends.
    pub protocol: Option<Protocol>,
    /// Size of each server's arena; never guessed.
    pub arena: Option<Size>,
    /// Where trainers receive; `cuda` for NVLink. Over `tcp` that is memory of the GPU too, through
    /// page-locked buffers, and the others are host memory.
    pub receive_buffers: Option<Buffers>,
    /// Receive pool of each rank.
    pub receive_pool: Option<Size>,
    /// Sets `MC_FORCE_MNNVL`, which NVLink across nodes needs.
    #[serde(default)]
    pub force_mnnvl: bool,
    /// Whether captures are published from device memory; left to the server if not given.
    pub gpu_put: Option<bool>,
}

impl TransportSection {
    /// Where trainers receive what comes by transports of this library, as its own setting; none if
    /// nothing is said, or Mooncake brings it.
    pub fn receive(&self) -> Option<Receive> {
        match (self.backend, self.receive_buffers?) {
            (Backend::Mooncake | Backend::MooncakeGpuDirect, _) => None,
            (_, Buffers::Cuda) => Some(Receive::Device),
            (_, Buffers::Pinned | Buffers::Pageable) => Some(Receive::Host),
        }
    }
}

/// `[[server]]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ServerSection {
    /// Host on which it runs.
    pub host: String,
    /// HTTP port.
    pub port: u16,
    /// Port that takes frees; 0 lets the system choose.
    #[serde(default)]
    pub control_port: u16,
    /// GPUs of the server; their number is the tensor-parallel size.
    #[serde(default)]
    pub gpus: Vec<u32>,
    /// Further arguments.
    #[serde(default)]
    pub extra_args: Vec<String>,
    /// Further environment variables.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
}

impl ServerSection {
    /// The address that `host` is, if it is one. Of all names only `localhost` means the same
    /// everywhere.
    pub fn address(&self) -> Option<IpAddr> {
        match &*self.host {
            "localhost" => Some(Ipv4Addr::LOCALHOST.into()),
            host => host.parse().ok(),
        }
    }
}

/// `[producer]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct ProducerSection {
    /// Command of the producer.
    pub command: Vec<String>,
    /// Most prompts of one request.
    pub lease: u64,
    /// Requests in flight to each server.
    pub concurrency: u64,
    /// Batches of prompts prepared ahead.
    pub prefetch: u64,
    /// How requests are spread.
    pub routing: Routing,
    /// Which prompts go together.
    pub batching: Batching,
    /// Samples in flight at which the producer pauses.
    pub high_watermark: u64,
    /// Samples in flight at which it goes on.
    pub low_watermark: u64,
    /// Bytes in flight at which it pauses.
    pub high_watermark_bytes: Option<Size>,
    /// Bytes in flight at which it goes on.
    pub low_watermark_bytes: Option<Size>,
    /// Bytes that may never be exceeded.
    pub max_resident_bytes: Option<Size>,
}

impl Default for ProducerSection {
    fn default() -> Self {
        Self {
            command: Vec::new(),
            lease: 8,
            concurrency: 1,
            prefetch: 4,
            routing: Routing::LeastTokens,
            batching: Batching::LengthBucketed,
            high_watermark: 256,
            low_watermark: 192,
            high_watermark_bytes: None,
            low_watermark_bytes: None,
            max_resident_bytes: None,
        }
    }
}

/// `[trainer]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct TrainerSection {
    /// Command of each rank.
    pub command: Vec<String>,
    /// Data-parallel ranks.
    pub ranks: u64,
    /// Samples of a micro batch.
    pub batch: u64,
    /// Micro batches of an optimizer step.
    pub accumulation: u64,
    /// Samples that each rank reads ahead.
    pub prefetch: u64,
    /// Whether steps are made durable while the next one computes.
    pub async_ack: bool,
    /// Address at which rank 0 leads the others.
    pub leader: String,
}

impl Default for TrainerSection {
    fn default() -> Self {
        Self {
            command: Vec::new(),
            ranks: 1,
            batch: 1,
            accumulation: 1,
            prefetch: 4,
            async_ack: true,
            leader: "127.0.0.1:29600".into(),
        }
    }
}

impl TrainerSection {
    /// Samples of one optimizer step, all ranks together.
    pub fn quantum(&self) -> u64 {
        self.ranks.saturating_mul(self.batch).saturating_mul(self.accumulation)
    }
}

/// `[mooncake]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct MooncakeSection {
    /// Address of the master.
    pub master: Option<String>,
    /// URL of the metadata service.
    pub metadata_server: Option<String>,
    /// This host, as peers reach it.
    pub local_hostname: Option<String>,
    /// Comma-separated RDMA devices; empty takes all usable ones.
    pub rdma_devices: String,
    /// Memory that each server gives to the pool.
    pub segment_size: Size,
    /// Staging memory of each client.
    pub local_buffer_size: Size,
    /// How long a read keeps an object, in milliseconds.
    pub lease_ttl_ms: u64,
}

impl Default for MooncakeSection {
    fn default() -> Self {
        Self {
            master: None,
            metadata_server: None,
            local_hostname: None,
            rdma_devices: String::new(),
            segment_size: Size(ByteSize::mib(32 << 10)),
            local_buffer_size: Size(ByteSize::mib(256)),
            lease_ttl_ms: 10_000,
        }
    }
}
