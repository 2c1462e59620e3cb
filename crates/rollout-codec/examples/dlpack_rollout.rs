//! A library with a C interface that gives rows and fields of a rollout by DLPack: what an extension
//! module does, and what the test `dlpack` loads into Python.
#![allow(unsafe_code)] // names that the loader finds

use std::{
    ffi::c_void,
    ptr::null_mut,
    sync::{Arc, Mutex, OnceLock, Weak},
};

use rollout_codec::{
    Column, Dense, Library, Ragged, Rollout, RowKind, Scalars, Template,
    native::{Header, Options, Plan, RolloutView},
};
use transport_core::{
    Dtype, RegionMut, TensorMeta,
    memory::dlpack::{Export, Version},
};

/// Fields, in the order in which Python counts them.
const FIELDS: [&str; 4] = ["tokens", "experts", "sums", "rewards"];

/// Rows of 0, 1, 2, … elements, then a null one; each byte counts on.
fn rows(dtype: Dtype, after: &[u64]) -> Ragged<'static> {
    let template = Template { before: Box::default(), after: after.into() };
    let width = (dtype.size() * after.iter().product::<u64>()) as usize;
    let mut column = Ragged::new(dtype, RowKind::Torch, template).expect("a template");
    let mut next = 0u8;
    for len in [0, 1, 2, 3] {
        let row: Vec<u8> = (0..len * width).map(|i| next.wrapping_add(i as u8)).collect();
        next = next.wrapping_add(row.len() as u8);
        column.push(row).expect("whole elements");
    }
    column.push_null();
    column
}

/// Memory that a view keeps, while it does.
static KEPT: OnceLock<Weak<()>> = OnceLock::new();

/// A rollout, encoded and viewed.
fn view() -> RolloutView {
    let mut rollout = Rollout::default();
    let numbers = |n: u32| (0..n).flat_map(|i| (i as f32).to_le_bytes()).collect::<Vec<u8>>();
    let sums = TensorMeta::new(Dtype::Float32, [5]).expect("five");
    let sums = Dense::new(Library::Torch, sums, numbers(5)).expect("five numbers");
    let rewards = Scalars::new(Dtype::Float32, numbers(5)).expect("five numbers");
    let columns = [
        Column::Ragged(rows(Dtype::Int64, &[])),
        Column::Ragged(rows(Dtype::Bfloat16, &[3, 2])),
        Column::Dense(sums),
        Column::Scalars(rewards),
    ];
    let columns = FIELDS.iter().zip(columns).map(|(name, column)| (name.to_string(), column));
    rollout.non_tensor.extend(columns);
    let plan = Plan::new(&rollout, &Options::default()).expect("a plan");
    let mut region = RegionMut::zeroed(plan.data_bytes() as usize).expect("memory");
    let header = plan.encode_into(region.as_mut_bytes().expect("host memory"), 1).expect("encoded");
    let guard = Arc::new(());
    let _ = KEPT.set(Arc::downgrade(&guard));
    let header = Header::parse(&header).expect("just written");
    RolloutView::new(header, region.keeping(guard).freeze()).expect("as long as it says")
}

/// The one view of this process.
static VIEW: Mutex<Option<RolloutView>> = Mutex::new(None);

/// Whether the memory of the rollout is still there.
#[unsafe(no_mangle)]
pub extern "C" fn is_kept() -> bool {
    KEPT.get().is_some_and(|kept| kept.strong_count() > 0)
}

/// Makes the rollout, once.
#[unsafe(no_mangle)]
pub extern "C" fn begin_view() {
    *VIEW.lock().expect("no panic") = Some(view());
}

/// Drops the view.
#[unsafe(no_mangle)]
pub extern "C" fn end_view() {
    *VIEW.lock().expect("no panic") = None;
}

/// Row `row` of a field; -1 is the field itself, -2 and -3 are the values and offsets of all rows.
/// `minor` is the newest version 1 that the consumer understands, or less than 0 for the form
/// without a version. Null where there is no such row or array.
#[unsafe(no_mangle)]
pub extern "C" fn export(field: u32, row: i64, minor: i32) -> *mut c_void {
    let view = VIEW.lock().expect("no panic");
    let view = view.as_ref().expect("begun");
    let name = FIELDS[field as usize];
    let ragged = || view.ragged(name).ok();
    let export = match row {
        -1 => view.dlpack(name).ok(),
        -2 => ragged().and_then(|rows| rows.flat()).map(|(values, _)| Export::read_only(values)),
        -3 => ragged().and_then(|rows| rows.flat()).map(|(_, at)| Export::read_only(at)),
        row => ragged().and_then(|rows| rows.row_dlpack(row as usize)),
    };
    let Some(export) = export else { return null_mut() };
    let raw = match u32::try_from(minor) {
        Ok(minor) => {
            export.versioned(Version { major: 1, minor }).map(|e| e.into_raw().as_ptr().cast())
        }
        Err(_) => export.unversioned().map(|e| e.into_raw().as_ptr().cast()),
    };
    raw.unwrap_or(null_mut())
}
