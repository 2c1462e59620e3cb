//! Mooncake's C interfaces, opened by the dynamic loader at run time.
//!
//! The tables are written by hand from `store_c.h` and `transfer_engine_c.h`; constants below check
//! the layout of every struct that crosses. Libraries are opened with local scope, because their
//! symbols are unprefixed (`openSegment`) and several copies may live in one process, and are never
//! closed, because their threads cannot be ended.
//!
//! # Where a library is looked for
//! 1. the path in [`LibraryOptions`];
//! 2. the path in `MOONCAKE_STORE_LIBRARY` or `MOONCAKE_TE_LIBRARY`;
//! 3. beside an installed `mooncake` package: in `FEATURESTORE_MOONCAKE_VENV`, `VIRTUAL_ENV` and
//!    `CONDA_PREFIX`;
//! 4. by its bare name, in the loader's own path.
//!
//! A place that was named (1, 2) and does not do is an error; it is never passed over for another.
//!
//! # C++ exceptions
//! Every function of the store's interface catches everything and answers -1. **No function of the
//! transfer engine's interface catches anything**: an exception in one of them ends the process
//! (`bad_alloc` and errors of threads and JSON are the likely ones, in `createTransferEngine`,
//! `installTransport`, `openSegment` and `registerLocalMemory`). What can be kept from happening is
//! checked here before the call: strings without NUL, non-null pointers, lengths above zero, a
//! state that is known.

mod engine;
mod store;

pub use engine::{CEngine, EngineLibrary};
pub use store::{CStore, StoreLibrary};

use std::{
    ffi::CString,
    fmt,
    path::{Path, PathBuf},
};

use transport_core::{Error, ErrorKind, Result};

use crate::{
    ProviderInfo, ProviderKind, Search,
    loading::{Opened, Scope, open_file, preload, table},
    search,
};

const LOAD: &str = "load Mooncake library";

/// Which library to open, and what it needs first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LibraryOptions {
    /// The file itself; searched for if `None`.
    pub path: Option<PathBuf>,
    /// Libraries to open before it, in order, because the loader would not find them: pip keeps
    /// `libcudart.so.13` where only Python looks, for example.
    pub preload: Vec<PathBuf>,
}

impl LibraryOptions {
    /// Opens exactly this file.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: Some(path.into()), preload: Vec::new() }
    }

    /// Opens another library first.
    #[must_use]
    pub fn preload(mut self, path: impl Into<PathBuf>) -> Self {
        self.preload.push(path.into());
        self
    }
}

/// Finds and opens a library as the module says.
fn open(
    options: &LibraryOptions,
    variable: &'static str,
    file_name: &'static str,
    what: &'static str,
) -> Result<Opened> {
    let remedy = "set the variable to the file of the library, or install a package that brings it";
    preload(&options.preload)?;
    let mut search = Search::default();
    let named = match &options.path {
        Some(path) => Some(path.clone()),
        None => {
            search.missed("the path option", "not given");
            std::env::var_os(variable).filter(|v| !v.is_empty()).map(PathBuf::from)
        }
    };
    if let Some(path) = named {
        return match open_file(&path, Scope::Local) {
            Ok(library) => Ok(Opened { library, file: path, search }),
            Err(why) => {
                search.missed(path.display(), why);
                Err(search.error(LOAD, what, remedy))
            }
        };
    }
    search.missed(variable, "not set");
    let packages = search::site_packages(None);
    if packages.is_empty() {
        search.missed("an installed mooncake package", "no environment is named by a variable");
    }
    for packages in packages {
        let path = packages.join("mooncake").join(file_name);
        if !path.exists() {
            search.missed(path.display(), "no such file");
            continue;
        }
        match open_file(&path, Scope::Local) {
            Ok(library) => return Ok(Opened { library, file: path, search }),
            Err(why) => search.missed(path.display(), why),
        }
    }
    match open_file(Path::new(file_name), Scope::Local) {
        Ok(library) => Ok(Opened { library, file: file_name.into(), search }),
        Err(why) => {
            search.missed(format_args!("{file_name} in the loader's path"), why);
            Err(search.error(LOAD, what, remedy))
        }
    }
}

/// Text for a C function.
fn c_text(operation: &'static str, what: &'static str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| {
        Error::new(ErrorKind::InvalidInput, operation, format!("the {what} holds a NUL"))
            .with("found", format_args!("{text:?}"))
    })
}

/// File and version of an opened library, the file as the system has it mapped.
fn info(opened: &Opened, function: *mut ()) -> ProviderInfo {
    let file = mapped_file(function as usize).unwrap_or_else(|| opened.file.clone());
    let version = file
        .parent()
        .and_then(Path::parent)
        .and_then(search::distribution)
        .map(|(package, version)| format!("{version} [{package}]"));
    ProviderInfo::new(ProviderKind::CLibrary, file).version(version)
}

/// The file that is mapped at an address.
fn mapped_file(address: usize) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let start = usize::from_str_radix(start, 16).ok()?;
        let end = usize::from_str_radix(end, 16).ok()?;
        let path = &rest[rest.find('/')?..];
        (start..end).contains(&address).then(|| PathBuf::from(path))
    })
}

fn closed(operation: &'static str) -> Error {
    Error::new(ErrorKind::Closed, operation, "the Mooncake client was closed")
}

/// A pointer that the library made and that it allows on any thread.
#[derive(Clone, Copy)]
struct Handle(*mut std::ffi::c_void);

// SAFETY: both libraries lock their own state; upstream's Rust wrappers say the same of the type.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}", self.0)
    }
}
