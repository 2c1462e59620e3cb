//! Put, get, cleanup and inspect over a transport.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use clap::Args;
use featurestore::{
    files::read_at_most,
    rollout::{Endpoint, FieldReport, inspect_header, payload_checksums},
    server::end_of_life,
};
use rollout_codec::transport::{Handle, RolloutTransport};
use serde_json::{Value, json, value::RawValue};
use transport_core::{ByteSize, Dtype, Error, ErrorKind, Result};

use super::{InputArgs, TransportArgs, encoding, files, narrow, open, prepare};
use crate::cli::{note, runtime, say};

#[derive(Debug, Args)]
pub(crate) struct PutArgs {
    #[command(flatten)]
    input: InputArgs,
    #[command(flatten)]
    transport: TransportArgs,
    /// Memory that this process adds: its arena over shm and tcp [default: 4GiB], or object memory
    /// of a store [default: none]. With it the process stays until it is ended, or its standard
    /// input is.
    #[arg(long)]
    memory: Option<ByteSize>,
    /// Name of the rollout; random if not given.
    #[arg(long)]
    name: Option<String>,
    /// Stores the whole numbers of a field in fewer bytes, such as tokens=int32.
    #[arg(long, value_name = "FIELD=TYPE", value_parser = narrow)]
    narrow: Vec<(String, Dtype)>,
    /// Leaves checksums out.
    #[arg(long)]
    no_checksums: bool,
    /// Writes the handle to a file as well.
    #[arg(long, value_name = "FILE")]
    handle_out: Option<PathBuf>,
    /// Folder in which the put notes what it is about to write to a store, for sweep.
    #[arg(long, value_name = "DIR")]
    journal: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct GetArgs {
    /// File with the handle, or with the line that put prints.
    #[arg(long, value_name = "FILE")]
    handle: PathBuf,
    #[command(flatten)]
    transport: TransportArgs,
    /// Only these fields.
    #[arg(long, value_delimiter = ',')]
    fields: Vec<String>,
    /// Only these rows of the fields.
    #[arg(long, value_delimiter = ',', requires = "fields")]
    rows: Vec<u64>,
    /// Cleans up afterwards.
    #[arg(long)]
    cleanup: bool,
    /// Keeps what it got until it is ended, or its standard input is: readers of the same --share
    /// find it here.
    #[arg(long, conflicts_with_all = ["rows", "cleanup"])]
    hold: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SweepArgs {
    /// Folder that the producers were given as --journal.
    #[arg(long, value_name = "DIR")]
    journal: PathBuf,
    #[command(flatten)]
    transport: TransportArgs,
}

#[derive(Debug, Args)]
pub(crate) struct CleanupArgs {
    /// Files with handles, or with lines that put prints.
    #[arg(value_name = "FILE")]
    handles: Vec<PathBuf>,
    /// Files with exported references of Mooncake, whose objects are removed from the store that
    /// --mooncake names.
    #[arg(long, value_name = "REF.json", conflicts_with = "handles")]
    r#ref: Vec<PathBuf>,
    #[command(flatten)]
    transport: TransportArgs,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// File with the handle, or with the line that put prints.
    #[arg(long, value_name = "FILE", required_unless_present = "objects")]
    handle: Option<PathBuf>,
    /// Stored objects of Mooncake in the dump format.
    #[arg(long, value_name = "DUMP", conflicts_with = "handle", requires = "ref")]
    objects: Option<PathBuf>,
    /// Their exported reference.
    #[arg(long, value_name = "REF.json", requires = "objects")]
    r#ref: Option<PathBuf>,
    #[command(flatten)]
    transport: TransportArgs,
    /// Reads the header only, and compares no checksum.
    #[arg(long)]
    header_only: bool,
    /// One line of JSON rather than a table.
    #[arg(long)]
    json: bool,
}

/// Arena of a producer that names none.
const DEFAULT_ARENA: ByteSize = ByteSize::mib(4 << 10);

pub(super) fn put(args: &PutArgs) -> Result<ExitCode> {
    let mut options = args.transport.options(args.memory)?;
    if options.config.transport != featurestore::TransportChoice::Store {
        options.memory = options.memory.or(Some(DEFAULT_ARENA));
    }
    options.rollouts = options.rollouts.encoding(encoding(&args.narrow, !args.no_checksums));
    options.journal.clone_from(&args.journal);
    prepare(&options)?;
    if let Some(file) = &args.handle_out {
        files::check_place(file)?; // while nothing is put
    }
    let input = args.input.input();
    if options.config.transport != featurestore::TransportChoice::Store {
        input.check_fits(options.memory.unwrap_or(DEFAULT_ARENA))?;
    }
    let rollout = input.rollout()?;
    let runtime = runtime(2, 8)?;
    runtime.block_on(async {
        let endpoint = open(options).await?;
        let end = endpoint.keeps_bytes().then(|| end_of_life(true)).transpose()?;
        let rollouts = endpoint.rollouts();
        let start = Instant::now();
        let handle = match &args.name {
            Some(name) => rollouts.put_as(name, rollout).await?,
            None => rollouts.put(rollout).await?,
        };
        let took = start.elapsed();
        let text = handle.to_json()?;
        if let Some(file) = &args.handle_out
            && let Err(error) = files::write(file, &text)
        {
            return Err(forget(rollouts, &handle, error).await);
        }
        let stats = rollouts.stats();
        let said = say(json!({
            "handle": RawValue::from_string(text).expect("one JSON value"),
            "rows": handle.rows(),
            "data_bytes": handle.data_bytes(),
            "header_bytes": handle.header_bytes(),
            "transport": rollouts.info().scheme,
            "engine": rollouts.info().engine,
            "put_ms": millis(took),
            "gathered_bytes": stats.gathered_bytes,
            "copied_bytes": stats.copied_bytes,
            "stays": end.is_some(),
        }));
        match said {
            Err(error) if args.handle_out.is_none() => {
                return Err(forget(rollouts, &handle, error).await);
            }
            said => said?,
        }
        if let Some(end) = end {
            end.await;
            rollouts.cleanup([&handle]).await?;
        }
        endpoint.close().await
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Removes a rollout of which nobody could be told, because of `error`.
async fn forget(rollouts: &RolloutTransport, handle: &Handle, error: Error) -> Error {
    match rollouts.cleanup([handle]).await {
        Ok(_) => error,
        Err(left) => error.with("left_behind", left),
    }
}

pub(super) fn get(args: &GetArgs) -> Result<ExitCode> {
    let handle = handle(&args.handle)?;
    with_reader(&args.transport, async |endpoint| {
        let rollouts = endpoint.rollouts();
        let end = args.hold.then(|| end_of_life(true)).transpose()?;
        let mut held = None;
        let start = Instant::now();
        let fields: Vec<&str> = args.fields.iter().map(String::as_str).collect();
        let mut report = if !args.rows.is_empty() {
            let set = rollouts.get_rows(&handle, &fields, &args.rows, None).await?;
            let took = start.elapsed();
            let bytes = |rows: &rollout_codec::transport::FieldRows| {
                let lengths = rows.rows.iter().map(|row| row.as_ref().map(|row| row.len()));
                json!({"dtype": rows.dtype.map(Dtype::name), "row_bytes": lengths.collect::<Vec<_>>()})
            };
            let fields: serde_json::Map<_, _> =
                set.fields.iter().map(|(name, rows)| (name.clone(), bytes(rows))).collect();
            json!({"fields": fields, "get_ms": millis(took)})
        } else {
            let sample = match fields.is_empty() {
                true => rollouts.get(&handle).await?,
                false => rollouts.get_fields(&handle, &fields).await?,
            };
            let took = start.elapsed();
            let mut rollout = rollout_codec::Rollout::default();
            let header = sample.header();
            for field in header.fields().filter(|f| f.kind == "ragged") {
                if fields.is_empty() || fields.contains(&field.name) {
                    let column = sample.view().column(field.name)?;
                    rollout.non_tensor.insert(field.name.to_owned(), column);
                }
            }
            if !header.fields().any(|field| !field.checksums) {
                sample.view().verify(2)?;
            }
            let sums = payload_checksums(&rollout)?.into_iter().map(|(name, sum, elements)| {
                (name, json!({"checksum": format!("{sum:016x}"), "elements": elements}))
            });
            let sums: serde_json::Map<_, _> = sums.collect();
            held = Some(sample);
            json!({"fields": sums, "get_ms": millis(took)})
        };
        held.take_if(|_| end.is_none());
        if args.cleanup {
            rollouts.cleanup([&handle]).await?;
        }
        let stats = rollouts.stats();
        let about = report.as_object_mut().expect("just made");
        for (name, value) in [
            ("rows", handle.rows()),
            ("data_bytes", handle.data_bytes()),
            ("viewed_bytes", stats.viewed_bytes),
            ("fetched_bytes", stats.fetched_bytes),
            ("shared_bytes", stats.shared_bytes),
            ("copied_bytes", stats.copied_bytes),
        ] {
            about.insert(name.to_owned(), value.into());
        }
        about.insert("transport".into(), rollouts.info().scheme.clone().into());
        say(&report)?;
        if let Some(end) = end {
            end.await;
        }
        drop(held);
        Ok(())
    })
}

pub(super) fn cleanup(args: &CleanupArgs) -> Result<ExitCode> {
    if !args.r#ref.is_empty() {
        say(json!({"removed_objects": files::cleanup(&args.r#ref, &args.transport)?}))?;
        return Ok(ExitCode::SUCCESS);
    }
    let handles = args.handles.iter().map(|file| handle(file)).collect::<Result<Vec<_>>>()?;
    with_reader(&args.transport, async |endpoint| {
        let report = endpoint.rollouts().cleanup(&handles).await?;
        say(serde_json::to_string(&report).expect("plain data"))
    })
}

pub(super) fn sweep(args: &SweepArgs) -> Result<ExitCode> {
    let mut options = args.transport.over_store().options(None)?;
    // Producers make the folder; one that nobody made is a mistyped one.
    args.journal.read_dir().map_err(|e| {
        Error::io("sweep", e)
            .with("journal", args.journal.display())
            .remedy("name the folder that producers were given as --journal")
    })?;
    options.journal = Some(args.journal.clone());
    prepare(&options)?;
    let swept: Result<Vec<String>> = runtime(2, 8)?.block_on(async {
        let endpoint = open(options).await?;
        let done = endpoint.rollouts().sweep().await;
        let closed = endpoint.close().await;
        let report = done?;
        say(serde_json::to_string(&report).expect("plain data"))?;
        match closed {
            // Said already: what could not be removed is left to the next sweep.
            Err(error) if report.left > 0 && error.kind() == ErrorKind::Busy => {}
            closed => closed?,
        }
        Ok(report.unreadable)
    });
    let unreadable = swept?;
    for problem in &unreadable {
        note(format_args!("featurestore: {problem}"));
    }
    Ok(if unreadable.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

pub(super) fn inspect(args: &InspectArgs) -> Result<ExitCode> {
    if let (Some(objects), Some(reference)) = (&args.objects, &args.r#ref) {
        return files::inspect(objects, reference, args.json);
    }
    let handle = handle(args.handle.as_deref().expect("the flags need one of them"))?;
    with_reader(&args.transport, async |endpoint| {
        let rollouts = endpoint.rollouts();
        let start = Instant::now();
        let fields = match args.header_only {
            true => inspect_header(&rollouts.header(&handle).await?, None)?,
            false => {
                let sample = rollouts.get(&handle).await?;
                inspect_header(sample.header(), Some(sample.view()))?
            }
        };
        let took = start.elapsed();
        if args.json {
            return say(json!({
                "rows": handle.rows(),
                "data_bytes": handle.data_bytes(),
                "header_bytes": handle.header_bytes(),
                "generation": handle.generation(),
                "fields": fields,
                "inspect_ms": millis(took),
            }));
        }
        say(format_args!(
            "{} rows, {} bytes of data, {} bytes of header",
            handle.rows(),
            handle.data_bytes(),
            handle.header_bytes()
        ))?;
        say(format_args!(
            "{:<28} {:<18} {:<13} {:<10} {:>14}  checksum",
            "field", "section", "kind", "type", "bytes"
        ))?;
        fields.iter().try_for_each(line)
    })
}

fn line(field: &FieldReport) -> Result<()> {
    let checked = match field.checked {
        Some(true) => "matches",
        Some(false) => "none",
        None => "not compared",
    };
    let dtype = match (&field.dtype, &field.narrowed) {
        (Some(dtype), Some(narrowed)) => format!("{dtype} as {narrowed}"),
        (Some(dtype), None) => dtype.clone(),
        _ => "-".into(),
    };
    say(format_args!(
        "{:<28} {:<18} {:<13} {:<10} {:>14}  {checked}",
        field.name, field.section, field.kind, dtype, field.bytes
    ))
}

/// Runs `work` with a reader's endpoint, which is closed afterwards.
fn with_reader(
    args: &TransportArgs,
    work: impl AsyncFnOnce(&Endpoint) -> Result<()>,
) -> Result<ExitCode> {
    let options = args.options(None)?;
    prepare(&options)?;
    runtime(2, 8)?.block_on(async {
        let endpoint = open(options).await?;
        let done = work(&endpoint).await;
        let closed = endpoint.close().await;
        done.and(closed)
    })?;
    Ok(ExitCode::SUCCESS)
}

/// A handle has a few hundred bytes, and the line of put around it a few thousand.
const MAX_HANDLE_BYTES: u64 = 1 << 20;

/// The handle in a file, alone or in the line that put prints.
fn handle(path: &Path) -> Result<Handle> {
    let bytes = read_at_most("read handle", path, MAX_HANDLE_BYTES)?;
    let parsed: Option<Value> = serde_json::from_slice(&bytes).ok();
    let inner = parsed.as_ref().and_then(|line| line.get("handle"));
    let parsed = match inner {
        // What put prints has the handle with the order of its fields changed: no matter.
        Some(handle) => Handle::parse(handle.to_string().as_bytes()),
        None => Handle::parse(bytes.trim_ascii()),
    };
    parsed.map_err(|e| e.with("file", path.display()))
}

pub(super) fn millis(time: std::time::Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// Something that only a process of the other side can have done.
pub(super) fn unexpected(why: &'static str) -> Error {
    Error::new(ErrorKind::Unexpected, "bench rollouts", why)
}
