//! Which memory the fetches of a transport can fill.

use transport_core::{Error, ErrorKind, RegionKind, Result};

/// Kinds of memory that can be filled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reach {
    /// The host's, of any kind.
    pub(super) host: bool,
    /// A device's.
    pub(super) device: Option<RegionKind>,
}

impl Reach {
    /// Memory of the host only.
    pub(super) const HOST: Self = Self { host: true, device: None };

    /// Whether such memory can be filled.
    pub(super) fn takes(&self, kind: RegionKind) -> bool {
        if kind.is_host() { self.host } else { self.device == Some(kind) }
    }

    /// Refuses memory that cannot be filled.
    pub(super) fn check(&self, found: RegionKind) -> Result<()> {
        if self.takes(found) {
            return Ok(());
        }
        let unsupported = |why| Error::new(ErrorKind::Unsupported, "fetch", why);
        Err(match self.device {
            None => unsupported("this engine cannot write device memory").remedy(
                "fetch into host memory, read with the cuda engine, or give a tcp transport \
                 staging buffers for the device",
            ),
            Some(expected) => unsupported("this engine writes memory of its device only")
                .with("expected", format_args!("{expected:?}"))
                .with("found", format_args!("{found:?}"))
                .remedy("fetch into memory of that device"),
        })
    }

    /// What can be filled, for people.
    pub(super) fn name(&self) -> String {
        match (self.host, self.device) {
            (_, None) => "host memory".into(),
            (false, Some(device)) => format!("{device:?}"),
            (true, Some(device)) => format!("host memory or {device:?}"),
        }
    }
}
