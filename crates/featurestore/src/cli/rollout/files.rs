//! Mooncake's objects in dumps: decode, encode.

use std::{
    num::NonZeroU64,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Args, ValueEnum};
use featurestore::files::read_at_most;
use rollout_codec::{
    Schema, Value,
    commands::{self, EncodeOptions},
    json::{self, Style},
    mooncake::{DEFAULT_CHUNK_BYTES, Dump, Encoded, ObjectStore, Reference},
    notation::Layout,
};
use transport_core::{Error, ErrorKind, Result};

use super::TransportArgs;
use crate::cli::say;

/// Largest file that is read.
const MAX_FILE_BYTES: u64 = 4 << 30;

#[derive(Debug, Args)]
pub(crate) struct DecodeArgs {
    /// Stored objects in the dump format: `key`, `len`, hexadecimal lines, `end`.
    #[arg(long, value_name = "DUMP", required_unless_present = "live")]
    objects: Option<PathBuf>,
    /// Reads from the store that --mooncake names rather than from a dump.
    #[arg(long, conflicts_with = "objects")]
    live: bool,
    #[command(flatten)]
    transport: TransportArgs,
    /// Exported reference of the rollout.
    #[arg(long, value_name = "REF.json", required_unless_present = "manifest")]
    r#ref: Option<PathBuf>,
    /// Manifest key of one object, whose members are printed; needs no reference.
    #[arg(long, value_name = "KEY", conflicts_with = "ref")]
    manifest: Option<String>,
    /// One dict, or its three sections. The reference does not say which of the two was put; auto
    /// takes the sections where Mooncake chose every codec itself, as it does for a dataproto.
    #[arg(long, value_enum, default_value_t = LayoutArg::Auto)]
    layout: LayoutArg,
    /// One line rather than an indented text.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum LayoutArg {
    /// Whichever was most likely put.
    Auto,
    /// What `get(type="dict")` gives.
    Flat,
    /// What `get_dataproto` gives.
    Envelope,
}

#[derive(Debug, Args)]
pub(crate) struct EncodeArgs {
    /// Decoded record, as decode prints it.
    #[arg(long, value_name = "FILE.json")]
    decoded: PathBuf,
    /// Where the stored objects go, in the dump format.
    #[arg(long, value_name = "DUMP", required_unless_present = "live")]
    out: Option<PathBuf>,
    /// Writes to the store that --mooncake names rather than to a dump.
    #[arg(long, conflicts_with = "out")]
    live: bool,
    #[command(flatten)]
    transport: TransportArgs,
    /// Where the reference goes; standard output if not given.
    #[arg(long, value_name = "REF.json")]
    out_ref: Option<PathBuf>,
    /// First line of the dump, after `#`.
    #[arg(long, default_value = "")]
    note: String,
    /// Reference whose codecs, element types, structure, names and ids are used again.
    #[arg(long, visible_alias = "ref", value_name = "REF.json")]
    like: Option<PathBuf>,
    /// What fields are, if no reference says so: slime, miles, slime-mooncake, or a file.
    #[arg(long, conflicts_with = "like")]
    schema: Option<String>,
    /// First part of all keys [default: the reference's, else bundle].
    #[arg(long)]
    prefix: Option<String>,
    /// Name of the data set [default: the reference's, else default].
    #[arg(long)]
    namespace: Option<String>,
    /// Second part of all keys [default: the reference's, else default].
    #[arg(long)]
    partition: Option<String>,
    /// Stage that writes [default: the reference's, else default].
    #[arg(long)]
    stage: Option<String>,
    /// Bytes of the largest stored object.
    #[arg(long, default_value_t = NonZeroU64::new(DEFAULT_CHUNK_BYTES).expect("not zero"))]
    chunk_bytes: NonZeroU64,
    /// First object id, in hexadecimal; the others count up from it. Random if not given.
    #[arg(long, value_parser = hexadecimal)]
    first_id: Option<u128>,
}

fn hexadecimal(text: &str) -> std::result::Result<u128, String> {
    u128::from_str_radix(text, 16).map_err(|e| e.to_string())
}

