//! Real captures from disk: a folder of safetensors files, one sample each.
//!
//! Only headers are read when the folder is opened; tensor bytes go straight from the file into the
//! place that they are wanted in. A `manifest.json` with the sha256 of each tensor is used if it is
//! there.

use std::{
    collections::BTreeMap,
    io::Read,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use indexmap::IndexMap;
use transport_core::{Dtype, Error, ErrorKind, FeatureName, Result, SampleId, TensorMeta};

use crate::{
    files::open_regular,
    manifest::{Manifest, sha256_hex},
    stored::dtype,
    workload::Prompt,
};

/// Largest safetensors header accepted, in bytes.
const MAX_HEADER_BYTES: u64 = 16 << 20;

/// A folder of captured samples.
#[derive(Debug)]
pub struct Folder {
    samples: BTreeMap<String, Sample>,
}

/// One file of the folder.
#[derive(Debug)]
pub struct Sample {
    path: PathBuf,
    /// Tensors in the order of their bytes in the file.
    tensors: IndexMap<FeatureName, Stored>,
}

#[derive(Debug)]
struct Stored {
    meta: TensorMeta,
    offset: u64,
    sha256: Option<String>,
}

impl Folder {
    /// Reads the headers of all `*.safetensors` files in `folder`, and the manifest if there is one.
    pub fn open(folder: &Path) -> Result<Self> {
        let fail = |e| Error::io("open input", e).with("folder", folder.display());
        let mut samples = BTreeMap::new();
        let entries = folder.read_dir();
        for entry in entries.map_err(|e| fail(e).remedy("name a folder of *.safetensors files"))? {
            let path = entry.map_err(fail)?.path();
            if path.extension().is_some_and(|e| e == "safetensors") {
                let name = sample_name(&path)?;
                samples.insert(name, Sample::open(path)?);
            }
        }
        if samples.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, "open input", "no samples in the folder")
                .with("folder", folder.display())
                .remedy("put *.safetensors files there, one sample each"));
        }
        let set = |sample: &mut Sample, name: &str, sha256| {
            let Some(stored) = sample.tensors.get_mut(name) else { return Ok(false) };
            stored.sha256 = Some(sha256);
            Ok(true)
        };
        if let Some(manifest) = Manifest::of(folder)? {
            manifest.apply(&mut samples, set)?;
        }
        Ok(Self { samples })
    }

    /// Names of the samples, which are their files' names without the ending, in order.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.samples.keys().map(String::as_str)
    }

    /// One sample. `id` is its name, or ends in `:` and its name.
    pub fn sample(&self, id: &str) -> Result<&Sample> {
        let name = id.rsplit(':').next().unwrap_or(id);
        self.samples.get(name).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "find sample", "no such file in the input folder")
                .with("sample_id", id)
                .with("file", format_args!("{name}.safetensors"))
        })
    }
}

/// What the sample in a file is called. A colon ends the name of a run before it, so it is refused.
fn sample_name(path: &Path) -> Result<String> {
    let name = path.file_stem().and_then(|stem| stem.to_str());
    let refuse = |why: &'static str| {
        Error::new(ErrorKind::InvalidInput, "open input", why)
            .with("file", path.display())
            .remedy("rename the file: its name without the ending is the sample's")
    };
    let name = name.ok_or_else(|| refuse("the file's name is not UTF-8"))?;
    if name.contains(':') {
        return Err(refuse("the file's name has a colon"));
    }
    SampleId::new(name).map_err(|e| e.with("file", path.display()))?;
    Ok(name.to_owned())
}

