//! Which Mooncake was loaded.

use std::{fmt, path::PathBuf};

/// How Mooncake was loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ProviderKind {
    /// A library with a C interface, through the dynamic loader.
    CLibrary,
    /// The pip wheel, through an embedded interpreter.
    Wheel,
    /// Something else that keeps the contract, such as a fake in a test.
    Other,
}

impl fmt::Display for ProviderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CLibrary => "C library",
            Self::Wheel => "wheel",
            Self::Other => "other",
        })
    }
}

/// What a store provider can do beyond what every one must.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreCapabilities {
    /// Many keys are removed by one request; else each key costs a round trip.
    pub batch_remove: bool,
    /// Objects are written so that the answer tells new ones from those that were there. The wheel
    /// does so for clients that add no object memory.
    pub put_new: bool,
    /// Objects can be put into a tenant.
    pub tenants: bool,
    /// The client adds object memory: some objects lie in this process.
    pub object_memory: bool,
}

impl StoreCapabilities {
    /// Sets whether many keys are removed by one request.
    #[must_use]
    pub fn batch_remove(mut self, yes: bool) -> Self {
        self.batch_remove = yes;
        self
    }

    /// Sets whether a write tells new objects from those that were there.
    #[must_use]
    pub fn put_new(mut self, yes: bool) -> Self {
        self.put_new = yes;
        self
    }

    /// Sets whether the client adds object memory.
    #[must_use]
    pub fn object_memory(mut self, yes: bool) -> Self {
        self.object_memory = yes;
        self
    }

    /// Sets whether there are tenants.
    #[must_use]
    pub fn tenants(mut self, yes: bool) -> Self {
        self.tenants = yes;
        self
    }
}

/// The file that serves the calls, and its version: belongs into every log and benchmark.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProviderInfo {
    /// How it was loaded.
    pub kind: ProviderKind,
    /// The file that was opened.
    pub file: PathBuf,
    /// Version of the package that it belongs to, if that could be found out.
    pub version: Option<String>,
    /// What the store calls can do; all false for a transfer engine.
    pub store: StoreCapabilities,
}

impl ProviderInfo {
    /// A provider of unknown version without extras.
    pub fn new(kind: ProviderKind, file: impl Into<PathBuf>) -> Self {
        Self { kind, file: file.into(), version: None, store: StoreCapabilities::default() }
    }

    /// Adds the version of the package.
    #[must_use]
    pub fn version(mut self, version: Option<String>) -> Self {
        self.version = version;
        self
    }

    /// Adds what the store calls can do.
    #[must_use]
    pub fn store(mut self, capabilities: StoreCapabilities) -> Self {
        self.store = capabilities;
        self
    }
}

impl fmt::Display for ProviderInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = self.version.as_deref().unwrap_or("of unknown version");
        write!(f, "Mooncake {version} ({}: {})", self.kind, self.file.display())
    }
}
