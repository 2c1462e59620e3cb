//! Opening libraries and resolving tables of C functions.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};
use transport_core::{Error, ErrorKind, Result};

use crate::Search;

/// A library that stays open for good, and the file it came from.
pub(crate) struct Opened {
    pub(crate) library: &'static Library,
    pub(crate) file: PathBuf,
    /// Places that were looked at before.
    pub(crate) search: Search,
}

/// Who sees the symbols of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Only those who ask this library.
    Local,
    /// Every library opened later, which extension modules expect of libpython.
    #[cfg_attr(not(feature = "mooncake-python"), expect(dead_code))]
    Global,
}

/// Opens a library for good.
pub(crate) fn open_file(path: &Path, scope: Scope) -> Result<&'static Library, libloading::Error> {
    let flags = match scope {
        Scope::Local => RTLD_NOW | RTLD_LOCAL,
        Scope::Global => RTLD_NOW | RTLD_GLOBAL,
    };
    // SAFETY: opening runs the library's initialisers. Which file that is was the choice of who set
    // the path or installed the package; nothing here can check more.
    let library = unsafe { Library::open(Some::<&OsStr>(path.as_ref()), flags) }?;
    Ok(Box::leak(Box::new(library)))
}

/// Opens libraries that others need and would not find.
pub(crate) fn preload(files: &[PathBuf]) -> Result<()> {
    for path in files {
        if let Err(why) = open_file(path, Scope::Local) {
            let mut search = Search::default();
            search.missed(path.display(), why);
            let remedy = "name a file that the loader can open";
            return Err(search.error("load library", "library to load first", remedy));
        }
    }
    Ok(())
}

impl Opened {
    /// Address of a function that must be there.
    pub(crate) fn function(&self, name: &'static str, what: &'static str) -> Result<*mut ()> {
        self.optional(name).ok_or_else(|| {
            let mut search = self.search.clone();
            search.missed(self.file.display(), format_args!("has no {name}"));
            Error::new(ErrorKind::NotFound, "load library", format!("the library is not a {what}"))
                .with("file", self.file.display())
                .with("missing_symbol", name)
                .with("tried", search)
                .remedy("name the file of a library with this interface")
        })
    }

    /// Address of a function that may be there.
    pub(crate) fn optional(&self, name: &'static str) -> Option<*mut ()> {
        // SAFETY: only the address is taken; whoever calls it states its type.
        let symbol = unsafe { self.library.get::<*mut ()>(name.as_bytes()) }.ok()?;
        let address = symbol.into_raw().cast::<()>();
        (!address.is_null()).then_some(address)
    }
}

/// Declares a table of C functions: one field each, resolved by name.
macro_rules! table {
    (
        $(#[$doc:meta])* $name:ident is $what:literal;
        needed { $(
            $field:ident = $symbol:literal: fn($($argument:ty),* $(,)?) $(-> $answer:ty)?;
        )* }
        optional { $(
            $maybe:ident = $maybe_symbol:literal:
                fn($($maybe_argument:ty),* $(,)?) $(-> $maybe_answer:ty)?;
        )* }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) $(-> $answer)?,)*
            $(pub(super) $maybe: Option<unsafe extern "C" fn($($maybe_argument),*) $(-> $maybe_answer)?>,)*
        }

        impl $name {
            pub(crate) fn resolve(opened: &$crate::loading::Opened) -> transport_core::Result<Self> {
                Ok(Self {
                    $($field: {
                        let address = opened.function($symbol, $what)?;
                        // SAFETY: the symbol has this name in the header that the table is written
                        // from, and there it has this type.
                        unsafe {
                            std::mem::transmute::<
                                *mut (),
                                unsafe extern "C" fn($($argument),*) $(-> $answer)?,
                            >(address)
                        }
                    },)*
                    $($maybe: opened.optional($maybe_symbol).map(|address| {
                        // SAFETY: as above.
                        unsafe {
                            std::mem::transmute::<
                                *mut (),
                                unsafe extern "C" fn($($maybe_argument),*) $(-> $maybe_answer)?,
                            >(address)
                        }
                    }),)*
                })
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }
    };
}
pub(crate) use table;
