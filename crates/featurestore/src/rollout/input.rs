//! What is put: a deterministic payload, or files: safetensors, Arrow and Parquet.

use std::{collections::BTreeMap, fmt, io::Read, path::Path, str::FromStr, sync::Arc};

use bytes::Bytes;
use capture_arena::available_memory;
use indexmap::IndexMap;
use rollout_codec::{
    Column, Ragged, Rollout, RowKind, Template,
    payload::{Payload, Profile},
};
use transport_core::{ByteSize, Dtype, Error, ErrorKind, Result};

use crate::{
    files::open_regular,
    manifest::{Manifest, sha256_hex},
    stored,
};

/// Largest file that is read.
const MAX_FILE_BYTES: u64 = 64 << 30;
const OPERATION: &str = "read rollout input";

/// A deterministic payload: `text`, `text+teacher` or `text+r3`, and how many bytes at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PayloadSpec {
    /// Which ragged fields there are.
    pub profile: Profile,
    /// Least bytes of all ragged rows.
    pub bytes: ByteSize,
}

impl FromStr for PayloadSpec {
    type Err = Error;

    /// Reads `PROFILE` or `PROFILE:SIZE`, such as `text:128MiB`.
    fn from_str(text: &str) -> Result<Self> {
        let (profile, size) = text.split_once(':').unwrap_or((text, "128MiB"));
        let profile = [Profile::Text, Profile::TextTeacher, Profile::TextExperts]
            .into_iter()
            .find(|known| known.to_string() == profile)
            .ok_or_else(|| {
                Error::new(ErrorKind::ConfigInvalid, "read payload", "no such profile")
                    .with("found", format_args!("{profile:?}"))
                    .remedy("write text, text+teacher or text+r3, and perhaps a size: text:128MiB")
            })?;
        Ok(Self { profile, bytes: size.parse()? })
    }
}

impl fmt::Display for PayloadSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.profile, self.bytes)
    }
}

/// What to put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A deterministic payload.
    Payload(PayloadSpec),
    /// A folder of `*.safetensors` files: a row each, in the order of their names, and a ragged
    /// field for each name of a tensor; files that lack one have a null row there.
    ///
    /// Or, with the feature `arrow`, a file of Arrow IPC or Parquet, or a folder of such files: a row
    /// for each of theirs, file by file in the order of their names, and a field for each of theirs,
    /// as [`Column`] takes them.
    Files(std::path::PathBuf),
}

impl Input {
    /// Fails if it is known by its size already that it does not fit into `memory`.
    pub fn check_fits(&self, memory: ByteSize) -> Result<()> {
        match self {
            Self::Payload(spec) if spec.bytes > memory => {
                let why = "the payload is larger than the memory that it is to be put into";
                Err(Error::new(ErrorKind::CapacityExceeded, OPERATION, why)
                    .with("payload", spec)
                    .with("memory", memory)
                    .remedy("put a smaller one, or give more memory: --memory"))
            }
            _ => Ok(()),
        }
    }

    /// Makes or reads the rollout. A payload that this machine has no memory for is an error.
    pub fn rollout(&self) -> Result<Rollout<'static>> {
        match self {
            Self::Payload(spec) => {
                if spec.bytes.get() > available_memory() {
                    let why = "the payload is larger than the memory that this machine has free";
                    return Err(Error::new(ErrorKind::CapacityExceeded, OPERATION, why)
                        .with("payload", spec)
                        .with("available_bytes", available_memory())
                        .remedy("put a smaller one"));
                }
                Ok(Payload::new(spec.profile, spec.bytes.get()).into_rollout())
            }
            Self::Files(path) => read_files(path),
        }
    }
}

