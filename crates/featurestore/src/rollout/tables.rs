//! Rollouts of tables: Arrow IPC and Parquet files (feature `arrow`).

use std::{
    io::{BufReader, Read, Seek},
    path::{Path, PathBuf},
};

use arrow_array::{ArrayRef, RecordBatch};
use arrow_ipc::reader::{FileReader, StreamReader};
use indexmap::IndexMap;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use rollout_codec::{Column, Rollout};
use transport_core::{Error, ErrorKind, Result};

use crate::files::open_regular;

const OPERATION: &str = "read rollout input";

/// Reads the rows of all files, in this order. Every file has the same fields of the same types.
pub(super) fn read(files: &[PathBuf]) -> Result<Rollout<'static>> {
    let mut chunks: IndexMap<String, Vec<ArrayRef>> = IndexMap::new();
    for (i, file) in files.iter().enumerate() {
        let named = |error: Error| error.with("file", file.display());
        for (j, batch) in batches(file).map_err(named)?.into_iter().enumerate() {
            let schema = batch.schema();
            let names = || schema.fields().iter().map(|field| field.name().as_str());
            let first = i == 0 && j == 0;
            if !first && !names().eq(chunks.keys().map(String::as_str)) {
                return Err(named(refuse("other fields than the first file"))
                    .with(
                        "expected",
                        chunks.keys().map(String::as_str).collect::<Vec<_>>().join(" "),
                    )
                    .with("found", names().collect::<Vec<_>>().join(" ")));
            }
            for (field, column) in schema.fields().iter().zip(batch.columns()) {
                let known = chunks.entry(field.name().clone()).or_default();
                if first && !known.is_empty() {
                    return Err(named(refuse("a field occurs twice")).with("field", field.name()));
                }
                known.push(column.clone());
            }
        }
    }
    let mut rollout = Rollout::default();
    for (name, chunks) in chunks {
        let column = Column::from_arrow(&chunks).map_err(|e| e.with("field", &name))?;
        rollout.non_tensor.insert(name, column);
    }
    Ok(rollout)
}

/// Whether this is a table by its name.
pub(super) fn is_table(path: &Path) -> bool {
    let known = ["arrow", "arrows", "feather", "ipc", "parquet"];
    path.extension().is_some_and(|e| known.iter().any(|known| e.eq_ignore_ascii_case(known)))
}

fn refuse(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidInput, OPERATION, why)
}

/// The batches of one file, which says by its first bytes what it is. One batch without rows if
/// there are none, so that fields and types are known.
fn batches(path: &Path) -> Result<Vec<RecordBatch>> {
    let failed = |e| Error::io(OPERATION, e);
    let mut file = open_regular(path).map_err(failed)?;
    let mut magic = Vec::new();
    (&mut file).take(6).read_to_end(&mut magic).map_err(failed)?;
    file.rewind().map_err(failed)?;
    let corrupt = |error: Box<dyn std::error::Error + Send + Sync>| {
        Error::new(ErrorKind::Corrupt, OPERATION, "the file cannot be read")
            .with("why", &error)
            .source(error)
    };
    let (schema, batches) = match &magic[..] {
        magic if magic.starts_with(b"PAR1") => {
            let reader = ParquetRecordBatchReaderBuilder::try_new(file)
                .and_then(ParquetRecordBatchReaderBuilder::build)
                .map_err(|e| corrupt(e.into()))?;
            (arrow_array::RecordBatchReader::schema(&reader), reader.collect::<Result<Vec<_>, _>>())
        }
        b"ARROW1" => {
            let reader =
                FileReader::try_new(BufReader::new(file), None).map_err(|e| corrupt(e.into()))?;
            (reader.schema(), reader.collect())
        }
        _ => {
            let reader =
                StreamReader::try_new(BufReader::new(file), None).map_err(|e| corrupt(e.into()))?;
            (reader.schema(), reader.collect())
        }
    };
    let batches: Vec<RecordBatch> = batches.map_err(|e| corrupt(e.into()))?;
    Ok(match batches.is_empty() {
        true => vec![RecordBatch::new_empty(schema)],
        false => batches,
    })
}