pub(super) fn decode(args: &DecodeArgs) -> Result<ExitCode> {
    let record = match &args.objects {
        Some(file) => {
            record(args, &dump(file)?.objects).map_err(|e| e.with("objects", file.display()))?
        }
        None => with_store(&args.transport, |store| record(args, store))?,
    };
    print(&record, args.json)
}

fn record<S: ObjectStore + ?Sized>(args: &DecodeArgs, store: &S) -> Result<Value> {
    match (&args.manifest, &args.r#ref) {
        (Some(key), _) => commands::decode_stored_members(store, key),
        (None, Some(file)) => {
            let reference = reference(file)?;
            let layout = match args.layout {
                LayoutArg::Flat => Layout::Flat,
                LayoutArg::Auto if !all_inferred(&reference) => Layout::Flat,
                LayoutArg::Auto | LayoutArg::Envelope => Layout::Envelope,
            };
            commands::decode_stored(store, &reference, layout)
        }
        (None, None) => unreachable!("the flags need one of them"),
    }
}

/// Removes the objects that exported references name; how many there were.
pub(super) fn cleanup(files: &[PathBuf], transport: &TransportArgs) -> Result<u64> {
    let references = files.iter().map(|file| reference(file)).collect::<Result<Vec<_>>>()?;
    with_store(transport, |store| {
        references.iter().try_fold(0, |removed, reference| {
            Ok(removed + rollout_codec::mooncake::cleanup(store, reference)?)
        })
    })
}

/// Runs `work` on the objects of a real store.
#[cfg(feature = "store")]
fn with_store<T>(
    args: &TransportArgs,
    work: impl FnOnce(&mut featurestore::rollout::StoreObjects) -> Result<T>,
) -> Result<T> {
    let options = args.over_store().options(None)?;
    super::prepare(&options)?;
    crate::cli::runtime(2, 8)?.block_on(async {
        let endpoint = super::open(options).await?;
        let done = endpoint.objects("open store").and_then(|mut store| work(&mut store));
        let closed = endpoint.close().await;
        done.and_then(|done| closed.map(|()| done))
    })
}

#[cfg(not(feature = "store"))]
fn with_store<T>(
    _: &TransportArgs,
    _: impl FnOnce(&mut rollout_codec::mooncake::MemoryStore) -> Result<T>,
) -> Result<T> {
    let error = Error::new(ErrorKind::Unsupported, "join Mooncake Store", "built without it");
    Err(error.remedy("build with --features mooncake-python, or mooncake for a C library"))
}

fn all_inferred(reference: &Reference) -> bool {
    let source = |encoded: &Encoded| {
        encoded.metadata.get("schema_source").and_then(Value::as_str).map(ToOwned::to_owned)
    };
    let inferred = |encoded| source(encoded).as_deref() == Some("inferred_from_runtime_values");
    !reference.encoded.is_empty() && reference.encoded.values().all(inferred)
}

/// Keys and names that an existing reference has.
struct Known {
    prefix: String,
    stage: String,
    first_id: Option<u128>,
}

impl Known {
    fn of(reference: &Reference) -> Option<Self> {
        let (stage, key) = reference.stages.first()?;
        let base = key.strip_suffix("/manifest")?;
        let (base, object) = base.rsplit_once('/')?;
        let prefix = base.strip_suffix(&reference.partition)?.strip_suffix('/')?;
        let id = |text: &str| u128::from_str_radix(text, 16).ok();
        let group =
            reference.storage_group.as_deref().and_then(|g| id(g.strip_prefix("structured-")?));
        // The group's id was drawn just before the object's.
        let first_id = group.filter(|group| group.checked_add(1) == id(object));
        Some(Self { prefix: prefix.to_owned(), stage: stage.clone(), first_id })
    }
}

