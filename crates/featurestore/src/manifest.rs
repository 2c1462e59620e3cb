//! What the files of a folder must be: the sha256 of each tensor, in `manifest.json` beside them.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use sha2::{Digest, Sha256};
use transport_core::{Error, ErrorKind, Result};

use crate::files::read_regular;

/// Largest manifest accepted, in bytes.
const MAX_BYTES: u64 = 64 << 20;
const OPERATION: &str = "read manifest";

/// The manifest of a folder of safetensors files.
#[derive(Debug)]
pub(crate) struct Manifest {
    folder: PathBuf,
    samples: Vec<Sample>,
}

#[derive(Deserialize)]
struct Content {
    samples: Vec<Sample>,
}

#[derive(Debug, Deserialize)]
struct Sample {
    file: String,
    tensors: BTreeMap<String, Tensor>,
}

#[derive(Debug, Deserialize)]
struct Tensor {
    sha256: String,
}

impl Manifest {
    /// The manifest of `folder`, if it has one.
    pub(crate) fn of(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join("manifest.json");
        // A link that leads nowhere is a manifest that cannot be read, and not none.
        if path.symlink_metadata().is_err() {
            return Ok(None);
        }
        let content: Content = serde_json::from_slice(&read_regular(OPERATION, &path, MAX_BYTES)?)
            .map_err(|e| {
                Error::new(ErrorKind::Corrupt, OPERATION, "not a manifest")
                    .with("file", path.display())
                    .source(e)
            })?;
        Ok(Some(Self { folder: folder.to_owned(), samples: content.samples }))
    }

    /// Hands each tensor's sha256, in lower-case hexadecimal, to `tensor`, with its sample: those are
    /// known by their files' names without the ending. A file or a tensor that is not there is an
    /// error; of a tensor `tensor` says so, by false.
    pub(crate) fn apply<T>(
        self,
        samples: &mut BTreeMap<String, T>,
        mut tensor: impl FnMut(&mut T, &str, String) -> Result<bool>,
    ) -> Result<()> {
        for Sample { file, tensors } in self.samples {
            let stem = file.strip_suffix(".safetensors").unwrap_or(&file);
            let Some(found) = samples.get_mut(stem) else {
                let why = "the folder lacks a file that its manifest lists";
                return Err(Error::new(ErrorKind::Corrupt, OPERATION, why)
                    .with("folder", self.folder.display())
                    .with("file", &file)
                    .remedy(
                        "add the file, or take it from the manifest; names are without a folder",
                    ));
            };
            for (name, Tensor { sha256 }) in tensors {
                let named = |e: Error| e.with("file", &file).with("tensor", &name);
                if !tensor(found, &name, sha256.to_ascii_lowercase()).map_err(named)? {
                    let why = "the file lacks a tensor that the manifest lists";
                    return Err(named(Error::new(ErrorKind::Corrupt, OPERATION, why)));
                }
            }
        }
        Ok(())
    }
}

/// sha256 in lower-case hexadecimal.
pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}
