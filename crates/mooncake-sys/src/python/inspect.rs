//! What an installed wheel is and can do, found out by importing it.

use std::path::PathBuf;

use transport_core::Result;

use super::{Interpreter, object::Gil};

/// Flags of `mooncake.engine` that say what a build can do.
const FLAGS: [&std::ffi::CStr; 6] = [
    c"SUPPORT_CUDA",
    c"SUPPORT_MNNVL",
    c"SUPPORT_INTRA_NVLINK",
    c"SUPPORT_EFA",
    c"SUPPORT_HIP",
    c"SUPPORT_ASCEND",
];

/// An imported wheel.
#[derive(Debug)]
#[non_exhaustive]
pub struct WheelFacts {
    /// The library of the interpreter.
    pub libpython: PathBuf,
    /// File of the native module of the store, or why it cannot be imported.
    pub store: Result<PathBuf>,
    /// File of the native module of the transfer engine, or why it cannot be imported.
    pub engine: Result<PathBuf>,
    /// What the transfer engine's build says it can do, by name; a flag that it does not have is
    /// left out.
    pub flags: Vec<(String, bool)>,
}

impl Interpreter {
    /// Imports the wheel's modules and looks at them. Starts neither store nor engine.
    pub fn inspect(&self) -> Result<WheelFacts> {
        let libpython = self.library().to_owned();
        self.run(|gil| {
            let mut flags = Vec::new();
            if let Ok(engine) = gil.import(c"mooncake.engine") {
                for name in FLAGS {
                    if let Ok(flag) = engine.attribute(name) {
                        let name = name.to_string_lossy().into_owned();
                        flags.push((name, flag.as_number()? != 0));
                    }
                }
            }
            Ok(WheelFacts {
                libpython,
                store: file(gil, &[c"mooncake._store", c"mooncake.store"]),
                engine: file(gil, &[c"mooncake.engine"]),
                flags,
            })
        })
    }
}

/// File of the first of these modules that can be imported, or why the last cannot.
fn file(gil: Gil<'_>, modules: &[&std::ffi::CStr]) -> Result<PathBuf> {
    let mut found = modules
        .iter()
        .map(|name| gil.import(name)?.attribute(c"__file__")?.as_text().map(PathBuf::from));
    let first = found.next().expect("there are names");
    found.fold(first, |best, next| best.or(next))
}