pub(super) fn encode(args: &EncodeArgs) -> Result<ExitCode> {
    let mut options = EncodeOptions {
        like: args.like.as_deref().map(reference).transpose()?,
        chunk_bytes: args.chunk_bytes,
        ..EncodeOptions::default()
    };
    if let Some(like) = &options.like {
        options.place.namespace.clone_from(&like.namespace);
        options.place.partition.clone_from(&like.partition);
        if let Some(known) = Known::of(like) {
            (options.prefix, options.place.stage) = (known.prefix, known.stage);
            options.first_id = known.first_id;
        }
    }
    let given = [
        (&args.prefix, &mut options.prefix),
        (&args.namespace, &mut options.place.namespace),
        (&args.partition, &mut options.place.partition),
        (&args.stage, &mut options.place.stage),
    ];
    for (flag, to) in given {
        if let Some(value) = flag {
            to.clone_from(value);
        }
    }
    options.first_id = args.first_id.or(options.first_id);
    options.schema = match args.schema.as_deref() {
        None => Schema::new(),
        Some("slime") => Schema::slime(),
        Some("miles") => Schema::miles(),
        Some("slime-mooncake") => Schema::slime_mooncake(),
        Some(file) => {
            let file = Path::new(file);
            let schema = parse(file).and_then(|value| Schema::from_value(&value));
            schema.map_err(|e| {
                e.with("schema", file.display())
                    .remedy("name slime, miles, slime-mooncake, or a file with a schema")
            })?
        }
    };
    let decoded = parse(&args.decoded).map_err(|e| e.with("decoded", args.decoded.display()))?;
    let reference = match &args.out {
        Some(out) => {
            let (mut dump, reference) = commands::encode(&decoded, &options)?;
            dump.note.clone_from(&args.note);
            write(out, &dump.to_text()?)?;
            reference
        }
        None => {
            with_store(&args.transport, |store| commands::encode_stored(store, &decoded, &options))?
        }
    };
    if let Some(reference) = reference {
        let text = reference.to_json(Style::PRETTY)?;
        match &args.out_ref {
            Some(file) => write(file, &text)?,
            None => say(text)?,
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints what a dump holds.
pub(super) fn inspect(objects: &Path, file: &Path, json: bool) -> Result<ExitCode> {
    let about = commands::inspect(&dump(objects)?, &reference(file)?);
    print(&about.map_err(|e| e.with("objects", objects.display()))?, json)
}

fn print(value: &Value, line: bool) -> Result<ExitCode> {
    let style = if line { Style::COMPACT } else { Style::PRETTY };
    say(json::write(value, style)?)?;
    Ok(ExitCode::SUCCESS)
}

fn dump(path: &Path) -> Result<Dump> {
    let text = String::from_utf8(read(path)?).map_err(|e| {
        Error::new(ErrorKind::Corrupt, "read dump", "not text")
            .with("file", path.display())
            .source(e)
    })?;
    let dump = Dump::parse(&text).map_err(|e| e.with("file", path.display()))?;
    if dump.objects.is_empty() {
        return Err(Error::new(ErrorKind::Corrupt, "read dump", "there is no object in the file")
            .with("file", path.display())
            .remedy("name a file that encode --out or a dump of the store wrote"));
    }
    Ok(dump)
}

fn parse(path: &Path) -> Result<Value> {
    json::parse(&read(path)?)
}

/// Longest reference that is read: some hundred bytes a field and object.
const MAX_REFERENCE_BYTES: u64 = 256 << 20;

fn reference(path: &Path) -> Result<Reference> {
    Reference::parse(&read_at_most("read reference", path, MAX_REFERENCE_BYTES)?)
        .map_err(|e| e.with("file", path.display()))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    read_at_most("read file", path, MAX_FILE_BYTES)
}

/// Fails if no file can be written there.
pub(super) fn check_place(path: &Path) -> Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let why = match path.is_dir() {
        true => "that is a folder",
        false if parent.is_some_and(|parent| !parent.is_dir()) => "there is no such folder",
        false => return Ok(()),
    };
    Err(Error::new(ErrorKind::InvalidInput, "write file", why)
        .with("file", path.display())
        .remedy("name a file in a folder that exists"))
}

pub(super) fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|e| Error::io("write file", e).with("file", path.display()))
}