impl Sample {
    fn open(path: PathBuf) -> Result<Self> {
        let io = |e| Error::io("open sample", e).with("file", path.display());
        let corrupt = |why: &'static str| {
            Error::new(ErrorKind::Corrupt, "open sample", why).with("file", path.display())
        };
        let mut file = open_regular(&path).map_err(io)?;
        let file_bytes = file.metadata().map_err(io)?.len();
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(io)?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MAX_HEADER_BYTES.min(file_bytes.saturating_sub(8)) {
            return Err(corrupt("the header is longer than the file"));
        }
        let mut head = vec![0; header_bytes as usize];
        file.read_exact(&mut head).map_err(io)?;
        let header: safetensors::tensor::Metadata = serde_json::from_slice(&head)
            .map_err(|e| corrupt("not a safetensors header").with("reason", &e).source(e))?;
        let start = 8 + header_bytes;
        let mut covered = start; // the header was refused if there is a hole between tensors
        let mut tensors = IndexMap::new();
        for name in header.offset_keys() {
            let info = header.info(&name).expect("a name that the header lists");
            let shape: Vec<u64> = info.shape.iter().map(|&d| d as u64).collect();
            let meta =
                TensorMeta::new(dtype(info.dtype).map_err(|e| e.with("tensor", &name))?, shape)?;
            let (from, to) = info.data_offsets;
            let fits = to.checked_sub(from).is_some_and(|n| n as u64 == meta.nbytes());
            let end = (to as u64).checked_add(start).filter(|&end| fits && end <= file_bytes);
            covered = end.ok_or_else(|| {
                corrupt("a tensor does not fit the file")
                    .with("tensor", &name)
                    .with("tensor_ends_at", start.saturating_add(to as u64))
                    .with("file_bytes", file_bytes)
            })?;
            let stored = Stored { meta, offset: start + from as u64, sha256: None };
            tensors.insert(FeatureName::new(&name)?, stored);
        }
        if covered < file_bytes {
            return Err(corrupt("there are bytes behind the tensors")
                .with("tensors_end_at", covered)
                .with("file_bytes", file_bytes)
                .remedy("write the file anew: a safetensors file ends with its last tensor"));
        }
        Ok(Self { path, tensors })
    }

    /// Names, element types and shapes, in the file's order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&FeatureName, &TensorMeta)> {
        self.tensors.iter().map(|(name, stored)| (name, &stored.meta))
    }

    /// sha256 of each tensor that the manifest lists, in lower-case hexadecimal.
    pub fn sha256(&self) -> IndexMap<String, String> {
        let listed = self.tensors.iter().filter_map(|(n, s)| Some((n, s.sha256.clone()?)));
        listed.map(|(name, sum)| (name.to_string(), sum)).collect()
    }

    /// sha256 of one tensor, if the manifest lists it.
    pub fn sha256_of(&self, name: &FeatureName) -> Option<&str> {
        self.tensors.get(name)?.sha256.as_deref()
    }

    /// Element type and shape of one tensor.
    pub fn meta(&self, name: &FeatureName) -> Result<&TensorMeta> {
        self.stored(name).map(|stored| &stored.meta)
    }

    /// Reads one tensor into `out`, which is exactly as long.
    pub fn read(&self, name: &FeatureName, out: &mut [u8]) -> Result<()> {
        let stored = self.stored(name)?;
        debug_assert_eq!(stored.meta.nbytes(), out.len() as u64);
        open_regular(&self.path)
            .and_then(|file| file.read_exact_at(out, stored.offset))
            .map_err(|e| Error::io("read sample", e).with("file", self.path.display()))
    }

    /// Number of tokens: the elements of `input_ids`.
    pub fn tokens(&self) -> Result<u64> {
        Ok(self.meta(&FeatureName::new("input_ids")?)?.shape().iter().product())
    }

    /// Refuses bytes of a tensor that are not what the manifest lists, if it lists it.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`], with the file.
    pub fn check(&self, name: &FeatureName, bytes: &[u8]) -> Result<()> {
        match self.sha256_of(name) {
            Some(listed) if listed != sha256_hex(bytes) => {
                let why = "the file and its manifest disagree";
                Err(Error::new(ErrorKind::Corrupt, "read sample", why)
                    .with("file", self.path.display())
                    .with("tensor", name))
            }
            _ => Ok(()),
        }
    }

    /// The sample's prompt: its `input_ids` and `loss_mask`, both int64; `checked` against the
    /// manifest.
    pub fn prompt(&self, sample_id: SampleId, checked: bool) -> Result<Prompt> {
        let ids = |name: &str| -> Result<Vec<i64>> {
            let name = FeatureName::new(name)?;
            let meta = self.meta(&name)?;
            if meta.dtype() != Dtype::Int64 {
                return Err(Error::new(ErrorKind::Corrupt, "read prompt", "not int64")
                    .with("file", self.path.display())
                    .with("tensor", &name)
                    .with("found", meta.dtype()));
            }
            let mut bytes = vec![0; meta.nbytes() as usize];
            self.read(&name, &mut bytes)?;
            if checked {
                self.check(&name, &bytes)?;
            }
            Ok(bytes.as_chunks().0.iter().map(|word| i64::from_le_bytes(*word)).collect())
        };
        Ok(Prompt { sample_id, input_ids: ids("input_ids")?, loss_mask: ids("loss_mask")? })
    }

    fn stored(&self, name: &FeatureName) -> Result<&Stored> {
        self.tensors.get(name).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "find tensor", "the file has no such tensor")
                .with("file", self.path.display())
                .with("tensor", name)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn real() -> Folder {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/minilm-capture");
        Folder::open(Path::new(folder)).unwrap()
    }

    #[test]
    fn real_files_reproduce_every_sha256_of_their_manifest() {
        let folder = real();
        assert_eq!(folder.names().len(), 3);
        for name in folder.names() {
            let sample = folder.sample(&format!("run:{name}")).unwrap();
            let sums = sample.sha256();
            assert_eq!(sums.len(), 4);
            for (tensor, meta) in sample.tensors() {
                let mut bytes = vec![0; meta.nbytes() as usize];
                sample.read(tensor, &mut bytes).unwrap();
                assert_eq!(sha256_hex(&bytes), sums[tensor.as_str()], "{name}/{tensor}");
            }
            let prompt = sample.prompt(SampleId::new(name).unwrap(), true).unwrap();
            assert_eq!(prompt.input_ids[0], 101, "the tokenizer's [CLS]");
            assert_eq!(prompt.loss_mask.len(), prompt.input_ids.len());
        }
    }

    #[test]
    fn a_prompt_is_compared_with_its_manifest_if_asked_to() {
        let folder = folder_of(&["a.safetensors".as_ref()]);
        let listed = r#"{"samples": [{"file": "a.safetensors",
            "tensors": {"loss_mask": {"sha256": "00"}}}]}"#;
        std::fs::write(folder.path().join("manifest.json"), listed).unwrap();
        let folder = Folder::open(folder.path()).unwrap();
        let prompt =
            |checked| folder.sample("a").unwrap().prompt(SampleId::new("run:a").unwrap(), checked);
        assert!(prompt(false).is_ok(), "its reader compares");
        let error = prompt(true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert_eq!(error.context("tensor"), Some("loss_mask"), "{error}");
    }

    #[test]
    fn damaged_folders_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let error = Folder::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains("no samples"), "{error}");
        let pipe = folder.path().join("pipe.safetensors");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .unwrap();
        let error = Folder::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains("not a regular file") && error.contains("pipe"), "{error}");
        std::fs::remove_file(pipe).unwrap();
        for bytes in [&b""[..], &[0xff; 64], b"\x02\0\0\0\0\0\0\0{]"] {
            std::fs::write(folder.path().join("a.safetensors"), bytes).unwrap();
            let error = Folder::open(folder.path()).unwrap_err().to_string();
            assert!(error.contains("a.safetensors"), "{error}");
        }
        assert!(real().sample("run:missing").is_err());
    }

    /// A folder with one good sample of each of these names.
    fn folder_of(names: &[&std::ffi::OsStr]) -> tempfile::TempDir {
        let real = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/minilm-capture");
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            let to = folder.path().join(name);
            std::fs::copy(format!("{real}/minilm-0000.safetensors"), to).unwrap();
        }
        folder
    }

    /// A safetensors file with these tensors of bytes, at these places behind the header.
    fn file_of(tensors: &[(&str, usize, usize)], content: usize) -> Vec<u8> {
        let entry = |&(name, from, to): &(&str, usize, usize)| {
            let bytes = to - from;
            format!(r#""{name}":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[{from},{to}]}}"#)
        };
        let header = format!("{{{}}}", tensors.iter().map(entry).collect::<Vec<_>>().join(","));
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.resize(file.len() + content, 7);
        file
    }

    #[test]
    fn files_that_their_tensors_do_not_cover_exactly_are_refused_with_the_counts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("odd.safetensors");
        let whole = file_of(&[("a", 0, 4), ("b", 4, 6)], 6);
        std::fs::write(&path, &whole).unwrap();
        Folder::open(folder.path()).unwrap();
        let (end, behind) = (whole.len(), whole.len() + 3);
        let counts = |why: &str, ends: usize, file: usize| {
            vec![why.to_owned(), format!("end_at={ends}"), format!("file_bytes={file}")]
        };
        let cut = vec!["does not fit the file".into(), format!("file_bytes={}", end - 1)];
        for (bytes, says) in [
            (file_of(&[("a", 0, 4), ("b", 4, 6)], 9), counts("bytes behind", end, behind)),
            (file_of(&[], 1), counts("bytes behind", 10, 11)),
            (whole[..end - 1].to_vec(), cut),
            (file_of(&[("a", 0, 4), ("b", 5, 7)], 7), vec!["`b`".into()]), // a hole
            (file_of(&[("a", 1, 4)], 4), vec!["`a`".into()]),
            (file_of(&[("a", 0, 4), ("b", 3, 6)], 6), vec!["`b`".into()]), // an overlap
        ] {
            std::fs::write(&path, bytes).unwrap();
            let error = Folder::open(folder.path()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            let error = error.to_string();
            assert!(error.contains("odd.safetensors"), "{error}");
            assert!(says.iter().all(|part| error.contains(part)), "{says:?}: {error}");
        }
    }

    #[test]
    fn names_that_could_stand_for_two_samples_are_refused() {
        use std::os::unix::ffi::OsStrExt;
        for name in [&b"x:1.safetensors"[..], b"z\xff.safetensors"] {
            let name = std::ffi::OsStr::from_bytes(name);
            let folder = folder_of(&["1.safetensors".as_ref(), name]);
            let error = Folder::open(folder.path()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
            assert!(error.to_string().contains("rename"), "{error}");
        }
    }

    #[test]
    fn a_manifest_counts_whole_or_not_at_all() {
        let folder = folder_of(&["a.safetensors".as_ref()]);
        let manifest = folder.path().join("manifest.json");
        let listed = |file: &str| {
            let tensors = r#"{"input_ids": {"sha256": "00"}}"#;
            format!(r#"{{"samples": [{{"file": "{file}", "tensors": {tensors}}}]}}"#)
        };
        std::fs::write(&manifest, listed("a.safetensors")).unwrap();
        assert_eq!(Folder::open(folder.path()).unwrap().sample("a").unwrap().sha256().len(), 1);
        for absent in ["b.safetensors", "./a.safetensors", "data/a.safetensors"] {
            std::fs::write(&manifest, listed(absent)).unwrap();
            let error = Folder::open(folder.path()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            assert_eq!(error.context("file"), Some(absent), "{error}");
        }
        std::fs::remove_file(&manifest).unwrap();
        std::os::unix::fs::symlink("nowhere", &manifest).unwrap();
        let error = Folder::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains("manifest.json"), "{error}");
    }
}
