//! The trait over the real driver.

mod calls;

use std::{
    fmt,
    path::Path,
    sync::{Arc, OnceLock},
};

use transport_core::{Error, ErrorKind, Result};

use super::{
    CudaApi, DriverInfo, During, Optional,
    symbols::{LoadError, Symbols},
};

/// Oldest CUDA version that a driver must serve: that of the calls looked up as required.
pub const MIN_CUDA_VERSION: (u32, u32) = (11, 4);

/// The driver of this machine.
pub(super) struct Driver {
    sys: Symbols,
    info: DriverInfo,
}

/// The driver of this machine, loaded and initialised at the first call.
///
/// # Errors
/// [`ErrorKind::Unsupported`] where there is no driver, or one too old, naming what it lacks.
/// Never panics.
pub fn driver() -> Result<Arc<dyn CudaApi>> {
    // Loaded once; an error is asked for again, since a driver may be installed meanwhile.
    static LOADED: OnceLock<Arc<Driver>> = OnceLock::new();
    if let Some(loaded) = LOADED.get() {
        return Ok(loaded.clone());
    }
    let (sys, library) = Symbols::load().map_err(explain)?;
    let driver = Driver::start(sys, library)?;
    Ok(LOADED.get_or_init(|| Arc::new(driver)).clone())
}

/// The driver of one library file; for machines where it lies somewhere else.
///
/// # Errors
/// As [`driver`].
pub fn driver_at(library: &Path) -> Result<Arc<dyn CudaApi>> {
    let (sys, library) = Symbols::load_from(library).map_err(explain)?;
    Ok(Arc::new(Driver::start(sys, library)?))
}

const LOAD: &str = "load CUDA driver";

fn explain(error: LoadError) -> Error {
    match error {
        LoadError::NoLibrary(why) => {
            Error::new(ErrorKind::Unsupported, LOAD, "this machine has no CUDA driver")
                .with("loader", why)
                .remedy("install the NVIDIA driver, or give the container access to the GPU")
        }
        LoadError::Missing { library, symbols } => {
            Error::new(ErrorKind::Unsupported, LOAD, "the CUDA driver is too old")
                .with("library", library)
                .with("missing", symbols.join(" "))
                .remedy(format!(
                    "install a driver for CUDA {}.{} or newer",
                    MIN_CUDA_VERSION.0, MIN_CUDA_VERSION.1
                ))
        }
    }
}

impl Driver {
    fn start(sys: Symbols, library: String) -> Result<Self> {
        // SAFETY: the one valid argument; may be called any number of times.
        unsafe { sys.cuInit(0) }.during(LOAD).map_err(|e| {
            e.with("library", &library)
                .remedy("check that the GPU and its device files are visible to this process")
        })?;
        let mut version = 0;
        // SAFETY: the out-pointer is to a live local.
        unsafe { sys.cuDriverGetVersion(&mut version) }.during(LOAD)?;
        let version = ((version / 1000) as u32, (version % 1000 / 10) as u32);
        if version < MIN_CUDA_VERSION {
            return Err(Error::new(ErrorKind::Unsupported, LOAD, "the CUDA driver is too old")
                .with("library", library)
                .with("expected", format!("{}.{}", MIN_CUDA_VERSION.0, MIN_CUDA_VERSION.1))
                .with("found", format!("{}.{}", version.0, version.1))
                .remedy("install a newer driver"));
        }
        let optional = [
            (Optional::BatchCopy, "cuMemcpyBatchAsync"),
            (Optional::DmaBufExport, "cuMemGetHandleForAddressRange"),
        ];
        let optional =
            optional.into_iter().filter(|(_, name)| sys.has(name)).map(|(call, _)| call).collect();
        Ok(Self { sys, info: DriverInfo { version, library, optional } })
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("info", &self.info).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// A library with the driver's names, whose `cuInit` returns `code` and which serves `version`.
    /// Every other call succeeds and does nothing.
    fn pretend(folder: &Path, name: &str, code: u32, version: u32, lacks: &str) -> Arc<Path> {
        let mut source = format!(
            "#[unsafe(no_mangle)] pub extern \"C\" fn cuInit(_: u32) -> u32 {{ {code} }}\n\
             #[unsafe(no_mangle)] pub unsafe extern \"C\" fn cuDriverGetVersion(v: *mut u32) -> u32 \
             {{ unsafe {{ *v = {version} }}; 0 }}\n"
        );
        for symbol in Symbols::REQUIRED {
            if !["cuInit", "cuDriverGetVersion", lacks].contains(symbol) {
                source += "#[unsafe(no_mangle)] #[allow(non_snake_case)] pub extern \"C\" fn ";
                source += symbol;
                source += "() -> u32 { 0 }\n";
            }
        }
        let file = folder.join(format!("{name}.rs"));
        std::fs::write(&file, source).unwrap();
        let library = folder.join(format!("lib{name}.so"));
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let made = Command::new(rustc)
            .args(["--edition=2024", "--crate-type=cdylib", "-Cpanic=abort", "-o"])
            .args([&library, &file])
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        library.into()
    }

    #[test]
    fn drivers_that_will_not_do_are_errors_that_say_so() {
        let folder = std::env::temp_dir().join(format!("pretended-driver-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let refused = |name, code, version, lacks| {
            let library = pretend(&folder, name, code, version, lacks);
            driver_at(&library).unwrap_err()
        };
        let old = refused("old", 0, 11_030, "");
        assert_eq!(old.kind(), ErrorKind::Unsupported);
        assert_eq!((old.context("expected"), old.context("found")), (Some("11.4"), Some("11.3")));

        let lacking = refused("lacking", 0, 12_000, "cuMemCreate");
        assert_eq!(lacking.kind(), ErrorKind::Unsupported);
        assert_eq!(lacking.context("missing"), Some("cuMemCreate"));
        assert!(lacking.context("library").is_some_and(|at| at.ends_with("liblacking.so")));

        // What the library of a toolkit without a driver returns.
        let stub = refused("stub", 34, 12_000, "");
        assert!(stub.to_string().contains("CUDA_ERROR_STUB_LIBRARY (34)"), "{stub}");

        let good = pretend(&folder, "good", 0, 12_080, "");
        let api = driver_at(&good).unwrap();
        assert_eq!(api.driver().version, (12, 8));
        assert_eq!(api.driver().optional, [], "looked up, and not there");
        let none = driver_at(&folder.join("libnone.so")).unwrap_err();
        assert!(none.to_string().contains("no CUDA driver"), "{none}");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn this_machine_has_a_driver_or_says_why_not() {
        match driver() {
            Ok(api) => assert!(api.driver().version >= MIN_CUDA_VERSION),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}"),
        }
    }
}