fn read_files(path: &Path) -> Result<Rollout<'static>> {
    if is_table(path) {
        return read_tables(&[path.to_owned()]);
    }
    let failed = |e| Error::io(OPERATION, e).with("folder", path.display());
    let mut files = Vec::new();
    let mut tables = Vec::new();
    let what = "name a folder of *.safetensors files; or Arrow or Parquet files, by their endings";
    for entry in path.read_dir().map_err(|e| failed(e).remedy(what))? {
        let file = entry.map_err(failed)?.path();
        if is_table(&file) {
            tables.push(file);
        } else if file.extension().is_some_and(|e| e == "safetensors") {
            files.push(file);
        }
    }
    files.sort();
    tables.sort();
    match (files.is_empty(), tables.is_empty()) {
        (false, true) => read_safetensors(path, &files),
        (true, false) => read_tables(&tables),
        (true, true) => Err(Error::new(ErrorKind::NotFound, OPERATION, "no samples in the folder")
            .with("folder", path.display())
            .remedy("put *.safetensors files there, one row each, or Arrow or Parquet files")),
        (false, false) => {
            let why = "files of two kinds: which rows belong together is not known";
            Err(Error::new(ErrorKind::InvalidInput, OPERATION, why).with("folder", path.display()))
        }
    }
}

#[cfg(feature = "arrow")]
use super::tables::{is_table, read as read_tables};

#[cfg(not(feature = "arrow"))]
fn is_table(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "arrow" || e == "feather" || e == "parquet")
}

#[cfg(not(feature = "arrow"))]
fn read_tables(files: &[std::path::PathBuf]) -> Result<Rollout<'static>> {
    Err(Error::new(ErrorKind::Unsupported, OPERATION, "built without Arrow")
        .with("file", files[0].display())
        .remedy("build with --features arrow"))
}

fn read_safetensors(folder: &Path, files: &[std::path::PathBuf]) -> Result<Rollout<'static>> {
    let rows: Vec<Row> = files.iter().map(|file| read_file(file)).collect::<Result<_>>()?;
    if let Some(manifest) = Manifest::of(folder)? {
        let named = files.iter().zip(&rows);
        let mut rows: BTreeMap<String, &Row> =
            named.filter_map(|(f, row)| Some((f.file_stem()?.to_str()?.to_owned(), row))).collect();
        manifest.apply(&mut rows, |row, name, sum| compare(row, name, &sum))?;
    }
    let mut names: Vec<&String> = rows.iter().flat_map(IndexMap::keys).collect();
    names.sort();
    names.dedup();
    let mut rollout = Rollout::default();
    for name in names {
        let column = field(name, &rows).map_err(|e| e.with("field", name))?;
        rollout.non_tensor.insert(name.clone(), Column::Ragged(column));
    }
    let names = files.iter().map(|f| f.file_stem().unwrap_or_default().to_string_lossy());
    let names: Vec<String> = names.map(Into::into).collect();
    let names = rollout_codec::Blobs::from_text(names.iter().map(|name| Some(name.as_str())));
    let taken = rollout.non_tensor.insert("sample_names".into(), Column::Blobs(names));
    if taken.is_some() {
        return Err(Error::new(ErrorKind::InvalidInput, OPERATION, "the name is taken")
            .with("field", "sample_names")
            .remedy("rename the tensor"));
    }
    Ok(rollout)
}

/// The tensors of one file.
type Row = IndexMap<String, Tensor>;

#[derive(Clone, Debug)]
struct Tensor {
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: Bytes,
}

fn read_file(path: &Path) -> Result<Row> {
    let failed = |e| Error::io(OPERATION, e).with("file", path.display());
    let mut file = open_regular(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    if bytes > MAX_FILE_BYTES {
        return Err(Error::new(ErrorKind::InvalidInput, OPERATION, "the file is too large")
            .with("file", path.display())
            .with("bytes", bytes));
    }
    let mut content = Vec::with_capacity(bytes as usize);
    file.read_to_end(&mut content).map_err(failed)?;
    let content: Arc<[u8]> = content.into();
    let content = Bytes::from_owner(content);
    let tensors = safetensors::SafeTensors::deserialize(&content).map_err(|e| {
        Error::new(ErrorKind::Corrupt, OPERATION, "not a safetensors file")
            .with("file", path.display())
            .with("bytes", bytes)
            .with("reason", &e)
            .source(e)
    })?;
    let mut row = Row::new();
    for (name, view) in tensors.iter() {
        let dtype = stored::dtype(view.dtype())
            .map_err(|e| e.with("file", path.display()).with("field", name))?;
        let shape = view.shape().iter().map(|&dim| dim as u64).collect();
        row.insert(name.to_owned(), Tensor { dtype, shape, bytes: content.slice_ref(view.data()) });
    }
    Ok(row)
}

/// Whether the row has this tensor, which must have the sha256 of the manifest.
fn compare(row: &Row, name: &str, expected: &str) -> Result<bool> {
    let Some(tensor) = row.get(name) else { return Ok(false) };
    let found = sha256_hex(&tensor.bytes);
    if found == expected {
        return Ok(true);
    }
    let why = "a tensor has another sha256 than the manifest says";
    Err(Error::new(ErrorKind::Corrupt, OPERATION, why)
        .with("expected", expected)
        .with("found", found)
        .remedy("fetch the file again, or write the manifest anew if the file is right"))
}

/// One field over all rows: ragged along the first dimension if all have the same others.
fn field(name: &str, rows: &[Row]) -> Result<Ragged<'static>> {
    let tensors = || rows.iter().filter_map(|row| row.get(name));
    let first = tensors().next().expect("a name comes from a row");
    if let Some(other) = tensors().find(|tensor| tensor.dtype != first.dtype) {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            OPERATION,
            "rows have different element types",
        )
        .with("expected", first.dtype)
        .with("found", other.dtype));
    }
    let tail = first.shape.get(1..).map(<[u64]>::to_vec);
    let regular = tail.filter(|tail| {
        !tail.contains(&0) && tensors().all(|t| t.shape.get(1..) == Some(tail.as_slice()))
    });
    let mut column = match &regular {
        Some(tail) => Ragged::new(first.dtype, RowKind::Torch, Template::tail(tail.clone()))?,
        None => Ragged::irregular(first.dtype, RowKind::Torch),
    };
    for row in rows {
        match row.get(name) {
            None => column.push_null(),
            Some(tensor) if regular.is_some() => column.push(tensor.bytes.clone())?,
            Some(tensor) => column.push_shaped(&tensor.shape, tensor.bytes.clone())?,
        }
    }
    Ok(column)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_are_named_as_they_are_printed() {
        let spec: PayloadSpec = "text+r3:64MiB".parse().unwrap();
        assert_eq!(spec, PayloadSpec { profile: Profile::TextExperts, bytes: ByteSize::mib(64) });
        assert_eq!(spec.to_string().parse::<PayloadSpec>().unwrap(), spec);
        assert_eq!("text".parse::<PayloadSpec>().unwrap().bytes, ByteSize::mib(128));
        for bad in ["prose", "text:", "text:much", "", "text+r3:1MiB:2"] {
            assert!(bad.parse::<PayloadSpec>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_file_that_its_tensors_do_not_cover_is_refused_with_the_reason() {
        let real = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/minilm-capture");
        let mut bytes = std::fs::read(format!("{real}/minilm-0000.safetensors")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("odd.safetensors");
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(read_file(&path).unwrap().len(), 4);
        bytes.extend(b"more");
        std::fs::write(&path, &bytes).unwrap();
        let Err(error) = read_file(&path) else { panic!("it is refused") };
        let length = bytes.len().to_string();
        assert_eq!(error.context("bytes"), Some(&*length), "{error}");
        assert!(error.context("reason").is_some_and(|it| it.contains("not fully covered")));
        assert!(error.to_string().contains("odd.safetensors"), "{error}");
    }
}
